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

#endif
