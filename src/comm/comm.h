/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h (private) - the seam between the comm front (comm.c) and its backends.
 *
 * comm.c checks arguments, the dead flag and the deadline's length, keeps the statistics, runs the
 * COLO_CHECK=2 fingerprint, and calls the backend. A backend moves bytes, waits with the deadline,
 * and reports failure. Backends never print, never touch the statistics.
 */
#ifndef COLO_COMM_COMM_H
#define COLO_COMM_COMM_H

#include "core/error.h"
#include "core/helper.h"
#include "core/hash.h"
#include "core/lock.h"

#include <colobridge/comm.h>

/* A connection of some ranks of a comm, for the messages that they exchange again and again. */
typedef struct colo_subconnection colo_subconnection_t;
struct ncclComm;

/* What every rank must bring alike to one operation. The front fills it before it calls the
 * backend, which compares it where that costs nothing and puts it in its error messages. */
typedef struct colo_op_desc {
    colo_op_kind_t kind;
    colo_dtype_t dtype;
    int32_t param; /* the redop of a reduction, the root of a broadcast, which bridge, 1 for an
                    * all_gather of a check, else 0 */
    int64_t count; /* elements as in the call; a bridge's plan; else 0 */
    colo_category_t category; /* for which part of the library; ranks do not compare it */
} colo_op_desc_t;

/* Messages on @subconnection with the caller's staging, where all sends lie in one allocation, and
 * all receives in one: of each one box is checked. NULL: an exchange of the whole comm. Peers are
 * ranks of the comm, either way. */
typedef struct colo_exchange {
    colo_op_desc_t op; /* with the dtype of the boxes */
    colo_subconnection_t *subconnection;
    void *stage;
    size_t stage_bytes;
    const colo_message_t *send, *recv;
    int32_t nsends, nrecvs;
    uint8_t round; /* of several in one operation: 0, 1 */
    /* If these are a part of what the caller moves in this operation: of the rest, which is counted
     * with them. The backend is called only if the part has messages. */
    bool is_part;
    int32_t more_peers;
    int64_t more_sent, more_received;
} colo_exchange_t;

typedef struct colo_comm_backend {
    const char *name;
    /* What c->op says: a barrier, a broadcast of @recv, or a collective of @send and @recv. A split
     * by colour is an all-gather. */
    colo_status_t (*collective)(colo_comm_t *c, const void *send, void *recv, colo_stream_t stream);
    /* Staging that an all-reduce or reduce-scatter of @bytes, all slices together, takes at most.
     * Local; NULL: none. */
    size_t (*reduction_stage)(const colo_comm_t *c, size_t bytes);
    /* Moves the messages of @exchange alone; on its subconnection, if it has one. */
    colo_status_t (*exchange)(colo_comm_t *c, const colo_exchange_t *exchange,
                              colo_stream_t stream);
    /* @members: parent ranks of the new comm, ascending by new rank, this rank among them.
     * Fills child->impl; every member calls with the same list and the same @tag. */
    colo_status_t (*subset)(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                            colo_comm_t *child);
    /* What the members of a split do together once each of them has what it allocated; NULL:
     * nothing. */
    colo_status_t (*connect)(colo_comm_t *child);
    void (*fail)(colo_comm_t *c, colo_status_t status,
                 const char *error_message); /* tell the peers */
    colo_status_t (*state)(const colo_comm_t *c, char *error_message,
                           size_t cap); /* OK, or what killed it */
    void (*destroy)(colo_comm_t *c);    /* frees impl */
    /* All three or none: backends whose messages need neither connection nor staging have none.
     * @members: ranks of the comm, ascending, this one among them; every member calls with the same
     * list and @tag, and waits for the others. */
    colo_status_t (*subconnection_create)(colo_comm_t *c, const int32_t *members, int32_t n,
                                          uint64_t tag, colo_subconnection_t **subconnection);
    void (*subconnection_destroy)(colo_comm_t *c, colo_subconnection_t *subconnection);
    /* Staging that these messages take there at most, wherever their boxes will lie. Local. */
    size_t (*subconnection_stage)(const colo_exchange_t *exchange);
    const struct colo_direct_memory *direct; /* direct.h; NULL: moves host memory */
    /* Makes a comm on @device over @control, which is taken, also on error; NULL: not of GPUs.
     * @borrowed: NULL, or the caller's ncclComm_t. */
    colo_status_t (*create)(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                            colo_comm_t **comm);
} colo_comm_backend_t;

#define COLO_RECORDS 256

#define COLO_OP_ALONE 0x80000000u /* of a bridge's forward: no backward follows */

/* The exchange of bridge @number of its comm, of @pass, by the plan of that hash: two bridges of
 * one shape move the same boxes, and so may the two passes of one. */
static inline colo_op_desc_t colo_op_of_bridge(colo_dtype_t dtype, uint64_t number, int pass,
                                               bool alone, uint64_t plan)
{
    const uint32_t which = (uint32_t)(2 * number) % COLO_OP_ALONE | (uint32_t)pass;
    return (colo_op_desc_t){COLO_OP_EXCHANGE, dtype, (int32_t)(which | (alone ? COLO_OP_ALONE : 0)),
                            (int64_t)plan, COLO_CATEGORY_BRIDGE};
}

static inline uint64_t colo_op_pack(const colo_op_desc_t *op) /* all but count and category */
{
    return (uint64_t)op->kind << 56 | (uint64_t)op->dtype << 48 | (uint32_t)op->param;
}
static inline colo_op_desc_t colo_op_unpack(uint64_t word, uint64_t count)
{
    return (colo_op_desc_t){(colo_op_kind_t)(word >> 56), (colo_dtype_t)(word >> 48 & 0xff),
                            (int32_t)(uint32_t)word, (int64_t)count, COLO_CATEGORY_USER};
}
/* "all_reduce #5 (sum of 1024 f32)"; no number when @seq is 0. Returns @text. */
COLO_FOR_MODULES const char *colo_op_describe(char *text, size_t cap, colo_op_desc_t op,
                                              uint64_t seq);
/* "is in all_reduce #5 (sum of 1024 f32)": what a rank finds a peer in instead of @mine. */
const char *colo_op_found(char *text, size_t cap, colo_op_desc_t mine, colo_op_desc_t theirs,
                          uint64_t seq);

typedef struct colo_record {
    uint64_t seq;
    colo_op_kind_t kind;
    colo_category_t category;
    colo_dtype_t dtype;
    int64_t count; /* as in colo_op_desc_t */
    int64_t sent_bytes, recv_bytes;
    int32_t peers;
    uint64_t ticket;      /* of a bridge's call that was started; 0: none */
    colo_status_t status; /* PENDING while it runs */
    double begin, end;    /* seconds, monotonic clock */
} colo_record_t;

#define COLO_COMM_ONCE 16
#define COLO_RECORDER_MAX 1024 /* bytes of the prefix that a program gives, NUL included */
struct colo_comm {
    const colo_comm_backend_t *backend;
    void *impl;
    int32_t rank, size;
    int64_t *world_rank;   /* [size]; owned */
    int32_t *node, nnodes; /* [size] owned; NULL: one node */
    char name[32];
    int64_t timeout_ms; /* read by colo_comm_timeout(): a backend's watchdog reads it, too */
    int32_t process;    /* that made it; a child of fork() has a copy that no rank answers */
    int32_t check;
    uint64_t once[COLO_COMM_ONCE]; /* colo_comm_once()'s keys; 0: none */
    /* A host comm of the same ranks, owned by the backend; NULL: this one moves host memory itself.
     * What is not the caller's data goes through it (agree.c, split.c). */
    colo_comm_t *control;
    bool share_process; /* of GPUs: some ranks of the comm that it was split from are threads */
    void *stage;        /* for the reduction that is called; a backend takes its own memory else */
    size_t stage_bytes;
    struct colo_parts *parts; /* owned: of collectives that host-collectives.c makes of exchanges */
    colo_op_desc_t op;        /* of the last operation begun */
    uintptr_t thread;         /* that is in an operation; 0: none */
    uint64_t seq;       /* of the last operation begun; the same on all ranks, gaps are legal */
    uint64_t split_tag; /* how many children this rank asked for */
    uint64_t bridges;   /* how many bridges were made */
    /* flight.c's, under its lock: the next older comm of this process; which world it was made
     * from; the same on all its ranks, and another for each of a rank's comms; operations of
     * relatives that are destroyed. */
    colo_comm_t *older;
    uint64_t world, id, ended;
    bool recorded; /* a failure of this world, in the file */
    /* What the program says, where the environment does not; the recorder under flight.c's lock. */
    colo_transport_t transport;
    char recorder[COLO_RECORDER_MAX]; /* "": no file */
    void *lock; /* pthread_mutex_t *: statistics, records, seq and name against dump */
    colo_comm_stats_t stats;
    colo_record_t record[COLO_RECORDS];
    uint64_t ticket;               /* of operations that begin now; set by the comm's thread */
    colo_comm_t *part, *next_part; /* owned: colo_comm_part()'s; the next one of the same comm */
};

/* ---- the recorder (stats.c) ----
 * Begins an operation: next seq, c->op, a record. The end completes the entry; the counters
 * count what ended with COLO_OK. Bytes are conventions, the same whatever the backend does inside:
 *   all_gather       sent: own bytes             received: (n-1) * own bytes
 *   all_reduce       sent = received: buffer * 2(n-1)/n rounded down (what a ring would move)
 *   reduce_scatter   sent = received: (n-1) * bytes of a slice
 *   broadcast        root sends the bytes, others receive them
 *   exchange         sums over messages          barrier, split by dims: 0
 *   split by colour  as an all_gather of 16 bytes
 * A comm of one rank counts operations with 0 bytes. */
uintptr_t colo_comm_thread(void); /* of the caller; never 0 */
uint64_t colo_comm_begin(colo_comm_t *c, colo_op_desc_t op, int64_t sent_bytes, int64_t recv_bytes,
                         int32_t peers);
uint64_t colo_comm_begin_collective(colo_comm_t *c, colo_op_desc_t op);
void colo_comm_end(colo_comm_t *c, uint64_t seq, colo_status_t status);
/* colo_comm_dump(); @state: NULL, and the object says neither "status" nor "error", which a comm
 * that is being made has not. */
size_t colo_comm_dump_state(const colo_comm_t *comm, const colo_status_t *state,
                            const char *error_message, char *text, size_t cap);

/* ---- flight.c ---- */
void colo_comm_register(colo_comm_t *c);
void colo_comm_unregister(colo_comm_t *c);
/* @c is made from @parent, as its comm number @tag. */
COLO_FOR_MODULES void colo_comm_relate(colo_comm_t *c, const colo_comm_t *parent, uint64_t tag);
void colo_comm_set_recorder(colo_comm_t *c, const char *prefix);
/* Writes the file if COLO_FLIGHT_RECORDER or the program asks for it, at the first failure of the
 * world: later some of its comms may be destroyed. Keeps this thread's last error. @why: of the
 * abort by exit(), when what the comm's state needs is locked; NULL: its state says it. */
void colo_comm_record_failure(colo_comm_t *c, const char *why);

/* Takes from @config, NULL: the defaults, what the environment does not override: COLO_ERR_ARG
 * names the member. */
colo_status_t colo_comm_read_config(const colo_comm_config_t *config, colo_comm_config_t *own);

/* Ranks of the two; 0 if they are of two worlds, which may number their ranks in two ways. */
int32_t colo_comm_in_both(const colo_comm_t *comm, const colo_comm_t *other);
/* What is done once for a comm: where to write @key, which is not 0, when it is done; NULL: it was,
 * or no place is left. The same on all ranks if they ask alike. */
uint64_t *colo_comm_once(colo_comm_t *comm, uint64_t key);

/* True in the process that made the comm; else its last error says so. */
bool colo_comm_is_own(const colo_comm_t *c, const char *what);
/* COLO_OK while the comm lives and no other thread is in an operation on it; else the status that
 * killed it, or COLO_ERR_STATE, its error message set as last error. */
colo_status_t colo_comm_alive(const colo_comm_t *c, const char *what);
/* The same before operation @op. */
colo_status_t colo_comm_ready(colo_comm_t *c, colo_op_desc_t op);

/* Operations on behalf of a part of the library: as the public ones, counted in @category. */
COLO_FOR_MODULES colo_status_t colo_comm_all_gather_for(colo_comm_t *c, colo_category_t category,
                                                        const void *send, void *recv, int64_t count,
                                                        colo_dtype_t dtype, colo_stream_t stream);
colo_status_t colo_comm_all_reduce_for(colo_comm_t *c, colo_category_t category, const void *send,
                                       void *recv, int64_t count, colo_dtype_t dtype,
                                       colo_redop_t op, colo_stream_t stream);
colo_status_t colo_comm_reduce_scatter_for(colo_comm_t *c, colo_category_t category,
                                           const void *send, void *recv, int64_t count,
                                           colo_dtype_t dtype, colo_redop_t op,
                                           colo_stream_t stream);
/* Staging that a reduction of @bytes takes, 0 if the backend needs none, and what the caller has
 * for it: from now until NULL the reductions of @c use that instead of memory of the backend. */
size_t colo_comm_reduction_stage(const colo_comm_t *c, int64_t bytes);
void colo_comm_set_stage(colo_comm_t *c, void *stage, size_t bytes);
/* Checks, counts and begins an exchange: host memory has moved then, messages of GPUs are on
 * @stream. The caller moves what is not in @x, and ends operation @seq by colo_comm_finish().
 * After an error it has ended. */
colo_status_t colo_comm_exchange_begin(colo_comm_t *c, const colo_exchange_t *x,
                                       colo_stream_t stream, uint64_t *seq);
colo_status_t colo_comm_split_color_for(colo_comm_t *parent, colo_category_t category,
                                        int64_t color, int64_t key, colo_comm_t **comm);

/*
 * Every rank brings a fingerprint of what it thinks is being done; all get COLO_ERR_MISMATCH with
 * the same error message when two differ (first rank that differs from rank 0, and @what). Also
 * carries each rank's own status: when one brings an error, it returns its own, the others
 * COLO_ERR_PEER with its error message. The comm stays alive in both cases.
 */
COLO_FOR_MODULES colo_status_t colo_comm_agree(colo_comm_t *c, const char *what,
                                               uint64_t fingerprint, colo_status_t mine);
/*
 * What a rank brings to an agreement, field by field, so that a mismatch names the field and both
 * values. The text is sent only if hashes differ; what no longer fits into it is hashed all the
 * same.
 */
typedef struct colo_fields {
    char text[2048]; /* "name\tvalue\n" ... */
    size_t length;
    uint64_t hash, optional; /* of fields; optional ones: 0 if the rank has none */
} colo_fields_t;
#define COLO_FIELDS_INIT .hash = COLO_HASH_INIT
/* @name: static; neither has a tab or a newline. A value has at most 255 bytes. */
void colo_fields_add(colo_fields_t *f, const char *name, const char *fmt, ...) COLO_PRINTF(3, 4);
/* The same of what only some ranks have, each of them all of it: compared between those ranks. */
void colo_fields_add_optional(colo_fields_t *f, const char *name, const char *fmt, ...)
    COLO_PRINTF(3, 4);
/* colo_comm_agree() on fields: "@what: dst: rank 3 of 'world' has tp=2,dp=4, rank 0 tp=8". Adds
 * @what to @f. */
colo_status_t colo_comm_agree_fields(colo_comm_t *c, const char *what, colo_fields_t *f,
                                     colo_status_t mine);
/* Two of this process are the same number, two of different ones are not. */
COLO_FOR_MODULES uint64_t colo_comm_process(void);
/* Are any two ranks of this host comm threads of one process? Collective; all get the same. */
colo_status_t colo_comm_find_shared_process(colo_comm_t *c, bool *shared);
/* Ranks of a comm of GPUs whose context has ranks that share a process wait for each other on the
 * host; others, and a NULL @c, do nothing. Behind products whose kernels the driver loads at first
 * use (operation.c). */
colo_status_t colo_comm_host_barrier(colo_comm_t *c, const char *what);

/* ---- host-collectives.c ----
 * The collective of a backend of host memory, made of exchanges. */
colo_status_t colo_host_collective(colo_comm_t *c, const void *send, void *recv,
                                   colo_stream_t stream);
struct colo_parts *colo_parts_new(int32_t size); /* NULL: there is no memory */
void colo_parts_free(struct colo_parts *parts);

/* ---- agree.c ----
 * One all-gather of @n words from every rank into @all [size * n], counted as @kind of @owner. */
colo_status_t colo_comm_gather(colo_comm_t *c, colo_op_kind_t kind, colo_category_t category,
                               const uint64_t *mine, uint64_t *all, int64_t n);
/* The comparison of COLO_CHECK=2: all ranks come with the operation they are about to run and the
 * status of their own arguments. Differences are COLO_ERR_MISMATCH on all, a bad rank gets its own
 * status back and the others COLO_ERR_PEER; nothing has moved and the comm lives. */
colo_status_t colo_comm_compare(colo_comm_t *c, colo_op_desc_t op, colo_status_t mine);
/* The same for the messages of an exchange, after colo_comm_compare(). */
colo_status_t colo_comm_compare_messages(colo_comm_t *c, const colo_exchange_t *exchange);

/* Marks the comm failed with this thread's last error, so that peers wake with COLO_ERR_PEER;
 * returns @status unchanged. For local errors inside an operation that peers take part in. */
colo_status_t colo_comm_fail(colo_comm_t *c, colo_status_t status);
/* Ends operation @seq, and the comm if that failed. */
colo_status_t colo_comm_finish(colo_comm_t *c, uint64_t seq, colo_status_t st);

/* A comm with everything but impl; frees with colo_comm_destroy(). */
COLO_FOR_MODULES colo_status_t colo_comm_new(colo_comm_t **comm, const colo_comm_backend_t *backend,
                                             int32_t rank, int32_t size,
                                             const int64_t *world_rank /* NULL: 0..size-1 */);

/* ---- nodes.c ----
 * What names the node of @rank of a world of @size; ranks with the same id share a node. */
colo_status_t colo_node_id(int32_t rank, int32_t size, uint64_t *id);
/* Numbers the nodes of @c; @id: [size]. */
colo_status_t colo_comm_set_nodes(colo_comm_t *c, const uint64_t *id);

/* ---- split.c ----
 * The group of these parent ranks, in the order of the new comm, this rank among them; every member
 * calls with the same list and @tag. */
COLO_FOR_MODULES colo_status_t colo_comm_child(colo_comm_t *parent, const int32_t *members,
                                               int32_t n, uint64_t tag, const char *name,
                                               colo_comm_t **comm);

/* ---- gpu-open.c: loads the backend library of that name, whose table has a create. ---- */
colo_status_t colo_gpu_load(const char *name, const colo_comm_backend_t **backend);

/* The table of a comm of one rank, and of its children. (threads/threads.c) */
extern const colo_comm_backend_t colo_comm_self_backend;

/* Which memory it moves. */
static inline colo_mem_t colo_comm_mem(const colo_comm_t *c)
{
    return c->backend->direct ? COLO_MEM_CUDA : COLO_MEM_HOST;
}
/* The comm's deadline of now; any thread. */
static inline int64_t colo_comm_timeout(const colo_comm_t *c)
{
    return __atomic_load_n(&c->timeout_ms, __ATOMIC_RELAXED);
}
/* Where a comm of GPUs moves host memory, with its deadline of now. */
static inline colo_comm_t *colo_comm_control(const colo_comm_t *c)
{
    __atomic_store_n(&c->control->timeout_ms, colo_comm_timeout(c), __ATOMIC_RELAXED);
    return c->control;
}

#endif
