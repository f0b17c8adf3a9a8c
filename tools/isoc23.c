/* SPDX-License-Identifier: Apache-2.0 */
/*
 * isoc23.c - strtoll() under the name that it has in programs compiled against glibc 2.38 or later.
 *
 * In a wheel the tools have jansson's archive in them, which is such a program on newer systems, and
 * run with older libraries. Nothing else of it is new.
 */
#include <stdlib.h>

long long __isoc23_strtoll(const char *text, char **end, int base);
long long __isoc23_strtoll(const char *text, char **end, int base)
{
    return strtoll(text, end, base);
}
