/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling.cu - the kernels of src/loss/sampling-args.h: a block of threads per row, which reads it
 * in 16-byte words (logprob.cuh).
 *
 * sums: of the 256 sums of a row there are COPIES in shared memory, so that threads of a warp,
 * whose logits mostly have few different digits, seldom add to the same one. A sum is two words of
 * 32 bits with a carry, because additions of 64 bits in shared memory are loops. The last digit
 * makes a key, and all logits of a key have one mass: there ids are counted, and 256 masses are
 * made.
 *
 * keep: equal logits are kept from the left, so before a thread writes its word it learns from a
 * scan how many of them are in the words before.
 */
#include "logprob.cuh"

#include "kernels.h"
#include "loss/sampling-args.h"

#include <algorithm>

namespace
{

constexpr int THREADS = COLO_SAMPLING_DIGITS, COPIES = 16;
constexpr int AHEAD = 16; /* logits of a thread that are under way */

/* ---- keys: unsigned, in the order of the logits; of -0 as of 0 ---- */

__device__ unsigned key_of(uint16_t e)
{
    const unsigned b = e == 0x8000 ? 0 : e;
    return b & 0x8000 ? b ^ 0xffff : b | 0x8000;
}
__device__ unsigned key_of(float e)
{
    const unsigned b = __float_as_uint(e + 0);
    return b >> 31 ? ~b : b | 1u << 31;
}
__device__ unsigned long long key_of(double e)
{
    const unsigned long long b = (unsigned long long)__double_as_longlong(e + 0);
    return b >> 63 ? ~b : b | 1ull << 63;
}
template <typename D> using key = decltype(key_of(typename D::elem()));

template <typename D> __device__ double logit_of(key<D> k)
{
    typename D::elem e;
    constexpr key<D> SIGN = (key<D>)1 << (8 * sizeof e - 1);
    k = k & SIGN ? k ^ SIGN : ~k;
    memcpy(&e, &k, sizeof e); /* the low bytes */
    return D::load(e);
}

template <typename D> __device__ typename D::elem minus_infinity()
{
    return D::store(-(typename D::real)CUDART_INF);
}

/* ---- rows ---- */

template <typename D> struct alignas(16) word {
    typename D::elem e[D::N];
};

template <typename D>
__device__ const typename D::elem *row_of(const colo_sampling_args &p, int64_t t)
{
    return (const typename D::elem *)p.base.logits + t * p.base.row_stride;
}

/* Elements j .. j + N of a row at a word's boundary; -inf outside of it. */
template <typename D>
__device__ word<D> read(const typename D::elem *row, int64_t j, int64_t columns)
{
    word<D> w;
    if (j >= 0 && j + D::N <= columns) {
        *(uint4 *)&w = *(const uint4 *)(row + j);
        return w;
    }
#pragma unroll
    for (int i = 0; i < D::N; i++)
        w.e[i] = j + i >= 0 && j + i < columns ? row[j + i] : minus_infinity<D>();
    return w;
}

__device__ unsigned char *block_of(const colo_sampling_args &p, int32_t r)
{
    return p.base.blocks + r * p.base.block.bytes;
}

/* M of a token; not finite: the row is copied. */
__device__ double largest(const colo_sampling_args &p, int64_t t)
{
    double m = -CUDART_INF;
    for (int32_t r = 0; r < p.base.ranks; r++)
        m = max_nan(((const double *)(block_of(p, r) + p.base.block.m))[t], m);
    return product(p.base.factor, m);
}

__device__ int64_t mass(const colo_sampling_args &p, double z, double m)
{
    const double units = exp(product(p.base.factor, z) - m) * p.units;
    return units > 0 ? (int64_t)units : 0;
}

/* ---- the largest ---- */

template <typename D>
__global__ void __launch_bounds__(THREADS) largest_kernel(const colo_sampling_args p)
{
    using R = typename D::real;
    __shared__ R part[THREADS / 32];
    const int64_t t = blockIdx.x, columns = p.base.true_columns;
    const typename D::elem *row = row_of<D>(p, t);
    unsigned char *block = block_of(p, p.base.rank);
    R m = -(R)CUDART_INF;
    if (t == 0 && threadIdx.x == 0)
        *(colo_logprob_header_t *)block = p.base.header;
    if (t >= p.base.tokens) /* there are none: the header alone */
        return;
    for (int64_t j = first_vector<D>(row) + (int64_t)threadIdx.x * D::N; j < columns;
         j += (int64_t)THREADS * D::N) {
        const word<D> w = read<D>(row, j, columns);
        m = max_nan(m, D::top(*(const uint4 *)&w));
    }
    for (int off = 16; off > 0; off /= 2)
        m = max_nan(m, __shfl_xor_sync(0xffffffffu, m, off));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = m;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int i = 0; i < THREADS / 32; i++)
        m = max_nan(m, part[i]);
    ((double *)(block + p.base.block.m))[t] = m;
}

/* ---- sums ---- */

struct copies {
    unsigned low[COLO_SAMPLING_DIGITS * COPIES], high[COLO_SAMPLING_DIGITS * COPIES];
};

__device__ void add(copies &c, unsigned digit, uint64_t weight)
{
    const unsigned i = digit * COPIES + threadIdx.x % COPIES, low = (unsigned)weight;
    unsigned high = (unsigned)(weight >> 32);
    if (atomicAdd(&c.low[i], low) > ~low)
        high++;
    if (high)
        atomicAdd(&c.high[i], high);
}

template <typename D>
__global__ void __launch_bounds__(THREADS) sums_kernel(const colo_sampling_args p)
{
    __shared__ copies c;
    const int64_t t = blockIdx.x, columns = p.base.true_columns;
    const typename D::elem *row = row_of<D>(p, t);
    const int shift = 8 * (p.digits - 1 - p.digit);
    const bool first = p.digit == 0, counts = !p.weigh || shift == 0;
    const key<D> none = key_of(minus_infinity<D>()), prefix = first ? 0 : (key<D>)p.prefix[t];
    const double m = largest(p, t);
    for (int i = threadIdx.x; i < COLO_SAMPLING_DIGITS * COPIES; i += THREADS)
        c.low[i] = c.high[i] = 0;
    __syncthreads();
    constexpr int BATCH = AHEAD / D::N;
    constexpr int64_t APART = (int64_t)THREADS * D::N;
    for (int64_t j = first_vector<D>(row) + (int64_t)threadIdx.x * D::N; isfinite(m) && j < columns;
         j += BATCH * APART) {
        word<D> w[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            w[b] = read<D>(row, j + b * APART, columns);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int i = 0; i < D::N; i++) {
                const key<D> k = key_of(w[b].e[i]);
                if (k > none && (first || k >> shift >> 8 == prefix))
                    add(c, (unsigned)(k >> shift) & 255,
                        counts ? 1 : (uint64_t)mass(p, D::load(w[b].e[i]), m));
            }
    }
    __syncthreads();
    int64_t sum = 0;
    for (int i = 0; i < COPIES; i++) { /* each thread begins with another bank */
        const int copy = threadIdx.x * COPIES + (i + threadIdx.x / 2) % COPIES;
        sum += (int64_t)((uint64_t)c.high[copy] << 32 | c.low[copy]);
    }
    if (p.weigh && shift == 0 && sum > 0)
        sum *= mass(p, logit_of<D>(prefix << 8 | threadIdx.x), m);
    p.sums[(p.base.rank * p.base.tokens + t) * COLO_SAMPLING_DIGITS + threadIdx.x] = sum;
}

/* ---- find ---- */

__global__ void __launch_bounds__(THREADS) find_kernel(const colo_sampling_args p)
{
    __shared__ int64_t reach[THREADS + 1]; /* of a digit and those above */
    const int64_t t = blockIdx.x, rows = p.base.tokens * COLO_SAMPLING_DIGITS;
    const int64_t *sums = p.sums + t * COLO_SAMPLING_DIGITS;
    const int d = threadIdx.x;
    int64_t each = 0;
    for (int32_t r = 0; r < p.base.ranks; r++)
        each += sums[r * rows + d];
    reach[d] = each;
    if (d == 0)
        reach[THREADS] = 0;
    __syncthreads();
    for (int off = 1; off < THREADS; off *= 2) {
        const int64_t more = d + off < THREADS ? reach[d + off] : 0;
        __syncthreads();
        reach[d] += more;
        __syncthreads();
    }
    const int64_t total = reach[0], above = p.digit ? p.above[t] : 0;
    int64_t wanted = p.digit ? p.wanted[t] : p.top_k;
    const uint64_t prefix = p.digit ? p.prefix[t] : 0;
    if (p.digit == 0 && p.weigh)
        wanted = (int64_t)ceil((double)total * p.top_p);
    if (p.digit == 0)
        wanted = max((int64_t)1, min(wanted, total));
    __syncthreads(); /* all have read what one writes */
    if (above + reach[d] < wanted || above + reach[d + 1] >= wanted)
        return;
    const int64_t before = above + reach[d + 1];
    p.prefix[t] = prefix << 8 | (unsigned)d;
    p.above[t] = before;
    if (p.digit == p.digits - 1) {
        wanted -= before;
        for (int32_t r = 0; r < p.base.ranks; r++) /* equal logits of lower ids come first */
            if (((const colo_logprob_header_t *)block_of(p, r))->start <
                p.base.config.logits.vocab_start)
                wanted -= sums[r * rows + d];
    }
    p.wanted[t] = wanted;
}

/* ---- keep ---- */

template <typename D>
__global__ void __launch_bounds__(THREADS) keep_kernel(const colo_sampling_args p)
{
    using elem = typename D::elem;
    __shared__ int part[2][THREADS / 32]; /* of a warp; two sets, so that one barrier is enough */
    const int64_t t = blockIdx.x, columns = p.base.true_columns;
    const elem *row = row_of<D>(p, t);
    elem *out = (elem *)p.out + t * p.out_stride;
    const double m = largest(p, t);
    const bool keeps_all = !isfinite(m);
    const key<D> last = keeps_all ? 0 : (key<D>)p.prefix[t];
    const int64_t each = keeps_all || !p.weigh ? 1 : max((int64_t)1, mass(p, logit_of<D>(last), m)),
                  wanted = keeps_all ? columns : p.wanted[t],
                  quota = wanted > 0 ? (wanted - 1) / each + 1 : 0; /* equal ones, of this rank */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t seen = 0;
    int parity = 0;
    for (int64_t tile = first_vector<D>(row); tile < p.base.columns;
         tile += (int64_t)THREADS * D::N, parity ^= 1) {
        const int64_t j = tile + (int64_t)threadIdx.x * D::N;
        word<D> w = read<D>(row, j, columns);
        int mine = 0;
#pragma unroll
        for (int i = 0; i < D::N; i++)
            mine += key_of(w.e[i]) == last;
        int upto = mine;
        for (int off = 1; off < 32; off *= 2) {
            const int less = __shfl_up_sync(0xffffffffu, upto, off);
            upto += lane >= off ? less : 0;
        }
        if (lane == 31)
            part[parity][warp] = upto;
        __syncthreads();
        int64_t before = seen + upto - mine;
        for (int i = 0; i < THREADS / 32; i++) {
            before += i < warp ? part[parity][i] : 0;
            seen += part[parity][i];
        }
#pragma unroll
        for (int i = 0; i < D::N; i++) {
            const key<D> k = key_of(w.e[i]);
            const bool equal = k == last;
            if (!keeps_all && !(k > last || (equal && before < quota)))
                w.e[i] = minus_infinity<D>();
            before += equal;
        }
        if (j >= 0 && j + D::N <= p.base.columns && (uintptr_t)(out + j) % 16 == 0) {
            *(uint4 *)(out + j) = *(const uint4 *)&w;
        } else {
#pragma unroll
            for (int i = 0; i < D::N; i++)
                if (j + i >= 0 && j + i < p.base.columns)
                    out[j + i] = w.e[i];
        }
    }
}

/* A block a token, @least of them. */
template <typename F> cudaError_t launch(const colo_sampling_args *p, int64_t least, const F &f)
{
    const int64_t rows = std::max(p->base.tokens, least);
    if (rows == 0)
        return cudaSuccess;
    if (rows > INT32_MAX)
        return cudaErrorInvalidValue;
    return with_dtype(p->base.dtype, [&](auto d) {
        f(d, (unsigned)rows);
        return cudaGetLastError();
    });
}

} // namespace

extern "C" cudaError_t colo_k_sampling_largest(const colo_sampling_args *p, cudaStream_t stream)
{
    return launch(p, 1 /* the header, too */, [&](auto d, unsigned rows) {
        largest_kernel<decltype(d)><<<rows, THREADS, 0, stream>>>(*p);
    });
}

extern "C" cudaError_t colo_k_sampling_sums(const colo_sampling_args *p, cudaStream_t stream)
{
    return launch(p, 0, [&](auto d, unsigned rows) {
        sums_kernel<decltype(d)><<<rows, THREADS, 0, stream>>>(*p);
    });
}

extern "C" cudaError_t colo_k_sampling_find(const colo_sampling_args *p, cudaStream_t stream)
{
    return launch(p, 0,
                  [&](auto, unsigned rows) { find_kernel<<<rows, THREADS, 0, stream>>>(*p); });
}

extern "C" cudaError_t colo_k_sampling_keep(const colo_sampling_args *p, cudaStream_t stream)
{
    return launch(p, 0, [&](auto d, unsigned rows) {
        keep_kernel<decltype(d)><<<rows, THREADS, 0, stream>>>(*p);
    });
}
