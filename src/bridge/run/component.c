/* SPDX-License-Identifier: Apache-2.0 */
/*
 * component.c - which ranks a rank's messages tie it to, directly or through others.
 *
 * A plan is one rank's; what connects ranks is the plans of all of them. From coordinates alone any
 * rank can make any other's plan, so each finds its component by itself: its peers, their peers,
 * until no new rank turns up. Every member finds the same list. Both directions count: a bridge
 * talks backward to the same ranks, and with PARTIAL to more of them.
 */
#include "bridge/run/run.h"

#include "core/error.h"

#include <stdlib.h>
#include <string.h>

static colo_status_t add_peers(const colo_comm_t *comm, const colo_plan_t *plan, bool *in,
                               int32_t *queue, int32_t *n)
{
    for (int pass = 0; pass < 2; pass++)
        for (int list = 0; list < 2 * COLO_EXCHANGES; list++) {
            const colo_routes_t *routes =
                colo_plan_routes(plan, (colo_pass_t)pass, list / 2, list % 2 == 0);
            for (int32_t i = 0; i < routes->nmessages; i++) {
                int32_t k = colo_comm_find(comm, routes->message[i].peer);
                COLO_FAIL_IF(k < 0, COLO_ERR_MISSING,
                             "bridge: the plan of rank %lld names rank %lld, which is not "
                             "in the communicator '%s' of %d ranks",
                             (long long)plan->rank, (long long)routes->message[i].peer,
                             colo_comm_name(comm), (int)colo_comm_size(comm));
                if (!in[k]) {
                    in[k] = true;
                    queue[(*n)++] = k;
                }
            }
        }
    return COLO_OK;
}

colo_status_t colo_component_find(const colo_plan_t *plan, const colo_comm_t *comm,
                                  int32_t **members, int32_t *n)
{
    const int32_t size = colo_comm_size(comm), me = colo_comm_rank(comm);
    COLO_AUTOFREE bool *in = calloc((size_t)size, sizeof *in);
    COLO_AUTOFREE int32_t *queue = malloc((size_t)size * sizeof *queue);
    int32_t found = 0;
    COLO_FAIL_IF(!in || !queue, COLO_ERR_NOMEM, "bridge: a component among %d ranks", (int)size);
    in[me] = true;
    queue[found++] = me;
    for (int32_t next = 0; next < found && found < size; next++) {
        colo_plan_t *other = NULL;
        if (queue[next] != me)
            COLO_TRY(
                colo_plan_create(&other, &plan->config, colo_comm_world_rank(comm, queue[next])));
        colo_status_t st = add_peers(comm, other ? other : plan, in, queue, &found);
        colo_plan_destroy(&other);
        COLO_TRY(st);
    }
    int32_t *list = malloc((size_t)found * sizeof *list);
    COLO_FAIL_IF(!list, COLO_ERR_NOMEM, "bridge: a component of %d ranks", (int)found);
    *n = 0;
    for (int32_t k = 0; k < size; k++)
        if (in[k])
            list[(*n)++] = k;
    *members = list;
    return COLO_OK;
}

colo_status_t colo_members_find(const colo_bridge_t *bridge, const colo_ready_plan_t *ready,
                                int32_t **members, int32_t *n)
{
    if (!ready->any_ranks)
        return colo_component_find(ready->program.plan, bridge->comm, members, n);
    *n = colo_comm_size(bridge->comm);
    *members = malloc((size_t)*n * sizeof **members);
    COLO_FAIL_IF(!*members, COLO_ERR_NOMEM, "bridge: %d ranks", (int)*n);
    for (int32_t k = 0; k < *n; k++)
        (*members)[k] = k;
    return COLO_OK;
}
