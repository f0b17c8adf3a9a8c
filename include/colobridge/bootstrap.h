/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bootstrap.h - communicators between processes, from the caller's all-gather.
 *
 * A program that can give every rank the same few bytes of every other rank can make a
 * communicator: with a launcher's key-value store, a pipe to a parent process, a file, or another
 * communicator. The library calls the callback while it makes the comm, and never after that. It
 * must not throw (status.h).
 */
#ifndef COLOBRIDGE_BOOTSTRAP_H
#define COLOBRIDGE_BOOTSTRAP_H

#include <colobridge/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How ranks that share nothing yet find each other. A value; borrowed while it is used. Members from
 * user on have defaults: NULL. */
typedef struct colo_bootstrap_t {
    size_t struct_size;
    int32_t rank, size;
    /* Every rank brings @bytes, the same number on all, and gets those of rank r at
     * recv + r * bytes. COLO_OK or a status < 0, which is handed up; colo_bootstrap_fail() gives it
     * an error message. It keeps its own deadline. */
    colo_status_t (*all_gather)(void *user, const void *send, void *recv, size_t bytes);
    void *user;
    const colo_comm_config_t *config; /* of the world; borrowed for the call; NULL: defaults */
} colo_bootstrap_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_BOOTSTRAP_INIT sizeof(colo_bootstrap_t), 0, 0, nullptr, nullptr, nullptr
#else
#define COLO_BOOTSTRAP_INIT .struct_size = sizeof(colo_bootstrap_t)
#endif

/**
 * colo_comm_create_bootstrap() - a world comm of processes that talk over Unix sockets and
 * UCX; collective
 * @comm:   out, owned by the caller. Pairs of one host and network namespace use Unix sockets. The
 *          others use UCX, which each rank must have then. There are two all-gathers, and a third
 *          one for UCX. The deadline (COLO_TIMEOUT_MS) begins at the end of the last, so a rank may
 *          be late by less than the deadline
 * Threads: one thread at a time uses all comms made from it; any thread may abort, check and dump
 * Failure: if a process dies, all other ranks get COLO_ERR_PEER at once
 * Errors:  COLO_ERR_ARG, COLO_ERR_MISMATCH (ranks have different sizes, levels of COLO_CHECK, or
 *          versions of the library),
 *          COLO_ERR_TIMEOUT (COLO_TIMEOUT_MS), COLO_ERR_IO (too few descriptors), COLO_ERR_NOMEM,
 *          COLO_ERR_UNBUILT (several hosts, and this rank has no UCX), COLO_ERR_PEER (another rank
 *          failed), and the status that the callback returned
 */
COLO_API colo_status_t colo_comm_create_bootstrap(const colo_bootstrap_t *bootstrap,
                                                  colo_comm_t **comm);

/**
 * colo_bootstrap_from_comm() - use any communicator (threads, processes) as a bootstrap
 * @comm:       borrowed as long as @bootstrap is used. Its statistics count the all-gathers, and
 *              its deadline holds for them
 * @bootstrap:  out, a value that the caller owns; COLO_BOOTSTRAP_INIT before
 * Errors:      COLO_ERR_ARG
 */
COLO_API colo_status_t colo_bootstrap_from_comm(colo_comm_t *comm, colo_bootstrap_t *bootstrap);

/**
 * colo_bootstrap_fail() - for all-gather callbacks: returns @status, and @error_message becomes
 * colo_last_error() of this thread
 */
COLO_API colo_status_t colo_bootstrap_fail(colo_status_t status, const char *error_message);

#ifdef __cplusplus
}
#endif
#endif
