/* SPDX-License-Identifier: Apache-2.0 */
/* overlaps.h (private) - where a needed block meets a held block, and how that is cut. */
#ifndef COLO_BRIDGE_PLAN_OVERLAPS_H
#define COLO_BRIDGE_PLAN_OVERLAPS_H

#include "bridge/plan/blocks.h"
#include "bridge/plan/plan.h"

/* An overlap, or a part of one; a view of a list's entries. */
typedef struct colo_overlap {
    colo_entry_t *region; /* [n] runs of rows, ascending, all with the same samples and features */
    int64_t n;
    colo_extent_t extent;
} colo_overlap_t;

/* Is an overlap of @extent, of elements of @elem bytes, too small to be cut? */
bool colo_is_small(const colo_extent_t *extent, size_t elem);
/* Along which axis it is cut in @n: one that divides, else the longest. */
int colo_cut_axis(const colo_extent_t *extent, int64_t n);
/* Where part @k of @n begins; the longer parts are from @rotation on. */
int64_t colo_part_lo(int64_t length, int64_t n, int64_t k, int64_t rotation);
/* Appends all of @overlap to @out, for @peer. */
colo_status_t colo_overlap_push(const colo_overlap_t *overlap, int64_t peer, colo_list_t *out);
/* Appends elements [lo, hi) along @axis of @overlap to @out; rows count over its regions. */
colo_status_t colo_overlap_cut(const colo_overlap_t *overlap, int axis, int64_t lo, int64_t hi,
                               int64_t peer, colo_list_t *out);
/* By peer, addend, samples, rows, features: the order of regions on both ends of a message. */
int colo_entry_cmp(const void *first, const void *second);

#endif
