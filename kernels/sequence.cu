/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.cu - one thread an element: which token of which row it is (sequence-args.h has the
 * closed form), then a move.
 */
#include "kernels.h"
#include "loss/sequence-args.h"

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
