/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-plan.c - one rank's plan for the tables of a ragged batch.
 *
 * The rows of all segments are one sample of a plan, whose rules and lists are those of plan.c;
 * what a block owns is segments.c's. Afterwards each destination row of this rank gets its
 * index in the tensor: among the rows that arrive (packed), or on the sequence axis (merged).
 */
#include "bridge/plan/segments-plan.h"

#include "core/error.h"

#include <stdlib.h>

/* ---- where rows are in the destination tensor ---- */

static int by_first(const void *a, const void *b)
{
    const int64_t x = ((const colo_stored_t *)a)->first, y = ((const colo_stored_t *)b)->first;
    return (x > y) - (x < y);
}

/* Rows of a merged tensor of this rank, and the index of its first on the context rank's axis. */
static int64_t merged_rows(const colo_ragged_t *r, const colo_side_t *side, const int64_t *coords,
                           int64_t *first)
{
    const colo_layout_t *l = side->layout;
    const int64_t d = colo_ragged_part(l, COLO_SAMPLES, -1, coords);
    *first = 0;
    if (side->full)
        return r->dst.length[d];
    const int64_t length =
        r->dst.held[d * r->dst.cp + colo_ragged_part(l, COLO_ROWS, 1, coords)] / r->dst.axes.sp;
    *first = length * colo_ragged_part(l, COLO_ROWS, 0, coords);
    return length;
}

colo_status_t colo_ragged_stored(const colo_ragged_t *r, const colo_side_t *side,
                                 const int64_t *coords, const colo_runs_t *whole, bool merged,
                                 const int64_t *on_rank, colo_pool_t *pool, colo_stored_t **out,
                                 int64_t *rows)
{
    int64_t first = 0;
    const int64_t n = whole->n;
    *rows = whole->rows;
    *out = colo_pool_take(pool, (size_t)(n + 1) * sizeof **out);
    if (!*out)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)n);
    bool sorted = true;
    for (int64_t i = 0; i < n; i++) {
        const colo_run_t *run = &whole->run[i];
        (*out)[i] = (colo_stored_t){run->local, run->count,
                                    !merged      ? 0
                                    : side->full ? run->local
                                                 : on_rank[i]};
        sorted = sorted && (i == 0 || (*out)[i - 1].first < run->local);
    }
    if (!sorted)
        qsort(*out, (size_t)n, sizeof **out, by_first);
    if (merged)
        *rows = merged_rows(r, side, coords, &first);
    for (int64_t i = 0, pos = 0; i < n; pos += (*out)[i++].count)
        (*out)[i].row = merged ? (*out)[i].row - first : pos;
    return COLO_OK;
}

/* Of the rows of @places, those that no run of @mine has. */
static colo_status_t list_foreign(const colo_runs_t *mine, colo_pool_t *pool,
                                  colo_ragged_places_t *places)
{
    /* each run of mine ends one piece of what is stored and begins another */
    places->foreign =
        colo_pool_take(pool, (size_t)(places->n + mine->n + 1) * sizeof *places->foreign);
    if (!places->foreign)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)places->n);
    for (int64_t i = 0, k = 0; i < places->n; i++) {
        const colo_stored_t *s = &places->stored[i];
        int64_t pos = s->first;
        const int64_t end = pos + s->count;
        while (pos < end) {
            while (k < mine->n && mine->run[k].local + mine->run[k].count <= pos)
                k++;
            const int64_t lo = k < mine->n && mine->run[k].local < end ? mine->run[k].local : end;
            if (pos < lo)
                places->foreign[places->nforeign++] =
                    (colo_stored_t){pos, lo - pos, s->row + (pos - s->first)};
            pos = lo < end ? mine->run[k].local + mine->run[k].count : end;
        }
    }
    return COLO_OK;
}

static int by_local(const void *a, const void *b)
{
    const int64_t x = ((const colo_run_t *)a)->local, y = ((const colo_run_t *)b)->local;
    return (x > y) - (x < y);
}

void colo_ragged_places_deinit(const colo_pool_t *pool, colo_ragged_places_t *places)
{
    colo_pool_drop(pool, places->stored);
    colo_pool_drop(pool, places->foreign);
    *places = (colo_ragged_places_t){0};
}

static bool has_index(const colo_stored_t *s, int64_t pos)
{
    return (uint64_t)(pos - s->first) < (uint64_t)s->count;
}

int64_t colo_ragged_find(const colo_stored_t *stored, int64_t n, int64_t pos, int64_t *hint)
{
    int64_t a = *hint, z = n; /* stored[a].first <= at < stored[z].first */
    if (!has_index(&stored[a], pos) && (++a == n || !has_index(&stored[a], pos)))
        for (a = 0; z - a > 1;) {
            const int64_t mid = a + (z - a) / 2;
            if (stored[mid].first <= pos)
                a = mid;
            else
                z = mid;
        }
    *hint = a;
    return stored[a].row + (pos - stored[a].first);
}

static void place(colo_routes_t *routes, const colo_stored_t *stored, int64_t n)
{
    int64_t hint = 0;
    for (int64_t i = 0; i < routes->nregions; i++)
        routes->offset[i].dst_row = colo_ragged_find(stored, n, routes->offset[i].dst_row, &hint);
}

/* ---- where peers have rows ---- */

/* Where destination ranks have the rows of their tensors, by block; made when it is needed. */
typedef struct blocks {
    colo_stored_t **stored; /* [dst.replicas * cp * sp] */
    int64_t *count;
} blocks_t;

static colo_status_t rows_of(colo_builder_t *w, const colo_side_t *side, const int64_t *coords,
                             bool merged, colo_stored_t **stored, int64_t *n)
{
    colo_side_t own = *side;
    int64_t rows;
    w->on_rank.n = 0;
    own.on_rank = merged ? &w->on_rank : NULL;
    COLO_TRY(own.owns->rows(&own, coords, NULL, &w->other));
    *n = w->other.n;
    return colo_ragged_stored(side->table, side, coords, &w->other, merged, w->on_rank.items,
                              w->plan->pool, stored, &rows);
}

/* Rows of the destination ranks' tensors, for indices on their replicas' axes. */
static colo_status_t place_message(colo_builder_t *w, const colo_side_t *side, bool merged,
                                   const colo_plan_message_t *m, colo_offset_t *pos, blocks_t *x)
{
    const colo_ragged_t *r = side->table;
    int64_t coords[COLO_MAX_DIMS], hint = 0;
    (void)colo_grid_coords(&side->layout->grid, m->peer, coords);
    int64_t i = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    if (!side->full)
        i = (i * r->dst.cp + colo_ragged_part(side->layout, COLO_ROWS, 1, coords)) *
                r->dst.axes.sp +
            colo_ragged_part(side->layout, COLO_ROWS, 0, coords);
    if (!x->stored[i])
        COLO_TRY(rows_of(w, side, coords, merged, &x->stored[i], &x->count[i]));
    /* what is for other nodes has its rows: those of this rank's tensor */
    for (int64_t k = 0; k < m->nregions; k++)
        if (m->regions[k].addend < w->plan->addends)
            pos[k].dst_row = colo_ragged_find(x->stored[i], x->count[i], pos[k].dst_row, &hint);
    return COLO_OK;
}

colo_status_t colo_ragged_place_peers(colo_builder_t *w, const colo_ragged_t *r, bool merged)
{
    const colo_plan_t *p = w->plan;
    const colo_side_t side = {.owns = &colo_owns_segments_dst,
                              .layout = &p->dst,
                              .shape = &p->config.shape,
                              .table = r,
                              .full = p->config.output == COLO_FULL_SEQ};
    const size_t n = (size_t)(r->dst.axes.replicas * r->dst.axes.cp * r->dst.axes.sp);
    if (r->packed || (merged && side.full)) /* row = index */
        return COLO_OK;
    COLO_AUTOFREE colo_stored_t **stored = calloc(n, sizeof *stored);
    COLO_AUTOFREE int64_t *count = calloc(n, sizeof *count);
    blocks_t x = {stored, count};
    if (!stored || !count)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %zu blocks", n);
    for (int i = 0; i < (p->config.no_grad || p->addends == 1 ? 1 : 2); i++) {
        const colo_routes_t *routes = colo_plan_routes(p, (colo_pass_t)i, COLO_FIRST, i == 0);
        for (int32_t k = 0; k < routes->nmessages; k++) {
            const colo_plan_message_t *one = &routes->message[k];
            COLO_TRY(place_message(w, &side, merged, one,
                                   &routes->offset[one->regions - routes->region], &x));
        }
    }
    return COLO_OK;
}

/* ---- the plan ---- */

static void own(const colo_side_t *side, int64_t rank, int64_t features, int64_t rows,
                colo_owned_t *out)
{
    int64_t coords[COLO_MAX_DIMS];
    colo_span_t h[2 * COLO_MAX_SPANS];
    if (!colo_layout_holds(side->layout, rank))
        return;
    (void)colo_grid_coords(&side->layout->grid, rank, coords);
    if (colo_axis_spans(side->layout, COLO_FEATURES, coords, features, h))
        *out = (colo_owned_t){.b1 = 1, .h0 = h[0].lo, .h1 = h[0].hi, .rows = rows};
}

/* Where the rows of this rank's destination tensor are. */
static colo_status_t find_places(colo_builder_t *w, const colo_ragged_t *r, colo_side_t dst,
                                 bool merged, colo_ragged_places_t *places, int64_t *rows)
{
    const colo_plan_t *p = w->plan;
    const colo_plan_config_t *c = &p->config;
    int64_t coords[COLO_MAX_DIMS];
    colo_runs_t *mine = &w->other;
    const colo_runs_t *whole;
    *rows = 0;
    if (!colo_layout_holds(&p->dst, p->rank))
        return COLO_OK;
    (void)colo_grid_coords(&p->dst.grid, p->rank, coords);
    w->on_rank.n = 0;
    dst.on_rank = merged ? &w->on_rank : NULL;
    COLO_TRY(colo_block_own_rows(w, &dst, coords, &whole));
    dst.on_rank = NULL;
    if (r->packed) { /* which are where the rows of the block say */
        *rows = whole->rows;
        places->n = *rows > 0;
        places->stored = colo_pool_take(p->pool, sizeof *places->stored);
        if (!places->stored)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld rows", (long long)*rows);
        *places->stored = (colo_stored_t){.count = *rows};
        return COLO_OK;
    }
    places->n = whole->n;
    COLO_TRY(colo_ragged_stored(r, &dst, coords, whole, merged, w->on_rank.items, p->pool,
                                &places->stored, rows));
    if (!dst.full || c->grad != COLO_DISJOINT || c->no_grad)
        return COLO_OK;
    dst.full = false;
    COLO_TRY(dst.owns->rows(&dst, coords, NULL, mine));
    if (mine->n > 1)
        qsort(mine->run, (size_t)mine->n, sizeof *mine->run, by_local);
    return list_foreign(mine, p->pool, places);
}

static colo_status_t build(colo_builder_t *w, colo_plan_t *p, const colo_ragged_t *r, size_t unit,
                           bool merged, colo_ragged_places_t *places)
{
    const colo_plan_config_t *c = &p->config;
    colo_side_t src = {
        .owns = &colo_owns_segments_src, .layout = &p->src, .shape = &c->shape, .table = r};
    colo_side_t dst = {.owns = &colo_owns_segments_dst,
                       .layout = &p->dst,
                       .shape = &c->shape,
                       .table = r,
                       .full = c->output == COLO_FULL_SEQ};
    int64_t coords[COLO_MAX_DIMS], rows = 0, arriving = 0;
    const colo_runs_t *mine = NULL;
    colo_builder_begin(w, p, unit, true);
    if (r->packed) {
        src.owns = dst.owns = &colo_owns_packed;
        src.table = &r->src;
        dst.table = &r->dst;
        src.full = r->src.whole;
        w->answers.asked[COLO_FORWARD] = w->answers.asked[COLO_BACKWARD] =
            false; /* sides may be whole or not */
    }
    if (colo_layout_holds(&p->src, p->rank)) {
        (void)colo_grid_coords(&p->src.grid, p->rank, coords);
        COLO_TRY(colo_block_own_rows(w, &src, coords, &mine));
    }
    own(&src, p->rank, c->shape.features, mine ? mine->rows : 0, &p->own_src);
    COLO_TRY(find_places(w, r, dst, merged, places, &rows));
    own(&dst, p->rank, c->shape.features, rows, &p->own_dst);
    COLO_TRY(colo_plan_route(w, COLO_FORWARD, src, dst));
    if (!c->no_grad)
        COLO_TRY(colo_plan_route(w, COLO_BACKWARD, src, dst));
    COLO_TRY(colo_plan_count_bytes(p, unit, true));
    for (int64_t i = 0; i < places->n; i++)
        arriving += places->stored[i].count; /* of a merged tensor, too */
    p->bytes[COLO_FORWARD].minimum =
        arriving * (p->own_dst.h1 - p->own_dst.h0) * (int64_t)unit - p->bytes[COLO_FORWARD].local;
    place(&p->exchange[COLO_FORWARD][COLO_FIRST].recv, places->stored, places->n);
    place(&p->local[COLO_FORWARD], places->stored, places->n);
    place(&p->exchange[COLO_FORWARD][COLO_RELAYS].recv, places->stored, places->n);
    place(&p->exchange[COLO_FORWARD][COLO_RELAYS].send, places->stored, places->n);
    place(&p->exchange[COLO_BACKWARD][COLO_FIRST].send, places->stored, places->n);
    place(&p->local[COLO_BACKWARD], places->stored, places->n);
    place(&p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send, places->stored, places->n);
    colo_routes_t collected =
        p->exchange[COLO_BACKWARD][COLO_FIRST].recv; /* the rest goes to its source tensor */
    for (int64_t i = 0; i < p->exchange[COLO_BACKWARD][COLO_FIRST].recv.nregions; i++) {
        collected.nregions = collected.region->addend >= p->addends;
        place(&collected, places->stored, places->n);
        collected.region++;
        collected.offset++;
    }
    return COLO_OK;
}

colo_status_t colo_ragged_plan(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                               const colo_ragged_t *r, colo_builder_t *w, bool merged,
                               uint64_t hash, colo_pool_t *pool, colo_ragged_places_t *places)
{
    colo_plan_config_t c = *config;
    colo_plan_t *p;
    /* features in the units in which both sides cut them */
    const int64_t a = colo_layout_parts(c.src, COLO_FEATURES);
    const int64_t b = colo_layout_parts(c.dst, COLO_FEATURES), units = a / colo_gcd(a, b) * b;
    const size_t unit = (size_t)(c.shape.features / units) * colo_dtype_size(c.dtype);
    int64_t bytes;
    if (!colo_mul_ok(r->rows, c.shape.features, &bytes) ||
        !colo_mul_ok(bytes, (int64_t)colo_dtype_size(c.dtype), &bytes) ||
        !colo_mul_ok(bytes, r->dst.axes.cp, &bytes)) /* addends */
        return colo_fail(COLO_ERR_ARG,
                         "%s: %lld rows of %lld %s features overflow 63 bits of bytes",
                         r->packed ? "packing" : "segments", (long long)r->rows,
                         (long long)c.shape.features, colo_dtype_name(c.dtype));
    if (r->packed)
        c.output = r->dst.whole ? COLO_FULL_SEQ : COLO_SHARDED;
    c.shape = (colo_shape_t){.samples = 1, .rows = r->rows, .features = units};
    COLO_TRY(colo_plan_new(&p, &c, rank));
    p->pool = pool;
    colo_status_t st = build(w, p, r, unit, merged, places);
    if (st < 0) {
        colo_plan_destroy(&p);
        return st;
    }
    p->hash = hash;
    *plan = p;
    return COLO_OK;
}

/* The plan for the tables of one kind; those of the other are NULL. */
static colo_status_t create(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                            bool packed, const colo_segments_t *segments, const colo_packing_t *src,
                            const colo_packing_t *dst)
{
    colo_plan_config_t own;
    colo_ragged_t r = {0};
    colo_builder_t w = {0};
    colo_ragged_places_t places = {0};
    colo_table_t table[COLO_TABLES];
    if (!plan)
        return colo_fail(COLO_ERR_ARG, "plan: plan is NULL");
    if (rank < 0)
        return colo_fail(COLO_ERR_ARG, "plan: rank %lld, expected >= 0", (long long)rank);
    COLO_TRY(colo_plan_check_config(config, &own));
    if (packed && (own.output || own.grad))
        return colo_fail(COLO_ERR_ARG,
                         "plan: packed with %s, expected 0: the packings say what a rank has",
                         own.output ? "output" : "grad");
    colo_status_t st = colo_ragged_init(&r, own.src, own.dst, &own.shape, packed);
    if (st < 0)
        return colo_fail_prefix(st, "plan");
    st = packed ? colo_ragged_load_packings(&r, src, dst) : colo_ragged_load(&r, segments);
    if (st == COLO_OK)
        st = colo_ragged_plan(plan, &own, rank, &r, &w, false,
                              packed ? colo_tables_hash(table, colo_packings_keep(table, src, dst))
                                     : colo_segments_hash(segments),
                              NULL, &places);
    colo_ragged_deinit(&r);
    colo_builder_deinit(&w);
    colo_ragged_places_deinit(NULL, &places);
    return st;
}

colo_status_t colo_plan_create_ragged(colo_plan_t **plan, const colo_plan_config_t *config,
                                      const colo_segments_t *segments, int64_t rank)
{
    return create(plan, config, rank, false, segments, NULL, NULL);
}

colo_status_t colo_plan_create_packed(colo_plan_t **plan, const colo_plan_config_t *config,
                                      const colo_packing_t *src, const colo_packing_t *dst,
                                      int64_t rank)
{
    return create(plan, config, rank, true, NULL, src, dst);
}
