/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - a layout seen as blocks, and which blocks of one side meet a block of the other.
 *
 * A block is one choice of the coordinates of the dims that split a side; all ranks that share
 * those coordinates are its replicas. Blocks that meet given samples, rows and features are found
 * axis by axis, their coordinates by division, so the cost is what meets and not how large the
 * world is.
 */
#include "bridge/plan/routing.h"
#include "bridge/ragged.h"

#include "core/error.h"

#include <stdlib.h>
#include <string.h>

/* ---- sides, blocks ---- */

void colo_block_clear(colo_block_t *b)
{
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        b->coord[i] = -1;
    b->count = 0;
}

colo_status_t colo_block_push(colo_list_t *out, const colo_block_t *b, int64_t count)
{
    colo_block_t *entry = colo_list_push(out, sizeof *entry);
    if (!entry)
        return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)out->n);
    *entry = *b;
    entry->count = count;
    return COLO_OK;
}

/* Appends every block coordinate choice of @axis that meets local indices [lo, hi) of the whole
 * axis, from split @i on. @b is a workspace of the choices made so far. */
static colo_status_t visit(colo_list_t *out, const colo_layout_t *l, colo_axis_t axis, int i,
                           int64_t length, int64_t lo, int64_t hi, colo_block_t *b)
{
    if (lo >= hi)
        return COLO_OK;
    if (i == l->nsplits[axis])
        return colo_block_push(out, b, hi - lo);
    const colo_split_t *s = &l->split[axis][i];
    int64_t parts = l->grid.extent[s->dim];
    if (parts == 1) {
        b->coord[s->dim] = 0;
        return visit(out, l, axis, i + 1, length, lo, hi, b);
    }
    if (s->kind != COLO_ZIGZAG) {
        for (int64_t end; lo < hi; lo = end) { /* parts in between may be empty */
            const int64_t d = colo_split_part(s->kind, length, parts, lo);
            const int64_t a = colo_split_lo(s->kind, length, parts, d),
                          e = colo_split_lo(s->kind, length, parts, d + 1);
            end = hi < e ? hi : e;
            b->coord[s->dim] = d;
            COLO_TRY(visit(out, l, axis, i + 1, e - a, lo - a, end - a, b));
        }
        return COLO_OK;
    }
    int64_t q = length / (2 * parts);
    while (lo < hi) {
        int64_t end = (lo / q + 1) * q < hi ? (lo / q + 1) * q : hi, local;
        b->coord[s->dim] = colo_zigzag_part(q, parts, lo, &local);
        COLO_TRY(visit(out, l, axis, i + 1, 2 * q, local, local + (end - lo), b));
        lo = end;
    }
    return COLO_OK;
}

int colo_block_cmp(const void *a, const void *b)
{
    const colo_block_t *x = a, *y = b;
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        if (x->coord[i] != y->coord[i])
            return x->coord[i] < y->coord[i] ? -1 : 1;
    return 0;
}

static void unique_blocks(colo_list_t *l)
{
    colo_block_t *b = l->items;
    int64_t n = 0;
    if (l->n > 1)
        qsort(b, (size_t)l->n, sizeof *b, colo_block_cmp);
    for (int64_t i = 0; i < l->n; i++)
        if (n == 0 || colo_block_cmp(&b[n - 1], &b[i]) != 0)
            b[n++] = b[i];
        else
            b[n - 1].count += b[i].count;
    l->n = n;
}

/* Blocks of @side's rows that meet any of the rows @mine, sorted. */
static colo_status_t visit_rows(colo_list_t *out, const colo_side_t *side, const colo_runs_t *mine)
{
    colo_block_t b;
    colo_block_clear(&b);
    if (side->full)
        return mine->rows > 0 ? colo_block_push(out, &b, mine->rows) : COLO_OK;
    const colo_posmap_t *map = side->map;
    for (int64_t i = 0; i < mine->n; i++) {
        int64_t r0 = mine->run[i].row, r1 = r0 + mine->run[i].count, a = 0, z = map->n;
        while (a < z) { /* first map run that ends past r0 */
            int64_t mid = a + (z - a) / 2;
            if (map->by_row[mid].row + map->by_row[mid].count <= r0)
                a = mid + 1;
            else
                z = mid;
        }
        for (; a < map->n && map->by_row[a].row < r1; a++) {
            const colo_map_run_t *m = &map->by_row[a];
            int64_t lo = m->row > r0 ? m->row : r0;
            int64_t hi = m->row + m->count < r1 ? m->row + m->count : r1;
            COLO_TRY(visit(out, side->layout, COLO_ROWS, 0, map->positions, m->pos + (lo - m->row),
                           m->pos + (hi - m->row), &b));
        }
    }
    unique_blocks(out);
    return COLO_OK;
}

/* Free dims counted up, first dim fastest. */
colo_status_t colo_block_ranks(colo_builder_t *w, colo_list_t *out, const colo_grid_t *g,
                               const colo_block_t *b)
{
    int64_t c[COLO_MAX_DIMS] = {0}, rank = g->offset;
    out->n = 0;
    for (int i = 0; i < g->ndims; i++)
        rank += b->coord[i] > 0 ? b->coord[i] * g->stride[i] : 0;
    for (;;) {
        int64_t *entry = colo_list_push(out, sizeof *entry);
        if (!entry)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld replicas of a block", (long long)out->n);
        *entry = rank;
        w->plan->work++;
        int i = 0;
        for (; i < g->ndims; i++) {
            if (b->coord[i] >= 0)
                continue;
            if (++c[i] < g->extent[i]) {
                rank += g->stride[i];
                break;
            }
            rank -= (g->extent[i] - 1) * g->stride[i];
            c[i] = 0;
        }
        if (i == g->ndims)
            return COLO_OK;
    }
}

void colo_block_of(const colo_side_t *side, const int64_t *coords, colo_block_t *b)
{
    const colo_layout_t *l = side->layout;
    colo_block_clear(b);
    for (int a = 0; a < 3; a++)
        for (int i = 0; (a != COLO_ROWS || !side->full) && i < l->nsplits[a]; i++)
            b->coord[l->split[a][i].dim] = coords[l->split[a][i].dim];
    if (l->stage_dim >= 0)
        b->coord[l->stage_dim] = l->stage;
    for (int i = 0; side->addend_fixed && i < COLO_MAX_DIMS; i++)
        if (side->fixed[i] >= 0)
            b->coord[i] = side->fixed[i];
}

static int by_row(const void *a, const void *b)
{
    int64_t x = ((const colo_run_t *)a)->row, y = ((const colo_run_t *)b)->row;
    return (x > y) - (x < y);
}

colo_status_t colo_block_rows(const colo_side_t *side, const int64_t *coords,
                              const colo_runs_t *within, colo_runs_t *runs)
{
    if (side->ragged)
        return colo_ragged_rows(side, coords, within, runs);
    COLO_TRY(colo_layout_runs(side->layout, side->map, coords, side->full, runs));
    if (runs->n > 1)
        qsort(runs->run, (size_t)runs->n, sizeof *runs->run, by_row);
    return COLO_OK;
}

colo_status_t colo_block_own_rows(colo_builder_t *w, const colo_side_t *side, const int64_t *coords,
                                  const colo_runs_t **runs)
{
    const int which = side->layout == &w->plan->src ? 0 : side->full ? 2 : 1;
    *runs = &w->own[which];
    if (w->has_own[which])
        return COLO_OK;
    w->has_own[which] = true;
    COLO_TRY(colo_block_rows(side, coords, NULL, &w->own[which]));
    w->plan->work += w->own[which].n;
    return COLO_OK;
}

bool colo_block_box(const colo_builder_t *w, const colo_side_t *side, const int64_t *coords,
                    colo_bounds_t *x)
{
    const colo_shape_t *shape = &w->cfg->shape;
    colo_span_t t[2 * COLO_MAX_SPANS] = {{0, 1}}; /* the rows of a ragged batch are one sample */
    if (!side->ragged && !colo_axis_spans(side->layout, COLO_SAMPLES, coords, shape->samples, t))
        return false;
    x->b = t[0];
    if (!colo_axis_spans(side->layout, COLO_FEATURES, coords, shape->features, t))
        return false;
    x->h = t[0];
    return true;
}

colo_status_t colo_blocks_intersect(colo_builder_t *w, const colo_side_t *side,
                                    const colo_bounds_t *x, colo_list_t out[3])
{
    const colo_shape_t *shape = &w->cfg->shape;
    colo_block_t clear;
    for (int a = 0; a < 3; a++)
        out[a].n = 0;
    colo_block_clear(&clear);
    COLO_TRY(side->ragged ? colo_block_push(&out[COLO_SAMPLES], &clear, 1)
                          : visit(&out[COLO_SAMPLES], side->layout, COLO_SAMPLES, 0, shape->samples,
                                  x->b.lo, x->b.hi, &clear));
    colo_block_clear(&clear);
    COLO_TRY(visit(&out[COLO_FEATURES], side->layout, COLO_FEATURES, 0, shape->features, x->h.lo,
                   x->h.hi, &clear));
    return side->ragged ? colo_ragged_visit(side, &x->runs, &out[COLO_ROWS])
                        : visit_rows(&out[COLO_ROWS], side, &x->runs);
}

/* The block and the extents of choice @i of what colo_blocks_intersect() found; row blocks are the
 * slowest. */
void colo_blocks_nth(const colo_list_t met[3], int64_t i, int64_t *coords, colo_extent_t *x)
{
    static const int order[3] = {COLO_FEATURES, COLO_ROWS, COLO_SAMPLES}; /* fastest first */
    memset(coords, 0, COLO_MAX_DIMS * sizeof *coords);
    for (int a = 0; a < 3; a++) {
        const colo_list_t *l = &met[order[a]];
        const colo_block_t *b = (const colo_block_t *)l->items + i % l->n;
        x->of[order[a]] = b->count;
        for (int d = 0; d < COLO_MAX_DIMS; d++)
            coords[d] = b->coord[d] > 0 ? b->coord[d] : coords[d];
        i /= l->n;
    }
}
