/* SPDX-License-Identifier: Apache-2.0 */
/*
 * to_device.h - host memory to the device, there when the call is back.
 *
 * cudaMemcpy() of a little pageable memory comes back when it is on its way; what is enqueued on a
 * stream that does not wait for the default one may then read what was there before.
 */
#ifndef TESTS_GPU_TO_DEVICE_H
#define TESTS_GPU_TO_DEVICE_H

#include <cuda_runtime_api.h>

static inline cudaError_t t_to_device(void *to, const void *from, size_t bytes)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread);
    return e == cudaSuccess ? cudaStreamSynchronize(cudaStreamPerThread) : e;
}

#endif
