/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cblas.c - which CBLAS: one that the process has; OpenBLAS is loaded if the program, or COLO_GEMM,
 * asks for it, which may name another, or none.
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
#include "core/lock.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

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

/* ---- is there room for it? ---- */

/* OpenBLAS makes a thread for each processor when it is loaded, and maps memory for each thread
 * that multiplies. Where it gets none, it tries again without end, or raises SIGINT. So it is not
 * called before as much was had for a moment. */
enum { MAX_PROCESSORS = 256 };
static const size_t THREAD_BYTES = (size_t)64 << 20;

static void *wait_for_all(void *gate)
{
    pthread_mutex_lock(gate); /* held until all are made */
    pthread_mutex_unlock(gate);
    return NULL;
}

static int try_threads(int n)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread[MAX_PROCESSORS];
    int made = 0, error = 0;
    pthread_mutex_lock(&gate);
    while (made < n && (error = pthread_create(&thread[made], NULL, wait_for_all, &gate)) == 0)
        made++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < made; i++)
        pthread_join(thread[i], NULL);
    return error;
}

/* Is there room for a thread on each processor? */
static colo_status_t check_room(const char *name)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : MAX_PROCESSORS;
    n = n < MAX_PROCESSORS ? n : MAX_PROCESSORS;
    const size_t bytes = THREAD_BYTES * (size_t)(n + 1);
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int error = room == MAP_FAILED ? errno : try_threads(n);
    if (room != MAP_FAILED)
        munmap(room, bytes);
    COLO_FAIL_IF(error, COLO_ERR_NOMEM,
                 "lm_head: %.200s takes up to %zu MiB and %d threads, which cannot be had (%s): "
                 "raise the limits (ulimit -v, ulimit -u), or set COLO_GEMM=loops",
                 name, bytes >> 20, n, strerror(error));
    return COLO_OK;
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

static colo_status_t find_in(void *so, const char *name, colo_cblas_t *lib)
{
    const colo_status_t st = find_functions(so, name, lib);
    dlclose(so); /* it stays loaded: RTLD_NODELETE */
    return st;
}

static colo_status_t load(const char *name, colo_cblas_t *lib)
{
    void *so = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD | RTLD_NODELETE);
    if (!so) {
        COLO_TRY(check_room(name));
        so = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    }
    if (!so) {
        const char *why = dlerror();
        return colo_fail(COLO_ERR_UNBUILT,
                         "lm_head: %.200s cannot be loaded (%.300s); install OpenBLAS, or name "
                         "another CBLAS with COLO_GEMM",
                         name, why ? why : "no reason given");
    }
    return find_in(so, name, lib);
}

/* One that the process has: linked, or loaded by a library of its own. */
static colo_status_t present(colo_cblas_t *lib, const char **name)
{
    static const char *const known[] = {OPENBLAS, "libmkl_rt.so.2", "libblas.so.3", "libblis.so.4"};
    *name = "the CBLAS in this process";
    if (dlsym(RTLD_DEFAULT, "cblas_sgemm"))
        return find_functions(RTLD_DEFAULT, *name, lib);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        void *so = dlopen(known[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD | RTLD_NODELETE);
        *name = known[i];
        if (so && dlsym(so, "cblas_sgemm"))
            return find_in(so, *name, lib);
        if (so)
            dlclose(so);
    }
    return colo_fail(COLO_ERR_UNBUILT,
                     "lm_head: this process has loaded no CBLAS; COLO_GEMM=cblas, or config.gemm, "
                     "loads OpenBLAS");
}

/* One line a process. */
static void report(const char *why)
{
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    if (colo_log_on(COLO_LOG_INFO) && !atomic_flag_test_and_set(&reported))
        colo_log(COLO_LOG_INFO, "lm_head: products in host memory by %s", why);
}

COLO_LOCK(lock); /* one thread at a time asks for room, and uses it */

static colo_status_t find(colo_gemm_t gemm, const char *asked, colo_cblas_t *lib, const char **name)
{
    COLO_HOLD(&lock);
    if (gemm == COLO_GEMM_CBLAS && asked)
        return load(*name = asked, lib);
    const colo_status_t st = present(lib, name);
    return st == COLO_OK || gemm == COLO_GEMM_AUTO ? st : load(*name = OPENBLAS, lib);
}

colo_status_t colo_cblas_find(colo_gemm_t gemm, colo_cblas_t *lib, bool *found,
                              char why[COLO_CBLAS_WHY])
{
    static const colo_gemm_t words[] = {COLO_GEMM_AUTO, COLO_GEMM_CBLAS, COLO_GEMM_LOOPS};
    const char *asked, *name = "";
    int32_t word;
    bool from_env;
    *found = false;
    COLO_TRY(colo_env_text("COLO_GEMM", &asked));
    (void)colo_env_word("COLO_GEMM", &word);
    (void)colo_env_value("COLO_GEMM", &from_env);
    if (from_env)
        gemm = word < 0 ? COLO_GEMM_CBLAS : words[word];
    if (gemm == COLO_GEMM_LOOPS) {
        snprintf(why, COLO_CBLAS_WHY, "loops: %s", from_env ? "COLO_GEMM" : "config.gemm");
        report(why);
        return COLO_OK;
    }
    const colo_error_t earlier = colo_error_save();
    const colo_status_t st = find(gemm, from_env && word < 0 ? asked : NULL, lib, &name);
    *found = st == COLO_OK;
    if (*found)
        snprintf(why, COLO_CBLAS_WHY, "%s", name);
    else
        snprintf(why, COLO_CBLAS_WHY, "loops: %s", colo_last_error());
    if (*found || gemm == COLO_GEMM_AUTO)
        report(why);
    return gemm == COLO_GEMM_AUTO ? colo_error_restore(COLO_OK, &earlier) : st;
}
