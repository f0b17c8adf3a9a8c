/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.c - see perf/cuda.h. */
#include "cuda.h"

#include "probe.h"

#include <stdlib.h>

int perf_run_memcpy(void *span, cudaStream_t stream)
{
    const perf_span_t *s = span;
    PERF_CUDA(cudaMemcpyAsync(s->dst, s->src, (size_t)s->bytes, cudaMemcpyDeviceToDevice, stream));
    return TOOL_OK;
}

int perf_run_copy(void *span, cudaStream_t stream)
{
    const perf_span_t *s = span;
    PERF_CUDA(colo_k_probe_copy(s->dst, s->src, s->bytes, stream));
    return TOOL_OK;
}

int perf_run_read(void *span, cudaStream_t stream)
{
    const perf_span_t *s = span;
    PERF_CUDA(colo_k_probe_read(s->src, s->bytes, s->sum, stream));
    return TOOL_OK;
}

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

double perf_median(float *ms, size_t n)
{
    qsort(ms, n, sizeof *ms, ascending);
    return n % 2 ? ms[n / 2] : 0.5 * (ms[n / 2 - 1] + ms[n / 2]);
}

int perf_time(const perf_t *p, perf_fn fn, void *arg, double *median, double *best)
{
    const size_t n = (size_t)p->iters;
    cudaEvent_t *event = calloc(n + 1, sizeof(cudaEvent_t));
    float *ms = calloc(n, sizeof *ms);
    int rc = event && ms ? TOOL_OK : tool_problem("no memory");
    for (size_t i = 0; rc == TOOL_OK && i <= n; i++)
        if (cudaEventCreate(&event[i]) != cudaSuccess)
            rc = tool_problem("no event could be made");
    for (int64_t i = 0; rc == TOOL_OK && i < p->warmup; i++)
        rc = fn(arg, NULL);
    if (rc == TOOL_OK)
        cudaEventRecord(event[0], NULL);
    for (size_t i = 0; rc == TOOL_OK && i < n; i++) {
        rc = fn(arg, NULL);
        cudaEventRecord(event[i + 1], NULL);
    }
    cudaError_t e = cudaDeviceSynchronize();
    for (size_t i = 0; rc == TOOL_OK && e == cudaSuccess && i < n; i++)
        e = cudaEventElapsedTime(&ms[i], event[i], event[i + 1]);
    if (rc == TOOL_OK && e != cudaSuccess)
        rc = tool_problem("timing: %s", cudaGetErrorString(e));
    if (rc == TOOL_OK) {
        *median = 1e3 * perf_median(ms, n);
        if (best)
            *best = 1e3 * ms[0];
    }
    for (size_t i = 0; event && i <= n; i++)
        if (event[i])
            cudaEventDestroy(event[i]);
    free(event);
    free(ms);
    return rc;
}

int perf_describe(perf_t *p, int argc, char **argv)
{
    struct cudaDeviceProp prop;
    int driver = 0, runtime = 0, n = 0;
    char cuda[32];
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n < 1)
        return tool_refuse("no CUDA device: %s",
                           e == cudaSuccess ? "none found" : cudaGetErrorString(e));
    if (p->gpus > n)
        return tool_refuse("-g %lld: there are %d GPUs", (long long)p->gpus, n);
    p->gpus = p->gpus ? p->gpus : n;
    PERF_CUDA(cudaGetDeviceProperties(&prop, 0));
    PERF_CUDA(cudaDriverGetVersion(&driver));
    PERF_CUDA(cudaRuntimeGetVersion(&runtime));
    if (!p->json)
        printf("# colobridge %s, %d %s, CUDA driver %d.%d, runtime %d.%d\n"
               "# warmup %lld, iters %lld, medians; GB is 10^9 bytes\n#\n",
               colo_version(), n, prop.name, driver / 1000, driver % 1000 / 10, runtime / 1000,
               runtime % 1000 / 10, (long long)p->warmup, (long long)p->iters);
    snprintf(cuda, sizeof cuda, "%d.%d", runtime / 1000, runtime % 1000 / 10);
    return perf_doc(p, prop.name, n, cuda, argc, argv);
}
