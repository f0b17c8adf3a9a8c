/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - the kernels of distill-args.h in plain C, in fp64 whatever the dtypes are.
 *
 * Two running maxima, of x and of v, both from -inf; when one grows, the sums that hang on it move.
 * A maximum is rounded to the stat dtype before anything is subtracted from it, because the other
 * ranks and backward get it rounded: else a large offset would cost digits.
 * As in host/logprob.c every (-inf) - (-inf) and 0 * inf that legal input can make is kept away.
 */
#include "loss/distill-args.h"

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
    unsigned char *block = colo_logprob_i_block(&args->base, args->base.rank);
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

static struct row row_of(const struct colo_distill_args *args, int32_t r, int64_t token)
{
    const unsigned char *b = colo_logprob_i_block(&args->base, r);
    const colo_dtype_t stat = args->base.stat_dtype;
    return (struct row){
        colo_scalar_get(stat, b + args->mx, token), colo_scalar_get(stat, b + args->sx, token),
        colo_scalar_get(stat, b + args->mv, token), colo_scalar_get(stat, b + args->sv, token),
        colo_scalar_get(stat, b + args->c, token),  colo_scalar_get(stat, b + args->d, token),
    };
}

struct merged {
    double m, log_sum, mv, log_sum_v, q, ce, kl;
};

static struct merged merge_row(const struct colo_distill_args *args, int64_t token)
{
    const struct merged lost = {NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    double m = -INFINITY, mv = -INFINITY, sum = 0, sum_v = 0, c = 0, d = 0;
    for (int32_t i = 0; i < args->base.ranks; i++) {
        struct row r = row_of(args, i, token);
        const unsigned char *block = colo_logprob_i_block(&args->base, i);
        if (isnan(r.mx) ||
            !colo_logprob_i_alike((const colo_logprob_header_t *)block, &args->base.header))
            return lost;
        m = r.mx > m ? r.mx : m;
        mv = r.mv > mv ? r.mv : mv;
    }
    if (!(m > -INFINITY) || !(mv > -INFINITY))
        return lost;
    for (int32_t i = 0; i < args->base.ranks; i++) {
        const struct row r = row_of(args, i, token);
        const double down_v = r.mv - mv, w = r.mv > -INFINITY ? exp(down_v) : 0,
                     down = base_of(r.mx) - m;
        if (r.mx > -INFINITY)
            sum += exp(r.mx - m) * r.sx;
        if (w > 0 && r.sv > 0) {
            sum_v += w * r.sv;
            c += w * (r.c + down * r.sv);
            d += w * (r.d + (down_v - down) * r.sv);
        }
    }
    struct merged g = {.m = m, .log_sum = log(sum), .q = 1};
    if (args->probs) {
        g.q = sum_v;
        g.ce = g.q * g.log_sum - c;
        g.kl = g.q * g.log_sum + d;
    } else {
        g.mv = mv;
        g.log_sum_v = log(sum_v);
        g.ce = g.log_sum - c / sum_v;
        g.kl = colo_scalar_at_least_0(d / sum_v - g.log_sum_v + g.log_sum);
    }
    g.ce = colo_scalar_at_least_0(g.ce);
    return g;
}

colo_status_t colo_host_distill_merge(const struct colo_distill_args *args, colo_stream_t stream)
{
    const int64_t tokens = args->base.tokens;
    for (int64_t token = 0; token < tokens; token++) {
        struct merged g = {.m = INFINITY};
        if (!args->mask || args->mask[token * args->mask_stride])
            g = merge_row(args, token);
        if (args->out.ce)
            colo_scalar_put(args->base.stat_dtype, args->out.ce, token, g.ce);
        if (args->out.kl)
            colo_scalar_put(args->base.stat_dtype, args->out.kl, token, g.kl);
        if (args->saved) {
            args->saved[token] = g.m;
            args->saved[tokens + token] = g.log_sum;
            args->saved[2 * tokens + token] = g.mv;
            args->saved[3 * tokens + token] = g.log_sum_v;
            args->saved[4 * tokens + token] = g.q;
        }
    }
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
