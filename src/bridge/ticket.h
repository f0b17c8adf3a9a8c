/* SPDX-License-Identifier: Apache-2.0 */
/* ticket.h (private) - the tickets of a bridge: ticket.c keeps them, start.c hands them out. */
#ifndef COLO_BRIDGE_TICKET_H
#define COLO_BRIDGE_TICKET_H

#include "bridge/run/run.h"

#include <colobridge/ticket.h>

struct colo_ticket {
    colo_tickets_t *of; /* NULL: free */
    uint64_t number;    /* of the bridge's tickets, from 1 */
    colo_pass_t pass;
    double since; /* when it was started */
};

struct colo_tickets {
    colo_bridge_t *bridge;
    void *stream; /* of calls, with an event per ticket, and one more for what they follow */
    uint64_t started;
    colo_ticket_t ticket[COLO_TICKETS_MAX];
};

enum { COLO_TICKETS_FOLLOW = COLO_TICKETS_MAX }; /* the event of what calls follow */

static inline int32_t colo_ticket_event(const colo_ticket_t *ticket, const colo_tickets_t *all)
{
    return (int32_t)(ticket - all->ticket);
}

/* Those of @bridge, made at the first start. */
colo_status_t colo_tickets_of(colo_bridge_t *bridge, colo_tickets_t **tickets);
/* One that is free: it is taken once its of is set. COLO_ERR_STATE: none is; COLO_ERR_TIMEOUT: one
 * was not finished by the deadline. */
colo_status_t colo_ticket_take(colo_tickets_t *all, colo_pass_t pass, colo_ticket_t **ticket);

#endif
