/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - the blocks of a side (layout/ownership.h): their coordinates, replicas and rows, and
 * the choices among those that meet a block of the other side.
 */
#include "bridge/plan/routing.h"

#include "core/error.h"

#include <string.h>

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
        for (int i = 0; i < l->nsplits[a]; i++)
            if (a != COLO_ROWS || !side->full ||
                (side->owns->full_has_parts && !l->split[a][i].context))
                b->coord[l->split[a][i].dim] = coords[l->split[a][i].dim];
    if (l->stage_dim >= 0)
        b->coord[l->stage_dim] = l->stage;
    for (int i = 0; side->addend_fixed && i < COLO_MAX_DIMS; i++)
        if (side->fixed[i] >= 0)
            b->coord[i] = side->fixed[i];
}

colo_status_t colo_block_own_rows(colo_builder_t *w, const colo_side_t *side, const int64_t *coords,
                                  const colo_runs_t **runs)
{
    const int which = side->layout == &w->plan->src ? 0 : side->full ? 2 : 1;
    *runs = &w->own.runs[which];
    if (w->own.known[which])
        return COLO_OK;
    w->own.known[which] = true;
    COLO_TRY(side->owns->rows(side, coords, NULL, &w->own.runs[which]));
    w->plan->work += w->own.runs[which].n;
    return COLO_OK;
}

colo_status_t colo_blocks_meet(const colo_side_t *side, const colo_bounds_t *bounds,
                               colo_list_t met[3])
{
    for (int axis = 0; axis < 3; axis++)
        met[axis].n = 0;
    return side->owns->visit(side, bounds, met);
}

/* The block and the extents of choice @i of what colo_blocks_meet() found; row blocks are the
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
