/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_exchange_all.c - every pair of (tp, cp, dp) layouts of up to 16 ranks, executed on threads:
 * forward and backward under each contract, dim orders taken in turn.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

typedef struct tally {
    int64_t pairs, failed;
    char first[1500];
} tally_t;

typedef struct job {
    t_case_t c[3];
} job_t;

static colo_status_t run_job(colo_comm_t *world, void *arg)
{
    const job_t *j = arg;
    for (int k = 0; k < 3; k++) {
        colo_status_t st = t_case_on(world, &j->c[k]);
        if (st < 0)
            return st;
    }
    return COLO_OK;
}

static void one_pair(int64_t n, const int64_t *s, const int64_t *d, void *arg)
{
    static const char *const axes[] = {"bsh", "sbh", "th"};
    tally_t *t = arg;
    int64_t most = s[2] > d[2] ? s[2] : d[2], nth = t->pairs++;
    job_t j;
    if (t_left_out(nth))
        return;
    for (int k = 0; k < 3; k++)
        j.c[k] = (t_case_t){
            .src = t_side_ordered((int)(nth % T_ORDERS), s[0], s[1], s[2], true),
            .dst = t_side_ordered((int)(nth / T_ORDERS % T_ORDERS), d[0], d[1], d[2], false),
            .shape = {most + nth % 2, 2 * t_lcm(s[1], d[1]), 1 + k % 2},
            .output = k ? COLO_FULL_SEQ : COLO_SHARDED,
            .grad = k == 1 ? COLO_PARTIAL : COLO_DISJOINT,
            .axes = axes[(nth + k) % 3],
            .stride = (t_stride_t)(nth % T_STRIDE_COUNT)};
    colo_status_t st = colo_comm_threads_run((int32_t)n, run_job, &j);
    if (st < 0 && !t->failed++)
        snprintf(t->first, sizeof t->first, "%s: %s", t_case_text(&j.c[0]), colo_last_error());
}

T_CASE(every_pair_of_layouts_of_16_ranks_arrives_on_threads)
{
    tally_t t = {0};
    assert_int_equal(t_each_pair(1, 16, one_pair, &t), 1100);
    if (t.failed)
        fail_msg("%lld of 1100 pairs failed, first %s", (long long)t.failed, t.first);
}

T_MAIN("bridge/exchange_all")
