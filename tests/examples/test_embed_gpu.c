/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_embed_gpu.c - examples/04_embed_gpu.c when a rank has no memory: over stand-ins for CUDA and
 * NCCL, so without a GPU. No rank may be left in NCCL's init, which waits for all of them.
 */
#include "harness/harness.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

enum { GPUS = 4, POOR = 1 };
static int entered; /* NCCL's init */
static _Thread_local int device;

/* ---- CUDA and NCCL, as far as the example gets ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = GPUS;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int d)
{
    device = d;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    if (device == POOR)
        return cudaErrorMemoryAllocation;
    *p = malloc(bytes);
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return cudaErrorNotSupported;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "out of memory" : "no error";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    __atomic_fetch_add(&entered, 1, __ATOMIC_SEQ_CST);
    return ncclSystemError; /* the real one would wait */
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    return "a rank is missing";
}

/* ---- the example, whose main() is this ---- */

int embed_main(void);

T_CASE(a_rank_without_memory_leaves_no_rank_in_nccl)
{
    assert_int_equal(embed_main(), 1);
    assert_int_equal(entered, 0);
    assert_non_null(strstr(colo_last_error(), "rank 1"));
}

T_MAIN("examples/embed_gpu")
