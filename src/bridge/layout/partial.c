/* SPDX-License-Identifier: Apache-2.0 */
/*
 * partial.c - rows whose values are addends: which places have one, and what a side owns while it
 * shows one of them.
 */
#include "bridge/layout/ownership.h"

#include "core/error.h"

#include <string.h>

bool colo_place_has(const colo_place_t *place, const int64_t *coords)
{
    for (int i = 0; i < COLO_DIMS_MAX; i++)
        if (place->coord[i] >= 0 && place->coord[i] != coords[i])
            return false;
    return true;
}

int64_t colo_partial_find(const colo_partial_t *partial, const int64_t *coords)
{
    for (int64_t addend = 0; addend < partial->n; addend++)
        if (colo_place_has(&partial->place[addend], coords))
            return addend;
    return -1;
}

colo_status_t colo_side_rows(const colo_side_t *side, const int64_t *coords,
                             const colo_runs_t *within, colo_runs_t *runs)
{
    const colo_partial_t *partial = colo_side_partial(side);
    if (!colo_partial_names_rows(partial))
        return side->owns->rows(side, coords, within, runs);
    runs->n = runs->rows = 0;
    return colo_runs_push(runs, partial->row, partial->count, colo_side_place(side)->local);
}

colo_status_t colo_side_visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met)
{
    const colo_partial_t *partial = colo_side_partial(side);
    colo_block_t block;
    int64_t count = 0;
    if (!colo_partial_names_rows(partial))
        return side->owns->visit(side, mine, met);
    const int64_t end = partial->row + partial->count;
    int64_t i = mine->n == 0 ? 0
                             : colo_first_behind(COLO_RANGES(mine->run, row, count), 0, mine->n,
                                                 partial->row);
    for (; i < mine->n && mine->run[i].row < end; i++) {
        const int64_t behind = mine->run[i].row + mine->run[i].count;
        const int64_t lo = mine->run[i].row > partial->row ? mine->run[i].row : partial->row;
        count += (behind < end ? behind : end) - lo;
    }
    if (count == 0)
        return COLO_OK;
    memcpy(block.coord, colo_side_place(side)->coord, sizeof block.coord);
    return colo_block_push(met, &block, count);
}

colo_status_t colo_partial_over_context(const colo_layout_t *layout, colo_list_t *places,
                                        colo_partial_t *partial)
{
    int32_t dims[COLO_SPLITS_MAX];
    const int ndims = colo_layout_context_dims(layout, dims);
    *partial = (colo_partial_t){.n = 1};
    for (int i = 0; i < ndims; i++)
        partial->n *= layout->grid.extent[dims[i]]; /* <= grid size */
    colo_place_t *place = colo_list_zeroed(places, partial->n, sizeof *place);
    COLO_FAIL_IF(!place, COLO_ERR_NOMEM, "plan: %lld addends", (long long)partial->n);
    for (int64_t addend = 0; addend < partial->n; addend++) {
        int64_t left = addend;
        for (int i = 0; i < COLO_DIMS_MAX; i++)
            place[addend].coord[i] = -1;
        for (int i = 0; i < ndims; i++) {
            place[addend].coord[dims[i]] = left % layout->grid.extent[dims[i]];
            left /= layout->grid.extent[dims[i]];
        }
    }
    partial->place = place;
    return COLO_OK;
}
