/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_failure.c - ranks that go wrong: no rank hangs, every rank learns which one did what,
 * nothing is written.
 *
 * Rank functions note what each rank saw; the main thread judges. Deadlines are short, and every
 * case would hang (and be killed by the runner) if the check under test were missing.
 */
#include "comm/seen.h"

#include "comm/comm.h"
#include "core/error.h"

#include <stdatomic.h>
#include <unistd.h>

/* ---- a rank that does not come ---- */

static colo_status_t skip_rank(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c);
    float x[4] = {1, 2, 3, 4}, all[12];
    rank_try(colo_comm_barrier(c, NULL));
    rank_try(colo_comm_barrier(c, NULL));
    rank_try(colo_comm_set_timeout(c, me == 0 ? 300 : 20000));
    for (int i = 0; i < 12; i++)
        all[i] = -1;
    if (me == 2) /* misses #3, comes when the deadline is over */
        while (colo_comm_check(c) == COLO_OK)
            usleep(1000);
    NOTE(s, me, colo_comm_all_gather(c, x, all, 4, COLO_F32, NULL));
    for (int i = 0; i < 12; i++)
        rank_check(all[i] == -1);
    return COLO_OK;
}

T_CASE(a_skipped_call_is_a_timeout_with_both_sequence_numbers)
{
    struct seen s = {.arrived = 0};
    assert_ok(t_run_ranks(3, skip_rank, &s, sizeof s));
    for (int r = 0; r < 3; r++) {
        expect(&s, r, COLO_ERR_TIMEOUT, "all_gather #3 (4 f32) on 'world' (world ranks 0 1 2)");
        expect(&s, r, COLO_ERR_TIMEOUT, "rank 0 waited for rank 2");
        expect(&s, r, COLO_ERR_TIMEOUT, "did not arrive within 300 ms");
        expect(&s, r, COLO_ERR_TIMEOUT, "the last operation of rank 2 is barrier #2");
    }
    assert_true(s.seconds[0] >= 0.300 && s.seconds[0] < 10);
}

/* What kills a group after an operation that all of them finished does not reach back into it. */
static colo_status_t abort_after(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c);
    for (int i = 0; i < 20; i++)
        rank_try(colo_comm_barrier(c, NULL));
    NOTE(s, me, colo_comm_barrier(c, NULL));
    if (me == 2)
        colo_comm_abort(c, "afterwards");
    return COLO_OK;
}

T_CASE(an_operation_that_all_finished_stays_finished)
{
    T_THREADS_ONLY();
    for (int i = 0; i < t_scaled(400); i++) {
        struct seen s = {.arrived = 0};
        assert_ok(t_run_ranks(8, abort_after, &s, sizeof s));
        for (int r = 0; r < 8; r++)
            if (s.status[r] != COLO_OK)
                fail_msg("run %d, rank %d: %s", i, r, s.error_message[r]);
    }
}

static colo_status_t absent_sender(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c), got = -1;
    colo_box_t in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t recv = {1, 1, &in};
    rank_try(colo_comm_set_timeout(c, 120));
    if (me == 0)
        NOTE(s, me, colo_comm_exchange(c, NULL, 0, &recv, 1, COLO_I32, NULL));
    else
        while (colo_comm_check(c) == COLO_OK)
            usleep(1000);
    rank_check(got == -1);
    return COLO_OK;
}

T_CASE(an_exchange_names_the_sender_that_did_not_come)
{
    struct seen s = {.arrived = 0};
    assert_ok(t_run_ranks(3, absent_sender, &s, sizeof s));
    expect(&s, 0, COLO_ERR_TIMEOUT, "exchange #1 (i32)");
    expect(&s, 0, COLO_ERR_TIMEOUT, "rank 0 waited for rank 1");
    expect(&s, 0, COLO_ERR_TIMEOUT, "the last operation of rank 1 is none");
}

/* The buffers of a call that timed out belong to the caller again, also when peers come late. */
static colo_status_t late_readers(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c), n = colo_comm_size(c);
    enum { COUNT = 20000 };
    rank_try(colo_comm_set_timeout(c, 30));
    usleep((useconds_t)(me * 8000));                     /* the deadline falls among the arrivals */
    while (me == n - 1 && colo_comm_check(c) == COLO_OK) /* and before the last */
        usleep(500);
    int64_t *x = calloc(COUNT, sizeof *x), *y = calloc(COUNT * (size_t)n, sizeof *y);
    NOTE(s, me, colo_comm_all_gather(c, x, y, COUNT, COLO_I64, NULL));
    memset(x, 0xff, COUNT * sizeof *x);
    free(x); /* a late reader would be seen by ASan and TSan */
    free(y);
    return COLO_OK;
}

T_CASE(a_timed_out_call_leaves_no_rank_reading_its_buffers)
{
    struct seen s = {.arrived = 0};
    for (int i = 0; i < 5; i++) {
        assert_ok(t_run_ranks(8, late_readers, &s, sizeof s));
        /* or "did not finish": on loaded cores a rank may still copy when the deadline comes */
        expect(&s, 0, COLO_ERR_TIMEOUT, " within 30 ms");
        expect(&s, 7, COLO_ERR_TIMEOUT, " within 30 ms");
    }
}

/* ---- ranks that do different things ---- */

struct disagreement {
    struct seen seen;
    int which, check;
};

static colo_status_t disagree(colo_comm_t *c, int which, bool odd, float *x, float *y)
{
    switch (which) {
    case 0:
        return odd ? colo_comm_all_reduce(c, x, y, 4, COLO_F32, COLO_SUM, NULL)
                   : colo_comm_broadcast(c, y, 4, COLO_F32, 0, NULL);
    case 1:
        return colo_comm_all_reduce(c, x, y, odd ? 5 : 4, COLO_F32, COLO_SUM, NULL);
    case 2:
        return colo_comm_all_gather(c, x, y, 4, odd ? COLO_I32 : COLO_F32, NULL);
    case 3:
        return colo_comm_all_reduce(c, x, y, 4, COLO_F32, odd ? COLO_MAX : COLO_SUM, NULL);
    case 4:
        return colo_comm_broadcast(c, y, 4, COLO_F32, odd ? 1 : 0, NULL);
    default:
        return odd ? colo_comm_barrier(c, NULL)
                   : colo_comm_reduce_scatter(c, y + 8, y, 1, COLO_F32, COLO_SUM, NULL);
    }
}

static colo_status_t disagree_rank(colo_comm_t *c, void *arg)
{
    struct disagreement *d = arg;
    int32_t me = colo_comm_rank(c);
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[40];
    for (int i = 0; i < 40; i++)
        y[i] = -1;
    rank_try(colo_comm_set_check(c, d->check));
    rank_try(colo_comm_set_timeout(c, 20000));
    NOTE(&d->seen, me, disagree(c, d->which, me == 2, x, y));
    for (int i = 0; i < 40; i++)
        rank_check(y[i] == -1);
    if (d->check < 2) {
        rank_check(colo_comm_check(c) == COLO_ERR_MISMATCH);
        rank_fails(colo_comm_barrier(c, NULL), COLO_ERR_MISMATCH, "comm 'world' is dead");
        return COLO_OK;
    }
    rank_check(colo_comm_check(c) == COLO_OK);
    float one = 1;
    rank_try(colo_comm_all_reduce(c, &one, &one, 1, COLO_F32, COLO_SUM, NULL));
    rank_check(one == 4);
    return COLO_OK;
}

T_CASE(different_operations_are_a_mismatch_on_all_ranks)
{
    static const struct {
        const char *most, *odd;
    } text[] = {
        {"broadcast #1 (4 f32 from rank 0)", "all_reduce #1 (sum of 4 f32)"},
        {"all_reduce #1 (sum of 4 f32)", "all_reduce #1 (sum of 5 f32)"},
        {"all_gather #1 (4 f32)", "all_gather #1 (4 i32)"},
        {"all_reduce #1 (sum of 4 f32)", "all_reduce #1 (max of 4 f32)"},
        {"broadcast #1 (4 f32 from rank 0)", "broadcast #1 (4 f32 from rank 1)"},
        {"reduce_scatter #1 (sum of 1 f32)", "barrier #1"},
    };
    for (int which = 0; which < 6; which++)
        for (int check = 0; check < 2; check++) {
            struct disagreement d = {.which = which, .check = check};
            assert_ok(t_run_ranks(4, disagree_rank, &d, sizeof d));
            for (int r = 0; r < 4; r++) {
                expect(&d.seen, r, COLO_ERR_MISMATCH, text[which].most);
                expect(&d.seen, r, COLO_ERR_MISMATCH, text[which].odd);
                expect(&d.seen, r, COLO_ERR_MISMATCH, "rank 2 is in");
                /* a rank that came last finds "comm 'world' is dead: " in front of the same words
                 */
                if (t_ranks_are_threads()) /* processes may find it each by itself */
                    assert_string_equal(strstr(d.seen.error_message[r], "on 'world'"),
                                        strstr(d.seen.error_message[0], "on 'world'"));
            }
        }
}

T_CASE(at_check_2_a_mismatch_leaves_the_comm_alive)
{
    for (int which = 0; which < 6; which++) {
        struct disagreement d = {.which = which, .check = 2};
        assert_ok(t_run_ranks(4, disagree_rank, &d, sizeof d));
        for (int r = 0; r < 4; r++) {
            expect(&d.seen, r, COLO_ERR_MISMATCH, "rank 0 is about to run");
            expect(&d.seen, r, COLO_ERR_MISMATCH, ", rank 2 ");
            assert_string_equal(d.seen.error_message[r], d.seen.error_message[0]);
        }
    }
}

static colo_status_t collective_against_exchange(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c), v = me, got = -1;
    colo_box_t out = {&v, {1, 1, 1}, {0, 0, 0}}, in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t send = {me ^ 1, 1, &out}, recv = {me ^ 1, 1, &in};
    rank_try(colo_comm_set_timeout(c, 20000));
    if (me == 2) { /* 0 and 1 finish their exchange without it, and go on */
        while (atomic_load(&s->arrived) < 2)
            usleep(500);
        NOTE(s, me, colo_comm_barrier(c, NULL));
    } else if (me < 2) {
        for (int i = 0; i < 3; i++)
            rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_I32, NULL));
        rank_check(got == (me ^ 1));
        atomic_fetch_add(&s->arrived, 1);
        NOTE(s, me, colo_comm_barrier(c, NULL));
    }
    return COLO_OK;
}

T_CASE(ranks_that_went_past_without_me_are_a_mismatch_not_a_hang)
{
    T_THREADS_ONLY();
    struct seen s = {.arrived = 0};
    assert_ok(t_run_ranks(3, collective_against_exchange, &s, sizeof s));
    expect(&s, 2, COLO_ERR_MISMATCH, "rank 2 is in barrier #1, but rank 0 went past #1 without it");
    for (int r = 0; r < 2; r++) /* they see the verdict, whatever they were waiting for */
        expect(&s, r, COLO_ERR_MISMATCH, "rank 2 is in barrier #1");
}

/* ---- ranks that fail by themselves ---- */

static colo_status_t failing_rank(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c);
    rank_try(colo_comm_set_timeout(c, 20000));
    if (me == 3)
        return colo_fail(COLO_ERR_SHAPE, "batch 30 does not split into 4 slices");
    NOTE(s, me, colo_comm_barrier(c, NULL));
    return s->status[me];
}

T_CASE(the_error_of_one_rank_reaches_all_and_the_caller)
{
    struct seen s = {.arrived = 0};
    colo_status_t st = t_run_ranks(5, failing_rank, &s, sizeof s);
    assert_int_equal(st, COLO_ERR_SHAPE);
    assert_string_equal(colo_last_error(), "rank 3: batch 30 does not split into 4 slices");
    for (int r = 0; r < 5; r++)
        if (r != 3) {
            expect(&s, r, COLO_ERR_PEER, "rank 3 failed: batch 30 does not split into 4 slices");
            assert_true(s.seconds[r] < 10);
        }
}

static colo_status_t failing_in_child(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c);
    T_ENDS(colo_comm_destroy) colo_comm_t *pair = NULL;
    rank_try(colo_comm_split_color(c, me / 2, 0, &pair));
    rank_try(colo_comm_set_timeout(pair, 20000));
    float x = 1;
    /* rank 3 is wrong in its pair (2, 3): 2 learns at once, 0 and 1 when 3 returns */
    if (me == 2 || me == 3)
        NOTE(s, me,
             colo_comm_all_reduce(pair, me == 3 ? NULL : &x, &x, 1, COLO_F32, COLO_SUM, NULL));
    else
        NOTE(s, me, colo_comm_barrier(c, NULL));
    rank_check(x == 1);
    rank_check(me < 2 || colo_comm_check(pair) == s->status[me]);
    return s->status[me];
}

T_CASE(wrong_arguments_on_one_rank_wake_its_peers)
{
    struct seen s = {.arrived = 0};
    colo_status_t st = t_run_ranks(4, failing_in_child, &s, sizeof s);
    assert_int_equal(st, COLO_ERR_ARG);
    assert_string_equal(colo_last_error(), "rank 3: all_reduce: send is NULL for 4 bytes");
    expect(&s, 3, COLO_ERR_ARG, "send is NULL for 4 bytes");
    expect(&s, 2, COLO_ERR_PEER, "rank 1 (world rank 3) failed: all_reduce: send is NULL");
    for (int r = 0; r < 2; r++)
        expect(&s, r, COLO_ERR_PEER, "send is NULL for 4 bytes");
}

struct wrong {
    struct seen seen;
    int which;
};

static colo_status_t run_wrong(colo_comm_t *c, int which, float *x, float *y, colo_stream_t none)
{
    switch (which) {
    case 0:
        return colo_comm_all_gather(c, x, y, -1, COLO_F32, none);
    case 1:
        return colo_comm_all_gather(c, x, y, INT64_MAX / 4, COLO_F32, none);
    case 2:
        return colo_comm_all_gather(c, x, NULL, 2, COLO_F32, none);
    case 3:
        return colo_comm_all_gather(c, y + 1, y, 2, COLO_F32, none);
    case 4:
        return colo_comm_all_reduce(c, x, y, 2, COLO_I8, COLO_SUM, none);
    case 5:
        return colo_comm_all_reduce(c, x, y, 2, COLO_F32, (colo_redop_t)7, none);
    case 6:
        return colo_comm_all_reduce(c, y + 1, y, 2, COLO_F32, COLO_SUM, none);
    case 7:
        return colo_comm_reduce_scatter(c, y, y + 1, 2, COLO_F32, COLO_SUM, none);
    case 8:
        return colo_comm_broadcast(c, y, 2, COLO_F32, 3, none);
    case 9:
        return colo_comm_broadcast(c, NULL, 2, COLO_F32, 0, none);
    default:
        return colo_comm_broadcast(c, y, 2, (colo_dtype_t)-1, 0, none);
    }
}

static colo_status_t wrong_rank(colo_comm_t *c, void *arg)
{
    struct wrong *w = arg;
    int32_t me = colo_comm_rank(c);
    float x[8] = {0}, y[16];
    for (int i = 0; i < 16; i++)
        y[i] = 5;
    rank_try(colo_comm_set_check(c, 2));
    if (me == w->which % 2)
        NOTE(&w->seen, me, run_wrong(c, w->which, x, y, NULL));
    else
        NOTE(&w->seen, me, colo_comm_barrier(c, NULL));
    for (int i = 0; i < 16; i++)
        rank_check(y[i] == 5);
    rank_check(colo_comm_check(c) == COLO_OK);
    return colo_comm_barrier(c, NULL);
}

T_CASE(at_check_2_wrong_arguments_leave_the_comm_alive)
{
    static const char *const text[] = {
        "all_gather: count -1",
        "pass 2^63",
        "recv is NULL for 24 bytes",
        "overlap other than in place",
        "dtype i8",
        "operation 7",
        "overlap other than in place",
        "overlap other than in place",
        "root 3, expected 0..2",
        "buffer is NULL for 8 bytes",
        "dtype -1 is unknown",
    };
    for (int which = 0; which < (int)(sizeof text / sizeof text[0]); which++) {
        struct wrong w = {.which = which};
        const int odd = which % 2;
        assert_ok(t_run_ranks(3, wrong_rank, &w, sizeof w));
        expect(&w.seen, odd, COLO_ERR_ARG, text[which]);
        for (int r = 1 - odd; r < 3; r += 1 + odd) {
            expect(&w.seen, r, COLO_ERR_PEER, odd ? "rank 1 failed: " : "rank 0 failed: ");
            expect(&w.seen, r, COLO_ERR_PEER, text[which]);
        }
    }
}

/* ---- agreement and splits that go wrong ---- */

struct splitting {
    struct seen seen;
    const char *spec[2], *dims[2]; /* of most ranks, of rank 1 */
};

static colo_status_t bad_split_rank(colo_comm_t *c, void *arg)
{
    struct splitting *s = arg;
    int32_t me = colo_comm_rank(c), odd = me == 1;
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, s->spec[odd], 0));
    colo_comm_t *child = (colo_comm_t *)&grid;
    NOTE(&s->seen, me, colo_comm_split(c, &grid, s->dims[odd], &child));
    rank_check(child == (colo_comm_t *)&grid);
    rank_check(colo_comm_check(c) == COLO_OK);
    return colo_comm_barrier(c, NULL);
}

T_CASE(splits_that_differ_are_a_mismatch_on_all_ranks)
{
    struct splitting table[] = {
        {.spec = {"tp=2,dp=2", "tp=4"}, .dims = {"tp", "tp"}},
        {.spec = {"tp=2,dp=2", "tp=2,dp=2"}, .dims = {"tp", "dp"}},
    };
    for (int i = 0; i < 2; i++) {
        assert_ok(t_run_ranks(4, bad_split_rank, &table[i], sizeof table[i]));
        for (int r = 0; r < 4; r++)
            expect(&table[i].seen, r, COLO_ERR_MISMATCH,
                   i ? "split: dims: rank 1 of 'world' has dp, rank 0 tp"
                     : "split: grid: rank 1 of 'world' has tp=4, rank 0 tp=2,dp=2");
    }
}

T_CASE(a_split_that_is_wrong_on_one_rank_fails_on_all)
{
    struct splitting s = {.spec = {"tp=2,dp=2", "tp=2,dp=2"}, .dims = {"tp", "qp"}};
    assert_ok(t_run_ranks(4, bad_split_rank, &s, sizeof s));
    expect(&s.seen, 1, COLO_ERR_ARG, "qp");
    for (int r = 0; r < 4; r++)
        if (r != 1)
            expect(&s.seen, r, COLO_ERR_PEER, "rank 1 failed: ");
}

T_CASE(a_group_that_reaches_beyond_the_parent_is_missing_members)
{
    struct splitting s = {.spec = {"tp=2,dp=3", "tp=2,dp=3"}, .dims = {"tp", "tp"}};
    assert_ok(t_run_ranks(5, bad_split_rank, &s, sizeof s)); /* rank 4's partner is 5 */
    expect(&s.seen, 4, COLO_ERR_MISSING,
           "world rank 5 of the group of world rank 4 is not in comm");
    for (int r = 0; r < 4; r++)
        expect(&s.seen, r, COLO_ERR_PEER, "rank 4 failed: ");
}

static colo_status_t agree_rank(colo_comm_t *c, void *arg)
{
    struct seen *s = arg;
    int32_t me = colo_comm_rank(c);
    rank_try(colo_comm_i_agree(c, "tea", 42, COLO_OK));
    colo_status_t mine = me == 2 ? colo_fail(COLO_ERR_NOMEM, "no cup for rank 2") : COLO_OK;
    NOTE(s, me, colo_comm_i_agree(c, "tea", 42, mine));
    colo_status_t st = colo_comm_i_agree(c, "tea", me == 1 ? 43 : 42, COLO_OK);
    rank_fails(st, COLO_ERR_MISMATCH,
               "tea: fingerprint: rank 1 of 'world' has "
               "000000000000002b, rank 0 000000000000002a");
    rank_fails(colo_comm_i_agree(c, me == 3 ? "coffee" : "tea", 42, COLO_OK), COLO_ERR_MISMATCH,
               "call: rank 3 of 'world' has coffee, rank 0 tea");
    return colo_comm_i_agree(c, "tea", 44, COLO_OK);
}

/* Rank 2 brings other values: of five fields, of one that no longer fits, of a long one. */
T_CASE_ON(4, agreement_on_fields_names_those_that_differ)
{
    static const char *const names[] = {"milk", "sugar", "lemon", "cup", "spoon"};
    const bool odd = colo_comm_rank(world) == 2;
    for (int last = 0; last < 3; last++) {
        colo_fields_t f = {COLO_FIELDS_INIT};
        for (int i = 0; last == 0 && i < 5; i++)
            colo_fields_add(&f, names[i], "%d", odd ? i : 9);
        for (int i = 0; last == 1 && i < 40; i++)
            colo_fields_add(&f, names[i % 5], "%0100d", odd && i == 39);
        if (last == 2)
            colo_fields_add(&f, "pot", "%0300d", odd);
        colo_status_t st = colo_comm_i_agree_fields(world, "tea", &f, COLO_OK);
        if (last == 2) {
            rank_try(st); /* what is past the end of a value is not compared */
            continue;
        }
        rank_check(st == COLO_ERR_MISMATCH);
        if (strcmp(colo_last_error(),
                   last ? "tea: rank 2 of 'world' differs from rank 0 in what is too long to send"
                        : "tea: rank 2 of 'world' brings another one than rank 0, as if the calls "
                          "of ranks came in different orders: milk: rank 2 of 'world' has 0, rank "
                          "0 9; sugar: rank 2 of 'world' has 1, rank 0 9; lemon: rank 2 of 'world' "
                          "has 2, rank 0 9; 2 more differ") != 0)
            return t_rank_fail(__FILE__, __LINE__, colo_last_error());
    }
    return colo_comm_barrier(world, NULL);
}

/* Ranks 0 and 2 have no milk; then rank 3 has another one than rank 1, then another cup. */
T_CASE_ON(4, agreement_on_optional_fields_leaves_out_ranks_without_them)
{
    static const char *const expected[] = {NULL,
                                           "tea: milk: rank 3 of 'world' has oats, rank 1 cow",
                                           "tea: cup: rank 3 of 'world' has 3, rank 0 0"};
    const int me = colo_comm_rank(world);
    for (int i = 0; i < 3; i++) {
        colo_fields_t f = {COLO_FIELDS_INIT};
        colo_fields_add(&f, "cup", "%d", i == 2 && me == 3 ? 3 : 0);
        if (me % 2)
            colo_fields_add_optional(&f, "milk", "%s", i == 1 && me == 3 ? "oats" : "cow");
        const colo_status_t st = colo_comm_i_agree_fields(world, "tea", &f, COLO_OK);
        rank_check(st == (expected[i] ? COLO_ERR_MISMATCH : COLO_OK));
        if (expected[i] && strcmp(colo_last_error(), expected[i]) != 0)
            return t_rank_fail(__FILE__, __LINE__, colo_last_error());
    }
    return colo_comm_barrier(world, NULL);
}

T_CASE(agreement_hands_each_rank_the_right_status)
{
    struct seen s = {.arrived = 0};
    assert_ok(t_run_ranks(4, agree_rank, &s, sizeof s));
    expect(&s, 2, COLO_ERR_NOMEM, "no cup for rank 2");
    for (int r = 0; r < 4; r++)
        if (r != 2)
            expect(&s, r, COLO_ERR_PEER, "tea: rank 2 failed: no cup for rank 2");
}

/* ---- meeting ---- */

/* Rank 2 comes late: no rank is past the meeting before. */
static colo_status_t meeting_rank(colo_comm_t *c, void *arg)
{
    atomic_int *arrived = arg;
    colo_comm_t *gpus = calloc(1, sizeof *gpus); /* all that a comm of GPUs is here: its control */
    colo_comm_t *group = NULL;
    rank_check(gpus);
    gpus->rank = c->rank;
    gpus->size = c->size;
    gpus->timeout_ms = 20000;
    rank_try(colo_comm_i_host_barrier(NULL, "none"));
    rank_try(colo_comm_i_host_barrier(c, "a host comm"));
    gpus->control = c;
    if (c->rank == 3) /* by itself */
        rank_try(colo_comm_i_host_barrier(gpus, "ranks of which each has a process"));
    gpus->share_process = true;
    if (c->rank == 2)
        usleep(100000);
    atomic_fetch_add(arrived, 1);
    rank_try(colo_comm_i_host_barrier(gpus, "threads"));
    rank_check(atomic_load(arrived) == c->size);
    c->share_process = true;
    rank_try(colo_comm_split_color(c, c->rank % 2, 0, &group));
    rank_check(group->share_process);
    c->share_process = false;
    colo_comm_destroy(&group);
    gpus->timeout_ms = 300;
    if (c->rank != 1) { /* a rank that does not come is missed */
        colo_status_t st = colo_comm_i_host_barrier(gpus, "threads");
        rank_check(st == COLO_ERR_TIMEOUT || st == COLO_ERR_PEER);
    }
    free(gpus);
    return COLO_OK;
}

T_CASE(threads_meet_before_anybody_goes_on)
{
    atomic_int arrived = 0;
    assert_ok(colo_comm_threads_run(4, meeting_rank, &arrived));
}

T_CASE_ON(4, ranks_know_whether_they_share_a_process)
{
    bool shared = !t_ranks_are_threads();
    rank_try(colo_comm_i_find_shared_process(world, &shared));
    rank_check(shared == t_ranks_are_threads());
    return COLO_OK;
}

T_MAIN("comm/failure")
