/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_distill_case.c - see linear_distill_case.h. The oracle makes whole logits by loops in
 * fp64, and has ref_distill() of ref_logprob.h for what is made of them.
 *
 * Tolerances. u is the unit roundoff of sums, n(k) = (k + 2) u, W + s B A stands for W, and |W| +
 * |s B A| for |W|. Logits of a side are off by e = (n(H) + n(r)) A + (rounding to the logits dtype,
 * and of a LoRA's u to the head's) A, A = max over t, v of sum_k |h W| + |b|; x by f e, f = |scale
 * / tau|. E is the sum of both sides' f e and 4 u; L = 1 + 2 log V + the ranges of x and y bounds
 * |log p|, |log q| and |log(p/q)|, and what derivatives of the divergence by all x, or all y, add
 * up to in absolute terms is at most 2 (1 + L). So |D - ref| <= 4 (1 + L) E / alpha^2 + u |D| alpha
 * is 1 but for ACCEPTANCE |d_z - ref| <= s = |g| f ((p + q) 8 (1 + L) E / alpha^2 + p N) + 4 f E
 * |d_z| / cap + rounding of d_z where N is the mass of columns with |log(p/q)| < 4 E, whose sign TV
 * does not know. Products of gradients are off by what s makes in them, and n() of absolute sums,
 * and a rounding of what they write; d_w adds a rounding for each replica and chunk. d_z is rounded
 * when the largest of |g| f is 1 or more.
 */
#include "loss/linear_distill_case.h"

#include <colobridge/linear_distill.h>

static double *take(double **next, int64_t n)
{
    double *x = *next;
    *next += n + 1;
    return x;
}

static double *draw(double **next, int64_t n, colo_dtype_t dtype, double by, uint64_t *rng)
{
    double *x = take(next, n);
    for (int64_t i = 0; i < n; i++)
        x[i] = loss_round(dtype, loss_round(COLO_F32, by * loss_normal(rng)));
    return x;
}

void linear_distill_init(linear_distill_case_t *c, int32_t ranks, int32_t replicas, int64_t tokens,
                         int64_t vocab, const int64_t hidden[2], const colo_dtype_t dtype[2],
                         uint64_t *rng)
{
    const int64_t world = (int64_t)ranks * replicas, R = DISTILL_RANK;
    int64_t n = 0;
    *c = (linear_distill_case_t){.ranks = ranks,
                                 .replicas = replicas,
                                 .tokens = tokens,
                                 .vocab = vocab,
                                 .hidden = {hidden[0], hidden[1]},
                                 .dtype = {dtype[0], dtype[1]},
                                 .max_valid = -1,
                                 .arrays = true,
                                 .factor = 1,
                                 .config = {COLO_LINEAR_DISTILL_CONFIG_INIT}};
    const bool wide = dtype[STUDENT] == COLO_F64;
    c->config.distill.logits.vocab = vocab;
    c->config.logits_dtype = c->config.d_weight_dtype = wide ? COLO_F64 : COLO_F32;
    c->config.teacher_logits_dtype = dtype[TEACHER] == COLO_F64 ? COLO_F64 : COLO_F32;
    for (int s = 0; s < 2; s++)
        n += vocab * hidden[s] + vocab + R * (hidden[s] + vocab) + 4 +
             replicas * (tokens * hidden[s] + 1);
    n += 2 * replicas * (tokens + 1) +
         world * (tokens * (1 + hidden[0]) + vocab * (hidden[0] + 1 + R) + R * hidden[0] + 6);
    c->bytes = (size_t)n * sizeof(double);
    double *next = c->memory = calloc(c->bytes, 1);
    for (int s = 0; s < 2; s++) {
        const double by = 1 / sqrt((double)hidden[s]);
        c->w[s] = draw(&next, vocab * hidden[s], dtype[s], by, rng);
        c->b[s] = draw(&next, vocab, dtype[s], 0.5, rng);
        c->a[s] = draw(&next, R * hidden[s], dtype[s], by, rng);
        c->low[s] = draw(&next, R * vocab, dtype[s], 1, rng);
        for (int d = 0; d < replicas; d++)
            c->h[s][d] = draw(&next, tokens * hidden[s], dtype[s], 1.5, rng);
    }
    for (int d = 0; d < replicas; d++) {
        c->up[d] = draw(&next, tokens, COLO_F32, 1, rng);
        c->mask[d] = take(&next, tokens);
        for (int64_t t = 0; t < tokens; t++)
            c->mask[d][t] = 1;
    }
    for (int r = 0; r < world; r++) {
        c->loss[r] = take(&next, tokens);
        c->d_h[r] = take(&next, tokens * hidden[0]);
        c->d_w[r] = take(&next, vocab * hidden[0]);
        c->d_b[r] = take(&next, vocab);
        c->d_a[r] = take(&next, R * hidden[0]);
        c->d_low[r] = take(&next, vocab * R);
    }
    linear_distill_shard(c, SHARD_EVEN);
}

void linear_distill_free(linear_distill_case_t *c)
{
    free(c->memory);
}

void linear_distill_shard(linear_distill_case_t *c, shard_kind_t kind)
{
    loss_case_t like = {.ranks = c->ranks, .vocab = c->vocab};
    loss_case_shard(&like, kind);
    memcpy(c->start, like.start, sizeof c->start);
    memcpy(c->columns, like.columns, sizeof c->columns);
    for (int r = 0; r < c->ranks; r++)
        c->more[r] =
            kind == SHARD_PADDED && c->start[r] + c->columns[r] >= c->vocab ? 1 + r % 3 : 0;
}

void linear_distill_mask(linear_distill_case_t *c)
{
    c->masked = true;
    for (int d = 0; d < c->replicas; d++)
        for (int64_t t = d; t < c->tokens; t += 3) {
            c->mask[d][t] = 0;
            for (int s = 0; s < 2; s++)
                for (int64_t k = 0; k < c->hidden[s]; k++)
                    c->h[s][d][t * c->hidden[s] + k] = NAN;
        }
}

/* ---- one rank ---- */

typedef struct rank {
    linear_distill_case_t *c;
    int32_t world, r, d;
    colo_comm_t *tp, *dp;
    colo_lm_head_t *head[2];
    colo_linear_distill_t *distill;
    int64_t rows[2], first[2], count[2]; /* of a head here; those that this replica has */
    void *all[48];
    int taken;
} rank_t;

static colo_dtype_t sums_of(const linear_distill_case_t *c)
{
    return c->dtype[STUDENT] == COLO_F64 ? COLO_F64 : COLO_F32;
}

static void *keep(rank_t *k, const void *from, size_t bytes)
{
    return k->all[k->taken++] = where.put(from, bytes);
}

/* @n numbers, each @by(i) */
static void *numbers(rank_t *k, colo_dtype_t dtype, const double *from, int64_t n)
{
    void *host = calloc((size_t)n + 1, sizeof(double));
    for (int64_t i = 0; i < n; i++)
        loss_store(dtype, host, i, from ? from[i] : 0);
    void *there = keep(k, host, (size_t)n * colo_dtype_size(dtype));
    free(host);
    return there;
}

static void fetch(double *to, colo_dtype_t dtype, const void *from, int64_t n)
{
    void *host = calloc((size_t)n + 1, sizeof(double));
    where.get(host, from, (size_t)n * colo_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++)
        to[i] = loss_load(dtype, host, i);
    free(host);
}

/* Rows [@first, @first + @count) of this rank's columns of @from [V, @width]; others hold @pad. */
static void *columns_at(rank_t *k, colo_dtype_t dtype, const double *from, int64_t width,
                        int64_t first, int64_t count, double pad)
{
    double *rows = calloc((size_t)(count * width) + 1, sizeof *rows);
    for (int64_t i = 0; i < count * width; i++) {
        const int64_t column = k->c->start[k->r] + first + i / width;
        rows[i] = column < k->c->vocab ? from[column * width + i % width] : pad;
    }
    void *there = numbers(k, dtype, rows, count * width);
    free(rows);
    return there;
}

static int64_t true_columns(const linear_distill_case_t *c, int32_t r)
{
    const int64_t left = c->vocab - c->start[r];
    return left < 0 ? 0 : left < c->columns[r] ? left : c->columns[r];
}

static colo_status_t make_head(rank_t *k, int s)
{
    linear_distill_case_t *c = k->c;
    const colo_lm_head_config_t config = {
        COLO_LM_HEAD_CONFIG_INIT,
        .rows = k->rows[s] = s ? true_columns(c, k->r) + c->more[k->r] : c->columns[k->r],
        .hidden = c->hidden[s],
        .dtype = c->dtype[s],
        .mem = where.mem,
        .device = where.device ? where.device() : -1,
        .has_bias = c->bias[s]};
    rank_try(colo_lm_head_create(&k->head[s], &config, c->sharded[s] ? k->dp : NULL));
    colo_lm_head_rows(k->head[s], &k->first[s], &k->count[s]);
    /* padding must not be noticed */
    void *w = columns_at(k, c->dtype[s], c->w[s], c->hidden[s], k->first[s], k->count[s], 1000),
         *b = columns_at(k, c->dtype[s], c->b[s], 1, k->first[s], k->count[s], 1000),
         *gathered = keep(k, NULL, colo_lm_head_gathered_size(k->head[s]));
    const colo_tensor_t weight =
                            where_tensor(w, c->dtype[s], 2, (int64_t[]){k->count[s], c->hidden[s]}),
                        bias = where_tensor(b, c->dtype[s], 1, &k->count[s]);
    return colo_lm_head_bind(k->head[s], &weight, c->bias[s] ? &bias : NULL,
                             c->sharded[s] ? gathered : NULL);
}

/* What is left to backward of an upstream gradient in mode early. */
static const double EARLY = 0.25;

static colo_status_t workspace(rank_t *k, colo_linear_logprob_pass_t pass, void **at)
{
    size_t bytes;
    rank_try(colo_linear_distill_workspace_size(k->distill, pass, k->c->tokens, k->c->max_valid,
                                                &bytes));
    *at = keep(k, NULL, bytes);
    return COLO_OK;
}

static colo_status_t run_passes(rank_t *k)
{
    linear_distill_case_t *c = k->c;
    const int64_t T = c->tokens, H = c->hidden[0], R = DISTILL_RANK, one = 1,
                  part = c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER ? T / c->ranks : T;
    const colo_dtype_t stat = sums_of(c), dw = c->config.d_weight_dtype;
    const bool early = c->way == BY_EARLY;
    colo_tensor_t h[2], a[2], low[2];
    colo_lora_t lora[2];
    for (int s = 0; s < 2; s++) {
        h[s] = where_tensor(numbers(k, c->dtype[s], c->h[s][k->d], T * c->hidden[s]), c->dtype[s],
                            2, (int64_t[]){T, c->hidden[s]});
        a[s] = where_tensor(numbers(k, c->dtype[s], c->a[s], R * c->hidden[s]), c->dtype[s], 2,
                            (int64_t[]){R, c->hidden[s]});
        low[s] = where_tensor(columns_at(k, c->dtype[s], c->low[s], R, 0, k->rows[s], 1000),
                              c->dtype[s], 2, (int64_t[]){k->rows[s], R});
        lora[s] = (colo_lora_t){&a[s], &low[s], s ? 0.4 : 0.7};
    }
    uint8_t *bytes = calloc((size_t)T + 1, 2);
    for (int64_t t = 0; t < T; t++) /* at a stride of 2 */
        bytes[2 * t] = c->mask[k->d][t] != 0 ? 7 : 0;
    colo_tensor_t mask = where_tensor(keep(k, bytes, 2 * (size_t)T), COLO_U8, 1, &T);
    mask.stride[0] = 2;
    free(bytes);
    const double before = c->config.d_weight_add ? c->prefill : NAN;
    double *fill = calloc((size_t)(k->count[0] * H) + 1, sizeof *fill);
    for (int64_t i = 0; i < k->count[0] * H; i++)
        fill[i] = before;
    const colo_tensor_t
        loss = where_tensor(keep(k, NULL, (size_t)T * colo_dtype_size(stat)), stat, 1, &T),
        n_valid = where_tensor(keep(k, NULL, 8), COLO_I64, 1, &one),
        n_invalid = where_tensor(keep(k, NULL, 8), COLO_I64, 1, &one),
        up = where_tensor(numbers(k, stat, c->up[k->d], T), stat, 1, &T),
        half = where_tensor(numbers(k, stat, (const double[]){0.5}, 1), stat, 1, &one),
        d_h = where_tensor(keep(k, NULL, (size_t)(part * H) * colo_dtype_size(c->dtype[0])),
                           c->dtype[0], 2, (int64_t[]){part, H}),
        d_w =
            where_tensor(numbers(k, dw, fill, k->count[0] * H), dw, 2, (int64_t[]){k->count[0], H}),
        d_b = where_tensor(numbers(k, dw, fill, k->count[0]), dw, 1, &k->count[0]),
        d_a = where_tensor(keep(k, NULL, (size_t)(R * H) * colo_dtype_size(stat)), stat, 2,
                           (int64_t[]){R, H}),
        d_low = where_tensor(keep(k, NULL, (size_t)(k->rows[0] * R) * colo_dtype_size(stat)), stat,
                             2, (int64_t[]){k->rows[0], R});
    free(fill);
    const colo_linear_distill_batch_t batch = {COLO_LINEAR_DISTILL_BATCH_INIT,
                                               .hidden = &h[0],
                                               .teacher_hidden = &h[1],
                                               .mask = c->masked ? &mask : NULL,
                                               .max_valid = c->max_valid,
                                               .lora = c->lora[0] ? &lora[0] : NULL,
                                               .teacher_lora = c->lora[1] ? &lora[1] : NULL};
    const colo_linear_distill_out_t out = {COLO_LINEAR_DISTILL_OUT_INIT, &loss, &n_valid,
                                           &n_invalid};
    const colo_linear_distill_upstream_t upstream = {COLO_LINEAR_DISTILL_UPSTREAM_INIT,
                                                     .loss = early ? c->factor / EARLY : c->factor,
                                                     .d_loss = c->arrays ? &up : NULL,
                                                     .mean = c->mean},
                                         left = {COLO_LINEAR_DISTILL_UPSTREAM_INIT,
                                                 .loss = EARLY / 0.5, .d_loss = &half};
    const bool trains = c->lora[0] && !c->config.frozen_lora;
    const colo_linear_logprob_grads_t grads = {
        COLO_LINEAR_LOGPROB_GRADS_INIT,
        .d_hidden = c->config.frozen_hidden ? NULL : &d_h,
        .d_weight = c->config.frozen_weight ? NULL : &d_w,
        .d_bias = c->config.frozen_weight || !c->bias[0] ? NULL : &d_b,
        .d_lora_a = trains ? &d_a : NULL,
        .d_lora_b = trains ? &d_low : NULL};
    colo_linear_distill_saved_t saved = {COLO_LINEAR_DISTILL_SAVED_INIT, .d_weight = d_w.data};
    size_t kept;
    void *work, *memory;
    colo_comm_stats_reset(k->tp);
    if (c->way == BY_LOSS) {
        rank_try(workspace(k, COLO_LINEAR_LOGPROB_LOSS, &work));
        rank_try(colo_linear_distill_loss(k->distill, &batch, &upstream, &out, &grads, work,
                                          where_stream()));
    } else if (c->way == BY_INFERENCE) {
        rank_try(workspace(k, COLO_LINEAR_LOGPROB_INFERENCE, &work));
        rank_try(colo_linear_distill_forward(k->distill, &batch, &out, NULL, NULL, work,
                                             where_stream()));
    } else {
        rank_try(workspace(k, COLO_LINEAR_LOGPROB_FORWARD, &work));
        rank_try(colo_linear_distill_saved_size(k->distill, T, c->max_valid, &kept));
        memory = keep(k, NULL, kept);
        rank_try(early ? colo_linear_distill_early(k->distill, &batch, &upstream, &out, &saved,
                                                   memory, work, where_stream())
                       : colo_linear_distill_forward(k->distill, &batch, &out, &saved, memory, work,
                                                     where_stream()));
    }
    t_comm_stats(k->tp, &c->forward[k->world]);
    double *first = calloc((size_t)(T * H) + 1, sizeof *first);
    for (int again = 0; again <= (int)c->twice && c->way <= BY_EARLY; again++) {
        rank_try(workspace(k, COLO_LINEAR_LOGPROB_BACKWARD, &work));
        rank_try(colo_linear_distill_backward(k->distill, &saved, early ? &left : &upstream, &grads,
                                              work, where_stream()));
        if (where.wait)
            where.wait();
        fetch(c->d_h[k->world], c->dtype[0], d_h.data, part * H);
        if (again)
            c->second_differs[k->world] =
                memcmp(first, c->d_h[k->world], (size_t)(part * H) * sizeof *first) != 0;
        memcpy(first, c->d_h[k->world], (size_t)(part * H) * sizeof *first);
    }
    free(first);
    t_comm_stats(k->tp, &c->all[k->world]);
    if (where.wait)
        where.wait();
    fetch(c->loss[k->world], stat, loss.data, T);
    where.get(&c->n_valid[k->world], n_valid.data, 8);
    where.get(&c->n_invalid[k->world], n_invalid.data, 8);
    if (c->way == BY_INFERENCE)
        return COLO_OK;
    fetch(c->d_h[k->world], c->dtype[0], d_h.data, part * H);
    fetch(c->d_a[k->world], stat, d_a.data, R * H);
    const int64_t mine = true_columns(c, k->r), begin = k->first[0] < mine ? k->first[0] : mine,
                  end = k->first[0] + k->count[0] < mine ? k->first[0] + k->count[0] : mine;
    fetch(c->d_w[k->world] + (c->start[k->r] + begin) * H, dw, d_w.data, (end - begin) * H);
    fetch(c->d_b[k->world] + c->start[k->r] + begin, dw, d_b.data, end - begin);
    fetch(c->d_low[k->world] + c->start[k->r] * R, stat, d_low.data, mine * R);
    return COLO_OK;
}

static colo_status_t group_of(colo_comm_t *world, const colo_grid_t *grid, const char *dim,
                              int32_t n, colo_comm_t **group)
{
    if (n > 1 && n < colo_comm_size(world))
        return colo_comm_split(world, grid, dim, group);
    *group = world;
    return n == 1 ? colo_comm_create_self(group) : COLO_OK;
}

static colo_status_t run_rank(rank_t *k, colo_comm_t *world)
{
    linear_distill_case_t *c = k->c;
    colo_grid_t grid;
    k->world = colo_comm_rank(world);
    k->r = k->world % c->ranks;
    k->d = k->world / c->ranks;
    rank_try(colo_grid_parse(&grid, t_text("tp=%d,dp=%d", (int)c->ranks, (int)c->replicas),
                             (int64_t)c->ranks * c->replicas));
    rank_try(group_of(world, &grid, "tp", c->ranks, &k->tp));
    rank_try(group_of(world, &grid, "dp", c->replicas, &k->dp));
    rank_try(make_head(k, STUDENT));
    rank_try(make_head(k, TEACHER));
    colo_linear_distill_config_t config = c->config;
    config.distill.logits.vocab_start = c->start[k->r];
    config.mode = c->way == BY_EARLY ? COLO_LINEAR_LOGPROB_EARLY : COLO_LINEAR_LOGPROB_AUTO;
    config.lora = c->lora[0] ? DISTILL_RANK : 0;
    config.teacher_lora = c->lora[1] ? DISTILL_RANK : 0;
    rank_try(colo_linear_distill_create(&k->distill, &config, k->head[0], k->head[1], k->tp));
    return run_passes(k);
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    rank_t k = {.c = arg};
    colo_comm_t *group = NULL;
    colo_status_t st = where.group(world, &group);
    if (st == COLO_OK)
        st = run_rank(&k, group);
    if (where.wait)
        where.wait();
    if (st == COLO_OK) /* freeing waits for the device, which other ranks may share */
        st = colo_comm_barrier(world, NULL);
    colo_linear_distill_destroy(&k.distill);
    for (int s = 0; s < 2; s++)
        colo_lm_head_destroy(&k.head[s]);
    while (k.taken > 0)
        where.drop(k.all[--k.taken]);
    if (k.tp != group)
        colo_comm_destroy(&k.tp);
    if (k.dp != group)
        colo_comm_destroy(&k.dp);
    where.leave(&group);
    return st;
}

colo_status_t linear_distill_run(linear_distill_case_t *c)
{
    if (where.shared)
        c->config.d_hidden = COLO_D_HIDDEN_PARTIAL;
    if (where.shared && c->ranks > 1)
        c->config.frozen_lora = true;
    t_share(c->memory, c->bytes);
    const colo_status_t st = t_run_ranks(c->ranks * c->replicas, on_rank, c, sizeof *c);
    t_unshare(c->memory);
    return st;
}

/* ---- the oracle ---- */

typedef struct side {
    double *w, *abs; /* [V, H]: W + s B A, and |W| + |s B A| */
    double *z, e;    /* [T, V]; how far a logit may be off */
    double *u;       /* [T, R]: s A h */
} side_t;

static double roundoff(colo_dtype_t dtype)
{
    return dtype == COLO_F64   ? 0x1p-53
           : dtype == COLO_F32 ? 0x1p-24
           : dtype == COLO_F16 ? 0x1p-11
                               : 0x1p-8;
}

static double unit(const linear_distill_case_t *c, int s)
{
    return where.slack * (c->dtype[s] == COLO_F64 ? 0x1p-53 : 0x1p-24);
}

/* Does token @t of replica @d take part? */
static bool counts(const linear_distill_case_t *c, int d, int64_t t)
{
    return !c->masked || c->mask[d][t] != 0;
}

static side_t side_of(const linear_distill_case_t *c, int s, int d)
{
    const int64_t T = c->tokens, V = c->vocab, H = c->hidden[s], R = DISTILL_RANK;
    const double scale = s ? 0.4 : 0.7;
    side_t side = {calloc((size_t)(V * H), 8), calloc((size_t)(V * H), 8),
                   calloc((size_t)(T * V) + 1, 8), 0, calloc((size_t)(T * R) + 1, 8)};
    double most = 0;
    for (int64_t i = 0; i < V * H; i++) {
        side.w[i] = c->w[s][i];
        side.abs[i] = fabs(c->w[s][i]);
        for (int64_t r = 0; r < R && c->lora[s]; r++) {
            const double low = scale * c->low[s][i / H * R + r] * c->a[s][r * H + i % H];
            side.w[i] += low;
            side.abs[i] += fabs(low);
        }
    }
    for (int64_t t = 0; t < T; t++) {
        const double *h = c->h[s][d] + t * H;
        for (int64_t r = 0; r < R; r++)
            for (int64_t k = 0; k < H; k++)
                side.u[t * R + r] += scale * c->a[s][r * H + k] * h[k];
        for (int64_t v = 0; v < V && counts(c, d, t); v++) {
            double z = c->bias[s] ? c->b[s][v] : 0, size = fabs(z);
            for (int64_t k = 0; k < H; k++) {
                z += side.w[v * H + k] * h[k];
                size += side.abs[v * H + k] * fabs(h[k]);
            }
            side.z[t * V + v] = z;
            most = size > most ? size : most;
        }
    }
    const colo_dtype_t logits = s ? c->config.teacher_logits_dtype : c->config.logits_dtype;
    side.e = most * ((double)(H + R + 6) * unit(c, s) + 2 * roundoff(logits) +
                     (c->lora[s] ? 2 * roundoff(c->dtype[s]) : 0));
    return side;
}

static void side_free(side_t *side)
{
    free(side->w);
    free(side->abs);
    free(side->z);
    free(side->u);
}

static ref_distill_opts_t opts_of(const linear_distill_case_t *c)
{
    const colo_distill_config_t *o = &c->config.distill;
    return (ref_distill_opts_t){.logits = {.temperature = o->logits.temperature,
                                           .scale = o->logits.scale,
                                           .softcap = o->logits.softcap},
                                .target_temperature = o->target_temperature,
                                .target_scale = o->target_scale,
                                .target_softcap = o->target_softcap,
                                .divergence = (int)o->divergence,
                                .beta = o->beta};
}

/* log softmax of x of @z */
static void log_softmax(const double *z, int64_t n, double scale, double cap, double temperature,
                        double *lp)
{
    double sum = 0, top = -INFINITY;
    for (int64_t v = 0; v < n; v++) {
        lp[v] = (cap > 0 ? cap * tanh(scale * z[v] / cap) : scale * z[v]) / temperature;
        top = lp[v] > top ? lp[v] : top;
    }
    for (int64_t v = 0; v < n; v++)
        sum += exp(lp[v] - top);
    for (int64_t v = 0; v < n; v++)
        lp[v] -= top + log(sum);
}

/* What a gradient has to be, and how far it may be off. */
typedef struct sums {
    double *is, *off;
} sums_t;

static sums_t sums_new(int64_t n)
{
    return (sums_t){calloc((size_t)n + 1, 8), calloc((size_t)n + 1, 8)};
}

static void sums_free(sums_t *s)
{
    free(s->is);
    free(s->off);
}

/* Adds a product of @x, off by @dx, with @y, off by @dy. */
static void add(sums_t *s, int64_t i, double x, double dx, double y, double dy, double n)
{
    s->is[i] += x * y;
    s->off[i] += fabs(dx * y) + fabs(x * dy) + fabs(dx * dy) + n * fabs(x * y);
}

static void judge(const char *label, int rank, const char *what, const double *got,
                  const sums_t *want, int64_t i, double rounding)
{
    const double tol =
        want->off[i] + rounding * fabs(want->is[i]) + 0x1p-25 * (rounding == 0x1p-11);
    if (!(fabs(got[i] - want->is[i]) <= tol))
        fail_msg("%s: rank %d: %s %d is %.12g, expected %.12g within %g", label, rank, what, (int)i,
                 got[i], want->is[i], tol);
}

static void compare_replica(const linear_distill_case_t *c, const char *label, int d, sums_t *d_w,
                            sums_t *d_b)
{
    const int64_t T = c->tokens, V = c->vocab, H = c->hidden[0], R = DISTILL_RANK;
    const ref_distill_opts_t o = opts_of(c);
    const double u = unit(c, 0), scale = 0.7, round = roundoff(c->dtype[0]),
                 f = fabs(o.logits.scale / o.logits.temperature),
                 ft = fabs(o.target_scale / o.target_temperature),
                 tiny = c->dtype[0] == COLO_F16 ? 0x1p-25 : 0;
    side_t side[2] = {side_of(c, 0, d), side_of(c, 1, d)};
    const double E = f * side[0].e + ft * side[1].e + 4 * u;
    double *lp = calloc((size_t)V, 8), *lq = calloc((size_t)V, 8), *dz = calloc((size_t)V, 8);
    sums_t d_h = sums_new(T * H), d_a = sums_new(R * H), d_low = sums_new(V * R);
    int64_t valid = 0;
    double largest = 0;
    for (int64_t t = 0; t < T; t++)
        valid += counts(c, d, t);
    for (int64_t t = 0; t < T; t++)
        if (counts(c, d, t) && c->arrays)
            largest = fmax(largest, fabs(c->factor * c->up[d][t]));
    largest = (c->arrays ? largest : fabs(c->factor)) / (double)(c->mean && valid ? valid : 1);
    for (int64_t t = 0; t < T; t++) {
        ref_distill_row_t row = {.kl = 0};
        double L = 0, by = 1, equal = 0, tol = 0;
        if (counts(c, d, t)) {
            ref_distill(&o, side[0].z + t * V, side[1].z + t * V, V, &row);
            L = 1 + 2 * log((double)V) + row.range + row.target_range;
            by = o.divergence == REF_ACCEPTANCE ? row.alpha * row.alpha : 1;
            tol = 4 * (1 + L) * E / by + u * fabs(row.kl);
        }
        for (int r = 0; r < c->ranks; r++) {
            const double *got = c->loss[r + c->ranks * d];
            if (!(fabs(got[t] - row.kl) <= tol))
                fail_msg("%s: rank %d, token %d: %.17g, expected %.17g within %g", label,
                         r + c->ranks * d, (int)t, got[t], row.kl, tol);
            if (memcmp(&got[t], &c->loss[c->ranks * d][t], sizeof *got) != 0)
                fail_msg("%s: ranks of replica %d differ in token %d", label, d, (int)t);
        }
        if (!counts(c, d, t) || c->way == BY_INFERENCE)
            continue;
        double g = c->factor * (c->arrays ? c->up[d][t] : 1);
        g /= (double)(c->mean && valid ? valid : 1);
        log_softmax(side[0].z + t * V, V, o.logits.scale, o.logits.softcap, o.logits.temperature,
                    lp);
        log_softmax(side[1].z + t * V, V, o.target_scale, o.target_softcap, o.target_temperature,
                    lq);
        for (int64_t v = 0; v < V && o.divergence >= REF_TV; v++)
            equal += fabs(lp[v] - lq[v]) < 4 * E ? exp(lp[v]) : 0;
        ref_distill_grad(&o, side[0].z + t * V, side[1].z + t * V, V, 0, g, dz);
        const double *h = c->h[0][d] + t * H;
        double d_u[DISTILL_RANK] = {0}, off_u[DISTILL_RANK] = {0};
        for (int64_t v = 0; v < V; v++) {
            const double p = exp(lp[v]), q = exp(lq[v]),
                         own = o.divergence >= REF_TV && fabs(lp[v] - lq[v]) < 4 * E ? 2 * p : 0,
                         s = fabs(g) * f *
                                 ((p + q) * 8 * (1 + L) * E / by + (p * equal + own) / by) +
                             (o.logits.softcap > 0 ? 4 * f * E * fabs(dz[v]) / o.logits.softcap
                                                   : 0) +
                             round * fabs(dz[v]) + tiny * fmax(largest, fabs(g)) * f,
                         nv = (double)(V + 4) * u, nt = (double)(T * c->replicas + 6) * u;
            for (int64_t k = 0; k < H; k++) {
                const double w = side[0].w[v * H + k];
                add(&d_h, t * H + k, dz[v], s, w, 0,
                    c->lora[0] ? 0 : nv); /* a LoRA's part: below */
                if (c->lora[0])
                    d_h.off[t * H + k] += fabs(dz[v]) * side[0].abs[v * H + k] *
                                              (nv + (double)(R + 4) * u + 4 * round) +
                                          s * side[0].abs[v * H + k];
                add(d_w, v * H + k, dz[v], s, h[k], 0, nt);
            }
            d_b->is[v] += dz[v];
            d_b->off[v] += s + nt * fabs(dz[v]);
            for (int64_t r = 0; r < R; r++) {
                add(&d_low, v * R + r, dz[v], s, side[0].u[t * R + r], 0, nt);
                for (int64_t k = 0; k < H; k++) /* u in the head's dtype */
                    d_low.off[v * R + r] += fabs(dz[v] * scale * c->a[0][r * H + k] * h[k]) *
                                            (round + (double)(H + 2) * u);
                const double low = scale * c->low[0][v * R + r];
                d_u[r] += dz[v] * low;
                off_u[r] += (s + fabs(dz[v]) * (nv + round)) * fabs(low);
            }
        }
        for (int64_t i = 0; i < R * H; i++)
            add(&d_a, i, d_u[i / H], off_u[i / H] + round * fabs(d_u[i / H]) + tiny * largest,
                h[i % H], 0, (double)(T + 4) * u);
    }
    const bool partial = c->config.d_hidden == COLO_D_HIDDEN_PARTIAL,
               scattered = c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER;
    double *whole = calloc((size_t)(T * H) + 1, sizeof *whole);
    for (int r = 0; r < c->ranks && partial; r++)
        for (int64_t i = 0; i < T * H; i++)
            whole[i] += c->d_h[r + c->ranks * d][i];
    for (int r = 0; r < c->ranks && c->way != BY_INFERENCE; r++) {
        const int at = r + c->ranks * d;
        const int64_t part = scattered ? T / c->ranks * H : T * H;
        for (int64_t i = 0; i < part && !c->config.frozen_hidden; i++) {
            const sums_t mine = {d_h.is + (scattered ? r * part : 0),
                                 d_h.off + (scattered ? r * part : 0)};
            /* parts of ranks are rounded, and so are their sums */
            double *off = &mine.off[i], more = 0;
            for (int64_t v = 0; v < V && c->ranks > 1; v++)
                more = fmax(more, side[0].abs[v * H + i % H]);
            const double saved = *off;
            *off += c->ranks > 1
                        ? 2 * c->ranks * round * (more * largest * f * 4 + fabs(mine.is[i]))
                        : 0;
            judge(label, at, "d_hidden", partial ? whole : c->d_h[at], &mine, i, round);
            *off = saved;
        }
        for (int64_t i = 0; i < R * H && c->lora[0] && !c->config.frozen_lora; i++)
            judge(label, at, "d_lora_a", c->d_a[at], &d_a, i, (2 + c->ranks) * u);
        const int64_t lo = c->start[r] < V ? c->start[r] : V;
        for (int64_t i = lo * R;
             i < (lo + true_columns(c, r)) * R && c->lora[0] && !c->config.frozen_lora; i++)
            judge(label, at, "d_lora_b", c->d_low[at], &d_low, i, 2 * u);
        if (c->n_valid[at] != valid || c->n_invalid[at] != 0)
            fail_msg("%s: rank %d counts %d and %d, expected %d and 0", label, at,
                     (int)c->n_valid[at], (int)c->n_invalid[at], (int)valid);
        if (c->second_differs[at])
            fail_msg("%s: rank %d: a second backward differs", label, at);
    }
    free(whole);
    sums_free(&d_h);
    sums_free(&d_a);
    sums_free(&d_low);
    free(lp);
    free(lq);
    free(dz);
    side_free(&side[0]);
    side_free(&side[1]);
}

void linear_distill_compare(const linear_distill_case_t *c, const char *label)
{
    const int64_t V = c->vocab, H = c->hidden[0];
    const double before = c->config.d_weight_add ? c->prefill : 0;
    sums_t d_w = sums_new(V * H), d_b = sums_new(V);
    for (int d = 0; d < c->replicas; d++) {
        compare_replica(c, label, d, &d_w, &d_b);
        if (d + 1 < c->replicas && c->sharded[0])
            continue; /* the sum over replicas is in their shards */
        for (int r = 0; r < c->ranks && c->way != BY_INFERENCE && !c->config.frozen_weight; r++) {
            double *w = calloc((size_t)(V * H) + 1, 8), *b = calloc((size_t)V + 1, 8);
            for (int i = c->sharded[0] ? 0 : d; i <= d; i++) {
                for (int64_t j = 0; j < V * H; j++)
                    w[j] += c->d_w[r + c->ranks * i][j];
                for (int64_t j = 0; j < V; j++)
                    b[j] += c->d_b[r + c->ranks * i][j];
            }
            for (int64_t j = 0; j < V * H; j++)
                w[j] -= before;
            for (int64_t j = 0; j < V; j++)
                b[j] -= before;
            const int64_t lo = c->start[r] < V ? c->start[r] : V, hi = lo + true_columns(c, r);
            const double round = roundoff(c->config.d_weight_dtype) + 4 * unit(c, 0);
            for (int64_t i = lo; i < hi; i++) {
                d_b.off[i] += 4 * unit(c, 0) * fabs(before);
                if (c->bias[0])
                    judge(label, r + c->ranks * d, "d_bias", b, &d_b, i, round);
                for (int64_t j = i * H; j < (i + 1) * H; j++) {
                    d_w.off[j] += 4 * unit(c, 0) * fabs(before);
                    judge(label, r + c->ranks * d, "d_weight", w, &d_w, j, round);
                }
            }
            free(w);
            free(b);
        }
        sums_free(&d_w);
        sums_free(&d_b);
        d_w = sums_new(V * H), d_b = sums_new(V);
    }
    sums_free(&d_w);
    sums_free(&d_b);
}
