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
 * Left to others: mailboxes, deadlines and what became of it (transfer.c), the order among
 * operations (operation.c).
 */
#include "comm/nccl/comm.h"

#include "core/hash.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

/* The mailboxes of this comm's gathers. Collective; COLO_ERR_UNBUILT: not here, on all ranks. */
static colo_status_t make(colo_comm_t *c, struct colo_p2p **out)
{
    COLO_AUTOFREE int32_t *others = malloc((size_t)c->size * sizeof *others);
    if (!others)
        return colo_fail(COLO_ERR_NOMEM, "all_gather: %d ranks", (int)c->size);
    for (int32_t k = 1; k < c->size; k++)
        others[k - 1] = (c->rank + k) % c->size;
    const colo_transfers_t pass[2] = {
        {.name = "all_gather of a head", .elem = 1, .nexposed = c->size - 1, .exposed = others},
        {.name = "nothing"}};
    return colo_p2p_make(c, pass, out);
}

/* Does the gather fit what every rank has registered? */
static colo_status_t check_memory(const struct colo_peer *p, const colo_share_t *s,
                                  const struct colo_gather *g, size_t bytes)
{
    for (int32_t k = 0; k < p->size; k++)
        if (s->bytes[k] < g->offset + bytes * (size_t)p->size)
            return colo_fail(COLO_ERR_MISMATCH,
                             "all_gather of a head: %zu bytes at offset %llu of registered memory "
                             "%d, of which rank %d has %zu",
                             bytes * (size_t)p->size, (unsigned long long)g->offset, (int)g->id,
                             (int)k, s->bytes[k]);
    return COLO_OK;
}

colo_status_t colo_gather_plan(colo_comm_t *c, const void *send, const void *recv, size_t bytes,
                               colo_stream_t stream, struct colo_gather *g)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_peer *p = colo_peer_of(c);
    const uint64_t registered = p ? colo_peer_table.registrations(c) : 0;
    *g = (struct colo_gather){.id = -1};
    if (registered == 0 || !p->whole || x->gather_none || c->size == 1 ||
        c->op.category != COLO_CATEGORY_HEAD)
        return COLO_OK;
    if (send != (const char *)recv + (size_t)c->rank * bytes ||
        !colo_peer_table.find(c, recv, bytes * (size_t)c->size, &g->id, &g->offset))
        g->id = -1;
    colo_status_t st = g->id < 0 ? COLO_OK : check_memory(p, colo_peer_memory(p, g->id), g, bytes);
    if (x->gather_agreed != registered || c->check >= 2) {
        uint64_t place = colo_hash_i64(COLO_HASH_INIT, g->id);
        place = g->id < 0 ? place : colo_hash_i64(place, (int64_t)g->offset);
        st = colo_comm_i_agree(colo_comm_i_control(c),
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
    const cudaError_t e = cudaStreamIsCapturing(stream, &capture);
    if (e != cudaSuccess)
        return colo_cuda_error("all_gather of a head", e);
    if (capture != cudaStreamCaptureStatusNone)
        return colo_fail(
            COLO_ERR_STATE,
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
    struct colo_p2p *d = ((struct colo_nccl_group *)c->impl)->gather;
    struct colo_peer *p = d->peer;
    struct colo_p2p_pass *w = &d->pass[0];
    const colo_share_t *from = colo_peer_memory(p, g->id);
    colo_k_p2p_t k = d->own->k[0];
    k.tensor[0].memory = (uint32_t)g->id;
    k.tensor[0].offset = g->offset;
    k.deadline_ns = (uint64_t)colo_comm_i_timeout(c) * 1000000u;
    atomic_store(&w->seq, c->seq);
    atomic_store(&w->deadline_ms, colo_comm_i_timeout(c));
    atomic_store(&p->used, true);
    cudaError_t e = colo_k_gather_begin(&k, stream);
    for (int32_t i = 1; i < c->size && e == cudaSuccess; i++) { /* each begins with another one */
        const int32_t r = (c->rank + i) % c->size;
        const size_t pos = (size_t)r * bytes;
        e = cudaMemcpyAsync(recv + pos, from->base[r] + g->offset + pos, bytes, cudaMemcpyDefault,
                            stream);
    }
    return e == cudaSuccess ? colo_k_gather_end(&k, stream) : e;
}
