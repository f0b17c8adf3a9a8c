/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allocations.h - the allocator of a test program, which counts while it is told to. Included by
 * one source of the program. SANITIZED: a sanitizer brings its own allocator, so there is nothing
 * to count and the program is skipped.
 */
#ifndef TESTS_HARNESS_ALLOCATIONS_H
#define TESTS_HARNESS_ALLOCATIONS_H

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if !defined(SANITIZED) && !defined(__GLIBC__)
#define SANITIZED 1
#endif

static atomic_size_t allocated;
static atomic_bool counting;
/* > 0: the allocation of this thread that fails, the first is 1; counts down to 0. Nothing if
 * SANITIZED. */
static _Thread_local long fail_at __attribute__((unused));

#ifndef SANITIZED
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);

static int count(size_t bytes) /* 0: this one fails */
{
    if (fail_at > 0 && --fail_at == 0) {
        errno = ENOMEM;
        return 0;
    }
    if (atomic_load(&counting))
        atomic_fetch_add(&allocated, bytes);
    return 1;
}

void *malloc(size_t bytes)
{
    return count(bytes) ? __libc_malloc(bytes) : NULL;
}

void *calloc(size_t n, size_t bytes)
{
    return count(n * bytes) ? __libc_calloc(n, bytes) : NULL;
}

void *realloc(void *p, size_t bytes)
{
    return count(bytes) ? __libc_realloc(p, bytes) : NULL;
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return count(bytes) ? __libc_memalign(align, bytes) : NULL;
}

int posix_memalign(void **p, size_t align, size_t bytes)
{
    *p = count(bytes) ? __libc_memalign(align, bytes) : NULL;
    return *p ? 0 : ENOMEM;
}
#endif

#endif
