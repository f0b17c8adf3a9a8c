/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic.c - how many of a plan's bytes cross NUMA nodes, packages and hosts.
 *
 * It stands here and not next to the audit because it reads plans, and grids know nothing of those.
 * Each message is counted where it is sent, so a sum over ranks has every byte once.
 */
#include "bridge/plan/plan.h"

#include "core/error.h"
#include "core/sized.h"
#include "grid/topology.h"

colo_status_t colo_topology_traffic(const colo_topology_t *topology, const colo_plan_t *plan,
                                    colo_pass_t pass, colo_topology_traffic_t *traffic)
{
    COLO_FAIL_IF(!topology || !plan, COLO_ERR_ARG, "traffic: %s is NULL",
                 !topology ? "the topology" : "the plan");
    COLO_FAIL_IF(pass != COLO_PASS_FORWARD && pass != COLO_PASS_BACKWARD, COLO_ERR_ARG,
                 "traffic: pass %d is neither COLO_PASS_FORWARD nor COLO_PASS_BACKWARD", (int)pass);
    const char *what = "traffic: traffic", *init = "COLO_TOPOLOGY_TRAFFIC_INIT";
    colo_topology_traffic_t sum = {COLO_TOPOLOGY_TRAFFIC_INIT};
    COLO_TRY(COLO_SIZED_READ(&sum, traffic, numa, what, init));
    int64_t rank = colo_plan_rank(plan);
    for (int k = 0; k < COLO_EXCHANGES; k++) {
        const colo_routes_t *sent = colo_plan_routes(plan, pass, k, true);
        const colo_plan_message_t *message = sent->message;
        const int32_t n = sent->nmessages;
        for (int32_t i = 0; i < n; i++) {
            int64_t most = rank > message[i].peer ? rank : message[i].peer;
            COLO_FAIL_IF(most >= topology->world, COLO_ERR_ARG,
                         "traffic: rank %lld of the plan is outside the topology, [0, %lld)",
                         (long long)most, (long long)topology->world);
            int crossed = colo_topology_cross(topology->placed.spot, topology->per_host, rank,
                                              message[i].peer);
            COLO_FAIL_IF(!colo_add_ok(sum.total, message[i].bytes, &sum.total), COLO_ERR_ARG,
                         "traffic: more than 2^63 bytes at rank %lld", (long long)rank);
            sum.numa += crossed & CROSS_NUMA ? message[i].bytes : 0;
            sum.package += crossed & CROSS_PACKAGE ? message[i].bytes : 0;
            sum.host += crossed & CROSS_HOST ? message[i].bytes : 0;
        }
    }
    return COLO_SIZED_WRITE(traffic, &sum, what, init);
}
