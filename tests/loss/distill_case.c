/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill_case.c - see distill_case.h.
 *
 * Tolerances. u as in loss_case.c, D = 1 + log V + range(x), Dv the same of the targets. The six
 * statistics are rounded once each; c and d are sums of q times differences of at most D and D +
 * Dv, s_x and s_v enter through their logarithms, s_v also as the divisor of both. With Q = sum q
 * >= 1:
 *   ce: 4 u Q (D + 1) + u |ce|      kl: 4 u Q (D + Dv + 1) + u |kl|
 * In f64 u -> (V + 16) u and D, Dv + 4 max|x|, 4 max|v|. The gradient is |factor| |g| (Q p + q)
 * times the relative errors of p and q, 4 u (D + Dv) in all, and one rounding to the dtype.
 *
 * Other divergences see the statistics through the normalisers alone, that is, log(p/q) is off by
 * as much as kl of the forward one: a reverse KL is, too, and JSD and TV change by no more than
 * that. Their gradient is p times a number of at most D + Dv, whose error is that, and if TV's sign
 * of a column is not known, twice its p. For -log alpha all is divided by alpha.
 */
#include "loss/distill_case.h"

static colo_status_t run_with(void *arg, gather_rank_t *m)
{
    distill_case_t *c = arg;
    loss_case_t *s = &c->shape;
    const int32_t r = m->rank;
    const size_t line = (size_t)s->tokens * colo_dtype_size(m->stat);
    colo_distill_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    void *out[2], *up[2];
    cfg.logits.vocab_start = s->start[r];
    rank_try(colo_distill_saved_size(&cfg, s->tokens, &stat_bytes));
    rank_try(colo_distill_workspace_size(&cfg, s->dtype, s->tokens, s->ranks, &workspace_bytes));
    colo_tensor_t z = gather_put_shard(m, s->dtype, c->z);
    colo_tensor_t w = gather_put_shard(m, c->target_dtype, c->w);
    colo_tensor_t dz = s->in_place ? z : gather_put_shard(m, s->dtype, NULL);
    colo_tensor_t mask =
        where_tensor(gather_put(m, c->mask, (size_t)s->tokens), COLO_U8, 1, &s->tokens);
    void *heat[2];
    for (int k = 0; k < 2; k++) {
        double own[DISTILL_TOKENS];
        memcpy(own, c->heat[k], sizeof own);
        own[0] += c->other_heat[k] && r == 1;
        heat[k] = gather_put_f32(m, own, s->tokens);
    }
    void *stats = gather_put(m, NULL, stat_bytes),
         *workspace = gather_put(m, NULL, workspace_bytes);
    for (int k = 0; k < 2; k++) {
        up[k] = gather_put_stats(m, c->up[k], s->tokens);
        out[k] = gather_put(m, NULL, line);
    }
    colo_distill_saved_t saved = {COLO_DISTILL_SAVED_INIT};
    colo_comm_stats_reset(m->group);
    rank_try(colo_distill_forward(
        &cfg,
        &(colo_distill_batch_t){
            COLO_DISTILL_BATCH_INIT, .logits = &z, .targets = &w, .mask = c->masked ? &mask : NULL,
            .temperature = WHERE_ARRAY(cfg.has_temperature ? heat[0] : NULL, COLO_F32, s->tokens),
            .target_temperature =
                WHERE_ARRAY(cfg.has_target_temperature ? heat[1] : NULL, COLO_F32, s->tokens)},
        m->group,
        &(colo_distill_out_t){COLO_DISTILL_OUT_INIT, .ce = WHERE_ARRAY(out[0], m->stat, s->tokens),
                              .kl = WHERE_ARRAY(out[1], m->stat, s->tokens)},
        s->forward_only ? NULL : &saved, s->forward_only ? NULL : stats, workspace, NULL));
    t_comm_stats(m->group, &s->after_forward[r]);
    for (int k = 0; k < 2; k++)
        gather_get_stats(m, c->out[r][k], out[k], s->tokens);
    if (s->forward_only)
        return COLO_OK;
    gather_drop(m, workspace); /* free after the call */
    const colo_distill_upstream_t d_out = {
        COLO_DISTILL_UPSTREAM_INIT,
        .d_ce = WHERE_ARRAY(c->no_ce ? NULL : up[0], m->stat, s->tokens),
        .d_kl = WHERE_ARRAY(c->no_kl ? NULL : up[1], m->stat, s->tokens)};
    for (int again = 0; again < (s->in_place ? 1 : 2); again++)
        rank_try(colo_distill_backward(&saved, &d_out, &dz, NULL));
    t_comm_stats(m->group, &s->after_backward[r]);
    gather_get_shard(m, c->dz, dz.data);
    return COLO_OK;
}

void distill_case_init(distill_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, bool probs,
                       colo_dtype_t dtype, colo_dtype_t target_dtype, double spread, uint64_t *rng)
{
    memset(c, 0, sizeof *c);
    c->target_dtype = target_dtype;
    gather_shape(&c->shape, ranks, tokens, vocab, dtype, run_with);
    c->config =
        (colo_distill_config_t){COLO_DISTILL_CONFIG_INIT, .logits.vocab = vocab,
                                .targets = probs ? COLO_DISTILL_PROBS : COLO_DISTILL_LOGITS};
    for (int64_t t = 0; t < tokens; t++) {
        double *z = c->z + t * vocab, *w = c->w + t * vocab, sum = 0;
        for (int64_t j = 0; j < vocab; j++) {
            z[j] = loss_round(dtype, loss_round(COLO_F32, spread * loss_normal(rng)));
            w[j] = z[j] + loss_normal(rng);
            sum += exp(w[j]);
        }
        for (int64_t j = 0; j < vocab; j++) /* a seventh of soft labels is 0 */
            w[j] = loss_round(target_dtype, loss_round(COLO_F32, !probs            ? w[j]
                                                                 : t_below(rng, 7) ? exp(w[j]) / sum
                                                                                   : 0));
        for (int k = 0; k < 2; k++)
            c->up[k][t] = loss_round(COLO_F32, loss_normal(rng));
    }
    memset(c->mask, 1, sizeof c->mask);
}

void distill_case_diverge(distill_case_t *c, colo_divergence_t divergence, double beta)
{
    c->config.divergence = divergence;
    c->config.beta = beta;
    c->shape.second_gather = divergence >= COLO_DIVERGENCE_JSD;
}

void distill_case_heat(distill_case_t *c, bool student, bool teacher)
{
    c->config.has_temperature = student;
    c->config.has_target_temperature = teacher;
    for (int k = 0; k < 2; k++) {
        loss_draw_temperature(c->heat[k], c->shape.tokens);
        for (int64_t t = 0; t < c->shape.tokens; t++)
            c->heat[k][t] =
                c->masked && !c->mask[t] ? NAN : loss_round(COLO_F32, c->heat[k][t] + k);
    }
}

ref_distill_opts_t distill_case_opts(const distill_case_t *c)
{
    return (ref_distill_opts_t){
        .logits = {.temperature = c->config.logits.temperature,
                   .scale = c->config.logits.scale,
                   .softcap = c->config.logits.softcap},
        .probs = c->config.targets == COLO_DISTILL_PROBS,
        .target_temperature = c->config.target_temperature,
        .target_scale = c->config.target_scale,
        .target_softcap = c->config.target_softcap,
        .divergence = (int)c->config.divergence,
        .beta = c->config.beta,
    };
}

static void compare_row(const distill_case_t *c, const char *label, int64_t t)
{
    ref_distill_opts_t o = distill_case_opts(c);
    o.logits.temperature *= c->config.has_temperature ? c->heat[0][t] : 1;
    o.target_temperature *= c->config.has_target_temperature ? c->heat[1][t] : 1;
    const double *z = c->z + t * c->shape.vocab, *w = c->w + t * c->shape.vocab,
                 f = fabs(o.logits.scale / o.logits.temperature), v = (double)c->shape.vocab;
    const bool skip = c->masked && !c->mask[t];
    double dz[DISTILL_VOCAB], u = where.slack * 0x1p-24;
    ref_distill_row_t row;
    ref_distill(&o, z, w, c->shape.vocab, &row);
    double d = 1 + log(v) + row.range, dv = 1 + log(v) + row.target_range;
    const double mass = row.mass > 1 ? row.mass : 1, want[2] = {row.ce, row.kl},
                 by = o.divergence == REF_ACCEPTANCE ? row.alpha : 1,
                 equal = o.divergence >= REF_TV ? row.equal : 0;
    if (c->shape.dtype == COLO_F64) {
        u = where.slack * (v + 16) * 0x1p-53;
        d += 4 * row.top;
        dv += 4 * row.target_top;
    }
    for (int r = 0; r < c->shape.ranks; r++)
        for (int k = 0; k < 2; k++) {
            double e = skip ? 0 : want[k], got = c->out[r][k][t];
            double tol =
                skip ? 0 : 4 * u * mass * (d + 1 + (k ? dv : 0)) / (k ? by : 1) + u * fabs(e);
            if (!(fabs(got - e) <= tol))
                fail_msg("%s: rank %d of %d, token %d: %s is %.17g, expected %.17g within %g",
                         label, r, c->shape.ranks, (int)t, k ? "kl" : "ce", got, e, tol);
            if (memcmp(&got, &c->out[0][k][t], sizeof got) != 0)
                fail_msg("%s: ranks 0 and %d differ in token %d", label, r, (int)t);
        }
    if (c->shape.forward_only)
        return;
    const double g[2] = {c->no_ce ? 0 : c->up[0][t], c->no_kl ? 0 : c->up[1][t]};
    ref_distill_grad(&o, z, w, c->shape.vocab, g[0], g[1], dz);
    for (int64_t j = 0; j < c->shape.vocab; j++) {
        double e = skip ? 0 : dz[j];
        double tol = skip ? 0 : 4 * u * (fabs(g[0]) + fabs(g[1])) * f * mass * (d + dv);
        if (o.divergence != REF_FORWARD)
            tol = skip ? 0 : (tol * (1 + d + dv) + 2 * fabs(g[1]) * f * equal) / by;
        tol += loss_grad_rounding(c->shape.dtype, e, u);
        if (!(fabs(c->dz[t * c->shape.vocab + j] - e) <= tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * c->shape.vocab + j], e, tol);
    }
}

void distill_case_compare(const distill_case_t *c, const char *label)
{
    for (int64_t t = 0; t < c->shape.tokens; t++)
        compare_row(c, label, t);
    gather_check(&c->shape, label);
}
