/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - the passes of distill-pass.h in plain C, in fp64 whatever the dtypes are.
 *
 * Two running maxima, of x and of v, both from -inf; when one grows, the sums that hang on it move.
 * As in host/logprob.c every (-inf) - (-inf) and 0 * inf that legal input can make is kept away.
 */
#include "loss/distill-pass.h"

#include "loss/loss.h"
#include "loss/scalar.h"

static double x_of(const struct colo_distill_pass *pass, int64_t t, int64_t j)
{
    double z = colo_scalar_get(pass->base.dtype, pass->base.logits, t * pass->base.row_stride + j);
    return colo_scalar_x(pass->base.dtype, z, pass->base.factor, pass->base.config.logits.softcap);
}

static double target_of(const struct colo_distill_pass *pass, int64_t t, int64_t j)
{
    return colo_scalar_get(pass->target_dtype, pass->targets, t * pass->target_row_stride + j);
}

/* v; NaN when the target is none that may be */
static double v_of(const struct colo_distill_pass *pass, int64_t t, int64_t j)
{
    double w = target_of(pass, t, j);
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

static struct row row_stats(const struct colo_distill_pass *pass, int64_t t)
{
    struct row r = {.mx = -INFINITY, .mv = pass->probs ? 0 : -INFINITY};
    for (int64_t j = 0; j < pass->base.true_columns; j++) {
        const double x = x_of(pass, t, j), v = v_of(pass, t, j);
        if (!(x < INFINITY) || !(v < INFINITY))
            return (struct row){NAN, NAN, NAN, NAN, NAN, NAN};
        if (x > r.mx) {
            const double up = x - base_of(r.mx);
            r.sx *= r.mx > -INFINITY ? exp(-up) : 0;
            r.c -= r.sv > 0 ? up * r.sv : 0;
            r.d += r.sv > 0 ? up * r.sv : 0;
            r.mx = x;
        }
        if (!pass->probs && v > r.mv) {
            const double down = r.mv - v, c = exp(down);
            r.d = c > 0 ? c * (r.d + down * r.sv) : 0;
            r.c = c > 0 ? c * r.c : 0;
            r.sv *= c;
            r.mv = v;
        }
        if (x > -INFINITY)
            r.sx += exp(x - r.mx);
        const double e = v > -INFINITY ? exp(v - r.mv) : 0;
        if (e > 0) {
            r.sv += e;
            r.c += e * (x - base_of(r.mx));
            r.d += e * ((v - r.mv) - (x - base_of(r.mx)));
        }
    }
    return r;
}

colo_status_t colo_host_distill_stats(const struct colo_distill_pass *pass, colo_stream_t stream)
{
    unsigned char *block = colo_logprob_i_block(&pass->base, pass->base.rank);
    const colo_dtype_t stat = pass->base.stat_dtype;
    *(colo_logprob_header_t *)block = pass->base.header;
    for (int64_t t = 0; t < pass->base.tokens; t++) {
        struct row r = {.mx = -INFINITY, .mv = pass->probs ? 0 : -INFINITY};
        if (!pass->mask || pass->mask[t * pass->mask_stride])
            r = row_stats(pass, t);
        colo_scalar_put(stat, block + pass->mx, t, r.mx);
        colo_scalar_put(stat, block + pass->sx, t, r.sx);
        colo_scalar_put(stat, block + pass->mv, t, r.mv);
        colo_scalar_put(stat, block + pass->sv, t, r.sv);
        colo_scalar_put(stat, block + pass->c, t, r.c);
        colo_scalar_put(stat, block + pass->d, t, r.d);
    }
    return COLO_OK;
}

static struct row row_of(const struct colo_distill_pass *pass, int32_t r, int64_t t)
{
    const unsigned char *b = colo_logprob_i_block(&pass->base, r);
    const colo_dtype_t stat = pass->base.stat_dtype;
    return (struct row){
        colo_scalar_get(stat, b + pass->mx, t), colo_scalar_get(stat, b + pass->sx, t),
        colo_scalar_get(stat, b + pass->mv, t), colo_scalar_get(stat, b + pass->sv, t),
        colo_scalar_get(stat, b + pass->c, t),  colo_scalar_get(stat, b + pass->d, t),
    };
}

struct merged {
    double m, log_sum, mv, log_sum_v, q, ce, kl;
};

static struct merged merge_row(const struct colo_distill_pass *pass, int64_t t)
{
    const struct merged lost = {NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    double m = -INFINITY, mv = -INFINITY, sum = 0, sum_v = 0, c = 0, d = 0;
    for (int32_t i = 0; i < pass->base.ranks; i++) {
        struct row r = row_of(pass, i, t);
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
        const struct row r = row_of(pass, i, t);
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
    for (int64_t t = 0; t < tokens; t++) {
        struct merged g = {.m = INFINITY};
        if (!pass->mask || pass->mask[t * pass->mask_stride])
            g = merge_row(pass, t);
        if (pass->out.ce)
            colo_scalar_put(pass->base.stat_dtype, pass->out.ce, t, g.ce);
        if (pass->out.kl)
            colo_scalar_put(pass->base.stat_dtype, pass->out.kl, t, g.kl);
        if (pass->saved) {
            pass->saved[t] = g.m;
            pass->saved[tokens + t] = g.log_sum;
            pass->saved[2 * tokens + t] = g.mv;
            pass->saved[3 * tokens + t] = g.log_sum_v;
            pass->saved[4 * tokens + t] = g.q;
        }
    }
    return COLO_OK;
}

static double upstream(const struct colo_distill_pass *pass, int64_t t)
{
    double g =
        pass->upstream.d_ce ? colo_scalar_get(pass->base.stat_dtype, pass->upstream.d_ce, t) : 0;
    if (pass->upstream.d_kl)
        g += colo_scalar_get(pass->base.stat_dtype, pass->upstream.d_kl, t);
    return g;
}

static double slope(const struct colo_distill_pass *pass, double x)
{
    const double cap = pass->base.config.logits.softcap;
    return pass->base.factor * (cap > 0 ? 1 - (x / cap) * (x / cap) : 1);
}

colo_status_t colo_host_distill_grad(const struct colo_distill_pass *pass, colo_stream_t stream)
{
    const int64_t tokens = pass->base.tokens;
    for (int64_t t = 0; t < tokens; t++) {
        const double m = pass->saved[t], log_sum = pass->saved[tokens + t],
                     mv = pass->saved[2 * tokens + t], log_sum_v = pass->saved[3 * tokens + t],
                     q_all = pass->saved[4 * tokens + t], g = m < INFINITY ? upstream(pass, t) : 0;
        for (int64_t j = 0; j < pass->base.columns; j++) {
            double dz = 0;
            if (isnan(m)) {
                dz = NAN;
            } else if (m < INFINITY && j < pass->base.true_columns) {
                const double x = x_of(pass, t, j);
                const double q =
                    pass->probs ? target_of(pass, t, j) : exp(v_of(pass, t, j) - mv - log_sum_v);
                dz = g * (q_all * exp(x - m - log_sum) - q) * slope(pass, x);
            }
            if (j >= pass->base.true_columns)
                dz = 0;
            colo_scalar_put(pass->base.dtype, pass->base.d_logits, t * pass->base.d_row_stride + j,
                            dz);
        }
    }
    return COLO_OK;
}
