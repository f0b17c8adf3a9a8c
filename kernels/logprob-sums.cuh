/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob-sums.cuh - a row's statistics: what a thread keeps while its vectors go by, and how the
 * threads of a block are combined. For kernels that give a row a block of THREADS threads:
 * logprob-stats.cu, which says why sums are made this way, and topk.cu.
 */
#ifndef COLO_KERNELS_LOGPROB_SUMS_CUH
#define COLO_KERNELS_LOGPROB_SUMS_CUH

#include "logprob.cuh"

namespace
{

constexpr int THREADS = 128; /* ten such blocks on a multiprocessor: short rows and few rows, too */
constexpr int BATCH = 4;     /* vectors in flight a thread */
constexpr int PARTS = 4;     /* independent sums a thread */

/* What is kept: s; and u; and d, argmax; and q; the same, d and what d has seen with class weights */
enum statistics { SUM = 0, ENTROPY = 1, ALL = 2, SQUARES = 3, WEIGHTED = 4 };

template <typename R, statistics KEEP> struct row_sums {
    R top;  /* largest z (plain) or x seen, -inf at first */
    R base; /* what the sums are taken against: x of top, 0 while that is -inf */
    R s[PARTS], u[PARTS], d[PARTS], q[KEEP >= SQUARES ? PARTS : 1];
    R w[KEEP == WEIGHTED ? PARTS : 1]; /* weights of what is in d */
    int64_t seen, arg;
};

template <typename R, statistics KEEP> __device__ void begin(row_sums<R, KEEP> &a)
{
    a.top = -CUDART_INF_F;
    a.base = 0;
#pragma unroll
    for (int k = 0; k < PARTS; k++)
        a.s[k] = a.u[k] = a.d[k] = a.q[KEEP >= SQUARES ? k : 0] = a.w[KEEP == WEIGHTED ? k : 0] = 0;
    a.seen = 0;
    a.arg = -1;
}

/* A larger maximum: the sums so far move to it. */
template <typename R, statistics KEEP> __device__ void raise(row_sums<R, KEEP> &a, R top, R factor)
{
    R base = factor * top;
    if (base == -CUDART_INF_F)
        base = 0;
    if (factor * a.top > -CUDART_INF_F) {
        const R down = a.base - base, c = exp_of(down);
#pragma unroll
        for (int k = 0; k < PARTS; k++) {
            if (KEEP >= ENTROPY)
                a.u[k] = c > 0 ? c * (a.u[k] + down * a.s[k]) : 0;
            a.s[k] *= c;
            if (KEEP >= SQUARES)
                a.q[k] *= c * c;
        }
        if (KEEP >= ALL && KEEP < WEIGHTED)
            a.d[0] += (R)a.seen * down;
        if (KEEP == WEIGHTED)
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                a.d[k] += a.w[k] * down;
    }
    a.top = top;
    a.base = base;
}

/* @w: the weight of z's column, if KEEP is WEIGHTED */
template <typename R, statistics KEEP>
__device__ void take(row_sums<R, KEEP> &a, R z, R factor, int k, R w = 1)
{
    const R d = fma(factor, z, -a.base), e = exp_of(d);
    a.s[k] += e;
    if (KEEP >= ENTROPY)
        a.u[k] = fma(e, fmax(d, (R)-1e4), a.u[k]); /* not 0 * -inf; e is 0 from -104 (f64: -746) */
    if (KEEP >= SQUARES)
        a.q[k] = fma(e, e, a.q[k]);
    if (KEEP >= ALL && KEEP < WEIGHTED)
        a.d[k] += d;
    if (KEEP == WEIGHTED) {
        a.d[k] += w != 0 ? w * d : 0; /* not 0 * -inf */
        a.w[k] += w;
    }
}

/* The first of z[0..n) that is a new maximum. */
template <typename R, statistics KEEP>
__device__ void find(row_sums<R, KEEP> &a, const R *z, int n, R top, int64_t offset, bool *found)
{
#pragma unroll
    for (int i = 0; i < n; i++)
        if (!*found && z[i] == top) {
            a.arg = offset + i;
            *found = true;
        }
}

/* B vectors inside the row, @stride elements apart. */
template <typename D, statistics KEEP, int B>
__device__ void absorb(row_sums<typename D::real, KEEP> &a, const uint4 *v, typename D::real factor,
                       int64_t offset, int64_t stride)
{
    using R = typename D::real;
    R top = D::top(v[0]);
#pragma unroll
    for (int b = 1; b < B; b++)
        top = max_nan(top, (R)D::top(v[b]));
    top = max_nan(top, a.top); /* NaN stays */
    if (top != a.top) {
        if (KEEP >= ALL) {
            bool found = false;
#pragma unroll
            for (int b = 0; b < B; b++) {
                R z[D::N];
                D::unpack(v[b], z);
                find(a, z, D::N, top, offset + b * stride, &found);
            }
        }
        raise(a, top, factor);
    }
#pragma unroll
    for (int b = 0; b < B; b++) {
        R z[D::N];
        D::unpack(v[b], z);
#pragma unroll
        for (int i = 0; i < D::N; i++)
            take(a, z[i], factor, i % PARTS);
    }
    a.seen += B * D::N;
}

/* Up to N values of x in registers. @weight: of the first one's column, if KEEP is WEIGHTED */
template <typename R, statistics KEEP, int N>
__device__ void absorb_x(row_sums<R, KEEP> &a, const R *x, int64_t offset, R factor,
                         const R *weight = nullptr)
{
    R top = x[0];
#pragma unroll
    for (int i = 1; i < N; i++)
        top = max_nan(top, x[i]);
    top = max_nan(top, a.top); /* NaN stays */
    if (top != a.top) {
        bool found = false;
        if (KEEP >= ALL)
            find(a, x, N, top, offset, &found);
        raise(a, top, factor);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        take(a, x[i], factor, i % PARTS, KEEP == WEIGHTED ? weight[i] : 1);
    a.seen += N;
}

/* ---- combining the threads ---- */

/* The WIDTH threads of a row are a block or a warp. */
template <int WIDTH> __device__ unsigned thread_of_row()
{
    return WIDTH == THREADS ? threadIdx.x : threadIdx.x % WIDTH;
}

template <int WIDTH> __device__ double sum_threads(double v, double *partial)
{
    return all_threads<WIDTH>(v, partial, [](double a, double b) { return a + b; });
}

/* ---- the row's numbers ---- */

struct shared_sums {
    double sums[THREADS / 32];
    int64_t args[THREADS / 32];
};

/* x of a logit in memory, as write_row() asks */
template <typename D, bool PLAIN> struct x_in {
    const scaling<typename D::real> &by;
    const typename D::elem *row;
    __device__ double operator()(int64_t j) const
    {
        const typename D::real z = D::load(row[j]);
        return PLAIN ? (double)by.factor * (double)z : (double)x_of(z, by.factor, by.cap);
    }
};

/* The columns whose statistics the threads of a row make: a rank's, or one of its segments. */
struct span {
    int64_t start, columns; /* of the vocabulary; of these, those in it */
    int32_t block;
};

__device__ span rank_span(const colo_logprob_args &p)
{
    return {p.config.logits.vocab_start, p.true_columns, p.rank};
}

/* Combines the threads' parts of row @t and writes them into the block of @here. @factor: what a's
 * maximum is multiplied by, 1 if it is x; @x_at(j): x of column j of here, not asked for where @target
 * is the one to ignore. All WIDTH threads. */
template <typename R, statistics KEEP, int WIDTH = THREADS, typename X>
__device__ void write_row(const row_sums<R, KEEP> &a, const colo_logprob_args &p, const span &here,
                          int64_t t, int64_t target, R factor, const X &x_at, shared_sums &shared)
{
    constexpr bool WIDE = sizeof(R) == 8;
    double *partial = shared.sums;
    unsigned char *block = p.blocks + here.block * p.block.bytes;
    const int64_t k = t - p.block_lo;
    const bool counts = target != p.config.ignore_index;
    const double top =
        all_threads<WIDTH>((double)a.top, partial, [](double x, double y) { return max_nan(x, y); });
    const R largest = (R)top, m = factor * largest; /* as raise() makes it: the bases are this or below */
    const bool any = m > -CUDART_INF_F;
    double s = 0, u = 0, d = 0, q = 0, w = KEEP == WEIGHTED ? 0 : (double)a.seen;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        s += a.s[i];
        u += a.u[i];
        d += a.d[i];
        q += KEEP >= SQUARES ? (double)a.q[KEEP >= SQUARES ? i : 0] : 0;
        w += KEEP == WEIGHTED ? (double)a.w[KEEP == WEIGHTED ? i : 0] : 0;
    }
    const bool mine = factor * a.top > -CUDART_INF_F;
    if (any && mine) {
        const double down = (double)a.base - (double)m, c = exp(down);
        u = c > 0 ? c * (u + down * s) : 0;
        s *= c;
        q *= c * c;
        d += w * down;
    }
    s = sum_threads<WIDTH>(s, partial);
    if (KEEP >= ENTROPY)
        u = sum_threads<WIDTH>(u, partial);
    if (KEEP >= SQUARES)
        q = sum_threads<WIDTH>(q, partial);
    int64_t arg = INT64_MAX;
    if (KEEP == WEIGHTED)
        w = sum_threads<WIDTH>(w, partial);
    if (KEEP >= ALL) {
        d = sum_threads<WIDTH>(d, partial);
        if ((double)a.top == top && a.arg >= 0)
            arg = a.arg;
        arg = all_threads<WIDTH>(arg, shared.args,
                                 [](int64_t x, int64_t y) { return x < y ? x : y; });
    }
    if (thread_of_row<WIDTH>() == 0) {
        const int64_t j = target - here.start;
        double x = -CUDART_INF, top_x = m;
        if (counts && any && (target < 0 || target >= p.config.logits.vocab)) {
            x = (double)factor * (double)largest; /* logprob-merge.h says why */
        } else if (counts && any && j >= 0 && j < here.columns) {
            x = x_at(j);
        }
        double xt = isinf((R)x) ? -CUDART_INF : x - (double)m;
        if (counts && !(m < CUDART_INF_F)) /* NaN or +inf: nothing can be said of this row */
            top_x = s = u = d = q = xt = CUDART_NAN;
        if (!counts)
            d = w = 0;
        colo_stat_put(block + p.block.m, WIDE, k, top_x);
        colo_stat_put(block + p.block.s, WIDE, k, s);
        colo_stat_put(block + p.block.xt, WIDE, k, xt);
        if (KEEP >= ENTROPY && p.block.u >= 0)
            colo_stat_put(block + p.block.u, WIDE, k, u);
        if (KEEP >= ALL && p.block.d >= 0)
            colo_stat_put(block + p.block.d, WIDE, k, d);
        if (KEEP >= ALL && p.block.arg >= 0)
            ((int64_t *)(block + p.block.arg))[k] =
                any && m < CUDART_INF_F ? here.start + arg : -1;
        if (KEEP >= SQUARES && p.block.q >= 0)
            colo_stat_put(block + p.block.q, WIDE, k, q);
        if (KEEP == WEIGHTED)
            colo_stat_put(block + p.block.w, WIDE, k, w);
        if (p.block.wt >= 0)
            colo_stat_put(block + p.block.wt, WIDE, k,
                          counts && target < p.config.logits.vocab && j >= 0 && j < here.columns
                              ? (double)((const R *)p.class_weight)[target - p.class_start]
                              : 0);
    }
}

} // namespace

#endif
