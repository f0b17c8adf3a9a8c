/* SPDX-License-Identifier: Apache-2.0 */
/*
 * links.c - colo-perf link, between GPUs: what stores into a peer give, and what NCCL does.
 *
 * Groups are the first 2, 4, 8 ... GPUs and all of them. In push, copy and sendrecv every GPU gives
 * to the next and gets from the one before, in pairs every two GPUs exchange, all at once. Sizes
 * are what one GPU sends; for all-gather, as in nccl-tests, what it ends up with. busbw is algbw,
 * times (n - 1) / n for all-gather.
 */
#include "gpus.h"

#include "probe.h"

#include <string.h>

typedef enum op { PUSH, COPY, SENDRECV, PAIRS, ALL_GATHER, OPS } op_t;
static const char *const names[OPS] = {"push", "copy", "sendrecv", "pairs", "all-gather"};

typedef struct links {
    perf_rank_t *r;
    ncclComm_t comm;
    op_t op;
    int32_t n; /* of the group */
    int64_t bytes;
    void *send, *recv, *want;
} links_t;

static int32_t gives_to(const links_t *a)
{
    return a->op == PAIRS ? a->r->me ^ 1 : (a->r->me + 1) % a->n;
}

static int32_t gets_from(const links_t *a)
{
    return a->op == PAIRS ? a->r->me ^ 1 : (a->r->me + a->n - 1) % a->n;
}

static int run(void *arg, cudaStream_t stream)
{
    links_t *a = arg;
    perf_rank_t *r = a->r;
    const perf_nccl_t *nccl = &r->all->nccl;
    const size_t bytes = (size_t)a->bytes;
    if (r->me >= a->n)
        return TOOL_OK;
    void *there = r->all->ptr[gives_to(a)];
    if (a->op == PUSH) {
        RANK_CUDA(colo_k_probe_push(&(colo_k_push_t){there, a->send, a->bytes}, 1, stream));
    } else if (a->op == COPY) {
        RANK_CUDA(cudaMemcpyPeerAsync(there, gives_to(a), a->send, r->me, bytes, stream));
    } else if (a->op == ALL_GATHER) {
        RANK_NCCL(
            nccl->all_gather(a->send, a->recv, bytes / (size_t)a->n, ncclInt8, a->comm, stream));
    } else {
        RANK_NCCL(nccl->group_start());
        RANK_NCCL(nccl->send(a->send, bytes, ncclInt8, gives_to(a), a->comm, stream));
        RANK_NCCL(nccl->recv(a->recv, bytes, ncclInt8, gets_from(a), a->comm, stream));
        RANK_NCCL(nccl->group_end());
    }
    return TOOL_OK;
}

static int check(links_t *a, int64_t *wrong)
{
    perf_rank_t *r = a->r;
    unsigned long long found = 0;
    *wrong = 0;
    RANK_CUDA(cudaMemsetAsync(r->count, 0, sizeof found, r->stream));
    for (int32_t k = 0; k < (a->op == ALL_GATHER ? a->n : 1) && r->me < a->n; k++) {
        const int64_t part = a->op == ALL_GATHER ? a->bytes / a->n : a->bytes;
        const int32_t from = a->op == ALL_GATHER ? k : gets_from(a);
        RANK_CUDA(colo_k_probe_fill(a->want, part, 1, (uint64_t)from + 1, r->stream));
        RANK_CUDA(
            colo_k_probe_diff((char *)a->recv + k * part, a->want, part, r->count, r->stream));
    }
    TOOL_TRY(perf_rank_wait(r));
    RANK_CUDA(cudaMemcpy(&found, r->count, sizeof found, cudaMemcpyDeviceToHost));
    *wrong = (int64_t)found;
    return perf_rank_sum(r, wrong);
}

static int line(links_t *a)
{
    perf_rank_t *r = a->r;
    perf_t *p = r->all->p;
    double us = 0, best = 0;
    int64_t wrong = 0;
    if ((a->op == PAIRS && (a->n % 2 || a->n == 2)) || (a->op <= COPY && !r->all->reach))
        return TOOL_OK; /* two GPUs are a pair anyway */
    RANK_CUDA(cudaMemsetAsync(a->recv, 0xff, (size_t)a->bytes, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    TOOL_TRY(perf_rank_barrier(r));
    TOOL_TRY(perf_rank_time(r, run, a, perf_batch(a->bytes), &us, &best));
    TOOL_TRY(check(a, &wrong));
    if (r->me != 0)
        return TOOL_OK;
    const double alg = (double)a->bytes / us * 1e-3,
                 bus = a->op == ALL_GATHER ? alg * (a->n - 1) / a->n : alg;
    p->wrong += wrong;
    if (!p->json)
        printf("%14lld  %14lld  %6s  %10s  %5d  %9.2f  %8.1f  %8.1f  %7lld\n", (long long)a->bytes,
               (long long)a->bytes / 2, "bf16", names[a->op], (int)a->n, us, alg, bus,
               (long long)wrong);
    return perf_doc_add(p, "link",
                        json_pack("{s:s,s:i,s:I,s:f,s:f,s:f,s:f,s:I}", "op", names[a->op], "gpus",
                                  (int)a->n, "bytes", (json_int_t)a->bytes, "time_us", us,
                                  "best_us", best, "algbw_gbs", alg, "busbw_gbs", bus, "wrong",
                                  (json_int_t)wrong));
}

/* The first @n ranks; the others look on. */
static int group(links_t *a, int32_t n)
{
    perf_rank_t *r = a->r;
    perf_t *p = r->all->p;
    static _Thread_local perf_split_t split;
    memset(&split, 0, sizeof split);
    split.n = r->n;
    for (int32_t k = 0; k < n; k++) {
        split.size[k] = n;
        for (int32_t i = 0; i < n; i++)
            split.member[k][i] = i;
    }
    a->n = n;
    TOOL_TRY(perf_rank_comm(r, &split, &a->comm));
    for (int64_t bytes = p->begin; bytes <= p->end; bytes *= p->factor)
        for (a->op = PUSH; a->op < OPS; a->op++) {
            a->bytes = bytes / (16 * n) * 16 * n;
            if (a->bytes > 0)
                TOOL_TRY(line(a));
        }
    return TOOL_OK;
}

static int on_rank(perf_rank_t *r, void *arg)
{
    perf_t *p = r->all->p;
    links_t a = {.r = r};
    const size_t most = (size_t)(p->end / 16 * 16);
    RANK_CUDA(cudaMalloc(&a.send, most));
    RANK_CUDA(cudaMalloc(&a.recv, most));
    RANK_CUDA(cudaMalloc(&a.want, most));
    RANK_CUDA(colo_k_probe_fill(a.send, (int64_t)most, 1, (uint64_t)r->me + 1, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    r->all->ptr[r->me] = a.recv;
    TOOL_TRY(perf_rank_barrier(r));
    for (int32_t n = 2; n < r->n; n *= 2)
        TOOL_TRY(group(&a, n));
    TOOL_TRY(group(&a, r->n));
    RANK_CUDA(cudaFree(a.send));
    RANK_CUDA(cudaFree(a.recv));
    RANK_CUDA(cudaFree(a.want));
    return TOOL_OK;
}

int perf_links(perf_t *p)
{
    if (!p->json)
        printf("#\n#%13s  %14s  %6s  %10s  %5s  %9s  %8s  %8s  %7s\n"
               "#%13s  %14s  %6s  %10s  %5s  %9s  %8s  %8s\n",
               "size", "count", "type", "op", "GPUs", "time", "algbw", "busbw", "#wrong", "(B)",
               "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)");
    return perf_gpus_run(p, (int32_t)p->gpus, on_rank, NULL);
}
