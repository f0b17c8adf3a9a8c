/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error-state.h (private) - what killed a group, once and for all.
 *
 * The first error wins. Between processes an error of an older operation takes its place
 * (@replace), because ranks that are late go on with what all had agreed on before.
 * The rank whose own mistake it was keeps its own status, the others see COLO_ERR_PEER with its
 * error message; a culprit of -1 means the error is of all ranks (a timeout, a mismatch, an abort).
 */
#ifndef COLO_COMM_ERROR_STATE_H
#define COLO_COMM_ERROR_STATE_H

#include "core/lock.h"

#include <colobridge/status.h>

#include <stdatomic.h>
#include <stdio.h>

typedef struct colo_error_state {
    _Atomic int32_t status; /* 0 while alive */
    int32_t culprit;
    pthread_mutex_t lock;
    char culprit_name[48]; /* "rank 3" or "rank 1 (world rank 3)" */
    char error_message[900];
} colo_error_state_t;

static inline void colo_error_state_init(colo_error_state_t *state)
{
    atomic_init(&state->status, COLO_OK);
    state->culprit = -1;
    state->culprit_name[0] = state->error_message[0] = '\0';
    pthread_mutex_init(&state->lock, NULL);
}

static inline void colo_error_state_fini(colo_error_state_t *state)
{
    pthread_mutex_destroy(&state->lock);
}

static inline bool colo_error_state_is_set(const colo_error_state_t *state)
{
    return atomic_load_explicit(&state->status, memory_order_acquire) != COLO_OK;
}

static inline void colo_error_state_write(colo_error_state_t *state, bool replace,
                                          colo_status_t status, int32_t culprit, int64_t world_rank,
                                          const char *error_message)
{
    COLO_HOLD(&state->lock);
    if (replace || !colo_error_state_is_set(state)) {
        state->culprit = culprit;
        if (world_rank == culprit)
            snprintf(state->culprit_name, sizeof state->culprit_name, "rank %d", (int)culprit);
        else
            snprintf(state->culprit_name, sizeof state->culprit_name, "rank %d (world rank %lld)",
                     (int)culprit, (long long)world_rank);
        snprintf(state->error_message, sizeof state->error_message, "%s", error_message);
        atomic_store_explicit(&state->status, status, memory_order_release);
    }
}

static inline void colo_error_state_set(colo_error_state_t *state, colo_status_t status,
                                        int32_t culprit, int64_t world_rank,
                                        const char *error_message)
{
    colo_error_state_write(state, false, status, culprit, world_rank, error_message);
}

/* What @rank is told: COLO_OK, or a status with its error message. */
static inline colo_status_t colo_error_state_notify(const colo_error_state_t *state, int32_t rank,
                                                    char *error_message, size_t cap)
{
    if (!colo_error_state_is_set(state))
        return COLO_OK;
    COLO_HOLD((pthread_mutex_t *)&state->lock);
    colo_status_t status = (colo_status_t)atomic_load(&state->status);
    if (state->culprit < 0 || state->culprit == rank) {
        snprintf(error_message, cap, "%s", state->error_message);
    } else {
        snprintf(error_message, cap, "%s failed: %s", state->culprit_name, state->error_message);
        status = COLO_ERR_PEER;
    }
    return status;
}

#endif
