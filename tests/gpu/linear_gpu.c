/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gpu.c - see linear_gpu.h */
#include "gpu/linear_gpu.h"

#include "core/error.h"

#include "harness/ranks.h"

#include <colobridge/nccl.h>

/* A rank's memory is taken before any rank's kernels run and kept until the process ends: taking
 * it and giving it back may wait for a device that waits for this rank. */
enum { ARENA = 192 << 20, ALIGN = 256 };

static struct seat {
    char *arena;
    cudaStream_t stream;
    size_t used;
    void *last; /* what was taken last, when it is still there */
    int32_t live;
} seats[LOSS_RANKS];
static _Thread_local struct seat *mine;

static void *alloc(size_t bytes)
{
    void *p = mine->arena + mine->used;
    mine->used += (bytes + ALIGN) / ALIGN * ALIGN;
    mine->live++;
    mine->last = p;
    if (mine->used > ARENA) {
        fprintf(stderr, "test: a rank wants more than %d bytes\n", (int)ARENA);
        abort();
    }
    return p;
}

/* In any order; memory comes back when the last one goes, or all: workspaces are the last. */
static void release(void *p)
{
    if (p == mine->last)
        mine->used = (size_t)((char *)p - mine->arena);
    if (--mine->live == 0)
        mine->used = 0;
    mine->last = NULL;
}

static void must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "linear_gpu: %s: %s\n", what, cudaGetErrorString(e));
    abort(); /* on a rank's thread no assertion returns to CMocka */
}

static void wait_all(void)
{
    cudaStreamSynchronize(mine->stream); /* a call that failed says so itself */
}

static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind pass)
{
    must(cudaMemcpyAsync(to, from, bytes, pass, mine->stream), "copying");
    must(cudaStreamSynchronize(mine->stream), "copying");
}

static void send(void *there, const void *host, size_t bytes)
{
    copy(there, host, bytes, cudaMemcpyHostToDevice);
}

static void fetch(void *host, const void *there, size_t bytes)
{
    copy(host, there, bytes, cudaMemcpyDeviceToHost);
}

static int32_t device(void)
{
    int d = -1;
    cudaGetDevice(&d);
    return d;
}

static colo_stream_t stream(void)
{
    return mine->stream;
}

static colo_status_t sit(int32_t rank)
{
    int devices = 0;
    cudaError_t e = cudaGetDeviceCount(&devices);
    mine = &seats[rank];
    if (e == cudaSuccess)
        e = cudaSetDevice(rank % devices);
    if (e == cudaSuccess && !mine->stream)
        e = cudaStreamCreateWithFlags(&mine->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess && !mine->arena)
        e = cudaMalloc((void **)&mine->arena, ARENA);
    return e == cudaSuccess
               ? COLO_OK
               : colo_fail(COLO_ERR_CUDA, "rank %d: %s", (int)rank, cudaGetErrorString(e));
}

static colo_status_t comm(colo_comm_t *world, colo_comm_t **gpus)
{
    rank_try(sit(colo_comm_rank(world)));
    rank_try(colo_comm_barrier(world, NULL));
    /* the threads' own would sum on the host, while the device writes */
    return colo_comm_size(world) > 1 ? colo_comm_create_nccl(world, -1, gpus)
                                     : colo_comm_create_self(gpus);
}

const linear_place_t *linear_gpu_place(void)
{
    static const linear_place_t here = {alloc,    release, send,   fetch,
                                        wait_all, device,  stream, comm};
    return &here;
}

void linear_gpu_options(linear_case_t *c, unsigned bits, int mode)
{
    if (bits & (WITH_SMOOTH | WITH_MEGATRON | WITH_ZLOSS))
        bits |= WITH_LOSS;
    linear_case_options(c, bits);
    linear_case_mode(c, mode);
}

void linear_gpu_run(linear_case_t *c, int32_t n, const char *what)
{
    for (int32_t i = 0; i < n; i++)
        c[i].place = linear_gpu_place();
    colo_status_t st = linear_case_run_all(c, n);
    if (st != COLO_OK)
        fail_msg("%s, W=%d D=%d: %s: %s", what, (int)c->ranks, (int)c->replicas,
                 colo_status_name(st), colo_last_error());
    for (int32_t i = 0; i < n; i++) {
        const linear_case_t *k = &c[i];
        const char *label =
            t_text("%s #%d (W=%d D=%d T=%d V=%d H=%d %s, chunk %d)", what, (int)i, (int)k->ranks,
                   (int)k->replicas, (int)k->tokens, (int)k->vocab, (int)k->hidden,
                   colo_dtype_name(k->dtype), (int)k->config.logprob.chunk_size);
        linear_case_compare(k, label);
    }
}

void linear_gpu_case(linear_case_t *c, unsigned bits, int mode, int32_t ranks, int32_t replicas,
                     int dtypes, int64_t chunk, uint64_t *rng)
{
    static const colo_dtype_t head[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    const colo_dtype_t dtype = head[dtypes % 4];
    linear_case_init(c, ranks, replicas, 37, 59, 16 + dtypes % 9, dtype, rng);
    linear_case_shard(c, (shard_kind_t)(dtypes % SHARD_KINDS));
    linear_gpu_options(c, bits, mode);
    if (dtypes / 4 % 2 && (dtype == COLO_BF16 || dtype == COLO_F16))
        c->config.logits_dtype = dtype;
    if (dtypes / 8 % 2 && dtype != COLO_F64) {
        c->config.d_weight_dtype = dtype;
        c->config.d_weight_add = dtype == COLO_F32;
    }
    c->config.logprob.chunk_size = chunk;
    c->prefill = c->config.d_weight_add ? 0.5 : 0;
    c->place = linear_gpu_place();
}

void linear_gpu_one(unsigned bits, int mode, int dtypes, int64_t chunk, uint64_t *rng)
{
    T_ENDS(linear_case_free) linear_case_t c;
    linear_gpu_case(&c, bits, mode, 1, 1, dtypes, chunk, rng);
    linear_gpu_run(&c, 1, t_text("options %03x, mode %d, dtypes %d", bits, mode, dtypes));
}
