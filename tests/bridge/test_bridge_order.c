/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_order.c - ranks whose calls differ though their messages are alike: two bridges of
 * one shape in another order, one way against the other. All ranks hear of it, nothing that is
 * wrong is written.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

typedef struct order {
    t_case_t c;
    int32_t odd; /* the rank whose calls differ */
} order_t;

static colo_status_t make(const t_case_t *c, colo_comm_t *world, colo_bridge_t **bridge)
{
    return t_case_bridge(bridge, c, world, COLO_HOST);
}

/* ---- two bridges of one shape ---- */

static colo_status_t two_bridges_rank(colo_comm_t *world, void *arg)
{
    const order_t *o = arg;
    const int64_t rank = colo_comm_rank(world);
    colo_bridge_t *bridge[2] = {NULL, NULL};
    t_buffer_t x, y;
    rank_try(colo_comm_set_check(world, o->c.check));
    for (int i = 0; i < 2; i++)
        rank_try(make(&o->c, world, &bridge[i]));
    for (int i = 0; i < 2; i++)
        rank_try(t_case_step(bridge[i], rank, &o->c, i));
    rank_try(colo_comm_barrier(world, NULL)); /* no rank is still on the way */
    rank_try(t_case_tensor(&o->c, T_X, rank, 0, true, &x));
    rank_try(t_case_tensor(&o->c, T_Y, rank, 0, false, &y));
    colo_status_t st = colo_bridge_forward(bridge[rank == o->odd], &x.t, &y.t, NULL);
    if (st != COLO_ERR_MISMATCH || !says("bridge 1 forward") || !says("bridge 2 forward"))
        return t_rank_fail(__FILE__, __LINE__, st < 0 ? colo_last_error() : "no mismatch");
    rank_check(untouched(&y));
    if (o->c.check == 2) {
        rank_check(says("operation: rank 2 of 'world' has bridge 2 forward, rank 0 bridge 1 "
                        "forward"));
        for (int i = 0; i < 2; i++)
            rank_try(t_case_step(bridge[i], rank, &o->c, i));
    } else {
        rank_check(colo_bridge_forward(bridge[0], &x.t, &y.t, NULL) == COLO_ERR_MISMATCH);
    }
    t_buffer_free(&x);
    t_buffer_free(&y);
    for (int i = 0; i < 2; i++)
        colo_bridge_destroy(&bridge[i]);
    return COLO_OK;
}

T_CASE(two_bridges_of_one_shape_in_another_order_are_a_mismatch)
{
    for (int32_t check = 0; check <= 2; check++) {
        order_t o = {{.src = t_side("dp=4", true), /* all exchange with all */
                      .dst = t_side("tp=4", false),
                      .shape = {4, 8, 2},
                      .check = check},
                     2};
        colo_status_t st = t_run_ranks(4, two_bridges_rank, &o, sizeof o);
        if (st < 0)
            fail_msg("COLO_CHECK=%d: %s", (int)check, colo_last_error());
    }
}

T_CASE_ON(4, two_bridges_created_in_another_order_are_told_as_such)
{
    const t_case_t c[2] = {
        {.src = t_side("dp=4", true), .dst = t_side("tp=4", false), .shape = {4, 8, 2}},
        {.src = t_side("tp=2,dp=2", true), .dst = t_side("cp=2,dp=2", false), .shape = {6, 8, 3}}};
    const bool odd = colo_comm_rank(world) == 2;
    colo_bridge_t *bridge = NULL;
    rank_check(make(&c[odd], world, &bridge) == COLO_ERR_MISMATCH);
    rank_check(says("bridge create: rank 2 of 'world' brings another one than rank 0, as if the "
                    "calls of ranks came in different orders: src: rank 2 of 'world' has "
                    "tp=2,dp=2, rank 0 dp=4"));
    return make(&c[0], world, &bridge) == COLO_OK ? (colo_bridge_destroy(&bridge), COLO_OK)
                                                  : t_rank_fail(__FILE__, __LINE__, "dead");
}

/* ---- one way against the other ---- */

static colo_status_t two_ways_rank(colo_comm_t *world, void *arg)
{
    const order_t *o = arg;
    const int64_t rank = colo_comm_rank(world);
    const bool odd = rank == o->odd;
    const t_role_t role = odd ? T_DX : T_Y;
    colo_bridge_t *bridge = NULL;
    t_buffer_t in, out;
    rank_try(colo_comm_set_check(world, o->c.check));
    rank_try(make(&o->c, world, &bridge));
    rank_try(t_case_step(bridge, rank, &o->c, 0));
    rank_try(colo_comm_barrier(world, NULL));
    rank_try(t_case_tensor(&o->c, odd ? T_DY : T_X, rank, 0, true, &in));
    rank_try(t_case_tensor(&o->c, role, rank, 0, false, &out));
    colo_status_t st = odd ? colo_bridge_backward(bridge, &in.t, &out.t, NULL)
                           : colo_bridge_forward(bridge, &in.t, &out.t, NULL);
    if (st == COLO_OK && rank >= 2 && o->c.check < 2) /* it exchanges nothing with ranks 0 and 1 */
        rank_try(t_case_compare(&o->c, role, rank, 0, &out));
    else if (st != COLO_ERR_MISMATCH || !says("bridge 1 forward") || !says("bridge 1 backward"))
        return t_rank_fail(__FILE__, __LINE__, st < 0 ? colo_last_error() : "no mismatch");
    if (rank < 2 || o->c.check == 2) /* others may be in the middle of what is right */
        rank_check(st == COLO_ERR_MISMATCH && untouched(&out));
    if (o->c.check == 2)
        rank_try(t_case_step(bridge, rank, &o->c, 0));
    else
        rank_check(colo_comm_barrier(world, NULL) == COLO_ERR_MISMATCH);
    t_buffer_free(&in);
    t_buffer_free(&out);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(one_way_against_the_other_is_a_mismatch)
{
    for (int32_t check = 0; check <= 2; check++) {
        order_t o = {{.src = t_side("dp=4", true), /* both ways move the same boxes in pairs */
                      .dst = t_side("cp=2,dp=2", false),
                      .shape = {4, 8, 2},
                      .check = check},
                     1};
        colo_status_t st = t_run_ranks(4, two_ways_rank, &o, sizeof o);
        if (st < 0)
            fail_msg("COLO_CHECK=%d: %s", (int)check, colo_last_error());
    }
}

/* ---- reshape ---- */

typedef struct reshaping {
    t_case_t c;
    colo_shape_t shape[8]; /* of each rank; samples 0: it does not reshape */
    const char *error_message;
} reshaping_t;

static colo_status_t reshape_rank(colo_comm_t *world, void *arg)
{
    const reshaping_t *a = arg;
    const int64_t rank = colo_comm_rank(world);
    const colo_shape_t *shape = &a->shape[rank], first = {8, 8, 2, 0};
    t_case_t now = a->c;
    colo_bridge_t *bridge = NULL;
    t_buffer_t x, y;
    rank_try(colo_comm_set_check(world, a->c.check));
    rank_try(make(&a->c, world, &bridge));
    rank_try(t_case_step(bridge, rank, &a->c, 0));
    rank_try(colo_comm_barrier(world, NULL));
    if (shape->samples) {
        rank_try(colo_bridge_reshape(bridge, shape));
        now.shape = (ref_shape_t){shape->samples, shape->rows, shape->features};
        now.dst.positions = shape->positions;
    }
    rank_try(t_case_tensor(&now, T_X, rank, 0, true, &x));
    rank_try(t_case_tensor(&now, T_Y, rank, 0, false, &y));
    colo_status_t st = colo_bridge_forward(bridge, &x.t, &y.t, NULL);
    if (st != COLO_ERR_MISMATCH || !says(a->error_message))
        return t_rank_fail(__FILE__, __LINE__, st < 0 ? colo_last_error() : "no mismatch");
    rank_check(untouched(&y));
    if (a->shape[0].samples || a->c.check == 2) { /* all compared: they come together again */
        rank_check(colo_comm_check(world) == COLO_OK);
        rank_try(colo_bridge_reshape(bridge, &first));
        rank_try(t_case_step(bridge, rank, &a->c, 0));
    }
    t_buffer_free(&x);
    t_buffer_free(&y);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(a_reshape_that_differs_is_a_mismatch_on_all_ranks)
{
    /* components 0..3 and 4..7, which exchange no message */
    reshaping_t halves = {.error_message =
                              "bridge call: samples: rank 4 of 'world' has 24, rank 0 16"};
    reshaping_t longer = {.error_message =
                              "dst positions: rank 4 of 'world' has rows from 0 of 16, "
                              "rank 0 rows from 0 of 8"};
    reshaping_t *const list[] = {&halves, &longer};
    for (int32_t check = 1; check <= 2; check++)
        for (size_t i = 0; i < 2; i++) {
            reshaping_t a = *list[i];
            for (int r = 0; r < 8; r++)
                a.shape[r] = i ? (colo_shape_t){8, 8, 2, r < 4 ? 8 : 16}
                               : (colo_shape_t){r < 4 ? 16 : 24, 8, 2, 0};
            a.c = (t_case_t){.src = t_side("tp=2,dp=4", true),
                             .dst = t_side("tp=2,cp=2,dp=2", false),
                             .shape = {8, 8, 2},
                             .check = check};
            colo_status_t st = t_run_ranks(8, reshape_rank, &a, sizeof a);
            if (st < 0)
                fail_msg("case %zu at COLO_CHECK=%d: %s", i, (int)check, colo_last_error());
        }
}

/* Some reshape and others do not: these exchange, and those compare first. */
static colo_status_t lone_reshape_rank(colo_comm_t *world, void *arg)
{
    const reshaping_t *a = arg;
    const int64_t rank = colo_comm_rank(world);
    t_case_t now = a->c;
    colo_bridge_t *bridge = NULL;
    t_buffer_t x, y;
    rank_try(colo_comm_set_check(world, a->c.check));
    rank_try(make(&a->c, world, &bridge));
    rank_try(t_case_step(bridge, rank, &a->c, 0));
    rank_try(colo_comm_barrier(world, NULL));
    if (a->shape[rank].samples) {
        rank_try(colo_bridge_reshape(bridge, &a->shape[rank]));
        now.shape.b = a->shape[rank].samples;
    }
    rank_try(t_case_tensor(&now, T_X, rank, 0, true, &x));
    rank_try(t_case_tensor(&now, T_Y, rank, 0, false, &y));
    colo_status_t st = colo_bridge_forward(bridge, &x.t, &y.t, NULL);
    if (st == COLO_OK && !a->shape[rank].samples)
        rank_try(t_case_compare(&now, T_Y, rank, 0, &y));
    else if (st != COLO_ERR_MISMATCH)
        return t_rank_fail(__FILE__, __LINE__, colo_status_name(st));
    if (a->shape[rank].samples || rank == 2) /* 2 exchanges with 0; others may be in the middle */
        rank_check(st == COLO_ERR_MISMATCH && untouched(&y));
    if (st != COLO_OK)
        rank_check(says(a->c.check ? "comparing what ranks are about to do" : "with another plan"));
    rank_check(colo_comm_barrier(world, NULL) == COLO_ERR_MISMATCH);
    t_buffer_free(&x);
    t_buffer_free(&y);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(a_reshape_on_some_ranks_only_is_a_mismatch)
{
    for (int32_t check = 0; check <= 1; check++)
        for (int n = 1; n <= 4; n += 3) { /* within a component, and all of one */
            reshaping_t a = {.c = {.src = t_side("tp=2,dp=4", true),
                                   .dst = t_side("tp=2,cp=2,dp=2", false),
                                   .shape = {8, 8, 2},
                                   .check = check}};
            if (check == 0 && n == 4)
                continue; /* each component is right by itself, and nothing is compared */
            for (int r = 0; r < n; r++)
                a.shape[r] = (colo_shape_t){16, 8, 2, 0};
            colo_status_t st = t_run_ranks(8, lone_reshape_rank, &a, sizeof a);
            if (st < 0)
                fail_msg("%d ranks at COLO_CHECK=%d: %s", n, (int)check, colo_last_error());
        }
}

T_MAIN("bridge/bridge_order")
