/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - which elements of a logical [samples, rows, features] tensor each rank of a grid owns.
 *
 * Each rank owns a product: samples x rows x features. Every axis has an ordered list of splits.
 * Each split takes a part of what the split before it left, in local order. Ranks along a dim that
 * no split names own the same elements. A rank's coordinates decide what it owns.
 *   BLOCK over d of D:    local [floor(dL/D), floor((d+1)L/D)) of L
 *   CEIL over d of D:     local [min(dq, L), min((d+1)q, L)) with q = ceil(L/D), as torch.chunk()
 *   ZIGZAG over c of C:   2C equal chunks of L/2C; chunk c, then chunk 2C-1-c
 * Rows are split by *position*: row i of a sample has position pos(i) of the S positions in the
 * LLM's sequence. A rank owns the rows whose positions it owns, ordered by position.
 * A layout is a value, so that callers keep it in their own structs without a call that frees it. It
 * has no struct_size but room, and its size never changes. Each call that reads a layout checks its members first. If the layout was
 * never initialised, or a member is out of range, the call returns COLO_ERR_ARG. A position table
 * is borrowed: it must outlive every object that is made from the layout. All calls are local.
 */
#ifndef COLOBRIDGE_LAYOUT_H
#define COLOBRIDGE_LAYOUT_H

#include <colobridge/grid.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_SPLITS_MAX 4

typedef enum colo_axis_t {
    COLO_AXIS_SAMPLES = 0,
    COLO_AXIS_ROWS = 1,
    COLO_AXIS_FEATURES = 2
} colo_axis_t;
typedef enum colo_split_kind_t {
    COLO_SPLIT_REPLICATE = 0,
    COLO_SPLIT_BLOCK = 1,
    COLO_SPLIT_ZIGZAG = 2,
    COLO_SPLIT_CEIL = 3
} colo_split_kind_t;

typedef struct colo_split_t {
    int32_t dim; /* index in the layout's grid */
    colo_split_kind_t kind;
    bool context; /* context parallelism: PARTIAL gradients are summed over this dim */
} colo_split_t;

typedef enum colo_map_kind_t {
    COLO_MAP_IDENTITY = 0,
    COLO_MAP_OFFSET = 1,
    COLO_MAP_TABLE = 2
} colo_map_kind_t;

#define COLO_STAGE_ANY (-1)
#define COLO_STAGE_LAST (-2)

typedef struct colo_layout_t {
    colo_grid_t grid;
    int32_t nsplits[3];                     /* per axis */
    colo_split_t split[3][COLO_SPLITS_MAX]; /* in the order in which they take parts */
    colo_map_kind_t map;
    int64_t offset;       /* COLO_MAP_OFFSET: pos(i) = offset + i */
    const int64_t *table; /* COLO_MAP_TABLE: pos(i) = table[i]; borrowed */
    int64_t table_rows;
    int64_t positions; /* S; 0 = as many as there are rows */
    int32_t stage_dim; /* -1: no stage filter */
    int64_t stage;     /* coordinate that holds the tensor */
    int64_t reserved[16]; /* 0: room for members of newer headers */
} colo_layout_t;

/** The logical tensor that layouts are about. */
typedef struct colo_shape_t {
    int64_t samples;   /* B, global batch */
    int64_t rows;      /* N, rows of a sample that cross the bridge */
    int64_t features;  /* H */
    int64_t positions; /* S of the destination's map; 0: as in the layout */
} colo_shape_t;

/** Rows that follow each other both in the sample and on the rank. */
typedef struct colo_run_t {
    int64_t row;   /* first row (global, within a sample) */
    int64_t count; /* rows row .. row + count - 1 */
    int64_t local; /* local index of the first */
} colo_run_t;

/** What one rank owns: samples [b0, b1), features [h0, h1), rows as runs in local order. */
typedef struct colo_owned_t {
    int64_t b0, b1, h0, h1;
    int64_t rows; /* local rows */
} colo_owned_t;

/**
 * colo_layout_init_src() - make the usual layout of an encoder: samples BLOCK over "dp", rows
 * ZIGZAG over "cp", on the last "pp" stage, each only if the grid has that dim. Identity map
 * @layout: out
 * @grid:   copied. Ranks along "tp" and "ep" have copies of the same elements
 * Errors:  COLO_ERR_ARG: a dim of extent > 1 has another name, so its ranks may have other data.
 *          Call colo_layout_init_src_extra(), or call colo_layout_init() and split an axis over it
 */
COLO_API colo_status_t colo_layout_init_src(colo_layout_t *layout, const colo_grid_t *grid);
/**
 * colo_layout_init_dst() - make the usual layout of an LLM: as colo_layout_init_src(), but on "pp"
 * stage 0
 */
COLO_API colo_status_t colo_layout_init_dst(colo_layout_t *layout, const colo_grid_t *grid);
/**
 * colo_layout_init_src_extra() - colo_layout_init_src() for a grid with dims of other names
 * @extra:  names of dims joined by "-". The caller declares that the ranks along them have copies
 *          of the same elements. A name that the grid lacks has no effect, so one list serves both
 *          grids. NULL: none
 * Errors:  also COLO_ERR_ARG: @extra names "cp", "pp" or "dp", and the grid has that dim
 */
COLO_API colo_status_t colo_layout_init_src_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                                  const char *extra);
/** colo_layout_init_dst_extra() - colo_layout_init_dst() for a grid with dims of other names;
 * @extra and errors as in colo_layout_init_src_extra() */
COLO_API colo_status_t colo_layout_init_dst_extra(colo_layout_t *layout, const colo_grid_t *grid,
                                                  const char *extra);
/** colo_layout_init() - make a layout without splits or a stage filter, with the identity map:
 *  every rank owns the whole tensor. @grid is copied */
COLO_API colo_status_t colo_layout_init(colo_layout_t *layout, const colo_grid_t *grid);

/**
 * colo_layout_split() - append a split of @axis over grid dim @dim
 * A ZIGZAG split of rows is context parallelism. A BLOCK or CEIL split of rows is sequence
 * parallelism, whose gradients are not summed; colo_layout_split_context() makes it context
 * parallelism. CEIL is how torch's DTensor shards: D need not divide the length of any axis, and
 * the last ranks may have less than the others, or nothing.
 * REPLICATE appends nothing, but checks the name.
 * Errors:  COLO_ERR_ARG: an unknown dim, a dim that is used already, more than COLO_SPLITS_MAX
 *          splits, ZIGZAG on samples or features
 */
COLO_API colo_status_t colo_layout_split(colo_layout_t *layout, colo_axis_t axis, const char *dim,
                                         colo_split_kind_t kind);
/**
 * colo_layout_split_context() - append a split of rows over @dim that is context parallelism
 * PARTIAL gradients are summed over the ranks along @dim, for every @kind.
 * Errors:  as colo_layout_split()
 */
COLO_API colo_status_t colo_layout_split_context(colo_layout_t *layout, const char *dim,
                                                 colo_split_kind_t kind);
/** colo_layout_clear() - remove all splits of one axis */
COLO_API void colo_layout_clear(colo_layout_t *layout, colo_axis_t axis);
/** colo_layout_map_offset() - give row i position @offset + i of @positions. Errors: COLO_ERR_ARG
 *  unless 0 <= @offset < @positions */
COLO_API colo_status_t colo_layout_map_offset(colo_layout_t *layout, int64_t offset,
                                              int64_t positions);
/** colo_layout_map_table() - give row i position @table[i]. The positions are distinct and in
 *  [0, @positions). @table [rows] is borrowed: it must outlive every object made from the layout.
 *  colo_layout_check() and these objects check its entries. Errors: COLO_ERR_ARG (NULL, sizes) */
COLO_API colo_status_t colo_layout_map_table(colo_layout_t *layout, const int64_t *table,
                                             int64_t rows, int64_t positions);
/**
 * colo_layout_stage() - let only ranks with coordinate @stage along @dim have the tensor
 * @dim:    may be NULL with COLO_STAGE_ANY
 * @stage:  COLO_STAGE_LAST is the last coordinate; COLO_STAGE_ANY removes the filter
 * Errors:  COLO_ERR_ARG: an unknown dim, one that splits an axis, a coordinate outside of it
 */
COLO_API colo_status_t colo_layout_stage(colo_layout_t *layout, const char *dim, int64_t stage);

/**
 * colo_layout_check() - does the layout fit a tensor of this shape?
 * Errors:  COLO_ERR_LAYOUT, with the numbers: 2C does not divide S, tp does not divide S/C (a CEIL
 *          split may be uneven; what follows it must divide each of its parts), a row's position is
 * outside [0, S), the table has another length, or two rows have one position
 */
COLO_API colo_status_t colo_layout_check(const colo_layout_t *layout, int64_t samples, int64_t rows,
                                         int64_t features);

/** colo_layout_holds() - is @rank in the grid and on the stage? */
COLO_API bool colo_layout_holds(const colo_layout_t *layout, int64_t rank);

/**
 * colo_layout_owned() - write what @rank owns. If colo_layout_holds() is false for @rank, all of it
 * is zero
 * @shape:      samples, rows and features of the tensor; positions is not read
 * @full_rows:  all rows, as they follow each other in the sample, as in a FULL_SEQ output
 * @owned:      out
 * @runs:       out [cap], may be NULL: the runs in local order
 * @nruns:      out, may be NULL: the number of runs
 * Errors:      those of colo_layout_check(); COLO_ERR_ARG if @cap is too small (*nruns is set)
 */
COLO_API colo_status_t colo_layout_owned(const colo_layout_t *layout, int64_t rank,
                                         const colo_shape_t *shape, bool full_rows,
                                         colo_owned_t *owned, colo_run_t *runs, int64_t cap,
                                         int64_t *nruns);

/** colo_layout_hash() - 64-bit hash, the same on every machine; of a table, its contents count */
COLO_API uint64_t colo_layout_hash(const colo_layout_t *layout);

#ifdef __cplusplus
}
#endif
#endif
