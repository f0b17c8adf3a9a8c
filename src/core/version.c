/* SPDX-License-Identifier: Apache-2.0 */
/* version.c - the version compiled in, for programs that loaded another one than they built
 * against. */
#include <colobridge/version.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *colo_version(void)
{
    return TEXT(COLO_VERSION_MAJOR) "." TEXT(COLO_VERSION_MINOR) "." TEXT(COLO_VERSION_PATCH);
}

uint32_t colo_version_number(void)
{
    return (uint32_t)COLO_VERSION_MAJOR << 16 | (uint32_t)COLO_VERSION_MINOR << 8 |
           (uint32_t)COLO_VERSION_PATCH;
}
