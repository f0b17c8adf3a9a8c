/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_ragged_refusals.c - which tables the oracle refuses.
 *
 * Tables broken in one way are refused for that. Of 100,000 tables mutated at random, the oracle
 * refuses exactly those that a walk over a map of places refuses. Calls nothing of the library.
 */
#include "harness/harness.h"

#include "harness/ragged_case.h"

#define CASES 3000
#define MOST_RANKS 16

static uint64_t seed_of(int64_t i)
{
    return t_seed() * 1000003u + (uint64_t)i;
}

T_CASE(broken_tables_are_refused_for_what_was_broken)
{
    int64_t made[REF_REFUSE_SUM + 1] = {0};
    for (int64_t i = 0; i < t_scaled(CASES); i++)
        for (int kind = REF_REFUSE_ROWS; kind <= REF_REFUSE_SUM; kind++) {
            t_ragged_t t;
            ref_refusal_t why[64];
            uint64_t state_of = seed_of(i) + 77;
            t_ragged_random(&t, seed_of(i), MOST_RANKS);
            if (t_ragged_break(&t, (ref_refusal_kind_t)kind, &state_of)) {
                int64_t n = ref_ragged_refusals(&t.c, why, 64);
                bool found = false;
                for (int64_t k = 0; k < n && k < 64; k++)
                    found |= (int)why[k].kind == kind;
                if (!found)
                    fail_msg("%s: no refusal %d among %lld", t_ragged_text(&t), kind, (long long)n);
                made[kind]++;
            } else if (ref_ragged_refusals(&t.c, why, 64)) {
                fail_msg("%s: changed, though nothing can be broken", t_ragged_text(&t));
            }
            t_ragged_free(&t);
        }
    for (int kind = REF_REFUSE_ROWS; kind <= REF_REFUSE_SUM; kind++)
        if (!made[kind])
            fail_msg("refusal %d was never made", kind);
}

#define WALK 4096 /* places that plain_verdict() is ready to walk */

/* Are the tables good? Walks rows over a map of places: 1 yes, 0 no, -1 too much to walk. */
static int plain_verdict(const ref_ragged_t *c)
{
    const ref_segments_t *t = &c->table;
    static unsigned char place[64][WALK];
    const int64_t d_count = ref_ragged_parts(&c->dst), p_count = ref_ragged_parts(&c->src);
    int64_t addends = 1, unit = 1, sp = 1; /* sequences are cut for cp, the axis for sp */
    for (int k = 0; k < c->dst.nsplits[1]; k++) {
        const ref_split_t *s = &c->dst.split[1][k];
        if (s->context)
            addends = ref_side_extent(&c->dst, s->dim);
        else
            sp = ref_side_extent(&c->dst, s->dim);
        if (addends > 1 && s->context)
            unit = s->cut == REF_ZIGZAG ? 2 * addends : addends;
    }
    bool long_one = false;
    memset(place, 0, (size_t)t->nseq * sizeof place[0]);
    for (int64_t q = 0; q < t->nseq; q++) {
        if (t->seq_len[q] < 0 || t->seq_dp[q] < 0 || t->seq_dp[q] >= d_count)
            return 0;
        if (t->seq_len[q] % unit)
            return 0;
        long_one |= t->seq_len[q] > WALK;
    }
    for (int64_t e = 0, g = 0; e < t->nseg; e++) {
        if (t->rows[e] < 0 || t->src_dp[e] < 0 || t->src_dp[e] >= p_count || t->seq[e] < 0 ||
            t->seq[e] >= t->nseq)
            return 0;
        for (int64_t r = 0; r < t->rows[e]; r++, g++) {
            int64_t q = t->seq[e], p = t->row_pos ? t->row_pos[g] : t->pos[e];
            if (p < 0 || p >= t->seq_len[q])
                return 0;
            p += t->row_pos ? 0 : r;
            if (p >= t->seq_len[q])
                return 0;
            if (p >= WALK || r >= WALK)
                return -1;
            if (place[q][p]++)
                return 0;
        }
    }
    if (long_one)
        return -1;
    for (int64_t d = 0; d < d_count; d++) {
        int64_t axis = 0;
        for (int64_t q = 0; q < t->nseq; q++)
            axis += t->seq_dp[q] == d ? t->seq_len[q] : 0;
        if (axis / addends % sp)
            return 0;
    }
    return 1;
}

T_CASE(mutated_tables_are_refused_exactly_if_a_plain_walk_refuses)
{
    int64_t verdicts[3] = {0}, kinds[REF_REFUSE_SUM + 1] = {0};
    const int64_t cases = t_scaled(2000);
    for (int64_t i = 0; i < cases; i++) {
        for (int64_t k = 0; k < 50; k++) {
            t_ragged_t t;
            uint64_t luck = seed_of(i * 50 + k) ^ 0xf022;
            t_ragged_random(&t, seed_of(i), MOST_RANKS);
            for (int64_t m = 1 + t_below(&luck, 3); m > 0; m--)
                t_ragged_mutate(&t, &luck);
            ref_refusal_t why[16];
            int64_t n = ref_ragged_refusals(&t.c, why, 16);
            int verdict = plain_verdict(&t.c);
            verdicts[verdict + 1]++;
            for (int64_t j = 0; j < n && j < 16; j++)
                kinds[why[j].kind]++;
            if (verdict >= 0 && (verdict == 1) != (n == 0))
                fail_msg("%s, mutation %lld: %lld refusals (first %d), the walk says %d",
                         t_ragged_text(&t), (long long)k, (long long)n, n ? (int)why[0].kind : 0,
                         verdict);
            t_ragged_free(&t);
        }
    }
    assert_true(verdicts[1] * 5 > cases * 50 && verdicts[2] * 10 > cases * 50);
    for (int kind = REF_REFUSE_ROWS; kind < REF_REFUSE_SUM; kind++)
        assert_true(kinds[kind] > 0);
}

T_MAIN("bridge/ref_ragged_refusals")
