/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention.c - causal attention of a rank's heads over a sequence that context parallelism
 * spreads.
 *
 * Decides: keys and values of all positions are gathered over cp (each rank then sees the whole
 * prefix of its own queries), and their gradients go back by a reduce-scatter, its exact adjoint.
 * Ranks that have fewer rows than others bring as many; what is behind theirs is never read.
 * Heads are split over tp and never meet here. Leaves the arithmetic to ops.h.
 */
#include "rank.h"

colo_status_t cap_attention(cap_layer_t *l)
{
    const cap_rank_t *r = l->rank;
    int64_t count = cap_kv_rows(r) * r->seq.h * r->seq.e;

    if (r->dst.cp > 1)
        CAP_TRY(colo_comm_all_gather(r->dst.cp_comm, l->kv, l->kv_all, 2 * count, COLO_F32,
                                     r->ops.stream));
    r->ops.attend(&r->ops, &r->seq, l->q, l->kv_all, l->prob, l->o, r->work);
    return COLO_OK;
}

colo_status_t cap_attention_backward(cap_layer_t *l, const float *d_o)
{
    const cap_rank_t *r = l->rank;
    int64_t count = cap_kv_rows(r) * r->seq.h * r->seq.e;

    r->ops.attend_backward(&r->ops, &r->seq, l->q, l->kv_all, l->prob, d_o, r->d_q, r->d_kv_all,
                           r->work);
    if (r->dst.cp > 1)
        CAP_TRY(colo_comm_reduce_scatter(r->dst.cp_comm, r->d_kv_all, r->d_kv, 2 * count, COLO_F32,
                                         COLO_REDOP_SUM, r->ops.stream));
    return COLO_OK;
}
