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
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

#include "core/error.h"

#include <stdlib.h>

/* ---- candidates ---- */

colo_status_t colo_sender_sources(colo_builder_t *builder, const colo_values_t *values,
                                  const colo_side_t *hold, const colo_block_t *block)
{
    colo_senders_t *senders = &builder->senders;
    colo_list_t *by_node = &senders->by_node, *by_rail = &senders->by_rail;
    COLO_TRY(colo_gateways_hold(builder, values->nodes_add_up, hold, block));
    COLO_TRY(values->kind == COLO_SUMS
                 ? colo_node_sums_sources(builder, values, &senders->ranks)
                 : colo_block_ranks(builder, &senders->ranks, &hold->layout->grid, block));
    const int64_t *rank = senders->ranks.items;
    const bool known = colo_nodes_known(builder->cfg);
    by_node->n = by_rail->n = 0;
    for (int64_t i = 0; i < senders->ranks.n; i++) {
        const colo_location_t where = colo_location_of(builder->cfg, rank[i]);
        COLO_PUSH(by_node, "plan: %lld sources", (colo_source_t){where.node, rank[i]});
        if (known)
            COLO_PUSH(by_rail, "plan: %lld sources", (colo_source_t){where.rail, rank[i]});
    }
    if (builder->cfg->nodes) /* else ascending as they came */
        qsort(by_node->items, (size_t)by_node->n, sizeof(colo_source_t), colo_source_cmp);
    if (by_rail->n > 1)
        qsort(by_rail->items, (size_t)by_rail->n, sizeof(colo_source_t), colo_source_cmp);
    return COLO_OK;
}

colo_sharers_t colo_sender_candidates(colo_builder_t *builder, int tier, int64_t rank)
{
    const colo_list_t *list = tier == 2 ? &builder->senders.by_rail : &builder->senders.by_node;
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

colo_status_t colo_sender_list(colo_builder_t *builder, const colo_values_t *values,
                               const colo_side_t *need, const colo_block_t *block)
{
    colo_list_t *destinations = &builder->senders.destinations;
    COLO_TRY(colo_block_ranks(builder, destinations, &need->layout->grid, block));
    int64_t *rank = destinations->items, n = 0;
    for (int64_t i = 0; i < destinations->n; i++)
        if (colo_node_sums_reach(builder, values, rank[i]))
            rank[n++] = rank[i];
    destinations->n = n;
    return colo_gateways_need(builder, destinations);
}

colo_status_t colo_sender_count(colo_builder_t *builder, const colo_values_t *values,
                                colo_schedule_t *schedule, const colo_side_t *need,
                                const colo_block_t *block, const colo_extent_t *extent)
{
    COLO_TRY(colo_sender_list(builder, values, need, block));
    const int64_t *rank = builder->senders.destinations.items;
    for (int tier = 1; tier <= 3; tier++)
        schedule[tier].m = 0;
    for (int64_t i = 0; i < builder->senders.destinations.n; i++) {
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
    int64_t least = schedule->uncut;
    for (int64_t i = 1; i < n; i++) {
        const int64_t k = (schedule->uncut + i) % n;
        least = schedule->dealt[k] < schedule->dealt[least] ? k : least;
    }
    schedule->dealt[least] += colo_extent_count(extent);
    schedule->uncut = (least + 1) % n;
    schedule->done++;
    return schedule->last = least;
}

void colo_sender_skip(const colo_builder_t *builder, colo_schedule_t *schedule,
                      const colo_extent_t *extent)
{
    for (int tier = 1; tier <= 3; tier++) {
        int64_t n = schedule[tier].group.n, count = schedule[tier].m;
        if (n < 2 || (count % n == 0 && schedule[tier].started))
            continue;
        if (count % n == 0)
            schedule[tier].uncut = schedule[tier].slice = (schedule[tier].uncut + 1) % n;
        else if (colo_is_small(extent, builder->elem) && deals_by_size(builder, &schedule[tier]))
            while (schedule[tier].done < count)
                (void)deal(&schedule[tier], extent);
        else if (colo_is_small(extent, builder->elem))
            schedule[tier].uncut = (schedule[tier].uncut + count) % n;
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

/* @part: what the destination gets of the overlap of @extent. */
static colo_status_t assign(colo_builder_t *builder, colo_schedule_t *schedule,
                            const colo_extent_t *extent, const colo_overlap_t *part,
                            const colo_served_t *to, colo_list_t *out)
{
    const colo_source_t *source = schedule->group.items;
    const bool sends = to->sender != COLO_ANY_SENDER, even = schedule->m % schedule->group.n == 0;
    const int64_t n = schedule->group.n;
    if (even || colo_is_small(&part->extent, builder->elem)) {
        const int64_t k = even                               ? schedule->first + to->i
                          : deals_by_size(builder, schedule) ? dealt_to(schedule, extent, to->i)
                                                             : schedule->uncut + to->i;
        const int64_t sender = source[k % n].rank;
        return sends && sender != to->sender
                   ? COLO_OK
                   : colo_overlap_push(part, sends ? to->rank : sender, out);
    }
    const int axis = colo_cut_axis(&part->extent, n);
    const int64_t length = part->extent.of[axis],
                  rotation = (schedule->slice + to->i % n * (length % n)) % n;
    for (int64_t k = 0; k < n; k++)
        if (!sends || source[k].rank == to->sender)
            COLO_TRY(colo_overlap_cut(part, axis, colo_part_lo(length, n, k, rotation),
                                      colo_part_lo(length, n, k + 1, rotation),
                                      sends ? to->rank : source[k].rank, out));
    return COLO_OK;
}

colo_status_t colo_sender_assign(colo_builder_t *builder, colo_schedule_t *schedule,
                                 const colo_overlap_t *overlap, const colo_gateway_share_t *share,
                                 const colo_served_t *to, colo_list_t *out)
{
    colo_list_t *cut = &builder->senders.share;
    if (share->uncut)
        return assign(builder, schedule, &overlap->extent, overlap, to, out);
    cut->n = 0;
    COLO_TRY(colo_gateway_cut(overlap, share, to->rank, cut));
    const colo_overlap_t part = {cut->items, cut->n, share->extent};
    return assign(builder, schedule, &overlap->extent, &part, to, out);
}
