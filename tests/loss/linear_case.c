/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_case.c - see linear_case.h: one case, from its numbers to what every rank got. How that is
 * judged is linear_compare.c's.
 */
#include "loss/linear_case.h"

enum { BEFORE = 256, CANARY_BYTE = 0xff /* NaN in every dtype */, FILLED = 1 << 20 };

/* Of the next numbers of a case's memory, @n. */
static double *take(double **next, int64_t n)
{
    double *x = *next;
    *next += n + 1;
    return x;
}

static double *draw(double **next, int64_t n, colo_dtype_t dtype, uint64_t *rng)
{
    double *x = take(next, n);
    for (int64_t i = 0; i < n; i++)
        x[i] = loss_round(dtype, loss_round(COLO_F32, loss_normal(rng)));
    return x;
}

void linear_case_init(linear_case_t *c, int32_t ranks, int32_t replicas, int64_t tokens,
                      int64_t vocab, int64_t hidden, colo_dtype_t dtype, uint64_t *rng)
{
    const int64_t t = tokens + 1, th = tokens * hidden + 1, v = vocab + 1, vh = vocab * hidden + 1,
                  world = ranks * replicas, narrow = LINEAR_RANK * (hidden + vocab) + 2;
    *c = (linear_case_t){.ranks = ranks,
                         .replicas = replicas,
                         .tokens = tokens,
                         .vocab = vocab,
                         .hidden = hidden,
                         .dtype = dtype,
                         .max_valid = -1,
                         .arrays = true,
                         .factor = {1, 1, 1, 1}};
    c->config =
        (colo_linear_logprob_config_t){COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    c->config.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    c->config.logprob.logits.vocab = vocab;
    c->config.logits_dtype = c->config.d_weight_dtype = dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    c->bytes = (size_t)(2 * vh + 3 * v + narrow + t + replicas * (th + (1 + LOSS_UPS) * t) +
                        world * (th + (3 + LOSS_OUTS) * t + narrow)) *
               sizeof(double);
    double *next = c->memory = calloc(c->bytes, 1);
    c->w = draw(&next, vocab * hidden, dtype, rng);
    c->b = draw(&next, vocab, dtype, rng);
    c->lora_a = draw(&next, LINEAR_RANK * hidden, dtype, rng);
    c->lora_b = draw(&next, LINEAR_RANK * vocab, dtype, rng);
    c->lora_scale = 0.7;
    c->class_weight = take(&next, vocab);
    loss_draw_weights(c->class_weight, vocab);
    c->temperature = take(&next, tokens);
    loss_draw_temperature(c->temperature, tokens);
    for (int d = 0; d < replicas; d++) {
        c->h[d] = draw(&next, tokens * hidden, dtype, rng);
        c->targets[d] = (int64_t *)take(&next, tokens);
        for (int64_t i = 0; i < tokens; i++)
            c->targets[d][i] = t_below(rng, vocab);
        for (int k = 0; k < LOSS_UPS; k++)
            c->up[d][k] = draw(&next, tokens, COLO_F32, rng);
    }
    for (int r = 0; r < world; r++) {
        for (int k = 0; k < LOSS_OUTS; k++)
            c->out[r][k] = take(&next, tokens);
        c->argmax[r] = (int64_t *)take(&next, tokens);
        c->weight[r] = take(&next, tokens);
        c->correct[r] = (uint8_t *)take(&next, tokens);
        c->d_h[r] = take(&next, tokens * hidden);
        c->d_lora_a[r] = take(&next, LINEAR_RANK * hidden);
        c->d_lora_b[r] = take(&next, LINEAR_RANK * vocab);
    }
    c->d_w = take(&next, vocab * hidden);
    c->d_b = take(&next, vocab);
    linear_case_shard(c, SHARD_EVEN);
}

void linear_case_free(linear_case_t *c)
{
    free(c->memory);
    free(c->support);
}

/* ---- memory with canaries on both sides ---- */

typedef struct memory {
    unsigned char *block, *data; /* of the host */
    unsigned char *there;        /* the same on a device, when there is one */
    size_t bytes;
} memory_t;

static void wait_for_device(void)
{
    if (where.wait)
        where.wait();
}

static size_t memory_size(const memory_t *m)
{
    return (m->bytes + 2 * BEFORE + 255) / 256 * 256;
}

static void memory_free(memory_t *m)
{
    if (m->there)
        where.drop(m->there);
    free(m->block);
    *m = (memory_t){0};
}

/* What the host wrote, to the device; what the device wrote, to the host. Both wait for it. */
static void memory_send(const memory_t *m)
{
    if (m->there)
        where.set(m->there, m->block, memory_size(m));
}

static void memory_fetch(const memory_t *m)
{
    if (m->there)
        where.get(m->block, m->there, memory_size(m));
}

/* What a call gets. */
static void *memory_at(const memory_t *m)
{
    return m->there ? m->there + BEFORE : m->data;
}

static colo_tensor_t view(const memory_t *m, colo_dtype_t dtype, int32_t ndim, const int64_t *shape)
{
    return where_tensor(memory_at(m), dtype, ndim, shape);
}

static memory_t memory_of(size_t bytes)
{
    memory_t m = {.bytes = bytes};
    const size_t all = memory_size(&m);
    m.block = aligned_alloc(256, all);
    m.data = m.block + BEFORE;
    /* all of it, but for the inside of a workspace of many mebibytes */
    memset(m.block, CANARY_BYTE, bytes < FILLED ? all : BEFORE + FILLED);
    memset(m.data + bytes, CANARY_BYTE, all - BEFORE - bytes);
    m.there = where.mem == COLO_MEM_CUDA ? where.put(m.block, all) : NULL;
    return m;
}

/* After what wrote it has ended, and when it was fetched. */
static bool memory_spilled(const memory_t *m)
{
    size_t after = memory_size(m) - BEFORE - m->bytes;
    for (size_t i = 0; i < BEFORE; i++)
        if (m->block[i] != CANARY_BYTE)
            return true;
    for (size_t i = 0; i < after; i++)
        if (m->data[m->bytes + i] != CANARY_BYTE)
            return true;
    return false;
}

/* ---- one rank ---- */

typedef struct rank {
    linear_case_t *c;
    int32_t world, r, d;
    colo_comm_t *tp, *dp;
    colo_lm_head_t *head;
    colo_linear_logprob_t *linear;
    memory_t weight, bias, gathered, hidden, work, kept, d_h, d_w, d_b, up[LOSS_UPS], half,
        out[LOSS_OUTS];
    colo_tensor_t d_up[LOSS_UPS + 1];                 /* views of up and half */
    memory_t targets, correct, argmax, counts, lists; /* begin, end, ids */
    memory_t temperature, class_weight, out_weight, lora_a, lora_b, d_lora_a, d_lora_b;
    int64_t first, rows; /* of the head's columns here */
} rank_t;

static colo_dtype_t sums_of(const linear_case_t *c)
{
    return c->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
}

static double weight_at(const linear_case_t *c, int64_t column, int64_t k)
{
    return column < c->vocab ? c->w[column * c->hidden + k] : 1000; /* padding: not to be noticed */
}

static colo_status_t make_head(rank_t *k)
{
    linear_case_t *c = k->c;
    const int64_t H = c->hidden;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = c->columns[k->r], .hidden = H,
                                    .dtype = c->dtype, .has_bias = c->has_bias};
    config.mem = where.mem;
    config.device = where.device ? where.device() : -1;
    rank_try(colo_lm_head_create(&k->head, &config, c->head == HEAD_SHARDED ? k->dp : NULL));
    colo_lm_head_rows(k->head, &k->first, &k->rows);
    const size_t elem = colo_dtype_size(c->dtype);
    k->weight = memory_of((size_t)(k->rows * H) * elem);
    k->bias = memory_of((size_t)k->rows * elem);
    k->gathered = memory_of(colo_lm_head_gathered_size(k->head));
    for (int64_t i = 0; i < k->rows; i++) {
        int64_t column = c->start[k->r] + k->first + i;
        for (int64_t j = 0; j < H; j++)
            loss_store(c->dtype, k->weight.data, i * H + j,
                       loss_round(c->dtype, weight_at(c, column, j)));
        loss_store(c->dtype, k->bias.data, i, column < c->vocab ? c->b[column] : 0);
    }
    memory_send(&k->weight);
    memory_send(&k->bias);
    colo_tensor_t w = view(&k->weight, c->dtype, 2, (int64_t[]){k->rows, H});
    colo_tensor_t b = view(&k->bias, c->dtype, 1, &k->rows);
    return colo_lm_head_bind(k->head, &w, c->has_bias ? &b : NULL,
                             c->head == HEAD_SHARDED ? memory_at(&k->gathered) : NULL);
}

static void fill(colo_dtype_t dtype, memory_t *m, int64_t n, double v)
{
    for (int64_t i = 0; i < n; i++)
        loss_store(dtype, m->data, i, v);
    memory_send(m);
}

static memory_t memory_from(colo_dtype_t dtype, const double *values, int64_t n)
{
    memory_t m = memory_of((size_t)n * colo_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++)
        loss_store(dtype, m.data, i, values[i]);
    memory_send(&m);
    return m;
}

static void make_memory(rank_t *k)
{
    linear_case_t *c = k->c;
    const int64_t T = c->tokens, H = c->hidden;
    const colo_dtype_t stat = sums_of(c), dw = c->config.d_weight_dtype;
    /* a resident head is in every replica: what was there before counts once */
    bool holds = c->head == HEAD_SHARDED || k->d == 0;
    double before = c->config.d_weight_add ? holds ? c->prefill : 0 : (double)NAN;
    k->hidden = memory_from(c->dtype, c->h[k->d], T * H);
    k->targets = memory_of((size_t)T * sizeof(int64_t));
    memcpy(k->targets.data, c->targets[k->d], k->targets.bytes);
    memory_send(&k->targets);
    k->correct = memory_of((size_t)T);
    k->argmax = memory_of((size_t)T * sizeof(int64_t));
    k->counts = memory_of(2 * sizeof(int64_t));
    k->d_h = memory_of((size_t)(T * H) * colo_dtype_size(c->dtype));
    k->d_w = memory_of((size_t)(k->rows * H) * colo_dtype_size(dw));
    k->d_b = memory_of((size_t)k->rows * colo_dtype_size(dw));
    fill(dw, &k->d_w, k->rows * H, before);
    fill(dw, &k->d_b, k->rows, before);
    k->class_weight = memory_of((size_t)c->columns[k->r] * colo_dtype_size(stat));
    for (int64_t j = 0; j < c->columns[k->r]; j++)
        loss_store(stat, k->class_weight.data, j,
                   c->start[k->r] + j < c->vocab ? c->class_weight[c->start[k->r] + j] : NAN);
    memory_send(&k->class_weight);
    k->temperature = memory_from(COLO_F32, c->temperature, T);
    k->out_weight = memory_of((size_t)T * colo_dtype_size(stat));
    const int64_t R = LINEAR_RANK, columns = c->columns[k->r];
    k->lora_a = memory_from(c->dtype, c->lora_a, R * H);
    k->lora_b = memory_of((size_t)(columns * R) * colo_dtype_size(c->dtype));
    for (int64_t i = 0; i < columns * R; i++)
        loss_store(c->dtype, k->lora_b.data, i,
                   c->start[k->r] + i / R < c->vocab ? c->lora_b[c->start[k->r] * R + i] : 1000);
    memory_send(&k->lora_b);
    k->d_lora_a = memory_of((size_t)(R * H) * colo_dtype_size(stat));
    k->d_lora_b = memory_of((size_t)(columns * R) * colo_dtype_size(stat));
    k->half = memory_from(stat, (double[]){0.5}, 1);
    for (int i = 0; i < LOSS_UPS; i++)
        k->up[i] = memory_from(stat, c->up[k->d][i], T);
    for (int i = 0; i < LOSS_OUTS; i++)
        k->out[i] = memory_of((size_t)T * colo_dtype_size(stat));
}

/* Lists of a case's support, with the target or not, in @m. */
static int64_t make_lists(const linear_case_t *c, memory_t *m)
{
    int64_t n = 0, T = c->tokens, *begin;
    *m = memory_of((size_t)(T * (c->vocab + 2) + 1) * sizeof(int64_t));
    begin = (int64_t *)m->data;
    for (int64_t t = 0; t < T; t++) {
        begin[t] = n;
        for (int64_t v = 0; v < c->vocab; v++)
            if (c->support && c->support[t * c->vocab + v])
                begin[2 * T + n++] = v;
        begin[T + t] = n;
    }
    memory_send(m);
    return n;
}

static int64_t max_valid_of(const rank_t *k)
{
    return k->c->most_valid[k->d] > 0 ? k->c->most_valid[k->d] : k->c->max_valid;
}

static colo_status_t new_workspace(rank_t *k, colo_linear_logprob_pass_t pass)
{
    size_t bytes;
    wait_for_device();
    memory_fetch(&k->work);
    k->c->spilled[k->world] |= k->work.block && memory_spilled(&k->work);
    memory_free(&k->work);
    rank_try(
        colo_linear_logprob_workspace_size(k->linear, pass, k->c->tokens, max_valid_of(k), &bytes));
    k->work = memory_of(bytes);
    return COLO_OK;
}

/* What is left to backward of an upstream gradient in mode early. */
static const double EARLY = 0.25;

static colo_linear_logprob_upstream_t upstream_of(rank_t *k)
{
    const linear_case_t *c = k->c;
    for (int i = 0; i < LOSS_UPS; i++)
        k->d_up[i] = view(&k->up[i], sums_of(c), 1, &c->tokens);
    const colo_logprob_config_t *p = &c->config.logprob;
    return (colo_linear_logprob_upstream_t){
        COLO_LINEAR_LOGPROB_UPSTREAM_INIT,
        .logp = c->factor[0],
        .entropy = p->want_entropy ? c->factor[1] : 0,
        .loss = p->want_loss ? c->factor[2] : 0,
        .d_logp = c->arrays ? &k->d_up[0] : NULL,
        .d_entropy = c->arrays ? &k->d_up[1] : NULL,
        .d_loss = c->arrays ? &k->d_up[2] : NULL,
        .mean = c->mean,
        .lse = p->want_lse ? c->factor[3] : 0,
        .d_lse = c->arrays ? &k->d_up[3] : NULL,
    };
}

static uint64_t hash_bytes(const unsigned char *p, size_t n)
{
    uint64_t h = 1;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

static colo_status_t run_backward(rank_t *k, colo_linear_logprob_saved_t *saved,
                                  const colo_linear_logprob_grads_t *grads)
{
    linear_case_t *c = k->c;
    k->d_up[LOSS_UPS] = view(&k->half, sums_of(c), 1, &(int64_t){1});
    const colo_linear_logprob_upstream_t up =
        c->config.mode == COLO_LINEAR_LOGPROB_EARLY
            ? (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT,
                                               .loss = EARLY / 0.5, .d_loss = &k->d_up[LOSS_UPS]}
            : upstream_of(k);
    wait_for_device();
    memory_fetch(&k->kept);
    const uint64_t kept = hash_bytes(k->kept.data, k->kept.bytes);
    uint64_t first = 0;
    for (int rep = 0; rep <= (int)c->twice; rep++) {
        if (rep) {
            fill(c->config.d_weight_dtype, &k->d_w, k->rows * c->hidden, 0);
            fill(c->config.d_weight_dtype, &k->d_b, k->rows, 0);
        }
        rank_try(new_workspace(k, COLO_LINEAR_LOGPROB_BACKWARD));
        rank_try(colo_linear_logprob_backward(k->linear, saved, &up, grads, memory_at(&k->work),
                                              where_stream()));
        wait_for_device();
        memory_fetch(&k->d_h);
        memory_fetch(&k->d_w);
        memory_fetch(&k->d_b);
        memory_fetch(&k->d_lora_a);
        memory_fetch(&k->d_lora_b);
        uint64_t all = hash_bytes(k->d_h.data, k->d_h.bytes) ^
                       hash_bytes(k->d_w.data, k->d_w.bytes) << 1 ^
                       hash_bytes(k->d_b.data, k->d_b.bytes) << 2 ^
                       hash_bytes(k->d_lora_a.data, k->d_lora_a.bytes) << 3 ^
                       hash_bytes(k->d_lora_b.data, k->d_lora_b.bytes) << 4;
        c->second_differs[k->world] |= rep && all != first;
        first = all;
    }
    memory_fetch(&k->kept);
    c->kept_changed[k->world] = kept != hash_bytes(k->kept.data, k->kept.bytes);
    return COLO_OK;
}

static colo_status_t run_passes(rank_t *k)
{
    linear_case_t *c = k->c;
    const int64_t T = c->tokens, H = c->hidden, slice = T / c->ranks;
    const bool frozen_w = c->config.frozen_weight, frozen_h = c->config.frozen_hidden;
    const bool scattered = c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER;
    const colo_dtype_t dw = c->config.d_weight_dtype;
    const colo_logprob_config_t *p = &c->config.logprob;
    size_t bytes;
    colo_tensor_t hidden = view(&k->hidden, c->dtype, 2, (int64_t[]){T, H});
    colo_tensor_t targets = view(&k->targets, COLO_I64, 1, &T);
    colo_tensor_t d_h = view(&k->d_h, c->dtype, 2, (int64_t[]){scattered ? slice : T, H});
    colo_tensor_t d_w = view(&k->d_w, dw, 2, (int64_t[]){k->rows, H});
    colo_tensor_t d_b = view(&k->d_b, dw, 1, &k->rows);
    const int64_t listed = make_lists(c, &k->lists);
    colo_tensor_t begin = view(&k->lists, COLO_I64, 1, &T), end = begin,
                  ids = view(&k->lists, COLO_I64, 1, &listed);
    end.data = (int64_t *)begin.data + T;
    ids.data = (int64_t *)begin.data + 2 * T;
    const colo_support_t support = {&ids, &begin, &end};
    const colo_tensor_t class_weight = view(&k->class_weight, sums_of(c), 1, &c->columns[k->r]);
    const int64_t of_a[2] = {LINEAR_RANK, H}, of_b[2] = {c->columns[k->r], LINEAR_RANK};
    const colo_tensor_t lora_a = view(&k->lora_a, c->dtype, 2, of_a),
                        lora_b = view(&k->lora_b, c->dtype, 2, of_b),
                        d_lora_a = view(&k->d_lora_a, sums_of(c), 2, of_a),
                        d_lora_b = view(&k->d_lora_b, sums_of(c), 2, of_b);
    const colo_lora_t lora = {&lora_a, &lora_b, c->lora_scale};
    const bool narrow = c->config.lora && !c->config.frozen_lora;
    const colo_tensor_t temperature = view(&k->temperature, COLO_F32, 1, &T);
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT,
                                         &hidden,
                                         &targets,
                                         max_valid_of(k),
                                         c->support ? &support : NULL,
                                         p->has_class_weight ? &class_weight : NULL,
                                         c->config.lora ? &lora : NULL,
                                         p->has_temperature ? &temperature : NULL};
    colo_linear_logprob_grads_t grads = {
        COLO_LINEAR_LOGPROB_GRADS_INIT, frozen_h ? NULL : &d_h,
        frozen_w ? NULL : &d_w,         frozen_w || !c->has_bias ? NULL : &d_b,
        narrow ? &d_lora_a : NULL,      narrow ? &d_lora_b : NULL};
    int64_t *counts = memory_at(&k->counts);
    const colo_dtype_t stat = sums_of(c);
    const colo_logprob_out_t out = {
        COLO_LOGPROB_OUT_INIT,
        .logp = WHERE_ARRAY(memory_at(&k->out[0]), stat, T),
        .entropy = p->want_entropy ? WHERE_ARRAY(memory_at(&k->out[1]), stat, T) : NULL,
        .loss = p->want_loss ? WHERE_ARRAY(memory_at(&k->out[2]), stat, T) : NULL,
        .correct = p->want_correct ? WHERE_ARRAY(memory_at(&k->correct), COLO_U8, T) : NULL,
        .n_valid = WHERE_ARRAY(counts, COLO_I64, 1),
        .n_invalid = WHERE_ARRAY(counts + 1, COLO_I64, 1),
        .weight = p->has_class_weight ? WHERE_ARRAY(memory_at(&k->out_weight), stat, T) : NULL,
        .argmax = p->want_argmax ? WHERE_ARRAY(memory_at(&k->argmax), COLO_I64, T) : NULL,
        .lse = p->want_lse ? WHERE_ARRAY(memory_at(&k->out[3]), stat, T) : NULL,
        .sum_p2 = p->want_sum_p2 ? WHERE_ARRAY(memory_at(&k->out[4]), stat, T) : NULL,
        .mean_logits = p->want_mean_logits ? WHERE_ARRAY(memory_at(&k->out[5]), stat, T) : NULL,
    };
    colo_linear_logprob_saved_t saved = {COLO_LINEAR_LOGPROB_SAVED_INIT,
                                         .d_weight =
                                             c->config.share_d_weight ? memory_at(&k->d_w) : NULL};
    colo_comm_stats_reset(k->tp);
    colo_comm_stats_reset(k->dp);
    if (c->start_early)
        rank_try(colo_lm_head_start(k->head, where_stream()));
    if (c->loss_mode) {
        const colo_linear_logprob_upstream_t up = upstream_of(k);
        rank_try(new_workspace(k, COLO_LINEAR_LOGPROB_LOSS));
        rank_try(colo_linear_logprob_loss(k->linear, &batch, &up, &out, &grads, memory_at(&k->work),
                                          where_stream()));
    } else {
        for (int rep = 0; rep <= (int)c->checkpoint; rep++) {
            bool last = rep == (int)c->checkpoint, keeps = last && !c->no_saved;
            if (keeps) {
                rank_try(colo_linear_logprob_saved_size(k->linear, T, max_valid_of(k), &bytes));
                k->kept = memory_of(bytes);
            }
            rank_try(new_workspace(k, keeps ? COLO_LINEAR_LOGPROB_FORWARD
                                            : COLO_LINEAR_LOGPROB_INFERENCE));
            void *kept = memory_at(&k->kept), *work = memory_at(&k->work);
            colo_linear_logprob_upstream_t up = upstream_of(k);
            up.logp /= EARLY;
            up.entropy /= EARLY;
            up.loss /= EARLY;
            up.lse /= EARLY;
            rank_try(keeps && c->config.mode == COLO_LINEAR_LOGPROB_EARLY
                         ? colo_linear_logprob_early(k->linear, &batch, &up, &out, &saved, kept,
                                                     work, where_stream())
                         : colo_linear_logprob_forward(k->linear, &batch, &out,
                                                       keeps ? &saved : NULL, kept, work,
                                                       where_stream()));
        }
    }
    t_comm_stats(k->tp, &c->tp_forward[k->world]);
    t_comm_stats(k->dp, &c->head_forward[k->world]);
    wait_for_device();
    memset(k->gathered.data, 0xff, k->gathered.bytes); /* nothing gathered is there any more */
    memory_send(&k->gathered);
    if (!c->loss_mode && !c->no_saved)
        rank_try(run_backward(k, &saved, &grads));
    t_comm_stats(k->tp, &c->tp_all[k->world]);
    t_comm_stats(k->dp, &c->head_all[k->world]);
    if (c->head == HEAD_RESIDENT && c->replicas > 1 && !frozen_w) {
        void *sum_w = memory_at(&k->d_w), *sum_b = memory_at(&k->d_b);
        rank_try(colo_comm_all_reduce(k->dp, sum_w, sum_w, k->rows * H, dw, COLO_REDOP_SUM,
                                      where_stream()));
        rank_try(
            colo_comm_all_reduce(k->dp, sum_b, sum_b, k->rows, dw, COLO_REDOP_SUM, where_stream()));
    }
    return COLO_OK;
}

static void collect(rank_t *k)
{
    linear_case_t *c = k->c;
    const int64_t H = c->hidden;
    wait_for_device();
    const memory_t *all[] = {&k->weight,     &k->bias,   &k->gathered, &k->hidden,   &k->work,
                             &k->kept,       &k->d_h,    &k->d_w,      &k->d_b,      &k->out[0],
                             &k->out[1],     &k->out[2], &k->targets,  &k->correct,  &k->counts,
                             &k->out_weight, &k->lora_a, &k->lora_b,   &k->d_lora_a, &k->d_lora_b,
                             &k->out[3],     &k->out[4], &k->out[5],   &k->argmax};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        memory_fetch(all[i]);
        c->spilled[k->world] |= all[i]->block && memory_spilled(all[i]);
    }
    if (c->config.logprob.want_correct)
        memcpy(c->correct[k->world], k->correct.data, (size_t)c->tokens);
    if (c->config.logprob.want_argmax)
        memcpy(c->argmax[k->world], k->argmax.data, (size_t)c->tokens * sizeof(int64_t));
    c->n_valid[k->world] = ((const int64_t *)k->counts.data)[0];
    c->n_invalid[k->world] = ((const int64_t *)k->counts.data)[1];
    for (int i = 0; i < LOSS_OUTS; i++)
        for (int64_t t = 0; t < c->tokens; t++)
            c->out[k->world][i][t] = loss_load(sums_of(c), k->out[i].data, t);
    for (int64_t t = 0; t < c->tokens; t++)
        c->weight[k->world][t] = loss_load(sums_of(c), k->out_weight.data, t);
    int64_t tokens = c->tokens;
    if (c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER)
        tokens /= c->ranks;
    for (int64_t i = 0; i < tokens * H; i++)
        c->d_h[k->world][i] = loss_load(c->dtype, k->d_h.data, i);
    for (int64_t i = 0; i < LINEAR_RANK * H; i++)
        c->d_lora_a[k->world][i] = loss_load(sums_of(c), k->d_lora_a.data, i);
    for (int64_t i = 0; i < LINEAR_RANK * c->columns[k->r]; i++)
        if (c->start[k->r] + i / LINEAR_RANK < c->vocab)
            c->d_lora_b[k->world][LINEAR_RANK * c->start[k->r] + i] =
                loss_load(sums_of(c), k->d_lora_b.data, i);
    if (c->head == HEAD_RESIDENT && k->d > 0)
        return; /* the same as the first replica's */
    for (int64_t i = 0; i < k->rows; i++) {
        int64_t column = c->start[k->r] + k->first + i;
        if (column >= c->vocab)
            continue;
        for (int64_t j = 0; j < H; j++)
            c->d_w[column * H + j] = loss_load(c->config.d_weight_dtype, k->d_w.data, i * H + j);
        c->d_b[column] = loss_load(c->config.d_weight_dtype, k->d_b.data, i);
    }
}

/* Ranks of @world that differ in that dim of @grid, @n of them. */
static colo_status_t group_of(colo_comm_t *world, const colo_grid_t *grid, const char *dim,
                              int32_t n, colo_comm_t **group)
{
    if (n > 1 && n < colo_comm_size(world))
        return colo_comm_split(world, grid, dim, group);
    *group = world;
    return n == 1 ? colo_comm_create_self(group) : COLO_OK;
}

static colo_status_t run_rank(rank_t *k, colo_comm_t *host, colo_comm_t *world)
{
    linear_case_t *c = k->c;
    colo_grid_t grid;
    k->world = colo_comm_rank(world);
    k->r = k->world % c->ranks;
    k->d = k->world / c->ranks;
    const char *spec = t_text("tp=%d,dp=%d", (int)c->ranks, (int)c->replicas);
    rank_try(colo_grid_parse(&grid, spec, (int64_t)c->ranks * c->replicas));
    rank_try(group_of(world, &grid, "tp", c->ranks, &k->tp));
    rank_try(group_of(world, &grid, "dp", c->replicas, &k->dp));
    if (c->each_comm) {
        c->each_comm(k->tp);
        c->each_comm(k->dp);
    }
    rank_try(make_head(k));
    make_memory(k);
    colo_linear_logprob_config_t config = c->config;
    config.logprob.logits.vocab_start = c->start[k->r];
    rank_try(colo_linear_logprob_create(&k->linear, &config, k->head, k->tp));
    int64_t rows = max_valid_of(k) < 0 ? c->tokens : max_valid_of(k),
            chunk = colo_linear_logprob_chunk(k->linear, rows);
    c->chunks[k->world] = chunk ? (rows + chunk - 1) / chunk : 0;
    rank_try(run_passes(k));
    for (int32_t writer = 0; writer < c->ranks * c->replicas; writer++) { /* ranks share d_w */
        if (writer == k->world)
            collect(k);
        rank_try(colo_comm_barrier(host, NULL));
    }
    return COLO_OK;
}

static void rank_free(rank_t *k, const colo_comm_t *world)
{
    memory_t *all[] = {&k->weight,       &k->bias,       &k->gathered, &k->hidden, &k->work,
                       &k->kept,         &k->d_h,        &k->d_w,      &k->d_b,    &k->up[0],
                       &k->up[1],        &k->up[2],      &k->half,     &k->out[0], &k->out[1],
                       &k->out[2],       &k->targets,    &k->correct,  &k->counts, &k->lists,
                       &k->class_weight, &k->out_weight, &k->lora_a,   &k->lora_b, &k->d_lora_a,
                       &k->d_lora_b,     &k->argmax,     &k->up[3],    &k->out[3], &k->out[4],
                       &k->out[5],       &k->temperature};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        memory_free(all[i]);
    colo_linear_logprob_destroy(&k->linear);
    colo_lm_head_destroy(&k->head);
    if (k->tp != world)
        colo_comm_destroy(&k->tp);
    if (k->dp != world)
        colo_comm_destroy(&k->dp);
}

/* @host and @world have the same ranks. */
static colo_status_t run_case(linear_case_t *c, colo_comm_t *host, colo_comm_t *world)
{
    rank_t k = {.c = c};
    colo_status_t st = run_rank(&k, host, world);
    wait_for_device();
    if (st == COLO_OK) /* freeing waits for the device, which other ranks may share */
        st = colo_comm_barrier(host, NULL);
    rank_free(&k, world);
    return st == COLO_OK ? colo_comm_barrier(host, NULL) : st;
}

static int32_t ncases; /* of the run */

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    linear_case_t *c = arg;
    colo_comm_t *group = NULL;
    colo_status_t st = where.group(world, &group);
    for (int32_t i = 0; i < ncases && st == COLO_OK; i++) {
        st = run_case(&c[i], world, group);
        if (st < 0 && ncases > 1)
            st = colo_fail_prefix(st, "case %d", (int)i);
    }
    where.leave(&group);
    return st;
}

colo_status_t linear_case_run_all(linear_case_t *c, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        memset(c[i].spilled, 0, sizeof c[i].spilled);
        memset(c[i].second_differs, 0, sizeof c[i].second_differs);
        t_share(c[i].memory, c[i].bytes);
    }
    ncases = n;
    colo_status_t st = t_run_ranks(c->ranks * c->replicas, on_rank, c, (size_t)n * sizeof *c);
    for (int32_t i = 0; i < n; i++)
        t_unshare(c[i].memory);
    return st;
}

colo_status_t linear_case_run(linear_case_t *c)
{
    return linear_case_run_all(c, 1);
}
