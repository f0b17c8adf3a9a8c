/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.cu - one thread an element: which token of which row it is (sequence-args.h has the
 * closed form), then a move. And weighted sums: one block adds, in an order that depends on nothing
 * but the count; every rank then adds the parts in rank order.
 */
#include "kernels.h"
#include "loss/sequence-args.h"
#include "loss/weighted.h"

#include <math_constants.h>

#include <algorithm>
#include <cstdint>

namespace
{

constexpr int THREADS = 256;

unsigned blocks_of(int64_t n)
{
    return (unsigned)std::min<int64_t>((n - 1) / THREADS + 1, 1 << 30);
}

struct place {
    int64_t row, column, x, length, position;
};

__device__ int64_t zigzag(int64_t length, int64_t cp, int64_t rank, int64_t i)
{
    const int64_t q = length / (2 * cp);
    return cp == 1 ? i : i < q ? rank * q + i : (2 * cp - 1 - rank) * q + (i - q);
}

/* The row whose segment begins, of a shard of one of @cp ranks, at or before element @i. */
__device__ int64_t segment_of(const colo_sequence_args &p, int64_t i)
{
    int64_t lo = 0, hi = p.batch - 1;
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo + 1) / 2;
        if (p.cu_padded[mid] / p.cp <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

__device__ place locate(const colo_sequence_args &p, int64_t rank, int64_t i)
{
    place found;
    if (p.cu_padded) {
        found.row = segment_of(p, i);
        const int64_t begin = p.cu_padded[found.row], capacity = p.cu_padded[found.row + 1] - begin;
        found.x = zigzag(capacity, p.cp, rank, i - begin / p.cp);
        found.position = begin + found.x;
        found.length = p.lengths                ? p.lengths[found.row]
                       : capacity < p.positions ? capacity
                                                : p.positions;
        found.column = found.x + (p.left_padded ? p.positions - found.length : 0);
    } else {
        const int64_t local = p.row / p.cp;
        found.row = i / local;
        found.position = zigzag(p.row, p.cp, rank, i % local);
        found.length = p.lengths ? p.lengths[found.row] : p.positions;
        found.column = found.position;
        found.x = found.column - (p.left_padded ? p.positions - found.length : 0);
    }
    return found;
}

__device__ bool has_target(const place &found)
{
    return found.x >= 0 && found.x + 1 < found.length;
}

__global__ void targets_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += step) {
        const place found = locate(p, p.cp_rank, i);
        const int64_t next =
            p.token_stride < 0 ? found.position + 1 : found.row * p.token_stride + found.column + 1;
        p.targets[i] = has_target(found) ? p.tokens[next] : p.ignore;
    }
}

__global__ void mask_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += step) {
        const place found = locate(p, p.cp_rank, i);
        p.mask[i] = p.what == COLO_SEQUENCE_TARGETS ? has_target(found)
                                                    : found.x >= 0 && found.x < found.length;
    }
}

/* T: an unsigned integer as wide as an element. */
template <typename T> __global__ void scatter_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, n = p.cp * p.count;
    for (int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x; k < n; k += step) {
        const place found = locate(p, k / p.count, k % p.count);
        if (has_target(found))
            ((T *)p.table)[found.row * p.table_stride + found.column] = ((const T *)p.elements)[k];
    }
}

template <typename T> __global__ void gather_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t step = (int64_t)gridDim.x * THREADS, n = (p.to - p.from) * p.count;
    for (int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x; k < n; k += step) {
        const place found = locate(p, p.from + k / p.count, k % p.count);
        ((T *)p.elements)[k] = has_target(found)
                                   ? ((const T *)p.table)[found.row * p.table_stride + found.column]
                                   : (T)0;
    }
}

/* ---- weighted sums ---- */

constexpr int ADDERS = 1024;

struct part {
    double num, weight;
    int64_t den, weighs;
};
struct result {
    double num, weight;
    int64_t den;
    double value;
};

template <typename T> __device__ double weight_of(const colo_weighted_args &p, int64_t i)
{
    return p.weights ? (double)((const T *)p.weights)[i] : 1;
}

/* @alike: no rank weighs what another one counts; else NaN, for they divide by different sums */
template <typename T>
__device__ void put_result(const colo_weighted_args &p, result all, bool alike)
{
    all.num = alike ? all.num : CUDART_NAN;
    all.value = all.den ? all.num / (double)all.den : alike ? 0 : CUDART_NAN;
    if (p.out) {
        *(result *)p.out = all;
        return;
    }
    const double over = !alike ? CUDART_NAN : p.divide && all.den > 1 ? (double)all.den : 1;
    *(T *)p.mean.value = (T)(all.num / over);
    *p.mean.num = all.num;
    *p.mean.den = (double)all.den;
    *p.mean.factor = 1 / over;
}

/* One rank without gradients: what add_kernel has is the result. */
__host__ __device__ bool is_whole(const colo_weighted_args &p)
{
    return p.ranks == 1 && !p.d_values;
}

template <typename T>
__global__ void __launch_bounds__(ADDERS) add_kernel(const __grid_constant__ colo_weighted_args p)
{
    __shared__ part partial[ADDERS];
    part a = {0, 0, 0, 0};
    for (int64_t i = threadIdx.x; i < p.count; i += ADDERS) {
        if (p.mask && !p.mask[i])
            continue;
        const double w = weight_of<T>(p, i);
        a.num += w * (double)((const T *)p.values)[i];
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
        partial[0].weighs = p.out != NULL;
        ((part *)p.parts)[p.rank] = partial[0];
        if (is_whole(p))
            put_result<T>(p, {partial[0].num, partial[0].weight, partial[0].den, 0}, true);
    }
}

template <typename T> __global__ void finish_kernel(const __grid_constant__ colo_weighted_args p)
{
    result all = {0, 0, 0, 0};
    bool alike = true;
    for (int32_t r = 0; r < p.ranks; r++) { /* every thread for itself: a few numbers, all cached */
        alike = alike && ((const part *)p.parts)[r].weighs == ((const part *)p.parts)->weighs;
        all.num += ((const part *)p.parts)[r].num;
        all.weight += ((const part *)p.parts)[r].weight;
        all.den += ((const part *)p.parts)[r].den;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        put_result<T>(p, all, alike);
    const int64_t step = (int64_t)gridDim.x * THREADS, n = p.d_values ? p.count : 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
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
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += step)
        ((T *)p.d_values)[i] = (T)g;
}

} // namespace

static size_t elem_of(const colo_sequence_args *p)
{
    return p->dtype == COLO_F64 ? 8 : 4;
}

extern "C" cudaError_t colo_k_sequence_targets(const colo_sequence_args *p, cudaStream_t stream)
{
    if (p->count == 0)
        return cudaSuccess;
    targets_kernel<<<blocks_of(p->count), THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_sequence_mask(const colo_sequence_args *p, cudaStream_t stream)
{
    if (p->count == 0)
        return cudaSuccess;
    mask_kernel<<<blocks_of(p->count), THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_sequence_scatter(const colo_sequence_args *p, cudaStream_t stream)
{
    const size_t width = (size_t)(p->positions - 1) * elem_of(p);
    if (p->batch > 0 && width > 0) {
        const size_t pitch = (size_t)p->table_stride * elem_of(p); /* of one row: any */
        cudaError_t e =
            cudaMemset2DAsync(p->table, std::max(pitch, width), 0, width, (size_t)p->batch, stream);
        if (e != cudaSuccess)
            return e;
    }
    if (p->count == 0)
        return cudaSuccess;
    if (p->dtype == COLO_F64)
        scatter_kernel<uint64_t><<<blocks_of(p->cp * p->count), THREADS, 0, stream>>>(*p);
    else
        scatter_kernel<uint32_t><<<blocks_of(p->cp * p->count), THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_sequence_gather(const colo_sequence_args *p, cudaStream_t stream)
{
    const int64_t n = (p->to - p->from) * p->count;
    if (n == 0)
        return cudaSuccess;
    if (p->dtype == COLO_F64)
        gather_kernel<uint64_t><<<blocks_of(n), THREADS, 0, stream>>>(*p);
    else
        gather_kernel<uint32_t><<<blocks_of(n), THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_weighted_local(const colo_weighted_args *p, cudaStream_t stream)
{
    if (p->dtype == COLO_F64)
        add_kernel<double><<<1, ADDERS, 0, stream>>>(*p);
    else
        add_kernel<float><<<1, ADDERS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_weighted_finish(const colo_weighted_args *p, cudaStream_t stream)
{
    if (is_whole(*p))
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
