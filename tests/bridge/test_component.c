/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_component.c - the ranks that a bridge connects: by hand for layouts where one sees it, and
 * for every pair of layouts of 6 to 8 ranks against the classes that all ranks' plans together
 * make.
 */
#include "harness/harness.h"

#include "bridge/run/run.h"
#include "harness/bridge_case.h"

/* Members of rank @r among @world ranks; returns how many. */
static int32_t members_of(const t_case_t *c, int32_t r, int32_t world, int32_t *list,
                          colo_plan_t **plan)
{
    colo_layout_t from, to;
    colo_bridge_config_t config;
    colo_comm_t *comm = NULL;
    int32_t *members = NULL, n = 0;
    assert_ok(t_case_config(c, &from, &to, &config));
    colo_plan_config_t pc = {COLO_PLAN_CONFIG_INIT, .src = &from, .dst = &to, .shape = config.shape,
                             .dtype = COLO_F32};
    assert_ok(colo_plan_create(plan, &pc, r));
    assert_ok(colo_comm_i_new(&comm, &colo_comm_self_ops, r, world, NULL));
    assert_ok(colo_component_find(*plan, comm, &members, &n));
    memcpy(list, members, (size_t)n * sizeof *list);
    free(members);
    colo_comm_destroy(&comm);
    return n;
}

static void expect(const char *src, const char *dst, int64_t b, const char *const *of_rank,
                   int32_t world)
{
    t_case_t c = t_between(src, dst, b, 8, 2);
    for (int32_t r = 0; r < world; r++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
        int32_t list[8], n = members_of(&c, r, world, list, &plan);
        char text[64] = "";
        for (int32_t i = 0; i < n; i++)
            sprintf(text + strlen(text), i ? " %d" : "%d", (int)list[i]);
        assert_string_equal(text, of_rank[r]);
    }
}

static int32_t root_of(const int32_t *up, int32_t r)
{
    while (up[r] != r)
        r = up[r];
    return r;
}

static void check_pair(const t_pair_t *p)
{
    const int32_t n = (int32_t)p->n;
    t_case_t c = t_pair_case(p, 0, 0);
    int32_t list[8][8], count[8], up[8];
    c.shape.b = 5;
    for (int32_t r = 0; r < n; r++)
        up[r] = r;
    for (int32_t r = 0; r < n; r++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
        count[r] = members_of(&c, r, n, list[r], &plan);
        for (int pass = 0; pass < 2; pass++) {
            int32_t sends;
            const colo_plan_message_t *m = colo_plan_sends(plan, (colo_pass_t)pass, &sends);
            for (int32_t i = 0; i < sends; i++)
                up[root_of(up, r)] = root_of(up, (int32_t)m[i].peer);
        }
    }
    for (int32_t r = 0; r < n; r++) {
        int32_t index = 0;
        for (int32_t k = 0; k < n; k++)
            if (root_of(up, k) == root_of(up, r))
                assert_int_equal(list[r][index++], k);
        assert_int_equal(count[r], index);
    }
}

T_CASE(every_rank_finds_its_class_and_no_more)
{
    int64_t ran = 0;
    T_EACH_PAIR (p, 6, 8) {
        check_pair(&p);
        ran++;
    }
    assert_true(ran > 150);
}

T_CASE(components_of_small_layouts)
{
    /* each LLM replica of two ranks is fed by its own two encoder ranks */
    expect("dp=4", "tp=2,dp=2", 4, (const char *[]){"0 1", "0 1", "2 3", "2 3"}, 4);
    expect("dp=4", "tp=4", 4, (const char *[]){"0 1 2 3", "0 1 2 3", "0 1 2 3", "0 1 2 3"}, 4);
    /* nothing moves between ranks */
    expect("tp=2,dp=2", "tp=2,dp=2", 4, (const char *[]){"0", "1", "2", "3"}, 4);
    /* forward of this fan-out is a local copy; the gradients tie the ranks */
    expect("tp=2,dp=1", "dp=2", 4, (const char *[]){"0 1", "0 1"}, 2);
    /* three parts of six samples on two: 0 and 1 feed the first, 1 and 2 the second */
    expect("dp=3", "dp=2", 6, (const char *[]){"0 1 2", "0 1 2", "0 1 2"}, 3);
    /* rank 4 is in no grid */
    expect("dp=4", "tp=2,dp=2", 4, (const char *[]){"0 1", "0 1", "2 3", "2 3", "4"}, 5);
}

T_MAIN("bridge/component")
