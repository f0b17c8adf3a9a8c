/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drill_host.c - ranks of a drill that are threads or processes, with tensors in host memory: over
 * shared memory; Unix sockets or UCX, in processes that fork. See drill.h.
 */
#include "faults/drill.h"

#include "faults/culprit.h"

#include <colobridge/bootstrap.h>

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

const char transports[] = "threads|sockets|ucx";

/* ---- host memory ---- */

colo_status_t place_tensor(struct rank *r, colo_tensor_t *t, size_t bytes)
{
    return COLO_OK;
}

colo_status_t sum_ranks(struct rank *r, colo_comm_t *c, float *sum)
{
    const float one = 1;
    return colo_comm_all_reduce(c, &one, sum, 1, COLO_F32, COLO_REDOP_SUM, NULL);
}

colo_status_t wait_ended(struct rank *r, colo_status_t st)
{
    return st;
}

void burden_device(struct rank *r, colo_comm_t *pair)
{
    (void)r;
    (void)pair;
}

void enter_thread(struct rank *r)
{
}

static colo_status_t work_over(struct rank *r, colo_comm_t *world)
{
    r->world = r->sums = world;
    return work(r);
}

/* A communicator of the @n ranks that live can be used. */
static void work_again(struct rank *r, colo_comm_t *fresh, int32_t n)
{
    double one = 1, sum = 0;
    const double begin = colo_now();
    colo_status_t st = colo_comm_set_timeout(fresh, PATIENCE_MS);
    if (st == COLO_OK)
        st = colo_comm_all_reduce(fresh, &one, &sum, 1, COLO_F64, COLO_REDOP_SUM, NULL);
    if (st == COLO_OK && sum != n)
        st = colo_fail(COLO_ERR_CONTRACT, "the sum is %g, expected %d", sum, (int)n);
    report(r, "fresh", st, begin);
}

/* ---- threads ---- */

static colo_status_t one_rank(colo_comm_t *world, void *arg)
{
    const bool again = *(bool *)arg;
    struct rank r;
    if (!open_rank(&r, colo_comm_rank(world)))
        return COLO_ERR_IO;
    colo_status_t st = COLO_OK;
    if (again)
        work_again(&r, world, RANKS);
    else
        st = work_over(&r, world);
    fclose(r.out);
    return again || st == COLO_OK ? st : COLO_OK; /* each rank ends by itself */
}

static void run_threads(void)
{
    const bool memory = strcmp(fault, "memory") == 0 && strcmp(step, "run") == 0;
    struct rank all[RANKS];
    for (int32_t me = 0; memory && me < RANKS; me++)
        if (!open_rank(&all[me], me))
            exit(1);
    if (memory)
        limit_address_space(0);
    const double begin = colo_now();
    const colo_status_t st = colo_comm_threads_run(RANKS, one_rank, &(bool){false});
    for (int32_t me = 0; memory && me < RANKS; me++) { /* no rank ran: its caller has the error */
        report(&all[me], "run", st, begin);
        fclose(all[me].out);
    }
    (void)colo_comm_threads_run(RANKS, one_rank, &(bool){true});
}

/* ---- processes ---- */

struct page {
    _Atomic int32_t arrived[2];
    unsigned char card[2][2][RANKS][4096]; /* of two all-gathers in turn */
};

struct caller {
    struct page *page;
    int32_t which, rank, size, calls;
};

static void die_in_create(const struct caller *c, const char *now)
{
    if (c->which == 0 && c->rank == CULPRIT && strcmp(step, now) == 0) {
        report_fault();
        raise(SIGKILL);
    }
}

/* Its deadline is that of the job if a rank does not come to it. */
static colo_status_t gather(void *user, const void *send, void *recv, size_t bytes)
{
    struct caller *c = user;
    const bool misses = strcmp(step, "gather") == 0 || strcmp(step, "workers") == 0;
    const int most = c->which == 0 && misses ? deadline_ms : PATIENCE_MS;
    enum { HELLO, ADDRESS, WORKER };
    die_in_create(c, c->calls < WORKER ? "gather" : "workers");
    unsigned char(*card)[4096] = c->page->card[c->which][c->calls++ % 2];
    memcpy(card[c->rank], send, bytes);
    atomic_fetch_add(&c->page->arrived[c->which], 1);
    const double end = colo_now() + most / 1e3;
    while (atomic_load(&c->page->arrived[c->which]) < c->size * c->calls) {
        if (colo_now() > end)
            return colo_fail(COLO_ERR_TIMEOUT, "the drill's all-gather: a rank did not come");
        usleep(1000);
    }
    if (c->calls > ADDRESS)
        die_in_create(c, "connect");
    if (c->which == 0 && c->rank == CULPRIT && strcmp(fault, "killed") == 0) {
        /* Sockets: it calls two ranks and answers one, then sends frames. UCX: it answers one. */
        if (strcmp(step, "mid-connect") == 0)
            sends_to_live = 2;
        else if (strcmp(step, "environment") == 0)
            sends_to_live = getenv("COLO_TRANSPORT") ? 2 : 4;
    }
    for (int32_t k = 0; k < c->size; k++)
        memcpy((char *)recv + (size_t)k * bytes, card[k], bytes);
    return COLO_OK;
}

static bool culprit_dies(void)
{
    return strncmp(fault, "killed", 6) == 0 || strcmp(fault, "exits") == 0;
}

static colo_status_t make_world(struct page *page, int32_t which, int32_t me, int32_t size,
                                colo_comm_t **world)
{
    struct caller caller = {page, which, me, size, 0};
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, me, size, gather, &caller};
    return colo_comm_create_bootstrap(&b, world);
}

static int process(struct page *page, int32_t me)
{
    struct rank r;
    struct rlimit limit;
    colo_comm_t *world = NULL, *fresh = NULL;
    if (!open_rank(&r, me))
        return 1;
    setenv("COLO_NODE", me < RANKS / 2 ? "0" : "1", 1); /* matters with UCX */
    const bool descriptors = is(&r, "descriptors");
    if (r.me == CULPRIT && strcmp(step, "world") == 0)
        report_fault();
    if (is(&r, "environment"))
        setenv("COLO_CHECK", "3", 1);
    if (is(&r, "version"))
        next_version = 1;
    if (descriptors) {
        getrlimit(RLIMIT_NOFILE, &limit);
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){6, limit.rlim_max});
    }
    if (is(&r, "memory") && strcmp(step, "world") == 0)
        limit_address_space(256 << 10); /* and the tables that it brings to the others */
    const double begin = colo_now();
    colo_status_t st = make_world(page, 0, me, RANKS, &world);
    if (st < 0)
        report(&r, "world", st, begin);
    else
        (void)work_over(&r, world);
    const double end = colo_now();
    colo_comm_destroy(&world);
    report(&r, "destroy", COLO_OK, end);
    if (descriptors)
        setrlimit(RLIMIT_NOFILE, &limit);
    unsetenv("COLO_CHECK");
    next_version = 0;
    const int32_t live = RANKS - culprit_dies(), rank = me - (culprit_dies() && me > CULPRIT);
    const double fresh_begin = colo_now();
    st = make_world(page, 1, rank, live, &fresh);
    if (st < 0)
        report(&r, "fresh", st, fresh_begin);
    else
        work_again(&r, fresh, live);
    colo_comm_destroy(&fresh);
    return 0;
}

static void run_processes(void)
{
    char patience[24];
    snprintf(patience, sizeof patience, "%d", PATIENCE_MS);
    setenv("COLO_TIMEOUT_MS", patience, 1);
    struct page *page =
        mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        exit(1);
    for (int32_t me = 0; me < RANKS; me++)
        if (fork() == 0)
            _exit(process(page, me));
    while (wait(NULL) > 0)
        ;
}

int run_worlds(const char *transport)
{
    const bool ucx = strcmp(transport, "ucx") == 0;
    if (ucx)
        setenv("COLO_TRANSPORT", "ucx", 1);
    if (ucx || strcmp(transport, "sockets") == 0) {
        run_processes();
        return 0;
    }
    run_threads();
    return 0;
}
