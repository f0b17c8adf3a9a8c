/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_merge.c - a token's loss from statistics of shards that are written here.
 */
#include "harness/harness.h"

#include "loss/loss.h"

#include <math.h>

enum { SHARDS = 2, COLUMNS = 4 };
typedef struct shard {
    colo_logprob_header_t header;
    double m, s, xt; /* of one token */
} shard_t;

/* The loss of @target, of shards whose statistics are these */
static double loss_of(const shard_t shard[SHARDS], int64_t target, bool lenient)
{
    shard_t all[SHARDS];
    double loss = -1;
    int64_t valid, invalid;
    memcpy(all, shard, sizeof all);
    for (int i = 0; i < SHARDS; i++) {
        all[i].header.start = i * COLUMNS;
        all[i].header.columns = COLUMNS;
    }
    const struct colo_logprob_args args = {
        .config.logits.vocab = SHARDS * COLUMNS,
        .config.ignore_index = -100,
        .config.lenient_targets = lenient,
        .dtype = COLO_F64,
        .targets = &target,
        .target_stride = 1,
        .stat_dtype = COLO_F64,
        .ranks = SHARDS,
        .tokens = 1,
        .hi = 1,
        .blocks = (unsigned char *)all,
        .block = {offsetof(shard_t, m), offsetof(shard_t, s), offsetof(shard_t, xt), -1, -1, -1, -1,
                  -1, -1, sizeof(shard_t)},
        .out.loss = &loss,
        .out.n_valid = &valid,
        .out.n_invalid = &invalid,
    };
    assert_ok(colo_loss_host.logprob_merge(&args, NULL));
    assert_int_equal(valid, target >= 0 && target < SHARDS * COLUMNS);
    assert_int_equal(invalid, !valid);
    return loss;
}

/* log Sum = log(2 e^-1 + 3 e^0) about M = 7; a handful of roundings of numbers below 4 */
#define LOG_SUM 1.3179509792964155
#define BOUND 1e-15

T_CASE(a_lenient_target_stands_at_the_largest_x_of_all_shards)
{
    const shard_t shard[SHARDS] = {{.m = 6, .s = 2, .xt = 0.25}, {.m = 7, .s = 3, .xt = -0.125}};
    assert_true(fabs(loss_of(shard, -1, true) - (LOG_SUM + 0.125)) < BOUND);
    assert_true(fabs(loss_of(shard, SHARDS * COLUMNS, true) - (LOG_SUM + 0.125)) < BOUND);
    assert_true(isnan(loss_of(shard, -1, false)));
    /* a target that is a token has its shard's xt */
    assert_true(fabs(loss_of(shard, 0, true) - (LOG_SUM + 0.75)) < BOUND);
}

T_CASE(a_token_whose_logit_is_minus_infinity_has_an_infinite_loss)
{
    const shard_t shard[SHARDS] = {{.m = 6, .s = 2, .xt = -INFINITY},
                                   {.m = 7, .s = 3, .xt = -INFINITY}};
    assert_true(isinf(loss_of(shard, 5, true)));
}

T_MAIN("loss/logprob_merge")
