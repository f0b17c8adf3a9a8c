/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology.h (private) - the seam between placement and the code that knows the machine.
 *
 * Behind it is one file, topology-hwloc.c or topology-none.c, chosen by the build. What comes
 * through is a plain table of processors and devices; everything that is decided from it is in
 * topology.c (where ranks sit) and locality.c (what that costs a grid), which know nothing of
 * hwloc.
 */
#ifndef COLO_GRID_TOPOLOGY_H
#define COLO_GRID_TOPOLOGY_H

#include <colobridge/topology.h>

/* What ranks of one policy share: a processor, a core, a NUMA node, a package, all. */
typedef enum colo_share { SHARE_PU, SHARE_CORE, SHARE_NUMA, SHARE_PACKAGE, SHARE_ALL } colo_share_t;

/* A processor: its number for the system, and which unit of each kind it is or belongs to. */
typedef struct colo_pu {
    int32_t os, of[SHARE_ALL + 1];
} colo_pu_t;

typedef struct colo_machine {
    int32_t npus, ncores, nnuma, npackages, ndevices;
    colo_pu_t *pu; /* in topology order: the processors of a core are neighbours */
    colo_topology_device_t *device;
    void *here; /* for binding; NULL when this is another machine's topology */
} colo_machine_t;

/* @topology as in colo_topology_config_t; @devices: look for them, which takes a while. @machine is
 * owned by the caller, untouched on error. */
colo_status_t colo_machine_load(const char *topology, bool devices, colo_machine_t *machine);
void colo_machine_free(colo_machine_t *machine);
/* The calling thread on the processors with these system numbers. */
colo_status_t colo_machine_bind(const colo_machine_t *machine, const int32_t *os, int32_t n);

/* What a policy gives to the ranks of a host. */
typedef struct colo_placement {
    colo_bind_t bind;
    colo_share_t share;         /* how @bind is done with so many ranks */
    int32_t *unit;              /* [per_host] which core, NUMA node ... is rank l's */
    colo_topology_spot_t *spot; /* [per_host] host 0's; gpu included */
} colo_placement_t;

struct colo_topology {
    colo_machine_t machine;
    char *source; /* owned */
    int64_t world, per_host;
    int32_t *gpus; /* [ngpus] device numbers */
    int32_t ngpus;
    colo_placement_t placed;
};

/* By a policy; the topology is not changed. @placement is the caller's. */
colo_status_t colo_topology_place(const colo_topology_t *topology, colo_bind_t bind,
                                  colo_placement_t *placement);
void colo_topology_drop(colo_placement_t *placement);

/* Two ranks by their world numbers; @spots as in colo_placement_t. Bits, host includes the others.
 */
enum { CROSS_NUMA = 1, CROSS_PACKAGE = 2, CROSS_HOST = 4 };
static inline int colo_topology_cross(const colo_topology_spot_t *spots, int64_t per_host,
                                      int64_t a, int64_t b)
{
    if (a / per_host != b / per_host)
        return CROSS_NUMA | CROSS_PACKAGE | CROSS_HOST;
    const colo_topology_spot_t *x = &spots[a % per_host], *y = &spots[b % per_host];
    int numa = x->numa < 0 || y->numa < 0 || x->numa != y->numa;
    int package = x->package < 0 || y->package < 0 || x->package != y->package;
    return (numa ? CROSS_NUMA : 0) | (package ? CROSS_PACKAGE : 0);
}

#endif
