/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packed.c - packed sequences as a side of a plan: which rows a block owns, which blocks own given
 * rows.
 *
 * A packing becomes a list of pieces, whatever its split is: in order of rows, and in order of the
 * context rank that holds them. On both sides local rows ascend with the rows of the batch, so a
 * block is a slice of the second list, and the owners of rows are a slice of the first.
 */
#include "bridge/layout/packed.h"

#include "bridge/layout/index.h"
#include "core/error.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- what a layout means here ---- */

colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *l, bool in_order,
                               const char *what, const char *side)
{
    *axes = (colo_ragged_axes_t){.replicas = colo_layout_parts(l, COLO_SAMPLES), .cp = 1, .sp = 1};
    if (l->map != COLO_MAP_IDENTITY)
        return colo_fail(COLO_ERR_LAYOUT,
                         "%s: the %s layout has a position map, expected none; the positions "
                         "of a ragged batch are in its tables",
                         what, side);
    for (int i = 0; i < l->nsplits[COLO_ROWS]; i++) {
        const colo_split_t *s = &l->split[COLO_ROWS][i];
        if (in_order && s->kind != COLO_BLOCK && l->grid.extent[s->dim] > 1)
            return colo_fail(COLO_ERR_LAYOUT,
                             "%s: the %s layout splits rows %s over '%s', expected "
                             "BLOCK: ranks hold the rows of a batch in table order; clear the "
                             "split of rows and make it with colo_layout_split_context()",
                             what, side, s->kind == COLO_ZIGZAG ? "ZIGZAG" : "CEIL",
                             l->grid.name[s->dim]);
        if (in_order || !s->context) {
            *(s->context ? &axes->cp : &axes->sp) *= l->grid.extent[s->dim];
            continue;
        }
        if (i > 0)
            return colo_fail(COLO_ERR_LAYOUT,
                             "%s: the %s layout splits rows in context over '%s' as "
                             "split %d, expected as its first and only context split",
                             what, side, l->grid.name[s->dim], i);
        axes->cp = l->grid.extent[s->dim];
        axes->zigzag = s->kind == COLO_ZIGZAG && axes->cp > 1;
    }
    return COLO_OK;
}

static bool counts(const colo_layout_t *l, colo_axis_t axis, int i, int context)
{
    return context < 0 || l->split[axis][i].context == (context == 1);
}

int64_t colo_ragged_part(const colo_layout_t *l, colo_axis_t axis, int context,
                         const int64_t *coords)
{
    int64_t index = 0;
    for (int i = 0; i < l->nsplits[axis]; i++)
        if (counts(l, axis, i, context))
            index = index * l->grid.extent[l->split[axis][i].dim] + coords[l->split[axis][i].dim];
    return index;
}

void colo_ragged_set_part(const colo_layout_t *l, colo_axis_t axis, int context, int64_t index,
                          int64_t *coords)
{
    for (int i = l->nsplits[axis] - 1; i >= 0; i--)
        if (counts(l, axis, i, context)) {
            const int32_t dim = l->split[axis][i].dim;
            coords[dim] = index % l->grid.extent[dim];
            index /= l->grid.extent[dim];
        }
}

/* ---- checks ---- */

static colo_status_t check_present(const colo_packed_t *p, const colo_packing_t *t)
{
    const bool table = t->split == COLO_PACKING_TABLE;
    const bool cuts = t->split == COLO_PACKING_BLOCK || t->split == COLO_PACKING_ZIGZAG;
    if (t->nseqs < 0 || (unsigned)t->split > COLO_PACKING_TABLE)
        return colo_fail(COLO_ERR_ARG,
                         "%s: %lld sequences, split %d; expected >= 0 sequences and a split of 0 "
                         "(BLOCK), 1 (ZIGZAG), 2 (WHOLE) or 3 (TABLE)",
                         p->what, (long long)t->nseqs, (int)t->split);
    const int64_t pieces = table && t->piece_start ? t->piece_start[t->nseqs] : 0;
    const struct {
        const char *name;
        const int64_t *given;
        bool needed, allowed;
    } one[] = {{"seq_len", t->seq_len, t->nseqs > 0, true},
               {"seq_cp", t->seq_cp, false, cuts},
               {"seq_first", t->seq_first, false, cuts},
               {"piece_start", t->piece_start, table, table},
               {"piece_len", t->piece_len, pieces > 0, table},
               {"piece_owner", t->piece_owner, pieces > 0, table}};
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++)
        if (one[i].given ? !one[i].allowed : one[i].needed)
            return colo_fail(COLO_ERR_ARG, "%s: table %s is %s, expected %s with split %s", p->what,
                             one[i].name, one[i].given ? "given" : "NULL",
                             one[i].given ? "NULL" : "its entries",
                             t->split == COLO_PACKING_BLOCK    ? "BLOCK"
                             : t->split == COLO_PACKING_ZIGZAG ? "ZIGZAG"
                             : table                           ? "TABLE"
                                                               : "WHOLE");
    return COLO_OK;
}

/* length / unit, and what remains. A division per sequence costs as much as the rest of the check;
 * a unit is a power of two, usually. */
static uint64_t rest(uint64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? length % unit : length & (unit - 1);
}
static int64_t times(int64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? (int64_t)((uint64_t)length / unit) : length >> __builtin_ctzll(unit);
}

/* How sequence @q is cut: @n pieces from context rank @first on, of @unit each if there is no
 * table. */
typedef struct division {
    int64_t n, first, unit;
} division_t;

static colo_status_t check_pieces(const colo_packed_t *p, const colo_packing_t *t, int64_t q,
                                  division_t *d)
{
    const int64_t from = t->piece_start[q], to = t->piece_start[q + 1];
    int64_t sum = 0;
    if ((q == 0 && from != 0) || to < from)
        return colo_fail(COLO_ERR_ARG,
                         "%s: sequence %lld has the pieces %lld..%lld, expected a piece_start that "
                         "begins with 0 and ascends",
                         p->what, (long long)q, (long long)from, (long long)to - 1);
    for (int64_t i = from; i < to; i++) {
        if (t->piece_len[i] < 0 || !colo_add_ok(sum, t->piece_len[i], &sum))
            return colo_fail(
                COLO_ERR_ARG,
                "%s: sequence %lld: piece %lld has %lld positions, expected >= 0 and a "
                "sum of %lld",
                p->what, (long long)q, (long long)(i - from), (long long)t->piece_len[i],
                (long long)t->seq_len[q]);
        if ((uint64_t)t->piece_owner[i] >= (uint64_t)p->axes.cp)
            return colo_fail(COLO_ERR_ARG,
                             "%s: sequence %lld: piece %lld has owner %lld, expected 0..%lld",
                             p->what, (long long)q, (long long)(i - from),
                             (long long)t->piece_owner[i], (long long)p->axes.cp - 1);
    }
    if (sum != t->seq_len[q])
        return colo_fail(COLO_ERR_ARG,
                         "%s: sequence %lld: its pieces have %lld positions, expected %lld",
                         p->what, (long long)q, (long long)sum, (long long)t->seq_len[q]);
    *d = (division_t){.n = to - from};
    return COLO_OK;
}

static colo_status_t divide(const colo_packed_t *p, const colo_packing_t *t, int64_t q,
                            division_t *d)
{
    const int64_t length = t->seq_len[q];
    if (t->split == COLO_PACKING_TABLE)
        return check_pieces(p, t, q, d);
    const int64_t cp = p->whole ? 1 : t->seq_cp ? t->seq_cp[q] : p->cp;
    const int64_t first = t->seq_first ? t->seq_first[q] : 0;
    if (cp < 1 || first < 0 || first >= p->cp || cp > p->cp - first)
        return colo_fail(COLO_ERR_ARG,
                         "%s: sequence %lld lies on %lld context ranks from %lld on, expected >= 1 "
                         "of the ranks 0..%lld",
                         p->what, (long long)q, (long long)cp, (long long)first,
                         (long long)p->cp - 1);
    const bool zigzag = t->split == COLO_PACKING_ZIGZAG && cp > 1;
    const uint64_t unit = (zigzag ? 2 : 1) * (uint64_t)cp; /* at most 2^64 - 2 */
    if (rest((uint64_t)length, unit))
        return colo_fail(COLO_ERR_LAYOUT,
                         "%s: sequence %lld has %lld positions, expected a multiple of "
                         "%s%lld = %llu; pad it",
                         p->what, (long long)q, (long long)length,
                         zigzag ? "2 * cp=" : "cp=", (long long)cp, (unsigned long long)unit);
    /* each piece has a position, so there are no more than positions */
    *d = (division_t){length ? (int64_t)unit : 0, first, times(length, unit)};
    return COLO_OK;
}

static colo_status_t no_memory(const colo_packed_t *p)
{
    return colo_fail(COLO_ERR_NOMEM, "%s: pieces of %lld sequences on %lld context ranks", p->what,
                     (long long)p->nseqs, (long long)p->axes.cp);
}

/* Appends the pieces of sequence @q, cut as @d says. */
static colo_status_t add_pieces(colo_packed_t *p, const colo_packing_t *t, int64_t q, int64_t dp,
                                const division_t *d)
{
    int64_t row = p->start[q], n;
    if (!colo_add_ok(p->pieces.n, d->n, &n) || n == INT64_MAX ||
        !colo_list_reserve(&p->pieces, n + 1, sizeof(colo_piece_t))) /* also if there is none */
        return no_memory(p);
    colo_piece_t *to = (colo_piece_t *)p->pieces.items + p->pieces.n;
    const bool table = t->split == COLO_PACKING_TABLE, zigzag = t->split == COLO_PACKING_ZIGZAG;
    for (int64_t k = 0; k < d->n; k++) {
        const int64_t i = table ? t->piece_start[q] + k : 0;
        const int64_t count = table ? t->piece_len[i] : d->unit;
        const int64_t mirror = zigzag && 2 * k >= d->n ? d->n - 1 - k : k;
        const int64_t owner = dp * p->cp + (table ? t->piece_owner[i] : d->first + mirror);
        if (count == 0)
            continue;
        *to++ = (colo_piece_t){row, count, p->held[owner], owner};
        p->held[owner] += count;
        p->lo[owner + 1]++;
        p->pieces.n++;
        row += count;
    }
    return COLO_OK;
}

static colo_status_t check_sp(const colo_packed_t *p, const colo_packing_t *t)
{
    for (int64_t k = 0; p->axes.sp > 1 && k < p->axes.replicas * p->cp; k++)
        if (p->held[k] % p->axes.sp) {
            int64_t last = p->nseqs - 1;
            while ((t->seq_dp ? t->seq_dp[last] : 0) != k / p->cp)
                last--;
            return colo_fail(COLO_ERR_LAYOUT,
                             "%s: the sequences of replica %lld, the last of them sequence "
                             "%lld, have %lld positions on a context rank, expected a multiple of "
                             "the %lld ranks of sequence parallelism (context rank %lld of %lld); "
                             "pad one",
                             p->what, (long long)(k / p->cp), (long long)last,
                             (long long)p->held[k], (long long)p->axes.sp, (long long)(k % p->cp),
                             (long long)p->cp);
        }
    return COLO_OK;
}

/* Lists pieces by owner; lo[k + 1] is how many owner k has. */
static colo_status_t sort_pieces(colo_packed_t *p)
{
    const colo_piece_t *piece = p->pieces.items;
    const int64_t owners = p->axes.replicas * p->cp;
    if (!colo_list_reserve(&p->by_owner, p->pieces.n + 1, sizeof(int64_t)))
        return no_memory(p);
    int64_t *by_owner = p->by_owner.items;
    for (int64_t k = 0; k < owners; k++)
        p->lo[k + 1] += p->lo[k];
    for (int64_t i = 0; i < p->pieces.n; i++)
        by_owner[p->lo[piece[i].owner]++] = i;
    memmove(&p->lo[1], &p->lo[0], (size_t)owners * sizeof *p->lo);
    p->lo[0] = 0;
    return COLO_OK;
}

static colo_status_t lay_tables(colo_packed_t *p, int64_t nseqs)
{
    int64_t **const table[] = {&p->start,       &p->base,   &p->first, &p->chunk, &p->local,
                               &p->first_owner, &p->length, &p->held,  &p->lo};
    int64_t owners, all = 0;
    p->nseqs = nseqs;
    if (!colo_mul_ok(p->axes.replicas, p->cp, &owners))
        return no_memory(p);
    const int64_t entries[] = {nseqs,  nseqs, nseqs, nseqs, nseqs, nseqs, p->axes.replicas,
                               owners, owners};
    for (int i = 0; i < 9; i++)
        if (!colo_add_ok(all, entries[i], &all) || !colo_add_ok(all, 1, &all))
            return no_memory(p);
    if (!colo_list_reserve(&p->entries, all, sizeof **table[0]))
        return no_memory(p);
    int64_t *next = p->entries.items;
    for (int i = 0; i < 9; next += entries[i++] + 1)
        *table[i] = next;
    memset(p->length, 0, (size_t)(p->axes.replicas + 1) * sizeof *p->length);
    memset(p->held, 0, (size_t)(owners + 1) * sizeof *p->held);
    memset(p->lo, 0, (size_t)(owners + 1) * sizeof *p->lo);
    return COLO_OK;
}

colo_status_t colo_packed_load(colo_packed_t *p, const colo_packing_t *t, bool listed)
{
    COLO_TRY(check_present(p, t));
    p->whole = t->split == COLO_PACKING_WHOLE;
    p->cp = p->whole ? 1 : p->axes.cp;
    p->listed = listed;
    COLO_TRY(lay_tables(p, t->nseqs));
    p->pieces.n = p->start[0] = 0;
    for (int64_t q = 0; q < t->nseqs; q++) {
        const int64_t length = t->seq_len[q], d = t->seq_dp ? t->seq_dp[q] : 0;
        if ((uint64_t)d >= (uint64_t)p->axes.replicas)
            return colo_fail(COLO_ERR_ARG, "%s: sequence %lld: seq_dp is %lld, expected 0..%lld",
                             p->what, (long long)q, (long long)d, (long long)p->axes.replicas - 1);
        if (length < 0 || !colo_add_ok(p->start[q], length, &p->start[q + 1]))
            return colo_fail(COLO_ERR_ARG,
                             length < 0 ? "%s: sequence %lld has %lld positions, expected >= 0"
                                        : "%s: sequence %lld: its %lld positions make the lengths "
                                          "of all sequences exceed 63 bits",
                             p->what, (long long)q, (long long)length);
        p->base[q] = p->length[d];
        p->length[d] += length;
        division_t cut = {0};
        COLO_TRY(divide(p, t, q, &cut));
        p->first[q] = p->pieces.n;
        p->chunk[q] = cut.unit;
        p->local[q] = times(p->base[q], (uint64_t)p->cp);
        p->first_owner[q] = d * p->cp;
        if (listed)
            COLO_TRY(add_pieces(p, t, q, d, &cut));
    }
    p->first[t->nseqs] = p->pieces.n;
    for (int64_t k = 0; !listed && k < p->axes.replicas * p->cp; k++)
        p->held[k] = p->length[k / p->cp] / p->cp;
    COLO_TRY(check_sp(p, t));
    return listed ? sort_pieces(p) : COLO_OK;
}

void colo_packed_deinit(colo_packed_t *p)
{
    free(p->pieces.items);
    free(p->by_owner.items);
    free(p->entries.items);
    memset(p, 0, sizeof *p);
}

/* ---- rows of a block ---- */

/* The first of pieces [a, z) that ends behind @row; in their order, or by owner. */
static int64_t first_piece(const colo_packed_t *p, const int64_t *by_owner, int64_t a, int64_t z,
                           int64_t row)
{
    const colo_piece_t *piece = p->pieces.items;
    while (a < z) {
        const int64_t mid = a + (z - a) / 2;
        const colo_piece_t *x = &piece[by_owner ? by_owner[mid] : mid];
        if (x->row + x->count <= row)
            a = mid + 1;
        else
            z = mid;
    }
    return a;
}

int64_t colo_packed_find(const colo_packed_t *p, int64_t q, int64_t row)
{
    return p->listed ? first_piece(p, NULL, p->first[q], p->first[q + 1], row) - p->first[q]
                     : times(row - p->start[q], (uint64_t)p->chunk[q]);
}

static colo_status_t rows(const colo_side_t *side, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs)
{
    const colo_packed_t *p = side->table;
    const int64_t d = colo_ragged_part(side->layout, COLO_SAMPLES, -1, coords);
    const int64_t c = p->whole ? 0 : colo_ragged_part(side->layout, COLO_ROWS, 1, coords);
    const int64_t s = colo_ragged_part(side->layout, COLO_ROWS, 0, coords), k = d * p->cp + c;
    const int64_t *by_owner = p->by_owner.items, block = p->held[k] / p->axes.sp;
    const colo_piece_t *piece = p->pieces.items;
    int64_t first = 0, behind = INT64_MAX;
    if (within && within->n > 0) {
        const colo_run_t *last = &within->run[within->n - 1];
        first = within->run[0].row;
        behind = last->row + last->count;
    }
    runs->n = runs->rows = 0;
    for (int64_t i = first_piece(p, by_owner, p->lo[k], p->lo[k + 1], first); i < p->lo[k + 1];
         i++) {
        const colo_piece_t *x = &piece[by_owner[i]];
        int64_t lo = first, hi = behind;
        if (x->row >= behind)
            break;
        if (colo_packed_cut(p, x, s, &lo, &hi))
            COLO_TRY(colo_runs_push(runs, lo, hi - lo, x->local + (lo - x->row) - s * block));
    }
    return COLO_OK;
}

/* ---- blocks that own rows ---- */

typedef struct met {
    int64_t block, count;
} met_t;

static int by_block(const void *a, const void *b)
{
    const int64_t x = ((const met_t *)a)->block, y = ((const met_t *)b)->block;
    return (x > y) - (x < y);
}

/* Adds up @list by block, ascending. Blocks that lie close together, as they usually do, are
 * counted in a table; others are sorted. */
static colo_status_t add_up(colo_list_t *list)
{
    met_t *met = list->items;
    int64_t least = INT64_MAX, most = 0, n = 0;
    for (int64_t i = 0; i < list->n; i++) {
        least = met[i].block < least ? met[i].block : least;
        most = met[i].block > most ? met[i].block : most;
    }
    if (list->n > 1 && most - least < 4 * list->n) {
        COLO_AUTOFREE int64_t *count = calloc((size_t)(most - least + 1), sizeof *count);
        if (!count)
            return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)list->n);
        for (int64_t i = 0; i < list->n; i++)
            count[met[i].block - least] += met[i].count;
        for (int64_t b = least; b <= most; b++)
            if (count[b - least] > 0)
                met[n++] = (met_t){b, count[b - least]};
        list->n = n;
        return COLO_OK;
    }
    if (list->n > 1)
        qsort(met, (size_t)list->n, sizeof *met, by_block);
    for (int64_t i = 0; i < list->n; i++)
        if (n > 0 && met[n - 1].block == met[i].block)
            met[n - 1].count += met[i].count;
        else
            met[n++] = met[i];
    list->n = n;
    return COLO_OK;
}

colo_status_t colo_packed_count(int64_t block, int64_t rows_of_it, colo_list_t *met)
{
    met_t *m = colo_list_push(met, sizeof *m);
    if (!m)
        return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)met->n);
    *m = (met_t){block, rows_of_it};
    return COLO_OK;
}

colo_status_t colo_packed_meet(const colo_packed_t *p, const colo_piece_t *x, int64_t lo,
                               int64_t hi, colo_list_t *met)
{
    const int64_t sp = p->axes.sp, block = p->held[x->owner] / sp;
    for (int64_t stop; lo < hi; lo = stop) {
        const int64_t local = x->local + (lo - x->row), s = sp > 1 ? local / block : 0;
        stop = sp > 1 && hi - lo > (s + 1) * block - local ? lo + (s + 1) * block - local : hi;
        COLO_TRY(colo_packed_count(x->owner * sp + s, stop - lo, met));
    }
    return COLO_OK;
}

colo_status_t colo_packed_blocks(const colo_side_t *side, const colo_packed_t *p, colo_list_t *list,
                                 colo_list_t *out)
{
    const colo_layout_t *l = side->layout;
    const int64_t sp = p->axes.sp;
    colo_status_t st = add_up(list);
    const met_t *met = list->items;
    for (int64_t i = 0; st == COLO_OK && i < list->n; i++) {
        colo_block_t b;
        const int64_t owner = met[i].block / sp;
        colo_block_clear(&b);
        colo_ragged_set_part(l, COLO_SAMPLES, -1, owner / p->cp, b.coord);
        if (!side->full)
            colo_ragged_set_part(l, COLO_ROWS, 1, owner % p->cp, b.coord);
        if (!side->full || side->owns->full_has_parts)
            colo_ragged_set_part(l, COLO_ROWS, 0, met[i].block % sp, b.coord);
        st = colo_block_push(out, &b, met[i].count);
    }
    free(list->items);
    *list = (colo_list_t){0};
    return st;
}

colo_status_t colo_packed_visit_rest(const colo_side_t *side, const colo_bounds_t *bounds,
                                     colo_list_t *met)
{
    colo_block_t all;
    colo_block_clear(&all);
    COLO_TRY(colo_block_push(&met[COLO_SAMPLES], &all, 1));
    return colo_blocks_along(&met[COLO_FEATURES], side->layout, COLO_FEATURES,
                             side->shape->features, bounds->h.lo, bounds->h.hi);
}

static colo_status_t visit(const colo_side_t *side, const colo_bounds_t *bounds, colo_list_t *met)
{
    const colo_packed_t *p = side->table;
    const colo_runs_t *mine = &bounds->runs;
    colo_list_t list = {0};
    colo_status_t st = colo_packed_visit_rest(side, bounds, met);
    for (int64_t k = 0, i = 0; st == COLO_OK && k < mine->n; k++) {
        int64_t lo = mine->run[k].row;
        const int64_t hi = lo + mine->run[k].count;
        for (i = first_piece(p, NULL, i, p->pieces.n, lo); st == COLO_OK && lo < hi; i++) {
            const colo_piece_t *x = (const colo_piece_t *)p->pieces.items + i;
            const int64_t behind = x->row + x->count, end = behind < hi ? behind : hi;
            st = colo_packed_meet(p, x, lo, end, &list);
            lo = end;
        }
        i--; /* the next rows may begin in the same piece */
    }
    if (st < 0) {
        free(list.items);
        return st;
    }
    return colo_packed_blocks(side, p, &list, &met[COLO_ROWS]);
}

bool colo_packed_box(const colo_side_t *side, const int64_t *coords, colo_bounds_t *bounds)
{
    colo_span_t features[2 * COLO_MAX_SPANS];
    if (!colo_axis_spans(side->layout, COLO_FEATURES, coords, side->shape->features, features))
        return false;
    bounds->b = (colo_span_t){0, 1};
    bounds->h = features[0];
    return true;
}

const colo_ownership_t colo_owns_packed = {
    .rows = rows, .visit = visit, .box = colo_packed_box, .full_has_parts = true};

/* ---- what a rank holds ---- */

/* The rows of @rank in @runs, ascending. */
static colo_status_t rows_of(colo_packed_t *p, const colo_packing_t *given,
                             const colo_layout_t *layout, int64_t rank, colo_runs_t *runs)
{
    int64_t coords[COLO_MAX_DIMS];
    colo_packing_t own = {COLO_PACKING_INIT};
    const colo_side_t side = {.layout = layout, .table = p};
    if (!layout)
        return colo_fail(COLO_ERR_ARG, "packing: layout is NULL");
    COLO_TRY(COLO_SIZED_READ(&own, given, seq_dp, "packing", "COLO_PACKING_INIT"));
    COLO_TRY(colo_layout_check_fields(layout));
    p->what = "packing";
    COLO_TRY(colo_ragged_axes(&p->axes, layout, false, p->what, "given"));
    COLO_TRY(colo_packed_load(p, &own, true));
    if (!colo_layout_holds(layout, rank))
        return COLO_OK;
    (void)colo_grid_coords(&layout->grid, rank, coords);
    return rows(&side, coords, NULL, runs);
}

colo_status_t colo_packing_rows(const colo_packing_t *packing, const colo_layout_t *layout,
                                int64_t rank, int64_t *out)
{
    colo_packed_t p = {0};
    colo_runs_t runs = {0};
    if (!out)
        return colo_fail(COLO_ERR_ARG, "packing: rows is NULL");
    const colo_status_t st = rows_of(&p, packing, layout, rank, &runs);
    if (st == COLO_OK)
        *out = runs.rows;
    colo_runs_deinit(&runs);
    colo_packed_deinit(&p);
    return st;
}

colo_status_t colo_packing_index(const colo_packing_t *packing, const colo_layout_t *layout,
                                 int64_t rank, int64_t *index)
{
    colo_packed_t p = {0};
    colo_runs_t runs = {0};
    const colo_status_t st = rows_of(&p, packing, layout, rank, &runs);
    if (st == COLO_OK && runs.rows && !index) {
        colo_runs_deinit(&runs);
        colo_packed_deinit(&p);
        return colo_fail(COLO_ERR_ARG, "packing: index is NULL");
    }
    int64_t q = 0, at = 0;
    for (int64_t i = 0; st == COLO_OK && i < runs.n; i++)
        for (int64_t row = runs.run[i].row; row < runs.run[i].row + runs.run[i].count; row++) {
            while (row >= p.start[q + 1])
                q++;
            index[at] = row - p.start[q];
            index[runs.rows + at++] = q;
        }
    colo_runs_deinit(&runs);
    colo_packed_deinit(&p);
    return st;
}
