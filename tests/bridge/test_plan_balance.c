/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_balance.c - how a plan shares the sending, on sizes that do not divide.
 *
 * The expectations come from the oracle's index lists alone. Ranks with equal lists are replicas;
 * what a set of replicas holds of what another set needs is one overlap; candidates and
 * destinations are found by comparing every rank with every other. Of the plan only bytes per pair
 * of ranks are read: a rank holds in one set and needs in one set, so these are the bytes of one
 * overlap.
 */
#include "harness/harness.h"

#include "harness/plan_world.h"

#define WHOLE_BELOW 65536 /* bytes: smaller overlaps are not cut */
#define MOST 64           /* ranks of a case */

/* Ranks that hold, or need, the same elements. */
typedef struct set {
    ref_part_t part;
    int32_t n, rank[MOST];
} set_t;

typedef struct scene {
    const t_case_t *c;
    t_plans_t plans;
    colo_pass_t pass;
    int32_t nhold, nneed;
    set_t hold[MOST], need[MOST];
    int64_t recv[MOST], send[MOST];
    int64_t share; /* the most that a set must send, divided by its ranks */
    int64_t unit;  /* the largest that is sent whole and was not even: one overlap, or one slice */
    int64_t whole, cut; /* deliveries of overlaps that could not be even */
} scene_t;

static bool same_list(const int64_t *a, int64_t na, const int64_t *b, int64_t nb)
{
    return na == nb && memcmp(a, b, (size_t)na * sizeof *a) == 0;
}

static int32_t collect(set_t *sets, const scene_t *s, const ref_side_t *side, bool full,
                       bool by_addend)
{
    int32_t n = 0;
    for (int32_t r = 0; r < s->plans.n; r++) {
        ref_part_t p;
        ref_part_make(&p, side, s->c->shape, r, full);
        if (!by_addend)
            p.addend = 0;
        int32_t i = 0;
        while (i < n && !(p.addend == sets[i].part.addend &&
                          same_list(p.b, p.nb, sets[i].part.b, sets[i].part.nb) &&
                          same_list(p.s, p.ns, sets[i].part.s, sets[i].part.ns) &&
                          same_list(p.h, p.nh, sets[i].part.h, sets[i].part.nh)))
            i++;
        if (!p.holds || ref_part_count(&p) == 0) {
            ref_part_free(&p);
            continue;
        }
        if (i < n)
            ref_part_free(&p);
        else
            sets[n++] = (set_t){.part = p};
        sets[i].rank[sets[i].n++] = r;
    }
    return n;
}

static int64_t common(const int64_t *a, int64_t na, const int64_t *b, int64_t nb)
{
    int64_t n = 0;
    for (int64_t i = 0; i < na; i++)
        n += ref_list_has(b, nb, a[i]);
    return n;
}

static int64_t common_range(const ref_part_t *a, const ref_part_t *b) /* features: one interval */
{
    int64_t lo = a->h[0] > b->h[0] ? a->h[0] : b->h[0];
    int64_t x = a->h[a->nh - 1], y = b->h[b->nh - 1], hi = x < y ? x : y;
    return hi < lo ? 0 : hi - lo + 1;
}

static bool among(const set_t *s, int32_t rank)
{
    for (int32_t i = 0; i < s->n; i++)
        if (s->rank[i] == rank)
            return true;
    return false;
}

/* The candidates of @destination among @hold; *tier and *key are the same for ranks that share
 * them. */
static int32_t candidates(const scene_t *s, const set_t *hold, int32_t destination, int32_t *out,
                          int *tier, int64_t *key)
{
    int64_t p = s->c->ranks_per_node ? s->c->ranks_per_node : 1 << 30;
    for (*tier = 1; *tier <= 3; ++*tier) {
        int32_t n = 0;
        *key = *tier == 1 ? destination / p : *tier == 2 ? destination % p : 0;
        for (int32_t i = 0; i < hold->n; i++)
            if (*tier == 3 || (*tier == 1 ? hold->rank[i] / p : hold->rank[i] % p) == *key)
                out[n++] = hold->rank[i];
        if (n)
            return n;
    }
    return 0;
}

#define WRONG(s, ...) (snprintf((s)->plans.why, sizeof(s)->plans.why, __VA_ARGS__), false)

/* Deliveries of one held set to ranks that share candidates, by candidate. */
typedef struct share {
    int tier;
    int64_t key;
    int32_t n, cand[MOST];
    int64_t whole[MOST],
        extra[MOST]; /* overlaps sent whole; larger parts of overlaps that were cut */
} share_t;

static share_t *share_of(share_t *t, int32_t *n, int tier, int64_t key, const int32_t *cand,
                         int32_t ncand)
{
    for (int32_t i = 0; i < *n; i++)
        if (t[i].tier == tier && t[i].key == key)
            return &t[i];
    t[*n] = (share_t){.tier = tier, .key = key, .n = ncand};
    memcpy(t[*n].cand, cand, (size_t)ncand * sizeof *cand);
    return &t[(*n)++];
}

/* One delivery: the bytes of @bytes that each rank sent. @size: extents of the overlap. */
static bool check_delivery(scene_t *s, share_t *t, int32_t destination, int64_t bytes,
                           const int64_t *size, int64_t *served)
{
    int64_t longest = 0, total = 0, n = t->n, es = (int64_t)colo_dtype_size(s->c->dtype);
    bool divides = false;
    for (int a = 0; a < 3; a++) {
        divides |= size[a] % n == 0;
        longest = size[a] > longest ? size[a] : longest;
    }
    int64_t slice = divides ? 0 : bytes / longest;
    bool cut = bytes >= WHOLE_BELOW && served == NULL;
    if (!served && n > 1) {
        int64_t u = cut ? slice : bytes;
        s->unit = u > s->unit ? u : s->unit;
        s->whole += !cut;
        s->cut += cut;
    }
    for (int32_t i = 0; i < t->n; i++) {
        int64_t got = t_plans_bytes(&s->plans, s->pass, t->cand[i], destination);
        total += got;
        if (!cut && got != 0 && got != bytes)
            return WRONG(s, "rank %d gets %lld of %lld bytes from %d, expected all or nothing",
                         destination, (long long)got, (long long)bytes, t->cand[i]);
        if (served)
            served[i] += got == bytes;
        else if (!cut)
            t->whole[i] += got == bytes;
        else if (got * n > bytes) {
            if (got * n >= bytes + slice * n || slice < es)
                return WRONG(s, "rank %d gets %lld of %lld bytes from %d, one of %lld senders",
                             destination, (long long)got, (long long)bytes, t->cand[i],
                             (long long)n);
            t->extra[i]++;
        } else if (bytes - got * n >= slice * n && bytes != got * n)
            return WRONG(s, "rank %d gets only %lld of %lld bytes from %d, one of %lld senders",
                         destination, (long long)got, (long long)bytes, t->cand[i], (long long)n);
    }
    return total == bytes || WRONG(s, "rank %d gets %lld of %lld bytes from its candidates",
                                   destination, (long long)total, (long long)bytes);
}

static bool even(scene_t *s, const share_t *t, const int64_t *count, const char *what)
{
    int64_t lo = count[0], hi = count[0];
    for (int32_t i = 0; i < t->n; i++) {
        lo = count[i] < lo ? count[i] : lo;
        hi = count[i] > hi ? count[i] : hi;
    }
    return hi - lo <= 1 || WRONG(s, "the replicas of rank %d send %lld to %lld %s", t->cand[0],
                                 (long long)lo, (long long)hi, what);
}

static bool held_set(scene_t *s, const set_t *hold)
{
    static share_t shares[MOST];
    int32_t nshares = 0;
    int64_t total = 0, es = (int64_t)colo_dtype_size(s->c->dtype);
    for (int32_t k = 0; k < s->nneed; k++) {
        const set_t *need = &s->need[k];
        const ref_part_t *a = &hold->part, *b = &need->part;
        const int64_t size[3] = {common(a->s, a->ns, b->s, b->ns), common(a->b, a->nb, b->b, b->nb),
                                 common_range(a, b)};
        int64_t bytes = size[0] * size[1] * size[2] * es;
        for (int32_t i = 0; bytes && i < need->n; i++) {
            int32_t x = need->rank[i], cand[MOST], other[MOST];
            int tier, tier2;
            int64_t key, key2, m = 0, served[MOST] = {0};
            if (among(hold, x))
                continue;
            s->recv[x] += bytes;
            total += bytes;
            int32_t n = candidates(s, hold, x, cand, &tier, &key);
            share_t *t = share_of(shares, &nshares, tier, key, cand, n);
            bool first = true;
            for (int32_t j = 0; j < need->n; j++) {
                candidates(s, hold, need->rank[j], other, &tier2, &key2);
                if (among(hold, need->rank[j]) || tier2 != tier || key2 != key)
                    continue;
                first &= m++ > 0 || j == i;
            }
            if (m % n) {
                if (!check_delivery(s, t, x, bytes, size, NULL))
                    return false;
                continue;
            }
            if (!first)
                continue; /* judged with the first rank that shares the candidates */
            for (int32_t j = i; j < need->n; j++) {
                candidates(s, hold, need->rank[j], other, &tier2, &key2);
                if (!among(hold, need->rank[j]) && tier2 == tier && key2 == key &&
                    !check_delivery(s, t, need->rank[j], bytes, size, served))
                    return false;
            }
            for (int32_t j = 0; j < n; j++)
                if (served[j] != m / n)
                    return WRONG(s, "rank %d serves %lld of %lld destinations, %d share them",
                                 cand[j], (long long)served[j], (long long)m, n);
        }
    }
    for (int32_t i = 0; i < nshares; i++)
        if (!even(s, &shares[i], shares[i].whole, "overlaps below 64 KiB each") ||
            !even(s, &shares[i], shares[i].extra, "larger parts of overlaps each"))
            return false;
    int64_t share = (total + hold->n - 1) / hold->n;
    s->share = share > s->share ? share : s->share;
    return true;
}

/* @equal: parts of equal sizes, for which the bound is the largest receive alone. */
static bool judge_pass(scene_t *s, bool one_grid, bool equal)
{
    const t_case_t *c = s->c;
    bool full = c->output == COLO_OUTPUT_FULL_SEQ, back = s->pass == COLO_PASS_BACKWARD;
    bool partial = back && full && c->grad == COLO_GRAD_PARTIAL;
    s->nhold = s->nneed = 0;
    s->share = s->unit = 0;
    memset(s->recv, 0, sizeof s->recv);
    set_t *src = back ? s->need : s->hold, *dst = back ? s->hold : s->need;
    int32_t nsrc = collect(src, s, &c->src, false, false);
    int32_t ndst = collect(dst, s, &c->dst, full && (!back || partial), partial);
    s->nhold = back ? ndst : nsrc;
    s->nneed = back ? nsrc : ndst;
    bool ok = true;
    for (int32_t i = 0; ok && i < s->nhold; i++)
        ok = held_set(s, &s->hold[i]);
    int64_t largest = 0, most = 0;
    for (int32_t r = 0; ok && r < s->plans.n; r++) {
        colo_plan_bytes_t y = t_plan_bytes(s->plans.plan[r], s->pass);
        largest = s->recv[r] > largest ? s->recv[r] : largest;
        most = y.send > most ? y.send : most;
        ok = y.recv == s->recv[r] || WRONG(s, "rank %d receives %lld bytes, the lists say %lld", r,
                                           (long long)y.recv, (long long)s->recv[r]);
    }
    int64_t bound = equal || largest > s->share ? largest : s->share;
    if (ok && one_grid && most > bound + s->unit)
        ok = WRONG(s, "%s: a rank sends %lld bytes, the largest receive is %lld, an overlap %lld",
                   back ? "backward" : "forward", (long long)most, (long long)bound,
                   (long long)s->unit);
    for (int32_t i = 0; i < s->nhold; i++)
        ref_part_free(&s->hold[i].part);
    for (int32_t i = 0; i < s->nneed; i++)
        ref_part_free(&s->need[i].part);
    return ok;
}

/* @one_grid: both sides have the same ranks, on one node: then the bound on sends holds. */
static void judge(const t_case_t *c, bool one_grid, bool equal, int64_t *whole, int64_t *cut)
{
    static scene_t s;
    memset(&s, 0, sizeof s);
    s.c = c;
    bool ok = t_plans_make(&s.plans, c);
    for (int pass = 0; ok && pass < 2; pass++) {
        s.pass = (colo_pass_t)pass;
        ok = judge_pass(&s, one_grid, equal);
    }
    t_plans_free(&s.plans);
    *whole += s.whole;
    *cut += s.cut;
    if (!ok)
        fail_msg("%s: %s", t_case_text(c), s.plans.why);
}

T_CASE(sizes_that_do_not_divide_are_shared_within_one_piece)
{
    static const struct {
        const char *src, *dst;
        ref_shape_t shape;
    } known[] = {
        {"tp=1,cp=4,dp=4", "tp=4,cp=4,dp=1", {16, 32, 512}},
        {"tp=1,cp=4,dp=4", "tp=4,cp=4,dp=1", {16, 32, 4096}},
        {"tp=1,dp=16", "tp=8,cp=2,dp=1", {16, 20, 8192}},
        {"tp=1,dp=16", "tp=8,cp=2,dp=1", {16, 36, 4096}},
        {"tp=1,dp=16", "tp=8,cp=2,dp=1", {16, 44, 4096}},
        {"tp=1,dp=6", "tp=3,cp=2,dp=1", {6, 8, 16384}},
        {"cp=4,tp=4,dp=2", "tp=2,cp=2,dp=8", {8, 56, 1024}},
        {"cp=8,dp=1,tp=6", "tp=1,dp=16,cp=3", {16, 96, 2048}},
        {"dp=8,cp=6", "cp=4,tp=6,dp=2", {16, 96, 1024}},
    };
    int64_t whole = 0, cut = 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = {.src = t_side(known[i].src, true),
                          .dst = t_side(known[i].dst, false),
                          .shape = known[i].shape,
                          .dtype = COLO_BF16};
            t_case_kind(&c, kind);
            judge(&c, true, true, &whole, &cut);
        }
    assert_true(whole > 0 && cut > 0);
}

/* A number of samples or features that rarely divides. */
static int64_t odd_width(uint64_t *seed)
{
    static const int64_t some[] = {510, 1000, 2050, 4096, 8190, 9999, 12288};
    return t_below(seed, 3) ? some[t_below(seed, 7)] : 1 + t_below(seed, 16000);
}

typedef struct tally {
    uint64_t seed;
    int64_t cases, whole, cut;
} tally_t;

T_CASE(every_pair_of_layouts_of_16_ranks_shares_any_size_within_one_piece)
{
    tally_t t = {.seed = t_seed()};
    T_EACH_PAIR (p, 1, 16)
        for (int kind = 0; kind < 3; kind++, t.cases++) {
            const bool equal = t_below(&t.seed, 2);
            t_case_t c = t_pair_case(&p, t_below(&t.seed, T_ORDERS), t_below(&t.seed, T_ORDERS));
            c.shape.b = equal ? t_lcm(p.src[2], p.dst[2]) * (1 + t_below(&t.seed, 2))
                              : 1 + t_below(&t.seed, 3 * c.shape.b);
            c.shape.n *= 1 + t_below(&t.seed, 5);
            c.shape.h = odd_width(&t.seed);
            c.dtype = COLO_BF16;
            t_case_kind(&c, kind);
            if (!t_left_out(t.cases))
                judge(&c, true, equal, &t.whole, &t.cut);
        }
    assert_int_equal(t.cases, 1100 * 3);
    assert_true(t.whole > 0 && t.cut > 0);
}

/* Grids that differ in size and place, nodes, stages, sequence parallelism, split features. */
T_CASE(candidates_of_any_layouts_and_nodes_take_turns)
{
    static const char *const specs[] = {"tp=2,dp=8",           "tp=4,cp=2,dp=2", "tp=3,cp=4,dp=1",
                                        "dp=2,tp=4,cp=2@3",    "cp=4,tp=6",      "tp=8,pp=2,dp=2",
                                        "ep=3,dp=4,tp=2@5",    "dp=16",          "tp=4,cp=4,dp=1",
                                        "cp=2,xp=3,dp=3,tp=2", "tp=16",          "tp=5,dp=4@1",
                                        "pp=2,tp=4,cp=2@8"};
    const int64_t n = (int64_t)(sizeof specs / sizeof specs[0]);
    tally_t t = {.seed = t_seed()};
    for (int64_t i = 0; i < t_scaled(1500); i++) {
        static const int64_t nodes[] = {0, 1, 2, 3, 4, 5, 8, 16};
        const int kind = (int)t_below(&t.seed, 3);
        t_case_t c = t_between(specs[t_below(&t.seed, n)], specs[t_below(&t.seed, n)],
                               1 + t_below(&t.seed, 20), 48 * (1 + t_below(&t.seed, 2)),
                               odd_width(&t.seed) / 4 + 1);
        t_case_kind(&c, kind);
        c.dtype = COLO_BF16;
        c.ranks_per_node = nodes[t_below(&t.seed, 8)];
        for (int side = 0; side < 2; side++) {
            ref_side_t *one = side ? &c.dst : &c.src;
            int64_t role = t_below(&t.seed, 4);
            if (ref_side_extent(one, "tp") > 1 && role < 2 && ref_side_extent(one, "tp") != 5)
                t_side_split(one, role ? 2 : 1, "tp", REF_BLOCK, false);
        }
        if (t_below(&t.seed, 3) == 0) { /* some ranks own none of the rows */
            c.dst.map = REF_OFFSET;
            c.dst.map_offset = 96 * t_below(&t.seed, 3);
            c.dst.positions = 384;
        }
        judge(&c, false, false, &t.whole, &t.cut);
        if (i % 2 == 0)
            t_plans_check(&c);
    }
    assert_true(t.whole > 0 && t.cut > 0);
}

/* Rank 2 lacks samples 0 to 2 and ranks 0 and 1 hold them: each sends a part, cut along @axis. */
T_CASE(a_piece_is_cut_along_the_first_axis_that_divides_else_the_longest)
{
    enum { SAMPLES, ROWS, FEATURES };
    static const struct {
        ref_shape_t shape;
        int axis;
    } cuts[] = {
        {{9, 6, 32768}, ROWS},     {{9, 6, 32767}, ROWS},     {{12, 5, 32768}, SAMPLES},
        {{12, 5, 32767}, SAMPLES}, {{9, 5, 32768}, FEATURES}, {{9, 5, 32767}, FEATURES},
        {{9, 40001, 3}, ROWS},     {{120003, 3, 3}, SAMPLES},
    };
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        t_case_t c = {.src = t_side("tp=2,dp=3", true),
                      .dst = t_side("tp=3,dp=2", false),
                      .shape = cuts[i].shape,
                      .dtype = COLO_F32,
                      .output = COLO_OUTPUT_SHARDED};
        T_PLANS(w, &c);
        const int64_t whole[3] = {c.shape.b / 3, c.shape.n, c.shape.h};
        int32_t n;
        const colo_plan_message_t *m = colo_plan_recvs(w.plan[2], COLO_PASS_FORWARD, &n);
        assert_int_equal(n, 2);
        for (int32_t k = 0; k < n; k++) {
            assert_int_equal(m[k].peer, k);
            assert_int_equal(m[k].nregions, 1);
            const colo_region_t *r = m[k].regions;
            const int64_t *range[3] = {r->b, r->s, r->h};
            for (int a = 0; a < 3; a++) {
                int64_t half = (whole[a] + 1) / 2; /* the first candidate sends the longer part */
                bool cut = a == cuts[i].axis;
                assert_int_equal(range[a][0], cut && k == 1 ? half : 0);
                assert_int_equal(range[a][1], cut && k == 0 ? half : whole[a]);
            }
        }
    }
}

T_MAIN("bridge/plan_balance")
