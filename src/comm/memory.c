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
#include "comm/direct.h"

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
static colo_status_t share(colo_comm_t *comm, colo_transport_t transport, colo_memory_t *memory)
{
    const colo_direct_memory_t *direct = comm->backend->direct;
    if (!direct || comm->size == 1 || transport == COLO_TRANSPORT_NCCL)
        return COLO_OK;
    colo_status_t st = direct->open(comm);
    COLO_THEN(st, direct->share(comm, memory));
    if (st == COLO_OK) {
        memory->direct = direct;
        memory->is_direct = true;
    }
    if (st != COLO_ERR_UNBUILT || transport == COLO_TRANSPORT_PEER || colo_comm_check(comm) < 0)
        return st;
    colo_log(COLO_LOG_INFO, "memory: not peer-to-peer: %s", colo_last_error());
    return COLO_OK;
}

/* Memory that no other rank reaches; all ranks get theirs, or none. */
static colo_status_t alloc_alone(colo_comm_t *comm, colo_memory_t *memory)
{
    colo_status_t st = colo_mem_alloc(memory->mem, memory->bytes, &memory->data);
    return comm->size > 1 ? colo_comm_agree(comm, "memory", 0, st) : st;
}

static colo_status_t make(colo_comm_t *comm, void *ptr, size_t bytes, bool owned,
                          colo_memory_t **out)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "memory: comm is NULL");
    COLO_TRY(colo_comm_alive(comm, "memory"));
    colo_memory_t *memory = calloc(1, sizeof *memory);
    colo_status_t st = COLO_OK;
    colo_transport_t transport = COLO_TRANSPORT_AUTO;
    if (!memory)
        st = colo_fail(COLO_ERR_NOMEM, "memory: %zu bytes", sizeof *memory);
    else if (!out)
        st = colo_fail(COLO_ERR_ARG, "memory: memory is NULL");
    else if (!owned && !ptr && bytes > 0)
        st = colo_fail(COLO_ERR_ARG, "register: ptr is NULL for %zu bytes", bytes);
    else if (bytes > (size_t)INT64_MAX - MULTIPLE)
        st = colo_fail(COLO_ERR_ARG, "memory: %zu bytes, at most 2^63", bytes);
    else
        st = colo_transport_wanted(comm, COLO_TRANSPORT_AUTO, &transport);
    /* all ranks come here, with their errors, before any goes on */
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_fields_add(&fields, "memory", "%s", owned ? "allocated" : "registered");
    colo_fields_add(&fields, "COLO_TRANSPORT", "%s", colo_transport_name(transport));
    if (comm->size > 1)
        st = colo_comm_agree_fields(comm, "memory create", &fields, st);
    COLO_TRY_GOTO(st, st, fail);
    memory->comm = comm;
    memory->process = comm->process;
    memory->data = ptr;
    memory->bytes = owned ? (bytes + MULTIPLE - 1) / MULTIPLE * MULTIPLE : bytes;
    memory->owned = owned;
    memory->mem = colo_comm_mem(comm);
    COLO_TRY_GOTO(st, share(comm, transport, memory), fail);
    if (!memory->is_direct && owned)
        COLO_TRY_GOTO(st, alloc_alone(comm, memory), fail);
    *out = memory;
    return COLO_OK;
fail:
    if (memory && owned)
        colo_mem_free(memory->mem, memory->data);
    free(memory);
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
    colo_memory_t *made = *memory;
    *memory = NULL;
    if (made->direct && made->process != (int32_t)getpid())
        return; /* the device is the parent's, too */
    if (made->direct)
        made->direct->unshare(made);
    else if (made->owned)
        colo_mem_free(made->mem, made->data);
    free(made);
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
    return memory && memory->is_direct;
}

bool colo_memory_reaches(const colo_memory_t *memory, int32_t a, int32_t b)
{
    const colo_comm_t *comm = memory && memory->is_direct ? memory->comm : NULL;
    return comm && a >= 0 && a < comm->size && b >= 0 && b < comm->size &&
           comm->backend->direct->reaches(comm, a, b);
}

bool colo_memory_find(const colo_comm_t *comm, const void *ptr, size_t bytes)
{
    int32_t id;
    uint64_t offset;
    return comm && comm->backend->direct && colo_comm_is_own(comm, "memory_find") &&
           comm->backend->direct->find(comm, ptr, bytes, &id, &offset);
}

/* ---- COLO_TRANSPORT ---- */

const char *colo_transport_name(colo_transport_t transport)
{
    static const char *const names[] = {"auto", "nccl", "peer"};
    return names[transport];
}

colo_status_t colo_transport_wanted(const colo_comm_t *comm, colo_transport_t asked,
                                    colo_transport_t *transport)
{
    int32_t word;
    bool from_env;
    COLO_TRY(colo_env_word("COLO_TRANSPORT", &word)); /* in the order of the enumerators */
    (void)colo_env_value("COLO_TRANSPORT", &from_env);
    const colo_transport_t says[] = {(colo_transport_t)word, asked,
                                     from_env ? COLO_TRANSPORT_AUTO : comm->transport};
    *transport = COLO_TRANSPORT_AUTO;
    for (int i = 0; i < 3 && *transport == COLO_TRANSPORT_AUTO; i++)
        if (says[i] <= COLO_TRANSPORT_PEER) /* the other names one between processes */
            *transport = says[i];
    return COLO_OK;
}
