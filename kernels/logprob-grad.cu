/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob-grad.cu - backward of the loss: each element is read once and written once.
 *
 *   dx_j = p_j (A + B (x_j - M)) + C [j = t] + D w_j     dz = dx (1 - (x / cap)^2) factor
 *
 * A block of threads takes a run of a row's vectors; its loads are under way while the row's four
 * coefficients are made from the saved statistics, in fp64. Rows of ignored tokens are not read. p
 * is e^(x - M - log Sum) with log Sum subtracted in the exponent: small numbers only, whatever the
 * offset of the logits. C is added before rounding to the dtype, so p -> 1 at the target loses
 * nothing.
 *
 * In place is legal: a thread writes the vector that it has read, and no other thread touches it.
 * Where logits and gradient do not sit alike in their 16-byte words, vectors are the logits' and
 * are written element by element. Gradients may be of a narrower dtype than the logits, in memory
 * of their own.
 */
#include "logprob.cuh"

#include <algorithm>

namespace
{

constexpr int THREADS = 256, UNROLL = 4, BLOCKS = 5; /* a multiprocessor's blocks, at least */
constexpr int VECTORS = THREADS * UNROLL;            /* vectors a block */

/* p A only; p (A + B d) + D; and x is not factor z; and D has class weights, else w is 1 */
enum formula { PROB, FULL, GENERIC, WEIGHTED };

template <typename R> struct coefficients {
    R factor, cap, m, log_sum, a, b, c, d;
    int64_t target; /* column here, -1 when it is elsewhere */
};

enum row_kind { COMPUTE, ZERO, NOT_A_NUMBER };

template <typename R> struct lookup {
    coefficients<R> k;
    row_kind kind;
};

template <typename R>
__device__ void look_up(const colo_logprob_args &p, int64_t t, lookup<R> &found)
{
    const bool wide = sizeof(R) == 8;
    const int64_t target = p.targets[t * p.target_stride];
    const bool legal = target >= 0 && target < p.config.logits.vocab;
    const double m = p.saved[t], log_sum = p.saved[p.tokens + t], h = p.saved[2 * p.tokens + t],
                 g_p = p.upstream.d_logp ? colo_stat_get(p.upstream.d_logp, wide, t) : 0,
                 g_h = p.upstream.d_entropy ? colo_stat_get(p.upstream.d_entropy, wide, t) : 0,
                 g_l = p.upstream.d_loss ? colo_stat_get(p.upstream.d_loss, wide, t) : 0,
                 g_s = p.upstream.d_lse ? colo_stat_get(p.upstream.d_lse, wide, t) : 0;
    const bool weighs = p.config.has_class_weight;
    const double e = p.smoothing, w_t = weighs ? p.saved[3 * p.tokens + t] : 1,
                 z = 2 * p.config.z_loss * (m + log_sum),
                 p_l = weighs ? w_t * (1 - e + z) + e * p.saved[4 * p.tokens + t] : 1 + z;
    const double coldness = colo_logprob_saved_coldness(&p, t), factor = p.factor * coldness;
    coefficients<R> k;
    k.factor = (R)factor;
    k.cap = (R)(p.cap * coldness);
    k.m = (R)m;
    k.log_sum = (R)log_sum;
    k.a = (R)(factor * (-g_p + g_l * p_l + g_h * (log_sum - h) + g_s));
    k.b = (R)(factor * -g_h);
    k.c = (R)(factor * (g_p - w_t * (1 - e) * g_l));
    k.d = (R)(factor * (-e * g_l / (double)(p.own ? p.own : p.config.logits.vocab)));
    k.target = legal ? target - p.config.logits.vocab_start : -1;
    found.k = k;
    found.kind = target == p.config.ignore_index ? ZERO
                 : isnan(m) || (!legal && !p.config.lenient_targets &&
                                (p.upstream.d_logp || p.upstream.d_loss))
                     ? NOT_A_NUMBER
                     : COMPUTE;
}

/* What multiplies D in column @j: 1 but for WEIGHTED. */
template <formula FORMULA, typename R> __device__ R weight_of(const colo_logprob_args &p, int64_t j)
{
    return FORMULA == WEIGHTED
               ? ((const R *)p.class_weight)[p.config.logits.vocab_start - p.class_start + j]
               : (R)1;
}

template <formula FORMULA, typename R>
__device__ R gradient(R z, bool hit, const coefficients<R> &k, R w = 1)
{
    R x = 0, d, dx;
    const R rest = FORMULA == WEIGHTED ? product(k.d, w) : k.d;
    if (FORMULA >= GENERIC) {
        x = x_of(z, k.factor, k.cap);
        d = x - k.m;
    } else {
        d = fma(k.factor, z, -k.m);
    }
    const R prob = exp_of(d - k.log_sum);
    if (FORMULA == PROB) /* spelled out: the same bits wherever this is inlined */
        dx = hit ? fma(prob, k.a, k.c) : product(prob, k.a);
    else /* x = -inf: 0, not 0 * inf */
        dx = fma(prob, fma(k.b, fmax(d, (R)-1e4), k.a), hit ? rest + k.c : rest);
    if (FORMULA >= GENERIC && k.cap > 0) {
        const R th = x / k.cap;
        dx = product(dx, fma(-th, th, (R)1));
    }
    return dx;
}

template <typename D, typename O, formula FORMULA>
__device__ void one_element(const colo_logprob_args &p, const typename D::elem *row,
                            typename O::elem *out, int64_t j, row_kind kind,
                            const coefficients<typename D::real> &k)
{
    using R = typename D::real;
    if (j < 0 || j >= p.columns)
        return;
    if (j >= p.true_columns || kind == ZERO)
        out[j] = O::store(0);
    else if (kind == NOT_A_NUMBER)
        out[j] = O::store((R)CUDART_NAN);
    else
        out[j] = O::store(gradient<FORMULA, R>(D::load(row[j]), j == k.target, k,
                                               weight_of<FORMULA, R>(p, j)));
}

/* The vectors of a run that lies inside the row: loads first, then the row's coefficients. */
template <typename D, typename O, formula FORMULA>
__device__ void inner_run(const colo_logprob_args &p, const typename D::elem *row,
                           typename O::elem *out, int64_t j, const lookup<typename D::real> &found,
                           bool read)
{
    using R = typename D::real;
    constexpr int N = D::N;
    uint4 v[UNROLL];
    row += j + threadIdx.x * N;
    out += j + threadIdx.x * N;
    if (read)
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            v[i] = __ldcs((const uint4 *)row + i * THREADS);
    __syncthreads();
    const coefficients<R> k = found.k;
    const row_kind kind = found.kind;
    const int64_t hit = k.target - j; /* in this run? */
    const bool near = hit >= 0 && hit < VECTORS * N;
    const auto at = [&](int i) { return j + (i * THREADS + (int)threadIdx.x) * N; };
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        R z[N];
        if (kind == COMPUTE) {
            D::unpack(v[i], z);
            const int index = near ? (int)hit - (i * THREADS + (int)threadIdx.x) * N : -1;
            if ((unsigned)index < N) {
#pragma unroll
                for (int e = 0; e < N; e++)
                    z[e] = gradient<FORMULA, R>(z[e], e == index, k,
                                                weight_of<FORMULA, R>(p, at(i) + e));
            } else {
#pragma unroll
                for (int e = 0; e < N; e++)
                    z[e] = gradient<FORMULA, R>(z[e], false, k,
                                                weight_of<FORMULA, R>(p, at(i) + e));
            }
        } else {
#pragma unroll
            for (int e = 0; e < N; e++)
                z[e] = kind == ZERO ? (R)0 : (R)CUDART_NAN;
        }
        store_vector<D, O>(out + i * THREADS * N, z);
    }
}

/* Any other run, vector by vector. */
template <typename D, typename O, formula FORMULA>
__device__ void ragged_run(const colo_logprob_args &p, const typename D::elem *row,
                            typename O::elem *out, int64_t from, bool alike,
                            const lookup<typename D::real> &found)
{
    using R = typename D::real;
    constexpr int N = D::N;
    __syncthreads();
    const coefficients<R> k = found.k;
    const row_kind kind = found.kind;
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
        const int64_t j = from + (int64_t)i * N;
        if (j >= p.columns)
            return;
        if (!alike || j < 0 || j + N > p.true_columns) {
            for (int e = 0; e < N; e++)
                one_element<D, O, FORMULA>(p, row, out, j + e, kind, k);
            continue;
        }
        R z[N];
        if (kind == COMPUTE)
            D::unpack(load_vector(row, j, sizeof(typename D::elem)), z);
#pragma unroll
        for (int e = 0; e < N; e++)
            z[e] = kind == COMPUTE ? gradient<FORMULA, R>(z[e], j + e == k.target, k,
                                                          weight_of<FORMULA, R>(p, j + e))
                   : kind == ZERO  ? (R)0
                                   : (R)CUDART_NAN;
        store_vector<D, O>(out + j, z);
    }
}

/* blockIdx.x is the run, blockIdx.y a row. */
template <typename D, typename O, formula FORMULA>
__global__ void __launch_bounds__(THREADS, FORMULA >= GENERIC ? 3 : BLOCKS)
    grad_kernel(const __grid_constant__ colo_logprob_args p)
{
    using E = typename D::elem;
    constexpr int N = D::N;
    __shared__ lookup<typename D::real> found;
    for (int64_t t = p.lo + blockIdx.y; t < p.hi; t += gridDim.y) {
        const E *row = (const E *)p.logits + (t - p.row_lo) * p.row_stride;
        typename O::elem *out = (typename O::elem *)p.d_logits + (t - p.row_lo) * p.d_row_stride;
        const int64_t first = first_vector<D>(row), j = first + (int64_t)blockIdx.x * (VECTORS * N);
        const bool alike = (((uintptr_t)(out + first)) & (N * sizeof(typename O::elem) - 1)) == 0;
        const bool read = p.targets[t * p.target_stride] != p.config.ignore_index;
        if (threadIdx.x == 0)
            look_up(p, t, found);
        if (alike && j >= 0 && j + VECTORS * N <= p.true_columns)
            inner_run<D, O, FORMULA>(p, row, out, j, found, read);
        else
            ragged_run<D, O, FORMULA>(p, row, out, j, alike, found);
        __syncthreads(); /* found is the next row's then */
    }
}

template <typename D, typename O, formula FORMULA>
cudaError_t grad(const colo_logprob_args &p, cudaStream_t stream)
{
    const int64_t vectors = (p.columns + 2 * (D::N - 1)) / D::N,
                  parts = (vectors - 1) / VECTORS + 1;
    const dim3 grid((unsigned)parts, (unsigned)std::min<int64_t>(p.hi - p.lo, 65535));
    if (parts > INT32_MAX)
        return cudaErrorInvalidValue;
    grad_kernel<D, O, FORMULA><<<grid, THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename D, typename O = D>
cudaError_t grad_of(const colo_logprob_args &p, cudaStream_t stream)
{
    if (p.config.has_class_weight && p.smoothing > 0)
        return grad<D, O, WEIGHTED>(p, stream);
    if (!is_plain(p))
        return grad<D, O, GENERIC>(p, stream);
    return p.upstream.d_entropy || p.smoothing > 0 ? grad<D, O, FULL>(p, stream)
                                                   : grad<D, O, PROB>(p, stream);
}

/* ---- a support ---- */

/* One block per row. It makes the row tile by tile in shared memory, zeros first and then the listed
 * columns, and writes each tile in whole stores of 16 bytes, so in place is legal here, too. A tile
 * begins where the row's memory does in its 16-byte words. */
template <typename D, typename O>
__global__ void __launch_bounds__(THREADS)
    list_grad_kernel(const __grid_constant__ colo_logprob_args p)
{
    using R = typename D::real;
    using E = typename O::elem;
    constexpr int PER_STORE = 16 / sizeof(E), TILE = 8 * PER_STORE * THREADS; /* elements: of a store, a tile */
    __shared__ lookup<R> found;
    __shared__ alignas(16) E tile[TILE];
    const colo_support_lists &s = p.support;
    for (int64_t t = p.lo + blockIdx.x; t < p.hi; t += gridDim.x) {
        const typename D::elem *row =
            (const typename D::elem *)p.logits + (t - p.row_lo) * p.row_stride;
        E *out = (E *)p.d_logits + (t - p.row_lo) * p.d_row_stride;
        if (threadIdx.x == 0)
            look_up(p, t, found);
        __syncthreads();
        const coefficients<R> k = found.k;
        const bool compute = found.kind == COMPUTE; /* else the list is not looked at */
        const E rest = O::store(found.kind == NOT_A_NUMBER ? (R)CUDART_NAN : (R)0);
        const int64_t token = compute ? colo_logprob_token_of(&p, t) : t,
                      end = compute ? s.end[token * s.end_stride] : 0;
        const int64_t ahead = (int64_t)((uintptr_t)out / sizeof(E) % PER_STORE);
        int64_t i = compute ? s.begin[token * s.begin_stride] + threadIdx.x : 0, next = 0;
        if (i < end)
            next = s.ids[i] - p.config.logits.vocab_start;
        for (int64_t from = -ahead; from < p.columns; from += TILE) {
            for (int n = threadIdx.x; n < TILE; n += THREADS)
                tile[n] = from + n < p.true_columns ? rest : O::store(0);
            __syncthreads();
            /* the same value if j comes again */
            const auto make = [&](int64_t j) {
                if (j >= 0 && j >= from && j < p.true_columns)
                    tile[j - from] =
                        O::store(gradient<GENERIC, R>(D::load(row[j]), j == k.target, k));
            };
            while (i < end && next < from + TILE) {
                make(next);
                i += THREADS;
                if (i < end)
                    next = s.ids[i] - p.config.logits.vocab_start;
            }
            if (compute && threadIdx.x == 0 && k.target < from + TILE)
                make(k.target);
            __syncthreads();
            for (int n = PER_STORE * threadIdx.x; n < TILE; n += PER_STORE * THREADS) {
                const int64_t j = from + n;
                if (j >= 0 && j + PER_STORE <= p.columns)
                    __stcs((uint4 *)(out + j), *(const uint4 *)(tile + n));
                else
                    for (int e = 0; e < PER_STORE; e++)
                        if (j + e >= 0 && j + e < p.columns)
                            out[j + e] = tile[n + e];
            }
            __syncthreads();
        }
    }
}

template <typename D, typename O = D>
cudaError_t list_grad(const colo_logprob_args &p, cudaStream_t stream)
{
    list_grad_kernel<D, O>
        <<<(unsigned)std::min<int64_t>(p.hi - p.lo, 1 << 30), THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_logprob_grad(const colo_logprob_args *p, cudaStream_t stream)
{
    if (p->hi <= p->lo || p->columns == 0)
        return cudaSuccess;
    const bool list = p->support.begin;
    if (p->dtype == COLO_F32 && p->d_dtype == COLO_BF16)
        return list ? list_grad<f32, bf16>(*p, stream) : grad_of<f32, bf16>(*p, stream);
    if (p->dtype == COLO_F32 && p->d_dtype == COLO_F16)
        return list ? list_grad<f32, f16>(*p, stream) : grad_of<f32, f16>(*p, stream);
    if (p->dtype != p->d_dtype)
        return cudaErrorInvalidValue;
    if (list)
        return with_dtype(p->dtype, [&](auto d) { return list_grad<decltype(d)>(*p, stream); });
    switch (p->dtype) {
    case COLO_F32:
        return grad_of<f32>(*p, stream);
    case COLO_F64:
        return p->config.has_class_weight && p->smoothing > 0
                   ? grad<f64, f64, WEIGHTED>(*p, stream)
                   : grad<f64, f64, GENERIC>(*p, stream);
    case COLO_BF16:
        return grad_of<bf16>(*p, stream);
    case COLO_F16:
        return grad_of<f16>(*p, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
