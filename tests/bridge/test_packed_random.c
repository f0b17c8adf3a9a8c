/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packed_random.c - 3,000 seeded batches of packings, on 1 to 12 ranks, against the oracle.
 *
 * Every split on either side, halos of several lengths, features and rows cut over tp, replicas
 * that differ, sequences of length 0, context ranks without a piece, nodes of several sizes, all
 * check levels. Forward and exact gradients are compared bit for bit, sums in whole numbers; the
 * bytes are the least there can be, in one message per pair of ranks. A failure prints the seed of
 * its case.
 */
#include "harness/harness.h"

#include "core/error.h"
#include "harness/packed_case.h"

#define CASES 3000
#define ON_PROCESSES 300

typedef struct job {
    t_packed_t t;
    int32_t check;
} job_t;

static colo_status_t on_rank(colo_comm_t *comm, void *arg)
{
    const job_t *j = arg;
    rank_try(colo_comm_set_check(comm, j->check));
    const colo_status_t st = t_packed_on(&j->t, comm);
    return st < 0 ? colo_fail_prefix(st, "%s", t_packed_text(&j->t)) : st;
}

static void after(void *arg, colo_status_t st)
{
    free(arg);
    assert_ok(st);
}

/* Is the last cut of that axis over @dim? */
static bool is_cut_over(const ref_packed_t *s, int axis, const char *dim)
{
    const int n = s->grid.nsplits[axis];
    return n && strcmp(s->grid.split[axis][n - 1].dim, dim) == 0;
}

T_CASE(random_packings_arrive_as_the_oracle_says)
{
    const uint64_t seed = t_seed();
    const int64_t n = t_scaled(t_ranks_are_threads() ? CASES : ON_PROCESSES);
    int64_t pair[5][5] = {{0}}, sums = 0, parts = 0, own = 0, rooms = 0, heads = 0, moved = 0,
            halos = 0;
    for (int64_t i = 0; i < n; i++) {
        job_t *j = malloc(sizeof *j);
        uint64_t r = seed + (uint64_t)i;
        assert_non_null(j);
        t_packed_random(&j->t, seed + (uint64_t)i, t_ranks_are_threads() ? 12 : 8);
        j->check = (int32_t)t_below(&r, 3);
        const ref_packed_t *s = j->t.side;
        pair[s[0].p.cut][s[1].p.cut]++;
        sums += t_packed_sums(&j->t);
        parts += is_cut_over(&s[0], 1, "tp") || is_cut_over(&s[1], 1, "tp");
        own += s[0].p.cp || s[1].p.cp;
        halos += s[1].p.halo > 0;
        rooms += s[0].p.room || s[1].p.room;
        heads += is_cut_over(&s[0], 2, "cp") || is_cut_over(&s[1], 2, "cp");
        for (int64_t k = 0; k < j->t.world; k++)
            if (t_packed_receives(&j->t, k, COLO_PASS_FORWARD)) {
                moved++;
                break;
            }
        t_run_later(j->t.world, on_rank, j, 0, after);
    }
    t_run_rest();
    for (int a = 0; a < 25 && n >= 300; a++) /* of fewer, chance leaves some pair out */
        assert_true(128 * pair[a / 5][a % 5] > n);
    assert_true(n < 50 || (32 * sums > n && 16 * parts > n && 8 * own > n && 4 * rooms > n &&
                           8 * heads > n && 2 * moved > n && 8 * halos > n));
}

/* ---- images among the text of a packing ---- */

enum { IMAGES = 8, ROWS = 512 };

typedef struct images {
    t_packed_t t; /* its destination */
    int64_t n, rows[IMAGES], src[IMAGES], seq[IMAGES], pos[IMAGES];
} images_t;

/* Rows that do not overlap, in any order of the sequences. */
static void random_images(images_t *m, uint64_t *r)
{
    int64_t next[T_PACKED_SEQS] = {0};
    const int64_t nseq = m->t.side[1].p.nseq;
    m->n = nseq ? t_below(r, IMAGES + 1) : 0;
    for (int64_t e = 0; e < m->n; e++) {
        const int64_t q = t_below(r, nseq), left = m->t.len[q] - next[q];
        m->seq[e] = q;
        m->pos[e] = next[q] + t_below(r, left / 2 + 1);
        m->rows[e] = t_below(r, m->t.len[q] - m->pos[e] + 1);
        m->src[e] = t_below(r, m->t.world);
        next[q] = m->pos[e] + m->rows[e];
    }
}

static float value_of(int64_t q, int64_t pos, int64_t h)
{
    return (float)((q * 512 + pos) * 512 + h); /* exact */
}

static bool is_image(const images_t *m, int64_t q, int64_t pos)
{
    for (int64_t e = 0; e < m->n; e++)
        if (m->seq[e] == q && pos >= m->pos[e] && pos < m->pos[e] + m->rows[e])
            return true;
    return false;
}

static colo_status_t carry_images(colo_bridge_t *b, colo_batch_t **batch, const images_t *m,
                                  int64_t rank)
{
    const ref_packed_t *dst = &m->t.side[1];
    const colo_packing_t packing = t_packing(&dst->p);
    const colo_segments_t s = {COLO_SEGMENTS_INIT, .count = m->n, .rows = m->rows,
                               .src_dp = m->src,   .seq = m->seq, .pos = m->pos,
                               .packing = &packing};
    int64_t q[ROWS], pos[ROWS], lo, hi, nx = 0;
    const int64_t h = m->t.h, ny = ref_packed_rows(dst, rank, q, pos, NULL);
    float *x = calloc((size_t)(ROWS * h), sizeof *x), *d_x = calloc((size_t)(ROWS * h), sizeof *x);
    float *y = calloc((size_t)(ROWS * h), sizeof *x);
    rank_check(x && d_x && y);
    for (int64_t e = 0; e < m->n; e++)
        for (int64_t k = 0; m->src[e] == rank && k < m->rows[e]; k++, nx++)
            for (int64_t i = 0; i < h; i++)
                x[nx * h + i] = value_of(m->seq[e], m->pos[e] + k, i);
    ref_packed_features(dst, rank, h, &lo, &hi);
    for (int64_t i = 0; i < ny * (hi - lo); i++)
        y[i] = -1;
    rank_try(colo_bridge_set_segments(b, &s, batch));
    colo_tensor_t tx = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){nx, h}), td = tx;
    const colo_tensor_t ty = colo_tensor_host(y, COLO_F32, 2, (int64_t[]){ny, hi - lo});
    td.data = d_x;
    rank_try(colo_batch_forward(*batch, &tx, &ty, 1, NULL));
    for (int64_t i = 0; i < ny; i++)
        for (int64_t k = lo; k < hi; k++)
            rank_check(y[i * (hi - lo) + k - lo] ==
                       (is_image(m, q[i], pos[i]) ? value_of(q[i], pos[i], k) : -1));
    rank_try(colo_batch_backward(*batch, &ty, &td, 1, NULL)); /* the way back is the inverse */
    rank_check(memcmp(x, d_x, (size_t)(nx * h) * sizeof *x) == 0);
    free(x);
    free(d_x);
    free(y);
    return COLO_OK;
}

static colo_status_t run_images(colo_comm_t *comm, void *arg)
{
    const images_t *m = arg;
    const int64_t rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    colo_bridge_t *b = NULL;
    colo_batch_t *batch = NULL;
    colo_layout_t src, dst;
    rank_try(t_layout_of(t_text("dp=%d", (int)m->t.world), true, &src));
    rank_try(t_layout(&dst, &m->t.side[1].grid));
    const colo_bridge_config_t c = {COLO_BRIDGE_CONFIG_INIT,
                                    .src = &src,
                                    .dst = &dst,
                                    .shape = {.features = m->t.h},
                                    .dtype = COLO_F32,
                                    .output = COLO_OUTPUT_SHARDED,
                                    .ranks_per_node = m->t.ranks_per_node,
                                    .ragged = true,
                                    .placement = COLO_PLACEMENT_MERGED};
    rank_try(colo_bridge_create(&b, &c, comm));
    const colo_status_t st = carry_images(b, &batch, m, rank);
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&b);
    return st < 0 ? colo_fail_prefix(st, "%s", t_packed_text(&m->t)) : st;
}

T_CASE(images_arrive_on_the_context_ranks_of_their_sequence)
{
    const uint64_t seed = t_seed();
    const int64_t n = t_scaled(t_ranks_are_threads() ? CASES / 4 : ON_PROCESSES / 4);
    int64_t own = 0, tables = 0;
    for (int64_t i = 0, next = 0; i < n; next++) {
        images_t *m = malloc(sizeof *m);
        uint64_t r = seed + (uint64_t)next;
        assert_non_null(m);
        t_packed_random(&m->t, seed + (uint64_t)next, 8);
        if (m->t.side[1].p.cut == REF_CUT_WHOLE) { /* with which segments have FULL_SEQ */
            free(m);
            continue;
        }
        m->t.side[1].p.halo = 0; /* which segments do not have */
        m->t.world = (int32_t)ref_side_size(&m->t.side[1].grid);
        random_images(m, &r);
        own += m->t.side[1].p.cp != NULL;
        tables += m->t.side[1].p.cut == REF_CUT_TABLE;
        i++;
        t_run_later(m->t.world, run_images, m, 0, after);
    }
    t_run_rest();
    assert_true(n < 50 || (8 * own > n && 8 * tables > n));
}

T_MAIN("bridge/packed_random")
