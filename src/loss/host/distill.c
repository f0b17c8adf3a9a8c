/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - the kernels of distill-args.h in plain C, in fp64 whatever the dtypes are.
 *
 * Two running maxima, of x and of v, both from -inf; when one grows, the sums that hang on it move.
 * A maximum is rounded to the stat dtype before anything is subtracted from it, because the other
 * ranks and backward get it rounded: else a large offset would cost digits.
 * As in host/logprob.c every (-inf) - (-inf) and 0 * inf that legal input can make is kept away.
 */
#include "loss/distill-merge.h"

#include "loss/loss.h"
#include "loss/scalar.h"

static double x_of(const struct colo_distill_args *args, int64_t token, int64_t j)
{
    double z =
        colo_scalar_get(args->base.dtype, args->base.logits, token * args->base.row_stride + j);
    return colo_scalar_x(args->base.dtype, z, args->base.factor, args->base.cap);
}

static double target_of(const struct colo_distill_args *args, int64_t token, int64_t j)
{
    return colo_scalar_get(args->target_dtype, args->targets, token * args->target_row_stride + j);
}

/* v; NaN when the target is none that may be */
static double v_of(const struct colo_distill_args *args, int64_t token, int64_t j)
{
    double w = target_of(args, token, j);
    if (args->probs)
        return w >= 0 && w < INFINITY ? log(w) : NAN;
    return colo_scalar_x(args->base.dtype, w, args->target_factor, 0);
}

struct row {
    double mx, sx, mv, sv, c, d;
};

static double base_of(double m)
{
    return m > -INFINITY ? m : 0;
}

static struct row row_stats(const struct colo_distill_args *args, int64_t token)
{
    const colo_dtype_t stat = args->base.stat_dtype;
    struct row row = {.mx = -INFINITY, .mv = args->probs ? 0 : -INFINITY};
    for (int64_t j = 0; j < args->base.true_columns; j++) {
        const double x = x_of(args, token, j), v = v_of(args, token, j);
        const double top = colo_scalar_round(stat, x), top_v = colo_scalar_round(stat, v);
        if (!(x < INFINITY) || !(v < INFINITY))
            return (struct row){NAN, NAN, NAN, NAN, NAN, NAN};
        if (top > row.mx) {
            const double up = top - base_of(row.mx);
            row.sx *= row.mx > -INFINITY ? exp(-up) : 0;
            row.c -= row.sv > 0 ? up * row.sv : 0;
            row.d += row.sv > 0 ? up * row.sv : 0;
            row.mx = top;
        }
        if (!args->probs && top_v > row.mv) {
            const double down = row.mv - top_v, c = exp(down);
            row.d = c > 0 ? c * (row.d + down * row.sv) : 0;
            row.c = c > 0 ? c * row.c : 0;
            row.sv *= c;
            row.mv = top_v;
        }
        if (x > -INFINITY)
            row.sx += exp(x - row.mx);
        const double e = v > -INFINITY ? exp(v - row.mv) : 0;
        if (e > 0) {
            row.sv += e;
            row.c += e * (x - base_of(row.mx));
            row.d += e * ((v - row.mv) - (x - base_of(row.mx)));
        }
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
        colo_scalar_put(stat, block + args->d, token, row.d);
    }
    return COLO_OK;
}

colo_status_t colo_host_distill_merge(const struct colo_distill_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++)
        colo_distill_merge_token(args, token);
    return COLO_OK;
}

static double upstream(const struct colo_distill_args *args, int64_t token)
{
    double g = args->upstream.d_ce
                   ? colo_scalar_get(args->base.stat_dtype, args->upstream.d_ce, token)
                   : 0;
    if (args->upstream.d_kl)
        g += colo_scalar_get(args->base.stat_dtype, args->upstream.d_kl, token);
    return g;
}

static double slope(const struct colo_distill_args *args, double x)
{
    const double cap = args->base.cap;
    return args->base.factor * (cap > 0 ? 1 - (x / cap) * (x / cap) : 1);
}

colo_status_t colo_host_distill_grad(const struct colo_distill_args *args, colo_stream_t stream)
{
    const int64_t tokens = args->base.tokens;
    for (int64_t token = 0; token < tokens; token++) {
        const double m = args->saved[token], log_sum = args->saved[tokens + token],
                     mv = args->saved[2 * tokens + token],
                     log_sum_v = args->saved[3 * tokens + token],
                     q_all = args->saved[4 * tokens + token],
                     g = m < INFINITY ? upstream(args, token) : 0;
        for (int64_t j = 0; j < args->base.columns; j++) {
            double dz = 0;
            if (isnan(m)) {
                dz = NAN;
            } else if (m < INFINITY && j < args->base.true_columns) {
                const double x = x_of(args, token, j);
                const double q = args->probs ? target_of(args, token, j)
                                             : exp(v_of(args, token, j) - mv - log_sum_v);
                dz = g * (q_all * exp(x - m - log_sum) - q) * slope(args, x);
            }
            if (j >= args->base.true_columns)
                dz = 0;
            colo_scalar_put(args->base.dtype, args->base.d_logits,
                            token * args->base.d_row_stride + j, dz);
        }
    }
    return COLO_OK;
}
