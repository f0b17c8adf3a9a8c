/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bootstrap.c - what all-gathers of a bootstrap are made of: any comm, which is how ranks of all
 * kinds hand out a unique id, and an error message.
 */
#include <colobridge/bootstrap.h>

#include "comm/comm.h"
#include "core/error.h"

colo_status_t colo_bootstrap_fail(colo_status_t status, const char *error_message)
{
    return colo_fail(status, "%s", error_message ? error_message : "");
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
