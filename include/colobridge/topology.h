/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology.h - where ranks sit on machines: NUMA nodes, packages, devices, and what that costs a
 * grid.
 *
 * A topology object has a machine's topology (this machine's, a file's, or a synthetic one) and a
 * map of ranks to its processors. ranks_per_node consecutive world ranks share a host, all hosts
 * are alike, and a binding policy decides which processors each rank may use. It needs hwloc, the
 * header in the build and the library at run time, which the first call that needs it loads;
 * without hwloc the calls that create one return COLO_ERR_UNBUILT. No communication.
 *
 * One thread at a time uses a topology object while it is created or rebound. After that any
 * threads may share it.
 */
#ifndef COLOBRIDGE_TOPOLOGY_H
#define COLOBRIDGE_TOPOLOGY_H

#include <colobridge/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_TOPOLOGY_XML_MAX (16 << 20) /* bytes of a topology file */
#define COLO_TOPOLOGY_PU_MAX 16384       /* processors of a machine */
#define COLO_TOPOLOGY_SYNTHETIC_MAX 4096 /* of a synthetic description, at most 512 in one place */
#define COLO_TOPOLOGY_WORLD_MAX ((int64_t)1 << 24)

typedef struct colo_topology colo_topology_t;

/** Which processors the ranks of a host get. l: a rank's number on its host; n: ranks per host. */
typedef enum colo_bind_t {
    COLO_BIND_NONE = 0,    /* all of the machine */
    COLO_BIND_CORE = 1,    /* compact: rank l gets core l, or processor l if n > cores */
    COLO_BIND_SCATTER = 2, /* a core (or processor) each, packages in turn, then their NUMA nodes */
    COLO_BIND_NUMA = 3,    /* a whole NUMA node, shared by neighbours in even blocks */
    COLO_BIND_PACKAGE = 4, /* a whole package, likewise */
    COLO_BIND_COUNT = 5
} colo_bind_t;

/** colo_bind_name() - "none", "core", "scatter", "numa", "package"; "?" for another value */
COLO_API const char *colo_bind_name(colo_bind_t bind);
/** colo_bind_parse() - from the name above. Errors: COLO_ERR_ARG */
COLO_API colo_status_t colo_bind_parse(const char *text, colo_bind_t *bind);

/** Members from ranks_per_node on have defaults: 0. */
typedef struct colo_topology_config_t {
    size_t struct_size;
    /* NULL: this machine, as far as the calling thread may use it. A text that ends in ".xml" or
     * has a '/': an hwloc XML file, at most COLO_TOPOLOGY_XML_MAX bytes. Else a synthetic
     * description as hwloc's lstopo takes it: "package:2 numa:2 core:4 pu:1". Borrowed. */
    const char *topology;
    int64_t world;          /* ranks 0 .. world - 1 */
    int64_t ranks_per_node; /* ranks of a host; 0: all of them on one */
    colo_bind_t bind;
} colo_topology_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPOLOGY_CONFIG_INIT sizeof(colo_topology_config_t), nullptr, 0, 0, COLO_BIND_NONE
#else
#define COLO_TOPOLOGY_CONFIG_INIT .struct_size = sizeof(colo_topology_config_t)
#endif

/**
 * colo_topology_create() - read the topology, map the ranks; owned by the caller
 * Errors:  COLO_ERR_UNBUILT (no hwloc in this build or on this machine), COLO_ERR_IO (the file
 *          cannot be read, is too large, or holds no topology), COLO_ERR_ARG (not understood as
 *          synthetic; world outside 1..COLO_TOPOLOGY_WORLD_MAX; more ranks on a host than it has
 *          processors), COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_topology_create(colo_topology_t **topology,
                                            const colo_topology_config_t *config);
/** colo_topology_destroy() - takes NULL */
COLO_API void colo_topology_destroy(colo_topology_t **topology);
/** colo_topology_rebind() - another policy on the same machine. Errors: COLO_ERR_ARG,
 * COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_topology_rebind(colo_topology_t *topology, colo_bind_t bind);

/** colo_topology_version() - of the hwloc that calls above use ("2.9.0"), NULL when there is
 * none; loads it */
COLO_API const char *colo_topology_version(void);

/* ---- the machine ---- */

typedef struct colo_topology_machine_t {
    size_t struct_size;
    const char *source; /* "this machine", the file's name, or the description; a view */
    int32_t packages, numa_nodes, cores, pus, devices;
} colo_topology_machine_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPOLOGY_MACHINE_INIT sizeof(colo_topology_machine_t), nullptr, 0, 0, 0, 0, 0
#else
#define COLO_TOPOLOGY_MACHINE_INIT .struct_size = sizeof(colo_topology_machine_t)
#endif
/**
 * colo_topology_machine() - what the machine consists of; local
 * @machine:  out. Its source lives as long as @topology
 * Errors:    COLO_ERR_ARG
 * Objects are numbered from 0 in topology order. If the topology names no packages, NUMA nodes or
 * cores, the machine has one package, one NUMA node, or one core per processor. NUMA nodes without
 * processors are not counted.
 */
COLO_API colo_status_t colo_topology_machine(const colo_topology_t *topology,
                                             colo_topology_machine_t *machine);

typedef enum colo_device_kind_t { COLO_DEVICE_GPU = 0, COLO_DEVICE_NETWORK = 1 } colo_device_kind_t;

/** A PCI device of a host. numa or package is -1 if it is near processors of several. The library
 * makes it, so it may get more members at its end. */
typedef struct colo_topology_device_t {
    colo_device_kind_t kind;
    char name[32]; /* the system's name for it ("cuda0", "eth0"), "" if unknown */
    char bus[16];  /* "0000:3b:00.0" */
    int32_t numa, package;
} colo_topology_device_t;
/** colo_topology_device() - the i-th, in bus order; NULL past the end. A view */
COLO_API const colo_topology_device_t *colo_topology_device(const colo_topology_t *topology,
                                                            int32_t i);

/* ---- the ranks ---- */

/** Where a rank may run. -1: its processors belong to several of that kind. */
typedef struct colo_topology_spot_t {
    size_t struct_size;
    int64_t host;
    int32_t package, numa, core;
    int32_t pu;  /* the system's number of the processor */
    int32_t gpu; /* device number of its GPU: the l-th GPU goes to rank l of a host; -1: none */
} colo_topology_spot_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPOLOGY_SPOT_INIT sizeof(colo_topology_spot_t), 0, 0, 0, 0, 0, 0
#else
#define COLO_TOPOLOGY_SPOT_INIT .struct_size = sizeof(colo_topology_spot_t)
#endif

/** colo_topology_spot() - Errors: COLO_ERR_ARG (rank outside the world) */
COLO_API colo_status_t colo_topology_spot(const colo_topology_t *topology, int64_t rank,
                                          colo_topology_spot_t *spot);
/**
 * colo_topology_gpu_rank() - the rank on @host that uses device @device, -1 if no rank does
 */
COLO_API int64_t colo_topology_gpu_rank(const colo_topology_t *topology, int64_t host,
                                        int32_t device);
/** colo_topology_cpus() - the system's numbers of the processors of @rank, "0-3,8"; returns the
 * length it needs without NUL, writes at most @cap bytes; 0 for a rank outside the world */
COLO_API size_t colo_topology_cpus(const colo_topology_t *topology, int64_t rank, char *text,
                                   size_t cap);
/**
 * colo_topology_bind() - the calling thread runs on the processors of @rank from now on
 * Errors:  COLO_ERR_ARG (rank outside the world), COLO_ERR_STATE (the topology is not this
 *          machine's), COLO_ERR_IO (the system refused), COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_topology_bind(const colo_topology_t *topology, int64_t rank);
/**
 * colo_topology_create_env() - for launchers: a topology object of one host, as COLO_BIND asks
 * @topology:  out, owned by the caller. NULL if COLO_BIND asks for none. Also NULL, with one
 *             warning per process, if it cannot be done (no hwloc, fewer processors than ranks, no
 *             such policy): launchers then go on without binding
 * @ranks:     ranks of this host
 */
COLO_API void colo_topology_create_env(colo_topology_t **topology, int64_t ranks);

/* ---- what a grid pays ---- */

/** Groups of a dim set, and how many have members on different ones. A group across hosts crosses
 *  the other two as well; a rank that is free to run on several NUMA nodes (packages) makes its
 *  group one that crosses. */
typedef struct colo_topology_cut_t {
    size_t struct_size;
    int64_t size, groups; /* members of a group; groups */
    int64_t numa, package, host;
} colo_topology_cut_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPOLOGY_CUT_INIT sizeof(colo_topology_cut_t), 0, 0, 0, 0, 0
#else
#define COLO_TOPOLOGY_CUT_INIT .struct_size = sizeof(colo_topology_cut_t)
#endif

/**
 * colo_topology_cut() - which groups of @dims cross
 * @grid:   inside the topology's world
 * @dims:   names joined by "-", as colo_grid_group()
 * Cost:    O(ranks of a few hosts) for one dim, O(ranks of the grid) for several
 * Errors:  COLO_ERR_ARG
 */
COLO_API colo_status_t colo_topology_cut(const colo_topology_t *topology, const colo_grid_t *grid,
                                         const char *dims, colo_topology_cut_t *cut);
/**
 * colo_topology_advise() - a dim order and a binding with which fewer groups cross
 * @order:  out the dims of @grid in the best order of all under the binding in force
 * @bind:   out the best binding under the given order; COLO_BIND_NONE only if it is in force
 * If nothing is better, both are what is in force. To compare, the groups of each dim count: those
 * across hosts first, then packages, then NUMA nodes. Dims decide one after the other, in the
 * order of how much their groups usually communicate (tp, ep, cp, others as named, dp, pp). Among
 * equals the order nearest to the given one (compared dim by dim) and the first binding win.
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_topology_advise(const colo_topology_t *topology,
                                            const colo_grid_t *grid, colo_grid_t *order,
                                            colo_bind_t *bind);

/** Bytes that ranks send, and those of them that cross; counted as groups above. */
typedef struct colo_topology_traffic_t {
    size_t struct_size;
    int64_t total, numa, package, host;
} colo_topology_traffic_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TOPOLOGY_TRAFFIC_INIT sizeof(colo_topology_traffic_t), 0, 0, 0, 0
#else
#define COLO_TOPOLOGY_TRAFFIC_INIT .struct_size = sizeof(colo_topology_traffic_t)
#endif

/**
 * colo_topology_traffic() - add the bytes that the plan's rank sends in one pass to @traffic
 * Called for the plans of all ranks, it gives the bytes of the whole bridge.
 * @traffic:  in/out; untouched on error
 * Errors:    COLO_ERR_ARG (the plan has a rank outside the world; more than 2^63 bytes)
 */
COLO_API colo_status_t colo_topology_traffic(const colo_topology_t *topology,
                                             const colo_plan_t *plan, colo_pass_t pass,
                                             colo_topology_traffic_t *traffic);

#ifdef __cplusplus
}
#endif
#endif
