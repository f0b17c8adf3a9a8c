/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait.h (private) - how a rank waits for others on the host, and what it says of one that does
 * not come, or that comes with another operation.
 */
#ifndef COLO_COMM_WAIT_H
#define COLO_COMM_WAIT_H

#include "comm/comm.h"

typedef struct colo_wait { /* of one operation */
    uint32_t polls;
    double begin; /* of the operation */
} colo_wait_t;

/* A poll was in vain. True while it is too early to read the clock; then this spun for a moment. */
bool colo_wait_spin(colo_wait_t *wait);
/* After that: yields for a while, then says how long to sleep, an eighth of the seconds that the
 * rank has @waited, 1 ms at most. Many more ranks than cores is the normal case. */
double colo_wait_nap(double waited);

/* Does colo_interrupt_set()'s function say yes? Asked of a thread that has @waited so many seconds,
 * and not too often. */
COLO_FOR_MODULES bool colo_interrupted(double waited);

enum { COLO_BLAME = 700 }; /* bytes of an error message */

typedef struct colo_last_op { /* of a peer; seq 0: none */
    uint64_t seq, desc, count;
} colo_last_op_t;

typedef struct colo_waiter { /* a rank in an operation, and a peer that keeps it from its end */
    const char *group;
    const int64_t *world_rank; /* [size] */
    int32_t rank, size;
    colo_op_desc_t op;
    uint64_t seq;
    int32_t peer;
    colo_last_op_t last;
    bool hearsay; /* the peer's last operation is what messages told */
} colo_waiter_t;

/* The peer has not come, or not @arrived at its end, by the deadline; 0: it has left. */
void colo_blame_missing(char text[COLO_BLAME], const colo_waiter_t *me, int64_t timeout_ms,
                        bool arrived);
/* The rank was interrupted while it waited for the peer. */
void colo_blame_interrupted(char text[COLO_BLAME], const colo_waiter_t *me);
/* The peer does not do the same: @found ends "but rank 2 ...". NULL: it went on without this rank,
 * and perhaps @left. */
void colo_blame_mismatch(char text[COLO_BLAME], const colo_waiter_t *me, const char *found,
                         bool left);

#endif
