/* SPDX-License-Identifier: Apache-2.0 */
/* library.h (private) - functions of a library that is found at run time and never linked. */
#ifndef COLO_CORE_LIBRARY_H
#define COLO_CORE_LIBRARY_H

#include "core/error.h"

typedef struct colo_library_symbol {
    const char *name;
    void *function; /* of the function pointer to fill */
} colo_library_symbol_t;

/* What error messages say: "@user: @file cannot be loaded (why)@advice", "@user: the @title in this
 * process has no <name>@expected". */
typedef struct colo_library {
    const char *user, *title, *file, *advice, *expected;
} colo_library_t;

/*
 * Fills @want [n] from the first of these that has want[0]: symbols that the whole process sees;
 * @file as the process has it loaded already (PyTorch does); @file, loaded now and kept. A process
 * has one of each such library: a second copy would fight over the same GPUs. COLO_ERR_UNBUILT:
 * there is none, or it lacks a function.
 */
COLO_FOR_MODULES colo_status_t colo_library_find(const colo_library_t *l,
                                                 const colo_library_symbol_t *want, size_t n);

#endif
