/* SPDX-License-Identifier: Apache-2.0 */
/*
 * old.c - a program that gives each sized struct to the library, for old.py: compiled with other
 * headers than the library. One line for each: the struct, the status, and what came of it.
 */
#include <colobridge.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[300]; /* what came of it */
static colo_comm_t *world;
static colo_layout_t layout[2];
static colo_plan_t *plan;
static colo_topology_t *topology;

#define TRY(call)                       \
    do {                                \
        const colo_status_t st_ = call; \
        if (st_ < 0)                    \
            return st_;                 \
    } while (0)

/* A struct for the library to write, and bytes that it must leave alone. */
#define OUTPUT(type, name, init)  \
    struct {                      \
        type it;                  \
        unsigned char behind[64]; \
    } name = {.it = {init}};      \
    memset(name.behind, 0xa5, sizeof name.behind)
#define LEFT_ALONE(name) left_alone(name.behind)
static colo_status_t left_alone(const unsigned char behind[64])
{
    for (int i = 0; i < 64; i++)
        if (behind[i] != 0xa5)
            exit(3);
    return COLO_OK;
}

#define SAY(...) (void)snprintf(text, sizeof text, __VA_ARGS__)

/* ---- structs that the library reads ---- */

/* Plan and topology are needed below in any case: without its last member, each struct is one that
 * the other library knows. */
static colo_status_t use_plan_config(void)
{
    colo_plan_config_t config = {COLO_PLAN_CONFIG_INIT, .src = &layout[0], .dst = &layout[1],
                                 .shape = {2, 4, 3, 0}};
    const colo_status_t st = colo_plan_create(&plan, &config, 0);
    config.struct_size -= sizeof(int64_t);
    if (st < 0)
        (void)colo_plan_create(&plan, &config, 0);
    SAY("%" PRId64 " addends", colo_plan_addends(plan));
    return st;
}

static colo_status_t alone(void *user, const void *send, void *recv, size_t bytes)
{
    memcpy(recv, send, bytes);
    return COLO_OK;
}

static colo_status_t use_bootstrap(void)
{
    const colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT, .rank = 0, .size = 1,
                                        .all_gather = alone};
    colo_comm_t *comm = NULL;
    TRY(colo_comm_create_bootstrap(&bootstrap, &comm));
    SAY("%d rank", (int)colo_comm_size(comm));
    colo_comm_destroy(&comm);
    return COLO_OK;
}

static colo_status_t use_comm_config(void)
{
    OUTPUT(colo_comm_config_t, now, COLO_COMM_CONFIG_INIT);
    const colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 600000};
    TRY(colo_comm_configure(world, &config));
    TRY(colo_comm_config(world, &now.it));
    SAY("%" PRId64 " ms", now.it.timeout_ms);
    return LEFT_ALONE(now);
}

static colo_status_t use_bridge_config(void)
{
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &layout[0],
                                         .dst = &layout[1], .shape = {1, 2, 2, 0}};
    colo_bridge_t *bridge = NULL;
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    colo_tensor_t in = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){1, 2, 2}), out = in;
    out.data = y;
    TRY(colo_bridge_create(&bridge, &config, world));
    TRY(colo_bridge_forward(bridge, &in, &out, NULL));
    SAY("y %g %g", y[0], y[3]);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static const int64_t three[1] = {3}, zero[1] = {0};

static colo_status_t use_segments(void)
{
    const colo_segments_t segments = {COLO_SEGMENTS_INIT, .count = 1,       .rows = three,
                                      .src_dp = zero,     .seq = zero,      .pos = zero,
                                      .nseqs = 1,         .seq_len = three, .seq_dp = zero};
    TRY(colo_segments_check(&segments, &layout[0], &layout[1]));
    SAY("hash %" PRIx64, colo_segments_hash(&segments));
    return COLO_OK;
}

static colo_status_t use_packing(void)
{
    const colo_packing_t packing = {COLO_PACKING_INIT, .nseqs = 1, .seq_len = three};
    int64_t rows = 0;
    TRY(colo_packing_rows(&packing, &layout[1], 0, &rows));
    SAY("%" PRId64 " rows", rows);
    return COLO_OK;
}

static colo_status_t use_partition(void)
{
    const colo_partition_t part = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = 1, .tp = 1,
                                   .positions = 8};
    TRY(colo_partition_check(&part));
    SAY("first %" PRId64, colo_partition_index(&part, 0));
    return COLO_OK;
}

static colo_status_t use_sequence(void)
{
    const colo_sequence_t sequence = {COLO_SEQUENCE_INIT, .batch = 1, .positions = 5};
    return colo_sequence_check(&sequence);
}

static colo_status_t use_logprob_config(void)
{
    return colo_logprob_config_check(
        &(colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 8});
}

static colo_status_t use_topk_config(void)
{
    return colo_topk_config_check(
        &(colo_topk_config_t){COLO_TOPK_CONFIG_INIT, .logits.vocab = 8, .k = 2});
}

static colo_status_t use_sampling_config(void)
{
    return colo_sampling_config_check(
        &(colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT, .logits.vocab = 8, .top_k = 2});
}

static colo_status_t use_distill_config(void)
{
    return colo_distill_config_check(
        &(colo_distill_config_t){COLO_DISTILL_CONFIG_INIT, .logits.vocab = 8});
}

static colo_status_t use_lm_head_config(void)
{
    const colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 4,
                                          .gemm = COLO_GEMM_LOOPS};
    colo_lm_head_t *head = NULL;
    TRY(colo_lm_head_create(&head, &config, NULL));
    SAY("gemm %d", (int)colo_lm_head_config(head)->gemm);
    colo_lm_head_destroy(&head);
    return COLO_OK;
}

static colo_status_t use_linear_logprob_config(void)
{
    const colo_lm_head_config_t head_config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 4,
                                               .gemm = COLO_GEMM_LOOPS};
    const colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT,
                                                 .logprob.logits.vocab = 8};
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    TRY(colo_lm_head_create(&head, &head_config, NULL));
    TRY(colo_linear_logprob_create(&linear, &config, head, world));
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    return COLO_OK;
}

/* A head of 8 rows on [2, 4] hidden states, forward and backward, for all structs of it. */
static colo_status_t use_linear_logprob_grads(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char kept[1 << 16], work[1 << 21];
    static float h[8] = {1, 2, 3, 4, 5, 6, 7, 8}, w[32] = {1, 0, 1, 0, 1}, d_h[8], d_w[32], logp[2];
    static int64_t target[2] = {0, 7};
    const colo_lm_head_config_t head_config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 4,
                                               .gemm = COLO_GEMM_LOOPS};
    const colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT,
                                                 .logprob.logits.vocab = 8};
    const colo_tensor_t hidden = colo_tensor_host(h, COLO_F32, 2, (int64_t[]){2, 4}),
                        weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){8, 4}),
                        targets = colo_tensor_host(target, COLO_I64, 1, (int64_t[]){2}),
                        d_hidden = colo_tensor_host(d_h, COLO_F32, 2, (int64_t[]){2, 4}),
                        d_weight = colo_tensor_host(d_w, COLO_F32, 2, (int64_t[]){8, 4});
    const colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, .hidden = &hidden,
                                               .targets = &targets, .max_valid = -1};
    const colo_tensor_t of_logp = colo_tensor_host(logp, COLO_F32, 1, (int64_t[]){2});
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &of_logp};
    const colo_linear_logprob_upstream_t up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = 1};
    const colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT,
                                               .d_hidden = &d_hidden, .d_weight = &d_weight};
    OUTPUT(colo_linear_logprob_saved_t, saved, COLO_LINEAR_LOGPROB_SAVED_INIT);
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    TRY(colo_lm_head_create(&head, &head_config, NULL));
    TRY(colo_linear_logprob_create(&linear, &config, head, world));
    TRY(colo_lm_head_bind(head, &weight, NULL, NULL));
    TRY(colo_linear_logprob_forward(linear, &batch, &out, &saved.it, kept, work, NULL));
    TRY(colo_linear_logprob_backward(linear, &saved.it, &up, &grads, work, NULL));
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    SAY("logp %.3f, d_h %.3f", logp[0], d_h[3]);
    return LEFT_ALONE(saved);
}

static colo_status_t use_linear_logprob_batch(void)
{
    return use_linear_logprob_grads();
}

static colo_status_t use_linear_logprob_upstream(void)
{
    return use_linear_logprob_grads();
}

static colo_status_t use_linear_logprob_saved(void)
{
    return use_linear_logprob_grads();
}

#ifdef COLO_LINEAR_DISTILL_CONFIG_INIT /* not in 0.1.0 */
/* The same of two heads, for all structs of a divergence from hidden states. */
static colo_status_t use_linear_distill_config(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char kept[1 << 16], work[1 << 21];
    static float h[8] = {1, 2, 3, 4, 5, 6, 7, 8}, w[32] = {1, 0, 1, 0, 1}, d_h[8], d_w[32], d[2];
    const colo_lm_head_config_t head_config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 4,
                                               .gemm = COLO_GEMM_LOOPS};
    const colo_linear_distill_config_t config = {COLO_LINEAR_DISTILL_CONFIG_INIT,
                                                 .distill.logits.vocab = 8};
    const colo_tensor_t hidden = colo_tensor_host(h, COLO_F32, 2, (int64_t[]){2, 4}),
                        weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){8, 4}),
                        zeros = colo_tensor_host(d_w, COLO_F32, 2, (int64_t[]){8, 4}),
                        d_hidden = colo_tensor_host(d_h, COLO_F32, 2, (int64_t[]){2, 4}),
                        of_d = colo_tensor_host(d, COLO_F32, 1, (int64_t[]){2});
    const colo_linear_distill_batch_t batch = {COLO_LINEAR_DISTILL_BATCH_INIT, .hidden = &hidden,
                                               .teacher_hidden = &hidden, .max_valid = -1};
    const colo_linear_distill_out_t out = {COLO_LINEAR_DISTILL_OUT_INIT, .loss = &of_d};
    const colo_linear_distill_upstream_t up = {COLO_LINEAR_DISTILL_UPSTREAM_INIT, .loss = 1};
    const colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT,
                                               .d_hidden = &d_hidden, .d_weight = &zeros};
    OUTPUT(colo_linear_distill_saved_t, saved, COLO_LINEAR_DISTILL_SAVED_INIT);
    colo_lm_head_t *head = NULL, *teacher = NULL;
    colo_linear_distill_t *distill = NULL;
    TRY(colo_lm_head_create(&head, &head_config, NULL));
    TRY(colo_lm_head_create(&teacher, &head_config, NULL));
    TRY(colo_linear_distill_create(&distill, &config, head, teacher, world));
    TRY(colo_lm_head_bind(head, &weight, NULL, NULL));
    TRY(colo_lm_head_bind(teacher, &zeros, NULL, NULL));
    TRY(colo_linear_distill_forward(distill, &batch, &out, &saved.it, kept, work, NULL));
    TRY(colo_linear_distill_backward(distill, &saved.it, &up, &grads, work, NULL));
    colo_linear_distill_destroy(&distill);
    colo_lm_head_destroy(&head);
    colo_lm_head_destroy(&teacher);
    SAY("divergence %.3f, d_h %.3f", d[0], d_h[3]);
    memset(d_w, 0, sizeof d_w);
    return LEFT_ALONE(saved);
}

static colo_status_t use_linear_distill_batch(void)
{
    return use_linear_distill_config();
}

static colo_status_t use_linear_distill_out(void)
{
    return use_linear_distill_config();
}

static colo_status_t use_linear_distill_upstream(void)
{
    return use_linear_distill_config();
}

static colo_status_t use_linear_distill_saved(void)
{
    return use_linear_distill_config();
}
#endif

/* Two tokens of 8 logits */
static float z[16] = {1, 2, 3, 4}, teacher[16] = {4, 3, 2, 1}, numbers[2], ones[2] = {1, 1};
static int64_t target[2] = {1, 2};
static colo_tensor_t logits, soft, targets, per_token, d_per_token;

static colo_status_t use_logprob_batch(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char work[1 << 16], kept[1 << 12];
    float d_z[16];
    const colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 8};
    const colo_tensor_t d_logits = colo_tensor_host(d_z, COLO_F32, 2, (int64_t[]){2, 8});
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &logits,
                                        .targets = &targets};
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &per_token};
    const colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &d_per_token};
    OUTPUT(colo_logprob_saved_t, saved, COLO_LOGPROB_SAVED_INIT);
    TRY(colo_logprob_forward(&config, &batch, world, &out, &saved.it, kept, work, NULL));
    TRY(colo_logprob_backward(&saved.it, &up, &d_logits, NULL));
    SAY("logp %.3f, d_z %.3f", numbers[0], d_z[1]);
    return LEFT_ALONE(saved);
}

static colo_status_t use_logprob_saved(void)
{
    return use_logprob_batch();
}

static colo_status_t use_logprob_out(void)
{
    return use_logprob_batch();
}

static colo_status_t use_logprob_upstream(void)
{
    return use_logprob_batch();
}

static colo_status_t use_topk_batch(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char work[1 << 16], kept[1 << 12];
    float d_z[16];
    const colo_topk_config_t config = {COLO_TOPK_CONFIG_INIT, .logits.vocab = 8, .k = 1,
                                       .topk = true};
    const colo_tensor_t d_logits = colo_tensor_host(d_z, COLO_F32, 2, (int64_t[]){2, 8});
    const colo_tensor_t picked = colo_tensor_host(numbers, COLO_F32, 2, (int64_t[]){2, 1}),
                        d_picked = colo_tensor_host(ones, COLO_F32, 2, (int64_t[]){2, 1});
    const colo_topk_batch_t batch = {COLO_TOPK_BATCH_INIT, .logits = &logits};
    const colo_topk_out_t out = {COLO_TOPK_OUT_INIT, .logp = &picked};
    const colo_topk_upstream_t up = {COLO_TOPK_UPSTREAM_INIT, .d_logp = &d_picked};
    OUTPUT(colo_topk_saved_t, saved, COLO_TOPK_SAVED_INIT);
    TRY(colo_topk_forward(&config, &batch, world, &out, &saved.it, kept, work, NULL));
    TRY(colo_topk_backward(&saved.it, &up, &d_logits, NULL));
    SAY("logp %.3f, d_z %.3f", numbers[0], d_z[1]);
    return LEFT_ALONE(saved);
}

static colo_status_t use_topk_saved(void)
{
    return use_topk_batch();
}

static colo_status_t use_topk_out(void)
{
    return use_topk_batch();
}

static colo_status_t use_topk_upstream(void)
{
    return use_topk_batch();
}

static colo_status_t use_distill_batch(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char work[1 << 16], kept[1 << 12];
    float d_z[16];
    const colo_distill_config_t config = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = 8};
    const colo_tensor_t d_logits = colo_tensor_host(d_z, COLO_F32, 2, (int64_t[]){2, 8});
    const colo_distill_batch_t batch = {COLO_DISTILL_BATCH_INIT, .logits = &logits,
                                        .targets = &soft};
    const colo_distill_out_t out = {COLO_DISTILL_OUT_INIT, .kl = &per_token};
    const colo_distill_upstream_t up = {COLO_DISTILL_UPSTREAM_INIT, .d_kl = &d_per_token};
    OUTPUT(colo_distill_saved_t, saved, COLO_DISTILL_SAVED_INIT);
    TRY(colo_distill_forward(&config, &batch, world, &out, &saved.it, kept, work, NULL));
    TRY(colo_distill_backward(&saved.it, &up, &d_logits, NULL));
    SAY("kl %.3f, d_z %.3f", numbers[0], d_z[1]);
    return LEFT_ALONE(saved);
}

static colo_status_t use_distill_saved(void)
{
    return use_distill_batch();
}

static colo_status_t use_distill_out(void)
{
    return use_distill_batch();
}

static colo_status_t use_distill_upstream(void)
{
    return use_distill_batch();
}

static colo_status_t use_lm_head_grads(void)
{
    float d_w[32] = {0};
    const colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 4,
                                          .gemm = COLO_GEMM_LOOPS};
    const colo_tensor_t d_weight = colo_tensor_host(d_w, COLO_F32, 2, (int64_t[]){8, 4});
    const colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, .d_weight = &d_weight};
    colo_lm_head_t *head = NULL;
    colo_tensor_t d;
    TRY(colo_lm_head_create(&head, &config, NULL));
    TRY(colo_lm_head_gradient(head, &grads, NULL, NULL, &d, NULL));
    SAY("%d axes", (int)d.ndim);
    colo_lm_head_destroy(&head);
    return COLO_OK;
}

static colo_status_t use_loss_mean(void)
{
    static _Alignas(COLO_ALIGNMENT) unsigned char work[4096];
    float loss[2] = {1, 2}, value = 0;
    double num = 0, den = 0, factor = 0;
    int64_t valid = 2;
    const colo_tensor_t losses = colo_tensor_host(loss, COLO_F32, 1, (int64_t[]){2});
    const int64_t one = 1;
    const colo_tensor_t of_value = colo_tensor_host(&value, COLO_F32, 1, &one),
                        of_num = colo_tensor_host(&num, COLO_F64, 1, &one),
                        of_den = colo_tensor_host(&den, COLO_F64, 1, &one),
                        of_factor = colo_tensor_host(&factor, COLO_F64, 1, &one),
                        n_valid = colo_tensor_host(&valid, COLO_I64, 1, &one);
    const colo_loss_mean_t out = {COLO_LOSS_MEAN_INIT, .value = &of_value, .num = &of_num,
                                  .den = &of_den, .factor = &of_factor};
    TRY(colo_loss_mean_forward(&losses, &n_valid, true, world, &out, work, NULL));
    SAY("mean %g", value);
    return COLO_OK;
}

static colo_status_t use_loss_mean_upstream(void)
{
    float d_loss[2] = {0}, three = 3;
    double half = 0.5;
    const int64_t one = 1;
    const colo_tensor_t factor = colo_tensor_host(&half, COLO_F64, 1, &one),
                        d_value = colo_tensor_host(&three, COLO_F32, 1, &one);
    const colo_tensor_t d_losses = colo_tensor_host(d_loss, COLO_F32, 1, (int64_t[]){2});
    const colo_loss_mean_upstream_t upstream = {COLO_LOSS_MEAN_UPSTREAM_INIT, .d_value = &d_value};
    TRY(colo_loss_mean_backward(&factor, &upstream, &d_losses, NULL));
    SAY("d_loss %g", d_loss[1]);
    return COLO_OK;
}

static colo_status_t twice(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                           int32_t nin, void *state)
{
    *(float *)d_in->data = 2 * *(const float *)d_out->data;
    return COLO_OK;
}

static colo_status_t use_tape_record(void)
{
    colo_tape_t *tape = NULL;
    colo_value_t leaf, value;
    float x = 1, d_x = 0, y = 2;
    const int64_t one[1] = {1};
    const colo_tensor_t in = colo_tensor_host(&x, COLO_F32, 1, one),
                        d_in = colo_tensor_host(&d_x, COLO_F32, 1, one),
                        out = colo_tensor_host(&y, COLO_F32, 1, one);
    TRY(colo_tape_create(&tape));
    TRY(colo_tape_leaf(tape, &in, &d_in, &leaf));
    const colo_tape_record_t record = {
        COLO_TAPE_RECORD_INIT, .name = "twice", .in = &leaf,          .nin = 1,
        .out = &out,           .nout = 1,       .out_values = &value, .backward = twice};
    TRY(colo_tape_record(tape, &record));
    TRY(colo_tape_backward(tape, value, NULL));
    SAY("d_x %g", d_x);
    colo_tape_destroy(&tape);
    return COLO_OK;
}

static colo_status_t use_topology_config(void)
{
    colo_topology_config_t config = {COLO_TOPOLOGY_CONFIG_INIT, .topology = "package:2 core:4 pu:1",
                                     .world = 4, .bind = COLO_BIND_SCATTER};
    const colo_status_t st = colo_topology_create(&topology, &config);
    config.struct_size -= sizeof(int64_t);
    if (st == COLO_ERR_ARG)
        (void)colo_topology_create(&topology, &config);
    return st;
}

/* ---- structs that the library writes ---- */

static colo_status_t use_comm_stats(void)
{
    OUTPUT(colo_comm_stats_t, stats, COLO_COMM_STATS_INIT);
    TRY(colo_comm_barrier(world, NULL));
    TRY(colo_comm_stats(world, &stats.it));
    SAY("%d barriers", (int)stats.it.ops[COLO_OP_BARRIER][COLO_CATEGORY_USER]);
    return LEFT_ALONE(stats);
}

static colo_status_t use_plan_bytes(void)
{
    OUTPUT(colo_plan_bytes_t, bytes, COLO_PLAN_BYTES_INIT);
    TRY(colo_plan_bytes(plan, COLO_PASS_FORWARD, &bytes.it));
    SAY("%" PRId64 " local", bytes.it.local);
    return LEFT_ALONE(bytes);
}

static colo_status_t use_plan_node_bytes(void)
{
    OUTPUT(colo_plan_node_bytes_t, bytes, COLO_PLAN_NODE_BYTES_INIT);
    TRY(colo_plan_node_bytes(plan, COLO_PASS_FORWARD, &bytes.it));
    SAY("%" PRId64 " in", bytes.it.in);
    return LEFT_ALONE(bytes);
}

static colo_status_t use_topology_machine(void)
{
    OUTPUT(colo_topology_machine_t, machine, COLO_TOPOLOGY_MACHINE_INIT);
    TRY(colo_topology_machine(topology, &machine.it));
    SAY("%s: %d cores", machine.it.source, (int)machine.it.cores);
    return LEFT_ALONE(machine);
}

static colo_status_t use_topology_spot(void)
{
    OUTPUT(colo_topology_spot_t, spot, COLO_TOPOLOGY_SPOT_INIT);
    TRY(colo_topology_spot(topology, 1, &spot.it));
    SAY("package %d", (int)spot.it.package);
    return LEFT_ALONE(spot);
}

static colo_status_t use_topology_cut(void)
{
    OUTPUT(colo_topology_cut_t, cut, COLO_TOPOLOGY_CUT_INIT);
    colo_grid_t grid;
    TRY(colo_grid_parse(&grid, "tp=4", 4));
    TRY(colo_topology_cut(topology, &grid, "tp", &cut.it));
    SAY("%" PRId64 " across packages", cut.it.package);
    return LEFT_ALONE(cut);
}

static colo_status_t use_topology_traffic(void)
{
    OUTPUT(colo_topology_traffic_t, traffic, COLO_TOPOLOGY_TRAFFIC_INIT);
    TRY(colo_topology_traffic(topology, plan, COLO_PASS_FORWARD, &traffic.it));
    SAY("%" PRId64 " bytes", traffic.it.total);
    return LEFT_ALONE(traffic);
}

#define USE(name)         \
    {                     \
#name, use_##name \
    }
static const struct {
    const char *name;
    colo_status_t (*use)(void);
} all[] = {
    USE(plan_config),
    USE(bootstrap),
    USE(comm_config),
    USE(bridge_config),
    USE(segments),
    USE(packing),
    USE(partition),
    USE(sequence),
    USE(logprob_config),
    USE(topk_config),
    USE(sampling_config),
    USE(distill_config),
    USE(lm_head_config),
    USE(linear_logprob_config),
    USE(linear_logprob_grads),
    USE(linear_logprob_batch),
    USE(linear_logprob_upstream),
    USE(linear_logprob_saved),
#ifdef COLO_LINEAR_DISTILL_CONFIG_INIT
    USE(linear_distill_config),
    USE(linear_distill_batch),
    USE(linear_distill_out),
    USE(linear_distill_upstream),
    USE(linear_distill_saved),
#endif
    USE(lm_head_grads),
    USE(loss_mean),
    USE(loss_mean_upstream),
    USE(tape_record),
    USE(topology_config),
    USE(comm_stats),
    USE(plan_bytes),
    USE(plan_node_bytes),
    USE(topology_machine),
    USE(topology_spot),
    USE(topology_cut),
    USE(topology_traffic),
    USE(logprob_batch),
    USE(logprob_out),
    USE(logprob_upstream),
    USE(topk_batch),
    USE(topk_out),
    USE(topk_upstream),
    USE(distill_batch),
    USE(distill_out),
    USE(distill_upstream),
    USE(logprob_saved),
    USE(topk_saved),
    USE(distill_saved),
};

int main(void)
{
    colo_grid_t grid;
    if (colo_comm_create_self(&world) < 0 || colo_grid_parse(&grid, "dp=1", 1) < 0 ||
        colo_layout_init_src(&layout[0], &grid) < 0 || colo_layout_init_dst(&layout[1], &grid) < 0)
        return 2;
    logits = colo_tensor_host(z, COLO_F32, 2, (int64_t[]){2, 8});
    soft = colo_tensor_host(teacher, COLO_F32, 2, (int64_t[]){2, 8});
    targets = colo_tensor_host(target, COLO_I64, 1, (int64_t[]){2});
    per_token = colo_tensor_host(numbers, COLO_F32, 1, (int64_t[]){2});
    d_per_token = colo_tensor_host(ones, COLO_F32, 1, (int64_t[]){2});
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        text[0] = '\0';
        const colo_status_t st = all[i].use();
        printf("%s: %s: %s\n", all[i].name, colo_status_name(st),
               st < 0 ? colo_last_error() : text);
    }
    return 0;
}
