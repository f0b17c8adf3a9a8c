/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.c - log-probabilities of the k largest or of k given columns per token: checks, order of the
 * passes, the one gather.
 *
 * Almost all of it is the logits path's: its stats and merge passes make M and log Sum, its grad
 * pass writes -p_j times the sum of a row's gradients. What is added rides along: candidates behind
 * the statistics in the same block, so that there is one gather; and the picked columns, written
 * after the grad pass. topk-pass.h has the order of the passes and what travels.
 *
 * To the logits path a token's target is some id that was picked. That column's gradient comes out
 * of it with all of the row's upstream in it, and is among those that are written anew.
 */
#include "loss/topk-pass.h"

#include "comm/comm.h"
#include "core/hash.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/loss.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <string.h>

/* The same as the logits path has it; no row is ignored by the caller's index, but by its mask. */
static colo_logprob_config_t base_config(const colo_topk_config_t *c)
{
    return (colo_logprob_config_t){
        .struct_size = sizeof(colo_logprob_config_t),
        .logits = c->logits,
        .ignore_index = COLO_TOPK_SKIP,
        .order = c->order,
    };
}

static colo_status_t read_config(const colo_topk_config_t *given, colo_topk_config_t *own)
{
    *own = (colo_topk_config_t){COLO_TOPK_CONFIG_INIT};
    return COLO_SIZED_READ(own, given, topk, "topk: config", "COLO_TOPK_CONFIG_INIT");
}

colo_status_t colo_topk_config_check(const colo_topk_config_t *config)
{
    colo_topk_config_t own;
    const colo_topk_config_t *c = &own;
    COLO_TRY(read_config(config, &own));
    colo_logprob_config_t base = base_config(c);
    colo_status_t st = colo_logprob_config_check(&base);
    if (st < 0)
        return colo_fail_prefix(st, "topk");
    if (c->k < 1 || c->k > COLO_TOPK_MAX)
        return colo_fail(COLO_ERR_ARG, "topk: k is %" PRId64 ", expected 1..%d", c->k,
                         COLO_TOPK_MAX);
    if (c->topk && c->k > c->logits.vocab)
        return colo_fail(COLO_ERR_ARG,
                         "topk: k is %" PRId64 ", expected at most %" PRId64 ", the vocabulary",
                         c->k, c->logits.vocab);
    return COLO_OK;
}

/* ---- sizes ---- */

colo_status_t colo_topk_saved_size(const colo_topk_config_t *config, int64_t tokens, size_t *bytes)
{
    colo_topk_config_t own;
    COLO_TRY(read_config(config, &own));
    COLO_TRY(colo_topk_config_check(&own));
    return colo_loss_i_saved_size("topk", tokens, 40 + 16 * own.k, bytes);
}

static bool block_of(const colo_topk_config_t *c, colo_dtype_t dtype, int64_t tokens,
                     struct colo_topk_pass *p)
{
    const colo_logprob_config_t base = base_config(c);
    const int64_t elem = (int64_t)colo_dtype_size(colo_logprob_stat_dtype(dtype));
    colo_logprob_block_t *b = &p->base.block;
    int64_t n;
    return colo_mul_ok(tokens, c->k, &n) && colo_logprob_i_block_layout(&base, dtype, tokens, b) &&
           colo_logprob_i_append(b, n, elem, true, &p->pz) &&
           colo_logprob_i_append(b, n, (int64_t)sizeof(int64_t), c->topk, &p->pid);
}

colo_status_t colo_topk_workspace_size(const colo_topk_config_t *config, colo_dtype_t dtype,
                                       int64_t tokens, int32_t ranks, size_t *bytes)
{
    struct colo_topk_pass p;
    colo_topk_config_t own;
    size_t saved; /* without it, its buffer is in the workspace, too */
    COLO_TRY(read_config(config, &own));
    COLO_TRY(colo_topk_saved_size(&own, tokens, bytes ? &saved : NULL));
    COLO_TRY(colo_loss_i_check_logits("topk", dtype));
    COLO_TRY(colo_loss_i_check_ranks("topk", ranks));
    const bool ok = block_of(&own, dtype, tokens, &p);
    return colo_loss_i_workspace_size("topk", ok, p.base.block.bytes, (int64_t)saved, tokens, ranks,
                                      bytes);
}

/* ---- checks ---- */

static colo_status_t check_ids(const colo_topk_config_t *c, const colo_tensor_t *logits,
                               const colo_tensor_t *ids)
{
    if (c->topk && ids)
        return colo_fail(COLO_ERR_ARG, "topk: ids are given, config.topk chooses them");
    if (c->topk)
        return COLO_OK;
    COLO_TRY(colo_tensor_check(ids, "ids"));
    if (ids->dtype != COLO_I64)
        return colo_fail(COLO_ERR_ARG, "ids: dtype %s, expected i64", colo_dtype_name(ids->dtype));
    if (ids->ndim != 2 || ids->shape[0] != logits->shape[0] || ids->shape[1] != c->k)
        return colo_fail(COLO_ERR_SHAPE,
                         "ids: %d axes, %" PRId64 " elements, expected [%" PRId64 ", %" PRId64 "]",
                         (int)ids->ndim, colo_tensor_count(ids), logits->shape[0], c->k);
    if (c->k > 1 && ids->stride[1] != 1)
        return colo_fail(COLO_ERR_SHAPE,
                         "ids: columns are %" PRId64 " elements apart, expected contiguous columns",
                         ids->stride[1]);
    return colo_loss_i_check_memory(ids, logits, "ids");
}

static colo_status_t check_forward(const colo_topk_config_t *config, const colo_tensor_t *logits,
                                   const colo_tensor_t *ids, const colo_tensor_t *mask,
                                   const colo_comm_t *group, const colo_topk_out_t *out,
                                   const colo_topk_saved_t *saved, const void *saved_memory,
                                   const void *workspace)
{
    COLO_TRY(colo_topk_config_check(config));
    const colo_logprob_config_t base = base_config(config);
    COLO_TRY(colo_loss_i_check_matrix(logits, "logits", false));
    COLO_TRY(check_ids(config, logits, ids));
    COLO_TRY(colo_loss_i_check_mask(mask, logits));
    COLO_TRY(colo_loss_i_check_shard(&base, logits, group));
    if (!out)
        return colo_fail(COLO_ERR_ARG, "topk: out is NULL");
    if (out->ids && !config->topk)
        return colo_fail(COLO_ERR_ARG, "topk: out.ids is given, config.topk is false");
    return colo_loss_i_check_buffers("topk", saved != NULL, saved_memory,
                                     logits->shape[0] * (40 + 16 * config->k), workspace);
}

/* ---- forward ---- */

/* @base: where the derived config lives */
static struct colo_topk_pass pass_of(const colo_topk_config_t *c, const colo_tensor_t *logits,
                                     const colo_logprob_config_t *base, void *saved_memory)
{
    const int64_t tokens = logits->shape[0];
    double *memory = saved_memory;
    struct colo_topk_pass p = {
        .base = colo_logprob_i_pass(base, logits, NULL),
        .k = c->k,
        .topk = c->topk,
        .ignore_index = c->ignore_index,
    };
    p.base.hi = tokens;
    p.base.saved = memory;
    if (memory) {
        p.rows = (int64_t *)(memory + 3 * tokens);
        p.sum = memory + 4 * tokens;
        p.down = memory + 5 * tokens;
        p.saved_ids = (int64_t *)(memory + (5 + c->k) * tokens);
    }
    p.base.targets = p.rows;
    return p;
}

static uint64_t hash_inputs(const struct colo_topk_pass *p)
{
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, p->mask != NULL);
    for (int64_t t = 0; t < p->base.tokens; t++) {
        h = colo_hash_i64(h, p->mask ? p->mask[t * p->mask_stride] != 0 : 1);
        for (int64_t i = 0; i < p->k && !p->topk; i++)
            h = colo_hash_i64(h, p->ids[t * p->id_stride + i]);
    }
    return h;
}

static uint64_t hash_config(const struct colo_topk_pass *p)
{
    uint64_t h = colo_logprob_i_hash_config(&p->base.config, p->base.dtype);
    h = colo_hash_i64(h, p->k);
    h = colo_hash_i64(h, p->topk);
    return colo_hash_i64(h, p->ignore_index);
}

static colo_status_t forward(struct colo_topk_pass *p, int64_t *early_rows,
                             const colo_loss_ops_t *loss, bool on_host, colo_comm_t *group,
                             colo_stream_t stream)
{
    colo_logprob_i_set_header(&p->base, hash_config(p),
                              on_host && p->base.ranks > 1 ? hash_inputs(p) : 0);
    int64_t *rows = p->rows; /* in the caller's saved memory, which a mismatch leaves alone */
    p->rows = early_rows;
    p->base.targets = early_rows;
    COLO_TRY(colo_loss_i_step(group, loss->topk_rows(p, stream)));
    COLO_TRY(colo_loss_i_step(group, loss->topk_local(p, stream)));
    COLO_TRY(colo_loss_i_gather(&p->base, on_host, group, stream));
    p->rows = rows;
    p->base.targets = rows;
    p->count = true;
    COLO_TRY(loss->topk_rows(p, stream));
    COLO_TRY(loss->logprob_merge(&p->base, stream));
    return loss->topk_merge(p, stream);
}

colo_status_t colo_topk_forward(const colo_topk_config_t *config, const colo_topk_batch_t *batch,
                                colo_comm_t *group, const colo_topk_out_t *out,
                                colo_topk_saved_t *saved, void *saved_memory, void *workspace,
                                colo_stream_t stream)
{
    COLO_RANGE();
    const colo_topk_batch_t none = {.logits = NULL}, *given = batch ? batch : &none;
    const colo_tensor_t *logits = given->logits, *ids = given->ids, *mask = given->mask;
    COLO_TRY(colo_loss_i_check_group("topk", group));
    const colo_loss_ops_t *loss;
    struct colo_topk_pass sizes;
    colo_topk_config_t own;
    colo_status_t st = read_config(config, &own);
    const size_t size = st == COLO_OK ? config->struct_size : 0;
    config = &own;
    if (st == COLO_OK)
        st = check_forward(config, logits, ids, mask, group, out, saved, saved_memory, workspace);
    if (st == COLO_OK && !block_of(config, logits->dtype, logits->shape[0], &sizes))
        st = colo_fail(COLO_ERR_ARG, "topk: workspace of %" PRId64 " tokens exceeds 2^63 bytes",
                       logits->shape[0]);
    COLO_TRY(colo_loss_i_begin("topk", st, logits, group, &loss));
    const uint64_t version = colo_loss_i_version(logits);
    const colo_logprob_config_t base = base_config(config);
    unsigned char *behind =
        (unsigned char *)workspace + colo_comm_size(group) * sizes.base.block.bytes;
    struct colo_topk_pass p = pass_of(config, logits, &base, saved ? saved_memory : behind);
    p.base.rank = colo_comm_rank(group);
    p.base.ranks = colo_comm_size(group);
    p.base.blocks = workspace;
    p.base.block = sizes.base.block;
    p.pz = sizes.pz;
    p.pid = sizes.pid;
    p.ids = ids ? ids->data : NULL;
    p.id_stride = ids ? ids->stride[0] : 0;
    p.mask = mask ? mask->data : NULL;
    p.mask_stride = mask ? mask->stride[0] : 0;
    p.out = *out;
    COLO_TRY(forward(&p, (int64_t *)(behind + 24 * p.base.tokens), loss, logits->mem == COLO_HOST,
                     group, stream));
    if (saved) {
        const colo_topk_saved_t all = {
            .logits = *logits,
            .logits_version = version,
            .memory = saved_memory,
            .valid = true,
            .config = own,
        };
        COLO_SIZED_SAVE(saved, &all, config, size);
    }
    return COLO_OK;
}

/* ---- backward ---- */

colo_status_t colo_topk_backward(colo_topk_saved_t *saved, const colo_topk_upstream_t *upstream,
                                 const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    bool in_place = false;
    const colo_loss_ops_t *loss;
    colo_topk_config_t config;
    COLO_TRY(colo_loss_i_check_saved("topk", saved != NULL, saved && saved->valid));
    COLO_TRY(read_config(&saved->config, &config));
    if (!upstream || (!upstream->d_logp && saved->logits.shape[0] > 0))
        return colo_fail(COLO_ERR_ARG, "topk: %s is NULL", upstream ? "d_logp" : "upstream");
    COLO_TRY(colo_loss_i_check_gradient(d_logits, "d_logits", &saved->logits, &in_place));
    COLO_TRY(colo_loss_i_check_version(&saved->logits, saved->logits_version, "logits"));
    COLO_TRY(colo_loss_ops_for(saved->logits.mem, &loss));
    const colo_logprob_config_t base = base_config(&config);
    struct colo_topk_pass p = pass_of(&config, &saved->logits, &base, saved->memory);
    p.base.d_logits = d_logits->data;
    p.base.d_row_stride = d_logits->stride[0];
    p.base.upstream.d_logp = p.sum;
    p.d_logp = upstream->d_logp;
    COLO_TRY(loss->topk_sum(&p, stream));
    COLO_TRY(loss->logprob_grad(&p.base, stream));
    COLO_TRY(loss->topk_fix(&p, stream));
    if (in_place)
        saved->valid = false;
    return COLO_OK;
}
