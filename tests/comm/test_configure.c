/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_configure.c - what a program says of its communicators, and what the environment says
 * instead: who has it, who inherits it, what is refused.
 */
#include "harness/harness.h"

#include <stdatomic.h>
#include <unistd.h>

enum { RANKS = 2 };

static colo_comm_config_t of(const colo_comm_t *comm)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT};
    if (colo_comm_config(comm, &config) < 0)
        config.timeout_ms = -1;
    return config;
}

static bool is(const colo_comm_t *comm, int64_t timeout_ms, int32_t check,
               colo_transport_t transport, const char *recorder)
{
    const colo_comm_config_t now = of(comm);
    return now.timeout_ms == timeout_ms && now.check == check && now.transport == transport &&
           !now.flight_recorder == !recorder &&
           (!recorder || strcmp(now.flight_recorder, recorder) == 0);
}

static colo_comm_config_t ours(void)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 4321,
                                 .transport = COLO_TRANSPORT_NCCL, .flight_recorder = "/tmp/ours"};
    config.check = 2;
    return config;
}

static void unset_all(void)
{
    unsetenv("COLO_TIMEOUT_MS");
    unsetenv("COLO_CHECK");
    unsetenv("COLO_TRANSPORT");
    unsetenv("COLO_FLIGHT_RECORDER");
}

static colo_status_t inherit(colo_comm_t *world, void *arg)
{
    const colo_comm_config_t config = ours();
    colo_comm_t *part = NULL;
    T_ENDS(colo_comm_destroy) colo_comm_t *before = NULL;
    T_ENDS(colo_comm_destroy) colo_comm_t *after = NULL;
    (void)arg;
    rank_check(is(world, 600000, 1, COLO_TRANSPORT_AUTO, NULL));
    rank_try(colo_comm_split_color(world, 0, 0, &before));
    rank_try(colo_comm_part(world, (int64_t[]){colo_comm_rank(world)}, 1, &part));
    rank_try(colo_comm_configure(world, &config));
    rank_try(colo_comm_split_color(world, 0, 0, &after));
    rank_check(is(world, 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"));
    rank_check(is(part, 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"));
    rank_check(is(after, 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"));
    rank_check(is(before, 600000, 1, COLO_TRANSPORT_AUTO, NULL));
    rank_try(colo_comm_set_timeout(world, 5000)); /* of now */
    rank_check(of(world).timeout_ms == 5000);
    return COLO_OK;
}

T_CASE(parts_have_what_is_said_of_a_comm_and_later_comms_inherit_it)
{
    unset_all();
    assert_ok(colo_comm_threads_run(RANKS, inherit, NULL));
}

T_CASE(the_environment_overrides_each_member_that_it_sets)
{
    static const struct {
        const char *name, *value;
        int64_t timeout_ms;
        int32_t check;
        colo_transport_t transport;
        const char *recorder;
    } set[] = {
        {"COLO_TIMEOUT_MS", "77", 77, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"},
        {"COLO_CHECK", "0", 4321, 0, COLO_TRANSPORT_NCCL, "/tmp/ours"},
        {"COLO_TRANSPORT", "peer", 4321, 2, COLO_TRANSPORT_PEER, "/tmp/ours"},
        {"COLO_TRANSPORT", "auto", 4321, 2, COLO_TRANSPORT_AUTO, "/tmp/ours"},
        {"COLO_TRANSPORT", "ucx", 4321, 2, COLO_TRANSPORT_UCX, "/tmp/ours"},
        {"COLO_FLIGHT_RECORDER", "/tmp/theirs", 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/theirs"},
    };
    const colo_comm_config_t config = ours();
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++) {
        T_ENDS(colo_comm_destroy) colo_comm_t *comm = NULL;
        unset_all();
        setenv(set[i].name, set[i].value, 1);
        assert_ok(colo_comm_create_self(&comm));
        assert_ok(colo_comm_configure(comm, &config));
        if (!is(comm, set[i].timeout_ms, set[i].check, set[i].transport, set[i].recorder))
            fail_msg("%s=%s is not what holds", set[i].name, set[i].value);
    }
    unset_all();
}

T_CASE(what_is_out_of_range_is_refused_by_its_name_and_changes_nothing)
{
    static char longest[2000];
    T_ENDS(colo_comm_destroy) colo_comm_t *comm = NULL;
    const colo_comm_config_t config = ours();
    memset(longest, 'x', sizeof longest - 1);
    unset_all();
    assert_ok(colo_comm_create_self(&comm));
    assert_ok(colo_comm_configure(comm, &config));
#define REFUSED(change, text)                                              \
    do {                                                                   \
        colo_comm_config_t bad = {COLO_COMM_CONFIG_INIT};                  \
        change;                                                            \
        assert_fails(colo_comm_configure(comm, &bad), COLO_ERR_ARG, text); \
        assert_true(is(comm, 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"));  \
    } while (0)
    REFUSED(bad.timeout_ms = -1, "comm: config.timeout_ms is -1, expected 0..");
    REFUSED(bad.check = 3, "comm: config.check is 3, expected 0..2");
    REFUSED(bad.transport = (colo_transport_t)4, "comm: config.transport is 4, expected 0..3");
    REFUSED(bad.flight_recorder = longest,
            "comm: config.flight_recorder has 1999 bytes, expected at most 1023");
    REFUSED(bad.flight_recorder = "/no/such/folder/rank",
            "comm: config.flight_recorder is '/no/such/folder/rank', expected the beginning of a "
            "path");
#undef REFUSED
    assert_fails(colo_comm_configure(comm, NULL), COLO_ERR_ARG, "config is NULL");
    assert_fails(colo_comm_configure(NULL, &config), COLO_ERR_ARG, "comm is NULL");
}

static colo_status_t bootstrapped(colo_comm_t *first, void *arg)
{
    const colo_comm_config_t config = ours();
    colo_comm_config_t bad = {COLO_COMM_CONFIG_INIT};
    colo_bootstrap_t boot = {COLO_BOOTSTRAP_INIT};
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    (void)arg;
    rank_try(colo_bootstrap_from_comm(first, &boot));
    boot.config = &bad;
    bad.check = -1;
    rank_fails(colo_comm_create_bootstrap(&boot, &world), COLO_ERR_ARG, "config.check is -1");
    if (colo_comm_rank(first) != 1) { /* one rank's is refused: the others need not wait for it */
        boot.config = &config;
        rank_fails(colo_comm_create_bootstrap(&boot, &world), COLO_ERR_PEER,
                   "rank 1 failed: comm: config.check is -1");
    } else {
        rank_fails(colo_comm_create_bootstrap(&boot, &world), COLO_ERR_ARG, "config.check is -1");
    }
    boot.config = &config;
    rank_try(colo_comm_create_bootstrap(&boot, &world));
    rank_check(is(world, 4321, 2, COLO_TRANSPORT_NCCL, "/tmp/ours"));
    return colo_comm_barrier(world, NULL);
}

T_CASE(a_bootstrap_has_the_config_of_its_world)
{
    unset_all();
    assert_ok(colo_comm_threads_run(RANKS, bootstrapped, NULL));
}

static colo_status_t other_check(colo_comm_t *first, void *arg)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT};
    colo_bootstrap_t boot = {COLO_BOOTSTRAP_INIT};
    colo_comm_t *world = NULL;
    (void)arg;
    rank_try(colo_bootstrap_from_comm(first, &boot));
    boot.config = &config;
    config.check = colo_comm_rank(first) == 1 ? 0 : 2; /* at 2 ranks wait for what 0 does not do */
    rank_fails(colo_comm_create_bootstrap(&boot, &world), COLO_ERR_MISMATCH,
               "check (COLO_CHECK): rank 1 of 'create_bootstrap' has 0, rank 0 2");
    rank_check(!world);
    return COLO_OK;
}

T_CASE(ranks_with_other_levels_of_checks_hear_of_it_at_create)
{
    unset_all();
    assert_ok(colo_comm_threads_run(RANKS, other_check, NULL));
}

struct late {
    colo_bootstrap_t inner;
    atomic_bool *over; /* rank 0 has given up */
    int gathers;
};

/* Rank 1 does not come to connect while rank 0 waits. */
static colo_status_t gather_then_wait(void *user, const void *send, void *recv, size_t bytes)
{
    struct late *late = user;
    rank_try(late->inner.all_gather(late->inner.user, send, recv, bytes));
    if (late->inner.rank == 0 || ++late->gathers < 2)
        return COLO_OK;
    while (!atomic_load(late->over))
        usleep(1000);
    return colo_bootstrap_fail(COLO_ERR_STATE, "late");
}

static colo_status_t wait_for_one(colo_comm_t *first, void *arg)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 50};
    struct late late = {.inner = {COLO_BOOTSTRAP_INIT}, .over = arg};
    rank_try(colo_bootstrap_from_comm(first, &late.inner));
    const colo_bootstrap_t boot = {COLO_BOOTSTRAP_INIT, late.inner.rank, RANKS,
                                   gather_then_wait,    &late,           &config};
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    const colo_status_t st = colo_comm_create_bootstrap(&boot, &world);
    if (late.inner.rank == 1)
        return st == COLO_ERR_STATE ? COLO_OK : COLO_ERR_ARG;
    atomic_store(late.over, true);
    rank_check(st == COLO_ERR_TIMEOUT && says("50 ms"));
    return COLO_OK;
}

T_CASE(the_deadline_of_a_bootstrap_is_that_of_its_config)
{
    atomic_bool over = false;
    unset_all();
    assert_ok(colo_comm_threads_run(RANKS, wait_for_one, &over));
}

static colo_status_t fail_with_a_record(colo_comm_t *world, void *arg)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .flight_recorder = arg};
    T_ENDS(colo_comm_destroy) colo_comm_t *child = NULL;
    rank_try(colo_comm_configure(world, &config));
    rank_try(colo_comm_split_color(world, 0, 0, &child));
    if (colo_comm_rank(world) == 0)
        colo_comm_abort(child, "to see the file");
    rank_check(colo_comm_barrier(child, NULL) == COLO_ERR_ABORTED);
    return COLO_OK;
}

T_CASE(a_program_asks_for_flight_records_without_the_environment)
{
    const char *folder = t_folder();
    const char *prefix = t_text("%s/rank", folder);
    unset_all();
    assert_ok(colo_comm_threads_run(RANKS, fail_with_a_record, (void *)(uintptr_t)prefix));
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(unlink(t_text("%s/rank%d", folder, r)), 0);
    assert_int_equal(rmdir(folder), 0);
}

T_MAIN("comm/configure")
