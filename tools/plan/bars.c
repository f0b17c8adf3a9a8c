/* SPDX-License-Identifier: Apache-2.0 */
/* bars.c - see bars.h. */
#include "bars.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- pieces ---- */

bars_side_t bars_side(const plan_ask_t *ask, int k)
{
    const plan_batch_t *b = ask->batch;
    const colo_layout_t *layout = k ? &ask->dst : &ask->src;
    bars_side_t side = {ask, layout, b->side[k], colo_grid_extent(&layout->grid, "cp"), 1};
    if (!b->packed)
        side.packing = (colo_packing_t){COLO_PACKING_INIT, .nseqs = b->tables.nseqs,
                                        .seq_len = b->tables.seq_len, .seq_dp = b->tables.seq_dp,
                                        .split = COLO_PACKING_ZIGZAG};
    for (int i = 0; i < layout->nsplits[COLO_AXIS_ROWS]; i++)
        if (!layout->split[COLO_AXIS_ROWS][i].context)
            side.sp *= layout->grid.extent[layout->split[COLO_AXIS_ROWS][i].dim];
    return side;
}

int64_t bars_replica(const bars_side_t *side, int64_t q)
{
    return side->packing.seq_dp ? side->packing.seq_dp[q] : 0;
}

int64_t bars_room(const bars_side_t *side, int64_t q)
{
    const colo_packing_t *p = &side->packing;
    return p->seq_room ? p->seq_room[q] : p->seq_len[q];
}

/* CONTIGUOUS: where sequence @q lies among the rows of its replica, and how many each rank has. */
typedef struct interval {
    int64_t base, share;
} interval_t;

static interval_t interval_of(const bars_side_t *side, int64_t q)
{
    interval_t at = {0};
    for (int64_t r = 0; r < side->packing.nseqs; r++)
        if (bars_replica(side, r) == bars_replica(side, q)) {
            at.base += r < q ? bars_room(side, r) : 0;
            at.share += bars_room(side, r);
        }
    at.share /= side->cp;
    return at;
}

int64_t bars_pieces(const bars_side_t *side, int64_t q)
{
    const colo_packing_t *p = &side->packing;
    if (p->split == COLO_PACKING_CONTIGUOUS) {
        const interval_t at = interval_of(side, q);
        const int64_t room = bars_room(side, q);
        return room ? (at.base + room - 1) / at.share + 1 - at.base / at.share : 0;
    }
    const int64_t ranks = p->seq_cp ? p->seq_cp[q] : side->cp;
    return p->split == COLO_PACKING_WHOLE   ? 1
           : p->split == COLO_PACKING_TABLE ? p->piece_start[q + 1] - p->piece_start[q]
           : p->split == COLO_PACKING_ZIGZAG && ranks > 1 ? 2 * ranks
                                                          : ranks;
}

bars_piece_t bars_piece(const bars_side_t *side, int64_t q, int64_t k, int64_t pos)
{
    const colo_packing_t *p = &side->packing;
    const int64_t n = bars_pieces(side, q), first = p->seq_first ? p->seq_first[q] : 0;
    if (p->split == COLO_PACKING_WHOLE)
        return (bars_piece_t){0, 0, bars_room(side, q), BARS_ALL, 0, false};
    if (p->split == COLO_PACKING_TABLE)
        return (bars_piece_t){
            k, pos,  p->piece_len[p->piece_start[q] + k], p->piece_owner[p->piece_start[q] + k],
            0, false};
    if (p->split == COLO_PACKING_CONTIGUOUS) {
        const interval_t at = interval_of(side, q);
        const int64_t owner = (at.base + pos) / at.share,
                      end = (owner + 1) * at.share - at.base; /* a position of @q */
        return (bars_piece_t){k, pos, bars_at_most(end, bars_room(side, q)) - pos, owner, 0, false};
    }
    const bool mirrored = p->split == COLO_PACKING_ZIGZAG && n > 1 && k >= n / 2;
    return (bars_piece_t){k, pos,  bars_room(side, q) / n, first + (mirrored ? n - 1 - k : k),
                          0, false};
}

/* Rows of context rank @owner in sequences of the path's replica, up to position @pos of @q. */
static int64_t rows_before(const bars_path_t *path, int64_t owner, int64_t q, int64_t pos)
{
    const bars_side_t *side = &path->side;
    const int64_t dp = bars_replica(side, path->q);
    int64_t rows = 0;
    for (int64_t r = 0; r < side->packing.nseqs && r <= q; r++) {
        const int64_t n = bars_replica(side, r) == dp ? bars_pieces(side, r) : 0;
        for (int64_t k = 0, at = 0; k < n && (r < q || at < pos); k++) {
            const bars_piece_t piece = bars_piece(side, r, k, at);
            if (owner == BARS_ALL || piece.owner == owner)
                rows += r < q ? piece.count : bars_at_most(piece.count, pos - at);
            at += piece.count;
        }
    }
    return rows;
}

int64_t bars_row(const bars_path_t *path, int64_t owner, int64_t pos)
{
    return rows_before(path, owner, path->q, pos);
}

void bars_add(bars_path_t *path, bars_piece_t piece)
{
    int64_t k = 0;
    while (k < path->nranks && path->owner[k] != piece.owner)
        k++;
    if (path->n == PARTS_MAX || k == BARS_MAX) {
        path->more++;
        return;
    }
    path->piece[path->n++] = piece;
    if (k == path->nranks) {
        path->owner[path->nranks++] = piece.owner;
        path->length[k] = rows_before(path, piece.owner, path->side.packing.nseqs, 0);
    }
}

/* A context rank while its pieces go by. */
typedef struct holder {
    int64_t all, rows;      /* of its own; those that have gone by */
    int64_t length;         /* of its axis so far, with halos */
    int64_t seq, end, part; /* where its last run ends */
} holder_t;

/* The next positions of @piece, of sequence @r, from @piece->pos on: on one rank. */
static bars_piece_t next_part(const bars_side_t *side, holder_t *holder, int64_t r,
                              const bars_piece_t *piece)
{
    bars_piece_t part = *piece;
    const int64_t block = holder->all / side->sp, number = block ? holder->rows / block : 0;
    part.count = bars_at_most(part.count, (number + 1) * block - holder->rows);
    part.begins = holder->seq != r || holder->end != part.pos || holder->part != number;
    holder->length += part.begins ? side->packing.halo_before : 0;
    part.row = holder->length;
    holder->length += part.count;
    holder->rows += part.count;
    holder->seq = r;
    holder->end = part.pos + part.count;
    holder->part = number;
    return part;
}

bool bars_find_path(bars_path_t *path)
{
    const bars_side_t *side = &path->side;
    const int64_t dp = bars_replica(side, path->q);
    holder_t *holder = calloc((size_t)side->cp, sizeof *holder);
    for (int pass = 0; holder && pass < 2; pass++)
        for (int64_t r = 0; r < side->packing.nseqs; r++) {
            const int64_t n = bars_replica(side, r) == dp ? bars_pieces(side, r) : 0;
            for (int64_t k = 0, pos = 0; k < n; k++) {
                bars_piece_t piece = bars_piece(side, r, k, pos);
                holder_t *of = &holder[piece.owner < 0 ? 0 : piece.owner];
                pos += piece.count;
                of->all += pass ? 0 : piece.count;
                of->seq = pass ? of->seq : -1;
                while (pass && piece.count > 0) {
                    const bars_piece_t part = next_part(side, of, r, &piece);
                    if (r == path->q)
                        bars_add(path, part);
                    piece.pos += part.count;
                    piece.count -= part.count;
                }
            }
        }
    for (int64_t k = 0; holder && k < path->nranks; k++)
        path->length[k] = holder[path->owner[k] < 0 ? 0 : path->owner[k]].length;
    free(holder);
    return holder != NULL;
}

const char *bars_ranks(char out[48], int64_t *first, const bars_side_t *side, int64_t q,
                       int64_t owner)
{
    enum { NAMED = 4 };
    const plan_ask_t *ask = side->ask;
    const colo_grid_t *grid = &side->layout->grid;
    const int32_t dp = colo_grid_dim(grid, "dp"), cp = colo_grid_dim(grid, "cp");
    int named = 0;
    size_t n = 0;
    if (first)
        *first = owner;
    for (int64_t r = ask->first; ask->world <= PLAN_PART_MAX && r < ask->world; r++) {
        int64_t x[COLO_DIMS_MAX];
        if (!colo_layout_holds(side->layout, r) || colo_grid_coords(grid, r, x) != COLO_OK ||
            (dp >= 0 && x[dp] != bars_replica(side, q)) ||
            (cp >= 0 && owner >= 0 && x[cp] != owner))
            continue;
        if (first && named == 0)
            *first = r;
        if (named++ < NAMED)
            n += (size_t)snprintf(out + n, 48 - n, "%s%lld", n ? "," : "", (long long)r);
    }
    if (named == 0 || named > NAMED)
        snprintf(out, 48, owner < 0 ? "all" : "cp %lld", (long long)owner);
    return out;
}

/* ---- bars ---- */

bars_span_t bars_span(int64_t length, int64_t offset, int64_t count)
{
    const double per = length > 0 ? (double)SVG_PANEL / (double)length : 0;
    return (bars_span_t){(double)offset * per, (double)count * per};
}

void bars_track(FILE *f, bars_span_t at, double y)
{
    svg_rect(f, "track", at.x, y, at.width, BAR);
}

void bars_owner(FILE *f, double shade, bars_span_t at, double y, const char *name)
{
    svg_put(f, "<g fill-opacity='%.2f'>", shade);
    svg_rect(f, "chunk", at.x, y, at.width, STRIP);
    fputs("</g>", f);
    if (at.width > 6 * (double)strlen(name) + 2)
        svg_say(f, "owner", at.x + at.width / 2, y + STRIP - 4, "%s", name);
}

void bars_box(FILE *f, int64_t hue, bool faded, bars_span_t at, double y, double height,
              const char *fmt, ...)
{
    char class[32], name[64];
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    if (hue < 0)
        snprintf(class, sizeof class, "seg grey%s", faded ? " faded" : "");
    else
        snprintf(class, sizeof class, "seg h%d%s", (int)(hue % 6), faded ? " faded" : "");
    svg_rect(f, class, at.x, y, at.width, height);
    if (height >= BAR && at.width > 7 * n + 2)
        svg_say(f, "name", at.x + at.width / 2, y + height - 5, "%s", name);
}

void bars_cut(FILE *f, int64_t length, int64_t offset, double y)
{
    const double x = bars_span(length, offset, 0).x;
    svg_line(f, "cut", x, y - 2, x, y + BAR + 2);
}

void bars_ribbon(FILE *f, int64_t hue, bars_span_t from, double y0, bars_span_t to, double y1)
{
    char colour[8] = "grey";
    if (hue >= 0)
        snprintf(colour, sizeof colour, "h%d", (int)(hue % 6));
    svg_put(f, "<path class='ribbon %s' d='M%.1f %.1fL%.1f %.1fL%.1f %.1fL%.1f %.1fZ'/>\n", colour,
            from.x, y0, from.x + from.width, y0, to.x + to.width, y1, to.x, y1);
}

int64_t bars_at_most(int64_t n, int64_t most)
{
    return n < most ? n : most;
}

int64_t bars_longest(const int64_t *length, int64_t n)
{
    int64_t most = 0;
    for (int64_t q = 0; q < n; q++)
        most = length[q] > most ? length[q] : most;
    return most;
}

double bars_left_out(FILE *f, double y, int64_t n, const char *what)
{
    if (n <= 0)
        return y;
    svg_say(f, "text", 0, y + 12, "%lld more %s are not drawn.", (long long)n, what);
    return y + SVG_LINE;
}
