/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - scratch of objects: the C library's on the host, the GPU backend's on a device.
 *
 * Who needs how much, and when, is the objects' business. A build or machine without the backend
 * says so with COLO_ERR_UNBUILT.
 */
#include "core/memory.h"

#include "comm/gpu.h"
#include "core/try.h"

#include <stdlib.h>
#include <string.h>

colo_status_t colo_mem_alloc(colo_mem_t mem, size_t bytes, void **p)
{
    const colo_gpu_t *gpu;
    *p = NULL;
    if (bytes == 0)
        return COLO_OK;
    if (mem == COLO_CUDA) {
        COLO_TRY(colo_gpu_load("nccl", &gpu));
        return gpu->alloc(bytes, p);
    }
    /* aligned as a device's allocator does, and as heads ask for */
    if (posix_memalign(p, 256, bytes) != 0) {
        *p = NULL;
        return colo_fail(COLO_ERR_NOMEM, "%zu bytes of host memory", bytes);
    }
    return COLO_OK;
}

void colo_mem_free(colo_mem_t mem, void *p)
{
    const colo_gpu_t *gpu;
    if (!p)
        return;
    if (mem == COLO_HOST)
        free(p);
    else if (colo_gpu_load("nccl", &gpu) == COLO_OK)
        gpu->free(p);
}

colo_status_t colo_mem_zero(colo_mem_t mem, void *p, size_t bytes, colo_stream_t stream)
{
    const colo_gpu_t *gpu;
    if (mem == COLO_CUDA) {
        COLO_TRY(colo_gpu_load("nccl", &gpu));
        return gpu->zero(p, bytes, stream);
    }
    memset(p, 0, bytes);
    return COLO_OK;
}
