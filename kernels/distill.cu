/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.cu - cross entropy and KL from a sharded target distribution: host/distill.c on a GPU.
 *
 * As the loss of one target a token: a block of threads a row, each thread with running maxima and
 * sums of its own, combined once in fp64 in a fixed order. A thread takes groups of N neighbours, N
 * being what 16 bytes of logits hold: logits in one access, targets too where their row allows,
 * else element by element. Two exps an element, one for probabilities and their logarithm; what
 * makes a KL near 0 exact is a polynomial. Divergences that need both normalisers read the row
 * again, element by element of such a group.
 *
 * Row arithmetic is fp32 for f32, bf16 and f16 logits, fp64 for f64.
 */
#include "logprob.cuh"

#include "kernels.h"
#include "loss/distill-merge.h"

#include <algorithm>
#include <type_traits>

namespace
{

constexpr int THREADS = 256;
constexpr int BATCH = 4; /* vectors of each matrix in flight a thread */

__device__ float log_of(float v)
{
    return logf(v);
}
__device__ double log_of(double v)
{
    return log(v);
}

__device__ float expm1_of(float v)
{
    return expm1f(v);
}
__device__ double expm1_of(double v)
{
    return expm1(v);
}
__device__ float log1p_of(float v)
{
    return log1pf(v);
}
__device__ double log1p_of(double v)
{
    return log1p(v);
}

/* r + expm1(-r) where |r| < NEAR, with the digits of r: to r^4 / 360 of it, 4e-8 */
constexpr float NEAR = 0.0625f; /* beyond, a difference of exps is off by 4 u / r^2 of it */
__device__ float expm1_plus(float r)
{
    float sum = 1.0f / 120;
    sum = fmaf(-r, sum, 1.0f / 24);
    sum = fmaf(-r, sum, 1.0f / 6);
    return r * r * fmaf(-r, sum, 0.5f);
}
__device__ double expm1_plus(double r)
{
    return colo_stat_expm1_plus(r);
}

/* (1 + e) log(1 + e) - e >= 0, with the digits of e near 0 */
__device__ float relative_entropy(float e)
{
    if (!(e > -1))
        return 1; /* e is at least -1 */
    if (fabsf(e) >= 0.1f)
        return fmaf(1 + e, log1pf(e), -e);
    float sum = 1.0f / 56; /* e^2 sum over n of (-e)^(n-2) / (n (n - 1)) */
    sum = fmaf(-e, sum, 1.0f / 42);
    sum = fmaf(-e, sum, 1.0f / 30);
    sum = fmaf(-e, sum, 1.0f / 20);
    sum = fmaf(-e, sum, 1.0f / 12);
    sum = fmaf(-e, sum, 1.0f / 6);
    return e * e * fmaf(-e, sum, 0.5f);
}
__device__ double relative_entropy(double e)
{
    return colo_stat_relative_entropy(e);
}

template <typename R> __device__ R minus_inf()
{
    return -(R)CUDART_INF;
}

/* N elements from column j on, in 16-byte accesses where that is possible. */
template <typename E, int N, typename R>
__device__ void load(const typename E::elem *row, int64_t j, R *z)
{
    const typename E::elem *from = row + j;
    if (N % E::N == 0 && (uintptr_t)from % 16 == 0) {
#pragma unroll
        for (int g = 0; g < N / E::N; g++) {
            typename E::real v[E::N];
            E::unpack(__ldcs((const uint4 *)from + g), v);
#pragma unroll
            for (int e = 0; e < E::N; e++)
                z[g * E::N + e] = (R)v[e];
        }
    } else {
#pragma unroll
        for (int e = 0; e < N; e++)
            z[e] = (R)E::load(from[e]);
    }
}

/* x and v of N columns; those outside [0, true_columns) are -inf in both. */
template <typename D, typename E, typename R>
__device__ void fetch(const colo_distill_args &p, const typename D::elem *row,
                      const typename E::elem *targets, int64_t j, R *x, R *w)
{
    constexpr int N = D::N;
    if (j >= 0 && j + N <= p.base.true_columns) {
        load<D, N>(row, j, x);
        load<E, N>(targets, j, w);
    } else {
#pragma unroll
        for (int e = 0; e < N; e++) {
            const bool there = j + e >= 0 && j + e < p.base.true_columns;
            x[e] = there ? (R)D::load(row[j + e]) : (R)0;
            w[e] = there ? (R)E::load(targets[j + e]) : (R)0;
        }
    }
}

template <typename R> struct sums {
    R mx, sx, mv, sv, c, d, e, g;
};

template <typename R> __device__ R base_of(R m)
{
    return m == minus_inf<R>() ? (R)0 : m;
}

/* d, e and g, whose weights add up to @sum, as r becomes r + s and the weights shrink to @w of
 * what they were; @other: what is left of the sum of the other side. */
template <typename R> __device__ void move_near(sums<R> &a, R sum, R other, R w, R s)
{
    if (!(w > 0) || !(sum > 0)) {
        a.d = 0;
        a.e = a.g = other;
    } else if (fabs(s) < (R)NEAR) {
        const R f = expm1_plus(s), up = f - s;
        a.g = w * (a.g + f * sum + up * a.e);
        a.e = w * (a.e + up * (sum + a.e));
        a.d = w * (a.d + s * sum);
    } else {
        a.d = w * (a.d + s * sum);
        a.e = other - w * sum;
        a.g = a.d + a.e;
    }
}

/* Larger maxima, or NaN: the sums so far move to them. */
template <typename R> __device__ void raise(sums<R> &a, R top, R top_v, bool probs, bool reverse)
{
    const R up = base_of(top) - base_of(a.mx), left = a.mx == minus_inf<R>() ? (R)0 : exp_of(-up);
    R up_v = 0, left_v = 1;
    if (probs) {
        if (top_v != top_v || top_v == (R)CUDART_INF)
            a.mv = (R)CUDART_NAN;
    } else {
        up_v = base_of(top_v) - base_of(a.mv);
        left_v = a.mv == minus_inf<R>() ? (R)0 : exp_of(-up_v);
        a.mv = top_v;
    }
    if (reverse)
        move_near(a, a.sx, left_v * a.sv, left, up_v - up);
    else
        move_near(a, a.sv, left * a.sx, left_v, up - up_v);
    a.c = left_v > 0 && a.sv > 0 ? left_v * (a.c - up * a.sv) : (R)0;
    a.sx *= left;
    a.sv *= left_v;
    a.mx = top;
}

/* Of a column whose weight is @w and whose other side's is @other, r = log(w / other). */
template <typename R> __device__ void take_near(sums<R> &a, R w, R other, R r)
{
    if (fabs(r) < (R)NEAR && w > 0) {
        const R f = expm1_plus(r);
        a.d += w * r;
        a.e += w * (f - r);
        a.g += w * f;
    } else {
        const R first = w > 0 ? w * r : (R)0, down = other - w;
        a.d += first;
        a.e += down;
        a.g += first + down;
    }
}

/* A column: x and v relative to the maxima. */
template <typename R> __device__ void take(sums<R> &a, R dx, R dv, R q, bool reverse)
{
    const R p = exp_of(dx);
    a.sx += p;
    if (q > 0) {
        a.sv += q;
        a.c += q * dx;
    }
    take_near(a, reverse ? p : q, reverse ? q : p, reverse ? dx - dv : dv - dx);
}

/* N columns; @x and @v hold what the row has there, -inf where it has nothing. @w: probabilities.
 */
template <typename R, int N>
__device__ void absorb(sums<R> &a, const R *x, const R *v, const R *w, bool probs, bool reverse)
{
    R top = a.mx, top_v = a.mv;
#pragma unroll
    for (int e = 0; e < N; e++) {
        top = max_nan(top, x[e]);
        top_v = max_nan(top_v, v[e]);
    }
    if (top != a.mx || top_v != a.mv)
        raise(a, top, top_v, probs, reverse);
    const R bx = base_of(a.mx), bv = probs ? (R)0 : base_of(a.mv);
#pragma unroll
    for (int e = 0; e < N; e++) {
        const R dv = v[e] - bv;
        take(a, x[e] - bx, dv, probs ? w[e] : exp_of(dv), reverse);
    }
}

/* A whole vector of logits and of a teacher's: x = factor z, v = target_factor w, factors positive.
 */
template <typename D>
__device__ void absorb_vector(sums<typename D::real> &a, const uint4 &z, const uint4 &w,
                              typename D::real factor, typename D::real target_factor,
                              bool reverse)
{
    using R = typename D::real;
    constexpr int N = D::N;
    const R top = max_nan(a.mx, factor * (R)D::top(z)),
            top_v = max_nan(a.mv, target_factor * (R)D::top(w));
    if (top != a.mx || top_v != a.mv)
        raise(a, top, top_v, false, reverse);
    const R bx = base_of(a.mx), bv = base_of(a.mv);
    R x[N], v[N];
    D::unpack(z, x);
    D::unpack(w, v);
#pragma unroll
    for (int e = 0; e < N; e++) {
        const R dv = fma(target_factor, v[e], -bv);
        take(a, fma(factor, x[e], -bx), dv, exp_of(dv), reverse);
    }
}

__device__ double sum_of(double v, double *partial)
{
    return all_threads<THREADS>(v, partial, [](double a, double b) { return a + b; });
}

/* Columns [from, end) group by group, as any config, dtype and alignment will have it. */
template <typename D, typename E>
__device__ void read_columns(sums<typename D::real> &a, const colo_distill_args &p,
                             const typename D::elem *row, const typename E::elem *targets,
                             int64_t from, int64_t end)
{
    using R = typename D::real;
    constexpr int N = D::N;
    const R factor = (R)p.base.factor, cap = (R)p.base.cap,
            target_factor = (R)p.target_factor, target_cap = (R)p.target_cap;
    for (int64_t j = from + (int64_t)threadIdx.x * N; j < end; j += (int64_t)THREADS * N) {
        R x[N], w[N], v[N];
        fetch<D, E>(p, row, targets, j, x, w);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const bool there = j + e >= 0 && j + e < end;
            x[e] = there ? x_of(x[e], factor, cap) : minus_inf<R>();
            /* the logarithm of a negative one is NaN, as it must be */
            v[e] = !there ? minus_inf<R>() : p.probs ? log_of(w[e]) : x_of(w[e], target_factor, target_cap);
            w[e] = there ? w[e] : (R)0;
        }
        absorb<R, N>(a, x, v, w, p.probs, p.divergence == COLO_DIVERGENCE_REVERSE_KL);
    }
}

/* PLAIN: a teacher's logits of the same dtype, factors positive, no softcap. Then a row whose
 * targets sit in their 16-byte words as its logits do is read vector by vector, and its two ends as
 * above. Which way a row goes depends on its addresses alone. */
template <typename D, typename E, bool PLAIN>
__global__ void __launch_bounds__(THREADS) stats_kernel(const __grid_constant__ colo_distill_args p)
{
    using R = typename D::real;
    constexpr int N = D::N;
    constexpr bool WIDE = sizeof(typename D::real) == 8;
    const bool reverse = p.divergence == COLO_DIVERGENCE_REVERSE_KL;
    __shared__ double partial[THREADS / 32];
    unsigned char *block = p.base.blocks + p.base.rank * p.base.block.bytes;
    if (blockIdx.x == 0 && threadIdx.x < 8)
        ((int64_t *)block)[threadIdx.x] = ((const int64_t *)&p.base.header)[threadIdx.x];
    for (int64_t t = blockIdx.x; t < p.base.tokens; t += gridDim.x) {
        const typename D::elem *row =
            (const typename D::elem *)p.base.logits + t * p.base.row_stride;
        const typename E::elem *targets =
            (const typename E::elem *)p.targets + t * p.target_row_stride;
        const bool counts = !p.mask || p.mask[t * p.mask_stride];
        const int64_t first = first_vector<D>(row), end = counts ? p.base.true_columns : 0;
        sums<R> a = {minus_inf<R>(), 0, p.probs ? (R)0 : minus_inf<R>(), 0, 0, 0, 0, 0};
        if (PLAIN && first_vector<D>(targets) == first && end > 2 * N) {
            const int64_t lo = first < 0 ? first + N : 0, vectors = (end - lo) / N;
            const uint4 *z = (const uint4 *)(row + lo), *w = (const uint4 *)(targets + lo);
            int64_t k = threadIdx.x;
            for (; k + (BATCH - 1) * THREADS < vectors; k += BATCH * THREADS) {
                uint4 vz[BATCH], vw[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    vz[b] = __ldcs(z + k + b * THREADS);
                    vw[b] = __ldcs(w + k + b * THREADS);
                }
#pragma unroll
                for (int b = 0; b < BATCH; b++)
                    absorb_vector<D>(a, vz[b], vw[b], (R)p.base.factor, (R)p.target_factor,
                                     reverse);
            }
            for (; k < vectors; k += THREADS)
                absorb_vector<D>(a, __ldcs(z + k), __ldcs(w + k), (R)p.base.factor,
                                 (R)p.target_factor, reverse);
            if (first < 0)
                read_columns<D, E>(a, p, row, targets, first, lo);
            read_columns<D, E>(a, p, row, targets, lo + vectors * N, end);
        } else {
            read_columns<D, E>(a, p, row, targets, first, end);
        }

        const auto larger = [](double u, double w) { return max_nan(u, w); };
        const double mx = all_threads<THREADS>((double)a.mx, partial, larger),
                     mv = all_threads<THREADS>((double)a.mv, partial, larger);
        const bool fine = mx < CUDART_INF && mv < CUDART_INF; /* not NaN, not +inf */
        colo_distill_near near = {0, 0, 0, 0, 0};
        double c = 0;
        if (fine) { /* as the merge adds ranks */
            const colo_distill_near own = {reverse ? a.sx : a.sv, reverse ? a.sv : a.sx, a.d, a.e,
                                           a.g};
            const double down = (double)base_of(a.mx) - colo_distill_base(mx),
                         down_v = (double)base_of(a.mv) - colo_distill_base(mv);
            colo_distill_add_near(&near, &own, reverse ? down : down_v, reverse ? down_v : down);
            if (a.sv > 0)
                c = exp(down_v) * ((double)a.c + down * (double)a.sv);
        }
        const double sum = sum_of(near.sum, partial), other = sum_of(near.sum_of_other, partial),
                     d = sum_of(near.d, partial), e = sum_of(near.e, partial),
                     g = sum_of(near.g, partial), sx = reverse ? sum : other,
                     sv = reverse ? other : sum;
        c = sum_of(c, partial);
        if (threadIdx.x == 0) {
            colo_stat_put(block + p.mx, WIDE, t, fine ? mx : CUDART_NAN);
            colo_stat_put(block + p.sx, WIDE, t, sx);
            colo_stat_put(block + p.mv, WIDE, t, mv);
            colo_stat_put(block + p.sv, WIDE, t, sv);
            colo_stat_put(block + p.c, WIDE, t, c);
            colo_stat_put(block + p.d, WIDE, t, d);
            colo_stat_put(block + p.e, WIDE, t, e);
            colo_stat_put(block + p.g, WIDE, t, g);
        }
    }
}

/* ---- merge ---- */

__global__ void merge_kernel(const __grid_constant__ colo_distill_args p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; t < p.base.tokens; t += stride)
        colo_distill_merge_token(&p, t);
}

/* ---- the second read ---- */

/* What a row has of both normalisers. log(p/q) of a column is (x - m) - (v - mv) - log_ratio, in
 * which no product was rounded. */
template <typename R> struct pair_numbers {
    R m, log_sum, mv, log_sum_v, log_ratio, beta, rest; /* rest: 1 - beta */
};

template <typename R> __device__ pair_numbers<R> pair_of(const colo_distill_args &p, int64_t t)
{
    const double *saved = p.saved + t, m = saved[0], mv = saved[2 * p.base.tokens];
    return {(R)m, (R)saved[p.base.tokens], (R)mv, (R)saved[3 * p.base.tokens],
            (R)((mv - m) - saved[5 * p.base.tokens]), (R)p.beta, (R)(1 - p.beta)};
}

template <typename R> __device__ R below(R z, R factor, R cap, R top)
{
    return cap > 0 ? x_of(z, factor, cap) - top : fma(factor, z, -top);
}

/* colo_distill_pair() in R */
template <typename R>
__device__ void take_pair(const colo_distill_args &p, const pair_numbers<R> &k, R z, R w, R *s)
{
    const R dx = below(z, (R)p.base.factor, (R)p.base.cap, k.m),
            dv = below(w, (R)p.target_factor, (R)p.target_cap, k.mv), t = (dx - dv) - k.log_ratio,
            lp = dx - k.log_sum, lq = dv - k.log_sum_v;
    if (t != t)
        return;
    const R base = exp_of(t > 0 ? lp : lq), down = expm1_of(-fabs(t));
    if (p.divergence == COLO_DIVERGENCE_JSD) {
        const R share = t > 0 ? k.beta : k.rest, rest = t > 0 ? k.rest : k.beta,
                near = share * down, m = near > (R)-0.5 ? 1 + near : rest + share * exp_of(-fabs(t)),
                large = relative_entropy(-near / m), small = relative_entropy(rest * down / m);
        s[0] += base * m * (rest * large + share * small);
        s[1] += base * m * (t > 0 ? large : small);
        return;
    }
    const R least = exp_of(t > 0 ? lq : lp);
    s[0] -= base * down;
    s[1] += t > 0 ? base : t < 0 ? -least : (R)0;
    s[2] += least;
}

template <typename D, typename E>
__global__ void __launch_bounds__(THREADS) pairs_kernel(const __grid_constant__ colo_distill_args p)
{
    using R = typename D::real;
    constexpr int N = D::N;
    __shared__ double partial[THREADS / 32];
    double *sums = p.sums + p.base.rank * COLO_DISTILL_SUMS * p.base.tokens;
    for (int64_t t = blockIdx.x; t < p.base.tokens; t += gridDim.x) {
        const typename D::elem *row =
            (const typename D::elem *)p.base.logits + t * p.base.row_stride;
        const typename E::elem *targets =
            (const typename E::elem *)p.targets + t * p.target_row_stride;
        const pair_numbers<R> k = pair_of<R>(p, t);
        const int64_t end = p.saved[t] < CUDART_INF ? p.base.true_columns : 0;
        R s[COLO_DISTILL_SUMS] = {0, 0, 0};
        for (int64_t j = first_vector<D>(row) + (int64_t)threadIdx.x * N; j < end;
             j += (int64_t)THREADS * N) {
            R x[N], w[N];
            fetch<D, E>(p, row, targets, j, x, w);
#pragma unroll
            for (int e = 0; e < N; e++)
                if (j + e >= 0 && j + e < end)
                    take_pair<R>(p, k, x[e], w[e], s);
        }
        for (int i = 0; i < COLO_DISTILL_SUMS; i++) {
            const double all = sum_of((double)s[i], partial);
            if (threadIdx.x == 0)
                sums[i * p.base.tokens + t] = all;
        }
    }
}

__global__ void finish_kernel(const __grid_constant__ colo_distill_args p)
{
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; t < p.base.tokens; t += stride)
        colo_distill_finish_token(&p, t);
}

/* ---- grad: blockIdx.x is a run of groups, blockIdx.y a row ---- */

constexpr int VECTORS = 4; /* groups a thread */

template <typename R> struct row_numbers {
    bool nan, counts;
    R m, log_sum, mv, log_sum_v, q_all, g, up; /* up: that of another divergence than forward KL */
    pair_numbers<R> pair;
    R center, slope;
};

/* colo_distill_slope() in R, of p > 0 */
template <typename R>
__device__ R other_slope(const colo_distill_args &p, const row_numbers<R> &k, R prob, R z, R w)
{
    const R t = (below(z, (R)p.base.factor, (R)p.base.cap, k.pair.m) -
                 below(w, (R)p.target_factor, (R)p.target_cap, k.pair.mv)) -
                k.pair.log_ratio;
    R u = t;
    if (p.divergence == COLO_DIVERGENCE_JSD) {
        const R share = t > 0 ? k.pair.beta : k.pair.rest, rest = t > 0 ? k.pair.rest : k.pair.beta,
                near = share * expm1_of(-fabs(t));
        u = (t > 0 ? (R)0 : t) -
            (near > (R)-0.5 ? log1p_of(near) : log_of(rest + share * exp_of(-fabs(t))));
    } else if (p.divergence != COLO_DIVERGENCE_REVERSE_KL) {
        u = (R)((t > 0) - (t < 0));
    }
    return k.slope * prob * (u - k.center);
}

/* N neighbours: x, made of logits, becomes the gradient. */
template <typename R, int N>
__device__ void gradient(const colo_distill_args &p, const row_numbers<R> &k, R *x, const R *w)
{
    const R factor = (R)p.base.factor, cap = (R)p.base.cap,
            target_factor = (R)p.target_factor, target_cap = (R)p.target_cap;
#pragma unroll
    for (int e = 0; e < N; e++) {
        R dz = k.nan ? (R)CUDART_NAN : (R)0;
        if (k.counts) {
            const R v = x_of(x[e], factor, cap),
                    q = p.probs ? w[e] : exp_of(x_of(w[e], target_factor, target_cap) - k.mv -
                                                 k.log_sum_v);
            const R prob = exp_of(v - k.m - k.log_sum);
            dz = k.g * (k.q_all * prob - q);
            if (p.divergence != COLO_DIVERGENCE_FORWARD_KL && k.up != 0 && prob > 0)
                dz += k.up * other_slope<R>(p, k, prob, x[e], w[e]);
            dz *= factor;
            if (cap > 0)
                dz *= 1 - (v / cap) * (v / cap);
        }
        x[e] = dz;
    }
}

/* A run inside the row whose three matrices sit alike in 16-byte words: all loads, then the rest.
 */
template <typename D>
__device__ void inner_run(const colo_distill_args &p, const row_numbers<typename D::real> &k,
                           const typename D::elem *row, const typename D::elem *targets,
                           typename D::elem *out)
{
    constexpr int N = D::N;
    uint4 z[VECTORS], v[VECTORS];
#pragma unroll
    for (int b = 0; b < VECTORS; b++) {
        z[b] = __ldcs((const uint4 *)row + b * THREADS + threadIdx.x);
        v[b] = __ldcs((const uint4 *)targets + b * THREADS + threadIdx.x);
    }
#pragma unroll
    for (int b = 0; b < VECTORS; b++) {
        typename D::real x[N], w[N];
        D::unpack(z[b], x);
        D::unpack(v[b], w);
        gradient<typename D::real, N>(p, k, x, w);
        __stcs((uint4 *)out + b * THREADS + threadIdx.x, D::pack(x));
    }
}

template <typename D, typename E>
__global__ void __launch_bounds__(THREADS) grad_kernel(const __grid_constant__ colo_distill_args p)
{
    using R = typename D::real;
    using Z = typename D::elem;
    constexpr int N = D::N;
    constexpr bool WIDE = sizeof(typename D::real) == 8;
    for (int64_t t = blockIdx.y; t < p.base.tokens; t += gridDim.y) {
        const Z *row = (const Z *)p.base.logits + t * p.base.row_stride;
        const typename E::elem *targets =
            (const typename E::elem *)p.targets + t * p.target_row_stride;
        Z *out = (Z *)p.base.d_logits + t * p.base.d_row_stride;
        const double md = p.saved[t],
                     d_ce = p.upstream.d_ce ? colo_stat_get(p.upstream.d_ce, WIDE, t) : 0,
                     d_kl = p.upstream.d_kl ? colo_stat_get(p.upstream.d_kl, WIDE, t) : 0;
        const bool nan = isnan(md), forward = p.divergence == COLO_DIVERGENCE_FORWARD_KL;
        const row_numbers<R> k = {nan,
                                  !nan && md < CUDART_INF,
                                  (R)md,
                                  (R)p.saved[p.base.tokens + t],
                                  (R)p.saved[2 * p.base.tokens + t],
                                  (R)p.saved[3 * p.base.tokens + t],
                                  (R)p.saved[4 * p.base.tokens + t],
                                  (R)(forward ? d_ce + d_kl : d_ce),
                                  (R)d_kl,
                                  pair_of<R>(p, t),
                                  (R)p.saved[6 * p.base.tokens + t],
                                  (R)p.saved[7 * p.base.tokens + t]};
        const int64_t first = first_vector<D>(row);
        if constexpr (std::is_same<D, E>::value) {
            constexpr int64_t COLUMNS = (int64_t)VECTORS * THREADS * N;
            const int64_t j = first + blockIdx.x * COLUMNS;
            if (k.counts && j >= 0 && j + COLUMNS <= p.base.true_columns &&
                ((uintptr_t)(targets + j) | (uintptr_t)(out + j)) % 16 == 0) {
                inner_run<D>(p, k, row + j, targets + j, out + j);
                continue;
            }
        }
        for (int b = 0; b < VECTORS; b++) {
            const int64_t j =
                first + (((int64_t)blockIdx.x * VECTORS + b) * THREADS + threadIdx.x) * N;
            if (j >= p.base.columns)
                break;
            R x[N], w[N];
            if (k.counts)
                fetch<D, E>(p, row, targets, j, x, w);
            gradient<R, N>(p, k, x, w);
#pragma unroll
            for (int e = 0; e < N; e++)
                x[e] = j + e < p.base.true_columns ? x[e] : (R)0;
            if (j >= 0 && j + N <= p.base.columns && (uintptr_t)(out + j) % 16 == 0) {
                __stcs((uint4 *)(out + j), D::pack(x));
            } else {
#pragma unroll
                for (int e = 0; e < N; e++)
                    if (j + e >= 0 && j + e < p.base.columns)
                        out[j + e] = D::store(x[e]);
            }
        }
    }
}

template <typename D, typename E> struct launcher {
    static cudaError_t stats(const colo_distill_args &p, cudaStream_t stream)
    {
        const int64_t rows = std::max<int64_t>(p.base.tokens, 1); /* the header, too */
        const unsigned grid = (unsigned)std::min<int64_t>(rows, 1 << 30);
        constexpr bool can = std::is_same<D, E>::value && sizeof(typename D::real) == 4;
        const bool plain = can && !p.probs && p.base.cap == 0 && p.target_cap == 0 &&
                           (float)p.base.factor > 0 && (float)p.target_factor > 0 &&
                           std::isfinite((float)p.base.factor) &&
                           std::isfinite((float)p.target_factor);
        if (plain)
            stats_kernel<D, E, can><<<grid, THREADS, 0, stream>>>(p);
        else
            stats_kernel<D, E, false><<<grid, THREADS, 0, stream>>>(p);
        return cudaGetLastError();
    }
    static cudaError_t pairs(const colo_distill_args &p, cudaStream_t stream)
    {
        pairs_kernel<D, E><<<(unsigned)std::min<int64_t>(p.base.tokens, 1 << 30), THREADS, 0,
                             stream>>>(p);
        return cudaGetLastError();
    }
    static cudaError_t grad(const colo_distill_args &p, cudaStream_t stream)
    {
        const int64_t groups = (p.base.columns + 2 * (D::N - 1)) / D::N,
                      parts = (groups - 1) / (THREADS * VECTORS) + 1;
        if (parts > INT32_MAX)
            return cudaErrorInvalidValue;
        grad_kernel<D, E>
            <<<dim3((unsigned)parts, (unsigned)std::min<int64_t>(p.base.tokens, 65535)), THREADS, 0,
               stream>>>(p);
        return cudaGetLastError();
    }
};

enum pass { STATS, PAIRS, GRAD };

template <typename D, typename E>
cudaError_t launch(const colo_distill_args &p, pass which, cudaStream_t stream)
{
    return which == GRAD    ? launcher<D, E>::grad(p, stream)
           : which == PAIRS ? launcher<D, E>::pairs(p, stream)
                            : launcher<D, E>::stats(p, stream);
}

cudaError_t dispatch(const colo_distill_args &p, pass which, cudaStream_t stream)
{
    return with_dtype(p.base.dtype, [&](auto d) {
        using D = decltype(d);
        return p.target_dtype == p.base.dtype ? launch<D, D>(p, which, stream)
                                              : launch<D, f32>(p, which, stream);
    });
}

} // namespace

extern "C" cudaError_t colo_k_distill_stats(const colo_distill_args *p, cudaStream_t stream)
{
    return dispatch(*p, STATS, stream);
}

extern "C" cudaError_t colo_k_distill_pairs(const colo_distill_args *p, cudaStream_t stream)
{
    return p->base.tokens == 0 ? cudaSuccess : dispatch(*p, PAIRS, stream);
}

extern "C" cudaError_t colo_k_distill_merge(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    merge_kernel<<<(unsigned)std::min<int64_t>((p->base.tokens - 1) / 128 + 1, 1 << 30), 128, 0,
                   stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_distill_finish(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    finish_kernel<<<(unsigned)std::min<int64_t>((p->base.tokens - 1) / 128 + 1, 1 << 30), 128, 0,
                    stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_distill_grad(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0 || p->base.columns == 0)
        return cudaSuccess;
    return dispatch(*p, GRAD, stream);
}
