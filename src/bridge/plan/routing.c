/* SPDX-License-Identifier: Apache-2.0 */
/*
 * routing.c - what one rank receives and sends, overlap by overlap.
 *
 * An overlap is where a needed block meets a held block (blocks.c). A rank receives the overlaps of
 * the held blocks that meet its needed block, and may have to send those of its held block;
 * senders.c says which rank sends each. Forward: destinations are destination ranks, sources source
 * ranks; backward in the other direction. Where rows are sums, each addend is a source side of its
 * own.
 *
 * Cost: a rank visits only blocks that overlap its own. If a turn decides, a destination also
 * visits the blocks that a held block feeds before its own. Each visited block costs its replicas
 * times the logarithm of the sources, whatever the size of the world.
 */
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

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

/* Sets the samples and features of @overlap, whose rows are there, to those that both blocks own.
 */
static void set_box(colo_overlap_t *overlap, const colo_bounds_t *one, const colo_bounds_t *other)
{
    for (int64_t i = 0; i < overlap->n; i++) {
        colo_region_t *region = &overlap->region[i].region;
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
    const colo_place_t *place = colo_side_place(side);
    if (!colo_layout_coords(side->layout, rank, coords) ||
        (place && !colo_place_has(place, coords)))
        return false;
    colo_block_of(side, coords, block);
    return colo_block_bounds(side, coords, bounds);
}

/* Has choice @i other rows than the one before? */
static bool other_rows(const colo_list_t met[3], int64_t i)
{
    return met[COLO_AXIS_ROWS].n > 1 ? i % met[COLO_AXIS_FEATURES].n == 0 : i == 0;
}

/* A block of one side, and a block of the other side that it meets. */
typedef struct intersection {
    colo_bounds_t me, other;
    bool me_is_src;
    int64_t pos[COLO_DIMS_MAX]; /* of the other block */
    colo_overlap_t overlap;     /* what both share */
} intersection_t;

static bool keeps_meetings(const colo_builder_t *builder)
{
    return builder->cfg->output == COLO_OUTPUT_SHARDED && !builder->plan->names_rows;
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

/* Choice @i of them: pos and overlap. Choices come in their order. */
static colo_status_t intersect(colo_builder_t *builder, const colo_side_t *side, int64_t i,
                               int64_t addend, intersection_t *intersection)
{
    colo_intersections_t *intersections = &builder->intersections[intersection->me_is_src];
    colo_list_t *regions = &intersections->overlap;
    colo_overlap_t *overlap = &intersection->overlap;
    int64_t *first = intersections->first.items, from = 0, end;
    colo_blocks_nth(intersections->met, i, intersection->pos, &overlap->extent);
    if (intersections->complete) {
        end = i + 1 < intersections->first.n ? first[i + 1] : regions->n;
        overlap->region = (colo_entry_t *)regions->items + first[i];
        overlap->n = end - first[i];
        return COLO_OK;
    }
    const bool others = other_rows(intersections->met, i);
    if (others && !keeps_meetings(builder))
        regions->n = 0;
    from = others ? regions->n : 0;
    if (others) {
        const colo_runs_t *mine = intersection->me.runs, *theirs = &builder->other;
        COLO_TRY(colo_side_rows(side, intersection->pos, mine, &builder->other));
        COLO_TRY(share_rows(regions, (int32_t)addend, intersection->me_is_src ? mine : theirs,
                            intersection->me_is_src ? theirs : mine));
    } else if (keeps_meetings(builder)) {
        from = regions->n;
        for (int64_t k = first[i - 1]; k < from; k++)
            COLO_PUSH(regions, "plan: %lld regions", ((colo_entry_t *)regions->items)[k]);
    }
    (void)colo_block_bounds(side, intersection->pos, &intersection->other);
    overlap->region = (colo_entry_t *)regions->items + from;
    overlap->n = regions->n - from;
    set_box(overlap, &intersection->me, &intersection->other);
    if (!keeps_meetings(builder))
        return COLO_OK;
    COLO_PUSH(&intersections->first, "plan: %lld blocks", from);
    intersections->complete = i + 1 == colo_blocks_count(intersections->met);
    return COLO_OK;
}

/* Passes the turns of a held block on up to the overlap of needed block @mine. */
static colo_status_t schedule_overlap(colo_builder_t *builder, const colo_values_t *values,
                                      colo_schedule_t *schedule, const colo_roles_t *roles,
                                      intersection_t *intersection, const colo_block_t *mine)
{
    const colo_side_t *need = roles->need, *hold = roles->hold;
    const colo_runs_t *own = intersection->me.runs;
    colo_bounds_t *held = &intersection->other;
    colo_run_t first = {.count =
                            own->n ? own->run[own->n - 1].row + own->run[own->n - 1].count : 0};
    const colo_runs_t within = {.run = &first, .n = 1};
    /* an intersection may have been kept, or has only the rows that this rank shares */
    (void)colo_block_bounds(hold, intersection->pos, held);
    COLO_TRY(
        colo_side_rows(hold, intersection->pos, need->ascends ? &within : NULL, &builder->other));
    builder->plan->work += builder->by_table ? builder->other.n : 0;
    COLO_TRY(colo_blocks_meet(need, held, builder->fed));
    for (int64_t i = 0; i < colo_blocks_count(builder->fed); i++) {
        int64_t pos[COLO_DIMS_MAX];
        colo_extent_t extent;
        colo_block_t block;
        colo_blocks_nth(builder->fed, i, pos, &extent);
        colo_block_of(need, pos, &block);
        COLO_TRY(colo_sender_count(builder, values, schedule, need, &block, &extent));
        if (colo_block_cmp(&block, mine) == 0)
            break;
        colo_sender_skip(builder, schedule, &extent);
    }
    return COLO_OK;
}

/* Says of @overlap which addend it is of, and how addends are added up. */
static void stamp(colo_overlap_t *overlap, int64_t addend, int32_t order)
{
    for (int64_t i = 0; i < overlap->n; i++) {
        overlap->region[i].region.addend = (int32_t)addend;
        overlap->region[i].offset.order = order;
    }
}

/* Counts an overlap that this rank needs, of which it gets @share, or nothing if that is NULL. */
static void count_needed(colo_builder_t *builder, const colo_values_t *values, int tier,
                         const colo_destinations_t *node, const colo_extent_t *extent,
                         const colo_gateway_share_t *share)
{
    const int64_t count = colo_extent_count(extent);
    const bool sums = values->kind == COLO_SUMS;
    colo_counted_t *counted = &builder->counted;
    if (builder->gateways.several_nodes && tier > 1) /* evenly over those that need it */
        counted->minimum += (colo_part_lo(count, node->n, node->mine + 1, 0) -
                             colo_part_lo(count, node->n, node->mine, 0)) *
                            (int64_t)(builder->elem * (sums ? builder->wide : 1));
    if (sums)
        counted->left_out += count * colo_node_sums_saving(builder, values);
    counted->left_out += (count - (share ? colo_extent_count(&share->extent) : 0)) *
                         (int64_t)(builder->elem * (sums ? builder->wide : 1));
}

/* What this rank receives of the held blocks that meet its needed block. */
static colo_status_t take(colo_builder_t *builder, const colo_values_t *values,
                          const colo_roles_t *roles)
{
    const colo_side_t *need = roles->need, *hold = roles->hold;
    const int64_t rank = builder->plan->rank;
    const colo_partial_t *partial = colo_side_partial(hold);
    colo_list_t *out =
        &builder->found[values->kind == COLO_SUMS ? COLO_EXCHANGE_NODE_SUMS : COLO_EXCHANGE_MAIN]
             .recvs;
    intersection_t intersection = {.other.runs = &builder->other, .me_is_src = roles->need_is_src};
    colo_overlap_t *overlap = &intersection.overlap;
    int64_t pos[COLO_DIMS_MAX];
    colo_block_t mine, block;
    if (!find_block(builder, need, rank, pos, &mine, &intersection.me))
        return COLO_OK;
    COLO_TRY(colo_block_own_rows(builder, need, pos, &intersection.me.runs));
    COLO_TRY(intersect_blocks(builder, hold, &intersection));
    for (int64_t i = 0, n = colo_blocks_count(builder->intersections[intersection.me_is_src].met);
         i < n; i++) {
        COLO_TRY(intersect(builder, hold, i, values->addend, &intersection));
        COLO_FAIL_IF(values->kind == COLO_SINGLES &&
                         !colo_add_ok(builder->counted.needed,
                                      colo_extent_count(&overlap->extent) * (int64_t)builder->elem,
                                      &builder->counted.needed),
                     COLO_ERR_ARG,
                     "plan: rank %lld needs more than 63 bits of bytes, with every addend counted; "
                     "give a smaller shape",
                     (long long)rank);
        colo_block_of(hold, intersection.pos, &block);
        COLO_TRY(colo_sender_sources(builder, values, hold, &block));
        if (!colo_node_sums_reach(builder, values, rank) ||
            (values->kind == COLO_SUMS && !colo_node_sums_lead(builder, values)))
            continue;
        if (values->addend == 0 && (values->nodes_add_up || colo_partial_names_rows(partial))) {
            int32_t order;
            COLO_TRY(values->nodes_add_up
                         ? colo_node_sums_order(builder, colo_location_of(builder->cfg, rank).node,
                                                -1, &order)
                         : colo_addends_order(builder, partial, &order));
            stamp(overlap, values->addend, order);
        }
        colo_sharers_t sharers = colo_sender_group(builder, rank);
        colo_schedule_t schedule[4] = {0}, *dealt = &schedule[sharers.tier];
        *dealt = (colo_schedule_t){.group = sharers, .m = 1};
        if (sharers.tier > 0 && sharers.n > 1) /* else one candidate serves all */
            COLO_TRY(colo_sender_count(builder, values, schedule, need, &mine, &overlap->extent));
        else if (builder->gateways.several_nodes)
            COLO_TRY(colo_sender_list(builder, values, need, &mine));
        const colo_destinations_t node = colo_gateways_of(builder, rank);
        colo_gateway_share_t share;
        const bool gets = colo_gateways_share(builder, &node, node.mine, &overlap->extent, &share);
        count_needed(builder, values, sharers.tier, &node, &overlap->extent, gets ? &share : NULL);
        if (values->addend == 0)
            COLO_TRY(colo_gateways_pass_on(builder, &node, overlap));
        if (!gets)
            continue;
        if (sharers.tier == 0) {
            COLO_TRY(colo_gateway_cut(overlap, &share, rank, out));
            continue;
        }
        if (sharers.n > 1 && dealt->m % sharers.n)
            COLO_TRY(schedule_overlap(builder, values, schedule, roles, &intersection, &mine));
        COLO_TRY(colo_sender_assign(builder, dealt, overlap, &share,
                                    &(colo_served_t){dealt->mine, rank, COLO_ANY_SENDER}, out));
    }
    return COLO_OK;
}

/* What @sender sends of its held block; to @out. */
static colo_status_t give(colo_builder_t *builder, const colo_values_t *values,
                          const colo_roles_t *roles, int64_t sender, colo_list_t *out)
{
    const colo_side_t *need = roles->need, *hold = roles->hold;
    intersection_t intersection = {.other.runs = &builder->other, .me_is_src = !roles->need_is_src};
    const colo_overlap_t *overlap = &intersection.overlap;
    int64_t pos[COLO_DIMS_MAX];
    colo_block_t mine, block;
    colo_schedule_t schedule[4] = {0};
    if (!find_block(builder, hold, sender, pos, &mine, &intersection.me))
        return COLO_OK;
    COLO_TRY(colo_block_own_rows(builder, hold, pos, &intersection.me.runs));
    COLO_TRY(intersect_blocks(builder, need, &intersection));
    COLO_TRY(colo_sender_sources(builder, values, hold, &mine));
    for (int tier = 1; tier <= 3; tier++)
        schedule[tier].group = colo_sender_candidates(builder, tier, sender);
    for (int64_t i = 0, n = colo_blocks_count(builder->intersections[intersection.me_is_src].met);
         i < n; i++) {
        COLO_TRY(intersect(builder, need, i, values->addend, &intersection));
        colo_block_of(need, intersection.pos, &block);
        COLO_TRY(colo_sender_count(builder, values, schedule, need, &block, &overlap->extent));
        const colo_list_t *destinations = &builder->senders.destinations;
        int64_t served[4] = {0};
        for (int64_t j = 0; j < destinations->n; j++) {
            const int64_t destination = ((const int64_t *)destinations->items)[j];
            colo_sharers_t sharers = colo_sender_group(builder, destination);
            colo_gateway_share_t share;
            if (!colo_sender_watched(schedule, &sharers))
                continue;
            const colo_destinations_t node = colo_gateways_of(builder, destination);
            if (colo_gateways_share(builder, &node, node.mine, &overlap->extent, &share))
                COLO_TRY(colo_sender_assign(
                    builder, &schedule[sharers.tier], overlap, &share,
                    &(colo_served_t){served[sharers.tier]++, destination, sender}, out));
        }
        colo_sender_skip(builder, schedule, &overlap->extent);
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

/* What @collector sends of the sums @values, of which it has the addend: the sums if it is this
 * rank, and the other addends, which it receives; else this rank's addend, which it sends to
 * @collector. */
static colo_status_t collect(colo_builder_t *builder, const colo_values_t *values,
                             const colo_roles_t *roles, int64_t collector)
{
    const colo_plan_t *plan = builder->plan;
    const int64_t addend = values->addend;
    int32_t order = 0;
    builder->given.n = 0;
    COLO_TRY(give(builder, values, roles, collector, &builder->given));
    if (builder->given.n == 0)
        return COLO_OK;
    const colo_sum_group_t *group = builder->sums.groups.items;
    if (collector == plan->rank)
        COLO_TRY(colo_node_sums_order(builder, colo_location_of(builder->cfg, plan->rank).node,
                                      addend, &order));
    for (int64_t i = 0; i < builder->given.n; i++) {
        const colo_entry_t entry = ((const colo_entry_t *)builder->given.items)[i];
        if (collector != plan->rank) {
            COLO_TRY(push_given(&builder->found[COLO_EXCHANGE_MAIN].sends, &entry, collector,
                                plan->addends + plan->own_addend, 0));
            continue;
        }
        COLO_TRY(push_given(&builder->found[COLO_EXCHANGE_NODE_SUMS].sends, &entry, entry.peer,
                            group[addend].lead, order));
        for (int64_t other = 0; other < builder->gateways.naddends; other++)
            if (other != addend && group[other].lead == group[addend].lead)
                COLO_TRY(push_given(&builder->found[COLO_EXCHANGE_MAIN].recvs, &entry,
                                    colo_node_sums_helper(builder, collector, other),
                                    plan->addends + other, 0));
    }
    return COLO_OK;
}

/* The sums @values of this rank's block that ranks of its node send, where it takes part. */
static colo_status_t give_sums(colo_builder_t *builder, const colo_values_t *values,
                               const colo_roles_t *roles)
{
    const int64_t rank = builder->plan->rank, own = builder->plan->own_addend;
    const int64_t node = colo_location_of(builder->cfg, rank).node, addend = values->addend;
    int64_t coords[COLO_DIMS_MAX];
    colo_block_t block;
    if (!colo_layout_coords(roles->hold->layout, rank, coords))
        return COLO_OK;
    colo_block_of(roles->hold, coords, &block);
    COLO_TRY(colo_sender_sources(builder, values, roles->hold, &block));
    const colo_sum_group_t *group = builder->sums.groups.items;
    if (group[addend].lead != group[own].lead || group[own].n == 1)
        return COLO_OK;
    /* give() lists the same sources again */
    for (int64_t i = 0, n = builder->sums.sources.n; i < n; i++) {
        const colo_addend_source_t source =
            ((const colo_addend_source_t *)builder->sums.sources.items)[i];
        if (source.addend == addend && source.node == node &&
            (source.rank == rank ||
             (addend != own && colo_node_sums_helper(builder, source.rank, own) == rank)))
            COLO_TRY(collect(builder, values, roles, source.rank));
    }
    return COLO_OK;
}

colo_status_t colo_overlaps_find(colo_builder_t *builder, const colo_values_t *values,
                                 const colo_roles_t *roles)
{
    COLO_TRY(take(builder, values, roles));
    return values->kind == COLO_SUMS ? give_sums(builder, values, roles)
                                     : give(builder, values, roles, builder->plan->rank,
                                            &builder->found[COLO_EXCHANGE_MAIN].sends);
}
