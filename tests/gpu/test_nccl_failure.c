/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_failure.c - communicators of GPUs, one thread a rank, and what goes wrong: a rank is
 * missing at create, two on one device, host pointers, different operations, an abort while a
 * stream waits, an operation that is late. Every rank learns what and why; no rank hangs.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

#include <time.h>
#include <unistd.h>

static int32_t gpus;

/* ---- at create, and bad input ---- */

struct verdicts {
    colo_status_t status[8];
    char error_message[8][300];
    _Atomic int32_t done;
};

static void note(struct verdicts *v, int32_t rank, colo_status_t st)
{
    v->status[rank] = st;
    snprintf(v->error_message[rank], sizeof v->error_message[rank], "%.299s", colo_last_error());
}

static colo_status_t late(t_gpu_rank_t *r, void *arg)
{
    struct verdicts *v = arg;
    rank_try(colo_comm_set_timeout(r->host, 700));
    if (r->rank < r->size - 1) {
        note(v, r->rank, colo_comm_create_nccl(r->host, -1, &r->gpus));
        v->done++;
    }
    for (int i = 0; i < 2000 && v->done < r->size - 1; i++)
        usleep(10000);
    return COLO_OK;
}

T_CASE(a_rank_that_is_missing_at_create_is_a_timeout)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, true, late, &v));
    for (int32_t k = 0; k < gpus - 1; k++)
        if (v.status[k] != COLO_ERR_TIMEOUT)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.error_message[k]);
}

static colo_status_t same_device(t_gpu_rank_t *r, void *arg)
{
    note(arg, r->rank, colo_comm_create_nccl(r->host, 0, &r->gpus));
    return COLO_OK;
}

/* Unless NCCL is told, on all ranks, that they may share; and is one that can (2.30). */
T_CASE(two_ranks_on_one_device_are_refused_on_all)
{
    const char *word = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    COLO_AUTOFREE char *kept = word ? strdup(word) : NULL;
    static const char *const words[] = {NULL, "0", "no"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        struct verdicts v = {.done = 0};
        if (words[i])
            setenv("NCCL_MULTI_RANK_GPU_ENABLE", words[i], 1);
        else
            unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
        colo_status_t st = t_gpus_run(gpus, true, same_device, &v);
        if (kept)
            setenv("NCCL_MULTI_RANK_GPU_ENABLE", kept, 1);
        else
            unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
        assert_ok(st);
        for (int32_t k = 0; k < gpus; k++) {
            assert_int_equal(v.status[k], COLO_ERR_MISMATCH);
            assert_non_null(strstr(v.error_message[k],
                                   "ranks 0 and 1 (world ranks 0 and 1) are on the same device"));
            assert_non_null(strstr(v.error_message[k], "NCCL_MULTI_RANK_GPU_ENABLE=1"));
        }
    }
}

static colo_status_t no_such_device(t_gpu_rank_t *r, void *arg)
{
    note(arg, r->rank, colo_comm_create_nccl(r->host, r->rank == 1 ? 99 : -1, &r->gpus));
    rank_check(colo_comm_check(r->host) == COLO_OK);
    return colo_comm_create_nccl(r->host, -1, &r->gpus); /* the parent lives: try again */
}

T_CASE(a_wrong_device_on_one_rank_is_told_to_all)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, true, no_such_device, &v));
    for (int32_t k = 0; k < gpus; k++)
        assert_int_equal(v.status[k], k == 1 ? COLO_ERR_ARG : COLO_ERR_PEER);
}

static colo_status_t host_pointer(t_gpu_rank_t *r, void *arg)
{
    float v[16] = {0};
    note(arg, r->rank, colo_comm_all_reduce(r->gpus, v, v, 8, COLO_F32, COLO_REDOP_SUM, r->stream));
    return COLO_OK;
}

T_CASE(host_memory_is_refused)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, host_pointer, &v));
    for (int32_t k = 0; k < gpus; k++)
        if (v.status[k] != COLO_ERR_ARG && v.status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.error_message[k]);
}

static colo_status_t differing(t_gpu_rank_t *r, void *arg)
{
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 4096));
    rank_try(colo_comm_set_check(r->gpus, 2));
    int64_t n = r->rank == 1 ? 9 : 8;
    note(arg, r->rank, colo_comm_all_reduce(r->gpus, d, d, n, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_try(colo_comm_check(r->gpus));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    cudaFree(d);
    return COLO_OK;
}

T_CASE(different_counts_are_a_mismatch_before_anything_moves)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, differing, &v));
    for (int32_t k = 0; k < gpus; k++)
        assert_int_equal(v.status[k], COLO_ERR_MISMATCH);
}

static colo_status_t abandoned(t_gpu_rank_t *r, void *arg)
{
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 1 << 20));
    rank_try(colo_comm_barrier(r->gpus, r->stream)); /* connects */
    if (r->rank == 0) {                              /* enqueues and waits; no rank comes */
        rank_try(colo_comm_all_reduce(r->gpus, d, d, 1000, COLO_F32, COLO_REDOP_SUM, r->stream));
        (void)cudaStreamSynchronize(r->stream);
        note(arg, 0, colo_comm_check(r->gpus));
    } else {
        usleep(300000);
        colo_comm_abort(r->gpus, "test");
        note(arg, r->rank, colo_comm_check(r->gpus));
    }
    cudaFree(d);
    return COLO_OK;
}

T_CASE(an_abort_ends_a_stream_that_waits)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, abandoned, &v));
    for (int32_t k = 0; k < gpus; k++)
        if (v.status[k] != COLO_ERR_ABORTED && v.status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.error_message[k]);
}

/* Comms of the same ranks share a connection: if one fails, what another has enqueued ends, too. */
static colo_status_t torn(t_gpu_rank_t *r, void *arg)
{
    colo_comm_t *sums = NULL, *fails = NULL;
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 4096));
    rank_try(colo_comm_split_color(r->gpus, 0, r->rank, &sums));
    rank_try(colo_comm_split_color(r->gpus, 0, r->rank, &fails));
    rank_try(t_gpu_quiet(r));
    if (r->rank == 0) { /* no other rank comes */
        rank_try(colo_comm_all_reduce(sums, d, d, 8, COLO_F32, COLO_REDOP_SUM, r->stream));
        (void)cudaStreamSynchronize(r->stream);
        note(arg, 0, colo_comm_check(sums));
    } else if (r->rank == 1) {
        usleep(100000);
        rank_check(colo_comm_all_reduce(fails, NULL, d, 8, COLO_F32, COLO_REDOP_SUM, r->stream) <
                   0);
    }
    (void)colo_comm_barrier(r->host, NULL);
    colo_comm_destroy(&sums);
    colo_comm_destroy(&fails);
    cudaFree(d);
    return COLO_OK;
}

T_CASE(a_sum_whose_connection_another_comm_takes_down_is_not_complete)
{
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, torn, &v));
    assert_int_equal(v.status[0], COLO_ERR_PEER);
    assert_non_null(strstr(v.error_message[0], "another comm of the same ranks failed"));
}

/* ---- deadlines on the stream ---- */

static double seconds_since(double start)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9 - start;
}

enum { EAGER, REPLAYED, OF_A_BRIDGE };

struct alone {
    struct verdicts v;
    int how;
    double took;
};

/* What rank 0 enqueues while the others do something else. */
static colo_status_t enqueue_alone(t_gpu_rank_t *r, struct alone *a, float *d, cudaGraphExec_t exec,
                                   colo_bridge_t *bridge)
{
    if (a->how == REPLAYED)
        return t_cuda(cudaGraphLaunch(exec, r->stream), "launch");
    if (a->how == EAGER)
        return colo_comm_all_reduce(r->gpus, d, d, 1000, COLO_F32, COLO_REDOP_SUM, r->stream);
    colo_tensor_t x = colo_tensor_cuda(d, COLO_F32, r->device, 3, (int64_t[]){8 / r->size, 8, 2});
    colo_tensor_t y = colo_tensor_cuda(d + 1024, COLO_F32, r->device, 3, (int64_t[]){8, 8, 2});
    return colo_bridge_forward(bridge, &x, &y, r->stream);
}

static colo_status_t alone_rank(t_gpu_rank_t *r, void *arg)
{
    struct alone *a = arg;
    float *d;
    cudaGraphExec_t exec = NULL;
    colo_bridge_t *bridge = NULL;
    colo_layout_t src, dst;
    colo_grid_t g;
    rank_cuda(cudaMalloc((void **)&d, 1 << 20));
    rank_try(t_gpu_quiet(r)); /* no rank allocates while others wait on the device for it */
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    rank_try(t_gpu_quiet(r));
    char text[16];
    snprintf(text, sizeof text, "dp=%d", r->size);
    rank_try(colo_grid_parse(&g, text, r->size));
    rank_try(colo_layout_init_src(&src, &g));
    snprintf(text, sizeof text, "tp=%d", r->size);
    rank_try(colo_grid_parse(&g, text, r->size));
    rank_try(colo_layout_init_dst(&dst, &g));
    colo_bridge_config_t config = {
        COLO_BRIDGE_CONFIG_INIT, .src = &src,       .dst = &dst,
        .shape = {8, 8, 2, 0},   .dtype = COLO_F32, .mem = COLO_MEM_CUDA};
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    if (a->how == OF_A_BRIDGE) { /* the first call of a way is compared: the host would wait */
        rank_try(enqueue_alone(r, a, d, exec, bridge));
        rank_try(t_gpu_quiet(r));
    }
    if (a->how == REPLAYED) {
        rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
        rank_try(t_gpu_captured(
            r, colo_comm_all_gather(r->gpus, d, d + 1000, 100, COLO_F32, r->stream), &exec));
        for (int i = 0; i < 3; i++)
            rank_cuda(cudaGraphLaunch(exec, r->stream));
        rank_cuda(cudaStreamSynchronize(r->stream));
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    double start = seconds_since(0);
    if (r->rank == 0) {
        rank_try(colo_comm_set_timeout(r->gpus, 400));
        rank_try(enqueue_alone(r, a, d, exec, bridge));
        (void)cudaStreamSynchronize(r->stream);
        a->took = seconds_since(start);
    }
    while (colo_comm_check(r->gpus) == COLO_OK && seconds_since(start) < 20)
        usleep(10000);
    note(&a->v, r->rank, colo_comm_check(r->gpus));
    if (exec)
        cudaGraphExecDestroy(exec);
    colo_bridge_destroy(&bridge);
    cudaFree(d);
    return COLO_OK;
}

T_CASE(an_operation_that_is_late_is_a_timeout_that_names_it)
{
    for (int how = EAGER; how <= OF_A_BRIDGE; how++) {
        struct alone a = {.how = how};
        const char *what[] = {"all_reduce #", "all_gather #", "exchange #"};
        assert_ok(t_gpus_run(gpus, false, alone_rank, &a));
        if (a.v.status[0] != COLO_ERR_TIMEOUT || !strstr(a.v.error_message[0], what[how]) ||
            !strstr(a.v.error_message[0], "has not ended 400 ms after its turn came"))
            fail_msg("way %d: %s: %s", how, colo_status_name(a.v.status[0]), a.v.error_message[0]);
        for (int32_t k = 1; k < gpus; k++)
            if (a.v.status[k] != COLO_ERR_PEER || !strstr(a.v.error_message[k], what[how]))
                fail_msg("way %d, rank %d: %s: %s", how, k, colo_status_name(a.v.status[k]),
                         a.v.error_message[k]);
        if (a.took < 0.35 || a.took > 15)
            fail_msg("way %d: the stream was free after %.2f s", how, a.took);
    }
}

static void host_sleep(void *arg)
{
    usleep(700000);
}

/* The caller's own work in front of an operation is not the operation's. One sleep for all streams:
 * host functions of a context run one after the other. */
T_CASE_ON_GPUS(gpus, work_queued_in_front_is_not_late)
{
    static cudaEvent_t slept;
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 4096));
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_comm_set_timeout(r->gpus, 300));
    if (r->rank == 0) {
        rank_cuda(cudaEventCreateWithFlags(&slept, cudaEventDisableTiming));
        rank_cuda(cudaLaunchHostFunc(r->stream, host_sleep, NULL));
        rank_cuda(cudaEventRecord(slept, r->stream));
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaStreamWaitEvent(r->stream, slept, 0));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_REDOP_SUM, r->stream));
    rank_try(t_gpu_quiet(r));
    usleep(100000);
    cudaFree(d);
    if (r->rank == 0)
        rank_cuda(cudaEventDestroy(slept));
    return colo_comm_check(r->gpus);
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_failure")
