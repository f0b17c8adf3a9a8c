/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - checked CUDA, and timing on one device.
 *
 * A time is the median of @iters launches, each between two events, after @warmup that do not
 * count. One event pair a launch, all enqueued before any is read, so the host is not in the way.
 */
#ifndef TOOLS_PERF_CUDA_H
#define TOOLS_PERF_CUDA_H

#include "perf.h"

#include <cuda_runtime_api.h>

/* Complains once and makes the caller return TOOL_PROBLEM. */
#define PERF_CUDA(expr)                                                     \
    do {                                                                    \
        cudaError_t e_ = (expr);                                            \
        if (e_ != cudaSuccess)                                              \
            return tool_problem("%s: %s (%s)", #expr, cudaGetErrorName(e_), \
                                cudaGetErrorString(e_));                    \
    } while (0)
#define PERF_TRY(expr)                                    \
    do {                                                  \
        if ((expr) < 0)                                   \
            return tool_problem("%s", colo_last_error()); \
    } while (0)

typedef int (*perf_fn)(void *arg, cudaStream_t stream); /* enqueues one launch; TOOL_OK or not */

/* Memory of one GPU, and three ways to go through it: what their @arg begins with. */
typedef struct perf_span {
    void *dst, *src;
    int64_t bytes;
    unsigned long long *sum; /* device memory: of what was read */
} perf_span_t;
int perf_run_memcpy(void *span, cudaStream_t stream); /* cudaMemcpyAsync() */
int perf_run_copy(void *span, cudaStream_t stream);   /* a copy kernel */
int perf_run_read(void *span, cudaStream_t stream);   /* a kernel that only reads */

/* Median, and the fastest where @best is given, in microseconds. */
int perf_time(const perf_t *p, perf_fn fn, void *arg, double *median, double *best);
/* of @n times, sorted in place */
double perf_median(float *ms, size_t n);

#endif
