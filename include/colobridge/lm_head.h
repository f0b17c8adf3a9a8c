/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_head.h - the output matrix of a language model, whole on every rank or a shard of it.
 *
 * Letters: Vl rows of this rank's part of the vocabulary, H hidden, D ranks of the data-parallel
 * group that shares it. Vocabulary parallelism comes first: a head is about the Vl rows of one
 * vocabulary (tp) rank. *Resident*: weight [Vl, H] and bias [Vl] are here; every call is a no-op
 * (tied embeddings). *Sharded*: rank d holds rows [d E, min((d + 1) E, Vl)), E = ceil(Vl / D), so
 * the last shard may be shorter and the last ranks may have none (ZeRO-3, FSDP2).
 *
 * NOT_AVAILABLE --start--> IN_FLIGHT --finish--> AVAILABLE --release--> NOT_AVAILABLE
 *
 * start .. finish is one all-gather of weight and bias together, whatever is done with it, joined
 * by every rank of the group also when it has no rows or no tokens. One reduce-scatter brings a
 * gradient back; sums run in rank order, so a sharded head gives the bits of a resident one whose
 * gradients are summed by colo_comm_all_reduce() over the same group.
 */
#ifndef COLOBRIDGE_LM_HEAD_H
#define COLOBRIDGE_LM_HEAD_H

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_lm_head colo_lm_head_t;

typedef enum colo_lm_head_state {
    COLO_LM_HEAD_NOT_AVAILABLE = 0,
    COLO_LM_HEAD_IN_FLIGHT = 1,
    COLO_LM_HEAD_AVAILABLE = 2
} colo_lm_head_state_t;

/** Members from mem on have defaults: COLO_HOST, device -1, no bias. */
typedef struct colo_lm_head_config {
    size_t struct_size;
    int64_t rows;       /* Vl; the same on all ranks of the group; may be 0 */
    int64_t hidden;     /* H, > 0 */
    colo_dtype_t dtype; /* of weight and bias: f32, f64, bf16, f16 */
    colo_mem_t mem;
    int32_t device; /* CUDA ordinal; not looked at for host memory */
    bool has_bias;
} colo_lm_head_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LM_HEAD_CONFIG_INIT sizeof(colo_lm_head_config_t), 0, 0, COLO_F32, COLO_HOST, -1, false
#else
#define COLO_LM_HEAD_CONFIG_INIT .struct_size = sizeof(colo_lm_head_config_t), .device = -1
#endif

/** Where gradients go. A resident head's are [Vl, H] and [Vl], a sharded one's this rank's rows. */
typedef struct colo_lm_head_grads {
    const colo_tensor_t *d_weight; /* f32 (f64 of an f64 head), or the head's dtype */
    const colo_tensor_t *d_bias;   /* as d_weight; NULL iff the head has no bias */
    bool add; /* to what is there (main_grad; f32 or f64 only); else what is there is replaced */
} colo_lm_head_grads_t;

/**
 * colo_lm_head_create() - local, but for COLO_CHECK >= 1 an agreement on the config over @group
 * @group:  ranks that share the Vl rows (dp, or dp x cp), borrowed for the life of the head; NULL:
 *          resident
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM, COLO_ERR_UNBUILT (no backend for @config->mem);
 *          COLO_ERR_MISMATCH (ranks brought different configs)
 */
COLO_API colo_status_t colo_lm_head_create(colo_lm_head_t **head,
                                           const colo_lm_head_config_t *config, colo_comm_t *group);
/** colo_lm_head_destroy() - takes NULL, leaves *head NULL; a gather in flight is finished first */
COLO_API void colo_lm_head_destroy(colo_lm_head_t **head);

/** colo_lm_head_config() - the config given to create; a view, NULL if @head is NULL */
COLO_API const colo_lm_head_config_t *colo_lm_head_config(const colo_lm_head_t *head);
/** colo_lm_head_group() - NULL when resident */
COLO_API colo_comm_t *colo_lm_head_group(const colo_lm_head_t *head);
/** colo_lm_head_state() - the state now, as the host knows it; NOT_AVAILABLE if @head is NULL */
COLO_API colo_lm_head_state_t colo_lm_head_state(const colo_lm_head_t *head);
/** colo_lm_head_rows() - rows [*first, *first + *count) of Vl that this rank holds */
COLO_API void colo_lm_head_rows(const colo_lm_head_t *head, int64_t *first, int64_t *count);
/** colo_lm_head_gathered_size() - bytes that start fills; 0 when resident */
COLO_API size_t colo_lm_head_gathered_size(const colo_lm_head_t *head);
/** colo_lm_head_reduce_size() - bytes of workspace from gradient to reduce; 0 when gradients go to
 *  the caller's memory at once */
COLO_API size_t colo_lm_head_reduce_size(const colo_lm_head_t *head,
                                         const colo_lm_head_grads_t *grads);

/**
 * colo_lm_head_bind() - say where the parameters are; again whenever they move
 * @weight:   [rows here, H], columns contiguous, rows at any stride; borrowed until the next bind.
 *            It may lie in its place of @gathered, where the views have it: then it is not copied;
 *            else apart from that
 * @bias:     [rows here], contiguous; NULL iff the head has none
 * @gathered: colo_lm_head_gathered_size() bytes, aligned, used from start to release only (what
 *            lies there in between may be anything); NULL when resident. On GPUs that reach each
 *            other, memory that is registered over the group (memory.h), at the same offset on all
 *            ranks or on none: ranks then copy from each other, beside what multiprocessors do
 * Errors:    COLO_ERR_ARG, COLO_ERR_SHAPE; COLO_ERR_STATE while a gather is in flight
 */
COLO_API colo_status_t colo_lm_head_bind(colo_lm_head_t *head, const colo_tensor_t *weight,
                                         const colo_tensor_t *bias, void *gathered);

/**
 * colo_lm_head_start() - begin the gather; collective over the group; no-op when resident
 * Parameters as of @stream's work so far. On GPUs the gather runs on a stream of the head, beside
 * what the caller enqueues on @stream next; on the host it is done on return. If memory is
 * registered over the group, the first gather, and the next one after more memory was registered,
 * waits for all ranks.
 * Errors:  COLO_ERR_STATE (nothing bound; already IN_FLIGHT or AVAILABLE), the group's
 */
COLO_API colo_status_t colo_lm_head_start(colo_lm_head_t *head, colo_stream_t stream);
/**
 * colo_lm_head_finish() - @stream waits for the gather; local
 * @weight: out, may be NULL: view of the whole [Vl, H], rows at some stride, until release
 * @bias:   out, may be NULL: view of [Vl], at some stride; data NULL when there is none
 * Errors:  COLO_ERR_STATE (not started)
 */
COLO_API colo_status_t colo_lm_head_finish(colo_lm_head_t *head, colo_stream_t stream,
                                           colo_tensor_t *weight, colo_tensor_t *bias);
/** colo_lm_head_acquire() - from any state to AVAILABLE: start unless it was, finish unless it was
 */
COLO_API colo_status_t colo_lm_head_acquire(colo_lm_head_t *head, colo_stream_t stream,
                                            colo_tensor_t *weight, colo_tensor_t *bias);
/** colo_lm_head_release() - the views end; the workspace is the caller's again after @stream's work
 * so far. COLO_ERR_STATE unless AVAILABLE; no-op when resident */
COLO_API colo_status_t colo_lm_head_release(colo_lm_head_t *head, colo_stream_t stream);

/**
 * colo_lm_head_gradient() - where a pass puts the gradient of the whole head
 * @grads:    where the result is to go
 * @workspace:  colo_lm_head_reduce_size() bytes, aligned, until reduce
 * @d_weight: out: view [Vl, H] of f32 (f64 of an f64 head); the pass adds to what is there
 * @d_bias:   out: view [Vl], some stride; data NULL when there is none
 * Enqueues what makes the views ready: zeros, or nothing when they are @grads->d_weight itself.
 */
COLO_API colo_status_t colo_lm_head_gradient(colo_lm_head_t *head,
                                             const colo_lm_head_grads_t *grads, void *workspace,
                                             colo_stream_t stream, colo_tensor_t *d_weight,
                                             colo_tensor_t *d_bias);
/**
 * colo_lm_head_reduce() - one reduce-scatter over the group, then into @grads; collective
 * Resident: no collective. @grads and @workspace as given to colo_lm_head_gradient().
 */
COLO_API colo_status_t colo_lm_head_reduce(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                           void *workspace, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
