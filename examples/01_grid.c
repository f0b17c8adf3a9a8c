/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 01_grid.c - where is a rank, and with whom does it form which group?
 *
 *   ./01_grid [SPEC [RANK]]        default: tp=2,cp=2,dp=2 and rank 5
 *
 * Nothing here communicates: a grid is a value, every answer a closed form, so this works as well
 * for a million ranks as for eight.
 */
#include <stdio.h>
#include <stdlib.h>

#include <colobridge.h>

/* "cp group 1 of 4: [1] 3", this rank in brackets; long groups are cut */
static int print_group(const colo_grid_t *grid, const char *dims, int64_t rank)
{
    colo_group_t group;

    if (colo_grid_group(grid, dims, rank, &group) < 0)
        return -1;
    printf("  %-8s group %lld of %lld:", dims, (long long)group.ordinal, (long long)group.count);
    for (int64_t i = 0; i < group.size && i < 16; i++)
        printf(i == group.index ? " [%lld]" : " %lld", (long long)colo_group_member(&group, i));
    printf("%s\n", group.size > 16 ? " ..." : "");
    return 0;
}

int main(int argc, char **argv)
{
    const char *spec = argc > 1 ? argv[1] : "tp=2,cp=2,dp=2";
    int64_t rank = argc > 2 ? atoll(argv[2]) : 5, coords[COLO_DIMS_MAX], back;
    colo_grid_t grid;

    if (colo_grid_parse(&grid, spec, 0) < 0 || colo_grid_coords(&grid, rank, coords) < 0 ||
        colo_grid_rank(&grid, coords, &back) < 0) {
        fprintf(stderr, "01_grid: %s\n", colo_last_error());
        return 2;
    }
    printf("%s: %lld ranks, the first dim varies fastest\n", spec, (long long)grid.size);
    printf("rank %lld is at", (long long)rank);
    for (int32_t d = 0; d < grid.ndims; d++)
        printf(" %s %lld", grid.name[d], (long long)coords[d]);
    printf(", and the rank at these coordinates is %lld\n", (long long)back);

    for (int32_t d = 0; d < grid.ndims; d++)
        if (print_group(&grid, grid.name[d], rank) < 0)
            goto fail;
    for (int32_t d = 1; d < grid.ndims; d++) { /* neighbours as one group: gradients reduce so */
        char dims[2 * COLO_DIM_NAME_MAX];
        snprintf(dims, sizeof dims, "%s-%s", grid.name[d - 1], grid.name[d]);
        if (print_group(&grid, dims, rank) < 0)
            goto fail;
    }
    return back == rank ? 0 : 1;
fail:
    fprintf(stderr, "01_grid: %s\n", colo_last_error());
    return 1;
}
