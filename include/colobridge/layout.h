/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - which elements of a logical [samples, rows, features] tensor each rank of a grid owns.
 *
 * Each rank owns a product: samples x rows x features. Every axis has an ordered list of splits;
 * each split takes a part of what the one before left, in local order. Dims that no split names
 * replicate. Coordinates decide, never enumeration order.
 *   BLOCK over d of D:    local [floor(dL/D), floor((d+1)L/D)) of L
 *   ZIGZAG over c of C:   2C equal chunks of L/2C; chunk c, then chunk 2C-1-c
 * Rows split by *position*: row i of a sample sits at position pos(i) of the LLM's sequence of S
 * positions; a rank owns the rows whose positions it owns, ordered by position.
 * A layout is a value. Each call that reads a layout checks its fields first: one that was never
 * initialised, or edited out of range, is COLO_ERR_ARG. A position table is borrowed and must
 * outlive what is made from the layout.
 */
#ifndef COLOBRIDGE_LAYOUT_H
#define COLOBRIDGE_LAYOUT_H

#include <colobridge/grid.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_MAX_SPLITS 4

typedef enum colo_axis { COLO_SAMPLES = 0, COLO_ROWS = 1, COLO_FEATURES = 2 } colo_axis_t;
typedef enum colo_split_kind {
    COLO_REPLICATE = 0,
    COLO_BLOCK = 1,
    COLO_ZIGZAG = 2
} colo_split_kind_t;

typedef struct colo_split {
    int32_t dim; /* index in the layout's grid */
    colo_split_kind_t kind;
    bool context; /* context parallelism: PARTIAL gradients are summed over this dim */
} colo_split_t;

typedef enum colo_map_kind {
    COLO_MAP_IDENTITY = 0,
    COLO_MAP_OFFSET = 1,
    COLO_MAP_TABLE = 2
} colo_map_kind_t;

#define COLO_STAGE_ANY (-1)
#define COLO_STAGE_LAST (-2)

typedef struct colo_layout {
    colo_grid_t grid;
    int32_t nsplits[3];                     /* per axis */
    colo_split_t split[3][COLO_MAX_SPLITS]; /* in the order in which they take parts */
    colo_map_kind_t map;
    int64_t offset;       /* COLO_MAP_OFFSET: pos(i) = offset + i */
    const int64_t *table; /* COLO_MAP_TABLE: pos(i) = table[i]; borrowed */
    int64_t table_rows;
    int64_t positions; /* S; 0 = as many as there are rows */
    int32_t stage_dim; /* -1: no stage filter */
    int64_t stage;     /* coordinate that holds the tensor */
} colo_layout_t;

/** The logical tensor that layouts are about. */
typedef struct colo_shape {
    int64_t samples;   /* B, global batch */
    int64_t rows;      /* N, rows of a sample that cross the bridge */
    int64_t features;  /* H */
    int64_t positions; /* S of the destination's map; 0: as in the layout */
} colo_shape_t;

/** What one rank owns: samples [b0, b1), features [h0, h1), rows as runs in local order. */
typedef struct colo_run {
    int64_t row;   /* first row (global, within a sample) */
    int64_t count; /* rows row .. row + count - 1 */
    int64_t local; /* local index of the first */
} colo_run_t;

typedef struct colo_owned {
    int64_t b0, b1, h0, h1;
    int64_t rows; /* local rows */
} colo_owned_t;

/**
 * colo_layout_init_src() - the usual layout of an encoder: samples BLOCK over "dp", rows ZIGZAG
 * over "cp", on the last "pp" stage, each only if the grid has that dim. Identity map
 * @grid:   copied. Ranks along "tp" and "ep" have copies
 * Errors:  COLO_ERR_ARG: a dim of extent > 1 with another name, because its ranks may have
 *          different data. See colo_layout_init_src_extra(), or split an axis over it after
 *          colo_layout_init()
 */
COLO_API colo_status_t colo_layout_init_src(colo_layout_t *layout, const colo_grid_t *grid);
/**
 * colo_layout_init_dst() - the usual layout of an LLM: as colo_layout_init_src(), on "pp" stage 0
 */
COLO_API colo_status_t colo_layout_init_dst(colo_layout_t *layout, const colo_grid_t *grid);
/**
 * colo_layout_init_src_extra() - colo_layout_init_src() for a grid with dims of other names
 * @extra:  names of dims joined by "-": the caller declares that the ranks along them hold copies.
 *          A name that the grid lacks has no effect, so one list serves both grids. NULL: none
 * Errors:  also COLO_ERR_ARG: @extra names "cp", "pp" or "dp", and the grid has that dim
 */
COLO_API colo_status_t colo_layout_init_src_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                                  const char *extra);
/** colo_layout_init_dst_extra() - colo_layout_init_dst() for a grid with dims of other names;
 * @extra and errors as in colo_layout_init_src_extra() */
COLO_API colo_status_t colo_layout_init_dst_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                                  const char *extra);
/** colo_layout_init() - no splits, no stage filter, identity map: everything replicated */
COLO_API colo_status_t colo_layout_init(colo_layout_t *layout, const colo_grid_t *grid);

/**
 * colo_layout_split() - append a split of @axis over grid dim @dim
 * A ZIGZAG split of rows is context parallelism; a BLOCK split of rows is sequence parallelism (its
 * gradients are not summed) - use colo_layout_split_context() for BLOCK context parallelism.
 * REPLICATE appends nothing, but checks the name.
 * Errors:  COLO_ERR_ARG: unknown dim, dim already used, more than COLO_MAX_SPLITS, ZIGZAG on
 *          samples or features
 */
COLO_API colo_status_t colo_layout_split(colo_layout_t *layout, colo_axis_t axis, const char *dim,
                                         colo_split_kind_t kind);
/**
 * colo_layout_split_context() - append a split of rows over @dim that is context parallelism
 * PARTIAL gradients are summed over the ranks of @dim, whatever @kind is.
 * Errors:  as colo_layout_split()
 */
COLO_API colo_status_t colo_layout_split_context(colo_layout_t *layout, const char *dim,
                                                 colo_split_kind_t kind);
/** colo_layout_clear() - forget the splits of one axis */
COLO_API void colo_layout_clear(colo_layout_t *layout, colo_axis_t axis);
/** colo_layout_map_offset() - row i at position @offset + i of @positions */
COLO_API colo_status_t colo_layout_map_offset(colo_layout_t *layout, int64_t offset,
                                              int64_t positions);
/** colo_layout_map_table() - row i at position table[i]; distinct, in [0, positions). Borrowed. */
COLO_API colo_status_t colo_layout_map_table(colo_layout_t *layout, const int64_t *table,
                                             int64_t rows, int64_t positions);
/** colo_layout_stage() - only ranks with coordinate @stage of @dim hold the tensor
 * (COLO_STAGE_LAST, COLO_STAGE_ANY: no filter; then @dim may be NULL) */
COLO_API colo_status_t colo_layout_stage(colo_layout_t *layout, const char *dim, int64_t stage);

/**
 * colo_layout_check() - does the layout fit a tensor of B samples, N rows, H features
 * Errors:  COLO_ERR_LAYOUT, with the numbers: 2C does not divide S, tp does not divide S/C, a row's
 *          position outside [0, S), table of another length, two rows at one position
 */
COLO_API colo_status_t colo_layout_check(const colo_layout_t *layout, int64_t samples, int64_t rows,
                                         int64_t features);

/** colo_layout_holds() - is @rank in the grid and on the stage */
COLO_API bool colo_layout_holds(const colo_layout_t *layout, int64_t rank);

/**
 * colo_layout_owned() - what @rank owns; a rank that does not hold owns nothing (all zero). Local
 * @shape:      samples, rows and features of the tensor; positions is not read
 * @full_rows:  ignore the row splits (a FULL_SEQ output)
 * @owned:      out
 * @runs:       out, may be NULL: [cap] runs in local order
 * @nruns:      out, may be NULL: how many there are
 * Errors:      those of colo_layout_check(); COLO_ERR_ARG if @cap is too small (*nruns is set)
 */
COLO_API colo_status_t colo_layout_owned(const colo_layout_t *layout, int64_t rank,
                                         const colo_shape_t *shape, bool full_rows,
                                         colo_owned_t *owned, colo_run_t *runs, int64_t cap,
                                         int64_t *nruns);

/** colo_layout_hash() - 64-bit, the same on every machine; a table by its contents */
COLO_API uint64_t colo_layout_hash(const colo_layout_t *layout);

#ifdef __cplusplus
}
#endif
#endif
