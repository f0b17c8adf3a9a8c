/* SPDX-License-Identifier: Apache-2.0 */
/* lint.h - comes before every source that lint.py analyses. An analyzer sees one file and cannot
 * know that colo_fail() returns its first argument. */
#include "core/error.h"

#define colo_fail(status, ...) (colo_fail(status, __VA_ARGS__), (status))
