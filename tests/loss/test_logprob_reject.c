/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_reject.c - ranks that disagree, or of which one errs: on every level of COLO_CHECK
 * they get the same error message, or the other wakes. What one rank refuses: test_refusals.c.
 */
#include "loss/validate.h"
#include "loss/loss_alone.h"

#include <stdatomic.h>
#include <unistd.h>

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
    alone_init(&a, LOGPROB);
    a.cfg.logprob = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 8,
                                            .logits.vocab_start = kind == 2   ? 5
                                                                  : kind == 3 ? 3
                                                                  : kind == 4 ? 0
                                                                              : 4 * r,
                                            .want_entropy = kind == 7};
    if (kind == 0)
        *(d->check == 1 ? &a.cfg.logits.temperature : &a.cfg.logprob.z_loss) = 2;
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
               !alone_valid(&a));
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
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 3, 2, 9, COLO_F32, 1, &rng);
    c.start[1] = 2;
    c.columns[1] = 4;
    c.forward_only = true;
    assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                 "3 ranks hold 10 columns, the vocabulary has 9: some are on two ranks");
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

T_MAIN("loss/logprob_reject")
