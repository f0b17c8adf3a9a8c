/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.c - a call of the logits path or of one of its relatives: sizes, checks, the passes in
 * order, the one gather.
 *
 * Forward: every argument is checked before anything is written; then the local kernels over the
 * tokens, chunk by chunk, fill this rank's block; one all-gather brings all blocks to all ranks;
 * the merge kernels, the same on every rank, write outputs and saved statistics. On a group of one
 * there is nothing to gather, and both alternate over a block of one chunk: that is where
 * chunk_size bounds the workspace. With more ranks the workspace is one block of T tokens a rank,
 * because there is one gather for all tokens, however they are chunked.
 *
 * The block's header costs nothing on the transport and tells ranks apart that were configured
 * differently: other targets, another temperature, shards that leave a hole in the vocabulary; and
 * equal statistics tell of logits that every rank brings as a whole. All ranks see the same blocks,
 * so all return the same COLO_ERR_MISMATCH, the group lives on, and nothing has been written. (Only
 * host memory can be looked at without waiting for a stream: on a device the first call for a
 * vocabulary waits, and every call at COLO_CHECK=2.) Ranks whose blocks differ in size (other token
 * counts, other want_ members) do not get as far: the gather itself refuses, and below COLO_CHECK=2
 * the group is dead.
 *
 * A rank that finds its own arguments wrong does not join the gather: it marks the group failed
 * (COLO_CHECK=2: agrees with the others, and the group lives on), so that they return COLO_ERR_PEER
 * at once instead of at the deadline.
 */
#include "loss/call.h"

#include "comm/comm.h"
#include "core/device.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tokens, where the caller lets us choose: some 200 to 500 KiB of block, and on a GPU kernels that
 * are long enough to fill it. */
enum { CHUNK = 16384 };

/* ---- the config ---- */

static colo_status_t read_sized(const struct colo_loss_sized *sized, const void *given, void *own)
{
    if (sized->size == 0)
        return COLO_OK;
    memcpy(own, sized->defaults, sized->size);
    return colo_sized_read(own, sized->size, given, sized->least, sized->what, sized->init);
}

static colo_status_t read_config(const struct colo_loss_kind *kind, const void *given,
                                 union colo_loss_config *own)
{
    return read_sized(&kind->config, given, own);
}

/* Has the batch temperatures of tokens, those of the config's @i-th has_ member? */
static bool heat_of(const struct colo_loss_kind *kind, const union colo_loss_config *own, int32_t i)
{
    bool has;
    memcpy(&has, (const char *)own + kind->heat + (size_t)i * sizeof has, sizeof has);
    return has;
}

/* The same as the logits path has it. */
static colo_logprob_config_t base_of(const struct colo_loss_kind *kind,
                                     const union colo_loss_config *own)
{
    colo_logprob_config_t base = {.struct_size = sizeof base,
                                  .logits = own->logprob.logits,
                                  .ignore_index = kind->ignore_index};
    if (kind->order)
        memcpy(&base.order, (const char *)own + kind->order, sizeof base.order);
    base.has_temperature = kind->heats > 0 && heat_of(kind, own, 0);
    return kind->is_base ? own->logprob : base;
}

static colo_status_t check_values(const struct colo_loss_kind *kind,
                                  const union colo_loss_config *own)
{
    const colo_logprob_config_t base = base_of(kind, own);
    const colo_status_t st = colo_logprob_config_check(&base);
    if (st < 0)
        return kind->is_base ? st : colo_fail_prefix(st, "%s", kind->name);
    return kind->check_config ? kind->check_config(own) : COLO_OK;
}

colo_status_t colo_loss_check_config(const struct colo_loss_kind *kind, const void *given)
{
    union colo_loss_config own;
    COLO_TRY(read_config(kind, given, &own));
    return check_values(kind, &own);
}

/* ---- sizes ---- */

static int64_t chunk_of(const struct colo_loss_kind *kind, const colo_logprob_config_t *base,
                        int64_t tokens)
{
    const int64_t chunk = base->chunk_size ? base->chunk_size : CHUNK;
    return kind->chunked && chunk < tokens ? chunk : tokens;
}

static bool lay_out(const struct colo_loss_kind *kind, struct colo_logprob_args *args,
                    int64_t tokens)
{
    const uint32_t wanted = kind->wanted ? kind->wanted(args) : UINT32_MAX;
    return colo_loss_lay_out(args, kind->arrays, kind->narrays, wanted, tokens);
}

/* Per token */
static int64_t saved_bytes(const struct colo_loss_kind *kind, const union colo_loss_config *own)
{
    int64_t k = 0, heats = 0;
    if (kind->k)
        memcpy(&k, (const char *)own + kind->k, sizeof k);
    for (int32_t i = 0; i < kind->heats; i++)
        heats += heat_of(kind, own, i);
    return (kind->is_base ? colo_logprob_saved_numbers(&own->logprob) * (int64_t)sizeof(double)
                          : kind->saved + heats * (int64_t)sizeof(double)) +
           kind->saved_by_k * k;
}

/* *bytes: @each per token */
static colo_status_t size_of(const char *name, int64_t tokens, int64_t each, size_t *bytes)
{
    int64_t n;
    COLO_FAIL_IF(tokens < 0, COLO_ERR_ARG, "%s: tokens is %" PRId64 ", expected >= 0", name,
                 tokens);
    COLO_FAIL_IF(!bytes, COLO_ERR_ARG, "%s: bytes is NULL", name);
    COLO_FAIL_IF(!colo_mul_ok(tokens, each, &n) || !colo_mem_round_ok(n, &n), COLO_ERR_ARG,
                 "%s: saved statistics of %" PRId64 " tokens exceed 2^63 bytes", name, tokens);
    *bytes = (size_t)n;
    return COLO_OK;
}

colo_status_t colo_loss_saved_size(const struct colo_loss_kind *kind, const void *given,
                                   int64_t tokens, size_t *bytes)
{
    union colo_loss_config own;
    COLO_TRY(read_config(kind, given, &own));
    COLO_TRY(check_values(kind, &own));
    return size_of(kind->name, tokens, saved_bytes(kind, &own), bytes);
}

colo_status_t colo_loss_check_dtype(const char *name, colo_dtype_t logits)
{
    return colo_dtype_is_float(logits)
               ? COLO_OK
               : colo_fail(COLO_ERR_ARG, "%s: logits of dtype %s, expected f32, f64, bf16 or f16",
                           name, colo_dtype_name(logits));
}

colo_status_t colo_loss_workspace_size(const struct colo_loss_kind *kind, const void *given,
                                       colo_dtype_t dtype, int64_t tokens, int32_t ranks,
                                       size_t *bytes)
{
    struct colo_loss_call call = {.kind = kind};
    size_t behind = 0;
    int64_t each = 0, sums, n = 0;
    COLO_TRY(read_config(kind, given, &call.config));
    COLO_TRY(check_values(kind, &call.config));
    if (kind->is_base)
        COLO_TRY(colo_loss_check_dtype(kind->name, dtype));
    COLO_TRY(size_of(kind->name, tokens, kind->is_base ? 0 : saved_bytes(kind, &call.config),
                     bytes ? &behind : NULL));
    COLO_TRY(colo_loss_check_dtype(kind->name, dtype));
    COLO_FAIL_IF(ranks < 1, COLO_ERR_ARG, "%s: ranks is %d, expected >= 1", kind->name, (int)ranks);
    union colo_loss_args all;
    struct colo_logprob_args *args = &all.base;
    const colo_tensor_t like = {.dtype = dtype, .ndim = 2};
    call.base = base_of(kind, &call.config);
    *args = colo_logprob_make_args(&call.base, &like, NULL);
    if (kind->fill)
        kind->fill(&call, args);
    const bool ok =
        lay_out(kind, args, ranks == 1 ? chunk_of(kind, &call.base, tokens) : tokens) &&
        colo_mul_ok(tokens, kind->per_rank, &sums) &&
        colo_mul_ok(args->block.bytes, colo_logprob_segments(&call.base, ranks), &each) &&
        colo_add_ok(each, sums, &each);
    COLO_FAIL_IF(!ok || !colo_mul_ok(each, ranks, &n) ||
                     !colo_add_ok(n, kind->behind ? (int64_t)behind : 0, &n) ||
                     !colo_mem_round_ok(n, &n),
                 COLO_ERR_ARG, "%s: workspace of %" PRId64 " tokens on %d ranks exceeds 2^63 bytes",
                 kind->name, tokens, (int)ranks);
    *bytes = (size_t)n;
    return COLO_OK;
}

/* ---- forward ---- */

colo_status_t colo_loss_check_call_memory(const struct colo_loss_call *call)
{
    return colo_loss_check_buffers(call->kind->name, call->given_saved != NULL, call->saved_memory,
                                   call->logits->shape[0] * saved_bytes(call->kind, &call->config),
                                   call->workspace);
}

static colo_status_t make_args(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    const struct colo_loss_kind *kind = call->kind;
    const int64_t tokens = call->logits->shape[0];
    *args = colo_logprob_make_args(&call->base, call->logits, call->targets);
    colo_logprob_set_ranks(args, call->group);
    args->hi = tokens;
    if (kind->fill)
        kind->fill(call, args);
    COLO_FAIL_IF(!lay_out(kind, args,
                          colo_logprob_alone(args) ? chunk_of(kind, &call->base, tokens) : tokens),
                 COLO_ERR_ARG, "%s: workspace of %" PRId64 " tokens exceeds 2^63 bytes", kind->name,
                 tokens);
    args->blocks = call->workspace;
    return COLO_OK;
}

static colo_status_t check(struct colo_loss_call *call, struct colo_logprob_args *args)
{
    const struct colo_loss_kind *kind = call->kind;
    COLO_TRY(read_config(kind, call->given, &call->config));
    COLO_TRY(check_values(kind, &call->config));
    call->base = base_of(kind, &call->config);
    COLO_TRY(read_sized(&kind->batch, call->given_batch, &call->batch));
    COLO_TRY(read_sized(&kind->out, call->given_out, &call->out));
    if (call->given_saved)
        COLO_TRY(colo_loss_check_saved(kind, call->given_saved));
    call->logits = call->batch.base.logits;
    call->targets = kind->is_base ? call->batch.logprob.targets : NULL;
    COLO_TRY(colo_loss_check_matrix(call->logits, "logits", false));
    COLO_TRY(colo_loss_check_shard(&call->base, call->logits, call->group));
    COLO_TRY(kind->check(call));
    COLO_TRY(make_args(call, args));
    COLO_TRY(colo_loss_kernels_for(call->logits->mem, &call->kernels));
    return colo_loss_check_place(call->logits, call->group, kind->name);
}

colo_status_t colo_loss_open(struct colo_loss_call *call, struct colo_logprob_args *args)
{
    char text[32];
    COLO_FAIL_IF(!call->group, COLO_ERR_ARG,
                 "%s: group is NULL; colo_comm_create_self() makes one of one rank",
                 call->kind->name);
    const colo_status_t st = check(call, args);
    snprintf(text, sizeof text, "%s forward", call->kind->name);
    return colo_loss_ready(call->group, text, st);
}

/* Whose configs differ is known; all ranks tell which member. Collective. */
static colo_status_t name_member(colo_comm_t *group, const struct colo_loss_comparison *comparison)
{
    char what[160];
    colo_fields_t fields = {COLO_FIELDS_INIT};
    snprintf(what, sizeof what, "%s", colo_last_error());
    comparison->describe(comparison->of, &fields);
    const colo_status_t st = colo_comm_agree_fields(group, what, &fields, COLO_OK);
    return st < 0 ? st : colo_fail(COLO_ERR_MISMATCH, "%s", what); /* by less than is shown */
}

/* @all: every rank compares this call, so they can ask each other which member differs */
static colo_status_t compare(colo_comm_t *group, const struct colo_logprob_args *args,
                             const struct colo_loss_comparison *comparison, int32_t level, bool all,
                             bool *told)
{
    bool config;
    *told = true;
    const colo_status_t st = colo_logprob_check_headers(args, &config);
    if (config && all)
        return name_member(group, comparison);
    COLO_TRY(st);
    return level >= 1 ? colo_loss_check_shards(args, comparison, told) : COLO_OK;
}

/* Calls of this name for a vocabulary, which are compared once */
static uint64_t key_of(const struct colo_logprob_args *args,
                       const struct colo_loss_comparison *comparison)
{
    return colo_hash_bytes(colo_hash_i64(COLO_HASH_INIT, args->config.logits.vocab),
                           comparison->name, strlen(comparison->name)) |
           1;
}

bool colo_loss_all_compare(const colo_comm_t *group, colo_mem_t mem)
{
    return mem == COLO_MEM_HOST || colo_comm_check_level(group) >= 2 || group->once[0] == 0;
}

/* On a device, for which the host waits: the blocks and targets as the host's kernels have them. */
static colo_status_t look(colo_comm_t *group, const struct colo_logprob_args *args,
                          const struct colo_loss_comparison *comparison, colo_mem_t mem,
                          colo_stream_t stream)
{
    const int32_t level = colo_comm_check_level(group);
    const size_t blocks = (size_t)args->ranks * (size_t)args->block.bytes,
                 targets = comparison->targets && args->tokens > 0
                               ? (size_t)((args->tokens - 1) * comparison->target_stride + 1) * 8
                               : 0;
    struct colo_logprob_args seen = *args;
    struct colo_loss_comparison all = *comparison;
    colo_queries_t queries = {0};
    const colo_device_t *device;
    bool capturing, told = false;
    const uint64_t key = key_of(args, comparison);
    uint64_t *first = colo_comm_once(group, key);
    if (level < 1 || (level == 1 && !first))
        return COLO_OK;
    COLO_TRY(colo_device_for(mem, &device));
    COLO_TRY(device->stream_check(&queries, stream, &capturing));
    if (capturing)
        return COLO_OK;
    COLO_AUTOFREE unsigned char *copy = malloc(blocks + targets);
    COLO_FAIL_IF(!copy, COLO_ERR_NOMEM, "%s: %zu bytes of host memory", comparison->name,
                 blocks + targets);
    seen.blocks = copy;
    all.targets = targets ? (const int64_t *)(const void *)(copy + blocks) : NULL;
    COLO_TRY(device->read(copy, args->blocks, blocks, stream));
    if (targets)
        COLO_TRY(device->read(copy + blocks, comparison->targets, targets, stream));
    const colo_status_t st =
        compare(group, &seen, &all, level, colo_loss_all_compare(group, mem), &told);
    if (first && told && st == COLO_OK)
        *first = key;
    return st;
}

colo_status_t colo_loss_gather(colo_comm_t *group, const struct colo_logprob_args *args,
                               const struct colo_loss_comparison *comparison, colo_mem_t mem,
                               colo_stream_t stream)
{
    bool told;
    COLO_TRY(colo_comm_all_gather_for(group, COLO_CATEGORY_LOSS,
                                      colo_logprob_block_of(args, args->rank), args->blocks,
                                      args->segments * args->block.bytes, COLO_U8, stream));
    if (!comparison)
        return COLO_OK;
    return mem == COLO_MEM_HOST
               ? compare(group, args, comparison, colo_comm_check_level(group), true, &told)
               : look(group, args, comparison, mem, stream);
}

/* Runs kernels over all tokens; at least once, so that T = 0 still has a header and counts of 0. */
static colo_status_t over_chunks(const struct colo_loss_call *call, struct colo_logprob_args *args,
                                 bool local, bool merge)
{
    const int64_t chunk = chunk_of(call->kind, &call->base, args->tokens);
    args->lo = 0;
    do {
        args->hi = args->tokens - args->lo < chunk ? args->tokens : args->lo + chunk;
        args->block_lo = local && merge ? args->lo : 0;
        if (local)
            COLO_TRY(call->kind->local(call, args));
        if (merge)
            COLO_TRY(call->kind->merge(call, args));
        args->lo = args->hi;
    } while (args->lo < args->tokens);
    return COLO_OK;
}

colo_status_t colo_loss_run(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    const struct colo_loss_kind *kind = call->kind;
    const bool alone = colo_logprob_alone(args),
               compares = !alone && call->logits->mem == COLO_MEM_HOST;
    colo_logprob_set_header(args, kind->hash_config(args),
                            compares && kind->hash_inputs ? kind->hash_inputs(args) : 0);
    if (alone)
        return over_chunks(call, args, true, true);
    COLO_TRY(colo_loss_fail_on(call->group, over_chunks(call, args, true, false)));
    struct colo_loss_comparison comparison =
        colo_loss_make_comparison(kind->name, kind->describe, args);
    if (kind->compare)
        kind->compare(args, &comparison);
    COLO_TRY(colo_loss_gather(call->group, args, &comparison, call->logits->mem, call->stream));
    return over_chunks(call, args, false, true);
}

/* ---- backward ---- */

colo_status_t colo_loss_check_saved(const struct colo_loss_kind *kind, const void *saved)
{
    const struct colo_loss_sized *s = &kind->state;
    return colo_sized_check_given(saved, s->size, s->least, s->what, s->init);
}

colo_status_t colo_loss_save(const struct colo_loss_call *call, const void *own)
{
    const struct colo_loss_sized *s = &call->kind->state;
    return call->given_saved ? colo_sized_write(call->given_saved, own, s->size, s->what, s->init)
                             : COLO_OK;
}

colo_status_t colo_loss_reopen(struct colo_loss_call *call, const void *upstream,
                               const colo_tensor_t *d_logits, struct colo_logprob_args *args)
{
    const char *name = call->kind->name;
    COLO_FAIL_IF(!call->valid, COLO_ERR_STATE,
                 "%s: the saved state is not valid: no forward filled it, or a backward in "
                 "place ended it",
                 name);
    COLO_TRY(read_config(call->kind, call->given, &call->config));
    call->base = base_of(call->kind, &call->config);
    COLO_TRY(read_sized(&call->kind->upstream, upstream, &call->upstream));
    COLO_TRY(colo_loss_check_gradient(d_logits, "d_logits", call->logits, &call->in_place));
    COLO_TRY(colo_loss_check_version(call->logits, call->version, "logits"));
    COLO_TRY(colo_loss_kernels_for(call->logits->mem, &call->kernels));
    *args = colo_logprob_make_args(&call->base, call->logits, call->targets);
    args->hi = args->tokens; /* no workspace, so nothing for chunk_size to bound */
    if (call->kind->fill)
        call->kind->fill(call, args);
    args->d_logits = d_logits->data;
    args->d_row_stride = d_logits->stride[0];
    return COLO_OK;
}
