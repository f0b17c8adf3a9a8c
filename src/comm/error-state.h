/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error-state.h (private) - what killed a group, once and for all.
 *
 * The first error wins. Between processes an error of an older operation takes its place
 * (colo_error_state_replace), because ranks that are late go on with what all had agreed on before.
 * The rank whose own mistake it was keeps its own status, the others see COLO_ERR_PEER with its
 * error message; a culprit of -1 means the error is of all ranks (a timeout, a mismatch, an abort).
 */
#ifndef COLO_COMM_ERROR_STATE_H
#define COLO_COMM_ERROR_STATE_H

#include <colobridge/status.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

typedef struct colo_error_state {
    _Atomic int32_t status; /* 0 while alive */
    int32_t culprit;
    pthread_mutex_t lock;
    char culprit_name[48]; /* "rank 3" or "rank 1 (world rank 3)" */
    char error_message[900];
} colo_error_state_t;

static inline void colo_error_state_init(colo_error_state_t *f)
{
    atomic_init(&f->status, COLO_OK);
    f->culprit = -1;
    f->culprit_name[0] = f->error_message[0] = '\0';
    pthread_mutex_init(&f->lock, NULL);
}

static inline void colo_error_state_fini(colo_error_state_t *f)
{
    pthread_mutex_destroy(&f->lock);
}

static inline bool colo_error_state_is_set(const colo_error_state_t *f)
{
    return atomic_load_explicit(&f->status, memory_order_acquire) != COLO_OK;
}

static inline void colo_error_state_write(colo_error_state_t *f, bool replace, colo_status_t status,
                                          int32_t culprit, int64_t world_rank,
                                          const char *error_message)
{
    pthread_mutex_lock(&f->lock);
    if (replace || !colo_error_state_is_set(f)) {
        f->culprit = culprit;
        if (world_rank == culprit)
            snprintf(f->culprit_name, sizeof f->culprit_name, "rank %d", (int)culprit);
        else
            snprintf(f->culprit_name, sizeof f->culprit_name, "rank %d (world rank %lld)",
                     (int)culprit, (long long)world_rank);
        snprintf(f->error_message, sizeof f->error_message, "%s", error_message);
        atomic_store_explicit(&f->status, status, memory_order_release);
    }
    pthread_mutex_unlock(&f->lock);
}

static inline void colo_error_state_set(colo_error_state_t *f, colo_status_t status,
                                        int32_t culprit, int64_t world_rank,
                                        const char *error_message)
{
    colo_error_state_write(f, false, status, culprit, world_rank, error_message);
}

static inline void colo_error_state_replace(colo_error_state_t *f, colo_status_t status,
                                            int32_t culprit, int64_t world_rank,
                                            const char *error_message)
{
    colo_error_state_write(f, true, status, culprit, world_rank, error_message);
}

/* What @rank is told: COLO_OK, or a status with its error message. */
static inline colo_status_t colo_error_state_notify(const colo_error_state_t *f, int32_t rank,
                                                    char *error_message, size_t cap)
{
    if (!colo_error_state_is_set(f))
        return COLO_OK;
    pthread_mutex_t *lock = (pthread_mutex_t *)&f->lock;
    pthread_mutex_lock(lock);
    colo_status_t status = (colo_status_t)atomic_load(&f->status);
    if (f->culprit < 0 || f->culprit == rank) {
        snprintf(error_message, cap, "%s", f->error_message);
    } else {
        snprintf(error_message, cap, "%s failed: %s", f->culprit_name, f->error_message);
        status = COLO_ERR_PEER;
    }
    pthread_mutex_unlock(lock);
    return status;
}

#endif
