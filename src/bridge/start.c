/* SPDX-License-Identifier: Apache-2.0 */
/*
 * start.c - calls in two halves: start gives a call to a stream of the bridge's own, and finish
 * (ticket.c) makes the caller's stream wait for it.
 *
 * Decides which stream a call runs on, and nothing about the call, which is forward or backward as
 * it is.
 */
#include "bridge/call.h"
#include "bridge/ticket.h"

#include "core/error.h"
#include "core/range.h"

/* A call of a bridge, or of a batch with @n tensors. */
typedef struct started {
    colo_bridge_t *bridge;
    colo_batch_t *batch;
    colo_pass_t pass;
    const colo_tensor_t *in, *out;
    int32_t n;
} started_t;

static colo_status_t call(const started_t *started, colo_stream_t stream)
{
    const bool forward = started->pass == COLO_FORWARD;
    if (started->batch)
        return forward ? colo_batch_forward(started->batch, started->in, started->out, started->n,
                                            stream)
                       : colo_batch_backward(started->batch, started->in, started->out, started->n,
                                             stream);
    return forward ? colo_bridge_forward(started->bridge, started->in, started->out, stream)
                   : colo_bridge_backward(started->bridge, started->in, started->out, stream);
}

/* A ticket, and the stream that its call runs on: @stream itself on the host, and if a capture has
 * only one of the two streams. */
static colo_status_t begin(const started_t *started, colo_stream_t stream, colo_ticket_t **ticket,
                           colo_tickets_t **all, colo_stream_t *on)
{
    bool follows = false;
    COLO_FAIL_IF(!ticket, COLO_ERR_ARG, "rank %lld: ticket is NULL, expected a place for one",
                 (long long)started->bridge->now.program.plan->rank);
    *ticket = NULL;
    COLO_TRY(colo_tickets_of(started->bridge, all));
    COLO_TRY(colo_ticket_take(*all, started->pass, ticket));
    COLO_TRY(
        started->bridge->ops->stream_follow((*all)->stream, COLO_TICKETS_FOLLOW, stream, &follows));
    *on = follows ? started->bridge->ops->stream_of((*all)->stream) : stream;
    return COLO_OK;
}

static colo_status_t start(const started_t *started, colo_stream_t stream, colo_ticket_t **ticket)
{
    const colo_ops_t *ops = started->bridge->ops;
    colo_tickets_t *all = NULL;
    colo_ticket_t *taken = NULL;
    colo_stream_t on = stream;
    colo_status_t st = begin(started, stream, ticket ? &taken : NULL, &all, &on);
    if (ticket)
        *ticket = NULL;
    if (st < 0) /* tickets are as many on all ranks; else peers wait in the call */
        return st == COLO_ERR_STATE ? st : colo_bridge_fail(started->bridge, st);
    started->bridge->comm->ticket = taken->number;
    st = call(started, on);
    started->bridge->comm->ticket = 0;
    const colo_error_t why = colo_error_save();
    const int32_t event = colo_ticket_event(taken, all);
    const colo_status_t recorded = ops->event_record(all->stream, event, on);
    if (st < 0) { /* what began ends before the caller frees the tensors; a capture is joined */
        if (recorded == COLO_OK && on != stream)
            (void)ops->event_wait(all->stream, event, stream);
        return colo_error_restore(st, &why);
    }
    if (recorded < 0)
        return colo_bridge_fail(started->bridge, recorded);
    taken->of = all;
    all->started++;
    *ticket = taken;
    return COLO_OK;
}

colo_status_t colo_bridge_forward_start(colo_bridge_t *bridge, const colo_tensor_t *in,
                                        const colo_tensor_t *out, colo_stream_t stream,
                                        colo_ticket_t **ticket)
{
    COLO_RANGE();
    COLO_FAIL_IF(!bridge, COLO_ERR_ARG, "bridge: bridge is NULL");
    return start(&(started_t){bridge, NULL, COLO_FORWARD, in, out, 1}, stream, ticket);
}

colo_status_t colo_bridge_backward_start(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                         const colo_tensor_t *d_x, colo_stream_t stream,
                                         colo_ticket_t **ticket)
{
    COLO_RANGE();
    COLO_FAIL_IF(!bridge, COLO_ERR_ARG, "bridge: bridge is NULL");
    return start(&(started_t){bridge, NULL, COLO_BACKWARD, d_y, d_x, 1}, stream, ticket);
}

colo_status_t colo_batch_forward_start(colo_batch_t *batch, const colo_tensor_t *in,
                                       const colo_tensor_t *out, int32_t n, colo_stream_t stream,
                                       colo_ticket_t **ticket)
{
    COLO_RANGE();
    COLO_FAIL_IF(!batch, COLO_ERR_ARG, "bridge: batch is NULL");
    return start(&(started_t){batch->bridge, batch, COLO_FORWARD, in, out, n}, stream, ticket);
}

colo_status_t colo_batch_backward_start(colo_batch_t *batch, const colo_tensor_t *d_y,
                                        const colo_tensor_t *d_x, int32_t n, colo_stream_t stream,
                                        colo_ticket_t **ticket)
{
    COLO_RANGE();
    COLO_FAIL_IF(!batch, COLO_ERR_ARG, "bridge: batch is NULL");
    return start(&(started_t){batch->bridge, batch, COLO_BACKWARD, d_y, d_x, n}, stream, ticket);
}
