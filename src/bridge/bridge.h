/* SPDX-License-Identifier: Apache-2.0 */
/* bridge.h (private) - what bridge.c, exchange.c and collective.c share. */
#ifndef COLO_BRIDGE_BRIDGE_H
#define COLO_BRIDGE_BRIDGE_H

#include "bridge/plan/plan.h"
#include "comm/comm.h"
#include "comm/peer.h"
#include "core/memory.h"
#include "core/device.h"

#include <colobridge/bridge.h>

/* One pass, ready to run: messages with their boxes, whose data and strides each call fills in. */
typedef struct colo_pass_messages {
    int32_t nsends, nrecvs;
    colo_message_t *send, *recv;
    colo_box_t *send_box, *recv_box;   /* [nregions] of the plan's routes */
    colo_box_t *local_from, *local_to; /* [nlocals]: what stays on the rank */
    int32_t tensors; /* of a call: each region has so many boxes in send_box and recv_box */
} colo_pass_messages_t;

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

/* What depends on the shape; colo_bridge_reshape() builds another and swaps. */
typedef struct colo_shape_state {
    colo_plan_t *plan;
    colo_pass_messages_t messages[2], relay[2]; /* of the first and last exchange */
    colo_pass_messages_t node_sums;             /* backward: of the exchange between them */
    void *sums; /* PARTIAL: addends of other ranks, one partial sum per addend that arrives; of the
                   bridge's arena, set by each staged call */
    size_t sum_size;
    int32_t nsums;
    int32_t *sum_of; /* [addends]: which partial sum, -1 where nothing arrives; if nodes add up, by
                        colo_sum_key() */
    /* EXACT in CUDA memory, on a backend with routes: this rank's component, [nmembers] ranks of
     * the comm, their route. Else 0 and NULL. */
    int32_t *members, nmembers;
    colo_subconnection_t
        *subconnection; /* NULL after a reshape that ties other ranks, until the next call */
    size_t need_sums, need_stage; /* bytes of the bridge's arenas, 0 for a ragged batch */
    colo_run_t *run; /* [nruns] COLLECTIVE with a SHARDED output: this rank's own rows */
    int64_t nruns;
    bool bytes; /* boxes of messages count bytes, because tensors of a call differ in dtype */
    bool asymmetric[2]; /* p2p: of a pass, some rank has nothing that peers could reach */
    bool far; /* p2p: ranks that the plan ties to this one do not reach each other: between these,
                 calls are staged. Or there is another exchange */
    colo_p2p_list_t *relay_list; /* p2p: its steps; of the path */
} colo_shape_state_t;

typedef struct colo_tickets colo_tickets_t;

struct colo_bridge {
    colo_comm_t *comm; /* borrowed */
    const colo_ops_t *ops;
    colo_algo_t algo;
    colo_mem_t mem;
    colo_allocator_t allocator; /* of the arenas */
    char axes[8];
    int axis[3]; /* tensor axis of samples, rows, features; flat: 0, -1, 1 */
    colo_layout_t src, dst;
    colo_nodes_t *nodes; /* of the comm, if the caller did not name any; NULL: one */
    colo_shape_state_t now;
    colo_collective_t coll;
    colo_transport_t transport;
    bool lazy;                /* partial sums, staging and route are made when a call is staged */
    colo_arena_t sums, stage; /* of one call: addends; staging of its messages */
    int32_t blocks;  /* of a peer-to-peer kernel, at most; 0: as few as keep the links busy */
    colo_p2p_t *p2p; /* NULL: every call is staged */
    struct colo_agreed {
        bool made;
        int32_t moves;          /* colo_move_t that is taken; 0: staged */
        uint64_t registrations; /* how often memory had been registered */
    } agreed[2];                /* what ranks agreed on for asymmetric passes */
    void *side; /* an auxiliary stream for messages that move while the caller's stream works; NULL:
                   none */
    void *order; /* an auxiliary stream, where calls leave memory of the bridge in use; else NULL */
    bool ran;    /* there was such a call */
    uint64_t calls;
    uint64_t tag, reshapes; /* name a route, the same on all ranks */
    uint64_t number;        /* of the bridges of this comm, from 1; the same on all ranks */
    struct colo_ragged_bridge *ragged; /* ragged.h; NULL: of uniform batches */
    bool compared[2]; /* by pass: all ranks were once in this call, by the plan of now */
    colo_tickets_t *tickets; /* ticket.c; NULL: no call was started */
};

/* If nodes add up, the partial sums are: addends that arrive; sums of nodes by their lowest addend,
 * and those of a group that is added up here; addends that this rank collects for other nodes, and
 * their sums. The last two are placed as its destination part is. */
enum { COLO_SUM_ADDEND, COLO_SUM_NODE, COLO_SUM_COLLECTED, COLO_SUM_LEAVES };
static inline int64_t colo_sum_key(const colo_plan_t *p, int kind, int64_t addend)
{
    return kind * p->addends + addend;
}

/* Of a region that is received in the first exchange of backward. */
static inline int64_t colo_sum_recv_key(const colo_plan_t *p, const colo_region_t *r)
{
    return r->addend < p->addends ? r->addend
                                  : colo_sum_key(p, COLO_SUM_COLLECTED, r->addend - p->addends);
}

/* A rank's tensor as (samples, rows, features) strides in elements. */
typedef struct colo_view {
    char *data;
    int64_t stride[3];
} colo_view_t;

/* For any other plan than the one of the bridge: messages, and which partial sums it has. Local. */
colo_status_t colo_shape_state_load(colo_bridge_t *b, colo_shape_state_t *s);
void colo_shape_state_deinit(colo_comm_t *comm, colo_shape_state_t *s);
/* Before and after a call that leaves memory of the bridge in use: behind the last such call. @st:
 * of the call, returned; one that failed may have begun. */
colo_status_t colo_bridge_follow(colo_bridge_t *b, colo_stream_t stream);
colo_status_t colo_bridge_lead(colo_bridge_t *b, colo_status_t st, colo_stream_t stream);
/* ticket.c: ends the calls that were started, and logs those that were not finished. */
void colo_tickets_destroy(colo_bridge_t *b);
colo_view_t colo_bridge_view(const colo_bridge_t *b, const colo_tensor_t *t, int64_t rows);
bool colo_bridge_exchanges_compare(const colo_bridge_t *b);

/* fields.c: what all ranks must have alike. */
void colo_bridge_fields(const colo_bridge_t *b, colo_fields_t *f);
/* The same about a call. @mine: this rank's verdict on its own arguments. Collective. */
colo_status_t colo_bridge_agree_call(const colo_bridge_t *b, colo_pass_t pass, bool p2p,
                                     bool capturing, colo_status_t mine);
colo_op_desc_t colo_bridge_op(const colo_bridge_t *b, colo_pass_t pass);

/* The whole of a rank's part as one box. */
colo_box_t colo_bridge_box(colo_view_t v, const colo_owned_t *own);

/* One tensor of a call. Each unit of a plan's features is @per of its own. */
typedef struct colo_carried {
    colo_view_t in, out;
    int64_t per;
    colo_dtype_t dtype;
    size_t sums; /* where it begins in each partial sum */
} colo_carried_t;

typedef struct colo_near colo_near_t; /* what peers reach of a call that is p2p */

/* Where messages go while @stream copies the rank's own part: @side, out, is @stream if that gains
 * nothing or cannot be. After OK with another stream comes one join, by which @stream waits for it.
 * @st: of the call so far, returned. */
colo_status_t colo_bridge_fork(colo_bridge_t *b, const colo_shape_state_t *s, colo_pass_t pass,
                               const colo_carried_t *t, int32_t n, colo_stream_t stream,
                               colo_stream_t *side);
colo_status_t colo_bridge_join(colo_bridge_t *b, colo_status_t st, colo_stream_t stream);
/* exchange.c: EXACT. @in is x or d_y, @out is y or d_x. */
colo_status_t colo_messages_create(colo_bridge_t *b, colo_shape_state_t *s, colo_pass_t pass);
void colo_messages_deinit(const colo_pool_t *pool, colo_pass_messages_t *messages);
/* Boxes for @n tensors a call from now on. */
colo_status_t colo_messages_widen(colo_shape_state_t *s, colo_pass_t pass, int32_t n);
/* Messages, own rows and sums of @n tensors; there are boxes for so many. @near: what peers reach
 * goes that way; NULL: nothing does. */
colo_status_t colo_exchange_run(colo_bridge_t *b, colo_shape_state_t *s, colo_op_desc_t op,
                                colo_pass_t pass, const colo_carried_t *t, int32_t n,
                                const colo_near_t *near, colo_stream_t stream);
colo_status_t colo_partial_sums_create(colo_bridge_t *b, colo_shape_state_t *s);
/* A region of tensor @t, in @v, which is a part of @own; its first row is @row. */
colo_box_t colo_exchange_box(const colo_carried_t *t, colo_view_t v, const colo_owned_t *own,
                             const colo_region_t *r, int64_t row, bool bytes);
/* A region of a partial sum; its dtype. */
colo_box_t colo_sum_box(const colo_shape_state_t *s, const colo_carried_t *t, int64_t key,
                        const colo_region_t *r, const colo_offset_t *where, bool bytes);
colo_dtype_t colo_sum_dtype(const colo_plan_t *p, const colo_carried_t *t, int64_t key);
/* That of a node's sum of @dtype. */
colo_dtype_t colo_sum_wide(colo_dtype_t dtype);
/* add-up.c: the output, by the regions of addend 0: each group of a region's terms, then their
 * sums. */
colo_status_t colo_add_up_terms(const colo_bridge_t *b, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_routes_t *const lists[3],
                                colo_stream_t stream);
/* What this rank brings to other nodes: its addend and those that it has collected. */
colo_status_t colo_add_up_for_others(const colo_bridge_t *b, const colo_shape_state_t *s,
                                     const colo_carried_t *t, colo_stream_t stream);
/* Samples, rows and features of a partial sum: those of the source part. If nodes add up, both
 * parts fit, and have the same strides in it: to a peer-to-peer call all sums are one tensor. */
void colo_sum_extent(const colo_plan_t *p, int64_t x[3]);
/* Bytes of one partial sum, of a tensor that has @per features for each of the plan's. */
size_t colo_partial_sum_bytes(const colo_plan_t *p, int64_t per, colo_dtype_t dtype);
/* The members of the route and staging for its messages; local. */
colo_status_t colo_messages_stage(colo_bridge_t *b, colo_shape_state_t *s);
/* What the messages of a call take, whose boxes are filled in; of a backend with routes. Elements
 * of sums between nodes have @sum_elem bytes. */
size_t colo_messages_staging(const colo_comm_t *comm, const colo_shape_state_t *s, colo_pass_t pass,
                             size_t elem, size_t sum_elem);
/* Connects the members, if there is a route to make; collective over them. */
colo_status_t colo_messages_connect(colo_bridge_t *b, colo_shape_state_t *s);
/* The tensors of a uniform call. */
colo_carried_t colo_exchange_tensor(const colo_bridge_t *b, colo_view_t in, colo_view_t out);

/* component.c: ranks of @comm that are tied to this rank by messages, itself included, ascending;
 * the same list on all of them. Local. @members: out, owned by the caller. */
colo_status_t colo_component_find(const colo_plan_t *plan, const colo_comm_t *comm,
                                  int32_t **members, int32_t *n);

/* collective.c: the runtimes' all-gather and all-reduce. */
/* COLO_ERR_MISSING when a rank of this rank's groups is not in b->comm; local. */
colo_status_t colo_collective_members(const colo_bridge_t *b, const colo_plan_t *plan);
colo_status_t colo_collective_create(colo_bridge_t *b); /* collective over b->comm */
void colo_collective_destroy(colo_bridge_t *b);
/* The rows that a SHARDED output takes out of the whole sequence: s->run. */
colo_status_t colo_collective_rows(colo_shape_state_t *s);
/* Have staging for a plan. */
colo_status_t colo_collective_stage(colo_bridge_t *b, const colo_plan_t *plan);
colo_status_t colo_collective_forward(colo_bridge_t *b, colo_view_t x, colo_view_t y,
                                      colo_stream_t stream);
colo_status_t colo_collective_backward(colo_bridge_t *b, colo_view_t d_y, colo_view_t d_x,
                                       colo_stream_t stream);

/* What stays on the rank of one tensor, where nothing is added up. @narrow: messages move at the
 * same time. */
colo_status_t colo_exchange_keep(colo_bridge_t *b, colo_shape_state_t *s, colo_pass_t pass,
                                 const colo_carried_t *t, bool narrow, colo_stream_t stream);
/* Have the partial sums and staging that @s needs. */
colo_status_t colo_staged_need(colo_bridge_t *b, const colo_shape_state_t *s);
/* run/memory.c: have @bytes. COLO_ERR_STATE: a capture needs more than there is. */
colo_status_t colo_arena_grow(const colo_bridge_t *b, colo_arena_t *a, size_t bytes, bool capturing,
                              const char *what);
void colo_arena_deinit(const colo_bridge_t *b, colo_arena_t *a);
/* The same for addends of one call. */
colo_status_t colo_bridge_sums_for(colo_bridge_t *b, size_t bytes, bool capturing);

/* peer.c: EXACT over registered memory. */
/* Will it be p2p, as far as this rank can see before ranks compare notes? The same on all. */
bool colo_bridge_p2p_likely(const colo_bridge_t *b);
/* Collective. Without peers that reach each other COLO_OK and no path, unless it is insisted on. */
colo_status_t colo_bridge_p2p_create(colo_bridge_t *b);
/* For another shape; local. Keeps the old one on error. */
colo_status_t colo_bridge_p2p_load(colo_bridge_t *b, colo_shape_state_t *next);
void colo_bridge_p2p_destroy(colo_bridge_t *b);
/* Peers write into this rank's output, or read in its input. */
typedef enum colo_move { COLO_PUSH = 1, COLO_PULL = 2 } colo_move_t;
typedef struct colo_reached {
    bool p2p;
    int32_t moves;   /* colo_move_t by which this rank can take part, if p2p */
    bool nothing;    /* this rank has nothing that peers could reach */
    bool not_agreed; /* p2p is this rank's view, and ranks have yet to agree; the same on all */
    int32_t id;
    uint64_t offset;
    int32_t device; /* the current one */
    bool capturing;
} colo_reached_t;
/* Is it the destination's tensor that peers reach? */
bool colo_bridge_p2p_reaches_dst(const colo_plan_t *p, colo_pass_t pass);
/* Does this call go p2p? Local. COLO_ERR_ARG: it must, and its tensor is not registered. */
colo_status_t colo_bridge_p2p_find(const colo_bridge_t *b, colo_pass_t pass,
                                   const colo_tensor_t *in, const colo_tensor_t *out,
                                   colo_reached_t *r);
/* Where that is not_agreed; collective. */
colo_status_t colo_bridge_p2p_agree(colo_bridge_t *b, colo_pass_t pass, colo_reached_t *r);
struct colo_near {
    const colo_reached_t *all, *each; /* each: [n] */
    colo_p2p_list_t *list;            /* NULL: of the shape */
    bool relays; /* peers reach the output, so what entered a node goes on the same way */
};
/* Of @n tensors, if the usual one has @bytes. */
int64_t colo_bridge_bytes_of(const colo_bridge_t *b, const colo_shape_state_t *s, int64_t bytes,
                             const colo_carried_t *t, int32_t n);
/* How many of these messages are of ranks in reach; @bytes: out, of them. */
int32_t colo_bridge_p2p_count(const colo_bridge_t *b, const colo_routes_t *routes, int64_t *bytes);
/* The part of ranks in reach in an exchange: what they move to each other, and what stays on the
 * rank; addends go to the partial sums. Or, if it relays, of the second exchange: what entered the
 * node, to those that need it, too. */
typedef struct colo_near_part {
    colo_bridge_t *b;
    colo_shape_state_t *s;
    colo_pass_t pass;
    const colo_carried_t *t; /* [n] */
    int32_t n;
    const colo_near_t *near;
    bool relays;
} colo_near_part_t;
/* As what an exchange moves besides its messages; keeps @m. */
colo_exchange_t colo_bridge_p2p_part(colo_near_part_t *m, colo_op_desc_t op);
/* The call, of ranks that all reach those that they exchange with. */
colo_status_t colo_bridge_p2p_run(colo_near_part_t *m, colo_op_desc_t op, colo_stream_t stream);
/* Bytes that a feature of @p has in the usual tensor; ragged: or in the widest one so far. */
size_t colo_bridge_p2p_unit(const colo_bridge_t *b, const colo_plan_t *p);
/* The second exchange, if near->relays: its steps for a shape or batch; local. */
colo_status_t colo_bridge_p2p_relays(const colo_bridge_t *b, colo_shape_state_t *s);
/* Do peers reach gradients in the destination's tensor, which receivers add up? */
static inline bool colo_plan_adds(const colo_plan_t *p, colo_pass_t pass)
{
    return pass == COLO_BACKWARD && p->addends > 1;
}
/* Addends that peers hold are put into partial sums, in place of being read where they lie. */
static inline bool colo_bridge_gathers(const colo_shape_state_t *s, bool far, colo_pass_t pass)
{
    return far && colo_plan_adds(s->plan, pass);
}

/* verify.c: COLO_CHECK=2; waits for the stream. */
colo_status_t colo_contract_zeros(const colo_bridge_t *b, colo_view_t d_y, colo_stream_t stream);
/* @mine: of what this rank holds; replicas must bring the same. Collective. */
colo_status_t colo_contract_compare(colo_bridge_t *b, colo_pass_t pass, uint64_t mine);
colo_status_t colo_contract_replicas(colo_bridge_t *b, colo_pass_t pass, colo_view_t in,
                                     colo_stream_t stream);

#endif
