/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_ragged.c - ragged batches over peers' memory: random ones against the oracle, the
 * uniform bridge's bits, boxes of many tiles, batches with other tables outstanding together. Four
 * ranks, and eight, on however many GPUs there are; T_RANKS=sockets: as processes.
 */
#include "gpu/gpu_ranks.h"
#include "gpu/ragged_gpu.h"

enum { RANKS = 4, MANY = 8 };

T_CASE_ON_PEERS(RANKS, random_batches_over_peers_arrive_as_the_oracle_says)
{
    return t_ragged_batches(r, &(int64_t){300});
}

T_CASE(random_batches_of_eight_ranks_arrive_as_the_oracle_says)
{
    if (getenv("T_CHECKED") && !t_peers_enough(MANY))
        skip();
    assert_ok(t_peers_run(MANY, false, t_ragged_batches, &(int64_t){300}, 0));
}

T_CASE(uniform_tables_over_peers_give_the_bits_of_the_uniform_bridge)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_tables, NULL, 0));
}

/* Rows of an odd number of bytes, many tiles of them: tiles begin and end inside 16 bytes. */
T_CASE_ON_PEERS(RANKS, ragged_boxes_of_many_odd_tiles_arrive)
{
    const t_ragged_where_t w = t_where(r);
    const t_ragged_options_t o = {.tensors = 2, .where = &w};
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    for (int how = 0; how < 4; how++) {
        T_ENDS(t_ragged_free) t_ragged_t t;
        t_ragged_uniform(&t, &src, &dst, (ref_shape_t){4, 2048, 5});
        t.dtype = "bf16";
        t.c.full = how > 0;
        t.c.partial = how % 2;
        t.c.merged = how > 2;
        const colo_status_t st = t_ragged_on(&t, &o, r->gpus);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
    }
    return COLO_OK;
}

T_CASE(batches_over_peers_with_other_tables_are_outstanding_together)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_outstanding, &(bool){false}, 0));
}

T_CASE(replays_of_a_ragged_batch_over_peers_give_its_bits)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_captured, NULL, 0));
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_ragged")
