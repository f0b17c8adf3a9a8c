/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack.h (private) - a list of strided boxes read or written as one stream of bytes, piece by
 * piece.
 *
 * The stream is the boxes one after another, each in row-major order. Pieces are multiples of the
 * element's size, except that nothing of a stream may remain.
 */
#ifndef COLO_COMM_PACK_H
#define COLO_COMM_PACK_H

#include <colobridge/comm.h>

#include <string.h>

typedef struct colo_cursor {
    const colo_box_t *box, *end;
    int64_t elem;
    /* the current box with steps in bytes, contiguous axes coalesced: at[] counts in it */
    char *data;
    int64_t extent[3], step[3], index[3];
} colo_cursor_t;

/* Loads the next box that has elements; false at the end. */
static inline bool colo_cursor_load_(colo_cursor_t *c)
{
    for (; c->box < c->end; c->box++) {
        const colo_box_t *b = c->box;
        if (b->extent[0] == 0 || b->extent[1] == 0 || b->extent[2] == 0)
            continue;
        int64_t extent[3] = {1, 1, 1}, step[3] = {0, 0, c->elem}; /* outermost first */
        int index = 3;
        for (int i = 2; i >= 0; i--) {
            int64_t s = b->stride[i] * c->elem;
            if (b->extent[i] == 1)
                continue;
            if (index < 3 && s == step[index] * extent[index]) {
                extent[index] *= b->extent[i];
                continue;
            }
            index--;
            extent[index] = b->extent[i];
            step[index] = s;
        }
        c->data = b->data;
        memcpy(c->extent, extent, sizeof extent);
        memcpy(c->step, step, sizeof step);
        memset(c->index, 0, sizeof c->index);
        return true;
    }
    return false;
}

static inline void colo_cursor_init(colo_cursor_t *c, const colo_box_t *boxes, int32_t n,
                                    size_t elem)
{
    memset(c, 0, sizeof *c);
    c->box = boxes;
    c->end = boxes + n;
    c->elem = (int64_t)elem;
    colo_cursor_load_(c);
}

/* The next @bytes of the stream to @to (pack) or from @from (unpack); the other one is NULL. Ends
 * whatever @bytes is: what does not fill an element, or passes the last box, is left. */
static inline void colo_cursor_move(colo_cursor_t *c, char *to, const char *from, int64_t bytes)
{
    const int64_t elem = c->elem;
    while (bytes >= elem && c->box < c->end) {
        char *p = c->data + c->index[0] * c->step[0] + c->index[1] * c->step[1] +
                  c->index[2] * c->step[2];
        int64_t n = c->extent[2] - c->index[2];
        if (n > bytes / elem)
            n = bytes / elem;
        if (c->step[2] == elem) {
            if (to)
                memcpy(to, p, (size_t)(n * elem));
            else
                memcpy(p, from, (size_t)(n * elem));
        } else {
            for (int64_t i = 0; i < n; i++)
                if (to)
                    memcpy(to + i * elem, p + i * c->step[2], (size_t)elem);
                else
                    memcpy(p + i * c->step[2], from + i * elem, (size_t)elem);
        }
        bytes -= n * elem;
        if (to)
            to += n * elem;
        else
            from += n * elem;
        c->index[2] += n;
        if (c->index[2] < c->extent[2])
            continue;
        c->index[2] = 0;
        if (++c->index[1] < c->extent[1])
            continue;
        c->index[1] = 0;
        if (++c->index[0] < c->extent[0])
            continue;
        c->box++;
        if (!colo_cursor_load_(c))
            return;
    }
}

#endif
