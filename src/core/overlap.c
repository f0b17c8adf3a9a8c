/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlap.c - strided views that share elements.
 *
 * A view overlaps itself if some difference of two indices, not all zero, moves by zero elements:
 * sum of d[a] * stride[a] = 0 with |d[a]| < extent[a]. With the largest stride first, what the
 * smaller ones reach leaves few values for each d, mostly one, so the search is short.
 */
#include "core/overlap.h"

/* ---- a view and itself ---- */

__extension__ typedef __int128 wide_t;

enum { STEPS = 1 << 14 };

typedef struct search {
    int32_t n; /* axes, strides descending */
    int64_t extent[COLO_MAX_NDIM], stride[COLO_MAX_NDIM];
    wide_t reach[COLO_MAX_NDIM + 1]; /* of the axes from there on */
    int32_t steps;                   /* left */
} search_t;

static wide_t floor_div(wide_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Can axes from @k on move by @target? @moved: some axis before them does; else by symmetry the
 * first that moves moves up. */
static bool can_move(search_t *s, int32_t k, wide_t target, bool moved)
{
    if (k == s->n)
        return moved && target == 0;
    const int64_t most = s->extent[k] - 1, step = s->stride[k];
    wide_t lo = -floor_div(s->reach[k + 1] - target, step);
    wide_t hi = floor_div(target + s->reach[k + 1], step);
    const int64_t least = moved ? -most : 0;
    lo = lo < least ? least : lo;
    hi = hi > most ? most : hi;
    for (wide_t d = lo; d <= hi; d++)
        if (--s->steps < 0 || can_move(s, k + 1, target - d * step, moved || d != 0))
            return true;
    return false;
}

bool colo_tensor_overlaps(const colo_tensor_t *t)
{
    search_t s = {.steps = STEPS};
    if (colo_tensor_count(t) == 0)
        return false;
    for (int32_t a = 0; a < t->ndim; a++) {
        if (t->shape[a] == 1)
            continue;
        if (t->stride[a] == 0)
            return true;
        int32_t index = s.n++;
        for (; index > 0 && s.stride[index - 1] < t->stride[a]; index--) {
            s.extent[index] = s.extent[index - 1];
            s.stride[index] = s.stride[index - 1];
        }
        s.extent[index] = t->shape[a];
        s.stride[index] = t->stride[a];
    }
    for (int32_t k = s.n - 1; k >= 0; k--)
        s.reach[k] = s.reach[k + 1] + (wide_t)(s.extent[k] - 1) * s.stride[k];
    return can_move(&s, 0, 0, false);
}

/* ---- two views ---- */

/* Do the tensors share no address modulo @period bytes? Axes whose stride is a multiple of it stay
 * in place; what the others reach is one window a tensor, and the windows must not meet on the
 * circle. So left and right columns of the same rows are apart, and even and odd rows of one
 * buffer. */
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
    return lo[0] >= hi[1] || lo[1] >= hi[0] || interleaved(in, out);
}
