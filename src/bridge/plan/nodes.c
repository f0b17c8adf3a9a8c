/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - which world rank is on which node, as plans look it up: a table, or equal nodes of
 * ranks that follow each other, which take no memory. Nodes may differ in size and lie scattered.
 */
#include "bridge/plan/nodes.h"

#include "core/error.h"
#include "core/hash.h"

#include <stdlib.h>
#include <string.h>

struct named { /* a rank, to be sorted by the caller's name of its node */
    int32_t name;
    int64_t rank;
};

static int by_name(const void *first, const void *second)
{
    const struct named *one = first, *other = second;
    if (one->name != other->name)
        return one->name < other->name ? -1 : 1;
    return (one->rank > other->rank) - (one->rank < other->rank);
}

colo_status_t colo_nodes_create(colo_nodes_t **nodes, const int32_t *node, int64_t ranks)
{
    COLO_FAIL_IF(!nodes || !node || ranks < 1, COLO_ERR_ARG, "nodes: %s, expected %s",
                 !nodes  ? "nodes is NULL"
                 : !node ? "the table is NULL"
                         : "there are no ranks",
                 !nodes  ? "where to put them"
                 : !node ? "a node for each rank"
                         : "at least one");
    colo_nodes_t *n = ranks <= INT64_MAX / 64 ? calloc(1, sizeof *n) : NULL;
    COLO_AUTOFREE struct named *all = n ? malloc((size_t)ranks * sizeof *all) : NULL;
    if (n)
        n->items = malloc((size_t)ranks * sizeof *n->items);
    if (!all || !n->items) {
        colo_nodes_destroy(&n);
        return colo_fail(COLO_ERR_NOMEM, "nodes: %lld ranks", (long long)ranks);
    }
    for (int64_t rank = 0; rank < ranks; rank++)
        all[rank] = (struct named){node[rank], rank};
    qsort(all, (size_t)ranks, sizeof *all, by_name);
    n->ranks = ranks;
    for (int64_t i = 0, first = 0; i < ranks; i++) {
        first = i && all[i].name == all[i - 1].name ? first : i;
        n->count += first == i;
        /* for now the node's first rank, which the node is then numbered by */
        n->items[all[i].rank] = (colo_location_t){all[first].rank, i - first};
    }
    n->hash = COLO_HASH_INIT;
    for (int64_t rank = 0, next = 0; rank < ranks; rank++) {
        n->items[rank].node =
            n->items[rank].node == rank ? next++ : n->items[n->items[rank].node].node;
        n->hash = colo_hash_i64(n->hash, n->items[rank].node);
    }
    *nodes = n;
    return COLO_OK;
}

void colo_nodes_destroy(colo_nodes_t **nodes)
{
    if (!nodes || !*nodes)
        return;
    free((*nodes)->items);
    free(*nodes);
    *nodes = NULL;
}

int64_t colo_nodes_count(const colo_nodes_t *nodes)
{
    return nodes ? nodes->count : 0;
}

int64_t colo_nodes_find(const colo_nodes_t *nodes, int64_t rank)
{
    return nodes && rank >= 0 && rank < nodes->ranks ? nodes->items[rank].node : -1;
}
