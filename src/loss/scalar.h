/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.h (private) - logits and log-probabilities of host memory, as doubles. */
#ifndef COLO_LOSS_SCALAR_H
#define COLO_LOSS_SCALAR_H

#include "core/scalar.h"
#include "loss/stat.h"

#include <math.h>

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

/* What is left of v in an array of the stat dtype. */
static inline double colo_scalar_round(colo_dtype_t stat, double v)
{
    return stat == COLO_F64 ? v : (double)(float)v;
}

#endif
