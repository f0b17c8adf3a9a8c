/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - a CUDA runtime without a GPU that counts what it is asked, and kernels that do
 * nothing: with the sources of libcolobridge-cuda.so they make a backend whose driver queries a
 * test can see. All memory is memory of device 0.
 */
#include <colobridge/status.h>

#include <cuda_runtime_api.h>

/* asked for the device, for the stream, about pointers, about a pointer that was asked about before
 */
extern COLO_API int colo_test_asked[4];
int colo_test_asked[4];

static const void *seen[64];

cudaError_t cudaGetDevice(int *device)
{
    colo_test_asked[0]++;
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *capture)
{
    colo_test_asked[1]++;
    *capture = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    for (int i = 0; i < colo_test_asked[2]; i++)
        colo_test_asked[3] += seen[i] == p;
    seen[colo_test_asked[2]++ % 64] = p;
    *a = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .device = 0};
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e)
{
    return "no CUDA";
}

const char *cudaGetErrorString(cudaError_t e)
{
    return "this driver only counts";
}
