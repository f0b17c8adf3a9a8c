/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline.c - one pass of the lm_head path: in which order products, passes and collectives run.
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
 * so there is one loop, over units, which are the blocks of the chunks, and work() says which.
 * Rows, chunks and memory are workspace.c's, formulas the passes' (passes.h), products and packing
 * the table's (linear.h), shards the head's.
 *
 * The head is acquired once before the loop and released after it, whatever the loop does and
 * whether or not this rank has a token: the other ranks of its group are in the same pass. d_W is
 * reduced once after it.
 */
#include "loss/validate.h"
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"

enum { LOGITS0 = 0, LOGITS1 = 1, WORK0 = 2, WORK1 = 3, MAIN = 4, AUX = 5, USED = 6 };
_Static_assert((int)USED == (int)COLO_LINEAR_EVENTS, "create makes what is used");

static void *in_workspace(const struct colo_linear_call *k, int64_t offset)
{
    return offset < 0 ? NULL : k->workspace + offset;
}

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

static void *element(void *data, colo_dtype_t dtype, int64_t i)
{
    return data ? (char *)data + i * (int64_t)colo_dtype_size(dtype) : NULL;
}

/* The first of a part's d_logits, of a unit's chunk. */
static void *part_at(const struct colo_linear_call *k, int64_t part, int64_t u)
{
    const struct colo_linear_part *p = &k->s.part[part];
    void *from = part < k->s.inside ? k->shared : k->saved_logits;
    return element(from, k->l->dtype,
                   p->ahead * (k->s.shared ? k->s.rows : 1) +
                       chunk_of(k, u) * k->s.chunk * p->stride);
}

/* The first row of a unit, or of a chunk, in what the workspace has of the joined ones. */
static void *joined_at(const struct colo_linear_call *k, const int64_t offset[2], int64_t u,
                       colo_dtype_t dtype, int64_t stride)
{
    return element(in_workspace(k, offset[offset[1] < 0 ? 0 : u / k->s.joined % 2]), dtype,
                   u % k->s.joined * k->s.chunk * stride);
}

static void *d_logits_at(const struct colo_linear_call *k, int64_t u);

/* The first of a unit's logits. */
static void *logits_at(const struct colo_linear_call *k, int64_t u)
{
    if (k->s.early && k->s.in_place)
        return d_logits_at(k, u);
    return k->s.keeps      ? element(k->saved_logits, k->l->config.logits_dtype,
                                     chunk_of(k, u) * k->s.chunk * k->s.z_stride + column_of(k, u))
           : k->s.in_place ? joined_at(k, k->m.z, u, k->l->dtype, k->s.z_stride)
                           : in_workspace(k, k->m.z[u % 2]);
}

/* The first of a unit's d_logits. */
static void *d_logits_at(const struct colo_linear_call *k, int64_t u)
{
    const int64_t part = part_of(k, u);
    if (k->s.early)
        return element(part_at(k, part, u), k->l->dtype, column_of(k, u) - k->s.part[part].first);
    return k->s.in_place ? logits_at(k, u) : joined_at(k, k->m.dz, u, k->l->dtype, k->s.d_stride);
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
        .row_of = in_workspace(k, k->m.row_of),
        .token_of = in_workspace(k, k->m.token_of),
        .row_targets = in_workspace(k, k->m.row_targets),
        .counts = in_workspace(k, k->m.counts),
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
    k->pass.blocks = in_workspace(k, k->m.blocks);
    k->pass.block = k->s.block;
    k->pass.out = (colo_logprob_out_t){
        .logp = in_workspace(k, k->m.logp),
        .entropy = in_workspace(k, k->m.entropy),
        .loss = in_workspace(k, k->m.loss),
        .correct = in_workspace(k, k->m.correct),
    };
    return l->loss->rows_compact(&k->rows, stream);
}

/* What the gather tells of this rank; after pack. */
void colo_linear_i_make_header(struct colo_linear_call *k)
{
    const colo_logprob_config_t *c = &k->l->config.logprob;
    bool on_host = colo_lm_head_config(k->l->head)->mem == COLO_HOST;
    colo_logprob_i_set_header(
        &k->pass, colo_logprob_i_hash_config(c, k->pass.dtype),
        on_host && !colo_logprob_i_alone(&k->pass) ? colo_logprob_i_hash_targets(&k->pass) : 0);
}

static colo_status_t take_weight(struct colo_linear_call *k)
{
    colo_tensor_t w, b;
    COLO_TRY(colo_lm_head_acquire(k->l->head, k->main, &w, &b));
    k->weight = (struct colo_linear_matrix){w.data, w.stride[0], w.dtype};
    k->bias = k->l->has_bias ? b.data : NULL;
    if (k->m.bias >= 0) { /* a gathered bias is a column of the gathered head */
        colo_box_t to = {in_workspace(k, k->m.bias), {1, 1, k->l->columns}, {0, 0, 1}},
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
    k->pass.d_logits = k->s.makes_d_logits ? d_logits_at(k, u) : NULL;
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
    g->workspace = in_workspace(k, k->m.gemm);
    return k->l->loss->gemm->run(k->l->gemm, g, k->main);
}

/* The unit's rows, from the @from-th on, of a matrix with a row a column. */
static struct colo_linear_matrix rows_of(const struct colo_linear_call *k,
                                         const struct colo_linear_matrix *w, int64_t u,
                                         int64_t from)
{
    return (struct colo_linear_matrix){
        element(w->data, w->dtype, (column_of(k, u) + from) * w->stride), w->stride, w->dtype};
}

/* The columns of @z from @from on. */
static struct colo_linear_matrix columns_from(const struct colo_linear_matrix *z, int64_t from)
{
    return (struct colo_linear_matrix){element(z->data, z->dtype, from), z->stride, z->dtype};
}

/* On the caller's stream: the unit's logits, and before the first of a chunk its rows of hidden. */
static colo_status_t make_logits(struct colo_linear_call *k, int64_t u)
{
    const colo_loss_ops_t *ops = k->l->loss;
    const struct colo_linear_matrix hidden = {k->hidden.data, k->hidden.stride[0], k->l->dtype};
    const int64_t c = chunk_of(k, u);
    set_unit(k, u);
    if (u >= 2) /* the auxiliary stream has read what was in this buffer */
        COLO_TRY(wait_for(k, WORK0 + (int32_t)(u % 2), k->main));
    if (k->m.h[0] >= 0 && u % k->s.blocks == 0)
        COLO_TRY(ops->rows_gather(&k->rows, k->pass.lo, k->pass.hi, k->l->hidden, rows_at(k, c),
                                  &hidden, k->main));
    const struct colo_linear_matrix z = {logits_at(k, u), k->s.z_stride, k->l->config.logits_dtype};
    int64_t from = 0;
    do {
        struct colo_linear_gemm g = {
            .product = COLO_LINEAR_LOGITS,
            .h = {rows_at(k, c), k->l->hidden, k->l->dtype},
            .w = rows_of(k, &k->weight, u, from),
            .z = columns_from(&z, from),
            .bias = element(k->bias, k->l->dtype, column_of(k, u) + from),
        };
        if (k->s.makes_logits)
            COLO_TRY(multiply(k, &g));
        from += width_of(k);
    } while (from < k->pass.columns);
    return record(k, LOGITS0 + (int32_t)(u % 2), k->main);
}

static colo_status_t gather_blocks(struct colo_linear_call *k, bool check)
{
    struct colo_logprob_pass *p = &k->pass;
    COLO_TRY(colo_comm_i_all_gather(k->l->group, COLO_CATEGORY_LOSS,
                                    p->blocks + p->rank * p->block.bytes, p->blocks,
                                    p->segments * p->block.bytes, COLO_U8, k->aux));
    return check && colo_lm_head_config(k->l->head)->mem == COLO_HOST
               ? colo_logprob_i_check_headers(p)
               : COLO_OK;
}

/* On the auxiliary stream: the unit's d_logits; shared ones part by part. */
static colo_status_t make_d_logits(struct colo_linear_call *k, int64_t u)
{
    if (!k->s.shared)
        return k->l->loss->logprob_grad(&k->pass, k->aux);
    for (int32_t i = 0; i < k->s.parts; i++) {
        const struct colo_linear_part *p = &k->s.part[i];
        set_columns(k, p->first, p[1].first);
        k->pass.logits = element(logits_at(k, u), k->l->config.logits_dtype, p->first);
        k->pass.d_logits = part_at(k, i, u);
        k->pass.d_row_stride = p->stride;
        COLO_TRY(k->l->loss->logprob_grad(&k->pass, k->aux));
    }
    return COLO_OK;
}

/* On the auxiliary stream: what the pass makes of a unit's logits. */
static colo_status_t work(struct colo_linear_call *k, int64_t u)
{
    const colo_loss_ops_t *ops = k->l->loss;
    const bool piecewise = k->s.piecewise, alone = colo_logprob_i_alone(&k->pass);
    set_unit(k, u);
    COLO_TRY(wait_for(k, LOGITS0 + (int32_t)(u % 2), k->aux));
    if (k->s.pass != COLO_LINEAR_BACKWARD) {
        k->pass.block_lo = piecewise || alone ? k->pass.lo : 0;
        COLO_TRY(ops->logprob_stats(&k->pass, k->aux));
        if (piecewise && !alone)
            COLO_TRY(gather_blocks(k, u == 0));
        if (piecewise || alone)
            COLO_TRY(ops->logprob_merge(&k->pass, k->aux));
    }
    if (k->s.joined > 1 && u % k->s.joined == 0) { /* products have read what was there before */
        COLO_TRY(record(k, MAIN, k->main));
        COLO_TRY(wait_for(k, MAIN, k->aux));
    }
    if (k->s.makes_d_logits)
        COLO_TRY(make_d_logits(k, u));
    return record(k, WORK0 + (int32_t)(u % 2), k->aux);
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
                         from = {element(k->d_hidden.data, l->dtype,
                                         each * colo_comm_rank(l->group) * l->hidden),
                                 {1, each, l->hidden},
                                 {0, l->hidden, 1}};
        return l->config.d_hidden == COLO_D_HIDDEN_ALL_REDUCE || each == 0
                   ? COLO_OK
                   : l->ops->box_copy(&to, &from, colo_dtype_size(l->dtype), k->main);
    }
    COLO_TRY(record(k, MAIN, k->main));
    COLO_TRY(wait_for(k, MAIN, k->aux));
    colo_comm_i_set_stage(l->group, in_workspace(k, k->m.d_h_stage), (size_t)k->m.d_h_stage_bytes);
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
    return (struct colo_linear_matrix){element(in_workspace(k, offset), dtype, i * rows * hidden),
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
    COLO_TRY(record(k, MAIN, k->main));
    COLO_TRY(wait_for(k, MAIN, k->aux));
    COLO_TRY(colo_comm_i_all_gather(l->group, COLO_CATEGORY_LOSS, sum->data,
                                    in_workspace(k, k->m.d_h_all), rows * l->hidden, sum->dtype,
                                    k->aux));
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

/* On the caller's stream: what a unit adds to d_hidden of its chunk; the last one puts it there. */
static colo_status_t make_d_hidden(struct colo_linear_call *k, int64_t u,
                                   const struct colo_linear_matrix *z)
{
    const colo_loss_ops_t *ops = k->l->loss;
    const int64_t c = chunk_of(k, u), hidden = k->l->hidden;
    struct colo_linear_matrix sum = {in_workspace(k, k->m.d_h_sum), hidden, COLO_F32},
                              d_h = {k->s.d_hidden_last ? rows_at(k, c) : in_workspace(k, k->m.d_h),
                                     hidden, k->l->dtype};
    struct colo_linear_gemm g = {
        .product = COLO_LINEAR_D_HIDDEN,
        .h = sum.data ? sum : d_h,
        .w = rows_of(k, &k->weight, u, 0),
        .z = *z,
        .beta = u % k->s.blocks > 0,
        .scale = k->scale,
    };
    COLO_TRY(k->s.segment ? sum_segments(k, u, z, &sum) : multiply(k, &g));
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
static colo_status_t place_first_part(const struct colo_linear_call *k)
{
    const int64_t count = k->s.part[1].first * k->l->hidden;
    const colo_box_t to = {k->d_weight.data, {1, 1, count}, {0, 0, 1}},
                     from = {in_workspace(k, k->m.stage), {1, 1, count}, {0, 0, 1}};
    return k->l->ops->box_copy(&to, &from, colo_dtype_size(k->l->dtype), k->main);
}

/* On the caller's stream: gradients of the unit @last and those that are joined with it, when the
 * auxiliary stream has made d_logits. */
static colo_status_t make_grads(struct colo_linear_call *k, int64_t last)
{
    const int64_t u = last - last % k->s.joined, c = chunk_of(k, u);
    const bool staged = u == 0 && k->m.stage >= 0;
    set_unit(k, last);
    const int64_t hi = k->pass.hi;
    set_unit(k, u);
    k->pass.hi = hi;
    const struct colo_linear_matrix z = {d_logits_at(k, u), k->pass.d_row_stride, k->l->dtype},
                                    w = {staged ? in_workspace(k, k->m.stage) : k->d_weight.data,
                                         k->d_weight.stride[0], k->d_weight.dtype};
    COLO_TRY(wait_for(k, WORK0 + (int32_t)(last % 2), k->main));
    if (!k->l->config.frozen_hidden && !k->s.d_hidden_last)
        COLO_TRY(make_d_hidden(k, u, &z));
    if (k->l->config.frozen_weight)
        return COLO_OK;
    const double beta = k->fresh && c == 0 ? 0 : 1;
    int64_t from = 0;
    do {
        struct colo_linear_gemm g = {
            .product = COLO_LINEAR_D_WEIGHT,
            .h = {rows_at(k, c), k->l->hidden, k->l->dtype},
            .w = rows_of(k, &w, u, from),
            .z = columns_from(&z, from),
            .beta = beta,
            .scale = k->scale,
        };
        COLO_TRY(multiply(k, &g));
        from += width_of(k);
    } while (from < k->pass.columns);
    const colo_tensor_t *b = &k->d_bias;
    if (k->l->has_bias)
        COLO_TRY(k->l->loss->rows_sum(&z, k->pass.hi - k->pass.lo, k->pass.columns, k->scale,
                                      element(b->data, b->dtype, column_of(k, u) * b->stride[0]),
                                      b->stride[0], beta, k->main));
    if (k->s.d_hidden_last && !k->l->config.frozen_hidden)
        COLO_TRY(make_d_hidden(k, u, &z));
    return staged ? place_first_part(k) : COLO_OK;
}

colo_status_t colo_linear_i_join(const struct colo_linear_call *k)
{
    COLO_TRY(record(k, AUX, k->aux));
    return wait_for(k, AUX, k->main);
}

/* After the last chunk: what is left for the auxiliary stream, then the caller's stream waits for
 * it. */
static colo_status_t finish(struct colo_linear_call *k, const colo_logprob_out_t *out)
{
    if (!k->s.piecewise && out && !colo_logprob_i_alone(&k->pass)) {
        k->pass.lo = k->pass.block_lo = 0;
        k->pass.hi = k->s.rows;
        COLO_TRY(gather_blocks(k, true));
        COLO_TRY(k->l->loss->logprob_merge(&k->pass, k->aux));
    }
    if (out) {
        struct colo_linear_scatter s = {
            .rows = &k->rows, .dtype = k->l->stat_dtype, .from = k->pass.out, .to = *out};
        COLO_TRY(k->l->loss->rows_scatter(&s, k->aux));
    }
    return colo_linear_i_join(k);
}

colo_status_t colo_linear_i_pipeline(struct colo_linear_call *k, const colo_logprob_out_t *out)
{
    if (k->s.needs_weight)
        COLO_TRY(take_weight(k));
    const int64_t units = k->s.chunks * k->s.blocks;
    const bool over = k->s.joined > 1 && k->s.in_place; /* logits come where d_logits are */
    for (int64_t u = 0; u <= units; u++) {
        const bool due = k->s.makes_grads && u > 0 && (u % k->s.joined == 0 || u == units);
        if (due && over)
            COLO_TRY(make_grads(k, u - 1));
        if (u < units)
            COLO_TRY(make_logits(k, u));
        if (due && !over)
            COLO_TRY(make_grads(k, u - 1));
        if (u < units)
            COLO_TRY(work(k, u));
    }
    COLO_TRY(finish(k, out));
    COLO_TRY(colo_comm_i_host_barrier(k->l->group,
                                      "lm_head")); /* the last product, too, is behind all */
    if (k->s.needs_weight)
        COLO_TRY(colo_lm_head_release(k->l->head, k->main));
    if (k->s.makes_grads && !k->l->config.frozen_weight)
        return colo_lm_head_i_reduce(k->l->head, &k->head_grads, k->s.once,
                                     in_workspace(k, k->m.reduce), k->main);
    return COLO_OK;
}
