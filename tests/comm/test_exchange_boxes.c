/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_exchange_boxes.c - grouped exchange: any boxes, any pattern of ranks that talk, and what
 * happens when two sides do not expect the same.
 *
 * Random patterns come from one seed that all ranks share, so that a receiver can tell what must
 * lie where from the sender's coordinates alone; everything outside its boxes must stay as it was.
 */
#include "harness/harness.h"

#include <stdatomic.h>

enum { RANKS = 8, CAPACITY = 4096, MAX_BOXES = 4 };

/* element @index of rank @r's send buffer of repetition @rep, cut to the element's size */
static uint64_t code(int32_t r, int64_t index, int rep)
{
    uint64_t s = ((uint64_t)r << 32) ^ (uint64_t)index ^ ((uint64_t)rep << 48);
    return t_rand(&s);
}

/* ---- random patterns ---- */

struct pair { /* what one rank sends to another: extents, and where it lies on either side */
    int32_t nboxes;
    int64_t extent[MAX_BOXES][3], from_stride[MAX_BOXES][3], to_stride[MAX_BOXES][3];
    int64_t from[MAX_BOXES], to[MAX_BOXES];
};

struct pattern {
    int32_t n;
    colo_dtype_t dtype;
    bool talks[RANKS][RANKS];
    struct pair pair[RANKS][RANKS];
};

/* Strides of @extent in a random axis order with random gaps; returns elements from first to last.
 */
static int64_t random_strides(uint64_t *seed, const int64_t *extent, int64_t *stride)
{
    int axis[3] = {0, 1, 2};
    for (int i = 2; i > 0; i--) {
        int j = (int)t_below(seed, i + 1), swap = axis[i];
        axis[i] = axis[j];
        axis[j] = swap;
    }
    int64_t step = 1 + t_below(seed, 3) / 2;
    for (int i = 0; i < 3; i++) {
        stride[axis[i]] = step;
        step = step * (extent[axis[i]] ? extent[axis[i]] : 1) + t_below(seed, 3) / 2;
    }
    return step;
}

static void random_pattern(struct pattern *p, uint64_t *seed)
{
    int64_t to_offset[RANKS] = {0}; /* receives of a rank must not overlap */
    p->n = (int32_t)(2 + t_below(seed, RANKS - 1));
    p->dtype = (colo_dtype_t)t_below(seed, COLO_DTYPE_COUNT);
    int64_t density = t_below(seed, 5);
    for (int32_t i = 0; i < p->n; i++)
        for (int32_t j = 0; j < p->n; j++) {
            struct pair *q = &p->pair[i][j];
            p->talks[i][j] = i != j && t_below(seed, 4) < density;
            q->nboxes = (int32_t)t_below(seed, MAX_BOXES + 1);
            for (int32_t k = 0; k < q->nboxes; k++) {
                for (int a = 0; a < 3; a++)
                    q->extent[k][a] = t_below(seed, 6) ? 1 + t_below(seed, 4) : t_below(seed, 2);
                int64_t span = random_strides(seed, q->extent[k], q->from_stride[k]);
                q->from[k] = t_below(seed, CAPACITY - span);
                span = random_strides(seed, q->extent[k], q->to_stride[k]);
                q->to[k] = to_offset[j];
                to_offset[j] += span + t_below(seed, 3);
            }
        }
}

static void fill_box(colo_box_t *b, unsigned char *base, int64_t index, const int64_t *extent,
                     const int64_t *stride, size_t elem)
{
    b->data = base + (size_t)index * elem;
    for (int a = 0; a < 3; a++) {
        b->extent[a] = extent[a];
        b->stride[a] = stride[a];
    }
}

static colo_status_t pattern_rank(colo_comm_t *c, void *arg)
{
    const struct pattern *p = arg;
    const size_t elem = colo_dtype_size(p->dtype), memory = CAPACITY * RANKS;
    int32_t me = colo_comm_rank(c);
    unsigned char *out = malloc(CAPACITY * elem), *in = malloc(memory * elem),
                  *want = malloc(memory * elem);
    colo_box_t boxes[2][RANKS][MAX_BOXES];
    colo_message_t sends[RANKS], recvs[RANKS];
    for (int rep = 0; rep < 3; rep++) {
        int32_t nsends = 0, nrecvs = 0;
        memset(in, 0xd1, memory * elem);
        memset(want, 0xd1, memory * elem);
        for (int64_t i = 0; i < CAPACITY; i++) {
            uint64_t v = code(me, i, rep);
            memcpy(out + (size_t)i * elem, &v, elem);
        }
        for (int32_t r = 0; r < p->n; r++) {
            const struct pair *to = &p->pair[me][r], *from = &p->pair[r][me];
            if (p->talks[me][r]) {
                for (int32_t k = 0; k < to->nboxes; k++)
                    fill_box(&boxes[0][r][k], out, to->from[k], to->extent[k], to->from_stride[k],
                             elem);
                sends[nsends++] = (colo_message_t){r, to->nboxes, boxes[0][r]};
            }
            if (!p->talks[r][me])
                continue;
            for (int32_t k = 0; k < from->nboxes; k++) {
                const int64_t *e = from->extent[k], *f = from->from_stride[k],
                              *t = from->to_stride[k];
                fill_box(&boxes[1][r][k], in, from->to[k], e, t, elem);
                for (int64_t x = 0; x < e[0]; x++)
                    for (int64_t y = 0; y < e[1]; y++)
                        for (int64_t z = 0; z < e[2]; z++) {
                            uint64_t v =
                                code(r, from->from[k] + x * f[0] + y * f[1] + z * f[2], rep);
                            int64_t index = from->to[k] + x * t[0] + y * t[1] + z * t[2];
                            memcpy(want + (size_t)index * elem, &v, elem);
                        }
            }
            recvs[nrecvs++] = (colo_message_t){r, from->nboxes, boxes[1][r]};
        }
        rank_try(colo_comm_exchange(c, sends, nsends, recvs, nrecvs, p->dtype, NULL));
        rank_check(memcmp(in, want, memory * elem) == 0);
        memset(out, 0, CAPACITY * elem); /* mine again: no rank may still read it */
    }
    free(out);
    free(in);
    free(want);
    return COLO_OK;
}

T_CASE(random_patterns_move_exactly_their_boxes)
{
    uint64_t seed = t_seed();
    struct pattern *p = malloc(sizeof *p);
    for (int i = 0; i < 120; i++) {
        random_pattern(p, &seed);
        colo_status_t st = t_run_ranks(p->n, pattern_rank, p, sizeof *p);
        if (st != COLO_OK)
            fail_msg("pattern %d of %d ranks, %s: %s", i, p->n, colo_dtype_name(p->dtype),
                     colo_last_error());
    }
    free(p);
}

/* ---- messages of several pieces ---- */

T_CASE_ON(3, large_messages_go_in_pieces)
{
    enum { BIG = 3 * 1000 * 1000 + 7 };
    const int32_t n = colo_comm_size(world), me = colo_comm_rank(world), from = (me + n - 1) % n;
    uint32_t *x = malloc(BIG * sizeof *x), *y = malloc(BIG * sizeof *y);
    colo_box_t out = {x, {1, 1, BIG}, {0, 0, 1}}, in = {y, {1, 1, BIG}, {0, 0, 1}};
    colo_message_t send = {(me + 1) % n, 1, &out}, recv = {from, 1, &in};
    for (int64_t i = 0; i < BIG; i++)
        x[i] = (uint32_t)code(me, i, 0);
    rank_try(colo_comm_exchange(world, &send, 1, &recv, 1, COLO_I32, NULL));
    for (int64_t i = 0; i < BIG; i++)
        rank_check(y[i] == (uint32_t)code(from, i, 0));
    free(x);
    free(y);
    return COLO_OK;
}

/* Rank r sends to every higher rank a box of columns, received with the axes the other way round.
 */
T_CASE_ON(4, strided_boxes_of_several_pieces_arrive_element_by_element)
{
    enum { A = 300, B = 7, C = 50, ROW = 64, PART = A * B * C };
    const int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    uint16_t *x = malloc(sizeof *x * A * B * ROW), *y = malloc(sizeof *y * (size_t)n * PART);
    for (int64_t i = 0; i < A * B * ROW; i++)
        x[i] = (uint16_t)code(me, i, 0);
    memset(y, 0xff, sizeof *y * (size_t)n * PART);
    colo_box_t out[2] = {{x + 3, {A, B, C}, {B * ROW, ROW, 1}}, {x, {0, B, C}, {0, 0, 0}}},
               in[RANKS][2];
    colo_message_t send[RANKS], recv[RANKS];
    int32_t sends = 0, recvs = 0;
    for (int32_t r = me + 1; r < n; r++)
        send[sends++] = (colo_message_t){r, 2, out};
    for (int32_t r = 0; r < me; r++) {
        in[r][0] = (colo_box_t){y + (int64_t)r * PART, {A, B, C}, {1, A, (int64_t)A * B}};
        in[r][1] = (colo_box_t){NULL, {0, B, C}, {0, 0, 0}};
        recv[recvs++] = (colo_message_t){r, 2, in[r]};
    }
    rank_try(colo_comm_exchange(world, send, sends, recv, recvs, COLO_BF16, NULL));
    for (int32_t r = 0; r < n; r++)
        for (int64_t i = 0; i < PART; i++) {
            const int64_t from = 3 + i % A * B * ROW + i / A % B * ROW + i / A / B;
            rank_check(y[r * PART + i] == (r < me ? (uint16_t)code(r, from, 0) : 0xffff));
        }
    free(x);
    free(y);
    return COLO_OK;
}

/* ---- which rank waits for which ---- */

static colo_status_t pairs_rank(colo_comm_t *c, void *arg)
{
    _Atomic int *late = arg;
    int32_t me = colo_comm_rank(c), other = me ^ 1;
    int32_t mine = me * 10, got = -1;
    colo_box_t out = {&mine, {1, 1, 1}, {0, 0, 0}}, in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t send = {other, 1, &out}, recv = {other, 1, &in};
    /* ranks 2 and 3 come only when 0 and 1 are through: no rank waits for one it does not name */
    while (me >= 2 && atomic_load(late) < 2)
        ;
    for (int rep = 0; rep < 50; rep++) {
        mine = me * 10 + rep;
        rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_I32, NULL));
        rank_check(got == other * 10 + rep);
    }
    atomic_fetch_add(late, 1);
    return colo_comm_barrier(c, NULL);
}

T_CASE(an_exchange_waits_only_for_the_peers_it_names)
{
    T_THREADS_ONLY();
    _Atomic int late = 0;
    assert_ok(t_run_ranks(4, pairs_rank, &late, sizeof late));
}

T_CASE_ON(5, a_chain_of_one_way_messages_arrives_transposed)
{
    int32_t me = colo_comm_rank(world), n = colo_comm_size(world);
    double x[4] = {me, me + 0.25, me + 0.5, me + 0.75}, y[4] = {-1, -1, -1, -1};
    colo_box_t out = {x, {1, 2, 2}, {9, 2, 1}}, in = {y, {1, 2, 2}, {9, 1, 2}};
    colo_message_t send = {me + 1, 1, &out}, recv = {me - 1, 1, &in};
    for (int rep = 0; rep < 30; rep++) {
        rank_try(colo_comm_exchange(world, &send, me + 1 < n, &recv, me > 0, COLO_F64, NULL));
        double p = me - 1; /* transposed on arrival */
        rank_check(me == 0 ? y[0] == -1
                           : y[0] == p && y[2] == p + 0.25 && y[1] == p + 0.5 && y[3] == p + 0.75);
    }
    return colo_comm_barrier(world, NULL);
}

/* ---- two sides that differ ---- */

struct clash {
    const char *words, *checked; /* below check level 2, and there */
    int64_t extent[2][3];        /* what 0 sends, what 1 expects */
    int32_t nboxes[2];           /* 0: no message */
    int32_t check;
};

static colo_status_t clash_rank(colo_comm_t *c, void *arg)
{
    const struct clash *k = arg;
    int32_t me = colo_comm_rank(c);
    float x[64], y[64];
    for (int i = 0; i < 64; i++) {
        x[i] = (float)i;
        y[i] = -7;
    }
    colo_box_t out[2], in[2];
    for (int b = 0; b < 2; b++) {
        const int64_t *e = k->extent[0], *f = k->extent[1];
        out[b] = (colo_box_t){x, {e[0], e[1], e[2]}, {e[1] * e[2], e[2], 1}};
        in[b] = (colo_box_t){y + 32 * b, {f[0], f[1], f[2]}, {f[1] * f[2], f[2], 1}};
    }
    colo_message_t send = {1, k->nboxes[0], out}, recv = {0, k->nboxes[1], in};
    rank_try(colo_comm_set_check(c, k->check));
    rank_try(colo_comm_set_timeout(c, 20000));
    rank_try(colo_comm_barrier(c, NULL));
    const bool sends = me == 0 && k->nboxes[0], expects = me == 1 && k->nboxes[1];
    const colo_status_t st = colo_comm_exchange(c, &send, sends, &recv, expects, COLO_F32, NULL);
    if (k->check == 2 || sends || expects) /* a rank that names no other is through */
        rank_fails(st, COLO_ERR_MISMATCH, k->check == 2 ? k->checked : k->words);
    for (int i = 0; i < 64; i++)
        rank_check(y[i] == -7);
    if (k->check == 2) {
        rank_check(colo_comm_check(c) == COLO_OK);
        rank_try(colo_comm_barrier(c, NULL));
    }
    return COLO_OK;
}

T_CASE(sides_that_differ_are_a_mismatch)
{
    struct clash table[] = {
        {"box 0 of 1x4x3 elements where 1x3x4 are expected", "rank 0 sends rank 1 other boxes",
         .extent = {{1, 4, 3}, {1, 3, 4}}, .nboxes = {1, 1}},
        {"2 boxes where 1 are expected", "rank 0 sends rank 1 other boxes",
         .extent = {{1, 2, 2}, {1, 2, 2}}, .nboxes = {2, 1}},
        {"rank 1", "rank 0 sends rank 1 a message, which expects none",
         .extent = {{1, 2, 2}, {1, 2, 2}}, .nboxes = {1, 0}},
        {"rank 0", "rank 0 sends rank 1 no message, which expects one",
         .extent = {{1, 2, 2}, {1, 2, 2}}, .nboxes = {0, 1}},
    };
    for (int i = 0; i < 12; i++) {
        struct clash *k = &table[i / 3];
        k->check = i % 3;
        if (t_run_ranks(3, clash_rank, k, 0) < 0)
            fail_msg("clash %d at check %d: %s", i / 3, i % 3, colo_last_error());
    }
}

/* Rank 1 waits for rank 2, which comes only when all is over; rank 0 sends to 1 in vain. */
T_CASE_ON(3, a_receiver_that_waits_for_others_is_a_mismatch_at_once)
{
    int32_t me = colo_comm_rank(world), v = me;
    colo_box_t box = {&v, {1, 1, 1}, {0, 0, 0}};
    colo_message_t send = {1, 1, &box}, recv = {2, 1, &box};
    rank_try(colo_comm_set_timeout(world, 20000));
    while (me == 2 && colo_comm_check(world) == COLO_OK)
        ;
    if (me < 2)
        rank_fails(colo_comm_exchange(world, &send, me == 0, &recv, me == 1, COLO_I32, NULL),
                   COLO_ERR_MISMATCH, "rank 1 expects no message from it where it sends");
    rank_check(v == me);
    return COLO_OK;
}

/* ---- arguments ---- */

struct refusal {
    const char *text; /* NULL: the end */
    int32_t nsends, nrecvs;
    colo_message_t send[2], recv[2];
    colo_dtype_t dtype;
};

static colo_status_t refusal_rank(colo_comm_t *c, void *arg)
{
    const struct refusal *f = arg;
    rank_try(colo_comm_set_check(c, 2)); /* the comm lives on, so that one run tries them all */
    for (; f->text; f++) {
        bool mine = colo_comm_rank(c) == 1;
        colo_status_t st =
            mine ? colo_comm_exchange(c, f->nsends ? f->send : NULL, f->nsends,
                                      f->nrecvs ? f->recv : NULL, f->nrecvs, f->dtype, NULL)
                 : colo_comm_exchange(c, NULL, 0, NULL, 0, COLO_F32, NULL);
        if (st != (mine ? COLO_ERR_ARG : COLO_ERR_PEER) || !strstr(colo_last_error(), f->text)) {
            printf("expected \"%s\", got %s: %s\n", f->text, colo_status_name(st),
                   colo_last_error());
            rank_check(!"the refusal");
        }
    }
    return colo_comm_barrier(c, NULL);
}

/* Each sends one row to all, and receives rows of theirs into columns that lie in turn. */
T_CASE_ON(3, boxes_of_which_only_sends_overlap_are_taken)
{
    enum { N = 5 };
    const int32_t me = colo_comm_rank(world);
    float x[N], y[N][2];
    for (int i = 0; i < N; i++)
        x[i] = (float)(10 * me + i);
    const colo_box_t out = {x, {1, 1, N}, {0, 0, 1}},
                     in[2] = {{&y[0][0], {1, 1, N}, {0, 0, 2}}, {&y[0][1], {1, 1, N}, {0, 0, 2}}};
    const int32_t peer[2] = {me == 0, me == 2 ? 1 : 2};
    const colo_message_t send[2] = {{peer[0], 1, &out}, {peer[1], 1, &out}},
                         recv[2] = {{peer[0], 1, &in[0]}, {peer[1], 1, &in[1]}};
    rank_try(colo_comm_set_check(world, 2));
    rank_try(colo_comm_exchange(world, send, 2, recv, 2, COLO_F32, NULL));
    for (int i = 0; i < N; i++)
        rank_check(y[i][0] == (float)(10 * peer[0] + i) && y[i][1] == (float)(10 * peer[1] + i));
    return COLO_OK;
}

T_CASE(senseless_messages_are_refused_with_their_place)
{
    static float x[8];
    static const colo_box_t ok = {x, {1, 1, 4}, {0, 0, 1}};
    static const colo_box_t last = {x + 3, {1, 1, 4}, {0, 0, 1}};
    static const colo_box_t pair[2] = {{x, {1, 1, 3}, {0, 0, 2}}, {x + 1, {1, 1, 2}, {0, 0, 3}}};
    static const colo_box_t negative = {x, {1, -1, 4}, {0, 0, 1}};
    static const colo_box_t null = {NULL, {1, 1, 4}, {0, 0, 1}};
    static const colo_box_t backwards = {x, {1, 1, 4}, {0, 0, -1}};
    static const colo_box_t huge = {x, {INT64_MAX / 2, 3, 1}, {1, 1, 1}};
    static const colo_box_t far = {x, {2, 2, 1}, {INT64_MAX / 3, INT64_MAX / 3, 1}};
    const struct refusal table[] = {
        {"message to rank 2 follows that of rank 2", .nsends = 2,
         .send = {{2, 1, &ok}, {2, 1, &ok}}},
        {"message to rank 0 follows that of rank 2", .nsends = 2,
         .send = {{2, 1, &ok}, {0, 1, &ok}}},
        {"message from rank 0 follows that of rank 2", .nrecvs = 2,
         .recv = {{2, 1, &ok}, {0, 1, &ok}}},
        {"without self (1)", .nsends = 1, .send = {{1, 1, &ok}}},
        {"without self (1)", .nrecvs = 1, .recv = {{1, 1, &ok}}},
        {"rank 3, expected 0..2", .nsends = 1, .send = {{3, 1, &ok}}},
        {"rank -1, expected 0..2", .nsends = 1, .send = {{-1, 1, &ok}}},
        {"1 boxes at NULL", .nsends = 1, .send = {{0, 1, NULL}}},
        {"-2 boxes", .nsends = 1, .send = {{0, -2, &ok}}},
        {"message to rank 0, box 0 has extents 1x-1x4, expected >= 0", .nsends = 1, .send = {{0, 1, &negative}}},
        {"message to rank 0, box 0: data is NULL for 4 elements", .nsends = 1, .send = {{0, 1, &null}}},
        {"message from rank 2, box 0: axis 2 has stride -1", .nrecvs = 1, .recv = {{2, 1, &backwards}}},
        {"box 0 has extents 4611686018427387903x3x1", .nsends = 1, .send = {{0, 1, &huge}}},
        {"message to rank 0, box 0: more than 2^63 bytes", .nsends = 1, .send = {{0, 1, &far}}},
        {"message from rank 2, box 0 overlaps message to rank 0, box 0", .nsends = 1, .nrecvs = 1,
         .send = {{0, 1, &ok}}, .recv = {{2, 1, &last}}},
        {"message from rank 2, box 0 overlaps message to rank 2, box 0", .nsends = 1, .nrecvs = 1,
         .send = {{2, 1, &last}}, .recv = {{2, 1, &ok}}},
        {"message from rank 0, box 0 overlaps message from rank 2, box 0", .nrecvs = 2,
         .recv = {{0, 1, &last}, {2, 1, &ok}}},
        {"message from rank 0, box 0 overlaps message from rank 0, box 1", .nrecvs = 1,
         .recv = {{0, 2, pair}}},
        {"-1 entries", .nsends = -1},
        {"dtype 42", .dtype = (colo_dtype_t)42},
        {.text = NULL},
    };
    assert_ok(t_run_ranks(3, refusal_rank, (void *)(uintptr_t)table, 0));
}

T_MAIN("comm/exchange_boxes")
