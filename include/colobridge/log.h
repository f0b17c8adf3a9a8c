/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.h - what the library prints by itself (nothing, unless asked) and its environment variables.
 *
 * The library returns errors, it does not log them. Levels: error; warn (the library did not do
 * exactly what was asked); info (one line per bridge created, why bridges between GPUs are
 * staged); debug. COLO_LOG=error|warn|info|debug prints on stderr.
 */
#ifndef COLOBRIDGE_LOG_H
#define COLOBRIDGE_LOG_H

#include <colobridge/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colo_log_level_t {
    COLO_LOG_OFF = 0,
    COLO_LOG_ERROR = 1,
    COLO_LOG_WARN = 2,
    COLO_LOG_INFO = 3,
    COLO_LOG_DEBUG = 4
} colo_log_level_t;

typedef void (*colo_log_fn)(colo_log_level_t level, const char *line, void *user);

/**
 * colo_log_set() - send log lines to @fn instead of stderr, up to @level
 * @fn:    called from any thread, never concurrently; NULL restores the default. It may call the
 *         library: what that logs on the same thread is dropped, and colo_last_error() stays
 *         what it was. Other threads that log wait for it, so it does not wait for other ranks.
 * @user:  borrowed; handed to @fn
 * @level: the last level that is sent; COLO_LOG_OFF sends nothing
 */
COLO_API void colo_log_set(colo_log_fn fn, void *user, colo_log_level_t level);

/** An environment variable that the library reads. Strings are static. It may get more members at
 * its end. */
typedef struct colo_env_variable_t {
    const char *name;     /* "COLO_TIMEOUT_MS" */
    const char *fallback; /* what holds when it is not set */
    const char *help;     /* one line: the values and what they do */
    const char *overrides; /* "colo_comm_config_t.check": what it overrides if it is set; or NULL */
} colo_env_variable_t;

/**
 * colo_env_count() - the number of environment variables that the library reads
 */
COLO_API int colo_env_count(void);
/**
 * colo_env_variable() - number @i of colo_env_count() variables; NULL if @i is out of range.
 * Static storage
 */
COLO_API const colo_env_variable_t *colo_env_variable(int i);

/**
 * colo_env_value() - the value in force of an environment variable: as set, else its fallback. An
 * empty value is one that is not set.
 * A program with more rights than its user (set-user-ID, capabilities) ignores what is set.
 * @name:      "COLO_TIMEOUT_MS" and so on
 * @from_env:  out, may be NULL: true if the environment sets it
 * Returns     NULL for an unknown name
 */
COLO_API const char *colo_env_value(const char *name, bool *from_env);

/**
 * colo_env_check() - is the value of environment variable @name allowed? NULL: of all of them?
 * Every use of a variable checks it. Calls that make a first communicator check all of them: a
 * value that is not allowed on one rank is an error on all ranks.
 * Errors:  COLO_ERR_ARG, with the value and what is allowed; COLO_ERR_MISSING (no such variable)
 */
COLO_API colo_status_t colo_env_check(const char *name);

#ifdef __cplusplus
}
#endif
#endif
