/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged.c - batches whose samples have any number of images, and images any number of rows.
 *
 * An image is a segment. The replica that reads a sample would have to encode all of its images;
 * colo_segments_balance() deals them out anew, and two ragged bridges carry them: pixels from the
 * replica that read them to the one that encodes them, embeddings from there to the packed
 * sequences of the LLM. Both bridges have the same segments; only the tables of where they come
 * from and go to differ. An encoder row needs no other row, so ranks along cp are replicas, too,
 * and the encoder's work is balanced over dp x cp.
 *
 * All ranks make the same tables from the same list of samples, so no message is needed for them.
 * Samples share a sequence as long as it has at most CAP_PACKED positions. Nothing but pixels moves
 * before the step: the bridges run where the uniform one does.
 *
 * --dynamic-cp: a sample is a sequence of its own, on one context rank per CAP_PER_RANK positions,
 * at most on all. It takes neighbouring ranks, of which the fullest has the fewest rows so far. A
 * packing says so to the bridge and to attention. Ranks have different numbers of rows, or none.
 */
#include <string.h>

#include "rank.h"

enum { CAP_PACKED = 128, CAP_PER_RANK = 16 };
#define STICK 0.05 /* a replica keeps its images up to this much above the mean */

struct cap_ragged {
    colo_bridge_t *pixels; /* r->bridge carries the embeddings */
    colo_batch_t *pixel_batch, *batch;
    float *loaded; /* pixels that this rank read, by the ops; read into r->patches_host */

    int64_t nsegments, nseqs;
    int64_t *rows, *reader, *encoder; /* [nsegments] */
    int64_t *encoder_pos;             /* first row of a segment on the replica that encodes it */
    int64_t *seq, *pos;
    int64_t *seq_len, *seq_dp;                  /* [nseqs] */
    int64_t *seq_cp, *seq_first, *load, *index; /* --dynamic-cp; rows of a cp rank [cp]; [2][S] */
    colo_packing_t packing;
    int64_t nreplicas, *before, *after, *replica; /* [nreplicas] rows; 0, 1, 2 ... */
    int64_t *shown_before, *shown_after;          /* of the last training step */
    int64_t *cu;                                  /* own sequences' begins */
    int64_t nown, images;                         /* own sequences; image rows on the own axis */
    int64_t used;                                 /* positions of the open sequence */

    int64_t planned[CAP_MOVES];
    cap_balance_t balance;
};

const int64_t *cap_ragged_planned(const cap_rank_t *r)
{
    return r->ragged->planned;
}

const cap_balance_t *cap_ragged_balance(const cap_rank_t *r)
{
    return &r->ragged->balance;
}

/* ---- before the first batch ---- */

static colo_status_t make_bridges(cap_rank_t *r)
{
    colo_bridge_config_t pixels = {COLO_BRIDGE_CONFIG_INIT, .src = &r->src_layout,
                                   .dst = &r->src_layout,   .shape = {.features = CAP_PATCH},
                                   .dtype = COLO_F32,       .no_grad = true,
                                   .mem = r->ops.mem,       .ragged = true};
    colo_bridge_config_t embeddings = {
        COLO_BRIDGE_CONFIG_INIT, .src = &r->src_layout,
        .dst = &r->dst_layout,   .shape = {.features = r->cfg->model.width},
        .dtype = COLO_F32,       .output = r->cfg->output,
        .grad = r->cfg->grad,    .mem = r->ops.mem,
        .ragged = true};

    CAP_TRY(colo_bridge_create(&r->ragged->pixels, &pixels, r->world));
    return colo_bridge_create(&r->bridge, &embeddings, r->world);
}

colo_status_t cap_ragged_create(cap_rank_t *r)
{
    const cap_config_t *cfg = r->cfg;
    cap_arena_t *a = &r->arena;
    int64_t images = cfg->batch * cfg->task.most, length;
    cap_ragged_t *g = r->ragged = cap_take(a, 1, sizeof *g);

    if (!g)
        return COLO_ERR_NOMEM;
    g->nreplicas = colo_grid_extent(&cfg->src, "dp") * colo_grid_extent(&cfg->src, "cp");
    int64_t **by_image[] = {&g->rows, &g->reader, &g->encoder, &g->encoder_pos, &g->seq, &g->pos};
    int64_t **by_replica[] = {&g->before, &g->after, &g->shown_before, &g->shown_after,
                              &g->replica};
    for (size_t i = 0; i < sizeof by_image / sizeof *by_image; i++)
        *by_image[i] = cap_take(a, images, sizeof(int64_t));
    for (size_t i = 0; i < sizeof by_replica / sizeof *by_replica; i++)
        *by_replica[i] = cap_take(a, g->nreplicas, sizeof(int64_t));
    g->seq_len = cap_take(a, cfg->batch, sizeof *g->seq_len);
    g->seq_dp = cap_take(a, cfg->batch, sizeof *g->seq_dp);
    g->cu = cap_take(a, r->dst.b + 1, sizeof *g->cu);
    g->seq_cp = cap_take(a, cfg->batch, sizeof *g->seq_cp);
    g->seq_first = cap_take(a, cfg->batch, sizeof *g->seq_first);
    g->load = cap_take(a, colo_grid_extent(&cfg->dst, "cp"), sizeof *g->load);
    if (a->failed)
        return COLO_ERR_NOMEM;
    for (int64_t d = 0; d < g->nreplicas; d++)
        g->replica[d] = d;
    g->balance = (cap_balance_t){
        .replicas = g->nreplicas, .before = g->shown_before, .after = g->shown_after};

    r->ndim = 2;
    r->sb = r->encodes;
    r->sn = images * CAP_PATCHES;
    g->loaded = cap_take_there(r, r->sb * r->sn * CAP_PATCH, sizeof(float));
    r->yn = r->dst.b * cfg->task.most * CAP_PATCHES;
    r->seq.b = 1;
    r->seq.window = CAP_LONGEST;
    CAP_TRY(colo_partition_padded(CAP_LONGEST, colo_grid_extent(&cfg->dst, "tp"),
                                  colo_grid_extent(&cfg->dst, "cp"), false, &length));
    r->S = r->dst.b * length;
    g->index = cap_take(a, 2 * r->S, sizeof *g->index);
    if (!g->index)
        return COLO_ERR_NOMEM;

    CAP_TRY(colo_layout_init(&r->src_layout, &cfg->src));
    CAP_TRY(colo_layout_split(&r->src_layout, COLO_AXIS_SAMPLES, "dp", COLO_SPLIT_BLOCK));
    CAP_TRY(colo_layout_split(&r->src_layout, COLO_AXIS_SAMPLES, "cp", COLO_SPLIT_BLOCK));
    CAP_TRY(colo_layout_stage(&r->src_layout, "pp", COLO_STAGE_LAST));
    CAP_TRY(colo_layout_init_dst(&r->dst_layout, &cfg->dst));
    return make_bridges(r);
}

void cap_ragged_destroy(cap_rank_t *r)
{
    if (!r->ragged)
        return;
    colo_batch_destroy(&r->ragged->batch);
    colo_batch_destroy(&r->ragged->pixel_batch);
    colo_bridge_destroy(&r->ragged->pixels);
}

/* ---- the tables of a batch ---- */

/* Which of @n blocks of @total things has @i. */
static int64_t block_of(int64_t i, int64_t total, int64_t n)
{
    return ((i + 1) * n - 1) / total;
}

/* Own axis: @count positions from @p on. */
static void put_positions(cap_rank_t *r, int64_t p, int64_t count, int64_t first,
                          const int64_t *cell, int64_t row0, bool image)
{
    for (int64_t k = 0; k < count; k++, p++) {
        r->image_row[p] = image ? r->ragged->images++ : -1;
        r->first[p] = first;
        r->table_row[p] = row0 + (cell ? cell[k] : k);
    }
}

/* The most that any of @n context ranks has that begin with @first. */
static int64_t most_loaded(const cap_ragged_t *g, int64_t first, int64_t n)
{
    int64_t most = 0;
    for (int64_t c = first; c < first + n; c++)
        most = g->load[c] > most ? g->load[c] : most;
    return most;
}

/* Sequence @q on some context ranks, or on all. */
static colo_status_t pad_sequence(cap_rank_t *r, int64_t q)
{
    cap_ragged_t *g = r->ragged;
    const int64_t cp = colo_grid_extent(&r->cfg->dst, "cp");
    int64_t n = (g->used + CAP_PER_RANK - 1) / CAP_PER_RANK, first = 0;

    n = n < cp && r->cfg->dynamic_cp ? n : cp;
    if (q == 0 || g->seq_dp[q] != g->seq_dp[q - 1])
        memset(g->load, 0, (size_t)cp * sizeof *g->load);
    for (int64_t c = 1; c + n <= cp; c++)
        first = most_loaded(g, c, n) < most_loaded(g, first, n) ? c : first;
    CAP_TRY(colo_partition_padded(g->used, colo_grid_extent(&r->cfg->dst, "tp"), n, false,
                                  &g->seq_len[q]));
    for (int64_t c = first; c < first + n; c++)
        g->load[c] += g->seq_len[q] / n;
    g->seq_cp[q] = n;
    g->seq_first[q] = first;
    return COLO_OK;
}

static colo_status_t close_sequence(cap_rank_t *r)
{
    cap_ragged_t *g = r->ragged;
    int64_t q = g->nseqs - 1, begin = g->cu[g->nown];

    if (!g->used)
        return COLO_OK;
    CAP_TRY(pad_sequence(r, q));
    if (r->dst.in && g->seq_dp[q] == r->dst.d) {
        for (int64_t k = g->used; k < g->seq_len[q]; k++) /* padding sees itself alone */
            put_positions(r, begin + k, 1, begin + k, NULL, 0, false);
        g->cu[++g->nown] = begin + g->seq_len[q];
    }
    g->used = 0;
    return COLO_OK;
}

/* Sample @i of the batch: its images, and its place in a sequence. */
static colo_status_t add_sample(cap_rank_t *r, int64_t i, const int64_t *rows, bool captions)
{
    const cap_config_t *cfg = r->cfg;
    cap_ragged_t *g = r->ragged;
    int64_t D = colo_grid_extent(&cfg->dst, "dp"), d = block_of(i, cfg->batch, D);
    int64_t me = r->encodes ? r->src.d * r->src.cp + r->src.c : -1;
    int64_t cell[CAP_IMAGES][CAP_PATCHES], n = 0, length = 0, e = g->nsegments;
    char caption[CAP_SAID];

    for (; n < cfg->task.most && rows[n] >= 0; n++, g->nsegments++) {
        float patches[CAP_PATCHES * CAP_PATCH];
        int64_t k = cap_crop(cfg->data->pixels[rows[n]], patches, cell[n]);

        g->rows[e + n] = k;
        g->reader[e + n] = block_of(i, cfg->batch, g->nreplicas);
        if (g->reader[e + n] == me)
            memcpy(r->patches_host + g->before[me] * CAP_PATCH, patches,
                   (size_t)(k * CAP_PATCH) * sizeof *patches);
        g->before[g->reader[e + n]] += k;
        length += k;
    }
    cap_caption_text(cfg->data, &cfg->task, rows, caption);
    int64_t text = 1 + (captions ? (int64_t)strlen(caption) + 1 : CAP_SAID);

    length += text;
    r->filled += length;
    if (g->used &&
        (g->seq_dp[g->nseqs - 1] != d || g->used + length > CAP_PACKED || cfg->dynamic_cp))
        CAP_TRY(close_sequence(r));
    if (!g->used)
        g->seq_dp[g->nseqs++] = d;
    int64_t begin = g->cu[g->nown], first = begin + g->used;
    bool own = r->dst.in && d == r->dst.d;

    for (int64_t k = 0; k < n; g->used += g->rows[e + k], k++) {
        g->seq[e + k] = g->nseqs - 1;
        g->pos[e + k] = g->used;
        if (own)
            put_positions(r, begin + g->used, g->rows[e + k], first, cell[k], k * CAP_PATCHES,
                          true);
    }
    if (own) {
        put_positions(r, begin + g->used, text, first, NULL, CAP_IMAGES * CAP_PATCHES, false);
        r->text_at[i - r->dst.b0] = begin + g->used + 1;
    }
    g->used += text;
    return COLO_OK;
}

/* @counts: a training step, of which the report tells */
static colo_status_t balance(cap_ragged_t *g, bool counts)
{
    int64_t total = 0, most[2] = {0};

    CAP_TRY(
        colo_segments_balance(g->encoder, g->rows, g->nsegments, g->nreplicas, g->reader, STICK));
    memset(g->after, 0, (size_t)g->nreplicas * sizeof *g->after);
    for (int64_t e = 0; e < g->nsegments; e++) {
        g->encoder_pos[e] = g->after[g->encoder[e]];
        g->after[g->encoder[e]] += g->rows[e];
        total += g->rows[e];
    }
    for (int64_t d = 0; d < g->nreplicas; d++) {
        most[0] = g->before[d] > most[0] ? g->before[d] : most[0];
        most[1] = g->after[d] > most[1] ? g->after[d] : most[1];
    }
    if (!counts)
        return COLO_OK;
    memcpy(g->shown_before, g->before, (size_t)g->nreplicas * sizeof *g->before);
    memcpy(g->shown_after, g->after, (size_t)g->nreplicas * sizeof *g->after);
    if (total) {
        g->balance.steps++;
        g->balance.most_before += (double)(most[0] * g->nreplicas) / (double)total;
        g->balance.most_after += (double)(most[1] * g->nreplicas) / (double)total;
    }
    return COLO_OK;
}

static colo_status_t set_tables(cap_rank_t *r)
{
    cap_ragged_t *g = r->ragged;
    const colo_segments_t pixels = {
        COLO_SEGMENTS_INIT,    .count = g->nsegments, .rows = g->rows,
        .src_dp = g->reader,   .seq = g->encoder,     .pos = g->encoder_pos,
        .nseqs = g->nreplicas, .seq_len = g->after,   .seq_dp = g->replica};
    colo_segments_t embeddings = {COLO_SEGMENTS_INIT,   .count = g->nsegments, .rows = g->rows,
                                  .src_dp = g->encoder, .seq = g->seq,         .pos = g->pos,
                                  .nseqs = g->nseqs,    .seq_len = g->seq_len, .seq_dp = g->seq_dp};
    if (r->cfg->dynamic_cp) {
        g->packing = (colo_packing_t){COLO_PACKING_INIT,           .nseqs = g->nseqs,
                                      .seq_len = g->seq_len,       .seq_dp = g->seq_dp,
                                      .seq_cp = g->seq_cp,         .seq_first = g->seq_first,
                                      .split = COLO_PACKING_ZIGZAG};
        embeddings.packing = &g->packing;
        embeddings.nseqs = 0;
        embeddings.seq_len = embeddings.seq_dp = NULL;
    }

    colo_batch_destroy(&g->batch);
    colo_batch_destroy(&g->pixel_batch);
    CAP_TRY(colo_bridge_set_segments(g->pixels, &pixels, &g->pixel_batch));
    CAP_TRY(colo_bridge_set_segments(r->bridge, &embeddings, &g->batch));
    return COLO_OK;
}

colo_status_t cap_ragged_positions(const cap_rank_t *r, int64_t c, int64_t *pos, int64_t *n)
{
    const cap_ragged_t *g = r->ragged;
    const colo_grid_t *grid = &r->cfg->dst;
    int64_t coords[COLO_DIMS_MAX], rank, own = 0;

    CAP_TRY(
        colo_grid_coords(grid, colo_comm_world_rank(r->world, colo_comm_rank(r->world)), coords));
    coords[colo_grid_dim(grid, "cp")] = c;
    /* the layout has positions on the first stage only, and all stages have the same */
    coords[colo_grid_dim(grid, "pp")] = 0;
    CAP_TRY(colo_grid_rank(grid, coords, &rank));
    CAP_TRY(colo_packing_rows(&g->packing, &r->dst_layout, rank, n));
    CAP_TRY(colo_packing_index(&g->packing, &r->dst_layout, rank, g->index));
    while (g->seq_dp[own] != r->dst.d) /* the replica's first sequence */
        own++;
    for (int64_t i = 0; i < *n; i++)
        pos[i] = g->cu[g->index[*n + i] - own] + g->index[i];
    return COLO_OK;
}

static int64_t planned(const colo_batch_t *batch, colo_pass_t pass)
{
    colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};

    (void)colo_plan_bytes(colo_batch_plan(batch), pass, &bytes);
    return bytes.recv;
}

colo_status_t cap_ragged_load(cap_rank_t *r, const int64_t *rows, bool captions)
{
    cap_ragged_t *g = r->ragged;
    int64_t read[] = {0, CAP_PATCH}, own[] = {0, CAP_PATCH}, D = r->cfg->model.width;

    g->nsegments = g->nseqs = g->nown = g->images = g->used = 0;
    r->filled = 0;
    memset(g->before, 0, (size_t)g->nreplicas * sizeof *g->before);
    for (int64_t i = 0; i < r->cfg->batch; i++)
        CAP_TRY(add_sample(r, i, rows + i * r->cfg->task.most, captions));
    CAP_TRY(close_sequence(r));
    CAP_TRY(balance(g, captions));
    CAP_TRY(set_tables(r));

    colo_bridge_rows(g->pixels, &read[0], &own[0]);
    colo_bridge_rows(r->bridge, &r->x_shape[0], &r->y_shape[0]);
    r->x_shape[1] = r->y_shape[1] = D;
    r->sn = r->x_shape[0];
    r->yn = r->y_shape[0];
    g->planned[CAP_PIXELS_MOVED] += planned(g->pixel_batch, COLO_PASS_FORWARD);
    g->planned[CAP_EMBEDDINGS_MOVED] += planned(g->batch, COLO_PASS_FORWARD);
    g->planned[CAP_GRADIENTS_MOVED] += planned(g->batch, COLO_PASS_BACKWARD);

    if (r->dst.in) {
        r->S = g->cu[g->nown];
        r->part.positions = r->S;
        r->part.segments = g->nown;
        r->part.cu_padded = g->cu;
        CAP_TRY(cap_place(r));
    }
    r->ops.put(&r->ops, g->loaded, r->patches_host, read[0] * CAP_PATCH * (int64_t)sizeof(float));
    colo_tensor_t x = cap_view(r, g->loaded, COLO_F32, 2, read);
    colo_tensor_t y = cap_view(r, r->patches, COLO_F32, 2, own);
    return colo_batch_forward(g->pixel_batch, &x, &y, 1, r->ops.stream);
}

/* ---- the step ---- */

colo_status_t cap_ragged_forward(cap_rank_t *r, const colo_tensor_t *x, const colo_tensor_t *y)
{
    return colo_batch_forward(r->ragged->batch, x, y, 1, r->ops.stream);
}

colo_status_t cap_ragged_backward(cap_rank_t *r, const colo_tensor_t *d_y, const colo_tensor_t *d_x)
{
    return colo_batch_backward(r->ragged->batch, d_y, d_x, 1, r->ops.stream);
}
