/* SPDX-License-Identifier: Apache-2.0 */
/* topology-xml.h (private) - what must hold of a topology file before hwloc is given it. */
#ifndef COLO_GRID_TOPOLOGY_XML_H
#define COLO_GRID_TOPOLOGY_XML_H

#include <colobridge/status.h>

/* @text: [size] and a NUL after it; @quoted: the file's name, for the error message */
colo_status_t colo_topology_xml_check(const char *quoted, const char *text, size_t size);

#endif
