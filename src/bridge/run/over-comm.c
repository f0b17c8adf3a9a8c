/* SPDX-License-Identifier: Apache-2.0 */
/*
 * over-comm.c - moves of a program as messages of the comm, and what stays on the rank as copies.
 *
 * On the host the exchange runs first: if a peer never arrives, it writes nothing. On a GPU an
 * auxiliary stream carries messages while the caller's stream copies, and waits for them at last.
 * If a peer is missing only in a later exchange, the output is partly written. Which boxes, from
 * whom, is the plan's decision; how they travel, the comm's.
 */
#include "bridge/run/run.h"

#include "core/error.h"
#include "core/hash.h"

#include <stdlib.h>
#include <string.h>

/* ---- messages: allocated once, filled by each call ---- */

static int by_peer(const void *first, const void *second)
{
    int32_t peer = ((const colo_message_t *)first)->peer,
            other = ((const colo_message_t *)second)->peer;
    return (peer > other) - (peer < other);
}

/* @n boxes, filled in by each call. */
static colo_box_t *boxes_of(colo_pool_t *pool, int64_t n)
{
    return colo_pool_take(pool, (size_t)(n + 1) * sizeof(colo_box_t));
}

/* Boxes of @n tensors a region from now on. */
static colo_status_t widen(colo_pool_t *pool, colo_messages_t *messages, int64_t nregions,
                           int32_t n)
{
    COLO_FAIL_IF(nregions > INT32_MAX / n, COLO_ERR_ARG,
                 "bridge: %lld boxes of %d tensors, at most 2^31 - 1", (long long)nregions, (int)n);
    colo_box_t *next = boxes_of(pool, nregions * n);
    COLO_FAIL_IF(!next, COLO_ERR_NOMEM, "bridge: %lld boxes of %d tensors", (long long)nregions,
                 (int)n);
    for (int32_t i = 0; i < messages->n; i++) {
        colo_message_t *message = &messages->message[i];
        message->boxes = next + (message->boxes - messages->box) / messages->tensors * n;
        message->nboxes = message->nboxes / messages->tensors * n;
    }
    messages->box = next;
    messages->tensors = n;
    return COLO_OK;
}

/* Boxes for @n tensors a call from now on. */
static colo_status_t widen_all(colo_loaded_t *loaded, colo_pass_t pass, int32_t n)
{
    colo_plan_t *plan = loaded->program.plan;
    for (int i = 0; i < 2 * COLO_EXCHANGES; i++) {
        colo_messages_t *messages = &loaded->over_comm.messages[pass][i / 2][i % 2];
        if (messages->tensors != n)
            COLO_TRY(widen(&plan->pool, messages,
                           colo_plan_routes(plan, pass, i / 2, i % 2)->nregions, n));
    }
    return COLO_OK;
}

static colo_status_t make(const colo_bridge_t *bridge, colo_pool_t *pool,
                          const colo_routes_t *routes, colo_messages_t *out)
{
    out->tensors = 1;
    out->box = boxes_of(pool, routes->nregions);
    out->message = colo_pool_take(pool, (2 * (size_t)routes->nmessages + 1) * sizeof *out->message);
    COLO_FAIL_IF(!out->box || !out->message, COLO_ERR_NOMEM, "bridge: %lld boxes",
                 (long long)routes->nregions);
    for (int32_t i = 0; i < routes->nmessages; i++) {
        const colo_plan_message_t *message = &routes->message[i];
        int32_t peer = colo_comm_find(bridge->comm, message->peer);
        COLO_FAIL_IF(peer < 0, COLO_ERR_MISSING,
                     "bridge: the plan names rank %lld, which is not in the communicator "
                     "'%s' of %d ranks",
                     (long long)message->peer, colo_comm_name(bridge->comm),
                     (int)colo_comm_size(bridge->comm));
        COLO_FAIL_IF(message->nregions > INT32_MAX, COLO_ERR_ARG,
                     "bridge: %lld boxes for rank %lld, at most 2^31 - 1",
                     (long long)message->nregions, (long long)message->peer);
        out->message[i] = (colo_message_t){.peer = peer,
                                           .nboxes = (int32_t)message->nregions,
                                           .boxes = out->box + (message->regions - routes->region)};
    }
    /* the plan's peers ascend as world ranks, which a comm may hold in another order */
    qsort(out->message, (size_t)routes->nmessages, sizeof *out->message, by_peer);
    out->n = routes->nmessages;
    return COLO_OK;
}

static colo_status_t load_messages(const colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    colo_plan_t *plan = loaded->program.plan;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 2 * COLO_EXCHANGES; i++)
            COLO_TRY(make(bridge, &plan->pool,
                          colo_plan_routes(plan, (colo_pass_t)pass, i / 2, i % 2),
                          &loaded->over_comm.messages[pass][i / 2][i % 2]));
    return COLO_OK;
}

/* All messages of a move. */
static colo_exchange_t exchange_of(const colo_loaded_t *loaded, colo_pass_t pass,
                                   const colo_move_t *move)
{
    const colo_messages_t *recv = &loaded->over_comm.messages[pass][move->exchange][0],
                          *send = &loaded->over_comm.messages[pass][move->exchange][1];
    return (colo_exchange_t){
        .send = send->message, .recv = recv->message, .nsends = send->n, .nrecvs = recv->n};
}

/* ---- partial sums, staging, routes ---- */

static colo_status_t reserve(colo_bridge_t *bridge, const colo_loaded_t *loaded)
{
    const colo_over_comm_t *over = &loaded->over_comm;
    if (bridge->mem == COLO_CUDA && !bridge->streams.side)
        COLO_TRY(bridge->ops->stream_create(2, &bridge->streams.side));
    COLO_TRY(colo_partials_reserve(bridge, over->need_partials, false));
    return colo_arena_grow(bridge, &bridge->memory.stage, over->need_stage, false,
                           "staging of messages");
}

/* Fills the boxes of the messages of a move. */
static void fill(const colo_call_frame_t *frame, const colo_loaded_t *loaded,
                 const colo_move_t *move)
{
    const colo_plan_t *plan = frame->program->plan;
    for (int sends = 0; sends < 2; sends++) {
        const colo_routes_t *routes = colo_plan_routes(plan, frame->pass, move->exchange, sends);
        colo_box_t *box = loaded->over_comm.messages[frame->pass][move->exchange][sends].box;
        const int buffer = sends ? move->from : move->to;
        for (int64_t i = 0; i < routes->nregions; i++) {
            const colo_end_t end = {
                buffer, buffer == COLO_PARTIALS
                            ? colo_move_sum(plan, move->exchange, sends, &routes->region[i])
                            : 0};
            for (int32_t k = 0; k < frame->n; k++)
                *box++ =
                    colo_call_box(frame, &frame->tensor[k], end, routes, i, frame->program->bytes);
        }
    }
}

/* Fills the boxes of all messages. @stage: in and out, the most staging that these take, of a
 * backend with routes; or NULL. */
static void fill_all(const colo_bridge_t *bridge, const colo_loaded_t *loaded,
                     const colo_call_frame_t *frame, size_t *stage)
{
    const colo_steps_t *steps = &frame->program->pass[frame->pass];
    const colo_dtype_t dtype = frame->program->plan->config.dtype;
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_move_t *move = &steps->step[i].move;
        if (steps->step[i].kind != COLO_MOVE)
            continue;
        fill(frame, loaded, move);
        if (!stage)
            continue;
        const bool wide = frame->program->plan->exchange[frame->pass][move->exchange].wide;
        colo_exchange_t exchange = exchange_of(loaded, frame->pass, move);
        exchange.op.dtype = frame->program->bytes ? COLO_U8 : wide ? colo_sum_wide(dtype) : dtype;
        const size_t n = bridge->comm->ops->subconnection_stage(&exchange);
        *stage = n > *stage ? n : *stage;
    }
}

/* The members of the route and staging for its messages. */
static colo_status_t find_route(colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    const colo_plan_t *plan = loaded->program.plan;
    colo_over_comm_t *over = &loaded->over_comm;
    if (!bridge->comm->ops->subconnection_create || bridge->mem != COLO_CUDA)
        return COLO_OK;
    COLO_TRY(colo_members_find(bridge, loaded, &over->members, &over->nmembers));
    /* extents are all that counts; each call fills in the rest */
    const colo_carried_t none = {.per = 1, .dtype = plan->config.dtype};
    for (int pass = 0; pass < 2; pass++) {
        const colo_call_frame_t frame = {
            .program = &loaded->program, .pass = (colo_pass_t)pass, .tensor = &none, .n = 1};
        fill_all(bridge, loaded, &frame, &over->need_stage);
    }
    return COLO_OK;
}

colo_status_t colo_over_comm_load(colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    colo_plan_t *plan = loaded->program.plan;
    const int64_t locals = plan->local[0].nregions > plan->local[1].nregions
                               ? plan->local[0].nregions
                               : plan->local[1].nregions;
    colo_over_comm_t *over = &loaded->over_comm;
    int32_t messages = 0;
    COLO_TRY(load_messages(bridge, loaded));
    for (int i = 0; i < 2; i++) {
        over->own_box[i] = boxes_of(&plan->pool, locals);
        COLO_FAIL_IF(!over->own_box[i], COLO_ERR_NOMEM, "bridge: %lld boxes that stay",
                     (long long)locals);
    }
    /* if a program of batches has many small regions, sums are made at once */
    COLO_TRY(colo_program_create(&loaded->program, loaded->program.bytes && plan->elem > 0 &&
                                                       bridge->mem == COLO_CUDA));
    if (loaded->program.bytes) /* of a batch: in memory of the bridge, by call */
        return COLO_OK;
    if (loaded->program.npartials > 0)
        over->need_partials =
            colo_partial_bytes(plan, 1, plan->config.dtype) * (size_t)loaded->program.npartials;
    COLO_TRY(find_route(bridge, loaded));
    if (!bridge->lazy && (over->need_partials > 0 || over->nmembers > 0))
        COLO_TRY(reserve(bridge, loaded)); /* else peers add up without one */
    for (int i = 0; i < 4 * COLO_RELAYS; i++)
        messages += over->messages[i / 2 / COLO_RELAYS][i / 2 % COLO_RELAYS][i % 2].n;
    return colo_memory_check(bridge, messages > 0 || over->need_partials > 0, messages);
}

void colo_over_comm_unload(const colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    colo_over_comm_t *over = &loaded->over_comm;
    if (over->subconnection && colo_comm_i_own(bridge->comm, "bridge"))
        bridge->comm->ops->subconnection_destroy(bridge->comm, over->subconnection);
    free(over->members);
}

/* Connects the members, if there is a route to make; collective over them. */
static colo_status_t connect_members(colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    colo_over_comm_t *over = &loaded->over_comm;
    if (over->subconnection || over->nmembers == 0)
        return COLO_OK;
    return bridge->comm->ops->subconnection_create(
        bridge->comm, over->members, over->nmembers,
        colo_hash_i64(bridge->id.tag, (int64_t)bridge->id.reshapes), &over->subconnection);
}

colo_status_t colo_over_comm_create(colo_bridge_t *bridge)
{
    colo_status_t st = reserve(bridge, &bridge->now);
    COLO_THEN(st, connect_members(bridge, &bridge->now));
    return st < 0 ? colo_comm_i_fail(bridge->comm, st) : COLO_OK; /* a peer may be past it */
}

void colo_over_comm_reshape(colo_bridge_t *bridge, colo_loaded_t *next)
{
    colo_over_comm_t *was = &bridge->now.over_comm, *over = &next->over_comm;
    if (was->nmembers == over->nmembers &&
        (over->nmembers == 0 || memcmp(was->members, over->members,
                                       (size_t)over->nmembers * sizeof *over->members) == 0)) {
        over->subconnection = was->subconnection;
        was->subconnection = NULL;
    }
}

/* ---- calls ---- */

/* What create or reshape left for the first call that is staged, which cannot be captured. */
static colo_status_t make_ready(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    colo_over_comm_t *over = &bridge->now.over_comm; /* the route is the bridge's */
    const bool connects = over->nmembers && !over->subconnection;
    const bool grows = over->need_partials > bridge->memory.partials.size ||
                       over->need_stage > bridge->memory.stage.size;
    if (!connects && !grows)
        return COLO_OK;
    /* it is on all ranks or on none: no rank waits, and the comm lives */
    COLO_FAIL_IF(call->capturing, COLO_ERR_STATE,
                 "bridge: the first staged call of a shape allocates and connects, which "
                 "cannot be captured; run one before the capture, or register the memory");
    colo_status_t st = COLO_OK;
    if (connects) /* with the others, which would not hear in there of what fails here alone */
        st = connect_members(bridge, &bridge->now);
    COLO_THEN(st, reserve(bridge, &bridge->now));
    return st < 0 ? colo_comm_i_fail(bridge->comm, st) : COLO_OK;
}

colo_status_t colo_over_comm_prepare(colo_call_t *call)
{
    const colo_call_frame_t *frame = &call->frame;
    if (!frame->program->bytes) /* memory of the shape */
        return COLO_OK;
    COLO_TRY(widen_all(call->loaded, frame->pass, frame->n));
    if (frame->pass == COLO_FORWARD)
        return COLO_OK;
    return colo_partials_reserve(
        call->bridge, frame->partial_bytes * (size_t)frame->program->npartials, call->capturing);
}

colo_status_t colo_over_comm_begin(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    COLO_TRY(make_ready(call));
    call->frame.partials = bridge->memory.partials.data;
    const bool stages = call->frame.program->bytes && bridge->now.over_comm.nmembers > 0;
    size_t stage = 0;
    fill_all(bridge, call->loaded, &call->frame, stages ? &stage : NULL);
    if (!stages)
        return COLO_OK;
    const colo_status_t st = colo_arena_grow(bridge, &bridge->memory.stage, stage, call->capturing,
                                             "staging of messages");
    return st < 0 ? colo_comm_i_fail(bridge->comm, st) : COLO_OK;
}

/* ---- what stays on the rank ---- */

int64_t colo_call_bytes(const colo_call_frame_t *frame, int64_t bytes)
{
    const int64_t unit = (int64_t)frame->program->plan->elem;
    int64_t all = 0;
    for (int32_t k = 0; bytes > 0 && k < frame->n; k++) { /* else there may be no features */
        const colo_carried_t *tensor = &frame->tensor[k];
        all += bytes / unit * tensor->per * (int64_t)colo_dtype_size(tensor->dtype);
    }
    return all;
}

colo_status_t colo_over_comm_keep(colo_call_t *call, const colo_move_t *move, bool narrow,
                                  colo_stream_t stream)
{
    const colo_ops_t *ops = call->bridge->ops;
    const colo_call_frame_t *frame = &call->frame;
    const bool bytes = frame->program->bytes;
    const colo_box_list_fn copy = narrow ? ops->box_list_narrow : ops->box_list;
    const colo_end_t to = {move->to, frame->program->plan->own_addend};
    colo_box_t *const *box = call->loaded->over_comm.own_box;
    for (int32_t k = 0; move->local && k < frame->n; k++) {
        const colo_carried_t *tensor = &frame->tensor[k];
        if (tensor->per == 0) /* there may be no memory */
            continue;
        for (int64_t i = 0; i < move->local->nregions; i++) {
            box[0][i] = colo_call_box(frame, tensor, (colo_end_t){.buffer = move->from},
                                      move->local, i, bytes);
            box[1][i] = colo_call_box(frame, tensor, to, move->local, i, bytes);
        }
        COLO_TRY(copy(box[1], box[0], move->local->nregions,
                      bytes ? 1 : colo_dtype_size(tensor->dtype), stream));
    }
    return COLO_OK;
}

/* Is the rank's own part copied while messages move? Not if a fork and a join take longer, or the
 * copy alone, which is then slower. */
static bool overlaps(const colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    const colo_call_frame_t *frame = &call->frame;
    const colo_plan_bytes_t *bytes = &frame->program->plan->bytes[frame->pass];
    const int64_t moved = bytes->send > bytes->recv ? bytes->send : bytes->recv;
    return bridge->streams.side && bytes->local <= moved &&
           colo_call_bytes(frame, bytes->local) >= bridge->ops->overlap_bytes;
}

enum { FORK, JOIN };

/* Where messages go while the call's stream copies the rank's own part: @side, out, is that stream
 * if another one gains nothing or cannot be. After OK with another stream comes one join, by which
 * the call's stream waits for it. */
static colo_status_t fork_side(const colo_call_t *call, colo_stream_t *side)
{
    const colo_bridge_t *bridge = call->bridge;
    bool follows = false;
    const colo_status_t st = overlaps(call) ? bridge->ops->stream_follow(bridge->streams.side, FORK,
                                                                         call->stream, &follows)
                                            : COLO_OK;
    *side = follows ? bridge->ops->stream_of(bridge->streams.side) : call->stream;
    return st < 0 ? colo_comm_i_fail(bridge->comm, st) : COLO_OK;
}

static colo_status_t wait_side(const colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    COLO_TRY(bridge->ops->event_record(bridge->streams.side, JOIN,
                                       bridge->ops->stream_of(bridge->streams.side)));
    return bridge->ops->event_wait(bridge->streams.side, JOIN, call->stream);
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

void colo_over_comm_equip(const colo_call_t *call, const colo_move_t *move,
                          colo_exchange_t *exchange)
{
    const colo_bridge_t *bridge = call->bridge;
    exchange->op = call->op;
    if (call->frame.program->plan->exchange[call->frame.pass][move->exchange].wide &&
        !call->frame.program->bytes)
        exchange->op.dtype = colo_sum_wide(exchange->op.dtype);
    exchange->subconnection = bridge->now.over_comm.subconnection;
    exchange->stage = bridge->memory.stage.data;
    exchange->stage_bytes = bridge->memory.stage.size;
}

colo_status_t colo_over_comm_move(colo_call_t *call, const colo_move_t *move)
{
    colo_exchange_t all = exchange_of(call->loaded, call->frame.pass, move);
    const colo_stream_t stream = call->stream;
    colo_stream_t side = stream;
    colo_over_comm_equip(call, move, &all);
    if (move->local && move->to == COLO_OUT)
        COLO_TRY(fork_side(call, &side));
    colo_status_t st = colo_comm_i_exchange_over(call->bridge->comm, &all, side), own = COLO_OK;
    if (st == COLO_OK)
        own = colo_over_comm_keep(call, move, side != stream, stream);
    if (own < 0) /* the others have all they need, and would go on */
        st = colo_comm_i_fail(call->bridge->comm, own);
    return side == stream ? st : join_side(call, st);
}
