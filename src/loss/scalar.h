/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.h (private) - one element of a float dtype in host memory, as a double. */
#ifndef COLO_LOSS_SCALAR_H
#define COLO_LOSS_SCALAR_H

#include <colobridge/tensor.h>

#include "core/half.h"

#include <math.h>

static inline double colo_scalar_get(colo_dtype_t dtype, const void *base, int64_t i)
{
    switch (dtype) {
    case COLO_F64:
        return ((const double *)base)[i];
    case COLO_BF16:
        return colo_bf16_to_f32(((const uint16_t *)base)[i]);
    case COLO_F16:
        return colo_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return ((const float *)base)[i];
    }
}

static inline void colo_scalar_put(colo_dtype_t dtype, void *base, int64_t i, double v)
{
    switch (dtype) {
    case COLO_F64:
        ((double *)base)[i] = v;
        break;
    case COLO_BF16:
        ((uint16_t *)base)[i] = colo_f32_to_bf16((float)v);
        break;
    case COLO_F16:
        ((uint16_t *)base)[i] = colo_f32_to_f16((float)v);
        break;
    default:
        ((float *)base)[i] = (float)v;
    }
}

/* base[first .. first + n) = v; a loop for each dtype, because a compiler makes vectors of it */
static inline void colo_scalar_put_row(colo_dtype_t dtype, void *base, int64_t first,
                                       const double *v, int64_t n)
{
    switch (dtype) {
    case COLO_F64:
        for (int64_t i = 0; i < n; i++)
            ((double *)base)[first + i] = v[i];
        break;
    case COLO_F32:
        for (int64_t i = 0; i < n; i++)
            ((float *)base)[first + i] = (float)v[i];
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            colo_scalar_put(dtype, base, first + i, v[i]);
    }
}

/* x of a logit; what the stat dtype (f32 unless the logits are f64) cannot hold is infinite. */
static inline double colo_scalar_x(colo_dtype_t dtype, double z, double factor, double cap)
{
    double x = z * factor;
    if (cap > 0)
        x = cap * tanh(x / cap);
    if (dtype != COLO_F64 && isinf((float)x))
        x = x > 0 ? INFINITY : -INFINITY;
    return x;
}

/* A log-probability, or what is never negative, made of sums that rounding moves to both sides of
 * 0. NaN stays. */
static inline double colo_scalar_at_most_0(double v)
{
    return v > 0 ? 0 : v;
}

static inline double colo_scalar_at_least_0(double v)
{
    return v < 0 ? 0 : v;
}

#endif
