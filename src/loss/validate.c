/* SPDX-License-Identifier: Apache-2.0 */
/*
 * validate.c - what the logits path refuses, each with its numbers.
 *
 * Three moments: before forward touches anything (this rank's arguments), after the gather (what
 * the ranks brought together: the same config and targets, shards that tile the vocabulary), and
 * before backward (the saved state is there, nothing was written since, d_logits is the logits or
 * shares nothing with them). Nothing here writes a caller's memory; only colo_loss_ready() tells
 * other ranks of it.
 */
#include "loss/validate.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "loss/scalar.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { MAX_SEGMENTS = 64, SEGMENT_GRAIN = 16 };
#define MAX_SEGMENT (INT64_C(1) << 40)

colo_status_t colo_logprob_read(const colo_logprob_config_t *given, colo_logprob_config_t *own)
{
    *own = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT};
    return COLO_SIZED_READ(own, given, label_smoothing, "logprob: config",
                           "COLO_LOGPROB_CONFIG_INIT");
}

colo_status_t colo_logprob_config_check(const colo_logprob_config_t *config)
{
    colo_logprob_config_t own;
    const colo_logprob_config_t *c = &own;
    COLO_TRY(colo_logprob_read(config, &own));
    COLO_TRY(COLO_SIZED_CHECK_ROOM(c, "logprob: config", "COLO_LOGPROB_CONFIG_INIT"));
    COLO_FAIL_IF(c->logits.vocab <= 0, COLO_ERR_ARG, "logprob: vocab is %" PRId64 ", expected > 0",
                 c->logits.vocab);
    COLO_FAIL_IF(c->logits.vocab_start < 0, COLO_ERR_ARG,
                 "logprob: vocab_start is %" PRId64 ", expected >= 0", c->logits.vocab_start);
    COLO_FAIL_IF(!(c->logits.temperature > 0) || isinf(c->logits.temperature), COLO_ERR_ARG,
                 "logprob: temperature is %g, expected finite and > 0", c->logits.temperature);
    COLO_FAIL_IF(!isfinite(c->logits.scale), COLO_ERR_ARG, "logprob: scale is %g, expected finite",
                 c->logits.scale);
    COLO_FAIL_IF(!isfinite(c->logits.scale / c->logits.temperature), COLO_ERR_ARG,
                 "logprob: scale / temperature = %g / %g is not finite", c->logits.scale,
                 c->logits.temperature);
    COLO_FAIL_IF(!(c->logits.softcap >= 0) || isinf(c->logits.softcap), COLO_ERR_ARG,
                 "logprob: softcap is %g, expected finite and >= 0 (0 = off)", c->logits.softcap);
    const double cap = c->logits.softcap / c->logits.temperature;
    COLO_FAIL_IF(c->logits.softcap > 0 && !(cap >= FLT_MIN && cap <= FLT_MAX), COLO_ERR_ARG,
                 "logprob: softcap / temperature = %g / %g, expected what an f32 holds",
                 c->logits.softcap, c->logits.temperature);
    COLO_FAIL_IF(!(c->label_smoothing >= 0 && c->label_smoothing <= 1), COLO_ERR_ARG,
                 "logprob: label_smoothing is %g, expected in [0, 1]", c->label_smoothing);
    COLO_FAIL_IF(c->megatron_smoothing && c->label_smoothing > 0 && c->logits.vocab == 1,
                 COLO_ERR_ARG, "logprob: megatron_smoothing divides by vocab - 1, and vocab is 1");
    COLO_FAIL_IF(!(c->z_loss >= 0) || isinf(c->z_loss), COLO_ERR_ARG,
                 "logprob: z_loss is %g, expected finite and >= 0", c->z_loss);
    COLO_FAIL_IF(c->chunk_size < 0, COLO_ERR_ARG,
                 "logprob: chunk_size is %" PRId64 ", expected >= 0 (0 = chosen)", c->chunk_size);
    COLO_FAIL_IF(c->segment < 0 || c->segment > MAX_SEGMENT || c->segment % SEGMENT_GRAIN ||
                     (c->segment > 0 && (c->logits.vocab - 1) / c->segment >= MAX_SEGMENTS),
                 COLO_ERR_ARG,
                 "logprob: segment is %" PRId64
                 ", expected 0 (off) or a multiple of %d of at least %" PRId64
                 ", for a vocabulary of %" PRId64 " has %d segments at most",
                 c->segment, SEGMENT_GRAIN,
                 ((c->logits.vocab - 1) / (MAX_SEGMENTS * SEGMENT_GRAIN) + 1) * SEGMENT_GRAIN,
                 c->logits.vocab, MAX_SEGMENTS);
    COLO_FAIL_IF(c->segment > 0 && c->local_smoothing, COLO_ERR_ARG,
                 "logprob: local_smoothing with segment %" PRId64
                 ": it depends on the number of ranks; switch one off",
                 c->segment);
    COLO_FAIL_IF(c->has_class_weight && (c->local_smoothing || c->lenient_targets), COLO_ERR_ARG,
                 "logprob: has_class_weight with %s: %s; switch one off",
                 c->local_smoothing ? "local_smoothing" : "lenient_targets",
                 c->local_smoothing ? "its mean over a rank's columns has no weights"
                                    : "a target that is no token has no weight");
    COLO_FAIL_IF(
        c->want_mean_logits &&
            (c->local_smoothing || (c->has_class_weight && c->want_loss && c->label_smoothing > 0)),
        COLO_ERR_ARG,
        "logprob: want_mean_logits with %s, which has a sum of x of its own; switch one off",
        c->local_smoothing ? "local_smoothing" : "has_class_weight and label_smoothing");
    return COLO_OK;
}

colo_status_t colo_loss_check_matrix(const colo_tensor_t *matrix, const char *what, bool written)
{
    COLO_TRY(colo_tensor_check(matrix, what));
    COLO_FAIL_IF(!colo_dtype_is_float(matrix->dtype), COLO_ERR_ARG,
                 "%s: dtype %s, expected f32, f64, bf16 or f16", what,
                 colo_dtype_name(matrix->dtype));
    COLO_FAIL_IF(matrix->ndim != 2, COLO_ERR_SHAPE, "%s: %d axes, expected 2: [T, Vl]", what,
                 (int)matrix->ndim);
    COLO_FAIL_IF(matrix->shape[1] > 1 && matrix->stride[1] != 1, COLO_ERR_SHAPE,
                 "%s: columns are %" PRId64 " elements apart, expected contiguous columns", what,
                 matrix->stride[1]);
    COLO_FAIL_IF(written && matrix->shape[0] > 1 && matrix->stride[0] < matrix->shape[1],
                 COLO_ERR_SHAPE,
                 "%s: rows of %" PRId64 " columns are %" PRId64 " elements apart and overlap", what,
                 matrix->shape[1], matrix->stride[0]);
    return COLO_OK;
}

/* Are the columns [@start, @end) of the vocabulary whole segments, as many on each rank? */
static colo_status_t check_segments(const colo_logprob_config_t *config, int64_t start, int64_t end,
                                    const colo_comm_t *group)
{
    if (config->segment == 0)
        return COLO_OK;
    const int32_t ranks = colo_comm_size(group);
    const int64_t vocab = config->logits.vocab,
                  each = colo_logprob_segments(config, ranks) * config->segment;
    int64_t lo = colo_comm_rank(group) * each, hi = lo + each;
    lo = lo < vocab ? lo : vocab;
    hi = hi < vocab ? hi : vocab;
    start = start < vocab ? start : vocab;
    if (start == lo && end == hi)
        return COLO_OK;
    return colo_fail(COLO_ERR_SHAPE,
                     "logprob: rank %d of %d has columns [%" PRId64 ", %" PRId64
                     ") of a vocabulary of %" PRId64 " in segments of %" PRId64
                     ", expected [%" PRId64 ", %" PRId64 "); pad the vocabulary to %" PRId64
                     " columns and give each rank %" PRId64,
                     (int)colo_comm_rank(group), (int)ranks, start, end, vocab, config->segment, lo,
                     hi, each * ranks, each);
}

colo_status_t colo_loss_check_shard(const colo_logprob_config_t *config,
                                    const colo_tensor_t *logits, const colo_comm_t *group)
{
    int64_t end;
    COLO_FAIL_IF(!colo_add_ok(config->logits.vocab_start, logits->shape[1], &end), COLO_ERR_ARG,
                 "logprob: vocab_start %" PRId64 " + %" PRId64 " columns passes 2^63",
                 config->logits.vocab_start, logits->shape[1]);
    COLO_FAIL_IF(colo_comm_size(group) == 1 &&
                     (config->logits.vocab_start > 0 || end < config->logits.vocab),
                 COLO_ERR_SHAPE,
                 "logits: columns [%" PRId64 ", %" PRId64
                 ") on a group of one rank, expected the whole vocabulary [0, %" PRId64 ")",
                 config->logits.vocab_start, end, config->logits.vocab);
    const int64_t own =
        (end < config->logits.vocab ? end : config->logits.vocab) - config->logits.vocab_start;
    COLO_FAIL_IF(config->local_smoothing && config->label_smoothing > 0 && own < 2, COLO_ERR_ARG,
                 "logprob: local_smoothing divides by this rank's columns - 1: found "
                 "%" PRId64 " columns, expected 2 or more",
                 own < 0 ? 0 : own);
    return check_segments(config, config->logits.vocab_start,
                          end < config->logits.vocab ? end : config->logits.vocab, group);
}

colo_status_t colo_loss_check_place(const colo_tensor_t *logits, const colo_comm_t *group,
                                    const char *what)
{
    if (colo_comm_size(group) == 1 ||
        (logits->mem == COLO_MEM_CUDA) == (colo_comm_mem(group) == COLO_MEM_CUDA))
        return COLO_OK;
    COLO_FAIL_IF(logits->mem == COLO_MEM_CUDA, COLO_ERR_UNBUILT,
                 "%s: logits on CUDA device %d and a group of %d ranks of backend '%s', "
                 "which moves host memory; colo_comm_create_nccl() makes one of GPUs",
                 what, (int)logits->device, (int)colo_comm_size(group), colo_comm_backend(group));
    return colo_fail(COLO_ERR_ARG, "%s: logits in host memory and a group of %d GPUs", what,
                     (int)colo_comm_size(group));
}

colo_status_t colo_loss_check_in(const colo_tensor_t *tensor, colo_mem_t mem, int32_t device,
                                 const char *what)
{
    COLO_FAIL_IF(tensor->mem != mem || (mem == COLO_MEM_CUDA && tensor->device != device),
                 COLO_ERR_ARG, "%s: memory kind %d on device %d, expected kind %d on device %d",
                 what, (int)tensor->mem, (int)tensor->device, (int)mem, (int)device);
    return COLO_OK;
}

colo_status_t colo_loss_check_is(const colo_tensor_t *tensor, colo_dtype_t dtype, const char *what)
{
    return tensor->dtype == dtype
               ? COLO_OK
               : colo_fail(COLO_ERR_ARG, "%s: dtype %s, expected %s", what,
                           colo_dtype_name(tensor->dtype), colo_dtype_name(dtype));
}

colo_status_t colo_loss_check_line(const colo_tensor_t *tensor, const char *what,
                                   colo_dtype_t dtype, int64_t count, const char *as)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    COLO_TRY(colo_loss_check_is(tensor, dtype, what));
    const int64_t found = colo_tensor_count(tensor);
    COLO_FAIL_IF(tensor->ndim != 1 || (count >= 0 && found != count), COLO_ERR_SHAPE,
                 "%s: %d axes, %" PRId64 " elements, expected [%" PRId64 "]%s", what,
                 (int)tensor->ndim, found, count >= 0 ? count : found, as);
    return COLO_OK;
}

colo_status_t colo_loss_check_class_weight(const colo_tensor_t *weight,
                                           const colo_logprob_config_t *config, int64_t columns,
                                           const colo_tensor_t *like)
{
    COLO_FAIL_IF(!weight != !config->has_class_weight, COLO_ERR_ARG,
                 "class_weight: the batch has %s, config.has_class_weight is %s",
                 weight ? "one" : "none", config->has_class_weight ? "true" : "false");
    if (!weight)
        return COLO_OK;
    int64_t in_vocab = config->logits.vocab - config->logits.vocab_start;
    in_vocab = in_vocab < 0 ? 0 : in_vocab < columns ? in_vocab : columns;
    COLO_TRY(
        colo_loss_check_line(weight, "class_weight", colo_logprob_stat_dtype(like->dtype), -1, ""));
    COLO_FAIL_IF(weight->shape[0] != columns && weight->shape[0] != in_vocab, COLO_ERR_SHAPE,
                 "class_weight: %" PRId64 " elements, expected one for each of the %" PRId64
                 " columns here, or of the %" PRId64 " in the vocabulary",
                 weight->shape[0], columns, in_vocab);
    COLO_FAIL_IF(!colo_tensor_is_contiguous(weight), COLO_ERR_SHAPE,
                 "class_weight: elements are %" PRId64 " apart, expected contiguous",
                 weight->stride[0]);
    return colo_loss_check_memory(weight, like, "class_weight");
}

colo_status_t colo_loss_check_temperature(const colo_tensor_t *temperature,
                                          const colo_logprob_config_t *config,
                                          const colo_tensor_t *targets, const colo_tensor_t *like)
{
    COLO_FAIL_IF(!temperature != !config->has_temperature, COLO_ERR_ARG,
                 "temperature: the batch has %s, config.has_temperature is %s",
                 temperature ? "one" : "none", config->has_temperature ? "true" : "false");
    COLO_TRY(
        colo_loss_check_array(temperature, "temperature", COLO_F32, targets->shape[0], 0, like));
    for (int64_t t = 0; temperature && like->mem == COLO_MEM_HOST && t < targets->shape[0]; t++) {
        const double v = (double)((const float *)temperature->data)[t];
        COLO_FAIL_IF(
            ((const int64_t *)targets->data)[t * targets->stride[0]] != config->ignore_index &&
                !(v > 0 && v < INFINITY),
            COLO_ERR_ARG, "temperature: token %" PRId64 " has %g, expected finite and > 0", t, v);
    }
    return COLO_OK;
}

colo_status_t colo_loss_check_heat(const colo_tensor_t *heat, const char *what, bool has,
                                   const colo_tensor_t *mask, const colo_tensor_t *logits)
{
    const int64_t tokens = logits->shape[0];
    COLO_FAIL_IF(!heat != !has, COLO_ERR_ARG, "%s: the batch has %s, config.has_%s is %s", what,
                 heat ? "one" : "none", what, has ? "true" : "false");
    COLO_TRY(colo_loss_check_array(heat, what, COLO_F32, tokens, 0, logits));
    for (int64_t t = 0; heat && logits->mem == COLO_MEM_HOST && t < tokens; t++) {
        const double v = (double)((const float *)heat->data)[t];
        const bool counts = !mask || ((const uint8_t *)mask->data)[t * mask->stride[0]];
        COLO_FAIL_IF(counts && !(v > 0 && v < INFINITY), COLO_ERR_ARG,
                     "%s: token %" PRId64 " has %g, expected finite and > 0", what, t, v);
    }
    return COLO_OK;
}

/* [@rows, @columns] of @dtype */
static colo_status_t check_table(const colo_tensor_t *table, const char *what, colo_dtype_t dtype,
                                 int64_t rows, int64_t columns)
{
    COLO_TRY(colo_tensor_check(table, what));
    COLO_TRY(colo_loss_check_is(table, dtype, what));
    COLO_FAIL_IF(table->ndim != 2 || table->shape[0] != rows || table->shape[1] != columns,
                 COLO_ERR_SHAPE,
                 "%s: %d axes, %" PRId64 " elements, expected [%" PRId64 ", %" PRId64 "]", what,
                 (int)table->ndim, colo_tensor_count(table), rows, columns);
    return COLO_OK;
}

colo_status_t colo_loss_check_array(const colo_tensor_t *array, const char *what,
                                    colo_dtype_t dtype, int64_t rows, int64_t columns,
                                    const colo_tensor_t *like)
{
    if (!array)
        return COLO_OK;
    COLO_TRY(columns > 0 ? check_table(array, what, dtype, rows, columns)
                         : colo_loss_check_line(array, what, dtype, rows, ""));
    COLO_FAIL_IF(!colo_tensor_is_contiguous(array), COLO_ERR_SHAPE,
                 "%s: rows are %" PRId64 " elements apart, expected contiguous", what,
                 array->stride[0]);
    return colo_loss_check_memory(array, like, what);
}

struct colo_logprob_out colo_logprob_addresses(const colo_logprob_out_t *out)
{
    return (struct colo_logprob_out){.logp = colo_loss_address(out->logp),
                                     .entropy = colo_loss_address(out->entropy),
                                     .loss = colo_loss_address(out->loss),
                                     .correct = colo_loss_address(out->correct),
                                     .n_valid = colo_loss_address(out->n_valid),
                                     .n_invalid = colo_loss_address(out->n_invalid),
                                     .weight = colo_loss_address(out->weight),
                                     .argmax = colo_loss_address(out->argmax),
                                     .lse = colo_loss_address(out->lse),
                                     .sum_p2 = colo_loss_address(out->sum_p2),
                                     .mean_logits = colo_loss_address(out->mean_logits)};
}

colo_status_t colo_logprob_check_out(const colo_logprob_config_t *config,
                                     const colo_logprob_out_t *out, const char *name,
                                     colo_dtype_t dtype, const colo_tensor_t *logits)
{
    const int64_t tokens = logits->shape[0];
    const struct {
        bool given, wanted;
        const char *what;
    } all[] = {{out->entropy, config->want_entropy, "entropy"},
               {out->loss, config->want_loss, "loss"},
               {out->correct, config->want_correct, "correct"},
               {out->argmax, config->want_argmax, "argmax"},
               {out->lse, config->want_lse, "lse"},
               {out->sum_p2, config->want_sum_p2, "sum_p2"},
               {out->mean_logits, config->want_mean_logits, "mean_logits"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        COLO_FAIL_IF(all[i].given && !all[i].wanted, COLO_ERR_ARG,
                     "%s: out.%s is given, config.want_%s is false", name, all[i].what,
                     all[i].what);
    COLO_FAIL_IF(out->weight && !config->has_class_weight, COLO_ERR_ARG,
                 "%s: out.weight is given, config.has_class_weight is false", name);
    COLO_TRY(colo_loss_check_array(out->logp, "out.logp", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->entropy, "out.entropy", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->loss, "out.loss", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->correct, "out.correct", COLO_U8, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->n_valid, "out.n_valid", COLO_I64, 1, 0, logits));
    COLO_TRY(colo_loss_check_array(out->n_invalid, "out.n_invalid", COLO_I64, 1, 0, logits));
    COLO_TRY(colo_loss_check_array(out->argmax, "out.argmax", COLO_I64, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->lse, "out.lse", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->sum_p2, "out.sum_p2", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->mean_logits, "out.mean_logits", dtype, tokens, 0, logits));
    return colo_loss_check_array(out->weight, "out.weight", dtype, tokens, 0, logits);
}

colo_status_t colo_loss_check_memory(const colo_tensor_t *tensor, const colo_tensor_t *like,
                                     const char *what)
{
    return colo_loss_check_in(tensor, like->mem, like->device, what);
}

colo_status_t colo_loss_check_mask(const colo_tensor_t *mask, const colo_tensor_t *logits)
{
    if (!mask)
        return COLO_OK;
    COLO_TRY(colo_loss_check_line(mask, "mask", COLO_U8, logits->shape[0], ""));
    return colo_loss_check_memory(mask, logits, "mask");
}

/* A kernel cuts a row at the 16-byte words of memory. With segments the cuts may not depend on
 * where the row is. */
colo_status_t colo_loss_check_words(const colo_logprob_config_t *config,
                                    const colo_tensor_t *logits)
{
    enum { WORD = 16 };
    const int64_t elem = (int64_t)colo_dtype_size(logits->dtype);
    if (config->segment == 0 || logits->mem != COLO_MEM_CUDA || colo_tensor_count(logits) == 0 ||
        ((uintptr_t)logits->data % WORD == 0 &&
         (logits->shape[0] == 1 || logits->stride[0] * elem % WORD == 0)))
        return COLO_OK;
    return colo_fail(COLO_ERR_SHAPE,
                     "logits: the first row is %d bytes past a multiple of %d and rows are %" PRId64
                     " bytes apart, expected multiples of %d with segments; pad the rows",
                     (int)((uintptr_t)logits->data % WORD), WORD, logits->stride[0] * elem, WORD);
}

colo_status_t colo_loss_check_buffers(const char *what, bool saved, const void *saved_memory,
                                      int64_t bytes, const void *workspace)
{
    (void)colo_mem_round_ok(bytes, &bytes);
    COLO_FAIL_IF(!saved && saved_memory, COLO_ERR_ARG, "%s: saved memory is given, saved is NULL",
                 what);
    COLO_FAIL_IF(saved && !saved_memory && bytes > 0, COLO_ERR_ARG,
                 "%s: saved is given, saved memory is NULL; it needs %" PRId64 " bytes", what,
                 bytes);
    COLO_FAIL_IF(!workspace, COLO_ERR_ARG,
                 "%s: workspace is NULL; colo_%s_workspace_size() tells how many bytes it needs",
                 what, what);
    COLO_TRY(colo_mem_check_aligned(saved_memory, what, "saved memory"));
    return colo_mem_check_aligned(workspace, what, "workspace");
}

colo_status_t colo_loss_ready(colo_comm_t *group, const char *what, colo_status_t mine)
{
    if (colo_comm_size(group) == 1)
        return mine; /* no rank waits */
    if (colo_comm_check_level(group) >= 2)
        return colo_comm_agree(group, what, 0, mine);
    return mine < 0 ? colo_comm_fail(group, mine) : COLO_OK;
}

colo_status_t colo_loss_fail_on(colo_comm_t *group, colo_status_t st)
{
    return st < 0 && colo_comm_size(group) > 1 ? colo_comm_fail(group, st) : st;
}

/* ---- after the gather ---- */

#define ALONE "pass tp_group=None (in C a group of one rank), or each rank's columns"

static const colo_logprob_header_t *header_of(const struct colo_logprob_args *args, int32_t rank)
{
    return (const colo_logprob_header_t *)(args->blocks + rank * args->block.bytes);
}

/* The shards tile [0, V): their sizes add up to V, and every column up to V is on some rank. */
static colo_status_t check_tiling(const struct colo_logprob_args *args)
{
    const int64_t vocab = args->config.logits.vocab;
    int64_t offset = 0, total = 0;
    while (offset < vocab) {
        int64_t end = offset;
        for (int32_t rank = 0; rank < args->ranks && end == offset; rank++) {
            const colo_logprob_header_t *header = header_of(args, rank);
            if (header->start <= offset && offset - header->start < header->columns)
                end = header->start + header->columns;
        }
        COLO_FAIL_IF(end == offset, COLO_ERR_MISMATCH,
                     "logprob: no rank of %d holds column %" PRId64
                     " of the vocabulary of %" PRId64,
                     (int)(args->ranks / args->segments), offset, vocab);
        offset = end;
    }
    bool has_all_columns = header_of(args, 0)->columns == vocab;
    for (int32_t rank = 0; rank < args->ranks; rank++) {
        total += header_of(args, rank)->columns;
        has_all_columns = has_all_columns && header_of(args, rank)->columns == vocab;
    }
    COLO_FAIL_IF(has_all_columns && total != vocab, COLO_ERR_MISMATCH,
                 "logprob: each of %d ranks holds all %" PRId64 " columns; " ALONE,
                 (int)(args->ranks / args->segments), vocab);
    COLO_FAIL_IF(total != vocab, COLO_ERR_MISMATCH,
                 "logprob: the shards of %d ranks hold %" PRId64
                 " columns, the vocabulary has %" PRId64 ": some are on two ranks",
                 (int)(args->ranks / args->segments), total, vocab);
    return COLO_OK;
}

void colo_logprob_describe(const struct colo_logprob_args *args, colo_fields_t *fields)
{
    const colo_logprob_config_t *config = &args->config;
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"temperature", config->logits.temperature},
                   {"scale", config->logits.scale},
                   {"softcap", config->logits.softcap},
                   {"label_smoothing", config->label_smoothing},
                   {"z_loss", config->z_loss}};
    const struct {
        const char *name;
        int64_t value;
    } counts[] = {{"vocab", config->logits.vocab},
                  {"ignore_index", config->ignore_index},
                  {"order of rows", config->order},
                  {"want_entropy", config->want_entropy},
                  {"want_loss", config->want_loss},
                  {"want_correct", config->want_correct},
                  {"lenient_targets", config->lenient_targets},
                  {"local_smoothing", config->local_smoothing},
                  {"megatron_smoothing", config->megatron_smoothing},
                  {"has_class_weight", config->has_class_weight},
                  {"want_argmax", config->want_argmax},
                  {"want_lse", config->want_lse},
                  {"want_sum_p2", config->want_sum_p2},
                  {"want_mean_logits", config->want_mean_logits},
                  {"has_temperature", config->has_temperature}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        colo_fields_add(fields, numbers[i].name, "%.9g", numbers[i].value);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        colo_fields_add(fields, counts[i].name, "%" PRId64, counts[i].value);
    colo_fields_add(fields, "dtype", "%s", colo_dtype_name(args->dtype));
}

struct colo_loss_comparison colo_loss_make_comparison(const char *name,
                                                      colo_loss_describe_t *describe,
                                                      const struct colo_logprob_args *args)
{
    return (struct colo_loss_comparison){
        .name = name,
        .describe = describe,
        .of = args,
        .m = args->block.m,
        .s = args->block.s,
        .dtype = args->stat_dtype,
        .targets = args->targets,
        .target_stride = args->target_stride,
    };
}

colo_status_t colo_logprob_check_headers(const struct colo_logprob_args *args, bool *config)
{
    *config = false;
    const colo_logprob_header_t *first = header_of(args, 0);
    for (int32_t rank = 0; rank < args->ranks; rank++) {
        const colo_logprob_header_t *header = header_of(args, rank);
        COLO_FAIL_IF(header->magic != COLO_LOGPROB_MAGIC, COLO_ERR_MISMATCH,
                     "logprob: rank %d brings no statistics", (int)(rank / args->segments));
        COLO_FAIL_IF(header->tokens != first->tokens, COLO_ERR_MISMATCH,
                     "logprob: rank %d has %" PRId64 " tokens, rank 0 has %" PRId64,
                     (int)(rank / args->segments), header->tokens, first->tokens);
        *config = header->config != first->config;
        COLO_FAIL_IF(*config, COLO_ERR_MISMATCH,
                     "logprob: rank %d has another config, dtype or order of rows than rank 0",
                     (int)(rank / args->segments));
        const int64_t sums = header->sums ^ first->sums;
        COLO_FAIL_IF(sums & COLO_SUMS_HIDDEN, COLO_ERR_MISMATCH,
                     "logprob: rank %d %s gradients of hidden in backward, rank 0 %s; the hidden "
                     "states require grad on all ranks of the vocabulary or on none",
                     (int)(rank / args->segments),
                     header->sums & COLO_SUMS_HIDDEN ? "adds up" : "adds up no",
                     first->sums & COLO_SUMS_HIDDEN ? "does" : "does not");
        COLO_FAIL_IF(sums / COLO_SUMS_RANK, COLO_ERR_MISMATCH,
                     "logprob: rank %d has a LoRA of rank %" PRId64 ", rank 0 one of rank %" PRId64,
                     (int)(rank / args->segments), header->sums / COLO_SUMS_RANK,
                     first->sums / COLO_SUMS_RANK);
        COLO_FAIL_IF(sums, COLO_ERR_MISMATCH,
                     "logprob: rank %d %s gradients of a LoRA in backward, rank 0 %s; its factors "
                     "require grad on all ranks of the vocabulary or on none",
                     (int)(rank / args->segments),
                     header->sums & COLO_SUMS_LORA ? "adds up" : "adds up no",
                     first->sums & COLO_SUMS_LORA ? "does" : "does not");
        COLO_FAIL_IF(header->targets != first->targets, COLO_ERR_MISMATCH,
                     "logprob: rank %d has other targets%s than rank 0",
                     (int)(rank / args->segments),
                     args->temperature ? " or temperatures of tokens" : "");
    }
    return check_tiling(args);
}

/* Are the statistics of token @k those of the first rank on every rank, bit for bit? */
static bool is_same(const struct colo_logprob_args *args, int64_t offset, int64_t k, size_t elem)
{
    for (int32_t block = args->segments; block < args->ranks && offset >= 0; block++) {
        const int64_t at = offset + k * (int64_t)elem;
        if (memcmp(colo_logprob_block_of(args, block) + at,
                   colo_logprob_block_of(args, block % args->segments) + at, elem) != 0)
            return false;
    }
    return true;
}

/* Does the first rank's row @k show that its logits are not all alike? A sum of e^(x - m) that is
 * an integer is one of zeros and ones; m is rounded, so it may be off by that. Without sums two
 * maxima have to differ. */
static bool is_varied(const struct colo_logprob_args *args,
                      const struct colo_loss_comparison *comparison, int64_t k)
{
    for (int32_t i = 0; i < args->segments; i++) {
        const unsigned char *block = colo_logprob_block_of(args, i),
                            *maxima = block + comparison->m;
        const double m = colo_scalar_get(comparison->dtype, maxima, k);
        if (!isfinite(m))
            continue;
        if (comparison->s >= 0) {
            const double s = colo_scalar_get(comparison->dtype, block + comparison->s, k);
            const double unit = comparison->dtype == COLO_F64 ? 0x1p-52 : 0x1p-23;
            if (fabs(s - round(s)) > unit * (1 + fabs(m)) * s)
                return true;
        } else if (k > 0 && m != colo_scalar_get(comparison->dtype, maxima, k - 1)) {
            return true;
        }
    }
    return false;
}

/* Shards that were made with one seed are legal: of those some rank but the first has a target. */
static bool is_behind(const struct colo_logprob_args *args,
                      const struct colo_loss_comparison *comparison)
{
    int64_t first = 0;
    for (int32_t i = 0; i < args->segments; i++)
        first += header_of(args, i)->columns;
    for (int64_t row = 0; row < args->tokens && comparison->targets; row++) {
        const int64_t target = comparison->targets[row * comparison->target_stride];
        if (target >= first && target < args->config.logits.vocab &&
            target != args->config.ignore_index)
            return true;
    }
    return false;
}

colo_status_t colo_loss_check_shards(const struct colo_logprob_args *args,
                                     const struct colo_loss_comparison *comparison, bool *told)
{
    /* the maxima alone are seldom alike by chance in so many rows */
    enum { ROWS = 8 };
    const size_t elem = colo_dtype_size(comparison->dtype);
    const int64_t rows = args->hi - args->block_lo;
    int64_t varied = 0;
    *told = true;
    for (int32_t block = args->segments; block < args->ranks; block++)
        if (header_of(args, block)->columns != header_of(args, block % args->segments)->columns)
            return COLO_OK;
    for (int64_t k = 0; k < rows; k++) { /* mostly over at the first row that counts */
        if (!is_same(args, comparison->m, k, elem) || !is_same(args, comparison->s, k, elem))
            return COLO_OK;
        varied += is_varied(args, comparison, k);
    }
    *told = varied > 0 && (comparison->s >= 0 || varied >= ROWS);
    COLO_FAIL_IF(*told && !is_behind(args, comparison), COLO_ERR_MISMATCH,
                 "%s: these are the same logits on %d ranks; " ALONE
                 "; of shards that were made with "
                 "one seed, set COLO_CHECK=0",
                 comparison->name, (int)(args->ranks / args->segments));
    return COLO_OK;
}

/* ---- before backward ---- */

colo_status_t colo_loss_check_version(const colo_tensor_t *tensor, uint64_t saved_at,
                                      const char *what)
{
    COLO_FAIL_IF(tensor->version && *tensor->version != saved_at, COLO_ERR_MODIFIED,
                 "%s were written after they were saved: version %" PRIu64 ", saved at %" PRIu64,
                 what, *tensor->version, saved_at);
    return COLO_OK;
}

/* First byte and one past the last that a matrix touches. */
static void extent_of(const colo_tensor_t *matrix, uintptr_t *lo, uintptr_t *hi)
{
    int64_t elems = (matrix->shape[0] - 1) * matrix->stride[0] + matrix->shape[1];
    *lo = (uintptr_t)matrix->data;
    *hi = *lo + (uintptr_t)elems * colo_dtype_size(matrix->dtype);
}

bool colo_loss_ranges_overlap(const colo_tensor_t *a, const colo_tensor_t *b)
{
    uintptr_t alo, ahi, blo, bhi;
    if (colo_tensor_count(a) == 0 || colo_tensor_count(b) == 0)
        return false;
    extent_of(a, &alo, &ahi);
    extent_of(b, &blo, &bhi);
    return alo < bhi && blo < ahi;
}

/* Do two matrices of one shape and dtype share a byte? Rows at the same stride may interleave (two
 * halves of one wide buffer); with other strides touching ranges count as shared. */
static bool overlap(const colo_tensor_t *a, const colo_tensor_t *b)
{
    if (!colo_loss_ranges_overlap(a, b))
        return false;
    const uintptr_t alo = (uintptr_t)a->data, blo = (uintptr_t)b->data;
    uint64_t elem = colo_dtype_size(a->dtype), width = (uint64_t)a->shape[1] * elem,
             step = (uint64_t)a->stride[0] * elem;
    if (a->shape[0] == 1 || a->stride[0] != b->stride[0] || step < 2 * width)
        return true;
    uint64_t apart = (uint64_t)(alo > blo ? alo - blo : blo - alo) % step;
    return apart < width || apart > step - width;
}

colo_status_t colo_loss_check_gradient(const colo_tensor_t *d, const char *what,
                                       const colo_tensor_t *logits, bool *in_place)
{
    COLO_TRY(colo_loss_check_matrix(d, what, true));
    COLO_FAIL_IF(d->dtype != logits->dtype, COLO_ERR_ARG, "%s: dtype %s, the logits are %s", what,
                 colo_dtype_name(d->dtype), colo_dtype_name(logits->dtype));
    COLO_FAIL_IF(d->shape[0] != logits->shape[0] || d->shape[1] != logits->shape[1], COLO_ERR_SHAPE,
                 "%s: [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64 "]", what,
                 d->shape[0], d->shape[1], logits->shape[0], logits->shape[1]);
    COLO_TRY(colo_loss_check_memory(d, logits, what));
    *in_place = d->data == logits->data && colo_tensor_count(logits) > 0 &&
                (logits->shape[0] == 1 || d->stride[0] == logits->stride[0]);
    COLO_FAIL_IF(!*in_place && overlap(d, logits), COLO_ERR_ARG,
                 "%s: overlaps the logits without being them (%+" PRId64
                 " bytes, row strides %" PRId64 " and %" PRId64
                 "); in place needs the same data and strides",
                 what, (int64_t)((intptr_t)d->data - (intptr_t)logits->data), d->stride[0],
                 logits->stride[0]);
    return COLO_OK;
}
