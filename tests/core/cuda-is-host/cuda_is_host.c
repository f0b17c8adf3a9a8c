/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_is_host.c - a libcolobridge-cuda.so for tests whose device is the host. */
#include "core/backend.h"
#include "loss/loss.h"

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("cuda"),
    .device = &colo_device_host,
    .loss = &colo_loss_host,
};
