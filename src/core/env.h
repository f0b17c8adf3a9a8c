/* SPDX-License-Identifier: Apache-2.0 */
/* env.h (private) - environment variables as values; each is one row of the table in env.c. */
#ifndef COLO_CORE_ENV_H
#define COLO_CORE_ENV_H

#include "core/error.h"

#include <colobridge/log.h>

/* 31 years: seconds as a double stay exact to the us */
#define COLO_TIMEOUT_MAX INT64_C(1000000000000)

/* What variable @name holds, else its fallback. Where the value is not allowed, the result is the
 * fallback, too, and the status COLO_ERR_ARG as from colo_env_check(). */
COLO_FOR_MODULES colo_status_t colo_env_text(const char *name, const char **text);
colo_status_t colo_env_i64(const char *name, int64_t *value);
/* Which of the allowed words, in the order of the table; -1: another value, which is allowed. */
colo_status_t colo_env_word(const char *name, int32_t *index);

/* Could the variable @name hold @text, which is @what's? COLO_ERR_ARG as from colo_env_check(). */
colo_status_t colo_env_would_allow(const char *name, const char *what, const char *text);

COLO_FOR_MODULES void colo_log(colo_log_level_t level, const char *fmt, ...) COLO_PRINTF(2, 3);
bool colo_log_on(colo_log_level_t level);

#endif
