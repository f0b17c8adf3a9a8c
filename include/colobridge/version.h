/* SPDX-License-Identifier: Apache-2.0 */
/* version.h - which library this is; part of what ranks agree on at create. */
#ifndef COLOBRIDGE_VERSION_H
#define COLOBRIDGE_VERSION_H

#include <colobridge/status.h>

#define COLO_VERSION_MAJOR 0
#define COLO_VERSION_MINOR 2
#define COLO_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/** colo_version() - "0.1.0" of the library that is loaded, which may differ from the header's */
COLO_API const char *colo_version(void);

/** colo_version_number() - major << 16 | minor << 8 | patch */
COLO_API uint32_t colo_version_number(void);

#ifdef __cplusplus
}
#endif
#endif
