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
        const R dx = below(x[e], factor, cap, k.pair.m),
                dv = below(w[e], k.by.target_factor, k.by.target_cap, k.pair.mv),
                q = p.probs ? w[e] : exp_of(dv - k.pair.log_sum_v),
                prob = exp_of(dx - k.pair.log_sum);
        R dz = k.g * (k.q_all * prob - q);
        if (p.divergence != COLO_DIVERGENCE_FORWARD_KL && k.up != 0 && prob > 0)
            dz += k.up * other_slope<R>(p, k, prob, x[e], w[e]);
        dz *= factor;
        if (cap > 0) {
            const R part = x_of(x[e], factor, cap) / cap;
            dz *= 1 - part * part;
        }
        x[e] = dz;
    }
}

/* The same of a KL alone, from logits without softcaps, in a third of the instructions: what bounds
 * 16-bit logits is not memory else. */
enum formula { ANY, FORWARD, REVERSE };

template <formula F, typename R, int N>
__device__ void plain_gradient(const row_numbers<R> &k, R *x, const R *w)
{
    const R factor = k.by.factor, target_factor = k.by.target_factor,
            by = (F == FORWARD ? k.g : k.up) * factor;
#pragma unroll
    for (int e = 0; e < N; e++) {
        const R dx = fma(factor, x[e], -k.pair.m), dv = fma(target_factor, w[e], -k.pair.mv),
                prob = exp_of(dx - k.pair.log_sum);
        if (F == FORWARD)
            x[e] = by * (prob - exp_of(dv - k.pair.log_sum_v));
        else
            x[e] = by != 0 && prob > 0 ? by * prob * ((dx - dv) - k.pair.log_ratio - k.center)
                                       : (R)0;
    }
}

template <formula F, typename R, int N>
__device__ void any_gradient(const colo_distill_args &p, const row_numbers<R> &k, R *x, const R *w)
{
    if (!k.counts) {
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = k.nan ? (R)CUDART_NAN : (R)0;
    } else if constexpr (F == ANY) {
        gradient<R, N>(p, k, x, w);
    } else {
        plain_gradient<F, R, N>(k, x, w);
    }
}

template <typename R> __device__ row_numbers<R> numbers_of(const colo_distill_args &p, int64_t t)
{
    constexpr bool WIDE = sizeof(R) == 8;
    const double md = p.saved[t],
                 d_ce = p.upstream.d_ce ? colo_stat_get(p.upstream.d_ce, WIDE, t) : 0,
                 d_kl = p.upstream.d_kl ? colo_stat_get(p.upstream.d_kl, WIDE, t) : 0;
    const bool nan = isnan(md), forward = p.divergence == COLO_DIVERGENCE_FORWARD_KL;
    return {nan,
            !nan && md < CUDART_INF,
            pair_of<R>(p, t),
            both_scalings_of<R>(p, t),
            (R)p.saved[4 * p.saved_stride + t],
            (R)(forward ? d_ce + d_kl : d_ce),
            (R)d_kl,
            (R)p.saved[6 * p.saved_stride + t],
            (R)p.saved[7 * p.saved_stride + t]};
}

/* A run inside the row whose three matrices sit alike in their vectors is read at once, before the row's
 * numbers are there. */
template <typename D, typename E, typename O, formula F>
__global__ void __launch_bounds__(THREADS) grad_kernel(const __grid_constant__ colo_distill_args p)
{
    using R = typename D::real;
    using Z = typename D::elem;
    constexpr int N = D::N;
    constexpr int64_t COLUMNS = (int64_t)VECTORS * THREADS * N;
    constexpr uintptr_t BYTES = N * sizeof(typename O::elem); /* of a vector's gradients */
    for (int64_t t = blockIdx.y; t < p.base.tokens; t += gridDim.y) {
        const Z *row = (const Z *)p.base.logits + t * p.base.row_stride;
        const typename E::elem *targets =
            (const typename E::elem *)p.targets + t * p.target_row_stride;
        typename O::elem *out = (typename O::elem *)p.base.d_logits + t * p.base.d_row_stride;
        const int64_t first = first_vector<D>(row), from = first + blockIdx.x * COLUMNS;
        if constexpr (std::is_same<D, E>::value) {
            if (from >= 0 && from + COLUMNS <= p.base.true_columns &&
                (uintptr_t)(targets + from) % 16 == 0 && (uintptr_t)(out + from) % BYTES == 0) {
                uint4 z[VECTORS], v[VECTORS];
#pragma unroll
                for (int b = 0; b < VECTORS; b++) {
                    z[b] = __ldcs((const uint4 *)(row + from) + b * THREADS + threadIdx.x);
                    v[b] = __ldcs((const uint4 *)(targets + from) + b * THREADS + threadIdx.x);
                }
                const row_numbers<R> k = numbers_of<R>(p, t);
#pragma unroll
                for (int b = 0; b < VECTORS; b++) {
                    R x[N], w[N];
                    D::unpack(z[b], x);
                    D::unpack(v[b], w);
                    any_gradient<F, R, N>(p, k, x, w);
                    store_vector<D, O>(out + from + (b * THREADS + threadIdx.x) * N, x);
                }
                continue;
            }
        }
        const row_numbers<R> k = numbers_of<R>(p, t);
        for (int b = 0; b < VECTORS; b++) {
            const int64_t j = from + ((int64_t)b * THREADS + threadIdx.x) * N;
            if (j >= p.base.columns)
                break;
            R x[N], w[N];
            if (k.counts)
                fetch<D, E>(p, row, targets, j, x, w);
            any_gradient<F, R, N>(p, k, x, w);
#pragma unroll
            for (int e = 0; e < N; e++)
                x[e] = j + e < p.base.true_columns ? x[e] : (R)0;
            if (j >= 0 && j + N <= p.base.columns && (uintptr_t)(out + j) % BYTES == 0) {
                store_vector<D, O>(out + j, x);
            } else {
#pragma unroll
                for (int e = 0; e < N; e++)
                    if (j + e >= 0 && j + e < p.base.columns)
                        out[j + e] = O::store(x[e]);
            }
        }
    }
}

template <typename D, typename E, typename O, formula F>
cudaError_t grad_by(const colo_distill_args &p, cudaStream_t stream)
{
    const int64_t groups = (p.base.columns + 2 * (D::N - 1)) / D::N,
                  parts = (groups - 1) / (THREADS * VECTORS) + 1;
    if (parts > INT32_MAX)
        return cudaErrorInvalidValue;
    grad_kernel<D, E, O, F>
        <<<dim3((unsigned)parts, (unsigned)std::min<int64_t>(p.base.tokens, 65535)), THREADS, 0,
           stream>>>(p);
    return cudaGetLastError();
}

template <typename D, typename E, typename O>
cudaError_t grad_to(const colo_distill_args &p, cudaStream_t stream)
{
    if constexpr (std::is_same<D, E>::value && sizeof(typename D::real) == 4) {
        const bool plain = !p.probs && p.base.cap == 0 && p.target_cap == 0;
        if (plain && p.divergence == COLO_DIVERGENCE_FORWARD_KL)
            return grad_by<D, E, O, FORWARD>(p, stream);
        if (plain && p.divergence == COLO_DIVERGENCE_REVERSE_KL && !p.upstream.d_ce)
            return grad_by<D, E, O, REVERSE>(p, stream);
    }
    return grad_by<D, E, O, ANY>(p, stream);
}

template <typename D, typename E>
cudaError_t grad(const colo_distill_args &p, cudaStream_t stream)
{
    if constexpr (std::is_same<D, f32>::value) {
        if (p.base.d_dtype == COLO_BF16)
            return grad_to<D, E, bf16>(p, stream);
        if (p.base.d_dtype == COLO_F16)
            return grad_to<D, E, f16>(p, stream);
    }
    return p.base.d_dtype == p.base.dtype ? grad_to<D, E, D>(p, stream) : cudaErrorInvalidValue;
}

} // namespace

extern "C" cudaError_t colo_k_distill_grad(const colo_distill_args *p, cudaStream_t stream)
{
    if (p->base.tokens == 0 || p->base.columns == 0)
        return cudaSuccess;
    return with_dtypes(*p, [&](auto d, auto e) { return grad<decltype(d), decltype(e)>(*p, stream); });
}
