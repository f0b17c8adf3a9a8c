/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allocations.h - the allocator of a test program, which counts while it is told to, and its
 * pthread_create(). Included by one source of the program. SANITIZED: a sanitizer brings its own,
 * so there is nothing to count and the program, or the case, is skipped.
 */
#ifndef TESTS_HARNESS_ALLOCATIONS_H
#define TESTS_HARNESS_ALLOCATIONS_H

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
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
/* For T_MAIN_IF() of a program whose cases all count allocations, or let them fail */
#ifdef SANITIZED
#define T_NEED_OWN_MALLOC T_EXIT_SKIP
#else
#define T_NEED_OWN_MALLOC 0
#endif

static atomic_size_t allocated __attribute__((unused));
static atomic_bool counting __attribute__((unused));
/* > 0: the allocation of this thread that fails, the first is 1; counts down to 0. Nothing if
 * SANITIZED. */
static _Thread_local long fail_at __attribute__((unused));
/* The same of the threads that this thread starts. */
static _Thread_local long thread_fail_at __attribute__((unused));
/* Does nothing fail that the code @caller asks for? NULL: all may. */
static bool (*spared)(const void *caller) __attribute__((unused));

#ifndef SANITIZED
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);

static bool is_due(long *at, const void *caller)
{
    if (*at <= 0 || (spared && spared(caller)))
        return false;
    return --*at == 0;
}

static int count(size_t bytes, const void *caller) /* 0: this one fails */
{
    if (is_due(&fail_at, caller)) {
        errno = ENOMEM;
        return 0;
    }
    if (atomic_load(&counting))
        atomic_fetch_add(&allocated, bytes);
    return 1;
}

void *malloc(size_t bytes)
{
    return count(bytes, __builtin_return_address(0)) ? __libc_malloc(bytes) : NULL;
}

void *calloc(size_t n, size_t bytes)
{
    return count(n * bytes, __builtin_return_address(0)) ? __libc_calloc(n, bytes) : NULL;
}

void *realloc(void *p, size_t bytes)
{
    return count(bytes, __builtin_return_address(0)) ? __libc_realloc(p, bytes) : NULL;
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return count(bytes, __builtin_return_address(0)) ? __libc_memalign(align, bytes) : NULL;
}

int posix_memalign(void **p, size_t align, size_t bytes)
{
    *p = count(bytes, __builtin_return_address(0)) ? __libc_memalign(align, bytes) : NULL;
    return *p ? 0 : ENOMEM;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (is_due(&thread_fail_at, __builtin_return_address(0)))
        return EAGAIN;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attr, fn, arg);
}
#endif

#endif
