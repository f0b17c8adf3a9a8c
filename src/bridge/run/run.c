/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - runs the steps of a call, one after the other, each by the executor that the call goes
 * over; calls of one bridge in order, as far as they share its memory.
 */
#include "bridge/run/add.h"
#include "bridge/run/over-peers.h"

#include "core/error.h"

#include <stdio.h>

colo_status_t colo_run_steps(colo_call_t *call)
{
    const colo_steps_t *steps = &call->frame.program->pass[call->frame.pass];
    COLO_TRY(colo_over_comm_begin(call));
    for (int32_t i = 0; i < steps->n; i++) {
        const colo_step_t *step = &steps->step[i];
        if (step->kind == COLO_MOVE) {
            COLO_TRY(call->reached.p2p ? colo_over_peers_move(call, &step->move)
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
