/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - a run of a function on ranks that are threads: starting, failing, leaving.
 *
 * A run makes a root and a world shared state and starts the threads, which wait for its lock, so
 * that no rank function runs when not all threads could be had. A comm of one rank, where an
 * interface wants a group and the group has size 1, is a run of one thread, the caller's.
 *
 * A rank that has returned, or has ended its thread, has left all comms of the run, also those that
 * it did not destroy: no rank waits for it there.
 *
 * Threads bind themselves when COLO_BIND asks for it; a rank that cannot be bound runs unbound.
 */
#include "comm/threads/threads.h"
#include "core/env.h"
#include "core/error.h"

#include <colobridge/topology.h>

#include <stdlib.h>
#include <string.h>

struct launch {
    colo_rank_fn fn;
    void *arg;
    struct colo_shared *shared;
    colo_topology_t *place; /* NULL: ranks run where the system puts them */
    pthread_mutex_t lock;   /* held until all threads are there, or one cannot be had */
    bool runs;              /* all are */
    /* the error to return: the first that a rank made by itself, else the first handed on */
    colo_status_t status;
    int32_t rank;
    char error_message[1024];
};

struct runner {
    struct launch *launch;
    pthread_t thread;
    colo_comm_t *comm;
};

/* Is it what a rank hears of another's error, not a mistake of its own? */
static bool handed_on(colo_status_t status)
{
    return status == COLO_ERR_PEER || status == COLO_ERR_ABORTED;
}

/* A rank came back with an error: note it, and wake all ranks that wait for it. */
static void rank_failed(struct runner *me, colo_status_t status)
{
    struct launch *launch = me->launch;
    const int32_t rank = me->comm->rank;
    const char *error_message = colo_last_error();
    if (!error_message[0])
        error_message = colo_status_string(status);
    pthread_mutex_lock(&launch->lock);
    if (launch->status == COLO_OK || (handed_on(launch->status) && !handed_on(status))) {
        launch->status = status;
        launch->rank = rank;
        snprintf(launch->error_message, sizeof launch->error_message, "%s", error_message);
    }
    pthread_mutex_unlock(&launch->lock);
    colo_error_state_set(&launch->shared->root->error, status, status == COLO_ERR_PEER ? -1 : rank,
                         rank, error_message);
    colo_comm_record_failure(me->comm, NULL);
}

/* Nothing more comes from this rank, in whatever comm of the run. */
static void leave(struct runner *me)
{
    atomic_store_explicit(&me->launch->shared->root->left[me->comm->rank], true,
                          memory_order_release);
    colo_comm_destroy(&me->comm);
}

static void thread_ended(void *arg)
{
    struct runner *me = arg;
    rank_failed(me, colo_fail(COLO_ERR_STATE,
                              "the thread of rank %d ended before its function returned; return "
                              "from it instead of pthread_exit()",
                              (int)me->comm->rank));
    leave(me);
}

static colo_status_t call(struct runner *me)
{
    colo_status_t st;
    pthread_cleanup_push(thread_ended, me);
    st = me->launch->fn(me->comm, me->launch->arg);
    pthread_cleanup_pop(0);
    return st;
}

static void *rank_main(void *arg)
{
    struct runner *me = arg;
    struct launch *launch = me->launch;
    pthread_mutex_lock(&launch->lock);
    const bool runs = launch->runs;
    pthread_mutex_unlock(&launch->lock);
    if (runs) {
        if (launch->place && colo_topology_bind(launch->place, me->comm->rank) < 0)
            colo_log(COLO_LOG_WARN, "rank %d is not bound: %s", (int)me->comm->rank,
                     colo_last_error());
        colo_status_t st = call(me);
        if (st < 0)
            rank_failed(me, st);
    }
    leave(me);
    return NULL;
}

static colo_status_t start(struct launch *launch, struct runner *ranks, int32_t n, int32_t *started)
{
    COLO_AUTOFREE uint64_t *node = malloc((size_t)n * sizeof *node);
    COLO_FAIL_IF(!node, COLO_ERR_NOMEM, "threads_run: nodes of %d ranks", (int)n);
    for (int32_t r = 0; r < n; r++)
        COLO_TRY(colo_node_id(r, n, &node[r]));
    for (int32_t r = 0; r < n; r++) {
        ranks[r].launch = launch;
        COLO_TRY(colo_comm_new(&ranks[r].comm, &colo_comm_threads_backend, r, n, NULL));
        colo_comm_set_name(ranks[r].comm, "world");
        COLO_TRY(colo_comm_set_nodes(ranks[r].comm, node));
        atomic_fetch_add(&launch->shared->refs, 1);
        COLO_TRY(colo_shared_attach(ranks[r].comm, launch->shared));
        int e = pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]);
        COLO_FAIL_IF(e, COLO_ERR_NOMEM, "thread %d of %d could not be started: %s", (int)r, (int)n,
                     strerror(e));
        *started = r + 1;
    }
    return COLO_OK;
}

colo_status_t colo_comm_threads_run(int32_t nranks, colo_rank_fn fn, void *arg)
{
    COLO_FAIL_IF(nranks < 1 || nranks > 4096, COLO_ERR_ARG,
                 "threads_run: %d ranks, expected 1..4096", (int)nranks);
    COLO_FAIL_IF(!fn, COLO_ERR_ARG, "threads_run: the rank function is NULL");
    COLO_TRY(colo_env_check(NULL));
    struct launch launch = {.fn = fn, .arg = arg};
    struct runner *ranks = calloc((size_t)nranks, sizeof *ranks);
    launch.shared = colo_shared_of_run(nranks);
    if (!ranks || !launch.shared) {
        if (launch.shared)
            colo_shared_release(launch.shared);
        free(ranks);
        return colo_fail(COLO_ERR_NOMEM, "threads_run: no memory for %d ranks", (int)nranks);
    }
    pthread_mutex_init(&launch.lock, NULL);
    colo_topology_create_env(&launch.place, nranks);
    int32_t started = 0;
    pthread_mutex_lock(&launch.lock);
    colo_status_t st = start(&launch, ranks, nranks, &started);
    launch.runs = st == COLO_OK;
    pthread_mutex_unlock(&launch.lock);
    for (int32_t r = 0; r < started; r++)
        pthread_join(ranks[r].thread, NULL);
    if (started < nranks)
        colo_comm_destroy(&ranks[started].comm); /* the one whose start failed halfway */
    if (st == COLO_OK && launch.status != COLO_OK)
        st = colo_fail(launch.status, "rank %d: %s", (int)launch.rank, launch.error_message);

    colo_topology_destroy(&launch.place);
    pthread_mutex_destroy(&launch.lock);
    colo_shared_release(launch.shared);
    free(ranks);
    return st;
}

colo_status_t colo_comm_create_self(colo_comm_t **comm)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "create_self: comm is NULL");
    colo_comm_t *made = NULL;
    COLO_TRY(colo_env_check(NULL));
    COLO_TRY(colo_comm_new(&made, &colo_comm_self_backend, 0, 1, NULL));
    struct colo_shared *shared = colo_shared_of_run(1);
    colo_status_t st = shared ? colo_shared_attach(made, shared)
                              : colo_fail(COLO_ERR_NOMEM, "comm of one rank: no memory");
    if (st < 0) {
        colo_comm_destroy(&made);
        return st;
    }
    colo_comm_set_name(made, "self");
    *comm = made;
    return COLO_OK;
}
