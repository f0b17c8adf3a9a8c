/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.h (private) - the two passes of colo_loss_weighted_sum(): a rank's part, and the sum of
 * all parts in rank order with what it gives back to each value. Between them one all-gather.
 */
#ifndef COLO_LOSS_WEIGHTED_H
#define COLO_LOSS_WEIGHTED_H

#include <colobridge/logprob.h>

/* What a rank brings. */
struct colo_weighted_part {
    double num, weight;
    int64_t den, unused;
};

struct colo_weighted_pass {
    colo_dtype_t dtype; /* f32 or f64 */
    int64_t count;
    const void *values, *weights; /* weights may be NULL */
    const uint8_t *mask;          /* may be NULL */
    int32_t rank, ranks;
    struct colo_weighted_part *parts; /* [ranks] */
    colo_weighted_t *out;
    void *d_values; /* may be NULL */
};

colo_status_t colo_host_weighted_local(const struct colo_weighted_pass *p, colo_stream_t stream);
colo_status_t colo_host_weighted_finish(const struct colo_weighted_pass *p, colo_stream_t stream);

#endif
