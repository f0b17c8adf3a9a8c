/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_head.h - the output matrix of a language model: whole on every rank, or a shard of it.
 *
 * Letters: Vl rows of this rank's part of the vocabulary, H hidden, D ranks of the data-parallel
 * group that shares it. Vocabulary parallelism comes first: a head has the Vl rows of one
 * vocabulary (tp) rank. *Resident*: weight [Vl, H] and bias [Vl] are on this rank, and every call
 * is a no-op (tied embeddings). *Sharded by rows* (FSDP2): rank d has rows [d E, min((d + 1) E,
 * Vl)), E = ceil(Vl / D), so the last shard may be shorter and the last ranks may have none.
 * *Sharded flat* (ZeRO-3): rank d has elements [d P, (d + 1) P), P = ceil(Vl H / D), of the
 * flattened weight, which begin and end inside of rows; behind its Vl H elements is padding.
 *
 * NOT_AVAILABLE --start--> IN_FLIGHT --finish--> AVAILABLE --release--> NOT_AVAILABLE
 *
 * From start to finish there is one all-gather of weight and bias together, for any number of
 * passes. Every rank of the group joins it, also if it has no rows or no tokens. One
 * reduce-scatter brings a gradient back. Sums run in rank order, so a sharded head gives the bits
 * of a resident head whose gradients are summed by colo_comm_all_reduce() over the same group.
 */
#ifndef COLOBRIDGE_LM_HEAD_H
#define COLOBRIDGE_LM_HEAD_H

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_lm_head colo_lm_head_t;

typedef enum colo_lm_head_partition_t {
    COLO_LM_HEAD_ROWS = 0,
    COLO_LM_HEAD_FLAT = 1
} colo_lm_head_partition_t;

/** What makes products in host memory. The environment variable COLO_GEMM overrides it. */
typedef enum colo_gemm_t {
    COLO_GEMM_AUTO = 0,  /* a CBLAS that the process has loaded, else loops. Loads nothing */
    COLO_GEMM_CBLAS = 1, /* a CBLAS that the process has loaded, else OpenBLAS, which is loaded */
    COLO_GEMM_LOOPS = 2  /* the library's own, several times slower */
} colo_gemm_t;

/**
 * colo_gemm_describe() - what makes the products of heads with @gemm in this process: the name of a
 * library, or "loops: " and why; local. It is found as for a head, so it may load OpenBLAS
 * @text:   out [@cap], cut where it is longer
 * Errors:  COLO_ERR_ARG; COLO_ERR_UNBUILT, COLO_ERR_NOMEM (the CBLAS that is asked for cannot be
 *          had)
 */
COLO_API colo_status_t colo_gemm_describe(colo_gemm_t gemm, char *text, size_t cap);

typedef enum colo_lm_head_state_t {
    COLO_LM_HEAD_NOT_AVAILABLE = 0,
    COLO_LM_HEAD_IN_FLIGHT = 1,
    COLO_LM_HEAD_AVAILABLE = 2
} colo_lm_head_state_t;

/** Members from mem on have defaults: COLO_MEM_HOST, device 0, no bias, COLO_LM_HEAD_ROWS,
 * COLO_GEMM_AUTO. */
typedef struct colo_lm_head_config_t {
    size_t struct_size;
    int64_t rows;       /* Vl; the same on all ranks of the group; may be 0 */
    int64_t hidden;     /* H, > 0 */
    colo_dtype_t dtype; /* of weight and bias: f32, f64, bf16, f16 */
    colo_mem_t mem;
    int32_t device; /* CUDA ordinal; ignored for host memory */
    bool has_bias;
    colo_lm_head_partition_t partition; /* FLAT: needs a group and no bias */
    colo_gemm_t gemm; /* ranks may choose differently */
} colo_lm_head_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LM_HEAD_CONFIG_INIT \
    sizeof(colo_lm_head_config_t), 0, 0, COLO_F32, COLO_MEM_HOST, 0, false, COLO_LM_HEAD_ROWS, \
        COLO_GEMM_AUTO
#else
#define COLO_LM_HEAD_CONFIG_INIT .struct_size = sizeof(colo_lm_head_config_t)
#endif

/**
 * Memory for gradients: [Vl, H] and [Vl] of a resident head, this rank's rows or elements of a
 * sharded one. The library does not write the padding of a flat part.
 */
typedef struct colo_lm_head_grads_t {
    size_t struct_size;
    const colo_tensor_t *d_weight; /* f32 (f64 of an f64 head), or the head's dtype */
    const colo_tensor_t *d_bias;   /* as d_weight; NULL iff the head has no bias */
    bool add; /* true: add to the contents (main_grad; f32 or f64 only); false: replace them */
} colo_lm_head_grads_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LM_HEAD_GRADS_INIT sizeof(colo_lm_head_grads_t), nullptr, nullptr, false
#else
#define COLO_LM_HEAD_GRADS_INIT .struct_size = sizeof(colo_lm_head_grads_t)
#endif

/**
 * colo_lm_head_create() - local; if COLO_CHECK >= 1, the ranks of @group agree on the config
 * @head:    out, owned by the caller
 * @config:  borrowed for the call
 * @group:   ranks that share the Vl rows (dp, or dp x cp), borrowed for the life of the head.
 *           NULL: the head is resident
 * Errors:   COLO_ERR_ARG, COLO_ERR_NOMEM, COLO_ERR_UNBUILT (no backend for @config->mem);
 *           COLO_ERR_MISMATCH (ranks have different configs)
 */
COLO_API colo_status_t colo_lm_head_create(colo_lm_head_t **head,
                                           const colo_lm_head_config_t *config, colo_comm_t *group);
/**
 * colo_lm_head_destroy() - takes NULL, leaves *head NULL; waits for a gather in flight
 */
COLO_API void colo_lm_head_destroy(colo_lm_head_t **head);

/** colo_lm_head_config() - the config given to create; a view, NULL if @head is NULL */
COLO_API const colo_lm_head_config_t *colo_lm_head_config(const colo_lm_head_t *head);
/**
 * colo_lm_head_group() - the group given to create; NULL if the head is resident
 */
COLO_API colo_comm_t *colo_lm_head_group(const colo_lm_head_t *head);
/** colo_lm_head_state() - the state now, as the host knows it; NOT_AVAILABLE if @head is NULL */
COLO_API colo_lm_head_state_t colo_lm_head_state(const colo_lm_head_t *head);
/**
 * colo_lm_head_rows() - this rank has rows [*first, *first + *count) of Vl, or such elements of the
 * flattened weight if the partition is FLAT, without padding; each pointer may be NULL
 */
COLO_API void colo_lm_head_rows(const colo_lm_head_t *head, int64_t *first, int64_t *count);
/**
 * colo_lm_head_gathered_size() - bytes of the memory that start fills; 0 if the head is resident
 */
COLO_API size_t colo_lm_head_gathered_size(const colo_lm_head_t *head);
/**
 * colo_lm_head_reduce_size() - bytes of workspace from gradient to reduce, staging of the
 * reduce-scatter included (over NCCL at most 64 MiB); 0 if passes add straight to the caller's
 * gradients
 */
COLO_API size_t colo_lm_head_reduce_size(const colo_lm_head_t *head,
                                         const colo_lm_head_grads_t *grads);

/**
 * colo_lm_head_bind() - tell the head where its parameters are; call again whenever they move
 * @weight:    [rows of this rank, H], columns contiguous, rows at any stride; FLAT: [P], or without
 *             its padding, contiguous. Borrowed until the next bind. If it is at its own place in
 *             @gathered, as the views have it, the gather does not copy it. Otherwise it must not
 *             overlap @gathered
 * @bias:      [rows of this rank], contiguous; NULL iff the head has none
 * @gathered:  colo_lm_head_gathered_size() bytes, aligned; NULL if the head is resident. The
 *             library uses it from start to release. Its contents are undefined otherwise. On GPUs
 *             that reach each other it may be registered over the group (memory.h), at the same
 *             offset on all ranks or on none: ranks then copy from each other without
 *             multiprocessors
 * Errors:     COLO_ERR_ARG, COLO_ERR_SHAPE; COLO_ERR_STATE while a gather is in flight
 */
COLO_API colo_status_t colo_lm_head_bind(colo_lm_head_t *head, const colo_tensor_t *weight,
                                         const colo_tensor_t *bias, void *gathered);

/**
 * colo_lm_head_start() - begin the gather; collective over the group; a resident head: no-op
 * The gather reads the parameters after the work that is on @stream now. On GPUs it runs on a
 * stream of the head, while @stream goes on; on the host it is complete on return. If memory is
 * registered over the group, the first gather waits for all ranks; so does the next one after more
 * memory was registered. After an error @stream waits for what has begun.
 * Errors:  COLO_ERR_STATE (nothing bound; already IN_FLIGHT or AVAILABLE), those of the group
 */
COLO_API colo_status_t colo_lm_head_start(colo_lm_head_t *head, colo_stream_t stream);
/**
 * colo_lm_head_finish() - @stream waits for the gather; local
 * @weight: out, may be NULL: view of the whole [Vl, H], rows at some stride, until release
 * @bias:   out, may be NULL: view of [Vl], at some stride; data is NULL if the head has none
 * Errors:  COLO_ERR_STATE (not started)
 */
COLO_API colo_status_t colo_lm_head_finish(colo_lm_head_t *head, colo_stream_t stream,
                                           colo_tensor_t *weight, colo_tensor_t *bias);
/**
 * colo_lm_head_acquire() - start and finish, each only if still needed: AVAILABLE from any state
 * Arguments, rank effects and errors as in colo_lm_head_start() and colo_lm_head_finish().
 */
COLO_API colo_status_t colo_lm_head_acquire(colo_lm_head_t *head, colo_stream_t stream,
                                            colo_tensor_t *weight, colo_tensor_t *bias);
/**
 * colo_lm_head_release() - end the views; local; no-op if the head is resident
 * The memory that bind was given is the caller's again after the work that is on @stream now.
 * Errors:  COLO_ERR_STATE (not AVAILABLE)
 */
COLO_API colo_status_t colo_lm_head_release(colo_lm_head_t *head, colo_stream_t stream);

/**
 * colo_lm_head_gradient() - views to which a pass adds the gradient of the whole head; local
 * @grads:      where the result will go
 * @workspace:  colo_lm_head_reduce_size() bytes, aligned, in use until reduce
 * @stream:     the call enqueues here what makes the views ready: zeros, or nothing if they are
 *              @grads->d_weight itself
 * @d_weight:   out view [Vl, H] of f32 (f64 of an f64 head)
 * @d_bias:     out view [Vl], at some stride; data is NULL if the head has no bias
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_lm_head_gradient(colo_lm_head_t *head,
                                             const colo_lm_head_grads_t *grads, void *workspace,
                                             colo_stream_t stream, colo_tensor_t *d_weight,
                                             colo_tensor_t *d_bias);
/**
 * colo_lm_head_reduce() - one reduce-scatter over the group, then into @grads; collective
 * A resident head needs no collective.
 * @grads, @workspace:  as given to colo_lm_head_gradient()
 * Errors:              COLO_ERR_ARG, COLO_ERR_SHAPE, those of the group
 */
COLO_API colo_status_t colo_lm_head_reduce(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                           void *workspace, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
