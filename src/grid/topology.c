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
    return colo_fail(COLO_ERR_ARG,
                     "bind: found '%s', expected one of none, core, scatter, numa, package",
                     COLO_QUOTED_STR(text));
}

/* ---- units ---- */

/* A number that all processors of a unit share, or -1: @have becomes what it is with @v added. */
static void merge(int32_t *have, int32_t v, bool first)
{
    *have = first || *have == v ? v : -1;
}

/* @spot: [npus], of which the first so many as there are units are filled */
static void spots_of_units(const colo_machine_t *machine, colo_share_t share,
                           colo_topology_spot_t *spot)
{
    memset(spot, 0, (size_t)machine->npus * sizeof *spot);
    for (int32_t i = 0; i < machine->npus; i++)
        spot[i].gpu = -2; /* nothing was merged into it yet */
    for (int32_t i = 0; i < machine->npus; i++) {
        colo_topology_spot_t *unit = &spot[machine->pu[i].of[share]];
        bool first = unit->gpu == -2;
        merge(&unit->package, machine->pu[i].of[SHARE_PACKAGE], first);
        merge(&unit->numa, machine->pu[i].of[SHARE_NUMA], first);
        merge(&unit->core, machine->pu[i].of[SHARE_CORE], first);
        merge(&unit->pu, machine->pu[i].os, first);
        unit->gpu = -1;
    }
}

/* ---- the scattered order ---- */

/* How many are dealt before the @round-th of pile @mine, if @piles of @count each are dealt from in
 * turn. */
static int32_t dealt_before(const int32_t *count, int32_t piles, int32_t mine, int32_t round)
{
    int32_t before = 0;
    for (int32_t i = 0; i < piles; i++)
        before += count[i] < round + (i < mine) ? count[i] : round + (i < mine);
    return before;
}

/* Cores of packages in turn, within a package of its NUMA nodes in turn. @first: [ncores] each
 * core's first processor; @order: [ncores] */
static colo_status_t scatter_cores(const colo_machine_t *machine, const int32_t *first,
                                   int32_t *order)
{
    const size_t nodes = (size_t)machine->nnuma, packages = (size_t)machine->npackages,
                 pairs = nodes * packages;
    COLO_AUTOFREE int32_t *memory = calloc(2 * pairs + packages, sizeof *memory);
    COLO_FAIL_IF(!memory, COLO_ERR_NOMEM, "topology: no memory for %zu NUMA nodes", pairs);
    int32_t *count = memory, *dealt = count + pairs, *of_package = dealt + pairs;
    for (int32_t core = 0; core < machine->ncores; core++) {
        const colo_pu_t *pu = &machine->pu[first[core]];
        count[pu->of[SHARE_PACKAGE] * machine->nnuma + pu->of[SHARE_NUMA]]++;
        of_package[pu->of[SHARE_PACKAGE]]++;
    }
    for (int32_t core = 0; core < machine->ncores; core++) {
        const colo_pu_t *pu = &machine->pu[first[core]];
        const int32_t *its = count + pu->of[SHARE_PACKAGE] * machine->nnuma,
                      round = dealt[its - count + pu->of[SHARE_NUMA]]++,
                      among = dealt_before(its, machine->nnuma, pu->of[SHARE_NUMA], round);
        order[dealt_before(of_package, machine->npackages, pu->of[SHARE_PACKAGE], among)] = core;
    }
    return COLO_OK;
}

/* First each core's first processor in scattered order, then the seconds. @unit: [n <= npus] */
static colo_status_t scatter_pus(const colo_machine_t *machine, int64_t n, int32_t *unit)
{
    COLO_AUTOFREE int32_t *order = malloc((size_t)machine->ncores * sizeof *order);
    COLO_AUTOFREE int32_t *first = malloc((size_t)machine->ncores * sizeof *first);
    COLO_FAIL_IF(!order || !first, COLO_ERR_NOMEM, "topology: no memory for %d cores",
                 (int)machine->ncores);
    for (int32_t i = machine->npus - 1; i >= 0; i--)
        first[machine->pu[i].of[SHARE_CORE]] = i;
    COLO_TRY(scatter_cores(machine, first, order));
    int64_t l = 0;
    for (int32_t thread = 0; l < n; thread++)
        for (int32_t c = 0; c < machine->ncores && l < n; c++) {
            int32_t pu = first[order[c]] + thread;
            if (pu < machine->npus && machine->pu[pu].of[SHARE_CORE] == order[c])
                unit[l++] = pu;
        }
    return COLO_OK;
}

/* ---- policies ---- */

static colo_status_t deal(const colo_machine_t *machine, colo_bind_t bind, int64_t n,
                          colo_share_t *share, int32_t *unit)
{
    static const colo_share_t units[COLO_BIND_COUNT] = {
        [COLO_BIND_NONE] = SHARE_ALL,        [COLO_BIND_CORE] = SHARE_CORE,
        [COLO_BIND_SCATTER] = SHARE_CORE,    [COLO_BIND_NUMA] = SHARE_NUMA,
        [COLO_BIND_PACKAGE] = SHARE_PACKAGE,
    };
    const bool has_units = units[bind] != SHARE_CORE || n <= machine->ncores;
    *share = has_units ? units[bind] : SHARE_PU;
    if (bind == COLO_BIND_SCATTER)
        COLO_TRY(scatter_pus(machine, n, unit));
    for (int64_t local = 0; local < n; local++) {
        const int64_t even = local * machine->npus / n;
        const int32_t pu = bind == COLO_BIND_SCATTER ? unit[local] : (int32_t)even;
        unit[local] = bind == COLO_BIND_CORE ? (int32_t)local : machine->pu[pu].of[*share];
    }
    return COLO_OK;
}

void colo_topology_drop(colo_placement_t *placement)
{
    free(placement->unit);
    free(placement->spot);
}

colo_status_t colo_topology_place(const colo_topology_t *topology, colo_bind_t bind,
                                  colo_placement_t *placement)
{
    const colo_machine_t *machine = &topology->machine;
    size_t n = (size_t)topology->per_host;
    colo_placement_t made = {
        .bind = bind, .unit = malloc(n * sizeof *made.unit), .spot = malloc(n * sizeof *made.spot)};
    COLO_AUTOFREE colo_topology_spot_t *units = malloc((size_t)machine->npus * sizeof *units);
    colo_status_t st = COLO_ERR_NOMEM;
    if (made.unit && made.spot && units)
        st = deal(machine, bind, topology->per_host, &made.share, made.unit);
    else
        colo_fail(st, "topology: no memory for %zu ranks on %d processors", n, (int)machine->npus);
    if (st < 0) {
        colo_topology_drop(&made);
        return st;
    }
    spots_of_units(machine, made.share, units);
    for (size_t local = 0; local < n; local++) {
        made.spot[local] = units[made.unit[local]];
        made.spot[local].gpu = local < (size_t)topology->ngpus ? topology->gpus[local] : -1;
    }
    *placement = made;
    return COLO_OK;
}

/* ---- making one ---- */

static colo_status_t check_config(const colo_topology_config_t *config)
{
    COLO_FAIL_IF(config->world < 1 || config->world > COLO_TOPOLOGY_WORLD_MAX, COLO_ERR_ARG,
                 "topology: a world of %lld ranks, expected 1..%lld", (long long)config->world,
                 (long long)COLO_TOPOLOGY_WORLD_MAX);
    COLO_FAIL_IF(config->ranks_per_node < 0, COLO_ERR_ARG,
                 "topology: %lld ranks per node, expected >= 0", (long long)config->ranks_per_node);
    COLO_FAIL_IF((int)config->bind < 0 || config->bind >= COLO_BIND_COUNT, COLO_ERR_ARG,
                 "topology: binding %d is outside 0..%d", (int)config->bind, COLO_BIND_COUNT - 1);
    return COLO_OK;
}

static colo_status_t find_gpus(colo_topology_t *made)
{
    const colo_machine_t *machine = &made->machine;
    made->gpus = calloc((size_t)machine->ndevices + 1, sizeof *made->gpus);
    COLO_FAIL_IF(!made->gpus, COLO_ERR_NOMEM, "topology: no memory for %d devices",
                 (int)machine->ndevices);
    for (int32_t i = 0; i < machine->ndevices; i++)
        if (machine->device[i].kind == COLO_DEVICE_GPU)
            made->gpus[made->ngpus++] = i;
    return COLO_OK;
}

static colo_status_t build(colo_topology_t *made, const colo_topology_config_t *config,
                           bool devices)
{
    COLO_TRY(colo_machine_load(config->topology, devices, &made->machine));
    made->world = config->world;
    made->per_host = config->ranks_per_node ? config->ranks_per_node : config->world;
    made->source = strdup(config->topology ? config->topology : "this machine");
    COLO_FAIL_IF(!made->source, COLO_ERR_NOMEM, "topology: no memory for its name");
    COLO_FAIL_IF(made->per_host > made->machine.npus, COLO_ERR_ARG,
                 "topology: %lld ranks on a host, the machine has %d processors%s",
                 (long long)made->per_host, (int)made->machine.npus,
                 config->ranks_per_node
                     ? ""
                     : "; say how many share a host: --ranks-per-node, ranks_per_node");
    COLO_TRY(find_gpus(made));
    return colo_topology_place(made, config->bind, &made->placed);
}

static colo_status_t create(colo_topology_t **topology, const colo_topology_config_t *config,
                            bool devices)
{
    colo_topology_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "topology: %zu bytes", sizeof *made);
    colo_status_t st = build(made, config, devices);
    if (st < 0)
        colo_topology_destroy(&made);
    else
        *topology = made;
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
    colo_machine_free(&(*topology)->machine);
    free((*topology)->source);
    free((*topology)->gpus);
    colo_topology_drop(&(*topology)->placed);
    free(*topology);
    *topology = NULL;
}

colo_status_t colo_topology_rebind(colo_topology_t *topology, colo_bind_t bind)
{
    colo_placement_t made;
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "rebind: the topology is NULL");
    COLO_FAIL_IF((int)bind < 0 || bind >= COLO_BIND_COUNT, COLO_ERR_ARG,
                 "rebind: binding %d is outside 0..%d", (int)bind, COLO_BIND_COUNT - 1);
    COLO_TRY(colo_topology_place(topology, bind, &made));
    colo_topology_drop(&topology->placed);
    topology->placed = made;
    return COLO_OK;
}

/* ---- asking it ---- */

colo_status_t colo_topology_machine(const colo_topology_t *topology,
                                    colo_topology_machine_t *machine)
{
    COLO_FAIL_IF(!topology, COLO_ERR_ARG, "topology: the object is NULL");
    const colo_machine_t *of = &topology->machine;
    const colo_topology_machine_t own = {.source = topology->source,
                                         .packages = of->npackages,
                                         .numa_nodes = of->nnuma,
                                         .cores = of->ncores,
                                         .pus = of->npus,
                                         .devices = of->ndevices};
    return COLO_SIZED_WRITE(machine, &own, "machine: machine", "COLO_TOPOLOGY_MACHINE_INIT");
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

colo_status_t colo_topology_spot(const colo_topology_t *topology, int64_t rank,
                                 colo_topology_spot_t *spot)
{
    COLO_TRY(check_rank(topology, rank));
    colo_topology_spot_t own = topology->placed.spot[rank % topology->per_host];
    own.host = rank / topology->per_host;
    return COLO_SIZED_WRITE(spot, &own, "spot: spot", "COLO_TOPOLOGY_SPOT_INIT");
}

int64_t colo_topology_gpu_rank(const colo_topology_t *topology, int64_t host, int32_t device)
{
    if (!topology || host < 0 || host > (topology->world - 1) / topology->per_host)
        return -1;
    for (int32_t local = 0; local < topology->ngpus && local < topology->per_host; local++)
        if (topology->gpus[local] == device) {
            int64_t rank = host * topology->per_host + local;
            return rank < topology->world ? rank : -1;
        }
    return -1;
}

/* The system's numbers of the rank's processors, ascending; @os: [npus] */
static int32_t cpus_of(const colo_topology_t *topology, int64_t rank, int32_t *os)
{
    const colo_machine_t *machine = &topology->machine;
    int32_t unit = topology->placed.unit[rank % topology->per_host], n = 0;
    for (int32_t i = 0; i < machine->npus; i++) {
        if (machine->pu[i].of[topology->placed.share] != unit)
            continue;
        int32_t k = n++;
        for (; k > 0 && os[k - 1] > machine->pu[i].os; k--) /* they nearly ascend already */
            os[k] = os[k - 1];
        os[k] = machine->pu[i].os;
    }
    return n;
}

size_t colo_topology_cpus(const colo_topology_t *topology, int64_t rank, char *text, size_t cap)
{
    colo_text_t list = {.data = text, .cap = text ? cap : 0};
    COLO_AUTOFREE int32_t *os = NULL;
    if (list.cap > 0)
        text[0] = '\0';
    if (check_rank(topology, rank) < 0 ||
        !(os = malloc((size_t)topology->machine.npus * sizeof *os)))
        return 0;
    int32_t n = cpus_of(topology, rank, os);
    for (int32_t i = 0, k; i < n; i = k) {
        for (k = i + 1; k < n && os[k] == os[k - 1] + 1; k++)
            ;
        colo_put(&list, "%s%d", i ? "," : "", (int)os[i]);
        if (k - i > 1)
            colo_put(&list, "-%d", (int)os[k - 1]);
    }
    return list.len;
}

colo_status_t colo_topology_bind(const colo_topology_t *topology, int64_t rank)
{
    COLO_TRY(check_rank(topology, rank));
    COLO_AUTOFREE int32_t *os = malloc((size_t)topology->machine.npus * sizeof *os);
    COLO_FAIL_IF(!os, COLO_ERR_NOMEM, "bind: no memory for %d processors",
                 (int)topology->machine.npus);
    return colo_machine_bind(&topology->machine, os, cpus_of(topology, rank, os));
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
