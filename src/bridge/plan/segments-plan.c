/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-plan.c - one rank's plan for the tables of a ragged batch.
 *
 * The rows of all segments are one sample of a plan, whose rules and lists are those of plan.c;
 * what a block owns is packed.c's, halo.c's and segments.c's. Afterwards each destination row of
 * this rank gets its index in the tensor: among the rows that arrive (packed), or on the sequence
 * axis (merged).
 */
#include "bridge/plan/segments-plan.h"

#include "bridge/plan/halo-plan.h"
#include "core/error.h"

#include <stdlib.h>

/* ---- where rows are in the destination tensor ---- */

/* Rows of a merged tensor of this rank, and the index of its first on the context rank's axis. */
static int64_t merged_rows(const colo_side_t *side, const int64_t *coords, int64_t *first)
{
    const colo_ragged_t *ragged = side->table;
    const colo_ragged_place_t place = colo_ragged_place(side->layout, coords);
    *first = 0;
    if (side->full)
        return ragged->dst.length[place.replica];
    const int64_t length = colo_packed_extent(&ragged->dst, side->layout, coords);
    *first = length * place.part;
    return length;
}

/* Says where the tensor of @coords has its rows @all, by index on the replica's axis. @merged:
 * where each run begins on the axis of the context rank is in builder->on_rank, unless rows are
 * full. @out: [all->n] of the plan's pool; @rows: of that tensor. */
static colo_status_t store(colo_builder_t *builder, const colo_side_t *side, const int64_t *coords,
                           const colo_runs_t *all, bool merged, colo_run_t **out, int64_t *rows)
{
    const int64_t n = all->n, *on_rank = builder->on_rank.items;
    int64_t first = 0;
    *rows = all->rows;
    *out = colo_pool_take(&builder->plan->pool, (size_t)(n + 1) * sizeof **out);
    COLO_FAIL_IF(!*out, COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)n);
    bool sorted = true;
    for (int64_t i = 0; i < n; i++) {
        const colo_run_t *run = &all->run[i];
        (*out)[i] = (colo_run_t){run->local, run->count,
                                 !merged      ? 0
                                 : side->full ? run->local
                                              : on_rank[i]};
        sorted = sorted && (i == 0 || (*out)[i - 1].row < run->local);
    }
    if (!sorted)
        COLO_SORT(*out, n, row);
    if (merged)
        *rows = merged_rows(side, coords, &first);
    for (int64_t i = 0, pos = 0; i < n; pos += (*out)[i++].count)
        (*out)[i].local = merged ? (*out)[i].local - first : pos;
    return COLO_OK;
}

/* Lists the rows of @places that no run of @mine has. */
static colo_status_t list_foreign(const colo_runs_t *mine, colo_pool_t *pool,
                                  colo_ragged_places_t *places)
{
    /* each run of mine ends one piece of what is stored and begins another */
    places->foreign =
        colo_pool_take(pool, (size_t)(places->n + mine->n + 1) * sizeof *places->foreign);
    COLO_FAIL_IF(!places->foreign, COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)places->n);
    for (int64_t i = 0, k = 0; i < places->n; i++) {
        const colo_run_t *stored = &places->stored[i];
        int64_t pos = stored->row;
        const int64_t end = pos + stored->count;
        while (pos < end) {
            while (k < mine->n && mine->run[k].local + mine->run[k].count <= pos)
                k++;
            const int64_t lo = k < mine->n && mine->run[k].local < end ? mine->run[k].local : end;
            if (pos < lo)
                places->foreign[places->nforeign++] =
                    (colo_run_t){pos, lo - pos, stored->local + (pos - stored->row)};
            pos = lo < end ? mine->run[k].local + mine->run[k].count : end;
        }
    }
    return COLO_OK;
}

static int by_local(const void *first, const void *second)
{
    const int64_t row = ((const colo_run_t *)first)->local,
                  other = ((const colo_run_t *)second)->local;
    return (row > other) - (row < other);
}

static bool has_index(const colo_run_t *stored, int64_t pos)
{
    return (uint64_t)(pos - stored->row) < (uint64_t)stored->count;
}

/* The tensor's row of index @pos, which is one of them. @hint: in and out, in [0, n): which run was
 * found last; the next one is usually it or follows it. */
static int64_t find(const colo_run_t *stored, int64_t n, int64_t pos, int64_t *hint)
{
    enum { STRIDE = sizeof *stored / sizeof stored->row };
    int64_t low = *hint;
    if (!has_index(&stored[low], pos) && (++low == n || !has_index(&stored[low], pos)))
        low = colo_last_begun(&stored->row, STRIDE, n, pos);
    *hint = low;
    return stored[low].local + (pos - stored[low].row);
}

/* Replaces indices by the tensor's rows, in regions whose addend is at least @least. */
static void place(const colo_routes_t *routes, int64_t least, const colo_run_t *stored, int64_t n)
{
    int64_t hint = 0;
    for (int64_t i = 0; i < routes->nregions; i++)
        if (least == 0 || routes->region[i].addend >= least)
            routes->offset[i].dst_row = find(stored, n, routes->offset[i].dst_row, &hint);
}

/* ---- where peers have rows ---- */

/* Where destination ranks have the rows of their tensors, by block; made when it is needed. */
typedef struct blocks {
    colo_run_t **stored; /* [dst.replicas * cp * sp] */
    int64_t *count;
} blocks_t;

static colo_status_t rows_of(colo_builder_t *builder, const colo_side_t *side,
                             const int64_t *coords, bool merged, colo_run_t **stored, int64_t *n)
{
    colo_side_t own = *side;
    int64_t rows;
    builder->on_rank.n = 0;
    own.on_rank = merged ? &builder->on_rank : NULL;
    COLO_TRY(own.owns->rows(&own, coords, NULL, &builder->other));
    *n = builder->other.n;
    return store(builder, side, coords, &builder->other, merged, stored, &rows);
}

/* Rows of the destination ranks' tensors, for indices on their replicas' axes. */
static colo_status_t place_message(colo_builder_t *builder, const colo_side_t *side, bool merged,
                                   const colo_plan_message_t *message, colo_offset_t *pos,
                                   blocks_t *blocks)
{
    const colo_ragged_t *ragged = side->table;
    int64_t coords[COLO_DIMS_MAX], hint = 0;
    (void)colo_grid_coords(&side->layout->grid, message->peer, coords);
    const colo_ragged_place_t where = colo_ragged_place(side->layout, coords);
    const int64_t owner = where.replica * ragged->dst.cp + where.context,
                  i = side->full ? where.replica : owner * ragged->dst.axes.sp + where.part;
    if (!blocks->stored[i])
        COLO_TRY(rows_of(builder, side, coords, merged, &blocks->stored[i], &blocks->count[i]));
    /* what is for other nodes has its rows: those of this rank's tensor */
    for (int64_t k = 0; k < message->nregions; k++)
        if (message->regions[k].addend < builder->plan->addends)
            pos[k].dst_row = find(blocks->stored[i], blocks->count[i], pos[k].dst_row, &hint);
    return COLO_OK;
}

colo_status_t colo_ragged_place_peers(colo_builder_t *builder, const colo_ragged_t *ragged,
                                      bool merged)
{
    const colo_plan_t *plan = builder->plan;
    const colo_side_t side = {.owns = &colo_owns_segments,
                              .layout = &plan->dst,
                              .shape = &plan->config.shape,
                              .table = ragged,
                              .full = plan->config.output == COLO_OUTPUT_FULL_SEQ};
    const size_t n =
        (size_t)(ragged->dst.axes.replicas * ragged->dst.axes.cp * ragged->dst.axes.sp);
    if (ragged->packed || (merged && side.full)) /* row = index */
        return COLO_OK;
    COLO_AUTOFREE colo_run_t **stored = calloc(n, sizeof *stored);
    COLO_AUTOFREE int64_t *count = calloc(n, sizeof *count);
    blocks_t blocks = {stored, count};
    COLO_FAIL_IF(!stored || !count, COLO_ERR_NOMEM, "bridge: %zu blocks", n);
    for (int i = 0; i < (plan->config.no_grad || plan->addends == 1 ? 1 : 2); i++) {
        const colo_routes_t *routes =
            colo_plan_routes(plan, (colo_pass_t)i, COLO_EXCHANGE_MAIN, i == 0);
        for (int32_t k = 0; k < routes->nmessages; k++) {
            const colo_plan_message_t *one = &routes->message[k];
            COLO_TRY(place_message(builder, &side, merged, one,
                                   &routes->offset[one->regions - routes->region], &blocks));
        }
    }
    return COLO_OK;
}

/* ---- the plan ---- */

static void own(const colo_side_t *side, int64_t rank, int64_t features, int64_t rows,
                colo_owned_t *out)
{
    int64_t coords[COLO_DIMS_MAX];
    colo_span_t spans[2 * COLO_MAX_SPANS];
    if (colo_layout_coords(side->layout, rank, coords) &&
        colo_axis_spans(side->layout, COLO_AXIS_FEATURES, coords, features, spans))
        *out = (colo_owned_t){.b1 = 1, .h0 = spans[0].lo, .h1 = spans[0].hi, .rows = rows};
}

/* What @runs leave of a tensor of @rows. */
static colo_status_t list_padding(colo_pool_t *pool, const colo_runs_t *runs, int64_t rows,
                                  colo_run_list_t *padding)
{
    if (runs->rows == rows)
        return COLO_OK;
    padding->run = colo_pool_take(pool, (size_t)(runs->n + 1) * sizeof *padding->run);
    COLO_FAIL_IF(!padding->run, COLO_ERR_NOMEM, "plan: %lld runs of padding", (long long)runs->n);
    for (int64_t i = 0, local = 0; i <= runs->n; i++) {
        const int64_t begin = i < runs->n ? runs->run[i].local : rows;
        if (local < begin)
            padding->run[padding->n++] = (colo_run_t){.local = local, .count = begin - local};
        if (i < runs->n)
            local = begin + runs->run[i].count;
    }
    return COLO_OK;
}

/* ---- the destination ---- */

/* Where the rows of this rank's destination tensor are. @arriving: out, those that it needs. */
static colo_status_t find_places(colo_builder_t *builder, const colo_ragged_t *ragged,
                                 colo_side_t dst, bool merged, colo_ragged_places_t *places,
                                 int64_t *rows, int64_t *arriving)
{
    const colo_plan_t *plan = builder->plan;
    const colo_plan_config_t *config = &plan->config;
    int64_t coords[COLO_DIMS_MAX];
    colo_runs_t *mine = &builder->other;
    const colo_runs_t *all;
    *rows = *arriving = 0;
    if (!colo_layout_coords(&plan->dst, plan->rank, coords))
        return COLO_OK;
    builder->on_rank.n = 0;
    dst.on_rank = merged ? &builder->on_rank : NULL;
    COLO_TRY(colo_block_own_rows(builder, &dst, coords, &all));
    dst.on_rank = NULL;
    *arriving = all->rows;
    if (dst.owns == &colo_owns_halo) {
        const int64_t block = colo_packed_block(&ragged->dst, &plan->dst, coords);
        *rows = ragged->halo.held[block];
        return colo_halo_find_places(builder->plan, &ragged->halo, block, places);
    }
    if (ragged->packed) { /* which are where the rows of the block say */
        *rows = colo_packed_extent(&ragged->dst, &plan->dst, coords);
        const bool padded = all->rows < *rows;
        const int64_t n = padded ? all->n : 1;
        places->stored = colo_pool_take(&builder->plan->pool, (size_t)n * sizeof *places->stored);
        COLO_FAIL_IF(n && !places->stored, COLO_ERR_NOMEM, "plan: %lld rows", (long long)*rows);
        for (int64_t i = 0; padded && i < n; i++)
            places->stored[i] =
                (colo_run_t){all->run[i].local, all->run[i].count, all->run[i].local};
        if (!padded)
            *places->stored = (colo_run_t){.count = *rows};
        places->n = all->rows > 0 ? n : 0;
        return list_padding(&builder->plan->pool, all, *rows,
                            &builder->plan->padding[COLO_PASS_FORWARD]);
    }
    places->n = all->n;
    COLO_TRY(store(builder, &dst, coords, all, merged, &places->stored, rows));
    if (!dst.full || config->grad != COLO_GRAD_DISJOINT || config->no_grad)
        return COLO_OK;
    dst.full = false;
    COLO_TRY(dst.owns->rows(&dst, coords, NULL, mine));
    if (mine->n > 1)
        qsort(mine->run, (size_t)mine->n, sizeof *mine->run, by_local);
    return list_foreign(mine, &builder->plan->pool, places);
}

static colo_status_t build(colo_builder_t *builder, colo_plan_t *plan, const colo_ragged_t *ragged,
                           bool merged, colo_ragged_places_t *places)
{
    const colo_plan_config_t *config = &plan->config;
    const colo_side_t src = {.owns = &colo_owns_packed,
                             .layout = &plan->src,
                             .shape = &config->shape,
                             .table = &ragged->src,
                             .ascends = !ragged->packed,
                             .full = ragged->src.uncut};
    colo_side_t dst = {.owns = &colo_owns_segments,
                       .layout = &plan->dst,
                       .shape = &config->shape,
                       .table = ragged,
                       .full = config->output == COLO_OUTPUT_FULL_SEQ};
    int64_t coords[COLO_DIMS_MAX], rows = 0, arriving = 0;
    const colo_runs_t *mine = NULL;
    colo_partial_t addends;
    colo_builder_begin(builder, plan, true);
    if (ragged->packed) {
        dst.owns = ragged->halo.before > 0 ? &colo_owns_halo : &colo_owns_packed;
        dst.table = ragged->halo.before > 0 ? (const void *)ragged : &ragged->dst;
        builder->answers.asked[COLO_PASS_FORWARD] = builder->answers.asked[COLO_PASS_BACKWARD] =
            false; /* of a batch, sides may be uncut or not */
    }
    if (colo_layout_coords(&plan->src, plan->rank, coords)) {
        COLO_TRY(colo_block_own_rows(builder, &src, coords, &mine));
        rows = colo_packed_extent(&ragged->src, &plan->src, coords);
        COLO_TRY(list_padding(&plan->pool, mine, rows, &plan->padding[COLO_PASS_BACKWARD]));
    }
    own(&src, plan->rank, config->shape.features, rows, &plan->own_src);
    COLO_TRY(find_places(builder, ragged, dst, merged, places, &rows, &arriving));
    own(&dst, plan->rank, config->shape.features, rows, &plan->own_dst);
    if (dst.full && config->grad == COLO_GRAD_PARTIAL) {
        COLO_TRY(colo_partial_over_context(&plan->dst, &builder->places, &addends));
        dst.partial = &addends;
        dst.npartial = 1;
    }
    if (dst.owns == &colo_owns_halo && !config->no_grad) {
        const int64_t block = colo_layout_coords(&plan->dst, plan->rank, coords)
                                  ? colo_packed_block(&ragged->dst, &plan->dst, coords)
                                  : -1;
        COLO_TRY(colo_halo_partials(&dst, mine, block, &builder->places, &builder->partials,
                                    &dst.addends));
        dst.partial = builder->partials.items;
        dst.npartial = builder->partials.n;
    }
    COLO_TRY(colo_builder_route(builder, src, dst));
    if (plan->names_rows)
        COLO_TRY(colo_halo_place_sums(plan, &builder->partials, mine));
    plan->bytes[COLO_PASS_FORWARD].minimum =
        arriving * (plan->own_dst.h1 - plan->own_dst.h0) * (int64_t)plan->elem -
        plan->bytes[COLO_PASS_FORWARD].local;
    colo_exchange_plan_t *forward = plan->exchange[COLO_PASS_FORWARD],
                         *backward = plan->exchange[COLO_PASS_BACKWARD];
    colo_routes_t *const placed[] = {
        &forward[COLO_EXCHANGE_MAIN].recv,      &plan->local[COLO_PASS_FORWARD],
        &forward[COLO_EXCHANGE_RELAYS].recv,    &forward[COLO_EXCHANGE_RELAYS].send,
        &backward[COLO_EXCHANGE_MAIN].send,     &plan->local[COLO_PASS_BACKWARD],
        &backward[COLO_EXCHANGE_NODE_SUMS].send};
    if (ragged->packed) /* an index is a row of the tensor */
        return COLO_OK;
    for (size_t i = 0; i < sizeof placed / sizeof placed[0]; i++)
        place(placed[i], 0, places->stored, places->n);
    /* what is collected for other nodes; the rest goes to its source tensor */
    place(&backward[COLO_EXCHANGE_MAIN].recv, plan->addends, places->stored, places->n);
    return COLO_OK;
}

colo_status_t colo_ragged_plan(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                               const colo_ragged_t *ragged, colo_builder_t *builder, bool merged,
                               uint64_t hash, colo_pool_t *spare, colo_ragged_places_t *places)
{
    colo_plan_config_t batch_config = *config;
    COLO_ENDS(colo_plan_destroy) colo_plan_t *made = NULL;
    /* features in the units in which both sides cut them */
    const int64_t src_parts = colo_layout_parts(batch_config.src, COLO_AXIS_FEATURES);
    const int64_t dst_parts = colo_layout_parts(batch_config.dst, COLO_AXIS_FEATURES),
                  units = src_parts / colo_gcd(src_parts, dst_parts) * dst_parts;
    const int64_t most =
        ragged->packed && ragged->halo.before > 0 ? ragged->halo.rows : ragged->rows;
    int64_t bytes;
    COLO_FAIL_IF(!colo_mul_ok(most, batch_config.shape.features, &bytes) ||
                     !colo_mul_ok(bytes, (int64_t)colo_dtype_size(batch_config.dtype), &bytes) ||
                     !colo_mul_ok(bytes, ragged->dst.axes.cp /* addends */, &bytes),
                 COLO_ERR_ARG, "%s: %lld rows of %lld %s features overflow 63 bits of bytes",
                 ragged->packed ? "packing" : "segments", (long long)most,
                 (long long)batch_config.shape.features, colo_dtype_name(batch_config.dtype));
    if (ragged->packed)
        batch_config.output = ragged->dst.uncut ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
    batch_config.shape = (colo_shape_t){.samples = 1, .rows = ragged->rows, .features = units};
    COLO_TRY(colo_plan_new(&made, &batch_config, rank));
    made->elem *= (size_t)(config->shape.features / units);
    made->pool = *spare;
    spare->chunk = NULL;
    COLO_TRY(build(builder, made, ragged, merged, places));
    made->hash = hash;
    *plan = made;
    made = NULL;
    return COLO_OK;
}

/* The plan for the tables of one kind. */
static colo_status_t create(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                            bool packed, const colo_tables_t *tables)
{
    colo_plan_config_t own;
    COLO_ENDS(colo_ragged_deinit) colo_ragged_t ragged = {0};
    COLO_ENDS(colo_builder_deinit) colo_builder_t builder = {0};
    colo_ragged_places_t places = {0};
    colo_table_t table[COLO_TABLES];
    int32_t n;
    COLO_FAIL_IF(!plan, COLO_ERR_ARG, "plan: plan is NULL");
    COLO_FAIL_IF(rank < 0, COLO_ERR_ARG, "plan: rank %lld, expected >= 0", (long long)rank);
    COLO_TRY(colo_plan_check_config(config, &own));
    COLO_FAIL_IF(packed && (own.output || own.grad), COLO_ERR_ARG,
                 "plan: packed with %s, expected 0: the packings say what a rank has",
                 own.output ? "output" : "grad");
    const colo_status_t st = colo_ragged_init(&ragged, own.src, own.dst, &own.shape, packed);
    if (st < 0)
        return colo_fail_prefix(st, "plan");
    COLO_TRY(colo_ragged_load(&ragged, tables, table, &n));
    return colo_ragged_plan(plan, &own, rank, &ragged, &builder, false, colo_tables_hash(table, n),
                            &(colo_pool_t){0}, &places);
}

colo_status_t colo_plan_create_ragged(colo_plan_t **plan, const colo_plan_config_t *config,
                                      const colo_segments_t *segments, int64_t rank)
{
    return create(plan, config, rank, false, &(colo_tables_t){.segments = segments});
}

colo_status_t colo_plan_create_packed(colo_plan_t **plan, const colo_plan_config_t *config,
                                      const colo_packing_t *src, const colo_packing_t *dst,
                                      int64_t rank)
{
    return create(plan, config, rank, true, &(colo_tables_t){.src = src, .dst = dst});
}
