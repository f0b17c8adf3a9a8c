/* SPDX-License-Identifier: Apache-2.0 */
/*
 * self.c - a comm of one rank, where an interface wants a group and the group has size 1.
 *
 * It is a run of one thread, the caller's, which works without MPI or a GPU; its children are comms
 * of one rank as well.
 */
#include "comm/threads/threads.h"
#include "core/env.h"
#include "core/error.h"

colo_status_t colo_comm_create_self(colo_comm_t **comm)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "create_self: comm is NULL");
    colo_comm_t *made = NULL;
    COLO_TRY(colo_env_check(NULL));
    COLO_TRY(colo_comm_i_new(&made, &colo_comm_self_ops, 0, 1, NULL));
    struct colo_shared *shared = colo_shared_of_run(1);
    colo_status_t st = shared ? colo_shared_attach(made, shared)
                              : colo_fail(COLO_ERR_NOMEM, "comm of one rank: no memory");
    if (st < 0) {
        colo_comm_destroy(&made);
        return st;
    }
    colo_comm_set_name(made, "self");
    *comm = made;
    return COLO_OK;
}
