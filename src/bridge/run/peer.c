/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.c - EXACT between GPUs that reach each other: the plan as transfers for the peer-to-peer
 * path. Which calls take it: peer-calls.c.
 *
 * Movement is pushed: the sender knows from coordinates where a box begins in the receiver's part,
 * and is told the rest, pointer and strides, at each call. Sums of PARTIAL gradients are pulled: a
 * receiver reads every addend's value where it lies and adds up in addend order, so there is no
 * partial sum and no second pass. The regions of one addend need not be those of another; boxes are
 * cut until each addend comes from one rank.
 *
 * Left to others: moving and waiting (transfer.c), registration (memory.c, registry.c).
 */
#include "bridge/ragged.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct growing {
    colo_list_t step, addend; /* colo_transfer_t; colo_addend_t, @addends of each step */
    int32_t addends;
} growing_t;

static colo_status_t push(growing_t *g, const colo_transfer_t *s, const colo_addend_t *a)
{
    colo_transfer_t *step = colo_list_push(&g->step, sizeof *step);
    bool stored = step;
    for (int32_t i = 0; stored && a && i < g->addends; i++) {
        colo_addend_t *addend = colo_list_push(&g->addend, sizeof *addend);
        stored = addend;
        if (stored)
            *addend = a[i];
    }
    if (!stored)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes", (long long)g->step.n);
    *step = *s;
    return COLO_OK;
}

/* ---- where a region begins in a rank's part ---- */

static void begins(const colo_owned_t *own, const colo_region_t *r, int64_t row, int64_t begin[3])
{
    begin[0] = r->b[0] - own->b0;
    begin[1] = row;
    begin[2] = r->h[0] - own->h0;
}

static void extents(const colo_region_t *r, int64_t e[3])
{
    e[0] = r->b[1] - r->b[0];
    e[1] = r->s[1] - r->s[0];
    e[2] = r->h[1] - r->h[0];
}

static colo_status_t owned_by(const colo_plan_t *p, bool src, int64_t rank, colo_owned_t *own)
{
    const colo_shape_t *s = &p->config.shape;
    return colo_layout_owned(src ? &p->src : &p->dst, rank, s,
                             !src && p->config.output == COLO_FULL_SEQ, own, NULL, 0, NULL);
}

/* ---- movement ---- */

/* Does this rank reach comm rank @peer? */
static bool is_near(const colo_bridge_t *b, int32_t peer)
{
    return b->comm->ops->peer->reaches(b->comm, b->comm->rank, peer);
}

int32_t colo_bridge_p2p_count(const colo_bridge_t *b, const colo_routes_t *routes, int64_t *bytes)
{
    int32_t n = 0;
    *bytes = 0;
    for (int32_t i = 0; i < routes->nmessages; i++)
        if (is_near(b, colo_comm_find(b->comm, routes->message[i].peer))) {
            *bytes += routes->message[i].bytes;
            n++;
        }
    return n;
}

/* Sent to peers in reach; addends that they hold are read from them into partial sums. */
static colo_status_t steps_that_move(const colo_bridge_t *b, const colo_shape_state_t *st,
                                     colo_pass_t pass, growing_t *g)
{
    const colo_plan_t *p = st->plan;
    const bool fwd = pass == COLO_FORWARD, gathers = colo_bridge_gathers(st, st->far, pass);
    const colo_routes_t *routes =
        gathers ? &p->exchange[pass][COLO_FIRST].recv : &p->exchange[pass][COLO_FIRST].send;
    const colo_routes_t *local = &p->local[pass];
    const colo_owned_t *in = fwd ? &p->own_src : &p->own_dst;
    const colo_owned_t *out = fwd ? &p->own_dst : &p->own_src;
    colo_transfer_t s;
    int64_t sum[3];
    colo_sum_extent(p, sum);
    for (int32_t m = 0; m < routes->nmessages; m++) {
        colo_owned_t theirs;
        s.peer = colo_comm_find(b->comm, routes->message[m].peer);
        if (!is_near(b, (int32_t)s.peer))
            continue;
        COLO_TRY(owned_by(p, !fwd && !gathers, routes->message[m].peer, &theirs));
        for (int64_t k = 0; k < routes->message[m].nregions; k++) {
            const colo_region_t *r = &routes->message[m].regions[k];
            const colo_offset_t *where = &routes->offset[r - routes->region];
            extents(r, s.extent);
            begins(gathers ? &theirs : in, r, fwd ? where->src_row : where->dst_row, s.here);
            if (gathers && r->addend >= p->addends) /* for other nodes */
                begins(&p->own_dst, r, where->dst_row, s.there);
            else
                begins(gathers ? out : &theirs, r, fwd ? where->dst_row : where->src_row, s.there);
            if (gathers) /* partial sums are like more samples */
                s.there[0] += st->sum_of[colo_sum_recv_key(p, r)] * (int64_t)st->sum_size /
                              (sum[1] * sum[2] * (int64_t)colo_dtype_size(p->config.dtype));
            COLO_TRY(push(g, &s, NULL));
        }
    }
    s.peer = -1;
    for (int64_t i = 0; i < local->nregions && !gathers; i++) {
        const colo_region_t *r = &local->region[i];
        const colo_offset_t *where = &local->offset[i];
        extents(r, s.extent);
        begins(in, r, fwd ? where->src_row : where->dst_row, s.here);
        begins(out, r, fwd ? where->dst_row : where->src_row, s.there);
        COLO_TRY(push(g, &s, NULL));
    }
    return COLO_OK;
}

/* ---- sums ---- */

/* One region of some addend and where its values are. */
typedef struct held {
    const colo_region_t *region;
    colo_offset_t offset;
    int32_t peer, addend;
    int64_t begin[3]; /* where it begins in that rank's part of dst */
} held_t;

static colo_status_t all_held(const colo_bridge_t *b, const colo_plan_t *p, held_t *h)
{
    const colo_routes_t *recv = &p->exchange[COLO_BACKWARD][COLO_FIRST].recv,
                        *local = &p->local[COLO_BACKWARD];
    for (int64_t i = 0; i < local->nregions; i++, h++) {
        *h = (held_t){&local->region[i], local->offset[i], -1, local->region[i].addend, {0}};
        begins(&p->own_dst, h->region, h->offset.dst_row, h->begin);
    }
    for (int32_t m = 0; m < recv->nmessages; m++) {
        colo_owned_t theirs;
        COLO_TRY(owned_by(p, false, recv->message[m].peer, &theirs));
        for (int64_t k = 0; k < recv->message[m].nregions; k++, h++) {
            const colo_region_t *r = &recv->message[m].regions[k];
            *h = (held_t){r,
                          recv->offset[r - recv->region],
                          colo_comm_find(b->comm, recv->message[m].peer),
                          r->addend,
                          {0}};
            begins(&theirs, r, h->offset.dst_row, h->begin);
        }
    }
    return COLO_OK;
}

static bool cut(int64_t a[2], const int64_t b[2])
{
    a[0] = a[0] > b[0] ? a[0] : b[0];
    a[1] = a[1] < b[1] ? a[1] : b[1];
    return a[0] < a[1];
}

/* Cuts @box, of which addends before @addend are fixed, by the regions of this one. */
static colo_status_t cut_by_addend(const colo_plan_t *p, const held_t *h, int64_t n, int32_t addend,
                                   colo_region_t box, int64_t src_row, const held_t **from,
                                   growing_t *g)
{
    if (addend == g->addends) {
        colo_addend_t term[COLO_MAX_ADDENDS] = {{0}}; /* gcc does not see that addends > 0 */
        colo_transfer_t s = {.peer = -1};
        extents(&box, s.extent);
        begins(&p->own_src, &box, src_row, s.there);
        for (int32_t l = 0; l < g->addends; l++) {
            const colo_region_t *r = from[l]->region;
            term[l] = (colo_addend_t){from[l]->peer,
                                      {from[l]->begin[0] + box.b[0] - r->b[0],
                                       from[l]->begin[1] + box.s[0] - r->s[0],
                                       from[l]->begin[2] + box.h[0] - r->h[0]}};
        }
        return push(g, &s, term);
    }
    for (int64_t i = 0; i < n; i++) {
        colo_region_t part = box;
        if (h[i].addend != addend || !cut(part.b, h[i].region->b) || !cut(part.s, h[i].region->s) ||
            !cut(part.h, h[i].region->h))
            continue;
        from[addend] = &h[i];
        int64_t row = addend == 0 ? h[i].offset.src_row + part.s[0] - h[i].region->s[0]
                                  : src_row + part.s[0] - box.s[0];
        COLO_TRY(cut_by_addend(p, h, n, addend + 1, part, row, from, g));
    }
    return COLO_OK;
}

static colo_status_t steps_that_add(const colo_bridge_t *b, const colo_plan_t *p, growing_t *g)
{
    const int64_t n =
        p->exchange[COLO_BACKWARD][COLO_FIRST].recv.nregions + p->local[COLO_BACKWARD].nregions;
    const held_t *from[COLO_MAX_ADDENDS];
    COLO_AUTOFREE held_t *h = calloc((size_t)n + 1, sizeof *h);
    if (!h)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld regions", (long long)n);
    COLO_TRY(all_held(b, p, h));
    const colo_shape_t *s = &p->config.shape;
    colo_region_t all = {.b = {0, s->samples}, .s = {0, s->rows}, .h = {0, s->features}};
    return cut_by_addend(p, h, n, 0, all, 0, from, g);
}

/* ---- both passes ---- */

struct both {
    growing_t g[2];
    int32_t *exposed[2];
    colo_transfers_t pass[2];
};

static void both_free(struct both *w)
{
    for (int i = 0; i < 2; i++) {
        free(w->g[i].step.items);
        free(w->g[i].addend.items);
        free(w->exposed[i]);
    }
}

/* Ranks that reach this rank's tensor: they send here, or read what it would send. */
static colo_status_t exposed_ranks(const colo_bridge_t *b, const colo_routes_t *r,
                                   int32_t **exposed, int32_t *n)
{
    *exposed = calloc((size_t)r->nmessages + 1, sizeof **exposed);
    if (!*exposed)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %d messages", (int)r->nmessages);
    for (int32_t m = 0; m < r->nmessages; m++) {
        const int32_t peer = colo_comm_find(b->comm, r->message[m].peer);
        if (is_near(b, peer))
            (*exposed)[(*n)++] = peer;
    }
    return COLO_OK;
}

/* Of a ragged bridge: batches bring the steps, between any ranks. */
static colo_status_t any_peers(const colo_bridge_t *b, struct both *w)
{
    const int32_t n = b->comm->size;
    for (int i = 0; i < 2; i++) {
        w->exposed[i] = calloc((size_t)n, sizeof *w->exposed[i]);
        if (!w->exposed[i])
            return colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)n);
        w->pass[i] = (colo_transfers_t){.name = i ? "bridge backward" : "bridge forward",
                                        .elem = 1,
                                        .blocks = b->blocks,
                                        .exposed = w->exposed[i]};
        for (int32_t r = 0; r < n; r++)
            if (r != b->comm->rank && is_near(b, r))
                w->exposed[i][w->pass[i].nexposed++] = r;
    }
    return COLO_OK;
}

static colo_status_t both_make(const colo_bridge_t *b, const colo_shape_state_t *s, struct both *w)
{
    static const char *const names[] = {"bridge forward", "bridge backward"};
    const colo_plan_t *p = s->plan;
    if (b->ragged)
        return any_peers(b, w);
    for (int i = 0; i < (p->config.no_grad ? 1 : 2); i++) {
        const bool reads = colo_plan_adds(p, (colo_pass_t)i);
        const bool gathers = colo_bridge_gathers(s, s->far, (colo_pass_t)i),
                   sums = reads && !gathers;
        int32_t nexposed = 0;
        w->g[i].addends = sums ? (int32_t)p->addends : 0;
        COLO_TRY(exposed_ranks(
            b, reads ? &p->exchange[i][COLO_FIRST].send : &p->exchange[i][COLO_FIRST].recv,
            &w->exposed[i], &nexposed));
        COLO_TRY(sums ? steps_that_add(b, p, &w->g[i])
                      : steps_that_move(b, s, (colo_pass_t)i, &w->g[i]));
        w->pass[i] = (colo_transfers_t){.name = names[i],
                                        .elem = colo_dtype_size(p->config.dtype),
                                        .nsteps = w->g[i].step.n,
                                        .step = w->g[i].step.items,
                                        .pulls = gathers,
                                        .addends = w->g[i].addends,
                                        .addend = w->g[i].addend.items,
                                        .blocks = b->blocks,
                                        .nexposed = nexposed,
                                        .exposed = w->exposed[i]};
    }
    if (p->config.no_grad)
        w->pass[1].name = names[1];
    return COLO_OK;
}

/* From output to output, where all replicas on the node have the same rows in the same place. */
static colo_status_t steps_that_pass_on(const colo_bridge_t *b, const colo_shape_state_t *st,
                                        colo_pass_t pass, growing_t *g)
{
    const bool fwd = pass == COLO_FORWARD;
    const colo_routes_t *send = &st->plan->exchange[pass][COLO_RELAYS].send;
    const colo_owned_t *own = fwd ? &st->plan->own_dst : &st->plan->own_src;
    for (int32_t m = 0; m < send->nmessages; m++) {
        colo_transfer_t s = {.peer = colo_comm_find(b->comm, send->message[m].peer)};
        for (int64_t k = 0; k < send->message[m].nregions && is_near(b, (int32_t)s.peer); k++) {
            const colo_region_t *r = &send->message[m].regions[k];
            const colo_offset_t *where = &send->offset[r - send->region];
            extents(r, s.extent);
            begins(own, r, fwd ? where->dst_row : where->src_row, s.here);
            memcpy(s.there, s.here, sizeof s.there);
            COLO_TRY(push(g, &s, NULL));
        }
    }
    return COLO_OK;
}

size_t colo_bridge_p2p_unit(const colo_bridge_t *b, const colo_plan_t *p)
{
    const colo_plan_config_t *usual = &b->now.plan->config;
    const size_t elem = colo_dtype_size(usual->dtype);
    if (!b->ragged)
        return elem;
    const size_t unit = (size_t)(usual->shape.features / p->config.shape.features) * elem,
                 widest = (size_t)b->ragged->unit;
    return unit == 0 && widest == 0 ? elem : unit > widest ? unit : widest;
}

colo_status_t colo_bridge_p2p_relays(const colo_bridge_t *b, colo_shape_state_t *s)
{
    const colo_plan_t *p = s->plan;
    struct both w = {0};
    colo_status_t st = COLO_OK;
    if (!b->p2p || !(p->exchange[0][COLO_RELAYS].all_come || p->exchange[1][COLO_RELAYS].all_come))
        return COLO_OK;
    for (int i = 0; i < 2 && st == COLO_OK; i++) {
        int32_t nexposed = 0;
        w.pass[i].name = i ? "bridge backward" : "bridge forward";
        if (!p->exchange[i][COLO_RELAYS].all_come || colo_plan_adds(p, (colo_pass_t)i))
            continue;
        st = exposed_ranks(b, &p->exchange[i][COLO_RELAYS].recv, &w.exposed[i], &nexposed);
        if (st == COLO_OK)
            st = steps_that_pass_on(b, s, (colo_pass_t)i, &w.g[i]);
        w.pass[i] = (colo_transfers_t){.name = w.pass[i].name,
                                       .elem = colo_bridge_p2p_unit(b, p),
                                       .nsteps = w.g[i].step.n,
                                       .step = w.g[i].step.items,
                                       .blocks = b->blocks,
                                       .nexposed = nexposed,
                                       .exposed = w.exposed[i]};
    }
    if (st == COLO_OK)
        st = b->comm->ops->peer->list(b->p2p, w.pass, &s->relay_list);
    both_free(&w);
    return st;
}

/* Of which passes does some rank of the comm have nothing that peers could reach? The same verdict
 * on all ranks. */
static colo_status_t find_asymmetric(const colo_bridge_t *b, colo_shape_state_t *s)
{
    const colo_plan_t *p = s->plan;
    bool none[2] = {false, false}; /* of src, of dst */
    for (int side = 0; side < 2; side++)
        for (int32_t r = 0; r < colo_comm_size(b->comm) && !none[side]; r++) {
            colo_owned_t o;
            COLO_TRY(owned_by(p, side == 0, colo_comm_world_rank(b->comm, r), &o));
            none[side] = o.b1 == o.b0 || o.rows == 0 || o.h1 == o.h0;
        }
    for (int pass = 0; pass < 2; pass++)
        s->asymmetric[pass] = none[colo_bridge_p2p_reaches_dst(p, (colo_pass_t)pass)];
    return COLO_OK;
}

/* Is any pair of the ranks that the plan ties to this one out of reach, or is there another
 * exchange? The same verdict on all of these; ranks that it does not tie to this one have their
 * own. */
static colo_status_t find_far(const colo_bridge_t *b, colo_shape_state_t *s)
{
    const colo_peer_ops_t *peer = b->comm->ops->peer;
    int32_t *members = NULL, n = 0;
    const bool whole = peer->reaches(b->comm, -1, -1);
    s->far = s->plan->exchange[0][COLO_RELAYS].all_come ||
             s->plan->exchange[1][COLO_RELAYS].all_come || colo_plan_sums_nodes(s->plan);
    if (whole)
        return COLO_OK;
    if (b->ragged) { /* tables may tie any ranks */
        s->far = true;
        (void)colo_fail(COLO_ERR_UNBUILT, "some ranks do not reach each other's memory; %s",
                        peer->why(b->comm));
    } else {
        COLO_TRY(colo_component_find(s->plan, b->comm, &members, &n));
    }
    for (int32_t i = 0; i < n && !s->far; i++)
        for (int32_t k = 0; k < i && !s->far; k++) {
            s->far = !peer->reaches(b->comm, members[k], members[i]);
            if (s->far)
                (void)colo_fail(COLO_ERR_UNBUILT,
                                "ranks %d and %d, which exchange, do not reach each other's "
                                "memory; %s",
                                (int)members[k], (int)members[i], peer->why(b->comm));
        }
    free(members);
    if (s->far && colo_log_on(COLO_LOG_INFO))
        colo_log(COLO_LOG_INFO, "bridge: NCCL carries between some ranks: %s", colo_last_error());
    return COLO_OK;
}

/* Where peers are asked for, a rank that is far is an error on all. Collective. */
static colo_status_t none_far(const colo_bridge_t *b)
{
    const colo_comm_t *c = b->comm;
    const uint64_t mine = b->now.far;
    const colo_error_t why = colo_error_save();
    if (b->transport != COLO_TRANSPORT_PEER || c->ops->peer->reaches(c, -1, -1))
        return COLO_OK;
    COLO_AUTOFREE uint64_t *all = malloc((size_t)c->size * sizeof *all);
    if (!all)
        return colo_comm_i_fail(b->comm,
                                colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)c->size));
    COLO_TRY(colo_comm_i_gather(colo_comm_i_control(b->comm), COLO_OP_ALL_GATHER,
                                COLO_CATEGORY_CHECK, &mine, all, 1));
    int32_t k = 0;
    while (k < c->size && !all[k])
        k++;
    if (k == c->size)
        return COLO_OK;
    return mine
               ? colo_fail(COLO_ERR_UNBUILT, "%s", why.text)
               : colo_fail(COLO_ERR_UNBUILT,
                           "rank %d (world rank %lld) exchanges with a rank that it does not reach",
                           (int)k, (long long)c->world_rank[k]);
}

bool colo_bridge_p2p_likely(const colo_bridge_t *b)
{
    const colo_peer_ops_t *peer = b->comm->ops->peer;
    if (!peer || b->mem != COLO_CUDA || b->algo != COLO_EXACT || b->comm->size == 1)
        return false;
    return b->transport == COLO_TRANSPORT_PEER ||
           (b->transport == COLO_TRANSPORT_AUTO && peer->registrations(b->comm) > 0);
}

colo_status_t colo_bridge_p2p_create(colo_bridge_t *b)
{
    const colo_peer_ops_t *peer = b->comm->ops->peer;
    struct both w = {0};
    if (b->mem != COLO_CUDA || b->algo != COLO_EXACT)
        return COLO_OK;
    if (!peer || b->comm->size == 1 || b->transport == COLO_TRANSPORT_NCCL)
        return COLO_OK;
    colo_status_t st = peer->open(b->comm);
    if (st == COLO_OK) { /* all ranks go on, or none */
        st = find_far(b, &b->now);
        if (st == COLO_OK)
            st = both_make(b, &b->now, &w);
        if (st == COLO_OK && !b->ragged)
            st = find_asymmetric(b, &b->now);
        st = colo_comm_i_agree(colo_comm_i_control(b->comm), "bridge create", 4, st);
        if (st == COLO_OK)
            st = none_far(b);
    }
    if (st == COLO_OK)
        st = peer->create(b->comm, w.pass, &b->p2p);
    both_free(&w);
    if (st < 0 && b->transport == COLO_TRANSPORT_PEER)
        return colo_fail_prefix(st, "bridge: transport peer");
    if (st != COLO_ERR_UNBUILT || colo_comm_check(b->comm) < 0)
        return st; /* the same kind on all ranks; what is not "not here" is nothing to hide */
    if (colo_log_on(COLO_LOG_INFO))
        colo_log(COLO_LOG_INFO, "bridge: staged through NCCL: %s", colo_last_error());
    return COLO_OK;
}

colo_status_t colo_bridge_p2p_load(colo_bridge_t *b, colo_shape_state_t *next)
{
    struct both w = {0};
    if (!b->p2p)
        return COLO_OK;
    colo_status_t st = find_asymmetric(b, next);
    if (st == COLO_OK)
        st = find_far(b, next);
    if (st == COLO_OK)
        st = both_make(b, next, &w);
    if (st == COLO_OK)
        st = colo_bridge_p2p_relays(b, next);
    if (st == COLO_OK)
        st = b->comm->ops->peer->load(b->p2p, w.pass);
    colo_shape_state_t *drops = st == COLO_OK ? &b->now : next;
    if (drops->relay_list)
        b->comm->ops->peer->drop(b->p2p, &drops->relay_list);
    both_free(&w);
    return st;
}

void colo_bridge_p2p_destroy(colo_bridge_t *b)
{
    if (b->p2p && colo_comm_i_own(b->comm, "bridge"))
        b->comm->ops->peer->destroy(&b->p2p);
}
