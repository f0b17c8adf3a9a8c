/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.c - loads all kernels of the module that contains this file.
 *
 * By default CUDA loads a kernel at its first launch, and waits meanwhile for what runs on the
 * devices of the process. If that is a kernel that waits for this rank, neither goes on. So a
 * communicator loads all kernels when it is made.
 *
 * The code that nvcc makes registers each kernel by __cudaRegisterFunction(). The linker's --wrap
 * (src/meson.build) sends these calls through here, so no list of kernels can be incomplete.
 */
#include "load.h"

enum { MAX_KERNELS = 1024 };
static const void *kernel[MAX_KERNELS];
static int kernels; /* registered before the loader returns this module */

void __real___cudaRegisterFunction(void **image, const char *host, char *device, const char *name,
                                   int threads, void *tid, void *bid, void *block, void *grid,
                                   int *warp);
void __wrap___cudaRegisterFunction(void **image, const char *host, char *device, const char *name,
                                   int threads, void *tid, void *bid, void *block, void *grid,
                                   int *warp);

void __wrap___cudaRegisterFunction(void **image, const char *host, char *device, const char *name,
                                   int threads, void *tid, void *bid, void *block, void *grid,
                                   int *warp)
{
    if (kernels < MAX_KERNELS)
        kernel[kernels] = host;
    kernels++;
    __real___cudaRegisterFunction(image, host, device, name, threads, tid, bid, block, grid, warp);
}

cudaError_t colo_k_load(void)
{
    struct cudaFuncAttributes a;
    cudaError_t e = kernels <= MAX_KERNELS ? cudaSuccess : cudaErrorInvalidValue;
    for (int i = 0; i < kernels && e == cudaSuccess; i++)
        e = cudaFuncGetAttributes(&a, kernel[i]);
    return e;
}
