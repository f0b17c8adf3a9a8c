/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.h (private) - what the ranks of one in-process group share.
 *
 * shared.c makes and frees it, with the registry through which children are met; threads.c runs
 * operations over it, launch.c a function on many threads.
 */
#ifndef COLO_COMM_THREADS_THREADS_H
#define COLO_COMM_THREADS_THREADS_H

#include "comm/comm.h"
#include "comm/error-state.h"
#include "comm/wait.h"

enum {
    COLO_ROUNDS = 2
}; /* exchanges of an operation, at most: round / COLO_ROUNDS is its number */

/* One rank as its peers see it. round, open, done only grow while the comm lives (open returns to
 * 0); the plain fields are the owner's to write while closed and the peers' to read under a read
 * reference while open. */
struct colo_slot {
    _Alignas(128) _Atomic uint64_t round; /* last one arrived at */
    _Atomic uint64_t open;                /* round that peers may read; 0: closed */
    _Atomic uint64_t desc, count;         /* what it is, for comparison and error messages */
    _Atomic uint64_t done;                /* last round in which I read all I need */
    _Atomic uint32_t gone;                /* destroyed: will not arrive any more */
    int32_t origin;                       /* rank in the run; never written again */
    const colo_exchange_t *exchange;
    _Atomic uint64_t *ack; /* [nsends]: receiver i took it in round ack[i] */
    _Alignas(
        128) _Atomic uint32_t readers; /* read references; on a line of its own, peers write it */
};

struct colo_root { /* of all comms made in one run */
    _Atomic int32_t refs;
    colo_error_state_t error;
    _Atomic bool left[]; /* by rank of the run: its function has returned */
};

struct colo_child; /* a subset that some of its members have asked for and others not yet */

struct colo_shared {
    _Atomic int32_t refs;
    int32_t size;
    struct colo_root *root; /* a reference */
    colo_error_state_t error;
    pthread_mutex_t lock; /* children */
    struct colo_child *children;
    struct colo_slot slot[];
};

/* Rank @peer destroyed this comm, or returned from the run without. */
static inline bool colo_threads_has_left(const struct colo_shared *shared, int32_t peer)
{
    const struct colo_slot *slot = &shared->slot[peer];
    return atomic_load_explicit(&slot->gone, memory_order_acquire) ||
           atomic_load_explicit(&shared->root->left[slot->origin], memory_order_acquire);
}

struct colo_threads {           /* colo_comm.impl; of one rank */
    struct colo_shared *shared; /* a reference */
    uint64_t round;             /* of now */
    colo_wait_t wait;
    _Atomic uint64_t *ack; /* owned, [ack_cap] */
    int32_t ack_cap;
};

extern const colo_comm_backend_t colo_comm_threads_backend;

/* What the world of a new run shares; NULL: there is no memory. */
struct colo_shared *colo_shared_of_run(int32_t ranks);
void colo_shared_release(struct colo_shared *shared);
/* Gives @comm its impl. Takes the reference to @shared, also when it fails. */
colo_status_t colo_shared_attach(colo_comm_t *comm, struct colo_shared *shared);
colo_status_t colo_threads_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                  uint64_t tag, colo_comm_t *child);
colo_status_t colo_threads_state(const colo_comm_t *comm, char *error_message, size_t cap);

#endif
