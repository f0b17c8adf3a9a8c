/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path.c - mailboxes for kernels that wait for peers, and what became of the waits.
 *
 * A kernel that gives up says so in pinned memory, and colo_peer_check() makes an error message of
 * it. Mailboxes outlive their path, as long as the comm, and those of a path that died the process:
 * a peer that comes late may write there.
 *
 * Left to others: the handshake itself (kernels/p2p.cu), what is launched (allgather.c, launch.c).
 */
#include "comm/peer/registry.h"

#include "capture.h"
#include "core/error.h"
#include "core/helper.h"
#include "core/list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t mailboxes_bytes(const struct colo_peer *p)
{
    return (size_t)p->size * COLO_K_MAILBOX * 2 + 2 * COLO_K_MAILBOX;
}

static uint64_t *mailbox_of(char *mailboxes, const struct colo_peer *p, int pass, int32_t rank)
{
    return (uint64_t *)(void *)(mailboxes +
                                ((size_t)pass * (size_t)p->size + (size_t)rank) * COLO_K_MAILBOX);
}

/* ---- for kernels ---- */

int32_t colo_path_partner(const colo_path_t *d, int pass, colo_k_p2p_t *k, int32_t rank,
                          int32_t role)
{
    const struct colo_peer *p = d->peer;
    int32_t i = 0;
    while (i < k->npartners && k->partner[i].rank != rank)
        i++;
    if (i == COLO_K_PARTNERS)
        return COLO_PATH_FULL;
    if (i == k->npartners)
        k->partner[k->npartners++] =
            (colo_k_partner_t){.mine = mailbox_of(d->mailboxes, p, pass, rank),
                               .remote = mailbox_of(d->share.base[rank], p, pass, p->rank),
                               .rank = rank};
    k->partner[i].exposes |= role;
    return i;
}

colo_status_t colo_path_too_many(const colo_path_t *path, const char *what)
{
    return colo_fail(COLO_ERR_UNBUILT, "%s: more than %d ranks to exchange with on comm '%s'", what,
                     COLO_K_PARTNERS, path->peer->name);
}

void colo_path_fill(const colo_path_t *path, int pass, colo_k_p2p_t *k)
{
    k->early = path->peer->early;
    k->control = (colo_k_control_t *)(void *)mailbox_of(path->mailboxes, path->peer, 2, pass);
    k->table = path->peer->table;
    k->report = &path->report[pass];
}

void colo_path_call(colo_path_t *path, int pass, colo_k_p2p_t *k)
{
    struct colo_peer *p = path->peer;
    p->timeout_ms = colo_comm_timeout(path->comm);
    k->deadline_ns = (uint64_t)p->timeout_ms * 1000000u;
    atomic_store(&path->pass[pass].seq, path->comm->seq);
    atomic_store(&path->pass[pass].deadline_ms, p->timeout_ms);
    atomic_store(&p->used, true);
}

/* ---- create and destroy ---- */

static bool is_dead(const colo_path_t *d)
{
    char why[900];
    bool dead = atomic_load(&d->peer->stopped) ||
                d->comm->backend->state(d->comm, why, sizeof why) != COLO_OK;
    for (int w = 0; w < 2; w++)
        dead = dead || __atomic_load_n(&d->report[w].code, __ATOMIC_ACQUIRE) != COLO_K_FINE;
    return dead;
}

/* A kernel of ours may still reach others' mailboxes: the last call is waited for, which its
 * deadline bounds, and replays, as far as cudaFree() waits, before these are closed. */
static void end_on(int device, void *arg)
{
    COLO_CAPTURE_RELAXED;
    colo_path_t *d = arg;
    (void)cudaSetDevice(device);
    if (d->peer->used)
        (void)cudaEventSynchronize(d->peer->order->done);
    d->end(d);
    colo_peer_unshare(&d->share);
    if (!d->dead) {
        if (d->mailboxes)
            colo_peer_retire(d->peer, d->mailboxes);
        cudaFreeHost(d->report);
    }
    (void)cudaGetLastError();
    colo_peer_drop(d->peer);
    free(d);
}

static void path_free(colo_path_t *d)
{
    d->peer->timeout_ms = colo_comm_timeout(d->comm);
    d->dead = d->share.stays || (d->report && is_dead(d));
    (void)colo_end_on(d->peer->device, d->peer->timeout_ms, end_on, d);
}

static colo_status_t make_mailboxes(colo_path_t *d)
{
    const size_t bytes = mailboxes_bytes(d->peer);
    cudaError_t e = cudaMalloc((void **)&d->mailboxes, bytes);
    COLO_THEN(e, cudaMemsetAsync(d->mailboxes, 0, bytes, d->peer->stream));
    COLO_THEN(e, cudaStreamSynchronize(d->peer->stream));
    COLO_THEN(e, cudaHostAlloc((void **)&d->report, 2 * sizeof *d->report,
                               cudaHostAllocMapped | cudaHostAllocPortable));
    COLO_TRY(colo_cuda_error("bridge", e));
    memset(d->report, 0, 2 * sizeof *d->report);
    return COLO_OK;
}

colo_status_t colo_path_open(colo_comm_t *c, colo_path_t *path, colo_status_t st)
{
    struct colo_peer *p = colo_peer_of(c);
    if (path) {
        path->peer = p;
        atomic_fetch_add(&p->refs, 1);
        path->comm = c;
        st = make_mailboxes(path);
    }
    st = colo_comm_agree(colo_comm_control(c), "bridge create", 2, st);
    COLO_THEN(st, colo_peer_share(c, p, path->mailboxes, mailboxes_bytes(p), NULL, &path->share));
    if (st < 0 && path)
        path_free(path);
    return st;
}

colo_status_t colo_path_enter(colo_path_t *path, colo_status_t st)
{
    struct colo_peer *p = path->peer;
    st = colo_peer_agree(path->comm, st);
    if (st < 0) {
        st = colo_peer_close(path->comm, &path->share, st);
        path_free(path);
        return st;
    }
    COLO_HOLD(&p->lock);
    path->next = p->paths;
    p->paths = path;
    if (atomic_load(&p->stopped))
        colo_path_stop(path);
    return COLO_OK;
}

void colo_path_destroy(colo_path_t *path)
{
    if (!path)
        return;
    pthread_mutex_lock(&path->peer->lock);
    COLO_UNLINK(path->peer->paths, path);
    pthread_mutex_unlock(&path->peer->lock);
    path_free(path);
}

/* ---- what became of it ---- */

void colo_path_stop(colo_path_t *d)
{
    for (int w = 0; w < 2; w++)
        __atomic_store_n(&d->report[w].stop, 1, __ATOMIC_RELEASE);
}

colo_status_t colo_path_poll(const colo_path_t *d, char *error_message, size_t cap)
{
    const struct colo_peer *p = d->peer;
    for (int i = 0; i < 2; i++) {
        const struct colo_path_pass *w = &d->pass[i];
        const colo_k_report_t *r = &d->report[i];
        const uint64_t code = __atomic_load_n(&r->code, __ATOMIC_ACQUIRE);
        char which[200];
        if (code == COLO_K_FINE || code == COLO_K_STOPPED)
            continue;
        const int32_t peer = (int32_t)r->peer < p->size ? (int32_t)r->peer : 0;
        snprintf(which, sizeof which,
                 "rank %d (world rank %lld) of '%s', call %llu of the pair, exchange #%llu here",
                 (int)peer, (long long)p->world[peer], p->name, (unsigned long long)r->call,
                 (unsigned long long)atomic_load(&w->seq));
        if (code == COLO_K_TIMEOUT) {
            snprintf(error_message, cap,
                     "%s: waited %lld ms for %s: it did not come, or took the staged path (the "
                     "tensors of one call are registered on all ranks or on none)",
                     w->name, (long long)atomic_load(&w->deadline_ms), which);
            return COLO_ERR_TIMEOUT;
        }
        if (code == COLO_K_PEER_FAILED) {
            snprintf(error_message, cap, "%s: gave up after %s did", w->name, which);
            return COLO_ERR_PEER;
        }
        if (code == COLO_K_ELSEWHERE) {
            snprintf(error_message, cap,
                     "%s: it goes to another place in registered memory than here (of memory %llu, "
                     "or at another offset) on %s",
                     w->name, (unsigned long long)r->memory, which);
            return COLO_ERR_MISMATCH;
        }
        snprintf(error_message, cap, "%s: memory %llu is not known here; from %s", w->name,
                 (unsigned long long)r->memory, which);
        return COLO_ERR_STATE;
    }
    return COLO_OK;
}
