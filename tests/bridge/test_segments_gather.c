/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segments_gather.c - the global tables of a ragged batch, and an error that one rank brings.
 */
#include "harness/harness.h"

#define RANKS 4
#define MOST 400

/* What one rank brings; every rank can make every rank's tables from the seed. */
typedef struct local {
    int64_t rows[MOST], src_dp[MOST], seq[MOST], pos[MOST], row_pos[4 * MOST], len[MOST], dp[MOST];
    colo_segments_t s;
    bool none;
} local_t;

typedef struct job {
    uint64_t seed;
    int64_t most; /* segments of a rank */
} job_t;

static void make_local(local_t *l, uint64_t seed, int64_t most, int rank)
{
    uint64_t r = seed * RANKS + (uint64_t)rank;
    const int64_t n = t_below(&r, most + 1), q = n ? 1 + t_below(&r, n) : t_below(&r, 3);
    const bool scattered = t_below(&r, 2);
    int64_t k = 0;
    *l = (local_t){.none = t_below(&r, 5) == 0};
    for (int64_t e = 0; e < n; e++) {
        l->rows[e] = t_below(&r, 4);
        l->src_dp[e] = t_below(&r, 9);
        l->seq[e] = t_below(&r, q);
        l->pos[e] = t_below(&r, 100);
        for (int64_t i = 0; i < l->rows[e]; i++)
            l->row_pos[k++] = l->pos[e] + (scattered ? 7 * i : i);
    }
    for (int64_t i = 0; i < q; i++) {
        l->len[i] = t_below(&r, 1000);
        l->dp[i] = t_below(&r, 9);
    }
    l->s = (colo_segments_t){.struct_size = sizeof l->s,
                             .count = n,
                             .rows = l->rows,
                             .src_dp = l->src_dp,
                             .seq = l->seq,
                             .pos = scattered ? NULL : l->pos,
                             .row_pos = scattered ? l->row_pos : NULL,
                             .nseqs = q,
                             .seq_len = l->len,
                             .seq_dp = l->dp};
}

static colo_status_t compare(const job_t *j, const colo_segments_t *got)
{
    local_t *l = malloc(sizeof *l);
    int64_t e = 0, q = 0, row = 0;
    bool same = l != NULL;
    for (int rank = 0; same && rank < RANKS; rank++) {
        make_local(l, j->seed, j->most, rank);
        if (l->none)
            continue;
        same = e + l->s.count <= got->count && q + l->s.nseqs <= got->nseqs;
        for (int64_t i = 0, k = 0; same && i < l->s.count; i++, e++) {
            same = got->rows[e] == l->rows[i] && got->src_dp[e] == l->src_dp[i] &&
                   got->seq[e] == l->seq[i] + q;
            if (got->pos) /* then no rank brought row_pos */
                same = same && got->pos[e] == l->pos[i];
            for (int64_t p = 0; same && p < l->rows[i]; p++, k++, row++)
                same = !got->row_pos || got->row_pos[row] == l->row_pos[k];
        }
        for (int64_t i = 0; same && i < l->s.nseqs; i++)
            same = got->seq_len[q + i] == l->len[i] && got->seq_dp[q + i] == l->dp[i];
        q += l->s.nseqs;
    }
    free(l);
    rank_check(same);
    rank_check(e == got->count && q == got->nseqs);
    return COLO_OK;
}

static colo_status_t gather_random(colo_comm_t *comm, void *arg)
{
    const job_t *j = arg;
    colo_segments_t *got = NULL;
    local_t *l = malloc(sizeof *l);
    rank_check(l);
    make_local(l, j->seed, j->most, colo_comm_rank(comm));
    colo_status_t st = colo_segments_gather(&got, l->none ? NULL : &l->s, comm);
    free(l); /* the tables are borrowed for the call only */
    rank_try(st);
    st = compare(j, got);
    colo_segments_free(&got);
    rank_check(!got);
    return st;
}

T_CASE(random_tables_are_joined_in_rank_order)
{
    for (int i = 0; i < 60; i++) {
        job_t j = {.seed = t_seed() + (uint64_t)i, .most = i % 3 ? 20 : MOST};
        assert_ok(t_run_ranks(RANKS, gather_random, &j, sizeof j));
    }
}

/* Rank 1 has a segment of one row, the others have one without rows and no table of positions. */
T_CASE_ON(RANKS, segments_without_rows_are_gathered_without_row_pos)
{
    static const int64_t zero[1], one[1] = {1}, length[1] = {8};
    const bool has = colo_comm_rank(world) == 1;
    colo_segments_t s = {COLO_SEGMENTS_INIT}, *got = NULL;
    s.count = s.nseqs = 1;
    s.rows = has ? one : zero;
    s.row_pos = has ? one : NULL;
    s.src_dp = s.seq = s.seq_dp = zero;
    s.seq_len = length;
    rank_try(colo_segments_gather(&got, &s, world));
    const bool all = got->count == RANKS && got->nseqs == RANKS && !got->pos;
    const bool same = all && got->rows[0] == 0 && got->rows[1] == 1 && got->row_pos[0] == 1 &&
                      got->seq[3] == 3 && got->seq_len[3] == 8;
    colo_segments_free(&got);
    rank_check(same);
    return COLO_OK;
}

/* The tables of one rank are bad; positions of the last rank come row by row. */
static const struct {
    int64_t rows, pos;
    const char *text;
} bad[] = {{-5, 0, "local segment 0 has -5 rows"},
           {5, INT64_MAX - 3,
            "local segment 0: its 5 rows are at positions from "
            "9223372036854775804 on, expected positions of at most 63 bits"}};

enum { ODD_RANK = 2 };

T_CASE_FOR(RANKS, an_error_on_one_rank_is_an_error_on_all, int, which, 0, 1)
{
    const int rank = colo_comm_rank(world);
    const bool odd = rank == ODD_RANK, scattered = rank == RANKS - 1;
    const int64_t rows[1] = {odd ? bad[which].rows : 5}, pos[1] = {odd ? bad[which].pos : 0};
    static const int64_t row_pos[5] = {4, 3, 2, 1, 0}, zero[1], length[1] = {8};
    colo_segments_t s = {COLO_SEGMENTS_INIT}, *got = NULL;
    s.count = s.nseqs = 1;
    s.rows = rows;
    s.src_dp = s.seq = s.seq_dp = zero;
    s.pos = scattered ? NULL : pos;
    s.row_pos = scattered ? row_pos : NULL;
    s.seq_len = length;
    rank_fails(colo_segments_gather(&got, &s, world), odd ? COLO_ERR_ARG : COLO_ERR_PEER,
               bad[which].text);
    rank_check(!got);
    return colo_comm_check(world); /* it lives on */
}

T_CASE_FOR(RANKS, small_tables_take_one_all_gather_and_large_ones_two, int64_t, most, 20, 126, 127,
           MOST)
{
    static const int64_t zero[MOST], one[1] = {8};
    colo_comm_stats_t before, after;
    colo_segments_t s = {COLO_SEGMENTS_INIT}, *got = NULL;
    s.count = most;
    s.nseqs = 1;
    s.rows = s.src_dp = s.seq = s.pos = s.seq_dp = zero;
    s.seq_len = one;
    t_comm_stats(world, &before);
    rank_try(colo_segments_gather(&got, colo_comm_rank(world) == 1 ? &s : NULL, world));
    t_comm_stats(world, &after);
    rank_check(got->count == most);
    colo_segments_free(&got);
    const uint64_t n = after.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_BRIDGE] -
                       before.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_BRIDGE];
    rank_check(n == ((4 * most + 2) * sizeof(int64_t) > 4056 ? 2 : 1));
    return COLO_OK;
}

T_MAIN("bridge/segments_gather")
