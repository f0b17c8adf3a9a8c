/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.c - which elements of a [samples, rows, features] tensor a rank owns.
 *
 * Decides ownership from coordinates, by two index sets: spans (positions, samples or features in
 * local order, after every split took its part) and runs (the rows that sit at those positions).
 * The plan decides which rank sends what; strides hold the memory order, which this file never
 * reads.
 */
#include "bridge/layout/layout.h"

#include "core/hash.h"
#include "core/error.h"
#include "core/list.h"
#include "grid/dims.h"

#include <stdlib.h>
#include <string.h>

colo_status_t colo_layout_init(colo_layout_t *layout, const colo_grid_t *grid)
{
    COLO_FAIL_IF(!layout || !grid, COLO_ERR_ARG, "layout: %s is NULL", layout ? "grid" : "layout");
    colo_status_t st = colo_grid_check(grid);
    if (st < 0)
        return colo_fail_prefix(st, "layout");
    memset(layout, 0, sizeof *layout);
    layout->grid = *grid;
    layout->stage_dim = -1;
    return COLO_OK;
}

static bool one_of(const char *const *names, const char *name)
{
    for (; *names; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

/* Is @name in @list, names joined by "-"? */
static bool listed(const char *list, const char *name)
{
    for (size_t len = 0; list; list = list[len] ? list + len + 1 : NULL) {
        len = strcspn(list, "-");
        if (len == strlen(name) && memcmp(list, name, len) == 0)
            return true;
    }
    return false;
}

/* A dim that nothing here knows may be a typing error ("tp1_dp"), or its ranks may hold different
 * data: only the caller can say that they are copies. */
static colo_status_t check_roles(const colo_grid_t *grid, const char *extra)
{
    static const char *const cut[] = {"cp", "pp", "dp", NULL}, *const copies[] = {"tp", "ep", NULL};
    for (int32_t i = 0; i < grid->ndims; i++) {
        const char *name = grid->name[i];
        COLO_FAIL_IF(one_of(cut, name) && listed(extra, name), COLO_ERR_ARG,
                     "layout: extra dim '%s': its ranks hold different data, not copies; "
                     "leave it out, or start from colo_layout_init()",
                     name);
        COLO_FAIL_IF(grid->extent[i] > 1 && !one_of(cut, name) && !one_of(copies, name) &&
                         !listed(extra, name),
                     COLO_ERR_ARG,
                     "layout: dim '%s' of extent %lld has no role: expected tp, cp, pp, dp "
                     "or ep; declare it as extra if its ranks hold copies, else split an "
                     "axis over it",
                     name, (long long)grid->extent[i]);
    }
    return COLO_OK;
}

static colo_status_t init_usual(colo_layout_t *layout, const colo_grid_t *grid, const char *extra,
                                int64_t stage)
{
    colo_layout_t usual;
    COLO_FAIL_IF(!layout, COLO_ERR_ARG, "layout: layout is NULL");
    COLO_TRY(colo_layout_init(&usual, grid));
    COLO_TRY(check_roles(grid, extra));
    if (colo_grid_dim(grid, "dp") >= 0)
        COLO_TRY(colo_layout_split(&usual, COLO_AXIS_SAMPLES, "dp", COLO_SPLIT_BLOCK));
    if (colo_grid_dim(grid, "cp") >= 0)
        COLO_TRY(colo_layout_split(&usual, COLO_AXIS_ROWS, "cp", COLO_SPLIT_ZIGZAG));
    if (colo_grid_dim(grid, "pp") >= 0)
        COLO_TRY(colo_layout_stage(&usual, "pp", stage));
    *layout = usual;
    return COLO_OK;
}

colo_status_t colo_layout_init_src(colo_layout_t *layout, const colo_grid_t *grid)
{
    return init_usual(layout, grid, NULL, COLO_STAGE_LAST);
}

colo_status_t colo_layout_init_dst(colo_layout_t *layout, const colo_grid_t *grid)
{
    return init_usual(layout, grid, NULL, 0);
}

colo_status_t colo_layout_init_src_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                         const char *extra)
{
    return init_usual(layout, grid, extra, COLO_STAGE_LAST);
}

colo_status_t colo_layout_init_dst_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                         const char *extra)
{
    return init_usual(layout, grid, extra, 0);
}

static colo_status_t find_dim(const colo_layout_t *layout, const char *dim, int32_t *index)
{
    char text[COLO_KEY_MAX + 1];
    COLO_FAIL_IF(!dim, COLO_ERR_ARG, "layout: dim is NULL");
    *index = colo_grid_dim(&layout->grid, dim);
    if (*index >= 0)
        return COLO_OK;
    colo_grid_print(&layout->grid, text, sizeof text);
    return colo_fail(COLO_ERR_ARG, "layout: the grid %s has no dim '%.40s'", text, dim);
}

static bool dim_used(const colo_layout_t *layout, int32_t dim)
{
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++)
            if (layout->split[axis][i].dim == dim)
                return true;
    return false;
}

static colo_status_t add_split(colo_layout_t *layout, colo_axis_t axis, const char *dim,
                               colo_split_kind_t kind, bool context)
{
    int32_t found;
    COLO_TRY(colo_layout_check_fields(layout));
    COLO_FAIL_IF((unsigned)axis > COLO_AXIS_FEATURES, COLO_ERR_ARG,
                 "layout: axis %d, expected 0..2", (int)axis);
    COLO_FAIL_IF((unsigned)kind > COLO_SPLIT_CEIL, COLO_ERR_ARG,
                 "layout: split kind %d, expected 0..3", (int)kind);
    COLO_TRY(find_dim(layout, dim, &found));
    COLO_FAIL_IF(kind == COLO_SPLIT_ZIGZAG && axis != COLO_AXIS_ROWS, COLO_ERR_ARG,
                 "layout: ZIGZAG splits rows only, not %s", colo_axis_names[axis]);
    if (kind == COLO_SPLIT_REPLICATE)
        return COLO_OK;
    COLO_FAIL_IF(dim_used(layout, found) || found == layout->stage_dim, COLO_ERR_ARG,
                 "layout: dim '%s' already has a role (a split or the stage)",
                 layout->grid.name[found]);
    COLO_FAIL_IF(layout->nsplits[axis] == COLO_SPLITS_MAX, COLO_ERR_ARG,
                 "layout: %s are split %d times already, the most there is", colo_axis_names[axis],
                 COLO_SPLITS_MAX);
    layout->split[axis][layout->nsplits[axis]++] =
        (colo_split_t){.dim = found, .kind = kind, .context = context};
    return COLO_OK;
}

colo_status_t colo_layout_split(colo_layout_t *layout, colo_axis_t axis, const char *dim,
                                colo_split_kind_t kind)
{
    return add_split(layout, axis, dim, kind, kind == COLO_SPLIT_ZIGZAG);
}

colo_status_t colo_layout_split_context(colo_layout_t *layout, const char *dim,
                                        colo_split_kind_t kind)
{
    return add_split(layout, COLO_AXIS_ROWS, dim, kind, true);
}

void colo_layout_clear(colo_layout_t *layout, colo_axis_t axis)
{
    if (layout && (unsigned)axis <= COLO_AXIS_FEATURES) {
        layout->nsplits[axis] = 0;
        memset(layout->split[axis], 0,
               sizeof layout->split[axis]); /* the hash reads no stale split */
    }
}

colo_status_t colo_layout_map_offset(colo_layout_t *layout, int64_t offset, int64_t positions)
{
    COLO_TRY(colo_layout_check_fields(layout));
    COLO_FAIL_IF(offset < 0 || positions < 1 || offset >= positions, COLO_ERR_ARG,
                 "layout: offset %lld of %lld positions, expected 0 <= offset < positions",
                 (long long)offset, (long long)positions);
    layout->map = COLO_MAP_OFFSET;
    layout->offset = offset;
    layout->positions = positions;
    layout->table = NULL;
    layout->table_rows = 0;
    return COLO_OK;
}

colo_status_t colo_layout_map_table(colo_layout_t *layout, const int64_t *table, int64_t rows,
                                    int64_t positions)
{
    COLO_TRY(colo_layout_check_fields(layout));
    COLO_FAIL_IF(!table, COLO_ERR_ARG, "layout: table is NULL");
    COLO_FAIL_IF(rows < 0 || positions < rows || positions < 1, COLO_ERR_ARG,
                 "layout: a table of %lld rows for %lld positions, expected 0 <= rows <= "
                 "positions and positions >= 1",
                 (long long)rows, (long long)positions);
    layout->map = COLO_MAP_TABLE;
    layout->offset = 0;
    layout->positions = positions;
    layout->table = table;
    layout->table_rows = rows;
    return COLO_OK;
}

colo_status_t colo_layout_stage(colo_layout_t *layout, const char *dim, int64_t stage)
{
    int32_t found;
    COLO_TRY(colo_layout_check_fields(layout));
    if (stage == COLO_STAGE_ANY) {
        layout->stage_dim = -1;
        layout->stage = 0;
        return COLO_OK;
    }
    COLO_TRY(find_dim(layout, dim, &found));
    int64_t n = layout->grid.extent[found];
    if (stage == COLO_STAGE_LAST)
        stage = n - 1;
    COLO_FAIL_IF(stage < 0 || stage >= n, COLO_ERR_ARG,
                 "layout: stage %lld of dim '%s', expected 0..%lld", (long long)stage,
                 layout->grid.name[found], (long long)(n - 1));
    COLO_FAIL_IF(dim_used(layout, found), COLO_ERR_ARG, "layout: dim '%s' already splits an axis",
                 layout->grid.name[found]);
    layout->stage_dim = found;
    layout->stage = stage;
    return COLO_OK;
}

int64_t colo_layout_parts(const colo_layout_t *layout, colo_axis_t axis)
{
    int64_t n = 1;
    for (int i = 0; i < layout->nsplits[axis]; i++)
        n *= layout->grid.extent[layout->split[axis][i].dim]; /* <= grid size */
    return n;
}

/* ---- position maps ---- */

static int64_t positions_of(const colo_layout_t *layout, int64_t rows)
{
    return layout->positions ? layout->positions : rows;
}

colo_status_t colo_posmap_init(colo_posmap_t *map, const colo_layout_t *layout, int64_t rows,
                               colo_pool_t *pool)
{
    int64_t positions = positions_of(layout, rows);
    memset(map, 0, sizeof *map);
    map->rows = rows;
    map->positions = positions;
    if (layout->map != COLO_MAP_TABLE) {
        int64_t end;
        COLO_FAIL_IF(!colo_add_ok(layout->offset, rows, &end) || end > positions, COLO_ERR_LAYOUT,
                     "rows 0..%lld at offset %lld reach past the LLM's %lld positions",
                     (long long)(rows - 1), (long long)layout->offset, (long long)positions);
        map->one = (colo_map_run_t){.row = 0, .count = rows, .pos = layout->offset};
        map->by_pos = map->by_row = &map->one;
        map->n = rows > 0;
        return COLO_OK;
    }
    COLO_FAIL_IF(layout->table_rows != rows, COLO_ERR_LAYOUT,
                 "the position table has %lld rows, the tensor has %lld",
                 (long long)layout->table_rows, (long long)rows);
    int64_t n = 0;
    for (int64_t i = 0; i < rows; i++) {
        COLO_FAIL_IF(layout->table[i] < 0 || layout->table[i] >= positions, COLO_ERR_LAYOUT,
                     "row %lld sits at position %lld, expected 0..%lld", (long long)i,
                     (long long)layout->table[i], (long long)(positions - 1));
        n += i == 0 || layout->table[i] != layout->table[i - 1] + 1;
    }
    if (n == 0)
        return COLO_OK;
    map->by_row = colo_pool_take(pool, (size_t)n * sizeof *map->by_row);
    map->by_pos = colo_pool_take(pool, (size_t)n * sizeof *map->by_pos);
    COLO_FAIL_IF(!map->by_row || !map->by_pos, COLO_ERR_NOMEM, "position map: %lld runs",
                 (long long)n);
    for (int64_t i = 0; i < rows; i++) {
        if (i == 0 || layout->table[i] != layout->table[i - 1] + 1)
            map->by_row[map->n++] = (colo_map_run_t){.row = i, .count = 0, .pos = layout->table[i]};
        map->by_row[map->n - 1].count++;
    }
    memcpy(map->by_pos, map->by_row, (size_t)n * sizeof *map->by_pos);
    COLO_SORT(map->by_pos, n, pos);
    for (int64_t i = 1; i < n; i++) {
        const colo_map_run_t *run = &map->by_pos[i - 1], *next = &map->by_pos[i];
        const int64_t other = run->row + (next->pos - run->pos), row = next->row;
        COLO_FAIL_IF(run->pos + run->count > next->pos, COLO_ERR_LAYOUT,
                     "rows %lld and %lld both sit at position %lld",
                     (long long)(other < row ? other : row), (long long)(other < row ? row : other),
                     (long long)next->pos);
    }
    return COLO_OK;
}

/* ---- index sets ---- */

/* Appends the part [lo, hi) of a list's local indices to @out. */
static int slice(const colo_span_t *in, int n, int64_t lo, int64_t hi, colo_span_t *out, int nout)
{
    int64_t begin = 0;
    for (int i = 0; i < n; i++) {
        int64_t len = in[i].hi - in[i].lo;
        int64_t first = lo > begin ? lo - begin : 0, last = hi - begin < len ? hi - begin : len;
        if (first < last)
            out[nout++] = (colo_span_t){in[i].lo + first, in[i].lo + last};
        begin += len;
    }
    return nout;
}

int colo_axis_spans(const colo_layout_t *layout, colo_axis_t axis, const int64_t *coords,
                    int64_t length, colo_span_t *spans)
{
    /* a zigzag's two parts may each add one cut, so twice the bound is never reached */
    colo_span_t tmp[2 * COLO_MAX_SPANS];
    int n = length > 0;
    spans[0] = (colo_span_t){0, length};
    for (int i = 0; i < layout->nsplits[axis]; i++) {
        const colo_split_t *split = &layout->split[axis][i];
        int64_t parts = layout->grid.extent[split->dim], part = coords[split->dim];
        if (parts == 1 || length == 0) /* 2 * parts fits where it divides a length */
            continue;
        int cuts = 0;
        if (split->kind != COLO_SPLIT_ZIGZAG) {
            const int64_t lo = colo_split_lo(split->kind, length, parts, part),
                          hi = colo_split_lo(split->kind, length, parts, part + 1);
            cuts = slice(spans, n, lo, hi, tmp, cuts);
            length = hi - lo;
        } else {
            int64_t chunk = length / (2 * parts), k = 2 * parts - 1 - part;
            cuts = slice(spans, n, part * chunk, (part + 1) * chunk, tmp, cuts);
            cuts = slice(spans, n, k * chunk, (k + 1) * chunk, tmp, cuts);
            length = 2 * chunk;
        }
        memcpy(spans, tmp, (size_t)cuts * sizeof *spans);
        n = cuts;
    }
    return n;
}

colo_status_t colo_runs_grow(colo_runs_t *runs)
{
    colo_list_t list = {runs->run, runs->n, runs->cap};
    COLO_FAIL_IF(!colo_list_reserve(&list, runs->n + 1, sizeof *runs->run), COLO_ERR_NOMEM,
                 "plan: %lld runs of rows", (long long)runs->n);
    runs->run = list.items;
    runs->cap = list.cap;
    return COLO_OK;
}

colo_status_t colo_layout_runs(const colo_layout_t *layout, const colo_posmap_t *map,
                               const int64_t *coords, bool full, colo_runs_t *runs)
{
    colo_span_t spans[2 * COLO_MAX_SPANS];
    runs->n = runs->rows = 0;
    if (full || map->n == 0)
        return map->rows > 0 ? colo_runs_push(runs, 0, map->rows, 0) : COLO_OK;
    int n = colo_axis_spans(layout, COLO_AXIS_ROWS, coords, map->positions, spans);
    for (int i = 0; i < n; i++) {
        int64_t low =
            colo_first_behind(COLO_RANGES(map->by_pos, pos, count), 0, map->n, spans[i].lo);
        for (; low < map->n && map->by_pos[low].pos < spans[i].hi; low++) {
            const colo_map_run_t *run = &map->by_pos[low];
            int64_t lo = run->pos > spans[i].lo ? run->pos : spans[i].lo;
            int64_t hi = run->pos + run->count < spans[i].hi ? run->pos + run->count : spans[i].hi;
            COLO_TRY(colo_runs_push(runs, run->row + (lo - run->pos), hi - lo, runs->rows));
        }
    }
    return COLO_OK;
}

void colo_runs_deinit(colo_runs_t *runs)
{
    free(runs->run);
    memset(runs, 0, sizeof *runs);
}

/* ---- checks and queries ---- */

/* Row splits from @i on, of a part of @left of the @positions. */
static colo_status_t check_splits(const colo_layout_t *layout, int i, int64_t left,
                                  int64_t positions)
{
    for (; left > 0 && i < layout->nsplits[COLO_AXIS_ROWS]; i++) {
        const colo_split_t *split = &layout->split[COLO_AXIS_ROWS][i];
        int64_t parts = layout->grid.extent[split->dim];
        uint64_t by = split->kind == COLO_SPLIT_ZIGZAG ? 2 * (uint64_t)parts : (uint64_t)parts;
        if (parts == 1)
            continue;
        if (split->kind == COLO_SPLIT_CEIL) { /* full parts, then a shorter one */
            const int64_t full = colo_ceil_lo(left, parts, 1);
            COLO_TRY(check_splits(layout, i + 1, left % full, positions));
            left = full;
            continue;
        }
        COLO_FAIL_IF((uint64_t)left % by != 0, COLO_ERR_LAYOUT,
                     "%lld positions do not split into %llu equal parts (%s over %s=%lld of "
                     "a sequence of %lld); pad the sequence (colo_partition_padded)",
                     (long long)left, (unsigned long long)by,
                     split->kind == COLO_SPLIT_ZIGZAG ? "zigzag chunks" : "blocks",
                     layout->grid.name[split->dim], (long long)parts, (long long)positions);
        left /= parts;
    }
    return COLO_OK;
}

colo_status_t colo_layout_check_rows(const colo_layout_t *layout, int64_t rows)
{
    const int64_t positions = positions_of(layout, rows);
    return check_splits(layout, 0, positions, positions);
}

static colo_status_t check_sizes(const colo_layout_t *layout, int64_t samples, int64_t rows,
                                 int64_t features)
{
    COLO_TRY(colo_layout_check_fields(layout));
    COLO_FAIL_IF(samples < 0 || rows < 0 || features < 0, COLO_ERR_ARG,
                 "layout: %lld samples, %lld rows, %lld features; expected >= 0",
                 (long long)samples, (long long)rows, (long long)features);
    return COLO_OK;
}

colo_status_t colo_layout_check(const colo_layout_t *layout, int64_t samples, int64_t rows,
                                int64_t features)
{
    COLO_ENDS(colo_pool_deinit) colo_pool_t pool = {0};
    colo_posmap_t map;
    COLO_TRY(check_sizes(layout, samples, rows, features));
    COLO_TRY(colo_layout_check_rows(layout, rows));
    return colo_posmap_init(&map, layout, rows, &pool);
}

int colo_layout_context_dims(const colo_layout_t *layout, int32_t *dims)
{
    int n = 0;
    for (int dim = 0; dim < layout->grid.ndims; dim++)
        for (int i = 0; i < layout->nsplits[COLO_AXIS_ROWS]; i++)
            if (layout->split[COLO_AXIS_ROWS][i].dim == dim &&
                layout->split[COLO_AXIS_ROWS][i].context)
                dims[n++] = dim;
    return n;
}

bool colo_layout_coords(const colo_layout_t *layout, int64_t rank, int64_t *coords)
{
    return colo_layout_check_fields(layout) == COLO_OK && colo_grid_has_rank(&layout->grid, rank) &&
           colo_grid_coords(&layout->grid, rank, coords) == COLO_OK &&
           (layout->stage_dim < 0 || coords[layout->stage_dim] == layout->stage);
}

bool colo_layout_holds(const colo_layout_t *layout, int64_t rank)
{
    int64_t coords[COLO_DIMS_MAX];
    return colo_layout_coords(layout, rank, coords);
}

colo_status_t colo_layout_owned(const colo_layout_t *layout, int64_t rank,
                                const colo_shape_t *shape, bool full_rows, colo_owned_t *owned,
                                colo_run_t *out, int64_t cap, int64_t *nruns)
{
    COLO_FAIL_IF(!shape, COLO_ERR_ARG, "layout: shape is NULL");
    const int64_t samples = shape->samples, rows = shape->rows, features = shape->features;
    int64_t coords[COLO_DIMS_MAX];
    colo_span_t span[2 * COLO_MAX_SPANS];
    COLO_ENDS(colo_pool_deinit) colo_pool_t pool = {0};
    COLO_ENDS(colo_runs_deinit) colo_runs_t runs = {0};
    colo_posmap_t map;
    colo_owned_t own = {0};
    COLO_TRY(check_sizes(layout, samples, rows, features));
    COLO_FAIL_IF(!owned, COLO_ERR_ARG, "layout: owned is NULL");
    if (!full_rows)
        COLO_TRY(colo_layout_check_rows(layout, rows));
    COLO_TRY(colo_posmap_init(&map, layout, rows, &pool));
    if (colo_layout_coords(layout, rank, coords)) {
        if (colo_axis_spans(layout, COLO_AXIS_SAMPLES, coords, samples, span))
            own.b0 = span[0].lo, own.b1 = span[0].hi;
        if (colo_axis_spans(layout, COLO_AXIS_FEATURES, coords, features, span))
            own.h0 = span[0].lo, own.h1 = span[0].hi;
        COLO_TRY(colo_layout_runs(layout, &map, coords, full_rows, &runs));
        own.rows = runs.rows;
    }
    if (nruns)
        *nruns = runs.n;
    COLO_FAIL_IF(out && runs.n > cap, COLO_ERR_ARG,
                 "layout: cap is %lld, expected at least %lld runs", (long long)cap,
                 (long long)runs.n);
    if (out && runs.n)
        memcpy(out, runs.run, (size_t)runs.n * sizeof *out);
    *owned = own;
    return COLO_OK;
}

uint64_t colo_layout_hash(const colo_layout_t *layout)
{
    if (colo_layout_check_fields(layout) < 0)
        return COLO_HASH_INIT;
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, (int64_t)colo_grid_hash(&layout->grid));
    for (int axis = 0; axis < 3; axis++) {
        hash = colo_hash_i64(hash, layout->nsplits[axis]);
        for (int i = 0; i < layout->nsplits[axis]; i++) {
            const colo_split_t *split = &layout->split[axis][i];
            hash = colo_hash_i64(hash, split->dim);
            hash = colo_hash_i64(hash, (int64_t)split->kind * 2 + split->context);
        }
    }
    hash = colo_hash_i64(hash, layout->map);
    hash = colo_hash_i64(hash, layout->offset);
    hash = colo_hash_i64(hash, layout->positions);
    hash = colo_hash_i64(hash, layout->table_rows);
    for (int64_t i = 0; i < layout->table_rows; i++)
        hash = colo_hash_i64(hash, layout->table[i]);
    hash = colo_hash_i64(hash, layout->stage_dim);
    return colo_hash_i64(hash, layout->stage);
}
