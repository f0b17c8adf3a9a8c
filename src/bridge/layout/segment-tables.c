/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment-tables.c - the tables of a ragged batch: are they valid, what is their hash.
 *
 * Every rank checks the whole tables, because every rank has them: a refusal is the same error
 * message everywhere, and no rank has to ask another.
 */
#include "bridge/layout/segments.h"

#include "core/error.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- checks ---- */

static bool any_rows(const colo_segments_t *segments)
{
    int64_t segment = 0;
    while (segments->rows && segment < segments->count && segments->rows[segment] == 0)
        segment++;
    return segment < segments->count;
}

colo_status_t colo_segments_read(colo_segments_t *own, const colo_segments_t *given)
{
    const colo_segments_t *segments = own;
    *own = (colo_segments_t){COLO_SEGMENTS_INIT};
    COLO_FAIL_IF(!given, COLO_ERR_ARG, "segments: segments is NULL");
    COLO_TRY(COLO_SIZED_READ(own, given, packing, "segments", "COLO_SEGMENTS_INIT"));
    COLO_FAIL_IF(segments->count < 0 || segments->nseqs < 0, COLO_ERR_ARG,
                 "segments: %lld segments in %lld sequences, expected >= 0",
                 (long long)segments->count, (long long)segments->nseqs);
    COLO_FAIL_IF(segments->packing && (segments->nseqs || segments->seq_len || segments->seq_dp),
                 COLO_ERR_ARG,
                 "segments: nseqs, seq_len or seq_dp is given, and packing, "
                 "which has them; expected 0 and NULL");
    const struct {
        const char *name;
        bool missing;
    } table[] = {{"rows", segments->count && !segments->rows},
                 {"src_dp", segments->count && !segments->src_dp},
                 {"seq", segments->count && !segments->seq},
                 {"pos, or row_pos,", !segments->pos && !segments->row_pos && any_rows(segments)},
                 {"seq_len", segments->nseqs && !segments->seq_len},
                 {"seq_dp", segments->nseqs && !segments->seq_dp}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        COLO_FAIL_IF(table[i].missing, COLO_ERR_ARG,
                     "segments: table %s is NULL, expected the entries of %lld %s", table[i].name,
                     (long long)(i < 4 ? segments->count : segments->nseqs),
                     i < 4 ? "segments" : "sequences");
    COLO_FAIL_IF(segments->count && segments->pos && segments->row_pos, COLO_ERR_ARG,
                 "segments: both pos and row_pos are set; expected one of them, and NULL");
    return COLO_OK;
}

static colo_status_t bad_index(const char *what, int64_t i, const char *table, int64_t value,
                               int64_t n)
{
    return colo_fail(COLO_ERR_ARG, "segments: %s %lld: %s is %lld, expected 0..%lld", what,
                     (long long)i, table, (long long)value, (long long)n - 1);
}

/* Checks sequences and lays them out. */
static colo_status_t lay_sequences(colo_ragged_t *ragged)
{
    colo_segments_t *segments = &ragged->own;
    colo_packing_t packing = {COLO_PACKING_INIT};
    if (!segments->packing) {
        packing.nseqs = segments->nseqs;
        packing.seq_len = segments->seq_len;
        packing.seq_dp = segments->seq_dp;
        packing.split = ragged->dst.axes.zigzag ? COLO_PACKING_ZIGZAG : COLO_PACKING_BLOCK;
        return colo_packed_load(&ragged->dst, &packing, false);
    }
    COLO_TRY(COLO_SIZED_READ(&packing, segments->packing, seq_dp, "segments: packing",
                             "COLO_PACKING_INIT"));
    COLO_FAIL_IF(packing.split == COLO_PACKING_WHOLE, COLO_ERR_ARG,
                 "segments: packing has split WHOLE, expected another one: "
                 "with output FULL_SEQ a rank gets all rows");
    COLO_FAIL_IF(packing.halo_before, COLO_ERR_ARG,
                 "segments: packing has halo_before %lld, expected 0: bring the rows of images to "
                 "their ranks first, and then halos, by a packed bridge",
                 (long long)packing.halo_before);
    COLO_TRY(colo_packed_load(&ragged->dst, &packing, true));
    segments->nseqs = packing.nseqs;
    segments->seq_len = packing.seq_len;
    segments->seq_dp = packing.seq_dp;
    COLO_FAIL_IF(segments->nseqs && !segments->seq_dp &&
                     !(segments->seq_dp = colo_list_zeroed(&ragged->zeros, segments->nseqs, 8)),
                 COLO_ERR_NOMEM, "segments: %lld sequences", (long long)segments->nseqs);
    return COLO_OK;
}

static colo_status_t bad_position(const colo_segments_t *segments, int64_t segment, int64_t row,
                                  int64_t pos)
{
    return colo_fail(COLO_ERR_ARG,
                     "segments: segment %lld: row %lld of %lld is at position %lld of sequence "
                     "%lld, expected 0..%lld",
                     (long long)segment, (long long)row, (long long)segments->rows[segment],
                     (long long)pos, (long long)segments->seq[segment],
                     (long long)segments->seq_len[segments->seq[segment]] - 1);
}

/* The rows of segment @segment, whose positions are in @pos. */
static colo_status_t scattered_parts(const colo_segments_t *segments, int64_t segment,
                                     const int64_t *pos, colo_list_t *parts)
{
    const int64_t n = segments->rows[segment], length = segments->seq_len[segments->seq[segment]];
    for (int64_t row = 0, end; row < n; row = end) {
        end = row;
        do {
            if (pos[end] < 0 || pos[end] >= length)
                return bad_position(segments, segment, end, pos[end]);
            end++;
        } while (end < n && pos[end] == pos[row] + (end - row));
        COLO_PUSH(
            parts, "segments: %lld runs of rows",
            (colo_part_t){segments->seq[segment], pos[row], end - row, segments->src_dp[segment]});
    }
    return COLO_OK;
}

static bool follows(const colo_part_t *part, const colo_part_t *other)
{
    return part->seq < other->seq ||
           (part->seq == other->seq && part->pos + part->count <= other->pos);
}

/* The segment of part @i. */
static int64_t segment_of(const colo_segments_t *segments, const colo_part_t *part, int64_t i)
{
    int64_t segment = 0, rows = 0;
    for (int64_t k = 0; k <= i; rows -= part[k++].count)
        while (rows == 0)
            rows = segments->rows[segment++];
    return segment - 1;
}

/* A part, and where it begins in its sequence. */
typedef struct begin {
    int64_t pos, part;
} begin_t;

static int by_position(const void *first, const void *second)
{
    return colo_compare(first, second, 2);
}

/* Two rows on one position, among the @n parts of a sequence. */
static colo_status_t check_sequence(const colo_segments_t *segments, const colo_part_t *part,
                                    begin_t *list, int64_t n)
{
    bool sorted = true;
    for (int64_t i = 1; i < n; i++)
        sorted = sorted && list[i - 1].pos < list[i].pos;
    if (!sorted)
        qsort(list, (size_t)n, sizeof *list, by_position);
    for (int64_t i = 1; i < n; i++)
        COLO_FAIL_IF(!follows(&part[list[i - 1].part], &part[list[i].part]), COLO_ERR_ARG,
                     "segments: segments %lld and %lld both have a row at position %lld of "
                     "sequence %lld, expected at most one",
                     (long long)segment_of(segments, part, list[i - 1].part),
                     (long long)segment_of(segments, part, list[i].part), (long long)list[i].pos,
                     (long long)part[list[i].part].seq);
    return COLO_OK;
}

static colo_status_t check_apart(const colo_segments_t *segments, const colo_part_t *part,
                                 int64_t n)
{
    const int64_t nseqs = segments->nseqs;
    int64_t sorted = 1;
    while (sorted < n && follows(&part[sorted - 1], &part[sorted]))
        sorted++;
    if (sorted >= n) /* as tables usually are */
        return COLO_OK;
    COLO_AUTOFREE int64_t *order = malloc((size_t)n * sizeof *order);
    COLO_AUTOFREE int64_t *first = malloc((size_t)(nseqs + 1) * sizeof *first);
    COLO_AUTOFREE begin_t *list = malloc((size_t)n * sizeof *list);
    COLO_FAIL_IF(!order || !first || !list, COLO_ERR_NOMEM, "segments: %lld runs of rows",
                 (long long)n);
    colo_order_by(COLO_KEYS(part, seq, n), nseqs, first, order);
    for (int64_t i = 0; i < n; i++)
        list[i] = (begin_t){part[order[i]].pos, order[i]};
    for (int64_t seq = 0; seq < nseqs; seq++)
        COLO_TRY(check_sequence(segments, part, list + first[seq], first[seq + 1] - first[seq]));
    return COLO_OK;
}

/* What is known of the parts of segments [0, e). */
typedef struct walk {
    int64_t e, sum;             /* sum: of the rows */
    int64_t last_seq, last_end; /* of the part before */
    int64_t src, dst;           /* its replicas */
    bool ordered;               /* parts ascend, as they usually do */
    bool sorted;                /* their replicas ascend, and each segment was plain */
} walk_t;

/* Goes on while segments have rows that follow each other and fit: the usual ones, in few
 * instructions. All is in variables, because writing a row could change what is behind a
 * pointer. */
static void walk_plain(walk_t *walk, colo_ragged_t *ragged)
{
    const colo_segments_t *segments = &ragged->own;
    const int64_t *rows = segments->rows, *src_dp = segments->src_dp, *seq = segments->seq,
                  *pos = segments->pos;
    const int64_t *seq_len = segments->seq_len, *seq_dp = segments->seq_dp, count = segments->count;
    const uint64_t nseqs = (uint64_t)segments->nseqs,
                   replicas = (uint64_t)ragged->src.axes.replicas;
    int64_t *src_rows = ragged->src_rows, *dst_lo = ragged->dst_lo, *row = ragged->row;
    int64_t segment = walk->e, last_seq = walk->last_seq, last_end = walk->last_end,
            src = walk->src, dst = walk->dst;
    int64_t length = last_seq < 0 ? 0 : seq_len[last_seq];
    uint64_t sum = (uint64_t)walk->sum, begin = sum; /* of the rows of src */
    bool ordered = walk->ordered, sorted = walk->sorted;
    for (; segment < count; segment++) {
        const int64_t n = rows[segment], sequence = seq[segment], place = pos[segment],
                      replica = src_dp[segment];
        if (sequence != last_seq) {
            if ((uint64_t)sequence >= nseqs)
                break;
            length = seq_len[sequence];
            ordered &= sequence > last_seq;
            last_seq = sequence;
            last_end = 0;
            const int64_t to = seq_dp[sequence];
            sorted &= to >= dst;
            while (dst < to)
                dst_lo[++dst] = segment;
        }
        if ((((uint64_t)n - 1) | (uint64_t)place | (sum + (uint64_t)n)) >> 63 || place > length - n)
            break;            /* n < 1, place < 0, or too many */
        if (replica != src) { /* seldom: segments of a replica follow each other */
            if ((uint64_t)replica >= replicas)
                break;
            sorted &= replica > src;
            src_rows[src] += (int64_t)(sum - begin);
            begin = sum;
            src = replica;
        }
        row[segment] = (int64_t)sum;
        sum += (uint64_t)n;
        if (place < last_end)
            ordered = false;
        last_end = place + n;
    }
    src_rows[src] += (int64_t)(sum - begin);
    *walk = (walk_t){segment, (int64_t)sum, last_seq, last_end, src, dst, ordered, sorted};
}

/* Any segment. */
static colo_status_t walk_one(walk_t *walk, colo_ragged_t *ragged)
{
    const colo_segments_t *segments = &ragged->own;
    const int64_t segment = walk->e++, n = segments->rows[segment],
                  sequence = segments->seq[segment], first = walk->sum,
                  replica = segments->src_dp[segment], replicas = ragged->src.axes.replicas;
    COLO_FAIL_IF(n < 0, COLO_ERR_ARG, "segments: segment %lld has %lld rows, expected >= 0",
                 (long long)segment, (long long)n);
    COLO_FAIL_IF(!colo_add_ok(walk->sum, n, &walk->sum), COLO_ERR_ARG,
                 "segments: segment %lld: its %lld rows make the sum of all rows exceed "
                 "63 bits",
                 (long long)segment, (long long)n);
    if ((uint64_t)replica >= (uint64_t)replicas)
        return bad_index("segment", segment, "src_dp", replica, replicas);
    if ((uint64_t)sequence >= (uint64_t)segments->nseqs)
        return bad_index("segment", segment, "seq", sequence, segments->nseqs);
    ragged->src_rows[replica] += n;
    if (n == 0)
        return COLO_OK;
    if (segments->row_pos)
        return scattered_parts(segments, segment, segments->row_pos + first, &ragged->in_order);
    const int64_t pos = segments->pos[segment], length = segments->seq_len[sequence];
    if (pos < 0 || pos >= length)
        return bad_position(segments, segment, 0, pos);
    return bad_position(segments, segment, length - pos, length);
}

/* One part for each segment with rows, which follow each other. */
static colo_status_t list_parts(const colo_segments_t *segments, colo_list_t *parts)
{
    COLO_FAIL_IF(!colo_list_reserve(parts, segments->count, sizeof(colo_part_t)), COLO_ERR_NOMEM,
                 "segments: %lld runs of rows", (long long)segments->count);
    for (int64_t segment = 0; segment < segments->count; segment++)
        if (segments->rows[segment] > 0)
            ((colo_part_t *)parts->items)[parts->n++] =
                (colo_part_t){segments->seq[segment], segments->pos[segment],
                              segments->rows[segment], segments->src_dp[segment]};
    return COLO_OK;
}

colo_status_t colo_ragged_parts(colo_ragged_t *ragged)
{
    const colo_segments_t *segments = &ragged->own;
    walk_t walk = {.last_seq = -1, .dst = -1, .sorted = true};
    colo_list_t *parts = &ragged->in_order;
    parts->n = 0;
    walk.ordered = !segments->row_pos;
    COLO_TRY(lay_sequences(ragged));
    while (walk.e < segments->count) {
        if (segments->pos)
            walk_plain(&walk, ragged);
        if (walk.e < segments->count) {
            COLO_TRY(walk_one(&walk, ragged));
            walk.sorted = false;
        }
    }
    while (walk.dst < ragged->dst.axes.replicas)
        ragged->dst_lo[++walk.dst] = segments->count;
    ragged->rows = walk.sum;
    ragged->sorted = walk.sorted;
    if (segments->pos && !(walk.ordered && walk.sorted))
        COLO_TRY(list_parts(segments, parts));
    return walk.ordered ? COLO_OK : check_apart(segments, parts->items, parts->n);
}

/* ---- what ranks compare ---- */

int32_t colo_segments_keep(colo_table_t *table, const colo_segments_t *segments)
{
    int32_t n = 0;
    int64_t rows = 0;
    for (int64_t segment = 0; segments->row_pos && segment < segments->count; segment++)
        rows += segments->rows[segment];
    colo_table_keep(table, &n, "", "rows", segments->rows, segments->count);
    colo_table_keep(table, &n, "", "src_dp", segments->src_dp, segments->count);
    colo_table_keep(table, &n, "", "seq", segments->seq, segments->count);
    colo_table_keep(table, &n, "", "pos", segments->pos, segments->count);
    colo_table_keep(table, &n, "", "row_pos", segments->row_pos, rows);
    if (segments->packing) {
        colo_packing_keep(table, &n, "", segments->packing);
        return n;
    }
    colo_table_keep(table, &n, "", "seq_len", segments->seq_len, segments->nseqs);
    colo_table_keep(table, &n, "", "seq_dp", segments->seq_dp, segments->nseqs);
    return n;
}

uint64_t colo_segments_hash(const colo_segments_t *segments)
{
    colo_segments_t own;
    colo_table_t table[COLO_TABLES];
    if (!segments || colo_segments_read(&own, segments) < 0)
        return 0;
    return colo_tables_hash(table, colo_segments_keep(table, &own));
}
