/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h - a group of ranks that talk: collectives, a grouped exchange of strided boxes,
 * deadlines.
 *
 * One thread at a time uses a comm. Exception: any thread may call colo_comm_abort(),
 * colo_comm_check() and colo_comm_dump() at any time, as often as it likes. Every wait has a
 * deadline (COLO_TIMEOUT_MS, default 600 s, or colo_comm_set_timeout()). An error that the ranks
 * find by agreement, before anything moves, leaves the comm alive. A timeout, an abort and other
 * errors kill it (colo_comm_check()): only abort, check, dump, getters and destroy answer then.
 *
 * A comm belongs to the process that made it. In a child made by fork() its calls return
 * COLO_ERR_STATE and touch nothing; the child makes comms of its own.
 *
 * Sums combine in rank order (bf16 and fp16 accumulate in fp32), so a result does not depend on
 * message size or backend. Calls borrow their buffers: on the host until they return, on a stream
 * until the stream has passed the operation. A comm rank is 0..size-1; its world rank is
 * colo_comm_world_rank().
 */
#ifndef COLOBRIDGE_COMM_H
#define COLOBRIDGE_COMM_H

#include <colobridge/grid.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_comm colo_comm_t;

typedef enum colo_redop_t {
    COLO_REDOP_SUM = 0,
    COLO_REDOP_MAX = 1 /* propagates NaN */
} colo_redop_t;

/** How tensors of GPUs travel. If COLO_TRANSPORT is not "auto", it overrides the program. */
typedef enum colo_transport_t {
    COLO_TRANSPORT_AUTO = 0, /* the memory of each call decides (memory.h) */
    COLO_TRANSPORT_NCCL = 1, /* staged */
    COLO_TRANSPORT_PEER = 2, /* straight into memory that peers reach, or an error */
    COLO_TRANSPORT_UCX = 3   /* of a bootstrap's config alone: processes use UCX, as COLO_TRANSPORT
                                says; to bridges AUTO */
} colo_transport_t;

/**
 * What a program says of its communicators, the same on all ranks but for flight_recorder: a member
 * of colo_bootstrap_t, or an argument of colo_comm_create_mpi() or colo_comm_configure(). An
 * environment variable that is set overrides its member. Members from check on have defaults: 1, COLO_TRANSPORT_AUTO, NULL.
 */
typedef struct colo_comm_config_t {
    size_t struct_size;
    int64_t timeout_ms;         /* COLO_TIMEOUT_MS: deadline of waits; 0: 600,000 */
    int32_t check;              /* COLO_CHECK: 0..2 */
    colo_transport_t transport; /* COLO_TRANSPORT; a bridge's own, unless AUTO, goes before it */
    /* COLO_FLIGHT_RECORDER: the prefix of colo_comm_flight_record(), at most 1023 bytes, copied;
     * NULL: no file after a failure */
    const char *flight_recorder;
} colo_comm_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_COMM_CONFIG_INIT sizeof(colo_comm_config_t), 0, 1, COLO_TRANSPORT_AUTO, nullptr
#else
#define COLO_COMM_CONFIG_INIT .struct_size = sizeof(colo_comm_config_t), .check = 1
#endif

/** The category that the statistics count an operation in. */
typedef enum colo_category_t {
    COLO_CATEGORY_USER = 0,
    COLO_CATEGORY_BRIDGE = 1,
    COLO_CATEGORY_LOSS = 2,
    COLO_CATEGORY_HEAD = 3,
    COLO_CATEGORY_CHECK = 4, /* agreement at create and fingerprints of COLO_CHECK=2 */
    COLO_CATEGORY_COUNT = 5
} colo_category_t;
#define COLO_CATEGORY_MAX 8 /* there will not be more categories */

typedef enum colo_op_kind_t {
    COLO_OP_ALL_GATHER = 0,
    COLO_OP_ALL_REDUCE = 1,
    COLO_OP_REDUCE_SCATTER = 2,
    COLO_OP_BROADCAST = 3,
    COLO_OP_BARRIER = 4,
    COLO_OP_EXCHANGE = 5,
    COLO_OP_SPLIT = 6,
    COLO_OP_COUNT = 7
} colo_op_kind_t;
#define COLO_OP_MAX 16 /* there will not be more kinds */

/**
 * What one comm did, by kind and category: operations that ended with COLO_OK, and this rank's
 * bytes, sent (given to others) and received, the same by convention on every backend. With n
 * ranks:
 *   all_gather       sent: own bytes; received: (n-1) * own bytes
 *   all_reduce       sent = received: bytes of the buffer * 2(n-1)/n, rounded down (a ring's)
 *   reduce_scatter   sent = received: (n-1) * bytes of a slice
 *   broadcast        the root sends the bytes, the others receive them
 *   exchange         sums over messages;   barrier, split by dims: 0
 *   split by colour  as an all_gather of 16 bytes
 * COLO_CATEGORY_CHECK holds all that COLO_CHECK adds; nothing of it is in the others' counters.
 * A comm of one rank counts operations with 0 bytes. Counters of kinds and categories that the
 * library does not have are 0.
 */
typedef struct colo_comm_stats_t {
    size_t struct_size;
    uint64_t ops[COLO_OP_MAX][COLO_CATEGORY_MAX];
    uint64_t sent_bytes[COLO_OP_MAX][COLO_CATEGORY_MAX];
    uint64_t recv_bytes[COLO_OP_MAX][COLO_CATEGORY_MAX];
} colo_comm_stats_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_COMM_STATS_INIT sizeof(colo_comm_stats_t), {}, {}, {}
#else
#define COLO_COMM_STATS_INIT .struct_size = sizeof(colo_comm_stats_t)
#endif

/** A strided box of up to 3 axes in caller memory, outermost first; strides in elements, >= 0. */
typedef struct colo_box_t {
    void *data;
    int64_t extent[3];
    int64_t stride[3];
} colo_box_t;

/** All boxes to or from one peer, in an order both sides know. */
typedef struct colo_message_t {
    int32_t peer; /* comm rank, never self */
    int32_t nboxes;
    const colo_box_t *boxes;
} colo_message_t;

/* ---- making communicators ---- */

typedef colo_status_t (*colo_rank_fn)(colo_comm_t *world, void *arg);

/**
 * colo_comm_threads_run() - run @fn on @nranks threads of this process, each with its world comm
 * @fn:   gets the rank's world comm, which the run owns and destroys after @fn has returned
 * @arg:  handed to @fn on every rank
 *
 * If a rank returns an error, the waits of the others end with COLO_ERR_PEER. A rank that has
 * returned has left all comms that were made from its world: it may only destroy them, and ranks
 * that wait for it there are notified at once. If a rank ends its thread (pthread_exit) instead,
 * that is COLO_ERR_STATE of this rank.
 *
 * Returns  COLO_OK, or the error of the first rank (by time) that failed by itself. Its error
 *          message, prefixed "rank N: ", is then this thread's last error
 * Waits:   until every thread has returned
 * Errors:  COLO_ERR_ARG (nranks outside 1..4096), COLO_ERR_NOMEM, and what @fn returned
 */
COLO_API colo_status_t colo_comm_threads_run(int32_t nranks, colo_rank_fn fn, void *arg);

/**
 * colo_comm_create_self() - a comm of one rank (world rank 0), for calls that need a group
 * @comm:  out, owned by the caller
 * Errors:  COLO_ERR_ARG (also: a value of an environment variable is not allowed), COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_comm_create_self(colo_comm_t **comm);

/**
 * colo_comm_split() - the comm of this rank's group of @dims; collective over @parent
 * @grid:   world ranks of @parent's members are its ranks
 * @dims:   names joined by "-", as colo_grid_group(); members in canonical order
 * @comm:   out, owned by the caller; NULL on ranks outside the grid (they must call, too)
 * Errors:  COLO_ERR_ARG; COLO_ERR_MISMATCH (ranks passed different grids or dims),
 *          COLO_ERR_MISSING (a member of the group is not in @parent), COLO_ERR_NOMEM,
 *          COLO_ERR_TIMEOUT, COLO_ERR_PEER. At COLO_CHECK >= 1 an error on any rank is an error on
 *          all
 */
COLO_API colo_status_t colo_comm_split(colo_comm_t *parent, const colo_grid_t *grid,
                                       const char *dims, colo_comm_t **comm);
/**
 * colo_comm_split_color() - ranks of one @color form a comm, ordered by (@key, parent rank)
 * Collective over @parent; color < 0 gives NULL. Keys and colors are gathered once. Errors reach
 * all ranks as in colo_comm_split().
 * Errors:  COLO_ERR_ARG (@comm is NULL), COLO_ERR_NOMEM, COLO_ERR_TIMEOUT, COLO_ERR_PEER,
 *          COLO_ERR_MISMATCH
 */
COLO_API colo_status_t colo_comm_split_color(colo_comm_t *parent, int64_t color, int64_t key,
                                             colo_comm_t **comm);

/**
 * colo_comm_part() - the comm of some ranks of @comm, for which no other rank has to call; local
 * @world_ranks:  [n], distinct, in any order, the same on these ranks, this one among them
 * @part:         out, owned by @comm, whose end is its end, too; its ranks are in @comm's order.
 *                The same ranks get the same one each time, and all of @comm's ranks get @comm
 *
 * A bridge whose grids have fewer ranks than its comm makes it of theirs. What its peers are to
 * reach is registered over it: colo_memory_create().
 * Errors:  COLO_ERR_ARG, COLO_ERR_MISSING (a rank is not in @comm), COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_comm_part(colo_comm_t *comm, const int64_t *world_ranks, int32_t n,
                                      colo_comm_t **part);

/**
 * colo_comm_destroy() - local; takes NULL and dead comms, leaves *comm NULL
 * Between processes, destroying the last comm of a world waits until the others have done so, too:
 * at most one second, or the deadline if that is less. In a child made by fork() it leaves the
 * parent's comm as it is.
 */
COLO_API void colo_comm_destroy(colo_comm_t **comm);

/**
 * colo_comm_configure() - what holds for this comm from now on, where the environment says nothing;
 * local. Its parts have it, too, and comms made from this one later inherit it
 * @config:  borrowed for the call
 * Errors:   COLO_ERR_ARG, naming the member, its value and its range; nothing has changed then
 */
COLO_API colo_status_t colo_comm_configure(colo_comm_t *comm, const colo_comm_config_t *config);
/**
 * colo_comm_config() - what is in force for this comm; local
 * @config:  out; the comm, or the environment, owns flight_recorder
 * Errors:   COLO_ERR_ARG
 */
COLO_API colo_status_t colo_comm_config(const colo_comm_t *comm, colo_comm_config_t *config);

/* ---- getters ---- */

/** colo_comm_rank() - this rank's number in the comm, 0 .. size - 1; -1 if @comm is NULL. Local */
COLO_API int32_t colo_comm_rank(const colo_comm_t *comm);
/** colo_comm_size() - the number of ranks in the comm; 0 if @comm is NULL. Local */
COLO_API int32_t colo_comm_size(const colo_comm_t *comm);
/** colo_comm_world_rank() - world rank of comm rank @rank, -1 when out of range */
COLO_API int64_t colo_comm_world_rank(const colo_comm_t *comm, int32_t rank);
/**
 * colo_comm_node() - the node of comm rank @rank, -1 when out of range. Nodes count from 0, by
 * their first rank in the comm. Ranks of one host share a node; COLO_NODE overrides that
 */
COLO_API int32_t colo_comm_node(const colo_comm_t *comm, int32_t rank);
/** colo_comm_nodes() - how many nodes the ranks of the comm are on; 0 if @comm is NULL. Local */
COLO_API int32_t colo_comm_nodes(const colo_comm_t *comm);
/** colo_comm_find() - comm rank of a world rank, -1 when it is no member */
COLO_API int32_t colo_comm_find(const colo_comm_t *comm, int64_t world_rank);
/**
 * colo_comm_set_world_ranks() - which world ranks the members of this comm are; local
 * @world_ranks:  [size], distinct, >= 0, the same on all ranks. Comms made from it later keep
 *                them, those made before do not change. If it is not called, the world ranks of
 *                a comm that was not split are 0, 1, 2 ...
 * Errors:        COLO_ERR_ARG (negative, twice)
 */
COLO_API colo_status_t colo_comm_set_world_ranks(colo_comm_t *comm, const int64_t *world_ranks);
/** colo_comm_backend() - "threads", "self", "sockets", "ucx", "nccl"; static storage */
COLO_API const char *colo_comm_backend(const colo_comm_t *comm);
/** colo_comm_set_name() - at most 31 bytes, for error messages and dumps ("cp") */
COLO_API void colo_comm_set_name(colo_comm_t *comm, const char *name);
/** colo_comm_name() - the name set by colo_comm_set_name(), else "". The comm owns the string */
COLO_API const char *colo_comm_name(const colo_comm_t *comm);
/** colo_comm_set_timeout() - the deadline of waits in milliseconds, > 0, whatever the environment
 * says; local. Its parts have it, too, and comms made from this one later inherit it. Errors: COLO_ERR_ARG */
COLO_API colo_status_t colo_comm_set_timeout(colo_comm_t *comm, int64_t ms);
/** colo_comm_set_check() - the COLO_CHECK level 0..2 of this comm, the same on all ranks, whatever
 *  the environment says; local. Its parts have it, too, and comms made from this one later inherit it. Errors: COLO_ERR_ARG */
COLO_API colo_status_t colo_comm_set_check(colo_comm_t *comm, int32_t level);
/** colo_comm_check_level() - the COLO_CHECK level in force for this comm, 0..2; 0 if @comm is NULL
 */
COLO_API int32_t colo_comm_check_level(const colo_comm_t *comm);

/* ---- operations; each is collective over the comm ----
 *
 * @count counts elements of @dtype. All return COLO_ERR_ARG (count < 0, NULL for count > 0, unknown
 * dtype, sizes past 2^63 bytes, buffers that overlap other than in place), COLO_ERR_MISMATCH (ranks
 * run different operations), COLO_ERR_TIMEOUT (a rank did not come by the deadline, or has left),
 * COLO_ERR_PEER, COLO_ERR_ABORTED, and what the backend met (COLO_ERR_IO, _NCCL, _CUDA).
 * Wrong arguments on one rank kill the comm, except at COLO_CHECK=2, where all ranks return an
 * error and it lives on. If a rank is missing or differs when the operation begins, or has wrong
 * arguments, nothing is written. After a failure in flight the output may be partly written
 * (status.h).
 */

/** colo_comm_all_gather() - recv[r * count ..] = rank r's send.
 *  In place: send == recv + rank * count */
COLO_API colo_status_t colo_comm_all_gather(colo_comm_t *comm, const void *send, void *recv,
                                            int64_t count, colo_dtype_t dtype,
                                            colo_stream_t stream);
/** colo_comm_all_reduce() - recv = reduction over ranks; send == recv is in place. Float dtypes,
 *  i32, i64 */
COLO_API colo_status_t colo_comm_all_reduce(colo_comm_t *comm, const void *send, void *recv,
                                            int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                            colo_stream_t stream);
/** colo_comm_reduce_scatter() - send [size * count], recv [count]: this rank's slice of the sum.
 *  In place: recv == send + rank * count */
COLO_API colo_status_t colo_comm_reduce_scatter(colo_comm_t *comm, const void *send, void *recv,
                                                int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                                colo_stream_t stream);
/** colo_comm_broadcast() - @buffer of rank @root to all ranks */
COLO_API colo_status_t colo_comm_broadcast(colo_comm_t *comm, void *buffer, int64_t count,
                                           colo_dtype_t dtype, int32_t root, colo_stream_t stream);
/**
 * colo_comm_barrier() - no rank's barrier completes before every rank has begun it
 * @stream:  NULL on the host: every rank has entered the call when it returns. On a comm of GPUs
 *           the call enqueues the barrier on @stream, and later work on @stream waits for it
 */
COLO_API colo_status_t colo_comm_barrier(colo_comm_t *comm, colo_stream_t stream);
/**
 * colo_comm_exchange() - every message of every rank, at once; waits only for the peers named
 * @sends, @recvs: at most one message per peer each, peers ascending. Box k of a send and box k
 *                  of its receive have equal extents; their strides may differ. Receives must not
 *                  overlap each other or the sends; COLO_CHECK=2 looks for that. Empty lists are
 *                  legal: the rank still takes part.
 * Errors:  COLO_ERR_ARG, COLO_ERR_MISMATCH (a peer's message has other boxes than expected, or
 *          the peer runs another operation), COLO_ERR_TIMEOUT, COLO_ERR_PEER
 */
COLO_API colo_status_t colo_comm_exchange(colo_comm_t *comm, const colo_message_t *sends,
                                          int32_t nsends, const colo_message_t *recvs,
                                          int32_t nrecvs, colo_dtype_t dtype, colo_stream_t stream);

/* ---- failure ---- */

/** colo_comm_abort() - any thread; every rank's wait on this comm and its relatives made from the
 *  same world ends with COLO_ERR_ABORTED and @why. A rank that ends because of an error aborts
 *  before it destroys, or the others are told only that it has left. If a process ends by exit()
 *  with comms that talk to other processes, the library aborts them with its last error. */
COLO_API void colo_comm_abort(colo_comm_t *comm, const char *why);
/** Is the program to be interrupted? Other than false: yes. */
typedef bool (*colo_interrupted_fn)(void *user);
/**
 * colo_interrupt_set() - what this thread asks, while it waits for another rank, every 50 ms or so
 * If the answer is yes, the thread aborts as by colo_comm_abort(): its call is COLO_ERR_ABORTED, and
 * other ranks hear that this one was interrupted. A rank that makes a comm ends alone, and the others
 * hear that it has left. No function of the library may run in a signal handler: let it set a
 * volatile sig_atomic_t that @interrupted reads. Any other work may be done there, but no call on the
 * comms of this thread.
 * @interrupted: NULL: none, as at first. Each thread has its own
 */
COLO_API void colo_interrupt_set(colo_interrupted_fn interrupted, void *user);
/** colo_comm_check() - COLO_OK, or the error that killed the comm; any thread */
COLO_API colo_status_t colo_comm_check(const colo_comm_t *comm);

/* ---- statistics ---- */

/**
 * colo_comm_stats() - copy the counters of this rank, with those of parts; local, any thread
 * @stats:  out
 * Errors:  COLO_ERR_ARG; COLO_ERR_STATE (@comm belongs to a parent process)
 */
COLO_API colo_status_t colo_comm_stats(const colo_comm_t *comm, colo_comm_stats_t *stats);
/** colo_comm_stats_reset() - set them to 0; local, any thread */
COLO_API void colo_comm_stats_reset(colo_comm_t *comm);
/** colo_op_name() - "all_gather", "exchange" and so on; "?" for another value. Static storage */
COLO_API const char *colo_op_name(colo_op_kind_t kind);
/** colo_category_name() - "user", "bridge", "loss", "head", "check"; "?" for another value. Static
 *  storage */
COLO_API const char *colo_category_name(colo_category_t category);
/**
 * colo_comm_dump() - counters and the last 256 operations as one JSON object; any thread
 * @text:   NUL-terminated when cap > 0, cut at @cap; keys are those of docs/runtime/comm.md
 * Returns  the length needed without NUL
 */
COLO_API size_t colo_comm_dump(const colo_comm_t *comm, char *text, size_t cap);
/**
 * colo_comm_flight_record() - write what colo_comm_dump() says of this comm and, without "status"
 *                             and "error", of the other comms of its world, as one JSON object
 * @prefix:  the file is @prefix and the rank's number in the world: "trace/rank" gives
 *           "trace/rank0"; a file of that name is replaced
 * Errors:   COLO_ERR_ARG, COLO_ERR_STATE (a child of fork()), COLO_ERR_NOMEM, COLO_ERR_IO; the file
 *           is then as before
 * Local, any thread, also while an operation hangs. With COLO_FLIGHT_RECORDER=prefix each rank does
 * this by itself after a failure, and when its process ends by exit() with comms that talk to other
 * processes. `python -m colobridge flight` reads the files, docs/runtime/comm.md.
 */
COLO_API colo_status_t colo_comm_flight_record(const colo_comm_t *comm, const char *prefix);

#ifdef __cplusplus
}
#endif
#endif
