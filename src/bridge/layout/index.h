/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.h (private) - the three ways an axis is cut, in closed form, and lists ordered by small
 * numbers. Layouts, plans and the partition helper all use these, so that "the same zigzag" is one
 * piece of code.
 *
 * BLOCK:   part d of D of length L is [floor(dL/D), floor((d+1)L/D)); D need not divide L.
 * CEIL:    part d is [min(dq, L), min((d+1)q, L)) with q = ceil(L/D): the last may be empty.
 * ZIGZAG:  2C chunks of q = L/2C; part c is chunk c, then chunk 2C-1-c.
 */
#ifndef COLO_BRIDGE_LAYOUT_INDEX_H
#define COLO_BRIDGE_LAYOUT_INDEX_H

#include <stdint.h>
#include <string.h>

__extension__ typedef __int128 colo_i128_t; /* products of two lengths */

static inline int64_t colo_block_lo(int64_t length, int64_t parts, int64_t part)
{
    return (int64_t)((colo_i128_t)part * length / parts);
}

/* The part that holds index @i (0 <= i < length): the largest d with floor(d L / D) <= i. */
static inline int64_t colo_block_part(int64_t length, int64_t parts, int64_t i)
{
    return (int64_t)((((colo_i128_t)i + 1) * parts - 1) / length);
}

static inline int64_t colo_ceil_lo(int64_t length, int64_t parts, int64_t part)
{
    const colo_i128_t lo = (colo_i128_t)part * (length / parts + (length % parts > 0));
    return lo < length ? (int64_t)lo : length;
}

/* Global index of local @i on part @part of @parts; @chunk = length / (2 * parts) */
static inline int64_t colo_zigzag_index(int64_t chunk, int64_t parts, int64_t part, int64_t i)
{
    return i < chunk ? part * chunk + i : (2 * parts - 1 - part) * chunk + (i - chunk);
}

/* The part that owns global index @i, and the local index there */
static inline int64_t colo_zigzag_part(int64_t length, int64_t parts, int64_t i, int64_t *local)
{
    int64_t chunk = i / length;
    if (chunk < parts) {
        *local = i - chunk * length;
        return chunk;
    }
    *local = i - chunk * length + length;
    return 2 * parts - 1 - chunk;
}

/* Numbers of @n elements: of[i * stride], or what stands there in @map. */
typedef struct colo_keys {
    const int64_t *of, *map; /* map: or NULL */
    int64_t n, stride;
} colo_keys_t;
/* The keys of a list, which is not NULL, whose elements have this member. */
#define COLO_KEYS(list, key, count) \
    ((colo_keys_t){.of = &(list)->key, .n = (count), .stride = sizeof *(list) / sizeof(int64_t)})

/* Lists elements by their keys, which are below @nkeys: @order [n] gets those of key k from
 * first[k] on, ascending. @first: [nkeys + 1], out. */
static inline void colo_order_by(colo_keys_t keys, int64_t nkeys, int64_t *first, int64_t *order)
{
    memset(first, 0, (size_t)(nkeys + 1) * sizeof *first);
    for (int64_t i = 0; i < keys.n; i++)
        first[1 + (keys.map ? keys.map[keys.of[i * keys.stride]] : keys.of[i * keys.stride])]++;
    for (int64_t k = 0; k < nkeys; k++)
        first[k + 1] += first[k];
    for (int64_t i = 0; i < keys.n; i++)
        order[first[keys.map ? keys.map[keys.of[i * keys.stride]] : keys.of[i * keys.stride]]++] =
            i;
    /* each entry has run on to the begin of the next key */
    memmove(&first[1], &first[0], (size_t)nkeys * sizeof *first);
    first[0] = 0;
}

#endif
