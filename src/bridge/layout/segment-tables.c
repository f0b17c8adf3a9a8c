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

static bool any_rows(const colo_segments_t *s)
{
    int64_t e = 0;
    while (s->rows && e < s->count && s->rows[e] == 0)
        e++;
    return e < s->count;
}

colo_status_t colo_segments_read(colo_segments_t *own, const colo_segments_t *given)
{
    const colo_segments_t *s = own;
    *own = (colo_segments_t){COLO_SEGMENTS_INIT};
    if (!given)
        return colo_fail(COLO_ERR_ARG, "segments: segments is NULL");
    COLO_TRY(COLO_SIZED_READ(own, given, packing, "segments", "COLO_SEGMENTS_INIT"));
    if (s->count < 0 || s->nseqs < 0)
        return colo_fail(COLO_ERR_ARG, "segments: %lld segments in %lld sequences, expected >= 0",
                         (long long)s->count, (long long)s->nseqs);
    if (s->packing && (s->nseqs || s->seq_len || s->seq_dp))
        return colo_fail(COLO_ERR_ARG, "segments: nseqs, seq_len or seq_dp is given, and packing, "
                                       "which has them; expected 0 and NULL");
    const struct {
        const char *name;
        bool missing;
    } table[] = {{"rows", s->count && !s->rows},
                 {"src_dp", s->count && !s->src_dp},
                 {"seq", s->count && !s->seq},
                 {"pos, or row_pos,", !s->pos && !s->row_pos && any_rows(s)},
                 {"seq_len", s->nseqs && !s->seq_len},
                 {"seq_dp", s->nseqs && !s->seq_dp}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].missing)
            return colo_fail(COLO_ERR_ARG,
                             "segments: table %s is NULL, expected the entries of %lld %s",
                             table[i].name, (long long)(i < 4 ? s->count : s->nseqs),
                             i < 4 ? "segments" : "sequences");
    if (s->count && s->pos && s->row_pos)
        return colo_fail(COLO_ERR_ARG,
                         "segments: both pos and row_pos are set; expected one of them, and NULL");
    return COLO_OK;
}

static colo_status_t bad_index(const char *what, int64_t i, const char *table, int64_t v, int64_t n)
{
    return colo_fail(COLO_ERR_ARG, "segments: %s %lld: %s is %lld, expected 0..%lld", what,
                     (long long)i, table, (long long)v, (long long)n - 1);
}

/* Checks sequences and lays them out. */
static colo_status_t lay_sequences(colo_ragged_t *r)
{
    colo_segments_t *s = &r->own;
    colo_packing_t packing = {COLO_PACKING_INIT};
    if (!s->packing) {
        packing.nseqs = s->nseqs;
        packing.seq_len = s->seq_len;
        packing.seq_dp = s->seq_dp;
        packing.split = r->dst.axes.zigzag ? COLO_PACKING_ZIGZAG : COLO_PACKING_BLOCK;
        return colo_packed_load(&r->dst, &packing, false);
    }
    COLO_TRY(
        COLO_SIZED_READ(&packing, s->packing, seq_dp, "segments: packing", "COLO_PACKING_INIT"));
    if (packing.split == COLO_PACKING_WHOLE)
        return colo_fail(COLO_ERR_ARG, "segments: packing has split WHOLE, expected another one: "
                                       "with output FULL_SEQ a rank gets all rows");
    COLO_TRY(colo_packed_load(&r->dst, &packing, true));
    s->nseqs = packing.nseqs;
    s->seq_len = packing.seq_len;
    s->seq_dp = packing.seq_dp;
    if (s->nseqs && !s->seq_dp && !(s->seq_dp = colo_list_zeroed(&r->zeros, s->nseqs, 8)))
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld sequences", (long long)s->nseqs);
    return COLO_OK;
}

static colo_status_t bad_position(const colo_segments_t *s, int64_t e, int64_t row, int64_t pos)
{
    return colo_fail(COLO_ERR_ARG,
                     "segments: segment %lld: row %lld of %lld is at position %lld of sequence "
                     "%lld, expected 0..%lld",
                     (long long)e, (long long)row, (long long)s->rows[e], (long long)pos,
                     (long long)s->seq[e], (long long)s->seq_len[s->seq[e]] - 1);
}

/* The rows of segment @e, whose positions are in @pos. */
static colo_status_t scattered_parts(const colo_segments_t *s, int64_t e, const int64_t *pos,
                                     colo_list_t *parts)
{
    const int64_t n = s->rows[e], length = s->seq_len[s->seq[e]];
    for (int64_t r = 0, end; r < n; r = end) {
        end = r;
        do {
            if (pos[end] < 0 || pos[end] >= length)
                return bad_position(s, e, end, pos[end]);
            end++;
        } while (end < n && pos[end] == pos[r] + (end - r));
        colo_part_t *part = colo_list_push(parts, sizeof *part);
        if (!part)
            return colo_fail(COLO_ERR_NOMEM, "segments: %lld runs of rows", (long long)parts->n);
        *part = (colo_part_t){.seq = s->seq[e], .pos = pos[r], .count = end - r};
    }
    return COLO_OK;
}

static int by_position(const void *a, const void *b)
{
    const colo_part_t *x = *(colo_part_t *const *)a, *y = *(colo_part_t *const *)b;
    if (x->pos != y->pos)
        return x->pos < y->pos ? -1 : 1;
    return (x > y) - (x < y); /* in table order */
}

static bool follows(const colo_part_t *a, const colo_part_t *b)
{
    return a->seq < b->seq || (a->seq == b->seq && a->pos + a->count <= b->pos);
}

/* The segment of @part. @all: of the tables. */
static int64_t segment_of(const colo_segments_t *s, const colo_part_t *all, const colo_part_t *part)
{
    int64_t e = 0;
    while ((void)colo_parts_of(s->rows[e], &all), all <= part)
        e++;
    return e;
}

/* Two rows on one position, among the @n parts of a sequence. */
static colo_status_t check_sequence(const colo_segments_t *s, const colo_part_t *all,
                                    const colo_part_t **list, int64_t n)
{
    bool sorted = true;
    for (int64_t i = 1; i < n; i++)
        sorted = sorted && list[i - 1]->pos < list[i]->pos;
    if (!sorted)
        qsort(list, (size_t)n, sizeof *list, by_position);
    for (int64_t i = 1; i < n; i++)
        if (!follows(list[i - 1], list[i]))
            return colo_fail(COLO_ERR_ARG,
                             "segments: segments %lld and %lld both have a row at position %lld of "
                             "sequence %lld, expected at most one",
                             (long long)segment_of(s, all, list[i - 1]),
                             (long long)segment_of(s, all, list[i]), (long long)list[i]->pos,
                             (long long)list[i]->seq);
    return COLO_OK;
}

static colo_status_t check_apart(const colo_segments_t *s, const colo_part_t *p, int64_t n)
{
    const int64_t nseqs = s->nseqs;
    int64_t sorted = 1;
    while (sorted < n && follows(&p[sorted - 1], &p[sorted]))
        sorted++;
    if (sorted >= n) /* as tables usually are */
        return COLO_OK;
    COLO_AUTOFREE const colo_part_t **list = malloc((size_t)n * sizeof *list);
    COLO_AUTOFREE int64_t *end =
        calloc((size_t)nseqs + 1, sizeof *end); /* of each sequence, in at */
    if (!list || !end)
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld runs of rows", (long long)n);
    for (int64_t i = 0; i < n; i++)
        end[p[i].seq + 1]++;
    for (int64_t q = 0; q < nseqs; q++)
        end[q + 1] += end[q];
    for (int64_t i = 0; i < n; i++)
        list[end[p[i].seq]++] = &p[i];
    for (int64_t q = 0, first = 0; q < nseqs; first = end[q++])
        COLO_TRY(check_sequence(s, p, list + first, end[q] - first));
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
static void walk_plain(walk_t *w, colo_ragged_t *r)
{
    const colo_segments_t *s = &r->own;
    const int64_t *rows = s->rows, *src_dp = s->src_dp, *seq = s->seq, *pos = s->pos;
    const int64_t *seq_len = s->seq_len, *seq_dp = s->seq_dp, count = s->count;
    const uint64_t nseqs = (uint64_t)s->nseqs, replicas = (uint64_t)r->src.axes.replicas;
    int64_t *src_lo = r->src_lo, *dst_lo = r->dst_lo, *row = r->row;
    int64_t e = w->e, last_seq = w->last_seq, last_end = w->last_end, src = w->src, dst = w->dst;
    int64_t length = last_seq < 0 ? 0 : seq_len[last_seq];
    uint64_t sum = (uint64_t)w->sum;
    bool ordered = w->ordered, sorted = w->sorted;
    for (; e < count; e++) {
        const int64_t n = rows[e], q = seq[e], p = pos[e], d = src_dp[e];
        if (q != last_seq) {
            if ((uint64_t)q >= nseqs)
                break;
            length = seq_len[q];
            ordered &= q > last_seq;
            last_seq = q;
            last_end = 0;
            const int64_t to = seq_dp[q];
            sorted &= to >= dst;
            while (dst < to)
                dst_lo[++dst] = e;
        }
        if (n <= 0 || p < 0 || p > length - n || (sum + (uint64_t)n) >> 63)
            break;
        if (d != src) { /* seldom: segments of a replica follow each other */
            if ((uint64_t)d >= replicas)
                break;
            sorted &= d > src;
            while (src < d)
                src_lo[++src] = (int64_t)sum;
        }
        row[e] = (int64_t)sum;
        sum += (uint64_t)n;
        if (p < last_end)
            ordered = false;
        last_end = p + n;
    }
    *w = (walk_t){e, (int64_t)sum, last_seq, last_end, src, dst, ordered, sorted};
}

/* Any segment. */
static colo_status_t walk_one(walk_t *w, const colo_segments_t *s, int64_t replicas,
                              colo_list_t *parts)
{
    const int64_t e = w->e++, n = s->rows[e], q = s->seq[e], first = w->sum;
    if (n < 0)
        return colo_fail(COLO_ERR_ARG, "segments: segment %lld has %lld rows, expected >= 0",
                         (long long)e, (long long)n);
    if (!colo_add_ok(w->sum, n, &w->sum))
        return colo_fail(COLO_ERR_ARG,
                         "segments: segment %lld: its %lld rows make the sum of all rows exceed "
                         "63 bits",
                         (long long)e, (long long)n);
    if ((uint64_t)s->src_dp[e] >= (uint64_t)replicas)
        return bad_index("segment", e, "src_dp", s->src_dp[e], replicas);
    if ((uint64_t)q >= (uint64_t)s->nseqs)
        return bad_index("segment", e, "seq", q, s->nseqs);
    if (n == 0)
        return COLO_OK;
    if (s->row_pos)
        return scattered_parts(s, e, s->row_pos + first, parts);
    const int64_t pos = s->pos[e], length = s->seq_len[q];
    if (pos < 0 || pos >= length)
        return bad_position(s, e, 0, pos);
    return bad_position(s, e, length - pos, length);
}

/* One part for each segment with rows, which follow each other. */
static colo_status_t list_parts(const colo_segments_t *s, colo_list_t *parts)
{
    if (!colo_list_reserve(parts, s->count, sizeof(colo_part_t)))
        return colo_fail(COLO_ERR_NOMEM, "segments: %lld runs of rows", (long long)s->count);
    for (int64_t e = 0; e < s->count; e++)
        if (s->rows[e] > 0)
            ((colo_part_t *)parts->items)[parts->n++] =
                (colo_part_t){.seq = s->seq[e], .pos = s->pos[e], .count = s->rows[e]};
    return COLO_OK;
}

colo_status_t colo_ragged_parts(colo_ragged_t *r)
{
    const colo_segments_t *s = &r->own;
    walk_t w = {.last_seq = -1, .dst = -1, .sorted = true};
    colo_list_t *parts = &r->in_order;
    parts->n = r->src_lo[0] = 0;
    w.ordered = !s->row_pos;
    COLO_TRY(lay_sequences(r));
    while (w.e < s->count) {
        if (s->pos)
            walk_plain(&w, r);
        if (w.e < s->count) {
            COLO_TRY(walk_one(&w, s, r->src.axes.replicas, parts));
            w.sorted = false;
        }
    }
    while (w.src < r->src.axes.replicas)
        r->src_lo[++w.src] = w.sum;
    while (w.dst < r->dst.axes.replicas)
        r->dst_lo[++w.dst] = s->count;
    r->rows = w.sum;
    r->sorted = w.sorted;
    if (s->pos && !(w.ordered && w.sorted))
        COLO_TRY(list_parts(s, parts));
    return w.ordered ? COLO_OK : check_apart(s, parts->items, parts->n);
}

/* ---- what ranks compare ---- */

int32_t colo_segments_keep(colo_table_t *table, const colo_segments_t *s)
{
    int32_t n = 0;
    int64_t rows = 0;
    for (int64_t e = 0; s->row_pos && e < s->count; e++)
        rows += s->rows[e];
    colo_table_keep(table, &n, "", "rows", s->rows, s->count);
    colo_table_keep(table, &n, "", "src_dp", s->src_dp, s->count);
    colo_table_keep(table, &n, "", "seq", s->seq, s->count);
    colo_table_keep(table, &n, "", "pos", s->pos, s->count);
    colo_table_keep(table, &n, "", "row_pos", s->row_pos, rows);
    if (s->packing) {
        colo_packing_keep(table, &n, "", s->packing);
        return n;
    }
    colo_table_keep(table, &n, "", "seq_len", s->seq_len, s->nseqs);
    colo_table_keep(table, &n, "", "seq_dp", s->seq_dp, s->nseqs);
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
