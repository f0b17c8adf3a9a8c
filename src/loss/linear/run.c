/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - one call whose arguments are checked: it tells the other ranks, finds its memory, makes
 * upstream gradients of rows, runs the pipeline, and ends.
 *
 * A rank whose arguments are wrong tells the groups that would wait for it before it returns; one
 * that fails later marks them failed.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"

#include <math.h>
#include <stdio.h>

/* ---- the object ---- */

colo_status_t colo_linear_open_products(const colo_lm_head_t *head, colo_dtype_t logits,
                                        int64_t segment, void **made)
{
    const colo_lm_head_config_t *config = colo_lm_head_config(head);
    const colo_loss_kernels_t *kernels;
    const struct colo_linear_shape shape = {
        .device = config->device,
        .dtype = config->dtype,
        .logits_dtype = logits,
        .sum_dtype = config->dtype == COLO_F64 ? COLO_F64 : COLO_F32,
        .columns = segment > 0 ? segment : config->rows,
        .hidden = config->hidden,
        .pinned = segment > 0,
        .gemm = config->gemm,
    };
    COLO_TRY(colo_loss_kernels_for(config->mem, &kernels));
    return kernels->gemm->create(&shape, made);
}

colo_status_t colo_linear_open(colo_linear_logprob_t *linear,
                               const colo_linear_logprob_config_t *config, colo_lm_head_t *head,
                               colo_comm_t *group)
{
    colo_status_t st;
    colo_linear_logprob_config_t own;
    COLO_FAIL_IF(!group, COLO_ERR_ARG,
                 "linear: group is NULL; colo_comm_create_self() makes one "
                 "of one rank");
    COLO_TRY(colo_linear_check_config(config, head, group, &own));
    const colo_lm_head_config_t *head_config = colo_lm_head_config(head);
    *linear = (colo_linear_logprob_t){
        .config = own,
        .head = head,
        .group = group,
        .dtype = head_config->dtype,
        .stat_dtype = colo_logprob_stat_dtype(head_config->dtype),
        .columns = head_config->rows,
        .hidden = head_config->hidden,
        .has_bias = head_config->has_bias,
    };
    COLO_TRY_GOTO(st, colo_device_for(head_config->mem, &linear->device), fail);
    COLO_TRY_GOTO(st, colo_loss_kernels_for(head_config->mem, &linear->kernels), fail);
    COLO_TRY_GOTO(st, linear->device->stream_create(COLO_LINEAR_EVENTS, &linear->aux), fail);
    COLO_TRY_GOTO(
        st, colo_linear_open_products(head, own.logits_dtype, own.logprob.segment, &linear->gemm),
        fail);
    return COLO_OK;
fail:
    colo_linear_close(linear);
    return st;
}

void colo_linear_close(colo_linear_logprob_t *linear)
{
    if (linear->gemm)
        linear->kernels->gemm->destroy(linear->gemm);
    if (linear->device)
        linear->device->stream_destroy(linear->aux);
}

/* ---- the other ranks ---- */

/* Which groups a pass has collectives with. */
static colo_comm_t *head_group(const colo_linear_logprob_t *linear,
                               const struct colo_linear_size *size)
{
    return size->takes_head || size->makes_d_weight ? colo_lm_head_group(linear->head) : NULL;
}

static colo_comm_t *teacher_group(const colo_linear_logprob_t *linear,
                                  const struct colo_linear_size *size)
{
    return linear->teacher && size->makes_logits ? colo_lm_head_group(linear->teacher->head) : NULL;
}

static colo_comm_t *vocab_group(const colo_linear_logprob_t *linear,
                                const struct colo_linear_size *size)
{
    bool sums = size->makes_d_lora ||
                (size->makes_d_hidden && linear->config.d_hidden != COLO_D_HIDDEN_PARTIAL);
    return size->pass != COLO_LINEAR_LOGPROB_BACKWARD || sums ? linear->group : NULL;
}

colo_status_t colo_linear_ready(const colo_linear_logprob_t *linear,
                                const struct colo_linear_size *size, const char *what,
                                colo_status_t mine)
{
    colo_comm_t *head = head_group(linear, size), *vocab = vocab_group(linear, size),
                *teacher = teacher_group(linear, size);
    const bool backward = size->pass == COLO_LINEAR_LOGPROB_BACKWARD;
    char call[160]; /* ranks compare it with COLO_CHECK=2 */
    if (head) {
        const bool trains =
            !linear->config.frozen_weight && size->pass != COLO_LINEAR_LOGPROB_INFERENCE;
        snprintf(call, sizeof call, "%s%s", what,
                 backward || !trains ? "" : ", whose backward adds up gradients of the head");
        mine = colo_loss_ready(head, call, mine);
    }
    if (teacher && teacher != head)
        mine = colo_loss_ready(teacher, what, mine);
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

static void release(colo_lm_head_t *head, colo_stream_t stream)
{
    if (colo_lm_head_group(head) && colo_lm_head_state(head) == COLO_LM_HEAD_AVAILABLE)
        colo_lm_head_release(head, stream);
}

/* A failure inside: no rank may wait for this one. If all ranks have seen that they differ, their
 * vocabulary group lives on; the head's other ranks have not. */
static colo_status_t end_call(const struct colo_linear_call *call, colo_status_t st)
{
    colo_comm_t *head = head_group(call->linear, &call->size),
                *vocab = vocab_group(call->linear, &call->size),
                *teacher = teacher_group(call->linear, &call->size);
    if (st >= 0)
        return st;
    release(call->linear->head, call->main);
    if (call->linear->teacher)
        release(call->linear->teacher->head, call->main);
    if (head && colo_comm_size(head) > 1)
        colo_comm_fail(head, st);
    if (teacher && colo_comm_size(teacher) > 1)
        colo_comm_fail(teacher, st);
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

const struct colo_linear_saved colo_linear_nowhere = {-1, -1, -1, -1, 0};

void colo_linear_place_saved(struct colo_linear_call *call, void *memory,
                             const struct colo_linear_saved *offsets)
{
    call->stats = call->memory.stats >= 0 ? colo_linear_place(call->workspace, call->memory.stats)
                                          : colo_linear_place(memory, offsets->stats);
    call->saved_logits =
        colo_linear_place(memory, call->size.early ? offsets->d_logits : offsets->logits);
    call->scale = colo_linear_place(memory, offsets->scale);
}

colo_status_t colo_linear_run(struct colo_linear_call *call,
                              const struct colo_linear_tokens *tokens,
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

colo_status_t colo_linear_place_grads(struct colo_linear_call *call,
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

colo_status_t colo_linear_place_backward(struct colo_linear_call *call, int64_t tokens,
                                         int64_t max_valid,
                                         const colo_linear_logprob_grads_t *grads,
                                         const void *memory, const void *d_weight,
                                         struct colo_linear_saved *offsets)
{
    const colo_linear_logprob_t *linear = call->linear;
    COLO_TRY(
        colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_BACKWARD, tokens, max_valid, &call->size));
    COLO_TRY(colo_linear_set_memory(linear, &call->size, &call->memory));
    COLO_TRY(colo_linear_check_memory(call->workspace, "workspace", call->memory.bytes));
    COLO_TRY(colo_linear_place_grads(call, grads));
    COLO_TRY(colo_linear_set_saved(linear, &call->size, offsets));
    COLO_TRY(colo_linear_check_shared(&call->size, grads, d_weight));
    return colo_linear_check_memory(memory, "saved memory", offsets->bytes);
}
