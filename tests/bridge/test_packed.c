/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packed.c - packings by hand: a worked example, each refusal, ranks that bring other tables.
 */
#include "harness/harness.h"

#include "harness/packed_case.h"

enum { FEATURES = 2 };

static colo_status_t bridge_of(colo_bridge_t **b, const char *src, const char *dst,
                               colo_comm_t *comm)
{
    T_BRIDGE_CONFIG(c, src, dst, .shape = {.features = FEATURES}, .packed = true);
    return colo_bridge_create(b, &c, comm);
}

static colo_tensor_t rows_of(float *data, int64_t rows)
{
    return colo_tensor_host(data, COLO_F32, 2, (int64_t[]){rows, FEATURES});
}

/* ---- by hand ---- */

/* Sequences of 8 and 3 positions: zigzag over two ranks and whole on rank 1, then contiguous on
 * both, and 2 + 1 positions. Rank 0 has 0 1 6 7 of the first; then 0 1 2 3, and 0 1 of the second.
 */
T_CASE_ON(2, the_example_moves_each_row_to_its_rank_and_back)
{
    const int64_t len[] = {8, 3}, cp[] = {2, 1}, first[] = {0, 1}, start[] = {0, 2, 5};
    const int64_t piece[] = {4, 4, 2, 0, 1}, owner[] = {0, 1, 0, 0, 1};
    const colo_packing_t src = {COLO_PACKING_INIT,  .nseqs = 2,
                                .seq_len = len,     .seq_cp = cp,
                                .seq_first = first, .split = COLO_PACKING_ZIGZAG};
    const colo_packing_t dst = {
        COLO_PACKING_INIT,    .nseqs = 2,         .seq_len = len,      .split = COLO_PACKING_TABLE,
        .piece_start = start, .piece_len = piece, .piece_owner = owner};
    static const int64_t has[2][2][7] = {{{0, 1, 6, 7}, {2, 3, 4, 5, 10, 11, 12}},
                                         {{0, 1, 2, 3, 10, 11}, {4, 5, 6, 7, 12}}};
    static const int64_t n[2][2] = {{4, 7}, {6, 5}};
    const int32_t me = colo_comm_rank(world);
    float x[2 * 7] = {0}, y[2 * 7], d_x[2 * 7];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    int64_t rows[2];
    for (int64_t i = 0; i < n[0][me]; i++)
        for (int64_t h = 0; h < 2; h++)
            x[2 * i + h] = (float)(has[0][me][i] + 100 * h);
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    rank_try(colo_bridge_set_packing(b, &src, &dst, &batch));
    colo_bridge_rows(b, &rows[0], &rows[1]);
    rank_check(rows[0] == n[0][me] && rows[1] == n[1][me]);
    colo_tensor_t tx = rows_of(x, rows[0]), ty = rows_of(y, rows[1]), td = rows_of(d_x, rows[0]);
    rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    for (int64_t i = 0; i < n[1][me]; i++)
        for (int64_t h = 0; h < 2; h++)
            rank_check(y[2 * i + h] == (float)(has[1][me][i] + 100 * h));
    rank_try(colo_batch_backward(batch, &ty, &td, 1, NULL)); /* the way back is the inverse */
    rank_check(memcmp(d_x, x, (size_t)n[0][me] * 2 * sizeof *x) == 0);
    colo_run_t run;
    rank_check(colo_batch_runs(batch, &run, 1) == 1 && run.local == 0 && run.count == rows[1]);
    return COLO_OK;
}

/* Replica 0 has 4 rows, replica 1 sequences of 7 and 3: its rank 0 has 5 of the first. */
T_CASE(contiguous_ranks_share_the_rows_of_their_replica)
{
    const int64_t len[] = {7, 4, 3}, dp[] = {1, 0, 1};
    const colo_packing_t p = {COLO_PACKING_INIT, .nseqs = 3, .seq_len = len, .seq_dp = dp,
                              .split = COLO_PACKING_CONTIGUOUS};
    static const int64_t rows[] = {2, 2, 5, 5}, index[4][10] = {{0, 1, 1, 1},
                                                                {2, 3, 1, 1},
                                                                {0, 1, 2, 3, 4, 0, 0, 0, 0, 0},
                                                                {5, 6, 0, 1, 2, 0, 0, 2, 2, 2}};
    colo_layout_t layout;
    assert_ok(t_layout_of("cp=2,dp=2", false, &layout));
    for (int64_t rank = 0; rank < 4; rank++) {
        int64_t n, found[10];
        assert_ok(colo_packing_rows(&p, &layout, rank, &n));
        assert_int_equal(n, rows[rank]);
        assert_ok(colo_packing_index(&p, &layout, rank, found));
        assert_memory_equal(found, index[rank], (size_t)(2 * n) * sizeof *found);
    }
}

/* ---- halos ---- */

/* One sequence of 6 positions in pieces of 1, 2, 1 and 2 on ranks 0, 1, 0, 1, with 3 rows in front
 * of each. Rank 0 has . . . 0 and 0 1 2 3, rank 1 . . 0 1 2 and 1 2 3 4 5. Rows 0 and 2 have three
 * addends each, of their own pieces first: 1e8 - 1e8 + 1 and 1e8 + 1 - 1e8, which are 1 and 0 in
 * fp32 in this order. */
T_CASE_ON(2, a_row_is_the_sum_over_its_pieces_its_own_first_and_then_by_position)
{
    const int64_t len[] = {6}, start[] = {0, 4}, piece[] = {1, 2, 1, 2}, owner[] = {0, 1, 0, 1};
    const int64_t src_piece[] = {1, 1, 2, 2}, src_owner[] = {1, 0, 1, 0};
    const colo_packing_t src = {COLO_PACKING_INIT,       .nseqs = 1,
                                .seq_len = len,          .split = COLO_PACKING_TABLE,
                                .piece_start = start,    .piece_len = src_piece,
                                .piece_owner = src_owner};
    const colo_packing_t dst = {
        COLO_PACKING_INIT,    .nseqs = 1,         .seq_len = len,       .split = COLO_PACKING_TABLE,
        .piece_start = start, .piece_len = piece, .piece_owner = owner, .halo_before = 3};
    static const float has[2][10] = {{0, 0, 0, 10, 10, 11, 12, 13},
                                     {0, 0, 10, 11, 12, 11, 12, 13, 14, 15}};
    static const float has_src[2][3] = {{11, 14, 15}, {10, 12, 13}};
    static const float d[2][10] = {{9, 9, 9, 1e8f, 1, 4, 1, 2},
                                   {9, 9, -1e8f, 1, 1e8f, 2, -1e8f, 4, 8, 16}};
    static const float sum[2][3] = {{7, 8, 16}, {1, 0, 6}};
    static const int64_t n[2] = {8, 10}, begin[2][3] = {{0, 4, 8}, {0, 5, 10}};
    const int32_t me = colo_comm_rank(world);
    float x[2 * 3], y[2 * 10], d_y[2 * 10], d_x[2 * 3];
    colo_layout_t layout;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    int64_t rows[2], found[3], pieces;
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    rank_try(colo_bridge_set_packing(b, &src, &dst, &batch));
    colo_bridge_rows(b, &rows[0], &rows[1]);
    rank_check(rows[0] == 3 && rows[1] == n[me]);
    rank_try(t_layout_of("cp=2", false, &layout));
    rank_try(colo_packing_pieces(&dst, &layout, me, found, &pieces));
    rank_check(pieces == 2 && memcmp(found, begin[me], sizeof found) == 0);
    rank_fails(colo_packing_pieces(&dst, &layout, me, found, NULL), COLO_ERR_ARG, "n is NULL");
    rank_try(colo_packing_pieces(&dst, &layout, 7, found, &pieces)); /* no rank of the layout */
    rank_check(pieces == 0 && found[0] == 0);
    for (int64_t i = 0; i < 2 * 3; i++)
        x[i] = has_src[me][i / 2];
    for (int64_t i = 0; i < 2 * n[me]; i++)
        d_y[i] = d[me][i / 2];
    colo_tensor_t tx = rows_of(x, 3), ty = rows_of(y, n[me]), tdy = rows_of(d_y, n[me]),
                  tdx = rows_of(d_x, 3);
    for (int again = 0; again < 2; again++) {
        rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
        rank_try(colo_batch_backward(batch, &tdy, &tdx, 1, NULL));
        for (int64_t i = 0; i < 2 * n[me]; i++)
            rank_check(y[i] == has[me][i / 2]);
        for (int64_t i = 0; i < 2 * 3; i++)
            rank_check(d_x[i] == sum[me][i / 2]);
    }
    colo_run_t run[3]; /* rows of y that are none of zeros */
    rank_check(colo_batch_runs(batch, run, 3) == 2 && run[0].local == (me ? 2 : 3));
    return COLO_OK;
}

/* ---- refusals ---- */

typedef struct bad {
    const char *text;
    colo_status_t status;
    colo_packing_t src, dst;
} bad_t;

#define L(...) ((const int64_t[]){__VA_ARGS__})
#define P(...)                         \
    {                                  \
        COLO_PACKING_INIT, __VA_ARGS__ \
    }

/* All ranks refuse with the same words, and the bridge carries the next batch. */
T_CASE_ON(2, tables_that_do_not_fit_are_refused_with_their_numbers_on_all_ranks)
{
    const colo_packing_t good = P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_BLOCK);
    const bad_t bad[] = {
        {"dst packing: sequence 1 has 6 positions, expected a multiple of 2 * cp=2 = 4",
         COLO_ERR_LAYOUT, P(.nseqs = 2, .seq_len = L(8, 6)),
         P(.nseqs = 2, .seq_len = L(8, 6), .split = COLO_PACKING_ZIGZAG)},
        {"src packing: sequence 0 has 7 positions, expected a multiple of cp=2 = 2",
         COLO_ERR_LAYOUT, P(.nseqs = 1, .seq_len = L(7)), P(.nseqs = 1, .seq_len = L(7))},
        {"src packing: sequence 0 has -2 positions", COLO_ERR_ARG, P(.nseqs = 1, .seq_len = L(-2)),
         P(.nseqs = 1, .seq_len = L(2))},
        {"dst packing: sequence 1: seq_dp is 1, expected 0..0", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_dp = L(0, 1))},
        {"src packing: sequence 1 lies on 2 context ranks from 1 on, expected >= 1 of the ranks "
         "0..1",
         COLO_ERR_ARG, P(.nseqs = 2, .seq_len = L(8, 4), .seq_cp = L(2, 2), .seq_first = L(0, 1)),
         good},
        {"src packing: sequence 0 lies on 0 context ranks", COLO_ERR_ARG,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_cp = L(0, 1)), good},
        {"dst packing: sequence 0 lies on 1 context ranks from -1 on", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_cp = L(1, 1), .seq_first = L(-1, 0))},
        {"packing: src has 2 sequences, dst 1", COLO_ERR_ARG, good, P(.nseqs = 1, .seq_len = L(8))},
        {"packing: sequence 1 has 4 positions in src and 6 in dst", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 6))},
        {"src packing: table seq_len is NULL, expected its entries", COLO_ERR_ARG, P(.nseqs = 2),
         good},
        {"src packing: -1 sequences", COLO_ERR_ARG, P(.nseqs = -1), good},
        {"src packing: 0 sequences, split 5", COLO_ERR_ARG, P(.split = (colo_packing_split_t)5),
         good},
        {"dst packing: table seq_cp is given, expected NULL with split WHOLE", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_cp = L(2, 2), .split = COLO_PACKING_WHOLE)},
        {"dst packing: table seq_first is given, expected NULL with split CONTIGUOUS", COLO_ERR_ARG,
         good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_first = L(0, 0), .split = COLO_PACKING_CONTIGUOUS)},
        {"dst packing: the sequences of replica 0 have 13 positions, expected a multiple of cp=2",
         COLO_ERR_LAYOUT, good,
         P(.nseqs = 2, .seq_len = L(8, 5), .split = COLO_PACKING_CONTIGUOUS)},
        {"dst packing: sequence 1: seq_dp is 1, expected 0..0", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_dp = L(0, 1), .split = COLO_PACKING_CONTIGUOUS)},
        {"dst packing: sequence 1 has -4 positions", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, -4), .split = COLO_PACKING_CONTIGUOUS)},
        {"src packing: sequence 1 has 4 positions and seq_room 3, expected at least as many",
         COLO_ERR_ARG, P(.nseqs = 2, .seq_len = L(8, 4), .seq_room = L(8, 3)), good},
        {"dst packing: sequence 0 has 14 positions, expected a multiple of 2 * cp=2 = 4",
         COLO_ERR_LAYOUT, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .seq_room = L(14, 4), .split = COLO_PACKING_ZIGZAG)},
        {"dst packing: table piece_start is NULL, expected its entries with split TABLE",
         COLO_ERR_ARG, good, P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_TABLE)},
        {"dst packing: sequence 1: its pieces have 5 positions, expected 4", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_TABLE, .piece_start = L(0, 1, 2),
           .piece_len = L(8, 5), .piece_owner = L(0, 1))},
        {"dst packing: sequence 0: piece 1 has owner 2, expected 0..1", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_TABLE, .piece_start = L(0, 2, 3),
           .piece_len = L(4, 4, 4), .piece_owner = L(0, 2, 1))},
        {"dst packing: sequence 0: piece 0 has -4 positions", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_TABLE, .piece_start = L(0, 2, 3),
           .piece_len = L(-4, 12, 4), .piece_owner = L(0, 0, 1))},
        {"dst packing: sequence 1 has the pieces 2..0", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_TABLE, .piece_start = L(0, 2, 1),
           .piece_len = L(4, 4), .piece_owner = L(0, 1))},
        {"src packing: halo_before is 2, expected 0: a source has each row once", COLO_ERR_ARG,
         P(.nseqs = 2, .seq_len = L(8, 4), .halo_before = 2), good},
        {"dst packing: halo_before is -2, expected >= 0 rows", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .halo_before = -2)},
        {"dst packing: halo_before is 2, expected 0 with split WHOLE", COLO_ERR_ARG, good,
         P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_WHOLE, .halo_before = 2)},
        {"dst packing: halo_before=4611686018427387904 rows in front of each piece make the rows "
         "of "
         "all ranks exceed 63 bits",
         COLO_ERR_ARG, good, P(.nseqs = 2, .seq_len = L(8, 4), .halo_before = INT64_C(1) << 62)},
        {"packing: 4611686018427387916 rows of 2 f32 features overflow 63 bits of bytes",
         COLO_ERR_ARG, P(.nseqs = 1, .seq_len = L(12)),
         P(.nseqs = 1, .seq_len = L(12), .split = COLO_PACKING_TABLE, .piece_start = L(0, 1),
           .piece_len = L(12), .piece_owner = L(0), .halo_before = INT64_C(1) << 62)},
        {"src packing: sequence 1: its 9223372036854775800 positions make the lengths of all "
         "sequences exceed 63 bits",
         COLO_ERR_ARG, P(.nseqs = 2, .seq_len = L(8, INT64_MAX - 7), .split = COLO_PACKING_WHOLE),
         good},
    };
    int failed = 0;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const colo_status_t st = colo_bridge_set_packing(b, &bad[i].src, &bad[i].dst, &batch);
        if (st != bad[i].status || !strstr(colo_last_error(), bad[i].text))
            fprintf(stderr, "case %zu: %s: %s\n", i, colo_status_name(st), colo_last_error());
        failed += st != bad[i].status || !strstr(colo_last_error(), bad[i].text) || batch;
        colo_batch_destroy(&batch);
    }
    if (failed)
        colo_bridge_destroy(&b);
    rank_check(!failed);
    rank_check(colo_bridge_set_packing(b, &good, &good, NULL) == COLO_ERR_ARG);
    rank_check(colo_bridge_set_packing(b, &good, NULL, &batch) == COLO_ERR_ARG);
    const colo_segments_t none = {COLO_SEGMENTS_INIT};
    rank_check(colo_bridge_set_segments(b, &none, &batch) == COLO_ERR_ARG &&
               strstr(colo_last_error(), "segments: the bridge was created for packings"));
    rank_try(colo_bridge_set_packing(b, &good, &good, &batch));
    float x[2 * 6] = {1, 2, 3}, y[2 * 6];
    const colo_tensor_t tx = rows_of(x, 6), ty = rows_of(y, 6);
    rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    rank_check(memcmp(x, y, sizeof x) == 0);
    return COLO_OK;
}

T_CASE(layouts_that_packings_cannot_have_are_refused)
{
    colo_grid_t grid;
    colo_layout_t layout;
    int64_t rows = 7;
    const colo_packing_t p = P(.nseqs = 2, .seq_len = L(8, 4), .split = COLO_PACKING_BLOCK);
    const colo_packing_t odd = P(.nseqs = 2, .seq_len = L(8, 6), .seq_cp = L(2, 1));
    assert_ok(colo_grid_parse(&grid, "tp=2,cp=2", 0));
    assert_ok(colo_layout_init_dst(&layout, &grid));
    assert_ok(colo_packing_rows(&p, &layout, 3, &rows));
    assert_int_equal(rows, 6);
    assert_ok(colo_packing_rows(&p, &layout, 4, &rows)); /* no rank of the layout */
    assert_int_equal(rows, 0);
    assert_ok(colo_packing_rows(&(colo_packing_t){COLO_PACKING_INIT}, &layout, 0, &rows));
    assert_int_equal(rows, 0);
    assert_fails(colo_packing_rows(NULL, &layout, 0, &rows), COLO_ERR_ARG, "packing");
    assert_fails(colo_packing_rows(&p, NULL, 0, &rows), COLO_ERR_ARG, "layout is NULL");
    assert_fails(colo_packing_rows(&p, &layout, 0, NULL), COLO_ERR_ARG, "rows is NULL");
    assert_fails(colo_packing_index(&p, &layout, 0, NULL), COLO_ERR_ARG, "index is NULL");
    assert_fails(colo_packing_most_rows(&p, &layout, NULL), COLO_ERR_ARG, "rows is NULL");
    assert_ok(colo_layout_split(&layout, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_packing_rows(&odd, &layout, 0, &rows)); /* 4 + 6 rows, and 4 */
    assert_int_equal(rows, 5);
    const colo_packing_t three =
        P(.nseqs = 2, .seq_len = L(8, 3), .seq_cp = L(2, 1), .seq_first = L(0, 1));
    assert_fails(
        colo_packing_rows(&three, &layout, 0, &rows), COLO_ERR_LAYOUT,
        "replica 0, the last of them sequence 1, have 7 positions on a context rank, "
        "expected a multiple of the 2 ranks of sequence parallelism (context rank 1 of 2)");
    colo_layout_clear(&layout, COLO_AXIS_ROWS);
    assert_ok(colo_layout_split(&layout, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_split(&layout, COLO_AXIS_ROWS, "cp", COLO_SPLIT_ZIGZAG));
    assert_fails(colo_packing_rows(&p, &layout, 0, &rows), COLO_ERR_LAYOUT,
                 "packing: the given layout splits rows in context over 'cp' as split 1");
    assert_ok(colo_layout_init_dst(&layout, &grid));
    assert_ok(colo_layout_map_offset(&layout, 1, 20));
    assert_fails(colo_packing_rows(&p, &layout, 0, &rows), COLO_ERR_LAYOUT, "has a position map");
}

T_CASE(a_plan_without_a_bridge_refuses_what_the_bridge_refuses)
{
    const colo_packing_t p = P(.nseqs = 1, .seq_len = L(8)), other = P(.nseqs = 1, .seq_len = L(4));
    colo_layout_t layout;
    colo_plan_t *plan = NULL;
    assert_ok(t_layout_of("cp=2", false, &layout));
    colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &layout, .dst = &layout,
                            .shape = {.features = 2}};
    assert_fails(colo_plan_create_packed(NULL, &c, &p, &p, 0), COLO_ERR_ARG, "plan is NULL");
    assert_fails(colo_plan_create_packed(&plan, &c, &p, &p, -1), COLO_ERR_ARG, "rank -1");
    assert_fails(colo_plan_create_packed(&plan, &c, NULL, &p, 0), COLO_ERR_ARG, "src packing");
    assert_fails(colo_plan_create_packed(&plan, &c, &p, &other, 0), COLO_ERR_ARG,
                 "packing: sequence 0 has 8 positions in src and 4 in dst");
    c.output = COLO_OUTPUT_SHARDED;
    assert_fails(colo_plan_create_packed(&plan, &c, &p, &p, 0), COLO_ERR_ARG,
                 "plan: packed with output, expected 0");
    c.output = COLO_OUTPUT_FULL_SEQ;
    c.grad = COLO_GRAD_DISJOINT;
    assert_fails(colo_plan_create_packed(&plan, &c, &p, &p, 0), COLO_ERR_ARG,
                 "plan: packed with grad, expected 0");
    c.grad = COLO_GRAD_PARTIAL;
    c.shape.rows = 1;
    assert_fails(colo_plan_create_packed(&plan, &c, &p, &p, 0), COLO_ERR_ARG,
                 "these are in the tables");
    assert_null(plan);
}

T_CASE_ON(2, options_that_packings_do_not_have_are_refused)
{
    colo_layout_t layout;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    rank_try(t_layout_of("cp=2", false, &layout));
    const colo_bridge_config_t good = {COLO_BRIDGE_CONFIG_INIT, .src = &layout, .dst = &layout,
                                       .shape = {.features = 2}, .packed = true};
    for (int i = 0; i < 6; i++) {
        static const char *const text[] = {"packed with ragged",
                                           "packed with output",
                                           "packed with grad",
                                           "packed with placement",
                                           "0 of each; these are in the tables",
                                           "expected EXACT"};
        colo_bridge_config_t c = good;
        c.ragged = i == 0;
        c.output = i == 1 ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
        c.grad = i == 2 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
        c.placement = i == 3 ? COLO_PLACEMENT_MERGED : COLO_PLACEMENT_PACKED;
        c.shape.rows = i == 4;
        c.algo = i == 5 ? COLO_ALGO_COLLECTIVE : COLO_ALGO_EXACT;
        rank_check(colo_bridge_create(&b, &c, world) == COLO_ERR_ARG);
        if (!strstr(colo_last_error(), text[i]))
            fprintf(stderr, "%s\n", colo_last_error());
        rank_check(says(text[i]) && !b);
    }
    colo_bridge_config_t c = good;
    c.max_rows = 4;
    rank_try(colo_bridge_create(&b, &c, world));
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    const colo_packing_t p = P(.nseqs = 1, .seq_len = L(10)), fits = P(.nseqs = 1, .seq_len = L(8));
    rank_fails(colo_bridge_set_packing(b, &p, &p, &batch), COLO_ERR_ARG,
               "packing: source replica 0 has 5 rows on a rank, expected "
               "at most max_rows=4");
    rank_try(colo_bridge_set_packing(b, &fits, &fits, &batch));
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    /* values of integers are not added up */
    const colo_packing_t whole = P(.nseqs = 1, .seq_len = L(8), .split = COLO_PACKING_WHOLE);
    c = good;
    c.dtype = COLO_I64;
    rank_try(colo_bridge_create(&b, &c, world));
    rank_check(colo_bridge_set_packing(b, &fits, &whole, &batch) == COLO_ERR_ARG);
    rank_try(colo_bridge_set_packing(b, &whole, &fits, &batch));
    colo_batch_destroy(&batch);
    colo_packing_t halo = fits;
    halo.halo_before = 1;
    rank_fails(colo_bridge_set_packing(b, &fits, &halo, &batch), COLO_ERR_ARG,
               "gradients of rows in 2 pieces at most are summed, which i64 is not made for");
    colo_bridge_destroy(&b);
    c.no_grad = true; /* then they come */
    rank_try(colo_bridge_create(&b, &c, world));
    rank_try(colo_bridge_set_packing(b, &fits, &halo, &batch));
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    /* a tensor of integers on a bridge of floats */
    c = good;
    rank_try(colo_bridge_create(&b, &c, world));
    rank_try(colo_bridge_set_packing(b, &fits, &halo, &batch));
    int64_t ints[5 * 2] = {0}, out[4 * 2];
    const colo_tensor_t ti = colo_tensor_host(ints, COLO_I64, 2, (int64_t[]){5, 2}),
                        to = colo_tensor_host(out, COLO_I64, 2, (int64_t[]){4, 2});
    rank_try(colo_batch_forward(batch, &to, &ti, 1, NULL));
    const colo_status_t st = colo_batch_backward(batch, &ti, &to, 1, NULL);
    rank_check(st == COLO_ERR_ARG || st == COLO_ERR_PEER); /* the ranks fail one after the other */
    rank_check(
        says("d_y[0] is i64, which gradients of rows in 2 pieces at most are not added up in"));
    return COLO_OK;
}

/* A row is in the halos of as many pieces as follow within halo_before. */
T_CASE_ON(2, more_pieces_of_a_row_than_are_added_up_are_refused_without_no_grad)
{
    enum { N = 300 };
    int64_t piece[N], owner[N];
    const int64_t len[] = {N}, start[] = {0, N};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    for (int64_t i = 0; i < N; i++) {
        piece[i] = 1;
        owner[i] = i % 2;
    }
    const colo_packing_t src = {COLO_PACKING_INIT, .nseqs = 1, .seq_len = len};
    colo_packing_t dst = {COLO_PACKING_INIT,           .nseqs = 1,           .seq_len = len,
                          .split = COLO_PACKING_TABLE, .piece_start = start, .piece_len = piece,
                          .piece_owner = owner,        .halo_before = 256};
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    rank_fails(colo_bridge_set_packing(b, &src, &dst, &batch), COLO_ERR_ARG,
               "a row is in 257 pieces and their halos, at most 256; give longer pieces");
    dst.halo_before = 255;
    rank_try(colo_bridge_set_packing(b, &src, &dst, &batch));
    return COLO_OK;
}

/* ---- several batches ---- */

/* Nodes of two ranks: what a batch does is the same after any other batch. */
T_CASE_ON(4, a_batch_is_the_same_whichever_came_before)
{
    colo_layout_t layout;
    rank_try(t_layout_of("cp=4", false, &layout));
    const colo_bridge_config_t c = {COLO_BRIDGE_CONFIG_INIT,  .src = &layout,      .dst = &layout,
                                    .shape = {.features = 2}, .ranks_per_node = 2, .packed = true};
    const colo_packing_t cut = P(.nseqs = 1, .seq_len = L(16)),
                         whole = P(.nseqs = 1, .seq_len = L(16), .split = COLO_PACKING_WHOLE);
    const colo_packing_t *side[3][2] = {{&cut, &cut}, {&cut, &whole}, {&whole, &cut}};
    for (int first = 0; first < 3; first++)
        for (int second = 0; second < 3; second++) {
            colo_bridge_t *b[2] = {NULL, NULL};
            colo_batch_t *batch[3] = {NULL, NULL, NULL};
            for (int i = 0; i < 2; i++)
                rank_try(colo_bridge_create(&b[i], &c, world));
            rank_try(colo_bridge_set_packing(b[0], side[first][0], side[first][1], &batch[0]));
            for (int i = 0; i < 2; i++)
                rank_try(
                    colo_bridge_set_packing(b[i], side[second][0], side[second][1], &batch[1 + i]));
            for (int pass = 0; pass < 2; pass++) {
                const colo_plan_t *p = colo_batch_plan(batch[1]), *q = colo_batch_plan(batch[2]);
                rank_check(t_plan_node_bytes(p, pass).in == t_plan_node_bytes(q, pass).in);
                rank_check(t_plan_bytes(p, pass).recv == t_plan_bytes(q, pass).recv);
                rank_check(t_plan_bytes(p, pass).send == t_plan_bytes(q, pass).send);
            }
            for (int i = 0; i < 3; i++)
                colo_batch_destroy(&batch[i]);
            for (int i = 0; i < 2; i++)
                colo_bridge_destroy(&b[i]);
        }
    return COLO_OK;
}

/* One rank's table of pieces gives a piece to another owner. */
T_CASE_ON(2, ranks_with_other_tables_learn_which_before_anything_moves)
{
    const int64_t me = colo_comm_rank(world);
    const int64_t owner[] = {0, 1, me == 1 ? 0 : 1, me == 1 ? 1 : 0};
    const colo_packing_t src = P(.nseqs = 1, .seq_len = L(8));
    const colo_packing_t dst =
        P(.nseqs = 1, .seq_len = L(8), .split = COLO_PACKING_TABLE, .piece_start = L(0, 4),
          .piece_len = L(2, 2, 2, 2), .piece_owner = owner);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    float x[8], y[8];
    const colo_tensor_t tx = rows_of(x, 4), ty = rows_of(y, 4);
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    rank_try(colo_bridge_set_packing(b, &src, &dst, &batch));
    rank_check(colo_batch_forward(batch, &tx, &ty, 1, NULL) == COLO_ERR_MISMATCH);
    rank_check(says("dst piece_owner") && strstr(colo_last_error(), "rank 1"));
    return COLO_OK;
}

/* One rank's halo is longer. */
T_CASE_ON(2, ranks_with_other_halos_learn_it_before_anything_moves)
{
    const colo_packing_t src = P(.nseqs = 1, .seq_len = L(8)),
                         dst = P(.nseqs = 1, .seq_len = L(8),
                                 .halo_before = 1 + (colo_comm_rank(world) == 1));
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    float x[2 * 4] = {0}, y[2 * 6];
    int64_t rows;
    rank_try(bridge_of(&b, "cp=2", "cp=2", world));
    rank_try(colo_bridge_set_packing(b, &src, &dst, &batch));
    colo_bridge_rows(b, NULL, &rows);
    const colo_tensor_t tx = rows_of(x, 4), ty = rows_of(y, rows);
    rank_fails(colo_batch_forward(batch, &tx, &ty, 1, NULL), COLO_ERR_MISMATCH, "dst halo_before");
    return COLO_OK;
}

T_MAIN("bridge/packed")
