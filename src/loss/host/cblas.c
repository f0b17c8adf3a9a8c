/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cblas.c - which CBLAS: the one that is linked into the process, else OpenBLAS; COLO_GEMM
 * names another, or none.
 *
 * Not linked: the library is loaded into processes that have a BLAS of their own, and runs without.
 * A library of our own is loaded with RTLD_LOCAL, so no other library sees its symbols, and is
 * never unloaded, because it may have threads. How many of them it uses is its own business.
 *
 * What calls itself CBLAS is tried on three small products of integers before it is believed.
 */
#include "loss/host/cblas.h"

#include "core/env.h"
#include "core/error.h"

#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define OPENBLAS "libopenblas.so.0"

/* ---- is it one? ---- */

enum { M = 3, N = 2, K = 5, PITCH = 7 };

/* op(a) [i][k] = i + 2 k + 1, op(b) [k][j] = 3 k - j: no sum needs more than a float has */
#define TRY(name, real, gemm)                                                                     \
    static bool name(const colo_cblas_t *lib, int op_a, int op_b)                                 \
    {                                                                                             \
        real a[PITCH * PITCH], b[PITCH * PITCH], c[PITCH * PITCH];                                \
        for (int i = 0; i < PITCH * PITCH; i++)                                                   \
            a[i] = b[i] = c[i] = (real)NAN;                                                       \
        for (int k = 0; k < K; k++) {                                                             \
            for (int i = 0; i < M; i++)                                                           \
                a[op_a == COLO_CBLAS_TRANS ? k * PITCH + i : i * PITCH + k] =                     \
                    (real)(i + 2 * k + 1);                                                        \
            for (int j = 0; j < N; j++)                                                           \
                b[op_b == COLO_CBLAS_TRANS ? j * PITCH + k : k * PITCH + j] = (real)(3 * k - j);  \
        }                                                                                         \
        lib->gemm(COLO_CBLAS_ROW_MAJOR, op_a, op_b, M, N, K, 1, a, PITCH, b, PITCH, 0, c, PITCH); \
        for (int i = 0; i < PITCH * PITCH; i++) {                                                 \
            int y = i / PITCH, x = i % PITCH, want = 0;                                           \
            for (int k = 0; k < K; k++)                                                           \
                want += (y + 2 * k + 1) * (3 * k - x);                                            \
            if (y < M && x < N ? c[i] != (real)want : !isnan(c[i]))                               \
                return false;                                                                     \
        }                                                                                         \
        return true;                                                                              \
    }
TRY(try_f32, float, sgemm)
TRY(try_f64, double, dgemm)

static bool works(const colo_cblas_t *lib)
{
    static const int ops[][2] = {{COLO_CBLAS_NO_TRANS, COLO_CBLAS_TRANS},
                                 {COLO_CBLAS_NO_TRANS, COLO_CBLAS_NO_TRANS},
                                 {COLO_CBLAS_TRANS, COLO_CBLAS_NO_TRANS}};
    for (int i = 0; i < 3; i++)
        if (!try_f32(lib, ops[i][0], ops[i][1]) || !try_f64(lib, ops[i][0], ops[i][1]))
            return false;
    return true;
}

/* ---- where is it? ---- */

static colo_status_t find_functions(void *so, const char *name, colo_cblas_t *lib)
{
    const char *names[] = {"cblas_sgemm", "cblas_dgemm"};
    void *function[2];
    if (sizeof(void *) < sizeof(int64_t)) /* see cblas.h */
        return colo_fail(COLO_ERR_UNBUILT, "lm_head: no CBLAS is used in 32-bit programs");
    for (int i = 0; i < 2; i++) {
        function[i] = dlsym(so, names[i]);
        COLO_FAIL_IF(!function[i], COLO_ERR_UNBUILT, "lm_head: %.200s has no %s, it is no CBLAS",
                     name, names[i]);
    }
    *(void **)&lib->sgemm = function[0];
    *(void **)&lib->dgemm = function[1];
    COLO_FAIL_IF(!works(lib), COLO_ERR_UNBUILT,
                 "lm_head: %.200s has a cblas_sgemm or cblas_dgemm that gives wrong "
                 "products; name another with COLO_GEMM, or loops",
                 name);
    return COLO_OK;
}

static colo_status_t load(const char *name, colo_cblas_t *lib)
{
    void *so = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!so) {
        const char *why = dlerror();
        return colo_fail(COLO_ERR_UNBUILT,
                         "lm_head: %.200s cannot be loaded (%.300s); install OpenBLAS, or name "
                         "another CBLAS with COLO_GEMM",
                         name, why ? why : "no reason given");
    }
    colo_status_t st = find_functions(so, name, lib);
    dlclose(so); /* stays where it is */
    return st;
}

static colo_status_t usual(colo_cblas_t *lib, const char **name)
{
    *name = "the CBLAS in this process";
    if (dlsym(RTLD_DEFAULT, "cblas_sgemm") && find_functions(RTLD_DEFAULT, *name, lib) == COLO_OK)
        return COLO_OK;
    *name = OPENBLAS;
    return load(*name, lib);
}

/* One line a process. */
static void report(const char *what, const char *why)
{
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    if (colo_log_on(COLO_LOG_INFO) && !atomic_flag_test_and_set(&reported))
        colo_log(COLO_LOG_INFO, "lm_head: products in host memory by %s%s%s", what,
                 why[0] ? ": " : "", why);
}

colo_status_t colo_cblas_find(colo_cblas_t *lib, bool *found)
{
    const char *asked, *name;
    *found = false;
    COLO_TRY(colo_env_text("COLO_GEMM", &asked));
    const bool any = strcmp(asked, "auto") == 0;
    colo_status_t st;
    name = asked;
    if (strcmp(asked, "loops") == 0) {
        report("loops", "COLO_GEMM");
        return COLO_OK;
    }
    if (any || strcmp(asked, "cblas") == 0)
        st = usual(lib, &name);
    else
        st = load(asked, lib);
    *found = st == COLO_OK;
    if (*found)
        report(name, "");
    else if (any)
        report("loops", colo_last_error());
    return any ? COLO_OK : st;
}
