/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.c - where a rank can be reached: its endpoint for the all-gather, and its doors.
 *
 * A door is bound before the all-gather, because its port belongs on the endpoint, and listens
 * after it, when the endpoints tell which ranks will call: ranks of this host by the Unix name
 * (loopback where Unix sockets are not wanted), others through the interfaces that lead to them.
 * The other doors are closed without ever having been open.
 */
#include "comm/process/address.h"

#include "comm/process/transport-unix.h"
#include "core/env.h"
#include "core/hash.h"
#include "core/error.h"

#include <colobridge/version.h>

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>

static const char CALL[] = "create_bootstrap: "; /* begins every error message here */
enum { SPARE = 2 }; /* descriptors beyond a connection for each peer: callers not known yet */

colo_status_t colo_endpoint_no_socket(const colo_bootstrap_t *b, int error)
{
    struct rlimit limit = {0, 0};
    if (error != EMFILE && error != ENFILE)
        return colo_fail(error == ENOMEM || error == ENOBUFS ? COLO_ERR_NOMEM : COLO_ERR_IO,
                         "create_bootstrap: rank %d of %d cannot open a socket: %s", (int)b->rank,
                         (int)b->size, strerror(error));
    getrlimit(RLIMIT_NOFILE, &limit);
    return colo_fail(COLO_ERR_IO,
                     "create_bootstrap: rank %d has too few descriptors for %d connections: %s; its "
                     "limit is %lld, raise it (ulimit -n) or close files",
                     (int)b->rank, (int)b->size - 1, strerror(error), (long long)limit.rlim_cur);
}

/* ---- this rank's endpoint ---- */

/* @error where this process lacks descriptors or memory; 0 where there is no such thing here. */
static int shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ? error : 0;
}

/* The functions that follow return a shortage, or 0. */

/* @host: 0 when unknown */
static int find_host(uint64_t *host)
{
    char id[64] = "";
    struct stat net;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    *host = 0;
    if (!f)
        return shortage(errno);
    if (!fgets(id, sizeof id, f))
        id[0] = '\0';
    fclose(f);
    if (id[0] && stat("/proc/self/ns/net", &net) == 0)
        *host = colo_hash_i64(colo_hash_str(COLO_HASH_INIT, id), (int64_t)net.st_ino);
    return 0;
}

static socklen_t unix_address(const char *name, struct sockaddr_un *a)
{
    size_t n = strnlen(name, sizeof((colo_endpoint_t *)0)->name);
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    memcpy(a->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* Without Unix sockets the name stays empty. */
static int bind_unix(colo_endpoint_t *endpoint, colo_doors_t *doors)
{
    struct sockaddr_un a;
    uint64_t random[2] = {0, 0}; /* not the token: names are no secret */
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return 0;
    snprintf(endpoint->name, sizeof endpoint->name, "colobridge-%016llx%016llx",
             (unsigned long long)random[0], (unsigned long long)random[1]);
    socklen_t size = unix_address(endpoint->name, &a);
    doors->unix_fd = colo_socket_open(AF_UNIX, SOCK_STREAM);
    if (doors->unix_fd >= 0 && bind(doors->unix_fd, (struct sockaddr *)&a, size) == 0)
        return 0;
    const int error = shortage(errno);
    endpoint->name[0] = '\0';
    colo_socket_close(doors->unix_fd);
    doors->unix_fd = -1;
    return error;
}

static socklen_t size_of(const colo_address_t *a)
{
    return a->family == AF_INET ? sizeof a->four : sizeof a->six;
}

/* Binds the endpoint's address number @i to a free port; the address goes if it cannot be. */
static int bind_tcp(colo_endpoint_t *endpoint, colo_doors_t *doors, int i)
{
    colo_address_t *a = &endpoint->address[i];
    socklen_t size = size_of(a);
    int fd = colo_socket_open(a->family, SOCK_STREAM);
    if (fd >= 0 && bind(fd, &a->any, size) == 0 && getsockname(fd, &a->any, &size) == 0) {
        doors->tcp[i] = fd;
        return 0;
    }
    const int error = shortage(errno);
    a->family = 0;
    colo_socket_close(fd);
    return error;
}

static int list_addresses(colo_endpoint_t *endpoint)
{
    struct ifaddrs *all = NULL;
    endpoint->address[0].four = (struct sockaddr_in){.sin_family = AF_INET};
    endpoint->address[0].four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    endpoint->naddress = 1;
    if (getifaddrs(&all) != 0)
        return shortage(errno);
    for (int family = AF_INET; family; family = family == AF_INET ? AF_INET6 : 0)
        for (struct ifaddrs *i = all; i && endpoint->naddress < COLO_ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != family || !(i->ifa_flags & IFF_UP) ||
                (i->ifa_flags & IFF_LOOPBACK))
                continue;
            colo_address_t a = {.family = 0};
            memcpy(&a, i->ifa_addr, family == AF_INET ? sizeof a.four : sizeof a.six);
            if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&a.six.sin6_addr))
                continue;
            endpoint->address[endpoint->naddress++] = a;
        }
    freeifaddrs(all);
    return 0;
}

static colo_status_t make(const colo_bootstrap_t *b, colo_endpoint_t *endpoint, colo_doors_t *doors,
                          int *fd)
{
    int32_t family, transport; /* 1: tcp; 3: ucx. Another word is refused once all are connected */
    (void)colo_env_word("COLO_SOCKETS", &family);
    (void)colo_env_word("COLO_TRANSPORT", &transport);
    endpoint->ucx = transport == 3 ? 1 : family == 1 ? -1 : 0;
    if (getrandom(endpoint->token, COLO_TOKEN, 0) != COLO_TOKEN)
        return colo_fail(COLO_ERR_IO, "create_bootstrap: getrandom: %s", strerror(errno));
    int error = find_host(&endpoint->host);
    if (!error)
        error = list_addresses(endpoint);
    if (!error && family == 0)
        error = bind_unix(endpoint, doors);
    bool bound = doors->unix_fd >= 0;
    for (int i = 0; i < endpoint->naddress && !error; i++) {
        error = bind_tcp(endpoint, doors, i);
        bound = bound || doors->tcp[i] >= 0;
    }
    if (error)
        return colo_endpoint_no_socket(b, error);
    if (!bound && b->size > 1)
        return colo_fail(COLO_ERR_IO,
                         "create_bootstrap: rank %d found neither Unix sockets nor a network address "
                         "to listen on",
                         (int)b->rank);
    int spare[SPARE];
    for (int i = 0; i < SPARE; i++)
        spare[i] = -1;
    for (int32_t r = 0; r < b->size + SPARE && !error; r++) {
        int *place = r < b->size ? &fd[r] : &spare[r - b->size];
        if (r != b->rank && (*place = colo_socket_open(AF_UNIX, SOCK_STREAM)) < 0)
            error = errno;
    }
    for (int i = 0; i < SPARE; i++)
        colo_socket_close(spare[i]);
    return error ? colo_endpoint_no_socket(b, error) : COLO_OK;
}

void colo_endpoint_make(const colo_bootstrap_t *b, bool enough, colo_endpoint_t *endpoint,
                        colo_doors_t *doors, int *fd)
{
    memset(endpoint, 0, sizeof *endpoint);
    *endpoint = (colo_endpoint_t){.magic = COLO_ENDPOINT_MAGIC,
                                  .version = colo_version_number(),
                                  .rank = b->rank,
                                  .size = b->size};
    doors->unix_fd = -1;
    for (int i = 0; i < COLO_ADDRESSES; i++)
        doors->tcp[i] = -1;
    for (int32_t r = 0; fd && r < b->size; r++)
        fd[r] = -1;
    colo_status_t st = enough && fd ? make(b, endpoint, doors, fd)
                                    : colo_fail(COLO_ERR_NOMEM,
                                                "create_bootstrap: rank %d has no memory for %d "
                                                "connections",
                                                (int)b->rank, (int)b->size - 1);
    if (st < 0)
        colo_endpoint_set_error(endpoint, st);
}

void colo_endpoint_set_error(colo_endpoint_t *endpoint, colo_status_t status)
{
    endpoint->status = status;
    snprintf(endpoint->why, sizeof endpoint->why, "%s", colo_last_error() + strlen(CALL));
}

/* ---- all endpoints ---- */

colo_status_t colo_endpoint_check_all(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint)
{
    for (int32_t r = 0; r < b->size; r++) {
        const colo_endpoint_t *k = &endpoint[r];
        if (k->magic != COLO_ENDPOINT_MAGIC)
            return colo_fail(
                COLO_ERR_MISMATCH,
                "create_bootstrap: entry %d of the all-gather does not hold what rank %d "
                "brought; rank r's bytes belong at recv + r * bytes",
                (int)r, (int)r);
        if (k->rank != r || k->size != b->size)
            return colo_fail(COLO_ERR_MISMATCH,
                             "create_bootstrap: entry %d of the all-gather comes from rank %d of %d, "
                             "expected rank %d of %d",
                             (int)r, (int)k->rank, (int)k->size, (int)r, (int)b->size);
        if (k->version != endpoint[0].version)
            return colo_fail(COLO_ERR_MISMATCH,
                             "create_bootstrap: rank %d runs library version %u.%u.%u, rank 0 "
                             "%u.%u.%u",
                             (int)r, (unsigned)(k->version >> 16),
                             (unsigned)(k->version >> 8 & 0xff), (unsigned)(k->version & 0xff),
                             (unsigned)(endpoint[0].version >> 16),
                             (unsigned)(endpoint[0].version >> 8 & 0xff),
                             (unsigned)(endpoint[0].version & 0xff));
        if (k->naddress < 0 || k->naddress > COLO_ADDRESSES)
            return colo_fail(COLO_ERR_MISMATCH,
                             "create_bootstrap: entry %d of the all-gather lists %d addresses, "
                             "expected 0..%d; the all-gather changed it",
                             (int)r, (int)k->naddress, (int)COLO_ADDRESSES);
    }
    if (endpoint[b->rank].status < 0) /* its own error before that of any other */
        return colo_fail((colo_status_t)endpoint[b->rank].status, "%s%s", CALL,
                         endpoint[b->rank].why);
    for (int32_t r = 0; r < b->size; r++)
        if (endpoint[r].status < 0)
            return colo_fail(COLO_ERR_PEER, "create_bootstrap: rank %d failed: %.*s", (int)r,
                             (int)sizeof endpoint[r].why, endpoint[r].why);
    return COLO_OK;
}

static bool on_one_host(const colo_endpoint_t *a, const colo_endpoint_t *b)
{
    return a->host != 0 && a->host == b->host;
}

bool colo_endpoint_wants_ucx(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint)
{
    bool apart = false, refused = false;
    for (int32_t r = 0; r < b->size; r++) {
        if (endpoint[r].ucx > 0)
            return true;
        refused |= endpoint[r].ucx < 0;
        apart |= r > 0 && !on_one_host(&endpoint[0], &endpoint[r]);
    }
    return apart && !refused;
}

int colo_endpoint_addresses(const colo_endpoint_t *mine, const colo_endpoint_t *to)
{
    if (on_one_host(mine, to))
        return 1;
    return to->naddress > 1 ? to->naddress - 1 : 0;
}

socklen_t colo_endpoint_address(const colo_endpoint_t *mine, const colo_endpoint_t *to, int i,
                                struct sockaddr_storage *address)
{
    const bool here = on_one_host(mine, to);
    memset(address, 0, sizeof *address);
    if (here && mine->name[0] && to->name[0])
        return unix_address(to->name, (struct sockaddr_un *)(void *)address);
    const colo_address_t *a = &to->address[here ? 0 : i + 1];
    memcpy(address, a, sizeof *a);
    return size_of(a);
}

/* ---- doors ---- */

static bool same_address(const colo_address_t *a, const colo_address_t *b)
{
    if (a->family != b->family)
        return false;
    if (a->family == AF_INET)
        return a->four.sin_addr.s_addr == b->four.sin_addr.s_addr;
    return memcmp(&a->six.sin6_addr, &b->six.sin6_addr, sizeof a->six.sin6_addr) == 0;
}

/* The number of @mine's address through which the system reaches @to; -1: not one of them, or
 * @to is an address that both have, as bridges of containers do. */
static int interface_to(const colo_endpoint_t *mine, const colo_address_t *to)
{
    colo_address_t from = {.family = 0};
    socklen_t size = sizeof from;
    if (to->family != AF_INET && to->family != AF_INET6)
        return -1;
    for (int i = 0; i < mine->naddress; i++)
        if (same_address(&mine->address[i], to))
            return -1;
    int fd = colo_socket_open(to->family, SOCK_DGRAM);
    const bool found = fd >= 0 && connect(fd, &to->any, size_of(to)) == 0 && /* sends nothing */
                       getsockname(fd, &from.any, &size) == 0;
    colo_socket_close(fd);
    for (int i = 1; found && i < mine->naddress; i++)
        if (same_address(&mine->address[i], &from))
            return i;
    return -1;
}

static void close_door(int *fd)
{
    colo_socket_close(*fd);
    *fd = -1;
}

void colo_doors_close(colo_doors_t *doors)
{
    close_door(&doors->unix_fd);
    for (int i = 0; i < COLO_ADDRESSES; i++)
        close_door(&doors->tcp[i]);
}

colo_status_t colo_endpoint_listen(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint,
                                   colo_doors_t *doors)
{
    const colo_endpoint_t *mine = &endpoint[b->rank];
    bool open_unix = false, open_tcp[COLO_ADDRESSES] = {false}, afar = false, found = false;
    for (int32_t r = b->rank + 1; r < b->size; r++) {
        const bool here = on_one_host(mine, &endpoint[r]);
        open_unix |= here && mine->name[0] && endpoint[r].name[0];
        open_tcp[0] |= here && !(mine->name[0] && endpoint[r].name[0]);
        afar |= !here;
        for (int i = 1; !here && i < endpoint[r].naddress; i++) {
            int through = interface_to(mine, &endpoint[r].address[i]);
            if (through > 0)
                found = open_tcp[through] = true;
        }
    }
    for (int i = 1; i < mine->naddress;
         i++) /* a route that nothing here can tell: behind them all */
        open_tcp[i] |= afar && !found;
    if (!open_unix)
        close_door(&doors->unix_fd);
    else if (listen(doors->unix_fd, b->size) != 0)
        return colo_endpoint_no_socket(b, errno);
    for (int i = 0; i < COLO_ADDRESSES; i++)
        if (!open_tcp[i])
            close_door(&doors->tcp[i]);
        else if (doors->tcp[i] >= 0 && listen(doors->tcp[i], b->size) != 0)
            return colo_endpoint_no_socket(b, errno);
    return COLO_OK;
}
