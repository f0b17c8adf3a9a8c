/* SPDX-License-Identifier: Apache-2.0 */
/* segments-plan.h (private) - one rank's plan for a batch of segments, and where its rows are in
 * destination tensors. */
#ifndef COLO_BRIDGE_SEGMENTS_PLAN_H
#define COLO_BRIDGE_SEGMENTS_PLAN_H

#include "bridge/layout/segments.h"
#include "bridge/plan/routing.h"

/* Rows at indices first, first + 1 .. of the replica's axis are at row, row + 1 .. of the tensor.
 */
typedef struct colo_stored {
    int64_t first, count, row; /* first: what they are sorted by */
} colo_stored_t;

/* Rows of the batch in this rank's destination tensor, by position. */
typedef struct colo_ragged_places {
    colo_stored_t *stored; /* [n] owned */
    int64_t n;
    colo_stored_t *foreign; /* [nforeign] owned: DISJOINT: those that other context ranks own */
    int64_t nforeign;
} colo_ragged_places_t;
void colo_ragged_places_deinit(const colo_pool_t *pool, colo_ragged_places_t *places);
/* Of @whole, the rows that @coords have on the replica's axis: where their tensor has them, by
 * index.
 * @on_rank: [whole->n] where each run begins on the axis of the context rank; used if @merged, and
 * not if rows are full. @out: [whole->n] of @pool; @rows: of that tensor. */
colo_status_t colo_ragged_stored(const colo_ragged_t *ragged, const colo_side_t *side,
                                 const int64_t *coords, const colo_runs_t *whole, bool merged,
                                 const int64_t *on_rank, colo_pool_t *pool, colo_stored_t **out,
                                 int64_t *rows);
/* The tensor's row of index @index, which is one of them. @hint: in and out, in [0, n): which run
 * was found last; the next one is usually it or follows it. */
int64_t colo_ragged_find(const colo_stored_t *stored, int64_t n, int64_t index, int64_t *hint);

/* This rank's plan for the tables of @ragged. @config: of the bridge; of the shape, features count.
 * @builder: any plan's before, or zeros. @merged: the destination tensor is the whole sequence
 * axis.
 * @hash: of the tables. @pool: for the plan and @places, which is out; or NULL. */
colo_status_t colo_ragged_plan(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                               const colo_ragged_t *ragged, colo_builder_t *builder, bool merged,
                               uint64_t hash, colo_pool_t *pool, colo_ragged_places_t *places);
/* Of the plan that @builder made last: in what this rank sends, and in addends that it receives,
 * the rows of the destination ranks' tensors take the place of indices. Those of a plan without
 * peer memory are never looked at. */
colo_status_t colo_ragged_place_peers(colo_builder_t *builder, const colo_ragged_t *ragged,
                                      bool merged);

#endif
