/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops-host.c - a rank's arithmetic on the host: matrix products, bias, gelu, layer norm, Adam.
 *
 * Decides the numerics: products in CBLAS fp32; sums over many tokens (bias and norm gradients) and
 * the moments of a norm in fp64, because a sum of a thousand nearly cancelling fp32 terms would use
 * up the 1e-5 that the gradient check allows. Attention is in ops-host-attention.c, the merge in
 * ops-host-merge.c.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cblas.h>

#include "rank.h"

enum { COLUMNS = 64 }; /* columns whose fp64 sums are kept at once */

/* ---- memory: what a rank holds is what its host holds ---- */

static void *take(cap_ops_t *o, int64_t bytes)
{
    return o->state ? cap_take(o->state, bytes, 1) : NULL;
}

static void zero(const cap_ops_t *o, void *p, int64_t bytes)
{
    memset(p, 0, (size_t)bytes);
}

static void copy(const cap_ops_t *o, void *to, const void *from, int64_t bytes)
{
    if (to != from)
        memcpy(to, from, (size_t)bytes);
}

static colo_status_t check(const cap_ops_t *o)
{
    return COLO_OK;
}

static void destroy(cap_ops_t *o)
{
    if (o->state)
        cap_arena_free(o->state);
    free(o->state);
    o->state = NULL;
}

/* ---- products ---- */

static void linear(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                   const float *w, const float *b, float *y)
{
    if (!t || !out)
        return;
    for (int64_t i = 0; b && i < t; i++)
        memcpy(y + i * out, b, (size_t)out * sizeof *y);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)t, (int)out, (int)in, 1.0f, x,
                (int)in, w, (int)in, b ? 1.0f : 0.0f, y, (int)out);
}

static void linear_d_weight(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                            const float *d_y, float *d_w)
{
    if (!t || !out || !in)
        return;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)out, (int)in, (int)t, 1.0f, d_y,
                (int)out, x, (int)in, 1.0f, d_w, (int)in);
}

static void linear_d_bias(const cap_ops_t *o, int64_t t, int64_t out, const float *d_y, float *d_b)
{
    for (int64_t j0 = 0; j0 < out; j0 += COLUMNS) {
        int64_t cols = out - j0 < COLUMNS ? out - j0 : COLUMNS;
        double sum[COLUMNS] = {0};

        for (int64_t i = 0; i < t; i++)
            for (int64_t j = 0; j < cols; j++)
                sum[j] += (double)d_y[i * out + j0 + j];
        for (int64_t j = 0; j < cols; j++)
            d_b[j0 + j] += (float)sum[j];
    }
}

static void linear_d_input(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *d_y,
                           const float *w, float beta, float *d_x)
{
    if (!t || !in)
        return;
    if (!out) { /* an empty shard adds nothing */
        if (beta == 0.0f)
            memset(d_x, 0, (size_t)(t * in) * sizeof *d_x);
        return;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)t, (int)in, (int)out, 1.0f, d_y,
                (int)out, w, (int)in, beta, d_x, (int)in);
}

static void gelu(const cap_ops_t *o, int64_t count, const float *z, float *act, float *slope)
{
    const float root_half = 0.70710678f, density = 0.39894228f; /* 1 / sqrt(2), 1 / sqrt(2 pi) */

    for (int64_t i = 0; i < count; i++) {
        float x = z[i], phi = 0.5f * (1.0f + erff(x * root_half));

        slope[i] = phi + x * density * expf(-0.5f * x * x);
        act[i] = x * phi;
    }
}

static void norm(const cap_ops_t *o, int64_t t, int64_t d, const float *x, const float *gain,
                 const float *bias, float *x_hat, float *r, float *y)
{
    for (int64_t i = 0; i < t; i++, x += d, x_hat += d, y += d) {
        double sum = 0, square = 0;

        for (int64_t j = 0; j < d; j++)
            sum += (double)x[j];
        double mean = sum / (double)d;
        for (int64_t j = 0; j < d; j++)
            square += ((double)x[j] - mean) * ((double)x[j] - mean);
        double inverse = 1.0 / sqrt(square / (double)d + 1e-5);

        r[i] = (float)inverse;
        for (int64_t j = 0; j < d; j++) {
            x_hat[j] = (float)(((double)x[j] - mean) * inverse);
            y[j] = x_hat[j] * gain[j] + bias[j];
        }
    }
}

static void norm_backward(const cap_ops_t *o, int64_t t, int64_t d, const float *d_y,
                          const float *gain, const float *x_hat, const float *r,
                          const float *d_skip, float *d_x, float *d_gain, float *d_bias)
{
    for (int64_t j0 = 0; j0 < d; j0 += COLUMNS) {
        int64_t cols = d - j0 < COLUMNS ? d - j0 : COLUMNS;
        double sum[COLUMNS] = {0};

        for (int64_t i = 0; i < t; i++)
            for (int64_t j = 0; j < cols; j++)
                sum[j] += (double)d_y[i * d + j0 + j] * (double)x_hat[i * d + j0 + j];
        for (int64_t j = 0; j < cols; j++)
            d_gain[j0 + j] += (float)sum[j];
    }
    linear_d_bias(o, t, d, d_y, d_bias);

    for (int64_t i = 0; i < t; i++) {
        const float *dy = d_y + i * d, *xh = x_hat + i * d;
        double mean = 0, along = 0;

        for (int64_t j = 0; j < d; j++) {
            double v = (double)dy[j] * (double)gain[j];
            mean += v;
            along += v * (double)xh[j];
        }
        mean /= (double)d;
        along /= (double)d;
        for (int64_t j = 0; j < d; j++) {
            double v = (double)dy[j] * (double)gain[j] - mean - (double)xh[j] * along;
            d_x[i * d + j] = (d_skip ? d_skip[i * d + j] : 0.0f) + (float)(v * (double)r[i]);
        }
    }
}

static void scale(const cap_ops_t *o, int64_t count, const float *by, float *y)
{
    for (int64_t i = 0; i < count; i++)
        y[i] *= by[i];
}

static void add_rows(const cap_ops_t *o, int64_t t, int64_t d, const float *skip, const float *bias,
                     float *y)
{
    for (int64_t i = 0; i < t; i++)
        for (int64_t j = 0; j < d; j++)
            y[i * d + j] += skip ? skip[i * d + j] + bias[j] : bias[j];
}

static void adam(const cap_ops_t *o, int64_t count, float rate, float fix1, float fix2,
                 const float *g, float *m, float *v, float *w)
{
    const float keep1 = CAP_ADAM_KEEP1, keep2 = CAP_ADAM_KEEP2;

    for (int64_t i = 0; i < count; i++) {
        m[i] = keep1 * m[i] + (1.0f - keep1) * g[i];
        v[i] = keep2 * v[i] + (1.0f - keep2) * g[i] * g[i];
        w[i] -= rate * (m[i] * fix1 / (sqrtf(v[i] * fix2) + CAP_ADAM_EPS) + CAP_ADAM_DECAY * w[i]);
    }
}

void cap_ops_host(cap_ops_t *o)
{
    *o = (cap_ops_t){
        .mem = COLO_MEM_HOST,
        .device = -1,
        .state = calloc(1, sizeof(cap_arena_t)),
        .take = take,
        .zero = zero,
        .copy = copy,
        .put = copy,
        .get = copy,
        .check = check,
        .destroy = destroy,
        .linear = linear,
        .linear_d_weight = linear_d_weight,
        .linear_d_bias = linear_d_bias,
        .linear_d_input = linear_d_input,
        .gelu = gelu,
        .scale = scale,
        .add_rows = add_rows,
        .norm = norm,
        .norm_backward = norm_backward,
        .adam = adam,
    };
    cap_ops_host_attention(o);
    cap_ops_host_merge(o);
}
