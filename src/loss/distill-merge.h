/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-merge.h (private) - what a token's statistics of all shards become: ce, kl, and what
 * backward reads. The merge kernels of host/distill.c and kernels/distill.cu are loops over this.
 */
#ifndef COLO_LOSS_DISTILL_MERGE_H
#define COLO_LOSS_DISTILL_MERGE_H

#include "loss/distill-args.h"
#include "loss/stat.h"

struct colo_distill_merged {
    double m, log_sum, mv, log_sum_v, q, ce, kl;
};

COLO_EITHER struct colo_distill_merged colo_distill_merge_row(const struct colo_distill_args *args,
                                                              bool f64, int64_t t)
{
    double m = -COLO_STAT_INF, mv = -COLO_STAT_INF, sum = 0, sum_v = 0, c = 0, d = 0;
    struct colo_distill_merged g = {COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN,
                                    COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN};
    for (int32_t r = 0; r < args->base.ranks; r++) {
        const unsigned char *block = args->base.blocks + r * args->base.block.bytes;
        m = colo_logprob_alike((const colo_logprob_header_t *)block, &args->base.header)
                ? colo_stat_max(m, colo_stat_get(block + args->mx, f64, t))
                : COLO_STAT_NAN;
        mv = colo_stat_max(mv, colo_stat_get(block + args->mv, f64, t));
    }
    if (!(m > -COLO_STAT_INF) || !(mv > -COLO_STAT_INF))
        return g;
    for (int32_t r = 0; r < args->base.ranks; r++) {
        const unsigned char *block = args->base.blocks + r * args->base.block.bytes;
        const double rx = colo_stat_get(block + args->mx, f64, t),
                     rv = colo_stat_get(block + args->mv, f64, t),
                     sv = colo_stat_get(block + args->sv, f64, t), down_v = rv - mv,
                     w = rv > -COLO_STAT_INF ? exp(down_v) : 0,
                     down = (rx > -COLO_STAT_INF ? rx : 0) - m;
        if (rx > -COLO_STAT_INF)
            sum += exp(rx - m) * colo_stat_get(block + args->sx, f64, t);
        if (w > 0 && sv > 0) {
            sum_v += w * sv;
            c += w * (colo_stat_get(block + args->c, f64, t) + down * sv);
            d += w * (colo_stat_get(block + args->d, f64, t) + (down_v - down) * sv);
        }
    }
    g.m = m;
    g.log_sum = log(sum);
    if (args->probs) {
        g.mv = g.log_sum_v = 0;
        g.q = sum_v;
        g.ce = g.q * g.log_sum - c;
        g.kl = g.q * g.log_sum + d;
    } else {
        g.mv = mv;
        g.log_sum_v = log(sum_v);
        g.q = 1;
        g.ce = g.log_sum - c / sum_v;
        g.kl = colo_stat_at_least_0(d / sum_v - g.log_sum_v + g.log_sum);
    }
    g.ce = colo_stat_at_least_0(g.ce);
    return g;
}

/* Writes the outputs and the saved numbers of token @t. */
COLO_EITHER void colo_distill_merge_token(const struct colo_distill_args *args, int64_t t)
{
    const bool f64 = args->base.dtype == COLO_F64;
    const int64_t tokens = args->base.tokens;
    struct colo_distill_merged g = {COLO_STAT_INF, 0, 0, 0, 0, 0, 0}; /* masked */
    if (!args->mask || args->mask[t * args->mask_stride])
        g = colo_distill_merge_row(args, f64, t);
    if (args->out.ce)
        colo_stat_put(args->out.ce, f64, t, g.ce);
    if (args->out.kl)
        colo_stat_put(args->out.kl, f64, t, g.kl);
    if (args->saved) {
        args->saved[t] = g.m;
        args->saved[tokens + t] = g.log_sum;
        args->saved[2 * tokens + t] = g.mv;
        args->saved[3 * tokens + t] = g.log_sum_v;
        args->saved[4 * tokens + t] = g.q;
    }
}

#endif
