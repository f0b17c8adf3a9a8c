/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_guards.c - what the lm_head path guarantees about itself: how many collectives,
 * whatever the chunks and whatever each rank's tokens; what memory it needs and touches; that what
 * is kept stays as it was.
 *
 * No count is typed in: the chunks of a run come from the object's own arithmetic in that run, and
 * a run with too few of them to tell "once" from "once a chunk" fails as vacuous.
 */
#include "loss/linear_case.h"

#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>

enum { T = 256, V = 24, H = 4 };
typedef enum { LOGPROB, KEEP, LOSS, MODES } linear_mode_t;
static const char *const modes[] = {"logprob", "keep", "loss"};
static const int64_t chunk_counts[] = {1, 2, 256};

static void vacuous(int64_t chunks, const char *what)
{
    if (chunks < 2)
        fail_msg("vacuous: %d chunk cannot tell one %s a pass from one a chunk", (int)chunks, what);
}

/* @valid: of each replica, < 0: all */
static void guard_case(linear_case_t *c, int32_t ranks, int32_t replicas, linear_mode_t mode,
                       int64_t chunks, const int64_t *valid, uint64_t *rng)
{
    linear_case_init(c, ranks, replicas, T, V, H, COLO_F32, rng);
    c->config.logprob.chunk_size = T / chunks;
    c->config.logprob.want_entropy = true;
    c->config.mode = mode == KEEP ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB;
    c->loss_mode = mode == LOSS;
    for (int d = 0; d < replicas; d++)
        for (int64_t t = 0; valid && valid[d] >= 0 && t < T - valid[d]; t++)
            c->targets[d][(t * 7) % T] = -100; /* 7 and 256 share no factor: all different */
}

T_CASE(statistics_are_gathered_once_or_once_a_chunk)
{
    uint64_t rng = t_seed();
    int64_t most = 0;
    for (int32_t w = 1; w <= 4; w *= 2)
        for (linear_mode_t mode = 0; mode < MODES; mode++)
            for (int k = 0; k < 3; k++) {
                T_ENDS(linear_case_free) linear_case_t c;
                guard_case(&c, w, 1, mode, chunk_counts[k], NULL, &rng);
                assert_ok(linear_case_run(&c));
                for (int r = 0; r < w; r++) {
                    uint64_t want = w == 1 ? 0 : mode == LOSS ? (uint64_t)c.chunks[r] : 1;
                    const colo_comm_stats_t *f = &c.tp_forward[r], *all = &c.tp_all[r];
                    uint64_t got = f->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
                    assert_int_equal(c.chunks[r], chunk_counts[k]);
                    if (got != want || total_ops(f) != want || total_ops(all) != want)
                        fail_msg("%s, %d ranks, %d chunks: rank %d gathers statistics %d times "
                                 "(%d, %d operations), expected %d",
                                 modes[mode], (int)w, (int)c.chunks[r], r, (int)got,
                                 (int)total_ops(f), (int)total_ops(all), (int)want);
                    most = c.chunks[r] > most ? c.chunks[r] : most;
                }
            }
    vacuous(most, "gather of statistics");
}

/* forward, and the checkpoint's first run of it; backward */
static void check_head(const linear_case_t *c, linear_mode_t mode, const char *how)
{
    const uint64_t forward = 1 + (c->checkpoint && mode != LOSS);
    const uint64_t all = forward + (mode != LOSS);
    for (int r = 0; r < c->ranks * c->replicas; r++) {
        const colo_comm_stats_t *f = &c->head_forward[r], *a = &c->head_all[r];
        uint64_t got_f = f->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD];
        uint64_t got_a = a->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD];
        uint64_t scattered = a->ops[COLO_OP_REDUCE_SCATTER][COLO_CATEGORY_HEAD];
        if (got_f != forward || got_a != all || scattered != 1 || total_ops(a) != all + 1)
            fail_msg("%s, %s, %d chunks: rank %d gathers the head %d times, %d with backward, and "
                     "scatters %d times of %d operations, expected %d, %d, 1 of %d",
                     modes[mode], how, (int)c->chunks[r], r, (int)got_f, (int)got_a, (int)scattered,
                     (int)total_ops(a), (int)forward, (int)all, (int)all + 1);
    }
}

T_CASE(the_head_is_gathered_once_a_pass_whatever_the_chunks)
{
    static const int64_t valid[][4] = {
        {-1, -1, -1, -1}, {200, 3, 64, 1}, {0, 200, 7, 256}, {0, 0, 0, 0}};
    static const char *const names[] = {"all tokens count", "unequal n_valid",
                                        "n_valid = 0 on one rank", "n_valid = 0 on all"};
    uint64_t rng = t_seed() + 1;
    int64_t most = 0;
    for (linear_mode_t mode = 0; mode < MODES; mode++)
        for (int k = 0; k < 3; k++)
            for (int n = 0; n < 4; n++)
                for (int bits = 0; bits < 2; bits++) {
                    if (T_LEFT_OUT({mode, MODES}, {k, 3}, {n, 4}, {bits, 2}))
                        continue;
                    T_ENDS(linear_case_free) linear_case_t c;
                    guard_case(&c, 1 + bits, 4, mode, chunk_counts[k], valid[n], &rng);
                    c.head = HEAD_SHARDED;
                    c.has_bias = c.start_early = c.checkpoint = bits;
                    assert_ok(linear_case_run(&c));
                    check_head(&c, mode, names[n]);
                    most = c.chunks[0] > most ? c.chunks[0] : most;
                }
    vacuous(most, "gather of the head");
}

T_CASE(a_pass_that_does_not_multiply_by_the_weight_gathers_nothing)
{
    uint64_t rng = t_seed() + 2;
    for (linear_mode_t mode = 0; mode < LOSS; mode++) {
        T_ENDS(linear_case_free) linear_case_t c;
        guard_case(&c, 1, 2, mode, 2, NULL, &rng);
        c.head = HEAD_SHARDED;
        c.config.frozen_hidden = true;
        assert_ok(linear_case_run(&c));
        assert_int_equal(c.head_all[0].ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD],
                         mode == KEEP ? 1 : 2);
    }
}

/* ---- memory ---- */

/* A backend whose reductions want staging, and write all that they are lent. */
enum { STAGED = 1000 };
static colo_comm_backend_t plain, staging;
static atomic_int lent;

static size_t reduction_stage(const colo_comm_t *c, size_t bytes)
{
    return STAGED;
}

static colo_status_t collective(colo_comm_t *c, const void *send, void *recv, colo_stream_t stream)
{
    if (c->stage_bytes == STAGED &&
        (c->op.kind == COLO_OP_ALL_REDUCE || c->op.kind == COLO_OP_REDUCE_SCATTER)) {
        memset(c->stage, 1, STAGED);
        atomic_fetch_add(&lent, 1);
    }
    return plain.collective(c, send, recv, stream);
}

static void wants_staging(colo_comm_t *c)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!plain.name) {
        plain = staging = *c->backend;
        staging.reduction_stage = reduction_stage;
        staging.collective = collective;
    }
    pthread_mutex_unlock(&once);
    c->backend = &staging;
}

T_CASE(reductions_have_staging_in_the_workspace)
{
    uint64_t rng = t_seed() + 5;
    if (!t_ranks_are_threads())
        skip();
    for (int how = COLO_D_HIDDEN_ALL_REDUCE; how <= COLO_D_HIDDEN_REDUCE_SCATTER; how++) {
        T_ENDS(linear_case_free) linear_case_t c;
        guard_case(&c, 2, 2, LOGPROB, 2, NULL, &rng);
        c.head = HEAD_SHARDED;
        c.config.d_hidden = (colo_d_hidden_t)how;
        c.each_comm = wants_staging;
        atomic_store(&lent, 0);
        assert_ok(linear_case_run(&c));
        linear_case_compare(&c, "staging");
        assert_int_equal(atomic_load(&lent), 2 * 4); /* of d_hidden and of d_weight, on each rank */
    }
}

static size_t query(int64_t tokens, int64_t vocab, int64_t chunk, colo_linear_logprob_pass_t pass)
{
    colo_comm_t *self = t_self();
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = vocab, .hidden = H};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    size_t bytes;
    lc.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    lc.logprob.logits.vocab = vocab;
    lc.logprob.chunk_size = chunk;
    lc.logprob.want_entropy = lc.logprob.want_loss = lc.logprob.want_correct = true;
    assert_ok(colo_lm_head_create(&head, &hc, NULL));
    assert_ok(colo_linear_logprob_create(&linear, &lc, head, self));
    assert_ok(colo_linear_logprob_workspace_size(linear, pass, tokens, -1, &bytes));
    return bytes;
}

/* Per token: maps, targets, outputs, upstream, statistics: at most 21 numbers of 8 bytes. Per
 * chunk: two of logits, two of hidden rows, one of d_hidden. Alignment: 256 bytes for each of 24
 * parts. Products: blocks of two operands and of their result, and its sums in fp64. */
T_CASE(the_workspace_is_chunks_and_a_few_numbers_a_token)
{
    const int64_t chunk = 128, vocab = 4096;
    for (colo_linear_logprob_pass_t pass = 0; pass <= COLO_LINEAR_LOGPROB_INFERENCE; pass++) {
        size_t small = query(16 * chunk, vocab, chunk, pass),
               large = query(64 * chunk, vocab, chunk, pass);
        size_t chunks = (size_t)(chunk * (2 * vocab + 3 * H)) * sizeof(float);
        size_t products = 128 * (128 + 512 + 512) * sizeof(float) + 128 * 512 * sizeof(double);
        assert_true(large - small <= (size_t)(48 * chunk) * 21 * 8 + 24 * 256);
        assert_true(small <= chunks + (size_t)(16 * chunk) * 21 * 8 + 24 * 256 + products);
        /* one-hot targets, or all logits: each alone would be more than all of this */
        assert_true(large < (size_t)(64 * chunk) * (size_t)vocab * sizeof(float));
    }
}

/* ---- what stays ---- */

T_CASE(kept_logits_survive_backward_and_a_second_one_gives_the_same)
{
    uint64_t rng = t_seed() + 5;
    for (linear_mode_t mode = 0; mode < LOSS; mode++)
        for (int d = 0; d < 2; d++) {
            T_ENDS(linear_case_free) linear_case_t c;
            guard_case(&c, 2, 1, mode, 2, NULL, &rng);
            c.dtype = d ? COLO_F64 : COLO_F32;
            c.config.logits_dtype = c.config.d_weight_dtype = c.dtype;
            c.twice = true;
            assert_ok(linear_case_run(&c));
            for (int r = 0; r < 2; r++) {
                assert_false(c.kept_changed[r]);
                assert_false(c.second_differs[r]);
            }
            linear_case_compare(&c, modes[mode]);
        }
}

T_CASE(in_place_is_done_where_asked_and_ends_the_saved_state)
{
    uint64_t rng = t_seed() + 6;
    T_ENDS(linear_case_free) linear_case_t c;
    guard_case(&c, 2, 1, KEEP, 2, NULL, &rng);
    c.config.keep_in_place = true;
    assert_ok(linear_case_run(&c));
    assert_true(c.kept_changed[0] && c.kept_changed[1]);
    linear_case_compare(&c, "in place");
    c.twice = true;
    assert_fails(linear_case_run(&c), COLO_ERR_STATE, "the saved state is not valid");
}

T_MAIN("loss/linear_guards")
