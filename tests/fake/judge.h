/* SPDX-License-Identifier: Apache-2.0 */
/* judge.h - what tests of faults say when one is over: a new comm works, nothing is left of the
 * old. */
#ifndef TESTS_FAKE_JUDGE_H
#define TESTS_FAKE_JUDGE_H

#include "fake.h"
#include "gpu/gpu_ranks.h"

#include <unistd.h>

enum { RANKS = 4, VICTIM = 2, DEADLINE_MS = 1500 };

static inline colo_status_t works(t_gpu_rank_t *r)
{
    colo_comm_t *fresh = NULL;
    int32_t *d, all[RANKS] = {0};
    rank_cuda(cudaMalloc((void **)&d, (RANKS + 1) * sizeof *d));
    rank_cuda(t_to_device(d + RANKS, &r->rank, sizeof *d));
    rank_try(colo_comm_create_nccl(r->host, -1, &fresh));
    rank_try(colo_comm_all_gather(fresh, d + RANKS, d, 1, COLO_I32, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_cuda(cudaMemcpyAsync(all, d, sizeof all, cudaMemcpyDeviceToHost, r->stream));
    for (int32_t k = 0; k < RANKS; k++)
        rank_check(all[k] == k);
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_comm_destroy(&fresh);
    rank_cuda(cudaFree(d));
    return COLO_OK;
}

/* How many there are of each kind of object. */
typedef struct objects {
    int64_t n[FAKE_KINDS];
} objects_t;

static inline objects_t live_objects(void)
{
    objects_t live;
    for (int kind = 0; kind < FAKE_KINDS; kind++)
        live.n[kind] = fake_live((enum fake_kind)kind);
    return live;
}

/* Helper threads may still be on their way out, also some that @before has counted. */
static inline void assert_nothing_left(const char *what, objects_t before)
{
    for (int kind = 0; kind < FAKE_KINDS; kind++) {
        for (int i = 0; i < 500 && fake_live((enum fake_kind)kind) > before.n[kind]; i++) {
            fake_end_inits();
            usleep(10000);
        }
        if (fake_live((enum fake_kind)kind) > before.n[kind])
            fail_msg("%s: %lld of kind %d are left, expected at most %lld", what,
                     (long long)fake_live((enum fake_kind)kind), kind, (long long)before.n[kind]);
    }
}

#endif
