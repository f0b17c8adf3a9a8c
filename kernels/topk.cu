/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.cu - the k largest columns of a row and the row's statistics, in one read of the logits.
 *
 * A block of threads a row, and the sums of logprob-sums.cuh. What is looked for while the row goes
 * by is not elements but vectors, the 16-byte words that it is read in; the maximum of a vector is
 * made for the sums anyway. The k largest elements lie in the k vectors that have the largest
 * maxima, of equal maxima the first ones: before an element of any other vector there is one in
 * each of those k.
 *
 *   1. A vector whose maximum is above the bar becomes a candidate in shared memory: its maximum
 *      and its number.
 *   2. When there are many, the k first are kept. The bar is then at most the maximum of the last
 *      of them, and above all that went but equals of it. A later vector that only equals the bar
 *      has k before it. The bar is there from the first ROUND vectors on, so a row in random order
 *      makes a few hundred candidates for k = 64.
 *   3. At the row's end the k vectors are read again, 16 k bytes; their elements that reach the bar
 *      are candidates in the same memory, the k first are kept, and each is put where as many
 *      others come before it.
 *
 * There is memory for what two rounds can add to most_of(k) candidates, and every two rounds the
 * block looks whether there are more than that: no order of a row can overflow that memory. An
 * ascending row pays for it with a selection every two rounds. A round's loads are started before
 * the candidates of the one before it are looked at, so memory is busy while a block selects.
 *
 * To keep the k first is a bisection between the bar and the largest maximum, counting, by one
 * warp; among candidates that equal the last one it goes by number. The order (logit, lower id
 * first) is a total one, so the result depends on no schedule. Logits become integers of the same
 * order and of no more bits than the dtype has values for.
 *
 * A row with NaN has no picks (topk_merge sees to that); here it only must not do harm.
 */
#include "logprob-sums.cuh"

#include "kernels.h"
#include "loss/topk-args.h"

#include <algorithm>

namespace
{

constexpr int ROUND = BATCH * THREADS; /* vectors */
constexpr int BLOCKS = 10;            /* on a multiprocessor, where 48 registers do */
constexpr int CAPACITY = 2048;        /* candidates */
constexpr int PER = COLO_TOPK_MAX / THREADS;

/* Candidates that a block may have when it goes on; a selection leaves k. */
__device__ int most_of(int k)
{
    return max(512, 4 * k);
}
static_assert(4 * COLO_TOPK_MAX + 2 * ROUND <= CAPACITY, "two rounds fit above that");
static_assert(COLO_TOPK_MAX * 8 <= CAPACITY, "all elements of k vectors fit");

/* ---- logits as integers ---- */

template <typename D> struct code {
    using type = unsigned;
    static constexpr int SHIFT = 0;
};
template <> struct code<bf16> {
    using type = unsigned;
    static constexpr int SHIFT = 16; /* a float's bits that are always zero */
};
template <> struct code<f16> {
    using type = unsigned;
    static constexpr int SHIFT = 13;
};
template <> struct code<f64> {
    using type = unsigned long long;
    static constexpr int SHIFT = 0;
};

template <typename D> __device__ typename code<D>::type encode(typename D::real z)
{
    using C = typename code<D>::type;
    constexpr C SIGN = (C)1 << (8 * sizeof(C) - 1);
    C u;
    z += 0; /* -0 is 0 */
    memcpy(&u, &z, sizeof u);
    return (u & SIGN ? ~u : u | SIGN) >> code<D>::SHIFT;
}

template <typename D> __device__ typename D::real decode(typename code<D>::type c)
{
    using C = typename code<D>::type;
    constexpr C SIGN = (C)1 << (8 * sizeof(C) - 1), LOW = ((C)1 << code<D>::SHIFT) - 1;
    C u = c << code<D>::SHIFT;
    typename D::real z;
    u = u & SIGN ? u ^ SIGN : ~u & ~LOW;
    memcpy(&z, &u, sizeof z);
    return z;
}

/* ---- candidates ---- */

template <typename C> struct candidates {
    C key[CAPACITY];
    unsigned index[CAPACITY]; /* vector, and in the end column */
    C bar, top;        /* no candidate is below bar or above top */
    int count;
};

/* The vectors whose maximum @top reaches @least; true when there are more candidates than @most. */
template <typename D>
__device__ bool add_vectors(candidates<typename code<D>::type> &h, const typename D::real *top,
                            unsigned vector, typename D::real least, int most)
{
    typename code<D>::type best = 0;
    int n = 0;
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        n += top[b] >= least;
    if (n == 0)
        return false;
    int index = atomicAdd(&h.count, n);
    const bool many = index + n > most;
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        if (top[b] >= least) {
            const auto key = encode<D>(top[b]);
            best = max(best, key);
            h.key[index] = key;
            h.index[index++] = vector + b * THREADS;
        }
    atomicMax(&h.top, best);
    return many;
}

/* By one warp, as all from here to the end of keep_first(). */
template <typename C, typename F> __device__ int how_many(const candidates<C> &h, int n, F is)
{
    int mine = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += 32)
        mine += is(h.key[i], h.index[i]);
    return __reduce_add_sync(0xffffffffu, mine);
}

/* Keeps the k first candidates, in any order, and raises the bar: above all that go but equals of
 * the last that stays. @last: the largest h.index there can be. */
template <typename C> __device__ void keep_first(candidates<C> &h, int k, unsigned last)
{
    const int n = h.count;
    C lo = h.bar, hi = h.top;
    unsigned from = 0, to = last; /* of those that equal lo, the first ones up to this */
    int left = n;                 /* candidates >= lo */
    if (n <= k)
        return;
    while (left > k && lo < hi) {
        const C mid = hi - (hi - lo) / 2;
        const int m = how_many(h, n, [=](C key, unsigned) { return key >= mid; });
        if (m >= k) {
            lo = mid;
            left = m;
        } else {
            hi = mid - 1;
        }
    }
    while (left > k && from < to) {
        const unsigned mid = from + (to - from) / 2;
        const int m = how_many(
            h, n, [=](C key, unsigned index) { return key > lo || (key == lo && index <= mid); });
        if (m >= k) {
            to = mid;
            left = m;
        } else {
            from = mid + 1;
        }
    }
    int kept = 0;
    for (int base = 0; base < n; base += 32) {
        const int i = base + (int)threadIdx.x;
        const C key = i < n ? h.key[i] : 0;
        const unsigned index = i < n ? h.index[i] : 0;
        const bool stays = i < n && (key > lo || (key == lo && index <= to));
        const unsigned all = __ballot_sync(0xffffffffu, stays);
        const int place = kept + __popc(all & ((1u << threadIdx.x) - 1)); /* <= i */
        __syncwarp();
        if (stays && place < k) {
            h.key[place] = key;
            h.index[place] = index;
        }
        kept += __popc(all);
        __syncwarp();
    }
    if (threadIdx.x == 0) {
        h.count = min(kept, k);
        h.bar = lo;
    }
}

/* All threads; what was added before is seen, and so is the outcome after. */
template <typename C> __device__ void select(candidates<C> &h, int k, unsigned last)
{
    __syncthreads();
    if (threadIdx.x < 32)
        keep_first(h, k, last);
    __syncthreads();
}

/* ---- a row ---- */

/* A vector of which only a part is in the row, -inf in the rest. */
template <typename D> __device__ uint4 part_of_vector(const void *row, int64_t j, int64_t columns)
{
    typename D::real z[D::N];
#pragma unroll
    for (int e = 0; e < D::N; e++)
        z[e] = j + e >= 0 && j + e < columns ? D::load(((const typename D::elem *)row)[j + e])
                                             : -(typename D::real)CUDART_INF;
    return D::pack(z);
}

/* One vector into the sums, x made of each z; its largest key. */
template <typename D>
__device__ typename D::real absorb_vector(row_sums<typename D::real, SUM> &a,
                                          const colo_logprob_args &p, const uint4 &v, int64_t j)
{
    using R = typename D::real;
    R z[D::N], best = -(R)CUDART_INF;
    D::unpack(v, z);
#pragma unroll
    for (int e = 0; e < D::N; e++)
        if (j + e >= 0 && j + e < p.true_columns) {
            best = max_nan(best, key_of(z[e], p.factor));
            z[e] = x_of(z[e], (R)p.factor, (R)p.cap);
        } /* else -inf, which adds nothing */
    absorb_x<R, SUM, D::N>(a, z, j, (R)1);
    return best;
}

/* The row's sums into @a; candidates are all vectors that may hold one of the k largest. */
template <typename D, bool PLAIN>
__device__ void read_row(row_sums<typename D::real, SUM> &a, candidates<typename code<D>::type> &h,
                         const colo_logprob_args &p, const void *row, int64_t first,
                         unsigned vectors, int k)
{
    using R = typename D::real;
    constexpr int N = D::N, SIZE = sizeof(typename D::elem), APART = THREADS * N;
    const R factor = (R)p.factor;
    R least = -(R)CUDART_INF;
    bool many = true; /* after the first round there shall be a bar */
    bool check = true, loaded = false;
    uint4 v[BATCH];
    for (unsigned base = 0; base < vectors; base += ROUND, check = !check) {
        const int64_t begin = first + (int64_t)base * N, j = begin + (int64_t)threadIdx.x * N;
        const unsigned vector = base + threadIdx.x;
        R top[BATCH];
        if (begin >= 0 && begin + ROUND * N <= p.true_columns) {
            if (!loaded)
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    v[b] = load_vector(row, j + b * APART, SIZE);
            if constexpr (PLAIN) {
                absorb<D, SUM, BATCH>(a, v, factor, j, APART);
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    top[b] = D::top(v[b]);
            } else {
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    top[b] = absorb_vector<D>(a, p, v[b], j + b * APART);
            }
            /* the next round's are under way while candidates are looked at */
            loaded = begin + 2 * ROUND * N <= p.true_columns;
            if (loaded)
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    v[b] = load_vector(row, j + (b + BATCH) * APART, SIZE);
        } else {
            loaded = false;
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int64_t index = j + b * APART;
                if (index >= 0 && index + N <= p.true_columns)
                    v[b] = load_vector(row, index, SIZE);
                else if (vector + b * THREADS < vectors)
                    v[b] = part_of_vector<D>(row, index, p.true_columns);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                top[b] = (R)CUDART_NAN; /* reaches no bar */
                if (vector + b * THREADS >= vectors)
                    continue;
                if constexpr (PLAIN) {
                    absorb<D, SUM, 1>(a, &v[b], factor, j + b * APART, 0);
                    top[b] = D::top(v[b]);
                } else {
                    top[b] = absorb_vector<D>(a, p, v[b], j + b * APART);
                }
            }
        }
        many |= add_vectors<D>(h, top, vector, least, most_of(k));
        if (check && __syncthreads_or(many)) {
            select(h, k, vectors - 1);
            least = decode<D>(h.bar + 1);
            many = false;
        }
    }
    select(h, k, vectors - 1);
}

/* Candidates become the elements of the vectors that they were. */
template <typename D>
__device__ void open_vectors(candidates<typename code<D>::type> &h, const colo_logprob_args &p,
                             const void *row, int64_t first)
{
    const auto bar = h.bar;
    const int n = h.count;
    unsigned vector[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        vector[i] = i * THREADS + (int)threadIdx.x < n ? h.index[i * THREADS + threadIdx.x] : 0;
    __syncthreads();
    if (threadIdx.x == 0)
        h.count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int64_t j = first + (int64_t)vector[i] * D::N;
        if (i * THREADS + (int)threadIdx.x >= n)
            continue;
#pragma unroll
        for (int e = 0; e < D::N; e++) {
            if (j + e < 0 || j + e >= p.true_columns)
                continue;
            const auto key =
                encode<D>(key_of(D::load(((const typename D::elem *)row)[j + e]), p.factor));
            if (key >= bar) {
                const int index = atomicAdd(&h.count, 1);
                h.key[index] = key;
                h.index[index] = (unsigned)(j + e);
            }
        }
    }
}

/* PLAIN: x = factor z with factor > 0, kept as z until the exponent. */
template <typename D, bool PLAIN>
__global__ void __launch_bounds__(THREADS, PLAIN ? BLOCKS : 6)
    topk_kernel(const __grid_constant__ colo_topk_args p)
{
    const colo_logprob_args &s = p.base;
    using R = typename D::real;
    constexpr bool WIDE = sizeof(typename D::real) == 8;
    __shared__ candidates<typename code<D>::type> h;
    __shared__ shared_sums shared;
    unsigned char *block = p.base.blocks + p.base.rank * p.base.block.bytes;
    int64_t *ids = (int64_t *)(block + p.pid);
    const int k = (int)p.k;
    if (blockIdx.x == 0 && threadIdx.x < 8)
        ((int64_t *)block)[threadIdx.x] = ((const int64_t *)&s.header)[threadIdx.x];
    for (int64_t t = blockIdx.x; t < p.base.tokens; t += gridDim.x) {
        const typename D::elem *row = (const typename D::elem *)s.logits + t * s.row_stride;
        const int64_t target = s.targets[t * s.target_stride], first = first_vector<D>(row),
                      columns = target == s.config.ignore_index ? 0 : s.true_columns;
        const unsigned vectors = columns > 0 ? (unsigned)((columns - first - 1) / D::N + 1) : 0;
        row_sums<R, SUM> a;
        begin(a);
        if (threadIdx.x == 0) {
            h.bar = h.top = 0;
            h.count = 0;
        }
        __syncthreads();
        read_row<D, PLAIN>(a, h, s, row, first, vectors, k);
        const scaling<R> by = scaling_of<R>(s, t, false);
        write_row(a, s, rank_span(s), t, target, PLAIN ? by.factor : (R)1, x_in<D, PLAIN>{by, row}, shared);
        open_vectors<D>(h, s, row, first);
        select(h, k, (unsigned)columns);
        const int n = h.count;
        for (int i = threadIdx.x; i < k; i += THREADS) {
            int place = i;
            if (i < n) {
                const auto key = h.key[i];
                const unsigned index = h.index[i];
                place = 0;
                for (int q = 0; q < n; q++)
                    place += h.key[q] > key || (h.key[q] == key && h.index[q] < index);
            }
            colo_stat_put(block + p.pz, WIDE, t * k + place, i < n ? (double)D::load(row[h.index[i]]) : 0);
            ids[t * k + place] = i < n ? p.base.config.logits.vocab_start + h.index[i] : -1;
        }
        __syncthreads();
    }
}

template <typename D, bool PLAIN> cudaError_t run(const colo_topk_args &p, cudaStream_t stream)
{
    const int64_t rows = std::max<int64_t>(p.base.tokens, 1); /* the header, too */
    topk_kernel<D, PLAIN><<<(unsigned)std::min<int64_t>(rows, 1 << 30), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename D> cudaError_t either(const colo_topk_args &p, cudaStream_t stream)
{
    return is_plain(p.base) ? run<D, true>(p, stream) : run<D, false>(p, stream);
}

} // namespace

extern "C" cudaError_t colo_k_topk_largest(const struct colo_topk_args *p, cudaStream_t stream)
{
    if (p->base.true_columns >= UINT32_MAX)
        return cudaErrorInvalidValue;
    switch (p->base.dtype) {
    case COLO_F32:
        return either<f32>(*p, stream);
    case COLO_F64:
        return run<f64, false>(*p, stream);
    case COLO_BF16:
        return either<bf16>(*p, stream);
    case COLO_F16:
        return either<f16>(*p, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
