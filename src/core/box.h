/* SPDX-License-Identifier: Apache-2.0 */
/*
 * box.h (private) - counting and copying strided boxes in host memory.
 *
 * A copy first drops axes of extent 1 and coalesces axes that lie back to back on both sides, so
 * that a box which is contiguous in both memories becomes one memcpy whatever its shape.
 */
#ifndef COLO_CORE_BOX_H
#define COLO_CORE_BOX_H

#include <colobridge/comm.h>

#include <string.h>

/* Rows whose first elements are @stride apart. */
static inline colo_box_t colo_box_rows(void *data, int64_t rows, int64_t columns, int64_t stride)
{
    return (colo_box_t){.data = data, .extent = {1, rows, columns}, .stride = {0, stride, 1}};
}

/* Elements; -1 when an extent is negative or the product overflows. */
static inline int64_t colo_box_count(const colo_box_t *box)
{
    int64_t n = 1;
    bool empty = false, fits = true;
    for (int i = 0; i < 3; i++) {
        if (box->extent[i] < 0)
            return -1;
        empty = empty || box->extent[i] == 0;
        fits = fits && !__builtin_mul_overflow(n, box->extent[i], &n);
    }
    return empty ? 0 : fits ? n : -1;
}

/* Elements from the first to one past the last that the box touches; -1 on overflow. Not empty. */
static inline int64_t colo_box_reach(const colo_box_t *box)
{
    int64_t reach = 1, span;
    for (int i = 0; i < 3; i++)
        if (box->extent[i] > 1 &&
            (__builtin_mul_overflow(box->extent[i] - 1, box->stride[i], &span) ||
             __builtin_add_overflow(reach, span, &reach)))
            return -1;
    return reach;
}

/* @n elements, whose strides are in bytes. */
static inline void colo_box_run_(char *dst, int64_t dst_stride, const char *src, int64_t src_stride,
                                 int64_t n, size_t elem)
{
    if (dst_stride == (int64_t)elem && src_stride == (int64_t)elem) {
        memcpy(dst, src, (size_t)n * elem);
        return;
    }
    switch (elem) { /* constant sizes become single moves */
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, 2);
        break;
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, 4);
        break;
    case 8:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, 8);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + i * dst_stride, src + i * src_stride, elem);
    }
}

/* The extents of both boxes with contiguous axes coalesced, innermost first, and the strides of
 * each in bytes. False: they are empty. */
static inline bool colo_box_coalesce(const colo_box_t *dst, const colo_box_t *src, int64_t elem,
                                     int64_t extent[3], int64_t to[3], int64_t from[3])
{
    int n = 0;
    for (int i = 0; i < 3; i++) {
        extent[i] = 1;
        to[i] = from[i] = i ? 0 : elem;
    }
    for (int i = 2; i >= 0; i--) {
        if (src->extent[i] == 0)
            return false;
        if (src->extent[i] == 1)
            continue;
        int64_t t = dst->stride[i] * elem, f = src->stride[i] * elem;
        if (n > 0 && t == to[n - 1] * extent[n - 1] && f == from[n - 1] * extent[n - 1]) {
            extent[n - 1] *= src->extent[i];
            continue;
        }
        extent[n] = src->extent[i];
        to[n] = t;
        from[n++] = f;
    }
    return true;
}

/* dst = src; equal extents, any strides, no overlap; @elem_size bytes an element */
static inline void colo_box_copy_host(const colo_box_t *dst, const colo_box_t *src,
                                      size_t elem_size)
{
    int64_t extent[3], to[3], from[3];
    if (!colo_box_coalesce(dst, src, (int64_t)elem_size, extent, to, from))
        return;
    for (int64_t i = 0; i < extent[2]; i++)
        for (int64_t j = 0; j < extent[1]; j++)
            colo_box_run_((char *)dst->data + i * to[2] + j * to[1], to[0],
                          (const char *)src->data + i * from[2] + j * from[1], from[0], extent[0],
                          elem_size);
}

#endif
