/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locality.c - which groups of a grid cross NUMA nodes, packages or hosts, and what would not.
 *
 * How many groups of one dim cross depends on its extent e and stride s alone, whatever the other
 * dims are: the grid is rows of s e ranks, and members of a group are s apart in a row. When the
 * first and the last are a host's ranks or more apart, every group crosses. Else rows are short,
 * and their position on hosts repeats after lcm(s e, ranks of a host) ranks: one period is looked
 * at and multiplied. So a world of a million ranks costs what a few hosts cost.
 *
 * A dim's stride is the product of the dims that are faster, in whatever order those are. The
 * best of all n! orders is therefore found over the 2^n sets of faster dims, slowest dim first:
 * best(S) = min over d not in S of cost(d, S) then best(S + d).
 */
#include "grid/topology.h"

#include "core/error.h"
#include "core/list.h"
#include "core/sized.h"
#include "grid/dims.h"

#include <stdlib.h>
#include <string.h>

static colo_status_t check_grid(const colo_topology_t *topology, const colo_grid_t *grid)
{
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "topology: the object is NULL");
    COLO_TRY(colo_grid_check(grid));
    COLO_FAIL_IF(grid->size > topology->world - grid->offset, COLO_ERR_ARG,
                 "topology: the grid has ranks up to %lld, expected at most %lld",
                 (long long)(grid->offset + grid->size - 1), (long long)(topology->world - 1));
    return COLO_OK;
}

static void add(colo_topology_cut_t *cut, int crosses, int64_t groups)
{
    cut->numa += crosses & CROSS_NUMA ? groups : 0;
    cut->package += crosses & CROSS_PACKAGE ? groups : 0;
    cut->host += crosses & CROSS_HOST ? groups : 0;
}

/* ---- one dim, by its extent and stride ---- */

typedef struct ground {
    const colo_topology_spot_t *spot;
    int64_t per_host, offset, size;
} ground_t;

/* The groups of one row that begins at world rank @base, @times; members are @stride apart. */
static void cut_row(const ground_t *ground, int64_t base, int64_t extent, int64_t stride,
                    int64_t times, colo_topology_cut_t *cut)
{
    for (int64_t first = base; first < base + stride; first++) {
        int crosses = 0;
        for (int64_t i = 1; i < extent; i++)
            crosses |=
                colo_topology_cross(ground->spot, ground->per_host, first, first + i * stride);
        add(cut, crosses, times);
    }
}

static colo_topology_cut_t cut_dim(const ground_t *ground, int64_t extent, int64_t stride)
{
    colo_topology_cut_t cut = {.size = extent, .groups = ground->size / extent};
    if (extent == 1)
        return cut;
    if (stride * (extent - 1) >= ground->per_host) {
        add(&cut, CROSS_NUMA | CROSS_PACKAGE | CROSS_HOST, cut.groups);
        return cut;
    }
    int64_t row = stride * extent, rows = ground->size / row,
            every = ground->per_host / colo_gcd(row, ground->per_host);
    int64_t times = rows / every, left = rows % every;
    for (int64_t i = 0; i < every && i < rows; i++)
        cut_row(ground, ground->offset + i * row, extent, stride, times + (i < left), &cut);
    return cut;
}

/* ---- any dims ---- */

static int cross_group(const colo_topology_t *topology, const colo_group_t *group)
{
    int crosses = 0;
    for (int64_t i = 1; i < group->size && !(crosses & CROSS_HOST); i++)
        crosses |= colo_topology_cross(topology->placed.spot, topology->per_host, group->base,
                                       colo_group_member(group, i));
    return crosses;
}

colo_status_t colo_topology_cut(const colo_topology_t *topology, const colo_grid_t *grid,
                                const char *dims, colo_topology_cut_t *cut)
{
    colo_dims_t set;
    colo_group_t group;
    COLO_TRY(check_grid(topology, grid));
    COLO_TRY(colo_grid_read_dims(grid, "the grid", dims, &set));
    if (set.n == 1) {
        ground_t ground = {topology->placed.spot, topology->per_host, grid->offset, grid->size};
        const colo_topology_cut_t own =
            cut_dim(&ground, grid->extent[set.given[0]], grid->stride[set.given[0]]);
        return COLO_SIZED_WRITE(cut, &own, "cut: cut", "COLO_TOPOLOGY_CUT_INIT");
    }
    COLO_TRY(colo_grid_group_at(grid, dims, 0, &group));
    colo_topology_cut_t sum = {.size = group.size, .groups = group.count};
    for (int64_t i = 0; i < group.count; i++) {
        COLO_TRY(colo_grid_group_at(grid, dims, i, &group));
        add(&sum, cross_group(topology, &group), 1);
    }
    return COLO_SIZED_WRITE(cut, &sum, "cut: cut", "COLO_TOPOLOGY_CUT_INIT");
}

/* ---- the best order ---- */

/* How a choice does, dim by dim, those that say most first; smaller is better. */
typedef struct score {
    int64_t n[COLO_DIMS_MAX][3]; /* groups across hosts, packages, NUMA nodes */
} score_t;

static int compare(const score_t *a, const score_t *b, int32_t ndims)
{
    for (int32_t dim = 0; dim < ndims; dim++)
        for (int k = 0; k < 3; k++)
            if (a->n[dim][k] != b->n[dim][k])
                return a->n[dim][k] < b->n[dim][k] ? -1 : 1;
    return 0;
}

/* Position of each dim in the score: those that say most first, unknown ones in between. */
static void rank_dims(const colo_grid_t *grid, int32_t *index)
{
    static const char *const names[] = {"tp", "ep", "cp", "", "dp", "pp"};
    enum { LEVELS = 6, UNKNOWN = 3 };
    int32_t n = 0;
    for (int level = 0; level < LEVELS; level++)
        for (int32_t dim = 0; dim < grid->ndims; dim++) {
            int its = 0;
            while (its < LEVELS && strcmp(grid->name[dim], names[its]) != 0)
                its++;
            if ((its < LEVELS ? its : UNKNOWN) == level)
                index[dim] = n++;
        }
}

static void put(score_t *score, int32_t index, const colo_topology_cut_t *cut)
{
    score->n[index][0] = cut->host;
    score->n[index][1] = cut->package;
    score->n[index][2] = cut->numa;
}

typedef struct search {
    ground_t ground;
    const colo_grid_t *grid;
    int32_t index[COLO_DIMS_MAX];
    int32_t n, dim[COLO_DIMS_MAX]; /* dims of more than one rank, as given */
    score_t *best;                 /* [2^n] of the dims that are not in the set */
    int8_t *first;                 /* [2^n] which of them is the fastest; -1: none are left */
    colo_list_t memo;              /* of memo_t */
} search_t;

typedef struct memo {
    int64_t extent, stride;
    colo_topology_cut_t cut;
} memo_t;

/* The same pair comes up in many sets. */
static colo_status_t cost(search_t *search, int64_t extent, int64_t stride,
                          colo_topology_cut_t *cut)
{
    const memo_t *known = search->memo.items;
    bool far = stride * (extent - 1) >= search->ground.per_host; /* nothing to remember */
    for (int64_t i = 0; i < search->memo.n && !far; i++)
        if (known[i].extent == extent && known[i].stride == stride) {
            *cut = known[i].cut;
            return COLO_OK;
        }
    *cut = cut_dim(&search->ground, extent, stride);
    if (far)
        return COLO_OK;
    memo_t *memo = colo_list_push(&search->memo, sizeof *memo);
    COLO_FAIL_IF(!memo, COLO_ERR_NOMEM, "audit: no memory for %lld strides",
                 (long long)search->memo.n + 1);
    *memo = (memo_t){extent, stride, *cut};
    return COLO_OK;
}

static colo_status_t solve(search_t *search, uint32_t set)
{
    int64_t stride = 1;
    for (int32_t i = 0; i < search->n; i++)
        if (set >> i & 1)
            stride *= search->grid->extent[search->dim[i]];
    search->first[set] = -1;
    memset(&search->best[set], 0, sizeof search->best[set]);
    for (int32_t i = 0; i < search->n; i++) {
        colo_topology_cut_t cut;
        if (set >> i & 1)
            continue;
        COLO_TRY(cost(search, search->grid->extent[search->dim[i]], stride, &cut));
        score_t with = search->best[set | (uint32_t)1 << i];
        put(&with, search->index[search->dim[i]], &cut);
        if (search->first[set] < 0 || compare(&with, &search->best[set], search->grid->ndims) < 0) {
            search->best[set] = with;
            search->first[set] = (int8_t)i;
        }
    }
    return COLO_OK;
}

/* Dims of one rank keep their places; the others follow the sets from the fastest on. */
static void read_order(const search_t *search, colo_grid_t *order)
{
    const colo_grid_t *grid = search->grid;
    uint32_t set = 0;
    int64_t stride = 1;
    *order = *grid;
    for (int32_t dim = 0; dim < grid->ndims; dim++) {
        if (grid->extent[dim] > 1) {
            int32_t from = search->dim[search->first[set]];
            memcpy(order->name[dim], grid->name[from], sizeof order->name[dim]);
            order->extent[dim] = grid->extent[from];
            set |= (uint32_t)1 << search->first[set];
        }
        order->stride[dim] = stride;
        stride *= order->extent[dim];
    }
}

static void score_given(const search_t *search, const colo_topology_spot_t *spot, score_t *score)
{
    ground_t ground = search->ground;
    ground.spot = spot;
    memset(score, 0, sizeof *score);
    for (int32_t i = 0; i < search->n; i++) {
        int32_t dim = search->dim[i];
        colo_topology_cut_t cut =
            cut_dim(&ground, search->grid->extent[dim], search->grid->stride[dim]);
        put(score, search->index[dim], &cut);
    }
}

static colo_status_t best_order(search_t *search, colo_grid_t *order)
{
    uint32_t sets = (uint32_t)1 << search->n;
    score_t given;
    search->best = malloc(sets * sizeof *search->best);
    search->first = malloc(sets);
    COLO_FAIL_IF(!search->best || !search->first, COLO_ERR_NOMEM,
                 "audit: no memory for %u sets of dims", sets);
    for (uint32_t set = sets; set-- > 0;)
        COLO_TRY(solve(search, set));
    score_given(search, search->ground.spot, &given);
    *order = *search->grid;
    if (compare(&search->best[0], &given, search->grid->ndims) < 0)
        read_order(search, order);
    return COLO_OK;
}

static colo_status_t best_bind(const search_t *search, const colo_topology_t *topology,
                               colo_bind_t *bind)
{
    score_t best;
    score_given(search, topology->placed.spot, &best);
    *bind = topology->placed.bind;
    for (int b = COLO_BIND_CORE; b < COLO_BIND_COUNT; b++) {
        colo_placement_t other;
        score_t score;
        COLO_TRY(colo_topology_place(topology, (colo_bind_t)b, &other));
        score_given(search, other.spot, &score);
        colo_topology_drop(&other);
        if (compare(&score, &best, search->grid->ndims) < 0) {
            best = score;
            *bind = (colo_bind_t)b;
        }
    }
    return COLO_OK;
}

colo_status_t colo_topology_advise(const colo_topology_t *topology, const colo_grid_t *grid,
                                   colo_grid_t *order, colo_bind_t *bind)
{
    COLO_TRY(check_grid(topology, grid));
    COLO_FAIL_IF(!order || !bind, COLO_ERR_ARG, "advise: the output is NULL");
    search_t search = {
        .ground = {topology->placed.spot, topology->per_host, grid->offset, grid->size},
        .grid = grid};
    colo_grid_t best;
    colo_bind_t policy = topology->placed.bind;
    for (int32_t dim = 0; dim < grid->ndims; dim++)
        if (grid->extent[dim] > 1)
            search.dim[search.n++] = dim;
    rank_dims(grid, search.index);
    colo_status_t st = best_order(&search, &best);
    COLO_THEN(st, best_bind(&search, topology, &policy));
    free(search.best);
    free(search.first);
    free(search.memo.items);
    COLO_TRY(st);
    *order = best;
    *bind = policy;
    return COLO_OK;
}
