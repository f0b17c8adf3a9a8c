/* SPDX-License-Identifier: Apache-2.0 */
/* processes.h - ranks that are threads, and open each other's memory as processes do. */
#ifndef TESTS_FAKE_PROCESSES_H
#define TESTS_FAKE_PROCESSES_H

#include "fake.h"

#include "comm/direct/registry.h"

/* From now on. Rank @late takes longer than the others to close what it has opened first.
 * Collective over @host, the same ranks as @gpus. */
static inline colo_status_t fake_be_processes(colo_comm_t *gpus, colo_comm_t *host, int32_t late)
{
    for (int32_t k = 0; k < gpus->size; k++)
        colo_direct_of(gpus)->foreign[k] = k != gpus->rank;
    if (gpus->rank == late)
        fake_delay(colo_direct_of(gpus)->device, "cudaIpcCloseMemHandle", 0.3);
    return colo_comm_barrier(host, NULL);
}

#endif
