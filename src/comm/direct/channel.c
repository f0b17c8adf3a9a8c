/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.c - mailboxes for kernels that wait for peers, and what became of the waits.
 *
 * A kernel that gives up says so in pinned memory, and colo_direct_check() makes an error message
 * of it. Mailboxes outlive their channel, as long as the comm, and those of a channel that died the
 * process: a peer that comes late may write there.
 *
 * Left to others: the handshake itself (kernels/direct.cu), what is launched (allgather.c,
 * launch.c).
 */
#include "comm/direct/registry.h"

#include "capture.h"
#include "core/error.h"
#include "core/helper.h"
#include "core/list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t mailboxes_bytes(const struct colo_direct *p)
{
    return (size_t)p->size * COLO_K_MAILBOX * 2 + 2 * COLO_K_MAILBOX;
}

static uint64_t *mailbox_of(char *mailboxes, const struct colo_direct *p, int pass, int32_t rank)
{
    return (uint64_t *)(void *)(mailboxes +
                                ((size_t)pass * (size_t)p->size + (size_t)rank) * COLO_K_MAILBOX);
}

/* ---- for kernels ---- */

int32_t colo_direct_channel_partner(const colo_direct_channel_t *d, int pass, colo_k_direct_t *k,
                                    int32_t rank, int32_t role)
{
    const struct colo_direct *p = d->direct;
    int32_t i = 0;
    while (i < k->npartners && k->partner[i].rank != rank)
        i++;
    if (i == COLO_K_PARTNERS)
        return COLO_DIRECT_CHANNEL_FULL;
    if (i == k->npartners)
        k->partner[k->npartners++] =
            (colo_k_partner_t){.mine = mailbox_of(d->mailboxes, p, pass, rank),
                               .remote = mailbox_of(d->share.base[rank], p, pass, p->rank),
                               .rank = rank};
    k->partner[i].exposes |= role;
    return i;
}

colo_status_t colo_direct_channel_too_many(const colo_direct_channel_t *channel, const char *what)
{
    return colo_fail(COLO_ERR_UNBUILT, "%s: more than %d ranks to exchange with on comm '%s'", what,
                     COLO_K_PARTNERS, channel->direct->name);
}

void colo_direct_channel_fill(const colo_direct_channel_t *channel, int pass, colo_k_direct_t *k)
{
    k->early = channel->direct->early;
    k->control =
        (colo_k_control_t *)(void *)mailbox_of(channel->mailboxes, channel->direct, 2, pass);
    k->table = channel->direct->table;
    k->report = &channel->report[pass];
}

void colo_direct_channel_call(colo_direct_channel_t *channel, int pass, colo_k_direct_t *k)
{
    struct colo_direct *p = channel->direct;
    p->timeout_ms = colo_comm_timeout(channel->comm);
    k->deadline_ns = (uint64_t)p->timeout_ms * 1000000u;
    atomic_store(&channel->pass[pass].seq, channel->comm->seq);
    atomic_store(&channel->pass[pass].deadline_ms, p->timeout_ms);
    atomic_store(&p->used, true);
}

/* ---- create and destroy ---- */

static bool is_dead(const colo_direct_channel_t *d)
{
    char why[900];
    bool dead = atomic_load(&d->direct->stopped) ||
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
    colo_direct_channel_t *d = arg;
    (void)cudaSetDevice(device);
    if (d->direct->used)
        (void)cudaEventSynchronize(d->direct->order->done);
    d->end(d);
    colo_direct_unshare(&d->share);
    if (!d->dead) {
        if (d->mailboxes)
            colo_direct_retire(d->direct, d->mailboxes);
        cudaFreeHost(d->report);
    }
    (void)cudaGetLastError();
    colo_direct_drop(d->direct);
    free(d);
}

static void channel_free(colo_direct_channel_t *d)
{
    d->direct->timeout_ms = colo_comm_timeout(d->comm);
    d->dead = d->share.stays || (d->report && is_dead(d));
    (void)colo_end_on(d->direct->device, d->direct->timeout_ms, end_on, d);
}

static colo_status_t make_mailboxes(colo_direct_channel_t *d)
{
    const size_t bytes = mailboxes_bytes(d->direct);
    cudaError_t e = cudaMalloc((void **)&d->mailboxes, bytes);
    COLO_THEN(e, cudaMemsetAsync(d->mailboxes, 0, bytes, d->direct->stream));
    COLO_THEN(e, cudaStreamSynchronize(d->direct->stream));
    COLO_THEN(e, cudaHostAlloc((void **)&d->report, 2 * sizeof *d->report,
                               cudaHostAllocMapped | cudaHostAllocPortable));
    COLO_TRY(colo_cuda_error("bridge", e));
    memset(d->report, 0, 2 * sizeof *d->report);
    return COLO_OK;
}

colo_status_t colo_direct_channel_open(colo_comm_t *c, colo_direct_channel_t *channel,
                                       colo_status_t st)
{
    struct colo_direct *p = colo_direct_of(c);
    if (channel) {
        channel->direct = p;
        atomic_fetch_add(&p->refs, 1);
        channel->comm = c;
        st = make_mailboxes(channel);
    }
    st = colo_comm_agree(colo_comm_control(c), "bridge create", 2, st);
    COLO_THEN(
        st, colo_direct_share(c, p, channel->mailboxes, mailboxes_bytes(p), NULL, &channel->share));
    if (st < 0 && channel)
        channel_free(channel);
    return st;
}

colo_status_t colo_direct_channel_enter(colo_direct_channel_t *channel, colo_status_t st)
{
    struct colo_direct *p = channel->direct;
    st = colo_direct_agree_on(channel->comm, st);
    if (st < 0) {
        st = colo_direct_close(channel->comm, &channel->share, st);
        channel_free(channel);
        return st;
    }
    COLO_HOLD(&p->lock);
    channel->next = p->channels;
    p->channels = channel;
    if (atomic_load(&p->stopped))
        colo_direct_channel_stop(channel);
    return COLO_OK;
}

void colo_direct_channel_destroy(colo_direct_channel_t *channel)
{
    if (!channel)
        return;
    pthread_mutex_lock(&channel->direct->lock);
    COLO_UNLINK(channel->direct->channels, channel);
    pthread_mutex_unlock(&channel->direct->lock);
    channel_free(channel);
}

/* ---- what became of it ---- */

void colo_direct_channel_stop(colo_direct_channel_t *d)
{
    for (int w = 0; w < 2; w++)
        __atomic_store_n(&d->report[w].stop, 1, __ATOMIC_RELEASE);
}

colo_status_t colo_direct_channel_poll(const colo_direct_channel_t *d, char *error_message,
                                       size_t cap)
{
    const struct colo_direct *p = d->direct;
    for (int i = 0; i < 2; i++) {
        const struct colo_direct_channel_pass *w = &d->pass[i];
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
