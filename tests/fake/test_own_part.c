/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_own_part.c - what a rank keeps is copied while messages move: on the caller's stream, which
 * then waits for the messages; also in captures, after errors, and if one of the streams is in a
 * capture of which the other is no part.
 */
#include "fake.h"
#include "gpu/gpu_ranks.h"

#include "comm/comm.h"
#include "core/error.h"

#include <unistd.h>

enum { RANKS = 2 };

static t_case_t the_case(void)
{
    return T_BETWEEN("tp=1,dp=2", "tp=1,cp=2,dp=1", 4, 16, 32, .output = COLO_OUTPUT_SHARDED,
                     .grad = COLO_GRAD_DISJOINT, .dtype = COLO_F32);
}

static colo_status_t place(t_gpu_call_t *k, t_gpu_rank_t *r, const t_case_t *c, int64_t salt,
                           bool backward)
{
    rank_try(t_gpu_call_make(k, r, c, salt, backward));
    return t_gpu_quiet(r);
}

/* ---- one rank comes later ---- */

T_CASE_ON_GPUS(RANKS, a_rank_copies_its_own_part_while_a_peer_does_not_come)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    bool waits = false;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false)); /* ranks compare the first call of a pass */
    rank_try(t_gpu_pass(r, bridge, &c, 1, true));
    for (int backward = 0; backward < 2; backward++) {
        T_GPU_CALL(k);
        rank_try(place(&k, r, &c, 2, backward));
        if (r->rank == 0)
            rank_try(t_gpu_call_run(&k, bridge, r->stream));
        const double end = colo_now() + (waits ? 0 : 2);
        while (r->rank == 0 && fake_pending(r->stream) > 1 && colo_now() < end)
            usleep(100);
        waits = waits || (r->rank == 0 && fake_pending(r->stream) > 1); /* 1: to join */
        rank_try(colo_comm_barrier(r->host, NULL));
        if (r->rank == 1)
            rank_try(t_gpu_call_run(&k, bridge, r->stream));
        rank_try(t_gpu_call_compare(&k));
    }
    rank_try(t_gpu_end(r, &bridge));
    rank_check(!waits);
    return COLO_OK;
}

/* ---- captures ---- */

/* The capture is still open when another stream runs the bridge, and the other way round. */
T_CASE_ON_GPUS(RANKS, a_call_outside_an_open_capture_keeps_its_values)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    cudaGraph_t graph;
    cudaStream_t other;
    T_GPU_CALL(captured);
    T_GPU_CALL(now);
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    rank_try(place(&captured, r, &c, 2, false));
    rank_try(place(&now, r, &c, 3, false));
    rank_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    rank_cuda(cudaStreamBeginCapture(other, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = t_gpu_call_run(&captured, bridge, other);
    if (st == COLO_OK)
        st = t_gpu_call_run(&now, bridge, r->stream);
    const cudaError_t e = cudaStreamEndCapture(other, &graph);
    rank_try(st);
    rank_cuda(e);
    rank_try(t_gpu_call_compare(&now));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaGraphDestroy(graph));
    rank_cuda(cudaStreamDestroy(other));
    return t_gpu_end(r, &bridge);
}

/* ---- calls that fail in between ---- */

struct failure {
    const char *name; /* of the call that fails, or */
    int64_t k;        /* which one of the forward */
    int64_t calls;    /* out: that the forward made */
};

static colo_status_t fails(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = the_case();
    struct failure *f = arg;
    colo_bridge_t *bridge = NULL;
    cudaGraph_t graph;
    T_GPU_CALL(k);
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    rank_try(place(&k, r, &c, 1, false));
    if (r->rank == 0) {
        rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
        f->calls = -fake_calls(r->device);
        fake_fail(r->device, f->k);
        if (f->name)
            fake_fail_name(r->device, f->name);
        rank_check((t_gpu_call_run(&k, bridge, r->stream) < 0) == (f->name || f->k));
        f->calls += fake_calls(r->device);
        rank_check(!f->name || !strcmp(fake_failed(), f->name));
        rank_cuda(cudaStreamEndCapture(r->stream, &graph));
        rank_cuda(cudaGraphDestroy(graph));
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(a_call_that_fails_while_messages_move_joins_the_stream_of_the_capture)
{
    struct failure f = {0};
    assert_ok(t_gpus_run(RANKS, false, fails, &f));
    const int64_t calls = f.calls;
    for (f.k = calls - 1; f.k <= calls; f.k++) /* to join: the last two */
        assert_ok(t_gpus_run(RANKS, false, fails, &f));
    f.k = 0;
    for (int copy = 0; copy < 2; copy++) {
        f.name = copy ? "colo_k_boxes_copy" : "ncclGroupEnd";
        assert_ok(t_gpus_run(RANKS, false, fails, &f));
    }
}

T_MAIN("fake/own_part")
