/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gpu.h - small cases of the lm_head path for GPUs. */
#ifndef TESTS_GPU_LINEAR_GPU_H
#define TESTS_GPU_LINEAR_GPU_H

#include "gpu/gpu.h"
#include "loss/linear_case.h"

/* @dtypes picks the head's, the logits' and d_weight's dtype. */
static inline colo_dtype_t linear_gpu_head(int dtypes)
{
    static const colo_dtype_t head[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    return head[dtypes % 4];
}

static inline void linear_gpu_ask(linear_case_t *c, unsigned bits, int mode, int dtypes)
{
    linear_case_options(c, bits);
    linear_case_mode(c, mode);
    if (dtypes / 4 % 2 && (c->dtype == COLO_BF16 || c->dtype == COLO_F16))
        c->config.logits_dtype = c->dtype;
    if (dtypes / 8 % 2 && c->dtype != COLO_F64) {
        c->config.d_weight_dtype = c->dtype;
        c->config.d_weight_add = c->dtype == COLO_F32;
    }
}

static inline void linear_gpu_case(linear_case_t *c, unsigned bits, int mode, int32_t ranks,
                                   int32_t replicas, int dtypes, int64_t chunk, uint64_t *rng)
{
    linear_case_init(c, ranks, replicas, 37, 59, 16 + dtypes % 9, linear_gpu_head(dtypes), rng);
    linear_case_shard(c, (shard_kind_t)(dtypes % SHARD_KINDS));
    linear_gpu_ask(c, bits, mode, dtypes);
    c->config.logprob.chunk_size = chunk;
    c->prefill = c->config.d_weight_add ? 0.5 : 0;
}

#endif
