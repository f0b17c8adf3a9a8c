/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.h (private) - the seam between the library and libcolobridge-nccl.so. */
#ifndef COLO_COMM_GPU_H
#define COLO_COMM_GPU_H

#include "comm/comm.h"

/* Loads the backend library of that name, whose table has a create. */
colo_status_t colo_gpu_load(const char *name, const colo_comm_ops_t **ops);

#endif
