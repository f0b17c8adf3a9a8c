/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-merge.h (private) - what a token's statistics of all shards become: ce, kl, and what
 * backward reads. The merge kernels of host/distill.c and kernels/distill-stats.cu are loops over
 * this.
 */
#ifndef COLO_LOSS_DISTILL_MERGE_H
#define COLO_LOSS_DISTILL_MERGE_H

#include "loss/distill-args.h"
#include "loss/stat.h"

struct colo_distill_merged {
    double m, log_sum, mv, log_sum_v, q, k, ce, kl;
};

/* What makes x and v of a token's logits and targets. */
struct colo_distill_scaling {
    double factor, cap, target_factor, target_cap;
};

/* 1 / temperature of token @t, NaN if it is none; @of: those of forward, else the merge has saved
 * it */
COLO_EITHER double colo_distill_coldness(const struct colo_distill_args *args, const float *of,
                                         int64_t place, int64_t t)
{
    const double v = of ? (double)of[t] : 0;
    if (!of)
        return args->saved[place * args->saved_stride + t];
    return v > 0 && v < COLO_STAT_INF ? 1 / v : COLO_STAT_NAN;
}

COLO_EITHER struct colo_distill_scaling
colo_distill_scaling_of(const struct colo_distill_args *args, int64_t t)
{
    const int64_t heats = args->base.config.has_temperature;
    const double cold = heats ? colo_distill_coldness(args, args->base.temperature,
                                                      COLO_DISTILL_SAVED, t)
                              : 1,
                 target_cold = args->has_target_temperature
                                   ? colo_distill_coldness(args, args->target_temperature,
                                                           COLO_DISTILL_SAVED + heats, t)
                                   : 1;
    const struct colo_distill_scaling by = {args->base.factor * cold, args->base.cap * cold,
                                            args->target_factor * target_cold,
                                            args->target_cap * target_cold};
    return by;
}

COLO_EITHER double colo_distill_base(double m)
{
    return m > -COLO_STAT_INF ? m : 0;
}

/* e and g of the KL that is asked for, of w and w' by their names in distill-args.h */
struct colo_distill_near {
    double sum, sum_of_other, d, e, g;
};

/* Adds the @rank's sums, whose maxima are @down and @down_other below those of all. */
COLO_EITHER void colo_distill_add_near(struct colo_distill_near *a,
                                       const struct colo_distill_near *rank, double down,
                                       double down_other)
{
    const double w = rank->sum > 0 ? exp(down) : 0,
                 other = rank->sum_of_other > 0 ? exp(down_other) : 0, s = down - down_other;
    if (w > 0 && rank->sum_of_other > 0 && s < 0.5 && s > -0.5) { /* g may be infinite */
        const double up = expm1(-s);
        a->e += w * (rank->e + up * (rank->sum + rank->e));
        a->g += w * (rank->g + colo_stat_expm1_plus(s) * rank->sum + up * rank->e);
    } else {
        const double e = other * rank->sum_of_other - w * rank->sum;
        a->e += e;
        a->g += w > 0 ? w * (rank->d + s * rank->sum) + e : e;
    }
    if (w > 0)
        a->d += w * (rank->d + s * rank->sum);
    a->sum += w * rank->sum;
    a->sum_of_other += other * rank->sum_of_other;
}

/* log of the ratio of the sums, of the other to the first */
COLO_EITHER double colo_distill_log_ratio(const struct colo_distill_near *a)
{
    const double e = a->e / a->sum;
    return e < 0.5 && e > -0.5 ? log1p(e) : log(a->sum_of_other / a->sum);
}

COLO_EITHER double colo_distill_kl(const struct colo_distill_near *a)
{
    const double e = a->e / a->sum;
    return colo_stat_at_least_0(e < 0.5 && e > -0.5
                                    ? a->g / a->sum + colo_stat_log1p_minus(e)
                                    : a->d / a->sum + log(a->sum_of_other / a->sum));
}

COLO_EITHER struct colo_distill_merged colo_distill_merge_row(const struct colo_distill_args *args,
                                                              bool f64, int64_t t)
{
    const bool reverse = args->divergence == COLO_DIVERGENCE_REVERSE_KL;
    double m = -COLO_STAT_INF, mv = -COLO_STAT_INF, sum = 0, sum_v = 0, c = 0, d = 0;
    struct colo_distill_near near = {0, 0, 0, 0, 0};
    struct colo_distill_merged g = {COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN,
                                    COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN, COLO_STAT_NAN};
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
                     sx = colo_stat_get(block + args->sx, f64, t),
                     sv = colo_stat_get(block + args->sv, f64, t), down = colo_distill_base(rx) - m,
                     down_v = colo_distill_base(rv) - mv, w = rv > -COLO_STAT_INF ? exp(down_v) : 0;
        const struct colo_distill_near rank = {
            reverse ? sx : sv, reverse ? sv : sx, colo_stat_get(block + args->d, f64, t),
            colo_stat_get(block + args->e, f64, t), colo_stat_get(block + args->g, f64, t)};
        if (rx > -COLO_STAT_INF)
            sum += exp(down) * sx;
        if (w > 0 && sv > 0) {
            sum_v += w * sv;
            c += w * (colo_stat_get(block + args->c, f64, t) + down * sv);
            d += w * (rank.d + (down_v - down) * sv);
        }
        colo_distill_add_near(&near, &rank, reverse ? down : down_v, reverse ? down_v : down);
    }
    if (!colo_stat_is_sum(sum) || (!args->probs && !colo_stat_is_sum(sum_v)))
        return g;
    g.m = m;
    g.log_sum = log(sum);
    g.k = 0;
    if (args->probs) {
        g.mv = g.log_sum_v = 0;
        g.q = sum_v;
        g.ce = g.q * g.log_sum - c;
        g.kl = g.q * g.log_sum + d;
    } else {
        const double ratio = colo_distill_log_ratio(&near);
        g.mv = mv;
        g.log_sum_v = log(sum_v);
        g.q = 1;
        g.k = reverse ? -ratio : ratio;
        g.ce = g.log_sum - c / sum_v;
        g.kl = colo_distill_kl(&near);
    }
    g.ce = colo_stat_at_least_0(g.ce);
    return g;
}

/* Writes the outputs and the saved numbers of token @t. */
COLO_EITHER void colo_distill_merge_token(const struct colo_distill_args *args, int64_t t)
{
    const bool f64 = args->base.dtype == COLO_F64;
    const int64_t stride = args->saved_stride;
    struct colo_distill_merged g = {COLO_STAT_INF, 0, 0, 0, 0, 0, 0, 0}; /* masked */
    if (!args->mask || args->mask[t * args->mask_stride])
        g = colo_distill_merge_row(args, f64, t);
    if (args->out.ce)
        colo_stat_put(args->out.ce, f64, t, g.ce);
    if (args->out.kl)
        colo_stat_put(args->out.kl, f64, t, g.kl);
    args->saved[t] = g.m;
    args->saved[stride + t] = g.log_sum;
    args->saved[2 * stride + t] = g.mv;
    args->saved[3 * stride + t] = g.log_sum_v;
    args->saved[4 * stride + t] = g.q;
    args->saved[5 * stride + t] = g.k;
    args->saved[6 * stride + t] = g.kl < COLO_STAT_INF ? g.kl : COLO_STAT_NAN;
    args->saved[7 * stride + t] = 1;
    double *cold = args->saved + COLO_DISTILL_SAVED * stride + t;
    if (args->base.temperature) {
        *cold = colo_distill_coldness(args, args->base.temperature, 0, t);
        cold += stride;
    }
    if (args->target_temperature)
        *cold = colo_distill_coldness(args, args->target_temperature, 0, t);
}

/* The same of a divergence whose sums over the shards are args.sums; merge has left the row's. */
COLO_EITHER void colo_distill_finish_token(const struct colo_distill_args *args, int64_t t)
{
    const bool f64 = args->base.dtype == COLO_F64;
    const int64_t tokens = args->base.tokens;
    const double m = args->saved[t];
    double s[COLO_DISTILL_SUMS] = {0, 0, 0, 0}, d = 0, factor = 0;
    for (int32_t r = 0; r < args->base.ranks; r++)
        for (int i = 0; i < COLO_DISTILL_SUMS; i++)
            s[i] += args->sums[(r * COLO_DISTILL_SUMS + i) * tokens + t];
    switch (args->divergence) {
    case COLO_DIVERGENCE_JSD:
        d = s[0];
        factor = 1 - args->beta;
        break;
    case COLO_DIVERGENCE_TV:
        d = s[0] / 2;
        factor = 0.5;
        break;
    default:
        d = s[0] < 1 ? -log1p(-s[0] / 2) : -log(s[2]);
        factor = s[2] > 0 ? 0.5 / s[2] : COLO_STAT_NAN;
    }
    if (m != m)
        d = COLO_STAT_NAN;
    if (m == COLO_STAT_INF)
        d = 0;
    /* near -1 the first has lost digits that the division by a small alpha needs; at -1 the second
     * is not exact, where p is q */
    if (args->divergence != COLO_DIVERGENCE_JSD)
        s[1] = s[3] < 0.5 ? -s[3] : s[1] - 1;
    if (args->out.kl)
        colo_stat_put(args->out.kl, f64, t, d);
    args->saved[6 * args->saved_stride + t] = s[1];
    args->saved[7 * args->saved_stride + t] = factor;
}

/* Of a column of JSD, @t being log(p/q): m = beta q + (1 - beta) p as the shares of the smaller and
 * of the larger one. Neither is made from the other, which has lost it where it rounds to 1. */
struct colo_distill_shares {
    double small, large;
};
COLO_EITHER struct colo_distill_shares colo_distill_shares(const struct colo_distill_args *args,
                                                           double t)
{
    const double p = 1 - args->beta, q = args->beta;
    const struct colo_distill_shares shares = {t > 0 ? q : p, t > 0 ? p : q};
    return shares;
}

/* log of m / the larger one, whose digits near 0 are those of t */
COLO_EITHER double colo_distill_log_mean(struct colo_distill_shares share, double t)
{
    const double down = t > 0 ? -t : t, off = share.small * expm1(down);
    return off > -0.5 ? log1p(off) : log(share.large + share.small * exp(down));
}

/* A column of the second read: adds to the sums. @t: log(p/q), NaN where both are 0. */
COLO_EITHER void colo_distill_pair(const struct colo_distill_args *args, double lp, double lq,
                                   double t, double *s)
{
    const double base = exp(t > 0 ? lp : lq), down = expm1(t > 0 ? -t : t);
    if (t != t)
        return;
    if (args->divergence == COLO_DIVERGENCE_JSD) {
        const struct colo_distill_shares share = colo_distill_shares(args, t);
        const double off = share.small * down,
                     m = off > -0.5 ? 1 + off : share.large + share.small * exp(t > 0 ? -t : t),
                     large = colo_stat_relative_entropy(-off / m),
                     small = colo_stat_relative_entropy(share.large * down / m);
        s[0] += base * m * (share.large * large + share.small * small);
        s[1] += base * m * (t > 0 ? large : small);
        return;
    }
    s[0] -= base * down;
    const double least = exp(t > 0 ? lq : lp);
    if (t != 0)
        s[1] += t > 0 ? base : -least;
    s[2] += least;
    s[3] += t > 0 ? 0 : t < 0 ? 2 * least : least;
}

/* What the gradient of a column of another divergence than forward KL has instead of p - q, by
 * p > 0. */
COLO_EITHER double colo_distill_slope(const struct colo_distill_args *args, double p, double t,
                                      double center, double factor)
{
    double u = t;
    if (args->divergence == COLO_DIVERGENCE_JSD) {
        /* log(p/m) = -log(beta e^-t + 1 - beta) */
        u = (t > 0 ? 0 : t) - colo_distill_log_mean(colo_distill_shares(args, t), t);
    } else if (args->divergence != COLO_DIVERGENCE_REVERSE_KL) {
        u = (t > 0) - (t < 0) - 1;
    }
    return factor * p * (u - center);
}

#endif
