/* SPDX-License-Identifier: Apache-2.0 */
/*
 * messages.c - the messages of a program, as the comm takes them: their boxes, the connection of
 * the ranks that the plan ties together, and staging.
 *
 * Messages and boxes are allocated when a program is loaded; a call fills in where its tensors are.
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
static colo_status_t widen(colo_pool_t *pool, colo_message_list_t *list, int64_t nregions,
                           int32_t n)
{
    COLO_FAIL_IF(nregions > INT32_MAX / n, COLO_ERR_ARG,
                 "bridge: %lld boxes of %d tensors, at most 2^31 - 1", (long long)nregions, (int)n);
    colo_box_t *next = boxes_of(pool, nregions * n);
    COLO_FAIL_IF(!next, COLO_ERR_NOMEM, "bridge: %lld boxes of %d tensors", (long long)nregions,
                 (int)n);
    for (int32_t i = 0; i < list->n + list->nby_comm; i++) {
        colo_message_t *message = &list->message[i];
        message->boxes = next + (message->boxes - list->box) / list->tensors * n;
        message->nboxes = message->nboxes / list->tensors * n;
    }
    list->box = next;
    list->tensors = n;
    return COLO_OK;
}

/* Boxes for @n tensors a call from now on. */
static colo_status_t widen_all(colo_ready_plan_t *ready, colo_pass_t pass, int32_t n)
{
    colo_plan_t *plan = ready->program.plan;
    for (int i = 0; i < 2 * COLO_EXCHANGES; i++) {
        colo_message_list_t *list = &ready->messages.list[pass][i / 2][i % 2];
        if (list->tensors != n)
            COLO_TRY(
                widen(&plan->pool, list, colo_plan_routes(plan, pass, i / 2, i % 2)->nregions, n));
    }
    return COLO_OK;
}

static colo_status_t make(const colo_bridge_t *bridge, colo_pool_t *pool,
                          const colo_routes_t *routes, colo_message_list_t *out)
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
    out->by_comm = out->message + out->n;
    return COLO_OK;
}

static colo_status_t load_messages(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_plan_t *plan = ready->program.plan;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 2 * COLO_EXCHANGES; i++)
            COLO_TRY(make(bridge, &plan->pool,
                          colo_plan_routes(plan, (colo_pass_t)pass, i / 2, i % 2),
                          &ready->messages.list[pass][i / 2][i % 2]));
    return COLO_OK;
}

/* ---- partial sums, staging, the connection ---- */

colo_status_t colo_messages_reserve(colo_bridge_t *bridge, const colo_ready_plan_t *ready)
{
    const colo_messages_t *messages = &ready->messages;
    if (bridge->mem == COLO_MEM_CUDA && !bridge->streams.side)
        COLO_TRY(bridge->device->stream_create(2, &bridge->streams.side));
    COLO_TRY(colo_partials_reserve(bridge, messages->need_partials, false));
    return colo_arena_grow(bridge, &bridge->memory.stage, messages->need_stage, false,
                           "staging of messages");
}

/* Fills the boxes of the messages of a move. */
static void fill(const colo_call_frame_t *frame, const colo_ready_plan_t *ready,
                 const colo_move_t *move)
{
    const colo_plan_t *plan = frame->program->plan;
    for (int sends = 0; sends < 2; sends++) {
        const colo_routes_t *routes = colo_plan_routes(plan, frame->pass, move->exchange, sends);
        colo_box_t *box = ready->messages.list[frame->pass][move->exchange][sends].box;
        for (int64_t i = 0; i < routes->nregions; i++) {
            const bool sums = !sends && move->exchange == COLO_EXCHANGE_MAIN &&
                              colo_plan_sums_region(plan, frame->pass, routes, i);
            const int buffer = sums ? COLO_PARTIALS : sends ? move->from : move->to;
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
 * backend with connections; or NULL. */
static void fill_all(const colo_bridge_t *bridge, const colo_ready_plan_t *ready,
                     const colo_call_frame_t *frame, size_t *stage)
{
    const colo_steps_t *steps = &frame->program->pass[frame->pass];
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_move_t *move = &steps->step[i].move;
        if (steps->step[i].kind != COLO_MOVE)
            continue;
        fill(frame, ready, move);
        if (!stage)
            continue;
        const colo_message_list_t *list = ready->messages.list[frame->pass][move->exchange];
        const colo_exchange_t exchange = {
            .op.dtype = colo_move_dtype(frame->program, frame->pass, move->exchange),
            .recv = list[0].message,
            .nrecvs = list[0].n,
            .send = list[1].message,
            .nsends = list[1].n};
        const size_t n = bridge->comm->backend->subconnection_stage(&exchange);
        *stage = n > *stage ? n : *stage;
    }
}

/* The members of the connection and staging for its messages. */
static colo_status_t find_connection(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    colo_messages_t *messages = &ready->messages;
    if (!bridge->comm->backend->subconnection_create || bridge->mem != COLO_MEM_CUDA)
        return COLO_OK;
    COLO_TRY(colo_members_find(bridge, ready, &messages->members, &messages->nmembers));
    /* extents are all that counts; each call fills in the rest */
    const colo_carried_t none = {.per = 1, .dtype = plan->config.dtype};
    for (int pass = 0; pass < 2; pass++) {
        const colo_call_frame_t frame = {
            .program = &ready->program, .pass = (colo_pass_t)pass, .tensor = &none, .n = 1};
        fill_all(bridge, ready, &frame, &messages->need_stage);
    }
    return COLO_OK;
}

colo_status_t colo_messages_load(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_plan_t *plan = ready->program.plan;
    const int64_t locals = plan->local[0].nregions > plan->local[1].nregions
                               ? plan->local[0].nregions
                               : plan->local[1].nregions;
    colo_messages_t *messages = &ready->messages;
    int32_t count = 0;
    COLO_TRY(load_messages(bridge, ready));
    for (int i = 0; i < 2; i++) {
        messages->own_box[i] = boxes_of(&plan->pool, locals);
        COLO_FAIL_IF(!messages->own_box[i], COLO_ERR_NOMEM, "bridge: %lld boxes that stay",
                     (long long)locals);
    }
    /* if a program of batches has many small regions, sums are made at once */
    COLO_TRY(colo_program_create(&ready->program, ready->program.bytes && plan->elem > 0 &&
                                                      bridge->mem == COLO_MEM_CUDA));
    if (ready->program.bytes) /* of a batch: in memory of the bridge, by call */
        return COLO_OK;
    if (ready->program.npartials > 0)
        messages->need_partials =
            colo_partial_bytes(plan, 1, plan->config.dtype) * (size_t)ready->program.npartials;
    COLO_TRY(find_connection(bridge, ready));
    if (!bridge->lazy && (messages->need_partials > 0 || messages->nmembers > 0))
        COLO_TRY(colo_messages_reserve(bridge, ready)); /* else peers add up without one */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 2 * COLO_EXCHANGES; i++)
            count += messages->list[pass][i / 2][i % 2].n;
    return colo_memory_check(bridge, count > 0 || messages->need_partials > 0, count);
}

void colo_messages_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_messages_t *messages = &ready->messages;
    if (messages->subconnection && colo_comm_is_own(bridge->comm, "bridge"))
        bridge->comm->backend->subconnection_destroy(bridge->comm, messages->subconnection);
    free(messages->members);
}

/* Connects the members, if they need it; collective over them. */
static colo_status_t connect_members(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_messages_t *messages = &ready->messages;
    if (messages->subconnection || messages->nmembers == 0)
        return COLO_OK;
    return bridge->comm->backend->subconnection_create(
        bridge->comm, messages->members, messages->nmembers,
        colo_hash_i64(bridge->id.tag, (int64_t)bridge->id.reshapes), &messages->subconnection);
}

colo_status_t colo_messages_connect(colo_bridge_t *bridge)
{
    /* with the others, which would not hear in there of what fails here alone */
    colo_status_t st = connect_members(bridge, &bridge->now);
    COLO_THEN(st, colo_messages_reserve(bridge, &bridge->now));
    return st < 0 ? colo_comm_fail(bridge->comm, st) : COLO_OK;
}

void colo_messages_take(colo_messages_t *from, colo_messages_t *to)
{
    if (from->nmembers == to->nmembers &&
        (to->nmembers == 0 ||
         memcmp(from->members, to->members, (size_t)to->nmembers * sizeof *to->members) == 0)) {
        to->subconnection = from->subconnection;
        from->subconnection = NULL;
    }
}

/* ---- calls ---- */

/* What create or reshape left for the first call that is staged, which cannot be captured. Of some
 * ranks they may have left nothing, and these must not capture a call that others refuse. */
static colo_status_t make_ready(const colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    colo_messages_t *messages = &bridge->now.messages; /* the connection is the bridge's */
    const bool connects = messages->nmembers && !messages->subconnection;
    const bool grows = messages->need_partials > bridge->memory.partials.size ||
                       messages->need_stage > bridge->memory.stage.size;
    /* which is the same on all ranks; a direct call may come here on some of them */
    const bool asks = call->capturing && !call->direct && !messages->staged &&
                      (bridge->lazy || bridge->id.reshapes > 0);
    colo_status_t st = COLO_OK;
    if ((connects || grows) && call->capturing)
        st = colo_fail(COLO_ERR_STATE,
                       "bridge: the first staged call of a shape allocates and connects, which "
                       "cannot be captured; run one before the capture, or register the memory");
    else if (connects || grows)
        st = colo_messages_connect(bridge);
    if (asks)
        st = colo_comm_agree(colo_comm_control(bridge->comm), "captured bridge call", 0, st);
    messages->staged = messages->staged || (st == COLO_OK && !call->direct);
    return st;
}

colo_status_t colo_messages_prepare(colo_call_t *call)
{
    const colo_call_frame_t *frame = &call->frame;
    if (!frame->program->bytes) /* memory of the shape */
        return COLO_OK;
    COLO_TRY(widen_all(call->ready, frame->pass, frame->n));
    if (frame->pass == COLO_PASS_FORWARD)
        return COLO_OK;
    return colo_partials_reserve(
        call->bridge, frame->partial_bytes * (size_t)frame->program->npartials, call->capturing);
}

colo_status_t colo_messages_begin(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    COLO_TRY(make_ready(call));
    call->frame.partials = bridge->memory.partials.data;
    const bool stages = call->frame.program->bytes && bridge->now.messages.nmembers > 0;
    size_t stage = 0;
    fill_all(bridge, call->ready, &call->frame, stages ? &stage : NULL);
    if (!stages)
        return COLO_OK;
    const colo_status_t st = colo_arena_grow(bridge, &bridge->memory.stage, stage, call->capturing,
                                             "staging of messages");
    return st < 0 ? colo_comm_fail(bridge->comm, st) : COLO_OK;
}
