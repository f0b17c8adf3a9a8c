/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h (private) - workspace that the library owns, where the caller's tensors are. */
#ifndef COLO_CORE_MEMORY_H
#define COLO_CORE_MEMORY_H

#include <colobridge/tensor.h>

/* 0 bytes give NULL. CUDA: on the thread's current device; never in a hot path. */
colo_status_t colo_mem_alloc(colo_mem_t mem, size_t bytes, void **p);
void colo_mem_free(colo_mem_t mem, void *p);
/* Host: done on return; CUDA: enqueued. */
colo_status_t colo_mem_zero(colo_mem_t mem, void *p, size_t bytes, colo_stream_t stream);

#endif
