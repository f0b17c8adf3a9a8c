/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.cu - one thread an element: which token of which row it is (sequence-place.h), then a
 * move.
 */
#include "kernels.h"
#include "loss/sequence-place.h"

#include <algorithm>
#include <cstdint>

namespace
{

constexpr int THREADS = 256;

unsigned blocks_of(int64_t n)
{
    return (unsigned)std::min<int64_t>((n - 1) / THREADS + 1, 1 << 30);
}

__global__ void targets_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += stride) {
        const colo_sequence_place found = colo_sequence_locate(&p, p.cp_rank, i);
        p.targets[i] = colo_sequence_has_target(&p, &found)
                           ? p.tokens[colo_sequence_next(&p, &found)]
                           : p.ignore;
    }
}

__global__ void mask_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += stride) {
        const colo_sequence_place found = colo_sequence_locate(&p, p.cp_rank, i);
        p.mask[i] = p.what == COLO_SEQUENCE_TARGETS ? colo_sequence_has_target(&p, &found)
                                                    : colo_sequence_has_token(&found);
    }
}

/* T: an unsigned integer as wide as an element. */
template <typename T> __global__ void scatter_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS, n = p.cp * p.count;
    for (int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x; k < n; k += stride) {
        const colo_sequence_place found = colo_sequence_locate(&p, k / p.count, k % p.count);
        if (colo_sequence_has_target(&p, &found))
            ((T *)p.table)[found.row * p.table_stride + found.column] = ((const T *)p.elements)[k];
    }
}

template <typename T> __global__ void gather_kernel(const __grid_constant__ colo_sequence_args p)
{
    const int64_t stride = (int64_t)gridDim.x * THREADS, n = (p.to - p.from) * p.count;
    for (int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x; k < n; k += stride) {
        const colo_sequence_place found =
            colo_sequence_locate(&p, p.from + k / p.count, k % p.count);
        ((T *)p.elements)[k] = colo_sequence_has_target(&p, &found)
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
