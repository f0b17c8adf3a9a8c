/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.h (private) - the two kernels of colo_loss_weighted_sum(): a rank's part, and the sum of
 * all parts in rank order with what it gives back to each value. Between them one all-gather.
 * colo_loss_mean_forward() is the same two, where the count is given and other numbers come out.
 */
#ifndef COLO_LOSS_WEIGHTED_H
#define COLO_LOSS_WEIGHTED_H

#include <colobridge/logprob.h>

/* What a rank brings. */
struct colo_weighted_part {
    double num, weight;
    int64_t den;
    int64_t weighs; /* of a weighted sum, not of a mean */
};

struct colo_weighted_args {
    colo_dtype_t dtype; /* f32 or f64 */
    int64_t count;
    const void *values, *weights; /* weights may be NULL */
    const uint8_t *mask;          /* may be NULL */
    const int64_t *counted;       /* [1] how many values count, instead of a mask; may be NULL */
    int32_t rank, ranks;
    struct colo_weighted_part *parts; /* [ranks] */
    colo_weighted_t *out;             /* NULL: mean */
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

/* [T], f32 or f64, contiguous */
colo_status_t colo_weighted_i_check_values(const colo_tensor_t *values, const char *what);
/* The kernels and the all-gather between them. Of @args the caller sets what is its own: @values
 * and the group's numbers are added here. @st: what the check of this rank's other arguments gave;
 * if it is an error, @values and @args are not read. */
colo_status_t colo_weighted_i_run(struct colo_weighted_args *args, const colo_tensor_t *values,
                                  colo_comm_t *group, const char *what, colo_status_t st,
                                  colo_stream_t stream);

#endif
