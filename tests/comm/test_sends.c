/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sends.c - two ranks over a socket pair, while send() fails and memory for frames is refused.
 *
 * This program has a send() of its own, which the library calls.
 */
#include "harness/harness.h"

#include "comm/process/group.h"
#include "comm/process/transport-unix.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

static const colo_comm_backend_t over_sockets = COLO_PROCESS_COMM("sockets");

enum { MANY = 300 * 1000, OPERATIONS = 3, DEADLINE_MS = 10000, ALWAYS = -1 };

static _Atomic int until_failure; /* sends that go well before one fails; 0: all go well */
static int failure;

ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    int left = atomic_load(&until_failure);
    while (left > 0 && !atomic_compare_exchange_weak(&until_failure, &left, left - 1))
        ;
    if (left == 1 || left == ALWAYS) {
        errno = failure;
        return -1;
    }
    return sendto(fd, data, bytes, flags, NULL, 0);
}

/* ---- a transport without memory for large frames ---- */

static void *reserve_small(void *connections, int32_t peer, size_t bytes)
{
    return bytes > 8 << 10 ? NULL : colo_transport_sockets.reserve(connections, peer, bytes);
}

/* ---- two ranks ---- */

struct rank {
    colo_comm_t *comm;
    pthread_t thread;
    colo_status_t status;
    char error_message[1000];
    bool wrong;
};

static int32_t code(int32_t r, int rep, int64_t i)
{
    return (int32_t)(i * 7 + 3 * rep + r);
}

static int64_t count; /* elements of a rank */

static void *run(void *arg)
{
    struct rank *me = arg;
    int32_t r = colo_comm_rank(me->comm);
    int32_t *x = malloc((size_t)count * sizeof *x), *y = malloc(2 * (size_t)count * sizeof *y);
    for (int rep = 0; rep < OPERATIONS && me->status == COLO_OK; rep++) {
        for (int64_t i = 0; i < count; i++)
            x[i] = code(r, rep, i);
        me->status = colo_comm_all_gather(me->comm, x, y, count, COLO_I32, NULL);
        for (int64_t i = 0; i < 2 * count && me->status == COLO_OK; i++)
            me->wrong |= y[i] != code(i >= count, rep, i % count);
    }
    snprintf(me->error_message, sizeof me->error_message, "%s",
             me->status < 0 ? colo_last_error() : "");
    free(x);
    free(y);
    return NULL;
}

/* @ops: of rank 1 */
static void run_both(struct rank *rank, const colo_process_transport_t *transport, int64_t n,
                     int fail_at, int error)
{
    count = n;
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    memset(rank, 0, 2 * sizeof *rank);
    setenv("COLO_TIMEOUT_MS", "200", 1); /* destroy waits as long for a goodbye */
    for (int32_t r = 0; r < 2; r++) {
        void *connections = NULL;
        int fd[2] = {-1, -1};
        fd[1 - r] = pair[r];
        assert_ok(colo_transport_sockets_new(r, 2, fd, NULL, NULL, &connections));
        assert_ok(colo_process_comm(&over_sockets, r == 1 ? transport : &colo_transport_sockets,
                                    connections, r, 2, &rank[r].comm));
        assert_ok(colo_comm_set_timeout(rank[r].comm, fail_at == ALWAYS ? 500 : DEADLINE_MS));
    }
    unsetenv("COLO_TIMEOUT_MS");
    failure = error;
    atomic_store(&until_failure, fail_at);
    for (int32_t r = 0; r < 2; r++)
        assert_int_equal(pthread_create(&rank[r].thread, NULL, run, &rank[r]), 0);
    for (int32_t r = 0; r < 2; r++)
        assert_int_equal(pthread_join(rank[r].thread, NULL), 0);
    const int left = atomic_exchange(&until_failure, 0);
    assert_true(fail_at == 0 || left <= 0); /* it did fail */
    for (int32_t r = 0; r < 2; r++)
        colo_comm_destroy(&rank[r].comm);
}

static void expect(const struct rank *rank, colo_status_t status, const char *text)
{
    if (rank->status != status || !strstr(rank->error_message, text))
        fail_msg("%s: %s, expected %s: %s", colo_status_name(rank->status), rank->error_message,
                 colo_status_name(status), text);
}

T_CASE(send_that_fails_for_a_moment_is_tried_again)
{
    static const int errors[] = {ENOBUFS, ENOMEM, EAGAIN, EINTR};
    struct rank rank[2];
    for (int i = 0; i < 40; i++) { /* one of a few sends, behind which none follows, or of many */
        run_both(rank, &colo_transport_sockets, i < 20 ? 1 : MANY, i % 20 / 4 + 1, errors[i % 4]);
        for (int32_t r = 0; r < 2; r++) {
            expect(&rank[r], COLO_OK, "");
            assert_false(rank[r].wrong);
        }
    }
}

T_CASE(send_that_always_lacks_memory_ends_at_the_deadline)
{
    struct rank rank[2];
    run_both(rank, &colo_transport_sockets, MANY, ALWAYS, ENOBUFS);
    for (int32_t r = 0; r < 2; r++)
        expect(&rank[r], COLO_ERR_TIMEOUT, "did not arrive within 500 ms");
}

T_CASE(send_that_is_refused_is_the_end_of_the_connection)
{
    struct rank rank[2];
    for (int fail_at = 2; fail_at <= 8; fail_at += 3) {
        run_both(rank, &colo_transport_sockets, MANY, fail_at, EIO);
        for (int32_t r = 0; r < 2; r++)
            expect(&rank[r], COLO_ERR_PEER, "its connection ended");
    }
}

T_CASE(no_memory_for_a_piece_is_an_error_at_once)
{
    struct rank rank[2];
    colo_process_transport_t poor = colo_transport_sockets;
    poor.reserve = reserve_small;
    run_both(rank, &poor, MANY, 0, 0);
    expect(&rank[1], COLO_ERR_NOMEM, "no memory to send");
    expect(&rank[0], COLO_ERR_PEER, "rank 1 failed: no memory to send");
}

T_MAIN("comm/sends")
