/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.c - the tables of a ragged batch along the axes of both sides; and in the destination's
 * role, which rows a block owns, and which blocks own given rows.
 *
 * Rows are numbered along the source axes: replica after replica, in each of them segment after
 * segment. So a source replica has one packed sequence, whose blocks are packed.c's. A destination
 * block is a list of runs, each with its index on the replica's whole sequence axis: runs that
 * follow each other in both numbers lie one behind the other in memory on both sides, whatever the
 * placement is. So both ends of a message find the same runs without knowing how the other one
 * stores them.
 */
#include "bridge/layout/segments.h"

#include "bridge/layout/index.h"
#include "core/error.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- the batch ---- */

colo_status_t colo_ragged_init(colo_ragged_t *ragged, const colo_layout_t *src,
                               const colo_layout_t *dst, const colo_shape_t *shape, bool packed)
{
    const char *what = packed ? "packing" : "segments";
    int64_t units = 1;
    COLO_FAIL_IF(shape->samples || shape->rows || shape->positions, COLO_ERR_ARG,
                 "ragged batches with a shape of %lld samples, %lld rows, %lld positions, "
                 "expected 0 of each; these are in the tables",
                 (long long)shape->samples, (long long)shape->rows, (long long)shape->positions);
    COLO_TRY(colo_layout_check_fields(src));
    COLO_TRY(colo_layout_check_fields(dst));
    ragged->packed = packed;
    ragged->src.what = packed ? "src packing" : what;
    ragged->dst.what = packed ? "dst packing" : what;
    COLO_TRY(colo_ragged_axes(&ragged->src.axes, src, !packed, what, "source"));
    COLO_TRY(colo_ragged_axes(&ragged->dst.axes, dst, false, what, "destination"));
    for (int side = 0; side < 2; side++) {
        const int64_t parts = colo_layout_parts(side ? dst : src, COLO_AXIS_FEATURES);
        units = units / colo_gcd(units, parts) * parts;
    }
    COLO_FAIL_IF(shape->features % units, COLO_ERR_LAYOUT,
                 "%lld features in %lld blocks, expected a multiple for ragged batches",
                 (long long)shape->features, (long long)units);
    return COLO_OK;
}

static colo_status_t no_memory(const colo_segments_t *segments)
{
    return colo_fail(COLO_ERR_NOMEM, "segments: %lld segments in %lld sequences",
                     (long long)segments->count, (long long)segments->nseqs);
}

static colo_status_t load_packings(colo_ragged_t *ragged, const colo_packing_t *src,
                                   const colo_packing_t *dst)
{
    colo_packing_t own[2] = {{COLO_PACKING_INIT}, {COLO_PACKING_INIT}};
    for (int side = 0; side < 2; side++) {
        COLO_TRY(COLO_SIZED_READ(&own[side], side ? dst : src, seq_dp,
                                 side ? "dst packing" : "src packing", "COLO_PACKING_INIT"));
        COLO_FAIL_IF(!side && own[side].halo_before, COLO_ERR_ARG,
                     "src packing: halo_before is %lld, expected 0: a source has each row once",
                     (long long)own[side].halo_before);
        if (side && own[side].halo_before > 0)
            COLO_TRY(colo_halo_load(&ragged->halo, &ragged->dst, &own[side]));
        COLO_TRY(colo_packed_load(side ? &ragged->dst : &ragged->src, &own[side], true));
    }
    ragged->halo.before = own[1].halo_before;
    COLO_FAIL_IF(own[0].nseqs != own[1].nseqs, COLO_ERR_ARG,
                 "packing: src has %lld sequences, dst %lld, expected the same",
                 (long long)own[0].nseqs, (long long)own[1].nseqs);
    for (int64_t seq = 0; seq < own[0].nseqs; seq++)
        COLO_FAIL_IF(own[0].seq_len[seq] != own[1].seq_len[seq], COLO_ERR_ARG,
                     "packing: sequence %lld has %lld positions in src and %lld in dst, "
                     "expected the same",
                     (long long)seq, (long long)own[0].seq_len[seq],
                     (long long)own[1].seq_len[seq]);
    ragged->rows = ragged->src.start[own[0].nseqs];
    return COLO_OK;
}

/* The source axes: all rows of a replica are one sequence, of which its ranks have a block each. */
static colo_status_t load_source(colo_ragged_t *ragged)
{
    const int64_t n = ragged->src.axes.replicas;
    const colo_packing_t packing = {COLO_PACKING_INIT, .nseqs = n, .seq_len = ragged->src_rows,
                                    .seq_dp = ragged->src_dp};
    for (int64_t replica = 0; replica < n; replica++)
        ragged->src_dp[replica] = replica;
    return colo_packed_load(&ragged->src, &packing, true);
}

/* Parts by source row, which are listed by segment; and by destination replica. */
static colo_status_t sort_parts(colo_ragged_t *ragged)
{
    const colo_part_t *part = ragged->in_order.items;
    const int64_t n = ragged->in_order.n, nsrc = ragged->src.axes.replicas;
    COLO_AUTOFREE int64_t *first = malloc((size_t)(nsrc + 1) * sizeof *first);
    if (!first || !colo_list_reserve(&ragged->by_dst, n, sizeof(int64_t)) ||
        !colo_list_reserve(&ragged->parts, n + 1 /* also if there is none */, sizeof *part))
        return no_memory(&ragged->own);
    ragged->parts.n = n;
    colo_part_t *to = ragged->parts.items;
    int64_t *order = ragged->by_dst.items, row = 0;
    if (n > 0)
        colo_order_by(COLO_KEYS(part, row /* a replica so far */, n), nsrc, first, order);
    for (int64_t i = 0; i < n; row += to[i++].count) {
        to[i] = part[order[i]];
        to[i].row = row;
    }
    colo_keys_t keys = COLO_KEYS(to, seq, n);
    keys.map = ragged->own.seq_dp;
    colo_order_by(keys, ragged->dst.axes.replicas, ragged->dst_lo, order);
    return COLO_OK;
}

static colo_status_t load_segments(colo_ragged_t *ragged, const colo_segments_t *given)
{
    const int64_t nsrc = ragged->src.axes.replicas, ndst = ragged->dst.axes.replicas;
    const colo_segments_t *segments = &ragged->own;
    COLO_TRY(colo_segments_read(&ragged->own, given));
    int64_t **const table[] = {&ragged->src_rows, &ragged->src_dp, &ragged->dst_lo, &ragged->row};
    if (!colo_tables_lay(&ragged->entries, table,
                         (const int64_t[]){nsrc, nsrc, ndst, segments->count}, 4))
        return no_memory(segments);
    memset(ragged->src_rows, 0, (size_t)nsrc * sizeof *ragged->src_rows);
    COLO_TRY(colo_ragged_parts(ragged));
    COLO_TRY(load_source(ragged));
    return ragged->sorted ? COLO_OK : sort_parts(ragged); /* as tables usually are */
}

colo_status_t colo_ragged_load(colo_ragged_t *ragged, const colo_tables_t *tables,
                               colo_table_t *table, int32_t *n)
{
    COLO_TRY(ragged->packed ? load_packings(ragged, tables->src, tables->dst)
                            : load_segments(ragged, tables->segments));
    *n = ragged->packed ? colo_packings_keep(table, tables->src, tables->dst)
                        : colo_segments_keep(table, &ragged->own);
    return COLO_OK;
}

void colo_ragged_deinit(colo_ragged_t *ragged)
{
    free(ragged->in_order.items);
    free(ragged->parts.items);
    free(ragged->entries.items);
    free(ragged->by_dst.items);
    free(ragged->zeros.items);
    colo_packed_deinit(&ragged->src);
    colo_packed_deinit(&ragged->dst);
    colo_halo_deinit(&ragged->halo);
    memset(ragged, 0, sizeof *ragged);
}

colo_status_t colo_segments_check(const colo_segments_t *segments, const colo_layout_t *src,
                                  const colo_layout_t *dst)
{
    COLO_ENDS(colo_ragged_deinit)
    colo_ragged_t ragged = {.src.what = "segments", .dst.what = "segments"};
    for (int i = 0; i < 2; i++) {
        const colo_status_t st = colo_layout_check_fields(i ? dst : src);
        if (st < 0)
            return colo_fail_prefix(st, "segments: %s", i ? "dst" : "src");
        COLO_TRY(colo_ragged_axes(i ? &ragged.dst.axes : &ragged.src.axes, i ? dst : src, i == 0,
                                  "segments", i ? "destination" : "source"));
    }
    return load_segments(&ragged, segments);
}

/* ---- rows of a block ---- */

/* Parts in an order: the columns of the tables, or a list. */
typedef struct parts {
    int64_t n;
    const int64_t *seq, *pos;
    colo_ranges_t rows; /* whose index says which part comes when */
} parts_t;

static parts_t parts_in_order(const colo_ragged_t *ragged, bool by_dst)
{
    const colo_segments_t *segments = &ragged->own;
    const colo_part_t *part = ragged->parts.items;
    if (ragged->sorted)
        return (parts_t){segments->count,
                         segments->seq,
                         segments->pos,
                         {.begin = ragged->row, .count = segments->rows, .stride = 1}};
    parts_t parts = {ragged->parts.n, &part->seq, &part->pos, COLO_RANGES(part, row, count)};
    parts.rows.index = by_dst ? ragged->by_dst.items : NULL;
    return parts;
}

static inline colo_part_t part_of(const parts_t *parts, int64_t i)
{
    const int64_t k = (parts->rows.index ? parts->rows.index[i] : i) * parts->rows.stride;
    return (colo_part_t){parts->seq[k], parts->pos[k], parts->rows.count[k], parts->rows.begin[k]};
}

/* Rows of @part in piece @piece, cut to block @sp of sequence parallelism. */
static inline colo_status_t push_piece(const colo_side_t *side, colo_part_t part,
                                       colo_piece_t piece, int64_t sp, colo_runs_t *runs)
{
    const colo_packed_t *packed = &((const colo_ragged_t *)side->table)->dst;
    const int64_t start = packed->start[part.seq], first = start + part.pos;
    int64_t lo = first, hi = first + part.count;
    if (!colo_packed_cut(packed, &piece, sp, &lo, &hi))
        return COLO_OK;
    if (side->on_rank)
        COLO_PUSH(side->on_rank, "plan: %lld runs of rows", piece.local + (lo - piece.row));
    return colo_runs_push(runs, part.row + (lo - first), hi - lo,
                          packed->base[part.seq] + (lo - start));
}

/* The rows of @part that owner @k has. */
static colo_status_t push_listed(const colo_side_t *side, colo_part_t part, int64_t k, int64_t sp,
                                 colo_runs_t *runs)
{
    const colo_packed_t *packed = &((const colo_ragged_t *)side->table)->dst;
    const int64_t first = packed->start[part.seq] + part.pos, behind = first + part.count;
    for (int64_t j = colo_packed_find(packed, part.seq, first), end = first; end < behind; j++) {
        const colo_piece_t piece = colo_packed_piece(packed, part.seq, j);
        end = piece.row + piece.count;
        if (piece.owner == k)
            COLO_TRY(push_piece(side, part, piece, sp, runs));
    }
    return COLO_OK;
}

static colo_status_t destination_rows(const colo_side_t *side, const int64_t *coords,
                                      const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_ragged_t *ragged = side->table;
    const colo_packed_t *packed = &ragged->dst;
    const colo_ragged_place_t place = colo_ragged_place(side->layout, coords);
    const int64_t replica = place.replica, context = place.context, sp = place.part;
    const int64_t mirror = 2 * packed->cp - 1 - context, *const chunk = packed->chunk;
    const bool alike = !side->full && !packed->listed, zigzag = packed->axes.zigzag;
    const parts_t parts = parts_in_order(ragged, true);
    int64_t i = ragged->dst_lo[replica], end = ragged->dst_lo[replica + 1], behind = INT64_MAX;
    runs->n = runs->rows = 0;
    if (within && within->n > 0) {
        const colo_run_t *last = &within->run[within->n - 1];
        i = colo_first_behind(parts.rows, i, end, within->run[0].row);
        behind = last->row + last->count;
    }
    for (; i < end; i++) {
        const colo_part_t part = part_of(&parts, i);
        if (part.row >= behind)
            break;
        if (!alike) {
            COLO_TRY(
                side->full
                    ? colo_runs_push(runs, part.row, part.count, packed->base[part.seq] + part.pos)
                    : push_listed(side, part, replica * packed->cp + context, sp, runs));
            continue;
        }
        const int64_t unit = chunk[part.seq], last = part.pos + part.count;
        if (part.pos < (context + 1) * unit && last > context * unit) /* seldom */
            COLO_TRY(
                push_piece(side, part, colo_packed_piece(packed, part.seq, context), sp, runs));
        if (zigzag && part.pos < (mirror + 1) * unit && last > mirror * unit)
            COLO_TRY(push_piece(side, part, colo_packed_piece(packed, part.seq, mirror), sp, runs));
    }
    return COLO_OK;
}

/* ---- blocks that own rows ---- */

static colo_status_t intersect_rows(const colo_side_t *side, const colo_runs_t *mine,
                                    colo_list_t *met)
{
    const colo_ragged_t *ragged = side->table;
    const parts_t parts = parts_in_order(ragged, false);
    for (int64_t i = 0; i < mine->n; i++) {
        const int64_t r0 = mine->run[i].row, r1 = r0 + mine->run[i].count;
        for (int64_t j = colo_first_behind(parts.rows, 0, parts.n, r0); j < parts.n; j++) {
            const colo_part_t part = part_of(&parts, j);
            if (part.row >= r1)
                break;
            const int64_t lo = part.row > r0 ? part.row : r0;
            const int64_t end = part.row + part.count, hi = end < r1 ? end : r1;
            const int64_t first = ragged->dst.start[part.seq] + part.pos + (lo - part.row);
            COLO_TRY(side->full
                         ? colo_packed_count(ragged->own.seq_dp[part.seq] * ragged->dst.cp *
                                                 ragged->dst.axes.sp,
                                             hi - lo, met)
                         : colo_packed_meet(&ragged->dst, part.seq, first, first + (hi - lo), met));
        }
    }
    return COLO_OK;
}

static colo_status_t visit_destination(const colo_side_t *side, const colo_runs_t *mine,
                                       colo_list_t *out)
{
    const colo_ragged_t *ragged = side->table;
    COLO_ENDS(colo_list_deinit) colo_list_t met = {0};
    COLO_TRY(intersect_rows(side, mine, &met));
    return colo_packed_blocks(side, &ragged->dst, &met, out);
}

const colo_ownership_t colo_owns_segments = {
    .rows = destination_rows, .visit = visit_destination, .tables = true};
