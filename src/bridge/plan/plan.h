/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h (private) - what run/ reads of a plan. */
#ifndef COLO_BRIDGE_PLAN_PLAN_H
#define COLO_BRIDGE_PLAN_PLAN_H

#include "bridge/layout/layout.h"
#include "core/list.h"

#include <colobridge/plan.h>

/* Where a region sits in this rank's own tensors: local row of its first row; -1 on a side that the
 * rank does not touch. Samples and features subtract own->b0 and own->h0. */
typedef struct colo_offset {
    int64_t src_row, dst_row;
    int32_t order;   /* first of its terms, if the plan has any and this list says how to add */
    int32_t sum_row; /* if the plan names rows, of backward: its first row in partial sums, which
                        have only rows of several addends; -1: its rows have one */
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

/* The exchanges of a pass. If nodes add up, ranks of a node exchange in the main one, too, what
 * they add up for others: regions with addend + addends. Relays are parts of what is needed, from
 * one destination to the others on its node; offsets are those of the needed side. */
enum { COLO_EXCHANGE_MAIN, COLO_EXCHANGE_NODE_SUMS, COLO_EXCHANGE_RELAYS, COLO_EXCHANGES };
typedef struct colo_exchange_plan {
    colo_routes_t send, recv;
    bool all_come; /* ranks make it, with messages or without: the same on all */
    bool wide;     /* of sums of nodes: elements are fp32 at least */
} colo_exchange_plan_t;

/* Rows of a tensor; of the plan's pool. */
typedef struct colo_run_list {
    colo_run_t *run; /* [n] */
    int64_t n;
} colo_run_list_t;

struct colo_plan {
    colo_plan_config_t config; /* src and dst point at the copies below */
    colo_layout_t src, dst;
    int64_t rank;
    size_t elem; /* bytes of a feature; a batch counts several of its bridge's as one */
    colo_owned_t own_src, own_dst; /* own_dst: as the output is (all rows when FULL_SEQ) */
    colo_exchange_plan_t exchange[2][COLO_EXCHANGES]; /* by pass, in the order of a call */
    colo_routes_t local[2];
    colo_run_list_t padding[2]; /* by pass, of the output: rows that are in no message, whose row is
                                   not set; local ascends */
    colo_run_list_t repeats;    /* of forward: rows that the output has at local, too, as at row */
    bool names_rows;     /* rows have addends in places of their own, each in as many as there
                            are: the same on all ranks */
    int64_t sum_rows;    /* then: of a partial sum */
    colo_term_t *term;   /* orders of addition, one after the other */
    int64_t needed[2];   /* bytes that this rank needs, each as often as it has addends */
    int64_t left_out[2]; /* bytes that another rank adds up, or passes on, for it */
    int64_t entering[2]; /* this rank's part of the bytes that must enter its node */
    colo_plan_bytes_t bytes[2];
    int64_t addends;    /* the most that a row has */
    int64_t own_addend; /* of this rank among the addends; -1 when it holds nothing of dst, or if
                           the plan names rows, so that each region says which */
    uint64_t hash;
    colo_pool_t pool; /* of the lists, and of what is made for them */
    int64_t work;     /* ranks and runs of rows looked at while it was made: what planning costs */
};

/* Do nodes add up addends of PARTIAL gradients? The same on all ranks. */
static inline bool colo_plan_sums_nodes(const colo_plan_t *plan)
{
    return plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_NODE_SUMS].wide;
}

/* Exchange @i of a pass: what this rank sends, or receives. */
static inline const colo_routes_t *colo_plan_routes(const colo_plan_t *plan, colo_pass_t pass,
                                                    int i, bool sends)
{
    const colo_exchange_plan_t *exchange = &plan->exchange[pass][i];
    return sends ? &exchange->send : &exchange->recv;
}

/* The caller's config, its missing members filled in, all its values checked (config.c). */
colo_status_t colo_plan_check_config(const colo_plan_config_t *given, colo_plan_config_t *own);
/* A plan without lists; @config is checked. */
colo_status_t colo_plan_new(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank);
/* Counts the bytes of the plan's lists (bytes.c). COLO_ERR_ARG: they have more than 63 bits. */
colo_status_t colo_plan_count_bytes(colo_plan_t *plan, bool by_table);

#endif
