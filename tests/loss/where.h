/* SPDX-License-Identifier: Apache-2.0 */
/*
 * where.h - where the memory of a test's ranks is: the same test programs are linked with
 * where_host.c, with where_gpu.c, in which all ranks are threads that share one GPU, or with
 * where_nccl.c, in which they have a GPU each, if there are so many.
 */
#ifndef TESTS_LOSS_WHERE_H
#define TESTS_LOSS_WHERE_H

#include "harness/harness.h"

typedef struct where {
    colo_mem_t mem;
    double slack; /* times the host's tolerances */
    /* All but @need are the calling rank's, from @group on. */
    void *(*put)(const void *from, size_t bytes); /* 0xa5 everywhere when @from is NULL */
    void (*get)(void *to, const void *from, size_t bytes);
    void (*drop)(void *p);                                           /* takes NULL */
    colo_status_t (*group)(colo_comm_t *world, colo_comm_t **group); /* of the same ranks */
    void (*leave)(colo_comm_t **group);
    int (*need)(void); /* 0, or what main returns at once */
    /* Of device memory only */
    void (*set)(void *to, const void *from, size_t bytes);
    void (*wait)(void); /* for all that was enqueued */
    int32_t (*device)(void);
    colo_stream_t (*stream)(void); /* NULL: the default one */
    bool shared;                   /* by all ranks, whose communicator adds nothing up */
} where_t;

extern where_t where;

static inline colo_tensor_t where_tensor(void *data, colo_dtype_t dtype, int32_t ndim,
                                         const int64_t *shape)
{
    return where.mem == COLO_MEM_CUDA ? colo_tensor_cuda(data, dtype, where.device(), ndim, shape)
                                      : colo_tensor_host(data, dtype, ndim, shape);
}

#define WHERE_ARRAY(data, dtype, ...) T_GIVEN(where_tensor(data, dtype, T_SHAPE(__VA_ARGS__)))

static inline colo_stream_t where_stream(void)
{
    return where.stream ? where.stream() : NULL;
}

#endif
