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

colo_status_t colo_memory_check(const colo_bridge_t *b, bool exchanges, int32_t messages)
{
    const bool gpu = colo_comm_i_mem(b->comm) == COLO_CUDA;
    if (!exchanges || gpu == (b->mem == COLO_CUDA))
        return COLO_OK;
    if (gpu)
        return colo_fail(
            COLO_ERR_ARG,
            "bridge: host memory on comm '%s' of %d GPUs; set mem to COLO_CUDA, or use "
            "a host communicator",
            colo_comm_name(b->comm), (int)colo_comm_size(b->comm));
    return colo_fail(COLO_ERR_UNBUILT,
                     "bridge: CUDA memory, and rank %lld has %d messages; comm '%s' of backend %s "
                     "moves host memory, colo_comm_create_nccl() makes one of GPUs",
                     (long long)colo_comm_world_rank(b->comm, colo_comm_rank(b->comm)),
                     (int)messages, colo_comm_name(b->comm), colo_comm_backend(b->comm));
}

/* ---- growing ---- */

/* From the caller's allocator, if it gave one. */
static colo_status_t allocate(const colo_bridge_t *b, size_t bytes, void **p)
{
    const colo_allocator_t *a = &b->allocator;
    if (!a->allocate)
        return colo_mem_alloc(b->mem, bytes, p);
    *p = a->allocate(a->user, bytes);
    if (!*p)
        return colo_fail(COLO_ERR_NOMEM,
                         "config.allocator returned NULL, expected %zu bytes; leave it more",
                         bytes);
    const colo_status_t st = colo_mem_check_aligned(*p, "config.allocator", "what it returned");
    if (st < 0)
        a->release(a->user, *p);
    return st;
}

static void release(const colo_bridge_t *b, void *p)
{
    if (p && b->allocator.release)
        b->allocator.release(b->allocator.user, p);
    else
        colo_mem_free(b->mem, p);
}

colo_status_t colo_arena_grow(const colo_bridge_t *b, colo_arena_t *a, size_t bytes, bool capturing,
                              const char *what)
{
    enum { MOST = sizeof a->old / sizeof a->old[0] };
    const bool keeps = b->mem == COLO_CUDA;
    const size_t half = a->size + a->size / 2;
    void *next = NULL;
    if (bytes <= a->size)
        return COLO_OK;
    if (capturing)
        return colo_fail(COLO_ERR_STATE,
                         "bridge: %s: found %zu bytes, expected %zu; a capture allocates nothing, "
                         "so run a call of this size before it, or create the bridge with max_rows",
                         what, a->size, bytes);
    bytes = keeps && bytes < half ? half : bytes;
    colo_status_t st = a->nold == MOST ? colo_fail(COLO_ERR_NOMEM, "grown %d times", MOST)
                                       : allocate(b, bytes, &next);
    if (st < 0)
        return colo_fail_prefix(st, "bridge: %s", what);
    if (keeps && a->data)
        a->old[a->nold++] = a->data;
    else
        release(b, a->data);
    a->data = next;
    a->size = bytes;
    a->total = keeps ? a->total + bytes : bytes;
    return COLO_OK;
}

void colo_arena_deinit(const colo_bridge_t *b, colo_arena_t *a)
{
    release(b, a->data);
    for (int32_t i = 0; i < a->nold; i++)
        release(b, a->old[i]);
}

colo_status_t colo_partials_reserve(colo_bridge_t *b, size_t bytes, bool capturing)
{
    return colo_arena_grow(b, &b->memory.partials, bytes, capturing,
                           "addends of PARTIAL gradients");
}

void colo_memory_deinit(colo_bridge_t *b)
{
    colo_arena_deinit(b, &b->memory.partials);
    colo_arena_deinit(b, &b->memory.stage);
    free(b->memory.carried.items);
    free(b->memory.reached.items);
}

/* ---- order ---- */

colo_status_t colo_bridge_fail(colo_bridge_t *b, colo_status_t st)
{
    for (int i = 0; i < COLO_EXECUTORS; i++)
        if (b->algorithm->executor[i] && b->algorithm->executor[i]->fail)
            b->algorithm->executor[i]->fail(b, st);
    return colo_comm_i_fail(b->comm, st);
}

/* Partial sums, and the staging of COLLECTIVE, are in use until the call's last sum or copy, of
 * which the comm knows nothing: the next call waits for it, on whatever stream, because a handle
 * does not say which one it is: cudaStreamPerThread is one of each thread. In captures the caller
 * sees to that.
 */
colo_status_t colo_memory_in_order(colo_call_t *call, colo_status_t (*fn)(colo_call_t *call))
{
    colo_bridge_t *b = call->bridge;
    if (!b->streams.order || call->capturing)
        return fn(call);
    const colo_status_t follows =
        b->streams.ran ? b->ops->event_wait(b->streams.order, 0, call->stream) : COLO_OK;
    if (follows < 0)
        return colo_bridge_fail(b, follows);
    const colo_status_t st = fn(call); /* one that failed may have begun */
    const colo_error_t why = colo_error_save();
    b->streams.ran = true;
    const colo_status_t leads = b->ops->event_record(b->streams.order, 0, call->stream);
    if (st < 0)
        return colo_error_restore(st, &why);
    return leads < 0 ? colo_bridge_fail(b, leads) : COLO_OK;
}
