/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_logprob.c - the lm_head path: the object, and what each call checks, runs and tells.
 *
 * A call has three parts. Its arguments are checked, all of them, before anything is written
 * (check.c); the verdict goes to both groups that would otherwise wait, the vocabulary's and
 * the head's; then one pipeline runs (pipeline.c). A rank whose arguments are wrong tells the
 * groups before it returns; one that fails later marks them failed.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "core/range.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the object ---- */

colo_status_t colo_linear_logprob_create(colo_linear_logprob_t **linear,
                                         const colo_linear_logprob_config_t *config,
                                         colo_lm_head_t *head, colo_comm_t *group)
{
    COLO_RANGE();
    colo_status_t st;
    colo_linear_logprob_config_t own;
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    COLO_FAIL_IF(!group, COLO_ERR_ARG,
                 "linear: group is NULL; colo_comm_create_self() makes one "
                 "of one rank");
    COLO_TRY(colo_linear_check_config(config, head, group, &own));
    const colo_lm_head_config_t *head_config = colo_lm_head_config(head);
    colo_linear_logprob_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "linear: %zu bytes", sizeof *made);
    *made = (colo_linear_logprob_t){
        .config = own,
        .head = head,
        .group = group,
        .dtype = head_config->dtype,
        .stat_dtype = colo_logprob_stat_dtype(head_config->dtype),
        .columns = head_config->rows,
        .hidden = head_config->hidden,
        .has_bias = head_config->has_bias,
    };
    const struct colo_linear_shape shape = {
        .device = head_config->device,
        .dtype = head_config->dtype,
        .logits_dtype = own.logits_dtype,
        .sum_dtype = head_config->dtype == COLO_F64 ? COLO_F64 : COLO_F32,
        .columns = own.logprob.segment > 0 ? own.logprob.segment : head_config->rows,
        .hidden = head_config->hidden,
        .pinned = own.logprob.segment > 0,
        .gemm = head_config->gemm,
    };
    COLO_TRY_GOTO(st, colo_device_for(head_config->mem, &made->device), fail);
    COLO_TRY_GOTO(st, colo_loss_kernels_for(head_config->mem, &made->kernels), fail);
    COLO_TRY_GOTO(st, made->device->stream_create(COLO_LINEAR_EVENTS, &made->aux), fail);
    COLO_TRY_GOTO(st, made->kernels->gemm->create(&shape, &made->gemm), fail);
    *linear = made;
    return COLO_OK;
fail:
    colo_linear_logprob_destroy(&made);
    return st;
}

void colo_linear_logprob_destroy(colo_linear_logprob_t **linear)
{
    colo_linear_logprob_t *object = linear ? *linear : NULL;
    if (!object)
        return;
    if (object->gemm)
        object->kernels->gemm->destroy(object->gemm);
    if (object->device)
        object->device->stream_destroy(object->aux);
    free(object);
    *linear = NULL;
}

/* ---- the other ranks ---- */

/* Which groups a pass has collectives with. */
static colo_comm_t *head_group(const colo_linear_logprob_t *linear,
                               const struct colo_linear_size *size)
{
    return size->takes_head || size->makes_d_weight ? colo_lm_head_group(linear->head) : NULL;
}

static colo_comm_t *vocab_group(const colo_linear_logprob_t *linear,
                                const struct colo_linear_size *size)
{
    bool sums = size->makes_d_lora ||
                (size->makes_d_hidden && linear->config.d_hidden != COLO_D_HIDDEN_PARTIAL);
    return size->pass != COLO_LINEAR_LOGPROB_BACKWARD || sums ? linear->group : NULL;
}

/* Tells every rank that would wait for this one whether its arguments are valid. @size may be of a
 * batch that is refused: then it says what the others, whose batch is right, will do. */
static colo_status_t ready(const colo_linear_logprob_t *linear, const struct colo_linear_size *size,
                           const char *what, colo_status_t mine)
{
    colo_comm_t *head = head_group(linear, size), *vocab = vocab_group(linear, size);
    const bool backward = size->pass == COLO_LINEAR_LOGPROB_BACKWARD;
    char call[160]; /* ranks compare it with COLO_CHECK=2 */
    if (head) {
        const bool trains =
            !linear->config.frozen_weight && size->pass != COLO_LINEAR_LOGPROB_INFERENCE;
        snprintf(call, sizeof call, "%s%s", what,
                 backward || !trains ? "" : ", whose backward adds up gradients of the head");
        mine = colo_loss_ready(head, call, mine);
    }
    if (vocab) {
        const bool sums = colo_linear_sums(linear, size->pass);
        snprintf(call, sizeof call, "%s%s%s", what,
                 backward || !sums ? "" : ", whose backward adds up gradients of hidden",
                 backward || !colo_linear_sums_lora(linear, size->pass)
                     ? ""
                     : ", whose backward adds up gradients of a LoRA");
        mine = colo_loss_ready(vocab, call, mine);
    }
    return mine;
}

/* A failure inside: no rank may wait for this one. If all ranks have seen that they differ, their
 * vocabulary group lives on; the head's other ranks have not. */
static colo_status_t end_call(const struct colo_linear_call *call, colo_status_t st)
{
    colo_comm_t *head = head_group(call->linear, &call->size),
                *vocab = vocab_group(call->linear, &call->size);
    if (st >= 0)
        return st;
    if (colo_lm_head_group(call->linear->head) &&
        colo_lm_head_state(call->linear->head) == COLO_LM_HEAD_AVAILABLE)
        colo_lm_head_release(call->linear->head, call->main);
    if (head && colo_comm_size(head) > 1)
        colo_comm_fail(head, st);
    if (vocab && colo_comm_size(vocab) > 1 &&
        !(st == COLO_ERR_MISMATCH &&
          colo_loss_all_compare(vocab, colo_lm_head_config(call->linear->head)->mem)))
        colo_comm_fail(vocab, st);
    const colo_error_t why = colo_error_save();
    /* the workspace is the caller's again after @main's work so far */
    (void)colo_linear_join(call);
    return colo_error_restore(st, &why);
}

/* What the largest upstream value becomes, for d_logits that hold it times scale / temperature and
 * times coefficients of the formula: far from the ends of fp16. A power of 2. */
static double lift_of(const struct colo_linear_call *call)
{
    const double factor = fabs(call->args.factor);
    return ldexp(1, call->linear->dtype == COLO_F16 && factor > 0x1p-60 ? 6 - ilogb(factor) : 0);
}

static colo_status_t make_upstream(struct colo_linear_call *call,
                                   const colo_linear_logprob_upstream_t *up)
{
    const bool wanted[] = {up->logp != 0, up->entropy != 0, up->loss != 0, up->lse != 0};
    struct colo_linear_upstream_rows rows = {
        .rows = &call->rows,
        .dtype = call->linear->stat_dtype,
        .from = {colo_loss_address(up->d_logp), colo_loss_address(up->d_entropy),
                 colo_loss_address(up->d_loss), colo_loss_address(up->d_lse)},
        .factor = {up->logp, up->entropy, up->loss, up->lse},
        .mean = up->mean,
        .scale = call->scale ? call->scale : colo_linear_place(call->workspace, call->memory.scale),
        .lift = lift_of(call),
        .exact = call->size.segment > 0,
    };
    for (int i = 0; i < COLO_LINEAR_UPS; i++)
        rows.to[i] = wanted[i] ? colo_linear_place(call->workspace, call->memory.up[i]) : NULL;
    if (call->linear->config.logprob.has_temperature &&
        call->size.pass == COLO_LINEAR_LOGPROB_BACKWARD)
        rows.row_coldness =
            call->args.saved +
            (colo_logprob_saved_numbers(&call->linear->config.logprob) - 1) * call->size.rows;
    else
        rows.temperature = call->args.temperature;
    call->scale = rows.scale;
    call->args.upstream = (struct colo_logprob_upstream){
        .d_logp = rows.to[0], .d_entropy = rows.to[1], .d_loss = rows.to[2], .d_lse = rows.to[3]};
    return call->linear->kernels->rows_upstream(&rows, call->main);
}

/* Mode early, backward: the scale of the saved d_logits becomes this call's. */
static colo_status_t make_factor(struct colo_linear_call *call,
                                 const colo_linear_logprob_upstream_t *up)
{
    const struct colo_linear_factor factor = {
        .to = colo_linear_place(call->workspace, call->memory.scale),
        .from = call->scale,
        .by = colo_loss_address(up->d_loss),
        .factor = up->loss};
    call->scale = factor.to;
    return call->linear->kernels->rows_factor(&factor, call->main);
}

static const struct colo_linear_saved nowhere = {-1, -1, -1, -1, 0};

/* Where forward and backward meet; @memory NULL: they do not. */
static void place_saved(struct colo_linear_call *call, void *memory,
                        const struct colo_linear_saved *offsets)
{
    call->stats = call->memory.stats >= 0 ? colo_linear_place(call->workspace, call->memory.stats)
                                          : colo_linear_place(memory, offsets->stats);
    call->saved_logits =
        colo_linear_place(memory, call->size.early ? offsets->d_logits : offsets->logits);
    call->scale = colo_linear_place(memory, offsets->scale);
}

/* A call whose arguments are checked. @up: of its d_logits; NULL: it makes none */
static colo_status_t run(struct colo_linear_call *call, const struct colo_linear_tokens *tokens,
                         const colo_linear_logprob_upstream_t *up)
{
    colo_status_t st = colo_linear_begin(call, tokens);
    if (st == COLO_OK && up)
        st = call->size.early && call->size.pass == COLO_LINEAR_LOGPROB_BACKWARD
                 ? make_factor(call, up)
                 : make_upstream(call, up);
    COLO_THEN(st, colo_linear_pipeline(call));
    return end_call(call, st);
}

/* Checks the head's gradients; writes nothing. Before begin */
static colo_status_t place_grads(struct colo_linear_call *call,
                                 const colo_linear_logprob_grads_t *grads)
{
    const colo_linear_logprob_config_t *config = &call->linear->config;
    if (!config->frozen_hidden) {
        const colo_tensor_t *d_hidden = grads->d_hidden;
        call->d_hidden_out = d_hidden;
        call->d_hidden =
            (struct colo_linear_matrix){d_hidden->data, d_hidden->stride[0], d_hidden->dtype};
        if (config->d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER)
            call->d_hidden = (struct colo_linear_matrix){
                colo_linear_place(call->workspace, call->memory.d_hidden), call->linear->hidden,
                d_hidden->dtype};
    }
    if (!config->frozen_lora) {
        const colo_tensor_t *a = grads->d_lora_a, *b = grads->d_lora_b;
        call->d_lora_a = (struct colo_linear_matrix){a->data, a->stride[0], a->dtype};
        call->d_lora_b = (struct colo_linear_matrix){b->data, b->stride[0], b->dtype};
    }
    if (config->frozen_weight)
        return COLO_OK;
    call->head_grads = (colo_lm_head_grads_t){COLO_LM_HEAD_GRADS_INIT, grads->d_weight,
                                              grads->d_bias, config->d_weight_add};
    return colo_lm_head_open_sums(call->linear->head, &call->head_grads, call->size.once,
                                  colo_linear_place(call->workspace, call->memory.reduce),
                                  &call->d_weight, &call->d_bias, &call->fresh);
}

/* Does d_weight's memory hold d_logits? */
static bool shares(const struct colo_linear_size *size)
{
    return size->early && size->inside > 0;
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
    return shares(size) ? colo_linear_check_memory(saved->d_weight, "saved.d_weight", 1) : COLO_OK;
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
    struct colo_linear_saved offsets = nowhere;
    colo_linear_logprob_upstream_t up;
    COLO_FAIL_IF(!linear, COLO_ERR_ARG, "linear: linear is NULL");
    colo_linear_set_size(linear, pass, 0, 0, &call.size);
    colo_status_t st = check_forward(&call, given, out, pass);
    COLO_THEN(
        st, check_saving(linear, early, upstream, &up, saved, saved_memory, &call.size, &offsets));
    COLO_TRY(ready(linear, &call.size, "linear logprob forward", st));
    colo_linear_logprob_saved_t made = {
        .of = linear,
        .hidden = *batch->hidden,
        .targets = *batch->targets,
        .support = colo_loss_save_support(batch->support),
        .hidden_version = colo_loss_version(batch->hidden),
        .targets_version = colo_loss_version(batch->targets),
        .max_valid = batch->max_valid,
        .memory = saved_memory,
        .d_weight = shares(&call.size) ? saved->d_weight : NULL,
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
    place_saved(&call, saved_memory, &offsets);
    call.shared = made.d_weight;
    const struct colo_linear_tokens tokens = {batch->hidden, batch->targets,
                                              &made.support, made.class_weight.data,
                                              batch->lora,   colo_loss_address(batch->temperature)};
    COLO_TRY(run(&call, &tokens, call.size.makes_d_logits ? &up : NULL));
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
    COLO_TRY(colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_BACKWARD, saved->hidden.shape[0],
                                  saved->max_valid, &call->size));
    COLO_TRY(colo_linear_set_memory(linear, &call->size, &call->memory));
    COLO_TRY(colo_linear_check_memory(call->workspace, "workspace", call->memory.bytes));
    COLO_TRY(place_grads(call, grads));
    COLO_TRY(colo_linear_set_saved(linear, &call->size, offsets));
    COLO_FAIL_IF(shares(&call->size) && (grads->d_weight->data != saved->d_weight ||
                                         !colo_tensor_is_contiguous(grads->d_weight)),
                 COLO_ERR_ARG,
                 "d_weight: at %p, rows %" PRId64 " elements apart, expected saved.d_weight, "
                 "%p, without gaps: it holds gradients of logits",
                 grads->d_weight->data, grads->d_weight->stride[0], saved->d_weight);
    return colo_linear_check_memory(saved->memory, "saved memory", offsets->bytes);
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
    COLO_TRY(ready(linear, &call.size, "linear logprob backward", st));
    if (!colo_linear_makes_grads(&call.size))
        return COLO_OK;
    place_saved(&call, saved->memory, &offsets);
    call.shared = saved->d_weight;
    const bool weighs = linear->config.logprob.has_class_weight;
    const bool narrow = linear->config.lora > 0;
    const colo_lora_t lora = {&saved->lora_a, &saved->lora_b, narrow ? saved->lora_scale : 0};
    const struct colo_linear_tokens tokens = {
        &saved->hidden,        &saved->targets,
        &saved->support,       weighs ? saved->class_weight.data : NULL,
        narrow ? &lora : NULL, NULL};
    COLO_TRY(run(&call, &tokens, &up));
    if ((call.size.keeps && call.size.in_place) || shares(&call.size))
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
    COLO_THEN(st, place_grads(&call, grads));
    COLO_TRY(ready(linear, &call.size, "linear logprob loss", st));
    const colo_support_saved_t support = colo_loss_save_support(batch->support);
    place_saved(&call, NULL, &nowhere);
    const struct colo_linear_tokens tokens = {batch->hidden, batch->targets,
                                              &support,      colo_loss_address(batch->class_weight),
                                              batch->lora,   colo_loss_address(batch->temperature)};
    return run(&call, &tokens, &up);
}
