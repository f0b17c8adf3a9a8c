/* SPDX-License-Identifier: Apache-2.0 */
/* segments-plan.h (private) - one rank's plan for a batch of segments, and where its rows are in
 * destination tensors. */
#ifndef COLO_BRIDGE_PLAN_SEGMENTS_PLAN_H
#define COLO_BRIDGE_PLAN_SEGMENTS_PLAN_H

#include "bridge/layout/segments.h"
#include "bridge/plan/builder.h"

/* Rows of the batch in this rank's destination tensor, by position: row is an index on the
 * replica's axis, local the tensor's row. */
typedef struct colo_ragged_places {
    colo_run_t *stored; /* [n] owned */
    int64_t n;
    colo_run_t *foreign; /* [nforeign] owned: DISJOINT: those that other context ranks own */
    int64_t nforeign;
} colo_ragged_places_t;

/* This rank's plan for the tables of @ragged. @config: of the bridge; of the shape, features count.
 * @builder: any plan's before, or zeros. @merged: the destination tensor is the whole sequence
 * axis.
 * @hash: of the tables. @spare: memory that the plan's pool takes. @places: out, of this
 * pool.
 */
colo_status_t colo_ragged_plan(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                               const colo_ragged_t *ragged, colo_builder_t *builder, bool merged,
                               uint64_t hash, colo_pool_t *spare, colo_ragged_places_t *places);
/* Replaces indices by the rows of the destination ranks' tensors, in what this rank sends by the
 * plan that @builder made last and in the addends that it receives. Those of a plan without peer
 * memory are never looked at. */
colo_status_t colo_ragged_place_peers(colo_builder_t *builder, const colo_ragged_t *ragged,
                                      bool merged);

#endif
