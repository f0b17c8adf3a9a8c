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
 */
#include "loss/distill_case.h"

#include "loss/where.h"

#include <math.h>

static double normal(uint64_t *rng)
{
    double s = -6;
    for (int n = 0; n < 12; n++)
        s += t_uniform(rng);
    return s;
}

void distill_case_init(distill_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, bool probs,
                       colo_dtype_t dtype, colo_dtype_t target_dtype, double spread, uint64_t *rng)
{
    memset(c, 0, sizeof *c);
    c->tokens = tokens;
    c->vocab = vocab;
    c->target_dtype = target_dtype;
    c->shape = (loss_case_t){
        .ranks = ranks, .tokens = tokens, .vocab = vocab, .dtype = dtype, .pad = 1000};
    loss_case_shard(&c->shape, SHARD_EVEN);
    c->config =
        (colo_distill_config_t){COLO_DISTILL_CONFIG_INIT, .logits.vocab = vocab,
                                .targets = probs ? COLO_DISTILL_PROBS : COLO_DISTILL_LOGITS};
    for (int64_t t = 0; t < tokens; t++) {
        double *z = c->z + t * vocab, *w = c->w + t * vocab, sum = 0;
        for (int64_t j = 0; j < vocab; j++) {
            z[j] = loss_round(dtype, loss_round(COLO_F32, spread * normal(rng)));
            w[j] = z[j] + normal(rng);
            sum += exp(w[j]);
        }
        for (int64_t j = 0; j < vocab; j++) /* a seventh of soft labels is 0 */
            w[j] = loss_round(target_dtype, loss_round(COLO_F32, !probs            ? w[j]
                                                                 : t_below(rng, 7) ? exp(w[j]) / sum
                                                                                   : 0));
        for (int k = 0; k < 2; k++)
            c->up[k][t] = loss_round(COLO_F32, normal(rng));
    }
    memset(c->mask, 1, sizeof c->mask);
}

ref_distill_opts_t distill_case_opts(const distill_case_t *c)
{
    return (ref_distill_opts_t){
        .temperature = c->config.logits.temperature,
        .scale = c->config.logits.scale,
        .softcap = c->config.logits.softcap,
        .probs = c->config.targets == COLO_DISTILL_PROBS,
        .target_temperature = c->config.target_temperature,
        .target_scale = c->config.target_scale,
    };
}

typedef struct room {
    void *logits, *targets, *grad, *stats, *workspace, *mask, *out[2], *up[2];
    void *host; /* bytes of a shard */
    double wide[DISTILL_TOKENS];
    colo_comm_t *group;
} room_t;

/* This rank's columns of @from, padding and gaps from @pad. */
static void *shard_of(const distill_case_t *c, int32_t r, room_t *m, colo_dtype_t dtype,
                      const double *from)
{
    const loss_case_t *s = &c->shape;
    const int64_t stride = s->columns[r] + s->row_gap;
    for (int64_t i = 0; i < c->tokens * stride; i++) {
        int64_t t = i / stride, j = i % stride, col = s->start[r] + j;
        bool real = from && j < s->columns[r] && col < c->vocab;
        loss_store(dtype, m->host, i, real ? from[t * c->vocab + col] : loss_round(dtype, s->pad));
    }
    return where.put(m->host, (size_t)(c->tokens * stride) * colo_dtype_size(dtype));
}

static colo_status_t run_with(distill_case_t *c, colo_comm_t *world, room_t *m)
{
    const loss_case_t *s = &c->shape;
    const int32_t r = colo_comm_rank(world);
    const int64_t cols = s->columns[r], stride = cols + s->row_gap;
    const colo_dtype_t stat = s->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const size_t line = (size_t)c->tokens * colo_dtype_size(stat);
    colo_distill_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    cfg.logits.vocab_start = s->start[r];
    rank_try(where.group(world, &m->group));
    rank_try(colo_distill_saved_size(&cfg, c->tokens, &stat_bytes));
    rank_try(colo_distill_workspace_size(&cfg, s->dtype, c->tokens, s->ranks, &workspace_bytes));
    m->host = malloc((size_t)(c->tokens * stride + 1) * sizeof(double));
    m->logits = shard_of(c, r, m, s->dtype, c->z);
    m->targets = shard_of(c, r, m, c->target_dtype, c->w);
    m->grad = shard_of(c, r, m, s->dtype, NULL);
    m->stats = where.put(NULL, stat_bytes);
    m->workspace = where.put(NULL, workspace_bytes);
    m->mask = where.put(c->mask, (size_t)c->tokens);
    for (int k = 0; k < 2; k++) {
        for (int64_t t = 0; t < c->tokens; t++)
            loss_store(stat, m->wide, t, c->up[k][t]);
        m->up[k] = where.put(m->wide, line);
        m->out[k] = where.put(NULL, line);
    }
    colo_tensor_t z = where_tensor(m->logits, s->dtype, 2, (int64_t[]){c->tokens, cols});
    colo_tensor_t w = where_tensor(m->targets, c->target_dtype, 2, (int64_t[]){c->tokens, cols});
    colo_tensor_t mask = where_tensor(m->mask, COLO_U8, 1, &c->tokens);
    z.stride[0] = w.stride[0] = stride;
    colo_tensor_t dz = z;
    dz.data = s->in_place ? m->logits : m->grad;
    colo_distill_out_t out = {.ce = m->out[0], .kl = m->out[1]};
    colo_distill_saved_t saved = {.valid = false};
    colo_comm_stats_reset(m->group);
    rank_try(colo_distill_forward(
        &cfg,
        &(colo_distill_batch_t){.logits = &z, .targets = &w, .mask = c->masked ? &mask : NULL},
        m->group, &out, c->forward_only ? NULL : &saved, c->forward_only ? NULL : m->stats,
        m->workspace, NULL));
    colo_comm_stats(m->group, &c->after_forward[r]);
    for (int k = 0; k < 2; k++) {
        where.get(m->wide, m->out[k], line);
        for (int64_t t = 0; t < c->tokens; t++)
            c->out[r][k][t] = loss_load(stat, m->wide, t);
    }
    if (c->forward_only)
        return COLO_OK;
    where.drop(m->workspace); /* free after the call */
    m->workspace = NULL;
    colo_distill_upstream_t up = {.d_ce = c->no_ce ? NULL : m->up[0],
                                  .d_kl = c->no_kl ? NULL : m->up[1]};
    for (int again = 0; again < (s->in_place ? 1 : 2); again++)
        rank_try(colo_distill_backward(&saved, &up, &dz, NULL));
    colo_comm_stats(m->group, &c->after_backward[r]);
    where.get(m->host, dz.data, (size_t)(c->tokens * stride) * colo_dtype_size(s->dtype));
    c->pad_worst[r] = 0;
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t j = 0; j < stride; j++) {
            double g = loss_load(s->dtype, m->host, t * stride + j);
            if (j < cols && s->start[r] + j < c->vocab)
                c->dz[t * c->vocab + s->start[r] + j] = g;
            else if (j < cols ? g != 0 : g != loss_round(s->dtype, s->pad))
                c->pad_worst[r] = INFINITY;
        }
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    room_t *m = calloc(1, sizeof *m);
    colo_status_t st = run_with(arg, world, m);
    void *all[] = {m->logits, m->targets, m->grad,   m->stats, m->workspace,
                   m->mask,   m->out[0],  m->out[1], m->up[0], m->up[1]};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        where.drop(all[i]);
    free(m->host);
    where.leave(&m->group);
    free(m);
    return st;
}

colo_status_t distill_case_run(distill_case_t *c)
{
    return t_run_ranks(c->shape.ranks, on_rank, c, sizeof *c);
}

static void compare_row(const distill_case_t *c, const char *label, int64_t t)
{
    const ref_distill_opts_t o = distill_case_opts(c);
    const double *z = c->z + t * c->vocab, *w = c->w + t * c->vocab,
                 f = fabs(o.scale / o.temperature), v = (double)c->vocab;
    const bool skip = c->masked && !c->mask[t];
    double dz[DISTILL_VOCAB], u = where.slack * 0x1p-24;
    ref_distill_row_t row;
    ref_distill(&o, z, w, c->vocab, &row);
    double d = 1 + log(v) + row.range, dv = 1 + log(v) + row.target_range;
    const double mass = row.mass > 1 ? row.mass : 1, want[2] = {row.ce, row.kl};
    if (c->shape.dtype == COLO_F64) {
        u = where.slack * (v + 16) * 0x1p-53;
        d += 4 * row.top;
        dv += 4 * row.target_top;
    }
    for (int r = 0; r < c->shape.ranks; r++)
        for (int k = 0; k < 2; k++) {
            double e = skip ? 0 : want[k], got = c->out[r][k][t];
            double tol = skip ? 0 : 4 * u * mass * (d + 1 + (k ? dv : 0)) + u * fabs(e);
            if (!(fabs(got - e) <= tol))
                fail_msg("%s: rank %d of %d, token %d: %s is %.17g, expected %.17g within %g",
                         label, r, c->shape.ranks, (int)t, k ? "kl" : "ce", got, e, tol);
            if (memcmp(&got, &c->out[0][k][t], sizeof got) != 0)
                fail_msg("%s: ranks 0 and %d differ in token %d", label, r, (int)t);
        }
    if (c->forward_only)
        return;
    const double g[2] = {c->no_ce ? 0 : c->up[0][t], c->no_kl ? 0 : c->up[1][t]};
    ref_distill_grad(&o, z, w, c->vocab, g[0], g[1], dz);
    for (int64_t j = 0; j < c->vocab; j++) {
        double e = skip ? 0 : dz[j];
        double tol = skip ? 0 : 4 * u * (fabs(g[0]) + fabs(g[1])) * f * mass * (d + dv);
        tol += c->shape.dtype == COLO_F32    ? u * fabs(e)
               : c->shape.dtype == COLO_BF16 ? 0x1p-8 * fabs(e)
               : c->shape.dtype == COLO_F16  ? 0x1p-11 * fabs(e) + 0x1p-25
                                             : 0;
        if (!(fabs(c->dz[t * c->vocab + j] - e) <= tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * c->vocab + j], e, tol);
    }
}

void distill_case_compare(const distill_case_t *c, const char *label)
{
    for (int64_t t = 0; t < c->tokens; t++)
        compare_row(c, label, t);
    for (int r = 0; r < c->shape.ranks; r++) {
        const colo_comm_stats_t *f = &c->after_forward[r], *b = &c->after_backward[r];
        if (c->pad_worst[r] != 0)
            fail_msg("%s: rank %d wrote padding", label, r);
        if (f->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS] != (c->shape.ranks > 1) ||
            total_ops(f) != (c->shape.ranks > 1))
            fail_msg("%s: rank %d: %d operations forward, expected one gather", label, r,
                     (int)total_ops(f));
        if (!c->forward_only && memcmp(f, b, sizeof *f) != 0)
            fail_msg("%s: rank %d talks in backward", label, r);
    }
}

struct later {
    distill_case_t c; /* first: it is what ranks get */
    void (*check)(const distill_case_t *);
};

static void after(void *arg, colo_status_t st)
{
    struct later *l = arg;
    assert_ok(st);
    l->check(&l->c);
    free(l);
}

void distill_case_later(const distill_case_t *c, void (*check)(const distill_case_t *))
{
    struct later *l = malloc(sizeof *l);
    l->c = *c;
    l->check = check;
    t_run_later(c->shape.ranks, on_rank, l, sizeof l->c, after);
}
