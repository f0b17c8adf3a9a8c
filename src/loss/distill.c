/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - loss against a sharded target distribution: checks, the passes in order, one gather.
 *
 * As logprob.c, with two matrices instead of one: what differs are the numbers per token (six, in
 * distill-pass.h) and that no target has an owner. The checks of a shard, of a gradient and of the
 * gathered headers are those of the logits path. Targets are sharded, so nothing of them can be
 * compared across ranks; configs and masks are.
 */
#include "loss/distill-pass.h"

#include "comm/comm.h"
#include "core/hash.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/loss.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <math.h>

static colo_logprob_config_t base_config(const colo_distill_config_t *c)
{
    return (colo_logprob_config_t){
        .struct_size = sizeof(colo_logprob_config_t),
        .logits = c->logits,
        .order = c->order,
    };
}

static colo_status_t read_config(const colo_distill_config_t *given, colo_distill_config_t *own)
{
    *own = (colo_distill_config_t){COLO_DISTILL_CONFIG_INIT};
    return COLO_SIZED_READ(own, given, targets, "distill: config", "COLO_DISTILL_CONFIG_INIT");
}

colo_status_t colo_distill_config_check(const colo_distill_config_t *config)
{
    colo_distill_config_t own;
    const colo_distill_config_t *c = &own;
    COLO_TRY(read_config(config, &own));
    const colo_logprob_config_t base = base_config(c);
    colo_status_t st = colo_logprob_config_check(&base);
    if (st < 0)
        return colo_fail_prefix(st, "distill");
    if (c->targets != COLO_DISTILL_LOGITS && c->targets != COLO_DISTILL_PROBS)
        return colo_fail(COLO_ERR_ARG, "distill: targets is %d, expected logits (0) or probs (1)",
                         (int)c->targets);
    if (!(c->target_temperature > 0) || isinf(c->target_temperature))
        return colo_fail(COLO_ERR_ARG, "distill: target_temperature is %g, expected finite and > 0",
                         c->target_temperature);
    if (!isfinite(c->target_scale) || !isfinite(c->target_scale / c->target_temperature))
        return colo_fail(COLO_ERR_ARG,
                         "distill: target_scale / target_temperature = %g / %g is not finite",
                         c->target_scale, c->target_temperature);
    return COLO_OK;
}

/* ---- sizes ---- */

colo_status_t colo_distill_saved_size(const colo_distill_config_t *config, int64_t tokens,
                                      size_t *bytes)
{
    COLO_TRY(colo_distill_config_check(config));
    return colo_loss_i_saved_size("distill", tokens, 5 * (int64_t)sizeof(double), bytes);
}

static bool block_of(colo_dtype_t dtype, int64_t n, struct colo_distill_pass *p)
{
    const int64_t elem = (int64_t)colo_dtype_size(colo_logprob_stat_dtype(dtype));
    colo_logprob_block_t *b = &p->base.block;
    *b = (colo_logprob_block_t){.bytes = (int64_t)sizeof(colo_logprob_header_t)};
    int64_t *const offsets[] = {&p->mx, &p->sx, &p->mv, &p->sv, &p->c, &p->d};
    for (int i = 0; i < 6; i++)
        if (!colo_logprob_i_append(b, n, elem, true, offsets[i]))
            return false;
    return true;
}

colo_status_t colo_distill_workspace_size(const colo_distill_config_t *config, colo_dtype_t dtype,
                                          int64_t tokens, int32_t ranks, size_t *bytes)
{
    struct colo_distill_pass p;
    size_t saved;
    COLO_TRY(colo_distill_saved_size(config, tokens, bytes ? &saved : NULL));
    COLO_TRY(colo_loss_i_check_logits("distill", dtype));
    COLO_TRY(colo_loss_i_check_ranks("distill", ranks));
    const bool ok = block_of(dtype, tokens, &p);
    return colo_loss_i_workspace_size("distill", ok, p.base.block.bytes, 0, tokens, ranks, bytes);
}

/* ---- checks ---- */

static colo_status_t check_targets(const colo_tensor_t *logits, const colo_tensor_t *targets)
{
    COLO_TRY(colo_loss_i_check_matrix(targets, "targets", false));
    if (targets->dtype != logits->dtype && targets->dtype != COLO_F32)
        return colo_fail(COLO_ERR_ARG, "targets: dtype %s, expected f32 or the logits' %s",
                         colo_dtype_name(targets->dtype), colo_dtype_name(logits->dtype));
    if (targets->shape[0] != logits->shape[0] || targets->shape[1] != logits->shape[1])
        return colo_fail(COLO_ERR_SHAPE,
                         "targets: [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64
                         "] as the logits",
                         targets->shape[0], targets->shape[1], logits->shape[0], logits->shape[1]);
    return colo_loss_i_check_memory(targets, logits, "targets");
}

static colo_status_t check_forward(const colo_distill_config_t *config, const colo_tensor_t *logits,
                                   const colo_tensor_t *targets, const colo_tensor_t *mask,
                                   const colo_comm_t *group, const colo_distill_out_t *out,
                                   const colo_distill_saved_t *saved, const void *saved_memory,
                                   const void *workspace)
{
    COLO_TRY(colo_distill_config_check(config));
    const colo_logprob_config_t base = base_config(config);
    COLO_TRY(colo_loss_i_check_matrix(logits, "logits", false));
    COLO_TRY(check_targets(logits, targets));
    COLO_TRY(colo_loss_i_check_mask(mask, logits));
    COLO_TRY(colo_loss_i_check_shard(&base, logits, group));
    if (!out)
        return colo_fail(COLO_ERR_ARG, "distill: out is NULL");
    return colo_loss_i_check_buffers("distill", saved != NULL, saved_memory,
                                     logits->shape[0] * 5 * (int64_t)sizeof(double), workspace);
}

/* ---- forward ---- */

static struct colo_distill_pass pass_of(const colo_distill_config_t *c, const colo_tensor_t *logits,
                                        const colo_tensor_t *targets,
                                        const colo_logprob_config_t *base)
{
    struct colo_distill_pass p = {
        .base = colo_logprob_i_pass(base, logits, NULL),
        .probs = c->targets == COLO_DISTILL_PROBS,
        .target_factor = c->target_scale / c->target_temperature,
        .target_dtype = targets->dtype,
        .targets = targets->data,
        .target_row_stride = targets->stride[0],
    };
    p.base.hi = p.base.tokens;
    return p;
}

static uint64_t hash_config(const struct colo_distill_pass *p)
{
    colo_logprob_config_t targets = {.logits.vocab = p->probs,
                                     .logits.scale = p->probs ? 1 : p->target_factor,
                                     .logits.temperature = 1};
    return colo_hash_i64((uint64_t)colo_logprob_i_hash_config(&p->base.config, p->base.dtype),
                         (int64_t)colo_logprob_i_hash_config(&targets, p->target_dtype));
}

static uint64_t hash_mask(const struct colo_distill_pass *p)
{
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, p->mask != NULL);
    for (int64_t t = 0; t < p->base.tokens && p->mask; t++)
        h = colo_hash_i64(h, p->mask[t * p->mask_stride] != 0);
    return h;
}

static colo_status_t forward(struct colo_distill_pass *p, const colo_loss_ops_t *loss, bool on_host,
                             colo_comm_t *group, colo_stream_t stream)
{
    colo_logprob_i_set_header(&p->base, hash_config(p),
                              on_host && p->base.ranks > 1 ? hash_mask(p) : 0);
    COLO_TRY(colo_loss_i_step(group, loss->distill_stats(p, stream)));
    COLO_TRY(colo_loss_i_gather(&p->base, on_host, group, stream));
    return loss->distill_merge(p, stream);
}

colo_status_t colo_distill_forward(const colo_distill_config_t *config,
                                   const colo_distill_batch_t *batch, colo_comm_t *group,
                                   const colo_distill_out_t *out, colo_distill_saved_t *saved,
                                   void *saved_memory, void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_distill_batch_t none = {.logits = NULL}, *given = batch ? batch : &none;
    const colo_tensor_t *logits = given->logits, *targets = given->targets, *mask = given->mask;
    COLO_TRY(colo_loss_i_check_group("distill", group));
    const colo_loss_ops_t *loss;
    struct colo_distill_pass sizes;
    colo_distill_config_t own;
    colo_status_t st = read_config(config, &own);
    const size_t size = st == COLO_OK ? config->struct_size : 0;
    config = &own;
    if (st == COLO_OK)
        st = check_forward(config, logits, targets, mask, group, out, saved, saved_memory,
                           workspace);
    if (st == COLO_OK && !block_of(logits->dtype, logits->shape[0], &sizes))
        st = colo_fail(COLO_ERR_ARG, "distill: workspace of %" PRId64 " tokens exceeds 2^63 bytes",
                       logits->shape[0]);
    COLO_TRY(colo_loss_i_begin("distill", st, logits, group, &loss));
    const uint64_t logits_version = colo_loss_i_version(logits);
    const uint64_t targets_version = colo_loss_i_version(targets);
    const colo_logprob_config_t base = base_config(config);
    struct colo_distill_pass p = pass_of(config, logits, targets, &base);
    p.base.rank = colo_comm_rank(group);
    p.base.ranks = colo_comm_size(group);
    p.base.blocks = workspace;
    p.base.block = sizes.base.block;
    p.mx = sizes.mx;
    p.sx = sizes.sx;
    p.mv = sizes.mv;
    p.sv = sizes.sv;
    p.c = sizes.c;
    p.d = sizes.d;
    p.mask = mask ? mask->data : NULL;
    p.mask_stride = mask ? mask->stride[0] : 0;
    p.out = *out;
    p.saved = saved ? saved_memory : NULL;
    COLO_TRY(forward(&p, loss, logits->mem == COLO_HOST, group, stream));
    if (saved) {
        const colo_distill_saved_t all = {
            .logits = *logits,
            .targets = *targets,
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

colo_status_t colo_distill_backward(colo_distill_saved_t *saved,
                                    const colo_distill_upstream_t *upstream,
                                    const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    bool in_place = false;
    const colo_loss_ops_t *loss;
    colo_distill_config_t config;
    COLO_TRY(colo_loss_i_check_saved("distill", saved != NULL, saved && saved->valid));
    COLO_TRY(read_config(&saved->config, &config));
    if (!upstream)
        return colo_fail(COLO_ERR_ARG, "distill: upstream is NULL");
    COLO_TRY(colo_loss_i_check_gradient(d_logits, "d_logits", &saved->logits, &in_place));
    /* the targets are read row by row with the logits: nothing written may be among them */
    if (colo_loss_i_ranges_overlap(d_logits, &saved->targets))
        return colo_fail(COLO_ERR_ARG, "d_logits: overlaps the targets (%+" PRId64 " bytes)",
                         (int64_t)((uintptr_t)d_logits->data - (uintptr_t)saved->targets.data));
    COLO_TRY(colo_loss_i_check_version(&saved->logits, saved->logits_version, "logits"));
    COLO_TRY(colo_loss_i_check_version(&saved->targets, saved->targets_version, "targets"));
    COLO_TRY(colo_loss_ops_for(saved->logits.mem, &loss));
    const colo_logprob_config_t base = base_config(&config);
    struct colo_distill_pass p = pass_of(&config, &saved->logits, &saved->targets, &base);
    p.saved = saved->memory;
    p.upstream = *upstream;
    p.base.d_logits = d_logits->data;
    p.base.d_row_stride = d_logits->stride[0];
    COLO_TRY(loss->distill_grad(&p, stream));
    if (in_place)
        saved->valid = false;
    return COLO_OK;
}
