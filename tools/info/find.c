/* SPDX-License-Identifier: Apache-2.0 */
/*
 * find.c - what colo-info prints, found before anything is printed.
 *
 * Nothing is decided here: the audit, the advice and the bytes are the library's. Everything is
 * found first, so that a run either prints all of it or one line on stderr.
 */
#include "info-tool.h"

#include <stdlib.h>
#include <string.h>

#include <colobridge/lm_head.h>
#include <colobridge/version.h>

const info_backend_t *info_backends(void)
{
    static info_backend_t list[INFO_BACKENDS] = {
        {"threads", true, "ranks in one process"},
        {"sockets", true, "ranks of many processes of a host, from any all-gather"},
        {"ucx", INFO_UCX, "the same between hosts"},
        {"nccl", INFO_NCCL, "ranks with a GPU each"},
        {"cuda", INFO_CUDA, "tensors in GPU memory"},
        {"hwloc", false, "placement and binding"},
    };
    list[INFO_BACKENDS - 1].built = colo_topology_version() != NULL;
    return list;
}

const char *info_products(void)
{
    static char text[600];
    const colo_status_t st = colo_gemm_describe(COLO_GEMM_AUTO, text, sizeof text);
    return st < 0 ? colo_last_error() : text;
}

const char *info_cuda(void)
{
    return INFO_CUDA ? "GPUs are listed with the topology, by their place on the PCI bus"
                     : "no CUDA backend in this build";
}

const char *info_header_version(void)
{
    static char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", COLO_VERSION_MAJOR, COLO_VERSION_MINOR,
             COLO_VERSION_PATCH);
    return text;
}

/* What a person can mend on the command line is wrong use; the rest is a problem found. */
static int fail(colo_status_t st)
{
    bool use = st == COLO_ERR_ARG || st == COLO_ERR_IO;
    return tool_complain(use ? TOOL_WRONG_USE : TOOL_PROBLEM, "%s", colo_last_error());
}

static int add_row(const colo_topology_t *topology, info_table_t *t, int32_t a, int32_t b)
{
    info_row_t *row = &t->row[t->n];
    row->cut.struct_size = sizeof row->cut;
    const char *second = b < 0 ? "" : t->grid.name[b];
    snprintf(row->dims, sizeof row->dims, "%s%s%s", t->grid.name[a], b < 0 ? "" : "-", second);
    colo_status_t st = colo_topology_cut(topology, &t->grid, row->dims, &row->cut);
    if (st < 0)
        return fail(st);
    t->n++;
    return TOOL_OK;
}

/* Rows in the order of @named's dims, so that two tables can be compared line by line. */
static int fill_table(const colo_topology_t *topology, const colo_grid_t *named,
                      const colo_grid_t *grid, colo_bind_t bind, info_table_t *t)
{
    int32_t dim[COLO_DIMS_MAX], n = 0;
    t->grid = *grid;
    t->bind = bind;
    for (int32_t d = 0; d < named->ndims; d++)
        if (named->extent[d] > 1)
            dim[n++] = colo_grid_dim(grid, named->name[d]);
    t->row = calloc((size_t)(n + n * n / 2 + 1), sizeof *t->row);
    if (!t->row)
        return tool_problem("no memory for %d dims", (int)n);
    for (int32_t i = 0; i < n; i++)
        TOOL_TRY(add_row(topology, t, dim[i], -1));
    for (int32_t i = 0; i < n && n > 2; i++)
        for (int32_t k = i + 1; k < n; k++)
            TOOL_TRY(add_row(topology, t, dim[i], dim[k]));
    return TOOL_OK;
}

static int audit(const info_ask_t *ask, info_found_t *f)
{
    colo_grid_t order;
    colo_bind_t bind;
    colo_status_t st = colo_topology_advise(f->topology, &ask->grid, &order, &bind);
    if (st < 0)
        return fail(st);
    f->better_order = !colo_grid_equal(&order, &ask->grid);
    f->better_binding = bind != ask->policy;
    TOOL_TRY(fill_table(f->topology, &ask->grid, &ask->grid, ask->policy, &f->given));
    if (f->better_order)
        TOOL_TRY(fill_table(f->topology, &ask->grid, &order, ask->policy, &f->order));
    if (!f->better_binding)
        return TOOL_OK;
    if ((st = colo_topology_rebind(f->topology, bind)) < 0)
        return fail(st);
    TOOL_TRY(fill_table(f->topology, &ask->grid, &ask->grid, bind, &f->binding));
    st = colo_topology_rebind(f->topology, ask->policy);
    return st < 0 ? fail(st) : TOOL_OK;
}

static int count_bridge(const info_ask_t *ask, info_found_t *f)
{
    for (int pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++)
        f->traffic[pass] = (colo_topology_traffic_t){COLO_TOPOLOGY_TRAFFIC_INIT};
    for (int64_t r = 0; r < ask->world; r++) {
        colo_plan_t *plan = NULL;
        colo_status_t st = colo_plan_create(&plan, &ask->config, r);
        for (int pass = COLO_PASS_FORWARD; st == COLO_OK && pass <= COLO_PASS_BACKWARD; pass++)
            st = colo_topology_traffic(f->topology, plan, (colo_pass_t)pass, &f->traffic[pass]);
        colo_plan_destroy(&plan);
        if (st < 0)
            return fail(st);
    }
    return TOOL_OK;
}

int info_find(const info_ask_t *ask, info_found_t *f)
{
    colo_topology_config_t config = {COLO_TOPOLOGY_CONFIG_INIT, .topology = ask->topology,
                                     .world = ask->world, .ranks_per_node = ask->ranks_per_node,
                                     .bind = ask->policy};
    if (info_is_plain(ask)) { /* the machine only */
        config.world = 1;
        config.ranks_per_node = 1;
    }
    colo_status_t st = colo_topology_create(&f->topology, &config);
    if (st < 0 && info_is_plain(ask) && !ask->topology) {
        snprintf(f->lacks, sizeof f->lacks, "%s", colo_last_error());
        return TOOL_OK;
    }
    if (st < 0)
        return fail(st);
    if (ask->audit)
        TOOL_TRY(audit(ask, f));
    return ask->bridge ? count_bridge(ask, f) : TOOL_OK;
}

void info_forget(info_found_t *f)
{
    colo_topology_destroy(&f->topology);
    free(f->given.row);
    free(f->order.row);
    free(f->binding.row);
}
