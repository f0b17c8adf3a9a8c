/* SPDX-License-Identifier: Apache-2.0 */
/* soak.h - where the tensors of a soak are: in host memory (host.c), on GPUs (gpu.c). */
#ifndef TESTS_SOAK_SOAK_H
#define TESTS_SOAK_SOAK_H

#include "harness/harness.h"

#include "harness/bridge_random.h"
#include "harness/held.h"
#include "harness/ragged_run.h"

#include <unistd.h>

typedef struct soak_rank {
    colo_comm_t *world; /* of the host */
    void *where;
} soak_rank_t;

/* Of a world; 0: this machine has not enough GPUs, and standard output says so. */
int32_t soak_ranks(void);
/* Runs @fn between what a world makes there and gives back. */
colo_status_t soak_on(colo_comm_t *world, colo_status_t (*fn)(soak_rank_t *rank, void *arg),
                      void *arg);
colo_status_t soak_uniform(soak_rank_t *rank, uint64_t seed);
colo_status_t soak_ragged(soak_rank_t *rank, uint64_t seed);
/* May a call end so after a rank's abort? */
bool soak_is_abort(colo_status_t st);
/* In use on the devices of this process, and what a driver may add by itself. */
int64_t soak_device_bytes(void);
extern const int64_t soak_device_slack;
/* Bytes that the heap may gain. */
int64_t soak_heap_slack(void);

#endif
