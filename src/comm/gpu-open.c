/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu-open.c - the library's half of communicators between GPUs: load the backend, give it a host
 * communicator of its own for control, let it make the rest.
 *
 * A rank that cannot (no backend library, no NCCL) says so over the parent before any rank waits in
 * NCCL. Everything that touches CUDA or NCCL is in the backend library (nccl/comm.c).
 */
#include <colobridge/nccl.h>

#include "comm/comm.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/error.h"

colo_status_t colo_gpu_load(const char *name, const colo_comm_backend_t **backend)
{
    const colo_backend_t *b = NULL;
    COLO_TRY(colo_backend_load(name, &b));
    COLO_FAIL_IF(!b->comm || !b->comm->create, COLO_ERR_UNBUILT,
                 "backend '%s' offers no communicator between GPUs", name);
    *backend = b->comm;
    return COLO_OK;
}

static colo_status_t open_on(colo_comm_t *parent, struct ncclComm *borrowed, int32_t device,
                             colo_comm_t **comm, colo_status_t mine)
{
    COLO_TRY(colo_comm_alive(parent, "nccl create"));
    const colo_comm_backend_t *backend = NULL;
    COLO_THEN(mine, colo_env_check(NULL));
    if (mine == COLO_OK && !comm)
        mine = colo_fail(COLO_ERR_ARG, "nccl create: comm is NULL");
    COLO_THEN(mine, colo_gpu_load("nccl", &backend));
    /* also at COLO_CHECK=0: a rank that waits in NCCL cannot be told */
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_fields_add(&fields, "ncclComm_t", "%s", borrowed ? "given" : "none");
    COLO_TRY(colo_comm_agree_fields(parent, "nccl create", &fields, mine));
    colo_comm_t *host = parent->control ? parent->control : parent, *control = NULL;
    COLO_TRY(colo_comm_split_color_for(host, COLO_CATEGORY_USER, 0, host->rank, &control));
    colo_comm_set_name(control, "control");
    control->check = 0; /* what it carries is the check */
    control->timeout_ms = colo_comm_timeout(parent);
    /* All ranks that a context can have are looked at, whatever groups they then make: a kernel
     * that loads waits for operations of other groups, too, on any device of the process
     * (operation.c). */
    bool share = false;
    colo_status_t st = colo_comm_find_shared_process(control, &share);
    if (st < 0) {
        colo_comm_destroy(&control);
        return st;
    }
    COLO_TRY(backend->create(control, borrowed, device, comm));
    (*comm)->share_process = share || parent->share_process;
    (*comm)->check = parent->check;
    (*comm)->transport = parent->transport;
    colo_comm_set_recorder(*comm, parent->recorder);
    return COLO_OK;
}

colo_status_t colo_comm_create_nccl(colo_comm_t *parent, int32_t device, colo_comm_t **comm)
{
    return open_on(parent, NULL, device, comm, COLO_OK);
}

colo_status_t colo_comm_create_nccl_borrowed(struct ncclComm *nccl, colo_comm_t *parent,
                                             colo_comm_t **comm)
{
    return open_on(parent, nccl, -1, comm,
                   nccl ? COLO_OK : colo_fail(COLO_ERR_ARG, "create_nccl_borrowed: nccl is NULL"));
}
