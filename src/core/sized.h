/* SPDX-License-Identifier: Apache-2.0 */
/* sized.h (private) - reading a public struct whose first member is struct_size. */
#ifndef COLO_CORE_SIZED_H
#define COLO_CORE_SIZED_H

#include <colobridge/status.h>

/* Copies the caller's struct @given into *@own, which holds the defaults and the library's own
 * struct_size. A shorter struct is one of an older header: it is served, and the members that it
 * lacks keep their defaults. @optional is the first member that may be missing. A longer struct is
 * one of a newer header and is refused, because the library cannot know what its members ask for.
 * So a new member goes to the end of its struct, at or behind the sizeof that the struct had.
 * @what: "plan: config"; @init: the name of the macro to start from. */
#define COLO_SIZED_READ(own, given, optional, what, init)                                          \
    colo_sized_read((own), sizeof *(own), (given), offsetof(__typeof__(*(own)), optional), (what), \
                    (init))

/* Only checks *@given, of which members up to @last are read where they are, and must be there. */
#define COLO_SIZED_CHECK(given, last, what, init)                                              \
    colo_sized_check_given((given), sizeof *(given),                                           \
                           offsetof(__typeof__(*(given)), last) + sizeof(given)->last, (what), \
                           (init))

/* Writes *@own to the caller's struct @given, all of whose members are outputs: a shorter struct,
 * of an older header, gets the members that it has. */
#define COLO_SIZED_WRITE(given, own, what, init) \
    colo_sized_write((given), (own), sizeof *(own), (what), (init))

/* Are the reserved members of a struct that never grows 0? */
#define COLO_SIZED_CHECK_ROOM(own, what, init)                                              \
    colo_sized_check_room((own)->reserved, sizeof(own)->reserved / sizeof *(own)->reserved, \
                          (what), (init))

/* @known: sizeof of the library's struct; @least: bytes that the caller must bring. */
colo_status_t colo_sized_read(void *own, size_t known, const void *given, size_t least,
                              const char *what, const char *init);
colo_status_t colo_sized_check_given(const void *given, size_t known, size_t least,
                                     const char *what, const char *init);
colo_status_t colo_sized_write(void *given, const void *own, size_t known, const char *what,
                               const char *init);
colo_status_t colo_sized_check_room(const int64_t *reserved, size_t n, const char *what,
                                    const char *init);

#endif
