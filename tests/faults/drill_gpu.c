/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drill_gpu.c - ranks of a drill that are threads, with tensors on GPUs. See drill.h. Over nccl: a
 * GPU each, everything by NCCL. Over peer: bridges write into registered memory. If there are fewer
 * GPUs than ranks, peers share them on communicators without NCCL (gpu/backends/direct_only.c), and
 * the ranks' communicator of the host is what they split and sum with. In the rows of the fault
 * "fails" they open each other's memory as processes do, which only the stand-in for CUDA lets
 * threads do: on GPUs these rows are skipped.
 *
 * Calls are asynchronous: a step ends when its stream is empty, and then has the communicator's
 * state, if its call returned no error. The fresh communicators do the job without a fault.
 */
#include "faults/drill.h"

#include "gpu/gpu_ranks.h"

#include <pthread.h>
#include <unistd.h>

const char transports[] = "nccl|peer";

struct where {
    t_gpu_rank_t *gpu;
    void *own[8]; /* what is to be freed */
    int owned;
    char *sum;          /* a rank's 1, and the sum */
    cudaStream_t other; /* than that of the calls */
};

static bool peers, shared, again;
static pthread_barrier_t quiet;

static colo_status_t get_memory(struct where *w, size_t bytes, char **data)
{
    rank_check(w->owned < 8);
    return t_gpu_memory(w->gpu, bytes, data, &w->own[w->owned++]);
}

colo_status_t place_tensor(struct rank *r, colo_tensor_t *t, size_t bytes)
{
    struct where *w = r->where;
    char *data = NULL;
    rank_try(get_memory(w, bytes, &data));
    rank_cuda(t_to_device(data, t->data, bytes));
    t->data = data;
    t->mem = COLO_MEM_CUDA;
    t->device = w->gpu->device;
    return COLO_OK;
}

static colo_status_t wait_for(struct rank *r, colo_comm_t *c, colo_status_t st)
{
    const struct where *w = r->where;
    rank_try(st);
    rank_try(t_gpu_wait(w->gpu));
    return colo_comm_check(c);
}

colo_status_t wait_ended(struct rank *r, colo_status_t st)
{
    return wait_for(r, r->world, st);
}

static _Atomic bool goes_on;

static void hold(void *arg)
{
    for (int ms = 0; ms < 20 * deadline_ms && !goes_on; ms++)
        usleep(1000);
}

void burden_device(struct rank *r, colo_comm_t *pair)
{
    struct where *w = r->where;
    if (is(r, "hung"))
        cudaLaunchHostFunc(w->other, hold, NULL);
    if (is(r, "unjoined"))
        (void)colo_comm_all_reduce(pair, w->sum, w->sum + 256, 1, COLO_F32, COLO_REDOP_SUM,
                                   r->stream);
}

void enter_thread(struct rank *r)
{
    const struct where *w = r->where;
    cudaSetDevice(w->gpu->device);
}

colo_status_t sum_ranks(struct rank *r, colo_comm_t *c, float *sum)
{
    const struct where *w = r->where;
    const float one = 1;
    if (r->sums != r->world)
        return colo_comm_all_reduce(c, &one, sum, 1, COLO_F32, COLO_REDOP_SUM, NULL);
    rank_cuda(t_to_device(w->sum, &one, sizeof one));
    rank_try(wait_for(
        r, c,
        colo_comm_all_reduce(c, w->sum, w->sum + 256, 1, COLO_F32, COLO_REDOP_SUM, r->stream)));
    rank_cuda(cudaMemcpyAsync(sum, w->sum + 256, sizeof *sum, cudaMemcpyDeviceToHost, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

static colo_status_t one_rank(t_gpu_rank_t *gpu, void *arg)
{
    struct where w = {.gpu = gpu};
    struct rank r;
    rank_check(open_rank(&r, gpu->rank));
    r.world = gpu->gpus;
    r.sums = shared ? gpu->host : gpu->gpus;
    r.mem = COLO_MEM_CUDA;
    r.stream = gpu->stream;
    r.where = &w;
    const double begin = colo_now();
    rank_cuda(cudaStreamCreateWithFlags(&w.other, cudaStreamNonBlocking));
    colo_status_t st = peers && !gpu->memory ? t_gpu_register(gpu, 1 << 16) : COLO_OK;
    if (st == COLO_OK && strcmp(fault, "fails") == 0)
        st = be_processes(&r);
    if (st == COLO_OK)
        st = get_memory(&w, 512, &w.sum);
    if (st == COLO_OK)
        st = colo_comm_set_timeout(gpu->host, deadline_ms);
    if (st < 0)
        report(&r, "memory", st, begin);
    else
        st = work(&r);
    if (again)
        report(&r, "fresh", st, begin);
    const double end = colo_now();
    (void)t_gpu_wait(gpu);
    report(&r, "destroy", COLO_OK, end);
    pthread_barrier_wait(&quiet); /* peers still write */
    while (w.owned > 0 && !is(&r, "hung"))
        cudaFree(w.own[--w.owned]);
    const double begin_destroy = colo_now();
    colo_memory_destroy(&gpu->memory);
    colo_comm_destroy(&gpu->gpus);
    report(&r, "destroy", COLO_OK, begin_destroy);
    goes_on = goes_on || is(&r, "hung");
    cudaStreamSynchronize(w.other);
    cudaStreamDestroy(w.other);
    while (w.owned > 0)
        cudaFree(w.own[--w.owned]);
    fclose(r.out);
    return COLO_OK; /* each rank ends by itself */
}

static colo_status_t on_world(colo_comm_t *world, void *arg)
{
    rank_try(colo_comm_set_timeout(world, 20 * deadline_ms)); /* while CUDA and NCCL start */
    return t_gpu_on(world, shared, one_rank, NULL);
}

static void run_world(void)
{
    struct rank r;
    const double begin = colo_now();
    const colo_status_t st = colo_comm_threads_run(RANKS, on_world, NULL);
    for (int32_t me = 0; st < 0 && me < RANKS && open_rank(&r, me); me++) {
        report(&r, again ? "fresh" : "world", st, begin);
        fclose(r.out);
    }
}

int run_worlds(const char *transport)
{
    peers = strcmp(transport, "peer") == 0;
    shared = peers && t_device_count() < RANKS;
    if (peers ? !t_peers_enough(RANKS) : !t_gpus_enough(RANKS))
        return T_EXIT_SKIP;
    if (strcmp(fault, "fails") == 0 && !be_processes)
        return T_EXIT_SKIP;
    setenv("COLO_TRANSPORT", transport, 1);
    pthread_barrier_init(&quiet, NULL, RANKS);
    run_world();
    fault[0] = step[0] = 0;
    again = true;
    deadline_ms *= 20; /* no fault: nothing is to be late */
    run_world();
    return freed_while_open && freed_while_open();
}
