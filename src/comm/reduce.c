/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reduce.c - the one place where ranks' values are combined on the host.
 *
 * Rank order per element, always: the first rank's value, then the second's added to it, and so on.
 * A tile of elements is accumulated in a small array and stored once, so a destination that is one
 * of the sources is fine, half precision rounds once, and the loops vectorise over elements without
 * touching the order over ranks. MAX keeps a NaN wherever it meets one.
 */
#include "comm/reduce.h"

#include "core/error.h"
#include "core/half.h"

#include <stdlib.h>

enum { TILE = 512 };

#define SAME(x) (x)
#define PLUS(a, b) ((a) + (b))
/* NaN > a is false, a > NaN too: an incoming NaN is taken, one that is there stays */
#define MOST(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))

/* T: stored, A: accumulated in (unsigned for integer sums, which wrap) */
#define REDUCE(name, T, A, LOAD, STORE, OP)                                                   \
    static void name(void *dst, const void *const *src, int32_t nsrc, int64_t lo, int64_t hi) \
    {                                                                                         \
        A acc[TILE];                                                                          \
        for (int64_t offset = lo; offset < hi; offset += TILE) {                              \
            int64_t n = hi - offset < TILE ? hi - offset : TILE;                              \
            const T *s = (const T *)src[0] + offset;                                          \
            for (int64_t i = 0; i < n; i++)                                                   \
                acc[i] = (A)LOAD(s[i]);                                                       \
            for (int32_t r = 1; r < nsrc; r++) {                                              \
                s = (const T *)src[r] + offset;                                               \
                for (int64_t i = 0; i < n; i++) {                                             \
                    A v = (A)LOAD(s[i]);                                                      \
                    acc[i] = OP(acc[i], v);                                                   \
                }                                                                             \
            }                                                                                 \
            for (int64_t i = 0; i < n; i++)                                                   \
                ((T *)dst)[offset - lo + i] = (T)STORE(acc[i]);                               \
        }                                                                                     \
    }

REDUCE(sum_f32, float, float, SAME, SAME, PLUS)
REDUCE(max_f32, float, float, SAME, SAME, MOST)
REDUCE(sum_f64, double, double, SAME, SAME, PLUS)
REDUCE(max_f64, double, double, SAME, SAME, MOST)
REDUCE(sum_bf16, uint16_t, float, colo_bf16_to_f32, colo_f32_to_bf16, PLUS)
REDUCE(max_bf16, uint16_t, float, colo_bf16_to_f32, colo_f32_to_bf16, MOST)
REDUCE(sum_f16, uint16_t, float, colo_f16_to_f32, colo_f32_to_f16, PLUS)
REDUCE(max_f16, uint16_t, float, colo_f16_to_f32, colo_f32_to_f16, MOST)
REDUCE(sum_i32, uint32_t, uint32_t, SAME, SAME, PLUS)
REDUCE(max_i32, int32_t, int32_t, SAME, SAME, MOST)
REDUCE(sum_i64, uint64_t, uint64_t, SAME, SAME, PLUS)
REDUCE(max_i64, int64_t, int64_t, SAME, SAME, MOST)

static void (*const reduce[COLO_DTYPE_COUNT][2])(void *, const void *const *, int32_t, int64_t,
                                                 int64_t) = {
    [COLO_F32] = {[COLO_REDOP_SUM] = sum_f32, [COLO_REDOP_MAX] = max_f32},
    [COLO_F64] = {[COLO_REDOP_SUM] = sum_f64, [COLO_REDOP_MAX] = max_f64},
    [COLO_BF16] = {[COLO_REDOP_SUM] = sum_bf16, [COLO_REDOP_MAX] = max_bf16},
    [COLO_F16] = {[COLO_REDOP_SUM] = sum_f16, [COLO_REDOP_MAX] = max_f16},
    [COLO_I32] = {[COLO_REDOP_SUM] = sum_i32, [COLO_REDOP_MAX] = max_i32},
    [COLO_I64] = {[COLO_REDOP_SUM] = sum_i64, [COLO_REDOP_MAX] = max_i64},
};

bool colo_reduce_takes(colo_dtype_t dtype)
{
    return (unsigned)dtype < COLO_DTYPE_COUNT && reduce[dtype][COLO_REDOP_SUM];
}

void colo_reduce_host(void *dst, const void *const *src, int32_t nsrc, int64_t lo, int64_t hi,
                      colo_dtype_t dtype, colo_redop_t op)
{
    reduce[dtype][op](dst, src, nsrc, lo, hi); /* the front refuses other dtypes */
}

colo_status_t colo_reduce_grow(void **workspace, size_t *has, const char *what, size_t bytes)
{
    if (bytes <= *has)
        return COLO_OK;
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    COLO_FAIL_IF(!p, COLO_ERR_NOMEM, "%s: %zu bytes of workspace", what, bytes);
    free(*workspace);
    *workspace = p;
    *has = bytes;
    return COLO_OK;
}
