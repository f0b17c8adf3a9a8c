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
#include "grid/dims.h"

const char *const colo_axis_names[] = {"samples", "rows", "features"};

static colo_status_t check_splits(const colo_layout_t *l, int axis, bool *used)
{
    int32_t n = l->nsplits[axis];
    if (n < 0 || n > COLO_MAX_SPLITS)
        return colo_fail(COLO_ERR_ARG, "layout: %s have %d splits, expected 0..%d",
                         colo_axis_names[axis], (int)n, COLO_MAX_SPLITS);
    for (int32_t i = 0; i < n; i++) {
        const colo_split_t *s = &l->split[axis][i];
        if (s->dim < 0 || s->dim >= l->grid.ndims)
            return colo_fail(COLO_ERR_ARG, "layout: split %d of %s is over dim %d, expected 0..%d",
                             (int)i, colo_axis_names[axis], (int)s->dim, (int)l->grid.ndims - 1);
        if (s->kind != COLO_BLOCK && s->kind != COLO_CEIL &&
            (s->kind != COLO_ZIGZAG || axis != COLO_ROWS)) /* REPLICATE is never listed */
            return colo_fail(COLO_ERR_ARG, "layout: split %d of %s has kind %d, expected %s",
                             (int)i, colo_axis_names[axis], (int)s->kind,
                             axis == COLO_ROWS ? "BLOCK, ZIGZAG or CEIL" : "BLOCK or CEIL");
        if (used[s->dim])
            return colo_fail(COLO_ERR_ARG, "layout: dim '%s' is split over twice",
                             l->grid.name[s->dim]);
        used[s->dim] = true;
    }
    return COLO_OK;
}

static colo_status_t check_map(const colo_layout_t *l)
{
    bool offset = l->map == COLO_MAP_OFFSET, table = l->map == COLO_MAP_TABLE;
    if ((unsigned)l->map > COLO_MAP_TABLE)
        return colo_fail(COLO_ERR_ARG, "layout: map %d, expected 0..2", (int)l->map);
    if (l->positions < (offset || table))
        return colo_fail(COLO_ERR_ARG, "layout: %lld positions, expected at least %d",
                         (long long)l->positions, offset || table);
    if (l->offset < 0 || l->offset > (offset ? l->positions - 1 : 0))
        return colo_fail(COLO_ERR_ARG, "layout: offset %lld, expected 0..%lld",
                         (long long)l->offset, (long long)(offset ? l->positions - 1 : 0));
    if (l->table_rows < 0 || l->table_rows > (table ? l->positions : 0) || (table && !l->table))
        return colo_fail(COLO_ERR_ARG, "layout: %s position table of %lld rows, expected 0..%lld",
                         l->table ? "a" : "no", (long long)l->table_rows,
                         (long long)(table ? l->positions : 0));
    return COLO_OK;
}

colo_status_t colo_layout_check_fields(const colo_layout_t *l)
{
    bool used[COLO_MAX_DIMS] = {false};
    if (!l)
        return colo_fail(COLO_ERR_ARG, "layout: layout is NULL");
    if (l->grid.ndims == 0)
        return colo_fail(COLO_ERR_ARG,
                         "layout: not initialised: found a grid of 0 dims; start from "
                         "colo_layout_init_src(), colo_layout_init_dst() or colo_layout_init()");
    colo_status_t st = colo_grid_i_check(&l->grid);
    if (st < 0)
        return colo_fail_prefix(st, "layout");
    for (int a = 0; a < 3; a++)
        COLO_TRY(check_splits(l, a, used));
    if (l->stage_dim < -1 || l->stage_dim >= l->grid.ndims)
        return colo_fail(COLO_ERR_ARG, "layout: stage_dim %d, expected -1..%d", (int)l->stage_dim,
                         (int)l->grid.ndims - 1);
    if (l->stage_dim >= 0 && used[l->stage_dim])
        return colo_fail(COLO_ERR_ARG, "layout: dim '%s' is the stage and splits an axis, too",
                         l->grid.name[l->stage_dim]);
    int64_t stages = l->stage_dim < 0 ? 1 : l->grid.extent[l->stage_dim];
    if (l->stage < 0 || l->stage >= stages)
        return colo_fail(COLO_ERR_ARG, "layout: stage %lld, expected 0..%lld", (long long)l->stage,
                         (long long)(stages - 1));
    return check_map(l);
}
