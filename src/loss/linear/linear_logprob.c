/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_logprob.c - the lm_head path: the object, and what each call checks, runs and tells.
 *
 * A call has three parts. Its arguments are checked, all of them, before anything is written
 * (check.c); the verdict goes to both groups that would otherwise wait, the vocabulary's and
 * the head's; then one pipeline runs (run.c, pipeline.c).
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "core/range.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- the object ---- */

colo_status_t colo_linear_logprob_create(colo_linear_logprob_t **linear,
                                         const colo_linear_logprob_config_t *config,
                                         colo_lm_head_t *head, colo_comm_t *group)
{
    COLO_RANGE();
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_logprob_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "linear: %zu bytes", sizeof *made);
    const colo_status_t st = colo_linear_open(made, config, head, group);
    if (st == COLO_OK)
        *linear = made;
    else
        free(made);
    return st;
}

void colo_linear_logprob_destroy(colo_linear_logprob_t **linear)
{
    if (!linear || !*linear)
        return;
    colo_linear_close(*linear);
    free(*linear);
    *linear = NULL;
}

/* ---- forward ---- */

static colo_status_t check_without_logits(const colo_linear_logprob_t *linear,
                                          const colo_linear_logprob_batch_t *batch)
{
    const colo_tensor_t *weight = colo_lm_head_resident(linear->head);
    COLO_FAIL_IF(batch->support, COLO_ERR_ARG,
                 "linear: without_logits, but the batch has a support, which is read from logits; "
                 "use an object whose config has without_logits 0");
    COLO_FAIL_IF(weight && !colo_linear_is_tiled(weight), COLO_ERR_ARG,
                 "linear: without_logits, but weight is at %p, rows %" PRId64
                 " elements apart, expected both to be multiples of 16 bytes; use an object whose "
                 "config has without_logits 0",
                 weight->data, weight->stride[0]);
    return COLO_OK;
}

static colo_status_t check_forward(struct colo_linear_call *call,
                                   const colo_linear_logprob_batch_t *given,
                                   const colo_logprob_out_t *out, colo_linear_logprob_pass_t pass)
{
    const colo_linear_logprob_t *linear = call->linear;
    const colo_linear_logprob_batch_t *batch = &call->batch;
    uint64_t version;
    COLO_TRY(colo_linear_check_batch(linear, given, &call->batch));
    COLO_TRY(colo_linear_check_out(linear, out, batch->hidden->shape[0], &call->out));
    COLO_TRY(colo_lm_head_bound(linear->head, &version));
    COLO_TRY(
        colo_linear_set_size(linear, pass, batch->hidden->shape[0], batch->max_valid, &call->size));
    COLO_TRY(colo_linear_set_memory(linear, &call->size, &call->memory));
    if (call->size.no_logits)
        COLO_TRY(check_without_logits(linear, batch));
    return colo_linear_check_memory(call->workspace, "workspace", call->memory.bytes);
}

static const char saved_what[] = "linear: saved", saved_init[] = "COLO_LINEAR_LOGPROB_SAVED_INIT";

static colo_status_t check_saving(const colo_linear_logprob_t *linear, bool early,
                                  const colo_linear_logprob_upstream_t *upstream,
                                  colo_linear_logprob_upstream_t *up,
                                  const colo_linear_logprob_saved_t *saved,
                                  const void *saved_memory, const struct colo_linear_size *size,
                                  struct colo_linear_saved *offsets)
{
    COLO_FAIL_IF(size->early != early, COLO_ERR_ARG,
                 "linear: %s, but mode is %d and saved is %s; a forward that saves in mode early "
                 "(%d) is colo_linear_logprob_early(), others are colo_linear_logprob_forward()",
                 early ? "early" : "forward", (int)linear->config.mode, saved ? "given" : "NULL",
                 (int)COLO_LINEAR_LOGPROB_EARLY);
    if (early)
        COLO_TRY(colo_linear_check_upstream(linear, upstream, size->tokens, false, up));
    if (!saved)
        return saved_memory
                   ? colo_fail(COLO_ERR_ARG, "linear: saved memory is given, saved is NULL")
                   : COLO_OK;
    COLO_TRY(linear->config.lora > 0 ? COLO_SIZED_CHECK(saved, lora_version, saved_what, saved_init)
                                     : COLO_SIZED_CHECK(saved, valid, saved_what, saved_init));
    COLO_TRY(colo_linear_set_saved(linear, size, offsets));
    COLO_TRY(colo_linear_check_memory(saved_memory, "saved memory", offsets->bytes));
    return colo_linear_shares(size) ? colo_linear_check_memory(saved->d_weight, "saved.d_weight", 1)
                                    : COLO_OK;
}

/* @upstream: of mode early */
static colo_status_t forward(const colo_linear_logprob_t *linear,
                             const colo_linear_logprob_batch_t *given, bool early,
                             const colo_linear_logprob_upstream_t *upstream,
                             const colo_logprob_out_t *out, colo_linear_logprob_saved_t *saved,
                             void *saved_memory, void *workspace, colo_stream_t stream)
{
    const colo_linear_logprob_pass_t pass =
        saved ? COLO_LINEAR_LOGPROB_FORWARD : COLO_LINEAR_LOGPROB_INFERENCE;
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    const colo_linear_logprob_batch_t *batch = &call.batch;
    struct colo_linear_saved offsets = colo_linear_nowhere;
    colo_linear_logprob_upstream_t up;
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_set_size(linear, pass, 0, 0, &call.size);
    colo_status_t st = check_forward(&call, given, out, pass);
    COLO_THEN(
        st, check_saving(linear, early, upstream, &up, saved, saved_memory, &call.size, &offsets));
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear logprob forward", st));
    colo_linear_logprob_saved_t made = {
        .of = linear,
        .hidden = *batch->hidden,
        .targets = *batch->targets,
        .support = colo_loss_save_support(batch->support),
        .hidden_version = colo_loss_version(batch->hidden),
        .targets_version = colo_loss_version(batch->targets),
        .max_valid = batch->max_valid,
        .memory = saved_memory,
        .d_weight = colo_linear_shares(&call.size) ? saved->d_weight : NULL,
        .valid = true,
    };
    if (linear->config.logprob.has_class_weight) {
        made.class_weight = *batch->class_weight;
        made.class_weight_version = colo_loss_version(batch->class_weight);
    }
    if (batch->lora) {
        made.lora_a = *batch->lora->a;
        made.lora_b = *batch->lora->b;
        made.lora_scale = batch->lora->scale;
        made.lora_version = colo_loss_version(&made.lora_a) + colo_loss_version(&made.lora_b);
    }
    colo_lm_head_bound(linear->head, &made.weight_version);
    colo_linear_place_saved(&call, saved_memory, &offsets);
    call.shared = made.d_weight;
    const struct colo_linear_tokens tokens = {.hidden = batch->hidden,
                                              .targets = batch->targets,
                                              .support = &made.support,
                                              .class_weight = made.class_weight.data,
                                              .lora = batch->lora,
                                              .temperature = colo_loss_address(batch->temperature)};
    COLO_TRY(colo_linear_run(&call, &tokens, call.size.makes_d_logits ? &up : NULL));
    return saved ? COLO_SIZED_WRITE(saved, &made, saved_what, saved_init) : COLO_OK;
}

colo_status_t colo_linear_logprob_forward(colo_linear_logprob_t *linear,
                                          const colo_linear_logprob_batch_t *batch,
                                          const colo_logprob_out_t *out,
                                          colo_linear_logprob_saved_t *saved, void *saved_memory,
                                          void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return forward(linear, batch, false, NULL, out, saved, saved_memory, workspace, stream);
}

colo_status_t colo_linear_logprob_early(colo_linear_logprob_t *linear,
                                        const colo_linear_logprob_batch_t *batch,
                                        const colo_linear_logprob_upstream_t *upstream,
                                        const colo_logprob_out_t *out,
                                        colo_linear_logprob_saved_t *saved, void *saved_memory,
                                        void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return forward(linear, batch, true, upstream, out, saved, saved_memory, workspace, stream);
}

/* ---- backward ---- */

static colo_status_t
check_backward(struct colo_linear_call *call, const colo_linear_logprob_saved_t *saved,
               const colo_linear_logprob_upstream_t *upstream, colo_linear_logprob_upstream_t *up,
               const colo_linear_logprob_grads_t *grads, struct colo_linear_saved *offsets)
{
    const colo_linear_logprob_t *linear = call->linear;
    COLO_TRY(colo_linear_check_saved(linear, saved));
    COLO_TRY(colo_linear_check_upstream(linear, upstream, saved->hidden.shape[0],
                                        linear->config.mode == COLO_LINEAR_LOGPROB_EARLY, up));
    COLO_TRY(colo_linear_check_grads(linear, grads, &saved->hidden));
    return colo_linear_place_backward(call, saved->hidden.shape[0], saved->max_valid, grads,
                                      saved->memory, saved->d_weight, offsets);
}

colo_status_t colo_linear_logprob_backward(colo_linear_logprob_t *linear,
                                           colo_linear_logprob_saved_t *saved,
                                           const colo_linear_logprob_upstream_t *upstream,
                                           const colo_linear_logprob_grads_t *grads,
                                           void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    struct colo_linear_saved offsets;
    colo_linear_logprob_upstream_t up;
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_BACKWARD, 0, 0, &call.size);
    colo_status_t st = check_backward(&call, saved, upstream, &up, grads, &offsets);
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear logprob backward", st));
    if (!colo_linear_makes_grads(&call.size))
        return COLO_OK;
    colo_linear_place_saved(&call, saved->memory, &offsets);
    call.shared = saved->d_weight;
    const bool weighs = linear->config.logprob.has_class_weight;
    const bool narrow = linear->config.lora > 0;
    const colo_lora_t lora = {&saved->lora_a, &saved->lora_b, narrow ? saved->lora_scale : 0};
    const struct colo_linear_tokens tokens = {.hidden = &saved->hidden,
                                              .targets = &saved->targets,
                                              .support = &saved->support,
                                              .class_weight =
                                                  weighs ? saved->class_weight.data : NULL,
                                              .lora = narrow ? &lora : NULL};
    COLO_TRY(colo_linear_run(&call, &tokens, &up));
    if ((call.size.keeps && call.size.in_place) || colo_linear_shares(&call.size))
        saved->valid = false;
    return COLO_OK;
}

/* ---- loss ---- */

colo_status_t colo_linear_logprob_loss(colo_linear_logprob_t *linear,
                                       const colo_linear_logprob_batch_t *given,
                                       const colo_linear_logprob_upstream_t *upstream,
                                       const colo_logprob_out_t *out,
                                       const colo_linear_logprob_grads_t *grads, void *workspace,
                                       colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    const colo_linear_logprob_batch_t *batch = &call.batch;
    colo_linear_logprob_upstream_t up;
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_LOSS, 0, 0, &call.size);
    colo_status_t st = check_forward(&call, given, out, COLO_LINEAR_LOGPROB_LOSS);
    COLO_THEN(st, colo_linear_check_upstream(linear, upstream, call.size.tokens, false, &up));
    COLO_THEN(st, colo_linear_check_grads(linear, grads, batch->hidden));
    COLO_THEN(st, colo_linear_place_grads(&call, grads));
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear logprob loss", st));
    const colo_support_saved_t support = colo_loss_save_support(batch->support);
    colo_linear_place_saved(&call, NULL, &colo_linear_nowhere);
    const struct colo_linear_tokens tokens = {.hidden = batch->hidden,
                                              .targets = batch->targets,
                                              .support = &support,
                                              .class_weight =
                                                  colo_loss_address(batch->class_weight),
                                              .lora = batch->lora,
                                              .temperature = colo_loss_address(batch->temperature)};
    return colo_linear_run(&call, &tokens, &up);
}
