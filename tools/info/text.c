/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.c - colo-info for people: columns that line up, within 100 columns where names allow.
 */
#include "info-tool.h"

#include <colobridge/log.h>
#include <colobridge/version.h>

#include <string.h>

static const char *many(int64_t n)
{
    return n == 1 ? "" : "s";
}

/* ---- the machine ---- */

static void print_device(const colo_topology_device_t *d)
{
    char numa[32] = "", package[32] = "";
    if (d->numa >= 0)
        snprintf(numa, sizeof numa, ", NUMA node %d", (int)d->numa);
    if (d->package >= 0)
        snprintf(package, sizeof package, ", package %d", (int)d->package);
    printf("  %-8s %-12s %s%s%s\n", d->kind == COLO_DEVICE_GPU ? "GPU" : "network", d->bus, d->name,
           numa, package);
}

static void print_machine(const colo_topology_t *topology)
{
    char quoted[TOOL_QUOTE_MAX];
    const colo_topology_device_t *d;
    colo_topology_machine_t m = {COLO_TOPOLOGY_MACHINE_INIT};
    (void)colo_topology_machine(topology, &m);
    printf("%stopology%s %s\n", tool_bold, tool_plain, tool_quote(quoted, m.source));
    printf("  %d package%s, %d NUMA node%s, %d core%s, %d processor%s\n", (int)m.packages,
           many(m.packages), (int)m.numa_nodes, many(m.numa_nodes), (int)m.cores, many(m.cores),
           (int)m.pus, many(m.pus));
    for (int32_t i = 0; (d = colo_topology_device(topology, i)); i++)
        print_device(d);
}

static void print_basics(const info_found_t *f)
{
    char quoted[TOOL_QUOTE_MAX];
    const info_backend_t *b = info_backends();
    const char *hwloc = colo_topology_version();
    bool set;
    printf("%scolobridge %s%s (headers %s, hwloc %s)\n\n%sbackends%s\n", tool_bold, colo_version(),
           tool_plain, info_header_version(), hwloc ? hwloc : "none", tool_bold, tool_plain);
    for (int i = 0; i < INFO_BACKENDS; i++)
        printf("  %-8s %-4s %s\n", b[i].name, b[i].built ? "yes" : "no", b[i].what);
    printf("\n%sproducts in host memory%s\n  %s\n", tool_bold, tool_plain, info_products());
    printf("\n%sdevices%s\n  %s\n\n", tool_bold, tool_plain, info_cuda());
    if (f->topology)
        print_machine(f->topology);
    else
        printf("%stopology%s unknown\n  %s\n", tool_bold, tool_plain, f->lacks);
    printf("\n%senvironment variables%s\n", tool_bold, tool_plain);
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_variable_t *k = colo_env_variable(i);
        const char *value = colo_env_value(k->name, &set);
        printf("  %-20s %-12s %-16s %s\n", k->name, tool_quote(quoted, value),
               colo_env_check(k->name) < 0 ? "not allowed"
               : set                       ? "from environment"
               : k->overrides              ? "program, default"
                                           : "default",
               k->help);
    }
}

/* ---- grids ---- */

static void print_table(const info_table_t *t)
{
    int width = 4;
    for (int i = 0; i < t->n; i++)
        if ((int)strlen(t->row[i].dims) > width)
            width = (int)strlen(t->row[i].dims);
    printf("  %-*s  %8s  %8s  %12s  %8s  %8s\n", width, "dims", "size", "groups", "across NUMA",
           "package", "host");
    for (int i = 0; i < t->n; i++) {
        const colo_topology_cut_t *c = &t->row[i].cut;
        printf("  %-*s  %8lld  %8lld  %12lld  %8lld  %8lld\n", width, t->row[i].dims,
               (long long)c->size, (long long)c->groups, (long long)c->numa, (long long)c->package,
               (long long)c->host);
    }
}

static void print_audit(const info_ask_t *ask, const info_found_t *f)
{
    char spec[COLO_KEY_MAX * 3];
    int64_t per_host = ask->ranks_per_node ? ask->ranks_per_node : ask->world;
    int64_t hosts = (ask->world + per_host - 1) / per_host;
    colo_grid_print(&ask->grid, spec, sizeof spec);
    printf("\n%sgrid %s%s: %lld rank%s, %lld per host, %lld host%s, binding %s\n", tool_bold, spec,
           tool_plain, (long long)ask->grid.size, many(ask->grid.size), (long long)per_host,
           (long long)hosts, many(hosts), colo_bind_name(ask->policy));
    print_table(&f->given);
    if (f->better_order) {
        colo_grid_print(&f->order.grid, spec, sizeof spec);
        printf("\n%sbetter order %s%s\n", tool_bold, spec, tool_plain);
        print_table(&f->order);
    } else {
        printf("\nno other order of the dims crosses less\n");
    }
    if (f->better_binding) {
        printf("\n%sbetter binding %s%s\n", tool_bold, colo_bind_name(f->binding.bind), tool_plain);
        print_table(&f->binding);
    } else {
        printf("\nno other binding crosses less\n");
    }
}

static void print_bridge(const info_ask_t *ask, const info_found_t *f)
{
    char src[COLO_KEY_MAX * 3], dst[COLO_KEY_MAX * 3];
    colo_grid_print(&ask->src.grid, src, sizeof src);
    colo_grid_print(&ask->dst.grid, dst, sizeof dst);
    printf("\n%sbridge %s -> %s%s\n  %-8s  %12s  %12s  %12s  %12s\n", tool_bold, src, dst,
           tool_plain, "", "sent", "across NUMA", "package", "host");
    for (int w = 0; w < 2; w++) {
        const colo_topology_traffic_t *t = &f->traffic[w];
        char sent[24], numa[24], package[24], host[24];
        printf("  %-8s  %12s  %12s  %12s  %12s\n", w == COLO_PASS_FORWARD ? "forward" : "backward",
               tool_bytes(sent, t->total), tool_bytes(numa, t->numa),
               tool_bytes(package, t->package), tool_bytes(host, t->host));
    }
}

/* ---- ranks ---- */

static const char *number(char text[16], int32_t n)
{
    if (n < 0)
        return "any";
    snprintf(text, 16, "%d", (int)n);
    return text;
}

/* Is the GPU on the rank's NUMA node? If either is on several, the answer is unknown. */
static const char *distance(const colo_topology_device_t *d, const colo_topology_spot_t *s)
{
    if (!d)
        return "";
    if (d->numa < 0 || s->numa < 0)
        return "any";
    return d->numa == s->numa ? "near" : "far";
}

static void print_rank(const colo_topology_t *topology, int64_t rank, bool gpus)
{
    char cpus[4096], package[16], numa[16], core[16], gpu[64] = "";
    colo_topology_spot_t s = {COLO_TOPOLOGY_SPOT_INIT};
    if (colo_topology_spot(topology, rank, &s) < 0)
        return;
    size_t len = colo_topology_cpus(topology, rank, cpus, sizeof cpus);
    const colo_topology_device_t *d = colo_topology_device(topology, s.gpu);
    if (gpus)
        snprintf(gpu, sizeof gpu, "  %-12s %-4s", d ? d->bus : "none", distance(d, &s));
    printf("  %6lld  %6lld  %7s  %4s  %5s%s  %s%s\n", (long long)rank, (long long)s.host,
           number(package, s.package), number(numa, s.numa), number(core, s.core), gpu, cpus,
           len < sizeof cpus ? "" : "...");
}

static void print_ranks(const info_ask_t *ask, const info_found_t *f)
{
    const colo_topology_device_t *d;
    bool gpus = false;
    for (int32_t i = 0; (d = colo_topology_device(f->topology, i)); i++)
        gpus |= d->kind == COLO_DEVICE_GPU;
    printf("\n%sranks%s, binding %s\n  %6s  %6s  %7s  %4s  %5s%s  %s\n", tool_bold, tool_plain,
           colo_bind_name(ask->policy), "rank", "host", "package", "NUMA", "core",
           gpus ? "  GPU              " : "", "processors");
    for (int64_t r = 0; r < ask->world; r++)
        print_rank(f->topology, r, gpus);
}

int info_print_text(const info_ask_t *ask, const info_found_t *f)
{
    if (info_is_plain(ask)) {
        print_basics(f);
        return TOOL_OK;
    }
    print_machine(f->topology);
    if (ask->audit)
        print_audit(ask, f);
    if (ask->bridge)
        print_bridge(ask, f);
    if (ask->bind)
        print_ranks(ask, f);
    return TOOL_OK;
}
