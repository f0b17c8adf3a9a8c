/* SPDX-License-Identifier: Apache-2.0 */
/* blocks.h (private) - the blocks of a side: coordinates, replicas, bounds, and which blocks meet.
 */
#ifndef COLO_BRIDGE_PLAN_BLOCKS_H
#define COLO_BRIDGE_PLAN_BLOCKS_H

#include "bridge/layout/ownership.h"
#include "core/list.h"

typedef struct colo_builder colo_builder_t; /* builder.h */

/* Extents of an overlap, by axis. */
typedef struct colo_extent {
    int64_t of[3];
} colo_extent_t;

static inline int64_t colo_extent_count(const colo_extent_t *extent)
{
    return extent->of[0] * extent->of[1] * extent->of[2];
}

/* What a block owns. */
typedef struct colo_bounds {
    colo_span_t b, h;
    const colo_runs_t *runs; /* ascending rows; borrowed */
} colo_bounds_t;

/* A replica of a block, and what it is looked up by: its node, or its rail. */
typedef struct colo_source {
    int64_t key, rank;
} colo_source_t;

/* This rank's rows, kept until the plan is made: source, destination, all of the destination; and
 * those of the addend that is shown, which are not kept. */
typedef struct colo_own_rows {
    colo_runs_t runs[4];
    bool known[4];
} colo_own_rows_t;

/* The coordinates that make @coords' block on a side, at the addend that it shows; the stage counts
 * as chosen. */
void colo_block_of(const colo_side_t *side, const int64_t *coords, colo_block_t *block);
/* The replicas of a block, ascending. */
colo_status_t colo_block_ranks(colo_builder_t *builder, colo_list_t *out, const colo_grid_t *grid,
                               const colo_block_t *block);
int colo_source_cmp(const void *first, const void *second);
/* First of @n sources that does not sort before (key, rank). */
int64_t colo_source_find(colo_builder_t *builder, const colo_source_t *source, int64_t n,
                         int64_t key, int64_t rank);
/* All rows of this rank on @side; kept until the plan is made. */
colo_status_t colo_block_own_rows(colo_builder_t *builder, const colo_side_t *side,
                                  const int64_t *coords, const colo_runs_t **runs);
/* Samples and features of a block, in @bounds; false: it has none. */
bool colo_block_bounds(const colo_side_t *side, const int64_t *coords, colo_bounds_t *bounds);
/* The blocks of @side that meet @bounds, as one list of choices for each axis. */
colo_status_t colo_blocks_meet(const colo_side_t *side, const colo_bounds_t *bounds,
                               colo_list_t met[3]);
/* How many choices colo_blocks_meet() found. */
static inline int64_t colo_blocks_count(const colo_list_t met[3])
{
    return met[0].n * met[1].n * met[2].n;
}
/* Coordinates and extents of choice @i of what colo_blocks_meet() found: by sample block, then
 * row block, then feature block. */
void colo_blocks_nth(const colo_list_t met[3], int64_t i, int64_t *coords, colo_extent_t *extent);

#endif
