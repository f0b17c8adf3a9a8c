/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mean.cu - sums and means over tokens and ranks: one block adds, in an order that depends on
 * nothing but the count; every rank then adds the parts in rank order.
 */
#include "kernels.h"
#include "loss/mean.h"

#include <math_constants.h>

#include <algorithm>

namespace
{

constexpr int THREADS = 256;

unsigned blocks_of(int64_t n)
{
    return (unsigned)std::min<int64_t>((n - 1) / THREADS + 1, 1 << 30);
}

constexpr int ADDERS = 1024;

template <typename T> __device__ double weight_of(const colo_mean_args &p, int64_t i)
{
    return p.weights ? (double)((const T *)p.weights)[i] : 1;
}

/* @alike: no rank weighs what another one counts; else NaN, for they divide by different sums */
template <typename T>
__device__ void put_result(const colo_mean_args &p, colo_loss_weighted_t all, bool alike)
{
    all.num = alike ? all.num : CUDART_NAN;
    all.value = all.den ? all.num / (double)all.den : alike ? 0 : CUDART_NAN;
    if (p.out) {
        *p.out = all;
        return;
    }
    const colo_mean_divisor by = colo_mean_divisor_of(&p, all.weight, all.den);
    const double over = alike ? by.over : CUDART_NAN;
    *(T *)p.mean.value = (T)(all.num / over);
    *p.mean.num = all.num;
    *p.mean.den = by.den;
    *p.mean.factor = 1 / over;
}

/* Does add_kernel make the result? It does on one rank without gradients. */
__host__ __device__ bool adds_all(const colo_mean_args &p)
{
    return p.ranks == 1 && !p.d_values;
}

template <typename T>
__global__ void __launch_bounds__(ADDERS) add_kernel(const __grid_constant__ colo_mean_args p)
{
    __shared__ colo_mean_part partial[ADDERS];
    colo_mean_part a = {0, 0, 0, 0};
    for (int64_t i = threadIdx.x; i < p.count; i += ADDERS) {
        if (p.mask && !p.mask[i])
            continue;
        const double w = weight_of<T>(p, i);
        a.num += (p.weighs == COLO_MEAN_WEIGHTED ? 1 : w) * (double)((const T *)p.values)[i];
        a.weight += w;
        a.den++;
    }
    partial[threadIdx.x] = a;
    for (int half = ADDERS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) {
            partial[threadIdx.x].num += partial[threadIdx.x + half].num;
            partial[threadIdx.x].weight += partial[threadIdx.x + half].weight;
            partial[threadIdx.x].den += partial[threadIdx.x + half].den;
        }
    }
    if (threadIdx.x == 0) {
        if (p.counted)
            partial[0].den = *p.counted;
        partial[0].weighs = p.weighs;
        p.parts[p.rank] = partial[0];
        if (adds_all(p))
            put_result<T>(p, {partial[0].num, partial[0].weight, partial[0].den, 0}, true);
    }
}

template <typename T> __global__ void finish_kernel(const __grid_constant__ colo_mean_args p)
{
    colo_loss_weighted_t all = {0, 0, 0, 0};
    bool alike = true;
    for (int32_t r = 0; r < p.ranks; r++) { /* every thread for itself: a few numbers, all cached */
        alike = alike && p.parts[r].weighs == p.parts->weighs;
        all.num += p.parts[r].num;
        all.weight += p.parts[r].weight;
        all.den += p.parts[r].den;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        put_result<T>(p, all, alike);
    const int64_t stride = (int64_t)gridDim.x * THREADS, n = p.d_values ? p.count : 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride)
        ((T *)p.d_values)[i] = !alike                 ? (T)CUDART_NAN
                               : !p.mask || p.mask[i] ? (T)(weight_of<T>(p, i) / (double)all.den)
                                                      : (T)0;
}

template <typename T>
__global__ void mean_grad_kernel(const __grid_constant__ colo_mean_grad_args p)
{
    double g = p.d_num ? *p.d_num : 0;
    if (p.d_value)
        g += (double)*(const T *)p.d_value * *p.factor;
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += stride)
        ((T *)p.d_values)[i] = (T)g;
}

} // namespace

extern "C" cudaError_t colo_k_mean_local(const colo_mean_args *p, cudaStream_t stream)
{
    if (p->dtype == COLO_F64)
        add_kernel<double><<<1, ADDERS, 0, stream>>>(*p);
    else
        add_kernel<float><<<1, ADDERS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_mean_finish(const colo_mean_args *p, cudaStream_t stream)
{
    if (adds_all(*p))
        return cudaSuccess;
    const unsigned blocks = blocks_of(std::max<int64_t>(p->d_values ? p->count : 0, 1));
    if (p->dtype == COLO_F64)
        finish_kernel<double><<<blocks, THREADS, 0, stream>>>(*p);
    else
        finish_kernel<float><<<blocks, THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_mean_grad(const colo_mean_grad_args *p, cudaStream_t stream)
{
    if (p->count == 0)
        return cudaSuccess;
    if (p->dtype == COLO_F64)
        mean_grad_kernel<double><<<blocks_of(p->count), THREADS, 0, stream>>>(*p);
    else
        mean_grad_kernel<float><<<blocks_of(p->count), THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}
