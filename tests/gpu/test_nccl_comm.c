/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_comm.c - communicators of GPUs, one thread a rank: every collective bitwise against the
 * host's, splits, an ncclComm_t that exists, the loss over ranks against fp64. What goes wrong:
 * test_nccl_failure.c.
 */
#include "gpu/gpu_ranks.h"

#include "comm/comm.h"
#include "core/half.h"
#include "core/error.h"
#include "loss/loss_case.h"

#include <dlfcn.h>
#include <nccl.h>

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
    rank_cuda(t_to_device(d_in, h_in, in));
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

T_CASE_ON_GPUS(gpus, collectives_have_the_bits_of_the_host)
{
    static const int64_t counts[] = {0, 1, 3, 1000, 65537, 400000};
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16,
                                          COLO_F64, COLO_I32,  COLO_I64};
    int64_t rep = 0;
    uint64_t gathers = 0;
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            for (size_t k = 0; k < sizeof dtypes / sizeof dtypes[0]; k++) {
                if (counts[i] > 1000 && t_left_out(rep++))
                    continue;
                gathers += kind == GATHER;
                rank_try(one_op(r, kind, counts[i], dtypes[k], COLO_REDOP_SUM, false));
                if (kind == REDUCE || kind == SCATTER)
                    rank_try(one_op(r, kind, counts[i], dtypes[k], COLO_REDOP_MAX, kind == REDUCE));
            }
    rank_try(t_gpu_quiet(r)); /* all have freed */
    rank_try(colo_comm_barrier(r->gpus, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    colo_comm_stats_t l;
    t_comm_stats(r->gpus, &l);
    rank_check(l.ops[COLO_OP_BARRIER][COLO_CATEGORY_USER] == 1);
    rank_check(l.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_USER] == gathers);
    return COLO_OK;
}

T_CASE_ON_GPUS(gpus, a_comm_of_gpus_has_the_config_of_its_parent)
{
    colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .transport = COLO_TRANSPORT_NCCL};
    colo_comm_config_t said = {COLO_COMM_CONFIG_INIT}, has = {COLO_COMM_CONFIG_INIT};
    T_ENDS(colo_comm_destroy) colo_comm_t *parent = NULL;
    T_ENDS(colo_comm_destroy) colo_comm_t *child = NULL;
    config.check = 2;
    config.timeout_ms = t_long_wait() + 1;
    config.flight_recorder = "/tmp/ours";
    rank_try(colo_comm_split_color(r->host, 0, 0, &parent));
    rank_try(colo_comm_configure(parent, &config));
    rank_try(colo_comm_create_nccl(parent, -1, &child));
    rank_try(colo_comm_config(parent, &said)); /* the environment may override some */
    rank_try(colo_comm_config(child, &has));
    rank_check(has.check == said.check && has.timeout_ms == said.timeout_ms);
    rank_check(has.transport == said.transport);
    rank_check(has.flight_recorder && strcmp(has.flight_recorder, said.flight_recorder) == 0);
    return COLO_OK;
}

/* Staging that the caller lends is what reductions use, and no byte more of it than they said. */
T_CASE_ON_GPUS(gpus, a_reduction_uses_the_staging_that_it_is_lent)
{
    enum { GUARD = 256, BYTE = 0x5a };
    static const int64_t counts[] = {3, 65537};
    for (int i = 0; i < 4; i++) {
        const int kind = i / 2 ? SCATTER : REDUCE;
        const int64_t n = counts[i % 2], bytes = n * 4 * (kind == SCATTER ? r->size : 1);
        const size_t need = colo_comm_reduction_stage(r->gpus, bytes);
        rank_check(need > 0 && need <= 64 << 20);
        unsigned char *stage, *back = malloc(need + GUARD);
        size_t used = 0, spilled = 0;
        memset(back, BYTE, need + GUARD);
        rank_cuda(cudaMalloc((void **)&stage, need + GUARD));
        rank_cuda(t_to_device(stage, back, need + GUARD));
        colo_comm_set_stage(r->gpus, stage, need);
        rank_try(one_op(r, kind, n, COLO_F32, COLO_REDOP_SUM, false));
        colo_comm_set_stage(r->gpus, NULL, 0);
        rank_cuda(cudaMemcpy(back, stage, need + GUARD, cudaMemcpyDeviceToHost));
        for (size_t k = 0; k < need + GUARD; k++)
            *(k < need ? &used : &spilled) += back[k] != BYTE;
        cudaFree(stage);
        free(back);
        rank_check(used > 0 && spilled == 0);
        rank_try(one_op(r, kind, n, COLO_F32, COLO_REDOP_SUM, false)); /* of its own again */
    }
    return COLO_OK;
}

T_CASE_ON_GPUS(gpus, a_maximum_keeps_a_nan)
{
    float v[3] = {r->rank == 1 ? NAN : 1.0f, (float)r->rank, -1.0f}, *d;
    rank_cuda(cudaMalloc((void **)&d, sizeof v));
    rank_cuda(t_to_device(d, v, sizeof v));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_comm_all_reduce(r->gpus, d, d, 3, COLO_F32, COLO_REDOP_MAX, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(v, d, sizeof v, cudaMemcpyDeviceToHost));
    cudaFree(d);
    rank_check(isnan(v[0]) && v[1] == (float)(r->size - 1) && v[2] == -1.0f);
    return COLO_OK;
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
    rank_cuda(t_to_device(d, &mine, 8));
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

T_CASE(splits_are_groups_of_gpus)
{
    assert_ok(t_gpus_run(gpus, false, splits, NULL));
}

/* ---- messages ---- */

enum { ROWS = 4, COLUMNS = 6, SENT = 2 };

/* The first columns of each rank's matrix become the last ones of the next rank's. */
T_CASE_ON_GPUS(gpus, messages_of_columns_go_to_the_next_rank)
{
    int32_t *d, host[ROWS * COLUMNS];
    const int32_t before = (r->rank + r->size - 1) % r->size;
    rank_cuda(cudaMalloc((void **)&d, sizeof host));
    for (int32_t i = 0; i < ROWS * COLUMNS; i++)
        host[i] = 100 * r->rank + i;
    rank_cuda(t_to_device(d, host, sizeof host));
    colo_box_t boxes[] = {{d, {1, ROWS, SENT}, {1, COLUMNS, 1}},
                          {d + COLUMNS - SENT, {1, ROWS, SENT}, {1, COLUMNS, 1}}};
    const colo_message_t send = {.peer = (r->rank + 1) % r->size, .nboxes = 1, .boxes = boxes},
                         recv = {.peer = before, .nboxes = 1, .boxes = boxes + 1};
    rank_try(colo_comm_exchange(r->gpus, &send, 1, &recv, 1, COLO_I32, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemcpy(host, d, sizeof host, cudaMemcpyDeviceToHost));
    for (int32_t i = 0; i < ROWS * COLUMNS; i++) {
        const int32_t left = COLUMNS - SENT, came = i % COLUMNS >= left;
        rank_check(host[i] == (came ? 100 * before + i - left : 100 * r->rank + i));
    }
    rank_cuda(cudaFree(d));
    return COLO_OK;
}

/* ---- a communicator that exists ---- */

T_CASE_ON_BARE_GPUS(gpus, a_borrowed_communicator_works_and_stays_whole)
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
    rank_try(colo_comm_create_nccl_borrowed(theirs, r->host, &r->gpus));
    rank_try(one_op(r, REDUCE, 1000, COLO_BF16, COLO_REDOP_SUM, true));
    colo_comm_destroy(&r->gpus);
    rank_try(colo_comm_create_nccl_borrowed(theirs, r->host, &r->gpus)); /* it is still whole */
    rank_try(one_op(r, GATHER, 1000, COLO_F32, COLO_REDOP_SUM, false));
    colo_comm_t *alone = NULL; /* the parent has other ranks than the ncclComm_t */
    rank_try(colo_comm_create_self(&alone));
    colo_comm_t *none = NULL;
    colo_status_t st = colo_comm_create_nccl_borrowed(theirs, alone, &none);
    rank_check(st == COLO_ERR_ARG && !none && strstr(colo_last_error(), "the parent is rank"));
    colo_comm_destroy(&alone);
    colo_comm_destroy(&r->gpus);
    rank_check(destroy(theirs) == ncclSuccess);
    return COLO_OK;
}

/* ---- loss ---- */

T_CASE(the_loss_over_ranks_is_the_oracle_s)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16};
    uint64_t s = t_seed();
    for (int i = 0; i < 6; i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, gpus, 33, 1000 + 17 * i, dtypes[i % 3], 3, &s);
        c.config.want_entropy = true;
        c.config.want_loss = i % 2;
        c.config.want_correct = i % 3 == 0;
        c.config.label_smoothing = i % 2 ? 0.1 : 0;
        loss_case_shard(&c, (shard_kind_t)(i % SHARD_KINDS));
        assert_ok(loss_case_run(&c));
        loss_case_compare(&c, "gpus");
    }
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_comm")
