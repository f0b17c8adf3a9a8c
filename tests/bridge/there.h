/* SPDX-License-Identifier: Apache-2.0 */
/* there.h - values of the host where the tensors of a program are: on the host, or on a GPU. */
#ifndef TESTS_BRIDGE_THERE_H
#define TESTS_BRIDGE_THERE_H

#include "harness/harness.h"

#include "loss/where.h"

/* @host there, the tensor of that shape in *t. */
static inline void *there(const void *host, colo_dtype_t dtype, int32_t ndim, const int64_t *shape,
                          colo_tensor_t *t)
{
    int64_t n = 1;
    for (int32_t a = 0; a < ndim; a++)
        n *= shape[a];
    void *p = where.put(host, (size_t)n * colo_dtype_size(dtype));
    *t = where_tensor(p, dtype, ndim, shape);
    return p;
}

static inline void assert_there(const void *p, const void *want, size_t bytes)
{
    void *got = malloc(bytes + 1);
    assert_non_null(got);
    where.get(got, p, bytes);
    assert_memory_equal(got, want, bytes);
    free(got);
}

#endif
