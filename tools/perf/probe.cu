/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.cu - baselines: what a kernel can reach that only reads, only reads and writes, or only
 * stores into other GPUs, and the inputs and comparisons of colo-perf.
 */
#include "probe.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
    __shared__ uint32_t block_sum;
    if (threadIdx.x == 0)
        block_sum = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        atomicAdd(&block_sum, s);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicAdd(sum, (unsigned long long)block_sum);
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

/* 128 blocks: a link is full from 64 on, and more do not make it faster. */
constexpr unsigned PUSH_BLOCKS = 128;
constexpr int64_t TILE = THREADS * UNROLL;

struct pushes {
    uint4 *dst[COLO_K_PUSHES];
    const uint4 *src[COLO_K_PUSHES];
    int64_t words[COLO_K_PUSHES];
    int64_t tiles; /* of the longest */
    int32_t n;
};

/* Its shared memory leaves no space for a block of a product. */
__global__ void sleep_kernel(int64_t us)
{
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while ((int64_t)(now - begin) < us * 1000);
}

__global__ void __launch_bounds__(THREADS) push_kernel(const __grid_constant__ pushes p)
{
    /* A tile of each in turn: receivers are served alike, and no two ranks meet at one for long. */
    for (int64_t i = blockIdx.x; i < p.tiles * p.n; i += gridDim.x) {
        const int32_t m = (int32_t)(i % p.n);
        const int64_t offset = i / p.n * TILE + threadIdx.x;
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (offset + u * THREADS < p.words[m])
                v[u] = __ldcs(p.src[m] + offset + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (offset + u * THREADS < p.words[m])
                __stcs(p.dst[m] + offset + u * THREADS, v[u]);
    }
}

__device__ uint64_t code_of(const colo_k_code_t &p, int64_t b, int64_t s, int64_t h)
{
    return mix(p.salt + (uint64_t)((b * p.rows + s) * p.h + h + 1) * 0x9e3779b97f4a7c15ull);
}

/* T's bits as U: normal, positive, below infinity */
template <typename T, typename U> __device__ U pattern(uint64_t r);
template <> __device__ uint16_t pattern<__nv_bfloat16>(uint64_t r)
{
    return (uint16_t)(0x80 + r % (0x7f80 - 0x80));
}
template <> __device__ uint16_t pattern<__half>(uint64_t r)
{
    return (uint16_t)(0x400 + r % (0x7c00 - 0x400));
}
template <> __device__ uint32_t pattern<float>(uint64_t r)
{
    return (uint32_t)(0x00800000 + r % (0x7f800000 - 0x00800000));
}

__device__ uint16_t number(__nv_bfloat16, float v)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}
__device__ uint16_t number(__half, float v)
{
    return __half_as_ushort(__float2half_rn(v));
}
__device__ uint32_t number(float, float v)
{
    return __float_as_uint(v);
}

/* The bits that element (b, s, h) must have. Sums stay below 256: whole in 8 bits of mantissa. */
template <typename T, typename U>
__device__ U expected(const colo_k_code_t &p, int64_t b, int64_t s, int64_t h)
{
    if (s < 0)
        return 0;
    const uint64_t r = code_of(p, b, s, h);
    if (p.addends == 0)
        return pattern<T, U>(r);
    const uint32_t below = 255 / (uint32_t)p.addends + 1;
    uint32_t sum = 0;
    for (int32_t l = 0; l < p.addends; l++)
        if (p.addend < 0 || p.addend == l)
            sum += (uint32_t)(mix(r + (uint64_t)(l + 1)) % below);
    return number(T{}, (float)sum);
}

template <typename T, typename U, bool CHECK>
__global__ void __launch_bounds__(THREADS) code_kernel(colo_k_code_t p, unsigned long long *wrong)
{
    const int64_t n = p.nb * p.ns * p.h, stride = (int64_t)gridDim.x * THREADS;
    unsigned long long bad = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        const int64_t h = i % p.h, row = i / p.h, s = row % p.ns, b = row / p.ns;
        U *offset = (U *)p.data + b * p.stride_b + s * p.stride_s + h;
        const U want = expected<T, U>(p, p.b[b], p.s[s], h);
        if (CHECK)
            bad += *offset != want;
        else
            *offset = want;
    }
    if (CHECK && bad)
        atomicAdd(wrong, bad);
}

template <bool CHECK>
cudaError_t code(const colo_k_code_t *p, unsigned long long *wrong, cudaStream_t stream)
{
    const int64_t n = p->nb * p->ns * p->h;
    if (n == 0)
        return cudaSuccess;
    const unsigned blocks = (unsigned)std::min<int64_t>((n - 1) / THREADS + 1, 4096);
    switch (p->dtype) {
    case COLO_BF16:
        code_kernel<__nv_bfloat16, uint16_t, CHECK><<<blocks, THREADS, 0, stream>>>(*p, wrong);
        break;
    case COLO_F16:
        code_kernel<__half, uint16_t, CHECK><<<blocks, THREADS, 0, stream>>>(*p, wrong);
        break;
    case COLO_F32:
        code_kernel<float, uint32_t, CHECK><<<blocks, THREADS, 0, stream>>>(*p, wrong);
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_probe_sleep(int32_t blocks, bool whole, int64_t us,
                                          cudaStream_t stream)
{
    const int space = 200 << 10;
    const cudaError_t e = cudaFuncSetAttribute(
        sleep_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, space);
    if (e != cudaSuccess)
        return e;
    sleep_kernel<<<(unsigned)blocks, 32, whole ? space : 0, stream>>>(us);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_probe_push(const colo_k_push_t *push, int32_t n, cudaStream_t stream)
{
    pushes p = {};
    if (n < 0 || n > COLO_K_PUSHES)
        return cudaErrorInvalidValue;
    for (int32_t i = 0; i < n; i++) {
        if (push[i].bytes < 16)
            continue;
        p.dst[p.n] = (uint4 *)push[i].dst;
        p.src[p.n] = (const uint4 *)push[i].src;
        p.words[p.n] = push[i].bytes / 16;
        p.tiles = std::max(p.tiles, (p.words[p.n] - 1) / TILE + 1);
        p.n++;
    }
    if (p.n == 0)
        return cudaSuccess;
    push_kernel<<<(unsigned)std::min<int64_t>(p.tiles * p.n, PUSH_BLOCKS), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_probe_code(const colo_k_code_t *part, cudaStream_t stream)
{
    return code<false>(part, nullptr, stream);
}

extern "C" cudaError_t colo_k_probe_decode(const colo_k_code_t *part, unsigned long long *wrong,
                                           cudaStream_t stream)
{
    return code<true>(part, wrong, stream);
}

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
