/* SPDX-License-Identifier: Apache-2.0 */
/* nodes.h (private) - the node of a rank, and its index there, for everything that reads a plan. */
#ifndef COLO_BRIDGE_PLAN_NODES_H
#define COLO_BRIDGE_PLAN_NODES_H

#include <colobridge/plan.h>

typedef struct colo_location {
    int64_t node, rail; /* rail: how many ranks of the node are lower */
} colo_location_t;

struct colo_nodes {
    int64_t ranks, count;
    uint64_t hash;
    colo_location_t *items; /* [ranks] */
};

static inline colo_location_t colo_location_of(const colo_plan_config_t *config, int64_t rank)
{
    const int64_t n = config->ranks_per_node;
    if (config->nodes)
        return config->nodes->items[rank];
    return n ? (colo_location_t){rank / n, rank % n} : (colo_location_t){0, rank};
}

/* Is there more than one? */
static inline bool colo_nodes_several(const colo_plan_config_t *config)
{
    const colo_grid_t *src = &config->src->grid, *dst = &config->dst->grid;
    const int64_t most = src->offset + src->size, n = dst->offset + dst->size;
    return config->nodes ? config->nodes->count > 1
                         : config->ranks_per_node && config->ranks_per_node < (most > n ? most : n);
}

/* Is anything known about nodes? If not, all ranks share one, and rails mean nothing. */
static inline bool colo_nodes_known(const colo_plan_config_t *config)
{
    return config->nodes || config->ranks_per_node;
}

#endif
