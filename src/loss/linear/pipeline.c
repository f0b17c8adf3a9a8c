/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline.c - one pass of the lm_head path: the steps of its program, in order.
 *
 * Rows, chunks and memory are workspace.c's, the order of steps program.c's, formulas the passes'
 * (passes.h), products and packing the table's (linear.h), shards the head's. An error ends the
 * pass where it is; linear_logprob.c then releases what is held.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"

/* ---- order between the two streams ---- */

static colo_status_t record(const struct colo_linear_call *k, int32_t event, colo_stream_t on)
{
    return k->l->ops->event_record(k->l->aux, event, on);
}

static colo_status_t wait_for(const struct colo_linear_call *k, int32_t event, colo_stream_t on)
{
    return k->l->ops->event_wait(k->l->aux, event, on);
}

/* ---- a call's beginning ---- */

static int64_t chunk_of(const struct colo_linear_call *k, int64_t u)
{
    return u / k->s.blocks;
}

/* Of a unit of mode early its part of the saved d_logits. */
static int64_t part_of(const struct colo_linear_call *k, int64_t u)
{
    return k->s.segment ? 0 : u % k->s.blocks;
}

/* First column of a unit. */
static int64_t column_of(const struct colo_linear_call *k, int64_t u)
{
    const int64_t first = u % k->s.blocks * k->s.width;
    return k->s.early && !k->s.segment ? k->s.part[part_of(k, u)].first
           : first < k->s.body         ? first
                                       : k->s.body;
}

/* The first of a part's d_logits, of a unit's chunk. */
static void *part_at(const struct colo_linear_call *k, int64_t part, int64_t u)
{
    const struct colo_linear_part *p = &k->s.part[part];
    void *from = part < k->s.inside ? k->shared : k->saved_logits;
    return colo_linear_element(from, k->l->dtype,
                               p->ahead * (k->s.shared ? k->s.rows : 1) +
                                   chunk_of(k, u) * k->s.chunk * p->stride);
}

/* The first row of a unit, or of a chunk, in what the workspace has of the joined ones. */
static void *joined_at(const struct colo_linear_call *k, const int64_t offset[2], int64_t u,
                       colo_dtype_t dtype, int64_t stride)
{
    return colo_linear_element(
        colo_linear_place(k->workspace, offset[offset[1] < 0 ? 0 : u / k->s.joined % 2]), dtype,
        u % k->s.joined * k->s.chunk * stride);
}

static void *d_logits_at(const struct colo_linear_call *k, int64_t u);

/* The first of a unit's logits. */
static void *logits_at(const struct colo_linear_call *k, int64_t u)
{
    if (k->s.early && k->s.in_place)
        return d_logits_at(k, u);
    return k->s.keeps
               ? colo_linear_element(k->saved_logits, k->l->config.logits_dtype,
                                     chunk_of(k, u) * k->s.chunk * k->s.z_stride + column_of(k, u))
           : k->s.in_place ? joined_at(k, k->m.z, u, k->l->dtype, k->s.z_stride)
                           : colo_linear_place(k->workspace, k->m.z[u % 2]);
}

/* The first of a unit's d_logits. */
static void *d_logits_at(const struct colo_linear_call *k, int64_t u)
{
    const int64_t part = part_of(k, u);
    if (k->s.early)
        return colo_linear_element(part_at(k, part, u), k->l->dtype,
                                   column_of(k, u) - k->s.part[part].first);
    return k->s.in_place ? logits_at(k, u) : joined_at(k, k->m.dz, u, k->l->dtype, k->s.d_stride);
}

/* What the gather tells of this rank; after pack. */
static void make_header(struct colo_linear_call *k)
{
    const colo_logprob_config_t *c = &k->l->config.logprob;
    bool on_host = colo_lm_head_config(k->l->head)->mem == COLO_HOST;
    colo_logprob_i_set_header(
        &k->pass, colo_logprob_i_hash_config(c, k->pass.dtype),
        on_host && !colo_logprob_i_alone(&k->pass) ? colo_logprob_i_hash_targets(&k->pass) : 0);
}

colo_status_t colo_linear_i_begin(struct colo_linear_call *k, const colo_linear_logprob_t *l,
                                  const colo_tensor_t *hidden, const colo_tensor_t *targets,
                                  const colo_support_saved_t *support, void *workspace,
                                  colo_stream_t stream)
{
    const colo_logprob_config_t *c = &l->config.logprob;
    k->l = l;
    k->workspace = workspace;
    k->main = stream;
    k->aux = l->ops->stream_of(l->aux);
    k->hidden = *hidden;
    k->rows = (struct colo_linear_rows){
        .tokens = k->s.tokens,
        .rows = k->s.rows,
        .targets = targets->data,
        .target_stride = targets->stride[0],
        .ignore_index = c->ignore_index,
        .vocab = c->logits.vocab,
        .row_of = colo_linear_place(k->workspace, k->m.row_of),
        .token_of = colo_linear_place(k->workspace, k->m.token_of),
        .row_targets = colo_linear_place(k->workspace, k->m.row_targets),
        .counts = colo_linear_place(k->workspace, k->m.counts),
    };
    const int64_t shape[2] = {k->s.rows, l->columns};
    colo_tensor_t z = colo_tensor_host(NULL, l->config.logits_dtype, 2, shape);
    colo_tensor_t packed = colo_tensor_host(k->rows.row_targets, COLO_I64, 1, shape);
    k->pass = colo_logprob_i_pass(c, &z, &packed);
    k->pass.support = colo_loss_i_support(support);
    k->pass.support.token_of = k->rows.token_of;
    k->pass.row_stride = k->s.z_stride;
    k->pass.d_dtype = l->dtype;
    k->true_columns = k->pass.true_columns;
    colo_logprob_i_set_ranks(&k->pass, l->group);
    k->pass.blocks = colo_linear_place(k->workspace, k->m.blocks);
    k->pass.block = k->s.block;
    k->pass.out = (colo_logprob_out_t){
        .logp = colo_linear_place(k->workspace, k->m.logp),
        .entropy = colo_linear_place(k->workspace, k->m.entropy),
        .loss = colo_linear_place(k->workspace, k->m.loss),
        .correct = colo_linear_place(k->workspace, k->m.correct),
    };
    COLO_TRY(l->loss->rows_compact(&k->rows, stream));
    if (k->s.pass != COLO_LINEAR_BACKWARD)
        make_header(k);
    return COLO_OK;
}

static colo_status_t take_head(struct colo_linear_call *k)
{
    colo_tensor_t w, b;
    COLO_TRY(colo_lm_head_acquire(k->l->head, k->main, &w, &b));
    k->weight = (struct colo_linear_matrix){w.data, w.stride[0], w.dtype};
    k->bias = k->l->has_bias ? b.data : NULL;
    if (k->m.bias >= 0) { /* a gathered bias is a column of the gathered head */
        colo_box_t to = {colo_linear_place(k->workspace, k->m.bias),
                         {1, 1, k->l->columns},
                         {0, 0, 1}},
                   from = {b.data, {1, 1, k->l->columns}, {0, 0, b.stride[0]}};
        k->bias = to.data;
        if (k->l->columns > 0)
            return k->l->ops->box_copy(&to, &from, colo_dtype_size(k->l->dtype), k->main);
    }
    return COLO_OK;
}

/* ---- the pipeline ---- */

static void set_columns(struct colo_linear_call *k, int64_t first, int64_t end)
{
    const int64_t real = k->true_columns - first;
    k->pass.columns = end - first;
    k->pass.true_columns = real < 0 ? 0 : real < k->pass.columns ? real : k->pass.columns;
    k->pass.config.logits.vocab_start = k->l->config.logprob.logits.vocab_start + first;
}

static void set_unit(struct colo_linear_call *k, int64_t u)
{
    k->pass.lo = k->pass.row_lo = chunk_of(k, u) * k->s.chunk;
    k->pass.hi = k->s.rows - k->pass.lo < k->s.chunk ? k->s.rows : k->pass.lo + k->s.chunk;
    set_columns(k, column_of(k, u), (u + 1) % k->s.blocks ? column_of(k, u + 1) : k->l->columns);
    k->pass.logits = logits_at(k, u);
    k->pass.d_logits = colo_linear_has(&k->s, COLO_STEP_D_LOGITS) ? d_logits_at(k, u) : NULL;
    k->pass.d_row_stride = k->s.early      ? k->s.part[part_of(k, u)].stride
                           : k->s.in_place ? k->s.z_stride
                                           : k->s.d_stride;
}

static void *rows_at(const struct colo_linear_call *k, int64_t c)
{
    return joined_at(k, k->m.h, c, k->l->dtype, k->l->hidden);
}

/* Columns of a unit that one product has. */
static int64_t width_of(const struct colo_linear_call *k)
{
    return k->s.segment ? k->s.segment : k->pass.columns;
}

static colo_status_t multiply(const struct colo_linear_call *k, struct colo_linear_gemm *g)
{
    g->rows = k->pass.hi - k->pass.lo;
    g->first = k->pass.lo;
    g->columns = width_of(k);
    g->pinned = k->s.segment > 0;
    g->hidden = k->l->hidden;
    g->workspace = colo_linear_place(k->workspace, k->m.gemm);
    return k->l->loss->gemm->run(k->l->gemm, g, k->main);
}

/* The unit's rows, from the @from-th on, of a matrix with a row a column. */
static struct colo_linear_matrix rows_of(const struct colo_linear_call *k,
                                         const struct colo_linear_matrix *w, int64_t u,
                                         int64_t from)
{
    return (struct colo_linear_matrix){
        colo_linear_element(w->data, w->dtype, (column_of(k, u) + from) * w->stride), w->stride,
        w->dtype};
}

/* The columns of @z from @from on. */
static struct colo_linear_matrix columns_from(const struct colo_linear_matrix *z, int64_t from)
{
    return (struct colo_linear_matrix){colo_linear_element(z->data, z->dtype, from), z->stride,
                                       z->dtype};
}

static colo_status_t take_rows(struct colo_linear_call *k, int64_t u)
{
    const struct colo_linear_matrix hidden = {k->hidden.data, k->hidden.stride[0], k->l->dtype};
    return k->m.h[0] < 0 ? COLO_OK
                         : k->l->loss->rows_gather(&k->rows, k->pass.lo, k->pass.hi, k->l->hidden,
                                                   rows_at(k, chunk_of(k, u)), &hidden, k->main);
}

/* A product of the unit, one for each of its segments: the rows of @w and columns of @z are its. */
static colo_status_t multiply_all(const struct colo_linear_call *k, struct colo_linear_gemm g,
                                  int64_t u)
{
    const struct colo_linear_matrix w = g.w, z = g.z;
    const char *bias = g.bias;
    int64_t from = 0;
    do {
        g.w = rows_of(k, &w, u, from);
        g.z = columns_from(&z, from);
        g.bias = bias ? bias + from * (int64_t)colo_dtype_size(k->l->dtype) : NULL;
        COLO_TRY(multiply(k, &g));
        from += width_of(k);
    } while (from < k->pass.columns);
    return COLO_OK;
}

static colo_status_t make_logits(struct colo_linear_call *k, int64_t u)
{
    const struct colo_linear_gemm g = {
        .product = COLO_LINEAR_LOGITS,
        .h = {rows_at(k, chunk_of(k, u)), k->l->hidden, k->l->dtype},
        .w = k->weight,
        .z = {logits_at(k, u), k->s.z_stride, k->l->config.logits_dtype},
        .bias = colo_linear_element(k->bias, k->l->dtype, column_of(k, u))};
    return multiply_all(k, g, u);
}

static colo_status_t gather_blocks(struct colo_linear_call *k, int64_t u)
{
    struct colo_logprob_pass *p = &k->pass;
    COLO_TRY(colo_comm_i_all_gather(k->l->group, COLO_CATEGORY_LOSS,
                                    p->blocks + p->rank * p->block.bytes, p->blocks,
                                    p->segments * p->block.bytes, COLO_U8, k->aux));
    return u == 0 && colo_lm_head_config(k->l->head)->mem == COLO_HOST
               ? colo_logprob_i_check_headers(p)
               : COLO_OK;
}

/* The unit's d_logits; shared ones part by part. */
static colo_status_t make_d_logits(struct colo_linear_call *k, int64_t u)
{
    if (!k->s.shared)
        return k->l->loss->logprob_grad(&k->pass, k->aux);
    for (int32_t i = 0; i < k->s.parts; i++) {
        const struct colo_linear_part *p = &k->s.part[i];
        set_columns(k, p->first, p[1].first);
        k->pass.logits = colo_linear_element(logits_at(k, u), k->l->config.logits_dtype, p->first);
        k->pass.d_logits = part_at(k, i, u);
        k->pass.d_row_stride = p->stride;
        COLO_TRY(k->l->loss->logprob_grad(&k->pass, k->aux));
    }
    return COLO_OK;
}

/* On the auxiliary stream, once d_hidden is whole: the sum over the vocabulary group. */
static colo_status_t sum_d_hidden(struct colo_linear_call *k)
{
    const colo_linear_logprob_t *l = k->l;
    const int64_t count = k->s.tokens * l->hidden;
    if (l->config.d_hidden == COLO_D_HIDDEN_PARTIAL)
        return COLO_OK;
    if (k->s.segment) { /* every rank has the sum */
        const int64_t each = k->s.tokens / colo_comm_size(l->group);
        const colo_tensor_t *d = k->d_hidden_out;
        const colo_box_t to = {d->data, {1, each, l->hidden}, {0, d->stride[0], 1}},
                         from = {colo_linear_element(k->d_hidden.data, l->dtype,
                                                     each * colo_comm_rank(l->group) * l->hidden),
                                 {1, each, l->hidden},
                                 {0, l->hidden, 1}};
        return l->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE || each == 0
                   ? COLO_OK
                   : l->ops->box_copy(&to, &from, colo_dtype_size(l->dtype), k->main);
    }
    COLO_TRY(record(k, COLO_EVENT_MAIN, k->main));
    COLO_TRY(wait_for(k, COLO_EVENT_MAIN, k->aux));
    colo_comm_i_set_stage(l->group, colo_linear_place(k->workspace, k->m.d_h_stage),
                          (size_t)k->m.d_h_stage_bytes);
    const colo_status_t st =
        l->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE
            ? colo_comm_i_all_reduce(l->group, COLO_CATEGORY_LOSS, k->d_hidden.data,
                                     k->d_hidden.data, count, l->dtype, COLO_SUM, k->aux)
            : colo_comm_i_reduce_scatter(l->group, COLO_CATEGORY_LOSS, k->d_hidden.data,
                                         k->d_hidden_out->data, count / colo_comm_size(l->group),
                                         l->dtype, COLO_SUM, k->aux);
    colo_comm_i_set_stage(l->group, NULL, 0);
    return st;
}

/* a += b, of a chunk's rows */
static colo_status_t add(const struct colo_linear_call *k, const struct colo_linear_matrix *a,
                         const struct colo_linear_matrix *b)
{
    const int64_t rows = k->pass.hi - k->pass.lo, hidden = k->l->hidden;
    const colo_box_t both[] = {{a->data, {1, rows, hidden}, {0, hidden, 1}},
                               {b->data, {1, rows, hidden}, {0, hidden, 1}}};
    return rows == 0 ? COLO_OK : k->l->ops->box_sum(&both[0], both, 2, a->dtype, k->main);
}

/* The @i-th chunk, of the sum dtype, of those at @offset, @rows each. */
static struct colo_linear_matrix sum_at(const struct colo_linear_call *k, int64_t offset,
                                        int64_t rows, int64_t i)
{
    const colo_dtype_t dtype = k->l->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const int64_t hidden = k->l->hidden;
    return (struct colo_linear_matrix){
        colo_linear_element(colo_linear_place(k->workspace, offset), dtype, i * rows * hidden),
        hidden, dtype};
}

/* With segments: d_hidden is a sum over a tree whose leaves are segments. A rank's are a subtree;
 * the nodes that wait for their sibling are on a stack. Then the same over ranks. */
static colo_status_t sum_segments(struct colo_linear_call *k, int64_t u,
                                  const struct colo_linear_matrix *z,
                                  struct colo_linear_matrix *sum)
{
    const colo_linear_logprob_t *l = k->l;
    const int64_t rows = k->pass.hi - k->pass.lo;
    const int32_t ranks = colo_comm_size(l->group);
    for (int64_t from = 0; from < k->pass.columns; from += k->s.segment) {
        const int64_t leaf = (column_of(k, u) + from) / k->s.segment;
        int64_t depth = 0;
        for (int64_t i = leaf; i > 0; i /= 2)
            depth += i & 1;
        *sum = sum_at(k, k->m.d_h_sum, rows, depth);
        struct colo_linear_gemm g = {
            .product = COLO_LINEAR_D_HIDDEN,
            .h = *sum,
            .w = rows_of(k, &k->weight, u, from),
            .z = columns_from(z, from),
            .scale = k->scale,
        };
        COLO_TRY(multiply(k, &g));
        for (int64_t i = leaf; i & 1; i /= 2) {
            const struct colo_linear_matrix right = *sum;
            *sum = sum_at(k, k->m.d_h_sum, rows, --depth);
            COLO_TRY(add(k, sum, &right));
        }
    }
    if ((u + 1) % k->s.blocks != 0 || ranks == 1)
        return COLO_OK;
    COLO_TRY(record(k, COLO_EVENT_MAIN, k->main));
    COLO_TRY(wait_for(k, COLO_EVENT_MAIN, k->aux));
    COLO_TRY(colo_comm_i_all_gather(l->group, COLO_CATEGORY_LOSS, sum->data,
                                    colo_linear_place(k->workspace, k->m.d_h_all), rows * l->hidden,
                                    sum->dtype, k->aux));
    COLO_TRY(colo_linear_i_join(k));
    for (int32_t step = 1; step < ranks; step *= 2)
        for (int32_t r = 0; r + step < ranks; r += 2 * step) {
            const struct colo_linear_matrix right = sum_at(k, k->m.d_h_all, rows, r + step);
            *sum = sum_at(k, k->m.d_h_all, rows, r);
            COLO_TRY(add(k, sum, &right));
        }
    *sum = sum_at(k, k->m.d_h_all, rows, 0);
    return COLO_OK;
}

static struct colo_linear_matrix gradient_of(const struct colo_linear_call *k, int64_t u)
{
    return (struct colo_linear_matrix){d_logits_at(k, u), k->pass.d_row_stride, k->l->dtype};
}

/* What a unit adds to d_hidden of its chunk; the last one puts it there. */
static colo_status_t make_d_hidden(struct colo_linear_call *k, int64_t u)
{
    const colo_loss_ops_t *ops = k->l->loss;
    const int64_t c = chunk_of(k, u), hidden = k->l->hidden;
    const struct colo_linear_matrix z = gradient_of(k, u);
    struct colo_linear_matrix sum = {colo_linear_place(k->workspace, k->m.d_h_sum), hidden,
                                     COLO_F32},
                              d_h = {k->s.d_hidden_last ? rows_at(k, c)
                                                        : colo_linear_place(k->workspace, k->m.d_h),
                                     hidden, k->l->dtype};
    struct colo_linear_gemm g = {
        .product = COLO_LINEAR_D_HIDDEN,
        .h = sum.data ? sum : d_h,
        .w = rows_of(k, &k->weight, u, 0),
        .z = z,
        .beta = u % k->s.blocks > 0,
        .scale = k->scale,
    };
    COLO_TRY(k->s.segment ? sum_segments(k, u, &z, &sum) : multiply(k, &g));
    if ((u + 1) % k->s.blocks != 0)
        return COLO_OK;
    if (sum.data && sum.dtype == d_h.dtype)
        d_h = sum;
    else if (sum.data)
        COLO_TRY(ops->rows_convert(&d_h, &sum, k->pass.hi - k->pass.lo, hidden, k->main));
    if (c == 0)
        COLO_TRY(ops->rows_clear(&k->rows, hidden, &k->d_hidden, k->main));
    COLO_TRY(ops->rows_restore(&k->rows, k->pass.lo, k->pass.hi, hidden, &k->d_hidden, d_h.data,
                               k->main));
    return k->pass.hi == k->s.rows ? sum_d_hidden(k) : COLO_OK; /* during the last d_W */
}

/* From its stage to d_weight, when nothing reads the first part's d_logits any more. */
static colo_status_t unstage(struct colo_linear_call *k)
{
    const int64_t count = k->s.part[1].first * k->l->hidden;
    const colo_box_t to = {k->d_weight.data, {1, 1, count}, {0, 0, 1}},
                     from = {colo_linear_place(k->workspace, k->m.stage), {1, 1, count}, {0, 0, 1}};
    return k->l->ops->box_copy(&to, &from, colo_dtype_size(k->l->dtype), k->main);
}

static colo_status_t make_d_weight(struct colo_linear_call *k, int64_t u)
{
    const int64_t c = chunk_of(k, u);
    const bool staged = u == 0 && k->m.stage >= 0;
    const struct colo_linear_matrix z = gradient_of(k, u);
    const struct colo_linear_gemm g = {
        .product = COLO_LINEAR_D_WEIGHT,
        .h = {rows_at(k, c), k->l->hidden, k->l->dtype},
        .w = {staged ? colo_linear_place(k->workspace, k->m.stage) : k->d_weight.data,
              k->d_weight.stride[0], k->d_weight.dtype},
        .z = z,
        .beta = k->fresh && c == 0 ? 0 : 1,
        .scale = k->scale};
    COLO_TRY(multiply_all(k, g, u));
    const colo_tensor_t *b = &k->d_bias;
    return k->l->has_bias
               ? k->l->loss->rows_sum(
                     &z, k->pass.hi - k->pass.lo, k->pass.columns, k->scale,
                     colo_linear_element(b->data, b->dtype, column_of(k, u) * b->stride[0]),
                     b->stride[0], g.beta, k->main)
               : COLO_OK;
}

colo_status_t colo_linear_i_join(const struct colo_linear_call *k)
{
    COLO_TRY(record(k, COLO_EVENT_AUX, k->aux));
    return wait_for(k, COLO_EVENT_AUX, k->main);
}

/* ---- the pass ---- */

/* @parity: of the unit that an event of a pair belongs to */
static colo_status_t run_step(struct colo_linear_call *k, const struct colo_linear_step *step,
                              int64_t u, int64_t parity)
{
    const colo_loss_ops_t *ops = k->l->loss;
    const int32_t event = step->event + (step->event < COLO_EVENT_MAIN ? (int32_t)parity : 0);
    const colo_stream_t on = step->aux ? k->aux : k->main;
    switch ((enum colo_linear_step_kind)step->kind) {
    case COLO_STEP_TAKE_HEAD:
        return take_head(k);
    case COLO_STEP_TAKE_ROWS:
        return take_rows(k, u);
    case COLO_STEP_LOGITS:
        return make_logits(k, u);
    case COLO_STEP_STATISTICS:
        k->pass.block_lo = k->s.piecewise || colo_logprob_i_alone(&k->pass) ? k->pass.lo : 0;
        return ops->logprob_stats(&k->pass, on);
    case COLO_STEP_GATHER:
        return gather_blocks(k, u);
    case COLO_STEP_MERGE:
        return ops->logprob_merge(&k->pass, on);
    case COLO_STEP_D_LOGITS:
        return make_d_logits(k, u);
    case COLO_STEP_D_HIDDEN:
        return make_d_hidden(k, u);
    case COLO_STEP_D_WEIGHT:
        return make_d_weight(k, u);
    case COLO_STEP_UNSTAGE:
        return u == 0 ? unstage(k) : COLO_OK;
    case COLO_STEP_OUTPUTS:
        return ops->rows_scatter(
            &(struct colo_linear_scatter){&k->rows, k->l->stat_dtype, k->pass.out, *k->out}, on);
    case COLO_STEP_BARRIER:
        return colo_comm_i_host_barrier(k->l->group, "lm_head");
    case COLO_STEP_RELEASE_HEAD:
        return colo_lm_head_release(k->l->head, on);
    case COLO_STEP_REDUCE:
        return colo_lm_head_i_reduce(k->l->head, &k->head_grads, k->s.once,
                                     colo_linear_place(k->workspace, k->m.reduce), on);
    case COLO_STEP_RECORD:
        return record(k, event, on);
    case COLO_STEP_WAIT:
        return u < 2 && step->when == COLO_WHEN_UNIT && step->event == COLO_EVENT_WORK
                   ? COLO_OK /* no unit had this buffer before */
                   : wait_for(k, event, on);
    }
    return COLO_OK;
}

/* The steps of unit @u, and of the past: the unit before it and those that are joined with it. */
static colo_status_t run_unit(struct colo_linear_call *k, int64_t u, int64_t units)
{
    const struct colo_linear_program *p = &k->s.program;
    const bool past = u > 0 && (u % k->s.joined == 0 || u == units), now = u < units;
    for (const struct colo_linear_step *step = p->step; step < p->step + p->n; step++)
        if (step->when == COLO_WHEN_PAST && past) {
            const int64_t last = u - 1, first = last - last % k->s.joined;
            set_unit(k, last);
            const int64_t hi = k->pass.hi;
            set_unit(k, first);
            k->pass.hi = hi;
            COLO_TRY(run_step(k, step, first, last % 2));
        } else if (now && (step->when == COLO_WHEN_UNIT ||
                           (step->when == COLO_WHEN_CHUNK && u % k->s.blocks == 0) ||
                           (step->when == COLO_WHEN_JOINED && u % k->s.joined == 0))) {
            set_unit(k, u);
            COLO_TRY(run_step(k, step, u, u % 2));
        }
    return COLO_OK;
}

static colo_status_t run_once(struct colo_linear_call *k, enum colo_linear_when when)
{
    const struct colo_linear_program *p = &k->s.program;
    for (const struct colo_linear_step *step = p->step; step < p->step + p->n; step++)
        if (step->when == when)
            COLO_TRY(run_step(k, step, 0, 0));
    return COLO_OK;
}

colo_status_t colo_linear_i_pipeline(struct colo_linear_call *k)
{
    const int64_t units = k->s.chunks * k->s.blocks;
    COLO_TRY(run_once(k, COLO_WHEN_BEFORE));
    for (int64_t u = 0; u <= units; u++)
        COLO_TRY(run_unit(k, u, units));
    k->pass.lo = k->pass.block_lo = 0; /* of all rows */
    k->pass.hi = k->s.rows;
    return run_once(k, COLO_WHEN_AFTER);
}
