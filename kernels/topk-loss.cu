/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk-loss.cu - log-probabilities of picked columns: what host/topk.c does, on a GPU, but for the
 * search of the k largest in a shard (topk.cu). Small kernels: k numbers per token, whatever the
 * vocabulary; but for the tail, which reads the shard.
 */
#include "logprob.cuh"

#include "kernels.h"
#include "loss/topk-tail.h"

#include <algorithm>

namespace
{

unsigned blocks_of(int64_t n, int64_t each)
{
    return (unsigned)std::min<int64_t>((n - 1) / each + 1, 1 << 30);
}

__device__ bool is_legal(const colo_topk_args &p, int64_t id)
{
    return id >= 0 && id < p.base.config.logits.vocab;
}

/* ---- rows ---- */

__global__ void rows_kernel(const __grid_constant__ colo_topk_args p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; t < p.base.tokens;
         t += stride) {
        int64_t row = p.topk ? 0 : COLO_TOPK_SKIP, invalid = 0;
        if (p.mask && !p.mask[t * p.mask_stride])
            row = COLO_TOPK_SKIP;
        else
            for (int64_t i = 0; i < p.k && !p.topk; i++) {
                const int64_t id = p.ids[t * p.id_stride + i];
                if (id == p.ignore_index)
                    continue;
                invalid += !is_legal(p, id);
                if (!is_legal(p, id))
                    row = -1;
                else if (row == COLO_TOPK_SKIP)
                    row = id;
            }
        p.rows[t] = row;
        if (p.count && p.out.n_invalid && invalid)
            atomicAdd((unsigned long long *)p.out.n_invalid, (unsigned long long)invalid);
    }
}

/* ---- given columns of this rank ---- */

template <typename D> __global__ void given_kernel(const __grid_constant__ colo_topk_args p)
{
    constexpr bool WIDE = sizeof(typename D::real) == 8;
    unsigned char *block = p.base.blocks + p.base.rank * p.base.block.bytes;
    const int64_t stride = (int64_t)gridDim.x * blockDim.x, n = p.base.tokens * p.k;
    for (int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; index < n;
         index += stride) {
        const int64_t t = index / p.k;
        int64_t j = p.rows[t] == COLO_TOPK_SKIP ? -1 : p.ids[t * p.id_stride + index % p.k];
        j = j >= p.base.config.logits.vocab_start &&
                    j - p.base.config.logits.vocab_start < p.base.true_columns
                ? j - p.base.config.logits.vocab_start
                : -1;
        colo_stat_put(block + p.pz, WIDE, index,
            j < 0 ? 0
                  : (double)D::load(
                        ((const typename D::elem *)p.base.logits)[t * p.base.row_stride + j]));
    }
}

/* ---- the other columns of this rank: a block a row ---- */

constexpr int THREADS = 256;

/* Sorts this shard's columns at ids; the rest of @sorted [COLO_TOPK_MAX] is INT64_MAX. Does one
 * occur twice? */
__device__ bool sort_picks(const colo_topk_args &p, int64_t t, int64_t *given, int64_t *sorted)
{
    static_assert(COLO_TOPK_MAX == THREADS, "a thread an id, and an id a thread");
    const int i = threadIdx.x;
    int64_t own = INT64_MAX;
    if (i < p.k) {
        const int64_t id = p.ids[t * p.id_stride + i], j = id - p.base.config.logits.vocab_start;
        if (id != p.ignore_index && id >= p.base.config.logits.vocab_start &&
            j < p.base.true_columns)
            own = j;
    }
    bool twice = false;
    __syncthreads();
    given[i] = own;
    sorted[i] = INT64_MAX;
    __syncthreads();
    if (own < INT64_MAX) {
        int rank = 0;
        for (int n = 0; n < p.k; n++) {
            const int64_t other = given[n];
            rank += other < own || (other == own && n < i);
            twice = twice || (other == own && n < i);
        }
        sorted[rank] = own;
    }
    return __syncthreads_or(twice);
}

/* The first of @sorted that is not below @j */
__device__ int first_pick(const int64_t *sorted, int64_t j)
{
    int at = 0;
#pragma unroll
    for (int step = COLO_TOPK_MAX / 2; step > 0; step /= 2)
        at += sorted[at + step - 1] < j ? step : 0;
    return at;
}

template <typename D>
__global__ void __launch_bounds__(THREADS) rest_kernel(const __grid_constant__ colo_topk_args p)
{
    using R = typename D::real;
    constexpr int N = D::N;
    constexpr bool WIDE = sizeof(R) == 8;
    __shared__ double partial[THREADS / 32];
    __shared__ int64_t given[COLO_TOPK_MAX], sorted[COLO_TOPK_MAX + 1];
    unsigned char *block = p.base.blocks + p.base.rank * p.base.block.bytes;
    const R none = -(R)CUDART_INF;
    if (threadIdx.x == 0)
        sorted[COLO_TOPK_MAX] = INT64_MAX;
    for (int64_t t = blockIdx.x; t < p.base.tokens; t += gridDim.x) {
        const typename D::elem *row =
            (const typename D::elem *)p.base.logits + t * p.base.row_stride;
        const bool twice = sort_picks(p, t, given, sorted);
        const int64_t end = p.rows[t] == COLO_TOPK_SKIP ? 0 : p.base.true_columns;
        const scaling<R> by = scaling_of<R>(p.base, t, end > 0);
        const R factor = by.factor, cap = by.cap;
        R m = none, s = 0;
        for (int64_t j = first_vector<D>(row) + (int64_t)threadIdx.x * N; j < end;
             j += (int64_t)THREADS * N) {
            R z[N], x[N], top = m;
            if (j >= 0 && j + N <= end) {
                D::unpack(__ldcs((const uint4 *)(row + j)), z);
            } else {
#pragma unroll
                for (int e = 0; e < N; e++)
                    z[e] = j + e >= 0 && j + e < end ? (R)D::load(row[j + e]) : (R)0;
            }
            int at = first_pick(sorted, j);
#pragma unroll
            for (int e = 0; e < N; e++) {
                const bool picked = sorted[at] == j + e;
                at += picked;
                x[e] = picked || j + e < 0 || j + e >= end ? none : x_of(z[e], factor, cap);
                top = x[e] > top ? x[e] : top;
            }
            if (top > m) {
                s *= m > none ? exp_of(m - top) : (R)0;
                m = top;
            }
#pragma unroll
            for (int e = 0; e < N; e++) /* in one rounding where x is factor z */
                if (x[e] > none)
                    s += exp_of(cap > 0 ? x[e] - m : fma(factor, z[e], -m));
        }
        const double all_m = all_threads<THREADS>((double)m, partial, [](double a, double b) {
            return a > b ? a : b;
        });
        const double all_s = all_threads<THREADS>(m > none ? (double)s * exp((double)m - all_m) : 0.0,
                                         partial, [](double a, double b) { return a + b; });
        if (threadIdx.x == 0) {
            colo_stat_put(block + p.tm, WIDE, t, all_m);
            colo_stat_put(block + p.ts, WIDE, t, twice && end > 0 ? CUDART_NAN : all_s);
        }
    }
}

__global__ void tail_kernel(const __grid_constant__ colo_topk_args p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; t < p.base.tokens; t += stride)
        colo_topk_tail_token(&p, t);
}

/* ---- merge ---- */

__device__ const unsigned char *block_of(const colo_topk_args &p, int32_t r)
{
    return p.base.blocks + r * p.base.block.bytes;
}

__device__ double candidate(const colo_topk_args &p, int32_t r, int64_t index)
{
    return colo_stat_get(block_of(p, r) + p.pz, p.base.dtype == COLO_F64, index);
}

__device__ int64_t count_before(const colo_topk_args &p, int32_t r, int64_t t, double key,
                                int64_t id)
{
    const int64_t *ids = (const int64_t *)(block_of(p, r) + p.pid) + t * p.k;
    int64_t lo = 0, hi = p.k;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        const double other =
            ids[mid] < 0 ? 0 : key_of(candidate(p, r, t * p.k + mid), p.base.factor);
        if (ids[mid] >= 0 && (other > key || (other == key && ids[mid] < id)))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* As emit() of host/topk.c. */
__device__ void emit(const colo_topk_args &p, int64_t t, int64_t i, int64_t id, double z)
{
    const bool wide = p.base.dtype == COLO_F64;
    const int64_t index = t * p.k + i;
    double down = 0, logp = id == COLO_TOPK_SKIP ? 0 : CUDART_NAN;
    if (id >= 0) {
        const scaling<double> by = scaling_of<double>(p.base, t, true);
        double x = x_of(z, by.factor, by.cap);
        if (!wide && isinf((float)x))
            x = x > 0 ? CUDART_INF : -CUDART_INF;
        down = x - p.base.saved[t];
        logp = colo_stat_at_most_0(down - p.base.saved[p.base.tokens + t]);
    }
    p.down[index] = down;
    p.saved_ids[index] = id < 0 ? -1 : id;
    if (p.out.logp)
        colo_stat_put(p.out.logp, wide, index, logp);
    if (p.out.ids)
        p.out.ids[index] = id < 0 ? -1 : id;
    if (p.topk && i == 0 && id >= 0)
        p.rows[t] = id;
}

__global__ void merge_kernel(const __grid_constant__ colo_topk_args p)
{
    for (int64_t t = blockIdx.x; t < p.base.tokens; t += gridDim.x) {
        const bool skip = p.rows[t] == COLO_TOPK_SKIP, lost = isnan(p.base.saved[t]);
        __syncthreads(); /* emit writes rows */
        if (p.topk && !skip && !lost) {
            for (int64_t n = threadIdx.x; n < p.base.ranks * p.k; n += blockDim.x) {
                const int32_t r = (int32_t)(n / p.k);
                const int64_t index = t * p.k + n % p.k;
                const int64_t id = ((const int64_t *)(block_of(p, r) + p.pid))[index];
                if (id < 0)
                    continue;
                const double z = candidate(p, r, index), key = key_of(z, p.base.factor);
                int64_t ahead = n % p.k; /* its own rank's are in order */
                for (int32_t q = 0; q < p.base.ranks && ahead < p.k; q++)
                    ahead += q == r ? 0 : count_before(p, q, t, key, id);
                if (ahead < p.k)
                    emit(p, t, ahead, id, z);
            }
            continue;
        }
        for (int64_t i = threadIdx.x; i < p.k; i += blockDim.x) {
            const int64_t id = skip || p.topk ? -1 : p.ids[t * p.id_stride + i];
            if (skip || (!p.topk && id == p.ignore_index)) {
                emit(p, t, i, COLO_TOPK_SKIP, 0);
            } else if (is_legal(p, id)) {
                double z = CUDART_NAN; /* on no rank: the shards do not tile the vocabulary */
                for (int32_t r = 0; r < p.base.ranks; r++) {
                    const colo_logprob_header_t *header =
                        (const colo_logprob_header_t *)block_of(p, r);
                    const int64_t start = header->start, columns = header->columns;
                    if (id >= start && id - start < columns)
                        z = candidate(p, r, t * p.k + i);
                }
                emit(p, t, i, id, z);
            } else {
                emit(p, t, i, -1, 0);
            }
        }
    }
}

/* ---- backward ---- */

__device__ double upstream(const colo_topk_args &p, int64_t index)
{
    return p.saved_ids[index] < 0 ? 0 : colo_stat_get(p.d_logp, p.base.dtype == COLO_F64, index);
}

/* A warp a row; lanes and then the tree in a fixed order. */
__global__ void sum_kernel(const __grid_constant__ colo_topk_args p)
{
    const int64_t stride = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t t = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; t < p.base.tokens;
         t += stride) {
        double sum = 0;
        for (int64_t i = threadIdx.x % 32; i < p.k; i += 32)
            sum += upstream(p, t * p.k + i);
        for (int o = 16; o > 0; o /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, o);
        if (threadIdx.x % 32 == 0)
            colo_topk_sum_token(&p, t, sum);
    }
}

template <typename D> __global__ void fix_kernel(const __grid_constant__ colo_topk_args p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x, n = p.base.tokens * p.k;
    for (int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; index < n;
         index += stride) {
        const int64_t t = index / p.k, id = p.saved_ids[index],
                      j = id - p.base.config.logits.vocab_start;
        const double m = p.base.saved[t],
                     log_sum = p.tail ? p.log_sum[t] : p.base.saved[p.base.tokens + t];
        if (p.rows[t] < 0 || isnan(m) || id < p.base.config.logits.vocab_start ||
            j >= p.base.true_columns)
            continue;
        double g = 0;
        bool first = true;
        if (p.topk)
            g = upstream(p, index); /* all ids differ */
        else
            for (int64_t i = t * p.k; i < (t + 1) * p.k; i++) {
                g += p.saved_ids[i] == id ? upstream(p, i) : 0;
                first = first && (i >= index || p.saved_ids[i] != id);
            }
        if (!first)
            continue;
        const scaling<double> by =
            scaling_by<double>(p.base, colo_logprob_saved_coldness(&p.base, t));
        double dx = g - exp(p.down[index] - log_sum) * p.all[t];
        if (by.cap > 0) {
            const double th = (p.down[index] + m) / by.cap;
            dx *= 1 - th * th;
        }
        ((typename D::elem *)p.base.d_logits)[t * p.base.d_row_stride + j] =
            D::store((typename D::real)(dx * by.factor));
    }
}

template <typename D> cudaError_t given(const colo_topk_args &p, cudaStream_t stream)
{
    given_kernel<D><<<blocks_of(p.base.tokens * p.k, 256), 256, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename D> cudaError_t rest(const colo_topk_args &p, cudaStream_t stream)
{
    rest_kernel<D><<<blocks_of(p.base.tokens, 1), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename D> cudaError_t fix(const colo_topk_args &p, cudaStream_t stream)
{
    fix_kernel<D><<<blocks_of(p.base.tokens * p.k, 256), 256, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_topk_rows(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->count && p->out.n_invalid) {
        cudaError_t e = cudaMemsetAsync(p->out.n_invalid, 0, sizeof *p->out.n_invalid, stream);
        if (e != cudaSuccess)
            return e;
    }
    if (p->base.tokens == 0)
        return cudaSuccess;
    rows_kernel<<<blocks_of(p->base.tokens, 128), 128, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_topk_given(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    return with_dtype(p->base.dtype, [&](auto d) { return given<decltype(d)>(*p, stream); });
}

extern "C" cudaError_t colo_k_topk_rest(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    return with_dtype(p->base.dtype, [&](auto d) { return rest<decltype(d)>(*p, stream); });
}

extern "C" cudaError_t colo_k_topk_tail(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    tail_kernel<<<blocks_of(p->base.tokens, 128), 128, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_topk_merge(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    merge_kernel<<<blocks_of(p->base.tokens, 1), 64, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_topk_sum(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    sum_kernel<<<blocks_of(p->base.tokens, 4), 128, 0, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_topk_fix(const colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    return with_dtype(p->base.dtype, [&](auto d) { return fix<decltype(d)>(*p, stream); });
}
