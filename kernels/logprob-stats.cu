/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob-stats.cu - forward of the loss: one read of the logits, then the merge of the blocks.
 *
 * A row has a block of threads, a segment of a row (docs/concepts/loss.md) has a warp: a segment is too
 * short to hide what combining a block takes. Every thread keeps its own running maximum and sums
 * over the vectors that it reads, four in flight, and the threads are combined once at the end: the
 * maximum first, then sums in fp64 by a fixed tree. How a row is split depends on its address only,
 * so a row's bits depend on nothing but the row, however tokens are cut into launches. The number of
 * rows chooses only whether the next vectors are loaded before these are added, which takes
 * registers, so that fewer rows are under way.
 *
 * The maximum starts at -inf; a batch that raises it rescales the sums, which after the first few
 * batches is rare. NaN raises it, too, and from there on nothing but NaN comes out; +inf does the
 * same through inf - inf. While only -inf has been seen, sums are taken against 0, which adds 0.
 * One exp per element, for two would exceed the special function units at this bandwidth.
 *
 * Arithmetic is fp32 for f32, bf16 and f16 logits, fp64 for f64. A thread adds at most
 * columns / threads terms in four partial sums; what is kept is differences to the maximum.
 */
#include "logprob-sums.cuh"

#include "loss/logprob-merge.h"

#include <algorithm>
#include <cmath>

namespace
{

/* The first launch zeroes the counts; the merge adds to them. */
__device__ void start_counts(const colo_logprob_args &p)
{
    if (blockIdx.x > 0 || threadIdx.x > 0)
        return;
    if (p.out.n_valid)
        *p.out.n_valid = 0;
    if (p.out.n_invalid)
        *p.out.n_invalid = 0;
}

/* ---- a row ---- */

/* A vector that is not inside the row, one element per thread. */
template <typename D, statistics KEEP, bool PLAIN, int WIDTH>
__device__ void edge(row_sums<typename D::real, KEEP> &a, const scaling<typename D::real> &by,
                     const void *row, int64_t columns, int64_t from, const typename D::real *weight)
{
    using R = typename D::real;
    const unsigned thread = thread_of_row<WIDTH>();
    const int64_t j = from + (int64_t)thread;
    if (thread >= D::N || j < 0 || j >= columns)
        return;
    R x = D::load(((const typename D::elem *)row)[j]);
    if (!PLAIN)
        x = x_of(x, by.factor, by.cap);
    absorb_x<R, KEEP, 1>(a, &x, j, PLAIN ? by.factor : (R)1,
                         KEEP == WEIGHTED ? weight + j : nullptr);
}

/* PLAIN: x = factor z with factor > 0, kept as z until the exponent. AHEAD: a batch is on its way
 * while the one before it is added up; that changes no sum. @weight: of the first column, if KEEP is
 * WEIGHTED */
template <typename D, statistics KEEP, bool PLAIN, int WIDTH, bool AHEAD>
__device__ void read_row(row_sums<typename D::real, KEEP> &a,
                         const scaling<typename D::real> &by, const void *row, int64_t columns, const typename D::real *weight)
{
    using R = typename D::real;
    constexpr int N = D::N, SIZE = sizeof(typename D::elem);
    const R factor = by.factor, cap = by.cap;
    const int64_t first = WIDTH < THREADS ? 0 : first_vector<D>(row), end = (columns - first) / N;
    const int64_t stride = WIDTH;
    /* in ascending order of columns, for of equal maxima the first is kept */
    int64_t k = thread_of_row<WIDTH>();
    if (first < 0) {
        edge<D, KEEP, PLAIN, WIDTH>(a, by, row, columns, first, weight);
        k++;
    }
    if constexpr (PLAIN) {
        uint4 v[BATCH], next[BATCH];
        const auto has_batch = [&](int64_t from) { return from + (BATCH - 1) * stride < end; };
        const auto load = [&](uint4 *to, int64_t from) {
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                to[b] = load_vector(row, first + (from + b * stride) * N, SIZE);
        };
        if (AHEAD && has_batch(k))
            load(next, k);
        for (; has_batch(k); k += BATCH * stride) {
            if (!AHEAD)
                load(next, k);
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                v[b] = next[b];
            if (AHEAD && has_batch(k + BATCH * stride))
                load(next, k + BATCH * stride);
            absorb<D, KEEP, BATCH>(a, v, factor, first + k * N, stride * N);
        }
#pragma unroll
        for (int b = 0; b < BATCH - 1; b++) /* what is left, in flight together, too */
            if (k + b * stride < end)
                v[b] = load_vector(row, first + (k + b * stride) * N, SIZE);
#pragma unroll
        for (int b = 0; b < BATCH - 1; b++)
            if (k + b * stride < end)
                absorb<D, KEEP, 1>(a, &v[b], factor, first + (k + b * stride) * N, 0);
    } else {
        for (; k < end; k += stride) {
            R x[N];
            D::unpack(load_vector(row, first + k * N, SIZE), x);
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = x_of(x[i], factor, cap);
            absorb_x<R, KEEP, N>(a, x, first + k * N, (R)1,
                                 KEEP == WEIGHTED ? weight + (first + k * N) : nullptr);
        }
    }
    if (end > 0 || first == 0)
        edge<D, KEEP, PLAIN, WIDTH>(a, by, row, columns, first + end * N, weight);
}

/* Blocks of threads on a multiprocessor, which share its registers. */
constexpr int blocks_at_once(statistics keep, int width, bool ahead)
{
    return keep >= ALL ? 7 : width < THREADS ? 9 : ahead ? 8 : 10;
}

template <typename D, statistics KEEP, bool PLAIN, int WIDTH, bool AHEAD>
__global__ void __launch_bounds__(THREADS, blocks_at_once(KEEP, WIDTH, AHEAD))
    stats_kernel(const __grid_constant__ colo_logprob_args p)
{
    __shared__ shared_sums shared;
    const int64_t each = p.config.segment;
    const int32_t segments = WIDTH < THREADS ? p.segments : 1, bits = __ffs(segments) - 1;
    const int64_t last = (p.hi - p.lo) * segments;
    start_counts(p);
    const auto span_of = [&](int32_t i) {
        span here = rank_span(p);
        if (WIDTH < THREADS) {
            const int64_t before = min(i * each, here.columns);
            here = {here.start + before, min(each, here.columns - before), here.block + i};
        }
        return here;
    };
    for (int32_t i = blockIdx.x; p.lo == p.block_lo && i < segments; i += gridDim.x)
        if (threadIdx.x < 8) {
            const span here = span_of(i);
            const int64_t word = ((const int64_t *)&p.header)[threadIdx.x];
            ((int64_t *)(p.blocks + here.block * p.block.bytes))[threadIdx.x] =
                threadIdx.x == 1 ? here.start : threadIdx.x == 2 ? here.columns : word;
        }

    /* segment after segment of a row, as they are in memory */
    constexpr int PER_BLOCK = THREADS / WIDTH;
    for (int64_t i = blockIdx.x * PER_BLOCK + (WIDTH < THREADS ? threadIdx.x / WIDTH : 0); i < last;
         i += gridDim.x * PER_BLOCK) {
        const int64_t t = p.lo + (i >> bits); /* segments are a power of 2 */
        const span here = span_of((int32_t)i & (segments - 1));
        const typename D::elem *row = (const typename D::elem *)p.logits +
                                      (t - p.row_lo) * p.row_stride +
                                      (here.start - p.config.logits.vocab_start);
        const int64_t target = p.targets[t * p.target_stride];
        const scaling<typename D::real> by =
            scaling_of<typename D::real>(p, t, target != p.config.ignore_index);
        row_sums<typename D::real, KEEP> a;
        begin(a);
        if (target != p.config.ignore_index)
            read_row<D, KEEP, PLAIN, WIDTH, AHEAD>(
                a, by, row, here.columns,
                KEEP == WEIGHTED ? (const typename D::real *)p.class_weight + (here.start - p.class_start)
                                 : nullptr);
        write_row<typename D::real, KEEP, WIDTH>(a, p, here, t, target, PLAIN ? by.factor : 1,
                                                 x_in<D, PLAIN>{by, row}, shared);
    }
}

/* What @rows take, counted in rows at the full rate, with so many blocks on a multiprocessor: rows
 * that begin together end together, and few last ones take as long as six a multiprocessor. */
int64_t rows_of_time(int64_t rows, int64_t multiprocessors, int blocks)
{
    const int64_t last = rows % (multiprocessors * blocks);
    return rows + (last ? std::max<int64_t>(6 * multiprocessors - last, 0) : 0);
}

bool is_ahead_faster(int64_t rows)
{
    int device = 0, n = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || n < 1)
        return true;
    return rows_of_time(rows, n, blocks_at_once(SUM, THREADS, true)) <=
           rows_of_time(rows, n, blocks_at_once(SUM, THREADS, false));
}

template <typename D, statistics KEEP, bool PLAIN, int WIDTH, bool AHEAD>
cudaError_t stats_over(const colo_logprob_args &p, int64_t rows, cudaStream_t stream)
{
    const int64_t blocks = (std::max<int64_t>(rows, 1) - 1) / (THREADS / WIDTH) + 1;
    stats_kernel<D, KEEP, PLAIN, WIDTH, AHEAD>
        <<<(unsigned)std::min<int64_t>(blocks, 1 << 28), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename D, statistics KEEP, bool PLAIN>
cudaError_t stats(const colo_logprob_args &p, cudaStream_t stream)
{
    const int64_t rows = p.hi - p.lo;
    if (p.config.segment > 0)
        return stats_over<D, KEEP, PLAIN, 32, false>(p, rows * p.segments, stream);
    if constexpr (PLAIN && KEEP < ALL) {
        if (!is_ahead_faster(rows))
            return stats_over<D, KEEP, PLAIN, THREADS, false>(p, rows, stream);
    }
    return stats_over<D, KEEP, PLAIN, THREADS, true>(p, rows, stream);
}

template <typename D> cudaError_t stats_of(const colo_logprob_args &p, cudaStream_t stream)
{
    /* rounded, neighbouring f32 logits can tie, and the argmax takes the first of those */
    int exponent;
    const bool exact = sizeof(typename D::elem) < 4 ||
                       (!p.temperature && std::frexp((float)p.factor, &exponent) == 0.5);
    if (p.block.w >= 0) /* seldom asked for: one kernel for all */
        return stats<D, WEIGHTED, false>(p, stream);
    if (p.block.q >= 0)
        return stats<D, SQUARES, false>(p, stream);
    if (!is_plain(p) || (p.block.arg >= 0 && !exact))
        return stats<D, ALL, false>(p, stream);
    if (p.block.d >= 0 || p.block.arg >= 0)
        return stats<D, ALL, true>(p, stream);
    return p.block.u >= 0 ? stats<D, ENTROPY, true>(p, stream) : stats<D, SUM, true>(p, stream);
}

/* ---- a support ---- */

/* The listed columns of a row, one a thread, and the target. A list that is none makes it NaN. */
template <typename D>
__device__ void read_list(row_sums<typename D::real, SQUARES> &a, const colo_logprob_args &p,
                          const scaling<typename D::real> &by, int64_t t, int64_t target,
                          const typename D::elem *row)
{
    using R = typename D::real;
    const colo_support_lists &s = p.support;
    const int64_t token = colo_logprob_token_of(&p, t), start = p.config.logits.vocab_start,
                  begin = s.begin[token * s.begin_stride], end = s.end[token * s.end_stride];
    bool bad = begin < 0 || begin > end || end > s.count, found = false;
    const auto take_one = [&](int64_t id) {
        const int64_t j = id - start;
        if (j < 0 || j >= p.true_columns)
            return;
        const R x = x_of(D::load(row[j]), by.factor, by.cap);
        absorb_x<R, SQUARES, 1>(a, &x, j, (R)1);
        a.arg = x == a.top && j < a.arg ? j : a.arg; /* the target may be left of what was taken */
    };
    for (int64_t i = begin + threadIdx.x; !bad && i < end; i += THREADS) {
        const int64_t id = s.ids[i], before = i > begin ? s.ids[i - 1] : -1;
        bad = id < 0 || id < before || id >= p.config.logits.vocab;
        found = found || id == target;
        if (!bad && id != before)
            take_one(id);
    }
    found = __syncthreads_or(found);
    if (!found && threadIdx.x == 0 && target >= 0 && target < p.config.logits.vocab)
        take_one(target);
    if (bad)
        a.top = (R)CUDART_NAN;
}

template <typename D>
__global__ void __launch_bounds__(THREADS)
    list_stats_kernel(const __grid_constant__ colo_logprob_args p)
{
    __shared__ shared_sums shared;
    unsigned char *block = p.blocks + p.rank * p.block.bytes;
    if (p.lo == p.block_lo && blockIdx.x == 0 && threadIdx.x < 8)
        ((int64_t *)block)[threadIdx.x] = ((const int64_t *)&p.header)[threadIdx.x];
    start_counts(p);

    for (int64_t t = p.lo + blockIdx.x; t < p.hi; t += gridDim.x) {
        const typename D::elem *row =
            (const typename D::elem *)p.logits + (t - p.row_lo) * p.row_stride;
        const int64_t target = p.targets[t * p.target_stride];
        const scaling<typename D::real> by =
            scaling_of<typename D::real>(p, t, target != p.config.ignore_index);
        row_sums<typename D::real, SQUARES> a;
        begin(a);
        if (target != p.config.ignore_index)
            read_list<D>(a, p, by, t, target, row);
        write_row(a, p, rank_span(p), t, target, (typename D::real)1, x_in<D, false>{by, row}, shared);
    }
}

template <typename D> cudaError_t list_stats(const colo_logprob_args &p, cudaStream_t stream)
{
    if (p.config.segment > 0) {
        cudaError_t e = cudaSuccess;
        for (int32_t i = 0; i < p.segments && e == cudaSuccess; i++)
            e = list_stats<D>(colo_logprob_segment(&p, sizeof(typename D::elem), i), stream);
        return e;
    }
    const int64_t rows = std::max<int64_t>(p.hi - p.lo, 1);
    list_stats_kernel<D><<<(unsigned)std::min<int64_t>(rows, 1 << 30), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

/* ---- tiles ---- */

/* Those of a row, which a product has left, each a thread's: maxima are of x. */
template <statistics KEEP>
__device__ void read_tiles(row_sums<float, KEEP> &a, const colo_logprob_args &p, const float *row)
{
    const int numbers = colo_logprob_tile_numbers(&p.block);
    for (int64_t first = (int64_t)threadIdx.x * COLO_LOGPROB_TILE; first < p.true_columns;
         first += THREADS * COLO_LOGPROB_TILE) {
        const float *tile = row + 1 + first / COLO_LOGPROB_TILE * numbers, m = tile[0],
                    top = max_nan(a.top, m); /* NaN stays */
        if (top != a.top) {
            if (KEEP == ALL)
                a.arg = first + (int)tile[4];
            raise(a, top, 1.f);
        }
        const float down = m == -CUDART_INF_F ? 0 : m - a.base, c = exp_of(down);
        const int64_t columns = min(p.true_columns - first, (int64_t)COLO_LOGPROB_TILE);
        a.s[0] += c * tile[1];
        if (KEEP >= ENTROPY)
            a.u[0] += c > 0 ? c * (tile[2] + down * tile[1]) : 0;
        if (KEEP == ALL) {
            a.d[0] += tile[3] + (float)columns * down;
            a.seen += columns;
        }
    }
}

template <statistics KEEP>
__global__ void __launch_bounds__(THREADS)
    tiles_kernel(const __grid_constant__ colo_logprob_args p, bool is_z)
{
    __shared__ shared_sums shared;
    const int64_t stride = colo_logprob_tiles_stride(&p.block, p.columns);
    if (p.lo == p.block_lo && blockIdx.x == 0 && threadIdx.x < 8)
        ((int64_t *)(p.blocks + p.rank * p.block.bytes))[threadIdx.x] =
            ((const int64_t *)&p.header)[threadIdx.x];
    start_counts(p);

    for (int64_t t = p.lo + blockIdx.x; t < p.hi; t += gridDim.x) {
        const float *row = p.tiles + (t - p.lo) * stride;
        const int64_t target = p.targets[t * p.target_stride];
        row_sums<float, KEEP> a;
        begin(a);
        if (target != p.config.ignore_index)
            read_tiles<KEEP>(a, p, row);
        const auto x_at = [&](int64_t) {
            return is_z ? (double)(float)p.factor * (double)row[0] : (double)row[0];
        };
        write_row(a, p, rank_span(p), t, target, 1.f, x_at, shared);
    }
}

template <statistics KEEP> cudaError_t tiles_stats(const colo_logprob_args &p, cudaStream_t stream)
{
    const int64_t rows = std::max<int64_t>(p.hi - p.lo, 1);
    tiles_kernel<KEEP><<<(unsigned)std::min<int64_t>(rows, 1 << 30), THREADS, 0, stream>>>(
        p, KEEP != ALL && is_plain(p));
    return cudaGetLastError();
}

/* ---- merge ---- */

constexpr int MERGE_THREADS = 128;

__global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(const __grid_constant__ colo_logprob_args p)
{
    const int64_t stride = (int64_t)gridDim.x * MERGE_THREADS;
    for (int64_t t = p.lo + (int64_t)blockIdx.x * MERGE_THREADS; t < p.hi; t += stride) {
        bool valid = false, invalid = false;
        if (t + threadIdx.x < p.hi)
            colo_logprob_merge_token(&p, t + threadIdx.x, &valid, &invalid);
        const int good = __syncthreads_count(valid), bad = __syncthreads_count(invalid);
        if (threadIdx.x == 0 && p.out.n_valid && good)
            atomicAdd((unsigned long long *)p.out.n_valid, (unsigned long long)good);
        if (threadIdx.x == 0 && p.out.n_invalid && bad)
            atomicAdd((unsigned long long *)p.out.n_invalid, (unsigned long long)bad);
    }
}

} // namespace

/* A group of one has no gather between the kernels, after whose failure the counts are as before. */
static bool stats_starts_counts(const colo_logprob_args *p)
{
    return p->lo == 0 && colo_logprob_alone(p);
}

extern "C" cudaError_t colo_k_logprob_stats(const colo_logprob_args *given, cudaStream_t stream)
{
    colo_logprob_args p = *given;
    if (p.hi <= p.lo && p.lo != p.block_lo)
        return cudaSuccess;
    if (!stats_starts_counts(given))
        p.out.n_valid = p.out.n_invalid = NULL;
    if (p.tiles)
        return p.block.d >= 0 || p.block.arg >= 0 ? tiles_stats<ALL>(p, stream)
               : p.block.u >= 0                   ? tiles_stats<ENTROPY>(p, stream)
                                                  : tiles_stats<SUM>(p, stream);
    if (p.support.begin)
        return with_dtype(p.dtype, [&](auto d) { return list_stats<decltype(d)>(p, stream); });
    switch (p.dtype) { /* an empty first launch still writes the header */
    case COLO_F32:
        return stats_of<f32>(p, stream);
    case COLO_F64:
        return p.block.w >= 0   ? stats<f64, WEIGHTED, false>(p, stream)
               : p.block.q >= 0 ? stats<f64, SQUARES, false>(p, stream)
                                : stats<f64, ALL, false>(p, stream);
    case COLO_BF16:
        return stats_of<bf16>(p, stream);
    case COLO_F16:
        return stats_of<f16>(p, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t colo_k_logprob_merge(const colo_logprob_args *p, cudaStream_t stream)
{
    for (int64_t *count : {p->out.n_valid, p->out.n_invalid})
        if (count && p->lo == 0 && !stats_starts_counts(p)) {
            cudaError_t e = cudaMemsetAsync(count, 0, sizeof *count, stream);
            if (e != cudaSuccess)
                return e;
        }
    if (p->hi <= p->lo)
        return cudaSuccess;
    const int64_t grid = (p->hi - p->lo - 1) / MERGE_THREADS + 1;
    merge_kernel<<<(unsigned)std::min<int64_t>(grid, 1 << 30), MERGE_THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}
