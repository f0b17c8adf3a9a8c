/* SPDX-License-Identifier: Apache-2.0 */
/* plan_world.c - see plan_world.h; semantics are those of layout.h, spelled out one element at a
 * time. */
#include "plan_world.h"

#include <string.h>

int pw_size(const pw_grid_t *g)
{
    int n = 1;
    for (int i = 0; i < PW_DIMS && g->dim[i].name; i++)
        n *= g->dim[i].extent;
    return n;
}

int pw_end(const pw_grid_t *g)
{
    return g->offset + pw_size(g);
}

int pw_extent(const pw_grid_t *g, const char *name)
{
    for (int i = 0; i < PW_DIMS && g->dim[i].name; i++)
        if (strcmp(g->dim[i].name, name) == 0)
            return g->dim[i].extent;
    return 1;
}

int pw_coord(const pw_grid_t *g, int rank, const char *name)
{
    if (rank < g->offset || rank >= pw_end(g))
        return -1;
    rank -= g->offset;
    for (int i = 0; i < PW_DIMS && g->dim[i].name; i++) {
        if (strcmp(g->dim[i].name, name) == 0)
            return rank % g->dim[i].extent;
        rank /= g->dim[i].extent;
    }
    return 0;
}

bool pw_owns(const pw_side_t *side, int rank, int b, int s, int samples, int rows, bool all_rows)
{
    const pw_grid_t *g = &side->grid;
    int pp = pw_coord(g, rank, "pp");
    if (pp < 0)
        return false;
    int stage = side->stage == -2 ? pw_extent(g, "pp") - 1 : side->stage;
    if (side->stage != -1 && pp != stage)
        return false;
    int d = pw_coord(g, rank, "dp"), parts = pw_extent(g, "dp");
    if (b < d * samples / parts || b >= (d + 1) * samples / parts)
        return false;
    if (all_rows)
        return true;

    /* local positions of this rank in order, counted until this row's position comes up */
    int c = pw_coord(g, rank, "cp"), cp = pw_extent(g, "cp");
    int tp = side->sp ? pw_extent(g, "tp") : 1, t = side->sp ? pw_coord(g, rank, "tp") : 0;
    int length = side->positions ? side->positions : rows, local = 0, found = -1, owned = 0;
    for (int pos = 0; pos < length; pos++) {
        int chunk = pos / (length / (2 * cp)); /* cp = 1: two chunks, both of rank 0 */
        bool mine = cp == 1 || chunk == c || chunk == 2 * cp - 1 - c;
        if (mine && pos == side->offset + s)
            found = local;
        local += mine;
        owned += mine;
    }
    return found >= 0 && found >= t * owned / tp && found < (t + 1) * owned / tp;
}
