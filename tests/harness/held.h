/* SPDX-License-Identifier: Apache-2.0 */
/* held.h - does a process that makes world after world hold more and more? */
#ifndef TESTS_HARNESS_HELD_H
#define TESTS_HARNESS_HELD_H

#include <colobridge/status.h>

#include <stdint.h>

enum { T_HELD_WARM = 8 }; /* worlds after which a process has what it keeps */

typedef struct t_held {
    int64_t heap_slack, device_slack; /* bytes that they may gain */
    int64_t (*device_bytes)(void);    /* NULL: no devices */
    struct t_held_amounts {
        int64_t descriptors, threads, heap, device;
    } first;
} t_held_t;

/* @worlds were made and destroyed: COLO_ERR_STATE if this process holds more than after
 * T_HELD_WARM. */
colo_status_t t_held_compare(t_held_t *held, int64_t worlds);

#endif
