/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - the passes of distill-pass.h in plain C, in fp64 whatever the dtypes are.
 *
 * Two running maxima, of x and of v, both from -inf; when one grows, the sums that hang on it move.
 * A maximum is rounded to the stat dtype before anything is subtracted from it, because the other
 * ranks and backward get it rounded: else a large offset would cost digits.
 * As in host/logprob.c every (-inf) - (-inf) and 0 * inf that legal input can make is kept away.
 */
#include "loss/distill-pass.h"

#include "loss/loss.h"
#include "loss/scalar.h"

static double x_of(const struct colo_distill_pass *pass, int64_t token, int64_t j)
{
    double z =
        colo_scalar_get(pass->base.dtype, pass->base.logits, token * pass->base.row_stride + j);
    return colo_scalar_x(pass->base.dtype, z, pass->base.factor, pass->base.cap);
}

static double target_of(const struct colo_distill_pass *pass, int64_t token, int64_t j)
{
    return colo_scalar_get(pass->target_dtype, pass->targets, token * pass->target_row_stride + j);
}

/* v; NaN when the target is none that may be */
static double v_of(const struct colo_distill_pass *pass, int64_t token, int64_t j)
{
    double w = target_of(pass, token, j);
    if (pass->probs)
        return w >= 0 && w < INFINITY ? log(w) : NAN;
    return colo_scalar_x(pass->base.dtype, w, pass->target_factor, 0);
}

struct row {
    double mx, sx, mv, sv, c, d;
};

static double base_of(double m)
{
    return m > -INFINITY ? m : 0;
}

static struct row row_stats(const struct colo_distill_pass *pass, int64_t token)
{
    const colo_dtype_t stat = pass->base.stat_dtype;
    struct row row = {.mx = -INFINITY, .mv = pass->probs ? 0 : -INFINITY};
    for (int64_t j = 0; j < pass->base.true_columns; j++) {
        const double x = x_of(pass, token, j), v = v_of(pass, token, j);
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
        if (!pass->probs && top_v > row.mv) {
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

colo_status_t colo_host_distill_stats(const struct colo_distill_pass *pass, colo_stream_t stream)
{
    unsigned char *block = colo_logprob_i_block(&pass->base, pass->base.rank);
    const colo_dtype_t stat = pass->base.stat_dtype;
    *(colo_logprob_header_t *)block = pass->base.header;
    for (int64_t token = 0; token < pass->base.tokens; token++) {
        struct row row = {.mx = -INFINITY, .mv = pass->probs ? 0 : -INFINITY};
        if (!pass->mask || pass->mask[token * pass->mask_stride])
            row = row_stats(pass, token);
        colo_scalar_put(stat, block + pass->mx, token, row.mx);
        colo_scalar_put(stat, block + pass->sx, token, row.sx);
        colo_scalar_put(stat, block + pass->mv, token, row.mv);
        colo_scalar_put(stat, block + pass->sv, token, row.sv);
        colo_scalar_put(stat, block + pass->c, token, row.c);
        colo_scalar_put(stat, block + pass->d, token, row.d);
    }
    return COLO_OK;
}

static struct row row_of(const struct colo_distill_pass *pass, int32_t r, int64_t token)
{
    const unsigned char *b = colo_logprob_i_block(&pass->base, r);
    const colo_dtype_t stat = pass->base.stat_dtype;
    return (struct row){
        colo_scalar_get(stat, b + pass->mx, token), colo_scalar_get(stat, b + pass->sx, token),
        colo_scalar_get(stat, b + pass->mv, token), colo_scalar_get(stat, b + pass->sv, token),
        colo_scalar_get(stat, b + pass->c, token),  colo_scalar_get(stat, b + pass->d, token),
    };
}

struct merged {
    double m, log_sum, mv, log_sum_v, q, ce, kl;
};

static struct merged merge_row(const struct colo_distill_pass *pass, int64_t token)
{
    const struct merged lost = {NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    double m = -INFINITY, mv = -INFINITY, sum = 0, sum_v = 0, c = 0, d = 0;
    for (int32_t i = 0; i < pass->base.ranks; i++) {
        struct row r = row_of(pass, i, token);
        const unsigned char *block = colo_logprob_i_block(&pass->base, i);
        if (isnan(r.mx) ||
            !colo_logprob_i_alike((const colo_logprob_header_t *)block, &pass->base.header))
            return lost;
        m = r.mx > m ? r.mx : m;
        mv = r.mv > mv ? r.mv : mv;
    }
    if (!(m > -INFINITY) || !(mv > -INFINITY))
        return lost;
    for (int32_t i = 0; i < pass->base.ranks; i++) {
        const struct row r = row_of(pass, i, token);
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
    if (pass->probs) {
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

colo_status_t colo_host_distill_merge(const struct colo_distill_pass *pass, colo_stream_t stream)
{
    const int64_t tokens = pass->base.tokens;
    for (int64_t token = 0; token < tokens; token++) {
        struct merged g = {.m = INFINITY};
        if (!pass->mask || pass->mask[token * pass->mask_stride])
            g = merge_row(pass, token);
        if (pass->out.ce)
            colo_scalar_put(pass->base.stat_dtype, pass->out.ce, token, g.ce);
        if (pass->out.kl)
            colo_scalar_put(pass->base.stat_dtype, pass->out.kl, token, g.kl);
        if (pass->saved) {
            pass->saved[token] = g.m;
            pass->saved[tokens + token] = g.log_sum;
            pass->saved[2 * tokens + token] = g.mv;
            pass->saved[3 * tokens + token] = g.log_sum_v;
            pass->saved[4 * tokens + token] = g.q;
        }
    }
    return COLO_OK;
}

static double upstream(const struct colo_distill_pass *pass, int64_t token)
{
    double g = pass->upstream.d_ce
                   ? colo_scalar_get(pass->base.stat_dtype, pass->upstream.d_ce, token)
                   : 0;
    if (pass->upstream.d_kl)
        g += colo_scalar_get(pass->base.stat_dtype, pass->upstream.d_kl, token);
    return g;
}

static double slope(const struct colo_distill_pass *pass, double x)
{
    const double cap = pass->base.cap;
    return pass->base.factor * (cap > 0 ? 1 - (x / cap) * (x / cap) : 1);
}

colo_status_t colo_host_distill_grad(const struct colo_distill_pass *pass, colo_stream_t stream)
{
    const int64_t tokens = pass->base.tokens;
    for (int64_t token = 0; token < tokens; token++) {
        const double m = pass->saved[token], log_sum = pass->saved[tokens + token],
                     mv = pass->saved[2 * tokens + token],
                     log_sum_v = pass->saved[3 * tokens + token],
                     q_all = pass->saved[4 * tokens + token],
                     g = m < INFINITY ? upstream(pass, token) : 0;
        for (int64_t j = 0; j < pass->base.columns; j++) {
            double dz = 0;
            if (isnan(m)) {
                dz = NAN;
            } else if (m < INFINITY && j < pass->base.true_columns) {
                const double x = x_of(pass, token, j);
                const double q = pass->probs ? target_of(pass, token, j)
                                             : exp(v_of(pass, token, j) - mv - log_sum_v);
                dz = g * (q_all * exp(x - m - log_sum) - q) * slope(pass, x);
            }
            if (j >= pass->base.true_columns)
                dz = 0;
            colo_scalar_put(pass->base.dtype, pass->base.d_logits,
                            token * pass->base.d_row_stride + j, dz);
        }
    }
    return COLO_OK;
}
