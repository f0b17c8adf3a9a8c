/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - which ranks of a communicator share a node.
 *
 * A node is a host: its boot id and its name, because containers share the first and virtual
 * machines may share the second. COLO_NODE overrides both, so that one machine can play several.
 * Ranks exchange this once, when a world is made (process/group.c); threads need no exchange. Nodes
 * are numbered by their first rank, also in a smaller comm.
 */
#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"
#include "core/host.h"

#include <stdlib.h>
#include <string.h>

colo_status_t colo_node_id(int32_t rank, int32_t size, uint64_t *id)
{
    const char *text;
    int32_t names = 1;
    *id = 0;
    COLO_TRY(colo_env_text("COLO_NODE", &text));
    if (!text[0]) {
        *id = colo_host_node();
        return COLO_OK;
    }
    for (const char *c = text; *c; c++)
        names += *c == ',';
    COLO_FAIL_IF(names > 1 && names != size, COLO_ERR_ARG,
                 "COLO_NODE names the nodes of %d ranks, and there are %d; give one name "
                 "for each rank, or one for this process",
                 (int)names, (int)size);
    for (int32_t i = 0; names > 1 && i < rank; i++)
        text = strchr(text, ',') + 1;
    *id = colo_hash_bytes(COLO_HASH_INIT, text, strcspn(text, ","));
    return COLO_OK;
}

colo_status_t colo_comm_set_nodes(colo_comm_t *comm, const uint64_t *id)
{
    int32_t *node = malloc((size_t)comm->size * sizeof *node), n = 0;
    COLO_AUTOFREE int32_t *first = malloc((size_t)comm->size * sizeof *first);
    if (!node || !first) {
        free(node);
        return colo_fail(COLO_ERR_NOMEM, "comm: nodes of %d ranks", (int)comm->size);
    }
    for (int32_t r = 0; r < comm->size; r++) {
        node[r] = 0;
        while (node[r] < n && id[first[node[r]]] != id[r])
            node[r]++;
        if (node[r] == n)
            first[n++] = r;
    }
    free(comm->node);
    comm->node = node;
    comm->nnodes = n;
    return COLO_OK;
}

int32_t colo_comm_node(const colo_comm_t *comm, int32_t rank)
{
    if (!comm || rank < 0 || rank >= comm->size)
        return -1;
    const colo_comm_t *made = comm->control ? comm->control : comm;
    return made->node ? made->node[rank] : 0;
}

int32_t colo_comm_nodes(const colo_comm_t *comm)
{
    const colo_comm_t *made = comm && comm->control ? comm->control : comm;
    return !made ? 0 : made->node ? made->nnodes : 1;
}
