/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged-peer.c - a ragged batch between GPUs that reach each other: its steps on the peer-to-peer
 * path of its bridge (peer.c), and which calls take it.
 *
 * Rows are pushed, as those of a uniform batch are: the tables tell a sender where each rank has
 * its rows, also in a packed tensor. A forward whose y is not registered is pulled, if its x is:
 * links write faster than they read. Addends are read where they lie.
 *
 * The kernel cuts steps into tiles of so many rows. Of rows that are wider than those that the
 * steps were listed for, a tile is too large, so that few blocks have work: the batch lists them
 * again.
 *
 * Which ranks have rows changes with the tables. So the ranks agree in the first call of a pass in
 * which any rank has some, forward always, backward with transport AUTO; the verdict holds until
 * something else is registered.
 */
#include "bridge/ragged.h"

#include "core/error.h"

#include <stdlib.h>
#include <string.h>

typedef struct list {
    colo_list_t *step, *addend; /* of the bridge's steps */
    int32_t *exposed;           /* [nexposed] */
} list_t;

/* ---- where peers have rows ---- */

/* Where destination ranks have the rows of their tensors, by block; made when it is needed. */
typedef struct blocks {
    colo_stored_t **stored; /* [axes.dst.replicas * cp * sp] */
    int64_t *count;
} blocks_t;

static colo_status_t rows_of(const colo_bridge_t *b, const colo_side_t *side, const int64_t *coords,
                             colo_pool_t *pool, colo_stored_t **stored, int64_t *n)
{
    colo_ragged_bridge_t *r = b->ragged;
    colo_runs_t *runs = &r->builder.other;
    colo_side_t own = *side;
    int64_t rows;
    r->builder.on_rank.n = 0;
    own.on_rank = r->merged ? &r->builder.on_rank : NULL;
    COLO_TRY(own.owns->rows(&own, coords, NULL, runs));
    *n = runs->n;
    return colo_ragged_stored(&r->axes, side, coords, runs, r->merged, r->builder.on_rank.items,
                              pool, stored, &rows);
}

/* Rows of the destination ranks' tensors, for indices on their replicas' axes. */
static colo_status_t place_message(const colo_bridge_t *b, const colo_plan_t *p,
                                   const colo_plan_message_t *m, colo_offset_t *pos, blocks_t *x)
{
    const colo_ragged_t *r = &b->ragged->axes;
    const colo_side_t side = {.owns = &colo_owns_segments_dst,
                              .layout = &p->dst,
                              .shape = &p->config.shape,
                              .table = r,
                              .full = p->config.output == COLO_FULL_SEQ};
    int64_t coords[COLO_MAX_DIMS], hint = 0;
    (void)colo_grid_coords(&p->dst.grid, m->peer, coords);
    int64_t i = colo_ragged_part(&p->dst, COLO_SAMPLES, -1, coords);
    if (!side.full)
        i = (i * r->dst.cp + colo_ragged_part(&p->dst, COLO_ROWS, 1, coords)) * r->dst.axes.sp +
            colo_ragged_part(&p->dst, COLO_ROWS, 0, coords);
    if (!x->stored[i])
        COLO_TRY(rows_of(b, &side, coords, p->pool, &x->stored[i], &x->count[i]));
    /* what is for other nodes has its rows: those of this rank's tensor */
    for (int64_t k = 0; k < m->nregions; k++)
        if (m->regions[k].addend < p->addends)
            pos[k].dst_row = colo_ragged_find(x->stored[i], x->count[i], pos[k].dst_row, &hint);
    return COLO_OK;
}

colo_status_t colo_ragged_p2p_place(colo_batch_t *batch)
{
    const colo_bridge_t *b = batch->bridge;
    const colo_plan_t *p = batch->s.plan;
    const colo_ragged_axes_t *dst = &b->ragged->axes.dst.axes;
    const size_t n = (size_t)(dst->replicas * dst->cp * dst->sp);
    if (!b->p2p || b->ragged->axes.packed ||
        (b->ragged->merged && p->config.output == COLO_FULL_SEQ)) /* row = index */
        return COLO_OK;
    COLO_AUTOFREE colo_stored_t **stored = calloc(n, sizeof *stored);
    COLO_AUTOFREE int64_t *count = calloc(n, sizeof *count);
    blocks_t x = {stored, count};
    if (!stored || !count)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %zu blocks", n);
    for (int i = 0; i < (p->config.no_grad || p->addends == 1 ? 1 : 2); i++) {
        const colo_routes_t *routes = i ? &p->exchange[COLO_BACKWARD][COLO_FIRST].recv
                                        : &p->exchange[COLO_FORWARD][COLO_FIRST].send;
        for (int32_t m = 0; m < routes->nmessages; m++) {
            const colo_plan_message_t *one = &routes->message[m];
            COLO_TRY(place_message(b, p, one, &routes->offset[one->regions - routes->region], &x));
        }
    }
    return COLO_OK;
}

/* ---- movement ---- */

/* Features of @l that a world rank's tensor begins with, in units of the plan. */
static int64_t first_feature(const colo_plan_t *p, const colo_layout_t *l, int64_t rank)
{
    int64_t coords[COLO_MAX_DIMS];
    colo_span_t h[2 * COLO_MAX_SPANS] = {{0}};
    (void)colo_grid_coords(&l->grid, rank, coords);
    (void)colo_axis_spans(l, COLO_FEATURES, coords, p->config.shape.features, h);
    return h[0].lo;
}

/* @src_h0, @dst_h0: of the tensors of source and destination. */
static colo_status_t push_move(const colo_routes_t *routes, int64_t i, int32_t peer, int64_t src_h0,
                               int64_t dst_h0, bool fwd, list_t *out)
{
    const colo_region_t *r = &routes->region[i];
    const colo_offset_t *pos = &routes->offset[i];
    const int64_t src[3] = {0, pos->src_row, r->h[0] - src_h0};
    const int64_t dst[3] = {0, pos->dst_row, r->h[0] - dst_h0};
    colo_transfer_t *s = colo_list_push(out->step, sizeof *s);
    if (!s)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes", (long long)out->step->n);
    *s = (colo_transfer_t){.peer = peer, .extent = {1, r->s[1] - r->s[0], r->h[1] - r->h[0]}};
    memcpy(s->here, fwd ? src : dst, sizeof s->here);
    memcpy(s->there, fwd ? dst : src, sizeof s->there);
    return COLO_OK;
}

static bool is_near(const colo_bridge_t *b, int32_t peer)
{
    return b->comm->ops->peer->reaches(b->comm, b->comm->rank, peer);
}

static colo_status_t steps_that_move(const colo_batch_t *batch, colo_pass_t pass, colo_move_t move,
                                     list_t *out)
{
    const colo_bridge_t *b = batch->bridge;
    const colo_plan_t *p = batch->s.plan;
    const bool fwd = pass == COLO_FORWARD, pulls = move == COLO_PULL;
    const bool gathers = colo_bridge_gathers(&batch->s, b->now.far, pass);
    const colo_routes_t *routes = pulls ? &p->exchange[pass][COLO_FIRST].recv
                                        : &p->exchange[pass][COLO_FIRST].send,
                        *local = &p->local[pass];
    const int64_t own[2] = {p->own_src.h0, p->own_dst.h0};
    const int far = fwd != pulls; /* is the peer the destination? */
    for (int32_t m = 0; m < routes->nmessages; m++) {
        const colo_plan_message_t *to = &routes->message[m];
        const int32_t peer = colo_comm_find(b->comm, to->peer);
        const int64_t theirs = first_feature(p, far ? &p->dst : &p->src, to->peer),
                      first = to->regions - routes->region;
        for (int64_t k = 0; k < to->nregions && is_near(b, peer); k++) {
            COLO_TRY(push_move(routes, first + k, peer, far ? own[0] : theirs,
                               far ? theirs : own[1], fwd, out));
            if (!gathers)
                continue;
            colo_transfer_t *s = (colo_transfer_t *)out->step->items + out->step->n - 1;
            const colo_region_t *r = &to->regions[k];
            s->there[0] = batch->s.sum_of[colo_sum_recv_key(p, r)]; /* sums are like samples */
            if (r->addend >= p->addends) { /* for other nodes: as in the destination part */
                s->there[1] = routes->offset[first + k].dst_row;
                s->there[2] = r->h[0] - own[1];
            }
        }
    }
    for (int64_t i = 0; i < local->nregions && !gathers; i++)
        COLO_TRY(push_move(local, i, -1, own[0], own[1], fwd, out));
    return COLO_OK;
}

/* ---- sums ---- */

/* Rows [row, end) of this rank's source part, of which some rank has an addend. */
typedef struct held {
    int64_t row, end, h[2];
    int32_t addend, peer;
    int64_t first,
        h0; /* of the first row in that rank's tensor; features that tensor begins with */
} held_t;

static int by_row(const void *a, const void *b)
{
    const held_t *x = a, *y = b;
    return (x->row > y->row) - (x->row < y->row);
}

/* Those of each addend, rows ascending. @from, @to: [n]; @first: [addends + 1], out: of each in
 * @to.
 */
static void sort_held(const held_t *from, int64_t n, int64_t addends, held_t *to, int64_t *first)
{
    memset(first, 0, (size_t)(addends + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++)
        first[from[i].addend + 1]++;
    for (int64_t l = 0; l < addends; l++)
        first[l + 1] += first[l];
    for (int64_t i = 0; i < n; i++)
        to[first[from[i].addend]++] = from[i];
    memmove(&first[1], &first[0], (size_t)addends * sizeof *first);
    first[0] = 0;
    for (int64_t l = 0; l < addends; l++) {
        int64_t i = first[l] + 1;
        while (i < first[l + 1] && to[i - 1].row <= to[i].row)
            i++;
        if (i < first[l + 1])
            qsort(&to[first[l]], (size_t)(first[l + 1] - first[l]), sizeof *to, by_row);
    }
}

static held_t held_of(const colo_routes_t *routes, int64_t i, int32_t peer)
{
    const colo_region_t *r = &routes->region[i];
    const int64_t row = routes->offset[i].src_row;
    return (held_t){.row = row,
                    .end = row + r->s[1] - r->s[0],
                    .h = {r->h[0], r->h[1]},
                    .addend = (int32_t)r->addend,
                    .peer = peer,
                    .first = routes->offset[i].dst_row};
}

static void all_held(const colo_bridge_t *b, const colo_plan_t *p, held_t *h)
{
    const colo_routes_t *recv = &p->exchange[COLO_BACKWARD][COLO_FIRST].recv,
                        *local = &p->local[COLO_BACKWARD];
    for (int64_t i = 0; i < local->nregions; i++, h++) {
        *h = held_of(local, i, -1);
        h->h0 = p->own_dst.h0;
    }
    for (int32_t m = 0; m < recv->nmessages; m++) {
        const colo_plan_message_t *from = &recv->message[m];
        const int32_t peer = colo_comm_find(b->comm, from->peer);
        const int64_t h0 = first_feature(p, &p->dst, from->peer);
        for (int64_t k = 0; k < from->nregions; k++, h++) {
            *h = held_of(recv, from->regions - recv->region + k, peer);
            h->h0 = h0;
        }
    }
}

/* Sums of features [lo, hi), which no region cuts: rows are cut until each addend comes from one
 * rank. @h: by addend, @first of each; @next: [addends], workspace. */
static colo_status_t sum_rows(const colo_plan_t *p, const held_t *h, const int64_t *first,
                              int64_t lo, int64_t hi, int64_t *next, list_t *out)
{
    const int32_t addends = (int32_t)p->addends;
    memcpy(next, first, (size_t)addends * sizeof *next);
    for (int64_t row = 0, end; row < p->own_src.rows; row = end) {
        end = p->own_src.rows;
        colo_transfer_t *s = colo_list_push(out->step, sizeof *s);
        for (int32_t l = 0; s && l < addends; l++) {
            int64_t i = next[l];
            while (i < first[l + 1] && (h[i].end <= row || h[i].h[1] <= lo || h[i].h[0] >= hi))
                i++;
            next[l] = i;
            if (i == first[l + 1] || h[i].row > row)
                return colo_fail(COLO_ERR_STATE, "bridge: row %lld has no addend %d",
                                 (long long)row, (int)l);
            end = h[i].end < end ? h[i].end : end;
            colo_addend_t *a = colo_list_push(out->addend, sizeof *a);
            if (a)
                *a = (colo_addend_t){h[i].peer, {0, h[i].first + row - h[i].row, lo - h[i].h0}};
            s = a ? s : NULL;
        }
        if (!s)
            return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes", (long long)out->step->n);
        *s = (colo_transfer_t){
            .peer = -1, .extent = {1, end - row, hi - lo}, .there = {0, row, lo - p->own_src.h0}};
    }
    return COLO_OK;
}

/* The features at which regions begin or end, ascending; returns how many. @cut: [2 n]. */
static int64_t cuts_of(const held_t *h, int64_t n, int64_t *cut)
{
    int64_t m = 0;
    for (int64_t i = 0; i < 2 * n; i++) {
        const int64_t pos = h[i / 2].h[i % 2];
        int64_t k = m;
        while (k > 0 && cut[k - 1] > pos)
            k--;
        if (k > 0 && cut[k - 1] == pos)
            continue;
        memmove(&cut[k + 1], &cut[k], (size_t)(m - k) * sizeof *cut);
        cut[k] = pos;
        m++;
    }
    return m;
}

static colo_status_t steps_that_add(const colo_bridge_t *b, const colo_plan_t *p, list_t *out)
{
    const int64_t n =
        p->exchange[COLO_BACKWARD][COLO_FIRST].recv.nregions + p->local[COLO_BACKWARD].nregions;
    colo_list_t *held = b->ragged->steps.held;
    COLO_AUTOFREE int64_t *cut = calloc((size_t)(2 * n) + 1, sizeof *cut);
    COLO_AUTOFREE int64_t *pos = calloc(2 * (size_t)p->addends + 1, sizeof *pos);
    colo_status_t st = COLO_OK;
    if (!colo_list_reserve(&held[0], n, sizeof(held_t)) ||
        !colo_list_reserve(&held[1], n, sizeof(held_t)) || !cut || !pos)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld regions", (long long)n);
    if (n == 0)
        return COLO_OK;
    all_held(b, p, held[0].items);
    sort_held(held[0].items, n, p->addends, held[1].items, pos);
    const int64_t cuts = cuts_of(held[1].items, n, cut);
    for (int64_t i = 0; st == COLO_OK && i + 1 < cuts; i++)
        st = sum_rows(p, held[1].items, pos, cut[i], cut[i + 1], pos + p->addends + 1, out);
    return st;
}

/* ---- the lists of a batch ---- */

/* The moves that a pass can take, colo_move_t. */
static int32_t moves_of(const colo_plan_t *p, colo_pass_t pass)
{
    return pass == COLO_FORWARD      ? COLO_PUSH | COLO_PULL
           : colo_plan_adds(p, pass) ? COLO_PULL
                                     : COLO_PUSH;
}

/* Whose messages say which ranks reach this rank's tensor? */
static const colo_routes_t *reaching(const colo_plan_t *p, colo_pass_t pass, colo_move_t move)
{
    return move == COLO_PULL ? &p->exchange[pass][COLO_FIRST].send
                             : &p->exchange[pass][COLO_FIRST].recv;
}

static colo_status_t make(const colo_batch_t *batch, colo_pass_t pass, colo_move_t move,
                          list_t *list, colo_transfers_t *out)
{
    const colo_bridge_t *b = batch->bridge;
    const colo_plan_t *p = batch->s.plan;
    const colo_routes_t *exposes = reaching(p, pass, move);
    const bool sums = colo_plan_adds(p, pass) && !colo_bridge_gathers(&batch->s, b->now.far, pass);
    int32_t nexposed = 0;
    list->exposed = calloc((size_t)exposes->nmessages + 1, sizeof *list->exposed);
    if (!list->exposed)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %d messages", (int)exposes->nmessages);
    for (int32_t m = 0; m < exposes->nmessages; m++) {
        const int32_t peer = colo_comm_find(b->comm, exposes->message[m].peer);
        if (is_near(b, peer))
            list->exposed[nexposed++] = peer;
    }
    COLO_TRY(sums ? steps_that_add(b, p, list) : steps_that_move(batch, pass, move, list));
    *out = (colo_transfers_t){.name = pass == COLO_FORWARD ? "bridge forward" : "bridge backward",
                              .elem = colo_bridge_p2p_unit(b, p),
                              .nsteps = list->step->n,
                              .step = list->step->items,
                              .pulls = !sums && move == COLO_PULL,
                              .addends = sums ? (int32_t)p->addends : 0,
                              .addend = list->addend->items,
                              .blocks = b->blocks,
                              .nexposed = nexposed,
                              .exposed = list->exposed};
    return COLO_OK;
}

colo_status_t colo_ragged_p2p_list(colo_batch_t *batch)
{
    const colo_bridge_t *b = batch->bridge;
    const colo_plan_t *p = batch->s.plan;
    const int32_t agreed = b->agreed[COLO_FORWARD].moves;
    colo_ragged_steps_t *steps = &b->ragged->steps;
    colo_transfers_t pass[2] = {{.name = "bridge forward"}, {.name = "bridge backward"}};
    int32_t *exposed[2] = {NULL, NULL};
    colo_status_t st = COLO_OK;
    if (!b->p2p)
        return COLO_OK;
    batch->move = agreed ? (colo_move_t)agreed : COLO_PUSH;
    batch->unit = (int64_t)colo_bridge_p2p_unit(b, p);
    for (int i = 0; st == COLO_OK && i < (p->config.no_grad ? 1 : 2); i++) {
        list_t list = {.step = &steps->step[i], .addend = &steps->addend[i]};
        list.step->n = list.addend->n = 0;
        st = make(batch, (colo_pass_t)i, i ? (colo_move_t)moves_of(p, COLO_BACKWARD) : batch->move,
                  &list, &pass[i]);
        exposed[i] = list.exposed;
    }
    if (st == COLO_OK)
        st = b->comm->ops->peer->list(b->p2p, pass, &batch->list);
    if (st == COLO_OK)
        st = colo_bridge_p2p_relays(b, &batch->s);
    free(exposed[0]);
    free(exposed[1]);
    return st;
}

void colo_ragged_p2p_drop(colo_batch_t *batch)
{
    const colo_bridge_t *b = batch->bridge;
    colo_p2p_list_t **const list[] = {&batch->list, &batch->s.relay_list};
    for (int i = 0; i < 2; i++)
        if (*list[i] && colo_comm_i_own(b->comm, "bridge"))
            b->comm->ops->peer->drop(b->p2p, list[i]);
}

/* ---- calls ---- */

static size_t reach_of(const colo_tensor_t *t)
{
    int64_t reach = 1;
    for (int32_t i = 0; i < t->ndim; i++)
        reach += (t->shape[i] - 1) * t->stride[i];
    return (size_t)reach * colo_dtype_size(t->dtype);
}

static colo_reached_t *each_of(colo_reached_t *each, colo_move_t move, int32_t n)
{
    return each + (move == COLO_PULL ? n : 0);
}

/* The first of @t that peers reach and that is not registered, or NULL. @each: [n], out. */
static const colo_tensor_t *find_each(const colo_bridge_t *b, const colo_tensor_t *t, int32_t n,
                                      bool reached, colo_reached_t *all, colo_reached_t *each)
{
    const colo_tensor_t *missing = NULL;
    for (int32_t k = 0; k < n; k++) {
        each[k] = (colo_reached_t){.id = -1};
        if (!t || !t[k].data || colo_tensor_count(&t[k]) <= 0)
            continue;
        all->nothing = all->nothing && !reached;
        if (!b->comm->ops->peer->find(b->comm, t[k].data, reach_of(&t[k]), &each[k].id,
                                      &each[k].offset) &&
            reached && !missing)
            missing = &t[k];
    }
    return missing;
}

colo_status_t colo_ragged_p2p_find(const colo_batch_t *batch, colo_pass_t pass,
                                   const colo_tensor_t *in, const colo_tensor_t *out, int32_t n,
                                   colo_reached_t *all, colo_reached_t *each)
{
    const colo_bridge_t *b = batch->bridge;
    const colo_plan_t *p = batch->s.plan;
    const bool peers = b->transport == COLO_TRANSPORT_PEER;
    const struct colo_agreed *agreed = &b->agreed[pass];
    const colo_tensor_t *missing = NULL;
    bool reads = false;
    int64_t bytes;
    int32_t possible = moves_of(p, pass);
    *all = (colo_reached_t){.id = -1, .nothing = true, .p2p = b->p2p != NULL};
    if (!b->p2p)
        return COLO_OK;
    const bool agrees = !peers || pass == COLO_FORWARD;
    all->not_agreed = agrees && (!agreed->made || agreed->registrations !=
                                                      b->comm->ops->peer->registrations(b->comm));
    if (agrees && !all->not_agreed)
        possible = agreed->moves;
    for (colo_move_t move = COLO_PULL; move >= COLO_PUSH; move--) {
        if (!(possible & move))
            continue;
        missing = find_each(b, move == COLO_PULL ? in : out, n,
                            colo_bridge_p2p_count(b, reaching(p, pass, move), &bytes) > 0, all,
                            each_of(each, move, n));
        reads = move == COLO_PULL;
        all->moves |= missing ? 0 : move;
    }
    all->p2p = all->moves != 0;
    if (all->p2p || !possible || all->not_agreed)
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG,
                     "rank %lld: %s[%d] at %p is not registered over comm '%s', which %s requires; "
                     "use colo_memory_register()",
                     (long long)p->rank,
                     pass == COLO_FORWARD ? (reads ? "x" : "y") : (reads ? "d_y" : "d_x"),
                     (int)(missing - (reads ? in : out)), missing->data, b->comm->name,
                     peers ? "transport peer (COLO_TRANSPORT, or the bridge's)"
                           : "the pass's first call, with all ranks' registered,");
}

colo_status_t colo_ragged_p2p_near(colo_batch_t *batch, colo_pass_t pass, const colo_reached_t *all,
                                   colo_reached_t *each, const colo_carried_t *t, int32_t n,
                                   colo_near_t *near)
{
    int64_t *unit = &batch->bridge->ragged->unit;
    for (int32_t k = 0; k < n && !all->capturing; k++) {
        const int64_t own = t[k].per * (int64_t)colo_dtype_size(t[k].dtype);
        *unit = own > *unit ? own : *unit;
    }
    const bool wider = *unit > batch->unit && !all->capturing;
    if (wider || (pass == COLO_FORWARD && batch->move != (colo_move_t)all->moves)) {
        colo_ragged_p2p_drop(batch); /* or the list was made before ranks had agreed */
        COLO_TRY(colo_ragged_p2p_list(batch));
    }
    const bool pushes = all->moves == COLO_PUSH;
    *near = (colo_near_t){all, each_of(each, (colo_move_t)all->moves, n), batch->list, pushes};
    return COLO_OK;
}
