/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - the blocks of a side (layout/ownership.h): their coordinates, replicas and bounds, and
 * the choices among those that meet a block of the other side.
 */
#include "bridge/plan/builder.h"

#include "core/error.h"

#include <string.h>

/* Free dims counted up, first dim fastest. */
colo_status_t colo_block_ranks(colo_builder_t *builder, colo_list_t *out, const colo_grid_t *grid,
                               const colo_block_t *block)
{
    int64_t coords[COLO_DIMS_MAX] = {0}, rank = grid->offset;
    out->n = 0;
    for (int i = 0; i < grid->ndims; i++)
        rank += block->coord[i] > 0 ? block->coord[i] * grid->stride[i] : 0;
    for (;;) {
        COLO_PUSH(out, "plan: %lld replicas of a block", rank);
        builder->plan->work++;
        int i = 0;
        for (; i < grid->ndims; i++) {
            if (block->coord[i] >= 0)
                continue;
            if (++coords[i] < grid->extent[i]) {
                rank += grid->stride[i];
                break;
            }
            rank -= (grid->extent[i] - 1) * grid->stride[i];
            coords[i] = 0;
        }
        if (i == grid->ndims)
            return COLO_OK;
    }
}

int colo_source_cmp(const void *first, const void *second)
{
    _Static_assert(sizeof(colo_source_t) == 2 * sizeof(int64_t), "a key and a rank");
    return colo_compare(first, second, 2);
}

int64_t colo_source_find(colo_builder_t *builder, const colo_source_t *source, int64_t n,
                         int64_t key, int64_t rank)
{
    const colo_source_t wanted = {.key = key, .rank = rank};
    int64_t low = 0, work = 0;
    COLO_SEARCH(low, n, i, (work++, colo_source_cmp(&source[i], &wanted) < 0))
    builder->plan->work += work;
    return low;
}

void colo_block_of(const colo_side_t *side, const int64_t *coords, colo_block_t *block)
{
    const colo_layout_t *layout = side->layout;
    const colo_place_t *place = colo_side_place(side);
    colo_block_clear(block);
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++)
            if (axis != COLO_AXIS_ROWS || !side->full ||
                (side->owns->full_has_parts && !layout->split[axis][i].context))
                block->coord[layout->split[axis][i].dim] = coords[layout->split[axis][i].dim];
    if (layout->stage_dim >= 0)
        block->coord[layout->stage_dim] = layout->stage;
    for (int i = 0; place && i < layout->grid.ndims; i++)
        if (place->coord[i] >= 0)
            block->coord[i] = place->coord[i];
}

colo_status_t colo_block_own_rows(colo_builder_t *builder, const colo_side_t *side,
                                  const int64_t *coords, const colo_runs_t **runs)
{
    const bool named = colo_partial_names_rows(colo_side_partial(side));
    const int which = side->layout == &builder->plan->src ? 0 : named ? 3 : side->full ? 2 : 1;
    *runs = &builder->own.runs[which];
    if (builder->own.known[which])
        return COLO_OK;
    builder->own.known[which] = !named;
    COLO_TRY(colo_side_rows(side, coords, NULL, &builder->own.runs[which]));
    builder->plan->work += builder->own.runs[which].n;
    return COLO_OK;
}

bool colo_block_bounds(const colo_side_t *side, const int64_t *coords, colo_bounds_t *bounds)
{
    colo_span_t samples[2 * COLO_MAX_SPANS], features[2 * COLO_MAX_SPANS];
    const colo_layout_t *layout = side->layout;
    samples[0] = (colo_span_t){0, 1}; /* of tables */
    if ((!side->owns->tables &&
         !colo_axis_spans(layout, COLO_AXIS_SAMPLES, coords, side->shape->samples, samples)) ||
        !colo_axis_spans(layout, COLO_AXIS_FEATURES, coords, side->shape->features, features))
        return false;
    bounds->b = samples[0];
    bounds->h = features[0];
    return true;
}

/* The blocks of @side that share samples with @b. */
static colo_status_t meet_samples(const colo_side_t *side, const colo_span_t *b, colo_list_t *met)
{
    colo_block_t all;
    if (!side->owns->tables)
        return colo_blocks_along(met, side->layout, COLO_AXIS_SAMPLES, side->shape->samples, b->lo,
                                 b->hi);
    colo_block_clear(&all);
    return colo_block_push(met, &all, 1);
}

colo_status_t colo_blocks_meet(const colo_side_t *side, const colo_bounds_t *bounds,
                               colo_list_t met[3])
{
    for (int axis = 0; axis < 3; axis++)
        met[axis].n = 0;
    COLO_TRY(meet_samples(side, &bounds->b, &met[COLO_AXIS_SAMPLES]));
    COLO_TRY(colo_blocks_along(&met[COLO_AXIS_FEATURES], side->layout, COLO_AXIS_FEATURES,
                               side->shape->features, bounds->h.lo, bounds->h.hi));
    return colo_side_visit(side, bounds->runs, &met[COLO_AXIS_ROWS]);
}

/* The block and the extents of choice @i of what colo_blocks_meet() found; row blocks are the
 * slowest. */
void colo_blocks_nth(const colo_list_t met[3], int64_t i, int64_t *coords, colo_extent_t *extent)
{
    static const int order[3] = {COLO_AXIS_FEATURES, COLO_AXIS_ROWS,
                                 COLO_AXIS_SAMPLES}; /* fastest first */
    memset(coords, 0, COLO_DIMS_MAX * sizeof *coords);
    for (int digit = 0; digit < 3; digit++) {
        const colo_list_t *list = &met[order[digit]];
        const colo_block_t *block = (const colo_block_t *)list->items + i % list->n;
        extent->of[order[digit]] = block->count;
        for (int dim = 0; dim < COLO_DIMS_MAX; dim++)
            coords[dim] = block->coord[dim] > 0 ? block->coord[dim] : coords[dim];
        i /= list->n;
    }
}
