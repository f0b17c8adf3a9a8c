/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tables.c - what ranks compare of the tables of a batch, which are the caller's.
 */
#include "bridge/layout/packed.h"

#include "core/hash.h"
#include "core/sized.h"

#include <string.h>

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash += value * UINT64_C(0xc2b2ae3d27d4eb4f);
    return (hash << 31 | hash >> 33) * UINT64_C(0x9e3779b185ebca87);
}

__extension__ typedef unsigned __int128 product_t;

/* Both halves of the product of two words and what came before. */
static inline uint64_t fold(uint64_t hash, uint64_t first, uint64_t second)
{
    const product_t product = (product_t)(first ^ UINT64_C(0x2d358dccaa6c78a5)) * (second ^ hash);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Two entries in one word: without loss if they are below 2^32, as they usually are. */
static inline uint64_t both(const int64_t *values)
{
    return (uint64_t)values[0] ^ ((uint64_t)values[1] << 32 | (uint64_t)values[1] >> 32);
}

/* One multiplication for four entries, in four chains, because a chain waits for each of its own.
 */
static uint64_t hash_entries(const int64_t *values, int64_t n)
{
    enum { CHAINS = 4 };
    static const uint64_t seed[CHAINS] = {
        UINT64_C(0x8bb84b93962eacc9), UINT64_C(0x4b33a62ed433d4a3), UINT64_C(0x4d5a2da51de1aa47),
        UINT64_C(0xa0761d6478bd642f)};
    uint64_t chains[CHAINS], all = (uint64_t)n;
    int64_t i = 0;
    memcpy(chains, seed, sizeof chains);
    for (; i + 4 * CHAINS <= n; i += 4 * CHAINS)
        for (int k = 0; k < CHAINS; k++)
            chains[k] =
                fold(chains[k] + seed[k], both(&values[i + 4 * k]), both(&values[i + 4 * k + 2]));
    for (; i < n; i++)
        chains[0] = mix(chains[0], (uint64_t)values[i]);
    for (int k = 0; k < CHAINS; k++)
        all = mix(all, chains[k]);
    return all;
}

void colo_table_keep(colo_table_t *table, int32_t *n, const char *side, const char *name,
                     const int64_t *values, int64_t entries)
{
    colo_table_t *added = &table[(*n)++];
    *added = (colo_table_t){.side = side, .name = name, .n = values ? entries : 0};
    added->hash = hash_entries(values, added->n);
    for (int64_t k = 0; k < added->n && k < COLO_SHOWN; k++)
        added->first[k] = values[k];
}

void colo_packing_keep(colo_table_t *table, int32_t *n, const char *side,
                       const colo_packing_t *given)
{
    colo_packing_t own = {COLO_PACKING_INIT}, *const packing = &own;
    (void)COLO_SIZED_READ(packing, given, seq_dp, "packing", "COLO_PACKING_INIT");
    const int64_t split = packing->split,
                  pieces = packing->piece_start ? packing->piece_start[packing->nseqs] : 0;
    colo_table_keep(table, n, side, "split", &split, 1);
    colo_table_keep(table, n, side, "seq_len", packing->seq_len, packing->nseqs);
    colo_table_keep(table, n, side, "seq_room", packing->seq_room, packing->nseqs);
    colo_table_keep(table, n, side, "seq_dp", packing->seq_dp, packing->nseqs);
    colo_table_keep(table, n, side, "seq_cp", packing->seq_cp, packing->nseqs);
    colo_table_keep(table, n, side, "seq_first", packing->seq_first, packing->nseqs);
    colo_table_keep(table, n, side, "piece_start", packing->piece_start, packing->nseqs + 1);
    colo_table_keep(table, n, side, "piece_len", packing->piece_len, pieces);
    colo_table_keep(table, n, side, "piece_owner", packing->piece_owner, pieces);
    colo_table_keep(table, n, side, "halo_before", &packing->halo_before, 1);
}

int32_t colo_packings_keep(colo_table_t *table, const colo_packing_t *src,
                           const colo_packing_t *dst)
{
    int32_t n = 0;
    colo_packing_keep(table, &n, "src ", src);
    colo_packing_keep(table, &n, "dst ", dst);
    return n;
}

uint64_t colo_tables_hash(const colo_table_t *table, int32_t n)
{
    uint64_t hash = COLO_HASH_INIT;
    for (int32_t i = 0; i < n; i++)
        hash = colo_hash_i64(hash, (int64_t)table[i].hash);
    return hash;
}
