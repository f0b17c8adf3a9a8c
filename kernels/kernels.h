/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the whole contract between C and CUDA: pointers and sizes in, cudaGetLastError() out.
 *
 * A launcher gets checked arguments, enqueues on the stream and returns; it allocates nothing, does
 * not wait, reads no environment, and may be captured in a CUDA graph. Empty work is success before
 * any launch. All indices are 64 bits. Pointers are device memory (or pinned host memory) that the
 * current device reaches. The caller makes statuses and error messages: src/cuda/, and
 * src/comm/nccl/exchange.c for its copies.
 */
#ifndef COLO_KERNELS_H
#define COLO_KERNELS_H

#include "core/sums.h"
#include "loss/linear/rows.h"
#include "loss/passes.h"

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
 * alignment, in 16-byte accesses where both sides allow it. A src without data is zeros: all bits
 * of dst become zero. @elem_size: 1, 2, 4 or 8. @blocks of 256 threads at most; 0: any number. */
cudaError_t colo_k_boxes_copy(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, int32_t blocks, cudaStream_t stream);

/* dst[i] = src[i], one element further on along the last axis, for @n pairs of i64 boxes
 * (shift.cu), one launch for each COLO_K_BOXES of them; the last element of a row is @last. A dst
 * may be its src itself. Pointers are multiples of 8. */
cudaError_t colo_k_boxes_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, cudaStream_t stream);

/* dst = src[0] + src[1] + ... in that order; fp32 accumulation for bf16 and fp16, one rounding. A
 * src may be dst itself. The same bits as the host's, but a NaN is CUDA's own. */
cudaError_t colo_k_box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                           colo_dtype_t dtype, cudaStream_t stream);

/* The same for @n sums of addends that differ in dtype: many in a launch, up to 64 of no more than
 * 8 addends each. None reads what another one writes. */
cudaError_t colo_k_box_sums(const colo_mixed_sum_t *sums, int32_t n, cudaStream_t stream);

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

cudaError_t colo_k_logprob_stats(const struct colo_logprob_pass *p, cudaStream_t stream);
cudaError_t colo_k_logprob_merge(const struct colo_logprob_pass *p, cudaStream_t stream);
cudaError_t colo_k_logprob_grad(const struct colo_logprob_pass *p, cudaStream_t stream);

/* ---- lm_head path (rows.cu): what src/loss/linear/rows.h says ---- */

cudaError_t colo_k_rows_compact(const struct colo_linear_rows *p, cudaStream_t stream);
cudaError_t colo_k_rows_upstream(const struct colo_linear_upstream_rows *u, cudaStream_t stream);
cudaError_t colo_k_rows_factor(float *to, const float *from, double factor, const float *by,
                               cudaStream_t stream);
cudaError_t colo_k_rows_scatter(const struct colo_linear_scatter *s, cudaStream_t stream);
/* strides in elements; to, from [hi - lo, hidden] contiguous */
cudaError_t colo_k_rows_gather(const struct colo_linear_rows *p, int64_t lo, int64_t hi,
                               int64_t hidden, void *to, const void *from, int64_t from_stride,
                               colo_dtype_t dtype, cudaStream_t stream);
cudaError_t colo_k_rows_restore(const struct colo_linear_rows *p, int64_t lo, int64_t hi,
                                int64_t hidden, void *to, int64_t to_stride, const void *from,
                                colo_dtype_t dtype, cudaStream_t stream);
cudaError_t colo_k_rows_clear(const struct colo_linear_rows *p, int64_t hidden, void *to,
                              int64_t to_stride, colo_dtype_t dtype, cudaStream_t stream);
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
