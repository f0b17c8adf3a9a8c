/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.c - what a communicator is, whatever its backend: ranks, names, settings, life and death.
 *
 * A comm belongs to one thread. What other threads may touch (abort, dump) goes through the
 * backend's error state or the lock. A comm that failed keeps answering getters, dump, check and
 * destroy.
 *
 * Left to others: operations (comm/collectives.c), counters and records (stats.c), agreement
 * (agree.c), smaller comms (split.c), moving and waiting (the backends).
 */
#include "comm/comm.h"
#include "core/env.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- life and getters ---- */

colo_status_t colo_comm_new(colo_comm_t **comm, const colo_comm_backend_t *backend, int32_t rank,
                            int32_t size, const int64_t *world_rank)
{
    colo_comm_t *made = calloc(1, sizeof *made);
    int64_t *world = malloc(sizeof *world * (size_t)size);
    pthread_mutex_t *lock = malloc(sizeof *lock);
    struct colo_parts *parts = colo_parts_new(size);
    int64_t check, ranges;
    if (!made || !world || !lock || !parts) {
        free(made);
        free(world);
        free(lock);
        colo_parts_free(parts);
        return colo_fail(COLO_ERR_NOMEM, "comm: no memory for %d ranks", (int)size);
    }
    for (int32_t r = 0; r < size; r++)
        world[r] = world_rank ? world_rank[r] : r;
    pthread_mutex_init(lock, NULL);
    made->backend = backend;
    made->process = (int32_t)getpid();
    made->rank = rank;
    made->size = size;
    made->world_rank = world;
    made->lock = lock;
    made->parts = parts;
    (void)colo_env_i64("COLO_TIMEOUT_MS",
                       &made->timeout_ms); /* refused where a first comm is made */
    (void)colo_env_i64("COLO_CHECK", &check);
    made->check = (int32_t)check;
    (void)colo_env_i64("COLO_NVTX", &ranges);
    if (ranges == 1)
        colo_range_init();
    __atomic_store_n(&colo_ranges, ranges == 1, __ATOMIC_RELEASE);
    colo_comm_register(made);
    *comm = made;
    return COLO_OK;
}

void colo_comm_destroy(colo_comm_t **comm)
{
    if (!comm || !*comm)
        return;
    colo_comm_t *made = *comm;
    *comm = NULL;
    if (!colo_comm_is_own(made, "comm_destroy"))
        return; /* a thread that fork() did not copy may hold its locks: the copy stays */
    while (made->part) {
        colo_comm_t *part = made->part;
        made->part = part->next_part;
        colo_comm_destroy(&part);
    }
    colo_comm_unregister(made);
    if (made->impl)
        made->backend->destroy(made);
    pthread_mutex_destroy(made->lock);
    free(made->lock);
    free(made->world_rank);
    free(made->node);
    colo_parts_free(made->parts);
    free(made);
}

int32_t colo_comm_rank(const colo_comm_t *comm)
{
    return comm ? comm->rank : -1;
}

int32_t colo_comm_size(const colo_comm_t *comm)
{
    return comm ? comm->size : 0;
}

int64_t colo_comm_world_rank(const colo_comm_t *comm, int32_t rank)
{
    return comm && rank >= 0 && rank < comm->size ? comm->world_rank[rank] : -1;
}

colo_status_t colo_comm_set_world_ranks(colo_comm_t *comm, const int64_t *world_ranks)
{
    COLO_FAIL_IF(!comm || !world_ranks, COLO_ERR_ARG, "comm: %s is NULL",
                 comm ? "world_ranks" : "comm");
    for (int32_t r = 0; r < comm->size; r++) {
        COLO_FAIL_IF(world_ranks[r] < 0, COLO_ERR_ARG,
                     "comm: world_ranks[%d] is %lld, expected >= 0", (int)r,
                     (long long)world_ranks[r]);
        for (int32_t k = 0; k < r; k++)
            COLO_FAIL_IF(world_ranks[k] == world_ranks[r], COLO_ERR_ARG,
                         "comm: world rank %lld is both rank %d and rank %d, expected once",
                         (long long)world_ranks[r], (int)k, (int)r);
    }
    if (!colo_comm_is_own(comm, "set_world_ranks"))
        return COLO_ERR_STATE;
    COLO_HOLD(comm->lock); /* another thread may be dumping it */
    for (int32_t r = 0; r < comm->size; r++)
        comm->world_rank[r] = world_ranks[r];
    return COLO_OK;
}

int32_t colo_comm_find(const colo_comm_t *comm, int64_t world_rank)
{
    if (!comm)
        return -1;
    if (world_rank >= 0 && world_rank < comm->size && comm->world_rank[world_rank] == world_rank)
        return (int32_t)world_rank; /* every world, and the groups that begin with it */
    for (int32_t r = 0; r < comm->size; r++)
        if (comm->world_rank[r] == world_rank)
            return r;
    return -1;
}

int32_t colo_comm_in_both(const colo_comm_t *comm, const colo_comm_t *other)
{
    int32_t n = 0;
    for (int32_t r = 0; comm->world == other->world && r < other->size; r++)
        n += colo_comm_find(comm, other->world_rank[r]) >= 0;
    return n;
}

uint64_t *colo_comm_once(colo_comm_t *comm, uint64_t key)
{
    for (int32_t i = 0; i < COLO_COMM_ONCE; i++)
        if (comm->once[i] == 0 || comm->once[i] == key)
            return comm->once[i] ? NULL : &comm->once[i];
    return NULL;
}

const char *colo_comm_backend(const colo_comm_t *comm)
{
    return comm ? comm->backend->name : "none";
}

void colo_comm_set_name(colo_comm_t *comm, const char *name)
{
    if (!comm || !name || !colo_comm_is_own(comm, "set_name"))
        return;
    pthread_mutex_lock(comm->lock);
    snprintf(comm->name, sizeof comm->name, "%s", name);
    pthread_mutex_unlock(comm->lock);
    for (colo_comm_t *part = comm->part; part; part = part->next_part)
        colo_comm_set_name(part, name);
}

const char *colo_comm_name(const colo_comm_t *comm)
{
    return comm ? comm->name : "";
}

colo_status_t colo_comm_set_timeout(colo_comm_t *comm, int64_t ms)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "set_timeout: comm is NULL");
    COLO_FAIL_IF(ms < 1 || ms > COLO_TIMEOUT_MAX, COLO_ERR_ARG,
                 "set_timeout: %lld ms, expected 1..%lld", (long long)ms,
                 (long long)COLO_TIMEOUT_MAX);
    __atomic_store_n(&comm->timeout_ms, ms, __ATOMIC_RELAXED); /* a backend's watchdog reads it */
    for (colo_comm_t *part = comm->part; part; part = part->next_part)
        COLO_TRY(colo_comm_set_timeout(part, ms));
    return COLO_OK;
}

colo_status_t colo_comm_set_check(colo_comm_t *comm, int32_t level)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "set_check: comm is NULL");
    COLO_FAIL_IF(level < 0 || level > 2, COLO_ERR_ARG, "set_check: level %d, expected 0..2",
                 (int)level);
    comm->check = level;
    for (colo_comm_t *part = comm->part; part; part = part->next_part)
        COLO_TRY(colo_comm_set_check(part, level));
    return COLO_OK;
}

colo_status_t colo_comm_read_config(const colo_comm_config_t *config, colo_comm_config_t *own)
{
    int64_t ms, check;
    bool from_env;
    *own = (colo_comm_config_t){COLO_COMM_CONFIG_INIT};
    if (config)
        COLO_TRY(COLO_SIZED_READ(own, config, check, "comm: config", "COLO_COMM_CONFIG_INIT"));
    COLO_FAIL_IF(own->timeout_ms < 0 || own->timeout_ms > COLO_TIMEOUT_MAX, COLO_ERR_ARG,
                 "comm: config.timeout_ms is %lld, expected 0..%lld", (long long)own->timeout_ms,
                 (long long)COLO_TIMEOUT_MAX);
    COLO_FAIL_IF(own->check < 0 || own->check > 2, COLO_ERR_ARG,
                 "comm: config.check is %d, expected 0..2", (int)own->check);
    COLO_FAIL_IF((unsigned)own->transport > COLO_TRANSPORT_UCX, COLO_ERR_ARG,
                 "comm: config.transport is %d, expected 0..%d", (int)own->transport,
                 COLO_TRANSPORT_UCX);
    const size_t bytes = own->flight_recorder ? strlen(own->flight_recorder) : 0;
    COLO_FAIL_IF(bytes >= COLO_RECORDER_MAX, COLO_ERR_ARG,
                 "comm: config.flight_recorder has %zu bytes, expected at most %d", bytes,
                 COLO_RECORDER_MAX - 1);
    if (bytes)
        COLO_TRY(colo_env_would_allow("COLO_FLIGHT_RECORDER", "comm: config.flight_recorder",
                                      own->flight_recorder));
    (void)colo_env_i64("COLO_TIMEOUT_MS", &ms); /* refused where a first comm is made */
    (void)colo_env_value("COLO_TIMEOUT_MS", &from_env);
    own->timeout_ms = from_env || own->timeout_ms == 0 ? ms : own->timeout_ms;
    (void)colo_env_i64("COLO_CHECK", &check);
    (void)colo_env_value("COLO_CHECK", &from_env);
    own->check = from_env ? (int32_t)check : own->check;
    return COLO_OK;
}

static void configure(colo_comm_t *comm, const colo_comm_config_t *own)
{
    __atomic_store_n(&comm->timeout_ms, own->timeout_ms, __ATOMIC_RELAXED);
    comm->check = own->check;
    comm->transport = own->transport;
    colo_comm_set_recorder(comm, own->flight_recorder ? own->flight_recorder : "");
    for (colo_comm_t *part = comm->part; part; part = part->next_part)
        configure(part, own);
}

colo_status_t colo_comm_configure(colo_comm_t *comm, const colo_comm_config_t *config)
{
    colo_comm_config_t own;
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "configure: comm is NULL");
    COLO_FAIL_IF(!config, COLO_ERR_ARG, "configure: config is NULL; start from %s",
                 "COLO_COMM_CONFIG_INIT");
    COLO_TRY(colo_comm_read_config(config, &own));
    configure(comm, &own);
    return COLO_OK;
}

colo_status_t colo_comm_config(const colo_comm_t *comm, colo_comm_config_t *config)
{
    bool from_env;
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "comm_config: the comm is NULL");
    const char *prefix = colo_env_value("COLO_FLIGHT_RECORDER", &from_env);
    prefix = from_env ? prefix : comm->recorder;
    int32_t word = 0;
    (void)colo_env_word("COLO_TRANSPORT", &word);
    (void)colo_env_value("COLO_TRANSPORT", &from_env);
    const colo_comm_config_t own = {
        .timeout_ms = colo_comm_timeout(comm),
        .check = comm->check,
        .transport = from_env ? (colo_transport_t)word : comm->transport,
        .flight_recorder = *prefix ? prefix : NULL,
    };
    return COLO_SIZED_WRITE(config, &own, "comm_config: config", "COLO_COMM_CONFIG_INIT");
}

int32_t colo_comm_check_level(const colo_comm_t *comm)
{
    return comm ? comm->check : 0;
}

/* ---- failure ---- */

/* @refused: NULL, or the operation that a dead comm refuses; the first of them is recorded, so that
 * the flight record says what this rank would have done. */
static colo_status_t check_alive(colo_comm_t *comm, const char *what, const colo_op_desc_t *refused)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "%s: comm is NULL", what);
    if (!colo_comm_is_own(comm, what))
        return COLO_ERR_STATE;
    char error_message[1000];
    pthread_mutex_lock(comm->lock);
    const bool elsewhere = comm->thread && comm->thread != colo_comm_thread();
    if (elsewhere)
        colo_op_describe(error_message, sizeof error_message, comm->op, comm->seq);
    pthread_mutex_unlock(comm->lock);
    COLO_FAIL_IF(elsewhere, COLO_ERR_STATE,
                 "%s: comm '%s': another thread is in %s; call from one thread at a time, "
                 "or give each thread a communicator of its own",
                 what, comm->name, error_message);
    colo_status_t st = comm->backend->state(comm, error_message, sizeof error_message);
    if (st == COLO_OK)
        return COLO_OK;
    if (refused && (!comm->seq || comm->record[comm->seq % COLO_RECORDS].status == COLO_OK))
        colo_comm_end(comm, colo_comm_begin(comm, *refused, 0, 0, comm->size - 1), st);
    colo_comm_record_failure(comm, NULL);
    return colo_fail(st, "%s: comm '%s' is dead: %s", what, comm->name, error_message);
}

colo_status_t colo_comm_alive(const colo_comm_t *comm, const char *what)
{
    return check_alive((colo_comm_t *)comm, what, NULL);
}

colo_status_t colo_comm_ready(colo_comm_t *comm, colo_op_desc_t op)
{
    return check_alive(comm, colo_op_name(op.kind), &op);
}

colo_status_t colo_comm_fail(colo_comm_t *comm, colo_status_t status)
{
    if (!colo_comm_is_own(comm, "comm"))
        return COLO_ERR_STATE;
    const colo_error_t earlier = colo_error_save(); /* the backend may say something of its own */
    comm->backend->fail(comm, status, earlier.text);
    colo_comm_record_failure(comm, NULL);
    return colo_error_restore(status, &earlier);
}

colo_status_t colo_comm_finish(colo_comm_t *comm, uint64_t seq, colo_status_t st)
{
    colo_comm_end(comm, seq, st);
    return st < 0 ? colo_comm_fail(comm, st) : st;
}

void colo_comm_abort(colo_comm_t *comm, const char *why)
{
    if (!comm || !colo_comm_is_own(comm, "comm_abort"))
        return;
    char error_message[600];
    pthread_mutex_lock(comm->lock); /* the owner may be naming it */
    snprintf(error_message, sizeof error_message, "aborted by rank %d of '%s': %s", (int)comm->rank,
             comm->name, why ? why : "no reason given");
    const bool waits = comm->thread != 0; /* another thread, which records how its operation ends */
    pthread_mutex_unlock(comm->lock);
    comm->backend->fail(comm, COLO_ERR_ABORTED, error_message);
    if (!waits)
        colo_comm_record_failure(comm, NULL);
}

colo_status_t colo_comm_check(const colo_comm_t *comm)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "comm_check: comm is NULL");
    if (!colo_comm_is_own(comm, "comm_check"))
        return COLO_ERR_STATE;
    char error_message[1000];
    colo_status_t st = comm->backend->state(comm, error_message, sizeof error_message);
    if (st == COLO_OK)
        return st;
    colo_comm_record_failure((colo_comm_t *)comm, NULL);
    return colo_fail(st, "%s", error_message);
}
