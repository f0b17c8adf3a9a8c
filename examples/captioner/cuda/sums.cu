/* SPDX-License-Identifier: Apache-2.0 */
/* sums.cu - sums over tokens, in fp64 and in a fixed order: bias and norm gradients, embeddings. */
#include "kernels.h"

#include "captioner.h"

enum { COLS = 32, PARTS = 8, THREADS = 256 };

/* A block has COLS columns; PARTS threads share a column's rows, then one adds their sums. */
static __global__ void sum_rows(int64_t t, int64_t d, const float *y, const float *by, float *sum)
{
    __shared__ double part[PARTS][COLS];
    int64_t j = (int64_t)blockIdx.x * COLS + threadIdx.x;
    double mine = 0;

    for (int64_t i = threadIdx.y; j < d && i < t; i += PARTS)
        mine += (double)y[i * d + j] * (by ? (double)by[i * d + j] : 1.0);
    part[threadIdx.y][threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.y || j >= d)
        return;
    for (int k = 1; k < PARTS; k++)
        mine += part[k][threadIdx.x];
    sum[j] += (float)mine;
}

static __global__ void rows_of_y(cap_sequence_t s, int64_t d, int64_t yn, const float *d_x,
                                 float *d_y)
{
    int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t e = k % d, j = k / d % s.n, i = k / d / s.n;

    if (i < s.b && s.row[j] >= 0)
        d_y[(i * yn + s.row[j]) * d + e] = d_x[k];
}

/* Block v: all positions that have row v of the table. */
static __global__ void position_sums(cap_sequence_t s, int64_t d, const float *d_x, float *d_table)
{
    int64_t v = blockIdx.x;

    for (int64_t e = threadIdx.x; e < d; e += blockDim.x) {
        double sum = 0;
        for (int64_t j = 0; j < s.n; j++)
            for (int64_t i = 0; s.table_row[s.pos[j]] == v && i < s.b; i++)
                sum += (double)d_x[(i * s.n + j) * d + e];
        d_table[v * d + e] += (float)sum;
    }
}

/* Block v: all places where byte v stands. */
static __global__ void byte_sums(cap_sequence_t s, int64_t d, const float *d_x, float *d_embed)
{
    int64_t v = blockIdx.x;

    for (int64_t e = threadIdx.x; e < d; e += blockDim.x) {
        double sum = 0;
        for (int64_t j = 0; j < s.n; j++)
            for (int64_t i = 0; s.row[j] < 0 && i < s.b; i++)
                if (s.tokens[i * s.S + s.pos[j]] == v)
                    sum += (double)d_x[(i * s.n + j) * d + e];
        d_embed[v * d + e] += (float)sum;
    }
}

cudaError_t cap_k_sum_rows(int64_t t, int64_t d, const float *y, const float *by, float *sum,
                           cudaStream_t stream)
{
    if (!t || !d)
        return cudaSuccess;
    sum_rows<<<(unsigned)((d + COLS - 1) / COLS), dim3(COLS, PARTS), 0, stream>>>(t, d, y, by, sum);
    return cudaGetLastError();
}

cudaError_t cap_k_merge_backward(const cap_sequence_t *s, int64_t d, int64_t yn, const float *d_x,
                                 float *d_y, float *d_embed, float *d_table, cudaStream_t stream)
{
    int64_t count = s->b * s->n * d;
    if (!count)
        return cudaSuccess;
    if (d_y)
        rows_of_y<<<(unsigned)((count + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*s, d, yn,
                                                                                       d_x, d_y);
    position_sums<<<CAP_POSITIONS, THREADS, 0, stream>>>(*s, d, d_x, d_table);
    byte_sums<<<CAP_VOCAB, THREADS, 0, stream>>>(*s, d, d_x, d_embed);
    return cudaGetLastError();
}
