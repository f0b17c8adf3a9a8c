/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grid.h - which rank is where, and which ranks form which group. Pure integers, no communication.
 *
 * A grid is a value with up to 16 named dims. The first dim varies fastest. With the strides
 * s[0] = 1, s[i] = s[i-1] * extent[i-1]:
 *   rank = offset + sum c[i] s[i],   c[i] = ((rank - offset) / s[i]) mod extent[i]
 * Every query is local and takes O(ndims) time. A group stores no list: its members are computed.
 * The caller does not change a grid after init. Any number of threads may then share it.
 */
#ifndef COLOBRIDGE_GRID_H
#define COLOBRIDGE_GRID_H

#include <colobridge/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_DIMS_MAX 16
#define COLO_DIM_NAME_MAX 16 /* bytes of a dim name, NUL included */
#define COLO_KEY_MAX (COLO_DIMS_MAX * COLO_DIM_NAME_MAX)

typedef struct colo_dim_t {
    const char *name;
    int64_t extent;
} colo_dim_t;

typedef struct colo_grid_t {
    int32_t ndims;
    char name[COLO_DIMS_MAX][COLO_DIM_NAME_MAX];
    int64_t extent[COLO_DIMS_MAX];
    int64_t stride[COLO_DIMS_MAX]; /* ranks between neighbours along the dim */
    int64_t offset;                /* grid rank 0 is world rank @offset */
    int64_t size;                  /* product of extents */
} colo_grid_t;

/** The group of a dim set that contains one rank. A value: it owns no memory. */
typedef struct colo_group_t {
    int64_t base;    /* the member whose coordinates in the dim set are all 0 (a world rank) */
    int64_t size;    /* members */
    int64_t index;   /* position in the group of the rank that the caller named */
    int64_t ordinal; /* number of this group among the @count groups of the dim set */
    int64_t count;   /* groups of the dim set */
    int32_t nd;      /* number of dims below, in iteration order: [0] varies fastest */
    int64_t extent[COLO_DIMS_MAX];
    int64_t stride[COLO_DIMS_MAX];
} colo_group_t;

/**
 * colo_grid_init() - make a grid from dims; the first dim varies fastest
 * @grid:    out
 * @dims:    [ndims], borrowed for the call. A name has 1 to 15 bytes of [A-Za-z0-9_]. It does not
 *           begin with a digit, and no letter follows a digit. Names are unique
 * @offset:  world rank of grid rank 0. The grid covers [offset, offset + size)
 * @world:   ranks in the world; size must be <= world - offset. 0: unknown, not checked
 * Errors:   COLO_ERR_ARG: no dims, more than 16, empty or duplicate name, extent <= 0, product
 *           overflow, negative offset, size > world - offset
 */
COLO_API colo_status_t colo_grid_init(colo_grid_t *grid, const colo_dim_t *dims, int32_t ndims,
                                      int64_t offset, int64_t world);

/**
 * colo_grid_parse() - make a grid from a spec string: "tp=2,cp=2,dp=2", "tp2-cp2-dp2" or
 * "tp=2,dp=4@8" (offset 8)
 * @grid:    out
 * @spec:    has no spaces and no empty parts. All parts are written in the same style
 * @world:   as in colo_grid_init()
 * Errors:   as colo_grid_init(). Each names the byte offset at which the parser stopped
 */
COLO_API colo_status_t colo_grid_parse(colo_grid_t *grid, const char *spec, int64_t world);
/** colo_grid_parse_n() - colo_grid_parse() of @len bytes; a NUL among them is an error with its
 *  offset */
COLO_API colo_status_t colo_grid_parse_n(colo_grid_t *grid, const char *spec, size_t len,
                                         int64_t world);

/**
 * colo_grid_print() - write the spec string of a grid: "tp=2,cp=2,dp=2", and "@8" behind it if the
 * offset is 8
 * @text:  out [cap]. The call writes at most @cap bytes, and a NUL at their end if @cap > 0
 * Returns the length of the whole string, without NUL, also if @text is too short for it.
 */
COLO_API size_t colo_grid_print(const colo_grid_t *grid, char *text, size_t cap);

/** colo_grid_dim() - index of the dim called @name; -1 if the grid lacks it */
COLO_API int32_t colo_grid_dim(const colo_grid_t *grid, const char *name);
/** colo_grid_extent() - extent of the dim called @name; 1 if the grid lacks it */
COLO_API int64_t colo_grid_extent(const colo_grid_t *grid, const char *name);
/** colo_grid_has_rank() - is the world rank @rank in [offset, offset + size)? */
COLO_API bool colo_grid_has_rank(const colo_grid_t *grid, int64_t rank);
/** colo_grid_equal() - have @a and @b the same dims in the same order, extents and offset? */
COLO_API bool colo_grid_equal(const colo_grid_t *a, const colo_grid_t *b);
/** colo_grid_hash() - 64-bit hash of dims, extents and offset; the same on every machine */
COLO_API uint64_t colo_grid_hash(const colo_grid_t *grid);

/** colo_grid_coords() - write the coordinates of a world rank to @coords [ndims]. COLO_ERR_ARG: the
 *  rank is outside the grid */
COLO_API colo_status_t colo_grid_coords(const colo_grid_t *grid, int64_t rank, int64_t *coords);
/** colo_grid_coord() - write the coordinate of @rank along the dim called @name; 0 if the grid
 * lacks the dim. COLO_ERR_ARG: the rank is outside the grid */
COLO_API colo_status_t colo_grid_coord(const colo_grid_t *grid, int64_t rank, const char *name,
                                       int64_t *coord);
/** colo_grid_rank() - write the world rank at @coords [ndims]. COLO_ERR_ARG: a coordinate is out of
 *  range */
COLO_API colo_status_t colo_grid_rank(const colo_grid_t *grid, const int64_t *coords,
                                      int64_t *rank);

/**
 * colo_grid_group() - find the group of @dims that contains @rank. Members are in canonical order:
 * their ranks ascend
 * @dims:   names joined by "-" in any order: "tp", "cp-dp"
 * @rank:   world rank
 * @group:  out
 * Errors:  COLO_ERR_ARG: an unknown or repeated dim, an empty list, a rank outside the grid
 */
COLO_API colo_status_t colo_grid_group(const colo_grid_t *grid, const char *dims, int64_t rank,
                                       colo_group_t *group);
/**
 * colo_grid_group_as_given() - colo_grid_group() with the members in the order of @dims: the last
 * dim of @dims varies fastest in the group
 * Dims a, b, c of extent 2 and "a-b" give [0, 2, 1, 3]; the canonical order is [0, 1, 2, 3].
 * Errors:  as colo_grid_group()
 */
COLO_API colo_status_t colo_grid_group_as_given(const colo_grid_t *grid, const char *dims,
                                                int64_t rank, colo_group_t *group);
/** colo_grid_group_at() - write canonical group number @ordinal of @dims; its index is 0. Errors:
 * as colo_grid_group(); COLO_ERR_ARG if there is no group of that number */
COLO_API colo_status_t colo_grid_group_at(const colo_grid_t *grid, const char *dims,
                                          int64_t ordinal, colo_group_t *group);
/** colo_grid_key() - write the canonical key of @dims to @key [COLO_KEY_MAX]: their names in the
 *  reverse order of the grid, joined by "-" ("dp-tp"). Errors: as colo_grid_group() */
COLO_API colo_status_t colo_grid_key(const colo_grid_t *grid, const char *dims, char *key);

/** colo_group_member() - world rank of member @i, which is not checked; -1 if @group is NULL */
COLO_API int64_t colo_group_member(const colo_group_t *group, int64_t i);
/** colo_group_find() - position of the world rank @rank in the group; -1 if it is no member */
COLO_API int64_t colo_group_find(const colo_group_t *group, int64_t rank);

#ifdef __cplusplus
}
#endif
#endif
