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
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { RANKS = 8, STRANGERS = 200 };

static bool over_tcp(void)
{
    const char *was = getenv("COLO_SOCKETS");
    return was && strcmp(was, "tcp") == 0;
}

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
    setenv("COLO_TIMEOUT_MS", "4000", 1);
    for (free_descriptors = 0; free_descriptors <= 40; free_descriptors += went ? 40 : 1) {
        t_page_t *page = t_fork_ranks(RANKS, few_descriptors);
        const bool all = page->status[1] == COLO_OK;
        for (int32_t r = 0; r < RANKS; r++) {
            if (all)
                t_expect(page, r, COLO_OK, "");
            else if (r == 1)
                t_expect(page, r, COLO_ERR_IO, "rank 1 has too few descriptors for 7 connections");
            else
                t_expect(page, r, COLO_ERR_PEER, "rank 1 failed: rank 1 has too few descriptors");
            assert_true(page->seconds[r] < 1);
        }
        failed |= !all;
        went |= all;
        munmap(page, sizeof *page);
    }
    unsetenv("COLO_TIMEOUT_MS");
    assert_true(failed && went);
}

/* ---- endpoints ---- */

static int32_t listed;

static void change_endpoint(t_forked_t *me, void *endpoints, size_t bytes)
{
    assert_int_equal(bytes, sizeof(colo_endpoint_t));
    ((colo_endpoint_t *)endpoints)[0].naddress = listed;
    ((colo_endpoint_t *)endpoints)[0].host = 1; /* or the addresses would not be looked at */
}

static void with_changed_endpoints(t_forked_t *me)
{
    me->after = change_endpoint;
    t_live(me);
}

T_CASE(endpoint_with_too_many_addresses_is_refused)
{
    const int32_t wrong[] = {COLO_ADDRESSES + 1, INT32_MAX, -1};
    setenv("COLO_TIMEOUT_MS", "2000", 1);
    for (int i = 0; i < 3; i++) {
        listed = wrong[i];
        t_page_t *page = t_fork_ranks(2, with_changed_endpoints);
        for (int32_t r = 0; r < 2; r++)
            t_expect(page, r, COLO_ERR_MISMATCH, "entry 0 of the all-gather lists");
        munmap(page, sizeof *page);
    }
    unsetenv("COLO_TIMEOUT_MS");
}

T_CASE(ucx_carries_between_hosts_unless_a_rank_refuses_and_wherever_one_insists)
{
    colo_endpoint_t endpoint[3];
    const colo_bootstrap_t b = {.rank = 0, .size = 3};
    memset(endpoint, 0, sizeof endpoint);
    for (int32_t r = 0; r < 3; r++)
        endpoint[r].host = 7;
    assert_false(colo_endpoint_wants_ucx(&b, endpoint));
    endpoint[1].ucx = 1;
    assert_true(colo_endpoint_wants_ucx(&b, endpoint));
    endpoint[1].ucx = 0;
    endpoint[2].host = 8;
    assert_true(colo_endpoint_wants_ucx(&b, endpoint));
    endpoint[1].ucx = -1;
    assert_false(colo_endpoint_wants_ucx(&b, endpoint));
}

/* ---- strangers ---- */

static int call_unix(const colo_endpoint_t *endpoint)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(endpoint->name);
    memcpy(a.sun_path + 1, endpoint->name, n);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&a,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)) == 0)
        return fd;
    close(fd);
    return -1;
}

static int call_tcp(const colo_address_t *a)
{
    if (a->family != AF_INET && a->family != AF_INET6)
        return -1;
    int fd = socket(a->family, SOCK_STREAM, 0);
    if (connect(fd, &a->any, a->family == AF_INET ? sizeof a->four : sizeof a->six) == 0)
        return fd;
    close(fd);
    return -1;
}

/* The doors of @endpoint that take calls: bit 0 the Unix name, bit 1 + i address i. */
static unsigned open_doors(const colo_endpoint_t *endpoint)
{
    unsigned open = 0;
    int fd = endpoint->name[0] ? call_unix(endpoint) : -1;
    if (fd >= 0)
        open |= 1;
    close(fd);
    for (int i = 0; i < endpoint->naddress; i++) {
        fd = call_tcp(&endpoint->address[i]);
        if (fd >= 0)
            open |= 2u << i;
        close(fd);
    }
    return open;
}

static unsigned expected_doors; /* of a rank that waits for callers of this host */

/* Rank 0 waits for the calls of rank 1, which looks at its doors first. */
static void check_listeners(t_forked_t *me, void *endpoints, size_t bytes)
{
    usleep(300 * 1000);
    const unsigned open = open_doors(endpoints);
    if (open != expected_doors || open_doors((colo_endpoint_t *)endpoints + 1) != 0) {
        fprintf(stderr, "open doors of rank 0: 0x%x, expected 0x%x\n", open, expected_doors);
        _exit(1);
    }
}

/* Once all have met, no rank takes a call any more. */
static void check_again(t_forked_t *me)
{
    colo_bootstrap_t b = {me->rank, me->page->size, t_over_page, me};
    colo_comm_t *world = NULL;
    me->after = me->rank == 1 ? check_listeners : NULL;
    colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    for (int32_t r = 0; r < 2 && st == COLO_OK; r++)
        if (open_doors((colo_endpoint_t *)(void *)me->page->endpoint[0][r]) != 0)
            st = colo_fail(COLO_ERR_STATE, "rank %d still listens", (int)r);
    if (st == COLO_OK)
        st = colo_comm_barrier(world, NULL);
    t_note(me, st);
    colo_comm_destroy(&world);
}

T_CASE(rank_listens_where_it_is_called_and_until_all_have_met)
{
    expected_doors = over_tcp() ? 2 : 1; /* loopback, or the Unix name, and nothing else */
    setenv("COLO_TIMEOUT_MS", "3000", 1);
    t_page_t *page = t_fork_ranks(2, check_again);
    unsetenv("COLO_TIMEOUT_MS");
    for (int32_t r = 0; r < 2; r++)
        t_expect(page, r, COLO_OK, "");
    munmap(page, sizeof *page);
}

static int call(const colo_endpoint_t *endpoint)
{
    return endpoint->name[0] ? call_unix(endpoint) : call_tcp(&endpoint->address[0]);
}

struct hello { /* as connect.c has it */
    uint32_t magic;
    int32_t rank;
    uint8_t token[COLO_TOKEN];
};

/* Is @hello answered? Waits for a hang-up or a byte. */
static bool is_answered(int fd, const struct hello *hello)
{
    struct pollfd p = {fd, POLLIN, 0};
    char byte;
    send(fd, hello, sizeof *hello, MSG_NOSIGNAL);
    return poll(&p, 1, 2000) == 1 && recv(fd, &byte, 1, 0) > 0;
}

/* Another user that knows the token; only root can play one. */
static bool another_user_is_answered(const colo_endpoint_t *endpoint, const struct hello *hello)
{
    int status = 0;
    if (geteuid() != 0 || over_tcp())
        return false;
    pid_t pid = fork();
    if (pid == 0)
        _exit(setuid(65534) == 0 && is_answered(call_unix(endpoint), hello));
    return waitpid(pid, &status, 0) != pid || status != 0;
}

/* More callers than rank 0 remembers: silent ones, ones that stop halfway, and liars. */
static void crowd_the_doors(t_forked_t *me, void *endpoints, size_t bytes)
{
    const colo_endpoint_t *endpoint = endpoints;
    struct hello right = {COLO_ENDPOINT_MAGIC, 1, {0}};
    memcpy(right.token, endpoint->token, COLO_TOKEN);
    usleep(100 * 1000);
    for (int i = 0; i < STRANGERS; i++) {
        struct hello h = right;
        int fd = call(endpoint);
        size_t n = i % 4 == 0 ? 0 : i % 4 == 1 ? 9 : sizeof h;
        if (i % 8 < 4)
            h.token[i % COLO_TOKEN] ^= 1;
        else
            h.rank = i % 2 ? 0 : 7;
        if (fd < 0)
            _exit(2);
        if (n < sizeof h)
            send(fd, &h, n, MSG_NOSIGNAL);
        else if (is_answered(fd, &h)) {
            fprintf(stderr, "a stranger was answered\n");
            _exit(1);
        }
    }
    if (another_user_is_answered(endpoint, &right)) {
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
    setenv("COLO_TIMEOUT_MS", "3000", 1);
    t_page_t *page = t_fork_ranks(2, among_strangers);
    unsetenv("COLO_TIMEOUT_MS");
    for (int32_t r = 0; r < 2; r++)
        t_expect(page, r, COLO_OK, "");
    munmap(page, sizeof *page);
}

/* ---- ranks that this test plays ---- */

/* Brings an endpoint of @me to the all-gather; the door that it names. */
static int play(t_forked_t *me, colo_endpoint_t *all, colo_endpoint_t *mine)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(over_tcp() ? AF_INET : AF_UNIX, SOCK_STREAM, 0);
    alarm(30);
    memset(mine, 0, sizeof *mine);
    mine->magic = COLO_ENDPOINT_MAGIC;
    mine->rank = me->rank;
    mine->size = me->page->size;
    mine->version = colo_version_number();
    mine->naddress = 1;
    if (over_tcp()) {
        socklen_t size = sizeof mine->address[0].four;
        mine->address[0].four = (struct sockaddr_in){.sin_family = AF_INET};
        mine->address[0].four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (bind(fd, &mine->address[0].any, size) != 0 ||
            getsockname(fd, &mine->address[0].any, &size) != 0)
            _exit(3);
    } else {
        int n = snprintf(mine->name, sizeof mine->name, "colobridge-test-%d", (int)getpid());
        memcpy(a.sun_path + 1, mine->name, (size_t)n);
        if (bind(fd, (struct sockaddr *)&a,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) != 0)
            _exit(3);
    }
    if (listen(fd, 8) != 0)
        _exit(4);
    t_over_page(me, mine, all, sizeof *mine);
    return fd;
}

/* Endpoints of a rank that is played are of the host of the others. */
static void as_on_one_host(t_forked_t *me, void *endpoints, size_t bytes)
{
    colo_endpoint_t *endpoint = endpoints;
    endpoint[0].host = endpoint[2].host = endpoint[1].host;
}

/* Rank 0, played: takes the first call, answers it a byte a time and late, then leaves. */
static void answer_and_leave(t_forked_t *me)
{
    colo_endpoint_t all[3], mine;
    struct hello hello;
    uint32_t answer[2] = {COLO_ENDPOINT_MAGIC, 0}, taken = 0;
    if (me->rank != 0) {
        me->after = as_on_one_host;
        if (me->rank == 2) { /* it never calls */
            colo_endpoint_t others[3], endpoint;
            close(play(me, others, &endpoint));
            sleep(3);
            t_note(me, COLO_OK);
            return;
        }
        t_live(me);
        return;
    }
    int door = play(me, all, &mine);
    int fd = accept(door, NULL, NULL);
    usleep(200 * 1000);
    bool good = recv(fd, &hello, sizeof hello, MSG_WAITALL) == (ssize_t)sizeof hello &&
                hello.magic == COLO_ENDPOINT_MAGIC && hello.rank == 1;
    for (size_t i = 0; i < sizeof answer; i++, usleep(20 * 1000))
        good = good && send(fd, (char *)answer + i, 1, MSG_NOSIGNAL) == 1;
    good = good && recv(fd, &taken, sizeof taken, MSG_WAITALL) == (ssize_t)sizeof taken &&
           taken == COLO_ENDPOINT_MAGIC;
    struct pollfd p = {door, POLLIN, 0};
    good = good && poll(&p, 1, 0) == 0; /* the one call was not given up for another */
    close(fd);
    t_note(me, good ? COLO_OK : colo_fail(COLO_ERR_STATE, "the call was not as it should be"));
}

T_CASE(rank_that_leaves_before_all_have_met_is_an_error_at_once)
{
    setenv("COLO_TIMEOUT_MS", "15000", 1);
    t_page_t *page = t_fork_ranks(3, answer_and_leave);
    unsetenv("COLO_TIMEOUT_MS");
    t_expect(page, 0, COLO_OK, "");
    t_expect(page, 1, COLO_ERR_PEER, "rank 0 left before all ranks were connected");
    assert_true(page->seconds[1] < 10);
    munmap(page, sizeof *page);
}

T_MAIN("sockets/connect")
