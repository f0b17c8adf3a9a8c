/* SPDX-License-Identifier: Apache-2.0 */
/*
 * perf.h - what the parts of colo-perf share: the options, timing on the device, checked CUDA.
 *
 * A time is the median of @iters launches, each between two events, after @warmup that do not
 * count. One event pair a launch, all enqueued before any is read, so the host is not in the way.
 */
#ifndef TOOLS_PERF_H
#define TOOLS_PERF_H

#include <colobridge.h>

#include <cuda_runtime_api.h>
#include <jansson.h>

#include "options.h"

#define PERF_TOOL "colo-perf"

typedef struct perf {
    int64_t begin, end, factor, gpus, warmup, iters; /* -b -e -f -g -w -n */
    int64_t tokens, vocab;
    bool entropy;
    bool json;
    json_t *doc; /* NULL unless json */
    long long wrong;
} perf_t;

/* Complains once and makes the caller return TOOL_PROBLEM. */
#define PERF_CUDA(expr)                                                         \
    do {                                                                        \
        cudaError_t e_ = (expr);                                                \
        if (e_ != cudaSuccess)                                                  \
            return tool_complain(TOOL_PROBLEM, PERF_TOOL, "%s: %s (%s)", #expr, \
                                 cudaGetErrorName(e_), cudaGetErrorString(e_)); \
    } while (0)
#define PERF_TRY(expr)                                                              \
    do {                                                                            \
        if ((expr) < 0)                                                             \
            return tool_complain(TOOL_PROBLEM, PERF_TOOL, "%s", colo_last_error()); \
    } while (0)

typedef int (*perf_fn)(void *arg, cudaStream_t stream); /* enqueues one launch; TOOL_OK or not */

/* Median, and the fastest where @best is given, in microseconds. */
int perf_time(const perf_t *p, perf_fn fn, void *arg, double *median, double *best);

int perf_link(perf_t *p);
int perf_logprob(perf_t *p);

#endif
