/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_monitor.c - a thread of each rank asks for the communicator's state a thousand times a
 * second while the rank uses it: nothing changes. T_SECONDS makes it longer, as for a release.
 */
#include "harness/harness.h"

#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { RANKS = 8, COUNT = 3000 };

struct monitor {
    const colo_comm_t *comm;
    _Atomic bool stop;
    bool dump; /* ask by colo_comm_dump(), else by colo_comm_check() */
    int64_t questions;
    bool alive; /* so were all answers */
};

static void *ask(void *arg)
{
    struct monitor *m = arg;
    char text[300];
    for (m->alive = true; !atomic_load(&m->stop); m->questions++) {
        if (m->dump)
            m->alive &= colo_comm_dump(m->comm, text, sizeof text) > 0 &&
                        strstr(text, "\"status\":\"COLO_OK\"");
        else
            m->alive &= colo_comm_check(m->comm) == COLO_OK;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return NULL;
}

/* One of each kind of operation; sums of ranks, so that a wrong value shows. */
static colo_status_t use(colo_comm_t *c, int64_t *x)
{
    const int32_t n = colo_comm_size(c), me = colo_comm_rank(c);
    int64_t one = me, got = -1;
    colo_box_t out = {&one, {1, 1, 1}, {0, 0, 0}}, in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t send = {(me + 1) % n, 1, &out}, recv = {(me + n - 1) % n, 1, &in};
    for (int i = 0; i < COUNT; i++)
        x[i] = me + i;
    rank_try(colo_comm_all_reduce(c, x, x, COUNT, COLO_I64, COLO_REDOP_SUM, NULL)); /* two steps */
    for (int i = 0; i < COUNT; i++)
        rank_check(x[i] == n * (n - 1) / 2 + (int64_t)n * i);
    rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_I64, NULL));
    rank_check(got == recv.peer);
    rank_try(colo_comm_barrier(c, NULL));
    for (int k = 0; k < 16; k++) {
        int64_t sum = me;
        rank_try(colo_comm_all_reduce(c, &sum, &sum, 1, COLO_I64, COLO_REDOP_SUM, NULL));
        rank_check(sum == n * (n - 1) / 2);
    }
    return COLO_OK;
}

static double seconds_wanted(void)
{
    const char *text = getenv("T_SECONDS");
    return text ? atof(text) : 3;
}

static colo_status_t watched_rank(colo_comm_t *c, void *arg)
{
    struct monitor m = {.comm = c, .dump = colo_comm_rank(c) % 2};
    const double begin = colo_now(), seconds = seconds_wanted();
    int64_t x[COUNT], over = 0, *questions = arg;
    colo_status_t st = COLO_OK;
    pthread_t thread;
    rank_try(colo_comm_barrier(c, NULL));
    rank_check(pthread_create(&thread, NULL, ask, &m) == 0);
    while (st == COLO_OK && !over) {
        st = use(c, x);
        over = colo_now() - begin > seconds;
        if (st == COLO_OK) /* all stop after the same operation */
            st = colo_comm_all_reduce(c, &over, &over, 1, COLO_I64, COLO_REDOP_MAX, NULL);
    }
    atomic_store(&m.stop, true);
    pthread_join(thread, NULL);
    rank_try(st);
    rank_check(m.alive);
    questions[colo_comm_rank(c)] = m.questions;
    return COLO_OK;
}

T_CASE(monitor_at_1_khz_leaves_the_communicator_alive)
{
    int64_t questions[RANKS] = {0};
    assert_ok(t_run_ranks(RANKS, watched_rank, questions, sizeof questions));
    for (int r = 0; r < RANKS; r++)
        assert_true(questions[r] > 0);
}

/* ---- a second thread that uses the communicator ---- */

struct second {
    colo_comm_t *comm;
    colo_status_t status;
    char error_message[300];
    _Atomic bool ended;
};

static bool in_an_operation(colo_comm_t *c)
{
    pthread_mutex_lock(c->lock);
    const bool is = c->seq > 0 && c->record[c->seq % COLO_RECORDS].status == COLO_PENDING;
    pthread_mutex_unlock(c->lock);
    return is;
}

static void *use_too(void *arg)
{
    struct second *s = arg;
    int64_t one = 1;
    while (!in_an_operation(s->comm))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    s->status = colo_comm_all_reduce(s->comm, &one, &one, 1, COLO_I64, COLO_REDOP_SUM, NULL);
    snprintf(s->error_message, sizeof s->error_message, "%s", colo_last_error());
    atomic_store(&s->ended, true);
    return NULL;
}

static colo_status_t shared_rank(colo_comm_t *c, void *arg)
{
    struct second *s = arg;
    pthread_t thread;
    int64_t sum = 1;
    if (colo_comm_rank(c) == 0) {
        s->comm = c;
        rank_check(pthread_create(&thread, NULL, use_too, s) == 0);
        const colo_status_t st = colo_comm_barrier(c, NULL);
        pthread_join(thread, NULL);
        rank_try(st);
    } else {
        for (int ms = 0; !atomic_load(&s->ended) && ms < 3000; ms++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        rank_try(colo_comm_barrier(c, NULL));
    }
    rank_try(colo_comm_all_reduce(c, &sum, &sum, 1, COLO_I64, COLO_REDOP_SUM, NULL));
    rank_check(sum == 2);
    return COLO_OK;
}

T_CASE(second_thread_during_an_operation_is_refused_and_the_first_goes_on)
{
    struct second second = {.status = COLO_OK};
    T_THREADS_ONLY();
    assert_ok(t_run_ranks(2, shared_rank, &second, sizeof second));
    assert_int_equal(second.status, COLO_ERR_STATE);
    assert_non_null(strstr(second.error_message, "another thread is in barrier #1"));
}

T_MAIN("comm/monitor")
