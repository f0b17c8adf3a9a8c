/* SPDX-License-Identifier: Apache-2.0 */
/* gather_case.c - see gather_case.h */
#include "loss/gather_case.h"

void gather_shape(loss_case_t *s, int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype,
                  colo_status_t (*run)(void *c, gather_rank_t *m))
{
    *s = (loss_case_t){
        .ranks = ranks, .tokens = tokens, .vocab = vocab, .dtype = dtype, .pad = 1000, .run = run};
    loss_case_shard(s, SHARD_EVEN);
}

/* Of a case that begins with its shape; then all memory is dropped. */
static colo_status_t on_rank(colo_comm_t *world, void *c)
{
    loss_case_t *s = c;
    gather_rank_t m = {.shape = s,
                       .rank = colo_comm_rank(world),
                       .stat = s->dtype == COLO_F64 ? COLO_F64 : COLO_F32};
    const int64_t stride = s->columns[m.rank] + s->row_gap;
    m.host = malloc((size_t)((s->tokens + 1) * (stride + GATHER_VOCAB)) * sizeof(double));
    colo_status_t st = where.group(world, &m.group);
    if (st == COLO_OK)
        st = s->run(c, &m);
    for (int i = 0; i < m.count; i++)
        where.drop(m.all[i]);
    free(m.host);
    where.leave(&m.group);
    return st;
}

colo_status_t gather_run(void *c, size_t bytes)
{
    loss_case_t *s = c;
    t_share(s->memory, s->bytes);
    const colo_status_t st = t_run_ranks(s->ranks, on_rank, c, bytes);
    t_unshare(s->memory);
    return st;
}

static void after(void *arg, colo_status_t st)
{
    loss_case_t *s = arg;
    t_unshare(s->memory);
    assert_ok(st);
    s->check(s);
    loss_case_free(s);
    free(s);
}

void gather_later(const void *c, size_t bytes, void (*check)(loss_case_t *))
{
    loss_case_t *copy = malloc(bytes);
    memcpy(copy, c, bytes);
    copy->check = check;
    t_share(copy->memory, copy->bytes);
    t_run_later(copy->ranks, on_rank, copy, bytes, after);
}

void *gather_put(gather_rank_t *m, const void *from, size_t bytes)
{
    return m->all[m->count++] = where.put(from, bytes);
}

void gather_drop(gather_rank_t *m, void *p)
{
    for (int i = 0; i < m->count; i++)
        if (m->all[i] == p)
            m->all[i] = NULL;
    where.drop(p);
}

void *gather_put_stats(gather_rank_t *m, const double *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        loss_store(m->stat, m->host, i, from[i]);
    return gather_put(m, m->host, (size_t)n * colo_dtype_size(m->stat));
}

void *gather_put_f32(gather_rank_t *m, const double *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        loss_store(COLO_F32, m->host, i, from[i]);
    return gather_put(m, m->host, (size_t)n * sizeof(float));
}

void gather_get_stats(gather_rank_t *m, double *to, const void *from, int64_t n)
{
    where.get(m->host, from, (size_t)n * colo_dtype_size(m->stat));
    for (int64_t i = 0; i < n; i++)
        to[i] = loss_load(m->stat, m->host, i);
}

colo_tensor_t gather_put_shard(gather_rank_t *m, colo_dtype_t dtype, const double *from)
{
    const loss_case_t *s = m->shape;
    const int64_t cols = s->columns[m->rank], stride = cols + s->row_gap, shift = s->shift[!from];
    const size_t elem = colo_dtype_size(dtype);
    for (int64_t i = -shift; i < s->tokens * stride; i++) {
        int64_t t = i / stride, j = i % stride, col = s->start[m->rank] + j;
        bool real = from && i >= 0 && j < cols && col < s->vocab;
        loss_store(dtype, m->host, shift + i,
                   real ? from[t * s->vocab + col] : loss_round(dtype, s->pad));
    }
    char *data = gather_put(m, m->host, (size_t)(shift + s->tokens * stride) * elem);
    colo_tensor_t t =
        where_tensor(data + (size_t)shift * elem, dtype, 2, (int64_t[]){s->tokens, cols});
    t.stride[0] = stride;
    return t;
}

void gather_get_shard(gather_rank_t *m, double *dz, const void *grad)
{
    loss_case_t *s = m->shape;
    const int64_t cols = s->columns[m->rank], stride = cols + s->row_gap;
    where.get(m->host, grad, (size_t)(s->tokens * stride) * colo_dtype_size(s->dtype));
    for (int64_t i = 0; i < s->tokens * stride; i++) {
        const int64_t t = i / stride, j = i % stride, col = s->start[m->rank] + j;
        const double g = loss_load(s->dtype, m->host, i);
        if (j < cols && col < s->vocab)
            dz[t * s->vocab + col] = g;
        else if (j < cols ? g != 0 : g != loss_round(s->dtype, s->pad))
            s->pad_worst = INFINITY;
    }
}

void gather_check(const loss_case_t *s, const char *label)
{
    if (s->pad_worst != 0)
        fail_msg("%s: padding was written", label);
    for (int r = 0; r < s->ranks; r++) {
        const colo_comm_stats_t *f = &s->after_forward[r], *b = &s->after_backward[r];
        const uint64_t expected = s->ranks > 1 ? 1u + s->second_gather : 0;
        if (f->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS] != expected || total_ops(f) != expected)
            fail_msg("%s: rank %d: %d operations forward, expected %d gathers", label, r,
                     (int)total_ops(f), (int)expected);
        if (!s->forward_only && memcmp(f, b, sizeof *f) != 0)
            fail_msg("%s: rank %d talks in backward", label, r);
    }
}

void gather_central(loss_case_t *s, double *z, const double *dz, colo_status_t (*run)(void),
                    double (*f)(int64_t t))
{
    const double h = 1e-4;
    const int64_t v = s->vocab;
    double want[GATHER_TOKENS * GATHER_VOCAB], up[GATHER_TOKENS];
    assert_ok(run());
    memcpy(want, dz, (size_t)(s->tokens * v) * sizeof *want);
    s->forward_only = true;
    for (int64_t j = 0; j < v; j++) {
        for (int64_t t = 0; t < s->tokens; t++)
            z[t * v + j] += h;
        assert_ok(run());
        for (int64_t t = 0; t < s->tokens; t++) {
            up[t] = f(t);
            z[t * v + j] -= 2 * h;
        }
        assert_ok(run());
        for (int64_t t = 0; t < s->tokens; t++) {
            const double slope = (up[t] - f(t)) / (2 * h), g = want[t * v + j];
            if (fabs(slope - g) > 1e-6 * (1 + fabs(g)))
                fail_msg("token %d, column %d: %g, difference %g", (int)t, (int)j, g, slope);
            z[t * v + j] += h;
        }
    }
}

bool gather_draw(loss_case_t *s, colo_logits_options_t *logits, uint8_t *mask, uint64_t *rng)
{
    if (t_below(rng, 3) == 0)
        logits->scale = t_below(rng, 2) ? 0.25 : -0.5;
    if (t_below(rng, 3) == 0)
        logits->softcap = 4;
    s->in_place = t_below(rng, 2);
    s->row_gap = t_below(rng, 4);
    for (int64_t t = 0; t < s->tokens; t++)
        mask[t] = t_below(rng, 3) != 0;
    return t_below(rng, 2);
}
