/* SPDX-License-Identifier: Apache-2.0 */
/*
 * workspace.c - how many tokens a chunk has, and where everything of a call lies in its
 * workspace.
 *
 * Decides the chunk from what all ranks of the vocabulary group know alike: tokens, the vocabulary,
 * the group's size, the budget. Never from a rank's own columns or free memory, because in loss
 * mode the number of chunks is the number of gathers. In forward 2048 tokens are the least by
 * default where its logits stay, and 1024 where they do not: below, products are slower than what
 * the memory is worth. Mode early saves more than other modes, so it takes half of that (as many
 * bytes of 16-bit logits), and of the budget. What the budget lets grow is rounded so that chunks
 * are of about the same size.
 *
 * Loss mode makes logits in chunks as small as those of early, and the gradients of several, at
 * least 2048 tokens and as many as the budget allows, one behind the other. Products of gradients
 * take these together: below 2048 tokens the fp32 accumulation of d_W costs more memory traffic
 * than the products cost arithmetic. Where d_logits are not over the logits, the next chunk's
 * logits are made before these products, during the last gradient.
 *
 * Backward has no gathers. A chunk of its has as many logits, but in blocks of WIDTH columns, so
 * its rows are mostly all rows, and d_W is made at once. WIDTH is 33 tiles of 256 columns: with any
 * number of 512 rows, or of the hidden size, these are whole waves of tiles on 132
 * multiprocessors. What a vocabulary has beyond a multiple of TILE is a block of its own, because
 * products of an odd number of columns are several times slower.
 *
 * Mode early saves all d_logits. If d_weight's memory shares them (cut()), a product of d_W writes
 * over those that the products before it have read.
 *
 * With segments a product has the columns of one segment. Sums over tokens in d_W are cut into
 * chunks of a fixed number of rows; backward's blocks are segments, so its chunk can be long.
 *
 * The same function lays out the workspace for the query and for the call, so the query is exact.
 */
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"

#include <inttypes.h>

enum {
    LEAST = 2048,
    FORWARD_LEAST = 1024,
    EARLY_BYTES = 2048, /* of a column of a chunk, at least */
    GRAIN = 128,
    ALIGN = 256,
    ROW_BYTES = 128,
    TILE = 64,
    WIDTH = 33 * 256,
    STAGED = 7,  /* of so many parts of d_weight one, at most, has a stage */
    FIXED = 8192 /* rows of backward's chunk with segments */
};
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

static int64_t budget_of(const colo_linear_logprob_t *l, bool loss)
{
    size_t b = l->config.budget                      ? l->config.budget
               : loss                                ? BUDGET / 4 * 5
               : l->config.mode == COLO_LINEAR_EARLY ? BUDGET / 2
                                                     : BUDGET;
    return b > INT64_MAX ? INT64_MAX : (int64_t)b;
}

/* Rows of forward of mode early, and of the loss pass. */
static int64_t early_least(const colo_linear_logprob_t *l)
{
    return EARLY_BYTES / elem_of(l->config.logits_dtype);
}

/* Chunks of about @chunk rows, all of about one size. */
static int64_t even(int64_t rows, int64_t chunk)
{
    if (rows > chunk) {
        int64_t n = rows / chunk + (rows % chunk > 0);
        chunk = rows / n + (rows % n > 0);
        chunk = (chunk + GRAIN - 1) / GRAIN * GRAIN;
    }
    return chunk < rows ? chunk : rows > 0 ? rows : 0;
}

static int64_t chunk_of(const colo_linear_logprob_t *l, int64_t rows, int64_t least, bool loss)
{
    int64_t chunk = l->config.logprob.chunk_size;
    if (chunk > 0)
        return chunk < rows ? chunk : rows > 0 ? rows : 0;
    chunk = budget_of(l, loss) / (loss ? 4 : 2) / row_bytes(l);
    /* products of other numbers of rows are slower */
    if ((loss || l->config.mode == COLO_LINEAR_EARLY) && least == early_least(l) && chunk > least)
        chunk -= chunk % least;
    return even(rows, chunk < least ? least : chunk);
}

static int64_t loss_chunk(const colo_linear_logprob_t *l, int64_t rows)
{
    return l->config.logprob.segment == 0 ? chunk_of(l, rows, early_least(l), true)
           : rows < LEAST                 ? rows
                                          : LEAST;
}

/* Chunks of the loss pass whose gradients lie one behind the other: at least LEAST rows, of about
 * one size. */
static int64_t joined_of(const colo_linear_logprob_t *l, const struct colo_linear_size *s)
{
    if (l->config.logprob.chunk_size > 0 || s->segment > 0 || s->chunks == 1)
        return 1;
    const int64_t z = row_bytes(l), d = z / elem_of(l->config.logits_dtype) * elem_of(l->dtype),
                  left = budget_of(l, true) - (s->in_place ? 0 : 2 * s->chunk * z),
                  rows = left / d > LEAST ? left / d : LEAST;
    const int64_t times = (s->chunks - 1) / (rows > s->chunk ? rows / s->chunk : 1) + 1;
    return (s->chunks - 1) / times + 1;
}

int64_t colo_linear_logprob_chunk(const colo_linear_logprob_t *l, int64_t rows)
{
    return l ? loss_chunk(l, rows) : 0;
}

/* Rows of which a block has as many logits as forward's chunk; all, where their blocks take less
 * than sums of d_W, which a 16-bit d_W then does without. */
static int64_t rows_of_blocks(const colo_linear_logprob_t *l, int64_t rows)
{
    const colo_linear_logprob_config_t *c = &l->config;
    const int64_t z = elem_of(c->logits_dtype), elem = elem_of(l->dtype);
    int64_t chunk = chunk_of(l, rows, FORWARD_LEAST, false), area, bytes;
    if (c->logprob.segment > 0)
        return rows < FIXED ? rows : FIXED;
    if (l->columns <= WIDTH)
        return chunk;
    chunk = colo_mul_ok(chunk, row_bytes(l) / z, &area) ? area / WIDTH : chunk;
    if (!c->d_weight_add && elem == 2 && !c->frozen_weight && !colo_lm_head_group(l->head) &&
        colo_mul_ok(rows, 2 * (z + elem) * WIDTH, &bytes) &&
        bytes / l->columns <= l->hidden * (int64_t)sizeof(float))
        chunk = rows;
    return even(rows, chunk > 0 ? chunk : 1);
}

/* The columns of saved d_logits, in parts. With R rows and H < R, gradients of C columns take the
 * memory of d_W of C R / H columns. So with shared those of the first V H / R columns are in
 * d_weight, one part behind the other, and those of the rest, one part, are in saved memory. In
 * turn the last part inside begins where d_W of its columns begins after those of the parts before
 * it, and so on: d_W of a part only meets parts before it, but for the first, which has a stage. */
static void cut(const colo_linear_logprob_t *l, struct colo_linear_size *s)
{
    const bool in_blocks = !s->segment && l->columns > WIDTH;
    const int64_t body = in_blocks ? l->columns / TILE * TILE : l->columns;
    int64_t down[COLO_LINEAR_PARTS] = {0}, first = 0;
    int32_t n = 0;
    if (s->shared)
        first = body * l->hidden / s->rows / TILE * TILE;
    while (first > 0 && n < COLO_LINEAR_PARTS - 2) {
        down[n++] = first;
        const int64_t least = (first * l->hidden + s->rows - 1) / s->rows,
                      before = (least + TILE - 1) / TILE * TILE;
        first = first <= body / STAGED || before >= first ? 0 : before;
    }
    s->inside = n;
    s->parts = n + 1 + (body < l->columns);
    for (int32_t i = 0; i <= s->parts; i++)
        s->part[i].first = i == 0 ? 0 : i <= n ? down[n - i] : i == n + 1 ? body : l->columns;
    s->d_stride = stride_of(l->columns, l->dtype);
    for (int32_t i = 0; i < s->parts; i++) {
        struct colo_linear_part *part = &s->part[i];
        part->stride = s->shared ? stride_of(part[1].first - part->first, l->dtype) : s->d_stride;
        part->ahead = !s->shared || i < n ? part->first : i == n ? 0 : part[-1].stride;
    }
    if (s->shared)
        s->d_stride = s->part[n].stride + (s->parts > n + 1 ? s->part[n + 1].stride : 0);
}

colo_linear_mode_t colo_linear_logprob_mode(const colo_linear_logprob_t *l, int64_t rows)
{
    int64_t bytes;
    if (!l)
        return COLO_LINEAR_AUTO;
    if (l->config.mode != COLO_LINEAR_AUTO)
        return l->config.mode;
    return colo_mul_ok(rows, row_bytes(l), &bytes) && bytes <= budget_of(l, false)
               ? COLO_LINEAR_KEEP
               : COLO_LINEAR_LOGPROB;
}

colo_status_t colo_linear_i_size(const colo_linear_logprob_t *l, colo_linear_pass_t pass,
                                 int64_t tokens, int64_t max_valid, struct colo_linear_size *s)
{
    const colo_linear_logprob_config_t *c = &l->config;
    COLO_FAIL_IF(tokens < 0, COLO_ERR_ARG, "linear: tokens is %" PRId64 ", expected >= 0", tokens);
    COLO_FAIL_IF((unsigned)pass > COLO_LINEAR_INFERENCE, COLO_ERR_ARG, "linear: pass %d is unknown",
                 (int)pass);
    *s = (struct colo_linear_size){.pass = pass, .tokens = tokens};
    s->rows = max_valid < 0 || max_valid > tokens ? tokens : max_valid;
    const bool back = pass == COLO_LINEAR_BACKWARD, fore = pass == COLO_LINEAR_FORWARD,
               loss = pass == COLO_LINEAR_LOSS, trains = !(c->frozen_hidden && c->frozen_weight);
    const colo_linear_mode_t mode = colo_linear_logprob_mode(l, s->rows);
    s->keeps = (fore || back) && mode == COLO_LINEAR_KEEP;
    s->early = (fore || back) && mode == COLO_LINEAR_EARLY;
    /* of what all ranks know alike: chunks depend on it */
    s->shared = s->early && c->share_d_weight && s->rows / 3 > l->hidden / 2;
    s->piecewise = loss || (fore && s->early);
    s->segment = c->logprob.segment;
    const bool in_blocks = back && !s->segment && l->columns > WIDTH;
    s->body = in_blocks ? l->columns / TILE * TILE : l->columns;
    s->width = in_blocks && !s->early ? WIDTH : back && s->segment ? s->segment : s->body;
    s->blocks = in_blocks            ? (s->body - 1) / s->width + 1 + (s->body < l->columns)
                : back && s->segment ? l->columns / s->segment
                                     : 1;
    s->in_place = s->keeps ? c->keep_in_place : c->logits_dtype == l->dtype && !s->shared;
    const bool stays = s->keeps || (s->early && s->in_place);
    const int64_t least = stays ? LEAST : s->early ? early_least(l) : FORWARD_LEAST;
    s->chunk = loss                      ? loss_chunk(l, s->rows)
               : !back                   ? chunk_of(l, s->rows, least, false)
               : s->early && !s->segment ? s->rows
                                         : rows_of_blocks(l, s->rows);
    s->chunks = s->rows > 0 ? s->rows / s->chunk + (s->rows % s->chunk > 0) : 1;
    s->joined = loss ? joined_of(l, s) : 1;
    s->once = s->chunks <= s->joined && !c->d_weight_add;
    const bool makes_grads = (back || loss) && trains,
               makes_logits = !back || (makes_grads && !s->keeps && !s->early);
    /* AUTO looks at this rank's rows, and replicas that share a head have rows of their own: they
     * gather alike, whichever of them has to make logits again */
    bool others = back && makes_grads && c->mode == COLO_LINEAR_AUTO && colo_lm_head_group(l->head);
    const bool takes_head = makes_logits || (makes_grads && !c->frozen_hidden) || others;
    s->d_hidden_last = loss && !c->frozen_weight && colo_comm_size(l->group) == 1;
    s->buffers = stays || !makes_logits         ? 0
                 : s->chunks * s->blocks == 1   ? 1
                 : s->in_place && s->joined > 1 ? 1
                                                : 2;
    s->z_stride = stride_of(s->keeps || s->early ? l->columns : s->width, c->logits_dtype);
    s->d_stride = stride_of(s->width, l->dtype);
    if (s->early)
        cut(l, s);
    if (s->early && back && !s->segment)
        s->blocks = s->parts;
    /* one gather for all rows; or one per chunk, also where no rank gathers */
    bool whole = !s->piecewise && colo_comm_size(l->group) > 1;
    colo_linear_i_program(l, makes_logits, takes_head, s); /* whom a refusal tells depends on it */
    COLO_FAIL_IF(!colo_logprob_i_block_layout(&c->logprob, c->logits_dtype,
                                              whole ? s->rows : s->chunk, &s->block),
                 COLO_ERR_ARG, "linear: statistics of %" PRId64 " tokens pass 2^63 bytes", s->rows);
    return COLO_OK;
}

/* Appends a * b * elem bytes at a multiple of ALIGN; remembers an overflow in *fits. */
static int64_t put(int64_t *bytes, bool *fits, bool wanted, int64_t a, int64_t b, int64_t elem)
{
    int64_t offset = *bytes, n;
    if (!wanted)
        return -1;
    *fits = *fits && colo_mul_ok(a, b, &n) && colo_mul_ok(n, elem, &n) &&
            colo_add_ok(n, ALIGN - 1, &n) && colo_add_ok(offset, n / ALIGN * ALIGN, bytes);
    return offset;
}

/* Workspace of the head's gradient. */
static int64_t reduce_bytes(const colo_linear_logprob_t *l, bool once)
{
    colo_tensor_t like = {.dtype = l->config.d_weight_dtype};
    colo_lm_head_grads_t grads = {.d_weight = &like, .add = l->config.d_weight_add};
    return (int64_t)colo_lm_head_i_reduce_size(l->head, &grads, once);
}

colo_status_t colo_linear_i_memory(const colo_linear_logprob_t *l, const struct colo_linear_size *s,
                                   struct colo_linear_memory *memory)
{
    const colo_linear_logprob_config_t *c = &l->config;
    const bool outputs = s->pass != COLO_LINEAR_BACKWARD, grads = colo_linear_makes_grads(s);
    const bool d_weight = grads && !c->frozen_weight, d_z = colo_linear_has(s, COLO_STEP_D_LOGITS),
               makes_logits = colo_linear_has(s, COLO_STEP_LOGITS);
    const bool joins = s->joined > 1, second = s->chunks > s->joined && !(joins && s->in_place),
               other = s->chunks * s->blocks > 1 && !joins;
    const int64_t stat = elem_of(l->stat_dtype), elem = elem_of(l->dtype);
    const int64_t T = s->tokens, R = s->rows,
                  J = R / s->joined > s->chunk ? s->joined * s->chunk : R; /* rows of a product */
    int64_t n = 0;
    bool ok = true;
    memory->row_of = put(&n, &ok, true, T, 8, 1);
    memory->token_of = put(&n, &ok, true, R, 8, 1);
    memory->row_targets = put(&n, &ok, true, R, 8, 1);
    memory->counts = put(&n, &ok, true, COLO_LINEAR_COUNTS, 8, 1);
    memory->logp = put(&n, &ok, outputs, R, stat, 1);
    memory->entropy = put(&n, &ok, outputs && c->logprob.want_entropy, R, stat, 1);
    memory->loss = put(&n, &ok, outputs && c->logprob.want_loss, R, stat, 1);
    memory->correct = put(&n, &ok, outputs && c->logprob.want_correct, R, 1, 1);
    memory->up[0] = put(&n, &ok, d_z, R, stat, 1);
    memory->up[1] = put(&n, &ok, d_z && c->logprob.want_entropy, R, stat, 1);
    memory->up[2] = put(&n, &ok, d_z && c->logprob.want_loss, R, stat, 1);
    memory->scale =
        put(&n, &ok, s->early ? grads : d_z && elem == 2, COLO_LINEAR_SCALE, sizeof(float), 1);
    memory->stats = put(&n, &ok, s->piecewise, R, 3, sizeof(double));
    memory->blocks = put(&n, &ok, outputs, s->block.bytes, colo_comm_size(l->group),
                         colo_logprob_i_segments(&c->logprob, colo_comm_size(l->group)));
    for (int i = 0; i < 2; i++) {
        memory->z[i] = put(&n, &ok, i < s->buffers, s->in_place ? J : s->chunk, s->z_stride,
                           elem_of(c->logits_dtype));
        memory->dz[i] = put(&n, &ok, d_z && !s->in_place && !s->early && (i == 0 || other), J,
                            s->d_stride, elem);
        /* d_W's product of a chunk comes after the next chunk's rows were taken */
        memory->h[i] = put(&n, &ok, i == 0 ? makes_logits || d_weight : d_weight && second, J,
                           l->hidden, elem);
    }
    memory->d_h = put(&n, &ok, grads && !c->frozen_hidden && !s->d_hidden_last, J, l->hidden, elem);
    const bool d_h = grads && !c->frozen_hidden;
    const int64_t sum = s->segment && elem == 8 ? 8 : sizeof(float);
    int64_t levels = 1;
    for (int64_t i = s->segment ? l->columns / s->segment : 1; i > 1; i /= 2)
        levels++;
    memory->d_h_sum = put(&n, &ok, d_h && (s->segment || (s->blocks > 1 && elem == 2)), s->chunk,
                          l->hidden, levels * sum);
    memory->d_h_all = put(&n, &ok, d_h && s->segment && colo_comm_size(l->group) > 1, s->chunk,
                          l->hidden, colo_comm_size(l->group) * sum);
    memory->d_hidden =
        put(&n, &ok, grads && !c->frozen_hidden && c->d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER, T,
            l->hidden, elem);
    int64_t summed = 0;
    if (d_h && !s->segment && c->d_hidden != COLO_D_HIDDEN_PARTIAL &&
        colo_mul_ok(T, l->hidden * elem, &summed))
        summed = (int64_t)colo_comm_i_reduction_stage(l->group, summed);
    memory->d_h_stage = put(&n, &ok, summed > 0, summed, 1, 1);
    memory->d_h_stage_bytes = summed;
    memory->stage =
        put(&n, &ok, d_weight && s->early && s->inside > 0, s->part[1].first, l->hidden, elem);
    memory->bias = put(&n, &ok, makes_logits && l->has_bias && colo_lm_head_group(l->head),
                       l->columns, elem, 1);
    memory->reduce =
        put(&n, &ok, d_weight && reduce_bytes(l, s->once) > 0, reduce_bytes(l, s->once), 1, 1);
    memory->gemm = put(&n, &ok, true, l->loss->gemm->workspace(l->gemm), 1, 1);
    memory->bytes = n;
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_ARG,
                          "linear: the workspace of %" PRId64 " tokens passes 2^63 bytes", T);
}

colo_status_t colo_linear_i_saved(const colo_linear_logprob_t *l, const struct colo_linear_size *s,
                                  struct colo_linear_saved *k)
{
    int64_t n = 0;
    bool ok = true;
    k->stats = put(&n, &ok, !s->early, s->rows, 3, sizeof(double));
    k->logits = put(&n, &ok, s->keeps, s->rows, s->z_stride, elem_of(l->config.logits_dtype));
    k->d_logits = put(&n, &ok, s->early, s->rows, s->d_stride, elem_of(l->dtype));
    k->scale =
        put(&n, &ok, s->early && elem_of(l->dtype) == 2, COLO_LINEAR_SCALE, sizeof(float), 1);
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
    struct colo_linear_saved k;
    COLO_FAIL_IF(!l || !bytes, COLO_ERR_ARG, "linear: %s is NULL", l ? "bytes" : "linear");
    COLO_TRY(colo_linear_i_size(l, COLO_LINEAR_FORWARD, tokens, max_valid, &s));
    COLO_TRY(colo_linear_i_saved(l, &s, &k));
    *bytes = (size_t)k.bytes;
    return COLO_OK;
}

colo_status_t colo_linear_logprob_workspace_size(const colo_linear_logprob_t *l,
                                                 colo_linear_pass_t pass, int64_t tokens,
                                                 int64_t max_valid, size_t *bytes)
{
    struct colo_linear_size s;
    struct colo_linear_memory memory;
    COLO_FAIL_IF(!l || !bytes, COLO_ERR_ARG, "linear: %s is NULL", l ? "bytes" : "linear");
    COLO_TRY(colo_linear_i_size(l, pass, tokens, max_valid, &s));
    COLO_TRY(colo_linear_i_memory(l, &s, &memory));
    *bytes = (size_t)memory.bytes;
    return COLO_OK;
}
