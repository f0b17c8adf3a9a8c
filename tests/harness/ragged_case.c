/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged_case.c - see ragged_case.h. Makes tables that are valid by construction: free positions
 * are dealt to rows, lengths are raised until they divide. tests/ref/ judges them nevertheless.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/bridge_random.h"
#include "harness/ragged_case.h"

#define SLACK 64 /* entries of row_pos beyond the rows, so that a mutated count stays in memory */
#define MOST_SEGMENTS 64

static ref_side_t random_side(uint64_t *r, int64_t most, bool is_src)
{
    ref_side_t side = t_random_dims(r, most, (const int[]){85, 60, 60, 20, 15}, 4);
    for (int i = 0; i < side.ndims; i++) {
        if (strcmp(side.name[i], "dp") == 0)
            t_side_split(&side, 0, "dp", REF_BLOCK, false);
        if (strcmp(side.name[i], "cp") == 0 && t_chance(r, 90)) /* else it replicates */
            t_side_split(&side, 1, "cp", !is_src && t_chance(r, 65) ? REF_ZIGZAG : REF_BLOCK, true);
        if (strcmp(side.name[i], "pp") == 0) {
            side.stage_dim = "pp";
            side.stage =
                t_chance(r, 80) ? (is_src ? side.extent[i] - 1 : 0) : t_below(r, side.extent[i]);
        }
    }
    if (ref_side_extent(&side, "tp") > 1) {
        int64_t luck = t_below(r, 100);
        if (luck < 35)
            t_side_split(&side, 1, "tp", REF_BLOCK, false);
        else if (luck < 55)
            t_side_split(&side, 2, "tp", REF_BLOCK, false);
    }
    if (ref_side_extent(&side, "ep") > 1 && t_chance(r, 30))
        t_side_split(&side, 0, "ep", REF_BLOCK, false);
    return side;
}

/* What must divide a sequence (chunks) and the local axis (sp) of the destination. */
static void units(const ref_side_t *side, int64_t *addends, int64_t *chunks, int64_t *sp)
{
    *addends = *chunks = *sp = 1;
    for (int k = 0; k < side->nsplits[1]; k++) {
        const ref_split_t *s = &side->split[1][k];
        int64_t extent = ref_side_extent(side, s->dim);
        if (!s->context)
            *sp *= extent;
        else if (extent > 1) {
            *addends = extent;
            *chunks = s->cut == REF_ZIGZAG ? 2 * extent : extent;
        }
    }
}

static void random_lengths(t_ragged_t *t, uint64_t *r)
{
    int64_t addends, chunks, sp, d = ref_ragged_parts(&t->c.dst), nseq = t->c.table.nseq;
    units(&t->c.dst, &addends, &chunks, &sp);
    bool one = t_chance(r, 15); /* all on one replica: the others have no sequence */
    int64_t favourite = t_below(r, d);
    for (int64_t q = 0; q < nseq; q++) {
        t->seq_dp[q] = one ? favourite : t_below(r, d);
        t->seq_len[q] = t_chance(r, 10) ? 0 : chunks * t_pick(r, 1, 2 + 40 / chunks);
    }
    for (int64_t i = 0; i < d; i++) {
        int64_t axis = 0, last = -1;
        for (int64_t q = 0; q < nseq; q++)
            if (t->seq_dp[q] == i) {
                axis += t->seq_len[q];
                last = q;
            }
        for (; last >= 0 && axis / addends % sp; axis += chunks)
            t->seq_len[last] += chunks;
    }
}

/* Deals the segments of sequence q; returns how many it made. */
static int64_t deal(t_ragged_t *t, uint64_t *r, int64_t q, int64_t e, int64_t most)
{
    int64_t index = 0, capacity = t->seq_len[q], was = e, longest = t_pick(r, 1, 20);
    int dense = t_chance(r, 20);
    while (e < MOST_SEGMENTS && e - was < most) {
        int64_t gap = dense || index == capacity ? 0 : t_below(r, 1 + (capacity - index) / 2);
        int64_t n = t_chance(r, 20) ? 0 : t_pick(r, 1, longest);
        index += gap;
        n = n > capacity - index ? capacity - index : n;
        t->seq[e] = q;
        t->rows[e] = n;
        t->pos[e] = n == 0 && capacity ? t_below(r, capacity) : n ? index : 0;
        e++;
        index += n;
    }
    return e - was;
}

static void shuffle_segments(t_ragged_t *t, uint64_t *r)
{
    int64_t *lists[] = {t->rows, t->seq, t->pos};
    for (int64_t i = t->c.table.nseg - 1; i > 0; i--) {
        int64_t j = t_below(r, i + 1);
        for (int k = 0; k < 3; k++) {
            int64_t v = lists[k][i];
            lists[k][i] = lists[k][j];
            lists[k][j] = v;
        }
    }
}

/* Rows of a sequence at positions without order, all different. */
static void scatter(t_ragged_t *t, uint64_t *r)
{
    for (int64_t q = 0; q < t->c.table.nseq; q++) {
        int64_t len = t->seq_len[q], used = 0, *order = ref_zeros(len, sizeof(int64_t));
        for (int64_t i = 0; i < len; i++) {
            int64_t j = t_below(r, i + 1);
            order[i] = order[j];
            order[j] = i;
        }
        for (int64_t e = 0, g = 0; e < t->c.table.nseg; g += t->rows[e], e++)
            for (int64_t i = 0; t->seq[e] == q && i < t->rows[e]; i++)
                t->row_pos[g + i] = order[used++];
        free(order);
    }
}

static void point_tables(t_ragged_t *t, bool scattered)
{
    ref_segments_t *s = &t->c.table;
    s->rows = t->rows;
    s->src_dp = t->src_dp;
    s->seq = t->seq;
    s->pos = scattered ? NULL : t->pos;
    s->row_pos = scattered ? t->row_pos : NULL;
    s->seq_len = t->seq_len;
    s->seq_dp = t->seq_dp;
}

static void make_lists(t_ragged_t *t, int64_t nseg, int64_t nseq)
{
    t->rows = ref_zeros(nseg, sizeof(int64_t));
    t->src_dp = ref_zeros(nseg, sizeof(int64_t));
    t->seq = ref_zeros(nseg, sizeof(int64_t));
    t->pos = ref_zeros(nseg, sizeof(int64_t));
    t->seq_len = ref_zeros(nseq, sizeof(int64_t));
    t->seq_dp = ref_zeros(nseq, sizeof(int64_t));
}

static int32_t end_of(const ref_side_t *a, const ref_side_t *b)
{
    int64_t x = a->offset + ref_side_size(a), y = b->offset + ref_side_size(b);
    return (int32_t)(x > y ? x : y);
}

static int64_t feature_unit(const ref_side_t *side)
{
    return side->nsplits[2] ? ref_side_extent(side, side->split[2][0].dim) : 1;
}

void t_ragged_random(t_ragged_t *t, uint64_t seed, int64_t most)
{
    uint64_t state = seed, *r = &state;
    memset(t, 0, sizeof *t);
    t->seed = seed;
    t->c.src = random_side(r, most, true);
    t->c.dst = random_side(r, most, false);
    if (t_chance(r, 25)) { /* grids that overlap in part, or not at all */
        ref_side_t *moved = t_chance(r, 50) ? &t->c.src : &t->c.dst;
        moved->offset = t_below(r, most - ref_side_size(moved) + 1);
    }
    t->world = end_of(&t->c.src, &t->c.dst);
    if (t->world < most && t_chance(r, 15))
        t->world++;
    int64_t d = ref_ragged_parts(&t->c.dst), p = ref_ragged_parts(&t->c.src);
    t->c.table.nseq = t_chance(r, 3) ? 0 : t_pick(r, 1, 2 + 2 * d);
    make_lists(t, MOST_SEGMENTS, t->c.table.nseq);
    random_lengths(t, r);
    int64_t each = t_chance(r, 4) ? 0 : t_pick(r, 1, 6);
    for (int64_t q = 0; q < t->c.table.nseq; q++)
        if (t_chance(r, 85)) /* a sample without any */
            t->c.table.nseg += deal(t, r, q, t->c.table.nseg, t_pick(r, each > 0, each));
    if (t_chance(r, 75))
        shuffle_segments(t, r);
    int64_t how = t_below(r, 4), favourite = t_below(r, p);
    for (int64_t e = 0; e < t->c.table.nseg; e++)
        t->src_dp[e] = how == 0   ? favourite
                       : how == 1 ? t->seq_dp[t->seq[e]] * p / d
                                  : t_below(r, p);
    for (int64_t e = 0; e < t->c.table.nseg; e++)
        t->capacity += t->rows[e];
    t->capacity += SLACK;
    t->row_pos = ref_zeros(t->capacity, sizeof(int64_t));
    bool scattered = t_chance(r, 35);
    if (scattered)
        scatter(t, r);
    point_tables(t, scattered);
    int64_t a = feature_unit(&t->c.src), b = feature_unit(&t->c.dst);
    t->c.h = a * b * t_pick(r, 1, a * b > 4 ? 1 : 3);
    t->c.full = t_chance(r, 50);
    t->c.merged = t_chance(r, 50);
    t->c.partial = t->c.full && t_chance(r, 60);
    t->c.rough = t_chance(r, 50);
    static const char *const dtypes[] = {"f32", "bf16", "f16", "f64", "i64", "i32", "i16", "i8"};
    t->dtype = dtypes[t_below(r, t->c.partial ? 4 : 8)];
}

static int64_t block_of(int64_t i, int64_t n, int64_t parts)
{
    for (int64_t d = 0; d < parts; d++)
        if (i >= d * n / parts && i < (d + 1) * n / parts)
            return d;
    return -1;
}

void t_ragged_uniform(t_ragged_t *t, const ref_side_t *src, const ref_side_t *dst,
                      ref_shape_t shape)
{
    memset(t, 0, sizeof *t);
    t->c.src = *src;
    t->c.dst = *dst;
    t->c.h = shape.h;
    t->dtype = "f32";
    t->world = end_of(src, dst);
    t->c.table.nseg = t->c.table.nseq = shape.b;
    make_lists(t, shape.b, shape.b);
    t->capacity = shape.b * shape.n + SLACK;
    t->row_pos = ref_zeros(t->capacity, sizeof(int64_t));
    for (int64_t b = 0; b < shape.b; b++) {
        t->rows[b] = shape.n;
        t->seq[b] = b;
        t->src_dp[b] = block_of(b, shape.b, ref_ragged_parts(src));
        t->seq_dp[b] = block_of(b, shape.b, ref_ragged_parts(dst));
        t->seq_len[b] = dst->positions ? dst->positions : shape.n;
        t->pos[b] = dst->map == REF_OFFSET ? dst->map_offset : 0;
        for (int64_t i = 0; dst->map == REF_TABLE && i < shape.n; i++)
            t->row_pos[b * shape.n + i] = dst->table[i];
    }
    point_tables(t, dst->map == REF_TABLE);
}

void t_ragged_free(t_ragged_t *t)
{
    int64_t *lists[] = {t->rows, t->src_dp, t->seq, t->pos, t->row_pos, t->seq_len, t->seq_dp};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        free(lists[i]);
    memset(t, 0, sizeof *t);
}

/* ---- tables made wrong ---- */

/* Outside [0, limit): just outside, or far. */
static int64_t beyond(uint64_t *r, int64_t limit)
{
    static const int64_t far[] = {INT64_MIN, INT64_MAX, -1, -2};
    int64_t luck = t_below(r, 3);
    return luck == 0 ? far[t_below(r, 4)] : luck == 1 ? -1 : limit + t_below(r, 3);
}

static int64_t row_of(const t_ragged_t *t, int64_t e) /* e's first among all rows */
{
    int64_t g = 0;
    for (int64_t i = 0; i < e; i++)
        g += t->rows[i];
    return g;
}

static bool break_position(t_ragged_t *t, int64_t e, uint64_t *r)
{
    int64_t len = t->seq_len[t->seq[e]];
    if (t->c.table.row_pos)
        t->row_pos[row_of(t, e) + t_below(r, t->rows[e])] = beyond(r, len);
    else
        t->pos[e] = t_chance(r, 50) ? beyond(r, len) : len - t->rows[e] + 1;
    return true;
}

static bool break_collision(t_ragged_t *t, int64_t e, uint64_t *r)
{
    for (int64_t f = 0; f < t->c.table.nseg; f++) {
        if (f == e || t->seq[f] != t->seq[e] || !t->rows[f])
            continue;
        if (t->c.table.row_pos) {
            t->row_pos[row_of(t, e) + t_below(r, t->rows[e])] =
                t->row_pos[row_of(t, f) + t_below(r, t->rows[f])];
            return true;
        }
        /* e's first row onto f's last; or its last row onto f's first */
        int64_t index = t->pos[f] + t->rows[f] - 1;
        if (index + t->rows[e] > t->seq_len[t->seq[e]])
            index = t->pos[f] - t->rows[e] + 1;
        if (index < 0)
            continue;
        t->pos[e] = index;
        return true;
    }
    return false;
}

static bool break_sum(t_ragged_t *t, int64_t q)
{
    int64_t addends, chunks, sp, huge = INT64_MAX / 2 + 1;
    units(&t->c.dst, &addends, &chunks, &sp);
    for (int64_t p = 0; p < t->c.table.nseq; p++)
        if (p != q && t->seq_dp[p] == t->seq_dp[q]) {
            t->seq_len[p] = t->seq_len[q] = (huge / chunks + 1) * chunks;
            return true;
        }
    return false;
}

bool t_ragged_break(t_ragged_t *t, ref_refusal_kind_t kind, uint64_t *r)
{
    int64_t nseg = t->c.table.nseg, nseq = t->c.table.nseq, addends, chunks, sp;
    bool of_seq = kind == REF_REFUSE_SEQ_DP || kind == REF_REFUSE_SEQ_LEN ||
                  kind == REF_REFUSE_CHUNKS || kind == REF_REFUSE_SP || kind == REF_REFUSE_SUM;
    if (of_seq ? !nseq : !nseg)
        return false;
    int64_t e = nseg ? t_below(r, nseg) : 0, q = nseq ? t_below(r, nseq) : 0;
    units(&t->c.dst, &addends, &chunks, &sp);
    switch (kind) {
    case REF_REFUSE_ROWS:
        t->rows[e] = t_chance(r, 20) ? INT64_MIN : -t_pick(r, 1, 4);
        return true;
    case REF_REFUSE_SRC_DP:
        t->src_dp[e] = beyond(r, ref_ragged_parts(&t->c.src));
        return true;
    case REF_REFUSE_SEQ:
        t->seq[e] = beyond(r, nseq);
        return true;
    case REF_REFUSE_SEQ_DP:
        t->seq_dp[q] = beyond(r, ref_ragged_parts(&t->c.dst));
        return true;
    case REF_REFUSE_SEQ_LEN:
        t->seq_len[q] = t_chance(r, 20) ? INT64_MIN : -t_pick(r, 1, 4);
        return true;
    case REF_REFUSE_POSITION:
        return t->rows[e] && break_position(t, e, r);
    case REF_REFUSE_COLLISION:
        return t->rows[e] && break_collision(t, e, r);
    case REF_REFUSE_CHUNKS:
        if (chunks == 1)
            return false;
        t->seq_len[q] += t_pick(r, 1, chunks - 1);
        return true;
    case REF_REFUSE_SP:
        if (sp == 1 || chunks / addends % sp == 0)
            return false;
        t->seq_len[q] += chunks;
        return true;
    case REF_REFUSE_SUM:
        return break_sum(t, q);
    }
    return false;
}

void t_ragged_mutate(t_ragged_t *t, uint64_t *r)
{
    static const int64_t odd[] = {-1, 0, 1, 2, 3, 4, 7, 8, 16, INT64_MIN, INT64_MAX, INT64_MAX / 2};
    int64_t *of_seg[] = {t->rows, t->src_dp, t->seq, t->pos}, *of_seq[] = {t->seq_len, t->seq_dp};
    const bool scattered = t->c.table.row_pos != NULL;
    int64_t total = scattered ? ref_ragged_total(&t->c) : 0;
    int64_t luck = t_below(r, scattered ? 7 : 6);
    int64_t *list = luck < 4 ? of_seg[luck] : luck < 6 ? of_seq[luck - 4] : t->row_pos;
    int64_t n = luck < 4 ? t->c.table.nseg : luck < 6 ? t->c.table.nseq : total;
    if (n <= 0)
        return;
    int64_t i = t_below(r, n), by = t_pick(r, -2, 2);
    if (list == t->rows && scattered) { /* a caller brings one entry of row_pos per row */
        if (total + by <= t->capacity)
            list[i] += by;
        return;
    }
    list[i] = t_chance(r, 60) ? (int64_t)((uint64_t)list[i] + (uint64_t)by) : odd[t_below(r, 12)];
}

const char *t_ragged_text(const t_ragged_t *t)
{
    static _Thread_local char text[1024];
    size_t n = 0, cap = sizeof text;
    n += (size_t)snprintf(text, cap, "[seed 0x%llx, %d ranks: ", (unsigned long long)t->seed,
                          t->world);
    n += t_side_text(&t->c.src, text + n, cap - n);
    n += (size_t)snprintf(text + n, cap - n, " -> ");
    n += t_side_text(&t->c.dst, text + n, cap - n);
    snprintf(text + n, cap - n, " | %lld segments%s, %lld sequences, H %lld, %s %s %s %s%s]",
             (long long)t->c.table.nseg, t->c.table.row_pos ? " scattered" : "",
             (long long)t->c.table.nseq, (long long)t->c.h, t->c.full ? "full" : "sharded",
             t->c.merged ? "merged" : "packed",
             !t->c.full     ? "SHARDED"
             : t->c.partial ? "PARTIAL"
                            : "DISJOINT",
             t->dtype, t->c.rough ? " rough" : "");
    return text;
}
