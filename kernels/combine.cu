/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine.cu - the reduction of a collective: every rank's values of one slice, in rank order.
 *
 * The transport brings the slices together in parts; this adds them up as the host backends do
 * (src/comm/reduce.c), so a sum has the same bits on threads, sockets and GPUs, for any
 * message size. One thread takes 16 bytes of every rank where all pointers allow it, else one
 * element. __fadd_rn keeps the compiler from fusing anything.
 */
#include "combine.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace
{

constexpr int THREADS = 256;

template <typename T> struct math { /* integers: unsigned for sums */
    using acc = T;
    static __device__ acc load(T v)
    {
        return v;
    }
    static __device__ T store(acc v)
    {
        return v;
    }
    static __device__ acc add(acc a, acc b)
    {
        return a + b;
    }
    static __device__ acc most(acc a, acc b)
    {
        return b > a ? b : a;
    }
};
template <> struct math<float> {
    using acc = float;
    static __device__ acc load(float v)
    {
        return v;
    }
    static __device__ float store(acc v)
    {
        return v;
    }
    static __device__ acc add(acc a, acc b)
    {
        return __fadd_rn(a, b);
    }
    static __device__ acc most(acc a, acc b)
    {
        return b > a || b != b ? b : a;
    }
};
template <> struct math<double> {
    using acc = double;
    static __device__ acc load(double v)
    {
        return v;
    }
    static __device__ double store(acc v)
    {
        return v;
    }
    static __device__ acc add(acc a, acc b)
    {
        return __dadd_rn(a, b);
    }
    static __device__ acc most(acc a, acc b)
    {
        return b > a || b != b ? b : a;
    }
};
template <> struct math<__nv_bfloat16> : math<float> {
    static __device__ acc load(__nv_bfloat16 v)
    {
        return __bfloat162float(v);
    }
    static __device__ __nv_bfloat16 store(acc v)
    {
        return __float2bfloat16_rn(v);
    }
};
template <> struct math<__half> : math<float> {
    static __device__ acc load(__half v)
    {
        return __half2float(v);
    }
    static __device__ __half store(acc v)
    {
        return __float2half_rn(v);
    }
};

struct sources {
    const char *parts, *mine;
    int64_t stride;
    int32_t own, ranks;
};

template <typename T, int N> struct alignas(sizeof(T) * N) pack {
    T v[N];
};

template <typename T, int N, bool MAX>
__global__ void __launch_bounds__(THREADS) combine(T *dst, sources s, int64_t packs)
{
    using M = math<T>;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < packs;
         i += (int64_t)gridDim.x * THREADS) {
        typename M::acc a[N];
        for (int32_t r = 0; r < s.ranks; r++) {
            const char *from = r == s.own ? s.mine : s.parts + r * s.stride;
            pack<T, N> p = reinterpret_cast<const pack<T, N> *>(from)[i];
#pragma unroll
            for (int k = 0; k < N; k++) {
                typename M::acc v = M::load(p.v[k]);
                a[k] = r == 0 ? v : MAX ? M::most(a[k], v) : M::add(a[k], v);
            }
        }
        pack<T, N> out;
#pragma unroll
        for (int k = 0; k < N; k++)
            out.v[k] = M::store(a[k]);
        reinterpret_cast<pack<T, N> *>(dst)[i] = out;
    }
}

template <typename T, int N, bool MAX>
cudaError_t launch_as(void *dst, const sources &s, int64_t count, cudaStream_t stream)
{
    int64_t packs = count / N, blocks = (packs + THREADS - 1) / THREADS;
    if (blocks > 8192)
        blocks = 8192;
    if (packs > 0)
        combine<T, N, MAX><<<(unsigned)blocks, THREADS, 0, stream>>>((T *)dst, s, packs);
    int64_t rest = count % N;
    if (rest > 0) {
        int64_t offset = packs * N * (int64_t)sizeof(T);
        sources t = {s.parts ? s.parts + offset : nullptr, s.mine + offset, s.stride, s.own,
                     s.ranks};
        combine<T, 1, MAX><<<1, THREADS, 0, stream>>>((T *)((char *)dst + offset), t, rest);
    }
    return cudaGetLastError();
}

template <typename T, bool MAX>
cudaError_t launch(void *dst, const sources &s, int64_t count, cudaStream_t stream)
{
    uintptr_t bits = (uintptr_t)dst | (uintptr_t)s.parts | (uintptr_t)s.mine | (uintptr_t)s.stride;
    return bits % 16 == 0 ? launch_as<T, 16 / sizeof(T), MAX>(dst, s, count, stream)
                          : launch_as<T, 1, MAX>(dst, s, count, stream);
}

} // namespace

extern "C" cudaError_t colo_k_combine(void *dst, const void *parts, int64_t stride,
                                      const void *mine, int32_t own, int32_t ranks, int64_t count,
                                      colo_dtype_t dtype, colo_redop_t op, cudaStream_t stream)
{
    const sources s = {(const char *)parts, (const char *)mine, stride, own, ranks};
    const bool max = op == COLO_MAX;
    if (count == 0)
        return cudaSuccess;
    switch (dtype) {
    case COLO_F32:
        return (max ? launch<float, true> : launch<float, false>)(dst, s, count, stream);
    case COLO_F64:
        return (max ? launch<double, true> : launch<double, false>)(dst, s, count, stream);
    case COLO_BF16:
        return (max ? launch<__nv_bfloat16, true> : launch<__nv_bfloat16, false>)(dst, s, count,
                                                                                  stream);
    case COLO_F16:
        return (max ? launch<__half, true> : launch<__half, false>)(dst, s, count, stream);
    case COLO_I32:
        return max ? launch<int32_t, true>(dst, s, count, stream)
                   : launch<uint32_t, false>(dst, s, count, stream);
    case COLO_I64:
        return max ? launch<int64_t, true>(dst, s, count, stream)
                   : launch<uint64_t, false>(dst, s, count, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
