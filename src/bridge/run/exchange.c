/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exchange.c - execute a plan: exchange boxes with others, copy own ones, and the mirror of it.
 *
 * In host memory in that order, because an exchange to which a peer does not come writes nothing:
 * the output is untouched then. On a GPU the bridge's own stream carries messages while the
 * caller's stream copies, and waits for them at last. With two levels others follow: of sums
 * between nodes (add-up.c), and from output to output, inside each node; if a peer is missing only
 * there, the output is partly written. Forward and backward are the same loop over two lists of the
 * plan. The only addition in backward is the sum of PARTIAL gradients: what other context ranks
 * send lands in partial sums, one per addend, each with the shape of the rank's source part; then
 * every element is added up in addend order, which is rank order, or as the plan says. Which boxes,
 * from whom, is the plan's decision; how they travel, the comm's.
 */
#include "bridge/bridge.h"
#include "bridge/ragged.h"

#include "core/hash.h"
#include "core/device.h"
#include "core/error.h"
#include "comm/comm.h"

#include <stdlib.h>

/* ---- boxes ---- */

colo_box_t colo_exchange_box(const colo_carried_t *t, colo_view_t v, const colo_owned_t *own,
                             const colo_region_t *r, int64_t row, bool bytes)
{
    const int64_t elem = (int64_t)colo_dtype_size(t->dtype), cols = (r->h[1] - r->h[0]) * t->per;
    colo_box_t box = {.extent = {r->b[1] - r->b[0], r->s[1] - r->s[0], cols},
                      .stride = {v.stride[0], v.stride[1], v.stride[2]}};
    int64_t first = (r->b[0] - own->b0) * v.stride[0] + row * v.stride[1] +
                    (r->h[0] - own->h0) * t->per * v.stride[2];
    if (bytes) /* one sample */
        box = (colo_box_t){.extent = {r->s[1] - r->s[0], cols, elem},
                           .stride = {v.stride[1] * elem, v.stride[2] * elem, 1}};
    box.data = v.data ? v.data + first * elem : NULL;
    return box;
}

colo_box_t colo_bridge_box(colo_view_t v, const colo_owned_t *own)
{
    return (colo_box_t){.data = v.data,
                        .extent = {own->b1 - own->b0, own->rows, own->h1 - own->h0},
                        .stride = {v.stride[0], v.stride[1], v.stride[2]}};
}

/* The boxes of @n tensors, by region; of their inputs or outputs, on the side of the source or not.
 */
static void fill(const colo_shape_state_t *s, colo_box_t *boxes, const colo_routes_t *routes,
                 const colo_carried_t *t, int32_t n, bool input, bool src_side)
{
    const colo_owned_t *own = src_side ? &s->plan->own_src : &s->plan->own_dst;
    for (int64_t i = 0; i < routes->nregions; i++)
        for (int32_t k = 0; k < n; k++)
            boxes[i * n + k] = colo_exchange_box(
                &t[k], input ? t[k].in : t[k].out, own, &routes->region[i],
                src_side ? routes->offset[i].src_row : routes->offset[i].dst_row, s->bytes);
}

/* ---- messages: allocated once, filled by each call ---- */

static int by_peer(const void *a, const void *b)
{
    int32_t x = ((const colo_message_t *)a)->peer, y = ((const colo_message_t *)b)->peer;
    return (x > y) - (x < y);
}

/* Messages whose boxes move to @next, @n for each region instead of @was. */
static void rebase(const colo_pool_t *pool, colo_message_t *m, int32_t count, colo_box_t **boxes,
                   colo_box_t *next, int32_t was, int32_t n)
{
    for (int32_t i = 0; i < count; i++) {
        m[i].boxes = next + (m[i].boxes - *boxes) / was * n;
        m[i].nboxes = m[i].nboxes / was * n;
    }
    colo_pool_drop(pool, *boxes);
    *boxes = next;
}

/* @n boxes, filled in by each call. */
static colo_box_t *boxes_of(colo_pool_t *pool, int64_t n)
{
    return colo_pool_take(pool, (size_t)(n + 1) * sizeof(colo_box_t));
}

static colo_status_t widen(colo_pool_t *pool, colo_pass_messages_t *l, int64_t nsend, int64_t nrecv,
                           int32_t n)
{
    if (nsend > INT32_MAX / n || nrecv > INT32_MAX / n)
        return colo_fail(COLO_ERR_ARG, "bridge: %lld boxes of %d tensors, at most 2^31 - 1",
                         (long long)(nsend > nrecv ? nsend : nrecv), (int)n);
    colo_box_t *send = boxes_of(pool, nsend * n), *recv = boxes_of(pool, nrecv * n);
    if (!send || !recv) {
        colo_pool_drop(pool, send);
        colo_pool_drop(pool, recv);
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes of %d tensors",
                         (long long)(nsend + nrecv), (int)n);
    }
    rebase(pool, l->send, l->nsends, &l->send_box, send, l->tensors, n);
    rebase(pool, l->recv, l->nrecvs, &l->recv_box, recv, l->tensors, n);
    l->tensors = n;
    return COLO_OK;
}

colo_status_t colo_messages_widen(colo_shape_state_t *s, colo_pass_t pass, int32_t n)
{
    const colo_plan_t *p = s->plan;
    if (n == s->messages[pass].tensors && n == s->relay[pass].tensors)
        return COLO_OK;
    COLO_TRY(widen(p->pool, &s->messages[pass], p->exchange[pass][COLO_FIRST].send.nregions,
                   p->exchange[pass][COLO_FIRST].recv.nregions, n));
    if (pass == COLO_BACKWARD && colo_plan_sums_nodes(p))
        COLO_TRY(widen(p->pool, &s->node_sums,
                       p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send.nregions,
                       p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv.nregions, n));
    return widen(p->pool, &s->relay[pass], p->exchange[pass][COLO_RELAYS].send.nregions,
                 p->exchange[pass][COLO_RELAYS].recv.nregions, n);
}

static colo_status_t make(const colo_bridge_t *b, colo_pool_t *pool, const colo_routes_t *routes,
                          colo_message_t **out, colo_box_t **boxes, int32_t *count)
{
    *boxes = boxes_of(pool, routes->nregions);
    *out = colo_pool_take(pool, (2 * (size_t)routes->nmessages + 1) * sizeof **out); /* far_of() */
    if (!*boxes || !*out)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes", (long long)routes->nregions);
    for (int32_t i = 0; i < routes->nmessages; i++) {
        const colo_plan_message_t *m = &routes->message[i];
        int32_t peer = colo_comm_find(b->comm, m->peer);
        if (peer < 0)
            return colo_fail(COLO_ERR_MISSING,
                             "bridge: the plan names rank %lld, which is not in the communicator "
                             "'%s' of %d ranks",
                             (long long)m->peer, colo_comm_name(b->comm),
                             (int)colo_comm_size(b->comm));
        if (m->nregions > INT32_MAX)
            return colo_fail(COLO_ERR_ARG, "bridge: %lld boxes for rank %lld, at most 2^31 - 1",
                             (long long)m->nregions, (long long)m->peer);
        (*out)[i] = (colo_message_t){.peer = peer,
                                     .nboxes = (int32_t)m->nregions,
                                     .boxes = *boxes + (m->regions - routes->region)};
    }
    /* the plan's peers ascend as world ranks, which a comm may hold in another order */
    qsort(*out, (size_t)routes->nmessages, sizeof **out, by_peer);
    *count = routes->nmessages;
    return COLO_OK;
}

colo_status_t colo_messages_create(colo_bridge_t *b, colo_shape_state_t *s, colo_pass_t pass)
{
    colo_pass_messages_t *l = &s->messages[pass], *relay = &s->relay[pass], *sums = &s->node_sums;
    const colo_plan_t *p = s->plan;
    const int64_t nlocals = p->local[pass].nregions;
    l->tensors = relay->tensors = sums->tensors = 1;
    if (pass == COLO_BACKWARD && colo_plan_sums_nodes(p)) {
        COLO_TRY(make(b, p->pool, &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send, &sums->send,
                      &sums->send_box, &sums->nsends));
        COLO_TRY(make(b, p->pool, &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv, &sums->recv,
                      &sums->recv_box, &sums->nrecvs));
    }
    COLO_TRY(
        make(b, p->pool, &p->exchange[pass][COLO_FIRST].send, &l->send, &l->send_box, &l->nsends));
    COLO_TRY(make(b, p->pool, &p->exchange[pass][COLO_RELAYS].send, &relay->send, &relay->send_box,
                  &relay->nsends));
    COLO_TRY(make(b, p->pool, &p->exchange[pass][COLO_RELAYS].recv, &relay->recv, &relay->recv_box,
                  &relay->nrecvs));
    l->local_from = boxes_of(p->pool, nlocals);
    l->local_to = boxes_of(p->pool, nlocals);
    if (!l->local_from || !l->local_to)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes that stay", (long long)nlocals);
    return make(b, p->pool, &p->exchange[pass][COLO_FIRST].recv, &l->recv, &l->recv_box,
                &l->nrecvs);
}

void colo_messages_deinit(const colo_pool_t *pool, colo_pass_messages_t *l)
{
    void *const lists[] = {l->send, l->recv, l->send_box, l->recv_box, l->local_from, l->local_to};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        colo_pool_drop(pool, lists[i]);
    *l = (colo_pass_messages_t){0};
}

colo_status_t colo_staged_need(colo_bridge_t *b, const colo_shape_state_t *s)
{
    if (b->mem == COLO_CUDA && b->algo == COLO_EXACT && !b->side)
        COLO_TRY(b->ops->stream_create(2, &b->side));
    COLO_TRY(colo_bridge_sums_for(b, s->need_sums, false));
    return colo_arena_grow(b, &b->stage, s->need_stage, false, "staging of messages");
}

/* A sum on a device is a launch. If a ragged batch has many small regions, what stays on the rank
 * is copied to the others' addends, in few launches, and one sum is over all rows. A launch takes
 * as long as that copy of some MiB. */
static bool sums_whole(const colo_bridge_t *b, const colo_shape_state_t *s)
{
    enum { LARGE = 4 << 20 }; /* bytes of a region of the usual tensor, on average */
    const colo_plan_t *p = s->plan, *usual = b->now.plan;
    const int64_t n =
        p->local[COLO_BACKWARD].nregions + p->exchange[COLO_BACKWARD][COLO_FIRST].recv.nregions;
    const int64_t units = p->own_src.rows * (p->own_src.h1 - p->own_src.h0);
    if (!s->bytes || b->mem != COLO_CUDA)
        return false;
    return units * (usual->config.shape.features / p->config.shape.features) *
               (int64_t)colo_dtype_size(p->config.dtype) <
           n * LARGE;
}

static void need_sum(colo_shape_state_t *s, int64_t key)
{
    s->sum_of[key] = s->sum_of[key] < 0 ? s->nsums++ : s->sum_of[key];
}

/* Of those groups of terms from @x on that are added up here. */
static void need_groups(colo_shape_state_t *s, const colo_term_t *x)
{
    for (; !(x->use & COLO_TERM_LAST); x++)
        if (x->use == COLO_TERM_FIRST && !(x[1].use & COLO_TERM_FIRST))
            need_sum(s, colo_sum_key(s->plan, COLO_SUM_NODE, x->addend));
}

/* If nodes add up, each element that this rank needs is in one region of addend 0 of these. */
static const colo_routes_t **whole_lists(const colo_plan_t *p, const colo_routes_t *lists[3])
{
    lists[0] = &p->exchange[COLO_BACKWARD][COLO_FIRST].recv;
    lists[1] = &p->local[COLO_BACKWARD];
    lists[2] = &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv;
    return lists;
}

colo_status_t colo_partial_sums_create(colo_bridge_t *b, colo_shape_state_t *s)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *recv = &p->exchange[COLO_BACKWARD][COLO_FIRST].recv;
    if (p->addends == 1 || p->config.no_grad)
        return COLO_OK;
    if (!colo_dtype_is_float(p->config.dtype))
        return colo_fail(
            COLO_ERR_ARG,
            "bridge: PARTIAL gradients over %lld context ranks are summed, which %s is "
            "not made for; use DISJOINT, SHARDED or no_grad",
            (long long)p->addends, colo_dtype_name(p->config.dtype));
    if (p->addends > COLO_MAX_ADDENDS)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: PARTIAL gradients over %lld context ranks, at most %d; use "
                         "DISJOINT or SHARDED",
                         (long long)p->addends, COLO_MAX_ADDENDS);
    const int64_t keys =
        colo_sum_key(p, colo_plan_sums_nodes(p) ? COLO_SUM_LEAVES : COLO_SUM_NODE, 0) + 1;
    s->sum_of = malloc((size_t)keys * sizeof *s->sum_of);
    if (!s->sum_of)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld addends", (long long)p->addends);
    for (int64_t i = 0; i < keys; i++)
        s->sum_of[i] = -1;
    for (int64_t i = 0; i < recv->nregions; i++)
        need_sum(s, colo_sum_recv_key(p, &recv->region[i]));
    for (int64_t i = 0; i < p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv.nregions; i++)
        need_sum(s, colo_sum_key(p, COLO_SUM_NODE,
                                 p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv.region[i].addend));
    if (p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send.nregions > 0)
        need_sum(s, colo_sum_key(p, COLO_SUM_LEAVES, 0));
    const colo_routes_t *lists[3];
    for (int k = 0; colo_plan_sums_nodes(p) && k < 3; k++)
        for (int64_t i = 0; i < whole_lists(p, lists)[k]->nregions; i++)
            if (lists[k]->region[i].addend == 0)
                need_groups(s, &p->term[lists[k]->offset[i].order]);
    if ((colo_plan_sums_nodes(p) || sums_whole(b, s)) && p->local[COLO_BACKWARD].nregions > 0)
        need_sum(s, p->own_addend);
    s->sum_size = colo_partial_sum_bytes(p, 1, p->config.dtype);
    const int32_t n = s->nsums;
    if (s->bytes) /* of a ragged batch: in memory of the bridge, by call */
        return COLO_OK;
    s->need_sums = s->sum_size * (size_t)n;
    return b->lazy ? COLO_OK : colo_staged_need(b, s); /* peer-to-peer adds up without one */
}

/* ---- routes ---- */

static colo_status_t all_members(const colo_bridge_t *b, colo_shape_state_t *s)
{
    const int32_t n = colo_comm_size(b->comm);
    s->members = malloc((size_t)n * sizeof *s->members);
    if (!s->members)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)n);
    for (int32_t k = 0; k < n; k++)
        s->members[k] = k;
    s->nmembers = n;
    return COLO_OK;
}

/* @summed: what arrives goes to partial sums. */
static void fill_first(const colo_shape_state_t *s, colo_pass_t pass, const colo_carried_t *t,
                       int32_t n, bool summed)
{
    const bool fwd = pass == COLO_FORWARD;
    const colo_plan_t *p = s->plan;
    const colo_routes_t *recv = &p->exchange[pass][COLO_FIRST].recv;
    const colo_pass_messages_t *l = &s->messages[pass];
    fill(s, l->send_box, &p->exchange[pass][COLO_FIRST].send, t, n, true, fwd);
    if (!summed)
        fill(s, l->recv_box, recv, t, n, false, !fwd);
    for (int64_t i = 0; summed && i < recv->nregions; i++)
        for (int32_t k = 0; k < n; k++)
            l->recv_box[i * n + k] = colo_sum_box(s, &t[k], colo_sum_recv_key(p, &recv->region[i]),
                                                  &recv->region[i], &recv->offset[i], s->bytes);
}

/* From output to output: what entered the node here goes to the others that need it. */
static void fill_relay(const colo_shape_state_t *s, colo_pass_t pass, const colo_carried_t *t,
                       int32_t n)
{
    const bool fwd = pass == COLO_FORWARD;
    fill(s, s->relay[pass].send_box, &s->plan->exchange[pass][COLO_RELAYS].send, t, n, false, !fwd);
    fill(s, s->relay[pass].recv_box, &s->plan->exchange[pass][COLO_RELAYS].recv, t, n, false, !fwd);
}

/* Sums between nodes. */
static void fill_sums(const colo_shape_state_t *s, const colo_carried_t *t, int32_t n)
{
    const colo_plan_t *p = s->plan;
    for (int recv = 0; recv < 2; recv++) {
        const colo_routes_t *r = recv ? &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].recv
                                      : &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send;
        for (int64_t i = 0; i < r->nregions; i++)
            for (int32_t k = 0; k < n; k++)
                (recv ? s->node_sums.recv_box : s->node_sums.send_box)[i * n + k] =
                    colo_sum_box(s, &t[k],
                                 recv ? colo_sum_key(p, COLO_SUM_NODE, r->region[i].addend)
                                      : colo_sum_key(p, COLO_SUM_LEAVES, 0),
                                 &r->region[i], &r->offset[i], s->bytes);
    }
}

size_t colo_messages_staging(const colo_comm_t *comm, const colo_shape_state_t *s, colo_pass_t pass,
                             size_t elem, size_t sum_elem)
{
    const colo_pass_messages_t *l[] = {&s->messages[pass], &s->relay[pass], &s->node_sums};
    size_t most = 0;
    for (int i = 0; i < (pass == COLO_BACKWARD ? 3 : 2); i++) {
        const size_t n = comm->ops->subconnection_stage(l[i]->send, l[i]->nsends, l[i]->recv,
                                                        l[i]->nrecvs, i == 2 ? sum_elem : elem);
        most = n > most ? n : most;
    }
    return most;
}

colo_status_t colo_messages_stage(colo_bridge_t *b, colo_shape_state_t *s)
{
    const colo_comm_ops_t *ops = b->comm->ops;
    const size_t elem = colo_dtype_size(s->plan->config.dtype);
    if (!ops->subconnection_create || b->mem != COLO_CUDA)
        return COLO_OK;
    if (b->ragged) /* tables may tie any ranks; staging is theirs, too */
        return all_members(b, s);
    COLO_TRY(colo_component_find(s->plan, b->comm, &s->members, &s->nmembers));
    /* extents are all that counts; each call fills in the rest */
    const colo_carried_t none = {.per = 1, .dtype = s->plan->config.dtype};
    for (int pass = 0; pass < 2; pass++) {
        fill_first(s, (colo_pass_t)pass, &none, 1, false);
        fill_relay(s, (colo_pass_t)pass, &none, 1);
        if (pass == COLO_BACKWARD)
            fill_sums(s, &none, 1);
        const size_t n = colo_messages_staging(b->comm, s, (colo_pass_t)pass, elem,
                                               colo_dtype_size(colo_sum_wide(none.dtype)));
        s->need_stage = n > s->need_stage ? n : s->need_stage;
    }
    return b->lazy ? COLO_OK : colo_staged_need(b, s);
}

colo_status_t colo_messages_connect(colo_bridge_t *b, colo_shape_state_t *s)
{
    if (s->subconnection || s->nmembers == 0)
        return COLO_OK;
    return b->comm->ops->subconnection_create(b->comm, s->members, s->nmembers,
                                              colo_hash_i64(b->tag, (int64_t)b->reshapes),
                                              &s->subconnection);
}

/* What create or reshape left for the first call that is staged, which cannot be captured. */
static colo_status_t make_ready(colo_bridge_t *b, colo_stream_t stream, bool *capturing)
{
    colo_shape_state_t *s = &b->now; /* the route is the bridge's */
    const bool connects = s->nmembers && !s->subconnection;
    const bool grows = s->need_sums > b->sums.size || s->need_stage > b->stage.size;
    colo_queries_t q = {0};
    if (!connects && !grows && !b->ragged)
        return COLO_OK;
    colo_status_t st = b->ops->stream_check(&q, stream, capturing);
    if (*capturing && (connects || grows)) /* on all ranks or none: no rank waits, the comm lives */
        return colo_fail(COLO_ERR_STATE,
                         "bridge: the first staged call of a shape allocates and connects, which "
                         "cannot be captured; run one before the capture, or register the memory");
    if (connects) { /* with the others, which would not hear in there of what fails here alone */
        const colo_status_t connected = colo_messages_connect(b, s);
        st = st < 0 ? st : connected;
    }
    if (st == COLO_OK)
        st = colo_staged_need(b, s);
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK;
}

/* Those of ranks out of reach, put behind all of them. */
static int32_t far_of(const colo_bridge_t *b, colo_message_t *m, int32_t n)
{
    const colo_comm_t *c = b->comm;
    int32_t far = 0;
    for (int32_t i = 0; i < n; i++)
        if (!c->ops->peer->reaches(c, c->rank, m[i].peer))
            m[n + far++] = m[i];
    return far;
}

/* @more: NULL: all messages; else what ranks in reach move otherwise. */
static colo_status_t exchange(colo_bridge_t *b, colo_op_desc_t op, const colo_pass_messages_t *l,
                              const colo_exchange_t *more, colo_stream_t stream)
{
    colo_exchange_t x = more ? *more : (colo_exchange_t){.op = op};
    x.subconnection = b->now.subconnection;
    x.stage = b->stage.data;
    x.stage_bytes = b->stage.size;
    x.send = more ? l->send + l->nsends : l->send;
    x.recv = more ? l->recv + l->nrecvs : l->recv;
    x.nsends = more ? far_of(b, l->send, l->nsends) : l->nsends;
    x.nrecvs = more ? far_of(b, l->recv, l->nrecvs) : l->nrecvs;
    return colo_comm_i_exchange_over(b->comm, &x, stream);
}

colo_status_t colo_exchange_keep(colo_bridge_t *b, colo_shape_state_t *s, colo_pass_t pass,
                                 const colo_carried_t *t, bool narrow, colo_stream_t stream)
{
    const colo_box_list_fn copy = narrow ? b->ops->box_list_narrow : b->ops->box_list;
    const colo_routes_t *local = &s->plan->local[pass];
    colo_pass_messages_t *l = &s->messages[pass];
    const bool fwd = pass == COLO_FORWARD;
    fill(s, l->local_from, local, t, 1, true, fwd);
    fill(s, l->local_to, local, t, 1, false, !fwd);
    return copy(l->local_to, l->local_from, local->nregions,
                s->bytes ? 1 : colo_dtype_size(t->dtype), stream);
}

colo_carried_t colo_exchange_tensor(const colo_bridge_t *b, colo_view_t in, colo_view_t out)
{
    return (colo_carried_t){.in = in, .out = out, .per = 1, .dtype = b->now.plan->config.dtype};
}

/* ---- sums of PARTIAL gradients ---- */

/* The rank's part of tensor @t, contiguous, as a partial sum. */
static colo_view_t sum_view(const colo_shape_state_t *s, const colo_carried_t *t, int64_t key)
{
    int64_t x[3];
    colo_sum_extent(s->plan, x);
    const size_t begin = (size_t)s->sum_of[key] * s->sum_size + t->sums;
    return (colo_view_t){.data = s->sums ? (char *)s->sums + begin : NULL,
                         .stride = {x[1] * x[2] * t->per, x[2] * t->per, 1}};
}

colo_dtype_t colo_sum_dtype(const colo_plan_t *p, const colo_carried_t *t, int64_t key)
{
    const int64_t kind = key / p->addends;
    return kind == COLO_SUM_NODE || kind == COLO_SUM_LEAVES ? colo_sum_wide(t->dtype) : t->dtype;
}

colo_box_t colo_sum_box(const colo_shape_state_t *s, const colo_carried_t *t, int64_t key,
                        const colo_region_t *r, const colo_offset_t *where, bool bytes)
{
    const colo_plan_t *p = s->plan;
    const bool collects = key >= colo_sum_key(p, COLO_SUM_COLLECTED, 0);
    colo_carried_t as = *t;
    as.dtype = colo_sum_dtype(p, t, key);
    return colo_exchange_box(&as, sum_view(s, t, key), collects ? &p->own_dst : &p->own_src, r,
                             collects ? where->dst_row : where->src_row, bytes);
}

/* d_x[region] = sum over addends, in addend order; own addend from d_y where it is held here. */
static colo_status_t sum_region(colo_bridge_t *b, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_region_t *r,
                                const colo_offset_t *where, bool own_is_local, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    colo_box_t term[COLO_MAX_ADDENDS] = {{0}};
    colo_box_t to = colo_exchange_box(t, t->out, &p->own_src, r, where->src_row, false);
    for (int64_t addend = 0; addend < p->addends; addend++)
        term[addend] = own_is_local && addend == p->own_addend
                           ? colo_exchange_box(t, t->in, &p->own_dst, r, where->dst_row, false)
                           : colo_exchange_box(t, sum_view(s, t, addend), &p->own_src, r,
                                               where->src_row, false);
    return b->ops->box_sum(&to, term, (int32_t)p->addends, t->dtype, stream);
}

/* Copies what stays here to where the other addends are. */
static colo_status_t keep_with_addends(colo_bridge_t *b, const colo_shape_state_t *s,
                                       const colo_carried_t *t, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *local = &p->local[COLO_BACKWARD];
    const colo_pass_messages_t *l = &s->messages[COLO_BACKWARD];
    for (int64_t i = 0; i < local->nregions; i++) {
        const colo_region_t *r = &local->region[i];
        l->local_from[i] =
            colo_exchange_box(t, t->in, &p->own_dst, r, local->offset[i].dst_row, s->bytes);
        l->local_to[i] = colo_sum_box(s, t, p->own_addend, r, &local->offset[i], s->bytes);
    }
    return b->ops->box_list(l->local_to, l->local_from, local->nregions,
                            s->bytes ? 1 : colo_dtype_size(t->dtype), stream);
}

static colo_status_t sum_whole(colo_bridge_t *b, const colo_shape_state_t *s,
                               const colo_carried_t *t, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_owned_t *own = &p->own_src;
    const colo_region_t all = {
        .b = {own->b0, own->b1}, .s = {0, own->rows}, .h = {own->h0, own->h1}};
    if (own->rows == 0)
        return COLO_OK;
    COLO_TRY(keep_with_addends(b, s, t, stream));
    colo_box_t term[COLO_MAX_ADDENDS] = {{0}},
               sum = colo_exchange_box(t, t->out, own, &all, 0, false);
    for (int64_t addend = 0; addend < p->addends; addend++)
        term[addend] = colo_exchange_box(t, sum_view(s, t, addend), own, &all, 0, false);
    return b->ops->box_sum(&sum, term, (int32_t)p->addends, t->dtype, stream);
}

static colo_status_t sum_addends(colo_bridge_t *b, const colo_shape_state_t *s,
                                 const colo_carried_t *t, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *local = &p->local[COLO_BACKWARD],
                        *recv = &p->exchange[COLO_BACKWARD][COLO_FIRST].recv;
    if (colo_plan_sums_nodes(p)) {
        const colo_routes_t *lists[3];
        return colo_add_up_terms(b, s, t, whole_lists(p, lists), stream);
    }
    if (sums_whole(b, s))
        return sum_whole(b, s, t, stream);
    /* own addend: held here or received; the two lists together cover each element once */
    int64_t own = p->own_addend >= 0 ? p->own_addend : 0;
    for (int64_t i = 0; i < local->nregions; i++)
        COLO_TRY(sum_region(b, s, t, &local->region[i], &local->offset[i], true, stream));
    for (int64_t i = 0; i < recv->nregions; i++)
        if (recv->region[i].addend == own)
            COLO_TRY(sum_region(b, s, t, &recv->region[i], &recv->offset[i], false, stream));
    return COLO_OK;
}

/* ---- forward and backward ---- */

/* What ranks of this node have collected crosses as one sum. */
static colo_status_t exchange_sums(colo_bridge_t *b, colo_shape_state_t *s, colo_op_desc_t op,
                                   const colo_carried_t *t, int32_t n, colo_stream_t stream)
{
    colo_status_t st = COLO_OK;
    for (int32_t k = 0; k < n && st == COLO_OK; k++) {
        st = keep_with_addends(b, s, &t[k], stream);
        if (st == COLO_OK)
            st = colo_add_up_for_others(b, s, &t[k], stream);
    }
    if (st < 0)
        return colo_comm_i_fail(b->comm, st);
    op.dtype = s->bytes ? op.dtype : colo_sum_wide(op.dtype);
    return s->plan->exchange[COLO_BACKWARD][COLO_NODE_SUMS].all_come
               ? exchange(b, op, &s->node_sums, NULL, stream)
               : COLO_OK;
}

colo_status_t colo_exchange_run(colo_bridge_t *b, colo_shape_state_t *s, colo_op_desc_t op,
                                colo_pass_t pass, const colo_carried_t *t, int32_t n,
                                const colo_near_t *near, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_pass_messages_t *l = &s->messages[pass];
    const bool summed = pass == COLO_BACKWARD && p->addends > 1;
    bool capturing = false;
    COLO_TRY(make_ready(b, stream, &capturing));
    if (!s->bytes)
        s->sums = b->sums.data;
    fill_first(s, pass, t, n, summed);
    fill_relay(s, pass, t, n);
    if (summed)
        fill_sums(s, t, n);
    if (s->bytes) {
        colo_status_t st = colo_ragged_stage(b, s, pass, capturing);
        if (st < 0)
            return colo_comm_i_fail(b->comm, st);
    }
    colo_near_part_t part = {b, s, pass, t, n, near, false};
    const colo_exchange_t more = near ? colo_bridge_p2p_part(&part, op) : (colo_exchange_t){0};
    const bool keeps = !summed && !near;
    colo_stream_t side = stream;
    if (keeps)
        COLO_TRY(colo_bridge_fork(b, s, pass, t, n, stream, &side));
    colo_status_t st = exchange(b, op, l, near ? &more : NULL, side), own = COLO_OK;
    for (int32_t k = 0; st == COLO_OK && own == COLO_OK && keeps && k < n; k++)
        own = colo_exchange_keep(b, s, pass, &t[k], side != stream, stream);
    if (own < 0) /* the others have all they need, and would go on */
        st = colo_comm_i_fail(b->comm, own);
    COLO_TRY(side == stream ? st : colo_bridge_join(b, st, stream));
    if (summed && colo_plan_sums_nodes(p))
        COLO_TRY(exchange_sums(b, s, op, t, n, stream));
    for (int32_t k = 0; k < n && own == COLO_OK && summed; k++)
        if (t[k].per > 0) /* without features there may be no memory */
            own = sum_addends(b, s, &t[k], stream);
    if (own < 0)
        return colo_comm_i_fail(b->comm, own);
    if (!p->exchange[pass][COLO_RELAYS].all_come)
        return COLO_OK;
    if (!near || !near->relays)
        return exchange(b, op, &s->relay[pass], NULL, stream);
    part.relays = true;
    const colo_exchange_t passed = colo_bridge_p2p_part(&part, op);
    return exchange(b, op, &s->relay[pass], &passed, stream);
}
