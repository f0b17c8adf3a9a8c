/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h (private) - libcolobridge-<name>.so: what it exports and how it is found.
 *
 * A backend library defines one data symbol, `colo_backend` of type colo_backend_t. Everything else
 * it offers hangs from there. libcolobridge.so itself links none of CUDA, NCCL or MPI.
 */
#ifndef COLO_CORE_BACKEND_H
#define COLO_CORE_BACKEND_H

#include "comm/comm.h"
#include "core/device.h"

struct colo_loss_ops; /* loss/loss.h */
struct colo_wire_ops; /* comm/process/transport.h */
struct colo_services; /* comm/gpu.h */

#define COLO_BACKEND_ABI 12u
#define COLO_BACKEND_SYMBOL "colo_backend"

/* A backend links nothing of the library. One whose calls explain themselves by colo_last_error()
 * also exports a variable of this name and type; the loader points it at colo_fail() (error.h). */
#define COLO_BACKEND_FAIL_SYMBOL "colo_backend_fail"
typedef colo_status_t (*colo_fail_fn)(colo_status_t status, const char *fmt, ...);

typedef struct colo_backend {
    uint32_t abi;                     /* first for ever: COLO_BACKEND_ABI it was compiled with */
    uint32_t version;                 /* colo_version_number() it was compiled for */
    const char *name;                 /* the <name> of its file */
    const colo_comm_ops_t *comm;      /* NULL: no communicator */
    const colo_ops_t *ops;            /* NULL: no element passes */
    const struct colo_loss_ops *loss; /* NULL: no losses */
    const struct colo_wire_ops *wire; /* NULL: no transport between processes */
    /* NULL: needs nothing of the library. Else called before anything of comm, which then may. */
    void (*bind)(const struct colo_services *services);
} colo_backend_t;

/*
 * The backend of that name, loaded on first use from COLO_BACKEND_DIR, else from beside the
 * library; stays loaded. Any thread. A failure is not remembered: the next call tries again.
 * COLO_ERR_UNBUILT with what to do: no such file, no symbol, other abi, other version, other name.
 * COLO_ERR_ARG: @name is not 1..16 of [a-z0-9].
 */
colo_status_t colo_backend_load(const char *name, const colo_backend_t **backend);

#endif
