/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - the parts of the model around its layers: encoder, bridge, merge, head with the loss.
 *
 * Each forward fills buffers of the rank; each backward has the shape that the tape calls and finds
 * what it needs in the same buffers. The encoder's second product is summed over the *source* tp,
 * everything after the bridge over the destination's: this is where the two layouts meet. A rank
 * without a part of a tensor keeps a view of zero samples of it and still joins the bridge.
 */
#include <string.h>

#include "rank.h"

colo_tensor_t cap_x_view(const cap_rank_t *r, float *data)
{
    return colo_tensor_host(data, COLO_F32, 3, r->x_shape);
}

colo_tensor_t cap_y_view(const cap_rank_t *r, float *data)
{
    return colo_tensor_host(data, COLO_F32, 3, r->y_shape);
}

/* ---- encoder: enc = W2 gelu(W1 p + b1) + b2 ---- */

colo_status_t cap_encoder_forward(cap_rank_t *r)
{
    int64_t t = r->sb * r->sn, D = r->cfg->model.width, E = r->encodes ? r->count[P_B1] : 0;

    if (!r->encodes)
        return COLO_OK;
    cap_linear(t, CAP_PATCH, E, r->patches, r->w[P_W1], r->w[P_B1], r->act);
    cap_gelu(t * E, r->act, r->act, r->dact);
    cap_linear(t, E, D, r->act, r->w[P_W2], NULL, r->enc);
    CAP_TRY(cap_sum(r->src.tp_comm, r->enc, t * D));
    for (int64_t i = 0; i < t; i++)
        for (int64_t j = 0; j < D; j++)
            r->enc[i * D + j] += r->w[P_B2][j];
    return COLO_OK;
}

colo_status_t cap_encoder_backward(const colo_tensor_t *d_out, int32_t nout,
                                   const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    int64_t t = r->sb * r->sn, D = r->cfg->model.width, E = r->encodes ? r->count[P_B1] : 0;
    const float *d_enc = d_out[0].data;

    if (!r->encodes || !t)
        return COLO_OK;
    cap_linear_d_bias(t, D, d_enc, r->g[P_B2]);
    cap_linear_d_weight(t, E, D, r->act, d_enc, r->g[P_W2]);
    cap_linear_d_input(t, E, D, d_enc, r->w[P_W2], 0.0f, r->d_act);
    for (int64_t i = 0; i < t * E; i++)
        r->d_act[i] *= r->dact[i];
    cap_linear_d_bias(t, E, r->d_act, r->g[P_B1]);
    cap_linear_d_weight(t, CAP_PATCH, E, r->patches, r->d_act, r->g[P_W1]);
    return COLO_OK;
}

/* ---- bridge ---- */

colo_status_t cap_bridge_forward(cap_rank_t *r)
{
    colo_tensor_t x = cap_x_view(r, r->enc), y = cap_y_view(r, r->y);
    return colo_bridge_forward(r->bridge, &x, &y, NULL);
}

colo_status_t cap_bridge_backward(const colo_tensor_t *d_out, int32_t nout,
                                  const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    return colo_bridge_backward(r->bridge, &d_out[0], &d_in[0], NULL);
}

/* ---- merge: image rows and embedded text at this rank's positions, + position table ---- */

void cap_merge_forward(cap_rank_t *r)
{
    int64_t D = r->cfg->model.width;

    for (int64_t i = 0; i < r->dst.b; i++) {
        int64_t own_row = 0; /* with SHARDED output, y has only this rank's rows, by position */
        for (int64_t j = 0; j < r->n; j++) {
            int64_t s = r->pos[j];
            float *h = r->h_in + (i * r->n + j) * D;
            const float *from = r->w[P_EMBED] + r->tokens[i * r->S + s] * D;

            if (s < CAP_PATCHES) {
                int64_t row = r->cfg->output == COLO_SHARDED ? own_row++ : s;
                from = r->y + (i * r->yn + row) * D;
            }
            for (int64_t e = 0; e < D; e++)
                h[e] = from[e] + r->w[P_POS][s * D + e];
        }
    }
}

colo_status_t cap_merge_backward(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    int64_t D = r->cfg->model.width;
    const float *d_h = d_out[0].data;
    float *d_y = d_in[0].data;

    if (d_y) /* FULL_SEQ: rows of other cp ranks get nothing from here */
        memset(d_y, 0, (size_t)(r->dst.b * r->yn * D) * sizeof *d_y);
    for (int64_t i = 0; i < r->dst.b; i++) {
        int64_t own_row = 0;
        for (int64_t j = 0; j < r->n; j++, d_h += D) {
            int64_t s = r->pos[j];

            for (int64_t e = 0; e < D; e++)
                r->g[P_POS][s * D + e] += d_h[e];
            if (s < CAP_PATCHES) {
                int64_t row = r->cfg->output == COLO_SHARDED ? own_row++ : s;
                if (d_y)
                    memcpy(d_y + (i * r->yn + row) * D, d_h, (size_t)D * sizeof *d_h);
            } else {
                float *d_embed = r->g[P_EMBED] + r->tokens[i * r->S + s] * D;
                for (int64_t e = 0; e < D; e++)
                    d_embed[e] += d_h[e];
            }
        }
    }
    return COLO_OK;
}

/* ---- head and loss; vocabulary over tp ---- */

static int64_t back_at(const cap_rank_t *r)
{
    return P_LAYER + r->cfg->model.layers * P_PER_LAYER;
}

void cap_head_logits(cap_rank_t *r, int64_t t, const float *x)
{
    int64_t D = r->cfg->model.width, at = back_at(r);

    cap_norm(t, D, x, r->w[at + B_LNFG], r->w[at + B_LNFB], r->xf_hat, r->rf, r->hf);
    cap_linear(t, D, r->count[at + B_HEAD] / D, r->hf, r->w[at + B_HEAD], NULL, r->logits);
}

colo_status_t cap_head_forward(cap_rank_t *r, const float *x)
{
    int64_t D = r->cfg->model.width, T = r->T, at = back_at(r);
    int64_t Vl = r->count[at + B_HEAD] / D;
    const int64_t shape[] = {T, Vl};
    colo_tensor_t logits = colo_tensor_host(r->logits, COLO_F32, 2, shape);
    colo_tensor_t targets = colo_tensor_host(r->targets, COLO_I64, 1, shape);
    colo_logprob_out_t out = {.logp = r->logp};

    cap_head_logits(r, T, x);
    CAP_TRY(colo_logprob_forward(&r->logprob, &logits, &targets, r->dst.tp_comm, &out, &r->saved,
                                 r->stats, r->scratch, NULL));
    for (int64_t i = 0; i < T; i++) {
        r->mask[i] = r->targets[i] != r->logprob.ignore_index;
        r->nll[i] = -r->logp[i];
    }
    CAP_TRY(colo_loss_reduce(r->nll, COLO_F32, r->mask, T, r->dst.mean_comm, &r->reduced, NULL));
    *r->loss = (float)r->reduced.value;
    return COLO_OK;
}

colo_status_t cap_head_backward(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                                int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    int64_t D = r->cfg->model.width, T = r->T, at = back_at(r);
    int64_t Vl = r->count[at + B_HEAD] / D;
    double upstream = (double)*(const float *)d_out[0].data;
    float each = r->reduced.den ? (float)(-upstream / (double)r->reduced.den) : 0.0f;
    colo_logprob_upstream_t up = {.d_logp = r->d_logp};
    colo_tensor_t d_logits = r->saved.logits; /* in place: the logits are not read again */

    for (int64_t i = 0; i < T; i++)
        r->d_logp[i] = r->mask[i] ? each : 0.0f;
    CAP_TRY(colo_logprob_backward(&r->saved, &up, &d_logits, NULL));
    cap_linear_d_weight(T, D, Vl, r->hf, r->logits, r->g[at + B_HEAD]);
    cap_linear_d_input(T, D, Vl, r->logits, r->w[at + B_HEAD], 0.0f, r->d_t1);
    CAP_TRY(cap_sum(r->dst.tp_comm, r->d_t1, T * D));
    cap_norm_backward(T, D, r->d_t1, r->w[at + B_LNFG], r->xf_hat, r->rf, NULL, d_in[0].data,
                      r->g[at + B_LNFG], r->g[at + B_LNFB]);
    return COLO_OK;
}
