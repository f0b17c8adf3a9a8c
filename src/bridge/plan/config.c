/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - is a plan's config in order, and could COLLECTIVE carry it.
 *
 * COLLECTIVE refuses what it cannot express, in the reference's order; where the reference would be
 * silently wrong it refuses, too. It says so of layouts alone, so a plan can tell without a bridge.
 */
#include "bridge/plan/routing.h"

#include "core/error.h"
#include "core/sized.h"

#include "bridge/plan/nodes.h"

#include <string.h>

colo_status_t colo_plan_read_config(const colo_plan_config_t *given, colo_plan_config_t *own)
{
    *own = (colo_plan_config_t){COLO_PLAN_CONFIG_INIT};
    COLO_TRY(COLO_SIZED_READ(own, given, output, "plan: config", "COLO_PLAN_CONFIG_INIT"));
    if (!own->src || !own->dst)
        return colo_fail(COLO_ERR_ARG, "plan: config.%s is NULL", own->src ? "dst" : "src");
    return COLO_OK;
}

static colo_status_t check_config(const colo_plan_config_t *c)
{
    const colo_shape_t *s = &c->shape;
    if (s->samples < 0 || s->rows < 0 || s->features < 0 || s->positions < 0)
        return colo_fail(COLO_ERR_ARG,
                         "plan: shape of %lld samples, %lld rows, %lld features, %lld positions; "
                         "expected >= 0",
                         (long long)s->samples, (long long)s->rows, (long long)s->features,
                         (long long)s->positions);
    for (int i = 0; i < 2; i++) {
        colo_status_t st = colo_layout_check_fields(i ? c->dst : c->src);
        if (st < 0)
            return colo_fail_prefix(st, "plan: config.%s", i ? "dst" : "src");
    }
    if (!colo_dtype_size(c->dtype))
        return colo_fail(COLO_ERR_ARG, "plan: dtype %d is unknown", (int)c->dtype);
    if ((unsigned)c->output > COLO_SHARDED || (unsigned)c->grad > COLO_DISJOINT)
        return colo_fail(COLO_ERR_ARG, "plan: output %d (0..1) or grad %d (0..1) is unknown",
                         (int)c->output, (int)c->grad);
    if (c->ranks_per_node < 0)
        return colo_fail(COLO_ERR_ARG, "plan: ranks_per_node is %lld, expected >= 0 (0: one node)",
                         (long long)c->ranks_per_node);
    if (c->nodes && c->ranks_per_node)
        return colo_fail(COLO_ERR_ARG,
                         "plan: ranks_per_node is %lld and nodes is given, expected one of them",
                         (long long)c->ranks_per_node);
    for (int i = 0; c->nodes && i < 2; i++) {
        const colo_grid_t *g = i ? &c->dst->grid : &c->src->grid;
        if (g->offset + g->size > c->nodes->ranks)
            return colo_fail(COLO_ERR_ARG,
                             "plan: nodes of %lld ranks, expected at least %lld: config.%s names "
                             "rank %lld",
                             (long long)c->nodes->ranks, (long long)(g->offset + g->size),
                             i ? "dst" : "src", (long long)(g->offset + g->size - 1));
    }
    int64_t v;
    if (!colo_mul_ok(s->samples, s->rows, &v) || !colo_mul_ok(v, s->features, &v) ||
        !colo_mul_ok(v, (int64_t)colo_dtype_size(c->dtype), &v) ||
        !colo_mul_ok(v, colo_layout_parts(c->dst, COLO_ROWS), &v))
        return colo_fail(COLO_ERR_ARG,
                         "plan: %lld x %lld x %lld %s elements overflow 63 bits of bytes",
                         (long long)s->samples, (long long)s->rows, (long long)s->features,
                         colo_dtype_name(c->dtype));
    return COLO_OK;
}

colo_status_t colo_plan_check_config(const colo_plan_config_t *given, colo_plan_config_t *own)
{
    COLO_TRY(colo_plan_read_config(given, own));
    return check_config(own);
}

/* ---- what COLLECTIVE takes ---- */

static colo_status_t has_dims(const colo_grid_t *g, const char *side)
{
    static const char *const dims[] = {"tp", "dp"};
    for (int i = 0; i < 2; i++)
        if (colo_grid_dim(g, dims[i]) < 0)
            return colo_fail(COLO_ERR_LAYOUT, "%s grid must have '%s' dimension", side, dims[i]);
    return COLO_OK;
}

static colo_status_t no_extra(const colo_layout_t *l, const char *side)
{
    static const char *const known[] = {"tp", "cp", "pp", "dp"};
    for (int d = 0; d < l->grid.ndims; d++) {
        bool hit = l->grid.extent[d] == 1;
        for (int i = 0; i < 4; i++)
            hit = hit || strcmp(l->grid.name[d], known[i]) == 0;
        if (!hit)
            return colo_fail(
                COLO_ERR_LAYOUT,
                "%s grid: dim '%s' has extent %lld; COLLECTIVE knows tp, cp, pp and dp "
                "only, use EXACT",
                side, l->grid.name[d], (long long)l->grid.extent[d]);
    }
    for (int a = 0; a < 3; a++)
        for (int i = 0; i < l->nsplits[a]; i++) {
            const char *name = l->grid.name[l->split[a][i].dim];
            bool usual = (a == COLO_SAMPLES && strcmp(name, "dp") == 0) ||
                         (a == COLO_ROWS && strcmp(name, "cp") == 0);
            if (l->split[a][i].kind == COLO_CEIL && l->grid.extent[l->split[a][i].dim] > 1)
                return colo_fail(COLO_ERR_LAYOUT,
                                 "%s layout: %s are split CEIL over '%s'; COLLECTIVE knows BLOCK "
                                 "and ZIGZAG only, use EXACT",
                                 side, colo_axis_names[a], name);
            if (!usual && l->grid.extent[l->split[a][i].dim] > 1)
                return colo_fail(
                    COLO_ERR_LAYOUT,
                    "%s layout: %s are split over '%s'; COLLECTIVE knows samples over dp "
                    "and rows over cp only, use EXACT",
                    side,
                    a == 0   ? "samples"
                    : a == 1 ? "rows"
                             : "features",
                    name);
        }
    if (colo_layout_parts(l, COLO_SAMPLES) != colo_grid_extent(&l->grid, "dp"))
        return colo_fail(COLO_ERR_LAYOUT, "%s layout: samples are not split over dp; use EXACT",
                         side);
    if (l->stage_dim >= 0 && l->grid.extent[l->stage_dim] > 1)
        return colo_fail(COLO_ERR_LAYOUT,
                         "%s layout: only ranks at %lld of '%s' hold it; COLLECTIVE knows no such "
                         "stages, use EXACT",
                         side, (long long)l->stage, l->grid.name[l->stage_dim]);
    return COLO_OK;
}

/* A tensor's rows are in the order of their positions, and copies keep it. */
static colo_status_t rows_in_order(const colo_layout_t *src)
{
    for (int64_t i = 1; i < src->table_rows; i++)
        if (src->table[i] < src->table[i - 1])
            return colo_fail(
                COLO_ERR_LAYOUT,
                "src layout: rows %lld and %lld are at positions %lld and %lld; "
                "COLLECTIVE knows rows in the order of their positions only, use EXACT",
                (long long)i - 1, (long long)i, (long long)src->table[i - 1],
                (long long)src->table[i]);
    return COLO_OK;
}

/* The all-reduce adds what all cp ranks hold: right for context ranks, C times too much for ranks
 * that hold the same gradient. */
static colo_status_t sums_over_cp(const colo_layout_t *dst)
{
    bool context = colo_grid_extent(&dst->grid, "cp") == 1;
    for (int i = 0; i < dst->nsplits[COLO_ROWS]; i++) {
        const colo_split_t *s = &dst->split[COLO_ROWS][i];
        context = context || (s->context && strcmp(dst->grid.name[s->dim], "cp") == 0);
    }
    if (!context)
        return colo_fail(COLO_ERR_LAYOUT,
                         "dest layout: rows are not context-parallel over cp=%lld, over which "
                         "COLLECTIVE adds gradients; use EXACT",
                         (long long)colo_grid_extent(&dst->grid, "cp"));
    return COLO_OK;
}

static int64_t dp_stride(const colo_grid_t *g)
{
    return g->stride[colo_grid_dim(g, "dp")];
}

/*
 * Does every rank's place belong to its group: with the coarser grid (dp = n, stride sc) and the
 * finer (dp = k n, stride sf), (r / (k sf)) mod n == (r / sc) mod n for all r, which holds exactly
 * when n is 1 or k sf == sc. The first rank that breaks it is the smaller of the two.
 */
static colo_status_t aligned(const colo_grid_t *fine, const colo_grid_t *coarse, int64_t k,
                             const char *rule)
{
    int64_t n = colo_grid_extent(coarse, "dp"), a = k * dp_stride(fine), b = dp_stride(coarse), x,
            y;
    if (n == 1 || a == b)
        return COLO_OK;
    int64_t rank = fine->offset + (a < b ? a : b);
    (void)colo_grid_coord(fine, rank, "dp", &x);
    (void)colo_grid_coord(coarse, rank, "dp", &y);
    return colo_fail(COLO_ERR_LAYOUT,
                     "rank %lld: %s, but %lld / %lld != %lld; COLLECTIVE would give it another "
                     "rank's samples, use EXACT",
                     (long long)rank, rule, (long long)x, (long long)k, (long long)y);
}

colo_status_t colo_plan_collective_check(const colo_plan_config_t *config)
{
    colo_plan_config_t own;
    COLO_TRY(colo_plan_read_config(config, &own));
    const colo_plan_config_t *c = &own;
    const colo_grid_t *s = &c->src->grid, *d = &c->dst->grid;
    COLO_TRY(colo_layout_check_fields(c->src));
    COLO_TRY(colo_layout_check_fields(c->dst));
    COLO_TRY(has_dims(s, "src"));
    COLO_TRY(has_dims(d, "dest"));
    if (s->size != d->size)
        return colo_fail(COLO_ERR_LAYOUT,
                         "Grids must span same number of ranks: src %lld, dest %lld",
                         (long long)s->size, (long long)d->size);
    if (s->offset != d->offset)
        return colo_fail(COLO_ERR_LAYOUT, "Grids must have same rank offset: src %lld, dest %lld",
                         (long long)s->offset, (long long)d->offset);
    if (colo_grid_extent(s, "pp") != 1)
        return colo_fail(COLO_ERR_LAYOUT, "src PP must be 1, got %lld",
                         (long long)colo_grid_extent(s, "pp"));
    if (colo_grid_extent(d, "pp") != 1)
        return colo_fail(COLO_ERR_LAYOUT, "dest PP must be 1, got %lld",
                         (long long)colo_grid_extent(d, "pp"));
    if (colo_grid_extent(s, "cp") != 1)
        return colo_fail(COLO_ERR_LAYOUT, "Source CP must be 1, got %lld",
                         (long long)colo_grid_extent(s, "cp"));
    if (colo_grid_extent(d, "cp") > 1 && colo_grid_dim(d, "cp") > colo_grid_dim(d, "dp"))
        return colo_fail(COLO_ERR_LAYOUT,
                         "dest_grid dim_names must have 'cp' before 'dp', found them at %d and %d",
                         (int)colo_grid_dim(d, "cp"), (int)colo_grid_dim(d, "dp"));
    int64_t ds = colo_grid_extent(s, "dp"), dd = colo_grid_extent(d, "dp");
    int64_t lo = ds < dd ? ds : dd, k = (ds < dd ? dd : ds) / lo;
    if (ds % lo || dd % lo)
        return colo_fail(COLO_ERR_LAYOUT, "DP sizes must be evenly divisible: src %lld, dest %lld",
                         (long long)ds, (long long)dd);
    COLO_TRY(no_extra(c->src, "src"));
    COLO_TRY(rows_in_order(c->src));
    COLO_TRY(no_extra(c->dst, "dest"));
    COLO_TRY(sums_over_cp(c->dst));
    if (ds > dd)
        COLO_TRY(aligned(s, d, k, "src dp / scale must be dest dp"));
    else if (dd > ds)
        COLO_TRY(aligned(d, s, k, "dest dp / scale must be src dp"));
    else
        COLO_TRY(aligned(s, d, 1, "src dp must be dest dp"));
    int64_t batch = c->shape.samples / lo;
    if (c->shape.samples % lo)
        return colo_fail(COLO_ERR_SHAPE, "batch %lld is not divisible by dp=%lld",
                         (long long)c->shape.samples, (long long)lo);
    if (batch % k)
        return colo_fail(COLO_ERR_SHAPE, "batch dim size %lld is not divisible by %s scale=%lld.",
                         (long long)batch, ds > dd ? "fan_in" : "fan_out", (long long)k);
    if (c->output == COLO_SHARDED)
        COLO_TRY(colo_layout_check_rows(c->dst, c->shape.rows));
    return COLO_OK;
}
