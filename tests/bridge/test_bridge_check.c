/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_check.c - what happens if ranks disagree about a bridge, or bring nonsense, when it
 * is made, and if they stay away: which rank gets which status, what the error message names, and
 * that the comm lives on. And the statistics: one exchange a direction, of exactly the plan's
 * bytes. test_call_faults.c has calls with wrong tensors, test_bridge_order.c different calls.
 */
#include "harness/harness.h"

#include <time.h>

#include "harness/bridge_case.h"

#define ODD_RANK 2

/* One node, also if the ranks run on two hosts: a direction is one exchange. */
static t_case_t make(const char *src, const char *dst, int64_t b, int64_t n, int64_t h)
{
    return T_BETWEEN(src, dst, b, n, h, .ranks_per_node = 8);
}

static t_case_t usual(void)
{
    return make("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
}

/* ---- agreement at create ---- */

typedef void change_fn(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst);

/* What the odd rank brings: a member of another value, or what a function makes of it all. */
typedef struct disagreement {
    size_t offset, size;
    int64_t value;
    change_fn *change;
    colo_status_t status;
    const char *error_message; /* of a mismatch, the same on all ranks; of others: NULL */
} disagreement_t;

static int32_t check_level;

#define OFFSET(member) offsetof(colo_bridge_config_t, member)
#define SIZE(member) sizeof(((colo_bridge_config_t *)0)->member)
#define SET(member, v) OFFSET(member), SIZE(member), (int64_t)(v), NULL
#define BY(function) 0, 0, 0, function

static colo_status_t disagree_rank(colo_comm_t *world, void *arg)
{
    const disagreement_t *d = arg;
    const t_case_t usually = usual();
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *sentinel = (colo_bridge_t *)(uintptr_t)0x40, *bridge = sentinel;
    const bool odd = colo_comm_rank(world) == ODD_RANK;
    rank_try(colo_comm_set_check(world, check_level));
    rank_try(t_case_config(&usually, &src, &dst, &config));
    if (odd && d->change)
        d->change(&config, &src, &dst);
    else if (odd)
        memcpy((char *)&config + d->offset, &d->value, d->size); /* the low bytes */
    rank_fails(colo_bridge_create(&bridge, config.struct_size == 1 ? NULL : &config, world),
               odd || d->error_message ? d->status : COLO_ERR_PEER,
               d->error_message ? d->error_message : "");
    rank_check(bridge == sentinel);
    rank_check(colo_comm_check(world) == COLO_OK);
    return t_case_on(world, &usually); /* an agreement that failed leaves the comm alive */
}

static void disagree(const disagreement_t *list, size_t n, int32_t check)
{
    check_level = check;
    for (size_t i = 0; i < n; i++) {
        disagreement_t d = list[i];
        if (t_run_ranks(8, disagree_rank, &d, sizeof d) < 0)
            fail_msg("change %zu at COLO_CHECK=%d: %s", i, check, colo_last_error());
    }
}

static void other_dtype(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->dtype = COLO_I32;
    c->grad = COLO_GRAD_DISJOINT;
}

static void other_grid(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    ref_side_t side = t_side("dp=4,tp=2", true);
    (void)t_layout(src, &side);
}

static void other_split(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    (void)colo_layout_split(dst, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK);
}

static void other_map(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    (void)colo_layout_map_offset(dst, 4, 16);
}

static void other_table(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    static const int64_t swapped[] = {1, 0, 2, 3, 4, 5, 6, 7};
    (void)colo_layout_map_table(dst, swapped, 8, 8);
}

static void other_stage(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    colo_layout_clear(dst, COLO_AXIS_ROWS);
    (void)colo_layout_stage(dst, "cp", 0);
}

T_CASE(create_names_the_field_and_both_values_on_every_rank)
{
    const disagreement_t list[] = {
        {SET(shape.samples, 12), COLO_ERR_MISMATCH,
         "bridge create: samples: rank 2 of 'world' has 12, rank 0 8"},
        {SET(shape.rows, 12), COLO_ERR_MISMATCH,
         "bridge create: rows: rank 2 of 'world' has 12, rank 0 8"},
        {SET(shape.features, 4), COLO_ERR_MISMATCH,
         "bridge create: features: rank 2 of 'world' has 4, rank 0 3"},
        {BY(other_dtype), COLO_ERR_MISMATCH,
         "bridge create: dtype: rank 2 of 'world' has i32, rank 0 f32; grad: rank 2"},
        {SET(output, COLO_OUTPUT_SHARDED), COLO_ERR_MISMATCH,
         "bridge create: output: rank 2 of 'world' has SHARDED, rank 0 FULL_SEQ"},
        {SET(grad, COLO_GRAD_DISJOINT), COLO_ERR_MISMATCH,
         "bridge create: grad: rank 2 of 'world' has DISJOINT, rank 0 PARTIAL"},
        {SET(no_grad, true), COLO_ERR_MISMATCH,
         "bridge create: grad: rank 2 of 'world' has no_grad, rank 0 PARTIAL"},
        {SET(ranks_per_node, 4), COLO_ERR_MISMATCH,
         "bridge create: ranks_per_node: rank 2 of 'world' has 4, rank 0 8"},
        {SET(algo, COLO_ALGO_COLLECTIVE), COLO_ERR_MISMATCH,
         "bridge create: algo: rank 2 of 'world' has COLLECTIVE, rank 0 EXACT"},
        {BY(other_grid), COLO_ERR_MISMATCH,
         "bridge create: src: rank 2 of 'world' has dp=4,tp=2, rank 0 tp=2,dp=4"},
        {BY(other_split), COLO_ERR_MISMATCH,
         "bridge create: dst splits: rank 2 of 'world' has samples over dp, rows over "
         "cp zigzag, rows over tp, rank 0 samples over dp, rows over cp zigzag"},
        {BY(other_map), COLO_ERR_MISMATCH,
         "bridge create: dst positions: rank 2 of 'world' has rows from 4 of 16, rank 0 "
         "rows from 0"},
        {BY(other_table), COLO_ERR_MISMATCH,
         "bridge create: dst positions: rank 2 of 'world' has a table of 8 rows in 8: "
         "1 0 2 3 4 5 6 7 ("},
        {BY(other_stage), COLO_ERR_MISMATCH,
         "cp zigzag; dst stage: rank 2 of 'world' has cp 0, rank 0 any"},
    };
    for (int32_t check = 1; check <= 2; check++)
        disagree(list, sizeof list / sizeof list[0], check);
}

/* Grids of many dims with long names, whose text a field cuts off before they differ. */
T_CASE_ON(4, create_compares_what_a_field_does_not_show)
{
    char spec[600] = "dp=2";
    const bool odd = colo_comm_rank(world) == ODD_RANK;
    colo_grid_t grid;
    colo_layout_t side;
    colo_bridge_t *bridge = NULL;
    for (int i = 0; i < 15; i++)
        sprintf(spec + strlen(spec), ",long_dim_name%02d=%d", i, i == (odd ? 13 : 14) ? 2 : 1);
    rank_check(strlen(spec) > 256);
    rank_try(colo_grid_parse(&grid, spec, 4));
    rank_try(colo_layout_init_src_extra(&side, &grid, "long_dim_name13-long_dim_name14"));
    for (int i = 0; i < 9; i++)
        rank_try(colo_layout_split(&side, i % 3, grid.name[1 + i], COLO_SPLIT_BLOCK));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &side, .dst = &side,
                                   .shape = {4, 2, 2, 0}, .dtype = COLO_F32};
    rank_check(colo_bridge_create(&bridge, &config, world) == COLO_ERR_MISMATCH && !bridge);
    rank_check(says("bridge create: rank 2 of 'world' differs from rank 0 in what is too long"));
    return colo_comm_barrier(world, NULL);
}

static void forgotten_layout(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    memset(src, 0, sizeof *src);
}

static void edited_layout(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    dst->map = COLO_MAP_OFFSET;
    dst->positions = 16;
    dst->offset = -5;
}

static void odd_rows(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->output = COLO_OUTPUT_SHARDED;
    c->shape.rows = 7;
}

T_CASE(one_ranks_error_is_its_own_and_peer_elsewhere)
{
    const disagreement_t list[] = {{SET(axes, "bss"), COLO_ERR_ARG, NULL},
                                   {SET(struct_size, 12), COLO_ERR_ARG, NULL},
                                   {SET(struct_size, 1), COLO_ERR_ARG, NULL}, /* no config at all */
                                   {SET(src, NULL), COLO_ERR_ARG, NULL},
                                   {SET(dtype, 99), COLO_ERR_ARG, NULL},
                                   {SET(shape.samples, -8), COLO_ERR_ARG, NULL},
                                   {SET(algo, 5), COLO_ERR_ARG, NULL},
                                   {SET(dtype, COLO_I32), COLO_ERR_ARG, NULL},
                                   {BY(odd_rows), COLO_ERR_LAYOUT, NULL},
                                   {SET(mem, COLO_MEM_CUDA), COLO_ERR_UNBUILT, NULL},
                                   {SET(mem, 7), COLO_ERR_ARG, NULL},
                                   {SET(transport, 3), COLO_ERR_ARG, NULL},
                                   {SET(axes, "bh"), COLO_ERR_ARG, NULL},
                                   {SET(placement, 1), COLO_ERR_ARG, NULL},
                                   {SET(max_rows, -1), COLO_ERR_ARG, NULL},
                                   {BY(forgotten_layout), COLO_ERR_ARG, NULL},
                                   {BY(edited_layout), COLO_ERR_ARG, NULL}};
    disagree(list, sizeof list / sizeof list[0], 1);
}

T_CASE_ON(2, missing_objects_are_errors_without_talking)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    t_case_t c = usual();
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    rank_try(t_case_config(&c, &src, &dst, &config));
    rank_check(colo_bridge_create(NULL, &config, world) == COLO_ERR_ARG && says("bridge"));
    rank_check(colo_bridge_create(&bridge, &config, NULL) == COLO_ERR_ARG && says("comm"));
    rank_check(!bridge);
    colo_tensor_t t = {0};
    rank_check(colo_bridge_forward(NULL, &t, &t, NULL) == COLO_ERR_ARG && says("bridge"));
    rank_check(colo_bridge_backward(NULL, &t, &t, NULL) == COLO_ERR_ARG && says("bridge"));
    rank_check(colo_bridge_reshape(NULL, &config.shape) == COLO_ERR_ARG && says("bridge"));
    colo_bridge_destroy(NULL);
    return COLO_OK;
}

/* A forgotten output is an argument like any other: the others must not wait for that rank. */
T_CASE_ON_THREADS(8, a_rank_without_an_output_is_told_and_the_others_are)
{
    t_case_t c = usual();
    colo_bridge_t *bridge = NULL;
    bool odd = colo_comm_rank(world) == ODD_RANK;
    rank_try(colo_comm_set_check(world, 1));
    colo_status_t st = t_case_bridge(odd ? NULL : &bridge, &c, world, COLO_MEM_HOST);
    rank_check(st == (odd ? COLO_ERR_ARG : COLO_ERR_PEER) && says("bridge is NULL"));
    rank_check(!bridge && colo_comm_check(world) == COLO_OK);
    return t_case_on(world, &c);
}

/* ---- calls ---- */

/* World rank 0, on grids that begin at rank 1. */
T_CASE(a_rank_that_owns_nothing_is_told_to_pass_null)
{
    float value[4] = {0};
    colo_comm_t *self = t_self();
    colo_layout_t layout;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    const colo_tensor_t x = colo_tensor_host(value, COLO_F32, 3, (int64_t[]){1, 2, 2});
    assert_ok(t_layout_of("dp=1@1", true, &layout));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &layout, .dst = &layout,
                                   .shape = {1, 2, 2, 0}};
    assert_ok(colo_bridge_create(&bridge, &config, self));
    assert_fails(colo_bridge_forward(bridge, &x, NULL, NULL), COLO_ERR_SHAPE,
                 "x is [1, 2, 2], expected [0, 0, 0] (axes bsh); this rank owns nothing of it");
}

/* ---- staying away ---- */

T_CASE_ON(8, a_rank_that_skips_the_call_is_a_timeout_with_both_sequence_numbers)
{
    const t_case_t c = usual();
    T_STAND(s);
    rank_try(colo_comm_set_check(world, 0)); /* nothing is agreed: the first exchange is number 1 */
    rank_try(colo_comm_set_timeout(world, 300));
    rank_try(t_stand_make(&s, &c, world));
    rank_try(t_stand_step(&s, 0)); /* operations 1 and 2 */
    colo_status_t st = COLO_OK;
    if (s.rank == ODD_RANK)
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    else
        st = t_stand_call(&s, COLO_PASS_FORWARD);
    if (s.rank == 0) { /* the peer of rank 2 */
        rank_check(st == COLO_ERR_TIMEOUT);
        rank_check(says("rank 2") && says("#3") && says("#2") && says("exchange"));
        rank_check(colo_comm_check(world) == COLO_ERR_TIMEOUT);
        rank_check(t_stand_call(&s, COLO_PASS_FORWARD) == COLO_ERR_TIMEOUT); /* dead */
        rank_check(says("bridge forward: comm 'world' is dead: ") && says("#3"));
    } else if (s.rank != ODD_RANK) {
        rank_check(st == COLO_OK || st == COLO_ERR_TIMEOUT || st == COLO_ERR_PEER);
    }
    return COLO_OK;
}

/* ---- communicators that are not the world ---- */

static colo_status_t sub_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = arg;
    T_ENDS(colo_comm_destroy) colo_comm_t *sub = NULL;
    int64_t rank = colo_comm_rank(world);
    /* ranks 4..7 in descending order: comm rank 0 is world rank 7 */
    rank_try(colo_comm_split_color(world, rank >= 4 ? 1 : -1, -rank, &sub));
    if (rank < 4)
        return COLO_OK;
    rank_check(colo_comm_world_rank(sub, 0) == 7);
    colo_status_t st = t_case_on(sub, c);
    return st;
}

T_CASE(a_bridge_needs_only_a_comm_of_its_ranks_in_any_order)
{
    static const char *const specs[][2] = {{"tp=2,dp=2@4", "cp=2,tp=1,dp=2@4"},
                                           {"dp=4@4", "cp=4@4"},
                                           {"tp=1,dp=4@4", "tp=4,dp=1@4"},
                                           {"tp=4,dp=1@4", "tp=1,dp=4@4"}};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = make(specs[i][0], specs[i][1], 4, 8, 2);
            c.output = kind ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
            c.grad = kind == 1 ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
            for (int check = 1; check <= 2; check++) {
                c.check = check;
                c.algo = COLO_ALGO_EXACT;
                assert_ok(t_run_ranks(8, sub_rank, &c, sizeof c));
                c.algo = COLO_ALGO_COLLECTIVE;
                if (i != 1) /* COLLECTIVE wants a tp dim */
                    assert_ok(t_run_ranks(8, sub_rank, &c, sizeof c));
            }
        }
}

T_CASE(a_peer_outside_the_comm_is_missing)
{
    t_case_t c = make("tp=2,dp=2", "tp=4,dp=1", 4, 4, 2); /* 0 needs 2, 1 needs 3 */
    assert_ok(t_run_ranks(4, t_case_lacking_rank, &c, sizeof c));
}

/* ---- the statistics ---- */

typedef struct counted {
    t_case_t c;
    int32_t check;
} counted_t;

/* all operations of all owners but the checks, less one kind */
static uint64_t others(const colo_comm_stats_t *l)
{
    uint64_t n = 0;
    for (int kind = 0; kind < COLO_OP_COUNT; kind++)
        for (int owner = 0; owner < COLO_CATEGORY_COUNT; owner++)
            if (owner != COLO_CATEGORY_CHECK)
                n += l->ops[kind][owner];
    return n - l->ops[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE];
}

static bool has_checks(const colo_comm_stats_t *l)
{
    uint64_t n = 0;
    for (int kind = 0; kind < COLO_OP_COUNT; kind++)
        n += l->ops[kind][COLO_CATEGORY_CHECK];
    return n > 0;
}

static colo_status_t counted_rank(colo_comm_t *world, void *arg)
{
    const counted_t *a = arg;
    colo_comm_stats_t l;
    const int X = COLO_OP_EXCHANGE, B = COLO_CATEGORY_BRIDGE;
    T_STAND(s);
    rank_try(colo_comm_set_check(world, a->check));
    rank_try(t_stand_make(&s, &a->c, world));
    t_comm_stats(world, &l);
    rank_check(l.ops[X][B] == 0 && others(&l) == 0);
    rank_check(has_checks(&l) == (a->check > 0)); /* agreement, unless switched off */
    for (int i = 0; i < 6; i++) {
        const colo_pass_t pass = (colo_pass_t)(i % 2);
        colo_comm_stats_reset(world);
        rank_try(t_stand_call(&s, pass));
        t_comm_stats(world, &l);
        colo_plan_bytes_t bytes = t_plan_bytes(colo_bridge_plan(s.bridge), pass);
        rank_check(l.ops[X][B] == 1 && others(&l) == 0);
        rank_check((int64_t)l.sent_bytes[X][B] == bytes.send);
        rank_check((int64_t)l.recv_bytes[X][B] == bytes.recv);
        rank_check(has_checks(&l) == (a->check == 2));
    }
    return COLO_OK;
}

T_CASE(each_direction_is_one_exchange_of_the_plans_bytes)
{
    static const char *const specs[][2] = {
        {"tp=2,dp=4", "tp=2,cp=2,dp=2"}, {"tp=4,dp=2", "tp=1,cp=2,dp=4"},
        {"tp=2,dp=3", "tp=3,dp=2"},      {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2"},
        {"tp=2,dp=2", "tp=2,dp=2"},      {"tp=2,pp=2,dp=2", "pp=2,cp=2,dp=2"}};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        for (int kind = 0; kind < 3; kind++)
            for (int check = 0; check <= 2; check++) {
                counted_t a = {make(specs[i][0], specs[i][1], 6, 8, 3), check};
                a.c.output = kind ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
                a.c.grad = kind == 1 ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
                if (t_run_ranks(t_case_world(&a.c), counted_rank, &a, sizeof a) < 0)
                    fail_msg("%s check %d: %s", t_case_text(&a.c), check, colo_last_error());
            }
}

T_CASE_ON(8, only_partial_sums_need_workspace)
{
    t_case_t c = usual();
    for (int kind = 0; kind < 3; kind++) {
        T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
        c.output = kind ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
        c.grad = kind == 1 ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
        rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
        rank_check((colo_bridge_workspace_size(bridge) > 0) == (kind == 1));
    }
    return COLO_OK;
}

T_MAIN("bridge/bridge_check")
