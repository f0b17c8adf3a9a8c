/* SPDX-License-Identifier: Apache-2.0 */
/* segments.h - a ragged batch of colo-plan: its file, its rows on the source axes, its balance. */
#ifndef TOOLS_PLAN_SEGMENTS_H
#define TOOLS_PLAN_SEGMENTS_H

#include <colobridge/segments.h>

#include "options.h"

/* Loads of the source replicas, [0] as the file says, [1] as colo_balance() says. */
typedef struct plan_loads {
    int64_t *load[2]; /* [replicas] rows */
    int64_t most[2];
    double mean;
    int64_t moved; /* segments that change their replica */
} plan_loads_t;

typedef struct plan_segments {
    colo_segments_t tables; /* owned */
    int64_t rows, positions;
    int64_t replicas; /* of the source */
    int64_t *order;   /* [count] segments by replica, then by number: the source axes */
    int64_t *first;   /* [count] number of the first row of order[i] on these axes */
    int64_t *assign;  /* [count] replica of each segment after colo_balance() */
    plan_loads_t loads;
} plan_segments_t;

/* Rows of one segment that follow each other. */
typedef struct plan_rows {
    int64_t segment, lo, hi; /* rows of the segment, half-open */
} plan_rows_t;

/* Reads the tables in file @path. On failure: complains, returns the exit code. */
int plan_segments_read(plan_segments_t *s, const char *path);
/* Checks the tables against the layouts, orders the segments, balances them. */
int plan_segments_place(plan_segments_t *s, const colo_layout_t *src, const colo_layout_t *dst);
void plan_segments_free(plan_segments_t *s);
/* The rows from number *@index of the source axes on, to the end of their segment or to @hi; moves
 * *@index behind them. */
plan_rows_t plan_segments_next(const plan_segments_t *s, int64_t *index, int64_t hi);

#endif
