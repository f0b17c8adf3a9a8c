/* SPDX-License-Identifier: Apache-2.0 */
/* packed_case.c - see packed_case.h. */
#include "harness/packed_case.h"

#include "harness/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1024, HALO = 7 }; /* rows of a rank; rows in front of a piece */

/* ---- random cases ---- */

static void random_side(ref_packed_t *s, uint64_t *r, int64_t most)
{
    int64_t tp, cp, dp;
    do {
        tp = 1 + t_below(r, 3);
        cp = 1 + t_below(r, 8);
        dp = 1 + t_below(r, 4);
    } while (tp * cp * dp > most);
    s->grid = t_side_ordered((int)t_below(r, T_ORDERS), tp, cp, dp, false);
    const bool sp = tp > 1 && t_below(r, 2), heads = t_below(r, 4) == 0, whole = t_below(r, 3) == 0;
    s->p.cut = (ref_packed_cut_t)t_below(r, 5);
    t_packed_split(s, sp, heads ? "cp" : tp > 1 && !sp && !whole ? "tp" : NULL);
}

void t_packed_split(ref_packed_t *s, bool sp, const char *features)
{
    if (features && strcmp(features, "cp") == 0)
        s->grid.nsplits[1] = 0;
    if (sp)
        t_side_split(&s->grid, 1, "tp", REF_BLOCK, false);
    if (features)
        t_side_split(&s->grid, 2, features, REF_BLOCK, false);
}

static void random_tables(t_packed_t *t, int k, uint64_t *r)
{
    ref_packed_t *s = &t->side[k];
    const int64_t n = s->p.nseq, cp = ref_packed_cp(s);
    const bool cuts = s->p.cut <= REF_CUT_ZIGZAG;
    const bool own = cuts && t_below(r, 2); /* context ranks of each sequence */
    int64_t pieces = 0;
    s->p.len = t->len;
    s->p.dp = t_below(r, 4) || ref_side_dp(&s->grid) > 1 ? t->dp[k] : NULL;
    s->p.cp = own ? t->cp[k] : NULL;
    s->p.first = own && t_below(r, 4) ? t->first[k] : NULL;
    s->p.start = s->p.cut == REF_CUT_TABLE ? t->start[k] : NULL;
    s->p.piece = s->p.start ? t->piece[k] : NULL;
    s->p.owner = s->p.start ? t->owner[k] : NULL;
    t->start[k][0] = 0;
    for (int64_t q = 0; q < n; q++) {
        t->dp[k][q] = t_below(r, ref_side_dp(&s->grid));
        t->first[k][q] = t_below(r, cp);
        t->cp[k][q] = 1 + t_below(r, s->p.first ? cp - t->first[k][q] : cp);
        int64_t left = s->p.room ? s->p.room[q] : t->len[q];
        for (int64_t m = t_below(r, 6); m >= 0; m--) { /* some pieces and owners have nothing */
            t->piece[k][pieces] = m ? t_below(r, left + 1) : left;
            left -= t->piece[k][pieces];
            t->owner[k][pieces++] = t_below(r, 1 + t_below(r, cp));
        }
        t->start[k][q + 1] = pieces;
    }
}

/* What the room of a sequence of side @s is a multiple of. */
static int64_t unit_of(const ref_packed_t *s)
{
    const int64_t cp = ref_packed_cp(s);
    return s->p.cut == REF_CUT_ZIGZAG ? 2 * cp : s->p.cut == REF_CUT_BLOCK ? cp : 1;
}

/* Room for what the cut asks, and sometimes more; @t->len has the lengths. */
static void random_rooms(t_packed_t *t, int k, uint64_t *r)
{
    const ref_packed_t *s = &t->side[k];
    const int64_t unit = unit_of(s);
    for (int64_t q = 0; q < s->p.nseq; q++)
        t->room[k][q] = unit * ((t->len[q] + unit - 1) / unit + (t_below(r, 4) == 0));
}

void t_packed_random(t_packed_t *t, uint64_t seed, int64_t most)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F64, COLO_I64, COLO_U8};
    uint64_t r = seed;
    do {
        memset(t, 0, sizeof *t);
        t->seed = seed;
        int64_t unit = 1;
        bool rooms[2];
        for (int k = 0; k < 2; k++) {
            random_side(&t->side[k], &r, most);
            rooms[k] = t_below(&r, 3) == 0;
        }
        for (int k = 0; k < 2; k++) /* what most lengths are a multiple of */
            unit *= rooms[k] ? 1
                    : t->side[k].p.cut == REF_CUT_CONTIGUOUS && t_below(&r, 2)
                        ? ref_packed_cp(&t->side[k])
                        : unit_of(&t->side[k]);
        const int64_t n = t_below(&r, T_PACKED_SEQS + 1);
        for (int64_t q = 0; q < n; q++)
            t->len[q] = t_below(&r, 4) == 0 ? 0
                        : unit > 48         ? unit * t_below(&r, 2)
                                            : unit * t_below(&r, 1 + 48 / unit);
        for (int k = 0; k < 2; k++) {
            t->side[k].p.nseq = n;
            t->side[k].p.room = rooms[k] ? t->room[k] : NULL;
            random_rooms(t, k, &r);
            random_tables(t, k, &r);
        }
    } while (!ref_packed_valid(&t->side[0]) || !ref_packed_valid(&t->side[1]));
    const ref_side_t *src = &t->side[0].grid, *dst = &t->side[1].grid;
    t->h = src->nsplits[2] || dst->nsplits[2]
               ? ref_side_extent(src, "tp") * ref_side_extent(src, "cp") *
                     ref_side_extent(dst, "tp") * ref_side_extent(dst, "cp")
               : 1 + t_below(&r, 5);
    t->side[1].p.halo =
        t->side[1].p.cut == REF_CUT_WHOLE || t_below(&r, 3) ? 0 : t_below(&r, 1 + HALO);
    t->dtype = dtypes[t_below(&r, t_packed_sums(t) || t->side[1].p.halo ? 3 : 5)];
    t->ranks_per_node = t_below(&r, 2) ? 0 : 1 + t_below(&r, 4);
    t->max_rows = t_below(&r, 4) ? 0 : 10000;
    t->world = (int32_t)(ref_side_size(src) > ref_side_size(dst) ? ref_side_size(src)
                                                                 : ref_side_size(dst));
}

const char *t_packed_text(const t_packed_t *t)
{
    static _Thread_local char text[1024];
    size_t n =
        (size_t)snprintf(text, sizeof text, "seed %llu, %lld features of %s, lengths",
                         (unsigned long long)t->seed, (long long)t->h, colo_dtype_name(t->dtype));
    for (int64_t q = 0; q < t->side[0].p.nseq && n < sizeof text; q++)
        n += (size_t)snprintf(text + n, sizeof text - n, " %lld", (long long)t->len[q]);
    if (t->side[1].p.halo && n < sizeof text)
        n += (size_t)snprintf(text + n, sizeof text - n, "; halo %lld",
                              (long long)t->side[1].p.halo);
    for (int k = 0; k < 2 && n < sizeof text; k++) {
        n += (size_t)snprintf(text + n, sizeof text - n, "; cut %d, ", t->side[k].p.cut);
        for (int64_t q = 0; t->side[k].p.room && q < t->side[k].p.nseq && n < sizeof text; q++)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%lld", q ? " " : "rooms ",
                                  (long long)t->room[k][q]);
        n += n < sizeof text ? t_side_text(&t->side[k].grid, text + n, sizeof text - n) : 0;
    }
    return text;
}

/* ---- the library's ---- */

colo_packing_t t_packing(const ref_packing_t *p)
{
    return (colo_packing_t){COLO_PACKING_INIT,
                            .nseqs = p->nseq,
                            .seq_len = p->len,
                            .seq_dp = p->dp,
                            .seq_cp = p->cp,
                            .seq_first = p->first,
                            .split = (colo_packing_split_t)p->cut,
                            .piece_start = p->start,
                            .piece_len = p->piece,
                            .piece_owner = p->owner,
                            .seq_room = p->room,
                            .halo_before = p->halo};
}

bool t_packed_sums(const t_packed_t *t)
{
    return t->side[1].p.cut == REF_CUT_WHOLE && ref_packed_cp(&t->side[1]) > 1;
}

/* The plan that colo-plan shows is the one of the batch. */
static colo_status_t same_plan(const colo_batch_t *batch, const t_packed_t *t, int64_t rank)
{
    const colo_packing_t p[2] = {t_packing(&t->side[0].p), t_packing(&t->side[1].p)};
    const colo_plan_t *a = colo_batch_plan(batch);
    colo_layout_t src, dst;
    colo_plan_t *b = NULL;
    int64_t rows[2][2];
    rank_try(t_layout(&src, &t->side[0].grid));
    rank_try(t_layout(&dst, &t->side[1].grid));
    const colo_plan_config_t *own = colo_plan_config(a); /* a bridge finds the nodes by itself */
    const colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &src,
                                  .dst = &dst,           .shape = {.features = t->h},
                                  .dtype = t->dtype,     .ranks_per_node = own->ranks_per_node,
                                  .nodes = own->nodes,   .one_level = own->one_level};
    rank_try(colo_plan_create_packed(&b, &c, &p[0], &p[1], rank));
    colo_plan_rows(a, &rows[0][0], &rows[0][1]);
    colo_plan_rows(b, &rows[1][0], &rows[1][1]);
    bool same = colo_plan_hash(a) == colo_plan_hash(b) && memcmp(rows[0], rows[1], 16) == 0;
    for (int i = 0; i < 4 && same; i++) {
        const colo_pass_t pass = (colo_pass_t)(i / 2);
        int32_t n[2];
        const colo_plan_message_t *m = (i % 2 ? colo_plan_sends : colo_plan_recvs)(a, pass, &n[0]);
        const colo_plan_message_t *w = (i % 2 ? colo_plan_sends : colo_plan_recvs)(b, pass, &n[1]);
        same = n[0] == n[1] && t_plan_bytes(a, pass).local == t_plan_bytes(b, pass).local &&
               t_plan_bytes(a, pass).recv == t_plan_bytes(b, pass).recv;
        for (int32_t k = 0; k < n[0] && same; k++)
            same = m[k].peer == w[k].peer && t_same_message(&m[k], &w[k]);
    }
    colo_plan_destroy(&b);
    rank_check(same);
    return COLO_OK;
}

colo_status_t t_packed_bridge(colo_bridge_t **bridge, const t_packed_t *t, colo_comm_t *comm)
{
    colo_layout_t src, dst;
    rank_try(t_layout(&src, &t->side[0].grid));
    rank_try(t_layout(&dst, &t->side[1].grid));
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT,
                                         .src = &src,
                                         .dst = &dst,
                                         .shape = {.features = t->h},
                                         .dtype = t->dtype,
                                         .ranks_per_node = t->ranks_per_node,
                                         .max_rows = t->max_rows,
                                         .mem = t->where ? COLO_MEM_CUDA : COLO_MEM_HOST,
                                         .packed = true};
    return colo_bridge_create(bridge, &config, comm);
}

/* ---- tensors ---- */

typedef struct block {
    t_buffer_t b;
    int64_t rows, lo, hi, *q, *pos, *piece;
} block_t;

static void drop(block_t *b)
{
    t_buffer_free(&b->b);
    free(b->q);
    free(b->pos);
    free(b->piece);
}

/* Is row @i padding, or in front of a sequence, or of padding alone? */
static bool is_zero(const t_packed_t *t, const block_t *b, int64_t i)
{
    const int64_t length = t->len[b->q[i]],
                  last = b->pos[i] < b->piece[i] ? b->piece[i] : b->pos[i];
    return b->pos[i] < 0 || last >= length;
}

/* Where the pieces begin that have a row. @joins: of the destination. */
static int64_t pieces_with(const t_packed_t *t, const bool *joins, int64_t q, int64_t pos,
                           int64_t begin[1 + HALO])
{
    int64_t n = 1;
    begin[0] = pos;
    while (begin[0] > 0 && joins[q * MOST + begin[0]])
        begin[0]--;
    for (int64_t i = pos + 1; i <= pos + t->side[1].p.halo && i < t->len[q]; i++)
        if (!joins[q * MOST + i])
            begin[n++] = i;
    return n;
}

/* Feature @h of a row of side @k: what moves, or the addend of context rank @own, or of the piece
 * that begins there, or their sum. */
static void encode(const t_packed_t *t, const bool *joins, int k, int64_t q, int64_t pos, int64_t h,
                   bool sums, int64_t own, void *to)
{
    const char *dtype = colo_dtype_name(t->dtype);
    const bool halo = t->side[1].p.halo > 0;
    const int bits = ref_partial_bits(dtype) - (halo ? 3 : 0); /* 1 + HALO are added up */
    int64_t sum = 0, begin[1 + HALO];
    if (!sums) {
        ref_encode_move(dtype, 1 + h + t->h * (pos + 1024 * q), to);
        return;
    }
    const int64_t n = k == 0 && halo ? pieces_with(t, joins, q, pos, begin) : 0;
    for (int64_t i = 0; i < n; i++)
        sum += ref_code_partial(begin[i], q, pos, h + (int64_t)t->seed, bits);
    if (k == 1 && halo)
        sum = ref_code_partial(own, q, pos, h + (int64_t)t->seed, bits);
    for (int64_t c = 0; !halo && c < ref_packed_cp(&t->side[1]); c++)
        if (k == 0 || c == own)
            sum += ref_code_partial(c, q, pos, h + (int64_t)t->seed, bits);
    ref_encode_number(dtype, (double)sum, to);
}

/* What @rank has on side @k, in forward or backward; @blank: before a call has written it. */
static colo_status_t make(block_t *b, const t_packed_t *t, int k, int64_t rank, bool backward,
                          bool blank)
{
    const ref_packed_t *side = &t->side[k];
    const bool sums = backward && (t_packed_sums(t) || t->side[1].p.halo > 0);
    bool joins[T_PACKED_SEQS * MOST];
    b->rows = ref_packed_rows(side, rank, NULL, NULL, NULL);
    b->q = calloc((size_t)b->rows + 1, sizeof *b->q);
    b->pos = calloc((size_t)b->rows + 1, sizeof *b->pos);
    b->piece = calloc((size_t)b->rows + 1, sizeof *b->piece);
    rank_check(b->q && b->pos && b->piece);
    (void)ref_packed_rows(side, rank, b->q, b->pos, b->piece);
    if (sums && k == 0)
        ref_packed_joins(&t->side[1], MOST, joins);
    ref_packed_features(side, rank, t->h, &b->lo, &b->hi);
    const int64_t n = b->hi - b->lo, step = n + (int64_t)(t->seed % 3);
    rank_try(t_buffer_rows(&b->b, t->dtype, b->rows, n, step, 1));
    for (int64_t i = 0; !blank && i < b->rows; i++)
        if (is_zero(t, b, i)) /* anything, other on each rank; then zeros */
            memset(b->b.raw + (size_t)(i * step) * colo_dtype_size(t->dtype),
                   k == backward ? 0x41 + (int)(rank % 16) : 0,
                   (size_t)n * colo_dtype_size(t->dtype));
        else
            for (int64_t h = 0; h < n; h++)
                encode(t, joins, k, b->q[i], b->pos[i], b->lo + h, sums,
                       side->p.halo ? b->piece[i] : ref_side_coord(&side->grid, rank, "cp"),
                       b->b.raw + (size_t)(i * step + h) * colo_dtype_size(t->dtype));
    return COLO_OK;
}

/* How often @rank has row (q, pos) and feature h of @b. */
static int64_t count(const t_packed_t *t, const block_t *b, int64_t q, int64_t pos, int64_t h)
{
    int64_t n = 0;
    for (int64_t i = 0; h >= b->lo && h < b->hi && i < b->rows; i++)
        n += b->q[i] == q && b->pos[i] == pos && !is_zero(t, b, i);
    return n;
}

int64_t t_packed_receives(const t_packed_t *t, int64_t rank, colo_pass_t pass)
{
    T_ENDS(drop) block_t src = {0}, dst = {0};
    block_t *part[2] = {&src, &dst};
    const bool back = pass == COLO_PASS_BACKWARD, halo = t->side[1].p.halo > 0;
    bool joins[T_PACKED_SEQS * MOST];
    int64_t n = 0;
    for (int k = 0; k < 2; k++)
        if (make(part[k], t, k, rank, false, true) < 0)
            return -1;
    const block_t *need = part[!back], *hold = part[back];
    ref_packed_joins(&t->side[1], MOST, joins);
    for (int64_t i = 0; i < need->rows; i++) {
        const int64_t q = need->q[i], pos = need->pos[i];
        int64_t begin[1 + HALO],
            addends = back && t_packed_sums(t) ? ref_packed_cp(&t->side[1]) : 1;
        bool again = is_zero(t, need, i); /* a row that is in several pieces comes once */
        for (int64_t j = 0; j < i; j++)
            again |= need->q[j] == q && need->pos[j] == pos && !is_zero(t, need, j);
        if (again)
            continue;
        if (back && halo)
            addends = pieces_with(t, joins, q, pos, begin);
        for (int64_t h = need->lo; h < need->hi; h++) {
            const int64_t here = count(t, hold, q, pos, h);
            n += back && halo ? addends - here : addends - (here > 0);
        }
    }
    return n;
}

static colo_status_t one_message_per_peer(const colo_batch_t *batch, colo_pass_t pass)
{
    for (int sends = 0; sends < 2; sends++) {
        int32_t n;
        const colo_plan_message_t *m = sends ? colo_plan_sends(colo_batch_plan(batch), pass, &n)
                                             : colo_plan_recvs(colo_batch_plan(batch), pass, &n);
        for (int32_t i = 0; i < n; i++)
            rank_check(m[i].bytes > 0 && (i == 0 || m[i - 1].peer < m[i].peer));
    }
    return COLO_OK;
}

colo_status_t t_packed_pass(colo_batch_t *batch, const t_packed_t *t, colo_comm_t *comm,
                            colo_pass_t pass)
{
    const bool back = pass == COLO_PASS_BACKWARD;
    const int64_t rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    const int64_t elem = (int64_t)colo_dtype_size(t->dtype);
    T_ENDS(drop) block_t in = {0}, out = {0}, want = {0};
    rank_try(make(&in, t, back, rank, back, false));
    rank_try(make(&out, t, !back, rank, back, true));
    rank_try(make(&want, t, !back, rank, back, false));
    const colo_stream_t stream = t->where ? t->where->stream : NULL;
    rank_try(t_buffer_put(t->where, &in.b));
    rank_try(t_buffer_put(t->where, &out.b));
    const bool none = t->seed % 2; /* ranks without rows bring nothing */
    const colo_tensor_t *ti = none && colo_tensor_count(&in.b.t) == 0 ? NULL : &in.b.t;
    const colo_tensor_t *to = none && colo_tensor_count(&out.b.t) == 0 ? NULL : &out.b.t;
    const colo_plan_bytes_t b = t_plan_bytes(colo_batch_plan(batch), pass);
    const int64_t least = t_packed_receives(t, rank, pass) * elem;
    const bool adds = back && (t_packed_sums(t) || t->side[1].p.halo > 0) &&
                      t->ranks_per_node; /* nodes may add up, or pass on sums */
    rank_check(adds ? b.minimum <= least : b.minimum == least && b.recv == least);
    rank_try(one_message_per_peer(batch, pass));
    colo_comm_stats_t before, after;
    t_comm_stats(comm, &before);
    rank_try(t_buffers_quiet(t->where));
    rank_try(back ? colo_batch_backward(batch, ti, to, 1, stream)
                  : colo_batch_forward(batch, ti, to, 1, stream));
    t_comm_stats(comm, &after);
    rank_try(t_buffers_quiet(t->where));
    rank_try(t_buffer_get(t->where, &in.b));
    rank_try(t_buffer_get(t->where, &out.b));
    const int op = COLO_OP_EXCHANGE, owner = COLO_CATEGORY_BRIDGE;
    rank_check(adds ||
               after.recv_bytes[op][owner] - before.recv_bytes[op][owner] == (uint64_t)least);
    const bool same = memcmp(out.b.raw, want.b.raw, out.b.bytes) == 0;
    if (!same)
        fprintf(stderr, "rank %lld, %s differs: %s\n", (long long)rank,
                back ? "backward" : "forward", t_packed_text(t));
    rank_check(same);
    return COLO_OK;
}

static colo_status_t check_index(const t_packed_t *t, int k, int64_t rank)
{
    colo_layout_t layout;
    T_ENDS(drop) block_t b = {0};
    int64_t rows, n, index[2 * MOST], begin[MOST + 1];
    const colo_packing_t p = t_packing(&t->side[k].p);
    rank_try(t_layout(&layout, &t->side[k].grid));
    rank_try(make(&b, t, k, rank, false, true));
    rank_try(colo_packing_rows(&p, &layout, rank, &rows));
    rank_check(rows == b.rows && rows <= MOST);
    rank_try(colo_packing_index(&p, &layout, rank, index));
    for (int64_t i = 0; i < rows; i++)
        rank_check(index[i] == b.pos[i] && index[rows + i] == b.q[i]);
    int64_t most, found = 0;
    rank_try(colo_packing_most_rows(&p, &layout, &most));
    for (int64_t i = 0; i < ref_side_size(&t->side[k].grid); i++) {
        const int64_t has = ref_packed_rows(&t->side[k], i, NULL, NULL, NULL);
        found = has > found ? has : found;
    }
    rank_check(most == found);
    rank_try(colo_packing_pieces(&p, &layout, rank, NULL, &n));
    rank_check(n <= MOST);
    rank_try(colo_packing_pieces(&p, &layout, rank, begin, &n));
    for (int64_t i = 0, at = 0; i < rows; i++) {
        const bool begins = i == 0 || b.q[i] != b.q[i - 1] || b.piece[i] != b.piece[i - 1];
        rank_check(!begins || (at < n && begin[at] == i));
        at += begins;
        rank_check(i + 1 < rows || (at == n && begin[n] == rows));
    }
    return COLO_OK;
}

static colo_status_t run_batch(colo_bridge_t *bridge, colo_batch_t **batch, const t_packed_t *t,
                               colo_comm_t *comm)
{
    const int64_t rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    const colo_packing_t src = t_packing(&t->side[0].p), dst = t_packing(&t->side[1].p);
    int64_t rows[2];
    rank_try(check_index(t, 0, rank));
    rank_try(check_index(t, 1, rank));
    rank_try(colo_bridge_set_packing(bridge, &src, &dst, batch));
    colo_bridge_rows(bridge, &rows[0], &rows[1]);
    rank_check(rows[0] == ref_packed_rows(&t->side[0], rank, NULL, NULL, NULL) &&
               rows[1] == ref_packed_rows(&t->side[1], rank, NULL, NULL, NULL));
    rank_try(same_plan(*batch, t, rank));
    rank_try(t_packed_pass(*batch, t, comm, COLO_PASS_FORWARD));
    return t_packed_pass(*batch, t, comm, COLO_PASS_BACKWARD);
}

colo_status_t t_packed_on(const t_packed_t *t, colo_comm_t *comm)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    colo_status_t st = t_packed_bridge(&bridge, t, comm);
    if (st == COLO_OK)
        st = run_batch(bridge, &batch, t, comm);
    if (st == COLO_OK)
        st = t_buffers_quiet(t->where);
    return st;
}
