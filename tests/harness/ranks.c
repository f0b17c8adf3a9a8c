/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.c - see ranks.h. After a run on processes each rank compares its memory with what it was
 * before: the bytes that changed are what that rank wrote, and it puts them into the result, which
 * all ranks share.
 */
#include "harness/ranks.h"

#include "harness/structs.h"

#include "comm/comm.h"
#include "core/backend.h"
#include "core/error.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS, SOCKETS, UCX, MIXED, LATER = 24 };

struct region {
    void *data;
    size_t bytes;
};
static struct region *shared;
static int nshared, capacity;

struct report { /* of one rank */
    colo_status_t status;
    char error_message[1100];
};

enum { CARD = 4096 };
struct board { /* in memory that all processes share; what it points to follows */
    _Atomic int32_t arrived;
    int32_t size;
    struct report *report; /* [size] */
    unsigned char *cards;  /* two sets of them */
    unsigned char *result; /* the regions, one after the other */
};

/* ---- which ---- */

/* This one backend, once; tests that look for others find what they find on threads. */
static void load_ucx(void)
{
    const colo_backend_t *backend = NULL;
    const char *was = getenv("COLO_BACKEND_DIR");
    char *kept = was ? strdup(was) : NULL;
    setenv("COLO_BACKEND_DIR", T_BACKENDS, 1);
    if (colo_backend_load("ucx", &backend) < 0) {
        fprintf(stderr, "test: UCX: %s\n", colo_last_error());
        exit(1);
    }
    if (kept)
        setenv("COLO_BACKEND_DIR", kept, 1);
    else
        unsetenv("COLO_BACKEND_DIR");
    free(kept);
}

static int kind(void)
{
    static int known = -1;
    if (known >= 0)
        return known;
    const char *text = getenv("T_RANKS");
    if (!text || strcmp(text, "threads") == 0) {
        known = THREADS;
    } else if (strcmp(text, "sockets") == 0) {
        known = SOCKETS;
    } else if (strcmp(text, "ucx") == 0 || strcmp(text, "mixed") == 0) {
        known = strcmp(text, "ucx") == 0 ? UCX : MIXED;
        load_ucx();
        setenv("COLO_TRANSPORT", "ucx", 1);
    } else {
        fprintf(stderr, "test: T_RANKS=%s, expected threads, sockets, ucx or mixed\n", text);
        exit(1);
    }
    return known;
}

/* Before CMocka prints its first line. */
__attribute__((constructor)) static void choose(void)
{
    kind();
}

bool t_ranks_are_threads(void)
{
    return kind() == THREADS;
}

void t_share(void *data, size_t bytes)
{
    if (nshared == capacity) {
        capacity += 64;
        shared = realloc(shared, (size_t)capacity * sizeof *shared);
        if (!shared)
            abort();
    }
    shared[nshared++] = (struct region){data, bytes};
}

void t_unshare(void *data)
{
    for (int i = 0; i < nshared; i++)
        if (shared[i].data == data)
            shared[i--] = shared[--nshared];
}

/* ---- memory of ranks ---- */

static size_t all_bytes(void)
{
    size_t n = 0;
    for (int i = 0; i < nshared; i++)
        n += shared[i].bytes;
    return n;
}

static void save(unsigned char *to)
{
    for (int i = 0; i < nshared; to += shared[i++].bytes)
        if (shared[i].bytes)
            memcpy(to, shared[i].data, shared[i].bytes);
}

static void load(const unsigned char *from)
{
    for (int i = 0; i < nshared; from += shared[i++].bytes)
        if (shared[i].bytes)
            memcpy(shared[i].data, from, shared[i].bytes);
}

static void save_changes(const unsigned char *restrict before, unsigned char *restrict to)
{
    for (int i = 0; i < nshared; i++) {
        const unsigned char *restrict now = shared[i].data;
        const size_t n = shared[i].bytes;
        for (size_t k = 0; k < n; k++)
            if (now[k] != before[k])
                to[k] = now[k];
        before += n;
        to += n;
    }
}

/* The error that a rank made by itself before those that were handed on. */
static colo_status_t judge(const struct board *b)
{
    const struct report *worst = NULL;
    for (const struct report *p = b->report; p < b->report + b->size; p++)
        if (p->status < 0 &&
            (!worst || (worst->status == COLO_ERR_PEER && p->status != COLO_ERR_PEER)))
            worst = p;
    return worst ? colo_fail(worst->status, "rank %d: %s", (int)(worst - b->report),
                             worst->error_message)
                 : COLO_OK;
}

/* ---- one rank ---- */

static void run_one(colo_status_t made, colo_comm_t *world, colo_rank_fn fn, void *arg,
                    struct report *report)
{
    colo_status_t st = made;
    if (st == COLO_OK)
        st = fn(world, arg);
    report->status = st;
    if (st < 0)
        snprintf(report->error_message, sizeof report->error_message, "%s", colo_last_error());
    if (world && st < 0 && colo_comm_check(world) == COLO_OK)
        colo_comm_fail(world, st); /* no rank should wait for this one in vain */
    colo_comm_destroy(&world);
}

/* ---- sockets and UCX ---- */

struct seat {
    struct board *board;
    int32_t rank, calls;
};

static colo_status_t over_board(void *user, const void *send, void *recv, size_t bytes)
{
    struct seat *seat = user;
    struct board *b = seat->board;
    const int32_t all = ++seat->calls * b->size;
    unsigned char *cards = b->cards + (size_t)(seat->calls % 2 * b->size) * CARD;
    memcpy(cards + (size_t)seat->rank * bytes, send, bytes);
    atomic_fetch_add(&b->arrived, 1);
    for (int polls = 0; atomic_load(&b->arrived) < all; polls++) {
        if (polls > 60000)
            return colo_fail(COLO_ERR_TIMEOUT, "test: a rank did not come to the board");
        usleep(1000);
    }
    memcpy(recv, cards, bytes * (size_t)b->size);
    return COLO_OK;
}

static void child_main(int32_t rank, struct board *board, colo_rank_fn fn, void *arg,
                       const unsigned char *before)
{
    struct seat seat = {board, rank, 0};
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = rank, .size = board->size,
                          .all_gather = over_board, .user = &seat};
    colo_comm_t *world = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kind() == MIXED && !getenv("COLO_NODE")) /* two nodes, of which neither is a run of ranks */
        setenv("COLO_NODE", rank % 4 % 3 ? "1" : "0", 1);
    colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    run_one(st, world, fn, arg, &board->report[rank]);
    save_changes(before, board->result);
    fflush(NULL);
    _exit(0);
}

static void run_forked(struct board *board, colo_rank_fn fn, void *arg, const unsigned char *before)
{
    pid_t *pid = calloc((size_t)board->size, sizeof *pid);
    if (!pid)
        abort();
    fflush(NULL);
    for (int32_t r = 0; r < board->size; r++) {
        pid[r] = fork();
        if (pid[r] == 0)
            child_main(r, board, fn, arg, before);
    }
    for (int32_t r = 0; r < board->size; r++) {
        struct report *report = &board->report[r];
        int status = 0;
        if (pid[r] > 0 && waitpid(pid[r], &status, 0) == pid[r] && WIFEXITED(status) &&
            WEXITSTATUS(status) == 0)
            continue;
        report->status = COLO_ERR_STATE;
        snprintf(report->error_message, sizeof report->error_message,
                 "the process ended with status 0x%x", (unsigned)status);
    }
    free(pid);
}

/* ---- all ---- */

colo_status_t t_run_ranks(int32_t n, colo_rank_fn fn, void *arg, size_t bytes)
{
    if (kind() == THREADS)
        return colo_comm_threads_run(n, fn, arg);
    if (n < 1)
        return colo_fail(COLO_ERR_ARG, "test: %d ranks, expected 1 or more", (int)n);
    if (bytes)
        t_share(arg, bytes);
    const size_t ranks = (size_t)n, size = sizeof(struct board) +
                                           ranks * (sizeof(struct report) + 2 * CARD) + all_bytes();
    struct board *board =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unsigned char *before = malloc(all_bytes() + 1);
    if (board == MAP_FAILED || !before)
        abort();
    board->size = n;
    board->report = (struct report *)(board + 1);
    board->cards = (unsigned char *)(board->report + n);
    board->result = board->cards + ranks * 2 * CARD;
    save(before);
    save(board->result);
    run_forked(board, fn, arg, before);
    load(board->result);
    colo_status_t st = judge(board);
    if (bytes)
        t_unshare(arg);
    free(before);
    munmap(board, size);
    return st;
}

colo_status_t t_run_sizes(colo_rank_fn fn, void *arg)
{
    static const int32_t sizes[] = {1, 2, 3, 8};
    colo_status_t st = COLO_OK;
    for (int i = 0; i < 4 && st >= 0; i++)
        st = t_run_ranks(sizes[i], fn, arg, 0);
    return st;
}

/* ---- many ---- */

struct later {
    colo_rank_fn fn;
    void *arg;
    void (*after)(void *arg, colo_status_t st);
};
struct queue {
    int n;
    struct later of[LATER];
};
static struct queue later[T_LATER_RANKS + 1]; /* by the number of ranks */

static colo_status_t each(colo_comm_t *world, void *arg)
{
    const struct queue *q = arg;
    colo_status_t st = COLO_OK;
    for (int i = 0; i < q->n && st >= 0; i++)
        st = q->of[i].fn(world, q->of[i].arg);
    return st;
}

static void run_queue(int32_t nranks)
{
    struct queue q = later[nranks];
    later[nranks].n = 0; /* first: a case that fails does not come back */
    if (q.n == 0)
        return;
    colo_status_t st = t_run_ranks(nranks, each, &q, 0);
    for (int i = 0; i < q.n; i++)
        t_unshare(q.of[i].arg);
    for (int i = 0; i < q.n; i++)
        q.of[i].after(q.of[i].arg, st);
}

void t_run_later(int32_t nranks, colo_rank_fn fn, void *arg, size_t bytes,
                 void (*after)(void *arg, colo_status_t st))
{
    if (nranks < 1 || nranks > T_LATER_RANKS)
        abort();
    struct queue *q = &later[nranks];
    if (bytes)
        t_share(arg, bytes);
    q->of[q->n++] = (struct later){fn, arg, after};
    if (q->n == LATER)
        run_queue(nranks);
}

void t_run_rest(void)
{
    for (int32_t n = 0; n <= T_LATER_RANKS; n++)
        run_queue(n);
}

__attribute__((destructor)) static void nothing_is_left(void)
{
    free(shared);
    for (int32_t n = 0; n <= T_LATER_RANKS; n++)
        if (later[n].n) {
            fprintf(stderr, "test: %d cases were never run: t_run_rest() is missing\n", later[n].n);
            _exit(1);
        }
}
