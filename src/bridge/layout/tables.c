/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tables.c - what ranks compare of the tables of a batch, which are the caller's.
 */
#include "bridge/layout/packed.h"

#include "core/hash.h"
#include "core/sized.h"

#include <string.h>

static uint64_t mix(uint64_t h, uint64_t v)
{
    h += v * UINT64_C(0xc2b2ae3d27d4eb4f);
    return (h << 31 | h >> 33) * UINT64_C(0x9e3779b185ebca87);
}

__extension__ typedef unsigned __int128 product_t;

/* Both halves of the product of two words and what came before. */
static inline uint64_t fold(uint64_t h, uint64_t a, uint64_t b)
{
    const product_t x = (product_t)(a ^ UINT64_C(0x2d358dccaa6c78a5)) * (b ^ h);
    return (uint64_t)x ^ (uint64_t)(x >> 64);
}

/* Two entries in one word: without loss if they are below 2^32, as they usually are. */
static inline uint64_t both(const int64_t *v)
{
    return (uint64_t)v[0] ^ ((uint64_t)v[1] << 32 | (uint64_t)v[1] >> 32);
}

/* One multiplication for four entries, in four chains, because a chain waits for each of its own.
 */
static uint64_t hash_entries(const int64_t *v, int64_t n)
{
    enum { CHAINS = 4 };
    static const uint64_t seed[CHAINS] = {
        UINT64_C(0x8bb84b93962eacc9), UINT64_C(0x4b33a62ed433d4a3), UINT64_C(0x4d5a2da51de1aa47),
        UINT64_C(0xa0761d6478bd642f)};
    uint64_t h[CHAINS], all = (uint64_t)n;
    int64_t i = 0;
    memcpy(h, seed, sizeof h);
    for (; i + 4 * CHAINS <= n; i += 4 * CHAINS)
        for (int k = 0; k < CHAINS; k++)
            h[k] = fold(h[k] + seed[k], both(&v[i + 4 * k]), both(&v[i + 4 * k + 2]));
    for (; i < n; i++)
        h[0] = mix(h[0], (uint64_t)v[i]);
    for (int k = 0; k < CHAINS; k++)
        all = mix(all, h[k]);
    return all;
}

void colo_table_keep(colo_table_t *table, int32_t *n, const char *side, const char *name,
                     const int64_t *v, int64_t entries)
{
    colo_table_t *t = &table[(*n)++];
    *t = (colo_table_t){.side = side, .name = name, .n = v ? entries : 0};
    t->hash = hash_entries(v, t->n);
    for (int64_t k = 0; k < t->n && k < COLO_SHOWN; k++)
        t->first[k] = v[k];
}

void colo_packing_keep(colo_table_t *table, int32_t *n, const char *side,
                       const colo_packing_t *given)
{
    colo_packing_t own = {COLO_PACKING_INIT}, *const p = &own;
    (void)COLO_SIZED_READ(p, given, seq_dp, "packing", "COLO_PACKING_INIT");
    const int64_t split = p->split, pieces = p->piece_start ? p->piece_start[p->nseqs] : 0;
    colo_table_keep(table, n, side, "split", &split, 1);
    colo_table_keep(table, n, side, "seq_len", p->seq_len, p->nseqs);
    colo_table_keep(table, n, side, "seq_dp", p->seq_dp, p->nseqs);
    colo_table_keep(table, n, side, "seq_cp", p->seq_cp, p->nseqs);
    colo_table_keep(table, n, side, "seq_first", p->seq_first, p->nseqs);
    colo_table_keep(table, n, side, "piece_start", p->piece_start, p->nseqs + 1);
    colo_table_keep(table, n, side, "piece_len", p->piece_len, pieces);
    colo_table_keep(table, n, side, "piece_owner", p->piece_owner, pieces);
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
    uint64_t h = COLO_HASH_INIT;
    for (int32_t i = 0; i < n; i++)
        h = colo_hash_i64(h, (int64_t)table[i].hash);
    return h;
}
