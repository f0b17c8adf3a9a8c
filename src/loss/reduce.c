/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reduce.c - the mean of a loss over tokens that live on several ranks: sum first, divide once.
 *
 * Ranks hold different numbers of counted tokens, so a mean of means weights them wrongly. Each
 * rank brings (num, den); both are added in rank order, so every rank gets the same bits. The den
 * is an integer: nothing is lost in a large batch. Which group that is (dp x cp, never tp, whose
 * ranks hold the same tokens) is the caller's choice. A value that does not count is not read, so a
 * NaN behind the mask stays there.
 */
#include "loss/validate.h"

#include "comm/comm.h"
#include "core/device.h"
#include "core/error.h"
#include "core/range.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct local_sum { /* two words */
    double num;
    int64_t den;
};

enum { ON_STACK = 256 }; /* ranks; more are allocated for */

static colo_status_t check(const void *values, colo_dtype_t dtype, int64_t count,
                           const colo_loss_reduced_t *out)
{
    COLO_FAIL_IF(dtype != COLO_F32 && dtype != COLO_F64, COLO_ERR_ARG,
                 "reduce: values of dtype %s, expected f32 or f64", colo_dtype_name(dtype));
    COLO_FAIL_IF(count < 0, COLO_ERR_ARG, "reduce: count is %" PRId64 ", expected >= 0", count);
    COLO_FAIL_IF(count > 0 && !values, COLO_ERR_ARG,
                 "reduce: values is NULL for %" PRId64 " tokens", count);
    COLO_FAIL_IF(!out, COLO_ERR_ARG, "reduce: out is NULL");
    return COLO_OK;
}

/* The values of a group of GPUs are in device memory; the host waits for their sum. */
static colo_status_t sum_local(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                               int64_t count, bool on_gpu, struct local_sum *p,
                               colo_stream_t stream)
{
    const colo_device_t *device;
    COLO_TRY(colo_device_for(on_gpu ? COLO_MEM_CUDA : COLO_MEM_HOST, &device));
    return device->masked_sum(values, dtype, mask, count, &p->num, &p->den, stream);
}

colo_status_t colo_loss_reduce(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                               int64_t count, colo_comm_t *group, colo_loss_reduced_t *out,
                               colo_stream_t stream)
{
    COLO_RANGE();
    COLO_FAIL_IF(!group, COLO_ERR_ARG, "reduce: group is NULL, expected the dp x cp group");
    const int32_t ranks = colo_comm_size(group);
    struct local_sum few[ON_STACK], *all = few;
    COLO_AUTOFREE void *many = NULL;
    colo_status_t st = check(values, dtype, count, out);
    if (st == COLO_OK && ranks > ON_STACK) {
        all = many = malloc((size_t)ranks * sizeof *all);
        if (!many)
            st = colo_fail(COLO_ERR_NOMEM, "reduce: %zu bytes", (size_t)ranks * sizeof *all);
    }
    struct local_sum mine = {0, 0}, sum = {0, 0};
    const bool on_gpu = colo_comm_mem(group) == COLO_MEM_CUDA;
    COLO_THEN(st, sum_local(values, dtype, mask, count, on_gpu, &mine, stream));
    COLO_TRY(colo_loss_ready(group, "loss reduce", st));
    if (on_gpu) { /* over the host comm of the same ranks */
        uint64_t words[2];
        memcpy(words, &mine, sizeof words);
        COLO_TRY(colo_comm_gather(group, COLO_OP_ALL_GATHER, COLO_CATEGORY_LOSS, words,
                                  (uint64_t *)all, 2));
    } else {
        COLO_TRY(colo_comm_all_gather_for(group, COLO_CATEGORY_LOSS, &mine, all, sizeof mine,
                                          COLO_U8, stream));
    }
    for (int32_t r = 0; r < ranks; r++) {
        sum.num += all[r].num;
        sum.den += all[r].den;
    }
    *out = (colo_loss_reduced_t){
        .num = sum.num,
        .den = sum.den,
        .value = sum.den ? sum.num / (double)sum.den : 0,
    };
    return COLO_OK;
}
