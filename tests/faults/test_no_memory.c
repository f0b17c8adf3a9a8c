/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_no_memory.c - the k-th thread of a world does not start, for every k; and the k-th
 * allocation of one of two ranks fails, for every k of split, create, forward, backward and
 * destroy. That rank gets COLO_ERR_NOMEM if it cannot do without; its peer gets the status of a
 * peer's failure, COLO_ERR_TIMEOUT if it has left the call in which that happened, or nothing went
 * wrong for it. Both end within the deadline, destroy what they have and sum on a new communicator.
 * And the k-th allocation of a check of tables fails, for every k.
 */
#include "harness/harness.h"

#include "harness/allocations.h"

#include "comm/comm.h"

enum { RANKS = 2, CULPRIT = 1, DEADLINE_MS = 5000, MOST = 2000 };

typedef struct job {
    long k;
    bool by_color; /* of splits */
    bool hit[RANKS];
    colo_status_t got[RANKS];
    double seconds[RANKS];
} job_t;

static colo_status_t step(colo_comm_t *world, const colo_layout_t *src, const colo_layout_t *dst,
                          const colo_grid_t *grid)
{
    float x[4] = {1, 2, 3, 4}, y[4];
    T_ENDS(colo_comm_destroy) colo_comm_t *all = NULL;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = src, .dst = dst,
                                         .shape = {2, 2, 1, 0}, .dtype = COLO_F32};
    int64_t xs[4], ys[4];
    colo_status_t st = colo_comm_split(world, grid, "dp", &all);
    if (st == COLO_OK)
        st = colo_bridge_create(&bridge, &config, all);
    if (st == COLO_OK) {
        const int32_t xn = colo_bridge_src_shape(bridge, xs),
                      yn = colo_bridge_dst_shape(bridge, ys);
        const colo_tensor_t tx = colo_tensor_host(x, COLO_F32, xn, xs),
                            ty = colo_tensor_host(y, COLO_F32, yn, ys);
        st = colo_bridge_forward(bridge, &tx, &ty, NULL);
        if (st == COLO_OK)
            st = colo_bridge_backward(bridge, &ty, &tx, NULL);
    }
    return st;
}

static colo_status_t one_rank(colo_comm_t *world, void *arg)
{
    job_t *j = arg;
    const int32_t me = colo_comm_rank(world);
    colo_grid_t from, to;
    colo_layout_t src, dst;
    rank_try(colo_comm_set_timeout(world, DEADLINE_MS));
    rank_try(colo_grid_parse(&from, "dp=2", RANKS));
    rank_try(colo_grid_parse(&to, "tp=2", RANKS));
    rank_try(colo_layout_init_src(&src, &from));
    rank_try(colo_layout_init_dst(&dst, &to));
    const double begin = colo_now();
    fail_at = me == CULPRIT ? j->k : 0;
    j->got[me] = step(world, &src, &dst, &from);
    j->hit[me] = me == CULPRIT && fail_at == 0;
    fail_at = 0;
    j->seconds[me] = colo_now() - begin;
    return COLO_OK;
}

static colo_status_t sum_again(colo_comm_t *fresh, void *arg)
{
    double one = 1, sum = 0;
    (void)arg;
    rank_try(colo_comm_all_reduce(fresh, &one, &sum, 1, COLO_F64, COLO_REDOP_SUM, NULL));
    rank_check(sum == RANKS);
    return COLO_OK;
}

static bool is_of_a_peer(colo_status_t st)
{
    return st == COLO_OK || st == COLO_ERR_NOMEM || st == COLO_ERR_PEER || st == COLO_ERR_ABORTED ||
           st == COLO_ERR_TIMEOUT;
}

T_CASE(every_allocation_that_fails_is_told_to_both_ranks)
{
    long failures = 0;
    for (long k = 1; k < MOST; k++) {
        job_t j = {.k = k};
        (void)colo_comm_threads_run(RANKS, one_rank, &j);
        if (!j.hit[CULPRIT]) {
            assert_int_equal(j.got[0], COLO_OK);
            assert_int_equal(j.got[1], COLO_OK);
            assert_true(failures > 10); /* of far more allocations */
            return;
        }
        if (j.got[CULPRIT] != COLO_OK && j.got[CULPRIT] != COLO_ERR_NOMEM)
            fail_msg("allocation %ld: its rank got %s", k, colo_status_name(j.got[CULPRIT]));
        if (!is_of_a_peer(j.got[0]) || (j.got[0] != COLO_OK && j.got[CULPRIT] == COLO_OK))
            fail_msg("allocation %ld: its rank got %s, the other %s", k,
                     colo_status_name(j.got[CULPRIT]), colo_status_name(j.got[0]));
        if (j.seconds[0] > DEADLINE_MS * 1e-3 + 1 || j.seconds[1] > DEADLINE_MS * 1e-3 + 1)
            fail_msg("allocation %ld: %.1f s and %.1f s", k, j.seconds[0], j.seconds[1]);
        failures += j.got[CULPRIT] != COLO_OK;
        assert_ok(colo_comm_threads_run(RANKS, sum_again, NULL));
    }
    fail_msg("%d allocations were not all", (int)MOST);
}

static colo_status_t split_rank(colo_comm_t *world, void *arg)
{
    job_t *j = arg;
    const int32_t me = colo_comm_rank(world);
    colo_grid_t grid;
    T_ENDS(colo_comm_destroy) colo_comm_t *all = NULL;
    rank_try(colo_grid_parse(&grid, "dp=2", RANKS));
    fail_at = me == CULPRIT ? j->k : 0;
    j->got[me] = j->by_color ? colo_comm_split_color(world, 0, me, &all)
                             : colo_comm_split(world, &grid, "dp", &all);
    j->hit[me] = me == CULPRIT && fail_at == 0;
    fail_at = 0;
    return COLO_OK;
}

T_CASE(split_that_lacks_memory_on_one_rank_fails_on_all)
{
    for (int by_color = 0; by_color < 2; by_color++) {
        bool hit = true;
        long failures = 0;
        for (long k = 1; hit; k++) {
            job_t j = {.k = k, .by_color = by_color};
            (void)colo_comm_threads_run(RANKS, split_rank, &j);
            hit = j.hit[CULPRIT];
            failures += j.got[CULPRIT] == COLO_ERR_NOMEM;
            if ((j.got[0] == COLO_OK) != (j.got[CULPRIT] == COLO_OK))
                fail_msg("allocation %ld of a split by %s: its rank got %s, the other %s", k,
                         by_color ? "color" : "dims", colo_status_name(j.got[CULPRIT]),
                         colo_status_name(j.got[0]));
        }
        assert_true(failures > 3);
    }
}

static colo_status_t check_position_table(void)
{
    static const int64_t table[] = {0, 3, 2, 7, 6, 1};
    colo_layout_t l;
    rank_try(t_layout_of("cp=2", false, &l));
    rank_try(colo_layout_map_table(&l, table, 6, 8));
    return colo_layout_check(&l, 1, 6, 1);
}

static colo_status_t check_tables(const int64_t *pos, const int64_t *row_pos)
{
    static const int64_t rows[] = {2, 3}, zero[] = {0, 0}, length[] = {8};
    const colo_segments_t s = {
        COLO_SEGMENTS_INIT, .count = 2,         .rows = rows, .src_dp = zero,    .seq = zero,
        .pos = pos,         .row_pos = row_pos, .nseqs = 1,   .seq_len = length, .seq_dp = zero};
    colo_layout_t src, dst;
    rank_try(t_layouts("dp=2", "cp=2", &src, &dst));
    return colo_segments_check(&s, &src, &dst);
}

static colo_status_t check_segment_tables(void)
{
    return check_tables(NULL, (int64_t[]){6, 5, 4, 2, 0});
}

static colo_status_t check_unsorted_tables(void)
{
    return check_tables((int64_t[]){4, 0}, NULL);
}

/* Padding, halos of pieces that are shorter, and what a rank has of them. */
static colo_status_t plan_halos(void)
{
    static const int64_t length[] = {7, 12}, room[] = {8, 12};
    colo_packing_t src = {COLO_PACKING_INIT, .nseqs = 2, .seq_len = length,
                          .split = COLO_PACKING_CONTIGUOUS, .seq_room = room};
    colo_packing_t dst = src;
    colo_layout_t layout;
    T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
    int64_t begin[9], n;
    dst.split = COLO_PACKING_ZIGZAG;
    dst.halo_before = 5;
    rank_try(t_layout_of("cp=2", false, &layout));
    const colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &layout, .dst = &layout,
                                  .shape = {.features = 2}};
    rank_try(colo_plan_create_packed(&plan, &c, &src, &dst, 1));
    return colo_packing_pieces(&dst, &layout, 1, begin, &n);
}

T_CASE(check_that_lacks_memory_is_an_error)
{
    static colo_status_t (*const checks[])(void) = {check_position_table, check_segment_tables,
                                                    check_unsorted_tables, plan_halos};
    for (int i = 0; i < 4; i++) {
        bool hit = true;
        for (long k = 1; hit; k++) {
            fail_at = k;
            const colo_status_t st = checks[i]();
            hit = fail_at == 0;
            fail_at = 0;
            if (st != (hit ? COLO_ERR_NOMEM : COLO_OK))
                fail_msg("check %d, allocation %ld: %s", i, k, colo_status_name(st));
            assert_true(hit || k > 1); /* each check allocates */
        }
    }
}

static colo_status_t come(colo_comm_t *world, void *arg)
{
    (void)world;
    ++*(_Atomic int *)arg;
    return COLO_OK;
}

T_CASE(world_of_which_a_thread_does_not_start_runs_on_no_rank)
{
    enum { WORLD = 4 };
    for (int k = 0; k < WORLD; k++) {
        _Atomic int came = 0;
        thread_fail_at = k + 1;
        const char *words = t_text("thread %d of 4 could not be started", k);
        assert_fails(colo_comm_threads_run(WORLD, come, &came), COLO_ERR_NOMEM, words);
        assert_int_equal(thread_fail_at, 0);
        assert_int_equal(came, 0);
        assert_ok(colo_comm_threads_run(WORLD, come, &came));
        assert_int_equal(came, WORLD);
    }
}

T_MAIN_IF(T_NEED_OWN_MALLOC, "faults/no_memory")
