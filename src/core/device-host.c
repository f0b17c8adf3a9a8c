/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device-host.c - the host's table of core/device.h, in plain C.
 *
 * Box sums and shifts are here: addends in the order given, fp32 accumulation for bf16 and fp16,
 * one rounding. Copies are box.h's. Arguments come checked.
 */
#include "core/device.h"

#include "core/box.h"
#include "core/hash.h"
#include "core/error.h"
#include "core/scalar.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

/* aligned as a device's allocator does, and as heads ask for */
static colo_status_t host_alloc(size_t bytes, void **p)
{
    if (posix_memalign(p, 256, bytes) == 0)
        return COLO_OK;
    *p = NULL;
    return colo_fail(COLO_ERR_NOMEM, "%zu bytes of host memory", bytes);
}

static colo_status_t host_zero(void *p, size_t bytes, colo_stream_t stream)
{
    memset(p, 0, bytes);
    return COLO_OK;
}

/* ---- streams and events ---- */

static colo_status_t stream_create(int32_t events, void **s)
{
    *s = NULL;
    return COLO_OK;
}

static void stream_destroy(void *s)
{
}

static colo_status_t stream_follow(void *s, int32_t event, colo_stream_t from, bool *follows)
{
    *follows = false;
    return COLO_OK;
}

static colo_stream_t stream_of(void *s)
{
    return NULL;
}

static colo_status_t event(void *s, int32_t event, colo_stream_t on)
{
    return COLO_OK;
}

/* ---- a caller's memory ---- */

static colo_status_t pointer_check(colo_queries_t *q, const void *p, int32_t device,
                                   const char *what)
{
    return COLO_OK;
}

static colo_status_t stream_check(colo_queries_t *q, colo_stream_t stream, bool *capturing)
{
    *capturing = false;
    return COLO_OK;
}

static colo_status_t host_read(void *to, const void *from, size_t bytes, colo_stream_t stream)
{
    memcpy(to, from, bytes);
    return COLO_OK;
}

static char *at(const colo_box_t *b, int64_t i, int64_t j, int64_t k, size_t elem)
{
    return (char *)b->data +
           (i * b->stride[0] + j * b->stride[1] + k * b->stride[2]) * (int64_t)elem;
}

static colo_status_t box_hash(const colo_box_t *b, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream)
{
    uint64_t h = COLO_HASH_INIT;
    for (int64_t i = 0; i < b->extent[0]; i++)
        for (int64_t j = 0; j < b->extent[1]; j++)
            for (int64_t k = 0; k < b->extent[2]; k++)
                h = colo_hash_bytes(h, at(b, i, j, k, elem_size), elem_size);
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
    int64_t index = 0;
    *first = -1;
    for (int64_t i = 0; i < b->extent[0]; i++)
        for (int64_t j = 0; j < b->extent[1]; j++)
            for (int64_t k = 0; k < b->extent[2]; k++, index++)
                if (!is_zero(at(b, i, j, k, elem), elem, is_float)) {
                    *first = index;
                    return COLO_OK;
                }
    return COLO_OK;
}

COLO_INLINE void add_values(colo_dtype_t dtype, const void *values, const uint8_t *mask,
                            int64_t count, double *num, int64_t *den)
{
    for (int64_t i = 0; i < count; i++) {
        if (mask && !mask[i])
            continue;
        *num += colo_scalar_get(dtype, values, i);
        ++*den;
    }
}

static colo_status_t masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream)
{
    *num = 0;
    *den = 0;
    COLO_FOR_FLOAT(dtype, add_values, values, mask, count, num, den)
    return COLO_OK;
}

/* ---- boxes ---- */

static colo_status_t box_list(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, colo_stream_t stream)
{
    static const uint64_t zero = 0; /* one element, everywhere */
    for (int64_t i = 0; i < n; i++) {
        colo_box_t from = src[i];
        if (!from.data)
            from =
                (colo_box_t){(void *)&zero, {from.extent[0], from.extent[1], from.extent[2]}, {0}};
        colo_box_copy_host(&dst[i], &from, elem_size);
    }
    return COLO_OK;
}

static colo_status_t box_copy(const colo_box_t *dst, const colo_box_t *src, size_t elem_size,
                              colo_stream_t stream)
{
    return box_list(dst, src, 1, elem_size, stream);
}

/* One row; ascending, so that @to may be @from. */
static void shift_row(int64_t *to, int64_t to_stride, const int64_t *from, int64_t from_stride,
                      int64_t n, int64_t last)
{
    for (int64_t i = 0; i + 1 < n; i++)
        to[i * to_stride] = from[(i + 1) * from_stride];
    if (n > 0)
        to[(n - 1) * to_stride] = last;
}

static colo_status_t box_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, colo_stream_t stream)
{
    for (int64_t b = 0; b < n; b++)
        for (int64_t i = 0; i < dst[b].extent[0]; i++)
            for (int64_t j = 0; j < dst[b].extent[1]; j++)
                shift_row((int64_t *)(void *)at(&dst[b], i, j, 0, 8), dst[b].stride[2],
                          (const int64_t *)(void *)at(&src[b], i, j, 0, 8), src[b].stride[2],
                          dst[b].extent[2], last);
    return COLO_OK;
}

/* Sums of a piece of a row: in fp64 if they are of it, else in fp32. */
enum { PIECE = 512 };
union sums {
    float f32[PIECE];
    double f64[PIECE];
};

/* sum[i] = row[i], or sum[i] + row[i] */
COLO_INLINE void add_row(colo_dtype_t dtype, union sums *sum, const void *row, int64_t stride,
                         bool first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const double x = colo_scalar_get(dtype, row, i * stride);
        if (dtype == COLO_F64)
            sum->f64[i] = first ? x : sum->f64[i] + x;
        else
            sum->f32[i] = first ? (float)x : sum->f32[i] + (float)x;
    }
}

COLO_INLINE void put_row(colo_dtype_t dtype, void *row, int64_t stride, const union sums *sum,
                         int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        colo_scalar_put(dtype, row, i * stride, dtype == COLO_F64 ? sum->f64[i] : sum->f32[i]);
}

static colo_status_t mixed_sum(const colo_mixed_sum_t *sums)
{
    union sums sum;
    for (int64_t i = 0; i < sums->to.extent[0]; i++)
        for (int64_t j = 0; j < sums->to.extent[1]; j++)
            for (int64_t first = 0; first < sums->to.extent[2]; first += PIECE) {
                const int64_t left = sums->to.extent[2] - first,
                              count = left < PIECE ? left : PIECE;
                for (int32_t k = 0; k < sums->n; k++)
                    COLO_FOR_FLOAT(
                        sums->from_dtype[k], add_row, &sum,
                        at(&sums->from[k], i, j, first, colo_dtype_size(sums->from_dtype[k])),
                        sums->from[k].stride[2], k == 0, count)
                COLO_FOR_FLOAT(sums->dtype, put_row,
                               at(&sums->to, i, j, first, colo_dtype_size(sums->dtype)),
                               sums->to.stride[2], &sum, count)
            }
    return COLO_OK;
}

static colo_status_t box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                             colo_dtype_t dtype, colo_stream_t stream)
{
    colo_dtype_t dtypes[COLO_MAX_ADDENDS];
    COLO_FAIL_IF(!colo_dtype_is_float(dtype) || n < 1 || n > COLO_MAX_ADDENDS, COLO_ERR_ARG,
                 "sum: %d addends of %s, expected 1..%d of a float dtype", (int)n,
                 colo_dtype_name(dtype), COLO_MAX_ADDENDS);
    for (int32_t k = 0; k < n; k++)
        dtypes[k] = dtype;
    return mixed_sum(&(colo_mixed_sum_t){*dst, src, dtypes, dtype, n});
}

static colo_status_t box_sums(const colo_mixed_sum_t *sums, int32_t n, colo_stream_t stream)
{
    for (int32_t i = 0; i < n; i++)
        COLO_TRY(mixed_sum(&sums[i]));
    return COLO_OK;
}

COLO_INLINE void add_half(colo_dtype_t dtype, bool rounds, void *to, const float *wide,
                          const void *half, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const float more = (float)colo_scalar_get(dtype, half, i);
        colo_scalar_put(rounds ? dtype : COLO_F32, to, i, wide ? wide[i] + more : more);
    }
}

static colo_status_t half_sum(void *to, colo_dtype_t to_dtype, const float *wide, const void *half,
                              colo_dtype_t dtype, int64_t n, colo_stream_t stream)
{
    COLO_FAIL_IF((dtype != COLO_BF16 && dtype != COLO_F16) ||
                     (to_dtype != COLO_F32 && to_dtype != dtype),
                 COLO_ERR_ARG, "sum of fp32 and %s into %s: expected bf16 or f16, into it or f32",
                 colo_dtype_name(dtype), colo_dtype_name(to_dtype));
    COLO_FOR_FLOAT(dtype, add_half, to_dtype != COLO_F32, to, wide, half, n)
    return COLO_OK;
}

const colo_device_t colo_device_host = {
    .name = "host",
    .alloc = host_alloc,
    .free = free,
    .zero = host_zero,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_of = stream_of,
    .event_record = event,
    .event_wait = event,
    .stream_follow = stream_follow,
    .pointer_check = pointer_check,
    .stream_check = stream_check,
    .read = host_read,
    .box_hash = box_hash,
    .box_nonzero = box_nonzero,
    .masked_sum = masked_sum,
    .box_copy = box_copy,
    .box_sum = box_sum,
    .box_sums = box_sums,
    .half_sum = half_sum,
    .box_list = box_list,
    .box_list_narrow = box_list,
    .box_shift = box_shift,
};
