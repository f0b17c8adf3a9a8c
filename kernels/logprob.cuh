/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.cuh - what the two loss files share: reading logits 16 bytes at a time, and x of a logit.
 *
 * A row begins where the caller put it, so the 16-byte words of a row ("vectors") begin at or before
 * its first element: vector k holds elements [first + k N, first + (k + 1) N), first <= 0. Vectors that
 * are inside the row are read in one access, the one or two that are not element by element.
 *
 * x = factor z, or cap tanh(factor z / cap), both of the args. Everything else uses x - M only, and without softcap
 * that is one fused multiply-add of z, so a large common offset of the logits costs no digits.
 */
#ifndef COLO_KERNELS_LOGPROB_CUH
#define COLO_KERNELS_LOGPROB_CUH

#include "dtype.cuh"
#include "kernels.h"
#include "loss/logprob-merge.h"
#include "loss/stat.h"

#include <math_constants.h>

#include <cmath>

namespace
{

/* e^d in one special-function instruction, 2 ulp; 0 at -inf. */
__device__ float exp_of(float d)
{
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(d * CUDART_L2E_F));
    return e;
}
__device__ double exp_of(double d)
{
    return exp(d);
}

/* a b, never a part of a fused multiply-add: the same bits wherever it is inlined */
__device__ float product(float a, float b)
{
    return __fmul_rn(a, b);
}
__device__ double product(double a, double b)
{
    return __dmul_rn(a, b);
}

template <typename T, typename F> __device__ T all_lanes(T v, F f)
{
#pragma unroll
    for (int o = 16; o > 0; o /= 2)
        v = f(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

/* @v of the WIDTH threads of a row, which are a block or a warp, by @f, in a fixed order; each of them gets
 * it. @partial: one value per warp, not used by a warp. */
template <int WIDTH, typename T, typename F>
__device__ T all_threads(T v, T *partial, F f)
{
    v = all_lanes(v, f);
    if constexpr (WIDTH == 32)
        return v;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = v;
    __syncthreads();
    v = partial[0];
    for (int w = 1; w < WIDTH / 32; w++)
        v = f(v, partial[w]);
    return v;
}

/* What makes x of a row's z. */
template <typename R> struct scaling {
    R factor, cap;
};
template <typename R> __device__ scaling<R> scaling_by(const colo_logprob_args &p, double coldness)
{
    return {(R)(p.factor * coldness), (R)(p.cap * coldness)};
}
/* Of row @t in forward; @counts: else there may be no temperature */
template <typename R>
__device__ scaling<R> scaling_of(const colo_logprob_args &p, int64_t t, bool counts)
{
    return counts && p.temperature ? scaling_by<R>(p, colo_logprob_coldness(&p, t))
                         : scaling<R>{(R)p.factor, (R)p.cap};
}

/* x of z where x is not just factor z: softcap, a factor that is not positive, f64. */
template <typename R> __device__ R x_of(R z, R factor, R cap)
{
    const R y = product(factor, z);
    return cap > 0 ? product(cap, tanh(y / cap)) : y;
}

/* What a top-k search compares: rises with x. */
template <typename R> __device__ R key_of(R z, double factor)
{
    return factor > 0 ? z : factor < 0 ? -z : 0;
}

/* Elements (<= 0) from the row's first to the 16-byte boundary at or before it. */
template <typename D> __device__ int64_t first_vector(const void *row)
{
    return -(int64_t)(((uintptr_t)row & 15) / sizeof(typename D::elem));
}

/* Read once, never again from here: do not keep it in the caches. */
__device__ uint4 load_vector(const void *row, int64_t element, int size)
{
    return __ldcs((const uint4 *)((const char *)row + element * size));
}

/* A vector of logits becomes as many elements of the gradient: 16 bytes, or 8 of a narrower dtype.
 */
template <typename D, typename O>
__device__ void store_vector(typename O::elem *out, const typename D::real *z)
{
    if constexpr (sizeof(typename O::elem) == sizeof(typename D::elem))
        __stcs((uint4 *)out, O::pack(z));
    else
        __stcs((uint2 *)out, uint2{O::two(z[0], z[1]), O::two(z[2], z[3])});
}

/* Is x = factor z, with the order of z? Then a row needs no rounded x. */
bool is_plain(const colo_logprob_args &p)
{
    return p.dtype != COLO_F64 && p.cap == 0 && (float)p.factor > 0 &&
           std::isfinite((float)p.factor);
}

} // namespace

#endif
