/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - memory that shapes or batches of a bridge share: addends of PARTIAL gradients,
 * and staging of messages between GPUs; and the order of calls that use it.
 *
 * It grows to the largest shape or call.
 */
#include "bridge/run/run.h"

#include "core/error.h"

#include <stdlib.h>

colo_status_t colo_memory_check(const colo_bridge_t *bridge, bool exchanges, int32_t messages)
{
    const bool gpu = colo_comm_mem(bridge->comm) == COLO_MEM_CUDA;
    if (!exchanges || gpu == (bridge->mem == COLO_MEM_CUDA))
        return COLO_OK;
    COLO_FAIL_IF(gpu, COLO_ERR_ARG,
                 "bridge: host memory on comm '%s' of %d GPUs; set mem to COLO_MEM_CUDA, or use "
                 "a host communicator",
                 colo_comm_name(bridge->comm), (int)colo_comm_size(bridge->comm));
    return colo_fail(COLO_ERR_UNBUILT,
                     "bridge: CUDA memory, and rank %lld has %d messages; comm '%s' of backend %s "
                     "moves host memory, colo_comm_create_nccl() makes one of GPUs",
                     (long long)colo_comm_world_rank(bridge->comm, colo_comm_rank(bridge->comm)),
                     (int)messages, colo_comm_name(bridge->comm), colo_comm_backend(bridge->comm));
}

/* ---- growing ---- */

/* From the caller's allocator, if it gave one. */
static colo_status_t allocate(const colo_bridge_t *bridge, size_t bytes, void **memory)
{
    const colo_allocator_t *allocator = &bridge->allocator;
    if (!allocator->allocate)
        return colo_mem_alloc(bridge->mem, bytes, memory);
    *memory = allocator->allocate(allocator->user, bytes);
    COLO_FAIL_IF(!*memory, COLO_ERR_NOMEM,
                 "config.allocator returned NULL, expected %zu bytes; leave it more", bytes);
    const colo_status_t st =
        colo_mem_check_aligned(*memory, "config.allocator", "what it returned");
    if (st < 0)
        allocator->release(allocator->user, *memory);
    return st;
}

static void release(const colo_bridge_t *bridge, void *memory)
{
    if (memory && bridge->allocator.release)
        bridge->allocator.release(bridge->allocator.user, memory);
    else
        colo_mem_free(bridge->mem, memory);
}

colo_status_t colo_arena_grow(const colo_bridge_t *bridge, colo_arena_t *arena, size_t bytes,
                              bool capturing, const char *what)
{
    enum { MOST = sizeof arena->old / sizeof arena->old[0] };
    const bool keeps = bridge->mem == COLO_MEM_CUDA;
    const size_t half = arena->size + arena->size / 2;
    void *next = NULL;
    if (bytes <= arena->size)
        return COLO_OK;
    COLO_FAIL_IF(capturing, COLO_ERR_STATE,
                 "bridge: %s: found %zu bytes, expected %zu; a capture allocates nothing, "
                 "so run a call of this size before it, or create the bridge with max_rows",
                 what, arena->size, bytes);
    bytes = keeps && bytes < half ? half : bytes;
    colo_status_t st = arena->nold == MOST ? colo_fail(COLO_ERR_NOMEM, "grown %d times", MOST)
                                           : allocate(bridge, bytes, &next);
    if (st < 0)
        return colo_fail_prefix(st, "bridge: %s", what);
    if (keeps && arena->data)
        arena->old[arena->nold++] = arena->data;
    else
        release(bridge, arena->data);
    arena->data = next;
    arena->size = bytes;
    arena->total = keeps ? arena->total + bytes : bytes;
    return COLO_OK;
}

void colo_arena_deinit(const colo_bridge_t *bridge, colo_arena_t *arena)
{
    release(bridge, arena->data);
    for (int32_t i = 0; i < arena->nold; i++)
        release(bridge, arena->old[i]);
}

colo_status_t colo_partials_reserve(colo_bridge_t *bridge, size_t bytes, bool capturing)
{
    return colo_arena_grow(bridge, &bridge->memory.partials, bytes, capturing,
                           "addends of PARTIAL gradients");
}

void colo_memory_deinit(colo_bridge_t *bridge)
{
    colo_arena_deinit(bridge, &bridge->memory.partials);
    colo_arena_deinit(bridge, &bridge->memory.stage);
    free(bridge->memory.carried.items);
    free(bridge->memory.registered.items);
}

/* ---- order ---- */

colo_status_t colo_bridge_fail(colo_bridge_t *bridge, colo_status_t st)
{
    /* the groups' error state is not that of the comm they were split from */
    if (bridge->coll.gather)
        colo_comm_fail(bridge->coll.gather, st);
    if (bridge->coll.cp)
        colo_comm_fail(bridge->coll.cp, st);
    return colo_comm_fail(bridge->comm, st);
}

/* Partial sums, and the staging of COLLECTIVE, are in use until the call's last sum or copy, of
 * which the comm knows nothing: the next call waits for it, on whatever stream, because a handle
 * does not say which one it is: cudaStreamPerThread is one of each thread. In captures the caller
 * sees to that.
 */
static bool orders(const colo_call_t *call)
{
    return call->bridge->streams.order && !call->capturing;
}

colo_status_t colo_memory_begin(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    if (!orders(call) || !bridge->streams.ran)
        return COLO_OK;
    const colo_status_t st = bridge->device->event_wait(bridge->streams.order, 0, call->stream);
    return st < 0 ? colo_bridge_fail(bridge, st) : COLO_OK;
}

colo_status_t colo_memory_end(colo_call_t *call, colo_status_t st)
{
    colo_bridge_t *bridge = call->bridge;
    if (!orders(call))
        return st;
    const colo_error_t why = colo_error_save();
    bridge->streams.ran = true; /* one that failed may have begun */
    const colo_status_t leads =
        bridge->device->event_record(bridge->streams.order, 0, call->stream);
    if (st < 0)
        return colo_error_restore(st, &why);
    return leads < 0 ? colo_bridge_fail(bridge, leads) : COLO_OK;
}
