/* SPDX-License-Identifier: Apache-2.0 */
/*
 * halo.c - packed sequences with rows in front of each piece as a side of a plan: pieces overlap,
 * so a row may be in several places of one rank and of several ranks.
 *
 * In forward a rank needs each row once, for the first place that has it; segments-plan.c lists the
 * other places as copies of that. In backward each place has an addend (partial.c).
 */
#include "bridge/layout/halo.h"

#include "bridge/layout/index.h"
#include "bridge/layout/segments.h"
#include "core/error.h"

#include <string.h>

/* ---- pieces ---- */

static colo_status_t no_memory(const colo_packed_t *packed)
{
    return colo_fail(COLO_ERR_NOMEM, "%s: pieces of %lld sequences and their halos", packed->what,
                     (long long)packed->nseqs);
}

/* Positions [@pos, @pos + @count) of a sequence whose first row is @start and whose length
 * @length, on @block. @last: [blocks] its last piece, or -1. */
static colo_status_t add_piece(colo_halo_t *halo, const colo_packed_t *rooms, int64_t *last,
                               int64_t length, int64_t start, colo_halo_piece_t piece,
                               int64_t count)
{
    colo_halo_piece_t *all = halo->pieces.items;
    const int64_t left = length - piece.pos, n = halo->pieces.n;
    const int64_t real = left <= 0 ? 0 : left < count ? left : count;
    int64_t *const held = &halo->held[piece.block], more = count;
    if (n > 0 && all[n - 1].seq == piece.seq && all[n - 1].block == piece.block) {
        all[n - 1].rows += count;
        all[n - 1].count += real;
    } else {
        piece.row = start + (left < 0 ? length : piece.pos);
        piece.count = real;
        piece.local = *held;
        piece.fresh = piece.row - colo_halo_front(halo, &piece);
        if (last[piece.block] >= 0 && all[last[piece.block]].seq == piece.seq) {
            const colo_halo_piece_t *before = &all[last[piece.block]];
            const int64_t end = before->row + before->count;
            piece.fresh = piece.fresh < end ? end : piece.fresh;
        }
        COLO_FAIL_IF(!colo_add_ok(count, halo->before, &more) ||
                         !colo_add_ok(halo->rows, halo->before, &halo->rows),
                     COLO_ERR_ARG,
                     "%s: halo_before=%lld rows in front of each piece make the rows of all ranks "
                     "exceed 63 bits; give fewer",
                     rooms->what, (long long)halo->before);
        piece.rows = more;
        last[piece.block] = n;
        if (!colo_list_push(&halo->pieces, sizeof piece))
            return no_memory(rooms);
        ((colo_halo_piece_t *)halo->pieces.items)[n] = piece;
    }
    COLO_FAIL_IF(!colo_add_ok(halo->rows, count, &halo->rows), COLO_ERR_ARG,
                 "%s: halo_before=%lld rows in front of each piece make the rows of all ranks "
                 "exceed 63 bits; give fewer",
                 rooms->what, (long long)halo->before);
    *held += more; /* which is at most halo->rows */
    return COLO_OK;
}

/* Those of sequence @seq, whose first row is @start. */
static colo_status_t add_pieces(colo_halo_t *halo, const colo_packed_t *rooms, int64_t *last,
                                int64_t seq, int64_t length, int64_t start)
{
    for (int64_t j = rooms->first[seq]; j < rooms->first[seq + 1]; j++) {
        const colo_piece_t *cut = (const colo_piece_t *)rooms->pieces.items + j;
        const int64_t block = rooms->held[cut->owner] / rooms->sp; /* rows of one; it has some */
        for (int64_t done = 0, count; done < cut->count; done += count) {
            const int64_t local = cut->local + done, part = rooms->sp > 1 ? local / block : 0;
            if (rooms->sp > 1 && (part + 1) * block - local < cut->count - done)
                count = (part + 1) * block - local;
            else
                count = cut->count - done;
            COLO_TRY(add_piece(halo, rooms, last, length, start,
                               (colo_halo_piece_t){.seq = seq,
                                                   .pos = cut->row - rooms->start[seq] + done,
                                                   .block = cut->owner * rooms->sp + part},
                               count));
        }
    }
    return COLO_OK;
}

static colo_status_t list_pieces(colo_halo_t *halo, const colo_packed_t *rooms,
                                 const colo_packing_t *packing)
{
    const int64_t blocks = rooms->axes.replicas * rooms->cp * rooms->sp;
    int64_t *last, row = 0;
    halo->before = packing->halo_before;
    halo->rows = halo->pieces.n = 0;
    if (!colo_tables_lay(&halo->entries, (int64_t * *[]){&halo->lo, &halo->held, &last},
                         (const int64_t[]){blocks, blocks, blocks}, 3) ||
        !colo_list_reserve(&halo->pieces, rooms->pieces.n + 1, sizeof(colo_halo_piece_t)))
        return no_memory(rooms);
    memset(halo->lo, 0, (size_t)(blocks + 1) * sizeof *halo->lo);
    memset(halo->held, 0, (size_t)(blocks + 1) * sizeof *halo->held);
    memset(last, -1, (size_t)(blocks + 1) * sizeof *last);
    for (int64_t seq = 0; seq < packing->nseqs; row += packing->seq_len[seq++])
        COLO_TRY(add_pieces(halo, rooms, last, seq, packing->seq_len[seq], row));
    if (!colo_list_reserve(&halo->by_block, halo->pieces.n + 1, sizeof(int64_t)))
        return no_memory(rooms);
    const colo_halo_piece_t *piece = halo->pieces.items;
    if (halo->pieces.n > 0)
        colo_order_by(COLO_KEYS(piece, block, halo->pieces.n), blocks, halo->lo,
                      halo->by_block.items);
    return COLO_OK;
}

colo_status_t colo_halo_load(colo_halo_t *halo, colo_packed_t *rooms, const colo_packing_t *packing)
{
    colo_packing_t own = *packing;
    if (own.seq_room) { /* its lengths are checked first */
        COLO_TRY(colo_packed_load(rooms, &own, true));
        own.seq_len = own.seq_room;
    }
    COLO_TRY(colo_packed_load(rooms, &own, true));
    return list_pieces(halo, rooms, packing);
}

void colo_halo_deinit(colo_halo_t *halo)
{
    free(halo->pieces.items);
    free(halo->by_block.items);
    free(halo->entries.items);
    memset(halo, 0, sizeof *halo);
}

/* ---- rows of a block, blocks that have rows ---- */

static colo_status_t rows(const colo_side_t *side, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs)
{
    const colo_ragged_t *ragged = side->table;
    const colo_halo_t *halo = &ragged->halo;
    const int64_t block = colo_packed_block(&ragged->dst, side->layout, coords);
    int64_t first = 0, behind = INT64_MAX, i = 0;
    if (within && within->n > 0) {
        const colo_run_t *last = &within->run[within->n - 1];
        first = within->run[0].row;
        behind = last->row + last->count;
        if (halo->pieces.n > 0) {
            colo_ranges_t pieces =
                COLO_RANGES((const colo_halo_piece_t *)halo->pieces.items, row, count);
            pieces.index = halo->by_block.items;
            i = colo_first_behind(pieces, halo->lo[block], halo->lo[block + 1], first) -
                halo->lo[block];
        }
    }
    runs->n = runs->rows = 0;
    for (; i < colo_halo_count(halo, block); i++) {
        const colo_halo_piece_t *piece = colo_halo_piece(halo, block, i);
        const int64_t end = piece->row + piece->count;
        const int64_t lo = piece->fresh > first ? piece->fresh : first,
                      hi = end < behind ? end : behind;
        if (piece->fresh >= behind)
            break;
        if (lo < hi)
            COLO_TRY(colo_runs_push(runs, lo, hi - lo, colo_halo_local(halo, piece, lo)));
    }
    return COLO_OK;
}

static colo_status_t visit(const colo_side_t *side, const colo_runs_t *mine, colo_list_t *met)
{
    const colo_ragged_t *ragged = side->table;
    const colo_halo_t *halo = &ragged->halo;
    const colo_halo_piece_t *piece = halo->pieces.items;
    COLO_ENDS(colo_list_deinit) colo_list_t list = {0};
    for (int64_t k = 0, i = 0; k < mine->n; k++) {
        const int64_t r0 = mine->run[k].row, r1 = r0 + mine->run[k].count;
        i = colo_first_behind(COLO_RANGES(piece, row, count), i, halo->pieces.n, r0);
        /* whole halos: which rows are fresh is each block's own matter */
        for (int64_t j = i;
             j < halo->pieces.n && piece[j].row - colo_halo_front(halo, &piece[j]) < r1; j++) {
            const int64_t end = piece[j].row + piece[j].count;
            const int64_t lo = piece[j].fresh > r0 ? piece[j].fresh : r0, hi = end < r1 ? end : r1;
            if (lo < hi)
                COLO_TRY(colo_packed_count(piece[j].block, hi - lo, &list));
        }
    }
    return colo_packed_blocks(side, &ragged->dst, &list, met);
}

const colo_ownership_t colo_owns_halo = {.rows = rows, .visit = visit, .tables = true};

/* ---- places of a row ---- */

static colo_status_t add_partial(const colo_side_t *side, const colo_halo_piece_t *piece, int64_t n,
                                 int64_t row, int64_t end, colo_list_t *places,
                                 colo_list_t *partials)
{
    const colo_ragged_t *ragged = side->table;
    for (int64_t i = 0; i < n; i++) {
        colo_place_t place = {.local = colo_halo_local(&ragged->halo, &piece[i], row)};
        memset(place.coord, -1, sizeof place.coord);
        colo_packed_coords(side, &ragged->dst, piece[i].block, place.coord);
        COLO_PUSH(places, "plan: %lld places of rows", place);
    }
    COLO_PUSH(partials, "plan: %lld runs of rows with halos",
              (colo_partial_t){.n = n, .row = row, .count = end - row});
    return COLO_OK;
}

colo_status_t colo_halo_partials(const colo_side_t *side, const colo_runs_t *mine, int64_t block,
                                 colo_list_t *places, colo_list_t *partials, int64_t *addends)
{
    const colo_halo_t *halo = &((const colo_ragged_t *)side->table)->halo;
    const colo_halo_piece_t *piece = halo->pieces.items;
    int64_t s = 0;
    places->n = partials->n = 0;
    *addends = 1;
    for (int64_t i = 0; i < halo->pieces.n; i++) {
        const int64_t end = piece[i].row + piece[i].count;
        /* pieces [i, k) have @row: its own, and those behind whose halos reach back to it */
        for (int64_t row = piece[i].row, k = i + 1, next; row < end; row = next) {
            bool here = piece[i].block == block;
            next = end;
            for (; k < halo->pieces.n && piece[k].seq == piece[i].seq && piece[k].count > 0; k++) {
                const int64_t first = piece[k].row - colo_halo_front(halo, &piece[k]);
                if (first > row) {
                    next = first < end ? first : end;
                    break;
                }
            }
            *addends = k - i > *addends ? k - i : *addends;
            for (int64_t j = i + 1; j < k && !here; j++)
                here = piece[j].block == block;
            while (mine && s < mine->n && mine->run[s].row + mine->run[s].count <= row)
                s++;
            if (here || (mine && s < mine->n && mine->run[s].row < next))
                COLO_TRY(add_partial(side, &piece[i], k - i, row, next, places, partials));
        }
    }
    colo_place_t *place = places->items; /* which has moved while it grew */
    for (int64_t i = 0; i < partials->n; i++) {
        colo_partial_t *partial = (colo_partial_t *)partials->items + i;
        partial->place = place;
        place += partial->n;
    }
    return COLO_OK;
}
