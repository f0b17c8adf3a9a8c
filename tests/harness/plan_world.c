/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_world.c - see plan_world.h. Ownership comes from the oracle as one bit per (rank, index of
 * an axis); the plans are only read. Deliveries are counted in a byte per (addend, sample, row,
 * cell of features) and must all be 1 at the end.
 */
#include "harness/plan_world.h"

#include <stdlib.h>
#include <string.h>

/* One rank's part as membership tables; features by cell. */
typedef struct member {
    bool holds;
    int64_t addend;
    bool *b, *s, *h;
} member_t;

typedef struct court {
    t_plans_t *w;
    colo_pass_t pass;
    int64_t nb, ns, nc, addends;
    int64_t *edge; /* [nc + 1] boundaries of the cells */
    member_t *has; /* what each rank can give */
    member_t *wants;
} court_t;

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void add_edge(court_t *k, int64_t *cap, int64_t v)
{
    if (k->nc + 2 > *cap) {
        *cap = *cap * 2 + 16;
        k->edge = realloc(k->edge, (size_t)*cap * sizeof *k->edge);
        if (!k->edge)
            abort();
    }
    k->edge[k->nc++] = v;
}

static void add_region_edges(court_t *k, int64_t *cap, const colo_region_t *regions, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int e = 0; e < 2; e++)
            if (regions[i].h[e] > 0 && regions[i].h[e] < k->w->c->shape.h)
                add_edge(k, cap, regions[i].h[e]);
}

static void find_cells(court_t *k)
{
    const t_case_t *c = k->w->c;
    int64_t cap = 0;
    add_edge(k, &cap, 0);
    if (c->shape.h)
        add_edge(k, &cap, c->shape.h);
    /* where features are split: BLOCK boundaries of every rank, floor(dH/D) for all D that occur */
    for (int s = 0; s < 2; s++) {
        const ref_side_t *side = s ? &c->dst : &c->src;
        for (int i = 0; side->nsplits[2] && i < side->ndims; i++)
            for (int64_t d = 1; d < side->extent[i]; d++)
                add_edge(k, &cap, d * c->shape.h / side->extent[i]);
    }
    for (int32_t r = 0; r < k->w->n; r++) {
        int32_t n;
        const colo_plan_message_t *m = colo_plan_recvs(k->w->plan[r], k->pass, &n);
        for (int32_t i = 0; i < n; i++)
            add_region_edges(k, &cap, m[i].regions, m[i].nregions);
        int64_t nl;
        const colo_region_t *l = colo_plan_locals(k->w->plan[r], k->pass, &nl);
        add_region_edges(k, &cap, l, nl);
        m = colo_plan_relays(k->w->plan[r], k->pass, false, &n);
        for (int32_t i = 0; i < n; i++)
            add_region_edges(k, &cap, m[i].regions, m[i].nregions);
    }
    qsort(k->edge, (size_t)k->nc, sizeof *k->edge, by_value);
    int64_t u = 0;
    for (int64_t i = 0; i < k->nc; i++)
        if (!i || k->edge[i] != k->edge[u - 1])
            k->edge[u++] = k->edge[i];
    k->nc = u - 1;
}

static void make_member(court_t *k, member_t *m, const ref_side_t *side, int64_t rank, bool full)
{
    /* features by their cut alone: a width of 0..H-1 may be huge, so ask the oracle with lists of
     * samples and rows and take the features' interval from its ends */
    const t_case_t *c = k->w->c;
    ref_part_t part;
    bool wide = c->shape.h > 4096;
    ref_shape_t shape = c->shape;
    if (wide && !side->nsplits[2])
        shape.h = 1;
    ref_part_make(&part, side, shape, rank, full);
    m->holds = part.holds;
    m->addend = part.addend;
    m->b = calloc((size_t)k->nb + 1, 1);
    m->s = calloc((size_t)k->ns + 1, 1);
    m->h = calloc((size_t)k->nc + 1, 1);
    if (!m->b || !m->s || !m->h)
        abort();
    for (int64_t i = 0; i < part.nb; i++)
        m->b[part.b[i]] = true;
    for (int64_t i = 0; i < part.ns; i++)
        m->s[part.s[i]] = true;
    for (int64_t i = 0; i < k->nc; i++)
        m->h[i] = shape.h != c->shape.h ? part.holds : ref_list_has(part.h, part.nh, k->edge[i]);
    ref_part_free(&part);
}

static void court_open(court_t *k, t_plans_t *w, colo_pass_t pass)
{
    const t_case_t *c = w->c;
    bool partial = c->output == COLO_FULL_SEQ && c->grad == COLO_PARTIAL;
    memset(k, 0, sizeof *k);
    k->w = w;
    k->pass = pass;
    k->nb = c->shape.b;
    k->ns = c->shape.n;
    k->addends = pass == COLO_BACKWARD && partial ? ref_side_addends(&c->dst) : 1;
    find_cells(k);
    k->has = calloc((size_t)w->n, sizeof *k->has);
    k->wants = calloc((size_t)w->n, sizeof *k->wants);
    if (!k->has || !k->wants)
        abort();
    for (int32_t r = 0; r < w->n; r++) {
        member_t *s = pass == COLO_FORWARD ? &k->has[r] : &k->wants[r];
        member_t *d = pass == COLO_FORWARD ? &k->wants[r] : &k->has[r];
        make_member(k, s, &c->src, r, false);
        make_member(k, d, &c->dst, r,
                    c->output == COLO_FULL_SEQ && (pass == COLO_FORWARD || partial));
        if (k->addends == 1)
            s->addend = d->addend = 0;
    }
}

static void court_close(court_t *k)
{
    for (int32_t r = 0; r < k->w->n; r++)
        for (int i = 0; i < 2; i++) {
            member_t *m = i ? &k->has[r] : &k->wants[r];
            free(m->b);
            free(m->s);
            free(m->h);
        }
    free(k->has);
    free(k->wants);
    free(k->edge);
}

static bool gives(const member_t *m, int64_t addend, int64_t b, int64_t s, int64_t h)
{
    return m->holds && m->addend == addend && m->b[b] && m->s[s] && m->h[h];
}

static bool takes(const member_t *m, int64_t b, int64_t s, int64_t h)
{
    return m->holds && m->b[b] && m->s[s] && m->h[h];
}

static int64_t node_of(const t_case_t *c, int64_t rank)
{
    return c->node ? c->node[rank] : c->ranks_per_node ? rank / c->ranks_per_node : 0;
}

/* How many ranks of its node are lower. */
static int64_t rail_of(const t_case_t *c, int64_t rank)
{
    int64_t n = 0;
    for (int64_t q = 0; q < rank; q++)
        n += node_of(c, q) == node_of(c, rank);
    return n;
}

/* Is there a source in a nearer tier than @peer? Then that one had to be chosen. */
static bool nearest(const court_t *k, int32_t rank, int64_t peer, int64_t addend, int64_t b,
                    int64_t s, int64_t h)
{
    const t_case_t *c = k->w->c;
    if (node_of(c, peer) == node_of(c, rank))
        return true;
    bool rail = false;
    for (int32_t q = 0; q < k->w->n; q++) {
        if (!gives(&k->has[q], addend, b, s, h))
            continue;
        if (node_of(c, q) == node_of(c, rank))
            return false;
        rail |= rail_of(c, q) == rail_of(c, rank);
    }
    return !rail || rail_of(c, peer) == rail_of(c, rank);
}

static int64_t region_count(const colo_region_t *g)
{
    return (g->b[1] - g->b[0]) * (g->s[1] - g->s[0]) * (g->h[1] - g->h[0]);
}

/* Marks what one region brings to @rank; @peer is the giver (the rank itself for local regions). */
static bool deliver(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g, uint8_t *got)
{
    t_plans_t *w = k->w;
    const ref_shape_t *sh = &w->c->shape;
    if (g->b[0] < 0 || g->b[1] > sh->b || g->s[0] < 0 || g->s[1] > sh->n || g->h[0] < 0 ||
        g->h[1] > sh->h || g->b[0] >= g->b[1] || g->s[0] >= g->s[1] || g->h[0] >= g->h[1])
        return T_WRONG(
            w, "rank %d from %lld: region [%lld,%lld)x[%lld,%lld)x[%lld,%lld) is empty or outside",
            rank, (long long)peer, (long long)g->b[0], (long long)g->b[1], (long long)g->s[0],
            (long long)g->s[1], (long long)g->h[0], (long long)g->h[1]);
    if (g->addend < 0 || g->addend >= k->addends)
        return T_WRONG(w, "rank %d from %lld: addend %d of %lld", rank, (long long)peer, g->addend,
                       (long long)k->addends);
    for (int64_t h = 0; h < k->nc; h++) {
        if (k->edge[h] < g->h[0] || k->edge[h] >= g->h[1])
            continue;
        for (int64_t b = g->b[0]; b < g->b[1]; b++)
            for (int64_t s = g->s[0]; s < g->s[1]; s++) {
                const char *bad = NULL;
                if (!gives(&k->has[peer], g->addend, b, s, h))
                    bad = "the sender does not hold it";
                else if (!takes(&k->wants[rank], b, s, h))
                    bad = "no rank needs it there";
                else if (peer != rank && gives(&k->has[rank], g->addend, b, s, h))
                    bad = "the receiver holds it already";
                else if (peer != rank && !nearest(k, rank, peer, g->addend, b, s, h))
                    bad = "a nearer rank holds it";
                else if (got[((g->addend * k->nb + b) * k->ns + s) * k->nc + h]++)
                    bad = "it was delivered before";
                if (bad)
                    return T_WRONG(
                        w, "rank %d from %lld, addend %d sample %lld row %lld feature %lld: %s",
                        rank, (long long)peer, g->addend, (long long)b, (long long)s,
                        (long long)k->edge[h], bad);
            }
    }
    return true;
}

static const colo_plan_message_t *find_message(const colo_plan_message_t *m, int32_t n,
                                               int64_t peer)
{
    for (int32_t i = 0; i < n; i++)
        if (m[i].peer == peer)
            return &m[i];
    return NULL;
}

/* The send of @peer to @rank lists the same regions in the same order. */
static bool mirrored(court_t *k, int32_t rank, const colo_plan_message_t *recv, bool relay)
{
    int32_t n;
    const colo_plan_t *p = k->w->plan[recv->peer];
    const colo_plan_message_t *sends =
        relay ? colo_plan_relays(p, k->pass, true, &n) : colo_plan_sends(p, k->pass, &n);
    const colo_plan_message_t *m = find_message(sends, n, rank);
    bool same = m && m->bytes == recv->bytes && m->nregions == recv->nregions;
    for (int64_t i = 0; same && i < m->nregions; i++) {
        const colo_region_t *a = &m->regions[i], *b = &recv->regions[i];
        same = memcmp(a->b, b->b, sizeof a->b) == 0 && memcmp(a->s, b->s, sizeof a->s) == 0 &&
               memcmp(a->h, b->h, sizeof a->h) == 0 && a->addend == b->addend;
    }
    return same ||
           T_WRONG(k->w, "rank %d receives from %lld what that rank does not send like this", rank,
                   (long long)recv->peer);
}

static bool well_formed(court_t *k, int32_t rank, const char *what, const colo_plan_message_t *m,
                        int32_t n, int64_t *total)
{
    t_plans_t *w = k->w;
    int64_t es = (int64_t)colo_dtype_size(w->c->dtype);
    *total = 0;
    for (int32_t i = 0; i < n; i++) {
        int64_t count = 0;
        for (int64_t j = 0; j < m[i].nregions; j++)
            count += region_count(&m[i].regions[j]);
        if (m[i].peer == rank || m[i].peer < 0 || m[i].peer >= w->n)
            return T_WRONG(w, "rank %d %s peer %lld", rank, what, (long long)m[i].peer);
        if (i && m[i].peer <= m[i - 1].peer)
            return T_WRONG(w, "rank %d %s peers %lld, %lld do not ascend", rank, what,
                           (long long)m[i - 1].peer, (long long)m[i].peer);
        if (count <= 0 || m[i].bytes != count * es)
            return T_WRONG(w, "rank %d %s %lld: %lld bytes in boxes of %lld elements", rank, what,
                           (long long)m[i].peer, (long long)m[i].bytes, (long long)count);
        *total += m[i].bytes;
    }
    return true;
}

static size_t cell_of(const court_t *k, int64_t l, int64_t b, int64_t s, int64_t h)
{
    return (size_t)(((l * k->nb + b) * k->ns + s) * k->nc + h);
}

/* The first exchange: what comes from sources, and what stays. */
static bool judge_rank(court_t *k, int32_t rank, uint8_t *got, int64_t *messages)
{
    t_plans_t *w = k->w;
    const colo_plan_t *p = w->plan[rank];
    int64_t sent, received, nlocals;
    int32_t nrecvs, nsends;
    const colo_plan_message_t *recvs = colo_plan_recvs(p, k->pass, &nrecvs);
    const colo_plan_message_t *sends = colo_plan_sends(p, k->pass, &nsends);
    const colo_region_t *locals = colo_plan_locals(p, k->pass, &nlocals);
    if (!well_formed(k, rank, "receives from", recvs, nrecvs, &received) ||
        !well_formed(k, rank, "sends to", sends, nsends, &sent))
        return false;
    *messages += nrecvs - nsends;
    for (int32_t i = 0; i < nrecvs; i++) {
        if (!mirrored(k, rank, &recvs[i], false))
            return false;
        for (int64_t j = 0; j < recvs[i].nregions; j++)
            if (!deliver(k, rank, recvs[i].peer, &recvs[i].regions[j], got))
                return false;
    }
    for (int64_t i = 0; i < nlocals; i++)
        if (!deliver(k, rank, rank, &locals[i], got))
            return false;
    return true;
}

/* Marks in @relayed what one region of the second exchange brings; @peer has all of it. */
static bool pass_on(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g, uint8_t **got,
                    uint8_t *relayed)
{
    for (int64_t b = g->b[0]; b < g->b[1]; b++)
        for (int64_t s = g->s[0]; s < g->s[1]; s++)
            for (int64_t h = 0; h < k->nc; h++) {
                const char *bad = NULL;
                if (k->edge[h] < g->h[0] || k->edge[h] >= g->h[1])
                    continue;
                if (!takes(&k->wants[rank], b, s, h))
                    bad = "no rank needs it there";
                for (int64_t l = 0; l < k->addends && !bad; l++)
                    if (got[peer][cell_of(k, l, b, s, h)] != 1)
                        bad = "the gateway lacks an addend";
                    else if (got[rank][cell_of(k, l, b, s, h)] != 0)
                        bad = "it was delivered before";
                if (relayed[cell_of(k, 0, b, s, h)]++)
                    bad = "it was passed on before";
                if (bad)
                    return T_WRONG(
                        k->w, "rank %d passed by %lld, sample %lld row %lld feature %lld: %s", rank,
                        (long long)peer, (long long)b, (long long)s, (long long)k->edge[h], bad);
            }
    return true;
}

/* The second exchange, and that both together are complete. */
static bool judge_relays(court_t *k, int32_t rank, uint8_t **got, uint8_t *relayed,
                         int64_t *messages)
{
    t_plans_t *w = k->w;
    const colo_plan_t *p = w->plan[rank];
    const int64_t es = (int64_t)colo_dtype_size(w->c->dtype);
    int64_t sent, received, relayed_out, relayed_in, local = 0, nlocals;
    int32_t nrecvs, nsends;
    const colo_plan_message_t *in = colo_plan_relays(p, k->pass, false, &nrecvs);
    const colo_plan_message_t *out = colo_plan_relays(p, k->pass, true, &nsends);
    if (!well_formed(k, rank, "is passed by", in, nrecvs, &relayed_in) ||
        !well_formed(k, rank, "passes to", out, nsends, &relayed_out))
        return false;
    *messages += nrecvs - nsends;
    memset(relayed, 0, (size_t)(k->nb * k->ns * k->nc + 1));
    for (int32_t i = 0; i < nrecvs; i++) {
        if (node_of(w->c, in[i].peer) != node_of(w->c, rank) || !w->c->two_levels)
            return T_WRONG(w, "rank %d is passed something by rank %lld of another node", rank,
                           (long long)in[i].peer);
        if (!mirrored(k, rank, &in[i], true))
            return false;
        for (int64_t j = 0; j < in[i].nregions; j++)
            if (!pass_on(k, rank, in[i].peer, &in[i].regions[j], got, relayed))
                return false;
    }
    int64_t need = 0, here = 0, elsewhere = 0;
    for (int64_t l = 0; l < k->addends; l++)
        for (int64_t b = 0; b < k->nb; b++)
            for (int64_t s = 0; s < k->ns; s++)
                for (int64_t h = 0; h < k->nc; h++) {
                    if (!takes(&k->wants[rank], b, s, h))
                        continue;
                    const int64_t width = (k->edge[h + 1] - k->edge[h]) * es;
                    const bool passed = relayed[cell_of(k, 0, b, s, h)];
                    need += width;
                    if (gives(&k->has[rank], l, b, s, h))
                        *(passed ? &elsewhere : &here) += width;
                    if (got[rank][cell_of(k, l, b, s, h)] + passed != 1)
                        return T_WRONG(
                            w, "rank %d never gets addend %lld sample %lld row %lld feature %lld",
                            rank, (long long)l, (long long)b, (long long)s, (long long)k->edge[h]);
                }
    const colo_region_t *locals = colo_plan_locals(p, k->pass, &nlocals);
    for (int64_t i = 0; i < nlocals; i++)
        local += region_count(&locals[i]) * es;
    in = colo_plan_recvs(p, k->pass, &nrecvs);
    out = colo_plan_sends(p, k->pass, &nsends);
    (void)well_formed(k, rank, "", in, nrecvs, &received); /* judged before */
    (void)well_formed(k, rank, "", out, nsends, &sent);
    const colo_plan_bytes_t y = colo_plan_bytes(p, k->pass);
    if (y.recv != received + relayed_in || y.send != sent + relayed_out || y.local != local ||
        local != here || y.minimum != need - here - elsewhere)
        return T_WRONG(
            w,
            "rank %d bytes: says recv %lld send %lld local %lld minimum %lld, boxes say %lld "
            "%lld %lld, elements say local %lld minimum %lld",
            rank, (long long)y.recv, (long long)y.send, (long long)y.local, (long long)y.minimum,
            (long long)(received + relayed_in), (long long)(sent + relayed_out), (long long)local,
            (long long)here, (long long)(need - here - elsewhere));
    return true;
}

/* What ranks of node @m need and none of them holds, addend by addend, is what enters it. */
static bool judge_node(court_t *k, int64_t m, bool *found)
{
    t_plans_t *w = k->w;
    const int64_t es = (int64_t)colo_dtype_size(w->c->dtype);
    int64_t minimum = 0, in = 0, said = 0;
    *found = false;
    for (int32_t r = 0; r < w->n; r++)
        if (node_of(w->c, r) == m) {
            *found = true;
            in += colo_plan_node_bytes(w->plan[r], k->pass).in;
            said += colo_plan_node_bytes(w->plan[r], k->pass).minimum;
        }
    for (int64_t l = 0; *found && l < k->addends; l++)
        for (int64_t b = 0; b < k->nb; b++)
            for (int64_t s = 0; s < k->ns; s++)
                for (int64_t h = 0; h < k->nc; h++) {
                    bool needed = false, held = false;
                    for (int32_t r = 0; r < w->n; r++)
                        if (node_of(w->c, r) == m) {
                            needed |= takes(&k->wants[r], b, s, h);
                            held |= gives(&k->has[r], l, b, s, h);
                        }
                    minimum += needed && !held ? (k->edge[h + 1] - k->edge[h]) * es : 0;
                }
    if (said != minimum || (w->c->two_levels ? in != minimum : in < minimum))
        return T_WRONG(w,
                       "node %lld: %lld bytes enter, the minimum is said to be %lld, expected %lld",
                       (long long)m, (long long)in, (long long)said, (long long)minimum);
    return true;
}

bool t_plans_judge(t_plans_t *w, colo_pass_t pass)
{
    court_t k;
    int64_t surplus = 0;
    court_open(&k, w, pass);
    const size_t cells = (size_t)(k.addends * k.nb * k.ns * k.nc + 1);
    uint8_t *got = calloc((size_t)w->n, cells), *relayed = malloc(cells);
    uint8_t **of = malloc((size_t)w->n * sizeof *of);
    if (!got || !relayed || !of)
        abort();
    bool ok = true, found = true;
    for (int32_t r = 0; ok && r < w->n; r++) {
        of[r] = got + (size_t)r * cells;
        ok = judge_rank(&k, r, of[r], &surplus);
    }
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_relays(&k, r, of, relayed, &surplus);
    if (ok && surplus)
        ok = T_WRONG(w, "%lld more messages are received than sent", (long long)surplus);
    for (int64_t m = 0; ok && found && (w->c->node || w->c->ranks_per_node); m++)
        ok = judge_node(&k, m, &found);
    free(got);
    free(relayed);
    free(of);
    court_close(&k);
    return ok;
}

int64_t t_plans_bytes(const t_plans_t *w, colo_pass_t pass, int32_t from, int32_t to)
{
    int32_t n;
    const colo_plan_message_t *m = colo_plan_recvs(w->plan[to], pass, &n);
    const colo_plan_message_t *f = find_message(m, n, from);
    return f ? f->bytes : 0;
}

/* ---- adjoint: run the plans on integers, one number per (rank, addend, element) ---- */

static int64_t logical(int what, int64_t l, int64_t b, int64_t s, int64_t h)
{
    return ref_code_partial(l + 31 * what, b, s, h, 10);
}

/* sum of (what arrives) * (the dual number there) over elements that destinations receive */
static int64_t pairing(court_t *k, bool backward)
{
    size_t cells = (size_t)(k->nb * k->ns * k->nc);
    uint8_t *seen = calloc(cells * 32 + 1, 1);
    int64_t *out = calloc(cells + 1, sizeof *out), sum = 0;
    if (!seen || !out)
        abort();
    for (int32_t r = 0; r < k->w->n; r++) {
        int32_t n;
        int64_t nl;
        const colo_plan_message_t *m = colo_plan_recvs(k->w->plan[r], k->pass, &n);
        const colo_region_t *l = colo_plan_locals(k->w->plan[r], k->pass, &nl);
        memset(out, 0, cells * sizeof *out);
        for (int32_t i = -1; i < n; i++) {
            const colo_region_t *g = i < 0 ? l : m[i].regions;
            for (int64_t j = 0; j < (i < 0 ? nl : m[i].nregions); j++)
                for (int64_t b = g[j].b[0]; b < g[j].b[1]; b++)
                    for (int64_t s = g[j].s[0]; s < g[j].s[1]; s++)
                        for (int64_t h = 0; h < k->nc; h++)
                            if (k->edge[h] >= g[j].h[0] && k->edge[h] < g[j].h[1])
                                out[(b * k->ns + s) * k->nc + h] +=
                                    backward ? logical(1, g[j].addend, b, s, h)
                                             : logical(0, 0, b, s, h);
        }
        int64_t addend = backward ? 0 : k->wants[r].addend;
        for (int64_t b = 0; b < k->nb; b++)
            for (int64_t s = 0; s < k->ns; s++)
                for (int64_t h = 0; h < k->nc; h++) {
                    size_t index = (size_t)((b * k->ns + s) * k->nc + h);
                    if (!takes(&k->wants[r], b, s, h) || seen[cells * (size_t)addend + index]++)
                        continue;
                    sum += out[index] *
                           (backward ? logical(0, 0, b, s, h) : logical(1, addend, b, s, h));
                }
    }
    free(seen);
    free(out);
    return sum;
}

bool t_plans_adjoint(t_plans_t *w)
{
    const t_case_t *c = w->c;
    bool partial = c->output == COLO_FULL_SEQ && c->grad == COLO_PARTIAL;
    court_t f, b;
    court_open(&f, w, COLO_FORWARD);
    court_open(&b, w, COLO_BACKWARD);
    /* y lives where the gradient does: every addend's copy when PARTIAL, own rows otherwise
     */
    for (int32_t r = 0; r < w->n; r++) {
        member_t *m = &f.wants[r];
        free(m->b);
        free(m->s);
        free(m->h);
        make_member(&f, m, &c->dst, r, partial);
        if (!partial)
            m->addend = 0;
    }
    int64_t forward = pairing(&f, false), backward = pairing(&b, true);
    court_close(&f);
    court_close(&b);
    return forward == backward ||
           T_WRONG(w, "<Rx,y> = %lld, <x,R'y> = %lld", (long long)forward, (long long)backward);
}
