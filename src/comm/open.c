/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - the ways into a communicator between processes, but for the sockets' own.
 *
 * A backend library offers a transport; what becomes a comm of it is group.c, in the library
 * itself. Any comm can be a bootstrap, which is how MPI ranks and threads hand out a unique id.
 */
#include <colobridge/bootstrap.h>

#include "comm/process/group.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/error.h"

#include <string.h>

colo_status_t colo_comm_create_backend(const char *backend, const void *handle, size_t bytes,
                                       colo_comm_t **comm)
{
    if (!comm)
        return colo_fail(COLO_ERR_ARG, "create_backend: comm is NULL");
    const colo_backend_t *b = NULL;
    COLO_TRY(colo_backend_load(backend, &b));
    if (!b->transport || !b->transport->open)
        return colo_fail(COLO_ERR_UNBUILT,
                         "create_backend: backend '%s' offers no communicator that opens this way",
                         backend);
    if (b->transport->abi != COLO_TRANSPORT_ABI)
        return colo_fail(COLO_ERR_UNBUILT,
                         "create_backend: backend '%s' has transport interface %u, this library has %u; "
                         "install both from the same build",
                         backend, (unsigned)b->transport->abi, COLO_TRANSPORT_ABI);
    colo_transport_open_t open = {.transport = NULL};
    colo_comm_t *world = NULL;
    int64_t timeout_ms;
    const double begin = colo_now();
    (void)colo_env_i64("COLO_TIMEOUT_MS", &timeout_ms); /* refused below, on all ranks */
    colo_status_t st = b->transport->open(handle, bytes, timeout_ms, &open);
    if (st < 0)
        return colo_fail(st, "%s", open.why);
    COLO_TRY(colo_process_comm(
        strcmp(backend, "ucx") == 0 ? &colo_comm_ucx_ops : &colo_comm_mpi_ops, b->transport,
        open.transport, open.rank, open.size, open.any_thread, &world));
    return colo_process_agree(world, "create_backend", begin, comm);
}

static colo_status_t gather_over_comm(void *user, const void *send, void *recv, size_t bytes)
{
    return colo_comm_all_gather(user, send, recv, (int64_t)bytes, COLO_U8, NULL);
}

colo_status_t colo_bootstrap_from_comm(colo_comm_t *comm, colo_bootstrap_t *bootstrap)
{
    if (!comm || !bootstrap)
        return colo_fail(COLO_ERR_ARG, "bootstrap_from_comm: %s is NULL",
                         comm ? "bootstrap" : "comm");
    *bootstrap =
        (colo_bootstrap_t){colo_comm_rank(comm), colo_comm_size(comm), gather_over_comm, comm};
    return COLO_OK;
}
