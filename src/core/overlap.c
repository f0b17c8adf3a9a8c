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

enum { MOVES = 1 << 14, AXES = 2 * COLO_NDIM_MAX };

typedef struct search {
    int32_t n; /* axes, strides descending */
    int64_t lo[AXES], hi[AXES], stride[AXES];
    wide_t down[AXES + 1], up[AXES + 1]; /* how far the axes from there on reach */
    int32_t moves_left;
} search_t;

static wide_t floor_div(wide_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Adds multiples @lo .. @hi of @stride. */
static void add_axis(search_t *search, int64_t lo, int64_t hi, int64_t stride)
{
    int32_t index = search->n++;
    for (; index > 0 && search->stride[index - 1] < stride; index--) {
        search->lo[index] = search->lo[index - 1];
        search->hi[index] = search->hi[index - 1];
        search->stride[index] = search->stride[index - 1];
    }
    search->lo[index] = lo;
    search->hi[index] = hi;
    search->stride[index] = stride;
}

/* Can axes from @k on move by @from .. @to? @moved: some axis before them does; else by symmetry
 * the first that moves moves up. */
static bool can_move(search_t *search, int32_t k, wide_t from, wide_t to, bool moved)
{
    if (k == search->n)
        return moved && from <= 0 && to >= 0;
    const int64_t least = moved ? search->lo[k] : 0, most = search->hi[k],
                  stride = search->stride[k];
    wide_t lo = -floor_div(search->up[k + 1] - from, stride),
           hi = floor_div(to - search->down[k + 1], stride);
    lo = lo < least ? least : lo;
    hi = hi > most ? most : hi;
    for (wide_t times = lo; times <= hi; times++)
        if (--search->moves_left < 0 || can_move(search, k + 1, from - times * stride,
                                                 to - times * stride, moved || times != 0))
            return true;
    return false;
}

/* Can a move along all axes end in @from .. @to? @moved: no move at all counts, too. */
static bool can_reach(search_t *search, wide_t from, wide_t to, bool moved)
{
    search->moves_left = MOVES;
    for (int32_t k = search->n - 1; k >= 0; k--) {
        search->down[k] = search->down[k + 1] + (wide_t)search->lo[k] * search->stride[k];
        search->up[k] = search->up[k + 1] + (wide_t)search->hi[k] * search->stride[k];
    }
    return can_move(search, 0, from, to, moved);
}

/* ---- a view and itself ---- */

bool colo_tensor_overlaps(const colo_tensor_t *tensor)
{
    search_t search = {.n = 0};
    if (colo_tensor_count(tensor) == 0)
        return false;
    for (int32_t axis = 0; axis < tensor->ndim; axis++) {
        if (tensor->shape[axis] == 1)
            continue;
        if (tensor->stride[axis] == 0)
            return true;
        add_axis(&search, 1 - tensor->shape[axis], tensor->shape[axis] - 1, tensor->stride[axis]);
    }
    return can_reach(&search, 0, 0, false);
}

/* ---- two views ---- */

/* Do the tensors share no address modulo @period bytes? Axes whose stride is a multiple of it stay
 * in place; what the others reach is one window a tensor, and the windows must not meet on the
 * circle. So left and right columns of the same rows are apart, and even and odd rows of one
 * buffer, however many: the search below would try each row of which strides differ. */
static bool windows_apart(const colo_tensor_t *in, const colo_tensor_t *out, uint64_t period)
{
    const colo_tensor_t *view[2] = {in, out};
    uint64_t width[2];
    for (int i = 0; i < 2; i++) {
        const uint64_t elem = colo_dtype_size(view[i]->dtype);
        width[i] = elem;
        for (int32_t axis = 0; axis < view[i]->ndim; axis++) {
            const uint64_t stride = (uint64_t)view[i]->stride[axis] * elem;
            width[i] += stride % period ? (uint64_t)(view[i]->shape[axis] - 1) * stride : 0;
        }
    }
    const uint64_t from = (uintptr_t)in->data % period, to = (uintptr_t)out->data % period;
    const uint64_t gap = (to + period - from) % period;
    return width[0] <= gap && width[1] <= period - gap;
}

static bool interleaved(const colo_tensor_t *in, const colo_tensor_t *out)
{
    const colo_tensor_t *view[2] = {in, out};
    for (int i = 0; i < 2; i++)
        for (int32_t axis = 0; axis < view[i]->ndim; axis++)
            if (view[i]->shape[axis] > 1 && view[i]->stride[axis] > 0 &&
                windows_apart(in, out,
                              (uint64_t)view[i]->stride[axis] * colo_dtype_size(in->dtype)))
                return true;
    return false;
}

/* Adds the axes of @tensor, up, or down; those of one stride are one axis. */
static void add_axes(search_t *search, const colo_tensor_t *tensor, bool up)
{
    const int64_t elem = (int64_t)colo_dtype_size(tensor->dtype);
    for (int32_t axis = 0; axis < tensor->ndim; axis++) {
        const int64_t lo = up ? 0 : 1 - tensor->shape[axis], hi = up ? tensor->shape[axis] - 1 : 0;
        int32_t k = 0;
        if (lo == hi || tensor->stride[axis] == 0)
            continue;
        while (k < search->n && search->stride[k] != tensor->stride[axis] * elem)
            k++;
        if (k == search->n)
            add_axis(search, lo, hi, tensor->stride[axis] * elem);
        else {
            search->lo[k] += lo;
            search->hi[k] += hi;
        }
    }
}

static bool intersect(const colo_tensor_t *in, const colo_tensor_t *out)
{
    const wide_t distance = (wide_t)(uintptr_t)out->data - (wide_t)(uintptr_t)in->data;
    search_t search = {.n = 0};
    add_axes(&search, in, true);
    add_axes(&search, out, false);
    return can_reach(&search, distance + 1 - (wide_t)colo_dtype_size(in->dtype),
                     distance - 1 + (wide_t)colo_dtype_size(out->dtype), true);
}

bool colo_tensors_apart(const colo_tensor_t *in, const colo_tensor_t *out)
{
    if (colo_tensor_count(in) <= 0 || colo_tensor_count(out) <= 0)
        return true;
    const colo_tensor_t *view[2] = {in, out};
    uintptr_t lo[2], hi[2];
    for (int i = 0; i < 2; i++) {
        int64_t reach = 1;
        for (int32_t axis = 0; axis < view[i]->ndim; axis++)
            reach += (view[i]->shape[axis] - 1) * view[i]->stride[axis];
        lo[i] = (uintptr_t)view[i]->data;
        hi[i] = lo[i] + (uintptr_t)reach * colo_dtype_size(view[i]->dtype);
    }
    return lo[0] >= hi[1] || lo[1] >= hi[0] || interleaved(in, out) || !intersect(in, out);
}
