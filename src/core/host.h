/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.h (private) - where this process runs, as numbers that processes compare. Each answers
 * another question: containers of one machine may share its GPUs, and have names and networks of
 * their own.
 */
#ifndef COLO_CORE_HOST_H
#define COLO_CORE_HOST_H

#include "core/error.h"

#include <stdint.h>

/* Equal: one machine, so each of the two may open what the other's GPU holds. */
COLO_FOR_MODULES uint64_t colo_host_machine(void);
/* Equal: one node, as users name them: one machine and one host name. */
uint64_t colo_host_node(void);
/* Equal: Unix sockets reach from one to the other: one machine and one network namespace. @id: 0 if
 * that is unknown. Returns errno if this process lacks descriptors or memory to find out, else 0.
 */
int colo_host_sockets(uint64_t *id);
/* @error if it says that this process lacks descriptors or memory, which it may have later; else 0.
 */
int colo_host_shortage(int error);

#endif
