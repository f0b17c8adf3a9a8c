/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire-connect.c - from one all-gather of addresses to a socket between every two ranks.
 *
 * Each rank listens, brings its card (where it can be reached, a random token) to the all-gather,
 * then connects to all lower ranks and accepts from all higher ones, in one poll() loop under one
 * deadline. A card lists an abstract Unix name, tried by ranks of the same host and network
 * namespace, and all addresses of the interfaces that are up; the first that answers properly is
 * taken, since some may lead elsewhere (bridges of containers have the same address on every host).
 * Who connects shows the acceptor's token, which only ranks of this bootstrap know; the acceptor
 * answers with its rank.
 */
#include "comm/p2p.h"
#include "comm/wire-sockets.h"
#include "core/env.h"
#include "core/hash.h"
#include "core/try.h"

#include <colobridge/version.h>

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { ADDRESSES = 8, TOKEN = 16, GUESTS = 64 };
static const uint32_t MAGIC = 0xC0105ACC;
static const double PATIENCE = 5.0; /* seconds for one address when there are others */

struct card {
    uint32_t magic, version;
    int32_t rank, size;
    uint64_t host; /* of the machine and its network namespace; 0: unknown */
    uint8_t token[TOKEN];
    char name[48]; /* abstract Unix name without the leading NUL; "": none */
    uint16_t port; /* of TCP; 0: none */
    uint16_t naddress;
    struct sockaddr_storage address[ADDRESSES];
};

struct hello {
    uint32_t magic;
    int32_t rank;         /* of who says it */
    uint8_t token[TOKEN]; /* the acceptor's */
};

struct link { /* to a lower rank */
    int fd;
    int at;     /* candidate that is being tried */
    bool asked; /* connected, hello sent */
    double since;
    char why[120]; /* of the last attempt that failed */
};

struct guest { /* accepted; has not said who it is */
    int fd;
    size_t got;
    struct hello hello;
};

struct meeting {
    const colo_bootstrap_t *b;
    struct card *card; /* [size] */
    int unix_fd, tcp_fd;
    struct link *link; /* [rank] */
    struct guest guest[GUESTS];
    int *fd;      /* [size] out */
    int32_t left; /* peers without a socket */
};

/* ---- my card ---- */

static uint64_t this_host(void)
{
    char id[64] = "";
    struct stat net;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f) {
        if (!fgets(id, sizeof id, f))
            id[0] = '\0';
        fclose(f);
    }
    if (!id[0] || stat("/proc/self/ns/net", &net) != 0)
        return 0;
    return colo_hash_i64(colo_hash_str(COLO_HASH_INIT, id), (int64_t)net.st_ino);
}

static int listen_unix(struct card *card, int backlog)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    uint64_t random[2] = {0, 0}; /* not the token: names are no secret */
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return -1;
    int n = snprintf(card->name, sizeof card->name, "colobridge-%016llx%016llx",
                     (unsigned long long)random[0], (unsigned long long)random[1]);
    memcpy(a.sun_path + 1, card->name, (size_t)n);
    int fd = colo_socket_open(AF_UNIX, SOCK_STREAM);
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a, size) == 0 && listen(fd, backlog) == 0)
        return fd;
    if (fd >= 0)
        colo_socket_close(fd);
    card->name[0] = '\0';
    return -1;
}

static int listen_tcp(struct card *card, int backlog)
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct sockaddr_in four = {.sin_family = AF_INET};
    for (int version = 6; version >= 4; version -= 2) {
        int fd = colo_socket_open(version == 6 ? AF_INET6 : AF_INET, SOCK_STREAM);
        if (fd < 0)
            continue;
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int));
        struct sockaddr *a = version == 6 ? (struct sockaddr *)&six : (struct sockaddr *)&four;
        socklen_t size = version == 6 ? sizeof six : sizeof four;
        if (bind(fd, a, size) == 0 && listen(fd, backlog) == 0 && getsockname(fd, a, &size) == 0) {
            card->port = ntohs(version == 6 ? six.sin6_port : four.sin_port);
            return fd;
        }
        colo_socket_close(fd);
    }
    return -1;
}

static void list_addresses(struct card *card)
{
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0)
        return;
    for (int family = AF_INET; family; family = family == AF_INET ? AF_INET6 : 0)
        for (struct ifaddrs *i = all; i && card->naddress < ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != family || !(i->ifa_flags & IFF_UP) ||
                (i->ifa_flags & IFF_LOOPBACK))
                continue;
            struct sockaddr_in6 *six = (struct sockaddr_in6 *)(void *)i->ifa_addr;
            if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr))
                continue;
            memcpy(&card->address[card->naddress++], i->ifa_addr,
                   family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        }
    freeifaddrs(all);
}

static colo_status_t make_card(struct meeting *m, struct card *card)
{
    int32_t family;                               /* 0: auto, 1: tcp */
    (void)colo_env_word("COLO_SOCKETS", &family); /* refused once all are connected */
    memset(card, 0, sizeof *card);
    *card = (struct card){.magic = MAGIC,
                          .version = colo_version_number(),
                          .rank = m->b->rank,
                          .size = m->b->size,
                          .host = this_host()};
    if (getrandom(card->token, TOKEN, 0) != TOKEN)
        return colo_fail(COLO_ERR_IO, "from_bootstrap: getrandom: %s", strerror(errno));
    if (family == 0)
        m->unix_fd = listen_unix(card, m->b->size);
    m->tcp_fd = listen_tcp(card, m->b->size);
    if (m->unix_fd < 0 && m->tcp_fd < 0)
        return colo_fail(COLO_ERR_IO, "from_bootstrap: no socket to listen on: %s",
                         strerror(errno));
    list_addresses(card);
    return COLO_OK;
}

static colo_status_t check_cards(const struct meeting *m)
{
    for (int32_t r = 0; r < m->b->size; r++) {
        const struct card *k = &m->card[r];
        if (k->magic != MAGIC)
            return colo_fail(COLO_ERR_MISMATCH,
                             "from_bootstrap: slot %d of the all-gather does not hold what rank %d "
                             "brought; rank r's bytes belong at recv + r * bytes",
                             (int)r, (int)r);
        if (k->rank != r || k->size != m->b->size)
            return colo_fail(COLO_ERR_MISMATCH,
                             "from_bootstrap: slot %d of the all-gather comes from rank %d of %d, "
                             "expected rank %d of %d",
                             (int)r, (int)k->rank, (int)k->size, (int)r, (int)m->b->size);
        if (k->version != m->card[0].version)
            return colo_fail(
                COLO_ERR_MISMATCH,
                "from_bootstrap: rank %d runs library version %u.%u.%u, rank 0 "
                "%u.%u.%u",
                (int)r, (unsigned)(k->version >> 16), (unsigned)(k->version >> 8 & 0xff),
                (unsigned)(k->version & 0xff), (unsigned)(m->card[0].version >> 16),
                (unsigned)(m->card[0].version >> 8 & 0xff), (unsigned)(m->card[0].version & 0xff));
    }
    return COLO_OK;
}

/* ---- to lower ranks ---- */

/* Candidate @at of @k as seen from @mine: Unix and loopback on the same host, then the addresses.
 * 0 when there are no more, -1 when this one is not for us. */
static int candidate(const struct card *mine, const struct card *k, int at,
                     struct sockaddr_storage *a, socklen_t *size)
{
    const bool same = mine->host != 0 && mine->host == k->host;
    memset(a, 0, sizeof *a);
    if (at == 0) {
        struct sockaddr_un *u = (struct sockaddr_un *)(void *)a;
        size_t n = strnlen(k->name, sizeof k->name);
        if (!same || !n || !mine->name[0])
            return -1;
        u->sun_family = AF_UNIX;
        memcpy(u->sun_path + 1, k->name, n);
        *size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
        return 1;
    }
    if (at == 1) {
        struct sockaddr_in *four = (struct sockaddr_in *)(void *)a;
        if (!same || !k->port)
            return -1;
        four->sin_family = AF_INET;
        four->sin_port = htons(k->port);
        four->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        *size = sizeof *four;
        return 1;
    }
    if (at - 2 >= k->naddress || !k->port)
        return 0;
    *a = k->address[at - 2];
    if (a->ss_family == AF_INET) {
        ((struct sockaddr_in *)(void *)a)->sin_port = htons(k->port);
        *size = sizeof(struct sockaddr_in);
    } else {
        ((struct sockaddr_in6 *)(void *)a)->sin6_port = htons(k->port);
        *size = sizeof(struct sockaddr_in6);
    }
    return 1;
}

static void give_up(struct link *l, const char *what, int error)
{
    snprintf(l->why, sizeof l->why, "%s%s%s", what, error ? ": " : "",
             error ? strerror(error) : "");
    if (l->fd >= 0)
        colo_socket_close(l->fd);
    l->fd = -1;
    l->at++;
}

/* Begins with the next candidate; after the last one with the first again, the deadline ends it. */
static void try_next(struct meeting *m, int32_t r)
{
    struct link *l = &m->link[r];
    struct sockaddr_storage a;
    socklen_t size = 0;
    int is;
    while ((is = candidate(&m->card[m->b->rank], &m->card[r], l->at, &a, &size)) < 0)
        l->at++;
    if (is == 0) {
        l->at = 0;
        return; /* once around: let the loop breathe */
    }
    l->fd = colo_socket_open(a.ss_family, SOCK_STREAM);
    l->asked = false;
    l->since = colo_now();
    if (l->fd < 0)
        give_up(l, "socket", errno);
    else if (connect(l->fd, (struct sockaddr *)&a, size) != 0 && errno != EINPROGRESS)
        give_up(l, "connect", errno);
}

static void advance(struct meeting *m, int32_t r, short revents)
{
    struct link *l = &m->link[r];
    int error = 0;
    socklen_t size = sizeof error;
    if (!revents) {
        if (colo_now() - l->since > PATIENCE)
            give_up(l, "no answer in 5 s", 0);
        return;
    }
    if (!l->asked) {
        struct hello hello = {.magic = MAGIC, .rank = m->b->rank};
        memcpy(hello.token, m->card[r].token, TOKEN);
        getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error || send(l->fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
            give_up(l, "connect", error ? error : errno);
        else
            l->asked = true;
        return;
    }
    uint32_t answer[2] = {0, 0}; /* 8 bytes in an empty stream come whole */
    ssize_t n = recv(l->fd, answer, sizeof answer, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n != (ssize_t)sizeof answer || answer[0] != MAGIC || answer[1] != (uint32_t)r) {
        give_up(l, n > 0 ? "somebody else answered" : "it hung up", n < 0 ? errno : 0);
        return;
    }
    m->fd[r] = l->fd;
    l->fd = -1;
    m->left--;
}

/* ---- from higher ranks ---- */

static void welcome(struct meeting *m, int listener)
{
    int fd = colo_socket_accept(listener);
    if (fd < 0)
        return;
    for (int i = 0; i < GUESTS; i++)
        if (m->guest[i].fd < 0) {
            m->guest[i] = (struct guest){.fd = fd};
            return;
        }
    colo_socket_close(m->guest[0].fd); /* strangers that keep quiet make room; a peer tries again */
    memmove(m->guest, m->guest + 1, sizeof m->guest - sizeof m->guest[0]);
    m->guest[GUESTS - 1] = (struct guest){.fd = fd};
}

static void listen_to(struct meeting *m, struct guest *g)
{
    ssize_t n = recv(g->fd, (char *)&g->hello + g->got, sizeof g->hello - g->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && (g->got += (size_t)n) < sizeof g->hello)
        return;
    const int32_t r = g->hello.rank;
    uint32_t answer[2] = {MAGIC, (uint32_t)m->b->rank};
    bool known = n > 0 && g->hello.magic == MAGIC && r > m->b->rank && r < m->b->size &&
                 memcmp(g->hello.token, m->card[m->b->rank].token, TOKEN) == 0;
    if (known && send(g->fd, answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer) {
        if (m->fd[r] >= 0)
            colo_socket_close(m->fd[r]); /* it had no patience with that one */
        else
            m->left--;
        m->fd[r] = g->fd;
    } else {
        colo_socket_close(g->fd);
    }
    g->fd = -1;
}

/* ---- all together ---- */

static colo_status_t too_late(const struct meeting *m, int64_t timeout_ms)
{
    int32_t r = 0;
    while (r < m->b->size - 1 && (r == m->b->rank || m->fd[r] >= 0))
        r++;
    return colo_fail(COLO_ERR_TIMEOUT,
                     "from_bootstrap: rank %d of %d has no connection with %d ranks after %lld ms; "
                     "the first is rank %d%s%s",
                     (int)m->b->rank, (int)m->b->size, (int)m->left, (long long)timeout_ms, (int)r,
                     r < m->b->rank && m->link[r].why[0] ? ": " : "",
                     r < m->b->rank ? m->link[r].why : ", which did not call");
}

static colo_status_t meet(struct meeting *m, int64_t timeout_ms, struct pollfd *p)
{
    const double begin = colo_now();
    const int32_t rank = m->b->rank;
    while (m->left > 0) {
        if ((colo_now() - begin) * 1e3 > (double)timeout_ms)
            return too_late(m, timeout_ms);
        for (int32_t r = 0; r < rank; r++)
            if (m->fd[r] < 0 && m->link[r].fd < 0)
                try_next(m, r);
        for (int32_t r = 0; r < rank; r++)
            p[r] = (struct pollfd){.fd = m->fd[r] < 0 ? m->link[r].fd : -1,
                                   .events = m->link[r].asked ? POLLIN : POLLOUT};
        struct pollfd *q = p + rank;
        q[0] = (struct pollfd){.fd = m->unix_fd, .events = POLLIN};
        q[1] = (struct pollfd){.fd = m->tcp_fd, .events = POLLIN};
        for (int i = 0; i < GUESTS; i++)
            q[2 + i] = (struct pollfd){.fd = m->guest[i].fd, .events = POLLIN};
        poll(p, (nfds_t)(rank + 2 + GUESTS), 10);
        for (int32_t r = 0; r < rank; r++)
            if (p[r].fd >= 0)
                advance(m, r, p[r].revents);
        for (int i = 0; i < GUESTS; i++)
            if (q[2 + i].fd >= 0 && q[2 + i].revents)
                listen_to(m, &m->guest[i]);
        for (int i = 0; i < 2; i++)
            if (q[i].fd >= 0 && q[i].revents)
                welcome(m, q[i].fd);
    }
    for (int32_t r = 0; r < m->b->size; r++)
        if (r != rank) /* refused on Unix sockets, which need it not */
            setsockopt(m->fd[r], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return COLO_OK;
}

static void end_meeting(struct meeting *m)
{
    if (m->unix_fd >= 0)
        colo_socket_close(m->unix_fd);
    if (m->tcp_fd >= 0)
        colo_socket_close(m->tcp_fd);
    for (int i = 0; i < GUESTS; i++)
        if (m->guest[i].fd >= 0)
            colo_socket_close(m->guest[i].fd);
    for (int32_t r = 0; m->link && r < m->b->rank; r++)
        if (m->link[r].fd >= 0)
            colo_socket_close(m->link[r].fd);
    free(m->link);
    free(m->card);
}

colo_status_t colo_sockets_connect(const colo_bootstrap_t *b, int64_t timeout_ms, int *fd)
{
    struct meeting m = {.b = b, .unix_fd = -1, .tcp_fd = -1, .fd = fd, .left = b->size - 1};
    struct card mine;
    colo_status_t st;
    COLO_AUTOFREE struct pollfd *p = calloc((size_t)b->rank + 2 + GUESTS, sizeof *p);
    m.card = calloc((size_t)b->size, sizeof *m.card);
    m.link = calloc((size_t)b->rank + 1, sizeof *m.link);
    for (int32_t r = 0; r < b->size; r++)
        fd[r] = -1;
    for (int i = 0; i < GUESTS; i++)
        m.guest[i].fd = -1;
    for (int32_t r = 0; m.link && r < b->rank; r++)
        m.link[r].fd = -1;
    if (!m.card || !m.link || !p)
        COLO_TRY_GOTO(
            st, colo_fail(COLO_ERR_NOMEM, "from_bootstrap: no memory for %d ranks", (int)b->size),
            done);
    COLO_TRY_GOTO(st, make_card(&m, &mine), done);
    (void)colo_fail(COLO_OK, "%s", ""); /* what went wrong before does not explain the callback */
    st = b->all_gather(b->user, &mine, m.card, sizeof mine);
    if (st > 0)
        st = colo_fail(COLO_ERR_ARG,
                       "from_bootstrap: the all-gather callback of rank %d returned %d, expected "
                       "COLO_OK or an error below 0",
                       (int)b->rank, (int)st);
    else if (st < 0 && !colo_last_error()[0])
        st = colo_fail(st, "from_bootstrap: the all-gather callback of rank %d returned %s",
                       (int)b->rank, colo_status_name(st));
    if (st < 0)
        goto done;
    COLO_TRY_GOTO(st, check_cards(&m), done);
    st = meet(&m, timeout_ms, p);
done:
    end_meeting(&m);
    for (int32_t r = 0; st < 0 && r < b->size; r++)
        if (fd[r] >= 0) {
            colo_socket_close(fd[r]);
            fd[r] = -1;
        }
    return st;
}

colo_status_t colo_comm_from_bootstrap(const colo_bootstrap_t *b, colo_comm_t **comm)
{
    if (!b || !comm || !b->all_gather)
        return colo_fail(COLO_ERR_ARG, "from_bootstrap: %s is NULL",
                         !b      ? "bootstrap"
                         : !comm ? "comm"
                                 : "the all-gather callback");
    if (b->size < 1 || b->size > 4096 || b->rank < 0 || b->rank >= b->size)
        return colo_fail(COLO_ERR_ARG,
                         "from_bootstrap: rank %d of %d, expected a size of 1..4096 and a rank "
                         "below it",
                         (int)b->rank, (int)b->size);
    COLO_AUTOFREE int *fd = malloc((size_t)b->size * sizeof *fd);
    if (!fd)
        return colo_fail(COLO_ERR_NOMEM, "from_bootstrap: no memory for %d ranks", (int)b->size);
    void *wire = NULL;
    colo_comm_t *world = NULL;
    int64_t timeout_ms;
    (void)colo_env_i64("COLO_TIMEOUT_MS", &timeout_ms); /* refused below, on all ranks */
    COLO_TRY(colo_sockets_connect(b, timeout_ms, fd));
    COLO_TRY(colo_wire_sockets_new(b->rank, b->size, fd, &wire));
    COLO_TRY(colo_p2p_comm(&colo_comm_sockets_ops, &colo_wire_sockets, wire, b->rank, b->size, true,
                           &world));
    COLO_TRY(colo_comm_i_agree_environment(&world, "from_bootstrap"));
    *comm = world;
    return COLO_OK;
}
