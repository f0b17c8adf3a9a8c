/* SPDX-License-Identifier: Apache-2.0 */
/* segments.h (private) - the tables of a batch of segments, seen along the axes of both sides. */
#ifndef COLO_BRIDGE_SEGMENTS_H
#define COLO_BRIDGE_SEGMENTS_H

#include "bridge/layout/ownership.h"

#include <colobridge/ragged.h>

/* How a layout divides the rows of a ragged batch. */
typedef struct colo_ragged_axes {
    int64_t replicas; /* ranks along the dims that split samples */
    int64_t cp;       /* ranks along those that split rows in context; the major index */
    int64_t sp;       /* ranks along the others that split rows */
    bool zigzag;      /* destination, cp > 1 */
} colo_ragged_axes_t;

/* length / unit, and what remains. A division per sequence costs as much as the rest of the check;
 * a unit is a power of two, usually. */
static inline uint64_t colo_ragged_rest(uint64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? length % unit : length & (unit - 1);
}
static inline int64_t colo_ragged_times(int64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? (int64_t)((uint64_t)length / unit) : length >> __builtin_ctzll(unit);
}

/* COLO_ERR_LAYOUT: not a layout that ragged batches can have. */
colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *layout, bool is_src);

/* Rows of one segment that follow each other in it and in its sequence. Small, because all parts
 * of a batch are read and written for each. */
typedef struct colo_part {
    int64_t seq, pos, count; /* count > 0 */
    int64_t row;             /* of the first, on the source axis */
} colo_part_t;

/* How many parts the @rows of a segment are, from *part on, which goes behind them. */
static inline int64_t colo_parts_of(int64_t rows, const colo_part_t **part)
{
    const colo_part_t *const first = *part;
    while (rows > 0)
        rows -= (*part)++->count;
    return *part - first;
}
/* Are all tables there. */
colo_status_t colo_segments_present(const colo_segments_t *s);

/* Hashes of the tables by name: rows, src_dp, seq, pos, row_pos, seq_len, seq_dp; and of all. */
enum { COLO_SEGMENT_TABLES = 7, COLO_SHOWN = 8 };
/* What all ranks must have alike of one table, and of it what an error message shows. */
typedef struct colo_table {
    int64_t n, first[COLO_SHOWN];
    uint64_t hash;
} colo_table_t;
uint64_t colo_tables_hash(const colo_segments_t *s, uint64_t each[COLO_SEGMENT_TABLES]);
/* One table, the same on every machine. */
uint64_t colo_table_hash(const int64_t *v, int64_t n);

/*
 * Tables seen along the axes of both sides, while a plan is made. Memory is kept for the next
 * tables. src and dst are set before the first load.
 */
typedef struct colo_ragged {
    colo_ragged_axes_t src, dst;
    const colo_segments_t *tables; /* borrowed: of the call only */
    int64_t rows;                  /* of all segments */
    bool sorted; /* each segment is one part, and both replicas ascend: the tables list the parts */
    int64_t *row;                /* [segments] if sorted: the first of each on the source axis */
    colo_list_t in_order, parts; /* else, colo_part_t: by segment; by source row */
    int64_t *src_lo;             /* [replicas + 1] first row of each source replica */
    int64_t *base;               /* [nseqs] where a sequence begins on its replica's axis */
    int64_t *local;              /* [nseqs] the same on the axis of a context rank */
    int64_t *chunk;              /* [nseqs] positions of a chunk */
    int64_t *length;             /* [replicas] of that axis */
    int64_t *dst_lo;             /* [replicas + 1] parts of each destination replica */
    colo_list_t by_dst;          /* int64_t: if not sorted, which these are */
    colo_list_t entries;         /* int64_t: memory of the tables above */
} colo_ragged_t;

/* Takes layouts and shape, as ragged batches must have them. */
colo_status_t colo_ragged_init(colo_ragged_t *r, const colo_layout_t *src, const colo_layout_t *dst,
                               const colo_shape_t *shape);
/* segments.c: all checks of colo_segments_check() but those of colo_segments_present(). Lists parts
 * in table order, if r->sorted their row, src_lo and dst_lo. base, local, chunk and length are laid
 * out. */
colo_status_t colo_ragged_parts(colo_ragged_t *r);
/* Checks tables and lays them out. */
colo_status_t colo_ragged_load(colo_ragged_t *r, const colo_segments_t *segments);
void colo_ragged_deinit(colo_ragged_t *r);

/* The index of @coords among the parts of an axis, the first split coarsest. @context: 1 context
 * splits only, 0 the others only, -1 all. */
int64_t colo_ragged_part(const colo_layout_t *l, colo_axis_t axis, int context,
                         const int64_t *coords);

#endif
