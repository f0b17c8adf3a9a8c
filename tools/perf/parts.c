/* SPDX-License-Identifier: Apache-2.0 */
/* parts.c - see perf/parts.h. */
#include "parts.h"

#include <stdlib.h>

int64_t perf_coord(const colo_grid_t *grid, int64_t rank, const char *dim)
{
    int64_t c = 0;
    if (colo_grid_dim(grid, dim) < 0 || !colo_grid_has_rank(grid, rank))
        return 0;
    return colo_grid_coord(grid, rank, dim, &c) < 0 ? 0 : c;
}

int perf_part_make(perf_part_t *part, const colo_grid_t *grid, int64_t rank, bool dst,
                   int64_t samples, int64_t rows, bool full)
{
    const int64_t dp = colo_grid_extent(grid, "dp"), cp = colo_grid_extent(grid, "cp"),
                  pp = colo_grid_extent(grid, "pp"), d = perf_coord(grid, rank, "dp"),
                  c = perf_coord(grid, rank, "cp");
    *part = (perf_part_t){.addend = c};
    if (!colo_grid_has_rank(grid, rank) || perf_coord(grid, rank, "pp") != (dst ? 0 : pp - 1))
        return 0;
    const int64_t b0 = samples * d / dp, chunk = rows / (2 * cp);
    part->nb = samples * (d + 1) / dp - b0;
    part->ns = full || cp == 1 ? rows : 2 * chunk;
    part->b = malloc((size_t)part->nb * sizeof *part->b + 1);
    part->s = malloc((size_t)part->ns * sizeof *part->s + 1);
    if (!part->b || !part->s) {
        perf_part_free(part);
        return -1;
    }
    for (int64_t i = 0; i < part->nb; i++)
        part->b[i] = b0 + i;
    for (int64_t i = 0; i < part->ns; i++)
        part->s[i] = full || cp == 1 ? i
                     : i < chunk     ? c * chunk + i
                                     : (2 * cp - 1 - c) * chunk + i - chunk;
    return 0;
}

void perf_part_free(perf_part_t *part)
{
    free(part->b);
    free(part->s);
    *part = (perf_part_t){0};
}
