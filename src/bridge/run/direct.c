/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.c - direct memory as a carrier, between GPUs that reach each other's: which messages and
 * which calls it carries, and their launches. The lists of transfers are transfers.c's.
 *
 * A call is direct if the tensors that peers reach lie in registered memory, else it is staged: the
 * comm carries all of its messages (messages.c). That is a rank's own view; the contract in
 * memory.h makes it the same on all ranks, COLO_CHECK=2 compares it, and where it differs anyway
 * the deadline ends the wait. A rank that has nothing of that tensor has no view, though it may
 * have much to send: where there is such a rank, all agree over the host communicator in the pass's
 * first call. Which ranks have rows of a batch changes with its tables, so there all agree in the
 * first call of a pass in which any rank has some: forward always, backward with transport AUTO.
 * The result holds until something else is registered. If no rank has anything there is none, and
 * the next call agrees again.
 */
#include "bridge/run/run.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what ranks find out about a bridge ---- */

/* Is it the destination's tensor that peers reach? */
static bool reaches_dst(const colo_plan_t *plan, colo_pass_t pass)
{
    return pass == COLO_PASS_FORWARD || colo_plan_adds(plan, pass);
}

/* Of which passes does some rank of the comm have nothing that peers could reach? The same verdict
 * on all ranks. */
static colo_status_t find_asymmetric(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    bool none[2] = {false, false}; /* of src, of dst */
    for (int dst = 0; dst < 2; dst++)
        for (int32_t rank = 0; rank < colo_comm_size(bridge->comm) && !none[dst]; rank++) {
            colo_owned_t own;
            COLO_TRY(colo_layout_owned(
                dst ? &plan->dst : &plan->src, colo_comm_world_rank(bridge->comm, rank),
                &plan->config.shape, dst && plan->config.output == COLO_OUTPUT_FULL_SEQ, &own, NULL,
                0, NULL));
            none[dst] = own.b1 == own.b0 || own.rows == 0 || own.h1 == own.h0;
        }
    for (int pass = 0; pass < 2; pass++)
        ready->direct.asymmetric[pass] = none[reaches_dst(plan, (colo_pass_t)pass)];
    return COLO_OK;
}

/* Is any pair of the ranks that the plan ties to this one out of reach, or is there another
 * exchange? The same verdict on all of these; ranks that it does not tie to this one have their
 * own. */
static colo_status_t find_needs_comm(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_direct_memory_t *memory = bridge->comm->backend->direct;
    const colo_plan_t *plan = ready->program.plan;
    bool *needs_comm = &ready->direct.needs_comm;
    int32_t *members = NULL, n = 0;
    const bool all_reach = memory->reaches(bridge->comm, -1, -1);
    *needs_comm = plan->exchange[COLO_PASS_FORWARD][COLO_EXCHANGE_RELAYS].all_come ||
                  plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_RELAYS].all_come ||
                  colo_plan_sums_nodes(plan);
    if (all_reach)
        return COLO_OK;
    if (ready->any_ranks) {
        *needs_comm = true;
        (void)colo_fail(COLO_ERR_UNBUILT, "some ranks do not reach each other's memory; %s",
                        memory->why(bridge->comm));
    } else {
        COLO_TRY(colo_component_find(plan, bridge->comm, &members, &n));
    }
    for (int32_t i = 0; i < n && !*needs_comm; i++)
        for (int32_t k = 0; k < i && !*needs_comm; k++) {
            *needs_comm = !memory->reaches(bridge->comm, members[k], members[i]);
            if (*needs_comm)
                (void)colo_fail(COLO_ERR_UNBUILT,
                                "ranks %d and %d, which exchange, do not reach each other's "
                                "memory; %s",
                                (int)members[k], (int)members[i], memory->why(bridge->comm));
        }
    free(members);
    if (*needs_comm && colo_log_on(COLO_LOG_INFO))
        colo_log(COLO_LOG_INFO, "bridge: NCCL carries between some ranks: %s", colo_last_error());
    return COLO_OK;
}

/* Where direct memory is asked for, a rank that needs the comm is an error on all. Collective. */
static colo_status_t check_direct(const colo_bridge_t *bridge)
{
    const colo_comm_t *comm = bridge->comm;
    const uint64_t mine = bridge->now.direct.needs_comm;
    const colo_error_t why = colo_error_save();
    if (bridge->transport != COLO_TRANSPORT_PEER || comm->backend->direct->reaches(comm, -1, -1))
        return COLO_OK;
    COLO_AUTOFREE uint64_t *all = malloc((size_t)comm->size * sizeof *all);
    if (!all)
        return colo_comm_fail(bridge->comm,
                              colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)comm->size));
    COLO_TRY(colo_comm_gather(colo_comm_control(bridge->comm), COLO_OP_ALL_GATHER,
                              COLO_CATEGORY_CHECK, &mine, all, 1));
    int32_t k = 0;
    while (k < comm->size && !all[k])
        k++;
    if (k == comm->size)
        return COLO_OK;
    return mine
               ? colo_error_restore(COLO_ERR_UNBUILT, &why)
               : colo_fail(COLO_ERR_UNBUILT,
                           "rank %d (world rank %lld) exchanges with a rank that it does not reach",
                           (int)k, (long long)comm->world_rank[k]);
}

bool colo_direct_likely(const colo_bridge_t *bridge)
{
    const colo_direct_memory_t *memory = bridge->comm->backend->direct;
    if (!memory || bridge->mem != COLO_MEM_CUDA || bridge->comm->size == 1)
        return false;
    return bridge->transport == COLO_TRANSPORT_PEER ||
           (bridge->transport == COLO_TRANSPORT_AUTO && memory->registrations(bridge->comm) > 0);
}

/* Chooses how each message of the program travels: directly to or from ranks in reach, else by the
 * comm. */
static void choose_carriers(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 2 * COLO_EXCHANGES; i++) {
            const colo_routes_t *routes =
                colo_plan_routes(ready->program.plan, (colo_pass_t)pass, i / 2, i % 2);
            colo_message_list_t *list = &ready->messages.list[pass][i / 2][i % 2];
            list->nby_comm = 0;
            list->direct_bytes = 0;
            for (int32_t k = 0; k < list->n; k++)
                if (!colo_direct_near(bridge, list->message[k].peer))
                    list->by_comm[list->nby_comm++] = list->message[k];
            for (int32_t k = 0; k < routes->nmessages; k++)
                if (colo_direct_near(bridge, colo_comm_find(bridge->comm, routes->message[k].peer)))
                    list->direct_bytes += routes->message[k].bytes;
        }
}

/* What ranks find out about a program by themselves; of a batch, some is as the bridge's. */
static colo_status_t find_carriers(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_ready_direct_t *direct = &ready->direct;
    const colo_ready_direct_t *all = &bridge->now.direct;
    const int32_t agreed = bridge->direct.agreed[COLO_PASS_FORWARD].moves;
    const bool batch = ready->program.bytes;
    direct->moves[COLO_PASS_FORWARD] = batch ? COLO_PUSH | COLO_PULL : COLO_PUSH;
    direct->moves[COLO_PASS_BACKWARD] =
        colo_plan_adds(ready->program.plan, COLO_PASS_BACKWARD) ? COLO_PULL : COLO_PUSH;
    direct->one_view = !batch && bridge->transport != COLO_TRANSPORT_PEER;
    direct->forward = batch && agreed ? (colo_mover_t)agreed : COLO_PUSH;
    direct->unit = (int64_t)colo_direct_unit(bridge, ready);
    choose_carriers(bridge, ready);
    if (!batch) {
        COLO_TRY(find_asymmetric(bridge, ready));
        return find_needs_comm(bridge, ready);
    }
    memcpy(direct->asymmetric, all->asymmetric, sizeof direct->asymmetric);
    direct->needs_comm = all->needs_comm;
    if (ready->program.plan->names_rows && all->needs_comm)
        direct->moves[COLO_PASS_BACKWARD] = 0;
    return COLO_OK;
}

static colo_status_t create_launcher(colo_bridge_t *bridge)
{
    const colo_direct_memory_t *memory = bridge->comm->backend->direct;
    colo_transfer_lists_t *lists = &bridge->direct.main;
    if (!memory || bridge->mem != COLO_MEM_CUDA || bridge->comm->size == 1 ||
        bridge->transport == COLO_TRANSPORT_NCCL)
        return COLO_OK;
    colo_status_t st = memory->open(bridge->comm);
    if (st == COLO_OK) { /* all ranks go on, or none */
        st = find_carriers(bridge, &bridge->now);
        COLO_THEN(st, colo_transfers_list(bridge, &bridge->now, COLO_EXCHANGE_MAIN, lists));
        st = colo_comm_agree(colo_comm_control(bridge->comm), "bridge create", 4, st);
        COLO_THEN(st, check_direct(bridge));
    }
    COLO_THEN(st, memory->create(bridge->comm, lists->pass, &bridge->direct.launcher));
    if (st < 0 && bridge->transport == COLO_TRANSPORT_PEER)
        return colo_fail_prefix(st, "bridge: transport peer");
    if (st != COLO_ERR_UNBUILT || colo_comm_check(bridge->comm) < 0)
        return st; /* the same kind on all ranks; what is not "not here" is nothing to hide */
    if (colo_log_on(COLO_LOG_INFO))
        colo_log(COLO_LOG_INFO, "bridge: staged through NCCL: %s", colo_last_error());
    return COLO_OK;
}

void colo_direct_destroy(colo_bridge_t *bridge)
{
    colo_bridge_direct_t *direct = &bridge->direct;
    if (direct->launcher && colo_comm_is_own(bridge->comm, "bridge"))
        bridge->comm->backend->direct->destroy(&direct->launcher);
    colo_transfers_deinit(&direct->main);
    colo_transfers_deinit(&direct->relays);
    free(direct->held[0].items);
    free(direct->held[1].items);
    free(direct->tensors.items);
}

/* ---- lists ---- */

/* What relays move, if there are any; local. */
static colo_status_t load_relays(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    if (!bridge->direct.launcher || ready->any_ranks ||
        !(plan->exchange[COLO_PASS_FORWARD][COLO_EXCHANGE_RELAYS].all_come ||
          plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_RELAYS].all_come))
        return COLO_OK;
    COLO_TRY(colo_transfers_list(bridge, ready, COLO_EXCHANGE_RELAYS, &bridge->direct.relays));
    return bridge->comm->backend->direct->list(bridge->direct.launcher, bridge->direct.relays.pass,
                                               &ready->direct.relay_list);
}

void colo_direct_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    colo_direct_list_t **const list[] = {&ready->direct.list, &ready->direct.relay_list};
    for (int i = 0; i < 2; i++)
        if (*list[i] && colo_comm_is_own(bridge->comm, "bridge"))
            bridge->comm->backend->direct->drop(bridge->direct.launcher, list[i]);
}

/* Without peers that reach each other COLO_OK and no launcher, unless it is insisted on. */
colo_status_t colo_direct_create(colo_bridge_t *bridge)
{
    COLO_TRY(create_launcher(bridge));
    bridge->lazy = bridge->lazy &&
                   bridge->direct.launcher; /* alike on ranks that are in reach and that are not */
    const colo_status_t st = load_relays(bridge, &bridge->now);
    return st < 0 ? colo_comm_fail(bridge->comm, st) : COLO_OK; /* a peer may be past it */
}

colo_status_t colo_direct_load(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_direct_memory_t *memory = bridge->comm->backend->direct;
    const colo_transfers_t *pass = bridge->direct.main.pass;
    if (!bridge->direct.launcher)
        return COLO_OK;
    COLO_TRY(find_carriers(bridge, ready));
    COLO_TRY(colo_transfers_list(bridge, ready, COLO_EXCHANGE_MAIN, &bridge->direct.main));
    COLO_TRY(load_relays(bridge, ready));
    return ready->program.bytes ? memory->list(bridge->direct.launcher, pass, &ready->direct.list)
                                : memory->load(bridge->direct.launcher, pass);
}

/* ---- is a call direct? ---- */

static size_t reach_of(const colo_tensor_t *tensor)
{
    int64_t reach = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        reach += (tensor->shape[i] - 1) * tensor->stride[i];
    return (size_t)reach * colo_dtype_size(tensor->dtype);
}

/* Do others look at what this rank has to be registered for @move? */
static bool is_looked_at(const colo_call_t *call, colo_mover_t move)
{
    const colo_message_list_t *list =
        &call->ready->messages.list[call->frame.pass][COLO_EXCHANGE_MAIN][move == COLO_PULL];
    return call->ready->direct.one_view || list->n > list->nby_comm;
}

static colo_registered_tensor_t *registered_for(const colo_call_t *call, colo_mover_t move)
{
    return call->registered.tensor + (move == COLO_PULL ? call->frame.n : 0);
}

/* The first of @tensor that peers reach by @move and that is not registered, or NULL. */
static const colo_tensor_t *find_each(colo_call_t *call, const colo_tensor_t *tensor,
                                      colo_mover_t move)
{
    const colo_bridge_t *bridge = call->bridge;
    const bool looked_at = is_looked_at(call, move);
    const colo_tensor_t *missing = NULL;
    for (int32_t k = 0; k < call->frame.n; k++) {
        colo_registered_tensor_t *registered = &registered_for(call, move)[k];
        *registered = (colo_registered_tensor_t){.id = -1};
        if (!tensor || !tensor[k].data || colo_tensor_count(&tensor[k]) <= 0)
            continue;
        call->registered.nothing = call->registered.nothing && !looked_at;
        if (!bridge->comm->backend->direct->find(bridge->comm, tensor[k].data, reach_of(&tensor[k]),
                                                 &registered->id, &registered->offset) &&
            looked_at && !missing)
            missing = &tensor[k];
    }
    return missing;
}

colo_status_t colo_direct_find(colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    const colo_pass_t pass = call->frame.pass;
    const colo_ready_direct_t *direct = &call->ready->direct;
    const bool asked = bridge->transport == COLO_TRANSPORT_PEER;
    const struct colo_agreed *agreed = &bridge->direct.agreed[pass];
    const colo_tensor_t *missing = NULL;
    bool reads = false;
    colo_registered_t *registered = &call->registered;
    registered->nothing = true;
    registered->moves = 0;
    if (!bridge->direct.launcher)
        return COLO_OK;
    /* on one of two moves, or on a tensor of which a rank has nothing */
    const bool agrees = direct->moves[pass] == (COLO_PUSH | COLO_PULL) ||
                        (direct->moves[pass] && !asked && direct->asymmetric[pass]);
    if (agrees && (!agreed->made || agreed->registrations !=
                                        bridge->comm->backend->direct->registrations(bridge->comm)))
        call->undecided = true;
    const int32_t possible = agrees && !call->undecided ? agreed->moves : direct->moves[pass];
    for (colo_mover_t move = COLO_PULL; move >= COLO_PUSH; move--) {
        if (!(possible & move))
            continue;
        missing = find_each(call, move == COLO_PULL ? call->in : call->out, move);
        reads = move == COLO_PULL;
        registered->moves |= missing ? 0 : move;
    }
    if (registered->moves)
        call->direct = true;
    if (registered->moves || !possible || call->undecided || (!agrees && !asked))
        return COLO_OK;
    char index[16] = "";
    if (call->frame.program->bytes)
        snprintf(index, sizeof index, "[%d]", (int)(missing - (reads ? call->in : call->out)));
    return colo_fail(COLO_ERR_ARG,
                     "rank %lld: %s%s at %p is not registered over comm '%s', which %s requires; "
                     "use colo_memory_register()",
                     (long long)call->frame.program->plan->rank,
                     pass == COLO_PASS_FORWARD ? (reads ? "x" : "y") : (reads ? "d_y" : "d_x"),
                     index, missing->data, bridge->comm->name,
                     asked ? "transport peer (COLO_TRANSPORT, or the bridge's)"
                           : "the pass's first call, with all ranks' registered,");
}

colo_status_t colo_direct_agree(colo_call_t *call)
{
    enum { NOTHING = 4 };
    colo_bridge_t *bridge = call->bridge;
    colo_registered_t *registered = &call->registered;
    const int32_t size = bridge->comm->size;
    struct colo_agreed *agreed = &bridge->direct.agreed[call->frame.pass];
    const uint64_t mine = registered->nothing ? NOTHING : (uint64_t)registered->moves;
    int32_t moves = COLO_PUSH | COLO_PULL, nregistered = 0, first = -1;
    COLO_AUTOFREE uint64_t *all = malloc((size_t)size * sizeof *all);
    if (!all)
        return colo_comm_fail(bridge->comm,
                              colo_fail(COLO_ERR_NOMEM, "bridge: %d ranks", (int)size));
    COLO_TRY(colo_comm_gather(colo_comm_control(bridge->comm), COLO_OP_ALL_GATHER,
                              COLO_CATEGORY_CHECK, &mine, all, 1));
    for (int32_t k = 0; k < size; k++) {
        if (all[k] == NOTHING)
            continue;
        nregistered += all[k] != 0;
        moves &= (int32_t)all[k];
        first = !moves && first < 0 ? k : first; /* leaves no move that all have */
    }
    const bool any = nregistered > 0 || first >= 0;
    *agreed = (struct colo_agreed){.made = any,
                                   .moves = !any                ? 0
                                            : moves & COLO_PUSH ? COLO_PUSH
                                                                : moves,
                                   .registrations =
                                       bridge->comm->backend->direct->registrations(bridge->comm)};
    registered->moves = agreed->moves ? agreed->moves : COLO_PUSH;
    const bool is_direct = agreed->moves || (!any && bridge->transport == COLO_TRANSPORT_PEER);
    call->direct = is_direct;
    if (!is_direct && bridge->transport == COLO_TRANSPORT_PEER) {
        agreed->made = false;
        return colo_fail(COLO_ERR_ARG,
                         "bridge: neither y nor x is registered over comm '%s' on all ranks that "
                         "have rows, which transport peer (COLO_TRANSPORT, or the bridge's) "
                         "requires; use colo_memory_register()",
                         bridge->comm->name);
    }
    if (nregistered == 0 || is_direct)
        return COLO_OK;
    colo_log(COLO_LOG_INFO,
             "bridge: staged, on all ranks: the tensors of %d ranks are registered, that of "
             "rank %d of '%s' is not",
             (int)nregistered, (int)first, bridge->comm->name);
    return COLO_OK;
}

/* ---- calls ---- */

/* The kernel cuts transfers into tiles of so many rows. Of rows that are wider than those that the
 * transfers were listed for, a tile is too large, so that few blocks have work: a batch lists them
 * again. */
colo_status_t colo_direct_prepare(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    const colo_ready_direct_t *direct = &call->ready->direct;
    int64_t *unit = &bridge->direct.unit;
    for (int32_t k = 0; k < call->frame.n && !call->capturing; k++) {
        const colo_carried_t *tensor = &call->frame.tensor[k];
        const int64_t own = tensor->per * (int64_t)colo_dtype_size(tensor->dtype);
        *unit = own > *unit ? own : *unit;
    }
    const bool wider = *unit > direct->unit && !call->capturing;
    const bool lost = call->frame.program->bytes && !direct->list; /* the last listing failed */
    if (!wider && !lost &&
        (call->frame.pass == COLO_PASS_BACKWARD ||
         direct->forward == (colo_mover_t)call->registered.moves))
        return COLO_OK;
    colo_direct_unload(bridge, call->ready); /* or the list was made before ranks had agreed */
    return colo_direct_load(bridge, call->ready);
}

static colo_direct_tensor_t tensor_of(const colo_call_t *call, const colo_move_t *move,
                                      const colo_carried_t *tensor,
                                      const colo_registered_tensor_t *registered)
{
    const colo_call_frame_t *frame = &call->frame;
    const int64_t elem = (int64_t)colo_dtype_size(tensor->dtype);
    const colo_view_t *in = move->from == COLO_OUT ? &tensor->out : &tensor->in;
    colo_direct_tensor_t to = {.per = tensor->per,
                               .dtype = tensor->dtype,
                               .elem = (size_t)elem,
                               .in = in->data,
                               .out = tensor->out.data,
                               .id = registered->id,
                               .offset = registered->offset};
    for (int i = 0; i < 3; i++) {
        to.in_stride[i] = in->stride[i] * elem;
        to.out_stride[i] = tensor->out.stride[i] * elem;
    }
    if (move->to == COLO_PARTIALS && call->ready->direct.needs_comm) {
        int64_t extent[3];
        colo_partial_extent(frame->program->plan, extent);
        const int64_t row = extent[2] * tensor->per * elem;
        to.out = frame->partials ? (char *)frame->partials + tensor->in_partial : NULL;
        to.out_stride[0] = frame->program->bytes ? (int64_t)frame->partial_bytes : extent[1] * row;
        to.out_stride[1] = row;
        to.out_stride[2] = elem;
    }
    return to;
}

colo_status_t colo_direct_move(colo_call_t *call, const colo_move_t *move)
{
    const colo_ready_direct_t *direct = &call->ready->direct;
    colo_bridge_t *bridge = call->bridge;
    colo_direct_tensor_t one, *tensor = &one;
    if (call->frame.n > 1)
        tensor = colo_list_zeroed(&bridge->direct.tensors, call->frame.n, sizeof *tensor);
    colo_direct_call_t launch = {.list = move->exchange == COLO_EXCHANGE_RELAYS ? direct->relay_list
                                                                                : direct->list,
                                 .tensor = tensor,
                                 .device = call->queries.device,
                                 .capturing = call->capturing};
    COLO_FAIL_IF(!tensor, COLO_ERR_NOMEM, "bridge: %d tensors", (int)call->frame.n);
    const colo_registered_tensor_t *registered =
        registered_for(call, (colo_mover_t)call->registered.moves);
    for (int32_t k = 0; k < call->frame.n; k++)
        if (call->frame.tensor[k].per > 0)
            tensor[launch.n++] = tensor_of(call, move, &call->frame.tensor[k], &registered[k]);
    return bridge->comm->backend->direct->run(bridge->direct.launcher, call->frame.pass, &launch,
                                              call->stream);
}
