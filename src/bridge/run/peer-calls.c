/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer-calls.c - calls of a bridge between GPUs that reach each other.
 *
 * A call is peer-to-peer if the tensor that peers reach lies in registered memory, else it is
 * staged (exchange.c). That is a rank's own view; the contract in memory.h makes it the same on all
 * ranks, COLO_CHECK=2 compares it, and where it differs anyway the deadline ends the wait. A rank
 * that has nothing of that tensor has no view, though it may have much to send: where there is such
 * a rank, all agree over the host communicator in the pass's first call, and the result holds until
 * something else is registered.
 */
#include "bridge/bridge.h"
#include "bridge/ragged.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"

#include <stdlib.h>

bool colo_bridge_p2p_reaches_dst(const colo_plan_t *p, colo_pass_t pass)
{
    return pass == COLO_FORWARD || colo_plan_adds(p, pass);
}

static size_t reach_of(const colo_tensor_t *t)
{
    int64_t reach = 1;
    for (int32_t i = 0; i < t->ndim; i++)
        reach += (t->shape[i] - 1) * t->stride[i];
    return (size_t)reach * colo_dtype_size(t->dtype);
}

colo_status_t colo_bridge_p2p_find(const colo_bridge_t *b, colo_pass_t pass,
                                   const colo_tensor_t *in, const colo_tensor_t *out,
                                   colo_reached_t *r)
{
    const bool dst = colo_bridge_p2p_reaches_dst(b->now.plan, pass);
    const colo_tensor_t *t = (pass == COLO_FORWARD) == dst ? out : in;
    const char *name = pass == COLO_FORWARD ? "y" : dst ? "d_y" : "d_x";
    *r = (colo_reached_t){.moves = COLO_PUSH, .id = -1}; /* a pass has one move */
    if (!b->p2p)
        return COLO_OK;
    const colo_peer_ops_t *peer = b->comm->ops->peer;
    const bool asymmetric = b->now.asymmetric[pass] && b->transport == COLO_TRANSPORT_AUTO;
    const struct colo_agreed *agreed = &b->agreed[pass];
    const colo_plan_t *p = b->now.plan;
    const bool peers = b->transport == COLO_TRANSPORT_PEER, adds = pass == COLO_BACKWARD && dst;
    const int32_t reach = adds ? p->exchange[pass][COLO_FIRST].send.nmessages
                               : p->exchange[pass][COLO_FIRST].recv.nmessages;
    bool must = peers && reach > 0; /* else others do not look at it */
    r->nothing = !t || !t->data || colo_tensor_count(t) <= 0;
    r->p2p = r->nothing || peer->find(b->comm, t->data, reach_of(t), &r->id, &r->offset) ||
             (peers && !must);
    if (asymmetric && (!agreed->made || agreed->registrations != peer->registrations(b->comm))) {
        r->not_agreed = true;
        return COLO_OK;
    }
    if (asymmetric) {
        must = agreed->moves != 0;
        r->p2p = r->p2p && must;
    }
    if (r->p2p || !must)
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG,
                     "rank %lld: %s at %p is not registered over comm '%s', which %s requires; "
                     "use colo_memory_register()",
                     (long long)p->rank, name, t->data, b->comm->name,
                     asymmetric ? "the pass's first call, with all ranks' registered,"
                                : "transport peer (COLO_TRANSPORT, or the bridge's)");
}

colo_status_t colo_bridge_p2p_agree(colo_bridge_t *b, colo_pass_t pass, colo_reached_t *r)
{
    enum { NOTHING = 4 };
    const int32_t size = b->comm->size;
    struct colo_agreed *agreed = &b->agreed[pass];
    const uint64_t mine = r->nothing ? NOTHING : r->p2p ? (uint64_t)r->moves : 0;
    int32_t moves = COLO_PUSH | COLO_PULL, registered = 0, first = -1;
    COLO_AUTOFREE uint64_t *all = malloc((size_t)size * sizeof *all);
    if (!all)
        return colo_comm_i_fail(b->comm, colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)size));
    COLO_TRY(colo_comm_i_gather(colo_comm_i_control(b->comm), COLO_OP_ALL_GATHER,
                                COLO_CATEGORY_CHECK, &mine, all, 1));
    for (int32_t k = 0; k < size; k++) {
        if (all[k] == NOTHING)
            continue;
        registered += all[k] != 0;
        moves &= (int32_t)all[k];
        first = !moves && first < 0 ? k : first; /* leaves no move that all have */
    }
    const bool any = registered > 0 || first >= 0;
    /* if no rank has anything of a ragged batch, another batch has to say */
    *agreed = (struct colo_agreed){.made = !b->ragged || any,
                                   .moves = !any                ? 0
                                            : moves & COLO_PUSH ? COLO_PUSH
                                                                : moves,
                                   .registrations = b->comm->ops->peer->registrations(b->comm)};
    r->moves = agreed->moves ? agreed->moves : COLO_PUSH;
    r->p2p = agreed->moves || (!any && b->transport == COLO_TRANSPORT_PEER);
    if (!r->p2p && b->transport == COLO_TRANSPORT_PEER) {
        agreed->made = false;
        return colo_fail(COLO_ERR_ARG,
                         "bridge: neither y nor x is registered over comm '%s' on all ranks that "
                         "have rows, which transport peer (COLO_TRANSPORT, or the bridge's) "
                         "requires; use colo_memory_register()",
                         b->comm->name);
    }
    if (registered == 0 || r->p2p)
        return COLO_OK;
    colo_log(COLO_LOG_INFO,
             "bridge: staged, on all ranks: the tensors of %d ranks are registered, that of "
             "rank %d of '%s' is not",
             (int)registered, (int)first, b->comm->name);
    return COLO_OK;
}

/* Bytes of @n tensors, of which the usual one has @bytes. */
int64_t colo_bridge_bytes_of(const colo_bridge_t *b, const colo_shape_state_t *s, int64_t bytes,
                             const colo_carried_t *t, int32_t n)
{
    const colo_plan_config_t *usual = &b->now.plan->config;
    if (bytes == 0) /* there may be no features */
        return 0;
    const int64_t unit = usual->shape.features / s->plan->config.shape.features *
                         (int64_t)colo_dtype_size(usual->dtype);
    int64_t all = 0;
    for (int32_t k = 0; k < n; k++)
        all += bytes / unit * t[k].per * (int64_t)colo_dtype_size(t[k].dtype);
    return all;
}

static colo_p2p_tensor_t tensor_of(const colo_shape_state_t *s, bool gathers,
                                   const colo_carried_t *t, const colo_reached_t *reached)
{
    const int64_t elem = (int64_t)colo_dtype_size(t->dtype);
    int64_t sum[3];
    colo_sum_extent(s->plan, sum);
    colo_p2p_tensor_t to = {.per = t->per,
                            .dtype = t->dtype,
                            .elem = (size_t)elem,
                            .in = t->in.data,
                            .out = t->out.data,
                            .id = reached->id,
                            .offset = reached->offset};
    for (int i = 0; i < 3; i++) {
        to.in_step[i] = t->in.stride[i] * elem;
        to.out_step[i] = t->out.stride[i] * elem;
    }
    if (gathers) {
        const int64_t row = sum[2] * t->per * elem;
        to.out = s->sums ? (char *)s->sums + t->sums : NULL;
        to.out_step[0] = s->bytes ? (int64_t)s->sum_size : sum[1] * row;
        to.out_step[1] = row;
        to.out_step[2] = elem;
    }
    return to;
}

/* All tensors in one call of the path. */
static colo_status_t launch(const colo_near_part_t *m, colo_stream_t stream)
{
    colo_bridge_t *b = m->b;
    const bool gathers = colo_bridge_gathers(m->s, b->now.far, m->pass);
    colo_p2p_tensor_t one, *tensor = &one;
    if (m->n > 1) /* of a ragged batch */
        tensor = colo_list_zeroed(&b->ragged->tensors, m->n, sizeof *tensor);
    colo_p2p_call_t call = {.list = m->relays ? m->s->relay_list : m->near->list,
                            .tensor = tensor,
                            .device = m->near->all->device,
                            .capturing = m->near->all->capturing};
    if (!tensor)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %d tensors", (int)m->n);
    for (int32_t k = 0; k < m->n; k++) {
        colo_carried_t t = m->t[k];
        t.in = m->relays ? t.out : t.in;
        if (t.per > 0)
            tensor[call.n++] = tensor_of(m->s, gathers, &t, &m->near->each[k]);
    }
    return b->comm->ops->peer->run(b->p2p, m->pass, &call, stream);
}

static colo_status_t move(void *arg, colo_stream_t stream)
{
    const colo_near_part_t *m = arg;
    const colo_plan_t *p = m->s->plan;
    int64_t bytes;
    colo_status_t st = COLO_OK;
    if (m->relays ||
        colo_bridge_p2p_count(m->b, &p->exchange[m->pass][COLO_FIRST].send, &bytes) +
            colo_bridge_p2p_count(m->b, &p->exchange[m->pass][COLO_FIRST].recv, &bytes))
        return launch(m, stream);
    /* a plain copy is faster than a kernel without peers */
    for (int32_t k = 0; st == COLO_OK && k < m->n; k++)
        if (m->t[k].per > 0 && !colo_bridge_gathers(m->s, m->b->now.far, m->pass))
            st = colo_exchange_keep(m->b, m->s, m->pass, &m->t[k], false, stream);
    return st;
}

colo_exchange_t colo_bridge_p2p_part(colo_near_part_t *m, colo_op_desc_t op)
{
    const colo_plan_t *p = m->s->plan;
    int64_t sent, received;
    const int32_t ns = colo_bridge_p2p_count(m->b,
                                             m->relays ? &p->exchange[m->pass][COLO_RELAYS].send
                                                       : &p->exchange[m->pass][COLO_FIRST].send,
                                             &sent),
                  nr = colo_bridge_p2p_count(m->b,
                                             m->relays ? &p->exchange[m->pass][COLO_RELAYS].recv
                                                       : &p->exchange[m->pass][COLO_FIRST].recv,
                                             &received);
    return (colo_exchange_t){.op = op,
                             .more = move,
                             .arg = m,
                             .more_peers = ns > nr ? ns : nr,
                             .more_sent = colo_bridge_bytes_of(m->b, m->s, sent, m->t, m->n),
                             .more_received =
                                 colo_bridge_bytes_of(m->b, m->s, received, m->t, m->n)};
}

colo_status_t colo_bridge_p2p_run(colo_near_part_t *m, colo_op_desc_t op, colo_stream_t stream)
{
    colo_comm_t *c = m->b->comm;
    const colo_exchange_t x = colo_bridge_p2p_part(m, op);
    if (!c->ops->peer->reaches(c, -1, -1)) /* others exchange messages, too */
        return colo_comm_i_exchange_over(c, &x, stream);
    const uint64_t seq = colo_comm_i_begin(c, op, x.more_sent, x.more_received, x.more_peers);
    const colo_status_t st = move(m, stream);
    colo_comm_i_end(c, seq, st);
    return st < 0 ? colo_comm_i_fail(c, st) : st;
}
