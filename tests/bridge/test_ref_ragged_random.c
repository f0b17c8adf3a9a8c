/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_ragged_random.c - the oracle of ragged batches on 3,000 random cases: what it says of
 * all ranks together is an operator and its adjoint. That each rank's rows, bytes and sums are the
 * page's is seen where the library, which computes them by the page's formulas, agrees with it:
 * test_ragged_random.c, test_ragged_plan.c, test_ragged_uniform.c. Calls nothing of the library.
 */
#include "harness/harness.h"

#include "harness/ragged_case.h"

#define CASES 3000
#define MOST_RANKS 16

static int64_t extent_of(const ref_side_t *side, const ref_split_t *sp)
{
    return sp ? ref_side_extent(side, sp->dim) : 1;
}

static const ref_split_t *find_split(const ref_side_t *side, bool context)
{
    for (int k = 0; k < side->nsplits[1]; k++)
        if (side->split[1][k].context == context)
            return &side->split[1][k];
    return NULL;
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
static void judge_values(const t_ragged_t *t)
{
    const ref_ragged_t *c = &t->c;
    const int64_t h = c->h, size = ref_ragged_total(c) * h;
    const int64_t addends = c->full ? ref_ragged_addends(c) : 1;
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
        t_ragged_random(&t, seed_of(i), MOST_RANKS);
        t.c.rough = false;
        judge_values(&t);
        t_ragged_free(&t);
    }
}

T_MAIN("bridge/ref_ragged_random")
