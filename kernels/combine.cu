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

#include "dtype.cuh"

namespace
{

constexpr int THREADS = 256;

/* An integer dtype: unsigned for sums, which may wrap */
template <typename T> struct integer {
    using elem = T;
    using real = T;
    static __device__ T load(T v)
    {
        return v;
    }
    static __device__ T store(T v)
    {
        return v;
    }
};
template <typename T> __device__ T add(T a, T b)
{
    return a + b;
}

template <typename T> __device__ T larger(T a, T b)
{
    return b > a || b != b ? b : a; /* NaN stays */
}

struct sources {
    const char *parts, *mine;
    int64_t stride;
    int32_t own, ranks;
};

template <typename T, int N> struct alignas(sizeof(T) * N) pack {
    T v[N];
};

template <typename D, int N, bool MAX>
__global__ void __launch_bounds__(THREADS)
    combine(typename D::elem *dst, sources s, int64_t packs)
{
    using line = pack<typename D::elem, N>;
    using R = typename D::real;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < packs;
         i += (int64_t)gridDim.x * THREADS) {
        R a[N];
        for (int32_t r = 0; r < s.ranks; r++) {
            const char *from = r == s.own ? s.mine : s.parts + r * s.stride;
            const line p = reinterpret_cast<const line *>(from)[i];
#pragma unroll
            for (int k = 0; k < N; k++) {
                const R v = D::load(p.v[k]);
                a[k] = r == 0 ? v : MAX ? larger(a[k], v) : add(a[k], v);
            }
        }
        line out;
#pragma unroll
        for (int k = 0; k < N; k++)
            out.v[k] = D::store(a[k]);
        reinterpret_cast<line *>(dst)[i] = out;
    }
}

template <typename D, int N, bool MAX>
cudaError_t launch_as(void *dst, const sources &s, int64_t count, cudaStream_t stream)
{
    using E = typename D::elem;
    int64_t packs = count / N, blocks = (packs + THREADS - 1) / THREADS;
    if (blocks > 8192)
        blocks = 8192;
    if (packs > 0)
        combine<D, N, MAX><<<(unsigned)blocks, THREADS, 0, stream>>>((E *)dst, s, packs);
    int64_t rest = count % N;
    if (rest > 0) {
        int64_t offset = packs * N * (int64_t)sizeof(E);
        sources t = {s.parts ? s.parts + offset : nullptr, s.mine + offset, s.stride, s.own,
                     s.ranks};
        combine<D, 1, MAX><<<1, THREADS, 0, stream>>>((E *)((char *)dst + offset), t, rest);
    }
    return cudaGetLastError();
}

template <typename D, bool MAX>
cudaError_t launch(void *dst, const sources &s, int64_t count, cudaStream_t stream)
{
    using E = typename D::elem;
    uintptr_t bits = (uintptr_t)dst | (uintptr_t)s.parts | (uintptr_t)s.mine | (uintptr_t)s.stride;
    return bits % 16 == 0 ? launch_as<D, 16 / sizeof(E), MAX>(dst, s, count, stream)
                          : launch_as<D, 1, MAX>(dst, s, count, stream);
}

} // namespace

extern "C" cudaError_t colo_k_combine(void *dst, const void *parts, int64_t stride,
                                      const void *mine, int32_t own, int32_t ranks, int64_t count,
                                      colo_dtype_t dtype, colo_redop_t op, cudaStream_t stream)
{
    const sources s = {(const char *)parts, (const char *)mine, stride, own, ranks};
    const bool max = op == COLO_REDOP_MAX;
    if (count == 0)
        return cudaSuccess;
    switch (dtype) {
    case COLO_I32:
        return max ? launch<integer<int32_t>, true>(dst, s, count, stream)
                   : launch<integer<uint32_t>, false>(dst, s, count, stream);
    case COLO_I64:
        return max ? launch<integer<int64_t>, true>(dst, s, count, stream)
                   : launch<integer<uint64_t>, false>(dst, s, count, stream);
    default:
        return with_dtype(dtype, [&](auto d) {
            using D = decltype(d);
            return (max ? launch<D, true> : launch<D, false>)(dst, s, count, stream);
        });
    }
}
