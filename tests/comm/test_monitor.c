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
    rank_try(colo_comm_all_reduce(c, x, x, COUNT, COLO_I64, COLO_SUM, NULL)); /* two steps */
    for (int i = 0; i < COUNT; i++)
        rank_check(x[i] == n * (n - 1) / 2 + (int64_t)n * i);
    rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_I64, NULL));
    rank_check(got == recv.peer);
    rank_try(colo_comm_barrier(c, NULL));
    for (int k = 0; k < 16; k++) {
        int64_t sum = me;
        rank_try(colo_comm_all_reduce(c, &sum, &sum, 1, COLO_I64, COLO_SUM, NULL));
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
            st = colo_comm_all_reduce(c, &over, &over, 1, COLO_I64, COLO_MAX, NULL);
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

T_MAIN("comm/monitor")
