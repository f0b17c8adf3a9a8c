/* SPDX-License-Identifier: Apache-2.0 */
/* routing.h (private) - what plan.c, routing.c, senders.c and blocks.c share while a plan is made.
 */
#ifndef COLO_BRIDGE_ROUTING_H
#define COLO_BRIDGE_ROUTING_H

#include "bridge/layout/ownership.h"
#include "bridge/plan/plan.h"

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

/* Answers that hold for all plans of a bridge. */
typedef struct colo_answers {
    bool asked[2], relays[2]; /* by pass */
    bool adds_up, sums_cross; /* of backward */
} colo_answers_t;

/* The held block that overlaps are sent of: its sources, and those that need it. */
typedef struct colo_held {
    colo_list_t by_node, by_rail; /* colo_source_t */
    colo_list_t nodes;            /* colo_source_t: nodes by addend (gateways.c) */
    colo_list_t addends, groups;  /* colo_addend_source_t; colo_sum_group_t by addend */
    colo_list_t needed_by;        /* colo_source_t: destinations by node */
    int64_t naddends, rotation;   /* where small overlaps begin */
    int64_t addend;               /* the one that is planned now */
    bool several_nodes;           /* then nodes and needed_by are known */
} colo_held_t;

/* This rank's rows, kept until the plan is made: source, destination, all of the destination. */
typedef struct colo_own_rows {
    colo_runs_t runs[3];
    bool known[3];
} colo_own_rows_t;

/* Bytes that are counted while a pass is planned. */
typedef struct colo_counted {
    int64_t left_out; /* that this rank holds and another rank adds up for it */
    int64_t minimum;  /* this rank's part of those that must enter its node */
} colo_counted_t;

/* Of the list that is being sorted. */
typedef struct colo_sorting {
    colo_list_t sorted, runs;
} colo_sorting_t;

typedef struct colo_builder {
    const colo_plan_config_t *cfg;
    colo_plan_t *plan;
    size_t elem, sum_elem; /* bytes of an element, and of a sum's */
    bool by_table; /* what a rank holds is in tables, not in its coordinates: overlaps differ in
                      size, and what one batch needs another may not */
    colo_found_t found[COLO_EXCHANGES];
    colo_list_t *out;                      /* of these: the one that is being made */
    colo_intersections_t intersections[2]; /* of this rank's destination and source block */
    colo_held_t held;
    colo_own_rows_t own;
    colo_answers_t answers;
    colo_counted_t counted;
    colo_list_t fed[3];       /* blocks by axis that a held block feeds */
    colo_list_t overlaps;     /* colo_entry_t: regions of one overlap; a view */
    colo_list_t share, given; /* colo_entry_t: what one gateway gets of it; by self */
    colo_sorting_t sorting;
    colo_list_t ranks, destinations; /* int64_t, ascending */
    colo_list_t terms;               /* colo_term_t */
    colo_list_t on_rank;             /* of this rank's rows of a ragged batch */
    colo_runs_t other;               /* rows of the block that was asked for last */
    bool summing;                    /* nodes add up addends of PARTIAL gradients (node-sums.c) */
    bool sums;                       /* these sums are planned now, else the single addends */
    int64_t self;                    /* the rank that sends: this one, or one that it helps */
} colo_builder_t;

/* ---- blocks.c ---- */

/* Extents of an overlap, by axis. */
typedef struct colo_extent {
    int64_t of[3];
} colo_extent_t;
static inline int64_t colo_extent_count(const colo_extent_t *extent)
{
    return extent->of[0] * extent->of[1] * extent->of[2];
}

/* What a block owns. */
typedef struct colo_bounds {
    colo_span_t b, h;
    const colo_runs_t *runs; /* ascending rows; borrowed */
} colo_bounds_t;

/* The coordinates that make @coords' block on a side; the stage counts as chosen. */
void colo_block_of(const colo_side_t *side, const int64_t *coords, colo_block_t *block);
/* The replicas of a block, ascending. */
colo_status_t colo_block_ranks(colo_builder_t *builder, colo_list_t *out, const colo_grid_t *grid,
                               const colo_block_t *block);
/* All rows of this rank on @side; kept until the plan is made. */
colo_status_t colo_block_own_rows(colo_builder_t *builder, const colo_side_t *side,
                                  const int64_t *coords, const colo_runs_t **runs);
/* Samples and features of a block, in @bounds; false: it has none. */
bool colo_block_bounds(const colo_side_t *side, const int64_t *coords, colo_bounds_t *bounds);
/* The blocks of @side that meet @bounds, as one list of choices for each axis. */
colo_status_t colo_blocks_meet(const colo_side_t *side, const colo_bounds_t *bounds,
                               colo_list_t met[3]);
/* Coordinates and extents of choice @i of what colo_blocks_meet() found: by sample block, then
 * row block, then feature block. */
void colo_blocks_nth(const colo_list_t met[3], int64_t i, int64_t *coords, colo_extent_t *extent);

/* ---- overlaps.c ---- */

/* A source, and what it is looked up by: its node, its rail. */
typedef struct colo_source {
    int64_t key, rank;
} colo_source_t;
int colo_source_cmp(const void *first, const void *second);
/* First of @n sources that does not sort before (key, rank). */
int64_t colo_source_find(colo_builder_t *builder, const colo_source_t *source, int64_t n,
                         int64_t key, int64_t rank);
/* Is an overlap of @extent not cut? */
bool colo_is_small(const colo_builder_t *builder, const colo_extent_t *extent);
/* Along which axis it is cut in @n. */
int colo_cut_axis(const colo_extent_t *extent, int64_t n);
/* Where part @k of @n begins; the longer parts are from @rotation on. */
int64_t colo_part_lo(int64_t length, int64_t n, int64_t k, int64_t rotation);
/* Pushes all of w->overlaps to w->out. */
colo_status_t colo_overlaps_push(colo_builder_t *builder, int64_t peer);
/* Pushes elements [lo, hi) along @axis of w->overlaps to @out; rows count over its regions. */
colo_status_t colo_overlaps_cut(colo_builder_t *builder, colo_list_t *out, int axis, int64_t lo,
                                int64_t hi, int64_t peer);
/* By peer, addend, samples, rows, features: the order of regions on both ends of a message. */
int colo_entry_cmp(const void *first, const void *second);

/* ---- gateways.c ---- */

/* The destinations of an overlap on one node; n 0: not known. */
typedef struct colo_destinations {
    int64_t n, mine;            /* mine: index of the destination asked for */
    const colo_source_t *items; /* [n] ascending */
    bool enters;                /* it is needed more than once, and the node lacks some of it */
} colo_destinations_t;

/* What one of them gets of the overlap from its sources: all, or [lo, hi) along axis. */
typedef struct colo_gateway_share {
    bool whole;
    int axis;
    int64_t lo, hi;
    colo_extent_t extent;
} colo_gateway_share_t;

/* Which nodes hold @block, with all its addends. */
colo_status_t colo_gateways_hold(colo_builder_t *builder, const colo_side_t *hold,
                                 const colo_block_t *block);
/* Has any node @least ranks that need the same; with @addends, @least addends of a block? If @hold
 * is not NULL, the node must also lack something of it that they need; if w->sums is set too, a sum
 * of another node. In large worlds the answer is yes. The same on all ranks. */
colo_status_t colo_gateways_share_node(colo_builder_t *builder, const colo_side_t *side,
                                       const colo_side_t *hold, bool addends, int64_t least,
                                       bool *share);
/* Sorts w->destinations by node. */
colo_status_t colo_gateways_need(colo_builder_t *builder);
colo_destinations_t colo_gateways_of(colo_builder_t *builder, int64_t destination);
/* The share of the @i-th; false: nothing. */
bool colo_gateways_share(const colo_builder_t *builder, const colo_destinations_t *destinations,
                         int64_t i, const colo_extent_t *extent, colo_gateway_share_t *share);
/* Pushes that share of w->overlaps to @out. */
colo_status_t colo_gateway_cut(colo_builder_t *builder, const colo_gateway_share_t *share,
                               colo_list_t *out, int64_t peer);
/* What this rank passes on of w->overlaps, and gets passed. */
colo_status_t colo_gateways_pass_on(colo_builder_t *builder,
                                    const colo_destinations_t *destinations,
                                    const colo_extent_t *extent);

/* ---- node-sums.c ---- */

typedef struct colo_addend_source {
    int64_t node, addend, rank;
} colo_addend_source_t;

/* What an addend is added up with: the node that it is named by, its lowest addend, how many. */
typedef struct colo_sum_group {
    int64_t home, lead, n;
} colo_sum_group_t;

/* Of the held block whose addend_sources and source_nodes are known. */
colo_status_t colo_node_sums_group(colo_builder_t *builder);
/* Does @rank, which needs the block, get the addend w->held.addend, or a sum with it if w->sums? */
bool colo_node_sums_reach(colo_builder_t *builder, int64_t rank);
/* Is w->held.addend the lowest of its group? */
bool colo_node_sums_lead(const colo_builder_t *builder);
/* Bytes of an element that a sum with w->held.addend is less than its addends. */
int64_t colo_node_sums_saving(const colo_builder_t *builder);
/* w->ranks: those that can send the sum with w->held.addend, ascending. */
colo_status_t colo_node_sums_sources(colo_builder_t *builder);
/* The terms that a rank of @node adds up: of the group of w->held.addend, else of all.
 * @first: out, in w->terms. */
colo_status_t colo_node_sums_order(colo_builder_t *builder, int64_t node, bool one_group,
                                   int32_t *first);
/* The rank that sends @addend to @collector, of its node. */
int64_t colo_node_sums_helper(const colo_builder_t *builder, int64_t collector, int64_t addend);

/* ---- senders.c ---- */

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
    int64_t whole, slice; /* candidates whose turn it is: for a small overlap, for a slice */
    bool started;         /* an overlap that was not even has gone by */
    /* of a ragged batch, whose overlaps differ in size */
    int64_t done, last; /* of the current overlap: destinations dealt, the last one's candidate */
    int64_t dealt[COLO_DEALT]; /* elements that each candidate sends in small overlaps */
} colo_schedule_t;

/* The replicas of the held block @block, by node and by rail. */
colo_status_t colo_sender_sources(colo_builder_t *builder, const colo_side_t *hold,
                                  const colo_block_t *block);
/* The candidates of @rank in one tier; its group. */
colo_sharers_t colo_sender_candidates(colo_builder_t *builder, int tier, int64_t rank);
colo_sharers_t colo_sender_group(colo_builder_t *builder, int64_t destination);
/* @schedule: [4] by tier. Is @sharers one of the groups watched? */
bool colo_sender_watched(const colo_schedule_t *schedule, const colo_sharers_t *sharers);
/* Lists the destinations of an overlap. */
colo_status_t colo_sender_list(colo_builder_t *builder, const colo_side_t *need,
                               const colo_block_t *block);
/* The same, and counts those of watched groups that get a share. */
colo_status_t colo_sender_count(colo_builder_t *builder, colo_schedule_t *schedule,
                                const colo_side_t *need, const colo_block_t *block,
                                const colo_extent_t *extent);
/* Passes the turns on by the destinations of an overlap that has gone by. */
void colo_sender_pass(const colo_builder_t *builder, colo_schedule_t *schedule,
                      const colo_extent_t *extent);
/* A destination, the @i-th of its group. */
typedef struct colo_served {
    int64_t i, rank;
    bool sends; /* what this rank sends it is asked for, else everything */
} colo_served_t;
/* Pushes what @to gets of its @share of the current overlap; peer is the destination if it sends,
 * else the sender. */
colo_status_t colo_sender_assign(colo_builder_t *builder, colo_schedule_t *schedule,
                                 const colo_extent_t *extent, const colo_gateway_share_t *share,
                                 const colo_served_t *to);

/* ---- plan.c ---- */

/* The caller's config, its missing members filled in, all its values checked. */
colo_status_t colo_plan_check_config(const colo_plan_config_t *given, colo_plan_config_t *own);
/* A plan without lists; @config is checked. Its addends, and which of them is this rank's. */
colo_status_t colo_plan_new(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank);
/* The lists of both passes between two sides, of which full, addend_fixed and fixed are set here,
 * and their bytes. COLO_ERR_ARG: these have more than 63 bits. */
colo_status_t colo_plan_route(colo_builder_t *builder, colo_side_t src, colo_side_t dst);
/* Begins a plan; lists keep their memory. */
void colo_builder_begin(colo_builder_t *builder, colo_plan_t *plan, bool by_table);
void colo_builder_deinit(colo_builder_t *builder);

/* ---- routing.c ---- */

/* Every overlap of @need that this rank receives from @hold, or sends: entries of recvs, own ones
 * with peer == this rank, and of sends. */
colo_status_t colo_overlaps_find(colo_builder_t *builder, const colo_side_t *need,
                                 const colo_side_t *hold, int32_t addend, bool need_is_src);

#endif
