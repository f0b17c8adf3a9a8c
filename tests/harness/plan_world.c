/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_world.c - see plan_world.h. Ownership comes from the oracle as one bit per (rank, cell): a
 * cell is a sample, a row and an interval of features, which are cut at every boundary that occurs.
 * The plans are only read. Deliveries are counted in a byte per (addend, cell), as values or in a
 * sum of a node, and each must have come at the end.
 */
#include "harness/plan_world.h"

#include "bridge/plan/plan.h"
#include "harness/harness.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 64 }; /* ranks, and nodes: a bit each */
/* What a byte of got says of an addend, if it is not 1, a value. */
enum { FIRST_OF_SUM = 2, REST_OF_SUM = 3 };

typedef struct court {
    t_plans_t *w;
    colo_pass_t pass;
    int64_t ns, nc, cells, addends;
    int64_t *edge;           /* [nc + 1] boundaries of the intervals of features */
    uint64_t *gives, *takes; /* [addends][cells] ranks that hold it; [cells] that need it */
    uint8_t *got;     /* [2][ranks][addends][cells]: to have, then to add up for other nodes */
    int32_t *relayed; /* [cells] 1 + the rank that passed it to the one that is judged */
    uint64_t near[2][MOST]; /* ranks of a rank's node; of its place on any node */
    int64_t surplus;        /* messages that are received and not sent */
} court_t;

static bool has(uint64_t ranks, int64_t rank)
{
    return ranks >> rank & 1;
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

static const colo_plan_message_t *messages(const court_t *k, int64_t rank, int exchange, bool sends,
                                           int32_t *n)
{
    const colo_plan_t *p = k->w->plan[rank];
    return exchange == COLO_EXCHANGE_RELAYS      ? colo_plan_relays(p, k->pass, sends, n)
           : exchange == COLO_EXCHANGE_NODE_SUMS ? colo_plan_sums(p, k->pass, sends, n)
           : sends                               ? colo_plan_sends(p, k->pass, n)
                                                 : colo_plan_recvs(p, k->pass, n);
}

/* ---- cells ---- */

typedef struct cell {
    int64_t b, s, h, at;
} cell_t;

/* The next cell of a region, which is not empty. */
static bool next_cell(const court_t *k, const colo_region_t *g, cell_t *c)
{
    do {
        if (++c->h == k->nc) {
            c->h = 0;
            c->s++;
        }
        if (c->s == g->s[1]) {
            c->s = g->s[0];
            c->b++;
        }
        if (c->b == g->b[1])
            return false;
    } while (k->edge[c->h] < g->h[0] || k->edge[c->h] >= g->h[1]);
    c->at = (c->b * k->ns + c->s) * k->nc + c->h;
    return true;
}
#define FOR_CELLS(k, g, c) for (cell_t c = {(g)->b[0], (g)->s[0], -1, 0}; next_cell(k, g, &(c));)

static int64_t width_of(const court_t *k, int64_t at)
{
    return k->edge[at % k->nc + 1] - k->edge[at % k->nc];
}

/* In words, for what is wrong there. */
static const char *cell_text(const court_t *k, int64_t at)
{
    return t_text("sample %lld row %lld feature %lld", (long long)(at / k->nc / k->ns),
                  (long long)(at / k->nc % k->ns), (long long)k->edge[at % k->nc]);
}

static uint8_t *got_of(const court_t *k, int64_t rank, int64_t addend, int64_t at)
{
    return &k->got[(rank * k->addends + addend) * k->cells + at];
}

static uint8_t *collected_of(const court_t *k, int64_t rank, int64_t addend, int64_t at)
{
    return got_of(k, k->w->n + rank, addend, at);
}

static uint64_t givers(const court_t *k, int64_t addend, int64_t at)
{
    return k->gives[addend * k->cells + at];
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void add_edge(court_t *k, int64_t edge)
{
    if (edge < 0 || edge > k->w->c->shape.h)
        return;
    if (k->nc % 64 == 0)
        k->edge = realloc(k->edge, (size_t)(k->nc + 64) * sizeof *k->edge);
    if (!k->edge)
        abort();
    k->edge[k->nc++] = edge;
}

static void add_edges(court_t *k, const colo_region_t *regions, int64_t n)
{
    for (int64_t i = 0; i < 2 * n; i++)
        add_edge(k, regions[i / 2].h[i % 2]);
}

static void find_edges(court_t *k)
{
    const t_case_t *c = k->w->c;
    add_edge(k, 0);
    add_edge(k, c->shape.h);
    /* where features are split: BLOCK boundaries of every rank, floor(dH/D) for all D that occur */
    for (int s = 0; s < 2; s++) {
        const ref_side_t *side = s ? &c->dst : &c->src;
        for (int i = 0; side->nsplits[2] && i < side->ndims; i++)
            for (int64_t d = 1; d < side->extent[i]; d++)
                add_edge(k, d * c->shape.h / side->extent[i]);
    }
    for (int32_t r = 0; r < k->w->n; r++) {
        int32_t n;
        int64_t nlocals;
        const colo_region_t *locals = colo_plan_locals(k->w->plan[r], k->pass, &nlocals);
        add_edges(k, locals, nlocals);
        for (int exchange = 0; exchange < COLO_EXCHANGES; exchange++) {
            const colo_plan_message_t *m = messages(k, r, exchange, false, &n);
            for (int32_t i = 0; i < n; i++)
                add_edges(k, m[i].regions, m[i].nregions);
        }
    }
    qsort(k->edge, (size_t)k->nc, sizeof *k->edge, by_value);
    int64_t n = 0;
    for (int64_t i = 0; i < k->nc; i++)
        if (i == 0 || k->edge[i] != k->edge[n - 1])
            k->edge[n++] = k->edge[i];
    k->nc = n - 1;
}

/* What @rank has on a side. A width may be huge: it is asked for only if it is split. */
static void mark_part(court_t *k, int32_t rank, const ref_side_t *side, bool full, bool by_addend,
                      uint64_t *ranks)
{
    T_ENDS(ref_part_free) ref_part_t part = {0};
    ref_shape_t shape = k->w->c->shape;
    const bool whole = shape.h > 4096 && !side->nsplits[2];
    shape.h = whole ? 1 : shape.h;
    ref_part_make(&part, side, shape, rank, full);
    for (int64_t h = 0; part.holds && h < k->nc; h++)
        if (whole || ref_list_has(part.h, part.nh, k->edge[h]))
            for (int64_t b = 0; b < part.nb; b++)
                for (int64_t s = 0; s < part.ns; s++)
                    ranks[(by_addend ? part.addend : 0) * k->cells +
                          (part.b[b] * k->ns + part.s[s]) * k->nc + h] |= UINT64_C(1) << rank;
}

static void open_court(court_t *k, t_plans_t *w, colo_pass_t pass)
{
    const t_case_t *c = w->c;
    const bool back = pass == COLO_PASS_BACKWARD, full = c->output == COLO_OUTPUT_FULL_SEQ,
               partial = full && c->grad == COLO_GRAD_PARTIAL;
    if (w->n > MOST)
        abort();
    *k = (court_t){.w = w, .pass = pass, .ns = c->shape.n};
    k->addends = back && partial ? ref_side_addends(&c->dst) : 1;
    find_edges(k);
    k->cells = c->shape.b * k->ns * k->nc;
    k->gives = ref_zeros(k->addends * k->cells, sizeof *k->gives);
    k->takes = ref_zeros(k->cells, sizeof *k->takes);
    k->got = ref_zeros(2 * w->n * k->addends * k->cells, 1);
    k->relayed = ref_zeros(k->cells, sizeof *k->relayed);
    for (int32_t r = 0; r < w->n; r++) {
        mark_part(k, r, &c->src, false, false, back ? k->takes : k->gives);
        mark_part(k, r, &c->dst, full && (!back || partial), k->addends > 1,
                  back ? k->gives : k->takes);
        for (int32_t q = 0; q < w->n; q++) {
            k->near[0][r] |= (uint64_t)(node_of(c, q) == node_of(c, r)) << q;
            k->near[1][r] |= (uint64_t)(rail_of(c, q) == rail_of(c, r)) << q;
        }
    }
}

static void close_court(court_t *k)
{
    free(k->edge);
    free(k->gives);
    free(k->takes);
    free(k->got);
    free(k->relayed);
}

/* ---- what arrives ---- */

/* Bytes of an element; of one that several ranks of a node have added up. */
static int64_t elem_of(const court_t *k, int exchange)
{
    const int64_t es = (int64_t)colo_dtype_size(k->w->c->dtype);
    return exchange == COLO_EXCHANGE_NODE_SUMS && es < 4 ? 4 : es;
}

static int64_t region_count(const colo_region_t *g)
{
    return (g->b[1] - g->b[0]) * (g->s[1] - g->s[0]) * (g->h[1] - g->h[0]);
}

/* Is it of a source in the nearest tier that has one? */
static bool is_nearest(const court_t *k, int64_t rank, int64_t peer, uint64_t sources)
{
    for (int tier = 0; tier < 2; tier++)
        if (sources & k->near[tier][rank])
            return has(k->near[tier][rank], peer);
    return true;
}

/* Marks what one region brings to @rank; @peer is the giver (the rank itself for local regions). */
static bool deliver(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g)
{
    FOR_CELLS (k, g, c) {
        const uint64_t sources = givers(k, g->addend, c.at);
        const char *bad = NULL;
        if (!has(sources, peer))
            bad = "the sender does not hold it";
        else if (!has(k->takes[c.at], rank))
            bad = "no rank needs it there";
        else if (peer != rank && has(sources, rank))
            bad = "the receiver holds it already";
        else if (peer != rank && !is_nearest(k, rank, peer, sources))
            bad = "a nearer rank holds it";
        else if ((*got_of(k, rank, g->addend, c.at))++)
            bad = "it was delivered before";
        if (bad)
            return T_WRONG(k->w, "rank %d from %lld, addend %d %s: %s", rank, (long long)peer,
                           g->addend, cell_text(k, c.at), bad);
    }
    return true;
}

/* Marks what @rank gets to add up for other nodes: it has another addend of the same itself. */
static bool collect(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g)
{
    const int64_t addend = g->addend - k->addends;
    bool ok = addend < k->addends && k->w->c->two_levels && has(k->near[0][rank], peer);
    FOR_CELLS (k, g, c) {
        bool other = false;
        for (int64_t l = 0; ok && l < k->addends; l++)
            other |= l != addend && has(givers(k, l, c.at), rank);
        ok = ok && other && has(givers(k, addend, c.at), peer);
        if (!ok)
            return T_WRONG(k->w, "rank %d collects addend %lld of rank %lld, which has no use",
                           rank, (long long)addend, (long long)peer);
        *collected_of(k, rank, addend, c.at) = 1;
    }
    return true;
}

/* Marks the addends of one region of a sum of @peer: its own, and what it has collected. */
static bool deliver_sum(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g)
{
    FOR_CELLS (k, g, c) {
        const char *bad = has(k->takes[c.at], rank) ? NULL : "no rank needs it there";
        int64_t n = 0;
        for (int64_t l = 0; l < k->addends && !bad; l++) {
            uint8_t *got = got_of(k, rank, l, c.at);
            if (!has(givers(k, l, c.at), peer) && !*collected_of(k, peer, l, c.at))
                continue;
            if (*got)
                bad = "an addend of it was delivered before";
            if (n++ == 0 && l != g->addend)
                bad = "it is not named by its lowest addend";
            *got = n == 1 ? FIRST_OF_SUM : REST_OF_SUM;
        }
        if (!bad && n < 2)
            bad = "one addend is no sum";
        if (bad)
            return T_WRONG(k->w, "rank %d from %lld, sum %d %s: %s", rank, (long long)peer,
                           g->addend, cell_text(k, c.at), bad);
    }
    return true;
}

/* Marks in relayed what one region of the last exchange brings; @peer has all of it. */
static bool pass_on(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g)
{
    FOR_CELLS (k, g, c) {
        const char *bad = has(k->takes[c.at], rank) ? NULL : "no rank needs it there";
        for (int64_t l = 0; l < k->addends && !bad; l++)
            if (*got_of(k, peer, l, c.at) == 0)
                bad = "the gateway lacks an addend";
            else if (*got_of(k, rank, l, c.at) != 0)
                bad = "it was delivered before";
        if (k->relayed[c.at])
            bad = "it was passed on before";
        k->relayed[c.at] = (int32_t)peer + 1;
        if (bad)
            return T_WRONG(k->w, "rank %d passed by %lld, %s: %s", rank, (long long)peer,
                           cell_text(k, c.at), bad);
    }
    return true;
}

/* ---- an exchange ---- */

static bool region_fits(const court_t *k, const colo_region_t *g, int exchange)
{
    const ref_shape_t *sh = &k->w->c->shape;
    const int64_t most =
        exchange == COLO_EXCHANGE_MAIN ? 2 * k->addends : k->addends; /* and the collected */
    return g->b[0] >= 0 && g->b[0] < g->b[1] && g->b[1] <= sh->b && g->s[0] >= 0 &&
           g->s[0] < g->s[1] && g->s[1] <= sh->n && g->h[0] >= 0 && g->h[0] < g->h[1] &&
           g->h[1] <= sh->h && g->addend >= 0 && g->addend < most;
}

static bool well_formed(court_t *k, int32_t rank, int exchange, bool sends)
{
    t_plans_t *w = k->w;
    const char *what =
        t_text("rank %d, exchange %d, %s rank", rank, exchange, sends ? "to" : "from");
    int32_t n;
    const colo_plan_message_t *m = messages(k, rank, exchange, sends, &n);
    for (int32_t i = 0; i < n; i++) {
        const long long peer = (long long)m[i].peer;
        int64_t count = 0;
        for (int64_t j = 0; j < m[i].nregions; j++) {
            if (!region_fits(k, &m[i].regions[j], exchange))
                return T_WRONG(w, "%s %lld: region %lld is empty or outside", what, peer,
                               (long long)j);
            count += region_count(&m[i].regions[j]);
        }
        if (peer == rank || peer < 0 || peer >= w->n || (i && peer <= m[i - 1].peer))
            return T_WRONG(w, "%s %lld: no peer, or it does not ascend", what, peer);
        if (count <= 0 || m[i].bytes != count * elem_of(k, exchange))
            return T_WRONG(w, "%s %lld: %lld bytes in boxes of %lld elements", what, peer,
                           (long long)m[i].bytes, (long long)count);
    }
    k->surplus += sends ? -n : n;
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

/* What each message brings to @rank; its sender lists the same regions in the same order. */
static bool judge_exchange(court_t *k, int32_t rank, int exchange)
{
    t_plans_t *w = k->w;
    int32_t n, sends;
    bool ok = well_formed(k, rank, exchange, false) && well_formed(k, rank, exchange, true);
    const colo_plan_message_t *m = messages(k, rank, exchange, false, &n);
    for (int32_t i = 0; ok && i < n; i++) {
        const int64_t peer = m[i].peer;
        const bool of_node = has(k->near[0][rank], peer);
        const colo_plan_message_t *out = messages(k, peer, exchange, true, &sends);
        const colo_plan_message_t *same = find_message(out, sends, rank);
        if (!same || !t_same_message(same, &m[i]))
            return T_WRONG(w, "rank %d receives from %lld what that rank does not send like this",
                           rank, (long long)peer);
        if (exchange != COLO_EXCHANGE_MAIN &&
            (!w->c->two_levels || of_node != (exchange == COLO_EXCHANGE_RELAYS)))
            return T_WRONG(w, "rank %d gets something of rank %lld in exchange %d", rank,
                           (long long)peer, exchange);
        for (int64_t j = 0; ok && j < m[i].nregions; j++) {
            const colo_region_t *g = &m[i].regions[j];
            ok = exchange == COLO_EXCHANGE_NODE_SUMS ? deliver_sum(k, rank, peer, g)
                 : exchange == COLO_EXCHANGE_RELAYS  ? pass_on(k, rank, peer, g)
                 : g->addend >= k->addends           ? collect(k, rank, peer, g)
                                                     : deliver(k, rank, peer, g);
        }
    }
    return ok;
}

/* The first exchange: what comes from sources, and what stays. */
static bool judge_first(court_t *k, int32_t rank)
{
    int64_t n;
    const colo_region_t *locals = colo_plan_locals(k->w->plan[rank], k->pass, &n);
    bool ok = judge_exchange(k, rank, COLO_EXCHANGE_MAIN);
    for (int64_t i = 0; ok && i < n; i++) {
        if (!region_fits(k, &locals[i], COLO_EXCHANGE_NODE_SUMS))
            return T_WRONG(k->w, "rank %d: local region %lld is empty or outside", rank,
                           (long long)i);
        ok = deliver(k, rank, rank, &locals[i]);
    }
    return ok;
}

static int64_t bytes_of(const court_t *k, int32_t rank, bool sends)
{
    int64_t bytes = 0;
    for (int exchange = 0; exchange < COLO_EXCHANGES; exchange++) {
        int32_t n;
        const colo_plan_message_t *m = messages(k, rank, exchange, sends, &n);
        for (int32_t i = 0; i < n; i++)
            bytes += m[i].bytes;
    }
    return bytes;
}

/* The last exchange, and that all together are complete. */
static bool judge_last(court_t *k, int32_t rank)
{
    const colo_plan_t *p = k->w->plan[rank];
    const int64_t es = elem_of(k, COLO_EXCHANGE_MAIN);
    int64_t need = 0, here = 0, local = 0, nlocals;
    memset(k->relayed, 0, (size_t)k->cells * sizeof *k->relayed);
    if (!judge_exchange(k, rank, COLO_EXCHANGE_RELAYS))
        return false;
    for (int64_t i = 0; i < k->addends * k->cells; i++) {
        const int64_t at = i % k->cells, addend = i / k->cells, width = width_of(k, at);
        const int32_t passed = k->relayed[at];
        const uint8_t how = *got_of(k, passed ? passed - 1 : rank, addend, at);
        if (!has(k->takes[at], rank))
            continue;
        if (how == 0)
            return T_WRONG(k->w, "rank %d never gets addend %lld %s", rank, (long long)addend,
                           cell_text(k, at));
        if (passed) {
            need += addend == 0 ? width * es : 0;
            continue;
        }
        need += width * (how == 1              ? es
                         : how == FIRST_OF_SUM ? elem_of(k, COLO_EXCHANGE_NODE_SUMS)
                                               : 0);
        if (how == 1 && has(givers(k, addend, at), rank))
            here += width * es;
    }
    const colo_region_t *locals = colo_plan_locals(p, k->pass, &nlocals);
    for (int64_t i = 0; i < nlocals; i++)
        local += region_count(&locals[i]) * es;
    const colo_plan_bytes_t y = t_plan_bytes(p, k->pass);
    if (y.recv != bytes_of(k, rank, false) || y.send != bytes_of(k, rank, true) ||
        y.local != local || local != here || y.minimum != need - here || y.minimum > y.recv)
        return T_WRONG(
            k->w,
            "rank %d bytes: says recv %lld send %lld local %lld minimum %lld, boxes say %lld "
            "%lld %lld, elements say local %lld minimum %lld",
            rank, (long long)y.recv, (long long)y.send, (long long)y.local, (long long)y.minimum,
            (long long)bytes_of(k, rank, false), (long long)bytes_of(k, rank, true),
            (long long)local, (long long)here, (long long)(need - here));
    return true;
}

/* ---- nodes ---- */

/* The fewest bytes of an element that bring the addends @missing into a node: of each other node
 * that holds[] some, the sum or the single ones. All choices of sums are tried. If nodes hold sets
 * of addends that overlap, one division of them for all nodes, which gives replicas the same bits,
 * may take more: as many as @most, all single. */
static int64_t fewest(const court_t *k, uint64_t missing, const uint64_t *holds, int64_t nodes,
                      int64_t *most)
{
    int64_t least = INT64_MAX;
    bool overlap = false;
    for (int64_t m = 0; m < nodes; m++)
        for (int64_t o = 0; o < m; o++)
            overlap |= (holds[m] & holds[o]) && holds[m] != holds[o];
    for (int64_t sums = 0; sums < (k->w->c->two_levels ? 1 << nodes : 1); sums++) {
        uint64_t left = missing;
        int64_t cost = __builtin_popcountll((uint64_t)sums) * elem_of(k, COLO_EXCHANGE_NODE_SUMS);
        for (int64_t m = 0; m < nodes; m++)
            left &= sums >> m & 1 ? ~holds[m] : ~UINT64_C(0);
        cost += __builtin_popcountll(left) * elem_of(k, COLO_EXCHANGE_MAIN);
        least = cost < least ? cost : least;
    }
    *most = overlap ? __builtin_popcountll(missing) * elem_of(k, COLO_EXCHANGE_MAIN) : least;
    return least;
}

/* What ranks of each node need and none of them holds is what enters it. */
static bool judge_nodes(court_t *k)
{
    t_plans_t *w = k->w;
    uint64_t ranks[MOST] = {0};
    int64_t nodes = 0, in[MOST] = {0}, said[MOST] = {0};
    for (int32_t r = 0; r < w->n; r++) {
        const int64_t m = node_of(w->c, r);
        nodes = m >= nodes ? m + 1 : nodes;
        if (nodes > (w->c->two_levels ? 8 : MOST) || k->addends > 64)
            return T_WRONG(w, "%lld nodes and %lld addends, which no brute force counts",
                           (long long)nodes, (long long)k->addends);
        ranks[m] |= UINT64_C(1) << r;
        in[m] += t_plan_node_bytes(w->plan[r], k->pass).in;
        said[m] += t_plan_node_bytes(w->plan[r], k->pass).minimum;
    }
    for (int64_t m = 0; m < nodes; m++) {
        int64_t minimum = 0, bound = 0;
        for (int64_t at = 0; at < k->cells; at++) {
            uint64_t holds[MOST] = {0};
            int64_t most;
            if (!(k->takes[at] & ranks[m]))
                continue;
            for (int64_t i = 0; i < nodes * k->addends; i++)
                if (givers(k, i % k->addends, at) & ranks[i / k->addends])
                    holds[i / k->addends] |= UINT64_C(1) << i % k->addends;
            const uint64_t all = ~UINT64_C(0) >> (64 - k->addends);
            minimum += width_of(k, at) * fewest(k, all & ~holds[m], holds, nodes, &most);
            bound += width_of(k, at) * most;
        }
        if (said[m] < minimum || said[m] > bound ||
            (w->c->two_levels ? in[m] != said[m] : in[m] < said[m]))
            return T_WRONG(w,
                           "node %lld: %lld bytes enter, the minimum is said to be %lld, expected "
                           "%lld to %lld",
                           (long long)m, (long long)in[m], (long long)said[m], (long long)minimum,
                           (long long)bound);
    }
    return true;
}

/* All ranks make the later exchanges that carry anything. */
static bool judge_calls(court_t *k)
{
    for (int exchange = COLO_EXCHANGE_NODE_SUMS; exchange <= COLO_EXCHANGE_RELAYS; exchange++) {
        int32_t all = 0, n;
        for (int32_t r = 0; r < k->w->n; r++) {
            (void)messages(k, r, exchange, true, &n);
            all += n;
        }
        for (int32_t r = 0; r < k->w->n; r++)
            if (k->w->plan[r]->exchange[k->pass][exchange].all_come != (all > 0))
                return T_WRONG(k->w, "rank %d: exchange %d of %d messages is wrongly made or not",
                               r, exchange, all);
    }
    return true;
}

bool t_plans_judge(t_plans_t *w, colo_pass_t pass)
{
    court_t k;
    open_court(&k, w, pass);
    bool ok = judge_calls(&k);
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_first(&k, r);
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_exchange(&k, r, COLO_EXCHANGE_NODE_SUMS);
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_last(&k, r);
    if (ok && k.surplus)
        ok = T_WRONG(w, "%lld more messages are received than sent", (long long)k.surplus);
    ok = ok && (!(w->c->node || w->c->ranks_per_node) || judge_nodes(&k));
    close_court(&k);
    return ok;
}

int64_t t_plans_bytes(const t_plans_t *w, colo_pass_t pass, int32_t from, int32_t to)
{
    int32_t n;
    const colo_plan_message_t *m = colo_plan_recvs(w->plan[to], pass, &n);
    const colo_plan_message_t *f = find_message(m, n, from);
    return f ? f->bytes : 0;
}
