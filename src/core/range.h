/* SPDX-License-Identifier: Apache-2.0 */
/*
 * range.h (private) - a range of NVTX around each public operation, for profilers, if COLO_NVTX
 * is 1.
 *
 * The variable is read when a communicator is made and then holds for the process. Off, a range
 * costs the test of a flag.
 */
#ifndef COLO_CORE_RANGE_H
#define COLO_CORE_RANGE_H

#include <stdbool.h>

/* In core/range-nvtx.c, or in core/range-none.c if the CUDA toolkit's header was not there. */
extern bool colo_ranges;
void colo_range_init(void); /* before the first range: two threads must not look for a tool */
void colo_range_push(const char *name);
void colo_range_pop(void);

static inline bool colo_range_open(const char *name)
{
    const bool on = __atomic_load_n(&colo_ranges, __ATOMIC_ACQUIRE);
    if (on)
        colo_range_push(name);
    return on;
}
static inline void colo_range_close(const bool *opened)
{
    if (*opened)
        colo_range_pop();
}

/* The first line of a public operation; the range has its name and ends with it. */
#define COLO_RANGE() \
    __attribute__((cleanup(colo_range_close), unused)) const bool range_ = colo_range_open(__func__)

#endif
