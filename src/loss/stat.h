/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat.h (private) - numbers of the stat dtype, in functions that host and kernels compile from one
 * text: what is made of statistics has one formula. A device may fuse a product and a sum, so it
 * may differ in the last digit of fp64.
 */
#ifndef COLO_LOSS_STAT_H
#define COLO_LOSS_STAT_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <math_constants.h>
#define COLO_EITHER static __device__ inline
#define COLO_STAT_INF CUDART_INF
#define COLO_STAT_NAN CUDART_NAN
#else
#include <math.h>
#define COLO_EITHER static inline
#define COLO_STAT_INF ((double)INFINITY)
#define COLO_STAT_NAN ((double)NAN)
#endif

/* Element @i of an array of fp64 (@f64), else of fp32 */
COLO_EITHER double colo_stat_get(const void *base, bool f64, int64_t i)
{
    return f64 ? ((const double *)base)[i] : (double)((const float *)base)[i];
}

COLO_EITHER void colo_stat_put(void *base, bool f64, int64_t i, double v)
{
    if (f64)
        ((double *)base)[i] = v;
    else
        ((float *)base)[i] = (float)v;
}

/* A log-probability, or what is never negative, made of sums that rounding moves to both sides of
 * 0. NaN stays. */
COLO_EITHER double colo_stat_at_most_0(double v)
{
    return v > 0 ? 0 : v;
}

COLO_EITHER double colo_stat_at_least_0(double v)
{
    return v < 0 ? 0 : v;
}

/* The larger one; NaN if one is. */
COLO_EITHER double colo_stat_max(double a, double b)
{
    return a > b || a != a ? a : b;
}

/* Is @sum one of e^(x - M) whose M is about the largest x? That one alone then makes it about 1. If
 * M, rounded, is farther away, sums of e^(x - M) times what is large may not fit into fp32. */
COLO_EITHER bool colo_stat_is_sum(double sum)
{
    return sum > 0x1p-100 && sum < 0x1p100;
}

/* log(1 + e) - e, with the digits of e near 0 */
COLO_EITHER double colo_stat_log1p_minus(double e)
{
    double sum = 0;
    if (!(e < 0.05 && e > -0.05))
        return log1p(e) - e;
    for (int n = 14; n >= 2; n--)
        sum = 1.0 / n - e * sum;
    return -e * e * sum;
}

/* r + expm1(-r) >= 0, with the digits of r near 0 */
COLO_EITHER double colo_stat_expm1_plus(double r)
{
    double sum = 0;
    if (!(r < 0.25 && r > -0.25))
        return r + expm1(-r);
    for (int n = 13; n >= 2; n--)
        sum = (1 - r * sum) / (n + 1);
    return r * r * ((1 - r * sum) / 2);
}

/* (1 + e) log(1 + e) - e >= 0 of e >= -1, with the digits of e near 0 */
COLO_EITHER double colo_stat_relative_entropy(double e)
{
    if (!(e > -1))
        return e == -1 ? 1 : COLO_STAT_NAN;
    return e < 0.5 && e > -0.5 ? e * e + (1 + e) * colo_stat_log1p_minus(e)
                               : (1 + e) * log1p(e) - e;
}

#endif
