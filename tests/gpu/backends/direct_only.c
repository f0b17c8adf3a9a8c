/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct_only.c - libcolobridge-directonly.so, a backend for tests: comms of GPUs without NCCL,
 * which carry bridges over registered memory and nothing else.
 *
 * Ranks may share a device, so that the direct path runs where there is one GPU, under a
 * memory checker, too. Every operation that moves data by itself returns COLO_ERR_UNBUILT. There is
 * no watchdog: a kernel that waits ends at its deadline, or when a thread asks for the comm's
 * state and the comm is dead.
 */
#include "comm/direct/registry.h"

#include "comm/error-state.h"
#include "core/backend.h"
#include "core/error.h"

#include <stdlib.h>

struct direct_only {         /* colo_comm.impl */
    colo_direct_base_t base; /* first */
    colo_error_state_t error;
    colo_comm_t *control; /* owned */
};

static colo_status_t refuse(const colo_comm_t *c)
{
    char what[96];
    return colo_fail(COLO_ERR_UNBUILT, "%s: comm '%s' has no NCCL",
                     colo_op_describe(what, sizeof what, c->op, c->seq), c->name);
}

static colo_status_t direct_only_collective(colo_comm_t *c, const void *send, void *recv,
                                            colo_stream_t stream)
{
    return refuse(c);
}

static colo_status_t direct_only_exchange(colo_comm_t *c, const colo_exchange_t *exchange,
                                          colo_stream_t stream)
{
    return exchange->nsends || exchange->nrecvs ? refuse(c) : COLO_OK;
}

static colo_status_t direct_only_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                        uint64_t tag, colo_comm_t *child)
{
    return refuse(parent);
}

static void direct_only_fail(colo_comm_t *c, colo_status_t status, const char *error_message)
{
    struct direct_only *x = c->impl;
    char why[900];
    if (x->control->backend->state(x->control, why, sizeof why) == COLO_OK)
        x->control->backend->fail(x->control, status, error_message);
    colo_error_state_set(&x->error, status, -1, -1, error_message);
    colo_direct_stop(atomic_load(&x->base.direct));
}

static colo_status_t direct_only_state(const colo_comm_t *c, char *error_message, size_t cap)
{
    struct direct_only *x = c->impl;
    colo_status_t st = colo_error_state_notify(&x->error, c->rank, error_message, cap);
    if (st == COLO_OK &&
        (st = colo_direct_check(atomic_load(&x->base.direct), error_message, cap)) < 0) {
        x->control->backend->fail(x->control, st, error_message);
        colo_error_state_set(&x->error, st, -1, -1, error_message);
    }
    if (st == COLO_OK)
        st = x->control->backend->state(x->control, error_message, cap);
    if (st < 0)
        colo_direct_stop(atomic_load(&x->base.direct));
    return st;
}

static void direct_only_destroy(colo_comm_t *c)
{
    struct direct_only *x = c->impl;
    char error_message[900];
    (void)direct_only_state(c, error_message, sizeof error_message);
    colo_direct_drop(atomic_load(&x->base.direct));
    colo_comm_destroy(&x->control);
    colo_error_state_fini(&x->error);
    free(x);
    c->impl = NULL;
}

static const colo_comm_backend_t direct_only; /* below */

static colo_status_t create(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                            colo_comm_t **comm)
{
    colo_comm_t *c = NULL;
    struct direct_only *x = calloc(1, sizeof *x);
    colo_status_t st =
        x ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "direct-only comm: %zu bytes", sizeof *x);
    if (st == COLO_OK)
        st = colo_comm_new(&c, &direct_only, control->rank, control->size, control->world_rank);
    st = colo_comm_agree(control, "direct-only comm", 0, st);
    if (st < 0) {
        free(x);
        colo_comm_destroy(&c);
        colo_comm_destroy(&control);
        return st;
    }
    colo_error_state_init(&x->error);
    x->base.device = device;
    x->control = control;
    c->impl = x;
    c->control = control;
    c->timeout_ms = colo_comm_timeout(control);
    *comm = c;
    return COLO_OK;
}

static const colo_comm_backend_t direct_only = {
    .name = "directonly",
    .collective = direct_only_collective,
    .exchange = direct_only_exchange,
    .subset = direct_only_subset,
    .fail = direct_only_fail,
    .state = direct_only_state,
    .destroy = direct_only_destroy,
    .direct = &colo_direct_table,
    .create = create,
};

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("directonly"),
    .comm = &direct_only,
};
