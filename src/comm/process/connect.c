/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connect.c - from one all-gather of endpoints (address.h) to a socket between every two ranks.
 *
 * Each rank calls all lower ranks and answers all higher ones, in one poll() loop under one
 * deadline. A rank that is late does not listen yet, so that a call is refused and made again; a
 * call that is under way is never given up, because only the deadline says what is late. Where a
 * rank has several addresses all are called at once, since some may lead elsewhere, and the first
 * that answers is taken:
 *
 *   caller    hello: its rank, and the token of the rank that it calls, which only ranks know
 *   answerer  its rank
 *   caller    taken; the other calls to this rank are hung up
 *
 * Only then does the answerer count the connection. Ranks of one host must be of one user.
 *
 * Where UCX serves, nothing here listens or calls: a second all-gather carries the addresses of
 * UCX's workers, and libcolobridge-ucx.so connects them.
 */
#include "comm/process/group.h"
#include "comm/process/address.h"
#include "comm/process/transport-unix.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/error.h"
#include "core/range.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const double AGAIN_SECONDS = 0.01; /* between a refused call and the next */

enum { GUESTS = 64, LISTENERS = 1 + COLO_ADDRESSES, WHY = 100 };

struct hello {
    uint32_t magic;
    int32_t rank;              /* of the caller */
    uint8_t token[COLO_TOKEN]; /* of the answerer */
};

struct call { /* to one address of a lower rank */
    int fd;   /* -1: to be made */
    int32_t rank, address;
    bool asked;   /* connected, hello sent */
    double again; /* when to call again; 0: now */
    uint32_t answer[2];
    size_t got;
};

struct guest { /* a caller */
    int fd;
    bool answered;
    size_t got;
    struct hello hello;
    uint32_t taken;
};
#define HELLO_BYTES sizeof(struct hello)

struct meeting {
    const colo_bootstrap_t *b;
    double begin;
    int64_t timeout_ms;
    colo_endpoint_t *endpoint; /* [size] */
    colo_doors_t doors;
    struct call *call; /* [ncalls] */
    int32_t ncalls;
    char (*why)[WHY]; /* [size] of the last call to each that failed */
    struct guest guest[GUESTS];
    struct pollfd *poll; /* calls, listeners, guests, ranks */
    int *fd;             /* [size] out */
    int32_t left;        /* peers without a socket */
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
        if (m->guest[i].fd >= 0 && !m->guest[i].answered) {
            colo_socket_close(m->guest[i].fd);
            m->guest[i].fd = -1;
            return true;
        }
    return false;
}

/* ---- to lower ranks ---- */

static void hang_up(struct meeting *m, struct call *c, const char *what, int error)
{
    snprintf(m->why[c->rank], WHY, "%s%s%s", what, error ? ": " : "", error ? strerror(error) : "");
    colo_socket_close(c->fd);
    c->fd = -1;
    c->again = colo_now() + AGAIN_SECONDS;
}

static bool calls_already(const struct meeting *m, int32_t rank)
{
    for (int32_t i = 0; i < m->ncalls; i++)
        if (m->call[i].rank == rank && m->call[i].fd >= 0)
            return true;
    return false;
}

static colo_status_t dial(struct meeting *m, struct call *c)
{
    struct sockaddr_storage a;
    socklen_t size =
        colo_endpoint_address(&m->endpoint[m->b->rank], &m->endpoint[c->rank], c->address, &a);
    if (a.ss_family != AF_UNIX && a.ss_family != AF_INET && a.ss_family != AF_INET6)
        return COLO_OK;
    *c = (struct call){.rank = c->rank, .address = c->address};
    c->fd = colo_socket_open(a.ss_family, SOCK_STREAM);
    if (c->fd < 0 && (errno == EMFILE || errno == ENFILE) && !calls_already(m, c->rank) &&
        !show_a_guest_out(m))
        return colo_endpoint_no_socket(m->b, errno);
    if (c->fd < 0)
        hang_up(m, c, "socket", errno);
    else if (connect(c->fd, (struct sockaddr *)&a, size) != 0 && errno != EINPROGRESS)
        hang_up(m, c, "connect", errno);
    else if (a.ss_family == AF_UNIX && !same_user(c->fd))
        hang_up(m, c, "another user's process answered", 0);
    return COLO_OK;
}

static void send_hello(struct meeting *m, struct call *c)
{
    struct hello hello = {.magic = COLO_ENDPOINT_MAGIC, .rank = m->b->rank};
    int error = 0;
    socklen_t size = sizeof error;
    memcpy(hello.token, m->endpoint[c->rank].token, COLO_TOKEN);
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error || send(c->fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        hang_up(m, c, "connect", error ? error : errno);
    else
        c->asked = true;
}

static void read_answer(struct meeting *m, struct call *c)
{
    const uint32_t taken = COLO_ENDPOINT_MAGIC;
    ssize_t n = recv(c->fd, (char *)c->answer + c->got, sizeof c->answer - c->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        hang_up(m, c, "it hung up", n < 0 ? errno : 0);
        return;
    }
    c->got += (size_t)n;
    if (c->got < sizeof c->answer)
        return;
    if (c->answer[0] != COLO_ENDPOINT_MAGIC || c->answer[1] != (uint32_t)c->rank) {
        hang_up(m, c, "somebody else answered", 0);
        return;
    }
    if (send(c->fd, &taken, sizeof taken, MSG_NOSIGNAL) != (ssize_t)sizeof taken) {
        hang_up(m, c, "it hung up", errno);
        return;
    }
    m->fd[c->rank] = c->fd;
    m->left--;
    c->fd = -1;
    for (int32_t i = 0; i < m->ncalls; i++)
        if (m->call[i].rank == c->rank) {
            colo_socket_close(m->call[i].fd);
            m->call[i].fd = -1;
        }
}

/* ---- from higher ranks ---- */

static colo_status_t welcome(struct meeting *m, int listener, bool is_unix)
{
    int fd = colo_socket_accept(listener), index = 0;
    if (fd < 0)
        return (errno == EMFILE || errno == ENFILE) && !show_a_guest_out(m)
                   ? colo_endpoint_no_socket(m->b, errno)
                   : COLO_OK;
    if (is_unix && !same_user(fd)) {
        colo_socket_close(fd);
        return COLO_OK;
    }
    while (index < GUESTS && m->guest[index].fd >= 0)
        index++;
    if (index == GUESTS) { /* strangers that keep quiet make room; a peer calls again */
        for (index = 0; index < GUESTS - 1 && m->guest[index].answered; index++)
            ;
        colo_socket_close(m->guest[index].fd);
        memmove(m->guest + index, m->guest + index + 1,
                (size_t)(GUESTS - 1 - index) * sizeof m->guest[0]);
        index = GUESTS - 1;
    }
    m->guest[index] = (struct guest){.fd = fd};
    return COLO_OK;
}

static bool knows_token(const struct meeting *m, const struct hello *hello)
{
    return hello->magic == COLO_ENDPOINT_MAGIC && hello->rank > m->b->rank &&
           hello->rank < m->b->size && m->fd[hello->rank] < 0 &&
           memcmp(hello->token, m->endpoint[m->b->rank].token, COLO_TOKEN) == 0;
}

/* False: hang up. */
static bool read_hello(struct meeting *m, struct guest *g)
{
    const size_t end = HELLO_BYTES + (g->answered ? sizeof g->taken : 0);
    const uint32_t answer[2] = {COLO_ENDPOINT_MAGIC, (uint32_t)m->b->rank};
    char *to =
        g->answered ? (char *)&g->taken + (g->got - HELLO_BYTES) : (char *)&g->hello + g->got;
    ssize_t n = recv(g->fd, to, end - g->got, MSG_DONTWAIT); /* and nothing of what follows */
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0)
        return false;
    g->got += (size_t)n;
    if (g->got < end)
        return true;
    if (!g->answered) {
        g->answered = knows_token(m, &g->hello);
        return g->answered &&
               send(g->fd, answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer;
    }
    if (g->taken != COLO_ENDPOINT_MAGIC || m->fd[g->hello.rank] >= 0)
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
    while (r < m->b->size - 1 && (r == m->b->rank || m->fd[r] >= 0))
        r++;
    return colo_fail(COLO_ERR_TIMEOUT,
                     "create_bootstrap: rank %d of %d has no connection with %d ranks after %lld ms; "
                     "the first is rank %d%s%s",
                     (int)m->b->rank, (int)m->b->size, (int)m->left, (long long)m->timeout_ms,
                     (int)r, r < m->b->rank && m->why[r][0] ? ": " : "",
                     r < m->b->rank ? m->why[r] : ", which did not call");
}

/* Rank @r was here and has gone. Near the deadline it is the first of those that gave up: what all
 * of them miss is the better answer. */
static colo_status_t gone(const struct meeting *m, int32_t r)
{
    const double left_ms = (double)m->timeout_ms - waited_ms(m);
    if (left_ms > 1000)
        return colo_fail(COLO_ERR_PEER,
                         "create_bootstrap: rank %d left before all ranks were connected; it has the "
                         "error",
                         (int)r);
    if (left_ms > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(left_ms * 999e3)}, NULL);
    return too_late(m);
}

/* The poll() list: calls, listeners, guests, ranks that are connected. */
static nfds_t list_all(const struct meeting *m)
{
    struct pollfd *p = m->poll;
    for (int32_t i = 0; i < m->ncalls; i++)
        *p++ = (struct pollfd){.fd = m->call[i].fd, .events = m->call[i].asked ? POLLIN : POLLOUT};
    *p++ = (struct pollfd){.fd = m->doors.unix_fd, .events = POLLIN};
    for (int i = 0; i < COLO_ADDRESSES; i++)
        *p++ = (struct pollfd){.fd = m->doors.tcp[i], .events = POLLIN};
    for (int i = 0; i < GUESTS; i++)
        *p++ = (struct pollfd){.fd = m->guest[i].fd, .events = POLLIN};
    for (int32_t r = 0; r < m->b->size; r++)
        *p++ = (struct pollfd){.fd = m->fd[r], .events = POLLRDHUP};
    return (nfds_t)(p - m->poll);
}

static colo_status_t take_turn(struct meeting *m)
{
    for (int32_t i = 0; i < m->ncalls; i++)
        if (m->call[i].fd < 0 && m->fd[m->call[i].rank] < 0 && colo_now() >= m->call[i].again)
            COLO_TRY(dial(m, &m->call[i]));
    poll(m->poll, list_all(m), 10);
    const struct pollfd *p = m->poll;
    for (int32_t i = 0; i < m->ncalls; i++, p++)
        if (p->fd >= 0 && p->revents && m->call[i].fd == p->fd)
            (m->call[i].asked ? read_answer : send_hello)(m, &m->call[i]);
    const struct pollfd *listener = p;
    p += LISTENERS;
    for (int i = 0; i < GUESTS; i++, p++)
        if (p->fd >= 0 && p->revents && !read_hello(m, &m->guest[i])) {
            colo_socket_close(m->guest[i].fd);
            m->guest[i].fd = -1;
        }
    for (int32_t r = 0; r < m->b->size; r++, p++)
        if (p->fd >= 0 && p->revents)
            return gone(m, r);
    for (int i = 0; i < LISTENERS; i++) /* last: guests may change their places */
        if (listener[i].fd >= 0 && listener[i].revents)
            COLO_TRY(welcome(m, listener[i].fd, i == 0));
    return COLO_OK;
}

static colo_status_t meet(struct meeting *m)
{
    const int32_t rank = m->b->rank, size = m->b->size;
    struct call *c = m->call;
    for (int32_t r = 0; r < rank; r++)
        for (int address = 0;
             address < colo_endpoint_addresses(&m->endpoint[rank], &m->endpoint[r]); address++)
            *c++ = (struct call){.fd = -1, .rank = r, .address = address};
    m->ncalls = (int32_t)(c - m->call);
    COLO_TRY(colo_endpoint_listen(m->b, m->endpoint, &m->doors));
    while (m->left > 0) {
        if (waited_ms(m) > (double)m->timeout_ms)
            return too_late(m);
        COLO_TRY(take_turn(m));
    }
    for (int32_t r = 0; r < size; r++)
        if (r != rank) /* refused on Unix sockets, which need it not */
            setsockopt(m->fd[r], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return COLO_OK;
}

static void end_meeting(struct meeting *m)
{
    colo_doors_close(&m->doors);
    for (int i = 0; i < GUESTS; i++)
        colo_socket_close(m->guest[i].fd);
    for (int32_t i = 0; m->call && i < m->ncalls; i++)
        colo_socket_close(m->call[i].fd);
    free(m->call);
    free(m->poll);
    free(m->why);
    if (m->endpoint)
        munmap(m->endpoint, (size_t)m->b->size * sizeof *m->endpoint);
}

static void close_all(const colo_bootstrap_t *b, int *fd)
{
    for (int32_t r = 0; fd && r < b->size; r++) {
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
        return colo_fail(COLO_ERR_NOMEM, "create_bootstrap: no memory for the endpoints of %d ranks",
                         (int)b->size);
    }
    (void)colo_fail(COLO_OK, "%s", ""); /* what went wrong before does not explain the callback */
    colo_status_t st = b->all_gather(b->user, mine, m->endpoint, sizeof *mine);
    m->begin = colo_now();
    if (st > 0)
        return colo_fail(COLO_ERR_ARG,
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
    bool told;    /* the second all-gather has been */
    bool lacking; /* a rank has no UCX */
};

/* The second all-gather, as the transport sees it. */
static colo_status_t gather_workers(void *user, const void *send, void *recv, size_t bytes)
{
    struct workers *w = user;
    memcpy(w->mine->worker, send, bytes);
    w->told = true;
    COLO_TRY(gather(w->m, w->mine));
    for (int32_t r = 0; r < w->m->b->size; r++) {
        w->lacking |= w->m->endpoint[r].ucx < 0;
        memcpy((char *)recv + (size_t)r * bytes, w->m->endpoint[r].worker, bytes);
    }
    return w->lacking ? COLO_ERR_UNBUILT : COLO_OK;
}

/* A rank without UCX says so in the second all-gather, for which the others wait: an error where
 * COLO_TRANSPORT is ucx, else TCP serves, and carrier->ops stays NULL. */
static colo_status_t open_ucx(struct meeting *m, colo_endpoint_t *mine, struct carrier *carrier)
{
    struct workers w = {.m = m, .mine = mine};
    bool insists = false;
    for (int32_t r = 0; r < m->b->size; r++)
        insists |= m->endpoint[r].ucx > 0;
    const colo_bootstrap_t b = {m->b->rank, m->b->size, gather_workers, &w};
    const colo_backend_t *ucx = NULL;
    colo_transport_open_t open = {.transport = NULL};
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
            "(apt install libucx0, or pip install libucx-cu12 or libucx-cu13), or use "
            "colo_comm_create_mpi(): %.300s",
            (int)b.rank, colo_last_error());
    else if ((st = ucx->transport->open(&b, sizeof b, m->timeout_ms, &open)) < 0)
        st = colo_fail(st, "%s", open.why);
    if (st < 0 && !w.told) {
        if (insists || ucx)
            colo_endpoint_set_error(mine, st);
        else
            mine->ucx = -1;
        return gather(m, mine);
    }
    if (w.lacking && !insists)
        return COLO_OK;
    carrier->ops = ucx ? ucx->transport : NULL;
    carrier->table = &colo_comm_ucx_ops;
    carrier->transport = open.transport;
    return st;
}

/* Connects all ranks of @b with each other. */
static colo_status_t connect_all(const colo_bootstrap_t *b, int64_t timeout_ms, int *fd,
                                 struct carrier *carrier)
{
    struct meeting m = {.b = b, .timeout_ms = timeout_ms, .fd = fd, .left = b->size - 1};
    colo_endpoint_t mine;
    for (int i = 0; i < GUESTS; i++)
        m.guest[i].fd = -1;
    const size_t calls = (size_t)b->rank * (COLO_ADDRESSES - 1) + 1; /* at most */
    m.call = calloc(calls, sizeof *m.call);
    m.poll = calloc(calls + LISTENERS + GUESTS + (size_t)b->size, sizeof *m.poll);
    m.why = calloc((size_t)b->size, sizeof *m.why);
    colo_endpoint_make(b, m.call && m.poll && m.why, &mine, &m.doors, fd);
    colo_status_t st = gather(&m, &mine);
    close_all(b, fd); /* connections take their place */
    if (st == COLO_OK && colo_endpoint_wants_ucx(b, m.endpoint)) {
        st = open_ucx(&m, &mine, carrier);
    }
    if (st == COLO_OK && !carrier->ops) {
        st = meet(&m);
        if (st < 0)
            close_all(b, fd);
        else
            st = colo_transport_sockets_new(b->rank, b->size, fd, &carrier->transport);
        carrier->ops = &colo_transport_sockets;
        carrier->table = &colo_comm_sockets_ops;
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
    COLO_TRY(colo_process_comm(carrier.table, carrier.ops, carrier.transport, b->rank, b->size,
                               true, &world));
    COLO_TRY(colo_comm_i_agree_environment(&world, "create_bootstrap", carrier.begin));
    *comm = world;
    return COLO_OK;
}
