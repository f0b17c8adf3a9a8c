/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.cu - the variants of the k largest of a row, with the row's statistics: per token of
 * [T, V] bf16 logits the k largest columns in order, of equal ones the first, and what logprob's
 * forward needs. The logits must be read once; the limit is a kernel that only sums their bits.
 *
 *   1  elements, sorted            every logit against the k-th best so far; what passes is sorted
 *                                  1024 at a time. After another read for the statistics
 *   2  words, sorted               the same with the maximum of eight logits; the k words are
 *                                  opened at the end
 *   3  words, counted              the k first of the candidates by bisection, by one warp
 *   library: colo_k_topk_largest   3 with the statistics in the same read, the count looked at
 *                                  every second step, any dtype, alignment, shard
 *
 *   variants-topk [T V [ITERATIONS]]
 */
#include "variants.h"

#include "kernels.h"
#include "loss/topk-args.h"

#include <numeric>

constexpr int THREADS = 256, BATCH = 4, CAPACITY = 1024;

/* (logit, id) as one number that falls in the order of picks, never 0 */
__device__ uint64_t code_of(uint32_t bits, uint32_t id)
{
    const uint32_t key = bits == 0x8000 ? bits : bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
    return (uint64_t)key << 32 | (uint32_t)~id;
}

__device__ uint32_t id_of(uint64_t code)
{
    return ~(uint32_t)code;
}

struct pile {
    uint64_t code[CAPACITY], bar;
    int count;
};

/* The k largest stay, in order. */
__device__ void sort_all(pile &h, int k)
{
    __syncthreads();
    const int n = min(h.count, CAPACITY);
    for (int i = n + (int)threadIdx.x; i < CAPACITY; i += THREADS)
        h.code[i] = 0;
    for (int size = 2; size <= CAPACITY; size *= 2)
        for (int gap = size / 2; gap > 0; gap /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < CAPACITY / 2; i += THREADS) {
                const int a = 2 * gap * (i / gap) + i % gap, b = a + gap;
                const uint64_t ca = h.code[a], cb = h.code[b];
                if ((cb > ca) == ((a & size) == 0)) {
                    h.code[a] = cb;
                    h.code[b] = ca;
                }
            }
        }
    __syncthreads();
    if (threadIdx.x == 0) {
        h.count = min(n, k);
        h.bar = n >= k ? h.code[k - 1] : 0;
    }
    __syncthreads();
}

/* The k largest stay, in any order. */
__device__ void count_all(pile &h, int k)
{
    __syncthreads();
    const int n = min(h.count, CAPACITY);
    __syncthreads();
    if (threadIdx.x == 0)
        h.count = n;
    if (threadIdx.x < 32 && n > k) {
        uint64_t lo = h.bar, hi = UINT64_C(1) << 48;
        for (int left = n; left > k;) {
            const uint64_t mid = hi - (hi - lo) / 2;
            int m = 0;
            for (int i = threadIdx.x; i < n; i += 32)
                m += h.code[i] >= mid;
            m = __reduce_add_sync(~0u, m);
            if (m >= k) {
                lo = mid;
                left = m;
            } else {
                hi = mid - 1;
            }
        }
        int kept = 0;
        for (int base = 0; base < n; base += 32) {
            const uint64_t c = base + (int)threadIdx.x < n ? h.code[base + threadIdx.x] : 0;
            const uint32_t stay = __ballot_sync(~0u, c >= lo);
            __syncwarp();
            if (c >= lo)
                h.code[kept + __popc(stay & ((1u << threadIdx.x) - 1))] = c;
            kept += __popc(stay);
            __syncwarp();
        }
        if (threadIdx.x == 0) {
            h.count = k;
            h.bar = lo;
        }
    }
    __syncthreads();
}

template <bool SORT> __device__ void keep(pile &h, int k)
{
    if (SORT)
        sort_all(h, k);
    else
        count_all(h, k);
}

/* Puts what @waits (a bit each) and beats the bar into the pile; makes space as often as it takes.
 */
template <bool SORT, int N>
__device__ void add(pile &h, const uint64_t *code, uint32_t waits, int k)
{
    for (;;) {
        const uint64_t bar = h.bar;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (waits >> i & 1) {
                int offset = 0;
                if (code[i] > bar && (offset = atomicAdd(&h.count, 1)) < CAPACITY)
                    h.code[offset] = code[i];
                if (offset < CAPACITY)
                    waits &= ~(1u << i);
            }
        if (!__syncthreads_or((int)waits))
            break;
        keep<SORT>(h, k);
    }
}

__device__ uint32_t element(const uint4 &v, int e)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    return e % 2 ? w[e / 2] >> 16 : w[e / 2] & 0xffff;
}

__device__ uint32_t top_of(const uint4 &v)
{
    const __nv_bfloat162 *h = (const __nv_bfloat162 *)&v;
    const __nv_bfloat162 m = __hmax2(__hmax2(h[0], h[1]), __hmax2(h[2], h[3]));
    return __bfloat16_as_ushort(__hmax(m.x, m.y));
}

__global__ void __launch_bounds__(THREADS)
    topk1(const __nv_bfloat16 *z, int64_t *ids, int64_t V, int k)
{
    __shared__ pile h;
    const uint4 *words = (const uint4 *)(z + blockIdx.x * V);
    const int n = (int)(V / 8);
    if (threadIdx.x == 0) {
        h.count = 0;
        h.bar = 0;
    }
    __syncthreads();
    for (int base = 0; base < n; base += THREADS * BATCH) {
        uint64_t code[BATCH * 8];
        uint32_t waits = 0;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int w = base + b * THREADS + (int)threadIdx.x;
            const uint4 v = w < n ? __ldcs(words + w) : uint4{};
            waits |= w < n ? 0xffu << 8 * b : 0;
#pragma unroll
            for (int e = 0; e < 8; e++)
                code[8 * b + e] = code_of(element(v, e), 8 * w + e);
        }
        add<true, BATCH * 8>(h, code, waits, k);
    }
    sort_all(h, k);
    for (int i = threadIdx.x; i < k; i += THREADS)
        ids[(int64_t)blockIdx.x * k + i] = id_of(h.code[i]);
}

template <bool SORT>
__global__ void __launch_bounds__(THREADS)
    topk2(const __nv_bfloat16 *z, int64_t *ids, int64_t V, int k)
{
    __shared__ pile h;
    const uint4 *words = (const uint4 *)(z + blockIdx.x * V);
    const int n = (int)(V / 8);
    if (threadIdx.x == 0) {
        h.count = 0;
        h.bar = 0;
    }
    __syncthreads();
    for (int base = 0; base < n; base += THREADS * BATCH) {
        uint64_t code[BATCH];
        uint32_t waits = 0;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int w = base + b * THREADS + (int)threadIdx.x;
            code[b] = w < n ? code_of(top_of(__ldcs(words + w)), w) : 0;
            waits |= (uint32_t)(w < n) << b;
        }
        add<SORT, BATCH>(h, code, waits, k);
        if (base == 0)
            keep<SORT>(h, k); /* a bar from the start */
    }
    keep<SORT>(h, k);
    const int found = h.count;
    uint64_t code[8];
    uint32_t waits = 0;
    if ((int)threadIdx.x < found) { /* k <= 128: the opened words fit */
        const uint32_t w = id_of(h.code[threadIdx.x]);
        waits = 0xff;
#pragma unroll
        for (int e = 0; e < 8; e++)
            code[e] = code_of(element(words[w], e), 8 * w + e);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        h.count = 0;
        h.bar = 0;
    }
    __syncthreads();
    add<SORT, 8>(h, code, waits, k);
    keep<SORT>(h, k);
    for (int i = threadIdx.x; i < k; i += THREADS) {
        int place = 0;
        for (int q = 0; q < k; q++)
            place += h.code[q] > h.code[i];
        ids[(int64_t)blockIdx.x * k + place] = id_of(h.code[i]);
    }
}

/* How many of four rows are not what a sort on the host says */
static int wrong(const variants &l, const int64_t *ids, int k)
{
    int n = 0;
    std::vector<int64_t> got((size_t)k), want((size_t)l.vocab);
    for (int i = 0; i < 4; i++) {
        const int64_t t = (l.tokens - 1) * i / 3;
        const std::vector<double> z = l.row(t);
        CUDA(cudaMemcpy(got.data(), ids + t * k, (size_t)k * 8, cudaMemcpyDeviceToHost));
        std::iota(want.begin(), want.end(), 0);
        std::stable_sort(want.begin(), want.end(),
                         [&](int64_t a, int64_t b) { return z[(size_t)a] > z[(size_t)b]; });
        n += !std::equal(got.begin(), got.end(), want.begin());
    }
    return n;
}

int main(int argc, char **argv)
{
    variants l(argc, argv);
    const int64_t T = l.tokens, V = l.vocab;
    int64_t *ids, *rows;
    unsigned char *block;
    unsigned long long *sum;
    const int64_t stats = (T * 4 + 7) / 8 * 8;
    CUDA(cudaMalloc(&ids, (size_t)T * 64 * 8));
    CUDA(cudaMalloc(&rows, (size_t)T * 8));
    CUDA(cudaMemset(rows, 0, (size_t)T * 8));
    CUDA(cudaMalloc(&block, (size_t)(64 + 3 * stats + T * 64 * 12)));
    CUDA(cudaMalloc(&sum, 8));
    colo_topk_args p = {};
    colo_logprob_args &s = p.base;
    s.dtype = s.d_dtype = COLO_BF16;
    s.factor = 1;
    s.config.logits.vocab = s.columns = s.true_columns = s.row_stride = V;
    s.config.ignore_index = COLO_TOPK_SKIP;
    s.hi = s.tokens = T;
    s.logits = l.z;
    s.targets = rows;
    s.target_stride = 1;
    s.blocks = block;
    s.block.m = 64;
    s.block.s = 64 + stats;
    s.block.xt = 64 + 2 * stats;
    s.block.u = s.block.d = s.block.arg = -1;
    s.ranks = 1;
    p.topk = true;
    int bad = 0;
    const double limit = l.median_us([&] { CUDA(colo_k_probe_read(l.z, l.bytes(), sum, 0)); });
    printf("| k | version | us | GB/s | of reading | wrong |\n|---:|---|---:|---:|---:|---:|\n");
    for (int k : {1, 20, 64}) {
        auto line = [&](const char *name, const std::function<void()> &launch, const int64_t *out) {
            CUDA(cudaMemset((void *)out, 0xff, (size_t)(T * k) * 8));
            const double us = l.median_us(launch);
            const int n = wrong(l, out, k);
            printf("| %d | %s | %.1f | %.0f | %.1f %% | %d |\n", k, name, us,
                   (double)l.bytes() / us * 1e-3, 100 * limit / us, n);
            bad += n;
        };
        p.k = k;
        p.pz = 64 + 3 * stats;
        p.pid = p.pz + (T * k * 4 + 7) / 8 * 8;
        s.block.bytes = p.pid + T * k * 8;
        line(
            "1 elements, sorted",
            [&] {
                CUDA(colo_k_logprob_stats(&s, 0));
                topk1<<<(unsigned)T, THREADS>>>(l.z, ids, V, k);
            },
            ids);
        line(
            "2 words, sorted",
            [&] {
                CUDA(colo_k_logprob_stats(&s, 0));
                topk2<true><<<(unsigned)T, THREADS>>>(l.z, ids, V, k);
            },
            ids);
        line(
            "3 words, counted",
            [&] {
                CUDA(colo_k_logprob_stats(&s, 0));
                topk2<false><<<(unsigned)T, THREADS>>>(l.z, ids, V, k);
            },
            ids);
        line(
            "library, one read", [&] { CUDA(colo_k_topk_largest(&p, 0)); },
            (const int64_t *)(block + p.pid));
    }
    printf("\nT %lld, V %lld, bf16; reading alone %.1f us; medians of %d\n", (long long)T,
           (long long)V, limit, l.iterations);
    return bad != 0;
}
