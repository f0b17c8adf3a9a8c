/* SPDX-License-Identifier: Apache-2.0 */
/* ragged.h (private) - what the files of ragged batches share. */
#ifndef COLO_BRIDGE_RAGGED_H
#define COLO_BRIDGE_RAGGED_H

#include "bridge/bridge.h"
#include "bridge/plan/segments-plan.h"

/* ---- what a bridge keeps for its batches ---- */

/* What the peer-to-peer steps of a batch are made in; memory is kept for the next one. */
typedef struct colo_ragged_steps {
    colo_list_t step[2], addend[2]; /* by pass: colo_transfer_t; colo_addend_t, addends of each */
    colo_list_t held[2];            /* of sums, as they come; by addend */
} colo_ragged_steps_t;

typedef struct colo_ragged_bridge {
    colo_ragged_t axes; /* of the last tables */
    colo_builder_t builder;
    colo_pool_t spare; /* of a batch that was destroyed */
    colo_ragged_steps_t steps;
    colo_list_t carried, each, tensors; /* of the call that is under way */
    bool merged;
    int64_t unit;     /* p2p: bytes of a feature of the plan in the widest tensor so far */
    int64_t max_rows; /* of a source rank; 0: any */
    int64_t src_rows, dst_rows; /* of the last tables */
} colo_ragged_bridge_t;

/* Local. COLO_ERR_UNBUILT: the comm moves memory of the other kind. */
colo_status_t colo_ragged_create(colo_bridge_t *b, const colo_bridge_config_t *config);

/* run/memory.c */
/* All that one tensor of max_rows takes; the bridge has its plan. */
colo_status_t colo_ragged_reserve(colo_bridge_t *b);
/* Staging for the messages of a call, whose boxes are filled in; as colo_arena_grow(). */
colo_status_t colo_ragged_stage(colo_bridge_t *b, const colo_shape_state_t *s, colo_pass_t pass,
                                bool capturing);
void colo_ragged_destroy(colo_bridge_t *b);
static inline size_t colo_ragged_padded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* ---- batches ---- */

/* An error of this rank before its first call on a batch, brought to the comparison of that call.
 * Collective, if COLO_CHECK is at least 1; returns @mine. */
colo_status_t colo_ragged_share_refusal(const colo_bridge_t *b, colo_status_t mine);

struct colo_batch {
    colo_bridge_t *bridge;
    colo_pool_t pool; /* of its plan, places and boxes */
    colo_shape_state_t s;
    colo_ragged_places_t places;
    colo_table_t table[COLO_TABLES];
    int32_t ntables;
    uint64_t hash; /* of all tables */
    bool compared;
    colo_p2p_list_t *list; /* on the peer-to-peer path of the bridge; else NULL */
    colo_move_t move;      /* of its forward */
    int64_t unit;          /* bytes of a feature of the plan that the list is for */
};

/* ragged-peer.c */
/* If its bridge has a peer-to-peer path: where peers have the rows that the batch reaches, while
 * tables are there; then its steps, for the move that ranks agreed on last. Local. */
colo_status_t colo_ragged_p2p_place(colo_batch_t *batch);
colo_status_t colo_ragged_p2p_list(colo_batch_t *batch);
void colo_ragged_p2p_drop(colo_batch_t *batch);
/* Is this call peer-to-peer? Local; as colo_bridge_p2p_find(). @in, @out: [n] or NULL. @each:
 * [2 n], out: id and offset of what is pushed, then of what is pulled. */
colo_status_t colo_ragged_p2p_find(const colo_batch_t *batch, colo_pass_t pass,
                                   const colo_tensor_t *in, const colo_tensor_t *out, int32_t n,
                                   colo_reached_t *all, colo_reached_t *each);
/* For a call that is: steps for the move that ranks agreed on and for tensors @t. @near: out.
 * Local. */
colo_status_t colo_ragged_p2p_near(colo_batch_t *batch, colo_pass_t pass, const colo_reached_t *all,
                                   colo_reached_t *each, const colo_carried_t *t, int32_t n,
                                   colo_near_t *near);

/* ragged-verify.c: COLO_CHECK=2. Local; @t: [n] tensors of backward. */
colo_status_t colo_ragged_verify_zeros(const colo_batch_t *batch, const colo_carried_t *t,
                                       int32_t n, colo_stream_t stream);
/* Collective. */
colo_status_t colo_ragged_verify_replicas(const colo_batch_t *batch, colo_pass_t pass,
                                          const colo_carried_t *t, int32_t n, colo_stream_t stream);

#endif
