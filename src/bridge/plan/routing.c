/* SPDX-License-Identifier: Apache-2.0 */
/*
 * routing.c - what one rank receives and sends, overlap by overlap.
 *
 * An overlap is where a needed block meets a held block (blocks.c). A rank receives the overlaps of
 * the held blocks that meet its needed block, and may have to send those of its held block;
 * senders.c says which rank sends each. Forward: destinations are destination ranks, sources source
 * ranks; backward in the other direction. With PARTIAL gradients each addend is a source
 * side of its own, and what it sends is an addend.
 *
 * Cost: a rank visits only blocks that overlap its own. If a turn decides, a destination also
 * visits the blocks that a held block feeds before its own. Each visited block costs its replicas
 * times the logarithm of the sources, whatever the size of the world.
 */
#include "bridge/plan/nodes.h"
#include "bridge/plan/routing.h"

#include "core/error.h"

/* Appends to @out the rows that a needed and a held block share, as runs that are contiguous in
 * both; by row. Boxes are set later. */
static colo_status_t share_rows(colo_list_t *out, int32_t addend, const colo_runs_t *src,
                                const colo_runs_t *dst)
{
    int64_t last_src = -1, last_dst = -1; /* where the run before ends */
    const int64_t first = out->n;
    if (src->n == 0 || dst->n == 0)
        return COLO_OK;
    int64_t i = colo_first_behind(COLO_RANGES(src->run, row, count), 0, src->n, dst->run[0].row),
            j = colo_first_behind(COLO_RANGES(dst->run, row, count), 0, dst->n, src->run[0].row);
    while (i < src->n && j < dst->n) {
        const colo_run_t *from = &src->run[i], *to = &dst->run[j];
        int64_t x1 = from->row + from->count, y1 = to->row + to->count;
        int64_t lo = from->row > to->row ? from->row : to->row, hi = x1 < y1 ? x1 : y1;
        int64_t src_row = from->local + (lo - from->row), dst_row = to->local + (lo - to->row);
        i += x1 == hi;
        j += y1 == hi;
        if (lo >= hi)
            continue;
        colo_entry_t *entry = out->items;
        if (out->n > first && entry[out->n - 1].region.s[1] == lo && last_src == src_row &&
            last_dst == dst_row)
            entry[out->n - 1].region.s[1] = hi;
        else {
            COLO_PUSH(out, "plan: %lld regions",
                      (colo_entry_t){.region = {.s = {lo, hi}, .addend = addend},
                                     .offset = {.src_row = src_row, .dst_row = dst_row}});
        }
        last_src = src_row + (hi - lo);
        last_dst = dst_row + (hi - lo);
    }
    return COLO_OK;
}

/* The overlap of a needed and a held block: rows by share_rows(), one range of the other axes. */
static void set_box(colo_builder_t *builder, const colo_bounds_t *one, const colo_bounds_t *other)
{
    colo_entry_t *entry = builder->overlaps.items;
    for (int64_t i = 0; i < builder->overlaps.n; i++) {
        colo_region_t *region = &entry[i].region;
        region->b[0] = one->b.lo > other->b.lo ? one->b.lo : other->b.lo;
        region->b[1] = one->b.hi < other->b.hi ? one->b.hi : other->b.hi;
        region->h[0] = one->h.lo > other->h.lo ? one->h.lo : other->h.lo;
        region->h[1] = one->h.hi < other->h.hi ? one->h.hi : other->h.hi;
    }
}

/* The block of @rank on @side. false: it has none there, or not at this addend. */
static bool find_block(const colo_builder_t *builder, const colo_side_t *side, int64_t rank,
                       int64_t *coords, colo_block_t *block, colo_bounds_t *bounds)
{
    if (!colo_layout_coords(side->layout, rank, coords))
        return false;
    for (int i = 0; side->addend_fixed && i < COLO_MAX_DIMS; i++)
        if (side->fixed[i] >= 0 && side->fixed[i] != coords[i])
            return false;
    colo_block_of(side, coords, block);
    return colo_block_bounds(side, coords, bounds);
}

static int64_t choices(const colo_list_t met[3])
{
    return met[0].n * met[1].n * met[2].n;
}

/* Has choice @i other rows than the one before? */
static bool other_rows(const colo_list_t met[3], int64_t i)
{
    return met[COLO_ROWS].n > 1 ? i % met[COLO_FEATURES].n == 0 : i == 0;
}

/* This rank's block, and a block of the other side that it meets. */
typedef struct intersection {
    colo_bounds_t me, other;
    bool me_is_src;
    int64_t pos[COLO_MAX_DIMS]; /* of the other block */
    colo_extent_t extent;       /* of what both share */
} intersection_t;

static bool keeps_meetings(const colo_builder_t *builder)
{
    return builder->cfg->output == COLO_SHARDED;
}

/* Lists the blocks of @side that meet mine. */
static colo_status_t intersect_blocks(colo_builder_t *builder, const colo_side_t *side,
                                      const intersection_t *intersection)
{
    colo_intersections_t *intersections = &builder->intersections[intersection->me_is_src];
    if (intersections->complete)
        return COLO_OK;
    intersections->first.n = intersections->overlap.n = 0;
    return colo_blocks_meet(side, &intersection->me, intersections->met);
}

/* Choice @i of them: builder->overlaps, pos and extent. Choices come in their order. */
static colo_status_t intersect(colo_builder_t *builder, const colo_side_t *side, int64_t i,
                               int32_t addend, intersection_t *intersection)
{
    colo_intersections_t *intersections = &builder->intersections[intersection->me_is_src];
    int64_t *first = intersections->first.items, from = 0, end;
    colo_blocks_nth(intersections->met, i, intersection->pos, &intersection->extent);
    if (!intersections->complete) {
        const bool others = other_rows(intersections->met, i);
        if (others && !keeps_meetings(builder))
            intersections->overlap.n = 0;
        from = others ? intersections->overlap.n : 0;
        if (others) {
            const colo_runs_t *mine = intersection->me.runs, *theirs = &builder->other;
            COLO_TRY(side->owns->rows(side, intersection->pos, mine, &builder->other));
            COLO_TRY(share_rows(&intersections->overlap, addend,
                                intersection->me_is_src ? mine : theirs,
                                intersection->me_is_src ? theirs : mine));
        } else if (keeps_meetings(builder)) {
            from = intersections->overlap.n;
            for (int64_t k = first[i - 1]; k < from; k++)
                COLO_PUSH(&intersections->overlap, "plan: %lld regions",
                          ((colo_entry_t *)intersections->overlap.items)[k]);
        }
        (void)colo_block_bounds(side, intersection->pos, &intersection->other);
        builder->overlaps = (colo_list_t){(colo_entry_t *)intersections->overlap.items + from,
                                          intersections->overlap.n - from, 0};
        set_box(builder, &intersection->me, &intersection->other);
        if (!keeps_meetings(builder))
            return COLO_OK;
        COLO_PUSH(&intersections->first, "plan: %lld blocks", from);
        intersections->complete = i + 1 == choices(intersections->met);
        return COLO_OK;
    }
    end = i + 1 < intersections->first.n ? first[i + 1] : intersections->overlap.n;
    builder->overlaps =
        (colo_list_t){(colo_entry_t *)intersections->overlap.items + first[i], end - first[i], 0};
    return COLO_OK;
}

/* Passes the turns of a held block on up to the overlap of needed block @mine. */
static colo_status_t schedule_overlap(colo_builder_t *builder, colo_schedule_t *schedule,
                                      const colo_side_t *need, const colo_side_t *hold,
                                      intersection_t *intersection, const colo_block_t *mine)
{
    const colo_runs_t *own = intersection->me.runs;
    colo_bounds_t *held = &intersection->other;
    colo_run_t first = {.count =
                            own->n ? own->run[own->n - 1].row + own->run[own->n - 1].count : 0};
    const colo_runs_t within = {.run = &first, .n = 1};
    /* an intersection may have been kept, or has only the rows that this rank shares */
    (void)colo_block_bounds(hold, intersection->pos, held);
    COLO_TRY(
        hold->owns->rows(hold, intersection->pos, need->ascends ? &within : NULL, &builder->other));
    builder->plan->work += builder->by_table ? builder->other.n : 0;
    COLO_TRY(colo_blocks_meet(need, held, builder->fed));
    for (int64_t i = 0; i < choices(builder->fed); i++) {
        int64_t pos[COLO_MAX_DIMS];
        colo_extent_t extent;
        colo_block_t block;
        colo_blocks_nth(builder->fed, i, pos, &extent);
        colo_block_of(need, pos, &block);
        COLO_TRY(colo_sender_count(builder, schedule, need, &block, &extent));
        if (colo_block_cmp(&block, mine) == 0)
            break;
        colo_sender_pass(builder, schedule, &extent);
    }
    return COLO_OK;
}

/* Says of builder->overlaps which addend they are of, and how they are added up. */
static void stamp(colo_builder_t *builder, int64_t addend, int32_t order)
{
    colo_entry_t *entry = builder->overlaps.items;
    for (int64_t i = 0; i < builder->overlaps.n; i++) {
        entry[i].region.addend = (int32_t)addend;
        entry[i].offset.order = order;
    }
}

/* What this rank receives of the held blocks that meet its needed block. */
static colo_status_t take(colo_builder_t *builder, const colo_side_t *need, const colo_side_t *hold,
                          int32_t addend, bool need_is_src)
{
    intersection_t intersection = {.other.runs = &builder->other, .me_is_src = need_is_src};
    int64_t pos[COLO_MAX_DIMS];
    colo_block_t mine, block;
    if (!find_block(builder, need, builder->plan->rank, pos, &mine, &intersection.me))
        return COLO_OK;
    builder->out =
        builder->sums ? &builder->found[COLO_NODE_SUMS].recvs : &builder->found[COLO_FIRST].recvs;
    COLO_TRY(colo_block_own_rows(builder, need, pos, &intersection.me.runs));
    COLO_TRY(intersect_blocks(builder, hold, &intersection));
    for (int64_t i = 0, n = choices(builder->intersections[need_is_src].met); i < n; i++) {
        COLO_TRY(intersect(builder, hold, i, addend, &intersection));
        colo_block_of(hold, intersection.pos, &block);
        COLO_TRY(colo_sender_sources(builder, hold, &block));
        if (!colo_node_sums_reach(builder, builder->plan->rank) ||
            (builder->sums && !colo_node_sums_lead(builder)))
            continue;
        if (builder->summing && addend == 0) {
            int32_t order;
            const int64_t node = colo_location_of(builder->cfg, builder->plan->rank).node;
            COLO_TRY(colo_node_sums_order(builder, node, false, &order));
            stamp(builder, addend, order);
        }
        colo_sharers_t sharers = colo_sender_group(builder, builder->plan->rank);
        colo_schedule_t schedule[4] = {0};
        schedule[sharers.tier] = (colo_schedule_t){.group = sharers, .m = 1};
        if (sharers.tier > 0 && sharers.n > 1) /* else one candidate serves all */
            COLO_TRY(colo_sender_count(builder, schedule, need, &mine, &intersection.extent));
        else if (builder->held.several_nodes)
            COLO_TRY(colo_sender_list(builder, need, &mine));
        const colo_destinations_t node = colo_gateways_of(builder, builder->plan->rank);
        colo_gateway_share_t share;
        const int64_t count = colo_extent_count(&intersection.extent);
        const bool gets =
            colo_gateways_share(builder, &node, node.mine, &intersection.extent, &share);
        if (builder->held.several_nodes && sharers.tier > 1) /* evenly over those that need it */
            builder->counted.minimum +=
                (colo_part_lo(count, node.n, node.mine + 1, 0) -
                 colo_part_lo(count, node.n, node.mine, 0)) *
                (int64_t)(builder->sums ? builder->sum_elem : builder->elem);
        if (addend == 0)
            COLO_TRY(colo_gateways_pass_on(builder, &node, &intersection.extent));
        if (builder->sums)
            builder->counted.left_out += count * colo_node_sums_saving(builder);
        if (sharers.tier == 0)
            builder->counted.left_out +=
                (!gets         ? count
                 : share.whole ? 0
                               : count - colo_extent_count(&share.extent)) *
                (int64_t)builder->elem;
        if (!gets)
            continue;
        if (sharers.tier == 0) {
            COLO_TRY(colo_gateway_cut(builder, &share, builder->out, builder->plan->rank));
            continue;
        }
        if (sharers.n > 1 && schedule[sharers.tier].m % sharers.n)
            COLO_TRY(schedule_overlap(builder, schedule, need, hold, &intersection, &mine));
        COLO_TRY(colo_sender_assign(
            builder, &schedule[sharers.tier], &intersection.extent, &share,
            &(colo_served_t){schedule[sharers.tier].mine, builder->plan->rank, false}));
    }
    return COLO_OK;
}

/* What builder->self sends of its held block. */
static colo_status_t give(colo_builder_t *builder, const colo_side_t *hold, const colo_side_t *need,
                          int32_t addend, bool need_is_src)
{
    intersection_t intersection = {.other.runs = &builder->other, .me_is_src = !need_is_src};
    int64_t pos[COLO_MAX_DIMS];
    colo_block_t mine, block;
    colo_schedule_t schedule[4] = {0};
    if (!find_block(builder, hold, builder->self, pos, &mine, &intersection.me))
        return COLO_OK;
    builder->out = builder->sums ? &builder->given : &builder->found[COLO_FIRST].sends;
    COLO_TRY(colo_block_own_rows(builder, hold, pos, &intersection.me.runs));
    COLO_TRY(intersect_blocks(builder, need, &intersection));
    COLO_TRY(colo_sender_sources(builder, hold, &mine));
    for (int tier = 1; tier <= 3; tier++)
        schedule[tier].group = colo_sender_candidates(builder, tier, builder->self);
    for (int64_t i = 0, n = choices(builder->intersections[!need_is_src].met); i < n; i++) {
        COLO_TRY(intersect(builder, need, i, addend, &intersection));
        colo_block_of(need, intersection.pos, &block);
        COLO_TRY(colo_sender_count(builder, schedule, need, &block, &intersection.extent));
        const int64_t *destination = builder->destinations.items;
        int64_t served[4] = {0};
        for (int64_t j = 0; j < builder->destinations.n; j++) {
            colo_sharers_t sharers = colo_sender_group(builder, destination[j]);
            colo_gateway_share_t share;
            if (!colo_sender_watched(schedule, &sharers))
                continue;
            const colo_destinations_t node = colo_gateways_of(builder, destination[j]);
            if (colo_gateways_share(builder, &node, node.mine, &intersection.extent, &share))
                COLO_TRY(colo_sender_assign(
                    builder, &schedule[sharers.tier], &intersection.extent, &share,
                    &(colo_served_t){served[sharers.tier]++, destination[j], true}));
        }
        colo_sender_pass(builder, schedule, &intersection.extent);
    }
    return COLO_OK;
}

static colo_status_t push_given(colo_list_t *out, const colo_entry_t *given, int64_t peer,
                                int64_t addend, int32_t order)
{
    colo_entry_t entry = *given;
    entry.peer = peer;
    entry.region.addend = (int32_t)addend;
    entry.offset.order = order;
    COLO_PUSH(out, "plan: %lld regions", entry);
    return COLO_OK;
}

/* What @collector sends of sums with its own addend @addend: the sums if it is this rank, and the
 * other addends, which it receives; else this rank's addend, which it sends to @collector. */
static colo_status_t collect(colo_builder_t *builder, const colo_side_t *hold,
                             const colo_side_t *need, int64_t collector, int32_t addend,
                             bool need_is_src)
{
    const colo_plan_t *plan = builder->plan;
    int32_t order = 0;
    builder->given.n = 0;
    builder->self = collector;
    const colo_status_t st = give(builder, hold, need, addend, need_is_src);
    builder->self = plan->rank;
    COLO_TRY(st);
    if (builder->given.n == 0)
        return COLO_OK;
    const colo_sum_group_t *group = builder->held.groups.items;
    if (collector == plan->rank)
        COLO_TRY(colo_node_sums_order(builder, colo_location_of(builder->cfg, plan->rank).node,
                                      true, &order));
    for (int64_t i = 0; i < builder->given.n; i++) {
        const colo_entry_t entry = ((const colo_entry_t *)builder->given.items)[i];
        if (collector != plan->rank) {
            COLO_TRY(push_given(&builder->found[COLO_FIRST].sends, &entry, collector,
                                plan->addends + plan->own_addend, 0));
            continue;
        }
        COLO_TRY(push_given(&builder->found[COLO_NODE_SUMS].sends, &entry, entry.peer,
                            group[addend].lead, order));
        for (int64_t other = 0; other < plan->addends; other++)
            if (other != addend && group[other].lead == group[addend].lead)
                COLO_TRY(push_given(&builder->found[COLO_FIRST].recvs, &entry,
                                    colo_node_sums_helper(builder, collector, other),
                                    plan->addends + other, 0));
    }
    return COLO_OK;
}

/* The sums with @addend of this rank's block that ranks of its node send, where it takes part. */
static colo_status_t give_sums(colo_builder_t *builder, const colo_side_t *hold,
                               const colo_side_t *need, int32_t addend, bool need_is_src)
{
    const int64_t rank = builder->plan->rank, own = builder->plan->own_addend;
    const int64_t node = colo_location_of(builder->cfg, rank).node;
    int64_t coords[COLO_MAX_DIMS];
    colo_block_t block;
    if (!colo_layout_coords(hold->layout, rank, coords))
        return COLO_OK;
    colo_block_of(hold, coords, &block);
    COLO_TRY(colo_sender_sources(builder, hold, &block));
    const colo_sum_group_t *group = builder->held.groups.items;
    if (group[addend].lead != group[own].lead || group[own].n == 1)
        return COLO_OK;
    for (int64_t i = 0, n = builder->held.addends.n; i < n;
         i++) { /* give() lists the same ones again */
        const colo_addend_source_t source =
            ((const colo_addend_source_t *)builder->held.addends.items)[i];
        if (source.addend == addend && source.node == node &&
            (source.rank == rank ||
             (addend != own && colo_node_sums_helper(builder, source.rank, own) == rank)))
            COLO_TRY(collect(builder, hold, need, source.rank, addend, need_is_src));
    }
    return COLO_OK;
}

colo_status_t colo_overlaps_find(colo_builder_t *builder, const colo_side_t *need,
                                 const colo_side_t *hold, int32_t addend, bool need_is_src)
{
    builder->held.addend = addend;
    builder->self = builder->plan->rank;
    COLO_TRY(take(builder, need, hold, addend, need_is_src));
    return builder->sums ? give_sums(builder, hold, need, addend, need_is_src)
                         : give(builder, hold, need, addend, need_is_src);
}
