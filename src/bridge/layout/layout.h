/* SPDX-License-Identifier: Apache-2.0 */
/* layout.h (private) - the index sets behind a layout, for the plan. */
#ifndef COLO_BRIDGE_LAYOUT_LAYOUT_H
#define COLO_BRIDGE_LAYOUT_LAYOUT_H

#include <colobridge/layout.h>

#include "bridge/layout/index.h"
#include "core/error.h"
#include "core/list.h"

extern const char *const colo_axis_names[3]; /* by colo_axis_t, for error messages */

/* Zigzag at most doubles the spans of a set, BLOCK only cuts: 2^COLO_SPLITS_MAX bounds them. */
#define COLO_MAX_SPANS (1 << COLO_SPLITS_MAX)

/* Half-open; a list of spans is in local order. */
typedef struct colo_span {
    int64_t lo, hi;
} colo_span_t;

/* Rows row .. row + count - 1 sit at positions pos .. pos + count - 1. */
typedef struct colo_map_run {
    int64_t pos, row, count; /* pos first: by_pos is sorted by it */
} colo_map_run_t;

/* A position map as runs sorted by position; by_row holds the same runs sorted by row. */
typedef struct colo_posmap {
    int64_t rows, positions, n;
    colo_map_run_t *by_pos, *by_row; /* of a pool, or &one */
    colo_map_run_t one;
} colo_posmap_t;

/* Checks the map against @rows. Must not be moved: by_pos may point into it. */
colo_status_t colo_posmap_init(colo_posmap_t *map, const colo_layout_t *layout, int64_t rows,
                               colo_pool_t *pool);

/* The spans of an axis of @length that coordinates own (one span for samples and features). */
int colo_axis_spans(const colo_layout_t *layout, colo_axis_t axis, const int64_t *coords,
                    int64_t length, colo_span_t *spans);

typedef struct colo_runs {
    colo_run_t *run; /* owned */
    int64_t n, cap;
    int64_t rows; /* sum of counts */
} colo_runs_t;

/* What begins at begin[i * stride] and has count[i * stride] rows, for each i of @index; NULL: for
 * all.
 */
typedef struct colo_ranges {
    const int64_t *begin, *count, *index;
    int64_t stride;
} colo_ranges_t;
/* The ranges of a list, which is not NULL, whose elements have these members. */
#define COLO_RANGES(list, begin_of, count_of)    \
    ((colo_ranges_t){.begin = &(list)->begin_of, \
                     .count = &(list)->count_of, \
                     .stride = (int64_t)(sizeof *(list) / sizeof(int64_t))})
static inline int64_t colo_range_end(const colo_ranges_t *ranges, int64_t i)
{
    const int64_t offset = (ranges->index ? ranges->index[i] : i) * ranges->stride;
    return ranges->begin[offset] + ranges->count[offset];
}
/* The first of [@low, @high) that ends behind @row. */
static inline int64_t colo_first_behind(colo_ranges_t ranges, int64_t low, int64_t high,
                                        int64_t row)
{
    COLO_SEARCH(low, high, i, colo_range_end(&ranges, i) <= row)
    return low;
}

/* Memory for one more run. */
colo_status_t colo_runs_grow(colo_runs_t *runs);
static inline colo_status_t colo_runs_push(colo_runs_t *runs, int64_t row, int64_t count,
                                           int64_t local)
{
    if (runs->n == runs->cap)
        COLO_TRY(colo_runs_grow(runs));
    runs->run[runs->n++] = (colo_run_t){.row = row, .count = count, .local = local};
    runs->rows += count;
    return COLO_OK;
}
/* Rows owned by @coords as runs in local order; full: all rows, one run. Reuses the array. */
colo_status_t colo_layout_runs(const colo_layout_t *layout, const colo_posmap_t *map,
                               const int64_t *coords, bool full, colo_runs_t *runs);
void colo_runs_deinit(colo_runs_t *runs);

/* A layout is a value that a caller may forget to initialise, or edit: every field that bounds or
 * indexes something, in O(dims). A table's rows are colo_posmap_init()'s business. */
colo_status_t colo_layout_check_fields(const colo_layout_t *layout);

/* Divisibility of the row splits only. */
colo_status_t colo_layout_check_rows(const colo_layout_t *layout, int64_t rows);

/* Extents of the dims that split an axis, multiplied; 1 without splits. */
int64_t colo_layout_parts(const colo_layout_t *layout, colo_axis_t axis);

/* Where part @part of @length begins (BLOCK or CEIL), and the part that holds index @i < length */
static inline int64_t colo_split_lo(colo_split_kind_t kind, int64_t length, int64_t parts,
                                    int64_t part)
{
    return kind == COLO_SPLIT_CEIL ? colo_ceil_lo(length, parts, part)
                                   : colo_block_lo(length, parts, part);
}

static inline int64_t colo_split_part(colo_split_kind_t kind, int64_t length, int64_t parts,
                                      int64_t i)
{
    return kind == COLO_SPLIT_CEIL ? i / colo_ceil_lo(length, parts, 1)
                                   : colo_block_part(length, parts, i);
}

/* The dims that context splits name, ascending and first fastest, so that addends ascend with the
 * rank. @dims: [COLO_SPLITS_MAX]; returns how many. */
int colo_layout_context_dims(const colo_layout_t *layout, int32_t *dims);

/* Does @rank hold anything of it? Then @coords: out, its own. */
bool colo_layout_coords(const colo_layout_t *layout, int64_t rank, int64_t *coords);

#endif
