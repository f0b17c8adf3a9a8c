/* SPDX-License-Identifier: Apache-2.0 */
/* hash.h (private) - the 64-bit FNV-1a that agreement at create is built on: the same on every
 * machine. */
#ifndef COLO_CORE_HASH_H
#define COLO_CORE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define COLO_HASH_INIT UINT64_C(0xcbf29ce484222325)

static inline uint64_t colo_hash_bytes(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Little-endian whatever the machine, so that mixed hosts agree. */
static inline uint64_t colo_hash_i64(uint64_t h, int64_t v)
{
    unsigned char b[8];
    for (int i = 0; i < 8; i++)
        b[i] = (unsigned char)((uint64_t)v >> (8 * i));
    return colo_hash_bytes(h, b, sizeof b);
}

static inline uint64_t colo_hash_str(uint64_t h, const char *s)
{
    while (*s)
        h = (h ^ (unsigned char)*s++) * UINT64_C(0x100000001b3);
    return (h ^ 0xff) * UINT64_C(0x100000001b3);
}

#endif
