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
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

#include "core/error.h"

#include <stdlib.h>

/* Adds the nodes that have sources of @block, at @addend. */
static colo_status_t add_sources(colo_builder_t *builder, bool nodes_add_up,
                                 const colo_side_t *hold, const colo_block_t *block, int64_t addend)
{
    colo_gateways_t *gateways = &builder->gateways;
    COLO_TRY(colo_block_ranks(builder, &gateways->ranks, &hold->layout->grid, block));
    for (int64_t i = 0; i < gateways->ranks.n; i++) {
        const int64_t rank = ((int64_t *)gateways->ranks.items)[i];
        const int64_t node = colo_location_of(builder->cfg, rank).node;
        COLO_PUSH(&gateways->nodes, "plan: %lld sources", (colo_node_addend_t){node, addend});
        if (nodes_add_up)
            COLO_PUSH(&builder->sums.sources, "plan: %lld sources",
                      (colo_addend_source_t){node, addend, rank});
    }
    return COLO_OK;
}

static int by_node_and_addend(const void *first, const void *second)
{
    _Static_assert(sizeof(colo_node_addend_t) == 2 * sizeof(int64_t), "a node and an addend");
    return colo_compare(first, second, 2);
}

colo_status_t colo_gateways_hold(colo_builder_t *builder, bool nodes_add_up,
                                 const colo_side_t *hold, const colo_block_t *part)
{
    colo_gateways_t *gateways = &builder->gateways;
    const colo_partial_t *partial = colo_side_partial(hold);
    const colo_place_t *shown = colo_side_place(hold);
    const int ndims = hold->layout->grid.ndims;
    colo_block_t block = *part;
    gateways->nodes.n = builder->sums.sources.n = gateways->rotation = 0;
    gateways->naddends = 1;
    if (!gateways->several_nodes)
        return COLO_OK;
    for (int i = 0; i < ndims; i++)
        if (!shown || shown->coord[i] < 0)
            gateways->rotation += part->coord[i] > 0 ? part->coord[i] : 0;
    gateways->naddends = partial ? partial->n : 1;
    for (int64_t addend = 0; addend < gateways->naddends; addend++) {
        for (int i = 0; partial && i < ndims; i++)
            if (partial->place[addend].coord[i] >= 0)
                block.coord[i] = partial->place[addend].coord[i];
        COLO_TRY(add_sources(builder, nodes_add_up, hold, &block, addend));
    }
    colo_node_addend_t *on = gateways->nodes.items;
    int64_t n = 0;
    qsort(on, (size_t)gateways->nodes.n, sizeof *on, by_node_and_addend);
    for (int64_t i = 0; i < gateways->nodes.n; i++)
        if (n == 0 || by_node_and_addend(&on[n - 1], &on[i]) != 0)
            on[n++] = on[i];
    gateways->nodes.n = n;
    return nodes_add_up ? colo_node_sums_group(builder) : COLO_OK;
}

/* How many addends of the held block @node has. */
static int64_t held_on(colo_builder_t *builder, int64_t node)
{
    return colo_node_addends_first(builder, node + 1) - colo_node_addends_first(builder, node);
}

static int by_node_and_block(const void *first, const void *second)
{
    return colo_compare(first, second, 3);
}

/* Does @rank need a sum of the held block from another node? */
static bool gets_sums(colo_builder_t *builder, colo_values_t values, int64_t rank)
{
    for (values.addend = 0; values.addend < builder->gateways.naddends; values.addend++)
        if (colo_node_sums_reach(builder, &values, rank))
            return true;
    return false;
}

/* Does @node lack anything of what is asked about that its rank @rank needs? A ragged batch may
 * bring any rows, so the answer is yes. */
static colo_status_t is_lacking(colo_builder_t *builder, const colo_node_question_t *question,
                                int64_t rank, int64_t node, bool *lacks)
{
    const colo_side_t *need = question->side;
    colo_side_t hold = *question->hold;
    const colo_shape_t *shape = &builder->cfg->shape;
    int64_t coords[COLO_DIMS_MAX];
    colo_runs_t *rows = &builder->other;
    colo_bounds_t bounds = {.runs = rows};
    colo_block_t block;
    colo_extent_t extent;
    *lacks = builder->by_table || shape->samples == 0 || shape->rows == 0 || shape->features == 0;
    (void)colo_grid_coords(&need->layout->grid, rank, coords);
    if (*lacks || !colo_block_bounds(need, coords, &bounds))
        return COLO_OK;
    COLO_TRY(colo_side_rows(need, coords, NULL, rows));
    hold.shown = 0;
    do {
        COLO_TRY(colo_blocks_meet(&hold, &bounds, builder->fed));
        for (int64_t i = 0; i < colo_blocks_count(builder->fed) && !*lacks; i++) {
            colo_blocks_nth(builder->fed, i, coords, &extent);
            colo_block_of(&hold, coords, &block);
            COLO_TRY(colo_gateways_hold(builder, question->values.nodes_add_up, &hold, &block));
            *lacks = question->values.kind == COLO_SUMS
                         ? gets_sums(builder, question->values, rank)
                         : held_on(builder, node) < builder->gateways.naddends;
        }
    } while (++hold.shown < hold.npartial && !*lacks);
    return COLO_OK;
}

colo_status_t colo_gateways_ask(colo_builder_t *builder, const colo_node_question_t *question,
                                bool *yes)
{
    enum { LARGE = 1024 }; /* ranks that are looked at */
    const colo_side_t *side = question->side;
    const colo_grid_t *grid = &side->layout->grid;
    const colo_partial_t *partial = question->addends ? colo_side_partial(side) : NULL;
    colo_side_t all = *side;
    int64_t n = 0;
    all.npartial = 0;
    *yes = grid->size > LARGE;
    if (*yes)
        return COLO_OK;
    COLO_AUTOFREE int64_t(*key)[3] = malloc((size_t)grid->size * sizeof *key);
    COLO_FAIL_IF(!key, COLO_ERR_NOMEM, "plan: %lld ranks", (long long)grid->size);
    for (int64_t rank = grid->offset; rank < grid->offset + grid->size; rank++) {
        int64_t coords[COLO_DIMS_MAX];
        colo_block_t block;
        if (!colo_layout_coords(side->layout, rank, coords))
            continue;
        key[n][2] = partial ? colo_partial_find(partial, coords) : rank;
        if (key[n][2] < 0)
            continue;
        colo_block_of(&all, coords, &block);
        key[n][0] = colo_location_of(builder->cfg, rank).node;
        key[n][1] = 0;
        for (int i = 0; i < grid->ndims; i++)
            if (block.coord[i] >= 0 && (!partial || partial->place->coord[i] < 0))
                key[n][1] = key[n][1] * grid->extent[i] + coords[i];
        n++;
    }
    qsort(key, (size_t)n, sizeof *key, by_node_and_block);
    for (int64_t i = 0, k = 0; i < n && !*yes; i++) {
        const bool first = i == 0 || key[i][0] != key[i - 1][0] || key[i][1] != key[i - 1][1];
        const bool other = first || key[i][2] != key[i - 1][2];
        k = first ? 1 : k + other;
        *yes = k >= question->least;
        if (k == question->least && other && question->hold)
            COLO_TRY(is_lacking(builder, question, key[i][2], key[i][0], yes));
        else if (question->hold)
            *yes = false;
    }
    return COLO_OK;
}

colo_status_t colo_gateways_need(colo_builder_t *builder, const colo_list_t *ranks)
{
    const int64_t *rank = ranks->items;
    colo_list_t *needed_by = &builder->gateways.needed_by;
    needed_by->n = 0;
    for (int64_t i = 0; builder->gateways.several_nodes && i < ranks->n; i++)
        COLO_PUSH(needed_by, "plan: %lld destinations",
                  (colo_source_t){colo_location_of(builder->cfg, rank[i]).node, rank[i]});
    if (builder->cfg->nodes && needed_by->n > 1) /* else ascending as they came */
        qsort(needed_by->items, (size_t)needed_by->n, sizeof(colo_source_t), colo_source_cmp);
    return COLO_OK;
}

colo_destinations_t colo_gateways_of(colo_builder_t *builder, int64_t destination)
{
    const int64_t node = colo_location_of(builder->cfg, destination).node;
    const colo_list_t *needed_by = &builder->gateways.needed_by;
    const colo_source_t *all = needed_by->items;
    colo_destinations_t destinations = {0};
    if (!builder->gateways.several_nodes)
        return destinations;
    const int64_t lo = colo_source_find(builder, all, needed_by->n, node, -1);
    destinations.n = colo_source_find(builder, all, needed_by->n, node + 1, -1) - lo;
    destinations.items = all + lo;
    destinations.mine =
        colo_source_find(builder, destinations.items, destinations.n, node, destination);
    destinations.enters = !builder->cfg->one_level && destinations.n > 1 &&
                          held_on(builder, node) < builder->gateways.naddends;
    return destinations;
}

bool colo_gateways_share(const colo_builder_t *builder, const colo_destinations_t *destinations,
                         int64_t i, const colo_extent_t *extent, colo_gateway_share_t *share)
{
    *share = (colo_gateway_share_t){.uncut = true, .extent = *extent};
    if (!destinations->enters)
        return true;
    colo_extent_t part = *extent;
    const int axis = colo_cut_axis(extent, destinations->n);
    const int64_t length = extent->of[axis],
                  rotation = builder->gateways.rotation % destinations->n;
    part.of[axis] = length / destinations->n;
    if (colo_is_small(&part, builder->elem))
        return i == rotation;
    *share = (colo_gateway_share_t){.axis = axis,
                                    .lo = colo_part_lo(length, destinations->n, i, rotation),
                                    .hi = colo_part_lo(length, destinations->n, i + 1, rotation),
                                    .extent = *extent};
    share->extent.of[axis] = share->hi - share->lo;
    return share->lo < share->hi;
}

colo_status_t colo_gateway_cut(const colo_overlap_t *overlap, const colo_gateway_share_t *share,
                               int64_t peer, colo_list_t *out)
{
    return share->uncut ? colo_overlap_push(overlap, peer, out)
                        : colo_overlap_cut(overlap, share->axis, share->lo, share->hi, peer, out);
}

colo_status_t colo_gateways_pass_on(colo_builder_t *builder,
                                    const colo_destinations_t *destinations,
                                    const colo_overlap_t *overlap)
{
    const colo_extent_t *extent = &overlap->extent;
    colo_found_t *relays = &builder->found[COLO_EXCHANGE_RELAYS];
    colo_gateway_share_t mine, other;
    if (!destinations->enters)
        return COLO_OK;
    const bool gives =
        colo_gateways_share(builder, destinations, destinations->mine, extent, &mine);
    for (int64_t i = 0; i < destinations->n; i++) {
        const int64_t peer = destinations->items[i].rank;
        if (i == destinations->mine)
            continue;
        if (gives)
            COLO_TRY(colo_gateway_cut(overlap, &mine, peer, &relays->sends));
        if (colo_gateways_share(builder, destinations, i, extent, &other))
            COLO_TRY(colo_gateway_cut(overlap, &other, peer, &relays->recvs));
    }
    return COLO_OK;
}
