/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_guards.c - what the loss guarantees about itself: what its gather carries, which
 * memory it touches, that chunking changes no bit, that stale state is refused.
 */
#include "loss/gather_case.h"
#include "loss/loss_alone.h"

#include <sys/mman.h>
#include <unistd.h>

/* ---- collectives ---- */

/* 10 tokens of f32: header 64, then m, s, x_t (40 each); with entropy u; with correct or argmax 80
 * more, once; with sum_p2 and mean_logits 40 each; lse is of what is there */
T_CASE(the_gather_carries_a_few_numbers_a_token)
{
    uint64_t rng = t_seed() + 1;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 4, 10, 4000, COLO_F32, 2, &rng);
    assert_ok(loss_case_run(&c));
    assert_int_equal(c.after_forward[1].sent_bytes[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS],
                     64 + 120);
    c.config.want_entropy = c.config.want_correct = true;
    assert_ok(loss_case_run(&c));
    assert_int_equal(c.after_forward[1].sent_bytes[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS],
                     64 + 160 + 80);
    c.config.want_argmax = c.config.want_lse = c.config.want_sum_p2 = c.config.want_mean_logits =
        true;
    assert_ok(loss_case_run(&c));
    assert_int_equal(c.after_forward[1].sent_bytes[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS],
                     64 + 160 + 80 + 80);
    assert_int_equal(c.after_forward[1].ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS], 1);
}

/* ---- chunks ---- */

T_CASE(chunking_changes_no_bit)
{
    static const int32_t worlds[] = {1, 2, 3, 8};
    enum { TOKENS = 33, VOCAB = 300 };
    static const int64_t chunks[] = {1, 7, TOKENS, TOKENS + 5};
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++) {
            T_ENDS(loss_case_free) loss_case_t c;
            loss_case_init(&c, worlds[w], TOKENS, VOCAB, loss_dtypes[d], 3, &rng);
            loss_case_shard(&c, SHARD_UNEVEN);
            c.targets[3] = -100;
            c.targets[8] = 5000;
            loss_options(&c.config, (255 & ~(WITH_TAU | WITH_CAP)) | WITH_LSE | WITH_MORE);
            c.config.label_smoothing = 0.1;
            assert_ok(loss_case_run(&c)); /* 0: chosen */
            assert_int_equal(c.n_valid[0], TOKENS - 2);
            assert_int_equal(c.n_invalid[0], 1);
            for (int k = 0; k < 4; k++) {
                T_ENDS(loss_case_free) loss_case_t again;
                loss_case_take(&again, &c, 0, TOKENS);
                again.config.chunk_size = chunks[k];
                assert_ok(loss_case_run(&again));
                loss_case_same(&again, &c, 0, "chunks");
                gather_check(&again, "chunks");
            }
        }
}

T_CASE(workspace_is_bounded_by_the_chunk_and_never_by_the_vocabulary)
{
    colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 131072};
    size_t one, many, chosen, eight, wide;
    cfg.chunk_size = 1;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, 1000000, 1, &one));
    cfg.chunk_size = 100;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, 1000000, 1, &many));
    cfg.chunk_size = 0;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, 1000000, 1, &chosen));
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, 1000000, 8, &eight));
    assert_int_equal(one, t_rounded(64 + 3 * 8));
    assert_int_equal(many, t_rounded(64 + 3 * 400));
    assert_true(chosen < 1 << 20);
    assert_int_equal(eight, t_rounded(8 * (64 + 3 * 4000000)));
    cfg.logits.vocab = 7;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, 1000000, 8, &wide));
    assert_int_equal(eight, wide);
    cfg.want_entropy = cfg.want_loss = cfg.want_correct = true;
    cfg.label_smoothing = 0.1;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F64, 5, 3, &wide));
    assert_int_equal(wide, t_rounded(3 * (64 + 6 * 40)));
    assert_ok(colo_logprob_saved_size(&cfg, COLO_BF16, 5, &wide));
    assert_int_equal(wide, t_rounded(5 * 24));
    cfg.has_class_weight = true;
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F64, 5, 3, &wide));
    assert_int_equal(wide, t_rounded(3 * (64 + 8 * 40)));
    assert_ok(colo_logprob_saved_size(&cfg, COLO_BF16, 5, &wide));
    assert_int_equal(wide, t_rounded(5 * 40));
}

/* ---- one rank, step by step ---- */

T_CASE(a_support_written_before_backward_is_refused)
{
    alone_t a;
    alone_init(&a, LOGPROB);
    uint64_t version = 1;
    int64_t list[] = {0, 1, 2, 3, 4, 5}, cu[] = {0, 2, 4, 5, 6};
    colo_tensor_t ids = colo_tensor_host(list, COLO_I64, 1, (int64_t[]){6}),
                  begin = colo_tensor_host(cu, COLO_I64, 1, (int64_t[]){T}),
                  end = colo_tensor_host(cu + 1, COLO_I64, 1, (int64_t[]){T});
    const colo_support_t support = {&ids, &begin, &end};
    ids.version = &version;
    assert_ok(
        colo_logprob_forward(&a.cfg.logprob,
                             &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, .logits = &a.logits,
                                                     .targets = &a.target, .support = &support},
                             t_self(), &a.out, &a.saved.logprob, a.stats, a.workspace, NULL));
    version++;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "support: found it written");
    version--;
    assert_ok(alone_backward(&a));
}

T_CASE(class_weights_that_do_not_fit_or_were_written_are_refused)
{
    alone_t a;
    alone_init(&a, LOGPROB);
    uint64_t version = 1;
    float w[V] = {1, 2, 0, 1, 1, 0.5F}, weights[T];
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 1, (int64_t[]){V});
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &a.logits,
                                        .targets = &a.target, .class_weight = &weight};
    colo_logprob_config_t *cfg = &a.cfg.logprob;
#define FORWARD()                                                                               \
    colo_logprob_forward(cfg, &batch, t_self(), &a.out, &a.saved.logprob, a.stats, a.workspace, \
                         NULL)
    weight.version = &version;
    assert_fails(FORWARD(), COLO_ERR_ARG,
                 "class_weight: the batch has one, config.has_class_weight is false");
    colo_tensor_t of_weight = colo_tensor_host(weights, COLO_F32, 1, (int64_t[]){T});
    a.out.weight = &of_weight;
    assert_fails(FORWARD(), COLO_ERR_ARG, "out.weight is given, config.has_class_weight is false");
    cfg->has_class_weight = true;
    weight.dtype = COLO_F64;
    assert_fails(FORWARD(), COLO_ERR_ARG, "class_weight: dtype f64, expected f32");
    weight.dtype = COLO_F32;
    weight.shape[0] = V - 1;
    assert_fails(FORWARD(), COLO_ERR_SHAPE,
                 "class_weight: 5 elements, expected one for each of the 6 columns here");
    weight.shape[0] = V;
    weight.stride[0] = 2;
    assert_fails(FORWARD(), COLO_ERR_SHAPE, "class_weight: elements are 2 apart");
    weight.stride[0] = 1;
    of_weight.dtype = COLO_F64;
    assert_fails(FORWARD(), COLO_ERR_ARG, "out.weight: dtype f64, expected f32");
    of_weight.dtype = COLO_F32;
    assert_ok(FORWARD());
    version++;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "class_weight");
    version--;
    assert_ok(alone_backward(&a));
#undef FORWARD
}

/* The whole first page is ignored rows and cannot be read or written. */
T_CASE(ignored_rows_are_not_read)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), row = V * sizeof(float);
    const int64_t dark = (int64_t)(page / row), tokens = dark + 6;
    alone_t a;
    alone_init(&a, LOGPROB);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory, page, PROT_NONE), 0);
    COLO_AUTOFREE int64_t *targets = calloc((size_t)tokens, sizeof *targets);
    COLO_AUTOFREE float *logp = malloc((size_t)tokens * sizeof *logp),
                        *up = calloc((size_t)tokens, sizeof *up);
    COLO_AUTOFREE float *dz = malloc((size_t)tokens * row);
    COLO_AUTOFREE double *stats = t_aligned((size_t)tokens * 3 * sizeof *stats + 255);
    size_t bytes;
    for (int64_t t = 0; t <= dark; t++)
        targets[t] = -100;
    a.cfg.logprob = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V};
    assert_ok(colo_logprob_workspace_size(&a.cfg.logprob, COLO_F32, tokens, 1, &bytes));
    COLO_AUTOFREE void *workspace = t_aligned(bytes);
    a.logits = colo_tensor_host(memory, COLO_F32, 2, (int64_t[]){tokens, V});
    a.target = colo_tensor_host(targets, COLO_I64, 1, &tokens);
    a.d_logits = colo_tensor_host(dz, COLO_F32, 2, (int64_t[]){tokens, V});
    a.out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = T_TENSOR(logp, COLO_F32, tokens)};
    a.arg.stats = stats;
    a.arg.workspace = workspace;
    assert_ok(alone_forward(&a));
    a.upstream = (colo_logprob_upstream_t){COLO_LOGPROB_UPSTREAM_INIT,
                                           .d_logp = T_TENSOR(up, COLO_F32, tokens)};
    assert_ok(alone_backward(&a));
    assert_true(logp[0] == 0 && logp[dark] == 0 && logp[dark + 1] < -1);
    munmap(memory, 2 * page);
}

T_CASE(outputs_that_are_null_are_not_written)
{
    alone_t a;
    alone_init(&a, LOGPROB);
    a.out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .entropy = &a.of_entropy};
    assert_ok(alone_forward(&a));
    assert_true(painted(a.logp, sizeof a.logp) && painted(a.losses, sizeof a.losses));
    assert_true(painted(a.correct, sizeof a.correct) && painted(&a.n_valid, 8));
    assert_true(a.entropy[0] > 1);
    a.upstream.d_loss = &a.of_up; /* the loss itself was not asked for, its gradient may be */
    assert_ok(alone_backward(&a));
}

T_MAIN("loss/logprob_guards")
