/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hwloc-load.c - which hwloc: the one that the process has, else the one that this was built for.
 *
 * hwloc's structs differ between major versions, so another one is refused: its soname says which
 * one the loader finds, and nothing says which one the process has but the library itself.
 */
#include "grid/hwloc-load.h"

#include "core/library.h"
#include "core/lock.h"

#define MAJOR(version) ((version) >> 16)
#define WANTED(name) {"hwloc_" #name, &colo_hwloc.name},

colo_hwloc_t colo_hwloc;
COLO_LOCK(lock);

colo_status_t colo_hwloc_load(void)
{
    static bool found;
    static const colo_library_t library = {"placement", "hwloc", COLO_HWLOC_FILE,
                                           "; install hwloc 2.9 or later",
                                           ", expected version 2.9 or later"};
    static const colo_library_symbol_t want[] = {COLO_HWLOC_FUNCTIONS(WANTED)};
    COLO_HOLD(&lock);
    if (found)
        return COLO_OK;
    COLO_TRY(colo_library_find(&library, want, sizeof want / sizeof want[0]));
    const unsigned version = colo_hwloc.get_api_version();
    COLO_FAIL_IF(MAJOR(version) != MAJOR(HWLOC_API_VERSION), COLO_ERR_UNBUILT,
                 "placement: the hwloc in this process has version %u, this library was built for "
                 "%u",
                 MAJOR(version), MAJOR((unsigned)HWLOC_API_VERSION));
    found = true;
    return COLO_OK;
}
