/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - the life of in-process groups: starting ranks, meeting in a subset, leaving.
 *
 * A run makes a root and a world shared state and starts the threads behind a start barrier, so
 * that no rank function runs when not all threads could be had. Subsets meet through a registry in
 * the parent's shared state, keyed by tag and members: the first member makes the shared state, the
 * last one takes the entry away; no rank waits. Shared states hold a reference to the root, comms
 * and registry entries one to their shared state, so ranks may destroy in any order, after the run
 * as well.
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

struct colo_child {
    struct colo_child *next;
    struct colo_shared *shared; /* a reference */
    uint64_t tag;
    int32_t left; /* members that did not ask yet */
    int32_t n;
    int32_t members[];
};

/* ---- roots and shared states ---- */

static void root_release(struct colo_root *root)
{
    if (atomic_fetch_sub(&root->refs, 1) != 1)
        return;
    colo_error_state_fini(&root->error);
    free(root);
}

static struct colo_root *root_new(int32_t ranks)
{
    struct colo_root *root = calloc(1, sizeof *root + (size_t)ranks * sizeof root->left[0]);
    if (!root)
        return NULL;
    atomic_init(&root->refs, 1);
    colo_error_state_init(&root->error);
    return root;
}

static struct colo_shared *shared_new(struct colo_root *root, int32_t size)
{
    struct colo_shared *shared;
    size_t bytes = sizeof *shared + (size_t)size * sizeof shared->slot[0];
    shared = aligned_alloc(_Alignof(struct colo_shared), bytes);
    if (!shared)
        return NULL;
    memset(shared, 0, bytes);
    atomic_init(&shared->refs, 1);
    atomic_fetch_add(&root->refs, 1);
    shared->root = root;
    shared->size = size;
    colo_error_state_init(&shared->error);
    pthread_mutex_init(&shared->lock, NULL);
    return shared;
}

void colo_shared_release(struct colo_shared *shared)
{
    if (atomic_fetch_sub(&shared->refs, 1) != 1)
        return;
    for (struct colo_child *child = shared->children, *next; child;
         child = next) { /* never met in full */
        next = child->next;
        colo_shared_release(child->shared);
        free(child);
    }
    root_release(shared->root);
    pthread_mutex_destroy(&shared->lock);
    colo_error_state_fini(&shared->error);
    free(shared);
}

/* Takes the reference to @shared, also when it fails. */
static colo_status_t attach(colo_comm_t *comm, struct colo_shared *shared)
{
    struct colo_threads *self = calloc(1, sizeof *self);
    const void **src = calloc((size_t)comm->size, sizeof *src);
    if (!self || !src) {
        free(self);
        free(src);
        colo_shared_release(shared);
        return colo_fail(COLO_ERR_NOMEM, "rank %d of %d: no memory for its comm", (int)comm->rank,
                         (int)comm->size);
    }
    self->shared = shared;
    self->src = src;
    comm->impl = self;
    return COLO_OK;
}

/* ---- subsets ---- */

static struct colo_child *child_new(struct colo_shared *parent, const int32_t *members, int32_t n,
                                    uint64_t tag)
{
    struct colo_child *child = malloc(sizeof *child + (size_t)n * sizeof child->members[0]);
    struct colo_shared *shared = shared_new(parent->root, n);
    if (!child || !shared) {
        free(child);
        if (shared)
            colo_shared_release(shared);
        return NULL;
    }
    for (int32_t i = 0; i < n; i++)
        shared->slot[i].origin = parent->slot[members[i]].origin;
    *child = (struct colo_child){
        .next = parent->children, .shared = shared, .tag = tag, .left = n, .n = n};
    memcpy(child->members, members, (size_t)n * sizeof child->members[0]);
    parent->children = child;
    return child;
}

colo_status_t colo_threads_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                  uint64_t tag, colo_comm_t *child)
{
    struct colo_shared *above = ((struct colo_threads *)parent->impl)->shared, *shared = NULL;
    pthread_mutex_lock(&above->lock);
    struct colo_child **link = &above->children;
    for (; *link; link = &(*link)->next)
        if ((*link)->tag == tag && (*link)->n == n &&
            memcmp((*link)->members, members, (size_t)n * sizeof *members) == 0)
            break;
    struct colo_child *entry = *link;
    if (!entry) {
        link = &above->children;
        entry = child_new(above, members, n, tag); /* becomes the first */
    }
    if (entry) {
        shared = entry->shared;
        if (--entry->left == 0) { /* the entry's reference becomes this rank's */
            *link = entry->next;
            free(entry);
        } else {
            atomic_fetch_add(&shared->refs, 1);
        }
    }
    pthread_mutex_unlock(&above->lock);
    if (!shared)
        return colo_fail(COLO_ERR_NOMEM, "split: no memory for a comm of %d ranks", (int)n);
    return attach(child, shared);
}

/* ---- a run ---- */

struct launch {
    colo_rank_fn fn;
    void *arg;
    struct colo_shared *shared;
    colo_topology_t *place; /* NULL: ranks run where the system puts them */
    pthread_mutex_t lock;
    pthread_cond_t opened;
    int32_t start; /* 0 closed, 1 run, -1 go home */
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

/* Rank @rank came back with an error: note it, and wake all ranks that wait for it. */
static void rank_failed(struct launch *launch, int32_t rank, colo_status_t status)
{
    const char *error_message = colo_last_error();
    if (!error_message[0])
        error_message = colo_status_string(status);
    pthread_mutex_lock(&launch->lock);
    if (launch->status == COLO_OK || (launch->status == COLO_ERR_PEER && status != COLO_ERR_PEER)) {
        launch->status = status;
        launch->rank = rank;
        snprintf(launch->error_message, sizeof launch->error_message, "%s", error_message);
    }
    pthread_mutex_unlock(&launch->lock);
    colo_error_state_set(&launch->shared->root->error, status, status == COLO_ERR_PEER ? -1 : rank,
                         rank, error_message);
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
    const int32_t rank = me->comm->rank;
    rank_failed(me->launch, rank,
                colo_fail(COLO_ERR_STATE,
                          "the thread of rank %d ended before its function returned; return from "
                          "it instead of pthread_exit()",
                          (int)rank));
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
    while (launch->start == 0)
        pthread_cond_wait(&launch->opened, &launch->lock);
    bool go = launch->start > 0;
    pthread_mutex_unlock(&launch->lock);
    if (go) {
        if (launch->place && colo_topology_bind(launch->place, me->comm->rank) < 0)
            colo_log(COLO_LOG_WARN, "rank %d is not bound: %s", (int)me->comm->rank,
                     colo_last_error());
        colo_status_t st = call(me);
        if (st < 0)
            rank_failed(launch, me->comm->rank, st);
    }
    leave(me);
    return NULL;
}

static colo_status_t start(struct launch *launch, struct runner *ranks, int32_t n, int32_t *started)
{
    COLO_AUTOFREE uint64_t *node = malloc((size_t)n * sizeof *node);
    if (!node)
        return colo_fail(COLO_ERR_NOMEM, "threads_run: nodes of %d ranks", (int)n);
    for (int32_t r = 0; r < n; r++)
        COLO_TRY(colo_node_id(r, n, &node[r]));
    for (int32_t r = 0; r < n; r++) {
        ranks[r].launch = launch;
        COLO_TRY(colo_comm_i_new(&ranks[r].comm, &colo_comm_threads_ops, r, n, NULL));
        colo_comm_set_name(ranks[r].comm, "world");
        COLO_TRY(colo_comm_i_set_nodes(ranks[r].comm, node));
        atomic_fetch_add(&launch->shared->refs, 1);
        COLO_TRY(attach(ranks[r].comm, launch->shared));
        int e = pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]);
        if (e)
            return colo_fail(COLO_ERR_NOMEM, "thread %d of %d could not be started: %s", (int)r,
                             (int)n, strerror(e));
        *started = r + 1;
    }
    return COLO_OK;
}

colo_status_t colo_comm_threads_run(int32_t nranks, colo_rank_fn fn, void *arg)
{
    if (nranks < 1 || nranks > 4096)
        return colo_fail(COLO_ERR_ARG, "threads_run: %d ranks, expected 1..4096", (int)nranks);
    if (!fn)
        return colo_fail(COLO_ERR_ARG, "threads_run: the rank function is NULL");
    COLO_TRY(colo_env_check(NULL));
    struct launch launch = {.fn = fn, .arg = arg};
    struct runner *ranks = calloc((size_t)nranks, sizeof *ranks);
    struct colo_root *root = root_new(nranks);
    launch.shared = root ? shared_new(root, nranks) : NULL;
    for (int32_t r = 0; launch.shared && r < nranks; r++)
        launch.shared->slot[r].origin = r;
    if (root)
        root_release(root); /* the shared state holds it */
    if (!ranks || !launch.shared) {
        if (launch.shared)
            colo_shared_release(launch.shared);
        free(ranks);
        return colo_fail(COLO_ERR_NOMEM, "threads_run: no memory for %d ranks", (int)nranks);
    }
    pthread_mutex_init(&launch.lock, NULL);
    pthread_cond_init(&launch.opened, NULL);

    colo_topology_create_env(&launch.place, nranks);
    int32_t started = 0;
    colo_status_t st = start(&launch, ranks, nranks, &started);
    pthread_mutex_lock(&launch.lock);
    launch.start = st == COLO_OK ? 1 : -1;
    pthread_cond_broadcast(&launch.opened);
    pthread_mutex_unlock(&launch.lock);
    for (int32_t r = 0; r < started; r++)
        pthread_join(ranks[r].thread, NULL);
    if (started < nranks)
        colo_comm_destroy(&ranks[started].comm); /* the one whose start failed halfway */
    if (st == COLO_OK && launch.status != COLO_OK)
        st = colo_fail(launch.status, "rank %d: %s", (int)launch.rank, launch.error_message);

    colo_topology_destroy(&launch.place);
    pthread_cond_destroy(&launch.opened);
    pthread_mutex_destroy(&launch.lock);
    colo_shared_release(launch.shared);
    free(ranks);
    return st;
}
