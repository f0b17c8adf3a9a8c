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

colo_status_t colo_sender_sources(colo_builder_t *w, const colo_side_t *hold, const colo_block_t *b)
{
    COLO_TRY(colo_gateways_hold(w, hold, b));
    COLO_TRY(w->sums ? colo_node_sums_sources(w)
                     : colo_block_ranks(w, &w->ranks, &hold->layout->grid, b));
    const int64_t *rank = w->ranks.items;
    const bool known = colo_nodes_known(w->cfg);
    w->held.by_node.n = w->held.by_rail.n = 0;
    for (int64_t i = 0; i < w->ranks.n; i++) {
        const colo_location_t where = colo_location_of(w->cfg, rank[i]);
        colo_source_t *node = colo_list_push(&w->held.by_node, sizeof *node);
        colo_source_t *rail = node && known ? colo_list_push(&w->held.by_rail, sizeof *rail) : NULL;
        if (!node || (known && !rail))
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld sources", (long long)w->ranks.n);
        *node = (colo_source_t){where.node, rank[i]};
        if (rail)
            *rail = (colo_source_t){where.rail, rank[i]};
    }
    if (w->cfg->nodes) /* else ascending as they came */
        qsort(w->held.by_node.items, (size_t)w->held.by_node.n, sizeof(colo_source_t),
              colo_source_cmp);
    if (w->held.by_rail.n > 1)
        qsort(w->held.by_rail.items, (size_t)w->held.by_rail.n, sizeof(colo_source_t),
              colo_source_cmp);
    return COLO_OK;
}

colo_sharers_t colo_sender_candidates(colo_builder_t *w, int tier, int64_t rank)
{
    const colo_list_t *l = tier == 2 ? &w->held.by_rail : &w->held.by_node;
    colo_sharers_t g = {.tier = tier, .n = l->n, .items = l->items};
    if (tier == 3 || l->n == 0)
        return g;
    const colo_location_t where = colo_location_of(w->cfg, rank);
    g.key = tier == 1 ? where.node : where.rail;
    int64_t lo = colo_source_find(w, g.items, g.n, g.key, -1);
    g.n = colo_source_find(w, g.items, g.n, g.key + 1, -1) - lo;
    g.items += lo;
    return g;
}

colo_sharers_t colo_sender_group(colo_builder_t *w, int64_t destination)
{
    colo_sharers_t g = colo_sender_candidates(w, 1, destination);
    int64_t i = colo_source_find(w, g.items, g.n, g.key, destination);
    if (i < g.n && g.items[i].rank == destination)
        return (colo_sharers_t){.tier = 0};
    for (int tier = 2; g.n == 0; tier++)
        g = colo_sender_candidates(w, tier, destination);
    return g;
}

bool colo_sender_watched(const colo_schedule_t *t, const colo_sharers_t *g)
{
    return g->tier > 0 && t[g->tier].group.n > 0 && t[g->tier].group.key == g->key;
}

colo_status_t colo_sender_list(colo_builder_t *w, const colo_side_t *need, const colo_block_t *b)
{
    COLO_TRY(colo_block_ranks(w, &w->destinations, &need->layout->grid, b));
    int64_t *rank = w->destinations.items, n = 0;
    for (int64_t i = 0; i < w->destinations.n; i++)
        if (colo_node_sums_reach(w, rank[i]))
            rank[n++] = rank[i];
    w->destinations.n = n;
    return colo_gateways_need(w);
}

colo_status_t colo_sender_count(colo_builder_t *w, colo_schedule_t *t, const colo_side_t *need,
                                const colo_block_t *b, const colo_extent_t *x)
{
    COLO_TRY(colo_sender_list(w, need, b));
    const int64_t *rank = w->destinations.items;
    for (int tier = 1; tier <= 3; tier++)
        t[tier].m = 0;
    for (int64_t i = 0; i < w->destinations.n; i++) {
        colo_sharers_t g = colo_sender_group(w, rank[i]);
        colo_schedule_t *s = &t[g.tier];
        colo_gateway_share_t share;
        if (!colo_sender_watched(t, &g))
            continue;
        const colo_destinations_t node = colo_gateways_of(w, rank[i]);
        if (!colo_gateways_share(w, &node, node.mine, x, &share))
            continue;
        if (s->m == 0)
            s->first = i;
        if (rank[i] == w->plan->rank)
            s->mine = s->m;
        s->m++;
    }
    return COLO_OK;
}

/* ---- dealing ---- */

static bool deals_by_size(const colo_builder_t *w, const colo_schedule_t *t)
{
    return w->by_table && t->group.n <= COLO_DEALT;
}

/* A small overlap for one destination: the candidate that has the least, ties by turn. */
static int64_t deal(colo_schedule_t *t, const colo_extent_t *x)
{
    const int64_t n = t->group.n;
    int64_t least = t->whole;
    for (int64_t i = 1; i < n; i++) {
        const int64_t k = (t->whole + i) % n;
        least = t->dealt[k] < t->dealt[least] ? k : least;
    }
    t->dealt[least] += x->of[0] * x->of[1] * x->of[2];
    t->whole = (least + 1) % n;
    t->done++;
    return t->last = least;
}

void colo_sender_pass(const colo_builder_t *w, colo_schedule_t *t, const colo_extent_t *x)
{
    for (int tier = 1; tier <= 3; tier++) {
        int64_t n = t[tier].group.n, m = t[tier].m;
        if (n < 2 || (m % n == 0 && t[tier].started))
            continue;
        if (m % n == 0)
            t[tier].whole = t[tier].slice = (t[tier].whole + 1) % n;
        else if (colo_is_small(w, x) && deals_by_size(w, &t[tier]))
            while (t[tier].done < m)
                (void)deal(&t[tier], x);
        else if (colo_is_small(w, x))
            t[tier].whole = (t[tier].whole + m) % n;
        else
            t[tier].slice = (t[tier].slice + m % n * (x->of[colo_cut_axis(x, n)] % n)) % n;
        t[tier].started |= m % n != 0;
        t[tier].done = 0;
    }
}

/* The candidate that sends a small overlap to the @i-th destination; i ascends. */
static int64_t dealt_to(colo_schedule_t *t, const colo_extent_t *x, int64_t i)
{
    while (t->done <= i)
        (void)deal(t, x);
    return t->last;
}

static colo_status_t assign(colo_builder_t *w, colo_schedule_t *t, const colo_extent_t *x,
                            const colo_extent_t *part, const colo_served_t *to)
{
    const colo_source_t *c = t->group.items;
    int64_t n = t->group.n;
    bool even = t->m % n == 0;
    if (even || colo_is_small(w, part)) {
        const int64_t k = even                  ? t->first + to->i
                          : deals_by_size(w, t) ? dealt_to(t, x, to->i)
                                                : t->whole + to->i;
        const int64_t sender = c[k % n].rank;
        return to->sends && sender != w->self
                   ? COLO_OK
                   : colo_overlaps_push(w, to->sends ? to->rank : sender);
    }
    int axis = colo_cut_axis(part, n);
    int64_t length = part->of[axis], rotation = (t->slice + to->i % n * (length % n)) % n;
    for (int64_t k = 0; k < n; k++)
        if (!to->sends || c[k].rank == w->self)
            COLO_TRY(colo_overlaps_cut(w, w->out, axis, colo_part_lo(length, n, k, rotation),
                                       colo_part_lo(length, n, k + 1, rotation),
                                       to->sends ? to->rank : c[k].rank));
    return COLO_OK;
}

colo_status_t colo_sender_assign(colo_builder_t *w, colo_schedule_t *t, const colo_extent_t *x,
                                 const colo_gateway_share_t *share, const colo_served_t *to)
{
    const colo_list_t all = w->overlaps;
    if (share->whole)
        return assign(w, t, x, x, to);
    w->share.n = 0;
    COLO_TRY(colo_gateway_cut(w, share, &w->share, to->rank));
    w->overlaps = w->share; /* as far as this destination is concerned */
    const colo_status_t st = assign(w, t, x, &share->extent, to);
    w->share = w->overlaps;
    w->overlaps = all;
    return st;
}
