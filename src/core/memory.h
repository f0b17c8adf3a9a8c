/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h (private) - workspace that the library owns, where the caller's tensors are; and what is
 * asked of workspace and saved memory that the caller owns. */
#ifndef COLO_CORE_MEMORY_H
#define COLO_CORE_MEMORY_H

#include <colobridge/tensor.h>

/* 0 bytes give NULL. CUDA: on the thread's current device; never in a hot path. */
colo_status_t colo_mem_alloc(colo_mem_t mem, size_t bytes, void **p);
void colo_mem_free(colo_mem_t mem, void *p);
/* Host: done on return; CUDA: enqueued. */
colo_status_t colo_mem_zero(colo_mem_t mem, void *p, size_t bytes, colo_stream_t stream);

/* COLO_ERR_ARG unless @p is a multiple of COLO_ALIGNMENT; NULL is one. The error message names
 * @object and @name: "logprob", "workspace". */
colo_status_t colo_mem_check_aligned(const void *p, const char *object, const char *name);
/* *@out: @bytes >= 0, rounded up to a multiple of COLO_ALIGNMENT. False on overflow. */
static inline bool colo_mem_round_ok(int64_t bytes, int64_t *out)
{
    if (bytes > INT64_MAX - (COLO_ALIGNMENT - 1))
        return false;
    *out = (bytes + COLO_ALIGNMENT - 1) / COLO_ALIGNMENT * COLO_ALIGNMENT;
    return true;
}

#endif
