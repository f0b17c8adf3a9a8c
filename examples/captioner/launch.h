/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.h - ranks that are processes started by mpirun.
 *
 * mpi/launch-mpi.c where MPI was found, launch-none.c elsewhere. The rank code is the same: it
 * knows its world communicator and nothing else.
 */
#ifndef EXAMPLES_CAPTIONER_LAUNCH_H
#define EXAMPLES_CAPTIONER_LAUNCH_H

#include <colobridge.h>

/** cap_mpi_begin() - MPI_Init; returns false, with one line in @why, when this build has no MPI */
bool cap_mpi_begin(int *argc, char ***argv, int *rank, int *size, char *why, size_t why_size);
/** cap_mpi_run() - @fn on this process's rank; binds it first when COLO_BIND asks */
colo_status_t cap_mpi_run(colo_rank_fn fn, void *arg);
/** cap_mpi_end() - MPI_Finalize; after a failure MPI_Abort, since peers may not come */
void cap_mpi_end(bool failed);

#endif
