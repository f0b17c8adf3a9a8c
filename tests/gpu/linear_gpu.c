/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gpu.c - see linear_gpu.h */
#include "gpu/linear_gpu.h"

#include "core/try.h"

#include <colobridge/nccl.h>

static void *alloc(size_t bytes)
{
    void *p = NULL;
    assert_cuda(cudaMallocManaged(&p, bytes + 1, cudaMemAttachGlobal));
    return p;
}

static void release(void *p)
{
    cudaFree(p);
}

static void wait_all(void)
{
    cudaDeviceSynchronize();
}

static int32_t device(void)
{
    int d = -1;
    cudaGetDevice(&d);
    return d;
}

static colo_status_t comm(colo_comm_t *world, colo_comm_t **mine)
{
    if (cudaSetDevice(colo_comm_rank(world)) != cudaSuccess)
        return colo_fail(COLO_ERR_CUDA, "no device %d", (int)colo_comm_rank(world));
    return colo_comm_size(world) > 1 ? colo_comm_nccl_create(world, -1, mine) : COLO_OK;
}

const linear_place_t *linear_gpu_place(void)
{
    static const linear_place_t here = {alloc, release, wait_all, device, comm};
    return &here;
}

void linear_gpu_options(linear_case_t *c, unsigned bits, int mode)
{
    if (bits & (LINEAR_SMOOTH | LINEAR_MEGATRON | LINEAR_ZLOSS))
        bits |= LINEAR_LOSS;
    linear_case_options(c, bits);
    linear_case_mode(c, mode);
}

void linear_gpu_run(linear_case_t *c, const char *what)
{
    char label[200];
    snprintf(label, sizeof label, "%s (W=%d D=%d T=%d V=%d H=%d %s, chunk %d)", what, (int)c->ranks,
             (int)c->replicas, (int)c->tokens, (int)c->vocab, (int)c->hidden,
             colo_dtype_name(c->dtype), (int)c->config.logprob.chunk_size);
    c->place = linear_gpu_place();
    colo_status_t st = linear_case_run(c);
    if (st != COLO_OK)
        fail_msg("%s: %s: %s", label, colo_status_name(st), colo_last_error());
    linear_case_compare(c, label);
}

void linear_gpu_one(unsigned bits, int mode, int32_t ranks, int32_t replicas, int dtypes,
                    int64_t chunk, uint64_t *rng)
{
    static const colo_dtype_t head[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    const colo_dtype_t dtype = head[dtypes % 4];
    linear_case_t c;
    char what[80];
    linear_case_init(&c, ranks, replicas, 37, 59, 16 + dtypes % 9, dtype, rng);
    linear_case_shard(&c, (shard_kind_t)(dtypes % SHARD_KINDS));
    linear_gpu_options(&c, bits, mode);
    if (dtypes / 4 % 2 && (dtype == COLO_BF16 || dtype == COLO_F16))
        c.config.logits_dtype = dtype;
    if (dtypes / 8 % 2 && dtype != COLO_F64) {
        c.config.d_weight_dtype = dtype;
        c.config.d_weight_add = dtype == COLO_F32;
    }
    c.config.logprob.chunk_size = chunk;
    c.prefill = c.config.d_weight_add ? 0.5 : 0;
    snprintf(what, sizeof what, "options %03x, mode %d, dtypes %d", bits, mode, dtypes);
    linear_gpu_run(&c, what);
    linear_case_free(&c);
}
