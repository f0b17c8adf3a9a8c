/* SPDX-License-Identifier: Apache-2.0 */
/* lock.h (private) - locks that are held to the end of a block, and locks that are free in a child
 * of fork(), where the thread that held them is not. */
#ifndef COLO_CORE_LOCK_H
#define COLO_CORE_LOCK_H

#include <pthread.h>

static inline pthread_mutex_t *colo_lock_take(pthread_mutex_t *lock)
{
    pthread_mutex_lock(lock);
    return lock;
}
static inline void colo_lock_give(pthread_mutex_t *const *lock)
{
    pthread_mutex_unlock(*lock);
}
/* A declaration: from here to the end of the block this thread holds @lock. No goto may jump over
 * it, because what is unlocked at the end would be no lock then. */
#define COLO_HOLD(lock)                                                             \
    __attribute__((cleanup(colo_lock_give), unused)) pthread_mutex_t *const held_ = \
        colo_lock_take(lock)

/* A static mutex @name. What it guards may be half written in the child. */
#define COLO_LOCK(name)                                         \
    static pthread_mutex_t name = PTHREAD_MUTEX_INITIALIZER;    \
    static void free_##name(void)                               \
    {                                                           \
        pthread_mutex_init(&name, NULL);                        \
    }                                                           \
    __attribute__((constructor)) static void watch_##name(void) \
    {                                                           \
        (void)pthread_atfork(NULL, NULL, free_##name);          \
    }                                                           \
    struct colo_lock_needs_a_semicolon_

#endif
