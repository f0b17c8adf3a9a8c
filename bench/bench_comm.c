/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_comm.c - what an operation on in-process ranks costs, by number of ranks and size.
 *
 * Every number is the mean over one timed loop on rank 0, best of several loops, in microseconds; a
 * barrier separates the loops. Columns: barrier, all_reduce of 1, 1 Ki and 256 Ki floats, exchange
 * of one box of 1 Ki and of 256 Ki floats with both neighbours of a ring.
 *
 *   bench_comm [seconds per number, default 0.1]
 */
#include <colobridge.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { COLUMNS = 6, LOOPS = 5 };

static const struct {
    const char *name;
    int64_t count;
} columns[COLUMNS] = {{"barrier", 0},         {"sum 1", 1},          {"sum 1Ki", 1 << 10},
                      {"sum 256Ki", 1 << 18}, {"ring 1Ki", 1 << 10}, {"ring 256Ki", 1 << 18}};

struct job {
    double seconds;
    double us[COLUMNS];
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static colo_status_t once(colo_comm_t *c, int column, float *x, float *y)
{
    int64_t count = columns[column].count;
    if (column == 0)
        return colo_comm_barrier(c, NULL);
    if (column <= 3)
        return colo_comm_all_reduce(c, x, y, count, COLO_F32, COLO_REDOP_SUM, NULL);
    int32_t n = colo_comm_size(c), me = colo_comm_rank(c);
    int32_t next = (me + 1) % n, last = (me + n - 1) % n;
    if (n == 1)
        return colo_comm_exchange(c, NULL, 0, NULL, 0, COLO_F32, NULL);
    colo_box_t out = {x, {1, 1, count}, {0, 0, 1}}, in = {y, {1, 1, count}, {0, 0, 1}};
    colo_message_t send = {next, 1, &out}, recv = {last, 1, &in};
    return colo_comm_exchange(c, &send, 1, &recv, 1, COLO_F32, NULL);
}

/* Mean of @times operations in microseconds; negative on error. */
static double loop(colo_comm_t *c, int column, int64_t times, float *x, float *y)
{
    if (colo_comm_barrier(c, NULL) < 0)
        return -1;
    double begin = now();
    for (int64_t i = 0; i < times; i++)
        if (once(c, column, x, y) < 0)
            return -1;
    return (now() - begin) / (double)times * 1e6;
}

static colo_status_t rank_main(colo_comm_t *c, void *arg)
{
    struct job *job = arg;
    const size_t most = (size_t)1 << 18;
    float *x = calloc(most, sizeof *x), *y = calloc(most, sizeof *y);
    colo_status_t st = COLO_OK;
    for (int k = 0; x && y && k < COLUMNS && st == COLO_OK; k++) {
        double best = loop(c, k, 20, x, y); /* workspace grows here */
        int64_t times = best > 0 ? (int64_t)(job->seconds / LOOPS / best * 1e6) : 1;
        times = times < 5 ? 5 : times;
        st = colo_comm_broadcast(c, &times, 1, COLO_I64, 0, NULL);
        for (int i = 0; i < LOOPS && st == COLO_OK; i++) {
            double us = loop(c, k, times, x, y);
            if (us < 0)
                st = colo_comm_check(c);
            best = i == 0 || us < best ? us : best;
        }
        if (colo_comm_rank(c) == 0)
            job->us[k] = best;
    }
    free(x);
    free(y);
    return st;
}

int main(int argc, char **argv)
{
    static const int32_t sizes[] = {1, 2, 3, 4, 8, 16, 32};
    struct job job = {.seconds = argc > 1 ? atof(argv[1]) : 0.1};
    if (argc > 2 || job.seconds <= 0) {
        fprintf(stderr, "usage: bench_comm [seconds per number]\n");
        return 2;
    }
    printf("in-process ranks, microseconds an operation\n%6s", "ranks");
    for (int k = 0; k < COLUMNS; k++)
        printf("%12s", columns[k].name);
    printf("\n");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (colo_comm_threads_run(sizes[i], rank_main, &job) < 0) {
            fprintf(stderr, "%s\n", colo_last_error());
            return 1;
        }
        printf("%6d", (int)sizes[i]);
        for (int k = 0; k < COLUMNS; k++)
            printf("%12.2f", job.us[k]);
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
