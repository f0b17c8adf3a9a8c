/* SPDX-License-Identifier: Apache-2.0 */
/* launch-none.c - a build without MPI says so. */
#include "launch.h"

#include <stdio.h>

bool cap_mpi_begin(int *argc, char ***argv, int *rank, int *size, char *why, size_t why_size)
{
    (void)argc, (void)argv, (void)rank, (void)size;
    snprintf(why, why_size, "this build has no MPI; install it, then meson setup --reconfigure");
    return false;
}

colo_status_t cap_mpi_run(colo_rank_fn fn, void *arg)
{
    (void)fn, (void)arg;
    return COLO_ERR_UNBUILT;
}

void cap_mpi_end(bool failed)
{
}
