/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h (private) - what the files of libcolobridge-nccl.so share.
 *
 * context        all comms that one rank made from one colo_comm_create_nccl(): the device,
 *                staging, the connections, and a watchdog thread that aborts connections when a
 *                comm of theirs has failed or an operation is late.
 * connection     an ncclComm_t and the ranks that it joins, counted. A few unused ones are kept.
 * group          one comm: an error state, and a connection as soon as one of its operations needs
 *                it.
 * subconnection  the connection of some ranks of a comm: a bridge's messages.
 */
#ifndef COLO_COMM_NCCL_COMM_H
#define COLO_COMM_NCCL_COMM_H

#include "comm/direct/registry.h"
#include "comm/error-state.h"
#include "core/helper.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

/* The entry points of the NCCL in this process, as the header declares them. */
typedef struct colo_nccl_lib {
    int version;
    __typeof__(ncclGetVersion) *get_version;
    __typeof__(ncclGetUniqueId) *get_unique_id;
    __typeof__(ncclCommInitRank) *init_rank;
    __typeof__(ncclCommDestroy) *destroy;
    __typeof__(ncclCommAbort) *abort;
    __typeof__(ncclCommGetAsyncError) *async_error;
    __typeof__(ncclCommCount) *count;
    __typeof__(ncclCommUserRank) *user_rank;
    __typeof__(ncclCommCuDevice) *device;
    __typeof__(ncclGetErrorString) *error_string;
    __typeof__(ncclGetLastError) *last_error;
    __typeof__(ncclGroupStart) *group_start;
    __typeof__(ncclGroupEnd) *group_end;
    __typeof__(ncclAllGather) *all_gather;
    __typeof__(ncclAllReduce) *all_reduce;
    __typeof__(ncclBroadcast) *broadcast;
    __typeof__(ncclSend) *send;
    __typeof__(ncclRecv) *recv;
} colo_nccl_lib_t;

/* Found once a process. COLO_ERR_UNBUILT: none, or one before 2.18. (loader.c) */
colo_status_t colo_nccl_find(const colo_nccl_lib_t **lib);

enum { COLO_CONNECTION_OK = 0, COLO_CONNECTION_ENDING = 1, COLO_CONNECTION_GONE = 2 };

struct colo_connection {
    struct colo_connection *next;
    int32_t users;    /* comms and subconnections, and the watchdog while it aborts; under the
                         context's lock */
    uint64_t idle_at; /* when the last user left, in a count of such events */
    int64_t left_by;  /* the id of the comm that left it last: its work may still be enqueued */
    int64_t left_ms;  /* its deadline */
    int32_t n;
    int64_t *world;  /* [n] owned: world ranks in the order of the comm */
    ncclComm_t nccl; /* NULL for one rank */
    bool borrowed;
    _Atomic int32_t phase; /* COLO_CONNECTION_* */
    pthread_mutex_t busy;  /* a thread is inside NCCL with it */
};

struct colo_subconnection {
    struct colo_subconnection *next;
    struct colo_connection *connection; /* a reference */
    int32_t n,
        *members; /* [n] owned: ranks of the comm, ascending; the connection's rank is the place */
};

struct colo_nccl_group {     /* colo_comm.impl */
    colo_direct_base_t base; /* first */
    struct colo_nccl_group *next;
    struct colo_nccl_context *context; /* a reference */
    colo_comm_t *comm;
    struct colo_connection *connection;       /* a reference; NULL: not connected yet */
    struct colo_subconnection *subconnection; /* under the context's lock, as connection */
    colo_comm_t *connecting; /* the host comm of a subconnection that is being made; likewise */
    colo_error_state_t error;
    int32_t rank;
    int64_t id;                  /* of this comm in the context, > 0 */
    colo_comm_t *control;        /* owned */
    struct colo_gathers *gather; /* allgather.c's, owned; likewise */
    uint64_t gather_agreed;      /* registrations when all ranks last compared a gather */
    bool gather_none;            /* there is no such path, on all ranks */
};

/* Pinned host memory, 64-bit words: the stream writes, the watchdog reads. A captured operation
 * writes them in every replay. */
enum {
    COLO_PROGRESS_WORDS = 64, /* of a count; as many may be written out of order */
    COLO_PROGRESS_BEGUN =
        0, /* [COLO_PROGRESS_WORDS] operations whose turn has come on the stream */
    COLO_PROGRESS_ENDED = COLO_PROGRESS_BEGUN + COLO_PROGRESS_WORDS,
    COLO_PROGRESS_COMM =
        COLO_PROGRESS_ENDED + COLO_PROGRESS_WORDS, /* of the one that has begun: its comm's id,
                                                    * colo_op_pack(), count, number
                                                    */
    COLO_PROGRESS_OP,
    COLO_PROGRESS_COUNT,
    COLO_PROGRESS_SEQ,
    COLO_PROGRESS_COUNTERS
};

enum { COLO_COUNT_BEGUN, COLO_COUNT_ENDED, COLO_COUNT_BARRIER /* what it reduces */, COLO_COUNTS };

struct colo_packet { /* of an exchange: one message, or a half of it */
    void *data;
    size_t bytes; /* 0: nothing in this half */
    int32_t peer;
};

struct colo_nccl_context {
    const colo_nccl_lib_t *lib;
    int32_t device;
    bool shared;          /* the device is that of other ranks, too */
    int64_t timeout_ms;   /* of the comm that was made or destroyed last: for destroy */
    pthread_mutex_t lock; /* the lists */
    pthread_cond_t wake;
    bool stop;
    pthread_t watchdog;
    int32_t live;    /* contexts */
    int32_t leaving; /* threads that end unused connections */
    int64_t ids;
    uint64_t idle_count;
    struct colo_nccl_group *group;
    struct colo_connection *connection;
    int64_t *progress; /* [COLO_PROGRESS_COUNTERS] */
    /* the watchdog's */
    int64_t seen_begun;
    double since; /* when it saw that operation begin */
    /* used by the thread of the comms only */
    char *memory; /* device: of warming up; NULL: a helper that is late has it */
    size_t memory_bytes;
    int64_t *counts; /* device [COLO_COUNTS]; NULL: a helper that is late has it */
    struct colo_order *order;
    char *stage; /* device; grown, the smaller ones kept until the end: streams may use them */
    size_t stage_bytes;
    void *old[48];
    int32_t nold;
    colo_box_t *from, *to; /* host lists of an exchange, [boxes] each, in one block; owned: from */
    struct colo_packet *part;
    int64_t boxes;
};

extern const colo_comm_backend_t colo_comm_nccl_backend;

/* ---- watchdog.c ---- */
/* Has a comm died (colo_run_for())? */
bool colo_nccl_is_dead(const void *control);
/* Ends what is enqueued on a connection. Once; never a borrowed one. */
void colo_nccl_abort_connection(struct colo_nccl_context *f, struct colo_connection *l);
/* Aborts one of the connections that a failed comm uses or has left; false: none is usable. Under
 * the context's lock, which it opens meanwhile. */
bool colo_nccl_abort_next(struct colo_nccl_context *f, const struct colo_nccl_group *x);
void *colo_nccl_watchdog(void *context);
/* Is there an operation that has not ended? */
bool colo_nccl_is_busy(const struct colo_nccl_context *f);

/* ---- context.c ---- */
/* For comms of up to @ranks ranks. */
colo_status_t colo_nccl_context_create(struct colo_nccl_context **out, int32_t device,
                                       int32_t ranks);
/* Call when no comm uses it any more. What does not end by the deadline is left alone. */
void colo_nccl_context_destroy(struct colo_nccl_context *f, bool watched);

/* ---- connection.c ---- */
/* Loads all kernels, which must not load while others wait, and zeroes the counts, on a stream of
 * its own: the default stream is the caller's. */
colo_status_t colo_nccl_load(struct colo_nccl_context *f, int64_t timeout_ms);
/* Do two ranks of @control sit on one device that NCCL does not let them share? The same verdict on
 * all. Else it knows whether they share. */
colo_status_t colo_nccl_apart(struct colo_nccl_context *f, colo_comm_t *control);
/* A reference to the connection of @control's ranks: the one that is there, if all can use it,
 * or a new one. Collective over @control, which tells all an error of one. */
colo_status_t colo_nccl_connection_get(struct colo_nccl_context *f, colo_comm_t *control,
                                       ncclComm_t borrowed, struct colo_connection **out);
void colo_nccl_connection_put(struct colo_nccl_context *f,
                              struct colo_connection *l);  /* takes NULL */
void colo_nccl_connection_free(struct colo_connection *l); /* the struct; not the ncclComm_t */

/* ---- nccl/comm.c ---- */
colo_status_t colo_nccl_create(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                               colo_comm_t **comm);
colo_status_t colo_nccl_subset(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                               colo_comm_t *child);
colo_status_t colo_nccl_connect(colo_comm_t *c); /* collective, once */
void colo_nccl_fail(colo_comm_t *c, colo_status_t status, const char *error_message);
colo_status_t colo_nccl_state(const colo_comm_t *c, char *error_message, size_t cap);
void colo_nccl_destroy(colo_comm_t *c);
colo_status_t colo_nccl_subconnection_create(colo_comm_t *c, const int32_t *members, int32_t n,
                                             uint64_t tag, colo_subconnection_t **subconnection);
void colo_nccl_subconnection_destroy(colo_comm_t *c, colo_subconnection_t *subconnection);
colo_status_t colo_nccl_control_state(const struct colo_nccl_group *x, char *error_message,
                                      size_t cap);
/* Marks a comm failed and tells its peers; any thread. */
void colo_nccl_set_error(struct colo_nccl_group *x, colo_status_t status,
                         const char *error_message);
colo_status_t colo_nccl_error(const colo_nccl_lib_t *lib, const char *what, ncclResult_t r);
/* Why kernels of the direct path ended, if they did: the comm fails. Any thread. */
colo_status_t colo_nccl_check_peer(struct colo_nccl_group *x, char *error_message, size_t cap);

/* ---- operation.c ---- */
/* One operation between begin and end. */
struct colo_operation {
    colo_comm_t *c;
    struct colo_nccl_group *x;
    struct colo_nccl_context *f;
    struct colo_connection *connection;
    const colo_nccl_lib_t *lib;
    cudaStream_t stream;
    bool capturing;
    char *stage; /* after colo_operation_stage() */
    char text[96];
};
/* Checks device and stream, connects @subconnection (NULL: the comm's own ranks, now if it must
 * be), takes the connection and counts the begin on the stream. After OK comes exactly one end.
 */
colo_status_t colo_operation_begin(struct colo_operation *r, colo_comm_t *c,
                                   const colo_subconnection_t *subconnection, colo_stream_t stream);
colo_status_t colo_operation_end(struct colo_operation *r, colo_status_t st);
colo_status_t colo_operation_nccl(struct colo_operation *r, ncclResult_t e); /* named status */
colo_status_t colo_operation_cuda(struct colo_operation *r, cudaError_t e);
#define COLO_NCCL(expr) COLO_TRY(colo_operation_nccl(call, (expr)))
#define COLO_OPERATION_CUDA(expr) COLO_TRY(colo_operation_cuda(call, (expr)))
/* Memory of the comm's device? Host memory in a kernel is a fault that ends the process. */
colo_status_t colo_operation_on_device(struct colo_operation *r, const char *name, const void *p);
/* At least so much, the caller's or f->stage, in r->stage; COLO_ERR_STATE in a capture that has
 * less. */
colo_status_t colo_operation_stage(struct colo_operation *r, size_t bytes);
/* "all_reduce #5 (sum of 1024 f32)" */
const char *colo_operation_text(struct colo_operation *r);
enum { COLO_STAGE_ALIGN = 256 };
static inline size_t colo_stage_padded(size_t bytes)
{
    return (bytes + COLO_STAGE_ALIGN - 1) / COLO_STAGE_ALIGN * COLO_STAGE_ALIGN;
}

/* ---- nccl/exchange.c ---- */
colo_status_t colo_nccl_exchange(colo_comm_t *c, const colo_exchange_t *exchange,
                                 colo_stream_t stream);
size_t colo_nccl_subconnection_stage(const colo_exchange_t *exchange);

/* ---- nccl/collectives.c ---- */
/* Every kind of operation once, on a stream of its own; for the helper thread of create. NULL or an
 * error message. */
const char *colo_nccl_warm(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank, int32_t n,
                           char *memory, size_t memory_bytes, const struct colo_abandon *abandon);
#define COLO_NCCL_WARM_BYTES(n) ((size_t)(n)*2048)

#endif
