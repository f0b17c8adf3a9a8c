/* SPDX-License-Identifier: Apache-2.0 */
/* reduce.h (private) - element-wise reduction of host buffers in rank order. */
#ifndef COLO_COMM_REDUCE_H
#define COLO_COMM_REDUCE_H

#include <colobridge/comm.h>

/* First of @count elements in slice @r of @n; slices differ by one element at most. */
static inline int64_t colo_reduce_slice(int64_t count, int32_t n, int32_t r)
{
    return count / n * r + (r < count % n ? r : count % n);
}

/* Makes *@workspace, owned and of *@has bytes, at least @bytes large; what is in it is lost. */
colo_status_t colo_reduce_grow(void **workspace, size_t *has, const char *what, size_t bytes);

/* Float dtypes, i32 and i64. */
bool colo_reduce_takes(colo_dtype_t dtype);

/* dst[i] = src[0][i] op src[1][i] op ... for i in [lo, hi); dst[0] is element @lo. bf16 and fp16
 * accumulate in fp32 and round once, i32 and i64 sums wrap. dst may be one src's element @lo. */
void colo_reduce_host(void *dst, const void *const *src, int32_t nsrc, int64_t lo, int64_t hi,
                      colo_dtype_t dtype, colo_redop_t op);

#endif
