/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob-merge.h (private) - what a token's statistics of all shards become: its outputs, and what
 * backward reads. The merge kernels of host/logprob.c and kernels/logprob-stats.cu are loops over
 * this.
 *
 * A target that is no token (lenient_targets) counts as if its x were the largest one. M is that x
 * after rounding to the stat dtype, so xt of a block says how far the shard's largest x is from its
 * m: without it a loss of f32 logits near 3000 is off by 2e-4.
 */
#ifndef COLO_LOSS_LOGPROB_MERGE_H
#define COLO_LOSS_LOGPROB_MERGE_H

#include "loss/args.h"
#include "loss/stat.h"

/* 1 / temperature of token @t, which multiplies its x, in addition to what divides those of all;
 * NaN if it is none */
COLO_EITHER double colo_logprob_coldness(const struct colo_logprob_args *args, int64_t t)
{
    const double v =
        args->temperature ? (double)args->temperature[colo_logprob_token_of(args, t)] : 1;
    return v > 0 && v < COLO_STAT_INF ? 1 / v : COLO_STAT_NAN;
}

/* The same in backward, which reads what the merge has saved: the last of a token's numbers */
COLO_EITHER double colo_logprob_saved_coldness(const struct colo_logprob_args *args, int64_t t)
{
    return args->config.has_temperature
               ? args->saved[(args->config.has_class_weight ? 5 : 3) * args->tokens + t]
               : 1;
}

/* A row over the whole vocabulary; m is M, or NaN when the row is. */
struct colo_logprob_merged {
    /* sums over V, or own, divided by it: of w (x - M), of w; xt is x_t - M */
    double m, log_sum, h, mean, w, xt, p2;
    int64_t arg;
};

/* Of a row of which nothing can be said */
COLO_EITHER struct colo_logprob_merged colo_logprob_nothing(void)
{
    const double nan = COLO_STAT_NAN;
    const struct colo_logprob_merged g = {nan, nan, nan, nan, nan, nan, nan, -1};
    return g;
}

/* @k: of the blocks; @target: -1 if it is no token; xt then is the largest one */
COLO_EITHER struct colo_logprob_merged colo_logprob_merge_row(const struct colo_logprob_args *args,
                                                              bool f64, int64_t k, int64_t target)
{
    const colo_logprob_block_t *b = &args->block;
    struct colo_logprob_merged g = {-COLO_STAT_INF, 0, 0, 0, 1, -COLO_STAT_INF, 0, INT64_MAX};
    for (int32_t r = 0; r < args->ranks; r++) {
        const unsigned char *block = args->blocks + r * b->bytes;
        g.m = colo_logprob_alike((const colo_logprob_header_t *)block, &args->header)
                  ? colo_stat_max(g.m, colo_stat_get(block + b->m, f64, k))
                  : COLO_STAT_NAN;
    }
    if (!(g.m > -COLO_STAT_INF))
        return colo_logprob_nothing();
    double sum = 0, u = 0, d = 0, w = 0, q = 0;
    for (int32_t r = 0; r < args->ranks; r++) {
        const unsigned char *block = args->blocks + r * b->bytes;
        const colo_logprob_header_t *header = (const colo_logprob_header_t *)block;
        const int64_t start = header->start, columns = header->columns;
        const double m = colo_stat_get(block + b->m, f64, k), down = m - g.m;
        const bool own_d = b->d >= 0 && (args->own == 0 || r == args->rank);
        const double its = b->w >= 0 ? colo_stat_get(block + b->w, f64, k) : (double)columns;
        w += its;
        if (m == -COLO_STAT_INF) { /* empty: nothing; all -inf: d is -inf */
            d += own_d ? colo_stat_get(block + b->d, f64, k) : 0;
            continue;
        }
        const double c = exp(down), s = colo_stat_get(block + b->s, f64, k),
                     xt = colo_stat_get(block + b->xt, f64, k) + down;
        sum += c * s;
        if (b->u >= 0 && c > 0)
            u += c * (colo_stat_get(block + b->u, f64, k) + down * s);
        if (b->q >= 0)
            q += c * c * colo_stat_get(block + b->q, f64, k);
        if (own_d)
            d += colo_stat_get(block + b->d, f64, k) + its * down;
        if (target < 0 ? xt > g.xt : target >= start && target - start < columns)
            g.xt = xt;
        if (b->arg >= 0 && m == g.m) {
            const int64_t arg = ((const int64_t *)(block + b->arg))[k];
            g.arg = arg < g.arg ? arg : g.arg;
        }
    }
    if (!colo_stat_is_sum(sum))
        return colo_logprob_nothing();
    g.log_sum = log(sum);
    g.h = b->u >= 0 ? colo_stat_at_least_0(g.log_sum - u / sum) : 0;
    g.mean = d / (double)(args->own ? args->own : args->config.logits.vocab);
    g.w = b->w >= 0 ? w / (double)args->config.logits.vocab : 1;
    /* a sum of squares: it leaves fp32 before the sum does */
    g.p2 = q >= (f64 ? 0x1p-1022 : 0x1p-126) && q < COLO_STAT_INF ? q / (sum * sum) : COLO_STAT_NAN;
    g.p2 = g.p2 > 1 ? 1 : g.p2;
    return g;
}

/* The class weight of a legal target, as the rank has it whose column it is */
COLO_EITHER double colo_logprob_target_weight(const struct colo_logprob_args *args, bool f64,
                                              int64_t k, int64_t target)
{
    double w = 0;
    for (int32_t r = 0; r < args->ranks; r++) {
        const unsigned char *block = args->blocks + r * args->block.bytes;
        const colo_logprob_header_t *header = (const colo_logprob_header_t *)block;
        if (target >= header->start && target - header->start < header->columns)
            w = colo_stat_get(block + args->block.wt, f64, k);
    }
    return w;
}

/* w v, of which a weight of 0 leaves nothing, unless it is NaN */
COLO_EITHER double colo_logprob_weighted(double w, double v)
{
    return w == 0 && v == v ? 0 : w * v;
}

/* Writes the outputs and the saved numbers of @token; *valid, *invalid: what it counts as. */
COLO_EITHER void colo_logprob_merge_token(const struct colo_logprob_args *args, int64_t token,
                                          bool *valid, bool *invalid)
{
    const bool f64 = args->dtype == COLO_F64;
    const int64_t target = args->targets[token * args->target_stride];
    const bool legal = target >= 0 && target < args->config.logits.vocab,
               counts = target != args->config.ignore_index;
    struct colo_logprob_merged g = {0, 0, 0, 0, 0, 0, 0, -1};
    double logp = 0, loss = 0, weight = 0;
    *valid = counts && legal;
    *invalid = counts && !legal;
    if (counts) {
        g = colo_logprob_merge_row(args, f64, token - args->block_lo, legal ? target : -1);
        logp = legal ? colo_stat_at_most_0(g.xt - g.log_sum) : COLO_STAT_NAN;
        loss = 0 - logp;                              /* not -0 */
        if (!legal && args->config.lenient_targets) { /* no target term; NaN rows stay NaN */
            logp = isnan(g.m) ? COLO_STAT_NAN : 0;
            loss = colo_stat_at_least_0(g.log_sum - g.xt);
        }
        const bool weighs = args->config.has_class_weight;
        if (weighs && legal)
            weight = colo_logprob_target_weight(args, f64, token - args->block_lo, target);
        loss = weighs && legal ? colo_logprob_weighted(weight, loss) : loss;
        if (args->smoothing > 0)
            loss = (1 - args->smoothing) * loss +
                   args->smoothing * (weighs ? g.w * g.log_sum - g.mean
                                             : colo_stat_at_least_0(g.log_sum - g.mean));
        if (args->config.z_loss > 0) {
            const double lse = g.m + g.log_sum;
            loss += (weighs ? weight : 1) * args->config.z_loss * lse * lse;
        }
    }
    if (args->out.logp)
        colo_stat_put(args->out.logp, f64, token, logp);
    if (args->out.entropy)
        colo_stat_put(args->out.entropy, f64, token, g.h);
    if (args->out.loss)
        colo_stat_put(args->out.loss, f64, token, loss);
    if (args->out.correct)
        args->out.correct[token] = *valid && g.arg == target;
    if (args->out.weight)
        colo_stat_put(args->out.weight, f64, token, weight);
    if (args->out.argmax)
        args->out.argmax[token] = g.arg;
    if (args->out.lse)
        colo_stat_put(args->out.lse, f64, token, g.m + g.log_sum);
    if (args->out.sum_p2)
        colo_stat_put(args->out.sum_p2, f64, token, g.p2);
    if (args->out.mean_logits)
        colo_stat_put(args->out.mean_logits, f64, token, g.m + g.mean);
    if (args->saved) {
        args->saved[token] = g.m;
        args->saved[args->tokens + token] = g.log_sum;
        args->saved[2 * args->tokens + token] = g.h;
        if (args->config.has_class_weight) {
            args->saved[3 * args->tokens + token] = weight;
            args->saved[4 * args->tokens + token] = g.w;
        }
        if (args->config.has_temperature)
            args->saved[(args->config.has_class_weight ? 5 : 3) * args->tokens + token] =
                counts ? colo_logprob_coldness(args, token) : 1;
    }
}

#endif
