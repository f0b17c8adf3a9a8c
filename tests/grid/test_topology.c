/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_topology.c - which processors each rank gets, on machines drawn by hand: three synthetic
 * ones and the file two-packages-four-gpus.xml (2 packages, a NUMA node each, 4 cores of 2
 * processors each; core c of the machine has processors c and c + 8; GPUs 1b, 1c near package 0,
 * 9b, 9c near package 1), and two-packages-four-nodes.xml (2 packages of 2 NUMA nodes of 2 cores; a
 * GPU at nodes 1 and 3 and one at the second package). Expectations are read off these drawings.
 * And what is refused, and COLO_BIND.
 */
#include "harness/harness.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#define ONE "package:1 core:8 pu:1"         /* 8 cores of one package */
#define TWO "package:2 core:8 pu:1"         /* 2 packages of 8 cores, memory in one piece */
#define FOUR "package:2 numa:2 core:4 pu:1" /* 2 packages of 2 NUMA nodes of 4 cores */
#define T_CASE_BUILT(name) T_CASE_IF(colo_topology_version(), name)
#define GPUS TOPOLOGIES "/two-packages-four-gpus.xml"
/* the same by more than 64 bytes */
#define LONG TOPOLOGIES "/../topologies/../topologies/../topologies/two-packages-four-gpus.xml"

static colo_topology_t *place_of(const char *topology, int64_t world, int64_t per_host,
                                 colo_bind_t bind)
{
    colo_topology_t *p = NULL;
    assert_ok(colo_topology_create(
        &p, &(colo_topology_config_t){COLO_TOPOLOGY_CONFIG_INIT, .topology = topology,
                                      .world = world, .ranks_per_node = per_host, .bind = bind}));
    return p;
}

static const char *cpus(const colo_topology_t *p, int64_t rank)
{
    static char text[256];
    size_t n = colo_topology_cpus(p, rank, text, sizeof text);
    assert_int_equal(n, strlen(text));
    return text;
}

static void assert_spot(const colo_topology_t *p, int64_t rank, int64_t host, int package, int numa,
                        int core, int gpu)
{
    colo_topology_spot_t s = {COLO_TOPOLOGY_SPOT_INIT};
    assert_ok(colo_topology_spot(p, rank, &s));
    if (s.host != host || s.package != package || s.numa != numa || s.core != core || s.gpu != gpu)
        fail_msg("rank %d: host %d package %d NUMA %d core %d GPU %d, drawn %d %d %d %d %d",
                 (int)rank, (int)s.host, s.package, s.numa, s.core, s.gpu, (int)host, package, numa,
                 core, gpu);
}

/* ---- machines ---- */

T_CASE_BUILT(a_machine_is_counted)
{
    static const struct {
        const char *topology;
        int packages, numa, cores, pus, devices;
    } want[] = {{ONE, 1, 1, 8, 8, 0},
                {TWO, 2, 1, 16, 16, 0},
                {FOUR, 2, 4, 16, 16, 0},
                {GPUS, 2, 2, 8, 16, 6},
                {LONG, 2, 2, 8, 16, 6},
                {"numa:2 pu:4", 1, 2, 8, 8, 0}}; /* names neither packages nor cores */
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        colo_topology_machine_t m = {COLO_TOPOLOGY_MACHINE_INIT};
        colo_topology_t *p = place_of(want[i].topology, 1, 0, COLO_BIND_CORE);
        assert_ok(colo_topology_machine(p, &m));
        assert_string_equal(m.source, want[i].topology);
        assert_int_equal(m.packages, want[i].packages);
        assert_int_equal(m.numa_nodes, want[i].numa);
        assert_int_equal(m.cores, want[i].cores);
        assert_int_equal(m.pus, want[i].pus);
        assert_int_equal(m.devices, want[i].devices);
        colo_topology_destroy(&p);
        assert_null(p);
    }
    colo_topology_destroy(NULL);
}

T_CASE_BUILT(devices_are_near_their_package)
{
    static const struct {
        colo_device_kind_t kind;
        const char *name, *bus;
        int node; /* package and NUMA node */
    } want[] = {{COLO_DEVICE_GPU, "cuda0", "0000:1b:00.0", 0},
                {COLO_DEVICE_GPU, "cuda1", "0000:1c:00.0", 0},
                {COLO_DEVICE_NETWORK, "ib0", "0000:20:00.0", 0},
                {COLO_DEVICE_GPU, "cuda2", "0000:9b:00.0", 1},
                {COLO_DEVICE_GPU, "cuda3", "0000:9c:00.0", 1},
                {COLO_DEVICE_NETWORK, "ib1", "0000:a0:00.0", 1}};
    colo_topology_t *p = place_of(GPUS, 8, 4, COLO_BIND_NUMA);
    for (int i = 0; i < 6; i++) { /* the management display and the disk are not among them */
        const colo_topology_device_t *d = colo_topology_device(p, i);
        assert_int_equal(d->kind, want[i].kind);
        assert_string_equal(d->name, want[i].name);
        assert_string_equal(d->bus, want[i].bus);
        assert_int_equal(d->numa, want[i].node);
        assert_int_equal(d->package, want[i].node);
    }
    assert_null(colo_topology_device(p, 6));
    assert_null(colo_topology_device(p, -1));

    /* the l-th GPU is rank l's on its host; by NUMA node each is near its rank */
    static const int gpu[] = {0, 1, 3, 4};
    for (int r = 0; r < 8; r++) {
        assert_spot(p, r, r / 4, r % 4 / 2, r % 4 / 2, -1, gpu[r % 4]);
        assert_int_equal(colo_topology_gpu_rank(p, r / 4, gpu[r % 4]), r);
    }
    assert_int_equal(colo_topology_gpu_rank(p, 0, 2), -1); /* a network card */
    assert_int_equal(colo_topology_gpu_rank(p, 2, 0), -1); /* no such host */
    assert_int_equal(colo_topology_gpu_rank(p, -1, 0), -1);
    assert_int_equal(colo_topology_gpu_rank(p, INT64_MAX / 2 + 1, 0), -1); /* times 4 it is 0 */
    colo_topology_destroy(&p);

    p = place_of(GPUS, 6, 6, COLO_BIND_CORE); /* more ranks than GPUs */
    assert_spot(p, 3, 0, 0, 0, 3, 4);
    assert_spot(p, 4, 0, 1, 1, 4, -1);
    colo_topology_destroy(&p);
    p = place_of(GPUS, 3, 2, COLO_BIND_CORE); /* the last host is not full */
    assert_int_equal(colo_topology_gpu_rank(p, 1, 0), 2);
    assert_int_equal(colo_topology_gpu_rank(p, 1, 1), -1);
    colo_topology_destroy(&p);
}

/* ---- policies ---- */

/* Two NUMA nodes a package, so that one's number is not the other's. */
T_CASE_BUILT(a_device_is_near_its_numa_node_or_its_package_only)
{
    static const int numa[] = {1, 3, -1}, package[] = {0, 1, 1};
    T_ENDS(colo_topology_destroy)
    colo_topology_t *p = place_of(TOPOLOGIES "/two-packages-four-nodes.xml", 8, 8, COLO_BIND_CORE);
    for (int i = 0; i < 3; i++) {
        const colo_topology_device_t *d = colo_topology_device(p, i);
        assert_non_null(d);
        assert_int_equal(d->numa, numa[i]);
        assert_int_equal(d->package, package[i]);
    }
    assert_null(colo_topology_device(p, 3));
}

T_CASE_BUILT(core_binding_is_compact)
{
    colo_topology_t *p = place_of(FOUR, 16, 0, COLO_BIND_CORE);
    for (int r = 0; r < 16; r++)
        assert_spot(p, r, 0, r / 8, r / 4, r, -1);
    assert_string_equal(cpus(p, 11), "11");
    colo_topology_destroy(&p);

    p = place_of(GPUS, 8, 0, COLO_BIND_CORE); /* all processors of a core */
    assert_string_equal(cpus(p, 0), "0,8");
    assert_string_equal(cpus(p, 7), "7,15");
    colo_topology_destroy(&p);

    p = place_of(GPUS, 9, 0, COLO_BIND_CORE); /* more ranks than cores: a processor each */
    static const char *const one[] = {"0", "8", "1", "9", "2", "10", "3", "11", "4"};
    for (int r = 0; r < 9; r++) {
        static const int gpu[] = {0, 1, 3, 4};
        assert_string_equal(cpus(p, r), one[r]);
        assert_spot(p, r, 0, r / 8, r / 8, r / 2, r < 4 ? gpu[r] : -1);
    }
    colo_topology_destroy(&p);
}

T_CASE_BUILT(scatter_takes_packages_then_numa_nodes_in_turn)
{
    static const int core[] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
    colo_topology_t *p = place_of(FOUR, 16, 0, COLO_BIND_SCATTER);
    for (int r = 0; r < 16; r++)
        assert_spot(p, r, 0, core[r] / 8, core[r] / 4, core[r], -1);
    colo_topology_destroy(&p);

    /* with more ranks than cores: every core's first processor before any second */
    static const char *const pu[] = {"0", "4", "1", "5", "2", "6", "3", "7", "8", "12", "9"};
    p = place_of(GPUS, 11, 0, COLO_BIND_SCATTER);
    for (int r = 0; r < 11; r++)
        assert_string_equal(cpus(p, r), pu[r]);
    colo_topology_destroy(&p);
}

T_CASE_BUILT(whole_nodes_and_packages_are_shared_in_even_blocks)
{
    static const int numa[] = {0, 0, 1, 2, 2, 3}; /* 6 ranks on 4 nodes of 4: floor(16 r / 6) / 4 */
    static const char *const of[] = {"0-3", "4-7", "8-11", "12-15"};
    colo_topology_t *p = place_of(FOUR, 6, 0, COLO_BIND_NUMA);
    for (int r = 0; r < 6; r++) {
        assert_spot(p, r, 0, numa[r] / 2, numa[r], -1, -1);
        assert_string_equal(cpus(p, r), of[numa[r]]);
    }
    assert_ok(colo_topology_rebind(p, COLO_BIND_PACKAGE));
    for (int r = 0; r < 6; r++) {
        assert_spot(p, r, 0, r / 3, -1, -1, -1); /* free to run on either of two NUMA nodes */
        assert_string_equal(cpus(p, r), r < 3 ? "0-7" : "8-15");
    }
    assert_ok(colo_topology_rebind(p, COLO_BIND_NONE));
    assert_spot(p, 5, 0, -1, -1, -1, -1);
    assert_string_equal(cpus(p, 5), "0-15");
    colo_topology_destroy(&p);

    p = place_of(GPUS, 4, 0, COLO_BIND_PACKAGE); /* two runs of processors a package */
    assert_string_equal(cpus(p, 1), "0-3,8-11");
    assert_string_equal(cpus(p, 2), "4-7,12-15");
    char little[4] = "???";
    assert_int_equal(colo_topology_cpus(p, 1, little, sizeof little), 8);
    assert_string_equal(little, "0-3");
    assert_int_equal(colo_topology_cpus(p, 1, NULL, 0), 8);
    assert_int_equal(colo_topology_cpus(p, 4, little, sizeof little), 0);
    assert_string_equal(little, "");
    colo_topology_destroy(&p);

    p = place_of(ONE, 3, 0, COLO_BIND_NONE); /* where there is one of a kind, all ranks are on it */
    assert_spot(p, 2, 0, 0, 0, -1, -1);
    colo_topology_destroy(&p);
}

T_CASE_BUILT(hosts_are_alike)
{
    T_ENDS(colo_topology_destroy) colo_topology_t *p = place_of(TWO, 1 << 20, 16, COLO_BIND_CORE);
    assert_spot(p, 16, 1, 0, 0, 0, -1);
    assert_spot(p, (1 << 20) - 1, 65535, 1, 0, 15, -1);
    assert_string_equal(cpus(p, 16 * 1000 + 9), "9");
}

T_CASE(names_and_policies_are_each_other)
{
    static const char *const names[] = {"none", "core", "scatter", "numa", "package"};
    for (int i = 0; i < COLO_BIND_COUNT; i++) {
        colo_bind_t b = COLO_BIND_COUNT;
        assert_string_equal(colo_bind_name((colo_bind_t)i), names[i]);
        assert_ok(colo_bind_parse(names[i], &b));
        assert_int_equal(b, i);
    }
    colo_bind_t b = COLO_BIND_NUMA;
    assert_string_equal(colo_bind_name(COLO_BIND_COUNT), "?");
    assert_string_equal(colo_bind_name((colo_bind_t)-1), "?");
    assert_fails(colo_bind_parse("cores", &b), COLO_ERR_ARG,
                 "found 'cores', expected one of none, core");
    assert_fails(colo_bind_parse(NULL, &b), COLO_ERR_ARG, "the text is NULL");
    assert_int_equal(b, COLO_BIND_NUMA);
}

/* ---- refused ---- */

static char file[1024];

static void write_file(const void *bytes, size_t size)
{
    int fd = open(file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && write(fd, bytes, size) == (ssize_t)size);
    close(fd);
}

static void refuse(const char *topology, colo_status_t want, const char *error_message)
{
    colo_topology_t *untouched = (colo_topology_t *)file, *p = untouched;
    assert_fails(
        colo_topology_create(&p, &(colo_topology_config_t){COLO_TOPOLOGY_CONFIG_INIT,
                                                           .topology = topology, .world = 2}),
        want, error_message);
    assert_ptr_equal(p, untouched);
}

T_CASE_BUILT(a_topology_that_is_none_is_refused)
{
    static const char *const text[] = {"",
                                       "no topology",
                                       "<topology>",
                                       "<?xml version=\"1.0\"?>",
                                       "<object type=\"Machine\"/>",
                                       "</object>"};
    for (size_t i = 0; i < sizeof text / sizeof text[0]; i++) {
        write_file(text[i], strlen(text[i]));
        refuse(file, COLO_ERR_IO, "line 1");
    }
    write_file("\0\0\0\0", 4);
    refuse(file, COLO_ERR_IO, "a NUL byte");
    refuse("package:2 bogus:4", COLO_ERR_ARG, "neither a file");
    refuse("", COLO_ERR_ARG, "neither a file");
    refuse("package:2 core:0 pu:1", COLO_ERR_ARG, "neither a file");
    refuse("package:2\n", COLO_ERR_ARG, "'package:2\\x0a'");
}

T_CASE_BUILT(what_is_too_large_is_refused_by_its_size)
{
    char text[2000];
    assert_int_equal(truncate(file, COLO_TOPOLOGY_XML_MAX + 1), 0);
    refuse(file, COLO_ERR_IO, "16777217 bytes, at most 16777216");
    assert_int_equal(truncate(file, 0), 0);
    refuse("package:200 core:200 pu:200", COLO_ERR_ARG, "more than 4096 processors at byte 17");
    refuse("package:99999999999999999999 pu:1", COLO_ERR_ARG,
           "more than 512 in one place at byte 8");
    refuse("pu:513", COLO_ERR_ARG, "more than 512 in one place at byte 3");
    refuse("package:17 core:256", COLO_ERR_ARG, "more than 4096 processors at byte 16");
    refuse("8 8 8 8 8", COLO_ERR_ARG, "more than 4096 processors at byte 8");
    memset(text, '1', sizeof text);
    text[sizeof text - 1] = '\0';
    refuse(text, COLO_ERR_ARG, "more than 1024 bytes");
}

T_CASE_BUILT(a_file_that_cannot_be_read_is_refused)
{
    refuse("/no/such/file.xml", COLO_ERR_IO, "No such file");
    refuse("missing.xml", COLO_ERR_IO, "No such file");
    refuse("/tmp/", COLO_ERR_IO, "not a regular file");
    refuse("/dev/zero", COLO_ERR_IO, "not a regular file");
    const char *fifo = t_text("%s.fifo", file);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    refuse(fifo, COLO_ERR_IO, "not a regular file"); /* and the call waits for no writer */
    unlink(fifo);
}

/* Files that were cut or edited are taken or refused, never followed into a crash. */
T_CASE_BUILT(a_damaged_file_is_a_status)
{
    static char good[16384], bad[sizeof good];
    FILE *f = fopen(GPUS, "r");
    assert_non_null(f);
    size_t size = fread(good, 1, sizeof good, f);
    fclose(f);
    assert_true(size > 4000 && size < sizeof good);
    uint64_t seed = t_seed();
    int64_t refused = 0, count = t_scaled(400);
    for (int64_t i = 0; i < count; i++) {
        size_t n = size;
        memcpy(bad, good, n);
        if (i % 4 == 0) {
            n = (size_t)t_below(&seed, (int64_t)size - 20); /* within the objects */
        } else {
            for (int64_t k = 0; k <= t_below(&seed, 4); k++) {
                size_t found = (size_t)t_below(&seed, (int64_t)size);
                while (i % 4 > 1 && found + 1 < size && !(bad[found] >= '0' && bad[found] <= '9'))
                    found++;
                bad[found] =
                    i % 4 > 1 ? "0123456789fx-"[t_below(&seed, 13)] : (char)t_below(&seed, 256);
            }
        }
        write_file(bad, n);
        T_ENDS(colo_topology_destroy) colo_topology_t *p = NULL;
        colo_status_t st = colo_topology_create(
            &p, &(colo_topology_config_t){COLO_TOPOLOGY_CONFIG_INIT, .topology = file, .world = 2});
        if (st != COLO_OK && st != COLO_ERR_IO && st != COLO_ERR_ARG)
            fail_msg("case %d: %s: %s", (int)i, colo_status_name(st), colo_last_error());
        if (i % 4 == 0 && st == COLO_OK)
            fail_msg("case %d: %zu of %zu bytes were taken", (int)i, n, size);
        refused += st != COLO_OK;
    }
    assert_true(refused >= count / 4);
}

/* What is wrong with one attribute is said with its line. */
T_CASE_BUILT(an_inconsistent_file_is_refused_with_its_line)
{
    static const struct {
        const char *from, *to, *error_message;
    } edits[] = {
        {"type=\"PU\" os_index=\"8\"", "type=\"PU\" os_index=\"7\"", "is not its os_index"},
        {"<object type=\"Core\" os_index=\"1\" cpuset",
         "<object type=\"Core\" os_index=\"1\" xpuset", "line 17: an object lacks a cpuset"},
        {"complete_cpuset=\"0x0000f0f0\"", "complete_cpuset=\"0x0000f0ff\"", "overlap"},
        {"allowed_cpuset=\"0x0000ffff\"", "allowed_cpuset=\"0x00000000\"", "allowed sets"},
    };
    static char good[16384], bad[sizeof good];
    FILE *f = fopen(GPUS, "r");
    assert_non_null(f);
    size_t size = fread(good, 1, sizeof good - 1, f);
    fclose(f);
    good[size] = '\0';
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        memcpy(bad, good, size + 1);
        char *found = strstr(bad, edits[i].from);
        assert_non_null(found);
        memcpy(found, edits[i].to, strlen(edits[i].to));
        write_file(bad, size);
        refuse(file, COLO_ERR_IO, edits[i].error_message);
    }
}

T_CASE_BUILT(numbers_that_do_not_fit_are_refused)
{
    static const struct {
        colo_topology_config_t c;
        const char *error_message;
    } bad[] = {
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, 9, 0, 0}, "9 ranks on a host, the machine has 8"},
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, 32, 16, 0}, "16 ranks on a host, the machine has 8"},
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, 0, 0, 0}, "a world of 0 ranks"},
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, COLO_TOPOLOGY_WORLD_MAX + 1, 1, 0},
         "expected 1..16777216"},
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, 1, -1, 0}, "-1 ranks per node"},
        {{COLO_TOPOLOGY_CONFIG_INIT, ONE, 1, 0, COLO_BIND_COUNT}, "binding 5"},
        {{1, ONE, 1, 0, 0}, "struct_size is 1"},
    };
    T_ENDS(colo_topology_destroy) colo_topology_t *p = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_fails(colo_topology_create(&p, &bad[i].c), COLO_ERR_ARG, bad[i].error_message);
    assert_fails(colo_topology_create(&p, NULL), COLO_ERR_ARG, "config is NULL");
    assert_fails(colo_topology_create(NULL, &bad[0].c), COLO_ERR_ARG, "the output is NULL");
    assert_null(p);

    p = place_of(ONE, 8, 0, COLO_BIND_CORE);
    colo_topology_spot_t s = {COLO_TOPOLOGY_SPOT_INIT, .host = 77};
    assert_fails(colo_topology_spot(p, 8, &s), COLO_ERR_ARG, "topology: rank 8 is outside [0, 8)");
    assert_fails(colo_topology_spot(p, -1, &s), COLO_ERR_ARG, "rank -1");
    assert_fails(colo_topology_spot(p, 0, NULL), COLO_ERR_ARG, "NULL");
    assert_fails(colo_topology_bind(p, 8), COLO_ERR_ARG, "rank 8");
    assert_fails(colo_topology_bind(p, 0), COLO_ERR_STATE, "not this machine's");
    assert_fails(colo_topology_rebind(p, COLO_BIND_COUNT), COLO_ERR_ARG, "binding 5");
    assert_int_equal(s.host, 77);
}

/* ---- a build without hwloc ---- */

T_CASE_IF(!colo_topology_version(), without_hwloc_the_error_message_says_what_to_do)
{
    static const char *const topology[] = {NULL, ONE, GPUS, "/no/such/file.xml"};
    for (int i = 0; i < 4; i++) {
        refuse(topology[i], COLO_ERR_UNBUILT, "install hwloc 2.9 or later (libhwloc-dev)");
        refuse(topology[i], COLO_ERR_UNBUILT, "configure with -Dhwloc=enabled");
    }
}

/* ---- this machine ---- */

struct ran {
    cpu_set_t on[8];
};

static colo_status_t look(colo_comm_t *world, void *arg)
{
    struct ran *ran = arg;
    cpu_set_t *mine = &ran->on[colo_comm_rank(world)];
    rank_check(sched_getaffinity(0, sizeof *mine, mine) == 0);
    return COLO_OK;
}

T_CASE_BUILT(thread_ranks_are_bound_when_asked)
{
    cpu_set_t all, both;
    struct ran ran;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    colo_topology_t *p = place_of(NULL, 1, 0, COLO_BIND_CORE);
    colo_topology_machine_t m = {COLO_TOPOLOGY_MACHINE_INIT};
    assert_ok(colo_topology_machine(p, &m));
    colo_topology_destroy(&p);
    int n = m.cores < 2 ? 1 : 2;

    unsetenv("COLO_BIND");
    assert_ok(colo_comm_threads_run(n, look, &ran));
    assert_true(CPU_EQUAL(&ran.on[0], &all));

    setenv("COLO_BIND", "core", 1);
    assert_ok(colo_comm_threads_run(n, look, &ran));
    CPU_ZERO(&both);
    for (int r = 0; r < n; r++) {
        cpu_set_t inside;
        CPU_AND(&inside, &ran.on[r], &all);
        assert_true(CPU_EQUAL(&inside, &ran.on[r]) && CPU_COUNT(&ran.on[r]) > 0);
        CPU_AND(&both, &ran.on[0], &ran.on[r]);
    }
    assert_int_equal(CPU_COUNT(&both), n == 2 ? 0 : CPU_COUNT(&ran.on[0])); /* a core each */
    setenv("COLO_BIND", "none", 1);
    assert_ok(colo_comm_threads_run(n, look, &ran));
    assert_true(CPU_EQUAL(&ran.on[n - 1], &all)); /* nothing is left bound */
    unsetenv("COLO_BIND");
}

static colo_status_t nothing(colo_comm_t *world, void *arg)
{
    atomic_fetch_add((atomic_int *)arg, 1);
    return COLO_OK;
}

/* Runs without placement as well: last, since a process warns once. @state: what is said */
T_CASE(ranks_run_unbound_with_one_warning)
{
    bool built = colo_topology_version() != NULL;
    t_lines_t l = {0};
    atomic_int ran = 0;
    colo_log_set(t_keep_line, &l, COLO_LOG_WARN);
    setenv("COLO_BIND", "core", 1);
    if (built) { /* a launcher that goes on in spite of what every communicator refuses */
        colo_topology_t *topology = NULL;
        setenv("COLO_BIND", "cores", 1);
        colo_topology_create_env(&topology, 3);
        assert_null(topology);
        assert_fails(colo_comm_threads_run(3, nothing, &ran), COLO_ERR_ARG,
                     "COLO_BIND is 'cores', expected none, core, scatter, numa or package");
        setenv("COLO_BIND", "none", 1);
    }
    assert_ok(colo_comm_threads_run(3, nothing, &ran));
    assert_true(l.count == 1 && l.level == COLO_LOG_WARN);
    assert_non_null(strstr(l.last, built
                                       ? "COLO_BIND=cores: ranks are not bound: bind: found 'cores'"
                                       : "COLO_BIND=core: ranks are not bound: placement: this "
                                         "build has no hwloc"));
    assert_ok(colo_comm_threads_run(3, nothing, &ran));
    assert_int_equal(l.count, 1);
    setenv("COLO_BIND", "none", 1);
    assert_ok(colo_comm_threads_run(3, nothing, &ran));
    assert_int_equal(atomic_load(&ran), 9);
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    unsetenv("COLO_BIND");
}

int main(void)
{
    setenv("HWLOC_HIDE_ERRORS", "2", 0);
    const char *folder = t_folder();
    snprintf(file, sizeof file, "%s/topology.xml", folder);
    write_file("", 0);
    int rc = t_main("grid/topology");
    unlink(file);
    rmdir(folder);
    return rc;
}
