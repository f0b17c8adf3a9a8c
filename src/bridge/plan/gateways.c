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

/* Adds the nodes that have sources of @b, at @addend. */
static colo_status_t add_sources(colo_builder_t *w, const colo_side_t *hold, const colo_block_t *b,
                                 int64_t addend)
{
    COLO_TRY(colo_block_ranks(w, &w->ranks, &hold->layout->grid, b));
    for (int64_t i = 0; i < w->ranks.n; i++) {
        const int64_t rank = ((int64_t *)w->ranks.items)[i];
        const int64_t node = colo_location_of(w->cfg, rank).node;
        colo_source_t *entry = colo_list_push(&w->held.nodes, sizeof *entry);
        colo_addend_source_t *of_addend =
            w->summing ? colo_list_push(&w->held.addends, sizeof *of_addend) : NULL;
        if (!entry || (w->summing && !of_addend))
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld sources", (long long)w->ranks.n);
        *entry = (colo_source_t){node, addend};
        if (of_addend)
            *of_addend = (colo_addend_source_t){node, addend, rank};
    }
    return COLO_OK;
}

colo_status_t colo_gateways_hold(colo_builder_t *w, const colo_side_t *hold, const colo_block_t *b)
{
    colo_block_t block = *b;
    w->held.nodes.n = w->held.addends.n = w->held.rotation = 0;
    w->held.naddends = 1;
    if (!w->held.several_nodes)
        return COLO_OK;
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        if (hold->addend_fixed && hold->fixed[i] >= 0)
            w->held.naddends *= hold->layout->grid.extent[i];
        else
            w->held.rotation += b->coord[i] > 0 ? b->coord[i] : 0;
    for (int64_t addend = 0; addend < w->held.naddends; addend++) {
        int64_t left = addend;
        for (int i = 0; i < COLO_MAX_DIMS; i++)
            if (hold->addend_fixed && hold->fixed[i] >= 0) {
                block.coord[i] = left % hold->layout->grid.extent[i];
                left /= hold->layout->grid.extent[i];
            }
        COLO_TRY(add_sources(w, hold, &block, addend));
    }
    colo_source_t *s = w->held.nodes.items;
    int64_t n = 0;
    qsort(s, (size_t)w->held.nodes.n, sizeof *s, colo_source_cmp);
    for (int64_t i = 0; i < w->held.nodes.n; i++)
        if (n == 0 || colo_source_cmp(&s[n - 1], &s[i]) != 0)
            s[n++] = s[i];
    w->held.nodes.n = n;
    return w->summing ? colo_node_sums_group(w) : COLO_OK;
}

/* How many addends of the held block @node has. */
static int64_t held_on(colo_builder_t *w, int64_t node)
{
    const colo_source_t *held = w->held.nodes.items;
    return colo_source_find(w, held, w->held.nodes.n, node + 1, -1) -
           colo_source_find(w, held, w->held.nodes.n, node, -1);
}

static int by_node_and_block(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;
    for (int i = 0; i < 3; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

/* Does @rank need a sum of the held block from another node? */
static bool gets_sums(colo_builder_t *w, int64_t rank)
{
    for (w->held.addend = 0; w->held.addend < w->held.naddends; w->held.addend++)
        if (colo_node_sums_reach(w, rank))
            return true;
    return false;
}

/* Does @node lack anything of @hold that its rank @rank needs? If w->sums is set: any sum? A ragged
 * batch may bring any rows, so the answer is yes. */
static colo_status_t is_lacking(colo_builder_t *w, const colo_side_t *need, const colo_side_t *hold,
                                int64_t rank, int64_t node, bool *lacks)
{
    const colo_shape_t *s = &w->cfg->shape;
    int64_t coords[COLO_MAX_DIMS];
    colo_bounds_t x = {.runs = {0}};
    colo_block_t b;
    colo_extent_t extent;
    colo_status_t st = COLO_OK;
    *lacks = w->by_table || s->samples == 0 || s->rows == 0 || s->features == 0;
    (void)colo_grid_coords(&need->layout->grid, rank, coords);
    if (*lacks || !need->owns->box(need, coords, &x))
        return COLO_OK;
    COLO_TRY_GOTO(st, need->owns->rows(need, coords, NULL, &x.runs), done);
    COLO_TRY_GOTO(st, colo_blocks_meet(hold, &x, w->fed), done);
    for (int64_t i = 0; i < w->fed[0].n * w->fed[1].n * w->fed[2].n && !*lacks; i++) {
        colo_blocks_nth(w->fed, i, coords, &extent);
        colo_block_of(hold, coords, &b);
        COLO_TRY_GOTO(st, colo_gateways_hold(w, hold, &b), done);
        *lacks = w->sums ? gets_sums(w, rank) : held_on(w, node) < w->held.naddends;
    }
done:
    colo_runs_deinit(&x.runs);
    return st;
}

colo_status_t colo_gateways_share_node(colo_builder_t *w, const colo_side_t *side,
                                       const colo_side_t *hold, bool addends, int64_t least,
                                       bool *share)
{
    enum { LARGE = 1024 }; /* ranks that are looked at */
    const colo_grid_t *g = &side->layout->grid;
    colo_side_t all = *side;
    int64_t n = 0;
    all.addend_fixed = false;
    *share = g->size > LARGE;
    if (*share)
        return COLO_OK;
    COLO_AUTOFREE int64_t(*key)[3] = malloc((size_t)g->size * sizeof *key);
    if (!key)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld ranks", (long long)g->size);
    for (int64_t r = g->offset; r < g->offset + g->size; r++) {
        int64_t coords[COLO_MAX_DIMS];
        colo_block_t b;
        if (!colo_layout_holds(side->layout, r))
            continue;
        (void)colo_grid_coords(g, r, coords);
        colo_block_of(&all, coords, &b);
        key[n][0] = colo_location_of(w->cfg, r).node;
        key[n][1] = key[n][2] = 0;
        for (int i = 0; i < g->ndims; i++) {
            key[n][1] = key[n][1] * g->extent[i] + (b.coord[i] < 0 ? 0 : coords[i]);
            if (addends && side->fixed[i] >= 0)
                key[n][2] = key[n][2] * g->extent[i] + coords[i];
        }
        if (!addends)
            key[n][2] = r;
        n++;
    }
    qsort(key, (size_t)n, sizeof *key, by_node_and_block);
    for (int64_t i = 0, k = 0; i < n && !*share; i++) {
        const bool first = i == 0 || key[i][0] != key[i - 1][0] || key[i][1] != key[i - 1][1];
        const bool other = first || key[i][2] != key[i - 1][2];
        k = first ? 1 : k + other;
        *share = k >= least;
        if (k == least && other && hold)
            COLO_TRY(is_lacking(w, side, hold, key[i][2], key[i][0], share));
        else if (hold)
            *share = false;
    }
    return COLO_OK;
}

colo_status_t colo_gateways_need(colo_builder_t *w)
{
    const int64_t *rank = w->destinations.items;
    w->held.needed_by.n = 0;
    for (int64_t i = 0; w->held.several_nodes && i < w->destinations.n; i++) {
        colo_source_t *entry = colo_list_push(&w->held.needed_by, sizeof *entry);
        if (!entry)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld destinations",
                             (long long)w->destinations.n);
        *entry = (colo_source_t){colo_location_of(w->cfg, rank[i]).node, rank[i]};
    }
    if (w->cfg->nodes && w->held.needed_by.n > 1) /* else ascending as they came */
        qsort(w->held.needed_by.items, (size_t)w->held.needed_by.n, sizeof(colo_source_t),
              colo_source_cmp);
    return COLO_OK;
}

colo_destinations_t colo_gateways_of(colo_builder_t *w, int64_t destination)
{
    const int64_t node = colo_location_of(w->cfg, destination).node;
    const colo_source_t *all = w->held.needed_by.items;
    colo_destinations_t g = {0};
    if (!w->held.several_nodes)
        return g;
    const int64_t lo = colo_source_find(w, all, w->held.needed_by.n, node, -1);
    g.n = colo_source_find(w, all, w->held.needed_by.n, node + 1, -1) - lo;
    g.items = all + lo;
    g.mine = colo_source_find(w, g.items, g.n, node, destination);
    g.enters = !w->cfg->one_level && g.n > 1 && held_on(w, node) < w->held.naddends;
    return g;
}

bool colo_gateways_share(const colo_builder_t *w, const colo_destinations_t *g, int64_t i,
                         const colo_extent_t *x, colo_gateway_share_t *share)
{
    *share = (colo_gateway_share_t){.whole = true, .extent = *x};
    if (!g->enters)
        return true;
    colo_extent_t part = *x;
    const int axis = colo_cut_axis(x, g->n);
    const int64_t length = x->of[axis], rotation = w->held.rotation % g->n;
    part.of[axis] = length / g->n;
    if (colo_is_small(w, &part))
        return i == rotation;
    *share = (colo_gateway_share_t){.axis = axis,
                                    .lo = colo_part_lo(length, g->n, i, rotation),
                                    .hi = colo_part_lo(length, g->n, i + 1, rotation),
                                    .extent = *x};
    share->extent.of[axis] = share->hi - share->lo;
    return share->lo < share->hi;
}

colo_status_t colo_gateway_cut(colo_builder_t *w, const colo_gateway_share_t *share,
                               colo_list_t *out, int64_t peer)
{
    const int64_t hi = share->whole ? share->extent.of[0] : share->hi;
    return colo_overlaps_cut(w, out, share->whole ? COLO_SAMPLES : share->axis,
                             share->whole ? 0 : share->lo, hi, peer);
}

colo_status_t colo_gateways_pass_on(colo_builder_t *w, const colo_destinations_t *g,
                                    const colo_extent_t *x)
{
    colo_gateway_share_t mine, other;
    if (!g->enters)
        return COLO_OK;
    const bool gives = colo_gateways_share(w, g, g->mine, x, &mine);
    for (int64_t i = 0; i < g->n; i++) {
        if (i == g->mine)
            continue;
        if (gives)
            COLO_TRY(colo_gateway_cut(w, &mine, &w->found[COLO_RELAYS].sends, g->items[i].rank));
        if (colo_gateways_share(w, g, i, x, &other))
            COLO_TRY(colo_gateway_cut(w, &other, &w->found[COLO_RELAYS].recvs, g->items[i].rank));
    }
    return COLO_OK;
}
