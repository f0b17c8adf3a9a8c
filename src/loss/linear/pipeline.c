/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline.c - one pass of the lm_head path: its steps, in order.
 *
 * Every pass is one pipeline over chunks of rows. On the caller's stream: rows are taken, the
 * product makes logits in one of two buffers; then, a chunk later, the products of the gradients
 * read what the auxiliary stream has made of them. On the auxiliary stream: statistics, merge,
 * gather, gradient of a chunk, while the caller's stream is at the next product. The passes differ
 * in what that stream does:
 *
 *   forward   statistics; after the last chunk one gather for all rows, and the merge
 *   backward  the gradient, from the saved statistics, of a chunk's blocks of columns
 *   loss      statistics, a gather (several ranks), merge and gradient of the chunk
 *   early     forward as loss, but the gradient stays in saved memory; backward nothing
 *
 * The head is taken once before the chunks and released after them, whether or not this rank has a
 * token: the other ranks of its group are in the same pass. d_W is reduced once after them.
 *
 * Where the product can (call->reduces), it makes each tile's part of the statistics from its own
 * numbers, and statistics put the parts of a row together. Logits that nothing else reads are not
 * written then.
 *
 * Rows, chunks and memory are workspace.c's, formulas the kernels' (args.h), products and packing
 * the table's (linear.h), shards the head's. An error ends the pass where it is; linear_logprob.c
 * then releases what is held.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/box.h"
#include "core/error.h"

/* ---- order between the two streams ---- */

static colo_status_t record(const struct colo_linear_call *call, int64_t event, colo_stream_t on)
{
    return call->linear->device->event_record(call->linear->aux, (int32_t)event, on);
}

static colo_status_t wait_for(const struct colo_linear_call *call, int64_t event, colo_stream_t on)
{
    return call->linear->device->event_wait(call->linear->aux, (int32_t)event, on);
}

/* ---- a call's beginning ---- */

static int64_t chunk_of(const struct colo_linear_call *call, int64_t unit)
{
    return unit / call->size.blocks;
}

/* The part of the saved d_logits that a unit of mode early has. */
static int64_t part_of(const struct colo_linear_call *call, int64_t unit)
{
    return call->size.segment ? 0 : unit % call->size.blocks;
}

/* First column of a unit. */
static int64_t column_of(const struct colo_linear_call *call, int64_t unit)
{
    const int64_t first = unit % call->size.blocks * call->size.width;
    return call->size.early && !call->size.segment ? call->size.part[part_of(call, unit)].first
           : first < call->size.body               ? first
                                                   : call->size.body;
}

/* The first of a part's d_logits, of a unit's chunk. */
static void *part_at(const struct colo_linear_call *call, int64_t part, int64_t unit)
{
    const struct colo_linear_part *its = &call->size.part[part];
    void *from = part < call->size.inside ? call->shared : call->saved_logits;
    return colo_linear_element(from, call->linear->dtype,
                               its->ahead * (call->size.shared ? call->size.rows : 1) +
                                   chunk_of(call, unit) * call->size.chunk * its->stride);
}

/* The first row of a unit, or of a chunk, in what the workspace has of the joined ones. */
static void *joined_at(const struct colo_linear_call *call, const int64_t offset[2], int64_t unit,
                       colo_dtype_t dtype, int64_t stride)
{
    return colo_linear_element(
        colo_linear_place(call->workspace,
                          offset[offset[1] < 0 ? 0 : unit / call->size.joined % 2]),
        dtype, unit % call->size.joined * call->size.chunk * stride);
}

static void *d_logits_at(const struct colo_linear_call *call, int64_t u);

/* The first of a unit's logits. */
static void *logits_at(const struct colo_linear_call *call, int64_t unit)
{
    if (call->size.keeps)
        return colo_linear_element(call->saved_logits, call->linear->config.logits_dtype,
                                   chunk_of(call, unit) * call->size.chunk * call->size.z_stride +
                                       column_of(call, unit));
    if (!call->size.in_place)
        return colo_linear_place(call->workspace, call->memory.z[call->size.single ? 0 : unit % 2]);
    return call->size.early
               ? d_logits_at(call, unit)
               : joined_at(call, call->memory.z, unit, call->linear->dtype, call->size.z_stride);
}

/* The first of a unit's d_logits. */
static void *d_logits_at(const struct colo_linear_call *call, int64_t unit)
{
    const int64_t part = part_of(call, unit);
    if (call->size.early)
        return colo_linear_element(part_at(call, part, unit), call->linear->dtype,
                                   column_of(call, unit) - call->size.part[part].first);
    return call->size.in_place
               ? logits_at(call, unit)
               : joined_at(call, call->memory.dz, unit, call->linear->dtype, call->size.d_stride);
}

/* What the gather tells of this rank; after pack. */
static void make_header(struct colo_linear_call *call)
{
    struct colo_logprob_args *args = &call->args;
    const bool compares =
        colo_lm_head_config(call->linear->head)->mem == COLO_MEM_HOST && !colo_logprob_alone(args);
    struct colo_distill_args d = call->distill;
    d.base = *args;
    colo_logprob_set_header(args,
                            call->linear->teacher
                                ? colo_distill_hash_config(&d.base)
                                : colo_logprob_hash_config(&args->config, args->dtype),
                            compares ? colo_logprob_hash_targets(args) : 0);
    args->header.sums =
        (colo_linear_sums(call->linear, call->size.pass) ? COLO_SUMS_HIDDEN : 0) |
        (colo_linear_sums_lora(call->linear, call->size.pass) ? COLO_SUMS_LORA : 0) |
        call->linear->config.lora * COLO_SUMS_RANK;
}

static struct colo_linear_matrix matrix_of(const colo_tensor_t *tensor)
{
    return (struct colo_linear_matrix){tensor->data, tensor->stride[0], tensor->dtype};
}

static void begin_teacher(struct colo_linear_call *call, const struct colo_linear_tokens *tokens)
{
    const struct colo_linear_teacher *teacher = call->linear->teacher;
    call->distill =
        (struct colo_distill_args){.base = call->args, .target_dtype = teacher->logits_dtype};
    colo_distill_fill(&teacher->config, &call->distill);
    (void)colo_distill_lay_out(&call->distill, call->size.block_rows); /* it fits */
    if (tokens->teacher_hidden)
        call->teacher.hidden = matrix_of(tokens->teacher_hidden);
    if (tokens->teacher_lora) {
        call->teacher.lora_a = matrix_of(tokens->teacher_lora->a);
        call->teacher.lora_b = matrix_of(tokens->teacher_lora->b);
        call->teacher.lora_scale = tokens->teacher_lora->scale;
    }
}

colo_status_t colo_linear_begin(struct colo_linear_call *call,
                                const struct colo_linear_tokens *tokens)
{
    const colo_tensor_t *targets = tokens->targets, *mask = tokens->mask;
    const colo_linear_logprob_t *linear = call->linear;
    const colo_logprob_config_t *config = &linear->config.logprob;
    call->aux = linear->device->stream_of(linear->aux);
    call->hidden = matrix_of(tokens->hidden);
    if (tokens->lora) {
        call->lora_a = matrix_of(tokens->lora->a);
        call->lora_b = matrix_of(tokens->lora->b);
        call->lora_scale = tokens->lora->scale;
    }
    call->rows = (struct colo_linear_rows){
        .tokens = call->size.tokens,
        .rows = call->size.rows,
        .targets = targets ? targets->data : NULL,
        .target_stride = targets ? targets->stride[0] : 0,
        .mask = mask ? mask->data : NULL,
        .mask_stride = mask ? mask->stride[0] : 0,
        .ignore_index = config->ignore_index,
        .vocab = targets ? config->logits.vocab : 2, /* of a mask: 0 or 1 */
        .row_of = colo_linear_place(call->workspace, call->memory.row_of),
        .token_of = colo_linear_place(call->workspace, call->memory.token_of),
        .row_targets = colo_linear_place(call->workspace, call->memory.row_targets),
        .counts = colo_linear_place(call->workspace, call->memory.counts),
    };
    const int64_t shape[2] = {call->size.rows, linear->columns};
    colo_tensor_t logits = colo_tensor_host(NULL, linear->config.logits_dtype, 2, shape);
    colo_tensor_t packed = colo_tensor_host(call->rows.row_targets, COLO_I64, 1, shape);
    call->args = colo_logprob_make_args(config, &logits, &packed);
    call->args.saved = call->stats;
    if (tokens->support) {
        call->args.support = colo_loss_support(tokens->support);
        call->args.support.token_of = call->rows.token_of;
    }
    call->args.class_weight = tokens->class_weight;
    call->args.temperature = tokens->temperature;
    call->args.row_stride = call->size.z_stride;
    call->args.d_dtype = linear->dtype;
    call->true_columns = call->args.true_columns;
    if (linear->teacher)
        begin_teacher(call, tokens);
    colo_logprob_set_ranks(&call->args, linear->group);
    call->args.blocks = colo_linear_place(call->workspace, call->memory.blocks);
    call->args.block = call->size.block;
    call->args.out = (struct colo_logprob_out){
        .logp = colo_linear_place(call->workspace, call->memory.logp),
        .entropy = colo_linear_place(call->workspace, call->memory.entropy),
        .loss = colo_linear_place(call->workspace, call->memory.loss),
        .correct = colo_linear_place(call->workspace, call->memory.correct),
        .weight = colo_linear_place(call->workspace, call->memory.weight),
        .argmax = colo_linear_place(call->workspace, call->memory.argmax),
        .lse = colo_linear_place(call->workspace, call->memory.lse),
        .sum_p2 = colo_linear_place(call->workspace, call->memory.sum_p2),
        .mean_logits = colo_linear_place(call->workspace, call->memory.mean_logits),
    };
    COLO_TRY(linear->kernels->rows_compact(&call->rows, call->main));
    if (call->size.pass != COLO_LINEAR_LOGPROB_BACKWARD)
        make_header(call);
    return COLO_OK;
}

/* A gathered bias is a column of the gathered head: where there is a place for it, it goes there.
 */
static colo_status_t take_bias(const struct colo_linear_call *call, const colo_tensor_t *b,
                               int64_t columns, int64_t place, void **bias)
{
    if (place < 0)
        return COLO_OK;
    const colo_box_t to = colo_box_rows(colo_linear_place(call->workspace, place), columns, 1, 1),
                     from = colo_box_rows(b->data, columns, 1, b->stride[0]);
    *bias = to.data;
    return call->linear->device->box_copy(&to, &from, colo_dtype_size(b->dtype), call->main);
}

static colo_status_t take_head(struct colo_linear_call *call)
{
    const colo_linear_logprob_t *linear = call->linear;
    colo_tensor_t w, b;
    COLO_TRY(colo_lm_head_acquire(linear->head, call->main, &w, &b));
    call->weight = (struct colo_linear_matrix){w.data, w.stride[0], w.dtype};
    call->bias = linear->has_bias ? b.data : NULL;
    call->reduces = call->size.reduces && !call->args.support.begin && colo_linear_is_tiled(&w);
    return take_bias(call, &b, linear->columns, call->memory.bias, &call->bias);
}

static colo_status_t take_teacher(struct colo_linear_call *call)
{
    const struct colo_linear_teacher *teacher = call->linear->teacher;
    colo_tensor_t w, b;
    COLO_TRY(colo_lm_head_acquire(teacher->head, call->main, &w, &b));
    call->teacher.weight = matrix_of(&w);
    call->teacher.bias = teacher->has_bias ? b.data : NULL;
    return take_bias(call, &b, teacher->columns, call->memory.teacher_bias, &call->teacher.bias);
}

/* ---- the pipeline ---- */

static void set_columns(struct colo_linear_call *call, int64_t first, int64_t end)
{
    const int64_t real = call->true_columns - first;
    call->args.columns = end - first;
    call->args.true_columns = real < 0 ? 0 : real < call->args.columns ? real : call->args.columns;
    call->args.config.logits.vocab_start = call->linear->config.logprob.logits.vocab_start + first;
}

static void set_unit(struct colo_linear_call *call, int64_t unit)
{
    call->args.lo = call->args.row_lo = chunk_of(call, unit) * call->size.chunk;
    call->args.hi = call->size.rows - call->args.lo < call->size.chunk
                        ? call->size.rows
                        : call->args.lo + call->size.chunk;
    set_columns(call, column_of(call, unit),
                (unit + 1) % call->size.blocks ? column_of(call, unit + 1) : call->linear->columns);
    call->args.logits = call->reduces && !call->size.writes ? NULL : logits_at(call, unit);
    call->args.tiles =
        call->reduces ? colo_linear_place(call->workspace, call->memory.tiles[unit % 2]) : NULL;
    call->args.d_logits = call->size.makes_d_logits ? d_logits_at(call, unit) : NULL;
    call->args.d_row_stride = call->size.early      ? call->size.part[part_of(call, unit)].stride
                              : call->size.in_place ? call->size.z_stride
                                                    : call->size.d_stride;
}

static void *rows_at(const struct colo_linear_call *call, int64_t chunk)
{
    return joined_at(call, call->memory.h, chunk, call->linear->dtype, call->linear->hidden);
}

/* Columns of a unit that one product has. */
static int64_t width_of(const struct colo_linear_call *call)
{
    return call->size.segment ? call->size.segment : call->args.columns;
}

/* Of the unit's rows, and of its columns and the hidden size unless @gemm has others. */
static colo_status_t multiply(const struct colo_linear_call *call, struct colo_linear_gemm *gemm)
{
    gemm->rows = call->args.hi - call->args.lo;
    gemm->first = call->args.lo;
    gemm->all = call->size.rows;
    if (gemm->columns == 0)
        gemm->columns = width_of(call);
    if (gemm->hidden == 0)
        gemm->hidden = call->linear->hidden;
    gemm->workspace = colo_linear_place(call->workspace, call->memory.gemm);
    return call->linear->kernels->gemm->run(call->linear->gemm, gemm, call->main);
}

/* The unit's rows, from the @from-th on, of a matrix with a row a column. */
static struct colo_linear_matrix rows_of(const struct colo_linear_call *call,
                                         const struct colo_linear_matrix *w, int64_t unit,
                                         int64_t from)
{
    return (struct colo_linear_matrix){
        colo_linear_element(w->data, w->dtype, (column_of(call, unit) + from) * w->stride),
        w->stride, w->dtype};
}

/* The unit's rows, in @packed, and their tokens. */
static struct colo_linear_move move_of(const struct colo_linear_call *call,
                                       struct colo_linear_matrix tokens, void *packed)
{
    return (struct colo_linear_move){&call->rows,          call->args.lo, call->args.hi,
                                     call->linear->hidden, tokens,        packed};
}

/* A LoRA's u of a chunk. */
static struct colo_linear_matrix narrow_at(const struct colo_linear_call *call, int64_t chunk)
{
    const int64_t stride = call->size.u_stride;
    return (struct colo_linear_matrix){
        joined_at(call, call->memory.u, chunk, call->linear->dtype, stride), stride,
        call->linear->dtype};
}

/* The rows of a chunk, and what a LoRA makes of them. */
static colo_status_t take_rows(struct colo_linear_call *call, int64_t unit)
{
    const int64_t chunk = chunk_of(call, unit);
    const struct colo_linear_move move = move_of(call, call->hidden, rows_at(call, chunk));
    if (call->memory.h[0] < 0)
        return COLO_OK;
    COLO_TRY(call->linear->kernels->rows_gather(&move, call->main));
    struct colo_linear_gemm gemm = {
        .product = COLO_LINEAR_LOGITS,
        .columns = call->linear->config.lora,
        .h = {move.packed, call->linear->hidden, call->linear->dtype},
        .w = call->lora_a,
        .z = narrow_at(call, chunk),
        .factor = call->lora_scale,
    };
    return call->memory.u[0] < 0 ? COLO_OK : multiply(call, &gemm);
}

/* A product of the unit, one for each of its segments: the rows of @w and columns of @z are its. */
static colo_status_t multiply_all(const struct colo_linear_call *call, struct colo_linear_gemm gemm,
                                  int64_t unit)
{
    const struct colo_linear_matrix w = gemm.w, z = gemm.z;
    const char *bias = gemm.bias;
    int64_t from = 0;
    do {
        gemm.w = rows_of(call, &w, unit, from);
        gemm.z.data = colo_linear_element(z.data, z.dtype, from);
        gemm.bias = bias ? bias + from * (int64_t)colo_dtype_size(call->linear->dtype) : NULL;
        COLO_TRY(multiply(call, &gemm));
        from += width_of(call);
    } while (from < call->args.columns);
    return COLO_OK;
}

static colo_status_t make_logits(struct colo_linear_call *call, int64_t unit)
{
    const struct colo_linear_gemm gemm = {
        .product = COLO_LINEAR_LOGITS,
        .h = {rows_at(call, chunk_of(call, unit)), call->linear->hidden, call->linear->dtype},
        .w = call->weight,
        .z = {(void *)(uintptr_t)call->args.logits, call->size.z_stride,
              call->linear->config.logits_dtype},
        .bias = colo_linear_element(call->bias, call->linear->dtype, column_of(call, unit)),
        .factor = 1,
        .stats = call->reduces ? &call->args : NULL};
    const struct colo_linear_gemm more = {.product = COLO_LINEAR_LOGITS,
                                          .hidden = call->linear->config.lora,
                                          .h = narrow_at(call, chunk_of(call, unit)),
                                          .w = call->lora_b,
                                          .z = gemm.z,
                                          .beta = 1,
                                          .factor = 1};
    COLO_TRY(multiply_all(call, gemm, unit));
    return call->linear->config.lora > 0 ? multiply_all(call, more, unit) : COLO_OK;
}

/* ---- a teacher's logits, and what is made of both ---- */

/* A product of the unit's rows with the teacher's head. */
static colo_status_t multiply_teacher(const struct colo_linear_call *call,
                                      struct colo_linear_gemm *gemm)
{
    gemm->product = COLO_LINEAR_LOGITS;
    gemm->rows = call->args.hi - call->args.lo;
    gemm->workspace = colo_linear_place(call->workspace, call->memory.gemm);
    gemm->first = call->args.lo; /* as multiply() */
    return call->linear->kernels->gemm->run(call->linear->teacher->gemm, gemm, call->main);
}

/* Of the unit's columns that its head has. Behind the other product, so that this one alone waits
 * for the auxiliary stream to have read what was in the one buffer. */
static colo_status_t make_teacher(struct colo_linear_call *call, int64_t unit)
{
    const struct colo_linear_teacher *teacher = call->linear->teacher;
    const int64_t first = column_of(call, unit), left = teacher->columns - first,
                  columns = left < 0                    ? 0
                            : left < call->args.columns ? left
                                                        : call->args.columns;
    const struct colo_linear_matrix *w = &call->teacher.weight, *b = &call->teacher.lora_b;
    const struct colo_linear_matrix h = {colo_linear_place(call->workspace, call->memory.teacher_h),
                                         teacher->hidden, teacher->dtype},
                                    u = {colo_linear_place(call->workspace, call->memory.teacher_u),
                                         call->size.teacher_u_stride, teacher->dtype},
                                    y = {colo_linear_place(call->workspace, call->memory.y),
                                         call->size.y_stride, teacher->logits_dtype};
    const struct colo_linear_move move = {&call->rows,     call->args.lo,        call->args.hi,
                                          teacher->hidden, call->teacher.hidden, h.data};
    struct colo_linear_gemm narrow = {.columns = teacher->lora,
                                      .hidden = teacher->hidden,
                                      .h = h,
                                      .w = call->teacher.lora_a,
                                      .z = u,
                                      .factor = call->teacher.lora_scale},
                            gemm = {.columns = columns,
                                    .hidden = teacher->hidden,
                                    .h = h,
                                    .w = {colo_linear_element(w->data, w->dtype, first * w->stride),
                                          w->stride, w->dtype},
                                    .z = y,
                                    .bias = colo_linear_element(call->teacher.bias, teacher->dtype,
                                                                first),
                                    .factor = 1},
                            more = {.columns = columns,
                                    .hidden = teacher->lora,
                                    .h = u,
                                    .w = {colo_linear_element(b->data, b->dtype, first * b->stride),
                                          b->stride, b->dtype},
                                    .z = y,
                                    .beta = 1,
                                    .factor = 1};
    if (!call->size.single && unit >= 1)
        COLO_TRY(wait_for(call, COLO_EVENT_WORK + (unit - 1) % 2, call->main));
    if (unit % call->size.blocks == 0) {
        COLO_TRY(call->linear->kernels->rows_gather(&move, call->main));
        if (teacher->lora > 0)
            COLO_TRY(multiply_teacher(call, &narrow));
    }
    COLO_TRY(multiply_teacher(call, &gemm));
    return teacher->lora > 0 ? multiply_teacher(call, &more) : COLO_OK;
}

/* Rows of args as the kernels of a distillation have them, from 0 on. A row's mask is the first
 * byte of its target, which is 1, or 0 without a token. */
static struct colo_distill_args distill_of(const struct colo_linear_call *call)
{
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a mask is the first byte of an i64");
    const struct colo_logprob_args *args = &call->args;
    const int64_t ahead = (args->lo - args->block_lo) * (int64_t)colo_dtype_size(args->stat_dtype);
    struct colo_distill_args d = call->distill;
    int64_t *const offsets[] = {&d.mx, &d.sx, &d.mv, &d.sv, &d.c, &d.d, &d.e, &d.g};
    d.base = *args;
    d.base.tokens = args->hi - args->lo;
    d.targets = colo_linear_place(call->workspace, call->memory.y);
    d.target_row_stride = call->size.y_stride;
    d.mask = (const uint8_t *)(call->rows.row_targets + args->lo);
    d.mask_stride = sizeof *call->rows.row_targets;
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++)
        *offsets[i] += ahead;
    d.sums = (double *)(void *)args->blocks;
    d.out.kl = colo_linear_element(args->out.loss, args->stat_dtype, args->lo);
    d.saved = args->saved ? args->saved + args->lo : NULL;
    d.saved_stride = args->tokens;
    d.upstream.d_kl =
        colo_linear_element((void *)(uintptr_t)args->upstream.d_loss, args->stat_dtype, args->lo);
    return d;
}

static colo_status_t make_stats(const struct colo_linear_call *call)
{
    if (!call->linear->teacher)
        return call->linear->kernels->logprob_stats(&call->args, call->aux);
    const struct colo_distill_args d = distill_of(call);
    return call->linear->kernels->distill_stats(&d, call->aux);
}

/* Of rows whose blocks are those of all ranks. */
static colo_status_t merge(const struct colo_linear_call *call)
{
    const colo_loss_kernels_t *kernels = call->linear->kernels;
    if (!call->linear->teacher)
        return kernels->logprob_merge(&call->args, call->aux);
    const struct colo_distill_args d = distill_of(call);
    const int64_t sums = d.base.tokens * COLO_DISTILL_SUMS;
    COLO_TRY(kernels->distill_merge(&d, call->aux));
    if (!colo_distill_twice(&d))
        return COLO_OK;
    COLO_TRY(kernels->distill_pairs(&d, call->aux));
    if (!colo_logprob_alone(&d.base))
        COLO_TRY(colo_comm_all_gather_for(call->linear->group, COLO_CATEGORY_LOSS,
                                          d.sums + d.base.rank * sums, d.sums, sums, COLO_F64,
                                          call->aux));
    return kernels->distill_finish(&d, call->aux);
}

static colo_status_t gather_blocks(struct colo_linear_call *call, int64_t unit)
{
    const struct colo_distill_args d = distill_of(call);
    struct colo_loss_comparison comparison =
        colo_loss_make_comparison("linear", colo_logprob_describe, &call->args);
    if (call->linear->teacher) {
        comparison = colo_loss_make_comparison("linear distill", colo_distill_describe, &d.base);
        comparison.m = d.mx;
        comparison.s = d.sx;
        comparison.targets = NULL;
    }
    return colo_loss_gather(call->linear->group, comparison.of, unit == 0 ? &comparison : NULL,
                            colo_lm_head_config(call->linear->head)->mem, call->aux);
}

static colo_status_t make_gradient(const struct colo_linear_call *call, int64_t first)
{
    if (!call->linear->teacher)
        return call->linear->kernels->logprob_grad(&call->args, call->aux);
    struct colo_distill_args d = distill_of(call);
    d.targets = colo_linear_element((void *)(uintptr_t)d.targets, d.target_dtype, first);
    return call->linear->kernels->distill_grad(&d, call->aux);
}

/* The unit's d_logits; shared ones part by part. */
static colo_status_t make_d_logits(struct colo_linear_call *call, int64_t unit)
{
    if (!call->size.shared)
        return make_gradient(call, 0);
    for (int32_t i = 0; i < call->size.parts; i++) {
        const struct colo_linear_part *part = &call->size.part[i];
        set_columns(call, part->first, part[1].first);
        call->args.logits = colo_linear_element(logits_at(call, unit),
                                                call->linear->config.logits_dtype, part->first);
        call->args.d_logits = part_at(call, i, unit);
        call->args.d_row_stride = part->stride;
        COLO_TRY(make_gradient(call, part->first));
    }
    return COLO_OK;
}

/* On the auxiliary stream, once d_hidden is whole: the sum over the vocabulary group. */
static colo_status_t sum_d_hidden(struct colo_linear_call *call)
{
    const colo_linear_logprob_t *linear = call->linear;
    const int64_t count = call->size.tokens * linear->hidden;
    if (linear->config.d_hidden == COLO_D_HIDDEN_PARTIAL)
        return COLO_OK;
    if (call->size.segment) { /* every rank has the sum */
        const int64_t each = call->size.tokens / colo_comm_size(linear->group);
        void *own = colo_linear_element(call->d_hidden.data, linear->dtype,
                                        each * colo_comm_rank(linear->group) * linear->hidden);
        const colo_box_t to = colo_box_rows(call->d_hidden_out->data, each, linear->hidden,
                                            call->d_hidden_out->stride[0]),
                         from = colo_box_rows(own, each, linear->hidden, linear->hidden);
        return linear->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE
                   ? COLO_OK
                   : linear->device->box_copy(&to, &from, colo_dtype_size(linear->dtype),
                                              call->main);
    }
    COLO_TRY(record(call, COLO_EVENT_MAIN, call->main));
    COLO_TRY(wait_for(call, COLO_EVENT_MAIN, call->aux));
    colo_comm_set_stage(linear->group, colo_linear_place(call->workspace, call->memory.d_h_stage),
                        (size_t)call->memory.d_h_stage_bytes);
    const colo_status_t st =
        linear->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE
            ? colo_comm_all_reduce_for(linear->group, COLO_CATEGORY_LOSS, call->d_hidden.data,
                                       call->d_hidden.data, count, linear->dtype, COLO_REDOP_SUM,
                                       call->aux)
            : colo_comm_reduce_scatter_for(
                  linear->group, COLO_CATEGORY_LOSS, call->d_hidden.data, call->d_hidden_out->data,
                  count / colo_comm_size(linear->group), linear->dtype, COLO_REDOP_SUM, call->aux);
    colo_comm_set_stage(linear->group, NULL, 0);
    return st;
}

/* a += b, of a chunk's rows, contiguous */
static colo_status_t add(const struct colo_linear_call *call, const struct colo_linear_matrix *a,
                         const struct colo_linear_matrix *b)
{
    const int64_t rows = call->args.hi - call->args.lo;
    const colo_box_t both[] = {colo_box_rows(a->data, rows, a->stride, a->stride),
                               colo_box_rows(b->data, rows, b->stride, b->stride)};
    return call->linear->device->box_sum(&both[0], both, 2, a->dtype, call->main);
}

/* A sum over columns with segments: of chunks, of the sum dtype, whose rows have @width elements.
 * One a level of the tree is at @levels, one a rank at @all. */
struct segment_sum {
    int64_t levels, all, width;
};

/* The @i-th chunk of those at @offset. */
static struct colo_linear_matrix sum_at(const struct colo_linear_call *call, int64_t offset,
                                        int64_t width, int64_t i)
{
    const colo_dtype_t dtype = call->linear->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const int64_t rows = call->args.hi - call->args.lo;
    return (struct colo_linear_matrix){
        colo_linear_element(colo_linear_place(call->workspace, offset), dtype, i * rows * width),
        width, dtype};
}

static struct segment_sum hidden_sum(const struct colo_linear_call *call)
{
    return (struct segment_sum){call->memory.d_h_sum, call->memory.d_h_all, call->linear->hidden};
}

static struct segment_sum narrow_sum(const struct colo_linear_call *call)
{
    return (struct segment_sum){call->memory.d_u_sum, call->memory.d_u_all,
                                call->linear->config.lora};
}

/* Where sum_segments() leaves the sum of a chunk. */
static struct colo_linear_matrix sum_of(const struct colo_linear_call *call, struct segment_sum sum)
{
    return sum_at(call, sum.all < 0 ? sum.levels : sum.all, sum.width, 0);
}

/* With segments: what @gemm, a D_HIDDEN of the unit, sums over columns is a sum over a tree whose
 * leaves are segments. A rank's are a subtree; the nodes that wait for their sibling are on a
 * stack. Then the same over ranks. */
static colo_status_t sum_segments(struct colo_linear_call *call, int64_t unit,
                                  struct segment_sum sums, struct colo_linear_gemm gemm)
{
    const colo_linear_logprob_t *linear = call->linear;
    const struct colo_linear_matrix w = gemm.w, z = gemm.z;
    const int64_t rows = call->args.hi - call->args.lo;
    const int32_t ranks = colo_comm_size(linear->group);
    gemm.beta = 0;
    for (int64_t from = 0; from < call->args.columns; from += call->size.segment) {
        const int64_t leaf = (column_of(call, unit) + from) / call->size.segment;
        int64_t depth = __builtin_popcountll((uint64_t)leaf);
        struct colo_linear_matrix sum = sum_at(call, sums.levels, sums.width, depth);
        gemm.h = sum;
        gemm.w = rows_of(call, &w, unit, from);
        gemm.z.data = colo_linear_element(z.data, z.dtype, from);
        COLO_TRY(multiply(call, &gemm));
        for (int64_t i = leaf; i & 1; i /= 2) {
            const struct colo_linear_matrix right = sum;
            sum = sum_at(call, sums.levels, sums.width, --depth);
            COLO_TRY(add(call, &sum, &right));
        }
    }
    if ((unit + 1) % call->size.blocks != 0 || ranks == 1)
        return COLO_OK;
    COLO_TRY(record(call, COLO_EVENT_MAIN, call->main));
    COLO_TRY(wait_for(call, COLO_EVENT_MAIN, call->aux));
    COLO_TRY(colo_comm_all_gather_for(
        linear->group, COLO_CATEGORY_LOSS, sum_at(call, sums.levels, sums.width, 0).data,
        sum_of(call, sums).data, rows * sums.width, gemm.h.dtype, call->aux));
    COLO_TRY(colo_linear_join(call));
    for (int32_t step = 1; step < ranks; step *= 2)
        for (int32_t r = 0; r + step < ranks; r += 2 * step) {
            const struct colo_linear_matrix left = sum_at(call, sums.all, sums.width, r),
                                            right = sum_at(call, sums.all, sums.width, r + step);
            COLO_TRY(add(call, &left, &right));
        }
    return COLO_OK;
}

static struct colo_linear_matrix gradient_of(const struct colo_linear_call *call, int64_t unit)
{
    return (struct colo_linear_matrix){d_logits_at(call, unit), call->args.d_row_stride,
                                       call->linear->dtype};
}

/* A LoRA's d_u of a chunk, and as it is summed: as large as d_logits, which scale is not yet in.
 * With segments it is that of all ranks, else of this rank's columns. */
static struct colo_linear_matrix d_narrow_at(const struct colo_linear_call *call, bool sum)
{
    const bool half = call->memory.d_u >= 0;
    if (call->size.segment && (sum || !half))
        return sum_of(call, narrow_sum(call));
    return (struct colo_linear_matrix){
        colo_linear_place(call->workspace, half && !sum ? call->memory.d_u : call->memory.d_u_sum),
        call->size.u_stride, half && sum ? COLO_F32 : call->linear->dtype};
}

/* What a unit adds to gradients of a LoRA. Before d_hidden, which may come where the rows of hidden
 * are, and which takes d_u when it is whole. */
static colo_status_t make_d_lora(struct colo_linear_call *call, int64_t unit)
{
    const int64_t chunk = chunk_of(call, unit), lora = call->linear->config.lora;
    const struct colo_linear_matrix z = gradient_of(call, unit), sum = d_narrow_at(call, true),
                                    d_u = d_narrow_at(call, false);
    struct colo_linear_gemm narrow = {.product = COLO_LINEAR_D_HIDDEN,
                                      .hidden = lora,
                                      .h = sum,
                                      .w = rows_of(call, &call->lora_b, unit, 0),
                                      .z = z,
                                      .beta = unit % call->size.blocks > 0,
                                      .factor = call->lora_scale},
                            d_b = {.product = COLO_LINEAR_D_WEIGHT,
                                   .hidden = lora,
                                   .h = narrow_at(call, chunk),
                                   .w = call->d_lora_b,
                                   .z = z,
                                   .beta = chunk > 0,
                                   .factor = 1,
                                   .scale = call->scale},
                            d_a = {.product = COLO_LINEAR_D_WEIGHT,
                                   .columns = lora,
                                   .h = {rows_at(call, chunk), call->linear->hidden,
                                         call->linear->dtype},
                                   .w = call->d_lora_a,
                                   .z = d_u,
                                   .beta = chunk > 0,
                                   .factor = 1,
                                   .scale = call->scale};
    if (call->size.segment) {
        narrow.w = call->lora_b;
        COLO_TRY(sum_segments(call, unit, narrow_sum(call), narrow));
    } else {
        COLO_TRY(multiply(call, &narrow));
    }
    if (call->size.makes_d_lora)
        COLO_TRY(multiply_all(call, d_b, unit));
    if ((unit + 1) % call->size.blocks != 0)
        return COLO_OK;
    if (d_u.dtype != sum.dtype)
        COLO_TRY(call->linear->kernels->rows_convert(
            &(struct colo_linear_convert){d_u, sum, call->args.hi - call->args.lo, lora},
            call->main));
    return call->size.makes_d_lora ? multiply(call, &d_a) : COLO_OK;
}

/* On the auxiliary stream, after the last unit: the sum over the vocabulary group. With segments
 * every rank has it. */
static colo_status_t sum_d_lora(struct colo_linear_call *call)
{
    const colo_linear_logprob_t *linear = call->linear;
    void *sum = call->d_lora_a.data;
    if (call->size.segment)
        return COLO_OK;
    COLO_TRY(record(call, COLO_EVENT_MAIN, call->main));
    COLO_TRY(wait_for(call, COLO_EVENT_MAIN, call->aux));
    colo_comm_set_stage(linear->group, colo_linear_place(call->workspace, call->memory.d_a_stage),
                        (size_t)call->memory.d_a_stage_bytes);
    const colo_status_t st = colo_comm_all_reduce_for(
        linear->group, COLO_CATEGORY_LOSS, sum, sum, linear->config.lora * linear->hidden,
        call->d_lora_a.dtype, COLO_REDOP_SUM, call->aux);
    colo_comm_set_stage(linear->group, NULL, 0);
    return st;
}

/* What a unit adds to d_hidden of its chunk; the last one puts it there. */
static colo_status_t make_d_hidden(struct colo_linear_call *call, int64_t unit)
{
    const colo_loss_kernels_t *kernels = call->linear->kernels;
    const int64_t chunk = chunk_of(call, unit), hidden = call->linear->hidden;
    const struct colo_linear_matrix z = gradient_of(call, unit);
    struct colo_linear_matrix sum = {colo_linear_place(call->workspace, call->memory.d_h_sum),
                                     hidden, COLO_F32},
                              d_h = {call->size.d_hidden_last
                                         ? rows_at(call, chunk)
                                         : colo_linear_place(call->workspace, call->memory.d_h),
                                     hidden, call->linear->dtype};
    struct colo_linear_gemm gemm = {
        .product = COLO_LINEAR_D_HIDDEN,
        .h = sum.data ? sum : d_h,
        .w = rows_of(call, &call->weight, unit, 0),
        .z = z,
        .beta = unit % call->size.blocks > 0,
        .factor = 1,
        .scale = call->scale,
    };
    struct colo_linear_gemm more = {.product = COLO_LINEAR_D_HIDDEN,
                                    .columns = call->linear->config.lora,
                                    .h = gemm.h,
                                    .w = call->lora_a,
                                    .z = d_narrow_at(call, false),
                                    .beta = 1,
                                    .factor = 1,
                                    .scale = call->scale};
    if (call->size.segment) {
        gemm.w = call->weight;
        COLO_TRY(sum_segments(call, unit, hidden_sum(call), gemm));
        more.h = sum = sum_of(call, hidden_sum(call));
    } else {
        COLO_TRY(multiply(call, &gemm));
    }
    if ((unit + 1) % call->size.blocks != 0)
        return COLO_OK;
    if (call->linear->config.lora > 0)
        COLO_TRY(multiply(call, &more));
    if (sum.data && sum.dtype == d_h.dtype)
        d_h = sum;
    else if (sum.data)
        COLO_TRY(kernels->rows_convert(
            &(struct colo_linear_convert){d_h, sum, call->args.hi - call->args.lo, hidden},
            call->main));
    const struct colo_linear_move move = move_of(call, call->d_hidden, d_h.data);
    if (chunk == 0)
        COLO_TRY(kernels->rows_clear(&move, call->main));
    COLO_TRY(kernels->rows_restore(&move, call->main));
    return call->args.hi == call->size.rows ? sum_d_hidden(call)
                                            : COLO_OK; /* during the last d_W */
}

/* From its stage to d_weight, when nothing reads the first part's d_logits any more. */
static colo_status_t unstage(struct colo_linear_call *call)
{
    const int64_t count = call->size.part[1].first * call->linear->hidden;
    void *stage = colo_linear_place(call->workspace, call->memory.stage);
    const colo_box_t to = colo_box_rows(call->d_weight.data, 1, count, 0),
                     from = colo_box_rows(stage, 1, count, 0);
    return call->linear->device->box_copy(&to, &from, colo_dtype_size(call->linear->dtype),
                                          call->main);
}

static colo_status_t make_d_weight(struct colo_linear_call *call, int64_t unit)
{
    const int64_t chunk = chunk_of(call, unit);
    const bool staged = unit == 0 && call->memory.stage >= 0;
    const struct colo_linear_matrix z = gradient_of(call, unit);
    const struct colo_linear_gemm gemm = {
        .product = COLO_LINEAR_D_WEIGHT,
        .h = {rows_at(call, chunk), call->linear->hidden, call->linear->dtype},
        .w = {staged ? colo_linear_place(call->workspace, call->memory.stage) : call->d_weight.data,
              call->d_weight.stride[0], call->d_weight.dtype},
        .z = z,
        .beta = call->fresh && chunk == 0 ? 0 : 1,
        .factor = 1,
        .scale = call->scale};
    COLO_TRY(multiply_all(call, gemm, unit));
    const colo_tensor_t *d_bias = &call->d_bias;
    void *to =
        colo_linear_element(d_bias->data, d_bias->dtype, column_of(call, unit) * d_bias->stride[0]);
    const struct colo_linear_sum sum = {z,
                                        call->args.hi - call->args.lo,
                                        call->args.columns,
                                        call->scale,
                                        to,
                                        d_bias->stride[0],
                                        gemm.beta};
    return call->linear->has_bias ? call->linear->kernels->rows_sum(&sum, call->main) : COLO_OK;
}

colo_status_t colo_linear_join(const struct colo_linear_call *call)
{
    COLO_TRY(record(call, COLO_EVENT_AUX, call->aux));
    return wait_for(call, COLO_EVENT_AUX, call->main);
}

/* ---- the pass ---- */

/* A unit is a block of columns of a chunk of rows. On the caller's stream: its logits, and with the
 * first of a chunk its rows of hidden. */
static colo_status_t begin_unit(struct colo_linear_call *call, int64_t unit)
{
    set_unit(call, unit);
    if (call->size.single && unit >= 1) /* the auxiliary stream has read what was in this buffer */
        COLO_TRY(wait_for(call, COLO_EVENT_WORK + (unit - 1) % 2, call->main));
    else if (unit >= 2)
        COLO_TRY(wait_for(call, COLO_EVENT_WORK + unit % 2, call->main));
    if (unit % call->size.blocks == 0)
        COLO_TRY(take_rows(call, unit));
    if (call->size.makes_logits)
        COLO_TRY(make_logits(call, unit));
    if (call->size.makes_logits && call->linear->teacher)
        COLO_TRY(make_teacher(call, unit));
    return record(call, COLO_EVENT_LOGITS + unit % 2, call->main);
}

/* On the auxiliary stream: what the pass makes of a unit's logits. */
static colo_status_t work_on(struct colo_linear_call *call, int64_t unit)
{
    const bool fore = call->size.pass != COLO_LINEAR_LOGPROB_BACKWARD,
               alone = colo_logprob_alone(&call->args), each = call->size.piecewise || alone;
    set_unit(call, unit);
    call->args.block_lo = each ? call->args.lo : 0;
    COLO_TRY(wait_for(call, COLO_EVENT_LOGITS + unit % 2, call->aux));
    if (fore)
        COLO_TRY(make_stats(call));
    if (call->size.piecewise && !alone)
        COLO_TRY(gather_blocks(call, unit));
    if (fore && each)
        COLO_TRY(merge(call));
    if (call->size.joined > 1 && unit % call->size.joined == 0) {
        COLO_TRY(record(call, COLO_EVENT_MAIN, call->main)); /* products have read what was there */
        COLO_TRY(wait_for(call, COLO_EVENT_MAIN, call->aux));
    }
    if (call->size.makes_d_logits)
        COLO_TRY(make_d_logits(call, unit));
    return record(call, COLO_EVENT_WORK + unit % 2, call->aux);
}

/* On the caller's stream, when the auxiliary stream has made d_logits: the gradients of unit @last
 * and of those that are joined with it. */
static colo_status_t make_grads(struct colo_linear_call *call, int64_t last)
{
    const int64_t first = last - last % call->size.joined;
    set_unit(call, last);
    const int64_t hi = call->args.hi;
    set_unit(call, first);
    call->args.hi = hi;
    COLO_TRY(wait_for(call, COLO_EVENT_WORK + last % 2, call->main));
    if (call->memory.d_u_sum >= 0)
        COLO_TRY(make_d_lora(call, first));
    if (call->size.makes_d_hidden && !call->size.d_hidden_last)
        COLO_TRY(make_d_hidden(call, first));
    if (call->size.makes_d_weight)
        COLO_TRY(make_d_weight(call, first));
    if (call->size.makes_d_hidden && call->size.d_hidden_last)
        COLO_TRY(make_d_hidden(call, first));
    return first == 0 && call->memory.stage >= 0 ? unstage(call) : COLO_OK;
}

/* After the last unit; the last product, too, is behind all then. */
static colo_status_t finish(struct colo_linear_call *call)
{
    const colo_linear_logprob_t *linear = call->linear;
    call->args.lo = call->args.block_lo = 0; /* of all rows */
    call->args.hi = call->size.rows;
    const bool forward = call->size.pass != COLO_LINEAR_LOGPROB_BACKWARD;
    if (forward && !call->size.piecewise && !colo_logprob_alone(&call->args)) {
        COLO_TRY(gather_blocks(call, 0));
        COLO_TRY(merge(call));
    }
    if (forward)
        COLO_TRY(linear->kernels->rows_scatter(
            &(struct colo_linear_scatter){&call->rows, linear->stat_dtype, call->args.out,
                                          call->out},
            call->aux));
    if (call->size.makes_d_lora)
        COLO_TRY(sum_d_lora(call));
    COLO_TRY(colo_linear_join(call));
    COLO_TRY(colo_comm_host_barrier(linear->group, "lm_head"));
    if (call->size.takes_head)
        COLO_TRY(colo_lm_head_release(linear->head, call->main));
    if (linear->teacher && call->size.makes_logits)
        COLO_TRY(colo_lm_head_release(linear->teacher->head, call->main));
    return call->size.makes_d_weight
               ? colo_lm_head_reduce_sums(linear->head, &call->head_grads, call->size.once,
                                          colo_linear_place(call->workspace, call->memory.reduce),
                                          call->main)
               : COLO_OK;
}

colo_status_t colo_linear_pipeline(struct colo_linear_call *call)
{
    const struct colo_linear_size *size = &call->size;
    const int64_t units = size->chunks * size->blocks;
    if (size->takes_head)
        COLO_TRY(take_head(call));
    if (size->makes_logits && call->linear->teacher)
        COLO_TRY(take_teacher(call));
    for (int64_t unit = 0; unit <= units; unit++) {
        const bool due = colo_linear_makes_grads(size) && unit > 0 &&
                         (unit % size->joined == 0 || unit == units);
        if (due && size->over)
            COLO_TRY(make_grads(call, unit - 1));
        if (unit < units)
            COLO_TRY(begin_unit(call, unit));
        if (due && !size->over)
            COLO_TRY(make_grads(call, unit - 1));
        if (unit < units)
            COLO_TRY(work_on(call, unit));
    }
    return finish(call);
}
