/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic.c - how many of a plan's bytes cross NUMA nodes, packages and hosts.
 *
 * It stands here and not next to the audit because it reads plans, and grids know nothing of those.
 * Each message is counted where it is sent, so a sum over ranks has every byte once.
 */
#include "bridge/plan/plan.h"

#include "core/error.h"
#include "grid/topology.h"

colo_status_t colo_topology_traffic(const colo_topology_t *topology, const colo_plan_t *plan,
                                    colo_topology_traffic_t *traffic)
{
    COLO_FAIL_IF(!topology || !plan || !traffic, COLO_ERR_ARG, "traffic: %s is NULL",
                 !topology ? "the topology"
                 : !plan   ? "the plan"
                           : "the output");
    colo_topology_traffic_t sum[2] = {traffic[0], traffic[1]};
    int64_t rank = colo_plan_rank(plan);
    for (int k = 0; k < 2 * COLO_EXCHANGES; k++) {
        const colo_pass_t pass = (colo_pass_t)(k % 2);
        colo_topology_traffic_t *counted = &sum[pass];
        const colo_routes_t *sent = colo_plan_routes(plan, pass, k / 2, true);
        const colo_plan_message_t *message = sent->message;
        const int32_t n = sent->nmessages;
        for (int32_t i = 0; i < n; i++) {
            int64_t most = rank > message[i].peer ? rank : message[i].peer;
            COLO_FAIL_IF(most >= topology->world, COLO_ERR_ARG,
                         "traffic: rank %lld of the plan is outside the topology, [0, %lld)",
                         (long long)most, (long long)topology->world);
            int crossed = colo_topology_i_cross(topology->placed.spot, topology->per_host, rank,
                                                message[i].peer);
            COLO_FAIL_IF(!colo_add_ok(counted->total, message[i].bytes, &counted->total),
                         COLO_ERR_ARG, "traffic: more than 2^63 bytes at rank %lld",
                         (long long)rank);
            counted->numa += crossed & CROSS_NUMA ? message[i].bytes : 0;
            counted->package += crossed & CROSS_PACKAGE ? message[i].bytes : 0;
            counted->host += crossed & CROSS_HOST ? message[i].bytes : 0;
        }
    }
    traffic[0] = sum[0];
    traffic[1] = sum[1];
    return COLO_OK;
}
