/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_abort.c - an abort wakes all ranks and leaves no rank's buffers in use, and what a comm
 * still answers when it is dead.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "harness/held.h"
#include "operation.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- abort ---- */

static void *abort_thread(void *arg)
{
    usleep(30000);
    colo_comm_abort(arg, "the user pressed a key");
    return NULL;
}

T_CASE_ON(6, an_abort_wakes_every_relative)
{
    int32_t me = colo_comm_rank(world);
    T_ENDS(colo_comm_destroy) colo_comm_t *half = NULL;
    rank_try(colo_comm_set_timeout(world, 20000));
    rank_try(colo_comm_split_color(world, me % 2, 0, &half));
    pthread_t other;
    if (me == 0) /* rank 0 waits in its child, from which the abort comes as well */
        rank_check(pthread_create(&other, NULL, abort_thread, half) == 0);
    int64_t x = 1, y = -1;
    const double begin = colo_now();
    rank_fails(me < 2 ? colo_comm_all_reduce(half, &x, &y, 1, COLO_I64, COLO_REDOP_SUM, NULL)
                      : colo_comm_barrier(world, NULL),
               COLO_ERR_ABORTED, "aborted by rank 0 of 'color 0': the user pressed a key");
    rank_check(y == -1 && colo_now() - begin < 10);
    rank_check(colo_comm_check(half) == COLO_ERR_ABORTED);
    rank_check(colo_comm_check(world) == COLO_ERR_ABORTED);
    if (me == 0)
        pthread_join(other, NULL);
    colo_comm_abort(NULL, "nothing");
    return COLO_OK;
}

/* ---- interrupted ---- */

struct asked {
    int times, last; /* the answer is yes at the last one; 0: never */
};

static bool answer(void *arg)
{
    struct asked *asked = arg;
    return ++asked->times == asked->last;
}

static colo_status_t wait_asked(colo_comm_t *comm, struct asked *asked)
{
    colo_interrupt_set(answer, asked);
    const colo_status_t st = colo_comm_barrier(comm, NULL);
    colo_interrupt_set(NULL, NULL);
    return st;
}

T_CASE_ON(3, an_interrupt_ends_the_wait_of_its_thread_and_is_told)
{
    const int32_t me = colo_comm_rank(world);
    struct asked never = {0, 0}, third = {0, 3};
    rank_try(colo_comm_set_timeout(world, 20000));
    char text[120];
    double begin;
    int64_t rounds = 0, most = 0; /* most: of ranks, minus how often each was asked */
    /* a busy machine may wake a rank too late to be asked twice */
    for (; most > -2 && rounds < 20; rounds++) {
        never.times = 0;
        begin = colo_now();
        if (me == 1)
            usleep(300000);
        rank_try(wait_asked(world, &never)); /* who says no is asked again, and goes on */
        rank_check(never.times <= 20 * (colo_now() - begin)); /* every 50 ms */
        most = me == 1 ? -2 : -never.times;
        rank_try(colo_comm_all_reduce(world, &most, &most, 1, COLO_I64, COLO_REDOP_MAX, NULL));
    }
    rank_check(most <= -2);
    snprintf(
        text, sizeof text,
        "rank 0 was interrupted in barrier #%d on 'world' (world ranks 0 1 2), where it waited "
        "for rank ",
        (int)(2 * rounds + 1));
    begin = colo_now();
    if (me == 1)
        usleep(1000000);
    const colo_status_t st = me ? colo_comm_barrier(world, NULL) : wait_asked(world, &third);
    rank_fails(st, COLO_ERR_ABORTED, text);
    rank_check(me == 1 || (colo_now() - begin < 0.9 && third.times == 3 * (me == 0)));
    rank_check(colo_comm_check(world) == COLO_ERR_ABORTED);
    return COLO_OK;
}

static volatile sig_atomic_t stopped;

static void on_signal(int number)
{
    stopped = number;
}

static bool is_stopped(void *user)
{
    return stopped != 0;
}

static void *send_signal(void *waiting)
{
    usleep(100000); /* by then it waits */
    pthread_kill(*(const pthread_t *)waiting, SIGUSR1);
    return NULL;
}

/* Rank 0 comes when it is over. */
T_CASE_ON(2, a_signal_handler_ends_a_wait_by_a_flag)
{
    const int32_t me = colo_comm_rank(world);
    rank_try(colo_comm_set_timeout(world, 20000));
    if (me == 0) {
        while (colo_comm_check(world) == COLO_OK)
            usleep(1000);
        rank_fails(colo_comm_barrier(world, NULL), COLO_ERR_ABORTED,
                   "rank 1 was interrupted in barrier");
        return COLO_OK;
    }
    const struct sigaction action = {.sa_handler = on_signal};
    struct sigaction before;
    pthread_t self = pthread_self(), thread;
    stopped = 0;
    rank_check(sigaction(SIGUSR1, &action, &before) == 0);
    rank_check(pthread_create(&thread, NULL, send_signal, &self) == 0);
    colo_interrupt_set(is_stopped, NULL);
    const colo_status_t st = colo_comm_barrier(world, NULL);
    colo_interrupt_set(NULL, NULL);
    pthread_join(thread, NULL);
    rank_check(sigaction(SIGUSR1, &before, NULL) == 0);
    rank_fails(st, COLO_ERR_ABORTED, "rank 1 was interrupted in barrier");
    return COLO_OK;
}

/* Rank 1 comes late to where ranks connect, behind the all-gather of endpoints. */
static colo_status_t gather_late(void *user, const void *send, void *recv, size_t bytes)
{
    const colo_bootstrap_t *boot = user;
    rank_try(boot->all_gather(boot->user, send, recv, bytes));
    if (boot->rank == 1 && bytes > 256)
        usleep(800000);
    return COLO_OK;
}

T_CASE_ON(2, an_interrupt_ends_the_making_of_a_communicator)
{
    const int32_t me = colo_comm_rank(world);
    struct asked second = {0, 2};
    colo_bootstrap_t inner = {COLO_BOOTSTRAP_INIT};
    colo_comm_t *comm = NULL;
    rank_try(colo_comm_set_timeout(world, 20000));
    rank_try(colo_bootstrap_from_comm(world, &inner));
    const colo_bootstrap_t boot = {COLO_BOOTSTRAP_INIT, me, 2, gather_late, &inner};
    const double begin = colo_now();
    if (me == 0)
        colo_interrupt_set(answer, &second);
    const colo_status_t st = colo_comm_create_bootstrap(&boot, &comm);
    colo_interrupt_set(NULL, NULL);
    if (me == 0) /* UCX has a second all-gather there */
        rank_check(st == COLO_ERR_ABORTED &&
                   (says("create_bootstrap: rank 0 of 2 was interrupted while 1 ranks were") ||
                    says("rank 0 was interrupted in all_gather")));
    else
        rank_check((st == COLO_ERR_PEER || st == COLO_ERR_ABORTED) && says("rank 0 "));
    rank_check(!comm && colo_now() - begin < (me ? 5 : 0.7));
    return COLO_OK;
}

/* ---- again and again ---- */

#ifdef __SANITIZE_THREAD__ /* which takes 0.2 s for a world */
enum { LIVES = 20, RANKS = 2 };
#else
enum { LIVES = 100, RANKS = 2 };
#endif

/* The last rank aborts in place of its second sum, in which the others wait, or still in the first.
 */
static colo_status_t one_life(colo_comm_t *c, void *arg)
{
    enum { COUNT = 3000 };
    float x[COUNT] = {1}, y[COUNT];
    colo_status_t st = colo_comm_set_timeout(c, t_long_wait());
    for (int i = 0; st == COLO_OK; i++) {
        if (i == 1 && colo_comm_rank(c) == RANKS - 1)
            colo_comm_abort(c, "once more");
        st = colo_comm_all_reduce(c, x, y, COUNT, COLO_F32, COLO_REDOP_SUM, NULL);
        rank_check(st < 0 || (y[0] == RANKS && i == 0));
    }
    return st == COLO_ERR_ABORTED ? COLO_OK : st;
}

/* Once: a rank that complains earlier than the others would keep them waiting. */
static colo_status_t compare(t_held_t *held, int lives)
{
    return lives == T_HELD_WARM || lives == LIVES ? t_held_compare(held, lives) : COLO_OK;
}

/* In processes that stay: worlds over the first one. */
static colo_status_t all_lives(colo_comm_t *first, void *arg)
{
    t_held_t *held = arg;
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT};
    rank_try(colo_bootstrap_from_comm(first, &b));
    for (int i = 1; i <= LIVES; i++) {
        colo_comm_t *c = NULL;
        rank_try(colo_comm_create_bootstrap(&b, &c));
        const colo_status_t st = one_life(c, NULL);
        colo_comm_destroy(&c);
        rank_try(st);
        rank_try(compare(held, i));
    }
    return COLO_OK;
}

static bool own_memory(void)
{
    const char *kind = getenv("T_RANKS");
    return t_ranks_are_threads() || strcmp(kind, "sockets") == 0;
}

T_CASE(process_with_a_hundred_aborted_worlds_holds_what_it_held)
{
    /* 8 KiB in 92 worlds; UCX grows by its own lists, too */
    t_held_t held = {.heap_slack = own_memory() ? 8 << 10 : 256 << 10};
    if (!t_ranks_are_threads())
        assert_ok(t_run_ranks(RANKS, all_lives, &held, sizeof held));
    for (int i = 1; i <= LIVES && t_ranks_are_threads(); i++) {
        assert_ok(t_run_ranks(RANKS, one_life, NULL, 0));
        assert_ok(compare(&held, i));
    }
}

/* ---- amid a copy ---- */

struct torn {
    colo_comm_t *comm;
    int delay_us;
    _Atomic int started;
    int all;   /* who has to have started */
    bool away; /* rank 0 does not come, so that the others wait in the call */
    int failed[3];
};

static void *abort_midway(void *arg)
{
    struct torn *t = arg;
    while (atomic_load(&t->started) < t->all)
        ;
    usleep((useconds_t)t->delay_us);
    colo_comm_abort(t->comm, "midway");
    return NULL;
}

static colo_status_t torn_rank(colo_comm_t *c, void *arg)
{
    struct torn *t = arg;
    const size_t bytes = (size_t)48 << 20;
    pthread_t other;
    char *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    rank_check(x != MAP_FAILED);
    memset(x, 1, bytes);
    if (colo_comm_rank(c) == 0) {
        t->comm = c;
        rank_check(pthread_create(&other, NULL, abort_midway, t) == 0);
    }
    rank_try(colo_comm_barrier(c, NULL));
    atomic_store(&t->started, 1);
    colo_status_t st = colo_comm_broadcast(c, x, (int64_t)bytes, COLO_U8, 0, NULL);
    munmap(x, bytes); /* a rank that still copies from it would fault */
    rank_check(st == COLO_OK || st == COLO_ERR_ABORTED);
    if (colo_comm_rank(c) == 0)
        pthread_join(other, NULL);
    return COLO_OK;
}

T_CASE(an_abort_amid_a_copy_waits_for_the_readers)
{
    T_THREADS_ONLY();
    for (int i = 0; i < 10; i++) {
        struct torn t = {.delay_us = i * 1000, .all = 1};
        assert_ok(t_run_ranks(2, torn_rank, &t, sizeof t));
    }
}

/* ---- what a failure in flight leaves behind ---- */

enum { PIECE = 1 << 20, GUARD = 64, GIVEN = 0x5a5a5a5a, OLD = -1 };

static colo_status_t await_abort(const colo_comm_t *c)
{
    while (colo_comm_check(c) == COLO_OK)
        usleep(500);
    return colo_comm_check(c);
}

static colo_status_t strewn_rank(colo_comm_t *c, void *arg)
{
    struct torn *s = arg;
    const int32_t me = colo_comm_rank(c), n = colo_comm_size(c);
    const int64_t all = 2 * GUARD + (int64_t)n * PIECE;
    int32_t *x = malloc((PIECE + 2 * GUARD) * sizeof *x), *y = malloc((size_t)all * sizeof *y);
    pthread_t other;
    colo_status_t st = COLO_OK;
    rank_check(x && y);
    for (int64_t i = 0; i < PIECE + 2 * GUARD; i++)
        x[i] = GIVEN + me;
    if (me == 0)
        s->comm = c;
    st = colo_comm_barrier(c, NULL); /* the others may be in it still when rank 0 aborts */
    rank_check(st == COLO_OK || me != 0);
    if (me == 0)
        rank_check(pthread_create(&other, NULL, abort_midway, s) == 0);
    if (!s->away)
        atomic_store(&s->started, 1);
    while (st == COLO_OK) {
        for (int64_t i = 0; i < all; i++)
            y[i] = OLD;
        if (s->away && me != 0)
            atomic_fetch_add(&s->started, 1);
        st = s->away && me == 0
                 ? await_abort(c)
                 : colo_comm_all_gather(c, x + GUARD, y + GUARD, PIECE, COLO_I32, NULL);
        for (int64_t i = 0; i < all; i++) { /* old or new, and nothing around it */
            const int64_t offset = i - GUARD;
            const int32_t new =
                offset < 0 || offset >= (int64_t)n *PIECE ? OLD : GIVEN + (int32_t)(offset / PIECE);
            rank_check(y[i] == new || (st < 0 && y[i] == OLD));
        }
    }
    rank_check(st == COLO_ERR_ABORTED && colo_comm_check(c) == COLO_ERR_ABORTED);
    for (int64_t i = 0; i < PIECE + 2 * GUARD; i++)
        rank_check(x[i] == GIVEN + me);
    if (me == 0)
        pthread_join(other, NULL);
    free(x);
    free(y);
    s->failed[me]++;
    return COLO_OK;
}

T_CASE(failure_in_flight_writes_outputs_and_nothing_else)
{
    /* processes do not see each other's counts */
    for (int i = 0; i < (t_ranks_are_threads() ? 10 : 8); i++) {
        struct torn s = {.delay_us = 3000 + 3000 * i, .all = 1};
        if (i >= 8)
            s.all = 2, s.away = true, s.delay_us = 50000;
        assert_ok(t_run_ranks(3, strewn_rank, &s, sizeof s));
        for (int r = 0; r < 3; r++)
            assert_int_equal(s.failed[r], 1);
    }
}

/* ---- a dead comm ---- */

T_CASE_ON(2, a_dead_comm_refuses_operations_and_answers_questions)
{
    int32_t me = colo_comm_rank(world);
    colo_comm_t *other = NULL, *child = NULL;
    rank_try(colo_comm_split_color(world, 0, -me, &child));
    colo_comm_set_name(child, "short-lived");
    if (me == 0)
        colo_comm_abort(child, NULL);
    while (colo_comm_check(child) == COLO_OK)
        usleep(500);
    float memory[8] = {[4] = 1};
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, "dp=2", 2));
    for (int kind = 0; kind < COLO_OP_SPLIT; kind++)
        rank_check(operate(child, &(operation_t){(colo_op_kind_t)kind, 1, .from = 4, .to = 0},
                           memory) == COLO_ERR_ABORTED);
    rank_check(colo_comm_split(child, &grid, "dp", &other) == COLO_ERR_ABORTED && !other);
    rank_check(colo_comm_split_color(child, 0, 0, &other) == COLO_ERR_ABORTED && !other);
    rank_check(says("comm 'short-lived' is dead: aborted by rank 1"));
    rank_check(memory[0] == 0);
    rank_check(colo_comm_size(child) == 2 && colo_comm_rank(child) == 1 - me);
    rank_check(colo_comm_world_rank(child, 0) == 1);
    colo_comm_stats_t stats;
    t_comm_stats(child, &stats);
    rank_check(stats.ops[COLO_OP_BARRIER][COLO_CATEGORY_USER] == 0);
    char dump[2048];
    rank_check(colo_comm_dump(child, dump, sizeof dump) < sizeof dump);
    rank_check(strstr(dump, "COLO_ERR_ABORTED") && strstr(dump, "no reason given"));
    colo_comm_abort(child, "again");
    colo_comm_destroy(&child);
    return COLO_OK;
}

static atomic_bool thread_0_ended;

static void note_end(void *unused)
{
    (void)unused;
    atomic_store(&thread_0_ended, true);
}

/* The other rank is back with the error of the abort before this one returns its own. */
static colo_status_t abort_and_return_late(colo_comm_t *c, void *key)
{
    if (colo_comm_rank(c) == 0) {
        if (pthread_setspecific(*(pthread_key_t *)key, key))
            return COLO_ERR_NOMEM;
        return colo_comm_barrier(c, NULL);
    }
    colo_comm_abort(c, "the file ends too early");
    while (!atomic_load(&thread_0_ended))
        sched_yield();
    return colo_fail(COLO_ERR_IO, "the file ends too early");
}

T_CASE(a_run_returns_the_error_of_the_rank_that_aborted)
{
    T_THREADS_ONLY();
    pthread_key_t key;
    assert_int_equal(pthread_key_create(&key, note_end), 0);
    atomic_store(&thread_0_ended, false);
    assert_fails(colo_comm_threads_run(2, abort_and_return_late, &key), COLO_ERR_IO,
                 "rank 1: the file ends too early");
    pthread_key_delete(key);
}

T_CASE(null_comms_are_an_error_never_the_world)
{
    float memory[8] = {0};
    colo_comm_t *out = NULL;
    for (int kind = 0; kind < COLO_OP_SPLIT; kind++)
        assert_fails(
            operate(NULL, &(operation_t){(colo_op_kind_t)kind, 1, .from = 4, .to = 0}, memory),
            COLO_ERR_ARG, "comm is NULL");
    assert_fails(colo_comm_split_color(NULL, 0, 0, &out), COLO_ERR_ARG, "comm is NULL");
    assert_fails(colo_comm_split(NULL, NULL, "tp", &out), COLO_ERR_ARG, "comm is NULL");
    assert_fails(colo_comm_check(NULL), COLO_ERR_ARG, "comm is NULL");
    assert_null(out);
}

T_MAIN("comm/abort")
