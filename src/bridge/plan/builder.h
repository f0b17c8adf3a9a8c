/* SPDX-License-Identifier: Apache-2.0 */
/* builder.h (private) - a plan while it is made. Its lists keep their memory for the next plan. */
#ifndef COLO_BRIDGE_PLAN_BUILDER_H
#define COLO_BRIDGE_PLAN_BUILDER_H

#include "bridge/plan/routing.h"
#include "bridge/plan/senders.h"

/* Answers that hold for all plans of a bridge. */
typedef struct colo_answers {
    bool asked[2], relays[2]; /* by pass */
    bool adds_up, sums_cross; /* of backward */
} colo_answers_t;

/* Memory to sort a list in. */
typedef struct colo_sorting {
    colo_list_t sorted, runs;
} colo_sorting_t;

struct colo_builder {
    const colo_plan_config_t *cfg;
    colo_plan_t *plan;
    size_t elem;   /* bytes of an element */
    size_t wide;   /* how many times as long a sum's element is: it is of fp32 at least */
    bool by_table; /* what a rank holds is in tables, not in its coordinates: overlaps differ in
                      size, and what one batch needs another may not */
    colo_answers_t answers;

    /* the held block and the overlap that are looked at */
    colo_gateways_t gateways;
    colo_node_sums_t sums;
    colo_senders_t senders;
    colo_intersections_t intersections[2]; /* of this rank's destination and source block */
    colo_own_rows_t own;
    colo_runs_t other;            /* rows of the block that was asked for last */
    colo_list_t fed[3];           /* blocks by axis that a held block feeds */
    colo_list_t given;            /* colo_entry_t: what a collector sends of sums */
    colo_list_t places, partials; /* colo_place_t, colo_partial_t: of what is partial */
    colo_list_t on_rank;          /* int64_t: of this rank's rows of a ragged batch */

    /* what was found */
    colo_found_t found[COLO_EXCHANGES];
    colo_counted_t counted;
    colo_sorting_t sorting;
};

/* Begins a plan; lists keep their memory. */
void colo_builder_begin(colo_builder_t *builder, colo_plan_t *plan, bool by_table);
void colo_builder_deinit(colo_builder_t *builder);
/* The lists of both passes between two sides, and their bytes. What is partial of @dst is added up
 * in backward; full, shown and addend are set here. COLO_ERR_ARG: the bytes have more than 63 bits.
 */
colo_status_t colo_builder_route(colo_builder_t *builder, colo_side_t src, colo_side_t dst);

#endif
