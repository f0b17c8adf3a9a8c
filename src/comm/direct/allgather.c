/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allgather.c - a head gathered into registered memory: every rank copies the others' parts
 * out of theirs, with copy engines, which leave the multiprocessors to concurrent products.
 *
 * Decides which gathers go this way: those of a head, in place, into memory that is registered over
 * its group, at the same offset on all ranks. Ranks compare notes on that before the first one,
 * after more memory was registered, and before each at COLO_CHECK=2; in between a rank that errs is
 * found by the others' kernels (gather.cu), at the deadline at the latest. Other all-gathers stay
 * with NCCL: what runs alone is as fast there.
 *
 * Left to others: mailboxes, deadlines and what became of it (channel.c), the order among
 * operations (operation.c).
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "core/hash.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

struct colo_gathers {
    colo_direct_channel_t channel; /* first */
    colo_k_direct_t k;             /* all but the call */
};

static void wait_for_replays(colo_direct_channel_t *channel)
{
    (void)cudaDeviceSynchronize();
}

/* The mailboxes of this comm's gathers. Collective; COLO_ERR_UNBUILT: not here, on all ranks. */
static colo_status_t make(colo_comm_t *c, struct colo_gathers **out)
{
    COLO_CAPTURE_RELAXED;
    static const char name[] = "all_gather of a head";
    struct colo_gathers *d = calloc(1, sizeof *d);
    colo_status_t st = d ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "%s: %zu bytes", name, sizeof *d);
    if (d) {
        d->channel.end = wait_for_replays;
        d->channel.pass[0].name = d->channel.pass[1].name = name;
    }
    COLO_TRY(colo_direct_channel_open(c, d ? &d->channel : NULL, st));
    colo_direct_channel_fill(&d->channel, 0, &d->k);
    for (int32_t i = 1; i < c->size && st == COLO_OK; i++)
        if (colo_direct_channel_partner(&d->channel, 0, &d->k, (c->rank + i) % c->size, 1) < 0)
            st = colo_direct_channel_too_many(&d->channel, name);
    COLO_TRY(colo_direct_channel_enter(&d->channel, st));
    *out = d;
    return COLO_OK;
}

void colo_gathers_destroy(struct colo_gathers **gathers)
{
    if (*gathers)
        colo_direct_channel_destroy(&(*gathers)->channel);
    *gathers = NULL;
}

/* Does the gather fit what every rank has registered? */
static colo_status_t check_memory(const struct colo_direct *p, const colo_share_t *s,
                                  const struct colo_gather *g, size_t bytes)
{
    for (int32_t k = 0; k < p->size; k++)
        COLO_FAIL_IF(s->offers[k].bytes < g->offset + bytes * (size_t)p->size, COLO_ERR_MISMATCH,
                     "all_gather of a head: %zu bytes at offset %llu of registered memory "
                     "%d, of which rank %d has %zu",
                     bytes * (size_t)p->size, (unsigned long long)g->offset, (int)g->id, (int)k,
                     s->offers[k].bytes);
    return COLO_OK;
}

colo_status_t colo_gather_plan(colo_comm_t *c, const void *send, const void *recv, size_t bytes,
                               colo_stream_t stream, struct colo_gather *g)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_direct *p = colo_direct_of(c);
    const uint64_t registered = colo_direct_registrations(c);
    *g = (struct colo_gather){.id = -1};
    if (registered == 0 || !p->all_reach || x->gather_none || c->size == 1 ||
        c->op.category != COLO_CATEGORY_HEAD)
        return COLO_OK;
    if (send != (const char *)recv + (size_t)c->rank * bytes ||
        !colo_direct_find_memory(c, recv, bytes * (size_t)c->size, &g->id, &g->offset))
        g->id = -1;
    colo_status_t st =
        g->id < 0 ? COLO_OK : check_memory(p, colo_direct_memory_of(p, g->id), g, bytes);
    if (x->gather_agreed != registered || c->check >= 2) {
        uint64_t place = colo_hash_i64(COLO_HASH_INIT, g->id);
        place = g->id < 0 ? place : colo_hash_i64(place, (int64_t)g->offset);
        st = colo_comm_agree(colo_comm_control(c),
                             "all_gather of a head (into registered memory, at the same place of "
                             "it, on all ranks or on none)",
                             place, st);
        if (st == COLO_OK)
            x->gather_agreed = registered;
    }
    COLO_TRY(st);
    if (g->id < 0 || x->gather)
        return COLO_OK;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    COLO_TRY(colo_cuda_error("all_gather of a head", cudaStreamIsCapturing(stream, &capture)));
    COLO_FAIL_IF(capture != cudaStreamCaptureStatusNone, COLO_ERR_STATE,
                 "all_gather of a head: the first one into registered memory makes mailboxes "
                 "for it, which cannot be captured; run one before the capture");
    st = make(c, &x->gather);
    if (st == COLO_ERR_UNBUILT) {
        x->gather_none = true;
        g->id = -1;
        return COLO_OK;
    }
    return st;
}

cudaError_t colo_gather_copy(colo_comm_t *c, const struct colo_gather *g, char *recv, size_t bytes,
                             cudaStream_t stream)
{
    struct colo_gathers *d = ((struct colo_nccl_group *)c->impl)->gather;
    const colo_share_t *from = colo_direct_memory_of(d->channel.direct, g->id);
    colo_k_direct_t k = d->k;
    k.tensor[0].memory = (uint32_t)g->id;
    k.tensor[0].offset = g->offset;
    colo_direct_channel_call(&d->channel, 0, &k);
    cudaError_t e = colo_k_gather_begin(&k, stream);
    for (int32_t i = 1; i < c->size && e == cudaSuccess; i++) { /* each begins with another one */
        const int32_t r = (c->rank + i) % c->size;
        const size_t pos = (size_t)r * bytes;
        e = cudaMemcpyAsync(recv + pos, from->base[r] + g->offset + pos, bytes, cudaMemcpyDefault,
                            stream);
    }
    return e == cudaSuccess ? colo_k_gather_end(&k, stream) : e;
}
