/* SPDX-License-Identifier: Apache-2.0 */
/* info-tool.h - the parts of colo-info: what was asked, what was found, two ways to print it. */
#ifndef TOOLS_INFO_INFO_TOOL_H
#define TOOLS_INFO_INFO_TOOL_H

#include <colobridge/topology.h>
#include <colobridge/plan.h>

#include "options.h"

#define INFO_RANKS_MAX 4096               /* ranks that --bind lists */
#define INFO_PLANS_MAX ((int64_t)1 << 20) /* ranks whose plans are counted */

/* Which dims cross what, under one order and one binding. */
typedef struct info_row {
    char dims[2 * COLO_DIM_NAME_MAX];
    colo_topology_cut_t cut;
} info_row_t;
typedef struct info_table {
    colo_grid_t grid;
    colo_bind_t bind;
    int n;
    info_row_t *row; /* dims of more than one rank, then pairs of them that are not the grid */
} info_table_t;

typedef struct info_ask {
    bool json;
    const char *topology;
    int64_t world, ranks_per_node;
    colo_bind_t policy;
    bool bind;
    bool audit; /* --grid */
    colo_grid_t grid;
    bool bridge; /* --src, --dst ...; config points at the layouts */
    colo_layout_t src, dst;
    colo_plan_config_t config;
} info_ask_t;

typedef struct info_found {
    colo_topology_t *topology; /* NULL: why not is in lacks */
    char lacks[256];
    info_table_t given, order, binding; /* n is 0 where nothing is better */
    bool better_order, better_binding;
    colo_topology_traffic_t traffic[2];
} info_found_t;

/* Everything that was asked for; complains and returns the exit code when it cannot be had. */
int info_find(const info_ask_t *ask, info_found_t *found);
void info_forget(info_found_t *found);

/* A plain run: versions, backends, topology, environment variables. Else: what --grid, --bind and
 * --src asked. */
int info_print_text(const info_ask_t *ask, const info_found_t *found);
int info_print_json(const info_ask_t *ask, const info_found_t *found);

/* Rows of the list of backends. */
typedef struct info_backend {
    const char *name;
    bool built;
    const char *what;
} info_backend_t;
#define INFO_BACKENDS 6
const info_backend_t *info_backends(void);
const char *info_products(void); /* of the lm_head in host memory: by what, and why */
/* why CUDA is not asked for its devices */
const char *info_cuda(void);
/* "0.1.0" of the headers; static storage */
const char *info_header_version(void);

/* world.c: what the ranks of a job are to each other; @path: a folder that all hosts see. */
int info_world(const char *path);

static inline bool info_is_plain(const info_ask_t *ask)
{
    return !ask->audit && !ask->bridge && !ask->bind;
}

#endif
