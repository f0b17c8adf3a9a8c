/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.c - a rank's model: what it holds, and one forward and backward of the whole.
 *
 * Decides which rank holds what. The encoder sits on the source grid's last stage, its MLP split
 * over tp, its 16 patch rows over cp. Stage p of the destination holds layers [pL/P, (p+1)L/P); the
 * first also the embedding, the last also the final norm, the head and the loss. Two tapes record a
 * step: the LLM's ends at what the bridge delivered (or at what the stage before sent), the
 * encoder's has the bridge as its last node and continues from the gradient that the first one
 * found there. Leaves the arithmetic to blocks.c, layer.c and head.c.
 */
#include <stdio.h>
#include <string.h>

#include "rank.h"

/* ---- parameters ---- */

static bool holds(const cap_rank_t *r, const cap_param_t *p)
{
    if (p->encoder)
        return r->encodes;
    if (p->layer < 0)
        return r->front;
    if (p->layer >= r->cfg->model.layers)
        return r->back;
    return r->dst.in && p->layer >= r->first_layer && p->layer < r->end_layer;
}

/* Memory of the ops. */
void *cap_take_there(cap_rank_t *r, int64_t count, int64_t size)
{
    void *p = r->ops.take(&r->ops, count * size);
    r->arena.failed = r->arena.failed || !p;
    return p;
}

static float *take_floats(cap_rank_t *r, int64_t count)
{
    return cap_take_there(r, count, sizeof(float));
}

/* Where the ops see @count words that this rank writes at @host: there, or a copy on the device. */
static int64_t *take_seen(cap_rank_t *r, int64_t *host, int64_t count)
{
    return r->ops.mem == COLO_MEM_HOST ? host : cap_take_there(r, count, sizeof *host);
}

static void take_params(cap_rank_t *r)
{
    for (int side = 0; side < 2; side++) {
        const cap_side_t *s = side ? &r->dst : &r->src;
        int64_t total = 0, offset = 0;

        for (int i = 0; i < r->nparams; i++) {
            int64_t rows, cols;
            if (r->table[i].encoder == side || !holds(r, &r->table[i]))
                continue;
            cap_param_shard_shape(&r->table[i], s->t, s->tp, &rows, &cols);
            if (cap_head_sharded(r, i))
                rows = r->head_rows;
            r->count[i] = rows * cols;
            total += rows * cols;
        }
        r->side_count[side] = total;
        r->side_w[side] = take_floats(r, total);
        r->side_g[side] = take_floats(r, total);
        r->adam_m[side] = take_floats(r, total);
        r->adam_v[side] = take_floats(r, total);
        if (r->arena.failed)
            return;
        for (int i = 0; i < r->nparams; i++) {
            if (r->table[i].encoder == side || !holds(r, &r->table[i]))
                continue;
            r->w[i] = r->side_w[side] + offset;
            r->g[i] = r->side_g[side] + offset;
            offset += r->count[i];
        }
    }
}

static void init_params(cap_rank_t *r)
{
    int64_t most = 0;

    for (int i = 0; i < r->nparams; i++)
        if (r->table[i].rows * r->table[i].cols > most)
            most = r->table[i].rows * r->table[i].cols;
    r->whole = cap_take(&r->arena, most, sizeof(float));
    r->shard = cap_take(&r->arena, most, sizeof(float));
    if (r->arena.failed)
        return;
    for (int i = 0; i < r->nparams; i++) {
        const cap_side_t *s = r->table[i].encoder ? &r->src : &r->dst;
        if (!r->w[i])
            continue;
        cap_param_init(r->table, i, r->cfg->seed, r->whole);
        cap_param_shard(&r->table[i], s->t, s->tp, r->whole, r->shard);
        int64_t first = cap_head_sharded(r, i) ? r->head_first * r->table[i].cols : 0;
        r->ops.put(&r->ops, r->w[i], r->shard + first, r->count[i] * (int64_t)sizeof(float));
    }
}

/* ---- what the rank owns of tensors and sequence ---- */

static colo_status_t place_encoder(cap_rank_t *r)
{
    int64_t D = r->cfg->model.width,
            rank = colo_comm_world_rank(r->world, colo_comm_rank(r->world));
    colo_owned_t owned;
    colo_run_t runs[CAP_PATCHES];
    int64_t nruns = 0;

    CAP_TRY(colo_layout_owned(
        &r->src_layout, rank,
        &(colo_shape_t){.samples = r->cfg->batch, .rows = CAP_PATCHES, .features = D}, false,
        &owned, runs, CAP_PATCHES, &nruns));
    r->sb = owned.b1 - owned.b0;
    r->sn = owned.rows;
    r->patch_at = cap_take(&r->arena, CAP_PATCHES, sizeof *r->patch_at);
    if (!r->patch_at)
        return COLO_ERR_NOMEM;
    for (int64_t k = 0; k < nruns; k++)
        for (int64_t i = 0; i < runs[k].count; i++)
            r->patch_at[runs[k].local + i] = runs[k].row + i;
    return COLO_OK;
}

/* Which stages and positions of the destination are here. */
static void place_llm(cap_rank_t *r)
{
    int64_t layers = r->cfg->model.layers;

    if (!r->dst.in)
        return;
    r->n = r->seq.block = r->cfg->dynamic_cp ? r->S : r->S / r->dst.cp; /* at most */
    r->T = r->seq.b * r->n;
    r->first_layer = r->dst.p * layers / r->dst.pp;
    r->end_layer = (r->dst.p + 1) * layers / r->dst.pp;
    r->front = r->dst.p == 0;
    r->back = r->dst.p == r->dst.pp - 1;
}

static colo_status_t make_bridge(cap_rank_t *r)
{
    colo_bridge_config_t config = {
        COLO_BRIDGE_CONFIG_INIT,
        .src = &r->src_layout,
        .dst = &r->dst_layout,
        .shape = {.samples = r->cfg->batch, .rows = CAP_PATCHES, .features = r->cfg->model.width},
        .dtype = COLO_F32,
        .output = r->cfg->output,
        .grad = r->cfg->grad,
        .algo = r->cfg->algo,
        .mem = r->ops.mem};

    CAP_TRY(colo_bridge_create(&r->bridge, &config, r->world));
    colo_bridge_src_shape(r->bridge, r->x_shape);
    colo_bridge_dst_shape(r->bridge, r->y_shape);
    r->yn = r->y_shape[1];
    return COLO_OK;
}

/* Samples of one image, each a sequence of its own. */
static colo_status_t place_uniform(cap_rank_t *r)
{
    const cap_config_t *cfg = r->cfg;

    r->ndim = 3;
    r->filled = cfg->batch * CAP_LENGTH;
    r->seq.b = r->dst.b;
    CAP_TRY(colo_partition_padded(CAP_LENGTH, colo_grid_extent(&cfg->dst, "tp"),
                                  colo_grid_extent(&cfg->dst, "cp"), false, &r->S));
    r->seq.window = r->S;
    CAP_TRY(colo_layout_init_src(&r->src_layout, &cfg->src));
    CAP_TRY(colo_layout_init_dst(&r->dst_layout, &cfg->dst));
    CAP_TRY(colo_layout_map_offset(&r->dst_layout, 0, r->S));
    CAP_TRY(place_encoder(r));
    return make_bridge(r);
}

/* ---- memory ---- */

static void take_layer(cap_rank_t *r, cap_layer_t *l, int64_t index)
{
    int64_t D = r->cfg->model.width, Dl = D / r->dst.tp, T = r->T;
    int64_t heads = r->cfg->model.heads / r->dst.tp;

    l->rank = r;
    l->offset = P_LAYER + index * P_PER_LAYER;
    int64_t Fl = r->count[l->offset + L_BU];
    l->x1_hat = take_floats(r, T * D);
    l->r1 = take_floats(r, T);
    l->a = take_floats(r, T * D);
    l->q = take_floats(r, T * Dl);
    l->kv = take_floats(r, 2 * T * Dl);
    l->kv_all = r->dst.cp > 1 ? take_floats(r, r->dst.cp * 2 * T * Dl) : l->kv;
    l->prob = take_floats(r, T * heads * r->seq.window);
    l->o = take_floats(r, T * Dl);
    l->mid = take_floats(r, T * D);
    l->x2_hat = take_floats(r, T * D);
    l->r2 = take_floats(r, T);
    l->m = take_floats(r, T * D);
    l->act = take_floats(r, T * Fl);
    l->dact = take_floats(r, T * Fl);
    l->out = take_floats(r, T * D);
}

static colo_status_t take_header(cap_rank_t *r)
{
    cap_arena_t *a = &r->arena;
    int64_t D = r->cfg->model.width, T = r->T, size = sizeof(float);
    int64_t Vl = colo_lm_head_config(r->head)->rows;
    size_t bytes = 0;

    r->logprob = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = CAP_VOCAB,
                                         .logits.vocab_start = r->dst.t * CAP_VOCAB / r->dst.tp};
    r->xf_hat = take_floats(r, T * D);
    r->rf = take_floats(r, T);
    r->hf = take_floats(r, T * D);
    r->logits = take_floats(r, T * Vl);
    r->logp = take_floats(r, T);
    r->d_logp = take_floats(r, T);
    r->logits_host = cap_take(a, r->dst.b * Vl, size);
    r->d_logp_host = cap_take(a, T, size);
    r->nll = cap_take(a, T, size);
    r->loss = cap_take(a, 1, size);
    r->mask = cap_take(a, T, 1);
    r->best = cap_take(a, 2 * r->dst.b, size);
    r->best_all = cap_take(a, r->dst.tp * 2 * r->dst.b, size);
    CAP_TRY(colo_logprob_saved_size(&r->logprob, COLO_F32, T, &bytes));
    r->stats = cap_take_aligned(r, bytes);
    CAP_TRY(colo_logprob_workspace_size(&r->logprob, COLO_F32, T, (int32_t)r->dst.tp, &bytes));
    r->workspace = cap_take_aligned(r, bytes);
    return cap_head_take(r);
}

/* A table that this rank writes at *@host, and what the ops see of it. */
static const int64_t *take_table(cap_rank_t *r, int64_t **host, int64_t count)
{
    *host = cap_take(&r->arena, count, sizeof **host);
    return *host ? take_seen(r, *host, count) : NULL;
}

static void show(cap_rank_t *r, const int64_t *seen, const int64_t *host, int64_t count)
{
    r->ops.put(&r->ops, (int64_t *)seen, host, count * (int64_t)sizeof *host);
}

colo_status_t cap_place(cap_rank_t *r)
{
    cap_sequence_t *s = &r->seq;
    colo_partition_t part = r->part;
    int64_t own_row = 0; /* with SHARDED output, y has only this rank's rows, by position */

    s->S = r->S;
    r->n = s->block = 0;
    for (int64_t c = 0; r->S && c < r->dst.cp; c++) {
        int64_t n = r->S / r->dst.cp;
        part.cp_rank = c;
        CAP_TRY(r->cfg->dynamic_cp ? cap_ragged_positions(r, c, r->held, &n)
                                   : colo_partition_check(&part));
        for (int64_t i = 0; i < n; i++) {
            int64_t p = r->cfg->dynamic_cp ? r->held[i] : colo_partition_index(&part, i);
            r->part_of[p] = c;
            r->local_of[p] = i;
            if (c == r->dst.c)
                r->pos[i] = p;
        }
        r->n = c == r->dst.c ? n : r->n;
        s->block = n > s->block ? n : s->block;
    }
    s->n = r->n;
    r->T = s->b * r->n;
    for (int64_t i = 0; i < r->n; i++) {
        r->row[i] = r->image_row[r->pos[i]];
        if (r->row[i] >= 0 && r->cfg->output == COLO_OUTPUT_SHARDED)
            r->row[i] = own_row++;
    }
    show(r, s->pos, r->pos, r->n);
    show(r, s->row, r->row, r->n);
    show(r, s->part_of, r->part_of, r->S);
    show(r, s->local_of, r->local_of, r->S);
    show(r, s->first, r->first, r->S);
    show(r, s->table_row, r->table_row, r->S);
    return COLO_OK;
}

static colo_status_t take_sequence(cap_rank_t *r)
{
    cap_arena_t *a = &r->arena;
    cap_sequence_t *s = &r->seq;

    r->part = (colo_partition_t){COLO_PARTITION_INIT, .cp = r->dst.cp, .cp_rank = r->dst.c, .tp = 1,
                                 .positions = r->S};
    if (r->cfg->dynamic_cp) /* packings say where positions are */
        r->part.cp = 1, r->part.cp_rank = 0;
    s->h = r->cfg->model.heads / r->dst.tp;
    s->e = r->cfg->model.width / r->cfg->model.heads;
    s->n = r->n;
    s->S = r->S;
    s->pos = take_table(r, &r->pos, r->n);
    s->row = take_table(r, &r->row, r->n);
    s->part_of = take_table(r, &r->part_of, r->S);
    s->local_of = take_table(r, &r->local_of, r->S);
    r->held = cap_take(a, r->S, sizeof *r->held);
    s->first = take_table(r, &r->first, r->S);
    s->table_row = take_table(r, &r->table_row, r->S);
    s->tokens = r->tokens_seen = (int64_t *)take_table(r, &r->tokens, s->b * r->S);
    r->targets = (int64_t *)take_table(r, &r->targets_host, r->T);
    r->targets_all = cap_take(a, s->b * r->S, sizeof *r->targets_all);
    r->image_row = cap_take(a, r->S, sizeof *r->image_row);
    r->text_at = cap_take(a, r->dst.b, sizeof *r->text_at);
    if (a->failed)
        return COLO_ERR_NOMEM;
    if (r->ragged)
        return COLO_OK; /* each batch has its own */
    for (int64_t p = 0; p < r->S; p++) {
        r->image_row[p] = p < CAP_PATCHES ? p : -1;
        r->table_row[p] = p;
    }
    for (int64_t i = 0; i < r->dst.b; i++)
        r->text_at[i] = i * r->S + CAP_PATCHES;
    return cap_place(r);
}

static colo_status_t take_activations(cap_rank_t *r)
{
    cap_arena_t *a = &r->arena;
    int64_t D = r->cfg->model.width, t = r->sb * r->sn;
    int64_t E = r->encodes ? r->count[P_B1] : 0;

    r->patches_host = cap_take(a, t * CAP_PATCH, sizeof(float));
    r->patches = take_floats(r, t * CAP_PATCH);
    r->act = take_floats(r, t * E);
    r->dact = take_floats(r, t * E);
    r->d_act = take_floats(r, t * E);
    r->enc = take_floats(r, t * D);
    r->y = take_floats(r, r->front ? r->seq.b * r->yn * D : 0);
    r->no_seed = take_floats(r, 1);
    r->rows = cap_take(a, r->cfg->batch * r->cfg->task.most, sizeof *r->rows);
    r->chosen = cap_take(a, r->dst.b, sizeof *r->chosen);
    if (r->dst.in) {
        int64_t T = r->T, Dl = D / r->dst.tp, Fl = 4 * D / r->dst.tp + 1;

        CAP_TRY(take_sequence(r));
        r->h_in = take_floats(r, T * D);
        r->d_f = take_floats(r, T * Fl);
        r->d_t1 = take_floats(r, T * D);
        r->d_t2 = take_floats(r, T * D);
        r->d_top = take_floats(r, T * D);
        r->d_q = take_floats(r, T * Dl);
        r->d_kv = take_floats(r, 2 * T * Dl);
        r->d_kv_all = r->dst.cp > 1 ? take_floats(r, r->dst.cp * 2 * T * Dl) : r->d_kv;
        r->work = take_floats(r, r->ops.attend_work(&r->seq));
        r->layer = cap_take(a, r->end_layer - r->first_layer, sizeof *r->layer);
        for (int64_t l = r->first_layer; r->layer && l < r->end_layer; l++)
            take_layer(r, &r->layer[l - r->first_layer], l);
        if (r->back)
            CAP_TRY(take_header(r));
    }
    return a->failed ? COLO_ERR_NOMEM : COLO_OK;
}

colo_status_t cap_rank_create(cap_rank_t *r, cap_config_t *cfg, const cap_ops_t *ops,
                              colo_comm_t *world, colo_comm_t *host)
{
    memset(r, 0, sizeof *r);
    r->cfg = cfg;
    r->ops = *ops;
    r->world = world;
    r->host = host;
    colo_comm_set_name(world, "world");
    CAP_TRY(cap_side_create(&r->src, world, host, &cfg->src, "src", cfg->batch));
    CAP_TRY(cap_side_create(&r->dst, world, host, &cfg->dst, "dst", cfg->batch));
    r->encodes = r->src.in && r->src.p == r->src.pp - 1;

    CAP_TRY(cfg->task.ragged ? cap_ragged_create(r) : place_uniform(r));
    place_llm(r);

    r->nparams = cap_params(&cfg->model, r->table);
    r->loss_linear = cfg->loss_linear;
    CAP_TRY(cap_head_create(r));
    take_params(r);
    CAP_TRY(take_activations(r));
    init_params(r);
    if (r->arena.failed)
        return COLO_ERR_NOMEM;
    CAP_TRY(colo_tape_create(&r->encoder_tape));
    CAP_TRY(colo_tape_create(&r->llm_tape));
    colo_tape_set_stream(r->encoder_tape, r->ops.stream);
    colo_tape_set_stream(r->llm_tape, r->ops.stream);
    return r->ops.check(&r->ops);
}

void cap_rank_destroy(cap_rank_t *r)
{
    colo_tape_destroy(&r->llm_tape);
    colo_tape_destroy(&r->encoder_tape);
    cap_ragged_destroy(r);
    colo_bridge_destroy(&r->bridge);
    cap_head_destroy(r);
    cap_side_destroy(&r->dst);
    cap_side_destroy(&r->src);
    cap_arena_free(&r->arena);
    if (r->ops.destroy)
        r->ops.destroy(&r->ops);
}
