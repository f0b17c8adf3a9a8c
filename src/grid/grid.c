/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grid.c - which rank is where, and which ranks form which group, in closed form.
 *
 * A rank is a number in mixed radix, first dim fastest. The group of a dim set is that number with
 * the digits of the set free and the others fixed, so a group is a base and a few (extent, stride)
 * pairs: nothing here grows with the number of ranks, and nothing is looked up. Canonical order
 * puts the free digits in naming order, which makes members ascend; "as given" order is the same
 * digits in reversed list order.
 *
 * Rules for dims and lists are in dims.c, spec strings in spec.c, communicators in hypergrid.c.
 */
#include "grid/dims.h"

#include "core/hash.h"
#include "core/error.h"

#include <string.h>

colo_status_t colo_grid_init(colo_grid_t *grid, const colo_dim_t *dims, int32_t ndims,
                             int64_t offset, int64_t world)
{
    colo_grid_t made;
    COLO_FAIL_IF(!grid, COLO_ERR_ARG, "grid: the output is NULL");
    COLO_FAIL_IF(ndims < 0, COLO_ERR_ARG, "grid: %d dims, expected 1 to %d", (int)ndims,
                 COLO_DIMS_MAX);
    COLO_FAIL_IF(ndims > COLO_DIMS_MAX, COLO_ERR_ARG, "grid: more than %d dims: %d", COLO_DIMS_MAX,
                 (int)ndims);
    COLO_FAIL_IF(ndims > 0 && !dims, COLO_ERR_ARG, "grid: dims is NULL for %d dims", (int)ndims);
    colo_grid_start(&made);
    for (int32_t i = 0; i < ndims; i++) {
        COLO_FAIL_IF(!dims[i].name, COLO_ERR_ARG, "grid: dim %d has a NULL name", (int)i);
        COLO_TRY(colo_grid_add_name(&made, dims[i].name, strlen(dims[i].name)));
        COLO_TRY(colo_grid_add_extent(&made, dims[i].extent));
    }
    COLO_TRY(colo_grid_finish(&made, offset, world));
    *grid = made;
    return COLO_OK;
}

/* ---- getters ---- */

int32_t colo_grid_dim(const colo_grid_t *grid, const char *name)
{
    return grid && name ? colo_grid_find(grid, name, strlen(name)) : -1;
}

int64_t colo_grid_extent(const colo_grid_t *grid, const char *name)
{
    int32_t i = colo_grid_dim(grid, name);
    return i < 0 ? 1 : grid->extent[i];
}

bool colo_grid_has_rank(const colo_grid_t *grid, int64_t rank)
{
    return grid && rank >= grid->offset && rank - grid->offset < grid->size;
}

bool colo_grid_equal(const colo_grid_t *a, const colo_grid_t *b)
{
    if (!a || !b)
        return a == b;
    if (a->ndims != b->ndims || a->offset != b->offset)
        return false;
    for (int32_t i = 0; i < a->ndims && i < COLO_DIMS_MAX; i++)
        if (a->extent[i] != b->extent[i] || strcmp(a->name[i], b->name[i]) != 0)
            return false;
    return true;
}

uint64_t colo_grid_hash(const colo_grid_t *grid)
{
    uint64_t hash = COLO_HASH_INIT;
    if (!grid)
        return hash;
    hash = colo_hash_i64(hash, grid->ndims);
    for (int32_t i = 0; i < grid->ndims && i < COLO_DIMS_MAX; i++) {
        hash = colo_hash_str(hash, grid->name[i]);
        hash = colo_hash_i64(hash, grid->extent[i]);
    }
    return colo_hash_i64(hash, grid->offset);
}

/* ---- ranks and coordinates ---- */

static int64_t coord(const colo_grid_t *grid, int64_t rank, int32_t i)
{
    return (rank - grid->offset) / grid->stride[i] % grid->extent[i];
}

static colo_status_t check_rank(const colo_grid_t *grid, int64_t rank)
{
    COLO_TRY(colo_grid_check(grid));
    COLO_FAIL_IF(!colo_grid_has_rank(grid, rank), COLO_ERR_ARG,
                 "rank %lld is outside the grid's [%lld, %lld)", (long long)rank,
                 (long long)grid->offset, (long long)(grid->offset + grid->size));
    return COLO_OK;
}

colo_status_t colo_grid_coords(const colo_grid_t *grid, int64_t rank, int64_t *coords)
{
    COLO_TRY(check_rank(grid, rank));
    COLO_FAIL_IF(!coords, COLO_ERR_ARG, "coords: the output is NULL");
    for (int32_t i = 0; i < grid->ndims; i++)
        coords[i] = coord(grid, rank, i);
    return COLO_OK;
}

colo_status_t colo_grid_coord(const colo_grid_t *grid, int64_t rank, const char *name, int64_t *out)
{
    COLO_TRY(check_rank(grid, rank));
    COLO_FAIL_IF(!name || !out, COLO_ERR_ARG, "coord: %s is NULL",
                 name ? "the output" : "the dim name");
    int32_t i = colo_grid_dim(grid, name);
    *out = i < 0 ? 0 : coord(grid, rank, i);
    return COLO_OK;
}

colo_status_t colo_grid_rank(const colo_grid_t *grid, const int64_t *coords, int64_t *rank)
{
    COLO_TRY(colo_grid_check(grid));
    COLO_FAIL_IF(!coords || !rank, COLO_ERR_ARG, "rank: %s is NULL",
                 coords ? "the output" : "coords");
    int64_t found = grid->offset;
    for (int32_t i = 0; i < grid->ndims; i++) {
        COLO_FAIL_IF(coords[i] < 0 || coords[i] >= grid->extent[i], COLO_ERR_ARG,
                     "coordinate %lld of dim %d '%s' is outside [0, %lld)", (long long)coords[i],
                     (int)i, grid->name[i], (long long)grid->extent[i]);
        found += coords[i] * grid->stride[i];
    }
    *rank = found;
    return COLO_OK;
}

/* ---- groups ---- */

static void add_dim(colo_group_t *group, const colo_grid_t *grid, int32_t dim)
{
    group->extent[group->nd] = grid->extent[dim];
    group->stride[group->nd++] = grid->stride[dim];
    group->size *= grid->extent[dim];
}

/* The digits of the set, canonical: in naming order, else the list backwards. The groups begin at
 * the members of @bases, which has the other digits. */
static void shape_group(const colo_grid_t *grid, const colo_dims_t *dims, bool canonical,
                        colo_group_t *group, colo_group_t *bases)
{
    *group = *bases = (colo_group_t){.base = grid->offset, .size = 1};
    for (int32_t i = 0; i < grid->ndims; i++)
        if (!dims->in[i])
            add_dim(bases, grid, i);
        else if (canonical)
            add_dim(group, grid, i);
    for (int32_t i = dims->n - 1; i >= 0 && !canonical; i--)
        add_dim(group, grid, dims->given[i]);
    group->count = bases->size;
}

static colo_status_t group_of(const colo_grid_t *grid, const char *list, int64_t rank,
                              bool canonical, colo_group_t *group)
{
    colo_dims_t dims;
    colo_group_t found, bases;
    COLO_TRY(check_rank(grid, rank));
    COLO_FAIL_IF(!group, COLO_ERR_ARG, "group: the output is NULL");
    COLO_TRY(colo_grid_read_dims(grid, "the grid", list, &dims));
    shape_group(grid, &dims, canonical, &found, &bases);
    found.base = rank;
    for (int32_t i = 0; i < dims.n; i++)
        found.base -= coord(grid, rank, dims.given[i]) * grid->stride[dims.given[i]];
    found.index = colo_group_find(&found, rank);
    found.ordinal = colo_group_find(&bases, found.base);
    *group = found;
    return COLO_OK;
}

colo_status_t colo_grid_group(const colo_grid_t *grid, const char *dims, int64_t rank,
                              colo_group_t *group)
{
    return group_of(grid, dims, rank, true, group);
}

colo_status_t colo_grid_group_as_given(const colo_grid_t *grid, const char *dims, int64_t rank,
                                       colo_group_t *group)
{
    return group_of(grid, dims, rank, false, group);
}

colo_status_t colo_grid_group_at(const colo_grid_t *grid, const char *list, int64_t ordinal,
                                 colo_group_t *group)
{
    colo_dims_t dims;
    colo_group_t found, bases;
    COLO_TRY(colo_grid_check(grid));
    COLO_FAIL_IF(!group, COLO_ERR_ARG, "group: the output is NULL");
    COLO_TRY(colo_grid_read_dims(grid, "the grid", list, &dims));
    shape_group(grid, &dims, true, &found, &bases);
    COLO_FAIL_IF(ordinal < 0 || ordinal >= found.count, COLO_ERR_ARG,
                 "group %lld of '%s' is outside [0, %lld)", (long long)ordinal,
                 COLO_QUOTED_STR(list), (long long)found.count);
    found.ordinal = ordinal;
    found.base = colo_group_member(&bases, ordinal);
    *group = found;
    return COLO_OK;
}

colo_status_t colo_grid_key(const colo_grid_t *grid, const char *list, char *key)
{
    colo_dims_t dims;
    COLO_TRY(colo_grid_check(grid));
    COLO_FAIL_IF(!key, COLO_ERR_ARG, "key: the output is NULL");
    COLO_TRY(colo_grid_read_dims(grid, "the grid", list, &dims));
    colo_grid_write_key(grid, &dims, key);
    return COLO_OK;
}

int64_t colo_group_member(const colo_group_t *group, int64_t i)
{
    if (!group)
        return -1;
    int64_t rank = group->base;
    for (int32_t k = 0; k < group->nd; k++) {
        rank += i % group->extent[k] * group->stride[k];
        i /= group->extent[k];
    }
    return rank;
}

/*
 * Strides of a grid nest, so digit k of a member's distance from the base is (d / stride) mod
 * extent in whatever order the dims are listed; a rank whose digits do not add up to d is no
 * member.
 */
int64_t colo_group_find(const colo_group_t *group, int64_t rank)
{
    if (!group || group->size < 1 || rank < group->base)
        return -1;
    int64_t left = rank - group->base, d = left, index = 0, next = 1;
    for (int32_t k = 0; k < group->nd; k++) {
        int64_t c = d / group->stride[k] % group->extent[k];
        left -= c * group->stride[k];
        index += c * next;
        next *= group->extent[k];
    }
    return left == 0 ? index : -1;
}
