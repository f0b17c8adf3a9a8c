/* SPDX-License-Identifier: Apache-2.0 */
/*
 * half-sum.cu - fp32 and bf16 or fp16 values added in fp32: gradients of several consumers, and a
 * half-precision gradient that joins an fp32 main gradient.
 *
 * One element a thread and round, in a grid-stride loop: neighbouring threads read neighbouring
 * elements, and the memory is the limit.
 */
#include "dtype.cuh"
#include "kernels.h"

#include <algorithm>

namespace
{

constexpr int THREADS = 256;
constexpr int64_t BLOCKS = 4096;

template <typename O, typename D>
__global__ void __launch_bounds__(THREADS)
    half_sum_kernel(typename O::elem *to, const float *wide, const typename D::elem *half, int64_t n)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        const float h = D::load(half[i]);
        to[i] = O::store(wide ? add(wide[i], h) : h);
    }
}

template <typename D>
cudaError_t launch(void *to, bool to_f32, const float *wide, const void *half, int64_t n,
                   cudaStream_t stream)
{
    using E = typename D::elem;
    const unsigned blocks = (unsigned)std::min((n + THREADS - 1) / THREADS, BLOCKS);
    if (to_f32)
        half_sum_kernel<f32, D>
            <<<blocks, THREADS, 0, stream>>>((float *)to, wide, (const E *)half, n);
    else
        half_sum_kernel<D, D><<<blocks, THREADS, 0, stream>>>((E *)to, wide, (const E *)half, n);
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
        return launch<bf16>(to, to_f32, wide, half, n, stream);
    case COLO_F16:
        return launch<f16>(to, to_f32, wide, half, n, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
