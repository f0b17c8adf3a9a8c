/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-stats.cu - the statistics of logits and of targets, and the merge over ranks: what
 * host/distill.c does first, on a GPU.
 *
 * As the loss of one target a token: a block of threads a row, each thread with running maxima and
 * sums of its own, combined once in fp64 in a fixed order. Two exps an element, one for
 * probabilities and their logarithm; what makes a KL near 0 exact is a polynomial.
 */
#include "distill.cuh"

#include "loss/distill-merge.h"

namespace
{

constexpr int BATCH = 4; /* vectors of each matrix in flight a thread */

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

template <typename R> __device__ R minus_inf()
{
    return -(R)CUDART_INF;
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

/* Columns [from, end) group by group, as any config, dtype and alignment will have it. */
template <typename D, typename E>
__device__ void read_columns(sums<typename D::real> &a, const colo_distill_args &p,
                             const both_scalings<typename D::real> &by,
                             const typename D::elem *row, const typename E::elem *targets,
                             int64_t from, int64_t end)
{
    using R = typename D::real;
    constexpr int N = D::N;
    for (int64_t j = from + (int64_t)threadIdx.x * N; j < end; j += (int64_t)THREADS * N) {
        R z[N], w[N], v[N], top = a.mx, top_v = a.mv;
        fetch<D, E>(p, row, targets, j, z, w);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const bool there = j + e >= 0 && j + e < end;
            top = max_nan(top, there ? x_of(z[e], by.factor, by.cap) : minus_inf<R>());
            /* the logarithm of a negative one is NaN, as it must be */
            v[e] = !there    ? minus_inf<R>()
                   : p.probs ? log(w[e])
                             : x_of(w[e], by.target_factor, by.target_cap);
            top_v = max_nan(top_v, v[e]);
        }
        const bool reverse = p.divergence == COLO_DIVERGENCE_REVERSE_KL;
        if (top != a.mx || top_v != a.mv)
            raise(a, top, top_v, p.probs, reverse);
        const R bx = base_of(a.mx), bv = base_of(a.mv);
#pragma unroll
        for (int e = 0; e < N; e++) {
            if (j + e < 0 || j + e >= end)
                continue;
            const R dv = p.probs ? v[e] : below(w[e], by.target_factor, by.target_cap, bv);
            take(a, below(z[e], by.factor, by.cap, bx), dv, p.probs ? w[e] : exp_of(dv), reverse);
        }
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
        const both_scalings<R> by = both_scalings_of<R>(p, t);
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
                    absorb_vector<D>(a, vz[b], vw[b], by.factor, by.target_factor, reverse);
            }
            for (; k < vectors; k += THREADS)
                absorb_vector<D>(a, __ldcs(z + k), __ldcs(w + k), by.factor,
                                 by.target_factor, reverse);
            if (first < 0)
                read_columns<D, E>(a, p, by, row, targets, first, lo);
            read_columns<D, E>(a, p, by, row, targets, lo + vectors * N, end);
        } else {
            read_columns<D, E>(a, p, by, row, targets, first, end);
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
            const double w = exp(down_v);
            if (a.sv > 0 && w > 0) /* c may be infinite */
                c = w * ((double)a.c + down * (double)a.sv);
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

template <typename D, typename E>
cudaError_t stats(const colo_distill_args &p, cudaStream_t stream)
{
    constexpr bool can = std::is_same<D, E>::value && sizeof(typename D::real) == 4;
    const bool plain = can && !p.probs && p.base.cap == 0 && p.target_cap == 0 &&
                       (float)p.base.factor > 0 && (float)p.target_factor > 0 &&
                       std::isfinite((float)p.base.factor) && std::isfinite((float)p.target_factor);
    if (plain)
        stats_kernel<D, E, can><<<rows_of(p), THREADS, 0, stream>>>(p);
    else
        stats_kernel<D, E, false><<<rows_of(p), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

/* Without a token, too: there is a header. */
extern "C" cudaError_t colo_k_distill_stats(const colo_distill_args *p, cudaStream_t stream)
{
    return with_dtypes(*p, [&](auto d, auto e) { return stats<decltype(d), decltype(e)>(*p, stream); });
}

extern "C" cudaError_t colo_k_distill_merge(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    merge_kernel<<<rows_of(*p, 128), 128, 0, stream>>>(*p);
    return cudaGetLastError();
}
