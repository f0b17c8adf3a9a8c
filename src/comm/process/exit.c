/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exit.c - a process that ends with communicators aborts them, so that the others hear why.
 *
 * exit() and a return from main() get here. After _exit() and a signal the others only see that the
 * connection ended. A child of fork() has copies of the communicators and leaves them alone.
 *
 * Nothing is freed, because other threads may still be at work, and locks are tried for a moment
 * only: the thread that ends the process may hold them.
 */
#include "comm/process/group.h"

#include "core/lock.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

COLO_LOCK(lock); /* what follows */
static struct colo_process_context *first;
static bool registered;

static const double FLUSH_SECONDS = 1.0; /* for what the others are told, at most */

static bool try_lock(pthread_mutex_t *m)
{
    for (int i = 0; i < 100; i++) {
        if (pthread_mutex_trylock(m) == 0)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return false;
}

static void abort_context(struct colo_process_context *context, const char *why)
{
    char error_message[900];
    snprintf(error_message, sizeof error_message,
             "world rank %d ended without destroying its communicators%s%.800s", (int)context->rank,
             why[0] ? "; its last error: " : "", why);
    if (context->live > 0) { /* else another thread destroys the last one at this moment */
        colo_process_set_error_all(context, COLO_ERR_ABORTED, -1, error_message);
        context->to_notify = true; /* an older error, too: ranks that see this end learn why */
        colo_process_notify(context);
    }
    const double end = colo_now() + FLUSH_SECONDS;
    while (!colo_process_flushed(context) && colo_now() < end) {
        colo_process_progress(context);
        context->transport->wait(context->connections, 1e-3);
    }
    for (struct colo_process_group *group = context->group; group; group = group->next)
        if (!group->left)
            colo_comm_record_failure(group->comm, error_message);
}

static void at_exit(void)
{
    const colo_error_t why = colo_error_save();
    if (!try_lock(&lock))
        return;
    for (struct colo_process_context *context = first; context; context = context->next) {
        if (context->process != (int32_t)getpid() || !try_lock(&context->lock))
            continue;
        abort_context(context, why.text);
        pthread_mutex_unlock(&context->lock);
    }
    pthread_mutex_unlock(&lock);
}

void colo_process_exit_add(struct colo_process_context *context)
{
    context->process = (int32_t)getpid();
    COLO_HOLD(&lock);
    if (!registered)
        registered = atexit(at_exit) == 0;
    context->next = first;
    first = context;
}

void colo_process_exit_remove(struct colo_process_context *context)
{
    COLO_HOLD(&lock);
    struct colo_process_context **link = &first;
    while (*link && *link != context)
        link = &(*link)->next;
    if (*link)
        *link = context->next;
}
