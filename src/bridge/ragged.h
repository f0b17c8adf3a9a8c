/* SPDX-License-Identifier: Apache-2.0 */
/* ragged.h (private) - what the files of ragged batches share. */
#ifndef COLO_BRIDGE_RAGGED_H
#define COLO_BRIDGE_RAGGED_H

#include "bridge/bridge.h"
#include "bridge/plan/routing.h"

#include <colobridge/ragged.h>

/* How a layout divides the rows of a ragged batch. */
typedef struct colo_ragged_axes {
    int64_t replicas; /* ranks along the dims that split samples */
    int64_t cp;       /* ranks along those that split rows in context; the major index */
    int64_t sp;       /* ranks along the others that split rows */
    bool zigzag;      /* destination, cp > 1 */
} colo_ragged_axes_t;

/* length / unit, and what remains. A division per sequence costs as much as the rest of the check;
 * a unit is a power of two, usually. */
static inline uint64_t colo_ragged_rest(uint64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? length % unit : length & (unit - 1);
}
static inline int64_t colo_ragged_times(int64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? (int64_t)((uint64_t)length / unit) : length >> __builtin_ctzll(unit);
}

/* COLO_ERR_LAYOUT: not a layout that ragged batches can have. */
colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *layout, bool is_src);

/* Rows of one segment that follow each other in it and in its sequence. Small, because all parts
 * of a batch are read and written for each. */
typedef struct colo_part {
    int64_t seq, pos, count; /* count > 0 */
    int64_t row;             /* of the first, on the source axis */
} colo_part_t;

/* How many parts the @rows of a segment are, from *part on, which goes behind them. */
static inline int64_t colo_parts_of(int64_t rows, const colo_part_t **part)
{
    const colo_part_t *const first = *part;
    while (rows > 0)
        rows -= (*part)++->count;
    return *part - first;
}
/* Are all tables there. */
colo_status_t colo_segments_present(const colo_segments_t *s);

/* Hashes of the tables by name: rows, src_dp, seq, pos, row_pos, seq_len, seq_dp; and of all. */
enum { COLO_SEGMENT_TABLES = 7, COLO_SHOWN = 8 };
/* What all ranks must have alike of one table, and of it what an error message shows. */
typedef struct colo_table {
    int64_t n, first[COLO_SHOWN];
    uint64_t hash;
} colo_table_t;
uint64_t colo_tables_hash(const colo_segments_t *s, uint64_t each[COLO_SEGMENT_TABLES]);
/* One table, the same on every machine. */
uint64_t colo_table_hash(const int64_t *v, int64_t n);

/*
 * Tables seen along the axes of both sides, while a plan is made. Memory is kept for the next
 * tables. src and dst are set before the first load.
 */
typedef struct colo_ragged {
    colo_ragged_axes_t src, dst;
    const colo_segments_t *tables; /* borrowed: of the call only */
    int64_t rows;                  /* of all segments */
    bool sorted; /* each segment is one part, and both replicas ascend: the tables list the parts */
    int64_t *row;                /* [segments] if sorted: the first of each on the source axis */
    colo_list_t in_order, parts; /* else, colo_part_t: by segment; by source row */
    int64_t *src_lo;             /* [replicas + 1] first row of each source replica */
    int64_t *base;               /* [nseqs] where a sequence begins on its replica's axis */
    int64_t *local;              /* [nseqs] the same on the axis of a context rank */
    int64_t *chunk;              /* [nseqs] positions of a chunk */
    int64_t *length;             /* [replicas] of that axis */
    int64_t *dst_lo;             /* [replicas + 1] parts of each destination replica */
    colo_list_t by_dst;          /* int64_t: if not sorted, which these are */
    colo_list_t entries;         /* int64_t: memory of the tables above */
} colo_ragged_t;

/* Takes layouts and shape, as ragged batches must have them. */
colo_status_t colo_ragged_init(colo_ragged_t *r, const colo_layout_t *src, const colo_layout_t *dst,
                               const colo_shape_t *shape);
/* segments.c: all checks of colo_segments_check() but those of colo_segments_present(). Lists parts
 * in table order, if r->sorted their row, src_lo and dst_lo. base, local, chunk and length are laid
 * out. */
colo_status_t colo_ragged_parts(colo_ragged_t *r);
/* Checks tables and lays them out. */
colo_status_t colo_ragged_load(colo_ragged_t *r, const colo_segments_t *segments);
void colo_ragged_deinit(colo_ragged_t *r);

/* The index of @coords among the parts of an axis, the first split coarsest. @context: 1 context
 * splits only, 0 the others only, -1 all. */
int64_t colo_ragged_part(const colo_layout_t *l, colo_axis_t axis, int context,
                         const int64_t *coords);
/* Rows of a block, ascending. local is an index on the source rank, or on the whole axis of the
 * destination replica. */
colo_status_t colo_ragged_rows(const colo_side_t *side, const int64_t *coords,
                               const colo_runs_t *within, colo_runs_t *runs);
/* Blocks of @side that own any of the rows @mine, in an order that both sides know. */
colo_status_t colo_ragged_visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *out);

/* Rows at indices first, first + 1 .. of the replica's axis are at row, row + 1 .. of the tensor.
 */
typedef struct colo_stored {
    int64_t first, count, row;
} colo_stored_t;

/* Rows of the batch in this rank's destination tensor, by position. */
typedef struct colo_ragged_places {
    colo_stored_t *stored; /* [n] owned */
    int64_t n;
    colo_stored_t *foreign; /* [nforeign] owned: DISJOINT: those that other context ranks own */
    int64_t nforeign;
} colo_ragged_places_t;
void colo_ragged_places_deinit(const colo_pool_t *pool, colo_ragged_places_t *places);
/* Of @whole, the rows that @coords have on the replica's axis: where their tensor has them, by
 * index.
 * @on_rank: [whole->n] where each run begins on the axis of the context rank; used if @merged, and
 * not if rows are full. @out: [whole->n] of @pool; @rows: of that tensor. */
colo_status_t colo_ragged_stored(const colo_ragged_t *r, const colo_side_t *side,
                                 const int64_t *coords, const colo_runs_t *whole, bool merged,
                                 const int64_t *on_rank, colo_pool_t *pool, colo_stored_t **out,
                                 int64_t *rows);
/* The tensor's row of index @index, which is one of them. @hint: in and out, in [0, n): which run
 * was found last; the next one is usually it or follows it. */
int64_t colo_ragged_find(const colo_stored_t *stored, int64_t n, int64_t index, int64_t *hint);

/* This rank's plan for the tables of @r. @config: of the bridge; of the shape, features count.
 * @w: any plan's before, or zeros. @merged: the destination tensor is the whole sequence axis.
 * @hash: of the tables. @pool: for the plan and @places, which is out; or NULL. */
colo_status_t colo_ragged_plan(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank,
                               const colo_ragged_t *r, colo_builder_t *w, bool merged,
                               uint64_t hash, colo_pool_t *pool, colo_ragged_places_t *places);

/* ---- what a bridge keeps for its batches ---- */

/* What the peer-to-peer steps of a batch are made in; memory is kept for the next one. */
typedef struct colo_ragged_steps {
    colo_list_t step[2], addend[2]; /* by pass: colo_transfer_t; colo_addend_t, addends of each */
    colo_list_t held[2];            /* of sums, as they come; by addend */
} colo_ragged_steps_t;

typedef struct colo_ragged_bridge {
    colo_ragged_t axes; /* of the last tables */
    colo_builder_t builder;
    colo_pool_t spare; /* of a batch that was destroyed */
    colo_ragged_steps_t steps;
    colo_list_t carried, each, tensors; /* of the call that is under way */
    bool merged;
    int64_t unit;     /* p2p: bytes of a feature of the plan in the widest tensor so far */
    int64_t max_rows; /* of a source rank; 0: any */
    int64_t src_rows, dst_rows; /* of the last tables */
} colo_ragged_bridge_t;

/* Local. COLO_ERR_UNBUILT: the comm moves memory of the other kind. */
colo_status_t colo_ragged_create(colo_bridge_t *b, const colo_bridge_config_t *config);

/* run/memory.c */
/* All that one tensor of max_rows takes; the bridge has its plan. */
colo_status_t colo_ragged_reserve(colo_bridge_t *b);
/* Staging for the messages of a call, whose boxes are filled in; as colo_arena_grow(). */
colo_status_t colo_ragged_stage(colo_bridge_t *b, const colo_shape_state_t *s, colo_pass_t pass,
                                bool capturing);
void colo_ragged_destroy(colo_bridge_t *b);
static inline size_t colo_ragged_padded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* ---- batches ---- */

/* An error of this rank before its first call on a batch, brought to the comparison of that call.
 * Collective, if COLO_CHECK is at least 1; returns @mine. */
colo_status_t colo_ragged_share_refusal(const colo_bridge_t *b, colo_status_t mine);

struct colo_batch {
    colo_bridge_t *bridge;
    colo_pool_t pool; /* of its plan, places and boxes */
    colo_shape_state_t s;
    colo_ragged_places_t places;
    colo_table_t table[COLO_SEGMENT_TABLES];
    uint64_t hash; /* of all tables */
    bool compared;
    colo_p2p_list_t *list; /* on the peer-to-peer path of the bridge; else NULL */
    colo_move_t move;      /* of its forward */
    int64_t unit;          /* bytes of a feature of the plan that the list is for */
};

/* ragged-peer.c */
/* If its bridge has a peer-to-peer path: where peers have the rows that the batch reaches, while
 * tables are there; then its steps, for the move that ranks agreed on last. Local. */
colo_status_t colo_ragged_p2p_place(colo_batch_t *batch);
colo_status_t colo_ragged_p2p_list(colo_batch_t *batch);
void colo_ragged_p2p_drop(colo_batch_t *batch);
/* Is this call peer-to-peer? Local; as colo_bridge_p2p_find(). @in, @out: [n] or NULL. @each:
 * [2 n], out: id and offset of what is pushed, then of what is pulled. */
colo_status_t colo_ragged_p2p_find(const colo_batch_t *batch, colo_pass_t pass,
                                   const colo_tensor_t *in, const colo_tensor_t *out, int32_t n,
                                   colo_reached_t *all, colo_reached_t *each);
/* For a call that is: steps for the move that ranks agreed on and for tensors @t. @near: out.
 * Local. */
colo_status_t colo_ragged_p2p_near(colo_batch_t *batch, colo_pass_t pass, const colo_reached_t *all,
                                   colo_reached_t *each, const colo_carried_t *t, int32_t n,
                                   colo_near_t *near);

/* ragged-verify.c: COLO_CHECK=2. Local; @t: [n] tensors of backward. */
colo_status_t colo_ragged_verify_zeros(const colo_batch_t *batch, const colo_carried_t *t,
                                       int32_t n, colo_stream_t stream);
/* Collective. */
colo_status_t colo_ragged_verify_replicas(const colo_batch_t *batch, colo_pass_t pass,
                                          const colo_carried_t *t, int32_t n, colo_stream_t stream);

#endif
