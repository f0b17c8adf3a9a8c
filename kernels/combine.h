/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine.h - what ranks brought to a reduction, combined in rank order (combine.cu).
 *
 * The rules of kernels.h hold: checked arguments, no allocation, no waiting, empty work is success.
 */
#ifndef COLO_KERNELS_COMBINE_H
#define COLO_KERNELS_COMBINE_H

#include <colobridge/comm.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* dst[i] = v[0][i] op v[1][i] op ... in that order, v[r] = parts + r * stride bytes, but for rank
 * @own, whose values are at @mine. fp32 accumulation and one rounding for bf16 and fp16; integer
 * sums wrap; MAX keeps a NaN. @dst may be @mine. Float dtypes, i32, i64. */
cudaError_t colo_k_combine(void *dst, const void *parts, int64_t stride, const void *mine,
                           int32_t own, int32_t ranks, int64_t count, colo_dtype_t dtype,
                           colo_redop_t op, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
