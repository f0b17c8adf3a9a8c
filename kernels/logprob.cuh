/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.cuh - what the two loss files share: reading logits 16 bytes at a time, and x of a logit.
 *
 * A row begins where the caller put it, so the 16-byte words of a row ("vectors") begin at or before
 * its first element: vector k holds elements [first + k N, first + (k + 1) N), first <= 0. Vectors that
 * are whole are read in one access, the one or two that are not element by element.
 *
 * x = factor z, or cap tanh(factor z / cap), both of the args. Everything else uses x - M only, and without softcap
 * that is one fused multiply-add of z, so a large common offset of the logits costs no digits.
 */
#ifndef COLO_KERNELS_LOGPROB_CUH
#define COLO_KERNELS_LOGPROB_CUH

#include "kernels.h"
#include "loss/stat.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math_constants.h>

#include <cmath>

namespace
{

/* One dtype: N elements in 16 bytes, and what the row's arithmetic is made in. */
struct bf16 {
    using real = float;
    using stat = float;
    using elem = uint16_t;
    static constexpr int N = 8;
    static __device__ float one(elem e)
    {
        return __uint_as_float((uint32_t)e << 16);
    }
    static __device__ void unpack(const uint4 &v, float *z)
    {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            z[2 * i] = __uint_as_float(w[i] << 16);
            z[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
    static __device__ elem round(float v)
    {
        return __bfloat16_as_ushort(__float2bfloat16_rn(v));
    }
    static __device__ uint32_t two(float lo, float hi)
    {
        __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&h;
    }
    static __device__ uint4 pack(const float *v)
    {
        return {two(v[0], v[1]), two(v[2], v[3]), two(v[4], v[5]), two(v[6], v[7])};
    }
    /* NaN when there is one: half the instructions of comparing floats */
    static __device__ float top(const uint4 &v)
    {
        const __nv_bfloat162 *h = (const __nv_bfloat162 *)&v;
        __nv_bfloat162 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
        return __bfloat162float(__hmax_nan(m.x, m.y));
    }
};
struct f16 {
    using real = float;
    using stat = float;
    using elem = uint16_t;
    static constexpr int N = 8;
    static __device__ float one(elem e)
    {
        return __half2float(__ushort_as_half(e));
    }
    static __device__ void unpack(const uint4 &v, float *z)
    {
        const __half2 *h = (const __half2 *)&v;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 f = __half22float2(h[i]);
            z[2 * i] = f.x;
            z[2 * i + 1] = f.y;
        }
    }
    static __device__ elem round(float v)
    {
        return __half_as_ushort(__float2half_rn(v));
    }
    static __device__ uint32_t two(float lo, float hi)
    {
        __half2 h = __floats2half2_rn(lo, hi);
        return *(uint32_t *)&h;
    }
    static __device__ uint4 pack(const float *v)
    {
        return {two(v[0], v[1]), two(v[2], v[3]), two(v[4], v[5]), two(v[6], v[7])};
    }
    static __device__ float top(const uint4 &v)
    {
        const __half2 *h = (const __half2 *)&v;
        __half2 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
        return __half2float(__hmax_nan(m.x, m.y));
    }
};

__device__ float max_nan(float a, float b)
{
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}
__device__ double max_nan(double a, double b)
{
    return a > b || a != a ? a : b;
}

struct f32 {
    using real = float;
    using stat = float;
    using elem = float;
    static constexpr int N = 4;
    static __device__ float one(elem e)
    {
        return e;
    }
    static __device__ void unpack(const uint4 &v, float *z)
    {
        z[0] = __uint_as_float(v.x);
        z[1] = __uint_as_float(v.y);
        z[2] = __uint_as_float(v.z);
        z[3] = __uint_as_float(v.w);
    }
    static __device__ elem round(float v)
    {
        return v;
    }
    static __device__ uint4 pack(const float *v)
    {
        return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                __float_as_uint(v[3])};
    }
    static __device__ float top(const uint4 &v)
    {
        float z[4];
        unpack(v, z);
        return max_nan(max_nan(z[0], z[1]), max_nan(z[2], z[3]));
    }
};
struct f64 {
    using real = double;
    using stat = double;
    using elem = double;
    static constexpr int N = 2;
    static __device__ double one(elem e)
    {
        return e;
    }
    static __device__ void unpack(const uint4 &v, double *z)
    {
        const double *d = (const double *)&v;
        z[0] = d[0];
        z[1] = d[1];
    }
    static __device__ elem round(double v)
    {
        return v;
    }
    static __device__ uint4 pack(const double *v)
    {
        uint4 w;
        ((double *)&w)[0] = v[0];
        ((double *)&w)[1] = v[1];
        return w;
    }
    static __device__ double top(const uint4 &v)
    {
        double z[2];
        unpack(v, z);
        return max_nan(z[0], z[1]);
    }
};

/* @f of the struct of @dtype */
template <typename F> cudaError_t with_dtype(colo_dtype_t dtype, const F &f)
{
    switch (dtype) {
    case COLO_F32:
        return f(f32());
    case COLO_F64:
        return f(f64());
    case COLO_BF16:
        return f(bf16());
    case COLO_F16:
        return f(f16());
    default:
        return cudaErrorInvalidValue;
    }
}

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

/* Is x = factor z, with the order of z? Then a row needs no rounded x. */
bool is_plain(const colo_logprob_args &p)
{
    return p.dtype != COLO_F64 && p.cap == 0 && (float)p.factor > 0 &&
           std::isfinite((float)p.factor);
}

} // namespace

#endif
