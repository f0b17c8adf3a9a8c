/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.h - log-probabilities of k columns per token under vocabulary-parallel logits: the k
 * largest, or those at ids that the caller gives. Differentiable; the choice of the k largest is
 * not.
 *
 * Letters and formulas are those of logprob.h: x of a logit, M = max x, Sum = sum_j exp(x_j - M)
 * over the whole vocabulary; logp_i = (x_i - M) - log Sum for each selected id i, never above 0.
 * Upstream gradients g_i give
 *
 *   dx_j = -p_j sum_i g_i + sum_{i: id_i = j} g_i
 *
 * With want_tail there is one outcome more, all columns but those at ids: log p_tail = log sum of their
 * p_j, added up over them, not the difference to 1. Its upstream gradient g_t adds
 *
 *   dx_j = -p_j g_t, and p_j / p_tail g_t where j is not at ids
 *
 * Forward does one all-gather, backward no collective. Tokens are not chunked.
 */
#ifndef COLOBRIDGE_TOPK_H
#define COLOBRIDGE_TOPK_H

#include <colobridge/comm.h>
#include <colobridge/logits.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_TOPK_MAX 256 /* ids per token */

/** Members from topk on have defaults: false, ignore_index -100. */
typedef struct colo_topk_config_t {
    size_t struct_size;
    colo_logits_options_t logits; /* columns that are padding are never selected */
    int64_t k;            /* 1..COLO_TOPK_MAX; at most V with topk */
    bool topk;            /* true: the k largest; false: those at ids */
    int64_t ignore_index; /* an id of this value has logp 0 and no gradient; -100 */
    int64_t order; /* a number for the order of the rows, if the caller has several: ranks compare it */
    bool want_tail; /* out.tail may be asked for; not with topk, and the ids of a row differ */
    bool has_temperature; /* the batch has a temperature of each token, which divides x in addition;
                           * not with topk, whose order does not depend on it */
    int64_t reserved[7]; /* 0: room for members of newer headers. The size never changes, because
                          * other structs contain it */
} colo_topk_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPK_CONFIG_INIT sizeof(colo_topk_config_t), {COLO_LOGITS_OPTIONS_INIT}, 0, false, -100, 0, false, false, {}
#else
#define COLO_TOPK_CONFIG_INIT                                                    \
    .struct_size = sizeof(colo_topk_config_t), .logits = {COLO_LOGITS_OPTIONS_INIT}, \
    .ignore_index = -100
#endif

/** What forward writes; NULL members are not computed. Each is contiguous, in the memory of the
 *  logits, and written only on success. */
typedef struct colo_topk_out_t {
    size_t struct_size;
    const colo_tensor_t *logp;      /* [T, k] f64 if the logits are f64, else f32 */
    const colo_tensor_t *ids;       /* i64 [T, k] global ids, with topk only: logits descending, of
                                     * equal logits the lowest id first. -1 in a masked row and in one
                                     * that is NaN */
    const colo_tensor_t *n_invalid; /* i64 [1] ids outside [0, V) that are not ignore_index: their
                                     * logp is NaN */
    const colo_tensor_t *tail;      /* [T] log p_tail, dtype of logp, with config.want_tail only; 0 in a
                                     * masked row, and where all ids are ignored; NaN where an id
                                     * occurs twice */
} colo_topk_out_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPK_OUT_INIT sizeof(colo_topk_out_t), nullptr, nullptr, nullptr, nullptr
#else
#define COLO_TOPK_OUT_INIT .struct_size = sizeof(colo_topk_out_t)
#endif

/** Upstream gradients, [T, k] and [T], contiguous, in the dtype of the output logp; a tail of NULL is
 *  zero. */
typedef struct colo_topk_upstream_t {
    size_t struct_size;
    const colo_tensor_t *d_logp;
    const colo_tensor_t *d_tail;
} colo_topk_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPK_UPSTREAM_INIT sizeof(colo_topk_upstream_t), nullptr, nullptr
#else
#define COLO_TOPK_UPSTREAM_INIT .struct_size = sizeof(colo_topk_upstream_t)
#endif

/** What backward needs; caller's memory, filled by forward. Borrows the logits and the buffer. */
typedef struct colo_topk_saved_t {
    size_t struct_size;
    colo_tensor_t logits; /* borrowed view */
    uint64_t logits_version;
    void *memory; /* borrowed: the caller's colo_topk_saved_size() bytes */
    bool valid;
    colo_topk_config_t config;
} colo_topk_saved_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPK_SAVED_INIT sizeof(colo_topk_saved_t), {}, 0, nullptr, false, {}
#else
#define COLO_TOPK_SAVED_INIT .struct_size = sizeof(colo_topk_saved_t)
#endif

/**
 * colo_topk_config_check() - are all members of @config in their ranges? Local
 * Errors:  COLO_ERR_ARG, naming the member, its value and its range
 */
COLO_API colo_status_t colo_topk_config_check(const colo_topk_config_t *config);
/**
 * colo_topk_saved_size() - bytes of the saved statistics: 56 per token, and 8 with
 *                          has_temperature, and 16 per selected id
 * @bytes:  out
 */
COLO_API colo_status_t colo_topk_saved_size(const colo_topk_config_t *config, int64_t tokens,
                                            size_t *bytes);
/**
 * colo_topk_workspace_size() - bytes of workspace that forward needs on a group of @ranks; they do
 * not grow with the vocabulary
 * @bytes:  out
 */
COLO_API colo_status_t colo_topk_workspace_size(const colo_topk_config_t *config,
                                                colo_dtype_t dtype, int64_t tokens, int32_t ranks,
                                                size_t *bytes);

/** The tensors that a forward reads, borrowed; all in one memory. */
typedef struct colo_topk_batch_t {
    size_t struct_size;
    /* [T, Vl] f32, f64, bf16 or f16; columns contiguous, rows at any stride; borrowed until
     * backward */
    const colo_tensor_t *logits;
    /* i64 [T, k], columns contiguous, the same on all ranks; NULL with topk. An id may occur
     * twice in a row. Not needed after the call */
    const colo_tensor_t *ids;
    /* u8 [T] or NULL; a row whose mask is 0 is not read, and its logp are 0 */
    const colo_tensor_t *mask;
    /* f32 [T], contiguous, > 0 and finite where the mask is not 0, the same on all ranks; NULL
     * unless config.has_temperature. On a GPU the host does not read it, and a row of another number
     * is NaN */
    const colo_tensor_t *temperature;
} colo_topk_batch_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPK_BATCH_INIT sizeof(colo_topk_batch_t), nullptr, nullptr, nullptr, nullptr
#else
#define COLO_TOPK_BATCH_INIT .struct_size = sizeof(colo_topk_batch_t)
#endif

/**
 * colo_topk_forward() - one read of the logits, one all-gather over @group (none if it has one
 * rank)
 * @batch:      in  borrowed for the call; its members say how long their tensors are
 * @group:      the vocabulary (tp) group, collective; NULL is an error
 * @saved:      out may be NULL if there is no backward; then @saved_memory is NULL, too
 * @saved_memory:  colo_topk_saved_size() bytes, aligned, borrowed until the last backward
 * @workspace:  colo_topk_workspace_size() bytes, aligned, free again after the call
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 *              (on several ranks it does in the first calls for a vocabulary, until ranks were seen
 *              to have shards of it, and at COLO_CHECK=2; not in a capture, or at COLO_CHECK=0)
 *
 * Order:       by scale * z, of which x is an ascending function; equal logits by lowest id. With
 *              scale 0 all are equal. The ids are the same on every rank, for every cut of the
 *              vocabulary
 *
 * Special values. A row with NaN or +inf on any rank, or with nothing but -inf, gives logp NaN,
 * ids -1 and gradient NaN. -inf among finite logits may be selected, after all others, with logp
 * -inf. An invalid id gives NaN as its logp and as the row's gradient; the row's other logp are as
 * usual. Where all columns but those at ids are -inf, log p_tail is -inf.
 *
 * Memory:      all on the host, or all of it CUDA; on CUDA the shards are not compared across
 *              ranks
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE (the other ranks get COLO_ERR_PEER); COLO_ERR_MISMATCH
 *              on all ranks (other config, ids, mask or tokens, shards that do not tile [0, V));
 *              those of colo_comm_all_gather()
 */
COLO_API colo_status_t colo_topk_forward(const colo_topk_config_t *config,
                                         const colo_topk_batch_t *batch, colo_comm_t *group,
                                         const colo_topk_out_t *out,
                                         colo_topk_saved_t *saved, void *saved_memory,
                                         void *workspace, colo_stream_t stream);
/**
 * colo_topk_backward() - gradient of the raw logits; local, one read and one write
 * @saved:     from forward; may be used again, with the same result
 * @upstream:  in  borrowed for the call; d_logp may be NULL only if T = 0
 * @d_logits:  out [T, Vl], dtype of the logits. If it is the logits themselves (same data and
 *                 strides), the gradient overwrites them, which ends @saved. Any other overlap is
 *                 an error
 * @stream:    as in forward
 * Errors:     COLO_ERR_STATE, COLO_ERR_MODIFIED, COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_topk_backward(colo_topk_saved_t *saved,
                                          const colo_topk_upstream_t *upstream,
                                          const colo_tensor_t *d_logits, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
