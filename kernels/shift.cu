/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shift.cu - rows of i64 boxes moved one element towards their beginning, onto themselves if need
 * be: the targets of next-token prediction.
 *
 * A row is one block's, which walks it in tiles from its beginning: all threads read their elements
 * of a tile, wait for each other, write them. What a tile writes was read by it and by the one
 * before, so a row may be its own source. Rows of tokens are short compared with everything else
 * that is done with them: a second block would only have to be waited for.
 */
#include "box.cuh"
#include "kernels.h"

#include <algorithm>
#include <climits>

namespace
{

constexpr int THREADS = 512, PER_THREAD = 8, TILE = THREADS * PER_THREAD;

struct shift_task {
    int64_t *dst;
    const int64_t *src;
    int64_t inner, length; /* of axes 1 and 2 */
    int64_t to[3], from[3];
    int64_t tile_end; /* tiles, which are rows, of this task and those before it */
};

template <int N> struct shift_list {
    int64_t rows, last;
    int32_t n;
    shift_task task[N];
};

template <int N>
__global__ void __launch_bounds__(THREADS) shift_kernel(const __grid_constant__ shift_list<N> list)
{
    for (int64_t row = blockIdx.x; row < list.rows; row += gridDim.x) {
        const int k = task_of(list, row);
        const shift_task &t = list.task[k];
        const int64_t r = row - (k ? list.task[k - 1].tile_end : 0);
        const int64_t i = r / t.inner, j = r % t.inner;
        int64_t *to = t.dst + i * t.to[0] + j * t.to[1];
        const int64_t *from = t.src + i * t.from[0] + j * t.from[1];
        for (int64_t base = 0; base < t.length; base += TILE) {
            int64_t v[PER_THREAD];
#pragma unroll
            for (int u = 0; u < PER_THREAD; u++) {
                const int64_t k = base + u * THREADS + (int)threadIdx.x;
                v[u] = k + 1 < t.length ? from[(k + 1) * t.from[2]] : list.last;
            }
            __syncthreads();
#pragma unroll
            for (int u = 0; u < PER_THREAD; u++) {
                const int64_t k = base + u * THREADS + (int)threadIdx.x;
                if (k < t.length)
                    to[k * t.to[2]] = v[u];
            }
        }
    }
}

/* Enqueues the first pairs, as many as fit; @used tells how many that were. */
template <int N>
cudaError_t shift_some(const colo_box_t *dst, const colo_box_t *src, int64_t n, int64_t last,
                       cudaStream_t stream, int64_t *used)
{
    static_assert(sizeof(shift_list<N>) <= 32764, "the limit of a kernel's parameters");
    shift_list<N> list;
    list.n = 0;
    list.rows = 0;
    list.last = last;
    int64_t i = 0;
    for (; i < n && list.n < N; i++) {
        const int64_t rows = dst[i].extent[0] * dst[i].extent[1];
        if (rows == 0 || dst[i].extent[2] == 0)
            continue;
        shift_task t = {};
        t.dst = (int64_t *)dst[i].data;
        t.src = (const int64_t *)src[i].data;
        t.inner = dst[i].extent[1];
        t.length = dst[i].extent[2];
        for (int a = 0; a < 3; a++) {
            t.to[a] = dst[i].stride[a];
            t.from[a] = src[i].stride[a];
        }
        t.tile_end = list.rows += rows;
        list.task[list.n++] = t;
    }
    *used = i;
    if (list.n == 0)
        return cudaSuccess;
    shift_kernel<N><<<(unsigned)std::min<int64_t>(list.rows, INT_MAX), THREADS, 0, stream>>>(list);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_boxes_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                          int64_t last, cudaStream_t stream)
{
    for (int64_t used; n > 0; dst += used, src += used, n -= used) {
        cudaError_t e = n == 1 ? shift_some<1>(dst, src, n, last, stream, &used)
                               : shift_some<COLO_K_BOXES>(dst, src, n, last, stream, &used);
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}
