/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_ragged.c - see ref_ragged.h.
 *
 * Writes down every place (q, p) of a replica's axis in order, takes the chunks of a rank by
 * walking all chunks, slices what is left, and looks up which row lies at each place. No local
 * index and no owner is computed: both are where an entry ends up in a list.
 */
#include "ref/ref_ragged.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A rank's index among the parts that the chosen splits of one axis make; the first is major. */
typedef enum chosen { ALL, CONTEXT, OTHERS } chosen_t;

static int64_t parts_of(const ref_side_t *side, int axis, chosen_t which, int64_t rank,
                        int64_t *index)
{
    int64_t parts = 1;
    *index = 0;
    for (int k = 0; k < side->nsplits[axis]; k++) {
        const ref_split_t *sp = &side->split[axis][k];
        if ((which == CONTEXT && !sp->context) || (which == OTHERS && sp->context))
            continue;
        int64_t extent = ref_side_extent(side, sp->dim);
        *index = *index * extent + ref_side_coord(side, rank, sp->dim);
        parts *= extent;
    }
    return parts;
}

int64_t ref_ragged_parts(const ref_side_t *side)
{
    int64_t unused;
    return parts_of(side, 0, ALL, side->offset, &unused);
}

int64_t ref_ragged_addends(const ref_ragged_t *c)
{
    int64_t unused;
    return parts_of(&c->dst, 1, CONTEXT, c->dst.offset, &unused);
}

static bool is_zigzag(const ref_side_t *side)
{
    for (int k = 0; k < side->nsplits[1]; k++)
        if (side->split[1][k].context && side->split[1][k].cut == REF_ZIGZAG)
            return true;
    return false;
}

int64_t ref_ragged_total(const ref_ragged_t *c)
{
    int64_t n = 0;
    for (int64_t e = 0; e < c->table.nseg; e++)
        n += c->table.rows[e];
    return n;
}

/* All rows of all segments, in order of (e, r). */
static ref_row_t *all_rows(const ref_ragged_t *c)
{
    const ref_segments_t *t = &c->table;
    ref_row_t *row = ref_zeros(ref_ragged_total(c), sizeof *row);
    int64_t g = 0;
    for (int64_t e = 0; e < t->nseg; e++)
        for (int64_t r = 0; r < t->rows[e]; r++, g++)
            row[g] = (ref_row_t){.g = g,
                                 .e = e,
                                 .r = r,
                                 .q = t->seq[e],
                                 .p = t->pos ? t->pos[e] + r : t->row_pos[g]};
    return row;
}

/* Keeps shard @j of @m of list[0..n) in place; returns its length. */
static int64_t slice(ref_row_t *list, int64_t n, int64_t m, int64_t j)
{
    int64_t kept = 0;
    for (int64_t i = j * n / m; i < (j + 1) * n / m; i++)
        list[kept++] = list[i];
    return kept;
}

static bool begin(ref_rows_t *part, const ref_side_t *side, int64_t h, int64_t rank)
{
    memset(part, 0, sizeof *part);
    if (!ref_side_has(side, rank))
        return false;
    if (side->stage_dim && ref_side_coord(side, rank, side->stage_dim) != side->stage)
        return false;
    int64_t j, m = parts_of(side, 2, ALL, rank, &j);
    part->holds = true;
    part->h = ref_zeros(h, sizeof *part->h);
    for (int64_t i = j * h / m; i < (j + 1) * h / m; i++)
        part->h[part->nh++] = i;
    parts_of(side, 0, ALL, rank, &part->replica);
    parts_of(side, 1, CONTEXT, rank, &part->addend);
    return true;
}

void ref_ragged_src(ref_rows_t *part, const ref_ragged_t *c, int64_t rank)
{
    if (!begin(part, &c->src, c->h, rank))
        return;
    int64_t total = ref_ragged_total(c), jc, jo;
    ref_row_t *every = all_rows(c);
    part->place = ref_zeros(total, sizeof *part->place);
    for (int64_t g = 0; g < total; g++)
        if (c->table.src_dp[every[g].e] == part->replica)
            part->place[part->axis++] = every[g];
    int64_t mc = parts_of(&c->src, 1, CONTEXT, rank, &jc);
    int64_t mo = parts_of(&c->src, 1, OTHERS, rank, &jo);
    part->axis = slice(part->place, part->axis, mc * mo, jc * mo + jo);
    for (int64_t i = 0; i < part->axis; i++)
        part->place[i].index = i;
    part->n = part->axis;
    part->row = ref_zeros(part->n, sizeof *part->row);
    memcpy(part->row, part->place, (size_t)part->n * sizeof *part->row);
    free(every);
}

void ref_ragged_dst(ref_rows_t *part, const ref_ragged_t *c, int64_t rank, bool full)
{
    if (!begin(part, &c->dst, c->h, rank))
        return;
    const ref_segments_t *t = &c->table;
    int64_t sum = 0, jc, jo, total = ref_ragged_total(c);
    for (int64_t q = 0; q < t->nseq; q++)
        sum += t->seq_len[q];
    part->place = ref_zeros(sum, sizeof *part->place);
    int64_t mc = parts_of(&c->dst, 1, CONTEXT, rank, &jc);
    int64_t mo = parts_of(&c->dst, 1, OTHERS, rank, &jo);
    int64_t chunks = is_zigzag(&c->dst) ? 2 * mc : mc;
    for (int64_t q = 0; q < t->nseq; q++) {
        if (t->seq_dp[q] != part->replica)
            continue;
        if (full || mc == 1) {
            for (int64_t p = 0; p < t->seq_len[q]; p++)
                part->place[part->axis++] = (ref_row_t){.g = -1, .q = q, .p = p};
            continue;
        }
        int64_t chunk = t->seq_len[q] / chunks;
        for (int64_t k = 0; k < chunks; k++)
            if (k == jc || (chunks == 2 * mc && k == chunks - 1 - jc))
                for (int64_t i = 0; i < chunk; i++)
                    part->place[part->axis++] = (ref_row_t){.g = -1, .q = q, .p = k * chunk + i};
    }
    if (!full)
        part->axis = slice(part->place, part->axis, mo, jo);
    /* which row lies where */
    ref_row_t *every = all_rows(c);
    int64_t *start = ref_zeros(t->nseq + 1, sizeof *start), *lies = ref_zeros(sum, sizeof *lies);
    for (int64_t q = 0; q < t->nseq; q++)
        start[q + 1] = start[q] + t->seq_len[q];
    for (int64_t g = 0; g < total; g++)
        lies[start[every[g].q] + every[g].p] = g + 1;
    part->row = ref_zeros(part->axis, sizeof *part->row);
    for (int64_t i = 0; i < part->axis; i++) {
        ref_row_t *where = &part->place[i];
        int64_t g = lies[start[where->q] + where->p] - 1;
        if (g >= 0)
            *where = every[g];
        where->index = i;
        if (g >= 0)
            part->row[part->n++] = *where;
    }
    free(every);
    free(start);
    free(lies);
}

void ref_rows_free(ref_rows_t *part)
{
    free(part->place);
    free(part->row);
    free(part->h);
    memset(part, 0, sizeof *part);
}

/* ---- values ---- */

static int64_t code_x(const ref_ragged_t *c, int64_t g, int64_t h)
{
    return 1 + h + c->h * g;
}

static int64_t code_d(int64_t g, int64_t h, int64_t total)
{
    return 2 + h * total + (total - 1 - g);
}

/* What the caller's buffer has before forward; negative: in floats no row has it. */
static int64_t code_text(const ref_ragged_t *c, const ref_row_t *where, int64_t h)
{
    return -(3 + h + c->h * (where->p + 509 * where->q));
}

static double addend_value(const ref_ragged_t *c, int64_t addend, int64_t g, int64_t h,
                           const char *dtype, int64_t salt)
{
    int64_t v = ref_code_partial(addend, g, salt, h, ref_partial_bits(dtype));
    if (!c->rough)
        return (double)v;
    return ldexp((double)v, -(int)(ref_code_partial(addend, g, salt + 1000, h, 20) & 15));
}

/* A running sum; f64 adds in double, all others in float. */
typedef struct sum {
    double wide;
    volatile float narrow;
    bool begun;
} sum_t;

static void add(sum_t *s, double wide, float narrow)
{
    s->wide = s->begun ? s->wide + wide : wide;
    s->narrow = s->begun ? s->narrow + narrow : narrow;
    s->begun = true;
}

/* Has a rank of node @m @addend of column @h of replica @d? */
static bool node_holds(const ref_ragged_t *c, int64_t m, int64_t addend, int64_t d, int64_t h)
{
    const ref_side_t *s = &c->dst;
    for (int64_t r = s->offset; r < s->offset + ref_side_size(s); r++) {
        int64_t j, replica, context;
        const int64_t n = parts_of(s, 2, ALL, r, &j);
        parts_of(s, 0, ALL, r, &replica);
        parts_of(s, 1, CONTEXT, r, &context);
        if (c->node[r] == m && replica == d && context == addend && j * c->h / n <= h &&
            h < (j + 1) * c->h / n &&
            (!s->stage_dim || ref_side_coord(s, r, s->stage_dim) == s->stage))
            return true;
    }
    return false;
}

/* The node that adds up each addend: the one with most of them, then the one with most of the
 * rest. */
static int64_t *homes(const ref_ragged_t *c, int64_t d, int64_t h, int64_t nodes)
{
    const int64_t n = ref_ragged_addends(c);
    int64_t *home = ref_zeros(n, sizeof *home);
    for (int64_t a = 0; a < n; a++)
        home[a] = -1;
    for (int64_t left = n, best = 0, most = 0; left > 0; left -= most) {
        most = 0;
        for (int64_t m = 0; m < nodes; m++) {
            int64_t has = 0;
            for (int64_t a = 0; a < n; a++)
                has += home[a] < 0 && node_holds(c, m, a, d, h);
            best = has > most ? m : best;
            most = has > most ? has : most;
        }
        for (int64_t a = 0; a < n; a++)
            if (home[a] < 0 && node_holds(c, best, a, d, h))
                home[a] = best;
    }
    return home;
}

/* In the order of nodes, those of a node in rank order. Rounds once at the end. */
static void put_sum(const ref_ragged_t *c, int64_t d, int64_t g, int64_t h, const char *dtype,
                    int64_t salt, void *out)
{
    const int64_t n = ref_ragged_addends(c);
    int64_t nodes = 1;
    for (int64_t r = c->dst.offset; c->node && r < c->dst.offset + ref_side_size(&c->dst); r++)
        nodes = c->node[r] >= nodes ? c->node[r] + 1 : nodes;
    int64_t *home = c->node && c->rough ? homes(c, d, h, nodes) : ref_zeros(n, sizeof *home);
    sum_t all = {.begun = false};
    for (int64_t m = 0; m < nodes; m++) {
        sum_t node = {.begun = false};
        int64_t has = 0;
        for (int64_t a = 0; a < n; a++)
            has += home[a] == m;
        for (int64_t a = 0; a < n; a++) {
            const double v = addend_value(c, a, g, h, dtype, salt);
            if (home[a] == m)
                add(c->node && has >= c->least ? &node : &all, v, (float)v);
        }
        if (node.begun)
            add(&all, node.wide, node.narrow);
    }
    free(home);
    ref_encode_number(dtype, strcmp(dtype, "f64") == 0 ? all.wide : (double)all.narrow, out);
}

/* Which places of @part the rank owns. */
static bool *own_places(const ref_ragged_t *c, const ref_rows_t *part, int64_t rank)
{
    const ref_segments_t *t = &c->table;
    int64_t *start = ref_zeros(t->nseq + 1, sizeof *start);
    for (int64_t q = 0; q < t->nseq; q++)
        start[q + 1] = start[q] + t->seq_len[q];
    bool *mine = ref_zeros(start[t->nseq], sizeof *mine),
         *owned = ref_zeros(part->axis, sizeof *owned);
    ref_rows_t own;
    ref_ragged_dst(&own, c, rank, false);
    for (int64_t i = 0; i < own.axis; i++)
        mine[start[own.place[i].q] + own.place[i].p] = true;
    for (int64_t i = 0; i < part->axis; i++)
        owned[i] = mine[start[part->place[i].q] + part->place[i].p];
    ref_rows_free(&own);
    free(start);
    free(mine);
    return owned;
}

typedef struct tensor {
    const ref_ragged_t *c;
    const char *dtype;
    int64_t salt, total;
    ref_rows_t part;
    bool *owned; /* [axis of part]: the rank's own places, where the gradient is not zero */
} tensor_t;

/* The gradient that comes in at one place. */
static void put_d(const tensor_t *t, const ref_row_t *where, int64_t h, void *out)
{
    const ref_ragged_t *c = t->c;
    bool partial = c->full && c->partial;
    if (!partial && !t->owned[where->index])
        memset(out, 0, ref_dtype_size(t->dtype)); /* DISJOINT declares it */
    else if (where->g < 0)
        ref_encode_move(t->dtype,
                        code_text(c, where, h) * 3 - (partial ? t->part.addend : 0) - t->salt, out);
    else if (partial)
        ref_encode_number(t->dtype, addend_value(c, t->part.addend, where->g, h, t->dtype, t->salt),
                          out);
    else
        ref_encode_move(t->dtype, code_d(where->g, h, t->total) + 5 * t->salt, out);
}

static void put(const tensor_t *t, ref_role_t role, const ref_row_t *where, int64_t h, void *out)
{
    const ref_ragged_t *c = t->c;
    switch (role) {
    case REF_X:
        ref_encode_move(t->dtype, code_x(c, where->g, h) + 3 * t->salt, out);
        break;
    case REF_Y:
        if (where->g >= 0) {
            ref_encode_move(t->dtype, code_x(c, where->g, h) + 3 * t->salt, out);
            break;
        }
        ref_encode_move(t->dtype, code_text(c, where, h) - t->salt, out);
        break;
    case REF_INTO:
        ref_encode_move(t->dtype, code_text(c, where, h) - t->salt, out);
        break;
    case REF_DY:
        put_d(t, where, h, out);
        break;
    case REF_DX:
        if (c->full && c->partial)
            put_sum(c, c->table.seq_dp[where->q], where->g, h, t->dtype, t->salt, out);
        else
            ref_encode_move(t->dtype, code_d(where->g, h, t->total) + 5 * t->salt, out);
        break;
    }
}

void ref_ragged_tensor(const ref_ragged_t *c, ref_role_t role, int64_t rank, const char *dtype,
                       int64_t salt, void *out, int64_t *rows, int64_t *nh)
{
    bool at_src = role == REF_X || role == REF_DX;
    bool whole = c->merged || role == REF_INTO;
    tensor_t t = {.c = c, .dtype = dtype, .salt = salt, .total = ref_ragged_total(c)};
    if (at_src)
        ref_ragged_src(&t.part, c, rank);
    else
        ref_ragged_dst(&t.part, c, rank, c->full);
    if (!at_src)
        t.owned = own_places(c, &t.part, rank);
    const ref_row_t *list = whole && !at_src ? t.part.place : t.part.row;
    *rows = whole && !at_src ? t.part.axis : t.part.n;
    *nh = t.part.nh;
    size_t size = ref_dtype_size(dtype);
    for (int64_t i = 0; out && i < *rows; i++)
        for (int64_t k = 0; k < *nh; k++)
            put(&t, role, &list[i], t.part.h[k],
                (unsigned char *)out + (size_t)(i * *nh + k) * size);
    free(t.owned);
    ref_rows_free(&t.part);
}

/* ---- bytes ---- */

static bool *members_of(const ref_ragged_t *c, const ref_rows_t *part)
{
    bool *member = ref_zeros(ref_ragged_total(c) * c->h, sizeof *member);
    for (int64_t i = 0; i < part->n; i++)
        for (int64_t k = 0; k < part->nh; k++)
            member[part->row[i].g * c->h + part->h[k]] = true;
    return member;
}

int64_t ref_ragged_receives(const ref_ragged_t *c, int64_t rank, bool backward)
{
    bool partial = c->full && c->partial;
    ref_rows_t src, dst;
    ref_ragged_src(&src, c, rank);
    ref_ragged_dst(&dst, c, rank, backward ? partial : c->full);
    bool *needs = members_of(c, backward ? &src : &dst),
         *has = members_of(c, backward ? &dst : &src);
    int64_t copies = backward && partial ? ref_ragged_addends(c) : 1, n = 0;
    for (int64_t i = 0; i < ref_ragged_total(c) * c->h; i++)
        if (needs[i])
            n += copies - has[i];
    free(needs);
    free(has);
    ref_rows_free(&src);
    ref_rows_free(&dst);
    return n;
}
