/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ucx.c - the transport over UCX by itself, between two forked processes: order, a frame that
 * no rank sends, a process that ends, and waits; and which pairs of two nodes it carries. What
 * communicators make of it is in tests/comm/, which runs over UCX as well.
 */
#include "forked.h"

#include "comm/process/transport.h"
#include "core/backend.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    FRAMES = 120,
    OVERLONG = 8 /* within what the allocation of a large frame is rounded up by */
};

extern const colo_backend_t colo_backend; /* transport-ucx.c is linked into this program */

#define UCX (colo_backend.transport)

static void *open_ucx(t_forked_t *me)
{
    colo_worker_t mine = {0}, all[T_FORKED_MAX];
    void *connections = NULL;
    colo_status_t st = UCX->open(me->rank, me->page->size, &mine, &connections);
    COLO_THEN(st, t_over_page(me, &mine, all, sizeof mine));
    COLO_THEN(st, UCX->connect(connections, all, sizeof mine));
    if (st < 0) {
        fprintf(stderr, "rank %d: %s\n", (int)me->rank, colo_last_error());
        _exit(1);
    }
    unsigned char here = 1, there[T_FORKED_MAX]; /* no rank leaves before both are connected */
    (void)t_over_page(me, &here, there, sizeof here);
    return connections;
}

/* ---- what UCX takes ---- */

static void open_with_few_descriptors(t_forked_t *me)
{
    const struct rlimit few = {20, 20};
    colo_worker_t mine = {0};
    void *connections = NULL;
    setrlimit(RLIMIT_NOFILE, &few);
    t_note(me, UCX->open(0, 2, &mine, &connections));
}

T_CASE(rank_without_descriptors_for_ucx_is_told_its_limit)
{
    t_page_t *page = t_fork_ranks(1, open_with_few_descriptors);
    t_expect(page, 0, COLO_ERR_IO, "descriptors left, and UCX takes up to 33: ");
    t_expect(page, 0, COLO_ERR_IO, "its limit is 20, raise it (ulimit -n)");
}

/* In a mount namespace of its own, which only root can make. */
static void open_with_little_shared_memory(t_forked_t *me)
{
    colo_worker_t mine = {0};
    void *connections = NULL;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64k")) {
        t_note(me, colo_fail(COLO_ERR_MISSING, "no namespace"));
        return;
    }
    setenv("UCX_TLS", "posix,tcp,self", 1);
    t_note(me, UCX->open(0, 2, &mine, &connections));
}

T_CASE(rank_without_shared_memory_for_ucx_is_told_how_much_is_left)
{
    t_page_t *page = t_fork_ranks(1, open_with_little_shared_memory);
    if (page->status[0] == COLO_ERR_MISSING)
        skip();
    t_expect(page, 0, COLO_ERR_NOMEM, "; /dev/shm has ");
    t_expect(page, 0, COLO_ERR_NOMEM, " KiB left, and UCX takes 16 MiB or more: make it larger");
}

static size_t bytes_of(int i)
{
    const size_t sizes[] = {COLO_FRAME_MAX, 64, COLO_FRAME_EAGER, 8, COLO_FRAME_CHUNK / 2};
    return sizes[i % 5];
}

static void send_frame(void *ucx, size_t bytes, unsigned char value)
{
    unsigned char *frame = UCX->reserve(ucx, 1, bytes);
    if (!frame)
        _exit(1);
    memset(frame, value, bytes);
    UCX->commit(ucx);
}

/* What recv() returns once it is not 0; 0: nothing came in time. */
static int receive(void *ucx, int64_t ms, const void **frame, size_t *bytes)
{
    const double end = colo_now() + (double)ms / 1e3;
    int32_t peer = -1;
    int got = 0;
    while (got == 0 && colo_now() < end) {
        got = UCX->recv(ucx, &peer, frame, bytes);
        if (got == 0)
            UCX->wait(ucx, 1e-3);
    }
    return got;
}

/* Until all that rank 0 sent has left it. */
static bool flush(void *ucx, int64_t ms)
{
    const double end = colo_now() + (double)ms / 1e3;
    const void *frame;
    int32_t peer;
    size_t bytes;
    while (!UCX->flushed(ucx, 1) && colo_now() < end)
        (void)UCX->recv(ucx, &peer, &frame, &bytes);
    return UCX->flushed(ucx, 1);
}

T_CASE_ON_FORKED(2, frames_of_all_sizes_arrive_in_the_order_in_which_they_were_sent)
{
    void *ucx = open_ucx(me);
    const unsigned char *frame = NULL;
    size_t bytes = 0;
    colo_status_t st = COLO_OK;
    for (int i = 0; i < FRAMES && st == COLO_OK; i++)
        if (me->rank == 0) {
            send_frame(ucx, bytes_of(i), (unsigned char)i);
        } else {
            const int got = receive(ucx, t_long_wait(), (const void **)&frame, &bytes);
            if (got != 1 || bytes != bytes_of(i) || frame[0] != i || frame[bytes - 1] != i)
                st = colo_fail(COLO_ERR_STATE, "frame %d: recv() %d, %zu bytes, value %d", i, got,
                               bytes, got == 1 ? frame[0] : -1);
        }
    if (me->rank == 0 && !flush(ucx, t_long_wait()))
        st = colo_fail(COLO_ERR_TIMEOUT, "not flushed");
    t_note(me, st);
    UCX->close(ucx, false);
}

/* What each rank says; waits for it without a call of the transport. */
static int32_t say(t_forked_t *me, int32_t number)
{
    int32_t all[T_FORKED_MAX];
    return t_over_page(me, &number, all, sizeof number) == COLO_OK ? all[0] : -1;
}

/* Rank 1 makes no call any more once it has both frames; the first one makes the connection. */
T_CASE_ON_FORKED(2, frame_is_flushed_without_a_further_call_of_its_receiver)
{
    void *ucx = open_ucx(me);
    const void *frame = NULL;
    size_t bytes = 0;
    bool works = true;
    for (int i = 0; i < 2 && works; i++)
        if (me->rank == 0) {
            send_frame(ucx, 64, 1);
            works = i == 1 || flush(ucx, t_long_wait());
        } else {
            works = receive(ucx, t_long_wait(), &frame, &bytes) == 1;
        }
    works = say(me, 0) == 0 && works && (me->rank == 1 || flush(ucx, t_long_wait() / 4));
    works = say(me, 0) == 0 && works;
    t_note(me, works ? COLO_OK : colo_fail(COLO_ERR_TIMEOUT, "not flushed"));
    UCX->close(ucx, false);
}

/* Rank 0 sends until the system takes no more. Then rank 1 reads, and rank 0 makes no call. */
T_CASE_ON_FORKED(2, flushed_frame_arrives_without_a_further_call_of_its_sender)
{
    enum { MANY = 20000 };
    void *ucx = open_ucx(me);
    const void *frame = NULL;
    size_t bytes = 0;
    int32_t flushed = 0;
    colo_status_t st = COLO_OK;
    if (me->rank == 0)
        do
            send_frame(ucx, COLO_FRAME_EAGER, 1);
        while (flush(ucx, flushed ? 20 : t_long_wait()) && ++flushed < MANY);
    else if (receive(ucx, t_long_wait(), &frame, &bytes) != 1)
        st = colo_fail(COLO_ERR_TIMEOUT, "no frame");
    flushed = say(me, flushed);
    if (flushed < 1 || flushed == MANY)
        st = colo_fail(COLO_ERR_STATE, "%d frames were flushed to a rank that does not read",
                       (int)flushed);
    for (int32_t i = 1; me->rank == 1 && i < flushed && st == COLO_OK; i++)
        if (receive(ucx, t_long_wait() / 4, &frame, &bytes) != 1)
            st = colo_fail(COLO_ERR_TIMEOUT, "frame %d of %d did not come", (int)i, (int)flushed);
    (void)say(me, 0);
    t_note(me, st);
    UCX->close(ucx, false);
}

static void too_long(t_forked_t *me)
{
    void *ucx = open_ucx(me);
    const void *frame = NULL;
    size_t bytes = 0;
    colo_status_t st = COLO_OK;
    if (me->rank == 0) {
        send_frame(ucx, COLO_FRAME_MAX + OVERLONG, 1);
        (void)flush(ucx, t_long_wait() / 4);
    } else {
        const int got = receive(ucx, t_long_wait(), &frame, &bytes);
        st = colo_fail(got == -2 ? COLO_ERR_MISMATCH : COLO_OK, "recv() %d, %zu bytes: %s", got,
                       bytes, UCX->why(ucx));
    }
    (void)say(me, 0);
    t_note(me, st);
    UCX->close(ucx, false);
}

T_CASE(frame_that_is_cut_is_none_and_the_transport_unusable)
{
    t_page_t *page = t_fork_ranks(2, too_long);
    t_expect(page, 1, COLO_ERR_MISMATCH, "a frame that no rank sends: ");
}

static void one_ends(t_forked_t *me)
{
    void *ucx = open_ucx(me);
    const void *frame = NULL;
    size_t bytes = 0;
    if (me->rank == 0) {
        send_frame(ucx, 64, 1);
        (void)flush(ucx, t_long_wait());
        _exit(0);
    }
    const int first = receive(ucx, t_long_wait(), &frame, &bytes),
              then = receive(ucx, t_long_wait(), &frame, &bytes);
    int32_t peer = -1;
    const int last = UCX->recv(ucx, &peer, &frame, &bytes);
    t_note(me, colo_fail(first == 1 && then == -1 && last == 0 ? COLO_ERR_PEER : COLO_OK,
                         "recv() %d, %d, %d: %s", first, then, last, UCX->why(ucx)));
    UCX->close(ucx, false);
}

T_CASE(process_that_ends_is_told_once_after_its_last_frame)
{
    t_page_t *page = t_fork_ranks(2, one_ends);
    t_expect(page, 1, COLO_ERR_PEER, "its connection ended: ");
}

/* What wait() asks the system for, and what the system answers. */
static _Thread_local int polls, timeouts;
static _Thread_local struct timespec longest;

int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
    struct timespec left = timeout ? *timeout : (struct timespec){.tv_sec = INT32_MAX};
    if (left.tv_sec > longest.tv_sec ||
        (left.tv_sec == longest.tv_sec && left.tv_nsec > longest.tv_nsec))
        longest = left;
    const int got =
        (int)syscall(SYS_ppoll, fds, n, timeout ? &left : NULL, mask, _NSIG / 8); /* bytes */
    polls++;
    timeouts += got == 0;
    return got;
}

T_CASE_ON_FORKED(2, wait_asks_for_no_more_than_its_time)
{
    void *ucx = open_ucx(me);
    const double end = colo_now() + (double)t_long_wait() / 1e3;
    const void *frame;
    int32_t peer;
    size_t bytes;
    polls = timeouts = 0;
    longest = (struct timespec){0};
    while (timeouts == 0 && colo_now() < end) { /* UCX may have something to do at first */
        (void)UCX->recv(ucx, &peer, &frame, &bytes);
        UCX->wait(ucx, 1e-3);
    }
    const bool asks = longest.tv_sec == 0 && longest.tv_nsec > 0 && longest.tv_nsec <= 1000000;
    t_note(me, colo_fail(asks && timeouts > 0 ? COLO_OK : COLO_ERR_TIMEOUT,
                         "%d polls, %d of which nothing came of, of at most %lld s and %ld ns",
                         polls, timeouts, (long long)longest.tv_sec, longest.tv_nsec));
    UCX->close(ucx, false);
}

/* ---- two nodes ---- */

static bool has_socket_to(pid_t pid)
{
    struct ucred peer;
    int domain = 0;
    for (int fd = 0; fd < 256; fd++) {
        socklen_t bytes = sizeof domain, size = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX &&
            getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == pid)
            return true;
    }
    return false;
}

/* Ranks 0 and 3 are one node, 1 and 2 the other. */
T_CASE_ON_FORKED(4, pairs_of_one_node_have_a_socket_and_the_others_ucx)
{
    enum { MANY = 300000 }; /* bytes of each rank: more than two data frames */
    static unsigned char mine[MANY], all[4 * MANY];
    const bool second = me->rank % 3;
    const int64_t pid = getpid();
    int64_t pids[4];
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, me->rank, 4, t_over_page, me};
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    setenv("COLO_TRANSPORT", "ucx", 1);
    setenv("COLO_NODE", second ? "1" : "0", 1);
    memset(mine, 'a' + me->rank, MANY);
    colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    if (st == COLO_OK)
        st = colo_comm_all_gather(world, &pid, pids, 1, COLO_I64, NULL);
    for (int32_t r = 0; r < 4 && st == COLO_OK; r++)
        if (has_socket_to((pid_t)pids[r]) != (r != me->rank && (r % 3 != 0) == second))
            st = colo_fail(COLO_ERR_STATE, "the socket to rank %d", (int)r);
    if (st == COLO_OK && strcmp(colo_comm_backend(world), "ucx") != 0)
        st = colo_fail(COLO_ERR_STATE, "the backend is %s", colo_comm_backend(world));
    if (st == COLO_OK)
        st = colo_comm_all_gather(world, mine, all, MANY, COLO_U8, NULL);
    for (int i = 0; i < 4 * MANY && st == COLO_OK; i++)
        if (all[i] != 'a' + i / MANY)
            st = colo_fail(COLO_ERR_STATE, "byte %d is %d", i, all[i]);
    t_note(me, st);
}

T_MAIN("ucx/ucx")
