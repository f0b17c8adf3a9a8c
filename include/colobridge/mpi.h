/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpi.h - ranks that are MPI processes. Opt-in: not part of colobridge.h, needs <mpi.h>.
 *
 * MPI carries the addresses of the ranks while a communicator is made, and nothing after that:
 * ranks of one host talk over Unix sockets, the others over UCX (bootstrap.h). No library here
 * links MPI; the functions below are compiled into the program, with its MPI. The program
 * initialises and finalises MPI. MPI_THREAD_SINGLE is enough if one thread makes communicators.
 */
#ifndef COLOBRIDGE_MPI_H
#define COLOBRIDGE_MPI_H

#include <mpi.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <colobridge/bootstrap.h>
#include <colobridge/log.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Not for programs: what the all-gather needs. */
typedef struct colo_mpi_gather_ {
    MPI_Comm mpi;
    double seconds; /* the deadline */
} colo_mpi_gather_;

/* Not for programs: an all-gather for colo_bootstrap_t. @user: a colo_mpi_gather_. After the
 * deadline or an error MPI may still use @memory, which is never freed then. */
static inline colo_status_t colo_mpi_all_gather_(void *user, const void *send, void *recv,
                                                 size_t bytes)
{
    const colo_mpi_gather_ *gather = (const colo_mpi_gather_ *)user;
    MPI_Comm mpi = gather->mpi;
    MPI_Request request;
    int size = 0, done = 0, error, length = 0;
    char why[MPI_MAX_ERROR_STRING + 128] = "create_mpi: MPI_Iallgather: ", *memory;
    const double begin = MPI_Wtime();
    MPI_Comm_size(mpi, &size);
    memory = (char *)malloc(((size_t)size + 1) * bytes);
    if (!memory)
        return colo_bootstrap_fail(COLO_ERR_NOMEM, "create_mpi: no memory for an all-gather");
    memcpy(memory, send, bytes);
    error = MPI_Iallgather(memory, (int)bytes, MPI_BYTE, memory + bytes, (int)bytes, MPI_BYTE, mpi,
                           &request);
    while (error == MPI_SUCCESS && !done) {
        error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS || done)
            break;
        if (MPI_Wtime() - begin > gather->seconds) {
            snprintf(why, sizeof why,
                     "create_mpi: not all ranks of the communicator made the same call within %.0f "
                     "ms",
                     gather->seconds * 1e3);
            return colo_bootstrap_fail(COLO_ERR_TIMEOUT, why);
        }
        poll(NULL, 0, MPI_Wtime() - begin < 0.002 ? 0 : 1);
    }
    if (error != MPI_SUCCESS) {
        MPI_Error_string(error, why + strlen(why), &length);
        return colo_bootstrap_fail(COLO_ERR_MPI, why);
    }
    memcpy(recv, memory + bytes, (size_t)size * bytes);
    free(memory);
    return COLO_OK;
}

/**
 * colo_comm_create_mpi() - the world comm of the ranks of @mpi; collective over them
 * @mpi:    borrowed for the call, and independent of it afterwards
 * @config: of the world; borrowed for the call; NULL: defaults
 * @comm:   out, owned by the caller; needs MPI no more, also after MPI_Finalize()
 * Ranks:   comm rank and world rank are the rank in @mpi; smaller groups by colo_comm_split()
 * Errors:  COLO_ERR_STATE (MPI not initialised, or finalised), COLO_ERR_ARG (MPI_COMM_NULL, an
 *          inter-communicator), COLO_ERR_TIMEOUT (not all ranks came before the deadline: then
 *          MPI's all-gather stays pending, and @mpi cannot be used again), COLO_ERR_MPI, and those
 *          of colo_comm_create_bootstrap()
 */
static inline colo_status_t colo_comm_create_mpi(MPI_Comm mpi, const colo_comm_config_t *config,
                                                 colo_comm_t **comm)
{
    colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT};
    colo_status_t status;
    MPI_Errhandler before;
    colo_mpi_gather_ gather;
    bool set = false;
    const char *deadline = colo_env_value("COLO_TIMEOUT_MS", &set);
    int rank = 0, size = 0, initialized = 0, finalized = 0, inter = 0;
    if (!comm)
        return colo_bootstrap_fail(COLO_ERR_ARG, "create_mpi: comm is NULL");
    MPI_Finalized(&finalized);
    if (finalized)
        return colo_bootstrap_fail(COLO_ERR_STATE,
                                   "create_mpi: MPI has been finalized; make communicators between "
                                   "MPI_Init() and MPI_Finalize()");
    MPI_Initialized(&initialized);
    if (!initialized)
        return colo_bootstrap_fail(COLO_ERR_STATE,
                                   "create_mpi: MPI is not initialised; call MPI_Init() or "
                                   "MPI_Init_thread() first");
    if (mpi == MPI_COMM_NULL)
        return colo_bootstrap_fail(COLO_ERR_ARG, "create_mpi: the communicator is MPI_COMM_NULL");
    MPI_Comm_test_inter(mpi, &inter);
    if (inter)
        return colo_bootstrap_fail(COLO_ERR_ARG,
                                   "create_mpi: the communicator is an inter-communicator; merge "
                                   "it with MPI_Intercomm_merge() first");
    MPI_Comm_rank(mpi, &rank);
    MPI_Comm_size(mpi, &size);
    bootstrap.rank = rank;
    bootstrap.size = size;
    bootstrap.all_gather = colo_mpi_all_gather_;
    bootstrap.user = &gather;
    bootstrap.config = config;
    /* A wrong value is refused on all ranks once they are connected. */
    gather.mpi = mpi;
    gather.seconds = !set && config && config->timeout_ms > 0 ? (double)config->timeout_ms / 1e3
                     : colo_env_check("COLO_TIMEOUT_MS") == COLO_OK
                         ? (double)strtoll(deadline, NULL, 10) / 1e3
                         : 600;
    MPI_Comm_get_errhandler(mpi, &before);
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN); /* else MPI ends the job */
    status = colo_comm_create_bootstrap(&bootstrap, comm);
    MPI_Comm_set_errhandler(mpi, before);
    MPI_Errhandler_free(&before);
    return status;
}

#ifdef __cplusplus
}
#endif
#endif
