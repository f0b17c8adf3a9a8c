/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - is a plan's config in order, and could COLLECTIVE carry it.
 *
 * COLLECTIVE refuses what it cannot express, in the reference's order; where the reference would be
 * silently wrong it refuses, too. It says so of layouts alone, so a plan can tell without a bridge.
 */
#include "bridge/plan/plan.h"

#include "core/error.h"
#include "core/sized.h"

#include "bridge/plan/nodes.h"

#include <string.h>

/* The caller's config, its missing members filled in; src and dst are there. */
static colo_status_t read_config(const colo_plan_config_t *given, colo_plan_config_t *own)
{
    *own = (colo_plan_config_t){COLO_PLAN_CONFIG_INIT};
    COLO_TRY(COLO_SIZED_READ(own, given, output, "plan: config", "COLO_PLAN_CONFIG_INIT"));
    COLO_FAIL_IF(!own->src || !own->dst, COLO_ERR_ARG, "plan: config.%s is NULL",
                 own->src ? "dst" : "src");
    return COLO_OK;
}

/* How many ranks hold the same block, of which full sequences have no parts of rows. A plan looks
 * at each of them. */
static int64_t count_replicas(const colo_layout_t *layout)
{
    const int64_t stages = layout->stage_dim >= 0 ? layout->grid.extent[layout->stage_dim] : 1;
    int64_t parts;
    return colo_mul_ok(colo_layout_parts(layout, COLO_AXIS_SAMPLES),
                       colo_layout_parts(layout, COLO_AXIS_FEATURES), &parts) &&
                   colo_mul_ok(parts, stages, &parts) && parts > 0
               ? layout->grid.size / parts
               : 0;
}

static colo_status_t check_config(const colo_plan_config_t *config)
{
    const colo_shape_t *shape = &config->shape;
    COLO_FAIL_IF(shape->samples < 0 || shape->rows < 0 || shape->features < 0 ||
                     shape->positions < 0,
                 COLO_ERR_ARG,
                 "plan: shape of %lld samples, %lld rows, %lld features, %lld positions; "
                 "expected >= 0",
                 (long long)shape->samples, (long long)shape->rows, (long long)shape->features,
                 (long long)shape->positions);
    for (int i = 0; i < 2; i++) {
        colo_status_t st = colo_layout_check_fields(i ? config->dst : config->src);
        if (st < 0)
            return colo_fail_prefix(st, "plan: config.%s", i ? "dst" : "src");
        const int64_t replicas = count_replicas(i ? config->dst : config->src);
        COLO_FAIL_IF(replicas > COLO_PLAN_REPLICAS_MAX, COLO_ERR_ARG,
                     "plan: config.%s: %lld ranks hold the same samples, expected at most %d",
                     i ? "dst" : "src", (long long)replicas, COLO_PLAN_REPLICAS_MAX);
    }
    COLO_FAIL_IF(!colo_dtype_size(config->dtype), COLO_ERR_ARG, "plan: dtype %d is unknown",
                 (int)config->dtype);
    COLO_FAIL_IF((unsigned)config->output > COLO_OUTPUT_SHARDED ||
                     (unsigned)config->grad > COLO_GRAD_DISJOINT,
                 COLO_ERR_ARG, "plan: output %d (0..1) or grad %d (0..1) is unknown",
                 (int)config->output, (int)config->grad);
    COLO_FAIL_IF(config->ranks_per_node < 0, COLO_ERR_ARG,
                 "plan: ranks_per_node is %lld, expected >= 0 (0: one node)",
                 (long long)config->ranks_per_node);
    COLO_FAIL_IF(config->nodes && config->ranks_per_node, COLO_ERR_ARG,
                 "plan: ranks_per_node is %lld and nodes is given, expected one of them",
                 (long long)config->ranks_per_node);
    for (int i = 0; config->nodes && i < 2; i++) {
        const colo_grid_t *grid = i ? &config->dst->grid : &config->src->grid;
        COLO_FAIL_IF(grid->offset + grid->size > config->nodes->ranks, COLO_ERR_ARG,
                     "plan: nodes of %lld ranks, expected at least %lld: config.%s names "
                     "rank %lld",
                     (long long)config->nodes->ranks, (long long)(grid->offset + grid->size),
                     i ? "dst" : "src", (long long)(grid->offset + grid->size - 1));
    }
    int64_t volume;
    COLO_FAIL_IF(!colo_mul_ok(shape->samples, shape->rows, &volume) ||
                     !colo_mul_ok(volume, shape->features, &volume) ||
                     !colo_mul_ok(volume, (int64_t)colo_dtype_size(config->dtype), &volume) ||
                     !colo_mul_ok(volume, colo_layout_parts(config->dst, COLO_AXIS_ROWS), &volume),
                 COLO_ERR_ARG, "plan: %lld x %lld x %lld %s elements overflow 63 bits of bytes",
                 (long long)shape->samples, (long long)shape->rows, (long long)shape->features,
                 colo_dtype_name(config->dtype));
    return COLO_OK;
}

colo_status_t colo_plan_check_config(const colo_plan_config_t *given, colo_plan_config_t *own)
{
    COLO_TRY(read_config(given, own));
    return check_config(own);
}

/* ---- what COLLECTIVE takes ---- */

static colo_status_t has_dims(const colo_grid_t *grid, const char *side)
{
    static const char *const dims[] = {"tp", "dp"};
    for (int i = 0; i < 2; i++)
        COLO_FAIL_IF(colo_grid_dim(grid, dims[i]) < 0, COLO_ERR_LAYOUT,
                     "%s grid must have '%s' dimension", side, dims[i]);
    return COLO_OK;
}

static colo_status_t no_extra(const colo_layout_t *layout, const char *side)
{
    static const char *const known[] = {"tp", "cp", "pp", "dp"};
    for (int dim = 0; dim < layout->grid.ndims; dim++) {
        bool hit = layout->grid.extent[dim] == 1;
        for (int i = 0; i < 4; i++)
            hit = hit || strcmp(layout->grid.name[dim], known[i]) == 0;
        COLO_FAIL_IF(!hit, COLO_ERR_LAYOUT,
                     "%s grid: dim '%s' has extent %lld; COLLECTIVE knows tp, cp, pp and dp "
                     "only, use EXACT",
                     side, layout->grid.name[dim], (long long)layout->grid.extent[dim]);
    }
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++) {
            const char *name = layout->grid.name[layout->split[axis][i].dim];
            bool usual = (axis == COLO_AXIS_SAMPLES && strcmp(name, "dp") == 0) ||
                         (axis == COLO_AXIS_ROWS && strcmp(name, "cp") == 0);
            COLO_FAIL_IF(layout->split[axis][i].kind == COLO_SPLIT_CEIL &&
                             layout->grid.extent[layout->split[axis][i].dim] > 1,
                         COLO_ERR_LAYOUT,
                         "%s layout: %s are split CEIL over '%s'; COLLECTIVE knows BLOCK "
                         "and ZIGZAG only, use EXACT",
                         side, colo_axis_names[axis], name);
            COLO_FAIL_IF(!usual && layout->grid.extent[layout->split[axis][i].dim] > 1,
                         COLO_ERR_LAYOUT,
                         "%s layout: %s are split over '%s'; COLLECTIVE knows samples over dp "
                         "and rows over cp only, use EXACT",
                         side, colo_axis_names[axis], name);
        }
    COLO_FAIL_IF(colo_layout_parts(layout, COLO_AXIS_SAMPLES) !=
                     colo_grid_extent(&layout->grid, "dp"),
                 COLO_ERR_LAYOUT, "%s layout: samples are not split over dp; use EXACT", side);
    COLO_FAIL_IF(layout->stage_dim >= 0 && layout->grid.extent[layout->stage_dim] > 1,
                 COLO_ERR_LAYOUT,
                 "%s layout: only ranks at %lld of '%s' hold it; COLLECTIVE knows no such "
                 "stages, use EXACT",
                 side, (long long)layout->stage, layout->grid.name[layout->stage_dim]);
    return COLO_OK;
}

/* A tensor's rows are in the order of their positions, and copies keep it. */
static colo_status_t rows_in_order(const colo_layout_t *src)
{
    for (int64_t i = 1; i < src->table_rows; i++)
        COLO_FAIL_IF(src->table[i] < src->table[i - 1], COLO_ERR_LAYOUT,
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
    for (int i = 0; i < dst->nsplits[COLO_AXIS_ROWS]; i++) {
        const colo_split_t *split = &dst->split[COLO_AXIS_ROWS][i];
        context = context || (split->context && strcmp(dst->grid.name[split->dim], "cp") == 0);
    }
    COLO_FAIL_IF(!context, COLO_ERR_LAYOUT,
                 "dest layout: rows are not context-parallel over cp=%lld, over which "
                 "COLLECTIVE adds gradients; use EXACT",
                 (long long)colo_grid_extent(&dst->grid, "cp"));
    return COLO_OK;
}

static int64_t dp_stride(const colo_grid_t *grid)
{
    return grid->stride[colo_grid_dim(grid, "dp")];
}

/*
 * Does every rank's place belong to its group: with the coarser grid (dp = n, stride sc) and the
 * finer (dp = k n, stride sf), (r / (k sf)) mod n == (r / sc) mod n for all r, which holds exactly
 * when n is 1 or k sf == sc. The first rank that breaks it is the smaller of the two.
 */
static colo_status_t aligned(const colo_grid_t *fine, const colo_grid_t *coarse, int64_t k,
                             const char *rule)
{
    int64_t n = colo_grid_extent(coarse, "dp"), fine_stride = k * dp_stride(fine),
            coarse_stride = dp_stride(coarse), fine_dp, coarse_dp;
    if (n == 1 || fine_stride == coarse_stride)
        return COLO_OK;
    int64_t rank = fine->offset + (fine_stride < coarse_stride ? fine_stride : coarse_stride);
    (void)colo_grid_coord(fine, rank, "dp", &fine_dp);
    (void)colo_grid_coord(coarse, rank, "dp", &coarse_dp);
    return colo_fail(COLO_ERR_LAYOUT,
                     "rank %lld: %s, but %lld / %lld != %lld; COLLECTIVE would give it another "
                     "rank's samples, use EXACT",
                     (long long)rank, rule, (long long)fine_dp, (long long)k, (long long)coarse_dp);
}

colo_status_t colo_plan_collective_check(const colo_plan_config_t *config)
{
    colo_plan_config_t own;
    COLO_TRY(read_config(config, &own));
    const colo_plan_config_t *given = &own;
    const colo_grid_t *src_grid = &given->src->grid, *dst_grid = &given->dst->grid;
    COLO_TRY(colo_layout_check_fields(given->src));
    COLO_TRY(colo_layout_check_fields(given->dst));
    COLO_TRY(has_dims(src_grid, "src"));
    COLO_TRY(has_dims(dst_grid, "dest"));
    COLO_FAIL_IF(src_grid->size != dst_grid->size, COLO_ERR_LAYOUT,
                 "Grids must span same number of ranks: src %lld, dest %lld",
                 (long long)src_grid->size, (long long)dst_grid->size);
    COLO_FAIL_IF(src_grid->offset != dst_grid->offset, COLO_ERR_LAYOUT,
                 "Grids must have same rank offset: src %lld, dest %lld",
                 (long long)src_grid->offset, (long long)dst_grid->offset);
    COLO_FAIL_IF(colo_grid_extent(src_grid, "pp") != 1, COLO_ERR_LAYOUT,
                 "src PP must be 1, got %lld", (long long)colo_grid_extent(src_grid, "pp"));
    COLO_FAIL_IF(colo_grid_extent(dst_grid, "pp") != 1, COLO_ERR_LAYOUT,
                 "dest PP must be 1, got %lld", (long long)colo_grid_extent(dst_grid, "pp"));
    COLO_FAIL_IF(colo_grid_extent(src_grid, "cp") != 1, COLO_ERR_LAYOUT,
                 "Source CP must be 1, got %lld", (long long)colo_grid_extent(src_grid, "cp"));
    COLO_FAIL_IF(colo_grid_extent(dst_grid, "cp") > 1 &&
                     colo_grid_dim(dst_grid, "cp") > colo_grid_dim(dst_grid, "dp"),
                 COLO_ERR_LAYOUT,
                 "dest_grid dim_names must have 'cp' before 'dp', found them at %d and %d",
                 (int)colo_grid_dim(dst_grid, "cp"), (int)colo_grid_dim(dst_grid, "dp"));
    int64_t ds = colo_grid_extent(src_grid, "dp"), dd = colo_grid_extent(dst_grid, "dp");
    int64_t lo = ds < dd ? ds : dd, k = (ds < dd ? dd : ds) / lo;
    COLO_FAIL_IF(ds % lo || dd % lo, COLO_ERR_LAYOUT,
                 "DP sizes must be evenly divisible: src %lld, dest %lld", (long long)ds,
                 (long long)dd);
    COLO_TRY(no_extra(given->src, "src"));
    COLO_TRY(rows_in_order(given->src));
    COLO_TRY(no_extra(given->dst, "dest"));
    COLO_TRY(sums_over_cp(given->dst));
    COLO_TRY(dd > ds
                 ? aligned(dst_grid, src_grid, k, "dest dp / scale must be src dp")
                 : aligned(src_grid, dst_grid, k,
                           ds > dd ? "src dp / scale must be dest dp" : "src dp must be dest dp"));
    int64_t batch = given->shape.samples / lo;
    COLO_FAIL_IF(given->shape.samples % lo, COLO_ERR_SHAPE,
                 "batch %lld is not divisible by dp=%lld", (long long)given->shape.samples,
                 (long long)lo);
    COLO_FAIL_IF(batch % k, COLO_ERR_SHAPE,
                 "batch dim size %lld is not divisible by %s scale=%lld.", (long long)batch,
                 ds > dd ? "fan_in" : "fan_out", (long long)k);
    if (given->output == COLO_OUTPUT_SHARDED)
        COLO_TRY(colo_layout_check_rows(given->dst, given->shape.rows));
    return COLO_OK;
}
