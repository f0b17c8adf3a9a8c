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
#ifndef COLO_KERNELS_KERNELS_H
#define COLO_KERNELS_KERNELS_H

#include "core/sums.h"
#include "loss/linear/rows.h"
#include "loss/args.h"

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

/* ---- losses: logprob-stats.cu, logprob-grad.cu, topk.cu, topk-loss.cu, sampling.cu, distill-*.cu,
 * sequence.cu, mean.cu and rows.cu. The structs say what each one does. ---- */

#define COLO_K_LAUNCHER(name, type) \
    cudaError_t colo_k_##name(const struct type *p, cudaStream_t stream);
COLO_LOSS_KERNELS(COLO_K_LAUNCHER)
COLO_LOSS_ROWS(COLO_K_LAUNCHER)
/* the candidates: those given; or the k largest, and in the same read what colo_k_logprob_stats()
 * makes of p's base (topk.cu) */
COLO_K_LAUNCHER(topk_given, colo_topk_args)
COLO_K_LAUNCHER(topk_largest, colo_topk_args)
/* what a product of the lm_head left in parts */
COLO_K_LAUNCHER(rows_fold, colo_linear_fold)
/* the lm_head's product that makes statistics (head-product.cu) */
COLO_K_LAUNCHER(head_product, colo_linear_tiled)
/* that of d_W (weight-product.cu), where the same device has it */
COLO_K_LAUNCHER(weight_product, colo_linear_summed)
/* *clusters: how many of their clusters of blocks run at a time on the current device; 0: the device
 * has no such kernel */
cudaError_t colo_k_head_fit(int32_t *clusters);

#ifdef __cplusplus
}
#endif
#endif
