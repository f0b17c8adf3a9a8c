/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear.c - the lm_head path against the fp64 oracle: every option, every pair of them, all
 * modes, dtypes, ways to cut the vocabulary and the head. Tolerances are derived in linear_case.c.
 */
#include "loss/linear_case.h"

#include <math.h>

enum {
    TAU = 1,
    CAP = 2,
    SMOOTH = 4,
    MEGATRON = 8,
    ZLOSS = 16,
    ENTROPY = 32,
    LOSS = 64,
    CORRECT = 128,
    BIAS = 256,
    IGNORED = 512,
    SHARDED = 1024,
    MEAN = 2048,
    OPTIONS = 12
};

static void set_options(linear_case_t *c, unsigned bits)
{
    colo_logprob_config_t *k = &c->config.logprob;
    k->temperature = bits & TAU ? 0.7 : 1;
    k->scale = bits & TAU ? 1.3 : 1;
    k->softcap = bits & CAP ? 5 : 0;
    k->label_smoothing = bits & SMOOTH ? 0.1 : 0;
    k->megatron_smoothing = bits & MEGATRON;
    k->z_loss = bits & ZLOSS ? 1e-2 : 0;
    k->want_entropy = bits & ENTROPY;
    k->want_loss = bits & LOSS;
    k->want_correct = bits & CORRECT;
    c->has_bias = bits & BIAS;
    c->head = bits & SHARDED ? HEAD_SHARDED : HEAD_RESIDENT;
    c->mean = bits & MEAN;
    for (int d = 0; bits & IGNORED && d < c->replicas; d++)
        for (int64_t t = d; t < c->tokens; t += 3) {
            c->targets[d][t] = -100;
            for (int64_t j = 0; j < c->hidden; j++)
                c->h[d][t * c->hidden + j] = NAN; /* must not be read */
        }
}

static const char *const modes[] = {"logprob", "keep", "loss"};

static void set_mode(linear_case_t *c, int mode)
{
    c->config.mode = mode == 1 ? COLO_LINEAR_KEEP : COLO_LINEAR_LOGPROB;
    c->loss_mode = mode == 2;
}

static void run_and_compare(linear_case_t *c, const char *what)
{
    char label[200];
    snprintf(label, sizeof label, "%s (W=%d D=%d T=%d V=%d H=%d %s, %d chunks)", what,
             (int)c->ranks, (int)c->replicas, (int)c->tokens, (int)c->vocab, (int)c->hidden,
             colo_dtype_name(c->dtype), (int)c->config.logprob.chunk_size);
    colo_status_t st = linear_case_run(c);
    if (st != COLO_OK)
        fail_msg("%s: %s: %s", label, colo_status_name(st), colo_last_error());
    linear_case_compare(c, label);
}

static void one(unsigned bits, int mode, int32_t ranks, int32_t replicas, colo_dtype_t dtype,
                shard_kind_t kind, int64_t chunk, uint64_t *rng)
{
    linear_case_t c;
    char what[80];
    linear_case_init(&c, ranks, replicas, 7, 19, 5, dtype, rng);
    linear_case_shard(&c, kind);
    set_options(&c, bits);
    set_mode(&c, mode);
    c.config.logprob.chunk_size = chunk;
    c.prefill = 0.5;
    snprintf(what, sizeof what, "options %03x, %s, shards %d", bits, modes[mode], (int)kind);
    run_and_compare(&c, what);
    linear_case_free(&c);
}

static void every_option_and_pair_agrees_with_the_oracle(void **state)
{
    uint64_t rng = t_seed();
    int turn = 0;
    (void)state;
    for (int i = 0; i < OPTIONS; i++)
        for (int j = i; j < OPTIONS; j++)
            for (int mode = 0; mode < 3; mode++, turn++) {
                unsigned bits = 1u << i | 1u << j;
                if (bits & (SMOOTH | MEGATRON | ZLOSS))
                    bits |= LOSS;
                one(bits, mode, 1 << turn % 3, 2, turn % 2 ? COLO_F64 : COLO_F32,
                    turn % SHARD_KINDS, 1 + turn % 4, &rng);
            }
}

static void all_options_at_once_agree_on_every_world(void **state)
{
    static const int32_t worlds[][2] = {{1, 1}, {2, 1}, {4, 1}, {8, 1},
                                        {1, 8}, {2, 4}, {4, 2}, {3, 2}};
    uint64_t rng = t_seed() + 1;
    (void)state;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
            for (int mode = 0; mode < 3; mode++)
                one((1u << OPTIONS) - 1, mode, worlds[w][0], worlds[w][1], COLO_F32, kind, 2, &rng);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_and_pair_agrees_with_the_oracle),
        cmocka_unit_test(all_options_at_once_agree_on_every_world),
    };
    return cmocka_run_group_tests_name("loss/linear", tests, NULL, NULL);
}
