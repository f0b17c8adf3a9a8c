/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gateways.c - two levels: what several ranks of a node need and none of them holds enters the node
 * once.
 *
 * The destinations of an overlap on one node all need all of it. If no rank of the node holds it
 * (PARTIAL: if an addend of it is missing there), it is cut evenly over them, or below 64 KiB a
 * part, goes whole to one of them, in turn by the coordinates of the held block. Each gets only its
 * part from other nodes, as senders.c says, and then passes it on to the others on its node. With
 * PARTIAL gradients a destination gets all addends of its part, also those from its node, and
 * passes on the sum.
 *
 * The destinations on a node and the sources of a block follow from coordinates, so all ranks cut
 * alike without asking.
 */
#include "bridge/plan/nodes.h"
#include "bridge/plan/routing.h"

#include "core/error.h"

#include <stdlib.h>

/* Adds the nodes that have sources of @block, at @addend. */
static colo_status_t add_sources(colo_builder_t *builder, const colo_side_t *hold,
                                 const colo_block_t *block, int64_t addend)
{
    COLO_TRY(colo_block_ranks(builder, &builder->ranks, &hold->layout->grid, block));
    for (int64_t i = 0; i < builder->ranks.n; i++) {
        const int64_t rank = ((int64_t *)builder->ranks.items)[i];
        const int64_t node = colo_location_of(builder->cfg, rank).node;
        COLO_PUSH(&builder->held.nodes, "plan: %lld sources", (colo_source_t){node, addend});
        if (builder->summing)
            COLO_PUSH(&builder->held.addends, "plan: %lld sources",
                      (colo_addend_source_t){node, addend, rank});
    }
    return COLO_OK;
}

colo_status_t colo_gateways_hold(colo_builder_t *builder, const colo_side_t *hold,
                                 const colo_block_t *part)
{
    colo_block_t block = *part;
    builder->held.nodes.n = builder->held.addends.n = builder->held.rotation = 0;
    builder->held.naddends = 1;
    if (!builder->held.several_nodes)
        return COLO_OK;
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        if (hold->addend_fixed && hold->fixed[i] >= 0)
            builder->held.naddends *= hold->layout->grid.extent[i];
        else
            builder->held.rotation += part->coord[i] > 0 ? part->coord[i] : 0;
    for (int64_t addend = 0; addend < builder->held.naddends; addend++) {
        int64_t left = addend;
        for (int i = 0; i < COLO_MAX_DIMS; i++)
            if (hold->addend_fixed && hold->fixed[i] >= 0) {
                block.coord[i] = left % hold->layout->grid.extent[i];
                left /= hold->layout->grid.extent[i];
            }
        COLO_TRY(add_sources(builder, hold, &block, addend));
    }
    colo_source_t *source = builder->held.nodes.items;
    int64_t n = 0;
    qsort(source, (size_t)builder->held.nodes.n, sizeof *source, colo_source_cmp);
    for (int64_t i = 0; i < builder->held.nodes.n; i++)
        if (n == 0 || colo_source_cmp(&source[n - 1], &source[i]) != 0)
            source[n++] = source[i];
    builder->held.nodes.n = n;
    return builder->summing ? colo_node_sums_group(builder) : COLO_OK;
}

/* How many addends of the held block @node has. */
static int64_t held_on(colo_builder_t *builder, int64_t node)
{
    const colo_source_t *held = builder->held.nodes.items;
    return colo_source_find(builder, held, builder->held.nodes.n, node + 1, -1) -
           colo_source_find(builder, held, builder->held.nodes.n, node, -1);
}

static int by_node_and_block(const void *first, const void *second)
{
    return colo_compare(first, second, 3);
}

/* Does @rank need a sum of the held block from another node? */
static bool gets_sums(colo_builder_t *builder, int64_t rank)
{
    for (builder->held.addend = 0; builder->held.addend < builder->held.naddends;
         builder->held.addend++)
        if (colo_node_sums_reach(builder, rank))
            return true;
    return false;
}

/* Does @node lack anything of @hold that its rank @rank needs? If builder->sums is set: any sum? A
 * ragged batch may bring any rows, so the answer is yes. */
static colo_status_t is_lacking(colo_builder_t *builder, const colo_side_t *need,
                                const colo_side_t *hold, int64_t rank, int64_t node, bool *lacks)
{
    const colo_shape_t *shape = &builder->cfg->shape;
    int64_t coords[COLO_MAX_DIMS];
    colo_runs_t *rows = &builder->other;
    colo_bounds_t bounds = {.runs = rows};
    colo_block_t block;
    colo_extent_t extent;
    *lacks = builder->by_table || shape->samples == 0 || shape->rows == 0 || shape->features == 0;
    (void)colo_grid_coords(&need->layout->grid, rank, coords);
    if (*lacks || !colo_block_bounds(need, coords, &bounds))
        return COLO_OK;
    COLO_TRY(need->owns->rows(need, coords, NULL, rows));
    COLO_TRY(colo_blocks_meet(hold, &bounds, builder->fed));
    for (int64_t i = 0; i < builder->fed[0].n * builder->fed[1].n * builder->fed[2].n && !*lacks;
         i++) {
        colo_blocks_nth(builder->fed, i, coords, &extent);
        colo_block_of(hold, coords, &block);
        COLO_TRY(colo_gateways_hold(builder, hold, &block));
        *lacks = builder->sums ? gets_sums(builder, rank)
                               : held_on(builder, node) < builder->held.naddends;
    }
    return COLO_OK;
}

colo_status_t colo_gateways_share_node(colo_builder_t *builder, const colo_side_t *side,
                                       const colo_side_t *hold, bool addends, int64_t least,
                                       bool *share)
{
    enum { LARGE = 1024 }; /* ranks that are looked at */
    const colo_grid_t *grid = &side->layout->grid;
    colo_side_t all = *side;
    int64_t n = 0;
    all.addend_fixed = false;
    *share = grid->size > LARGE;
    if (*share)
        return COLO_OK;
    COLO_AUTOFREE int64_t(*key)[3] = malloc((size_t)grid->size * sizeof *key);
    COLO_FAIL_IF(!key, COLO_ERR_NOMEM, "plan: %lld ranks", (long long)grid->size);
    for (int64_t rank = grid->offset; rank < grid->offset + grid->size; rank++) {
        int64_t coords[COLO_MAX_DIMS];
        colo_block_t block;
        if (!colo_layout_coords(side->layout, rank, coords))
            continue;
        colo_block_of(&all, coords, &block);
        key[n][0] = colo_location_of(builder->cfg, rank).node;
        key[n][1] = key[n][2] = 0;
        for (int i = 0; i < grid->ndims; i++) {
            key[n][1] = key[n][1] * grid->extent[i] + (block.coord[i] < 0 ? 0 : coords[i]);
            if (addends && side->fixed[i] >= 0)
                key[n][2] = key[n][2] * grid->extent[i] + coords[i];
        }
        if (!addends)
            key[n][2] = rank;
        n++;
    }
    qsort(key, (size_t)n, sizeof *key, by_node_and_block);
    for (int64_t i = 0, k = 0; i < n && !*share; i++) {
        const bool first = i == 0 || key[i][0] != key[i - 1][0] || key[i][1] != key[i - 1][1];
        const bool other = first || key[i][2] != key[i - 1][2];
        k = first ? 1 : k + other;
        *share = k >= least;
        if (k == least && other && hold)
            COLO_TRY(is_lacking(builder, side, hold, key[i][2], key[i][0], share));
        else if (hold)
            *share = false;
    }
    return COLO_OK;
}

colo_status_t colo_gateways_need(colo_builder_t *builder)
{
    const int64_t *rank = builder->destinations.items;
    builder->held.needed_by.n = 0;
    for (int64_t i = 0; builder->held.several_nodes && i < builder->destinations.n; i++)
        COLO_PUSH(&builder->held.needed_by, "plan: %lld destinations",
                  (colo_source_t){colo_location_of(builder->cfg, rank[i]).node, rank[i]});
    if (builder->cfg->nodes && builder->held.needed_by.n > 1) /* else ascending as they came */
        qsort(builder->held.needed_by.items, (size_t)builder->held.needed_by.n,
              sizeof(colo_source_t), colo_source_cmp);
    return COLO_OK;
}

colo_destinations_t colo_gateways_of(colo_builder_t *builder, int64_t destination)
{
    const int64_t node = colo_location_of(builder->cfg, destination).node;
    const colo_source_t *all = builder->held.needed_by.items;
    colo_destinations_t destinations = {0};
    if (!builder->held.several_nodes)
        return destinations;
    const int64_t lo = colo_source_find(builder, all, builder->held.needed_by.n, node, -1);
    destinations.n = colo_source_find(builder, all, builder->held.needed_by.n, node + 1, -1) - lo;
    destinations.items = all + lo;
    destinations.mine =
        colo_source_find(builder, destinations.items, destinations.n, node, destination);
    destinations.enters = !builder->cfg->one_level && destinations.n > 1 &&
                          held_on(builder, node) < builder->held.naddends;
    return destinations;
}

bool colo_gateways_share(const colo_builder_t *builder, const colo_destinations_t *destinations,
                         int64_t i, const colo_extent_t *extent, colo_gateway_share_t *share)
{
    *share = (colo_gateway_share_t){.whole = true, .extent = *extent};
    if (!destinations->enters)
        return true;
    colo_extent_t part = *extent;
    const int axis = colo_cut_axis(extent, destinations->n);
    const int64_t length = extent->of[axis], rotation = builder->held.rotation % destinations->n;
    part.of[axis] = length / destinations->n;
    if (colo_is_small(builder, &part))
        return i == rotation;
    *share = (colo_gateway_share_t){.axis = axis,
                                    .lo = colo_part_lo(length, destinations->n, i, rotation),
                                    .hi = colo_part_lo(length, destinations->n, i + 1, rotation),
                                    .extent = *extent};
    share->extent.of[axis] = share->hi - share->lo;
    return share->lo < share->hi;
}

colo_status_t colo_gateway_cut(colo_builder_t *builder, const colo_gateway_share_t *share,
                               colo_list_t *out, int64_t peer)
{
    const int64_t hi = share->whole ? share->extent.of[0] : share->hi;
    return colo_overlaps_cut(builder, out, share->whole ? COLO_SAMPLES : share->axis,
                             share->whole ? 0 : share->lo, hi, peer);
}

colo_status_t colo_gateways_pass_on(colo_builder_t *builder,
                                    const colo_destinations_t *destinations,
                                    const colo_extent_t *extent)
{
    colo_gateway_share_t mine, other;
    if (!destinations->enters)
        return COLO_OK;
    const bool gives =
        colo_gateways_share(builder, destinations, destinations->mine, extent, &mine);
    for (int64_t i = 0; i < destinations->n; i++) {
        if (i == destinations->mine)
            continue;
        if (gives)
            COLO_TRY(colo_gateway_cut(builder, &mine, &builder->found[COLO_RELAYS].sends,
                                      destinations->items[i].rank));
        if (colo_gateways_share(builder, destinations, i, extent, &other))
            COLO_TRY(colo_gateway_cut(builder, &other, &builder->found[COLO_RELAYS].recvs,
                                      destinations->items[i].rank));
    }
    return COLO_OK;
}
