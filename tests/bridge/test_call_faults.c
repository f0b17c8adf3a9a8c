/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_call_faults.c - a call to which one rank brings nonsense: each fault is a row, and each kind
 * of bridge and of batch a column. Which rank gets which status, what the error message names, that
 * nothing is written, and whether the bridge lives on.
 */
#include "harness/harness.h"

#include "harness/packed_case.h"

enum { RANKS = 8, ODD_RANK = 2, SAMPLES = 8, ROWS = 8, H = 3 };
enum kind { UNIFORM, RAGGED, PACKED, HALO, KINDS };
static const char *const kinds[KINDS] = {"uniform", "ragged", "packed", "halo"};

typedef enum fault {
    SHORT_INPUT,
    SHORT_OUTPUT,
    WRONG_NDIM,
    INPUT_DTYPE,
    OUTPUT_DTYPE,
    BOTH_DTYPES,
    OUTPUT_FEATURES,
    BOTH_FEATURES,
    INPUT_NULL,
    OUTPUT_NULL,
    INPUT_NO_DATA,
    OUTPUT_NO_DATA,
    OUTPUT_ON_A_GPU,
    OVERLAP,
    OUTPUT_STRIDE_0,
    INPUT_NEGATIVE,
    OUTPUT_OVER_ITSELF,
    INPUT_MISALIGNED,
    OUTPUT_MISALIGNED,
    WIDEST_SHAPE,
    NO_TENSORS,
    FAULTS
} fault_t;

/* What the odd rank gets, and what its message says: the names of tensors, then words, in which
 * "%d" is the first extent of that tensor as it came and as it should be. */
enum { ARG = COLO_ERR_ARG, SHAPE = COLO_ERR_SHAPE };
enum { NONE, IN, OUT, IN_AND_OUT };
#define MOST ", 9223372036854775807"
static const struct {
    int status, names;
    const char *words, *of_batches; /* NULL: the same; of a uniform bridge: it is no fault */
} verdict[FAULTS] = {
    [SHORT_INPUT] = {SHAPE, IN, " is [%d, 8, 3], expected [%d, 8, 3]", " has %d rows, expected %d"},
    [SHORT_OUTPUT] = {SHAPE, OUT, " is [%d, 8, 3], expected [%d, 8, 3]",
                      " has %d rows, expected %d"},
    [WRONG_NDIM] = {SHAPE, IN, " is [%d, 8], expected [%d, 8, 3]", " has 1 axes, expected 2"},
    [INPUT_DTYPE] = {SHAPE, IN, " is bf16, the bridge carries f32", " has 3 features of bf16, "},
    [OUTPUT_DTYPE] = {SHAPE, OUT, " is bf16, the bridge carries f32", " 3 of bf16, expected one"},
    [BOTH_DTYPES] = {SHAPE, IN, " is bf16, the bridge carries f32",
                     "rank 2 of 'world' has 3 features of bf16, rank 0 3 features of f32"},
    [OUTPUT_FEATURES] = {SHAPE, OUT, " is [%d, 8, 2], expected [%d, 8, 3]",
                         " 2 of f32, expected one"},
    [BOTH_FEATURES] = {SHAPE, IN, " is [%d, 8, 2], expected [%d, 8, 3]",
                       "rank 2 of 'world' has 2 features of f32, rank 0 3 features of f32"},
    [INPUT_NULL] = {ARG, IN, " is NULL, expected [%d, 8, 3]", " is NULL, expected [%d, features]"},
    [OUTPUT_NULL] = {ARG, OUT, " is NULL, expected [%d, 8, 3]",
                     " is NULL, expected [%d, features]"},
    [INPUT_NO_DATA] = {ARG, IN, ": data is NULL for ", NULL},
    [OUTPUT_NO_DATA] = {ARG, OUT, ": data is NULL for ", NULL},
    [OUTPUT_ON_A_GPU] = {ARG, OUT, " lives in cuda memory, the bridge was made for host", NULL},
    [OVERLAP] = {ARG, IN_AND_OUT, " overlap in memory", NULL},
    [OUTPUT_STRIDE_0] = {SHAPE, OUT, " has stride 0 along axis 1 (rows)",
                         " has strides [3, 0], by"},
    [INPUT_NEGATIVE] = {SHAPE, IN, ": axis 1 has stride -3, expected >= 0", NULL},
    [OUTPUT_OVER_ITSELF] = {SHAPE, OUT, " is [%d, 8, 3] with strides [1, 1, 1], by which elements",
                            " has strides [1, 1], by which elements share an address"},
    [INPUT_MISALIGNED] = {ARG, IN, ": data 0x", NULL},
    [OUTPUT_MISALIGNED] = {ARG, OUT, ": data 0x", NULL},
    [WIDEST_SHAPE] = {SHAPE, IN, " is [0" MOST MOST MOST MOST MOST MOST MOST "], expected [",
                      " has 8 axes, expected 2"},
    [NO_TENSORS] = {ARG, NONE, NULL, "rank 2: 0 tensors, expected at least 1"}};

/* ---- a rank's bridge of any kind, and the tensors of a call ---- */

typedef struct faulty {
    enum kind kind;
    fault_t fault;
    colo_pass_t pass;
    int32_t check;
    bool later; /* after a call that was right */
} faulty_t;

typedef struct stand {
    const faulty_t *f;
    colo_comm_t *comm;
    colo_bridge_t *bridge;
    colo_batch_t *batch; /* but of uniform bridges */
    t_case_t uniform;
    t_ragged_t ragged;
    t_packed_t packed;
    t_buffer_t in, out; /* blank, and so the same on all replicas */
} stand_t;

static const t_ragged_options_t one_node = {.tensors = 1, .ranks_per_node = RANKS};

static void stand_end(stand_t *s)
{
    t_buffer_free(&s->in);
    t_buffer_free(&s->out);
    colo_batch_destroy(&s->batch);
    colo_bridge_destroy(&s->bridge);
    t_ragged_free(&s->ragged);
}

/* Whole sequences on both context ranks, with a gradient that is their sum; or a zigzag cut with
 * @halo rows in front of each piece. */
static void pack(t_packed_t *t, int64_t halo)
{
    const int64_t n = SAMPLES / 2; /* sequences, which are twice as long */
    *t = (t_packed_t){.h = H, .dtype = COLO_F32, .world = RANKS, .ranks_per_node = RANKS};
    for (int64_t q = 0; q < n; q++)
        t->len[q] = 2 * ROWS;
    for (int k = 0; k < 2; k++) {
        ref_packed_t *side = &t->side[k];
        side->grid = t_side(k ? "tp=2,cp=2,dp=2" : "tp=2,cp=1,dp=4", k == 0);
        for (int64_t q = 0; q < n; q++)
            t->dp[k][q] = q * ref_side_dp(&side->grid) / n;
        side->p = (ref_packing_t){.nseq = n,
                                  .len = t->len,
                                  .dp = t->dp[k],
                                  .cut = !k     ? REF_CUT_BLOCK
                                         : halo ? REF_CUT_ZIGZAG
                                                : REF_CUT_WHOLE,
                                  .halo = k ? halo : 0};
    }
}

static colo_status_t stand_make(stand_t *s, const faulty_t *f, colo_comm_t *comm)
{
    const bool back = f->pass == COLO_PASS_BACKWARD;
    const int64_t rank = colo_comm_rank(comm);
    int64_t rows[2];
    s->f = f;
    s->comm = comm;
    s->uniform =
        T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", SAMPLES, ROWS, H, .ranks_per_node = RANKS);
    if (f->check < 2 && back) /* values go straight from d_y to d_x */
        s->uniform.grad = COLO_GRAD_DISJOINT;
    if (f->kind == UNIFORM) {
        rank_try(t_case_bridge(&s->bridge, &s->uniform, comm, COLO_MEM_HOST));
        rank_try(t_case_tensor(&s->uniform, back ? T_DY : T_X, rank, 0, false, &s->in));
        return t_case_tensor(&s->uniform, back ? T_DX : T_Y, rank, 0, false, &s->out);
    }
    if (f->kind == RAGGED) {
        t_ragged_uniform(&s->ragged, &s->uniform.src, &s->uniform.dst, s->uniform.shape);
        s->ragged.c.full = s->ragged.c.partial = true;
        const colo_segments_t segments = t_ragged_segments(&s->ragged);
        rank_try(t_ragged_bridge(&s->bridge, &s->ragged, &one_node, comm));
        rank_try(colo_bridge_set_segments(s->bridge, &segments, &s->batch));
    } else {
        pack(&s->packed, f->kind == HALO ? 3 : 0);
        const colo_packing_t src = t_packing(&s->packed.side[0].p),
                             dst = t_packing(&s->packed.side[1].p);
        rank_try(t_packed_bridge(&s->bridge, &s->packed, comm));
        rank_try(colo_bridge_set_packing(s->bridge, &src, &dst, &s->batch));
    }
    colo_bridge_rows(s->bridge, &rows[0], &rows[1]);
    rank_try(t_buffer_rows(&s->in, COLO_F32, rows[back], H, H, 1));
    return t_buffer_rows(&s->out, COLO_F32, rows[!back], H, H, 1);
}

static colo_status_t call(stand_t *s, const colo_tensor_t *in, const colo_tensor_t *out, int32_t n)
{
    const bool back = s->f->pass == COLO_PASS_BACKWARD;
    return s->f->kind == UNIFORM
               ? (back ? colo_bridge_backward : colo_bridge_forward)(s->bridge, in, out, NULL)
               : (back ? colo_batch_backward : colo_batch_forward)(s->batch, in, out, n, NULL);
}

/* A pass that is right, compared with the oracle. */
static colo_status_t right_pass(stand_t *s)
{
    switch (s->f->kind) {
    case UNIFORM:
        return t_case_step(s->bridge, colo_comm_rank(s->comm), &s->uniform, 1);
    case RAGGED:
        return t_ragged_pass(s->batch, &s->ragged, &one_node, s->comm, s->f->pass);
    default:
        return t_packed_pass(s->batch, &s->packed, s->comm, s->f->pass);
    }
}

/* The call of the odd rank; FAULTS: as it should be. */
static colo_status_t wrong_call(stand_t *s, fault_t fault, colo_tensor_t *in, colo_tensor_t *out)
{
    const int32_t last = in->ndim - 1;
    in->shape[0] -= fault == SHORT_INPUT;
    out->shape[0] -= fault == SHORT_OUTPUT;
    in->ndim = fault == WRONG_NDIM ? last : fault == WIDEST_SHAPE ? COLO_NDIM_MAX : in->ndim;
    in->dtype = fault == INPUT_DTYPE || fault == BOTH_DTYPES ? COLO_BF16 : in->dtype;
    out->dtype = fault == OUTPUT_DTYPE || fault == BOTH_DTYPES ? COLO_BF16 : out->dtype;
    in->shape[last] -= fault == BOTH_FEATURES;
    out->shape[last] -= fault == OUTPUT_FEATURES || fault == BOTH_FEATURES;
    in->data = fault == INPUT_NO_DATA ? NULL : (char *)in->data + 2 * (fault == INPUT_MISALIGNED);
    out->data = fault == OUTPUT_NO_DATA ? NULL
                : fault == OVERLAP      ? in->data
                                        : (char *)out->data + (fault == OUTPUT_MISALIGNED);
    out->mem = fault == OUTPUT_ON_A_GPU ? COLO_MEM_CUDA : out->mem;
    out->device = fault == OUTPUT_ON_A_GPU ? 0 : out->device;
    out->stride[1] = fault == OUTPUT_STRIDE_0 ? 0 : out->stride[1];
    in->stride[1] = fault == INPUT_NEGATIVE ? -3 : in->stride[1];
    for (int32_t i = 0; i < out->ndim && fault == OUTPUT_OVER_ITSELF; i++)
        out->stride[i] = 1;
    for (int32_t i = 0; i < COLO_NDIM_MAX && fault == WIDEST_SHAPE; i++) {
        in->shape[i] = i ? INT64_MAX : 0; /* more digits than the error message has room for */
        in->stride[i] = 0;
    }
    return call(s, fault == INPUT_NULL ? NULL : in, fault == OUTPUT_NULL ? NULL : out,
                fault != NO_TENSORS);
}

/* ---- the contract ---- */

/* Do ranks agree on the call before anything moves? */
static bool is_agreed(const faulty_t *f)
{
    return f->check == 2 || (f->check == 1 && f->kind != UNIFORM && !f->later);
}

/* Only comparing finds it: all ranks get MISMATCH. */
static bool is_mismatch(const faulty_t *f)
{
    return f->kind != UNIFORM && (f->fault == BOTH_DTYPES || f->fault == BOTH_FEATURES);
}

/* What the odd rank is told of its tensors @in and @out. */
static const char *words_of(const stand_t *s, const colo_tensor_t *in, const colo_tensor_t *out)
{
    const fault_t fault = s->f->fault;
    const bool back = s->f->pass == COLO_PASS_BACKWARD, batch = s->f->kind != UNIFORM;
    const int names = is_mismatch(s->f) ? NONE : verdict[fault].names;
    const bool of_batches = batch && verdict[fault].of_batches;
    const char *index = batch ? "[0]" : "";
    const char *words = t_text(of_batches ? verdict[fault].of_batches : verdict[fault].words,
                               (int)(names == OUT ? out : in)->shape[0],
                               (int)(names == OUT ? &s->out : &s->in)->t.shape[0]);
    return t_text("%s%s%s%s%s%s", names & IN ? back ? "d_y" : "x" : "", names & IN ? index : "",
                  names == IN_AND_OUT ? " and " : "", names & OUT ? back ? "d_x" : "y" : "",
                  names & OUT ? index : "", words);
}

static colo_status_t faulty_rank(colo_comm_t *world, void *arg)
{
    const faulty_t *f = arg;
    const bool odd = colo_comm_rank(world) == ODD_RANK, agreed = is_agreed(f);
    T_ENDS(stand_end) stand_t s = {0};
    rank_try(colo_comm_set_check(world, f->check));
    rank_try(stand_make(&s, f, world));
    if (f->later)
        rank_try(call(&s, &s.in.t, &s.out.t, 1));
    memset(s.out.raw, 0xA5, s.out.bytes);
    rank_try(colo_comm_barrier(world, NULL)); /* no rank is still in another call at the fault */
    colo_tensor_t in = s.in.t, out = s.out.t;
    const colo_status_t st = wrong_call(&s, odd ? f->fault : FAULTS, &in, &out);
    rank_check(untouched(&s.in) && (untouched(&s.out) || st == COLO_OK));
    if (odd || is_mismatch(f))
        rank_fails(st, is_mismatch(f) ? COLO_ERR_MISMATCH : (colo_status_t)verdict[f->fault].status,
                   words_of(&s, &in, &out));
    else if (agreed || colo_comm_rank(world) == 0) /* the peer of rank 2: waited */
        rank_fails(st, COLO_ERR_PEER, agreed ? "rank 2 failed: " : "");
    else /* OK: it did not need the odd rank */
        rank_check(st == COLO_ERR_PEER || st == COLO_OK);
    rank_check(!odd || says("rank 2"));
    if (!agreed)
        return COLO_OK;
    rank_check(colo_comm_check(world) == COLO_OK);
    return right_pass(&s);
}

static void each_fault(enum kind kind, int32_t check, bool later)
{
    for (int fault = 0; fault < FAULTS; fault++)
        for (int pass = 0; pass < 2; pass++) {
            faulty_t f = {kind, (fault_t)fault, (colo_pass_t)pass, check, later};
            if ((kind == UNIFORM && !verdict[fault].words) || (is_mismatch(&f) && !is_agreed(&f)) ||
                T_LEFT_OUT({fault, FAULTS}, {pass, 2}))
                continue;
            if (t_run_ranks(RANKS, faulty_rank, &f, sizeof f) < 0)
                fail_msg("%s, fault %d %s at COLO_CHECK=%d: %s", kinds[kind], fault,
                         pass ? "backward" : "forward", (int)check, colo_last_error());
        }
}

T_CASE(at_check_2_a_bad_tensor_is_an_error_on_every_rank_and_nothing_moves)
{
    for (int kind = 0; kind < KINDS; kind++)
        each_fault((enum kind)kind, 2, false);
}

T_CASE(a_bad_first_call_of_a_batch_is_an_error_on_all_ranks_and_writes_nothing)
{
    for (int kind = RAGGED; kind < KINDS; kind++)
        each_fault((enum kind)kind, 1, false);
}

T_CASE(at_check_0_and_1_a_bad_tensor_fails_the_comm_and_peers_do_not_hang)
{
    for (int kind = 0; kind < KINDS; kind++)
        each_fault((enum kind)kind, 0, false);
    each_fault(UNIFORM, 1, false);
}

T_CASE(a_bad_later_call_of_a_batch_wakes_the_ranks_that_wait)
{
    for (int kind = RAGGED; kind < KINDS; kind++)
        each_fault((enum kind)kind, 1, true);
}

T_MAIN("bridge/call_faults")
