/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_exchange.c - what a bridge carries, on in-process ranks: the worked maps, both directions,
 * every contract of the gradient, memory orders, dtypes, empty ranks, several outstanding forwards,
 * reshape. Values name their place; == on every byte.
 */
#include "harness/harness.h"

#include "bridge/run/run.h"
#include "harness/bridge_case.h"

/* a case under all four contracts */
static void run_kinds(t_case_t c)
{
    for (int k = 0; k < T_KINDS; k++) {
        t_case_kind(&c, k);
        t_case_later(&c);
    }
    t_run_rest();
}

/* ---- layouts ---- */

T_CASE(maps_carry_what_the_oracle_says)
{
    static const struct {
        const char *src, *dst;
        int64_t b, n, h;
    } maps[] = {
        /* map a fans in with context ranks */
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3},
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 4, 4, 1},
        /* map b fans out with context ranks */
        {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 3},
        /* plain fan out and fan in */
        {"tp=4,dp=2", "tp=2,dp=4", 8, 5, 3},
        {"tp=2,dp=4", "tp=4,dp=2", 8, 5, 3},
        {"dp=8", "tp=8,dp=1", 8, 3, 2},
        {"tp=8,dp=1", "dp=8", 8, 3, 2},
        /* maps with an offset start at rank 4 */
        {"tp=2,dp=2@4", "tp=1,dp=4@4", 8, 5, 3},
        {"tp=2,dp=2@4", "cp=2,dp=2@4", 4, 4, 3},
        /* equal batches sum over context only */
        {"tp=4,dp=2", "tp=2,cp=2,dp=2", 4, 8, 3},
        {"tp=3,dp=2", "tp=1,cp=3,dp=2", 4, 6, 3},
        {"tp=2,dp=2", "tp=2,dp=2", 4, 3, 2},
        {"tp=4", "cp=4", 2, 8, 2},
        /* dp that does not divide */
        {"tp=2,dp=3", "tp=3,dp=2", 6, 4, 2},
        {"tp=2,dp=3", "tp=3,dp=2", 7, 4, 2},
        {"tp=2,cp=1,dp=6", "cp=3,dp=4", 11, 6, 2},
        /* context ranks on the source side */
        {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 8, 2},
        {"cp=4,dp=2", "tp=2,cp=2,dp=2", 4, 8, 2},
        {"cp=3,dp=2", "cp=2,dp=3", 5, 12, 2},
        /* pipeline stages hold at the last and the first */
        {"tp=2,dp=4", "tp=2,pp=2,dp=2", 8, 4, 2},
        {"tp=2,pp=2,dp=2", "tp=2,cp=2,dp=2", 4, 4, 2},
        {"pp=4,dp=2", "dp=2,pp=4", 4, 4, 2},
        /* any dim order and extra dims */
        {"dp=4,tp=2", "dp=2,tp=2,cp=2", 8, 8, 2},
        {"dp=2,tp=4", "cp=2,dp=4,tp=1", 8, 8, 2},
        {"tp=2,ep=2,dp=2", "xp=2,cp=2,dp=2", 4, 8, 2},
        {"ep=8", "xp=4,cp=2", 4, 8, 2},
        /* grids of other sizes and places */
        {"tp=2,dp=2", "tp=2,cp=2,dp=2@4", 4, 4, 2}, /* no rank in common */
        {"tp=2,cp=2,dp=2", "dp=3@2", 5, 4, 2},
        {"dp=1", "dp=5@1", 5, 4, 2},
        /* ranks without samples take part */
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 3, 4, 2},
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 1, 4, 2},
        {"dp=8", "cp=2,dp=4", 2, 4, 2},
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 0, 4, 2},
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 4, 0, 2},
        {"tp=2,dp=4", "tp=2,cp=2,dp=2", 4, 4, 0},
    };
    for (size_t i = 0; i < sizeof maps / sizeof maps[0]; i++)
        run_kinds(t_between(maps[i].src, maps[i].dst, maps[i].b, maps[i].n, maps[i].h));
}

/* ---- rows ---- */

T_CASE(whole_sequences_with_partial_gradients_may_have_any_length)
{
    for (int64_t n = 1; n <= 9; n++) {
        t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 4, n, 2);
        t_case_later(&c);
        c.dst = t_side("cp=8", false);
        t_case_later(&c);
    }
    t_run_rest();
}

T_CASE(sequence_parallel_ranks_hold_their_block)
{
    t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2);
    t_side_split(&c.dst, 1, "tp", REF_BLOCK, false);
    run_kinds(c);
    t_side_split(&c.src, 1, "tp", REF_BLOCK, false);
    run_kinds(c);
    c = t_between("tp=4,dp=2", "tp=4,dp=2", 4, 8, 2);
    t_side_split(&c.src, 1, "tp", REF_BLOCK, false);
    run_kinds(c);
}

T_CASE(rows_go_where_their_llm_position_goes)
{
    static const int64_t shuffled[6] = {9, 2, 14, 3, 8, 0};
    t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 4, 4, 2);
    c.dst.positions = 8; /* image first: rows 0..3 belong to cp 0 0 1 1 */
    run_kinds(c);
    c.dst.map = REF_OFFSET;
    c.dst.map_offset = 4; /* image last: cp 1 1 0 0 */
    run_kinds(c);
    c = t_between("tp=2,dp=4", "cp=4,dp=2", 4, 6, 2);
    c.dst.map = REF_TABLE;
    c.dst.table = shuffled;
    c.dst.positions = 16;
    run_kinds(c);
    c.src = t_side("cp=2,dp=4", true);
    c.src.map = REF_TABLE;
    c.src.table = shuffled;
    c.src.positions = 16;
    run_kinds(c);
}

T_CASE(features_in_blocks)
{
    t_case_t c = t_between("tp=2,dp=4", "tp=4,dp=2", 8, 4, 6);
    t_side_split(&c.dst, 2, "tp", REF_BLOCK, false);
    run_kinds(c);
    t_side_split(&c.src, 2, "tp", REF_BLOCK, false);
    run_kinds(c);
}

/* As DTensor shards: uneven parts, empty ones, two splits of one axis. */
T_CASE(parts_by_ceil_arrive_whatever_they_divide)
{
    for (int axis = 0; axis < 3; axis++)
        for (int64_t length = 1; length <= 11; length += 2) {
            t_case_t c = t_between("ep=4,xp=2", "xp=3,ep=2", axis == 0 ? length : 3,
                                   axis == 1 ? length : 2, axis == 2 ? length : 2);
            t_side_split(&c.src, axis, "ep", REF_CEIL, false);
            t_side_split(&c.dst, axis, "xp", REF_CEIL, axis == 1);
            run_kinds(c);
            t_side_split(&c.src, axis, "xp", REF_CEIL, false);
            t_side_split(&c.dst, axis, "ep", REF_CEIL, false);
            run_kinds(c);
        }
}

/* [samples, features], as a head's weight: both are cut, neither divides. */
T_CASE(tensors_without_rows_have_two_axes)
{
    for (int64_t n = 1; n <= 7; n += 2)
        for (int stride = 0; stride < T_STRIDE_COUNT; stride++) {
            t_case_t c = T_BETWEEN("ep=4,tp=2", "tp=4,dp=2", n, 1, 5, .axes = "bh",
                                   .stride = (t_stride_t)stride);
            t_side_split(&c.src, 0, "ep", REF_CEIL, false);
            t_side_split(&c.src, 2, "tp", REF_CEIL, false);
            t_side_split(&c.dst, 2, "tp", REF_CEIL, false);
            run_kinds(c);
        }
}

/* ---- memory and dtypes ---- */

T_CASE(every_memory_order_and_stride)
{
    static const char *const axes[] = {"bsh", "sbh", "th", "hsb", "shb", "bhs", "hbs"};
    const int64_t n = sizeof axes / sizeof axes[0];
    for (int64_t a = 0; a < n; a++)
        for (int stride = 0; stride < T_STRIDE_COUNT; stride++)
            for (int map = 0; map < 3; map++) {
                if (T_LEFT_OUT({a, n}, {stride, T_STRIDE_COUNT}, {map, 3}))
                    continue;
                t_case_t c = map == 0   ? t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3)
                             : map == 1 ? t_between("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 4, 3)
                                        : t_between("cp=2,dp=3", "cp=3,dp=2", 5, 12, 2);
                c.axes = axes[a];
                c.stride = (t_stride_t)stride;
                run_kinds(c);
            }
}

T_CASE(float_dtypes_move_and_sum)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};
    for (size_t i = 0; i < 4; i++) {
        t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 5, .dtype = dtypes[i]);
        run_kinds(c);
        c.dst = t_side("cp=8", false);
        c.shape = (ref_shape_t){4, 16, 5};
        run_kinds(c);
    }
}

T_CASE(integer_dtypes_move)
{
    static const colo_dtype_t dtypes[] = {COLO_I8, COLO_U8, COLO_I16, COLO_I32, COLO_I64};
    for (size_t i = 0; i < 5; i++) {
        t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 5, .dtype = dtypes[i],
                               .output = COLO_OUTPUT_SHARDED);
        t_case_later(&c);
        c.output = COLO_OUTPUT_FULL_SEQ;
        c.grad = COLO_GRAD_DISJOINT;
        t_case_later(&c);
        c.no_grad = true;
        t_case_later(&c);
    }
    t_run_rest();
}

/* ---- empty and outside ---- */

T_CASE(a_rank_outside_both_grids_constructs_and_does_nothing)
{
    t_case_t c = T_BETWEEN("tp=2,dp=2@1", "cp=2,dp=2@1", 4, 4, 2, .world = 7);
    c.steps = 2; /* odd steps pass NULL where nothing is held */
    run_kinds(c);
}

T_CASE(nothing_and_null_are_the_same_tensor)
{
    t_case_t c = T_BETWEEN("tp=2,pp=2,dp=2", "tp=2,pp=2,dp=2", 4, 4, 2, .steps = 4);
    run_kinds(c);
}

/* ---- several at once, reshape, frozen ---- */

T_CASE_FOR(8, several_forwards_may_be_outstanding, int, kind, 0, 1, 2, 3)
{
    t_case_t given = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
    const t_case_t *c = &given;
    t_case_kind(&given, kind);
    colo_bridge_t *bridge = NULL;
    t_buffer_t x[3], y[3], dy[3], dx[3];
    rank_try(t_case_bridge(&bridge, c, world, COLO_MEM_HOST));
    int64_t rank = colo_comm_rank(world);
    for (int i = 0; i < 3; i++) {
        rank_try(t_case_tensor(c, T_X, rank, i, true, &x[i]));
        rank_try(t_case_tensor(c, T_Y, rank, i, false, &y[i]));
        rank_try(colo_bridge_forward(bridge, &x[i].t, &y[i].t, NULL));
    }
    for (int i = 2; i >= 0; i--) {
        rank_try(t_case_tensor(c, T_DY, rank, i, true, &dy[i]));
        rank_try(t_case_tensor(c, T_DX, rank, i, false, &dx[i]));
        rank_try(colo_bridge_backward(bridge, &dy[i].t, &dx[i].t, NULL));
    }
    for (int i = 0; i < 3; i++) {
        rank_try(t_case_compare(c, T_Y, rank, i, &y[i]));
        rank_try(t_case_compare(c, T_DX, rank, i, &dx[i]));
        t_buffer_free(&x[i]);
        t_buffer_free(&y[i]);
        t_buffer_free(&dy[i]);
        t_buffer_free(&dx[i]);
    }
    colo_bridge_destroy(&bridge);
    rank_check(!bridge);
    return COLO_OK;
}

T_CASE_ON(8, two_bridges_share_a_communicator)
{
    t_case_t c[2] = {t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3),
                     t_between("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 4, 2)};
    c[1].output = COLO_OUTPUT_SHARDED;
    c[1].dtype = COLO_BF16;
    colo_bridge_t *bridge[2] = {NULL, NULL};
    int64_t rank = colo_comm_rank(world);
    for (int i = 0; i < 2; i++) {
        rank_try(t_case_bridge(&bridge[i], &c[i], world, COLO_MEM_HOST));
    }
    for (int i = 0; i < 6; i++)
        rank_try(t_case_step(bridge[i % 2], rank, &c[i % 2], i));
    colo_bridge_destroy(&bridge[0]);
    rank_try(t_case_step(bridge[1], rank, &c[1], 7));
    colo_bridge_destroy(&bridge[1]);
    return COLO_OK;
}

T_CASE_FOR(8, a_bridge_takes_another_batch_or_length_and_comes_back, int, kind, 0, 1, 2, 3)
{
    /* positions of 0: identity over the rows */
    static const colo_shape_t shapes[] = {{4, 8, 3, 0},  {16, 12, 3, 0}, {3, 4, 5, 0},
                                          {8, 6, 3, 12}, {0, 4, 3, 0},   {8, 8, 3, 0}};
    t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
    t_case_kind(&c, kind);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    int64_t rank = colo_comm_rank(world);
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    uint64_t first = colo_plan_hash(colo_bridge_plan(bridge));
    rank_try(t_case_step(bridge, rank, &c, 0));
    for (int i = 0; i < 6; i++) {
        colo_shape_t s = shapes[i];
        colo_comm_stats_t before, after;
        t_comm_stats(world, &before);
        rank_try(colo_bridge_reshape(bridge, &s));
        t_comm_stats(world, &after);
        rank_check(memcmp(&before, &after, sizeof before) == 0); /* local: no communication */
        c.shape = (ref_shape_t){s.samples, s.rows, s.features};
        c.dst.positions = s.positions;
        rank_try(t_case_step(bridge, rank, &c, i + 1));
        /* a shape that cannot be: refused, and the old one stays */
        colo_status_t st;
        if (c.output == COLO_OUTPUT_SHARDED ||
            c.grad == COLO_GRAD_DISJOINT) { /* else no row is cut */
            s.rows = 7;
            s.positions = 0;
            st = colo_bridge_reshape(bridge, &s);
            rank_check(st == COLO_ERR_LAYOUT);
        }
        s.rows = -1;
        st = colo_bridge_reshape(bridge, &s);
        rank_check(st == COLO_ERR_ARG);
        st = colo_bridge_reshape(bridge, NULL);
        rank_check(st == COLO_ERR_ARG);
        rank_try(t_case_step(bridge, rank, &c, i + 9));
    }
    rank_check(colo_plan_hash(colo_bridge_plan(bridge)) == first); /* back where it began */
    return COLO_OK;
}

/* Any shapes after the largest one: the same bytes as ever, in the memory that is there. */
T_CASE_FOR(8, a_shape_that_fits_takes_the_memory_that_is_there, int, kind, 0, 1, 2, 3)
{
    t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 16, 16, 5);
    t_case_kind(&c, kind);
    const colo_shape_t most = {c.shape.b, c.shape.n, c.shape.h, 0};
    const int64_t rank = colo_comm_rank(world);
    uint64_t seed = 20261162; /* the same on all ranks */
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    c.shape = (ref_shape_t){4, 4, 1};
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    bridge->lazy = true; /* as over registered memory: the first call that is staged makes it */
    rank_try(colo_bridge_reshape(bridge, &most));
    c.shape = (ref_shape_t){most.samples, most.rows, most.features};
    rank_try(t_case_step(bridge, rank, &c, 99));
    bridge->lazy = false;
    const size_t bytes = colo_bridge_workspace_size(bridge);
    const void *sums = bridge->memory.partials.data;
    for (int i = 0; i < t_scaled(12); i++) {
        c.shape =
            (ref_shape_t){t_below(&seed, most.samples + 1), 4 + 4 * t_below(&seed, most.rows / 4),
                          1 + t_below(&seed, most.features)};
        rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
        rank_try(t_case_step(bridge, rank, &c, i));
        rank_check(colo_bridge_workspace_size(bridge) == bytes &&
                   bridge->memory.partials.data == sums);
    }
    return COLO_OK;
}

T_CASE_ON(8, a_frozen_source_has_no_backward)
{
    t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3, .no_grad = true);
    T_STAND(s);
    rank_try(t_stand_make(&s, &c, world));
    rank_try(t_stand_step(&s, 0));
    rank_check(t_stand_call(&s, COLO_PASS_BACKWARD) == COLO_ERR_STATE && untouched(&s.t[T_DX]));
    return t_stand_step(&s, 1); /* the refusal broke nothing */
}

/* ---- what == hides ---- */

T_CASE_FOR(8, movement_keeps_negative_zero, int, kind, 0, 1, 2, 3)
{
    t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2);
    T_STAND(s);
    t_case_kind(&c, kind);
    rank_try(t_stand_make(&s, &c, world));
    for (int role = 0; role < 4; role++)
        for (int64_t i = 0; i < colo_tensor_count(&s.t[role].t); i++)
            ((float *)s.t[role].t.data)[i] = role == T_X || role == T_DY ? -0.0f : 7.0f;
    bool moved = c.output == COLO_OUTPUT_SHARDED || c.grad == COLO_GRAD_DISJOINT;
    for (int pass = 0; pass < 2; pass++) {
        rank_try(t_stand_call(&s, (colo_pass_t)pass));
        const colo_tensor_t *out = &t_stand_out(&s, (colo_pass_t)pass)->t;
        for (int64_t i = 0; i < colo_tensor_count(out); i++) {
            uint32_t bits;
            memcpy(&bits, (float *)out->data + i, 4);
            rank_check(bits == 0x80000000u || (bits == 0 && pass == COLO_PASS_BACKWARD && !moved));
        }
    }
    return COLO_OK;
}

/* Sums whose value depends on the order: context ranks must be added in rank order. */
static float addend_value(int64_t addend, int64_t i)
{
    uint64_t s = (uint64_t)(addend * 1000003 + i * 7919 + 17);
    float v = (float)(t_uniform(&s) - 0.5);
    return addend % 2 ? v * 1e6f : v;
}

typedef struct order_case {
    const char *src, *dst;
    ref_shape_t shape;
    int64_t addends;
} order_case_t;

T_CASE_FOR(8, partial_sums_are_made_in_rank_order, order_case_t, a,
           {"tp=4,dp=2", "cp=4,dp=2", {4, 8, 3}, 4}, {"dp=8", "cp=8", {8, 16, 3}, 8},
           {"dp=6", "dp=2,cp=3", {6, 6, 3}, 3})
{
    const t_case_t given = t_between(a.src, a.dst, a.shape.b, a.shape.n, a.shape.h);
    const t_case_t *c = &given;
    T_ENDS(ref_part_free) ref_part_t give = {0}, take = {0};
    T_STAND(s);
    rank_try(t_stand_make(&s, c, world));
    ref_part_make(&give, &c->dst, c->shape, s.rank, true);
    ref_part_make(&take, &c->src, c->shape, s.rank, false);
    int64_t row = c->shape.n * c->shape.h;
    for (int64_t i = 0; i < ref_part_count(&give); i++)
        ((float *)s.t[T_DY].t.data)[i] = addend_value(give.addend, give.b[0] * row + i);
    rank_try(t_stand_call(&s, COLO_PASS_BACKWARD));
    for (int64_t i = 0; i < ref_part_count(&take); i++) {
        volatile float want = addend_value(0, take.b[0] * row + i);
        for (int64_t addend = 1; addend < a.addends; addend++)
            want = want + addend_value(addend, take.b[0] * row + i);
        rank_check(((float *)s.t[T_DX].t.data)[i] == want);
    }
    return COLO_OK;
}

T_MAIN("bridge/exchange")
