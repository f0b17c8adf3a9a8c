/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/gpu.h"

int gpu_need(int n)
{
    int found = 0;
    cudaError_t e = cudaGetDeviceCount(&found);
    if (e != cudaSuccess || found < n) {
        printf("skipped: needs %d GPU%s, found %d (%s)\n", n, n == 1 ? "" : "s",
               e == cudaSuccess ? found : 0, cudaGetErrorName(e));
        return T_EXIT_SKIP;
    }
    return 0;
}

void *gpu_put(const void *from, size_t bytes)
{
    void *p = NULL;
    assert_cuda(cudaMalloc(&p, bytes + 1));
    if (from)
        assert_cuda(t_to_device(p, from, bytes));
    else
        assert_cuda(cudaMemset(p, 0xa5, bytes));
    return p;
}

void gpu_get(void *to, const void *from, size_t bytes)
{
    assert_cuda(cudaDeviceSynchronize());
    assert_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

void gpu_free(void *p)
{
    assert_cuda(cudaFree(p));
}

void gpu_freed(void *p)
{
    gpu_free(*(void **)p);
}

const colo_device_t *gpu_device(void)
{
    const colo_device_t *device = NULL;
    assert_ok(colo_device_for(COLO_MEM_CUDA, &device));
    return device;
}

const colo_loss_kernels_t *gpu_loss(void)
{
    const colo_loss_kernels_t *loss = NULL;
    assert_ok(colo_loss_kernels_for(COLO_MEM_CUDA, &loss));
    return loss;
}
