/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flight_rows.c - "flight_rows ROW": four ranks, one fault, and what COLO_FLIGHT_RECORDER makes
 * them write. flight.py runs each row and judges the files.
 */
#include "harness/ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *row;
static float x[64], y[4][256]; /* y: by world rank */

static bool is(const char *name)
{
    return strcmp(row, name) == 0;
}

/* The rank is late until the others have given up. */
static colo_status_t wait_for_failure(const colo_comm_t *c)
{
    while (colo_comm_check(c) == COLO_OK)
        usleep(1000);
    return colo_comm_check(c);
}

static colo_status_t gather(colo_comm_t *c, int64_t count, colo_dtype_t dtype)
{
    return colo_comm_all_gather(c, x, y[colo_comm_world_rank(c, colo_comm_rank(c))], count, dtype,
                                NULL);
}

/* Of two groups of two, the second loses its second rank. */
static colo_status_t split_and_lose(colo_comm_t *c)
{
    const int32_t me = colo_comm_rank(c);
    colo_comm_t *pair = NULL;
    colo_status_t st = colo_comm_split_color(c, me / 2, me, &pair);
    if (st == COLO_OK)
        st = gather(pair, 8, COLO_F32);
    if (st == COLO_OK)
        st = me == 3 ? wait_for_failure(pair)
                     : colo_comm_all_reduce(pair, x, y[me], 8, COLO_F32, COLO_REDOP_SUM, NULL);
    if (me < 2) /* these have nothing to fail with */
        colo_comm_flight_record(c, getenv("COLO_FLIGHT_RECORDER"));
    colo_comm_destroy(&pair);
    return st;
}

static colo_status_t rank_body(colo_comm_t *c, void *arg)
{
    const int32_t me = colo_comm_rank(c);
    colo_comm_set_timeout(c, 400);
    for (int i = 0; i < (is("wrapped") ? 300 : 3); i++)
        if (gather(c, 4, COLO_F32) < 0)
            return COLO_ERR_STATE;
    if (is("missing") && me == 2)
        return wait_for_failure(c);
    if (is("killed") && me == 2)
        raise(SIGKILL);
    if (is("exits") && me == 2)
        exit(0);
    if (is("another-kind") && me == 1)
        return colo_comm_all_reduce(c, x, y[me], 16, COLO_F32, COLO_REDOP_SUM, NULL);
    if (is("another-count") && me == 1)
        return colo_comm_broadcast(c, y[me], 32, COLO_F32, 0, NULL);
    if (is("another-dtype") && me == 3)
        return gather(c, 16, COLO_BF16);
    if (is("one-fewer") && me == 0)
        return wait_for_failure(c);
    if (is("group"))
        return split_and_lose(c);
    if (is("another-count"))
        return colo_comm_broadcast(c, y[me], 16, COLO_F32, 0, NULL);
    colo_status_t st = gather(c, 16, COLO_F32);
    if (is("one-fewer") && st == COLO_OK)
        st = gather(c, 8, COLO_F32);
    if (is("healthy") || is("wrapped"))
        st = colo_comm_flight_record(c, getenv("COLO_FLIGHT_RECORDER"));
    return st;
}

int main(int argc, char **argv)
{
    row = argc > 1 ? argv[1] : "healthy";
    (void)t_run_ranks(4, rank_body, NULL, 0); /* the files tell, whatever the status */
    return 0;
}
