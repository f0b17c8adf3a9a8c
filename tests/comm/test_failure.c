/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_failure.c - ranks that go wrong: no rank hangs, every rank learns which one did what,
 * nothing is written.
 *
 * Deadlines are short, and every case would hang (and be killed by the runner) if the check under
 * test were missing.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "core/error.h"
#include "operation.h"

#include <stdatomic.h>
#include <unistd.h>

/* ---- a rank that does not come ---- */

T_CASE_ON(3, a_skipped_call_is_a_timeout_with_both_sequence_numbers)
{
    int32_t me = colo_comm_rank(world);
    float x[4] = {1, 2, 3, 4}, all[12];
    rank_try(colo_comm_barrier(world, NULL));
    rank_try(colo_comm_barrier(world, NULL));
    rank_try(colo_comm_set_timeout(world, me == 0 ? 300 : 20000));
    for (int i = 0; i < 12; i++)
        all[i] = -1;
    if (me == 2) /* misses #3, comes when the deadline is over */
        while (colo_comm_check(world) == COLO_OK)
            usleep(1000);
    const double begin = colo_now();
    rank_fails(colo_comm_all_gather(world, x, all, 4, COLO_F32, NULL), COLO_ERR_TIMEOUT,
               "all_gather #3 (4 f32) on 'world' (world ranks 0 1 2)");
    const double seconds = colo_now() - begin;
    rank_check(me != 0 || (seconds >= 0.300 && seconds < 10));
    rank_check(says("rank 0 waited for rank 2") && says("did not arrive within 300 ms") &&
               says("the last operation of rank 2 is barrier #2"));
    for (int i = 0; i < 12; i++)
        rank_check(all[i] == -1);
    return COLO_OK;
}

/* What kills a group after an operation that all of them finished does not reach back into it. */
static colo_status_t abort_after(colo_comm_t *c, void *arg)
{
    for (int i = 0; i < 21; i++)
        rank_try(colo_comm_barrier(c, NULL));
    if (colo_comm_rank(c) == 2)
        colo_comm_abort(c, "afterwards");
    return COLO_OK;
}

T_CASE(an_operation_that_all_finished_stays_finished)
{
    T_THREADS_ONLY();
    for (int i = 0; i < t_scaled(400); i++)
        assert_ok(t_run_ranks(8, abort_after, NULL, 0));
}

T_CASE_ON(3, an_exchange_names_the_sender_that_did_not_come)
{
    int32_t got = -1;
    colo_box_t in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t recv = {1, 1, &in};
    rank_try(colo_comm_set_timeout(world, 120));
    while (colo_comm_rank(world) > 0 && colo_comm_check(world) == COLO_OK)
        usleep(1000);
    if (colo_comm_rank(world) == 0) {
        rank_fails(colo_comm_exchange(world, NULL, 0, &recv, 1, COLO_I32, NULL), COLO_ERR_TIMEOUT,
                   "exchange #1 (i32)");
        rank_check(says("rank 0 waited for rank 1"));
        rank_check(says("the last operation of rank 1 is none"));
    }
    rank_check(got == -1);
    return COLO_OK;
}

/* The buffers of a call that timed out belong to the caller again, also when peers come late. */
static colo_status_t late_readers(colo_comm_t *c, void *arg)
{
    int32_t me = colo_comm_rank(c), n = colo_comm_size(c);
    enum { COUNT = 20000 };
    rank_try(colo_comm_set_timeout(c, 30));
    usleep((useconds_t)(me * 8000));                     /* the deadline falls among the arrivals */
    while (me == n - 1 && colo_comm_check(c) == COLO_OK) /* and before the last */
        usleep(500);
    int64_t *x = calloc(COUNT, sizeof *x), *y = calloc(COUNT * (size_t)n, sizeof *y);
    const colo_status_t st = colo_comm_all_gather(c, x, y, COUNT, COLO_I64, NULL);
    memset(x, 0xff, COUNT * sizeof *x);
    free(x); /* a late reader would be seen by ASan and TSan */
    free(y);
    if (me == 0 || me == n - 1) /* or "did not finish": a rank may still copy at the deadline */
        rank_fails(st, COLO_ERR_TIMEOUT, " within 30 ms");
    return COLO_OK;
}

T_CASE(a_timed_out_call_leaves_no_rank_reading_its_buffers)
{
    for (int i = 0; i < 5; i++)
        assert_ok(t_run_ranks(8, late_readers, NULL, 0));
}

/* ---- ranks that do different things ---- */

/* Memory of a rank: 40 elements that nothing may change, and what it gives. */
enum { Y = 0, X = 40, MEMORY = 48 };

struct call {
    const char *words; /* of the call, or of its refusal */
    operation_t what;
};

enum { ROOT_0, ROOT_1, SUM_OF_4, SUM_OF_5, MAX_OF_4, GATHER_F32, GATHER_I32, SCATTER, BARRIER };
static const struct call calls[] = {
    [ROOT_0] = {"broadcast #1 (4 f32 from rank 0)", {COLO_OP_BROADCAST, 4, .from = X, .to = Y}},
    [ROOT_1] = {"broadcast #1 (4 f32 from rank 1)",
                {COLO_OP_BROADCAST, 4, .from = X, .to = Y, .how = 1}},
    [SUM_OF_4] = {"all_reduce #1 (sum of 4 f32)", {COLO_OP_ALL_REDUCE, 4, .from = X, .to = Y}},
    [SUM_OF_5] = {"all_reduce #1 (sum of 5 f32)", {COLO_OP_ALL_REDUCE, 5, .from = X, .to = Y}},
    [MAX_OF_4] = {"all_reduce #1 (max of 4 f32)",
                  {COLO_OP_ALL_REDUCE, 4, .from = X, .to = Y, .how = COLO_REDOP_MAX}},
    [GATHER_F32] = {"all_gather #1 (4 f32)", {COLO_OP_ALL_GATHER, 4, .from = X, .to = Y}},
    [GATHER_I32] = {"all_gather #1 (4 i32)",
                    {COLO_OP_ALL_GATHER, 4, .from = X, .to = Y, .dtype = COLO_I32}},
    [SCATTER] = {"reduce_scatter #1 (sum of 1 f32)",
                 {COLO_OP_REDUCE_SCATTER, 1, .from = Y + 8, .to = Y}},
    [BARRIER] = {"barrier #1", {.kind = COLO_OP_BARRIER}},
};

/* What most ranks call, and what rank 2 calls. */
static const int disagreements[][2] = {{ROOT_0, SUM_OF_4},       {SUM_OF_4, SUM_OF_5},
                                       {GATHER_F32, GATHER_I32}, {SUM_OF_4, MAX_OF_4},
                                       {ROOT_0, ROOT_1},         {SCATTER, BARRIER}};

struct disagreement {
    int which, check;
    char words[4][1200]; /* by rank */
};

static colo_status_t disagree_rank(colo_comm_t *c, void *arg)
{
    struct disagreement *d = arg;
    int32_t me = colo_comm_rank(c);
    float memory[MEMORY];
    for (int i = 0; i < MEMORY; i++)
        memory[i] = i < X ? -1 : (float)i;
    rank_try(colo_comm_set_check(c, d->check));
    rank_try(colo_comm_set_timeout(c, 20000));
    const struct call *most = &calls[disagreements[d->which][0]],
                      *odd = &calls[disagreements[d->which][1]];
    rank_fails(operate(c, me == 2 ? &odd->what : &most->what, memory), COLO_ERR_MISMATCH,
               d->check < 2 ? "rank 2 is in" : "rank 0 is about to run");
    rank_check(d->check < 2 ? says(most->words) && says(odd->words) : says(", rank 2 "));
    /* a rank that came last finds "comm 'world' is dead: " in front of the same words */
    const char *words = d->check < 2 ? strstr(colo_last_error(), "on 'world'") : colo_last_error();
    rank_check(words);
    snprintf(d->words[me], sizeof d->words[me], "%s", words);
    for (int i = 0; i < X; i++)
        rank_check(memory[i] == -1);
    if (d->check < 2) {
        rank_check(colo_comm_check(c) == COLO_ERR_MISMATCH);
        rank_fails(colo_comm_barrier(c, NULL), COLO_ERR_MISMATCH, "comm 'world' is dead");
        return COLO_OK;
    }
    rank_check(colo_comm_check(c) == COLO_OK);
    float one = 1;
    rank_try(colo_comm_all_reduce(c, &one, &one, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_check(one == 4);
    return COLO_OK;
}

T_CASE(different_operations_are_a_mismatch_on_all_ranks_and_at_check_2_the_comm_lives)
{
    for (int which = 0; which < 6; which++)
        for (int check = 0; check <= 2; check++) {
            struct disagreement d = {.which = which, .check = check};
            assert_ok(t_run_ranks(4, disagree_rank, &d, sizeof d));
            /* below check 2 processes may find it each by itself */
            for (int r = 0; r < 4 && (check == 2 || t_ranks_are_threads()); r++)
                assert_string_equal(d.words[r], d.words[0]);
        }
}

static colo_status_t collective_against_exchange(colo_comm_t *c, void *arg)
{
    _Atomic int *arrived = arg;
    int32_t me = colo_comm_rank(c), v = me, got = -1;
    colo_box_t out = {&v, {1, 1, 1}, {0, 0, 0}}, in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t send = {me ^ 1, 1, &out}, recv = {me ^ 1, 1, &in};
    rank_try(colo_comm_set_timeout(c, 20000));
    for (int i = 0; me < 2 && i < 3; i++)
        rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_I32, NULL));
    rank_check(got == (me < 2 ? (me ^ 1) : -1));
    atomic_fetch_add(arrived, me < 2);
    while (me == 2 && atomic_load(arrived) < 2) /* they finish without it, and go on */
        usleep(500);
    /* 0 and 1 see the verdict, whatever they were waiting for */
    rank_fails(colo_comm_barrier(c, NULL), COLO_ERR_MISMATCH,
               me < 2 ? "rank 2 is in barrier #1"
                      : "rank 2 is in barrier #1, but rank 0 went past #1 without it");
    return COLO_OK;
}

T_CASE(ranks_that_went_past_without_me_are_a_mismatch_not_a_hang)
{
    T_THREADS_ONLY();
    _Atomic int arrived = 0;
    assert_ok(t_run_ranks(3, collective_against_exchange, &arrived, sizeof arrived));
}

/* ---- ranks that fail by themselves ---- */

static colo_status_t failing_rank(colo_comm_t *c, void *arg)
{
    rank_try(colo_comm_set_timeout(c, 20000));
    if (colo_comm_rank(c) == 3)
        return colo_fail(COLO_ERR_SHAPE, "batch 30 does not split into 4 slices");
    const double begin = colo_now();
    rank_fails(colo_comm_barrier(c, NULL), COLO_ERR_PEER,
               "rank 3 failed: batch 30 does not split into 4 slices");
    rank_check(colo_now() - begin < 10);
    return COLO_OK;
}

T_CASE(the_error_of_one_rank_reaches_all_and_the_caller)
{
    assert_int_equal(t_run_ranks(5, failing_rank, NULL, 0), COLO_ERR_SHAPE);
    assert_string_equal(colo_last_error(), "rank 3: batch 30 does not split into 4 slices");
}

static colo_status_t failing_in_child(colo_comm_t *c, void *arg)
{
    int32_t me = colo_comm_rank(c);
    T_ENDS(colo_comm_destroy) colo_comm_t *pair = NULL;
    rank_try(colo_comm_split_color(c, me / 2, 0, &pair));
    rank_try(colo_comm_set_timeout(pair, 20000));
    float x = 1;
    /* rank 3 is wrong in its pair (2, 3): rank 2 hears of it at once, over @c all when 3 returns */
    if (me > 1) {
        const colo_status_t st =
            colo_comm_all_reduce(pair, me == 3 ? NULL : &x, &x, 1, COLO_F32, COLO_REDOP_SUM, NULL);
        rank_check(x == 1 && colo_comm_check(pair) == st);
        if (me == 3)
            return st;
        rank_fails(st, COLO_ERR_PEER, "rank 1 (world rank 3) failed: all_reduce: send is NULL");
    }
    rank_fails(colo_comm_barrier(c, NULL), COLO_ERR_PEER, "send is NULL for 4 bytes");
    return COLO_OK;
}

T_CASE(wrong_arguments_on_one_rank_wake_its_peers)
{
    assert_int_equal(t_run_ranks(4, failing_in_child, NULL, 0), COLO_ERR_ARG);
    assert_string_equal(colo_last_error(), "rank 3: all_reduce: send is NULL for 4 bytes");
}

static const struct call wrong[] = {
    {"all_gather: count -1", {COLO_OP_ALL_GATHER, -1, .from = X, .to = Y}},
    {"pass 2^63", {COLO_OP_ALL_GATHER, INT64_MAX / 4, .from = X, .to = Y}},
    {"recv is NULL for 24 bytes", {COLO_OP_ALL_GATHER, 2, .from = X, .to = NOWHERE}},
    {"overlap other than in place", {COLO_OP_ALL_GATHER, 2, .from = Y + 1, .to = Y}},
    {"dtype i8", {COLO_OP_ALL_REDUCE, 2, .from = X, .to = Y, .dtype = COLO_I8}},
    {"operation 7", {COLO_OP_ALL_REDUCE, 2, .from = X, .to = Y, .how = 7}},
    {"overlap other than in place", {COLO_OP_ALL_REDUCE, 2, .from = Y + 1, .to = Y}},
    {"overlap other than in place", {COLO_OP_REDUCE_SCATTER, 2, .from = Y, .to = Y + 1}},
    {"root 3, expected 0..2", {COLO_OP_BROADCAST, 2, .from = X, .to = Y, .how = 3}},
    {"buffer is NULL for 8 bytes", {COLO_OP_BROADCAST, 2, .from = X, .to = NOWHERE}},
    {"dtype -1 is unknown", {COLO_OP_BROADCAST, 2, .from = X, .to = Y, .dtype = (colo_dtype_t)-1}},
};

T_CASE_ON(3, at_check_2_wrong_arguments_leave_the_comm_alive)
{
    rank_try(colo_comm_set_check(world, 2));
    for (int which = 0; which < (int)(sizeof wrong / sizeof wrong[0]); which++) {
        float memory[MEMORY];
        for (int i = 0; i < MEMORY; i++)
            memory[i] = 5;
        if (colo_comm_rank(world) == which % 2)
            rank_fails(operate(world, &wrong[which].what, memory), COLO_ERR_ARG,
                       wrong[which].words);
        else
            rank_fails(colo_comm_barrier(world, NULL), COLO_ERR_PEER,
                       which % 2 ? "rank 1 failed: " : "rank 0 failed: ");
        rank_check(says(wrong[which].words));
        for (int i = 0; i < MEMORY; i++)
            rank_check(memory[i] == 5);
        rank_check(colo_comm_check(world) == COLO_OK);
        rank_try(colo_comm_barrier(world, NULL));
    }
    return COLO_OK;
}

/* ---- agreement and splits that go wrong ---- */

/* "tp" of a grid, and what rank 1 asks for. */
struct splitting {
    const char *spec, *odd_spec, *odd_dims;
    int32_t ranks, culprit; /* whose status and words these are; -1: of all */
    colo_status_t status;
    const char *words;
};

static colo_status_t bad_split_rank(colo_comm_t *c, void *arg)
{
    const struct splitting *s = arg;
    int32_t me = colo_comm_rank(c), odd = me == 1;
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, odd ? s->odd_spec : s->spec, 0));
    colo_comm_t *child = (colo_comm_t *)&grid;
    const colo_status_t st = colo_comm_split(c, &grid, odd ? s->odd_dims : "tp", &child);
    if (s->culprit < 0 || s->culprit == me)
        rank_fails(st, s->status, s->words);
    else
        rank_fails(st, COLO_ERR_PEER, t_text("rank %d failed: ", (int)s->culprit));
    rank_check(child == (colo_comm_t *)&grid);
    rank_check(colo_comm_check(c) == COLO_OK);
    return colo_comm_barrier(c, NULL);
}

T_CASE(splits_that_differ_or_are_wrong_on_one_rank_fail_on_all)
{
    static struct splitting table[] = {
        {"tp=2,dp=2", "tp=4", "tp", 4, -1, COLO_ERR_MISMATCH,
         "split: grid: rank 1 of 'world' has tp=4, rank 0 tp=2,dp=2"},
        {"tp=2,dp=2", "tp=2,dp=2", "dp", 4, -1, COLO_ERR_MISMATCH,
         "split: dims: rank 1 of 'world' has dp, rank 0 tp"},
        {"tp=2,dp=2", "tp=2,dp=2", "qp", 4, 1, COLO_ERR_ARG, "qp"},
        /* rank 4's partner is 5 */
        {"tp=2,dp=3", "tp=2,dp=3", "tp", 5, 4, COLO_ERR_MISSING,
         "world rank 5 of the group of world rank 4 is not in comm"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_ok(t_run_ranks(table[i].ranks, bad_split_rank, &table[i], 0));
}

T_CASE_ON(4, agreement_hands_each_rank_the_right_status)
{
    int32_t me = colo_comm_rank(world);
    rank_try(colo_comm_agree(world, "tea", 42, COLO_OK));
    colo_status_t mine = me == 2 ? colo_fail(COLO_ERR_NOMEM, "no cup for rank 2") : COLO_OK;
    rank_fails(colo_comm_agree(world, "tea", 42, mine), me == 2 ? COLO_ERR_NOMEM : COLO_ERR_PEER,
               me == 2 ? "no cup for rank 2" : "tea: rank 2 failed: no cup for rank 2");
    rank_fails(colo_comm_agree(world, "tea", me == 1 ? 43 : 42, COLO_OK), COLO_ERR_MISMATCH,
               "tea: fingerprint: rank 1 of 'world' has "
               "000000000000002b, rank 0 000000000000002a");
    rank_fails(colo_comm_agree(world, me == 3 ? "coffee" : "tea", 42, COLO_OK), COLO_ERR_MISMATCH,
               "call: rank 3 of 'world' has coffee, rank 0 tea");
    return colo_comm_agree(world, "tea", 44, COLO_OK);
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
        colo_status_t st = colo_comm_agree_fields(world, "tea", &f, COLO_OK);
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
        const colo_status_t st = colo_comm_agree_fields(world, "tea", &f, COLO_OK);
        rank_check(st == (expected[i] ? COLO_ERR_MISMATCH : COLO_OK));
        if (expected[i] && strcmp(colo_last_error(), expected[i]) != 0)
            return t_rank_fail(__FILE__, __LINE__, colo_last_error());
    }
    return colo_comm_barrier(world, NULL);
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
    rank_try(colo_comm_host_barrier(NULL, "none"));
    rank_try(colo_comm_host_barrier(c, "a host comm"));
    gpus->control = c;
    if (c->rank == 3) /* by itself */
        rank_try(colo_comm_host_barrier(gpus, "ranks of which each has a process"));
    gpus->share_process = true;
    if (c->rank == 2)
        usleep(100000);
    atomic_fetch_add(arrived, 1);
    rank_try(colo_comm_host_barrier(gpus, "threads"));
    rank_check(atomic_load(arrived) == c->size);
    c->share_process = true;
    rank_try(colo_comm_split_color(c, c->rank % 2, 0, &group));
    rank_check(group->share_process);
    c->share_process = false;
    colo_comm_destroy(&group);
    gpus->timeout_ms = 300;
    if (c->rank != 1) { /* a rank that does not come is missed */
        colo_status_t st = colo_comm_host_barrier(gpus, "threads");
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
    rank_try(colo_comm_find_shared_process(world, &shared));
    rank_check(shared == t_ranks_are_threads());
    return COLO_OK;
}

T_MAIN("comm/failure")
