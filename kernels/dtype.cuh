/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtype.cuh - the float dtypes: what an element is in memory, what it is calculated in, and how one
 * becomes the other. A kernel is a template over one of these structs; with_dtype() chooses it.
 *
 *   elem      an element in memory; N of them are 16 bytes
 *   real      what sums and statistics of it are made in
 *   load      exact; store: rounded once, to nearest even
 *   unpack    N elements of 16 bytes; pack: the way back, two: two of 16 bits
 *   top       the largest of 16 bytes, NaN when there is one
 */
#ifndef COLO_KERNELS_DTYPE_CUH
#define COLO_KERNELS_DTYPE_CUH

#include <colobridge/tensor.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace
{

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

struct bf16 {
    using elem = uint16_t;
    using real = float;
    static constexpr int N = 8;
    static __device__ float load(elem e)
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
    static __device__ elem store(float v)
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
    /* half the instructions of comparing floats */
    static __device__ float top(const uint4 &v)
    {
        const __nv_bfloat162 *h = (const __nv_bfloat162 *)&v;
        __nv_bfloat162 m = __hmax2_nan(__hmax2_nan(h[0], h[1]), __hmax2_nan(h[2], h[3]));
        return __bfloat162float(__hmax_nan(m.x, m.y));
    }
};
struct f16 {
    using elem = uint16_t;
    using real = float;
    static constexpr int N = 8;
    static __device__ float load(elem e)
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
    static __device__ elem store(float v)
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

struct f32 {
    using elem = float;
    using real = float;
    static constexpr int N = 4;
    static __device__ float load(elem e)
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
    static __device__ elem store(float v)
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
    using elem = double;
    using real = double;
    static constexpr int N = 2;
    static __device__ double load(elem e)
    {
        return e;
    }
    static __device__ void unpack(const uint4 &v, double *z)
    {
        const double *d = (const double *)&v;
        z[0] = d[0];
        z[1] = d[1];
    }
    static __device__ elem store(double v)
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

/* never a part of a fused multiply-add: the host's bits */
__device__ float add(float a, float b)
{
    return __fadd_rn(a, b);
}
__device__ double add(double a, double b)
{
    return __dadd_rn(a, b);
}

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

} // namespace

#endif
