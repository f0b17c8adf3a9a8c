/* SPDX-License-Identifier: Apache-2.0 */
/* ref_grid.c - see ref_grid.h. Ranks are sorted by coordinates, which are compared one by one. */
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

/* Dims by which ranks are sorted; those outside of groups first, the slowest of them before all. */
typedef struct order {
    const ref_grid *g;
    int dim[REF_DIMS], outside, all;
} order_t;

static int compare(const order_t *o, int dims, int64_t a, int64_t b)
{
    const int32_t *x = o->g->coord + a * o->g->ndims, *y = o->g->coord + b * o->g->ndims;
    for (int k = 0; k < dims; k++)
        if (x[o->dim[k]] != y[o->dim[k]])
            return x[o->dim[k]] < y[o->dim[k]] ? -1 : 1;
    return 0;
}

static int by_coordinates(const void *a, const void *b, void *order)
{
    return compare(order, ((order_t *)order)->all, *(const int64_t *)a, *(const int64_t *)b);
}

bool ref_groups_make(ref_groups *out, const ref_grid *g, const bool *in)
{
    int given[REF_DIMS], n = 0;
    for (int d = g->ndims - 1; d >= 0; d--)
        if (in[d])
            given[n++] = d;
    return ref_groups_make_as_given(out, g, given, n);
}

bool ref_groups_make_as_given(ref_groups *out, const ref_grid *g, const int *given, int n)
{
    order_t o = {.g = g};
    bool in[REF_DIMS] = {false};
    int64_t begin = 0;
    for (int k = 0; k < n; k++)
        in[given[k]] = true;
    for (int d = g->ndims - 1; d >= 0; d--)
        if (!in[d])
            o.dim[o.outside++] = d;
    memcpy(o.dim + o.outside, given, (size_t)n * sizeof *given);
    o.all = o.outside + n;
    memset(out, 0, sizeof *out);
    out->group = malloc((size_t)g->size * sizeof *out->group);
    out->index = malloc((size_t)g->size * sizeof *out->index);
    out->member = malloc((size_t)g->size * sizeof *out->member);
    if (!out->group || !out->index || !out->member) {
        ref_groups_free(out);
        return false;
    }
    for (int64_t r = 0; r < g->size; r++)
        out->member[r] = r;
    qsort_r(out->member, (size_t)g->size, sizeof *out->member, by_coordinates, &o);
    for (int64_t i = 0; i < g->size; i++) {
        const int64_t r = out->member[i];
        if (i == 0 || compare(&o, o.outside, out->member[i - 1], r) != 0) {
            begin = i;
            out->count++;
        }
        out->group[r] = out->count - 1;
        out->index[r] = i - begin;
        out->each = i - begin + 1;
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
