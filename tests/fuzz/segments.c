/* SPDX-License-Identifier: Apache-2.0 */
/* segments.c - the tables of a ragged batch with any numbers: refused exactly if the oracle does.
 */
#include "fuzz.h"

#include "harness/bridge_case.h"
#include "harness/ragged_case.h"

enum { MOST = 12 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    static const char *const sides[] = {"dp=1", "dp=2", "tp=2,dp=2", "cp=2,dp=2", "tp=2,cp=2,dp=1"};
    int64_t rows[MOST], src_dp[MOST], seq[MOST], pos[MOST], seq_len[MOST], seq_dp[MOST];
    ref_ragged_t c = {.src = t_side(sides[fuzz_range(&f, 0, 4)], true),
                      .dst = t_side(sides[fuzz_range(&f, 0, 4)], false)};
    for (int i = 0; i < c.src.nsplits[1]; i++) /* the usual side has ZIGZAG, which is refused */
        c.src.split[1][i].cut = REF_BLOCK;
    const int64_t nseg = fuzz_range(&f, 0, MOST), nseq = fuzz_range(&f, 0, MOST);
    for (int64_t e = 0; e < nseg; e++) {
        rows[e] = fuzz_i64(&f);
        src_dp[e] = fuzz_i64(&f);
        seq[e] = fuzz_i64(&f);
        pos[e] = fuzz_i64(&f);
    }
    for (int64_t q = 0; q < nseq; q++) {
        seq_len[q] = fuzz_i64(&f);
        seq_dp[q] = fuzz_i64(&f);
    }
    /* The oracle walks rows one by one. */
    for (int64_t e = 0; e < nseg; e++)
        if (rows[e] > 1000)
            rows[e] = rows[e] % 1000;
    c.table = (ref_segments_t){nseg, nseq, rows, src_dp, seq, pos, NULL, seq_len, seq_dp};
    c.full = true;
    const colo_segments_t s = {COLO_SEGMENTS_INIT, .count = nseg,      .rows = rows,
                               .src_dp = src_dp,   .seq = seq,         .pos = pos,
                               .nseqs = nseq,      .seq_len = seq_len, .seq_dp = seq_dp};
    colo_layout_t src, dst;
    FUZZ_CHECK(t_layout(&src, &c.src) == COLO_OK && t_layout(&dst, &c.dst) == COLO_OK, "%s",
               colo_last_error());
    const colo_status_t st = colo_segments_check(&s, &src, &dst);
    ref_refusal_t why;
    const int64_t refusals = ref_ragged_refusals(&c, &why, 1);
    FUZZ_CHECK((st < 0) == (refusals > 0),
               "the library says %d (%s), the oracle has %lld refusals, first of kind %d", (int)st,
               st < 0 ? colo_last_error() : "", (long long)refusals, refusals ? (int)why.kind : 0);
    if (st < 0)
        FUZZ_REFUSED(st);
    else
        (void)colo_segments_hash(&s);
    return 0;
}
