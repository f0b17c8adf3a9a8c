/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_contract.c - COLO_CHECK=2 looks at what was declared about the data: replicas hold the same
 * values, a DISJOINT gradient is zero outside the rank's own rows. A violation is an error on
 * every rank before anything moves, names the ranks and the row, and leaves the bridge usable.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

static t_case_t usual(void)
{
    return t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
}

typedef struct contract {
    t_case_t c;
    bool backward;
    int64_t rank, ib, is, ih; /* the element that breaks it */
    const char *words[3];     /* in the error message of the rank that says CONTRACT */
    bool on_all;              /* every rank says CONTRACT; else the others say PEER */
} contract_t;

static colo_status_t contract_rank(colo_comm_t *world, void *arg)
{
    const contract_t *p = arg;
    const t_case_t *c = &p->c;
    const colo_pass_t pass = p->backward ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD;
    T_ENDS(ref_part_free) ref_part_t part = {0};
    T_STAND(s);
    rank_try(colo_comm_set_check(world, 2));
    rank_try(t_stand_make(&s, c, world));
    ref_part_make(&part, p->backward ? &c->dst : &c->src, c->shape, s.rank,
                  p->backward && c->output == COLO_OUTPUT_FULL_SEQ);
    if (s.rank == p->rank) {
        const float bad = 7.5f;
        memcpy(t_buffer_at(t_stand_in(&s, pass), c->axes, part.ns, p->ib, p->is, p->ih), &bad,
               sizeof bad);
    }
    const bool here = p->on_all || s.rank == p->rank;
    const colo_status_t st = t_stand_call(&s, pass);
    for (int i = 0; i < 3; i++)
        rank_fails(st, here ? COLO_ERR_CONTRACT : COLO_ERR_PEER,
                   here && p->words[i] ? p->words[i] : "");
    rank_check(untouched(t_stand_out(&s, pass)));
    rank_check(colo_comm_check(world) == COLO_OK);
    rank_try(t_stand_fill(&s, 0)); /* kept */
    rank_try(t_stand_call(&s, pass));
    return t_stand_compare(&s, p->backward ? T_DX : T_Y);
}

static void run_contract(const contract_t *p)
{
    contract_t copy = *p;
    if (colo_comm_threads_run(8, contract_rank, &copy) < 0)
        fail_msg("%s: %s", t_case_text(&copy.c), colo_last_error());
}

T_CASE(replicas_that_differ_break_a_contract_that_names_them)
{
    /* source tp: ranks 4 and 5 hold the same x */
    run_contract(&(contract_t){usual(), false, 5, 1, 3, 2, {"4", "5", "x"}, true});
    run_contract(&(contract_t){usual(), false, 4, 0, 0, 0, {"4", "5", "x"}, true});
    /* destination tp: ranks 6 and 7 hold the same d_y (tp fastest, then cp, then dp) */
    t_case_t c = usual();
    run_contract(&(contract_t){c, true, 7, 0, 5, 1, {"6", "7", "d_y"}, true});
    c.output = COLO_OUTPUT_SHARDED;
    run_contract(&(contract_t){c, true, 7, 0, 3, 1, {"6", "7", "d_y"}, true});
    /* with strides and gaps: no rank reads what lies between the elements */
    c = usual();
    c.stride = T_SPREAD;
    c.axes = "sbh";
    run_contract(&(contract_t){c, false, 3, 1, 7, 2, {"2", "3", "x"}, true});
}

T_CASE(a_disjoint_gradient_that_is_not_zero_names_row_and_rank)
{
    t_case_t c = usual();
    c.grad = COLO_GRAD_DISJOINT;
    /* zigzag of 8 rows over cp 2: cp 0 owns 0 1 6 7, cp 1 owns 2 3 4 5; rank 4: dp 1, cp 0, tp 0 */
    run_contract(&(contract_t){c, true, 4, 1, 3, 2, {"rank 4", "row 3", "DISJOINT"}, false});
    run_contract(&(contract_t){c, true, 7, 0, 6, 0, {"rank 7", "row 6", "DISJOINT"}, false});
    c.axes = "sbh";
    c.stride = T_REVERSED;
    run_contract(&(contract_t){c, true, 0, 3, 5, 2, {"rank 0", "row 5", "DISJOINT"}, false});
    c.axes = "th";
    c.stride = T_PADDED;
    c.dst.map = REF_OFFSET; /* rows at positions 2..9 of 16: 2 3 belong to cp 0, 4..9 to cp 1 */
    c.dst.map_offset = 2;
    c.dst.positions = 16;
    run_contract(&(contract_t){c, true, 0, 0, 2, 0, {"rank 0", "row 2", "DISJOINT"}, false});
}

T_CASE_ON_THREADS(8, without_the_check_only_owned_rows_of_a_disjoint_gradient_move)
{
    t_case_t c = usual();
    c.grad = COLO_GRAD_DISJOINT;
    c.check = 1;
    T_STAND(s);
    rank_try(t_stand_make(&s, &c, world));
    const float bad = 7.5f;
    if (s.rank < 2) /* row 3 belongs to cp 1: what cp 0 has there never arrives */
        memcpy(t_buffer_at(&s.t[T_DY], NULL, 8, 1, 3, 2), &bad, sizeof bad);
    rank_try(t_stand_call(&s, COLO_PASS_BACKWARD));
    return t_stand_compare(&s, T_DX);
}

/* Replicas that own nothing: one passes NULL, the other a view of no element that has a pointer. */
T_CASE_ON(4, replicas_that_own_nothing_agree_whatever_they_pass)
{
    const int64_t rank = colo_comm_rank(world), mine = rank / 2;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    float x[8], y[8], d_x[8];
    rank_try(colo_comm_set_check(world, 2));
    T_BRIDGE_CONFIG(config, "tp=2,dp=2", "tp=2,dp=2",
                    .shape = {1, 4, 2, 0}); /* dp 1 has the only sample */
    rank_try(colo_bridge_create(&bridge, &config, world));
    for (int i = 0; i < 8; i++) {
        x[i] = (float)(10 + i);
        y[i] = d_x[i] = -1;
    }
    colo_tensor_t in = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){mine, 4, 2});
    colo_tensor_t out = colo_tensor_host(y, COLO_F32, 3, (int64_t[]){mine, 4, 2});
    colo_tensor_t back = colo_tensor_host(d_x, COLO_F32, 3, (int64_t[]){mine, 4, 2});
    rank_try(colo_bridge_forward(bridge, rank == 0 ? NULL : &in, &out, NULL));
    rank_try(colo_bridge_backward(bridge, rank == 0 ? NULL : &out, &back, NULL));
    for (int i = 0; i < 8; i++)
        rank_check(y[i] == (mine ? x[i] : -1) && d_x[i] == y[i]);
    return COLO_OK;
}

/* A comm of ranks 1 and 2 of tp=3, between which nothing moves. */
T_CASE_ON(3, replicas_whose_first_is_not_in_the_comm_are_compared)
{
    const int32_t rank = colo_comm_rank(world);
    colo_layout_t layout;
    T_ENDS(colo_comm_destroy) colo_comm_t *comm = NULL;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    float x = (float)rank, y = -1;
    const colo_tensor_t in = colo_tensor_host(&x, COLO_F32, 3, (int64_t[]){1, 1, 1}),
                        out = colo_tensor_host(&y, COLO_F32, 3, (int64_t[]){1, 1, 1});
    rank_try(colo_comm_set_check(world, 2));
    rank_try(colo_comm_split_color(world, rank ? 0 : -1, 0, &comm));
    if (!comm)
        return COLO_OK;
    rank_try(t_layout_of("tp=3", true, &layout));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &layout, .dst = &layout,
                                   .shape = {1, 1, 1, 0}};
    rank_try(colo_bridge_create(&bridge, &config, comm));
    rank_check(colo_bridge_forward(bridge, &in, &out, NULL) == COLO_ERR_CONTRACT);
    rank_check(says("ranks 1 and 2 hold the same block of x") && y == -1);
    return COLO_OK;
}

T_MAIN("bridge/contract")
