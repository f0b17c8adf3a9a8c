/* SPDX-License-Identifier: Apache-2.0 */
/* ragged.h (private) - what the files of ragged batches share. */
#ifndef COLO_BRIDGE_RAGGED_RAGGED_H
#define COLO_BRIDGE_RAGGED_RAGGED_H

#include "bridge/plan/segments-plan.h"
#include "bridge/run/run.h"

/* ---- what a bridge keeps for its batches ---- */

typedef struct colo_ragged_bridge {
    colo_ragged_t axes; /* of the last tables */
    colo_builder_t builder;
    colo_pool_t spare; /* of a batch that was destroyed */
    bool merged;
    int64_t max_rows;           /* of a source rank; 0: any */
    int64_t src_rows, dst_rows; /* of the last tables */
} colo_ragged_bridge_t;

/* Is a bridge to be one of batches whose rows are in tables? */
bool colo_ragged_wanted(const colo_bridge_config_t *config);
/* Makes it one, if it is to be; local. COLO_ERR_UNBUILT: the comm moves memory of the other kind.
 */
colo_status_t colo_ragged_create(colo_bridge_t *bridge, const colo_bridge_config_t *config);

void colo_ragged_destroy(colo_bridge_t *bridge);
/* What all ranks must have alike. */
void colo_ragged_fields(const colo_bridge_t *bridge, colo_fields_t *fields);
/* COLO_OK of a uniform bridge; else refuse another shape, and a call without a batch. The latter is
 * collective, if COLO_CHECK is at least 1. */
colo_status_t colo_ragged_refuse_shape(const colo_bridge_t *bridge);
colo_status_t colo_ragged_refuse_call(const colo_bridge_t *bridge, colo_pass_t pass);
/* ragged-memory.c: all that one tensor of max_rows takes; the bridge has its plan. */
colo_status_t colo_ragged_reserve(colo_bridge_t *bridge);

/* ---- batches ---- */

struct colo_batch {
    colo_bridge_t *bridge;
    colo_ready_plan_t ready;
    colo_ragged_places_t places; /* of the plan's pool */
    colo_table_t table[COLO_TABLES];
    int32_t ntables;
    uint64_t hash; /* of all tables */
    bool compared;
};

#define COLO_RAGGED_BATCH "ragged batch" /* what ranks agree on */
/* fields.c */
colo_op_desc_t colo_batch_op(const colo_batch_t *batch, colo_pass_t pass, int32_t n);

#endif
