/* SPDX-License-Identifier: Apache-2.0 */
/* packing.c - the tables of a packing with any numbers: refused exactly if the oracle does. */
#include "fuzz.h"

#include "harness/packed_case.h"

enum { MOST = 8, PIECES = 24 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    int64_t len[MOST], dp[MOST], cp[MOST], first[MOST], room[MOST], start[MOST + 1], piece[PIECES],
        owner[PIECES], rows;
    const int64_t tp = fuzz_range(&f, 1, 3), context = fuzz_range(&f, 1, 3);
    ref_packed_t s = {.grid = t_side_ordered(0, tp, context, fuzz_range(&f, 1, 3), false)};
    const bool sp = tp > 1 && fuzz_range(&f, 0, 1);
    t_packed_split(&s, sp, NULL);
    s.p = (ref_packing_t){.nseq = fuzz_range(&f, 0, MOST), .len = len};
    s.p.cut = (ref_packed_cut_t)fuzz_range(&f, 0, 4);
    const uint8_t given = fuzz_u8(&f);
    for (int64_t q = 0; q < MOST; q++) {
        len[q] = fuzz_i64(&f);
        dp[q] = fuzz_i64(&f);
        cp[q] = fuzz_i64(&f);
        first[q] = fuzz_i64(&f);
        room[q] = fuzz_i64(&f);
    }
    /* piece_start says how many pieces there are in memory, so it ends within the tables */
    for (int64_t q = 0; q <= MOST; q++)
        start[q] = q == s.p.nseq || (given & 8) == 0 ? fuzz_range(&f, 0, PIECES) : fuzz_i64(&f);
    for (int64_t i = 0; i < PIECES; i++) {
        piece[i] = fuzz_i64(&f);
        owner[i] = fuzz_i64(&f);
    }
    for (int64_t q = 0; q < s.p.nseq && s.p.cut == REF_CUT_TABLE; q++)
        if (start[q + 1] > PIECES)
            start[q + 1] = PIECES;
    s.p.dp = given & 1 ? dp : NULL;
    s.p.cp = given & 2 && s.p.cut <= REF_CUT_ZIGZAG ? cp : NULL;
    s.p.first = given & 4 && s.p.cut <= REF_CUT_ZIGZAG ? first : NULL;
    s.p.room = given & 16 ? room : NULL;
    if (s.p.cut == REF_CUT_TABLE) {
        s.p.start = start;
        s.p.piece = piece;
        s.p.owner = owner;
    }
    s.p.halo = given & 32 ? fuzz_range(&f, -1, 9) : 0;
    /* The oracle walks positions one by one. */
    int64_t all = 0;
    for (int64_t q = 0; q < s.p.nseq; q++) {
        if (len[q] > 1000)
            len[q] = sp || s.p.halo ? len[q] % 1000 : len[q];
        if (room[q] > 1000)
            room[q] = sp || s.p.halo ? room[q] % 1000 : room[q];
        all |= len[q] | (s.p.room ? room[q] : 0);
    }
    const colo_packing_t p = t_packing(&s.p);
    colo_layout_t layout;
    FUZZ_CHECK(t_layout(&layout, &s.grid) == COLO_OK, "%s", colo_last_error());
    const int64_t rank = fuzz_range(&f, 0, 30);
    const bool valid = ref_packed_valid(&s);
    const colo_status_t st = colo_packing_rows(&p, &layout, rank, &rows);
    FUZZ_CHECK((st == COLO_OK) == valid, "the library says %d (%s), the oracle %d", (int)st,
               st < 0 ? colo_last_error() : "", valid);
    if (st < 0) {
        FUZZ_REFUSED(st);
    } else if (all >= 0 && all < 1 << 12) {
        int64_t *index = malloc((size_t)(2 * rows + 1) * sizeof *index);
        FUZZ_CHECK(rows == ref_packed_rows(&s, rank, NULL, NULL, NULL), "%lld rows",
                   (long long)rows);
        FUZZ_CHECK(index && colo_packing_index(&p, &layout, rank, index) == COLO_OK, "%s",
                   colo_last_error());
        free(index);
    }
    return 0;
}
