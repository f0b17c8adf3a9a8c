/* SPDX-License-Identifier: Apache-2.0 */
/*
 * self.c - a comm of one rank, where an interface wants a group and the group has size 1.
 *
 * Every collective is a copy of the caller's buffer or nothing. Works without threads, MPI or a
 * GPU; its children are comms of one rank as well, each with an error state of its own, because
 * no other rank waits here.
 */
#include "comm/comm.h"
#include "comm/error-state.h"
#include "core/env.h"
#include "core/error.h"

#include <stdlib.h>

/* comm.c refuses messages to self and to ranks >= size: the lists are empty */
static colo_status_t self_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                   colo_stream_t stream)
{
    return COLO_OK;
}

static colo_status_t self_collective(colo_comm_t *comm, const void *send, void *recv,
                                     colo_stream_t stream)
{
    return colo_host_collective(comm, send, recv, self_exchange);
}

static colo_status_t attach(colo_comm_t *comm)
{
    colo_error_state_t *error = malloc(sizeof *error);
    COLO_FAIL_IF(!error, COLO_ERR_NOMEM, "comm of one rank: %zu bytes", sizeof *error);
    colo_error_state_init(error);
    comm->impl = error;
    return COLO_OK;
}

static colo_status_t self_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                 uint64_t tag, colo_comm_t *child)
{
    return attach(child);
}

static void self_fail(colo_comm_t *comm, colo_status_t status, const char *error_message)
{
    colo_error_state_set(comm->impl, status, -1, -1, error_message);
}

static colo_status_t self_state(const colo_comm_t *comm, char *error_message, size_t cap)
{
    return colo_error_state_notify(comm->impl, 0, error_message, cap);
}

static void self_destroy(colo_comm_t *comm)
{
    colo_error_state_fini(comm->impl);
    free(comm->impl);
    comm->impl = NULL;
}

const colo_comm_ops_t colo_comm_self_ops = {
    .name = "self",
    .abi = COLO_COMM_ABI,
    .collective = self_collective,
    .exchange = self_exchange,
    .subset = self_subset,
    .fail = self_fail,
    .state = self_state,
    .destroy = self_destroy,
};

colo_status_t colo_comm_create_self(colo_comm_t **comm)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "create_self: comm is NULL");
    colo_comm_t *made = NULL;
    COLO_TRY(colo_env_check(NULL));
    COLO_TRY(colo_comm_i_new(&made, &colo_comm_self_ops, 0, 1, NULL));
    colo_status_t st = attach(made);
    if (st < 0) {
        colo_comm_destroy(&made);
        return st;
    }
    colo_comm_set_name(made, "self");
    *comm = made;
    return COLO_OK;
}
