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

static int32_t gives_to(const links_t *links)
{
    return links->op == PAIRS ? links->r->me ^ 1 : (links->r->me + 1) % links->n;
}

static int32_t gets_from(const links_t *links)
{
    return links->op == PAIRS ? links->r->me ^ 1 : (links->r->me + links->n - 1) % links->n;
}

static int run(void *arg, cudaStream_t stream)
{
    links_t *links = arg;
    perf_rank_t *r = links->r;
    const perf_nccl_t *nccl = &r->all->nccl;
    const size_t bytes = (size_t)links->bytes;
    if (r->me >= links->n)
        return TOOL_OK;
    void *there = r->all->ptr[gives_to(links)];
    if (links->op == PUSH) {
        RANK_CUDA(colo_k_probe_push(&(colo_k_push_t){there, links->send, links->bytes}, 1, stream));
    } else if (links->op == COPY) {
        RANK_CUDA(cudaMemcpyPeerAsync(there, gives_to(links), links->send, r->me, bytes, stream));
    } else if (links->op == ALL_GATHER) {
        RANK_NCCL(nccl->all_gather(links->send, links->recv, bytes / (size_t)links->n, ncclInt8,
                                   links->comm, stream));
    } else {
        RANK_NCCL(nccl->group_start());
        RANK_NCCL(nccl->send(links->send, bytes, ncclInt8, gives_to(links), links->comm, stream));
        RANK_NCCL(nccl->recv(links->recv, bytes, ncclInt8, gets_from(links), links->comm, stream));
        RANK_NCCL(nccl->group_end());
    }
    return TOOL_OK;
}

static int check(links_t *links, int64_t *wrong)
{
    perf_rank_t *r = links->r;
    unsigned long long found = 0;
    *wrong = 0;
    RANK_CUDA(cudaMemsetAsync(r->count, 0, sizeof found, r->stream));
    for (int32_t k = 0; k < (links->op == ALL_GATHER ? links->n : 1) && r->me < links->n; k++) {
        const int64_t part = links->op == ALL_GATHER ? links->bytes / links->n : links->bytes;
        const int32_t from = links->op == ALL_GATHER ? k : gets_from(links);
        RANK_CUDA(colo_k_probe_fill(links->want, part, 1, (uint64_t)from + 1, r->stream));
        RANK_CUDA(colo_k_probe_diff((char *)links->recv + k * part, links->want, part, r->count,
                                    r->stream));
    }
    TOOL_TRY(perf_rank_wait(r));
    RANK_CUDA(cudaMemcpy(&found, r->count, sizeof found, cudaMemcpyDeviceToHost));
    *wrong = (int64_t)found;
    return perf_rank_reduce(r, wrong, COLO_REDOP_SUM);
}

static int line(links_t *links)
{
    perf_rank_t *r = links->r;
    perf_t *p = r->all->p;
    double us = 0, best = 0;
    int64_t wrong = 0;
    if ((links->op == PAIRS && (links->n % 2 || links->n == 2)) ||
        (links->op <= COPY && !r->all->reach))
        return TOOL_OK; /* two GPUs are a pair anyway */
    RANK_CUDA(cudaMemsetAsync(links->recv, 0xff, (size_t)links->bytes, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    TOOL_TRY(perf_rank_barrier(r));
    TOOL_TRY(perf_rank_time(r, run, links, perf_batch(links->bytes), &us, &best));
    TOOL_TRY(check(links, &wrong));
    if (r->me != 0)
        return TOOL_OK;
    const double alg = (double)links->bytes / us * 1e-3,
                 bus = links->op == ALL_GATHER ? alg * (links->n - 1) / links->n : alg;
    p->wrong += wrong;
    if (!p->json)
        printf("%14lld  %14lld  %6s  %10s  %5d  %9.2f  %8.1f  %8.1f  %7lld\n",
               (long long)links->bytes, (long long)links->bytes / 2, "bf16", names[links->op],
               (int)links->n, us, alg, bus, (long long)wrong);
    return perf_doc_add(p, "link",
                        json_pack("{s:s,s:i,s:I,s:f,s:f,s:f,s:f,s:I}", "op", names[links->op],
                                  "gpus", (int)links->n, "bytes", (json_int_t)links->bytes,
                                  "time_us", us, "best_us", best, "algbw_gbs", alg, "busbw_gbs",
                                  bus, "wrong", (json_int_t)wrong));
}

/* The first @n ranks; the others look on. */
static int group(links_t *links, int32_t n)
{
    perf_rank_t *r = links->r;
    perf_t *p = r->all->p;
    perf_split_t split = {.color = {0}};
    for (int32_t k = 0; k < r->n; k++) {
        split.color[k] = k < n ? 0 : -1;
        split.key[k] = k;
    }
    links->n = n;
    TOOL_TRY(perf_rank_comm(r, &split, &links->comm));
    for (int64_t bytes = p->begin; bytes <= p->end; bytes *= p->factor)
        for (links->op = PUSH; links->op < OPS; links->op++) {
            links->bytes = bytes / (16 * n) * 16 * n;
            if (links->bytes > 0)
                TOOL_TRY(line(links));
        }
    return TOOL_OK;
}

static int on_rank(perf_rank_t *r, void *arg)
{
    perf_t *p = r->all->p;
    links_t links = {.r = r};
    const size_t most = (size_t)(p->end / 16 * 16);
    RANK_CUDA(cudaMalloc(&links.send, most));
    RANK_CUDA(cudaMalloc(&links.recv, most));
    RANK_CUDA(cudaMalloc(&links.want, most));
    RANK_CUDA(colo_k_probe_fill(links.send, (int64_t)most, 1, (uint64_t)r->me + 1, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    r->all->ptr[r->me] = links.recv;
    TOOL_TRY(perf_rank_barrier(r));
    for (int32_t n = 2; n < r->n; n *= 2)
        TOOL_TRY(group(&links, n));
    TOOL_TRY(group(&links, r->n));
    RANK_CUDA(cudaFree(links.send));
    RANK_CUDA(cudaFree(links.recv));
    RANK_CUDA(cudaFree(links.want));
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
