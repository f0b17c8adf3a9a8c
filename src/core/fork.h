/* SPDX-License-Identifier: Apache-2.0 */
/* fork.h (private) - locks that are free in a child of fork(), where the thread that held them is
 * not. */
#ifndef COLO_CORE_FORK_H
#define COLO_CORE_FORK_H

#include <pthread.h>

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
