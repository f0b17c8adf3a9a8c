/* SPDX-License-Identifier: Apache-2.0 */
/* ragged.h (private) - what the files of ragged batches share. */
#ifndef COLO_BRIDGE_RAGGED_H
#define COLO_BRIDGE_RAGGED_H

#include "bridge/pieces.h"

#include <colobridge/segments.h>

/* How a layout divides the rows of a ragged batch. */
typedef struct colo_ragged_axes {
    int64_t replicas; /* ranks along the dims that split samples */
    int64_t cp;
    bool zigzag;
    int64_t sp; /* ranks along the other dims that split rows */
} colo_ragged_axes_t;

/* COLO_ERR_LAYOUT: not a layout that ragged batches can have. */
colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *layout, bool is_src);

/* Rows of one segment that follow each other in it and in its sequence. */
typedef struct colo_part {
    int64_t segment, seq, pos, count; /* count > 0 */
    int64_t row;                      /* of the first, on the source axis */
} colo_part_t;

/* Are all tables there. */
colo_status_t colo_segments_present(const colo_segments_t *s);
/* All checks of colo_segments_check(). @parts: out, colo_part_t in table order, without row. */
colo_status_t colo_segments_parts(const colo_segments_t *s, const colo_ragged_axes_t *src,
                                  const colo_ragged_axes_t *dst, colo_list_t *parts);

/* One table, the same on every machine. */
uint64_t colo_table_hash(const int64_t *v, int64_t n);

#endif
