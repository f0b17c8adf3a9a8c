/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.c - ranks are threads of this process; peers read each other's buffers directly.
 *
 * A group shares one state with a slot per rank. An operation publishes the slot, waits for
 * the peers it needs, checks that they do the same thing, reads their buffers, says so, and waits
 * until the ranks that read its own are done. Collectives wait for all ranks twice (arrived,
 * finished); an exchange waits for the peers it names, and for their acknowledgement of what was
 * sent to them.
 *
 * Two rules keep memory safe when ranks go wrong:
 *   references    a rank follows a peer's pointers only under a read reference (readers + 1, then:
 *                 is the slot still open for this operation?). An operation ends, also by failing,
 *                 by closing the slot and waiting until no rank has a reference to it. So no rank
 *                 reads a buffer whose call returned.
 *   error states  the first error sets the shared state's error state (or the root's, shared by all
 *                 shared states of one run); every wait checks both. A rank checks for a slot that
 *                 is closed early after the error state.
 *
 * Nothing is allocated per operation once workspace has grown to the largest one.
 *
 * Left to comm.c: arguments, statistics, the comparison of COLO_CHECK=2, which ranks are dead.
 */
#include "comm/comm.h"

#include "comm/reduce.h"
#include "comm/threads/threads.h"
#include "comm/wait.h"
#include "core/box.h"
#include "core/error.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum {
    SMALL_REDUCE = 8 << 10, /* bytes up to which every rank reduces everything: one wait less */
};

/* ---- waiting ---- */

static void sets(colo_comm_t *c, colo_status_t status, int32_t culprit, const char *error_message)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    colo_error_state_set(&shared->error, status, culprit, culprit < 0 ? -1 : c->world_rank[culprit],
                         error_message);
}

colo_status_t colo_threads_state(const colo_comm_t *c, char *error_message, size_t cap)
{
    const struct colo_threads *t = c->impl;
    colo_status_t st = colo_error_state_notify(&t->shared->error, c->rank, error_message, cap);
    if (st != COLO_OK)
        return st;
    return colo_error_state_notify(&t->shared->root->error, t->shared->slot[c->rank].origin,
                                   error_message, cap);
}

static bool failed(const struct colo_threads *t)
{
    return colo_error_state_is_set(&t->shared->error) ||
           colo_error_state_is_set(&t->shared->root->error);
}

static colo_status_t verdict(colo_comm_t *c)
{
    char error_message[1000];
    colo_status_t st = colo_threads_state(c, error_message, sizeof error_message);
    return colo_fail(st, "%s", error_message);
}

static uint64_t slot_seq(const struct colo_slot *s)
{
    return atomic_load_explicit(&s->seq, memory_order_acquire);
}

static colo_waiter_t waiter(const colo_comm_t *c, int32_t peer)
{
    const struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[peer];
    return (colo_waiter_t){c->name, c->world_rank,
                           c->rank, c->size,
                           c->op,   c->seq,
                           peer,    {slot_seq(s), atomic_load(&s->desc), atomic_load(&s->count)},
                           false};
}

/* @timeout_ms: 0: it left */
static colo_status_t missing(colo_comm_t *c, int32_t peer, int64_t timeout_ms)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(c, peer);
    colo_blame_missing(error_message, &me, timeout_ms, me.last.seq >= c->seq);
    sets(c, COLO_ERR_TIMEOUT, -1, error_message);
    return verdict(c);
}

/* @found: NULL: it went on without this rank */
static colo_status_t mismatch(colo_comm_t *c, int32_t peer, const char *found)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(c, peer);
    if (failed(c->impl)) /* a slot closed early is the effect, not the cause */
        return verdict(c);
    colo_blame_mismatch(error_message, &me, found, false);
    sets(c, COLO_ERR_MISMATCH, -1, error_message);
    return verdict(c);
}

/* Polls once for @peer. */
static colo_status_t poll_once(colo_comm_t *c, colo_wait_t *w, int32_t peer)
{
    struct colo_threads *t = c->impl;
    const struct colo_slot *s = &t->shared->slot[peer];
    const bool left =
        colo_threads_has_left(t->shared, peer); /* looked at first: why it left was set before */
    if (failed(t))
        return verdict(c);
    if (colo_wait_spin(w))
        return COLO_OK;
    const double waited = colo_now() - w->begin;
    if (left && slot_seq(s) < c->seq)
        return missing(c, peer, 0);
    if (waited * 1e3 > (double)colo_comm_i_timeout(c))
        return missing(c, peer, colo_comm_i_timeout(c));
    const double nap = colo_wait_nap(waited);
    if (nap > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(nap * 1e9)}, NULL);
    return COLO_OK;
}

/* Waits until @word, which rank @peer writes, has reached this operation. */
static colo_status_t await(colo_comm_t *c, colo_wait_t *w, int32_t peer,
                           const _Atomic uint64_t *word)
{
    while (atomic_load_explicit(word, memory_order_acquire) < c->seq) {
        colo_status_t st = poll_once(c, w, peer);
        /* what killed the group may have come after the peer had: then this is not its business */
        if (st < 0 && atomic_load_explicit(word, memory_order_acquire) < c->seq)
            return st;
    }
    return COLO_OK;
}

/* ---- slots ---- */

/* Publishes what the caller put into the slot's plain fields; from here on peers may read it. */
static colo_wait_t open_slot(colo_comm_t *c)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[c->rank];
    atomic_store_explicit(&s->desc, colo_op_pack(&c->op), memory_order_release);
    atomic_store_explicit(&s->count, (uint64_t)c->op.count, memory_order_release);
    atomic_store(&s->open, c->seq);
    atomic_store_explicit(&s->seq, c->seq, memory_order_release);
    return (colo_wait_t){.begin = colo_now()};
}

static colo_status_t close_slot(colo_comm_t *c, colo_status_t st)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[c->rank];
    atomic_store(&s->open, 0);
    while (atomic_load(&s->readers) != 0) /* a copy in flight: bounded, no deadline needed */
        sched_yield();
    return st;
}

static void unpin(struct colo_slot *s)
{
    atomic_fetch_sub_explicit(&s->readers, 1, memory_order_release);
}

static bool reference(struct colo_slot *s, uint64_t seq)
{
    /* Dekker with close_slot(): either it sees this reader or this sees the slot closed. */
    atomic_fetch_add(&s->readers, 1);
    if (atomic_load(&s->open) == seq)
        return true;
    unpin(s);
    return false;
}

static colo_status_t reference_peer(colo_comm_t *c, int32_t peer)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[peer];
    return reference(s, c->seq) ? COLO_OK : mismatch(c, peer, NULL);
}

static colo_status_t same_words(colo_comm_t *c, int32_t peer, uint64_t desc, uint64_t count)
{
    if (desc == colo_op_pack(&c->op) && count == (uint64_t)c->op.count)
        return COLO_OK;
    char found[200];
    return mismatch(c, peer,
                    colo_op_found(found, sizeof found, c->op, colo_op_unpack(desc, count), c->seq));
}

/* Rank @peer has arrived: at the same operation? A read reference is not needed, the words are
 * atomic and the slot that is still open afterwards had them for this operation. */
static colo_status_t same_operation(colo_comm_t *c, int32_t peer)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[peer];
    uint64_t desc = atomic_load_explicit(&s->desc, memory_order_acquire);
    uint64_t count = atomic_load_explicit(&s->count, memory_order_acquire);
    if (atomic_load(&s->open) != c->seq)
        return mismatch(c, peer, NULL);
    return same_words(c, peer, desc, count);
}

static colo_status_t await_all(colo_comm_t *c, colo_wait_t *w)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    for (int32_t k = 1; k < c->size; k++) {
        int32_t peer = (c->rank + k) % c->size;
        COLO_TRY(await(c, w, peer, &shared->slot[peer].seq));
        COLO_TRY(same_operation(c, peer));
    }
    return COLO_OK;
}

/* I have read all that I need of the others; wait until they have, too. */
static colo_status_t finish_all(colo_comm_t *c, colo_wait_t *w)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    atomic_store_explicit(&shared->slot[c->rank].done, c->seq, memory_order_release);
    for (int32_t k = 1; k < c->size; k++) {
        int32_t peer = (c->rank + k) % c->size;
        COLO_TRY(await(c, w, peer, &shared->slot[peer].done));
    }
    return COLO_OK;
}

/* ---- collectives ---- */

static colo_status_t threads_barrier(colo_comm_t *c, colo_stream_t stream)
{
    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    st = finish_all(c, &w);
out:
    return close_slot(c, st);
}

static colo_status_t threads_all_gather(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                        colo_stream_t stream)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    shared->slot[c->rank].send = send;
    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    if (bytes && (char *)recv + (size_t)c->rank * bytes != send)
        memcpy((char *)recv + (size_t)c->rank * bytes, send, bytes);
    for (int32_t k = 1; bytes && k < c->size; k++) {
        int32_t peer = (c->rank + k) % c->size;
        COLO_TRY_GOTO(st, reference_peer(c, peer), out);
        memcpy((char *)recv + (size_t)peer * bytes, shared->slot[peer].send, bytes);
        unpin(&shared->slot[peer]);
    }
    st = finish_all(c, &w);
out:
    return close_slot(c, st);
}

static colo_status_t threads_broadcast(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                                       colo_stream_t stream)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    shared->slot[c->rank].send = buffer;
    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    if (bytes && root != c->rank) {
        COLO_TRY_GOTO(st, reference_peer(c, root), out);
        memcpy(buffer, shared->slot[root].send, bytes);
        unpin(&shared->slot[root]);
    }
    st = finish_all(c, &w);
out:
    return close_slot(c, st);
}

/* dst = reduction of elements [lo, hi) of what all ranks published */
static colo_status_t reduce_slices(colo_comm_t *c, void *dst, int64_t lo, int64_t hi)
{
    struct colo_threads *t = c->impl;
    struct colo_slot *slot = t->shared->slot;
    colo_status_t st = COLO_OK;
    int32_t referenced = 0;
    for (; referenced < c->size && st == COLO_OK; referenced++) {
        if (referenced != c->rank)
            st = reference_peer(c, referenced);
        if (st != COLO_OK)
            break;
        t->src[referenced] = slot[referenced].send;
    }
    if (st == COLO_OK)
        colo_reduce_host(dst, t->src, c->size, lo, hi, c->op.dtype, (colo_redop_t)c->op.param);
    while (referenced-- > 0)
        if (referenced != c->rank)
            unpin(&slot[referenced]);
    return st;
}

/* Every rank reduces all values into its own workspace, which no other rank reads. */
static colo_status_t all_reduce_small(colo_comm_t *c, void *recv, int64_t count, size_t elem)
{
    struct colo_threads *t = c->impl;
    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    COLO_TRY_GOTO(st, reduce_slices(c, t->workspace, 0, count), out);
    COLO_TRY_GOTO(st, finish_all(c, &w), out);
    memcpy(recv, t->workspace, (size_t)count * elem);
out:
    return close_slot(c, st);
}

static colo_status_t threads_all_reduce(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                        colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    struct colo_threads *t = c->impl;
    struct colo_slot *slot = t->shared->slot, *me = &slot[c->rank];
    const size_t elem = colo_dtype_size(dtype);
    if (count == 0)
        return threads_barrier(c, stream);
    const bool small = (size_t)count <= SMALL_REDUCE / elem;
    const int64_t lo = colo_reduce_slice(count, c->size, c->rank),
                  hi = colo_reduce_slice(count, c->size, c->rank + 1);
    COLO_TRY(colo_reduce_grow(&t->workspace, &t->workspace_bytes, "all_reduce",
                              (size_t)(small ? count : hi - lo) * elem));
    me->send = send;
    me->workspace = t->workspace;
    if (small)
        return all_reduce_small(c, recv, count, elem);

    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    COLO_TRY_GOTO(st, reduce_slices(c, t->workspace, lo, hi), out);
    atomic_store_explicit(&me->reduced, c->seq, memory_order_release);
    /* recv may be a rank's send: write it only when all have read */
    for (int32_t k = 1; k < c->size; k++) {
        int32_t peer = (c->rank + k) % c->size;
        COLO_TRY_GOTO(st, await(c, &w, peer, &slot[peer].reduced), out);
    }
    for (int32_t k = 0; k < c->size; k++) {
        int32_t peer = (c->rank + k) % c->size;
        int64_t from = colo_reduce_slice(count, c->size, peer),
                to = colo_reduce_slice(count, c->size, peer + 1);
        if (peer != c->rank)
            COLO_TRY_GOTO(st, reference_peer(c, peer), out);
        memcpy((char *)recv + (size_t)from * elem, slot[peer].workspace,
               (size_t)(to - from) * elem);
        if (peer != c->rank)
            unpin(&slot[peer]);
    }
    st = finish_all(c, &w);
out:
    return close_slot(c, st);
}

static colo_status_t threads_reduce_scatter(colo_comm_t *c, const void *send, void *recv,
                                            int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                            colo_stream_t stream)
{
    struct colo_shared *shared = ((struct colo_threads *)c->impl)->shared;
    shared->slot[c->rank].send = send;
    colo_status_t st;
    colo_wait_t w = open_slot(c);
    COLO_TRY_GOTO(st, await_all(c, &w), out);
    if (count)
        COLO_TRY_GOTO(st, reduce_slices(c, recv, c->rank * count, (c->rank + 1) * count), out);
    st = finish_all(c, &w);
out:
    return close_slot(c, st);
}

/* ---- exchange ---- */

static int32_t find_message(const colo_message_t *m, int32_t n, int32_t peer)
{
    int32_t lo = 0, hi = n;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (m[mid].peer < peer)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < n && m[lo].peer == peer ? lo : -1;
}

static colo_status_t same_boxes(colo_comm_t *c, const colo_message_t *recv,
                                const colo_message_t *send)
{
    char found[240];
    if (send->nboxes != recv->nboxes) {
        snprintf(found, sizeof found, "sends it %d boxes where %d are expected", (int)send->nboxes,
                 (int)recv->nboxes);
        return mismatch(c, recv->peer, found);
    }
    for (int32_t k = 0; k < recv->nboxes; k++) {
        const int64_t *have = send->boxes[k].extent, *want = recv->boxes[k].extent;
        if (have[0] == want[0] && have[1] == want[1] && have[2] == want[2])
            continue;
        snprintf(found, sizeof found,
                 "sends it box %d of %lldx%lldx%lld elements where %lldx%lldx%lld are expected",
                 (int)k, (long long)have[0], (long long)have[1], (long long)have[2],
                 (long long)want[0], (long long)want[1], (long long)want[2]);
        return mismatch(c, recv->peer, found);
    }
    return COLO_OK;
}

/* Waits for the sender of @recv and checks its message; nothing is copied yet. */
static colo_status_t visit_sender(colo_comm_t *c, colo_wait_t *w, const colo_message_t *recv)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[recv->peer];
    COLO_TRY(await(c, w, recv->peer, &s->seq));
    COLO_TRY(same_operation(c, recv->peer));
    COLO_TRY(reference_peer(c, recv->peer));
    int32_t i = find_message(s->exchange->send, s->exchange->nsends, c->rank);
    colo_status_t st = i < 0 ? mismatch(c, recv->peer, "sends it no message where one is expected")
                             : same_boxes(c, recv, &s->exchange->send[i]);
    unpin(s);
    return st;
}

/* Waits for the receiver of send @i, which may already have taken it and gone on. */
static colo_status_t visit_receiver(colo_comm_t *c, colo_wait_t *w, int32_t peer, int32_t i)
{
    struct colo_threads *t = c->impl;
    struct colo_slot *s = &t->shared->slot[peer];
    COLO_TRY(await(c, w, peer, &s->seq));
    colo_status_t st = COLO_OK;
    if (reference(s, c->seq)) {
        /* it may close its slot meanwhile, having taken the message; the read reference keeps the
         * words */
        st = same_words(c, peer, atomic_load(&s->desc), atomic_load(&s->count));
        if (st == COLO_OK && find_message(s->exchange->recv, s->exchange->nrecvs, c->rank) < 0)
            st = mismatch(c, peer, "expects no message from it where it sends one");
        unpin(s);
    } else if (atomic_load_explicit(&t->ack[i], memory_order_acquire) < c->seq) {
        st = mismatch(c, peer, NULL);
    }
    return st;
}

static colo_status_t take_message(colo_comm_t *c, const colo_message_t *recv, size_t elem)
{
    struct colo_slot *s = &((struct colo_threads *)c->impl)->shared->slot[recv->peer];
    COLO_TRY(reference_peer(c, recv->peer));
    int32_t i = find_message(s->exchange->send, s->exchange->nsends, c->rank);
    for (int32_t k = 0; k < recv->nboxes; k++)
        colo_box_copy_host(&recv->boxes[k], &s->exchange->send[i].boxes[k], elem);
    atomic_store_explicit(&s->ack[i], c->seq, memory_order_release);
    unpin(s);
    return COLO_OK;
}

static colo_status_t grow_acks(struct colo_threads *t, int32_t n)
{
    if (n <= t->ack_cap)
        return COLO_OK;
    _Atomic uint64_t *ack = calloc((size_t)n, sizeof *ack);
    if (!ack)
        return colo_fail(COLO_ERR_NOMEM, "exchange: %d acknowledgements", (int)n);
    free(t->ack);
    t->ack = ack;
    t->ack_cap = n;
    return COLO_OK;
}

static colo_status_t threads_exchange(colo_comm_t *c, const colo_exchange_t *exchange,
                                      colo_stream_t stream)
{
    struct colo_threads *t = c->impl;
    struct colo_slot *me = &t->shared->slot[c->rank];
    const size_t elem = colo_dtype_size(exchange->op.dtype);
    const int32_t nsends = exchange->nsends, nrecvs = exchange->nrecvs;
    COLO_TRY(grow_acks(t, nsends));
    me->exchange = exchange;
    me->ack = t->ack;
    colo_status_t st = COLO_OK;
    colo_wait_t w = open_slot(c);
    for (int32_t i = 0; i < nrecvs; i++)
        COLO_TRY_GOTO(st, visit_sender(c, &w, &exchange->recv[i]), out);
    for (int32_t i = 0; i < nsends; i++)
        COLO_TRY_GOTO(st, visit_receiver(c, &w, exchange->send[i].peer, i), out);
    for (int32_t i = 0; i < nrecvs; i++)
        COLO_TRY_GOTO(st, take_message(c, &exchange->recv[i], elem), out);
    for (int32_t i = 0; i < nsends; i++)
        COLO_TRY_GOTO(st, await(c, &w, exchange->send[i].peer, &t->ack[i]), out);
out:
    return close_slot(c, st);
}

/* ---- failing and leaving ---- */

static void threads_fail(colo_comm_t *c, colo_status_t status, const char *error_message)
{
    struct colo_threads *t = c->impl;
    if (status == COLO_ERR_ABORTED)
        colo_error_state_set(&t->shared->root->error, status, -1, -1, error_message);
    else
        sets(c, status, c->rank, error_message);
}

static void threads_destroy(colo_comm_t *c)
{
    struct colo_threads *t = c->impl;
    atomic_store_explicit(&t->shared->slot[c->rank].gone, 1, memory_order_release);
    colo_shared_release(t->shared);
    free(t->workspace);
    free(t->ack);
    free(t->src);
    free(t);
    c->impl = NULL;
}

const colo_comm_ops_t colo_comm_threads_ops = {
    .name = "threads",
    .abi = COLO_COMM_ABI,
    .all_gather = threads_all_gather,
    .all_reduce = threads_all_reduce,
    .reduce_scatter = threads_reduce_scatter,
    .broadcast = threads_broadcast,
    .barrier = threads_barrier,
    .exchange = threads_exchange,
    .subset = colo_threads_subset,
    .fail = threads_fail,
    .state = colo_threads_state,
    .destroy = threads_destroy,
};
