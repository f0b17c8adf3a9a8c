/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.c - a rank's local arithmetic: matrix products, bias, gelu, layer norm, each with its
 * backward.
 *
 * Decides the numerics: products in CBLAS fp32; sums over many tokens (bias and norm gradients) and
 * the moments of a norm in fp64, because a sum of a thousand nearly cancelling fp32 terms would use
 * up the 1e-5 that the gradient check allows. Leaves every communication to its callers.
 */
#include <math.h>
#include <string.h>

#include <cblas.h>

#include "rank.h"

enum { COLUMNS = 64 }; /* columns whose fp64 sums are kept at once */

void cap_linear(int64_t t, int64_t in, int64_t out, const float *x, const float *w, const float *b,
                float *y)
{
    if (!t || !out)
        return;
    for (int64_t i = 0; b && i < t; i++)
        memcpy(y + i * out, b, (size_t)out * sizeof *y);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)t, (int)out, (int)in, 1.0f, x,
                (int)in, w, (int)in, b ? 1.0f : 0.0f, y, (int)out);
}

void cap_linear_d_weight(int64_t t, int64_t in, int64_t out, const float *x, const float *d_y,
                         float *d_w)
{
    if (!t || !out || !in)
        return;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)out, (int)in, (int)t, 1.0f, d_y,
                (int)out, x, (int)in, 1.0f, d_w, (int)in);
}

void cap_linear_d_bias(int64_t t, int64_t out, const float *d_y, float *d_b)
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

void cap_linear_d_input(int64_t t, int64_t in, int64_t out, const float *d_y, const float *w,
                        float beta, float *d_x)
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

void cap_gelu(int64_t count, const float *z, float *act, float *slope)
{
    const float root_half = 0.70710678f, density = 0.39894228f; /* 1 / sqrt(2), 1 / sqrt(2 pi) */

    for (int64_t i = 0; i < count; i++) {
        float x = z[i], phi = 0.5f * (1.0f + erff(x * root_half));

        slope[i] = phi + x * density * expf(-0.5f * x * x);
        act[i] = x * phi;
    }
}

void cap_norm(int64_t t, int64_t d, const float *x, const float *gain, const float *bias,
              float *x_hat, float *r, float *y)
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

void cap_norm_backward(int64_t t, int64_t d, const float *d_y, const float *gain,
                       const float *x_hat, const float *r, const float *d_skip, float *d_x,
                       float *d_gain, float *d_bias)
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
    cap_linear_d_bias(t, d, d_y, d_bias);

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
