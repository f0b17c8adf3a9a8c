/* SPDX-License-Identifier: Apache-2.0 */
/* routing.h (private) - what one rank receives and sends, overlap by overlap. */
#ifndef COLO_BRIDGE_PLAN_ROUTING_H
#define COLO_BRIDGE_PLAN_ROUTING_H

#include "bridge/plan/node-sums.h"
#include "bridge/plan/overlaps.h"

/* What this rank's block shares with the blocks of the other side. If rows are not split in
 * another way in backward, both passes have the same: then all are kept, else those of one block.
 */
typedef struct colo_intersections {
    colo_list_t met[3];  /* blocks by axis that meet mine */
    colo_list_t first;   /* int64_t: of each choice, where its overlap begins; kept ones */
    colo_list_t overlap; /* colo_entry_t */
    bool complete;       /* every one is there */
} colo_intersections_t;

/* The regions of one exchange, as they are found: colo_entry_t. */
typedef struct colo_found {
    colo_list_t sends, recvs;
} colo_found_t;

/* Bytes that are counted while a pass is planned. */
typedef struct colo_counted {
    int64_t needed;   /* by this rank, each as often as it has addends */
    int64_t left_out; /* that another rank adds up, or passes on, for it */
    int64_t minimum;  /* this rank's part of those that must enter its node */
} colo_counted_t;

/* The roles of the two sides in one pass. */
typedef struct colo_roles {
    colo_side_t *need, *hold; /* borrowed */
    bool need_is_src;         /* backward */
} colo_roles_t;

/* Every overlap of @values that this rank receives, or sends: entries of recvs, own ones with peer
 * == this rank, and of sends. */
colo_status_t colo_overlaps_find(colo_builder_t *builder, const colo_values_t *values,
                                 const colo_roles_t *roles);

#endif
