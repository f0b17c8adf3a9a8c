/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_logprob.c - the lm_head path: in which order products, passes and collectives run.
 *
 * Every pass is one pipeline over chunks of rows. On the caller's stream: rows are taken, the
 * product makes logits in one of two buffers; then, a chunk later, the products of the gradients
 * read what the lane has made of them. On the lane's stream: statistics, merge, gather, gradient of
 * a chunk, while the caller's stream is at the next product. The passes differ in what the lane
 * does:
 *
 *   forward   statistics; after the last chunk one gather for all rows, and the merge
 *   backward  the gradient, from the saved statistics
 *   loss      statistics, a gather (several ranks), merge and gradient of the chunk
 *
 * so there is one loop, and work() says which. Rows, chunks and memory are linear-plan.c's,
 * formulas the passes' (passes.h), products and packing the table's (linear.h), shards the head's.
 *
 * The head is acquired once before the loop and released after it, whatever the loop does and
 * whether or not this rank has a token: the other ranks of its group are in the same pass. d_W is
 * reduced once after it. A rank whose arguments are wrong tells the groups before it returns; one
 * that fails later marks them failed.
 */
#include "loss/check.h"
#include "loss/linear-plan.h"

#include "comm/comm.h"
#include "core/try.h"

#include <stdio.h>
#include <stdlib.h>

enum { LOGITS0 = 0, LOGITS1 = 1, WORK0 = 2, WORK1 = 3, MAIN = 4, LANE = 5, EVENTS = 6 };

/* One call. */
struct call {
    const colo_linear_logprob_t *l;
    struct colo_linear_size s;
    struct colo_linear_room m;
    unsigned char *room, *kept; /* workspace; kept logits */
    colo_stream_t main, lane;
    colo_tensor_t hidden;
    struct colo_linear_rows rows;
    struct colo_logprob_pass pass;
    struct colo_linear_matrix weight;
    void *bias;

    colo_lm_head_grads_t head_grads;
    colo_tensor_t d_weight, d_bias; /* of the whole head */
    bool fresh;                     /* d_weight holds nothing yet */
    struct colo_linear_matrix d_hidden;
    const colo_tensor_t *d_hidden_out;
};

static void *at(const struct call *k, int64_t offset)
{
    return offset < 0 ? NULL : k->room + offset;
}

/* ---- the object ---- */

colo_status_t colo_linear_logprob_create(colo_linear_logprob_t **linear,
                                         const colo_linear_logprob_config_t *config,
                                         colo_lm_head_t *head, colo_comm_t *group)
{
    colo_status_t st;
    if (!linear)
        return colo_fail(COLO_ERR_ARG, "linear: linear is NULL");
    if (!group)
        return colo_fail(COLO_ERR_ARG, "linear: group is NULL; colo_comm_create_self() makes one "
                                       "of one rank");
    COLO_TRY(colo_linear_i_check_config(config, head, group));
    const colo_lm_head_config_t *h = colo_lm_head_config(head);
    colo_linear_logprob_t *l = calloc(1, sizeof *l);
    if (!l)
        return colo_fail(COLO_ERR_NOMEM, "linear: %zu bytes", sizeof *l);
    *l = (colo_linear_logprob_t){
        .config = *config,
        .head = head,
        .group = group,
        .dtype = h->dtype,
        .stat_dtype = colo_logprob_stat_dtype(h->dtype),
        .columns = h->rows,
        .hidden = h->hidden,
        .has_bias = h->has_bias,
    };
    const struct colo_linear_shape shape = {
        .device = h->device,
        .dtype = h->dtype,
        .logits_dtype = config->logits_dtype,
        .sum_dtype = h->dtype == COLO_F64 ? COLO_F64 : COLO_F32,
        .columns = h->rows,
        .hidden = h->hidden,
    };
    COLO_TRY_GOTO(st, colo_ops_for(h->mem, &l->ops), fail); /* the head has looked at its tables */
    COLO_TRY_GOTO(st, l->ops->lanes->create(EVENTS, &l->lane), fail);
    COLO_TRY_GOTO(st, l->ops->linear->create(&shape, &l->gemm), fail);
    *linear = l;
    return COLO_OK;
fail:
    colo_linear_logprob_destroy(&l);
    return st;
}

void colo_linear_logprob_destroy(colo_linear_logprob_t **linear)
{
    colo_linear_logprob_t *l = linear ? *linear : NULL;
    if (!l)
        return;
    if (l->ops) {
        l->ops->linear->destroy(l->gemm);
        l->ops->lanes->destroy(l->lane);
    }
    free(l);
    *linear = NULL;
}

/* ---- order between the two streams ---- */

static colo_status_t record(const struct call *k, int32_t event, colo_stream_t on)
{
    return k->l->ops->lanes->record(k->l->lane, event, on);
}

static colo_status_t wait_for(const struct call *k, int32_t event, colo_stream_t on)
{
    return k->l->ops->lanes->wait(k->l->lane, event, on);
}

/* ---- a call's beginning ---- */

/* The logits of row lo of the pass and what follows, gradients too. */
static void *logits_at(const struct call *k, int64_t c)
{
    int64_t row = k->s.z_stride * (int64_t)colo_dtype_size(k->l->config.logits_dtype);
    return k->s.kept ? k->kept + c * k->s.chunk * row : at(k, k->m.z[c % 2]);
}

static void *d_logits_at(const struct call *k, int64_t c)
{
    return k->s.in_place ? logits_at(k, c) : at(k, k->m.dz[c % 2]);
}

static colo_status_t begin(struct call *k, const colo_linear_logprob_t *l,
                           const colo_tensor_t *hidden, const colo_tensor_t *targets,
                           void *workspace, colo_stream_t stream)
{
    const colo_logprob_config_t *c = &l->config.logprob;
    k->l = l;
    k->room = workspace;
    k->main = stream;
    k->lane = l->ops->lanes->stream(l->lane);
    k->hidden = *hidden;
    k->rows = (struct colo_linear_rows){
        .tokens = k->s.tokens,
        .rows = k->s.rows,
        .targets = targets->data,
        .target_stride = targets->stride[0],
        .ignore_index = c->ignore_index,
        .vocab = c->vocab,
        .row_of = at(k, k->m.row_of),
        .token_of = at(k, k->m.token_of),
        .row_targets = at(k, k->m.row_targets),
        .counts = at(k, k->m.counts),
    };
    const int64_t shape[2] = {k->s.rows, l->columns};
    colo_tensor_t z = colo_tensor_host(NULL, l->config.logits_dtype, 2, shape);
    colo_tensor_t packed = colo_tensor_host(k->rows.row_targets, COLO_I64, 1, shape);
    k->pass = colo_logprob_i_pass(c, &z, &packed);
    k->pass.row_stride = k->s.z_stride;
    k->pass.d_dtype = l->dtype;
    k->pass.d_row_stride = k->s.in_place ? k->s.z_stride : k->s.d_stride;
    k->pass.rank = colo_comm_rank(l->group);
    k->pass.ranks = colo_comm_size(l->group);
    k->pass.blocks = at(k, k->m.blocks);
    k->pass.block = k->s.block;
    k->pass.out = (colo_logprob_out_t){
        .logp = at(k, k->m.logp),
        .entropy = at(k, k->m.entropy),
        .loss = at(k, k->m.loss),
        .correct = at(k, k->m.correct),
    };
    return l->ops->linear->pack(&k->rows, stream);
}

/* What the gather tells of this rank; after pack. */
static void make_header(struct call *k)
{
    const colo_logprob_config_t *c = &k->l->config.logprob;
    bool on_host = colo_lm_head_config(k->l->head)->mem == COLO_HOST;
    k->pass.header = (colo_logprob_header_t){
        .magic = COLO_LOGPROB_MAGIC,
        .start = c->vocab_start,
        .columns = k->pass.true_columns,
        .tokens = k->s.rows,
        .config = colo_logprob_i_hash_config(c, k->pass.dtype),
        .targets = on_host && k->pass.ranks > 1 ? colo_logprob_i_hash_targets(&k->pass) : 0,
    };
}

static colo_status_t take_weight(struct call *k)
{
    colo_tensor_t w, b;
    COLO_TRY(colo_lm_head_acquire(k->l->head, k->main, &w, &b));
    k->weight = (struct colo_linear_matrix){w.data, w.stride[0], w.dtype};
    k->bias = k->l->has_bias ? b.data : NULL;
    if (k->m.bias >= 0) { /* a gathered bias is a column of the gathered head */
        colo_box_t to = {at(k, k->m.bias), {1, 1, k->l->columns}, {0, 0, 1}},
                   from = {b.data, {1, 1, k->l->columns}, {0, 0, b.stride[0]}};
        k->bias = to.data;
        if (k->l->columns > 0)
            return k->l->ops->box_copy(&to, &from, colo_dtype_size(k->l->dtype), k->main);
    }
    return COLO_OK;
}

static colo_status_t make_upstream(struct call *k, const colo_linear_upstream_t *up)
{
    const bool wanted[3] = {up->logp != 0, up->entropy != 0, up->loss != 0};
    struct colo_linear_upstream_rows u = {
        .rows = &k->rows,
        .dtype = k->l->stat_dtype,
        .from = {up->d_logp, up->d_entropy, up->d_loss},
        .factor = {up->logp, up->entropy, up->loss},
        .mean = up->mean,
    };
    for (int i = 0; i < 3; i++)
        u.to[i] = wanted[i] ? at(k, k->m.up[i]) : NULL;
    k->pass.upstream = (colo_logprob_upstream_t){u.to[0], u.to[1], u.to[2]};
    return k->l->ops->linear->upstream(&u, k->main);
}

static colo_status_t place_grads(struct call *k, const colo_linear_grads_t *grads)
{
    const colo_linear_logprob_config_t *c = &k->l->config;
    if (!c->frozen_hidden) {
        const colo_tensor_t *d = grads->d_hidden;
        k->d_hidden_out = d;
        k->d_hidden = (struct colo_linear_matrix){d->data, d->stride[0], d->dtype};
        if (c->d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER)
            k->d_hidden = (struct colo_linear_matrix){at(k, k->m.d_hidden), k->l->hidden, d->dtype};
    }
    if (c->frozen_weight)
        return COLO_OK;
    k->head_grads = (colo_lm_head_grads_t){grads->d_weight, grads->d_bias, c->d_weight_add};
    return colo_lm_head_i_gradient(k->l->head, &k->head_grads, at(k, k->m.reduce), &k->d_weight,
                                   &k->d_bias, &k->fresh);
}

/* ---- the pipeline ---- */

static void set_chunk(struct call *k, int64_t c)
{
    k->pass.lo = k->pass.row_lo = c * k->s.chunk;
    k->pass.hi = k->s.rows - k->pass.lo < k->s.chunk ? k->s.rows : k->pass.lo + k->s.chunk;
    k->pass.logits = logits_at(k, c);
    k->pass.d_logits = k->s.makes_grads ? d_logits_at(k, c) : NULL;
}

static void *rows_at(const struct call *k, int64_t c)
{
    return at(k, k->m.h[1] >= 0 ? k->m.h[c % 2] : k->m.h[0]);
}

static colo_status_t multiply(const struct call *k, struct colo_linear_gemm *g)
{
    g->rows = k->pass.hi - k->pass.lo;
    g->columns = k->l->columns;
    g->hidden = k->l->hidden;
    g->workspace = at(k, k->m.gemm);
    return k->l->ops->linear->product(k->l->gemm, g, k->main);
}

/* On the caller's stream: the chunk's rows of hidden, and its logits. */
static colo_status_t make_logits(struct call *k, int64_t c)
{
    const struct colo_linear_ops *ops = k->l->ops->linear;
    const struct colo_linear_matrix hidden = {k->hidden.data, k->hidden.stride[0], k->l->dtype};
    set_chunk(k, c);
    if (c >= 2) /* the lane has read what was in this buffer */
        COLO_TRY(wait_for(k, WORK0 + (int32_t)(c % 2), k->main));
    if (k->m.h[0] >= 0)
        COLO_TRY(ops->take_rows(&k->rows, k->pass.lo, k->pass.hi, k->l->hidden, rows_at(k, c),
                                &hidden, k->main));
    if (k->s.makes_logits) {
        struct colo_linear_gemm g = {
            .product = COLO_LINEAR_LOGITS,
            .h = {rows_at(k, c), k->l->hidden, k->l->dtype},
            .w = k->weight,
            .z = {logits_at(k, c), k->s.z_stride, k->l->config.logits_dtype},
            .bias = k->bias,
        };
        COLO_TRY(multiply(k, &g));
    }
    return record(k, LOGITS0 + (int32_t)(c % 2), k->main);
}

static colo_status_t gather_blocks(struct call *k, bool look)
{
    struct colo_logprob_pass *p = &k->pass;
    COLO_TRY(colo_comm_i_all_gather(k->l->group, COLO_OWNER_LOSS,
                                    p->blocks + p->rank * p->block.bytes, p->blocks, p->block.bytes,
                                    COLO_U8, k->lane));
    return look && colo_lm_head_config(k->l->head)->mem == COLO_HOST
               ? colo_logprob_i_check_headers(p)
               : COLO_OK;
}

/* On the lane: what the pass makes of a chunk's logits. */
static colo_status_t work(struct call *k, int64_t c)
{
    const colo_ops_t *ops = k->l->ops;
    const bool loss = k->s.pass == COLO_LINEAR_LOSS, alone = k->pass.ranks == 1;
    set_chunk(k, c);
    COLO_TRY(wait_for(k, LOGITS0 + (int32_t)(c % 2), k->lane));
    if (k->s.pass != COLO_LINEAR_BACKWARD) {
        k->pass.block_lo = loss || alone ? k->pass.lo : 0;
        COLO_TRY(ops->logprob_stats(&k->pass, k->lane));
        if (loss && !alone)
            COLO_TRY(gather_blocks(k, c == 0));
        if (loss || alone)
            COLO_TRY(ops->logprob_merge(&k->pass, k->lane));
    }
    if (k->s.makes_grads)
        COLO_TRY(ops->logprob_grad(&k->pass, k->lane));
    return record(k, WORK0 + (int32_t)(c % 2), k->lane);
}

/* On the lane, once d_hidden is whole: the sum over the vocabulary group. */
static colo_status_t sum_d_hidden(struct call *k)
{
    const colo_linear_logprob_t *l = k->l;
    const int64_t count = k->s.tokens * l->hidden;
    if (l->config.d_hidden == COLO_D_HIDDEN_PARTIAL)
        return COLO_OK;
    COLO_TRY(record(k, MAIN, k->main));
    COLO_TRY(wait_for(k, MAIN, k->lane));
    if (l->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE)
        return colo_comm_i_all_reduce(l->group, COLO_OWNER_LOSS, k->d_hidden.data, k->d_hidden.data,
                                      count, l->dtype, COLO_SUM, k->lane);
    return colo_comm_i_reduce_scatter(l->group, COLO_OWNER_LOSS, k->d_hidden.data,
                                      k->d_hidden_out->data, count / k->pass.ranks, l->dtype,
                                      COLO_SUM, k->lane);
}

/* On the caller's stream: gradients of a chunk, when the lane has made d_logits. */
static colo_status_t make_grads(struct call *k, int64_t c)
{
    const struct colo_linear_ops *ops = k->l->ops->linear;
    const struct colo_linear_matrix z = {d_logits_at(k, c), k->pass.d_row_stride, k->l->dtype};
    set_chunk(k, c);
    COLO_TRY(wait_for(k, WORK0 + (int32_t)(c % 2), k->main));
    if (!k->l->config.frozen_hidden) {
        struct colo_linear_gemm g = {
            .product = COLO_LINEAR_D_HIDDEN,
            .h = {at(k, k->m.d_h), k->l->hidden, k->l->dtype},
            .w = k->weight,
            .z = z,
        };
        COLO_TRY(multiply(k, &g));
        if (c == 0)
            COLO_TRY(ops->clear_rows(&k->rows, k->l->hidden, &k->d_hidden, k->main));
        COLO_TRY(ops->put_rows(&k->rows, k->pass.lo, k->pass.hi, k->l->hidden, &k->d_hidden,
                               g.h.data, k->main));
        if (c == k->s.chunks - 1) /* beside the last d_W */
            COLO_TRY(sum_d_hidden(k));
    }
    if (k->l->config.frozen_weight)
        return COLO_OK;
    const double beta = k->fresh && c == 0 ? 0 : 1;
    struct colo_linear_gemm g = {
        .product = COLO_LINEAR_D_WEIGHT,
        .h = {rows_at(k, c), k->l->hidden, k->l->dtype},
        .w = {k->d_weight.data, k->d_weight.stride[0], k->d_weight.dtype},
        .z = z,
        .beta = beta,
    };
    COLO_TRY(multiply(k, &g));
    if (!k->l->has_bias)
        return COLO_OK;
    return ops->sum_rows(&z, g.rows, g.columns, k->d_bias.data, k->d_bias.stride[0], beta, k->main);
}

/* After the last chunk: what is left for the lane, then the caller's stream waits for it. */
static colo_status_t finish(struct call *k, const colo_logprob_out_t *out)
{
    if (k->s.pass != COLO_LINEAR_LOSS && out && k->pass.ranks > 1) {
        k->pass.lo = k->pass.block_lo = 0;
        k->pass.hi = k->s.rows;
        COLO_TRY(gather_blocks(k, true));
        COLO_TRY(k->l->ops->logprob_merge(&k->pass, k->lane));
    }
    if (out) {
        struct colo_linear_spread s = {
            .rows = &k->rows, .dtype = k->l->stat_dtype, .from = k->pass.out, .to = *out};
        COLO_TRY(k->l->ops->linear->spread(&s, k->lane));
    }
    COLO_TRY(record(k, LANE, k->lane));
    return wait_for(k, LANE, k->main);
}

static colo_status_t pipeline(struct call *k, const colo_logprob_out_t *out)
{
    if (k->s.needs_weight)
        COLO_TRY(take_weight(k));
    for (int64_t c = 0; c <= k->s.chunks; c++) {
        if (c < k->s.chunks) {
            COLO_TRY(make_logits(k, c));
            COLO_TRY(work(k, c));
        }
        if (c > 0 && k->s.makes_grads)
            COLO_TRY(make_grads(k, c - 1));
    }
    COLO_TRY(finish(k, out));
    if (k->s.needs_weight)
        COLO_TRY(colo_lm_head_release(k->l->head, k->main));
    if (k->s.makes_grads && !k->l->config.frozen_weight)
        return colo_lm_head_reduce(k->l->head, &k->head_grads, at(k, k->m.reduce), k->main);
    return COLO_OK;
}

/* ---- the other ranks ---- */

/* Which groups a pass has collectives with. */
static colo_comm_t *head_group(const colo_linear_logprob_t *l, const struct colo_linear_size *s)
{
    return s->needs_weight || (s->makes_grads && !l->config.frozen_weight)
               ? colo_lm_head_group(l->head)
               : NULL;
}

static colo_comm_t *vocab_group(const colo_linear_logprob_t *l, const struct colo_linear_size *s)
{
    bool sums =
        s->makes_grads && !l->config.frozen_hidden && l->config.d_hidden != COLO_D_HIDDEN_PARTIAL;
    return s->pass != COLO_LINEAR_BACKWARD || sums ? l->group : NULL;
}

/* The verdict on this rank's arguments, told to everybody who would wait for it. @s may be of a
 * batch that is refused: then it says what the others, whose batch is right, will do. */
static colo_status_t ready(const colo_linear_logprob_t *l, const struct colo_linear_size *s,
                           const char *what, colo_status_t mine)
{
    colo_comm_t *head = head_group(l, s), *vocab = vocab_group(l, s);
    if (head)
        mine = colo_loss_i_ready(head, what, mine);
    if (vocab)
        mine = colo_loss_i_ready(vocab, what, mine);
    return mine;
}

/* A failure inside: nobody may wait for this rank. Ranks that differ have all seen it, and their
 * vocabulary group lives on; the head's other ranks have not. */
static colo_status_t gave_up(const struct call *k, colo_status_t st)
{
    colo_comm_t *head = head_group(k->l, &k->s), *vocab = vocab_group(k->l, &k->s);
    if (st >= 0)
        return st;
    if (colo_lm_head_group(k->l->head) && colo_lm_head_state(k->l->head) == COLO_LM_HEAD_AVAILABLE)
        colo_lm_head_release(k->l->head, k->main);
    if (head && colo_comm_size(head) > 1)
        colo_comm_i_fail(head, st);
    if (vocab && colo_comm_size(vocab) > 1 && st != COLO_ERR_MISMATCH)
        colo_comm_i_fail(vocab, st);
    char why[1000]; /* the workspace is the caller's again after @main's work so far */
    snprintf(why, sizeof why, "%s", colo_last_error());
    (void)record(k, LANE, k->lane);
    (void)wait_for(k, LANE, k->main);
    return colo_fail(st, "%s", why);
}

static uint64_t version_of(const colo_tensor_t *t)
{
    return t->version ? *t->version : 0;
}

/* ---- forward ---- */

static colo_status_t check_forward(const colo_linear_logprob_t *l, const colo_linear_batch_t *batch,
                                   const colo_logprob_out_t *out, struct call *k,
                                   colo_linear_pass_t pass, const void *workspace)
{
    uint64_t version;
    COLO_TRY(colo_linear_i_check_batch(l, batch));
    COLO_TRY(colo_linear_i_check_out(l, out));
    COLO_TRY(colo_lm_head_i_bound(l->head, &version));
    COLO_TRY(colo_linear_i_size(l, pass, batch->hidden->shape[0], batch->max_valid, &k->s));
    COLO_TRY(colo_linear_i_room(l, &k->s, &k->m));
    return colo_linear_i_check_room(workspace, "workspace", k->m.bytes);
}

colo_status_t colo_linear_logprob_forward(colo_linear_logprob_t *l,
                                          const colo_linear_batch_t *batch,
                                          const colo_logprob_out_t *out,
                                          colo_linear_logprob_saved_t *saved, void *buffer,
                                          void *workspace, colo_stream_t stream)
{
    const colo_linear_pass_t pass = saved ? COLO_LINEAR_FORWARD : COLO_LINEAR_INFERENCE;
    struct call k = {.room = NULL};
    struct colo_linear_kept kept = {.bytes = 0};
    if (!l)
        return colo_fail(COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_i_size(l, pass, 0, 0, &k.s);
    colo_status_t st = check_forward(l, batch, out, &k, pass, workspace);
    if (st == COLO_OK && !saved && buffer)
        st = colo_fail(COLO_ERR_ARG, "linear: buffer is given, saved is NULL");
    if (st == COLO_OK && saved)
        st = colo_linear_i_kept(l, &k.s, &kept);
    if (st == COLO_OK && saved)
        st = colo_linear_i_check_room(buffer, "buffer", kept.bytes);
    COLO_TRY(ready(l, &k.s, "linear logprob forward", st));
    colo_linear_logprob_saved_t made = {
        .of = l,
        .hidden = *batch->hidden,
        .targets = *batch->targets,
        .hidden_version = version_of(batch->hidden),
        .targets_version = version_of(batch->targets),
        .max_valid = batch->max_valid,
        .buffer = buffer,
        .valid = true,
    };
    colo_lm_head_i_bound(l->head, &made.weight_version);
    st = begin(&k, l, batch->hidden, batch->targets, workspace, stream);
    if (st == COLO_OK) {
        make_header(&k);
        k.pass.saved = saved ? (double *)((unsigned char *)buffer + kept.stats) : NULL;
        k.kept = k.s.kept ? (unsigned char *)buffer + kept.logits : NULL;
        st = pipeline(&k, out);
    }
    COLO_TRY(gave_up(&k, st));
    if (saved)
        *saved = made;
    return COLO_OK;
}

/* ---- backward ---- */

static colo_status_t check_backward(const colo_linear_logprob_t *l,
                                    const colo_linear_logprob_saved_t *saved,
                                    const colo_linear_upstream_t *up,
                                    const colo_linear_grads_t *grads, const void *workspace,
                                    struct call *k, struct colo_linear_kept *kept)
{
    COLO_TRY(colo_linear_i_check_saved(l, saved));
    COLO_TRY(colo_linear_i_check_upstream(l, up));
    COLO_TRY(colo_linear_i_check_grads(l, grads, &saved->hidden));
    COLO_TRY(colo_linear_i_size(l, COLO_LINEAR_BACKWARD, saved->hidden.shape[0], saved->max_valid,
                                &k->s));
    COLO_TRY(colo_linear_i_room(l, &k->s, &k->m));
    COLO_TRY(colo_linear_i_check_room(workspace, "workspace", k->m.bytes));
    k->l = l;
    k->room = (unsigned char *)workspace; /* place_grads() only makes addresses of it */
    COLO_TRY(place_grads(k, grads));
    return colo_linear_i_kept(l, &k->s, kept);
}

colo_status_t colo_linear_logprob_backward(colo_linear_logprob_t *l,
                                           colo_linear_logprob_saved_t *saved,
                                           const colo_linear_upstream_t *upstream,
                                           const colo_linear_grads_t *grads, void *workspace,
                                           colo_stream_t stream)
{
    struct call k = {.room = NULL};
    struct colo_linear_kept kept;
    if (!l)
        return colo_fail(COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_i_size(l, COLO_LINEAR_BACKWARD, 0, 0, &k.s);
    colo_status_t st = check_backward(l, saved, upstream, grads, workspace, &k, &kept);
    COLO_TRY(ready(l, &k.s, "linear logprob backward", st));
    if (!k.s.makes_grads)
        return COLO_OK;
    st = begin(&k, l, &saved->hidden, &saved->targets, workspace, stream);
    if (st == COLO_OK) {
        k.pass.saved = (double *)((unsigned char *)saved->buffer + kept.stats);
        k.kept = k.s.kept ? (unsigned char *)saved->buffer + kept.logits : NULL;
        st = make_upstream(&k, upstream);
    }
    if (st == COLO_OK)
        st = pipeline(&k, NULL);
    COLO_TRY(gave_up(&k, st));
    if (k.s.kept && k.s.in_place)
        saved->valid = false;
    return COLO_OK;
}

/* ---- loss ---- */

colo_status_t colo_linear_logprob_loss(colo_linear_logprob_t *l, const colo_linear_batch_t *batch,
                                       const colo_linear_upstream_t *upstream,
                                       const colo_logprob_out_t *out,
                                       const colo_linear_grads_t *grads, void *workspace,
                                       colo_stream_t stream)
{
    struct call k = {.room = NULL};
    if (!l)
        return colo_fail(COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_i_size(l, COLO_LINEAR_LOSS, 0, 0, &k.s);
    colo_status_t st = check_forward(l, batch, out, &k, COLO_LINEAR_LOSS, workspace);
    if (st == COLO_OK)
        st = colo_linear_i_check_upstream(l, upstream);
    if (st == COLO_OK)
        st = colo_linear_i_check_grads(l, grads, batch->hidden);
    if (st == COLO_OK) {
        k.l = l;
        k.room = workspace;
        st = place_grads(&k, grads);
    }
    COLO_TRY(ready(l, &k.s, "linear logprob loss", st));
    st = begin(&k, l, batch->hidden, batch->targets, workspace, stream);
    if (st == COLO_OK) {
        make_header(&k);
        k.pass.saved = at(&k, k.m.stats);
        st = make_upstream(&k, upstream);
    }
    if (st == COLO_OK)
        st = pipeline(&k, out);
    return gave_up(&k, st);
}
