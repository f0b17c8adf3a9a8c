/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_plan.c - how long one rank's plan takes in a world of 1,048,576 ranks.
 *
 * A plan is made when a bridge is created or reshaped, on every rank, so it must cost what this
 * rank's peers cost and not what the world costs. For each layout pair, seeded random ranks are
 * planned; a rank's time is the best of three, in processor time of this thread (a plan waits for
 * no rank, so the difference to wall time is other programs).
 * Printed per pair: the most peers that a sampled rank has, messages of both ways together, median,
 * 99th percentile and maximum. Exits 1 when a pair whose ranks have at most 64 peers misses the
 * goal of 1 ms at its maximum.
 *
 * A second table has replicas: n ranks that hold the same rows, and n other ranks that need them.
 * It shows how the time of the busiest of four ranks grows with n.
 */
#include "host.h"

#include <colobridge.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 2000
#define WORLD 1048576
#define GOAL_US 1000.0

typedef struct pair {
    const char *src, *dst;
    int64_t samples, per_node;
    colo_output_t output;
    colo_grad_t grad;
} pair_t;

static const pair_t pairs[] = {
    {"tp=8,dp=131072", "tp=8,cp=4,dp=32768", 524288, 0, COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT},
    {"tp=8,dp=131072", "tp=8,cp=8,dp=16384", 524288, 8, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_DISJOINT},
    {"tp=1,dp=1048576", "tp=8,cp=8,dp=16384", 1048576, 0, COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT},
    {"tp=1,dp=1048576", "tp=8,cp=8,dp=16384", 1048576, 8, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL},
    {"tp=64,dp=16384", "tp=1,dp=1048576", 1048576, 0, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_DISJOINT},
    {"tp=64,dp=16384", "tp=8,cp=8,dp=16384", 65536, 8, COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT},
    {"tp=8,cp=4,dp=32768", "cp=16,tp=4,dp=16384", 131072, 8, COLO_OUTPUT_SHARDED,
     COLO_GRAD_DISJOINT},
    {"tp=4,dp=262144", "tp=5,dp=209715", 1048573, 8, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_DISJOINT},
    {"tp=8,dp=131072", "tp=8,pp=8,cp=4,dp=4096", 524288, 8, COLO_OUTPUT_SHARDED,
     COLO_GRAD_DISJOINT},
    {"tp=8,dp=131072", "tp=4,cp=4,dp=65536", 524288, 16, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL},
    {"dp=131072,tp=8", "dp=32768,cp=4,tp=8", 524288, 8, COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT},
};

static int by_rank(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Ranks that this one exchanges anything with, either way; *messages: all of them added up. */
static int64_t peers_of(const colo_plan_t *plan, int64_t *messages)
{
    int64_t n = 0, distinct = 0, cap = 0, *peer = NULL;
    for (int pass = 0; pass < 2; pass++) {
        n = 0;
        for (int w = 0; w < 2; w++)
            for (int sends = 0; sends < 2; sends++) {
                int32_t count;
                const colo_plan_message_t *m = sends
                                                   ? colo_plan_sends(plan, (colo_pass_t)w, &count)
                                                   : colo_plan_recvs(plan, (colo_pass_t)w, &count);
                for (int32_t i = 0; i < count; i++, n++)
                    if (n < cap)
                        peer[n] = m[i].peer;
            }
        if (pass == 0 && n > 0) {
            peer = malloc((size_t)n * sizeof *peer);
            cap = peer ? n : 0;
        }
    }
    if (cap > 0)
        qsort(peer, (size_t)cap, sizeof *peer, by_rank);
    for (int64_t i = 0; i < cap; i++)
        distinct += i == 0 || peer[i] != peer[i - 1];
    free(peer);
    *messages = n;
    return distinct;
}

static double best_us(const colo_plan_config_t *config, int64_t rank, colo_status_t *st)
{
    double best = 1e30;
    for (int again = 0; again < 3 && *st == COLO_OK; again++) {
        colo_plan_t *plan = NULL;
        double begin = now_us();
        *st = colo_plan_create(&plan, config, rank);
        double took = now_us() - begin;
        best = took < best ? took : best;
        colo_plan_destroy(&plan);
    }
    return best;
}

static colo_status_t run_replicas(int64_t n)
{
    static const struct {
        int64_t less, per_node;
    } kinds[] = {{0, 0}, {0, 8}, {1, 0}};
    printf("| %lld |", (long long)n);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        colo_grid_t src, dst;
        colo_layout_t from, to;
        colo_status_t st;
        if ((st = colo_grid_init(&src, &(colo_dim_t){"tp", n}, 1, 0, 0)) < 0 ||
            (st = colo_grid_init(&dst, &(colo_dim_t){"tp", n - kinds[k].less}, 1, n, 0)) < 0 ||
            (st = colo_layout_init_src(&from, &src)) < 0 ||
            (st = colo_layout_init_dst(&to, &dst)) < 0)
            return st;
        colo_plan_config_t config = {COLO_PLAN_CONFIG_INIT,
                                     .src = &from,
                                     .dst = &to,
                                     .shape = {.samples = 4, .rows = 64, .features = 64},
                                     .dtype = COLO_BF16,
                                     .ranks_per_node = kinds[k].per_node};
        const int64_t ranks[] = {0, n - 1, n, 2 * n - 1 - kinds[k].less};
        double most = 0;
        for (int i = 0; i < 4 && st == COLO_OK; i++) {
            double us = best_us(&config, ranks[i], &st);
            most = us > most ? us : most;
        }
        if (st < 0)
            return st;
        printf(" %.1f |", most);
    }
    printf("\n");
    fflush(stdout);
    return COLO_OK;
}

static colo_status_t run(const pair_t *p, bool *goal)
{
    colo_grid_t src, dst;
    colo_layout_t from, to;
    colo_status_t st;
    if ((st = colo_grid_parse(&src, p->src, WORLD)) < 0 ||
        (st = colo_grid_parse(&dst, p->dst, WORLD)) < 0 ||
        (st = colo_layout_init_src(&from, &src)) < 0 || (st = colo_layout_init_dst(&to, &dst)) < 0)
        return st;
    colo_plan_config_t config = {COLO_PLAN_CONFIG_INIT,
                                 .src = &from,
                                 .dst = &to,
                                 .shape = {.samples = p->samples, .rows = 8192, .features = 4096},
                                 .dtype = COLO_BF16,
                                 .output = p->output,
                                 .grad = p->grad,
                                 .ranks_per_node = p->per_node};
    static double us[RANKS];
    int64_t peers = 0, messages = 0;
    uint64_t state = 1;
    for (int i = 0; i < RANKS; i++) {
        int64_t rank = (int64_t)(next_random(&state) % WORLD), m = 0;
        colo_plan_t *plan = NULL;
        us[i] = best_us(&config, rank, &st);
        if (st < 0 || (st = colo_plan_create(&plan, &config, rank)) < 0)
            return st;
        int64_t n = peers_of(plan, &m);
        peers = n > peers ? n : peers;
        messages = m > messages ? m : messages;
        colo_plan_destroy(&plan);
    }
    qsort(us, RANKS, sizeof us[0], by_value);
    if (peers <= 64 && us[RANKS - 1] >= GOAL_US)
        *goal = false;
    printf("| %s | %s | %s | %lld | %lld | %lld | %.1f | %.1f | %.1f |\n", p->src, p->dst,
           p->output == COLO_OUTPUT_SHARDED ? "sharded"
           : p->grad == COLO_GRAD_PARTIAL   ? "full, partial"
                                            : "full, disjoint",
           (long long)p->per_node, (long long)peers, (long long)messages, us[RANKS / 2],
           us[RANKS * 99 / 100], us[RANKS - 1]);
    fflush(stdout);
    return COLO_OK;
}

int main(void)
{
    bool goal = true;
    printf(
        "| src | dst | output | ranks a node | peers | messages | median us | p99 us | max us |\n"
        "|---|---|---|---:|---:|---:|---:|---:|---:|\n");
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (run(&pairs[i], &goal) < 0) {
            fprintf(stderr, "%s -> %s: %s\n", pairs[i].src, pairs[i].dst, colo_last_error());
            return 1;
        }
    printf("\n| replicas | n to n, us | n to n, 8 ranks a node, us | n to n - 1, us |\n"
           "|---:|---:|---:|---:|\n");
    for (int64_t n = 64; n <= 4096; n *= 4)
        if (run_replicas(n) < 0) {
            fprintf(stderr, "%lld replicas: %s\n", (long long)n, colo_last_error());
            return 1;
        }
    return goal ? 0 : 1;
}
