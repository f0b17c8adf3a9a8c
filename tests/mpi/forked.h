/* SPDX-License-Identifier: Apache-2.0 */
/* forked.h - ranks in forked processes that share a page: an all-gather over it, and verdicts. */
#ifndef TESTS_MPI_FORKED_H
#define TESTS_MPI_FORKED_H

#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/process/address.h"
#include "core/error.h"

#include <colobridge/bootstrap.h>

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { T_FORKED_MAX = 8, T_FORKED_ENDPOINT = 4096 };

typedef struct t_page {
    int32_t size;
    _Atomic int32_t arrived;
    unsigned char endpoint[2][T_FORKED_MAX][T_FORKED_ENDPOINT];
    colo_status_t status[T_FORKED_MAX];
    char error_message[T_FORKED_MAX][1000];
    double seconds[T_FORKED_MAX]; /* from the all-gather to the verdict */
    double gathered[T_FORKED_MAX];
    _Atomic bool noted[T_FORKED_MAX]; /* there is a verdict */
    pid_t child;                      /* of a rank; the test's */
} t_page_t;

/* One rank. */
typedef struct t_forked {
    t_page_t *page;
    int32_t rank, calls;
    void (*after)(struct t_forked *me, void *endpoints, size_t bytes); /* they came; or NULL */
    colo_comm_t *pair; /* that t_live_by()'s body may make; it ends after the verdict */
} t_forked_t;

static inline colo_status_t t_over_page(void *user, const void *send, void *recv, size_t bytes)
{
    t_forked_t *me = user;
    t_page_t *page = me->page;
    unsigned char(*endpoint)[T_FORKED_ENDPOINT] = page->endpoint[me->calls++ % 2];
    memcpy(endpoint[me->rank], send, bytes);
    atomic_fetch_add(&page->arrived, 1);
    const double end = colo_now() + 8;
    while (atomic_load(&page->arrived) < me->calls * page->size && colo_now() < end)
        usleep(1000);
    if (atomic_load(&page->arrived) < me->calls * page->size)
        return colo_fail(COLO_ERR_TIMEOUT, "rank %d: not all ranks came to the all-gather",
                         (int)me->rank);
    for (int32_t r = 0; r < page->size; r++)
        memcpy((char *)recv + (size_t)r * bytes, endpoint[r], bytes);
    if (me->after && bytes != sizeof(colo_hello_t))
        me->after(me, recv, bytes);
    page->gathered[me->rank] = colo_now();
    return COLO_OK;
}

static inline colo_bootstrap_t t_bootstrap(t_forked_t *me)
{
    return (colo_bootstrap_t){COLO_BOOTSTRAP_INIT, me->rank, me->page->size, t_over_page, me};
}

static inline void t_note(t_forked_t *me, colo_status_t st)
{
    t_page_t *page = me->page;
    page->seconds[me->rank] = colo_now() - page->gathered[me->rank];
    page->status[me->rank] = st;
    snprintf(page->error_message[me->rank], sizeof page->error_message[0], "%s",
             st < 0 ? colo_last_error() : "");
    atomic_store(&page->noted[me->rank], true);
}

/* A whole life: create, what @body does, its verdict, destroy. */
typedef colo_status_t (*t_life_fn)(t_forked_t *me, colo_comm_t *world);
static inline void t_live_by(t_forked_t *me, t_life_fn body)
{
    const colo_bootstrap_t b = t_bootstrap(me);
    colo_comm_t *world = NULL;
    const colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    t_note(me, st == COLO_OK ? body(me, world) : st);
    colo_comm_destroy(&me->pair);
    colo_comm_destroy(&world);
}

/* The life of a rank of which this is the body. */
#define T_LIFE(name)                                                           \
    static colo_status_t t_life_of_##name(t_forked_t *me, colo_comm_t *world); \
    static void name(t_forked_t *me)                                           \
    {                                                                          \
        t_live_by(me, t_life_of_##name);                                       \
    }                                                                          \
    static colo_status_t t_life_of_##name(t_forked_t *me, colo_comm_t *world)

/* A sum of all ranks. */
static inline colo_status_t t_sum(t_forked_t *me, colo_comm_t *world)
{
    float x = 1;
    rank_try(colo_comm_all_reduce(world, &x, &x, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_check(x == (float)me->page->size);
    return COLO_OK;
}

static inline void t_live(t_forked_t *me)
{
    t_live_by(me, t_sum);
}

/* A page for @n ranks; it is there until the next one. */
static inline t_page_t *t_new_page(int32_t n)
{
    static t_page_t *page;
    if (page)
        munmap(page, sizeof *page);
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(page != MAP_FAILED);
    page->size = n;
    fflush(NULL);
    return page;
}

/* Runs @fn on @n ranks, of which @killed, if any, kills itself. */
static inline t_page_t *t_fork_mortals(int32_t n, void (*fn)(t_forked_t *me), int32_t killed)
{
    t_page_t *page = t_new_page(n);
    pid_t pid[T_FORKED_MAX];
    for (int32_t r = 0; r < n; r++) {
        pid[r] = fork();
        assert_true(pid[r] >= 0);
        if (pid[r] == 0) {
            t_forked_t me = {.page = page, .rank = r};
            page->gathered[r] = colo_now();
            fn(&me);
            _exit(0);
        }
    }
    for (int32_t r = 0; r < n; r++) {
        int status = 1;
        assert_int_equal(waitpid(pid[r], &status, 0), pid[r]);
        if (status != (r == killed ? SIGKILL : 0))
            fail_msg("rank %d ended with status 0x%x", (int)r, (unsigned)status);
    }
    return page;
}

static inline t_page_t *t_fork_ranks(int32_t n, void (*fn)(t_forked_t *me))
{
    return t_fork_mortals(n, fn, -1);
}

/* The same with COLO_TIMEOUT_MS. */
static inline t_page_t *t_fork_within(int64_t ms, int32_t n, void (*fn)(t_forked_t *me))
{
    setenv("COLO_TIMEOUT_MS", t_text("%lld", (long long)ms), 1);
    t_page_t *page = t_fork_ranks(n, fn);
    unsetenv("COLO_TIMEOUT_MS");
    return page;
}

static inline void t_expect(const t_page_t *page, int32_t r, colo_status_t status, const char *text)
{
    if (page->status[r] != status || !strstr(page->error_message[r], text))
        fail_msg("rank %d: %s: \"%s\", expected %s: \"%s\"", (int)r,
                 colo_status_name(page->status[r]), page->error_message[r],
                 colo_status_name(status), text);
}

static inline void t_expect_all(const t_page_t *page, colo_status_t status, const char *text)
{
    for (int32_t r = 0; r < page->size; r++)
        t_expect(page, r, status, text);
}

/* Each of @n ranks notes COLO_OK. */
static inline void t_all_well(int32_t n, void (*fn)(t_forked_t *me))
{
    t_expect_all(t_fork_ranks(n, fn), COLO_OK, "");
}

/* A case whose body each of @n ranks runs and notes. */
#define T_CASE_ON_FORKED(n, name)                \
    static void t_forked_##name(t_forked_t *me); \
    T_CASE(name)                                 \
    {                                            \
        t_all_well(n, t_forked_##name);          \
    }                                            \
    static void t_forked_##name(t_forked_t *me)

#endif
