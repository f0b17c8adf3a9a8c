/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.c - communicators between GPUs: how they are made, fail and end.
 *
 * Making one from a host communicator connects no rank: its first collective does, so a world that
 * is there to be split costs no world-size ncclComm_t. Smaller groups and subconnections are made
 * to be used and connect at once.
 *
 * Left to others: connecting (connection.c), what comms share (context.c), deadlines and tearing
 * down (watchdog.c), operations (nccl/collectives.c), finding NCCL (loader.c), arguments
 * (comm/collectives.c).
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "core/backend.h"
#include "core/error.h"
#include "core/list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

colo_status_t colo_nccl_error(const colo_nccl_lib_t *lib, const char *what, ncclResult_t r)
{
    const char *more = lib->last_error ? lib->last_error(NULL) : "";
    return colo_fail(COLO_ERR_NCCL, "%s: NCCL says: %s%s%.600s", what,
                     lib->error_string ? lib->error_string(r) : "an error",
                     more && more[0] ? "; " : "", more ? more : "");
}

/* ---- failure ---- */

colo_status_t colo_nccl_control_state(const struct colo_nccl_group *x, char *error_message,
                                      size_t cap)
{
    return x->control ? x->control->backend->state(x->control, error_message, cap) : COLO_OK;
}

colo_status_t colo_nccl_state(const colo_comm_t *c, char *error_message, size_t cap)
{
    const struct colo_nccl_group *x = c->impl;
    colo_status_t st = colo_error_state_notify(&x->error, x->rank, error_message, cap);
    /* the rank that checks sets its error state */
    COLO_THEN(st, colo_nccl_check_peer((struct colo_nccl_group *)c->impl, error_message, cap));
    return st != COLO_OK ? st : colo_nccl_control_state(x, error_message, cap);
}

colo_status_t colo_nccl_check_peer(struct colo_nccl_group *x, char *error_message, size_t cap)
{
    colo_status_t st = colo_direct_check(atomic_load(&x->base.direct), error_message, cap);
    if (st < 0)
        colo_nccl_set_error(x, st, error_message);
    return st;
}

void colo_nccl_set_error(struct colo_nccl_group *x, colo_status_t status, const char *error_message)
{
    char why[900];
    if (colo_nccl_control_state(x, why, sizeof why) == COLO_OK)
        x->control->backend->fail(x->control, status, error_message);
    colo_error_state_set(&x->error, status, -1, -1, error_message);
}

void colo_nccl_fail(colo_comm_t *c, colo_status_t status, const char *error_message)
{
    struct colo_nccl_group *x = c->impl;
    colo_nccl_set_error(x, status, error_message);
    pthread_cond_signal(&x->context->wake);
}

/* ---- comms ---- */

/* Before ranks agree: behind that the others would wait for one that has no memory. */
static colo_status_t group_new(struct colo_nccl_group **x)
{
    *x = calloc(1, sizeof **x);
    return *x ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof **x);
}

/* Takes @x and @control. */
static void attach(struct colo_nccl_group *x, colo_comm_t *c, struct colo_nccl_context *f,
                   struct colo_connection *l, colo_comm_t *control)
{
    colo_error_state_init(&x->error);
    x->base.device = f->device;
    x->base.order = f->order; /* as long as the context */
    x->context = f;
    x->comm = c;
    x->connection = l;
    x->rank = c->rank;
    x->control = control;
    c->impl = x;
    c->control = control;
    COLO_HOLD(&f->lock);
    f->timeout_ms = colo_comm_timeout(c);
    x->id = ++f->ids;
    x->next = f->group;
    f->group = x;
    f->live++;
}

colo_status_t colo_nccl_subset(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                               colo_comm_t *child)
{
    struct colo_nccl_context *f = ((struct colo_nccl_group *)parent->impl)->context;
    colo_comm_t *control = NULL;
    struct colo_nccl_group *x = NULL;
    COLO_TRY(group_new(&x));
    const colo_status_t st =
        colo_comm_child(colo_comm_control(parent), members, n, tag, "control", &control);
    if (st < 0) {
        free(x);
        return st;
    }
    attach(x, child, f, NULL, control);
    return COLO_OK;
}

colo_status_t colo_nccl_connect(colo_comm_t *c)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_connection *l = NULL;
    COLO_TRY(colo_nccl_connection_get(x->context, colo_comm_control(c), NULL, &l));
    COLO_HOLD(&x->context->lock);
    x->connection = l;
    return COLO_OK;
}

/* Under the context's lock. */
static void leave(const struct colo_nccl_group *x, struct colo_connection *l)
{
    l->left_by = x->id;
    l->left_ms = colo_comm_timeout(x->comm);
}

void colo_nccl_destroy(colo_comm_t *c)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_nccl_context *f = x->context;
    char error_message[900];
    bool dead = colo_nccl_state(c, error_message, sizeof error_message) != COLO_OK;
    if (dead)
        colo_direct_stop(atomic_load(&x->base.direct));
    /* This may wait for the stream: as long as the watchdog knows of what the stream waits for. */
    colo_gathers_destroy(&x->gather);
    dead = dead || colo_nccl_state(c, error_message, sizeof error_message) != COLO_OK;
    if (dead)
        colo_direct_stop(atomic_load(&x->base.direct));
    pthread_mutex_lock(&f->lock);
    COLO_UNLINK(f->group, x);
    if (x->connection)
        leave(x, x->connection);
    while (dead && colo_nccl_abort_next(f, x))
        ;
    bool last = --f->live == 0;
    f->timeout_ms = colo_comm_timeout(c);
    pthread_mutex_unlock(&f->lock);
    colo_nccl_connection_put(f, x->connection);
    if (last)
        colo_nccl_context_destroy(f, true);
    colo_direct_drop(atomic_load(&x->base.direct));
    colo_comm_destroy(&x->control);
    colo_error_state_fini(&x->error);
    free(x);
    c->impl = NULL;
}

/* ---- subconnections ---- */

/* A member that fails before it has @control cannot tell the others over it. It fails the comm, and
 * the watchdogs end the wait over @control. */
static void be_connecting(struct colo_nccl_group *x, colo_comm_t *control)
{
    COLO_HOLD(&x->context->lock);
    x->connecting = control;
}

colo_status_t colo_nccl_subconnection_create(colo_comm_t *c, const int32_t *members, int32_t n,
                                             uint64_t tag, colo_subconnection_t **subconnection)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_nccl_context *f = x->context;
    colo_comm_t *control = NULL;
    colo_subconnection_t *r = calloc(1, sizeof *r);
    int32_t *mine = malloc((size_t)n * sizeof *mine);
    colo_status_t st = COLO_OK;
    if (!r || !mine) {
        st = colo_fail(COLO_ERR_NOMEM, "nccl: a subconnection of %d ranks", (int)n);
        goto fail;
    }
    memcpy(mine, members, (size_t)n * sizeof *mine);
    r->members = mine;
    r->n = n;
    COLO_TRY_GOTO(st, colo_comm_child(colo_comm_control(c), members, n, tag, "control", &control),
                  fail);
    be_connecting(x, control);
    st = colo_nccl_connection_get(f, control, NULL, &r->connection);
    be_connecting(x, NULL);
    COLO_TRY_GOTO(st, st, fail);
    colo_comm_destroy(&control);
    pthread_mutex_lock(&f->lock);
    r->next = x->subconnection;
    x->subconnection = r;
    pthread_mutex_unlock(&f->lock);
    *subconnection = r;
    return COLO_OK;
fail:
    colo_comm_destroy(&control);
    free(mine);
    free(r);
    return st;
}

void colo_nccl_subconnection_destroy(colo_comm_t *c, colo_subconnection_t *subconnection)
{
    struct colo_nccl_group *x = c->impl;
    if (!subconnection)
        return;
    pthread_mutex_lock(&x->context->lock);
    COLO_UNLINK(x->subconnection, subconnection);
    leave(x, subconnection->connection);
    pthread_mutex_unlock(&x->context->lock);
    colo_nccl_connection_put(x->context, subconnection->connection);
    free(subconnection->members);
    free(subconnection);
}

/* ---- a first one ---- */

static colo_status_t check_borrowed(const struct colo_nccl_context *f, ncclComm_t nccl,
                                    const colo_comm_t *control)
{
    int rank = -1, size = -1, device = -1;
    ncclResult_t r = f->lib->user_rank(nccl, &rank);
    COLO_THEN(r, f->lib->count(nccl, &size));
    COLO_THEN(r, f->lib->device(nccl, &device));
    if (r != ncclSuccess)
        return colo_nccl_error(f->lib, "create_nccl_borrowed", r);
    COLO_FAIL_IF(
        rank != control->rank || size != control->size, COLO_ERR_ARG,
        "create_nccl_borrowed: the ncclComm_t is rank %d of %d, the parent is rank %d of %d", rank,
        size, (int)control->rank, (int)control->size);
    COLO_FAIL_IF(device != f->device, COLO_ERR_ARG,
                 "create_nccl_borrowed: the ncclComm_t is on device %d, the current device is %d",
                 device, (int)f->device);
    return COLO_OK;
}

colo_status_t colo_nccl_create(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                               colo_comm_t **comm)
{
    COLO_CAPTURE_RELAXED;
    struct colo_nccl_context *f = NULL;
    struct colo_connection *l = NULL;
    colo_comm_t *c = NULL;
    struct colo_nccl_group *x = NULL;
    colo_status_t st = colo_nccl_context_create(&f, device, control->size);
    if (st == COLO_OK && borrowed)
        st = check_borrowed(f, borrowed, control);
    COLO_THEN(st, colo_comm_new(&c, &colo_comm_nccl_backend, control->rank, control->size,
                                control->world_rank));
    COLO_THEN(st, group_new(&x));
    COLO_THEN(st, colo_nccl_load(f, colo_comm_timeout(control)));
    COLO_TRY_GOTO(st, colo_comm_agree(control, "nccl create", 1, st), fail);
    c->timeout_ms = colo_comm_timeout(control);
    colo_comm_relate(c, control, 0);
    COLO_TRY_GOTO(st, colo_nccl_apart(f, control), fail);
    if (borrowed || control->size == 1)
        COLO_TRY_GOTO(st, colo_nccl_connection_get(f, control, borrowed, &l), fail);
    attach(x, c, f, l, control);
    *comm = c;
    return COLO_OK;
fail:
    if (f) {
        colo_nccl_connection_put(f, l);
        colo_nccl_context_destroy(f, true);
    }
    free(x);
    colo_comm_destroy(&c);
    colo_comm_destroy(&control);
    return st;
}

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("nccl"),
    .comm = &colo_comm_nccl_backend,
};
