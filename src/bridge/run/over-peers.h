/* SPDX-License-Identifier: Apache-2.0 */
/* over-peers.h (private) - programs over registered memory, in which GPUs reach each other. */
#ifndef COLO_BRIDGE_OVER_PEERS_H
#define COLO_BRIDGE_OVER_PEERS_H

#include "bridge/run/run.h"

/* ---- over-peers.c ---- */

/* Does this rank reach comm rank @peer? */
static inline bool colo_peers_near(const colo_bridge_t *bridge, int32_t peer)
{
    return bridge->comm->ops->peer->reaches(bridge->comm, bridge->comm->rank, peer);
}

/* ---- transfers.c ---- */

/* Bytes that a feature of a plan has in the usual tensor; of a batch: or in the widest one so far.
 */
size_t colo_peers_unit(const colo_bridge_t *bridge, const colo_loaded_t *loaded);
/* What ranks in reach move in @exchange; addends go to partial sums, or are added up where they
 * lie. Of a plan without rows: nothing, but any ranks in reach may reach this rank's tensors. */
colo_status_t colo_transfers_list(colo_bridge_t *bridge, const colo_loaded_t *loaded, int exchange,
                                  colo_transfer_lists_t *lists);
void colo_transfers_deinit(colo_transfer_lists_t *lists);

#endif
