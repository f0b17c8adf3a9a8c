/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged.c - the worked example of a ragged batch, row by row; batches that are outstanding
 * together; ranks without rows; memory. What is refused of the tables, on which ranks, and that
 * nothing is written then; what COLO_CHECK=2 verifies. test_call_faults.c has wrong tensors.
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
    STAND(d);
    rank_try(stand_up(&d, &ex->o, &worked, comm));
    rank_check(d.src == worked.rows[rank ? 2 : 0] && d.dst == ex->rows[rank]);
    rank_check(runs_are(d.batch, ex->a[rank], ex->n[rank]));
    for (int pass = 0; pass < 2; pass++)
        rank_check(t_plan_bytes(colo_batch_plan(d.batch), (colo_pass_t)pass).recv ==
                   ex->lacks[pass][rank] * H * (int64_t)sizeof(float));
    rank_try(colo_batch_forward(d.batch, &d.tx, &d.ty, 1, NULL));
    rank_check(has_only(d.y, 20, ex->a[rank], ex->n[rank]));
    /* y as its own gradient: each row goes home; PARTIAL adds up two equal ones */
    rank_try(colo_batch_backward(d.batch, &d.ty, &d.tdx, 1, NULL));
    const float times =
        ex->o.output == COLO_OUTPUT_FULL_SEQ && ex->o.grad == COLO_GRAD_PARTIAL ? 2 : 1;
    for (int64_t i = 0; i < d.src * H; i++)
        rank_check(d.dx[i] == times * d.x[i]);
    colo_batch_destroy(&d.batch);
    rank_check(!d.batch);
    return COLO_OK;
}

T_CASE(sharded_packed_rows_arrive_as_the_example_says)
{
    example_t ex = {.o = {.output = COLO_OUTPUT_SHARDED},
                    .rows = {2, 6},
                    .n = {2, 6},
                    .lacks = {{1, 2}, {2, 1}},
                    .a = {{{0, 0, 0}, {2, 0, 1}},
                          {{0, 1, 0}, {0, 2, 1}, {2, 1, 2}, {2, 2, 3}, {2, 3, 4}, {2, 4, 5}}}};
    assert_ok(t_run_ranks(2, run_example, &ex, sizeof ex));
}

T_CASE(sharded_merged_rows_arrive_as_the_example_says)
{
    example_t ex = {.o = {.output = COLO_OUTPUT_SHARDED, .placement = COLO_PLACEMENT_MERGED},
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
        example_t ex = {.o = {.output = COLO_OUTPUT_FULL_SEQ,
                              .grad = i & 1 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL,
                              .placement = i & 2 ? COLO_PLACEMENT_MERGED : COLO_PLACEMENT_PACKED},
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
    const options_t o = {.output = COLO_OUTPUT_SHARDED, .placement = COLO_PLACEMENT_MERGED};
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
           COLO_PLACEMENT_PACKED, COLO_PLACEMENT_MERGED)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    const options_t o = {.output = COLO_OUTPUT_SHARDED, .placement = placement};
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
        t_comm_stats(world, &before);
        rank_try(colo_batch_forward(batch, NULL, NULL, 1, NULL));
        rank_try(colo_batch_backward(batch, NULL, NULL, 1, NULL));
        t_comm_stats(world, &after);
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
    const options_t o = {.output = COLO_OUTPUT_FULL_SEQ, .max_rows = max_rows};
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

/* ---- tables that differ ---- */

typedef enum table { POS, LENGTH, COUNT, TABLES } table_t;
static const char *const differs[TABLES] = {"pos: rank 1 of", "seq_len: rank 1 of",
                                            "rows: rank 1 of 'world' has 3: 3 0 4 ("};

T_CASE_FOR(2, tables_that_differ_are_a_mismatch_on_all_ranks_and_nothing_is_written, table_t, table,
           POS, LENGTH, COUNT)
{
    const table_t odd = colo_comm_rank(world) == 1 ? table : TABLES;
    const options_t o = {.output = COLO_OUTPUT_SHARDED, .placement = COLO_PLACEMENT_MERGED};
    tables_t t = worked;
    STAND(d);
    t.pos[2] = odd == POS ? 2 : t.pos[2];
    t.len[1] = odd == LENGTH ? 12 : t.len[1];
    t.rows[2] = odd == COUNT ? 4 : t.rows[2];
    rank_try(stand_up(&d, &o, &t, world));
    rank_fails(colo_batch_forward(d.batch, &d.tx, &d.ty, 1, NULL), COLO_ERR_MISMATCH,
               differs[table]);
    rank_check(has_only(d.y, 20, NULL, 0));
    return colo_comm_check(world);
}

/* The second tensor of a call has rows without features, which are in no memory. */
T_CASE_FOR(2, tensors_without_features_need_no_memory, int32_t, check, 0, 1, 2)
{
    const int32_t rank = colo_comm_rank(world);
    const options_t o = {.output = COLO_OUTPUT_FULL_SEQ, .grad = COLO_GRAD_PARTIAL};
    STAND(d);
    rank_try(stand_up(&d, &o, &worked, world));
    const colo_tensor_t none = colo_tensor_host(NULL, COLO_BF16, 2, (int64_t[]){d.src, 0}),
                        none_y = colo_tensor_host(NULL, COLO_BF16, 2, (int64_t[]){8, 0}),
                        tx[2] = {d.tx, none}, ty[2] = {d.ty, none_y};
    rank_try(colo_comm_set_check(world, check));
    rank_try(colo_batch_forward(d.batch, tx, ty, 2, NULL));
    rank_check(d.y[0] == code(0, 0, 0) && d.y[8 * H - 1] == code(2, 4, H - 1));
    rank_try(colo_batch_backward(d.batch, ty, tx, 2, NULL));
    rank_check(d.x[0] == 2 * code(rank ? 2 : 0, 0, 0));
    return COLO_OK;
}

/* ---- what a rank refuses before the first call on a batch ---- */

enum { BAD_TABLES, NO_TABLES, NO_BATCH, UNIFORM_BRIDGE, UNIFORM_CALL, REFUSED, ON_BOTH = 8 };
static const struct {
    colo_status_t status;
    const char *text;
} refused[REFUSED] = {
    [BAD_TABLES] = {COLO_ERR_ARG, "segments: segment 2: src_dp is 5, expected 0..1"},
    [NO_TABLES] = {COLO_ERR_ARG, "segments: segments is NULL"},
    [NO_BATCH] = {COLO_ERR_ARG, "segments: batch is NULL"},
    [UNIFORM_BRIDGE] = {COLO_ERR_ARG, "segments: the bridge was created for uniform batches"},
    [UNIFORM_CALL] = {COLO_ERR_STATE, "bridge: created for ragged batches"}};

/* Rank 1, or both, set a batch in a way that is refused. Then a step that is right. */
T_CASE_FOR(2, a_batch_that_one_rank_refuses_is_an_error_on_all_ranks, int, which, BAD_TABLES,
           NO_TABLES, NO_BATCH, UNIFORM_BRIDGE, UNIFORM_CALL, ON_BOTH + BAD_TABLES,
           ON_BOTH + NO_TABLES, ON_BOTH + NO_BATCH, ON_BOTH + UNIFORM_BRIDGE,
           ON_BOTH + UNIFORM_CALL)
{
    const int32_t rank = colo_comm_rank(world);
    const options_t o = {.output = COLO_OUTPUT_SHARDED, .placement = COLO_PLACEMENT_MERGED};
    tables_t t = worked;
    colo_segments_t s = segments_of(&t);
    float x[5 * H], y[10 * H];
    const colo_tensor_t tx = tensor(x, fill_x(x, rank)), ty = tensor(y, 10);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL, *uniform = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    const bool odd = rank == 1 || which >= ON_BOTH;
    const int what = odd ? which % ON_BOTH : REFUSED;
    rank_try(make(&b, &o, world));
    rank_try(make_uniform(&uniform, world));
    t.src_dp[2] = what == BAD_TABLES ? 5 : 1;
    blank(y, 10);
    colo_status_t st = what == UNIFORM_CALL
                           ? colo_bridge_forward(b, &tx, &ty, NULL)
                           : colo_bridge_set_segments(what == UNIFORM_BRIDGE ? uniform : b,
                                                      what == NO_TABLES ? NULL : &s,
                                                      what == NO_BATCH ? NULL : &batch);
    if (st == COLO_OK)
        st = colo_batch_forward(batch, &tx, &ty, 1, NULL);
    rank_fails(st, odd ? refused[which % ON_BOTH].status : COLO_ERR_PEER,
               refused[which % ON_BOTH].text);
    rank_check(has_only(y, 10, NULL, 0) && colo_comm_check(world) == COLO_OK);
    colo_batch_destroy(&batch);
    t = worked;
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    return colo_batch_forward(batch, &tx, &ty, 1, NULL);
}

/* ---- COLO_CHECK=2 ---- */

T_CASE_FOR(2, a_disjoint_gradient_is_verified_in_rows_of_other_ranks, bool, foreign, false, true)
{
    const int32_t rank = colo_comm_rank(world);
    const options_t o = {.output = COLO_OUTPUT_FULL_SEQ,
                         .grad = COLO_GRAD_DISJOINT,
                         .placement = COLO_PLACEMENT_MERGED};
    STAND(d);
    /* rows of the batch on the axis of 20, by owner: e0 at 2, 3, 4 and e2 at 13 .. 17 */
    static const int64_t index[8] = {2, 3, 4, 13, 14, 15, 16, 17};
    static const int32_t owner[8] = {0, 1, 1, 0, 1, 1, 1, 1};
    rank_try(stand_up(&d, &o, &worked, world)); /* the text has a gradient on all ranks */
    rank_try(colo_comm_set_check(world, 2));
    for (int i = 0; i < 8; i++)
        for (int64_t k = 0; k < H; k++)
            d.y[index[i] * H + k] = owner[i] == rank ? (float)i : 0;
    if (foreign && rank == 0)
        d.y[17 * H + 1] = 1;
    const colo_status_t st = colo_batch_backward(d.batch, &d.ty, &d.tdx, 1, NULL);
    rank_check(st == (!foreign ? COLO_OK : rank ? COLO_ERR_PEER : COLO_ERR_CONTRACT));
    rank_check(!foreign || says("rank 0: d_y[0] was declared DISJOINT, but row 17"));
    for (int64_t i = 0; !foreign && i < (rank ? 5 : 3); i++)
        rank_check(d.dx[i * H] == (float)(rank ? i + 3 : i));
    rank_check(!foreign || has_only(d.dx, 5, NULL, 0));
    stand_end(&d);
    return colo_comm_check(world);
}

/* dp=1: both ranks hold the same x along tp, and the same d_y along tp of the LLM. */
T_CASE_FOR(2, replicas_that_differ_in_rows_of_the_batch_are_refused, bool, x_differs, false, true)
{
    const int32_t rank = colo_comm_rank(world);
    float x[8 * H] = {0}, y[20 * H] = {0};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    tables_t t = worked;
    memset(t.src_dp, 0, sizeof t.src_dp);
    const colo_segments_t s = segments_of(&t);
    T_BRIDGE_CONFIG(c, "tp=2,dp=1", "tp=2,dp=1", .shape = {.features = H}, .ragged = true,
                    .placement = COLO_PLACEMENT_MERGED);
    rank_try(colo_bridge_create(&b, &c, world));
    rank_try(colo_comm_set_check(world, 2));
    rank_try(colo_bridge_set_segments(b, &s, &batch));
    y[0] = (float)rank; /* text: may differ */
    const colo_tensor_t tx = tensor(x, 8), ty = tensor(y, 20);
    rank_try(colo_batch_forward(batch, &tx, &ty, 1, NULL));
    rank_try(colo_batch_backward(batch, &ty, &tx, 1, NULL));
    *(x_differs ? &x[3] : &y[13 * H]) = (float)rank;
    rank_check((x_differs ? colo_batch_forward(batch, &tx, &ty, 1, NULL)
                          : colo_batch_backward(batch, &ty, &tx, 1, NULL)) == COLO_ERR_CONTRACT);
    rank_check(says(x_differs ? "the same block of x" : "the same block of d_y"));
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    return colo_comm_check(world);
}

/* ---- uses ---- */

typedef struct refused_config {
    const char *text;
    colo_status_t status;
    colo_bridge_config_t c;
    const char *src, *dst; /* NULL: dp=2 to cp=2,dp=1 */
    bool split_features;
} refused_config_t;

static const refused_config_t refused_configs[] = {
    {"with COLLECTIVE", COLO_ERR_ARG, .c = {.algo = COLO_ALGO_COLLECTIVE}},
    {"with axes 'bh', expected 'th'", COLO_ERR_ARG, .c = {.axes = "bh"}},
    {"with axes 'sbh', expected 'th'", COLO_ERR_ARG, .c = {.axes = "sbh"}},
    {"a shape of 4 samples, 0 rows", COLO_ERR_ARG, .c = {.shape = {.samples = 4}}},
    {"0 samples, 4 rows", COLO_ERR_ARG, .c = {.shape = {.rows = 4}}},
    {"placement 2", COLO_ERR_ARG, .c = {.placement = (colo_placement_t)2}},
    {"max_rows -1", COLO_ERR_ARG, .c = {.max_rows = -1}},
    {"exceed 63 bits", COLO_ERR_ARG, .c = {.max_rows = INT64_MAX / 4}},
    {"batches in CUDA memory", COLO_ERR_UNBUILT, .c = {.mem = COLO_MEM_CUDA}},
    {"7 features in 2 blocks", COLO_ERR_LAYOUT, .c = {.shape = {.features = 7}}, .dst = "tp=2,dp=1",
     .split_features = true},
    {"splits rows ZIGZAG over 'cp'", COLO_ERR_LAYOUT, .c = {.mem = COLO_MEM_HOST}, .src = "cp=2",
     .dst = "cp=2"}};

T_CASE_ON(2, configs_that_ragged_bridges_cannot_have_are_refused)
{
    colo_layout_t src, dst;
    for (size_t i = 0; i < sizeof refused_configs / sizeof refused_configs[0]; i++) {
        const refused_config_t *r = &refused_configs[i];
        colo_bridge_config_t c = r->c;
        colo_bridge_t *b = NULL;
        rank_try(t_layouts(r->src ? r->src : "dp=2", r->dst ? r->dst : "cp=2,dp=1", &src, &dst));
        if (r->split_features)
            rank_try(colo_layout_split(&dst, COLO_AXIS_FEATURES, "tp", COLO_SPLIT_BLOCK));
        c.struct_size = sizeof c;
        c.src = &src;
        c.dst = &dst;
        c.ragged = true;
        c.shape.features = c.shape.features ? c.shape.features : H;
        rank_check(colo_bridge_create(&b, &c, world) == r->status && !b);
        if (!says(r->text))
            fprintf(stderr, "config %d: %s\n", (int)i, colo_last_error());
        rank_check(says(r->text));
    }
    return colo_comm_check(world); /* it lives on */
}

/* Other placements or max_rows on a rank: all learn it at create. */
T_CASE_ON(2, placements_that_differ_are_a_mismatch_at_create)
{
    colo_bridge_t *b = NULL;
    const options_t o = {.output = COLO_OUTPUT_SHARDED,
                         .placement =
                             colo_comm_rank(world) ? COLO_PLACEMENT_MERGED : COLO_PLACEMENT_PACKED};
    rank_check(make(&b, &o, world) == COLO_ERR_MISMATCH && !b);
    rank_check(says("ragged: rank 1 of"));
    return colo_comm_check(world);
}

T_CASE_ON(2, wrong_uses_are_refused_and_the_bridge_lives)
{
    float x[5 * H];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    options_t o = {.output = COLO_OUTPUT_FULL_SEQ, .max_rows = 4, .no_grad = true};
    tables_t t = worked;
    colo_segments_t s = segments_of(&t);
    const colo_shape_t shape = {1, 1, 1, 0};
    const colo_tensor_t tx = tensor(x, 5);
    rank_try(make(&b, &o, world));
    rank_fails(colo_bridge_set_segments(b, &s, &batch), COLO_ERR_ARG,
               "source replica 1 has 5 rows on a rank, expected at "
               "most max_rows=4");
    t.pos[0] = 11;
    rank_fails(colo_bridge_set_segments(b, &s, &batch), COLO_ERR_ARG,
               "segment 0: row 1 of 3 is at position 12");
    rank_check(!batch);
    t.pos[0] = 2;
    t.rows[2] = 4;
    rank_try(colo_bridge_set_segments(b, &s, &batch)); /* the bridge lives */
    rank_check(colo_batch_backward(batch, NULL, NULL, 1, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_forward(b, &tx, &tx, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_backward(b, &tx, &tx, NULL) == COLO_ERR_STATE);
    rank_check(colo_bridge_reshape(b, &shape) == COLO_ERR_STATE);
    rank_fails(colo_batch_forward(NULL, NULL, NULL, 1, NULL), COLO_ERR_ARG,
               "batch is NULL, expected one that colo_bridge_set_segments() or ");
    rank_check(colo_bridge_set_segments(NULL, &s, &batch) == COLO_ERR_ARG);
    colo_batch_destroy(&batch);
    colo_batch_destroy(&batch);
    colo_batch_destroy(NULL);
    rank_check(colo_batch_plan(NULL) == NULL);
    colo_bridge_rows(NULL, NULL, NULL);
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    return colo_comm_check(world);
}

/* Masks travel in forward, and have no sum. */
T_CASE_ON(2, integers_travel_but_are_not_added_up)
{
    int32_t x[5] = {1, 2, 3, 4, 5}, y[8] = {0}, dx[5] = {-7};
    const options_t o = {.output = COLO_OUTPUT_FULL_SEQ};
    STAND(d);
    rank_try(stand_up(&d, &o, &worked, world));
    const colo_tensor_t tx = colo_tensor_host(x, COLO_I32, 2, (int64_t[]){d.src, 1}),
                        ty = colo_tensor_host(y, COLO_I32, 2, (int64_t[]){8, 1}),
                        tdx = colo_tensor_host(dx, COLO_I32, 2, (int64_t[]){d.src, 1});
    rank_try(colo_batch_forward(d.batch, &tx, &ty, 1, NULL));
    for (int64_t i = 0; i < 8; i++)
        rank_check(y[i] == (i < 3 ? i + 1 : i - 2));
    const colo_status_t st = colo_batch_backward(d.batch, &ty, &tdx, 1, NULL);
    rank_check(st == COLO_ERR_ARG || st == COLO_ERR_PEER); /* the other rank failed first */
    rank_check(says("d_y[0] is i32"));
    rank_check(dx[0] == -7);
    return COLO_OK;
}

T_MAIN("bridge/ragged")
