/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - the front of registered memory: arguments, and what happens where nothing can be
 * registered.
 *
 * A comm whose backend has no peer memory, and one whose ranks do not all reach each other, or not
 * this memory, gives an object that holds the pointer and is not peer-to-peer: a program registers
 * the same way everywhere. COLO_ERR_UNBUILT is the one status that means "not here", and the
 * backend sees to it that all ranks have it; whatever else goes wrong is an error on all of them.
 * How memory is made known to other ranks is registry.c's.
 */
#include "comm/peer.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/memory.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MULTIPLE = 256 };

/* Shares it, when peers are to reach it. Collective. COLO_OK and not peer-to-peer where ranks do
 * not reach each other or cannot open what another one offers, the same on all of them; what else
 * goes wrong is an error on all. */
static colo_status_t share(colo_comm_t *c, colo_transport_t transport, colo_memory_t *m)
{
    const colo_peer_ops_t *peer = c->ops->peer;
    if (!peer || c->size == 1 || transport == COLO_TRANSPORT_NCCL)
        return COLO_OK;
    colo_status_t st = peer->open(c);
    if (st == COLO_OK)
        st = peer->share(c, m);
    if (st == COLO_OK) {
        m->ops = peer;
        m->p2p = true;
    }
    if (st != COLO_ERR_UNBUILT || transport == COLO_TRANSPORT_PEER || colo_comm_check(c) < 0)
        return st;
    colo_log(COLO_LOG_INFO, "memory: not peer-to-peer: %s", colo_last_error());
    return COLO_OK;
}

/* Memory that no other rank reaches; all ranks get theirs, or none. */
static colo_status_t alloc_alone(colo_comm_t *c, colo_memory_t *m)
{
    colo_status_t st = colo_mem_alloc(m->mem, m->bytes, &m->data);
    return c->size > 1 ? colo_comm_i_agree(c, "memory", 0, st) : st;
}

static colo_status_t make(colo_comm_t *c, void *ptr, size_t bytes, bool owned, colo_memory_t **out)
{
    if (!c)
        return colo_fail(COLO_ERR_ARG, "memory: comm is NULL");
    COLO_TRY(colo_comm_i_alive(c, "memory"));
    colo_memory_t *m = calloc(1, sizeof *m);
    colo_status_t st = COLO_OK;
    colo_transport_t transport = COLO_TRANSPORT_AUTO;
    if (!m)
        st = colo_fail(COLO_ERR_NOMEM, "memory: %zu bytes", sizeof *m);
    else if (!out)
        st = colo_fail(COLO_ERR_ARG, "memory: memory is NULL");
    else if (!owned && !ptr && bytes > 0)
        st = colo_fail(COLO_ERR_ARG, "register: ptr is NULL for %zu bytes", bytes);
    else if (bytes > (size_t)INT64_MAX - MULTIPLE)
        st = colo_fail(COLO_ERR_ARG, "memory: %zu bytes, at most 2^63", bytes);
    else
        st = colo_transport_wanted(&transport);
    /* all ranks come here, with their errors, before any goes on */
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_fields_add(&fields, "memory", "%s", owned ? "allocated" : "registered");
    colo_fields_add(&fields, "COLO_TRANSPORT", "%s", colo_transport_name(transport));
    if (c->size > 1)
        st = colo_comm_i_agree_fields(c, "memory create", &fields, st);
    COLO_TRY_GOTO(st, st, fail);
    m->comm = c;
    m->process = c->process;
    m->data = ptr;
    m->bytes = owned ? (bytes + MULTIPLE - 1) / MULTIPLE * MULTIPLE : bytes;
    m->owned = owned;
    m->mem = colo_comm_i_mem(c);
    COLO_TRY_GOTO(st, share(c, transport, m), fail);
    if (!m->p2p && owned)
        COLO_TRY_GOTO(st, alloc_alone(c, m), fail);
    *out = m;
    return COLO_OK;
fail:
    if (m && owned)
        colo_mem_free(m->mem, m->data);
    free(m);
    return st;
}

colo_status_t colo_memory_register(colo_comm_t *comm, void *ptr, size_t bytes,
                                   colo_memory_t **memory)
{
    return make(comm, ptr, bytes, false, memory);
}

colo_status_t colo_memory_alloc(colo_comm_t *comm, size_t bytes, colo_memory_t **memory)
{
    return make(comm, NULL, bytes, true, memory);
}

void colo_memory_destroy(colo_memory_t **memory)
{
    if (!memory || !*memory)
        return;
    colo_memory_t *m = *memory;
    *memory = NULL;
    if (m->ops && m->process != (int32_t)getpid())
        return; /* the device is the parent's, too */
    if (m->ops)
        m->ops->unshare(m);
    else if (m->owned)
        colo_mem_free(m->mem, m->data);
    free(m);
}

void *colo_memory_data(const colo_memory_t *memory)
{
    return memory ? memory->data : NULL;
}

size_t colo_memory_bytes(const colo_memory_t *memory)
{
    return memory ? memory->bytes : 0;
}

bool colo_memory_is_p2p(const colo_memory_t *memory)
{
    return memory && memory->p2p;
}

bool colo_memory_reaches(const colo_memory_t *memory, int32_t a, int32_t b)
{
    const colo_comm_t *c = memory && memory->p2p ? memory->comm : NULL;
    return c && a >= 0 && a < c->size && b >= 0 && b < c->size && c->ops->peer->reaches(c, a, b);
}

bool colo_memory_find(const colo_comm_t *comm, const void *ptr, size_t bytes)
{
    int32_t id;
    uint64_t offset;
    return comm && comm->ops->peer && colo_comm_i_own(comm, "memory_find") &&
           comm->ops->peer->find(comm, ptr, bytes, &id, &offset);
}

/* ---- COLO_TRANSPORT ---- */

const char *colo_transport_name(colo_transport_t transport)
{
    static const char *const names[] = {"auto", "nccl", "peer"};
    return names[transport];
}

colo_status_t colo_transport_wanted(colo_transport_t *transport)
{
    int32_t word;
    COLO_TRY(colo_env_word("COLO_TRANSPORT", &word));
    /* both are in the order auto, nccl, peer; ucx is none of bridges between GPUs */
    *transport = word <= COLO_TRANSPORT_PEER ? (colo_transport_t)word : COLO_TRANSPORT_AUTO;
    return COLO_OK;
}
