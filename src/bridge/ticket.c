/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ticket.c - calls in two halves: start gives a call to a stream of the bridge's own and returns a
 * ticket; finish makes the caller's stream wait for it.
 *
 * Decides which stream a call runs on, and nothing about the call, which is forward or backward as
 * it is. A stream per ticket would let calls overtake each other, which the comm forbids anyway, so
 * one stream serves them all, with an event per ticket.
 *
 * The tickets of a bridge are one block of memory, which lives until the bridge is destroyed and
 * each call that was started is finished. So finish is right at any time and on any thread: garbage
 * collectors run it when they like.
 */
#include "bridge/ragged/ragged.h"

#include "core/env.h"
#include "core/error.h"
#include "core/lock.h"
#include "core/range.h"

#include <colobridge/ticket.h>

#include <stdlib.h>

struct colo_ticket {
    colo_tickets_t *of; /* NULL: free */
    uint64_t number;    /* of the bridge's tickets, from 1 */
    colo_pass_t pass;
    double since; /* when it was started */
};

struct colo_tickets {
    pthread_mutex_t lock;  /* bridge, stream, taken, and which tickets are free */
    colo_bridge_t *bridge; /* NULL: destroyed */
    const colo_device_t *device;
    void *stream; /* of calls, with an event per ticket, and one more for what they follow */
    int64_t rank;
    uint64_t number, started; /* of the bridge; tickets so far */
    int32_t taken;
    colo_ticket_t ticket[COLO_TICKETS_MAX];
};

enum { FOLLOW = COLO_TICKETS_MAX }; /* the event of what calls follow */

static int32_t event_of(const colo_tickets_t *all, const colo_ticket_t *ticket)
{
    return (int32_t)(ticket - all->ticket);
}

static const char *pass_name(colo_pass_t pass)
{
    return pass == COLO_PASS_FORWARD ? "forward" : "backward";
}

static long long rank_of(const colo_bridge_t *bridge)
{
    return (long long)bridge->now.program.plan->rank;
}

static void tickets_free(colo_tickets_t *all)
{
    pthread_mutex_destroy(&all->lock);
    free(all);
}

/* ---- which are taken ---- */

/* Those of @bridge, made at the first start. */
static colo_status_t tickets_of(colo_bridge_t *bridge, colo_tickets_t **tickets)
{
    if (!bridge->tickets) {
        colo_tickets_t *made = calloc(1, sizeof *made);
        COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "bridge start: %zu bytes", sizeof *made);
        pthread_mutex_init(&made->lock, NULL);
        made->bridge = bridge;
        made->device = bridge->device;
        made->rank = bridge->now.program.plan->rank;
        made->number = bridge->id.number;
        const colo_status_t st = bridge->device->stream_create(COLO_TICKETS_MAX + 1, &made->stream);
        if (st < 0) {
            tickets_free(made);
            return st;
        }
        bridge->tickets = made;
    }
    *tickets = bridge->tickets;
    return COLO_OK;
}

/* One that is free: it is taken once its of is set. COLO_ERR_STATE: none is; COLO_ERR_TIMEOUT: one
 * was not finished by the deadline. */
static colo_status_t take(colo_tickets_t *all, colo_pass_t pass, colo_ticket_t **ticket)
{
    const colo_bridge_t *bridge = all->bridge;
    const double now = colo_now(), deadline = (double)colo_comm_timeout(bridge->comm) * 1e-3;
    const colo_ticket_t *oldest = NULL;
    *ticket = NULL;
    COLO_HOLD(&all->lock);
    for (int32_t i = 0; i < COLO_TICKETS_MAX; i++) {
        colo_ticket_t *other = &all->ticket[i];
        if (!other->of)
            *ticket = *ticket ? *ticket : other;
        else if (!oldest || other->number < oldest->number)
            oldest = other;
    }
    COLO_FAIL_IF(oldest && now - oldest->since > deadline, COLO_ERR_TIMEOUT,
                 "rank %lld: bridge %llu: ticket %llu (%s) was started %.1f s ago and is "
                 "not finished, the deadline is %.1f s; call colo_ticket_finish()",
                 rank_of(bridge), (unsigned long long)bridge->id.number,
                 (unsigned long long)oldest->number, pass_name(oldest->pass), now - oldest->since,
                 deadline);
    COLO_FAIL_IF(!*ticket, COLO_ERR_STATE,
                 "rank %lld: bridge %llu: %d tickets are not finished, the first is %llu "
                 "(%s), expected at most %d; call colo_ticket_finish()",
                 rank_of(bridge), (unsigned long long)bridge->id.number, COLO_TICKETS_MAX,
                 (unsigned long long)oldest->number, pass_name(oldest->pass), COLO_TICKETS_MAX);
    **ticket = (colo_ticket_t){NULL, all->started + 1, pass, now};
    return COLO_OK;
}

void colo_tickets_destroy(colo_bridge_t *bridge)
{
    colo_tickets_t *all = bridge->tickets;
    if (!all)
        return;
    void *const stream = all->stream;
    colo_ticket_t open[COLO_TICKETS_MAX];
    int32_t n = 0;
    pthread_mutex_lock(&all->lock);
    for (int32_t i = 0; i < COLO_TICKETS_MAX; i++)
        if (all->ticket[i].of)
            open[n++] = all->ticket[i];
    const colo_device_t *device = all->device;
    const bool last = all->taken == 0;
    all->bridge = NULL; /* the last finish frees all, which may come while this logs or waits */
    pthread_mutex_unlock(&all->lock);
    bridge->tickets = NULL;
    for (int32_t i = 0; i < n; i++) /* a sink may finish them */
        colo_log(COLO_LOG_ERROR,
                 "rank %lld: bridge %llu is destroyed while ticket %llu (%s) is not finished; "
                 "call colo_ticket_finish() before",
                 rank_of(bridge), (unsigned long long)bridge->id.number,
                 (unsigned long long)open[i].number, pass_name(open[i].pass));
    device->stream_destroy(stream); /* waits */
    if (last)
        tickets_free(all);
}

/* ---- start ---- */

/* A call of a bridge, or of a batch with @n tensors. */
typedef struct started {
    const char *of; /* "bridge" or "batch" */
    colo_bridge_t *bridge;
    colo_batch_t *batch;
    colo_pass_t pass;
    const colo_tensor_t *in, *out;
    int32_t n;
} started_t;

static colo_status_t call(const started_t *started, colo_stream_t stream)
{
    const bool forward = started->pass == COLO_PASS_FORWARD;
    if (started->batch)
        return (forward ? colo_batch_forward : colo_batch_backward)(
            started->batch, started->in, started->out, started->n, stream);
    return (forward ? colo_bridge_forward : colo_bridge_backward)(started->bridge, started->in,
                                                                  started->out, stream);
}

/* A ticket, and the stream that its call runs on: @stream itself on the host, and if a capture has
 * only one of the two streams. */
static colo_status_t begin(const started_t *started, colo_stream_t stream, colo_ticket_t **ticket,
                           colo_tickets_t **all, colo_stream_t *on)
{
    const colo_device_t *device = started->bridge->device;
    bool follows = false;
    COLO_FAIL_IF(!ticket, COLO_ERR_ARG, "rank %lld: ticket is NULL, expected a place for one",
                 rank_of(started->bridge));
    COLO_TRY(tickets_of(started->bridge, all));
    COLO_TRY(take(*all, started->pass, ticket));
    COLO_TRY(device->stream_follow((*all)->stream, FOLLOW, stream, &follows));
    *on = follows ? device->stream_of((*all)->stream) : stream;
    return COLO_OK;
}

static colo_status_t start(const started_t *started, colo_stream_t stream, colo_ticket_t **ticket)
{
    colo_bridge_t *bridge = started->bridge;
    colo_tickets_t *all = NULL;
    colo_ticket_t *taken = NULL;
    colo_stream_t on = stream;
    COLO_FAIL_IF(!bridge, COLO_ERR_ARG, "bridge: %s is NULL", started->of);
    colo_status_t st = begin(started, stream, ticket ? &taken : NULL, &all, &on);
    if (ticket)
        *ticket = NULL;
    if (st < 0) /* tickets are as many on all ranks; else peers wait in the call */
        return st == COLO_ERR_STATE ? st : colo_bridge_fail(bridge, st);
    bridge->comm->ticket = taken->number;
    st = call(started, on);
    bridge->comm->ticket = 0;
    const colo_error_t why = colo_error_save();
    const int32_t event = event_of(all, taken);
    const colo_status_t recorded = bridge->device->event_record(all->stream, event, on);
    if (st < 0) { /* what began ends before the caller frees the tensors; a capture is joined */
        if (recorded == COLO_OK && on != stream)
            (void)bridge->device->event_wait(all->stream, event, stream);
        return colo_error_restore(st, &why);
    }
    if (recorded < 0)
        return colo_bridge_fail(bridge, recorded);
    COLO_HOLD(&all->lock);
    taken->of = all;
    all->taken++;
    all->started++;
    *ticket = taken;
    return COLO_OK;
}

colo_status_t colo_bridge_forward_start(colo_bridge_t *bridge, const colo_tensor_t *in,
                                        const colo_tensor_t *out, colo_stream_t stream,
                                        colo_ticket_t **ticket)
{
    COLO_RANGE();
    return start(&(started_t){"bridge", bridge, NULL, COLO_PASS_FORWARD, in, out, 1}, stream,
                 ticket);
}

colo_status_t colo_bridge_backward_start(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                         const colo_tensor_t *d_x, colo_stream_t stream,
                                         colo_ticket_t **ticket)
{
    COLO_RANGE();
    return start(&(started_t){"bridge", bridge, NULL, COLO_PASS_BACKWARD, d_y, d_x, 1}, stream,
                 ticket);
}

colo_status_t colo_batch_forward_start(colo_batch_t *batch, const colo_tensor_t *in,
                                       const colo_tensor_t *out, int32_t n, colo_stream_t stream,
                                       colo_ticket_t **ticket)
{
    COLO_RANGE();
    colo_bridge_t *bridge = batch ? batch->bridge : NULL;
    return start(&(started_t){"batch", bridge, batch, COLO_PASS_FORWARD, in, out, n}, stream,
                 ticket);
}

colo_status_t colo_batch_backward_start(colo_batch_t *batch, const colo_tensor_t *d_y,
                                        const colo_tensor_t *d_x, int32_t n, colo_stream_t stream,
                                        colo_ticket_t **ticket)
{
    COLO_RANGE();
    colo_bridge_t *bridge = batch ? batch->bridge : NULL;
    return start(&(started_t){"batch", bridge, batch, COLO_PASS_BACKWARD, d_y, d_x, n}, stream,
                 ticket);
}

/* ---- finish ---- */

static colo_status_t finish(colo_tickets_t *all, colo_ticket_t *ticket, colo_stream_t stream,
                            bool *last)
{
    COLO_HOLD(&all->lock);
    ticket->of = NULL;
    *last = --all->taken == 0 && !all->bridge;
    COLO_FAIL_IF(
        !all->bridge, COLO_ERR_STATE,
        "rank %lld: bridge %llu was destroyed while ticket %llu (%s) was not finished; call "
        "colo_ticket_finish() before",
        (long long)all->rank, (unsigned long long)all->number, (unsigned long long)ticket->number,
        pass_name(ticket->pass));
    return all->device->event_wait(all->stream, event_of(all, ticket), stream);
}

colo_status_t colo_ticket_finish(colo_ticket_t **ticket, colo_stream_t stream)
{
    COLO_RANGE();
    bool last = false;
    COLO_FAIL_IF(!ticket || !*ticket, COLO_ERR_ARG,
                 "ticket finish: ticket is NULL, expected one that a start "
                 "returned and that is not finished");
    colo_ticket_t *finished = *ticket;
    colo_tickets_t *all = finished->of;
    *ticket = NULL;
    COLO_FAIL_IF(!all, COLO_ERR_ARG,
                 "ticket finish: ticket %llu (%s) is finished, expected one that is not",
                 (unsigned long long)finished->number, pass_name(finished->pass));
    const colo_status_t st = finish(all, finished, stream, &last);
    if (last)
        tickets_free(all);
    return st;
}
