/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.c - forward and backward, of a uniform bridge and of a batch: checks, agreement, what
 * COLO_CHECK=2 verifies, and then the program.
 *
 * Decides what is an error, on which ranks, and what happens to the communicator then; the words
 * are tensors.c's. The bridge keeps nothing of a forward, so any number of forwards may be
 * outstanding before their backwards.
 */
#include "bridge/call.h"

#include "core/env.h"
#include "core/error.h"
#include "core/range.h"

/* @st: of this rank's checks. @compared: all ranks were once in this call, by this plan. */
static colo_status_t call_with(colo_call_t *call, colo_status_t st, bool *compared)
{
    colo_bridge_t *bridge = call->bridge;
    const int32_t level = colo_comm_check_level(bridge->comm);
    const bool verifies = level >= 2 && !call->capturing;
    if (level >= 2 && call->capturing) /* a replay runs no check; what is captured must be alike */
        colo_log(COLO_LOG_WARN, "bridge: a capture at COLO_CHECK=2 is compared between ranks, what "
                                "tensors hold is not verified");
    if (st == COLO_OK && verifies && call->frame.pass == COLO_PASS_BACKWARD)
        st = colo_call_verify_zeros(call);
    if (level >= 2 || (level == 1 && !*compared && (call->batch || st == COLO_OK)))
        COLO_TRY(colo_call_agree(call, st));
    else if (st < 0) /* no_grad is the same on every rank: no rank waits, the comm may live */
        return st == COLO_ERR_STATE && !call->batch ? st : colo_bridge_fail(bridge, st);
    if (verifies)
        COLO_TRY(colo_call_verify_replicas(call));
    *compared = true;
    return COLO_OK;
}

static colo_status_t alive(const colo_bridge_t *bridge, colo_pass_t pass)
{
    return colo_comm_alive(bridge->comm,
                           pass == COLO_PASS_FORWARD ? "bridge forward" : "bridge backward");
}

/* Checks the tensors, and finds how they travel; local. */
static colo_status_t prepare(colo_call_t *call)
{
    COLO_TRY(call->batch ? colo_call_check_batch(call) : colo_call_check_uniform(call));
    return colo_run_find(call);
}

/* COLLECTIVE has a plan, for its checks, but no program. */
static colo_status_t run(colo_call_t *call)
{
    call->bridge->id.calls++;
    return colo_bridge_is_collective(call->bridge) ? colo_collective_run(call)
                                                   : colo_run_call(call);
}

static colo_status_t call_bridge(colo_bridge_t *bridge, colo_pass_t pass, const colo_tensor_t *in,
                                 const colo_tensor_t *out, colo_stream_t stream)
{
    COLO_FAIL_IF(!bridge, COLO_ERR_ARG, "bridge: bridge is NULL");
    COLO_TRY(alive(bridge, pass));
    COLO_TRY(colo_ragged_refuse_call(bridge, pass));
    const colo_plan_t *plan = bridge->now.program.plan;
    colo_carried_t tensor = {0};
    colo_registered_tensor_t registered[2];
    colo_call_t call = {.bridge = bridge,
                        .ready = &bridge->now,
                        .frame = {.program = &bridge->now.program,
                                  .pass = pass,
                                  .tensor = &tensor,
                                  .n = 1,
                                  .partial_bytes = colo_partial_bytes(plan, 1, plan->config.dtype)},
                        .carried = &tensor,
                        .in = in,
                        .out = out,
                        .op = colo_bridge_op(bridge, pass),
                        .registered = {.tensor = registered},
                        .stream = stream};
    const colo_status_t st = prepare(&call);
    COLO_TRY(call_with(&call, st, &bridge->compared[pass]));
    bridge->compared[!pass] = bridge->compared[!pass] || colo_bridge_exchanges_compare(bridge);
    return run(&call);
}

static colo_status_t call_batch(colo_batch_t *batch, colo_pass_t pass, const colo_tensor_t *in,
                                const colo_tensor_t *out, int32_t n, colo_stream_t stream)
{
    COLO_FAIL_IF(!batch, COLO_ERR_ARG,
                 "bridge: batch is NULL, expected one that colo_bridge_set_segments() or "
                 "colo_bridge_set_packing() made");
    colo_bridge_t *bridge = batch->bridge;
    COLO_TRY(alive(bridge, pass));
    COLO_FAIL_IF(pass == COLO_PASS_BACKWARD && bridge->now.program.plan->config.no_grad,
                 COLO_ERR_STATE, "rank %lld: backward on a bridge created with no_grad",
                 (long long)bridge->now.program.plan->rank);
    colo_call_t call = {.bridge = bridge,
                        .batch = batch,
                        .ready = &batch->ready,
                        .frame = {.program = &batch->ready.program, .pass = pass, .n = n},
                        .in = in,
                        .out = out,
                        .op = colo_batch_op(batch, pass, n),
                        .stream = stream};
    const colo_status_t st = prepare(&call);
    COLO_TRY(call_with(&call, st, &batch->compared));
    return run(&call);
}

colo_status_t colo_bridge_forward(colo_bridge_t *bridge, const colo_tensor_t *in,
                                  const colo_tensor_t *out, colo_stream_t stream)
{
    COLO_RANGE();
    return call_bridge(bridge, COLO_PASS_FORWARD, in, out, stream);
}

colo_status_t colo_bridge_backward(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                   const colo_tensor_t *d_x, colo_stream_t stream)
{
    COLO_RANGE();
    return call_bridge(bridge, COLO_PASS_BACKWARD, d_y, d_x, stream);
}

colo_status_t colo_batch_forward(colo_batch_t *batch, const colo_tensor_t *in,
                                 const colo_tensor_t *out, int32_t n, colo_stream_t stream)
{
    COLO_RANGE();
    return call_batch(batch, COLO_PASS_FORWARD, in, out, n, stream);
}

colo_status_t colo_batch_backward(colo_batch_t *batch, const colo_tensor_t *d_y,
                                  const colo_tensor_t *d_x, int32_t n, colo_stream_t stream)
{
    COLO_RANGE();
    return call_batch(batch, COLO_PASS_BACKWARD, d_y, d_x, n, stream);
}
