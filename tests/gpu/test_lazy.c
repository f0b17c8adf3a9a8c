/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lazy.c - CUDA loads a kernel at its first launch, as it does by default, while a kernel of
 * another rank of the process waits. Each pass needs kernels that nothing has launched before.
 */
#include "gpu/gpu_ranks.h"

#include "core/device.h"

enum { RANKS = 2, DEADLINE_MS = 4000, N = 64 };

/* Kernels that no bridge needs, others for each @pass and rank. */
static colo_status_t first_kernels(t_gpu_rank_t *r, int pass, char *data, cudaStream_t stream)
{
    const colo_device_t *device = NULL;
    const colo_dtype_t dtype = pass ? COLO_F64 : COLO_F32;
    const colo_box_t to = {.data = data, .extent = {1, 1, N}, .stride = {N, N, 1}};
    colo_box_t from[2] = {to, to};
    from[0].data = data + N * sizeof(double);
    from[1].data = data + 2 * N * sizeof(double);
    rank_try(colo_device_for(COLO_MEM_CUDA, &device));
    rank_try(device->box_sum(&to, from, 2, dtype, stream));
    return device->half_sum(data, COLO_F32, NULL, from[0].data, pass ? COLO_BF16 : COLO_F16, N,
                            stream);
}

T_CASE_ON_GPUS(RANKS, a_kernel_loads_at_its_first_launch_while_a_bridge_waits)
{
    t_case_t c = {.src = t_side("tp=1,dp=2", true),
                  .dst = t_side("tp=1,cp=2,dp=1", false),
                  .shape = {4, 8, 24},
                  .output = COLO_OUTPUT_SHARDED,
                  .grad = COLO_GRAD_PARTIAL,
                  .dtype = COLO_BF16,
                  .world = RANKS};
    colo_bridge_t *bridge = NULL;
    cudaStream_t second;
    char *data = NULL;
    rank_cuda(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    rank_cuda(cudaMalloc((void **)&data, 3 * N * sizeof(double)));
    rank_try(colo_comm_set_timeout(r->gpus, DEADLINE_MS));
    rank_try(t_gpu_register(r, T_ARENA));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (int pass = 0; pass < 2; pass++) {
        T_GPU_CALL(k);
        rank_try(t_gpu_call_make(&k, r, &c, 0, pass));
        for (int late = 0; late < 2; late++) { /* the host waits in a first call */
            if (late && r->rank == 1) {
                rank_try(colo_comm_barrier(r->host, NULL));
                rank_try(first_kernels(r, pass, data, second));
                rank_cuda(cudaStreamSynchronize(second));
            }
            rank_try(t_gpu_call_run(&k, bridge, r->stream));
            if (late && r->rank == 0) { /* its own kernel waits, and the other rank is not there */
                rank_try(first_kernels(r, pass, data, second));
                rank_try(colo_comm_barrier(r->host, NULL));
            }
            rank_try(t_gpu_call_compare(&k));
            rank_try(colo_comm_check(r->gpus));
        }
    }
    rank_try(t_gpu_end(r, &bridge));
    rank_cuda(cudaFree(data));
    rank_cuda(cudaStreamDestroy(second));
    return COLO_OK;
}

T_MAIN_AFTER(t_gpus_enough(RANKS) ? 0 : T_EXIT_SKIP, setenv("CUDA_MODULE_LOADING", "LAZY", 1),
             "gpu/lazy")
