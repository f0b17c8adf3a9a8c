/* SPDX-License-Identifier: Apache-2.0 */
/* args.c - what a kernel is told: its block, its hashes, its shard of the vocabulary. */
#include "loss/args.h"

#include "core/error.h"
#include "core/hash.h"

#include <string.h>

static double smoothing_of(const colo_logprob_config_t *config)
{
    if (!config->want_loss)
        return 0;
    double v = (double)config->logits.vocab;
    return config->megatron_smoothing && !config->local_smoothing && config->logits.vocab > 1
               ? config->label_smoothing * v / (v - 1)
               : config->label_smoothing;
}

/* Appends an array of @n elements. */
static bool append(colo_logprob_block_t *block, int64_t n, int64_t elem, int64_t *offset)
{
    int64_t size;
    *offset = block->bytes;
    return colo_mul_ok(n, elem, &size) && colo_add_ok(size, 7, &size) &&
           colo_add_ok(block->bytes, size & ~INT64_C(7), &block->bytes);
}

bool colo_loss_lay_out(struct colo_logprob_args *p, const colo_block_array_t *arrays, int32_t n,
                       uint32_t wanted, int64_t tokens)
{
    const int64_t stat = (int64_t)colo_dtype_size(p->stat_dtype);
    char *args = (char *)p;
    bool fits = true;
    p->block.bytes = (int64_t)sizeof(colo_logprob_header_t);
    for (int32_t i = 0; i < n; i++) {
        const colo_block_array_t *a = &arrays[i];
        int64_t *offset = (int64_t *)(void *)(args + a->offset), count = tokens;
        *offset = -1;
        if (!(wanted >> i & 1))
            continue;
        if (a->count)
            fits = fits && colo_mul_ok(tokens, *(int64_t *)(void *)(args + a->count), &count);
        fits = fits && append(&p->block, count, a->elem ? a->elem : stat, offset);
    }
    return fits;
}

uint32_t colo_logprob_wanted(const struct colo_logprob_args *args)
{
    const colo_logprob_config_t *config = &args->config;
    const bool smooths = args->smoothing > 0, weighs = config->has_class_weight;
    return 7 | (uint32_t)config->want_entropy << 3 |
           (uint32_t)(smooths || config->want_mean_logits) << 4 |
           (uint32_t)(config->want_correct || config->want_argmax) << 5 |
           (uint32_t)(smooths && weighs) << 6 | (uint32_t)weighs << 7 |
           (uint32_t)config->want_sum_p2 << 8;
}

bool colo_logprob_block_layout(const colo_logprob_config_t *config, colo_dtype_t dtype, int64_t n,
                               colo_logprob_block_t *block)
{
    static const colo_block_array_t arrays[] = {COLO_LOGPROB_ARRAYS};
    struct colo_logprob_args args = {.config = *config,
                                     .stat_dtype = colo_logprob_stat_dtype(dtype),
                                     .smoothing = smoothing_of(config)};
    const bool fits =
        colo_loss_lay_out(&args, arrays, COLO_LOGPROB_NARRAYS, colo_logprob_wanted(&args), n);
    *block = args.block;
    return fits;
}

static uint64_t hash_f64(uint64_t hash, double v)
{
    int64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return colo_hash_i64(hash, bits);
}

uint64_t colo_logprob_hash_config(const colo_logprob_config_t *config, colo_dtype_t dtype)
{
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, config->logits.vocab);
    hash = hash_f64(hash, config->logits.scale / config->logits.temperature);
    hash = hash_f64(hash, config->logits.softcap / config->logits.temperature);
    hash = hash_f64(hash, smoothing_of(config));
    hash = hash_f64(hash, config->z_loss);
    hash = colo_hash_i64(hash, config->ignore_index);
    hash = colo_hash_i64(hash, config->order);
    hash = colo_hash_i64(hash, dtype);
    return colo_hash_i64(hash, config->want_entropy | config->want_loss << 1 |
                                   config->want_correct << 2 | config->lenient_targets << 3 |
                                   config->local_smoothing << 4 | config->has_class_weight << 5 |
                                   config->want_argmax << 6 | config->want_lse << 7 |
                                   config->want_sum_p2 << 8 | config->want_mean_logits << 9 |
                                   config->has_temperature << 10);
}

/* A support in host memory is hashed in order, without the tokens that are ignored. */
static uint64_t hash_support(const struct colo_logprob_args *args, uint64_t hash)
{
    const struct colo_support_lists *lists = &args->support;
    for (int64_t row = 0; row < args->tokens && lists->begin; row++) {
        if (args->targets[row * args->target_stride] == args->config.ignore_index)
            continue;
        const int64_t token = colo_logprob_token_of(args, row),
                      end = lists->end[token * lists->end_stride];
        for (int64_t i = lists->begin[token * lists->begin_stride]; i < end; i++)
            hash = (hash ^ (hash >> 29) ^ (uint64_t)lists->ids[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash = (hash ^ (hash >> 29) ^ (uint64_t)row) * UINT64_C(0x9e3779b97f4a7c15);
    }
    return hash;
}

/* So are the temperatures of tokens. */
static uint64_t hash_temperature(const struct colo_logprob_args *args, uint64_t hash)
{
    for (int64_t row = 0; row < args->tokens && args->temperature; row++) {
        uint32_t bits;
        if (args->targets[row * args->target_stride] == args->config.ignore_index)
            continue;
        memcpy(&bits, &args->temperature[colo_logprob_token_of(args, row)], sizeof bits);
        hash = (hash ^ (hash >> 29) ^ bits) * UINT64_C(0x9e3779b97f4a7c15);
    }
    return hash;
}

uint64_t colo_loss_hash_heat(const float *heat, const uint8_t *mask, int64_t mask_stride,
                             int64_t tokens, uint64_t hash)
{
    for (int64_t t = 0; heat && t < tokens; t++)
        if (!mask || mask[t * mask_stride])
            hash = colo_hash_bytes(hash, &heat[t], sizeof heat[t]);
    return hash;
}

/* One multiplication a target: the rows are read anyway, this must not show. */
uint64_t colo_logprob_hash_targets(const struct colo_logprob_args *args)
{
    uint64_t hash = COLO_HASH_INIT;
    for (int64_t token = 0; token < args->tokens; token++)
        hash = (hash ^ (hash >> 29) ^ (uint64_t)args->targets[token * args->target_stride]) *
               UINT64_C(0x9e3779b97f4a7c15);
    return hash_temperature(args, hash_support(args, hash));
}

struct colo_logprob_args colo_logprob_make_args(const colo_logprob_config_t *config,
                                                const colo_tensor_t *logits,
                                                const colo_tensor_t *targets)
{
    int64_t in_vocab = config->logits.vocab - config->logits.vocab_start;
    in_vocab = in_vocab < 0 ? 0 : in_vocab;
    const int64_t columns = logits->shape[1] < in_vocab ? logits->shape[1] : in_vocab;
    double e = smoothing_of(config);
    const int64_t own = config->local_smoothing && e > 0 ? columns : 0;
    e *= own > 1 ? (double)own / (double)(own - 1) : 1;
    return (struct colo_logprob_args){
        .config = *config,
        .dtype = logits->dtype,
        .d_dtype = logits->dtype,
        .stat_dtype = colo_logprob_stat_dtype(logits->dtype),
        .factor = config->logits.scale / config->logits.temperature,
        .cap = config->logits.softcap / config->logits.temperature,
        .smoothing = e,
        .own = own,
        .segments = 1,
        .tokens = logits->shape[0],
        .logits = logits->data,
        .row_stride = logits->stride[0],
        .targets = targets ? targets->data : NULL,
        .target_stride = targets ? targets->stride[0] : 1,
        .class_start = config->logits.vocab_start,
        .columns = logits->shape[1],
        .true_columns = columns,
    };
}

void colo_logprob_set_header(struct colo_logprob_args *args, uint64_t config, uint64_t targets)
{
    args->header = (colo_logprob_header_t){
        .magic = COLO_LOGPROB_MAGIC,
        .start = args->config.logits.vocab_start,
        .columns = args->true_columns,
        .tokens = args->tokens,
        .config = config,
        .targets = targets,
    };
}

int32_t colo_logprob_segments(const colo_logprob_config_t *config, int32_t ranks)
{
    const int64_t segments =
        config->segment > 0 ? (config->logits.vocab - 1) / config->segment + 1 : 1;
    int32_t n = 1;
    while (n * (int64_t)ranks < segments)
        n *= 2;
    return n;
}

void colo_logprob_set_ranks(struct colo_logprob_args *args, const colo_comm_t *group)
{
    args->segments = colo_logprob_segments(&args->config, colo_comm_size(group));
    args->rank = colo_comm_rank(group) * args->segments;
    args->ranks = colo_comm_size(group) * args->segments;
}
