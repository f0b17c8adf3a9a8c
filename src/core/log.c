/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - the only place that may write to stderr, and only when COLO_LOG or the caller says so.
 *
 * Errors are returned, not logged: a line here is a warning ("went on differently than asked") or
 * one line of information per bridge.
 *
 * A sink runs with the settings unlocked, so that it may call the library. What it causes there is
 * not logged, and the thread's last error is afterwards what it was.
 */
#include "core/env.h"

#include "core/error.h"
#include "core/lock.h"
#include "core/signals.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

COLO_LOCK(lock);                  /* of the settings */
COLO_LOCK(line_lock);             /* one line after the other */
static _Thread_local bool inside; /* a sink, which this thread runs */
static colo_log_fn sink;
static void *sink_user;
static colo_log_level_t sink_level;

static const char *const names[] = {"off", "error", "warn", "info", "debug"};

static colo_log_level_t env_level(void)
{
    const char *text = colo_env_value("COLO_LOG", NULL);
    for (int i = 0; text && i < 5; i++)
        if (strcmp(text, names[i]) == 0)
            return (colo_log_level_t)i;
    return COLO_LOG_OFF;
}

void colo_log_set(colo_log_fn fn, void *user, colo_log_level_t level)
{
    if (!inside) /* afterwards no thread runs the old one */
        pthread_mutex_lock(&line_lock);
    pthread_mutex_lock(&lock);
    sink = fn;
    sink_user = user;
    sink_level = level;
    pthread_mutex_unlock(&lock);
    if (!inside)
        pthread_mutex_unlock(&line_lock);
}

bool colo_log_on(colo_log_level_t level)
{
    COLO_HOLD(&lock);
    return level <= (sink ? sink_level : env_level()) && !inside;
}

void colo_log(colo_log_level_t level, const char *fmt, ...)
{
    if (!colo_log_on(level))
        return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    COLO_HOLD(&line_lock);
    pthread_mutex_lock(&lock);
    colo_log_fn fn = sink;
    void *user = sink_user;
    pthread_mutex_unlock(&lock);
    if (fn) {
        const colo_error_t earlier = colo_error_save();
        inside = true;
        fn(level, line, user);
        inside = false;
        (void)colo_error_restore(COLO_OK, &earlier);
    } else {
        COLO_HOLD_SIGNALS();
        fprintf(stderr, "colobridge: %s: %s\n", names[level], line);
    }
}
