/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grid.h - which rank is where, and which ranks form which group. Pure integers, no communication.
 *
 * A grid is a value: up to 16 named dims, the first varies fastest. With strides s0 = 1,
 * s[i] = s[i-1] * extent[i-1]:   rank = offset + sum c[i] s[i],   c[i] = ((rank - offset) / s[i]) mod extent[i].
 * Every query is a closed form in O(ndims); groups are iterated, never materialised.
 * Values are immutable after init and may be shared by any number of threads.
 */
#ifndef COLOBRIDGE_GRID_H
#define COLOBRIDGE_GRID_H

#include <colobridge/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_MAX_DIMS 16
#define COLO_DIM_NAME_MAX 16 /* bytes of a dim name, NUL included */
#define COLO_KEY_MAX (COLO_MAX_DIMS * COLO_DIM_NAME_MAX)

typedef struct colo_dim {
    const char *name;
    int64_t extent;
} colo_dim_t;

typedef struct colo_grid {
    int32_t ndims;
    char name[COLO_MAX_DIMS][COLO_DIM_NAME_MAX];
    int64_t extent[COLO_MAX_DIMS];
    int64_t stride[COLO_MAX_DIMS]; /* ranks between neighbours along the dim */
    int64_t offset;                /* grid rank 0 is world rank @offset */
    int64_t size;                  /* product of extents */
} colo_grid_t;

/** The group of a dim set that contains one rank. A value; members are computed, not stored. */
typedef struct colo_group {
    int64_t base;    /* the member whose coordinates in the dim set are all 0 (a world rank) */
    int64_t size;    /* members */
    int64_t index;   /* position of the rank it was asked for */
    int64_t ordinal; /* which of the @count groups of this dim set it is */
    int64_t count;   /* how many groups the dim set makes */
    int32_t nd;      /* dims below, in iteration order: [0] varies fastest */
    int64_t extent[COLO_MAX_DIMS];
    int64_t stride[COLO_MAX_DIMS];
} colo_group_t;

/**
 * colo_grid_init() - a grid from dims, first dim fastest
 * @dims:    [ndims]; names 1..15 bytes of [A-Za-z0-9_], not starting with a digit, without a letter
 *           right after a digit, unique
 * @offset:  world rank of grid rank 0; the grid covers [offset, offset + size)
 * @world:   ranks in the world; size must be <= world - offset. 0 = unknown, not checked
 * Errors:   COLO_ERR_ARG: no dims, more than 16, empty or duplicate name, extent <= 0, product
 *           overflow, negative offset, size > world - offset
 */
COLO_API colo_status_t colo_grid_init(colo_grid_t *grid, const colo_dim_t *dims, int32_t ndims,
                                      int64_t offset, int64_t world);

/**
 * colo_grid_parse() - a grid from a spec string: "tp=2,cp=2,dp=2", "tp2-cp2-dp2", "tp=2,dp=4@8"
 * (the last: offset 8). Strict: no spaces, no empty parts; one style per string.
 * Errors:   as colo_grid_init(), each with the byte offset where reading stopped
 */
COLO_API colo_status_t colo_grid_parse(colo_grid_t *grid, const char *spec, int64_t world);
/** colo_grid_parse_n() - the same for @len bytes, which may hold NULs (an error with its offset) */
COLO_API colo_status_t colo_grid_parse_n(colo_grid_t *grid, const char *spec, size_t len,
                                         int64_t world);

/** colo_grid_print() - the spec string ("tp=2,cp=2,dp=2", "@8" when offset); returns the length it
 *  needs without NUL, writes at most @cap bytes, NUL-terminated when cap > 0 */
COLO_API size_t colo_grid_print(const colo_grid_t *grid, char *text, size_t cap);

/** colo_grid_dim() - index of a dim by name, -1 when the grid has none of that name */
COLO_API int32_t colo_grid_dim(const colo_grid_t *grid, const char *name);
/** colo_grid_extent() - extent of a dim by name, 1 when the grid has none of that name */
COLO_API int64_t colo_grid_extent(const colo_grid_t *grid, const char *name);
/** colo_grid_has_rank() - is this world rank inside [offset, offset + size) */
COLO_API bool colo_grid_has_rank(const colo_grid_t *grid, int64_t rank);
/** colo_grid_equal() - same dims in the same order, extents, offset */
COLO_API bool colo_grid_equal(const colo_grid_t *a, const colo_grid_t *b);
/** colo_grid_hash() - 64-bit, the same on every machine */
COLO_API uint64_t colo_grid_hash(const colo_grid_t *grid);

/** colo_grid_coords() - coordinates [ndims] of a world rank. COLO_ERR_ARG: rank outside the grid */
COLO_API colo_status_t colo_grid_coords(const colo_grid_t *grid, int64_t rank, int64_t *coords);
/** colo_grid_coord() - one coordinate by name; 0 for a dim that the grid lacks */
COLO_API colo_status_t colo_grid_coord(const colo_grid_t *grid, int64_t rank, const char *name,
                                       int64_t *coord);
/** colo_grid_rank() - world rank of coordinates [ndims]. COLO_ERR_ARG: a coordinate out of range */
COLO_API colo_status_t colo_grid_rank(const colo_grid_t *grid, const int64_t *coords,
                                      int64_t *rank);

/**
 * colo_grid_group() - the group of @dims that contains @rank, canonical order (members ascend)
 * @dims:   names joined by "-" in any order: "tp", "cp-dp"
 * Errors:  COLO_ERR_ARG: unknown or repeated dim, empty list, rank outside the grid
 */
COLO_API colo_status_t colo_grid_group(const colo_grid_t *grid, const char *dims, int64_t rank,
                                       colo_group_t *group);
/**
 * colo_grid_group_as_given() - the same members in "as given" order: the last given dim varies
 * fastest inside the group. [2,2,2] named a,b,c and "a-b" gives [0,2,1,3] (canonical: [0,1,2,3]).
 */
COLO_API colo_status_t colo_grid_group_as_given(const colo_grid_t *grid, const char *dims,
                                                int64_t rank, colo_group_t *group);
/** colo_grid_group_at() - canonical group number @ordinal of @dims; its index is 0 */
COLO_API colo_status_t colo_grid_group_at(const colo_grid_t *grid, const char *dims,
                                          int64_t ordinal, colo_group_t *group);
/** colo_grid_key() - canonical key: the dims in reversed naming order joined by "-" ("dp-tp");
 *  @key holds COLO_KEY_MAX bytes */
COLO_API colo_status_t colo_grid_key(const colo_grid_t *grid, const char *dims, char *key);

/** colo_group_member() - world rank of member @i, 0 <= i < size (not checked); -1 of group NULL */
COLO_API int64_t colo_group_member(const colo_group_t *group, int64_t i);
/** colo_group_find() - position of a world rank in the group, -1 when it is no member; O(nd) */
COLO_API int64_t colo_group_find(const colo_group_t *group, int64_t rank);

#ifdef __cplusplus
}
#endif
#endif
