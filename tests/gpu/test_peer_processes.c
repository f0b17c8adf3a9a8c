/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peer_processes.c - ranks that are processes with a GPU each, over peers' memory: what a
 * bridge takes of the GPUs, two comms whose calls are on streams crosswise, a rank that is killed.
 * T_ONE_GPU: each process sees its own GPU only.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int32_t gpus; /* ranks of this run */

/* ---- a bridge in registered memory ---- */

struct carried {
    t_case_t c;
    colo_bridge_t *bridge;
    colo_memory_t *memory;
    t_buffer_t host[2]; /* x, y */
    char *data[2];
    colo_tensor_t t[2];
};

static t_case_t the_case(int64_t rows)
{
    return (t_case_t){.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {2 * gpus, rows, 1024},
                      .output = COLO_SHARDED,
                      .world = gpus};
}

static colo_status_t stand_up(t_gpu_rank_t *r, colo_comm_t *comm, const t_case_t *c,
                              struct carried *s)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    *s = (struct carried){.c = *c};
    for (int i = 0; i < 2; i++)
        rank_try(t_case_tensor(c, i ? T_Y : T_X, r->rank, 0, i == 0, &s->host[i]));
    const size_t capacity = (s->host[0].bytes + 255) / 256 * 256;
    rank_try(colo_memory_alloc(comm, capacity + s->host[1].bytes, &s->memory));
    rank_check(colo_memory_is_p2p(s->memory));
    rank_try(t_case_config(c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&s->bridge, &config, comm));
    rank_check(colo_bridge_workspace_size(s->bridge) == 0); /* nothing is staged */
    for (int i = 0; i < 2; i++) {
        s->data[i] = (char *)colo_memory_data(s->memory) + (i ? capacity : 0);
        rank_cuda(t_to_device(s->data[i], s->host[i].raw, s->host[i].bytes));
        s->t[i] = s->host[i].t;
        s->t[i].mem = COLO_CUDA;
        s->t[i].device = r->device;
        s->t[i].data = s->data[i] + ((unsigned char *)s->host[i].t.data - s->host[i].raw);
    }
    return COLO_OK;
}

static colo_status_t forward(struct carried *s, cudaStream_t stream)
{
    return colo_bridge_forward(s->bridge, &s->t[0], &s->t[1], stream);
}

/* What has arrived; the next look finds what arrives after this one. */
static colo_status_t look(t_gpu_rank_t *r, struct carried *s)
{
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(s->host[1].raw, s->data[1], s->host[1].bytes, cudaMemcpyDeviceToHost));
    rank_try(t_case_compare(&s->c, T_Y, r->rank, 0, &s->host[1]));
    t_buffer_free(&s->host[1]);
    rank_try(t_case_tensor(&s->c, T_Y, r->rank, 0, false, &s->host[1]));
    rank_cuda(t_to_device(s->data[1], s->host[1].raw, s->host[1].bytes));
    return t_gpu_quiet(r);
}

static void lie_down(struct carried *s)
{
    colo_bridge_destroy(&s->bridge);
    colo_memory_destroy(&s->memory);
    for (int i = 0; i < 2; i++)
        t_buffer_free(&s->host[i]);
}

/* ---- memory ---- */

#define A_BRIDGE_TAKES                                                            \
    ((size_t)150 << 20) /* apart from what is registered; a context takes 500 MiB \
                         */

T_CASE_ON_GPUS(gpus, a_bridge_takes_no_context_on_the_gpu_of_a_peer)
{
    const t_case_t c = the_case(512);
    struct carried s;
    size_t before, behind, all;
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemGetInfo(&before, &all)); /* of the device, whichever process took it */
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_try(stand_up(r, r->gpus, &c, &s));
    rank_try(forward(&s, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemGetInfo(&behind, &all));
    rank_try(colo_comm_barrier(r->host, NULL));
    const size_t took = before > behind ? before - behind : 0;
    if (took > colo_memory_bytes(s.memory) + A_BRIDGE_TAKES)
        return colo_fail(COLO_ERR_STATE, "a bridge took %zu bytes of device %d, %zu are registered",
                         took, r->device, colo_memory_bytes(s.memory));
    rank_try(look(r, &s));
    lie_down(&s);
    return COLO_OK;
}

/* ---- order ---- */

/* Kernels may have every multiprocessor, and ranks have the calls on streams in another order. */
T_CASE_ON_GPUS(gpus, calls_of_two_comms_on_streams_crosswise_follow_each_other)
{
    const t_case_t c = the_case(512);
    const int64_t steps = t_scaled(1000);
    uint64_t seed = t_seed() + (uint64_t)r->rank;
    T_ENDS(colo_comm_destroy) colo_comm_t *other = NULL;
    cudaStream_t stream[2];
    struct carried s[2];
    (void)arg;
    setenv("COLO_PEER_BLOCKS", "1024", 1);
    rank_try(colo_comm_split_color(r->gpus, 0, r->rank, &other));
    rank_try(colo_comm_set_timeout(r->gpus, 10000));
    rank_try(colo_comm_set_timeout(other, 10000));
    for (int k = 0; k < 2; k++) {
        rank_try(stand_up(r, k ? other : r->gpus, &c, &s[k]));
        rank_cuda(cudaStreamCreateWithFlags(&stream[k], cudaStreamNonBlocking));
    }
    for (int64_t i = 1; i <= steps; i++) {
        for (int k = 0; k < 2; k++) {
            const cudaStream_t on = stream[(k + r->rank) % 2];
            if (t_below(&seed, 8) == 0)
                rank_try(t_gpu_late(on, t_below(&seed, 2000)));
            rank_try(forward(&s[k], on));
        }
        if (i % 16 == 0 || i == steps)
            for (int k = 0; k < 2; k++)
                rank_cuda(cudaStreamSynchronize(stream[k]));
        if (i % 250 == 0 || i == steps)
            for (int k = 0; k < 2; k++) {
                rank_cuda(cudaStreamSynchronize(stream[k]));
                rank_try(colo_comm_check(k ? other : r->gpus));
                rank_try(look(r, &s[k]));
            }
    }
    for (int k = 0; k < 2; k++) {
        lie_down(&s[k]);
        cudaStreamDestroy(stream[k]);
    }
    return COLO_OK;
}

/* ---- a rank that is killed ---- */

struct verdict { /* in memory that processes share: the one that dies reports nothing */
    _Atomic int64_t killed_ns, heard_ns[8];
    _Atomic int32_t status[8];
    _Atomic bool works[8];
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static colo_status_t killed(t_gpu_rank_t *r, void *arg)
{
    struct verdict *v = *(struct verdict **)arg;
    const t_case_t c = the_case(8192); /* a push takes long enough to die in it */
    struct carried s;
    void *p = NULL;
    rank_try(stand_up(r, r->gpus, &c, &s));
    rank_try(forward(&s, r->stream));
    rank_try(t_gpu_quiet(r));
    for (int i = 0; i < 50; i++)
        (void)forward(&s, r->stream);
    if (r->rank == r->size - 1) {
        v->killed_ns = now_ns();
        raise(SIGKILL);
    }
    const int64_t from = now_ns();
    colo_status_t st = COLO_OK;
    while (st == COLO_OK && now_ns() - from < INT64_C(20000000000)) {
        (void)forward(&s, r->stream); /* one by one: each is a wait that has to end */
        st = colo_comm_check(r->gpus);
        usleep(1000);
    }
    rank_cuda(cudaStreamSynchronize(r->stream));
    v->heard_ns[r->rank] = now_ns();
    v->status[r->rank] = st;
    v->works[r->rank] = cudaMalloc(&p, 1 << 20) == cudaSuccess &&
                        cudaMemset(p, 1, 1 << 20) == cudaSuccess &&
                        cudaDeviceSynchronize() == cudaSuccess;
    cudaFree(p);
    lie_down(&s);
    return COLO_OK;
}

T_CASE(ranks_hear_of_one_that_is_killed_in_a_push_and_their_gpus_are_well)
{
    struct verdict *v =
        mmap(NULL, sizeof *v, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(v != MAP_FAILED);
    (void)t_gpus_run(gpus, false, killed, &v); /* the harness misses the dead one's report */
    assert_true(v->killed_ns > 0);
    for (int32_t k = 0; k < gpus - 1; k++) {
        if (v->status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s, expected PEER", (int)k,
                     colo_status_name((colo_status_t)v->status[k]));
        if (v->heard_ns[k] - v->killed_ns > INT64_C(1000000000))
            fail_msg("rank %d heard of it after %lld ms, expected 1000", (int)k,
                     (long long)((v->heard_ns[k] - v->killed_ns) / 1000000));
        assert_true(v->works[k]);
    }
    munmap(v, sizeof *v);
}

T_MAIN_AFTER(t_ranks_are_processes() && t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(),
             "gpu/peer_processes")
