/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.c - where a rank can be reached: its endpoint for the all-gather, and its door.
 *
 * The door is bound before the all-gather, because its name belongs on the endpoint, and listens
 * after it, if the endpoints tell that ranks of this host will call.
 */
#include "comm/process/address.h"

#include "comm/comm.h"
#include "comm/process/transport-unix.h"
#include "core/env.h"
#include "core/error.h"
#include "core/host.h"

#include <colobridge/version.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

static const char CALL[] = "create_bootstrap: "; /* begins every error message here */
enum { SPARE = 2 }; /* descriptors beyond a connection for each peer: callers not known yet */

colo_status_t colo_endpoint_no_socket(const colo_bootstrap_t *boot, int error)
{
    struct rlimit limit = {0, 0};
    COLO_FAIL_IF(error != EMFILE && error != ENFILE,
                 error == ENOMEM || error == ENOBUFS ? COLO_ERR_NOMEM : COLO_ERR_IO,
                 "create_bootstrap: rank %d of %d cannot open a socket: %s", (int)boot->rank,
                 (int)boot->size, strerror(error));
    getrlimit(RLIMIT_NOFILE, &limit);
    return colo_fail(
        COLO_ERR_IO,
        "create_bootstrap: rank %d has too few descriptors for %d connections: %s; its "
        "limit is %lld, raise it (ulimit -n) or close files",
        (int)boot->rank, (int)boot->size - 1, strerror(error), (long long)limit.rlim_cur);
}

/* ---- this rank's endpoint ---- */

static socklen_t abstract(const char *name, size_t n, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

socklen_t colo_endpoint_address(const colo_endpoint_t *to, struct sockaddr_un *address)
{
    return abstract(to->name, strnlen(to->name, sizeof to->name), address);
}

/* That rank @rank knows the token of @of. */
static uint64_t knows(const colo_endpoint_t *of, int32_t rank)
{
    return colo_hash_i64(colo_hash_bytes(COLO_HASH_INIT, of->token, COLO_TOKEN), rank);
}

uint64_t colo_endpoint_answer(const colo_endpoint_t *caller, int32_t answerer)
{
    return colo_hash_i64(knows(caller, answerer), COLO_ENDPOINT_MAGIC);
}

socklen_t colo_endpoint_caller(const colo_endpoint_t *to, int32_t caller, uint64_t nonce,
                               struct sockaddr_un *address)
{
    char name[64]; /* with a hash of the token: names are no secret */
    const uint64_t proof = colo_hash_i64(knows(to, caller), (int64_t)nonce);
    const int n = snprintf(name, sizeof name, "colobridge-%d-%016llx-%016llx", (int)caller,
                           (unsigned long long)nonce, (unsigned long long)proof);
    return abstract(name, (size_t)n, address);
}

int32_t colo_endpoint_rank(const struct sockaddr_un *address, socklen_t size, uint64_t *nonce)
{
    char name[sizeof *address + 1] = "";
    unsigned long long found = 0;
    int rank = -1;
    memcpy(name, address, size <= sizeof *address ? size : 0);
    const int n = sscanf(name + offsetof(struct sockaddr_un, sun_path) + 1, "colobridge-%d-%16llx-",
                         &rank, &found);
    *nonce = found;
    return n == 2 ? rank : -1;
}

/* Returns a shortage, or 0. Without Unix sockets the name stays empty. */
static int bind_door(colo_endpoint_t *endpoint, int *door)
{
    struct sockaddr_un address;
    uint64_t random[2] = {0, 0}; /* not the token: names are no secret */
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return 0;
    snprintf(endpoint->name, sizeof endpoint->name, "colobridge-%016llx%016llx",
             (unsigned long long)random[0], (unsigned long long)random[1]);
    socklen_t size = colo_endpoint_address(endpoint, &address);
    *door = colo_socket_open();
    if (*door >= 0 && bind(*door, (struct sockaddr *)&address, size) == 0)
        return 0;
    endpoint->name[0] = '\0';
    return colo_host_shortage(errno);
}

static colo_status_t make(const colo_bootstrap_t *boot, colo_endpoint_t *endpoint, int *door,
                          int *fd)
{
    const char *names = "";
    (void)colo_env_text("COLO_NODE", &names);
    if (names[0])
        (void)colo_node_id(boot->rank, boot->size, &endpoint->node);
    COLO_FAIL_IF(getrandom(endpoint->token, COLO_TOKEN, 0) != COLO_TOKEN, COLO_ERR_IO,
                 "create_bootstrap: getrandom: %s", strerror(errno));
    int error = colo_host_sockets(&endpoint->host);
    if (!error)
        error = bind_door(endpoint, door);
    if (error)
        return colo_endpoint_no_socket(boot, error);
    int spare[SPARE];
    for (int i = 0; i < SPARE; i++)
        spare[i] = -1;
    for (int32_t r = 0; r < boot->size + SPARE && !error; r++) {
        int *place = r < boot->size ? &fd[r] : &spare[r - boot->size];
        if (r != boot->rank && (*place = colo_socket_open()) < 0)
            error = errno;
    }
    for (int i = 0; i < SPARE; i++)
        colo_socket_close(spare[i]);
    return error ? colo_endpoint_no_socket(boot, error) : COLO_OK;
}

colo_hello_t colo_endpoint_hello(const colo_bootstrap_t *boot)
{
    return (colo_hello_t){.magic = COLO_ENDPOINT_MAGIC,
                          .version = colo_version_number(),
                          .rank = boot->rank,
                          .size = boot->size,
                          .bytes = sizeof(colo_endpoint_t)};
}

void colo_endpoint_make(const colo_bootstrap_t *boot, bool enough, colo_endpoint_t *endpoint,
                        int *door, int *fd)
{
    memset(endpoint, 0, sizeof *endpoint);
    endpoint->hello = colo_endpoint_hello(boot);
    *door = -1;
    for (int32_t r = 0; fd && r < boot->size; r++)
        fd[r] = -1;
    colo_status_t st = enough && fd ? make(boot, endpoint, door, fd)
                                    : colo_fail(COLO_ERR_NOMEM,
                                                "create_bootstrap: rank %d has no memory for %d "
                                                "connections",
                                                (int)boot->rank, (int)boot->size - 1);
    if (st < 0)
        colo_endpoint_set_error(endpoint, st);
}

void colo_endpoint_set_error(colo_endpoint_t *endpoint, colo_status_t status)
{
    endpoint->status = status;
    snprintf(endpoint->why, sizeof endpoint->why, "%s", colo_last_error() + strlen(CALL));
}

/* ---- all endpoints ---- */

colo_status_t colo_endpoint_check_hello(const colo_bootstrap_t *boot, const colo_hello_t *hello,
                                        size_t stride)
{
    const colo_hello_t *first = hello, *other;
    for (int32_t r = 0; r < boot->size; r++) {
        other = (const colo_hello_t *)(const void *)((const char *)hello + (size_t)r * stride);
        COLO_FAIL_IF(other->magic != COLO_ENDPOINT_MAGIC, COLO_ERR_MISMATCH,
                     "create_bootstrap: entry %d of the all-gather does not hold what rank %d "
                     "brought; rank r's bytes belong at recv + r * bytes",
                     (int)r, (int)r);
        COLO_FAIL_IF(other->rank != r || other->size != boot->size, COLO_ERR_MISMATCH,
                     "create_bootstrap: entry %d of the all-gather comes from rank %d of %d, "
                     "expected rank %d of %d",
                     (int)r, (int)other->rank, (int)other->size, (int)r, (int)boot->size);
        COLO_FAIL_IF(other->version != first->version, COLO_ERR_MISMATCH,
                     "create_bootstrap: rank %d runs library version %u.%u.%u, rank 0 "
                     "%u.%u.%u",
                     (int)r, (unsigned)(other->version >> 16),
                     (unsigned)(other->version >> 8 & 0xff), (unsigned)(other->version & 0xff),
                     (unsigned)(first->version >> 16), (unsigned)(first->version >> 8 & 0xff),
                     (unsigned)(first->version & 0xff));
        COLO_FAIL_IF(other->bytes != first->bytes, COLO_ERR_MISMATCH,
                     "create_bootstrap: rank %d runs another build of library version %u.%u.%u "
                     "than rank 0: its addresses have %u bytes, rank 0's %u",
                     (int)r, (unsigned)(other->version >> 16),
                     (unsigned)(other->version >> 8 & 0xff), (unsigned)(other->version & 0xff),
                     (unsigned)other->bytes, (unsigned)first->bytes);
    }
    return COLO_OK;
}

colo_status_t colo_endpoint_check_all(const colo_bootstrap_t *boot, const colo_endpoint_t *endpoint)
{
    COLO_TRY(colo_endpoint_check_hello(boot, &endpoint->hello, sizeof *endpoint));
    if (endpoint[boot->rank].status < 0) /* its own error before that of any other */
        return colo_fail((colo_status_t)endpoint[boot->rank].status, "%s%.*s", CALL,
                         (int)sizeof endpoint[boot->rank].why, endpoint[boot->rank].why);
    for (int32_t r = 0; r < boot->size; r++)
        COLO_FAIL_IF(endpoint[r].status < 0, COLO_ERR_PEER,
                     "create_bootstrap: rank %d failed: %.*s", (int)r, (int)sizeof endpoint[r].why,
                     endpoint[r].why);
    return COLO_OK;
}

bool colo_endpoint_near(const colo_endpoint_t *a, const colo_endpoint_t *b, bool insists)
{
    return a->host != 0 && a->host == b->host && a->name[0] && b->name[0] &&
           (!insists || (a->node != 0 && a->node == b->node));
}
