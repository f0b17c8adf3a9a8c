/* SPDX-License-Identifier: Apache-2.0 */
/*
 * registry.c - which ranks reach each other's memory, and allocations that all of them know.
 *
 * Ranks in one process use each other's pointers once peer access is enabled. Between processes an
 * allocation travels as a CUDA IPC handle of its base, with the offset, and opens on the importing
 * rank's device: no process has a context on a peer's device, and need not even see it. Both ways
 * need memory of cudaMalloc(): what other allocators map has no such handle, and peers would need
 * rights to it. Everything here is collective over the comm's host communicator, at create time; a
 * call that fails on one rank fails on all, and the comm lives on. COLO_ERR_UNBUILT, on all ranks,
 * says that no two ranks reach each other or that one cannot open what another one offers: callers
 * have another way.
 *
 * At open each rank writes a word into a page of every other one and reads it back (reach.c): what
 * has not come through is not reached, and the rest goes on.
 *
 * A registered memory has a number, the lowest one that is free on all ranks, and a row of the
 * device table where kernels look up where rank r's memory n lies (direct.cu).
 *
 * Left to others: how an allocation is shared (share.c), waits of kernels and their deadlines
 * (channel.c), calls (launch.c), when to use it (bridge/run/direct.c).
 */
#include "comm/direct/registry.h"

#include "capture.h"
#include "core/env.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/helper.h"
#include "core/host.h"
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- where each rank is ---- */

struct where {
    uint64_t process, host, ordinal;
    char bus[16];
};

static colo_status_t where_am_i(const colo_comm_t *c, int32_t device, struct where *w)
{
    const char *names;
    char bus[32] = "";
    memset(w, 0, sizeof *w);
    COLO_TRY(colo_cuda_error("peer memory", cudaDeviceGetPCIBusId(bus, sizeof bus, device)));
    w->process = colo_comm_process();
    w->host = colo_host_machine();
    COLO_TRY(colo_env_text("COLO_NODE", &names));
    if (names[0]) /* one machine plays several */
        w->host = colo_hash_i64(w->host, colo_comm_node(c, c->rank));
    w->ordinal = (uint64_t)device;
    memcpy(w->bus, bus, sizeof w->bus - 1);
    return COLO_OK;
}

/* The device of a rank as this process numbers it, -1 when it does not see it. */
static int device_of(const struct where *me, const struct where *w)
{
    int device = -1;
    if (w->process == me->process)
        return (int)w->ordinal;
    if (cudaDeviceGetByPCIBusId(&device, w->bus) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    return device;
}

/* Which ranks may be within reach? Enables access to those of this process; one of another process
 * is tried by opening what it offers, which makes no context on its device. */
static colo_status_t reach_all(const colo_comm_t *c, struct colo_direct *p, const struct where *all)
{
    const struct where *me = &all[c->rank];
    p->sharers = 1;
    for (int32_t r = 0; r < c->size; r++) {
        p->reach[r] = true;
        p->foreign[r] = all[r].process != me->process;
        if (all[r].host != me->host)
            colo_direct_lose(p, r, "they are on different hosts");
        if (r == c->rank || !p->reach[r])
            continue;
        int device = device_of(me, &all[r]), can = 1;
        if (device == p->device) {
            p->sharers++;
            continue;
        }
        if (device >= 0 && cudaDeviceCanAccessPeer(&can, p->device, device) != cudaSuccess)
            can = 0;
        cudaError_t e = can && !p->foreign[r] ? cudaDeviceEnablePeerAccess(device, 0) : cudaSuccess;
        (void)cudaGetLastError();
        if (!can)
            colo_direct_lose(p, r, "CUDA reports no peer access between their devices");
        else if (e == cudaErrorPeerAccessUnsupported || e == cudaErrorTooManyPeers)
            colo_direct_lose(p, r, cudaGetErrorString(e));
        else if (e != cudaSuccess && e != cudaErrorPeerAccessAlreadyEnabled)
            return colo_cuda_error("peer memory: enabling access", e);
    }
    return COLO_OK;
}

/* ---- the peer of a comm ---- */

static void peer_free(int device, void *arg)
{
    COLO_CAPTURE_RELAXED;
    struct colo_direct *p = arg;
    (void)cudaSetDevice(device);
    for (int32_t i = 0; i < p->nretired; i++)
        cudaFree(p->retired[i]);
    free(p->retired);
    cudaFree(p->table);
    if (p->stream)
        cudaStreamDestroy(p->stream);
    colo_order_drop(p->order);
    (void)cudaGetLastError();
    pthread_mutex_destroy(&p->lock);
    free(p->foreign);
    free(p->reach);
    free(p->pairs);
    free(p->world);
    free(p);
}

void colo_direct_retire(struct colo_direct *p, void *memory)
{
    COLO_HOLD(&p->lock);
    void **more = realloc(p->retired, ((size_t)p->nretired + 1) * sizeof *more);
    if (more) { /* else it stays for good */
        p->retired = more;
        p->retired[p->nretired++] = memory;
    }
}

void colo_direct_drop(struct colo_direct *p)
{
    if (p && atomic_fetch_sub(&p->refs, 1) == 1)
        (void)colo_end_on(p->device, p->timeout_ms, peer_free, p);
}

static colo_status_t direct_new(const colo_comm_t *c, int device, struct colo_direct **out)
{
    struct colo_order *family = ((colo_direct_base_t *)c->impl)->order;
    struct colo_direct *p = calloc(1, sizeof *p);
    COLO_FAIL_IF(!p, COLO_ERR_NOMEM, "peer memory: %zu bytes", sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    atomic_init(&p->refs, 1);
    p->rank = c->rank;
    p->size = c->size;
    p->device = device;
    p->timeout_ms = colo_comm_timeout(c);
    memcpy(p->name, c->name, sizeof p->name);
    p->world = malloc(sizeof *p->world * (size_t)c->size);
    p->foreign = calloc((size_t)c->size, sizeof *p->foreign);
    p->reach = calloc((size_t)c->size, sizeof *p->reach);
    const size_t bytes = (size_t)c->size * COLO_K_MEMORIES * sizeof *p->table;
    cudaError_t e = colo_k_load();
    COLO_THEN(e, colo_k_direct_fit(&p->blocks, &p->early));
    COLO_THEN(e, cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    COLO_THEN(e, cudaMalloc((void **)&p->table, bytes));
    COLO_THEN(e, cudaMemsetAsync(p->table, 0, bytes, p->stream));
    COLO_THEN(e, cudaStreamSynchronize(p->stream));
    colo_status_t st = COLO_OK;
    if (family)
        atomic_fetch_add(&family->refs, 1);
    p->order = family;
    if (!p->world || !p->foreign || !p->reach)
        st = colo_fail(COLO_ERR_NOMEM, "peer memory: %d ranks", (int)c->size);
    else if (e != cudaSuccess)
        st = colo_cuda_error("peer memory", e);
    else if (!family)
        st = colo_order_new(&p->order);
    if (st < 0) {
        peer_free(device, p);
        return st;
    }
    memcpy(p->world, c->world_rank, sizeof *p->world * (size_t)c->size);
    *out = p;
    return COLO_OK;
}

colo_status_t colo_direct_gather(colo_comm_t *c, const void *mine, void *all, size_t bytes)
{
    return colo_comm_all_gather_for(colo_comm_control(c), COLO_CATEGORY_CHECK, mine, all,
                                    (int64_t)(bytes / sizeof(uint64_t)), COLO_I64, NULL);
}

colo_status_t colo_direct_agree_alike(colo_comm_t *c, colo_status_t mine)
{
    return colo_comm_agree(colo_comm_control(c), "peer memory", 0, mine);
}

colo_status_t colo_direct_agree_on(colo_comm_t *c, colo_status_t mine)
{
    COLO_TRY(colo_direct_agree_alike(c, mine == COLO_ERR_UNBUILT ? COLO_OK : mine));
    colo_status_t st = colo_direct_agree_alike(c, mine);
    char why[8];
    colo_comm_t *control = colo_comm_control(c);
    return st == COLO_ERR_PEER && control->backend->state(control, why, sizeof why) == COLO_OK
               ? colo_fail(COLO_ERR_UNBUILT, "%s", colo_last_error())
               : st; /* PEER of a dead comm: a rank failed or left meanwhile */
}

colo_status_t colo_direct_open(colo_comm_t *c)
{
    COLO_CAPTURE_RELAXED;
    colo_direct_base_t *base = c->impl;
    struct colo_direct *p = NULL;
    struct where mine;
    COLO_AUTOFREE struct where *all = NULL;
    int device = -1;
    if (atomic_load(&base->direct))
        return COLO_OK;
    colo_status_t st = colo_cuda_error("peer memory", cudaGetDevice(&device));
    if (st == COLO_OK && base->device >= 0 && device != base->device)
        st = colo_fail(COLO_ERR_ARG, "peer memory: the current device is %d, comm '%s' is on %d",
                       device, c->name, (int)base->device);
    COLO_THEN(st, direct_new(c, device, &p));
    COLO_THEN(st, where_am_i(c, device, &mine));
    if (st == COLO_OK && !(all = calloc((size_t)c->size, sizeof *all)))
        st = colo_fail(COLO_ERR_NOMEM, "peer memory: %d ranks", (int)c->size);
    COLO_TRY_GOTO(st, colo_direct_agree_alike(c, st), fail);
    COLO_TRY_GOTO(st, colo_direct_gather(c, &mine, all, sizeof mine), fail);
    COLO_TRY_GOTO(st, colo_direct_agree_alike(c, reach_all(c, p, all)), fail);
    COLO_TRY_GOTO(st, colo_direct_try(c, p), fail);
    if (p->sharers > 1) /* all of them must fit at once */
        p->blocks = p->blocks / (p->sharers + 1) > 8 ? 8 : p->blocks / (p->sharers + 1);
    atomic_store(&base->direct, p);
    return COLO_OK;
fail:
    colo_direct_drop(p);
    return st;
}

void colo_direct_stop(struct colo_direct *p)
{
    if (!p || atomic_exchange(&p->stopped, true))
        return;
    COLO_HOLD(&p->lock);
    for (colo_direct_channel_t *channel = p->channels; channel; channel = channel->next)
        colo_direct_channel_stop(channel);
}

colo_status_t colo_direct_check(struct colo_direct *p, char *error_message, size_t cap)
{
    colo_status_t st = COLO_OK;
    if (!p)
        return COLO_OK;
    COLO_HOLD(&p->lock);
    for (colo_direct_channel_t *channel = p->channels; channel && st == COLO_OK;
         channel = channel->next)
        st = colo_direct_channel_poll(channel, error_message, cap);
    return st;
}

/* ---- registered memory ---- */

static colo_status_t write_rows(struct colo_direct *p, int32_t id, char *const *base)
{
    COLO_AUTOFREE uint64_t *column = calloc((size_t)p->size, sizeof *column);
    COLO_FAIL_IF(!column, COLO_ERR_NOMEM, "register: %d ranks", (int)p->size);
    for (int32_t r = 0; base && r < p->size; r++)
        column[r] = (uint64_t)(uintptr_t)base[r];
    cudaError_t e =
        cudaMemcpy2DAsync(p->table + id, COLO_K_MEMORIES * sizeof *p->table, column, sizeof *column,
                          sizeof *column, (size_t)p->size, cudaMemcpyHostToDevice, p->stream);
    COLO_THEN(e, cudaStreamSynchronize(p->stream));
    return colo_cuda_error("register", e);
}

struct shared {
    struct colo_direct *direct; /* a reference */
    colo_share_t share;
    int32_t id;  /* when the memory is destroyed */
    void *owned; /* then: what is to be freed */
};

static colo_status_t share_now(colo_comm_t *c, struct colo_direct *p, colo_memory_t *m)
{
    struct shared *x = calloc(1, sizeof *x);
    int now = -1;
    cudaError_t e = cudaGetDevice(&now);
    colo_status_t st = COLO_OK;
    if (!x)
        st = colo_fail(COLO_ERR_NOMEM, "register: %zu bytes", sizeof *x);
    else if (e != cudaSuccess || now != p->device)
        st = colo_fail(COLO_ERR_ARG, "register: the current device is %d, comm '%s' was made on %d",
                       now, p->name, (int)p->device);
    else if (m->owned && m->bytes > 0 && (e = cudaMalloc(&m->data, m->bytes)) != cudaSuccess) {
        (void)cudaGetLastError();
        st = colo_fail(COLO_ERR_NOMEM, "memory: %zu bytes on device %d: %s", m->bytes, now,
                       cudaGetErrorString(e));
    }
    st = colo_direct_agree_alike(c, st);
    if (st < 0) {
        free(x);
        return st;
    }
    st = colo_direct_share(c, p, m->data, m->bytes, &m->id, &x->share);
    if (st == COLO_OK) {
        st = colo_direct_agree_alike(c, write_rows(p, m->id, x->share.base));
        st = st < 0 ? colo_direct_close(c, &x->share, st) : COLO_OK;
    }
    if (st < 0) {
        if (m->owned && x->share.stays)
            m->data = NULL;
        free(x);
        return st;
    }
    x->direct = p;
    atomic_fetch_add(&p->refs, 1);
    m->impl = x;
    COLO_HOLD(&p->lock);
    p->memory[m->id] = m;
    p->memories++;
    p->registrations++;
    return COLO_OK;
}

colo_status_t colo_direct_register(colo_comm_t *c, colo_memory_t *m)
{
    COLO_CAPTURE_RELAXED;
    struct colo_direct *p = colo_direct_of(c);
    colo_status_t st = share_now(c, p, m);
    if (st < 0 && m->owned && m->data) {
        cudaFree(m->data);
        m->data = NULL;
    }
    return st;
}

static colo_memory_t ending; /* has a number until the device does not know it any more */

static void unshare_on(int device, void *arg)
{
    COLO_CAPTURE_RELAXED;
    struct shared *x = arg;
    struct colo_direct *p = x->direct;
    (void)cudaSetDevice(device);
    if (p->used) /* a kernel of ours may still reach into what is closed below */
        (void)cudaEventSynchronize(p->order->done);
    (void)write_rows(p, x->id, NULL);
    pthread_mutex_lock(&p->lock);
    p->memory[x->id] = NULL;
    p->memories--;
    pthread_mutex_unlock(&p->lock);
    colo_direct_unshare(&x->share);
    cudaFree(x->owned);
    (void)cudaGetLastError();
    colo_direct_drop(p);
    free(x);
}

void colo_direct_unregister(colo_memory_t *m)
{
    struct shared *x = m->impl;
    struct colo_direct *p = x->direct;
    x->id = m->id;
    x->owned = m->owned ? m->data : NULL;
    pthread_mutex_lock(&p->lock);
    p->memory[m->id] = &ending;
    pthread_mutex_unlock(&p->lock);
    (void)colo_end_on(p->device, p->timeout_ms, unshare_on, x);
}

bool colo_direct_find_memory(const colo_comm_t *c, const void *ptr, size_t bytes, int32_t *id,
                             uint64_t *offset)
{
    struct colo_direct *p = colo_direct_of(c);
    const uintptr_t lo = (uintptr_t)ptr, hi = lo + bytes;
    bool found = false;
    if (!p)
        return false;
    COLO_HOLD(&p->lock);
    for (int32_t i = 0, left = p->memories; left > 0 && !found; i++) {
        const colo_memory_t *m = p->memory[i];
        if (!m)
            continue;
        left--;
        const uintptr_t base = (uintptr_t)m->data;
        found = m->bytes > 0 && lo >= base && hi <= base + m->bytes;
        *id = i;
        *offset = lo - base;
    }
    return found;
}

const colo_share_t *colo_direct_memory_of(struct colo_direct *p, int32_t id)
{
    COLO_HOLD(&p->lock);
    const struct shared *x = p->memory[id] ? p->memory[id]->impl : NULL;
    return x ? &x->share : NULL;
}

uint64_t colo_direct_registrations(const colo_comm_t *c)
{
    struct colo_direct *p = colo_direct_of(c);
    if (!p)
        return 0;
    COLO_HOLD(&p->lock);
    return p->registrations;
}
