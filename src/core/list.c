/* SPDX-License-Identifier: Apache-2.0 */
/* list.c - growing arrays and pools. */
#include "core/list.h"

#include <string.h>

bool colo_list_reserve(colo_list_t *list, int64_t n, size_t size)
{
    enum { FIRST = 16 };
    int64_t cap = list->cap > INT64_MAX / 2 ? n : 2 * list->cap;
    if (n <= list->cap)
        return true;
    cap = cap < FIRST ? FIRST : cap;
    cap = cap < n ? n : cap;
    size_t bytes;
    void *grown =
        __builtin_mul_overflow((size_t)cap, size, &bytes) ? NULL : realloc(list->items, bytes);
    if (!grown)
        return false;
    list->items = grown;
    list->cap = cap;
    return true;
}

void *colo_list_zeroed(colo_list_t *list, int64_t n, size_t size)
{
    if (!colo_list_reserve(list, n, size))
        return NULL;
    list->n = n;
    return n > 0 ? memset(list->items, 0, (size_t)n * size) : list->items;
}

/* ---- pools ---- */

typedef struct colo_chunk {
    struct colo_chunk *next;
    size_t size, used; /* this header included */
} colo_chunk_t;

enum { ALIGNED = 64, SMALLEST = 1 << 12 };

void *colo_pool_take(colo_pool_t *pool, size_t bytes)
{
    colo_chunk_t *chunk = pool->chunk;
    bytes = (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    if (!chunk || bytes > chunk->size - chunk->used) {
        size_t size = chunk ? 2 * chunk->size : SMALLEST;
        while (size - ALIGNED < bytes)
            size *= 2;
        chunk = aligned_alloc(ALIGNED, size);
        if (!chunk)
            return NULL;
        *chunk = (colo_chunk_t){.next = pool->chunk, .size = size, .used = ALIGNED};
        pool->chunk = chunk;
    }
    chunk->used += bytes;
    return (char *)chunk + chunk->used - bytes;
}

void colo_pool_deinit(colo_pool_t *pool)
{
    while (pool->chunk) {
        colo_chunk_t *chunk = pool->chunk;
        pool->chunk = chunk->next;
        free(chunk);
    }
}

void colo_pool_recycle(colo_pool_t *pool, colo_pool_t *spare)
{
    colo_chunk_t *chunk = pool->chunk;
    if (chunk && (!spare->chunk || chunk->size > spare->chunk->size)) {
        pool->chunk = chunk->next;
        colo_pool_deinit(spare);
        *chunk = (colo_chunk_t){.size = chunk->size, .used = ALIGNED};
        spare->chunk = chunk;
    }
    colo_pool_deinit(pool);
}
