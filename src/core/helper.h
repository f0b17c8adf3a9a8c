/* SPDX-License-Identifier: Apache-2.0 */
/* helper.h (private) - time, and threads for calls that may not come back. */
#ifndef COLO_CORE_HELPER_H
#define COLO_CORE_HELPER_H

#include "core/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

COLO_FOR_MODULES double colo_now(void); /* seconds, monotonic */
COLO_FOR_MODULES void colo_cond_init(pthread_cond_t *c);
/* From now, on the clock of colo_cond_init(). */
COLO_FOR_MODULES struct timespec colo_in(double seconds);

/* Part of @arg, or NULL: then @arg is kept for good. */
struct colo_abandon {
    _Atomic bool is_set; /* the caller has gone */
    void (*end)(void *arg);
};
/* COLO_OK: @fn came back in time. COLO_ERR_TIMEOUT: @arg is not the caller's any more, and @abandon
 * ends it when @fn comes back; the wait ends early, too, when @ends(@of); @ends may be NULL.
 * COLO_ERR_NOMEM: there is no thread, and @fn has not run. */
COLO_FOR_MODULES colo_status_t colo_run_for(double seconds, bool (*ends)(const void *of),
                                            const void *of, void (*fn)(void *arg),
                                            struct colo_abandon *abandon, void *arg);
/* The caller does not wait; false: no thread, @fn has not run. */
COLO_FOR_MODULES bool colo_run_apart(void (*fn)(void *arg), void *arg);

/* Runs @fn, which frees what @arg has on @device and may wait for that device without limit.
 * Returns when it came back, after @ms (0: COLO_TIMEOUT_MS) at the latest, and at once while an
 * earlier one of this device has not; @fn then goes on behind the caller. False: it does. */
COLO_FOR_MODULES bool colo_end_on(int device, int64_t ms, void (*fn)(int device, void *arg),
                                  void *arg);

#endif
