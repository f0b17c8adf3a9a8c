/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connect.c - from all-gathers, of a hello and of endpoints (address.h), to a connection of every
 * two ranks.
 *
 * On one host each rank calls all lower ranks and answers all higher ones, over Unix sockets, in
 * one poll() loop under one deadline. A rank that is late does not listen yet, so that a call is
 * refused and made again; a call that is under way is never given up, because only the deadline
 * says what is late. A rank keeps its door until it has met all others, so one whose door has gone
 * without that has ended or failed, and no rank waits for it:
 *
 *   caller    calls from an address that names its rank, and proves that it knows the token of the
 *             rank that it calls, which only ranks do
 *   answerer  proves that it knows the caller's
 *
 * A rank that times out says so before it hangs up, in a frame: some of those that it has met may
 * be connected with all by then, and others may see frames of such a rank. Both must be of one
 * user. Ranks that no socket reaches are a module's (transports, below): a third all-gather carries
 * the addresses of its workers, and the module connects them.
 *
 * A callback must not throw, but if one of C++ does, what is open here is closed: this file is
 * compiled with -fexceptions. The two functions that this needs are in every process in which
 * something is thrown; a program of C does without them.
 */
#include "comm/process/group.h"
#include "comm/process/address.h"
#include "comm/process/transport-unix.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

__asm__(".weak _Unwind_Resume\n.weak __gcc_personality_v0");

static const double AGAIN_SECONDS = 0.01, /* between a refused call and the next */
    CHECK_SECONDS = 0.05; /* between two checks that the ranks that have not been met are there */

enum { WHY = 100 };

struct peer {
    bool near; /* to be met; else it is this rank, or another transport's */
    bool met;
    /* of a call to a lower rank */
    double again; /* when to call again; 0: now */
    uint64_t answer;
    size_t got;
    char why[WHY]; /* the last one failed */
};

struct meeting {
    const colo_bootstrap_t *boot;
    double begin, next_check;  /* begin: when the last all-gather was through; of the deadline */
    colo_comm_config_t config; /* what is in force */
    colo_endpoint_t mine, *endpoint; /* [size] */
    int door;                        /* or -1 */
    struct peer *peer;               /* [size] */
    struct pollfd *poll;             /* [size] the door in the place of this rank's own */
    int *fd;                         /* [size] of a lower rank that was not met, the call; or -1 */
    int32_t left;                    /* to be met */
    const struct transport *row;     /* of a far rank, if there is one; else the sockets' */
    /* What carries between the ranks. */
    const colo_process_transport_t *transport;
    void *connections; /* NULL: none, or handed on */
};

/* ---- the transports ---- */

static bool anywhere(const colo_endpoint_t *a, const colo_endpoint_t *b, bool insists)
{
    return true;
}

/*
 * In order of preference. The sockets, first, carry between the ranks that they reach. All other
 * pairs have one transport: the one that the COLO_TRANSPORT of a rank names, else the first that
 * reaches all ranks, as the last row does. It is a module, libcolobridge-<name>.so
 * (core/backend.h). A new transport is a module and a row here, and its word in core/env.c lets
 * COLO_TRANSPORT name it.
 */
static const struct transport {
    const colo_comm_backend_t comm; /* of its communicators; with the name */
    /* Does it connect these two ranks? If it does a and b, a and c, then also b and c. @insists:
     * the COLO_TRANSPORT of a rank names another one. */
    bool (*reaches)(const colo_endpoint_t *a, const colo_endpoint_t *b, bool insists);
    const char *missing; /* of a module: what a rank without it lacks, and what to do */
} transports[] = {
    {COLO_PROCESS_COMM("sockets"), colo_endpoint_near, NULL},
    {COLO_PROCESS_COMM("ucx"), anywhere,
     "UCX, which carries between hosts; install it (apt install libucx0, or pip install "
     "libucx-cu12 or libucx-cu13)"},
};
enum { SOCKETS = 0, TRANSPORTS = sizeof transports / sizeof transports[0] };

/* The row that COLO_TRANSPORT names, or else @config; SOCKETS: none. A word that is refused is
 * refused once all are connected. */
static int32_t wanted_row(const colo_comm_config_t *config)
{
    bool from_env;
    const char *word = colo_env_value("COLO_TRANSPORT", &from_env);
    if (config->transport == COLO_TRANSPORT_UCX && !from_env)
        word = "ucx";
    for (int32_t i = SOCKETS + 1; i < TRANSPORTS; i++)
        if (strcmp(transports[i].comm.name, word) == 0)
            return i;
    return SOCKETS;
}

/* A row that a rank insists on; SOCKETS: none does. */
static int32_t insisted_row(const struct meeting *meeting)
{
    for (int32_t i = SOCKETS + 1; i < TRANSPORTS; i++)
        for (int32_t r = 0; r < meeting->boot->size; r++)
            if (meeting->endpoint[r].insists == i)
                return i;
    return SOCKETS;
}

static bool reaches_all(const struct transport *row, const struct meeting *meeting)
{
    int32_t r = 0;
    while (r < meeting->boot->size && row->reaches(meeting->endpoint, &meeting->endpoint[r], false))
        r++;
    return r == meeting->boot->size;
}

/* What carries to which rank. That the sockets reach all is known to all alike. */
static void choose_transports(struct meeting *meeting)
{
    const colo_endpoint_t *all = meeting->endpoint, *mine = &all[meeting->boot->rank];
    const int32_t size = meeting->boot->size, insisted = insisted_row(meeting);
    int32_t row = insisted ? insisted : SOCKETS + 1;
    for (int32_t r = 0; r < size; r++) {
        meeting->peer[r].near = r != meeting->boot->rank &&
                                transports[SOCKETS].reaches(mine, &all[r], insisted != SOCKETS);
        meeting->left += meeting->peer[r].near;
    }
    while (!insisted && !reaches_all(&transports[row], meeting))
        row++;
    meeting->row = &transports[meeting->left == size - 1 ? SOCKETS : row];
}

static double waited_ms(const struct meeting *meeting)
{
    return (colo_now() - meeting->begin) * 1e3;
}

/* A Unix socket to another user's process is none of ours. */
static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

static bool is_met(const struct meeting *meeting, int32_t r)
{
    return !meeting->peer[r].near || meeting->peer[r].met;
}

static void set_met(struct meeting *meeting, int32_t r, int fd)
{
    meeting->fd[r] = fd;
    meeting->peer[r].met = true;
    meeting->left--;
}

/* ---- to lower ranks ---- */

static void hang_up(struct meeting *meeting, int32_t r, const char *what, int error)
{
    struct peer *call = &meeting->peer[r];
    snprintf(call->why, WHY, "%s%s%s", what, error ? ": " : "", error ? strerror(error) : "");
    colo_socket_close(meeting->fd[r]);
    meeting->fd[r] = -1;
    call->got = 0;
    call->again = colo_now() + AGAIN_SECONDS;
}

static colo_status_t dial(struct meeting *meeting, int32_t r)
{
    struct sockaddr_un address, from;
    uint64_t nonce = 0; /* without one the name is that of the last call */
    (void)!getrandom(&nonce, sizeof nonce, 0);
    const socklen_t size = colo_endpoint_address(&meeting->endpoint[r], &address),
                    own = colo_endpoint_caller(&meeting->endpoint[r], meeting->boot->rank, nonce,
                                               &from);
    const int fd = meeting->fd[r] = colo_socket_open();
    if (fd < 0 && (errno == EMFILE || errno == ENFILE))
        return colo_endpoint_no_socket(meeting->boot, errno);
    if (fd < 0)
        hang_up(meeting, r, "socket", errno);
    else if (bind(fd, (struct sockaddr *)&from, own) != 0)
        hang_up(meeting, r, "bind", errno);
    else if (connect(fd, (struct sockaddr *)&address, size) != 0)
        hang_up(meeting, r, "connect", errno);
    else if (!same_user(fd))
        hang_up(meeting, r, "another user's process answered", 0);
    return COLO_OK;
}

static void read_answer(struct meeting *meeting, int32_t r)
{
    struct peer *call = &meeting->peer[r];
    ssize_t n = recv(meeting->fd[r], (char *)&call->answer + call->got,
                     sizeof call->answer - call->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        hang_up(meeting, r, "it hung up", n < 0 ? errno : 0);
        return;
    }
    call->got += (size_t)n;
    if (call->got < sizeof call->answer)
        return;
    if (call->answer != colo_endpoint_answer(&meeting->mine, r))
        hang_up(meeting, r, "another process answered", 0);
    else
        set_met(meeting, r, meeting->fd[r]);
}

/* ---- from higher ranks ---- */

/* The rank that calls on @fd; -1: none of those to be met. */
static int32_t caller_of(const struct meeting *meeting, int fd)
{
    const colo_bootstrap_t *boot = meeting->boot;
    struct sockaddr_un from, expected;
    socklen_t size = sizeof from;
    uint64_t nonce;
    if (!same_user(fd) || getpeername(fd, (struct sockaddr *)&from, &size) != 0)
        return -1;
    const int32_t r = colo_endpoint_rank(&from, size, &nonce);
    return r > boot->rank && r < boot->size && !is_met(meeting, r) &&
                   colo_endpoint_caller(&meeting->endpoint[boot->rank], r, nonce, &expected) ==
                       size &&
                   memcmp(&from, &expected, size) == 0
               ? r
               : -1;
}

static colo_status_t welcome(struct meeting *meeting)
{
    const int fd = colo_socket_accept(meeting->door);
    if (fd < 0)
        return errno == EMFILE || errno == ENFILE ? colo_endpoint_no_socket(meeting->boot, errno)
                                                  : COLO_OK;
    const int32_t r = caller_of(meeting, fd);
    const uint64_t answer =
        r < 0 ? 0 : colo_endpoint_answer(&meeting->endpoint[r], meeting->boot->rank);
    if (r < 0 || send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != (ssize_t)sizeof answer) {
        colo_socket_close(fd); /* a stranger, or it has hung up; a peer calls again */
        return COLO_OK;
    }
    set_met(meeting, r, fd);
    return COLO_OK;
}

/* ---- all together ---- */

static colo_status_t too_late(const struct meeting *meeting)
{
    int32_t r = 0;
    while (r < meeting->boot->size - 1 && is_met(meeting, r))
        r++;
    const char *why = meeting->peer[r].why;
    return colo_fail(
        COLO_ERR_TIMEOUT,
        "create_bootstrap: rank %d of %d has no connection with %d ranks after %lld ms; "
        "the first is rank %d%s%s",
        (int)meeting->boot->rank, (int)meeting->boot->size, (int)meeting->left,
        (long long)meeting->config.timeout_ms, (int)r, why[0] ? ": " : "",
        r < meeting->boot->rank ? why : ", which did not call");
}

/* Rank @r has not been met. Binding takes the name of its door only if no process has it. */
static bool has_left(struct meeting *meeting, int32_t r)
{
    struct sockaddr_un address;
    const socklen_t size = colo_endpoint_address(&meeting->endpoint[r], &address);
    const int fd = colo_socket_open();
    const bool left = fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0;
    colo_socket_close(fd);
    if (left && meeting->fd[r] >= 0) /* its last answer came before that */
        read_answer(meeting, r);
    return left && !is_met(meeting, r);
}

/* The first rank that has not been met and left; -1: all are there. */
static int32_t find_left(struct meeting *meeting)
{
    for (int32_t r = 0; r < meeting->boot->size; r++)
        if (!is_met(meeting, r) && has_left(meeting, r))
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
static colo_status_t gone(struct meeting *meeting, int32_t r)
{
    if (colo_socket_failure(meeting->fd[r]) == COLO_ERR_TIMEOUT)
        return too_late(meeting);
    const int32_t cause = find_left(meeting);
    return blame(cause >= 0 ? cause : r);
}

static colo_status_t poll_once(struct meeting *meeting)
{
    const int32_t rank = meeting->boot->rank, size = meeting->boot->size;
    struct pollfd *polled = meeting->poll;
    for (int32_t r = 0; r < rank; r++)
        if (meeting->fd[r] < 0 && !is_met(meeting, r) && colo_now() >= meeting->peer[r].again)
            COLO_TRY(dial(meeting, r));
    if (colo_now() >= meeting->next_check) {
        const int32_t left = find_left(meeting);
        if (left >= 0)
            return blame(left);
        meeting->next_check = colo_now() + CHECK_SECONDS;
    }
    for (int32_t r = 0; r < size; r++)
        polled[r] = (struct pollfd){.fd = meeting->fd[r],
                                    .events = is_met(meeting, r) ? POLLRDHUP : POLLIN};
    polled[rank] = (struct pollfd){.fd = meeting->door, .events = POLLIN};
    poll(polled, (nfds_t)size, 10);
    for (int32_t r = 0; r < rank; r++)
        if (polled[r].revents && !is_met(meeting, r)) {
            read_answer(meeting, r);
            polled[r].revents = 0; /* its call's, not its connection's */
        }
    for (int32_t r = 0; r < size; r++)
        if (polled[r].revents && r != rank && meeting->left > 0)
            return gone(meeting, r);
    return polled[rank].revents ? welcome(meeting) : COLO_OK;
}

static colo_status_t connect_sockets(struct meeting *meeting)
{
    bool called = false;
    for (int32_t r = meeting->boot->rank + 1; r < meeting->boot->size; r++)
        called |= meeting->peer[r].near;
    if (called && listen(meeting->door, meeting->boot->size) != 0)
        return colo_endpoint_no_socket(meeting->boot, errno);
    meeting->next_check = meeting->begin + CHECK_SECONDS;
    while (meeting->left > 0) {
        if (waited_ms(meeting) > (double)meeting->config.timeout_ms)
            return too_late(meeting);
        COLO_FAIL_IF(colo_interrupted(waited_ms(meeting) * 1e-3), COLO_ERR_ABORTED,
                     "create_bootstrap: rank %d of %d was interrupted while %d ranks were missing",
                     (int)meeting->boot->rank, (int)meeting->boot->size, (int)meeting->left);
        COLO_TRY(poll_once(meeting));
    }
    return COLO_OK;
}

/* @timed_out: told to the ranks that were met. */
static void close_all(const struct meeting *meeting, bool timed_out)
{
    int *fd = meeting->fd;
    for (int32_t r = 0; fd && r < meeting->boot->size; r++) {
        if (timed_out && meeting->peer[r].met)
            colo_socket_fail(fd[r], COLO_ERR_TIMEOUT, colo_last_error());
        colo_socket_close(fd[r]);
        fd[r] = -1;
    }
}

static void end_meeting(struct meeting *meeting)
{
    close_all(meeting, false);
    if (meeting->connections)
        meeting->transport->close(meeting->connections, false);
    colo_socket_close(meeting->door);
    free(meeting->peer);
    free(meeting->poll);
    free(meeting->fd);
    if (meeting->endpoint)
        munmap(meeting->endpoint, (size_t)meeting->boot->size * sizeof *meeting->endpoint);
}

/* ---- the all-gathers ---- */

/* What each rank brings comes to the front of the endpoints. */
static colo_status_t gather(struct meeting *meeting, const void *mine, size_t bytes)
{
    const colo_bootstrap_t *boot = meeting->boot;
    (void)colo_fail(COLO_OK, "%s", ""); /* what went wrong before does not explain the callback */
    colo_status_t st = boot->all_gather(boot->user, mine, meeting->endpoint, bytes);
    meeting->begin = colo_now();
    COLO_FAIL_IF(st > 0, COLO_ERR_ARG,
                 "create_bootstrap: the all-gather callback of rank %d returned %d, expected "
                 "COLO_OK or an error below 0",
                 (int)boot->rank, (int)st);
    COLO_FAIL_IF(st < 0 && !colo_last_error()[0], st,
                 "create_bootstrap: the all-gather callback of rank %d returned %s",
                 (int)boot->rank, colo_status_name(st));
    return st;
}

/* The endpoints come in pages of their own: a rank without memory must still be able to say so. */
static colo_status_t greet(struct meeting *meeting)
{
    const colo_bootstrap_t *boot = meeting->boot;
    const colo_hello_t mine = colo_endpoint_hello(boot);
    meeting->endpoint = mmap(NULL, (size_t)boot->size * sizeof *meeting->endpoint,
                             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (meeting->endpoint == MAP_FAILED) {
        meeting->endpoint = NULL;
        return colo_fail(COLO_ERR_NOMEM,
                         "create_bootstrap: no memory for the endpoints of %d ranks",
                         (int)boot->size);
    }
    COLO_TRY(gather(meeting, &mine, sizeof mine));
    return colo_endpoint_check_hello(boot, (const colo_hello_t *)(const void *)meeting->endpoint,
                                     sizeof mine);
}

static colo_status_t gather_endpoints(struct meeting *meeting)
{
    COLO_TRY(gather(meeting, &meeting->mine, sizeof meeting->mine));
    return colo_endpoint_check_all(meeting->boot, meeting->endpoint);
}

/* ---- to far ranks ---- */

static colo_status_t load_module(struct meeting *meeting)
{
    const int32_t rank = meeting->boot->rank;
    const char *name = meeting->row->comm.name;
    const colo_backend_t *module = NULL;
    const colo_status_t st = colo_backend_load(name, &module);
    if (st < 0)
        return colo_fail(st, "create_bootstrap: rank %d has no %s: %.300s", (int)rank,
                         meeting->row->missing, colo_last_error());
    COLO_FAIL_IF(!module->transport, COLO_ERR_UNBUILT,
                 "create_bootstrap: backend '%s' offers no transport between processes", name);
    meeting->transport = module->transport;
    return meeting->transport->open(rank, meeting->boot->size, &meeting->mine.worker,
                                    &meeting->connections);
}

/* A rank without the module says so in the all-gather, for which the others wait. */
static colo_status_t open_module(struct meeting *meeting)
{
    const colo_status_t st = load_module(meeting);
    if (st < 0)
        colo_endpoint_set_error(&meeting->mine, st);
    COLO_TRY(gather_endpoints(meeting));
    for (int32_t r = 0; r < meeting->boot->size; r++)
        meeting->endpoint[r].worker.near = meeting->peer[r].near;
    return meeting->transport->connect(meeting->connections, &meeting->endpoint->worker,
                                       sizeof *meeting->endpoint);
}

/* The sockets hold the connections to far ranks, if there are some. */
static colo_status_t join(struct meeting *meeting)
{
    const colo_process_transport_t *far = meeting->transport;
    void *far_connections = meeting->connections;
    meeting->transport = &colo_transport_sockets;
    meeting->connections = NULL;
    const colo_status_t st =
        colo_transport_sockets_new(meeting->boot->rank, meeting->boot->size, meeting->fd, far,
                                   far_connections, &meeting->connections);
    for (int32_t r = 0; r < meeting->boot->size; r++)
        meeting->fd[r] = -1;
    return st;
}

/* A rank on which it is refused comes to the all-gather all the same: the others are on their way
 * there. */
static void take_config(struct meeting *meeting)
{
    const colo_status_t st = colo_comm_read_config(meeting->boot->config, &meeting->config);
    if (st == COLO_OK || meeting->mine.status < 0)
        return;
    const colo_error_t why = colo_error_save();
    colo_endpoint_set_error(&meeting->mine, colo_fail(st, "create_bootstrap: %s", why.text));
}

/* Connects all ranks with each other. */
static colo_status_t connect_all(struct meeting *meeting)
{
    const colo_bootstrap_t *boot = meeting->boot;
    COLO_TRY(greet(meeting));
    meeting->peer = calloc((size_t)boot->size, sizeof *meeting->peer);
    meeting->poll = calloc((size_t)boot->size, sizeof *meeting->poll);
    meeting->fd = malloc((size_t)boot->size * sizeof *meeting->fd);
    colo_endpoint_make(boot, meeting->peer && meeting->poll, &meeting->mine, &meeting->door,
                       meeting->fd);
    take_config(meeting);
    meeting->mine.insists = wanted_row(&meeting->config);
    colo_status_t st = gather_endpoints(meeting);
    close_all(meeting, false); /* connections take their place */
    COLO_TRY(st);
    choose_transports(meeting);
    if (meeting->row != &transports[SOCKETS]) {
        COLO_TRY(open_module(meeting));
        if (meeting->left == 0)
            return COLO_OK;
    }
    st = connect_sockets(meeting);
    if (st < 0)
        close_all(meeting, st == COLO_ERR_TIMEOUT);
    COLO_TRY(st);
    return join(meeting);
}

/* @made: the world, over connections of all ranks. */
static colo_status_t meet(const colo_bootstrap_t *boot, double *begin, colo_comm_t **made)
{
    __attribute__((cleanup(end_meeting))) struct meeting meeting = {.boot = boot, .door = -1};
    COLO_TRY(connect_all(&meeting));
    void *connections = meeting.connections;
    meeting.connections = NULL;
    *begin = meeting.begin;
    return colo_process_comm(&meeting.row->comm, meeting.transport, connections, boot->rank,
                             boot->size, made);
}

/* ---- the public names ---- */

colo_status_t colo_bootstrap_fail(colo_status_t status, const char *error_message)
{
    return colo_fail(status, "%s", error_message ? error_message : "");
}

static colo_status_t gather_over_comm(void *user, const void *send, void *recv, size_t bytes)
{
    return colo_comm_all_gather(user, send, recv, (int64_t)bytes, COLO_U8, NULL);
}

colo_status_t colo_bootstrap_from_comm(colo_comm_t *comm, colo_bootstrap_t *bootstrap)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "bootstrap_from_comm: comm is NULL");
    const colo_bootstrap_t own = {COLO_BOOTSTRAP_INIT, .rank = colo_comm_rank(comm),
                                  .size = colo_comm_size(comm), .all_gather = gather_over_comm,
                                  .user = comm};
    return COLO_SIZED_WRITE(bootstrap, &own, "bootstrap_from_comm: bootstrap",
                            "COLO_BOOTSTRAP_INIT");
}

colo_status_t colo_comm_create_bootstrap(const colo_bootstrap_t *boot, colo_comm_t **comm)
{
    COLO_RANGE();
    colo_bootstrap_t own = {COLO_BOOTSTRAP_INIT};
    COLO_TRY(
        COLO_SIZED_READ(&own, boot, user, "create_bootstrap: bootstrap", "COLO_BOOTSTRAP_INIT"));
    boot = &own;
    COLO_FAIL_IF(!comm || !boot->all_gather, COLO_ERR_ARG, "create_bootstrap: %s is NULL",
                 !comm ? "comm" : "the all-gather callback");
    COLO_FAIL_IF(boot->size < 1 || boot->size > 4096 || boot->rank < 0 || boot->rank >= boot->size,
                 COLO_ERR_ARG,
                 "create_bootstrap: rank %d of %d, expected a size of 1..4096 and a rank "
                 "below it",
                 (int)boot->rank, (int)boot->size);
    colo_comm_t *world = NULL;
    double begin = 0;
    COLO_TRY(meet(boot, &begin, &world));
    if (boot->config)
        (void)colo_comm_configure(world, boot->config);
    return colo_process_agree(world, "create_bootstrap", begin, comm);
}
