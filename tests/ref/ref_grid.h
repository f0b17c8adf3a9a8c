/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_grid.h - grids by counting, not by formula: the oracle of src/grid/.
 *
 * Coordinates come from an odometer that is stepped once per rank. Groups come from sorting ranks
 * by the coordinates outside the dim set: no stride, no division. Shares no code with src/.
 */
#ifndef TESTS_REF_REF_GRID_H
#define TESTS_REF_REF_GRID_H

#include <stdbool.h>
#include <stdint.h>

#define REF_DIMS 16

typedef struct ref_grid {
    int ndims;
    int64_t extent[REF_DIMS];
    int64_t size;
    int32_t *coord; /* [size][ndims], by grid rank, offset left out */
} ref_grid;

typedef struct ref_groups {
    int64_t count, each;
    int64_t *group;  /* [size] the group of each grid rank; groups are numbered as they appear */
    int64_t *index;  /* [size] its place there */
    int64_t *member; /* [count][each] grid ranks */
} ref_groups;

/* All of these return false when memory is short. */
bool ref_grid_make(ref_grid *g, int ndims, const int64_t *extent);
void ref_grid_free(ref_grid *g);

/* The groups of the dims with in[d], members in ascending order of rank. */
bool ref_groups_make(ref_groups *out, const ref_grid *g, const bool *in);
/* The same with members ordered by the coordinates of given[0], then given[1], ...: the last given
 * dim changes from member to member. */
bool ref_groups_make_as_given(ref_groups *out, const ref_grid *g, const int *given, int n);
void ref_groups_free(ref_groups *out);

#endif
