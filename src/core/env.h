/* SPDX-License-Identifier: Apache-2.0 */
/* env.h (private) - the knobs as numbers; every knob is one row of the table in env.c. */
#ifndef COLO_CORE_ENV_H
#define COLO_CORE_ENV_H

#include <colobridge/log.h>

/* Out of range or no number: the fallback, with a warning. */
int64_t colo_env_i64(const char *name, int64_t lo, int64_t hi);

void colo_log(colo_log_level_t level, const char *fmt, ...) COLO_PRINTF(2, 3);
bool colo_log_on(colo_log_level_t level);

#endif
