/* SPDX-License-Identifier: Apache-2.0 */
/* add.h (private) - the additions of a program, on the host or a device. */
#ifndef COLO_BRIDGE_ADD_H
#define COLO_BRIDGE_ADD_H

#include "bridge/run/program.h"
#include "core/device.h"

/* Of all tensors of @frame that have features; without, there may be no memory. */
colo_status_t colo_add_run(const colo_ops_t *ops, const colo_call_frame_t *frame,
                           const colo_add_t *add, colo_stream_t stream);

#endif
