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

colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *layout, bool in_order,
                               const char *what, const char *side)
{
    *axes = (colo_ragged_axes_t){.replicas = colo_layout_parts(layout, COLO_AXIS_SAMPLES),
                                 .cp = 1,
                                 .sp = 1,
                                 .in_order = in_order};
    COLO_FAIL_IF(layout->map != COLO_MAP_IDENTITY, COLO_ERR_LAYOUT,
                 "%s: the %s layout has a position map, expected none; the positions "
                 "of a ragged batch are in its tables",
                 what, side);
    for (int i = 0; i < layout->nsplits[COLO_AXIS_ROWS]; i++) {
        const colo_split_t *split = &layout->split[COLO_AXIS_ROWS][i];
        COLO_FAIL_IF(in_order && split->kind != COLO_SPLIT_BLOCK &&
                         layout->grid.extent[split->dim] > 1,
                     COLO_ERR_LAYOUT,
                     "%s: the %s layout splits rows %s over '%s', expected "
                     "BLOCK: ranks hold the rows of a batch in table order; clear the "
                     "split of rows and make it with colo_layout_split_context()",
                     what, side, split->kind == COLO_SPLIT_ZIGZAG ? "ZIGZAG" : "CEIL",
                     layout->grid.name[split->dim]);
        if (in_order || !split->context) {
            *(split->context ? &axes->cp : &axes->sp) *= layout->grid.extent[split->dim];
            continue;
        }
        COLO_FAIL_IF(i > 0, COLO_ERR_LAYOUT,
                     "%s: the %s layout splits rows in context over '%s' as "
                     "split %d, expected as its first and only context split",
                     what, side, layout->grid.name[split->dim], i);
        axes->cp = layout->grid.extent[split->dim];
        axes->zigzag = split->kind == COLO_SPLIT_ZIGZAG && axes->cp > 1;
    }
    return COLO_OK;
}

/* What split @i of an axis counts. */
static int64_t *index_of(colo_ragged_place_t *place, const colo_layout_t *layout, int axis, int i)
{
    return axis == COLO_AXIS_SAMPLES        ? &place->replica
           : layout->split[axis][i].context ? &place->context
                                            : &place->part;
}

colo_ragged_place_t colo_ragged_place(const colo_layout_t *layout, const int64_t *coords)
{
    colo_ragged_place_t place = {0};
    for (int axis = COLO_AXIS_SAMPLES; axis <= COLO_AXIS_ROWS; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++) {
            const int32_t dim = layout->split[axis][i].dim;
            int64_t *const index = index_of(&place, layout, axis, i);
            *index = *index * layout->grid.extent[dim] + coords[dim];
        }
    return place;
}

void colo_ragged_set_place(const colo_layout_t *layout, colo_ragged_place_t place, int64_t *coords)
{
    for (int axis = COLO_AXIS_SAMPLES; axis <= COLO_AXIS_ROWS; axis++)
        for (int i = layout->nsplits[axis] - 1; i >= 0; i--) {
            const int32_t dim = layout->split[axis][i].dim;
            int64_t *const index = index_of(&place, layout, axis, i);
            if (*index < 0)
                continue;
            coords[dim] = *index % layout->grid.extent[dim];
            *index /= layout->grid.extent[dim];
        }
}

/* ---- checks ---- */

static colo_status_t check_present(const colo_packed_t *packed, const colo_packing_t *packing)
{
    static const char *const names[] = {"BLOCK", "ZIGZAG", "WHOLE", "TABLE", "CONTIGUOUS"};
    const bool table = packing->split == COLO_PACKING_TABLE;
    const bool cuts = packing->split == COLO_PACKING_BLOCK || packing->split == COLO_PACKING_ZIGZAG;
    COLO_FAIL_IF(packing->nseqs < 0 || (unsigned)packing->split > COLO_PACKING_CONTIGUOUS,
                 COLO_ERR_ARG,
                 "%s: %lld sequences, split %d; expected >= 0 sequences and a split of 0 "
                 "(BLOCK), 1 (ZIGZAG), 2 (WHOLE), 3 (TABLE) or 4 (CONTIGUOUS)",
                 packed->what, (long long)packing->nseqs, (int)packing->split);
    const int64_t pieces = table && packing->piece_start ? packing->piece_start[packing->nseqs] : 0;
    const struct {
        const char *name;
        const int64_t *given;
        bool needed, allowed;
    } one[] = {{"seq_len", packing->seq_len, packing->nseqs > 0, true},
               {"seq_room", packing->seq_room, false, true},
               {"seq_cp", packing->seq_cp, false, cuts},
               {"seq_first", packing->seq_first, false, cuts},
               {"piece_start", packing->piece_start, table, table},
               {"piece_len", packing->piece_len, pieces > 0, table},
               {"piece_owner", packing->piece_owner, pieces > 0, table}};
    for (size_t i = 0; i < sizeof one / sizeof one[0]; i++)
        COLO_FAIL_IF(one[i].given ? !one[i].allowed : one[i].needed, COLO_ERR_ARG,
                     "%s: table %s is %s, expected %s with split %s", packed->what, one[i].name,
                     one[i].given ? "given" : "NULL", one[i].given ? "NULL" : "its entries",
                     names[packing->split]);
    COLO_FAIL_IF(packing->halo_before < 0 || (packing->halo_before > 0 && packed->uncut),
                 COLO_ERR_ARG, "%s: halo_before is %lld, expected %s", packed->what,
                 (long long)packing->halo_before,
                 packed->uncut ? "0 with split WHOLE, of which no rank lacks rows" : ">= 0 rows");
    return COLO_OK;
}

/* Positions of a sequence, padding included. */
static int64_t room_of(const colo_packing_t *packing, int64_t seq)
{
    return packing->seq_room ? packing->seq_room[seq] : packing->seq_len[seq];
}

static uint64_t rest(uint64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? length % unit : length & (unit - 1);
}

/* How a sequence is cut: @n pieces from context rank @first on, of @unit each if there is no
 * table. CONTIGUOUS: the first and the last may be shorter. */
typedef struct division {
    int64_t n, first, unit;
} division_t;

static colo_status_t check_pieces(const colo_packed_t *packed, const colo_packing_t *packing,
                                  int64_t seq, division_t *replica)
{
    const int64_t from = packing->piece_start[seq], to = packing->piece_start[seq + 1];
    int64_t sum = 0;
    COLO_FAIL_IF((seq == 0 && from != 0) || to < from, COLO_ERR_ARG,
                 "%s: sequence %lld has the pieces %lld..%lld, expected a piece_start that "
                 "begins with 0 and ascends",
                 packed->what, (long long)seq, (long long)from, (long long)to - 1);
    for (int64_t i = from; i < to; i++) {
        COLO_FAIL_IF(packing->piece_len[i] < 0 || !colo_add_ok(sum, packing->piece_len[i], &sum),
                     COLO_ERR_ARG,
                     "%s: sequence %lld: piece %lld has %lld positions, expected >= 0 and a "
                     "sum of %lld",
                     packed->what, (long long)seq, (long long)(i - from),
                     (long long)packing->piece_len[i], (long long)room_of(packing, seq));
        COLO_FAIL_IF((uint64_t)packing->piece_owner[i] >= (uint64_t)packed->cp, COLO_ERR_ARG,
                     "%s: sequence %lld: piece %lld has owner %lld, expected 0..%lld", packed->what,
                     (long long)seq, (long long)(i - from), (long long)packing->piece_owner[i],
                     (long long)packed->cp - 1);
    }
    COLO_FAIL_IF(sum != room_of(packing, seq), COLO_ERR_ARG,
                 "%s: sequence %lld: its pieces have %lld positions, expected %lld", packed->what,
                 (long long)seq, (long long)sum, (long long)room_of(packing, seq));
    *replica = (division_t){.n = to - from};
    return COLO_OK;
}

static colo_status_t divide(const colo_packed_t *packed, const colo_packing_t *packing, int64_t seq,
                            division_t *division)
{
    const int64_t length = room_of(packing, seq);
    if (packing->split == COLO_PACKING_TABLE)
        return check_pieces(packed, packing, seq, division);
    if (packing->split == COLO_PACKING_CONTIGUOUS) {
        const int64_t base = packed->base[seq],
                      unit = packed->share[packing->seq_dp ? packing->seq_dp[seq] : 0];
        const int64_t from = length ? base / unit : 0;
        *division = (division_t){length ? (base + length - 1) / unit + 1 - from : 0, from, unit};
        return COLO_OK;
    }
    const int64_t cp = packed->uncut ? 1 : packing->seq_cp ? packing->seq_cp[seq] : packed->cp;
    const int64_t first = packing->seq_first ? packing->seq_first[seq] : 0;
    COLO_FAIL_IF(
        cp < 1 || first < 0 || first >= packed->cp || cp > packed->cp - first, COLO_ERR_ARG,
        "%s: sequence %lld lies on %lld context ranks from %lld on, expected >= 1 "
        "of the ranks 0..%lld",
        packed->what, (long long)seq, (long long)cp, (long long)first, (long long)packed->cp - 1);
    const bool zigzag = packing->split == COLO_PACKING_ZIGZAG && cp > 1;
    const uint64_t unit = (zigzag ? 2 : 1) * (uint64_t)cp; /* at most 2^64 - 2 */
    COLO_FAIL_IF(rest((uint64_t)length, unit) && !packed->axes.in_order, COLO_ERR_LAYOUT,
                 "%s: sequence %lld has %lld positions, expected a multiple of "
                 "%s%lld = %llu; pad it",
                 packed->what, (long long)seq, (long long)length,
                 zigzag ? "2 * cp=" : "cp=", (long long)cp, (unsigned long long)unit);
    /* each piece has a position, so there are no more than positions */
    *division = (division_t){length ? (int64_t)unit : 0, first, colo_packed_times(length, unit)};
    return COLO_OK;
}

static colo_status_t no_memory(const colo_packed_t *packed)
{
    return colo_fail(COLO_ERR_NOMEM, "%s: pieces of %lld sequences on %lld context ranks",
                     packed->what, (long long)packed->nseqs, (long long)packed->axes.cp);
}

/* CONTIGUOUS: rows of [@base, @base + @length) of a replica's axis in piece @k. */
static int64_t in_share(int64_t base, int64_t length, const division_t *division, int64_t k)
{
    const int64_t from = (division->first + k) * division->unit, to = from + division->unit,
                  end = base + length;
    return (to < end ? to : end) - (from > base ? from : base);
}

/* Appends the pieces of sequence @seq, cut as @replica says. */
static colo_status_t add_pieces(colo_packed_t *packed, const colo_packing_t *packing, int64_t seq,
                                int64_t dp, const division_t *replica)
{
    const int64_t length = room_of(packing, seq);
    int64_t row = packed->start[seq], left = packing->seq_len[seq], n;
    if (!colo_add_ok(packed->pieces.n, replica->n, &n) || n == INT64_MAX ||
        !colo_list_reserve(&packed->pieces, n + 1,
                           sizeof(colo_piece_t))) /* also if there is none */
        return no_memory(packed);
    colo_piece_t *to = (colo_piece_t *)packed->pieces.items + packed->pieces.n;
    const bool table = packing->split == COLO_PACKING_TABLE,
               zigzag = packing->split == COLO_PACKING_ZIGZAG,
               contiguous = packing->split == COLO_PACKING_CONTIGUOUS;
    for (int64_t k = 0; k < replica->n; k++) {
        const int64_t i = table ? packing->piece_start[seq] + k : 0;
        const int64_t count = table        ? packing->piece_len[i]
                              : contiguous ? in_share(packed->base[seq], length, replica, k)
                              : packed->axes.in_order ? colo_block_lo(length, replica->n, k + 1) -
                                                            colo_block_lo(length, replica->n, k)
                                                      : replica->unit;
        const int64_t mirror = zigzag && 2 * k >= replica->n ? replica->n - 1 - k : k;
        const int64_t owner =
            dp * packed->cp + (table ? packing->piece_owner[i] : replica->first + mirror);
        const int64_t real = count < left ? count : left;
        if (real > 0) {
            *to++ = (colo_piece_t){row, real, packed->held[owner], owner};
            packed->pieces.n++;
        }
        packed->held[owner] += count;
        row += real;
        left -= real;
    }
    return COLO_OK;
}

static colo_status_t check_sp(const colo_packed_t *packed, const colo_packing_t *packing)
{
    for (int64_t k = 0; packed->sp > 1 && k < packed->axes.replicas * packed->cp; k++)
        if (packed->held[k] % packed->sp) {
            int64_t last = packed->nseqs - 1;
            while ((packing->seq_dp ? packing->seq_dp[last] : 0) != k / packed->cp)
                last--;
            return colo_fail(COLO_ERR_LAYOUT,
                             "%s: the sequences of replica %lld, the last of them sequence "
                             "%lld, have %lld positions on a context rank, expected a multiple of "
                             "the %lld ranks of sequence parallelism (context rank %lld of %lld); "
                             "pad one",
                             packed->what, (long long)(k / packed->cp), (long long)last,
                             (long long)packed->held[k], (long long)packed->axes.sp,
                             (long long)(k % packed->cp), (long long)packed->cp);
        }
    return COLO_OK;
}

static colo_status_t sort_pieces(colo_packed_t *packed)
{
    const colo_piece_t *piece = packed->pieces.items;
    if (!colo_list_reserve(&packed->by_owner, packed->pieces.n + 1, sizeof(int64_t)))
        return no_memory(packed);
    if (packed->pieces.n > 0)
        colo_order_by(COLO_KEYS(piece, owner, packed->pieces.n), packed->axes.replicas * packed->cp,
                      packed->lo, packed->by_owner.items);
    return COLO_OK;
}

bool colo_tables_lay(colo_list_t *memory, int64_t **const table[], const int64_t *entries, int n)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++)
        if (!colo_add_ok(all, entries[i], &all) || !colo_add_ok(all, 1, &all))
            return false;
    if (!colo_list_reserve(memory, all, sizeof *entries))
        return false;
    int64_t *next = memory->items;
    for (int i = 0; i < n; next += entries[i++] + 1)
        *table[i] = next;
    return true;
}

static colo_status_t lay_tables(colo_packed_t *packed, int64_t nseqs)
{
    int64_t **const table[] = {&packed->start, &packed->base, &packed->first, &packed->length,
                               &packed->share, &packed->held, &packed->lo};
    const int64_t replicas = packed->axes.replicas;
    int64_t owners;
    packed->nseqs = nseqs;
    if (!colo_mul_ok(replicas, packed->cp, &owners) ||
        !colo_tables_lay(&packed->entries, table,
                         (const int64_t[]){nseqs, nseqs, nseqs, replicas, replicas, owners, owners},
                         7))
        return no_memory(packed);
    memset(packed->length, 0, (size_t)(replicas + 1) * sizeof *packed->length);
    memset(packed->held, 0, (size_t)(owners + 1) * sizeof *packed->held);
    memset(packed->lo, 0, (size_t)(owners + 1) * sizeof *packed->lo);
    packed->pieces.n = packed->start[0] = 0;
    return COLO_OK;
}

/* Says what is wrong with the replica, length or room of a sequence. */
static colo_status_t bad_sequence(const colo_packed_t *packed, const colo_packing_t *packing,
                                  int64_t seq)
{
    const int64_t length = packing->seq_len[seq], room = room_of(packing, seq),
                  replica = packing->seq_dp ? packing->seq_dp[seq] : 0;
    COLO_FAIL_IF(replica < 0 || replica >= packed->axes.replicas, COLO_ERR_ARG,
                 "%s: sequence %lld: seq_dp is %lld, expected 0..%lld", packed->what,
                 (long long)seq, (long long)replica, (long long)packed->axes.replicas - 1);
    COLO_FAIL_IF(
        length >= 0 && room < length, COLO_ERR_ARG,
        "%s: sequence %lld has %lld positions and seq_room %lld, expected at least as many",
        packed->what, (long long)seq, (long long)length, (long long)room);
    return colo_fail(COLO_ERR_ARG,
                     length < 0 ? "%s: sequence %lld has %lld positions, expected >= 0"
                                : "%s: sequence %lld: its %lld positions make the lengths "
                                  "of all sequences exceed 63 bits",
                     packed->what, (long long)seq, (long long)(length < 0 ? length : room));
}

/* CONTIGUOUS: how many rows of a replica's axis one of its context ranks has. */
static colo_status_t share_rows(colo_packed_t *packed, const colo_packing_t *packing)
{
    int64_t rows = 0;
    memset(packed->share, 0, (size_t)packed->axes.replicas * sizeof *packed->share);
    for (int64_t seq = 0; seq < packing->nseqs; seq++) {
        const int64_t room = room_of(packing, seq),
                      replica = packing->seq_dp ? packing->seq_dp[seq] : 0;
        if (replica < 0 || replica >= packed->axes.replicas || packing->seq_len[seq] < 0 ||
            room < packing->seq_len[seq] || !colo_add_ok(rows, room, &rows))
            return bad_sequence(packed, packing, seq);
        packed->share[replica] += room;
    }
    for (int64_t replica = 0; replica < packed->axes.replicas; replica++) {
        int64_t *const share = &packed->share[replica];
        COLO_FAIL_IF(
            *share % packed->cp, COLO_ERR_LAYOUT,
            "%s: the sequences of replica %lld have %lld positions, expected a multiple of "
            "cp=%lld, which cuts all of them at once (CONTIGUOUS); pad the last",
            packed->what, (long long)replica, (long long)*share, (long long)packed->cp);
        *share /= packed->cp;
    }
    return COLO_OK;
}

colo_status_t colo_packed_load(colo_packed_t *packed, const colo_packing_t *packing, bool listed)
{
    packed->uncut = packing->split == COLO_PACKING_WHOLE;
    COLO_TRY(check_present(packed, packing));
    packed->cp = packed->uncut ? 1 : packed->axes.cp;
    packed->sp = packed->axes.sp;
    if (packed->axes.in_order) { /* blocks of any size */
        packed->cp *= packed->sp;
        packed->sp = 1;
    }
    packed->listed = listed;
    packed->seq_dp = packing->seq_dp;
    COLO_TRY(lay_tables(packed, packing->nseqs));
    if (packing->split == COLO_PACKING_CONTIGUOUS)
        COLO_TRY(share_rows(packed, packing));
    const int64_t *const seq_len = packing->seq_len, *const seq_dp = packing->seq_dp,
                         *const seq_room = packing->seq_room;
    int64_t *const start = packed->start, *const base = packed->base, *const size = packed->length,
                   *const chunk = packed->chunk;
    const uint64_t replicas = (uint64_t)packed->axes.replicas,
                   parts = (uint64_t)packed->cp << packed->axes.zigzag;
    uint64_t row = 0, rooms = 0;
    for (int64_t seq = 0, n = packing->nseqs; seq < n; seq++) {
        const int64_t length = seq_len[seq], room = seq_room ? seq_room[seq] : length,
                      replica = seq_dp ? seq_dp[seq] : 0;
        row += (uint64_t)length;
        rooms += (uint64_t)room;
        if ((uint64_t)replica >= replicas || (rooms | (uint64_t)length | (uint64_t)room) >> 63 ||
            room < length)
            return bad_sequence(packed, packing, seq);
        start[seq + 1] = (int64_t)row;
        base[seq] = size[replica];
        size[replica] += room;
        if (!listed &&
            !rest((uint64_t)length, parts)) { /* divide() takes as long as all the rest */
            chunk[seq] = colo_packed_times(length, parts);
            continue;
        }
        division_t cut = {0};
        COLO_TRY(divide(packed, packing, seq, &cut));
        packed->first[seq] = packed->pieces.n;
        COLO_TRY(add_pieces(packed, packing, seq, replica, &cut));
    }
    packed->first[packing->nseqs] = packed->pieces.n;
    for (int64_t k = 0; !listed && k < packed->axes.replicas * packed->cp; k++)
        packed->held[k] = packed->length[k / packed->cp] / packed->cp;
    COLO_TRY(check_sp(packed, packing));
    return listed ? sort_pieces(packed) : COLO_OK;
}

void colo_packed_deinit(colo_packed_t *packed)
{
    free(packed->pieces.items);
    free(packed->by_owner.items);
    free(packed->entries.items);
    memset(packed, 0, sizeof *packed);
}

/* ---- rows of a block ---- */

/* The first of pieces [@low, @high) that ends behind @row; in their order, or by owner. */
static int64_t first_piece(const colo_packed_t *packed, const int64_t *by_owner, int64_t low,
                           int64_t high, int64_t row)
{
    if (low == high)
        return low;
    colo_ranges_t pieces = COLO_RANGES((const colo_piece_t *)packed->pieces.items, row, count);
    pieces.index = by_owner;
    return colo_first_behind(pieces, low, high, row);
}

int64_t colo_packed_find(const colo_packed_t *packed, int64_t seq, int64_t row)
{
    return packed->listed
               ? first_piece(packed, NULL, packed->first[seq], packed->first[seq + 1], row) -
                     packed->first[seq]
               : colo_packed_times(row - packed->start[seq], (uint64_t)packed->chunk[seq]);
}

/* The owner that @coords belong to; @part: which of its blocks. */
static int64_t owner_of(const colo_packed_t *packed, const colo_layout_t *layout,
                        const int64_t *coords, int64_t *part)
{
    const colo_ragged_place_t place = colo_ragged_place(layout, coords);
    const int64_t which = (packed->uncut ? 0 : place.context) * packed->axes.sp + place.part;
    *part = which % packed->sp;
    return place.replica * packed->cp + which / packed->sp;
}

int64_t colo_packed_block(const colo_packed_t *packed, const colo_layout_t *layout,
                          const int64_t *coords)
{
    int64_t part;
    const int64_t owner = owner_of(packed, layout, coords, &part);
    return owner * packed->sp + part;
}

int64_t colo_packed_extent(const colo_packed_t *packed, const colo_layout_t *layout,
                           const int64_t *coords)
{
    int64_t part;
    return packed->held[owner_of(packed, layout, coords, &part)] / packed->sp;
}

static colo_status_t rows(const colo_side_t *side, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs)
{
    const colo_packed_t *packed = side->table;
    int64_t part;
    const int64_t k = owner_of(packed, side->layout, coords, &part);
    const int64_t *by_owner = packed->by_owner.items, block = packed->held[k] / packed->sp;
    const colo_piece_t *piece = packed->pieces.items;
    int64_t first = 0, behind = INT64_MAX;
    if (within && within->n > 0) {
        const colo_run_t *last = &within->run[within->n - 1];
        first = within->run[0].row;
        behind = last->row + last->count;
    }
    runs->n = runs->rows = 0;
    for (int64_t i = first_piece(packed, by_owner, packed->lo[k], packed->lo[k + 1], first);
         i < packed->lo[k + 1]; i++) {
        const colo_piece_t *held = &piece[by_owner[i]];
        int64_t lo = first, hi = behind;
        if (held->row >= behind)
            break;
        if (colo_packed_cut(packed, held, part, &lo, &hi))
            COLO_TRY(
                colo_runs_push(runs, lo, hi - lo, held->local + (lo - held->row) - part * block));
    }
    return COLO_OK;
}

/* ---- blocks that own rows ---- */

/* Adds up @list by block, ascending. Blocks that lie close together, as they usually do, are
 * counted in a table; others are sorted. */
static colo_status_t add_up(colo_list_t *list)
{
    colo_met_t *met = list->items;
    int64_t least = INT64_MAX, most = 0, n = 0;
    for (int64_t i = 0; i < list->n; i++) {
        least = met[i].block < least ? met[i].block : least;
        most = met[i].block > most ? met[i].block : most;
    }
    if (list->n > 1 && most - least < 4 * list->n) {
        COLO_AUTOFREE int64_t *count = calloc((size_t)(most - least + 1), sizeof *count);
        COLO_FAIL_IF(!count, COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)list->n);
        for (int64_t i = 0; i < list->n; i++)
            count[met[i].block - least] += met[i].count;
        for (int64_t block = least; block <= most; block++)
            if (count[block - least] > 0)
                met[n++] = (colo_met_t){block, count[block - least]};
        list->n = n;
        return COLO_OK;
    }
    if (list->n > 1)
        COLO_SORT(met, list->n, block);
    for (int64_t i = 0; i < list->n; i++)
        if (n > 0 && met[n - 1].block == met[i].block)
            met[n - 1].count += met[i].count;
        else
            met[n++] = met[i];
    list->n = n;
    return COLO_OK;
}

/* Counts rows [lo, hi) of piece @piece by the block that owns them. */
static inline colo_status_t intersect(const colo_packed_t *packed, const colo_piece_t *piece,
                                      int64_t lo, int64_t hi, colo_list_t *met)
{
    if (packed->sp == 1)
        return colo_packed_count(piece->owner, hi - lo, met);
    const int64_t block = packed->held[piece->owner] / packed->sp;
    for (int64_t stop; lo < hi; lo = stop) {
        const int64_t local = piece->local + (lo - piece->row), part = local / block;
        stop = hi - lo > (part + 1) * block - local ? lo + (part + 1) * block - local : hi;
        COLO_TRY(colo_packed_count(piece->owner * packed->sp + part, stop - lo, met));
    }
    return COLO_OK;
}

colo_status_t colo_packed_meet(const colo_packed_t *packed, int64_t seq, int64_t lo, int64_t hi,
                               colo_list_t *met)
{
    for (int64_t j = colo_packed_find(packed, seq, lo); lo < hi; j++) {
        const colo_piece_t piece = colo_packed_piece(packed, seq, j);
        const int64_t end = piece.row + piece.count < hi ? piece.row + piece.count : hi;
        COLO_TRY(intersect(packed, &piece, lo, end, met));
        lo = end;
    }
    return COLO_OK;
}

void colo_packed_coords(const colo_side_t *side, const colo_packed_t *packed, int64_t block,
                        int64_t *coords)
{
    const int64_t sp = packed->axes.sp, of_replica = packed->cp * packed->sp,
                  which = block % of_replica;
    colo_ragged_set_place(
        side->layout,
        (colo_ragged_place_t){block / of_replica, side->full ? -1 : which / sp,
                              side->full && !side->owns->full_has_parts ? -1 : which % sp},
        coords);
}

colo_status_t colo_packed_blocks(const colo_side_t *side, const colo_packed_t *packed,
                                 colo_list_t *list, colo_list_t *out)
{
    COLO_TRY(add_up(list));
    const colo_met_t *met = list->items;
    for (int64_t i = 0; i < list->n; i++) {
        colo_block_t block;
        colo_block_clear(&block);
        colo_packed_coords(side, packed, met[i].block, block.coord);
        COLO_TRY(colo_block_push(out, &block, met[i].count));
    }
    return COLO_OK;
}

static colo_status_t visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met)
{
    const colo_packed_t *packed = side->table;
    COLO_ENDS(colo_list_deinit) colo_list_t list = {0};
    for (int64_t k = 0, i = 0; k < mine->n; k++) {
        int64_t lo = mine->run[k].row;
        const int64_t hi = lo + mine->run[k].count;
        const colo_piece_t *piece = (const colo_piece_t *)packed->pieces.items + i;
        if (lo >= piece->row + piece->count) /* seldom, if pieces are long */
            i = first_piece(packed, NULL, i + 1, packed->pieces.n, lo);
        for (; lo < hi; i++) {
            piece = (const colo_piece_t *)packed->pieces.items + i;
            const int64_t behind = piece->row + piece->count, end = behind < hi ? behind : hi;
            COLO_TRY(intersect(packed, piece, lo, end, &list));
            lo = end;
        }
        i--; /* the next rows may begin in the same piece */
    }
    return colo_packed_blocks(side, packed, &list, met);
}

const colo_ownership_t colo_owns_packed = {
    .rows = rows, .visit = visit, .tables = true, .full_has_parts = true};
