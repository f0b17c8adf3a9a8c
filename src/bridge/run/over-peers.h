/* SPDX-License-Identifier: Apache-2.0 */
/* over-peers.h (private) - programs over registered memory, in which GPUs reach each other. */
#ifndef COLO_BRIDGE_OVER_PEERS_H
#define COLO_BRIDGE_OVER_PEERS_H

#include "bridge/run/run.h"

/* ---- over-peers.c ---- */

/* Does this rank reach comm rank @peer? */
static inline bool colo_peers_near(const colo_bridge_t *b, int32_t peer)
{
    return b->comm->ops->peer->reaches(b->comm, b->comm->rank, peer);
}
/* Will there be a path, as far as this rank can see before ranks compare notes? The same on all. */
bool colo_peers_likely(const colo_bridge_t *b);
/* Collective. Without peers that reach each other COLO_OK and no path, unless it is insisted on. */
colo_status_t colo_peers_create(colo_bridge_t *b);
void colo_peers_destroy(colo_bridge_t *b);
/* For another shape, which takes the place of the one before; local. Keeps the old one on error. */
colo_status_t colo_peers_reshape(colo_bridge_t *b, colo_loaded_t *next);
/* Lists of a batch, by the move that ranks agreed on last; local. */
colo_status_t colo_peers_load(colo_bridge_t *b, colo_loaded_t *loaded);
void colo_peers_unload(const colo_bridge_t *b, colo_loaded_t *loaded);
/* What relays move, if there are any; local. */
colo_status_t colo_peers_load_relays(colo_bridge_t *b, colo_loaded_t *loaded);

/* Does this call go peer-to-peer? Local. COLO_ERR_ARG: it must, and a tensor is not registered.
 * @in, @out: [call->frame.n] or NULL; reached->tensor is there. */
colo_status_t colo_peers_find(colo_call_t *call, const colo_tensor_t *in, const colo_tensor_t *out);
/* Where that is not agreed; collective. */
colo_status_t colo_peers_agree(colo_call_t *call);
/* Lists for the move that ranks agreed on and for the tensors of a call; local. */
colo_status_t colo_peers_begin(colo_call_t *call);
/* Do peers carry all of the call? */
bool colo_peers_carry(const colo_call_t *call);
/* A call that they carry. */
colo_status_t colo_peers_run(colo_call_t *call);
/* A move of another one: between ranks in reach directly, between others as messages. */
colo_status_t colo_over_peers_move(colo_call_t *call, const colo_move_t *move);

/* ---- transfers.c ---- */

/* Bytes that a feature of @p has in the usual tensor; of a batch: or in the widest one so far. */
size_t colo_peers_unit(const colo_bridge_t *b, const colo_plan_t *p);
/* What ranks in reach move in @exchange; addends go to partial sums, or are added up where they
 * lie. */
colo_status_t colo_transfers_list(colo_bridge_t *b, const colo_loaded_t *loaded, int exchange,
                                  colo_transfer_lists_t *lists);
/* No steps; any ranks in reach may reach this rank's tensors. */
colo_status_t colo_transfers_any(const colo_bridge_t *b, colo_transfer_lists_t *lists);
void colo_transfers_deinit(colo_transfer_lists_t *lists);

#endif
