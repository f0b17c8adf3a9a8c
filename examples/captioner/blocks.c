/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - the parts of the model before its layers: encoder, bridge, merge.
 *
 * Each forward fills buffers of the rank; each backward has the shape that the tape calls and finds
 * what it needs in the same buffers. The encoder's second product is summed over the *source* tp,
 * everything after the bridge over the destination's: this is where the two layouts meet. A rank
 * without a part of a tensor keeps a view of zero samples of it and still joins the bridge.
 */
#include "rank.h"

colo_tensor_t cap_view(const cap_rank_t *r, void *data, colo_dtype_t dtype, int32_t ndim,
                       const int64_t *shape)
{
    return r->ops.mem == COLO_MEM_CUDA ? colo_tensor_cuda(data, dtype, r->ops.device, ndim, shape)
                                       : colo_tensor_host(data, dtype, ndim, shape);
}

colo_tensor_t cap_x_view(const cap_rank_t *r, float *data)
{
    return cap_view(r, data, COLO_F32, r->ndim, r->x_shape);
}

colo_tensor_t cap_y_view(const cap_rank_t *r, float *data)
{
    return cap_view(r, data, COLO_F32, r->ndim, r->y_shape);
}

/* ---- encoder: enc = W2 gelu(W1 p + b1) + b2 ---- */

colo_status_t cap_encoder_forward(cap_rank_t *r)
{
    const cap_ops_t *o = &r->ops;
    int64_t t = r->sb * r->sn, D = r->cfg->model.width, E = r->encodes ? r->count[P_B1] : 0;

    if (!r->encodes)
        return COLO_OK;
    o->linear(o, t, CAP_PATCH, E, r->patches, r->w[P_W1], r->w[P_B1], r->act);
    o->gelu(o, t * E, r->act, r->act, r->dact);
    o->linear(o, t, E, D, r->act, r->w[P_W2], NULL, r->enc);
    CAP_TRY(cap_sum(r->src.tp_comm, r->enc, t * D, o->stream));
    o->add_rows(o, t, D, NULL, r->w[P_B2], r->enc);
    return COLO_OK;
}

colo_status_t cap_encoder_backward(const colo_tensor_t *d_out, int32_t nout,
                                   const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    const cap_ops_t *o = &r->ops;
    int64_t t = r->sb * r->sn, D = r->cfg->model.width, E = r->encodes ? r->count[P_B1] : 0;
    const float *d_enc = d_out[0].data;

    if (!r->encodes || !t)
        return COLO_OK;
    o->linear_d_bias(o, t, D, d_enc, r->g[P_B2]);
    o->linear_d_weight(o, t, E, D, r->act, d_enc, r->g[P_W2]);
    o->linear_d_input(o, t, E, D, d_enc, r->w[P_W2], 0.0f, r->d_act);
    o->scale(o, t * E, r->dact, r->d_act);
    o->linear_d_bias(o, t, E, r->d_act, r->g[P_B1]);
    o->linear_d_weight(o, t, CAP_PATCH, E, r->patches, r->d_act, r->g[P_W1]);
    return COLO_OK;
}

/* ---- bridge ---- */

colo_status_t cap_bridge_forward(cap_rank_t *r)
{
    colo_tensor_t x = cap_x_view(r, r->enc), y = cap_y_view(r, r->y);
    return r->ragged ? cap_ragged_forward(r, &x, &y)
                     : colo_bridge_forward(r->bridge, &x, &y, r->ops.stream);
}

colo_status_t cap_bridge_backward(const colo_tensor_t *d_out, int32_t nout,
                                  const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    return r->ragged ? cap_ragged_backward(r, &d_out[0], &d_in[0])
                     : colo_bridge_backward(r->bridge, &d_out[0], &d_in[0], r->ops.stream);
}

/* ---- merge: image rows and embedded text at this rank's positions, + position table ---- */

void cap_merge_forward(cap_rank_t *r)
{
    r->ops.merge(&r->ops, &r->seq, r->cfg->model.width, r->yn, r->y, r->w[P_EMBED], r->w[P_POS],
                 r->h_in);
}

/* d_y: with FULL_SEQ, rows of other cp ranks get nothing from here */
colo_status_t cap_merge_backward(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    r->ops.merge_backward(&r->ops, &r->seq, r->cfg->model.width, r->yn, d_out[0].data, d_in[0].data,
                          r->g[P_EMBED], r->g[P_POS]);
    return COLO_OK;
}
