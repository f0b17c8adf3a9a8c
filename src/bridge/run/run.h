/* SPDX-License-Identifier: Apache-2.0 */
/* run.h (private) - the handle of a bridge, and what executes its calls. */
#ifndef COLO_BRIDGE_RUN_H
#define COLO_BRIDGE_RUN_H

#include "bridge/run/program.h"
#include "comm/comm.h"
#include "comm/peer.h"
#include "core/device.h"
#include "core/memory.h"

#include <colobridge/bridge.h>

/* Memory that grows. Streams may still use what it was on a device, which stays until the end; it
 * grows by half at least, so that all of that together is at most twice what there is. */
typedef struct colo_arena {
    void *data;
    size_t size, total; /* total: with what it was before */
    void *old[64];
    int32_t nold;
} colo_arena_t;

/* The reference's algorithm: groups made once, staging for the passes. */
typedef struct colo_collective {
    colo_comm_t *gather; /* k siblings; NULL when equal or outside the grids */
    colo_comm_t *cp;     /* NULL when cp is 1 */
    int64_t k, sibling;
    colo_direction_t direction;
    colo_arena_t stage[2], sum; /* sum: staging of the all-reduce over cp */
} colo_collective_t;

/* The messages of an exchange; each call fills in data and strides of their boxes. */
typedef struct colo_messages {
    int32_t nsends, nrecvs;
    colo_message_t *send, *recv;     /* with as many behind them: those of ranks out of reach */
    colo_box_t *send_box, *recv_box; /* [nregions][tensors] of the plan's routes */
    int32_t tensors;                 /* of a call */
} colo_messages_t;

/* A program as the comm carries it. */
typedef struct colo_over_comm {
    colo_messages_t messages[2][COLO_EXCHANGES];
    colo_box_t *own_box[2]; /* what stays on the rank: from, to */
    /* In CUDA memory, on a backend with routes: the ranks of the comm that the plan ties this one
     * to, [nmembers], and their route. Else 0 and NULL. */
    int32_t *members, nmembers;
    colo_subconnection_t
        *subconnection; /* NULL after a reshape that ties other ranks, until the next call */
    size_t need_partials, need_stage; /* bytes of the bridge's arenas, 0 for a batch */
} colo_over_comm_t;

/* Peers write into this rank's output, or it reads in their inputs. */
typedef enum colo_mover { COLO_PUSH = 1, COLO_PULL = 2 } colo_mover_t;

/* A program as peers move it, that reach each other's memory. */
typedef struct colo_over_peers {
    bool asymmetric[2]; /* of a pass, some rank has nothing that peers could reach */
    bool far; /* ranks that the plan ties to this one do not reach each other: between these, calls
                 are staged. Or there is another exchange */
    colo_mover_t forward;
    colo_p2p_list_t *list, *relay_list; /* of a batch, else the path's own; what relays move */
    int64_t unit;                       /* bytes of a feature of the plan that list is for */
} colo_over_peers_t;

/* Transfers of both passes, which say where ranks have what they move. */
typedef struct colo_transfer_lists {
    colo_list_t step[2];               /* colo_transfer_t */
    colo_list_t addend[2], exposed[2]; /* colo_addend_t, addends of each step; int32_t */
    colo_transfers_t pass[2];
} colo_transfer_lists_t;

/* The peer-to-peer path of a bridge; lists keep their memory for the next batch. */
typedef struct colo_peers {
    colo_p2p_t *path; /* NULL: every call is staged */
    int32_t blocks;   /* of its kernel, at most; 0: as few as keep the links busy */
    struct colo_agreed {
        bool made;
        int32_t moves;          /* colo_mover_t that is taken; 0: staged */
        uint64_t registrations; /* how often memory had been registered */
    } agreed[2];                /* what ranks agreed on for passes that need it */
    int64_t unit;               /* bytes of a feature of the plan in the widest tensor so far */
    colo_transfer_lists_t first, relays;
    colo_list_t held[2]; /* of sums, as they come; by addend */
    colo_list_t tensors; /* colo_p2p_tensor_t of a call */
} colo_peers_t;

/* A plan, ready to run; colo_bridge_reshape() makes another and swaps. */
typedef struct colo_loaded {
    colo_program_t program;
    colo_over_comm_t over_comm;
    colo_over_peers_t over_peers;
    colo_run_t *run; /* [nruns] COLLECTIVE with a SHARDED output: this rank's own rows */
    int64_t nruns;
} colo_loaded_t;

typedef struct colo_tickets colo_tickets_t;

/* The order of a tensor's axes: as the caller said it; of samples, rows, features. Flat: 0, -1, 1.
 */
typedef struct colo_axes {
    char name[8];
    int of[3];
} colo_axes_t;

typedef struct colo_sides {
    colo_layout_t src, dst;
    colo_nodes_t *nodes; /* of the comm, if the caller did not name any; NULL: one */
} colo_sides_t;

/* Auxiliary streams; NULL: none. */
typedef struct colo_streams {
    void *side;  /* for messages that move while the caller's stream works */
    void *order; /* where calls leave memory of the bridge in use */
    bool ran;    /* there was such a call */
} colo_streams_t;

/* Numbers that are the same on all ranks. */
typedef struct colo_bridge_id {
    uint64_t number;        /* of the bridges of this comm, from 1 */
    uint64_t tag, reshapes; /* name a route */
    uint64_t calls;
} colo_bridge_id_t;

/* Memory of one call. */
typedef struct colo_bridge_memory {
    colo_arena_t partials, stage; /* addends; staging of messages */
} colo_bridge_memory_t;

struct colo_bridge {
    colo_comm_t *comm; /* borrowed */
    const colo_ops_t *ops;
    colo_algo_t algo;
    colo_mem_t mem;
    colo_allocator_t allocator; /* of the arenas */
    colo_axes_t axes;
    colo_sides_t sides;
    colo_loaded_t now;
    colo_collective_t coll;
    colo_transport_t transport;
    bool lazy; /* partial sums, staging and route are made when a call is staged */
    colo_bridge_memory_t memory;
    colo_peers_t peers;
    colo_streams_t streams;
    colo_bridge_id_t id;
    struct colo_ragged_bridge *ragged; /* ragged.h; NULL: of uniform batches */
    bool compared[2];        /* by pass: all ranks were once in this call, by the plan of now */
    colo_tickets_t *tickets; /* ticket.c; NULL: no call was started */
};

/* Of a call that peers take part in: what they reach of each tensor. */
typedef struct colo_reached_tensor {
    int32_t id; /* of the memory; -1: nothing */
    uint64_t offset;
} colo_reached_tensor_t;

/* May a call be peer-to-peer, and how? */
typedef struct colo_reached {
    bool p2p;
    int32_t moves;   /* colo_mover_t by which this rank can take part, if p2p */
    bool nothing;    /* this rank has nothing that peers could reach */
    bool not_agreed; /* p2p is this rank's view, and ranks have yet to agree; the same on all */
    colo_reached_tensor_t *tensor; /* [2][n]: of what is pushed; of what is pulled */
} colo_reached_t;

/* One call. */
typedef struct colo_call {
    colo_bridge_t *bridge;
    struct colo_batch *batch; /* NULL: of a uniform bridge */
    colo_loaded_t *loaded;
    const colo_tensor_t *in, *out; /* [n] of a batch, or NULL; else one */
    colo_carried_t *carried;       /* [n] the same, checked: frame.tensor */
    colo_call_frame_t frame;
    colo_op_desc_t op;
    colo_reached_t reached;
    colo_stream_t stream;
    bool capturing;         /* is the stream? */
    colo_queries_t queries; /* its device is the current one */
} colo_call_t;

/* ---- run.c ---- */

/* All steps of a call. */
colo_status_t colo_run_steps(colo_call_t *call);
/* ticket.c: ends the calls that were started, and logs those that were not finished. */
void colo_tickets_destroy(colo_bridge_t *b);

/* ---- over-comm.c ---- */

/* Messages of a plan, local; and its program. @launched: as colo_program_create(). */
colo_status_t colo_loaded_create(colo_bridge_t *b, colo_loaded_t *loaded, bool bytes);
void colo_loaded_deinit(colo_comm_t *comm, colo_loaded_t *loaded);
/* The members of the route and staging for its messages; local. */
colo_status_t colo_over_comm_stage(colo_bridge_t *b, colo_loaded_t *loaded);
/* Boxes for @n tensors a call from now on. */
colo_status_t colo_over_comm_widen(colo_loaded_t *loaded, colo_pass_t pass, int32_t n);
/* Have the partial sums and staging that @loaded needs. */
colo_status_t colo_over_comm_reserve(colo_bridge_t *b, const colo_loaded_t *loaded);
/* Connects the members, if there is a route to make; collective over them. */
colo_status_t colo_over_comm_connect(colo_bridge_t *b, colo_loaded_t *loaded);
/* Before the first step: connections, boxes, staging. */
colo_status_t colo_over_comm_begin(colo_call_t *call);
colo_status_t colo_over_comm_move(colo_call_t *call, const colo_move_t *move);
/* The messages of a move. @more: NULL: all; else what ranks in reach move otherwise. */
colo_status_t colo_over_comm_exchange(colo_call_t *call, const colo_move_t *move,
                                      const colo_exchange_t *more, colo_stream_t stream);
/* What stays on the rank, of all tensors. @narrow: messages move at the same time. */
colo_status_t colo_over_comm_keep(colo_call_t *call, const colo_move_t *move, bool narrow,
                                  colo_stream_t stream);
/* Of @n tensors, if the usual one has @bytes. */
int64_t colo_bridge_bytes_of(const colo_bridge_t *b, const colo_plan_t *p, int64_t bytes,
                             const colo_carried_t *t, int32_t n);

/* ---- component.c ---- */

/* Ranks of @comm that are tied to this rank by messages, itself included, ascending; the same list
 * on all of them. Local. @members: out, owned by the caller. */
colo_status_t colo_component_find(const colo_plan_t *plan, const colo_comm_t *comm,
                                  int32_t **members, int32_t *n);

/* ---- fields.c: what all ranks must have alike ---- */

bool colo_bridge_exchanges_compare(const colo_bridge_t *b);
void colo_bridge_fields(const colo_bridge_t *b, colo_fields_t *f);
colo_op_desc_t colo_bridge_op(const colo_bridge_t *b, colo_pass_t pass);

/* collective.c: the runtimes' all-gather and all-reduce. */
/* COLO_ERR_MISSING when a rank of this rank's groups is not in b->comm; local. */
colo_status_t colo_collective_members(const colo_bridge_t *b, const colo_plan_t *plan);
colo_status_t colo_collective_create(colo_bridge_t *b); /* collective over b->comm */
void colo_collective_destroy(colo_bridge_t *b);
/* The rows that a SHARDED output takes out of the whole sequence. */
colo_status_t colo_collective_rows(colo_loaded_t *loaded);
/* Have staging for a plan. */
colo_status_t colo_collective_stage(colo_bridge_t *b, const colo_plan_t *plan);
colo_status_t colo_collective_forward(colo_bridge_t *b, colo_view_t x, colo_view_t y,
                                      colo_stream_t stream);
colo_status_t colo_collective_backward(colo_bridge_t *b, colo_view_t d_y, colo_view_t d_x,
                                       colo_stream_t stream);

/* run/memory.c: have @bytes. COLO_ERR_STATE: a capture needs more than there is. */
colo_status_t colo_arena_grow(const colo_bridge_t *b, colo_arena_t *a, size_t bytes, bool capturing,
                              const char *what);
void colo_arena_deinit(const colo_bridge_t *b, colo_arena_t *a);
/* The same for addends of one call. */
colo_status_t colo_partials_reserve(colo_bridge_t *b, size_t bytes, bool capturing);

#endif
