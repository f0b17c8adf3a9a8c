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

#include <stdlib.h>
#include <string.h>

/* ---- coordinates of blocks ---- */

static bool counts(const colo_layout_t *l, colo_axis_t axis, int i, int context)
{
    return context < 0 || l->split[axis][i].context == (context == 1);
}

int64_t colo_ragged_part(const colo_layout_t *l, colo_axis_t axis, int context,
                         const int64_t *coords)
{
    int64_t index = 0;
    for (int i = 0; i < l->nsplits[axis]; i++)
        if (counts(l, axis, i, context))
            index = index * l->grid.extent[l->split[axis][i].dim] + coords[l->split[axis][i].dim];
    return index;
}

static void set_part(const colo_layout_t *l, colo_axis_t axis, int context, int64_t index,
                     int64_t *coords)
{
    for (int i = l->nsplits[axis] - 1; i >= 0; i--)
        if (counts(l, axis, i, context)) {
            const int32_t dim = l->split[axis][i].dim;
            coords[dim] = index % l->grid.extent[dim];
            index /= l->grid.extent[dim];
        }
}

/* ---- the batch ---- */

colo_status_t colo_ragged_init(colo_ragged_t *r, const colo_layout_t *src, const colo_layout_t *dst,
                               const colo_shape_t *s)
{
    int64_t units = 1;
    if (s->samples || s->rows || s->positions)
        return colo_fail(COLO_ERR_ARG,
                         "ragged batches with a shape of %lld samples, %lld rows, %lld positions, "
                         "expected 0 of each; these are in the tables",
                         (long long)s->samples, (long long)s->rows, (long long)s->positions);
    COLO_TRY(colo_layout_check_fields(src));
    COLO_TRY(colo_layout_check_fields(dst));
    COLO_TRY(colo_ragged_axes(&r->src, src, true));
    COLO_TRY(colo_ragged_axes(&r->dst, dst, false));
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
    const int64_t n = r->in_order.n, *src_dp = r->tables->src_dp;
    int64_t *next = r->src_lo; /* of each replica; shifted back below */
    memset(r->src_lo, 0, (size_t)(replicas + 1) * sizeof *r->src_lo);
    for (int64_t e = 0; e < r->tables->count; e++)
        r->src_lo[src_dp[e] + 1] += r->tables->rows[e];
    add_up_before(r->src_lo, replicas);
    COLO_AUTOFREE int64_t *begin = calloc((size_t)replicas + 1, sizeof *begin);
    if (!begin)
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld replicas", (long long)replicas);
    for (int64_t e = 0; p < end; e++)
        begin[src_dp[e] + 1] += colo_parts_of(r->tables->rows[e], &p);
    add_up_before(begin, replicas);
    if (!colo_list_reserve(&r->parts, n + 1, sizeof *p)) /* also if there is none */
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld runs of rows", (long long)n);
    r->parts.n = n;
    colo_part_t *to = r->parts.items;
    p = r->in_order.items;
    for (int64_t e = 0; p < end; e++) {
        const int64_t d = src_dp[e];
        for (int64_t k = colo_parts_of(r->tables->rows[e], &p); k > 0; k--) {
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
    const int64_t n = r->parts.n, *seq_dp = r->tables->seq_dp;
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

colo_status_t colo_ragged_load(colo_ragged_t *r, const colo_segments_t *s)
{
    const int64_t nsrc = r->src.replicas, ndst = r->dst.replicas;
    COLO_TRY(colo_segments_present(s));
    r->tables = s;
    int64_t **const table[] = {&r->src_lo, &r->dst_lo, &r->length, &r->base,
                               &r->chunk,  &r->local,  &r->row};
    const int64_t entries[] = {nsrc, ndst, ndst, s->nseqs, s->nseqs, s->nseqs, s->count};
    int64_t all = 0;
    for (int i = 0; i < 7; i++)
        if (!colo_add_ok(all, entries[i], &all) || !colo_add_ok(all, 1, &all))
            return no_memory(s);
    if (!colo_list_reserve(&r->entries, all, sizeof **table[0]))
        return no_memory(s);
    int64_t *next = r->entries.items;
    for (int i = 0; i < 7; next += entries[i++] + 1)
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
    memset(r, 0, sizeof *r);
}

colo_status_t colo_segments_check(const colo_segments_t *segments, const colo_layout_t *src,
                                  const colo_layout_t *dst)
{
    colo_ragged_t r = {0};
    for (int i = 0; i < 2; i++) {
        const colo_status_t st = colo_layout_check_fields(i ? dst : src);
        if (st < 0)
            return colo_fail_prefix(st, "segments: %s", i ? "dst" : "src");
        COLO_TRY(colo_ragged_axes(i ? &r.dst : &r.src, i ? dst : src, i == 0));
    }
    colo_status_t st = colo_ragged_load(&r, segments);
    colo_ragged_deinit(&r);
    return st;
}

/* ---- the owner of a position ---- */

typedef struct owner {
    int64_t cp, sp;
    int64_t local; /* on the axis of the context rank */
    int64_t end;   /* the position at which this run of positions ends */
} owner_t;

/* Where chunk @j of sequence @q begins on the axis of the context rank that owns it. */
static int64_t chunk_local(const colo_ragged_t *r, int64_t q, int64_t j)
{
    const int64_t first = r->local[q];
    return r->dst.zigzag && j >= r->dst.cp ? first + r->chunk[q] : first;
}

/* Positions that each rank of sequence parallelism owns on the axis of a context rank. */
static int64_t sp_length(const colo_ragged_t *r, int64_t q)
{
    return r->length[r->tables->seq_dp[q]] / r->dst.cp / r->dst.sp;
}

static owner_t owner_of(const colo_ragged_t *r, int64_t q, int64_t p)
{
    const int64_t unit = r->chunk[q], j = p / unit;
    owner_t o = {.cp = r->dst.zigzag && j >= r->dst.cp ? 2 * r->dst.cp - 1 - j : j,
                 .local = chunk_local(r, q, j) + p % unit,
                 .end = (j + 1) * unit};
    if (r->dst.sp > 1) {
        const int64_t block = sp_length(r, q);
        o.sp = o.local / block;
        if (o.end - p > (o.sp + 1) * block - o.local)
            o.end = p + (o.sp + 1) * block - o.local;
    }
    return o;
}

/* ---- rows of a block ---- */

/* Rows of @part that a context rank owns of chunk @j, cut to its block of sequence parallelism. */
static colo_status_t push_chunk(const colo_side_t *side, const colo_part_t *part, int64_t j,
                                int64_t sp, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    const int64_t q = part->seq, unit = r->chunk[q];
    int64_t lo = j * unit > part->pos ? j * unit : part->pos;
    int64_t hi = (j + 1) * unit;
    hi = hi < part->pos + part->count ? hi : part->pos + part->count;
    if (lo >= hi)
        return COLO_OK;
    int64_t local = chunk_local(r, q, j) + (lo - j * unit);
    if (r->dst.sp > 1) {
        const int64_t block = sp_length(r, q), a = sp * block - local, z = a + block;
        hi = z < hi - lo ? lo + z : hi;
        local += a > 0 ? a : 0;
        lo += a > 0 ? a : 0;
    }
    if (lo >= hi)
        return COLO_OK;
    if (side->on_rank) {
        int64_t *entry = colo_list_push(side->on_rank, sizeof *entry);
        if (!entry)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld runs of rows", (long long)runs->n);
        *entry = local;
    }
    return colo_runs_push(runs, part->row + (lo - part->pos), hi - lo, r->base[q] + lo);
}

static colo_status_t source_rows(const colo_side_t *side, const int64_t *coords,
                                 const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    (void)within; /* one run */
    runs->n = runs->rows = 0;
    const int64_t d = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    const int64_t j = colo_ragged_part(side->layout, COLO_ROWS, 1, coords) * r->src.sp +
                      colo_ragged_part(side->layout, COLO_ROWS, 0, coords);
    const int64_t n = r->src_lo[d + 1] - r->src_lo[d], parts = r->src.cp * r->src.sp;
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
    const colo_segments_t *s = r->tables;
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

static colo_status_t destination_rows(const colo_side_t *side, const int64_t *coords,
                                      const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_ragged_t *r = side->table;
    runs->n = runs->rows = 0;
    const int64_t d = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    const int64_t c = colo_ragged_part(side->layout, COLO_ROWS, 1, coords);
    const int64_t sp = colo_ragged_part(side->layout, COLO_ROWS, 0, coords);
    const int64_t mirror = 2 * r->dst.cp - 1 - c;
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
        if (side->full) {
            COLO_TRY(colo_runs_push(runs, p.row, p.count, r->base[p.seq] + p.pos));
            continue;
        }
        const int64_t unit = r->chunk[p.seq], last = p.pos + p.count;
        if (p.pos < (c + 1) * unit && last > c * unit) /* seldom: one of 2C chunks */
            COLO_TRY(push_chunk(side, &p, c, sp, runs));
        if (r->dst.zigzag && p.pos < (mirror + 1) * unit && last > mirror * unit)
            COLO_TRY(push_chunk(side, &p, mirror, sp, runs));
    }
    return COLO_OK;
}

/* ---- blocks that own rows ---- */

/* The source replica that holds @row; replicas may be empty. */
static int64_t find_source(const colo_ragged_t *r, int64_t row)
{
    int64_t a = 0, z = r->src.replicas; /* src_lo[a] <= row < src_lo[z] */
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
    const int64_t parts = r->src.cp * r->src.sp;
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
                set_part(side->layout, COLO_SAMPLES, -1, d, b.coord);
                set_part(side->layout, COLO_ROWS, 1, j / r->src.sp, b.coord);
                set_part(side->layout, COLO_ROWS, 0, j % r->src.sp, b.coord);
                COLO_TRY(colo_block_push(out, &b, 0));
            }
            const int64_t end = behind < hi ? behind : hi;
            ((colo_block_t *)out->items)[out->n - 1].count += end - lo;
            lo = end;
        }
    }
    return COLO_OK;
}

typedef struct met {
    int64_t block, count;
} met_t;

static int by_block(const void *a, const void *b)
{
    const int64_t x = ((const met_t *)a)->block, y = ((const met_t *)b)->block;
    return (x > y) - (x < y);
}

/* Adds up @list by block, ascending. Blocks that lie close together, as they usually do, are
 * counted in a table; others are sorted. */
static colo_status_t add_up(colo_list_t *list)
{
    met_t *met = list->items;
    int64_t least = INT64_MAX, most = 0, n = 0;
    for (int64_t i = 0; i < list->n; i++) {
        least = met[i].block < least ? met[i].block : least;
        most = met[i].block > most ? met[i].block : most;
    }
    if (list->n > 1 && most - least < 4 * list->n) {
        COLO_AUTOFREE int64_t *count = calloc((size_t)(most - least + 1), sizeof *count);
        if (!count)
            return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)list->n);
        for (int64_t i = 0; i < list->n; i++)
            count[met[i].block - least] += met[i].count;
        for (int64_t b = least; b <= most; b++)
            if (count[b - least] > 0)
                met[n++] = (met_t){b, count[b - least]};
        list->n = n;
        return COLO_OK;
    }
    if (list->n > 1)
        qsort(met, (size_t)list->n, sizeof *met, by_block);
    for (int64_t i = 0; i < list->n; i++)
        if (n > 0 && met[n - 1].block == met[i].block)
            met[n - 1].count += met[i].count;
        else
            met[n++] = met[i];
    list->n = n;
    return COLO_OK;
}

/* The blocks of positions [lo, hi) of sequence @q. */
static colo_status_t intersect_positions(const colo_side_t *side, int64_t q, int64_t lo, int64_t hi,
                                         colo_list_t *met)
{
    const colo_ragged_t *r = side->table;
    const int64_t d = r->tables->seq_dp[q];
    while (lo < hi) {
        const owner_t o = side->full ? (owner_t){.end = hi} : owner_of(r, q, lo);
        const int64_t end = o.end < hi ? o.end : hi;
        met_t *m = colo_list_push(met, sizeof *m);
        if (!m)
            return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)met->n);
        *m = (met_t){(d * r->dst.cp + o.cp) * r->dst.sp + o.sp, end - lo};
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
            COLO_TRY(
                intersect_positions(side, p.seq, p.pos + (lo - p.row), p.pos + (hi - p.row), met));
        }
    }
    return COLO_OK;
}

static colo_status_t visit_destination(const colo_side_t *side, const colo_runs_t *mine,
                                       colo_list_t *out)
{
    const colo_ragged_t *r = side->table;
    colo_list_t list = {0};
    colo_status_t st = intersect_rows(side, mine, &list);
    if (st == COLO_OK)
        st = add_up(&list);
    const met_t *met = list.items;
    for (int64_t i = 0; st == COLO_OK && i < list.n; i++) {
        colo_block_t b;
        const int64_t cp = met[i].block / r->dst.sp;
        colo_block_clear(&b);
        set_part(side->layout, COLO_SAMPLES, -1, cp / r->dst.cp, b.coord);
        if (!side->full) {
            set_part(side->layout, COLO_ROWS, 1, cp % r->dst.cp, b.coord);
            set_part(side->layout, COLO_ROWS, 0, met[i].block % r->dst.sp, b.coord);
        }
        st = colo_block_push(out, &b, met[i].count);
    }
    free(list.items);
    return st;
}

/* All rows of a batch are one sample. */
static colo_status_t visit_rest(const colo_side_t *side, const colo_bounds_t *bounds,
                                colo_list_t *met)
{
    colo_block_t all;
    colo_block_clear(&all);
    COLO_TRY(colo_block_push(&met[COLO_SAMPLES], &all, 1));
    return colo_blocks_along(&met[COLO_FEATURES], side->layout, COLO_FEATURES,
                             side->shape->features, bounds->h.lo, bounds->h.hi);
}

static colo_status_t meet_sources(const colo_side_t *side, const colo_bounds_t *bounds,
                                  colo_list_t *met)
{
    COLO_TRY(visit_rest(side, bounds, met));
    return visit_source(side, &bounds->runs, &met[COLO_ROWS]);
}

static colo_status_t meet_destinations(const colo_side_t *side, const colo_bounds_t *bounds,
                                       colo_list_t *met)
{
    COLO_TRY(visit_rest(side, bounds, met));
    return visit_destination(side, &bounds->runs, &met[COLO_ROWS]);
}

static bool box(const colo_side_t *side, const int64_t *coords, colo_bounds_t *bounds)
{
    colo_span_t features[2 * COLO_MAX_SPANS];
    if (!colo_axis_spans(side->layout, COLO_FEATURES, coords, side->shape->features, features))
        return false;
    bounds->b = (colo_span_t){0, 1};
    bounds->h = features[0];
    return true;
}

const colo_ownership_t colo_owns_segments_src = {
    .rows = source_rows, .visit = meet_sources, .box = box, .ascends = true};
const colo_ownership_t colo_owns_segments_dst = {
    .rows = destination_rows, .visit = meet_destinations, .box = box};
