/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_distill.c - a divergence from hidden states: what differs from linear_logprob.c, which is
 * the object with a teacher, what is checked of a batch, and what backward needs.
 *
 * The pass is the lm_head path's (run.c, pipeline.c): an object with a teacher makes logits with
 * two heads, and hands both to the kernels of distill-args.h. Tokens are packed by a mask.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include <colobridge/linear_distill.h>

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "core/range.h"

#include <inttypes.h>
#include <stdlib.h>

struct colo_linear_distill {
    colo_linear_logprob_t linear;
    struct colo_linear_teacher teacher;
};

/* ---- the object ---- */

/* A rank's columns of the vocabulary that a head has. */
static int64_t columns_of(const colo_linear_distill_config_t *own, const colo_lm_head_t *head)
{
    const int64_t rows = colo_lm_head_config(head)->rows,
                  left = own->distill.logits.vocab - own->distill.logits.vocab_start;
    return left < 0 ? 0 : rows < left ? rows : left;
}

static colo_status_t check_teacher(const colo_linear_distill_config_t *own,
                                   const colo_lm_head_t *head, const colo_lm_head_t *teacher,
                                   const colo_comm_t *group)
{
    COLO_FAIL_IF(!teacher, COLO_ERR_ARG,
                 "linear distill: teacher is NULL; colo_lm_head_create() makes one");
    const colo_lm_head_config_t *of = colo_lm_head_config(head),
                                *its = colo_lm_head_config(teacher);
    const colo_dtype_t sums = its->dtype == COLO_F64 ? COLO_F64 : COLO_F32,
                       y = own->teacher_logits_dtype;
    COLO_FAIL_IF(
        teacher == head, COLO_ERR_ARG,
        "linear distill: head and teacher are one object, expected two; both may be bound to "
        "one weight");
    COLO_FAIL_IF(
        of->mem != its->mem || (of->mem != COLO_MEM_HOST && of->device != its->device),
        COLO_ERR_ARG,
        "linear distill: the teacher's head is in memory %d of device %d, the other in memory "
        "%d of device %d",
        (int)its->mem, (int)its->device, (int)of->mem, (int)of->device);
    COLO_FAIL_IF(
        (y != COLO_F32 && y != own->logits_dtype) || (y != sums && y != its->dtype), COLO_ERR_ARG,
        "linear distill: teacher_logits_dtype %s, expected f32, or the %s of the student's logits "
        "if "
        "it is the teacher's head's, too, which is %s",
        colo_dtype_name(y), colo_dtype_name(own->logits_dtype), colo_dtype_name(its->dtype));
    COLO_FAIL_IF(columns_of(own, teacher) != columns_of(own, head), COLO_ERR_SHAPE,
                 "linear distill: the teacher's head has %" PRId64 " of the %" PRId64
                 " columns from %" PRId64 " on, the other %" PRId64 ", expected the same on a rank",
                 columns_of(own, teacher), own->distill.logits.vocab,
                 own->distill.logits.vocab_start, columns_of(own, head));
    COLO_FAIL_IF(own->teacher_lora < 0 || own->teacher_lora > INT64_MAX / 4096, COLO_ERR_ARG,
                 "linear distill: teacher_lora is %" PRId64 ", expected the rows of A, or 0",
                 own->teacher_lora);
    return colo_linear_check_apart(colo_lm_head_group(teacher), group);
}

static colo_status_t read_config(const colo_linear_distill_config_t *given,
                                 colo_linear_distill_config_t *own)
{
    *own = (colo_linear_distill_config_t){COLO_LINEAR_DISTILL_CONFIG_INIT};
    COLO_TRY(COLO_SIZED_READ(own, given, mode, "linear distill: config",
                             "COLO_LINEAR_DISTILL_CONFIG_INIT"));
    COLO_TRY(colo_distill_config_check(&own->distill));
    COLO_FAIL_IF(own->distill.targets != COLO_DISTILL_LOGITS, COLO_ERR_ARG,
                 "linear distill: targets is %d, expected logits (0)", (int)own->distill.targets);
    COLO_FAIL_IF(
        own->distill.has_temperature || own->distill.has_target_temperature, COLO_ERR_ARG,
        "linear distill: has_temperature is %d, has_target_temperature %d, expected false: "
        "tokens have no temperatures of their own here; colo_distill_forward() takes them",
        own->distill.has_temperature, own->distill.has_target_temperature);
    COLO_FAIL_IF(
        own->mode != COLO_LINEAR_LOGPROB_AUTO && own->mode != COLO_LINEAR_LOGPROB_LOGPROB &&
            own->mode != COLO_LINEAR_LOGPROB_EARLY,
        COLO_ERR_ARG, "linear distill: mode is %d, expected auto (%d), logprob (%d) or early (%d)",
        (int)own->mode, (int)COLO_LINEAR_LOGPROB_AUTO, (int)COLO_LINEAR_LOGPROB_LOGPROB,
        (int)COLO_LINEAR_LOGPROB_EARLY);
    return COLO_OK;
}

/* Its loss is the divergence; targets are 1, or 0 where the mask is. */
static colo_linear_logprob_config_t linear_of(const colo_linear_distill_config_t *own)
{
    colo_linear_logprob_config_t linear = {
        .struct_size = sizeof(colo_linear_logprob_config_t),
        .logprob = {COLO_LOGPROB_CONFIG_INIT, .order = own->distill.order, .want_loss = true,
                    .chunk_size = own->chunk_size},
        .mode = own->mode == COLO_LINEAR_LOGPROB_EARLY ? own->mode : COLO_LINEAR_LOGPROB_LOGPROB,
        .logits_dtype = own->logits_dtype,
        .budget = own->budget,
        .d_hidden = own->d_hidden,
        .frozen_hidden = own->frozen_hidden,
        .frozen_weight = own->frozen_weight,
        .d_weight_dtype = own->d_weight_dtype,
        .d_weight_add = own->d_weight_add,
        .share_d_weight = own->share_d_weight,
        .lora = own->lora,
        .frozen_lora = own->frozen_lora,
    };
    linear.logprob.logits = own->distill.logits;
    linear.logprob.ignore_index = 0;
    return linear;
}

static colo_status_t open_teacher(colo_linear_distill_t *made,
                                  const colo_linear_distill_config_t *own, colo_lm_head_t *head)
{
    const colo_lm_head_config_t *of = colo_lm_head_config(head);
    made->teacher = (struct colo_linear_teacher){
        .config = own->distill,
        .head = head,
        .dtype = of->dtype,
        .logits_dtype = own->teacher_logits_dtype,
        .columns = of->rows,
        .hidden = of->hidden,
        .lora = own->teacher_lora,
        .has_bias = of->has_bias,
    };
    made->linear.teacher = &made->teacher;
    return colo_linear_open_products(head, own->teacher_logits_dtype, 0, &made->teacher.gemm);
}

colo_status_t colo_linear_distill_create(colo_linear_distill_t **distill,
                                         const colo_linear_distill_config_t *config,
                                         colo_lm_head_t *head, colo_lm_head_t *teacher,
                                         colo_comm_t *group)
{
    COLO_RANGE();
    colo_linear_distill_config_t own;
    COLO_FAIL_IF(!distill, COLO_ERR_ARG, "linear distill: distill is NULL");
    COLO_TRY(read_config(config, &own));
    const colo_linear_logprob_config_t linear = linear_of(&own);
    colo_linear_distill_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "linear distill: %zu bytes", sizeof *made);
    colo_status_t st = colo_linear_open(&made->linear, &linear, head, group);
    if (st < 0) {
        free(made);
        return st;
    }
    st = check_teacher(&own, head, teacher, group);
    COLO_THEN(st, open_teacher(made, &own, teacher));
    if (st < 0) {
        colo_linear_distill_destroy(&made);
        return st;
    }
    *distill = made;
    return COLO_OK;
}

void colo_linear_distill_destroy(colo_linear_distill_t **distill)
{
    colo_linear_distill_t *object = distill ? *distill : NULL;
    if (!object)
        return;
    if (object->teacher.gemm)
        object->linear.kernels->gemm->destroy(object->teacher.gemm);
    colo_linear_close(&object->linear);
    free(object);
    *distill = NULL;
}

colo_status_t colo_linear_distill_saved_size(const colo_linear_distill_t *distill, int64_t tokens,
                                             int64_t max_valid, size_t *bytes)
{
    return colo_linear_logprob_saved_size(distill ? &distill->linear : NULL, tokens, max_valid,
                                          bytes);
}

colo_status_t colo_linear_distill_workspace_size(const colo_linear_distill_t *distill,
                                                 colo_linear_logprob_pass_t pass, int64_t tokens,
                                                 int64_t max_valid, size_t *bytes)
{
    return colo_linear_logprob_workspace_size(distill ? &distill->linear : NULL, pass, tokens,
                                              max_valid, bytes);
}

/* ---- what a call gets ---- */

static colo_status_t check_count(const colo_linear_distill_batch_t *batch)
{
    const int64_t tokens = batch->hidden->shape[0];
    const colo_tensor_t *mask = batch->mask;
    int64_t count = mask ? 0 : tokens;
    if (batch->max_valid < 0 || (mask && mask->mem != COLO_MEM_HOST))
        return COLO_OK;
    for (int64_t token = 0; token < tokens && mask; token++)
        count += ((const uint8_t *)mask->data)[token * mask->stride[0]] != 0;
    COLO_FAIL_IF(count > batch->max_valid, COLO_ERR_ARG,
                 "linear distill: max_valid is %" PRId64 ", but %" PRId64 " of %" PRId64
                 " tokens count",
                 batch->max_valid, count, tokens);
    return COLO_OK;
}

static colo_status_t check_batch(const colo_linear_distill_t *distill,
                                 const colo_linear_distill_batch_t *given,
                                 colo_linear_distill_batch_t *batch)
{
    const colo_lm_head_t *head = distill->linear.head, *teacher = distill->teacher.head;
    *batch = (colo_linear_distill_batch_t){COLO_LINEAR_DISTILL_BATCH_INIT};
    COLO_TRY(COLO_SIZED_READ(batch, given, lora, "linear distill: batch",
                             "COLO_LINEAR_DISTILL_BATCH_INIT"));
    COLO_FAIL_IF(!batch->hidden || !batch->teacher_hidden, COLO_ERR_ARG,
                 "linear distill: %s is NULL", !batch->hidden ? "hidden" : "teacher_hidden");
    COLO_TRY(colo_linear_check_states(head, batch->hidden, "hidden", -1, false));
    COLO_TRY(colo_linear_check_states(teacher, batch->teacher_hidden, "teacher_hidden",
                                      batch->hidden->shape[0], false));
    COLO_TRY(colo_loss_check_mask(batch->mask, batch->hidden));
    COLO_TRY(colo_linear_check_lora(head, distill->linear.config.lora, batch->lora, "lora"));
    COLO_TRY(colo_linear_check_lora(teacher, distill->teacher.lora, batch->teacher_lora,
                                    "teacher_lora"));
    return check_count(batch);
}

static colo_status_t check_out(const colo_linear_distill_t *distill,
                               const colo_linear_distill_out_t *given, int64_t tokens,
                               struct colo_logprob_out *out)
{
    colo_linear_distill_out_t own = {COLO_LINEAR_DISTILL_OUT_INIT};
    COLO_TRY(
        COLO_SIZED_READ(&own, given, loss, "linear distill: out", "COLO_LINEAR_DISTILL_OUT_INIT"));
    const colo_logprob_out_t as = {COLO_LOGPROB_OUT_INIT, .loss = own.loss, .n_valid = own.n_valid,
                                   .n_invalid = own.n_invalid};
    return colo_linear_check_out(&distill->linear, &as, tokens, out);
}

static colo_status_t check_upstream(const colo_linear_distill_t *distill,
                                    const colo_linear_distill_upstream_t *given, int64_t tokens,
                                    bool factor, colo_linear_logprob_upstream_t *up)
{
    colo_linear_distill_upstream_t own = {COLO_LINEAR_DISTILL_UPSTREAM_INIT};
    COLO_TRY(COLO_SIZED_READ(&own, given, loss, "linear distill: upstream",
                             "COLO_LINEAR_DISTILL_UPSTREAM_INIT"));
    const colo_linear_logprob_upstream_t as = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .loss = own.loss,
                                               .d_loss = own.d_loss, .mean = own.mean};
    return colo_linear_check_upstream(&distill->linear, &as, tokens, factor, up);
}

/* Of one token's gradient others are read. */
static colo_status_t check_grads(const colo_linear_distill_t *distill,
                                 const colo_linear_logprob_grads_t *grads,
                                 const colo_tensor_t *hidden, const colo_tensor_t *teacher_hidden)
{
    COLO_TRY(colo_linear_check_grads(&distill->linear, grads, hidden));
    COLO_FAIL_IF(grads->d_hidden && teacher_hidden &&
                     colo_loss_ranges_overlap(grads->d_hidden, teacher_hidden),
                 COLO_ERR_ARG, "d_hidden: overlaps teacher_hidden");
    return COLO_OK;
}

static uint64_t version_of(const colo_lora_t *lora)
{
    return lora ? colo_loss_version(lora->a) + colo_loss_version(lora->b) : 0;
}

static struct colo_linear_tokens tokens_of(const colo_linear_distill_batch_t *batch)
{
    return (struct colo_linear_tokens){.hidden = batch->hidden,
                                       .lora = batch->lora,
                                       .teacher_hidden = batch->teacher_hidden,
                                       .mask = batch->mask,
                                       .teacher_lora = batch->teacher_lora};
}

/* ---- forward ---- */

static colo_status_t
check_forward(const colo_linear_distill_t *distill, struct colo_linear_call *call,
              const colo_linear_distill_batch_t *given, const colo_linear_distill_out_t *out,
              colo_linear_logprob_pass_t pass, colo_linear_distill_batch_t *batch)
{
    uint64_t version;
    COLO_TRY(check_batch(distill, given, batch));
    COLO_TRY(check_out(distill, out, batch->hidden->shape[0], &call->out));
    COLO_TRY(colo_lm_head_bound(distill->linear.head, &version));
    COLO_TRY(colo_lm_head_bound(distill->teacher.head, &version));
    COLO_TRY(colo_linear_set_size(&distill->linear, pass, batch->hidden->shape[0], batch->max_valid,
                                  &call->size));
    COLO_TRY(colo_linear_set_memory(&distill->linear, &call->size, &call->memory));
    return colo_linear_check_memory(call->workspace, "workspace", call->memory.bytes);
}

static const char saved_what[] = "linear distill: saved",
                  saved_init[] = "COLO_LINEAR_DISTILL_SAVED_INIT";

static colo_status_t check_saving(const colo_linear_distill_t *distill, bool early,
                                  const colo_linear_distill_upstream_t *upstream,
                                  colo_linear_logprob_upstream_t *up,
                                  const colo_linear_distill_saved_t *saved,
                                  const void *saved_memory, const struct colo_linear_size *size,
                                  struct colo_linear_saved *offsets)
{
    COLO_FAIL_IF(
        size->early != early, COLO_ERR_ARG,
        "linear distill: %s, but mode is %d and saved is %s; a forward that saves in mode "
        "early (%d) is colo_linear_distill_early(), others are colo_linear_distill_forward()",
        early ? "early" : "forward", (int)distill->linear.config.mode, saved ? "given" : "NULL",
        (int)COLO_LINEAR_LOGPROB_EARLY);
    if (early)
        COLO_TRY(check_upstream(distill, upstream, size->tokens, false, up));
    if (!saved)
        return saved_memory
                   ? colo_fail(COLO_ERR_ARG, "linear distill: saved memory is given, saved is NULL")
                   : COLO_OK;
    COLO_TRY(COLO_SIZED_CHECK(saved, lora_version, saved_what, saved_init));
    COLO_TRY(colo_linear_set_saved(&distill->linear, size, offsets));
    COLO_TRY(colo_linear_check_memory(saved_memory, "saved memory", offsets->bytes));
    return colo_linear_shares(size) ? colo_linear_check_memory(saved->d_weight, "saved.d_weight", 1)
                                    : COLO_OK;
}

static colo_linear_distill_saved_t saved_of(const colo_linear_distill_t *distill,
                                            const colo_linear_distill_batch_t *batch, void *memory,
                                            void *d_weight)
{
    colo_linear_distill_saved_t made = {
        .of = distill,
        .hidden = *batch->hidden,
        .teacher_hidden = *batch->teacher_hidden,
        .hidden_version = colo_loss_version(batch->hidden),
        .teacher_hidden_version = colo_loss_version(batch->teacher_hidden),
        .max_valid = batch->max_valid,
        .memory = memory,
        .d_weight = d_weight,
        .valid = true,
        .lora_version = version_of(batch->lora),
    };
    if (batch->mask) {
        made.mask = *batch->mask;
        made.mask_version = colo_loss_version(batch->mask);
    }
    if (batch->lora) {
        made.lora_a = *batch->lora->a;
        made.lora_b = *batch->lora->b;
        made.lora_scale = batch->lora->scale;
    }
    if (batch->teacher_lora) {
        made.teacher_lora_a = *batch->teacher_lora->a;
        made.teacher_lora_b = *batch->teacher_lora->b;
        made.teacher_lora_scale = batch->teacher_lora->scale;
    }
    (void)colo_lm_head_bound(distill->linear.head, &made.weight_version);
    (void)colo_lm_head_bound(distill->teacher.head, &made.teacher_version);
    made.teacher_version += version_of(batch->teacher_lora);
    return made;
}

/* @upstream: of mode early */
static colo_status_t forward(const colo_linear_distill_t *distill,
                             const colo_linear_distill_batch_t *given, bool early,
                             const colo_linear_distill_upstream_t *upstream,
                             const colo_linear_distill_out_t *out,
                             colo_linear_distill_saved_t *saved, void *saved_memory,
                             void *workspace, colo_stream_t stream)
{
    const colo_linear_logprob_pass_t pass =
        saved ? COLO_LINEAR_LOGPROB_FORWARD : COLO_LINEAR_LOGPROB_INFERENCE;
    COLO_FAIL_IF(!distill, COLO_ERR_ARG, "linear distill: distill is NULL");
    const colo_linear_logprob_t *linear = &distill->linear;
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    struct colo_linear_saved offsets = colo_linear_nowhere;
    colo_linear_distill_batch_t batch;
    colo_linear_logprob_upstream_t up;
    colo_linear_set_size(linear, pass, 0, 0, &call.size);
    colo_status_t st = check_forward(distill, &call, given, out, pass, &batch);
    COLO_THEN(
        st, check_saving(distill, early, upstream, &up, saved, saved_memory, &call.size, &offsets));
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear distill forward", st));
    const colo_linear_distill_saved_t made =
        saved_of(distill, &batch, saved_memory,
                 saved && colo_linear_shares(&call.size) ? saved->d_weight : NULL);
    colo_linear_place_saved(&call, saved_memory, &offsets);
    call.shared = made.d_weight;
    const struct colo_linear_tokens tokens = tokens_of(&batch);
    COLO_TRY(colo_linear_run(&call, &tokens, call.size.makes_d_logits ? &up : NULL));
    return saved ? COLO_SIZED_WRITE(saved, &made, saved_what, saved_init) : COLO_OK;
}

colo_status_t colo_linear_distill_forward(colo_linear_distill_t *distill,
                                          const colo_linear_distill_batch_t *batch,
                                          const colo_linear_distill_out_t *out,
                                          colo_linear_distill_saved_t *saved, void *saved_memory,
                                          void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return forward(distill, batch, false, NULL, out, saved, saved_memory, workspace, stream);
}

colo_status_t colo_linear_distill_early(colo_linear_distill_t *distill,
                                        const colo_linear_distill_batch_t *batch,
                                        const colo_linear_distill_upstream_t *upstream,
                                        const colo_linear_distill_out_t *out,
                                        colo_linear_distill_saved_t *saved, void *saved_memory,
                                        void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return forward(distill, batch, true, upstream, out, saved, saved_memory, workspace, stream);
}

/* ---- backward ---- */

static colo_status_t check_head(const colo_lm_head_t *head, uint64_t more, uint64_t saved_at,
                                const char *what)
{
    uint64_t now = 0;
    COLO_TRY(colo_lm_head_bound(head, &now));
    now += more;
    COLO_FAIL_IF(now != saved_at, COLO_ERR_MODIFIED,
                 "%s was written between forward and backward: version %" PRIu64
                 ", saved at %" PRIu64,
                 what, now, saved_at);
    return COLO_OK;
}

/* Is all there still that the pass reads? */
static colo_status_t check_saved(const colo_linear_distill_t *distill,
                                 const colo_linear_distill_saved_t *saved)
{
    COLO_TRY(COLO_SIZED_CHECK(saved, lora_version, saved_what, saved_init));
    COLO_FAIL_IF(
        !saved->valid, COLO_ERR_STATE,
        "linear distill: the saved state is not valid: no forward filled it, or a backward in "
        "place ended it");
    COLO_FAIL_IF(saved->of != distill, COLO_ERR_ARG,
                 "linear distill: the saved state is of another object");
    COLO_TRY(colo_loss_check_version(&saved->hidden, saved->hidden_version, "hidden states"));
    COLO_TRY(colo_loss_check_version(&saved->mask, saved->mask_version, "the mask"));
    const uint64_t lora = distill->linear.config.lora > 0 ? colo_loss_version(&saved->lora_a) +
                                                                colo_loss_version(&saved->lora_b)
                                                          : 0;
    COLO_FAIL_IF(lora != saved->lora_version, COLO_ERR_MODIFIED,
                 "a LoRA was written between forward and backward: version %" PRIu64
                 ", saved at %" PRIu64,
                 lora, saved->lora_version);
    COLO_TRY(check_head(distill->linear.head, 0, saved->weight_version, "the head"));
    if (distill->linear.config.mode == COLO_LINEAR_LOGPROB_EARLY)
        return COLO_OK;
    COLO_TRY(colo_loss_check_version(&saved->teacher_hidden, saved->teacher_hidden_version,
                                     "the teacher's hidden states"));
    const uint64_t more = distill->teacher.lora > 0 ? colo_loss_version(&saved->teacher_lora_a) +
                                                          colo_loss_version(&saved->teacher_lora_b)
                                                    : 0;
    return check_head(distill->teacher.head, more, saved->teacher_version, "the teacher's head");
}

static colo_status_t
check_backward(const colo_linear_distill_t *distill, struct colo_linear_call *call,
               const colo_linear_distill_saved_t *saved,
               const colo_linear_distill_upstream_t *upstream, colo_linear_logprob_upstream_t *up,
               const colo_linear_logprob_grads_t *grads, struct colo_linear_saved *offsets)
{
    const colo_linear_logprob_t *linear = &distill->linear;
    COLO_TRY(check_saved(distill, saved));
    const bool early = linear->config.mode == COLO_LINEAR_LOGPROB_EARLY;
    const int64_t tokens = saved->hidden.shape[0];
    COLO_TRY(check_upstream(distill, upstream, tokens, early, up));
    COLO_TRY(check_grads(distill, grads, &saved->hidden, early ? NULL : &saved->teacher_hidden));
    return colo_linear_place_backward(call, tokens, saved->max_valid, grads, saved->memory,
                                      saved->d_weight, offsets);
}

colo_status_t colo_linear_distill_backward(colo_linear_distill_t *distill,
                                           colo_linear_distill_saved_t *saved,
                                           const colo_linear_distill_upstream_t *upstream,
                                           const colo_linear_logprob_grads_t *grads,
                                           void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    COLO_FAIL_IF(!distill, COLO_ERR_ARG, "linear distill: distill is NULL");
    const colo_linear_logprob_t *linear = &distill->linear;
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    struct colo_linear_saved offsets;
    colo_linear_logprob_upstream_t up;
    colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_BACKWARD, 0, 0, &call.size);
    colo_status_t st = check_backward(distill, &call, saved, upstream, &up, grads, &offsets);
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear distill backward", st));
    if (!colo_linear_makes_grads(&call.size))
        return COLO_OK;
    colo_linear_place_saved(&call, saved->memory, &offsets);
    call.shared = saved->d_weight;
    const colo_lora_t lora = {&saved->lora_a, &saved->lora_b, saved->lora_scale},
                      teacher_lora = {&saved->teacher_lora_a, &saved->teacher_lora_b,
                                      saved->teacher_lora_scale};
    const colo_linear_distill_batch_t batch = {
        COLO_LINEAR_DISTILL_BATCH_INIT,
        .hidden = &saved->hidden,
        .teacher_hidden = &saved->teacher_hidden,
        .mask = saved->mask.ndim > 0 ? &saved->mask : NULL,
        .lora = linear->config.lora > 0 ? &lora : NULL,
        .teacher_lora = distill->teacher.lora > 0 ? &teacher_lora : NULL};
    const struct colo_linear_tokens tokens = tokens_of(&batch);
    COLO_TRY(colo_linear_run(&call, &tokens, &up));
    if (colo_linear_shares(&call.size))
        saved->valid = false;
    return COLO_OK;
}

/* ---- loss ---- */

colo_status_t colo_linear_distill_loss(colo_linear_distill_t *distill,
                                       const colo_linear_distill_batch_t *given,
                                       const colo_linear_distill_upstream_t *upstream,
                                       const colo_linear_distill_out_t *out,
                                       const colo_linear_logprob_grads_t *grads, void *workspace,
                                       colo_stream_t stream)
{
    COLO_RANGE();
    COLO_FAIL_IF(!distill, COLO_ERR_ARG, "linear distill: distill is NULL");
    const colo_linear_logprob_t *linear = &distill->linear;
    struct colo_linear_call call = {.linear = linear, .workspace = workspace, .main = stream};
    colo_linear_distill_batch_t batch;
    colo_linear_logprob_upstream_t up;
    colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_LOSS, 0, 0, &call.size);
    colo_status_t st = check_forward(distill, &call, given, out, COLO_LINEAR_LOGPROB_LOSS, &batch);
    COLO_THEN(st, check_upstream(distill, upstream, call.size.tokens, false, &up));
    COLO_THEN(st, check_grads(distill, grads, batch.hidden, batch.teacher_hidden));
    COLO_THEN(st, colo_linear_place_grads(&call, grads));
    COLO_TRY(colo_linear_ready(linear, &call.size, "linear distill loss", st));
    colo_linear_place_saved(&call, NULL, &colo_linear_nowhere);
    const struct colo_linear_tokens tokens = tokens_of(&batch);
    return colo_linear_run(&call, &tokens, &up);
}
