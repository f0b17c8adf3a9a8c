/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link.c - colo-perf link: what one GPU's memory does, by size.
 *
 * algbw is size / time, membw what the memory moves for it: twice that for a copy, once for a read.
 * The bridge's line goes through the public calls, on a comm of one rank, where all movement is
 * local; it is the box kernel with a bridge around it.
 */
#include "cuda.h"

#include "probe.h"

typedef struct link_args {
    perf_span_t span;
    colo_bridge_t *bridge;
    colo_tensor_t x, y;
} link_args_t;

static int run_bridge(void *arg, cudaStream_t stream)
{
    link_args_t *a = arg;
    PERF_TRY(colo_bridge_forward(a->bridge, &a->x, &a->y, stream));
    return TOOL_OK;
}

static const struct {
    const char *name;
    perf_fn fn;
    int passes; /* over memory */
} ops[] = {{"memcpy", perf_run_memcpy, 2},
           {"copy", perf_run_copy, 2},
           {"bridge", run_bridge, 2},
           {"read", perf_run_read, 1}};

/* [1, 1, bytes / 2] of bf16, read as half of a row that is twice as long: one box with a stride */
static int make_bridge(link_args_t *a, colo_comm_t *self)
{
    colo_grid_t grid;
    colo_layout_t src, dst;
    const int64_t h = 1024, s = a->span.bytes / 2 / h > 0 ? a->span.bytes / 2 / h : 1,
                  width = a->span.bytes / 2 / s;
    PERF_TRY(colo_grid_parse(&grid, "tp=1,dp=1", 1));
    PERF_TRY(colo_layout_init_src(&src, &grid));
    PERF_TRY(colo_layout_init_dst(&dst, &grid));
    colo_bridge_config_t cfg = {
        COLO_BRIDGE_CONFIG_INIT, .src = &src,          .dst = &dst,    .shape = {1, s, width, 0},
        .dtype = COLO_BF16,      .mem = COLO_MEM_CUDA, .no_grad = true};
    PERF_TRY(colo_bridge_create(&a->bridge, &cfg, self));
    a->x = colo_tensor_cuda(a->span.src, COLO_BF16, 0, 3, (int64_t[]){1, s, width});
    a->y = a->x;
    a->y.data = a->span.dst;
    return TOOL_OK;
}

static int line(perf_t *p, link_args_t *a, size_t op)
{
    unsigned long long wrong = 0;
    double us = 0;
    PERF_CUDA(cudaMemset(a->span.dst, 0xff, (size_t)a->span.bytes));
    TOOL_TRY(perf_time(p, ops[op].fn, a, &us, NULL));
    if (ops[op].passes == 2) {
        PERF_CUDA(cudaMemset(a->span.sum, 0, sizeof wrong));
        PERF_CUDA(colo_k_probe_diff(a->span.dst, a->span.src, a->span.bytes, a->span.sum, NULL));
        PERF_CUDA(cudaMemcpy(&wrong, a->span.sum, sizeof wrong, cudaMemcpyDeviceToHost));
    }
    const double bw = (double)a->span.bytes / us * 1e-3;
    p->wrong += (long long)wrong;
    if (!p->json)
        printf("%14lld  %14lld  %6s  %8s  %9.2f  %8.1f  %8.1f  %7llu\n", (long long)a->span.bytes,
               (long long)a->span.bytes / 2, "bf16", ops[op].name, us, bw, bw * ops[op].passes,
               wrong);
    return perf_doc_add(p, "link",
                        json_pack("{s:s,s:i,s:I,s:f,s:f,s:f,s:I}", "op", ops[op].name, "gpus", 1,
                                  "bytes", (json_int_t)a->span.bytes, "time_us", us, "algbw_gbs",
                                  bw, "membw_gbs", bw * ops[op].passes, "wrong",
                                  (json_int_t)wrong));
}

int perf_link(perf_t *p)
{
    link_args_t a = {.bridge = NULL};
    colo_comm_t *self = NULL;
    const int64_t most = p->end / 16 * 16;
    int rc = TOOL_OK;
    PERF_CUDA(cudaMalloc(&a.span.src, (size_t)most));
    PERF_CUDA(cudaMalloc(&a.span.dst, (size_t)most));
    PERF_CUDA(cudaMalloc((void **)&a.span.sum, sizeof *a.span.sum));
    PERF_CUDA(colo_k_probe_fill(a.span.src, most, 1, 1, NULL));
    PERF_TRY(colo_comm_create_self(&self));
    if (!p->json)
        printf("#%13s  %14s  %6s  %8s  %9s  %8s  %8s  %7s\n#%13s  %14s  %6s  %8s  %9s  %8s  %8s\n",
               "size", "count", "type", "op", "time", "algbw", "membw", "#wrong", "(B)",
               "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)");
    for (int64_t bytes = p->begin; rc == TOOL_OK && bytes <= p->end; bytes *= p->factor) {
        a.span.bytes = bytes / 16 * 16;
        rc = make_bridge(&a, self);
        for (size_t op = 0; rc == TOOL_OK && op < sizeof ops / sizeof ops[0]; op++)
            rc = line(p, &a, op);
        colo_bridge_destroy(&a.bridge);
    }
    colo_comm_destroy(&self);
    cudaFree(a.span.src);
    cudaFree(a.span.dst);
    cudaFree(a.span.sum);
    return rc;
}
