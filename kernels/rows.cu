/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.cu - what the lm_head path does apart from products and statistics: which tokens count,
 * hidden rows packed and put back, per-token values there and back, sums over rows, conversions.
 *
 * Packing is one block that scans the targets from the first to the last, 4,096 a round: rows keep
 * the order of their tokens, nothing is counted on the host, and 16,384 tokens take some ten
 * microseconds, compared with products of milliseconds. More blocks would need a second launch.
 *
 * Rows are copied by their bytes: 16 at a time where both sides allow it. Sums over rows are made
 * by a fixed tree (eight interleaved runs of rows, then these eight in order), so they depend on
 * the number of rows and nothing else. Upstream gradients of 16-bit heads are scaled by the largest
 * of them, which one block finds and applies.
 */
#include "logprob.cuh"

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cfloat>

namespace
{

/* ---- pack ---- */

constexpr int PACK_THREADS = 1024, PACK_ITEMS = 4;

__global__ void __launch_bounds__(PACK_THREADS)
    compact_kernel(const __grid_constant__ colo_linear_rows p)
{
    using scan = cub::BlockScan<int, PACK_THREADS>;
    __shared__ typename scan::TempStorage storage;
    int64_t counted = 0; /* the same in all threads */
    int valid = 0;       /* this thread's */
    for (int64_t base = 0; base < p.tokens; base += PACK_THREADS * PACK_ITEMS) {
        const int64_t first = base + (int64_t)threadIdx.x * PACK_ITEMS;
        int64_t target[PACK_ITEMS];
        int offset[PACK_ITEMS], all;
#pragma unroll
        for (int i = 0; i < PACK_ITEMS; i++) {
            const int64_t token = first + i;
            target[i] = token >= p.tokens ? p.ignore_index
                        : p.targets       ? p.targets[token * p.target_stride]
                        : !p.mask || p.mask[token * p.mask_stride] ? 1
                                                                   : p.ignore_index;
            offset[i] = target[i] != p.ignore_index;
        }
        scan(storage).ExclusiveSum(offset, offset, all);
#pragma unroll
        for (int i = 0; i < PACK_ITEMS; i++) {
            if (first + i >= p.tokens)
                continue;
            const int64_t row = counted + offset[i];
            if (target[i] == p.ignore_index) {
                p.row_of[first + i] = -1;
            } else if (row >= p.rows) {
                p.row_of[first + i] = -2;
            } else {
                p.row_of[first + i] = row;
                p.token_of[row] = first + i;
                p.row_targets[row] = target[i];
                valid += target[i] >= 0 && target[i] < p.vocab;
            }
        }
        counted += all;
        __syncthreads(); /* the scan's storage is used again */
    }
    for (int64_t row = counted + threadIdx.x; row < p.rows; row += PACK_THREADS) {
        p.token_of[row] = -1;
        p.row_targets[row] = p.ignore_index;
    }
    int before, good;
    scan(storage).ExclusiveSum(valid, before, good);
    if (threadIdx.x == 0) {
        p.counts[0] = counted;
        p.counts[COLO_LINEAR_VALID] = good;
        p.counts[COLO_LINEAR_INVALID] = counted - good;
        p.counts[3] = 0;
    }
}

/* ---- per-token values ---- */

constexpr int THREADS = 256;

unsigned blocks_for(int64_t n)
{
    return (unsigned)std::min<int64_t>((n + THREADS - 1) / THREADS, 1 << 16);
}

__device__ int64_t grid_first()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}
__device__ int64_t grid_stride()
{
    return (int64_t)gridDim.x * THREADS;
}

__device__ double upstream_of(const colo_linear_rows &p, const colo_linear_upstream_rows &u, int k,
                              int64_t row)
{
    const int64_t token = p.token_of[row];
    const double valid = (double)p.counts[COLO_LINEAR_VALID];
    double v = 0;
    if (token >= 0)
        v = u.factor[k] * (u.from[k] ? colo_stat_get(u.from[k], u.dtype == COLO_F64, token) : 1);
    if (u.mean)
        v = valid > 0 ? v / valid : 0;
    return v;
}

__device__ double coldness_of(const colo_linear_rows &p, const colo_linear_upstream_rows &u,
                              int64_t row)
{
    const int64_t token = p.token_of[row];
    return u.row_coldness                ? u.row_coldness[row]
           : u.temperature && token >= 0 ? 1 / (double)u.temperature[token]
                                         : 1;
}

__global__ void __launch_bounds__(THREADS)
    upstream_kernel(const __grid_constant__ colo_linear_rows p,
                    const __grid_constant__ colo_linear_upstream_rows u)
{
    for (int64_t row = grid_first(); row < p.rows; row += grid_stride())
        for (int k = 0; k < COLO_LINEAR_UPS; k++)
            if (u.to[k])
                colo_stat_put(u.to[k], u.dtype == COLO_F64, row, upstream_of(p, u, k, row));
}

/* One block, as in packing: the largest first. */
__global__ void __launch_bounds__(PACK_THREADS)
    scaled_upstream_kernel(const __grid_constant__ colo_linear_rows p,
                           const __grid_constant__ colo_linear_upstream_rows u)
{
    using reduce = cub::BlockReduce<double, PACK_THREADS>;
    __shared__ typename reduce::TempStorage storage;
    __shared__ double largest;
    double most = 0;
    for (int64_t row = threadIdx.x; row < p.rows; row += PACK_THREADS)
        for (int k = 0; k < COLO_LINEAR_UPS; k++)
            if (u.to[k]) {
                const double v = fabs(upstream_of(p, u, k, row) * coldness_of(p, u, row));
                most = v > most && isfinite(v) ? v : most;
            }
    most = reduce(storage).Reduce(most, [](double a, double b) { return a > b ? a : b; });
    if (threadIdx.x == 0) { /* a number of fp32 that has a reciprocal */
        largest = most < FLT_MIN ? 1 : most > FLT_MAX ? FLT_MAX : (double)(float)most;
        largest = u.exact ? ldexp(1.0, ilogb(largest)) : largest;
        u.scale[0] = (float)(largest / u.lift);
        u.scale[1] = 0;
        u.scale[2] = 1;
    }
    __syncthreads();
    const double by = u.lift / largest;
    for (int64_t row = threadIdx.x; row < p.rows; row += PACK_THREADS)
        for (int k = 0; k < COLO_LINEAR_UPS; k++)
            if (u.to[k])
                colo_stat_put(u.to[k], u.dtype == COLO_F64, row, upstream_of(p, u, k, row) * by);
}

__global__ void factor_kernel(float *to, const float *from, double factor, const float *by)
{
    to[0] = (float)((from ? from[0] : 1.0) * factor * (by ? by[0] : 1.0));
    to[1] = 0;
    to[2] = 1;
}

__global__ void __launch_bounds__(THREADS)
    scatter_kernel(const __grid_constant__ colo_linear_rows p,
                   const __grid_constant__ colo_linear_scatter s)
{
    const bool wide = s.dtype == COLO_F64;
    const void *const from[] = {s.from.logp,   s.from.entropy, s.from.loss,       s.from.weight,
                                s.from.lse,    s.from.sum_p2,  s.from.mean_logits};
    void *const to[] = {s.to.logp,   s.to.entropy, s.to.loss,       s.to.weight,
                        s.to.lse,    s.to.sum_p2,  s.to.mean_logits};
    for (int64_t t = grid_first(); t < p.tokens; t += grid_stride()) {
        const int64_t row = p.row_of[t];
        for (int k = 0; k < (int)(sizeof to / sizeof *to); k++)
            if (to[k])
                colo_stat_put(to[k], wide, t,
                    row >= 0    ? colo_stat_get(from[k], wide, row)
                    : row == -1 ? 0
                                : CUDART_NAN);
        if (s.to.correct)
            s.to.correct[t] = row >= 0 ? s.from.correct[row] : 0;
        if (s.to.argmax)
            s.to.argmax[t] = row >= 0 ? s.from.argmax[row] : -1;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (s.to.n_valid)
            *s.to.n_valid = p.counts[COLO_LINEAR_VALID];
        if (s.to.n_invalid)
            *s.to.n_invalid = p.counts[COLO_LINEAR_INVALID];
    }
}

/* ---- rows of hidden states ---- */

enum move { TAKE, PUT, CLEAR };

/* A block a row. TAKE: @near[row - lo] = far[token], 0 without a token. PUT: far[token] = near.
 * CLEAR: far[token] of tokens without a row. */
template <typename W, move HOW>
__global__ void __launch_bounds__(THREADS)
    move_kernel(const __grid_constant__ colo_linear_rows p, int64_t lo, int64_t hi, char *near,
                char *far, int64_t far_stride, int64_t words, W nan)
{
    for (int64_t i = lo + blockIdx.x; i < hi; i += gridDim.x) {
        if (HOW == CLEAR) {
            const int64_t row = p.row_of[i];
            W *to = (W *)(far + i * far_stride);
            if (row < 0)
                for (int64_t k = threadIdx.x; k < words; k += THREADS)
                    to[k] = row == -1 ? W{} : nan;
            continue;
        }
        const int64_t token = p.token_of[i];
        W *here = (W *)near + (i - lo) * words;
        W *there = (W *)(far + token * far_stride);
        if (HOW == TAKE)
            for (int64_t k = threadIdx.x; k < words; k += THREADS)
                here[k] = token >= 0 ? there[k] : W{};
        else if (token >= 0)
            for (int64_t k = threadIdx.x; k < words; k += THREADS)
                there[k] = here[k];
    }
}

template <move HOW, typename W>
cudaError_t launch_move(const colo_linear_rows &p, int64_t lo, int64_t hi, void *near, void *far,
                        int64_t far_stride, int64_t row_bytes, W nan, cudaStream_t stream)
{
    if (hi <= lo || row_bytes == 0)
        return cudaSuccess;
    const unsigned grid = (unsigned)std::min<int64_t>(hi - lo, 1 << 16);
    move_kernel<W, HOW><<<grid, THREADS, 0, stream>>>(
        p, lo, hi, (char *)near, (char *)far, far_stride, row_bytes / (int64_t)sizeof(W), nan);
    return cudaGetLastError();
}

uint64_t nan_of(colo_dtype_t dtype)
{
    switch (dtype) {
    case COLO_F64:
        return UINT64_C(0x7ff8000000000000);
    case COLO_F32:
        return 0x7fc00000;
    case COLO_BF16:
        return 0x7fc0;
    default:
        return 0x7e00;
    }
}

template <move HOW>
cudaError_t move_rows(const colo_linear_move &m, int64_t lo, int64_t hi, void *near,
                      cudaStream_t stream)
{
    const colo_linear_rows &p = *m.rows;
    const colo_dtype_t dtype = m.tokens.dtype;
    void *far = m.tokens.data;
    const int64_t elem = dtype == COLO_F64 ? 8 : dtype == COLO_F32 ? 4 : 2;
    const int64_t row = m.hidden * elem, stride = m.tokens.stride * elem;
    const uint64_t n = nan_of(dtype);
    if (((uintptr_t)near | (uintptr_t)far | (uintptr_t)row | (uintptr_t)stride) % 16 == 0) {
        const uint32_t w = elem == 2 ? (uint32_t)(n | n << 16) : (uint32_t)n;
        const uint32_t h = elem == 8 ? (uint32_t)(n >> 32) : w;
        return launch_move<HOW>(p, lo, hi, near, far, stride, row, uint4{w, h, w, h}, stream);
    }
    switch (elem) {
    case 8:
        return launch_move<HOW>(p, lo, hi, near, far, stride, row, n, stream);
    case 4:
        return launch_move<HOW>(p, lo, hi, near, far, stride, row, (uint32_t)n, stream);
    default:
        return launch_move<HOW>(p, lo, hi, near, far, stride, row, (uint16_t)n, stream);
    }
}

/* ---- sums over rows ---- */

constexpr int SUM_X = 32, SUM_Y = 8;

/* Thread (x, y): N columns, rows y, y + 8, ... */
template <typename D>
__global__ void __launch_bounds__(SUM_X *SUM_Y)
    sum_kernel(const typename D::elem *z, int64_t stride, int64_t rows, int64_t columns,
               const float *scale, typename D::real *to, int64_t to_stride, double beta)
{
    using R = typename D::real;
    constexpr int N = D::N;
    __shared__ R part[SUM_Y][SUM_X * N + 1];
    const int64_t j = ((int64_t)blockIdx.x * SUM_X + threadIdx.x) * N;
    R sum[N] = {0};
    if (j + N <= columns) {
        for (int64_t i = threadIdx.y; i < rows; i += SUM_Y) {
            R v[N];
            D::unpack(__ldcs((const uint4 *)(z + i * stride + j)), v);
#pragma unroll
            for (int e = 0; e < N; e++)
                sum[e] += v[e];
        }
    } else {
        for (int64_t i = threadIdx.y; i < rows; i += SUM_Y)
            for (int e = 0; e < N; e++)
                if (j + e < columns)
                    sum[e] += D::load(z[i * stride + j + e]);
    }
#pragma unroll
    for (int e = 0; e < N; e++)
        part[threadIdx.y][threadIdx.x * N + e] = sum[e];
    __syncthreads();
    const int64_t base = (int64_t)blockIdx.x * SUM_X * N;
    for (int k = threadIdx.y * SUM_X + threadIdx.x; k < SUM_X * N; k += SUM_X * SUM_Y) {
        if (base + k >= columns)
            break;
        R all = 0;
#pragma unroll
        for (int y = 0; y < SUM_Y; y++)
            all += part[y][k];
        all *= scale ? (R)*scale : (R)1;
        typename D::real *value = to + (base + k) * to_stride;
        *value = beta != 0 ? (typename D::real)beta * *value + all : all;
    }
}

/* The same where a row does not start at 16 bytes: a column a thread. */
template <typename D>
__global__ void __launch_bounds__(SUM_X *SUM_Y)
    sum_loose_kernel(const typename D::elem *z, int64_t stride, int64_t rows, int64_t columns,
                     const float *scale, typename D::real *to, int64_t to_stride, double beta)
{
    using R = typename D::real;
    __shared__ R part[SUM_Y][SUM_X];
    const int64_t j = (int64_t)blockIdx.x * SUM_X + threadIdx.x;
    R sum = 0;
    for (int64_t i = threadIdx.y; i < rows && j < columns; i += SUM_Y)
        sum += D::load(z[i * stride + j]);
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || j >= columns)
        return;
    R all = 0;
#pragma unroll
    for (int y = 0; y < SUM_Y; y++)
        all += part[y][threadIdx.x];
    all *= scale ? (R)*scale : (R)1;
    typename D::real *value = to + j * to_stride;
    *value = beta != 0 ? (typename D::real)beta * *value + all : all;
}

template <typename D> cudaError_t sum_rows(const colo_linear_sum &p, cudaStream_t stream)
{
    using S = typename D::real;
    const typename D::elem *z = (const typename D::elem *)p.z.data;
    const dim3 block(SUM_X, SUM_Y);
    const bool loose = (uintptr_t)z % 16 || p.z.stride % D::N;
    const int64_t width = SUM_X * (loose ? 1 : D::N), grid = (p.columns + width - 1) / width;
    if (loose)
        sum_loose_kernel<D><<<(unsigned)grid, block, 0, stream>>>(
            z, p.z.stride, p.rows, p.columns, p.scale, (S *)p.to, p.to_stride, p.beta);
    else
        sum_kernel<D><<<(unsigned)grid, block, 0, stream>>>(
            z, p.z.stride, p.rows, p.columns, p.scale, (S *)p.to, p.to_stride, p.beta);
    return cudaGetLastError();
}

/* ---- sums in parts ---- */

template <typename O, int N>
__global__ void __launch_bounds__(THREADS) fold_kernel(const __grid_constant__ colo_linear_fold p)
{
    struct alignas(N * sizeof(float)) in {
        float e[N];
    };
    struct alignas(N * sizeof(typename O::elem)) out {
        typename O::elem e[N];
    };
    const int64_t across = p.columns / N, n = p.rows * across;
    const float factor = (float)p.factor * (p.scale ? *p.scale : 1);
    for (int64_t i = grid_first(); i < n; i += grid_stride()) {
        const int64_t row = i / across, j = (i - row * across) * N;
        const float *from = p.parts + row * p.columns + j;
        out *to = (out *)((typename O::elem *)p.to.data + row * p.to.stride + j);
        in sum = *(const in *)from;
        for (int k = 1; k < p.count; k++) {
            const in v = *(const in *)(from + k * p.step);
#pragma unroll
            for (int e = 0; e < N; e++)
                sum.e[e] += v.e[e];
        }
        out w;
        if (p.beta != 0)
            w = *to;
#pragma unroll
        for (int e = 0; e < N; e++)
            w.e[e] = O::store(fmaf(factor, sum.e[e],
                                   p.beta != 0 ? (float)p.beta * (float)O::load(w.e[e]) : 0.0f));
        *to = w;
    }
}

template <typename O> cudaError_t fold(const colo_linear_fold &p, cudaStream_t stream)
{
    const bool four = (p.columns | p.to.stride | p.step) % 4 == 0 &&
                      (uintptr_t)p.to.data % (4 * sizeof(typename O::elem)) == 0 &&
                      (uintptr_t)p.parts % 16 == 0;
    if (four)
        fold_kernel<O, 4><<<blocks_for(p.rows * p.columns / 4), THREADS, 0, stream>>>(p);
    else
        fold_kernel<O, 1><<<blocks_for(p.rows * p.columns), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

/* ---- conversion ---- */

/* 4 elements a thread where rows allow it; 1 otherwise */
template <typename O, typename D, int N>
__global__ void __launch_bounds__(THREADS)
    convert_kernel(typename O::elem *to, int64_t to_stride, const typename D::elem *from,
                   int64_t from_stride, int64_t rows, int64_t columns)
{
    const int64_t across = (columns + N - 1) / N, n = rows * across;
    for (int64_t i = grid_first(); i < n; i += grid_stride()) {
        const int64_t row = i / across, j = (i - row * across) * N;
        const typename D::elem *f = from + row * from_stride + j;
        typename O::elem *t = to + row * to_stride + j;
        if constexpr (N == 4) {
            struct alignas(4 * sizeof(typename D::elem)) in {
                typename D::elem e[4];
            };
            struct alignas(4 * sizeof(typename O::elem)) out {
                typename O::elem e[4];
            };
            const in v = *(const in *)f;
            out w;
#pragma unroll
            for (int e = 0; e < 4; e++)
                w.e[e] = O::store((typename O::real)D::load(v.e[e]));
            *(out *)t = w;
        } else {
            *t = O::store((typename O::real)D::load(*f));
        }
    }
}

template <typename O, typename D>
cudaError_t convert(const colo_linear_convert &p, cudaStream_t stream)
{
    typename O::elem *to = (typename O::elem *)p.to.data;
    const typename D::elem *from = (const typename D::elem *)p.from.data;
    const bool four = (p.columns | p.to.stride | p.from.stride) % 4 == 0 &&
                      (uintptr_t)to % (4 * sizeof *to) == 0 &&
                      (uintptr_t)from % (4 * sizeof *from) == 0;
    const unsigned grid = blocks_for(p.rows * (four ? p.columns / 4 : p.columns));
    if (four)
        convert_kernel<O, D, 4>
            <<<grid, THREADS, 0, stream>>>(to, p.to.stride, from, p.from.stride, p.rows, p.columns);
    else
        convert_kernel<O, D, 1>
            <<<grid, THREADS, 0, stream>>>(to, p.to.stride, from, p.from.stride, p.rows, p.columns);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_rows_compact(const colo_linear_rows *p, cudaStream_t stream)
{
    compact_kernel<<<1, PACK_THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_rows_upstream(const colo_linear_upstream_rows *u, cudaStream_t stream)
{
    const colo_linear_rows *p = u->rows;
    if (u->scale) /* written without rows, too: sums of none are multiplied by it */
        scaled_upstream_kernel<<<1, PACK_THREADS, 0, stream>>>(*p, *u);
    else if (p->rows > 0)
        upstream_kernel<<<blocks_for(p->rows), THREADS, 0, stream>>>(*p, *u);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_rows_factor(const colo_linear_factor *p, cudaStream_t stream)
{
    factor_kernel<<<1, 1, 0, stream>>>(p->to, p->from, p->factor, p->by);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_rows_scatter(const colo_linear_scatter *s, cudaStream_t stream)
{
    const colo_linear_rows *p = s->rows;
    scatter_kernel<<<blocks_for(std::max<int64_t>(p->tokens, 1)), THREADS, 0, stream>>>(*p, *s);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_rows_gather(const colo_linear_move *p, cudaStream_t stream)
{
    return move_rows<TAKE>(*p, p->lo, p->hi, p->packed, stream);
}

extern "C" cudaError_t colo_k_rows_restore(const colo_linear_move *p, cudaStream_t stream)
{
    return move_rows<PUT>(*p, p->lo, p->hi, p->packed, stream);
}

extern "C" cudaError_t colo_k_rows_clear(const colo_linear_move *p, cudaStream_t stream)
{
    return move_rows<CLEAR>(*p, 0, p->rows->tokens, NULL, stream);
}

extern "C" cudaError_t colo_k_rows_sum(const colo_linear_sum *p, cudaStream_t stream)
{
    if (p->columns == 0)
        return cudaSuccess;
    return with_dtype(p->z.dtype, [&](auto d) { return sum_rows<decltype(d)>(*p, stream); });
}

extern "C" cudaError_t colo_k_rows_fold(const colo_linear_fold *p, cudaStream_t stream)
{
    if (p->rows == 0 || p->columns == 0)
        return cudaSuccess;
    return p->to.dtype == COLO_BF16  ? fold<bf16>(*p, stream)
           : p->to.dtype == COLO_F16 ? fold<f16>(*p, stream)
                                     : fold<f32>(*p, stream);
}

extern "C" cudaError_t colo_k_rows_convert(const colo_linear_convert *p, cudaStream_t stream)
{
    if (p->rows == 0 || p->columns == 0)
        return cudaSuccess;
    return with_dtype(p->to.dtype, [&](auto o) {
        return with_dtype(p->from.dtype,
                          [&](auto d) { return convert<decltype(o), decltype(d)>(*p, stream); });
    });
}
