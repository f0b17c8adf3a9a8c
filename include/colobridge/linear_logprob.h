/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_logprob.h - log-probability, entropy and loss straight from hidden states: the product
 * with the lm_head and the loss of its logits, one chunk of tokens at a time, never the whole
 * [T, Vl].
 *
 *   z_t = W h_t + b, then for each token what logprob.h computes from z
 *   d_h = d_z W,  d_W += d_z^T h,  d_b += sum_t d_z
 *
 * With a LoRA, u_t = scale A h_t and z_t = W h_t + B u_t + b, and
 *
 *   d_u = scale d_z B,  d_h += d_u A,  d_A = sum_t d_u^T h,  d_B = sum_t d_z^T u
 *
 * W + scale B A, which has W's size, is never made. u and d_u have the head's dtype.
 *
 * There are four modes. They differ in what the caller knows, and in memory:
 *
 *   logprob  forward, backward with any upstream gradient; logits made twice       4 products
 *   keep     the same, but saved memory keeps the logits                           3 products
 *   early    upstream gradient known in forward but for one factor: saved memory
 *            keeps the gradients of the logits                                     3 products
 *   loss     upstream gradient known beforehand: colo_linear_logprob_loss() makes
 *            outputs and gradients in one pass                                     3 products
 *
 * Collectives over the vocabulary group: logprob and keep do one all-gather of statistics in
 * forward, none in backward. early and loss do one per chunk (none on a group of one). d_hidden
 * adds one if the config asks for it, and d_A is one more, a sum. The head's gathers and its reduce-scatter do not depend on
 * chunks: one gather per pass that multiplies by W, one reduce-scatter per pass that makes d_W.
 *
 * Ignored tokens take no part in products: the device compacts the rows of the others, products
 * run over max_valid rows, an upper bound that the host knows, and the host reads no count. The
 * hidden row of an ignored token is not read; its d_hidden row is 0.
 *
 * On GPUs of compute capability 9.0 the product of logits makes their statistics, too, tile by tile,
 * and forward of mode logprob, and each forward without saved, writes no logits. That takes a head of
 * bf16 or f16 whose hidden size is a multiple of 8 and whose rows begin at multiples of 16 bytes, and
 * neither LoRA, segments, class weights, temperatures of tokens, sum_p2 nor a support. Passes that keep
 * logits, or make gradients of them, have the product write them besides. Other calls, and other GPUs,
 * write logits chunk by chunk and read them; results differ in the last bits of fp32.
 *
 * Only the sums over tokens in d_W and d_b run chunk by chunk (in the loss pass several at once).
 * Their last bits may depend on the chunk size; nothing else does. Backward of logprob and keep
 * makes the logits of more rows, mostly of all, in blocks of columns; backward of early needs none.
 * Then d_W has no sums of chunks.
 */
#ifndef COLOBRIDGE_LINEAR_LOGPROB_H
#define COLOBRIDGE_LINEAR_LOGPROB_H

#include <colobridge/lm_head.h>
#include <colobridge/logprob.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_linear_logprob colo_linear_logprob_t;

typedef enum colo_linear_logprob_mode_t {
    COLO_LINEAR_LOGPROB_AUTO = 0, /* keep when all logits fit into the budget, else logprob */
    COLO_LINEAR_LOGPROB_LOGPROB = 1,
    COLO_LINEAR_LOGPROB_KEEP = 2,
    COLO_LINEAR_LOGPROB_EARLY = 3 /* colo_linear_logprob_early(); not of f64 heads */
} colo_linear_logprob_mode_t;

/** d_hidden over the vocabulary group. Each rank's W gives a partial sum. */
typedef enum colo_d_hidden_t {
    COLO_D_HIDDEN_PARTIAL = 0,       /* this rank's partial sum; the caller adds them */
    COLO_D_HIDDEN_ALL_REDUCE = 1,    /* the sum, on every rank */
    COLO_D_HIDDEN_REDUCE_SCATTER = 2 /* rank r: the sum, tokens [r T/W, (r+1) T/W); W divides T */
} colo_d_hidden_t;

/** The pass that a workspace is for. */
typedef enum colo_linear_logprob_pass_t {
    COLO_LINEAR_LOGPROB_FORWARD = 0,
    COLO_LINEAR_LOGPROB_BACKWARD = 1,
    COLO_LINEAR_LOGPROB_LOSS = 2,
    COLO_LINEAR_LOGPROB_INFERENCE = 3 /* a forward whose @saved is NULL */
} colo_linear_logprob_pass_t;

/** Members from mode on have defaults: 0, false. */
typedef struct colo_linear_logprob_config_t {
    size_t struct_size;
    colo_logprob_config_t logprob; /* chunk_size: tokens per chunk; 0: from tokens and budget */
    colo_linear_logprob_mode_t mode;
    colo_dtype_t logits_dtype; /* of the workspace: the head's dtype, or f32 */
    size_t budget;             /* bytes for logits of ceil(V / W) columns, in the loss pass for their
                                  gradients, too; chunks are as large as it allows, but not below
                                  2048 tokens (forward of mode logprob: 1024; forward of mode early
                                  and the loss pass: 512, or 1024 if logits have 16 bits; the loss
                                  pass of one rank, gradients over logits: 2048);
                                  0: 1 GiB (early: 512 MiB, the loss pass: 1.25 GiB) */
    colo_d_hidden_t d_hidden;
    bool frozen_hidden;          /* no d_hidden: its product is skipped; with a sum of d_hidden the
                                    same on all ranks, and so is a forward without saved */
    bool frozen_weight;          /* no d_weight, no d_bias: their product is skipped */
    colo_dtype_t d_weight_dtype; /* as colo_lm_head_grads_t */
    bool d_weight_add; /* as add there */
    bool keep_in_place; /* keep: backward writes d_logits over the kept logits, which ends saved;
                           needs logits_dtype = the head's */
    bool share_d_weight; /* early: until backward the memory of d_weight holds gradients of logits,
                            and saved memory holds the others. Needs d_weight of the head's dtype,
                            not d_weight_add, and no head's group; the same on all ranks */
    int64_t lora;     /* r, the rows of A; 0: no LoRA. The same on all ranks of the vocabulary,
                         and so is frozen_lora */
    bool frozen_lora; /* no d_lora_a, no d_lora_b: their products are skipped */
    size_t without_logits; /* 0: forward has memory for logits, whether it makes any or not. > 0:
                              where the GPU has a product that makes statistics of logits and does
                              not write them, forward of mode logprob, and each forward without
                              saved, has memory for these alone, about so many bytes. A batch
                              with a support is an error then, and a resident head whose weight is
                              not aligned to 16 bytes, row by row */
} colo_linear_logprob_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_CONFIG_INIT sizeof(colo_linear_logprob_config_t), {COLO_LOGPROB_CONFIG_INIT}, COLO_LINEAR_LOGPROB_AUTO, COLO_F32, 0, COLO_D_HIDDEN_PARTIAL, false, false, COLO_F32, false, false, false, 0, false, 0
#else
#define COLO_LINEAR_LOGPROB_CONFIG_INIT \
    .struct_size = sizeof(colo_linear_logprob_config_t), .logprob = {COLO_LOGPROB_CONFIG_INIT}
#endif

/** A low-rank addition to the head, z_t += scale B A h_t, in the memory of the head and resident,
 * whether or not the head is sharded. Borrowed as the tokens are. */
typedef struct colo_lora_t {
    const colo_tensor_t *a; /* [r, H], the head's dtype; columns contiguous; the same on all ranks of
                               the vocabulary group */
    const colo_tensor_t *b; /* [Vl, r], of this rank's columns, as a */
    double scale;
} colo_lora_t;

/** One call's tokens. */
typedef struct colo_linear_logprob_batch_t {
    size_t struct_size;
    const colo_tensor_t *hidden;  /* [T, H], the head's dtype; columns contiguous; the same on all
                                     ranks of the vocabulary group */
    const colo_tensor_t *targets; /* i64 [T], as colo_logprob_forward() */
    int64_t max_valid;            /* Upper bound on the number of non-ignored tokens; < 0: T. If
                                     there are more, the host returns COLO_ERR_ARG; on a GPU those
                                     beyond it are NaN and counted in n_invalid */
    const colo_support_t *support; /* as colo_logprob_batch_t; NULL: the vocabulary. All logits of a
                                      chunk are made, whatever it is */
    const colo_tensor_t *class_weight; /* as colo_logprob_batch_t */
    const colo_lora_t *lora;           /* NULL iff config.lora is 0 */
    const colo_tensor_t *temperature;  /* [T], as colo_logprob_batch_t */
} colo_linear_logprob_batch_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_BATCH_INIT sizeof(colo_linear_logprob_batch_t), nullptr, nullptr, 0, nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LINEAR_LOGPROB_BATCH_INIT .struct_size = sizeof(colo_linear_logprob_batch_t)
#endif

/**
 * Upstream gradient of each per-token output: factor * array[t], or the factor alone if the array
 * is NULL. Factor 0: no gradient through this output. If mean is true, all are divided by
 * the number of valid tokens of this rank, which the device counts (0 tokens: gradient 0), also
 * with class weights. For
 * bf16 and f16 heads the largest upstream gradient of the call multiplies after the products, in
 * fp32, so its size costs no digits.
 * The backward of mode early takes one number: loss * d_loss[0], or loss alone if d_loss is NULL.
 * It multiplies the gradients that forward made. There logp, entropy and lse are 0, and mean is
 * false.
 */
typedef struct colo_linear_logprob_upstream_t {
    size_t struct_size;
    double logp, entropy, loss;
    /* [T] each, contiguous, in the dtype of the outputs, or NULL; in the memory of the head */
    const colo_tensor_t *d_logp, *d_entropy, *d_loss;
    bool mean;
    double lse;
    const colo_tensor_t *d_lse;
} colo_linear_logprob_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_UPSTREAM_INIT sizeof(colo_linear_logprob_upstream_t), 0, 0, 0, nullptr, nullptr, nullptr, false, 0, nullptr
#else
#define COLO_LINEAR_LOGPROB_UPSTREAM_INIT .struct_size = sizeof(colo_linear_logprob_upstream_t)
#endif

typedef struct colo_linear_logprob_grads_t {
    size_t struct_size;
    const colo_tensor_t *d_hidden; /* [T, H] ([T/W, H] after reduce-scatter), the head's dtype,
                                      written; NULL iff frozen_hidden */
    const colo_tensor_t *d_weight, *d_bias; /* as colo_lm_head_grads_t; NULL iff frozen_weight (or
                                               there is no bias) */
    /* [r, H], summed over the vocabulary group, and [Vl, r]: f32 (f64 of an f64 head), contiguous,
     * written, of this rank's tokens also if the head is sharded; NULL iff config.lora is 0 or
     * frozen_lora is true */
    const colo_tensor_t *d_lora_a, *d_lora_b;
} colo_linear_logprob_grads_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_GRADS_INIT sizeof(colo_linear_logprob_grads_t), nullptr, nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LINEAR_LOGPROB_GRADS_INIT .struct_size = sizeof(colo_linear_logprob_grads_t)
#endif

/** What backward needs; caller's memory, filled by forward. Borrows hidden, targets and the saved
 *  memory. If the caller moves the latter to another aligned address, it sets @memory to it.
 *  d_weight: with share_d_weight, set before forward: where d_weight is, without gaps, aligned. */
typedef struct colo_linear_logprob_saved_t {
    size_t struct_size;
    const colo_linear_logprob_t *of;
    colo_tensor_t hidden, targets;
    colo_support_saved_t support;
    colo_tensor_t class_weight;
    uint64_t hidden_version, targets_version, class_weight_version, weight_version;
    int64_t max_valid;
    void *memory, *d_weight;
    bool valid;
    colo_tensor_t lora_a, lora_b;
    double lora_scale;
    uint64_t lora_version; /* the sum of their versions */
} colo_linear_logprob_saved_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_LOGPROB_SAVED_INIT sizeof(colo_linear_logprob_saved_t), nullptr, {}, {}, {}, {}, 0, 0, 0, 0, 0, nullptr, nullptr, false, {}, {}, 0, 0
#else
#define COLO_LINEAR_LOGPROB_SAVED_INIT .struct_size = sizeof(colo_linear_logprob_saved_t)
#endif

/**
 * colo_linear_logprob_create() - make handles, streams and events, so that later calls make none;
 * local
 * @linear:  out, owned by the caller
 * @config:  borrowed for the call
 * @head:    gives sizes, dtype, memory and bias; borrowed for the object's life
 * @group:   the vocabulary (tp) group, borrowed for the object's life; NULL is an error. This rank
 *           alone is in it and in the head's group: ranks of @group have the same tokens
 * One call at a time uses the object. Any number of forwards may wait for their backward.
 * Errors:   COLO_ERR_ARG, COLO_ERR_NOMEM, COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_linear_logprob_create(colo_linear_logprob_t **linear,
                                                  const colo_linear_logprob_config_t *config,
                                                  colo_lm_head_t *head, colo_comm_t *group);
/** colo_linear_logprob_destroy() - local; takes NULL, leaves *linear NULL. On a GPU the host waits
 * for the stream of the object. Memory given to calls stays the caller's */
COLO_API void colo_linear_logprob_destroy(colo_linear_logprob_t **linear);

/**
 * colo_linear_logprob_mode() - the mode in force for @max_valid rows: AUTO is resolved
 */
COLO_API colo_linear_logprob_mode_t colo_linear_logprob_mode(const colo_linear_logprob_t *linear,
                                                             int64_t max_valid);
/**
 * colo_linear_logprob_chunk() - rows per chunk of the loss pass for @max_valid rows; forward may
 * take fewer, backward takes more. It depends on config and W only, so it is the same on all ranks,
 * whatever their Vl
 */
COLO_API int64_t colo_linear_logprob_chunk(const colo_linear_logprob_t *linear, int64_t max_valid);
/**
 * colo_linear_logprob_saved_size() - bytes of saved memory of @tokens; in keep mode with the
 * logits, in early mode with their gradients
 * @bytes:  out
 */
COLO_API colo_status_t colo_linear_logprob_saved_size(const colo_linear_logprob_t *linear,
                                                      int64_t tokens, int64_t max_valid,
                                                      size_t *bytes);
/**
 * colo_linear_logprob_workspace_size() - bytes of workspace of one pass over @tokens
 * @bytes:  out
 */
COLO_API colo_status_t colo_linear_logprob_workspace_size(const colo_linear_logprob_t *linear,
                                                          colo_linear_logprob_pass_t pass,
                                                          int64_t tokens, int64_t max_valid,
                                                          size_t *bytes);

/**
 * colo_linear_logprob_forward() - outputs per token, in the logprob and keep modes, and without
 * @saved in each mode; collective
 * @batch:      in  borrowed for the call; its tensors until backward
 * @out:        out as in colo_logprob_forward()
 * @saved:      out; NULL if there is no backward (inference; first run of a checkpoint)
 * @saved_memory:  colo_linear_logprob_saved_size() bytes, aligned, borrowed until the last backward;
 *              NULL iff @saved is NULL
 * @workspace:  colo_linear_logprob_workspace_size() bytes, aligned, free again after the call
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 *              (on several ranks it does in the first calls for a vocabulary, until ranks were seen
 *              to have shards of it, and at COLO_CHECK=2; not in a capture, or at COLO_CHECK=0)
 * The call acquires the head, unless the caller has started or finished it, and releases it.
 * Special values, ignored and invalid targets: as in colo_logprob_forward().
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE, COLO_ERR_STATE (the head is not bound); those of
 *              colo_logprob_forward() and of the head
 */
COLO_API colo_status_t colo_linear_logprob_forward(colo_linear_logprob_t *linear,
                                                   const colo_linear_logprob_batch_t *batch,
                                                   const colo_logprob_out_t *out,
                                                   colo_linear_logprob_saved_t *saved,
                                                   void *saved_memory,
                                                   void *workspace, colo_stream_t stream);
/**
 * colo_linear_logprob_early() - forward of mode early: outputs per token, and the gradients of the
 * logits, in saved memory; collective
 * @upstream:   in  borrowed for the call
 * Other arguments, special values and errors: as in colo_linear_logprob_forward(); @saved is not
 * NULL. Gradients of the logits are in the head's dtype. The backward may run more than once, but
 * with share_d_weight only once.
 */
COLO_API colo_status_t colo_linear_logprob_early(colo_linear_logprob_t *linear,
                                                 const colo_linear_logprob_batch_t *batch,
                                                 const colo_linear_logprob_upstream_t *upstream,
                                                 const colo_logprob_out_t *out,
                                                 colo_linear_logprob_saved_t *saved,
                                                 void *saved_memory, void *workspace,
                                                 colo_stream_t stream);
/**
 * colo_linear_logprob_backward() - gradients of hidden states, weight and bias; collective
 * @saved:      from forward; may be used again unless keep_in_place or share_d_weight
 * @upstream:   in  borrowed for the call
 * @grads:      out, borrowed for the call
 * @workspace:  colo_linear_logprob_workspace_size() bytes, aligned, free again after the call
 * @stream:     as in forward
 * Errors:      COLO_ERR_STATE, COLO_ERR_MODIFIED (hidden, targets, support, class weights, the
 *              LoRA or the head were written), COLO_ERR_ARG, COLO_ERR_SHAPE, those of the groups
 */
COLO_API colo_status_t colo_linear_logprob_backward(colo_linear_logprob_t *linear,
                                                    colo_linear_logprob_saved_t *saved,
                                                    const colo_linear_logprob_upstream_t *upstream,
                                                    const colo_linear_logprob_grads_t *grads,
                                                    void *workspace, colo_stream_t stream);
/**
 * colo_linear_logprob_loss() - outputs and gradients in one pass, without saved memory; collective
 * @batch, @out, @stream:  as in forward
 * @upstream, @grads:      as in backward
 * @workspace:             colo_linear_logprob_workspace_size() bytes, aligned, free again after
 *                         the call; it holds two chunks of logits at most, and gradients of
 *                         several, which one product takes together
 * Errors:                 as in forward
 */
COLO_API colo_status_t colo_linear_logprob_loss(colo_linear_logprob_t *linear,
                                                const colo_linear_logprob_batch_t *batch,
                                                const colo_linear_logprob_upstream_t *upstream,
                                                const colo_logprob_out_t *out,
                                                const colo_linear_logprob_grads_t *grads,
                                                void *workspace, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
