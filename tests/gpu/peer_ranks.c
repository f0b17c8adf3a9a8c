/* SPDX-License-Identifier: Apache-2.0 */
/* peer_ranks.c - see peer_ranks.h */
#include "gpu/peer_ranks.h"

#include "comm/comm.h"
#include "comm/gpu.h"
#include "core/error.h"

#include <sys/wait.h>
#include <unistd.h>

static int count_devices(void)
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int n = 0;
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : 0;
}

bool t_peer_enough(int ranks)
{
    const int need = getenv("T_CHECKED") ? ranks : 1, found = count_devices();
    if (found < need)
        printf("skipped: needs %d GPUs, found %d\n", need, found);
    return found >= need;
}

colo_status_t t_peer_cuda(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? COLO_OK
                            : colo_fail(COLO_ERR_CUDA, "%s: %s", what, cudaGetErrorString(e));
}

struct job {
    t_peer_fn fn;
    void *arg;
    bool bare;
};
static struct job job; /* not in the memory that ranks bring together */

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    t_peer_rank_t r = {.host = world, .rank = colo_comm_rank(world), .size = colo_comm_size(world)};
    const colo_comm_ops_t *ops = NULL;
    colo_comm_t *control = NULL;
    int devices = 0;
    (void)arg;
    peer_cuda(cudaGetDeviceCount(&devices));
    r.device = r.rank % devices;
    peer_cuda(cudaSetDevice(r.device));
    peer_cuda(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    rank_try(colo_gpu_load("peeronly", &ops));
    rank_try(colo_comm_i_split_color(world, COLO_CATEGORY_USER, 0, r.rank, &control));
    rank_try(ops->create(control, NULL, -1, &r.gpus));
    if (!getenv("COLO_TIMEOUT_MS"))
        colo_comm_set_timeout(r.gpus, 20000);
    colo_status_t st = COLO_OK;
    if (!job.bare)
        st = colo_memory_alloc(r.gpus, T_ARENA, &r.memory);
    r.arena = colo_memory_data(r.memory);
    if (st == COLO_OK)
        st = job.fn(&r, job.arg);
    if (st == COLO_OK) /* no rank frees what another one may still reach */
        st = colo_comm_barrier(world, NULL);
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    cudaStreamDestroy(r.stream);
    return st;
}

colo_status_t t_peer_run(int32_t n, bool bare, t_peer_fn fn, void *arg, size_t bytes)
{
    job = (struct job){fn, arg, bare};
    if (bytes)
        t_share(arg, bytes);
    colo_status_t st = t_run_ranks(n, on_rank, NULL, 0);
    if (bytes)
        t_unshare(arg);
    return st;
}

/* ---- tensors ---- */

colo_status_t t_topology(t_peer_rank_t *r, const t_case_t *c, t_role_t role, int64_t salt,
                         bool fill, t_placed_t *p)
{
    memset(p, 0, sizeof *p);
    rank_try(t_case_tensor(c, role, r->rank, salt, fill, &p->host));
    p->at = r->arena + r->used + r->shift;
    r->used += (p->host.bytes + r->shift + 255) / 256 * 256;
    rank_check(r->used <= T_ARENA);
    p->t = p->host.t;
    p->t.mem = COLO_CUDA;
    p->t.device = r->device;
    if (p->t.data)
        p->t.data = p->at + ((unsigned char *)p->host.t.data - p->host.raw);
    return t_upload(r, p);
}

colo_status_t t_upload(t_peer_rank_t *r, t_placed_t *p)
{
    peer_cuda(
        cudaMemcpyAsync(p->at, p->host.raw, p->host.bytes, cudaMemcpyHostToDevice, r->stream));
    return COLO_OK;
}

colo_status_t t_download(t_peer_rank_t *r, t_placed_t *p)
{
    peer_cuda(cudaStreamSynchronize(r->stream)); /* not inside a copy, which holds locks */
    peer_cuda(
        cudaMemcpyAsync(p->host.raw, p->at, p->host.bytes, cudaMemcpyDeviceToHost, r->stream));
    peer_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

void t_placed_free(t_placed_t *p)
{
    t_buffer_free(&p->host);
}

/* ---- cases ---- */

colo_status_t t_peer_pass(t_peer_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                          bool backward)
{
    t_role_t in_role = backward ? T_DY : T_X, out_role = backward ? T_DX : T_Y;
    t_placed_t in = {0}, out = {0};
    colo_status_t st;
    COLO_TRY_GOTO(st, t_topology(r, c, in_role, salt, true, &in), done);
    COLO_TRY_GOTO(st, t_topology(r, c, out_role, salt, false, &out), done);
    st = backward ? colo_bridge_backward(bridge, &in.t, &out.t, r->stream)
                  : colo_bridge_forward(bridge, &in.t, &out.t, r->stream);
    COLO_TRY_GOTO(st, st, done);
    COLO_TRY_GOTO(st, t_download(r, &out), done);
    COLO_TRY_GOTO(st, t_download(r, &in), done);
    COLO_TRY_GOTO(st, colo_comm_check(r->gpus), done);
    COLO_TRY_GOTO(st, t_case_compare(c, out_role, r->rank, salt, &out.host), done);
    COLO_TRY_GOTO(st, t_case_compare(c, in_role, r->rank, salt, &in.host), done);
done:
    t_placed_free(&in);
    t_placed_free(&out);
    return st;
}

colo_status_t t_peer_bridge(t_peer_rank_t *r, const t_case_t *c, colo_bridge_t **bridge)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    rank_try(colo_comm_set_check(r->gpus, c->check ? c->check : 1));
    rank_try(t_case_config(c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    return colo_bridge_create(bridge, &config, r->gpus);
}

colo_status_t t_peer_end(t_peer_rank_t *r, colo_bridge_t **bridge)
{
    peer_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(bridge);
    return COLO_OK;
}

colo_status_t t_peer_case(t_peer_rank_t *r, const t_case_t *c)
{
    colo_bridge_t *bridge = NULL;
    colo_status_t st;
    const size_t used = r->used;
    COLO_TRY_GOTO(st, t_peer_bridge(r, c, &bridge), done);
    if (colo_bridge_workspace_size(bridge) != 0) {
        st = colo_fail(COLO_ERR_STATE, "%zu bytes of workspace, expected none",
                       colo_bridge_workspace_size(bridge));
        goto done;
    }
    for (int32_t i = 0; i < (c->rounds ? c->rounds : 1); i++) {
        COLO_TRY_GOTO(st, t_peer_pass(r, bridge, c, i, false), done);
        if (!c->no_grad)
            COLO_TRY_GOTO(st, t_peer_pass(r, bridge, c, i, true), done);
    }
done:
    r->used = used;
    if (st == COLO_OK)
        st = t_peer_end(r, &bridge);
    colo_bridge_destroy(&bridge);
    return st;
}
