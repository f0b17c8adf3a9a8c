/* SPDX-License-Identifier: Apache-2.0 */
/*
 * side.c - one grid as a rank sees it: coordinates, groups, own samples; and the memory of a rank.
 *
 * Decides nothing about the model. The groups are made for every grid in the same order on every
 * rank, because a split is collective over the world, ranks outside the grid included.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

static colo_status_t coordinate(const colo_grid_t *grid, int64_t rank, const char *dim,
                                int64_t *extent, int64_t *offset)
{
    *extent = colo_grid_extent(grid, dim);
    return colo_grid_coord(grid, rank, dim, offset);
}

colo_status_t cap_side_create(cap_side_t *side, colo_comm_t *world, colo_comm_t *host,
                              const colo_grid_t *grid, const char *name, int64_t batch)
{
    int64_t rank = colo_comm_world_rank(world, colo_comm_rank(world));
    const char *dims[] = {"tp", "cp", "pp", "dp-cp"}, *tag[] = {"tp", "cp", "pp", "mean"};
    colo_comm_t **comms[] = {&side->tp_comm, &side->cp_comm, &side->pp_comm, &side->mean_comm};
    colo_comm_t **hosts[] = {&side->tp_host, &side->cp_host, &side->pp_host, &side->mean_host};

    side->in = colo_grid_has_rank(grid, rank);
    if (side->in) {
        CAP_TRY(coordinate(grid, rank, "tp", &side->tp, &side->t));
        CAP_TRY(coordinate(grid, rank, "cp", &side->cp, &side->c));
        CAP_TRY(coordinate(grid, rank, "pp", &side->pp, &side->p));
        CAP_TRY(coordinate(grid, rank, "dp", &side->dp, &side->d));
        side->b0 = side->d * batch / side->dp;
        side->b = (side->d + 1) * batch / side->dp - side->b0;
    }
    side->split_host = host != world;
    for (int i = 0; i < 4; i++) {
        char label[32];

        CAP_TRY(colo_comm_split(world, grid, dims[i], comms[i]));
        snprintf(label, sizeof label, "%s.%s", name, tag[i]);
        if (*comms[i])
            colo_comm_set_name(*comms[i], label);
        if (side->split_host)
            CAP_TRY(colo_comm_split(host, grid, dims[i], hosts[i]));
        else
            *hosts[i] = *comms[i];
    }
    return COLO_OK;
}

void cap_side_destroy(cap_side_t *side)
{
    colo_comm_destroy(&side->tp_comm);
    colo_comm_destroy(&side->cp_comm);
    colo_comm_destroy(&side->pp_comm);
    colo_comm_destroy(&side->mean_comm);
    if (!side->split_host)
        return;
    colo_comm_destroy(&side->tp_host);
    colo_comm_destroy(&side->cp_host);
    colo_comm_destroy(&side->pp_host);
    colo_comm_destroy(&side->mean_host);
}

colo_status_t cap_sum(colo_comm_t *comm, float *buffer, int64_t count, colo_stream_t stream)
{
    if (colo_comm_size(comm) == 1)
        return COLO_OK;
    return colo_comm_all_reduce(comm, buffer, buffer, count, COLO_F32, COLO_REDOP_SUM, stream);
}

/* A block starts with the address of the one before; its data follow, 64 bytes further. */
void *cap_take(cap_arena_t *arena, int64_t count, size_t size)
{
    size_t bytes = 64 + (((size_t)count * size + 63) & ~(size_t)63);
    void **block = aligned_alloc(64, bytes);

    if (!block) {
        arena->failed = true;
        return NULL;
    }
    memset(block, 0, bytes);
    *block = arena->last;
    arena->last = block;
    return (char *)block + 64;
}

void cap_arena_free(cap_arena_t *arena)
{
    while (arena->last) {
        void *block = arena->last;
        arena->last = *(void **)block;
        free(block);
    }
}
