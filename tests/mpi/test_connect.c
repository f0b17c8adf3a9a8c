/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_connect.c - how ranks get connected: without descriptors, with endpoints that were changed,
 * among strangers, and with ranks that this test plays, byte for byte.
 */
#include "forked.h"

#include "comm/process/address.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { RANKS = 8, STRANGERS = 200 };

/* ---- descriptors ---- */

static int free_descriptors;

static void few_descriptors(t_forked_t *me)
{
    enum { LIMIT = 200 };
    const struct rlimit limit = {LIMIT, LIMIT};
    if (me->rank == 1) {
        setrlimit(RLIMIT_NOFILE, &limit);
        while (dup(0) >= 0)
            ;
        for (int fd = LIMIT - 1; fd > LIMIT - 1 - free_descriptors; fd--)
            close(fd);
    }
    t_live(me);
}

T_CASE(rank_without_descriptors_is_an_error_on_all_at_once)
{
    bool failed = false, went = false;
    for (free_descriptors = 0; free_descriptors <= 40; free_descriptors += went ? 40 : 1) {
        t_page_t *page = t_fork_within(20000, RANKS, few_descriptors);
        const bool all = page->status[1] == COLO_OK;
        for (int32_t r = 0; r < RANKS; r++) {
            if (all)
                t_expect(page, r, COLO_OK, "");
            else if (r == 1)
                t_expect(page, r, COLO_ERR_IO, "rank 1 has too few descriptors for 7 connections");
            else
                t_expect(page, r, COLO_ERR_PEER, "rank 1 failed: rank 1 has too few descriptors");
            assert_true(page->seconds[r] < 10);
        }
        failed |= !all;
        went |= all;
    }
    assert_true(failed && went);
}

/* It closes its standard streams, and prints all the same. */
static colo_status_t print(t_forked_t *me, colo_comm_t *world)
{
    for (int fd = 0; fd < 3; fd++)
        rank_check(write(fd, "printed", 7) < 0);
    return colo_comm_barrier(world, NULL);
}

T_CASE_ON_FORKED(3, connections_of_a_rank_without_standard_streams_do_not_take_their_numbers)
{
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    t_live_by(me, print);
}

/* ---- endpoints ---- */

/* As an all-gather brought it back, or a peer wrote it. */
T_CASE(reason_that_does_not_end_is_cut)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = 0, .size = 1};
    colo_endpoint_t e = {.hello = {.magic = COLO_ENDPOINT_MAGIC, .size = 1}, .status = COLO_ERR_IO};
    memset(e.why, 'x', sizeof e.why);
    memset(&e.worker, 'y', sizeof e.worker);
    assert_fails(colo_endpoint_check_all(&b, &e), COLO_ERR_IO, "create_bootstrap: xxx");
    assert_null(strchr(colo_last_error(), 'y'));
}

/* ---- hosts ---- */

static int32_t lacking; /* rank without UCX; -1: all */

/* Each rank is of a host of its own. */
static void scatter(t_forked_t *me, void *endpoints, size_t bytes)
{
    assert_int_equal(bytes, sizeof(colo_endpoint_t));
    for (int32_t r = 0; r < me->page->size; r++)
        ((colo_endpoint_t *)endpoints)[r].host = (uint64_t)r + 1;
}

static void on_hosts(t_forked_t *me)
{
    if (lacking < 0 || me->rank == lacking)
        setenv("COLO_BACKEND_DIR", "/nowhere", 1);
    me->after = scatter;
    t_live(me);
    if (me->calls != 3)
        t_note(me, colo_fail(COLO_ERR_STATE, "%d all-gathers, expected 3", (int)me->calls));
}

T_CASE(ranks_of_several_hosts_of_which_one_has_no_ucx_are_told_what_to_install)
{
    for (lacking = -1; lacking < 3; lacking += 2) {
        t_page_t *page = t_fork_within(20000, 3, on_hosts);
        for (int32_t r = 0; r < 3; r++) {
            const char *why = page->error_message[r];
            if (lacking < 0 || r == lacking)
                t_expect(page, r, COLO_ERR_UNBUILT, "has no UCX, which carries between hosts; ");
            else if (page->status[r] != COLO_ERR_UNBUILT) /* if this build has it */
                t_expect(page, r, COLO_ERR_PEER,
                         "rank 1 failed: rank 1 has no UCX, which carries ");
            if (!strstr(why, "install it (apt install libucx0, or pip install libucx-cu12 or "
                             "libucx-cu13): backend 'ucx'"))
                fail_msg("rank %d: %s", (int)r, why);
            assert_true(page->seconds[r] < 10);
        }
    }
}

static colo_status_t miss_the_third(void *user, const void *send, void *recv, size_t bytes)
{
    t_forked_t *me = user;
    return me->calls == 2 ? colo_fail(COLO_ERR_TIMEOUT, "rank 1 did not come")
                          : t_over_page(user, send, recv, bytes);
}

static void create_without_workers(t_forked_t *me)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, me->rank, me->page->size, miss_the_third, me};
    colo_comm_t *world = NULL;
    me->after = scatter;
    t_note(me, colo_comm_create_bootstrap(&b, &world));
}

T_CASE(all_gather_of_workers_that_fails_is_the_error_of_create)
{
    t_expect_all(t_fork_ranks(2, create_without_workers), COLO_ERR_TIMEOUT, "rank 1 did not come");
}

/* ---- strangers ---- */

/* As rank @as, or without a name. */
static int call(const colo_endpoint_t *endpoint, int32_t as)
{
    static uint64_t nonce;
    struct sockaddr_un a, from;
    const socklen_t size = colo_endpoint_address(endpoint, &a),
                    own = colo_endpoint_caller(endpoint, as, (uint64_t)getpid() << 32 | ++nonce,
                                               &from);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if ((as < 0 || bind(fd, (struct sockaddr *)&from, own) == 0) &&
        connect(fd, (struct sockaddr *)&a, size) == 0)
        return fd;
    close(fd);
    return -1;
}

static bool is_open(const colo_endpoint_t *endpoint)
{
    int fd = call(endpoint, -1);
    close(fd);
    return fd >= 0;
}

/* Rank 0 waits for the call of rank 1, which looks at the doors first. No rank calls rank 2. */
static void check_doors(t_forked_t *me, void *endpoints, size_t bytes)
{
    const colo_endpoint_t *endpoint = endpoints;
    usleep(300 * 1000);
    if (!is_open(&endpoint[0]) || is_open(&endpoint[1]) || is_open(&endpoint[2])) {
        fprintf(stderr, "expected an open door of rank 0, and of no other\n");
        _exit(1);
    }
}

/* Once all have met, no rank takes a call any more. */
static colo_status_t find_doors_shut(t_forked_t *me, colo_comm_t *world)
{
    for (int32_t r = 0; r < 3; r++)
        if (is_open((colo_endpoint_t *)(void *)me->page->endpoint[1][r]))
            return colo_fail(COLO_ERR_STATE, "rank %d still listens", (int)r);
    return colo_comm_barrier(world, NULL);
}

static void check_again(t_forked_t *me)
{
    me->after = me->rank == 1 ? check_doors : NULL;
    t_live_by(me, find_doors_shut);
}

T_CASE(rank_listens_where_it_is_called_and_until_all_have_met)
{
    t_expect_all(t_fork_within(3000, 3, check_again), COLO_OK, "");
}

/* Waits for a hang-up or a byte. */
static bool is_answered(int fd)
{
    struct pollfd p = {fd, POLLIN, 0};
    char byte;
    return poll(&p, 1, 2000) == 1 && recv(fd, &byte, 1, 0) > 0;
}

/* Another user that knows the token; only root can play one. */
static bool another_user_is_answered(const colo_endpoint_t *endpoint)
{
    int status = 0;
    if (geteuid() != 0)
        return false;
    pid_t pid = fork();
    if (pid == 0)
        _exit(setuid(65534) == 0 && is_answered(call(endpoint, 1)));
    return waitpid(pid, &status, 0) != pid || status != 0;
}

/* Silent callers without a name, and some whose name another token or another rank makes. */
static void crowd_the_doors(t_forked_t *me, void *endpoints, size_t bytes)
{
    const colo_endpoint_t *endpoint = endpoints;
    usleep(100 * 1000);
    for (int i = 0; i < STRANGERS; i++) {
        colo_endpoint_t to = *endpoint;
        const bool silent = i % 4 == 0, token = i % 8 < 4;
        to.token[i % COLO_TOKEN] ^= token;
        const int fd = call(&to, silent ? -1 : token ? 1 : i % 2 ? 0 : 7);
        if (fd < 0)
            _exit(2);
        if (!silent && is_answered(fd)) {
            fprintf(stderr, "a stranger was answered\n");
            _exit(1);
        }
        if (!silent)
            close(fd);
    }
    if (another_user_is_answered(endpoint)) {
        fprintf(stderr, "another user was answered\n");
        _exit(1);
    }
}

static void among_strangers(t_forked_t *me)
{
    me->after = me->rank == 1 ? crowd_the_doors : NULL;
    t_live(me);
}

T_CASE(strangers_are_not_answered_and_keep_no_rank_out)
{
    t_expect_all(t_fork_within(3000, 2, among_strangers), COLO_OK, "");
}

/* ---- another version of the library ---- */

static const char *version = "0.1.0"; /* of which endpoints of these ranks say nothing */

const char *colo_version(void)
{
    return version;
}

uint32_t colo_version_number(void)
{
    return 1 << 8;
}

static void of_another_version(t_forked_t *me)
{
    if (me->rank == 1)
        version = "0.1.1";
    t_live(me);
}

T_CASE(rank_of_another_version_is_a_mismatch_on_all_at_create)
{
    t_expect_all(t_fork_ranks(3, of_another_version), COLO_ERR_MISMATCH,
                 "library version: rank 1 of 'create_bootstrap' has 0.1.1, rank 0 0.1.0");
}

/* Rank 1, played: all that another version has in common with this one. */
static void bring_another_hello(t_forked_t *me)
{
    colo_hello_t hello = colo_endpoint_hello(
        &(colo_bootstrap_t){COLO_BOOTSTRAP_INIT, me->rank, me->page->size, NULL, NULL});
    char all[3 * sizeof hello];
    if (me->rank != 1) {
        t_live(me);
        if (me->calls != 1)
            t_note(me, colo_fail(COLO_ERR_STATE, "%d all-gathers, expected 1", (int)me->calls));
        return;
    }
    hello.version += 0x10203;
    hello.bytes += 8;
    t_note(me, t_over_page(me, &hello, all, sizeof hello));
}

T_CASE(rank_of_a_version_with_other_addresses_is_a_mismatch_that_names_both)
{
    t_page_t *page = t_fork_ranks(3, bring_another_hello);
    t_expect(page, 1, COLO_OK, "");
    for (int32_t r = 0; r < 3; r += 2)
        t_expect(page, r, COLO_ERR_MISMATCH, "rank 1 runs library version 1.3.3, rank 0 0.1.0");
}

/* ---- callbacks that do not return ---- */

typedef colo_status_t (*all_gather_fn)(void *user, const void *send, void *recv, size_t bytes);

static colo_status_t leave(void *user, const void *send, void *recv, size_t bytes)
{
    if (bytes > 1000)
        pthread_exit(user); /* unwinds the stack, as an exception of C++ does */
    for (int32_t r = 0; r < 3; r++) {
        colo_hello_t *hello = (colo_hello_t *)recv + r;
        *hello = *(const colo_hello_t *)send;
        hello->rank = r;
    }
    return COLO_OK;
}

static colo_status_t leave_at_once(void *user, const void *send, void *recv, size_t bytes)
{
    pthread_exit(user);
}

static void *create_in_vain(void *all_gather)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, 0, 3, *(const all_gather_fn *)all_gather,
                                NULL};
    colo_comm_t *c = NULL;
    (void)colo_comm_create_bootstrap(&b, &c);
    return all_gather;
}

T_CASE(callback_that_leaves_by_another_way_leaves_no_descriptor_open)
{
    all_gather_fn way[] = {leave, leave_at_once};
    for (int i = 0; i < 2; i++) {
        const int before = dup(0); /* the lowest number that is free */
        pthread_t thread;
        void *made = &thread;
        close(before);
        assert_int_equal(pthread_create(&thread, NULL, create_in_vain, &way[i]), 0);
        assert_int_equal(pthread_join(thread, &made), 0);
        assert_null(made);
        const int after = dup(0);
        close(after);
        assert_int_equal(after, before);
    }
}

/* ---- ranks that this test plays ---- */

/* Brings an endpoint of @me to the all-gather; the door that it names. */
static int play(t_forked_t *me, colo_endpoint_t *all, colo_endpoint_t *mine)
{
    struct sockaddr_un a;
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    alarm(30);
    memset(mine, 0, sizeof *mine);
    mine->hello = colo_endpoint_hello(
        &(colo_bootstrap_t){COLO_BOOTSTRAP_INIT, me->rank, me->page->size, NULL, NULL});
    snprintf(mine->name, sizeof mine->name, "colobridge-test-%d", (int)getpid());
    const socklen_t size = colo_endpoint_address(mine, &a);
    if (bind(fd, (struct sockaddr *)&a, size) != 0)
        _exit(3);
    if (listen(fd, 8) != 0)
        _exit(4);
    t_over_page(me, &mine->hello, all, sizeof mine->hello);
    t_over_page(me, mine, all, sizeof *mine);
    return fd;
}

/* Endpoints of a rank that is played are of the host of the others. */
static void as_on_one_host(t_forked_t *me, void *endpoints, size_t bytes)
{
    colo_endpoint_t *endpoint = endpoints;
    endpoint[0].host = endpoint[2].host = endpoint[1].host;
}

static void as_rank_0_is_near(t_forked_t *me, void *endpoints, size_t bytes)
{
    colo_endpoint_t *endpoint = endpoints;
    endpoint[0].host = endpoint[1].host;
}

/* Until ranks below @n have said how they fared. */
static void stay_until(const t_forked_t *me, int32_t n)
{
    for (int32_t r = 0; r < n; r++)
        while (!atomic_load(&me->page->noted[r]))
            usleep(1000); /* alarm() ends it */
}

static void never_call(t_forked_t *me)
{
    colo_endpoint_t all[3], mine;
    const int door = play(me, all, &mine);
    stay_until(me, 2);
    close(door);
    t_note(me, COLO_OK);
}

/* Is it rank 1 that calls @mine? */
static bool is_rank_1(int fd, const colo_endpoint_t *mine)
{
    struct sockaddr_un from = {0}, expected;
    socklen_t size = sizeof from;
    uint64_t nonce;
    return getpeername(fd, (struct sockaddr *)&from, &size) == 0 &&
           colo_endpoint_rank(&from, size, &nonce) == 1 &&
           size == colo_endpoint_caller(mine, 1, nonce, &expected) &&
           memcmp(&from, &expected, size) == 0;
}

static bool answer_1(int fd, const colo_endpoint_t *all)
{
    const uint64_t answer = colo_endpoint_answer(&all[1], 0);
    return send(fd, &answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer;
}

/* Rank 0, played: takes the first call, answers it a byte a time and late, then leaves. */
static void answer_and_leave(t_forked_t *me)
{
    colo_endpoint_t all[3], mine;
    if (me->rank != 0) {
        me->after = as_on_one_host;
        (me->rank == 2 ? never_call : t_live)(me);
        return;
    }
    int door = play(me, all, &mine);
    int fd = accept(door, NULL, NULL);
    const uint64_t answer = colo_endpoint_answer(&all[1], 0);
    usleep(200 * 1000);
    bool good = is_rank_1(fd, &mine);
    for (size_t i = 0; i < sizeof answer; i++, usleep(20 * 1000))
        good = good && send(fd, (const char *)&answer + i, 1, MSG_NOSIGNAL) == 1;
    usleep(100 * 1000);
    struct pollfd p = {door, POLLIN, 0};
    good = good && poll(&p, 1, 0) == 0; /* the one call was not given up for another */
    close(fd);
    t_note(me, good ? COLO_OK : colo_fail(COLO_ERR_STATE, "the call was not as it should be"));
}

T_CASE(rank_that_leaves_before_all_have_met_is_an_error_at_once)
{
    t_page_t *page = t_fork_within(15000, 3, answer_and_leave);
    t_expect(page, 0, COLO_OK, "");
    t_expect(page, 1, COLO_ERR_PEER, "rank 0 left before all ranks were connected");
    assert_true(page->seconds[1] < 10);
}

/* Rank 0, played: hangs up the first call, of which another process takes the name, and answers the
 * second as one that does not know the token. */
static void take_the_name(t_forked_t *me)
{
    colo_endpoint_t all[2], mine;
    struct sockaddr_un name = {0};
    socklen_t size = sizeof name;
    uint64_t wrong = 0;
    char byte;
    if (me->rank != 0) {
        me->after = as_rank_0_is_near;
        t_live(me);
        return;
    }
    const int door = play(me, all, &mine), taken = socket(AF_UNIX, SOCK_STREAM, 0);
    int fd = accept(door, NULL, NULL);
    bool good = is_rank_1(fd, &mine) && getpeername(fd, (struct sockaddr *)&name, &size) == 0;
    close(fd);
    while (good && bind(taken, (struct sockaddr *)&name, size) != 0)
        usleep(100); /* alarm() ends it */
    fd = accept(door, NULL, NULL);
    good = good && send(fd, &wrong, sizeof wrong, MSG_NOSIGNAL) == (ssize_t)sizeof wrong;
    good = good && recv(fd, &byte, 1, 0) == 0; /* it hangs up */
    close(fd);
    fd = accept(door, NULL, NULL);
    good = good && is_rank_1(fd, &mine) && answer_1(fd, all);
    t_note(me, good ? COLO_OK : colo_fail(COLO_ERR_STATE, "not as it should be"));
    (void)!recv(fd, &byte, 1, MSG_WAITALL); /* of the first frame */
    close(fd);
}

T_CASE(process_that_takes_a_callers_name_or_answers_in_a_ranks_place_keeps_no_rank_out)
{
    t_page_t *page = t_fork_within(t_long_wait(), 2, take_the_name);
    t_expect(page, 0, COLO_OK, "");
    t_expect(page, 1, COLO_ERR_PEER, "world rank 0 ended without destroying its communicators");
}

static void come_later(t_forked_t *me, void *endpoints, size_t bytes)
{
    as_on_one_host(me, endpoints, bytes);
    usleep((useconds_t)me->rank * 300 * 1000);
}

/* Rank 0 gives up before rank 1 does; rank 2, played, calls none of them. */
static void wait_for_one(t_forked_t *me)
{
    me->after = me->rank < 2 ? come_later : NULL;
    (me->rank < 2 ? t_live : never_call)(me);
}

T_CASE(ranks_that_met_and_miss_another_all_name_it)
{
    t_page_t *page = t_fork_within(1000, 3, wait_for_one);
    for (int32_t r = 0; r < 2; r++)
        t_expect(page, r, COLO_ERR_TIMEOUT,
                 "has no connection with 1 ranks after 1000 ms; the first is rank 2");
}

static int32_t called;

/* Rank 2, played, calls one of the two and not the other. */
static void call_one(t_forked_t *me)
{
    colo_endpoint_t all[3], mine;
    const int door = play(me, all, &mine);
    int fd;
    while ((fd = call(&all[called], 2)) < 0)
        usleep(1000); /* alarm() ends it */
    stay_until(me, 2);
    close(fd);
    close(door);
    t_note(me, COLO_OK);
}

static void wait_for_a_call_or_a_frame(t_forked_t *me)
{
    me->after = me->rank < 2 ? come_later : NULL;
    (me->rank < 2 ? t_live : call_one)(me);
}

/* Rank 0 gives up first: all connected, or as one that rank 2 has not called. */
T_CASE(rank_that_called_only_one_is_missed_by_both)
{
    for (called = 0; called < 2; called++) {
        t_page_t *page = t_fork_within(1000, 3, wait_for_a_call_or_a_frame);
        for (int32_t r = 0; r < 2; r++)
            t_expect(page, r, COLO_ERR_TIMEOUT, "");
    }
}

static int32_t ending;

static void end(t_forked_t *me, void *endpoints, size_t bytes)
{
    _exit(0);
}

static void one_ends(t_forked_t *me)
{
    if (me->rank == ending)
        me->after = end;
    t_live(me);
}

/* Whether the others call it or it calls them. One of them may leave first, with the error, and be
 * what the other one sees. */
T_CASE(rank_that_ends_before_it_has_met_any_is_an_error_at_once)
{
    for (ending = 0; ending < 3; ending++) {
        const char *why = t_text("rank %d left before all ranks were connected", (int)ending);
        t_page_t *page = t_fork_within(t_long_wait(), 3, one_ends);
        bool named = false;
        for (int32_t r = 0; r < 3; r++)
            if (r != ending) {
                t_expect(page, r, COLO_ERR_PEER, "left before all ranks were connected");
                named = named || strstr(page->error_message[r], why);
            }
        assert_true(named);
    }
}

static _Atomic bool *shut; /* until then no poll() of this process sees anything; NULL: all do */

int poll(struct pollfd *fds, nfds_t n, int ms)
{
    if (shut) {
        while (!atomic_load(shut))
            usleep(1000); /* alarm() ends it */
        usleep(100 * 1000);
        shut = NULL;
        return 0;
    }
    return ppoll(fds, n, ms < 0 ? NULL : &(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

static void sleep_until_the_door_is_shut(t_forked_t *me, void *endpoints, size_t bytes)
{
    colo_endpoint_t *endpoint = endpoints;
    endpoint[0].host = endpoint[1].host;
    shut = &me->page->noted[0];
}

/* Rank 0, played: all that it meets is rank 1, whose answer lies there when the door goes. */
static void answer_and_shut(t_forked_t *me)
{
    colo_endpoint_t all[2], mine;
    alarm(30);
    if (me->rank == 1) {
        me->after = sleep_until_the_door_is_shut;
        t_live(me);
        return;
    }
    const int door = play(me, all, &mine), fd = accept(door, NULL, NULL);
    const bool good = is_rank_1(fd, &mine) && answer_1(fd, all);
    char byte;
    close(door);
    t_note(me, good ? COLO_OK : colo_fail(COLO_ERR_STATE, "no call"));
    (void)!recv(fd, &byte, 1, MSG_WAITALL); /* of the first frame */
    close(fd);
}

T_CASE(rank_that_shut_its_door_after_its_last_answer_has_been_met)
{
    t_page_t *page = t_fork_ranks(2, answer_and_shut);
    t_expect(page, 0, COLO_OK, "");
    t_expect(page, 1, COLO_ERR_PEER, "world rank 0 ended without destroying its communicators");
}

T_MAIN("sockets/connect")
