/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.cuh - two matrices, logits and targets, read alike by the three passes of a divergence:
 * distill-stats.cu, distill-pairs.cu for those that need both normalisers, distill-grad.cu. A thread
 * takes groups of N neighbours, N being what 16 bytes of logits hold: logits in one access, targets
 * too where their row allows, else element by element.
 *
 * Row arithmetic is fp32 for f32, bf16 and f16 logits, fp64 for f64.
 */
#ifndef COLO_KERNELS_DISTILL_CUH
#define COLO_KERNELS_DISTILL_CUH

#include "logprob.cuh"

#include "kernels.h"
#include "loss/distill-merge.h"

#include <algorithm>
#include <type_traits>

namespace
{

constexpr int THREADS = 256;

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

__device__ double sum_of(double v, double *partial)
{
    return all_threads<THREADS>(v, partial, [](double a, double b) { return a + b; });
}

/* What makes x and v of a row, in R */
template <typename R> struct both_scalings {
    R factor, cap, target_factor, target_cap;
};
template <typename R>
__device__ both_scalings<R> both_scalings_of(const colo_distill_args &p, int64_t t)
{
    const colo_distill_scaling by = colo_distill_scaling_of(&p, t);
    return {(R)by.factor, (R)by.cap, (R)by.target_factor, (R)by.target_cap};
}

/* ---- both normalisers ---- */

/* What a row has of both normalisers. log(p/q) of a column is (x - m) - (v - mv) - log_ratio, in
 * which no product was rounded. */
template <typename R> struct pair_numbers {
    R m, log_sum, mv, log_sum_v, log_ratio, beta, rest; /* rest: 1 - beta */
};

template <typename R> __device__ pair_numbers<R> pair_of(const colo_distill_args &p, int64_t t)
{
    const double *saved = p.saved + t;
    return {(R)saved[0], (R)saved[p.saved_stride], (R)saved[2 * p.saved_stride],
            (R)saved[3 * p.saved_stride], (R)saved[5 * p.saved_stride], (R)p.beta, (R)(1 - p.beta)};
}

template <typename R> __device__ R below(R z, R factor, R cap, R top)
{
    return cap > 0 ? x_of(z, factor, cap) - top : fma(factor, z, -top);
}

/* colo_distill_shares() in R */
template <typename R> struct shares {
    R small, large;
};
template <typename R> __device__ shares<R> shares_of(const pair_numbers<R> &k, R t)
{
    return {t > 0 ? k.beta : k.rest, t > 0 ? k.rest : k.beta};
}

/* ---- launching ---- */

/* f of the types of logits and of targets */
template <typename F> cudaError_t with_dtypes(const colo_distill_args &p, F f)
{
    return with_dtype(p.base.dtype, [&](auto d) {
        return p.target_dtype == p.base.dtype ? f(d, d) : f(d, f32());
    });
}

/* Blocks of a kernel that has a block for a row, or takes turns */
inline unsigned rows_of(const colo_distill_args &p, int64_t each = 1)
{
    return (unsigned)std::min<int64_t>((std::max<int64_t>(p.base.tokens, 1) - 1) / each + 1, 1 << 30);
}

} // namespace

#endif
