/* SPDX-License-Identifier: Apache-2.0 */
/* gateways.h (private) - two levels: what several ranks of a node need enters the node once. */
#ifndef COLO_BRIDGE_PLAN_GATEWAYS_H
#define COLO_BRIDGE_PLAN_GATEWAYS_H

#include "bridge/plan/node-sums.h"
#include "bridge/plan/overlaps.h"

/* The nodes of the held block, and of those that need it. */
typedef struct colo_gateways {
    bool several_nodes;    /* else nothing below is known */
    colo_list_t nodes;     /* colo_node_addend_t, distinct, ascending */
    int64_t naddends;      /* of the block */
    int64_t rotation;      /* where small overlaps begin */
    colo_list_t needed_by; /* colo_source_t: destinations by node */
    colo_list_t ranks;     /* int64_t: replicas that are looked at */
} colo_gateways_t;

/* The destinations of an overlap on one node; n 0: not known. */
typedef struct colo_destinations {
    int64_t n, mine;            /* mine: index of the destination asked for */
    const colo_source_t *items; /* [n] ascending */
    bool enters;                /* it is needed more than once, and the node lacks some of it */
} colo_destinations_t;

/* What one of them gets of the overlap from its sources: all, or [lo, hi) along axis. */
typedef struct colo_gateway_share {
    bool uncut;
    int axis;
    int64_t lo, hi;
    colo_extent_t extent;
} colo_gateway_share_t;

/* Which nodes hold @block, with all its addends; if nodes add up, which addends they add up. */
colo_status_t colo_gateways_hold(colo_builder_t *builder, bool nodes_add_up,
                                 const colo_side_t *hold, const colo_block_t *block);

/* Has any node @least ranks that need the same block of @side; with @addends, @least addends of a
 * block? If @hold is not NULL, the node must also lack something of it that they need; of SUMS, a
 * sum of another node. In large worlds the answer is yes. The same on all ranks. */
typedef struct colo_node_question {
    const colo_side_t *side, *hold;
    bool addends;
    int64_t least;
    colo_values_t values;
} colo_node_question_t;
colo_status_t colo_gateways_ask(colo_builder_t *builder, const colo_node_question_t *question,
                                bool *yes);

/* Sorts @ranks, int64_t, the destinations of an overlap, by node. */
colo_status_t colo_gateways_need(colo_builder_t *builder, const colo_list_t *ranks);
colo_destinations_t colo_gateways_of(colo_builder_t *builder, int64_t destination);
/* The share of the @i-th; false: nothing. */
bool colo_gateways_share(const colo_builder_t *builder, const colo_destinations_t *destinations,
                         int64_t i, const colo_extent_t *extent, colo_gateway_share_t *share);
/* Appends that share of @overlap to @out. */
colo_status_t colo_gateway_cut(const colo_overlap_t *overlap, const colo_gateway_share_t *share,
                               int64_t peer, colo_list_t *out);
/* What this rank passes on of @overlap, and gets passed. */
colo_status_t colo_gateways_pass_on(colo_builder_t *builder,
                                    const colo_destinations_t *destinations,
                                    const colo_overlap_t *overlap);

#endif
