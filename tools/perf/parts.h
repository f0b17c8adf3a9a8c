/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.h - which samples and rows each rank has, for colo-perf: written from the rules alone
 * (samples by block over dp, rows by zigzag over cp, the last pp stage gives and the first takes),
 * so that what the library moves is compared with something else. Public grid calls only.
 */
#ifndef TOOLS_PERF_PARTS_H
#define TOOLS_PERF_PARTS_H

#include <colobridge/grid.h>

#include <stdbool.h>

typedef struct perf_part {
    int64_t nb, ns; /* 0 on a rank that has nothing */
    int64_t *b, *s; /* owned: [nb] samples, [ns] rows, in local order */
    int64_t addend; /* coordinate in cp */
} perf_part_t;

/* @full: all rows in order. 0, or -1 without memory. */
int perf_part_make(perf_part_t *part, const colo_grid_t *grid, int64_t rank, bool dst,
                   int64_t samples, int64_t rows, bool full);
void perf_part_free(perf_part_t *part);
/* 0 where the grid has no such dim or not that rank */
int64_t perf_coord(const colo_grid_t *grid, int64_t rank, const char *dim);

#endif
