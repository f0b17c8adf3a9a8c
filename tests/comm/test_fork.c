/* SPDX-License-Identifier: Apache-2.0 */
/* test_fork.c - a process forks after its communicators were made: what its child may do. */
#include "harness/harness.h"

#include "harness/allocations.h"

#include "comm/comm.h"
#include "core/error.h"
#include "operation.h"

#include <colobridge/bootstrap.h>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3 };

/* 0, or the number of the first call that was not refused. */
static int use_all(colo_comm_t *c)
{
    const char *text = "is a child with a copy of it; use it in process";
    colo_grid_t grid;
    colo_comm_t *made = NULL;
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT};
    float x[2 + 2 * RANKS] = {1, 2};
    char dump[16] = "";
    colo_comm_stats_t stats = {COLO_COMM_STATS_INIT, .ops = {{77}}};
#define REFUSED(number, call)                                         \
    if ((call) != COLO_ERR_STATE || !strstr(colo_last_error(), text)) \
    return number
    for (int kind = 0; kind < COLO_OP_SPLIT; kind++)
        REFUSED(kind + 1,
                operate(c, &(operation_t){(colo_op_kind_t)kind, 2, .from = 0, .to = 2}, x));
    REFUSED(7, colo_comm_check(c));
    REFUSED(8, colo_comm_split_color(c, 0, 0, &made));
    if (colo_grid_parse(&grid, "dp=3", RANKS) != COLO_OK)
        return 9;
    REFUSED(10, colo_comm_split(c, &grid, "dp", &made));
    REFUSED(11, colo_comm_set_world_ranks(c, (int64_t[]){5, 6, 7}));
    if (colo_bootstrap_from_comm(c, &b) != COLO_OK)
        return 12;
    REFUSED(13, b.all_gather(b.user, x, x + 2, 2 * sizeof *x));
    REFUSED(14,
            colo_comm_all_reduce(c, x, x, -1, COLO_F32, COLO_REDOP_SUM, NULL)); /* tells no rank */
    REFUSED(17, colo_comm_stats(c, &stats));
#undef REFUSED
    colo_comm_stats_reset(c);
    colo_comm_set_name(c, "child");
    colo_comm_abort(c, "the child is done");
    if (colo_comm_dump(c, dump, sizeof dump) != 4 || strcmp(dump, "null") != 0)
        return 15;
    return made || stats.ops[0][0] != 77 || x[1] != 2 ? 16 : 0;
}

T_CASE_ON(RANKS, child_is_refused_and_its_parent_goes_on)
{
    colo_comm_t *half = NULL, *copy = NULL;
    float x = 1;
    rank_try(colo_comm_split_color(world, 0, 0, &half));
    rank_try(colo_comm_all_reduce(world, &x, &x, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        int wrong = use_all(world);
        if (!wrong && use_all(half))
            wrong = 50;
        copy = half;
        colo_comm_destroy(&copy);
        if (!wrong && copy)
            wrong = 60;
        copy = world;
        colo_comm_destroy(&copy);
        _exit(wrong);
    }
    int status = 1;
    rank_check(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (status != 0)
        return colo_fail(COLO_ERR_STATE, "the child ended with 0x%x", (unsigned)status);
    x = 1;
    rank_try(colo_comm_all_reduce(world, &x, &x, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_check(x == RANKS);
    rank_try(colo_comm_all_reduce(half, &x, &x, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_check(x == RANKS * RANKS);
    rank_check(strcmp(colo_comm_name(world), "child") != 0);
    rank_check(colo_comm_world_rank(world, 0) == 0);
    colo_comm_destroy(&half);
    return COLO_OK;
}

T_CASE(child_of_a_rank_alone_is_refused)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    int status = 1;
    assert_ok(colo_comm_create_self(&c));
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(colo_comm_barrier(c, NULL) != COLO_ERR_STATE);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_ok(colo_comm_barrier(c, NULL));
}

T_CASE(child_makes_communicators_of_its_own)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    int status = 1;
    assert_ok(colo_comm_create_self(&c));
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        colo_comm_t *mine = NULL;
        colo_status_t st = colo_comm_create_self(&mine);
        if (st == COLO_OK)
            st = colo_comm_barrier(mine, NULL);
        colo_comm_destroy(&mine);
        _exit(st != COLO_OK);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static bool ended_well(pid_t child)
{
    int status = 1;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

T_CASE(child_uses_what_has_no_communicator)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    colo_grid_t grid;
    colo_layout_t src, dst;
    float x[4] = {1, 2, 3, 4}, y[4] = {0}, d_x[4] = {0};
    colo_tensor_t in = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){1, 2, 2}), out = in;
    const colo_tensor_t gradient = colo_tensor_host(d_x, COLO_F32, 3, (int64_t[]){1, 2, 2});
    colo_value_t value;
    out.data = y;
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_grid_parse(&grid, "dp=1", 1));
    assert_ok(colo_layout_init_src(&src, &grid));
    assert_ok(colo_layout_init_dst(&dst, &grid));
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &src, .dst = &dst,
                                         .shape = {1, 2, 2, 0}};
    assert_ok(colo_bridge_create(&bridge, &config, c));
    assert_ok(colo_tape_create(&tape));
    assert_ok(colo_tape_leaf(tape, &in, &gradient, &value));
    const uint64_t hash = colo_plan_hash(colo_bridge_plan(bridge));
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        if (colo_bridge_forward(bridge, &in, &out, NULL) != COLO_ERR_STATE || y[0] != 0)
            _exit(1);
        if (colo_plan_hash(colo_bridge_plan(bridge)) != hash)
            _exit(2);
        if (colo_tape_backward(tape, value, &in) != COLO_OK || d_x[3] != 4)
            _exit(3);
        colo_tape_destroy(&tape);
        colo_bridge_destroy(&bridge);
        _exit(bridge || tape ? 4 : 0);
    }
    assert_true(ended_well(pid));
    assert_ok(colo_bridge_forward(bridge, &in, &out, NULL));
    assert_true(y[3] == 4 && d_x[3] == 0);
}

static void drop_line(colo_log_level_t level, const char *line, void *user)
{
}

/* Calls that take locks of the whole process. */
static colo_status_t take_locks(void)
{
    colo_comm_t *c = NULL;
    colo_log_set(drop_line, NULL, COLO_LOG_DEBUG);
    rank_try(colo_comm_create_self(&c));
    (void)colo_topology_version();
    colo_comm_destroy(&c);
    return COLO_OK;
}

static _Atomic bool enough;

static void *busy(void *arg)
{
    while (!enough)
        if (take_locks() < 0)
            return arg;
    return NULL;
}

T_CASE(child_of_a_process_with_busy_threads_waits_for_none_of_them)
{
#ifdef SANITIZED /* whose own locks are not free in a child */
    skip();
#endif
    pthread_t thread[3];
    int bad = 0;
    assert_ok(take_locks()); /* it loads hwloc, and dlopen() has a lock that no child frees */
    enough = false;
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, busy, &enough), 0);
    fflush(NULL);
    for (int i = 0; i < 100; i++) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(20); /* SIGALRM ends a child that waits */
            _exit(take_locks() != COLO_OK);
        }
        bad += !ended_well(pid);
    }
    enough = true;
    for (int i = 0; i < 3; i++) {
        void *failed;
        pthread_join(thread[i], &failed);
        bad += failed != NULL;
    }
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    assert_int_equal(bad, 0);
}

T_MAIN("comm/fork")
