/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_comm.c - communicators of GPUs, one thread a rank: every collective bitwise against the
 * host's, splits, the loss over ranks against fp64, and what goes wrong: a rank is missing, two
 * on one device, host pointers, different operations, an abort while a stream waits.
 */
#include "gpu/nccl_ranks.h"

#include "core/half.h"
#include "core/try.h"
#include "loss/loss_case.h"

#include <dlfcn.h>
#include <math.h>
#include <nccl.h>
#include <time.h>
#include <unistd.h>

static int32_t gpus;

/* ---- collectives ---- */

static void fill(void *p, int64_t n, colo_dtype_t dtype, uint64_t seed)
{
    uint64_t s = seed;
    for (int64_t i = 0; i < n; i++) {
        double v = (t_uniform(&s) - 0.5) * pow(2, (double)t_below(&s, 12));
        float f = (float)v;
        uint16_t h = dtype == COLO_BF16 ? colo_f32_to_bf16(f) : colo_f32_to_f16(f);
        int64_t k = (int64_t)t_rand(&s);
        const void *from = dtype == COLO_F64            ? (void *)&v
                           : dtype == COLO_F32          ? (void *)&f
                           : colo_dtype_is_float(dtype) ? (void *)&h
                                                        : (void *)&k;
        memcpy((char *)p + i * (int64_t)colo_dtype_size(dtype), from, colo_dtype_size(dtype));
    }
}

enum { GATHER, REDUCE, SCATTER, CAST, KINDS };

static colo_status_t run_op(colo_comm_t *c, int kind, void *send, void *recv, int64_t n,
                            colo_dtype_t dtype, colo_redop_t op, cudaStream_t stream)
{
    switch (kind) {
    case GATHER:
        return colo_comm_all_gather(c, send, recv, n, dtype, stream);
    case REDUCE:
        return colo_comm_all_reduce(c, send, recv, n, dtype, op, stream);
    case SCATTER:
        return colo_comm_reduce_scatter(c, send, recv, n, dtype, op, stream);
    default:
        return colo_comm_broadcast(c, send, n, dtype, colo_comm_size(c) - 1, stream);
    }
}

static colo_status_t one_op(t_gpu_rank_t *r, int kind, int64_t n, colo_dtype_t dtype,
                            colo_redop_t op, bool in_place)
{
    const size_t elem = colo_dtype_size(dtype), size = (size_t)r->size;
    const size_t in = (size_t)n * elem * (kind == SCATTER ? size : 1);
    const size_t out = (size_t)n * elem * (kind == GATHER ? size : 1);
    char *h_in = malloc(in + 1), *h_out = calloc(out + 1, 1), *back = malloc(out + in + 1);
    char *d_in, *d_out;
    rank_cuda(cudaMalloc((void **)&d_in, in + out + 32));
    d_out = in_place ? d_in : d_in + (in + 15) / 16 * 16;
    fill(h_in, (int64_t)(in / elem), dtype, 77 + (uint64_t)(r->rank + 5 * kind) * 1000003);
    rank_cuda(cudaMemcpy(d_in, h_in, in, cudaMemcpyHostToDevice));
    rank_try(t_gpu_quiet(r));
    rank_try(run_op(r->gpus, kind, d_in, d_out, n, dtype, op, r->stream));
    rank_try(run_op(r->host, kind, h_in, h_out, n, dtype, op, NULL));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(back, kind == CAST ? d_in : d_out, out, cudaMemcpyDeviceToHost));
    bool same = memcmp(back, kind == CAST ? h_in : h_out, out) == 0;
    cudaFree(d_in);
    free(h_in);
    free(h_out);
    free(back);
    return same ? COLO_OK
                : colo_fail(COLO_ERR_STATE, "rank %d: kind %d of %lld %s, op %d: other bits",
                            r->rank, kind, (long long)n, colo_dtype_name(dtype), (int)op);
}

static colo_status_t all_ops(t_gpu_rank_t *r, void *arg)
{
    static const int64_t counts[] = {0, 1, 3, 1000, 65537, 400000};
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16,
                                          COLO_F64, COLO_I32,  COLO_I64};
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            for (size_t k = 0; k < sizeof dtypes / sizeof dtypes[0]; k++) {
                rank_try(one_op(r, kind, counts[i], dtypes[k], COLO_SUM, false));
                if (kind == REDUCE || kind == SCATTER)
                    rank_try(one_op(r, kind, counts[i], dtypes[k], COLO_MAX, kind == REDUCE));
            }
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    colo_ledger_t l;
    colo_comm_ledger(r->gpus, &l);
    rank_check(l.ops[COLO_OP_BARRIER][COLO_OWNER_USER] == 1);
    rank_check(l.ops[COLO_OP_ALL_GATHER][COLO_OWNER_USER] == 36);
    return COLO_OK;
}

static void collectives_have_the_bits_of_the_host(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, all_ops, NULL));
}

static colo_status_t max_of_nan(t_gpu_rank_t *r, void *arg)
{
    float v[3] = {r->rank == 1 ? NAN : 1.0f, (float)r->rank, -1.0f}, *d;
    rank_cuda(cudaMalloc((void **)&d, sizeof v));
    rank_cuda(cudaMemcpy(d, v, sizeof v, cudaMemcpyHostToDevice));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 3, COLO_F32, COLO_MAX, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(v, d, sizeof v, cudaMemcpyDeviceToHost));
    cudaFree(d);
    rank_check(isnan(v[0]) && v[1] == (float)(r->size - 1) && v[2] == -1.0f);
    return COLO_OK;
}

static void a_maximum_keeps_a_nan(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, max_of_nan, NULL));
}

/* ---- splits ---- */

static colo_status_t splits(t_gpu_rank_t *r, void *arg)
{
    colo_comm_t *half = NULL, *again = NULL, *alone = NULL;
    int64_t color = r->rank * 2 / r->size;
    rank_try(colo_comm_split_color(r->gpus, color, -r->rank, &half));
    rank_check(colo_comm_size(half) == r->size / 2 && strcmp(colo_comm_backend(half), "nccl") == 0);
    for (int i = 0; i < 20; i++) { /* cached: 20 connections would take many seconds */
        rank_try(colo_comm_split_color(r->gpus, color, -r->rank, &again));
        colo_comm_destroy(&again);
    }
    rank_try(colo_comm_split_color(r->gpus, r->rank, 0, &alone));
    int64_t mine = 100 + r->rank, *d, got[6] = {0};
    rank_cuda(cudaMalloc((void **)&d, 64));
    rank_cuda(cudaMemcpy(d, &mine, 8, cudaMemcpyHostToDevice));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_comm_all_gather(half, d, d + 2, 1, COLO_I64, r->stream));
    rank_try(colo_comm_all_gather(alone, d, d + 1, 1, COLO_I64, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(got, d, sizeof got, cudaMemcpyDeviceToHost));
    rank_check(got[1] == mine);
    for (int32_t i = 0; i < colo_comm_size(half); i++)
        rank_check(got[2 + i] == 100 + colo_comm_world_rank(half, i));
    cudaFree(d);
    colo_comm_destroy(&half);
    colo_comm_destroy(&alone);
    return COLO_OK;
}

static void splits_are_groups_of_gpus(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, splits, NULL));
}

/* ---- a communicator that exists ---- */

static colo_status_t borrow(t_gpu_rank_t *r, void *arg)
{
    void *so = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    rank_check(so != NULL);
    ncclResult_t (*unique_id)(ncclUniqueId *), (*init)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*destroy)(ncclComm_t);
    *(void **)&unique_id = dlsym(so, "ncclGetUniqueId");
    *(void **)&init = dlsym(so, "ncclCommInitRank");
    *(void **)&destroy = dlsym(so, "ncclCommDestroy");
    ncclUniqueId id;
    ncclComm_t theirs;
    memset(&id, 0, sizeof id);
    if (r->rank == 0)
        rank_check(unique_id(&id) == ncclSuccess);
    rank_try(colo_comm_broadcast(r->host, &id, sizeof id, COLO_U8, 0, NULL));
    rank_check(init(&theirs, r->size, id, r->rank) == ncclSuccess);
    rank_try(colo_comm_from_nccl(theirs, r->host, &r->gpus));
    rank_try(one_op(r, REDUCE, 1000, COLO_BF16, COLO_SUM, true));
    colo_comm_destroy(&r->gpus);
    rank_try(colo_comm_from_nccl(theirs, r->host, &r->gpus)); /* it is still whole */
    rank_try(one_op(r, GATHER, 1000, COLO_F32, COLO_SUM, false));
    colo_comm_t *alone = NULL; /* the parent has other ranks than the ncclComm_t */
    rank_try(colo_comm_create_self(&alone));
    colo_comm_t *none = NULL;
    colo_status_t st = colo_comm_from_nccl(theirs, alone, &none);
    rank_check(st == COLO_ERR_ARG && !none && strstr(colo_last_error(), "the parent is rank"));
    colo_comm_destroy(&alone);
    colo_comm_destroy(&r->gpus);
    rank_check(destroy(theirs) == ncclSuccess);
    return COLO_OK;
}

static void a_borrowed_communicator_works_and_stays_whole(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, true, borrow, NULL));
}

/* ---- loss ---- */

static colo_status_t loss_rank(t_gpu_rank_t *r, void *arg)
{
    loss_case_t *c = arg;
    const int32_t k = r->rank;
    const int64_t cols = c->columns[k], T = c->tokens;
    const size_t elem = colo_dtype_size(c->dtype), n = (size_t)(T * cols) + 1;
    colo_logprob_config_t cfg = c->config;
    size_t stat_bytes, scratch_bytes;
    cfg.vocab_start = c->start[k];
    rank_try(colo_logprob_saved_size(&cfg, c->dtype, T, &stat_bytes));
    rank_try(colo_logprob_scratch_size(&cfg, c->dtype, T, r->size, &scratch_bytes));
    char *h = malloc(n * elem);
    float *vec = malloc((size_t)T * sizeof *vec);
    for (int64_t i = 0; i < T * cols; i++) {
        int64_t col = c->start[k] + i % cols;
        loss_store(c->dtype, h, i, col < c->vocab ? c->z[i / cols * c->vocab + col] : c->pad);
    }
    char *z, *dz, *scratch;
    float *out[3], *up[3];
    int64_t *targets, *counts;
    uint8_t *correct;
    void *stats;
    rank_cuda(cudaMalloc((void **)&z, n * elem));
    rank_cuda(cudaMalloc((void **)&dz, n * elem));
    rank_cuda(cudaMalloc((void **)&scratch, scratch_bytes));
    rank_cuda(cudaMalloc(&stats, stat_bytes));
    rank_cuda(cudaMalloc((void **)&targets, (size_t)T * 8));
    rank_cuda(cudaMalloc((void **)&counts, 16));
    rank_cuda(cudaMalloc((void **)&correct, (size_t)T));
    rank_cuda(cudaMemcpy(z, h, n * elem, cudaMemcpyHostToDevice));
    rank_cuda(cudaMemcpy(targets, c->targets, (size_t)T * 8, cudaMemcpyHostToDevice));
    for (int i = 0; i < 3; i++) {
        rank_cuda(cudaMalloc((void **)&out[i], (size_t)T * 4));
        rank_cuda(cudaMalloc((void **)&up[i], (size_t)T * 4));
        for (int64_t t = 0; t < T; t++)
            vec[t] = (float)c->up[i][t];
        rank_cuda(cudaMemcpy(up[i], vec, (size_t)T * 4, cudaMemcpyHostToDevice));
    }
    colo_tensor_t tz = colo_tensor_cuda(z, c->dtype, r->device, 2, (int64_t[]){T, cols});
    colo_tensor_t tg = colo_tensor_cuda(targets, COLO_I64, r->device, 1, &T);
    colo_tensor_t tdz = tz;
    tdz.data = dz;
    colo_logprob_out_t o = {.logp = out[0],
                            .entropy = cfg.want_entropy ? out[1] : NULL,
                            .loss = cfg.want_loss ? out[2] : NULL,
                            .correct = cfg.want_correct ? correct : NULL,
                            .n_valid = counts,
                            .n_invalid = counts + 1};
    colo_logprob_saved_t saved = {.valid = false};
    rank_try(t_gpu_quiet(r));
    rank_try(colo_logprob_forward(&cfg, &tz, &tg, r->gpus, &o, &saved, stats, scratch, r->stream));
    colo_logprob_upstream_t u = {.d_logp = up[0],
                                 .d_entropy = cfg.want_entropy ? up[1] : NULL,
                                 .d_loss = cfg.want_loss ? up[2] : NULL};
    rank_try(colo_logprob_backward(&saved, &u, &tdz, r->stream));
    rank_try(t_gpu_quiet(r));
    for (int i = 0; i < 3; i++) {
        rank_cuda(cudaMemcpy(vec, out[i], (size_t)T * 4, cudaMemcpyDeviceToHost));
        for (int64_t t = 0; t < T; t++)
            c->out[k][i][t] = vec[t];
    }
    if (cfg.want_correct)
        rank_cuda(cudaMemcpy(c->correct[k], correct, (size_t)T, cudaMemcpyDeviceToHost));
    rank_cuda(cudaMemcpy(&c->n_valid[k], counts, 8, cudaMemcpyDeviceToHost));
    rank_cuda(cudaMemcpy(&c->n_invalid[k], counts + 1, 8, cudaMemcpyDeviceToHost));
    rank_cuda(cudaMemcpy(h, dz, n * elem, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < T * cols; i++) /* ranks write different columns */
        if (c->start[k] + i % cols < c->vocab)
            c->dz[i / cols * c->vocab + c->start[k] + i % cols] = loss_load(c->dtype, h, i);
    void *all[] = {z,      dz,     scratch, stats, targets, counts, correct,
                   out[0], out[1], out[2],  up[0], up[1],   up[2]};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        cudaFree(all[i]);
    free(h);
    free(vec);
    return COLO_OK;
}

static void the_loss_over_ranks_is_the_oracle_s(void **state)
{
    (void)state;
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16};
    uint64_t s = t_seed();
    for (int i = 0; i < 6; i++) {
        loss_case_t c;
        loss_case_init(&c, gpus, 33, 1000 + 17 * i, dtypes[i % 3], 3, &s);
        c.config.want_entropy = true;
        c.config.want_loss = i % 2;
        c.config.want_correct = i % 3 == 0;
        c.config.label_smoothing = i % 2 ? 0.1 : 0;
        loss_case_shard(&c, (shard_kind_t)(i % SHARD_KINDS));
        assert_ok(t_gpus_run(gpus, false, loss_rank, &c));
        loss_case_compare(&c, "gpus");
        loss_case_free(&c);
    }
}

/* ---- what goes wrong ---- */

struct verdicts {
    colo_status_t status[8];
    char sentence[8][300];
    _Atomic int32_t done;
};

static void note(struct verdicts *v, int32_t rank, colo_status_t st)
{
    v->status[rank] = st;
    snprintf(v->sentence[rank], sizeof v->sentence[rank], "%.299s", colo_last_error());
}

static colo_status_t late(t_gpu_rank_t *r, void *arg)
{
    struct verdicts *v = arg;
    rank_try(colo_comm_set_timeout(r->host, 700));
    if (r->rank < r->size - 1) {
        note(v, r->rank, colo_comm_nccl_create(r->host, -1, &r->gpus));
        v->done++;
    }
    for (int i = 0; i < 2000 && v->done < r->size - 1; i++)
        usleep(10000);
    return COLO_OK;
}

static void a_rank_that_is_missing_at_create_is_a_timeout(void **state)
{
    (void)state;
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, true, late, &v));
    for (int32_t k = 0; k < gpus - 1; k++)
        if (v.status[k] != COLO_ERR_TIMEOUT)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.sentence[k]);
}

static colo_status_t same_device(t_gpu_rank_t *r, void *arg)
{
    note(arg, r->rank, colo_comm_nccl_create(r->host, 0, &r->gpus));
    return COLO_OK;
}

/* Unless NCCL is told, on all ranks, that they may share; and is one that can (2.30). */
static void two_ranks_on_one_device_are_refused_on_all(void **state)
{
    (void)state;
    const char *word = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    char *kept = word ? strdup(word) : NULL;
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
            assert_non_null(strstr(v.sentence[k], "ranks 0 and 1 (world ranks 0 and 1) are on the "
                                                  "same device"));
            assert_non_null(strstr(v.sentence[k], "NCCL_MULTI_RANK_GPU_ENABLE=1"));
        }
    }
    free(kept);
}

static colo_status_t no_such_device(t_gpu_rank_t *r, void *arg)
{
    note(arg, r->rank, colo_comm_nccl_create(r->host, r->rank == 1 ? 99 : -1, &r->gpus));
    rank_check(colo_comm_check(r->host) == COLO_OK);
    return colo_comm_nccl_create(r->host, -1, &r->gpus); /* the parent lives: try again */
}

static void a_wrong_device_on_one_rank_is_told_to_all(void **state)
{
    (void)state;
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, true, no_such_device, &v));
    for (int32_t k = 0; k < gpus; k++)
        assert_int_equal(v.status[k], k == 1 ? COLO_ERR_ARG : COLO_ERR_PEER);
}

static colo_status_t host_pointer(t_gpu_rank_t *r, void *arg)
{
    float v[16] = {0};
    note(arg, r->rank, colo_comm_all_reduce(r->gpus, v, v, 8, COLO_F32, COLO_SUM, r->stream));
    return COLO_OK;
}

static void host_memory_is_refused(void **state)
{
    (void)state;
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, host_pointer, &v));
    for (int32_t k = 0; k < gpus; k++)
        if (v.status[k] != COLO_ERR_ARG && v.status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.sentence[k]);
}

static colo_status_t differing(t_gpu_rank_t *r, void *arg)
{
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 4096));
    rank_try(colo_comm_set_check(r->gpus, 2));
    int64_t n = r->rank == 1 ? 9 : 8;
    note(arg, r->rank, colo_comm_all_reduce(r->gpus, d, d, n, COLO_F32, COLO_SUM, r->stream));
    rank_try(colo_comm_check(r->gpus));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_SUM, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    cudaFree(d);
    return COLO_OK;
}

static void different_counts_are_a_mismatch_before_anything_moves(void **state)
{
    (void)state;
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
    if (r->rank == 0) {                              /* enqueues and waits; nobody comes */
        rank_try(colo_comm_all_reduce(r->gpus, d, d, 1000, COLO_F32, COLO_SUM, r->stream));
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

static void an_abort_ends_a_stream_that_waits(void **state)
{
    (void)state;
    struct verdicts v = {.done = 0};
    assert_ok(t_gpus_run(gpus, false, abandoned, &v));
    for (int32_t k = 0; k < gpus; k++)
        if (v.status[k] != COLO_ERR_ABORTED && v.status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v.status[k]), v.sentence[k]);
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
        return colo_comm_all_reduce(r->gpus, d, d, 1000, COLO_F32, COLO_SUM, r->stream);
    colo_tensor_t x = colo_tensor_cuda(d, COLO_F32, r->device, 3, (int64_t[]){8 / r->size, 8, 2});
    colo_tensor_t y = colo_tensor_cuda(d + 1024, COLO_F32, r->device, 3, (int64_t[]){8, 8, 2});
    return colo_bridge_forward(bridge, &x, &y, r->stream);
}

static colo_status_t alone_rank(t_gpu_rank_t *r, void *arg)
{
    struct alone *a = arg;
    float *d;
    cudaGraph_t graph;
    cudaGraphExec_t exec = NULL;
    colo_bridge_t *bridge = NULL;
    colo_layout_t src, dst;
    colo_grid_t g;
    rank_cuda(cudaMalloc((void **)&d, 1 << 20));
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    char text[16];
    snprintf(text, sizeof text, "dp=%d", r->size);
    rank_try(colo_grid_parse(&g, text, r->size));
    rank_try(colo_layout_init_src(&src, &g));
    snprintf(text, sizeof text, "tp=%d", r->size);
    rank_try(colo_grid_parse(&g, text, r->size));
    rank_try(colo_layout_init_dst(&dst, &g));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &src,       .dst = &dst,
                                   .shape = {8, 8, 2, 0},   .dtype = COLO_F32, .mem = COLO_CUDA};
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    if (a->how == REPLAYED) {
        rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
        colo_status_t st = colo_comm_all_gather(r->gpus, d, d + 1000, 100, COLO_F32, r->stream);
        rank_cuda(cudaStreamEndCapture(r->stream, &graph));
        rank_try(st);
        rank_cuda(cudaGraphInstantiate(&exec, graph, 0));
        rank_cuda(cudaGraphUpload(exec, r->stream));
        rank_try(t_gpu_quiet(r));
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

static void an_operation_that_is_late_is_a_timeout_that_names_it(void **state)
{
    (void)state;
    for (int how = EAGER; how <= OF_A_BRIDGE; how++) {
        struct alone a = {.how = how};
        const char *what[] = {"all_reduce #", "all_gather #", "exchange #"};
        assert_ok(t_gpus_run(gpus, false, alone_rank, &a));
        if (a.v.status[0] != COLO_ERR_TIMEOUT || !strstr(a.v.sentence[0], what[how]) ||
            !strstr(a.v.sentence[0], "has not ended 400 ms after its turn came"))
            fail_msg("way %d: %s: %s", how, colo_status_name(a.v.status[0]), a.v.sentence[0]);
        for (int32_t k = 1; k < gpus; k++)
            if (a.v.status[k] != COLO_ERR_PEER || !strstr(a.v.sentence[k], what[how]))
                fail_msg("way %d, rank %d: %s: %s", how, k, colo_status_name(a.v.status[k]),
                         a.v.sentence[k]);
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
static colo_status_t busy_stream(t_gpu_rank_t *r, void *arg)
{
    static cudaEvent_t slept;
    float *d;
    rank_cuda(cudaMalloc((void **)&d, 4096));
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_SUM, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_comm_set_timeout(r->gpus, 300));
    if (r->rank == 0) {
        rank_cuda(cudaEventCreateWithFlags(&slept, cudaEventDisableTiming));
        rank_cuda(cudaLaunchHostFunc(r->stream, host_sleep, NULL));
        rank_cuda(cudaEventRecord(slept, r->stream));
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaStreamWaitEvent(r->stream, slept, 0));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 8, COLO_F32, COLO_SUM, r->stream));
    rank_try(t_gpu_quiet(r));
    usleep(100000);
    cudaFree(d);
    if (r->rank == 0)
        rank_cuda(cudaEventDestroy(slept));
    return colo_comm_check(r->gpus);
}

static void work_queued_in_front_is_not_late(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, busy_stream, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_have_the_bits_of_the_host),
        cmocka_unit_test(a_maximum_keeps_a_nan),
        cmocka_unit_test(splits_are_groups_of_gpus),
        cmocka_unit_test(a_borrowed_communicator_works_and_stays_whole),
        cmocka_unit_test(the_loss_over_ranks_is_the_oracle_s),
        cmocka_unit_test(a_rank_that_is_missing_at_create_is_a_timeout),
        cmocka_unit_test(two_ranks_on_one_device_are_refused_on_all),
        cmocka_unit_test(a_wrong_device_on_one_rank_is_told_to_all),
        cmocka_unit_test(host_memory_is_refused),
        cmocka_unit_test(different_counts_are_a_mismatch_before_anything_moves),
        cmocka_unit_test(an_abort_ends_a_stream_that_waits),
        cmocka_unit_test(an_operation_that_is_late_is_a_timeout_that_names_it),
        cmocka_unit_test(work_queued_in_front_is_not_late),
    };
    if (!t_gpus_enough(2))
        return T_EXIT_SKIP;
    gpus = t_gpu_count() >= 8 ? 8 : t_gpu_count() >= 4 ? 4 : 2;
    return cmocka_run_group_tests_name("gpu/nccl_comm", tests, NULL, NULL);
}
