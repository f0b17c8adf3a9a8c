/* SPDX-License-Identifier: Apache-2.0 */
/* batch.h - a batch in tables: its file, the rows by which regions are numbered, its balance. */
#ifndef TOOLS_PLAN_BATCH_H
#define TOOLS_PLAN_BATCH_H

#include <colobridge/packing.h>
#include <colobridge/segments.h>

#include "options.h"

/* Loads of the source replicas, [0] as the file says, [1] as colo_segments_balance() says. */
typedef struct plan_loads {
    int64_t *load[2]; /* [replicas] rows */
    int64_t most[2];
    double mean;
    int64_t moved; /* segments that change their replica */
} plan_loads_t;

/* Segments in packed sequences, or two packings of the same sequences. */
typedef struct plan_batch {
    bool packed;
    colo_packing_t side[2]; /* packed: source and destination */
    bool heads[2];          /* a side that divides the features, and is WHOLE */
    colo_segments_t tables; /* otherwise */
    const int64_t *length;  /* [count] of what regions number: segments, or sequences */
    int64_t count;
    int64_t rows, positions;
    int64_t replicas; /* of the source */
    int64_t *order;   /* [count] segments by replica, then by number: the source axes */
    int64_t *first;   /* [count] number of the first row of order[i] on these axes */
    int64_t *assign;  /* [count] replica of each segment after colo_segments_balance() */
    plan_loads_t loads;
    int64_t *table; /* owned: the lists of the file, one after the other */
} plan_batch_t;

/* Rows of one segment, or positions of one sequence, that follow each other. */
typedef struct plan_rows {
    int64_t item, lo, hi; /* half-open */
} plan_rows_t;

/* Reads the tables in file @path. On failure: complains, returns the exit code. */
int plan_batch_read(plan_batch_t *b, const char *path, bool packed);
/* Checks the tables against the layouts, orders the segments, balances them. */
int plan_batch_place(plan_batch_t *b, const colo_plan_config_t *config);
void plan_batch_free(plan_batch_t *b);
/* The rows from number *@index on, to the end of their segment or sequence or to @hi; moves *@index
 * behind them. */
plan_rows_t plan_batch_next(const plan_batch_t *b, int64_t *index, int64_t hi);
/* "zigzag": the cut of one side of a packed batch */
const char *plan_batch_cut(const plan_batch_t *b, int side);

#endif
