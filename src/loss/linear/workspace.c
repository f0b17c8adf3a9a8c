/* SPDX-License-Identifier: Apache-2.0 */
/*
 * workspace.c - how many tokens a chunk has, and where everything of a call lies in its
 * workspace.
 *
 * Decides the chunk from what all ranks of the vocabulary group know alike: tokens, the vocabulary,
 * the group's size, the budget. Never from a rank's own columns or free memory, because in loss
 * mode the number of chunks is the number of gathers. 2048 tokens are the least by default: below,
 * the fp32 accumulation of d_W costs more memory traffic than the products cost arithmetic. What
 * the budget lets grow is rounded so that chunks are of about the same size.
 *
 * The same function lays out the workspace for the query and for the call, so the query is exact.
 */
#include "loss/linear/workspace.h"

#include "core/error.h"

#include <inttypes.h>

enum { LEAST = 2048, GRAIN = 128, ALIGN = 256, ROW_BYTES = 128 };
#define BUDGET ((size_t)1 << 30)

static int64_t elem_of(colo_dtype_t dtype)
{
    return (int64_t)colo_dtype_size(dtype);
}

/* Elements of a row of @columns, up to a multiple of ROW_BYTES. */
static int64_t stride_of(int64_t columns, colo_dtype_t dtype)
{
    int64_t step = ROW_BYTES / elem_of(dtype);
    return (columns + step - 1) / step * step;
}

/* Bytes of logits per row on the rank that all ranks reckon with. */
static int64_t row_bytes(const colo_linear_logprob_t *l)
{
    int64_t ranks = colo_comm_size(l->group), vocab = l->config.logprob.logits.vocab;
    int64_t columns = vocab / ranks + (vocab % ranks > 0);
    return stride_of(columns, l->config.logits_dtype) * elem_of(l->config.logits_dtype);
}

static int64_t budget_of(const colo_linear_logprob_t *l)
{
    size_t b = l->config.budget ? l->config.budget : BUDGET;
    return b > INT64_MAX ? INT64_MAX : (int64_t)b;
}

int64_t colo_linear_logprob_chunk(const colo_linear_logprob_t *l, int64_t rows)
{
    int64_t chunk = l ? l->config.logprob.chunk_size : 0;
    if (!l)
        return 0;
    if (chunk == 0) {
        chunk = budget_of(l) / 2 / row_bytes(l);
        chunk = chunk < LEAST ? LEAST : chunk;
        if (rows > chunk) {
            int64_t n = rows / chunk + (rows % chunk > 0);
            chunk = rows / n + (rows % n > 0);
            chunk = (chunk + GRAIN - 1) / GRAIN * GRAIN;
        }
    }
    return chunk < rows ? chunk : rows > 0 ? rows : 0;
}

colo_linear_mode_t colo_linear_logprob_mode(const colo_linear_logprob_t *l, int64_t rows)
{
    int64_t bytes;
    if (!l)
        return COLO_LINEAR_AUTO;
    if (l->config.mode != COLO_LINEAR_AUTO)
        return l->config.mode;
    return colo_mul_ok(rows, row_bytes(l), &bytes) && bytes <= budget_of(l) ? COLO_LINEAR_KEEP
                                                                            : COLO_LINEAR_LOGPROB;
}

colo_status_t colo_linear_i_size(const colo_linear_logprob_t *l, colo_linear_pass_t pass,
                                 int64_t tokens, int64_t max_valid, struct colo_linear_size *s)
{
    const colo_linear_logprob_config_t *c = &l->config;
    if (tokens < 0)
        return colo_fail(COLO_ERR_ARG, "linear: tokens is %" PRId64 ", expected >= 0", tokens);
    if ((unsigned)pass > COLO_LINEAR_INFERENCE)
        return colo_fail(COLO_ERR_ARG, "linear: pass %d is unknown", (int)pass);
    *s = (struct colo_linear_size){.pass = pass, .tokens = tokens};
    s->rows = max_valid < 0 || max_valid > tokens ? tokens : max_valid;
    s->chunk = colo_linear_logprob_chunk(l, s->rows);
    s->chunks = s->rows > 0 ? s->rows / s->chunk + (s->rows % s->chunk > 0) : 1;
    bool back = pass == COLO_LINEAR_BACKWARD, fore = pass == COLO_LINEAR_FORWARD;
    s->kept = (fore || back) && colo_linear_logprob_mode(l, s->rows) == COLO_LINEAR_KEEP;
    s->makes_grads = (back || pass == COLO_LINEAR_LOSS) && !(c->frozen_hidden && c->frozen_weight);
    s->makes_logits = !back || (s->makes_grads && !s->kept);
    s->in_place = s->kept ? c->keep_in_place : c->logits_dtype == l->dtype;
    /* AUTO looks at this rank's rows, and replicas that share a head have rows of their own: they
     * gather alike, whichever of them has to make logits again */
    bool others =
        back && s->makes_grads && c->mode == COLO_LINEAR_AUTO && colo_lm_head_group(l->head);
    s->needs_weight = s->makes_logits || (s->makes_grads && !c->frozen_hidden) || others;
    s->buffers = s->kept || !s->makes_logits ? 0 : s->chunks > 1 ? 2 : 1;
    s->z_stride = stride_of(l->columns, c->logits_dtype);
    s->d_stride = stride_of(l->columns, l->dtype);
    /* one gather for all rows; or one per chunk: in loss mode, and where no rank gathers */
    bool whole = pass != COLO_LINEAR_LOSS && colo_comm_size(l->group) > 1;
    if (!colo_logprob_i_block_layout(&c->logprob, c->logits_dtype, whole ? s->rows : s->chunk,
                                     &s->block))
        return colo_fail(COLO_ERR_ARG, "linear: statistics of %" PRId64 " tokens pass 2^63 bytes",
                         s->rows);
    return COLO_OK;
}

/* Appends a * b * elem bytes at a multiple of ALIGN; remembers an overflow in *fits. */
static int64_t put(int64_t *bytes, bool *fits, bool wanted, int64_t a, int64_t b, int64_t elem)
{
    int64_t at = *bytes, n;
    if (!wanted)
        return -1;
    *fits = *fits && colo_mul_ok(a, b, &n) && colo_mul_ok(n, elem, &n) &&
            colo_add_ok(n, ALIGN - 1, &n) && colo_add_ok(at, n / ALIGN * ALIGN, bytes);
    return at;
}

/* Workspace of the head's gradient, as colo_lm_head_reduce_size() of such gradients. */
static int64_t reduce_bytes(const colo_linear_logprob_t *l)
{
    colo_tensor_t like = {.dtype = l->config.d_weight_dtype};
    colo_lm_head_grads_t grads = {.d_weight = &like, .add = l->config.d_weight_add};
    return (int64_t)colo_lm_head_reduce_size(l->head, &grads);
}

colo_status_t colo_linear_i_memory(const colo_linear_logprob_t *l, const struct colo_linear_size *s,
                                   struct colo_linear_memory *m)
{
    const colo_linear_logprob_config_t *c = &l->config;
    const bool outputs = s->pass != COLO_LINEAR_BACKWARD, grads = s->makes_grads;
    const bool second = s->chunks > 1, d_weight = grads && !c->frozen_weight;
    const int64_t stat = elem_of(l->stat_dtype), elem = elem_of(l->dtype);
    const int64_t T = s->tokens, R = s->rows;
    int64_t n = 0;
    bool ok = true;
    m->row_of = put(&n, &ok, true, T, 8, 1);
    m->token_of = put(&n, &ok, true, R, 8, 1);
    m->row_targets = put(&n, &ok, true, R, 8, 1);
    m->counts = put(&n, &ok, true, COLO_LINEAR_COUNTS, 8, 1);
    m->logp = put(&n, &ok, outputs, R, stat, 1);
    m->entropy = put(&n, &ok, outputs && c->logprob.want_entropy, R, stat, 1);
    m->loss = put(&n, &ok, outputs && c->logprob.want_loss, R, stat, 1);
    m->correct = put(&n, &ok, outputs && c->logprob.want_correct, R, 1, 1);
    m->up[0] = put(&n, &ok, grads, R, stat, 1);
    m->up[1] = put(&n, &ok, grads && c->logprob.want_entropy, R, stat, 1);
    m->up[2] = put(&n, &ok, grads && c->logprob.want_loss, R, stat, 1);
    m->scale = put(&n, &ok, grads && elem == 2, COLO_LINEAR_SCALE, sizeof(float), 1);
    m->stats = put(&n, &ok, s->pass == COLO_LINEAR_LOSS, R, 3, sizeof(double));
    m->blocks = put(&n, &ok, outputs, s->block.bytes, colo_comm_size(l->group), 1);
    for (int i = 0; i < 2; i++) {
        m->z[i] = put(&n, &ok, i < s->buffers, s->chunk, s->z_stride, elem_of(c->logits_dtype));
        m->dz[i] =
            put(&n, &ok, grads && !s->in_place && (i == 0 || second), s->chunk, s->d_stride, elem);
        /* d_W's product of a chunk comes after the next chunk's rows were taken */
        m->h[i] = put(&n, &ok, i == 0 ? s->makes_logits || d_weight : d_weight && second, s->chunk,
                      l->hidden, elem);
    }
    m->d_h = put(&n, &ok, grads && !c->frozen_hidden, s->chunk, l->hidden, elem);
    m->d_hidden =
        put(&n, &ok, grads && !c->frozen_hidden && c->d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER, T,
            l->hidden, elem);
    m->bias = put(&n, &ok, s->makes_logits && l->has_bias && colo_lm_head_group(l->head),
                  l->columns, elem, 1);
    m->reduce = put(&n, &ok, d_weight && reduce_bytes(l) > 0, reduce_bytes(l), 1, 1);
    m->gemm = put(&n, &ok, true, l->loss->gemm->workspace(l->gemm), 1, 1);
    m->bytes = n;
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_ARG,
                          "linear: the workspace of %" PRId64 " tokens passes 2^63 bytes", T);
}

colo_status_t colo_linear_i_kept(const colo_linear_logprob_t *l, const struct colo_linear_size *s,
                                 struct colo_linear_kept *k)
{
    int64_t n = 0;
    bool ok = true;
    k->stats = put(&n, &ok, true, s->rows, 3, sizeof(double));
    k->logits = put(&n, &ok, s->kept, s->rows, s->z_stride, elem_of(l->config.logits_dtype));
    k->bytes = n;
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_ARG,
                          "linear: the saved state of %" PRId64 " tokens passes 2^63 bytes",
                          s->tokens);
}

/* ---- the queries ---- */

colo_status_t colo_linear_logprob_saved_size(const colo_linear_logprob_t *l, int64_t tokens,
                                             int64_t max_valid, size_t *bytes)
{
    struct colo_linear_size s;
    struct colo_linear_kept k;
    if (!l || !bytes)
        return colo_fail(COLO_ERR_ARG, "linear: %s is NULL", l ? "bytes" : "linear");
    COLO_TRY(colo_linear_i_size(l, COLO_LINEAR_FORWARD, tokens, max_valid, &s));
    COLO_TRY(colo_linear_i_kept(l, &s, &k));
    *bytes = (size_t)k.bytes;
    return COLO_OK;
}

colo_status_t colo_linear_logprob_workspace_size(const colo_linear_logprob_t *l,
                                                 colo_linear_pass_t pass, int64_t tokens,
                                                 int64_t max_valid, size_t *bytes)
{
    struct colo_linear_size s;
    struct colo_linear_memory m;
    if (!l || !bytes)
        return colo_fail(COLO_ERR_ARG, "linear: %s is NULL", l ? "bytes" : "linear");
    COLO_TRY(colo_linear_i_size(l, pass, tokens, max_valid, &s));
    COLO_TRY(colo_linear_i_memory(l, &s, &m));
    *bytes = (size_t)m.bytes;
    return COLO_OK;
}
