/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h (private) - libcolobridge-<name>.so: what it exports and how it is found.
 *
 * A backend library defines one data symbol, `colo_backend` of type colo_backend_t. Everything else
 * it offers hangs from there. It links libcolobridge.so, public functions and those that are
 * COLO_FOR_MODULES (error.h); libcolobridge.so itself links none of CUDA, NCCL or MPI. A program
 * that links the library statically must export these functions (colo_static_dep in
 * src/meson.build), so that the backend finds the program's copy and not libcolobridge.so's.
 */
#ifndef COLO_CORE_BACKEND_H
#define COLO_CORE_BACKEND_H

#include "core/device.h"
#include "core/error.h"

#include <colobridge/version.h>

struct colo_comm_backend;      /* comm/comm.h */
struct colo_loss_kernels;      /* loss/loss.h */
struct colo_process_transport; /* comm/process/transport.h */

#define COLO_BACKEND_ABI 16u /* of this table and of those that it points to */
#define COLO_BACKEND_SYMBOL "colo_backend"

typedef struct colo_backend {
    uint32_t abi;     /* first for ever: COLO_BACKEND_ABI it was compiled with */
    uint32_t version; /* colo_version_number() it was compiled for */
    const char *name; /* the <name> of its file */
    const struct colo_comm_backend *comm;           /* NULL: no communicator */
    const colo_device_t *device;                    /* NULL: no copies and no sums */
    const struct colo_loss_kernels *loss;           /* NULL: no losses */
    const struct colo_process_transport *transport; /* NULL: no transport between processes */
    /* colo_fail() as the backend calls it; another one than the loader's belongs to a second copy
     * of the library in the process, whose errors and communicators the first knows nothing of */
    colo_status_t (*fail)(colo_status_t status, const char *fmt, ...);
} colo_backend_t;

/* What every table begins with. */
#define COLO_BACKEND_INIT(name_)                                                        \
    .abi = COLO_BACKEND_ABI,                                                            \
    .version = COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | COLO_VERSION_PATCH, \
    .name = name_, .fail = colo_fail

/*
 * The backend of that name, loaded on first use from COLO_BACKEND_DIR, else from next to the
 * library; stays loaded. Any thread. A failure is not remembered: the next call tries again.
 * COLO_ERR_UNBUILT with what to do: no such file, no symbol, other abi, other version, other name,
 * other copy of the library.
 * COLO_ERR_ARG: @name is not 1..16 of [a-z0-9].
 */
colo_status_t colo_backend_load(const char *name, const colo_backend_t **backend);

#endif
