/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi.c - what is special about ranks of MPI: when a communicator may be made, from what,
 * during the program's own messages, what happens around MPI_Finalize, and when a rank dies. Runs
 * on 4 ranks of mpirun. What all processes do alike is in tests/comm/, which runs on forked ones.
 */
#include "harness/harness.h"

#include <colobridge/mpi.h>

#include "comm/comm.h"

#include <signal.h>
#include <unistd.h>

static int me, n;
static colo_comm_t *kept; /* until after MPI_Finalize */

T_CASE(a_world_has_the_ranks_of_its_communicator)
{
    colo_comm_t *c = NULL;
    MPI_Comm reversed;
    MPI_Comm_split(MPI_COMM_WORLD, 0, n - me, &reversed);
    assert_ok(colo_comm_create_mpi(reversed, NULL, &c));
    MPI_Comm_free(&reversed); /* borrowed for the call only */
    assert_int_equal(colo_comm_rank(c), n - 1 - me);
    assert_int_equal(colo_comm_size(c), n);
    /* half of the ranks may be on another host */
    assert_true(strcmp(colo_comm_backend(c), getenv("T_BACKEND") ? "ucx" : "sockets") == 0);
    int32_t x = me, all[64];
    assert_ok(colo_comm_all_gather(c, &x, all, 1, COLO_I32, NULL));
    for (int r = 0; r < n; r++)
        assert_int_equal(all[r], n - 1 - r);
    colo_comm_destroy(&c);
    assert_null(c);
}

T_CASE(what_is_no_communicator_of_ours_is_refused)
{
    colo_comm_t *c = NULL;
    MPI_Comm half, inter;
    assert_fails(colo_comm_create_mpi(MPI_COMM_NULL, NULL, &c), COLO_ERR_ARG, "MPI_COMM_NULL");
    MPI_Comm_split(MPI_COMM_WORLD, me % 2, 0, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, me % 2 ? 0 : 1, 7, &inter);
    assert_fails(colo_comm_create_mpi(inter, NULL, &c), COLO_ERR_ARG, "MPI_Intercomm_merge");
    MPI_Comm_free(&inter);
    MPI_Comm_free(&half);
    assert_fails(colo_comm_create_mpi(MPI_COMM_WORLD, NULL, NULL), COLO_ERR_ARG, "comm is NULL");
    assert_null(c);
}

T_CASE(messages_of_the_program_stay_its_own)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    int got = -1, token = 1000 + me, right = (me + 1) % n, left = (me + n - 1) % n;
    MPI_Request any, mine;
    assert_ok(colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &c));
    MPI_Irecv(&got, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &any);
    int64_t x = me, sum = 0;
    for (int i = 0; i < 20; i++) {
        assert_ok(colo_comm_all_reduce(c, &x, &sum, 1, COLO_I64, COLO_REDOP_SUM, NULL));
        assert_int_equal(sum, n * (n - 1) / 2);
        assert_int_equal(got, -1);
    }
    assert_ok(colo_comm_barrier(c, NULL));
    MPI_Isend(&token, 1, MPI_INT, right, 1, MPI_COMM_WORLD, &mine);
    assert_ok(colo_comm_barrier(c, NULL));
    MPI_Wait(&any, MPI_STATUS_IGNORE);
    MPI_Wait(&mine, MPI_STATUS_IGNORE);
    assert_int_equal(got, 1000 + left);
}

T_CASE(worlds_come_and_go_concurrently)
{
    colo_comm_t *a = NULL, *b = NULL, *child = NULL;
    for (int i = 0; i < 20; i++) {
        int32_t x = me + i, all[64];
        assert_ok(colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &a));
        assert_ok(colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &b));
        assert_ok(colo_comm_split_color(a, me % 2, me, &child));
        colo_comm_destroy(&a); /* a child outlives its parent */
        assert_ok(colo_comm_all_gather(b, &x, all, 1, COLO_I32, NULL));
        for (int r = 0; r < n; r++)
            assert_int_equal(all[r], r + i);
        assert_ok(colo_comm_all_gather(child, &x, all, 1, COLO_I32, NULL));
        for (int r = 0; r < n / 2; r++)
            assert_int_equal(all[r], 2 * r + me % 2 + i);
        colo_comm_destroy(i % 2 ? &child : &b);
        colo_comm_destroy(&child);
        colo_comm_destroy(&b);
    }
}

T_CASE(value_that_is_refused_on_one_rank_is_an_error_on_all)
{
    static const char *const values[] = {"abc", "5s"}; /* not 5 ms */
    for (int i = 0; i < 2; i++) {
        colo_comm_t *c = NULL;
        if (me == 1)
            setenv("COLO_TIMEOUT_MS", values[i], 1);
        colo_status_t st = colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &c);
        unsetenv("COLO_TIMEOUT_MS");
        assert_fails(st, me == 1 ? COLO_ERR_ARG : COLO_ERR_PEER,
                     t_text("COLO_TIMEOUT_MS is '%s', expected a number from 1", values[i]));
        assert_null(c);
    }
}

/* Rank 0 calls @late_ms after the others, the deadline being @deadline_ms. */
static colo_status_t come_late(const char *deadline_ms, int late_ms, MPI_Comm comm, colo_comm_t **c)
{
    MPI_Barrier(comm);
    if (me == 0)
        usleep((useconds_t)late_ms * 1000);
    setenv("COLO_TIMEOUT_MS", deadline_ms, 1);
    colo_status_t st = colo_comm_create_mpi(comm, NULL, c);
    unsetenv("COLO_TIMEOUT_MS");
    return st;
}

T_CASE(rank_may_be_late_by_its_deadline_less_a_second)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    assert_ok(come_late("4000", 3000, MPI_COMM_WORLD, &c));
    assert_ok(colo_comm_barrier(c, NULL));
}

T_CASE(rank_that_is_too_late_fails_like_those_that_waited)
{
    colo_comm_t *c = NULL;
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy); /* what is pending there stays there */
    const colo_status_t st = come_late("1000", 1500, copy, &c);
    if (me == 0) /* MPI may still bring it the addresses of ranks that gave up */
        assert_true(st == COLO_ERR_TIMEOUT || st == COLO_ERR_PEER);
    else
        assert_fails(st, COLO_ERR_TIMEOUT, "within 1000 ms");
    assert_null(c);
    MPI_Barrier(MPI_COMM_WORLD);
}

T_CASE(a_rank_that_does_not_call_is_a_timeout)
{
    colo_comm_t *c = NULL;
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy); /* its all-gather stays pending: never used again */
    if (me == 1)
        return;
    setenv("COLO_TIMEOUT_MS", "300", 1);
    const colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 60000};
    colo_status_t st = colo_comm_create_mpi(copy, &config, &c);
    unsetenv("COLO_TIMEOUT_MS");
    assert_fails(st, COLO_ERR_TIMEOUT, "made the same call within 300 ms");
    assert_null(c);
}

T_CASE(a_world_has_its_config_while_it_is_made_too)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy); /* its all-gather stays pending: never used again */
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 4321}, has = config;
    assert_ok(colo_comm_create_mpi(MPI_COMM_WORLD, &config, &c));
    assert_ok(colo_comm_config(c, &has));
    assert_int_equal(has.timeout_ms, 4321);
    config.timeout_ms = 300;
    if (me != 1)
        assert_fails(colo_comm_create_mpi(copy, &config, &(colo_comm_t *){NULL}), COLO_ERR_TIMEOUT,
                     "made the same call within 300 ms");
    assert_ok(colo_comm_barrier(c, NULL));
}

static int before_init(void)
{
    colo_comm_t *c = NULL;
    if (colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &c) == COLO_ERR_STATE && !c &&
        strstr(colo_last_error(), "MPI is not initialised; call MPI_Init()"))
        return 0;
    fprintf(stderr, "before MPI_Init: %s\n", colo_last_error());
    return 1;
}

/* It needs MPI no more. */
static int after_finalize(void)
{
    colo_comm_t *c = NULL;
    int64_t x = 1, sum = 0;
    int wrong = 0;
    if (colo_comm_all_reduce(kept, &x, &sum, 1, COLO_I64, COLO_REDOP_SUM, NULL) < 0 || sum != n) {
        fprintf(stderr, "after MPI_Finalize the sum is %d: %s\n", (int)sum, colo_last_error());
        wrong++;
    }
    colo_comm_destroy(&kept);
    const colo_status_t st = colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &c);
    if (st != COLO_ERR_STATE || !strstr(colo_last_error(), "MPI has been finalized")) {
        fprintf(stderr, "create_mpi after MPI_Finalize: %s: %s\n", colo_status_name(st),
                colo_last_error());
        wrong++;
    }
    return wrong;
}

/* Rank 1 is killed while the others wait for it: those that the launcher lets live say so. */
static int lose_one(void)
{
    colo_comm_t *c = NULL;
    colo_status_t st = colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &c);
    if (st == COLO_OK)
        st = colo_comm_set_timeout(c, 60000);
    if (st == COLO_OK && me == 1)
        raise(SIGKILL);
    const double begin = colo_now();
    if (st == COLO_OK)
        st = colo_comm_barrier(c, NULL);
    const bool at_once = st == COLO_ERR_PEER && colo_now() - begin < 30;
    printf("rank %d: %s: %s\n", me, at_once ? "told at once" : colo_status_name(st),
           colo_last_error());
    fflush(stdout);
    _exit(0); /* MPI_Finalize would wait for rank 1 */
}

int main(int argc, char **argv)
{
    int wrong = before_init(), level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    if (argc > 1)
        return lose_one();
    if (me != 0 && !freopen("/dev/null", "w", stdout))
        return 1;
    wrong += t_main("mpi/mpi");
    if (colo_comm_create_mpi(MPI_COMM_WORLD, NULL, &kept) < 0)
        wrong++;
    MPI_Finalize();
    return wrong + after_finalize();
}
