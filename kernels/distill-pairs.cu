/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-pairs.cu - the second read of the divergences that need both normalisers, and what the sums
 * of all ranks become: colo_distill_pair() of host/distill.c on a GPU, a block of threads a row.
 */
#include "distill.cuh"

#include "loss/distill-merge.h"

namespace
{

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

/* colo_distill_pair() in R */
template <typename R>
__device__ void take_pair(const colo_distill_args &p, const both_scalings<R> &by,
                          const pair_numbers<R> &k, R z, R w, R *s)
{
    const R dx = below(z, by.factor, by.cap, k.m),
            dv = below(w, by.target_factor, by.target_cap, k.mv), t = (dx - dv) - k.log_ratio,
            lp = dx - k.log_sum, lq = dv - k.log_sum_v;
    if (t != t)
        return;
    const R base = exp_of(t > 0 ? lp : lq), down = expm1(-fabs(t));
    if (p.divergence == COLO_DIVERGENCE_JSD) {
        const shares<R> share = shares_of(k, t);
        const R off = share.small * down,
                m = off > (R)-0.5 ? 1 + off : share.large + share.small * exp_of(-fabs(t)),
                large = relative_entropy(-off / m), small = relative_entropy(share.large * down / m);
        s[0] += base * m * (share.large * large + share.small * small);
        s[1] += base * m * (t > 0 ? large : small);
        return;
    }
    const R least = exp_of(t > 0 ? lq : lp);
    s[0] -= base * down;
    s[1] += t > 0 ? base : t < 0 ? -least : (R)0;
    s[2] += least;
    s[3] += t > 0 ? (R)0 : t < 0 ? 2 * least : least;
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
        const both_scalings<R> by = both_scalings_of<R>(p, t);
        const int64_t end = p.saved[t] < CUDART_INF ? p.base.true_columns : 0;
        R s[COLO_DISTILL_SUMS] = {0, 0, 0, 0};
        for (int64_t j = first_vector<D>(row) + (int64_t)threadIdx.x * N; j < end;
             j += (int64_t)THREADS * N) {
            R x[N], w[N];
            fetch<D, E>(p, row, targets, j, x, w);
#pragma unroll
            for (int e = 0; e < N; e++)
                if (j + e >= 0 && j + e < end)
                    take_pair<R>(p, by, k, x[e], w[e], s);
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

} // namespace

extern "C" cudaError_t colo_k_distill_pairs(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    return with_dtypes(*p, [&](auto d, auto e) {
        pairs_kernel<decltype(d), decltype(e)><<<rows_of(*p), THREADS, 0, stream>>>(*p);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t colo_k_distill_finish(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0)
        return cudaSuccess;
    finish_kernel<<<rows_of(*p, 128), 128, 0, stream>>>(*p);
    return cudaGetLastError();
}
