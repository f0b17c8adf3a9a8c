/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ticket.c - tickets of a bridge: which are taken, what each waits for, and their end.
 *
 * A stream per ticket would let calls overtake each other, which the comm forbids anyway, so one
 * stream serves them all, with an event per ticket. The calls themselves are start.c.
 */
#include "bridge/ticket.h"

#include "core/env.h"
#include "core/error.h"
#include "core/range.h"

#include <stdlib.h>

static const char *pass_name(colo_pass_t pass)
{
    return pass == COLO_FORWARD ? "forward" : "backward";
}

colo_status_t colo_tickets_of(colo_bridge_t *bridge, colo_tickets_t **tickets)
{
    if (!bridge->tickets) {
        colo_tickets_t *made = calloc(1, sizeof *made);
        COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "bridge start: %zu bytes", sizeof *made);
        made->bridge = bridge;
        const colo_status_t st = bridge->ops->stream_create(COLO_TICKETS_MAX + 1, &made->stream);
        if (st < 0) {
            free(made);
            return st;
        }
        bridge->tickets = made;
    }
    *tickets = bridge->tickets;
    return COLO_OK;
}

colo_status_t colo_ticket_take(colo_tickets_t *all, colo_pass_t pass, colo_ticket_t **ticket)
{
    const colo_bridge_t *bridge = all->bridge;
    const double now = colo_now(), deadline = (double)colo_comm_i_timeout(bridge->comm) * 1e-3;
    const colo_ticket_t *oldest = NULL;
    *ticket = NULL;
    for (int32_t i = 0; i < COLO_TICKETS_MAX; i++) {
        colo_ticket_t *other = &all->ticket[i];
        if (!other->of)
            *ticket = *ticket ? *ticket : other;
        else if (!oldest || other->number < oldest->number)
            oldest = other;
    }
    COLO_FAIL_IF(oldest && now - oldest->since > deadline, COLO_ERR_TIMEOUT,
                 "rank %lld: bridge %llu: ticket %llu (%s) was started %.1f s ago and is "
                 "not finished, the deadline is %.1f s; call colo_bridge_finish()",
                 (long long)bridge->now.program.plan->rank, (unsigned long long)bridge->id.number,
                 (unsigned long long)oldest->number, pass_name(oldest->pass), now - oldest->since,
                 deadline);
    COLO_FAIL_IF(!*ticket, COLO_ERR_STATE,
                 "rank %lld: bridge %llu: %d tickets are not finished, the first is %llu "
                 "(%s), expected at most %d; call colo_bridge_finish()",
                 (long long)bridge->now.program.plan->rank, (unsigned long long)bridge->id.number,
                 COLO_TICKETS_MAX, (unsigned long long)oldest->number, pass_name(oldest->pass),
                 COLO_TICKETS_MAX);
    **ticket = (colo_ticket_t){NULL, all->started + 1, pass, now};
    return COLO_OK;
}

colo_status_t colo_bridge_finish(colo_ticket_t **ticket, colo_stream_t stream)
{
    COLO_RANGE();
    COLO_FAIL_IF(!ticket || !*ticket, COLO_ERR_ARG,
                 "bridge finish: ticket is NULL, expected one that a start "
                 "returned and that is not finished");
    colo_ticket_t *finished = *ticket;
    colo_tickets_t *all = finished->of;
    *ticket = NULL;
    finished->of = NULL;
    return all->bridge->ops->event_wait(all->stream, colo_ticket_event(finished, all), stream);
}

void colo_tickets_destroy(colo_bridge_t *bridge)
{
    colo_tickets_t *all = bridge->tickets;
    if (!all)
        return;
    for (int32_t i = 0; i < COLO_TICKETS_MAX; i++)
        if (all->ticket[i].of)
            colo_log(COLO_LOG_ERROR,
                     "rank %lld: bridge %llu is destroyed while ticket %llu (%s) is not finished; "
                     "call colo_bridge_finish() before",
                     (long long)bridge->now.program.plan->rank,
                     (unsigned long long)bridge->id.number,
                     (unsigned long long)all->ticket[i].number, pass_name(all->ticket[i].pass));
    bridge->ops->stream_destroy(all->stream); /* waits */
    free(all);
    bridge->tickets = NULL;
}
