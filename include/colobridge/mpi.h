/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpi.h - ranks that are MPI processes. Opt-in: not part of colobridge.h, needs <mpi.h>.
 *
 * libcolobridge.so does not link MPI; libcolobridge-mpi.so next to it does and is loaded on first
 * use. The program initialises and finalises MPI. MPI_THREAD_SINGLE is enough when one thread
 * makes, uses and destroys the communicators; if they move between threads, MPI_THREAD_SERIALIZED.
 * With MPI_THREAD_MULTIPLE an abort from another thread reaches the other processes at once,
 * otherwise at the next step of the thread that uses the communicators.
 */
#ifndef COLOBRIDGE_MPI_H
#define COLOBRIDGE_MPI_H

#include <mpi.h>

#include <colobridge/bootstrap.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(OMPI_MAJOR_VERSION)
#define COLO_MPI_FLAVOR "Open MPI"
#elif defined(MPICH_VERSION) || defined(MPICH_NAME) || defined(I_MPI_VERSION)
#define COLO_MPI_FLAVOR "MPICH"
#else
#define COLO_MPI_FLAVOR "another MPI"
#endif

/* What colo_comm_create_backend("mpi", ...) wants: an MPI_Comm, and which MPI's. */
typedef struct colo_mpi_handle {
    size_t struct_size;
    const char *flavor; /* COLO_MPI_FLAVOR */
    size_t comm_size;   /* sizeof(MPI_Comm) */
    const void *comm;   /* borrowed for the call */
} colo_mpi_handle_t;

/**
 * colo_comm_create_mpi() - the world comm of the ranks of @mpi; collective over them
 * @mpi:    borrowed for the call; duplicated once, so traffic of the program cannot meet ours
 * @comm:   out, owned by the caller; destroy it before MPI_Finalize()
 * Ranks:   comm rank and world rank are the rank in @mpi; smaller groups by colo_comm_split()
 * Errors:  COLO_ERR_STATE (MPI not initialised, or finalised), COLO_ERR_ARG (MPI_COMM_NULL, an
 *          inter-communicator), COLO_ERR_UNBUILT (no libcolobridge-mpi.so, or of another MPI),
 *          COLO_ERR_TIMEOUT (not all ranks came within COLO_TIMEOUT_MS), COLO_ERR_MPI, _NOMEM
 */
static inline colo_status_t colo_comm_create_mpi(MPI_Comm mpi, colo_comm_t **comm)
{
    colo_mpi_handle_t handle;
    handle.struct_size = sizeof handle;
    handle.flavor = COLO_MPI_FLAVOR;
    handle.comm_size = sizeof mpi;
    handle.comm = &mpi;
    return colo_comm_create_backend("mpi", &handle, sizeof handle, comm);
}

#ifdef __cplusplus
}
#endif
#endif
