/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer.c - one transformer layer under tensor parallelism, forward and backward.
 *
 * x, the norms and the biases added after a sum are whole on every tp rank; q, k, v and the MLP's
 * inside are split. So forward sums over tp twice (after Wo and Wd), and so does backward (what
 * enters the norms): between these sums nothing is communicated but attention's keys and values.
 */
#include "rank.h"

colo_status_t cap_layer_forward(cap_layer_t *l, const float *x)
{
    cap_rank_t *r = l->rank;
    const cap_ops_t *o = &r->ops;
    float **w = r->w + l->offset;
    int64_t T = r->T, D = r->cfg->model.width, Dl = D / r->dst.tp;
    int64_t Fl = r->count[l->offset + L_BU];

    o->norm(o, T, D, x, w[L_LN1G], w[L_LN1B], l->x1_hat, l->r1, l->a);
    o->linear(o, T, D, Dl, l->a, w[L_WQ], w[L_BQ], l->q);
    o->linear(o, T, D, Dl, l->a, w[L_WK], w[L_BK], l->kv);
    o->linear(o, T, D, Dl, l->a, w[L_WV], w[L_BV], l->kv + cap_kv_rows(r) * Dl);
    CAP_TRY(cap_attention(l));
    o->linear(o, T, Dl, D, l->o, w[L_WO], NULL, l->mid);
    CAP_TRY(cap_sum(r->dst.tp_comm, l->mid, T * D, o->stream));
    o->add_rows(o, T, D, x, w[L_BO], l->mid);

    o->norm(o, T, D, l->mid, w[L_LN2G], w[L_LN2B], l->x2_hat, l->r2, l->m);
    o->linear(o, T, D, Fl, l->m, w[L_WU], w[L_BU], l->act);
    o->gelu(o, T * Fl, l->act, l->act, l->dact);
    o->linear(o, T, Fl, D, l->act, w[L_WD], NULL, l->out);
    CAP_TRY(cap_sum(r->dst.tp_comm, l->out, T * D, o->stream));
    o->add_rows(o, T, D, l->mid, w[L_BD], l->out);
    return COLO_OK;
}

colo_status_t cap_layer_backward(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *layer)
{
    cap_layer_t *l = layer;
    cap_rank_t *r = l->rank;
    const cap_ops_t *o = &r->ops;
    float **w = r->w + l->offset, **g = r->g + l->offset, *d_mid = r->d_t2;
    const float *dy = d_out[0].data;
    int64_t T = r->T, D = r->cfg->model.width, Dl = D / r->dst.tp;
    int64_t Fl = r->count[l->offset + L_BU];

    o->linear_d_bias(o, T, D, dy, g[L_BD]);
    o->linear_d_weight(o, T, Fl, D, l->act, dy, g[L_WD]);
    o->linear_d_input(o, T, Fl, D, dy, w[L_WD], 0.0f, r->d_f);
    o->scale(o, T * Fl, l->dact, r->d_f);
    o->linear_d_bias(o, T, Fl, r->d_f, g[L_BU]);
    o->linear_d_weight(o, T, D, Fl, l->m, r->d_f, g[L_WU]);
    o->linear_d_input(o, T, D, Fl, r->d_f, w[L_WU], 0.0f, r->d_t1);
    CAP_TRY(cap_sum(r->dst.tp_comm, r->d_t1, T * D, o->stream));
    o->norm_backward(o, T, D, r->d_t1, w[L_LN2G], l->x2_hat, l->r2, dy, d_mid, g[L_LN2G],
                     g[L_LN2B]);

    o->linear_d_bias(o, T, D, d_mid, g[L_BO]);
    o->linear_d_weight(o, T, Dl, D, l->o, d_mid, g[L_WO]);
    o->linear_d_input(o, T, Dl, D, d_mid, w[L_WO], 0.0f, r->d_f); /* d_o */
    CAP_TRY(cap_attention_backward(l, r->d_f));
    const float *d_part[] = {r->d_q, r->d_kv, r->d_kv + cap_kv_rows(r) * Dl};
    static const int weight[] = {L_WQ, L_WK, L_WV};
    for (int k = 0; k < 3; k++) {
        o->linear_d_bias(o, T, Dl, d_part[k], g[weight[k] + 1]);
        o->linear_d_weight(o, T, D, Dl, l->a, d_part[k], g[weight[k]]);
        o->linear_d_input(o, T, D, Dl, d_part[k], w[weight[k]], k ? 1.0f : 0.0f, r->d_t1);
    }
    CAP_TRY(cap_sum(r->dst.tp_comm, r->d_t1, T * D, o->stream));
    o->norm_backward(o, T, D, r->d_t1, w[L_LN1G], l->x1_hat, l->r1, d_mid, d_in[0].data, g[L_LN1G],
                     g[L_LN1B]);
    return COLO_OK;
}
