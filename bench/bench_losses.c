/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_losses.c - picks and target distributions on one GPU next to reading the logits once.
 *
 * usage: bench-losses [T V]      bf16 logits, default 8192 151936; medians of 20 after 3
 */
#include <colobridge.h>

#include "perf/probe.h"

#include <stdio.h>
#include <stdlib.h>

enum { WARM = 3, ITERATIONS = 20 };

#define CUDA(expr)                                                      \
    do {                                                                \
        cudaError_t e_ = (expr);                                        \
        if (e_ != cudaSuccess) {                                        \
            fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(e_)); \
            exit(1);                                                    \
        }                                                               \
    } while (0)
#define OK(expr)                                                   \
    do {                                                           \
        if ((expr) < 0) {                                          \
            fprintf(stderr, "%s: %s\n", #expr, colo_last_error()); \
            exit(1);                                               \
        }                                                          \
    } while (0)

static struct {
    int64_t tokens, vocab, k;
    bool topk;
    colo_tensor_t z, w, dz, ids;
    void *stats, *workspace, *line[2], *picked, *up, *chosen;
    unsigned long long *sum;
    colo_comm_t *self;
    colo_topk_saved_t picks;
    colo_distill_saved_t soft;
} b;

static void *memory(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes + 16));
    CUDA(cudaMemset(p, 0, bytes));
    return p;
}

static void read_once(void)
{
    CUDA(colo_k_probe_read(b.z.data, b.tokens * b.vocab * 2 / 16 * 16, b.sum, NULL));
}

static void copy_once(void)
{
    CUDA(colo_k_probe_copy(b.dz.data, b.z.data, b.tokens * b.vocab * 2 / 16 * 16, NULL));
}

/* [T] or, if @k > 0, [T, k] on the device */
static colo_tensor_t array(void *data, colo_dtype_t dtype, int64_t k)
{
    return colo_tensor_cuda(data, dtype, 0, k > 0 ? 2 : 1, (int64_t[]){b.tokens, k});
}

static void topk_forward(void)
{
    const colo_topk_config_t cfg = {COLO_TOPK_CONFIG_INIT, .logits.vocab = b.vocab, .k = b.k,
                                    .topk = b.topk};
    const colo_tensor_t logp = array(b.picked, COLO_F32, b.k), ids = array(b.chosen, COLO_I64, b.k);
    const colo_topk_out_t out = {COLO_TOPK_OUT_INIT, .logp = &logp, .ids = b.topk ? &ids : NULL};
    b.picks = (colo_topk_saved_t){COLO_TOPK_SAVED_INIT};
    OK(colo_topk_forward(
        &cfg,
        &(colo_topk_batch_t){COLO_TOPK_BATCH_INIT, .logits = &b.z, .ids = b.topk ? NULL : &b.ids},
        b.self, &out, &b.picks, b.stats, b.workspace, NULL));
}

static void topk_backward(void)
{
    const colo_tensor_t up = array(b.up, COLO_F32, b.k);
    OK(colo_topk_backward(&b.picks, &(colo_topk_upstream_t){COLO_TOPK_UPSTREAM_INIT, .d_logp = &up},
                          &b.dz, NULL));
}

static void soft_forward(void)
{
    const colo_distill_config_t cfg = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = b.vocab};
    const colo_tensor_t ce = array(b.line[0], COLO_F32, 0), kl = array(b.line[1], COLO_F32, 0);
    b.soft = (colo_distill_saved_t){COLO_DISTILL_SAVED_INIT};
    OK(colo_distill_forward(
        &cfg, &(colo_distill_batch_t){COLO_DISTILL_BATCH_INIT, .logits = &b.z, .targets = &b.w},
        b.self, &(colo_distill_out_t){COLO_DISTILL_OUT_INIT, .ce = &ce, .kl = &kl}, &b.soft,
        b.stats, b.workspace, NULL));
}

static void soft_backward(void)
{
    const colo_tensor_t up = array(b.up, COLO_F32, 0);
    OK(colo_distill_backward(
        &b.soft, &(colo_distill_upstream_t){COLO_DISTILL_UPSTREAM_INIT, .d_kl = &up}, &b.dz, NULL));
}

/* Rows in which each 16-byte word has a larger maximum than the one before, or a smaller, or equal
 */
static void order_rows(int kind)
{
    uint16_t *row = malloc((size_t)b.vocab * 2);
    for (int64_t j = 0; j < b.vocab; j++)
        row[j] =
            kind == 2 ? 0x3f80 : (uint16_t)(0x80 + (kind ? b.vocab - 1 - j : j) * 32000 / b.vocab);
    CUDA(cudaMemcpy(b.z.data, row, (size_t)b.vocab * 2, cudaMemcpyHostToDevice));
    for (int64_t n = 1; n < b.tokens; n *= 2) {
        const int64_t more = b.tokens - n < n ? b.tokens - n : n;
        CUDA(cudaMemcpy((char *)b.z.data + n * b.vocab * 2, b.z.data, (size_t)(more * b.vocab) * 2,
                        cudaMemcpyDeviceToDevice));
    }
    free(row);
}

static int by_value(const void *x, const void *y)
{
    float a = *(const float *)x, c = *(const float *)y;
    return (a > c) - (a < c);
}

/* @matrices: of logits, that the operation moves */
static void measure(const char *name, void (*run)(void), double matrices)
{
    float ms[ITERATIONS];
    cudaEvent_t from, to;
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    for (int i = -WARM; i < ITERATIONS; i++) {
        CUDA(cudaEventRecord(from, NULL));
        run();
        CUDA(cudaEventRecord(to, NULL));
        CUDA(cudaEventSynchronize(to));
        if (i >= 0)
            CUDA(cudaEventElapsedTime(&ms[i], from, to));
    }
    qsort(ms, ITERATIONS, sizeof *ms, by_value);
    const double median = (ms[ITERATIONS / 2 - 1] + ms[ITERATIONS / 2]) / 2;
    printf("%-28s %9.1f us %8.0f GB/s\n", name, 1e3 * median,
           matrices * (double)(b.tokens * b.vocab) * 2 / median / 1e6);
}

int main(int argc, char **argv)
{
    b.tokens = argc > 2 ? atoll(argv[1]) : 8192;
    b.vocab = argc > 2 ? atoll(argv[2]) : 151936;
    const size_t bytes = (size_t)(b.tokens * b.vocab) * 2;
    const int64_t ks[] = {1, 20, 64, 256};
    const int64_t shape[2] = {b.tokens, b.vocab};
    const size_t most = (size_t)b.tokens * COLO_TOPK_MAX * 8;
    OK(colo_comm_create_self(&b.self));
    b.z = colo_tensor_cuda(memory(bytes), COLO_BF16, 0, 2, shape);
    b.w = colo_tensor_cuda(memory(bytes), COLO_BF16, 0, 2, shape);
    b.dz = colo_tensor_cuda(memory(bytes), COLO_BF16, 0, 2, shape);
    CUDA(colo_k_probe_fill(b.z.data, (int64_t)(bytes / 16 * 16), 3, 1, NULL));
    CUDA(colo_k_probe_fill(b.w.data, (int64_t)(bytes / 16 * 16), 3, 2, NULL));
    b.stats = memory(3 * most);
    b.workspace = memory(6 * most);
    b.line[0] = memory(most);
    b.line[1] = memory(most);
    b.picked = memory(most);
    b.up = memory(most);
    b.chosen = memory(most);
    b.sum = memory(8);
    printf("T %lld, V %lld, bf16, %.2f GB of logits\n", (long long)b.tokens, (long long)b.vocab,
           (double)bytes / 1e9);
    measure("read once", read_once, 1);
    measure("copy", copy_once, 2);
    for (int i = 0; i < 4; i++)
        for (int topk = 1; topk >= 0; topk--) {
            char name[64];
            b.k = ks[i];
            b.topk = topk;
            b.ids = colo_tensor_cuda(memory(most), COLO_I64, 0, 2, (int64_t[]){b.tokens, b.k});
            snprintf(name, sizeof name, "%s %d, forward", topk ? "largest" : "given", (int)b.k);
            measure(name, topk_forward, 1);
            snprintf(name, sizeof name, "%s %d, backward", topk ? "largest" : "given", (int)b.k);
            measure(name, topk_backward, 2);
            CUDA(cudaFree(b.ids.data));
        }
    measure("distill from logits, forward", soft_forward, 2);
    measure("distill, backward", soft_backward, 3);
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < 4; i++) {
            static const char *const kinds[] = {"ascending", "descending", "equal"};
            char name[64];
            order_rows(kind);
            b.k = ks[i];
            b.topk = true;
            snprintf(name, sizeof name, "largest %d, %s rows", (int)b.k, kinds[kind]);
            measure(name, topk_forward, 1);
        }
    return 0;
}
