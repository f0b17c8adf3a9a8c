/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_world.h - which rank owns what, element by element, for the checks of colo-plan's JSON.
 *
 * An oracle for small worlds that shares no code with the library: coordinates by repeated
 * division, ownership by asking of each (sample, row) whether a rank has it.
 */
#ifndef TESTS_TOOLS_PLAN_WORLD_H
#define TESTS_TOOLS_PLAN_WORLD_H

#include <stdbool.h>

#define PW_DIMS 5

typedef struct pw_dim {
    const char *name; /* "tp", "cp", "pp", "dp" or one that splits nothing */
    int extent;
} pw_dim_t;

typedef struct pw_grid {
    pw_dim_t dim[PW_DIMS]; /* first fastest; a NULL name ends the list */
    int offset;
} pw_grid_t;

typedef struct pw_side {
    pw_grid_t grid;
    int stage;             /* pp coordinate that holds; -1: any, -2: last */
    int offset, positions; /* of the rows in the sequence that is cut over cp; 0: as many as rows */
    bool sp;               /* rows also over tp */
} pw_side_t;

int pw_size(const pw_grid_t *g);
int pw_end(const pw_grid_t *g); /* offset + size */
/* coordinate of @name, 0 where the grid lacks it; -1 for a rank outside */
int pw_coord(const pw_grid_t *g, int rank, const char *name);
int pw_extent(const pw_grid_t *g, const char *name);
/* does @rank own element (b, s) of @samples x @rows; @all_rows: whatever its cp and tp */
bool pw_owns(const pw_side_t *side, int rank, int b, int s, int samples, int rows, bool all_rows);

#endif
