/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mean.h (private) - arguments of the kernels that add up values over tokens and ranks. Forward has
 * two, with one all-gather between them: a rank's part, and the sum of all parts in rank order.
 * colo_loss_weighted_sum() counts values by a mask, and its second kernel makes gradients, too;
 * colo_loss_mean_forward() is given the count, colo_loss_mean_weighted() the weights instead, and
 * colo_loss_mean_backward() has a third kernel.
 */
#ifndef COLO_LOSS_MEAN_H
#define COLO_LOSS_MEAN_H

#include "loss/stat.h"

#include <colobridge/logprob.h>

/* What a rank brings. */
struct colo_mean_part {
    double num, weight;
    int64_t den;
    int64_t weighs; /* enum colo_mean_weighs */
};

/* What a call adds up; a group's ranks do alike. */
enum colo_mean_weighs {
    COLO_MEAN_COUNTS = 0,  /* values, and how many */
    COLO_MEAN_WEIGHS = 1,  /* weight * value */
    COLO_MEAN_WEIGHTED = 2 /* values that are weighted already, and the weights */
};

struct colo_mean_args {
    colo_dtype_t dtype;           /* f32 or f64 */
    int64_t count, weighs;        /* enum colo_mean_weighs */
    const void *values, *weights; /* weights may be NULL, if they are not WEIGHTED's */
    const uint8_t *mask;          /* may be NULL */
    const int64_t *counted;       /* [1] how many values count, instead of a mask; may be NULL */
    int32_t rank, ranks;
    struct colo_mean_part *parts; /* [ranks] */
    colo_loss_weighted_t *out;    /* NULL: mean */
    struct {
        void *value; /* dtype */
        double *num, *den, *factor;
    } mean;
    bool divide;    /* of mean */
    void *d_values; /* may be NULL */
};

/* What a mean divides by, and what it says it does. */
struct colo_mean_divisor {
    double over, den;
};
COLO_EITHER struct colo_mean_divisor colo_mean_divisor_of(const struct colo_mean_args *args,
                                                          double weight, int64_t count)
{
    struct colo_mean_divisor by = {1, (double)count};
    if (args->weighs == COLO_MEAN_WEIGHTED)
        by.den = weight;
    if (args->divide && args->weighs == COLO_MEAN_WEIGHTED)
        by.over = weight != 0 ? weight : COLO_STAT_INF; /* then all becomes 0 */
    else if (args->divide && count > 1)
        by.over = (double)count;
    return by;
}

struct colo_mean_grad_args {
    colo_dtype_t dtype; /* f32 or f64 */
    int64_t count;
    const double *factor, *d_num; /* d_num may be NULL */
    const void *d_value;          /* may be NULL */
    void *d_values;
};

#endif
