/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.c - the logits path: what is checked, in which order passes run, and the one gather.
 *
 * Forward: every argument is checked before anything is written; then the stats pass over the
 * tokens, chunk by chunk, fills this rank's block; one all-gather brings all blocks to all ranks;
 * the merge pass, the same on every rank, writes outputs and saved statistics. On a group of one
 * there is nothing to gather, and stats and merge alternate over a block of one chunk: that is
 * where chunk_size bounds the scratch. With more ranks the scratch is one block of T tokens a rank,
 * because there is one gather for all tokens, however they are chunked.
 *
 * The block's header costs nothing on the wire and tells ranks apart that were configured
 * differently: other targets, another temperature, shards that leave a hole in the vocabulary.
 * All ranks see the same headers, so all return the same COLO_ERR_MISMATCH, the group lives on, and
 * nothing has been written. (Only host memory can be looked at without waiting for a stream.)
 *
 * A rank that finds its own arguments wrong does not join the gather: it marks the group failed, so
 * that the others return COLO_ERR_PEER at once instead of at the deadline.
 *
 * Backward: no collective. The logits are read again from where they were; version counters tell
 * whether they still are what forward saw. In place is legal element by element (an element is read
 * before it is written), and ends the saved state, for the logits are gone.
 *
 * The formulas are in the passes (passes.h, passes-host.c), the layout of a block in passes.h.
 */
#include "loss/passes.h"

#include "comm/comm.h"
#include "core/hash.h"
#include "core/ops.h"
#include "core/try.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { CHUNK = 1024 }; /* tokens, where the caller lets us choose: a block of some 30 KiB */

static double smoothing_of(const colo_logprob_config_t *c)
{
    if (!c->want_loss)
        return 0;
    double v = (double)c->vocab;
    return c->megatron_smoothing && c->vocab > 1 ? c->label_smoothing * v / (v - 1)
                                                 : c->label_smoothing;
}

colo_status_t colo_logprob_config_check(const colo_logprob_config_t *c)
{
    if (!c)
        return colo_fail(COLO_ERR_ARG, "logprob: config is NULL");
    if (c->struct_size != sizeof *c)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: config.struct_size is %zu, expected %zu; start from "
                         "COLO_LOGPROB_CONFIG_INIT",
                         c->struct_size, sizeof *c);
    if (c->vocab <= 0)
        return colo_fail(COLO_ERR_ARG, "logprob: vocab is %" PRId64 ", expected > 0", c->vocab);
    if (c->vocab_start < 0)
        return colo_fail(COLO_ERR_ARG, "logprob: vocab_start is %" PRId64 ", expected >= 0",
                         c->vocab_start);
    if (!(c->temperature > 0) || isinf(c->temperature))
        return colo_fail(COLO_ERR_ARG, "logprob: temperature is %g, expected finite and > 0",
                         c->temperature);
    if (!isfinite(c->scale))
        return colo_fail(COLO_ERR_ARG, "logprob: scale is %g, expected finite", c->scale);
    if (!isfinite(c->scale / c->temperature))
        return colo_fail(COLO_ERR_ARG, "logprob: scale / temperature = %g / %g is not finite",
                         c->scale, c->temperature);
    if (!(c->softcap >= 0) || isinf(c->softcap))
        return colo_fail(COLO_ERR_ARG, "logprob: softcap is %g, expected finite and >= 0 (0 = off)",
                         c->softcap);
    if (!(c->label_smoothing >= 0 && c->label_smoothing < 1))
        return colo_fail(COLO_ERR_ARG, "logprob: label_smoothing is %g, expected in [0, 1)",
                         c->label_smoothing);
    if (c->megatron_smoothing && c->label_smoothing > 0 && c->vocab == 1)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: megatron_smoothing divides by vocab - 1, and vocab is 1");
    if (!(c->z_loss >= 0) || isinf(c->z_loss))
        return colo_fail(COLO_ERR_ARG, "logprob: z_loss is %g, expected finite and >= 0",
                         c->z_loss);
    if (c->chunk_size < 0)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: chunk_size is %" PRId64 ", expected >= 0 (0 = chosen)",
                         c->chunk_size);
    return COLO_OK;
}

/* ---- sizes ---- */

static int64_t chunk_of(const colo_logprob_config_t *c, int64_t tokens)
{
    int64_t chunk = c->chunk_size ? c->chunk_size : CHUNK;
    return chunk < tokens ? chunk : tokens;
}

/* Appends an array of @n elements to the block; false on overflow. */
static bool append(colo_logprob_block_t *b, int64_t n, int64_t elem, bool wanted, int64_t *offset)
{
    int64_t size;
    *offset = -1;
    if (!wanted)
        return true;
    *offset = b->bytes;
    if (!colo_mul_ok(n, elem, &size) || !colo_add_ok(size, 7, &size))
        return false;
    return colo_add_ok(b->bytes, size & ~INT64_C(7), &b->bytes);
}

static bool block_layout(const colo_logprob_config_t *c, colo_dtype_t dtype, int64_t n,
                         colo_logprob_block_t *b)
{
    int64_t elem = (int64_t)colo_dtype_size(colo_logprob_stat_dtype(dtype));
    b->bytes = (int64_t)sizeof(colo_logprob_header_t);
    return append(b, n, elem, true, &b->m) && append(b, n, elem, true, &b->s) &&
           append(b, n, elem, true, &b->xt) && append(b, n, elem, c->want_entropy, &b->u) &&
           append(b, n, elem, smoothing_of(c) > 0, &b->d) &&
           append(b, n, (int64_t)sizeof(int64_t), c->want_correct, &b->arg);
}

static colo_status_t size_args(const colo_logprob_config_t *config, colo_dtype_t dtype,
                               int64_t tokens, const size_t *bytes)
{
    COLO_TRY(colo_logprob_config_check(config));
    if (!colo_dtype_is_float(dtype))
        return colo_fail(COLO_ERR_ARG,
                         "logprob: logits of dtype %s, expected f32, f64, bf16 or f16",
                         colo_dtype_name(dtype));
    if (tokens < 0)
        return colo_fail(COLO_ERR_ARG, "logprob: tokens is %" PRId64 ", expected >= 0", tokens);
    if (!bytes)
        return colo_fail(COLO_ERR_ARG, "logprob: bytes is NULL");
    return COLO_OK;
}

colo_status_t colo_logprob_saved_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                      int64_t tokens, size_t *bytes)
{
    int64_t n;
    COLO_TRY(size_args(config, dtype, tokens, bytes));
    if (!colo_mul_ok(tokens, 3 * (int64_t)sizeof(double), &n))
        return colo_fail(COLO_ERR_ARG,
                         "logprob: saved statistics of %" PRId64 " tokens exceed 2^63 bytes",
                         tokens);
    *bytes = (size_t)n;
    return COLO_OK;
}

colo_status_t colo_logprob_scratch_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                        int64_t tokens, int32_t ranks, size_t *bytes)
{
    colo_logprob_block_t b;
    int64_t n = 0;
    COLO_TRY(size_args(config, dtype, tokens, bytes));
    if (ranks < 1)
        return colo_fail(COLO_ERR_ARG, "logprob: ranks is %d, expected >= 1", (int)ranks);
    if (!block_layout(config, dtype, ranks == 1 ? chunk_of(config, tokens) : tokens, &b) ||
        !colo_mul_ok(b.bytes, ranks, &n))
        return colo_fail(COLO_ERR_ARG,
                         "logprob: scratch of %" PRId64 " tokens on %d ranks exceeds 2^63 bytes",
                         tokens, (int)ranks);
    *bytes = (size_t)n;
    return COLO_OK;
}

/* ---- checks ---- */

static colo_status_t check_matrix(const colo_tensor_t *x, const char *what, bool written)
{
    COLO_TRY(colo_tensor_check(x, what));
    if (!colo_dtype_is_float(x->dtype))
        return colo_fail(COLO_ERR_ARG, "%s: dtype %s, expected f32, f64, bf16 or f16", what,
                         colo_dtype_name(x->dtype));
    if (x->ndim != 2)
        return colo_fail(COLO_ERR_SHAPE, "%s: %d axes, expected 2: [T, Vl]", what, (int)x->ndim);
    if (x->shape[1] > 1 && x->stride[1] != 1)
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: columns are %" PRId64 " elements apart, expected contiguous columns",
                         what, x->stride[1]);
    if (written && x->shape[0] > 1 && x->stride[0] < x->shape[1])
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: rows of %" PRId64 " columns are %" PRId64
                         " elements apart and overlap",
                         what, x->shape[1], x->stride[0]);
    return COLO_OK;
}

static colo_status_t check_aligned(const void *p, const char *what)
{
    if ((uintptr_t)p % 8 != 0)
        return colo_fail(COLO_ERR_ARG, "%s: its address is %d past a multiple of 8, expected 0",
                         what, (int)((uintptr_t)p % 8));
    return COLO_OK;
}

static colo_status_t check_forward(const colo_logprob_config_t *config, const colo_tensor_t *logits,
                                   const colo_tensor_t *targets, const colo_comm_t *group,
                                   const colo_logprob_out_t *out, const colo_logprob_saved_t *saved,
                                   const void *stats, const void *scratch)
{
    COLO_TRY(colo_logprob_config_check(config));
    COLO_TRY(check_matrix(logits, "logits", false));
    COLO_TRY(colo_tensor_check(targets, "targets"));
    if (targets->dtype != COLO_I64)
        return colo_fail(COLO_ERR_ARG, "targets: dtype %s, expected i64",
                         colo_dtype_name(targets->dtype));
    if (targets->ndim != 1 || targets->shape[0] != logits->shape[0])
        return colo_fail(COLO_ERR_SHAPE,
                         "targets: %d axes, %" PRId64 " elements, expected [%" PRId64
                         "] as the logits' rows",
                         (int)targets->ndim, colo_tensor_count(targets), logits->shape[0]);
    if (targets->mem != logits->mem || targets->device != logits->device)
        return colo_fail(COLO_ERR_ARG,
                         "targets: memory kind %d on device %d, the logits are kind %d "
                         "on device %d",
                         (int)targets->mem, (int)targets->device, (int)logits->mem,
                         (int)logits->device);
    int64_t end;
    if (!colo_add_ok(config->vocab_start, logits->shape[1], &end))
        return colo_fail(COLO_ERR_ARG,
                         "logprob: vocab_start %" PRId64 " + %" PRId64 " columns passes 2^63",
                         config->vocab_start, logits->shape[1]);
    if (!out)
        return colo_fail(COLO_ERR_ARG, "logprob: out is NULL");
    if (out->entropy && !config->want_entropy)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: out.entropy is given, config.want_entropy is false");
    if (out->loss && !config->want_loss)
        return colo_fail(COLO_ERR_ARG, "logprob: out.loss is given, config.want_loss is false");
    if (out->correct && !config->want_correct)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: out.correct is given, config.want_correct is false");
    if (!saved && stats)
        return colo_fail(COLO_ERR_ARG, "logprob: stats is given, saved is NULL");
    if (saved && !stats && logits->shape[0] > 0)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: saved is given, stats is NULL; it needs %" PRId64 " bytes",
                         logits->shape[0] * 3 * (int64_t)sizeof(double));
    if (!scratch)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: scratch is NULL; colo_logprob_scratch_size() tells "
                         "how many bytes it needs");
    COLO_TRY(check_aligned(stats, "stats"));
    COLO_TRY(check_aligned(scratch, "scratch"));
    if (colo_comm_size(group) == 1 && (config->vocab_start > 0 || end < config->vocab))
        return colo_fail(COLO_ERR_SHAPE,
                         "logits: columns [%" PRId64 ", %" PRId64
                         ") on a group of one rank, expected the whole vocabulary [0, %" PRId64 ")",
                         config->vocab_start, end, config->vocab);
    return COLO_OK;
}

static uint64_t hash_f64(uint64_t h, double v)
{
    int64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return colo_hash_i64(h, bits);
}

/* All that must be equal on all ranks; vocab_start and chunk_size need not. */
static uint64_t hash_config(const colo_logprob_config_t *c, colo_dtype_t dtype)
{
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, c->vocab);
    h = hash_f64(h, c->scale / c->temperature);
    h = hash_f64(h, c->softcap);
    h = hash_f64(h, smoothing_of(c));
    h = hash_f64(h, c->z_loss);
    h = colo_hash_i64(h, c->ignore_index);
    h = colo_hash_i64(h, dtype);
    return colo_hash_i64(h, c->want_entropy | c->want_loss << 1 | c->want_correct << 2);
}

/* One multiplication a target: the rows are read anyway, this must not show. */
static uint64_t hash_targets(const struct colo_logprob_pass *p)
{
    uint64_t h = COLO_HASH_INIT;
    for (int64_t t = 0; t < p->tokens; t++)
        h = (h ^ (h >> 29) ^ (uint64_t)p->targets[t * p->target_stride]) *
            UINT64_C(0x9e3779b97f4a7c15);
    return h;
}

static const colo_logprob_header_t *header_of(const struct colo_logprob_pass *p, int32_t r)
{
    return (const colo_logprob_header_t *)(p->blocks + r * p->block.bytes);
}

/* The shards tile [0, V): their sizes add up to V, and every column up to V is on some rank. */
static colo_status_t check_tiling(const struct colo_logprob_pass *p)
{
    const int64_t vocab = p->config->vocab;
    int64_t at = 0, total = 0;
    while (at < vocab) {
        int64_t end = at;
        for (int32_t r = 0; r < p->ranks && end == at; r++) {
            const colo_logprob_header_t *h = header_of(p, r);
            if (h->start <= at && at - h->start < h->columns)
                end = h->start + h->columns;
        }
        if (end == at)
            return colo_fail(COLO_ERR_MISMATCH,
                             "logprob: no rank of %d holds column %" PRId64
                             " of the vocabulary of %" PRId64,
                             (int)p->ranks, at, vocab);
        at = end;
    }
    for (int32_t r = 0; r < p->ranks; r++)
        total += header_of(p, r)->columns;
    if (total != vocab)
        return colo_fail(COLO_ERR_MISMATCH,
                         "logprob: the shards of %d ranks hold %" PRId64
                         " columns, the vocabulary has %" PRId64 ": some are on two ranks",
                         (int)p->ranks, total, vocab);
    return COLO_OK;
}

static colo_status_t check_headers(const struct colo_logprob_pass *p)
{
    const colo_logprob_header_t *first = header_of(p, 0);
    for (int32_t r = 0; r < p->ranks; r++) {
        const colo_logprob_header_t *h = header_of(p, r);
        if (h->magic != COLO_LOGPROB_MAGIC)
            return colo_fail(COLO_ERR_MISMATCH, "logprob: rank %d brings no statistics", (int)r);
        if (h->tokens != first->tokens)
            return colo_fail(COLO_ERR_MISMATCH,
                             "logprob: rank %d has %" PRId64 " tokens, rank 0 has %" PRId64, (int)r,
                             h->tokens, first->tokens);
        if (h->config != first->config)
            return colo_fail(COLO_ERR_MISMATCH,
                             "logprob: rank %d has another config or dtype than "
                             "rank 0 (%016" PRIx64 ", %016" PRIx64 ")",
                             (int)r, h->config, first->config);
        if (h->targets != first->targets)
            return colo_fail(COLO_ERR_MISMATCH,
                             "logprob: rank %d has other targets than rank 0 "
                             "(%016" PRIx64 ", %016" PRIx64 ")",
                             (int)r, h->targets, first->targets);
    }
    return check_tiling(p);
}

/* ---- forward ---- */

static struct colo_logprob_pass pass_of(const colo_logprob_config_t *config,
                                        const colo_tensor_t *logits, const colo_tensor_t *targets)
{
    int64_t in_vocab = config->vocab - config->vocab_start;
    in_vocab = in_vocab < 0 ? 0 : in_vocab;
    return (struct colo_logprob_pass){
        .config = config,
        .dtype = logits->dtype,
        .stat_dtype = colo_logprob_stat_dtype(logits->dtype),
        .factor = config->scale / config->temperature,
        .smoothing = smoothing_of(config),
        .tokens = logits->shape[0],
        .logits = logits->data,
        .row_stride = logits->stride[0],
        .targets = targets->data,
        .target_stride = targets->stride[0],
        .columns = logits->shape[1],
        .true_columns = logits->shape[1] < in_vocab ? logits->shape[1] : in_vocab,
    };
}

/* Runs @pass over all tokens; at least once, so that T = 0 still has a header and counts of 0. */
static colo_status_t over_chunks(struct colo_logprob_pass *p, int64_t chunk, colo_stream_t stream,
                                 colo_status_t (*pass)(const struct colo_logprob_pass *,
                                                       colo_stream_t))
{
    p->lo = 0;
    do {
        p->hi = p->tokens - p->lo < chunk ? p->tokens : p->lo + chunk;
        COLO_TRY(pass(p, stream));
        p->lo = p->hi;
    } while (p->lo < p->tokens);
    return COLO_OK;
}

/* A group of one: stats and merge share a block of one chunk. */
static colo_status_t forward_alone(struct colo_logprob_pass *p, const colo_ops_t *ops,
                                   int64_t chunk, colo_stream_t stream)
{
    p->lo = 0;
    do {
        p->hi = p->tokens - p->lo < chunk ? p->tokens : p->lo + chunk;
        p->block_lo = p->lo;
        COLO_TRY(ops->logprob_stats(p, stream));
        COLO_TRY(ops->logprob_merge(p, stream));
        p->lo = p->hi;
    } while (p->lo < p->tokens);
    return COLO_OK;
}

static colo_status_t forward(struct colo_logprob_pass *p, colo_mem_t mem, colo_comm_t *group,
                             colo_stream_t stream)
{
    const colo_ops_t *ops;
    const int64_t chunk = chunk_of(p->config, p->tokens);
    COLO_TRY(colo_ops_for(mem, &ops));
    if (!block_layout(p->config, p->dtype, p->ranks == 1 ? chunk : p->tokens, &p->block))
        return colo_fail(COLO_ERR_ARG, "logprob: scratch of %" PRId64 " tokens exceeds 2^63 bytes",
                         p->tokens);
    p->header = (colo_logprob_header_t){
        .magic = COLO_LOGPROB_MAGIC,
        .start = p->config->vocab_start,
        .columns = p->true_columns,
        .tokens = p->tokens,
        .config = hash_config(p->config, p->dtype),
        .targets = mem == COLO_HOST ? hash_targets(p) : 0,
    };
    if (p->ranks == 1)
        return forward_alone(p, ops, chunk, stream);
    COLO_TRY(over_chunks(p, chunk, stream, ops->logprob_stats));
    COLO_TRY(colo_comm_i_all_gather(group, COLO_OWNER_LOSS, p->blocks + p->rank * p->block.bytes,
                                    p->blocks, p->block.bytes, COLO_U8, stream));
    if (mem == COLO_HOST)
        COLO_TRY(check_headers(p));
    return over_chunks(p, chunk, stream, ops->logprob_merge);
}

colo_status_t colo_logprob_forward(const colo_logprob_config_t *config, const colo_tensor_t *logits,
                                   const colo_tensor_t *targets, colo_comm_t *group,
                                   const colo_logprob_out_t *out, colo_logprob_saved_t *saved,
                                   void *stats, void *scratch, colo_stream_t stream)
{
    if (!group)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: group is NULL; colo_comm_create_self() makes one of "
                         "one rank");
    colo_status_t st = check_forward(config, logits, targets, group, out, saved, stats, scratch);
    const colo_ops_t *ops;
    if (st == COLO_OK)
        st = colo_ops_for(logits->mem, &ops);
    if (st < 0) {
        bool peers_wait = colo_comm_size(group) > 1 && colo_comm_check_level(group) > 0;
        return peers_wait ? colo_comm_i_fail(group, st) : st;
    }
    struct colo_logprob_pass p = pass_of(config, logits, targets);
    p.rank = colo_comm_rank(group);
    p.ranks = colo_comm_size(group);
    p.blocks = scratch;
    p.out = *out;
    p.saved = saved ? stats : NULL;
    COLO_TRY(forward(&p, logits->mem, group, stream));
    if (saved)
        *saved = (colo_logprob_saved_t){
            .config = *config,
            .logits = *logits,
            .targets = *targets,
            .logits_version = logits->version ? *logits->version : 0,
            .targets_version = targets->version ? *targets->version : 0,
            .stats = stats,
            .valid = true,
        };
    return COLO_OK;
}

/* ---- backward ---- */

static colo_status_t check_version(const colo_tensor_t *t, uint64_t saved_at, const char *what)
{
    if (t->version && *t->version != saved_at)
        return colo_fail(COLO_ERR_MODIFIED,
                         "%s were written after they were saved: version %" PRIu64
                         ", saved at %" PRIu64,
                         what, *t->version, saved_at);
    return COLO_OK;
}

/* First byte and one past the last that a matrix touches. */
static void extent_of(const colo_tensor_t *x, uintptr_t *lo, uintptr_t *hi)
{
    int64_t elems = (x->shape[0] - 1) * x->stride[0] + x->shape[1];
    *lo = (uintptr_t)x->data;
    *hi = *lo + (uintptr_t)elems * colo_dtype_size(x->dtype);
}

static bool ranges_meet(uintptr_t alo, uintptr_t ahi, uintptr_t blo, uintptr_t bhi)
{
    return alo < bhi && blo < ahi;
}

/* Do two matrices of one shape and dtype share a byte? Rows at the same stride may interleave (two
 * halves of one wide buffer); with other strides touching ranges count as shared. */
static bool overlap(const colo_tensor_t *a, const colo_tensor_t *b)
{
    uintptr_t alo, ahi, blo, bhi;
    if (!colo_tensor_count(a))
        return false;
    extent_of(a, &alo, &ahi);
    extent_of(b, &blo, &bhi);
    if (!ranges_meet(alo, ahi, blo, bhi))
        return false;
    uint64_t elem = colo_dtype_size(a->dtype), width = (uint64_t)a->shape[1] * elem,
             step = (uint64_t)a->stride[0] * elem;
    if (a->shape[0] == 1 || a->stride[0] != b->stride[0] || step < 2 * width)
        return true;
    uint64_t apart = (uint64_t)(alo > blo ? alo - blo : blo - alo) % step;
    return apart < width || apart > step - width;
}

static colo_status_t check_backward(const colo_logprob_saved_t *saved,
                                    const colo_logprob_upstream_t *up,
                                    const colo_tensor_t *d_logits, bool *in_place)
{
    if (!saved)
        return colo_fail(COLO_ERR_ARG, "logprob: saved is NULL");
    if (!saved->valid)
        return colo_fail(COLO_ERR_STATE, "logprob: the saved state is not valid: no forward filled "
                                         "it, or a backward in place ended it");
    if (!up)
        return colo_fail(COLO_ERR_ARG, "logprob: upstream is NULL");
    if (up->d_entropy && !saved->config.want_entropy)
        return colo_fail(COLO_ERR_ARG, "logprob: d_entropy is given, forward ran with want_entropy "
                                       "false");
    if (up->d_loss && !saved->config.want_loss)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: d_loss is given, forward ran with want_loss false");
    COLO_TRY(check_matrix(d_logits, "d_logits", true));
    const colo_tensor_t *z = &saved->logits;
    if (d_logits->dtype != z->dtype)
        return colo_fail(COLO_ERR_ARG, "d_logits: dtype %s, the logits are %s",
                         colo_dtype_name(d_logits->dtype), colo_dtype_name(z->dtype));
    if (d_logits->shape[0] != z->shape[0] || d_logits->shape[1] != z->shape[1])
        return colo_fail(COLO_ERR_SHAPE,
                         "d_logits: [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64
                         "]",
                         d_logits->shape[0], d_logits->shape[1], z->shape[0], z->shape[1]);
    if (d_logits->mem != z->mem || d_logits->device != z->device)
        return colo_fail(COLO_ERR_ARG,
                         "d_logits: memory kind %d on device %d, the logits are kind %d "
                         "on device %d",
                         (int)d_logits->mem, (int)d_logits->device, (int)z->mem, (int)z->device);
    *in_place = d_logits->data == z->data && colo_tensor_count(z) > 0 &&
                (z->shape[0] == 1 || d_logits->stride[0] == z->stride[0]);
    if (!*in_place && overlap(d_logits, z))
        return colo_fail(COLO_ERR_ARG,
                         "d_logits: overlaps the logits without being them (%+" PRId64
                         " bytes, row strides %" PRId64 " and %" PRId64
                         "); in place needs the same data and strides",
                         (int64_t)((intptr_t)d_logits->data - (intptr_t)z->data),
                         d_logits->stride[0], z->stride[0]);
    COLO_TRY(check_version(z, saved->logits_version, "logits"));
    return check_version(&saved->targets, saved->targets_version, "targets");
}

colo_status_t colo_logprob_backward(colo_logprob_saved_t *saved,
                                    const colo_logprob_upstream_t *upstream,
                                    const colo_tensor_t *d_logits, colo_stream_t stream)
{
    bool in_place = false;
    const colo_ops_t *ops;
    COLO_TRY(check_backward(saved, upstream, d_logits, &in_place));
    COLO_TRY(colo_ops_for(saved->logits.mem, &ops));
    struct colo_logprob_pass p = pass_of(&saved->config, &saved->logits, &saved->targets);
    p.saved = saved->stats;
    p.upstream = *upstream;
    p.d_logits = d_logits->data;
    p.d_row_stride = d_logits->stride[0];
    COLO_TRY(over_chunks(&p, chunk_of(&saved->config, p.tokens), stream, ops->logprob_grad));
    if (in_place)
        saved->valid = false;
    return COLO_OK;
}
