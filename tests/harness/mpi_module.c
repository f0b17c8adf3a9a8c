/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_module.c - see mpi_module.h; loaded by ranks.c when T_RANKS=mpi. */
#include "harness/mpi_module.h"

#include <colobridge/mpi.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64 };

static MPI_Comm group[MOST + 1];
static bool made[MOST + 1];
static colo_mpi_handle_t handle_;

extern COLO_API t_mpi_t t_mpi;

static int init(void)
{
    const char *threads = getenv("T_MPI_THREADS");
    const bool multiple = threads && strcmp(threads, "multiple") == 0;
    int level = MPI_THREAD_SINGLE;
    if (MPI_Init_thread(NULL, NULL, multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &level) !=
        MPI_SUCCESS)
        return -1;
    MPI_Comm_rank(MPI_COMM_WORLD, &t_mpi.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &t_mpi.size);
    return t_mpi.size <= MOST ? 0 : -1;
}

static void finalize(void)
{
    for (int n = 0; n <= MOST; n++)
        if (made[n] && group[n] != MPI_COMM_NULL)
            MPI_Comm_free(&group[n]);
    MPI_Finalize();
}

static const void *handle(int n, size_t *bytes)
{
    if (!made[n]) {
        MPI_Comm_split(MPI_COMM_WORLD, t_mpi.rank < n ? 0 : MPI_UNDEFINED, 0, &group[n]);
        made[n] = true;
    }
    handle_ = (colo_mpi_handle_t){sizeof handle_, COLO_MPI_FLAVOR, sizeof group[n], &group[n]};
    *bytes = sizeof handle_;
    return t_mpi.rank < n ? &handle_ : NULL;
}

/* Sleeps while it waits: ranks that sit out leave the processor to those that work. */
static void all_gather(const void *send, void *recv, size_t bytes)
{
    MPI_Request request;
    int done = 0;
    MPI_Iallgather(send, (int)bytes, MPI_BYTE, recv, (int)bytes, MPI_BYTE, MPI_COMM_WORLD,
                   &request);
    for (int polls = 0; !done; polls++) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (!done && polls > 100)
            usleep(200);
    }
}

t_mpi_t t_mpi = {.init = init, .finalize = finalize, .handle = handle, .all_gather = all_gather};
