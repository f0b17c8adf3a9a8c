/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cublas-lib.c - which cuBLAS: the loader's of the version that the headers are, else the one
 * next to the nvcc that compiled the kernels.
 */
#include "cublas-lib.h"

#include <dlfcn.h>
#include <stdio.h>

#define TEXT(x) #x
#define SONAME(version) "libcublas.so." TEXT(version)

bool cap_cublas_load(cap_cublas_t *lib, char *why, size_t why_size)
{
    const struct {
        const char *name;
        void *function;
    } want[] = {
        {"cublasCreate_v2", &lib->create},        {"cublasDestroy_v2", &lib->destroy},
        {"cublasSetStream_v2", &lib->set_stream}, {"cublasSetMathMode", &lib->set_math_mode},
        {"cublasSgemm_v2", &lib->sgemm},          {"cublasGetStatusName", &lib->status_name},
    };
    void *so = dlopen(SONAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);

    if (!so)
        so = dlopen(CAP_CUDA_ROOT "/lib64/" SONAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *reason = dlerror();
        snprintf(why, why_size, "%s cannot be loaded (%.160s)", SONAME(CUBLAS_VER_MAJOR),
                 reason ? reason : "no reason given");
        return false;
    }
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        void *f = dlsym(so, want[i].name);
        if (!f) {
            snprintf(why, why_size, "%s has no %s", SONAME(CUBLAS_VER_MAJOR), want[i].name);
            return false;
        }
        *(void **)want[i].function = f;
    }
    return true;
}
