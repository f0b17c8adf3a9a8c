/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exchange.c - execute a plan: exchange boxes with others, copy own ones, and the mirror of it.
 *
 * In that order, because an exchange to which a peer does not come writes nothing: the output is
 * untouched then. Forward and backward are the same loop over two lists of the plan. The only
 * addition in backward is the sum of PARTIAL gradients: what other context ranks send lands in
 * slabs, one a level, each shaped like the rank's source part; then every element is added up in
 * level order, which is rank order. Which boxes, from whom, is the plan's decision; how they
 * travel, the comm's.
 */
#include "bridge/bridge.h"

#include "core/hash.h"
#include "core/ops.h"
#include "core/try.h"
#include "comm/comm.h"

#include <stdlib.h>

/* ---- boxes ---- */

static colo_box_t box_at(colo_view_t v, const colo_owned_t *own, const colo_region_t *r,
                         int64_t row, size_t elem)
{
    colo_box_t box = {.extent = {r->b[1] - r->b[0], r->s[1] - r->s[0], r->h[1] - r->h[0]},
                      .stride = {v.stride[0], v.stride[1], v.stride[2]}};
    int64_t at =
        (r->b[0] - own->b0) * v.stride[0] + row * v.stride[1] + (r->h[0] - own->h0) * v.stride[2];
    box.data = v.data ? v.data + at * (int64_t)elem : NULL;
    return box;
}

colo_box_t colo_bridge_box(colo_view_t v, const colo_owned_t *own)
{
    return (colo_box_t){.data = v.data,
                        .extent = {own->b1 - own->b0, own->rows, own->h1 - own->h0},
                        .stride = {v.stride[0], v.stride[1], v.stride[2]}};
}

static void fill(colo_box_t *boxes, const colo_routes_t *routes, colo_view_t v,
                 const colo_owned_t *own, bool src_side, size_t elem)
{
    for (int64_t i = 0; i < routes->nregions; i++)
        boxes[i] = box_at(v, own, &routes->region[i],
                          src_side ? routes->place[i].src_row : routes->place[i].dst_row, elem);
}

/* ---- lanes: allocated once, filled by each call ---- */

static int by_peer(const void *a, const void *b)
{
    int32_t x = ((const colo_message_t *)a)->peer, y = ((const colo_message_t *)b)->peer;
    return (x > y) - (x < y);
}

static colo_status_t make(const colo_bridge_t *b, const colo_routes_t *routes, colo_message_t **out,
                          colo_box_t **boxes, int32_t *count)
{
    *boxes = calloc((size_t)routes->nregions + 1, sizeof **boxes);
    *out = calloc((size_t)routes->nmessages + 1, sizeof **out);
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

colo_status_t colo_lane_create(colo_bridge_t *b, colo_shaped_t *s, colo_way_t way)
{
    colo_lane_t *l = &s->lane[way];
    const size_t nlocals = (size_t)s->plan->local[way].nregions;
    COLO_TRY(make(b, &s->plan->send[way], &l->send, &l->send_box, &l->nsends));
    l->local_from = calloc(nlocals + 1, sizeof *l->local_from);
    l->local_to = calloc(nlocals + 1, sizeof *l->local_to);
    if (!l->local_from || !l->local_to)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %zu boxes that stay", nlocals);
    return make(b, &s->plan->recv[way], &l->recv, &l->recv_box, &l->nrecvs);
}

void colo_lane_deinit(colo_lane_t *l)
{
    free(l->send);
    free(l->recv);
    free(l->send_box);
    free(l->recv_box);
    free(l->local_from);
    free(l->local_to);
    *l = (colo_lane_t){0};
}

static size_t part_bytes(const colo_owned_t *o, size_t elem)
{
    return (size_t)((o->b1 - o->b0) * o->rows * (o->h1 - o->h0)) * elem;
}

colo_status_t colo_staged_need(colo_shaped_t *s)
{
    colo_status_t st = COLO_OK;
    if (s->late_slab) {
        st = colo_mem_alloc(s->mem, s->late_slab, &s->slab);
        if (st < 0)
            return colo_fail_prefix(st, "bridge: addends of %d levels",
                                    (int)(s->late_slab / s->slab_size));
        s->scratch = s->late_slab;
        s->late_slab = 0;
    }
    if (s->late_stage) {
        st = colo_mem_alloc(s->mem, s->late_stage, &s->stage);
        if (st < 0)
            return colo_fail_prefix(st, "bridge: staging of messages");
        s->stage_size = s->late_stage;
        s->late_stage = 0;
    }
    return COLO_OK;
}

colo_status_t colo_slab_create(const colo_bridge_t *b, colo_shaped_t *s)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *recv = &p->recv[COLO_BACKWARD];
    s->mem = b->mem;
    if (p->levels == 1 || p->config.no_grad)
        return COLO_OK;
    if (!colo_dtype_is_float(p->config.dtype))
        return colo_fail(
            COLO_ERR_ARG,
            "bridge: PARTIAL gradients over %lld context ranks are summed, which %s is "
            "not made for; use DISJOINT, SHARDED or no_grad",
            (long long)p->levels, colo_dtype_name(p->config.dtype));
    if (p->levels > COLO_MAX_ADDENDS)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: PARTIAL gradients over %lld context ranks, at most %d; use "
                         "DISJOINT or SHARDED",
                         (long long)p->levels, COLO_MAX_ADDENDS);
    s->slab_of = malloc((size_t)p->levels * sizeof *s->slab_of);
    if (!s->slab_of)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld levels", (long long)p->levels);
    int32_t n = 0;
    for (int64_t i = 0; i < p->levels; i++)
        s->slab_of[i] = -1;
    for (int64_t i = 0; i < recv->nregions; i++) {
        int32_t *slot = &s->slab_of[recv->region[i].level];
        *slot = *slot < 0 ? n++ : *slot;
    }
    s->slab_size = part_bytes(&p->own_src, colo_dtype_size(p->config.dtype));
    s->late_slab = s->slab_size * (size_t)n;
    return b->late ? COLO_OK : colo_staged_need(s); /* the direct path adds up without one */
}

/* ---- routes ---- */

colo_status_t colo_lane_stage(colo_bridge_t *b, colo_shaped_t *s)
{
    const colo_comm_ops_t *ops = b->comm->ops;
    const size_t elem = colo_dtype_size(s->plan->config.dtype);
    if (!ops->route_create || b->mem != COLO_CUDA)
        return COLO_OK;
    COLO_TRY(colo_component_find(s->plan, b->comm, &s->members, &s->nmembers));
    for (int way = 0; way < 2; way++) {
        colo_lane_t *l = &s->lane[way];
        const colo_routes_t *out = &s->plan->send[way], *in = &s->plan->recv[way];
        /* extents are all that counts; each call fills in the rest */
        fill(l->send_box, out, (colo_view_t){0}, way ? &s->plan->own_dst : &s->plan->own_src, !way,
             elem);
        fill(l->recv_box, in, (colo_view_t){0}, way ? &s->plan->own_src : &s->plan->own_dst, way,
             elem);
        size_t n = ops->route_stage(l->send, l->nsends, l->recv, l->nrecvs, elem);
        s->late_stage = n > s->late_stage ? n : s->late_stage;
    }
    return b->late ? COLO_OK : colo_staged_need(s);
}

colo_status_t colo_lane_connect(colo_bridge_t *b, colo_shaped_t *s)
{
    if (s->route || s->nmembers == 0)
        return COLO_OK;
    return b->comm->ops->route_create(b->comm, s->members, s->nmembers,
                                      colo_hash_i64(b->tag, (int64_t)b->reshapes), &s->route);
}

/* What create or reshape left for the first call that is staged; nothing of it can be captured. */
static colo_status_t make_ready(colo_bridge_t *b, colo_stream_t stream)
{
    colo_shaped_t *s = &b->now;
    const bool connects = s->nmembers && !s->route;
    colo_queries_t q = {0};
    bool capturing = false;
    if (!connects && !s->late_slab && !s->late_stage)
        return COLO_OK;
    COLO_TRY(b->ops->stream_check(&q, stream, &capturing));
    if (capturing) /* on all ranks or on none: nobody waits, the comm lives */
        return colo_fail(COLO_ERR_STATE,
                         "bridge: the first staged call of a shape allocates and connects, which "
                         "cannot be captured; run one before the capture, or register the memory");
    colo_status_t st = colo_staged_need(s);
    if (st == COLO_OK && connects)
        st = colo_lane_connect(b, s);
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK;
}

static colo_status_t exchange(colo_bridge_t *b, colo_way_t way, colo_stream_t stream)
{
    const colo_shaped_t *s = &b->now;
    const colo_lane_t *l = &s->lane[way];
    return colo_comm_i_route_exchange(b->comm, colo_bridge_op(b, way), s->route, s->stage,
                                      s->stage_size, l->send, l->nsends, l->recv, l->nrecvs,
                                      stream);
}

colo_status_t colo_exchange_own(colo_bridge_t *b, colo_way_t way, colo_view_t in, colo_view_t out,
                                colo_stream_t stream)
{
    const colo_plan_t *p = b->now.plan;
    const colo_routes_t *local = &p->local[way];
    colo_lane_t *l = &b->now.lane[way];
    const bool fwd = way == COLO_FORWARD;
    const size_t elem = colo_dtype_size(p->config.dtype);
    fill(l->local_from, local, in, fwd ? &p->own_src : &p->own_dst, fwd, elem);
    fill(l->local_to, local, out, fwd ? &p->own_dst : &p->own_src, !fwd, elem);
    return b->ops->box_list(l->local_to, l->local_from, local->nregions, elem, stream);
}

/* ---- forward ---- */

colo_status_t colo_exchange_forward(colo_bridge_t *b, colo_view_t x, colo_view_t y,
                                    colo_stream_t stream)
{
    const colo_plan_t *p = b->now.plan;
    colo_lane_t *l = &b->now.lane[COLO_FORWARD];
    size_t elem = colo_dtype_size(p->config.dtype);
    COLO_TRY(make_ready(b, stream));
    fill(l->send_box, &p->send[COLO_FORWARD], x, &p->own_src, true, elem);
    fill(l->recv_box, &p->recv[COLO_FORWARD], y, &p->own_dst, false, elem);
    COLO_TRY(exchange(b, COLO_FORWARD, stream));
    return colo_exchange_own(b, COLO_FORWARD, x, y, stream);
}

/* ---- backward ---- */

/* The rank's source part, contiguous, as the slab of a level. */
static colo_view_t slab_view(const colo_shaped_t *s, int64_t level)
{
    const colo_owned_t *o = &s->plan->own_src;
    int64_t h = o->h1 - o->h0;
    return (colo_view_t){.data = (char *)s->slab + (size_t)s->slab_of[level] * s->slab_size,
                         .stride = {o->rows * h, h, 1}};
}

/* d_x[region] = sum over levels, in level order; own level from d_y where it is held here. */
static colo_status_t sum_region(colo_bridge_t *b, const colo_region_t *r, const colo_place_t *at,
                                bool own_is_local, colo_view_t d_y, colo_view_t d_x,
                                colo_stream_t stream)
{
    const colo_shaped_t *s = &b->now;
    const colo_plan_t *p = s->plan;
    size_t elem = colo_dtype_size(p->config.dtype);
    colo_box_t addend[COLO_MAX_ADDENDS];
    colo_box_t to = box_at(d_x, &p->own_src, r, at->src_row, elem);
    for (int64_t level = 0; level < p->levels; level++)
        addend[level] = own_is_local && level == p->own_level
                            ? box_at(d_y, &p->own_dst, r, at->dst_row, elem)
                            : box_at(slab_view(s, level), &p->own_src, r, at->src_row, elem);
    return b->ops->box_sum(&to, addend, (int32_t)p->levels, p->config.dtype, stream);
}

static colo_status_t sum_levels(colo_bridge_t *b, colo_view_t d_y, colo_view_t d_x,
                                colo_stream_t stream)
{
    const colo_plan_t *p = b->now.plan;
    const colo_routes_t *local = &p->local[COLO_BACKWARD], *recv = &p->recv[COLO_BACKWARD];
    /* own level: held here or received; the two lists together cover each element once */
    int64_t own = p->own_level >= 0 ? p->own_level : 0;
    for (int64_t i = 0; i < local->nregions; i++)
        COLO_TRY(sum_region(b, &local->region[i], &local->place[i], true, d_y, d_x, stream));
    for (int64_t i = 0; i < recv->nregions; i++)
        if (recv->region[i].level == own)
            COLO_TRY(sum_region(b, &recv->region[i], &recv->place[i], false, d_y, d_x, stream));
    return COLO_OK;
}

colo_status_t colo_exchange_backward(colo_bridge_t *b, colo_view_t d_y, colo_view_t d_x,
                                     colo_stream_t stream)
{
    const colo_plan_t *p = b->now.plan;
    colo_lane_t *l = &b->now.lane[COLO_BACKWARD];
    const colo_routes_t *recv = &p->recv[COLO_BACKWARD];
    size_t elem = colo_dtype_size(p->config.dtype);
    bool summed = p->levels > 1;
    COLO_TRY(make_ready(b, stream));
    fill(l->send_box, &p->send[COLO_BACKWARD], d_y, &p->own_dst, false, elem);
    for (int64_t i = 0; i < recv->nregions; i++)
        l->recv_box[i] = box_at(summed ? slab_view(&b->now, recv->region[i].level) : d_x,
                                &p->own_src, &recv->region[i], recv->place[i].src_row, elem);
    COLO_TRY(exchange(b, COLO_BACKWARD, stream));
    if (summed)
        return sum_levels(b, d_y, d_x, stream);
    return colo_exchange_own(b, COLO_BACKWARD, d_y, d_x, stream);
}
