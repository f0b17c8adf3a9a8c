/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.c - colo-perf logprob: the loss on [T, V] bf16 logits of one GPU, and its floor.
 *
 * Forward must read the logits once, backward read and write them once; so a kernel that only sums
 * the same bytes, and the faster of cudaMemcpyAsync and a copy kernel over them, are the limits,
 * measured in the same run. Then rows are fetched and compared with fp64 sums written here from the
 * definitions: log-probability and entropy to 1e-5 relative, a gradient to its rounding in bf16.
 */
#include "cuda.h"

#include "probe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 12 }; /* checked */

typedef struct loss_args {
    perf_span_t span; /* from the logits to their gradients */
    colo_logprob_config_t config;
    colo_comm_t *self;
    colo_tensor_t logits, targets, d_logits, logp, entropy, d;
    colo_logprob_out_t out;
    colo_logprob_saved_t saved;
    colo_logprob_upstream_t upstream;
    void *stats, *workspace;
    int64_t *host_targets;
    float *host_up;
} loss_args_t;

static int run_forward(void *arg, cudaStream_t stream)
{
    loss_args_t *args = arg;
    args->saved = (colo_logprob_saved_t){COLO_LOGPROB_SAVED_INIT};
    PERF_TRY(colo_logprob_forward(
        &args->config,
        &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, .logits = &args->logits,
                                .targets = &args->targets},
        args->self, &args->out, &args->saved, args->stats, args->workspace, stream));
    return TOOL_OK;
}

static int run_backward(void *arg, cudaStream_t stream)
{
    loss_args_t *args = arg;
    PERF_TRY(colo_logprob_backward(&args->saved, &args->upstream, &args->d_logits, stream));
    return TOOL_OK;
}

/* ---- inputs ---- */

static int device_copy(void **to, const void *from, size_t bytes)
{
    PERF_CUDA(cudaMalloc(to, bytes));
    if (from) {
        PERF_CUDA(cudaMemcpy(*to, from, bytes, cudaMemcpyHostToDevice));
        PERF_CUDA(cudaStreamSynchronize(cudaStreamLegacy)); /* a short one comes back before that */
    }
    return TOOL_OK;
}

static int make(const perf_t *p, loss_args_t *args)
{
    const size_t t = (size_t)p->tokens;
    size_t stat_bytes, workspace_bytes;
    void *targets, *up, *out[2];
    args->config = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = p->vocab,
                                           .want_entropy = p->entropy};
    args->span.bytes = p->tokens * p->vocab * 2 / 16 * 16;
    args->host_targets = malloc(t * sizeof *args->host_targets);
    args->host_up = malloc(t * sizeof *args->host_up);
    if (!args->host_targets || !args->host_up)
        return tool_problem("no memory");
    for (size_t i = 0; i < t; i++) {
        args->host_targets[i] = (int64_t)((i * 7919 + 13) % (size_t)p->vocab);
        args->host_up[i] = 0.25f * (float)(i % 7 + 1);
    }
    PERF_TRY(colo_comm_create_self(&args->self));
    PERF_TRY(colo_logprob_saved_size(&args->config, COLO_BF16, p->tokens, &stat_bytes));
    PERF_TRY(colo_logprob_workspace_size(&args->config, COLO_BF16, p->tokens, 1, &workspace_bytes));
    TOOL_TRY(device_copy(&args->span.src, NULL, (size_t)args->span.bytes + 16));
    TOOL_TRY(device_copy(&args->span.dst, NULL, (size_t)args->span.bytes + 16));
    TOOL_TRY(device_copy((void **)&args->span.sum, NULL, 8));
    TOOL_TRY(device_copy(&args->stats, NULL, stat_bytes));
    TOOL_TRY(device_copy(&args->workspace, NULL, workspace_bytes));
    TOOL_TRY(device_copy(&targets, args->host_targets, t * 8));
    TOOL_TRY(device_copy(&up, args->host_up, t * 4));
    TOOL_TRY(device_copy(&out[0], NULL, t * 4));
    TOOL_TRY(device_copy(&out[1], NULL, t * 4));
    PERF_CUDA(colo_k_probe_fill(args->span.src, args->span.bytes + 16, 3, 1, NULL));
    args->logits =
        colo_tensor_cuda(args->span.src, COLO_BF16, 0, 2, (int64_t[]){p->tokens, p->vocab});
    args->d_logits = args->logits;
    args->d_logits.data = args->span.dst;
    args->targets = colo_tensor_cuda(targets, COLO_I64, 0, 1, &p->tokens);
    args->logp = colo_tensor_cuda(out[0], COLO_F32, 0, 1, &p->tokens);
    args->entropy = colo_tensor_cuda(out[1], COLO_F32, 0, 1, &p->tokens);
    args->d = colo_tensor_cuda(up, COLO_F32, 0, 1, &p->tokens);
    args->out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = &args->logp,
                                     .entropy = p->entropy ? &args->entropy : NULL};
    args->upstream = (colo_logprob_upstream_t){COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &args->d,
                                               .d_entropy = p->entropy ? &args->d : NULL};
    return TOOL_OK;
}

/* ---- checking ---- */

static double value(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* How many of the row's results are not what fp64 says; the gradient, too, when @dz is given. */
static long long check_row(const loss_args_t *args, int64_t v, int64_t t, const uint16_t *z,
                           const uint16_t *dz, double logp, double entropy)
{
    const double g = args->host_up[t], g_h = args->upstream.d_entropy ? g : 0;
    double top = -INFINITY, sum = 0, mean = 0;
    long long wrong = 0;
    for (int64_t j = 0; j < v; j++)
        top = fmax(top, value(z[j]));
    for (int64_t j = 0; j < v; j++)
        sum += exp(value(z[j]) - top);
    for (int64_t j = 0; j < v; j++)
        mean += exp(value(z[j]) - top) / sum * (value(z[j]) - top);
    const double lse = top + log(sum), h = log(sum) - mean,
                 want = value(z[args->host_targets[t]]) - lse;
    wrong += !(fabs(logp - want) <= 1e-5 * (1 + fabs(want)));
    wrong += args->out.entropy && !(fabs(entropy - h) <= 1e-5 * (1 + fabs(h)));
    for (int64_t j = 0; dz && j < v; j++) {
        const double lp = value(z[j]) - lse, prob = exp(lp),
                     e = g * ((j == args->host_targets[t]) - prob) - g_h * prob * (lp + h);
        wrong += !(fabs(value(dz[j]) - e) <= 0x1p-8 * fabs(e) + 1e-6 * g);
    }
    return wrong;
}

/* @rows: the checked rows of the logits */
static int check(const perf_t *p, const loss_args_t *args, bool gradient, const uint16_t *rows,
                 long long *wrong)
{
    const size_t v = (size_t)p->vocab;
    uint16_t *dz = malloc(v * 2);
    *wrong = dz ? 0 : -1;
    for (int i = 0; dz && i < ROWS; i++) {
        const int64_t t = (p->tokens - 1) * i / (ROWS - 1);
        float logp = 0, entropy = 0;
        PERF_CUDA(cudaMemcpy(&logp, (float *)args->logp.data + t, 4, cudaMemcpyDeviceToHost));
        if (args->out.entropy)
            PERF_CUDA(
                cudaMemcpy(&entropy, (float *)args->entropy.data + t, 4, cudaMemcpyDeviceToHost));
        if (gradient)
            PERF_CUDA(cudaMemcpy(dz, (uint16_t *)args->d_logits.data + t * p->vocab, v * 2,
                                 cudaMemcpyDeviceToHost));
        *wrong +=
            check_row(args, p->vocab, t, rows + (size_t)i * v, gradient ? dz : NULL, logp, entropy);
    }
    free(dz);
    return TOOL_OK;
}

/* ---- the table ---- */

typedef struct timing {
    const char *op;
    perf_fn fn;
    int passes;
    const char *of; /* its limit */
    double us, best, limit;
    long long wrong;
} timing_t;

static int print(perf_t *p, const loss_args_t *args, const timing_t *t, size_t n)
{
    json_t *rows = json_array();
    if (!p->json)
        printf("# logprob: T %lld, V %lld, bf16%s, %lld bytes of logits\n"
               "#%9s  %14s  %10s  %10s  %8s  %8s  %-6s  %7s\n#%9s  %14s  %10s  %10s  %8s\n",
               (long long)p->tokens, (long long)p->vocab, p->entropy ? ", entropy" : "",
               (long long)args->span.bytes, "op", "moved", "time", "best", "bw", "% of", "",
               "#wrong", "", "(B)", "(us)", "(us)", "(GB/s)");
    for (size_t i = 0; i < n; i++) {
        const double moved = (double)args->span.bytes * t[i].passes, bw = moved / t[i].us * 1e-3,
                     percent = t[i].limit > 0 ? 100 * t[i].limit / t[i].us : 100;
        if (!p->json)
            printf("%10s  %14.0f  %10.1f  %10.1f  %8.1f  %8.1f  %-6s  %7lld\n", t[i].op, moved,
                   t[i].us, t[i].best, bw, percent, t[i].of, t[i].wrong);
        if (json_array_append_new(
                rows, json_pack("{s:s,s:f,s:f,s:f,s:f,s:f,s:s,s:I}", "op", t[i].op, "bytes", moved,
                                "time_us", t[i].us, "best_us", t[i].best, "gbs", bw, "percent",
                                percent, "of", t[i].of, "wrong", (json_int_t)t[i].wrong)) != 0)
            return tool_problem("no memory");
    }
    if (json_object_set_new(p->doc, "logprob",
                            json_pack("{s:I,s:I,s:s,s:b,s:o}", "tokens", (json_int_t)p->tokens,
                                      "vocab", (json_int_t)p->vocab, "dtype", "bf16", "entropy",
                                      p->entropy, "rows", rows)) != 0)
        return tool_problem("no memory");
    return TOOL_OK;
}

static int measure(perf_t *p, loss_args_t *args, const uint16_t *rows)
{
    enum { READ, COPY, MEMCPY, FORWARD, BACKWARD, N };
    timing_t t[N] = {[READ] = {"read", perf_run_read, 1, "itself", 0, 0, 0, 0},
                     [COPY] = {"copy", perf_run_copy, 2, "itself", 0, 0, 0, 0},
                     [MEMCPY] = {"memcpy", perf_run_memcpy, 2, "itself", 0, 0, 0, 0},
                     [FORWARD] = {"forward", run_forward, 1, "read", 0, 0, 0, 0},
                     [BACKWARD] = {"backward", run_backward, 2, "copy", 0, 0, 0, 0}};
    for (int i = 0; i < BACKWARD; i++)
        TOOL_TRY(perf_time(p, t[i].fn, args, &t[i].us, &t[i].best));
    TOOL_TRY(check(p, args, false, rows, &t[FORWARD].wrong));
    PERF_CUDA(cudaMemset(args->d_logits.data, 0xff, (size_t)args->span.bytes));
    TOOL_TRY(perf_time(p, run_backward, args, &t[BACKWARD].us, &t[BACKWARD].best));
    TOOL_TRY(check(p, args, true, rows, &t[BACKWARD].wrong));
    t[FORWARD].limit = t[READ].us;
    t[BACKWARD].limit = t[COPY].us < t[MEMCPY].us ? t[COPY].us : t[MEMCPY].us;
    p->wrong += t[FORWARD].wrong + t[BACKWARD].wrong;
    return print(p, args, t, N);
}

int perf_logprob(perf_t *p)
{
    loss_args_t args = {.self = NULL};
    const size_t v = (size_t)p->vocab;
    uint16_t *rows = malloc(ROWS * v * 2);
    int rc = rows ? make(p, &args) : tool_problem("no memory");
    for (int i = 0; rc == TOOL_OK && i < ROWS; i++) {
        const int64_t t = (p->tokens - 1) * i / (ROWS - 1);
        PERF_CUDA(cudaMemcpy(rows + (size_t)i * v, (uint16_t *)args.logits.data + t * p->vocab,
                             v * 2, cudaMemcpyDeviceToHost));
    }
    rc = rc ? rc : measure(p, &args, rows);
    colo_comm_destroy(&args.self);
    free(args.host_targets);
    free(args.host_up);
    free(rows);
    return rc; /* device memory goes with the process */
}
