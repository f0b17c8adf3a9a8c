/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.cu - yardsticks: what a kernel can reach that only reads, or only reads and writes, and the
 * random inputs and comparisons of colo-perf. Not in the library.
 */
#include "kernels.h"

#include <cuda_bf16.h>

#include <algorithm>

namespace
{

constexpr int THREADS = 512, UNROLL = 4;
constexpr unsigned READ_BLOCKS = 4096; /* each ends in an atomic addition to one word */

unsigned grid_for(int64_t words)
{
    return (unsigned)std::min<int64_t>((words - 1) / (THREADS * UNROLL) + 1, 1 << 30);
}

__global__ void __launch_bounds__(THREADS)
    read_kernel(const uint4 *src, int64_t words, unsigned long long *sum)
{
    uint32_t s = 0;
    const int64_t stride = (int64_t)gridDim.x * THREADS * UNROLL;
    for (int64_t i = (int64_t)blockIdx.x * THREADS * UNROLL + threadIdx.x; i < words; i += stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = i + u * THREADS < words ? __ldcs(src + i + u * THREADS) : uint4{0, 0, 0, 0};
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            s += v[u].x + v[u].y + v[u].z + v[u].w;
    }
    s = __reduce_add_sync(0xffffffffu, s);
    __shared__ uint32_t room;
    if (threadIdx.x == 0)
        room = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        atomicAdd(&room, s);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicAdd(sum, (unsigned long long)room);
}

__global__ void __launch_bounds__(THREADS) copy_kernel(uint4 *dst, const uint4 *src, int64_t words)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS * UNROLL;
    for (int64_t i = (int64_t)blockIdx.x * THREADS * UNROLL + threadIdx.x; i < words; i += stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < words)
                v[u] = __ldcs(src + i + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < words)
                __stcs(dst + i + u * THREADS, v[u]);
    }
}

__global__ void __launch_bounds__(THREADS)
    diff_kernel(const uint4 *a, const uint4 *b, int64_t words, unsigned long long *wrong)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    unsigned long long n = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < words; i += stride) {
        uint4 x = a[i], y = b[i];
        n += x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
    }
    if (n)
        atomicAdd(wrong, n);
}

__device__ uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* the sum of four uniform numbers, scaled to variance 1 */
__global__ void __launch_bounds__(THREADS)
    fill_kernel(__nv_bfloat16 *dst, int64_t n, float spread, uint64_t seed)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        uint64_t r = mix(seed + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15ull);
        float v = (float)(r & 0xffff) + (float)(r >> 16 & 0xffff) + (float)(r >> 32 & 0xffff) +
                  (float)(r >> 48);
        dst[i] = __float2bfloat16_rn(spread * (v / 65536.0f - 2.0f) * 1.7320508f);
    }
}

} // namespace

extern "C" cudaError_t colo_k_probe_read(const void *src, int64_t bytes, unsigned long long *sum,
                                         cudaStream_t stream)
{
    if (bytes < 16)
        return cudaSuccess;
    read_kernel<<<std::min(grid_for(bytes / 16), READ_BLOCKS), THREADS, 0, stream>>>(
        (const uint4 *)src, bytes / 16, sum);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_probe_copy(void *dst, const void *src, int64_t bytes,
                                         cudaStream_t stream)
{
    if (bytes < 16)
        return cudaSuccess;
    copy_kernel<<<grid_for(bytes / 16), THREADS, 0, stream>>>((uint4 *)dst, (const uint4 *)src,
                                                              bytes / 16);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_probe_diff(const void *a, const void *b, int64_t bytes,
                                         unsigned long long *wrong, cudaStream_t stream)
{
    if (bytes < 16)
        return cudaSuccess;
    diff_kernel<<<grid_for(bytes / 16), THREADS, 0, stream>>>((const uint4 *)a, (const uint4 *)b,
                                                              bytes / 16, wrong);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_probe_fill(void *dst, int64_t bytes, float spread, uint64_t seed,
                                         cudaStream_t stream)
{
    if (bytes < 16)
        return cudaSuccess;
    fill_kernel<<<grid_for(bytes / 16), THREADS, 0, stream>>>((__nv_bfloat16 *)dst, bytes / 2,
                                                              spread, seed);
    return cudaGetLastError();
}
