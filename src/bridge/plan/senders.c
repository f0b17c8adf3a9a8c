/* SPDX-License-Identifier: Apache-2.0 */
/*
 * senders.c - the routing rule: which replica of a held block sends an overlap to which
 * destination.
 *
 * A destination's candidates are the destination itself, else the sources on its node, else the
 * sources on its rail (the same index within their nodes), else all sources: n of them. The
 * destinations of an overlap that lack it and share their candidates are m. If n divides m, the
 * i-th of them takes candidate (f + i) mod n; f is the ordinal of the first of them among all
 * replicas of the needed block. Else the candidates each send an even part of the overlap or, below
 * 64 KiB, one of them sends it whole.
 *
 * What is not even then goes round robin. The overlaps of a held block have an order (sample block,
 * row block, feature block). A small overlap for one destination is one turn of the candidates; the
 * first turn is the one of candidate (ordinal of that overlap) mod n, and the next overlap begins
 * where the last one ended. If no axis of an overlap divides by n, the slices that remain take
 * turns in the same way. So one candidate never sends two small overlaps, or two such slices, more
 * than another.
 *
 * The overlaps of a ragged batch differ in size. There a small overlap goes to the candidate that
 * has the fewest elements of them so far; if several have, to the one whose turn is next. So one
 * candidate never sends more than another by more than one small overlap.
 *
 * Both ends of a message know the overlaps of a held block, their destinations and their sources
 * from coordinates, so both derive the same sender without asking.
 */
#include "bridge/plan/nodes.h"
#include "bridge/plan/routing.h"

#include "core/error.h"

#include <stdlib.h>

/* ---- candidates ---- */

colo_status_t colo_sender_sources(colo_builder_t *builder, const colo_side_t *hold,
                                  const colo_block_t *block)
{
    COLO_TRY(colo_gateways_hold(builder, hold, block));
    COLO_TRY(builder->sums
                 ? colo_node_sums_sources(builder)
                 : colo_block_ranks(builder, &builder->ranks, &hold->layout->grid, block));
    const int64_t *rank = builder->ranks.items;
    const bool known = colo_nodes_known(builder->cfg);
    builder->held.by_node.n = builder->held.by_rail.n = 0;
    for (int64_t i = 0; i < builder->ranks.n; i++) {
        const colo_location_t where = colo_location_of(builder->cfg, rank[i]);
        COLO_PUSH(&builder->held.by_node, "plan: %lld sources",
                  (colo_source_t){where.node, rank[i]});
        if (known)
            COLO_PUSH(&builder->held.by_rail, "plan: %lld sources",
                      (colo_source_t){where.rail, rank[i]});
    }
    if (builder->cfg->nodes) /* else ascending as they came */
        qsort(builder->held.by_node.items, (size_t)builder->held.by_node.n, sizeof(colo_source_t),
              colo_source_cmp);
    if (builder->held.by_rail.n > 1)
        qsort(builder->held.by_rail.items, (size_t)builder->held.by_rail.n, sizeof(colo_source_t),
              colo_source_cmp);
    return COLO_OK;
}

colo_sharers_t colo_sender_candidates(colo_builder_t *builder, int tier, int64_t rank)
{
    const colo_list_t *list = tier == 2 ? &builder->held.by_rail : &builder->held.by_node;
    colo_sharers_t sharers = {.tier = tier, .n = list->n, .items = list->items};
    if (tier == 3 || list->n == 0)
        return sharers;
    const colo_location_t where = colo_location_of(builder->cfg, rank);
    sharers.key = tier == 1 ? where.node : where.rail;
    int64_t lo = colo_source_find(builder, sharers.items, sharers.n, sharers.key, -1);
    sharers.n = colo_source_find(builder, sharers.items, sharers.n, sharers.key + 1, -1) - lo;
    sharers.items += lo;
    return sharers;
}

colo_sharers_t colo_sender_group(colo_builder_t *builder, int64_t destination)
{
    colo_sharers_t sharers = colo_sender_candidates(builder, 1, destination);
    int64_t i = colo_source_find(builder, sharers.items, sharers.n, sharers.key, destination);
    if (i < sharers.n && sharers.items[i].rank == destination)
        return (colo_sharers_t){.tier = 0};
    for (int tier = 2; sharers.n == 0; tier++)
        sharers = colo_sender_candidates(builder, tier, destination);
    return sharers;
}

bool colo_sender_watched(const colo_schedule_t *schedule, const colo_sharers_t *sharers)
{
    return sharers->tier > 0 && schedule[sharers->tier].group.n > 0 &&
           schedule[sharers->tier].group.key == sharers->key;
}

colo_status_t colo_sender_list(colo_builder_t *builder, const colo_side_t *need,
                               const colo_block_t *block)
{
    COLO_TRY(colo_block_ranks(builder, &builder->destinations, &need->layout->grid, block));
    int64_t *rank = builder->destinations.items, n = 0;
    for (int64_t i = 0; i < builder->destinations.n; i++)
        if (colo_node_sums_reach(builder, rank[i]))
            rank[n++] = rank[i];
    builder->destinations.n = n;
    return colo_gateways_need(builder);
}

colo_status_t colo_sender_count(colo_builder_t *builder, colo_schedule_t *schedule,
                                const colo_side_t *need, const colo_block_t *block,
                                const colo_extent_t *extent)
{
    COLO_TRY(colo_sender_list(builder, need, block));
    const int64_t *rank = builder->destinations.items;
    for (int tier = 1; tier <= 3; tier++)
        schedule[tier].m = 0;
    for (int64_t i = 0; i < builder->destinations.n; i++) {
        colo_sharers_t sharers = colo_sender_group(builder, rank[i]);
        colo_schedule_t *dealt = &schedule[sharers.tier];
        colo_gateway_share_t share;
        if (!colo_sender_watched(schedule, &sharers))
            continue;
        const colo_destinations_t node = colo_gateways_of(builder, rank[i]);
        if (!colo_gateways_share(builder, &node, node.mine, extent, &share))
            continue;
        if (dealt->m == 0)
            dealt->first = i;
        if (rank[i] == builder->plan->rank)
            dealt->mine = dealt->m;
        dealt->m++;
    }
    return COLO_OK;
}

/* ---- dealing ---- */

static bool deals_by_size(const colo_builder_t *builder, const colo_schedule_t *schedule)
{
    return builder->by_table && schedule->group.n <= COLO_DEALT;
}

/* A small overlap for one destination: the candidate that has the least, ties by turn. */
static int64_t deal(colo_schedule_t *schedule, const colo_extent_t *extent)
{
    const int64_t n = schedule->group.n;
    int64_t least = schedule->whole;
    for (int64_t i = 1; i < n; i++) {
        const int64_t k = (schedule->whole + i) % n;
        least = schedule->dealt[k] < schedule->dealt[least] ? k : least;
    }
    schedule->dealt[least] += colo_extent_count(extent);
    schedule->whole = (least + 1) % n;
    schedule->done++;
    return schedule->last = least;
}

void colo_sender_pass(const colo_builder_t *builder, colo_schedule_t *schedule,
                      const colo_extent_t *extent)
{
    for (int tier = 1; tier <= 3; tier++) {
        int64_t n = schedule[tier].group.n, count = schedule[tier].m;
        if (n < 2 || (count % n == 0 && schedule[tier].started))
            continue;
        if (count % n == 0)
            schedule[tier].whole = schedule[tier].slice = (schedule[tier].whole + 1) % n;
        else if (colo_is_small(builder, extent) && deals_by_size(builder, &schedule[tier]))
            while (schedule[tier].done < count)
                (void)deal(&schedule[tier], extent);
        else if (colo_is_small(builder, extent))
            schedule[tier].whole = (schedule[tier].whole + count) % n;
        else
            schedule[tier].slice =
                (schedule[tier].slice + count % n * (extent->of[colo_cut_axis(extent, n)] % n)) % n;
        schedule[tier].started |= count % n != 0;
        schedule[tier].done = 0;
    }
}

/* The candidate that sends a small overlap to the @i-th destination; i ascends. */
static int64_t dealt_to(colo_schedule_t *schedule, const colo_extent_t *extent, int64_t i)
{
    while (schedule->done <= i)
        (void)deal(schedule, extent);
    return schedule->last;
}

static colo_status_t assign(colo_builder_t *builder, colo_schedule_t *schedule,
                            const colo_extent_t *extent, const colo_extent_t *part,
                            const colo_served_t *to)
{
    const colo_source_t *source = schedule->group.items;
    int64_t n = schedule->group.n;
    bool even = schedule->m % n == 0;
    if (even || colo_is_small(builder, part)) {
        const int64_t k = even                               ? schedule->first + to->i
                          : deals_by_size(builder, schedule) ? dealt_to(schedule, extent, to->i)
                                                             : schedule->whole + to->i;
        const int64_t sender = source[k % n].rank;
        return to->sends && sender != builder->self
                   ? COLO_OK
                   : colo_overlaps_push(builder, to->sends ? to->rank : sender);
    }
    int axis = colo_cut_axis(part, n);
    int64_t length = part->of[axis], rotation = (schedule->slice + to->i % n * (length % n)) % n;
    for (int64_t k = 0; k < n; k++)
        if (!to->sends || source[k].rank == builder->self)
            COLO_TRY(colo_overlaps_cut(
                builder, builder->out, axis, colo_part_lo(length, n, k, rotation),
                colo_part_lo(length, n, k + 1, rotation), to->sends ? to->rank : source[k].rank));
    return COLO_OK;
}

colo_status_t colo_sender_assign(colo_builder_t *builder, colo_schedule_t *schedule,
                                 const colo_extent_t *extent, const colo_gateway_share_t *share,
                                 const colo_served_t *to)
{
    const colo_list_t all = builder->overlaps;
    if (share->whole)
        return assign(builder, schedule, extent, extent, to);
    builder->share.n = 0;
    COLO_TRY(colo_gateway_cut(builder, share, &builder->share, to->rank));
    builder->overlaps = builder->share; /* as far as this destination is concerned */
    const colo_status_t st = assign(builder, schedule, extent, &share->extent, to);
    builder->share = builder->overlaps;
    builder->overlaps = all;
    return st;
}
