/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bootstrap.h - communicators between processes: from a user's all-gather, or from a backend
 * library.
 *
 * Whoever can give every rank the same few bytes of every other rank can have a communicator: a
 * launcher's key-value store, a pipe to a parent, a file, another communicator. The callback is
 * used while the comm is made and never after.
 */
#ifndef COLOBRIDGE_BOOTSTRAP_H
#define COLOBRIDGE_BOOTSTRAP_H

#include <colobridge/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How ranks that share nothing yet find each other. A value; borrowed while it is used. */
typedef struct colo_bootstrap {
    int32_t rank, size;
    /* Every rank brings @bytes, the same number on all, and gets those of rank r at
     * recv + r * bytes. COLO_OK or a status < 0, which is handed up. It keeps its own deadline. */
    colo_status_t (*all_gather)(void *user, const void *send, void *recv, size_t bytes);
    void *user;
} colo_bootstrap_t;

/**
 * colo_comm_create_bootstrap() - a world comm of processes that talk over sockets; collective
 * @comm:   out, owned by the caller. Ranks of one host and network namespace use Unix sockets,
 *          others TCP to whichever of the peer's addresses answers. One all-gather; the deadline
 *          (COLO_TIMEOUT_MS) counts from its end, and a rank may be late by anything below it.
 * Threads: all comms made from it are used by one thread at a time; abort, check and dump by any
 * Failure: a process that dies is COLO_ERR_PEER on all others at once
 * Errors:  COLO_ERR_ARG, COLO_ERR_MISMATCH (another size or version on a rank), COLO_ERR_TIMEOUT
 *          (COLO_TIMEOUT_MS), COLO_ERR_IO (too few descriptors), COLO_ERR_NOMEM, COLO_ERR_PEER
 *          (another rank failed), and what the callback returned
 */
COLO_API colo_status_t colo_comm_create_bootstrap(const colo_bootstrap_t *bootstrap,
                                                  colo_comm_t **comm);

/**
 * colo_bootstrap_from_comm() - any communicator as a bootstrap: threads, MPI, sockets
 * @comm:   borrowed as long as @bootstrap is used; its all-gathers count there, with its deadline
 */
COLO_API colo_status_t colo_bootstrap_from_comm(colo_comm_t *comm, colo_bootstrap_t *bootstrap);

/**
 * colo_comm_create_backend() - a world comm of a backend library, from that backend's own handle;
 * collective Use the typed calls of the opt-in headers: <colobridge/mpi.h> for "mpi". Errors:
 * COLO_ERR_UNBUILT (no such library), COLO_ERR_ARG, and what the backend says
 */
COLO_API colo_status_t colo_comm_create_backend(const char *backend, const void *handle,
                                                size_t bytes, colo_comm_t **comm);

#ifdef __cplusplus
}
#endif
#endif
