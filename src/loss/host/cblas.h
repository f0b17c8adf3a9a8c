/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cblas.h (private) - GEMM of a CBLAS that is found when the first head is made; never linked, so
 * no header of it is needed: these two have had the same arguments for as long as there is CBLAS.
 *
 * Sizes are 32 bits wide in most builds of a BLAS and 64 in some, under the same names. Declared
 * with 64 they fit both: where this library runs, an integer argument has a register or eight bytes
 * of stack to itself, and all sizes are small and not negative. colo_cblas_find() tries it.
 */
#ifndef COLO_LOSS_HOST_CBLAS_H
#define COLO_LOSS_HOST_CBLAS_H

#include <colobridge/lm_head.h>

#include <stdbool.h>
#include <stdint.h>

enum { COLO_CBLAS_ROW_MAJOR = 101, COLO_CBLAS_NO_TRANS = 111, COLO_CBLAS_TRANS = 112 };

/* c = alpha op(a) op(b) + beta c; op(a) [m, k], op(b) [k, n] */
typedef struct colo_cblas {
    void (*sgemm)(int order, int op_a, int op_b, int64_t m, int64_t n, int64_t k, float alpha,
                  const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                  int64_t ldc);
    void (*dgemm)(int order, int op_a, int op_b, int64_t m, int64_t n, int64_t k, double alpha,
                  const double *a, int64_t lda, const double *b, int64_t ldb, double beta,
                  double *c, int64_t ldc);
} colo_cblas_t;

enum { COLO_CBLAS_WHY = 600 };

/* What COLO_GEMM asks for, else the program by @gemm. @found is false where loops are to do: asked
 * for, or nothing found. @why: which one, or why loops.
 * COLO_ERR_UNBUILT: it insists on a CBLAS that cannot be had. COLO_ERR_NOMEM: of which there is too
 * little to load one. COLO_ERR_ARG: it is nonsense. */
colo_status_t colo_cblas_find(colo_gemm_t gemm, colo_cblas_t *lib, bool *found,
                              char why[COLO_CBLAS_WHY]);

#endif
