/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ends.c - how objects end: with work that never does, on a device that hangs, after graphs
 * that replay at once, a hundred times after an abort. No destroy waits beyond the deadline, and
 * nothing is left.
 */
#include "judge.h"

#include "comm/comm.h"

#include <dirent.h>
#include <stdatomic.h>

/* ---- work that never ends ---- */

/* Rank 0 destroys a comm, the last one of its context if so, with an operation that no rank joins.
 * Its stream must go on. */
static colo_status_t destroys_unjoined(t_gpu_rank_t *r, void *arg)
{
    const bool last = *(const bool *)arg;
    colo_comm_t *pair = NULL, **comm = last ? &r->gpus : &pair;
    rank_try(colo_comm_set_timeout(r->host, DEADLINE_MS));
    rank_try(colo_comm_create_nccl(r->host, -1, &r->gpus));
    rank_try(colo_comm_set_timeout(r->host, 20 * DEADLINE_MS)); /* what the test itself waits */
    if (!last)
        rank_try(colo_comm_split_color(r->gpus, r->rank / 2, r->rank, &pair));
    rank_try(colo_comm_barrier(*comm, r->stream));
    rank_try(t_gpu_quiet(r));
    if (r->rank == 0) {
        rank_try(colo_comm_barrier(*comm, r->stream));
        const double since = colo_now();
        colo_comm_destroy(comm);
        rank_check(colo_now() - since < DEADLINE_MS * 1e-3 + 1);
        while (cudaStreamQuery(r->stream) == cudaErrorNotReady && colo_now() - since < 20)
            usleep(1000);
        rank_check(cudaStreamQuery(r->stream) == cudaSuccess);
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_comm_destroy(&pair);
    colo_comm_destroy(&r->gpus);
    return works(r);
}

T_CASE(a_communicator_destroyed_with_work_that_never_ends_leaves_no_stream_stuck)
{
    for (int last = 0; last < 2; last++) {
        bool arg = last;
        assert_ok(t_gpus_run(RANKS, true, destroys_unjoined, &arg));
    }
}

static _Atomic bool goes_on;

static void hold(void *arg)
{
    for (int i = 0; i < 10000 && !goes_on; i++) /* not for ever: a destroy may wait for it */
        usleep(1000);
}

/* A device that ends nothing: all that rank 0 destroys comes back by the deadline, once. */
static colo_status_t destroys_on_a_hung_device(t_gpu_rank_t *r, void *arg)
{
    const bool registered = *(const bool *)arg;
    const t_case_t c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4);
    colo_bridge_t *bridge = NULL;
    cudaStream_t other;
    rank_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    rank_try(colo_comm_set_timeout(r->host, DEADLINE_MS));
    rank_try(colo_comm_create_nccl(r->host, -1, &r->gpus));
    rank_try(colo_comm_set_timeout(r->host, 20 * DEADLINE_MS));
    if (registered)
        rank_try(t_gpu_register(r, 1 << 16));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    rank_try(t_gpu_quiet(r));
    if (r->rank == 0)
        rank_cuda(cudaLaunchHostFunc(other, hold, NULL));
    const double since = colo_now();
    colo_bridge_destroy(&bridge);
    colo_memory_destroy(&r->memory);
    colo_comm_destroy(&r->gpus);
    rank_check(r->rank != 0 || colo_now() - since < 2e-3 * DEADLINE_MS + 1);
    if (r->rank == 0)
        goes_on = true;
    rank_cuda(cudaStreamSynchronize(other));
    rank_cuda(cudaStreamDestroy(other));
    rank_try(colo_comm_barrier(r->host, NULL));
    return works(r);
}

T_CASE(a_hung_device_keeps_no_destroy_and_its_memory_is_freed_later)
{
    const objects_t before = live_objects();
    setenv("COLO_TIMEOUT_MS", t_text("%d", DEADLINE_MS), 1);
    for (int registered = 0; registered < 2; registered++) {
        bool arg = registered;
        goes_on = false;
        setenv("COLO_TRANSPORT", registered ? "auto" : "nccl", 1);
        assert_ok(t_gpus_run(RANKS, true, destroys_on_a_hung_device, &arg));
        assert_nothing_left("hung device", before);
    }
    setenv("COLO_TRANSPORT", "nccl", 1);
    unsetenv("COLO_TIMEOUT_MS");
}

/* ---- two graphs at once ---- */

static colo_status_t captured_barrier(t_gpu_rank_t *r, cudaStream_t stream, cudaGraphExec_t *exec)
{
    cudaGraph_t graph;
    rank_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const colo_status_t st = colo_comm_barrier(r->gpus, stream);
    rank_cuda(cudaStreamEndCapture(stream, &graph));
    rank_try(st);
    rank_cuda(cudaGraphInstantiate(exec, graph, 0));
    rank_cuda(cudaGraphDestroy(graph));
    return COLO_OK;
}

/* The end of the first graph's operation is counted first and told last. */
T_CASE_ON_GPUS(2, two_graphs_that_replay_at_once_are_both_counted)
{
    cudaStream_t stream[2] = {r->stream};
    cudaGraphExec_t exec[2];
    rank_cuda(cudaStreamCreateWithFlags(&stream[1], cudaStreamNonBlocking));
    rank_try(colo_comm_barrier(r->gpus, r->stream)); /* connects */
    for (int i = 0; i < 2; i++)
        rank_try(captured_barrier(r, stream[i], &exec[i]));
    rank_try(t_gpu_quiet(r));
    if (r->rank == 0)
        fake_hold_count(r->device, 2);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaGraphLaunch(exec[0], stream[0]));
    while (r->rank == 0 && !fake_holds_count())
        usleep(100);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaGraphLaunch(exec[1], stream[1]));
    rank_cuda(cudaStreamSynchronize(stream[1]));
    if (r->rank == 0) /* the other may be here before this one's second end is told */
        fake_release_count();
    rank_cuda(cudaStreamSynchronize(stream[0]));
    rank_try(colo_comm_set_timeout(r->gpus, 50));
    for (int i = 0; i < 50; i++) { /* the watchdog comes by many times */
        usleep(20000);
        rank_try(colo_comm_check(r->gpus));
    }
    for (int i = 0; i < 2; i++)
        rank_cuda(cudaGraphExecDestroy(exec[i]));
    rank_cuda(cudaStreamDestroy(stream[1]));
    return colo_comm_barrier(r->host, NULL);
}

/* ---- again and again ---- */

static colo_status_t aborts(t_gpu_rank_t *r, void *arg)
{
    const t_case_t *c = arg;
    colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_bridge(r, c, &bridge));
    const colo_status_t st = t_gpu_pass(r, bridge, c, 1, false);
    if (r->rank == VICTIM)
        colo_comm_abort(r->gpus, "the test says so");
    colo_bridge_destroy(&bridge);
    colo_comm_destroy(&r->gpus);
    return st == COLO_ERR_ABORTED && r->rank != VICTIM ? COLO_OK : st; /* it is faster */
}

static int threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;
    while (tasks && readdir(tasks))
        n++;
    if (tasks)
        closedir(tasks);
    return n;
}

T_CASE(hundred_worlds_that_are_aborted_leave_no_object_and_no_thread)
{
    t_case_t c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4);
    assert_ok(t_gpus_run(RANKS, false, aborts, &c)); /* what a device keeps is there */
    usleep(100000);
    const objects_t before = live_objects();
    const int threads_before = threads();
    for (int64_t i = 0; i < t_scaled(100); i++)
        assert_ok(t_gpus_run(RANKS, false, aborts, &c));
    assert_nothing_left("aborted worlds", before);
    for (int i = 0; i < 500 && threads() > threads_before; i++)
        usleep(10000);
    assert_true(threads() <= threads_before);
}

T_MAIN("fake/ends")
