/* SPDX-License-Identifier: Apache-2.0 */
/* bridge_random.h - seeded cases of bridge_case.h. */
#ifndef TESTS_HARNESS_BRIDGE_RANDOM_H
#define TESTS_HARNESS_BRIDGE_RANDOM_H

#include "harness/bridge_case.h"

/* How many cases have what matters. */
typedef struct t_shares {
    int64_t ragged, uneven, source_cp, pp, sp, any, maps, full, sharded, partial, disjoint;
    int64_t features, offsets;
} t_shares_t;

/* Dims in any order whose product is at most @most: each of dp, tp, cp, pp, ep with a chance of
 * @likely percent, up to @largest. No splits, no stage. */
ref_side_t t_random_dims(uint64_t *r, int64_t most, const int likely[5], int64_t largest);

#define T_RANDOM_TABLE 64
/* A case of at most @ranks >= 6 ranks: dims in random order, extra dims, offsets, DP that does not
 * divide, source context ranks, pipeline stages, sequence parallelism, position maps, features in
 * blocks, both outputs, all gradients, memory orders, strides and dtypes. Tables: [T_RANDOM_TABLE],
 * which the case keeps. */
t_case_t t_random_case(uint64_t seed, int64_t ranks, int64_t *src_table, int64_t *dst_table,
                       t_shares_t *t);

#endif
