/* SPDX-License-Identifier: Apache-2.0 */
/* segments.h (private) - the tables of a batch of segments, seen along the axes of both sides. */
#ifndef COLO_BRIDGE_LAYOUT_SEGMENTS_H
#define COLO_BRIDGE_LAYOUT_SEGMENTS_H

#include "bridge/layout/halo.h"

#include <colobridge/ragged.h>

/* Rows of one segment that follow each other in it and in its sequence. Small, because all parts
 * of a batch are read and written for each. */
typedef struct colo_part {
    int64_t seq, pos, count; /* count > 0 */
    int64_t row;             /* of the first, on the source axis; in in_order: its replica there */
} colo_part_t;

/* The caller's tables; are all of them there. */
colo_status_t colo_segments_read(colo_segments_t *own, const colo_segments_t *given);
/* What ranks compare of them; returns how many. @table: [COLO_TABLES] */
int32_t colo_segments_keep(colo_table_t *table, const colo_segments_t *segments);

/* The tables of a batch, of either kind; the caller's. */
typedef struct colo_tables {
    const colo_segments_t *segments;
    const colo_packing_t *src, *dst;
} colo_tables_t;

/*
 * Tables seen along the axes of both sides, while a plan is made. Memory is kept for the next
 * tables. src and dst are set before the first load.
 */
typedef struct colo_ragged {
    bool packed;            /* two packings, src and dst, and no segments */
    colo_packed_t src, dst; /* src of segments: all rows of a replica are one sequence */
    colo_halo_t halo;       /* of dst; before is 0 if it has none */
    colo_segments_t own;    /* with the sequences of a packing. The tables are the caller's: of
                               the call only */
    colo_list_t zeros;      /* int64_t: a seq_dp that is NULL */
    int64_t rows;           /* of all segments */
    bool sorted; /* each segment is one part, and both replicas ascend: the tables list the parts */
    int64_t *row;                /* [segments] if sorted: the first of each on the source axis */
    colo_list_t in_order, parts; /* else, colo_part_t: by segment; by source row */
    int64_t *dst_lo;             /* [replicas + 1] parts of each destination replica */
    int64_t *src_rows, *src_dp;  /* [replicas] the source's rows; its numbers */
    colo_list_t by_dst;          /* int64_t: if not sorted, which these are */
    colo_list_t entries;         /* int64_t: memory of the tables above */
} colo_ragged_t;

/* Takes layouts and shape, as ragged batches must have them. @packed: of two packings. */
colo_status_t colo_ragged_init(colo_ragged_t *ragged, const colo_layout_t *src,
                               const colo_layout_t *dst, const colo_shape_t *shape, bool packed);
/* segment-tables.c: all checks of colo_segments_check() but those of colo_segments_read(). Lists
 * parts in table order, if ragged->sorted their row and dst_lo; adds up src_rows, which are 0
 * before. dst is laid out. */
colo_status_t colo_ragged_parts(colo_ragged_t *ragged);
/* Checks tables, lays them out and keeps what ranks compare of them: @table [COLO_TABLES], of which
 * there are @n then. */
colo_status_t colo_ragged_load(colo_ragged_t *ragged, const colo_tables_t *tables,
                               colo_table_t *table, int32_t *n);
void colo_ragged_deinit(colo_ragged_t *ragged);

#endif
