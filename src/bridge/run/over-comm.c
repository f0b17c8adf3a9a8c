/* SPDX-License-Identifier: Apache-2.0 */
/*
 * over-comm.c - moves of a program as messages of the comm, and what stays on the rank as copies.
 *
 * On the host the exchange runs first: if a peer never arrives, it writes nothing. On a GPU an
 * auxiliary stream carries messages while the caller's stream copies, and waits for them at last.
 * If a peer is missing only in a later exchange, the output is partly written. Which boxes, from
 * whom, is the plan's decision; how they travel, the comm's.
 */
#include "bridge/run/add.h"
#include "bridge/run/run.h"

#include "core/error.h"
#include "core/hash.h"

#include <stdlib.h>
#include <string.h>

/* ---- messages: allocated once, filled by each call ---- */

static int by_peer(const void *a, const void *b)
{
    int32_t x = ((const colo_message_t *)a)->peer, y = ((const colo_message_t *)b)->peer;
    return (x > y) - (x < y);
}

/* @n boxes, filled in by each call. */
static colo_box_t *boxes_of(colo_pool_t *pool, int64_t n)
{
    return colo_pool_take(pool, (size_t)(n + 1) * sizeof(colo_box_t));
}

/* Messages whose boxes move to @next, @n for each region instead of @was. */
static void rebase(colo_message_t *m, int32_t count, const colo_box_t *boxes, colo_box_t *next,
                   int32_t was, int32_t n)
{
    for (int32_t i = 0; i < count; i++) {
        m[i].boxes = next + (m[i].boxes - boxes) / was * n;
        m[i].nboxes = m[i].nboxes / was * n;
    }
}

static colo_status_t widen(colo_pool_t *pool, colo_messages_t *l, const colo_exchange_plan_t *plan,
                           int32_t n)
{
    const int64_t sends = plan->send.nregions, recvs = plan->recv.nregions;
    if (sends > INT32_MAX / n || recvs > INT32_MAX / n)
        return colo_fail(COLO_ERR_ARG, "bridge: %lld boxes of %d tensors, at most 2^31 - 1",
                         (long long)(sends > recvs ? sends : recvs), (int)n);
    colo_box_t *send = boxes_of(pool, sends * n), *recv = boxes_of(pool, recvs * n);
    if (!send || !recv) {
        colo_pool_drop(pool, send);
        colo_pool_drop(pool, recv);
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes of %d tensors",
                         (long long)(sends + recvs), (int)n);
    }
    rebase(l->send, l->nsends, l->send_box, send, l->tensors, n);
    rebase(l->recv, l->nrecvs, l->recv_box, recv, l->tensors, n);
    colo_pool_drop(pool, l->send_box);
    colo_pool_drop(pool, l->recv_box);
    l->send_box = send;
    l->recv_box = recv;
    l->tensors = n;
    return COLO_OK;
}

/* Boxes for @n tensors a call from now on. */
static colo_status_t widen_all(colo_loaded_t *loaded, colo_pass_t pass, int32_t n)
{
    const colo_plan_t *p = loaded->program.plan;
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        colo_messages_t *l = &loaded->over_comm.messages[pass][i];
        if (l->tensors != n)
            COLO_TRY(widen(p->pool, l, &p->exchange[pass][i], n));
    }
    return COLO_OK;
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

static colo_status_t load_messages(const colo_bridge_t *b, colo_loaded_t *loaded, colo_pass_t pass)
{
    const colo_plan_t *p = loaded->program.plan;
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        const colo_exchange_plan_t *exchange = &p->exchange[pass][i];
        colo_messages_t *l = &loaded->over_comm.messages[pass][i];
        l->tensors = 1;
        COLO_TRY(make(b, p->pool, &exchange->send, &l->send, &l->send_box, &l->nsends));
        COLO_TRY(make(b, p->pool, &exchange->recv, &l->recv, &l->recv_box, &l->nrecvs));
    }
    return COLO_OK;
}

/* ---- partial sums, staging, routes ---- */

static colo_status_t reserve(colo_bridge_t *b, const colo_loaded_t *loaded)
{
    const colo_over_comm_t *over = &loaded->over_comm;
    if (b->mem == COLO_CUDA && !b->streams.side)
        COLO_TRY(b->ops->stream_create(2, &b->streams.side));
    COLO_TRY(colo_partials_reserve(b, over->need_partials, false));
    return colo_arena_grow(b, &b->memory.stage, over->need_stage, false, "staging of messages");
}

/* The boxes of the messages of a move. */
static void fill(const colo_call_frame_t *f, const colo_messages_t *l, const colo_move_t *move)
{
    const colo_plan_t *p = f->program->plan;
    for (int sends = 0; sends < 2; sends++) {
        const colo_routes_t *routes = colo_plan_routes(p, f->pass, move->exchange, sends);
        colo_box_t *box = sends ? l->send_box : l->recv_box;
        const int buffer = sends ? move->from : move->to;
        for (int64_t i = 0; i < routes->nregions; i++) {
            const colo_end_t end = {
                buffer, buffer == COLO_PARTIALS
                            ? colo_move_sum(p, move->exchange, sends, &routes->region[i])
                            : 0};
            for (int32_t k = 0; k < f->n; k++)
                *box++ = colo_call_box(f, &f->tensor[k], end, routes, i, f->program->bytes);
        }
    }
}

/* Fills the boxes of all messages. @stage: in and out, the most staging that these take, of a
 * backend with routes; or NULL. */
static void fill_all(const colo_bridge_t *b, const colo_loaded_t *loaded,
                     const colo_call_frame_t *f, size_t *stage)
{
    const colo_steps_t *steps = &f->program->pass[f->pass];
    const colo_dtype_t dtype = f->program->plan->config.dtype;
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_move_t *move = &steps->step[i].move;
        if (steps->step[i].kind != COLO_MOVE)
            continue;
        const colo_messages_t *l = &loaded->over_comm.messages[f->pass][move->exchange];
        const bool wide = f->program->plan->exchange[f->pass][move->exchange].wide;
        fill(f, l, move);
        if (!stage)
            continue;
        const colo_exchange_t exchange = {.op.dtype = f->program->bytes ? COLO_U8
                                                      : wide            ? colo_sum_wide(dtype)
                                                                        : dtype,
                                          .send = l->send,
                                          .recv = l->recv,
                                          .nsends = l->nsends,
                                          .nrecvs = l->nrecvs};
        const size_t n = b->comm->ops->subconnection_stage(&exchange);
        *stage = n > *stage ? n : *stage;
    }
}

/* The members of the route and staging for its messages. */
static colo_status_t find_route(colo_bridge_t *b, colo_loaded_t *loaded)
{
    const colo_plan_t *p = loaded->program.plan;
    colo_over_comm_t *over = &loaded->over_comm;
    if (!b->comm->ops->subconnection_create || b->mem != COLO_CUDA)
        return COLO_OK;
    COLO_TRY(colo_members_find(b, loaded, &over->members, &over->nmembers));
    /* extents are all that counts; each call fills in the rest */
    const colo_carried_t none = {.per = 1, .dtype = p->config.dtype};
    for (int pass = 0; pass < 2; pass++) {
        const colo_call_frame_t f = {
            .program = &loaded->program, .pass = (colo_pass_t)pass, .tensor = &none, .n = 1};
        fill_all(b, loaded, &f, &over->need_stage);
    }
    return COLO_OK;
}

/* If a program of batches has many small regions, sums are made at once: bytes of a unit of its
 * features in the usual tensor. */
static int64_t launched_bytes(const colo_bridge_t *b, const colo_loaded_t *loaded)
{
    const colo_plan_config_t *c = &loaded->program.plan->config, *usual;
    if (!loaded->program.bytes || b->mem != COLO_CUDA)
        return 0;
    usual = &b->now.program.plan->config;
    return usual->shape.features / c->shape.features * (int64_t)colo_dtype_size(c->dtype);
}

static colo_status_t load(colo_bridge_t *b, colo_loaded_t *loaded)
{
    const colo_plan_t *p = loaded->program.plan;
    const int64_t locals =
        p->local[0].nregions > p->local[1].nregions ? p->local[0].nregions : p->local[1].nregions;
    colo_over_comm_t *over = &loaded->over_comm;
    int32_t messages = 0;
    COLO_TRY(load_messages(b, loaded, COLO_FORWARD));
    COLO_TRY(load_messages(b, loaded, COLO_BACKWARD));
    for (int i = 0; i < 2; i++) {
        over->own_box[i] = boxes_of(p->pool, locals);
        if (!over->own_box[i])
            return colo_fail(COLO_ERR_NOMEM, "bridge: %lld boxes that stay", (long long)locals);
    }
    COLO_TRY(colo_program_create(&loaded->program, launched_bytes(b, loaded)));
    if (loaded->program.bytes) /* of a batch: in memory of the bridge, by call */
        return COLO_OK;
    if (loaded->program.npartials > 0)
        over->need_partials =
            colo_partial_bytes(p, 1, p->config.dtype) * (size_t)loaded->program.npartials;
    COLO_TRY(find_route(b, loaded));
    if (!b->lazy && (over->need_partials > 0 || over->nmembers > 0))
        COLO_TRY(reserve(b, loaded)); /* else peers add up without one */
    for (int i = 0; i < 2 * COLO_RELAYS; i++)
        messages += over->messages[i / COLO_RELAYS][i % COLO_RELAYS].nsends +
                    over->messages[i / COLO_RELAYS][i % COLO_RELAYS].nrecvs;
    return colo_memory_check(b, messages > 0 || over->need_partials > 0, messages);
}

static void unload(const colo_bridge_t *b, colo_loaded_t *loaded)
{
    colo_over_comm_t *over = &loaded->over_comm;
    const colo_pool_t *pool = loaded->program.plan ? loaded->program.plan->pool : NULL;
    if (over->subconnection && colo_comm_i_own(b->comm, "bridge"))
        b->comm->ops->subconnection_destroy(b->comm, over->subconnection);
    for (int i = 0; i < 2 * COLO_EXCHANGES; i++) {
        colo_messages_t *l = &over->messages[i / COLO_EXCHANGES][i % COLO_EXCHANGES];
        void *const lists[] = {l->send, l->recv, l->send_box, l->recv_box};
        for (int k = 0; k < 4; k++)
            colo_pool_drop(pool, lists[k]);
    }
    colo_pool_drop(pool, over->own_box[0]);
    colo_pool_drop(pool, over->own_box[1]);
    free(over->members);
}

/* Connects the members, if there is a route to make; collective over them. */
static colo_status_t connect_members(colo_bridge_t *b, colo_loaded_t *loaded)
{
    colo_over_comm_t *over = &loaded->over_comm;
    if (over->subconnection || over->nmembers == 0)
        return COLO_OK;
    return b->comm->ops->subconnection_create(b->comm, over->members, over->nmembers,
                                              colo_hash_i64(b->id.tag, (int64_t)b->id.reshapes),
                                              &over->subconnection);
}

static colo_status_t create(colo_bridge_t *b, bool *whole)
{
    colo_status_t st = reserve(b, &b->now);
    if (st == COLO_OK)
        st = connect_members(b, &b->now);
    *whole = true;
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK; /* a peer may be past it */
}

static colo_status_t reshape(colo_bridge_t *b, colo_loaded_t *next)
{
    colo_over_comm_t *was = &b->now.over_comm, *over = &next->over_comm;
    if (was->nmembers == over->nmembers &&
        (over->nmembers == 0 || memcmp(was->members, over->members,
                                       (size_t)over->nmembers * sizeof *over->members) == 0)) {
        over->subconnection = was->subconnection;
        was->subconnection = NULL;
    }
    return COLO_OK;
}

/* ---- calls ---- */

/* What create or reshape left for the first call that is staged, which cannot be captured. */
static colo_status_t make_ready(colo_call_t *call)
{
    colo_bridge_t *b = call->bridge;
    colo_over_comm_t *over = &b->now.over_comm; /* the route is the bridge's */
    const bool connects = over->nmembers && !over->subconnection;
    const bool grows =
        over->need_partials > b->memory.partials.size || over->need_stage > b->memory.stage.size;
    if (!connects && !grows)
        return COLO_OK;
    if (call->capturing) /* on all ranks or none: no rank waits, the comm lives */
        return colo_fail(COLO_ERR_STATE,
                         "bridge: the first staged call of a shape allocates and connects, which "
                         "cannot be captured; run one before the capture, or register the memory");
    colo_status_t st = COLO_OK;
    if (connects) /* with the others, which would not hear in there of what fails here alone */
        st = connect_members(b, &b->now);
    if (st == COLO_OK)
        st = reserve(b, &b->now);
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK;
}

colo_status_t colo_over_comm_prepare(colo_call_t *call)
{
    const colo_call_frame_t *f = &call->frame;
    if (!f->program->bytes) /* memory of the shape */
        return COLO_OK;
    COLO_TRY(widen_all(call->loaded, f->pass, f->n));
    if (f->pass == COLO_FORWARD)
        return COLO_OK;
    return colo_partials_reserve(call->bridge, f->partial_bytes * (size_t)f->program->npartials,
                                 call->capturing);
}

/* Before the first step: connections, boxes, staging. */
static colo_status_t begin(colo_call_t *call)
{
    colo_bridge_t *b = call->bridge;
    COLO_TRY(make_ready(call));
    call->frame.partials = b->memory.partials.data;
    const bool stages = call->frame.program->bytes && b->now.over_comm.nmembers > 0;
    size_t stage = 0;
    fill_all(b, call->loaded, &call->frame, stages ? &stage : NULL);
    if (!stages)
        return COLO_OK;
    const colo_status_t st =
        colo_arena_grow(b, &b->memory.stage, stage, call->capturing, "staging of messages");
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK;
}

/* ---- what stays on the rank ---- */

int64_t colo_bridge_bytes_of(const colo_bridge_t *b, const colo_plan_t *p, int64_t bytes,
                             const colo_carried_t *t, int32_t n)
{
    const colo_plan_config_t *usual = &b->now.program.plan->config;
    if (bytes == 0) /* there may be no features */
        return 0;
    const int64_t unit =
        usual->shape.features / p->config.shape.features * (int64_t)colo_dtype_size(usual->dtype);
    int64_t all = 0;
    for (int32_t k = 0; k < n; k++)
        all += bytes / unit * t[k].per * (int64_t)colo_dtype_size(t[k].dtype);
    return all;
}

colo_status_t colo_over_comm_keep(colo_call_t *call, const colo_move_t *move, bool narrow,
                                  colo_stream_t stream)
{
    const colo_ops_t *ops = call->bridge->ops;
    const colo_call_frame_t *f = &call->frame;
    const bool bytes = f->program->bytes;
    const colo_box_list_fn copy = narrow ? ops->box_list_narrow : ops->box_list;
    const colo_end_t to = {move->to, f->program->plan->own_addend};
    colo_box_t *const *box = call->loaded->over_comm.own_box;
    for (int32_t k = 0; move->local && k < f->n; k++) {
        const colo_carried_t *t = &f->tensor[k];
        if (t->per == 0) /* there may be no memory */
            continue;
        for (int64_t i = 0; i < move->local->nregions; i++) {
            box[0][i] =
                colo_call_box(f, t, (colo_end_t){.buffer = move->from}, move->local, i, bytes);
            box[1][i] = colo_call_box(f, t, to, move->local, i, bytes);
        }
        COLO_TRY(copy(box[1], box[0], move->local->nregions, bytes ? 1 : colo_dtype_size(t->dtype),
                      stream));
    }
    return COLO_OK;
}

/* Is the rank's own part copied while messages move? Not if a fork and a join take longer, or the
 * copy alone, which is then slower. */
static bool overlaps(const colo_call_t *call)
{
    const colo_bridge_t *b = call->bridge;
    const colo_call_frame_t *f = &call->frame;
    const colo_plan_bytes_t *x = &f->program->plan->bytes[f->pass];
    const int64_t moved = x->send > x->recv ? x->send : x->recv;
    return b->streams.side && x->local <= moved &&
           colo_bridge_bytes_of(b, f->program->plan, x->local, f->tensor, f->n) >=
               b->ops->overlap_bytes;
}

enum { FORK, JOIN };

/* Where messages go while the call's stream copies the rank's own part: @side, out, is that stream
 * if another one gains nothing or cannot be. After OK with another stream comes one join, by which
 * the call's stream waits for it. */
static colo_status_t fork_side(const colo_call_t *call, colo_stream_t *side)
{
    const colo_bridge_t *b = call->bridge;
    bool follows = false;
    const colo_status_t st =
        overlaps(call) ? b->ops->stream_follow(b->streams.side, FORK, call->stream, &follows)
                       : COLO_OK;
    *side = follows ? b->ops->stream_of(b->streams.side) : call->stream;
    return st < 0 ? colo_comm_i_fail(b->comm, st) : COLO_OK;
}

static colo_status_t wait_side(const colo_call_t *call)
{
    const colo_bridge_t *b = call->bridge;
    COLO_TRY(b->ops->event_record(b->streams.side, JOIN, b->ops->stream_of(b->streams.side)));
    return b->ops->event_wait(b->streams.side, JOIN, call->stream);
}

/* @st: of the call so far, returned. */
static colo_status_t join_side(const colo_call_t *call, colo_status_t st)
{
    const colo_error_t why = colo_error_save();
    colo_status_t joined = wait_side(call);
    if (joined < 0) {
        joined = colo_comm_i_fail(call->bridge->comm, joined);
        const colo_error_t error = colo_error_save();
        (void)wait_side(call); /* or the messages go on while the caller frees the tensors */
        (void)colo_error_restore(joined, &error);
    }
    return st < 0 ? colo_error_restore(st, &why) : joined;
}

/* ---- moves ---- */

colo_status_t colo_over_comm_exchange(colo_call_t *call, const colo_move_t *move, colo_exchange_t x,
                                      colo_stream_t stream)
{
    const colo_bridge_t *b = call->bridge;
    if (call->frame.program->plan->exchange[call->frame.pass][move->exchange].wide &&
        !call->frame.program->bytes)
        x.op.dtype = colo_sum_wide(x.op.dtype);
    x.subconnection = b->now.over_comm.subconnection;
    x.stage = b->memory.stage.data;
    x.stage_bytes = b->memory.stage.size;
    return colo_comm_i_exchange_over(b->comm, &x, stream);
}

colo_status_t colo_over_comm_move(colo_call_t *call, const colo_move_t *move)
{
    const colo_messages_t *l = &call->loaded->over_comm.messages[call->frame.pass][move->exchange];
    const colo_exchange_t all = {
        .op = call->op, .send = l->send, .recv = l->recv, .nsends = l->nsends, .nrecvs = l->nrecvs};
    const colo_stream_t stream = call->stream;
    colo_stream_t side = stream;
    if (move->local && move->to == COLO_OUT)
        COLO_TRY(fork_side(call, &side));
    colo_status_t st = colo_over_comm_exchange(call, move, all, side), own = COLO_OK;
    if (st == COLO_OK)
        own = colo_over_comm_keep(call, move, side != stream, stream);
    if (own < 0) /* the others have all they need, and would go on */
        st = colo_comm_i_fail(call->bridge->comm, own);
    return side == stream ? st : join_side(call, st);
}

/* ---- steps ---- */

colo_status_t colo_over_comm_steps(colo_call_t *call, colo_move_fn move)
{
    const colo_steps_t *steps = &call->frame.program->pass[call->frame.pass];
    COLO_TRY(begin(call));
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_step_t *step = &steps->step[i];
        if (step->kind == COLO_MOVE) {
            COLO_TRY(move(call, &step->move));
            continue;
        }
        const colo_status_t st =
            colo_add_run(call->bridge->ops, &call->frame, &step->add, call->stream);
        if (st < 0)
            return colo_comm_i_fail(call->bridge->comm, st);
    }
    return COLO_OK;
}

static colo_status_t run_steps(colo_call_t *call)
{
    return colo_over_comm_steps(call, colo_over_comm_move);
}

static colo_status_t run(colo_call_t *call)
{
    return colo_memory_in_order(call, run_steps);
}

const colo_executor_t colo_over_comm = {.load = load,
                                        .unload = unload,
                                        .create = create,
                                        .reshape = reshape,
                                        .prepare = colo_over_comm_prepare,
                                        .run = run};
