/* SPDX-License-Identifier: Apache-2.0 */
/* test_hwloc_load.c - a process that has an hwloc of another major version: this program itself,
 * whose functions of these names say that they are of hwloc 1.11. */
#include "harness/harness.h"

#include "grid/hwloc-load.h"

#define OLD(name)                                      \
    unsigned old_##name(void) __asm__("hwloc_" #name); \
    unsigned old_##name(void)                          \
    {                                                  \
        return 0x00010b00;                             \
    }
COLO_HWLOC_FUNCTIONS(OLD)

T_CASE(hwloc_of_another_major_version_is_refused)
{
    colo_topology_t *topology = NULL;
    const colo_topology_config_t config = {COLO_TOPOLOGY_CONFIG_INIT, .topology = "pu:2",
                                           .world = 1};
    for (int again = 0; again < 2; again++) {
        assert_fails(colo_topology_create(&topology, &config), COLO_ERR_UNBUILT,
                     "the hwloc in this process has version 1, this library was built for");
        assert_null(topology);
        assert_null(colo_topology_version());
    }
}

T_MAIN("grid/hwloc_load")
