/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - runs the program of a call: one loop over its steps.
 *
 * A move goes as messages of the comm (over-comm.c), between ranks that reach each other's memory
 * directly (over-peers.c), or as both; an addition is add.c's. Which of these a call takes is
 * decided before the loop, once. COLLECTIVE has no program (collective.c).
 */
#include "bridge/run/run.h"

#include "core/error.h"

bool colo_run_likely(const colo_bridge_t *bridge)
{
    return !colo_bridge_is_collective(bridge) && colo_over_peers_likely(bridge);
}

colo_status_t colo_run_load(colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    if (colo_bridge_is_collective(bridge))
        return colo_collective_load(bridge, loaded);
    COLO_TRY(colo_over_comm_load(bridge, loaded)); /* makes the program */
    return colo_over_peers_load(bridge, loaded);
}

void colo_run_unload(const colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    colo_over_peers_unload(bridge, loaded);
    colo_over_comm_unload(bridge, loaded);
    colo_program_deinit(&loaded->program);
    *loaded = (colo_loaded_t){0};
}

colo_status_t colo_run_create(colo_bridge_t *bridge)
{
    bool serves_all;
    if (colo_bridge_is_collective(bridge))
        return colo_collective_create(bridge);
    COLO_TRY(colo_over_peers_create(bridge, &serves_all));
    return serves_all ? COLO_OK : colo_over_comm_create(bridge);
}

void colo_run_destroy(colo_bridge_t *bridge)
{
    colo_over_peers_destroy(bridge);
    colo_collective_destroy(bridge);
}

colo_status_t colo_run_reshape(colo_bridge_t *bridge, colo_loaded_t *next)
{
    if (colo_bridge_is_collective(bridge)) {
        COLO_TRY(colo_collective_reshape(bridge, next));
    } else {
        COLO_TRY(colo_over_peers_reshape(bridge, next));
        colo_over_comm_reshape(bridge, next);
    }
    colo_run_unload(bridge, &bridge->now);
    bridge->now = *next;
    return COLO_OK;
}

/* ---- calls ---- */

/* Does a call have moves whose messages are the comm's? */
static bool needs_comm(const colo_call_t *call)
{
    return !call->direct || call->loaded->over_peers.far;
}

static colo_status_t prepare(colo_call_t *call)
{
    return needs_comm(call) ? colo_over_comm_prepare(call) : COLO_OK;
}

colo_status_t colo_run_find(colo_call_t *call)
{
    if (colo_bridge_is_collective(call->bridge))
        return COLO_OK;
    COLO_TRY(colo_over_peers_find(call));
    return call->undecided ? COLO_OK : prepare(call);
}

static colo_status_t run_steps(colo_call_t *call)
{
    const colo_steps_t *steps = &call->frame.program->pass[call->frame.pass];
    COLO_TRY(colo_over_comm_begin(call));
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_step_t *step = &steps->step[i];
        if (step->kind == COLO_MOVE) {
            COLO_TRY(call->direct ? colo_over_peers_move(call, &step->move)
                                  : colo_over_comm_move(call, &step->move));
            continue;
        }
        const colo_status_t st =
            colo_add_run(call->bridge->ops, &call->frame, &step->add, call->stream);
        if (st < 0)
            return colo_comm_i_fail(call->bridge->comm, st);
    }
    return COLO_OK;
}

/* What is left to do before the first move; a failure is told the other ranks. */
static colo_status_t begin(colo_call_t *call)
{
    colo_status_t st = COLO_OK;
    if (call->undecided) {
        COLO_TRY(colo_over_peers_agree(call)); /* the same on all ranks */
        st = prepare(call);
    }
    if (st == COLO_OK)
        call->bridge->id.calls++;
    if (st == COLO_OK && call->direct)
        st = colo_over_peers_begin(call);
    return st < 0 ? colo_comm_i_fail(call->bridge->comm, st) : COLO_OK;
}

colo_status_t colo_run_call(colo_call_t *call)
{
    COLO_TRY(begin(call));
    if (colo_bridge_is_collective(call->bridge))
        return colo_collective_run(call);
    if (!needs_comm(call))
        return colo_over_peers_run(call);
    COLO_TRY(colo_memory_begin(call));
    return colo_memory_end(call, run_steps(call));
}
