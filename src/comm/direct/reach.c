/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reach.c - which ranks of a comm reach each other's memory, found out by trying.
 *
 * What CUDA says about two devices is not all: a container may not open another one's handle, and a
 * link may carry nothing. So at open each rank brings a page of memory, writes a word into every
 * page that it can open, and reads it back. Each rank then looks for these words in its own page. A
 * pair of ranks is in reach if both ways have worked. All ranks know whether all pairs are.
 */
#include "comm/direct/registry.h"

#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>

enum { PAGE = 4096 };

void colo_direct_lose(struct colo_direct *p, int32_t rank, const char *why)
{
    p->reach[rank] = false;
    if (!p->why[0])
        snprintf(p->why, sizeof p->why, "ranks %d and %d (world ranks %lld and %lld): %s",
                 (int)p->rank, (int)rank, (long long)p->world[p->rank], (long long)p->world[rank],
                 why);
}

static bool both_ways(const uint64_t *pairs, size_t words, size_t a, size_t b)
{
    return pairs[a * words + b / 64] >> b % 64 & pairs[b * words + a / 64] >> a % 64 & 1;
}

bool colo_direct_reaches(const colo_comm_t *c, int32_t a, int32_t b)
{
    const struct colo_direct *p = colo_direct_of(c);
    return p->all_reach ||
           (a >= 0 && both_ways(p->pairs, ((size_t)p->size + 63) / 64, (size_t)a, (size_t)b));
}

const char *colo_direct_why(const colo_comm_t *c)
{
    return colo_direct_of(c)->why;
}

/* Device memory of a trial: a word from each rank, then this rank's view of their pages and what
 * came back from these. */
struct trial {
    uint64_t *page;
    uint64_t *host; /* [3][size] */
};

static colo_status_t trial_new(struct colo_direct *p, struct trial *t)
{
    const size_t bytes = 3 * (size_t)p->size * sizeof *t->page;
    t->host = calloc(3 * (size_t)p->size, sizeof *t->host);
    COLO_FAIL_IF(!t->host, COLO_ERR_NOMEM, "peer memory: %d ranks", (int)p->size);
    cudaError_t e = cudaMalloc((void **)&t->page, bytes > PAGE ? bytes : PAGE);
    COLO_THEN(e, cudaMemsetAsync(t->page, 0, bytes, p->stream));
    COLO_THEN(e, cudaStreamSynchronize(p->stream));
    return colo_cuda_error("peer memory", e);
}

/* Copies the trial's host list @i to the device, or back, and waits. */
static cudaError_t move(const struct colo_direct *p, const struct trial *t, int i, bool back)
{
    uint64_t *host = t->host + (size_t)i * (size_t)p->size;
    uint64_t *device = t->page + (size_t)i * (size_t)p->size;
    cudaError_t e = cudaMemcpyAsync(back ? host : device, back ? device : host,
                                    (size_t)p->size * sizeof *host, cudaMemcpyDefault, p->stream);
    return e == cudaSuccess ? cudaStreamSynchronize(p->stream) : e;
}

static colo_status_t write_words(struct colo_direct *p, const struct trial *t,
                                 const colo_share_t *s)
{
    const size_t n = (size_t)p->size;
    for (size_t r = 0; r < n; r++)
        t->host[n + r] = (uint64_t)(uintptr_t)s->base[r];
    cudaError_t e = move(p, t, 1, false);
    COLO_THEN(e, colo_k_direct_try(t->page + n, t->page + 2 * n, p->size, p->rank, p->stream));
    COLO_THEN(e, move(p, t, 2, true));
    for (int32_t r = 0; r < p->size && e == cudaSuccess; r++)
        if (p->reach[r] && t->host[2 * n + (size_t)r] != COLO_K_TRIAL + (uint64_t)p->rank)
            colo_direct_lose(p, r, "a word written into the other one's memory does not come back");
    return colo_cuda_error("peer memory", e);
}

/* Every rank's reach: the same on all ranks. */
static colo_status_t compare(colo_comm_t *c, struct colo_direct *p)
{
    const size_t n = (size_t)p->size, words = (n + 63) / 64;
    uint64_t *mine = p->pairs + n * words;
    for (size_t r = 0; r < n; r++)
        mine[r / 64] |= (uint64_t)p->reach[r] << r % 64;
    COLO_TRY(colo_direct_gather(c, mine, p->pairs, words * sizeof *mine));
    bool any = false;
    p->all_reach = true;
    for (size_t a = 0; a < n; a++)
        for (size_t b = 0; b < n; b++) {
            const bool both = both_ways(p->pairs, words, a, b);
            p->all_reach = p->all_reach && both;
            any = any || (both && a != b);
            if (a == (size_t)p->rank && p->reach[b] && !both)
                colo_direct_lose(p, (int32_t)b, "the other one does not reach this one's memory");
        }
    return any ? COLO_OK
               : colo_fail(COLO_ERR_UNBUILT, "no two ranks reach each other's memory; %s", p->why);
}

static colo_status_t run(colo_comm_t *c, struct colo_direct *p, const struct trial *t,
                         const colo_share_t *s)
{
    COLO_TRY(colo_direct_agree_on(c, write_words(p, t, s))); /* now all words are written */
    COLO_TRY(colo_direct_agree_on(c, colo_cuda_error("peer memory", move(p, t, 0, true))));
    for (int32_t r = 0; r < p->size; r++)
        if (p->reach[r] && t->host[r] != COLO_K_TRIAL + (uint64_t)r)
            colo_direct_lose(p, r, "a word of the other one has not arrived");
    return compare(c, p);
}

colo_status_t colo_direct_try(colo_comm_t *c, struct colo_direct *p)
{
    const size_t n = (size_t)p->size, words = (n + 63) / 64;
    struct trial t = {0};
    colo_share_t s = {0};
    p->pairs = calloc((n + 1) * words, sizeof *p->pairs);
    colo_status_t st =
        p->pairs ? trial_new(p, &t) : colo_fail(COLO_ERR_NOMEM, "peer memory: %zu ranks", n);
    COLO_TRY_GOTO(st, colo_direct_agree_on(c, st), done);
    st = colo_direct_share(c, p, t.page, n * sizeof *t.page, NULL, &s);
    COLO_THEN(st, run(c, p, &t, &s));
    p->tried = true;
    st = colo_direct_close(c, &s, st);
    if (s.stays) /* a rank that has not heard of it may still write there */
        t.page = NULL;
done:
    cudaFree(t.page);
    free(t.host);
    return st;
}
