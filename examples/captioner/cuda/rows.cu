/* SPDX-License-Identifier: Apache-2.0 */
/* rows.cu - gelu, products, norms, merge and Adam: every element or row by itself. */
#include "kernels.h"

enum { THREADS = 256, WARP = 32, ROWS = 8 }; /* ROWS: of a block, a warp each */

static unsigned blocks(int64_t count)
{
    return (unsigned)((count + THREADS - 1) / THREADS);
}

static __device__ int64_t my_index(void)
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ double warp_sum(double v)
{
    for (int step = WARP / 2; step > 0; step /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

static __global__ void gelu(int64_t count, const float *z, float *act, float *slope)
{
    const float root_half = 0.70710678f, density = 0.39894228f;
    int64_t i = my_index();

    if (i >= count)
        return;
    float x = z[i], phi = 0.5f * (1.0f + erff(x * root_half));
    slope[i] = phi + x * density * expf(-0.5f * x * x);
    act[i] = x * phi;
}

static __global__ void scale(int64_t count, const float *by, float *y)
{
    int64_t i = my_index();
    if (i < count)
        y[i] *= by[i];
}

static __global__ void add_rows(int64_t count, int64_t d, const float *skip, const float *bias,
                                float *y)
{
    int64_t i = my_index();
    if (i < count)
        y[i] += (skip ? skip[i] : 0.0f) + bias[i % d];
}

/* A warp a row, lanes over its columns. */
static __global__ void norm(int64_t t, int64_t d, const float *x, const float *gain,
                            const float *bias, float *x_hat, float *r, float *y)
{
    int64_t i = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    double sum = 0, square = 0;

    if (i >= t)
        return;
    x += i * d, x_hat += i * d, y += i * d;
    for (int64_t j = threadIdx.x; j < d; j += WARP)
        sum += (double)x[j];
    double mean = warp_sum(sum) / (double)d;
    for (int64_t j = threadIdx.x; j < d; j += WARP)
        square += ((double)x[j] - mean) * ((double)x[j] - mean);
    double inverse = 1.0 / sqrt(warp_sum(square) / (double)d + 1e-5);
    if (threadIdx.x == 0)
        r[i] = (float)inverse;
    for (int64_t j = threadIdx.x; j < d; j += WARP) {
        x_hat[j] = (float)(((double)x[j] - mean) * inverse);
        y[j] = x_hat[j] * gain[j] + bias[j];
    }
}

static __global__ void norm_d_x(int64_t t, int64_t d, const float *d_y, const float *gain,
                                const float *x_hat, const float *r, const float *d_skip, float *d_x)
{
    int64_t i = (int64_t)blockIdx.x * ROWS + threadIdx.y, index = i * d;
    double mean = 0, along = 0;

    if (i >= t)
        return;
    for (int64_t j = threadIdx.x; j < d; j += WARP) {
        double v = (double)d_y[index + j] * (double)gain[j];
        mean += v;
        along += v * (double)x_hat[index + j];
    }
    mean = warp_sum(mean) / (double)d;
    along = warp_sum(along) / (double)d;
    for (int64_t j = threadIdx.x; j < d; j += WARP) {
        double v =
            (double)d_y[index + j] * (double)gain[j] - mean - (double)x_hat[index + j] * along;
        d_x[index + j] = (d_skip ? d_skip[index + j] : 0.0f) + (float)(v * (double)r[i]);
    }
}

static __global__ void merge(cap_sequence_t s, int64_t d, int64_t yn, const float *y,
                             const float *embed, const float *table, float *x)
{
    int64_t k = my_index(), e = k % d, j = k / d % s.n, i = k / d / s.n;

    if (i >= s.b)
        return;
    int64_t p = s.pos[j];
    const float *from =
        s.row[j] >= 0 ? y + (i * yn + s.row[j]) * d : embed + s.tokens[i * s.S + p] * d;
    x[k] = from[e] + table[s.table_row[p] * d + e];
}

static __global__ void adam(int64_t count, float rate, float fix1, float fix2, const float *g,
                            float *m, float *v, float *w)
{
    int64_t i = my_index();

    if (i >= count)
        return;
    m[i] = CAP_ADAM_KEEP1 * m[i] + (1.0f - CAP_ADAM_KEEP1) * g[i];
    v[i] = CAP_ADAM_KEEP2 * v[i] + (1.0f - CAP_ADAM_KEEP2) * g[i] * g[i];
    w[i] -= rate * (m[i] * fix1 / (sqrtf(v[i] * fix2) + CAP_ADAM_EPS) + CAP_ADAM_DECAY * w[i]);
}

/* ---- launchers ---- */

cudaError_t cap_k_gelu(int64_t count, const float *z, float *act, float *slope, cudaStream_t stream)
{
    if (!count)
        return cudaSuccess;
    gelu<<<blocks(count), THREADS, 0, stream>>>(count, z, act, slope);
    return cudaGetLastError();
}

cudaError_t cap_k_scale(int64_t count, const float *by, float *y, cudaStream_t stream)
{
    if (!count)
        return cudaSuccess;
    scale<<<blocks(count), THREADS, 0, stream>>>(count, by, y);
    return cudaGetLastError();
}

cudaError_t cap_k_add_rows(int64_t t, int64_t d, const float *skip, const float *bias, float *y,
                           cudaStream_t stream)
{
    if (!t || !d)
        return cudaSuccess;
    add_rows<<<blocks(t * d), THREADS, 0, stream>>>(t * d, d, skip, bias, y);
    return cudaGetLastError();
}

cudaError_t cap_k_norm(int64_t t, int64_t d, const float *x, const float *gain, const float *bias,
                       float *x_hat, float *r, float *y, cudaStream_t stream)
{
    if (!t)
        return cudaSuccess;
    norm<<<(unsigned)((t + ROWS - 1) / ROWS), dim3(WARP, ROWS), 0, stream>>>(t, d, x, gain, bias,
                                                                             x_hat, r, y);
    return cudaGetLastError();
}

cudaError_t cap_k_norm_d_x(int64_t t, int64_t d, const float *d_y, const float *gain,
                           const float *x_hat, const float *r, const float *d_skip, float *d_x,
                           cudaStream_t stream)
{
    if (!t)
        return cudaSuccess;
    norm_d_x<<<(unsigned)((t + ROWS - 1) / ROWS), dim3(WARP, ROWS), 0, stream>>>(
        t, d, d_y, gain, x_hat, r, d_skip, d_x);
    return cudaGetLastError();
}

cudaError_t cap_k_merge(const cap_sequence_t *s, int64_t d, int64_t yn, const float *y,
                        const float *embed, const float *table, float *x, cudaStream_t stream)
{
    int64_t count = s->b * s->n * d;
    if (!count)
        return cudaSuccess;
    merge<<<blocks(count), THREADS, 0, stream>>>(*s, d, yn, y, embed, table, x);
    return cudaGetLastError();
}

cudaError_t cap_k_adam(int64_t count, float rate, float fix1, float fix2, const float *g, float *m,
                       float *v, float *w, cudaStream_t stream)
{
    if (!count)
        return cudaSuccess;
    adam<<<blocks(count), THREADS, 0, stream>>>(count, rate, fix1, fix2, g, m, v, w);
    return cudaGetLastError();
}
