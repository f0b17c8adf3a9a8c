/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bootstrap.c - what all-gathers of a bootstrap are made of: any comm, which is how ranks of all
 * kinds hand out a unique id, and an error message; and what the ranks of a new world agree on.
 */
#include <colobridge/bootstrap.h>

#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"

#include <colobridge/version.h>

#include <stdlib.h>

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
    COLO_FAIL_IF(!comm || !bootstrap, COLO_ERR_ARG, "bootstrap_from_comm: %s is NULL",
                 comm ? "bootstrap" : "comm");
    *bootstrap =
        (colo_bootstrap_t){colo_comm_rank(comm), colo_comm_size(comm), gather_over_comm, comm};
    return COLO_OK;
}

colo_status_t colo_comm_i_agree_environment(colo_comm_t *world, const char *what, double begin,
                                            bool *agreed)
{
    const int64_t left_ms = world->timeout_ms - (int64_t)((colo_now() - begin) * 1e3);
    const int32_t n = world->size;
    colo_comm_t *all = NULL;
    uint64_t mine;
    colo_fields_t fields = {COLO_FIELDS_INIT};
    COLO_AUTOFREE int32_t *members = malloc((size_t)n * sizeof *members);
    COLO_AUTOFREE uint64_t *id = malloc((size_t)n * sizeof *id);
    for (int32_t r = 0; members && r < n; r++)
        members[r] = r;
    colo_status_t st =
        members && id ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "%s: %d ranks", what, (int)n);
    COLO_THEN(st, colo_comm_i_child(world, members, n, 0, what, &all)); /* splits count from 1 */
    if (st == COLO_OK)
        all->timeout_ms = left_ms > 1 ? left_ms : 1; /* all of create has one deadline */
    if (st == COLO_OK) {
        st = colo_env_check(NULL);
        COLO_THEN(st, colo_node_id(world->rank, n, &mine));
        colo_fields_add(&fields, "library version", "%s", colo_version());
        st = colo_comm_i_agree_fields(all, what, &fields, st);
    }
    COLO_THEN(st, colo_comm_i_gather(all, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &mine, id, 1));
    COLO_THEN(st, colo_comm_i_set_nodes(world, id));
    *agreed = st == COLO_OK || (all && colo_comm_check(all) == COLO_OK);
    colo_comm_destroy(&all);
    return st;
}
