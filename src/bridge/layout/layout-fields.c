/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout-fields.c - is a layout one that the calls of layout.c could have made.
 *
 * A layout is a public value: a caller may forget to initialise it, or edit it. Every field that
 * bounds or indexes something is checked here before it is used. Whether the layout fits a tensor
 * is colo_layout_check()'s question.
 */
#include "bridge/layout/layout.h"

#include "core/error.h"
#include "core/sized.h"
#include "grid/dims.h"

const char *const colo_axis_names[] = {"samples", "rows", "features"};

static colo_status_t check_splits(const colo_layout_t *layout, int axis, bool *used)
{
    int32_t n = layout->nsplits[axis];
    COLO_FAIL_IF(n < 0 || n > COLO_SPLITS_MAX, COLO_ERR_ARG,
                 "layout: %s have %d splits, expected 0..%d", colo_axis_names[axis], (int)n,
                 COLO_SPLITS_MAX);
    for (int32_t i = 0; i < n; i++) {
        const colo_split_t *split = &layout->split[axis][i];
        COLO_FAIL_IF(split->dim < 0 || split->dim >= layout->grid.ndims, COLO_ERR_ARG,
                     "layout: split %d of %s is over dim %d, expected 0..%d", (int)i,
                     colo_axis_names[axis], (int)split->dim, (int)layout->grid.ndims - 1);
        /* REPLICATE is never listed */
        COLO_FAIL_IF(split->kind != COLO_SPLIT_BLOCK && split->kind != COLO_SPLIT_CEIL &&
                         (split->kind != COLO_SPLIT_ZIGZAG || axis != COLO_AXIS_ROWS),
                     COLO_ERR_ARG, "layout: split %d of %s has kind %d, expected %s", (int)i,
                     colo_axis_names[axis], (int)split->kind,
                     axis == COLO_AXIS_ROWS ? "BLOCK, ZIGZAG or CEIL" : "BLOCK or CEIL");
        COLO_FAIL_IF(used[split->dim], COLO_ERR_ARG, "layout: dim '%s' is split over twice",
                     layout->grid.name[split->dim]);
        used[split->dim] = true;
    }
    return COLO_OK;
}

static colo_status_t check_map(const colo_layout_t *layout)
{
    bool offset = layout->map == COLO_MAP_OFFSET, table = layout->map == COLO_MAP_TABLE;
    COLO_FAIL_IF((unsigned)layout->map > COLO_MAP_TABLE, COLO_ERR_ARG,
                 "layout: map %d, expected 0..2", (int)layout->map);
    COLO_FAIL_IF(layout->positions < (offset || table), COLO_ERR_ARG,
                 "layout: %lld positions, expected at least %d", (long long)layout->positions,
                 offset || table);
    COLO_FAIL_IF(layout->offset < 0 || layout->offset > (offset ? layout->positions - 1 : 0),
                 COLO_ERR_ARG, "layout: offset %lld, expected 0..%lld", (long long)layout->offset,
                 (long long)(offset ? layout->positions - 1 : 0));
    COLO_FAIL_IF(layout->table_rows < 0 || layout->table_rows > (table ? layout->positions : 0) ||
                     (table && !layout->table),
                 COLO_ERR_ARG, "layout: %s position table of %lld rows, expected 0..%lld",
                 layout->table ? "a" : "no", (long long)layout->table_rows,
                 (long long)(table ? layout->positions : 0));
    return COLO_OK;
}

colo_status_t colo_layout_check_fields(const colo_layout_t *layout)
{
    bool used[COLO_DIMS_MAX] = {false};
    COLO_FAIL_IF(!layout, COLO_ERR_ARG, "layout: layout is NULL");
    COLO_FAIL_IF(layout->grid.ndims == 0, COLO_ERR_ARG,
                 "layout: not initialised: found a grid of 0 dims; start from "
                 "colo_layout_init_src(), colo_layout_init_dst() or colo_layout_init()");
    colo_status_t st = colo_grid_check(&layout->grid);
    if (st < 0)
        return colo_fail_prefix(st, "layout");
    for (int axis = 0; axis < 3; axis++)
        COLO_TRY(check_splits(layout, axis, used));
    COLO_FAIL_IF(layout->stage_dim < -1 || layout->stage_dim >= layout->grid.ndims, COLO_ERR_ARG,
                 "layout: stage_dim %d, expected -1..%d", (int)layout->stage_dim,
                 (int)layout->grid.ndims - 1);
    COLO_FAIL_IF(layout->stage_dim >= 0 && used[layout->stage_dim], COLO_ERR_ARG,
                 "layout: dim '%s' is the stage and splits an axis, too",
                 layout->grid.name[layout->stage_dim]);
    int64_t stages = layout->stage_dim < 0 ? 1 : layout->grid.extent[layout->stage_dim];
    COLO_FAIL_IF(layout->stage < 0 || layout->stage >= stages, COLO_ERR_ARG,
                 "layout: stage %lld, expected 0..%lld", (long long)layout->stage,
                 (long long)(stages - 1));
    COLO_TRY(COLO_SIZED_CHECK_ROOM(layout, "layout: layout", "colo_layout_init()"));
    return check_map(layout);
}
