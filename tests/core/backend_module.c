/* SPDX-License-Identifier: Apache-2.0 */
/* backend_module.c - a backend library for tests, right or wrong in one way by the macros given. */
#include "comm/comm.h"
#include "core/backend.h"

#ifndef NAME
#define NAME "testgood"
#endif
#ifndef ABI
#define ABI COLO_BACKEND_ABI
#endif
#ifndef VERSION
#define VERSION (COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | COLO_VERSION_PATCH)
#endif
#ifndef FAIL
#define FAIL colo_fail
#endif
#ifndef SYMBOL
#define SYMBOL colo_backend
#endif

static colo_status_t box_copy(const colo_box_t *dst, const colo_box_t *src, size_t elem_size,
                              colo_stream_t stream)
{
    return COLO_PENDING; /* something that no real table answers */
}

/* what a module calls that is bound to another copy of the library */
__attribute__((unused)) static colo_status_t other_copy(colo_status_t status, const char *fmt, ...)
{
    return status;
}

/* in no version of the library */
colo_status_t colo_comm_gone(colo_status_t status, const char *fmt, ...);

static const colo_device_t device = {.name = NAME, .box_copy = box_copy};
static const colo_comm_backend_t comm = {.name = NAME};

extern COLO_API const colo_backend_t SYMBOL;
const colo_backend_t SYMBOL = {
    .abi = ABI,
    .version = VERSION,
    .name = NAME,
    .comm = &comm,
    .device = &device,
    .fail = FAIL,
};
