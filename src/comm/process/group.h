/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h (private) - communicators of ranks in different processes, over any transport.
 *
 * context  all communicators over one set of connections: these, the error state shared by
 *          all (aborts, processes that died), frames that came before their group was made.
 * group    one group: a key that every member computes alike (no agreement is needed to make one),
 *          an error state, and for each peer at most two headers that came early.
 * round    of an operation: exactly one message, perhaps empty, to and from each peer that
 *          takes part. Both sides send a header first and compare; nothing is written to a caller's
 *          memory before all headers are there and agree.
 *
 * group.c keeps contexts and groups; fault.c tells others of faults; arrive.c sorts what arrives;
 * meet.c says what that means to a round; round.c runs rounds.
 */
#ifndef COLO_COMM_PROCESS_GROUP_H
#define COLO_COMM_PROCESS_GROUP_H

#include "comm/comm.h"
#include "comm/error-state.h"
#include "comm/process/pack.h"
#include "comm/process/transport.h"
#include "comm/wait.h"

struct colo_early { /* a header that is here, with the first bytes of its message */
    bool full;
    colo_frame_t header;
    unsigned char *eager; /* [COLO_FRAME_EAGER] in group->eager */
};

struct colo_remote {
    colo_last_op_t last; /* that this rank knows of */
    bool gone;
    uint8_t first; /* which of the two came first */
    struct colo_early early[2];
};

struct colo_transit { /* a message of a round to a peer, or from it */
    bool due;
    struct colo_shape_ shape;
    int64_t left; /* bytes */
    colo_cursor_t cursor;
};

struct colo_process_round { /* what one round does with one peer */
    bool active;
    bool met;   /* its header is here and agrees */
    bool ready; /* it asked for the rest */
    struct colo_transit out, in;
};

struct colo_unexpected { /* a frame of a group that this rank has not made yet */
    struct colo_unexpected *next;
    int32_t peer;
    size_t bytes;
    _Alignas(16) unsigned char frame[];
};

struct colo_process_group { /* colo_comm.impl */
    struct colo_process_group *next;
    struct colo_process_context *context; /* a reference while live */
    colo_comm_t *comm;                    /* until this rank has left */
    uint64_t key;
    bool left; /* by this rank, not yet by all others */
    int32_t rank, size;
    char name[32];        /* for the error messages of frames that come between operations */
    int32_t *world;       /* [size] owned; ranks of the context */
    const int64_t *label; /* [size] the comm's names for them; during operations only */
    colo_error_state_t error;
    uint64_t dead_from; /* operations before this one may still end well on ranks that are late */

    struct colo_remote *peer; /* [size] */
    unsigned char *eager;     /* [size][2][COLO_FRAME_EAGER] */

    /* the last round begun */
    bool running, moving; /* moving: all met */
    uint64_t seq;
    uint8_t round;
    colo_op_desc_t op;
    double begin;
    struct colo_process_round *peer_round; /* [size] */
    int32_t *active;                       /* [nactive] peers */
    int32_t nactive, nmet;
};

struct colo_process_context {
    struct colo_process_context *next; /* in exit.c's list */
    int32_t process;                   /* that made it */
    const colo_process_transport_t *transport;
    void *connections;
    int32_t rank, size;
    pthread_mutex_t lock; /* all below, the groups' peers and rounds, the connections */
    int32_t live;         /* groups that a comm uses */
    struct colo_process_group *group;
    struct colo_unexpected *unexpected, **unexpected_end;
    size_t *unexpected_bytes; /* [size] of the unexpected-message queue, per sender */
    bool *closed;             /* [size] */
    int32_t nclosed;
    int64_t timeout_ms; /* the longest of any comm: for destroy */
    bool alone;         /* its creation failed, and others may not know: no rank says goodbye */
    colo_error_state_t error;
    bool to_notify; /* all ranks, at the next colo_process_notify() */
};

/* ---- group.c ---- */

/* Takes the connections, also when it fails. */
colo_status_t colo_process_comm(const colo_comm_backend_t *table,
                                const colo_process_transport_t *transport, void *connections,
                                int32_t rank, int32_t size, colo_comm_t **comm);
/* The end of creating @world: the environment of one rank that is refused (colo_env_check) is an
 * error on all, and so is another version of the library or level of checks; each rank learns the
 * nodes of all. It is @comm then, or destroyed. */
colo_status_t colo_process_agree(colo_comm_t *world, const char *what, double begin,
                                 colo_comm_t **comm);
colo_status_t colo_process_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                  uint64_t tag, colo_comm_t *child);
void colo_process_fail(colo_comm_t *c, colo_status_t status, const char *error_message);
colo_status_t colo_process_state(const colo_comm_t *comm, char *error_message, size_t cap);
void colo_process_destroy(colo_comm_t *comm);

/* ---- exit.c ---- */
void colo_process_exit_add(struct colo_process_context *context);
/* Takes one that was not added, too. */
void colo_process_exit_remove(struct colo_process_context *context);

/* ---- fault.c: the rest is called with the context's lock held ---- */
void colo_process_send(struct colo_process_context *context, int32_t peer, colo_frame_t *frame,
                       const void *payload);
void colo_process_bye(struct colo_process_group *group);
void colo_process_group_free(struct colo_process_group *group);
/* Nothing waits in this process. */
bool colo_process_flushed(const struct colo_process_context *context);
/* Tells the others what they were not told yet. */
void colo_process_notify(struct colo_process_context *context);
/* Frees the groups that all members have left. */
void colo_process_reap(struct colo_process_context *context);
/* Will the operation that runs here not end well? */
bool colo_process_must_fail(const struct colo_process_group *group);
/* Kills the group from operation @seq on, once, and tells its members; @culprit: rank, or -1 if all
 * ranks are. */
void colo_process_set_error(struct colo_process_group *group, uint64_t seq, colo_status_t status,
                            int32_t culprit, const char *error_message);
/* A fault of operation @seq, here or on another rank: false if one of that or of an older operation
 * is known. */
bool colo_process_take_fault(struct colo_process_group *group, uint64_t seq, colo_status_t status,
                             int32_t culprit, const char *error_message);
/* The group is dead, so this rank refuses its next operation: tells the ranks that wait for it
 * there. */
void colo_process_begin_no_more(struct colo_process_group *group);
void colo_process_frame(struct colo_process_group *group, int32_t to, colo_frame_t *frame,
                        const void *payload);
/* Kills all groups of the context, once, and tells all ranks; @culprit: rank of the context, or
 * -1.
 */
void colo_process_set_error_all(struct colo_process_context *context, colo_status_t status,
                                int32_t culprit, const char *error_message);

/* ---- arrive.c ---- */

/* Moves sends on and sorts what has arrived; a peer that talks without pause does not hold it. */
void colo_process_progress(struct colo_process_context *context);
/* @group is live from now on: what came before it was made. */
void colo_process_take_unexpected(struct colo_process_group *group);

/* ---- meet.c: with the context's lock held ---- */
colo_waiter_t colo_round_waiter(const struct colo_process_group *group, int32_t peer);
/* Kills the group. @found: NULL: @peer went on without this rank */
void colo_round_mismatch(struct colo_process_group *group, int32_t peer, const char *found);
/* @peer has a header here: for now, for later, or for something that will never come? */
void colo_round_poll(struct colo_process_group *group, int32_t peer);
void colo_round_ready(struct colo_process_group *group, const colo_frame_t *frame);
/* False: a peer that keeps to the protocol does not send this. */
bool colo_round_data(struct colo_process_group *group, const colo_frame_t *frame,
                     const void *payload);

/* ---- round.c ---- */
colo_status_t colo_process_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                    colo_stream_t stream);

/* The table of communicators over the transport of that name. */
#define COLO_PROCESS_COMM(name_)                                                                \
    {                                                                                           \
        .name = (name_), .collective = colo_host_collective, .exchange = colo_process_exchange, \
        .subset = colo_process_subset, .fail = colo_process_fail, .state = colo_process_state,  \
        .destroy = colo_process_destroy,                                                        \
    }

#endif
