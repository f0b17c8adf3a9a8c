/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology.c - which processors each rank of a host gets, and where that puts it.
 *
 * A policy is a choice of units (processors, cores, NUMA nodes, packages, or all) and of one of
 * them for each rank of a host; every host is alike, so this is done once. Where a rank is follows
 * from its unit alone: it is on a NUMA node when all processors of the unit are. Policies that
 * give away whole nodes deal by processors: rank l of n gets the node of processor floor(l P / n),
 * so neighbours share, and nodes of different sizes are filled alike.
 *
 * What the machine looks like is the seam's business (topology.h), what a placement costs a grid is
 * locality.c's.
 */
#include "grid/topology.h"

#include "core/env.h"
#include "core/error.h"
#include "core/sized.h"
#include "grid/dims.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[COLO_BIND_COUNT] = {"none", "core", "scatter", "numa", "package"};

const char *colo_bind_name(colo_bind_t bind)
{
    return (int)bind >= 0 && bind < COLO_BIND_COUNT ? names[bind] : "?";
}

colo_status_t colo_bind_parse(const char *text, colo_bind_t *bind)
{
    COLO_FAIL_IF(!text || !bind, COLO_ERR_ARG, "bind: %s is NULL",
                 text ? "the output" : "the text");
    for (int i = 0; i < COLO_BIND_COUNT; i++)
        if (strcmp(text, names[i]) == 0) {
            *bind = (colo_bind_t)i;
            return COLO_OK;
        }
    char q[COLO_QUOTE_MAX];
    return colo_fail(COLO_ERR_ARG, "bind: '%s' is none of none, core, scatter, numa, package",
                     colo_grid_i_quote_str(q, text));
}

/* ---- units ---- */

static int32_t unit_of(const colo_machine_t *m, int32_t pu, colo_share_t share)
{
    switch (share) {
    case SHARE_PU:
        return pu;
    case SHARE_CORE:
        return m->pu[pu].core;
    case SHARE_NUMA:
        return m->pu[pu].numa;
    case SHARE_PACKAGE:
        return m->pu[pu].package;
    case SHARE_ALL:
        break;
    }
    return 0;
}

/* A number that all processors of a unit share, or -1: @have becomes what it is with @v added. */
static void merge(int32_t *have, int32_t v, bool first)
{
    *have = first || *have == v ? v : -1;
}

/* @spot: [npus], of which the first so many as there are units are filled */
static void spots_of_units(const colo_machine_t *m, colo_share_t share, colo_spot_t *spot)
{
    memset(spot, 0, (size_t)m->npus * sizeof *spot);
    for (int32_t i = 0; i < m->npus; i++)
        spot[i].gpu = -2; /* nothing was merged into it yet */
    for (int32_t i = 0; i < m->npus; i++) {
        colo_spot_t *s = &spot[unit_of(m, i, share)];
        bool first = s->gpu == -2;
        merge(&s->package, m->pu[i].package, first);
        merge(&s->numa, m->pu[i].numa, first);
        merge(&s->core, m->pu[i].core, first);
        merge(&s->pu, m->pu[i].os, first);
        s->gpu = -1;
    }
}

/* ---- the scattered order ---- */

/* Hands out the units of a machine, packages in turn, within a package its NUMA nodes in turn. */
typedef struct deal {
    const colo_machine_t *m;
    int32_t *next;   /* [nnuma * npackages] first processor of the pair not yet looked at */
    int32_t *numa;   /* [npackages] NUMA node whose turn it is */
    int32_t package; /* whose turn it is */
} deal_t;

/* The next core of that package and NUMA node, -1 when all are dealt. */
static int32_t next_core(deal_t *d, int32_t package, int32_t numa)
{
    int32_t *next = &d->next[package * d->m->nnuma + numa];
    for (; *next < d->m->npus; (*next)++) {
        const colo_pu_t *p = &d->m->pu[*next];
        bool begins = *next == 0 || p[-1].core != p->core;
        if (begins && p->package == package && p->numa == numa) {
            (*next)++;
            return p->core;
        }
    }
    return -1;
}

static int32_t deal_core(deal_t *d)
{
    for (int32_t i = 0; i < d->m->npackages; i++) {
        int32_t package = (d->package + i) % d->m->npackages;
        for (int32_t k = 0; k < d->m->nnuma; k++) {
            int32_t numa = (d->numa[package] + k) % d->m->nnuma;
            int32_t core = next_core(d, package, numa);
            if (core < 0)
                continue;
            d->numa[package] = (numa + 1) % d->m->nnuma;
            d->package = (package + 1) % d->m->npackages;
            return core;
        }
    }
    return -1;
}

/* @order: [ncores] */
static colo_status_t scatter_cores(const colo_machine_t *m, int32_t *order)
{
    size_t pairs = (size_t)m->nnuma * (size_t)m->npackages;
    COLO_AUTOFREE int32_t *next = calloc(pairs, sizeof *next);
    COLO_AUTOFREE int32_t *numas = calloc((size_t)m->npackages, sizeof *numas);
    COLO_FAIL_IF(!next || !numas, COLO_ERR_NOMEM, "topology: no memory for %zu NUMA nodes", pairs);
    deal_t d = {m, next, numas, 0};
    for (int32_t i = 0; i < m->ncores; i++)
        order[i] = deal_core(&d);
    return COLO_OK;
}

/* First each core's first processor in scattered order, then the seconds. @unit: [n <= npus] */
static colo_status_t scatter_pus(const colo_machine_t *m, int64_t n, int32_t *unit)
{
    COLO_AUTOFREE int32_t *order = malloc((size_t)m->ncores * sizeof *order);
    COLO_AUTOFREE int32_t *first = malloc((size_t)m->ncores * sizeof *first);
    COLO_FAIL_IF(!order || !first, COLO_ERR_NOMEM, "topology: no memory for %d cores",
                 (int)m->ncores);
    COLO_TRY(scatter_cores(m, order));
    for (int32_t i = m->npus - 1; i >= 0; i--)
        first[m->pu[i].core] = i;
    int64_t l = 0;
    for (int32_t thread = 0; l < n; thread++)
        for (int32_t c = 0; c < m->ncores && l < n; c++) {
            int32_t pu = first[order[c]] + thread;
            if (pu < m->npus && m->pu[pu].core == order[c])
                unit[l++] = pu;
        }
    return COLO_OK;
}

/* ---- policies ---- */

static colo_status_t deal(const colo_machine_t *m, colo_bind_t bind, int64_t n, colo_share_t *share,
                          int32_t *unit)
{
    bool cores = n <= m->ncores;
    switch (bind) {
    case COLO_BIND_CORE:
        *share = cores ? SHARE_CORE : SHARE_PU;
        for (int64_t l = 0; l < n; l++)
            unit[l] = (int32_t)l;
        return COLO_OK;
    case COLO_BIND_SCATTER:
        *share = cores ? SHARE_CORE : SHARE_PU;
        COLO_TRY(scatter_pus(m, n, unit));
        for (int64_t l = 0; l < n && cores; l++)
            unit[l] = m->pu[unit[l]].core;
        return COLO_OK;
    case COLO_BIND_NUMA:
    case COLO_BIND_PACKAGE:
        *share = bind == COLO_BIND_NUMA ? SHARE_NUMA : SHARE_PACKAGE;
        for (int64_t l = 0; l < n; l++)
            unit[l] = unit_of(m, (int32_t)(l * m->npus / n), *share);
        return COLO_OK;
    case COLO_BIND_NONE:
    case COLO_BIND_COUNT:
        break;
    }
    *share = SHARE_ALL;
    memset(unit, 0, (size_t)n * sizeof *unit);
    return COLO_OK;
}

void colo_topology_i_drop(colo_placement_t *placement)
{
    free(placement->unit);
    free(placement->spot);
}

colo_status_t colo_topology_i_place(const colo_topology_t *topology, colo_bind_t bind,
                                    colo_placement_t *placement)
{
    const colo_machine_t *m = &topology->machine;
    size_t n = (size_t)topology->per_host;
    colo_placement_t made = {
        .bind = bind, .unit = malloc(n * sizeof *made.unit), .spot = malloc(n * sizeof *made.spot)};
    COLO_AUTOFREE colo_spot_t *units = malloc((size_t)m->npus * sizeof *units);
    colo_status_t st = COLO_ERR_NOMEM;
    if (made.unit && made.spot && units)
        st = deal(m, bind, topology->per_host, &made.share, made.unit);
    else
        colo_fail(st, "topology: no memory for %zu ranks on %d processors", n, (int)m->npus);
    if (st < 0) {
        colo_topology_i_drop(&made);
        return st;
    }
    spots_of_units(m, made.share, units);
    for (size_t l = 0; l < n; l++) {
        made.spot[l] = units[made.unit[l]];
        made.spot[l].gpu = l < (size_t)topology->ngpus ? topology->gpus[l] : -1;
    }
    *placement = made;
    return COLO_OK;
}

/* ---- making one ---- */

static colo_status_t check_config(const colo_topology_config_t *c)
{
    COLO_FAIL_IF(c->world < 1 || c->world > COLO_TOPOLOGY_WORLD_MAX, COLO_ERR_ARG,
                 "topology: a world of %lld ranks, expected 1..%lld", (long long)c->world,
                 (long long)COLO_TOPOLOGY_WORLD_MAX);
    COLO_FAIL_IF(c->ranks_per_node < 0, COLO_ERR_ARG,
                 "topology: %lld ranks per node, expected >= 0", (long long)c->ranks_per_node);
    COLO_FAIL_IF((int)c->bind < 0 || c->bind >= COLO_BIND_COUNT, COLO_ERR_ARG,
                 "topology: binding %d is outside 0..%d", (int)c->bind, COLO_BIND_COUNT - 1);
    return COLO_OK;
}

static colo_status_t find_gpus(colo_topology_t *p)
{
    const colo_machine_t *m = &p->machine;
    p->gpus = calloc((size_t)m->ndevices + 1, sizeof *p->gpus);
    COLO_FAIL_IF(!p->gpus, COLO_ERR_NOMEM, "topology: no memory for %d devices", (int)m->ndevices);
    for (int32_t i = 0; i < m->ndevices; i++)
        if (m->device[i].kind == COLO_DEVICE_GPU)
            p->gpus[p->ngpus++] = i;
    return COLO_OK;
}

static colo_status_t build(colo_topology_t *p, const colo_topology_config_t *c, bool devices)
{
    COLO_TRY(colo_machine_i_load(c->topology, devices, &p->machine));
    p->world = c->world;
    p->per_host = c->ranks_per_node ? c->ranks_per_node : c->world;
    snprintf(p->source, sizeof p->source, "%s", c->topology ? c->topology : "this machine");
    COLO_FAIL_IF(p->per_host > p->machine.npus, COLO_ERR_ARG,
                 "topology: %lld ranks on a host, the machine has %d processors%s",
                 (long long)p->per_host, (int)p->machine.npus,
                 c->ranks_per_node ? "" : "; say with ranks_per_node how many share a host");
    COLO_TRY(find_gpus(p));
    return colo_topology_i_place(p, c->bind, &p->placed);
}

static colo_status_t create(colo_topology_t **topology, const colo_topology_config_t *config,
                            bool devices)
{
    colo_topology_t *p = calloc(1, sizeof *p);
    COLO_FAIL_IF(!p, COLO_ERR_NOMEM, "topology: %zu bytes", sizeof *p);
    colo_status_t st = build(p, config, devices);
    if (st < 0)
        colo_topology_destroy(&p);
    else
        *topology = p;
    return st;
}

colo_status_t colo_topology_create(colo_topology_t **topology, const colo_topology_config_t *config)
{
    colo_topology_config_t own = {COLO_TOPOLOGY_CONFIG_INIT};
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "topology: the output is NULL");
    COLO_TRY(COLO_SIZED_READ(&own, config, ranks_per_node, "topology: config",
                             "COLO_TOPOLOGY_CONFIG_INIT"));
    COLO_TRY(check_config(&own));
    return create(topology, &own, true);
}

void colo_topology_destroy(colo_topology_t **topology)
{
    if (!topology || !*topology)
        return;
    colo_machine_i_free(&(*topology)->machine);
    free((*topology)->gpus);
    colo_topology_i_drop(&(*topology)->placed);
    free(*topology);
    *topology = NULL;
}

colo_status_t colo_topology_rebind(colo_topology_t *topology, colo_bind_t bind)
{
    colo_placement_t made;
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "rebind: the topology is NULL");
    COLO_FAIL_IF((int)bind < 0 || bind >= COLO_BIND_COUNT, COLO_ERR_ARG,
                 "rebind: binding %d is outside 0..%d", (int)bind, COLO_BIND_COUNT - 1);
    COLO_TRY(colo_topology_i_place(topology, bind, &made));
    colo_topology_i_drop(&topology->placed);
    topology->placed = made;
    return COLO_OK;
}

/* ---- asking it ---- */

void colo_topology_machine(const colo_topology_t *topology, colo_topology_machine_t *machine)
{
    if (!machine)
        return;
    if (!topology) {
        *machine = (colo_topology_machine_t){0};
        return;
    }
    const colo_machine_t *m = &topology->machine;
    *machine = (colo_topology_machine_t){.packages = m->npackages,
                                         .numa_nodes = m->nnuma,
                                         .cores = m->ncores,
                                         .pus = m->npus,
                                         .devices = m->ndevices};
    memcpy(machine->source, topology->source, sizeof machine->source);
}

const colo_topology_device_t *colo_topology_device(const colo_topology_t *topology, int32_t i)
{
    return topology && i >= 0 && i < topology->machine.ndevices ? &topology->machine.device[i]
                                                                : NULL;
}

static colo_status_t check_rank(const colo_topology_t *topology, int64_t rank)
{
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "topology: the object is NULL");
    COLO_FAIL_IF(rank < 0 || rank >= topology->world, COLO_ERR_ARG,
                 "topology: rank %lld is outside [0, %lld)", (long long)rank,
                 (long long)topology->world);
    return COLO_OK;
}

colo_status_t colo_topology_spot(const colo_topology_t *topology, int64_t rank, colo_spot_t *spot)
{
    COLO_TRY(check_rank(topology, rank));
    COLO_FAIL_IF(!spot, COLO_ERR_ARG, "spot: the output is NULL");
    *spot = topology->placed.spot[rank % topology->per_host];
    spot->host = rank / topology->per_host;
    return COLO_OK;
}

int64_t colo_topology_gpu_rank(const colo_topology_t *topology, int64_t host, int32_t device)
{
    if (!topology || host < 0 || host > (topology->world - 1) / topology->per_host)
        return -1;
    for (int32_t l = 0; l < topology->ngpus && l < topology->per_host; l++)
        if (topology->gpus[l] == device) {
            int64_t rank = host * topology->per_host + l;
            return rank < topology->world ? rank : -1;
        }
    return -1;
}

/* The system's numbers of the rank's processors, ascending; @os: [npus] */
static int32_t cpus_of(const colo_topology_t *topology, int64_t rank, int32_t *os)
{
    const colo_machine_t *m = &topology->machine;
    int32_t unit = topology->placed.unit[rank % topology->per_host], n = 0;
    for (int32_t i = 0; i < m->npus; i++) {
        if (unit_of(m, i, topology->placed.share) != unit)
            continue;
        int32_t k = n++;
        for (; k > 0 && os[k - 1] > m->pu[i].os; k--) /* they nearly ascend already */
            os[k] = os[k - 1];
        os[k] = m->pu[i].os;
    }
    return n;
}

size_t colo_topology_cpus(const colo_topology_t *topology, int64_t rank, char *text, size_t cap)
{
    size_t len = 0;
    COLO_AUTOFREE int32_t *os = NULL;
    cap = text ? cap : 0;
    if (cap > 0)
        text[0] = '\0';
    if (check_rank(topology, rank) < 0 ||
        !(os = malloc((size_t)topology->machine.npus * sizeof *os)))
        return 0;
    int32_t n = cpus_of(topology, rank, os);
    for (int32_t i = 0, k; i < n; i = k) {
        for (k = i + 1; k < n && os[k] == os[k - 1] + 1; k++)
            ;
        size_t left = len < cap ? cap - len : 0;
        const char *comma = i ? "," : "";
        char *end = left ? text + len : NULL;
        int more = k - i > 1 ? snprintf(end, left, "%s%d-%d", comma, (int)os[i], (int)os[k - 1])
                             : snprintf(end, left, "%s%d", comma, (int)os[i]);
        len += (size_t)more;
    }
    return len;
}

colo_status_t colo_topology_bind(const colo_topology_t *topology, int64_t rank)
{
    COLO_TRY(check_rank(topology, rank));
    COLO_AUTOFREE int32_t *os = malloc((size_t)topology->machine.npus * sizeof *os);
    COLO_FAIL_IF(!os, COLO_ERR_NOMEM, "bind: no memory for %d processors",
                 (int)topology->machine.npus);
    return colo_machine_i_bind(&topology->machine, os, cpus_of(topology, rank, os));
}

/* ---- COLO_BIND ---- */

void colo_topology_create_env(colo_topology_t **topology, int64_t ranks)
{
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    const char *text = colo_env_value("COLO_BIND", NULL);
    colo_topology_config_t config = {COLO_TOPOLOGY_CONFIG_INIT, .world = ranks};
    if (!topology)
        return;
    *topology = NULL;
    if (colo_bind_parse(text, &config.bind) == COLO_OK && config.bind == COLO_BIND_NONE)
        return;
    if (config.bind == COLO_BIND_NONE || check_config(&config) < 0 ||
        create(topology, &config, false) < 0)
        if (!atomic_flag_test_and_set(&warned))
            colo_log(COLO_LOG_WARN, "COLO_BIND=%.40s: ranks are not bound: %s", text,
                     colo_last_error());
}
