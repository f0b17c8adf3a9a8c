/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_leave.c - ranks that return, or end their thread, while others still wait for them: those
 * are told at once, in whichever communicator they wait.
 */
#include "harness/harness.h"

#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static colo_status_t early_rank(colo_comm_t *c, void *arg)
{
    _Atomic int *arrived = arg;
    int32_t me = colo_comm_rank(c);
    rank_try(colo_comm_set_timeout(c, t_long_wait()));
    rank_try(colo_comm_barrier(c, NULL));
    if (me == 1) { /* on threads not before all are out of the barrier, or they miss it there */
        for (double begin = colo_now(); t_ranks_are_threads() && atomic_load(arrived) < 3;) {
            rank_check(colo_now() - begin < 20);
            usleep(100);
        }
        return COLO_OK;
    }
    atomic_fetch_add(arrived, 1);
    int64_t x = me;
    const double begin = colo_now();
    rank_fails(colo_comm_all_reduce(c, &x, &x, 1, COLO_I64, COLO_REDOP_SUM, NULL), COLO_ERR_TIMEOUT,
               "rank 1 (world rank 1), which has left");
    rank_check((colo_now() - begin) * 2e3 < (double)t_long_wait() && x == me);
    rank_check(says("all_reduce #2 (sum of 1 i64)"));
    rank_check(says("the last operation of rank 1 is barrier #1"));
    return COLO_OK;
}

T_CASE(a_rank_that_returned_is_missed_at_once)
{
    _Atomic int arrived = 0;
    assert_ok(t_run_ranks(4, early_rank, &arrived, sizeof arrived));
}

/* A rank returns without a word and without destroying its child, or ends its thread. */
struct forgetting {
    bool exits, renamed, deep; /* the others wait in the child's child */
    colo_comm_t *child[2];     /* of the rank that left */
};

static colo_status_t forgetting_rank(colo_comm_t *c, void *arg)
{
    struct forgetting *f = arg;
    int32_t me = colo_comm_rank(c);
    int64_t names[4] = {70, 50, 60, 40}; /* the ranks that grids know are others than the run's */
    colo_comm_t *child = NULL, *grandchild = NULL;
    rank_try(colo_comm_set_timeout(c, t_long_wait()));
    if (f->renamed)
        rank_try(colo_comm_set_world_ranks(c, names));
    rank_try(colo_comm_split_color(c, me == 0 ? -1 : 0, -me, &child)); /* ranks 3, 2, 1 */
    rank_try(colo_comm_barrier(c, NULL));
    if (me == 0)
        return COLO_OK;
    rank_try(colo_comm_split_color(child, 0, 0, &grandchild));
    if (me == 1) {
        f->child[0] = child;
        f->child[1] = grandchild;
        if (f->exits)
            pthread_exit(NULL);
        return COLO_OK;
    }
    const double begin = colo_now();
    rank_fails(colo_comm_barrier(f->deep ? grandchild : child, NULL),
               f->exits ? COLO_ERR_PEER : COLO_ERR_TIMEOUT,
               f->exits     ? "rank 1 failed: the thread of rank 1 ended"
               : f->renamed ? "rank 2 (world rank 50), which has left"
                            : "rank 2 (world rank 1), which has left");
    rank_check((colo_now() - begin) * 2e3 < (double)t_long_wait());
    colo_comm_destroy(&grandchild);
    colo_comm_destroy(&child);
    return COLO_OK;
}

T_CASE(rank_that_returned_is_missed_at_once_in_every_child)
{
    T_THREADS_ONLY();
    for (int which = 0; which < 4; which++) {
        struct forgetting f = {.renamed = which & 1, .deep = which & 2};
        assert_ok(colo_comm_threads_run(4, forgetting_rank, &f));
        for (int k = 0; k < 2; k++)
            colo_comm_destroy(&f.child[k]);
    }
}

T_CASE(rank_that_ends_its_thread_is_an_error_on_its_peers_at_once)
{
    T_THREADS_ONLY();
    struct forgetting f = {.exits = true};
    assert_fails(colo_comm_threads_run(4, forgetting_rank, &f), COLO_ERR_STATE,
                 "rank 1: the thread of rank 1 ended before its function returned");
    for (int k = 0; k < 2; k++)
        colo_comm_destroy(&f.child[k]);
}

T_MAIN("comm/leave")
