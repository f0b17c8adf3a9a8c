/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h - programs that measure stop at the first failure, with its place. C and C++. */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>

#define BENCH_STOP(what, why) \
    (fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, (what), (why)), exit(1))
#define CUDA(expr)                                     \
    do {                                               \
        cudaError_t e_ = (expr);                       \
        if (e_ != cudaSuccess)                         \
            BENCH_STOP(#expr, cudaGetErrorString(e_)); \
    } while (0)
/* needs colobridge.h */
#define COLO(expr)                                \
    do {                                          \
        if ((expr) < 0)                           \
            BENCH_STOP(#expr, colo_last_error()); \
    } while (0)

#endif
