/* SPDX-License-Identifier: Apache-2.0 */
/* test_nodes.c - plans by nodes of any size and order, and bridges that ask the communicator. */
#include "harness/harness.h"
#include "harness/plan_world.h"

#include "bridge/plan/plan.h"

#include <stdlib.h>

static const int32_t scattered[] = {0, 1, 1, 0, 2, 1, 0, 1, 2, 0, 1, 3, 1, 0, 2, 2};

T_CASE(source_on_an_uneven_scattered_node_is_taken_before_others)
{
    int pairs = 0;
    T_EACH_PAIR (p, 4, 8) {
        t_case_t c = t_pair_case(&p, 0, p.n);
        c.shape = (ref_shape_t){2 * t_lcm(p.src[2], p.dst[2]), 24, 4};
        c.node = scattered;
        if (24 % (2 * p.src[1]) || 24 % (2 * p.dst[1]))
            continue;
        for (int kind = 0; kind < 3; kind++) {
            t_case_kind(&c, kind);
            t_plans_check(&c);
        }
        pairs++;
    }
    assert_true(pairs > 100);
}

T_CASE(table_of_equal_nodes_gives_the_plan_of_ranks_per_node)
{
    static const int32_t halves[] = {7, 7, 7, 7, 5, 5, 5, 5};
    t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 16, 4, .dtype = COLO_F32);
    c.ranks_per_node = 4;
    T_PLANS(by_number, &c);
    c.ranks_per_node = 0;
    c.node = halves;
    T_PLANS(by_table, &c);
    for (int pass = 0; pass < 2; pass++)
        for (int32_t to = 0; to < 8; to++)
            for (int32_t from = 0; from < 8; from++)
                assert_int_equal(t_plans_bytes(&by_number, (colo_pass_t)pass, from, to),
                                 t_plans_bytes(&by_table, (colo_pass_t)pass, from, to));
}

T_CASE(nodes_that_cannot_be_are_refused)
{
    colo_nodes_t *n = NULL;
    colo_plan_t *p = NULL;
    T_PLAN_CONFIG(c, "tp=2,dp=4", "tp=2,cp=2,dp=2", .shape = {8, 16, 4, 0});
    assert_fails(colo_nodes_create(NULL, scattered, 4), COLO_ERR_ARG, "nodes is NULL");
    assert_fails(colo_nodes_create(&n, NULL, 4), COLO_ERR_ARG, "the table is NULL");
    assert_fails(colo_nodes_create(&n, scattered, 0), COLO_ERR_ARG, "there are no ranks");
    assert_fails(colo_nodes_create(&n, scattered, INT64_MAX), COLO_ERR_NOMEM, "ranks");
    assert_ok(colo_nodes_create(&n, scattered, 7));
    assert_int_equal(colo_nodes_count(n), 3);
    assert_int_equal(colo_nodes_find(n, 4), 2);
    assert_int_equal(colo_nodes_find(n, 7), -1);
    c.nodes = n;
    assert_fails(colo_plan_create(&p, &c, 0), COLO_ERR_ARG,
                 "nodes of 7 ranks, expected at least 8: config.src names rank 7");
    c.ranks_per_node = 4;
    assert_fails(colo_plan_create(&p, &c, 0), COLO_ERR_ARG, "expected one of them");
    colo_nodes_destroy(&n);
    assert_int_equal(colo_nodes_count(NULL), 0);
    assert_int_equal(colo_nodes_find(NULL, 0), -1);
}

/* ---- bridges ---- */

static colo_status_t asking_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = arg;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    rank_try(t_case_bridge(&bridge, c, world, COLO_MEM_HOST));
    const colo_nodes_t *nodes = colo_plan_config(colo_bridge_plan(bridge))->nodes;
    rank_check(colo_nodes_count(nodes) == (c->ranks_per_node ? 0 : 3));
    for (int64_t r = 0; nodes && r < 8; r++)
        rank_check(colo_nodes_find(nodes, r) == scattered[r]);
    rank_try(t_case_step(bridge, colo_comm_rank(world), c, 3));
    return COLO_OK;
}

T_CASE(bridge_without_ranks_per_node_asks_the_communicator)
{
    t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 16, 4, .dtype = COLO_F32);
    setenv("COLO_NODE", "x,y,y,x,z,y,x,y", 1);
    assert_ok(t_run_ranks(8, asking_rank, &c, 0));
    c.ranks_per_node = 4; /* the caller's own word */
    assert_ok(t_run_ranks(8, asking_rank, &c, 0));
    unsetenv("COLO_NODE");
}

/* A node for each of 2^62 ranks takes 2^64 bytes. */
static colo_status_t large_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = arg;
    colo_bridge_t *bridge = NULL;
    colo_status_t st = t_case_bridge(&bridge, c, world, COLO_MEM_HOST);
    rank_check(st == COLO_ERR_NOMEM && !bridge &&
               says("bridge: nodes of 4611686018427387904 ranks"));
    return COLO_OK;
}

static void run_large_ranks(void)
{
    t_case_t c = t_between("dp=2", "dp=4611686018427387904", 8, 16, 4);
    setenv("COLO_NODE", "x,y", 1);
    assert_ok(t_run_ranks(2, large_rank, &c, 0));
    unsetenv("COLO_NODE");
}

T_CASE(bridge_between_more_ranks_than_memory_counts_is_refused)
{
    assert_true(t_returns(run_large_ranks));
}

/* ---- calls ---- */

typedef struct counted {
    t_case_t c;
    int exchanges[2]; /* expected, by pass */
    bool adds_up;
} counted_t;

static colo_status_t counting_rank(colo_comm_t *world, void *arg)
{
    const counted_t *k = arg;
    colo_comm_stats_t stats;
    T_STAND(s);
    rank_try(t_stand_make(&s, &k->c, world));
    rank_check(colo_plan_sums_nodes(colo_bridge_plan(s.bridge)) == k->adds_up);
    for (int pass = 0; pass < 2; pass++) {
        colo_comm_stats_reset(world);
        rank_try(t_stand_call(&s, (colo_pass_t)pass));
        t_comm_stats(world, &stats);
        rank_check(stats.ops[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE] ==
                   (uint64_t)k->exchanges[pass]);
    }
    return COLO_OK;
}

/* One, and one more if a node can add up what another one lacks, and one if several ranks of a node
 * need what it lacks. */
T_CASE(pass_has_no_exchange_that_can_carry_nothing)
{
    static const struct {
        const char *src, *dst;
        int exchanges[2][2]; /* PARTIAL, SHARDED; by pass */
        bool adds_up;        /* PARTIAL */
    } row[] = {              /* nothing crosses, though ranks of a node need the same */
               {"tp=1,dp=8", "tp=1,cp=2,dp=4", {{1, 1}, {1, 1}}, false},
               {"tp=2,dp=4", "tp=1,cp=2,dp=4", {{1, 1}, {1, 1}}, false},
               /* nor forward */
               {"tp=8,dp=1", "tp=1,cp=2,dp=4", {{1, 3}, {1, 2}}, true},
               /* copies on two nodes */
               {"dp=4,tp=2", "tp=1,cp=2,dp=4", {{1, 2}, {1, 1}}, true},
               {"dp=8", "cp=8", {{2, 2}, {1, 1}}, true},
               /* nodes add up for themselves, and single addends cross */
               {"dp=8", "cp=2,dp=3@1", {{1, 1}, {1, 1}}, true},
               /* the addends of a block on two nodes */
               {"tp=2,dp=4", "tp=4,cp=2,dp=1", {{2, 2}, {2, 2}}, false}};
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)
        for (int sharded = 0; sharded < 2; sharded++) {
            counted_t k = {
                .c = T_BETWEEN(row[i].src, row[i].dst, 8, 16, 4,
                               .output = sharded ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ,
                               .grad = sharded ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL,
                               .ranks_per_node = 4),
                .exchanges = {row[i].exchanges[sharded][0], row[i].exchanges[sharded][1]},
                .adds_up = row[i].adds_up && !sharded};
            assert_ok(t_run_ranks(8, counting_rank, &k, sizeof k));
        }
}

T_MAIN("bridge/nodes")
