/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_case.h - one bridge, described as data, run on threads and compared with the oracle.
 *
 * A case names both sides, the shape and the options. t_case_on() does what every rank does:
 * create, forward, backward, compare every byte (those between the elements included), destroy.
 * Expectations come from tests/ref/ only.
 */
#ifndef TESTS_HARNESS_BRIDGE_CASE_H
#define TESTS_HARNESS_BRIDGE_CASE_H

#include <colobridge.h>

#include "harness/harness.h"
#include "ref/ref_bridge.h"

/* How the elements of a test tensor lie in memory. */
typedef enum t_stride {
    T_TIGHT = 0,    /* contiguous */
    T_PADDED = 1,   /* gaps after each row and each plane */
    T_SPREAD = 2,   /* gaps between elements, too */
    T_REVERSED = 3, /* the first axis is the innermost in memory */
    T_STRIDE_COUNT = 4
} t_stride_t;

typedef struct t_case {
    ref_side_t src, dst;
    ref_shape_t shape;
    colo_output_t output;
    colo_grad_t grad;
    colo_algo_t algo;
    colo_dtype_t dtype;
    const char *axes; /* NULL: "bsh" */
    t_stride_t stride;
    bool no_grad;
    int64_t ranks_per_node;
    bool two_levels;     /* of plans; bridges choose by themselves */
    const int32_t *node; /* [world] of plans, in place of ranks_per_node; or NULL */
    int32_t world;       /* 0: up to the end of the later grid */
    int32_t check;       /* COLO_CHECK of the run; 0 leaves it */
    int32_t steps;       /* forwards and backwards; 0: 1 */
} t_case_t;

/* A tensor with its memory; every byte that is no element is 0xA5 and must stay so. */
typedef struct t_buffer {
    unsigned char *raw;
    size_t bytes;
    colo_tensor_t t;
    void *there; /* the same bytes where a call finds them, while it may */
} t_buffer_t;

/* Where the tensors of calls are, if not in host memory. */
typedef struct t_ragged_where {
    void *arg;
    int32_t device;
    colo_stream_t stream;
    /* Memory there with the bytes of @from; back again into @to, when the call has ended. */
    colo_status_t (*put)(void *arg, const void *from, size_t bytes, void **data);
    colo_status_t (*get)(void *arg, void *to, const void *data, size_t bytes);
    void (*drop)(void *arg, void *data);
    /* No call of any rank runs any more: what waits for a device may follow. */
    colo_status_t (*quiet)(void *arg);
} t_ragged_where_t;
/* Before and after a call; NULL @w: host memory, and nothing to do. The tensor is there from put to
 * get, whose memory starts with the tensor's. */
colo_status_t t_buffer_put(const t_ragged_where_t *w, t_buffer_t *b);
colo_status_t t_buffer_get(const t_ragged_where_t *w, t_buffer_t *b);
colo_status_t t_buffers_quiet(const t_ragged_where_t *w);
/* A blank tensor [rows, n] with @row and @step elements from one to the next, and a byte behind. */
colo_status_t t_buffer_rows(t_buffer_t *b, colo_dtype_t dtype, int64_t rows, int64_t n, int64_t row,
                            int64_t step);

/* dims as "tp=2,cp=2,dp=2" with the usual layout: samples over dp, rows ZIGZAG over cp (context),
 * the last pp stage (source) or the first (destination). Aborts the program on a bad spec. */
ref_side_t t_side(const char *dims, bool is_src);
/* the same with the three usual dims in one of 6 orders (0: tp, cp, dp) */
#define T_ORDERS 6
ref_side_t t_side_ordered(int order, int64_t tp, int64_t cp, int64_t dp, bool is_src);
/* adds a split; names must be literals or outlive the side */
void t_side_split(ref_side_t *side, int axis, const char *dim, ref_cut_t cut, bool context);
/* The side in words; returns the length of what it wrote, less than @cap. */
size_t t_side_text(const ref_side_t *side, char *text, size_t cap);
/* the library's layout of a side, through its public calls */
colo_status_t t_layout(colo_layout_t *layout, const ref_side_t *side);
colo_grid_t t_grid(const ref_side_t *side);

/* A pair of (tp, cp, dp) layouts of @n ranks, before which came @nth others. */
typedef struct t_pair {
    int64_t n, nth, src[3], dst[3];
} t_pair_t;
/* For each pair of lo..hi ranks */
#define T_EACH_PAIR(p, lo, hi) \
    for (t_pair_t p = {(lo)-1, -1, {(lo)}, {(lo)}}; t_next_pair(&(p), hi);)
bool t_next_pair(t_pair_t *p, int64_t hi);
int64_t t_lcm(int64_t a, int64_t b);

/* A case of [b, n, h] between two grids; and one for whole collectives. */
t_case_t t_between(const char *src, const char *dst, int64_t b, int64_t n, int64_t h);
/* One between a pair of layouts with dims in such orders: a sample for each of the larger dp, two
 * rows for each context rank, one feature. */
t_case_t t_pair_case(const t_pair_t *p, int64_t src_order, int64_t dst_order);
/* A case between two grids with more of its members: .check = 2 */
#define T_BETWEEN(from, to, b, n, h, ...)  \
    ((t_case_t){.src = t_side(from, true), \
                .dst = t_side(to, false),  \
                .shape = {(b), (n), (h)},  \
                __VA_ARGS__})
t_case_t t_collective(const char *src, const char *dst, int64_t b, int64_t n, int64_t h);
/* The same boxes in the same order, and as many bytes. */
bool t_same_message(const colo_plan_message_t *one, const colo_plan_message_t *other);
/* Output and gradient @kind of T_KINDS. The last, a sharded output with partial gradients, carries
 * what the first does. */
enum { T_KINDS = 4 };
void t_case_kind(t_case_t *c, int kind);
int32_t t_case_world(const t_case_t *c);
/* the library's config of a case; src and dst are where it keeps the layouts */
colo_status_t t_case_config(const t_case_t *c, colo_layout_t *src, colo_layout_t *dst,
                            colo_bridge_config_t *config);
colo_status_t t_case_bridge(colo_bridge_t **bridge, const t_case_t *c, colo_comm_t *comm,
                            colo_mem_t mem);
/* On each of 4 ranks: a bridge of the case @arg on a comm of ranks 0 and 1, of which 0 needs 2 and
 * 1 needs 3, is refused as missing, and the comm lives. */
colo_status_t t_case_lacking_rank(colo_comm_t *world, void *arg);

colo_status_t t_buffer_make(t_buffer_t *b, const char *axes, colo_dtype_t dtype, t_stride_t stride,
                            int64_t nb, int64_t ns, int64_t nh);
void t_buffer_free(t_buffer_t *b);
unsigned char *t_buffer_at(const t_buffer_t *b, const char *axes, int64_t ns, int64_t ib,
                           int64_t is, int64_t ih);

static inline bool untouched(const t_buffer_t *b)
{
    for (size_t i = 0; i < b->bytes; i++)
        if (b->raw[i] != 0xA5)
            return false;
    return true;
}

/* What the four tensors of a rank hold. */
typedef enum t_role { T_X, T_Y, T_DY, T_DX } t_role_t;
/* Makes the tensor of @role on @rank; filled with what the oracle says it holds when @fill. @salt
 * makes different steps different. */
colo_status_t t_case_tensor(const t_case_t *c, t_role_t role, int64_t rank, int64_t salt, bool fill,
                            t_buffer_t *b);
/* == between a buffer that the library wrote and what the oracle says; names rank and element. */
colo_status_t t_case_compare(const t_case_t *c, t_role_t role, int64_t rank, int64_t salt,
                             const t_buffer_t *got);

/* A rank's bridge of a case, with the tensors of one step: x and d_y as the oracle says, y and d_x
 * blank. It ends with its scope. */
typedef struct t_stand {
    const t_case_t *c; /* what fills and compares tensors; may be changed */
    colo_comm_t *comm;
    colo_bridge_t *bridge;
    int64_t rank, salt; /* of the tensors */
    t_buffer_t t[4];    /* by role */
} t_stand_t;
#define T_STAND(name) T_ENDS(t_stand_end) t_stand_t name = {0}
void t_stand_end(t_stand_t *s);
/* COLO_CHECK as the case has it. The tensors are those of salt 0. */
colo_status_t t_stand_make(t_stand_t *s, const t_case_t *c, colo_comm_t *comm);
/* the tensors of another step, or of the case that @s has now */
colo_status_t t_stand_fill(t_stand_t *s, int64_t salt);
colo_status_t t_stand_call(t_stand_t *s, colo_pass_t pass);
static inline t_buffer_t *t_stand_in(t_stand_t *s, colo_pass_t pass)
{
    return &s->t[pass == COLO_PASS_FORWARD ? T_X : T_DY];
}
static inline t_buffer_t *t_stand_out(t_stand_t *s, colo_pass_t pass)
{
    return &s->t[pass == COLO_PASS_FORWARD ? T_Y : T_DX];
}
/* What a pass wrote, or what it read, is what the oracle says. */
colo_status_t t_stand_compare(t_stand_t *s, t_role_t role);
/* a whole step on the bridge, with tensors of its own */
colo_status_t t_stand_step(t_stand_t *s, int64_t salt);

/* One rank's whole job on a comm; a failure is a status with an error message. */
colo_status_t t_case_on(colo_comm_t *world, const t_case_t *c);
/* forward and backward on a bridge that exists */
colo_status_t t_case_step(colo_bridge_t *bridge, int64_t rank, const t_case_t *c, int64_t salt);
colo_status_t t_case_run(const t_case_t *c);
/* The same in t_run_later(); an error fails the running test. Not for a case with a check of its
 * own. */
void t_case_later(const t_case_t *c);
/* The case in words, for failure messages; static storage of the calling thread. */
const char *t_case_text(const t_case_t *c);

#endif
