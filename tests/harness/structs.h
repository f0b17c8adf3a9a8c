/* SPDX-License-Identifier: Apache-2.0 */
/*
 * structs.h - structs that the library fills in, by value: tests read one member of many.
 */
#ifndef TESTS_HARNESS_STRUCTS_H
#define TESTS_HARNESS_STRUCTS_H

#include <colobridge.h>

/* Of no plan: zeros. */
static inline colo_plan_bytes_t t_plan_bytes(const colo_plan_t *plan, colo_pass_t pass)
{
    colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
    (void)colo_plan_bytes(plan, pass, &bytes);
    return bytes;
}

static inline colo_plan_node_bytes_t t_plan_node_bytes(const colo_plan_t *plan, colo_pass_t pass)
{
    colo_plan_node_bytes_t bytes = {COLO_PLAN_NODE_BYTES_INIT};
    (void)colo_plan_node_bytes(plan, pass, &bytes);
    return bytes;
}

/* A comm that has none, or is no comm: @stats has size 0, and its counters are untouched. */
static inline void t_comm_stats(const colo_comm_t *comm, colo_comm_stats_t *stats)
{
    *stats = (colo_comm_stats_t){COLO_COMM_STATS_INIT};
    if (colo_comm_stats(comm, stats) < 0)
        stats->struct_size = 0;
}

#endif
