/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - the front of registered memory: arguments, and what happens where nothing can be
 * registered.
 *
 * A comm whose backend has no peer memory, and one whose ranks do not all reach each other, gives
 * an object that holds the pointer and is not direct: a program registers the same way everywhere.
 * How memory is made known to other ranks is comm-peer.c's.
 */
#include "comm/peer.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/memory.h"
#include "core/try.h"

#include <stdlib.h>
#include <string.h>

enum { MULTIPLE = 256 };

/* Is this comm's memory to be shared? Collective. COLO_OK with *ops NULL: no, for ranks that do
 * not reach each other; what else goes wrong is an error on all of them. */
static colo_status_t ops_of(colo_comm_t *c, const colo_peer_ops_t **ops)
{
    const colo_peer_ops_t *peer = c->ops->peer;
    colo_transport_t transport = COLO_TRANSPORT_AUTO;
    *ops = NULL;
    COLO_TRY(colo_transport_wanted(&transport));
    if (!peer || c->size == 1 || transport == COLO_TRANSPORT_NCCL)
        return COLO_OK;
    colo_status_t st = peer->open(c);
    if (st == COLO_OK)
        *ops = peer;
    if (st != COLO_ERR_UNBUILT || transport == COLO_TRANSPORT_PEER || colo_comm_check(c) < 0)
        return st;
    colo_log(COLO_LOG_INFO, "memory: not direct: %s", colo_last_error());
    return COLO_OK;
}

static colo_status_t make(colo_comm_t *c, void *ptr, size_t bytes, bool owned, colo_memory_t **out)
{
    if (!c)
        return colo_fail(COLO_ERR_ARG, "memory: comm is NULL");
    COLO_TRY(colo_comm_i_alive(c, "memory"));
    colo_memory_t *m = calloc(1, sizeof *m);
    colo_status_t st = COLO_OK;
    const colo_peer_ops_t *ops = NULL;
    if (!m)
        st = colo_fail(COLO_ERR_NOMEM, "memory: %zu bytes", sizeof *m);
    else if (!out)
        st = colo_fail(COLO_ERR_ARG, "memory: memory is NULL");
    else if (!owned && !ptr && bytes > 0)
        st = colo_fail(COLO_ERR_ARG, "register: ptr is NULL for %zu bytes", bytes);
    else if (bytes > (size_t)INT64_MAX - MULTIPLE)
        st = colo_fail(COLO_ERR_ARG, "memory: %zu bytes, at most 2^63", bytes);
    /* all ranks come here, with their errors, before anybody goes on */
    if (c->size > 1)
        st = colo_comm_i_agree(c, "memory", owned, st);
    COLO_TRY_GOTO(st, st, fail);
    m->comm = c;
    m->data = ptr;
    m->bytes = owned ? (bytes + MULTIPLE - 1) / MULTIPLE * MULTIPLE : bytes;
    m->owned = owned;
    m->mem = c->ops->peer ? COLO_CUDA : COLO_HOST;
    COLO_TRY_GOTO(st, ops_of(c, &ops), fail);
    if (ops)
        st = ops->share(c, m);
    else if (owned)
        st = colo_mem_alloc(m->mem, m->bytes, &m->data);
    COLO_TRY_GOTO(st, st, fail);
    m->ops = ops;
    m->direct = ops != NULL;
    *out = m;
    return COLO_OK;
fail:
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

bool colo_memory_is_direct(const colo_memory_t *memory)
{
    return memory && memory->direct;
}

bool colo_memory_find(const colo_comm_t *comm, const void *ptr, size_t bytes)
{
    int32_t id;
    uint64_t offset;
    return comm && comm->ops->peer && comm->ops->peer->find(comm, ptr, bytes, &id, &offset);
}

/* ---- COLO_TRANSPORT ---- */

colo_status_t colo_transport_wanted(colo_transport_t *transport)
{
    static const char *const names[] = {"auto", "nccl", "peer"};
    const char *text = colo_env_value("COLO_TRANSPORT", NULL);
    for (int i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0) {
            *transport = (colo_transport_t)i;
            return COLO_OK;
        }
    return colo_fail(COLO_ERR_ARG, "COLO_TRANSPORT is '%.40s', expected auto, nccl or peer", text);
}
