/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sweep.c - the totals of a plan, by planning every rank.
 *
 * A plan is local to a rank and costs O(peers), so the only exact way to a maximum over ranks is to
 * ask each of them. One thread counts a small world, a few count a large one, taking chunks from a
 * counter (plans are immutable and share nothing). Sums and maxima do not depend on the order, so
 * the result does not either. When it takes longer than two seconds, stderr says how far it is.
 */
#include "plan-tool.h"

#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHUNK 64
#define THREADS_MAX 16
#define PROGRESS_AFTER_S 2.0

typedef struct sweep {
    const plan_ask_t *ask;
    colo_plan_t **plans;
    pthread_mutex_t lock;
    int64_t next, done; /* first rank that no thread took; ranks counted */
    double begin, wake; /* when to say next how far it is */
    bool shown;
    colo_status_t status; /* first failure */
    char error_message[512];
    plan_sums_t sums;
} sweep_t;

pic_batch_t plan_tables(const plan_ask_t *ask)
{
    const plan_batch_t *b = ask->batch;
    return (pic_batch_t){b && !b->packed ? &b->tables : NULL, b && b->packed ? b->side : NULL};
}

bool plan_sharded(const plan_ask_t *ask)
{
    return ask->batch && ask->batch->packed ? ask->batch->side[1].split != COLO_PACKING_WHOLE
                                            : ask->config.output == COLO_OUTPUT_SHARDED;
}

int64_t plan_unit(const plan_ask_t *ask)
{
    int64_t parts[2] = {1, 1}, n;
    for (int side = 0; side < 2; side++)
        if (ask->batch && ask->batch->heads[side])
            parts[side] = colo_grid_extent(side ? &ask->dst.grid : &ask->src.grid, "cp");
    for (n = parts[0]; n % parts[1]; n += parts[0])
        ;
    return ask->config.shape.features / n;
}

colo_status_t plan_make(colo_plan_t **plan, const plan_ask_t *ask, int64_t rank)
{
    const pic_batch_t batch = plan_tables(ask);
    return pic_plan(plan, &ask->config, &batch, rank);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Called with the lock held. On a terminal one line is rewritten every second, in a file a line is
 * added every ten. */
static void tell(sweep_t *s)
{
    const int64_t total = s->ask->world - s->ask->first;
    const bool tty = isatty(fileno(stderr));
    const double t = now();
    if (t < s->wake || s->next >= s->ask->world)
        return;
    fprintf(stderr, "%s%s: planned %lld of %lld ranks (%lld %%), %.0f s%s", tty ? "\r" : "",
            tool_name, (long long)s->done, (long long)total, (long long)(s->done * 100 / total),
            t - s->begin, tty ? "" : "\n");
    fflush(stderr);
    s->shown = tty;
    s->wake = t + (tty ? 1.0 : 10.0);
}

static void *worker(void *arg)
{
    sweep_t *s = arg;
    plan_sums_t mine;
    bool any = false;
    plan_sums_init(&mine);
    pthread_mutex_lock(&s->lock);
    while (s->next < s->ask->world && s->status == COLO_OK) {
        int64_t lo = s->next, hi = lo + CHUNK < s->ask->world ? lo + CHUNK : s->ask->world;
        s->next = hi;
        pthread_mutex_unlock(&s->lock);
        colo_status_t st = COLO_OK;
        for (int64_t r = lo; r < hi && st == COLO_OK; r++) {
            colo_plan_t *plan = NULL;
            st = plan_make(&plan, s->ask, r);
            if (st < 0)
                break;
            plan_sums_add(&mine, s->ask, plan);
            any = true;
            if (s->plans)
                s->plans[r] = plan;
            else
                colo_plan_destroy(&plan);
        }
        pthread_mutex_lock(&s->lock);
        s->done += hi - lo;
        if (st < 0 && s->status == COLO_OK) {
            s->status = st;
            snprintf(s->error_message, sizeof s->error_message, "%s", colo_last_error());
        }
        tell(s);
    }
    if (any)
        plan_sums_merge(&s->sums, &mine);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int plan_complain(const plan_ask_t *ask, colo_status_t status, const char *error_message)
{
    return tool_complain(status == COLO_ERR_ARG ? TOOL_WRONG_USE : TOOL_PROBLEM, "%s%s%s",
                         ask->where, *ask->where ? ": " : "",
                         *error_message ? error_message : colo_status_string(status));
}

int plan_sweep(const plan_ask_t *ask, colo_plan_t **plans, plan_sums_t *sums)
{
    sweep_t s = {.ask = ask, .plans = plans, .next = plans ? 0 : ask->first, .begin = now()};
    pthread_t thread[THREADS_MAX];
    int started = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int64_t want = (ask->world - s.next) / (16 * CHUNK); /* below that a thread is not worth it */
    want = want < cores ? want : cores;
    want = want < 1 ? 1 : want < THREADS_MAX ? want : THREADS_MAX;

    plan_sums_init(&s.sums);
    pthread_mutex_init(&s.lock, NULL);
    s.wake = s.begin + PROGRESS_AFTER_S;
    for (int64_t i = 1; i < want; i++) /* this one counts, too */
        if (pthread_create(&thread[started], NULL, worker, &s) == 0)
            started++;
    worker(&s);
    for (int i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    if (s.shown)
        fputs("\r\033[K", stderr);
    pthread_mutex_destroy(&s.lock);

    if (s.status < 0)
        return plan_complain(ask, s.status, s.error_message);
    if (s.sums.no_memory)
        return tool_problem("no memory for the addends of a rank");
    if (s.sums.overflow)
        return tool_refuse("the bytes of %lld ranks do not fit in 63 bits", (long long)ask->world);
    if (!ask->batch && colo_plan_collective_check(&ask->config) < 0) {
        snprintf(s.sums.rejects, sizeof s.sums.rejects, "%s", colo_last_error());
        s.sums.pass[0].collective_max = s.sums.pass[1].collective_max = -1;
    }
    *sums = s.sums;
    return TOOL_OK;
}
