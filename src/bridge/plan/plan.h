/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h (private) - what the executor reads of a plan. */
#ifndef COLO_BRIDGE_PLAN_H
#define COLO_BRIDGE_PLAN_H

#include "bridge/layout/layout.h"
#include "core/list.h"

#include <colobridge/plan.h>

/* Where a region sits in this rank's own tensors: local row of its first row; -1 on a side that the
 * rank does not touch. Samples and features subtract own->b0 and own->h0. */
typedef struct colo_offset {
    int64_t src_row, dst_row;
    int32_t order; /* first of its terms, if the plan has any and this list says how to add */
} colo_offset_t;

/* One value to add up. Terms from a FIRST one on, up to the next, are a group, which is added up
 * before the groups are. */
enum { COLO_TERM_SUM = 1, COLO_TERM_FIRST = 2, COLO_TERM_LAST = 4 };
typedef struct colo_term {
    int32_t addend; /* SUM: the lowest of those that have been added up */
    int32_t use;
} colo_term_t;

typedef struct colo_entry {
    int64_t peer;
    colo_region_t region;
    colo_offset_t offset;
} colo_entry_t;

/* One list of regions, sorted by (peer, addend, b, s, h); messages point into region. */
typedef struct colo_routes {
    int32_t nmessages;
    colo_plan_message_t *message;
    int64_t nregions;
    colo_region_t *region;
    colo_offset_t *offset; /* [nregions] */
} colo_routes_t;

struct colo_plan {
    colo_plan_config_t config; /* src and dst point at the copies below */
    colo_layout_t src, dst;
    int64_t rank;
    colo_owned_t own_src, own_dst; /* own_dst: as the output is (all rows when FULL_SEQ) */
    colo_routes_t send[2], recv[2], local[2];
    /* The last exchange, after the sums: parts of what is needed, from one
     * destination to the others on its node. Offsets are those of the needed side. */
    bool two_levels[2]; /* ranks make it, with messages or without: the same on all */
    colo_routes_t relay_send[2], relay_recv[2];
    bool node_sums, sums_cross; /* the same on all ranks */
    /* Then backward has an exchange of sums after the first, if any cross. In the first, ranks of a
     * node exchange addends that they add up for others: regions of recv with addend + addends. */
    colo_routes_t sum_send, sum_recv;
    colo_term_t *term;   /* orders of addition, one after the other */
    int64_t left_out[2]; /* bytes that this rank holds and another rank adds up for it */
    int64_t entering[2]; /* this rank's part of the bytes that must enter its node */
    colo_plan_bytes_t bytes[2];
    int64_t addends;
    int64_t own_addend; /* of this rank among the addends; -1 when it holds nothing of dst */
    uint64_t hash;
    colo_pool_t *pool; /* of the lists, and of what is made for them; NULL: malloc() */
    int64_t work;      /* ranks and runs of rows looked at while it was made: what planning costs */
};

#endif
