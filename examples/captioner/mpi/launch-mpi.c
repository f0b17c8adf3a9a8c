/* SPDX-License-Identifier: Apache-2.0 */
/* launch-mpi.c - the processes of mpirun as ranks: init, bind, world communicator, finalize. */
#include "launch.h"

#include <colobridge/mpi.h>

bool cap_mpi_begin(int *argc, char ***argv, int *rank, int *size, char *why, size_t why_size)
{
    (void)why, (void)why_size;
    MPI_Init(argc, argv); /* a failure ends the program: MPI's default handler */
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return true;
}

/* Ranks of one machine share its processors: place them among themselves. */
static void bind_rank(void)
{
    MPI_Comm host;
    int rank, size;
    colo_topology_t *topology = NULL;

    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &rank);
    MPI_Comm_size(host, &size);
    MPI_Comm_free(&host);
    colo_topology_create_env(&topology,
                             size); /* what cannot be done is a warning of the library's */
    if (topology)
        (void)colo_topology_bind(topology, rank);
    colo_topology_destroy(&topology);
}

colo_status_t cap_mpi_run(colo_rank_fn fn, void *arg)
{
    colo_comm_t *world = NULL;

    bind_rank();
    colo_status_t st = colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &world);
    if (st >= 0)
        st = fn(world, arg);
    colo_comm_destroy(&world);
    return st;
}

void cap_mpi_end(bool failed)
{
    if (failed)
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
}
