/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack.h (private) - a list of strided boxes read or written as one stream of bytes, piece by
 * piece.
 *
 * The stream is the boxes one after another, each in row-major order. Pieces are multiples of the
 * element's size, except that nothing of a stream may remain.
 */
#ifndef COLO_COMM_PROCESS_PACK_H
#define COLO_COMM_PROCESS_PACK_H

#include "core/box.h"

#include <colobridge/comm.h>

typedef struct colo_cursor {
    const colo_box_t *box, *end;
    int64_t elem;
    /* of the current box, innermost first, contiguous axes coalesced, strides in bytes; index[]
     * counts in it */
    char *data;
    int64_t extent[3], stride[3], index[3];
} colo_cursor_t;

/* Loads the next box that has elements; false at the end. */
static inline bool colo_cursor_load_(colo_cursor_t *cursor)
{
    int64_t same[3];
    for (; cursor->box < cursor->end; cursor->box++)
        if (colo_box_coalesce(cursor->box, cursor->box, cursor->elem, cursor->extent,
                              cursor->stride, same)) {
            cursor->data = cursor->box->data;
            memset(cursor->index, 0, sizeof cursor->index);
            return true;
        }
    return false;
}

static inline void colo_cursor_init(colo_cursor_t *cursor, const colo_box_t *boxes, int32_t n,
                                    size_t elem)
{
    memset(cursor, 0, sizeof *cursor);
    cursor->box = boxes;
    cursor->end = n > 0 ? boxes + n : boxes; /* NULL, perhaps */
    cursor->elem = (int64_t)elem;
    colo_cursor_load_(cursor);
}

/* The next @bytes of the stream to @to (pack) or from @from (unpack); the other one is NULL. Ends
 * whatever @bytes is: what does not fill an element, or lies past the last box, is left. */
static inline void colo_cursor_move(colo_cursor_t *cursor, char *to, const char *from,
                                    int64_t bytes)
{
    const int64_t elem = cursor->elem;
    while (bytes >= elem && cursor->box < cursor->end) {
        char *element = cursor->data + cursor->index[0] * cursor->stride[0] +
                        cursor->index[1] * cursor->stride[1] + cursor->index[2] * cursor->stride[2];
        int64_t n = cursor->extent[0] - cursor->index[0];
        if (n > bytes / elem)
            n = bytes / elem;
        if (to) {
            colo_box_run_(to, elem, element, cursor->stride[0], n, (size_t)elem);
            to += n * elem;
        } else {
            colo_box_run_(element, cursor->stride[0], from, elem, n, (size_t)elem);
            from += n * elem;
        }
        bytes -= n * elem;
        cursor->index[0] += n;
        if (cursor->index[0] < cursor->extent[0])
            continue;
        cursor->index[0] = 0;
        if (++cursor->index[1] < cursor->extent[1])
            continue;
        cursor->index[1] = 0;
        if (++cursor->index[2] < cursor->extent[2])
            continue;
        cursor->box++;
        if (!colo_cursor_load_(cursor))
            return;
    }
}

#endif
