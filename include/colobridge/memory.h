/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - memory that peers reach: registered once, used by any later call.
 *
 * Bridges between GPUs that reach each other's memory move boxes in one kernel, straight from one
 * rank's tensor into another's, when the tensor at the far end is registered:
 *
 *   forward                          y
 *   backward                         d_x
 *   backward, PARTIAL over cp > 1    d_y: receivers read it and add up in rank order
 *
 * All other tensors may lie anywhere on the rank's device. An unregistered tensor takes the staged
 * path of the communicator (NCCL); the tensors of one call are registered on all ranks or on none.
 * Where some rank has nothing of that tensor, the ranks agree in the first call of that way, which
 * waits on the host: direct when all that there is is registered, else staged; and again after more
 * memory was registered. From then on an unregistered tensor in a direct way is an error.
 * COLO_TRANSPORT=nccl keeps all calls on the staged path; COLO_TRANSPORT=peer makes an unregistered
 * tensor that others reach, or ranks that do not reach each other, an error. It is the same on all
 * ranks. A bridge may say either for itself (colo_bridge_config_t.transport).
 *
 * Where peers cannot reach (host memory, several hosts, a rank that cannot open what another one
 * offers) registering succeeds and does nothing, on all ranks: colo_memory_is_p2p() tells.
 */
#ifndef COLOBRIDGE_MEMORY_H
#define COLOBRIDGE_MEMORY_H

#include <colobridge/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_MEMORY_MAX 256 /* registered over one comm at a time */

typedef struct colo_memory colo_memory_t;

/**
 * colo_memory_register() - let the ranks of @comm reach @ptr; collective over @comm
 * @comm:    the comm that the bridges are made on; may be destroyed before the object
 * @ptr:     borrowed until the object is destroyed: device memory of the comm's device that
 *           cudaMalloc() made, or any part of it (allocators that hand out parts of one block are
 *           served; cudaMallocAsync() and cuMemMap() memory cannot be given to other processes that
 *           way). NULL with 0 bytes on a rank that brings none
 * @memory:  out, owned by the caller
 * Waits:    for all ranks, at most the deadline. Not in a capture
 * Errors:   COLO_ERR_ARG (host memory, another device's, not from cudaMalloc, @bytes past its end),
 *           COLO_ERR_STATE (COLO_MEMORY_MAX reached), COLO_ERR_UNBUILT
 *           (COLO_TRANSPORT=peer and the ranks do not reach each other, or not this memory),
 *           COLO_ERR_MISMATCH (COLO_TRANSPORT differs), COLO_ERR_CUDA, COLO_ERR_NOMEM,
 *           COLO_ERR_PEER (another rank's error; the comm lives), COLO_ERR_TIMEOUT
 */
COLO_API colo_status_t colo_memory_register(colo_comm_t *comm, void *ptr, size_t bytes,
                                            colo_memory_t **memory);
/**
 * colo_memory_alloc() - memory that the library makes, registered; collective over @comm
 * For allocators whose memory cannot be registered. On the comm's device, or on the host where the
 * comm moves host memory; address and size are multiples of 256. Sizes may differ, and be 0. Errors
 * as above.
 */
COLO_API colo_status_t colo_memory_alloc(colo_comm_t *comm, size_t bytes, colo_memory_t **memory);
/**
 * colo_memory_destroy() - local; takes NULL. Frees what colo_memory_alloc() made
 * When every rank's calls that use it have finished. Graphs that were captured with it must not be
 * replayed any more. Ranks may destroy several in orders of their own: a memory keeps its number,
 * and counts for COLO_MEMORY_MAX, until the last rank has destroyed it. Memory that was registered
 * is freed by its owner when all ranks have.
 */
COLO_API void colo_memory_destroy(colo_memory_t **memory);

/** colo_memory_data() - the address of this rank's part; the memory object or its caller owns it */
COLO_API void *colo_memory_data(const colo_memory_t *memory);
/** colo_memory_bytes() - the size of this rank's part */
COLO_API size_t colo_memory_bytes(const colo_memory_t *memory);
/** colo_memory_is_p2p() - do peers reach it, the same on all ranks; else calls are staged */
COLO_API bool colo_memory_is_p2p(const colo_memory_t *memory);
/** colo_memory_find() - does [ptr, ptr + bytes) lie in memory registered over @comm; local */
COLO_API bool colo_memory_find(const colo_comm_t *comm, const void *ptr, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
