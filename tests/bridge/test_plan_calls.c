/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_calls.c - making a plan: in worlds of 2^20 ranks, what it costs in ranks looked at,
 * outside both grids, hashes that tell configs apart, arguments that are refused.
 */
#include "harness/harness.h"

#include "bridge/plan/plan.h"
#include "harness/plan_world.h"

/* ---- big worlds, hashes, arguments ---- */

static int64_t message_bytes(const colo_plan_message_t *m, int32_t n, int64_t peer)
{
    for (int32_t i = 0; i < n; i++)
        if (m[i].peer == peer)
            return m[i].bytes;
    return -1;
}

T_CASE(a_plan_in_a_world_of_a_million_ranks_touches_only_its_peers)
{
    T_PLAN_CONFIG(pc, "tp=8,dp=131072", "tp=8,cp=4,dp=32768", .shape = {524288, 8192, 4096, 0},
                  .dtype = COLO_BF16, .output = COLO_OUTPUT_SHARDED, .ranks_per_node = 8);
    static const int64_t ranks[] = {0, 1, 7, 8, 31, 32, 123456, 524288, 777777, 1048575};
    int64_t vd = 524288 / 32768 * INT64_C(8192) * 4096 * 2, k = 4, c = 4;
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        colo_plan_t *p = NULL;
        assert_ok(colo_plan_create(&p, &pc, ranks[i]));
        assert_int_equal(colo_plan_rank(p), ranks[i]);
        assert_int_equal(t_plan_bytes(p, COLO_PASS_FORWARD).recv, (k - 1) * vd / (k * c));
        assert_int_equal(t_plan_bytes(p, COLO_PASS_BACKWARD).recv, (c - 1) * vd / (k * c));
        for (int pass = 0; pass < 2; pass++) {
            int32_t n;
            const colo_plan_message_t *recv = colo_plan_recvs(p, (colo_pass_t)pass, &n);
            assert_in_range(n, 1, 64);
            for (int32_t j = 0; j < n; j++) {
                T_ENDS(colo_plan_destroy) colo_plan_t *q = NULL;
                int32_t m;
                assert_int_equal(recv[j].peer / 32, ranks[i] / 32); /* the same destination batch */
                assert_ok(colo_plan_create(&q, &pc, recv[j].peer));
                const colo_plan_message_t *send = colo_plan_sends(q, (colo_pass_t)pass, &m);
                assert_int_equal(message_bytes(send, m, ranks[i]), recv[j].bytes);
                assert_true(colo_plan_hash(p) == colo_plan_hash(q));
            }
        }
        colo_plan_destroy(&p);
        assert_null(p);
    }
}

T_CASE(a_pass_that_is_none_has_no_messages)
{
    T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
    int32_t n = 9;
    T_PLAN_CONFIG(config, "dp=2", "cp=2", .shape = {2, 4, 1, 0}, .output = COLO_OUTPUT_SHARDED);
    assert_ok(colo_plan_create(&plan, &config, 0));
    assert_non_null(colo_plan_sends(plan, COLO_PASS_FORWARD, NULL));
    assert_non_null(colo_plan_recvs(plan, COLO_PASS_FORWARD, NULL));
    assert_non_null(colo_plan_locals(plan, COLO_PASS_FORWARD, NULL));
    assert_null(colo_plan_sends(plan, (colo_pass_t)2, &n));
    assert_int_equal(n, 0);
    colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
    assert_fails(colo_plan_bytes(plan, (colo_pass_t)2, &bytes), COLO_ERR_ARG,
                 "plan_bytes: pass 2 is neither COLO_PASS_FORWARD nor COLO_PASS_BACKWARD");
}

/* The ranks that planning looks at, for ranks of both sides; destinations are behind the sources.
 */
static int64_t work_of(int64_t sources, int64_t destinations, int64_t per_node, int64_t features)
{
    T_PLAN_CONFIG(pc, t_text("tp=%lld", (long long)sources),
                  t_text("tp=%lld@%lld", (long long)destinations, (long long)sources),
                  .shape = {4, 64, features, 0}, .dtype = COLO_BF16, .ranks_per_node = per_node);
    const int64_t ranks[] = {0, sources - 1, sources, sources + destinations - 1};
    int64_t most = 0;
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
        assert_ok(colo_plan_create(&p, &pc, ranks[i]));
        most = p->work > most ? p->work : most;
    }
    return most;
}

T_CASE(planning_replicas_costs_their_number_times_its_logarithm)
{
    static const int64_t nodes[] = {0, 8, 7}, features[] = {64, 4096};
    for (int64_t n = 16, log = 4; n <= 4096; n *= 4, log += 2)
        for (int node = 0; node < 3; node++)
            for (int f = 0; f < 2; f++)
                for (int64_t odd = 0; odd < 2; odd++) {
                    int64_t work = work_of(n, n - odd, nodes[node], features[f]);
                    /* two directions, as a destination and as a source; six searches for each
                     * destination */
                    if (work < 2 * n || work > 20 * n * (log + 1))
                        fail_msg("%lld sources, %lld destinations, %lld ranks a node: %lld looks",
                                 (long long)n, (long long)(n - odd), (long long)nodes[node],
                                 (long long)work);
                }
}

/* A destination learns whose turn it is from the overlaps before its own, not from all pairs of
 * ranks. */
T_CASE(planning_turns_costs_the_pieces_of_a_held_block)
{
    int64_t before = 0;
    for (int64_t n = 64; n <= 4096; n *= 4) {
        T_PLAN_CONFIG(pc, t_text("tp=1,dp=%lld", (long long)n),
                      t_text("cp=2,tp=%lld,dp=1", (long long)n / 2), .shape = {n, 20, 64, 0},
                      .dtype = COLO_BF16, .output = COLO_OUTPUT_SHARDED);
        T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
        assert_ok(colo_plan_create(&p, &pc, n - 1));
        if (before && p->work > 6 * before)
            fail_msg("%lld ranks: %lld looks, %lld for a quarter", (long long)n, (long long)p->work,
                     (long long)before);
        before = p->work;
    }
}

/* The most of a rank's work and of the regions that its plan keeps, over ranks of @nodes nodes
 * of 16. */
static void cost_on_nodes(int64_t nodes, int64_t *work, int64_t *kept)
{
    *work = *kept = 0;
    for (int pair = 0; pair < 2; pair++) {
        T_PLAN_CONFIG(pc,
                      pair ? t_text("dp=%lld", (long long)(16 * nodes))
                           : t_text("tp=8,dp=%lld", (long long)(2 * nodes)),
                      t_text(pair ? "tp=8,cp=2,dp=%lld" : "tp=4,cp=4,dp=%lld", (long long)nodes),
                      .shape = {16 * nodes, 64, 4096, 0}, .dtype = COLO_BF16, .ranks_per_node = 16);
        for (int64_t i = 0; i < 64; i++) {
            T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
            assert_ok(colo_plan_create(&p, &pc, i < 32 ? i : 16 * nodes - 1 - i * nodes / 8));
            int64_t regions = 0;
            for (int pass = 0; pass < 2; pass++)
                regions += p->exchange[pass][COLO_EXCHANGE_MAIN].recv.nregions +
                           p->exchange[pass][COLO_EXCHANGE_MAIN].send.nregions +
                           p->local[pass].nregions +
                           p->exchange[pass][COLO_EXCHANGE_RELAYS].recv.nregions +
                           p->exchange[pass][COLO_EXCHANGE_RELAYS].send.nregions;
            *work = p->work > *work ? p->work : *work;
            *kept = regions > *kept ? regions : *kept;
        }
    }
}

/* Two levels: a rank of 1,048,576 costs what one of 1,024 costs. */
T_CASE(plans_on_65536_nodes_cost_their_peers)
{
    int64_t work[2], kept[2];
    cost_on_nodes(64, &work[0], &kept[0]);
    cost_on_nodes(65536, &work[1], &kept[1]);
    if (kept[0] == 0 || kept[1] > kept[0] || work[1] > work[0])
        fail_msg("1024 ranks: %lld looks, %lld regions; 1048576: %lld, %lld", (long long)work[0],
                 (long long)kept[0], (long long)work[1], (long long)kept[1]);
}

T_CASE(plan_of_more_replicas_than_it_would_look_at_is_refused)
{
    colo_plan_t *p = NULL;
    for (int side = 0; side < 2; side++) {
        const char *many = "tp=65537,dp=2", *one = "tp=1,dp=131074";
        T_PLAN_CONFIG(c, side ? one : many, side ? many : one, .shape = {131074, 8, 2, 0});
        assert_fails(colo_plan_create(&p, &c, 0), COLO_ERR_ARG,
                     t_text("config.%s: 65537 ranks hold the same samples, expected at most 65536",
                            side ? "dst" : "src"));
        assert_null(p);
    }
    T_PLAN_CONFIG(c, "tp=65536,dp=2", "dp=131072", .shape = {131072, 8, 2, 0});
    assert_ok(colo_plan_create(&p, &c, 131071));
    colo_plan_destroy(&p);
}

static void plan_few_samples(void)
{
    static const char one[] = "dp=1", many[] = "dp=4611686018427387904";
    for (int from = 0; from < 2; from++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
        int32_t n;
        T_PLAN_CONFIG(c, from ? one : many, from ? many : one, .shape = {3, 1, 1, 0});
        assert_ok(colo_plan_create(&p, &c, 0));
        const colo_plan_message_t *m = from ? colo_plan_sends(p, COLO_PASS_FORWARD, &n)
                                            : colo_plan_recvs(p, COLO_PASS_FORWARD, &n);
        /* sample s is that of the last rank d with floor(3d / 2^62) = s */
        assert_int_equal(n, 3);
        assert_int_equal(m[0].peer, INT64_C(1537228672809129301));
        assert_int_equal(m[1].peer, INT64_C(3074457345618258602));
        assert_int_equal(m[2].peer, INT64_C(4611686018427387903));
    }
}

T_CASE(planning_passes_over_ranks_without_samples)
{
    assert_true(t_returns(plan_few_samples));
}

T_CASE(messages_whose_sum_overflows_are_refused)
{
    colo_plan_t *p = NULL;
    T_PLAN_CONFIG(c, "dp=1", "tp=8", .shape = {1 << 20, 1 << 20, 1 << 20, 0}); /* 2^62 bytes */
    assert_ok(colo_plan_create(&p, &c, 1));
    assert_int_equal(t_plan_bytes(p, COLO_PASS_FORWARD).recv, INT64_C(1) << 62);
    colo_plan_destroy(&p);
    assert_fails(colo_plan_create(&p, &c, 0), COLO_ERR_ARG,
                 "rank 0 sends or receives more than 63 bits of bytes");
    assert_null(p);
}

T_CASE(hashes_agree_on_all_ranks_and_tell_configs_apart)
{
    static const int64_t table[8] = {0, 1, 2, 3, 4, 5, 6, 7}, other[8] = {0, 1, 2, 3, 4, 5, 7, 6};
    t_case_t base = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 4, .world = 8);
    t_case_t v[16];
    int n = 0;
    v[n++] = base;
    (v[n] = base, v[n++].shape.b = 12);
    (v[n] = base, v[n++].shape.n = 12);
    (v[n] = base, v[n++].shape.h = 5);
    (v[n] = base, v[n++].dtype = COLO_BF16);
    (v[n] = base, v[n++].output = COLO_OUTPUT_SHARDED);
    (v[n] = base, v[n++].grad = COLO_GRAD_DISJOINT);
    (v[n] = base, v[n++].no_grad = true);
    (v[n] = base, v[n++].ranks_per_node = 4);
    (v[n] = base, v[n++].src = t_side("dp=4,tp=2", true));
    (v[n] = base, v[n++].dst = t_side("cp=2,tp=2,dp=2", false));
    v[n] = base;
    v[n].dst.map = REF_OFFSET;
    v[n].dst.map_offset = 4;
    v[n++].dst.positions = 16;
    v[n] = base;
    v[n].dst.map = REF_TABLE;
    v[n].dst.table = table;
    v[n++].dst.positions = 8;
    v[n] = v[n - 1];
    v[n++].dst.table = other;
    uint64_t hash[16];
    for (int i = 0; i < n; i++) {
        T_PLANS(w, &v[i]);
        hash[i] = colo_plan_hash(w.plan[0]);
        for (int32_t r = 1; r < w.n; r++)
            assert_true(colo_plan_hash(w.plan[r]) == hash[i]);
        for (int j = 0; j < i; j++)
            if (hash[i] == hash[j])
                fail_msg("configs %d and %d have the same hash", i, j);
    }
}

T_CASE(a_rank_outside_both_grids_gets_an_empty_plan)
{
    t_case_t c = T_BETWEEN("tp=2,dp=2", "tp=2,dp=2", 4, 4, 2, .world = 6);
    T_PLANS(w, &c);
    for (int32_t r = 4; r < 6; r++)
        for (int pass = 0; pass < 2; pass++) {
            int32_t n = -1;
            int64_t m = -1;
            colo_plan_sends(w.plan[r], (colo_pass_t)pass, &n);
            assert_int_equal(n, 0);
            colo_plan_recvs(w.plan[r], (colo_pass_t)pass, &n);
            assert_int_equal(n, 0);
            colo_plan_locals(w.plan[r], (colo_pass_t)pass, &m);
            assert_int_equal(m, 0);
        }
}

T_CASE(bad_arguments_are_refused_and_write_nothing)
{
    T_PLAN_CONFIG(good, "tp=2,dp=2", "tp=2,cp=2", .shape = {4, 8, 2, 0});
    colo_plan_t *sentinel = (colo_plan_t *)(uintptr_t)0x1230, *p = sentinel;
    colo_plan_config_t c = good;
    assert_fails(colo_plan_create(NULL, &c, 0), COLO_ERR_ARG, "plan");
    assert_fails(colo_plan_create(&p, NULL, 0), COLO_ERR_ARG, "config");
    assert_ptr_equal(p, sentinel);
#define REFUSED(change, status, word)                            \
    do {                                                         \
        c = good;                                                \
        change;                                                  \
        assert_fails(colo_plan_create(&p, &c, 0), status, word); \
        assert_ptr_equal(p, sentinel);                           \
    } while (0)
    REFUSED(c.struct_size = 8, COLO_ERR_ARG, "struct_size");
    REFUSED(c.src = NULL, COLO_ERR_ARG, "src");
    REFUSED(c.dst = NULL, COLO_ERR_ARG, "dst");
    REFUSED(c.shape.samples = -1, COLO_ERR_ARG, "-1");
    REFUSED(c.shape.rows = -2, COLO_ERR_ARG, "-2");
    REFUSED(c.shape.features = -3, COLO_ERR_ARG, "-3");
    REFUSED(c.shape.positions = -4, COLO_ERR_ARG, "-4");
    REFUSED(c.dtype = (colo_dtype_t)77, COLO_ERR_ARG, "77");
    REFUSED(c.output = (colo_output_t)7, COLO_ERR_ARG, "7");
    REFUSED(c.grad = (colo_grad_t)7, COLO_ERR_ARG, "7");
    REFUSED(c.ranks_per_node = -5, COLO_ERR_ARG, "-5");
    REFUSED((c.shape = (colo_shape_t){INT64_C(1) << 40, 1 << 20, 1 << 20, 0}), COLO_ERR_ARG,
            "overflow");
    REFUSED((c.shape.rows = 6, c.output = COLO_OUTPUT_SHARDED), COLO_ERR_LAYOUT, "6");
    REFUSED((c.shape.rows = 6, c.grad = COLO_GRAD_DISJOINT), COLO_ERR_LAYOUT, "6");
    REFUSED((c.shape.positions = 4, c.output = COLO_OUTPUT_SHARDED), COLO_ERR_LAYOUT,
            "4"); /* 8 rows */
#undef REFUSED
    colo_plan_destroy(NULL);
    p = NULL;
    colo_plan_destroy(&p);
    c = good;
    assert_fails(colo_plan_create(&p, &c, -1), COLO_ERR_ARG, "rank -1, expected >= 0");
    assert_null(p);
}

T_CASE(a_plan_that_is_made_leaves_the_last_error_alone)
{
    T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
    T_PLAN_CONFIG(c, "tp=2,dp=3", "tp=3,dp=2", .shape = {6, 8, 2, 0});
    assert_fails(colo_plan_create(&p, &c, -7), COLO_ERR_ARG, "rank -7");
    assert_ok(colo_plan_create(&p, &c, 0)); /* asks itself whether COLLECTIVE would take the pair */
    assert_int_equal(t_plan_bytes(p, COLO_PASS_FORWARD).collective_recv, -1);
    assert_non_null(strstr(colo_last_error(), "rank -7"));
}

T_MAIN("bridge/plan_calls")
