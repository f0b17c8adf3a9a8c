/* SPDX-License-Identifier: Apache-2.0 */
/* halo-plan.h (private) - what a rank's plan has of halos beside messages. */
#ifndef COLO_BRIDGE_PLAN_HALO_PLAN_H
#define COLO_BRIDGE_PLAN_HALO_PLAN_H

#include "bridge/plan/segments-plan.h"

/* Lists what the destination tensor of block @block has: rows, in @places; of them, those that it
 * has again, and zeros, in @plan. */
colo_status_t colo_halo_find_places(colo_plan_t *plan, const colo_halo_t *halo, int64_t block,
                                    colo_ragged_places_t *places);
/* Says where regions of rows of several addends are in the partial sums of @plan, which have those
 * rows of @mine, the source block, and no other. @mine: NULL, if there is no block. */
colo_status_t colo_halo_place_sums(colo_plan_t *plan, const colo_list_t *partials,
                                   const colo_runs_t *mine);

#endif
