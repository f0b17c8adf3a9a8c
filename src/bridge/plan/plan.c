/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - one rank's part of the routing: what it sends, receives and keeps, forward and backward.
 *
 * Makes plans of uniform batches (segments-plan.c: of tables) and destroys any. builder.c makes
 * their lists; what a rank does with its boxes is its program's business.
 */
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

#include "bridge/layout/index.h"
#include "core/error.h"
#include "core/hash.h"

#include <colobridge/version.h>

#include <stdlib.h>

static uint64_t hash_config(const colo_plan_t *plan)
{
    const colo_plan_config_t *config = &plan->config;
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, colo_version_number());
    hash = colo_hash_i64(hash, (int64_t)colo_layout_hash(&plan->src));
    hash = colo_hash_i64(hash, (int64_t)colo_layout_hash(&plan->dst));
    hash = colo_hash_i64(hash, config->shape.samples);
    hash = colo_hash_i64(hash, config->shape.rows);
    hash = colo_hash_i64(hash, config->shape.features);
    hash = colo_hash_i64(hash, config->dtype);
    hash = colo_hash_i64(hash, config->output);
    hash = colo_hash_i64(hash, config->output == COLO_OUTPUT_SHARDED ? 0 : (int64_t)config->grad);
    hash = colo_hash_i64(hash, config->no_grad);
    hash = colo_hash_i64(hash, config->one_level);
    return colo_hash_i64(hash,
                         config->nodes ? (int64_t)config->nodes->hash : config->ranks_per_node);
}

static colo_status_t build(colo_plan_t *plan)
{
    const colo_plan_config_t *config = &plan->config;
    const colo_shape_t *shape = &config->shape;
    COLO_ENDS(colo_builder_deinit) colo_builder_t builder = {0};
    COLO_ENDS(colo_pool_deinit) colo_pool_t maps = {0};
    colo_posmap_t src_map, dst_map;
    const bool full = config->output == COLO_OUTPUT_FULL_SEQ,
               partial = full && config->grad == COLO_GRAD_PARTIAL;
    colo_partial_t addends;
    const colo_side_t src = {
        .owns = &colo_owns_uniform, .layout = &plan->src, .shape = shape, .table = &src_map};
    const colo_side_t dst = {.owns = &colo_owns_uniform,
                             .layout = &plan->dst,
                             .shape = shape,
                             .table = &dst_map,
                             .has_all_rows = full,
                             .partial = &addends,
                             .npartial = partial};
    colo_builder_begin(&builder, plan, false);
    COLO_TRY(colo_layout_check_rows(&plan->src, shape->rows));
    if (!full || (config->grad == COLO_GRAD_DISJOINT &&
                  !config->no_grad)) /* else nothing splits by position */
        COLO_TRY(colo_layout_check_rows(&plan->dst, shape->rows));
    COLO_TRY(colo_posmap_init(&src_map, &plan->src, shape->rows, &maps));
    COLO_TRY(colo_posmap_init(&dst_map, &plan->dst, shape->rows, &maps));
    COLO_TRY(
        colo_layout_owned(&plan->src, plan->rank, shape, false, &plan->own_src, NULL, 0, NULL));
    COLO_TRY(colo_layout_owned(&plan->dst, plan->rank, shape, full, &plan->own_dst, NULL, 0, NULL));
    if (partial)
        COLO_TRY(colo_partial_over_context(&plan->dst, &builder.places, &addends));
    return colo_builder_route(&builder, src, dst);
}

colo_status_t colo_plan_new(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    colo_plan_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "plan: %zu bytes", sizeof *made);
    made->src = *config->src;
    made->dst = *config->dst;
    made->config = *config;
    made->config.src = &made->src;
    made->config.dst = &made->dst;
    if (config->shape.positions)
        made->dst.positions = config->shape.positions;
    made->rank = rank;
    made->elem = colo_dtype_size(config->dtype);
    *plan = made;
    return COLO_OK;
}

colo_status_t colo_plan_create(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    colo_plan_config_t own;
    COLO_ENDS(colo_plan_destroy) colo_plan_t *made = NULL;
    COLO_FAIL_IF(!plan, COLO_ERR_ARG, "plan: plan is NULL");
    COLO_FAIL_IF(rank < 0, COLO_ERR_ARG, "plan: rank %lld, expected >= 0", (long long)rank);
    COLO_TRY(colo_plan_check_config(config, &own));
    COLO_TRY(colo_plan_new(&made, &own, rank));
    COLO_TRY(build(made));
    made->hash = hash_config(made);
    *plan = made;
    made = NULL;
    return COLO_OK;
}

void colo_plan_destroy(colo_plan_t **plan)
{
    if (!plan || !*plan)
        return;
    colo_pool_deinit(&(*plan)->pool);
    free((*plan)->term);
    free(*plan);
    *plan = NULL;
}
