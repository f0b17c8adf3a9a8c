/* SPDX-License-Identifier: Apache-2.0 */
/* cublas.h (private) - the cuBLASLt of this process: loaded on first use, never linked. */
#ifndef COLO_LOSS_CUBLAS_H
#define COLO_LOSS_CUBLAS_H

#include <colobridge/status.h>

#include <cublasLt.h>

typedef struct colo_cublas { /* functions as the header declares them */
    __typeof__(cublasLtCreate) *create;
    __typeof__(cublasLtDestroy) *destroy;
    __typeof__(cublasLtMatmulDescInit_internal) *desc_init;
    __typeof__(cublasLtMatmulDescSetAttribute) *desc_set;
    __typeof__(cublasLtMatrixLayoutInit_internal) *layout_init;
    __typeof__(cublasLtMatmulPreferenceInit_internal) *pref_init;
    __typeof__(cublasLtMatmulPreferenceSetAttribute) *pref_set;
    __typeof__(cublasLtMatmulAlgoGetHeuristic) *heuristic;
    __typeof__(cublasLtMatmulAlgoCheck) *check;
    __typeof__(cublasLtMatmul) *matmul;
    __typeof__(cublasLtGetStatusName) *name;
} colo_cublas_t;

/* COLO_ERR_UNBUILT: there is none. */
colo_status_t colo_cublas_find(const colo_cublas_t **lib);

#endif
