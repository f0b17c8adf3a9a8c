/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_refusals.c - tables made wrong at random: refused exactly if the oracle refuses them,
 * with the number of a segment or a sequence that it names.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ragged_run.h"

#define CASES 20000
#define MOST 64

/* What the error message says of a refusal of the oracle's. */
static const char *words_of(const ref_refusal_t *f)
{
    const long long e = (long long)f->e, q = (long long)f->q, v = (long long)f->found;
    switch (f->kind) {
    case REF_REFUSE_ROWS:
        return t_text("segment %lld has %lld rows", e, v);
    case REF_REFUSE_SRC_DP:
        return t_text("segment %lld: src_dp is %lld", e, v);
    case REF_REFUSE_SEQ:
        return t_text("segment %lld: seq is %lld", e, v);
    case REF_REFUSE_SEQ_DP:
        return t_text("sequence %lld: seq_dp is %lld", q, v);
    case REF_REFUSE_SEQ_LEN:
    case REF_REFUSE_CHUNKS:
        return t_text("sequence %lld has %lld positions", q, v);
    case REF_REFUSE_POSITION:
        return t_text("at position %lld of sequence %lld, expected 0..", v, q);
    case REF_REFUSE_COLLISION:
        return "both have a row at position";
    case REF_REFUSE_SP:
        return t_text("%lld positions on a context rank", v);
    case REF_REFUSE_SUM:
        return "exceed 63 bits";
    }
    abort();
}

static bool names_one(const ref_refusal_t *f, int64_t n, const char *error_message)
{
    for (int64_t i = 0; i < n; i++)
        if (strstr(error_message, words_of(&f[i])))
            return true;
    return false;
}

T_CASE(random_tables_are_refused_if_the_oracle_refuses_them)
{
    const uint64_t seed = t_seed();
    int64_t refused = 0, kinds[REF_REFUSE_SUM + 1] = {0};
    for (int64_t i = 0; i < CASES; i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        colo_layout_t src, dst;
        ref_refusal_t found[MOST];
        uint64_t r = seed + (uint64_t)i;
        t_ragged_random(&t, seed + (uint64_t)i, 12);
        if (i % 4 == 0)
            (void)t_ragged_break(&t, (ref_refusal_kind_t)(1 + i / 4 % 10), &r);
        else if (i % 4 < 3)
            t_ragged_mutate(&t, &r);
        assert_ok(t_layout(&src, &t.c.src));
        assert_ok(t_layout(&dst, &t.c.dst));
        const colo_segments_t s = t_ragged_segments(&t);
        const int64_t n = ref_ragged_refusals(&t.c, found, MOST);
        const colo_status_t st = colo_segments_check(&s, &src, &dst);
        refused += st < 0;
        for (int64_t k = 0; k < n && k < MOST; k++)
            kinds[found[k].kind]++;
        if ((n > 0) != (st < 0))
            fail_msg("case %d: %s: %s, the oracle has %d refusals: %s", (int)i,
                     colo_status_name(st), st < 0 ? colo_last_error() : "", (int)n,
                     t_ragged_text(&t));
        if (n > 0 && !names_one(found, n < MOST ? n : MOST, colo_last_error()))
            fail_msg("case %d: \"%s\" is no refusal of the oracle, kind %d first: %s", (int)i,
                     colo_last_error(), (int)found[0].kind, t_ragged_text(&t));
    }
    assert_true(4 * refused > CASES && 4 * refused < 3 * CASES);
    for (int kind = REF_REFUSE_ROWS; kind <= REF_REFUSE_SUM; kind++)
        assert_true(kinds[kind] > 0);
}

T_MAIN("bridge/ragged_refusals")
