/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pieces.c - the routing rule: which blocks meet, and who sends each piece to whom.
 *
 * A side of the plan is a layout seen as blocks: a block is one choice of the coordinates of the
 * dims that split it, and all ranks that share those coordinates are replicas of the block. A piece
 * is where a needed block meets a held block. For each piece every rank can list its holders (the
 * replicas of the one block) and its needers (the replicas of the other), so both ends of a message
 * derive the same sender by the same rule without asking:
 *   the needer itself, else holders on its node, else holders on its rail (same index within their
 *   nodes), else all; n such candidates, m needers that share them: when n divides m, candidate
 *   (first + i) mod n, where the needer is the i-th of those m and first is the ordinal of their
 *   first among all replicas of the needed block; else the piece is cut evenly over the candidates,
 *   or, below 64 KiB, comes whole from candidate (needer's rank) mod n.
 * Forward: needers are destination ranks, holders source ranks; backward the other way round. With
 * PARTIAL gradients each context level is a holder side of its own, and what it sends is an addend.
 *
 * Cost: only blocks that overlap this rank's own are visited (their coordinates by division), so it
 * is O(peers), whatever the size of the world.
 */
#include "bridge/pieces.h"

#include "bridge/index.h"
#include "core/try.h"

#include <stdlib.h>
#include <string.h>

#define SMALL_PIECE 65536 /* bytes below which a piece is not cut */

typedef struct block {
    int64_t coord[COLO_MAX_DIMS]; /* of split dims and the stage; -1: replicated */
} block_t;

/* ---- growing lists ---- */

static void *list_push(colo_list_t *l, size_t size)
{
    if (l->n == l->cap) {
        int64_t cap = l->cap ? 2 * l->cap : 16;
        void *at = realloc(l->at, (size_t)cap * size);
        if (!at)
            return NULL;
        l->at = at;
        l->cap = cap;
    }
    return (char *)l->at + (size_t)l->n++ * size;
}

/* ---- sides, blocks ---- */

static void block_clear(block_t *b)
{
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        b->coord[i] = -1;
}

/* Appends every block coordinate choice of @axis that meets local indices [lo, hi) of the whole
 * axis, from split @i on. @b is a scratch of the choices made so far. */
static colo_status_t visit(colo_list_t *out, const colo_layout_t *l, colo_axis_t axis, int i,
                           int64_t length, int64_t lo, int64_t hi, block_t *b)
{
    if (lo >= hi)
        return COLO_OK;
    if (i == l->nsplits[axis]) {
        block_t *slot = list_push(out, sizeof *slot);
        if (!slot)
            return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)out->n);
        *slot = *b;
        return COLO_OK;
    }
    const colo_split_t *s = &l->split[axis][i];
    int64_t parts = l->grid.extent[s->dim];
    if (parts == 1) {
        b->coord[s->dim] = 0;
        return visit(out, l, axis, i + 1, length, lo, hi, b);
    }
    if (s->kind == COLO_BLOCK) {
        for (int64_t d = colo_block_part(length, parts, lo); lo < hi; d++) {
            int64_t a = colo_block_lo(length, parts, d), e = colo_block_lo(length, parts, d + 1);
            int64_t end = hi < e ? hi : e;
            if (end <= lo)
                continue; /* an empty part: more parts than elements */
            b->coord[s->dim] = d;
            COLO_TRY(visit(out, l, axis, i + 1, e - a, lo - a, end - a, b));
            lo = end;
        }
        return COLO_OK;
    }
    int64_t q = length / (2 * parts);
    while (lo < hi) {
        int64_t end = (lo / q + 1) * q < hi ? (lo / q + 1) * q : hi, local;
        b->coord[s->dim] = colo_zigzag_part(q, parts, lo, &local);
        COLO_TRY(visit(out, l, axis, i + 1, 2 * q, local, local + (end - lo), b));
        lo = end;
    }
    return COLO_OK;
}

static int block_cmp(const void *a, const void *b)
{
    const block_t *x = a, *y = b;
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        if (x->coord[i] != y->coord[i])
            return x->coord[i] < y->coord[i] ? -1 : 1;
    return 0;
}

static void unique_blocks(colo_list_t *l)
{
    block_t *b = l->at;
    int64_t n = 0;
    if (l->n > 1)
        qsort(b, (size_t)l->n, sizeof *b, block_cmp);
    for (int64_t i = 0; i < l->n; i++)
        if (n == 0 || block_cmp(&b[n - 1], &b[i]) != 0)
            b[n++] = b[i];
    l->n = n;
}

/* Blocks of @side's rows that meet any of my rows @mine. */
static colo_status_t visit_rows(colo_builder_t *w, const colo_side_t *side, const colo_runs_t *mine)
{
    block_t b;
    block_clear(&b);
    w->rows.n = 0;
    if (side->full) {
        block_t *slot = mine->rows > 0 ? list_push(&w->rows, sizeof *slot) : NULL;
        if (slot)
            *slot = b;
        return mine->rows > 0 && !slot ? colo_fail(COLO_ERR_NOMEM, "plan: list of blocks")
                                       : COLO_OK;
    }
    const colo_posmap_t *map = side->map;
    for (int64_t i = 0; i < mine->n; i++) {
        int64_t r0 = mine->run[i].row, r1 = r0 + mine->run[i].count, a = 0, z = map->n;
        while (a < z) { /* first map run that ends past r0 */
            int64_t mid = a + (z - a) / 2;
            if (map->by_row[mid].row + map->by_row[mid].count <= r0)
                a = mid + 1;
            else
                z = mid;
        }
        for (; a < map->n && map->by_row[a].row < r1; a++) {
            const colo_map_run_t *m = &map->by_row[a];
            int64_t lo = m->row > r0 ? m->row : r0;
            int64_t hi = m->row + m->count < r1 ? m->row + m->count : r1;
            COLO_TRY(visit(&w->rows, side->layout, COLO_ROWS, 0, map->positions,
                           m->pos + (lo - m->row), m->pos + (hi - m->row), &b));
        }
    }
    unique_blocks(&w->rows);
    return COLO_OK;
}

/* The ranks of a block, ascending: free dims counted up, first dim fastest. */
static colo_status_t list_ranks(colo_list_t *out, const colo_grid_t *g, const block_t *b)
{
    int64_t c[COLO_MAX_DIMS] = {0}, rank = g->offset;
    out->n = 0;
    for (int i = 0; i < g->ndims; i++)
        rank += b->coord[i] > 0 ? b->coord[i] * g->stride[i] : 0;
    for (;;) {
        int64_t *slot = list_push(out, sizeof *slot);
        if (!slot)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld replicas of a block", (long long)out->n);
        *slot = rank;
        int i = 0;
        for (; i < g->ndims; i++) {
            if (b->coord[i] >= 0)
                continue;
            if (++c[i] < g->extent[i]) {
                rank += g->stride[i];
                break;
            }
            rank -= (g->extent[i] - 1) * g->stride[i];
            c[i] = 0;
        }
        if (i == g->ndims)
            return COLO_OK;
    }
}

/* The coordinates that make @coords' block on a side; the stage counts as chosen. */
static void block_of(const colo_side_t *side, const int64_t *coords, block_t *b)
{
    const colo_layout_t *l = side->layout;
    block_clear(b);
    for (int a = 0; a < 3; a++)
        for (int i = 0; (a != COLO_ROWS || !side->full) && i < l->nsplits[a]; i++)
            b->coord[l->split[a][i].dim] = coords[l->split[a][i].dim];
    if (l->stage_dim >= 0)
        b->coord[l->stage_dim] = l->stage;
    for (int i = 0; side->level_fixed && i < COLO_MAX_DIMS; i++)
        if (side->fixed[i] >= 0)
            b->coord[i] = side->fixed[i];
}

/* ---- the sender of a piece ---- */

typedef struct choice {
    int64_t n, first; /* candidates: holders [first], every holder that passes tier and key */
    int tier;         /* 0 the needer itself, 1 its node, 2 its rail, 3 all */
} choice_t;

static int64_t node_of(const colo_builder_t *w, int64_t rank)
{
    return w->per_node ? rank / w->per_node : 0;
}

static bool candidate(const colo_builder_t *w, int tier, int64_t holder, int64_t needer)
{
    if (tier == 1)
        return node_of(w, holder) == node_of(w, needer);
    return tier == 3 || holder % w->per_node == needer % w->per_node;
}

static int tier_of(const colo_builder_t *w, int64_t needer, int64_t *count)
{
    const int64_t *h = w->holders.at;
    int64_t rail = 0, node = 0;
    for (int64_t i = 0; i < w->holders.n; i++) {
        if (h[i] == needer)
            return 0;
        node += candidate(w, 1, h[i], needer);
        rail += w->per_node && candidate(w, 2, h[i], needer);
    }
    *count = node ? node : rail ? rail : w->holders.n;
    return node ? 1 : rail ? 2 : 3;
}

static int64_t nth_candidate(const colo_builder_t *w, int tier, int64_t needer, int64_t k)
{
    const int64_t *h = w->holders.at;
    for (int64_t i = 0; i < w->holders.n; i++)
        if (candidate(w, tier, h[i], needer) && k-- == 0)
            return h[i];
    return -1; /* not reached: k < count */
}

static colo_status_t push_entry(colo_builder_t *w, int64_t peer, const colo_entry_t *piece)
{
    colo_entry_t *e = list_push(w->out, sizeof *e);
    if (!e)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)w->out->n);
    *e = *piece;
    e->peer = peer;
    return COLO_OK;
}

int colo_entry_cmp(const void *a, const void *b)
{
    const colo_entry_t *x = a, *y = b;
    const int64_t kx[] = {x->peer, x->region.level, x->region.b[0], x->region.s[0], x->region.h[0]};
    const int64_t ky[] = {y->peer, y->region.level, y->region.b[0], y->region.s[0], y->region.h[0]};
    for (int i = 0; i < 5; i++)
        if (kx[i] != ky[i])
            return kx[i] < ky[i] ? -1 : 1;
    return 0;
}

/* Cuts the piece in w->pieces into @n parts along one axis and pushes part @k for @peer. */
static colo_status_t push_part(colo_builder_t *w, int64_t n, int64_t k, int64_t peer)
{
    colo_entry_t *p = w->pieces.at;
    int64_t rows = 0, at = 0;
    for (int64_t i = 0; i < w->pieces.n; i++)
        rows += p[i].region.s[1] - p[i].region.s[0];
    int64_t size[3] = {p->region.b[1] - p->region.b[0], rows, p->region.h[1] - p->region.h[0]};
    /* samples or rows, whichever splits without rest, else the longer; features only when there are
     * fewer of both than candidates, so that boxes stay (samples, rows) wherever they can */
    int axis = size[0] % n == 0 ? 0 : size[1] % n == 0 ? 1 : size[0] >= size[1] ? 0 : 1;
    if (size[axis] < n && size[2] > size[axis])
        axis = 2;
    int64_t lo = colo_block_lo(size[axis], n, k), hi = colo_block_lo(size[axis], n, k + 1);
    for (int64_t i = 0; i < w->pieces.n && lo < hi; i++) {
        colo_entry_t e = p[i];
        if (axis == 1) {
            int64_t len = e.region.s[1] - e.region.s[0];
            int64_t a = lo > at ? lo - at : 0, b = hi - at < len ? hi - at : len;
            at += len;
            if (a >= b)
                continue;
            e.region.s[1] = e.region.s[0] + b;
            e.region.s[0] += a;
            e.place.src_row += a;
            e.place.dst_row += a;
        } else {
            int64_t *range = axis == 0 ? e.region.b : e.region.h;
            range[1] = range[0] + hi;
            range[0] += lo;
        }
        COLO_TRY(push_entry(w, peer, &e));
    }
    return COLO_OK;
}

/* Pushes what @needer gets of the current piece from @only (or from anyone, -1). peer is the sender
 * when the list is of receives, the needer when it is of sends; the needer itself is peer ==
 * needer. */
static colo_status_t assign(colo_builder_t *w, int64_t bytes, int64_t ordinal, int64_t only,
                            bool sends)
{
    const int64_t *nd = w->needers.at;
    colo_entry_t *p = w->pieces.at;
    int64_t needer = nd[ordinal], n = 0, m = 0, first = -1, before = 0;
    int tier = tier_of(w, needer, &n);
    if (tier == 0) {
        for (int64_t i = 0; !sends && i < w->pieces.n; i++)
            COLO_TRY(push_entry(w, needer, &p[i]));
        return COLO_OK;
    }
    for (int64_t i = 0; i < w->needers.n; i++) {
        int64_t other;
        if (n == 1 || !candidate(w, tier, nd[i], needer))
            continue;                            /* one candidate: it serves whoever comes */
        if (tier_of(w, nd[i], &other) == tier) { /* ordinals may have gaps where some hold it */
            first = first < 0 ? i : first;
            before += i < ordinal;
            m++;
        }
    }
    if (n == 1 || m % n == 0 || bytes < SMALL_PIECE) {
        int64_t k = n == 1 ? 0 : m % n == 0 ? (before + first) % n : needer % n;
        int64_t sender = nth_candidate(w, tier, needer, k);
        for (int64_t i = 0; (only < 0 || sender == only) && i < w->pieces.n; i++)
            COLO_TRY(push_entry(w, sends ? needer : sender, &p[i]));
        return COLO_OK;
    }
    for (int64_t k = 0; k < n; k++) {
        int64_t sender = nth_candidate(w, tier, needer, k);
        if (only < 0 || sender == only)
            COLO_TRY(push_part(w, n, k, sends ? needer : sender));
    }
    return COLO_OK;
}

/* ---- meeting of blocks ---- */

/* w->pieces = my rows x the other block's rows, refined by the runs of both and merged where both
 * are contiguous; sorted by row. Samples and features are one range each. */
static colo_status_t intersect(colo_builder_t *w, const int64_t b[2], const int64_t h[2],
                               int32_t level, const colo_runs_t *mine, const colo_runs_t *theirs,
                               bool mine_is_src)
{
    w->pieces.n = 0;
    for (int64_t i = 0; i < mine->n; i++)
        for (int64_t j = 0; j < theirs->n; j++) {
            const colo_run_t *x = &mine->run[i], *y = &theirs->run[j];
            int64_t lo = x->row > y->row ? x->row : y->row;
            int64_t hi =
                x->row + x->count < y->row + y->count ? x->row + x->count : y->row + y->count;
            if (lo >= hi)
                continue;
            colo_entry_t *e = list_push(&w->pieces, sizeof *e);
            if (!e)
                return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)w->pieces.n);
            int64_t a = x->local + (lo - x->row), z = y->local + (lo - y->row);
            bool whole =
                w->cfg->output == COLO_FULL_SEQ; /* all rows in memory, whoever owns them */
            *e = (colo_entry_t){
                .region = {.b = {b[0], b[1]}, .s = {lo, hi}, .h = {h[0], h[1]}, .level = level},
                .place = {.src_row = mine_is_src ? a : z,
                          .dst_row = whole         ? lo
                                     : mine_is_src ? z
                                                   : a},
            };
        }
    colo_entry_t *p = w->pieces.at;
    int64_t n = 0;
    if (w->pieces.n > 1)
        qsort(p, (size_t)w->pieces.n, sizeof *p, colo_entry_cmp);
    for (int64_t i = 0; i < w->pieces.n; i++) {
        int64_t len = n ? p[n - 1].region.s[1] - p[n - 1].region.s[0] : 0;
        if (n && p[n - 1].region.s[1] == p[i].region.s[0] &&
            p[n - 1].place.src_row + len == p[i].place.src_row &&
            p[n - 1].place.dst_row + len == p[i].place.dst_row)
            p[n - 1].region.s[1] = p[i].region.s[1];
        else
            p[n++] = p[i];
    }
    w->pieces.n = n;
    return COLO_OK;
}

static int64_t piece_bytes(const colo_builder_t *w)
{
    const colo_entry_t *p = w->pieces.at;
    int64_t rows = 0;
    for (int64_t i = 0; i < w->pieces.n; i++)
        rows += p[i].region.s[1] - p[i].region.s[0];
    return rows * (p->region.b[1] - p->region.b[0]) * (p->region.h[1] - p->region.h[0]) *
           (int64_t)w->elem;
}

colo_status_t colo_pieces_meet(colo_builder_t *w, const colo_side_t *mine,
                               const colo_side_t *theirs, int32_t level, bool i_need,
                               bool mine_is_src)
{
    const colo_shape_t *shape = &w->cfg->shape;
    int64_t coords[COLO_MAX_DIMS];
    colo_span_t b, h, t[2 * COLO_MAX_SPANS];
    colo_runs_t my_runs = {0};
    block_t me, clear;
    colo_status_t st = COLO_OK;
    if (!colo_layout_holds(mine->layout, w->plan->rank))
        return COLO_OK;
    COLO_TRY(colo_grid_coords(&mine->layout->grid, w->plan->rank, coords));
    for (int i = 0; mine->level_fixed && i < COLO_MAX_DIMS; i++)
        if (mine->fixed[i] >= 0 && mine->fixed[i] != coords[i])
            return COLO_OK; /* another rank's level */
    if (!colo_axis_spans(mine->layout, COLO_SAMPLES, coords, shape->samples, t))
        return COLO_OK;
    b = t[0];
    if (!colo_axis_spans(mine->layout, COLO_FEATURES, coords, shape->features, t))
        return COLO_OK;
    h = t[0];
    w->out = i_need ? &w->recvs : &w->sends;
    block_of(mine, coords, &me);
    block_clear(&clear);
    w->samples.n = w->features.n = 0;
    COLO_TRY_GOTO(st, colo_layout_runs(mine->layout, mine->map, coords, mine->full, &my_runs),
                  done);
    COLO_TRY_GOTO(
        st, visit(&w->samples, theirs->layout, COLO_SAMPLES, 0, shape->samples, b.lo, b.hi, &clear),
        done);
    block_clear(&clear);
    COLO_TRY_GOTO(
        st,
        visit(&w->features, theirs->layout, COLO_FEATURES, 0, shape->features, h.lo, h.hi, &clear),
        done);
    COLO_TRY_GOTO(st, visit_rows(w, theirs, &my_runs), done);
    for (int64_t i = 0; i < w->samples.n; i++)
        for (int64_t j = 0; j < w->rows.n; j++)
            for (int64_t k = 0; k < w->features.n; k++) {
                int64_t at[COLO_MAX_DIMS];
                block_t peer;
                const block_t *x[3] = {&((block_t *)w->samples.at)[i], &((block_t *)w->rows.at)[j],
                                       &((block_t *)w->features.at)[k]};
                for (int d = 0; d < COLO_MAX_DIMS; d++) {
                    at[d] = 0;
                    for (int a = 0; a < 3; a++)
                        at[d] = x[a]->coord[d] > 0 ? x[a]->coord[d] : at[d];
                }
                block_of(theirs, at, &peer);
                if (!colo_axis_spans(theirs->layout, COLO_SAMPLES, at, shape->samples, t))
                    continue;
                int64_t pb[2] = {t[0].lo > b.lo ? t[0].lo : b.lo, t[0].hi < b.hi ? t[0].hi : b.hi};
                if (!colo_axis_spans(theirs->layout, COLO_FEATURES, at, shape->features, t))
                    continue;
                int64_t ph[2] = {t[0].lo > h.lo ? t[0].lo : h.lo, t[0].hi < h.hi ? t[0].hi : h.hi};
                COLO_TRY_GOTO(
                    st,
                    colo_layout_runs(theirs->layout, theirs->map, at, theirs->full, &w->peer_runs),
                    done);
                COLO_TRY_GOTO(st, intersect(w, pb, ph, level, &my_runs, &w->peer_runs, mine_is_src),
                              done);
                if (w->pieces.n == 0)
                    continue;
                const block_t *hold = i_need ? &peer : &me, *need = i_need ? &me : &peer;
                const colo_side_t *hs = i_need ? theirs : mine, *ns = i_need ? mine : theirs;
                COLO_TRY_GOTO(st, list_ranks(&w->holders, &hs->layout->grid, hold), done);
                COLO_TRY_GOTO(st, list_ranks(&w->needers, &ns->layout->grid, need), done);
                int64_t bytes = piece_bytes(w);
                for (int64_t o = 0; o < w->needers.n; o++) {
                    if (i_need && ((int64_t *)w->needers.at)[o] != w->plan->rank)
                        continue;
                    COLO_TRY_GOTO(st, assign(w, bytes, o, i_need ? -1 : w->plan->rank, !i_need),
                                  done);
                }
            }
done:
    colo_runs_deinit(&my_runs);
    return st;
}
