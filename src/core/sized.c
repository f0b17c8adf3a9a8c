/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sized.c - structs of callers that were compiled with another version of the headers.
 *
 * Decides which sizes are served, and what is said of the others. Which members have a default is
 * each struct's own business (its COLO_..._INIT).
 */
#include "core/sized.h"

#include "core/error.h"

#include <colobridge/version.h>

#include <string.h>

static colo_status_t check(size_t found, size_t known, size_t least, const char *what,
                           const char *init)
{
    const size_t unit = sizeof found; /* members end there: none is read in half */
    COLO_FAIL_IF(found > known, COLO_ERR_ARG,
                 "%s.struct_size is %zu, expected at most %zu, which is all that version %s of the "
                 "library knows: the program was compiled with a newer header; load the library of "
                 "that header, or compile the program again",
                 what, found, known, colo_version());
    COLO_FAIL_IF(found < least || found % unit, COLO_ERR_ARG,
                 "%s.struct_size is %zu, expected a multiple of %zu from %zu to %zu; start from %s",
                 what, found, unit, (least + unit - 1) / unit * unit, known, init);
    return COLO_OK;
}

colo_status_t colo_sized_check_given(const void *given, size_t known, size_t least,
                                     const char *what, const char *init)
{
    size_t found;
    COLO_FAIL_IF(!given, COLO_ERR_ARG, "%s is NULL; start from %s", what, init);
    memcpy(&found, given, sizeof found);
    return check(found, known, least, what, init);
}

colo_status_t colo_sized_read(void *own, size_t known, const void *given, size_t least,
                              const char *what, const char *init)
{
    size_t found;
    COLO_FAIL_IF(!given, COLO_ERR_ARG, "%s is NULL; start from %s", what, init);
    memcpy(&found, given, sizeof found);
    COLO_TRY(check(found, known, least, what, init));
    memcpy(own, given, found);
    memcpy(own, &known, sizeof known);
    return COLO_OK;
}

colo_status_t colo_sized_write(void *given, const void *own, size_t known, const char *what,
                               const char *init)
{
    size_t found;
    const size_t unit = sizeof found;
    COLO_FAIL_IF(!given, COLO_ERR_ARG, "%s is NULL; start from %s", what, init);
    memcpy(&found, given, sizeof found);
    COLO_TRY(check(found, known, 2 * unit, what, init));
    memcpy((char *)given + unit, (const char *)own + unit, found - unit);
    return COLO_OK;
}

colo_status_t colo_sized_check_room(const int64_t *reserved, size_t n, const char *what,
                                    const char *init)
{
    for (size_t i = 0; i < n; i++)
        COLO_FAIL_IF(reserved[i], COLO_ERR_ARG,
                     "%s.reserved[%zu] is %lld, expected 0: the program was compiled with a newer "
                     "header, or did not start from %s",
                     what, i, (long long)reserved[i], init);
    return COLO_OK;
}
