/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cublas.c - which cuBLASLt: the one in the process already (inside PyTorch, PyTorch's), else
 * libcublasLt.so of the CUDA major version that this was built with.
 *
 * Not linked, for it is hundreds of megabytes that only the lm_head path needs.
 */
#include "cuda/device.h"
#include "cuda/cublas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static colo_cublas_t the_lib;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *look_up(void *so, colo_cublas_t *lib)
{
    const struct {
        const char *name;
        void *at;
    } want[] = {
        {"cublasLtCreate", &lib->create},
        {"cublasLtDestroy", &lib->destroy},
        {"cublasLtMatmulDescInit_internal", &lib->desc_init},
        {"cublasLtMatmulDescSetAttribute", &lib->desc_set},
        {"cublasLtMatrixLayoutInit_internal", &lib->layout_init},
        {"cublasLtMatmulPreferenceInit_internal", &lib->pref_init},
        {"cublasLtMatmulPreferenceSetAttribute", &lib->pref_set},
        {"cublasLtMatmulAlgoGetHeuristic", &lib->heuristic},
        {"cublasLtMatmulAlgoCheck", &lib->check},
        {"cublasLtGetStatusName", &lib->name},
        {"cublasLtMatmul", &lib->matmul},
    };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        void *f = dlsym(so, want[i].name);
        if (!f)
            return want[i].name;
        *(void **)want[i].at = f;
    }
    return NULL;
}

static colo_status_t find(colo_cublas_t *lib)
{
    char name[64];
    void *so = dlsym(RTLD_DEFAULT, "cublasLtMatmul") ? RTLD_DEFAULT : NULL;
    bool here = so != NULL;
    snprintf(name, sizeof name, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    if (!here) {
        so = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        so = so ? so : dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!so) {
            const char *why = dlerror();
            return colo_fail(COLO_ERR_UNBUILT,
                             "lm_head: %s cannot be loaded (%.300s); it comes with CUDA, "
                             "put its folder into LD_LIBRARY_PATH",
                             name, why ? why : "no reason given");
        }
    }
    const char *missing = look_up(so, lib);
    if (missing)
        return colo_fail(COLO_ERR_UNBUILT,
                         "lm_head: the cuBLASLt in this process has no %s, expected version "
                         "%d",
                         missing, CUBLAS_VER_MAJOR);
    return COLO_OK;
}

colo_status_t colo_cublas_find(const colo_cublas_t **lib)
{
    colo_status_t st = COLO_OK;
    pthread_mutex_lock(&lock);
    if (!the_lib.matmul) {
        colo_cublas_t found = {0};
        st = find(&found);
        if (st == COLO_OK)
            the_lib = found;
    }
    pthread_mutex_unlock(&lock);
    if (st == COLO_OK)
        *lib = &the_lib;
    return st;
}
