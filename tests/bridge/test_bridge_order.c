/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_order.c - ranks whose calls differ though their messages are alike: two bridges of
 * one shape in another order, one way against the other. All ranks hear of it, nothing that is
 * wrong is written.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

/* A stand whose ranks have made a step, none of which is still on the way. */
static colo_status_t after_a_step(t_stand_t *s, const t_case_t *c, colo_comm_t *world)
{
    rank_try(colo_comm_set_check(world, c->check));
    rank_try(t_stand_make(s, c, world));
    rank_try(t_stand_step(s, 0));
    return colo_comm_barrier(world, NULL);
}

static colo_status_t not_told(colo_status_t st, int line)
{
    return t_rank_fail(__FILE__, line, st < 0 ? colo_last_error() : "no mismatch");
}

/* ---- two bridges of one shape ---- */

T_CASE_FOR(4, two_bridges_of_one_shape_in_another_order_are_a_mismatch, int32_t, check, 0, 1, 2)
{
    const t_case_t c = T_BETWEEN("dp=4", "tp=4", 4, 8, 2, .check = check); /* all with all */
    T_STAND(one);
    T_STAND(two);
    rank_try(after_a_step(&one, &c, world));
    rank_try(after_a_step(&two, &c, world));
    t_stand_t *s = one.rank == 2 ? &two : &one;
    const colo_status_t st = t_stand_call(s, COLO_PASS_FORWARD);
    if (st != COLO_ERR_MISMATCH || !says("bridge 1 forward") || !says("bridge 2 forward"))
        return not_told(st, __LINE__);
    rank_check(untouched(&s->t[T_Y]));
    if (check < 2) {
        rank_check(t_stand_call(&one, COLO_PASS_FORWARD) == COLO_ERR_MISMATCH);
        return COLO_OK;
    }
    rank_check(says("operation: rank 2 of 'world' has bridge 2 forward, rank 0 bridge 1 forward"));
    rank_try(t_stand_step(&one, 0));
    return t_stand_step(&two, 1);
}

/* ---- a backward that follows on some ranks only ---- */

T_CASE_FOR(4, a_forward_that_a_backward_follows_on_some_ranks_only_is_a_mismatch, int32_t, check, 0,
           1, 2)
{
    const t_case_t c = T_BETWEEN("dp=4", "tp=4", 4, 8, 2, .check = check); /* all with all */
    T_STAND(s);
    rank_try(after_a_step(&s, &c, world));
    for (int i = 0; i < 2; i++) { /* alike on all ranks, and in any order */
        colo_bridge_expect_backward(s.bridge, i == 1);
        rank_try(t_stand_step(&s, i));
    }
    rank_try(colo_comm_barrier(world, NULL));
    colo_bridge_expect_backward(s.bridge, s.rank != 2);
    const colo_status_t st = t_stand_call(&s, COLO_PASS_FORWARD);
    if (st != COLO_ERR_MISMATCH || !says("bridge 1 forward without backward"))
        return not_told(st, __LINE__);
    rank_check(untouched(&s.t[T_Y]));
    if (check < 2)
        return COLO_OK;
    rank_check(says("operation: rank 2 of 'world' has bridge 1 forward without backward, rank 0 "
                    "bridge 1 forward"));
    colo_bridge_expect_backward(s.bridge, true);
    colo_bridge_expect_backward(NULL, true);
    return t_stand_step(&s, 3);
}

T_CASE_ON(4, two_bridges_created_in_another_order_are_told_as_such)
{
    const t_case_t c[2] = {
        t_between("dp=4", "tp=4", 4, 8, 2),
        {.src = t_side("tp=2,dp=2", true), .dst = t_side("cp=2,dp=2", false), .shape = {6, 8, 3}}};
    const bool odd = colo_comm_rank(world) == 2;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    rank_fails(t_case_bridge(&bridge, &c[odd], world, COLO_MEM_HOST), COLO_ERR_MISMATCH,
               "bridge create: rank 2 of 'world' brings another one than rank 0, as if the "
               "calls of ranks came in different orders: src: rank 2 of 'world' has "
               "tp=2,dp=2, rank 0 dp=4");
    return t_case_bridge(&bridge, &c[0], world, COLO_MEM_HOST);
}

/* ---- one way against the other ---- */

T_CASE_FOR(4, one_way_against_the_other_is_a_mismatch, int32_t, check, 0, 1, 2)
{
    /* both ways move the same boxes in pairs */
    const t_case_t c = T_BETWEEN("dp=4", "cp=2,dp=2", 4, 8, 2, .check = check);
    T_STAND(s);
    rank_try(after_a_step(&s, &c, world));
    const colo_pass_t pass = s.rank == 1 ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD;
    const colo_status_t st = t_stand_call(&s, pass);
    if (st == COLO_OK && s.rank >= 2 && check < 2) /* it has nothing from ranks 0 and 1 */
        rank_try(t_stand_compare(&s, T_Y));
    else if (st != COLO_ERR_MISMATCH || !says("bridge 1 forward") || !says("bridge 1 backward"))
        return not_told(st, __LINE__);
    if (s.rank < 2 || check == 2) /* others may be in the middle of what is right */
        rank_check(st == COLO_ERR_MISMATCH && untouched(t_stand_out(&s, pass)));
    if (check == 2)
        return t_stand_step(&s, 0);
    rank_check(colo_comm_barrier(world, NULL) == COLO_ERR_MISMATCH);
    return COLO_OK;
}

/* ---- reshape ---- */

typedef struct reshaping {
    t_case_t c;
    colo_shape_t shape[8]; /* of each rank; samples 0: it does not reshape */
    const char *error_message;
} reshaping_t;

/* A forward after the rank's reshape. */
static colo_status_t forward_reshaped(t_stand_t *s, const reshaping_t *a, t_case_t *now,
                                      colo_comm_t *world)
{
    rank_try(after_a_step(s, &a->c, world));
    const colo_shape_t *shape = &a->shape[s->rank];
    *now = a->c;
    if (shape->samples) {
        rank_try(colo_bridge_reshape(s->bridge, shape));
        now->shape = (ref_shape_t){shape->samples, shape->rows, shape->features};
        now->dst.positions = shape->positions;
    }
    s->c = now;
    rank_try(t_stand_fill(s, 0));
    return t_stand_call(s, COLO_PASS_FORWARD);
}

static colo_status_t reshape_rank(colo_comm_t *world, void *arg)
{
    const reshaping_t *a = arg;
    const colo_shape_t first = {8, 8, 2, 0};
    t_case_t now;
    T_STAND(s);
    const colo_status_t st = forward_reshaped(&s, a, &now, world);
    if (st != COLO_ERR_MISMATCH || !says(a->error_message))
        return not_told(st, __LINE__);
    rank_check(untouched(&s.t[T_Y]));
    if (!a->shape[0].samples && a->c.check < 2)
        return COLO_OK;
    rank_check(colo_comm_check(world) == COLO_OK); /* all compared: they come together again */
    rank_try(colo_bridge_reshape(s.bridge, &first));
    return t_case_step(s.bridge, s.rank, &a->c, 0);
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
            a.c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2, .check = check);
            if (t_run_ranks(8, reshape_rank, &a, sizeof a) < 0)
                fail_msg("case %zu at COLO_CHECK=%d: %s", i, (int)check, colo_last_error());
        }
}

/* Some reshape and others do not: these exchange, and those compare first. */
static colo_status_t lone_reshape_rank(colo_comm_t *world, void *arg)
{
    const reshaping_t *a = arg;
    t_case_t now;
    T_STAND(s);
    const colo_status_t st = forward_reshaped(&s, a, &now, world);
    const bool reshaped = a->shape[s.rank].samples > 0;
    if (st == COLO_OK && !reshaped)
        rank_try(t_stand_compare(&s, T_Y));
    else if (st != COLO_ERR_MISMATCH)
        return not_told(st, __LINE__);
    if (reshaped || s.rank == 2) /* 2 exchanges with 0; others may be in the middle */
        rank_check(st == COLO_ERR_MISMATCH && untouched(&s.t[T_Y]));
    if (st != COLO_OK)
        rank_check(says(a->c.check ? "comparing what ranks are about to do" : "with another plan"));
    rank_check(colo_comm_barrier(world, NULL) == COLO_ERR_MISMATCH);
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
            if (t_run_ranks(8, lone_reshape_rank, &a, sizeof a) < 0)
                fail_msg("%d ranks at COLO_CHECK=%d: %s", n, (int)check, colo_last_error());
        }
}

T_MAIN("bridge/bridge_order")
