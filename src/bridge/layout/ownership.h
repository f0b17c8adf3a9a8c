/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownership.h (private) - which rows a side of a plan holds, asked in one way of every kind of
 * batch; and which places hold addends of a row.
 *
 * A block is one choice of the coordinates of the dims that split a side; ranks that share them are
 * its replicas. Rows have numbers that both sides know, the common row space. The plan asks nothing
 * but these functions; uniform.c answers for layouts, packed.c for packed sequences and for rows
 * in table order, segments.c for images among text. Samples and features are the layout's in all of
 * them (plan/blocks.c).
 *
 * Replicas of a row have one value. If ranks have values of their own, whose sum is wanted, each is
 * an addend: one more place that has the row. A role that adds up shows one addend at a time, and
 * then each row is in one block again (partial.c).
 */
#ifndef COLO_BRIDGE_LAYOUT_OWNERSHIP_H
#define COLO_BRIDGE_LAYOUT_OWNERSHIP_H

#include "bridge/layout/layout.h"
#include "core/list.h"

typedef struct colo_block {
    int64_t coord[COLO_DIMS_MAX]; /* of split dims and the stage; -1: replicated */
    int64_t count;                /* elements of one axis that it shares with what it met */
} colo_block_t;

/* Ranks that have the same addend. */
typedef struct colo_place {
    int64_t coord[COLO_DIMS_MAX]; /* of those ranks; -1: any */
    int64_t local;                /* where their tensor has the first row, if rows are named */
} colo_place_t;

/* Rows of which each place has an addend, in the order of addition. Places set the same dims; those
 * of named rows set all dims that split rows, and none splits samples or features. */
typedef struct colo_partial {
    int64_t n;
    const colo_place_t *place; /* [n]; borrowed */
    int64_t row, count; /* rows that lie one behind the other in each place; count 0: not named, all
                           rows of the side, which lie alike in all places, one on a rank */
} colo_partial_t;

typedef struct colo_side colo_side_t;

typedef struct colo_ownership {
    /* Rows of a block, ascending in the common row space, and where each run begins in its tensor
     * (of a batch of segments: on the axis of its replica). @within: only what shares rows with
     * these is needed; NULL: all. */
    colo_status_t (*rows)(const colo_side_t *side, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs);
    /* Appends the blocks that own any of the rows @mine, in an order that every rank knows. */
    colo_status_t (*visit)(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met);
    bool tables;         /* rows are in tables: all of them are one sample */
    bool full_has_parts; /* full: rows are still split over dims that are not context */
} colo_ownership_t;

extern const colo_ownership_t colo_owns_uniform, colo_owns_packed, colo_owns_segments;

/* One layout in one role: which splits of rows count, and which addend it shows. */
struct colo_side {
    const colo_ownership_t *owns;
    const colo_layout_t *layout;
    const colo_shape_t *shape;
    const void *table; /* the ownership's: colo_posmap_t, colo_packed_t or
                          colo_ragged_t */
    bool ascends;      /* blocks ascend with their rows */
    bool full;         /* rows are not split in this role */
    bool has_all_rows; /* the tensor has all rows, also those that the role leaves out */
    const colo_partial_t *partial; /* [npartial] that the role adds up; no row is in two */
    int64_t npartial;              /* 0: a row has one value */
    int64_t addends; /* the most that a row of any rank has, if partial has this rank's alone; 0 */
    int64_t shown, addend; /* which of them, and which of its addends, the side shows */
    colo_list_t *on_rank;  /* int64_t: segments: gets where each listed run begins on the axis
                              of the context rank, if rows are split; or NULL */
};

/* What the side shows; NULL: a row has one value. */
static inline const colo_partial_t *colo_side_partial(const colo_side_t *side)
{
    return side->npartial > 0 ? &side->partial[side->shown] : NULL;
}
static inline const colo_place_t *colo_side_place(const colo_side_t *side)
{
    return side->npartial > 0 ? &colo_side_partial(side)->place[side->addend] : NULL;
}
static inline bool colo_partial_names_rows(const colo_partial_t *partial)
{
    return partial && partial->count > 0;
}

/* The ownership's functions in a role that may show an addend: all rows of a block that has it; the
 * blocks that have it of any of the rows @mine. */
colo_status_t colo_side_rows(const colo_side_t *side, const int64_t *coords,
                             const colo_runs_t *within, colo_runs_t *runs);
colo_status_t colo_side_visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met);
/* Are @coords those of a rank of @place? */
bool colo_place_has(const colo_place_t *place, const int64_t *coords);
/* The first addend that a rank at @coords has, or -1. */
int64_t colo_partial_find(const colo_partial_t *partial, const int64_t *coords);
/* PARTIAL gradients: each choice of the context dims of @layout has an addend of all rows, which
 * ascend with the rank. @places: colo_place_t, owned by the caller, which @partial points into. */
colo_status_t colo_partial_over_context(const colo_layout_t *layout, colo_list_t *places,
                                        colo_partial_t *partial);

void colo_block_clear(colo_block_t *block);
int colo_block_cmp(const void *first, const void *second); /* by coordinates */
/* Appends @block, of which @count elements are shared. */
colo_status_t colo_block_push(colo_list_t *out, const colo_block_t *block, int64_t count);
/* Appends the blocks of @axis, of @length, that meet its indices [lo, hi). */
colo_status_t colo_blocks_along(colo_list_t *out, const colo_layout_t *layout, colo_axis_t axis,
                                int64_t length, int64_t lo, int64_t hi);

#endif
