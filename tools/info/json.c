/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - colo-info for programs. The keys are promised in docs/runtime/topology.md; a key whose subject
 * was not asked for is left out, one whose answer does not exist is null.
 */
#include "info-tool.h"

#include <colobridge/log.h>
#include <colobridge/version.h>

#include <jansson.h>
#include <stdlib.h>

/* A value that is no UTF-8 is quoted with its bytes escaped: JSON has no other way to carry it. */
static json_t *text_of(const char *value)
{
    char quoted[TOOL_QUOTE_MAX];
    json_t *text = json_string(value);
    return text ? text : json_string(tool_quote(quoted, value));
}

static json_t *number_of(int64_t n)
{
    return n < 0 ? json_null() : json_integer(n);
}

static json_t *spec_of(const colo_grid_t *grid)
{
    char spec[COLO_KEY_MAX * 3];
    colo_grid_print(grid, spec, sizeof spec);
    return json_string(spec);
}

/* ---- the machine ---- */

static json_t *machine_of(const colo_topology_t *topology)
{
    json_t *devices = json_array();
    const colo_topology_device_t *d;
    colo_topology_machine_t m = {COLO_TOPOLOGY_MACHINE_INIT};
    if (!topology) {
        json_decref(devices);
        return json_null();
    }
    (void)colo_topology_machine(topology, &m);
    for (int32_t i = 0; (d = colo_topology_device(topology, i)); i++)
        json_array_append_new(devices,
                              json_pack("{s:s,s:s,s:s,s:o,s:o}", "kind",
                                        d->kind == COLO_DEVICE_GPU ? "gpu" : "network", "name",
                                        d->name, "bus", d->bus, "numa", number_of(d->numa),
                                        "package", number_of(d->package)));
    return json_pack("{s:o,s:i,s:i,s:i,s:i,s:o}", "source", text_of(m.source), "packages",
                     (int)m.packages, "numa_nodes", (int)m.numa_nodes, "cores", (int)m.cores,
                     "processors", (int)m.pus, "devices", devices);
}

static json_t *basics(const info_found_t *f)
{
    const info_backend_t *b = info_backends();
    json_t *built = json_object(), *variables = json_array();
    bool set;
    for (int i = 0; i < INFO_BACKENDS; i++)
        json_object_set_new(built, b[i].name, json_boolean(b[i].built));
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_variable_t *k = colo_env_variable(i);
        const char *value = colo_env_value(k->name, &set);
        json_array_append_new(variables,
                              json_pack("{s:s,s:o,s:s,s:b,s:s,s:s,s:s?}", "name", k->name, "value",
                                        text_of(value), "source", set ? "environment" : "default",
                                        "allowed", colo_env_check(k->name) == COLO_OK, "default",
                                        k->fallback, "help", k->help, "overrides", k->overrides));
    }
    return json_pack("{s:s,s:s,s:{s:s?},s:o,s:{s:[],s:s},s:o,s:s?,s:o}", "version", colo_version(),
                     "header_version", info_header_version(), "libraries", "hwloc",
                     colo_topology_version(), "backends", built, "cuda", "devices", "why",
                     info_cuda(), "topology", machine_of(f->topology), "topology_error",
                     f->topology ? NULL : f->lacks, "environment_variables", variables);
}

/* ---- what was asked ---- */

static json_t *rows_of(const info_table_t *t)
{
    json_t *rows = json_array();
    for (int i = 0; i < t->n; i++) {
        const colo_topology_cut_t *c = &t->row[i].cut;
        json_array_append_new(rows,
                              json_pack("{s:s,s:I,s:I,s:I,s:I,s:I}", "dims", t->row[i].dims, "size",
                                        (json_int_t)c->size, "groups", (json_int_t)c->groups,
                                        "cross_numa", (json_int_t)c->numa, "cross_package",
                                        (json_int_t)c->package, "cross_host", (json_int_t)c->host));
    }
    return rows;
}

static json_t *table_of(const info_table_t *t, bool there)
{
    if (!there)
        return json_null();
    return json_pack("{s:o,s:s,s:o}", "spec", spec_of(&t->grid), "binding", colo_bind_name(t->bind),
                     "groups", rows_of(t));
}

static json_t *audit_of(const info_ask_t *ask, const info_found_t *f)
{
    int64_t per_host = ask->ranks_per_node ? ask->ranks_per_node : ask->world;
    return json_pack(
        "{s:I,s:I,s:I,s:o,s:o,s:o}", "ranks", (json_int_t)ask->grid.size, "ranks_per_node",
        (json_int_t)per_host, "hosts", (json_int_t)((ask->world + per_host - 1) / per_host),
        "given", table_of(&f->given, true), "better_order", table_of(&f->order, f->better_order),
        "better_binding", table_of(&f->binding, f->better_binding));
}

static json_t *traffic_of(const colo_topology_traffic_t *t)
{
    return json_pack("{s:I,s:I,s:I,s:I}", "bytes", (json_int_t)t->total, "cross_numa",
                     (json_int_t)t->numa, "cross_package", (json_int_t)t->package, "cross_host",
                     (json_int_t)t->host);
}

static json_t *bridge_of(const info_ask_t *ask, const info_found_t *f)
{
    return json_pack("{s:o,s:o,s:o,s:o}", "src", spec_of(&ask->src.grid), "dst",
                     spec_of(&ask->dst.grid), "forward", traffic_of(&f->traffic[COLO_PASS_FORWARD]),
                     "backward", traffic_of(&f->traffic[COLO_PASS_BACKWARD]));
}

static json_t *rank_of(const colo_topology_t *topology, int64_t rank)
{
    colo_topology_spot_t s = {COLO_TOPOLOGY_SPOT_INIT};
    if (colo_topology_spot(topology, rank, &s) < 0)
        return NULL;
    size_t cap = colo_topology_cpus(topology, rank, NULL, 0) + 1;
    char *cpus = malloc(cap);
    if (!cpus)
        return NULL;
    colo_topology_cpus(topology, rank, cpus, cap);
    const colo_topology_device_t *d = colo_topology_device(topology, s.gpu);
    bool known = d && d->numa >= 0 && s.numa >= 0;
    json_t *o =
        json_pack("{s:I,s:I,s:o,s:o,s:o,s:s,s:s?,s:o}", "rank", (json_int_t)rank, "host",
                  (json_int_t)s.host, "package", number_of(s.package), "numa", number_of(s.numa),
                  "core", number_of(s.core), "processors", cpus, "gpu", d ? d->bus : NULL,
                  "gpu_near", known ? json_boolean(d->numa == s.numa) : json_null());
    free(cpus);
    return o;
}

static json_t *ranks_of(const info_ask_t *ask, const info_found_t *f)
{
    json_t *ranks = json_array();
    for (int64_t r = 0; r < ask->world; r++)
        if (json_array_append_new(ranks, rank_of(f->topology, r)) != 0) {
            json_decref(ranks);
            return NULL;
        }
    return ranks;
}

int info_print_json(const info_ask_t *ask, const info_found_t *f)
{
    json_t *doc;
    int bad = 0;
    if (info_is_plain(ask)) {
        doc = basics(f);
    } else {
        doc = json_pack("{s:o,s:s}", "topology", machine_of(f->topology), "binding",
                        colo_bind_name(ask->policy));
        if (ask->audit)
            bad |= json_object_set_new(doc, "grid", audit_of(ask, f));
        if (ask->bridge)
            bad |= json_object_set_new(doc, "bridge", bridge_of(ask, f));
        if (ask->bind)
            bad |= json_object_set_new(doc, "ranks", ranks_of(ask, f));
    }
    if (bad || !doc || json_dumpf(doc, stdout, JSON_INDENT(2)) != 0) {
        json_decref(doc);
        return tool_problem("no memory for the JSON, or nowhere to write it");
    }
    printf("\n");
    json_decref(doc);
    return TOOL_OK;
}
