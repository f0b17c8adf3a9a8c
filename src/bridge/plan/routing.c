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

/* The first run that ends behind @row. */
static int64_t first_behind(const colo_runs_t *runs, int64_t row)
{
    int64_t a = 0, z = runs->n;
    while (a < z) {
        const int64_t mid = a + (z - a) / 2;
        if (runs->run[mid].row + runs->run[mid].count <= row)
            a = mid + 1;
        else
            z = mid;
    }
    return a;
}

/* Appends to @out the rows that a needed and a held block share, as runs that are contiguous in
 * both; by row. Boxes are set later. */
static colo_status_t share_rows(colo_list_t *out, int32_t addend, const colo_runs_t *src,
                                const colo_runs_t *dst)
{
    int64_t last_src = -1, last_dst = -1; /* where the run before ends */
    const int64_t first = out->n;
    if (src->n == 0 || dst->n == 0)
        return COLO_OK;
    int64_t i = first_behind(src, dst->run[0].row), j = first_behind(dst, src->run[0].row);
    while (i < src->n && j < dst->n) {
        const colo_run_t *x = &src->run[i], *y = &dst->run[j];
        int64_t x1 = x->row + x->count, y1 = y->row + y->count;
        int64_t lo = x->row > y->row ? x->row : y->row, hi = x1 < y1 ? x1 : y1;
        int64_t a = x->local + (lo - x->row), z = y->local + (lo - y->row);
        i += x1 == hi;
        j += y1 == hi;
        if (lo >= hi)
            continue;
        colo_entry_t *p = out->items;
        if (out->n > first && p[out->n - 1].region.s[1] == lo && last_src == a && last_dst == z)
            p[out->n - 1].region.s[1] = hi;
        else {
            p = colo_list_push(out, sizeof *p);
            if (!p)
                return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)out->n);
            *p = (colo_entry_t){.region = {.s = {lo, hi}, .addend = addend},
                                .offset = {.src_row = a, .dst_row = z}};
        }
        last_src = a + (hi - lo);
        last_dst = z + (hi - lo);
    }
    return COLO_OK;
}

/* The overlap of a needed and a held block: rows by share_rows(), one range of the other axes. */
static void set_box(colo_builder_t *w, const colo_bounds_t *x, const colo_bounds_t *y)
{
    colo_entry_t *p = w->overlaps.items;
    for (int64_t i = 0; i < w->overlaps.n; i++) {
        colo_region_t *r = &p[i].region;
        r->b[0] = x->b.lo > y->b.lo ? x->b.lo : y->b.lo;
        r->b[1] = x->b.hi < y->b.hi ? x->b.hi : y->b.hi;
        r->h[0] = x->h.lo > y->h.lo ? x->h.lo : y->h.lo;
        r->h[1] = x->h.hi < y->h.hi ? x->h.hi : y->h.hi;
    }
}

/* The block of @rank on @side. false: it has none there, or not at this addend. */
static bool find_block(const colo_builder_t *w, const colo_side_t *side, int64_t rank,
                       int64_t *coords, colo_block_t *block, colo_bounds_t *x)
{
    if (!colo_layout_holds(side->layout, rank))
        return false;
    (void)colo_grid_coords(&side->layout->grid, rank, coords);
    for (int i = 0; side->addend_fixed && i < COLO_MAX_DIMS; i++)
        if (side->fixed[i] >= 0 && side->fixed[i] != coords[i])
            return false;
    colo_block_of(side, coords, block);
    return side->owns->box(side, coords, x);
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

static bool keeps_meetings(const colo_builder_t *w)
{
    return w->cfg->output == COLO_SHARDED;
}

/* Lists the blocks of @side that meet mine. */
static colo_status_t intersect_blocks(colo_builder_t *w, const colo_side_t *side,
                                      const intersection_t *x)
{
    colo_intersections_t *m = &w->intersections[x->me_is_src];
    if (m->complete)
        return COLO_OK;
    m->first.n = m->overlap.n = 0;
    return colo_blocks_meet(side, &x->me, m->met);
}

/* Choice @i of them: w->overlaps, x->pos and x->extent. Choices come in their order. */
static colo_status_t intersect(colo_builder_t *w, const colo_side_t *side, int64_t i,
                               int32_t addend, intersection_t *x)
{
    colo_intersections_t *m = &w->intersections[x->me_is_src];
    int64_t *first = m->first.items, from = 0, end;
    colo_blocks_nth(m->met, i, x->pos, &x->extent);
    if (!m->complete) {
        const bool others = other_rows(m->met, i);
        if (others && !keeps_meetings(w))
            m->overlap.n = 0;
        from = others ? m->overlap.n : 0;
        if (others) {
            COLO_TRY(side->owns->rows(side, x->pos, &x->me.runs, &x->other.runs));
            COLO_TRY(x->me_is_src ? share_rows(&m->overlap, addend, &x->me.runs, &x->other.runs)
                                  : share_rows(&m->overlap, addend, &x->other.runs, &x->me.runs));
        } else if (keeps_meetings(w)) {
            from = m->overlap.n;
            for (int64_t k = first[i - 1]; k < from; k++) {
                colo_entry_t *e = colo_list_push(&m->overlap, sizeof *e);
                if (!e)
                    return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)from);
                *e = ((const colo_entry_t *)m->overlap.items)[k];
            }
        }
        (void)side->owns->box(side, x->pos, &x->other);
        w->overlaps =
            (colo_list_t){(colo_entry_t *)m->overlap.items + from, m->overlap.n - from, 0};
        set_box(w, &x->me, &x->other);
        if (!keeps_meetings(w))
            return COLO_OK;
        int64_t *entry = colo_list_push(&m->first, sizeof *entry);
        if (!entry)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld blocks", (long long)i);
        *entry = from;
        m->complete = i + 1 == choices(m->met);
        return COLO_OK;
    }
    end = i + 1 < m->first.n ? first[i + 1] : m->overlap.n;
    w->overlaps = (colo_list_t){(colo_entry_t *)m->overlap.items + first[i], end - first[i], 0};
    return COLO_OK;
}

/* Passes the turns of a held block on up to the overlap of needed block @mine. */
static colo_status_t schedule_overlap(colo_builder_t *w, colo_schedule_t *t,
                                      const colo_side_t *need, const colo_side_t *hold,
                                      intersection_t *m, const colo_block_t *mine)
{
    const colo_runs_t *own = &m->me.runs;
    colo_bounds_t *held = &m->other;
    colo_run_t first = {.count =
                            own->n ? own->run[own->n - 1].row + own->run[own->n - 1].count : 0};
    const colo_runs_t within = {.run = &first, .n = 1};
    /* an intersection may have been kept, or has only the rows that this rank shares */
    (void)hold->owns->box(hold, m->pos, held);
    COLO_TRY(hold->owns->rows(hold, m->pos, need->owns->ascends ? &within : NULL, &held->runs));
    w->plan->work += w->by_table ? held->runs.n : 0;
    COLO_TRY(colo_blocks_meet(need, held, w->fed));
    for (int64_t i = 0; i < choices(w->fed); i++) {
        int64_t pos[COLO_MAX_DIMS];
        colo_extent_t x;
        colo_block_t b;
        colo_blocks_nth(w->fed, i, pos, &x);
        colo_block_of(need, pos, &b);
        COLO_TRY(colo_sender_count(w, t, need, &b, &x));
        if (colo_block_cmp(&b, mine) == 0)
            break;
        colo_sender_pass(w, t, &x);
    }
    return COLO_OK;
}

static int64_t share_count(const colo_gateway_share_t *share)
{
    return share->extent.of[0] * share->extent.of[1] * share->extent.of[2];
}

/* Says of w->overlaps which addend they are of, and how they are added up. */
static void stamp(colo_builder_t *w, int64_t addend, int32_t order)
{
    colo_entry_t *e = w->overlaps.items;
    for (int64_t i = 0; i < w->overlaps.n; i++) {
        e[i].region.addend = (int32_t)addend;
        e[i].offset.order = order;
    }
}

/* What this rank receives of the held blocks that meet its needed block. */
static colo_status_t take(colo_builder_t *w, const colo_side_t *need, const colo_side_t *hold,
                          int32_t addend, bool need_is_src)
{
    intersection_t m = {.other.runs = w->other, .me_is_src = need_is_src};
    int64_t pos[COLO_MAX_DIMS];
    colo_block_t mine, b;
    colo_status_t st = COLO_OK;
    if (!find_block(w, need, w->plan->rank, pos, &mine, &m.me))
        return COLO_OK;
    w->out = w->sums ? &w->found[COLO_NODE_SUMS].recvs : &w->found[COLO_FIRST].recvs;
    const colo_runs_t *own;
    COLO_TRY(colo_block_own_rows(w, need, pos, &own));
    m.me.runs = *own;
    COLO_TRY(intersect_blocks(w, hold, &m));
    for (int64_t i = 0, n = choices(w->intersections[need_is_src].met); i < n; i++) {
        COLO_TRY_GOTO(st, intersect(w, hold, i, addend, &m), done);
        colo_block_of(hold, m.pos, &b);
        COLO_TRY_GOTO(st, colo_sender_sources(w, hold, &b), done);
        if (!colo_node_sums_reach(w, w->plan->rank) || (w->sums && !colo_node_sums_lead(w)))
            continue;
        if (w->summing && addend == 0) {
            int32_t order;
            const int64_t node = colo_location_of(w->cfg, w->plan->rank).node;
            COLO_TRY_GOTO(st, colo_node_sums_order(w, node, false, &order), done);
            stamp(w, addend, order);
        }
        colo_sharers_t g = colo_sender_group(w, w->plan->rank);
        colo_schedule_t t[4] = {0};
        t[g.tier] = (colo_schedule_t){.group = g, .m = 1};
        if (g.tier > 0 && g.n > 1) /* else one candidate serves all */
            COLO_TRY_GOTO(st, colo_sender_count(w, t, need, &mine, &m.extent), done);
        else if (w->held.several_nodes)
            COLO_TRY_GOTO(st, colo_sender_list(w, need, &mine), done);
        const colo_destinations_t node = colo_gateways_of(w, w->plan->rank);
        colo_gateway_share_t share;
        const int64_t count = m.extent.of[0] * m.extent.of[1] * m.extent.of[2];
        const bool gets = colo_gateways_share(w, &node, node.mine, &m.extent, &share);
        if (w->held.several_nodes && g.tier > 1) /* evenly over those that need it */
            w->counted.minimum += (colo_part_lo(count, node.n, node.mine + 1, 0) -
                                   colo_part_lo(count, node.n, node.mine, 0)) *
                                  (int64_t)(w->sums ? w->sum_elem : w->elem);
        if (addend == 0)
            COLO_TRY_GOTO(st, colo_gateways_pass_on(w, &node, &m.extent), done);
        if (w->sums)
            w->counted.left_out += count * colo_node_sums_saving(w);
        if (g.tier == 0)
            w->counted.left_out += (!gets         ? count
                                    : share.whole ? 0
                                                  : count - share_count(&share)) *
                                   (int64_t)w->elem;
        if (!gets)
            continue;
        if (g.tier == 0) {
            COLO_TRY_GOTO(st, colo_gateway_cut(w, &share, w->out, w->plan->rank), done);
            continue;
        }
        if (g.n > 1 && t[g.tier].m % g.n)
            COLO_TRY_GOTO(st, schedule_overlap(w, t, need, hold, &m, &mine), done);
        COLO_TRY_GOTO(st,
                      colo_sender_assign(w, &t[g.tier], &m.extent, &share,
                                         &(colo_served_t){t[g.tier].mine, w->plan->rank, false}),
                      done);
    }
done:
    w->other = m.other.runs;
    return st;
}

/* What w->self sends of its held block. */
static colo_status_t give(colo_builder_t *w, const colo_side_t *hold, const colo_side_t *need,
                          int32_t addend, bool need_is_src)
{
    intersection_t m = {.other.runs = w->other, .me_is_src = !need_is_src};
    int64_t pos[COLO_MAX_DIMS];
    colo_block_t mine, b;
    colo_schedule_t t[4] = {0};
    colo_status_t st = COLO_OK;
    if (!find_block(w, hold, w->self, pos, &mine, &m.me))
        return COLO_OK;
    w->out = w->sums ? &w->given : &w->found[COLO_FIRST].sends;
    const colo_runs_t *own;
    COLO_TRY(colo_block_own_rows(w, hold, pos, &own));
    m.me.runs = *own;
    COLO_TRY(intersect_blocks(w, need, &m));
    COLO_TRY(colo_sender_sources(w, hold, &mine));
    for (int tier = 1; tier <= 3; tier++)
        t[tier].group = colo_sender_candidates(w, tier, w->self);
    for (int64_t i = 0, n = choices(w->intersections[!need_is_src].met); i < n; i++) {
        COLO_TRY_GOTO(st, intersect(w, need, i, addend, &m), done);
        colo_block_of(need, m.pos, &b);
        COLO_TRY_GOTO(st, colo_sender_count(w, t, need, &b, &m.extent), done);
        const int64_t *destination = w->destinations.items;
        int64_t served[4] = {0};
        for (int64_t o = 0; o < w->destinations.n; o++) {
            colo_sharers_t g = colo_sender_group(w, destination[o]);
            colo_gateway_share_t share;
            if (!colo_sender_watched(t, &g))
                continue;
            const colo_destinations_t node = colo_gateways_of(w, destination[o]);
            if (colo_gateways_share(w, &node, node.mine, &m.extent, &share))
                COLO_TRY_GOTO(
                    st,
                    colo_sender_assign(w, &t[g.tier], &m.extent, &share,
                                       &(colo_served_t){served[g.tier]++, destination[o], true}),
                    done);
        }
        colo_sender_pass(w, t, &m.extent);
    }
done:
    w->other = m.other.runs;
    return st;
}

static colo_status_t push_given(colo_list_t *out, const colo_entry_t *given, int64_t peer,
                                int64_t addend, int32_t order)
{
    colo_entry_t *e = colo_list_push(out, sizeof *e);
    if (!e)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)out->n);
    *e = *given;
    e->peer = peer;
    e->region.addend = (int32_t)addend;
    e->offset.order = order;
    return COLO_OK;
}

/* What @collector sends of sums with its own addend @addend: the sums if it is this rank, and the
 * other addends, which it receives; else this rank's addend, which it sends to @collector. */
static colo_status_t collect(colo_builder_t *w, const colo_side_t *hold, const colo_side_t *need,
                             int64_t collector, int32_t addend, bool need_is_src)
{
    const colo_plan_t *p = w->plan;
    int32_t order = 0;
    w->given.n = 0;
    w->self = collector;
    const colo_status_t st = give(w, hold, need, addend, need_is_src);
    w->self = p->rank;
    COLO_TRY(st);
    if (w->given.n == 0)
        return COLO_OK;
    const colo_sum_group_t *g = w->held.groups.items;
    if (collector == p->rank)
        COLO_TRY(colo_node_sums_order(w, colo_location_of(w->cfg, p->rank).node, true, &order));
    for (int64_t i = 0; i < w->given.n; i++) {
        const colo_entry_t e = ((const colo_entry_t *)w->given.items)[i];
        if (collector != p->rank) {
            COLO_TRY(push_given(&w->found[COLO_FIRST].sends, &e, collector,
                                p->addends + p->own_addend, 0));
            continue;
        }
        COLO_TRY(push_given(&w->found[COLO_NODE_SUMS].sends, &e, e.peer, g[addend].lead, order));
        for (int64_t a = 0; a < p->addends; a++)
            if (a != addend && g[a].lead == g[addend].lead)
                COLO_TRY(push_given(&w->found[COLO_FIRST].recvs, &e,
                                    colo_node_sums_helper(w, collector, a), p->addends + a, 0));
    }
    return COLO_OK;
}

/* The sums with @addend of this rank's block that ranks of its node send, where it takes part. */
static colo_status_t give_sums(colo_builder_t *w, const colo_side_t *hold, const colo_side_t *need,
                               int32_t addend, bool need_is_src)
{
    const int64_t rank = w->plan->rank, own = w->plan->own_addend;
    const int64_t node = colo_location_of(w->cfg, rank).node;
    int64_t coords[COLO_MAX_DIMS];
    colo_block_t b;
    if (!colo_layout_holds(hold->layout, rank))
        return COLO_OK;
    (void)colo_grid_coords(&hold->layout->grid, rank, coords);
    colo_block_of(hold, coords, &b);
    COLO_TRY(colo_sender_sources(w, hold, &b));
    const colo_sum_group_t *g = w->held.groups.items;
    if (g[addend].lead != g[own].lead || g[own].n == 1)
        return COLO_OK;
    for (int64_t i = 0, n = w->held.addends.n; i < n; i++) { /* give() lists the same ones again */
        const colo_addend_source_t c = ((const colo_addend_source_t *)w->held.addends.items)[i];
        if (c.addend == addend && c.node == node &&
            (c.rank == rank || (addend != own && colo_node_sums_helper(w, c.rank, own) == rank)))
            COLO_TRY(collect(w, hold, need, c.rank, addend, need_is_src));
    }
    return COLO_OK;
}

colo_status_t colo_overlaps_find(colo_builder_t *w, const colo_side_t *need,
                                 const colo_side_t *hold, int32_t addend, bool need_is_src)
{
    w->held.addend = addend;
    w->self = w->plan->rank;
    COLO_TRY(take(w, need, hold, addend, need_is_src));
    return w->sums ? give_sums(w, hold, need, addend, need_is_src)
                   : give(w, hold, need, addend, need_is_src);
}
