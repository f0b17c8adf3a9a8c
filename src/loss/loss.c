/* SPDX-License-Identifier: Apache-2.0 */
/* loss.c - the host's table of loss.h, and which table serves a memory. */
#include "loss/loss.h"

#include "core/backend.h"
#include "core/error.h"

#define ENTRY(name, type) .name = colo_host_##name,
const colo_loss_kernels_t colo_loss_host = {.gemm = &colo_gemm_host, COLO_LOSS_FUNCTIONS(ENTRY)};

colo_status_t colo_loss_kernels_for(colo_mem_t mem, const colo_loss_kernels_t **kernels)
{
    const colo_backend_t *b;
    if (mem != COLO_MEM_CUDA) {
        *kernels = &colo_loss_host;
        return COLO_OK;
    }
    COLO_TRY(colo_backend_load("cuda", &b));
    COLO_FAIL_IF(!b->loss, COLO_ERR_UNBUILT, "backend 'cuda' offers no losses");
    *kernels = b->loss;
    return COLO_OK;
}
