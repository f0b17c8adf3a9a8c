/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment-tables.c - the tables of a ragged batch: are they valid, what is their hash.
 *
 * Every rank checks the whole tables, because every rank has them: a refusal is the same error
 * message everywhere, and no rank has to ask another.
 */
#include "bridge/layout/segments.h"

#include "core/hash.h"
#include "core/error.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- what a layout means here ---- */

colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *l, bool is_src)
{
    const char *side = is_src ? "source" : "destination";
    *axes = (colo_ragged_axes_t){.replicas = colo_layout_parts(l, COLO_SAMPLES), .cp = 1, .sp = 1};
    if (l->map != COLO_MAP_IDENTITY)
        return colo_fail(COLO_ERR_LAYOUT,
                         "segments: the %s layout has a position map, expected none; the positions "
                         "of a ragged batch are in its tables",
                         side);
    for (int i = 0; i < l->nsplits[COLO_ROWS]; i++) {
        const colo_split_t *s = &l->split[COLO_ROWS][i];
        if (is_src && s->kind != COLO_BLOCK && l->grid.extent[s->dim] > 1)
            return colo_fail(COLO_ERR_LAYOUT,
                             "segments: the source layout splits rows %s over '%s', expected "
                             "BLOCK: ranks hold the rows of a batch in table order; clear the "
                             "split of rows and make it with colo_layout_split_context()",
                             s->kind == COLO_ZIGZAG ? "ZIGZAG" : "CEIL", l->grid.name[s->dim]);
        if (is_src || !s->context) {
            *(s->context ? &axes->cp : &axes->sp) *= l->grid.extent[s->dim];
            continue;
        }
        if (i > 0)
            return colo_fail(COLO_ERR_LAYOUT,
                             "segments: the destination layout splits rows in context over '%s' as "
                             "split %d, expected as its first and only context split",
                             l->grid.name[s->dim], i);
        axes->cp = l->grid.extent[s->dim];
        axes->zigzag = s->kind == COLO_ZIGZAG && axes->cp > 1;
    }
    return COLO_OK;
}

/* ---- checks ---- */

static bool any_rows(const colo_segments_t *s)
{
    int64_t e = 0;
    while (s->rows && e < s->count && s->rows[e] == 0)
        e++;
    return e < s->count;
}

colo_status_t colo_segments_present(const colo_segments_t *s)
{
    if (!s)
        return colo_fail(COLO_ERR_ARG, "segments: segments is NULL");
    /* no table has a default, so there is no shorter struct */
    COLO_TRY(
        colo_sized_check(s->struct_size, sizeof *s, sizeof *s, "segments", "COLO_SEGMENTS_INIT"));
    if (s->count < 0 || s->nseqs < 0)
        return colo_fail(COLO_ERR_ARG, "segments: %lld segments in %lld sequences, expected >= 0",
                         (long long)s->count, (long long)s->nseqs);
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
    const colo_segments_t *s = r->tables;
    const colo_ragged_axes_t *dst = &r->dst;
    const uint64_t cp = (uint64_t)dst->cp, unit = dst->zigzag ? 2 * cp : cp; /* at most 2^64 - 2 */
    const int64_t n = s->nseqs;
    const int64_t *seq_len = s->seq_len, *seq_dp = s->seq_dp;
    int64_t *axis = r->length, *bases = r->base, *locals = r->local, *chunks = r->chunk;
    memset(axis, 0, (size_t)dst->replicas * sizeof *axis);
    for (int64_t q = 0; q < n; q++) {
        const int64_t length = seq_len[q], d = seq_dp[q];
        if ((uint64_t)d >= (uint64_t)dst->replicas)
            return bad_index("sequence", q, "seq_dp", d, dst->replicas);
        const int64_t base = axis[d];
        if (length < 0 || !colo_add_ok(axis[d], length, &axis[d]))
            return colo_fail(
                COLO_ERR_ARG,
                length < 0 ? "segments: sequence %lld has %lld positions, expected >= 0"
                           : "segments: sequence %lld: its %lld positions make the lengths of "
                             "its replica exceed 63 bits",
                (long long)q, (long long)length);
        if (colo_ragged_rest((uint64_t)length, unit))
            return colo_fail(COLO_ERR_LAYOUT,
                             "segments: sequence %lld has %lld positions, expected a multiple of "
                             "%s%lld = %llu; pad it",
                             (long long)q, (long long)length,
                             dst->zigzag ? "2 * cp=" : "cp=", (long long)dst->cp,
                             (unsigned long long)unit);
        bases[q] = base;
        chunks[q] = colo_ragged_times(length, unit);
        locals[q] = colo_ragged_times(base, cp);
    }
    for (int64_t d = 0; d < dst->replicas; d++)
        if (axis[d] / dst->cp % dst->sp) {
            int64_t last = s->nseqs - 1;
            while (s->seq_dp[last] != d)
                last--;
            return colo_fail(COLO_ERR_LAYOUT,
                             "segments: the sequences of replica %lld, the last of them sequence "
                             "%lld, have %lld positions on a context rank, expected a multiple of "
                             "the %lld ranks of sequence parallelism; pad one",
                             (long long)d, (long long)last, (long long)(axis[d] / dst->cp),
                             (long long)dst->sp);
        }
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
    const colo_segments_t *s = r->tables;
    const int64_t *rows = s->rows, *src_dp = s->src_dp, *seq = s->seq, *pos = s->pos;
    const int64_t *seq_len = s->seq_len, *seq_dp = s->seq_dp, count = s->count;
    const uint64_t nseqs = (uint64_t)s->nseqs, replicas = (uint64_t)r->src.replicas;
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
    const colo_segments_t *s = r->tables;
    walk_t w = {.last_seq = -1, .dst = -1, .sorted = true};
    colo_list_t *parts = &r->in_order;
    parts->n = r->src_lo[0] = 0;
    w.ordered = !s->row_pos;
    COLO_TRY(lay_sequences(r));
    while (w.e < s->count) {
        if (s->pos)
            walk_plain(&w, r);
        if (w.e < s->count) {
            COLO_TRY(walk_one(&w, s, r->src.replicas, parts));
            w.sorted = false;
        }
    }
    while (w.src < r->src.replicas)
        r->src_lo[++w.src] = w.sum;
    while (w.dst < r->dst.replicas)
        r->dst_lo[++w.dst] = s->count;
    r->rows = w.sum;
    r->sorted = w.sorted;
    if (s->pos && !(w.ordered && w.sorted))
        COLO_TRY(list_parts(s, parts));
    return w.ordered ? COLO_OK : check_apart(s, parts->items, parts->n);
}

/* ---- hash ---- */

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
uint64_t colo_table_hash(const int64_t *v, int64_t n)
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

uint64_t colo_tables_hash(const colo_segments_t *s, uint64_t each[COLO_SEGMENT_TABLES])
{
    int64_t rows = 0;
    for (int64_t e = 0; s->row_pos && e < s->count; e++)
        rows += s->rows[e];
    each[0] = colo_table_hash(s->rows, s->count);
    each[1] = colo_table_hash(s->src_dp, s->count);
    each[2] = colo_table_hash(s->seq, s->count);
    each[3] = colo_table_hash(s->pos, s->pos ? s->count : 0);
    each[4] = colo_table_hash(s->row_pos, rows);
    each[5] = colo_table_hash(s->seq_len, s->nseqs);
    each[6] = colo_table_hash(s->seq_dp, s->nseqs);
    uint64_t h = COLO_HASH_INIT;
    for (int i = 0; i < COLO_SEGMENT_TABLES; i++)
        h = colo_hash_i64(h, (int64_t)each[i]);
    return h;
}

uint64_t colo_segments_hash(const colo_segments_t *segments)
{
    uint64_t each[COLO_SEGMENT_TABLES];
    return segments ? colo_tables_hash(segments, each) : 0;
}
