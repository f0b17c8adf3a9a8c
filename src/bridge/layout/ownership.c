/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownership.c - blocks along one axis, found by division, so that the cost is what meets and not
 * how large the world is.
 */
#include "bridge/layout/ownership.h"

#include "core/error.h"

void colo_block_clear(colo_block_t *block)
{
    for (int i = 0; i < COLO_DIMS_MAX; i++)
        block->coord[i] = -1;
    block->count = 0;
}

int colo_block_cmp(const void *first, const void *second)
{
    _Static_assert(offsetof(colo_block_t, coord) == 0, "blocks are sorted by their coordinates");
    return colo_compare(first, second, COLO_DIMS_MAX);
}

colo_status_t colo_block_push(colo_list_t *out, const colo_block_t *block, int64_t count)
{
    colo_block_t entry = *block;
    entry.count = count;
    COLO_PUSH(out, "plan: list of %lld blocks", entry);
    return COLO_OK;
}

/* Appends every block coordinate choice of @axis that meets local indices [lo, hi) of the whole
 * axis, from split @i on. @block is a workspace of the choices made so far. */
static colo_status_t visit(colo_list_t *out, const colo_layout_t *layout, colo_axis_t axis, int i,
                           int64_t length, int64_t lo, int64_t hi, colo_block_t *block)
{
    if (lo >= hi)
        return COLO_OK;
    if (i == layout->nsplits[axis])
        return colo_block_push(out, block, hi - lo);
    const colo_split_t *split = &layout->split[axis][i];
    int64_t parts = layout->grid.extent[split->dim];
    if (parts == 1) {
        block->coord[split->dim] = 0;
        return visit(out, layout, axis, i + 1, length, lo, hi, block);
    }
    if (split->kind != COLO_SPLIT_ZIGZAG) {
        for (int64_t end; lo < hi; lo = end) { /* parts in between may be empty */
            const int64_t part = colo_split_part(split->kind, length, parts, lo);
            const int64_t first = colo_split_lo(split->kind, length, parts, part),
                          last = colo_split_lo(split->kind, length, parts, part + 1);
            end = hi < last ? hi : last;
            block->coord[split->dim] = part;
            COLO_TRY(visit(out, layout, axis, i + 1, last - first, lo - first, end - first, block));
        }
        return COLO_OK;
    }
    int64_t chunk = length / (2 * parts);
    while (lo < hi) {
        int64_t end = (lo / chunk + 1) * chunk < hi ? (lo / chunk + 1) * chunk : hi, local;
        block->coord[split->dim] = colo_zigzag_part(chunk, parts, lo, &local);
        COLO_TRY(visit(out, layout, axis, i + 1, 2 * chunk, local, local + (end - lo), block));
        lo = end;
    }
    return COLO_OK;
}

colo_status_t colo_blocks_along(colo_list_t *out, const colo_layout_t *layout, colo_axis_t axis,
                                int64_t length, int64_t lo, int64_t hi)
{
    colo_block_t block;
    colo_block_clear(&block);
    return visit(out, layout, axis, 0, length, lo, hi, &block);
}
