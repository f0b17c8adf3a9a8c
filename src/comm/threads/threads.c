/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.c - ranks are threads of this process; peers read each other's buffers directly.
 *
 * A group shares one state with a slot per rank. An exchange publishes the slot, waits for the
 * peers that it names, checks that they do the same thing, reads their boxes, says so, and waits
 * for the acknowledgement of what was sent to them. Collectives are exchanges with all
 * (host-collectives.c), which wait until all ranks are done: so they end well on all or on none. A
 * round is one exchange: an operation has up to two.
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
 * Nothing is allocated per exchange once there were as many messages in one.
 *
 * Left to comm.c: arguments, statistics, the comparison of COLO_CHECK=2, which ranks are dead.
 */
#include "comm/comm.h"

#include "comm/threads/threads.h"
#include "comm/wait.h"
#include "core/box.h"
#include "core/error.h"
#include "core/list.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

/* ---- waiting ---- */

static void sets(colo_comm_t *comm, colo_status_t status, int32_t culprit,
                 const char *error_message)
{
    struct colo_shared *shared = ((struct colo_threads *)comm->impl)->shared;
    colo_error_state_set(&shared->error, status, culprit,
                         culprit < 0 ? -1 : comm->world_rank[culprit], error_message);
}

colo_status_t colo_threads_state(const colo_comm_t *comm, char *error_message, size_t cap)
{
    const struct colo_threads *self = comm->impl;
    colo_status_t st =
        colo_error_state_notify(&self->shared->error, comm->rank, error_message, cap);
    if (st != COLO_OK)
        return st;
    return colo_error_state_notify(&self->shared->root->error,
                                   self->shared->slot[comm->rank].origin, error_message, cap);
}

static bool failed(const struct colo_threads *self)
{
    return colo_error_state_is_set(&self->shared->error) ||
           colo_error_state_is_set(&self->shared->root->error);
}

static colo_status_t verdict(colo_comm_t *comm)
{
    char error_message[1000];
    colo_status_t st = colo_threads_state(comm, error_message, sizeof error_message);
    return colo_fail(st, "%s", error_message);
}

static struct colo_slot *slot_of(const colo_comm_t *comm, int32_t rank)
{
    return &((struct colo_threads *)comm->impl)->shared->slot[rank];
}

static uint64_t round_of(const struct colo_slot *slot)
{
    return atomic_load_explicit(&slot->round, memory_order_acquire);
}

static uint64_t my_round(const colo_comm_t *comm)
{
    return ((struct colo_threads *)comm->impl)->round;
}

static colo_waiter_t waiter(const colo_comm_t *comm, int32_t peer)
{
    const struct colo_slot *slot = slot_of(comm, peer);
    const colo_last_op_t last = {round_of(slot) / COLO_ROUNDS, atomic_load(&slot->desc),
                                 atomic_load(&slot->count)};
    return (colo_waiter_t){comm->name, comm->world_rank, comm->rank, comm->size,
                           comm->op,   comm->seq,        peer,       last,
                           false};
}

/* @timeout_ms: 0: it left */
static colo_status_t missing(colo_comm_t *comm, int32_t peer, int64_t timeout_ms)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(comm, peer);
    colo_blame_missing(error_message, &me, timeout_ms, me.last.seq >= comm->seq);
    sets(comm, COLO_ERR_TIMEOUT, -1, error_message);
    return verdict(comm);
}

static colo_status_t interrupted(colo_comm_t *comm, int32_t peer)
{
    const struct colo_threads *self = comm->impl;
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(comm, peer);
    colo_blame_interrupted(error_message, &me);
    colo_error_state_set(&self->shared->root->error, COLO_ERR_ABORTED, -1, -1, error_message);
    return verdict(comm);
}

/* @found: NULL: it went on without this rank */
static colo_status_t mismatch(colo_comm_t *comm, int32_t peer, const char *found)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(comm, peer);
    if (failed(comm->impl)) /* a slot closed early is the effect, not the cause */
        return verdict(comm);
    colo_blame_mismatch(error_message, &me, found, false);
    sets(comm, COLO_ERR_MISMATCH, -1, error_message);
    return verdict(comm);
}

/* Polls once for @peer. */
static colo_status_t poll_once(colo_comm_t *comm, int32_t peer)
{
    struct colo_threads *self = comm->impl;
    colo_wait_t *wait = &self->wait;
    const struct colo_slot *slot = slot_of(comm, peer);
    const bool left =
        colo_threads_has_left(self->shared, peer); /* looked at first: why it left was set before */
    if (failed(self))
        return verdict(comm);
    if (colo_wait_spin(wait))
        return COLO_OK;
    const double waited = colo_now() - wait->begin;
    if (left && round_of(slot) < self->round)
        return missing(comm, peer, 0);
    if (waited * 1e3 > (double)colo_comm_timeout(comm))
        return missing(comm, peer, colo_comm_timeout(comm));
    if (colo_interrupted(waited))
        return interrupted(comm, peer);
    const double nap = colo_wait_nap(waited);
    if (nap > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(nap * 1e9)}, NULL);
    return COLO_OK;
}

/* Waits until @word, which rank @peer writes, has reached this round. */
static colo_status_t await(colo_comm_t *comm, int32_t peer, const _Atomic uint64_t *word)
{
    const uint64_t round = my_round(comm);
    while (atomic_load_explicit(word, memory_order_acquire) < round) {
        colo_status_t st = poll_once(comm, peer);
        /* what killed the group may have come after the peer had: then this is not its business */
        if (st < 0 && atomic_load_explicit(word, memory_order_acquire) < round)
            return st;
    }
    return COLO_OK;
}

/* ---- slots ---- */

/* Publishes what the caller put into the slot's plain fields; from here on peers may read it. */
static void open_slot(colo_comm_t *comm, uint8_t which)
{
    struct colo_threads *self = comm->impl;
    struct colo_slot *slot = slot_of(comm, comm->rank);
    self->round = COLO_ROUNDS * comm->seq + which;
    if (which == 0) /* an operation has one deadline */
        self->wait.begin = colo_now();
    self->wait.polls = 0;
    atomic_store_explicit(&slot->desc, colo_op_pack(&comm->op), memory_order_release);
    atomic_store_explicit(&slot->count, (uint64_t)comm->op.count, memory_order_release);
    atomic_store(&slot->open, self->round);
    atomic_store_explicit(&slot->round, self->round, memory_order_release);
}

static colo_status_t close_slot(colo_comm_t *comm, colo_status_t st)
{
    struct colo_slot *slot = slot_of(comm, comm->rank);
    atomic_store(&slot->open, 0);
    while (atomic_load(&slot->readers) != 0) /* a copy in flight: bounded, no deadline needed */
        sched_yield();
    return st;
}

static void unreference(struct colo_slot *slot)
{
    atomic_fetch_sub_explicit(&slot->readers, 1, memory_order_release);
}

static bool reference(struct colo_slot *slot, uint64_t round)
{
    /* Dekker with close_slot(): either it sees this reader or this sees the slot closed. */
    atomic_fetch_add(&slot->readers, 1);
    if (atomic_load(&slot->open) == round)
        return true;
    unreference(slot);
    return false;
}

static colo_status_t reference_peer(colo_comm_t *comm, int32_t peer)
{
    struct colo_slot *slot = slot_of(comm, peer);
    return reference(slot, my_round(comm)) ? COLO_OK : mismatch(comm, peer, NULL);
}

static colo_status_t same_words(colo_comm_t *comm, int32_t peer, uint64_t desc, uint64_t count)
{
    if (desc == colo_op_pack(&comm->op) && count == (uint64_t)comm->op.count)
        return COLO_OK;
    char found[200];
    return mismatch(
        comm, peer,
        colo_op_found(found, sizeof found, comm->op, colo_op_unpack(desc, count), comm->seq));
}

/* Rank @peer has arrived: at the same operation? A read reference is not needed, the words are
 * atomic and the slot that is still open afterwards had them for this operation. */
static colo_status_t same_operation(colo_comm_t *comm, int32_t peer)
{
    struct colo_slot *slot = slot_of(comm, peer);
    uint64_t desc = atomic_load_explicit(&slot->desc, memory_order_acquire);
    uint64_t count = atomic_load_explicit(&slot->count, memory_order_acquire);
    if (atomic_load(&slot->open) != my_round(comm))
        return mismatch(comm, peer, NULL);
    return same_words(comm, peer, desc, count);
}

/* ---- exchange ---- */

static int32_t find_message(const colo_message_t *message, int32_t n, int32_t peer)
{
    int32_t lo = 0, hi = n;
    COLO_SEARCH(lo, hi, i, message[i].peer < peer)
    return lo < n && message[lo].peer == peer ? lo : -1;
}

static colo_status_t same_boxes(colo_comm_t *comm, const colo_message_t *recv,
                                const colo_message_t *send)
{
    char found[240];
    if (send->nboxes != recv->nboxes) {
        snprintf(found, sizeof found, "sends it %d boxes where %d are expected", (int)send->nboxes,
                 (int)recv->nboxes);
        return mismatch(comm, recv->peer, found);
    }
    for (int32_t k = 0; k < recv->nboxes; k++) {
        const int64_t *have = send->boxes[k].extent, *want = recv->boxes[k].extent;
        if (have[0] == want[0] && have[1] == want[1] && have[2] == want[2])
            continue;
        snprintf(found, sizeof found,
                 "sends it box %d of %lldx%lldx%lld elements where %lldx%lldx%lld are expected",
                 (int)k, (long long)have[0], (long long)have[1], (long long)have[2],
                 (long long)want[0], (long long)want[1], (long long)want[2]);
        return mismatch(comm, recv->peer, found);
    }
    return COLO_OK;
}

/* Ranks in the same collective have the same messages, so none is compared or acknowledged. Of a
 * message of nothing there is nothing to read: a reference to it would take longer than the rest.
 */
static bool is_collective(const colo_comm_t *comm)
{
    return comm->op.kind != COLO_OP_EXCHANGE;
}

/* Waits for the sender of @recv and checks its message; nothing is copied yet. */
static colo_status_t visit_sender(colo_comm_t *comm, const colo_message_t *recv)
{
    struct colo_slot *slot = slot_of(comm, recv->peer);
    COLO_TRY(await(comm, recv->peer, &slot->round));
    COLO_TRY(same_operation(comm, recv->peer));
    if (is_collective(comm))
        return COLO_OK;
    COLO_TRY(reference_peer(comm, recv->peer));
    int32_t i = find_message(slot->exchange->send, slot->exchange->nsends, comm->rank);
    colo_status_t st = i < 0
                           ? mismatch(comm, recv->peer, "sends it no message where one is expected")
                           : same_boxes(comm, recv, &slot->exchange->send[i]);
    unreference(slot);
    return st;
}

/* Waits for the receiver of send @i, which may already have taken it and gone on. */
static colo_status_t visit_receiver(colo_comm_t *comm, int32_t peer, int32_t i)
{
    struct colo_threads *self = comm->impl;
    struct colo_slot *slot = &self->shared->slot[peer];
    COLO_TRY(await(comm, peer, &slot->round));
    colo_status_t st = COLO_OK;
    if (reference(slot, self->round)) {
        /* it may close its slot meanwhile, having taken the message; the read reference keeps the
         * words */
        st = same_words(comm, peer, atomic_load(&slot->desc), atomic_load(&slot->count));
        if (st == COLO_OK &&
            find_message(slot->exchange->recv, slot->exchange->nrecvs, comm->rank) < 0)
            st = mismatch(comm, peer, "expects no message from it where it sends one");
        unreference(slot);
    } else if (atomic_load_explicit(&self->ack[i], memory_order_acquire) < self->round) {
        st = mismatch(comm, peer, NULL);
    }
    return st;
}

static colo_status_t take_message(colo_comm_t *comm, const colo_message_t *recv, size_t elem)
{
    struct colo_slot *slot = slot_of(comm, recv->peer);
    if (is_collective(comm) && recv->nboxes == 0)
        return COLO_OK;
    COLO_TRY(reference_peer(comm, recv->peer));
    int32_t i = find_message(slot->exchange->send, slot->exchange->nsends, comm->rank);
    for (int32_t k = 0; k < recv->nboxes; k++)
        colo_box_copy_host(&recv->boxes[k], &slot->exchange->send[i].boxes[k], elem);
    atomic_store_explicit(&slot->ack[i], my_round(comm), memory_order_release);
    unreference(slot);
    return COLO_OK;
}

static colo_status_t grow_acks(struct colo_threads *self, int32_t n)
{
    if (n <= self->ack_cap)
        return COLO_OK;
    _Atomic uint64_t *ack = calloc((size_t)n, sizeof *ack);
    COLO_FAIL_IF(!ack, COLO_ERR_NOMEM, "exchange: %d acknowledgements", (int)n);
    free(self->ack);
    self->ack = ack;
    self->ack_cap = n;
    return COLO_OK;
}

static colo_status_t threads_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                      colo_stream_t stream)
{
    struct colo_threads *self = comm->impl;
    struct colo_slot *me = &self->shared->slot[comm->rank];
    const size_t elem = colo_dtype_size(exchange->op.dtype);
    const int32_t nsends = exchange->nsends, nrecvs = exchange->nrecvs;
    COLO_TRY(grow_acks(self, nsends));
    me->exchange = exchange;
    me->ack = self->ack;
    colo_status_t st = COLO_OK;
    open_slot(comm, exchange->round);
    for (int32_t i = 0; i < nrecvs; i++)
        COLO_THEN(st, visit_sender(comm, &exchange->recv[i]));
    for (int32_t i = 0; i < nsends && !is_collective(comm); i++)
        COLO_THEN(st, visit_receiver(comm, exchange->send[i].peer, i));
    for (int32_t i = 0; i < nrecvs; i++)
        COLO_THEN(st, take_message(comm, &exchange->recv[i], elem));
    if (st == COLO_OK)
        atomic_store_explicit(&me->done, self->round, memory_order_release);
    for (int32_t i = 0; i < nsends; i++) {
        const int32_t peer = exchange->send[i].peer;
        COLO_THEN(st, await(comm, peer,
                            is_collective(comm) ? &slot_of(comm, peer)->done : &self->ack[i]));
    }
    return close_slot(comm, st);
}

/* ---- failing and leaving ---- */

static void threads_fail(colo_comm_t *comm, colo_status_t status, const char *error_message)
{
    struct colo_threads *self = comm->impl;
    if (status == COLO_ERR_ABORTED)
        colo_error_state_set(&self->shared->root->error, status, -1, -1, error_message);
    else
        sets(comm, status, comm->rank, error_message);
}

static void threads_destroy(colo_comm_t *comm)
{
    struct colo_threads *self = comm->impl;
    atomic_store_explicit(&self->shared->slot[comm->rank].gone, 1, memory_order_release);
    colo_shared_release(self->shared);
    free(self->ack);
    free(self);
    comm->impl = NULL;
}

#define TABLE(backend)                                                                       \
    {                                                                                        \
        .name = (backend), .collective = colo_host_collective, .exchange = threads_exchange, \
        .subset = colo_threads_subset, .fail = threads_fail, .state = colo_threads_state,    \
        .destroy = threads_destroy,                                                          \
    }

const colo_comm_backend_t colo_comm_threads_backend = TABLE("threads");
const colo_comm_backend_t colo_comm_self_backend = TABLE("self");
