/* SPDX-License-Identifier: Apache-2.0 */
/* senders.h (private) - the routing rule: which replica of a held block sends an overlap to which
 * destination. */
#ifndef COLO_BRIDGE_PLAN_SENDERS_H
#define COLO_BRIDGE_PLAN_SENDERS_H

#include "bridge/plan/gateways.h"

/* The sources of the held block, and the destinations of the overlap that is looked at. */
typedef struct colo_senders {
    colo_list_t by_node, by_rail; /* colo_source_t: sources */
    colo_list_t ranks;            /* int64_t: the same, ascending */
    colo_list_t destinations;     /* int64_t, ascending */
    colo_list_t share;            /* colo_entry_t: what a destination gets through gateways */
} colo_senders_t;

/* Destinations that share their candidates. */
typedef struct colo_sharers {
    int tier;                   /* 0 the destination itself, 1 its node, 2 its rail, 3 all */
    int64_t key;                /* which node, which rail */
    int64_t n;                  /* candidates; 0: none in this tier */
    const colo_source_t *items; /* [n] ascending */
} colo_sharers_t;

enum { COLO_DEALT = 64 }; /* candidates whose small overlaps are dealt by size */

/* A group while the overlaps of a held block go by in their order. */
typedef struct colo_schedule {
    colo_sharers_t group; /* n == 0: not watched */
    int64_t m, first,
        mine; /* of the current overlap: destinations, ordinal of the first, this rank's i */
    int64_t uncut, slice; /* candidates whose turn it is: for a small overlap, for a slice */
    bool started;         /* an overlap that was not even has gone by */
    /* of a ragged batch, whose overlaps differ in size */
    int64_t done, last; /* of the current overlap: destinations dealt, the last one's candidate */
    int64_t dealt[COLO_DEALT]; /* elements that each candidate sends in small overlaps */
} colo_schedule_t;

/* The sources of @values of the held block @block, by node and by rail. */
colo_status_t colo_sender_sources(colo_builder_t *builder, const colo_values_t *values,
                                  const colo_side_t *hold, const colo_block_t *block);
/* The candidates of @rank in one tier; its group. */
colo_sharers_t colo_sender_candidates(colo_builder_t *builder, int tier, int64_t rank);
colo_sharers_t colo_sender_group(colo_builder_t *builder, int64_t destination);
/* @schedule: [4] by tier. Is @sharers one of the groups watched? */
bool colo_sender_watched(const colo_schedule_t *schedule, const colo_sharers_t *sharers);
/* Lists the destinations of @values of an overlap. */
colo_status_t colo_sender_list(colo_builder_t *builder, const colo_values_t *values,
                               const colo_side_t *need, const colo_block_t *block);
/* The same, and counts those of watched groups that get a share. */
colo_status_t colo_sender_count(colo_builder_t *builder, const colo_values_t *values,
                                colo_schedule_t *schedule, const colo_side_t *need,
                                const colo_block_t *block, const colo_extent_t *extent);
/* Moves the turns on by the destinations of an overlap that has gone by. */
void colo_sender_skip(const colo_builder_t *builder, colo_schedule_t *schedule,
                      const colo_extent_t *extent);

/* A destination, the @i-th of its group, and what is asked for: what @sender sends it, or with
 * COLO_ANY_SENDER what it gets from whichever rank. */
enum { COLO_ANY_SENDER = -1 };
typedef struct colo_served {
    int64_t i, rank, sender;
} colo_served_t;
/* Appends to @out what @to gets of its @share of the current overlap; the peer is the destination
 * if a sender is named, else the sender. */
colo_status_t colo_sender_assign(colo_builder_t *builder, colo_schedule_t *schedule,
                                 const colo_overlap_t *overlap, const colo_gateway_share_t *share,
                                 const colo_served_t *to, colo_list_t *out);

#endif
