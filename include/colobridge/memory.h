/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - memory that peers reach: registered once, used by any later call.
 *
 * If GPUs reach each other's memory, a bridge moves boxes in one kernel, from one rank's tensor
 * straight into another rank's. The tensor at the far end must be registered:
 *
 *   forward                          y
 *   backward                         d_x
 *   backward, PARTIAL over cp > 1    d_y: receivers read it and add in rank order
 *   forward of a ragged batch        y; or x, which receivers read if some y are not registered
 *
 * All other tensors may be anywhere on the rank's device. An unregistered tensor takes the staged
 * path of the communicator (NCCL). The tensors of one call are registered on all ranks or on none.
 * If a rank has no such tensor, and in the forward of a ragged batch always, the ranks agree in the
 * first call of that pass, and the host waits for it: the call is peer-to-peer if all tensors that
 * exist are registered, else staged. They agree again after more memory was registered. From then
 * on an unregistered tensor in a peer-to-peer pass is an error.
 *
 * COLO_TRANSPORT=nccl keeps all calls on the staged path. With COLO_TRANSPORT=peer an unregistered
 * tensor that others reach, and ranks that do not reach each other, are errors. The variable is
 * the same on all ranks. A bridge may choose for itself (colo_bridge_config_t.transport).
 *
 * A pair of ranks may be out of reach (several hosts, a rank that cannot open what another one
 * offers). NCCL carries between these, in the same call in which other pairs use peers' memory. If no
 * two ranks reach each other, or the memory is host memory, registering succeeds and does nothing,
 * on all ranks: see colo_memory_is_p2p().
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
 * @comm:    the comm on which the bridges are created; may be destroyed before the object
 * @ptr:     borrowed until the object is destroyed: device memory of the comm's device that
 *           cudaMalloc() made, or any part of it. Parts of one block of an allocator are fine.
 *           cudaMallocAsync() and cuMemMap() memory cannot be given to other processes this way.
 *           NULL with 0 bytes on a rank that has none
 * @memory:  out, owned by the caller
 * Waits:    for all ranks, at most until the deadline. Not in a capture
 * Errors:   COLO_ERR_ARG (host memory, another device's, not from cudaMalloc, @bytes past its
 *           end), COLO_ERR_STATE (COLO_MEMORY_MAX reached), COLO_ERR_UNBUILT (COLO_TRANSPORT=peer
 *           and the ranks do not reach each other, or not this memory), COLO_ERR_MISMATCH
 *           (COLO_TRANSPORT differs), COLO_ERR_CUDA, COLO_ERR_NOMEM, COLO_ERR_PEER (another rank's
 *           error; the comm lives), COLO_ERR_TIMEOUT
 */
COLO_API colo_status_t colo_memory_register(colo_comm_t *comm, void *ptr, size_t bytes,
                                            colo_memory_t **memory);
/**
 * colo_memory_alloc() - allocate memory and register it; collective over @comm
 * For programs whose allocator makes memory that cannot be registered. The memory is on the comm's
 * device, or on the host if the comm moves host memory. Address and size are multiples of 256.
 * @bytes:   of this rank; may differ between ranks, and be 0
 * @memory:  out, owned by the caller
 * Errors:   those of colo_memory_register()
 */
COLO_API colo_status_t colo_memory_alloc(colo_comm_t *comm, size_t bytes, colo_memory_t **memory);
/**
 * colo_memory_destroy() - local; takes NULL, leaves *memory NULL
 * The call frees memory that colo_memory_alloc() made. Call only after every rank has completed
 * all operations that use the memory. Graphs that were captured with it must not be replayed any
 * more. Ranks may destroy several memories in different orders: a memory keeps its number, and
 * counts for COLO_MEMORY_MAX, until the last rank has destroyed it. The owner of registered
 * memory frees it after all ranks have destroyed the object.
 */
COLO_API void colo_memory_destroy(colo_memory_t **memory);

/** colo_memory_data() - the address of this rank's part; the memory object or its caller owns it */
COLO_API void *colo_memory_data(const colo_memory_t *memory);
/** colo_memory_bytes() - the size of this rank's part */
COLO_API size_t colo_memory_bytes(const colo_memory_t *memory);
/**
 * colo_memory_is_p2p() - do peers reach this memory? The same on all ranks. If not, calls are
 * staged
 */
COLO_API bool colo_memory_is_p2p(const colo_memory_t *memory);
/**
 * colo_memory_reaches() - do ranks @a and @b of its communicator, which lives, reach each other's
 * part? The same on all ranks; a rank reaches itself. False if it is not peer-to-peer
 */
COLO_API bool colo_memory_reaches(const colo_memory_t *memory, int32_t a, int32_t b);
/**
 * colo_memory_find() - is [ptr, ptr + bytes) inside memory that is registered over @comm? Local
 */
COLO_API bool colo_memory_find(const colo_comm_t *comm, const void *ptr, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
