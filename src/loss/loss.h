/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss.h (private) - the table of what the losses do with elements, one for each kind of memory
 * (loss.c; cuda/loss.c in libcolobridge-cuda.so).
 *
 * A kernel gets checked arguments; it allocates nothing and does not wait. The oracle of every
 * table is tests/ref/.
 */
#ifndef COLO_LOSS_LOSS_H
#define COLO_LOSS_LOSS_H

#include "loss/linear/linear.h"

#define COLO_LOSS_MEMBER(name, type) \
    colo_status_t (*name)(const struct type *p, colo_stream_t stream);
typedef struct colo_loss_kernels {
    const colo_gemm_backend_t *gemm;
    COLO_LOSS_FUNCTIONS(COLO_LOSS_MEMBER)
} colo_loss_kernels_t;

/* The host's: host/ in plain C */
#define COLO_LOSS_HOST(name, type) \
    colo_status_t colo_host_##name(const struct type *p, colo_stream_t stream);
COLO_LOSS_FUNCTIONS(COLO_LOSS_HOST)
extern const colo_loss_kernels_t colo_loss_host;

/* The table for a tensor's memory; COLO_ERR_UNBUILT with an error message if this build lacks it.
 */
colo_status_t colo_loss_kernels_for(colo_mem_t mem, const colo_loss_kernels_t **kernels);

#endif
