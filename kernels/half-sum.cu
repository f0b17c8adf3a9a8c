/* SPDX-License-Identifier: Apache-2.0 */
/*
 * half-sum.cu - fp32 and bf16 or fp16 values added in fp32: gradients of several consumers, and a
 * half-precision gradient that joins an fp32 main gradient.
 *
 * One element a thread and step, in a grid-stride loop: neighbouring threads read neighbouring
 * elements, and the memory is the limit.
 */
#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

namespace
{

constexpr int THREADS = 256;
constexpr int64_t BLOCKS = 4096;

__device__ float widen(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

__device__ float widen(__half v)
{
    return __half2float(v);
}

__device__ void put(float *to, float v)
{
    *to = v;
}

__device__ void put(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

__device__ void put(__half *to, float v)
{
    *to = __float2half_rn(v);
}

template <typename To, typename Half>
__global__ void __launch_bounds__(THREADS)
    half_sum_kernel(To *to, const float *wide, const Half *half, int64_t n)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const float h = widen(half[i]);
        put(to + i, wide ? __fadd_rn(wide[i], h) : h);
    }
}

template <typename Half>
cudaError_t launch(void *to, bool to_f32, const float *wide, const void *half, int64_t n,
                   cudaStream_t stream)
{
    const unsigned blocks = (unsigned)std::min((n + THREADS - 1) / THREADS, BLOCKS);
    if (to_f32)
        half_sum_kernel<<<blocks, THREADS, 0, stream>>>((float *)to, wide, (const Half *)half, n);
    else
        half_sum_kernel<<<blocks, THREADS, 0, stream>>>((Half *)to, wide, (const Half *)half, n);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_half_sum(void *to, bool to_f32, const float *wide, const void *half,
                                       colo_dtype_t dtype, int64_t n, cudaStream_t stream)
{
    if (n == 0)
        return cudaSuccess;
    switch (dtype) {
    case COLO_BF16:
        return launch<__nv_bfloat16>(to, to_f32, wide, half, n, stream);
    case COLO_F16:
        return launch<__half>(to, to_f32, wide, half, n, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
