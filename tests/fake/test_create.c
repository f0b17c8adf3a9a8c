/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_create.c - which versions of NCCL are taken; and what making a communicator, or connecting
 * one, leaves alone: the caller's default stream, and captures that the caller has begun.
 */
#include "fake.h"
#include "gpu/gpu_ranks.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "harness/allocations.h"

static colo_status_t create_with(const char *version)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL, *comm = NULL;
    setenv("FAKE_NCCL_VERSION", version, 1);
    assert_ok(colo_comm_create_self(&self));
    const colo_status_t st = colo_comm_create_nccl(self, 0, &comm);
    return st;
}

T_CASE(nccl_of_another_version_is_refused_and_2_18_serves)
{
    static const char *const others[] = {"21799", "2903", "30000"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_fails(create_with(others[i]), COLO_ERR_UNBUILT,
                     "expected 2.18 (21800) or a later 2.x");
        assert_non_null(strstr(colo_last_error(), others[i]));
    }
    assert_ok(create_with("21800"));
}

static void hold(void *arg)
{
    while (!*(atomic_bool *)arg)
        usleep(100);
}

/* The caller's work is on it, and streams of the library do not wait for that. */
T_CASE(create_gives_the_default_stream_nothing)
{
    static atomic_bool go;
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL, *comm = NULL;
    const int64_t misuse = fake_misuse();
    assert_ok(colo_comm_create_self(&self));
    assert_int_equal(cudaLaunchHostFunc(NULL, hold, &go), cudaSuccess);
    const colo_status_t st = colo_comm_create_nccl(self, 0, &comm);
    const int64_t pending = fake_pending(NULL);
    go = true;
    assert_ok(st);
    assert_int_equal(pending, 1);
    assert_int_equal(fake_misuse(), misuse);
}

#ifndef SANITIZED
enum { RANKS = 2 };

/* Rank 0's thread that makes the communicator, or connects it, does not start. @connects: arg */
static colo_status_t without_a_thread(t_gpu_rank_t *r, void *arg)
{
    const bool connects = *(const bool *)arg;
    cudaStream_t stream;
    cudaGraph_t graph;
    rank_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (connects)
        rank_try(colo_comm_create_nccl(r->host, -1, &r->gpus));
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    rank_try(colo_comm_barrier(r->host, NULL));
    thread_fail_at = r->rank > 0 ? 0 : connects ? 1 : 2; /* the first one is the watchdog's */
    const colo_status_t st = connects ? colo_comm_barrier(r->gpus, r->stream)
                                      : colo_comm_create_nccl(r->host, -1, &r->gpus);
    rank_check(thread_fail_at == 0 && st < 0);
    colo_comm_destroy(&r->gpus);
    rank_cuda(cudaStreamEndCapture(stream, &graph));
    rank_cuda(cudaGraphDestroy(graph));
    rank_cuda(cudaStreamDestroy(stream));
    return COLO_OK;
}

T_CASE(ranks_without_threads_keep_a_capture_and_no_memory)
{
    const int64_t before = fake_live(FAKE_MEMORY);
    for (int connects = 0; connects < 2; connects++) {
        bool arg = connects;
        assert_ok(t_gpus_run(RANKS, true, without_a_thread, &arg));
        for (int i = 0; i < 500 && fake_live(FAKE_MEMORY) != before; i++) {
            fake_end_inits(); /* of the rank that has its thread */
            usleep(10000);
        }
        assert_int_equal(fake_live(FAKE_MEMORY), before);
    }
}
#endif

T_MAIN("fake/create")
