/* SPDX-License-Identifier: Apache-2.0 */
/* run.h (private) - the handle of a bridge, and what executes its calls. */
#ifndef COLO_BRIDGE_RUN_RUN_H
#define COLO_BRIDGE_RUN_RUN_H

#include "bridge/run/direct.h"
#include "bridge/run/program.h"
#include "comm/comm.h"
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

typedef struct colo_call colo_call_t;
typedef struct colo_ready_plan colo_ready_plan_t;

/* COLLECTIVE: groups made once, staging for the passes. */
typedef struct colo_collective {
    colo_comm_t *gather; /* k siblings; NULL when equal or outside the grids */
    colo_comm_t *cp;     /* NULL when cp is 1 */
    int64_t k, sibling;
    colo_direction_t direction;
    colo_arena_t stage[2];
} colo_collective_t;

/* What a rank sends in an exchange, or receives; each call fills in data and strides of the boxes.
 */
typedef struct colo_message_list {
    int32_t n;
    colo_message_t *message; /* [n], with as many behind them: */
    /* [nby_comm] those that the comm carries in direct calls, too, and bytes of the others, as the
     * plan counts. */
    colo_message_t *by_comm;
    int32_t nby_comm;
    int64_t direct_bytes;
    colo_box_t *box; /* [nregions][tensors] of the plan's routes */
    int32_t tensors; /* of a call */
} colo_message_list_t;

/* A program as the comm carries it. */
typedef struct colo_messages {
    colo_message_list_t list[2][COLO_EXCHANGES][2]; /* by pass; received, sent */
    colo_box_t *own_box[2];                         /* what stays on the rank: from, to */
    /* In CUDA memory, on a backend with connections: the ranks of the comm that the plan ties this
     * one to, [nmembers], and theirs. Else 0 and NULL. */
    int32_t *members, nmembers;
    colo_subconnection_t
        *subconnection; /* NULL after a reshape that ties other ranks, until the next call */
    size_t need_partials, need_stage; /* bytes of the bridge's arenas, 0 for a batch */
    bool staged;                      /* all ranks had a staged call with them, and what it needs */
} colo_messages_t;

/* A plan, ready to run; colo_bridge_reshape() makes another and swaps. */
struct colo_ready_plan {
    bool any_ranks; /* the plan has no rows, those of batches may tie any ranks */
    colo_program_t program;
    colo_messages_t messages;
    colo_ready_direct_t direct;
    colo_run_t *run; /* [nruns] COLLECTIVE with a SHARDED output: this rank's own rows; of the
                        plan's pool */
    int64_t nruns;
};

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
    uint64_t tag, reshapes; /* name a connection */
    uint64_t calls;
} colo_bridge_id_t;

/* Memory of one call. */
typedef struct colo_bridge_memory {
    colo_arena_t partials, stage;    /* addends; staging of messages */
    colo_list_t carried, registered; /* of a batch: what a call has of each tensor */
} colo_bridge_memory_t;

struct colo_bridge {
    colo_comm_t *comm; /* borrowed */
    const colo_device_t *device;
    colo_algo_t algo;
    colo_mem_t mem;
    colo_allocator_t allocator; /* of the arenas */
    colo_axes_t axes;
    colo_sides_t sides;
    colo_ready_plan_t now;
    colo_collective_t coll;
    colo_transport_t transport;
    bool lazy; /* partial sums, staging and connection are made when a call is staged */
    colo_bridge_memory_t memory;
    colo_bridge_direct_t direct;
    colo_streams_t streams;
    colo_bridge_id_t id;
    struct colo_ragged_bridge *ragged; /* ragged.h; NULL: of uniform batches */
    bool compared[2];        /* by pass: all ranks were once in this call, by the plan of now */
    bool alone;              /* no backward follows forwards, as the caller says */
    colo_tickets_t *tickets; /* ticket.c; NULL: no call was started */
};

/* One call. */
struct colo_call {
    colo_bridge_t *bridge;
    bool direct;              /* between ranks that reach each other's memory */
    bool undecided;           /* ranks have yet to agree on that */
    struct colo_batch *batch; /* NULL: of a uniform bridge */
    colo_ready_plan_t *ready;
    const colo_tensor_t *in, *out; /* [n] of a batch, or NULL; else one */
    colo_carried_t *carried;       /* [n] the same, checked: frame.tensor */
    colo_call_frame_t frame;
    colo_op_desc_t op;
    colo_registered_t registered;
    colo_stream_t stream;
    bool capturing;         /* is the stream? */
    colo_queries_t queries; /* its device is the current one */
};

/* ---- run.c ---- */

/* ready->program.plan is there, and bytes is set; local. */
colo_status_t colo_run_load(colo_bridge_t *bridge, colo_ready_plan_t *ready);
/* Ends what is there of it, its plan included. */
void colo_run_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready);
/* Collective, when all ranks have agreed on the bridge. */
colo_status_t colo_run_create(colo_bridge_t *bridge);
/* Takes @next, which was loaded; local. */
void colo_run_reshape(colo_bridge_t *bridge, colo_ready_plan_t *next);
/* Finds how a call's messages travel, and prepares that; local. */
colo_status_t colo_run_find(colo_call_t *call);
colo_status_t colo_run_call(colo_call_t *call);

/* ticket.c: ends the calls that were started, and logs those that were not finished. */
void colo_tickets_destroy(colo_bridge_t *bridge);

/* ---- messages.c: messages of the comm ---- */

colo_status_t colo_messages_load(colo_bridge_t *bridge, colo_ready_plan_t *ready);
void colo_messages_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready);
/* Has memory of the bridge for what the comm carries; local. */
colo_status_t colo_messages_reserve(colo_bridge_t *bridge, const colo_ready_plan_t *ready);
/* Connects, and the same; collective over those that the plan ties together. */
colo_status_t colo_messages_connect(colo_bridge_t *bridge);
/* @to gets the connection of @from if it ties the same ranks. */
void colo_messages_take(colo_messages_t *from, colo_messages_t *to);
/* Boxes and partial sums of a batch; local. */
colo_status_t colo_messages_prepare(colo_call_t *call);
/* Before the first step: connections, boxes, staging. */
colo_status_t colo_messages_begin(colo_call_t *call);

/* ---- direct.c: between ranks that reach each other's memory ---- */

/* As far as this rank can see before ranks compare notes: will memory be reached directly? The same
 * on all. */
bool colo_direct_likely(const colo_bridge_t *bridge);
/* Of a bridge that has a launcher: chooses the carrier of each message, and makes lists. */
colo_status_t colo_direct_load(colo_bridge_t *bridge, colo_ready_plan_t *ready);
void colo_direct_unload(const colo_bridge_t *bridge, colo_ready_plan_t *ready);
/* The launcher, and what load would have done for the plan of now. Collective. Keeps bridge->lazy
 * if there is one. */
colo_status_t colo_direct_create(colo_bridge_t *bridge);
void colo_direct_destroy(colo_bridge_t *bridge);
/* Does a call go this way? Sets call->direct, or call->undecided, which is the same on all ranks.
 */
colo_status_t colo_direct_find(colo_call_t *call);
/* Of a call that is undecided: sets call->direct. Collective. */
colo_status_t colo_direct_agree(colo_call_t *call);
/* Lists for what ranks agreed on and for the tensors of a call; local. */
colo_status_t colo_direct_prepare(colo_call_t *call);
/* Launches a move between ranks in reach; and what stays, if it goes to the output. */
colo_status_t colo_direct_move(colo_call_t *call, const colo_move_t *move);

/* ---- collective.c: COLLECTIVE, which has no program; chosen by algo ---- */

static inline bool colo_bridge_is_collective(const colo_bridge_t *bridge)
{
    return bridge->algo == COLO_ALGO_COLLECTIVE;
}
const char *colo_algo_name(colo_algo_t algo); /* NULL: there is none */
/* Refuses what COLLECTIVE cannot express, and has staging; local. */
colo_status_t colo_collective_load(colo_bridge_t *bridge, colo_ready_plan_t *ready);
/* The groups; collective. */
colo_status_t colo_collective_create(colo_bridge_t *bridge);
void colo_collective_destroy(colo_bridge_t *bridge);
colo_status_t colo_collective_run(colo_call_t *call);

/* ---- add.c ---- */

/* An addition of a program, of all tensors of @frame that have features; without, there may be no
 * memory. */
colo_status_t colo_add_run(const colo_device_t *device, const colo_call_frame_t *frame,
                           const colo_add_t *add, colo_stream_t stream);

/* ---- transfers.c ---- */

/* Does this rank reach comm rank @peer? */
static inline bool colo_direct_near(const colo_bridge_t *bridge, int32_t peer)
{
    return bridge->comm->backend->direct->reaches(bridge->comm, bridge->comm->rank, peer);
}
/* Bytes that a feature of a plan has in the usual tensor; of a batch: or in the widest one so far.
 */
size_t colo_direct_unit(const colo_bridge_t *bridge, const colo_ready_plan_t *ready);
/* What ranks in reach move in @exchange; addends go to partial sums, or are added up where they
 * lie. Of a plan without rows: nothing, but any ranks in reach may reach this rank's tensors. */
colo_status_t colo_transfers_list(colo_bridge_t *bridge, const colo_ready_plan_t *ready,
                                  int exchange, colo_transfer_lists_t *lists);
void colo_transfers_deinit(colo_transfer_lists_t *lists);

/* ---- component.c ---- */

/* Comm ranks that calls of this plan tie to this rank; as colo_component_find(). */
colo_status_t colo_members_find(const colo_bridge_t *bridge, const colo_ready_plan_t *ready,
                                int32_t **members, int32_t *n);
/* Ranks of @comm that are tied to this rank by messages, itself included, ascending; the same list
 * on all of them. Local. @members: out, owned by the caller. */
colo_status_t colo_component_find(const colo_plan_t *plan, const colo_comm_t *comm,
                                  int32_t **members, int32_t *n);

/* ---- fields.c: what all ranks must have alike ---- */

bool colo_bridge_exchanges_compare(const colo_bridge_t *bridge);
void colo_bridge_fields(const colo_bridge_t *bridge, colo_fields_t *fields);
colo_op_desc_t colo_bridge_op(const colo_bridge_t *bridge, colo_pass_t pass);

/* ---- memory.c ---- */

/* If this rank exchanges, can the comm reach the bridge's memory? Copies within a rank work anyway.
 */
colo_status_t colo_memory_check(const colo_bridge_t *bridge, bool exchanges, int32_t messages);
/* A failure that peers do not share, which may wait in groups of COLLECTIVE; returns @st. */
colo_status_t colo_bridge_fail(colo_bridge_t *bridge, colo_status_t st);
/* A call that uses memory of the bridge runs behind those before; @st: how it fared, returned. */
colo_status_t colo_memory_begin(colo_call_t *call);
colo_status_t colo_memory_end(colo_call_t *call, colo_status_t st);
/* Have @bytes. COLO_ERR_STATE: a capture needs more than there is. */
colo_status_t colo_arena_grow(const colo_bridge_t *bridge, colo_arena_t *arena, size_t bytes,
                              bool capturing, const char *what);
void colo_arena_deinit(const colo_bridge_t *bridge, colo_arena_t *arena);
/* All but the arenas of COLLECTIVE. */
void colo_memory_deinit(colo_bridge_t *bridge);
/* As colo_arena_grow() for addends of one call. */
colo_status_t colo_partials_reserve(colo_bridge_t *bridge, size_t bytes, bool capturing);

#endif
