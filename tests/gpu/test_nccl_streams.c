/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_streams.c - bridges over NCCL on 2, 4 or 8 ranks and what they run on: captured calls
 * replayed with new inputs, two streams in turn, the memory that a bridge and its calls take, a
 * capture that would have to connect. == on every byte against the oracle, as in
 * test_nccl_bridge.c.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static int32_t gpus; /* ranks of this run */

/* ---- graphs ---- */

static t_case_t the_case(colo_output_t output)
{
    return (t_case_t){.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {8, 8, 16},
                      .output = output,
                      .dtype = COLO_F32};
}

/* Captured at once, never run before: a bridge has all it needs from create. */
static colo_status_t replay(t_gpu_rank_t *r, const t_case_t *c, int64_t late)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_STEP(step);
    rank_try(t_case_bridge(&bridge, c, r->gpus, COLO_MEM_CUDA));
    rank_try(t_gpu_step_capture(&step, r, c, bridge));
    rank_try(t_gpu_step_replay(&step, t_scaled(1000), late));
    return t_gpu_quiet(r);
}

T_CASE_ON_GPUS(gpus, captured_calls_replay_a_thousand_times_with_new_inputs)
{
    const t_case_t c = the_case(COLO_OUTPUT_SHARDED);
    return replay(r, &c, 0);
}

T_CASE_ON_GPUS(gpus, captured_calls_replay_while_ranks_are_late_at_random)
{
    const t_case_t c = the_case(COLO_OUTPUT_FULL_SEQ); /* PARTIAL: sums, too */
    return replay(r, &c, 1);
}

/* ---- streams ---- */

/* Two gradients on two streams, launched right behind each other: the second may not reach the
 * bridge's own memory before the first has left it. */
static colo_status_t in_turn(t_gpu_rank_t *r, void *arg)
{
    const t_case_t *c = arg;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    t_gpu_call_t call[2];
    t_gpu_rank_t on[2] = {*r, *r};
    rank_try(t_case_bridge(&bridge, c, r->gpus, COLO_MEM_CUDA));
    for (int i = 0; i < 2; i++) {
        rank_cuda(cudaStreamCreateWithFlags(&on[i].stream, cudaStreamNonBlocking));
        rank_try(t_gpu_call_make(&call[i], &on[i], c, 0, true));
    }
    rank_try(t_gpu_quiet(r));
    for (int64_t salt = 1; salt < 21; salt += 2) {
        for (int i = 0; i < 2; i++)
            rank_try(t_gpu_call_refill(&call[i], salt + i));
        for (int i = 0; i < 2; i++)
            rank_try(t_gpu_call_run(&call[i], bridge, on[i].stream));
        for (int i = 0; i < 2; i++)
            rank_try(t_gpu_call_compare(&call[i]));
    }
    rank_try(t_gpu_quiet(r));
    for (int i = 0; i < 2; i++) {
        t_gpu_call_end(&call[i]);
        rank_cuda(cudaStreamDestroy(on[i].stream));
    }
    return COLO_OK;
}

T_CASE(two_streams_in_turn_keep_their_values)
{
    for (int algo = COLO_ALGO_EXACT; algo <= COLO_ALGO_COLLECTIVE; algo++) {
        t_case_t c = the_case(COLO_OUTPUT_FULL_SEQ);
        c.shape = (ref_shape_t){8, 512, 256};
        c.algo = (colo_algo_t)algo;
        c.grad = COLO_GRAD_PARTIAL;
        assert_ok(t_gpus_run(gpus, false, in_turn, &c));
    }
}

/* ---- memory that a bridge takes ---- */

/* In the first call between processes the driver took 8 MiB on 2 GPUs and 16 MiB on 4. */
#define FIRST_CALL_PER_RANK ((size_t)6 << 20)

/* What is free on the device when no rank does anything: another one may share it. */
static colo_status_t free_bytes(t_gpu_rank_t *r, size_t *bytes)
{
    size_t all;
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemGetInfo(bytes, &all));
    return colo_comm_barrier(r->host, NULL);
}

T_CASE_ON_GPUS(gpus, staging_is_what_must_arrive_and_calls_take_nothing)
{
    t_case_t c = {.src = t_side_ordered(0, 1, 1, gpus, true),
                  .dst = t_side_ordered(0, 1, gpus, 1, false),
                  .shape = {4 * gpus, 2048, 2048}, /* staging exceeds FIRST_CALL_PER_RANK's */
                  .output = COLO_OUTPUT_SHARDED,
                  .dtype = COLO_F32,
                  .axes = "sbh"};
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL, *first = NULL;
    T_GPU_CALL(forward);
    T_GPU_CALL(backward);
    int devices = 1;
    rank_cuda(cudaGetDeviceCount(&devices));
    const size_t sharers = (size_t)((r->size - r->device + devices - 1) / devices);
    rank_try(t_case_config(&c, &src, &dst, &config));
    config.mem = COLO_MEM_CUDA;
    rank_try(colo_bridge_create(&first, &config, r->gpus)); /* connects: NCCL takes what it takes */
    size_t free0, free1, free2;
    rank_try(free_bytes(r, &free0));
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    rank_try(free_bytes(r, &free1));
    const size_t workspace = colo_bridge_workspace_size(bridge);
    const int64_t missing = t_plan_bytes(colo_bridge_plan(bridge), COLO_PASS_FORWARD).recv;
    if (free0 > free1 && /* the driver takes 2 MiB at a time */
        free0 - free1 > sharers * (workspace + (4u << 20)))
        return colo_fail(COLO_ERR_STATE,
                         "create took %zu bytes for %zu ranks, workspace_size says %zu",
                         free0 - free1, sharers, workspace);
    /* this layout sends what it receives: two halves of both are no more than what must arrive,
     * but for a line of each message and 256 bytes */
    if (workspace > (size_t)missing + 2 * (size_t)gpus * 65536)
        return colo_fail(COLO_ERR_STATE, "%zu bytes of staging for %lld that must arrive",
                         workspace, (long long)missing);
    rank_try(t_gpu_call_make(&forward, r, &c, 1, false));
    rank_try(t_gpu_call_make(&backward, r, &c, 1, true));
    rank_try(t_download(r, &forward.out)); /* the driver takes something at a first copy */
    const size_t at_first = t_ranks_are_threads() ? 0 : FIRST_CALL_PER_RANK * (size_t)gpus;
    if (workspace <= at_first)
        return colo_fail(COLO_ERR_STATE, "%zu bytes of staging are too few to be seen", workspace);
    for (int rep = 0; rep < 3; rep++) {
        rank_try(free_bytes(r, &free1));
        rank_try(t_gpu_call_run(&forward, bridge, r->stream));
        rank_try(t_gpu_call_run(&backward, bridge, r->stream));
        rank_try(free_bytes(r, &free2));
        if (free1 > free2 + (rep ? 0 : at_first))
            return colo_fail(COLO_ERR_STATE, "the calls of repetition %d took %zu bytes", rep,
                             free1 - free2);
    }
    rank_try(t_gpu_call_compare(&forward));
    rank_try(t_gpu_call_compare(&backward));
    return t_gpu_quiet(r);
}

/* ---- reductions larger than their staging ---- */

enum { STAGING = 64 << 20 };

/* Sums of these are exact in fp32. */
static float term(int64_t i, int32_t rank)
{
    return (float)((i * 7 + rank) % 1000);
}

T_CASE_ON_GPUS(gpus, a_reduction_larger_than_its_staging_sums_in_windows)
{
    const int64_t part = (5 * (int64_t)STAGING / 2 / 4 / r->size) | 1, n = part * r->size;
    const size_t bytes = (size_t)n * sizeof(float);
    float *host = malloc(bytes), *v, *own;
    size_t before, behind;
    int devices = 1;
    rank_check(host);
    rank_cuda(cudaGetDeviceCount(&devices));
    const size_t sharers = (size_t)((r->size - r->device + devices - 1) / devices);
    for (int64_t i = 0; i < n; i++)
        host[i] = term(i, r->rank);
    rank_cuda(cudaMalloc((void **)&v, bytes));
    rank_cuda(cudaMalloc((void **)&own, bytes));
    rank_cuda(t_to_device(v, host, bytes));
    rank_try(colo_comm_barrier(r->gpus, r->stream)); /* connects */
    rank_try(free_bytes(r, &before));
    rank_try(colo_comm_reduce_scatter(r->gpus, v, own, part, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_try(colo_comm_all_reduce(r->gpus, v, v, n - 1, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_try(free_bytes(r, &behind));
    if (before > behind + sharers * STAGING + FIRST_CALL_PER_RANK * (size_t)gpus)
        return colo_fail(COLO_ERR_STATE, "reductions of %zu bytes took %zu", bytes,
                         before - behind);
    for (int half = 0; half < 2; half++) {
        const int64_t from = half ? 0 : part * r->rank, count = half ? n - 1 : part;
        rank_cuda(
            cudaMemcpy(host, half ? v : own, (size_t)count * sizeof *host, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < count; i++) {
            float sum = 0;
            for (int32_t k = 0; k < r->size; k++)
                sum += term(from + i, k);
            if (host[i] != sum)
                return colo_fail(COLO_ERR_STATE, "sum %lld is %g, expected %g",
                                 (long long)(from + i), (double)host[i], (double)sum);
        }
    }
    free(host);
    rank_try(t_gpu_quiet(r));
    cudaFree(v);
    cudaFree(own);
    return COLO_OK;
}

/* ---- two streams with one handle ---- */

struct twice {
    t_gpu_rank_t *r;
    int64_t *data; /* own value, then those of all ranks */
    atomic_bool looked, go;
    bool early;
    colo_status_t st;
};

static void hold(void *arg)
{
    while (!((struct twice *)arg)->go)
        usleep(100);
}

static colo_status_t second_call(struct twice *t)
{
    t_gpu_rank_t *r = t->r;
    rank_cuda(cudaSetDevice(r->device));
    rank_try(colo_comm_all_gather(r->gpus, t->data, t->data + 1, 1, COLO_I64, cudaStreamPerThread));
    usleep(20000);
    t->early = cudaStreamQuery(cudaStreamPerThread) == cudaSuccess;
    t->looked = true;
    rank_cuda(cudaStreamSynchronize(cudaStreamPerThread));
    return COLO_OK;
}

static void *second_thread(void *arg)
{
    struct twice *t = arg;
    t->st = second_call(t);
    t->looked = true;
    return NULL;
}

T_CASE_ON_GPUS(gpus, calls_of_two_threads_on_streams_of_their_own_follow_each_other)
{
    struct twice t = {.r = r};
    pthread_t thread;
    rank_try(colo_comm_barrier(r->gpus, r->stream)); /* connects */
    rank_cuda(cudaMalloc((void **)&t.data, (size_t)(r->size + 1) * sizeof *t.data));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaLaunchHostFunc(cudaStreamPerThread, hold, &t));
    rank_try(colo_comm_all_gather(r->gpus, t.data, t.data + 1, 1, COLO_I64, cudaStreamPerThread));
    rank_check(pthread_create(&thread, NULL, second_thread, &t) == 0);
    while (!t.looked)
        usleep(100);
    t.go = true;
    pthread_join(thread, NULL);
    rank_try(t.st);
    rank_check(!t.early);
    rank_cuda(cudaStreamSynchronize(cudaStreamPerThread));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaFree(t.data));
    return COLO_OK;
}

/* ---- two comms ---- */

struct held {
    atomic_int *arrived; /* pinned: what the second stream copies to behind its call */
    bool overtaken;
};

/* CUDA may run host functions one after the other, so this one waits for a copy. */
static void watch(void *arg)
{
    struct held *h = arg;
    for (int ms = 0; ms < 1000 && !*h->arrived; ms++)
        usleep(1000);
    h->overtaken = *h->arrived;
}

/* Else each comm could fill one GPU with kernels that wait for a GPU which the other comm fills. */
static colo_status_t two_comms(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = the_case(COLO_OUTPUT_SHARDED);
    struct held h = {0};
    colo_comm_t *comm[2] = {r->gpus};
    cudaStream_t stream[2] = {r->stream};
    t_gpu_stand_t s[2];
    rank_cuda(cudaMallocHost((void **)&h.arrived, 2 * sizeof *h.arrived));
    h.arrived[0] = 0;
    h.arrived[1] = 1;
    rank_cuda(cudaStreamCreateWithFlags(&stream[1], cudaStreamNonBlocking));
    rank_try(colo_comm_split_color(r->gpus, 0, r->rank, &comm[1]));
    for (int k = 0; k < 2; k++) {
        rank_try(t_gpu_stand_up(&s[k], r, comm[k], &c, 1 << 16));
        rank_try(
            t_gpu_call_run(&s[k].call, s[k].bridge, r->stream)); /* the host waits in the first */
        rank_try(t_gpu_call_refill(&s[k].call, k + 1));
    }
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaLaunchHostFunc(stream[0], watch, &h));
    for (int k = 0; k < 2; k++)
        rank_try(t_gpu_call_run(&s[k].call, s[k].bridge, stream[k]));
    rank_cuda(cudaMemcpyAsync(&h.arrived[0], &h.arrived[1], sizeof *h.arrived, cudaMemcpyHostToHost,
                              stream[1]));
    for (int k = 0; k < 2; k++)
        rank_cuda(cudaStreamSynchronize(stream[k]));
    rank_check(!h.overtaken);
    for (int k = 0; k < 2; k++)
        rank_try(t_gpu_call_compare(&s[k].call));
    rank_try(t_gpu_quiet(r));
    for (int k = 0; k < 2; k++)
        t_gpu_stand_end(&s[k]);
    colo_comm_destroy(&comm[1]);
    rank_cuda(cudaStreamDestroy(stream[1]));
    rank_cuda(cudaFreeHost(h.arrived));
    return COLO_OK;
}

T_CASE(calls_of_two_comms_over_peers_follow_each_other)
{
    setenv("COLO_TRANSPORT", "peer", 1);
    const colo_status_t st = t_gpus_run(gpus, false, two_comms, NULL);
    setenv("COLO_TRANSPORT", "nccl", 1);
    assert_ok(st);
}

/* ---- a capture that would connect ---- */

/* One sample leaves ranks 0 and 1 to themselves, four tie them: they connect in the next call. The
 * others, which need not, are told. */
static colo_status_t late_capture(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = t_between("dp=4", "tp=1,cp=2,dp=2", 1, 8, 3);
    c.dtype = COLO_F32;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    cudaGraph_t graph;
    rank_try(t_case_bridge(&bridge, &c, r->gpus, COLO_MEM_CUDA));
    c.shape.b = 4;
    rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){4, 8, 3, 0}));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    rank_cuda(cudaStreamEndCapture(r->stream, &graph));
    cudaGraphDestroy(graph);
    rank_check(st == (r->rank < 2 ? COLO_ERR_STATE : COLO_ERR_PEER) &&
               strstr(colo_last_error(), "cannot be captured"));
    rank_try(t_gpu_pass(r, bridge, &c, 0, false));
    rank_try(t_gpu_quiet(r));
    return COLO_OK;
}

T_CASE(captures_that_would_connect_are_refused_and_the_comm_lives)
{
    if (gpus >= 4)
        assert_ok(t_gpus_run(4, false, late_capture, NULL));
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_streams")
