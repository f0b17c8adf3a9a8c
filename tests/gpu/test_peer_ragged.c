/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peer_ragged.c - ragged batches over peers' memory: random ones against the oracle, the
 * uniform bridge's bits, boxes of many tiles, batches with other tables outstanding together. Four
 * ranks, and eight, on however many GPUs there are; T_RANKS=sockets: as processes.
 */
#include "gpu/peer_ranks.h"
#include "gpu/ragged_gpu.h"

#include "core/error.h"

enum { RANKS = 4, MANY = 8 };
static int32_t world = RANKS; /* of the test that runs */

/* ---- tensors of a rank: in its arena ---- */

static colo_status_t put(void *arg, const void *from, size_t bytes, void **at)
{
    t_peer_rank_t *r = arg;
    char *p = r->arena + r->used + r->shift;
    r->used += (bytes + r->shift + 255) / 256 * 256;
    rank_check(r->used <= T_ARENA);
    peer_cuda(cudaMemcpyAsync(p, from, bytes, cudaMemcpyHostToDevice, r->stream));
    peer_cuda(cudaStreamSynchronize(r->stream)); /* the caller frees what it is from */
    *at = p;
    return COLO_OK;
}

static colo_status_t quiet(void *arg)
{
    t_peer_rank_t *r = arg;
    peer_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_check(r->gpus));
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t get(void *arg, void *to, const void *at, size_t bytes)
{
    t_peer_rank_t *r = arg;
    peer_cuda(cudaMemcpyAsync(to, at, bytes, cudaMemcpyDeviceToHost, r->stream));
    peer_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

static void drop(void *arg, void *at)
{
    (void)arg; /* all of it at the end of a case */
    (void)at;
}

static t_ragged_where_t where(t_peer_rank_t *r)
{
    return (t_ragged_where_t){.arg = r,
                              .device = r->device,
                              .stream = r->stream,
                              .put = put,
                              .get = get,
                              .drop = drop,
                              .quiet = quiet};
}

/* ---- random batches ---- */

static colo_status_t random_batches(t_peer_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    const uint64_t seed = t_seed();
    for (int64_t i = 0, n = *(int64_t *)arg; i < n; i++) {
        t_ragged_t t;
        uint64_t s = seed + (uint64_t)i;
        t_ragged_random(&t, s, world);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&s, T_RAGGED_TENSORS),
                                      .ranks_per_node = t_below(&s, 4),
                                      .max_rows = t_below(&s, 4) ? 0 : 1000,
                                      .gap = t_below(&s, 3),
                                      .where = &w};
        r->used = 0;
        r->shift = 8 * (size_t)t_below(&s, 3); /* not always 16 bytes */
        rank_try(colo_comm_set_check(r->gpus, (int32_t)t_below(&s, 3)));
        const colo_status_t st = t_ragged_on(&t, &o, r->gpus);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
        t_ragged_free(&t);
    }
    return COLO_OK;
}

T_CASE(random_batches_over_peers_arrive_as_the_oracle_says)
{
    int64_t n = t_scaled(300);
    (void)t_seed();
    assert_ok(t_peer_run(RANKS, false, random_batches, &n, 0));
}

T_CASE(random_batches_of_eight_ranks_arrive_as_the_oracle_says)
{
    int64_t n = t_scaled(300);
    if (getenv("T_CHECKED") && !t_peer_enough(MANY))
        skip();
    (void)t_seed();
    world = MANY;
    const colo_status_t st = t_peer_run(MANY, false, random_batches, &n, 0);
    world = RANKS;
    assert_ok(st);
}

/* ---- the rest ---- */

static colo_status_t uniform(t_peer_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    int32_t ran = 0;
    (void)arg;
    rank_try(t_uniform_pairs(r->gpus, &w, &ran));
    rank_check(ran == 24);
    return COLO_OK;
}

T_CASE(uniform_tables_over_peers_give_the_bits_of_the_uniform_bridge)
{
    assert_ok(t_peer_run(RANKS, false, uniform, NULL, 0));
}

static colo_status_t many_tiles(t_peer_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    (void)arg;
    return t_many_tiles(r->gpus, &w);
}

T_CASE(ragged_boxes_of_many_odd_tiles_arrive)
{
    assert_ok(t_peer_run(RANKS, false, many_tiles, NULL, 0));
}

static colo_status_t outstanding(t_peer_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    (void)arg;
    return t_outstanding(r->gpus, &w, false);
}

T_CASE(batches_over_peers_with_other_tables_are_outstanding_together)
{
    assert_ok(t_peer_run(RANKS, false, outstanding, NULL, 0));
}

static colo_status_t captured(t_peer_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    (void)arg;
    return t_captured(r->gpus, &w);
}

T_CASE(replays_of_a_ragged_batch_over_peers_give_its_bits)
{
    assert_ok(t_peer_run(RANKS, false, captured, NULL, 0));
}

int main(void)
{
    if (!t_peer_enough(RANKS))
        return T_EXIT_SKIP;
    return t_main("gpu/peer_ragged");
}
