/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - workspace of objects, from the table of the memory's kind.
 *
 * How much an object needs, and when, is the object's business. If the build or the machine lacks
 * the backend, the status is COLO_ERR_UNBUILT.
 */
#include "core/memory.h"

#include "core/device.h"
#include "core/error.h"

colo_status_t colo_mem_alloc(colo_mem_t mem, size_t bytes, void **data)
{
    const colo_device_t *device;
    *data = NULL;
    if (bytes == 0)
        return COLO_OK;
    COLO_TRY(colo_device_for(mem, &device));
    return device->alloc(bytes, data);
}

void colo_mem_free(colo_mem_t mem, void *data)
{
    const colo_device_t *device;
    if (data && colo_device_for(mem, &device) == COLO_OK)
        device->free(data);
}

colo_status_t colo_mem_zero(colo_mem_t mem, void *data, size_t bytes, colo_stream_t stream)
{
    const colo_device_t *device;
    COLO_TRY(colo_device_for(mem, &device));
    return device->zero(data, bytes, stream);
}

colo_status_t colo_mem_check_aligned(const void *data, const char *object, const char *name)
{
    const int past = (int)((uintptr_t)data % COLO_ALIGNMENT);
    COLO_FAIL_IF(past, COLO_ERR_ARG,
                 "%s: %s is %d past a multiple of %d bytes, expected 0; allocate it with "
                 "aligned_alloc() or cudaMalloc()",
                 object, name, past, COLO_ALIGNMENT);
    return COLO_OK;
}
