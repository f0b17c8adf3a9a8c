/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uniform.c - ownership by layouts: rows are split over dims of a grid by their positions.
 */
#include "bridge/layout/ownership.h"

#include "core/error.h"

#include <stdlib.h>

static colo_status_t rows(const colo_side_t *side, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs)
{
    (void)within; /* all of them cost no more */
    COLO_TRY(colo_layout_runs(side->layout, side->table, coords, side->full, runs));
    if (runs->n > 1)
        COLO_SORT(runs->run, runs->n, row);
    for (int64_t i = 0; side->has_all_rows && i < runs->n; i++)
        runs->run[i].local = runs->run[i].row;
    return COLO_OK;
}

static void unique(colo_list_t *list)
{
    colo_block_t *block = list->items;
    int64_t n = 0;
    if (list->n > 1)
        qsort(block, (size_t)list->n, sizeof *block, colo_block_cmp);
    for (int64_t i = 0; i < list->n; i++)
        if (n == 0 || colo_block_cmp(&block[n - 1], &block[i]) != 0)
            block[n++] = block[i];
        else
            block[n - 1].count += block[i].count;
    list->n = n;
}

static colo_status_t visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met)
{
    const colo_posmap_t *map = side->table;
    if (side->full) {
        colo_block_t all;
        colo_block_clear(&all);
        return mine->rows > 0 ? colo_block_push(met, &all, mine->rows) : COLO_OK;
    }
    for (int64_t i = 0; map->n > 0 && i < mine->n; i++) {
        const int64_t begin = mine->run[i].row, end = begin + mine->run[i].count;
        int64_t k = colo_first_behind(COLO_RANGES(map->by_row, row, count), 0, map->n, begin);
        for (; k < map->n && map->by_row[k].row < end; k++) {
            const colo_map_run_t *run = &map->by_row[k];
            const int64_t last = run->row + run->count;
            const int64_t lo = run->row > begin ? run->row : begin, hi = last < end ? last : end;
            COLO_TRY(colo_blocks_along(met, side->layout, COLO_AXIS_ROWS, map->positions,
                                       run->pos + (lo - run->row), run->pos + (hi - run->row)));
        }
    }
    unique(met);
    return COLO_OK;
}

const colo_ownership_t colo_owns_uniform = {.rows = rows, .visit = visit};
