/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_ranks.c - see gpu_ranks.h */
#include "gpu/gpu_ranks.h"

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
    fflush(NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return 0;
    return WEXITSTATUS(status);
}

int t_gpu_count(void)
{
    const int n = t_device_count();
    return n > MOST || (n > 0 && t_gpus_shared()) ? MOST : n;
}

int32_t t_gpu_ranks(void)
{
    const int n = t_gpu_count();
    return n >= 8 ? 8 : n >= 4 ? 4 : 2;
}

static bool enough(int found, int need)
{
    if (found < need)
        printf("skipped: needs %d GPUs, found %d\n", need, found);
    return found >= need;
}

bool t_gpus_enough(int n)
{
    return enough(t_gpu_count(), n);
}

bool t_ranks_are_processes(void)
{
    if (t_ranks_are_threads())
        printf("skipped: ranks are to be processes; those of one process open nothing\n");
    return !t_ranks_are_threads();
}

bool t_peers_enough(int ranks)
{
    return enough(t_device_count(), getenv("T_CHECKED") ? ranks : 1);
}

colo_status_t t_cuda(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? COLO_OK
                            : colo_fail(COLO_ERR_CUDA, "%s: %s", what, cudaGetErrorString(e));
}

struct job {
    t_gpu_fn fn;
    void *arg;
    bool bare, peers;
};

static colo_status_t connect_peers(t_gpu_rank_t *r, bool bare)
{
    const colo_comm_backend_t *backend = NULL;
    colo_comm_t *control = NULL;
    rank_try(colo_gpu_load("directonly", &backend));
    rank_try(colo_comm_split_color_for(r->host, COLO_CATEGORY_USER, 0, r->rank, &control));
    rank_try(backend->create(control, NULL, -1, &r->gpus));
    if (!getenv("COLO_TIMEOUT_MS"))
        colo_comm_set_timeout(r->gpus, 20000);
    return bare ? COLO_OK : t_gpu_register(r, T_ARENA);
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    const struct job *job = arg;
    t_gpu_rank_t r = {.host = world,
                      .rank = colo_comm_rank(world),
                      .size = colo_comm_size(world),
                      .peers = job->peers};
    int devices = 0;
    if (getenv("T_ONE_GPU")) { /* before CUDA is asked */
        setenv("CUDA_VISIBLE_DEVICES", t_text("%d", (int)r.rank), 1);
    }
    rank_cuda(cudaGetDeviceCount(&devices));
    r.device = r.rank % devices;
    rank_cuda(cudaSetDevice(r.device));
    rank_cuda(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    colo_status_t st = job->peers  ? connect_peers(&r, job->bare)
                       : job->bare ? COLO_OK
                                   : colo_comm_create_nccl(world, -1, &r.gpus);
    if (st == COLO_OK)
        st = job->fn(&r, job->arg);
    /* No rank frees what another one may still reach. The world may have failed: that is what some
     * tests are about. */
    if (st == COLO_OK)
        (void)colo_comm_barrier(world, NULL);
    /* The others may wait for this rank on the host, and its destroy waits for their GPUs. */
    if (st < 0 && colo_comm_check(world) == COLO_OK)
        colo_comm_fail(world, st);
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    cudaStreamDestroy(r.stream);
    return st;
}

static colo_status_t run_job(int32_t n, struct job job)
{
    (void)t_seed(); /* printed here once, not by each rank that asks and is a process */
    return t_run_ranks(n, on_rank, &job, 0);
}

colo_status_t t_gpus_run(int32_t n, bool bare, t_gpu_fn fn, void *arg)
{
    return run_job(n, (struct job){fn, arg, bare, false});
}

colo_status_t t_gpu_on(colo_comm_t *world, bool peers, t_gpu_fn fn, void *arg)
{
    return on_rank(world, &(struct job){fn, arg, false, peers});
}

colo_status_t t_peers_run(int32_t n, bool bare, t_gpu_fn fn, void *arg, size_t bytes)
{
    if (bytes)
        t_share(arg, bytes);
    colo_status_t st = run_job(n, (struct job){fn, arg, bare, true});
    if (bytes)
        t_unshare(arg);
    return st;
}

/* Comms without NCCL have no thread that ends the waits of a kernel after an abort. */
colo_status_t t_gpu_wait(const t_gpu_rank_t *r)
{
    while (r->peers && cudaStreamQuery(r->stream) == cudaErrorNotReady) {
        (void)colo_comm_check(r->gpus);
        usleep(50);
    }
    rank_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

colo_status_t t_gpu_quiet(t_gpu_rank_t *r)
{
    rank_try(t_gpu_wait(r));
    return colo_comm_barrier(r->host, NULL);
}

/* ---- tensors ---- */

void t_gpu_lie_in(t_gpu_rank_t *r, const colo_memory_t *memory)
{
    r->arena = colo_memory_data(memory);
    r->capacity = colo_memory_bytes(memory);
    r->used = 0;
}

colo_status_t t_gpu_register(t_gpu_rank_t *r, size_t bytes)
{
    rank_try(colo_memory_alloc(r->gpus, bytes, &r->memory));
    t_gpu_lie_in(r, r->memory);
    return COLO_OK;
}

colo_status_t t_gpu_memory(t_gpu_rank_t *r, size_t bytes, char **data, void **own)
{
    *own = NULL;
    if (r->arena) {
        *data = r->arena + r->used + r->shift;
        r->used += (bytes + r->shift + 255) / 256 * 256;
        rank_check(r->used <= r->capacity);
        return COLO_OK;
    }
    rank_cuda(cudaMalloc(own, bytes));
    *data = *own;
    return COLO_OK;
}

colo_status_t t_place(t_gpu_rank_t *r, const t_case_t *c, t_role_t role, int64_t salt, bool fill,
                      t_placed_t *p)
{
    memset(p, 0, sizeof *p);
    rank_try(t_case_tensor(c, role, r->rank, salt, fill, &p->host));
    rank_try(t_gpu_memory(r, p->host.bytes, &p->data, &p->own));
    p->t = p->host.t;
    p->t.mem = COLO_MEM_CUDA;
    p->t.device = r->device;
    if (p->t.data)
        p->t.data = p->data + ((unsigned char *)p->host.t.data - p->host.raw);
    return t_upload(r, p);
}

colo_status_t t_upload(t_gpu_rank_t *r, t_placed_t *p)
{
    rank_cuda(
        cudaMemcpyAsync(p->data, p->host.raw, p->host.bytes, cudaMemcpyHostToDevice, r->stream));
    return COLO_OK;
}

colo_status_t t_download(t_gpu_rank_t *r, t_placed_t *p)
{
    rank_try(t_gpu_wait(r)); /* not inside a copy, which holds locks */
    rank_cuda(
        cudaMemcpyAsync(p->host.raw, p->data, p->host.bytes, cudaMemcpyDeviceToHost, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

void t_placed_free(t_placed_t *p)
{
    cudaFree(p->own);
    t_buffer_free(&p->host);
}

void t_gpu_call_end(t_gpu_call_t *k)
{
    t_placed_free(&k->in);
    t_placed_free(&k->out);
}

colo_status_t t_gpu_call_make(t_gpu_call_t *k, t_gpu_rank_t *r, const t_case_t *c, int64_t salt,
                              bool backward)
{
    *k = (t_gpu_call_t){.r = r, .c = c, .salt = salt, .backward = backward};
    rank_try(t_place(r, c, backward ? T_DY : T_X, salt, true, &k->in));
    return t_place(r, c, backward ? T_DX : T_Y, salt, false, &k->out);
}

colo_status_t t_gpu_call_refill(t_gpu_call_t *k, int64_t salt)
{
    k->salt = salt;
    t_buffer_free(&k->in.host);
    rank_try(t_case_tensor(k->c, k->backward ? T_DY : T_X, k->r->rank, salt, true, &k->in.host));
    return t_upload(k->r, &k->in);
}

colo_status_t t_gpu_call_run(const t_gpu_call_t *k, colo_bridge_t *bridge, cudaStream_t stream)
{
    return (k->backward ? colo_bridge_backward : colo_bridge_forward)(bridge, &k->in.t, &k->out.t,
                                                                      stream);
}

colo_status_t t_gpu_call_compare(t_gpu_call_t *k)
{
    rank_try(t_download(k->r, &k->out));
    return t_case_compare(k->c, k->backward ? T_DX : T_Y, k->r->rank, k->salt, &k->out.host);
}

colo_status_t t_gpu_stand_up(t_gpu_stand_t *s, t_gpu_rank_t *r, colo_comm_t *comm,
                             const t_case_t *c, size_t bytes)
{
    *s = (t_gpu_stand_t){.bridge = NULL};
    rank_try(colo_memory_alloc(comm, bytes, &s->memory));
    rank_check(colo_memory_is_p2p(s->memory));
    t_gpu_lie_in(r, s->memory);
    rank_try(t_case_bridge(&s->bridge, c, comm, COLO_MEM_CUDA));
    rank_check(colo_bridge_workspace_size(s->bridge) == 0); /* nothing is staged */
    return t_gpu_call_make(&s->call, r, c, 0, false);
}

void t_gpu_stand_end(t_gpu_stand_t *s)
{
    t_gpu_call_end(&s->call);
    colo_bridge_destroy(&s->bridge);
    colo_memory_destroy(&s->memory);
}

/* ---- streams ---- */

colo_status_t t_gpu_captured(t_gpu_rank_t *r, colo_status_t st, cudaGraphExec_t *exec)
{
    cudaGraph_t graph;
    const cudaError_t e = cudaStreamEndCapture(r->stream, &graph);
    rank_try(st);
    rank_cuda(e);
    rank_cuda(cudaGraphInstantiate(exec, graph, 0));
    rank_cuda(cudaGraphUpload(*exec, r->stream));
    rank_cuda(cudaGraphDestroy(graph));
    return t_gpu_quiet(r);
}

static void nap(void *us)
{
    usleep((useconds_t)(uintptr_t)us);
}

colo_status_t t_gpu_late(cudaStream_t stream, int64_t us)
{
    rank_cuda(cudaLaunchHostFunc(stream, nap, (void *)(uintptr_t)us));
    return COLO_OK;
}

colo_status_t t_gpu_late_at_random(t_gpu_rank_t *r, uint64_t *seed)
{
    return t_gpu_late(r->stream, t_below(seed, 4) ? t_below(seed, 60) : t_below(seed, 3000));
}

void t_gpu_step_end(t_gpu_step_t *s)
{
    if (s->exec)
        cudaGraphExecDestroy(s->exec);
    t_gpu_call_end(&s->forward);
    t_gpu_call_end(&s->backward);
}

colo_status_t t_gpu_step_capture(t_gpu_step_t *s, t_gpu_rank_t *r, const t_case_t *c,
                                 colo_bridge_t *bridge)
{
    rank_try(t_gpu_call_make(&s->forward, r, c, 0, false));
    rank_try(t_gpu_call_make(&s->backward, r, c, 0, true));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = t_gpu_call_run(&s->forward, bridge, r->stream);
    if (st == COLO_OK)
        st = t_gpu_call_run(&s->backward, bridge, r->stream);
    return t_gpu_captured(r, st, &s->exec);
}

colo_status_t t_gpu_step_replay(t_gpu_step_t *s, int64_t launches, int64_t late)
{
    t_gpu_rank_t *r = s->forward.r;
    uint64_t seed = t_seed() + (uint64_t)r->rank;
    for (int64_t salt = 1; salt <= launches; salt++) {
        rank_try(t_gpu_call_refill(&s->forward, salt));
        rank_try(t_gpu_call_refill(&s->backward, salt));
        if (late && salt % late == 0)
            rank_try(t_gpu_late_at_random(r, &seed));
        rank_cuda(cudaGraphLaunch(s->exec, r->stream));
        colo_status_t st = t_gpu_call_compare(&s->forward);
        if (st == COLO_OK)
            st = t_gpu_call_compare(&s->backward);
        if (st < 0)
            return colo_fail_prefix(st, "replay %lld", (long long)salt);
    }
    return colo_comm_check(r->gpus);
}

/* ---- cases ---- */

colo_status_t t_gpu_pass(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                         bool backward)
{
    T_GPU_CALL(k);
    rank_try(t_gpu_call_make(&k, r, c, salt, backward));
    if (!r->arena) /* all have allocated */
        rank_try(t_gpu_quiet(r));
    rank_try(t_gpu_call_run(&k, bridge, r->stream));
    if (!r->arena)
        rank_try(t_gpu_quiet(r));
    rank_try(t_download(r, &k.in));
    rank_try(colo_comm_check(r->gpus));
    rank_try(t_gpu_call_compare(&k));
    return t_case_compare(c, backward ? T_DY : T_X, r->rank, salt, &k.in.host);
}

colo_status_t t_gpu_bridge(t_gpu_rank_t *r, const t_case_t *c, colo_bridge_t **bridge)
{
    rank_try(colo_comm_set_check(r->gpus, c->check ? c->check : 1));
    return t_case_bridge(bridge, c, r->gpus, COLO_MEM_CUDA);
}

colo_status_t t_gpu_end(t_gpu_rank_t *r, colo_bridge_t **bridge)
{
    rank_try(t_gpu_quiet(r));
    colo_bridge_destroy(bridge);
    return COLO_OK;
}

static void *owner_allocate(void *user, size_t bytes)
{
    t_gpu_owner_t *o = user;
    void *p = NULL;
    if (o->refuses || cudaMalloc(&p, bytes) != cudaSuccess)
        return NULL;
    o->asked += bytes;
    o->live++;
    o->data = p;
    return o->misplaces ? o->data + 8 : p;
}

static void owner_release(void *user, void *data)
{
    t_gpu_owner_t *o = user;
    o->early = o->early || !o->past;
    o->live--;
    cudaFree(o->misplaces ? o->data : data);
}

static void owner_is_past(void *user)
{
    usleep(50000);
    ((t_gpu_owner_t *)user)->past = true;
}

colo_status_t t_gpu_owner_late(t_gpu_rank_t *r, t_gpu_owner_t *o)
{
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaLaunchHostFunc(r->stream, owner_is_past, o));
    return COLO_OK;
}

colo_status_t t_gpu_owned(t_gpu_rank_t *r, const t_case_t *c, t_gpu_owner_t *o,
                          colo_transport_t transport, colo_bridge_t **bridge)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    rank_try(t_case_config(c, &src, &dst, &config));
    config.mem = COLO_MEM_CUDA;
    config.transport = transport;
    config.allocator = (colo_allocator_t){owner_allocate, o->no_release ? NULL : owner_release, o};
    return colo_bridge_create(bridge, &config, r->gpus);
}

colo_status_t t_gpu_case(t_gpu_rank_t *r, const t_case_t *c)
{
    colo_bridge_t *bridge = NULL;
    colo_status_t st;
    const size_t used = r->used;
    COLO_TRY_GOTO(st, t_gpu_bridge(r, c, &bridge), done);
    if (r->peers && colo_bridge_workspace_size(bridge) != 0) {
        st = colo_fail(COLO_ERR_STATE, "%zu bytes of workspace, expected none",
                       colo_bridge_workspace_size(bridge));
        goto done;
    }
    for (int32_t i = 0; i < (c->steps ? c->steps : 1); i++) {
        COLO_TRY_GOTO(st, t_gpu_pass(r, bridge, c, i, false), done);
        if (!c->no_grad)
            COLO_TRY_GOTO(st, t_gpu_pass(r, bridge, c, i, true), done);
    }
done:
    r->used = used;
    if (st == COLO_OK)
        st = t_gpu_end(r, &bridge);
    colo_bridge_destroy(&bridge);
    return st < 0 ? colo_fail_prefix(st, "%s", t_case_text(c)) : st;
}
