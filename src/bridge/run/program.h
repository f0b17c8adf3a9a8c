/* SPDX-License-Identifier: Apache-2.0 */
/*
 * program.h (private) - what a call does, as steps over the lists of a plan.
 *
 * A MOVE brings regions from one buffer to another: those of an exchange between ranks, and what
 * stays on this rank. An ADD sums up regions that have arrived. A REPEAT copies rows that the
 * output has in several places, a CLEAR sets its padding to 0. Buffers are the caller's input and
 * output, and the bridge's partial sums, one per addend that arrives, each with the shape of this
 * rank's source part. A program has no region of its own: making one costs a batch
 * nothing.
 */
#ifndef COLO_BRIDGE_RUN_PROGRAM_H
#define COLO_BRIDGE_RUN_PROGRAM_H

#include "bridge/plan/plan.h"

#include <colobridge/comm.h>

/* A rank's tensor as (samples, rows, features) strides in elements. */
typedef struct colo_view {
    char *data;
    int64_t stride[3];
} colo_view_t;

/* One tensor of a call. Each unit of a plan's features is @per of its own. */
typedef struct colo_carried {
    colo_view_t in, out;
    int64_t per;
    colo_dtype_t dtype;
    size_t in_partial; /* bytes: where it begins in each partial sum */
} colo_carried_t;

enum { COLO_IN, COLO_OUT, COLO_PARTIALS };

/* A buffer, of partial sums the one of @key. */
typedef struct colo_end {
    int buffer;
    int64_t key; /* colo_sum_key() */
} colo_end_t;

typedef struct colo_move {
    int exchange;               /* of the plan, of the pass */
    const colo_routes_t *local; /* NULL: only messages */
    int from, to;               /* buffers */
} colo_move_t;

typedef struct colo_add {
    const colo_routes_t *list[3]; /* NULL: none */
    int64_t addend;               /* each element is in one region of this addend; -1: of any */
    bool by_terms;                /* else by addend, ascending */
    bool own_in; /* of list[0], this rank's addend is in the input, not in a partial sum; if the
                    plan names rows: the first addend */
    int to;
} colo_add_t;

typedef struct colo_step {
    enum { COLO_MOVE, COLO_ADD, COLO_REPEAT, COLO_CLEAR } kind;
    union {
        colo_move_t move;
        colo_add_t add;
    };
} colo_step_t;

typedef struct colo_steps {
    colo_step_t step[7];
    int32_t n;
} colo_steps_t;

/* Partial sums by what they hold: an addend that arrives; if nodes add up, too: the sum of a node,
 * by its lowest addend, and of a group that is added up here; an addend that this rank collects for
 * other nodes, and the sum of these. The last two lie as its destination part does. */
enum { COLO_SUM_ADDEND, COLO_SUM_NODE, COLO_SUM_COLLECTED, COLO_SUM_LEAVES };
static inline int64_t colo_sum_key(const colo_plan_t *plan, int kind, int64_t addend)
{
    return kind * plan->addends + addend;
}

typedef struct colo_program {
    colo_plan_t *plan; /* owned */
    bool bytes;        /* boxes count bytes, because tensors of a call differ in dtype */
    colo_steps_t pass[2];
    int32_t npartials;
    int32_t *partial_of; /* by colo_sum_key(); -1: it has none. NULL: nothing is added up. Of the
                            plan's pool */
    struct colo_source_part { /* all of this rank's source part as one region; NULL: not needed */
        colo_routes_t routes;
        colo_region_t region;
        colo_offset_t offset;
    } * source_part; /* of the plan's pool */
} colo_program_t;

/* What one call brings. */
typedef struct colo_call_frame {
    const colo_program_t *program;
    colo_pass_t pass;
    const colo_carried_t *tensor; /* [n] */
    int32_t n;
    void *partials;
    size_t partial_bytes; /* of all tensors, of one partial sum */
} colo_call_frame_t;

/* Of program->plan. @launched: a batch's on a GPU, where each sum costs a launch. Local; on an
 * error, colo_program_deinit() frees what there is. */
colo_status_t colo_program_create(colo_program_t *program, bool launched);
void colo_program_deinit(colo_program_t *program);

/* Does backward add up addends that ranks bring? */
static inline bool colo_plan_adds(const colo_plan_t *plan, colo_pass_t pass)
{
    return pass == COLO_PASS_BACKWARD && (plan->addends > 1 || plan->names_rows);
}
/* Samples, rows and features of a partial sum: those of the source part; if the plan names rows,
 * only those of several addends. If nodes add up, both parts fit, and have the same strides in it:
 * to peers all partial sums are one tensor. */
void colo_partial_extent(const colo_plan_t *plan, int64_t extent[3]);
/* Bytes of a partial sum, of a tensor that has @per features for each of the plan's. */
size_t colo_partial_bytes(const colo_plan_t *plan, int64_t per, colo_dtype_t dtype);
/* The dtype of sums of a node: as wide as fp32 at least. */
colo_dtype_t colo_sum_wide(colo_dtype_t dtype);
colo_dtype_t colo_sum_dtype(const colo_plan_t *plan, const colo_carried_t *tensor, int64_t key);
/* The dtype in which messages of an exchange count. */
colo_dtype_t colo_move_dtype(const colo_program_t *program, colo_pass_t pass, int exchange);
/* Has a region of @routes, that stays or that the main exchange of @pass brings, several addends in
 * places of their own? Then it is added up from partial sums; others go to the output. */
static inline bool colo_plan_sums_region(const colo_plan_t *plan, colo_pass_t pass,
                                         const colo_routes_t *routes, int64_t i)
{
    return plan->names_rows && colo_plan_adds(plan, pass) && routes->offset[i].sum_row >= 0;
}
/* The partial sum of a region at one end of an exchange. */
int64_t colo_move_sum(const colo_plan_t *plan, int exchange, bool sends,
                      const colo_region_t *region);

/* A rank's part of a tensor as (samples, rows, features). */
colo_box_t colo_view_box(colo_view_t view, const colo_owned_t *own);
/* Region @i of @routes at @end, of tensor @tensor. @bytes: the box counts bytes. */
colo_box_t colo_call_box(const colo_call_frame_t *frame, const colo_carried_t *tensor,
                         colo_end_t end, const colo_routes_t *routes, int64_t i, bool bytes);

#endif
