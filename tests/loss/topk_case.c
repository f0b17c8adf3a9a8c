/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk_case.c - see topk_case.h.
 *
 * Tolerances: those of loss_case.c, whose logp this is, with |g| = sum of a token's |g_i|; the sum
 * itself is rounded once to the stat dtype (u |g| p, within the same 4 u D |g|). log p_tail is the
 * difference of two such logarithms, and p_j / p_tail one of two such numbers: 8 u D.
 */
#include "loss/topk_case.h"

static colo_status_t run_with(void *arg, gather_rank_t *m)
{
    topk_case_t *c = arg;
    loss_case_t *s = &c->shape;
    const int32_t r = m->rank;
    const int64_t n = s->tokens * c->config.k;
    colo_topk_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    cfg.logits.vocab_start = s->start[r];
    rank_try(colo_topk_saved_size(&cfg, s->tokens, &stat_bytes));
    rank_try(colo_topk_workspace_size(&cfg, s->dtype, s->tokens, s->ranks, &workspace_bytes));
    colo_tensor_t z = gather_put_shard(m, s->dtype, c->z);
    colo_tensor_t dz = s->in_place ? z : gather_put_shard(m, s->dtype, NULL);
    void *stats = gather_put(m, NULL, stat_bytes), *up = gather_put_stats(m, c->up, n),
         *workspace = gather_put(m, NULL, workspace_bytes),
         *chosen = gather_put(m, NULL, (size_t)n * 8);
    colo_tensor_t ids = where_tensor(gather_put(m, c->ids, (size_t)n * 8), COLO_I64, 2,
                                     (int64_t[]){s->tokens, cfg.k});
    colo_tensor_t mask =
        where_tensor(gather_put(m, c->mask, (size_t)s->tokens), COLO_U8, 1, &s->tokens);
    double own[TOPK_TOKENS];
    memcpy(own, c->heat, sizeof own);
    own[0] += c->other_heat && r == 1;
    void *heat = gather_put_f32(m, own, s->tokens);
    void *logp = gather_put(m, NULL, (size_t)n * colo_dtype_size(m->stat)),
         *n_invalid = gather_put(m, NULL, 8), *up_tail = gather_put_stats(m, c->up_tail, s->tokens),
         *tail = gather_put(m, NULL, (size_t)s->tokens * colo_dtype_size(m->stat));
    const colo_topk_out_t out = {
        COLO_TOPK_OUT_INIT, .logp = WHERE_ARRAY(logp, m->stat, s->tokens, cfg.k),
        .n_invalid = WHERE_ARRAY(n_invalid, COLO_I64, 1),
        .tail = WHERE_ARRAY(cfg.want_tail ? tail : NULL, m->stat, s->tokens),
        .ids = cfg.topk ? WHERE_ARRAY(chosen, COLO_I64, s->tokens, cfg.k) : NULL};
    const colo_topk_upstream_t d_out = {
        COLO_TOPK_UPSTREAM_INIT, .d_logp = WHERE_ARRAY(up, m->stat, s->tokens, cfg.k),
        .d_tail = WHERE_ARRAY(cfg.want_tail ? up_tail : NULL, m->stat, s->tokens)};
    colo_topk_saved_t saved = {COLO_TOPK_SAVED_INIT};
    colo_comm_stats_reset(m->group);
    rank_try(colo_topk_forward(
        &cfg,
        &(colo_topk_batch_t){
            COLO_TOPK_BATCH_INIT, .logits = &z, .ids = cfg.topk ? NULL : &ids,
            .mask = c->masked ? &mask : NULL,
            .temperature = WHERE_ARRAY(cfg.has_temperature ? heat : NULL, COLO_F32, s->tokens)},
        m->group, &out, s->forward_only ? NULL : &saved, s->forward_only ? NULL : stats, workspace,
        NULL));
    t_comm_stats(m->group, &s->after_forward[r]);
    gather_get_stats(m, c->logp[r], logp, n);
    if (cfg.want_tail)
        gather_get_stats(m, c->tail[r], tail, s->tokens);
    where.get(c->got[r], chosen, (size_t)n * 8);
    where.get(&c->n_invalid[r], n_invalid, 8);
    if (s->forward_only)
        return COLO_OK;
    gather_drop(m, workspace); /* free after the call */
    for (int again = 0; again < (s->in_place ? 1 : 2); again++)
        rank_try(colo_topk_backward(&saved, &d_out, &dz, NULL));
    t_comm_stats(m->group, &s->after_backward[r]);
    gather_get_shard(m, c->dz, dz.data);
    return COLO_OK;
}

void topk_case_init(topk_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, int64_t k,
                    bool topk, colo_dtype_t dtype, double spread, uint64_t *rng)
{
    memset(c, 0, sizeof *c);
    gather_shape(&c->shape, ranks, tokens, vocab, dtype, run_with);
    c->config =
        (colo_topk_config_t){COLO_TOPK_CONFIG_INIT, .logits.vocab = vocab, .k = k, .topk = topk};
    for (int64_t i = 0; i < tokens * vocab; i++)
        c->z[i] = loss_round(dtype, loss_round(COLO_F32, spread * loss_normal(rng)));
    for (int64_t i = 0; i < tokens * k; i++) {
        c->ids[i] = t_below(rng, vocab);
        c->up[i] = loss_round(COLO_F32, 4 * t_uniform(rng) - 2);
    }
    memset(c->mask, 1, sizeof c->mask);
}

void topk_case_tail(topk_case_t *c, uint64_t *rng)
{
    const int64_t k = c->config.k, vocab = c->shape.vocab;
    c->config.want_tail = true;
    for (int64_t t = 0; t < c->shape.tokens; t++) {
        const int64_t start = t_below(rng, vocab), step = vocab % 7 ? 7 : 1;
        for (int64_t i = 0; i < k; i++)
            c->ids[t * k + i] = (start + step * i) % vocab;
        c->up_tail[t] = loss_round(COLO_F32, 4 * t_uniform(rng) - 2);
    }
}

void topk_case_heat(topk_case_t *c)
{
    c->config.has_temperature = 1;
    loss_draw_temperature(c->heat, c->shape.tokens);
    for (int64_t t = 0; t < c->shape.tokens; t++)
        c->heat[t] = c->masked && !c->mask[t] ? NAN : c->heat[t];
}

ref_logprob_opts_t topk_case_opts(const topk_case_t *c)
{
    return (ref_logprob_opts_t){.temperature = c->config.logits.temperature,
                                .scale = c->config.logits.scale,
                                .softcap = c->config.logits.softcap,
                                .ignore_index = INT64_MIN};
}

static void compare_row(const topk_case_t *c, const char *label, int64_t t)
{
    ref_logprob_opts_t o = topk_case_opts(c);
    o.temperature *= c->config.has_temperature && !isnan(c->heat[t]) ? c->heat[t] : 1;
    const double *z = c->z + t * c->shape.vocab, f = fabs(o.scale / o.temperature);
    const int64_t k = c->config.k, v = c->shape.vocab;
    const bool skip = c->masked && !c->mask[t];
    const colo_dtype_t dtype = c->shape.dtype;
    int64_t ids[TOPK_K];
    double dz[TOPK_VOCAB], g[TOPK_K], size = 0, u = where.slack * 0x1p-24, d = 0;
    bool lost = false;
    ref_logprob_row_t row;
    ref_topk_largest(&o, z, v, c->config.topk ? k : 0, ids);
    ref_logprob(&o, z, v, 0, &row);
    d = 1 + log((double)v) + row.range;
    if (dtype == COLO_F64) {
        u = where.slack * ((double)v + 16) * 0x1p-53;
        d += 4 * row.top;
    }
    for (int64_t i = 0; i < k; i++) {
        const int64_t index = t * k + i;
        int64_t id = c->config.topk ? ids[i] : c->ids[index];
        bool none = skip || (!c->config.topk && id == c->config.ignore_index);
        bool bad = !none && (id < 0 || id >= v);
        double want = bad ? NAN : 0;
        if (!none && !bad) {
            ref_logprob(&o, z, v, id, &row);
            want = row.logp;
        }
        lost = lost || bad;
        ids[i] = none || bad ? -1 : id;
        g[i] = c->up[index];
        size += none ? 0 : fabs(g[i]);
        for (int r = 0; r < c->shape.ranks; r++) {
            if (c->config.topk && c->got[r][index] != ids[i])
                fail_msg("%s: rank %d, token %d: pick %d is %lld, expected %lld", label, r, (int)t,
                         (int)i, (long long)c->got[r][index], (long long)ids[i]);
            if (!near(c->logp[r][index], want, 4 * u * d + u * fabs(want)))
                fail_msg("%s: rank %d of %d, token %d: logp of pick %d is %.17g, expected %.17g",
                         label, r, c->shape.ranks, (int)t, (int)i, c->logp[r][index], want);
            if (memcmp(&c->logp[r][index], &c->logp[0][index], sizeof(double)) != 0)
                fail_msg("%s: ranks 0 and %d differ in token %d", label, r, (int)t);
        }
    }
    bool asks = false;
    for (int64_t i = 0; i < k; i++)
        asks = asks || ids[i] >= 0;
    const bool tail = c->config.want_tail && asks;
    for (int r = 0; r < c->shape.ranks && c->config.want_tail; r++) {
        const double want = tail ? ref_topk_tail(&o, z, v, ids, k, 0, NULL) : 0;
        if (!near(c->tail[r][t], want, 8 * u * d + u * fabs(want)))
            fail_msg("%s: rank %d of %d, token %d: log p_tail is %.17g, expected %.17g", label, r,
                     c->shape.ranks, (int)t, c->tail[r][t], want);
    }
    if (c->shape.forward_only)
        return;
    ref_topk_grad(&o, z, v, ids, g, k, dz);
    if (tail) {
        ref_topk_tail(&o, z, v, ids, k, c->up_tail[t], dz);
        size = 2 * (size + fabs(c->up_tail[t]));
    }
    for (int64_t j = 0; j < v; j++) {
        double want = lost ? NAN : dz[j];
        double tol = 4 * u * size * d * f + loss_grad_rounding(dtype, want, u);
        if (!near(c->dz[t * v + j], want, tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * v + j], want, tol);
    }
}

void topk_case_compare(const topk_case_t *c, const char *label)
{
    int64_t invalid = 0;
    for (int64_t t = 0; t < c->shape.tokens; t++) {
        compare_row(c, label, t);
        for (int64_t i = 0; i < c->config.k && !c->config.topk; i++) {
            int64_t id = c->ids[t * c->config.k + i];
            invalid += !(c->masked && !c->mask[t]) && id != c->config.ignore_index &&
                       (id < 0 || id >= c->shape.vocab);
        }
    }
    for (int r = 0; r < c->shape.ranks; r++)
        if (c->n_invalid[r] != invalid)
            fail_msg("%s: rank %d counts %d invalid ids, expected %d", label, r,
                     (int)c->n_invalid[r], (int)invalid);
    gather_check(&c->shape, label);
}
