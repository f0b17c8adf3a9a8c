/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology-hwloc.c - a machine's table of processors and devices, from hwloc; binding through it.
 *
 * Only this file uses hwloc (hwloc-load.c finds it, topology-xml.c borrows its sets): a topology is
 * read, put into a colo_machine_t and dropped, except this machine's, which binding needs. What
 * hwloc would take without limit is bounded first: a file's size, and the processors that a
 * synthetic description asks for; what it would take on trust is checked in topology-xml.c. hwloc
 * is silent about what it does not like, so the error messages say what was handed to it.
 *
 * This machine means what the calling thread may use of it: a launcher that gave the process
 * fewer processors (taskset, mpirun) had a reason, and binding must not undo it.
 */
#include "grid/topology.h"

#include "core/error.h"
#include "core/lock.h"
#include "grid/dims.h"
#include "grid/hwloc-load.h"
#include "grid/topology-xml.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SYNTHETIC_BYTES = 1024, SYNTHETIC_EACH = 512 };

/* ---- what is handed to hwloc ---- */

static bool is_file(const char *topology)
{
    size_t n = strlen(topology);
    return strchr(topology, '/') || (n > 4 && strcmp(topology + n - 4, ".xml") == 0);
}

static colo_status_t read_fd(int fd, const char *quoted, char **text, size_t *size)
{
    struct stat st;
    COLO_FAIL_IF(fstat(fd, &st) != 0, COLO_ERR_IO, "topology '%s': %s", quoted, strerror(errno));
    COLO_FAIL_IF(!S_ISREG(st.st_mode), COLO_ERR_IO, "topology '%s': not a regular file", quoted);
    COLO_FAIL_IF(st.st_size > COLO_TOPOLOGY_XML_MAX, COLO_ERR_IO,
                 "topology '%s': %lld bytes, at most %d are read", quoted, (long long)st.st_size,
                 COLO_TOPOLOGY_XML_MAX);
    size_t cap = (size_t)st.st_size, n = 0;
    char *buf = malloc(cap + 1);
    COLO_FAIL_IF(!buf, COLO_ERR_NOMEM, "topology '%s': no memory for %zu bytes", quoted, cap);
    while (n < cap) {
        ssize_t got = read(fd, buf + n, cap - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            free(buf);
            return colo_fail(COLO_ERR_IO, "topology '%s': %s", quoted, strerror(errno));
        }
        if (got == 0) /* it became shorter; what is there is judged as it is */
            break;
        n += (size_t)got;
    }
    buf[n] = '\0';
    *text = buf;
    *size = n;
    return COLO_OK;
}

static colo_status_t read_file(const char *path, char **text, size_t *size)
{
    const char *quoted = COLO_QUOTED_STR(path);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe is refused, not waited for */
    COLO_FAIL_IF(fd < 0, COLO_ERR_IO, "topology '%s': %s", quoted, strerror(errno));
    colo_status_t st = read_fd(fd, quoted, text, size);
    close(fd);
    return st;
}

/* Multiplies the counts outside brackets: "package:2 [numa] core:4 pu:2" is 16 processors. The time
 * that hwloc takes grows with the cube of how many are in one place, and with the square of all. */
static colo_status_t check_synthetic(const char *text)
{
    const char *quoted = COLO_QUOTED_STR(text);
    int64_t pus = 1;
    size_t len = strnlen(text, SYNTHETIC_BYTES + 1);
    COLO_FAIL_IF(len > SYNTHETIC_BYTES, COLO_ERR_ARG,
                 "topology '%s': more than %d bytes for a description", quoted, SYNTHETIC_BYTES);
    int depth = 0;
    for (size_t i = 0; i < len; i++) {
        char before = i ? text[i - 1] : ' ';
        depth += text[i] == '(' || text[i] == '[';
        depth -= text[i] == ')' || text[i] == ']';
        if (depth > 0 || !colo_is_digit(text[i]) || (before != ' ' && before != ':'))
            continue;
        int64_t n = 0;
        for (size_t k = i; colo_is_digit(text[k]) && n <= COLO_TOPOLOGY_SYNTHETIC_MAX; k++)
            n = 10 * n + (text[k] - '0');
        COLO_FAIL_IF(n > SYNTHETIC_EACH, COLO_ERR_ARG,
                     "topology '%s': more than %d in one place at byte %zu", quoted, SYNTHETIC_EACH,
                     i);
        pus *= n;
        COLO_FAIL_IF(pus > COLO_TOPOLOGY_SYNTHETIC_MAX, COLO_ERR_ARG,
                     "topology '%s': more than %d processors at byte %zu", quoted,
                     COLO_TOPOLOGY_SYNTHETIC_MAX, i);
    }
    return COLO_OK;
}

/* Which part of @hwloc the calling thread may use. Best effort: where the process cannot query its
 * binding, nothing restricts it. */
static void keep_allowed(hwloc_topology_t hwloc)
{
    hwloc_bitmap_t set = colo_hwloc.bitmap_alloc();
    if (set && colo_hwloc.get_cpubind(hwloc, set, HWLOC_CPUBIND_THREAD) == 0)
        colo_hwloc.topology_restrict(hwloc, set, 0);
    colo_hwloc.bitmap_free(set);
}

/* Reading where things are must not start a GPU's runtime or call a display: devices come from the
 * system's own lists. */
static void only_poll(hwloc_topology_t hwloc)
{
    static const char *const off[] = {"cuda", "nvml", "rsmi", "levelzero", "opencl", "gl", "pci"};
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++)
        colo_hwloc.topology_set_components(hwloc, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, off[i]);
}

static colo_status_t load(hwloc_topology_t hwloc, const char *topology, bool devices)
{
    colo_hwloc.topology_set_cache_types_filter(hwloc, HWLOC_TYPE_FILTER_KEEP_NONE);
    if (devices)
        colo_hwloc.topology_set_io_types_filter(hwloc, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (!topology) {
        only_poll(hwloc);
        COLO_FAIL_IF(colo_hwloc.topology_load(hwloc) != 0, COLO_ERR_IO,
                     "hwloc cannot read this machine's topology: %s", strerror(errno));
        if (colo_hwloc.topology_is_thissystem(hwloc))
            keep_allowed(hwloc);
        return COLO_OK;
    }
    const char *quoted = COLO_QUOTED_STR(topology);
    if (!is_file(topology)) {
        COLO_TRY(check_synthetic(topology));
        COLO_FAIL_IF(colo_hwloc.topology_set_synthetic(hwloc, topology) != 0 ||
                         colo_hwloc.topology_load(hwloc) != 0,
                     COLO_ERR_ARG,
                     "topology '%s': neither a file (a name with .xml or /) nor a "
                     "description such as 'package:2 numa:2 core:4 pu:1'",
                     quoted);
        return COLO_OK;
    }
    COLO_AUTOFREE char *text = NULL;
    size_t size = 0;
    COLO_TRY(read_file(topology, &text, &size));
    COLO_TRY(colo_topology_xml_check(quoted, text, size));
    COLO_FAIL_IF(colo_hwloc.topology_set_xmlbuffer(hwloc, text, (int)size + 1) != 0 ||
                     colo_hwloc.topology_load(hwloc) != 0,
                 COLO_ERR_IO, "topology '%s': %zu bytes that are no hwloc topology", quoted, size);
    return COLO_OK;
}

/* ---- from hwloc's objects to a table ---- */

/* Objects of types that are several levels of a topology, caches say, are not asked for. */
static hwloc_obj_t next_of(hwloc_topology_t hwloc, hwloc_obj_type_t type, hwloc_obj_t previous)
{
    if (previous)
        return previous->next_cousin;
    const int depth = colo_hwloc.get_type_depth(hwloc, type);
    return depth == HWLOC_TYPE_DEPTH_UNKNOWN ? NULL : colo_hwloc.get_obj_by_depth(hwloc, depth, 0);
}

static int count_of(hwloc_topology_t hwloc, hwloc_obj_type_t type)
{
    const int depth = colo_hwloc.get_type_depth(hwloc, type);
    return depth == HWLOC_TYPE_DEPTH_UNKNOWN ? 0
                                             : (int)colo_hwloc.get_nbobjs_by_depth(hwloc, depth);
}

/* The NUMA node of a processor: of those that it is near to, the one with the fewest processors
 * (memory of several kinds may be attached to one place), then the first. @weight: [nodes] */
static hwloc_obj_t numa_of(hwloc_topology_t hwloc, const int32_t *weight, hwloc_obj_t pu)
{
    hwloc_obj_t best = NULL, node = NULL;
    int32_t fewest = 0;
    for (int32_t i = 0; (node = next_of(hwloc, HWLOC_OBJ_NUMANODE, node)); i++) {
        if ((best && weight[i] >= fewest) || !colo_hwloc.bitmap_isset(node->cpuset, pu->os_index))
            continue;
        best = node;
        fewest = weight[i];
    }
    return best;
}

/* Objects get their numbers in the order in which processors name them, so that those without
 * processors leave no gaps. */
static int32_t number(int32_t *of, int64_t logical, int32_t *count)
{
    if (of[logical] < 0)
        of[logical] = (*count)++;
    return of[logical];
}

static colo_status_t fill_pus(hwloc_topology_t hwloc, colo_machine_t *machine, int32_t *numa,
                              int32_t *weight, int32_t *package)
{
    int32_t n = machine->npus;
    hwloc_obj_t pu = NULL, core = NULL, each = NULL;
    for (int32_t i = 0; (each = next_of(hwloc, HWLOC_OBJ_NUMANODE, each)); i++)
        weight[i] = colo_hwloc.bitmap_weight(each->cpuset);
    for (int32_t i = 0; i < n && (pu = next_of(hwloc, HWLOC_OBJ_PU, pu)); i++) {
        hwloc_obj_t ancestor_core = hwloc_get_ancestor_obj_by_type(hwloc, HWLOC_OBJ_CORE, pu);
        hwloc_obj_t ancestor_package = hwloc_get_ancestor_obj_by_type(hwloc, HWLOC_OBJ_PACKAGE, pu);
        hwloc_obj_t node = numa_of(hwloc, weight, pu);
        COLO_FAIL_IF(pu->os_index >= 1u << 24, COLO_ERR_ARG,
                     "topology: processor %d has the number %u", (int)i, pu->os_index);
        if (!ancestor_core || ancestor_core != core)
            machine->ncores++;
        core = ancestor_core;
        machine->pu[i].os = (int32_t)pu->os_index;
        int32_t *of = machine->pu[i].of;
        of[SHARE_PU] = i;
        of[SHARE_CORE] = machine->ncores - 1;
        of[SHARE_NUMA] = number(numa, node ? (int64_t)node->logical_index : 0, &machine->nnuma);
        of[SHARE_PACKAGE] =
            number(package, ancestor_package ? (int64_t)ancestor_package->logical_index : 0,
                   &machine->npackages);
    }
    return COLO_OK;
}

/* A GPU or a network adapter; display chips of management controllers are neither. */
static bool kind_of(hwloc_obj_t pci, colo_device_kind_t *kind)
{
    unsigned base = pci->attr->pcidev.class_id >> 8, vendor = pci->attr->pcidev.vendor_id;
    if ((base == 0x03 && vendor != 0x1a03 && vendor != 0x102b) || base == 0x12)
        *kind = COLO_DEVICE_GPU;
    else if (base == 0x02)
        *kind = COLO_DEVICE_NETWORK;
    else
        return false;
    return true;
}

/* The number that processors of @local gave themselves, -1 when they differ. */
static int32_t common(const colo_machine_t *machine, hwloc_const_cpuset_t local, colo_share_t share)
{
    int32_t one = -2;
    for (int32_t i = 0; i < machine->npus && one != -1; i++) {
        int32_t v = machine->pu[i].of[share];
        if (local && colo_hwloc.bitmap_isset(local, (unsigned)machine->pu[i].os))
            one = one == -2 || one == v ? v : -1;
    }
    return one < 0 ? -1 : one;
}

static void fill_device(hwloc_topology_t hwloc, const colo_machine_t *machine, hwloc_obj_t pci,
                        colo_topology_device_t *device)
{
    const struct hwloc_pcidev_attr_s *attr = &pci->attr->pcidev;
    hwloc_obj_t ancestor = hwloc_get_non_io_ancestor_obj(hwloc, pci);
    snprintf(device->bus, sizeof device->bus, "%04x:%02x:%02x.%x",
             (unsigned)(attr->domain & 0xffff), attr->bus, attr->dev, attr->func & 0xfu);
    for (hwloc_obj_t os = pci->io_first_child; os; os = os->next_sibling) {
        bool best = os->name && strncmp(os->name, "cuda", 4) == 0; /* what runtimes count in */
        if (os->type != HWLOC_OBJ_OS_DEVICE || !os->name || (device->name[0] && !best))
            continue;
        snprintf(device->name, sizeof device->name, "%s", os->name);
        for (char *byte = device->name; *byte; byte++)
            if (!isgraph((unsigned char)*byte) || (unsigned char)*byte > 126)
                *byte = '?';
        if (best)
            break;
    }
    device->numa = common(machine, ancestor ? ancestor->cpuset : NULL, SHARE_NUMA);
    device->package = common(machine, ancestor ? ancestor->cpuset : NULL, SHARE_PACKAGE);
}

static colo_status_t fill_devices(hwloc_topology_t hwloc, colo_machine_t *machine)
{
    int n = count_of(hwloc, HWLOC_OBJ_PCI_DEVICE);
    hwloc_obj_t pci = NULL;
    if (n <= 0)
        return COLO_OK;
    machine->device = calloc((size_t)n, sizeof *machine->device);
    COLO_FAIL_IF(!machine->device, COLO_ERR_NOMEM, "topology: no memory for %d devices", n);
    while (machine->ndevices < n && (pci = next_of(hwloc, HWLOC_OBJ_PCI_DEVICE, pci))) {
        colo_topology_device_t *device = &machine->device[machine->ndevices];
        if (!pci->attr || !kind_of(pci, &device->kind))
            continue;
        fill_device(hwloc, machine, pci, device);
        machine->ndevices++;
    }
    return COLO_OK;
}

static colo_status_t fill(hwloc_topology_t hwloc, colo_machine_t *machine)
{
    int pus = count_of(hwloc, HWLOC_OBJ_PU);
    int nodes = count_of(hwloc, HWLOC_OBJ_NUMANODE);
    int packages = count_of(hwloc, HWLOC_OBJ_PACKAGE);
    COLO_FAIL_IF(pus < 1 || pus > COLO_TOPOLOGY_PU_MAX, COLO_ERR_ARG,
                 "topology: %d processors, expected 1..%d", pus, COLO_TOPOLOGY_PU_MAX);
    nodes = nodes > 0 ? nodes : 1;
    packages = packages > 0 ? packages : 1;
    const size_t all = 2 * (size_t)nodes + (size_t)packages;
    COLO_AUTOFREE int32_t *of = malloc(all * sizeof *of);
    machine->pu = calloc((size_t)pus, sizeof *machine->pu);
    COLO_FAIL_IF(!of || !machine->pu, COLO_ERR_NOMEM, "topology: no memory for %d processors", pus);
    memset(of, -1, all * sizeof *of);
    machine->npus = pus;
    COLO_TRY(fill_pus(hwloc, machine, of, of + nodes, of + 2 * nodes));
    return fill_devices(hwloc, machine);
}

/* ---- the seam ---- */

colo_status_t colo_machine_load(const char *topology, bool devices, colo_machine_t *machine)
{
    colo_machine_t made = {0};
    hwloc_topology_t hwloc;
    COLO_TRY(colo_hwloc_load());
    COLO_FAIL_IF(colo_hwloc.topology_init(&hwloc) != 0, COLO_ERR_NOMEM,
                 "topology: hwloc cannot start: %s", strerror(errno));
    colo_status_t st = load(hwloc, topology, devices);
    COLO_THEN(st, fill(hwloc, &made));
    if (st == COLO_OK && !topology && colo_hwloc.topology_is_thissystem(hwloc))
        made.here = hwloc;
    else
        colo_hwloc.topology_destroy(hwloc);
    if (st < 0) {
        colo_machine_free(&made);
        return st;
    }
    *machine = made;
    return COLO_OK;
}

void colo_machine_free(colo_machine_t *machine)
{
    if (machine->here)
        colo_hwloc.topology_destroy(machine->here);
    free(machine->pu);
    free(machine->device);
    *machine = (colo_machine_t){0};
}

colo_status_t colo_machine_bind(const colo_machine_t *machine, const int32_t *os, int32_t n)
{
    COLO_FAIL_IF(!machine->here, COLO_ERR_STATE, "bind: the topology is not this machine's");
    hwloc_bitmap_t set = colo_hwloc.bitmap_alloc();
    bool ok = set != NULL;
    for (int32_t i = 0; ok && i < n; i++)
        ok = colo_hwloc.bitmap_set(set, (unsigned)os[i]) == 0;
    ok = ok && colo_hwloc.set_cpubind(machine->here, set, HWLOC_CPUBIND_THREAD) == 0;
    int e = errno;
    colo_hwloc.bitmap_free(set);
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_IO, "bind: %d processors from %d on: %s", (int)n, (int)os[0],
                          strerror(e));
}

static char version[32];
COLO_LOCK(version_lock);

/* hwloc tells its whole version only in a topology: 2.x as an info of the root object, 3.x as one
 * of the topology. Nothing else used here differs between the two. */
static const char *find_info(hwloc_topology_t hwloc)
{
#if HWLOC_API_VERSION >= 0x00030000
    return hwloc_get_info_by_name(colo_hwloc.topology_get_infos(hwloc), "hwlocVersion");
#else
    return hwloc_obj_get_info_by_name(colo_hwloc.get_obj_by_depth(hwloc, 0, 0), "hwlocVersion");
#endif
}

/* It tells any program what it is compatible with. */
static void find_version(void)
{
    hwloc_topology_t hwloc;
    if (colo_hwloc.topology_init(&hwloc) != 0)
        return;
    const unsigned api = colo_hwloc.get_api_version();
    const char *text = NULL;
    if (colo_hwloc.topology_set_synthetic(hwloc, "pu:1") == 0 &&
        colo_hwloc.topology_load(hwloc) == 0)
        text = find_info(hwloc);
    if (text)
        snprintf(version, sizeof version, "%s", text);
    else
        snprintf(version, sizeof version, "%u.%u", api >> 16, api >> 8 & 0xff);
    colo_hwloc.topology_destroy(hwloc);
}

const char *colo_topology_version(void)
{
    const colo_error_t earlier = colo_error_save();
    COLO_HOLD(&version_lock);
    if (!version[0] && colo_hwloc_load() == COLO_OK)
        find_version();
    (void)colo_error_restore(COLO_OK, &earlier);
    return version[0] ? version : NULL;
}
