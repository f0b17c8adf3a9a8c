/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_logprob.h - log-probability, entropy and loss straight from hidden states: the product
 * with the lm_head and the loss of its logits, token chunk by token chunk, never the whole [T, Vl].
 *
 *   z_t = W h_t + b, then per token exactly what logprob.h says of z
 *   d_h = d_z W,  d_W += d_z^T h,  d_b += sum_t d_z
 *
 * Three ways through it, by what the caller knows and has room for:
 *
 *   logprob  forward, backward with any upstream gradient; logits made twice       4 products
 *   keep     the same, the logits kept in the caller's buffer meanwhile            3 products
 *   loss     upstream gradient known beforehand: colo_linear_logprob_loss() makes
 *            outputs and gradients in one pass                                     3 products
 *
 * Collectives over the vocabulary group: logprob and keep one all-gather of statistics in forward,
 * none in backward; loss one per chunk (none on a group of one). d_hidden adds one where asked. The
 * head's gathers and its reduce-scatter do not depend on chunks: one gather a pass that multiplies
 * by W, one reduce-scatter a pass that makes d_W.
 *
 * Tokens whose target is ignore_index take no part: rows of the others are packed on the device,
 * products run over max_valid rows (an upper bound the host knows), the host reads no count. The
 * hidden row of an ignored token is not read; its d_hidden row is 0.
 *
 * Only the sum over tokens in d_W and d_b runs chunk by chunk, so their last bits may depend on
 * the chunk size; nothing else does.
 */
#ifndef COLOBRIDGE_LINEAR_LOGPROB_H
#define COLOBRIDGE_LINEAR_LOGPROB_H

#include <colobridge/lm_head.h>
#include <colobridge/logprob.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_linear_logprob colo_linear_logprob_t;

typedef enum colo_linear_mode {
    COLO_LINEAR_AUTO = 0, /* keep when all logits fit into the budget, else logprob */
    COLO_LINEAR_LOGPROB = 1,
    COLO_LINEAR_KEEP = 2
} colo_linear_mode_t;

/** d_hidden over the vocabulary group: each rank's W gives a part of it. */
typedef enum colo_d_hidden {
    COLO_D_HIDDEN_PARTIAL = 0,       /* this rank's part; the caller sums */
    COLO_D_HIDDEN_ALL_REDUCE = 1,    /* the sum, on every rank */
    COLO_D_HIDDEN_REDUCE_SCATTER = 2 /* rank r: the sum, tokens [r T/W, (r+1) T/W); W divides T */
} colo_d_hidden_t;

/** The pass that a workspace is for. */
typedef enum colo_linear_pass {
    COLO_LINEAR_FORWARD = 0,
    COLO_LINEAR_BACKWARD = 1,
    COLO_LINEAR_LOSS = 2,
    COLO_LINEAR_INFERENCE = 3 /* a forward whose @saved is NULL */
} colo_linear_pass_t;

typedef struct colo_linear_logprob_config {
    size_t struct_size;
    colo_logprob_config_t logprob; /* chunk_size: tokens a chunk; 0 = from tokens and budget */
    colo_linear_mode_t mode;
    colo_dtype_t logits_dtype; /* of the workspace: the head's dtype, or f32 */
    size_t budget;             /* bytes for logits of ceil(V / W) columns: chunks are as large as it
                                  lets them be, but not below 2048 tokens; 0 = 1 GiB */
    colo_d_hidden_t d_hidden;
    bool frozen_hidden;          /* no d_hidden: its product is skipped */
    bool frozen_weight;          /* no d_weight, d_bias: theirs is */
    colo_dtype_t d_weight_dtype; /* as colo_lm_head_grads_t */
    bool d_weight_add;
    bool keep_in_place; /* keep: backward writes d_logits over the kept logits, which ends saved;
                           needs logits_dtype = the head's */
} colo_linear_logprob_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_CONFIG_INIT sizeof(colo_linear_logprob_config_t), {COLO_LOGPROB_CONFIG_INIT}, COLO_LINEAR_AUTO, COLO_F32, 0, COLO_D_HIDDEN_PARTIAL, false, false, COLO_F32, true, false
#else
#define COLO_LINEAR_LOGPROB_CONFIG_INIT                                                         \
    .struct_size = sizeof(colo_linear_logprob_config_t), .logprob = {COLO_LOGPROB_CONFIG_INIT}, \
    .d_weight_add = true
#endif

/** One call's tokens. */
typedef struct colo_linear_batch {
    const colo_tensor_t *hidden;  /* [T, H], the head's dtype; columns contiguous; the same on all
                                     ranks of the vocabulary group */
    const colo_tensor_t *targets; /* i64 [T], as colo_logprob_forward() */
    int64_t max_valid;            /* tokens whose target is not ignore_index are at most so many;
                                     < 0: T. More of them: COLO_ERR_ARG on the host; on a GPU the
                                     ones too many are NaN and counted in n_invalid */
} colo_linear_batch_t;

/**
 * Upstream gradient of each per-token output: factor * array[t], or just the factor where the array
 * is NULL; 0: no gradient through this output. With mean all three are divided by the valid tokens
 * of this rank, counted on the device (0 of them: gradient 0). For bf16 and f16 heads the largest
 * upstream gradient of the call multiplies after the products, in fp32: its size costs no digits.
 */
typedef struct colo_linear_upstream {
    double logp, entropy, loss;
    const void *d_logp, *d_entropy, *d_loss; /* [T] in the dtype of the outputs, or NULL */
    bool mean;
} colo_linear_upstream_t;

typedef struct colo_linear_grads {
    const colo_tensor_t *d_hidden; /* [T, H] ([T/W, H] after reduce-scatter), the head's dtype,
                                      written; NULL iff frozen_hidden */
    const colo_tensor_t *d_weight, *d_bias; /* as colo_lm_head_grads_t; NULL iff frozen_weight (or
                                               there is no bias) */
} colo_linear_grads_t;

/** What backward needs; caller's memory, filled by forward. Borrows hidden, targets, the buffer,
 * which may have moved to another aligned place: say so in @buffer. */
typedef struct colo_linear_logprob_saved {
    const colo_linear_logprob_t *of;
    colo_tensor_t hidden, targets;
    uint64_t hidden_version, targets_version, weight_version;
    int64_t max_valid;
    void *buffer;
    bool valid;
} colo_linear_logprob_saved_t;

/**
 * colo_linear_logprob_create() - all that hot calls must not make: handles, streams, events
 * @head:   sizes, dtype, memory and bias come from it; borrowed for the object's life
 * @group:  the vocabulary (tp) group, borrowed for the object's life; NULL is an error
 * One call at a time uses the object; any number of forwards may wait for their backward.
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM, COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_linear_logprob_create(colo_linear_logprob_t **linear,
                                                  const colo_linear_logprob_config_t *config,
                                                  colo_lm_head_t *head, colo_comm_t *group);
/** colo_linear_logprob_destroy() - local; takes NULL, leaves *linear NULL. Memory given to calls
 * stays the caller's */
COLO_API void colo_linear_logprob_destroy(colo_linear_logprob_t **linear);

/** colo_linear_logprob_mode() - AUTO resolved for @max_valid rows */
COLO_API colo_linear_mode_t colo_linear_logprob_mode(const colo_linear_logprob_t *linear,
                                                     int64_t max_valid);
/** colo_linear_logprob_chunk() - rows a chunk for @max_valid rows; from config and W only, so the
 *  same on all ranks, whatever their Vl */
COLO_API int64_t colo_linear_logprob_chunk(const colo_linear_logprob_t *linear, int64_t max_valid);
/** colo_linear_logprob_saved_size() - bytes of the buffer from forward to backward; in keep mode
 * the logits, too */
COLO_API colo_status_t colo_linear_logprob_saved_size(const colo_linear_logprob_t *linear,
                                                      int64_t tokens, int64_t max_valid,
                                                      size_t *bytes);
/** colo_linear_logprob_workspace_size() - exact bytes of one pass's workspace */
COLO_API colo_status_t colo_linear_logprob_workspace_size(const colo_linear_logprob_t *linear,
                                                          colo_linear_pass_t pass, int64_t tokens,
                                                          int64_t max_valid, size_t *bytes);

/**
 * colo_linear_logprob_forward() - logprob and keep modes
 * @out:       as colo_logprob_forward()
 * @saved:     out; NULL when there is no backward (inference; first run of a checkpoint)
 * @buffer:    colo_linear_logprob_saved_size() bytes, aligned, borrowed until the last
 * backward; NULL iff @saved is
 * @workspace: colo_linear_logprob_workspace_size() bytes, aligned, free after the call
 * The head is acquired (unless the caller has started or finished it) and released.
 * Special values, ignored and invalid targets: as colo_logprob_forward().
 * Errors:     COLO_ERR_ARG, COLO_ERR_SHAPE, COLO_ERR_STATE (the head is not bound); as
 *             colo_logprob_forward(); the head's
 */
COLO_API colo_status_t colo_linear_logprob_forward(colo_linear_logprob_t *linear,
                                                   const colo_linear_batch_t *batch,
                                                   const colo_logprob_out_t *out,
                                                   colo_linear_logprob_saved_t *saved, void *buffer,
                                                   void *workspace, colo_stream_t stream);
/**
 * colo_linear_logprob_backward() - gradients; @saved may be used again unless keep_in_place
 * Errors:  COLO_ERR_STATE, COLO_ERR_MODIFIED (hidden, targets or weight were written),
 * COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_linear_logprob_backward(colo_linear_logprob_t *linear,
                                                    colo_linear_logprob_saved_t *saved,
                                                    const colo_linear_upstream_t *upstream,
                                                    const colo_linear_grads_t *grads,
                                                    void *workspace, colo_stream_t stream);
/**
 * colo_linear_logprob_loss() - outputs and gradients in one pass; nothing is kept
 * The workspace holds two chunks of logits at most. Errors as forward.
 */
COLO_API colo_status_t colo_linear_logprob_loss(colo_linear_logprob_t *linear,
                                                const colo_linear_batch_t *batch,
                                                const colo_linear_upstream_t *upstream,
                                                const colo_logprob_out_t *out,
                                                const colo_linear_grads_t *grads, void *workspace,
                                                colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
