/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cublas.c - which cuBLASLt: the one in the process already (inside PyTorch, PyTorch's), else
 * libcublasLt.so of the CUDA major version that this was built with.
 *
 * Not linked, for it is hundreds of megabytes that only the lm_head path needs.
 */
#include "cuda/device.h"
#include "cuda/cublas.h"

#include "core/library.h"
#include "core/lock.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static colo_cublas_t the_lib;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

colo_status_t colo_cublas_find(const colo_cublas_t **lib)
{
    static bool found;
    static const colo_library_t cublas = {
        "lm_head", "cuBLASLt", "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR),
        "; it comes with CUDA, put its folder into LD_LIBRARY_PATH",
        ", expected version " TEXT(CUBLAS_VER_MAJOR)};
    static const colo_library_symbol_t want[] = {
        {"cublasLtMatmul", &the_lib.matmul},
        {"cublasLtCreate", &the_lib.create},
        {"cublasLtDestroy", &the_lib.destroy},
        {"cublasLtMatmulDescInit_internal", &the_lib.desc_init},
        {"cublasLtMatmulDescSetAttribute", &the_lib.desc_set},
        {"cublasLtMatrixLayoutInit_internal", &the_lib.layout_init},
        {"cublasLtMatmulPreferenceInit_internal", &the_lib.pref_init},
        {"cublasLtMatmulPreferenceSetAttribute", &the_lib.pref_set},
        {"cublasLtMatmulAlgoGetHeuristic", &the_lib.heuristic},
        {"cublasLtMatmulAlgoCheck", &the_lib.check},
        {"cublasLtGetStatusName", &the_lib.name},
    };
    COLO_HOLD(&lock);
    if (!found)
        COLO_TRY(colo_library_find(&cublas, want, sizeof want / sizeof want[0]));
    found = true;
    *lib = &the_lib;
    return COLO_OK;
}
