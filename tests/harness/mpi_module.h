/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_module.h - what test programs ask of MPI; in a module, so that they need not link it. */
#ifndef TESTS_HARNESS_MPI_MODULE_H
#define TESTS_HARNESS_MPI_MODULE_H

#include <stddef.h>

#define T_MPI_SYMBOL "t_mpi"

typedef struct t_mpi {
    int rank, size; /* after init() */
    int (*init)(void);
    void (*finalize)(void);
    /* A colo_mpi_handle_t of a communicator of ranks 0..n-1; NULL on others. Collective. */
    const void *(*handle)(int n, size_t *bytes);
    void (*all_gather)(const void *send, void *recv, size_t bytes);
} t_mpi_t;

#endif
