/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_is_host.c - a libcolobridge-cuda.so for tests whose device is the host. */
#include "core/backend.h"
#include "loss/loss.h"

#include <colobridge/version.h>

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    .abi = COLO_BACKEND_ABI,
    .version = COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | COLO_VERSION_PATCH,
    .name = "cuda",
    .ops = &colo_ops_host,
    .loss = &colo_loss_host,
};
