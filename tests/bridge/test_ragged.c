/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged.c - the worked example of a ragged batch, row by row; batches that are outstanding
 * together; ranks without rows; memory.
 */
#include "ragged_example.h"

typedef struct example {
    options_t o;
    int64_t rows[2], n[2]; /* of y; that arrive */
    int64_t lacks[2][2];   /* by pass: rows that a rank needs and does not hold, once per addend */
    arrival_t a[2][8];
} example_t;

/* The batch names the rows that arrive and no others, by position, and writes no more than @cap. */
static bool runs_are(const colo_batch_t *batch, const arrival_t *a, int64_t n)
{
    colo_run_t run[9];
    const colo_run_t nothing = {-1, -1, -1};
    const int64_t runs = colo_batch_runs(batch, NULL, 0);
    int64_t next = 0;
    for (int64_t i = 0; i < 9; i++)
        run[i] = nothing;
    if (runs < 1 || runs > 8 || colo_batch_runs(batch, run, runs - 1) != runs ||
        memcmp(&run[runs - 1], &nothing, sizeof nothing) != 0 ||
        colo_batch_runs(batch, run, 9) != runs || memcmp(&run[runs], &nothing, sizeof nothing) != 0)
        return false;
    for (int64_t i = 0; i < runs; i++)
        for (int64_t k = 0; k < run[i].count; k++, next++)
            if (next >= n || a[next].index != run[i].local + k ||
                worked.pos[a[next].e] + a[next].r + (a[next].e == 2 ? worked.len[0] : 0) !=
                    run[i].row + k)
                return false;
    return next == n;
}

static colo_status_t run_example(colo_comm_t *comm, void *arg)
{
    const example_t *ex = arg;
    const int32_t rank = colo_comm_rank(comm);
    float x[5 * H], y[20 * H], dx[5 * H];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const colo_segments_t s = segments_of(&worked);
    int64_t src, dst;
    rank_try(make(&b, &ex->o, comm));
    colo_bridge_rows(b, &src, &dst);
    rank_check(src == 0 && dst == 0);
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    colo_bridge_rows(b, &src, &dst);
    rank_check(src == fill_x(x, rank) && dst == ex->rows[rank]);
    rank_check(runs_are(batch, ex->a[rank], ex->n[rank]));
    for (int pass = 0; pass < 2; pass++)
        rank_check(colo_plan_bytes(colo_batch_plan(batch), (colo_pass_t)pass).recv ==
                   ex->lacks[pass][rank] * H * (int64_t)sizeof *x);
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
    return COLO_OK;
}

T_CASE(sharded_packed_rows_arrive_as_the_example_says)
{
    example_t ex = {.o = {.output = COLO_SHARDED},
                    .rows = {2, 6},
                    .n = {2, 6},
                    .lacks = {{1, 2}, {2, 1}},
                    .a = {{{0, 0, 0}, {2, 0, 1}},
                          {{0, 1, 0}, {0, 2, 1}, {2, 1, 2}, {2, 2, 3}, {2, 3, 4}, {2, 4, 5}}}};
    assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
}

T_CASE(sharded_merged_rows_arrive_as_the_example_says)
{
    example_t ex = {.o = {.output = COLO_SHARDED, .placement = COLO_MERGED},
                    .rows = {10, 10},
                    .n = {2, 6},
                    .lacks = {{1, 2}, {2, 1}},
                    .a = {{{0, 0, 2}, {2, 0, 7}},
                          {{0, 1, 0}, {0, 2, 1}, {2, 1, 6}, {2, 2, 7}, {2, 3, 8}, {2, 4, 9}}}};
    assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
}

T_CASE(full_rows_arrive_on_both_ranks)
{
    static const arrival_t merged[8] = {{0, 0, 2},  {0, 1, 3},  {0, 2, 4},  {2, 0, 13},
                                        {2, 1, 14}, {2, 2, 15}, {2, 3, 16}, {2, 4, 17}};
    for (int i = 0; i < 4; i++) {
        example_t ex = {.o = {.output = COLO_FULL_SEQ,
                              .grad = i & 1 ? COLO_DISJOINT : COLO_PARTIAL,
                              .placement = i & 2 ? COLO_MERGED : COLO_PACKED},
                        .n = {8, 8},
                        .lacks = {{5, 3}, {i & 1 ? 2 : 3, i & 1 ? 1 : 5}}};
        for (int rank = 0; rank < 2; rank++) {
            ex.rows[rank] = i & 2 ? 20 : 8;
            memcpy(ex.a[rank], merged, sizeof merged);
            for (int k = 0; k < 8; k++)
                ex.a[rank][k].index = i & 2 ? merged[k].index : k;
        }
        assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
    }
}

/* ---- batches and memory ---- */

/* Three steps, each with e0 and e2 elsewhere; backward in another order than forward. */
T_CASE_ON(2, batches_with_other_tables_may_be_outstanding_together)
{
    enum { STEPS = 3 };
    static const int order[STEPS] = {1, 2, 0};
    const int32_t rank = colo_comm_rank(world);
    float x[5 * H], y[STEPS][20 * H], dx[5 * H];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    colo_batch_t *batch[STEPS] = {NULL};
    const options_t o = {.output = COLO_SHARDED, .placement = COLO_MERGED};
    int64_t src, dst;
    rank_try(make(&b, &o, world));
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
    return COLO_OK;
}

T_CASE_FOR(2, no_rows_anywhere_need_no_tensors_and_no_collective, colo_placement_t, placement,
           COLO_PACKED, COLO_MERGED)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const options_t o = {.output = COLO_SHARDED, .placement = placement};
    tables_t t = worked;
    memset(t.rows, 0, sizeof t.rows);
    colo_segments_t s = segments_of(&t);
    colo_comm_stats_t before, after;
    int64_t src;
    rank_try(make(&b, &o, world));
    for (int i = 0; i < 2; i++) { /* segments without rows; no segments */
        rank_try(colo_bridge_set_segments(b, &s, &batch));
        colo_bridge_rows(b, &src, NULL);
        rank_check(src == 0);
        colo_comm_stats(world, &before);
        rank_try(colo_batch_forward(batch, NULL, NULL, 1, NULL));
        rank_try(colo_batch_backward(batch, NULL, NULL, 1, NULL));
        colo_comm_stats(world, &after);
        for (int kind = 0; kind < COLO_OP_COUNT; kind++)
            rank_check(kind == COLO_OP_EXCHANGE || after.ops[kind][COLO_CATEGORY_BRIDGE] ==
                                                       before.ops[kind][COLO_CATEGORY_BRIDGE]);
        rank_check(after.recv_bytes[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE] ==
                   before.recv_bytes[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE]);
        colo_batch_destroy(&batch);
        s = (colo_segments_t){COLO_SEGMENTS_INIT};
    }
    return COLO_OK;
}

T_CASE_FOR(2, workspace_grows_to_the_largest_batch_or_is_there_from_create, int64_t, max_rows, 0, 5)
{
    const int32_t rank = colo_comm_rank(world);
    float x[5 * H], y[8 * H], dx[5 * H];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    const options_t o = {.output = COLO_FULL_SEQ, .max_rows = max_rows};
    size_t first, last = 0;
    rank_try(make(&b, &o, world));
    first = colo_bridge_workspace_size(b);
    rank_check((first > 0) == (max_rows > 0));
    for (int64_t n = 1; n <= 5; n++) {
        tables_t t = worked;
        T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
        t.rows[2] = n;
        const colo_segments_t s = segments_of(&t);
        rank_try(colo_bridge_set_segments(b, &s, &batch));
        const colo_tensor_t tx = tensor(x, rank ? n : 3), ty = tensor(y, 3 + n),
                            tdx = tensor(dx, rank ? n : 3);
        fill_x(x, rank);
        rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
        rank_try(colo_batch_backward(batch, &ty, &tdx, 1, NULL));
        rank_check(colo_bridge_workspace_size(b) >= last);
        last = colo_bridge_workspace_size(b);
    }
    rank_check(max_rows ? last == first : last > 0);
    return COLO_OK;
}

T_MAIN("bridge/ragged")
