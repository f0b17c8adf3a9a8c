/* SPDX-License-Identifier: Apache-2.0 */
/* loss_run.c - see loss_case.h: runs a case where the memory of ranks is, and compares it with the
 * oracle. */
#include "loss/gather_case.h"

static colo_tensor_t put_ids(gather_rank_t *m, const int64_t *from, int64_t n)
{
    return where_tensor(gather_put(m, from, (size_t)n * 8), COLO_I64, 1, &n);
}

/* This rank's; on odd ranks without those of padding, which are NaN. */
static colo_tensor_t put_class_weight(gather_rank_t *m, const loss_case_t *c)
{
    double *w = m->host;
    const int64_t start = c->start[m->rank], in = c->vocab > start ? c->vocab - start : 0;
    int64_t n = c->columns[m->rank];
    n = m->rank % 2 && in < n ? in : n;
    for (int64_t j = 0; j < n; j++)
        w[j] = j < in ? c->class_weight[start + j] : NAN;
    return where_tensor(gather_put_stats(m, w, n), m->stat, 1, &n);
}

static colo_status_t run_with(void *arg, gather_rank_t *m)
{
    loss_case_t *c = arg;
    const int32_t r = m->rank;
    const int64_t tokens = c->tokens;
    const size_t line = (size_t)tokens * colo_dtype_size(m->stat);
    colo_logprob_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    int64_t counts[2];
    void *up[LOSS_UPS];
    cfg.logits.vocab_start = c->start[r];
    rank_try(colo_logprob_saved_size(&cfg, c->dtype, tokens, &stat_bytes));
    rank_try(colo_logprob_workspace_size(&cfg, c->dtype, tokens, c->ranks, &workspace_bytes));
    const colo_tensor_t z = gather_put_shard(m, c->dtype, c->z),
                        dz = c->in_place || c->forward_only ? z
                                                            : gather_put_shard(m, c->dtype, NULL),
                        targets = put_ids(m, c->targets, tokens);
    colo_tensor_t ids, begin, end, class_weight, temperature;
    float *heat = memset(m->host, 0, (size_t)tokens * sizeof *heat);
    for (int64_t t = 0; t < tokens; t++)
        heat[t] = (float)c->temperature[t];
    if (c->odd_rank && r == c->ranks - 1)
        heat[0] *= 2;
    temperature =
        where_tensor(gather_put(m, heat, (size_t)tokens * sizeof *heat), COLO_F32, 1, &tokens);
    if (cfg.has_class_weight)
        class_weight = put_class_weight(m, c);
    if (c->in) {
        ids = put_ids(m, c->ids, c->count);
        begin = put_ids(m, c->begin, tokens);
        int64_t *ends = memcpy(m->host, c->end, (size_t)tokens * 8);
        ends[0] -= c->odd_rank && r == c->ranks - 1;
        end = put_ids(m, ends, tokens);
        if (c->count == 0)
            ids.data = NULL;
    }
    void *stats = gather_put(m, NULL, stat_bytes),
         *workspace = gather_put(m, NULL, workspace_bytes);
    bool wants[LOSS_OUTS];
    void *values[LOSS_OUTS];
    loss_wanted(&cfg, wants);
    for (int k = 0; k < LOSS_UPS; k++)
        up[k] = gather_put_stats(m, c->up[k], tokens);
    for (int k = 0; k < LOSS_OUTS; k++)
        values[k] = wants[k] ? gather_put(m, NULL, line) : NULL;
    int64_t *argmax = cfg.want_argmax ? gather_put(m, NULL, (size_t)tokens * 8) : NULL;
    uint8_t *correct = cfg.want_correct ? gather_put(m, NULL, (size_t)tokens) : NULL;
    void *weight = cfg.has_class_weight ? gather_put(m, NULL, line) : NULL;
    int64_t *counted = gather_put(m, NULL, sizeof counts);
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT,
                                    .logp = WHERE_ARRAY(values[0], m->stat, tokens),
                                    .entropy = WHERE_ARRAY(values[1], m->stat, tokens),
                                    .loss = WHERE_ARRAY(values[2], m->stat, tokens),
                                    .correct = WHERE_ARRAY(correct, COLO_U8, tokens),
                                    .n_valid = WHERE_ARRAY(counted, COLO_I64, 1),
                                    .n_invalid = WHERE_ARRAY(counted + 1, COLO_I64, 1),
                                    .weight = WHERE_ARRAY(weight, m->stat, tokens),
                                    .argmax = WHERE_ARRAY(argmax, COLO_I64, tokens),
                                    .lse = WHERE_ARRAY(values[3], m->stat, tokens),
                                    .sum_p2 = WHERE_ARRAY(values[4], m->stat, tokens),
                                    .mean_logits = WHERE_ARRAY(values[5], m->stat, tokens)};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};
    colo_comm_stats_reset(m->group);
    rank_try(colo_logprob_forward(
        &cfg,
        &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, .logits = &z, .targets = &targets,
                                .support = c->in ? &(colo_support_t){&ids, &begin, &end} : NULL,
                                .class_weight = cfg.has_class_weight ? &class_weight : NULL,
                                .temperature = cfg.has_temperature ? &temperature : NULL},
        m->group, &out, c->forward_only ? NULL : &saved, c->forward_only ? NULL : stats, workspace,
        where_stream()));
    t_comm_stats(m->group, &c->after_forward[r]);
    for (int k = 0; k < LOSS_OUTS; k++)
        if (values[k])
            gather_get_stats(m, c->out[r][k], values[k], tokens);
    if (weight)
        gather_get_stats(m, c->weight[r], weight, tokens);
    if (argmax)
        where.get(c->argmax[r], argmax, (size_t)tokens * 8);
    if (correct)
        where.get(c->correct[r], correct, (size_t)tokens);
    where.get(counts, counted, sizeof counts);
    c->n_valid[r] = counts[0];
    c->n_invalid[r] = counts[1];
    if (c->forward_only)
        return COLO_OK;
    gather_drop(m, workspace); /* free after the call */
    gather_drop(m, temperature.data);
    for (int k = 0; k < LOSS_UPS; k++)
        up[k] = wants[k] && !c->no_up[k] ? up[k] : NULL;
    const colo_logprob_upstream_t upstream = {COLO_LOGPROB_UPSTREAM_INIT,
                                              .d_logp = WHERE_ARRAY(up[0], m->stat, tokens),
                                              .d_entropy = WHERE_ARRAY(up[1], m->stat, tokens),
                                              .d_loss = WHERE_ARRAY(up[2], m->stat, tokens),
                                              .d_lse = WHERE_ARRAY(up[3], m->stat, tokens)};
    for (int again = 0; again < (c->in_place ? 1 : 2); again++)
        rank_try(colo_logprob_backward(&saved, &upstream, &dz, where_stream()));
    t_comm_stats(m->group, &c->after_backward[r]);
    gather_get_shard(m, c->dz, dz.data);
    return COLO_OK;
}

colo_status_t loss_case_run(loss_case_t *c)
{
    c->pad_worst = 0;
    c->run = run_with;
    return gather_run(c, sizeof *c);
}

void loss_case_later(const loss_case_t *c, void (*check)(loss_case_t *))
{
    loss_case_t copy = *c;
    copy.run = run_with;
    gather_later(&copy, sizeof copy, check);
}

/* ---- comparing ---- */

static void compare_row(const loss_case_t *c, const char *label, int64_t t)
{
    const ref_logprob_opts_t o = loss_case_opts(c, t);
    const double *z = c->z + t * c->vocab, lambda = o.z_loss;
    const uint8_t *in = c->in ? c->in + t * c->vocab : NULL;
    ref_logprob_row_t ref;
    ref_support(&o, z, c->vocab, in, c->targets[t], &ref);
    const double want[LOSS_OUTS] = {ref.logp,   ref.entropy, ref.loss, ref.ignored ? 0 : ref.lse,
                                    ref.sum_p2, ref.mean};
    bool asked[LOSS_OUTS];
    loss_wanted(&c->config, asked);
    double u = where.slack * 0x1p-24, d = 1 + log((double)c->vocab) + ref.range,
           lse = fabs(ref.lse);
    if (c->dtype == COLO_F64) {
        u = where.slack * ((double)c->vocab + 16) * 0x1p-53;
        d += 4 * ref.top;
    }
    const double heavy = loss_heaviest(o.class_weight, c->vocab), terms = o.class_weight ? 5 : 4;
    for (int r = 0; r < c->ranks; r++) {
        if (o.class_weight && c->weight[r][t] != ref.weight)
            fail_msg("%s: rank %d, token %d: weight is %.9g, expected %.9g", label, r, (int)t,
                     c->weight[r][t], ref.weight);
        for (int k = 0; k < LOSS_OUTS; k++) {
            double tol = (k == 2 ? heavy : 1) * terms * u * (d + lambda * lse * (lse + d)) +
                         u * fabs(want[k]);
            if (k == 4)
                tol = (2 * terms * u * d + u) * want[k];
            if (asked[k] && !near(c->out[r][k][t], want[k], tol))
                fail_msg("%s: rank %d of %d, token %d: %s is %.17g, expected %.17g within %g",
                         label, r, c->ranks, (int)t, loss_out_names[k], c->out[r][k][t], want[k],
                         tol);
            if (asked[k] && memcmp(&c->out[r][k][t], &c->out[0][k][t], sizeof(double)))
                fail_msg("%s: ranks 0 and %d differ in %s of token %d", label, r, loss_out_names[k],
                         (int)t);
        }
        if (c->config.want_argmax && c->argmax[r][t] != ref.best)
            fail_msg("%s: rank %d, token %d: argmax is %d, expected %d", label, r, (int)t,
                     (int)c->argmax[r][t], (int)ref.best);
        if (c->config.want_correct && c->correct[r][t] != ref.correct)
            fail_msg("%s: rank %d, token %d: correct is %d", label, r, (int)t, c->correct[r][t]);
    }
    if (c->forward_only)
        return;

    COLO_AUTOFREE double *dz = malloc((size_t)c->vocab * sizeof *dz);
    double g[LOSS_UPS];
    for (int k = 0; k < LOSS_UPS; k++)
        g[k] = asked[k] && !c->no_up[k] ? c->up[k][t] : 0;
    ref_support_grad(&o, z, c->vocab, in, c->targets[t], g, dz);
    if (!o.lenient && !ref.valid && !ref.ignored && (!c->no_up[0] || (asked[2] && !c->no_up[2])))
        for (int64_t j = 0; j < c->vocab; j++)
            dz[j] = NAN; /* nothing sensible flows back through a target that does not exist */
    double size =
        fabs(g[0]) + heavy * fabs(g[2]) * (1 + 2 * lambda * lse) + fabs(g[1]) * d + fabs(g[3]);
    for (int64_t j = 0; j < c->vocab; j++) {
        double tol = terms * u * size * d * fabs(o.scale / o.temperature);
        tol += loss_grad_rounding(c->dtype, dz[j], u);
        if (in && !in[j] && j != c->targets[t])
            tol = 0;
        if (!near(c->dz[t * c->vocab + j], dz[j], tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * c->vocab + j], dz[j], tol);
    }
}

void loss_case_compare(const loss_case_t *c, const char *label)
{
    int64_t valid = 0, invalid = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        bool ignored = c->targets[t] == c->config.ignore_index;
        bool legal = c->targets[t] >= 0 && c->targets[t] < c->vocab;
        valid += !ignored && legal;
        invalid += !ignored && !legal;
        compare_row(c, label, t);
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->n_valid[r] != valid || c->n_invalid[r] != invalid)
            fail_msg("%s: rank %d counts %d valid and %d invalid, expected %d and %d", label, r,
                     (int)c->n_valid[r], (int)c->n_invalid[r], (int)valid, (int)invalid);
    if (c->pad_worst != 0)
        fail_msg("%s: a padding column has gradient %g", label, c->pad_worst);
}
