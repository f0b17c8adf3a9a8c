/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlap.c - strided views that share elements.
 *
 * A view overlaps itself if some difference of two indices, not all zero, moves by zero elements:
 * sum of d[a] * stride[a] = 0 with |d[a]| < extent[a]. Two views overlap if such a sum over the
 * axes of both is less than an element away from their distance. With the largest stride first,
 * what the smaller ones reach leaves few values for each d, mostly one, so the search is short.
 */
#include "core/overlap.h"

/* ---- the search ---- */

__extension__ typedef __int128 wide_t;

enum { STEPS = 1 << 14, AXES = 2 * COLO_MAX_NDIM };

typedef struct search {
    int32_t n; /* axes, strides descending */
    int64_t lo[AXES], hi[AXES], stride[AXES];
    wide_t down[AXES + 1], up[AXES + 1]; /* how far the axes from there on reach */
    int32_t steps;                       /* left */
} search_t;

static wide_t floor_div(wide_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Adds steps @lo .. @hi of @stride. */
static void add_axis(search_t *s, int64_t lo, int64_t hi, int64_t stride)
{
    int32_t index = s->n++;
    for (; index > 0 && s->stride[index - 1] < stride; index--) {
        s->lo[index] = s->lo[index - 1];
        s->hi[index] = s->hi[index - 1];
        s->stride[index] = s->stride[index - 1];
    }
    s->lo[index] = lo;
    s->hi[index] = hi;
    s->stride[index] = stride;
}

/* Can axes from @k on move by @from .. @to? @moved: some axis before them does; else by symmetry
 * the first that moves moves up. */
static bool can_move(search_t *s, int32_t k, wide_t from, wide_t to, bool moved)
{
    if (k == s->n)
        return moved && from <= 0 && to >= 0;
    const int64_t least = moved ? s->lo[k] : 0, most = s->hi[k], step = s->stride[k];
    wide_t lo = -floor_div(s->up[k + 1] - from, step), hi = floor_div(to - s->down[k + 1], step);
    lo = lo < least ? least : lo;
    hi = hi > most ? most : hi;
    for (wide_t d = lo; d <= hi; d++)
        if (--s->steps < 0 || can_move(s, k + 1, from - d * step, to - d * step, moved || d != 0))
            return true;
    return false;
}

/* Of all axes; @moved: also by none. */
static bool can_reach(search_t *s, wide_t from, wide_t to, bool moved)
{
    s->steps = STEPS;
    for (int32_t k = s->n - 1; k >= 0; k--) {
        s->down[k] = s->down[k + 1] + (wide_t)s->lo[k] * s->stride[k];
        s->up[k] = s->up[k + 1] + (wide_t)s->hi[k] * s->stride[k];
    }
    return can_move(s, 0, from, to, moved);
}

/* ---- a view and itself ---- */

bool colo_tensor_overlaps(const colo_tensor_t *t)
{
    search_t s = {.n = 0};
    if (colo_tensor_count(t) == 0)
        return false;
    for (int32_t a = 0; a < t->ndim; a++) {
        if (t->shape[a] == 1)
            continue;
        if (t->stride[a] == 0)
            return true;
        add_axis(&s, 1 - t->shape[a], t->shape[a] - 1, t->stride[a]);
    }
    return can_reach(&s, 0, 0, false);
}

/* ---- two views ---- */

/* Do the tensors share no address modulo @period bytes? Axes whose stride is a multiple of it stay
 * in place; what the others reach is one window a tensor, and the windows must not meet on the
 * circle. So left and right columns of the same rows are apart, and even and odd rows of one
 * buffer, however many: the search below would try each row of which strides differ. */
static bool windows_apart(const colo_tensor_t *in, const colo_tensor_t *out, uint64_t period)
{
    const colo_tensor_t *t[2] = {in, out};
    uint64_t width[2];
    for (int i = 0; i < 2; i++) {
        const uint64_t elem = colo_dtype_size(t[i]->dtype);
        width[i] = elem;
        for (int32_t a = 0; a < t[i]->ndim; a++) {
            const uint64_t step = (uint64_t)t[i]->stride[a] * elem;
            width[i] += step % period ? (uint64_t)(t[i]->shape[a] - 1) * step : 0;
        }
    }
    const uint64_t from = (uintptr_t)in->data % period, to = (uintptr_t)out->data % period;
    const uint64_t gap = (to + period - from) % period;
    return width[0] <= gap && width[1] <= period - gap;
}

static bool interleaved(const colo_tensor_t *in, const colo_tensor_t *out)
{
    const colo_tensor_t *t[2] = {in, out};
    for (int i = 0; i < 2; i++)
        for (int32_t a = 0; a < t[i]->ndim; a++)
            if (t[i]->shape[a] > 1 && t[i]->stride[a] > 0 &&
                windows_apart(in, out, (uint64_t)t[i]->stride[a] * colo_dtype_size(in->dtype)))
                return true;
    return false;
}

/* Adds the axes of @t, up, or down; those of one stride are one axis. */
static void add_axes(search_t *s, const colo_tensor_t *t, bool up)
{
    const int64_t elem = (int64_t)colo_dtype_size(t->dtype);
    for (int32_t a = 0; a < t->ndim; a++) {
        const int64_t lo = up ? 0 : 1 - t->shape[a], hi = up ? t->shape[a] - 1 : 0;
        int32_t k = 0;
        if (lo == hi || t->stride[a] == 0)
            continue;
        while (k < s->n && s->stride[k] != t->stride[a] * elem)
            k++;
        if (k == s->n)
            add_axis(s, lo, hi, t->stride[a] * elem);
        else {
            s->lo[k] += lo;
            s->hi[k] += hi;
        }
    }
}

static bool intersect(const colo_tensor_t *in, const colo_tensor_t *out)
{
    const wide_t distance = (wide_t)(uintptr_t)out->data - (wide_t)(uintptr_t)in->data;
    search_t s = {.n = 0};
    add_axes(&s, in, true);
    add_axes(&s, out, false);
    return can_reach(&s, distance + 1 - (wide_t)colo_dtype_size(in->dtype),
                     distance - 1 + (wide_t)colo_dtype_size(out->dtype), true);
}

bool colo_tensors_apart(const colo_tensor_t *in, const colo_tensor_t *out)
{
    if (colo_tensor_count(in) <= 0 || colo_tensor_count(out) <= 0)
        return true;
    const colo_tensor_t *t[2] = {in, out};
    uintptr_t lo[2], hi[2];
    for (int i = 0; i < 2; i++) {
        int64_t reach = 1;
        for (int32_t a = 0; a < t[i]->ndim; a++)
            reach += (t[i]->shape[a] - 1) * t[i]->stride[a];
        lo[i] = (uintptr_t)t[i]->data;
        hi[i] = lo[i] + (uintptr_t)reach * colo_dtype_size(t[i]->dtype);
    }
    return lo[0] >= hi[1] || lo[1] >= hi[0] || interleaved(in, out) || !intersect(in, out);
}
