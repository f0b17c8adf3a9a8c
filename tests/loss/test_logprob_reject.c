/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_reject.c - what the loss refuses: status, error message, and that nothing was
 * written; on one rank, and where ranks disagree.
 */
#include "core/error.h"
#include "loss/validate.h"
#include "loss/loss_alone.h"

#include <stdatomic.h>
#include <unistd.h>

static bool wrote_nothing(const alone_t *a)
{
    return painted(a->logp, sizeof a->logp) && painted(a->entropy, sizeof a->entropy) &&
           painted(a->loss, sizeof a->loss) && painted(a->correct, sizeof a->correct) &&
           painted(a->stats, sizeof a->stats) && painted(a->workspace, sizeof a->workspace) &&
           painted(&a->n_valid, 8) && painted(&a->n_invalid, 8) && !a->saved.valid;
}

#define REJECT(change, status, error_message)                   \
    do {                                                        \
        alone_t a;                                              \
        alone_init(&a);                                         \
        change;                                                 \
        assert_fails(alone_forward(&a), status, error_message); \
        assert_true(wrote_nothing(&a));                         \
    } while (0)

T_CASE(every_bad_config_is_refused_with_its_number)
{
    const double inf = 1e300 * 1e300;
    REJECT(a.cfg.struct_size = 8, COLO_ERR_ARG, "struct_size is 8, expected");
    REJECT(a.cfg.logits.vocab = 0, COLO_ERR_ARG, "vocab is 0, expected > 0");
    REJECT(a.cfg.logits.vocab = -3, COLO_ERR_ARG, "vocab is -3");
    REJECT(a.cfg.logits.vocab_start = -1, COLO_ERR_ARG, "vocab_start is -1, expected >= 0");
    REJECT(a.cfg.logits.vocab_start = INT64_MAX, COLO_ERR_ARG, "9223372036854775807 + 6 columns");
    REJECT(a.cfg.logits.temperature = 0, COLO_ERR_ARG, "temperature is 0, expected finite and > 0");
    REJECT(a.cfg.logits.temperature = -1, COLO_ERR_ARG, "temperature is -1");
    REJECT(a.cfg.logits.temperature = inf - inf, COLO_ERR_ARG, "temperature is ");
    REJECT(a.cfg.logits.temperature = inf, COLO_ERR_ARG, "temperature is inf");
    REJECT(a.cfg.logits.temperature = 1e-310, COLO_ERR_ARG, "scale / temperature = 1 / 1e-310");
    REJECT(a.cfg.logits.scale = inf, COLO_ERR_ARG, "scale is inf, expected finite");
    REJECT(a.cfg.logits.softcap = -2, COLO_ERR_ARG, "softcap is -2");
    REJECT(a.cfg.logits.softcap = inf - inf, COLO_ERR_ARG, "softcap is ");
    REJECT(a.cfg.label_smoothing = 1, COLO_ERR_ARG, "label_smoothing is 1, expected in [0, 1)");
    REJECT(a.cfg.label_smoothing = -0.5, COLO_ERR_ARG, "label_smoothing is -0.5");
    REJECT((a.cfg.logits.vocab = 1, a.cfg.label_smoothing = 0.1, a.cfg.megatron_smoothing = true),
           COLO_ERR_ARG, "vocab - 1, and vocab is 1");
    REJECT(a.cfg.z_loss = -1, COLO_ERR_ARG, "z_loss is -1");
    REJECT(a.cfg.z_loss = inf, COLO_ERR_ARG, "z_loss is inf");
    REJECT(a.cfg.chunk_size = -4, COLO_ERR_ARG, "chunk_size is -4, expected >= 0");
    assert_fails(colo_logprob_config_check(NULL), COLO_ERR_ARG, "config is NULL");
}

T_CASE(every_bad_tensor_is_refused_with_its_number)
{
    REJECT(a.logits.dtype = COLO_I32, COLO_ERR_ARG, "logits: dtype i32");
    REJECT(a.logits.ndim = 1, COLO_ERR_SHAPE, "logits: 1 axes, expected 2");
    REJECT(a.logits.stride[1] = 2, COLO_ERR_SHAPE, "columns are 2 elements apart");
    REJECT(a.logits.data = NULL, COLO_ERR_ARG, "logits: data is NULL");
    REJECT(a.logits.shape[0] = -1, COLO_ERR_SHAPE, "extent -1");
    REJECT(a.target.dtype = COLO_I32, COLO_ERR_ARG, "targets: dtype i32, expected i64");
    REJECT(a.target.shape[0] = 3, COLO_ERR_SHAPE, "3 elements, expected [4]");
    REJECT(a.target.ndim = 0, COLO_ERR_SHAPE, "0 axes");
    REJECT(a.target.mem = COLO_CUDA, COLO_ERR_ARG, "targets: memory kind 1");
    REJECT((a.logits.shape[1] = 5, a.logits.stride[0] = 6), COLO_ERR_SHAPE,
           "columns [0, 5) on a group of one rank, expected the whole vocabulary [0, 6)");
    REJECT(a.cfg.logits.vocab_start = 1, COLO_ERR_SHAPE, "columns [1, 7) on a group of one rank");
}

T_CASE(an_output_that_the_config_does_not_want_is_refused)
{
    REJECT(a.cfg.want_entropy = false, COLO_ERR_ARG, "out.entropy is given");
    REJECT(a.cfg.want_loss = false, COLO_ERR_ARG, "out.loss is given");
    REJECT(a.cfg.want_correct = false, COLO_ERR_ARG, "out.correct is given");
}

T_CASE(every_bad_pointer_is_refused)
{
    alone_t last;
    size_t n = 77;
    REJECT(a.arg.group = NULL, COLO_ERR_ARG, "group is NULL; colo_comm_create_self()");
    REJECT(a.arg.logits = NULL, COLO_ERR_ARG, "logits: tensor is NULL");
    REJECT(a.arg.targets = NULL, COLO_ERR_ARG, "targets: tensor is NULL");
    REJECT(a.arg.out = NULL, COLO_ERR_ARG, "out is NULL");
    REJECT(a.arg.stats = NULL, COLO_ERR_ARG, "saved memory is NULL; it needs 256 bytes");
    REJECT(a.arg.saved = NULL, COLO_ERR_ARG, "saved memory is given, saved is NULL");
    REJECT(a.arg.workspace = NULL, COLO_ERR_ARG, "workspace is NULL");
    REJECT(a.arg.workspace = a.workspace + 3, COLO_ERR_ARG,
           "workspace is 3 past a multiple of 256");
    alone_init(&last);
    assert_fails(colo_logprob_forward(&last.cfg, NULL, t_self(), &last.out, &last.saved, last.stats,
                                      last.workspace, NULL),
                 COLO_ERR_ARG, "logits");
    assert_true(wrote_nothing(&last));
    assert_fails(colo_logprob_workspace_size(&last.cfg, COLO_I8, 4, 1, &n), COLO_ERR_ARG,
                 "dtype i8");
    assert_fails(colo_logprob_workspace_size(&last.cfg, COLO_F32, -1, 1, &n), COLO_ERR_ARG,
                 "tokens is -1");
    assert_fails(colo_logprob_workspace_size(&last.cfg, COLO_F32, 4, 0, &n), COLO_ERR_ARG,
                 "ranks is 0");
    assert_fails(colo_logprob_workspace_size(&last.cfg, COLO_F32, INT64_MAX / 8, 2, &n),
                 COLO_ERR_ARG, "exceeds 2^63 bytes");
    assert_fails(colo_logprob_saved_size(&last.cfg, COLO_F32, INT64_MAX / 8, &n), COLO_ERR_ARG,
                 "exceed 2^63 bytes");
    assert_fails(colo_logprob_saved_size(&last.cfg, COLO_F32, 1, NULL), COLO_ERR_ARG,
                 "bytes is NULL");
    assert_int_equal(n, 77);
}

#define REJECT_BACKWARD(change, status, error_message)           \
    do {                                                         \
        alone_t a;                                               \
        alone_init(&a);                                          \
        assert_ok(alone_forward(&a));                            \
        change;                                                  \
        assert_fails(alone_backward(&a), status, error_message); \
        assert_true(painted(a.dz, sizeof a.dz));                 \
        assert_true(a.saved.valid);                              \
    } while (0)

T_CASE(every_bad_backward_is_refused)
{
    alone_t b;
    REJECT_BACKWARD(a.d_logits.dtype = COLO_F64, COLO_ERR_ARG,
                    "d_logits: dtype f64, the logits are");
    REJECT_BACKWARD(a.d_logits.shape[0] = 3, COLO_ERR_SHAPE, "[3, 6], expected [4, 6]");
    REJECT_BACKWARD(a.d_logits.shape[1] = 5, COLO_ERR_SHAPE, "[4, 5], expected [4, 6]");
    REJECT_BACKWARD(a.d_logits.ndim = 1, COLO_ERR_SHAPE, "d_logits: 1 axes");
    REJECT_BACKWARD(a.d_logits.stride[0] = 5, COLO_ERR_SHAPE, "5 elements apart and overlap");
    REJECT_BACKWARD(a.d_logits.mem = COLO_CUDA, COLO_ERR_ARG, "d_logits: memory kind 1");
    REJECT_BACKWARD(a.d_logits.data = NULL, COLO_ERR_ARG, "d_logits: data is NULL");
    REJECT_BACKWARD((a.saved.config.want_entropy = false, a.upstream.d_entropy = a.up),
                    COLO_ERR_ARG, "d_entropy is given");
    REJECT_BACKWARD((a.saved.config.want_loss = false, a.upstream.d_loss = a.up), COLO_ERR_ARG,
                    "d_loss is given");
    alone_init(&b);
    assert_fails(colo_logprob_backward(NULL, &b.upstream, &b.d_logits, NULL), COLO_ERR_ARG,
                 "saved is NULL");
    assert_ok(alone_forward(&b));
    assert_fails(colo_logprob_backward(&b.saved, NULL, &b.d_logits, NULL), COLO_ERR_ARG,
                 "upstream is NULL");
    assert_fails(colo_logprob_backward(&b.saved, &b.upstream, NULL, NULL), COLO_ERR_ARG,
                 "d_logits: tensor is NULL");
}

/* ---- ranks that disagree ---- */

/* check is COLO_CHECK */
static atomic_int peer_is_back;

/* Each rank has half of 8 columns. */
static colo_status_t disagree(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world), kind = r == 1 || d->kind == 4 ? d->kind : -1;
    const int64_t tokens = kind == 6 ? T - 1 : T; /* blocks of equal size all the same */
    alone_t a;
    rank_try(colo_comm_set_timeout(world, 3000));
    rank_try(colo_comm_set_check(world, d->check));
    alone_init(&a);
    a.cfg = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 8,
                                    .logits.vocab_start = kind == 2   ? 5
                                                          : kind == 3 ? 3
                                                          : kind == 4 ? 0
                                                                      : 4 * r,
                                    .want_entropy = kind == 7};
    if (kind == 0)
        *(d->check == 1 ? &a.cfg.logits.temperature : &a.cfg.z_loss) = 2;
    if (kind == 5)
        a.cfg.logits.softcap = -1;
    a.targets[1] += kind == 1;
    a.out = (colo_logprob_out_t){.logp = a.logp};
    a.logits = colo_tensor_host(a.z, COLO_F32, 2, (int64_t[]){tokens, 4});
    a.target = colo_tensor_host(a.targets, COLO_I64, 1, &tokens);
    a.arg.group = world;
    disagreement_note(
        d, r,
        kind == 8 /* as a device's pass that cannot use a pointer */
            ? colo_loss_i_step(world, colo_fail(COLO_ERR_ARG, "logits: not of a device"))
            : alone_forward(&a));
    rank_check(painted(a.logp, sizeof a.logp) && painted(a.stats, sizeof a.stats) &&
               !a.saved.valid);
    if (d->kind == 8 || (d->kind == 5 && d->check < 2)) {
        /* stay: only the mark on the group may wake the peer before its deadline */
        if (r == 0)
            atomic_store(&peer_is_back, 1);
        for (int i = 0; i < 6000 && !atomic_load(&peer_is_back); i++)
            usleep(1000);
        return d->status[r];
    }
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

T_CASE(ranks_that_disagree_get_the_same_error_message_and_live_on)
{
    static const char *const messages[] = {
        "rank 1 has another config, dtype or order of rows than rank 0",
        "rank 1 has other targets than rank 0",
        "no rank of 2 holds column 4 of the vocabulary of 8",
        "no rank of 2 holds column 7 of the vocabulary of 8",
        "no rank of 2 holds column 4",
        NULL,
        "rank 1 has 3 tokens, rank 0 has 4",
    };
    for (int i = 0; i < 14; i++) {
        int kind = i % 7;
        disagreement_t d = {.kind = kind, .check = 1 + i / 7};
        if (!messages[kind])
            continue;
        assert_ok(colo_comm_threads_run(2, disagree, &d));
        disagreement_check(&d, messages[kind]);
    }
}

/* Their headers never meet: the gather is refused, and below COLO_CHECK=2 that ends the group. */
T_CASE(blocks_of_other_sizes_are_a_mismatch_of_the_gather)
{
    for (int check = 1; check <= 2; check++) {
        disagreement_t d = {.kind = 7, .check = check};
        colo_status_t st = colo_comm_threads_run(2, disagree, &d);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(d.status[r], COLO_ERR_MISMATCH);
            if (!strstr(d.error_message[r], "all_gather"))
                fail_msg("rank %d: \"%s\" lacks the operation", r, d.error_message[r]);
            if (check == 1 && !strstr(d.error_message[r], ": in a loss they have other numbers of"))
                fail_msg("rank %d: \"%s\" lacks the cause", r, d.error_message[r]);
        }
        assert_int_equal(st == COLO_OK, check == 2);
    }
}

/* Shards that cover everything, one column twice. */
T_CASE(a_column_on_two_ranks_is_a_mismatch)
{
    uint64_t rng = t_seed() + 5;
    loss_case_t c;
    loss_case_init(&c, 3, 2, 9, COLO_F32, 1, &rng);
    c.start[1] = 2;
    c.columns[1] = 4;
    c.forward_only = true;
    assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                 "3 ranks hold 10 columns, the vocabulary has 9: some are on two ranks");
    loss_case_free(&c);
}

T_CASE(a_rank_with_a_bad_argument_does_not_leave_the_others_waiting)
{
    for (int check = 0; check <= 2; check++) {
        disagreement_t d = {.kind = 5, .check = check};
        atomic_store(&peer_is_back, 0);
        colo_status_t st = colo_comm_threads_run(2, disagree, &d);
        assert_int_equal(d.status[1], COLO_ERR_ARG);
        assert_int_equal(d.status[0], COLO_ERR_PEER);
        if (!strstr(d.error_message[0], "softcap is -1"))
            fail_msg("the peer's error message is \"%s\"", d.error_message[0]);
        assert_int_equal(st == COLO_OK,
                         check == 2); /* at 2 the group lives: its barrier ends well */
    }
}

/* What only a pass finds out, after the ranks have compared notes. */
T_CASE(a_pass_that_fails_does_not_leave_the_others_waiting)
{
    for (int check = 0; check <= 2; check++) {
        disagreement_t d = {.kind = 8, .check = check};
        atomic_store(&peer_is_back, 0);
        assert_true(colo_comm_threads_run(2, disagree, &d) < 0);
        assert_int_equal(d.status[1], COLO_ERR_ARG);
        assert_int_equal(d.status[0], COLO_ERR_PEER);
        if (!strstr(d.error_message[0], "logits: not of a device"))
            fail_msg("the peer's error message is \"%s\"", d.error_message[0]);
    }
    /* alone: no rank waits, nothing to mark */
    assert_int_equal(colo_loss_i_step(t_self(), COLO_ERR_ARG), COLO_ERR_ARG);
    assert_ok(colo_comm_check(t_self()));
}

T_CASE(cuda_memory_without_a_cuda_build_is_said_so)
{
    REJECT((a.logits.mem = a.target.mem = COLO_CUDA, a.logits.device = a.target.device = 0),
           COLO_ERR_UNBUILT, "");
}

T_MAIN("loss/logprob_reject")
