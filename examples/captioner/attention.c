/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention.c - causal attention of a rank's heads over a sequence that context parallelism
 * spreads.
 *
 * Decides: keys and values of all positions are gathered over cp (each rank then sees the whole
 * prefix of its own queries), and their gradients go back by a reduce-scatter, its exact adjoint.
 * Causality goes by *global* position: keys are copied into position order once per sample and
 * head, so that a query at position p reads keys 0..p and needs no mask. Heads are split over tp
 * and never meet here.
 */
#include <math.h>
#include <string.h>

#include "rank.h"

static int64_t head_width(const cap_rank_t *r)
{
    return r->cfg->model.width / r->cfg->model.heads;
}

static int64_t local_heads(const cap_rank_t *r)
{
    return r->cfg->model.heads / r->dst.tp;
}

/* K and V by position, and both transposed, for one sample and head; gradients in the same way. */
struct tile {
    float *k, *kt, *vt, *v, *dkt, *dvt, *row, *d_row;
};

int64_t cap_attention_tile(const cap_rank_t *r)
{
    return 6 * r->S * head_width(r) + 2 * r->S;
}

static struct tile tile_at(const cap_rank_t *r)
{
    int64_t size = r->S * head_width(r);
    float *p = r->tile;

    return (struct tile){p,
                         p + size,
                         p + 2 * size,
                         p + 3 * size,
                         p + 4 * size,
                         p + 5 * size,
                         p + 6 * size,
                         p + 6 * size + r->S};
}

/* Where position s of sample i, head h lies in a [cp, 2, T, Dl] buffer: keys; values: + T Dl. */
static int64_t kv_index(const cap_rank_t *r, int64_t i, int64_t h, int64_t s)
{
    int64_t dl = local_heads(r) * head_width(r);
    return r->part_of[s] * 2 * r->T * dl + (i * r->n + r->local_of[s]) * dl + h * head_width(r);
}

static void load_tile(const cap_rank_t *r, struct tile *t, const float *kv_all, int64_t i,
                      int64_t h)
{
    int64_t hd = head_width(r), values = r->T * local_heads(r) * hd, S = r->S;

    for (int64_t s = 0; s < S; s++) {
        const float *k = kv_all + kv_index(r, i, h, s), *v = k + values;
        for (int64_t e = 0; e < hd; e++) {
            t->k[s * hd + e] = t->kt[e * S + s] = k[e];
            t->v[s * hd + e] = t->vt[e * S + s] = v[e];
        }
    }
}

static void attend(const cap_rank_t *r, const struct tile *t, int64_t p, const float *q,
                   float *prob, float *o)
{
    int64_t hd = head_width(r), S = r->S;
    float scale = 1.0f / sqrtf((float)hd), max = -INFINITY, sum = 0, out[64] = {0};

    memset(prob, 0, (size_t)S * sizeof *prob);
    for (int64_t e = 0; e < hd; e++)
        for (int64_t s = 0; s <= p; s++)
            prob[s] += q[e] * t->kt[e * S + s];
    for (int64_t s = 0; s <= p; s++)
        max = prob[s] > max ? prob[s] : max;
    for (int64_t s = 0; s <= p; s++)
        sum += prob[s] = expf((prob[s] - max) * scale);
    for (int64_t s = 0; s <= p; s++) {
        prob[s] /= sum;
        for (int64_t e = 0; e < hd; e++)
            out[e] += prob[s] * t->v[s * hd + e];
    }
    memcpy(o, out, (size_t)hd * sizeof *o);
}

colo_status_t cap_attention(cap_layer_t *l)
{
    const cap_rank_t *r = l->rank;
    int64_t hd = head_width(r), heads = local_heads(r), dl = heads * hd;
    struct tile t = tile_at(r);

    if (r->dst.cp > 1)
        CAP_TRY(
            colo_comm_all_gather(r->dst.cp_comm, l->kv, l->kv_all, 2 * r->T * dl, COLO_F32, NULL));
    for (int64_t i = 0; i < r->dst.b; i++)
        for (int64_t h = 0; h < heads; h++) {
            load_tile(r, &t, l->kv_all, i, h);
            for (int64_t j = 0; j < r->n; j++)
                attend(r, &t, r->pos[j], l->q + (i * r->n + j) * dl + h * hd,
                       l->prob + ((i * heads + h) * r->n + j) * r->S,
                       l->o + (i * r->n + j) * dl + h * hd);
        }
    return COLO_OK;
}

/* One query's part: d_q, and what it adds to the gradients of the keys and values it saw. */
static void attend_backward(const cap_rank_t *r, const struct tile *t, int64_t p, const float *q,
                            const float *prob, const float *d_o, float *d_q)
{
    int64_t hd = head_width(r), S = r->S;
    float scale = 1.0f / sqrtf((float)hd), out[64] = {0};
    double dot = 0, sum = 0;

    memset(t->row, 0, (size_t)S * sizeof *t->row);
    for (int64_t e = 0; e < hd; e++)
        for (int64_t s = 0; s <= p; s++) {
            t->row[s] += d_o[e] * t->vt[e * S + s];
            t->dvt[e * S + s] += d_o[e] * prob[s];
        }
    /* fp64, and divided by the sum that is not quite 1: the scores' gradients must add up to 0, and
     * the key bias's gradient is nothing but their sum over all queries */
    for (int64_t s = 0; s <= p; s++) {
        dot += (double)prob[s] * (double)t->row[s];
        sum += (double)prob[s];
    }
    dot /= sum;
    for (int64_t s = 0; s <= p; s++)
        t->d_row[s] = prob[s] * (float)((double)t->row[s] - dot) * scale;
    for (int64_t s = 0; s <= p; s++)
        for (int64_t e = 0; e < hd; e++)
            out[e] += t->d_row[s] * t->k[s * hd + e];
    for (int64_t e = 0; e < hd; e++)
        for (int64_t s = 0; s <= p; s++)
            t->dkt[e * S + s] += t->d_row[s] * q[e];
    memcpy(d_q, out, (size_t)hd * sizeof *d_q);
}

colo_status_t cap_attention_backward(cap_layer_t *l, const float *d_o)
{
    const cap_rank_t *r = l->rank;
    int64_t hd = head_width(r), heads = local_heads(r), dl = heads * hd, S = r->S;
    int64_t values = r->T * dl;
    struct tile t = tile_at(r);

    for (int64_t i = 0; i < r->dst.b; i++)
        for (int64_t h = 0; h < heads; h++) {
            load_tile(r, &t, l->kv_all, i, h);
            memset(t.dkt, 0, (size_t)(2 * S * hd) * sizeof(float));
            for (int64_t j = 0; j < r->n; j++) {
                int64_t at = (i * r->n + j) * dl + h * hd;
                attend_backward(r, &t, r->pos[j], l->q + at,
                                l->prob + ((i * heads + h) * r->n + j) * S, d_o + at, r->d_q + at);
            }
            for (int64_t s = 0; s < S; s++) {
                float *dk = r->d_kv_all + kv_index(r, i, h, s), *dv = dk + values;
                for (int64_t e = 0; e < hd; e++) {
                    dk[e] = t.dkt[e * S + s];
                    dv[e] = t.dvt[e * S + s];
                }
            }
        }
    if (r->dst.cp > 1)
        CAP_TRY(colo_comm_reduce_scatter(r->dst.cp_comm, r->d_kv_all, r->d_kv, 2 * values, COLO_F32,
                                         COLO_SUM, NULL));
    return COLO_OK;
}
