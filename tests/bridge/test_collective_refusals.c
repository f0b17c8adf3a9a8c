/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_collective_refusals.c - what COLLECTIVE cannot do: refused on all ranks
 * before anything moves, in the order of the reference, and nothing else is refused.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

static colo_status_t check(const t_case_t *c)
{
    colo_layout_t src, dst;
    assert_ok(t_layout(&src, &c->src));
    assert_ok(t_layout(&dst, &c->dst));
    const colo_plan_config_t pc = {COLO_PLAN_CONFIG_INIT, .src = &src, .dst = &dst,
                                   .shape = {c->shape.b, c->shape.n, c->shape.h, 0}};
    return colo_plan_collective_check(&pc);
}

/* ---- what COLLECTIVE refuses, in its order ---- */

typedef struct refusal {
    const char *src, *dst;
    int64_t b;
    colo_status_t status;
    const char *word;
} refusal_t;

static const refusal_t list[] = {
    /* one reason each */
    {"dp=8", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "must have 'tp'"},
    {"tp=8", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "must have 'dp'"},
    {"tp=2,dp=4", "cp=4,dp=2", 8, COLO_ERR_LAYOUT, "must have 'tp'"},
    {"tp=2,dp=4", "tp=2,cp=4", 8, COLO_ERR_LAYOUT, "must have 'dp'"},
    {"tp=2,dp=4", "tp=2,dp=2", 8, COLO_ERR_LAYOUT, "same number of ranks"},
    {"tp=2,dp=4@4", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "same rank offset"},
    {"tp=2,pp=2,dp=2", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "PP must be 1"},
    {"tp=2,dp=4", "tp=2,pp=2,dp=2", 8, COLO_ERR_LAYOUT, "PP must be 1"},
    {"tp=2,cp=2,dp=2", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "CP must be 1"},
    {"tp=2,dp=4", "tp=2,dp=2,cp=2", 8, COLO_ERR_LAYOUT, "'cp' before 'dp'"},
    {"tp=2,dp=3", "tp=3,dp=2", 6, COLO_ERR_LAYOUT, "evenly divisible"},
    {"tp=2,ep=2,dp=2", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "ep"},
    {"tp=2,dp=4", "tp=2,xp=2,dp=2", 8, COLO_ERR_LAYOUT, "xp"},
    {"dp=4,tp=2", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "rank"},
    {"tp=4,dp=2", "dp=4,tp=2", 8, COLO_ERR_LAYOUT, "rank"},
    {"tp=4,dp=2", "dp=2,tp=4", 8, COLO_ERR_LAYOUT, "rank"},
    {"tp=4,dp=2", "tp=2,dp=4", 6, COLO_ERR_SHAPE, "not divisible by fan_out scale=2"},
    {"tp=2,dp=4", "tp=4,dp=2", 6, COLO_ERR_SHAPE, "not divisible by fan_in scale=2"},
    /* two or more reasons: the earlier one speaks */
    {"dp=8", "tp=2,dp=2", 7, COLO_ERR_LAYOUT, "must have 'tp'"},
    {"tp=2,dp=4@4", "tp=2,dp=2", 8, COLO_ERR_LAYOUT, "same number of ranks"},
    {"tp=2,pp=2,dp=2@4", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "same rank offset"},
    {"tp=2,pp=2,cp=2", "tp=2,dp=4", 8, COLO_ERR_LAYOUT, "must have 'dp'"},
    {"pp=2,cp=2,tp=1,dp=2", "tp=2,dp=4", 8, COLO_ERR_LAYOUT, "PP must be 1"},
    {"cp=2,tp=1,dp=4", "tp=2,dp=2,cp=2", 8, COLO_ERR_LAYOUT, "CP must be 1"},
    {"tp=6,dp=2", "tp=2,dp=3,cp=2", 6, COLO_ERR_LAYOUT, "'cp' before 'dp'"},
    {"tp=2,ep=2,dp=3", "tp=6,dp=2", 6, COLO_ERR_LAYOUT, "evenly divisible"},
    {"dp=2,ep=2,tp=2", "tp=2,cp=2,dp=2", 8, COLO_ERR_LAYOUT, "ep"},
    {"dp=4,tp=2", "tp=4,dp=2", 7, COLO_ERR_LAYOUT, "rank"},
    /* nothing to refuse */
    {"tp=2,dp=4", "tp=2,cp=2,dp=2", 8, COLO_OK, ""},
    {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8, COLO_OK, ""},
    {"tp=4,dp=2", "tp=2,cp=2,dp=2", 7 + 1, COLO_OK, ""},
    {"tp=2,pp=1,ep=1,cp=1,dp=4", "tp=2,cp=2,pp=1,xp=1,dp=2", 8, COLO_OK, ""},
    {"tp=2,dp=4@4", "tp=4,dp=2@4", 8, COLO_OK, ""},
    {"tp=2,dp=4", "cp=2,tp=2,dp=2", 8, COLO_OK, ""},
};

T_CASE(the_collective_way_refuses_in_the_order_of_the_reference)
{
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const refusal_t *t = &list[i];
        const t_case_t c = t_collective(t->src, t->dst, t->b, 24, 2);
        const colo_status_t st = check(&c);
        if (st != t->status || (st < 0 && !strstr(colo_last_error(), t->word)))
            fail_msg("%s: %s \"%s\", expected %s with \"%s\"", t_case_text(&c),
                     colo_status_name(st), st < 0 ? colo_last_error() : "",
                     colo_status_name(t->status), t->word);
    }
}

/* ---- refusals of a bridge ---- */

static colo_status_t refused_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = arg;
    colo_bridge_t *sentinel = (colo_bridge_t *)(uintptr_t)0x40, *bridge = sentinel;
    colo_comm_stats_t l;
    colo_status_t st = t_case_bridge(&bridge, c, world, COLO_MEM_HOST);
    rank_check(st == COLO_ERR_LAYOUT || st == COLO_ERR_SHAPE);
    rank_check(bridge == sentinel);
    t_comm_stats(world, &l);
    for (int kind = 0; kind < COLO_OP_COUNT; kind++)
        rank_check(l.ops[kind][COLO_CATEGORY_BRIDGE] == 0 && l.ops[kind][COLO_CATEGORY_USER] == 0);
    rank_check(colo_comm_check(world) == COLO_OK);
    t_case_t exact = *c; /* the comm lives, and EXACT has no such limits */
    exact.algo = COLO_ALGO_EXACT;
    return t_case_on(world, &exact);
}

T_CASE(what_it_cannot_do_is_refused_on_all_ranks_and_exact_does_it)
{
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        t_case_t c = t_collective(list[i].src, list[i].dst, list[i].b, 24, 2);
        c.check = 1;
        if (list[i].status < 0 && t_run_ranks(t_case_world(&c), refused_rank, &c, sizeof c) < 0)
            fail_msg("%s: %s", t_case_text(&c), colo_last_error());
    }
}

/* What the reference has no words for, and would sum, skip or reorder silently. */
T_CASE(layouts_that_it_would_carry_wrongly_are_refused)
{
    static const int64_t table[8] = {0, 1, 2, 3, 4, 5, 7, 6};
    for (int odd = 0; odd < 8; odd++) {
        t_case_t c = t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2);
        c.check = 1;
        switch (odd) {
        case 0: /* replicas over cp: their gradients are one value, not addends */
            c.dst.nsplits[1] = 0;
            break;
        case 1: /* sequence parallelism over a dim called cp: full gradients, not addends */
            c.dst.split[1][0] = (ref_split_t){"cp", REF_BLOCK, false};
            break;
        case 6: /* parts that may be of any size */
            c.src.split[0][0].cut = REF_CEIL;
            break;
        case 2: /* stages over other dims than pp */
            c.src.stage_dim = "tp";
            c.src.stage = 1;
            break;
        case 3:
            c.dst.stage_dim = "tp";
            break;
        case 4:
            c.dst.nsplits[1] = 0;
            c.dst.stage_dim = "cp";
            c.dst.stage = 1;
            break;
        case 5: /* the source tensor has row 7 before row 6 */
            c.src.map = REF_TABLE;
            c.src.table = table;
            c.src.positions = 8;
            break;
        default: /* fan-out, and the output in shards */
            c = t_collective("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 2);
            c.check = 1;
            c.output = COLO_OUTPUT_SHARDED;
            c.dst.nsplits[1] = 0;
        }
        if (colo_comm_threads_run(8, refused_rank, &c) < 0)
            fail_msg("layout %d: %s", odd, colo_last_error());
    }
}

/* Accepted exactly when every rank's place is in its group: by asking each rank, for all orders. */
static bool should_be_accepted(const t_case_t *c, const t_pair_t *p)
{
    const int64_t *s = p->src, *d = p->dst;
    const int64_t big = s[2] > d[2] ? s[2] : d[2], small = s[2] < d[2] ? s[2] : d[2];
    int cp_at = 0, dp_at = 0;
    for (int i = 0; i < 3; i++) {
        cp_at = strcmp(c->dst.name[i], "cp") == 0 ? i : cp_at;
        dp_at = strcmp(c->dst.name[i], "dp") == 0 ? i : dp_at;
    }
    bool ok = s[1] == 1 && big % small == 0 && (d[1] == 1 || cp_at < dp_at);
    for (int64_t r = 0; ok && r < p->n; r++) {
        int64_t x = ref_side_coord(&c->src, r, "dp"), y = ref_side_coord(&c->dst, r, "dp");
        ok = s[2] >= d[2] ? x / (big / small) == y : y / (big / small) == x;
    }
    return ok;
}

T_CASE(it_is_accepted_exactly_where_every_rank_agrees)
{
    int64_t count[2] = {0}; /* refused, accepted */
    T_EACH_PAIR (p, 1, 12)
        for (int i = 0; i < T_ORDERS * T_ORDERS; i++) {
            t_case_t c = t_pair_case(&p, i / T_ORDERS, i);
            c.shape.n = 48;
            const bool ok = should_be_accepted(&c, &p);
            const colo_status_t st = check(&c);
            if ((st == COLO_OK) != ok)
                fail_msg("%s: %s, by asking every rank: %s", t_case_text(&c), colo_status_name(st),
                         ok ? "accepted" : "refused");
            count[ok]++;
        }
    assert_true(count[0] > 500 && count[1] > 500);
}

T_CASE(samples_that_dp_does_not_split_are_refused)
{
    for (int side = 0; side < 2; side++) {
        t_case_t c = t_collective("tp=2,dp=2", "tp=2,dp=2", 4, 8, 2);
        (side ? &c.dst : &c.src)->nsplits[0] = 0;
        assert_fails(check(&c), COLO_ERR_LAYOUT,
                     side ? "dest layout: samples are not split over dp"
                          : "src layout: samples are not split over dp");
    }
    assert_fails(colo_plan_collective_check(&(colo_plan_config_t){COLO_PLAN_CONFIG_INIT}),
                 COLO_ERR_ARG, "NULL");
}

T_CASE_ON_THREADS(8, integers_are_not_summed_over_cp)
{
    t_case_t c = t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2);
    c.dtype = COLO_I32;
    colo_bridge_t *b = NULL;
    rank_check(t_case_bridge(&b, &c, world, COLO_MEM_HOST) == COLO_ERR_ARG && !b);
    rank_check(says("cp=2, which i32 is not made for"));
    c.no_grad = true;
    return t_case_on(world, &c);
}

T_MAIN("bridge/collective_refusals")
