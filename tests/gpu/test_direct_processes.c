/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_processes.c - ranks that are processes with a GPU each, over peers' memory: what a
 * bridge takes of the GPUs, memory that comes and goes, two comms whose calls are on streams
 * crosswise, a rank that is killed.
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

static t_case_t the_case(int64_t rows)
{
    return (t_case_t){.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {2 * gpus, rows, 1024},
                      .output = COLO_OUTPUT_SHARDED,
                      .world = gpus};
}

/* Input and output of a rank are 8 KiB for each of the rows, and some padding. */
static colo_status_t stand_up(t_gpu_rank_t *r, colo_comm_t *comm, const t_case_t *c,
                              t_gpu_stand_t *s)
{
    rank_try(t_gpu_stand_up(s, r, comm, c, ((size_t)c->shape.n << 14) + (1 << 16)));
    rank_cuda(cudaStreamSynchronize(r->stream)); /* what is there is there for all streams */
    return COLO_OK;
}

static colo_status_t forward(t_gpu_stand_t *s, cudaStream_t stream)
{
    return t_gpu_call_run(&s->call, s->bridge, stream);
}

/* What has arrived; the next look finds what arrives after this one. */
static colo_status_t look(t_gpu_rank_t *r, t_gpu_stand_t *s)
{
    t_placed_t *out = &s->call.out;
    rank_try(t_gpu_quiet(r));
    rank_try(t_gpu_call_compare(&s->call));
    t_buffer_free(&out->host);
    rank_try(t_case_tensor(s->call.c, T_Y, r->rank, 0, false, &out->host));
    rank_try(t_upload(r, out));
    return t_gpu_quiet(r);
}

/* ---- memory ---- */

#define A_BRIDGE_TAKES                                                            \
    ((size_t)150 << 20) /* apart from what is registered; a context takes 500 MiB \
                         */

T_CASE_ON_GPUS(gpus, a_bridge_takes_no_context_on_the_gpu_of_a_peer)
{
    const t_case_t c = the_case(512);
    t_gpu_stand_t s;
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
    t_gpu_stand_end(&s);
    return COLO_OK;
}

/* CUDA does not open an allocation at an address where an older one of another size is open. */
T_CASE_ON_GPUS(gpus, ranks_that_destroy_memory_at_different_times_reach_what_is_made_there)
{
    enum { TURNS = 200 };
    colo_memory_t *m[TURNS] = {NULL};
    uint64_t seed = t_seed() + (uint64_t)r->rank;
    (void)arg;
    for (int i = 0; i < TURNS; i++) {
        rank_try(colo_memory_alloc(r->gpus, (size_t)512 << i * 7 % 9, &m[i]));
        if (!colo_memory_is_p2p(m[i]))
            return colo_fail(COLO_ERR_STATE, "turn %d: not reached: %s", i, colo_last_error());
        for (int k = 0; k <= i; k++)
            if (t_below(&seed, 8) == 0)
                colo_memory_destroy(&m[k]);
    }
    for (int i = 0; i < TURNS; i++)
        colo_memory_destroy(&m[i]);
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
    t_gpu_stand_t s[2];
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
        t_gpu_stand_end(&s[k]);
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
    t_gpu_stand_t s;
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
    t_gpu_stand_end(&s);
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
             "gpu/direct_processes")
