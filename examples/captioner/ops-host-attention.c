/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops-host-attention.c - causal attention of a rank's queries over all positions, on the host.
 *
 * Causality goes by *global* position: keys are copied into position order once per sample and
 * head, so that a query at position p reads keys first[p]..p and needs no mask. Where samples share
 * an axis of positions, first[p] is where the sample of p begins.
 */
#include <math.h>
#include <string.h>

#include "rank.h"

/* K and V by position, and both transposed, for one sample and head; gradients in the same way. */
struct tile {
    float *k, *kt, *vt, *v, *dkt, *dvt, *row, *d_row;
};

static int64_t attend_work(const cap_sequence_t *s)
{
    return 6 * s->S * s->e + 2 * s->S;
}

static struct tile tile_at(const cap_sequence_t *s, float *p)
{
    int64_t size = s->S * s->e;

    return (struct tile){p,
                         p + size,
                         p + 2 * size,
                         p + 3 * size,
                         p + 4 * size,
                         p + 5 * size,
                         p + 6 * size,
                         p + 6 * size + s->S};
}

/* The tile as a query sees it whose first position is @s. */
static struct tile tile_from(const struct tile *t, int64_t s, int64_t hd)
{
    struct tile from = *t;

    from.k += s * hd, from.kt += s, from.vt += s, from.v += s * hd;
    from.dkt += s, from.dvt += s;
    return from;
}

/* Where position s of sample i, head h lies in kv: keys; values are b block Dl further. */
static int64_t kv_index(const cap_sequence_t *s, int64_t i, int64_t h, int64_t p)
{
    int64_t dl = s->h * s->e, b = s->block;
    return s->part_of[p] * 2 * s->b * b * dl + (i * b + s->local_of[p]) * dl + h * s->e;
}

static void load_tile(const cap_sequence_t *s, struct tile *t, const float *kv, int64_t i,
                      int64_t h)
{
    int64_t hd = s->e, values = s->b * s->block * s->h * hd, S = s->S;

    for (int64_t p = 0; p < S; p++) {
        const float *k = kv + kv_index(s, i, h, p), *v = k + values;
        for (int64_t e = 0; e < hd; e++) {
            t->k[p * hd + e] = t->kt[e * S + p] = k[e];
            t->v[p * hd + e] = t->vt[e * S + p] = v[e];
        }
    }
}

static void one_query(const struct tile *t, int64_t S, int64_t hd, int64_t p, const float *q,
                      float *prob, float *o)
{
    float scale = 1.0f / sqrtf((float)hd), max = -INFINITY, sum = 0, out[64] = {0};

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

static void attend(const cap_ops_t *o, const cap_sequence_t *s, const float *q, const float *kv,
                   float *prob, float *out, float *work)
{
    struct tile t = tile_at(s, work);
    int64_t dl = s->h * s->e;

    for (int64_t i = 0; i < s->b; i++)
        for (int64_t h = 0; h < s->h; h++) {
            load_tile(s, &t, kv, i, h);
            for (int64_t j = 0; j < s->n; j++) {
                int64_t offset = (i * s->n + j) * dl + h * s->e, p = s->pos[j], first = s->first[p];
                float *w = prob + ((i * s->h + h) * s->n + j) * s->window;
                struct tile seen = tile_from(&t, first, s->e);

                memset(w, 0, (size_t)s->window * sizeof *w);
                one_query(&seen, s->S, s->e, p - first, q + offset, w, out + offset);
            }
        }
}

/* One query's part: d_q, and what it adds to the gradients of the keys and values it saw. */
static void one_query_backward(const struct tile *t, int64_t S, int64_t hd, int64_t p,
                               const float *q, const float *prob, const float *d_o, float *d_q)
{
    float scale = 1.0f / sqrtf((float)hd), out[64] = {0};
    double dot = 0, sum = 0;

    memset(t->row, 0, (size_t)(p + 1) * sizeof *t->row);
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

static void attend_backward(const cap_ops_t *o, const cap_sequence_t *s, const float *q,
                            const float *kv, const float *prob, const float *d_out, float *d_q,
                            float *d_kv, float *work)
{
    struct tile t = tile_at(s, work);
    int64_t hd = s->e, dl = s->h * hd, S = s->S, values = s->b * s->block * dl;

    for (int64_t i = 0; i < s->b; i++)
        for (int64_t h = 0; h < s->h; h++) {
            load_tile(s, &t, kv, i, h);
            memset(t.dkt, 0, (size_t)(2 * S * hd) * sizeof(float));
            for (int64_t j = 0; j < s->n; j++) {
                int64_t offset = (i * s->n + j) * dl + h * hd, p = s->pos[j], first = s->first[p];
                struct tile seen = tile_from(&t, first, hd);

                one_query_backward(&seen, S, hd, p - first, q + offset,
                                   prob + ((i * s->h + h) * s->n + j) * s->window, d_out + offset,
                                   d_q + offset);
            }
            for (int64_t p = 0; p < S; p++) {
                float *dk = d_kv + kv_index(s, i, h, p), *dv = dk + values;
                for (int64_t e = 0; e < hd; e++) {
                    dk[e] = t.dkt[e * S + p];
                    dv[e] = t.dvt[e * S + p];
                }
            }
        }
}

void cap_ops_host_attention(cap_ops_t *o)
{
    o->attend_work = attend_work;
    o->attend = attend;
    o->attend_backward = attend_backward;
}
