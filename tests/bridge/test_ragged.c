/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged.c - the worked example of a ragged batch, row by row; batches that are outstanding
 * together; memory; what is refused, on which ranks, and that nothing is written then.
 */
#include "harness/harness.h"

#define H 2
#define GAP (-77.0f)

/* ---- the example: P = 2, D = 1, C = 2, zigzag ---- */

typedef struct tables {
    int64_t rows[3], src_dp[3], seq[3], pos[3], len[2], dp[2];
} tables_t;

static const tables_t worked = {
    .rows = {3, 0, 5}, .src_dp = {0, 1, 1}, .seq = {0, 0, 1}, .pos = {2, 9, 1}, .len = {12, 8}};

static colo_segments_t segments_of(const tables_t *t)
{
    return (colo_segments_t){.struct_size = sizeof(colo_segments_t),
                             .count = 3,
                             .rows = t->rows,
                             .src_dp = t->src_dp,
                             .seq = t->seq,
                             .pos = t->pos,
                             .nseqs = 2,
                             .seq_len = t->len,
                             .seq_dp = t->dp};
}

typedef struct options {
    colo_output_t output;
    colo_grad_t grad;
    colo_placement_t placement;
    int64_t max_rows;
    bool no_grad;
} options_t;

static colo_status_t make(colo_bridge_t **b, const options_t *o, colo_comm_t *comm)
{
    colo_grid_t sg, dg;
    colo_layout_t src, dst;
    rank_try(colo_grid_parse(&sg, "dp=2", 0));
    rank_try(colo_grid_parse(&dg, "cp=2,dp=1", 0));
    rank_try(colo_layout_init_src(&src, &sg));
    rank_try(colo_layout_init_dst(&dst, &dg));
    const colo_bridge_config_t c = {COLO_BRIDGE_CONFIG_INIT,
                                    .src = &src,
                                    .dst = &dst,
                                    .shape = {.features = H},
                                    .dtype = COLO_F32,
                                    .output = o->output,
                                    .grad = o->grad,
                                    .no_grad = o->no_grad,
                                    .ragged = true,
                                    .placement = o->placement,
                                    .max_rows = o->max_rows};
    return colo_bridge_create(b, &c, comm);
}

static colo_tensor_t tensor(float *data, int64_t rows)
{
    return colo_tensor_host(data, COLO_F32, 2, (int64_t[]){rows, H});
}

/* Row r of segment e, feature k. */
static float code(int64_t e, int64_t r, int64_t k)
{
    return (float)(100 * e + 10 * r + k);
}

/* x of a rank: e0 on rank 0, e1 and e2 on rank 1. */
static int64_t fill_x(float *x, int32_t rank)
{
    const int64_t e = rank ? 2 : 0, n = worked.rows[e];
    for (int64_t r = 0; r < n; r++)
        for (int64_t k = 0; k < H; k++)
            x[r * H + k] = code(e, r, k);
    return n;
}

/* What arrives on a rank: row r of segment e at index @at. */
typedef struct arrival {
    int64_t e, r, at;
} arrival_t;

static bool has_only(const float *y, int64_t rows, const arrival_t *a, int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        const arrival_t *here = NULL;
        for (int64_t k = 0; k < n; k++)
            here = a[k].at == i ? &a[k] : here;
        for (int64_t k = 0; k < H; k++)
            if (y[i * H + k] != (here ? code(here->e, here->r, k) : GAP))
                return false;
    }
    return true;
}

static void blank(float *y, int64_t rows)
{
    for (int64_t i = 0; i < rows * H; i++)
        y[i] = GAP;
}

typedef struct example {
    options_t o;
    int64_t rows[2], n[2]; /* of y; that arrive */
    arrival_t a[2][8];
} example_t;

static colo_status_t run_example(colo_comm_t *comm, void *arg)
{
    const example_t *ex = arg;
    const int32_t rank = colo_comm_rank(comm);
    float x[5 * H], y[20 * H], dx[5 * H];
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const colo_segments_t s = segments_of(&worked);
    int64_t src, dst;
    rank_try(make(&b, &ex->o, comm));
    colo_bridge_rows(b, &src, &dst);
    rank_check(src == 0 && dst == 0);
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    colo_bridge_rows(b, &src, &dst);
    rank_check(src == fill_x(x, rank) && dst == ex->rows[rank]);
    blank(y, 20);
    const colo_tensor_t tx = tensor(x, src), ty = tensor(y, dst), tdx = tensor(dx, src);
    rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    rank_check(has_only(y, 20, ex->a[rank], ex->n[rank]));
    /* y as its own gradient: each row goes home; PARTIAL adds up two equal ones */
    blank(dx, 5);
    rank_try(colo_batch_backward(batch, &ty, &tdx, 1, NULL));
    const float times = ex->o.output == COLO_FULL_SEQ && ex->o.grad == COLO_PARTIAL ? 2 : 1;
    for (int64_t i = 0; i < src * H; i++)
        rank_check(dx[i] == times * x[i]);
    colo_batch_destroy(&batch);
    rank_check(!batch);
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void sharded_packed_rows_arrive_as_the_example_says(void **state)
{
    example_t ex = {.o = {.output = COLO_SHARDED},
                    .rows = {2, 6},
                    .n = {2, 6},
                    .a = {{{0, 0, 0}, {2, 0, 1}},
                          {{0, 1, 0}, {0, 2, 1}, {2, 1, 2}, {2, 2, 3}, {2, 3, 4}, {2, 4, 5}}}};
    (void)state;
    assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
}

static void sharded_merged_rows_arrive_as_the_example_says(void **state)
{
    example_t ex = {.o = {.output = COLO_SHARDED, .placement = COLO_MERGED},
                    .rows = {10, 10},
                    .n = {2, 6},
                    .a = {{{0, 0, 2}, {2, 0, 7}},
                          {{0, 1, 0}, {0, 2, 1}, {2, 1, 6}, {2, 2, 7}, {2, 3, 8}, {2, 4, 9}}}};
    (void)state;
    assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
}

static void full_rows_arrive_on_both_ranks(void **state)
{
    static const arrival_t merged[8] = {{0, 0, 2},  {0, 1, 3},  {0, 2, 4},  {2, 0, 13},
                                        {2, 1, 14}, {2, 2, 15}, {2, 3, 16}, {2, 4, 17}};
    (void)state;
    for (int i = 0; i < 4; i++) {
        example_t ex = {.o = {.output = COLO_FULL_SEQ,
                              .grad = i & 1 ? COLO_DISJOINT : COLO_PARTIAL,
                              .placement = i & 2 ? COLO_MERGED : COLO_PACKED},
                        .n = {8, 8}};
        for (int rank = 0; rank < 2; rank++) {
            ex.rows[rank] = i & 2 ? 20 : 8;
            memcpy(ex.a[rank], merged, sizeof merged);
            for (int k = 0; k < 8; k++)
                ex.a[rank][k].at = i & 2 ? merged[k].at : k;
        }
        assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
    }
}

/* ---- batches and memory ---- */

/* Three steps, each with e0 and e2 elsewhere; backward in another order than forward. */
static colo_status_t run_outstanding(colo_comm_t *comm, void *arg)
{
    enum { STEPS = 3 };
    static const int order[STEPS] = {1, 2, 0};
    const int32_t rank = colo_comm_rank(comm);
    float x[5 * H], y[STEPS][20 * H], dx[5 * H];
    colo_bridge_t *b = NULL;
    colo_batch_t *batch[STEPS] = {NULL};
    const options_t o = {.output = COLO_SHARDED, .placement = COLO_MERGED};
    int64_t src, dst;
    rank_try(make(&b, &o, comm));
    for (int i = 0; i < STEPS; i++) {
        tables_t *t = malloc(sizeof *t);
        rank_check(t);
        *t = worked;
        t->pos[0] = 2 * i;
        t->pos[2] = i;
        const colo_segments_t s = segments_of(t);
        const colo_status_t st = colo_bridge_set_segments(b, &s, &batch[i]);
        memset(t, 0x7f, sizeof *t); /* the tables are not needed any more */
        free(t);
        rank_try(st);
        colo_bridge_rows(b, &src, &dst);
        fill_x(x, rank);
        blank(y[i], 20);
        const colo_tensor_t tx = tensor(x, src), ty = tensor(y[i], dst);
        rank_try(colo_batch_forward(batch[i], &tx, &ty, 1, NULL));
    }
    for (int i = 0; i < STEPS; i++) {
        const colo_tensor_t ty = tensor(y[order[i]], dst), tdx = tensor(dx, src);
        blank(dx, 5);
        rank_try(colo_batch_backward(batch[order[i]], &ty, &tdx, 1, NULL));
        for (int64_t k = 0; k < src * H; k++)
            rank_check(dx[k] == x[k]);
        colo_batch_destroy(&batch[order[i]]);
    }
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void batches_with_other_tables_may_be_outstanding_together(void **state)
{
    (void)state;
    assert_ok(t_run_ranks(2, run_outstanding, NULL, 0));
}

static colo_status_t run_nothing(colo_comm_t *comm, void *arg)
{
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const options_t o = {.output = COLO_SHARDED, .placement = *(colo_placement_t *)arg};
    tables_t t = worked;
    memset(t.rows, 0, sizeof t.rows);
    colo_segments_t s = segments_of(&t);
    colo_ledger_t before, after;
    int64_t src;
    rank_try(make(&b, &o, comm));
    for (int i = 0; i < 2; i++) { /* segments without rows; no segments */
        rank_try(colo_bridge_set_segments(b, &s, &batch));
        colo_bridge_rows(b, &src, NULL);
        rank_check(src == 0);
        colo_comm_ledger(comm, &before);
        rank_try(colo_batch_forward(batch, NULL, NULL, 1, NULL));
        rank_try(colo_batch_backward(batch, NULL, NULL, 1, NULL));
        colo_comm_ledger(comm, &after);
        for (int kind = 0; kind < COLO_OP_COUNT; kind++)
            rank_check(kind == COLO_OP_EXCHANGE ||
                       after.ops[kind][COLO_OWNER_BRIDGE] == before.ops[kind][COLO_OWNER_BRIDGE]);
        rank_check(after.recv_bytes[COLO_OP_EXCHANGE][COLO_OWNER_BRIDGE] ==
                   before.recv_bytes[COLO_OP_EXCHANGE][COLO_OWNER_BRIDGE]);
        colo_batch_destroy(&batch);
        s = (colo_segments_t)COLO_SEGMENTS_INIT;
    }
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void no_rows_anywhere_need_no_tensors_and_no_collective(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        colo_placement_t p = (colo_placement_t)i;
        assert_ok(t_run_ranks(2, run_nothing, &p, sizeof p));
    }
}

static colo_status_t run_memory(colo_comm_t *comm, void *arg)
{
    const int64_t max_rows = *(int64_t *)arg;
    const int32_t rank = colo_comm_rank(comm);
    float x[5 * H], y[8 * H], dx[5 * H];
    colo_bridge_t *b = NULL;
    const options_t o = {.output = COLO_FULL_SEQ, .max_rows = max_rows};
    size_t first, last = 0;
    rank_try(make(&b, &o, comm));
    first = colo_bridge_scratch_size(b);
    rank_check((first > 0) == (max_rows > 0));
    for (int64_t n = 1; n <= 5; n++) {
        tables_t t = worked;
        colo_batch_t *batch = NULL;
        t.rows[2] = n;
        const colo_segments_t s = segments_of(&t);
        rank_try(colo_bridge_set_segments(b, &s, &batch));
        const colo_tensor_t tx = tensor(x, rank ? n : 3), ty = tensor(y, 3 + n),
                            tdx = tensor(dx, rank ? n : 3);
        fill_x(x, rank);
        rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
        rank_try(colo_batch_backward(batch, &ty, &tdx, 1, NULL));
        rank_check(colo_bridge_scratch_size(b) >= last);
        last = colo_bridge_scratch_size(b);
        colo_batch_destroy(&batch);
    }
    rank_check(max_rows ? last == first : last > 0);
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void scratch_grows_to_the_largest_batch_or_is_there_from_create(void **state)
{
    (void)state;
    for (int64_t most = 0; most <= 5; most += 5)
        assert_ok(t_run_ranks(2, run_memory, &most, sizeof most));
}

/* ---- refusals ---- */

typedef enum fault {
    DIFFERENT_POS,
    DIFFERENT_LENGTH,
    DIFFERENT_COUNT,
    SHORT_Y,
    SHORT_X,
    DTYPE_Y,
    FEATURES_Y,
    CUDA_Y,
    X_NULL,
    Y_NULL,
    OVERLAP,
    Y_STRIDE_0,
    NO_TENSORS,
    FAULTS
} fault_t;

static const struct {
    colo_status_t status; /* on the odd rank */
    const char *text;     /* on both */
} verdict[FAULTS] = {
    [DIFFERENT_POS] = {COLO_ERR_MISMATCH, "pos: rank 1 of"},
    [DIFFERENT_LENGTH] = {COLO_ERR_MISMATCH, "seq_len: rank 1 of"},
    [DIFFERENT_COUNT] = {COLO_ERR_MISMATCH, "rows: rank 1 of"},
    [SHORT_Y] = {COLO_ERR_SHAPE, "rank 1: y[0] has 2 axes and 9 rows of 2 features, expected 2 and "
                                 "10 rows"},
    [SHORT_X] = {COLO_ERR_SHAPE, "rank 1: x[0] has 2 axes and 4 rows of 2 features, expected 2 and "
                                 "5 rows"},
    [DTYPE_Y] = {COLO_ERR_SHAPE, "rank 1: x[0] has 2 features of f32, y[0] 2 of i32"},
    [FEATURES_Y] = {COLO_ERR_SHAPE, "rank 1: x[0] has 2 features of f32, y[0] 1 of f32"},
    [CUDA_Y] = {COLO_ERR_ARG, "rank 1: y[0] lives in cuda memory"},
    [X_NULL] = {COLO_ERR_ARG, "rank 1: x[0] is NULL, expected [5, features]"},
    [Y_NULL] = {COLO_ERR_ARG, "rank 1: y[0] is NULL, expected [10, features]"},
    [OVERLAP] = {COLO_ERR_ARG, "rank 1: x[0] and y[0] overlap in memory"},
    [Y_STRIDE_0] = {COLO_ERR_SHAPE, "rank 1: y[0] has strides [0, 1]"},
    [NO_TENSORS] = {COLO_ERR_ARG, "rank 1: 0 tensors, expected at least 1"}};

typedef struct refusal {
    fault_t fault;
    bool later; /* after a call that was right */
    colo_status_t status[2], alive[2];
    bool named[2], untouched[2];
} refusal_t;

static colo_status_t run_fault(colo_comm_t *comm, void *arg)
{
    refusal_t *f = arg;
    const int32_t rank = colo_comm_rank(comm);
    float x[5 * H], y[10 * H];
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const options_t o = {.output = COLO_SHARDED, .placement = COLO_MERGED};
    tables_t t = worked;
    if (rank == 1 && f->fault == DIFFERENT_POS)
        t.pos[2] = 2;
    if (rank == 1 && f->fault == DIFFERENT_LENGTH)
        t.len[1] = 12;
    if (rank == 1 && f->fault == DIFFERENT_COUNT)
        t.rows[2] = 4;
    const colo_segments_t s = segments_of(&t);
    int64_t src, dst;
    rank_try(make(&b, &o, comm));
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    colo_bridge_rows(b, &src, &dst);
    fill_x(x, rank);
    colo_tensor_t tx = tensor(x, src), ty = tensor(y, dst);
    const colo_tensor_t *px = &tx, *py = &ty;
    int32_t n = 1;
    if (f->later)
        rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    if (rank == 1)
        switch (f->fault) {
        case SHORT_Y:
            ty.shape[0]--;
            break;
        case SHORT_X:
            tx.shape[0]--;
            break;
        case DTYPE_Y:
            ty.dtype = COLO_I32;
            break;
        case FEATURES_Y:
            ty.shape[1]--;
            break;
        case CUDA_Y:
            ty.mem = COLO_CUDA;
            ty.device = 0;
            break;
        case X_NULL:
            px = NULL;
            break;
        case Y_NULL:
            py = NULL;
            break;
        case OVERLAP:
            ty.data = x;
            break;
        case Y_STRIDE_0:
            ty.stride[0] = 0;
            break;
        case NO_TENSORS:
            n = 0;
            break;
        default:
            break;
        }
    blank(y, 10);
    f->status[rank] = colo_batch_forward(batch, px, py, n, NULL);
    f->named[rank] = strstr(colo_last_error(), verdict[f->fault].text) != NULL;
    if (!f->named[rank])
        fprintf(stderr, "rank %d: %s\n", (int)rank, colo_last_error());
    f->untouched[rank] = has_only(y, 10, NULL, 0);
    f->alive[rank] = colo_comm_check(comm);
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void a_bad_first_call_is_an_error_on_all_ranks_and_writes_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < FAULTS; i++) {
        refusal_t f = {.fault = (fault_t)i};
        assert_ok(t_run_ranks(2, run_fault, &f, sizeof f));
        const colo_status_t other =
            verdict[i].status == COLO_ERR_MISMATCH ? COLO_ERR_MISMATCH : COLO_ERR_PEER;
        assert_int_equal(f.status[0], other);
        assert_int_equal(f.status[1], verdict[i].status);
        for (int rank = 0; rank < 2; rank++) {
            assert_true(f.named[rank]);
            assert_true(f.untouched[rank]);
            assert_int_equal(f.alive[rank], COLO_OK);
        }
    }
}

static void a_bad_later_call_wakes_the_ranks_that_wait(void **state)
{
    refusal_t f = {.fault = SHORT_X, .later = true};
    (void)state;
    assert_ok(t_run_ranks(2, run_fault, &f, sizeof f));
    assert_int_equal(f.status[0], COLO_ERR_PEER);
    assert_int_equal(f.status[1], COLO_ERR_SHAPE);
    assert_true(f.named[0] && f.named[1] && f.untouched[0] && f.untouched[1]);
}

static colo_status_t run_uses(colo_comm_t *comm, void *arg)
{
    float x[5 * H];
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    options_t o = {.output = COLO_FULL_SEQ, .max_rows = 4, .no_grad = true};
    tables_t t = worked;
    colo_segments_t s = segments_of(&t);
    const colo_shape_t shape = {1, 1, 1, 0};
    const colo_tensor_t tx = tensor(x, 5);
    rank_try(make(&b, &o, comm));
    rank_check(colo_bridge_set_segments(b, &s, &batch) == COLO_ERR_ARG);
    rank_check(strstr(colo_last_error(), "source replica 1 has 5 rows, 5 on a rank, expected at "
                                         "most max_rows=4"));
    t.pos[0] = 11;
    rank_check(colo_bridge_set_segments(b, &s, &batch) == COLO_ERR_ARG);
    rank_check(strstr(colo_last_error(), "segment 0: row 1 of 3 is at position 12"));
    rank_check(!batch);
    t.pos[0] = 2;
    t.rows[2] = 4;
    rank_try(colo_bridge_set_segments(b, &s, &batch)); /* the bridge lives */
    rank_check(colo_batch_backward(batch, NULL, NULL, 1, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_forward(b, &tx, &tx, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_backward(b, &tx, &tx, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_reshape(b, &shape) == COLO_ERR_STATE);
    rank_check(colo_batch_forward(NULL, NULL, NULL, 1, NULL) == COLO_ERR_ARG);
    rank_check(colo_bridge_set_segments(b, &s, NULL) == COLO_ERR_ARG);
    rank_check(colo_bridge_set_segments(NULL, &s, &batch) == COLO_ERR_ARG);
    colo_batch_destroy(&batch);
    colo_batch_destroy(&batch);
    colo_batch_destroy(NULL);
    rank_check(colo_batch_plan(NULL) == NULL);
    colo_bridge_rows(NULL, NULL, NULL);
    colo_bridge_destroy(&b);
    return colo_comm_check(comm);
}

static void wrong_uses_are_refused_and_the_bridge_lives(void **state)
{
    (void)state;
    assert_ok(t_run_ranks(2, run_uses, NULL, 0));
}

/* Masks travel in forward, and have no sum. */
static colo_status_t run_mask(colo_comm_t *comm, void *arg)
{
    const int32_t rank = colo_comm_rank(comm);
    const int64_t n = rank ? 5 : 3;
    int32_t x[5] = {1, 2, 3, 4, 5}, y[8] = {0}, dx[5] = {-7};
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const options_t o = {.output = COLO_FULL_SEQ};
    const colo_segments_t s = segments_of(&worked);
    rank_try(make(&b, &o, comm));
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    const colo_tensor_t tx = colo_tensor_host(x, COLO_I32, 2, (int64_t[]){n, 1}),
                        ty = colo_tensor_host(y, COLO_I32, 2, (int64_t[]){8, 1}),
                        tdx = colo_tensor_host(dx, COLO_I32, 2, (int64_t[]){n, 1});
    rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    for (int64_t i = 0; i < 8; i++)
        rank_check(y[i] == (i < 3 ? i + 1 : i - 2));
    const colo_status_t st = colo_batch_backward(batch, &ty, &tdx, 1, NULL);
    rank_check(st == COLO_ERR_ARG || st == COLO_ERR_PEER); /* the other rank failed first */
    rank_check(strstr(colo_last_error(), "d_y[0] is i32"));
    rank_check(dx[0] == -7);
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    return COLO_OK;
}

static void integers_travel_but_are_not_added_up(void **state)
{
    (void)state;
    assert_ok(t_run_ranks(2, run_mask, NULL, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sharded_packed_rows_arrive_as_the_example_says),
        cmocka_unit_test(sharded_merged_rows_arrive_as_the_example_says),
        cmocka_unit_test(full_rows_arrive_on_both_ranks),
        cmocka_unit_test(batches_with_other_tables_may_be_outstanding_together),
        cmocka_unit_test(no_rows_anywhere_need_no_tensors_and_no_collective),
        cmocka_unit_test(scratch_grows_to_the_largest_batch_or_is_there_from_create),
        cmocka_unit_test(a_bad_first_call_is_an_error_on_all_ranks_and_writes_nothing),
        cmocka_unit_test(a_bad_later_call_wakes_the_ranks_that_wait),
        cmocka_unit_test(wrong_uses_are_refused_and_the_bridge_lives),
        cmocka_unit_test(integers_travel_but_are_not_added_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
