/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_create.c - ranks that disagree about a bridge, or bring nonsense, when it is made:
 * which rank gets which status, what the error message names, and that the comm lives on.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

static t_case_t usual(void)
{
    return (t_case_t){.src = t_side("tp=2,dp=4", true),
                      .dst = t_side("tp=2,cp=2,dp=2", false),
                      .shape = {8, 8, 3}};
}

/* ---- agreement at create ---- */

#define ODD_RANK 2

typedef struct disagreement {
    t_case_t c;
    int32_t check;
    void (*change)(colo_bridge_config_t *config, colo_layout_t *src, colo_layout_t *dst);
    colo_status_t own, others;
    const char *error_message; /* of a mismatch, the same on all ranks */
} disagreement_t;

static colo_status_t disagree_rank(colo_comm_t *world, void *arg)
{
    const disagreement_t *d = arg;
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *sentinel = (colo_bridge_t *)(uintptr_t)0x40, *bridge = sentinel;
    int32_t rank = colo_comm_rank(world);
    rank_try(colo_comm_set_check(world, d->check));
    rank_try(t_case_config(&d->c, &src, &dst, &config));
    if (rank == ODD_RANK)
        d->change(&config, &src, &dst);
    colo_status_t st = colo_bridge_create(&bridge, config.struct_size == 1 ? NULL : &config, world);
    if (st != (rank == ODD_RANK ? d->own : d->others))
        return t_rank_fail(__FILE__, __LINE__, colo_status_name(st));
    rank_check(bridge == sentinel);
    if (d->own == COLO_ERR_MISMATCH && !says(d->error_message))
        return t_rank_fail(__FILE__, __LINE__, colo_last_error());
    rank_check(colo_comm_check(world) == COLO_OK);
    return t_case_on(world, &d->c); /* an agreement that failed leaves the comm alive */
}

static void other_batch(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->shape.samples = 12;
}
static void other_rows(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->shape.rows = 12;
}
static void other_width(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->shape.features++;
}
static void other_dtype(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->dtype = COLO_I32;
    c->grad = COLO_DISJOINT;
}
static void other_output(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->output = COLO_SHARDED;
}
static void other_grad(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->grad = COLO_DISJOINT;
}
static void other_no_grad(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->no_grad = true;
}
static void other_nodes(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->ranks_per_node = 4;
}
static void other_algo(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->algo = COLO_COLLECTIVE;
}
static void other_grid(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    ref_side_t side = t_side("dp=4,tp=2", true);
    (void)t_layout(src, &side);
}
static void other_split(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    (void)colo_layout_split(dst, COLO_ROWS, "tp", COLO_BLOCK);
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
    colo_layout_clear(dst, COLO_ROWS);
    (void)colo_layout_stage(dst, "cp", 0);
}

T_CASE(create_names_the_field_and_both_values_on_every_rank)
{
    static const struct {
        void (*change)(colo_bridge_config_t *, colo_layout_t *, colo_layout_t *);
        const char *error_message;
    } list[] = {
        {other_batch, "bridge create: samples: rank 2 of 'world' has 12, rank 0 8"},
        {other_rows, "bridge create: rows: rank 2 of 'world' has 12, rank 0 8"},
        {other_width, "bridge create: features: rank 2 of 'world' has 4, rank 0 3"},
        {other_dtype, "bridge create: dtype: rank 2 of 'world' has i32, rank 0 f32; grad: rank 2"},
        {other_output, "bridge create: output: rank 2 of 'world' has SHARDED, rank 0 FULL_SEQ"},
        {other_grad, "bridge create: grad: rank 2 of 'world' has DISJOINT, rank 0 PARTIAL"},
        {other_no_grad, "bridge create: grad: rank 2 of 'world' has no_grad, rank 0 PARTIAL"},
        {other_nodes, "bridge create: ranks_per_node: rank 2 of 'world' has 4, rank 0 0"},
        {other_algo, "bridge create: algo: rank 2 of 'world' has COLLECTIVE, rank 0 EXACT"},
        {other_grid, "bridge create: src: rank 2 of 'world' has dp=4,tp=2, rank 0 tp=2,dp=4"},
        {other_split, "bridge create: dst splits: rank 2 of 'world' has samples over dp, rows over "
                      "cp zigzag, rows over tp, rank 0 samples over dp, rows over cp zigzag"},
        {other_map, "bridge create: dst positions: rank 2 of 'world' has rows from 4 of 16, rank 0 "
                    "rows from 0"},
        {other_table, "bridge create: dst positions: rank 2 of 'world' has a table of 8 rows in 8: "
                      "1 0 2 3 4 5 6 7 ("},
        {other_stage, "cp zigzag; dst stage: rank 2 of 'world' has cp 0, rank 0 any"},
    };
    for (int check = 1; check <= 2; check++)
        for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
            disagreement_t d = {.c = usual(),
                                .check = check,
                                .change = list[i].change,
                                .own = COLO_ERR_MISMATCH,
                                .others = COLO_ERR_MISMATCH,
                                .error_message = list[i].error_message};
            colo_status_t st = t_run_ranks(8, disagree_rank, &d, sizeof d);
            if (st < 0)
                fail_msg("change %zu at COLO_CHECK=%d: %s", i, check, colo_last_error());
        }
}

/* Grids of many dims with long names, whose text a field cuts off before they differ. */
static colo_status_t long_rank(colo_comm_t *world, void *arg)
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
        rank_try(colo_layout_split(&side, i % 3, grid.name[1 + i], COLO_BLOCK));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &side, .dst = &side,
                                   .shape = {4, 2, 2, 0}, .dtype = COLO_F32};
    rank_check(colo_bridge_create(&bridge, &config, world) == COLO_ERR_MISMATCH && !bridge);
    rank_check(says("bridge create: rank 2 of 'world' differs from rank 0 in what is too long"));
    return colo_comm_barrier(world, NULL);
}

T_CASE(create_compares_what_a_field_does_not_show)
{
    assert_ok(t_run_ranks(4, long_rank, NULL, 0));
}

static void bad_axes(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->axes = "bss";
}
static void rows_without_an_axis(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->axes = "bh";
}
static void bad_size(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->struct_size = 12;
}
static void no_config(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->struct_size = 1; /* disagree_rank() passes NULL then */
}
static void no_src(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->src = NULL;
}
static void bad_dtype(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->dtype = (colo_dtype_t)99;
}
static void bad_batch(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->shape.samples = -8;
}
static void bad_algo(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->algo = (colo_algo_t)5;
}
static void int_sums(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->dtype = COLO_I32;
}
static void odd_rows(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->output = COLO_SHARDED;
    c->shape.rows = 7;
}
static void cuda_memory(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->mem = COLO_CUDA;
}

static void unknown_memory(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->mem = (colo_mem_t)7;
}

static void unknown_transport(colo_bridge_config_t *c, colo_layout_t *src, colo_layout_t *dst)
{
    c->transport = (colo_transport_t)3;
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

T_CASE(one_ranks_error_is_its_own_and_peer_elsewhere)
{
    static const struct {
        void (*change)(colo_bridge_config_t *, colo_layout_t *, colo_layout_t *);
        colo_status_t status;
    } list[] = {{bad_axes, COLO_ERR_ARG},
                {bad_size, COLO_ERR_ARG},
                {no_config, COLO_ERR_ARG},
                {no_src, COLO_ERR_ARG},
                {bad_dtype, COLO_ERR_ARG},
                {bad_batch, COLO_ERR_ARG},
                {bad_algo, COLO_ERR_ARG},
                {int_sums, COLO_ERR_ARG},
                {odd_rows, COLO_ERR_LAYOUT},
                {cuda_memory, COLO_ERR_UNBUILT},
                {unknown_memory, COLO_ERR_ARG},
                {unknown_transport, COLO_ERR_ARG},
                {rows_without_an_axis, COLO_ERR_ARG},
                {forgotten_layout, COLO_ERR_ARG},
                {edited_layout, COLO_ERR_ARG}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        disagreement_t d = {usual(), 1, list[i].change, list[i].status, COLO_ERR_PEER, NULL};
        colo_status_t st = t_run_ranks(8, disagree_rank, &d, sizeof d);
        if (st < 0)
            fail_msg("change %zu: %s", i, colo_last_error());
    }
}

static colo_status_t bad_create_rank(colo_comm_t *world, void *arg)
{
    colo_bridge_t *bridge = NULL;
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
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(missing_objects_are_errors_without_talking)
{
    assert_ok(t_run_ranks(2, bad_create_rank, NULL, 0));
}

/* A forgotten output is an argument like any other: the others must not wait for that rank. */
static colo_status_t forgetful_rank(colo_comm_t *world, void *arg)
{
    t_case_t c = usual();
    colo_bridge_t *bridge = NULL;
    bool odd = colo_comm_rank(world) == ODD_RANK;
    rank_try(colo_comm_set_check(world, 1));
    colo_status_t st = t_case_bridge(odd ? NULL : &bridge, &c, world, COLO_HOST);
    rank_check(st == (odd ? COLO_ERR_ARG : COLO_ERR_PEER) && says("bridge is NULL"));
    rank_check(!bridge && colo_comm_check(world) == COLO_OK);
    return t_case_on(world, &c);
}

T_CASE(a_rank_without_an_output_is_told_and_the_others_are)
{
    assert_ok(colo_comm_threads_run(8, forgetful_rank, NULL));
}

T_MAIN("bridge/bridge_create")
