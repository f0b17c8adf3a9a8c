/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_ranks.c - see nccl_ranks.h */
#include "gpu/nccl_ranks.h"

#include "comm/comm.h"
#include "core/error.h"

#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 8 };

bool t_gpus_shared(void)
{
    const char *text = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return text && atoi(text) != 0 && t_ranks_are_threads();
}

/* Asked in another process: one that has touched CUDA cannot fork ranks. */
int t_device_count(void)
{
    int n = 0, status = 0;
    pid_t child = fork();
    if (child == 0)
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return 0;
    return WEXITSTATUS(status);
}

int t_gpu_count(void)
{
    int n = t_device_count();
    n = n > MOST || (n > 0 && t_gpus_shared()) ? MOST : n;
    return n < t_ranks_most() ? n : t_ranks_most();
}

int32_t t_gpu_ranks(void)
{
    const int n = t_gpu_count();
    return n >= 8 ? 8 : n >= 4 ? 4 : 2;
}

bool t_gpus_enough(int n)
{
    const int found = t_gpu_count();
    if (found < n)
        printf("skipped: needs %d GPUs, found %d\n", n, found);
    return found >= n;
}

colo_status_t t_cuda(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? COLO_OK
                            : colo_fail(COLO_ERR_CUDA, "%s: %s", what, cudaGetErrorString(e));
}

struct job {
    t_gpu_fn fn;
    void *arg;
    bool bare;
};

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    const struct job *j = arg;
    t_gpu_rank_t r = {.host = world, .rank = colo_comm_rank(world), .size = colo_comm_size(world)};
    int devices = 0;
    rank_cuda(cudaGetDeviceCount(&devices));
    r.device = r.rank % devices;
    rank_cuda(cudaSetDevice(r.device));
    rank_cuda(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    colo_status_t st = j->bare ? COLO_OK : colo_comm_create_nccl(world, -1, &r.gpus);
    if (st == COLO_OK)
        st = j->fn(&r, j->arg);
    if (st == COLO_OK) /* the world may have failed: that is what some tests are about */
        (void)colo_comm_barrier(world, NULL);
    /* The others may wait for this rank on the host, and its destroy waits for their GPUs. */
    if (st < 0 && colo_comm_check(world) == COLO_OK)
        colo_comm_i_fail(world, st);
    colo_comm_destroy(&r.gpus);
    cudaStreamDestroy(r.stream);
    return st;
}

colo_status_t t_gpus_run(int32_t n, bool bare, t_gpu_fn fn, void *arg)
{
    struct job j = {fn, arg, bare};
    return t_run_ranks(n, on_rank, &j, sizeof j);
}

colo_status_t t_gpu_quiet(t_gpu_rank_t *r)
{
    rank_cuda(cudaStreamSynchronize(r->stream));
    return colo_comm_barrier(r->host, NULL);
}

/* The same bytes on the device. */
static colo_status_t mirror(const t_buffer_t *b, void **dev, colo_tensor_t *t, int32_t device)
{
    rank_cuda(cudaMalloc(dev, b->bytes));
    rank_cuda(t_to_device(*dev, b->raw, b->bytes));
    *t = b->t;
    t->mem = COLO_CUDA;
    t->device = device;
    if (t->data)
        t->data = (char *)*dev + ((unsigned char *)b->t.data - b->raw);
    return COLO_OK;
}

colo_status_t t_gpu_pass(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                         bool backward)
{
    t_role_t in_role = backward ? T_DY : T_X, out_role = backward ? T_DX : T_Y;
    t_buffer_t in = {0}, out = {0};
    void *dev[2] = {NULL, NULL};
    colo_tensor_t t[2];
    colo_status_t st;
    COLO_TRY_GOTO(st, t_case_tensor(c, in_role, r->rank, salt, true, &in), done);
    COLO_TRY_GOTO(st, t_case_tensor(c, out_role, r->rank, salt, false, &out), done);
    COLO_TRY_GOTO(st, mirror(&in, &dev[0], &t[0], r->device), done);
    COLO_TRY_GOTO(st, mirror(&out, &dev[1], &t[1], r->device), done);
    COLO_TRY_GOTO(st, colo_comm_barrier(r->host, NULL), done);
    st = backward ? colo_bridge_backward(bridge, &t[0], &t[1], r->stream)
                  : colo_bridge_forward(bridge, &t[0], &t[1], r->stream);
    COLO_TRY_GOTO(st, st, done);
    COLO_TRY_GOTO(st, t_gpu_quiet(r), done);
    COLO_TRY_GOTO(st, t_cuda(cudaMemcpy(in.raw, dev[0], in.bytes, cudaMemcpyDeviceToHost), "copy"),
                  done);
    COLO_TRY_GOTO(
        st, t_cuda(cudaMemcpy(out.raw, dev[1], out.bytes, cudaMemcpyDeviceToHost), "copy"), done);
    COLO_TRY_GOTO(st, t_case_compare(c, out_role, r->rank, salt, &out), done);
    COLO_TRY_GOTO(st, t_case_compare(c, in_role, r->rank, salt, &in), done);
done:
    cudaFree(dev[0]);
    cudaFree(dev[1]);
    t_buffer_free(&in);
    t_buffer_free(&out);
    return st;
}

colo_status_t t_gpu_case(t_gpu_rank_t *r, const t_case_t *c)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    colo_status_t st;
    rank_try(colo_comm_set_check(r->gpus, c->check ? c->check : 1));
    rank_try(t_case_config(c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    COLO_TRY_GOTO(st, colo_bridge_create(&bridge, &config, r->gpus), done);
    for (int32_t i = 0; i < (c->rounds ? c->rounds : 1); i++) {
        COLO_TRY_GOTO(st, t_gpu_pass(r, bridge, c, i, false), done);
        if (!c->no_grad)
            COLO_TRY_GOTO(st, t_gpu_pass(r, bridge, c, i, true), done);
    }
done:
    colo_bridge_destroy(&bridge);
    return st;
}
