/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.c - an allocation of each rank becomes one that all of them can reach: checked, offered to
 * the others, opened there, and given back.
 */
#include "comm/direct/registry.h"

#include "core/error.h"
#include "core/lock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*range_fn)(unsigned long long *base, size_t *size, unsigned long long p);

/* The allocation that @p lies in, from the driver: the runtime does not say. */
static colo_status_t range_of(void *p, char **base, size_t *size)
{
    range_fn range;
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &fn, 12000,
                                                     cudaEnableDefault, &found);
#else
    cudaError_t e = cudaGetDriverEntryPoint("cuMemGetAddressRange", &fn, cudaEnableDefault, &found);
#endif
    if (e != cudaSuccess || !fn)
        return colo_cuda_error("peer memory: cuMemGetAddressRange",
                               e != cudaSuccess ? e : cudaErrorSymbolNotFound);
    memcpy(&range, &fn, sizeof range);
    unsigned long long begin = 0;
    int r = range(&begin, size, (unsigned long long)(uintptr_t)p);
    *base = (char *)(uintptr_t)begin;
    return r == 0 ? COLO_OK : colo_fail(COLO_ERR_ARG, "register: %p is no device allocation", p);
}

/* Is it memory of this device, all of it, that can be given away? Then it is offered. */
static colo_status_t offer_memory(const struct colo_direct *p, void *ptr, size_t bytes,
                                  struct colo_offer *o)
{
    struct cudaPointerAttributes a;
    char *base = NULL;
    size_t size = 0;
    COLO_TRY(colo_cuda_error("register", cudaPointerGetAttributes(&a, ptr)));
    COLO_FAIL_IF(a.type != cudaMemoryTypeDevice, COLO_ERR_ARG,
                 "register: %p is %s memory, expected memory of device %d", ptr,
                 a.type == cudaMemoryTypeManaged ? "managed" : "host", (int)p->device);
    COLO_FAIL_IF(a.device != p->device, COLO_ERR_ARG,
                 "register: %p is memory of device %d, comm '%s' is on device %d", ptr, a.device,
                 p->name, (int)p->device);
    COLO_TRY(range_of(ptr, &base, &size));
    o->process = colo_comm_process();
    o->base = (uint64_t)(uintptr_t)base;
    o->size = size;
    o->offset = (uint64_t)((char *)ptr - base);
    o->bytes = bytes;
    COLO_FAIL_IF(o->offset + bytes > size, COLO_ERR_ARG,
                 "register: %zu bytes from %p end %zu bytes past their allocation", bytes, ptr,
                 (size_t)o->offset + bytes - size);
    const cudaError_t e = cudaIpcGetMemHandle(&o->handle, base);
    if (e == cudaSuccess)
        return COLO_OK;
    (void)cudaGetLastError();
    return colo_fail(COLO_ERR_ARG,
                     "register: %p was not made by cudaMalloc() (%s); take colo_memory_alloc()",
                     ptr, cudaGetErrorString(e));
}

static colo_status_t make_offer(struct colo_direct *p, void *mine, size_t bytes,
                                struct colo_offer *o)
{
    memset(o, 0, sizeof *o);
    pthread_mutex_lock(&p->lock);
    for (int32_t i = 0; i < COLO_K_MEMORIES; i++)
        o->taken[i / 64] |= (uint64_t)(p->memory[i] != NULL) << (i % 64);
    pthread_mutex_unlock(&p->lock);
    return bytes == 0 ? COLO_OK : offer_memory(p, mine, bytes, o);
}

static colo_status_t free_id(const struct colo_direct *p, const struct colo_offer *all, int32_t *id)
{
    for (int32_t i = 0; i < COLO_K_MEMORIES; i++) {
        bool taken = false;
        for (int32_t r = 0; r < p->size; r++)
            taken = taken || (all[r].taken[i / 64] >> (i % 64) & 1);
        if (!taken) {
            *id = i;
            return COLO_OK;
        }
    }
    return colo_fail(COLO_ERR_STATE,
                     "register: %d memories are registered over comm '%s', no more "
                     "fit",
                     COLO_K_MEMORIES, p->name);
}

/* "Not here", unless there is no memory left or the device itself is in trouble. */
static colo_status_t cannot_open(const struct colo_direct *p, int32_t r, cudaError_t e)
{
    const cudaError_t now = cudaStreamQuery(p->stream);
    (void)cudaGetLastError(); /* of both calls: what is not ready is an error, too */
    if (now != cudaSuccess && now != cudaErrorNotReady)
        return colo_cuda_error("peer memory", now);
    return colo_fail(e == cudaErrorMemoryAllocation ? COLO_ERR_CUDA : COLO_ERR_UNBUILT,
                     "peer memory: rank %d cannot open rank %d's: %s", (int)p->rank, (int)r,
                     cudaGetErrorString(e));
}

/* CUDA does not open an allocation that overlaps an older one of another size which is still open
 * (cudaErrorAlreadyMapped). Ranks destroy memory at different times, so this is common. The offer
 * shows that the owner has freed the older one, which no rank uses then. It is closed first. */
COLO_LOCK(lock); /* guards the list, and imported[] of what is in it; not held in calls of CUDA,
                    which may hang on one device */
static colo_share_t *shares;

static void *take_older(const struct colo_offer *o, int32_t device)
{
    COLO_HOLD(&lock);
    for (colo_share_t *s = shares; s; s = s->next)
        for (int32_t r = 0; s->direct->device == device && r < s->direct->size; r++) {
            const struct colo_offer *old = &s->offers[r];
            void *at = s->imported[r];
            if (at && old->process == o->process && old->base < o->base + o->size &&
                o->base < old->base + old->size && (old->base != o->base || old->size != o->size)) {
                s->imported[r] = NULL;
                return at;
            }
        }
    return NULL;
}

static void close_at(void *at)
{
    if (at && cudaIpcCloseMemHandle(at) != cudaSuccess)
        (void)cudaGetLastError();
}

static colo_status_t import_all(struct colo_direct *p, colo_share_t *s)
{
    for (int32_t r = 0; r < p->size; r++) {
        const struct colo_offer *o = &s->offers[r];
        char *base = (char *)(uintptr_t)o->base;
        if (o->bytes == 0 || !p->reach[r])
            continue;
        if (p->foreign[r]) { /* on the current device, this rank's */
            for (void *at; (at = take_older(o, p->device));)
                close_at(at);
            cudaError_t e =
                cudaIpcOpenMemHandle(&s->imported[r], o->handle, cudaIpcMemLazyEnablePeerAccess);
            if (e != cudaSuccess) {
                const colo_status_t st = cannot_open(p, r, e);
                if (p->tried || st != COLO_ERR_UNBUILT)
                    return st;
                colo_direct_lose(p, r, colo_last_error());
                continue;
            }
            base = s->imported[r];
        }
        s->base[r] = base + o->offset;
    }
    COLO_HOLD(&lock);
    s->next = shares;
    shares = s;
    return COLO_OK;
}

void colo_direct_unshare(colo_share_t *s)
{
    colo_share_t **link = &shares;
    pthread_mutex_lock(&lock);
    while (*link && *link != s)
        link = &(*link)->next;
    if (*link)
        *link = s->next;
    pthread_mutex_unlock(&lock);
    for (int32_t r = 0; s->imported && r < s->direct->size; r++)
        close_at(s->imported[r]);
    free(s->imported);
    free(s->base);
    free(s->offers);
    *s = (colo_share_t){0};
}

colo_status_t colo_direct_close(colo_comm_t *c, colo_share_t *s, colo_status_t st)
{
    const colo_error_t why = colo_error_save();
    colo_direct_unshare(s);
    const colo_status_t closed = colo_direct_agree_alike(c, COLO_OK);
    s->stays = closed < 0;
    return st < 0 ? colo_error_restore(st, &why) : closed;
}

colo_status_t colo_direct_share(colo_comm_t *c, struct colo_direct *p, void *mine, size_t bytes,
                                int32_t *id, colo_share_t *s)
{
    const size_t n = (size_t)c->size;
    struct colo_offer offer;
    *s = (colo_share_t){.direct = p,
                        .offers = calloc(n, sizeof *s->offers),
                        .base = calloc(n, sizeof *s->base),
                        .imported = calloc(n, sizeof *s->imported)};
    colo_status_t st = make_offer(p, mine, bytes, &offer);
    if (!s->offers || !s->base || !s->imported)
        st = colo_fail(COLO_ERR_NOMEM, "peer memory: %zu ranks", n);
    COLO_TRY_GOTO(st, colo_direct_agree_alike(c, st), fail);
    COLO_TRY_GOTO(st, colo_direct_gather(c, &offer, s->offers, sizeof offer), fail);
    st = id ? free_id(p, s->offers, id) : COLO_OK; /* the same verdict on all ranks */
    COLO_THEN(st, import_all(p, s));
    st = colo_direct_agree_on(c, st);
    return st < 0 ? colo_direct_close(c, s, st) : COLO_OK;
fail: /* nothing is open */
    colo_direct_unshare(s);
    return st;
}
