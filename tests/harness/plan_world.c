/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_world.c - see plan_world.h. Ownership comes from the oracle as one bit per (rank, index of
 * an axis); the plans are only read. Deliveries are counted in a byte per (addend, sample, row,
 * cell of features), as values or in a sum of a node, and each must have come at the end.
 */
#include "harness/plan_court.h"

#include "bridge/plan/plan.h"

#include <stdlib.h>
#include <string.h>

/* Which exchange of a call; what a byte of got says of an addend, if it is not 1, a value. */
enum { FIRST, SUMS, RELAYS };
enum { FIRST_OF_SUM = 2, REST_OF_SUM = 3 };

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

static size_t cell_of(const court_t *k, int64_t l, int64_t b, int64_t s, int64_t h)
{
    return (size_t)(((l * k->nb + b) * k->ns + s) * k->nc + h);
}

/* Bytes of an element that several ranks of a node have added up. */
static int64_t sum_size(const t_case_t *c)
{
    const int64_t es = (int64_t)colo_dtype_size(c->dtype);
    return es < 4 ? 4 : es;
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

/* Marks in @collected what @rank gets to add up for other nodes. */
static bool collect(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g,
                    uint8_t *collected)
{
    const int64_t addend = g->addend - k->addends;
    bool ok = addend < k->addends && k->w->c->two_levels &&
              node_of(k->w->c, peer) == node_of(k->w->c, rank);
    for (int64_t b = g->b[0]; ok && b < g->b[1]; b++)
        for (int64_t s = g->s[0]; s < g->s[1]; s++)
            for (int64_t h = 0; h < k->nc; h++) {
                if (k->edge[h] < g->h[0] || k->edge[h] >= g->h[1])
                    continue;
                ok = ok && gives(&k->has[peer], addend, b, s, h) && k->has[rank].addend != addend &&
                     gives(&k->has[rank], k->has[rank].addend, b, s, h);
                collected[cell_of(k, addend, b, s, h)] = 1;
            }
    return ok || T_WRONG(k->w, "rank %d collects addend %lld of rank %lld, which has no use", rank,
                         (long long)addend, (long long)peer);
}

/* Marks in @got the addends of one region of a sum of @peer: its own, and what it has collected. */
static bool deliver_sum(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g,
                        const uint8_t *collected, uint8_t *got)
{
    for (int64_t b = g->b[0]; b < g->b[1]; b++)
        for (int64_t s = g->s[0]; s < g->s[1]; s++)
            for (int64_t h = 0; h < k->nc; h++) {
                int64_t n = 0;
                const char *bad = NULL;
                if (k->edge[h] < g->h[0] || k->edge[h] >= g->h[1])
                    continue;
                if (!takes(&k->wants[rank], b, s, h))
                    bad = "no rank needs it there";
                for (int64_t l = 0; l < k->addends && !bad; l++) {
                    if (!gives(&k->has[peer], l, b, s, h) && !collected[cell_of(k, l, b, s, h)])
                        continue;
                    if (got[cell_of(k, l, b, s, h)])
                        bad = "an addend of it was delivered before";
                    if (n++ == 0 && l != g->addend)
                        bad = "it is not named by its lowest addend";
                    got[cell_of(k, l, b, s, h)] = n == 1 ? FIRST_OF_SUM : REST_OF_SUM;
                }
                if (!bad && n < 2)
                    bad = "one addend is no sum";
                if (bad)
                    return T_WRONG(
                        k->w, "rank %d from %lld, sum %d sample %lld row %lld feature %lld: %s",
                        rank, (long long)peer, g->addend, (long long)b, (long long)s,
                        (long long)k->edge[h], bad);
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
static bool mirrored(court_t *k, int32_t rank, const colo_plan_message_t *recv, int exchange)
{
    int32_t n;
    const colo_plan_t *p = k->w->plan[recv->peer];
    const colo_plan_message_t *sends = exchange == RELAYS ? colo_plan_relays(p, k->pass, true, &n)
                                       : exchange == SUMS ? colo_plan_sums(p, k->pass, true, &n)
                                                          : colo_plan_sends(p, k->pass, &n);
    const colo_plan_message_t *m = find_message(sends, n, rank);
    return (m && t_same_message(m, recv)) ||
           T_WRONG(k->w, "rank %d receives from %lld what that rank does not send like this", rank,
                   (long long)recv->peer);
}

static bool well_formed(court_t *k, int32_t rank, const char *what, const colo_plan_message_t *m,
                        int32_t n, int exchange, int64_t *total)
{
    t_plans_t *w = k->w;
    const int64_t es = exchange == SUMS ? sum_size(w->c) : (int64_t)colo_dtype_size(w->c->dtype);
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

/* The first exchange: what comes from sources, and what stays. */
static bool judge_rank(court_t *k, int32_t rank, uint8_t *got, uint8_t *collected,
                       int64_t *messages)
{
    t_plans_t *w = k->w;
    const colo_plan_t *p = w->plan[rank];
    int64_t sent, received, nlocals;
    int32_t nrecvs, nsends;
    const colo_plan_message_t *recvs = colo_plan_recvs(p, k->pass, &nrecvs);
    const colo_plan_message_t *sends = colo_plan_sends(p, k->pass, &nsends);
    const colo_region_t *locals = colo_plan_locals(p, k->pass, &nlocals);
    if (!well_formed(k, rank, "receives from", recvs, nrecvs, FIRST, &received) ||
        !well_formed(k, rank, "sends to", sends, nsends, FIRST, &sent))
        return false;
    *messages += nrecvs - nsends;
    for (int32_t i = 0; i < nrecvs; i++) {
        if (!mirrored(k, rank, &recvs[i], FIRST))
            return false;
        for (int64_t j = 0; j < recvs[i].nregions; j++)
            if (recvs[i].regions[j].addend >= k->addends
                    ? !collect(k, rank, recvs[i].peer, &recvs[i].regions[j], collected)
                    : !deliver(k, rank, recvs[i].peer, &recvs[i].regions[j], got))
                return false;
    }
    for (int64_t i = 0; i < nlocals; i++)
        if (!deliver(k, rank, rank, &locals[i], got))
            return false;
    return true;
}

/* The exchange of sums. */
static bool judge_sums(court_t *k, int32_t rank, uint8_t **got, uint8_t **collected,
                       int64_t *messages)
{
    t_plans_t *w = k->w;
    int64_t bytes;
    int32_t nrecvs, nsends;
    const colo_plan_message_t *in = colo_plan_sums(w->plan[rank], k->pass, false, &nrecvs);
    const colo_plan_message_t *out = colo_plan_sums(w->plan[rank], k->pass, true, &nsends);
    if (!well_formed(k, rank, "gets sums of", in, nrecvs, SUMS, &bytes) ||
        !well_formed(k, rank, "brings sums to", out, nsends, SUMS, &bytes))
        return false;
    *messages += nrecvs - nsends;
    for (int32_t i = 0; i < nrecvs; i++) {
        if (node_of(w->c, in[i].peer) == node_of(w->c, rank) || !w->c->two_levels)
            return T_WRONG(w, "rank %d gets a sum of rank %lld of its node", rank,
                           (long long)in[i].peer);
        if (!mirrored(k, rank, &in[i], SUMS))
            return false;
        for (int64_t j = 0; j < in[i].nregions; j++)
            if (!deliver_sum(k, rank, in[i].peer, &in[i].regions[j], collected[in[i].peer],
                             got[rank]))
                return false;
    }
    return true;
}

/* Marks in @relayed what one region of the second exchange brings; @peer has all of it. */
static bool pass_on(court_t *k, int32_t rank, int64_t peer, const colo_region_t *g, uint8_t **got,
                    int32_t *relayed)
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
                    if (got[peer][cell_of(k, l, b, s, h)] == 0)
                        bad = "the gateway lacks an addend";
                    else if (got[rank][cell_of(k, l, b, s, h)] != 0)
                        bad = "it was delivered before";
                if (relayed[cell_of(k, 0, b, s, h)])
                    bad = "it was passed on before";
                relayed[cell_of(k, 0, b, s, h)] = (int32_t)peer + 1;
                if (bad)
                    return T_WRONG(
                        k->w, "rank %d passed by %lld, sample %lld row %lld feature %lld: %s", rank,
                        (long long)peer, (long long)b, (long long)s, (long long)k->edge[h], bad);
            }
    return true;
}

/* The last exchange, and that all together are complete. */
static bool judge_relays(court_t *k, int32_t rank, uint8_t **got, int32_t *relayed,
                         int64_t *messages)
{
    t_plans_t *w = k->w;
    const colo_plan_t *p = w->plan[rank];
    const int64_t es = (int64_t)colo_dtype_size(w->c->dtype);
    int64_t sent, received, relayed_out, relayed_in, sums_out, sums_in, local = 0, nlocals;
    int32_t nrecvs, nsends;
    const colo_plan_message_t *in = colo_plan_relays(p, k->pass, false, &nrecvs);
    const colo_plan_message_t *out = colo_plan_relays(p, k->pass, true, &nsends);
    if (!well_formed(k, rank, "is passed by", in, nrecvs, RELAYS, &relayed_in) ||
        !well_formed(k, rank, "passes to", out, nsends, RELAYS, &relayed_out))
        return false;
    *messages += nrecvs - nsends;
    memset(relayed, 0, (size_t)(k->nb * k->ns * k->nc + 1) * sizeof *relayed);
    for (int32_t i = 0; i < nrecvs; i++) {
        if (node_of(w->c, in[i].peer) != node_of(w->c, rank) || !w->c->two_levels)
            return T_WRONG(w, "rank %d is passed something by rank %lld of another node", rank,
                           (long long)in[i].peer);
        if (!mirrored(k, rank, &in[i], RELAYS))
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
                    const int32_t passed = relayed[cell_of(k, 0, b, s, h)];
                    const uint8_t how = got[passed ? passed - 1 : rank][cell_of(k, l, b, s, h)];
                    need += how == 1              ? width
                            : how == FIRST_OF_SUM ? width / es * sum_size(w->c)
                                                  : 0;
                    if (how == 1 && gives(&k->has[rank], l, b, s, h))
                        *(passed ? &elsewhere : &here) += width;
                    if (how == 0)
                        return T_WRONG(
                            w, "rank %d never gets addend %lld sample %lld row %lld feature %lld",
                            rank, (long long)l, (long long)b, (long long)s, (long long)k->edge[h]);
                }
    const colo_region_t *locals = colo_plan_locals(p, k->pass, &nlocals);
    for (int64_t i = 0; i < nlocals; i++)
        local += region_count(&locals[i]) * es;
    in = colo_plan_recvs(p, k->pass, &nrecvs);
    out = colo_plan_sends(p, k->pass, &nsends);
    (void)well_formed(k, rank, "", in, nrecvs, FIRST, &received); /* judged before */
    (void)well_formed(k, rank, "", out, nsends, FIRST, &sent);
    in = colo_plan_sums(p, k->pass, false, &nrecvs);
    out = colo_plan_sums(p, k->pass, true, &nsends);
    (void)well_formed(k, rank, "", in, nrecvs, SUMS, &sums_in);
    (void)well_formed(k, rank, "", out, nsends, SUMS, &sums_out);
    received += sums_in;
    sent += sums_out;
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

/* The fewest bytes of an element that bring the addends @missing into a node: of each other node
 * that holds[] some, the sum or the single ones. All choices of sums are tried. If nodes hold sets
 * of addends that overlap, one division of them for all nodes, which gives replicas the same bits,
 * may take more: as many as @most, all single. */
static int64_t fewest(const court_t *k, uint64_t missing, const uint64_t *holds, int64_t nodes,
                      int64_t *most)
{
    const t_case_t *c = k->w->c;
    int64_t least = INT64_MAX;
    bool overlap = false;
    for (int64_t m = 0; m < nodes; m++)
        for (int64_t o = 0; o < m; o++)
            overlap |= (holds[m] & holds[o]) && holds[m] != holds[o];
    for (int64_t sums = 0; sums < (c->two_levels ? 1 << nodes : 1); sums++) {
        uint64_t left = missing;
        int64_t cost = 0;
        for (int64_t m = 0; m < nodes; m++)
            if (sums >> m & 1) {
                left &= ~holds[m];
                cost += sum_size(c);
            }
        cost += __builtin_popcountll(left) * (int64_t)colo_dtype_size(c->dtype);
        least = cost < least ? cost : least;
    }
    *most = overlap ? __builtin_popcountll(missing) * (int64_t)colo_dtype_size(c->dtype) : least;
    return least;
}

/* What ranks of node @m need and none of them holds is what enters it. */
static bool judge_node(court_t *k, int64_t m, bool *found)
{
    t_plans_t *w = k->w;
    enum { MOST = 64 };
    int64_t minimum = 0, bound = 0, in = 0, said = 0, nodes = 0;
    *found = false;
    for (int32_t r = 0; r < w->n; r++)
        nodes = node_of(w->c, r) >= nodes ? node_of(w->c, r) + 1 : nodes;
    if (nodes > (w->c->two_levels ? 8 : MOST) || k->addends > 64)
        return T_WRONG(w, "%lld nodes and %lld addends, which no brute force counts",
                       (long long)nodes, (long long)k->addends);
    for (int32_t r = 0; r < w->n; r++)
        if (node_of(w->c, r) == m) {
            *found = true;
            in += colo_plan_node_bytes(w->plan[r], k->pass).in;
            said += colo_plan_node_bytes(w->plan[r], k->pass).minimum;
        }
    for (int64_t b = 0; *found && b < k->nb; b++)
        for (int64_t s = 0; s < k->ns; s++)
            for (int64_t h = 0; h < k->nc; h++) {
                bool needed = false;
                uint64_t holds[MOST] = {0}, all = 0;
                for (int32_t r = 0; r < w->n; r++) {
                    const int64_t at = node_of(w->c, r), l = k->has[r].addend;
                    needed |= at == m && takes(&k->wants[r], b, s, h);
                    if (gives(&k->has[r], l, b, s, h))
                        holds[at] |= UINT64_C(1) << l;
                }
                for (int64_t l = 0; l < k->addends; l++)
                    all |= UINT64_C(1) << l;
                if (!needed)
                    continue;
                int64_t most;
                const int64_t width = k->edge[h + 1] - k->edge[h];
                minimum += width * fewest(k, all & ~holds[m], holds, nodes, &most);
                bound += width * most;
            }
    if (said < minimum || said > bound || (w->c->two_levels ? in != said : in < said))
        return T_WRONG(w,
                       "node %lld: %lld bytes enter, the minimum is said to be %lld, expected %lld "
                       "to %lld",
                       (long long)m, (long long)in, (long long)said, (long long)minimum,
                       (long long)bound);
    return true;
}

/* All ranks make the last exchange if it carries anything, that of sums if it does. */
static bool judge_exchanges(t_plans_t *w, colo_pass_t pass)
{
    int32_t relays = 0, sums = 0, n;
    for (int32_t r = 0; r < w->n; r++) {
        (void)colo_plan_relays(w->plan[r], pass, true, &n);
        relays += n;
        (void)colo_plan_sums(w->plan[r], pass, true, &n);
        sums += n;
    }
    for (int32_t r = 0; r < w->n; r++)
        if (w->plan[r]->exchange[pass][COLO_RELAYS].all_come != (relays > 0) ||
            (pass == COLO_BACKWARD &&
             w->plan[r]->exchange[COLO_BACKWARD][COLO_NODE_SUMS].all_come != (sums > 0)))
            return T_WRONG(w, "rank %d: second exchange %d, sums %d, with %d and %d messages", r,
                           w->plan[r]->exchange[pass][COLO_RELAYS].all_come,
                           w->plan[r]->exchange[COLO_BACKWARD][COLO_NODE_SUMS].all_come, relays,
                           sums);
    return true;
}

bool t_plans_judge(t_plans_t *w, colo_pass_t pass)
{
    court_t k;
    int64_t surplus = 0;
    t_court_open(&k, w, pass);
    const size_t cells = (size_t)(k.addends * k.nb * k.ns * k.nc + 1);
    uint8_t *got = calloc(2 * (size_t)w->n, cells); /* and collected */
    int32_t *relayed = malloc(cells * sizeof *relayed);
    uint8_t **of = malloc(2 * (size_t)w->n * sizeof *of);
    if (!got || !relayed || !of)
        abort();
    bool ok = judge_exchanges(w, pass), found = true;
    for (int32_t r = 0; ok && r < w->n; r++) {
        of[r] = got + (size_t)r * cells;
        of[w->n + r] = of[r] + (size_t)w->n * cells;
        ok = judge_rank(&k, r, of[r], of[w->n + r], &surplus);
    }
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_sums(&k, r, of, of + w->n, &surplus);
    for (int32_t r = 0; ok && r < w->n; r++)
        ok = judge_relays(&k, r, of, relayed, &surplus);
    if (ok && surplus)
        ok = T_WRONG(w, "%lld more messages are received than sent", (long long)surplus);
    for (int64_t m = 0; ok && found && (w->c->node || w->c->ranks_per_node); m++)
        ok = judge_node(&k, m, &found);
    free(got);
    free(relayed);
    free(of);
    t_court_close(&k);
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
    t_court_open(&f, w, COLO_FORWARD);
    t_court_open(&b, w, COLO_BACKWARD);
    /* y lives where the gradient does: every addend's copy when PARTIAL, own rows otherwise
     */
    for (int32_t r = 0; r < w->n; r++) {
        member_t *m = &f.wants[r];
        free(m->b);
        free(m->s);
        free(m->h);
        t_make_member(&f, m, &c->dst, r, partial);
        if (!partial)
            m->addend = 0;
    }
    int64_t forward = pairing(&f, false), backward = pairing(&b, true);
    t_court_close(&f);
    t_court_close(&b);
    return forward == backward ||
           T_WRONG(w, "<Rx,y> = %lld, <x,R'y> = %lld", (long long)forward, (long long)backward);
}
