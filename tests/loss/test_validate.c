/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_validate.c - refusals of the losses that depend on where memory is, on sums near 2^63, and
 * on what other ranks bring. Tensors of GPUs are views here: the checks read no element.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/direct.h"
#include "loss/linear/head.h"
#include "loss/linear/workspace.h"
#include "loss/validate.h"

enum { TOKENS = 2, COLUMNS = 16 };

/* A group of @ranks of that backend, as far as the checks look at it. */
static colo_comm_t group_of(const colo_comm_backend_t *backend, int32_t ranks)
{
    return (colo_comm_t){.backend = backend, .size = ranks};
}

T_CASE(sizes_beyond_63_bits_are_refused)
{
    size_t bytes;
    const colo_sampling_config_t sampling = {COLO_SAMPLING_CONFIG_INIT, .logits.vocab = COLUMNS};
    const colo_logprob_config_t logprob = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = COLUMNS};
    /* of a token 2056 bytes for each rank and 24: a rank's, those of all ranks, the sum of both */
    const struct {
        int64_t tokens;
        int32_t ranks;
    } table[] = {{INT64_MAX / 2000, 1}, {INT64_MAX / 2100, 3}, {INT64_MAX / 2060, 1}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_fails(colo_sampling_workspace_size(&sampling, COLO_F32, table[i].tokens,
                                                  table[i].ranks, &bytes),
                     COLO_ERR_ARG, "exceeds 2^63 bytes");
    /* 2 (64 + 12 T), a few bytes below 2^63, do not round to 256 */
    const int64_t most = (INT64_MAX / 2 - 64) / 24 * 2;
    assert_fails(colo_logprob_workspace_size(&logprob, COLO_F32, most, 2, &bytes), COLO_ERR_ARG,
                 "exceeds 2^63 bytes");
    assert_ok(colo_logprob_workspace_size(&logprob, COLO_F32, most - 11, 2, &bytes));
    assert_ok(colo_sampling_workspace_size(&sampling, COLO_F32, 5, 2, &bytes));
    assert_int_equal(bytes, (2 * (64 + 5 * 2056) + 5 * 24 + 255) / 256 * 256);
}

T_CASE(memory_that_the_group_does_not_move_is_refused)
{
    float z[COLUMNS];
    const int64_t shape[] = {1, COLUMNS};
    const colo_tensor_t host = colo_tensor_host(z, COLO_F32, 2, shape),
                        gpu = colo_tensor_cuda(z, COLO_F32, 0, 2, shape),
                        other = colo_tensor_cuda(z, COLO_F32, 1, 2, shape);
    static const colo_direct_memory_t reaches; /* a backend that has them moves memory of GPUs */
    const colo_comm_backend_t threads = {.name = "threads"},
                              nccl = {.name = "nccl", .direct = &reaches};
    const colo_comm_t on_host = group_of(&threads, 2), on_gpus = group_of(&nccl, 2),
                      alone = group_of(&threads, 1);
    assert_ok(colo_loss_check_place(&host, &on_host, "x"));
    assert_ok(colo_loss_check_place(&gpu, &on_gpus, "x"));
    assert_ok(colo_loss_check_place(&gpu, &alone, "x"));
    assert_fails(colo_loss_check_place(&gpu, &on_host, "x"), COLO_ERR_UNBUILT,
                 "x: logits on CUDA device 0 and a group of 2 ranks of backend 'threads'");
    assert_fails(colo_loss_check_place(&host, &on_gpus, "x"), COLO_ERR_ARG,
                 "x: logits in host memory and a group of 2 GPUs");
    assert_ok(colo_loss_check_memory(&gpu, &gpu, "x"));
    assert_fails(colo_loss_check_memory(&host, &gpu, "x"), COLO_ERR_ARG, "memory kind 0");
    assert_fails(colo_loss_check_memory(&other, &gpu, "x"), COLO_ERR_ARG,
                 "memory kind 1 on device 1, expected kind 1 on device 0");
}

static colo_status_t check_segments(char *data, int64_t rows, int64_t apart)
{
    const colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = COLUMNS,
                                          .segment = COLUMNS};
    colo_tensor_t z = colo_tensor_cuda(data, COLO_F32, 0, 2, (int64_t[]){rows, COLUMNS});
    z.stride[0] = apart;
    return colo_loss_check_words(&config, &z);
}

T_CASE(rows_of_a_gpu_with_segments_begin_at_words)
{
    _Alignas(16) static char data[4 * COLUMNS * sizeof(float)];
    assert_ok(check_segments(data, 2, COLUMNS));
    assert_ok(check_segments(data, 1, COLUMNS + 1));
    assert_ok(check_segments(data + 4, 0, COLUMNS + 1));
    assert_fails(check_segments(data + 4, 2, COLUMNS), COLO_ERR_SHAPE,
                 "first row is 4 bytes past a multiple of 16 and rows are 64 bytes apart");
    assert_fails(check_segments(data, 2, COLUMNS + 1), COLO_ERR_SHAPE,
                 "first row is 0 bytes past a multiple of 16 and rows are 68 bytes apart");
}

T_CASE(saved_memory_may_be_missing_if_it_is_empty)
{
    _Alignas(COLO_ALIGNMENT) static char workspace[COLO_ALIGNMENT];
    assert_ok(colo_loss_check_buffers("x", true, NULL, 0, workspace));
    assert_fails(colo_loss_check_buffers("x", true, NULL, 1, workspace), COLO_ERR_ARG,
                 "saved memory is NULL; it needs 256 bytes");
    assert_fails(colo_loss_check_buffers("x", false, workspace, 1, workspace), COLO_ERR_ARG,
                 "saved memory is given, saved is NULL");
}

T_CASE(smoothing_over_own_columns_needs_two)
{
    float z[2 * COLUMNS];
    const colo_comm_backend_t threads = {.name = "threads"};
    const colo_comm_t pair = group_of(&threads, 2);
    for (int64_t own = 0; own < 3; own++)
        for (int smooths = 0; smooths < 2; smooths++) {
            const colo_logprob_config_t c = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = COLUMNS,
                                             .logits.vocab_start = COLUMNS - own,
                                             .label_smoothing = smooths * 0.1,
                                             .local_smoothing = true};
            /* the columns beyond the vocabulary are padding */
            const colo_tensor_t t = colo_tensor_host(z, COLO_F32, 2, (int64_t[]){1, 4});
            const colo_status_t st = colo_loss_check_shard(&c, &t, &pair);
            if (!smooths || own == 2)
                assert_ok(st);
            else
                assert_fails(st, COLO_ERR_ARG,
                             "local_smoothing divides by this rank's columns - 1");
        }
}

T_CASE(statistics_that_do_not_fit_are_a_mismatch)
{
    static const char *const words[] = {"rank 1 brings no statistics",
                                        "rank 1 has 3 tokens, rank 0", "rank 1 has another config",
                                        "rank 1 has other targets"};
    for (int i = 0; i < 4; i++) {
        colo_logprob_header_t h[2] = {{.magic = COLO_LOGPROB_MAGIC}, {.magic = COLO_LOGPROB_MAGIC}};
        h[1].magic += i == 0;
        h[1].tokens = i == 1 ? 3 : 0;
        h[1].config = i == 2;
        h[1].targets = i == 3;
        const struct colo_logprob_args p = {
            .ranks = 2, .segments = 1, .blocks = (unsigned char *)h, .block.bytes = sizeof h[0]};
        bool config;
        assert_fails(colo_logprob_check_headers(&p, &config), COLO_ERR_MISMATCH, words[i]);
        assert_int_equal(config, i == 2);
    }
}

/* Rows of two columns that begin @first and lie @apart elements apart, in one buffer. */
static colo_tensor_t rows_in(float *buffer, int64_t rows, int64_t first, int64_t apart)
{
    colo_tensor_t t = colo_tensor_host(buffer + first, COLO_F32, 2, (int64_t[]){rows, 2});
    t.stride[0] = apart;
    return t;
}

T_CASE(gradient_is_the_logits_or_shares_nothing_with_them)
{
    static float buffer[64];
    static const struct {
        int64_t rows, first, apart, z_first, z_apart;
        int verdict; /* 0 apart, 1 in place, -1 refused */
    } table[] = {
        {4, 0, 4, 0, 4, 1},  {4, 2, 4, 0, 4, 0},  {4, 0, 4, 2, 4, 0},  {4, 1, 4, 0, 4, -1},
        {4, 3, 4, 0, 4, -1}, {4, 0, 4, 0, 6, -1}, {4, 0, 3, 2, 3, -1}, {1, 0, 4, 0, 9, 1},
        {1, 1, 4, 0, 4, -1}, {1, 2, 4, 0, 4, 0},  {4, 40, 4, 0, 4, 0}, {4, 0, 4, 40, 4, 0},
        {0, 0, 4, 0, 4, 0},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const colo_tensor_t d = rows_in(buffer, table[i].rows, table[i].first, table[i].apart),
                            z = rows_in(buffer, table[i].rows, table[i].z_first, table[i].z_apart);
        bool in_place = false;
        const colo_status_t st = colo_loss_check_gradient(&d, "d_logits", &z, &in_place);
        if ((st < 0) != (table[i].verdict < 0) || (st == COLO_OK && in_place != table[i].verdict))
            fail_msg("pair %d: %s, in place %d", (int)i, colo_status_name(st), in_place);
    }
    const colo_tensor_t some = rows_in(buffer, 1, 0, 2), none = rows_in(buffer, 0, 0, 2);
    assert_false(colo_loss_ranges_overlap(&some, &none));
    assert_false(colo_loss_ranges_overlap(&none, &some));
    assert_true(colo_loss_ranges_overlap(&some, &some));
}

T_CASE(saved_config_that_was_overwritten_is_refused)
{
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT, .valid = true};
    assert_fails(colo_logprob_backward(&saved, NULL, NULL, NULL), COLO_ERR_ARG, "struct_size is 0");
}

/* ---- the lm_head ---- */

enum { HIDDEN = 4 };

T_CASE(head_on_a_gpu_takes_states_of_that_gpu)
{
    static float x[TOKENS * HIDDEN];
    static int64_t target[TOKENS], one[1];
    const int64_t shape[] = {TOKENS, HIDDEN};
    colo_lm_head_t head = {
        .config = {.mem = COLO_MEM_CUDA, .device = 1, .dtype = COLO_F32, .hidden = HIDDEN}};
    const struct colo_linear_logprob l = {.head = &head, .dtype = COLO_F32, .hidden = HIDDEN};
    const colo_tensor_t h = colo_tensor_cuda(x, COLO_F32, 1, 2, shape),
                        elsewhere = colo_tensor_cuda(x, COLO_F32, 0, 2, shape),
                        host = colo_tensor_host(x, COLO_F32, 2, shape),
                        t = colo_tensor_cuda(target, COLO_I64, 1, 1, shape),
                        id = colo_tensor_cuda(one, COLO_I64, 1, 1, (int64_t[]){1});
    const colo_support_t lists = {&id, &t, &t}; /* as long as the targets */
    colo_linear_logprob_batch_t own;
    /* no element is read: neither the targets, to be counted, nor the lists */
    assert_ok(colo_linear_check_batch(
        &l,
        &(colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT, .hidden = &h, .targets = &t,
                                       .max_valid = 0, .support = &lists},
        &own));
    assert_fails(
        colo_linear_check_batch(&l,
                                &(colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT,
                                                               .hidden = &elsewhere, .targets = &t},
                                &own),
        COLO_ERR_ARG, "hidden: memory kind 1 on device 0, expected kind 1 on device 1");
    assert_fails(
        colo_linear_check_batch(&l,
                                &(colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT,
                                                               .hidden = &host, .targets = &t},
                                &own),
        COLO_ERR_ARG, "hidden: memory kind 0");
}

T_CASE(gradient_of_hidden_states_has_their_rows)
{
    static float x[TOKENS * HIDDEN], d[TOKENS * HIDDEN];
    const colo_comm_backend_t threads = {.name = "threads"};
    colo_comm_t group = group_of(&threads, 3);
    colo_lm_head_t head = {
        .config = {.mem = COLO_MEM_HOST, .device = -1, .dtype = COLO_F32, .hidden = HIDDEN}};
    struct colo_linear_logprob l = {.head = &head,
                                    .dtype = COLO_F32,
                                    .hidden = HIDDEN,
                                    .group = &group,
                                    .config = {.frozen_weight = true}};
    const colo_tensor_t h = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){TOKENS, HIDDEN});
    colo_tensor_t d_h = colo_tensor_host(d, COLO_F32, 2, (int64_t[]){TOKENS - 1, HIDDEN});
    const colo_linear_logprob_grads_t g = {COLO_LINEAR_LOGPROB_GRADS_INIT, .d_hidden = &d_h};
    assert_fails(colo_linear_check_grads(&l, &g, &h), COLO_ERR_SHAPE,
                 "d_hidden: [1, 4], expected [2, 4]");
    l.config.d_hidden = COLO_D_HIDDEN_REDUCE_SCATTER;
    assert_fails(colo_linear_check_grads(&l, &g, &h), COLO_ERR_SHAPE,
                 "d_hidden: 2 tokens do not split over 3 ranks");
    group.size = 2;
    assert_ok(colo_linear_check_grads(&l, &g, &h));
}

T_CASE(saved_state_outlives_neither_its_weight_nor_its_support)
{
    uint64_t version = 0;
    int64_t id = 0;
    colo_lm_head_t head = {.bound = false};
    const struct colo_linear_logprob l = {.head = &head};
    colo_linear_logprob_saved_t saved = {COLO_LINEAR_LOGPROB_SAVED_INIT, .of = &l, .valid = true};
    assert_fails(colo_linear_check_saved(&l, &saved), COLO_ERR_STATE, "no weight is bound");
    head.bound = true;
    assert_ok(colo_linear_check_saved(&l, &saved));
    colo_tensor_t ids = colo_tensor_host(&id, COLO_I64, 1, (int64_t[]){1});
    ids.version = &version;
    saved.support = colo_loss_save_support(&(colo_support_t){&ids, &ids, &ids});
    assert_ok(colo_linear_check_saved(&l, &saved));
    version++;
    assert_fails(colo_linear_check_saved(&l, &saved), COLO_ERR_MODIFIED, "support");
    assert_ok(colo_linear_check_memory(NULL, "saved memory", 0));
    assert_fails(colo_linear_check_memory(NULL, "saved memory", 1), COLO_ERR_ARG,
                 "linear: saved memory is NULL, expected 1 bytes");
}

T_CASE(segments_of_several_ranks_need_a_sum_of_d_hidden)
{
    const colo_comm_backend_t threads = {.name = "threads"};
    const colo_comm_t pair = group_of(&threads, 2);
    const colo_lm_head_t head = {
        .config = {COLO_LM_HEAD_CONFIG_INIT, .rows = COLUMNS, .hidden = HIDDEN, .dtype = COLO_F32}};
    colo_linear_logprob_config_t own, c = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    c.logprob.logits.vocab = 2 * COLUMNS;
    c.logprob.segment = COLUMNS;
    assert_fails(colo_linear_check_config(&c, &head, &pair, &own), COLO_ERR_ARG,
                 "d_hidden is partial with segments");
    c.frozen_hidden = true;
    assert_ok(colo_linear_check_config(&c, &head, &pair, &own));
    c.frozen_hidden = false;
    c.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
    assert_ok(colo_linear_check_config(&c, &head, &pair, &own));
}

T_MAIN("loss/validate")
