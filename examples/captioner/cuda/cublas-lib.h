/* SPDX-License-Identifier: Apache-2.0 */
/* cublas-lib.h - cuBLAS, loaded when a rank is a GPU, so that other runs need not have it. */
#ifndef EXAMPLES_CAPTIONER_CUDA_CUBLAS_LIB_H
#define EXAMPLES_CAPTIONER_CUDA_CUBLAS_LIB_H

#include <stdbool.h>
#include <stddef.h>

#include <cublas_v2.h>

typedef struct cap_cublas {
    __typeof__(cublasCreate_v2) *create;
    __typeof__(cublasDestroy_v2) *destroy;
    __typeof__(cublasSetStream_v2) *set_stream;
    __typeof__(cublasSetMathMode) *set_math_mode;
    __typeof__(cublasSgemm_v2) *sgemm;
    __typeof__(cublasGetStatusName) *status_name;
} cap_cublas_t;

/** cap_cublas_load() - false with one line in @why; stays loaded */
bool cap_cublas_load(cap_cublas_t *lib, char *why, size_t why_size);

#endif
