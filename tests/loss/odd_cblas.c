/* SPDX-License-Identifier: Apache-2.0 */
/*
 * odd_cblas.c - a CBLAS whose products are right and whose bits depend on all that they may depend
 * on: the shape of the call, where the element is, strides, and where in a cache line operands
 * begin. Only values have no say. What has the same bits with this one has them with any.
 *
 * -DWRONG: forgets to transpose. -DNO_DGEMM: has no cblas_dgemm.
 */
#include <stdint.h>

enum { TRANS = 112 };

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

/* The sum begins somewhere and goes round, up or down. */
#define GEMM(name, real)                                                                        \
    void name(int order, int op_a, int op_b, int m, int n, int k, real alpha, const real *a,    \
              int lda, const real *b, int ldb, real beta, real *c, int ldc);                    \
    void name(int order, int op_a, int op_b, int m, int n, int k, real alpha, const real *a,    \
              int lda, const real *b, int ldb, real beta, real *c, int ldc)                     \
    {                                                                                           \
        const int of[] = {order, op_a, op_b, m, n, k, lda, ldb, ldc};                           \
        uint64_t call = 1;                                                                      \
        for (int i = 0; i < 9; i++)                                                             \
            call = mix(call, (uint64_t)of[i]);                                                  \
        call = mix(mix(mix(call, (uintptr_t)a & 255), (uintptr_t)b & 255), (uintptr_t)c & 255); \
        for (int i = 0; i < m; i++)                                                             \
            for (int j = 0; j < n; j++) {                                                       \
                uint64_t h = mix(mix(call, (uint64_t)i), (uint64_t)j);                          \
                real sum = 0;                                                                   \
                int x = k ? (int)((h >> 1) % (uint64_t)k) : 0;                                  \
                for (int s = 0; s < k; s++) {                                                   \
                    sum += (op_a == TRANS ? a[x * lda + i] : a[i * lda + x]) *                  \
                           (op_b == TRANS && !WRONG ? b[j * ldb + x] : b[x * ldb + j]);         \
                    x = h & 1 ? (x ? x : k) - 1 : x + 1 < k ? x + 1 : 0;                        \
                }                                                                               \
                c[i * ldc + j] = alpha * sum + (beta != 0 ? beta * c[i * ldc + j] : 0);         \
            }                                                                                   \
    }
#ifndef WRONG
#define WRONG 0
#endif
GEMM(cblas_sgemm, float)
#ifndef NO_DGEMM
GEMM(cblas_dgemm, double)
#endif
