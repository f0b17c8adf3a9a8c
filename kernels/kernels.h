/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the whole contract between C and CUDA: pointers and sizes in, cudaGetLastError() out.
 *
 * A launcher gets checked arguments, enqueues on the stream and returns; it allocates nothing, does
 * not wait, reads no environment, and may be captured in a CUDA graph. Empty work is success before
 * any launch. All indices are 64 bits. Pointers are device memory (or pinned host memory) that the
 * current device reaches. Statuses and error messages are made by src/cuda/device.c, the one
 * includer outside this folder, tests and tools/colo-perf aside.
 */
#ifndef COLO_KERNELS_H
#define COLO_KERNELS_H

#include <colobridge/comm.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- boxes (box.cu) ---- */

#define COLO_K_BOXES 256   /* pairs of boxes in one launch */
#define COLO_K_ADDENDS 256 /* as COLO_MAX_ADDENDS of core/device.h */

/* dst[i] = src[i] for @n pairs, any strides, one launch for each COLO_K_BOXES of them. A pair has
 * equal extents and does not overlap; pairs do not overlap each other's dst. Exact at any
 * alignment, in 16-byte accesses where both sides allow it. A src without data is zeros: all bits of
 * dst become zero. @elem_size: 1, 2, 4 or 8. */
cudaError_t colo_k_boxes_copy(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, cudaStream_t stream);

/* dst[i] = src[i], one element further on along the last axis, for @n pairs of i64 boxes (shift.cu),
 * one launch for each COLO_K_BOXES of them; the last element of a row is @last. A dst may be its src
 * itself. Pointers are multiples of 8. */
cudaError_t colo_k_boxes_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, cudaStream_t stream);

/* dst = src[0] + src[1] + ... in that order; fp32 accumulation for bf16 and fp16, one rounding. A
 * src may be dst itself. The same bits as the host's, but a NaN is CUDA's own. */
cudaError_t colo_k_box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                           colo_dtype_t dtype, cudaStream_t stream);

/* to[i] = wide[i] + half[i] for @n elements (half-sum.cu): wide is fp32 (NULL: zeros), half is of
 * @dtype, bf16 or fp16; to is fp32 if @to_f32, else of @dtype, rounded once. to may be wide or half
 * itself. Pointers are multiples of an element. The same bits as the host's, but a NaN is CUDA's
 * own. */
cudaError_t colo_k_half_sum(void *to, bool to_f32, const float *wide, const void *half,
                            colo_dtype_t dtype, int64_t n, cudaStream_t stream);

/* ---- looking at memory (validate.cu) ---- */

/* *sum += a number that differs when the bits of the box differ, whatever its strides. */
cudaError_t colo_k_box_hash(const colo_box_t *box, size_t elem_size, unsigned long long *sum,
                            cudaStream_t stream);
/* *first = min(*first, place of the first element that is not zero, counted row by row); -0.0 of a
 * float dtype is zero. */
cudaError_t colo_k_box_nonzero(const colo_box_t *box, size_t elem_size, bool is_float,
                               unsigned long long *first, cudaStream_t stream);
/* *num = sum of values[i], *den = how many, over i with mask[i] != 0 (mask NULL: all); f32, f64.
 * All pointers are device memory; writes also for count 0. The same bits in every run. */
cudaError_t colo_k_masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                              int64_t count, double *num, int64_t *den, cudaStream_t stream);

/* ---- loss on logits (logprob-stats.cu, logprob-grad.cu) ---- */

/* What src/loss/passes.h says, flattened: a kernel cannot follow host pointers. */
typedef struct colo_k_logprob {
    colo_dtype_t dtype, d_dtype;
    double factor, softcap, smoothing, z_loss;
    int64_t vocab, vocab_start, ignore_index;
    int64_t own; /* columns that smoothing is spread over when they are this rank's, else 0 */
    bool lenient;
    int64_t lo, hi, tokens; /* this pass, [lo, hi) of [0, tokens) */

    const void *logits; /* [tokens, columns]; pointer a multiple of the element size */
    int64_t row_stride, row_lo, columns, true_columns; /* row_lo: token of logits' first row */
    const int64_t *targets;
    int64_t target_stride;

    unsigned char *blocks; /* [ranks] blocks of block_bytes */
    int64_t block_bytes, block_lo;
    int64_t m, s, xt, u, d, arg; /* byte offsets in a block, -1: not there */
    int32_t rank, ranks;
    int64_t head[8];                  /* header of this rank's block, written when lo is block_lo */
    int32_t head_start, head_columns; /* which of head[] hold first column and columns */

    void *logp, *entropy, *loss; /* out of merge, each may be NULL */
    uint8_t *correct;
    int64_t *n_valid, *n_invalid;
    double *saved; /* f64 [3, tokens]: M, log Sum, h */

    const void *d_logp, *d_entropy, *d_loss; /* upstream, each may be NULL */
    void *d_logits;
    int64_t d_row_stride;
} colo_k_logprob_t;

cudaError_t colo_k_logprob_stats(const colo_k_logprob_t *p, cudaStream_t stream);
cudaError_t colo_k_logprob_merge(const colo_k_logprob_t *p, cudaStream_t stream);
cudaError_t colo_k_logprob_grad(const colo_k_logprob_t *p, cudaStream_t stream);

/* ---- lm_head path (rows.cu): what src/loss/linear/linear.h says of the functions of these names ---- */

typedef struct colo_k_rows {
    int64_t tokens, rows;
    const int64_t *targets;
    int64_t target_stride;
    int64_t ignore_index, vocab;
    int64_t *row_of, *token_of, *row_targets; /* [tokens], [rows], [rows] */
    int64_t *counts;                          /* [4]: counted, valid, invalid, 0 */
} colo_k_rows_t;
typedef struct colo_k_upstream {
    bool wide, mean; /* wide: f64, else f32 */
    const void *from[3];
    double factor[3];
    void *to[3];
    float *scale; /* [3] or NULL */
    double lift;
} colo_k_upstream_t;
typedef struct colo_k_spread {
    bool wide;
    const void *from[3];
    void *to[3];
    const uint8_t *from_correct;
    uint8_t *to_correct;
    int64_t *n_valid, *n_invalid;
} colo_k_scatter_t;

cudaError_t colo_k_rows_compact(const colo_k_rows_t *p, cudaStream_t stream);
cudaError_t colo_k_rows_upstream(const colo_k_rows_t *p, const colo_k_upstream_t *u,
                                 cudaStream_t stream);
cudaError_t colo_k_rows_scatter(const colo_k_rows_t *p, const colo_k_scatter_t *s,
                                cudaStream_t stream);
/* strides in elements; to, from [hi - lo, hidden] contiguous */
cudaError_t colo_k_rows_gather(const colo_k_rows_t *p, int64_t lo, int64_t hi, int64_t hidden,
                               void *to, const void *from, int64_t from_stride, colo_dtype_t dtype,
                               cudaStream_t stream);
cudaError_t colo_k_rows_restore(const colo_k_rows_t *p, int64_t lo, int64_t hi, int64_t hidden,
                                void *to, int64_t to_stride, const void *from, colo_dtype_t dtype,
                                cudaStream_t stream);
cudaError_t colo_k_rows_clear(const colo_k_rows_t *p, int64_t hidden, void *to, int64_t to_stride,
                              colo_dtype_t dtype, cudaStream_t stream);
/* to[j * to_step] = beta to + sum over rows of z[., j], times *scale (NULL: 1); f32, f64 of f64 */
cudaError_t colo_k_rows_sum(const void *z, int64_t stride, colo_dtype_t dtype, int64_t rows,
                            int64_t columns, const float *scale, void *to, int64_t to_step,
                            double beta, cudaStream_t stream);
/* to [rows, columns] = from in to's dtype; a stride of 0 repeats a row of from */
cudaError_t colo_k_rows_convert(void *to, int64_t to_stride, colo_dtype_t to_dtype,
                                const void *from, int64_t from_stride, colo_dtype_t from_dtype,
                                int64_t rows, int64_t columns, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
