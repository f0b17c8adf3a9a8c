/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gpu.h - small cases of the lm_head path for GPUs. */
#ifndef TESTS_LINEAR_GPU_H
#define TESTS_LINEAR_GPU_H

#include "gpu/gpu.h"
#include "loss/linear_case.h"

/* @mode: 0 logprob, 1 keep, 2 loss. Options that need a loss get one. */
static inline void linear_gpu_options(linear_case_t *c, unsigned bits, int mode)
{
    if (bits & (WITH_SMOOTH | WITH_MEGATRON | WITH_ZLOSS))
        bits |= WITH_LOSS;
    linear_case_options(c, bits);
    linear_case_mode(c, mode);
}

/* @dtypes picks the head's, the logits' and d_weight's dtype. */
static inline void linear_gpu_case(linear_case_t *c, unsigned bits, int mode, int32_t ranks,
                                   int32_t replicas, int dtypes, int64_t chunk, uint64_t *rng)
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
}

#endif
