/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpus.c - see perf/gpus.h.
 *
 * A rank that fails complains and returns; the others' barriers end. A rank never waits for its
 * stream without a deadline: a peer that failed may have left a kernel waiting. Such a stream would
 * keep exit() waiting, too, so a run that failed leaves the process at once.
 */
#include "gpus.h"

#include <colobridge/nccl.h>

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- NCCL ---- */

static int find_nccl(perf_nccl_t *lib)
{
#define PERF_NCCL_NAME(name, function) {#function, &lib->name},
    const struct {
        const char *name;
        void *function;
    } want[] = {PERF_NCCL(PERF_NCCL_NAME)};
    void *so = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); /* the library's, too */
    if (!so)
        return tool_refuse("no NCCL: %s", dlerror());
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        void *f = dlsym(so, want[i].name);
        if (!f)
            return tool_problem("libnccl.so.2 has no %s", want[i].name);
        *(void **)want[i].function = f;
    }
    return lib->get_version(&lib->version) == ncclSuccess ? TOOL_OK
                                                          : tool_problem("ncclGetVersion failed");
}

int perf_rank_comm(perf_rank_t *r, const perf_split_t *split, ncclComm_t *comm)
{
    perf_comms_t *c = r->comms, *end = c + r->ncomms;
    while (c < end && memcmp(&c->split, split, sizeof *split) != 0)
        c++;
    if (c == end) {
        if (r->ncomms == PERF_COMMS_MAX)
            return perf_rank_complain(r, "more than %d ways to group the ranks", PERF_COMMS_MAX);
        c->split = *split;
        RANK_NCCL(r->all->nccl.split(r->nccl, (int)split->color[r->me], (int)split->key[r->me],
                                     &c->comm, NULL));
        r->ncomms++;
    }
    *comm = c->comm;
    return TOOL_OK;
}

/* ---- ranks ---- */

int perf_rank_complain(perf_rank_t *r, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (atomic_fetch_add(&r->all->said, 1) == 0)
        tool_problem("%s", text);
    return TOOL_PROBLEM;
}

int perf_rank_barrier(perf_rank_t *r)
{
    if (r->all->said)
        return TOOL_PROBLEM;
    RANK_COLO(colo_comm_barrier(r->host, NULL));
    return TOOL_OK;
}

int perf_rank_wait(perf_rank_t *r)
{
    struct timespec t0, t;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (;;) {
        const cudaError_t e = cudaStreamQuery(r->stream);
        if (e == cudaSuccess)
            return TOOL_OK;
        if (e != cudaErrorNotReady)
            return perf_rank_complain(r, "GPU %d: %s", (int)r->me, cudaGetErrorString(e));
        clock_gettime(CLOCK_MONOTONIC, &t);
        if (t.tv_sec - t0.tv_sec > 60 || r->all->said)
            return perf_rank_complain(r, "GPU %d is not done after a minute", (int)r->me);
        sched_yield();
    }
}

int perf_rank_reduce(perf_rank_t *r, int64_t *value, colo_redop_t op)
{
    RANK_COLO(colo_comm_all_reduce(r->host, value, value, 1, COLO_I64, op, NULL));
    return TOOL_OK;
}

int64_t perf_batch(int64_t bytes)
{
    const int64_t n = (INT64_C(256) << 20) / (bytes > 0 ? bytes : 1);
    return n < 3 ? 3 : n > 20 ? 20 : n;
}

static int repetitions(perf_rank_t *r, perf_fn fn, void *arg, int64_t batch, float *ms)
{
    const perf_t *p = r->all->p;
    cudaEvent_t from, to;
    RANK_CUDA(cudaEventCreate(&from));
    RANK_CUDA(cudaEventCreate(&to));
    for (int64_t i = 0; i < p->warmup; i++)
        TOOL_TRY(fn(arg, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    for (int64_t i = 0; i < p->iters; i++) {
        TOOL_TRY(perf_rank_barrier(r));
        RANK_CUDA(cudaEventRecord(from, r->stream));
        for (int64_t k = 0; k < batch; k++)
            TOOL_TRY(fn(arg, r->stream));
        RANK_CUDA(cudaEventRecord(to, r->stream));
        TOOL_TRY(perf_rank_wait(r));
        RANK_CUDA(cudaEventElapsedTime(&ms[i], from, to));
        ms[i] /= (float)batch;
    }
    RANK_CUDA(cudaEventDestroy(from));
    RANK_CUDA(cudaEventDestroy(to));
    RANK_COLO(colo_comm_all_reduce(r->host, ms, ms, p->iters, COLO_F32, COLO_REDOP_MAX, NULL));
    return TOOL_OK;
}

int perf_rank_time(perf_rank_t *r, perf_fn fn, void *arg, int64_t batch, double *median,
                   double *best)
{
    const size_t n = (size_t)r->all->p->iters;
    float *ms = calloc(n, sizeof *ms);
    const int rc = ms ? repetitions(r, fn, arg, batch, ms) : perf_rank_complain(r, "no memory");
    if (rc == TOOL_OK) {
        *median = 1e3 * perf_median(ms, n);
        *best = 1e3 * ms[0];
    }
    free(ms);
    return rc;
}

static int launch_graph(void *arg, cudaStream_t stream)
{
    return cudaGraphLaunch(*(cudaGraphExec_t *)arg, stream) == cudaSuccess ? TOOL_OK : TOOL_PROBLEM;
}

int perf_rank_replay(perf_rank_t *r, perf_fn fn, void *arg, int64_t batch, double *median,
                     double *best)
{
    enum { CAPTURED = 4 };
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec;
    int rc = TOOL_OK;
    TOOL_TRY(fn(arg, r->stream)); /* staging grows here, not in the capture */
    TOOL_TRY(perf_rank_wait(r));
    TOOL_TRY(perf_rank_barrier(r));
    RANK_CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    for (int k = 0; k < CAPTURED && rc == TOOL_OK; k++)
        rc = fn(arg, r->stream);
    RANK_CUDA(cudaStreamEndCapture(r->stream, &graph));
    if (rc != TOOL_OK)
        return rc;
    RANK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    TOOL_TRY(
        perf_rank_time(r, launch_graph, &exec, (batch + CAPTURED - 1) / CAPTURED, median, best));
    *median /= CAPTURED;
    *best /= CAPTURED;
    RANK_CUDA(cudaGraphExecDestroy(exec));
    RANK_CUDA(cudaGraphDestroy(graph));
    return TOOL_OK;
}

struct job {
    perf_gpus_t *all;
    int (*fn)(perf_rank_t *r, void *arg);
    void *arg;
};

static int prepare(perf_rank_t *r)
{
    RANK_CUDA(cudaSetDevice(r->me));
    RANK_CUDA(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    RANK_CUDA(cudaMalloc((void **)&r->count, sizeof *r->count));
    for (int32_t k = 0; k < r->n && r->all->reach; k++) {
        if (k == r->me)
            continue;
        const cudaError_t e = cudaDeviceEnablePeerAccess(k, 0);
        if (e == cudaErrorPeerAccessAlreadyEnabled)
            (void)cudaGetLastError();
        else
            RANK_CUDA(e);
    }
    RANK_COLO(colo_comm_create_nccl(r->host, -1, &r->gpus));
    RANK_NCCL(r->all->nccl.init_rank(&r->nccl, r->n, r->all->id, r->me));
    return perf_rank_barrier(r);
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    const struct job *j = arg;
    perf_rank_t r = {
        .all = j->all, .me = colo_comm_rank(world), .n = colo_comm_size(world), .host = world};
    int rc = prepare(&r);
    rc = rc ? rc : j->fn(&r, j->arg);
    if (rc != TOOL_OK)
        return COLO_ERR_STATE;
    colo_comm_destroy(&r.gpus);
    cudaFree(r.count);
    cudaStreamDestroy(r.stream);
    return COLO_OK;
}

int perf_gpus_run(perf_t *p, int32_t n, int (*fn)(perf_rank_t *r, void *arg), void *arg)
{
    perf_gpus_t *all = calloc(1, sizeof *all);
    if (n > PERF_GPUS_MAX)
        return tool_refuse("%d GPUs, at most %d", n, PERF_GPUS_MAX);
    if (!all)
        return tool_problem("no memory");
    all->p = p;
    all->reach = true;
    TOOL_TRY(find_nccl(&all->nccl));
    if (all->nccl.get_unique_id(&all->id) != ncclSuccess)
        return tool_problem("ncclGetUniqueId failed");
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < n; k++) {
            int can = 0;
            if (i != k && (cudaDeviceCanAccessPeer(&can, i, k) != cudaSuccess || !can))
                all->reach = false;
        }
    if (!all->reach && !p->json)
        printf("# the GPUs do not reach each other's memory: no push\n");
    json_object_set_new(p->doc, "nccl", json_integer(all->nccl.version));
    struct job j = {all, fn, arg};
    if (colo_comm_threads_run(n, on_rank, &j) < 0) {
        if (!all->said)
            tool_problem("%s", colo_last_error());
        fflush(NULL);
        _exit(TOOL_PROBLEM);
    }
    free(all);
    return TOOL_OK;
}
