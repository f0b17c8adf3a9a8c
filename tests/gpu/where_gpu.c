/* SPDX-License-Identifier: Apache-2.0 */
/*
 * where_gpu.c - see loss/where.h: ranks are threads that share one GPU. Their communicator moves
 * device memory by copies between barriers of the threads: a backend of a few lines, made so that W
 * ranks need no W GPUs.
 *
 * Tolerances: a thread adds in the precision of the row, some 64 u in all for rows of these sizes
 * (loss_gpu.c derives it), where the host adds in fp64 and rounds once: 32 times the host's 4 u.
 */
#include "gpu/gpu.h"
#include "loss/where.h"

#include "comm/comm.h"
#include "comm/direct.h"

enum { MOST = 8 };

static colo_status_t quiet(cudaError_t e)
{
    return e == cudaSuccess ? COLO_OK : COLO_ERR_CUDA;
}

static colo_status_t everyone(colo_comm_t *c, const void *mine, const void **all,
                              colo_stream_t stream)
{
    rank_try(quiet(cudaStreamSynchronize(stream)));
    return colo_comm_all_gather(c->impl, &mine, all, sizeof mine, COLO_U8, NULL);
}

static colo_status_t gather(colo_comm_t *c, const void *send, void *recv, colo_stream_t stream)
{
    const void *from[MOST];
    const size_t bytes = (size_t)c->op.count * colo_dtype_size(c->op.dtype);
    colo_status_t st = everyone(c, send, from, stream);
    for (int32_t r = 0; r < c->size && st == COLO_OK; r++) {
        char *to = (char *)recv + (size_t)r * bytes;
        if (to != from[r] && bytes > 0)
            st = quiet(cudaMemcpy(to, from[r], bytes, cudaMemcpyDeviceToDevice));
    }
    if (st == COLO_OK)
        st = quiet(cudaDeviceSynchronize());
    colo_status_t met = colo_comm_barrier(c->impl, NULL);
    return st ? st : met;
}

/* Sums of f64 only: what the tests ask for. */
static colo_status_t scatter(colo_comm_t *c, const void *send, void *recv, colo_stream_t stream)
{
    const void *from[MOST];
    const size_t n = (size_t)c->op.count, bytes = n * sizeof(double);
    colo_status_t st = everyone(c, send, from, stream);
    double *sum = calloc(n + 1, sizeof *sum), *one = malloc(bytes + 8);
    rank_check(c->op.dtype == COLO_F64 && c->op.param == COLO_REDOP_SUM);
    for (int32_t r = 0; r < c->size && st == COLO_OK && n > 0; r++) {
        st = quiet(cudaMemcpy(one, (const double *)from[r] + (size_t)c->rank * n, bytes,
                              cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < n; i++)
            sum[i] += one[i];
    }
    colo_status_t met = colo_comm_barrier(c->impl, NULL);
    if (st == COLO_OK && n > 0)
        st = quiet(t_to_device(recv, sum, bytes));
    free(sum);
    free(one);
    return st ? st : met;
}

static colo_status_t collective(colo_comm_t *c, const void *send, void *recv, colo_stream_t stream)
{
    return (c->op.kind == COLO_OP_REDUCE_SCATTER ? scatter : gather)(c, send, recv, stream);
}

static void tell(colo_comm_t *c, colo_status_t status, const char *error_message)
{
    colo_comm_abort(c->impl, error_message);
}

static colo_status_t state(const colo_comm_t *c, char *error_message, size_t cap)
{
    return COLO_OK;
}

static void destroy(colo_comm_t *c)
{
    c->impl = NULL; /* the threads' own */
}

static const colo_direct_memory_t reaches; /* a backend that has them moves memory of GPUs */

static const colo_comm_backend_t backend = {
    .name = "nccl",
    .direct = &reaches,
    .collective = collective,
    .fail = tell,
    .state = state,
    .destroy = destroy,
};

static colo_status_t group_of(colo_comm_t *world, colo_comm_t **group)
{
    rank_check(colo_comm_size(world) <= MOST);
    rank_try(colo_comm_new(group, &backend, colo_comm_rank(world), colo_comm_size(world), NULL));
    (*group)->impl = world;
    return COLO_OK;
}

/* On rank threads an assertion would not return to CMocka: give up the program instead. */
static void must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "where_gpu: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

static void wait(void)
{
    must(cudaDeviceSynchronize(), "a kernel");
}

static void *put(const void *from, size_t bytes)
{
    void *p = NULL;
    must(cudaMalloc(&p, bytes + 16), "cudaMalloc");
    must(from ? t_to_device(p, from, bytes) : cudaMemset(p, 0xa5, bytes), "filling");
    wait();
    return p;
}

static void get(void *to, const void *from, size_t bytes)
{
    wait();
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "fetching");
}

static void drop(void *p)
{
    must(cudaFree(p), "cudaFree");
}

static void set(void *to, const void *from, size_t bytes)
{
    wait();
    must(t_to_device(to, from, bytes), "filling");
}

static int need(void)
{
    return gpu_need(1);
}

static int32_t device(void)
{
    return 0;
}

where_t where = {COLO_MEM_CUDA, 32,  put,  get,    drop, group_of, colo_comm_destroy,
                 need,          set, wait, device, NULL, true};
