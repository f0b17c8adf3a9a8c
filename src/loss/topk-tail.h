/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk-tail.h (private) - what the tails of all shards become, for host/topk.c and
 * kernels/topk-loss.cu.
 */
#ifndef COLO_LOSS_TOPK_TAIL_H
#define COLO_LOSS_TOPK_TAIL_H

#include "loss/stat.h"
#include "loss/topk-args.h"

/* Writes log p_tail of token @t, which merge has left M and log Sum of, and what backward reads. */
COLO_EITHER void colo_topk_tail_token(const struct colo_topk_args *args, int64_t t)
{
    const bool f64 = args->base.dtype == COLO_F64;
    double *log_sum = args->base.saved + args->base.tokens + t;
    const double m = args->base.saved[t];
    double sum = 0, top = -COLO_STAT_INF, tail = 0;
    args->log_sum[t] = *log_sum;
    if (args->rows[t] != COLO_TOPK_SKIP) {
        for (int32_t r = 0; r < args->base.ranks; r++) {
            const unsigned char *block = args->base.blocks + r * args->base.block.bytes;
            const double tm = colo_stat_get(block + args->tm, f64, t);
            top = tm > top ? tm : top;
        }
        for (int32_t r = 0; r < args->base.ranks; r++) {
            const unsigned char *block = args->base.blocks + r * args->base.block.bytes;
            const double tm = colo_stat_get(block + args->tm, f64, t),
                         ts = colo_stat_get(block + args->ts, f64, t);
            sum += tm > -COLO_STAT_INF ? exp(tm - top) * ts : ts;
        }
        if (m != m || sum != sum)
            tail = COLO_STAT_NAN;
        else
            tail = sum > 0 ? colo_stat_at_most_0((top - m) - *log_sum + log(sum)) : -COLO_STAT_INF;
        if (tail > -COLO_STAT_INF)
            *log_sum += tail;
        if (sum != sum)
            args->base.saved[t] = COLO_STAT_NAN; /* the gradient, too */
    }
    if (args->out.tail)
        colo_stat_put(args->out.tail, f64, t, tail);
}

/* Of token @t, whose picks' upstream gradients add up to @sum: what grad and fix multiply by. */
COLO_EITHER void colo_topk_sum_token(const struct colo_topk_args *args, int64_t t, double sum)
{
    const bool f64 = args->base.dtype == COLO_F64;
    if (args->tail) {
        const double up = args->d_tail ? colo_stat_get(args->d_tail, f64, t) : 0,
                     p = exp(args->base.saved[args->base.tokens + t] - args->log_sum[t]);
        args->all[t] = sum + up;
        sum = (sum + up) * p - up;
    } else {
        args->all[t] = sum;
    }
    colo_stat_put(args->sum, f64, t, sum);
}

#endif
