/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob_backward.cu - the variants of the gradient of log-probability with upstream g:
 *     dz_j = g ([j = t] - e^(z_j - m - log s))
 * which must read and write [T, V] bf16 once. The limit is cudaMemcpyAsync of the same bytes.
 *
 *   1  a thread an element               a division and the row's numbers for each
 *   2  a block a row                     the row's numbers once, two bytes an access
 *   3  16 bytes an access
 *   4  a block a run of a row            loads before the row's numbers; the target is looked for
 *                                        in one run only; nothing is kept in the caches
 *   library: colo_k_logprob_grad, 4 with any dtype, alignment, entropy, smoothing, softcap
 *
 *   variants-logprob-backward [T V [ITERATIONS]]
 */
#include "variants.h"

struct row {
    float lse, g;
};

__device__ float gradient(float z, const row &r, bool hit)
{
    return r.g * ((hit ? 1.0f : 0.0f) - __expf(z - r.lse));
}

__global__ void backward1(const __nv_bfloat16 *z, const int64_t *targets, const row *rows,
                          __nv_bfloat16 *dz, int64_t T, int64_t V)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < T * V; i += step) {
        const int64_t t = i / V, j = i % V;
        dz[i] = __float2bfloat16(gradient(__bfloat162float(z[i]), rows[t], j == targets[t]));
    }
}

__global__ void backward2(const __nv_bfloat16 *z, const int64_t *targets, const row *rows,
                          __nv_bfloat16 *dz, int64_t V)
{
    const int64_t t = blockIdx.x, target = targets[t];
    const row r = rows[t];
    for (int64_t j = threadIdx.x; j < V; j += blockDim.x)
        dz[t * V + j] = __float2bfloat16(gradient(__bfloat162float(z[t * V + j]), r, j == target));
}

__global__ void backward3(const __nv_bfloat16 *z, const int64_t *targets, const row *rows,
                          __nv_bfloat16 *dz, int64_t V)
{
    const int64_t t = blockIdx.x, target = targets[t];
    const row r = rows[t];
    for (int64_t k = threadIdx.x; k < V / 8; k += blockDim.x) {
        uint4 v = ((const uint4 *)(z + t * V))[k];
        __nv_bfloat16 *e = (__nv_bfloat16 *)&v;
#pragma unroll
        for (int i = 0; i < 8; i++)
            e[i] = __float2bfloat16(gradient(__bfloat162float(e[i]), r, k * 8 + i == target));
        ((uint4 *)(dz + t * V))[k] = v;
    }
}

/* blockIdx.x: a run of 256 x 4 words; blockIdx.y: the row */
__global__ void __launch_bounds__(256, 5) backward4(const __nv_bfloat16 *z, const int64_t *targets,
                                                    const row *rows, __nv_bfloat16 *dz, int64_t V)
{
    __shared__ row shared;
    __shared__ int64_t shared_target;
    const int64_t t = blockIdx.y, first = (int64_t)blockIdx.x * 1024 + threadIdx.x;
    const uint4 *from = (const uint4 *)(z + t * V);
    uint4 *to = (uint4 *)(dz + t * V), v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (first + i * 256 < V / 8)
            v[i] = __ldcs(from + first + i * 256);
    if (threadIdx.x == 0) {
        shared = rows[t];
        shared_target = targets[t];
    }
    __syncthreads();
    const row r = shared;
    const int64_t hit = shared_target / 8 - first;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i * 256 >= V / 8)
            break;
        __nv_bfloat162 *h = (__nv_bfloat162 *)&v[i];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 f = __bfloat1622float2(h[e]);
            f.x = gradient(f.x, r, hit == i * 256 && shared_target % 8 == 2 * e);
            f.y = gradient(f.y, r, hit == i * 256 && shared_target % 8 == 2 * e + 1);
            h[e] = __floats2bfloat162_rn(f.x, f.y);
        }
        __stcs(to + first + i * 256, v[i]);
    }
}

/* Elements of four rows that are not what fp64 says, to their rounding */
static long wrong(const variants &l, const std::vector<row> &rows, const __nv_bfloat16 *dz)
{
    long n = 0;
    std::vector<__nv_bfloat16> got((size_t)l.vocab);
    for (int i = 0; i < 4; i++) {
        const int64_t t = (l.tokens - 1) * i / 3;
        const std::vector<double> z = l.row(t);
        const double g = rows[(size_t)t].g, top = *std::max_element(z.begin(), z.end());
        double sum = 0;
        for (double v : z)
            sum += std::exp(v - top);
        CUDA(cudaMemcpy(got.data(), dz + t * l.vocab, (size_t)l.vocab * 2, cudaMemcpyDeviceToHost));
        for (int64_t j = 0; j < l.vocab; j++) {
            const double want = g * ((j == l.host_targets[(size_t)t]) -
                                     std::exp(z[(size_t)j] - top - std::log(sum)));
            n += !(std::fabs((float)got[(size_t)j] - want) <= 0x1p-8 * std::fabs(want) + 1e-6 * g);
        }
    }
    return n;
}

int main(int argc, char **argv)
{
    variants l(argc, argv);
    const int64_t T = l.tokens, V = l.vocab;
    __nv_bfloat16 *dz;
    row *rows;
    float *up;
    double *saved;
    std::vector<row> host((size_t)T);
    std::vector<float> host_up((size_t)T);
    std::vector<double> host_saved((size_t)T * 3);
    CUDA(cudaMalloc(&dz, (size_t)l.bytes()));
    CUDA(cudaMalloc(&rows, (size_t)T * sizeof *rows));
    CUDA(cudaMalloc(&up, (size_t)T * 4));
    CUDA(cudaMalloc(&saved, (size_t)T * 24));
    /* the logits of all rows are drawn alike; only checked rows need their own numbers exactly */
    std::vector<double> z0 = l.row(0);
    for (int64_t t = 0; t < T; t++) {
        const bool checked =
            t == 0 || t == (l.tokens - 1) / 3 || t == (l.tokens - 1) * 2 / 3 || t == l.tokens - 1;
        const std::vector<double> z = checked ? l.row(t) : std::vector<double>();
        const std::vector<double> &of = checked ? z : z0;
        static double m, log_sum;
        if (checked || t == 1) {
            double sum = 0;
            m = *std::max_element(of.begin(), of.end());
            for (double v : of)
                sum += std::exp(v - m);
            log_sum = std::log(sum);
        }
        host_up[(size_t)t] = 0.25f * (float)(t % 7 + 1);
        host[(size_t)t] = {(float)(m + log_sum), host_up[(size_t)t]};
        host_saved[(size_t)t] = m;
        host_saved[(size_t)(T + t)] = log_sum;
    }
    CUDA(cudaMemcpy(rows, host.data(), (size_t)T * sizeof *rows, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(up, host_up.data(), (size_t)T * 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(saved, host_saved.data(), (size_t)T * 24, cudaMemcpyHostToDevice));
    colo_logprob_args p = {};
    p.dtype = p.d_dtype = COLO_BF16;
    p.factor = 1;
    p.config.logits.vocab = p.columns = p.true_columns = p.row_stride = p.d_row_stride = V;
    p.config.ignore_index = -100;
    p.hi = p.tokens = T;
    p.logits = l.z;
    p.d_logits = dz;
    p.targets = l.targets;
    p.target_stride = 1;
    p.ranks = 1;
    p.saved = saved;
    p.upstream.d_logp = up;

    const double limit = l.median_us(
        [&] { CUDA(cudaMemcpyAsync(dz, l.z, (size_t)l.bytes(), cudaMemcpyDeviceToDevice, 0)); });
    printf("| version | us | GB/s | of copying | wrong |\n|---|---:|---:|---:|---:|\n");
    long bad = 0;
    auto line = [&](const char *name, const std::function<void()> &launch) {
        CUDA(cudaMemset(dz, 0xff, (size_t)l.bytes()));
        const double us = l.median_us(launch);
        const long n = wrong(l, host, dz);
        printf("| %s | %.1f | %.0f | %.1f %% | %ld |\n", name, us,
               2 * (double)l.bytes() / us * 1e-3, 100 * limit / us, n);
        bad += n;
    };
    line("1 a thread an element",
         [&] { backward1<<<132 * 8, 256>>>(l.z, l.targets, rows, dz, T, V); });
    line("2 a block a row", [&] { backward2<<<(unsigned)T, 256>>>(l.z, l.targets, rows, dz, V); });
    line("3 16 bytes an access",
         [&] { backward3<<<(unsigned)T, 256>>>(l.z, l.targets, rows, dz, V); });
    line("4 a block a run", [&] {
        backward4<<<dim3((unsigned)((V / 8 + 1023) / 1024), (unsigned)T), 256>>>(l.z, l.targets,
                                                                                 rows, dz, V);
    });
    line("library", [&] { CUDA(colo_k_logprob_grad(&p, 0)); });
    printf("\nT %lld, V %lld, bf16; cudaMemcpyAsync %.1f us; medians of %d\n", (long long)T,
           (long long)V, limit, l.iterations);
    return bad != 0;
}
