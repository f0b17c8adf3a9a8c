/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_segments.c - what a step with a new ragged batch costs on the host, and how even
 * colo_segments_balance() loads the encoder's replicas.
 *
 * colo_bridge_set_segments() runs in every step, between the data loader and the first launch, so
 * it must not cost more than a launch or two. 10,000 images of 256 to 4,096 rows in packed
 * sequences on 64 ranks, in processor time of the calling thread; a rank's time is the median of 50
 * batches with tables that differ. Exits 1 if a rank misses the goal.
 *
 * Balance: 16 images per replica, row counts from a log-normal distribution as real data has them
 * (median 729, sigma 0.8, at least 16, at most 4,096), 1,000 batches per number of replicas.
 */
#include "host.h"

#include <colobridge.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 64
#define IMAGES 10000
#define BATCHES 50
#define GOAL_US 100.0
#define BALANCE_GOAL 1.05

static double uniform(uint64_t *state)
{
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

/* ---- tables ---- */

typedef struct tables {
    int64_t rows[IMAGES], src_dp[IMAGES], seq[IMAGES], pos[IMAGES];
    int64_t len[IMAGES], dp[IMAGES], nseqs;
} tables_t;

/* Samples of 5 images with text between them; @shuffled: made by any replica, else by the one that
 * has the sample. */
static void fill(tables_t *t, int64_t src, int64_t dst, bool shuffled, uint64_t *state)
{
    t->nseqs = IMAGES / 5;
    for (int64_t q = 0, e = 0; q < t->nseqs; q++) {
        int64_t offset = 0;
        for (int i = 0; i < 5; i++, e++) {
            t->rows[e] = 256 + (int64_t)(next_random(state) % 3841);
            t->src_dp[e] =
                shuffled ? (int64_t)(next_random(state) % (uint64_t)src) : q * src / t->nseqs;
            offset += (int64_t)(next_random(state) % 200);
            t->seq[e] = q;
            t->pos[e] = offset;
            offset += t->rows[e];
        }
        t->len[q] = (offset + 127) / 128 * 128;
        t->dp[q] = q * dst / t->nseqs;
    }
}

static colo_segments_t segments_of(const tables_t *t)
{
    return (colo_segments_t){.struct_size = sizeof(colo_segments_t),
                             .count = IMAGES,
                             .rows = t->rows,
                             .src_dp = t->src_dp,
                             .seq = t->seq,
                             .pos = t->pos,
                             .nseqs = t->nseqs,
                             .seq_len = t->len,
                             .seq_dp = t->dp};
}

/* ---- set_segments ---- */

typedef struct setting {
    const char *src, *dst;
    colo_output_t output;
    colo_placement_t placement;
    bool shuffled;
    int32_t rank; /* that measures */
    double median, least;
    int64_t messages;
} setting_t;

static const setting_t settings[] = {
    {"tp=2,dp=32", "tp=2,cp=4,dp=8", COLO_OUTPUT_SHARDED, COLO_PLACEMENT_PACKED, false, 0, 0, 0, 0},
    {"dp=64", "cp=4,tp=2,dp=8", COLO_OUTPUT_SHARDED, COLO_PLACEMENT_MERGED, false, 0, 0, 0, 0},
    {"dp=64", "cp=4,tp=2,dp=8", COLO_OUTPUT_SHARDED, COLO_PLACEMENT_MERGED, true, 0, 0, 0, 0},
    {"tp=8,dp=8", "cp=8,tp=8,dp=1", COLO_OUTPUT_SHARDED, COLO_PLACEMENT_MERGED, false, 0, 0, 0, 0},
    {"tp=2,dp=32", "tp=8,dp=8", COLO_OUTPUT_FULL_SEQ, COLO_PLACEMENT_PACKED, true, 0, 0, 0, 0},
};

static colo_status_t measure(setting_t *r, colo_bridge_t *bridge, tables_t *t)
{
    uint64_t state = 1;
    double us[BATCHES];
    const colo_segments_t s = segments_of(t);
    for (int i = -3; i < BATCHES; i++) { /* the first ones grow buffers */
        colo_batch_t *batch = NULL;
        int32_t n[2];
        t->rows[next_random(&state) % IMAGES] -= 1;
        const double begin = now_us();
        const colo_status_t st = colo_bridge_set_segments(bridge, &s, &batch);
        const double end = now_us();
        if (st < 0)
            return st;
        (void)colo_plan_sends(colo_batch_plan(batch), COLO_PASS_FORWARD, &n[0]);
        (void)colo_plan_recvs(colo_batch_plan(batch), COLO_PASS_FORWARD, &n[1]);
        r->messages = n[0] + n[1];
        colo_batch_destroy(&batch);
        if (i >= 0)
            us[i] = end - begin;
    }
    qsort(us, BATCHES, sizeof *us, by_value);
    r->median = us[BATCHES / 2];
    r->least = us[0];
    return COLO_OK;
}

static colo_status_t rank_main(colo_comm_t *comm, void *arg)
{
    setting_t *r = arg;
    uint64_t state = 7;
    colo_grid_t sg, dg;
    colo_layout_t src, dst;
    colo_bridge_t *bridge = NULL;
    colo_status_t st = colo_grid_parse(&sg, r->src, 0);
    if (st == COLO_OK)
        st = colo_grid_parse(&dg, r->dst, 0);
    if (st == COLO_OK)
        st = colo_layout_init_src(&src, &sg);
    if (st == COLO_OK)
        st = colo_layout_init_dst(&dst, &dg);
    const colo_bridge_config_t c = {
        COLO_BRIDGE_CONFIG_INIT,     .src = &src,        .dst = &dst,
        .shape = {.features = 4096}, .dtype = COLO_BF16, .output = r->output,
        .ranks_per_node = 8,         .ragged = true,     .placement = r->placement};
    if (st == COLO_OK)
        st = colo_bridge_create(&bridge, &c, comm);
    if (st == COLO_OK && colo_comm_rank(comm) == r->rank) {
        tables_t *t = malloc(sizeof *t);
        if (t) {
            fill(t, colo_grid_extent(&sg, "dp"), colo_grid_extent(&dg, "dp"), r->shuffled, &state);
            st = measure(r, bridge, t);
        }
        free(t);
    }
    colo_bridge_destroy(&bridge);
    return st;
}

static bool set_segments(void)
{
    static const int32_t of[] = {0, 37};
    bool ok = true;
    printf("| src | dst | output | images | rank | messages | median us | least us |\n"
           "|---|---|---|---|---:|---:|---:|---:|\n");
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        for (int k = 0; k < 2; k++) {
            setting_t r = settings[i];
            r.rank = of[k];
            if (colo_comm_threads_run(RANKS, rank_main, &r) < 0) {
                fprintf(stderr, "%s\n", colo_last_error());
                exit(1);
            }
            printf("| %s | %s | %s, %s | %s | %d | %lld | %.1f | %.1f |\n", r.src, r.dst,
                   r.output == COLO_OUTPUT_SHARDED ? "sharded" : "full",
                   r.placement == COLO_PLACEMENT_MERGED ? "merged" : "packed",
                   r.shuffled ? "of any replica" : "of their sample's replica", (int)r.rank,
                   (long long)r.messages, r.median, r.least);
            ok = ok && r.median <= GOAL_US;
        }
    return ok;
}

/* ---- balance ---- */

static int64_t log_normal(uint64_t *state)
{
    const double u = 1 - uniform(state), v = uniform(state);
    const double n = 729 * exp(0.8 * sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    return n < 16 ? 16 : n > 4096 ? 4096 : (int64_t)n;
}

static double max_over_mean(const int64_t *assign, const int64_t *rows, int64_t n, int64_t bins)
{
    int64_t load[1024] = {0}, most = 0, sum = 0;
    for (int64_t e = 0; e < n; e++) {
        load[assign[e]] += rows[e];
        sum += rows[e];
    }
    for (int64_t b = 0; b < bins; b++)
        most = load[b] > most ? load[b] : most;
    return (double)most * (double)bins / (double)sum;
}

static bool balance(void)
{
    static const int64_t replicas[] = {4, 8, 64, 512};
    static int64_t rows[16 * 512], before[16 * 512], after[16 * 512];
    bool ok = true;
    printf("\n| replicas | images | as they come, mean | worst | balanced, mean | worst | "
           "us |\n|---:|---:|---:|---:|---:|---:|---:|\n");
    for (size_t i = 0; i < sizeof replicas / sizeof replicas[0]; i++) {
        const int64_t p = replicas[i], n = 16 * p;
        double mean[2] = {0}, worst[2] = {0}, us = 0;
        uint64_t state = 14;
        for (int b = 0; b < 1000; b++) {
            for (int64_t e = 0; e < n; e++) {
                rows[e] = log_normal(&state);
                before[e] = e / 16;
            }
            const double begin = now_us();
            if (colo_segments_balance(after, rows, n, p, NULL, 0) < 0)
                return false;
            us += (now_us() - begin) / 1000;
            for (int k = 0; k < 2; k++) {
                const double x = max_over_mean(k ? after : before, rows, n, p);
                mean[k] += x / 1000;
                worst[k] = x > worst[k] ? x : worst[k];
            }
        }
        printf("| %lld | %lld | %.3f | %.3f | %.4f | %.4f | %.1f |\n", (long long)p, (long long)n,
               mean[0], worst[0], mean[1], worst[1], us);
        ok = ok && worst[1] <= BALANCE_GOAL;
    }
    return ok;
}

int main(void)
{
    const bool fast = set_segments(), even = balance();
    if (!fast)
        fprintf(stderr, "a rank took more than %.0f us\n", GOAL_US);
    if (!even)
        fprintf(stderr, "a load was more than %.2f times the mean\n", BALANCE_GOAL);
    return !fast || !even;
}
