/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops-host-merge.c - image rows and embedded bytes at a rank's positions, and back, on the host.
 */
#include <string.h>

#include "rank.h"

static void merge(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                  const float *y, const float *embed, const float *table, float *x)
{
    for (int64_t i = 0; i < s->b; i++)
        for (int64_t j = 0; j < s->n; j++, x += d) {
            int64_t p = s->pos[j];
            const float *from =
                s->row[j] >= 0 ? y + (i * yn + s->row[j]) * d : embed + s->tokens[i * s->S + p] * d;

            for (int64_t e = 0; e < d; e++)
                x[e] = from[e] + table[s->table_row[p] * d + e];
        }
}

static void merge_backward(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                           const float *d_x, float *d_y, float *d_embed, float *d_table)
{
    if (d_y)
        memset(d_y, 0, (size_t)(s->b * yn * d) * sizeof *d_y);
    for (int64_t i = 0; i < s->b; i++)
        for (int64_t j = 0; j < s->n; j++, d_x += d) {
            int64_t p = s->pos[j];

            for (int64_t e = 0; e < d; e++)
                d_table[s->table_row[p] * d + e] += d_x[e];
            if (s->row[j] >= 0) {
                if (d_y)
                    memcpy(d_y + (i * yn + s->row[j]) * d, d_x, (size_t)d * sizeof *d_x);
            } else {
                float *d_byte = d_embed + s->tokens[i * s->S + p] * d;
                for (int64_t e = 0; e < d; e++)
                    d_byte[e] += d_x[e];
            }
        }
}

void cap_ops_host_merge(cap_ops_t *o)
{
    o->merge = merge;
    o->merge_backward = merge_backward;
}
