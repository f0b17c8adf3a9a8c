/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - memory of devices and pinned memory, and copies. See fake.h. */
#include "fake.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct block {
    struct block *next;
    char *base;
    size_t bytes;
    int device;
    bool pinned;
};

struct opened { /* by a device, as if in another process */
    struct opened *next;
    const char *base;
    size_t bytes;
    int device;
};

static const size_t TOTAL = (size_t)1 << 34; /* of a device */
static const size_t FILLED = 1 << 20;        /* of an allocation, with what means nothing */

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct block *blocks;
static struct opened *opens;
static _Atomic uint64_t left;

/* The block that holds @p; under the lock. */
static struct block *find(const void *p)
{
    struct block *b = blocks;
    while (b && ((const char *)p < b->base || (const char *)p >= b->base + b->bytes))
        b = b->next;
    return b;
}

static bool find_copy(const void *p, struct block *copy)
{
    pthread_rwlock_rdlock(&lock);
    const struct block *b = find(p);
    if (b)
        *copy = *b;
    pthread_rwlock_unlock(&lock);
    return b != NULL;
}

void fake_leave_words(uint64_t first)
{
    left = first;
}

bool fake_is_memory(const void *p)
{
    struct block b;
    return find_copy(p, &b);
}

static cudaError_t take(void **p, size_t bytes, bool pinned)
{
    struct block *b = calloc(1, sizeof *b);
    void *base = NULL;
    if (!b || posix_memalign(&base, 256, bytes ? bytes : 1) != 0) {
        free(b);
        return fake_error(cudaErrorMemoryAllocation);
    }
    memset(base, 0xa5, bytes < FILLED ? bytes : FILLED);
    for (uint64_t i = 0; left && i < bytes / sizeof i && i < 512; i++)
        ((uint64_t *)base)[i] = left + i;
    *b = (struct block){.base = base, .bytes = bytes, .device = fake_device(), .pinned = pinned};
    pthread_rwlock_wrlock(&lock);
    b->next = blocks;
    blocks = b;
    pthread_rwlock_unlock(&lock);
    fake_count(pinned ? FAKE_PINNED : FAKE_MEMORY, 1);
    *p = base;
    return cudaSuccess;
}

/* Under the lock. */
static bool is_opened(const struct block *b)
{
    const struct opened *o = opens;
    while (o && (o->base != b->base || o->bytes != b->bytes))
        o = o->next;
    return o != NULL;
}

void fake_remake(void *p, size_t bytes)
{
    pthread_rwlock_wrlock(&lock);
    find(p)->bytes = bytes;
    pthread_rwlock_unlock(&lock);
}

static cudaError_t give(void *p)
{
    pthread_rwlock_wrlock(&lock);
    struct block **link = &blocks;
    while (*link && (*link)->base != p)
        link = &(*link)->next;
    struct block *b = *link;
    if (b)
        *link = b->next;
    const bool opened = b && is_opened(b);
    pthread_rwlock_unlock(&lock);
    if (!b) {
        fake_misused("memory is freed that is not there");
        return fake_error(cudaErrorInvalidValue);
    }
    if (opened)
        fake_misused("memory is freed that another rank has open");
    fake_count(b->pinned ? FAKE_PINNED : FAKE_MEMORY, -1);
    free(b->base);
    free(b);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    return take(p, bytes, false);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    return take(p, bytes, true);
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    return take(p, bytes, true);
}

cudaError_t cudaFree(void *p)
{
    struct block b;
    if (!p)
        return cudaSuccess;
    const cudaError_t e = fake_enter(fake_device(), __func__);
    FAKE_TRY(fake_outside_captures());
    if (find_copy(p, &b))
        fake_wait_device(b.device);
    const cudaError_t freed = give(p);
    return e != cudaSuccess ? e : freed;
}

cudaError_t cudaFreeHost(void *p)
{
    if (!p)
        return cudaSuccess;
    const cudaError_t e = fake_enter(fake_device(), __func__);
    FAKE_TRY(fake_outside_captures());
    fake_wait_device(fake_device());
    const cudaError_t freed = give(p);
    return e != cudaSuccess ? e : freed;
}

cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream)
{
    FAKE_ENTER();
    return take(p, bytes, false);
}

static void give_later(void *arg)
{
    (void)give(*(void **)arg);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    const cudaError_t freed = fake_enqueue(stream, give_later, NULL, &p, sizeof p);
    return e != cudaSuccess ? e : freed;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    size_t used = 0;
    FAKE_ENTER();
    pthread_rwlock_rdlock(&lock);
    for (const struct block *b = blocks; b; b = b->next)
        used += b->pinned || b->device != fake_device() ? 0 : b->bytes;
    pthread_rwlock_unlock(&lock);
    *total = TOTAL;
    *available = TOTAL - used;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    struct block b;
    FAKE_ENTER();
    memset(a, 0, sizeof *a);
    a->device = -1;
    if (find_copy(p, &b)) {
        a->type = b.pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        a->device = b.device;
        a->devicePointer = (void *)(uintptr_t)p;
        a->hostPointer = b.pinned ? a->devicePointer : NULL;
    }
    return cudaSuccess;
}

/* ---- copies ---- */

struct copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
    int value; /* instead of @from */
};

static void copy_run(void *arg)
{
    const struct copy *c = arg;
    for (size_t i = 0; i < c->height; i++)
        if (c->from)
            memcpy(c->to + i * c->to_pitch, c->from + i * c->from_pitch, c->width);
        else
            memset(c->to + i * c->to_pitch, c->value, c->width);
}

bool fake_copy_of(void (*fn)(void *), const void *arg, struct cudaMemcpy3DParms *p)
{
    const struct copy *c = arg;
    if (fn != copy_run || !c->from)
        return false;
    *p = (struct cudaMemcpy3DParms){.extent = {c->width, c->height, 1}};
    return true;
}

/* Are all @bytes of @p in one block, or none; @pageable: set if none. */
static bool check(const void *p, size_t bytes, bool *pageable)
{
    struct block b;
    if (!p || bytes == 0)
        return true;
    if (!find_copy(p, &b)) {
        *pageable = true;
        return true;
    }
    if ((size_t)((const char *)p - b.base) + bytes <= b.bytes)
        return true;
    fake_misused("a copy passes the end of its memory");
    return false;
}

bool fake_is_whole(const void *p, size_t bytes)
{
    bool pageable;
    return check(p, bytes, &pageable);
}

static cudaError_t copy(const struct copy *c, cudaStream_t stream, bool wait)
{
    if (c->width == 0 || c->height == 0)
        return cudaSuccess;
    if (!check(c->to, c->to_pitch * (c->height - 1) + c->width, &wait) ||
        !check(c->from, c->from_pitch * (c->height - 1) + c->width, &wait))
        return fake_error(cudaErrorInvalidValue);
    FAKE_TRY(fake_enqueue(stream, copy_run, NULL, c, sizeof *c));
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream, &capture);
    return wait && capture == cudaStreamCaptureStatusNone ? cudaStreamSynchronize(stream)
                                                          : cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    return copy(&(struct copy){to, from, bytes, bytes, bytes, 1, 0}, NULL, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    FAKE_ENTER();
    return copy(&(struct copy){to, from, bytes, bytes, bytes, 1, 0}, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    FAKE_ENTER();
    return copy(&(struct copy){to, from, to_pitch, from_pitch, width, height, 0}, stream, false);
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    return copy(&(struct copy){p, NULL, bytes, bytes, bytes, 1, value}, NULL, true);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream)
{
    FAKE_ENTER();
    return copy(&(struct copy){p, NULL, bytes, bytes, bytes, 1, value}, stream, false);
}

/* ---- memory that others open ---- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
    struct block b;
    FAKE_ENTER();
    if (!find_copy(p, &b) || b.pinned)
        return fake_error(cudaErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &(struct opened){.base = b.base, .bytes = b.bytes}, sizeof(struct opened));
    return cudaSuccess;
}

/* Under the lock. An older allocation that is open, at the same place and of another extent, is in
 * the way. */
static cudaError_t open_block(struct opened *made)
{
    const struct block *b = find(made->base);
    if (!b || b->bytes != made->bytes)
        return cudaErrorInvalidValue;
    for (const struct opened *o = opens; o; o = o->next)
        if (o->device == made->device && o->base < made->base + made->bytes &&
            made->base < o->base + o->bytes && (o->base != made->base || o->bytes != made->bytes))
            return cudaErrorAlreadyMapped;
    made->next = opens;
    opens = made;
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags)
{
    FAKE_ENTER();
    struct opened *made = malloc(sizeof *made);
    memcpy(made, &handle, sizeof *made);
    made->device = fake_device();
    *p = (void *)(uintptr_t)made->base;
    pthread_rwlock_wrlock(&lock);
    const cudaError_t e = open_block(made);
    pthread_rwlock_unlock(&lock);
    fake_count(FAKE_OPENED, e == cudaSuccess);
    if (e != cudaSuccess)
        free(made);
    return fake_error(e);
}

cudaError_t cudaIpcCloseMemHandle(void *p)
{
    cudaError_t e = fake_enter(fake_device(), __func__);
    pthread_rwlock_wrlock(&lock);
    struct opened **link = &opens;
    while (*link && ((*link)->base != p || (*link)->device != fake_device()))
        link = &(*link)->next;
    struct opened *o = *link;
    if (o)
        *link = o->next;
    pthread_rwlock_unlock(&lock);
    if (!o)
        fake_misused("memory is closed that is not open");
    fake_count(FAKE_OPENED, o ? -1 : 0);
    free(o);
    return e;
}

static int address_range(unsigned long long *base, size_t *bytes, unsigned long long p)
{
    struct block b;
    if (!find_copy((const void *)(uintptr_t)p, &b))
        return (int)cudaErrorInvalidValue;
    *base = (uintptr_t)b.base;
    *bytes = b.bytes;
    return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    int (*range)(unsigned long long *, size_t *, unsigned long long) = address_range;
    FAKE_ENTER();
    if (strcmp(symbol, "cuMemGetAddressRange") != 0)
        return fake_error(cudaErrorSymbolNotFound);
    memcpy(fn, &range, sizeof range);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
