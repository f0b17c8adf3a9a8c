/* SPDX-License-Identifier: Apache-2.0 */
/*
 * signals.h (private) - a write that fails is an error of the call, and never a signal that ends
 * the program: SIGXFSZ (past RLIMIT_FSIZE), SIGPIPE (nobody reads).
 */
#ifndef COLO_CORE_SIGNALS_H
#define COLO_CORE_SIGNALS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

typedef struct colo_held_signals {
    sigset_t before, ours; /* the thread's mask; those that did not wait before */
} colo_held_signals_t;

static inline colo_held_signals_t colo_signals_hold_(void)
{
    static const int both[] = {SIGXFSZ, SIGPIPE};
    colo_held_signals_t held;
    sigset_t block, pending;
    sigemptyset(&block);
    sigemptyset(&held.ours);
    (void)sigpending(&pending);
    for (int i = 0; i < 2; i++) {
        sigaddset(&block, both[i]);
        if (sigismember(&pending, both[i]) != 1)
            sigaddset(&held.ours, both[i]);
    }
    (void)pthread_sigmask(SIG_BLOCK, &block, &held.before);
    return held;
}

/* Takes what the writes raised, which waits for this thread alone. */
static inline void colo_signals_release_(colo_held_signals_t *held)
{
    const int error = errno;
    const struct timespec now = {0, 0};
    while (sigtimedwait(&held->ours, NULL, &now) > 0 || errno == EINTR)
        ;
    (void)pthread_sigmask(SIG_SETMASK, &held->before, NULL);
    errno = error;
}

/* Until the end of the scope this thread's writes raise nothing. */
#define COLO_HOLD_SIGNALS()                                                                     \
    __attribute__((cleanup(colo_signals_release_), unused)) colo_held_signals_t held_signals_ = \
        colo_signals_hold_()

#endif
