/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention.cu - causal attention of own queries over all positions: a thread a query, and for the
 * gradients of keys and values a thread an element, which adds its queries in their order.
 */
#include "kernels.h"

enum { THREADS = 128, FEATURES = 64 /* of a head, at most */ };

/* Where position p of sample i, head h lies in a [cp, 2, T, h e] buffer: keys; values: + T h e. */
static __device__ int64_t kv_index(const cap_sequence_t &s, int64_t i, int64_t h, int64_t p)
{
    int64_t dl = s.h * s.e;
    return s.part_of[p] * 2 * s.b * s.block * dl + (i * s.block + s.local_of[p]) * dl + h * s.e;
}

struct query {
    int64_t i, h, j;     /* sample, head, local position */
    int64_t offset;      /* of its features in q, out */
    int64_t first, last; /* the positions it sees; prob has them from first on */
};

static __device__ query my_query(const cap_sequence_t &s, int64_t k)
{
    query c = {k / s.n / s.h, k / s.n % s.h, k % s.n, 0, 0, 0};
    c.offset = (c.i * s.n + c.j) * s.h * s.e + c.h * s.e;
    c.last = s.pos[c.j];
    c.first = s.first[c.last];
    return c;
}

static __global__ void attend(cap_sequence_t s, const float *q, const float *kv, float *prob,
                              float *out)
{
    int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x, values = s.b * s.block * s.h * s.e;
    float scale = 1.0f / sqrtf((float)s.e), max = -INFINITY, sum = 0, o[FEATURES] = {0};

    if (k >= s.b * s.h * s.n)
        return;
    query c = my_query(s, k);
    prob += k * s.window;
    for (int64_t p = c.first; p <= c.last; p++) {
        const float *key = kv + kv_index(s, c.i, c.h, p);
        float dot = 0;
        for (int64_t e = 0; e < s.e; e++)
            dot += q[c.offset + e] * key[e];
        prob[p - c.first] = dot;
        max = dot > max ? dot : max;
    }
    for (int64_t w = 0; w <= c.last - c.first; w++)
        sum += prob[w] = expf((prob[w] - max) * scale);
    for (int64_t w = 0; w < s.window; w++) {
        prob[w] = w <= c.last - c.first ? prob[w] / sum : 0.0f;
        if (w > c.last - c.first)
            continue;
        const float *value = kv + kv_index(s, c.i, c.h, c.first + w) + values;
        for (int64_t e = 0; e < s.e; e++)
            o[e] += prob[w] * value[e];
    }
    for (int64_t e = 0; e < s.e; e++)
        out[c.offset + e] = o[e];
}

/* d_q, and the scores' gradients into @d_score. In fp64 and divided by the sum that is not quite 1,
 * for the reason that ops-host-attention.c gives. */
static __global__ void queries(cap_sequence_t s, const float *kv, const float *prob,
                               const float *d_out, float *d_q, float *d_score)
{
    int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x, values = s.b * s.block * s.h * s.e;
    float scale = 1.0f / sqrtf((float)s.e), g[FEATURES] = {0};
    double dot = 0, sum = 0;

    if (k >= s.b * s.h * s.n)
        return;
    query c = my_query(s, k);
    prob += k * s.window, d_score += k * s.window;
    for (int64_t w = 0; w <= c.last - c.first; w++) {
        const float *value = kv + kv_index(s, c.i, c.h, c.first + w) + values;
        float row = 0;
        for (int64_t e = 0; e < s.e; e++)
            row += d_out[c.offset + e] * value[e];
        d_score[w] = row;
        dot += (double)prob[w] * (double)row;
        sum += (double)prob[w];
    }
    dot /= sum;
    for (int64_t w = 0; w <= c.last - c.first; w++) {
        const float *key = kv + kv_index(s, c.i, c.h, c.first + w);
        d_score[w] = prob[w] * (float)((double)d_score[w] - dot) * scale;
        for (int64_t e = 0; e < s.e; e++)
            g[e] += d_score[w] * key[e];
    }
    for (int64_t e = 0; e < s.e; e++)
        d_q[c.offset + e] = g[e];
}

static __global__ void keys_and_values(cap_sequence_t s, const float *q, const float *prob,
                                       const float *d_out, const float *d_score, float *d_kv)
{
    int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x, values = s.b * s.block * s.h * s.e;
    int64_t e = k % s.e, h = k / s.e % s.h, p = k / s.e / s.h % s.S, i = k / s.e / s.h / s.S;
    double dk = 0, dv = 0;

    if (i >= s.b)
        return;
    for (int64_t j = 0; j < s.n; j++) {
        int64_t offset = (i * s.n + j) * s.h * s.e + h * s.e + e, last = s.pos[j];
        int64_t w = p - s.first[last], pair = ((i * s.h + h) * s.n + j) * s.window + w;
        if (w < 0 || p > last)
            continue;
        dk += (double)d_score[pair] * (double)q[offset];
        dv += (double)prob[pair] * (double)d_out[offset];
    }
    float *to = d_kv + kv_index(s, i, h, p) + e;
    to[0] = (float)dk;
    to[values] = (float)dv;
}

static unsigned blocks(int64_t count)
{
    return (unsigned)((count + THREADS - 1) / THREADS);
}

cudaError_t cap_k_attend(const cap_sequence_t *s, const float *q, const float *kv, float *prob,
                         float *out, cudaStream_t stream)
{
    int64_t count = s->b * s->h * s->n;
    if (!count)
        return cudaSuccess;
    if (s->e > FEATURES)
        return cudaErrorInvalidValue;
    attend<<<blocks(count), THREADS, 0, stream>>>(*s, q, kv, prob, out);
    return cudaGetLastError();
}

cudaError_t cap_k_attend_backward(const cap_sequence_t *s, const float *q, const float *kv,
                                  const float *prob, const float *d_out, float *d_q, float *d_kv,
                                  float *work, cudaStream_t stream)
{
    int64_t count = s->b * s->h * s->n, keys = s->b * s->S * s->h * s->e;
    if (s->e > FEATURES)
        return cudaErrorInvalidValue;
    if (count)
        queries<<<blocks(count), THREADS, 0, stream>>>(*s, kv, prob, d_out, d_q, work);
    if (keys) /* 0 from a rank without queries */
        keys_and_values<<<blocks(keys), THREADS, 0, stream>>>(*s, q, prob, d_out, work, d_kv);
    return cudaGetLastError();
}
