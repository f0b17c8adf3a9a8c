/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_ragged_random.c - the oracle of ragged batches against a second reading of the page.
 *
 * The oracle cuts lists; here the formulas of the page say where a row is. The two agree on 3,000
 * random cases, on every rank, row, byte and sum. Uniform batches are given to the oracle of the
 * uniform bridge, too. Calls nothing of the library.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ragged_case.h"

#define CASES 3000
#define MOST_RANKS 16

/* ---- the page's formulas ---- */

typedef struct reading {
    const ref_ragged_t *c;
    int64_t total, addends, cuts, sp;
    bool zigzag;
    ref_row_t *row; /* [total], by g; at: index on the axis of its source replica */
} reading_t;

static const ref_split_t *find_split(const ref_side_t *side, bool context)
{
    for (int k = 0; k < side->nsplits[1]; k++)
        if (side->split[1][k].context == context)
            return &side->split[1][k];
    return NULL;
}

static int64_t extent_of(const ref_side_t *side, const ref_split_t *sp)
{
    return sp ? ref_side_extent(side, sp->dim) : 1;
}

static int64_t coord_of(const ref_side_t *side, int64_t rank, const ref_split_t *sp)
{
    return sp ? ref_side_coord(side, rank, sp->dim) : 0;
}

static void read_case(reading_t *w, const ref_ragged_t *c)
{
    const ref_segments_t *t = &c->table;
    int64_t g = 0, *used = calloc(64, sizeof *used);
    assert_non_null(used);
    memset(w, 0, sizeof *w);
    w->c = c;
    w->total = ref_ragged_total(c);
    w->row = calloc((size_t)w->total + 1, sizeof *w->row);
    assert_non_null(w->row);
    for (int64_t e = 0; e < t->nseg; e++)
        for (int64_t r = 0; r < t->rows[e]; r++, g++)
            w->row[g] = (ref_row_t){
                g, e, r, t->seq[e], t->pos ? t->pos[e] + r : t->row_pos[g], used[t->src_dp[e]]++};
    const ref_split_t *cp = find_split(&c->dst, true);
    w->addends = extent_of(&c->dst, cp);
    w->zigzag = cp && cp->cut == REF_ZIGZAG;
    w->sp = extent_of(&c->dst, find_split(&c->dst, false));
    free(used);
}

static bool on_stage(const ref_side_t *side, int64_t rank)
{
    return ref_side_has(side, rank) &&
           (!side->stage_dim || ref_side_coord(side, rank, side->stage_dim) == side->stage);
}

static int64_t replica_of(const ref_side_t *side, int64_t rank)
{
    int64_t d = 0;
    for (int k = 0; k < side->nsplits[0]; k++)
        d = d * ref_side_extent(side, side->split[0][k].dim) +
            ref_side_coord(side, rank, side->split[0][k].dim);
    return d;
}

static bool has_feature(const ref_ragged_t *c, const ref_side_t *side, int64_t rank, int64_t h)
{
    if (!side->nsplits[2])
        return true;
    int64_t m = ref_side_extent(side, side->split[2][0].dim);
    return h / (c->h / m) == ref_side_coord(side, rank, side->split[2][0].dim);
}

static bool src_has(const reading_t *w, int64_t rank, int64_t g)
{
    const ref_side_t *side = &w->c->src;
    int64_t d = replica_of(side, rank), t_d = 0;
    if (!on_stage(side, rank) || w->c->table.src_dp[w->row[g].e] != d)
        return false;
    for (int64_t e = 0; e < w->c->table.nseg; e++)
        t_d += w->c->table.src_dp[e] == d ? w->c->table.rows[e] : 0;
    const ref_split_t *cp = find_split(side, true), *sp = find_split(side, false);
    int64_t m = extent_of(side, cp) * extent_of(side, sp);
    int64_t j = coord_of(side, rank, cp) * extent_of(side, sp) + coord_of(side, rank, sp);
    return w->row[g].index >= j * t_d / m && w->row[g].index < (j + 1) * t_d / m;
}

/* Index of (q, p) on the axis of @rank, or -1. */
static int64_t index_of(const reading_t *w, int64_t rank, int64_t q, int64_t p, bool full)
{
    const ref_ragged_t *c = w->c;
    const int64_t *len = c->table.seq_len, cp = w->addends, l = len[q];
    int64_t d = c->table.seq_dp[q], base = 0, k_d = 0;
    if (!on_stage(&c->dst, rank) || replica_of(&c->dst, rank) != d)
        return -1;
    for (int64_t i = 0; i < c->table.nseq; i++) {
        k_d += c->table.seq_dp[i] == d ? len[i] : 0;
        base += c->table.seq_dp[i] == d && i < q ? len[i] : 0;
    }
    if (full)
        return base + p;
    int64_t me = coord_of(&c->dst, rank, find_split(&c->dst, true)), index;
    if (cp == 1) {
        index = base + p;
    } else if (w->zigzag) {
        int64_t j = 2 * cp * p / l, owner = j < 2 * cp - 1 - j ? j : 2 * cp - 1 - j;
        if (owner != me)
            return -1;
        index = base / cp + (j == me ? p - me * l / (2 * cp)
                                     : l / (2 * cp) + p - (2 * cp - 1 - me) * l / (2 * cp));
    } else {
        if (cp * p / l != me)
            return -1;
        index = base / cp + p - me * l / cp;
    }
    int64_t part = k_d / cp / w->sp, s = coord_of(&c->dst, rank, find_split(&c->dst, false));
    return index / part == s ? index - s * part : -1;
}

static int64_t row_index(const reading_t *w, int64_t rank, int64_t g, bool full)
{
    return index_of(w, rank, w->row[g].q, w->row[g].p, full);
}

/* ---- random cases ---- */

typedef struct shares {
    int64_t no_rows, empty_src, empty_dst, empty_replica, differ, src_sp, src_cp, dst_sp,
        contiguous;
    int64_t zigzag, features, scattered, full, merged, partial, stages, offsets;
} shares_t;

static uint64_t seed_of(int64_t i)
{
    return t_seed() * 1000003u + (uint64_t)i;
}

static void count_shares(shares_t *n, const t_ragged_t *t)
{
    const ref_ragged_t *c = &t->c;
    ref_rows_t part;
    bool empty_src = false, empty_dst = false;
    for (int32_t rank = 0; rank < t->world; rank++) {
        ref_ragged_src(&part, c, rank);
        empty_src |= part.holds && !part.n;
        ref_rows_free(&part);
        ref_ragged_dst(&part, c, rank, false);
        empty_dst |= part.holds && !part.n;
        n->empty_replica += part.holds && !part.axis;
        ref_rows_free(&part);
    }
    n->empty_src += empty_src;
    n->empty_dst += empty_dst;
    n->no_rows += !ref_ragged_total(c);
    n->differ += ref_ragged_parts(&c->src) != ref_ragged_parts(&c->dst);
    n->src_sp += extent_of(&c->src, find_split(&c->src, false)) > 1;
    n->src_cp += extent_of(&c->src, find_split(&c->src, true)) > 1;
    n->dst_sp += extent_of(&c->dst, find_split(&c->dst, false)) > 1;
    const ref_split_t *cp = find_split(&c->dst, true);
    n->zigzag += extent_of(&c->dst, cp) > 1 && cp->cut == REF_ZIGZAG;
    n->contiguous += extent_of(&c->dst, cp) > 1 && cp->cut == REF_BLOCK;
    n->features += c->src.nsplits[2] || c->dst.nsplits[2];
    n->scattered += c->table.row_pos != NULL;
    n->full += c->full;
    n->merged += c->merged;
    n->partial += c->partial && ref_ragged_addends(c) > 1;
    n->stages += c->src.stage_dim || c->dst.stage_dim;
    n->offsets += c->src.offset || c->dst.offset;
}

T_CASE(random_cases_are_valid_and_cover_what_the_page_says)
{
    shares_t n = {0};
    int64_t rows = 0, ranks = 0;
    const int64_t cases = t_scaled(CASES);
    for (int64_t i = 0; i < cases; i++) {
        t_ragged_t t;
        ref_refusal_t why;
        t_ragged_random(&t, seed_of(i), MOST_RANKS);
        if (ref_ragged_refusals(&t.c, &why, 1))
            fail_msg("%s: refusal %d of segment %lld sequence %lld", t_ragged_text(&t), why.kind,
                     (long long)why.e, (long long)why.q);
        assert_true(t.world <= MOST_RANKS);
        count_shares(&n, &t);
        rows += ref_ragged_total(&t.c);
        ranks += t.world;
        t_ragged_free(&t);
    }
    printf("%lld cases, %lld rows, %lld ranks\n", (long long)cases, (long long)rows,
           (long long)ranks);
    const int64_t *share = (const int64_t *)&n;
    for (size_t k = 0; k < sizeof n / sizeof *share; k++)
        if (share[k] * 50 < cases) /* 2 percent at least */
            fail_msg("share %zu is %lld of %lld", k, (long long)share[k], (long long)cases);
}

static void judge_lists(const t_ragged_t *t, const reading_t *w, int64_t rank)
{
    const ref_ragged_t *c = &t->c;
    ref_rows_t part;
    int64_t held = 0;
    ref_ragged_src(&part, c, rank);
    for (int64_t g = 0; g < w->total; g++) {
        if (!src_has(w, rank, g))
            continue;
        if (held >= part.n || part.row[held].g != g || part.row[held].index != held)
            fail_msg("%s: row %lld at the source %lld", t_ragged_text(t), (long long)g,
                     (long long)rank);
        held++;
    }
    if (held != part.n)
        fail_msg("%s: source %lld has %lld rows, expected %lld", t_ragged_text(t), (long long)rank,
                 (long long)part.n, (long long)held);
    ref_rows_free(&part);
    for (int full = 0; full < 2; full++) {
        ref_ragged_dst(&part, c, rank, full);
        int64_t axis = 0, n = 0;
        for (int64_t q = 0; q < c->table.nseq; q++)
            for (int64_t p = 0; p < c->table.seq_len[q]; p++) {
                int64_t index = index_of(w, rank, q, p, full);
                if (index < 0)
                    continue;
                axis++;
                if (index >= part.axis || part.place[index].q != q || part.place[index].p != p)
                    fail_msg("%s: (%lld, %lld) on rank %lld is at %lld", t_ragged_text(t),
                             (long long)q, (long long)p, (long long)rank, (long long)index);
                for (int64_t g = 0; g < w->total; g++)
                    if (w->row[g].q == q && w->row[g].p == p &&
                        (n >= part.n || part.row[n].g != g || part.row[n++].index != index))
                        fail_msg("%s: row %lld of rank %lld", t_ragged_text(t), (long long)g,
                                 (long long)rank);
            }
        if (axis != part.axis || n != part.n)
            fail_msg("%s: rank %lld has %lld places and %lld rows, expected %lld and %lld",
                     t_ragged_text(t), (long long)rank, (long long)part.axis, (long long)part.n,
                     (long long)axis, (long long)n);
        ref_rows_free(&part);
    }
}

static void judge_receives(const t_ragged_t *t, const reading_t *w, int64_t rank)
{
    const ref_ragged_t *c = &t->c;
    const bool partial = c->full && c->partial;
    int64_t forward = 0, back = 0;
    for (int64_t g = 0; g < w->total; g++) {
        bool src = src_has(w, rank, g), own = row_index(w, rank, g, false) >= 0;
        bool all = row_index(w, rank, g, true) >= 0;
        for (int64_t h = 0; h < c->h; h++) {
            bool s = src && has_feature(c, &c->src, rank, h);
            bool f = has_feature(c, &c->dst, rank, h);
            forward += (c->full ? all : own) && f && !s;
            back += s ? (partial ? w->addends - (all && f) : !(own && f)) : 0;
        }
    }
    if (ref_ragged_receives(c, rank, false) != forward ||
        ref_ragged_receives(c, rank, true) != back)
        fail_msg("%s: rank %lld receives %lld and %lld elements, expected %lld and %lld",
                 t_ragged_text(t), (long long)rank, (long long)ref_ragged_receives(c, rank, false),
                 (long long)ref_ragged_receives(c, rank, true), (long long)forward,
                 (long long)back);
}

/* Every row of the source is on equally many ranks, and so is every row of the destination. */
static void judge_copies(const t_ragged_t *t, const reading_t *w)
{
    const ref_ragged_t *c = &t->c;
    const ref_side_t *side[] = {&c->src, &c->dst};
    for (int k = 0; k < 2; k++) {
        int64_t ranks = 0, cut = ref_ragged_parts(side[k]);
        cut *= extent_of(side[k], find_split(side[k], true));
        cut *= extent_of(side[k], find_split(side[k], false));
        for (int64_t rank = 0; rank < t->world; rank++)
            ranks += on_stage(side[k], rank);
        for (int64_t g = 0; g < w->total; g++) {
            int64_t n = 0;
            for (int64_t rank = 0; rank < t->world; rank++)
                n += k ? row_index(w, rank, g, false) >= 0 : src_has(w, rank, g);
            if (n * cut != ranks)
                fail_msg("%s: row %lld is on %lld ranks of the %s", t_ragged_text(t), (long long)g,
                         (long long)n, k ? "destination" : "source");
        }
    }
}

T_CASE(lists_of_every_rank_follow_the_formulas)
{
    for (int64_t i = 0; i < t_scaled(CASES); i++) {
        t_ragged_t t;
        reading_t w;
        t_ragged_random(&t, seed_of(i), MOST_RANKS);
        read_case(&w, &t.c);
        for (int64_t rank = 0; rank < t.world; rank++) {
            judge_lists(&t, &w, rank);
            judge_receives(&t, &w, rank);
        }
        judge_copies(&t, &w);
        free(w.row);
        t_ragged_free(&t);
    }
}

/* ---- values ---- */

static float *tensor_of(const ref_ragged_t *c, ref_role_t role, int64_t rank, int64_t *rows,
                        int64_t *nh)
{
    ref_ragged_tensor(c, role, rank, "f32", 1, NULL, rows, nh);
    float *v = calloc((size_t)(*rows * *nh) + 1, sizeof *v);
    assert_non_null(v);
    ref_ragged_tensor(c, role, rank, "f32", 1, v, rows, nh);
    return v;
}

/* What a row's elements are: by the first rank that has them; all others must have the same. */
typedef struct logical {
    float *v;
    bool *known;
} logical_t;

static logical_t logical_make(int64_t n)
{
    logical_t l = {calloc((size_t)n + 1, sizeof *l.v), calloc((size_t)n + 1, sizeof *l.known)};
    assert_non_null(l.v);
    assert_non_null(l.known);
    return l;
}

static void logical_free(logical_t *l)
{
    free(l->v);
    free(l->known);
}

/* true: seen for the first time */
static bool learn(logical_t *l, int64_t i, float v)
{
    bool fresh = !l->known[i];
    if (fresh)
        l->v[i] = v;
    else if (l->v[i] != v)
        fail_msg("element %lld is %g on one rank and %g on another", (long long)i, l->v[i], v);
    l->known[i] = true;
    return fresh;
}

/* <Y, d_y> = <X, d_x> + <into, d_into>, each logical element once per addend of a full output;
 * Y is what X is; d_x is the sum of d_y. All are whole numbers: exact. */
static void judge_values(const t_ragged_t *t, const reading_t *w)
{
    const ref_ragged_t *c = &t->c;
    const int64_t h = c->h, size = w->total * h, addends = c->full ? w->addends : 1;
    int64_t places = 0, left = 0, right = 0, start[64] = {0}, rows, nh, unused;
    for (int64_t q = 0; q < c->table.nseq; q++) {
        start[q] = places;
        places += c->table.seq_len[q];
    }
    logical_t x = logical_make(size), d_x = logical_make(size), sum = logical_make(size);
    logical_t d_y = logical_make(addends * places * h);
    for (int64_t rank = 0; rank < t->world; rank++) {
        ref_rows_t part;
        ref_ragged_src(&part, c, rank);
        float *vx = tensor_of(c, REF_X, rank, &rows, &nh),
              *vd = tensor_of(c, REF_DX, rank, &rows, &nh);
        assert_int_equal(rows, part.n);
        for (int64_t i = 0; i < rows * nh; i++) {
            int64_t k = part.row[i / nh].g * h + part.h[i % nh];
            learn(&d_x, k, vd[i]);
            if (learn(&x, k, vx[i]))
                right += (int64_t)vx[i] * (int64_t)vd[i];
        }
        free(vx);
        free(vd);
        ref_rows_free(&part);
    }
    for (int64_t rank = 0; rank < t->world; rank++) {
        ref_rows_t part;
        ref_ragged_dst(&part, c, rank, c->full);
        float *vy = tensor_of(c, REF_Y, rank, &rows, &nh),
              *vd = tensor_of(c, REF_DY, rank, &rows, &nh);
        float *vi = tensor_of(c, REF_INTO, rank, &unused, &nh);
        float *vg = tensor_of(c, REF_DINTO, rank, &unused, &nh);
        for (int64_t i = 0; i < rows * nh; i++) {
            const ref_row_t *token = c->merged ? &part.place[i / nh] : &part.row[i / nh];
            int64_t f = part.h[i % nh], k = token->g * h + f;
            int64_t addend = c->full ? part.addend : 0;
            int64_t place = (addend * places + start[token->q] + token->p) * h + f;
            if (token->g >= 0 && vy[i] != x.v[k])
                fail_msg("%s: rank %lld element %lld", t_ragged_text(t), (long long)rank,
                         (long long)i);
            if (c->merged && (token->g >= 0 ? vg[i] != 0 : vg[i] != vd[i] || vy[i] != vi[i]))
                fail_msg("%s: text of rank %lld element %lld", t_ragged_text(t), (long long)rank,
                         (long long)i);
            if (!c->full || c->partial) {
                if (!learn(&d_y, place, vd[i]))
                    continue;
            } else { /* DISJOINT: SP ranks of one addend differ; zeros count once or often alike */
                if (vd[i] == 0 || !learn(&d_y, place, vd[i]))
                    continue;
            }
            left += (int64_t)vy[i] * (int64_t)vd[i];
            if (token->g >= 0)
                sum.v[k] += vd[i];
            else
                right += (int64_t)vi[i] * (int64_t)vg[i];
        }
        free(vy);
        free(vd);
        free(vi);
        free(vg);
        ref_rows_free(&part);
    }
    if (left != right)
        fail_msg("%s: <Rx, y> is %lld, <x, R'y> is %lld", t_ragged_text(t), (long long)left,
                 (long long)right);
    for (int64_t k = 0; k < size; k++)
        if (sum.v[k] != d_x.v[k] || !x.known[k] || (k && x.v[k] == x.v[k - 1]))
            fail_msg("%s: row %lld feature %lld: d_x %g, expected %g", t_ragged_text(t),
                     (long long)(k / h), (long long)(k % h), d_x.v[k], sum.v[k]);
    logical_free(&x);
    logical_free(&d_x);
    logical_free(&sum);
    logical_free(&d_y);
}

T_CASE(values_of_all_ranks_are_adjoint)
{
    for (int64_t i = 0; i < t_scaled(CASES); i++) {
        t_ragged_t t;
        reading_t w;
        t_ragged_random(&t, seed_of(i), MOST_RANKS);
        t.c.rough = false;
        read_case(&w, &t.c);
        judge_values(&t, &w);
        free(w.row);
        t_ragged_free(&t);
    }
}

/* ---- uniform batches ---- */

static void expect_part(const ref_rows_t *got, const ref_part_t *want, int64_t n, const char *text)
{
    bool same = got->holds == want->holds && got->n == want->nb * want->ns && got->nh == want->nh &&
                (!want->holds || got->addend == want->addend);
    for (int64_t i = 0; same && i < got->n; i++)
        same = got->row[i].g == want->b[i / want->ns] * n + want->s[i % want->ns];
    for (int64_t k = 0; same && k < got->nh; k++)
        same = got->h[k] == want->h[k];
    if (!same)
        fail_msg("%s: %lld rows, the uniform bridge has %lld", text, (long long)got->n,
                 (long long)(want->nb * want->ns));
}

static int64_t lacks(const ref_part_t *need, const ref_part_t *has, int64_t copies)
{
    int64_t n = 0;
    for (int64_t b = 0; b < need->nb; b++)
        for (int64_t s = 0; s < need->ns; s++)
            for (int64_t h = 0; h < need->nh; h++)
                n += copies - (ref_list_has(has->b, has->nb, need->b[b]) &&
                               ref_list_has(has->s, has->ns, need->s[s]) &&
                               ref_list_has(has->h, has->nh, need->h[h]));
    return n;
}

static void judge_uniform(t_ragged_t *t, ref_shape_t shape)
{
    ref_ragged_t *c = &t->c;
    const char *text = t_ragged_text(t);
    assert_int_equal(ref_ragged_refusals(c, NULL, 0), 0);
    for (int64_t rank = 0; rank < t->world; rank++) {
        ref_part_t src, own, all;
        ref_rows_t part;
        ref_part_make(&src, &c->src, shape, rank, false);
        ref_part_make(&own, &c->dst, shape, rank, false);
        ref_part_make(&all, &c->dst, shape, rank, true);
        ref_ragged_src(&part, c, rank);
        expect_part(&part, &src, shape.n, text);
        ref_rows_free(&part);
        for (int full = 0; full < 2; full++) {
            const ref_part_t *want = full ? &all : &own;
            ref_ragged_dst(&part, c, rank, full);
            expect_part(&part, want, shape.n, text);
            c->full = full;
            c->partial = false;
            int64_t rows, nh;
            ref_ragged_tensor(c, REF_Y, rank, "f32", 0, NULL, &rows, &nh);
            float *v = calloc((size_t)(rows * nh) + 1, sizeof *v);
            assert_non_null(v);
            ref_ragged_tensor(c, REF_Y, rank, "f32", 0, v, &rows, &nh);
            for (int64_t i = 0; i < rows * nh; i++)
                assert_true(v[i] == (float)ref_code_x(shape, part.row[i / nh].g / shape.n,
                                                      part.row[i / nh].g % shape.n,
                                                      part.h[i % nh]));
            free(v);
            ref_rows_free(&part);
            assert_int_equal(ref_ragged_receives(c, rank, false), lacks(want, &src, 1));
            assert_int_equal(ref_ragged_receives(c, rank, true), lacks(&src, &own, 1));
            c->partial = full;
            if (full)
                assert_int_equal(ref_ragged_receives(c, rank, true),
                                 lacks(&src, &all, ref_side_addends(&c->dst)));
        }
        ref_part_free(&src);
        ref_part_free(&own);
        ref_part_free(&all);
    }
}

static int64_t within(uint64_t *r, int64_t lo, int64_t hi)
{
    return lo + t_below(r, hi - lo + 1);
}

T_CASE(uniform_tables_equal_the_uniform_oracle)
{
    int64_t one_each = 0, several = 0;
    for (int64_t i = 0; i < t_scaled(500); i++) {
        uint64_t seed = seed_of(i) ^ 0x5555, *r = &seed;
        int64_t dp = within(r, 1, 3), cp = within(r, 1, 3), tp = within(r, 1, 2);
        int64_t src_dp = within(r, 1, 4), src_tp = within(r, 1, 2);
        ref_side_t src = t_side_ordered((int)t_below(r, T_ORDERS), src_tp, 1, src_dp, true);
        ref_side_t dst = t_side_ordered((int)t_below(r, T_ORDERS), tp, cp, dp, false);
        src.nsplits[1] = 0;
        if (t_below(r, 2))
            dst.split[1][0].cut = REF_BLOCK; /* contiguous */
        int64_t luck = t_below(r, 4), b = within(r, 1, 7), unit = 2 * cp;
        /* SP cuts the axis of a replica here and each sample there: the same for one sample each */
        if (luck == 0) {
            b = dp;
            unit *= tp;
            t_side_split(&dst, 1, "tp", REF_BLOCK, false);
        } else if (luck == 1) {
            b = src_dp;
            t_side_split(&src, 1, "tp", REF_BLOCK, false);
        } else if (luck == 2) {
            t_side_split(&src, 2, "tp", REF_BLOCK, false);
            t_side_split(&dst, 2, "tp", REF_BLOCK, false);
        }
        one_each += luck < 2;
        several += luck >= 2 && b > dp && b > src_dp;
        int64_t table[64], rows = within(r, 1, 6);
        dst.positions = (rows + unit - 1) / unit * unit + unit * t_below(r, 2);
        luck = t_below(r, 3);
        dst.map = luck == 0 ? REF_IDENTITY : luck == 1 ? REF_OFFSET : REF_TABLE;
        dst.map_offset = dst.map == REF_OFFSET ? t_below(r, dst.positions - rows + 1) : 0;
        int64_t made = 0; /* ascending: packed rows are in order of position */
        for (int64_t p = 0; p < dst.positions && made < rows; p++)
            if (t_below(r, dst.positions - p) < rows - made)
                table[made++] = p;
        dst.table = dst.map == REF_TABLE ? table : NULL;
        ref_shape_t shape = {b, rows, 2 * src_tp * tp};
        t_ragged_t t;
        t_ragged_uniform(&t, &src, &dst, shape);
        t.seed = seed_of(i) ^ 0x5555;
        judge_uniform(&t, shape);
        t_ragged_free(&t);
    }
    assert_true(one_each && several);
}

T_MAIN("bridge/ref_ragged_random")
