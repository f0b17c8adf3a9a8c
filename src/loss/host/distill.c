/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - the kernels of distill-args.h in plain C, in fp64 whatever the dtypes are.
 *
 * A row is read twice, for the maxima and for the sums that hang on them. A maximum is rounded to
 * the stat dtype before anything is subtracted from it, because the other ranks and backward get it
 * rounded: else a large offset would cost digits.
 * As in host/logprob.c every (-inf) - (-inf) and 0 * inf that legal input can make is kept away.
 */
#include "loss/distill-merge.h"

#include "loss/loss.h"
#include "loss/scalar.h"

static double x_of(const struct colo_distill_args *args, struct colo_distill_scaling by,
                   int64_t token, int64_t j)
{
    double z =
        colo_scalar_get(args->base.dtype, args->base.logits, token * args->base.row_stride + j);
    return colo_scalar_x(args->base.dtype, z, by.factor, by.cap);
}

static double target_of(const struct colo_distill_args *args, int64_t token, int64_t j)
{
    return colo_scalar_get(args->target_dtype, args->targets, token * args->target_row_stride + j);
}

/* v; NaN when the target is none that may be */
static double v_of(const struct colo_distill_args *args, struct colo_distill_scaling by,
                   int64_t token, int64_t j)
{
    double w = target_of(args, token, j);
    if (args->probs)
        return w >= 0 && w < INFINITY ? log(w) : NAN;
    return colo_scalar_x(args->base.dtype, w, by.target_factor, by.target_cap);
}

struct row {
    double mx, sx, mv, sv, c;
    struct colo_distill_near near;
};

/* A column's part in d, e and g; @of and @other are relative to their maxima, @w is e^of or 0. */
static void add_near(struct colo_distill_near *near, double w, double of, double other)
{
    const double r = of - other, down = other > -INFINITY ? exp(other) : 0;
    if (w > 0 && fabs(r) < 1) {
        near->d += w * r;
        near->e += w * expm1(-r);
        near->g += w * colo_stat_expm1_plus(r);
    } else {
        near->d += w > 0 ? w * r : 0;
        near->e += down - w;
        near->g += (w > 0 ? w * r : 0) + (down - w);
    }
}

/* Two reads: the second has the maxima. */
static struct row row_stats(const struct colo_distill_args *args, int64_t token)
{
    const colo_dtype_t stat = args->base.stat_dtype;
    const struct colo_distill_scaling by = colo_distill_scaling_of(args, token);
    struct row row = {.mx = -INFINITY, .mv = args->probs ? 0 : -INFINITY};
    for (int64_t j = 0; j < args->base.true_columns; j++) {
        const double x = x_of(args, by, token, j), v = v_of(args, by, token, j);
        if (!(x < INFINITY) || !(v < INFINITY))
            return (struct row){NAN, NAN, NAN, NAN, NAN, {NAN, NAN, NAN, NAN, NAN}};
        row.mx = fmax(row.mx, colo_scalar_round(stat, x));
        if (!args->probs)
            row.mv = fmax(row.mv, colo_scalar_round(stat, v));
    }
    const double bx = colo_distill_base(row.mx), bv = colo_distill_base(row.mv);
    for (int64_t j = 0; j < args->base.true_columns; j++) {
        const double x = x_of(args, by, token, j) - bx, v = v_of(args, by, token, j) - bv,
                     p = x > -INFINITY ? exp(x) : 0, q = v > -INFINITY ? exp(v) : 0;
        row.sx += p;
        row.sv += q;
        row.c += q > 0 ? q * x : 0;
        if (args->divergence == COLO_DIVERGENCE_REVERSE_KL)
            add_near(&row.near, p, x, v);
        else
            add_near(&row.near, q, v, x);
    }
    return row;
}

colo_status_t colo_host_distill_stats(const struct colo_distill_args *args, colo_stream_t stream)
{
    unsigned char *block = colo_logprob_block_of(&args->base, args->base.rank);
    const colo_dtype_t stat = args->base.stat_dtype;
    *(colo_logprob_header_t *)block = args->base.header;
    for (int64_t token = 0; token < args->base.tokens; token++) {
        struct row row = {.mx = -INFINITY, .mv = args->probs ? 0 : -INFINITY};
        if (!args->mask || args->mask[token * args->mask_stride])
            row = row_stats(args, token);
        colo_scalar_put(stat, block + args->mx, token, row.mx);
        colo_scalar_put(stat, block + args->sx, token, row.sx);
        colo_scalar_put(stat, block + args->mv, token, row.mv);
        colo_scalar_put(stat, block + args->sv, token, row.sv);
        colo_scalar_put(stat, block + args->c, token, row.c);
        colo_scalar_put(stat, block + args->d, token, row.near.d);
        colo_scalar_put(stat, block + args->e, token, row.near.e);
        colo_scalar_put(stat, block + args->g, token, row.near.g);
    }
    return COLO_OK;
}

colo_status_t colo_host_distill_merge(const struct colo_distill_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++)
        colo_distill_merge_token(args, token);
    return COLO_OK;
}

static double saved_of(const struct colo_distill_args *args, int i, int64_t token)
{
    return args->saved[i * args->saved_stride + token];
}

colo_status_t colo_host_distill_pairs(const struct colo_distill_args *args, colo_stream_t stream)
{
    const int64_t tokens = args->base.tokens;
    double *sums = args->sums + args->base.rank * COLO_DISTILL_SUMS * tokens;
    for (int64_t token = 0; token < tokens; token++) {
        const double m = saved_of(args, 0, token), log_sum = saved_of(args, 1, token),
                     mv = saved_of(args, 2, token), log_sum_v = saved_of(args, 3, token),
                     k = saved_of(args, 5, token);
        const struct colo_distill_scaling by = colo_distill_scaling_of(args, token);
        double s[COLO_DISTILL_SUMS] = {0, 0, 0, 0};
        for (int64_t j = 0; m < INFINITY && j < args->base.true_columns; j++) {
            const double x = x_of(args, by, token, j) - m, v = v_of(args, by, token, j) - mv;
            colo_distill_pair(args, x - log_sum, v - log_sum_v, x - v - k, s);
        }
        for (int i = 0; i < COLO_DISTILL_SUMS; i++)
            sums[i * tokens + token] = s[i];
    }
    return COLO_OK;
}

colo_status_t colo_host_distill_finish(const struct colo_distill_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++)
        colo_distill_finish_token(args, token);
    return COLO_OK;
}

static double upstream(const struct colo_distill_args *args, const void *from, int64_t token)
{
    return from ? colo_scalar_get(args->base.stat_dtype, from, token) : 0;
}

static double slope(struct colo_distill_scaling by, double x)
{
    return by.factor * (by.cap > 0 ? 1 - (x / by.cap) * (x / by.cap) : 1);
}

colo_status_t colo_host_distill_grad(const struct colo_distill_args *args, colo_stream_t stream)
{
    const bool forward = args->divergence == COLO_DIVERGENCE_FORWARD_KL;
    for (int64_t token = 0; token < args->base.tokens; token++) {
        const double m = saved_of(args, 0, token), log_sum = saved_of(args, 1, token),
                     mv = saved_of(args, 2, token), log_sum_v = saved_of(args, 3, token),
                     q_all = saved_of(args, 4, token), k = saved_of(args, 5, token),
                     center = saved_of(args, 6, token), factor = saved_of(args, 7, token),
                     up = m < INFINITY ? upstream(args, args->upstream.d_kl, token) : 0,
                     g = m < INFINITY ? upstream(args, args->upstream.d_ce, token) : 0;
        const struct colo_distill_scaling by = colo_distill_scaling_of(args, token);
        for (int64_t j = 0; j < args->base.columns; j++) {
            double dz = 0;
            if (isnan(m)) {
                dz = NAN;
            } else if (m < INFINITY && j < args->base.true_columns) {
                const double x = x_of(args, by, token, j);
                const double p = exp(x - m - log_sum),
                             q = args->probs ? target_of(args, token, j)
                                             : exp(v_of(args, by, token, j) - mv - log_sum_v);
                dz = (forward ? g + up : g) * (q_all * p - q);
                if (!forward && up != 0 && p > 0) /* else there is no slope to ask for */
                    dz += up * colo_distill_slope(args, p,
                                                  (x - m) - (v_of(args, by, token, j) - mv) - k,
                                                  center, factor);
                dz *= slope(by, x);
            }
            if (j >= args->base.true_columns)
                dz = 0;
            colo_scalar_put(args->base.d_dtype, args->base.d_logits,
                            token * args->base.d_row_stride + j, dz);
        }
    }
    return COLO_OK;
}
