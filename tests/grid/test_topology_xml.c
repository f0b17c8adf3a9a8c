/* SPDX-License-Identifier: Apache-2.0 */
/* test_topology_xml.c - topology files that hwloc did not write, one mistake each. */
#include "harness/harness.h"

#include "harness/allocations.h"

#include "grid/hwloc-load.h"
#include "grid/topology-xml.h"

#define SETS(cpus, nodes)                                                \
    " cpuset=\"" cpus "\" complete_cpuset=\"" cpus "\" nodeset=\"" nodes \
    "\" complete_nodeset=\"" nodes "\""
#define MACHINE(more) "<object type=\"Machine\"" SETS("0x3", "0x1") more ">\n"
#define NODE "<object type=\"NUMANode\" os_index=\"0\"" SETS("0x3", "0x1") "/>\n"
#define PU(index, cpus) "<object type=\"PU\" os_index=\"" index "\"" SETS(cpus, "0x1") "/>\n"
#define END "</object>\n"
#define GROUP "<object type=\"Group\"" SETS("0x3", "0x1") ">\n"

static const char right[] = MACHINE(" allowed_cpuset=\"0x3\" allowed_nodeset=\"0x1\"")
    NODE PU("0", "0x1") PU("1", "0x2") END;

static colo_status_t check(const char *text)
{
    assert_ok(colo_hwloc_load());
    return colo_topology_xml_check("file", text, strlen(text));
}

T_CASE(topology_with_one_mistake_is_refused_by_line)
{
    static const struct {
        const char *text, *words; /* words NULL: right */
    } table[] = {
        {right, NULL},
        {MACHINE("") NODE PU("0", "0x1") END, NULL}, /* all sets are allowed */
        {"<object type=Machine>", "line 1: an object without a type"},
        {"<object type=\"Machine>", "line 1: an object without a type"},
        {"<object type=\"Machine\" cpuset=\"\">", "line 1: an object lacks a cpuset or nodeset"},
        {"<object type=\"Machine\" nodeset=\"1\" cpuset=\"1x\">",
         "line 1: an object lacks a cpuset"},
        {"<object type=\"Machine\"" SETS("", "0x1") ">", "line 1: an object lacks a cpuset"},
        {"<object type=\"Machine\"" SETS("0x0", "0x1") ">", "line 1: an object's cpuset is empty"},
        {MACHINE(" allowed_cpuset=\"0x4\""), "line 1: the machine's allowed sets are empty or not"},
        {MACHINE(" allowed_cpuset=\"0x0\""), "line 1: the machine's allowed sets are empty or not"},
        {MACHINE(" allowed_nodeset=\"0x2\""),
         "line 1: the machine's allowed sets are empty or not"},
        {MACHINE("") "<object type=\"PU\"" SETS("0x1", "0x1") "/>",
         "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") PU("", "0x1"), "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") PU("1", "0x1"), "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") PU("0", "0x3"), "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") PU("x", "0x1"), "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") PU("000000000", "0x1"), "line 2: a processor's cpuset is not its os_index"},
        {MACHINE("") "<object type=\"NUMANode\"" SETS("0x3", "0x1") "/>",
         "line 2: a NUMA node's nodeset is not its os_index"},
        {MACHINE("") PU("2", "0x4"),
         "line 2: an object's cpuset or nodeset is not in its parent's"},
        {MACHINE("") "<object type=\"Group\"" SETS("0x1", "0x2") ">",
         "line 2: an object's cpuset or"},
        {MACHINE("") "<object type=\"Bridge\">\n" PU("0", "0x1"), "line 3: an object's cpuset or"},
        {MACHINE("") "<object type=\"Bridge\">\n<object type=\"MemCache\"" SETS("0x0", "0x0") ">",
         "line 3: an object's cpuset or"},
        {MACHINE("") PU("0", "0x1") PU("0", "0x1"),
         "line 3: objects overlap, or stand in the wrong"},
        {MACHINE("") PU("1", "0x2") PU("0", "0x1"),
         "line 3: objects overlap, or stand in the wrong"},
        {MACHINE("") NODE NODE, "line 3: objects overlap, or stand in the wrong"},
        {MACHINE("") NODE END, "no NUMA node or no processor in it"},
        {MACHINE("") PU("0", "0x1") END, "no NUMA node or no processor in it"},
        {MACHINE("") NODE, "the file ends within an object"},
        {"<topology>\n", "line 2: no hwloc topology"},
        {END, "line 1: an object ends that did not begin"},
        {MACHINE("") END MACHINE(""), "line 3: a second machine"},
        {"<object ", "line 1: a tag does not end"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const colo_status_t st = check(table[i].text);
        if (st != (table[i].words ? COLO_ERR_IO : COLO_OK) ||
            (table[i].words && !strstr(colo_last_error(), table[i].words)))
            fail_msg("%s: %s: \"%s\", expected \"%s\"", table[i].text, colo_status_name(st),
                     colo_last_error(), table[i].words ? table[i].words : "");
    }
    assert_fails(colo_topology_xml_check("file", "<\0", 3), COLO_ERR_IO, "a NUL byte");
}

T_CASE(objects_that_nest_too_deep_are_refused)
{
    char text[10000];
    size_t n = (size_t)sprintf(text, "%s", MACHINE(""));
    for (int depth = 1; depth <= 64; depth++)
        n += (size_t)sprintf(text + n, "%s", GROUP);
    assert_fails(check(text), COLO_ERR_IO, "line 65: objects nest too deep");
}

T_CASE(set_that_is_too_long_is_refused)
{
    enum { ZEROS = 20000 };
    static char text[ZEROS + 100];
    const int n = sprintf(text, "<object type=\"Machine\" nodeset=\"");
    memset(text + n, '0', ZEROS);
    strcpy(text + n + ZEROS, "\">");
    assert_fails(check(text), COLO_ERR_IO, "an object lacks a cpuset or nodeset");
}

T_CASE(topology_without_memory_is_an_error)
{
#ifdef SANITIZED
    skip();
#endif
    assert_ok(colo_hwloc_load()); /* which allocates, too */
    for (long k = 1;; k++) {
        fail_at = k;
        const colo_status_t st = check(right);
        const bool hit = fail_at == 0;
        fail_at = 0;
        if (!hit) {
            assert_true(k > 10);
            assert_ok(st);
            return;
        }
        if (st != COLO_ERR_NOMEM && st != COLO_ERR_IO)
            fail_msg("allocation %ld: %s", k, colo_status_name(st));
    }
}

T_MAIN("grid/topology_xml")
