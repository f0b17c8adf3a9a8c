/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mean.h (private) - arguments of the kernels that add up values over tokens and ranks. Forward has
 * two, with one all-gather between them: a rank's part, and the sum of all parts in rank order.
 * colo_loss_weighted_sum() counts values by a mask, and its second kernel makes gradients, too;
 * colo_loss_mean_forward() is given the count, and colo_loss_mean_backward() has a third kernel.
 */
#ifndef COLO_LOSS_MEAN_H
#define COLO_LOSS_MEAN_H

#include <colobridge/logprob.h>

/* What a rank brings. */
struct colo_mean_part {
    double num, weight;
    int64_t den;
    int64_t weighs; /* of a weighted sum, not of a mean */
};

struct colo_mean_args {
    colo_dtype_t dtype; /* f32 or f64 */
    int64_t count;
    const void *values, *weights; /* weights may be NULL */
    const uint8_t *mask;          /* may be NULL */
    const int64_t *counted;       /* [1] how many values count, instead of a mask; may be NULL */
    int32_t rank, ranks;
    struct colo_mean_part *parts; /* [ranks] */
    colo_loss_weighted_t *out;         /* NULL: mean */
    colo_loss_mean_t mean;
    bool divide;    /* of mean */
    void *d_values; /* may be NULL */
};

struct colo_mean_grad_args {
    colo_dtype_t dtype; /* f32 or f64 */
    int64_t count;
    const double *factor, *d_num; /* d_num may be NULL */
    const void *d_value;          /* may be NULL */
    void *d_values;
};

#endif
