/* SPDX-License-Identifier: Apache-2.0 */
/* host.c - a soak of eight ranks in host memory. See soak.h. */
#include "soak/soak.h"

#include "core/error.h"

enum { RANKS = 8 };

const int64_t soak_device_slack = 0;

int32_t soak_ranks(void)
{
    return RANKS;
}

/* Other sizes alone make it grow a little, buffers of sockets to seven peers by up to 120 KiB; a
 * leak of 64 bytes in each world passes it in minutes. */
int64_t soak_heap_slack(void)
{
    return t_ranks_are_threads() ? 64 << 10 : 256 << 10;
}

int64_t soak_device_bytes(void)
{
    return 0;
}

bool soak_is_abort(colo_status_t st)
{
    return st == COLO_ERR_ABORTED;
}

colo_status_t soak_on(colo_comm_t *world, colo_status_t (*fn)(soak_rank_t *rank, void *arg),
                      void *arg)
{
    return fn(&(soak_rank_t){world, NULL}, arg);
}

colo_status_t soak_uniform(soak_rank_t *rank, uint64_t seed)
{
    int64_t src_table[T_RANDOM_TABLE], dst_table[T_RANDOM_TABLE];
    t_shares_t shares = {0};
    t_case_t c = t_random_case(seed, RANKS, src_table, dst_table, &shares);
    c.world = RANKS;
    return t_case_on(rank->world, &c);
}

colo_status_t soak_ragged(soak_rank_t *rank, uint64_t seed)
{
    T_ENDS(t_ragged_free) t_ragged_t t = {0};
    uint64_t r = seed;
    t_ragged_random(&t, seed, RANKS);
    const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&r, T_RAGGED_TENSORS),
                                  .ranks_per_node = t_below(&r, 4),
                                  .max_rows = t_below(&r, 4) ? 0 : 10000,
                                  .gap = t_below(&r, 3)};
    T_ENDS(colo_comm_destroy) colo_comm_t *members = NULL;
    colo_status_t st = colo_comm_split_color(
        rank->world, colo_comm_rank(rank->world) < t.world ? 0 : -1, 0, &members);
    if (st == COLO_OK && members)
        st = t_ragged_on(&t, &o, members);
    if (st < 0)
        st = colo_fail_prefix(st, "%s", t_ragged_text(&t));
    return st;
}
