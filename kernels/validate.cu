/* SPDX-License-Identifier: Apache-2.0 */
/*
 * validate.cu - looking at device memory on behalf of the host: what COLO_CHECK=2 verifies about
 * data, and the sum that colo_loss_reduce() starts from.
 *
 * hash     every element's bits are mixed with its place in the box, and the mixtures are added:
 *          any order of threads gives the same number, another value or place another one.
 * nonzero  the first element, row by row, that is no zero; -0.0 is one.
 * sum      one block of threads, each adding its own elements in fp64, then a tree: the same bits
 *          in every run. One block reads some 100 GB/s, and there is one value per token.
 */
#include "kernels.h"

namespace
{

constexpr int THREADS = 256, SUM_THREADS = 1024;

__device__ uint64_t mixed(uint64_t v) /* a bijection that spreads every bit (splitmix64) */
{
    v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
    v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
    return v ^ (v >> 31);
}

template <typename T> __device__ T element(const colo_box_t &b, int64_t offset)
{
    const int64_t k = offset % b.extent[2], ij = offset / b.extent[2];
    const int64_t j = ij % b.extent[1], i = ij / b.extent[1];
    const char *p = (const char *)b.data +
                    (i * b.stride[0] + j * b.stride[1] + k * b.stride[2]) * (int64_t)sizeof(T);
    if ((uintptr_t)p % sizeof(T) == 0)
        return *(const T *)p;
    T v = 0; /* a view may begin anywhere */
    for (int byte = 0; byte < (int)sizeof(T); byte++)
        v |= (T)((T)(uint8_t)p[byte] << (8 * byte));
    return v;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) hash(colo_box_t b, int64_t n, unsigned long long *out)
{
    unsigned long long h = 0;
    for (int64_t offset = (int64_t)blockIdx.x * THREADS + threadIdx.x; offset < n;
         offset += (int64_t)gridDim.x * THREADS)
        h += mixed((uint64_t)element<T>(b, offset) ^
                   mixed((uint64_t)offset + 0x9e3779b97f4a7c15ull));
    for (int lane = 16; lane > 0; lane /= 2)
        h += __shfl_down_sync(0xffffffffu, h, lane);
    if (threadIdx.x % 32 == 0)
        atomicAdd(out, h);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    nonzero(colo_box_t b, int64_t n, T sign, unsigned long long *first)
{
    for (int64_t offset = (int64_t)blockIdx.x * THREADS + threadIdx.x; offset < n;
         offset += (int64_t)gridDim.x * THREADS)
        if ((T)(element<T>(b, offset) & (T)~sign)) {
            atomicMin(first, (unsigned long long)offset);
            return; /* this thread's later elements are behind it */
        }
}

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    masked_sum(const T *values, const uint8_t *mask, int64_t n, double *num, int64_t *den)
{
    __shared__ double sums[SUM_THREADS];
    __shared__ long long counts[SUM_THREADS];
    const int t = (int)threadIdx.x;
    double sum = 0;
    long long count = 0;
    for (int64_t i = t; i < n; i += SUM_THREADS)
        if (!mask || mask[i]) { /* what does not count is not read */
            sum += (double)values[i];
            count++;
        }
    sums[t] = sum;
    counts[t] = count;
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            sums[t] += sums[t + half];
            counts[t] += counts[t + half];
        }
    }
    if (t == 0) {
        *num = sums[0];
        *den = counts[0];
    }
}

unsigned blocks_for(int64_t n)
{
    int64_t blocks = (n + THREADS - 1) / THREADS;
    return (unsigned)(blocks < 4096 ? blocks : 4096);
}

template <typename T>
cudaError_t launch_nonzero(const colo_box_t &b, int64_t n, T sign, unsigned long long *first,
                           cudaStream_t stream)
{
    nonzero<T><<<blocks_for(n), THREADS, 0, stream>>>(b, n, sign, first);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_box_hash(const colo_box_t *box, size_t elem_size,
                                       unsigned long long *sum, cudaStream_t stream)
{
    const int64_t n = box->extent[0] * box->extent[1] * box->extent[2];
    if (n == 0)
        return cudaSuccess;
    switch (elem_size) {
    case 1:
        hash<uint8_t><<<blocks_for(n), THREADS, 0, stream>>>(*box, n, sum);
        break;
    case 2:
        hash<uint16_t><<<blocks_for(n), THREADS, 0, stream>>>(*box, n, sum);
        break;
    case 4:
        hash<uint32_t><<<blocks_for(n), THREADS, 0, stream>>>(*box, n, sum);
        break;
    case 8:
        hash<uint64_t><<<blocks_for(n), THREADS, 0, stream>>>(*box, n, sum);
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_box_nonzero(const colo_box_t *box, size_t elem_size, bool is_float,
                                          unsigned long long *first, cudaStream_t stream)
{
    const int64_t n = box->extent[0] * box->extent[1] * box->extent[2];
    if (n == 0)
        return cudaSuccess;
    switch (elem_size) {
    case 1:
        return launch_nonzero<uint8_t>(*box, n, 0, first, stream);
    case 2:
        return launch_nonzero<uint16_t>(*box, n, is_float ? 0x8000u : 0, first, stream);
    case 4:
        return launch_nonzero<uint32_t>(*box, n, is_float ? 0x80000000u : 0, first, stream);
    case 8:
        return launch_nonzero<uint64_t>(*box, n, is_float ? 0x8000000000000000ull : 0, first,
                                        stream);
    default:
        return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t colo_k_masked_sum(const void *values, colo_dtype_t dtype,
                                         const uint8_t *mask, int64_t count, double *num,
                                         int64_t *den, cudaStream_t stream)
{
    if (dtype == COLO_F64)
        masked_sum<<<1, SUM_THREADS, 0, stream>>>((const double *)values, mask, count, num, den);
    else if (dtype == COLO_F32)
        masked_sum<<<1, SUM_THREADS, 0, stream>>>((const float *)values, mask, count, num, den);
    else
        return cudaErrorInvalidValue;
    return cudaGetLastError();
}
