/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h - what programs share that measure on ranks; a rank returns its first error. */
#ifndef BENCH_RANKS_H
#define BENCH_RANKS_H

#include <colobridge.h>

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>

#define CUDA(expr)                                                      \
    do {                                                                \
        cudaError_t e_ = (expr);                                        \
        if (e_ != cudaSuccess) {                                        \
            fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(e_)); \
            return COLO_ERR_CUDA;                                       \
        }                                                               \
    } while (0)
#define TRY(expr)                  \
    do {                           \
        colo_status_t s_ = (expr); \
        if (s_ < 0)                \
            return s_;             \
    } while (0)

static inline colo_status_t bench_layouts(const char *source, const char *destination,
                                          colo_layout_t *src, colo_layout_t *dst)
{
    colo_grid_t gs, gd;
    TRY(colo_grid_parse(&gs, source, 0));
    TRY(colo_grid_parse(&gd, destination, 0));
    TRY(colo_layout_init_src(src, &gs));
    return colo_layout_init_dst(dst, &gd);
}

enum { WARM = 3, ITERATIONS = 20 };
struct rank;

/* Times @run for each of @passes, one after the other. @ms: [passes][ITERATIONS][stride], of which
 * this rank writes its own. */
static inline colo_status_t bench_measure(struct rank *r, colo_comm_t *host, cudaStream_t stream,
                                          colo_status_t (*run)(struct rank *r, int pass),
                                          int passes, float *ms, int32_t stride)
{
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = -WARM; i < ITERATIONS; i++)
        for (int pass = 0; pass < passes; pass++) {
            TRY(colo_comm_barrier(host, NULL));
            CUDA(cudaEventRecord(a, stream));
            TRY(run(r, pass));
            CUDA(cudaEventRecord(b, stream));
            CUDA(cudaEventSynchronize(b));
            if (i >= 0)
                CUDA(cudaEventElapsedTime(
                    &ms[(pass * ITERATIONS + i) * stride + colo_comm_rank(host)], a, b));
        }
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    return COLO_OK;
}

static inline int bench_ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The median of the slowest rank's times; @ms: [ITERATIONS][ranks]. */
static inline double bench_median_us(const float *ms, int32_t ranks)
{
    float worst[ITERATIONS] = {0};
    for (int i = 0; i < ITERATIONS; i++)
        for (int32_t k = 0; k < ranks; k++)
            worst[i] = ms[i * ranks + k] > worst[i] ? ms[i * ranks + k] : worst[i];
    qsort(worst, ITERATIONS, sizeof worst[0], bench_ascending);
    return (double)worst[ITERATIONS / 2] * 1e3;
}

#endif
