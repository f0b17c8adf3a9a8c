/* SPDX-License-Identifier: Apache-2.0 */
/* four.h - four forked processes that meet in memory, and what each of them saw. */
#ifndef TESTS_MPI_FOUR_H
#define TESTS_MPI_FOUR_H

#include "harness/harness.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct last { /* in memory that both sides of fork() share */
    colo_status_t status[4];
    char error_message[4][1000];
    double seconds[4];
    pid_t child; /* of the one that dies */
    _Atomic int32_t arrived;
    char endpoints[2][4][4096];
};

struct seat {
    struct last *last;
    int32_t rank, calls;
};

static inline colo_status_t over_memory(void *user, const void *send, void *recv, size_t bytes)
{
    struct seat *s = user;
    char(*endpoints)[4096] = s->last->endpoints[s->calls++ % 2];
    memcpy(endpoints[s->rank], send, bytes);
    atomic_fetch_add(&s->last->arrived, 1);
    while (atomic_load(&s->last->arrived) < 4 * s->calls)
        usleep(1000);
    for (int r = 0; r < 4; r++)
        memcpy((char *)recv + (size_t)r * bytes, endpoints[r], bytes);
    return COLO_OK;
}

/* Four processes; rank @killed, if any, ends so. To be unmapped. */
static inline struct last *run_four(void (*fn)(struct last *last, int32_t me), int32_t killed)
{
    struct last *last =
        mmap(NULL, sizeof *last, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid[4];
    assert_true(last != MAP_FAILED);
    fflush(NULL);
    for (int32_t r = 0; r < 4; r++) {
        pid[r] = fork();
        if (pid[r] == 0)
            fn(last, r);
        assert_true(pid[r] > 0);
    }
    for (int32_t r = 0; r < 4; r++) {
        int status = 0;
        assert_int_equal(waitpid(pid[r], &status, 0), pid[r]);
        assert_int_equal(status, r == killed ? SIGKILL : 0);
    }
    return last;
}

#endif
