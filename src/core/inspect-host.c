/* SPDX-License-Identifier: Apache-2.0 */
/* inspect-host.c - looking at host memory: every pointer may be used, and reading is a loop. */
#include "core/inspect.h"

#include "core/hash.h"

#include <string.h>

static colo_status_t pointer_check(const void *p, int32_t device, const char *what)
{
    (void)p;
    (void)device;
    (void)what;
    return COLO_OK;
}

static colo_status_t stream_check(colo_stream_t stream, bool *capturing)
{
    (void)stream;
    *capturing = false;
    return COLO_OK;
}

static const char *element(const colo_box_t *b, int64_t i, int64_t j, int64_t k, int64_t elem)
{
    return (const char *)b->data + (i * b->stride[0] + j * b->stride[1] + k * b->stride[2]) * elem;
}

static colo_status_t box_hash(const colo_box_t *b, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream)
{
    uint64_t h = COLO_HASH_INIT;
    (void)stream;
    for (int64_t i = 0; i < b->extent[0]; i++)
        for (int64_t j = 0; j < b->extent[1]; j++)
            for (int64_t k = 0; k < b->extent[2]; k++)
                h = colo_hash_bytes(h, element(b, i, j, k, (int64_t)elem_size), elem_size);
    *hash = h;
    return COLO_OK;
}

static bool is_zero(const char *p, size_t n, bool is_float)
{
    static const char zero[8];
    char v[8];
    memcpy(v, p, n);
    if (is_float)
        v[n - 1] &= 0x7f; /* -0.0 is zero; little-endian, as every machine this runs on */
    return memcmp(v, zero, n) == 0;
}

static colo_status_t box_nonzero(const colo_box_t *b, colo_dtype_t dtype, int64_t *first,
                                 colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(dtype);
    const bool is_float = colo_dtype_is_float(dtype);
    int64_t at = 0;
    (void)stream;
    *first = -1;
    for (int64_t i = 0; i < b->extent[0]; i++)
        for (int64_t j = 0; j < b->extent[1]; j++)
            for (int64_t k = 0; k < b->extent[2]; k++, at++)
                if (!is_zero(element(b, i, j, k, (int64_t)elem), elem, is_float)) {
                    *first = at;
                    return COLO_OK;
                }
    return COLO_OK;
}

static colo_status_t masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream)
{
    (void)stream;
    *num = 0;
    *den = 0;
    for (int64_t i = 0; i < count; i++) {
        if (mask && !mask[i])
            continue;
        *num +=
            dtype == COLO_F64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
        ++*den;
    }
    return COLO_OK;
}

const colo_inspect_ops_t colo_inspect_host = {
    .pointer_check = pointer_check,
    .stream_check = stream_check,
    .box_hash = box_hash,
    .box_nonzero = box_nonzero,
    .masked_sum = masked_sum,
};
