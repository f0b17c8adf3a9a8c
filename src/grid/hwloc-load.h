/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hwloc-load.h (private) - hwloc's functions, from a library that is found at run time and never
 * linked: programs that ask for no topology do without it.
 */
#ifndef COLO_GRID_HWLOC_LOAD_H
#define COLO_GRID_HWLOC_LOAD_H

#include "core/error.h"

#include <hwloc.h>

/* The first is looked for in the process. hwloc's inline functions that call others are not in this
 * list and must not be used: they would link the library. */
#if HWLOC_API_VERSION >= 0x00030000
#define COLO_HWLOC_3(X) X(topology_get_infos)
#else
#define COLO_HWLOC_3(X)
#endif
#define COLO_HWLOC_FUNCTIONS(X)        \
    X(topology_init)                   \
    X(topology_destroy)                \
    X(topology_is_thissystem)          \
    X(topology_load)                   \
    X(topology_restrict)               \
    X(topology_set_components)         \
    X(topology_set_synthetic)          \
    X(topology_set_xmlbuffer)          \
    X(topology_set_cache_types_filter) \
    X(topology_set_io_types_filter)    \
    X(get_api_version)                 \
    X(get_type_depth)                  \
    X(get_nbobjs_by_depth)             \
    X(get_obj_by_depth)                \
    X(get_cpubind)                     \
    X(set_cpubind)                     \
    X(bitmap_alloc)                    \
    X(bitmap_first)                    \
    X(bitmap_free)                     \
    X(bitmap_intersects)               \
    X(bitmap_isincluded)               \
    X(bitmap_isset)                    \
    X(bitmap_iszero)                   \
    X(bitmap_or)                       \
    X(bitmap_set)                      \
    X(bitmap_sscanf)                   \
    X(bitmap_weight)                   \
    X(bitmap_zero)                     \
    COLO_HWLOC_3(X)

#define COLO_HWLOC_MEMBER(name) __typeof__(hwloc_##name) *name;
typedef struct colo_hwloc {
    COLO_HWLOC_FUNCTIONS(COLO_HWLOC_MEMBER)
} colo_hwloc_t;

extern colo_hwloc_t colo_hwloc; /* filled by colo_hwloc_load() */

/* Looks again after a failure. COLO_ERR_UNBUILT: no hwloc, or one of another major version. */
colo_status_t colo_hwloc_load(void);

#endif
