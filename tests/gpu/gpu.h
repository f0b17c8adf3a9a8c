/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - what the GPU programs share: a skip where there is no GPU, and device memory that a test
 * fills, fetches and forgets.
 */
#ifndef TESTS_GPU_GPU_H
#define TESTS_GPU_GPU_H

#include "harness/harness.h"

#include "core/device.h"
#include "gpu/to_device.h"
#include "loss/loss.h"

#include <cuda_runtime_api.h>

/* 0 when there are @n GPUs; else says so and returns T_EXIT_SKIP, for main to return. */
int gpu_need(int n);

#define assert_cuda(expr)                                                                     \
    do {                                                                                      \
        cudaError_t t_e_ = (expr);                                                            \
        if (t_e_ != cudaSuccess)                                                              \
            fail_msg("%s: %s (%s)", #expr, cudaGetErrorName(t_e_), cudaGetErrorString(t_e_)); \
    } while (0)

/* Device memory with the bytes of @from, or 0xa5 everywhere when it is NULL. Never NULL. */
void *gpu_put(const void *from, size_t bytes);
/* Waits for the device first. */
void gpu_get(void *to, const void *from, size_t bytes);
void gpu_free(void *p);
/* A variable of it that is freed with its scope: GPU_AUTOFREE void *p = gpu_put(…); */
#define GPU_AUTOFREE T_ENDS(gpu_freed)
void gpu_freed(void *p);

/* The tables under test. */
const colo_device_t *gpu_device(void);
const colo_loss_kernels_t *gpu_loss(void);

#endif
