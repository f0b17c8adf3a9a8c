/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peer_ragged.c - ragged batches over peers' memory: random ones against the oracle, the
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

T_CASE(ragged_boxes_of_many_odd_tiles_arrive)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_tiles, NULL, 0));
}

T_CASE(batches_over_peers_with_other_tables_are_outstanding_together)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_outstanding, &(bool){false}, 0));
}

T_CASE(replays_of_a_ragged_batch_over_peers_give_its_bits)
{
    assert_ok(t_peers_run(RANKS, false, t_ragged_captured, NULL, 0));
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/peer_ragged")
