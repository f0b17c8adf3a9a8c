/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arch.cuh - what a kernel has only on newer GPUs, and which code of a kernel a GPU runs.
 *
 * nvcc compiles each kernel once for each of -Darchs, and CUDA loads the newest that the device
 * runs. So device code asks what it is compiled for, and the rest of it compiles everywhere:
 *
 *   if constexpr (COMPILED_FOR >= 900) ... else ...
 *
 * The host asks the kernel, not the device, for the code may be older than the device: code_of().
 */
#ifndef COLO_KERNELS_ARCH_CUH
#define COLO_KERNELS_ARCH_CUH

#include <cuda_runtime_api.h>

namespace
{

/* 100 * major + 10 * minor of the compute capability; 0 in the host's part */
#ifdef __CUDA_ARCH__
constexpr int COMPILED_FOR = __CUDA_ARCH__;
#else
constexpr int COMPILED_FOR = 0;
#endif

/* Hopper's matrix products and register counts are in code for sm_90a alone. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif

/* *arch: what the code of @kernel is compiled for that the current device runs */
template <typename K> cudaError_t code_of(K *kernel, int *arch)
{
    cudaFuncAttributes code = {};
    const cudaError_t e = cudaFuncGetAttributes(&code, kernel);
    *arch = code.ptxVersion * 10;
    return e;
}

/* *has: does the current device run @kernel's code for sm_90a? That of newer GPUs is PTX for
 * compute_90, which lacks it. */
template <typename K> cudaError_t code_has_wgmma(K *kernel, bool *has)
{
    cudaFuncAttributes code = {};
    const cudaError_t e = cudaFuncGetAttributes(&code, kernel);
    *has = code.ptxVersion == 90 && code.binaryVersion == 90;
    return e;
}

} // namespace

#endif
