/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm-nccl.c - communicators between GPUs: how they are made, fail and end.
 *
 * Left to others: connecting (nccl-link.c), what comms share (nccl-family.c), deadlines and tearing
 * down (nccl-guard.c), operations (comm-nccl-ops.c), finding NCCL (nccl-lib.c), arguments
 * (comm-ops.c).
 */
#include "comm/comm-nccl.h"

#include "core/backend.h"
#include "core/try.h"

#include <colobridge/version.h>

#include <stdlib.h>

colo_status_t colo_nccl_error(const colo_nccl_lib_t *lib, const char *what, ncclResult_t r)
{
    const char *more = lib->last_error ? lib->last_error(NULL) : "";
    return colo_fail(COLO_ERR_NCCL, "%s: NCCL says: %s%s%.600s", what,
                     lib->error_string ? lib->error_string(r) : "an error",
                     more && more[0] ? "; " : "", more ? more : "");
}

colo_status_t colo_cuda_error(const char *what, cudaError_t e)
{
    (void)cudaGetLastError(); /* or the next launch reports it again */
    return colo_fail(COLO_ERR_CUDA, "%s: CUDA says: %s", what, cudaGetErrorString(e));
}

/* ---- failure ---- */

colo_status_t colo_nccl_control_state(const struct colo_nctx *x, char *sentence, size_t cap)
{
    return x->control ? x->control->ops->state(x->control, sentence, cap) : COLO_OK;
}

colo_status_t colo_nccl_state(const colo_comm_t *c, char *sentence, size_t cap)
{
    const struct colo_nctx *x = c->impl;
    colo_status_t st = colo_fate_tell(&x->fate, x->rank, sentence, cap);
    return st != COLO_OK ? st : colo_nccl_control_state(x, sentence, cap);
}

void colo_nccl_fail(colo_comm_t *c, colo_status_t status, const char *sentence)
{
    struct colo_nctx *x = c->impl;
    char kept[900];
    if (colo_nccl_control_state(x, kept, sizeof kept) == COLO_OK)
        x->control->ops->fail(x->control, status, sentence);
    colo_fate_seal(&x->fate, status, -1, -1, sentence);
    pthread_cond_signal(&x->family->wake);
}

/* ---- comms ---- */

/* Takes @control when it succeeds. */
static colo_status_t attach(colo_comm_t *c, struct colo_nfamily *f, struct colo_link *l,
                            colo_comm_t *control)
{
    struct colo_nctx *x = calloc(1, sizeof *x);
    if (!x)
        return colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *x);
    colo_fate_init(&x->fate);
    x->family = f;
    x->link = l;
    x->rank = c->rank;
    x->control = control;
    c->impl = x;
    c->control = control;
    pthread_mutex_lock(&f->lock);
    f->timeout_ms = c->timeout_ms > f->timeout_ms ? c->timeout_ms : f->timeout_ms;
    x->next = f->ctx;
    f->ctx = x;
    f->live++;
    pthread_mutex_unlock(&f->lock);
    return COLO_OK;
}

colo_status_t colo_nccl_subset(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                               colo_comm_t *child)
{
    struct colo_nfamily *f = ((struct colo_nctx *)parent->impl)->family;
    colo_comm_t *control = NULL;
    struct colo_link *l = NULL;
    parent->control->timeout_ms = parent->timeout_ms;
    COLO_TRY(colo_comm_i_child(parent->control, members, n, tag, "control", &control));
    colo_status_t st = colo_nccl_link_get(f, control, NULL, &l);
    if (st == COLO_OK)
        st = attach(child, f, l, control);
    if (st < 0)
        colo_comm_destroy(&control);
    return st;
}

void colo_nccl_destroy(colo_comm_t *c)
{
    struct colo_nctx *x = c->impl;
    struct colo_nfamily *f = x->family;
    char sentence[900];
    bool dead = colo_nccl_state(c, sentence, sizeof sentence) != COLO_OK;
    pthread_mutex_lock(&f->lock);
    struct colo_nctx **at = &f->ctx;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    bool last = --f->live == 0;
    f->timeout_ms = c->timeout_ms > f->timeout_ms ? c->timeout_ms : f->timeout_ms;
    pthread_mutex_unlock(&f->lock);
    if (dead)
        colo_nccl_tear(f, x->link);
    if (last)
        colo_nccl_family_destroy(f, true);
    colo_comm_destroy(&x->control);
    colo_fate_fini(&x->fate);
    free(x);
    c->impl = NULL;
}

static colo_status_t check_borrowed(const struct colo_nfamily *f, ncclComm_t nccl,
                                    const colo_comm_t *control)
{
    int rank = -1, size = -1, device = -1;
    ncclResult_t r = f->lib->user_rank(nccl, &rank);
    if (r == ncclSuccess)
        r = f->lib->count(nccl, &size);
    if (r == ncclSuccess)
        r = f->lib->device(nccl, &device);
    if (r != ncclSuccess)
        return colo_nccl_error(f->lib, "from_nccl", r);
    if (rank != control->rank || size != control->size)
        return colo_fail(COLO_ERR_ARG,
                         "from_nccl: the ncclComm_t is rank %d of %d, the parent is rank %d of %d",
                         rank, size, (int)control->rank, (int)control->size);
    if (device != f->device)
        return colo_fail(COLO_ERR_ARG,
                         "from_nccl: the ncclComm_t is on device %d, the current device is %d",
                         device, (int)f->device);
    return COLO_OK;
}

static colo_status_t create(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                            colo_comm_t **comm)
{
    struct colo_nfamily *f = NULL;
    struct colo_link *l = NULL;
    colo_comm_t *c = NULL;
    colo_status_t st = colo_nccl_family_create(&f, device);
    if (st == COLO_OK && borrowed)
        st = check_borrowed(f, borrowed, control);
    if (st == COLO_OK)
        st = colo_comm_i_new(&c, &colo_comm_nccl_ops, control->rank, control->size,
                             control->world_rank);
    COLO_TRY_GOTO(st, colo_comm_i_agree(control, "nccl create", 1, st), fail);
    c->timeout_ms = control->timeout_ms;
    COLO_TRY_GOTO(st, colo_nccl_link_get(f, control, borrowed, &l), fail);
    COLO_TRY_GOTO(st, attach(c, f, l, control), fail);
    *comm = c;
    return COLO_OK;
fail:
    if (f)
        colo_nccl_family_destroy(f, true);
    colo_comm_destroy(&c);
    colo_comm_destroy(&control);
    return st;
}

/* ---- device memory ---- */

static colo_status_t gpu_alloc(size_t bytes, void **p)
{
    cudaError_t e = cudaMalloc(p, bytes);
    if (e == cudaSuccess)
        return COLO_OK;
    (void)cudaGetLastError();
    return colo_fail(COLO_ERR_NOMEM, "%zu bytes of device memory: %s", bytes,
                     cudaGetErrorString(e));
}

static void gpu_free(void *p)
{
    if (p && cudaFree(p) != cudaSuccess)
        (void)cudaGetLastError();
}

static colo_status_t gpu_zero(void *p, size_t bytes, colo_stream_t stream)
{
    cudaError_t e = bytes ? cudaMemsetAsync(p, 0, bytes, stream) : cudaSuccess;
    return e == cudaSuccess ? COLO_OK : colo_cuda_error("zeros", e);
}

static const colo_gpu_t gpu = {
    .abi = COLO_GPU_ABI,
    .bind = colo_nccl_bind,
    .comm_create = create,
    .alloc = gpu_alloc,
    .free = gpu_free,
    .zero = gpu_zero,
};

__attribute__((visibility("default"))) extern const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    .abi = COLO_BACKEND_ABI,
    .version = COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | COLO_VERSION_PATCH,
    .name = "nccl",
    .comm = &colo_comm_nccl_ops,
    .gpu = &gpu,
};
