/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.c - the logits path: what is checked, in which order passes run, and the one gather.
 *
 * Forward: every argument is checked before anything is written; then the stats pass over the
 * tokens, chunk by chunk, fills this rank's block; one all-gather brings all blocks to all ranks;
 * the merge pass, the same on every rank, writes outputs and saved statistics. On a group of one
 * there is nothing to gather, and stats and merge alternate over a block of one chunk: that is
 * where chunk_size bounds the workspace. With more ranks the workspace is one block of T tokens a
 * rank, because there is one gather for all tokens, however they are chunked.
 *
 * The block's header costs nothing on the transport and tells ranks apart that were configured
 * differently: other targets, another temperature, shards that leave a hole in the vocabulary.
 * All ranks see the same headers, so all return the same COLO_ERR_MISMATCH, the group lives on, and
 * nothing has been written. (Only host memory can be looked at without waiting for a stream.) Ranks
 * whose blocks differ in size (other token counts, other want_ members) do not get as far: the
 * gather itself refuses, and below COLO_CHECK=2 the group is dead.
 *
 * A rank that finds its own arguments wrong does not join the gather: it marks the group failed
 * (COLO_CHECK=2: agrees with the others, and the group lives on), so that they return COLO_ERR_PEER
 * at once instead of at the deadline.
 *
 * Backward: no collective. The logits are read again from where they were; version counters tell
 * whether they still are what forward saw. In place is legal element by element (an element is read
 * before it is written), and ends the saved state, for the logits are gone.
 *
 * The checks are in validate.c, the formulas in the passes (passes.h, host/logprob.c), the
 * layout of a block in passes.h.
 */
#include "loss/validate.h"
#include "loss/loss.h"
#include "loss/passes.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"

#include <inttypes.h>

/* Tokens, where the caller lets us choose: some 200 to 500 KiB of block, and on a GPU passes that
 * are long enough to fill it. */
enum { CHUNK = 16384 };

/* ---- sizes ---- */

static int64_t chunk_of(const colo_logprob_config_t *c, int64_t tokens)
{
    int64_t chunk = c->chunk_size ? c->chunk_size : CHUNK;
    return chunk < tokens ? chunk : tokens;
}

colo_status_t colo_logprob_saved_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                      int64_t tokens, size_t *bytes)
{
    COLO_TRY(colo_logprob_config_check(config));
    COLO_TRY(colo_loss_i_check_logits("logprob", dtype));
    return colo_loss_i_saved_size("logprob", tokens, 3 * (int64_t)sizeof(double), bytes);
}

colo_status_t colo_logprob_workspace_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                          int64_t tokens, int32_t ranks, size_t *bytes)
{
    colo_logprob_config_t own;
    colo_logprob_block_t b;
    size_t none;
    COLO_TRY(colo_logprob_i_read(config, &own));
    COLO_TRY(colo_logprob_config_check(&own));
    COLO_TRY(colo_loss_i_check_logits("logprob", dtype));
    COLO_TRY(colo_loss_i_saved_size("logprob", tokens, 0, bytes ? &none : NULL));
    COLO_TRY(colo_loss_i_check_ranks("logprob", ranks));
    const int64_t n = ranks == 1 ? chunk_of(&own, tokens) : tokens;
    const bool ok = colo_logprob_i_block_layout(&own, dtype, n, &b) &&
                    colo_mul_ok(b.bytes, colo_logprob_i_segments(&own, ranks), &b.bytes);
    return colo_loss_i_workspace_size("logprob", ok, b.bytes, 0, tokens, ranks, bytes);
}

/* ---- forward ---- */

static colo_status_t check_forward(const colo_logprob_config_t *config, const colo_tensor_t *logits,
                                   const colo_tensor_t *targets, const colo_comm_t *group,
                                   const colo_logprob_out_t *out, const colo_logprob_saved_t *saved,
                                   const void *saved_memory, const void *workspace)
{
    COLO_TRY(colo_logprob_config_check(config));
    COLO_TRY(colo_loss_i_check_matrix(logits, "logits", false));
    COLO_TRY(colo_tensor_check(targets, "targets"));
    if (targets->dtype != COLO_I64)
        return colo_fail(COLO_ERR_ARG, "targets: dtype %s, expected i64",
                         colo_dtype_name(targets->dtype));
    if (targets->ndim != 1 || targets->shape[0] != logits->shape[0])
        return colo_fail(COLO_ERR_SHAPE,
                         "targets: %d axes, %" PRId64 " elements, expected [%" PRId64
                         "] as the logits' rows",
                         (int)targets->ndim, colo_tensor_count(targets), logits->shape[0]);
    COLO_TRY(colo_loss_i_check_memory(targets, logits, "targets"));
    COLO_TRY(colo_loss_i_check_shard(config, logits, group));
    COLO_TRY(colo_loss_i_check_words(config, logits));
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
    return colo_loss_i_check_buffers("logprob", saved != NULL, saved_memory,
                                     logits->shape[0] * 3 * (int64_t)sizeof(double), workspace);
}

colo_status_t colo_loss_i_gather(const struct colo_logprob_pass *p, bool on_host,
                                 colo_comm_t *group, colo_stream_t stream)
{
    if (colo_logprob_i_alone(p))
        return COLO_OK;
    COLO_TRY(colo_comm_i_all_gather(group, COLO_CATEGORY_LOSS, p->blocks + p->rank * p->block.bytes,
                                    p->blocks, p->segments * p->block.bytes, COLO_U8, stream));
    return on_host ? colo_logprob_i_check_headers(p) : COLO_OK;
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
static colo_status_t forward_alone(struct colo_logprob_pass *p, const colo_loss_ops_t *loss,
                                   int64_t chunk, colo_stream_t stream)
{
    p->lo = 0;
    do {
        p->hi = p->tokens - p->lo < chunk ? p->tokens : p->lo + chunk;
        p->block_lo = p->lo;
        COLO_TRY(loss->logprob_stats(p, stream));
        COLO_TRY(loss->logprob_merge(p, stream));
        p->lo = p->hi;
    } while (p->lo < p->tokens);
    return COLO_OK;
}

static colo_status_t forward(struct colo_logprob_pass *p, const colo_loss_ops_t *loss, bool on_host,
                             colo_comm_t *group, colo_stream_t stream)
{
    const int64_t chunk = chunk_of(&p->config, p->tokens);
    const bool alone = colo_logprob_i_alone(p);
    if (!colo_logprob_i_block_layout(&p->config, p->dtype, alone ? chunk : p->tokens, &p->block))
        return colo_fail(COLO_ERR_ARG,
                         "logprob: workspace of %" PRId64 " tokens exceeds 2^63 bytes", p->tokens);
    colo_logprob_i_set_header(p, colo_logprob_i_hash_config(&p->config, p->dtype),
                              on_host && !alone ? colo_logprob_i_hash_targets(p) : 0);
    if (alone)
        return forward_alone(p, loss, chunk, stream);
    COLO_TRY(colo_loss_i_step(group, over_chunks(p, chunk, stream, loss->logprob_stats)));
    COLO_TRY(colo_loss_i_gather(p, on_host, group, stream));
    return over_chunks(p, chunk, stream, loss->logprob_merge);
}

colo_status_t colo_logprob_forward(const colo_logprob_config_t *config,
                                   const colo_logprob_batch_t *batch, colo_comm_t *group,
                                   const colo_logprob_out_t *out, colo_logprob_saved_t *saved,
                                   void *saved_memory, void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_logprob_batch_t none = {.logits = NULL}, *given = batch ? batch : &none;
    const colo_tensor_t *logits = given->logits, *targets = given->targets;
    COLO_TRY(colo_loss_i_check_group("logprob", group));
    colo_logprob_config_t own;
    colo_status_t st = colo_logprob_i_read(config, &own);
    const size_t size = st == COLO_OK ? config->struct_size : 0;
    config = &own;
    if (st == COLO_OK)
        st = check_forward(config, logits, targets, group, out, saved, saved_memory, workspace);
    if (st == COLO_OK)
        st = colo_loss_i_check_support(given->support, config, targets, logits);
    const colo_loss_ops_t *loss;
    COLO_TRY(colo_loss_i_begin("logprob", st, logits, group, &loss));
    /* as they are now, before the first row is read */
    const uint64_t logits_version = colo_loss_i_version(logits);
    const uint64_t targets_version = colo_loss_i_version(targets);
    const colo_support_saved_t support = colo_loss_i_save_support(given->support);
    struct colo_logprob_pass p = colo_logprob_i_pass(config, logits, targets);
    p.support = colo_loss_i_support(&support);
    colo_logprob_i_set_ranks(&p, group);
    p.blocks = workspace;
    p.out = *out;
    p.saved = saved ? saved_memory : NULL;
    COLO_TRY(forward(&p, loss, logits->mem == COLO_HOST, group, stream));
    if (saved) {
        const colo_logprob_saved_t all = {
            .logits = *logits,
            .targets = *targets,
            .support = support,
            .logits_version = logits_version,
            .targets_version = targets_version,
            .memory = saved_memory,
            .valid = true,
            .config = own,
        };
        COLO_SIZED_SAVE(saved, &all, config, size);
    }
    return COLO_OK;
}

/* ---- backward ---- */

static colo_status_t check_backward(const colo_logprob_saved_t *saved,
                                    const colo_logprob_upstream_t *up,
                                    const colo_tensor_t *d_logits, colo_logprob_config_t *config,
                                    bool *in_place)
{
    COLO_TRY(colo_loss_i_check_saved("logprob", saved != NULL, saved && saved->valid));
    COLO_TRY(colo_logprob_i_read(&saved->config, config));
    if (!up)
        return colo_fail(COLO_ERR_ARG, "logprob: upstream is NULL");
    if (up->d_entropy && !config->want_entropy)
        return colo_fail(COLO_ERR_ARG, "logprob: d_entropy is given, forward ran with want_entropy "
                                       "false");
    if (up->d_loss && !config->want_loss)
        return colo_fail(COLO_ERR_ARG,
                         "logprob: d_loss is given, forward ran with want_loss false");
    const colo_tensor_t *z = &saved->logits;
    COLO_TRY(colo_loss_i_check_gradient(d_logits, "d_logits", z, in_place));
    COLO_TRY(colo_loss_i_check_version(z, saved->logits_version, "logits"));
    COLO_TRY(colo_loss_i_check_version(&saved->targets, saved->targets_version, "targets"));
    return colo_loss_i_check_support_version(&saved->support);
}

colo_status_t colo_logprob_backward(colo_logprob_saved_t *saved,
                                    const colo_logprob_upstream_t *upstream,
                                    const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    bool in_place = false;
    const colo_loss_ops_t *loss;
    colo_logprob_config_t config;
    COLO_TRY(check_backward(saved, upstream, d_logits, &config, &in_place));
    COLO_TRY(colo_loss_ops_for(saved->logits.mem, &loss));
    struct colo_logprob_pass p = colo_logprob_i_pass(&config, &saved->logits, &saved->targets);
    p.support = colo_loss_i_support(&saved->support);
    p.saved = saved->memory;
    p.upstream = *upstream;
    p.d_logits = d_logits->data;
    p.d_row_stride = d_logits->stride[0];
    p.hi = p.tokens; /* no workspace, so nothing for chunk_size to bound */
    COLO_TRY(loss->logprob_grad(&p, stream));
    if (in_place)
        saved->valid = false;
    return COLO_OK;
}
