/* SPDX-License-Identifier: Apache-2.0 */
/* head.h (private) - a head's members and how its shards lie; lm_head.c and head-grads.c share
 * them. */
#ifndef COLO_LOSS_LINEAR_HEAD_H
#define COLO_LOSS_LINEAR_HEAD_H

#include "comm/comm.h"
#include "core/box.h"
#include "core/memory.h"
#include "loss/linear/linear.h"
#include "loss/loss.h"

struct colo_lm_head {
    colo_lm_head_config_t config;
    colo_comm_t *group; /* NULL: resident */
    const colo_device_t *device;
    const colo_loss_kernels_t *kernels;
    void *aux;
    int64_t each;         /* E rows, or P elements of flat parts */
    int64_t first, count; /* of them here */
    colo_lm_head_state_t state;
    bool bound;
    colo_tensor_t weight, bias; /* as bound */
    void *gathered;
};

static inline colo_dtype_t colo_head_sum_dtype(const colo_lm_head_t *head)
{
    return head->config.dtype == COLO_F64 ? COLO_F64 : COLO_F32;
}

/* Elements from one travelling row to the next. */
static inline int64_t colo_head_pitch(const colo_lm_head_t *head, colo_dtype_t dtype)
{
    int64_t step = 16 / (int64_t)colo_dtype_size(dtype);
    return head->config.has_bias ? (head->config.hidden + step) / step * step : head->config.hidden;
}

static inline bool colo_head_is_flat(const colo_lm_head_t *head)
{
    return head->config.partition == COLO_LM_HEAD_FLAT;
}

/* Elements that a rank brings, padding and all. */
static inline int64_t colo_head_slab(const colo_lm_head_t *head, colo_dtype_t dtype)
{
    return colo_head_is_flat(head) ? head->each : head->each * colo_head_pitch(head, dtype);
}

static inline size_t colo_head_bytes_of(const colo_lm_head_t *head, colo_dtype_t dtype)
{
    int64_t bytes = (head->group ? colo_head_slab(head, dtype) * colo_comm_size(head->group)
                                 : head->config.rows * colo_head_pitch(head, dtype)) *
                    (int64_t)colo_dtype_size(dtype);
    (void)colo_mem_round_ok(bytes, &bytes); /* create has left room for it */
    return (size_t)bytes;
}

/* Rows and columns of the weight that is here: a flat part is one row. */
static inline int64_t colo_head_rows_of(const colo_lm_head_t *head)
{
    return colo_head_is_flat(head) ? 1 : head->count;
}

static inline int64_t colo_head_columns_of(const colo_lm_head_t *head)
{
    return colo_head_is_flat(head) ? head->count : head->config.hidden;
}

/* Is @tensor where and as large as the head's? @axes: 2 for a matrix [rows here, H], 1 for a
 * vector. */
colo_status_t colo_head_check_param(const colo_lm_head_t *head, const colo_tensor_t *tensor,
                                    int32_t axes, const char *what);
colo_status_t colo_head_check_has_bias(const colo_lm_head_t *head, const colo_tensor_t *bias,
                                       const char *what);

#endif
