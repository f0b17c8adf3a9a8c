/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.c - a rank's model: what it holds, and one forward and backward of the whole.
 *
 * Decides who holds what. The encoder sits on the source grid's last stage, its MLP split over tp,
 * its 16 patch rows over cp. Stage p of the destination holds layers [pL/P, (p+1)L/P); the first
 * also the embedding, the last also the final norm, the head and the loss. Two tapes record a step:
 * the LLM's ends at what the bridge delivered (or at what the stage before sent), the encoder's
 * has the bridge as its last node and continues from the gradient that the first one found there.
 * Leaves the arithmetic to blocks.c and layer.c.
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

static void take_params(cap_rank_t *r)
{
    for (int side = 0; side < 2; side++) {
        const cap_side_t *s = side ? &r->dst : &r->src;
        int64_t total = 0, at = 0;

        for (int i = 0; i < r->nparams; i++) {
            int64_t rows, cols;
            if (r->table[i].encoder == side || !holds(r, &r->table[i]))
                continue;
            cap_param_shard_shape(&r->table[i], s->t, s->tp, &rows, &cols);
            r->count[i] = rows * cols;
            total += rows * cols;
        }
        r->side_count[side] = total;
        r->side_w[side] = cap_take(&r->arena, total, sizeof(float));
        r->side_g[side] = cap_take(&r->arena, total, sizeof(float));
        r->adam_m[side] = cap_take(&r->arena, total, sizeof(float));
        r->adam_v[side] = cap_take(&r->arena, total, sizeof(float));
        if (r->arena.failed)
            return;
        for (int i = 0; i < r->nparams; i++) {
            if (r->table[i].encoder == side || !holds(r, &r->table[i]))
                continue;
            r->w[i] = r->side_w[side] + at;
            r->g[i] = r->side_g[side] + at;
            at += r->count[i];
        }
    }
}

static void init_params(cap_rank_t *r)
{
    int64_t most = 0;

    for (int i = 0; i < r->nparams; i++)
        if (r->table[i].rows * r->table[i].cols > most)
            most = r->table[i].rows * r->table[i].cols;
    float *whole = cap_take(&r->arena, most, sizeof *whole);
    if (!whole)
        return;
    for (int i = 0; i < r->nparams; i++) {
        const cap_side_t *s = r->table[i].encoder ? &r->src : &r->dst;
        if (!r->w[i])
            continue;
        cap_param_init(r->table, i, r->cfg->seed, whole);
        cap_param_shard(&r->table[i], s->t, s->tp, whole, r->w[i]);
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

    CAP_TRY(colo_layout_owned(&r->src_layout, rank, r->cfg->batch, CAP_PATCHES, D, false, &owned,
                              runs, CAP_PATCHES, &nruns));
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

static colo_status_t place_sequence(cap_rank_t *r)
{
    const colo_grid_t *grid = &r->cfg->dst;
    int64_t tp = colo_grid_extent(grid, "tp"), cp = colo_grid_extent(grid, "cp");
    int64_t pp = colo_grid_extent(grid, "pp"), layers = r->cfg->model.layers;

    CAP_TRY(colo_partition_padded(CAP_LENGTH, tp, cp, false, &r->S));
    if (!r->dst.in)
        return COLO_OK;
    r->n = r->S / cp;
    r->T = r->dst.b * r->n;
    r->first_layer = r->dst.p * layers / pp;
    r->end_layer = (r->dst.p + 1) * layers / pp;
    r->front = r->dst.p == 0;
    r->back = r->dst.p == pp - 1;
    r->pos = cap_take(&r->arena, r->n, sizeof *r->pos);
    r->part_of = cap_take(&r->arena, r->S, sizeof *r->part_of);
    r->local_of = cap_take(&r->arena, r->S, sizeof *r->local_of);
    if (r->arena.failed)
        return COLO_ERR_NOMEM;
    for (int64_t c = 0; c < cp; c++) {
        colo_partition_t part = {.cp = cp, .cp_rank = c, .tp = 1, .positions = r->S};
        CAP_TRY(colo_partition_check(&part));
        for (int64_t i = 0; i < r->n; i++) {
            int64_t s = colo_partition_index(&part, i);
            r->part_of[s] = c;
            r->local_of[s] = i;
            if (c == r->dst.c)
                r->pos[i] = s;
        }
    }
    return COLO_OK;
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
        .mem = COLO_HOST};

    CAP_TRY(colo_bridge_create(&r->bridge, &config, r->world));
    colo_bridge_src_shape(r->bridge, r->x_shape);
    colo_bridge_dst_shape(r->bridge, r->y_shape);
    r->yn = r->y_shape[1];
    return COLO_OK;
}

/* ---- memory ---- */

static void take_layer(cap_rank_t *r, cap_layer_t *l, int64_t index)
{
    cap_arena_t *a = &r->arena;
    int64_t D = r->cfg->model.width, Dl = D / r->dst.tp, T = r->T, size = sizeof(float);
    int64_t heads = r->cfg->model.heads / r->dst.tp;

    l->rank = r;
    l->at = P_LAYER + index * P_PER_LAYER;
    int64_t Fl = r->count[l->at + L_BU];
    l->x1_hat = cap_take(a, T * D, size);
    l->r1 = cap_take(a, T, size);
    l->a = cap_take(a, T * D, size);
    l->q = cap_take(a, T * Dl, size);
    l->kv = cap_take(a, 2 * T * Dl, size);
    l->kv_all = r->dst.cp > 1 ? cap_take(a, r->dst.cp * 2 * T * Dl, size) : l->kv;
    l->prob = cap_take(a, T * heads * r->S, size);
    l->o = cap_take(a, T * Dl, size);
    l->mid = cap_take(a, T * D, size);
    l->x2_hat = cap_take(a, T * D, size);
    l->r2 = cap_take(a, T, size);
    l->m = cap_take(a, T * D, size);
    l->act = cap_take(a, T * Fl, size);
    l->dact = cap_take(a, T * Fl, size);
    l->out = cap_take(a, T * D, size);
}

static colo_status_t take_head(cap_rank_t *r)
{
    cap_arena_t *a = &r->arena;
    int64_t D = r->cfg->model.width, T = r->T, size = sizeof(float);
    int64_t at = P_LAYER + r->cfg->model.layers * P_PER_LAYER + B_HEAD;
    int64_t Vl = r->count[at] / D;
    size_t bytes = 0;

    r->logprob = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .vocab = CAP_VOCAB,
                                         .vocab_start = r->dst.t * CAP_VOCAB / r->dst.tp};
    r->xf_hat = cap_take(a, T * D, size);
    r->rf = cap_take(a, T, size);
    r->hf = cap_take(a, T * D, size);
    r->logits = cap_take(a, T * Vl, size);
    r->logp = cap_take(a, T, size);
    r->d_logp = cap_take(a, T, size);
    r->nll = cap_take(a, T, size);
    r->loss = cap_take(a, 1, size);
    r->mask = cap_take(a, T, 1);
    r->best = cap_take(a, 2 * r->dst.b, size);
    r->best_all = cap_take(a, r->dst.tp * 2 * r->dst.b, size);
    CAP_TRY(colo_logprob_saved_size(&r->logprob, COLO_F32, T, &bytes));
    r->stats = cap_take(a, (int64_t)bytes, 1);
    CAP_TRY(colo_logprob_scratch_size(&r->logprob, COLO_F32, T, (int32_t)r->dst.tp, &bytes));
    r->scratch = cap_take(a, (int64_t)bytes, 1);
    return COLO_OK;
}

static colo_status_t take_activations(cap_rank_t *r)
{
    cap_arena_t *a = &r->arena;
    int64_t D = r->cfg->model.width, size = sizeof(float), t = r->sb * r->sn;
    int64_t E = r->encodes ? r->count[P_B1] : 0;

    r->patches = cap_take(a, t * CAP_PATCH, size);
    r->act = cap_take(a, t * E, size);
    r->dact = cap_take(a, t * E, size);
    r->d_act = cap_take(a, t * E, size);
    r->enc = cap_take(a, t * D, size);
    r->y = cap_take(a, r->front ? r->dst.b * r->yn * D : 0, size);
    r->no_seed = cap_take(a, 1, size);
    r->rows = cap_take(a, r->cfg->batch, sizeof *r->rows);
    r->chosen = cap_take(a, r->dst.b, sizeof *r->chosen);
    if (r->dst.in) {
        int64_t T = r->T, Dl = D / r->dst.tp, Fl = 4 * D / r->dst.tp + 1;

        r->tokens = cap_take(a, r->dst.b * r->S, sizeof *r->tokens);
        r->targets_all = cap_take(a, r->dst.b * r->S, sizeof *r->targets_all);
        r->targets = cap_take(a, T, sizeof *r->targets);
        r->h_in = cap_take(a, T * D, size);
        r->d_f = cap_take(a, T * Fl, size);
        r->d_t1 = cap_take(a, T * D, size);
        r->d_t2 = cap_take(a, T * D, size);
        r->d_top = cap_take(a, T * D, size);
        r->d_q = cap_take(a, T * Dl, size);
        r->d_kv = cap_take(a, 2 * T * Dl, size);
        r->d_kv_all = r->dst.cp > 1 ? cap_take(a, r->dst.cp * 2 * T * Dl, size) : r->d_kv;
        r->tile = cap_take(a, cap_attention_tile(r), size);
        r->layer = cap_take(a, r->end_layer - r->first_layer, sizeof *r->layer);
        for (int64_t l = r->first_layer; r->layer && l < r->end_layer; l++)
            take_layer(r, &r->layer[l - r->first_layer], l);
        if (r->back)
            CAP_TRY(take_head(r));
    }
    return a->failed ? COLO_ERR_NOMEM : COLO_OK;
}

colo_status_t cap_rank_create(cap_rank_t *r, cap_config_t *cfg, colo_comm_t *world)
{
    memset(r, 0, sizeof *r);
    r->cfg = cfg;
    r->world = world;
    colo_comm_set_name(world, "world");
    CAP_TRY(cap_side_create(&r->src, world, &cfg->src, "src", cfg->batch));
    CAP_TRY(cap_side_create(&r->dst, world, &cfg->dst, "dst", cfg->batch));
    r->encodes = r->src.in && r->src.p == r->src.pp - 1;

    CAP_TRY(place_sequence(r));
    CAP_TRY(colo_layout_init_src(&r->src_layout, &cfg->src));
    CAP_TRY(colo_layout_init_dst(&r->dst_layout, &cfg->dst));
    CAP_TRY(colo_layout_map_offset(&r->dst_layout, 0, r->S));
    CAP_TRY(place_encoder(r));
    CAP_TRY(make_bridge(r));

    r->nparams = cap_params(&cfg->model, r->table);
    take_params(r);
    CAP_TRY(take_activations(r));
    init_params(r);
    if (r->arena.failed)
        return COLO_ERR_NOMEM;
    CAP_TRY(colo_tape_create(&r->encoder_tape));
    return colo_tape_create(&r->llm_tape);
}

void cap_rank_destroy(cap_rank_t *r)
{
    colo_tape_destroy(&r->llm_tape);
    colo_tape_destroy(&r->encoder_tape);
    colo_bridge_destroy(&r->bridge);
    cap_side_destroy(&r->dst);
    cap_side_destroy(&r->src);
    cap_arena_free(&r->arena);
}
