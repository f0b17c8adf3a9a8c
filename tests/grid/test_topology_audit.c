/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_topology_audit.c - which groups cross, against counting: groups come from ref_grid, where
 * each rank of a host sits comes from the drawing of the machine, and a group crosses when two
 * members sit on different ones. The best order is compared with all orders tried one by one.
 */
#include "harness/harness.h"
#include "ref/ref_grid.h"

#define TWO "package:2 core:8 pu:1"
#define FOUR "package:2 numa:2 core:4 pu:1"
#define HALVES "package:2 numa:1 core:4 pu:1"

/* Where rank l of a host sits; -1: on any of several. */
typedef struct drawn {
    const char *topology;
    colo_bind_t bind;
    int per_host;
    int numa[16], package[16];
} drawn;

#define EIGHTHS                                        \
    {                                                  \
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1 \
    }
static const drawn machines[] = {
    {FOUR, COLO_BIND_CORE, 16, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, EIGHTHS},
    {FOUR, COLO_BIND_CORE, 12, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}, EIGHTHS},
    {FOUR, COLO_BIND_SCATTER, 8, {0, 2, 1, 3, 0, 2, 1, 3}, {0, 1, 0, 1, 0, 1, 0, 1}},
    {FOUR, COLO_BIND_NUMA, 6, {0, 0, 1, 2, 2, 3}, {0, 0, 0, 1, 1, 1}},
    {FOUR, COLO_BIND_PACKAGE, 4, {-1, -1, -1, -1}, {0, 0, 1, 1}},
    {FOUR, COLO_BIND_NONE, 5, {-1, -1, -1, -1, -1}, {-1, -1, -1, -1, -1}},
    {TWO, COLO_BIND_CORE, 16, {0}, EIGHTHS},
    {HALVES, COLO_BIND_SCATTER, 7, {0, 1, 0, 1, 0, 1, 0}, {0, 1, 0, 1, 0, 1, 0}},
};
#define MACHINES ((int64_t)(sizeof machines / sizeof machines[0]))

static colo_topology_t *place_of(const drawn *m, int64_t world)
{
    colo_topology_t *p = NULL;
    assert_ok(colo_topology_create(
        &p,
        &(colo_topology_config_t){COLO_TOPOLOGY_CONFIG_INIT, .topology = m->topology,
                                  .world = world, .ranks_per_node = m->per_host, .bind = m->bind}));
    return p;
}

static bool differ(const int *row, int64_t a, int64_t b, int per_host)
{
    int x = row[a % per_host], y = row[b % per_host];
    return a / per_host != b / per_host || x < 0 || y < 0 || x != y;
}

/* Groups of the dims with in[d] that cross, counted pair by pair with the group's first member.
 * Sitting on the same one is transitive, and -1 differs from everything. */
static colo_topology_cut_t count(const drawn *m, const ref_grid *g, int64_t offset, const bool *in)
{
    T_ENDS(ref_groups_free) ref_groups groups;
    assert_true(ref_groups_make(&groups, g, in));
    colo_topology_cut_t cut = {COLO_TOPOLOGY_CUT_INIT, .size = groups.each, .groups = groups.count};
    for (int64_t k = 0; k < groups.count; k++) {
        bool numa = false, package = false, host = false;
        for (int64_t i = 1; i < groups.each; i++) {
            int64_t a = offset + groups.member[k * groups.each];
            int64_t b = offset + groups.member[k * groups.each + i];
            numa |= differ(m->numa, a, b, m->per_host);
            package |= differ(m->package, a, b, m->per_host);
            host |= a / m->per_host != b / m->per_host;
        }
        cut.numa += numa;
        cut.package += package;
        cut.host += host;
    }
    return cut;
}

static const char *const names[] = {"dp", "tp", "x", "cp", "pp", "ep"};
static const int loudness[] = {4, 0, 3, 2, 5, 1}; /* tp, ep, cp, others, dp, pp */

/* A random grid: the dims' names, in an order that is not that of their loudness. */
static int draw(uint64_t *seed, int most, int *name, int64_t *extent)
{
    int n = 1 + (int)t_below(seed, most);
    bool used[6] = {false};
    for (int d = 0; d < n; d++) {
        do
            name[d] = (int)t_below(seed, 6);
        while (used[name[d]]);
        used[name[d]] = true;
        extent[d] = 1 + t_below(seed, t_below(seed, 3) ? 4 : 9);
    }
    return n;
}

static colo_grid_t grid_of(int n, const int *name, const int64_t *extent, int64_t offset)
{
    colo_grid_t g;
    colo_dim_t dims[6];
    for (int d = 0; d < n; d++)
        dims[d] = (colo_dim_t){names[name[d]], extent[d]};
    assert_ok(colo_grid_init(&g, dims, n, offset, 0));
    return g;
}

static void assert_cut(const colo_topology_t *p, const drawn *m, const colo_grid_t *g,
                       const ref_grid *ref, int set)
{
    char list[64] = "", spec[128];
    bool in[REF_DIMS] = {false};
    colo_topology_cut_t got = {COLO_TOPOLOGY_CUT_INIT};
    for (int d = 0; d < g->ndims; d++)
        if (set >> d & 1) {
            in[d] = true;
            strcat(list, *list ? "-" : "");
            strcat(list, g->name[d]);
        }
    colo_topology_cut_t want = count(m, ref, g->offset, in);
    assert_ok(colo_topology_cut(p, g, list, &got));
    colo_grid_print(g, spec, sizeof spec);
    if (memcmp(&got, &want, sizeof got) != 0)
        fail_msg("%s on %s by %s, %d a host, '%s': %lld groups of %lld, crossing %lld %lld %lld; "
                 "counted %lld of %lld, %lld %lld %lld",
                 spec, m->topology, colo_bind_name(m->bind), m->per_host, list,
                 (long long)got.groups, (long long)got.size, (long long)got.numa,
                 (long long)got.package, (long long)got.host, (long long)want.groups,
                 (long long)want.size, (long long)want.numa, (long long)want.package,
                 (long long)want.host);
}

T_CASE(every_dim_set_crosses_as_counted)
{
    uint64_t seed = t_seed();
    for (int64_t i = t_scaled(600); i > 0; i--) {
        int name[6] = {0};
        int64_t extent[6], offset = t_below(&seed, 3) ? 0 : t_below(&seed, 20);
        int n = draw(&seed, 4, name, extent);
        const drawn *m = &machines[t_below(&seed, MACHINES)];
        colo_grid_t g = grid_of(n, name, extent, offset);
        T_ENDS(colo_topology_destroy)
        colo_topology_t *p = place_of(m, offset + g.size + t_below(&seed, 5));
        T_ENDS(ref_grid_free) ref_grid ref;
        assert_true(ref_grid_make(&ref, n, extent));
        for (int set = 1; set < 1 << n; set++)
            assert_cut(p, m, &g, &ref, set);
    }
}

T_CASE(many_hosts_cross_as_counted)
{
    static const int64_t shapes[][3] = {{2, 3, 4000}, {5, 2, 2000}, {3, 1000, 4},
                                        {4096, 2, 2}, {1, 16, 999}, {7, 7, 7}};
    for (int64_t m = 0; m < MACHINES; m++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            static const int name[] = {1, 3, 0};
            colo_grid_t g = grid_of(3, name, shapes[s], 3);
            T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(&machines[m], 3 + g.size);
            T_ENDS(ref_grid_free) ref_grid ref;
            assert_true(ref_grid_make(&ref, 3, shapes[s]));
            for (int set = 1; set <= 4; set *= 2)
                assert_cut(p, &machines[m], &g, &ref, set);
        }
}

T_CASE(a_million_ranks_are_a_few_hosts)
{
    /* 2^20 ranks, 16 a host, tp = 16: a group a host, half of it on either package; cp and dp
     * reach over hosts */
    static const drawn m = {TWO, COLO_BIND_CORE, 16, {0}, EIGHTHS};
    T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(&m, 1 << 20);
    colo_grid_t g, best;
    colo_bind_t bind;
    colo_topology_cut_t c = {COLO_TOPOLOGY_CUT_INIT};
    assert_ok(colo_grid_parse(&g, "tp=16,cp=64,dp=1024", 1 << 20));
    assert_ok(colo_topology_cut(p, &g, "tp", &c));
    assert_true(c.groups == 65536 && c.numa == 0 && c.package == 65536 && c.host == 0);
    assert_ok(colo_topology_cut(p, &g, "cp", &c));
    assert_true(c.groups == 16384 && c.numa == 16384 && c.host == 16384);
    assert_ok(colo_topology_advise(p, &g, &best, &bind));
    assert_true(colo_grid_equal(&best, &g)); /* no order keeps 16 ranks on 8 cores */
    assert_int_equal(bind, COLO_BIND_CORE);

    /* 16 dims of 2: all 16! orders; tp first is the only thing to mend */
    assert_ok(colo_grid_parse(
        &g, "a=2,b=2,c=2,d=2,e=2,f=2,g=2,h=2,i=2,j=2,k=2,l=2,m=2,n=2,pp=2,tp=2", 0));
    assert_ok(colo_topology_advise(p, &g, &best, &bind));
    char spec[256];
    colo_grid_print(&best, spec, sizeof spec);
    /* tp 1 apart, then a, b on a package, c on a host, the others across hosts in any order */
    assert_string_equal(spec, "a=2,b=2,tp=2,c=2,d=2,e=2,f=2,g=2,h=2,i=2,j=2,k=2,l=2,m=2,n=2,pp=2");
}

/* ---- the best order ---- */

/* Scores a grid: dims by loudness, then hosts, packages, NUMA nodes. */
static void score(const drawn *m, int n, const int *name, const int64_t *extent, int64_t offset,
                  int64_t *out)
{
    T_ENDS(ref_grid_free) ref_grid ref;
    assert_true(ref_grid_make(&ref, n, extent));
    memset(out, 0, 18 * sizeof *out);
    for (int d = 0; d < n; d++) {
        bool in[REF_DIMS] = {false};
        in[d] = true;
        colo_topology_cut_t c = count(m, &ref, offset, in);
        int64_t *row = &out[3 * loudness[name[d]]];
        row[0] = c.host;
        row[1] = c.package;
        row[2] = c.numa;
    }
}

static int smaller(const int64_t *a, const int64_t *b)
{
    for (int i = 0; i < 18; i++)
        if (a[i] != b[i])
            return a[i] < b[i];
    return 0;
}

/* All orders in the order of a dictionary, dims of one rank staying where they are. */
typedef struct trial {
    const drawn *m;
    int n, name[6], best_name[6], order[6];
    int64_t extent[6], best_extent[6], offset, best[18];
    bool used[6];
} trial;

static void try_from(trial *t, int position)
{
    if (position == t->n) {
        int name[6] = {0};
        int64_t extent[6] = {0}, s[18];
        for (int d = 0; d < t->n; d++) {
            name[d] = t->name[t->order[d]];
            extent[d] = t->extent[t->order[d]];
        }
        score(t->m, t->n, name, extent, t->offset, s);
        if (smaller(s, t->best)) {
            memcpy(t->best, s, sizeof s);
            memcpy(t->best_name, name, sizeof name);
            memcpy(t->best_extent, extent, sizeof extent);
        }
        return;
    }
    for (int d = 0; d < t->n; d++) {
        if (t->used[d] || (t->extent[position] == 1 ? d != position : t->extent[d] == 1))
            continue;
        t->used[d] = true;
        t->order[position] = d;
        try_from(t, position + 1);
        t->used[d] = false;
    }
}

T_CASE(the_best_order_is_the_best_of_all)
{
    uint64_t seed = t_seed() + 1;
    int64_t moved = 0, count_of = t_scaled(400);
    for (int64_t i = 0; i < count_of; i++) {
        trial t = {.m = &machines[t_below(&seed, MACHINES)], .offset = t_below(&seed, 4) ? 0 : 2};
        t.n = draw(&seed, 4, t.name, t.extent);
        memcpy(t.best_name, t.name, sizeof t.name);
        memcpy(t.best_extent, t.extent, sizeof t.extent);
        score(t.m, t.n, t.name, t.extent, t.offset, t.best);
        try_from(&t, 0);
        colo_grid_t g = grid_of(t.n, t.name, t.extent, t.offset), got;
        colo_grid_t want = grid_of(t.n, t.best_name, t.best_extent, t.offset);
        T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(t.m, t.offset + g.size);
        colo_bind_t bind;
        assert_ok(colo_topology_advise(p, &g, &got, &bind));
        if (!colo_grid_equal(&got, &want) || memcmp(got.stride, want.stride, sizeof want.stride)) {
            char a[128], b[128], c[128];
            colo_grid_print(&g, a, sizeof a);
            colo_grid_print(&got, b, sizeof b);
            colo_grid_print(&want, c, sizeof c);
            fail_msg("%s on %s by %s, %d a host: %s, tried %s", a, t.m->topology,
                     colo_bind_name(t.m->bind), t.m->per_host, b, c);
        }
        moved += !colo_grid_equal(&got, &g);
    }
    assert_true(moved > count_of / 10); /* the advice is not always "as it is" */
}

T_CASE(another_order_keeps_tp_inside_a_package)
{
    colo_grid_t g, best;
    colo_topology_cut_t c = {COLO_TOPOLOGY_CUT_INIT};
    colo_bind_t bind;
    T_ENDS(colo_topology_destroy)
    colo_topology_t *p = place_of(&machines[6], 16); /* two packages of 8, compact */
    assert_ok(colo_grid_parse(&g, "dp=4,tp=4", 16));
    assert_ok(colo_topology_cut(p, &g, "tp", &c)); /* 0 4 8 12 and its like */
    assert_true(c.groups == 4 && c.package == 4 && c.host == 0);
    assert_ok(colo_topology_cut(p, &g, "dp", &c));
    assert_true(c.groups == 4 && c.package == 0);
    assert_ok(colo_topology_advise(p, &g, &best, &bind));
    assert_string_equal(best.name[0], "tp");
    assert_string_equal(best.name[1], "dp");
    /* or every other rank on the other package: 0 4 8 12 are all even */
    assert_int_equal(bind, COLO_BIND_SCATTER);
    assert_ok(colo_topology_cut(p, &best, "tp", &c));
    assert_int_equal(c.package, 0);
    assert_ok(colo_topology_rebind(p, COLO_BIND_SCATTER));
    assert_ok(colo_topology_cut(p, &g, "tp", &c));
    assert_int_equal(c.package, 0);
}

T_CASE(a_wide_binding_is_advised_against_where_nodes_matter)
{
    colo_grid_t g, best;
    colo_bind_t bind;
    static const drawn wide = {FOUR, COLO_BIND_PACKAGE, 16, {0}, {0}};
    T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(&wide, 16);
    assert_ok(colo_grid_parse(&g, "tp=4,dp=4", 16));
    assert_ok(colo_topology_advise(p, &g, &best, &bind));
    assert_true(colo_grid_equal(&best, &g));
    assert_int_equal(bind, COLO_BIND_CORE); /* numa is as good; core comes first */
    assert_ok(colo_topology_rebind(p, COLO_BIND_NUMA));
    assert_ok(colo_topology_advise(p, &g, &best, &bind));
    assert_int_equal(bind, COLO_BIND_NUMA); /* nothing is better than it */
}

/* ---- a bridge's bytes ---- */

/*
 * TP2/DP4 -> TP2/CP2/DP2, sharded: 0 and 2, 1 and 3, 4 and 6, 5 and 7 swap an eighth of the tensor
 * each way, forward and backward, and nothing else moves (docs/concepts/plan.md). The tensor is 16 samples
 * x 8 rows x 4 features in bf16: 1024 bytes.
 */
T_CASE(a_bridge_pays_for_the_links_it_crosses)
{
    static const struct {
        const char *topology;
        colo_bind_t bind;
        int64_t per_host;
        int64_t numa, package, host; /* of 1024 */
        int64_t per_node;            /* as the plan has it */
    } want[] = {
        {"package:2 numa:2 core:2 pu:1", COLO_BIND_CORE, 8, 1024, 0, 0, 0}, /* 01 23 | 45 67 */
        {"package:2 numa:1 core:4 pu:1", COLO_BIND_CORE, 8, 0, 0, 0, 0},
        {"package:2 numa:1 core:4 pu:1", COLO_BIND_SCATTER, 8, 0, 0, 0, 0}, /* 0246 | 1357 */
        {"package:4 numa:1 core:2 pu:1", COLO_BIND_CORE, 8, 1024, 1024, 0, 0},
        {"package:1 numa:1 core:2 pu:1", COLO_BIND_CORE, 2, 1024, 1024, 1024, 0},
        {"package:1 numa:1 core:4 pu:1", COLO_BIND_CORE, 3, 768, 768, 768, 0}, /* 012 345 67 */
        /* what 4 and 5 need, and 6 and 7, enters their node once and is passed on */
        {"package:1 numa:1 core:4 pu:1", COLO_BIND_CORE, 3, 384, 384, 384, 3},
        {"package:2 numa:2 core:2 pu:1", COLO_BIND_PACKAGE, 8, 1024, 0, 0, 0},
    };
    colo_layout_t src, dst;
    assert_ok(t_layouts("tp=2,dp=4", "tp=2,cp=2,dp=2", &src, &dst));
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT,
                                .src = &src,
                                .dst = &dst,
                                .shape = {16, 8, 4, 0},
                                .dtype = COLO_BF16,
                                .output = COLO_OUTPUT_SHARDED,
                                .ranks_per_node = want[i].per_node};
        drawn m = {want[i].topology, want[i].bind, (int)want[i].per_host, {0}, {0}};
        T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(&m, 8);
        colo_topology_traffic_t sum[2] = {{COLO_TOPOLOGY_TRAFFIC_INIT},
                                          {COLO_TOPOLOGY_TRAFFIC_INIT}};
        for (int64_t r = 0; r < 8; r++) {
            T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
            assert_ok(colo_plan_create(&plan, &c, r));
            for (int w = 0; w < 2; w++)
                assert_ok(colo_topology_traffic(p, plan, (colo_pass_t)w, &sum[w]));
        }
        for (int w = 0; w < 2; w++)
            if (sum[w].total != 1024 || sum[w].numa != want[i].numa ||
                sum[w].package != want[i].package || sum[w].host != want[i].host)
                fail_msg("case %zu way %d: %lld bytes, %lld %lld %lld across", i, w,
                         (long long)sum[w].total, (long long)sum[w].numa, (long long)sum[w].package,
                         (long long)sum[w].host);
    }
}

/* ---- refused ---- */

T_CASE(what_does_not_fit_the_place_is_refused)
{
    colo_grid_t g, best = {0};
    colo_bind_t bind = COLO_BIND_COUNT;
    colo_topology_cut_t cut = {COLO_TOPOLOGY_CUT_INIT, .size = 77};
    T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(&machines[0], 8);
    assert_ok(colo_grid_parse(&g, "tp=4,dp=2@1", 0));
    assert_fails(colo_topology_cut(p, &g, "tp", &cut), COLO_ERR_ARG,
                 "the grid has ranks up to 8, expected at most 7");
    assert_fails(colo_topology_advise(p, &g, &best, &bind), COLO_ERR_ARG, "ranks up to 8");
    assert_ok(colo_grid_parse(&g, "tp=4,dp=2", 0));
    assert_fails(colo_topology_cut(p, &g, "cp", &cut), COLO_ERR_ARG, "cp");
    assert_fails(colo_topology_cut(p, &g, "", &cut), COLO_ERR_ARG, "");
    assert_fails(colo_topology_cut(p, &g, "tp", NULL), COLO_ERR_ARG, "NULL");
    assert_fails(colo_topology_cut(NULL, &g, "tp", &cut), COLO_ERR_ARG, "NULL");
    assert_fails(colo_topology_advise(p, &g, NULL, &bind), COLO_ERR_ARG, "NULL");
    assert_int_equal(cut.size, 77);
    assert_int_equal(bind, COLO_BIND_COUNT);

    colo_layout_t src, dst;
    T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
    colo_grid_t wide;
    assert_ok(colo_grid_parse(&wide, "tp=2,dp=8", 0)); /* ranks 8..15 are on no host */
    assert_ok(colo_layout_init_src(&src, &wide));
    assert_ok(colo_grid_parse(&wide, "dp=2,tp=8", 0));
    assert_ok(colo_layout_init_dst(&dst, &wide));
    colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &src, .dst = &dst, .shape = {16, 8, 4, 0},
                            .dtype = COLO_BF16};
    colo_topology_traffic_t sum = {COLO_TOPOLOGY_TRAFFIC_INIT, 7, 7, 7, 7}, was = sum;
    assert_ok(colo_plan_create(&plan, &c, 15));
    assert_fails(colo_topology_traffic(p, plan, COLO_PASS_FORWARD, &sum), COLO_ERR_ARG,
                 "outside the topology, [0, 8)");
    assert_fails(colo_topology_traffic(p, NULL, COLO_PASS_FORWARD, &sum), COLO_ERR_ARG,
                 "the plan is NULL");
    assert_fails(colo_topology_traffic(p, plan, (colo_pass_t)2, &sum), COLO_ERR_ARG,
                 "pass 2 is neither");
    assert_memory_equal(&sum, &was, sizeof sum);
    sum.total = was.total = INT64_MAX;
    T_ENDS(colo_topology_destroy) colo_topology_t *all = place_of(&machines[0], 16);
    assert_fails(colo_topology_traffic(all, plan, COLO_PASS_FORWARD, &sum), COLO_ERR_ARG,
                 "more than 2^63 bytes");
    assert_memory_equal(&sum, &was, sizeof sum);
}

/* Without hwloc there are no places to audit. */
T_MAIN_IF(colo_topology_version() ? 0 : T_EXIT_SKIP, "grid/topology_audit")
