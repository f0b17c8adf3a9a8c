/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-grad.cu - the gradient of a divergence and of a cross entropy by the logits: of host/distill.c
 * on a GPU. One read of both matrices, one write: blockIdx.x is a run of groups, blockIdx.y a row.
 */
#include "distill.cuh"

namespace
{

constexpr int VECTORS = 4; /* groups a thread */

template <typename R> struct row_numbers {
    bool nan, counts;
    pair_numbers<R> pair;
    both_scalings<R> by;
    R q_all, g, up, center, slope; /* from up on: of another divergence than forward KL */
};

/* colo_distill_slope() in R, of p > 0 */
template <typename R>
__device__ R other_slope(const colo_distill_args &p, const row_numbers<R> &k, R prob, R z, R w)
{
    const R t = (below(z, k.by.factor, k.by.cap, k.pair.m) -
                 below(w, k.by.target_factor, k.by.target_cap, k.pair.mv)) -
                k.pair.log_ratio;
    R u = t;
    if (p.divergence == COLO_DIVERGENCE_JSD) {
        const shares<R> share = shares_of(k.pair, t);
        const R off = share.small * expm1(-fabs(t));
        u = (t > 0 ? (R)0 : t) -
            (off > (R)-0.5 ? log1p(off) : log(share.large + share.small * exp_of(-fabs(t))));
    } else if (p.divergence != COLO_DIVERGENCE_REVERSE_KL) {
        u = (R)((t > 0) - (t < 0) - 1);
    }
    return k.slope * prob * (u - k.center);
}

/* N neighbours: x, made of logits, becomes the gradient. */
template <typename R, int N>
__device__ void gradient(const colo_distill_args &p, const row_numbers<R> &k, R *x, const R *w)
{
    const R factor = k.by.factor, cap = k.by.cap;
#pragma unroll
    for (int e = 0; e < N; e++) {
        R dz = k.nan ? (R)CUDART_NAN : (R)0;
        if (k.counts) {
            const R v = x_of(x[e], factor, cap),
                    q = p.probs ? w[e] : exp_of(x_of(w[e], k.by.target_factor, k.by.target_cap) - k.pair.mv -
                                                 k.pair.log_sum_v);
            const R prob = exp_of(v - k.pair.m - k.pair.log_sum);
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
                                  pair_of<R>(p, t),
                                  both_scalings_of<R>(p, t),
                                  (R)p.saved[4 * p.base.tokens + t],
                                  (R)(forward ? d_ce + d_kl : d_ce),
                                  (R)d_kl,
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

template <typename D, typename E>
cudaError_t grad(const colo_distill_args &p, cudaStream_t stream)
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

} // namespace

extern "C" cudaError_t colo_k_distill_grad(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0 || p->base.columns == 0)
        return cudaSuccess;
    return with_dtypes(*p, [&](auto d, auto e) { return grad<decltype(d), decltype(e)>(*p, stream); });
}
