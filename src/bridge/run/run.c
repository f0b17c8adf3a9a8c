/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - runs the program of a call: one loop over its steps.
 *
 * A move begins what travels, copies what stays on the rank, and ends. Messages travel by the comm
 * (messages.c), or directly between ranks that reach each other's memory (direct.c): which is
 * chosen for each message when the program is loaded, and a call in which some rank has a tensor
 * that is not registered takes the comm for all. An addition is add.c's.
 *
 * On the host messages have come before anything is copied: if a peer never arrives, the call
 * writes nothing. On a GPU an auxiliary stream carries messages while the caller's stream copies,
 * and waits for them at last. If a peer is missing only in a later exchange, the output is partly
 * written. Which boxes, from whom, is the plan's decision; how they travel, the comm's.
 */
#include "bridge/run/run.h"

#include "core/error.h"

colo_status_t colo_run_load(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    COLO_TRY(colo_messages_load(bridge, ready)); /* makes the program */
    COLO_TRY(colo_direct_load(bridge, ready));
    /* a call that the comm carries in part can be captured after a reshape, too */
    return ready->direct.needs_comm ? colo_messages_reserve(bridge, ready) : COLO_OK;
}

void colo_run_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_direct_unload(bridge, ready);
    colo_messages_unload(bridge, ready);
    colo_program_deinit(&ready->program);
    *ready = (colo_ready_plan_t){0};
}

colo_status_t colo_run_create(colo_bridge_t *bridge)
{
    COLO_TRY(colo_direct_create(bridge));
    if (bridge->lazy && !bridge->now.direct.needs_comm)
        return COLO_OK; /* a call that is staged after all makes what the comm needs */
    return colo_messages_connect(bridge);
}

void colo_run_reshape(colo_bridge_t *bridge, colo_ready_plan_t *next)
{
    colo_messages_take(&bridge->now.messages, &next->messages);
    colo_run_unload(bridge, &bridge->now);
    bridge->now = *next;
}

/* ---- what stays on the rank ---- */

/* The bytes of all tensors of a call, where its plan counts @bytes of one. */
static int64_t call_bytes(const colo_call_frame_t *frame, int64_t bytes)
{
    const int64_t unit = (int64_t)frame->program->plan->elem;
    int64_t all = 0;
    for (int32_t k = 0; bytes > 0 && k < frame->n; k++) { /* else there may be no features */
        const colo_carried_t *tensor = &frame->tensor[k];
        all += bytes / unit * tensor->per * (int64_t)colo_dtype_size(tensor->dtype);
    }
    return all;
}

/* @narrow: messages move at the same time. */
static colo_status_t copy_own(const colo_call_t *call, const colo_move_t *move, bool narrow)
{
    const colo_device_t *device = call->bridge->device;
    const colo_call_frame_t *frame = &call->frame;
    const bool bytes = frame->program->bytes;
    const colo_box_list_fn copy = narrow ? device->box_list_narrow : device->box_list;
    colo_box_t *const *box = call->ready->messages.own_box;
    for (int32_t k = 0; move->local && k < frame->n; k++) {
        const colo_carried_t *tensor = &frame->tensor[k];
        int64_t n = 0;
        if (tensor->per == 0) /* there may be no memory */
            continue;
        for (int64_t i = 0; i < move->local->nregions; i++) {
            colo_end_t to = {move->to, frame->program->plan->own_addend};
            if (colo_plan_sums_region(frame->program->plan, frame->pass, move->local, i)) {
                if (move->local->region[i].addend == 0) /* read where it is */
                    continue;
                to = (colo_end_t){COLO_PARTIALS, move->local->region[i].addend};
            }
            box[0][n] = colo_call_box(frame, tensor, (colo_end_t){.buffer = move->from},
                                      move->local, i, bytes);
            box[1][n++] = colo_call_box(frame, tensor, to, move->local, i, bytes);
        }
        COLO_TRY(copy(box[1], box[0], n, bytes ? 1 : colo_dtype_size(tensor->dtype), call->stream));
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
           call_bytes(frame, bytes->local) >= bridge->device->overlap_bytes;
}

enum { FORK, JOIN };

/* Where messages go while the call's stream copies the rank's own part: @side, out, is that stream
 * if another one gains nothing or cannot be. After OK with another stream comes one join, by which
 * the call's stream waits for it. */
static colo_status_t fork_side(const colo_call_t *call, colo_stream_t *side)
{
    const colo_bridge_t *bridge = call->bridge;
    bool follows = false;
    const colo_status_t st =
        overlaps(call)
            ? bridge->device->stream_follow(bridge->streams.side, FORK, call->stream, &follows)
            : COLO_OK;
    *side = follows ? bridge->device->stream_of(bridge->streams.side) : call->stream;
    return st < 0 ? colo_comm_fail(bridge->comm, st) : COLO_OK;
}

static colo_status_t wait_side(const colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    COLO_TRY(bridge->device->event_record(bridge->streams.side, JOIN,
                                          bridge->device->stream_of(bridge->streams.side)));
    return bridge->device->event_wait(bridge->streams.side, JOIN, call->stream);
}

/* @st: of the call so far, returned. */
static colo_status_t join_side(const colo_call_t *call, colo_status_t st)
{
    const colo_error_t why = colo_error_save();
    colo_status_t joined = wait_side(call);
    if (joined < 0) {
        joined = colo_comm_fail(call->bridge->comm, joined);
        const colo_error_t error = colo_error_save();
        (void)wait_side(call); /* or the messages go on while the caller frees the tensors */
        (void)colo_error_restore(joined, &error);
    }
    return st < 0 ? colo_error_restore(st, &why) : joined;
}

/* ---- moves ---- */

/* Does a call have moves whose messages are the comm's? Else a launch between ranks in reach does
 * all of a pass: additions, too. */
static bool needs_comm(const colo_call_t *call)
{
    return !call->direct || call->ready->direct.needs_comm;
}

/* Do ranks in reach write or read for this move? What entered a node goes on this way only if peers
 * reach the output; sums of a node lie in memory of the bridge. */
static bool goes_directly(const colo_call_t *call, const colo_move_t *move)
{
    return call->direct && move->exchange != COLO_EXCHANGE_NODE_SUMS &&
           (move->exchange != COLO_EXCHANGE_RELAYS || call->registered.moves == COLO_PUSH);
}

/* The comm's messages of a move: all, or those between ranks out of reach. */
static colo_exchange_t exchange_of(const colo_call_t *call, const colo_move_t *move, bool direct)
{
    const colo_bridge_t *bridge = call->bridge;
    const colo_call_frame_t *frame = &call->frame;
    const colo_message_list_t *recv = &call->ready->messages.list[frame->pass][move->exchange][0],
                              *send = recv + 1;
    colo_exchange_t exchange = {.op = call->op, .is_part = direct};
    if (needs_comm(call)) {
        exchange.op.dtype = colo_move_dtype(frame->program, frame->pass, move->exchange);
        exchange.subconnection = bridge->now.messages.subconnection;
        exchange.stage = bridge->memory.stage.data;
        exchange.stage_bytes = bridge->memory.stage.size;
        exchange.send = direct ? send->by_comm : send->message;
        exchange.recv = direct ? recv->by_comm : recv->message;
        exchange.nsends = direct ? send->nby_comm : send->n;
        exchange.nrecvs = direct ? recv->nby_comm : recv->n;
    }
    if (direct) {
        const int32_t sends = send->n - send->nby_comm, recvs = recv->n - recv->nby_comm;
        exchange.more_peers = sends > recvs ? sends : recvs;
        exchange.more_sent = call_bytes(frame, send->direct_bytes);
        exchange.more_received = call_bytes(frame, recv->direct_bytes);
    }
    return exchange;
}

static colo_status_t run_move(colo_call_t *call, const colo_move_t *move)
{
    colo_comm_t *comm = call->bridge->comm;
    const bool direct = goes_directly(call, move);
    const colo_exchange_t exchange = exchange_of(call, move, direct);
    /* a launch copies what stays, too, and adds up; without peers a plain copy is faster */
    const bool launches =
        exchange.more_peers > 0 || (direct && call->frame.program->plan->names_rows &&
                                    colo_plan_adds(call->frame.program->plan, call->frame.pass));
    const bool keeps = !launches || (needs_comm(call) && move->to == COLO_PARTIALS);
    colo_stream_t side = call->stream;
    uint64_t seq;
    if (!direct && move->local && move->to == COLO_OUT)
        COLO_TRY(fork_side(call, &side));
    colo_status_t st = colo_comm_exchange_begin(comm, &exchange, side, &seq);
    if (st == COLO_OK) {
        if (launches)
            st = colo_direct_move(call, move);
        if (keeps)
            COLO_THEN(st, copy_own(call, move, side != call->stream));
        st = colo_comm_finish(comm, seq, st);
    }
    return side == call->stream ? st : join_side(call, st);
}

/* ---- calls ---- */

static colo_status_t prepare(colo_call_t *call)
{
    if (needs_comm(call))
        COLO_TRY(colo_messages_prepare(call));
    return call->direct ? colo_direct_prepare(call) : COLO_OK;
}

colo_status_t colo_run_find(colo_call_t *call)
{
    COLO_TRY(colo_direct_find(call));
    return call->undecided ? COLO_OK : prepare(call);
}

static colo_status_t run_add(const colo_call_t *call, const colo_add_t *add)
{
    const colo_status_t st = colo_add_run(call->bridge->device, &call->frame, add, call->stream);
    return st < 0 ? colo_comm_fail(call->bridge->comm, st) : COLO_OK;
}

/* Writes runs of rows of the output: zeros, or what it has at their row. */
static colo_status_t fill_rows(const colo_call_t *call, const colo_run_list_t *list, bool zeros)
{
    enum { BOXES = 64 };
    const colo_call_frame_t *frame = &call->frame;
    const colo_plan_t *plan = frame->program->plan;
    const bool forward = frame->pass == COLO_PASS_FORWARD;
    const colo_owned_t *own = forward ? &plan->own_dst : &plan->own_src;
    for (int32_t k = 0; k < frame->n; k++) {
        const colo_carried_t *tensor = &frame->tensor[k];
        const size_t elem = colo_dtype_size(tensor->dtype);
        colo_box_t to[BOXES], from[BOXES];
        for (int64_t i = 0, n = 0; tensor->out.data && tensor->per > 0 && i < list->n; i++) {
            colo_box_t box = colo_view_box(tensor->out, own);
            char *const data = box.data;
            const int64_t row = box.stride[1] * (int64_t)elem;
            box.extent[1] = list->run[i].count;
            box.extent[2] *= tensor->per;
            from[n] = to[n] = box;
            from[n].data = zeros ? NULL : data + list->run[i].row * row;
            to[n++].data = data + list->run[i].local * row;
            if (n < BOXES && i + 1 < list->n)
                continue;
            const colo_status_t st =
                call->bridge->device->box_list(to, from, n, elem, call->stream);
            if (st < 0)
                return colo_comm_fail(call->bridge->comm, st);
            n = 0;
        }
    }
    return COLO_OK;
}

/* What ranks have yet to agree on: does a call go directly? */
static colo_status_t decide(colo_call_t *call)
{
    COLO_TRY(colo_direct_agree(call)); /* the same on all ranks */
    const colo_status_t st = prepare(call);
    return st < 0 ? colo_comm_fail(call->bridge->comm, st) : COLO_OK;
}

colo_status_t colo_run_call(colo_call_t *call)
{
    const colo_steps_t *steps = &call->frame.program->pass[call->frame.pass];
    if (call->undecided)
        COLO_TRY(decide(call));
    const bool by_comm = needs_comm(call); /* uses memory of the bridge */
    if (by_comm)
        COLO_TRY(colo_memory_begin(call));
    colo_status_t st = by_comm ? colo_messages_begin(call) : COLO_OK;
    for (int32_t i = 0; st == COLO_OK && i < steps->n; i++) {
        const colo_step_t *step = &steps->step[i];
        if (step->kind == COLO_MOVE)
            st = run_move(call, &step->move);
        else if (step->kind == COLO_REPEAT)
            st = fill_rows(call, &call->frame.program->plan->repeats, false);
        else if (step->kind == COLO_CLEAR)
            st = fill_rows(call, &call->frame.program->plan->padding[call->frame.pass], true);
        else if (by_comm) /* else what is read is added up */
            st = run_add(call, &step->add);
    }
    return by_comm ? colo_memory_end(call, st) : st;
}
