/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flight.c - the last operations of a rank in a file: what colo_comm_dump() says of each comm that
 * the rank made from one world, that of the call first, and how many operations ended with comms
 * that are destroyed.
 *
 * `python -m colobridge flight` says which rank is missing, and makes of the files what the
 * analyzer of PyTorch's Flight Recorder reads.
 */
#include "comm/comm.h"
#include "core/env.h"
#include "core/list.h"
#include "core/lock.h"
#include "core/signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the comms of this process ---- */

COLO_LOCK(lock);    /* what follows; in a child also its parent's comms, of other worlds */
COLO_LOCK(writing); /* one file at a time: threads of a process write to one name first */
static colo_comm_t *newest;
static uint64_t worlds;

void colo_comm_register(colo_comm_t *comm)
{
    COLO_HOLD(&lock);
    comm->world = ++worlds;
    comm->older = newest;
    newest = comm;
}

void colo_comm_relate(colo_comm_t *comm, const colo_comm_t *parent, uint64_t tag)
{
    uint64_t id = colo_hash_i64(colo_hash_i64(COLO_HASH_INIT, (int64_t)parent->id), (int64_t)tag);
    for (int32_t r = 0; r < comm->size; r++)
        id = colo_hash_i64(id, comm->world_rank[r]);
    COLO_HOLD(&lock);
    comm->world = parent->world;
    comm->id = id;
    comm->transport = parent->transport;
    memcpy(comm->recorder, parent->recorder, sizeof comm->recorder);
}

void colo_comm_set_recorder(colo_comm_t *comm, const char *prefix)
{
    COLO_HOLD(&lock);
    snprintf(comm->recorder, sizeof comm->recorder, "%s", prefix);
}

void colo_comm_unregister(colo_comm_t *comm)
{
    colo_comm_t *relative = NULL;
    COLO_HOLD(&lock);
    for (colo_comm_t **link = &newest; *link;)
        if (*link == comm) {
            *link = comm->older;
        } else {
            relative = (*link)->world == comm->world ? *link : relative;
            link = &(*link)->older;
        }
    if (relative)
        relative->ended += comm->ended + comm->seq;
}

/* ---- the file ---- */

/* What colo_comm_dump() says of @comm, at the end of @text. */
static bool add_comm(colo_list_t *text, const colo_comm_t *comm, const colo_status_t *state,
                     const char *error_message)
{
    enum { BEHIND = 3 }; /* "]}" or ",", and NUL */
    size_t n = 0, left;
    do {
        if (!colo_list_reserve(text, text->n + (int64_t)n + BEHIND, 1))
            return false;
        left = (size_t)(text->cap - text->n);
        n = colo_comm_dump_state(comm, state, error_message, (char *)text->items + text->n, left);
    } while (n + BEHIND > left);
    text->n += (int64_t)n;
    return true;
}

/* Made in memory: a file system may hang, and a thread that makes or destroys a comm wants the lock
 * meanwhile. */
static colo_status_t make_text(const colo_comm_t *comm, colo_status_t state,
                               const char *error_message, colo_list_t *text)
{
    uint64_t ended = 0;
    COLO_FAIL_IF(!colo_list_reserve(text, 1 << 16, 1), COLO_ERR_NOMEM, "flight_record");
    COLO_HOLD(&lock);
    for (const colo_comm_t *other = newest; other; other = other->older)
        ended += other->world == comm->world ? other->ended : 0;
    text->n = snprintf(text->items, (size_t)text->cap, "{\"ended\":%llu,\"comms\":[",
                       (unsigned long long)ended);
    bool ok = add_comm(text, comm, &state, error_message);
    for (const colo_comm_t *other = newest; ok && other; other = other->older)
        if (other != comm && other->world == comm->world) {
            ((char *)text->items)[text->n++] = ',';
            ok = add_comm(text, other, NULL, NULL);
        }
    COLO_FAIL_IF(!ok, COLO_ERR_NOMEM, "flight_record");
    memcpy((char *)text->items + text->n, "]}\n", 3);
    text->n += 3;
    return COLO_OK;
}

static colo_status_t write_record(const colo_comm_t *comm, const char *prefix, colo_status_t state,
                                  const char *error_message)
{
    char path[4096], part[4096 + 32];
    const int length =
        snprintf(path, sizeof path, "%s%lld", prefix, (long long)comm->world_rank[comm->rank]);
    COLO_FAIL_IF(length >= (int)sizeof path, COLO_ERR_ARG,
                 "flight_record: the prefix has %zu bytes, expected < 4000", strlen(prefix));
    snprintf(part, sizeof part, "%s.%d.part", path, (int)getpid());
    colo_list_t text = {0};
    const colo_status_t st = make_text(comm, state, error_message, &text);
    COLO_AUTOFREE void *all = text.items;
    COLO_TRY(st);
    COLO_HOLD(&writing);
    COLO_HOLD_SIGNALS();
    /* Left by a process that ended; in a folder of all users, perhaps a link. */
    (void)unlink(part);
    errno = 0;
    FILE *f = fopen(part, "wxe");
    const bool written = f && fwrite(all, 1, (size_t)text.n, f) == (size_t)text.n,
               closed = f && fclose(f) == 0;
    const bool in_place = written && closed && rename(part, path) == 0;
    const int error = errno;
    if (!in_place)
        (void)unlink(part);
    return in_place ? COLO_OK
                    : colo_fail(COLO_ERR_IO, "flight_record: %s: %s", path, strerror(error));
}

colo_status_t colo_comm_flight_record(const colo_comm_t *comm, const char *prefix)
{
    COLO_FAIL_IF(!comm || !prefix || !*prefix, COLO_ERR_ARG, "flight_record: %s",
                 !comm ? "comm is NULL" : "no prefix, expected the beginning of a file name");
    if (!colo_comm_is_own(comm, "flight_record"))
        return COLO_ERR_STATE;
    char error_message[1000] = "";
    const colo_status_t state = comm->backend->state(comm, error_message, sizeof error_message);
    return write_record(comm, prefix, state, error_message);
}

void colo_comm_record_failure(colo_comm_t *comm, const char *why)
{
    const char *prefix = NULL;
    char program[COLO_RECORDER_MAX];
    bool from_env;
    const colo_error_t earlier = colo_error_save();
    const bool allowed = colo_env_text("COLO_FLIGHT_RECORDER", &prefix) == COLO_OK;
    (void)colo_env_value("COLO_FLIGHT_RECORDER", &from_env);
    pthread_mutex_lock(&lock);
    memcpy(program, comm->recorder, sizeof program);
    if (!from_env)
        prefix = program;
    const bool asked = allowed && *prefix && !comm->recorded;
    for (colo_comm_t *other = newest; asked && other; other = other->older)
        other->recorded |= other->world == comm->world;
    pthread_mutex_unlock(&lock);
    if (asked && why) /* and no log, whose sink may want what is locked */
        (void)write_record(comm, prefix, COLO_ERR_ABORTED, why);
    else if (asked && colo_comm_flight_record(comm, prefix) < 0)
        colo_log(COLO_LOG_WARN, "%s", colo_last_error());
    (void)colo_error_restore(COLO_OK, &earlier);
}
