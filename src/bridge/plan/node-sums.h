/* SPDX-License-Identifier: Apache-2.0 */
/* node-sums.h (private) - which addends of PARTIAL gradients a node adds up before their sum
 * leaves it. */
#ifndef COLO_BRIDGE_PLAN_NODE_SUMS_H
#define COLO_BRIDGE_PLAN_NODE_SUMS_H

#include "bridge/layout/ownership.h"
#include "bridge/plan/plan.h"

typedef struct colo_builder colo_builder_t; /* builder.h */

/* Which values of the held blocks are routed: the single addends first, then the sums. */
typedef struct colo_values {
    enum { COLO_SINGLES, COLO_SUMS } kind;
    int64_t addend;    /* which one; of SUMS, those with it */
    bool nodes_add_up; /* some single addends then stay on their node */
} colo_values_t;

/* A node, and an addend of the held block that ranks of it have. */
typedef struct colo_node_addend {
    int64_t node, addend;
} colo_node_addend_t;

/* A rank that holds an addend of the held block. */
typedef struct colo_addend_source {
    int64_t node, addend, rank;
} colo_addend_source_t;

/* What an addend is added up with: the node that it is named by, its lowest addend, how many. */
typedef struct colo_sum_group {
    int64_t home, lead, n;
} colo_sum_group_t;

/* What is known of the held block where nodes add up. */
typedef struct colo_node_sums {
    colo_list_t sources; /* colo_addend_source_t */
    colo_list_t groups;  /* colo_sum_group_t by addend */
    colo_list_t terms;   /* colo_term_t: orders of addition of the whole plan */
} colo_node_sums_t;

/* The first of gateways.nodes that is of @node or of a later one. */
int64_t colo_node_addends_first(colo_builder_t *builder, int64_t node);

/* Divides the addends of the held block into groups; gateways.c knows its nodes. */
colo_status_t colo_node_sums_group(colo_builder_t *builder);
/* Does @rank, which needs the block, get @values? */
bool colo_node_sums_reach(colo_builder_t *builder, const colo_values_t *values, int64_t rank);
/* Is the addend of @values the lowest of its group? */
bool colo_node_sums_lead(const colo_builder_t *builder, const colo_values_t *values);
/* Bytes of an element that the sum @values is less than its addends. */
int64_t colo_node_sums_saving(const colo_builder_t *builder, const colo_values_t *values);
/* Ranks that can send the sum @values, ascending. @ranks: out, int64_t. */
colo_status_t colo_node_sums_sources(colo_builder_t *builder, const colo_values_t *values,
                                     colo_list_t *ranks);
/* The terms that a rank of @node adds up: of the group of @addend, or with @addend < 0 of all.
 * @first: out, in the plan's terms. */
colo_status_t colo_node_sums_order(colo_builder_t *builder, int64_t node, int64_t addend,
                                   int32_t *first);
/* The terms of rows that are @partial where no node adds up: addend by addend. */
colo_status_t colo_addends_order(colo_builder_t *builder, const colo_partial_t *partial,
                                 int32_t *first);
/* The rank that sends @addend to @collector, of its node. */
int64_t colo_node_sums_helper(const colo_builder_t *builder, int64_t collector, int64_t addend);

#endif
