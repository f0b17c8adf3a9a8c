/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.c - a ragged batch in the two roles of a plan: which rows a block owns, which blocks
 * own given rows.
 *
 * Rows are numbered along the source axes: replica after replica, in each of them segment after
 * segment. A source block is one range of these numbers. A destination block is a list of runs,
 * each with its index on the replica's whole sequence axis: runs that follow each other in both
 * numbers lie one behind the other in memory on both sides, whatever the placement is. So both ends
 * of a message find the same runs without knowing how the other one stores them.
 */
#include "bridge/layout/segments.h"

#include "bridge/layout/index.h"
#include "core/error.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- the batch ---- */

colo_status_t colo_ragged_init(colo_ragged_t *r, const colo_layout_t *src, const colo_layout_t *dst,
                               const colo_shape_t *s, bool packed)
{
    const char *what = packed ? "packing" : "segments";
    int64_t units = 1;
    if (s->samples || s->rows || s->positions)
        return colo_fail(COLO_ERR_ARG,
                         "ragged batches with a shape of %lld samples, %lld rows, %lld positions, "
                         "expected 0 of each; these are in the tables",
                         (long long)s->samples, (long long)s->rows, (long long)s->positions);
    COLO_TRY(colo_layout_check_fields(src));
    COLO_TRY(colo_layout_check_fields(dst));
    r->packed = packed;
    r->src.what = packed ? "src packing" : what;
    r->dst.what = packed ? "dst packing" : what;
    COLO_TRY(colo_ragged_axes(&r->src.axes, src, !packed, what, "source"));
    COLO_TRY(colo_ragged_axes(&r->dst.axes, dst, false, what, "destination"));
    for (int side = 0; side < 2; side++) {
        const int64_t parts = colo_layout_parts(side ? dst : src, COLO_FEATURES);
        units = units / colo_gcd(units, parts) * parts;
    }
    if (s->features % units)
        return colo_fail(COLO_ERR_LAYOUT,
                         "%lld features in %lld blocks, expected a multiple for ragged batches",
                         (long long)s->features, (long long)units);
    return COLO_OK;
}

/* Makes @lo [n + 1], whose lo[d + 1] is how many d has, begin with the first of each. */
static void add_up_before(int64_t *lo, int64_t n)
{
    for (int64_t d = 0; d < n; d++)
        lo[d + 1] += lo[d];
}

/* Parts by source row; the tables list them by segment. */
static colo_status_t sort_parts(colo_ragged_t *r, int64_t replicas)
{
    const colo_part_t *p = r->in_order.items, *const end = p ? p + r->in_order.n : NULL;
    const int64_t n = r->in_order.n, *src_dp = r->own.src_dp;
    int64_t *next = r->src_lo; /* of each replica; shifted back below */
    memset(r->src_lo, 0, (size_t)(replicas + 1) * sizeof *r->src_lo);
    for (int64_t e = 0; e < r->own.count; e++)
        r->src_lo[src_dp[e] + 1] += r->own.rows[e];
    add_up_before(r->src_lo, replicas);
    COLO_AUTOFREE int64_t *begin = calloc((size_t)replicas + 1, sizeof *begin);
    if (!begin)
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld replicas", (long long)replicas);
    for (int64_t e = 0; p < end; e++)
        begin[src_dp[e] + 1] += colo_parts_of(r->own.rows[e], &p);
    add_up_before(begin, replicas);
    if (!colo_list_reserve(&r->parts, n + 1, sizeof *p)) /* also if there is none */
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld runs of rows", (long long)n);
    r->parts.n = n;
    colo_part_t *to = r->parts.items;
    p = r->in_order.items;
    for (int64_t e = 0; p < end; e++) {
        const int64_t d = src_dp[e];
        for (int64_t k = colo_parts_of(r->own.rows[e], &p); k > 0; k--) {
            to[begin[d]] = p[-k];
            to[begin[d]++].row = next[d];
            next[d] += p[-k].count;
        }
    }
    /* each entry has run on to the begin of the next replica */
    memmove(&r->src_lo[1], &r->src_lo[0], (size_t)replicas * sizeof *r->src_lo);
    r->src_lo[0] = 0;
    return COLO_OK;
}

/* The parts of each destination replica. */
static void sort_sequences(colo_ragged_t *r, int64_t replicas)
{
    const colo_part_t *p = r->parts.items;
    const int64_t n = r->parts.n, *seq_dp = r->own.seq_dp;
    int64_t *by_dst = r->by_dst.items;
    memset(r->dst_lo, 0, (size_t)(replicas + 1) * sizeof *r->dst_lo);
    for (int64_t i = 0; i < n; i++)
        r->dst_lo[seq_dp[p[i].seq] + 1]++;
    add_up_before(r->dst_lo, replicas);
    for (int64_t i = 0; i < n; i++)
        by_dst[r->dst_lo[seq_dp[p[i].seq]]++] = i;
    memmove(&r->dst_lo[1], &r->dst_lo[0], (size_t)replicas * sizeof *r->dst_lo);
    r->dst_lo[0] = 0;
}

static colo_status_t no_memory(const colo_segments_t *s)
{
    return colo_fail(COLO_ERR_NOMEM, "segments: %lld segments in %lld sequences",
                     (long long)s->count, (long long)s->nseqs);
}

colo_status_t colo_ragged_load_packings(colo_ragged_t *r, const colo_packing_t *src,
                                        const colo_packing_t *dst)
{
    colo_packing_t own[2] = {{COLO_PACKING_INIT}, {COLO_PACKING_INIT}};
    for (int side = 0; side < 2; side++) {
        COLO_TRY(COLO_SIZED_READ(&own[side], side ? dst : src, seq_dp,
                                 side ? "dst packing" : "src packing", "COLO_PACKING_INIT"));
        COLO_TRY(colo_packed_load(side ? &r->dst : &r->src, &own[side], true));
    }
    if (own[0].nseqs != own[1].nseqs)
        return colo_fail(COLO_ERR_ARG,
                         "packing: src has %lld sequences, dst %lld, expected the same",
                         (long long)own[0].nseqs, (long long)own[1].nseqs);
    for (int64_t q = 0; q < own[0].nseqs; q++)
        if (own[0].seq_len[q] != own[1].seq_len[q])
            return colo_fail(COLO_ERR_ARG,
                             "packing: sequence %lld has %lld positions in src and %lld in dst, "
                             "expected the same",
                             (long long)q, (long long)own[0].seq_len[q],
                             (long long)own[1].seq_len[q]);
    r->rows = r->src.start[own[0].nseqs];
    return COLO_OK;
}

colo_status_t colo_ragged_load(colo_ragged_t *r, const colo_segments_t *given)
{
    const int64_t nsrc = r->src.axes.replicas, ndst = r->dst.axes.replicas;
    const colo_segments_t *s = &r->own;
    COLO_TRY(colo_segments_read(&r->given, given));
    r->own = r->given;
    int64_t **const table[] = {&r->src_lo, &r->dst_lo, &r->row};
    const int64_t entries[] = {nsrc, ndst, s->count};
    int64_t all = 0;
    for (int i = 0; i < 3; i++)
        if (!colo_add_ok(all, entries[i], &all) || !colo_add_ok(all, 1, &all))
            return no_memory(s);
    if (!colo_list_reserve(&r->entries, all, sizeof **table[0]))
        return no_memory(s);
    int64_t *next = r->entries.items;
    for (int i = 0; i < 3; next += entries[i++] + 1)
        *table[i] = next;
    COLO_TRY(colo_ragged_parts(r));
    if (r->sorted) /* as tables usually are */
        return COLO_OK;
    if (!colo_list_reserve(&r->by_dst, r->in_order.n, sizeof(int64_t)))
        return no_memory(s);
    COLO_TRY(sort_parts(r, nsrc));
    sort_sequences(r, ndst);
    return COLO_OK;
}

void colo_ragged_deinit(colo_ragged_t *r)
{
    free(r->in_order.items);
    free(r->parts.items);
    free(r->entries.items);
    free(r->by_dst.items);
    free(r->zeros.items);
    colo_packed_deinit(&r->src);
    colo_packed_deinit(&r->dst);
    memset(r, 0, sizeof *r);
}

colo_status_t colo_segments_check(const colo_segments_t *segments, const colo_layout_t *src,
                                  const colo_layout_t *dst)
{
    colo_ragged_t r = {.dst.what = "segments"};
    for (int i = 0; i < 2; i++) {
        const colo_status_t st = colo_layout_check_fields(i ? dst : src);
        if (st < 0)
            return colo_fail_prefix(st, "segments: %s", i ? "dst" : "src");
        COLO_TRY(colo_ragged_axes(i ? &r.dst.axes : &r.src.axes, i ? dst : src, i == 0, "segments",
                                  i ? "destination" : "source"));
    }
    colo_status_t st = colo_ragged_load(&r, segments);
    colo_ragged_deinit(&r);
    return st;
}

/* ---- rows of a block ---- */

static colo_status_t source_rows(const colo_side_t *side, const int64_t *coords,
                                 const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    (void)within; /* one run */
    runs->n = runs->rows = 0;
    const int64_t d = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    const int64_t j = colo_ragged_part(side->layout, COLO_ROWS, 1, coords) * r->src.axes.sp +
                      colo_ragged_part(side->layout, COLO_ROWS, 0, coords);
    const int64_t n = r->src_lo[d + 1] - r->src_lo[d], parts = r->src.axes.cp * r->src.axes.sp;
    const int64_t lo = colo_block_lo(n, parts, j), hi = colo_block_lo(n, parts, j + 1);
    return lo < hi ? colo_runs_push(runs, r->src_lo[d] + lo, hi - lo, 0) : COLO_OK;
}

/* Parts in an order: the columns of the tables, or a list. */
typedef struct parts {
    int64_t n, step; /* step: entries from one part to the next */
    const int64_t *seq, *pos, *count, *row;
    const int64_t *index; /* which part comes when; NULL: as they lie */
} parts_t;

static parts_t parts_in_order(const colo_ragged_t *r, bool by_dst)
{
    const colo_segments_t *s = &r->own;
    const colo_part_t *p = r->parts.items;
    if (r->sorted)
        return (parts_t){s->count, 1, s->seq, s->pos, s->rows, r->row, NULL};
    return (parts_t){.n = r->parts.n,
                     .step = sizeof *p / sizeof p->seq,
                     .seq = &p->seq,
                     .pos = &p->pos,
                     .count = &p->count,
                     .row = &p->row,
                     .index = by_dst ? r->by_dst.items : NULL};
}

static inline colo_part_t part_of(const parts_t *p, int64_t i)
{
    const int64_t k = (p->index ? p->index[i] : i) * p->step;
    return (colo_part_t){p->seq[k], p->pos[k], p->count[k], p->row[k]};
}

/* The first of parts [a, z) that ends behind @row. */
static int64_t first_part(parts_t parts, int64_t a, int64_t z, int64_t row)
{
    while (a < z) {
        const int64_t mid = a + (z - a) / 2;
        const colo_part_t p = part_of(&parts, mid);
        if (p.row + p.count <= row)
            a = mid + 1;
        else
            z = mid;
    }
    return a;
}

/* Rows of @part in piece @x, cut to block @sp of sequence parallelism. */
static colo_status_t push_piece(const colo_side_t *side, const colo_part_t *part,
                                const colo_piece_t *x, int64_t sp, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    const int64_t start = r->dst.start[part->seq], first = start + part->pos;
    int64_t lo = first, hi = first + part->count;
    if (!colo_packed_cut(&r->dst, x, sp, &lo, &hi))
        return COLO_OK;
    if (side->on_rank) {
        int64_t *entry = colo_list_push(side->on_rank, sizeof *entry);
        if (!entry)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)runs->n);
        *entry = x->local + (lo - x->row);
    }
    return colo_runs_push(runs, part->row + (lo - first), hi - lo,
                          r->dst.base[part->seq] + (lo - start));
}

/* Rows of @part that context rank @c, owner @k, has. */
static colo_status_t push_part(const colo_side_t *side, const colo_part_t *part, int64_t c,
                               int64_t k, int64_t sp, colo_runs_t *runs)
{
    const colo_packed_t *p = &((const colo_ragged_t *)side->table)->dst;
    const int64_t q = part->seq, first = p->start[q] + part->pos, behind = first + part->count;
    if (!p->listed) { /* two pieces at most, and seldom */
        const int64_t unit = p->chunk[q], last = part->pos + part->count;
        const int64_t two[] = {c, 2 * p->cp - 1 - c};
        for (int i = 0; i < 1 + p->axes.zigzag; i++)
            if (part->pos < (two[i] + 1) * unit && last > two[i] * unit) {
                const colo_piece_t x = colo_packed_piece(p, q, two[i]);
                COLO_TRY(push_piece(side, part, &x, sp, runs));
            }
        return COLO_OK;
    }
    for (int64_t j = colo_packed_find(p, q, first), end = first; end < behind; j++) {
        const colo_piece_t x = colo_packed_piece(p, q, j);
        end = x.row + x.count;
        if (x.owner == k)
            COLO_TRY(push_piece(side, part, &x, sp, runs));
    }
    return COLO_OK;
}

static colo_status_t destination_rows(const colo_side_t *side, const int64_t *coords,
                                      const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    runs->n = runs->rows = 0;
    const int64_t d = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    const int64_t c = colo_ragged_part(side->layout, COLO_ROWS, 1, coords);
    const int64_t sp = colo_ragged_part(side->layout, COLO_ROWS, 0, coords);
    const parts_t parts = parts_in_order(r, true);
    int64_t i = r->dst_lo[d], end = r->dst_lo[d + 1], behind = INT64_MAX;
    if (within && within->n > 0) {
        const colo_run_t *last = &within->run[within->n - 1];
        i = first_part(parts, i, end, within->run[0].row);
        behind = last->row + last->count;
    }
    for (; i < end; i++) {
        const colo_part_t p = part_of(&parts, i);
        if (p.row >= behind)
            break;
        COLO_TRY(side->full ? colo_runs_push(runs, p.row, p.count, r->dst.base[p.seq] + p.pos)
                            : push_part(side, &p, c, d * r->dst.cp + c, sp, runs));
    }
    return COLO_OK;
}

/* ---- blocks that own rows ---- */

/* The source replica that holds @row; replicas may be empty. */
static int64_t find_source(const colo_ragged_t *r, int64_t row)
{
    int64_t a = 0, z = r->src.axes.replicas; /* src_lo[a] <= row < src_lo[z] */
    while (z - a > 1) {
        const int64_t mid = a + (z - a) / 2;
        if (r->src_lo[mid] <= row)
            a = mid;
        else
            z = mid;
    }
    return a;
}

static colo_status_t visit_source(const colo_side_t *side, const colo_runs_t *mine,
                                  colo_list_t *out)
{
    const colo_ragged_t *r = side->table;
    const int64_t parts = r->src.axes.cp * r->src.axes.sp;
    int64_t behind = 0; /* of the last block; rows ascend, so blocks do */
    for (int64_t i = 0; i < mine->n; i++) {
        int64_t lo = mine->run[i].row;
        const int64_t hi = lo + mine->run[i].count;
        while (lo < hi) {
            if (lo >= behind) {
                colo_block_t b;
                const int64_t d = find_source(r, lo), n = r->src_lo[d + 1] - r->src_lo[d];
                const int64_t j = colo_block_part(n, parts, lo - r->src_lo[d]);
                behind = r->src_lo[d] + colo_block_lo(n, parts, j + 1);
                colo_block_clear(&b);
                colo_ragged_set_part(side->layout, COLO_SAMPLES, -1, d, b.coord);
                colo_ragged_set_part(side->layout, COLO_ROWS, 1, j / r->src.axes.sp, b.coord);
                colo_ragged_set_part(side->layout, COLO_ROWS, 0, j % r->src.axes.sp, b.coord);
                COLO_TRY(colo_block_push(out, &b, 0));
            }
            const int64_t end = behind < hi ? behind : hi;
            ((colo_block_t *)out->items)[out->n - 1].count += end - lo;
            lo = end;
        }
    }
    return COLO_OK;
}

/* Counts rows [lo, hi) of sequence @q by the block that owns them. */
static colo_status_t intersect_pieces(const colo_packed_t *p, int64_t q, int64_t lo, int64_t hi,
                                      colo_list_t *met)
{
    for (int64_t j = colo_packed_find(p, q, lo); lo < hi; j++) {
        const colo_piece_t x = colo_packed_piece(p, q, j);
        const int64_t end = x.row + x.count < hi ? x.row + x.count : hi;
        COLO_TRY(colo_packed_meet(p, &x, lo, end, met));
        lo = end;
    }
    return COLO_OK;
}

static colo_status_t intersect_rows(const colo_side_t *side, const colo_runs_t *mine,
                                    colo_list_t *met)
{
    const colo_ragged_t *r = side->table;
    const parts_t parts = parts_in_order(r, false);
    for (int64_t i = 0; i < mine->n; i++) {
        const int64_t r0 = mine->run[i].row, r1 = r0 + mine->run[i].count;
        for (int64_t a = first_part(parts, 0, parts.n, r0); a < parts.n; a++) {
            const colo_part_t p = part_of(&parts, a);
            if (p.row >= r1)
                break;
            const int64_t lo = p.row > r0 ? p.row : r0;
            const int64_t end = p.row + p.count, hi = end < r1 ? end : r1;
            const int64_t first = r->dst.start[p.seq] + p.pos + (lo - p.row);
            COLO_TRY(side->full
                         ? colo_packed_count(r->own.seq_dp[p.seq] * r->dst.cp * r->dst.axes.sp,
                                             hi - lo, met)
                         : intersect_pieces(&r->dst, p.seq, first, first + (hi - lo), met));
        }
    }
    return COLO_OK;
}

static colo_status_t visit_destination(const colo_side_t *side, const colo_runs_t *mine,
                                       colo_list_t *out)
{
    const colo_ragged_t *r = side->table;
    colo_list_t met = {0};
    const colo_status_t st = intersect_rows(side, mine, &met);
    if (st < 0) {
        free(met.items);
        return st;
    }
    return colo_packed_blocks(side, &r->dst, &met, out);
}

static colo_status_t meet_sources(const colo_side_t *side, const colo_bounds_t *bounds,
                                  colo_list_t *met)
{
    COLO_TRY(colo_packed_visit_rest(side, bounds, met));
    return visit_source(side, &bounds->runs, &met[COLO_ROWS]);
}

static colo_status_t meet_destinations(const colo_side_t *side, const colo_bounds_t *bounds,
                                       colo_list_t *met)
{
    COLO_TRY(colo_packed_visit_rest(side, bounds, met));
    return visit_destination(side, &bounds->runs, &met[COLO_ROWS]);
}

const colo_ownership_t colo_owns_segments_src = {
    .rows = source_rows, .visit = meet_sources, .box = colo_packed_box, .ascends = true};
const colo_ownership_t colo_owns_segments_dst = {
    .rows = destination_rows, .visit = meet_destinations, .box = colo_packed_box};
