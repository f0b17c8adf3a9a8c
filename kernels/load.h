/* SPDX-License-Identifier: Apache-2.0 */
/* load.h - loads kernels before one of them waits for another rank (load.c). */
#ifndef COLO_KERNELS_LOAD_H
#define COLO_KERNELS_LOAD_H

#include <cuda_runtime_api.h>

/* Loads all kernels of this module on the current device. A second call costs microseconds. */
cudaError_t colo_k_load(void);

#endif
