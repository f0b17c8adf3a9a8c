/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connect.c - from one all-gather of endpoints (address.h) to a connection of every two ranks.
 *
 * On one host each rank calls all lower ranks and answers all higher ones, over Unix sockets, in
 * one poll() loop under one deadline. A rank that is late does not listen yet, so that a call is
 * refused and made again; a call that is under way is never given up, because only the deadline
 * says what is late. A rank keeps its door until it has met all others, so one whose door has gone
 * without that has ended or failed, and no rank waits for it:
 *
 *   caller    hello: its rank, and the token of the rank that it calls, which only ranks know
 *   answerer  its rank
 *
 * A rank that times out says so before it hangs up.
 * Both must be of one user. Between hosts nothing of ours listens: a second all-gather carries the
 * addresses of UCX's workers, and libcolobridge-ucx.so connects them.
 */
#include "comm/process/group.h"
#include "comm/process/address.h"
#include "comm/process/transport-unix.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/error.h"
#include "core/range.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const double AGAIN_SECONDS = 0.01, /* between a refused call and the next */
    CHECK_SECONDS = 0.05; /* between two checks that the ranks that have not been met are there */

enum { GUESTS = 64, WHY = 100 };

struct hello {
    uint32_t magic;
    int32_t rank;              /* of the caller */
    uint8_t token[COLO_TOKEN]; /* of the answerer */
};

struct call {     /* to a lower rank */
    int fd;       /* -1: to be made */
    double again; /* when to call again; 0: now */
    uint32_t answer[2];
    size_t got;
    char why[WHY]; /* the last one failed */
};

struct guest { /* a caller */
    int fd;
    size_t got;
    struct hello hello;
};

struct meeting {
    const colo_bootstrap_t *b;
    double begin, next_check;
    int64_t timeout_ms;
    colo_endpoint_t *endpoint; /* [size] */
    int door;
    struct call *call; /* [rank] */
    struct guest guest[GUESTS];
    struct pollfd *poll; /* calls, the door, guests, ranks */
    int *fd;             /* [size] out */
    bool *near;          /* [size] ranks to meet; the others are UCX's */
    int32_t left;        /* of them */
};

struct carrier { /* what carries between the ranks */
    const colo_transport_ops_t *ops;
    const colo_comm_ops_t *table;
    void *transport;
    double begin; /* of the deadline: when the last all-gather was through */
};

static double waited_ms(const struct meeting *m)
{
    return (colo_now() - m->begin) * 1e3;
}

/* A Unix socket to another user's process is none of ours. */
static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* A descriptor is wanted and there is none: a stranger's goes, the oldest first. */
static bool show_a_guest_out(struct meeting *m)
{
    for (int i = 0; i < GUESTS; i++)
        if (m->guest[i].fd >= 0) {
            colo_socket_close(m->guest[i].fd);
            m->guest[i].fd = -1;
            return true;
        }
    return false;
}

static bool is_met(const struct meeting *m, int32_t r)
{
    return !m->near[r] || m->fd[r] >= 0;
}

/* ---- to lower ranks ---- */

static void hang_up(struct call *c, const char *what, int error)
{
    snprintf(c->why, WHY, "%s%s%s", what, error ? ": " : "", error ? strerror(error) : "");
    colo_socket_close(c->fd);
    c->fd = -1;
    c->got = 0;
    c->again = colo_now() + AGAIN_SECONDS;
}

static colo_status_t dial(struct meeting *m, int32_t r)
{
    struct call *c = &m->call[r];
    struct sockaddr_un a;
    const socklen_t size = colo_endpoint_address(&m->endpoint[r], &a);
    struct hello hello = {.magic = COLO_ENDPOINT_MAGIC, .rank = m->b->rank};
    memcpy(hello.token, m->endpoint[r].token, COLO_TOKEN);
    c->fd = colo_socket_open();
    if (c->fd < 0 && (errno == EMFILE || errno == ENFILE) && !show_a_guest_out(m))
        return colo_endpoint_no_socket(m->b, errno);
    if (c->fd < 0)
        hang_up(c, "socket", errno);
    else if (connect(c->fd, (struct sockaddr *)&a, size) != 0)
        hang_up(c, "connect", errno);
    else if (!same_user(c->fd))
        hang_up(c, "another user's process answered", 0);
    else if (send(c->fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        hang_up(c, "send", errno);
    return COLO_OK;
}

static void read_answer(struct meeting *m, int32_t r)
{
    struct call *c = &m->call[r];
    ssize_t n = recv(c->fd, (char *)c->answer + c->got, sizeof c->answer - c->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        hang_up(c, "it hung up", n < 0 ? errno : 0);
        return;
    }
    c->got += (size_t)n;
    if (c->got < sizeof c->answer)
        return;
    if (c->answer[0] != COLO_ENDPOINT_MAGIC || c->answer[1] != (uint32_t)r) {
        hang_up(c, "another process answered", 0);
        return;
    }
    m->fd[r] = c->fd;
    m->left--;
    c->fd = -1;
}

/* ---- from higher ranks ---- */

static colo_status_t welcome(struct meeting *m)
{
    int fd = colo_socket_accept(m->door), index = 0;
    if (fd < 0)
        return (errno == EMFILE || errno == ENFILE) && !show_a_guest_out(m)
                   ? colo_endpoint_no_socket(m->b, errno)
                   : COLO_OK;
    if (!same_user(fd)) {
        colo_socket_close(fd);
        return COLO_OK;
    }
    while (index < GUESTS && m->guest[index].fd >= 0)
        index++;
    if (index == GUESTS) { /* strangers that keep quiet go first; a peer calls again */
        colo_socket_close(m->guest[0].fd);
        memmove(m->guest, m->guest + 1, (GUESTS - 1) * sizeof m->guest[0]);
        index = GUESTS - 1;
    }
    m->guest[index] = (struct guest){.fd = fd};
    return COLO_OK;
}

/* One of those to be met, if it knows the token. */
static bool is_awaited(const struct meeting *m, const struct hello *hello)
{
    const colo_endpoint_t *mine = &m->endpoint[m->b->rank];
    return hello->magic == COLO_ENDPOINT_MAGIC && hello->rank > m->b->rank &&
           hello->rank < m->b->size && !is_met(m, hello->rank) &&
           memcmp(hello->token, mine->token, COLO_TOKEN) == 0;
}

/* False: hang up. */
static bool read_hello(struct meeting *m, struct guest *g)
{
    const uint32_t answer[2] = {COLO_ENDPOINT_MAGIC, (uint32_t)m->b->rank};
    ssize_t n = recv(g->fd, (char *)&g->hello + g->got, sizeof g->hello - g->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0)
        return false;
    g->got += (size_t)n;
    if (g->got < sizeof g->hello)
        return true;
    if (!is_awaited(m, &g->hello) ||
        send(g->fd, answer, sizeof answer, MSG_NOSIGNAL) != (ssize_t)sizeof answer)
        return false;
    m->fd[g->hello.rank] = g->fd;
    m->left--;
    g->fd = -1;
    return true;
}

/* ---- all together ---- */

static colo_status_t too_late(const struct meeting *m)
{
    int32_t r = 0;
    while (r < m->b->size - 1 && is_met(m, r))
        r++;
    const char *why = r < m->b->rank ? m->call[r].why : "";
    return colo_fail(
        COLO_ERR_TIMEOUT,
        "create_bootstrap: rank %d of %d has no connection with %d ranks after %lld ms; "
        "the first is rank %d%s%s",
        (int)m->b->rank, (int)m->b->size, (int)m->left, (long long)m->timeout_ms, (int)r,
        why[0] ? ": " : "", r < m->b->rank ? why : ", which did not call");
}

/* Rank @r has not been met. Binding takes the name of its door only if no process has it. */
static bool has_left(struct meeting *m, int32_t r)
{
    struct sockaddr_un a;
    const socklen_t size = colo_endpoint_address(&m->endpoint[r], &a);
    const int fd = colo_socket_open();
    const bool left = fd >= 0 && bind(fd, (struct sockaddr *)&a, size) == 0;
    colo_socket_close(fd);
    if (left && r < m->b->rank && m->call[r].fd >= 0) /* its last answer came before that */
        read_answer(m, r);
    return left && !is_met(m, r);
}

/* The first rank that has not been met and left; -1: all are there. */
static int32_t find_left(struct meeting *m)
{
    for (int32_t r = 0; r < m->b->size; r++)
        if (!is_met(m, r) && has_left(m, r))
            return r;
    return -1;
}

static colo_status_t blame(int32_t r)
{
    return colo_fail(COLO_ERR_PEER,
                     "create_bootstrap: rank %d left before all ranks were connected; it was "
                     "killed, or has the error",
                     (int)r);
}

/* Rank @r was met and has gone. Of one that timed out, what all of them miss is the better answer;
 * of others, the rank for which they left. */
static colo_status_t gone(struct meeting *m, int32_t r)
{
    uint32_t last = 0;
    if (recv(m->fd[r], &last, sizeof last, MSG_PEEK | MSG_DONTWAIT) == (ssize_t)sizeof last &&
        last == COLO_ENDPOINT_MAGIC)
        return too_late(m);
    const int32_t cause = find_left(m);
    return blame(cause >= 0 ? cause : r);
}

static nfds_t list_all(const struct meeting *m)
{
    struct pollfd *p = m->poll;
    for (int32_t r = 0; r < m->b->rank; r++)
        *p++ = (struct pollfd){.fd = m->call[r].fd, .events = POLLIN};
    *p++ = (struct pollfd){.fd = m->door, .events = POLLIN};
    for (int i = 0; i < GUESTS; i++)
        *p++ = (struct pollfd){.fd = m->guest[i].fd, .events = POLLIN};
    for (int32_t r = 0; r < m->b->size; r++)
        *p++ = (struct pollfd){.fd = m->fd[r], .events = POLLRDHUP};
    return (nfds_t)(p - m->poll);
}

static colo_status_t poll_once(struct meeting *m)
{
    for (int32_t r = 0; r < m->b->rank; r++)
        if (m->call[r].fd < 0 && !is_met(m, r) && colo_now() >= m->call[r].again)
            COLO_TRY(dial(m, r));
    if (colo_now() >= m->next_check) {
        const int32_t left = find_left(m);
        if (left >= 0)
            return blame(left);
        m->next_check = colo_now() + CHECK_SECONDS;
    }
    poll(m->poll, list_all(m), 10);
    const struct pollfd *p = m->poll;
    for (int32_t r = 0; r < m->b->rank; r++, p++)
        if (p->fd >= 0 && p->revents)
            read_answer(m, r);
    const struct pollfd *door = p++;
    for (int i = 0; i < GUESTS; i++, p++)
        if (p->fd >= 0 && p->revents && !read_hello(m, &m->guest[i])) {
            colo_socket_close(m->guest[i].fd);
            m->guest[i].fd = -1;
        }
    for (int32_t r = 0; r < m->b->size; r++, p++)
        if (p->fd >= 0 && p->revents && m->left > 0)
            return gone(m, r);
    /* last: guests may change their places */
    return door->fd >= 0 && door->revents ? welcome(m) : COLO_OK;
}

static colo_status_t connect_sockets(struct meeting *m)
{
    bool called = false;
    for (int32_t r = m->b->rank + 1; r < m->b->size; r++)
        called |= m->near[r];
    if (called && listen(m->door, m->b->size) != 0)
        return colo_endpoint_no_socket(m->b, errno);
    m->next_check = m->begin + CHECK_SECONDS;
    while (m->left > 0) {
        if (waited_ms(m) > (double)m->timeout_ms)
            return too_late(m);
        COLO_TRY(poll_once(m));
    }
    return COLO_OK;
}

static void end_meeting(struct meeting *m)
{
    colo_socket_close(m->door);
    for (int i = 0; i < GUESTS; i++)
        colo_socket_close(m->guest[i].fd);
    for (int32_t r = 0; m->call && r < m->b->rank; r++)
        colo_socket_close(m->call[r].fd);
    free(m->call);
    free(m->poll);
    free(m->near);
    if (m->endpoint)
        munmap(m->endpoint, (size_t)m->b->size * sizeof *m->endpoint);
}

/* @timed_out: told to the ranks that were met. */
static void close_all(const colo_bootstrap_t *b, int *fd, bool timed_out)
{
    const uint32_t last = COLO_ENDPOINT_MAGIC;
    for (int32_t r = 0; fd && r < b->size; r++) {
        if (timed_out && fd[r] >= 0)
            (void)!send(fd[r], &last, sizeof last, MSG_NOSIGNAL | MSG_DONTWAIT);
        colo_socket_close(fd[r]);
        fd[r] = -1;
    }
}

/* The endpoints come in pages of their own: a rank without memory must still be able to say so. */
static colo_status_t gather(struct meeting *m, const colo_endpoint_t *mine)
{
    const colo_bootstrap_t *b = m->b;
    if (!m->endpoint)
        m->endpoint = mmap(NULL, (size_t)b->size * sizeof *mine, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->endpoint == MAP_FAILED) {
        m->endpoint = NULL;
        return colo_fail(COLO_ERR_NOMEM,
                         "create_bootstrap: no memory for the endpoints of %d ranks", (int)b->size);
    }
    (void)colo_fail(COLO_OK, "%s", ""); /* what went wrong before does not explain the callback */
    colo_status_t st = b->all_gather(b->user, mine, m->endpoint, sizeof *mine);
    m->begin = colo_now();
    if (st > 0)
        return colo_fail(
            COLO_ERR_ARG,
            "create_bootstrap: the all-gather callback of rank %d returned %d, expected "
            "COLO_OK or an error below 0",
            (int)b->rank, (int)st);
    if (st < 0 && !colo_last_error()[0])
        return colo_fail(st, "create_bootstrap: the all-gather callback of rank %d returned %s",
                         (int)b->rank, colo_status_name(st));
    return st < 0 ? st : colo_endpoint_check_all(b, m->endpoint);
}

/* ---- UCX ---- */

struct workers {
    struct meeting *m;
    colo_endpoint_t *mine;
    bool told; /* the second all-gather has been */
};

/* The second all-gather, as the transport sees it. */
static colo_status_t gather_workers(void *user, const void *send, void *recv, size_t bytes)
{
    struct workers *w = user;
    colo_worker_t *worker = recv;
    (void)bytes;
    w->mine->worker = *(const colo_worker_t *)send;
    w->told = true;
    COLO_TRY(gather(w->m, w->mine));
    for (int32_t r = 0; r < w->m->b->size; r++) {
        worker[r] = w->m->endpoint[r].worker;
        worker[r].near = w->m->near[r];
    }
    return COLO_OK;
}

/* A rank without UCX says so in the second all-gather, for which the others wait. */
static colo_status_t open_ucx(struct meeting *m, colo_endpoint_t *mine, struct carrier *carrier)
{
    struct workers w = {.m = m, .mine = mine};
    const colo_bootstrap_t b = {m->b->rank, m->b->size, gather_workers, &w};
    const colo_backend_t *ucx = NULL;
    void *transport = NULL;
    colo_status_t st = colo_backend_load("ucx", &ucx);
    if (st == COLO_OK && (!ucx->transport || ucx->transport->abi != COLO_TRANSPORT_ABI))
        st =
            colo_fail(COLO_ERR_UNBUILT,
                      "create_bootstrap: libcolobridge-ucx.so has another transport interface than "
                      "this library; install both from the same build");
    else if (st < 0)
        st = colo_fail(
            st,
            "create_bootstrap: rank %d has no UCX, which carries between hosts; install it "
            "(apt install libucx0, or pip install libucx-cu12 or libucx-cu13): %.300s",
            (int)b.rank, colo_last_error());
    else
        st = ucx->transport->open(&b, &transport);
    if (st < 0 && !w.told) {
        colo_endpoint_set_error(mine, st);
        return gather(m, mine);
    }
    *carrier = (struct carrier){ucx->transport, &colo_comm_ucx_ops, transport, 0};
    return st;
}

/* Which ranks Unix sockets reach. That all reach all is known to all alike. */
static void find_near(struct meeting *m)
{
    bool insists = false;
    for (int32_t r = 0; r < m->b->size; r++)
        insists |= m->endpoint[r].insists != 0;
    for (int32_t r = 0; r < m->b->size; r++) {
        m->near[r] = r != m->b->rank &&
                     colo_endpoint_near(&m->endpoint[m->b->rank], &m->endpoint[r], insists);
        m->left += m->near[r];
    }
}

/* Connects all ranks of @b with each other. */
static colo_status_t connect_all(const colo_bootstrap_t *b, int64_t timeout_ms, int *fd,
                                 struct carrier *carrier)
{
    struct meeting m = {.b = b, .timeout_ms = timeout_ms, .fd = fd};
    struct carrier far = {.ops = NULL};
    colo_endpoint_t mine;
    for (int i = 0; i < GUESTS; i++)
        m.guest[i].fd = -1;
    m.call = calloc((size_t)b->rank + 1, sizeof *m.call);
    m.poll = calloc((size_t)b->rank + 1 + GUESTS + (size_t)b->size, sizeof *m.poll);
    m.near = calloc((size_t)b->size, sizeof *m.near);
    for (int32_t r = 0; m.call && r < b->rank; r++)
        m.call[r].fd = -1;
    colo_endpoint_make(b, m.call && m.poll && m.near, &mine, &m.door, fd);
    colo_status_t st = gather(&m, &mine);
    close_all(b, fd, false); /* connections take their place */
    if (st == COLO_OK)
        find_near(&m);
    const bool all = m.left == b->size - 1;
    if (st == COLO_OK && !all)
        st = open_ucx(&m, &mine, &far);
    *carrier = far;
    if (st == COLO_OK && (all || m.left > 0)) {
        carrier->ops = &colo_transport_sockets;
        carrier->table = all ? &colo_comm_sockets_ops : &colo_comm_ucx_ops;
        st = connect_sockets(&m);
        if (st < 0)
            close_all(b, fd, st == COLO_ERR_TIMEOUT);
        if (st < 0 && far.ops)
            far.ops->close(far.transport, false);
        if (st == COLO_OK)
            st = colo_transport_sockets_new(b->rank, b->size, fd, far.ops, far.transport,
                                            &carrier->transport);
    }
    carrier->begin = m.begin;
    end_meeting(&m);
    return st;
}

colo_status_t colo_comm_create_bootstrap(const colo_bootstrap_t *b, colo_comm_t **comm)
{
    COLO_RANGE();
    if (!b || !comm || !b->all_gather)
        return colo_fail(COLO_ERR_ARG, "create_bootstrap: %s is NULL",
                         !b      ? "bootstrap"
                         : !comm ? "comm"
                                 : "the all-gather callback");
    if (b->size < 1 || b->size > 4096 || b->rank < 0 || b->rank >= b->size)
        return colo_fail(COLO_ERR_ARG,
                         "create_bootstrap: rank %d of %d, expected a size of 1..4096 and a rank "
                         "below it",
                         (int)b->rank, (int)b->size);
    COLO_AUTOFREE int *fd = malloc((size_t)b->size * sizeof *fd);
    struct carrier carrier = {.ops = NULL};
    colo_comm_t *world = NULL;
    int64_t timeout_ms;
    (void)colo_env_i64("COLO_TIMEOUT_MS", &timeout_ms); /* refused below, on all ranks */
    COLO_TRY(connect_all(b, timeout_ms, fd, &carrier));
    COLO_TRY(
        colo_process_comm(carrier.table, carrier.ops, carrier.transport, b->rank, b->size, &world));
    return colo_process_agree(world, "create_bootstrap", carrier.begin, comm);
}
