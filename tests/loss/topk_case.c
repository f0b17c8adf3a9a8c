/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk_case.c - see topk_case.h.
 *
 * Tolerances: those of loss_case.c, whose logp this is, with |g| = sum of a token's |g_i|; the sum
 * itself is rounded once to the stat dtype (u |g| p, within the same 4 u D |g|).
 */
#include "loss/topk_case.h"

#include "loss/where.h"

#include <math.h>

void topk_case_init(topk_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, int64_t k,
                    bool topk, colo_dtype_t dtype, double spread, uint64_t *rng)
{
    memset(c, 0, sizeof *c);
    c->tokens = tokens;
    c->vocab = vocab;
    c->shape = (loss_case_t){
        .ranks = ranks, .tokens = tokens, .vocab = vocab, .dtype = dtype, .pad = 1000};
    loss_case_shard(&c->shape, SHARD_EVEN);
    c->config =
        (colo_topk_config_t){COLO_TOPK_CONFIG_INIT, .logits.vocab = vocab, .k = k, .topk = topk};
    for (int64_t i = 0; i < tokens * vocab; i++) {
        double s = -6;
        for (int n = 0; n < 12; n++)
            s += t_uniform(rng);
        c->z[i] = loss_round(dtype, loss_round(COLO_F32, spread * s));
    }
    for (int64_t i = 0; i < tokens * k; i++) {
        c->ids[i] = t_below(rng, vocab);
        c->up[i] = loss_round(COLO_F32, 4 * t_uniform(rng) - 2);
    }
    memset(c->mask, 1, sizeof c->mask);
}

ref_logprob_opts_t topk_case_opts(const topk_case_t *c)
{
    return (ref_logprob_opts_t){.temperature = c->config.logits.temperature,
                                .scale = c->config.logits.scale,
                                .softcap = c->config.logits.softcap,
                                .ignore_index = INT64_MIN};
}

typedef struct room {
    void *logits, *grad, *stats, *workspace, *ids, *mask, *logp, *up, *chosen, *n_invalid;
    void *host; /* bytes of a shard */
    double wide[TOPK_TOKENS * TOPK_K];
    colo_comm_t *group;
} room_t;

/* This rank's columns of z, or nothing but padding. */
static void *shard_of(const topk_case_t *c, int32_t r, room_t *m, bool real_ones)
{
    const loss_case_t *s = &c->shape;
    const int64_t stride = s->columns[r] + s->row_gap;
    for (int64_t i = 0; i < c->tokens * stride; i++) {
        int64_t t = i / stride, j = i % stride, col = s->start[r] + j;
        bool real = real_ones && j < s->columns[r] && col < c->vocab;
        loss_store(s->dtype, m->host, i,
                   real ? c->z[t * c->vocab + col] : loss_round(s->dtype, s->pad));
    }
    return where.put(m->host, (size_t)(c->tokens * stride) * colo_dtype_size(s->dtype));
}

static colo_status_t run_with(topk_case_t *c, colo_comm_t *world, room_t *m)
{
    const loss_case_t *s = &c->shape;
    const int32_t r = colo_comm_rank(world);
    const int64_t cols = s->columns[r], stride = cols + s->row_gap, n = c->tokens * c->config.k;
    const colo_dtype_t stat = s->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const size_t bytes = (size_t)(c->tokens * stride) * colo_dtype_size(s->dtype),
                 stat_size = (size_t)n * colo_dtype_size(stat);
    colo_topk_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    cfg.logits.vocab_start = s->start[r];
    rank_try(where.group(world, &m->group));
    rank_try(colo_topk_saved_size(&cfg, c->tokens, &stat_bytes));
    rank_try(colo_topk_workspace_size(&cfg, s->dtype, c->tokens, s->ranks, &workspace_bytes));
    m->host = malloc(bytes + 1);
    m->logits = shard_of(c, r, m, true);
    m->grad = shard_of(c, r, m, false);
    m->stats = where.put(NULL, stat_bytes);
    m->workspace = where.put(NULL, workspace_bytes);
    m->ids = where.put(c->ids, (size_t)n * 8);
    m->mask = where.put(c->mask, (size_t)c->tokens);
    m->logp = where.put(NULL, stat_size);
    m->chosen = where.put(NULL, (size_t)n * 8);
    m->n_invalid = where.put(NULL, 8);
    for (int64_t i = 0; i < n; i++)
        loss_store(stat, m->wide, i, c->up[i]);
    m->up = where.put(m->wide, stat_size);
    colo_tensor_t z = where_tensor(m->logits, s->dtype, 2, (int64_t[]){c->tokens, cols});
    colo_tensor_t ids = where_tensor(m->ids, COLO_I64, 2, (int64_t[]){c->tokens, cfg.k});
    colo_tensor_t mask = where_tensor(m->mask, COLO_U8, 1, &c->tokens);
    z.stride[0] = stride;
    colo_tensor_t dz = z;
    dz.data = s->in_place ? m->logits : m->grad;
    colo_topk_out_t out = {
        .logp = m->logp, .n_invalid = m->n_invalid, .ids = cfg.topk ? m->chosen : NULL};
    colo_topk_saved_t saved = {.valid = false};
    colo_comm_stats_reset(m->group);
    rank_try(colo_topk_forward(&cfg,
                               &(colo_topk_batch_t){.logits = &z,
                                                    .ids = cfg.topk ? NULL : &ids,
                                                    .mask = c->masked ? &mask : NULL},
                               m->group, &out, c->forward_only ? NULL : &saved,
                               c->forward_only ? NULL : m->stats, m->workspace, NULL));
    colo_comm_stats(m->group, &c->after_forward[r]);
    where.get(m->wide, m->logp, stat_size);
    for (int64_t i = 0; i < n; i++)
        c->logp[r][i] = loss_load(stat, m->wide, i);
    where.get(c->got[r], m->chosen, (size_t)n * 8);
    where.get(&c->n_invalid[r], m->n_invalid, 8);
    if (c->forward_only)
        return COLO_OK;
    where.drop(m->workspace); /* free after the call */
    m->workspace = NULL;
    for (int again = 0; again < (s->in_place ? 1 : 2); again++)
        rank_try(colo_topk_backward(&saved, m->up, &dz, NULL));
    colo_comm_stats(m->group, &c->after_backward[r]);
    where.get(m->host, dz.data, bytes);
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
    void *all[] = {m->logits, m->grad, m->stats, m->workspace, m->ids,
                   m->mask,   m->logp, m->up,    m->chosen,    m->n_invalid};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        where.drop(all[i]);
    free(m->host);
    where.leave(&m->group);
    free(m);
    return st;
}

colo_status_t topk_case_run(topk_case_t *c)
{
    return t_run_ranks(c->shape.ranks, on_rank, c, sizeof *c);
}

static void compare_row(const topk_case_t *c, const char *label, int64_t t)
{
    const ref_logprob_opts_t o = topk_case_opts(c);
    const double *z = c->z + t * c->vocab, f = fabs(o.scale / o.temperature);
    const int64_t k = c->config.k, v = c->vocab;
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
        const int64_t at = t * k + i;
        int64_t id = c->config.topk ? ids[i] : c->ids[at];
        bool none = skip || (!c->config.topk && id == c->config.ignore_index);
        bool bad = !none && (id < 0 || id >= v);
        double want = bad ? NAN : 0;
        if (!none && !bad) {
            ref_logprob(&o, z, v, id, &row);
            want = row.logp;
        }
        lost = lost || bad;
        ids[i] = none || bad ? -1 : id;
        g[i] = c->up[at];
        size += none ? 0 : fabs(g[i]);
        for (int r = 0; r < c->shape.ranks; r++) {
            if (c->config.topk && c->got[r][at] != ids[i])
                fail_msg("%s: rank %d, token %d: pick %d is %lld, expected %lld", label, r, (int)t,
                         (int)i, (long long)c->got[r][at], (long long)ids[i]);
            if (!near(c->logp[r][at], want, 4 * u * d + u * fabs(want)))
                fail_msg("%s: rank %d of %d, token %d: logp of pick %d is %.17g, expected %.17g",
                         label, r, c->shape.ranks, (int)t, (int)i, c->logp[r][at], want);
            if (memcmp(&c->logp[r][at], &c->logp[0][at], sizeof(double)) != 0)
                fail_msg("%s: ranks 0 and %d differ in token %d", label, r, (int)t);
        }
    }
    if (c->forward_only)
        return;
    ref_topk_grad(&o, z, v, ids, g, k, dz);
    for (int64_t j = 0; j < v; j++) {
        double want = lost ? NAN : dz[j], tol = 4 * u * size * d * f;
        tol += dtype == COLO_F32    ? u * fabs(want)
               : dtype == COLO_BF16 ? 0x1p-8 * fabs(want)
               : dtype == COLO_F16  ? 0x1p-11 * fabs(want) + 0x1p-25
                                    : 0;
        if (!near(c->dz[t * v + j], want, tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * v + j], want, tol);
    }
}

void topk_case_compare(const topk_case_t *c, const char *label)
{
    int64_t invalid = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        compare_row(c, label, t);
        for (int64_t i = 0; i < c->config.k && !c->config.topk; i++) {
            int64_t id = c->ids[t * c->config.k + i];
            invalid += !(c->masked && !c->mask[t]) && id != c->config.ignore_index &&
                       (id < 0 || id >= c->vocab);
        }
    }
    for (int r = 0; r < c->shape.ranks; r++) {
        const colo_comm_stats_t *f = &c->after_forward[r], *b = &c->after_backward[r];
        if (c->n_invalid[r] != invalid)
            fail_msg("%s: rank %d counts %d invalid ids, expected %d", label, r,
                     (int)c->n_invalid[r], (int)invalid);
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
    topk_case_t c; /* first: it is what ranks get */
    void (*check)(const topk_case_t *);
};

static void after(void *arg, colo_status_t st)
{
    struct later *l = arg;
    assert_ok(st);
    l->check(&l->c);
    free(l);
}

void topk_case_later(const topk_case_t *c, void (*check)(const topk_case_t *))
{
    struct later *l = malloc(sizeof *l);
    l->c = *c;
    l->check = check;
    t_run_later(c->shape.ranks, on_rank, l, sizeof l->c, after);
}
