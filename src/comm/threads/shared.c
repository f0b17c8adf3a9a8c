/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shared.c - what ranks of in-process groups share: its life, and meeting in a subset.
 *
 * Subsets meet through a registry in the parent's shared state, keyed by tag and members: the first
 * member makes the shared state, the last one takes the entry away; no rank waits. Shared states
 * hold a reference to the root, comms and registry entries one to their shared state, so ranks may
 * destroy in any order, after the run as well.
 */
#include "comm/threads/threads.h"
#include "core/error.h"

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

static void release_root(struct colo_root *root)
{
    if (atomic_fetch_sub(&root->refs, 1) != 1)
        return;
    colo_error_state_fini(&root->error);
    free(root);
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

struct colo_shared *colo_shared_of_run(int32_t ranks)
{
    struct colo_root *root = calloc(1, sizeof *root + (size_t)ranks * sizeof root->left[0]);
    if (!root)
        return NULL;
    atomic_init(&root->refs, 1);
    colo_error_state_init(&root->error);
    struct colo_shared *shared = shared_new(root, ranks);
    for (int32_t r = 0; shared && r < ranks; r++)
        shared->slot[r].origin = r;
    release_root(root); /* the shared state holds it */
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
    release_root(shared->root);
    pthread_mutex_destroy(&shared->lock);
    colo_error_state_fini(&shared->error);
    free(shared);
}

colo_status_t colo_shared_attach(colo_comm_t *comm, struct colo_shared *shared)
{
    struct colo_threads *self = calloc(1, sizeof *self);
    if (!self) {
        colo_shared_release(shared);
        return colo_fail(COLO_ERR_NOMEM, "rank %d of %d: no memory for its comm", (int)comm->rank,
                         (int)comm->size);
    }
    self->shared = shared;
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

/* The subset's shared state, with a reference for the caller; NULL: there is no memory. */
static struct colo_shared *subset_of(struct colo_shared *above, const int32_t *members, int32_t n,
                                     uint64_t tag)
{
    COLO_HOLD(&above->lock);
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
    if (!entry)
        return NULL;
    struct colo_shared *shared = entry->shared;
    if (--entry->left == 0) { /* the entry's reference becomes this rank's */
        *link = entry->next;
        free(entry);
    } else {
        atomic_fetch_add(&shared->refs, 1);
    }
    return shared;
}

colo_status_t colo_threads_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                  uint64_t tag, colo_comm_t *child)
{
    struct colo_shared *shared =
        subset_of(((struct colo_threads *)parent->impl)->shared, members, n, tag);
    COLO_FAIL_IF(!shared, COLO_ERR_NOMEM, "split: no memory for a comm of %d ranks", (int)n);
    return colo_shared_attach(child, shared);
}
