/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_grid.c - see ref_grid.h. Buckets are found through a hash table whose keys are whole
 * coordinate tuples, compared digit by digit: the hash only makes it fast.
 */
#include "ref/ref_grid.h"

#include <stdlib.h>
#include <string.h>

bool ref_grid_make(ref_grid *g, int ndims, const int64_t *extent)
{
    int32_t now[REF_DIMS] = {0};
    memset(g, 0, sizeof *g);
    g->ndims = ndims;
    g->size = 1;
    for (int d = 0; d < ndims; d++) {
        g->extent[d] = extent[d];
        g->size *= extent[d];
    }
    g->coord = malloc((size_t)g->size * (size_t)ndims * sizeof *g->coord);
    if (!g->coord)
        return false;
    for (int64_t r = 0; r < g->size; r++) {
        memcpy(g->coord + r * ndims, now, (size_t)ndims * sizeof now[0]);
        for (int d = 0; d < ndims; d++) { /* the first dim counts up, the next when it is full */
            if (++now[d] < extent[d])
                break;
            now[d] = 0;
        }
    }
    return true;
}

void ref_grid_free(ref_grid *g)
{
    free(g->coord);
    g->coord = NULL;
}

static bool same_outside(const ref_grid *g, const bool *in, int64_t a, int64_t b)
{
    for (int d = 0; d < g->ndims; d++)
        if (!in[d] && g->coord[a * g->ndims + d] != g->coord[b * g->ndims + d])
            return false;
    return true;
}

static uint64_t hash_outside(const ref_grid *g, const bool *in, int64_t r)
{
    uint64_t h = 88172645463325252u;
    for (int d = 0; d < g->ndims; d++)
        if (!in[d])
            h = (h ^ (uint64_t)g->coord[r * g->ndims + d]) * 0xff51afd7ed558ccdu + (h >> 29);
    return h ^ (h >> 32);
}

bool ref_groups_make(ref_groups *out, const ref_grid *g, const bool *in)
{
    uint64_t buckets = 4;
    while (buckets < 2 * (uint64_t)g->size)
        buckets *= 2;
    memset(out, 0, sizeof *out);
    int64_t *bucket = malloc(buckets * sizeof *bucket);    /* a bucket's first rank, or -1 */
    int64_t *fill = calloc((size_t)g->size, sizeof *fill); /* members so far, by group */
    out->group = malloc((size_t)g->size * sizeof *out->group);
    out->index = malloc((size_t)g->size * sizeof *out->index);
    out->member = malloc((size_t)g->size * sizeof *out->member);
    bool ok = bucket && fill && out->group && out->index && out->member;
    if (ok) {
        for (uint64_t s = 0; s < buckets; s++)
            bucket[s] = -1;
        for (int64_t r = 0; r < g->size; r++) {
            uint64_t s = hash_outside(g, in, r) & (buckets - 1);
            while (bucket[s] >= 0 && !same_outside(g, in, bucket[s], r))
                s = (s + 1) & (buckets - 1);
            if (bucket[s] < 0) {
                bucket[s] = r;
                out->group[r] = out->count++;
            } else {
                out->group[r] = out->group[bucket[s]];
            }
            out->index[r] = fill[out->group[r]]++;
        }
        out->each = fill[0];
        for (int64_t r = 0; r < g->size; r++)
            out->member[out->group[r] * out->each + out->index[r]] = r;
    }
    free(bucket);
    free(fill);
    if (!ok)
        ref_groups_free(out);
    return ok;
}

static bool before(const ref_grid *g, const int *given, int n, int64_t a, int64_t b)
{
    for (int k = 0; k < n; k++) {
        int32_t x = g->coord[a * g->ndims + given[k]], y = g->coord[b * g->ndims + given[k]];
        if (x != y)
            return x < y;
    }
    return false;
}

bool ref_groups_make_as_given(ref_groups *out, const ref_grid *g, const int *given, int n)
{
    bool in[REF_DIMS] = {false};
    for (int k = 0; k < n; k++)
        in[given[k]] = true;
    if (!ref_groups_make(out, g, in))
        return false;
    for (int64_t q = 0; q < out->count; q++) {
        int64_t *m = out->member + q * out->each;
        for (int64_t i = 1; i < out->each; i++) { /* insertion sort: groups here are small */
            int64_t r = m[i], j = i;
            for (; j > 0 && before(g, given, n, r, m[j - 1]); j--)
                m[j] = m[j - 1];
            m[j] = r;
        }
        for (int64_t i = 0; i < out->each; i++)
            out->index[m[i]] = i;
    }
    return true;
}

void ref_groups_free(ref_groups *out)
{
    free(out->group);
    free(out->index);
    free(out->member);
    memset(out, 0, sizeof *out);
}
