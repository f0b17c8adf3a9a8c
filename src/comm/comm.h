/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h (private) - the seam between the comm front (comm.c) and its backends.
 *
 * comm.c checks arguments, the dead flag and the deadline's length, keeps the ledger, runs the
 * COLO_CHECK=2 fingerprint, and calls the backend. A backend moves bytes, waits with the deadline,
 * and reports failure. Backends never print, never touch the ledger.
 */
#ifndef COLO_COMM_COMM_H
#define COLO_COMM_COMM_H

#include <colobridge/comm.h>

typedef struct colo_comm_ops {
    const char *name;
    uint32_t abi; /* COLO_COMM_ABI; a backend library of another one is refused */
    colo_status_t (*all_gather)(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                colo_stream_t stream);
    colo_status_t (*all_reduce)(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream);
    colo_status_t (*reduce_scatter)(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                    colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream);
    colo_status_t (*broadcast)(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                               colo_stream_t stream);
    colo_status_t (*barrier)(colo_comm_t *c, colo_stream_t stream);
    colo_status_t (*exchange)(colo_comm_t *c, const colo_message_t *sends, int32_t nsends,
                              const colo_message_t *recvs, int32_t nrecvs, colo_dtype_t dtype,
                              colo_stream_t stream);
    /* @members: parent ranks of the new comm, ascending by new rank, this rank among them.
     * Fills child->impl; every member calls with the same list and the same @tag. */
    colo_status_t (*subset)(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                            colo_comm_t *child);
    void (*fail)(colo_comm_t *c, colo_status_t status, const char *sentence); /* tell the peers */
    colo_status_t (*state)(const colo_comm_t *c, char *sentence, size_t cap); /* OK, or what killed it */
    void (*destroy)(colo_comm_t *c); /* frees impl */
} colo_comm_ops_t;

#define COLO_COMM_ABI 1u
#define COLO_RING 256

typedef struct colo_ring_entry {
    uint64_t seq;
    colo_op_kind_t kind;
    colo_owner_t owner;
    colo_dtype_t dtype;
    int64_t sent_bytes, recv_bytes;
    int32_t peers;
    colo_status_t status; /* PENDING while it runs */
    double begin, end;    /* seconds, monotonic clock */
} colo_ring_entry_t;

struct colo_comm {
    const colo_comm_ops_t *ops;
    void *impl;
    int32_t rank, size;
    int64_t *world_rank; /* [size]; owned */
    char name[32];
    int64_t timeout_ms;
    int32_t check;
    uint64_t seq;       /* of the last operation begun */
    uint64_t split_tag; /* how many children this rank asked for */
    void *lock;         /* pthread_mutex_t *: ledger and ring against dump */
    colo_ledger_t ledger;
    colo_ring_entry_t ring[COLO_RING];
};

/* Operations on behalf of a part of the library: as the public ones, counted for @owner. */
colo_status_t colo_comm_i_all_gather(colo_comm_t *c, colo_owner_t owner, const void *send,
                                     void *recv, int64_t count, colo_dtype_t dtype,
                                     colo_stream_t stream);
colo_status_t colo_comm_i_all_reduce(colo_comm_t *c, colo_owner_t owner, const void *send,
                                     void *recv, int64_t count, colo_dtype_t dtype,
                                     colo_redop_t op, colo_stream_t stream);
colo_status_t colo_comm_i_exchange(colo_comm_t *c, colo_owner_t owner, const colo_message_t *sends,
                                   int32_t nsends, const colo_message_t *recvs, int32_t nrecvs,
                                   colo_dtype_t dtype, colo_stream_t stream);
colo_status_t colo_comm_i_split_color(colo_comm_t *parent, colo_owner_t owner, int64_t color,
                                      int64_t key, colo_comm_t **comm);

/*
 * Every rank brings a fingerprint of what it thinks is being done; all get COLO_ERR_MISMATCH with
 * the same sentence when two differ (first rank that differs from rank 0, and @what). Also carries
 * each rank's own status: when one brings an error, it returns its own, the others COLO_ERR_PEER
 * with its sentence. The comm stays alive in both cases.
 */
colo_status_t colo_comm_i_agree(colo_comm_t *c, const char *what, uint64_t fingerprint,
                                colo_status_t mine);

/* Marks the comm failed with this thread's last error, so that peers wake with COLO_ERR_PEER;
 * returns @status unchanged. For local errors inside an operation that peers take part in. */
colo_status_t colo_comm_i_fail(colo_comm_t *c, colo_status_t status);

/* A comm with everything but impl; frees with colo_comm_destroy(). */
colo_status_t colo_comm_i_new(colo_comm_t **comm, const colo_comm_ops_t *ops, int32_t rank,
                              int32_t size, const int64_t *world_rank /* NULL: 0..size-1 */);

double colo_now(void); /* seconds, monotonic */

#endif
