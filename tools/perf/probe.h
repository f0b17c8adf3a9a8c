/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h - launchers of probe.cu: what colo-perf, benchmarks and GPU tests compare kernels with, and
 * the inputs that they fill. No library contains them. The rules of kernels/kernels.h hold; bytes and
 * pointers are multiples of 16.
 */
#ifndef TOOLS_PERF_PROBE_H
#define TOOLS_PERF_PROBE_H

#include <colobridge/comm.h>

#include <cuda_runtime_api.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *sum += every 32-bit word: a read and nothing else */
cudaError_t colo_k_probe_read(const void *src, int64_t bytes, unsigned long long *sum,
                              cudaStream_t stream);
/* reads each 16 bytes once and writes them once */
cudaError_t colo_k_probe_copy(void *dst, const void *src, int64_t bytes, cudaStream_t stream);
/* *wrong += 16-byte words that differ */
cudaError_t colo_k_probe_diff(const void *a, const void *b, int64_t bytes,
                              unsigned long long *wrong, cudaStream_t stream);
/* bf16 values of mean 0 and standard deviation @spread, by position and @seed */
cudaError_t colo_k_probe_fill(void *dst, int64_t bytes, float spread, uint64_t seed,
                              cudaStream_t stream);

/* @blocks that sleep for @us and do nothing: whole multiprocessors, or a warp each */
cudaError_t colo_k_probe_sleep(int32_t blocks, bool whole, int64_t us, cudaStream_t stream);

#define COLO_K_PUSHES 64
/* To memory of another GPU that the current one reaches, or of this one. */
typedef struct colo_k_push {
    void *dst;
    const void *src;
    int64_t bytes;
} colo_k_push_t;
/* @n <= COLO_K_PUSHES copies in one launch, nothing else: what a link gives to stores */
cudaError_t colo_k_probe_push(const colo_k_push_t *push, int32_t n, cudaStream_t stream);

/* A part [nb, ns, h] of a tensor [samples, rows, h], whose every value says where it comes from. */
typedef struct colo_k_code {
    void *data;
    colo_dtype_t dtype;   /* f32, bf16, f16 */
    const int64_t *b, *s; /* device, [nb], [ns]: global sample and row; row -1: all zero */
    int64_t nb, ns, h;
    int64_t stride_b, stride_s; /* elements; features lie side by side */
    int64_t rows;               /* of the whole tensor */
    uint64_t salt;
    /* addends 0: the value is a bit pattern of (b, s, h), finite and positive. Else a small whole
     * number of (addend, b, s, h), whose sum over [0, addends) is exact; addend -1 is that sum. */
    int32_t addends, addend;
} colo_k_code_t;
cudaError_t colo_k_probe_code(const colo_k_code_t *part, cudaStream_t stream);
/* *wrong += elements that hold something else */
cudaError_t colo_k_probe_decode(const colo_k_code_t *part, unsigned long long *wrong,
                                cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
