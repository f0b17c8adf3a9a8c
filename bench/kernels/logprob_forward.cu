/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob_forward.cu - the variants of the forward statistics: per token of [T, V] bf16 logits
 *     m = max_j z_j,   s = sum_j e^(z_j - m),   x_t = z_target
 * which must read the logits once. The limit is a kernel that only sums their bits.
 *
 *   1  a thread a row, three passes         the definition; neighbours read other rows
 *   2  a block a row, two passes            coalesced, but the row is read twice
 *   3  one pass, running maximum            once; two bytes a load, a rescale in every step
 *   4  16 bytes a load                      one instruction for eight logits
 *   5  four loads under way, rescale rarely maximum of 32 logits first, then one exp each
 *   library: colo_k_logprob_stats, 5 with any dtype, alignment, shard, entropy, softcap
 *
 *   variants-logprob-forward [T V [ITERATIONS]]
 */
#include "variants.h"

#include <math_constants.h>

struct stats {
    float m, s, xt;
};

__global__ void forward1(const __nv_bfloat16 *z, const int64_t *targets, stats *out, int64_t T,
                         int64_t V)
{
    const int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T)
        return;
    const __nv_bfloat16 *row = z + t * V;
    float m = -CUDART_INF_F, s = 0;
    for (int64_t j = 0; j < V; j++)
        m = fmaxf(m, __bfloat162float(row[j]));
    for (int64_t j = 0; j < V; j++)
        s += expf(__bfloat162float(row[j]) - m);
    out[t] = {m, s, __bfloat162float(row[targets[t]])};
}

/* m and s of two parts of a row */
__device__ void merge(float &m, float &s, float m2, float s2)
{
    const float top = fmaxf(m, m2);
    if (top == -CUDART_INF_F)
        return;
    s = s * __expf(m - top) + s2 * __expf(m2 - top);
    m = top;
}

__device__ void finish(float m, float s, const __nv_bfloat16 *row, int64_t target, stats *out)
{
    __shared__ float ms[32], ss[32];
    for (int k = 16; k > 0; k /= 2)
        merge(m, s, __shfl_xor_sync(~0u, m, k), __shfl_xor_sync(~0u, s, k));
    if (threadIdx.x % 32 == 0) {
        ms[threadIdx.x / 32] = m;
        ss[threadIdx.x / 32] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned w = 1; w < blockDim.x / 32; w++)
            merge(m, s, ms[w], ss[w]);
        *out = {m, s, __bfloat162float(row[target])};
    }
}

__global__ void forward2(const __nv_bfloat16 *z, const int64_t *targets, stats *out, int64_t V)
{
    const __nv_bfloat16 *row = z + blockIdx.x * V;
    float m = -CUDART_INF_F, s = 0;
    for (int64_t j = threadIdx.x; j < V; j += blockDim.x)
        m = fmaxf(m, __bfloat162float(row[j]));
    for (int64_t j = threadIdx.x; j < V; j += blockDim.x)
        s += __expf(__bfloat162float(row[j]) - m);
    finish(m, s, row, targets[blockIdx.x], out + blockIdx.x);
}

__global__ void forward3(const __nv_bfloat16 *z, const int64_t *targets, stats *out, int64_t V)
{
    const __nv_bfloat16 *row = z + blockIdx.x * V;
    float m = -CUDART_INF_F, s = 0;
    for (int64_t j = threadIdx.x; j < V; j += blockDim.x)
        merge(m, s, __bfloat162float(row[j]), 1);
    finish(m, s, row, targets[blockIdx.x], out + blockIdx.x);
}

__global__ void forward4(const __nv_bfloat16 *z, const int64_t *targets, stats *out, int64_t V)
{
    const __nv_bfloat16 *row = z + blockIdx.x * V;
    float m = -CUDART_INF_F, s = 0;
    for (int64_t k = threadIdx.x; k < V / 8; k += blockDim.x) {
        const uint4 v = ((const uint4 *)row)[k];
        const __nv_bfloat16 *e = (const __nv_bfloat16 *)&v;
#pragma unroll
        for (int i = 0; i < 8; i++)
            merge(m, s, __bfloat162float(e[i]), 1);
    }
    finish(m, s, row, targets[blockIdx.x], out + blockIdx.x);
}

/* N words of eight logits: their maximum by pairs, a rescale when it is new, one exp each. */
template <int N> __device__ void absorb(float &m, float &s, const uint4 *v)
{
    const __nv_bfloat162 *h = (const __nv_bfloat162 *)v;
    __nv_bfloat162 top = h[0];
#pragma unroll
    for (int i = 1; i < 4 * N; i++)
        top = __hmax2_nan(top, h[i]);
    const float t = __bfloat162float(__hmax_nan(top.x, top.y));
    if (t > m) {
        s *= __expf(m - t);
        m = t;
    }
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        const float2 f = __bfloat1622float2(h[i]);
        s += __expf(f.x - m) + __expf(f.y - m);
    }
}

__global__ void __launch_bounds__(128, 10)
    forward5(const __nv_bfloat16 *z, const int64_t *targets, stats *out, int64_t V)
{
    const __nv_bfloat16 *row = z + blockIdx.x * V;
    const uint4 *words = (const uint4 *)row;
    float m = -CUDART_INF_F, s = 0;
    int64_t k = threadIdx.x;
    for (; k + 3 * 128 < V / 8; k += 4 * 128) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = __ldcs(words + k + i * 128);
        absorb<4>(m, s, v);
    }
    for (; k < V / 8; k += 128) {
        const uint4 v = __ldcs(words + k);
        absorb<1>(m, s, &v);
    }
    finish(m, s, row, targets[blockIdx.x], out + blockIdx.x);
}

/* How many of four rows are not what fp64 says, logp to 1e-4 */
static int wrong(const variants &l, const std::function<double(int64_t)> &logp)
{
    int n = 0;
    for (int i = 0; i < 4; i++) {
        const int64_t t = (l.tokens - 1) * i / 3;
        const std::vector<double> z = l.row(t);
        const double top = *std::max_element(z.begin(), z.end());
        double sum = 0;
        for (double v : z)
            sum += std::exp(v - top);
        n += !(std::fabs(logp(t) - (z[(size_t)l.host_targets[(size_t)t]] - top - std::log(sum))) <
               1e-4);
    }
    return n;
}

int main(int argc, char **argv)
{
    variants l(argc, argv);
    const int64_t T = l.tokens, V = l.vocab;
    stats *out;
    float *logp;
    unsigned char *block;
    double *saved;
    unsigned long long *sum;
    CUDA(cudaMalloc(&out, (size_t)T * sizeof *out));
    CUDA(cudaMalloc(&logp, (size_t)T * 4));
    CUDA(cudaMalloc(&block, 64 + (size_t)T * 12 + 64));
    CUDA(cudaMalloc(&saved, (size_t)T * 24));
    CUDA(cudaMalloc(&sum, 8));
    const int64_t array = (T * 4 + 7) / 8 * 8;
    colo_logprob_args p = {};
    p.dtype = p.d_dtype = COLO_BF16;
    p.factor = 1;
    p.config.logits.vocab = p.columns = p.true_columns = p.row_stride = V;
    p.config.ignore_index = -100;
    p.hi = p.tokens = T;
    p.logits = l.z;
    p.targets = l.targets;
    p.target_stride = 1;
    p.blocks = block;
    p.block.bytes = 64 + 3 * array;
    p.block.m = 64;
    p.block.s = 64 + array;
    p.block.xt = 64 + 2 * array;
    p.block.u = p.block.d = p.block.arg = -1;
    p.ranks = 1;
    p.header.columns = V;
    p.out.logp = logp;
    p.saved = saved;

    const double limit = l.median_us([&] { CUDA(colo_k_probe_read(l.z, l.bytes(), sum, 0)); });
    printf("| version | us | GB/s | of reading | wrong |\n|---|---:|---:|---:|---:|\n");
    auto line = [&](const char *name, bool library, const std::function<void()> &launch) {
        CUDA(cudaMemset(out, 0xff, (size_t)T * sizeof *out));
        const double us = l.median_us(launch);
        std::vector<stats> host((size_t)T);
        std::vector<float> lp((size_t)T);
        CUDA(cudaMemcpy(host.data(), out, (size_t)T * sizeof *out, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(lp.data(), logp, (size_t)T * 4, cudaMemcpyDeviceToHost));
        const int bad = wrong(l, [&](int64_t t) {
            const stats &r = host[(size_t)t];
            return library ? (double)lp[(size_t)t] : (double)(r.xt - r.m) - std::log((double)r.s);
        });
        printf("| %s | %.1f | %.0f | %.1f %% | %d |\n", name, us, (double)l.bytes() / us * 1e-3,
               100 * limit / us, bad);
        return bad;
    };
    int bad = 0;
    /* its one fp32 sum over a row is off by more than 1e-4: not held against the others */
    line("1 a thread a row", false,
         [&] { forward1<<<(unsigned)((T + 31) / 32), 32>>>(l.z, l.targets, out, T, V); });
    bad += line("2 a block a row, two passes", false,
                [&] { forward2<<<(unsigned)T, 256>>>(l.z, l.targets, out, V); });
    bad += line("3 one pass, running maximum", false,
                [&] { forward3<<<(unsigned)T, 256>>>(l.z, l.targets, out, V); });
    bad += line("4 16 bytes a load", false,
                [&] { forward4<<<(unsigned)T, 256>>>(l.z, l.targets, out, V); });
    bad += line("5 four loads, rare rescale", false,
                [&] { forward5<<<(unsigned)T, 128>>>(l.z, l.targets, out, V); });
    bad += line("library, merge included", true, [&] {
        CUDA(colo_k_logprob_stats(&p, 0));
        CUDA(colo_k_logprob_merge(&p, 0));
    });
    printf("\nT %lld, V %lld, bf16; reading alone %.1f us; medians of %d\n", (long long)T,
           (long long)V, limit, l.iterations);
    return bad != 0;
}
