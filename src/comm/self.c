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
#include <string.h>

static void copy(void *recv, const void *send, size_t bytes)
{
    if (bytes && recv != send)
        memmove(recv, send, bytes);
}

static colo_status_t self_all_gather(colo_comm_t *comm, const void *send, void *recv, size_t bytes,
                                     colo_stream_t stream)
{
    copy(recv, send, bytes);
    return COLO_OK;
}

/* serves all_reduce and reduce_scatter: the reduction over one rank is its value */
static colo_status_t self_reduce(colo_comm_t *comm, const void *send, void *recv, int64_t count,
                                 colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    copy(recv, send, (size_t)count * colo_dtype_size(dtype));
    return COLO_OK;
}

static colo_status_t self_broadcast(colo_comm_t *comm, void *buffer, size_t bytes, int32_t root,
                                    colo_stream_t stream)
{
    return COLO_OK;
}

static colo_status_t self_barrier(colo_comm_t *comm, colo_stream_t stream)
{
    return COLO_OK;
}

/* comm.c refuses messages to self and to ranks >= size: the lists are empty */
static colo_status_t self_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                   colo_stream_t stream)
{
    return COLO_OK;
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
    .all_gather = self_all_gather,
    .all_reduce = self_reduce,
    .reduce_scatter = self_reduce,
    .broadcast = self_broadcast,
    .barrier = self_barrier,
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
