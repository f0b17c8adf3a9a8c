/* SPDX-License-Identifier: Apache-2.0 */
/*
 * soak.c - "soak SECONDS SEED [WORLDS]": ranks make a world, run random bridges and ragged
 * batches in it, sometimes abort it, destroy it and make the next one, until the time is over or
 * WORLDS were made. T_RANKS says what a rank is (harness/ranks.h). tools/soak.sh runs it.
 *
 * Each value that arrives is compared with the integer oracle. After the first T_HELD_WARM worlds
 * no process may have more descriptors, threads, heap or device memory than it had then. World
 * number k comes from SEED + k alone, so "soak 600 SEED+k 1" repeats it. Where tensors are: soak.h.
 */
#include "soak/soak.h"

#include "comm/comm.h"
#include "core/error.h"

#include <colobridge/bootstrap.h>

enum { CASES = 12 };

typedef struct soak {
    uint64_t seed;
    double until;
    int64_t most; /* worlds; 0: any number */
    int64_t worlds, cases, aborts, stop;
    t_held_t held;
} soak_t;

/* ---- a world ---- */

/* The case of world s->worlds at which a rank aborts it, in one world of four; else -1. */
static int64_t abort_of(const soak_t *s, uint64_t *r)
{
    *r = s->seed + (uint64_t)s->worlds;
    return t_below(r, 4) ? -1 : t_below(r, CASES);
}

/* In a world with an abort, a slower rank may hear of it before its first case. */
static colo_status_t unless_aborted(const soak_t *s, colo_status_t st)
{
    uint64_t r;
    return soak_is_abort(st) && abort_of(s, &r) >= 0 ? COLO_OK : st;
}

/* World s->worlds: cases, and maybe an abort in place of one rank's next case. */
static colo_status_t run_world(soak_rank_t *rank, void *arg)
{
    const soak_t *s = arg;
    colo_comm_t *world = rank->world;
    uint64_t r;
    const int64_t abort_at = abort_of(s, &r);
    const int64_t culprit = t_below(&r, colo_comm_size(world));
    rank_try(colo_comm_set_check(world, (int32_t)t_below(&r, 3)));
    for (int64_t i = 0; i < CASES; i++) {
        const uint64_t seed = t_rand(&r);
        const bool ragged = t_below(&r, 2);
        if (i == abort_at && colo_comm_rank(world) == culprit)
            colo_comm_abort(world, "the soak says so");
        const colo_status_t st = ragged ? soak_ragged(rank, seed) : soak_uniform(rank, seed);
        if (abort_at < 0 || !soak_is_abort(st)) /* which a slower rank gets in an earlier case */
            rank_try(st);
        if (st == COLO_OK && i != abort_at)
            continue;
        while (colo_comm_barrier(world, NULL) == COLO_OK)
            ; /* a case without peers ends well, the abort is on its way */
        rank_check(soak_is_abort(colo_comm_check(world)));
        return COLO_OK;
    }
    return colo_comm_barrier(world, NULL);
}

/* The same on all ranks: is it time to end? */
static colo_status_t is_over(colo_comm_t *c, const soak_t *s, bool *over)
{
    int64_t mine = colo_now() > s->until || (s->most && s->worlds >= s->most), any = 0;
    rank_try(colo_comm_all_reduce(c, &mine, &any, 1, COLO_I64, COLO_REDOP_MAX, NULL));
    *over = any;
    return COLO_OK;
}

static colo_status_t one_world(colo_comm_t *world, void *arg)
{
    soak_t s = *(soak_t *)arg; /* threads share it */
    bool over = false;
    colo_status_t st = is_over(world, &s, &over);
    if (st == COLO_OK && over) {
        if (colo_comm_rank(world) == 0)
            ((soak_t *)arg)->stop = 1;
        return COLO_OK;
    }
    if (st == COLO_OK)
        st = colo_comm_set_timeout(world, t_long_wait());
    if (st == COLO_OK)
        st = soak_on(world, run_world, &s);
    return unless_aborted(&s, st);
}

/* ---- progress ---- */

static void count(soak_t *s, bool prints)
{
    static double last;
    uint64_t r;
    const int64_t call = abort_of(s, &r);
    s->worlds++;
    s->aborts += call >= 0;
    s->cases += call >= 0 ? call : CASES;
    if (prints && colo_now() - last > 10) {
        last = colo_now();
        printf("   %lld worlds, %lld cases, %lld aborts, %.0f s left\n", (long long)s->worlds,
               (long long)s->cases, (long long)s->aborts, s->until - last);
        fflush(stdout);
    }
}

/* ---- processes that stay: each world after the first is made over the first ---- */

static colo_status_t one_process(colo_comm_t *first, void *arg)
{
    soak_t *s = arg;
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT};
    rank_try(colo_bootstrap_from_comm(first, &b));
    for (bool over = false;;) {
        rank_try(is_over(first, s, &over));
        if (over)
            return COLO_OK;
        colo_comm_t *world = NULL;
        colo_status_t st = colo_comm_create_bootstrap(&b, &world);
        if (st == COLO_OK)
            st = colo_comm_set_timeout(world, t_long_wait());
        if (st == COLO_OK)
            st = soak_on(world, run_world, s);
        colo_comm_destroy(&world);
        rank_try(unless_aborted(s, st));
        count(s, colo_comm_rank(first) == 0);
        rank_try(t_held_compare(&s->held, s->worlds));
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: soak SECONDS SEED [WORLDS]; tools/soak.sh runs it\n");
        return 2;
    }
    soak_t s = {.seed = strtoull(argv[2], NULL, 0),
                .most = argc > 3 ? atoll(argv[3]) : 0,
                .held = {.heap_slack = soak_heap_slack(),
                         .device_slack = soak_device_slack,
                         .device_bytes = soak_device_bytes}};
    s.until = colo_now() + atof(argv[1]);
    const char *kind = getenv("T_RANKS");
    colo_status_t st = COLO_OK;
    const int32_t ranks = soak_ranks();
    if (ranks == 0)
        return T_EXIT_SKIP;
    if (!t_ranks_are_threads()) {
        st = t_run_ranks(ranks, one_process, &s, sizeof s);
    } else {
        while (st == COLO_OK && !s.stop) {
            st = t_run_ranks(ranks, one_world, &s, sizeof s);
            if (st == COLO_OK && !s.stop) {
                count(&s, true);
                st = t_held_compare(&s.held, s.worlds);
            }
        }
    }
    if (st < 0) {
        const uint64_t seed = s.seed + (uint64_t)s.worlds;
        printf("FAILED in the world of seed %llu: %s\nrepeat: T_RANKS=%s %s 600 %llu 1\n",
               (unsigned long long)seed, colo_last_error(), kind ? kind : "threads", argv[0],
               (unsigned long long)seed);
        fprintf(stderr, "soak: %s\n", colo_last_error()); /* rank 0 alone prints */
    }
    printf("%lld worlds, %lld cases, %lld aborts, %s\n", (long long)s.worlds, (long long)s.cases,
           (long long)s.aborts, st < 0 ? "FAILED" : "no mismatch, no leak");
    return st < 0;
}
