/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_address.c - a rank's endpoint, if one call of the system fails while it is made; and
 * endpoints of other ranks that do not fit.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/process/address.h"

#include <colobridge/version.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANK = 1, RANKS = 3 };

/* ---- calls of the system, one of which fails ---- */

static const char *broken; /* NULL: none */
static int left, broken_errno;

static bool fails(const char *call)
{
    if (!broken || strcmp(broken, call) != 0 || --left != 0)
        return false;
    errno = broken_errno;
    return true;
}

FILE *fopen(const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *);
    *(void **)&real = dlsym(RTLD_NEXT, "fopen");
    return fails("fopen") ? NULL : real(path, mode);
}

char *fgets(char *text, int size, FILE *f)
{
    char *(*real)(char *, int, FILE *);
    *(void **)&real = dlsym(RTLD_NEXT, "fgets");
    return fails("fgets") ? NULL : real(text, size, f);
}

int stat(const char *path, struct stat *s)
{
    return fails("stat") ? -1 : fstatat(AT_FDCWD, path, s, 0);
}

ssize_t getrandom(void *data, size_t bytes, unsigned flags)
{
    return fails("getrandom") ? -1 : (ssize_t)syscall(SYS_getrandom, data, bytes, flags);
}

int socket(int family, int type, int protocol)
{
    return fails("socket") ? -1 : (int)syscall(SYS_socket, family, type, protocol);
}

int bind(int fd, __CONST_SOCKADDR_ARG address, socklen_t size)
{
    return fails("bind") ? -1 : (int)syscall(SYS_bind, fd, address.__sockaddr__, size);
}

/* ---- this rank's endpoint ---- */

struct lack {
    const char *call;
    int nth, error;
    colo_status_t status;
    const char *why;
    bool host, name;
};

/* In a process of its own: the library reads the boot id once. */
static bool is_told(const struct lack *l)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = RANK, .size = RANKS};
    colo_endpoint_t e;
    int door, fd[RANKS];
    broken = l->call;
    left = l->nth;
    broken_errno = l->error;
    colo_endpoint_make(&b, true, &e, &door, fd);
    broken = NULL;
    const bool said = e.status == l->status && strstr(e.why, l->why) == e.why &&
                      (e.host != 0) == l->host && (e.name[0] != 0) == l->name;
    if (!said)
        fprintf(stderr, "%s %d: %s: \"%s\", host %d, name \"%s\"\n", l->call, l->nth,
                colo_status_name((colo_status_t)e.status), e.why, e.host != 0, e.name);
    return said && (l->status < 0 || (fd[0] >= 0 && fd[RANK] == -1 && fd[2] >= 0));
}

T_CASE(endpoint_tells_what_its_rank_lacks)
{
    static const char too_few[] = "rank 1 has too few descriptors for 2 connections";
    static const struct lack table[] = {
        {NULL, 0, 0, COLO_OK, "", true, true},
        {"getrandom", 1, ENOSYS, COLO_ERR_IO, "getrandom: ", false, false},
        {"getrandom", 2, ENOSYS, COLO_OK, "", true, false},
        {"fopen", 1, ENOENT, COLO_OK, "", false, true},
        {"fopen", 1, EMFILE, COLO_ERR_IO, too_few, false, false},
        {"fopen", 1, ENFILE, COLO_ERR_IO, too_few, false, false},
        {"fopen", 1, ENOMEM, COLO_ERR_NOMEM, "rank 1 of 3 cannot open a socket: ", false, false},
        {"fgets", 1, EIO, COLO_OK, "", false, true},
        {"stat", 1, EACCES, COLO_OK, "", false, true},
        {"socket", 1, EAFNOSUPPORT, COLO_OK, "", true, false},
        {"socket", 1, EMFILE, COLO_ERR_IO, too_few, true, false},
        {"socket", 1, ENOBUFS, COLO_ERR_NOMEM, "rank 1 of 3 cannot open a socket: ", true, false},
        {"bind", 1, EADDRINUSE, COLO_OK, "", true, false},
        {"bind", 1, ENOMEM, COLO_ERR_NOMEM, "rank 1 of 3 cannot open a socket: ", true, false},
        {"socket", 2, ENFILE, COLO_ERR_IO, too_few, true, true},
        {"socket", 3, ENOBUFS, COLO_ERR_NOMEM, "rank 1 of 3 cannot open a socket: ", true, true},
        {"socket", 5, EACCES, COLO_ERR_IO, "rank 1 of 3 cannot open a socket: ", true, true},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        int how = -1;
        const pid_t child = fork();
        if (child == 0)
            _exit(is_told(&table[i]) ? 0 : 1);
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_int_equal(how, 0);
    }
}

T_CASE(endpoint_tells_that_its_rank_lacks_memory)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = RANK, .size = RANKS};
    for (int enough = 0; enough < 2; enough++) { /* enough for all but the list of descriptors */
        colo_endpoint_t e;
        int door, fd[RANKS];
        colo_endpoint_make(&b, enough, &e, &door, enough ? NULL : fd);
        assert_int_equal(e.status, COLO_ERR_NOMEM);
        assert_string_equal(e.why, "rank 1 has no memory for 2 connections");
        assert_int_equal(door, -1);
    }
}

/* ---- endpoints of others ---- */

/* Where a rank of any other version reads them, too: never to be changed. */
T_CASE(hello_has_its_bytes_where_all_versions_have_them)
{
    static const uint8_t frozen[] = {0xcd, 0x5a, 0x10, 0xc0};
    const colo_hello_t hello =
        colo_endpoint_hello(&(colo_bootstrap_t){COLO_BOOTSTRAP_INIT, 3, 9, NULL, NULL});
    uint8_t found[32];
    uint32_t word[8];
    memcpy(found, &hello, sizeof found);
    memcpy(word, &hello, sizeof word);
    assert_int_equal(sizeof hello, 32);
    assert_memory_equal(found, frozen, 4);
    assert_int_equal(word[1], colo_version_number());
    assert_int_equal(word[2], 3);
    assert_int_equal(word[3], 9);
    assert_int_equal(word[4], sizeof(colo_endpoint_t));
    assert_int_equal(word[5] | word[6] | word[7], 0);
}

T_CASE(endpoints_that_do_not_fit_are_refused)
{
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = 0, .size = 2};
    for (int i = 0; i < 6; i++) {
        colo_endpoint_t e[2];
        for (int32_t r = 0; r < 2; r++)
            e[r] = (colo_endpoint_t){.hello = colo_endpoint_hello(&(colo_bootstrap_t){
                                         COLO_BOOTSTRAP_INIT, r, 2, NULL, NULL})};
        colo_hello_t *other = &e[1].hello;
        other->rank = i == 2 ? 0 : 1;
        other->size = i == 3 ? 3 : 2;
        other->version += i == 4;
        other->bytes += i == 5;
        if (i == 1)
            other->magic = 7;
        const colo_status_t st = colo_endpoint_check_all(&b, e);
        static const char *const words[] = {"",
                                            "does not hold what rank 1 brought",
                                            "comes from rank 0 of 2, expected rank 1 of 2",
                                            "comes from rank 1 of 3, expected rank 1 of 2",
                                            "rank 1 runs library version ",
                                            "than rank 0: its addresses have "};
        if (i == 0)
            assert_ok(st);
        else
            assert_fails(st, COLO_ERR_MISMATCH, words[i]);
    }
}

T_CASE(sockets_connect_ranks_of_one_host_unless_ucx_is_wanted)
{
    enum { A, B, C, D, E, F };
    const colo_endpoint_t e[] = {{.host = 1, .node = 1, .name = "a"},
                                 {.host = 1, .node = 1, .name = "b"},
                                 {.host = 2, .node = 1, .name = "c"},
                                 {.host = 1, .node = 2, .name = "d"},
                                 {.host = 1, .name = ""},
                                 {.name = "f"}};
    static const struct {
        int a, b;
        bool insists, near;
    } table[] = {{A, B, false, true},  {A, B, true, true},   {A, C, false, false},
                 {A, D, false, true},  {A, D, true, false},  {A, E, false, false},
                 {E, A, false, false}, {F, F, false, false}, {F, F, true, false}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (colo_endpoint_near(&e[table[i].a], &e[table[i].b], table[i].insists) != table[i].near)
            fail_msg("pair %d", (int)i);
    const colo_endpoint_t alone = {.host = 1, .name = "g"}; /* of no node */
    assert_true(colo_endpoint_near(&alone, &e[A], false));
    assert_false(colo_endpoint_near(&alone, &alone, true));
}

T_MAIN("comm/address")
