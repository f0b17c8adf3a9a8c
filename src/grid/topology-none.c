/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology-none.c - placement in a build without hwloc: says so, and what to do about it.
 *
 * Nothing is guessed from the number of processors: an audit of a made-up machine would be worse
 * than none.
 */
#include "grid/topology.h"

#include "core/error.h"

static colo_status_t unbuilt(void)
{
    return colo_fail(COLO_ERR_UNBUILT, "placement: this build has no hwloc; install hwloc 2.9 or "
                                       "later (libhwloc-dev) and configure with -Dhwloc=enabled");
}

colo_status_t colo_machine_load(const char *topology, bool devices, colo_machine_t *machine)
{
    return unbuilt();
}

void colo_machine_free(colo_machine_t *machine)
{
}

colo_status_t colo_machine_bind(const colo_machine_t *machine, const int32_t *os, int32_t n)
{
    return unbuilt();
}

const char *colo_topology_version(void)
{
    return NULL;
}
