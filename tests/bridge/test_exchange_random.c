/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_exchange_random.c - 2,000 seeded layouts of 2 to 16 ranks, and every pair of (tp, cp, dp)
 * layouts, forward and backward, executed on threads.
 *
 * Dims in random order, extra dims, offsets, DP that does not divide, source context ranks,
 * pipeline stages, sequence parallelism, position maps, features in blocks, both outputs, all
 * gradients, memory orders, strides and dtypes. The shares that matter are counted and asserted; a
 * failure prints the seed of its case. With T_SCALE a tenth of them runs.
 */
#include "harness/harness.h"

#include "harness/bridge_random.h"

#define CASES 2000

T_CASE(seeded_layouts_of_2_to_16_ranks_arrive)
{
    uint64_t base = t_seed();
    t_shares_t t = {0};
    int64_t failed = 0;
    char first[1500] = "";
    for (int64_t i = 0; i < CASES; i++) {
        int64_t src_table[T_RANDOM_TABLE], dst_table[T_RANDOM_TABLE];
        uint64_t word = base ^ (uint64_t)i << 32, seed = t_rand(&word);
        t_case_t c = t_random_case(seed, 16, src_table, dst_table, &t);
        if (t_scaled(100) < 100 && i % 10)
            continue;
        if (t_case_run(&c) < 0) {
            print_message("case %lld: %s\n", (long long)i, colo_last_error());
            if (!failed++)
                snprintf(first, sizeof first, "%lld: %s", (long long)i, colo_last_error());
        }
    }
    print_message(
        "of %d: ragged %lld, uneven %lld, source cp %lld, pp %lld, sp %lld (any %lld), maps %lld, "
        "features %lld, offsets %lld, partial sums %lld, disjoint %lld\n",
        CASES, (long long)t.ragged, (long long)t.uneven, (long long)t.source_cp, (long long)t.pp,
        (long long)t.sp, (long long)t.any, (long long)t.maps, (long long)t.features,
        (long long)t.offsets, (long long)t.partial, (long long)t.disjoint);
    if (failed)
        fail_msg("%lld of %d cases failed with T_SEED=%llu, first %s", (long long)failed, CASES,
                 (unsigned long long)base, first);
    assert_true(t.ragged >= CASES * 30 / 100);
    assert_true(t.uneven >= CASES * 40 / 100);
    assert_true(t.source_cp >= CASES * 20 / 100);
    assert_true(t.pp >= CASES * 20 / 100);
    assert_true(t.sp >= CASES * 20 / 100);
    assert_true(t.maps >= CASES * 20 / 100);
    assert_true(t.full >= CASES * 40 / 100 && t.sharded >= CASES * 40 / 100);
    assert_true(t.partial >= CASES * 5 / 100 && t.disjoint >= CASES * 5 / 100);
    assert_true(t.features >= CASES * 2 / 100 && t.offsets >= CASES * 10 / 100);
}

/* Under each contract; dim orders, memory orders and strides are taken in turn. */
T_CASE(every_pair_of_layouts_of_16_ranks_arrives)
{
    static const char *const axes[] = {"bsh", "sbh", "th"};
    int64_t pairs = 0;
    T_EACH_PAIR (p, 1, 16) {
        for (int kind = 0; kind < 3 && !t_left_out(p.nth); kind++) {
            t_case_t c = t_pair_case(&p, p.nth, p.nth / T_ORDERS);
            t_case_kind(&c, kind);
            c.shape.b += p.nth % 2;
            c.shape.h += kind % 2;
            c.axes = axes[(p.nth + kind) % 3];
            c.stride = (t_stride_t)(p.nth % T_STRIDE_COUNT);
            assert_ok(t_case_run(&c));
        }
        pairs++;
    }
    assert_int_equal(pairs, 1100);
}

T_MAIN("bridge/exchange_random")
