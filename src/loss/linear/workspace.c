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
 * logits are made before these products, during the last gradient. Where they are, and no gather of
 * a chunk could hide behind the next one's product, these are one chunk.
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
 * Where products leave statistics of tiles, a chunk has memory for these, too; a batch with a
 * support, or a weight that is not aligned, has none, and logits are read. With without_logits a
 * forward whose logits nothing reads has memory for tiles alone, and the chunk is theirs.
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
    MIN_ROWS = 2048,
    FORWARD_MIN_ROWS = 1024,
    EARLY_BYTES = 2048, /* of a column of a chunk, at least */
    ROW_GRAIN = 128,
    ALIGN = 256,
    ROW_BYTES = 128,
    TILE = 64,
    WIDTH = 33 * 256,
    TILED = 256, /* rows of two blocks of kernels/head-product.cu */
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

static int64_t bytes_of(const colo_linear_logprob_t *linear, colo_dtype_t dtype)
{
    int64_t ranks = colo_comm_size(linear->group), vocab = linear->config.logprob.logits.vocab;
    int64_t columns = vocab / ranks + (vocab % ranks > 0);
    return stride_of(columns, dtype) * elem_of(dtype);
}

/* Bytes of logits per row on the rank that all ranks reckon with. */
static int64_t row_bytes(const colo_linear_logprob_t *linear)
{
    return bytes_of(linear, linear->config.logits_dtype);
}

/* And of the teacher's, of which there is one chunk at a time. */
static int64_t teacher_bytes(const colo_linear_logprob_t *linear)
{
    return linear->teacher ? bytes_of(linear, linear->teacher->logits_dtype) : 0;
}

static int64_t budget_of(const colo_linear_logprob_t *linear, bool loss)
{
    size_t budget = linear->config.budget ? linear->config.budget
                    : loss                ? BUDGET / 4 * 5
                    : linear->config.mode == COLO_LINEAR_LOGPROB_EARLY
                        ? (linear->teacher ? BUDGET / 8 * 5 : BUDGET / 2)
                        : BUDGET;
    return budget > INT64_MAX ? INT64_MAX : (int64_t)budget;
}

/* Rows of forward of mode early, and of the loss pass. */
static int64_t early_min_rows(const colo_linear_logprob_t *linear)
{
    return EARLY_BYTES / elem_of(linear->config.logits_dtype);
}

/* Chunks of about @chunk rows, all of about one size. */
static int64_t even(int64_t rows, int64_t chunk)
{
    if (rows > chunk) {
        int64_t chunks = rows / chunk + (rows % chunk > 0);
        chunk = rows / chunks + (rows % chunks > 0);
        chunk = (chunk + ROW_GRAIN - 1) / ROW_GRAIN * ROW_GRAIN;
    }
    return chunk < rows ? chunk : rows > 0 ? rows : 0;
}

static int64_t chunk_of(const colo_linear_logprob_t *linear, int64_t rows, int64_t min_rows,
                        bool loss)
{
    int64_t chunk = linear->config.logprob.chunk_size;
    if (chunk > 0)
        return chunk < rows ? chunk : rows > 0 ? rows : 0;
    const bool single = linear->teacher && colo_comm_size(linear->group) == 1;
    chunk = budget_of(linear, loss) / ((loss     ? 4
                                        : single ? 1
                                                 : 2) *
                                           row_bytes(linear) +
                                       teacher_bytes(linear));
    /* products of other numbers of rows are slower */
    if ((loss || linear->config.mode == COLO_LINEAR_LOGPROB_EARLY) &&
        min_rows == early_min_rows(linear) && chunk > min_rows)
        chunk -= chunk % min_rows;
    return even(rows, chunk < min_rows ? min_rows : chunk);
}

/* Has the loss pass nothing to do beside its products? Then a chunk of d_logits over logits is what a
 * product of gradients takes. */
static bool is_whole(const colo_linear_logprob_t *linear)
{
    return linear->config.logits_dtype == linear->dtype && linear->config.logprob.chunk_size == 0 &&
           linear->config.logprob.segment == 0 && colo_comm_size(linear->group) == 1;
}

static int64_t loss_chunk(const colo_linear_logprob_t *linear, int64_t rows)
{
    if (linear->config.logprob.segment > 0)
        return rows < MIN_ROWS ? rows : MIN_ROWS;
    if (!is_whole(linear))
        return chunk_of(linear, rows, early_min_rows(linear), true);
    const int64_t fit = budget_of(linear, true) / (row_bytes(linear) + teacher_bytes(linear));
    return even(rows, fit > MIN_ROWS ? fit - fit % early_min_rows(linear) : MIN_ROWS);
}

/* Rows of forward whose tiles, of two chunks, and rows of hidden fit into without_logits: whole
 * tiles of two blocks. */
static int64_t tiled_chunk(const colo_linear_logprob_t *linear, int64_t rows,
                           const colo_logprob_block_t *block)
{
    const size_t budget = linear->config.without_logits;
    const int64_t most = budget > INT64_MAX ? INT64_MAX : (int64_t)budget,
                  fixed = linear->config.logprob.chunk_size,
                  each = 2 * colo_logprob_tiles_stride(block, linear->columns) * 4 +
                         linear->hidden * elem_of(linear->dtype);
    if (fixed > 0)
        return fixed < rows ? fixed : rows;
    const int64_t fit = most / each > TILED ? most / each : TILED, chunks = (rows - 1) / fit + 1,
                  chunk = ((rows - 1) / chunks / TILED + 1) * TILED;
    return chunk < rows ? chunk : rows;
}

/* Chunks of the loss pass whose gradients lie one behind the other: at least MIN_ROWS rows, of
 * about one size. */
static int64_t joined_of(const colo_linear_logprob_t *linear, const struct colo_linear_size *size)
{
    if (linear->config.logprob.chunk_size > 0 || size->segment > 0 || size->chunks == 1)
        return 1;
    const int64_t z = row_bytes(linear),
                  d = z / elem_of(linear->config.logits_dtype) * elem_of(linear->dtype),
                  left = budget_of(linear, true) - (size->in_place ? 0 : 2 * size->chunk * z) -
                         size->chunk * teacher_bytes(linear),
                  rows = left / d > MIN_ROWS ? left / d : MIN_ROWS;
    const int64_t times = (size->chunks - 1) / (rows > size->chunk ? rows / size->chunk : 1) + 1;
    return (size->chunks - 1) / times + 1;
}

int64_t colo_linear_logprob_chunk(const colo_linear_logprob_t *linear, int64_t rows)
{
    return linear ? loss_chunk(linear, rows) : 0;
}

/* Rows of which a block has as many logits as forward's chunk; all, where their blocks take less
 * than sums of d_W, which a 16-bit d_W then does without. */
static int64_t rows_of_blocks(const colo_linear_logprob_t *linear, int64_t rows)
{
    const colo_linear_logprob_config_t *config = &linear->config;
    const int64_t z = elem_of(config->logits_dtype), elem = elem_of(linear->dtype);
    int64_t chunk = chunk_of(linear, rows, FORWARD_MIN_ROWS, false), area, bytes;
    if (config->logprob.segment > 0)
        return rows < FIXED ? rows : FIXED;
    if (linear->columns <= WIDTH)
        return chunk;
    chunk = colo_mul_ok(chunk, row_bytes(linear) / z, &area) ? area / WIDTH : chunk;
    if (!config->d_weight_add && elem == 2 && !config->frozen_weight &&
        !colo_lm_head_group(linear->head) && colo_mul_ok(rows, 2 * (z + elem) * WIDTH, &bytes) &&
        bytes / linear->columns <= linear->hidden * (int64_t)sizeof(float))
        chunk = rows;
    return even(rows, chunk > 0 ? chunk : 1);
}

/* The columns of saved d_logits, in parts. With R rows and H < R, gradients of C columns take the
 * memory of d_W of C R / H columns. So with shared those of the first V H / R columns are in
 * d_weight, one part behind the other, and those of the rest, one part, are in saved memory. In
 * turn the last part inside begins where d_W of its columns begins after those of the parts before
 * it, and so on, rounded up: d_W of a part only meets parts before it, but for the first, which has
 * a stage. */
static void cut(const colo_linear_logprob_t *linear, struct colo_linear_size *size)
{
    const bool in_blocks = !size->segment && linear->columns > WIDTH;
    const int64_t body = in_blocks ? linear->columns / TILE * TILE : linear->columns;
    int64_t down[COLO_LINEAR_PARTS] = {0}, first = 0;
    int32_t n = 0;
    if (size->shared)
        first = body * linear->hidden / size->rows / TILE * TILE;
    while (first > 0 && n < COLO_LINEAR_PARTS - 2) {
        down[n++] = first;
        const int64_t least = (first * linear->hidden + size->rows - 1) / size->rows,
                      wide = (least + WIDTH - 1) / WIDTH * WIDTH, /* whole waves, if these fit */
                      before = wide < first ? wide : (least + TILE - 1) / TILE * TILE;
        first = first <= body / STAGED || before >= first ? 0 : before;
    }
    size->inside = n;
    size->parts = n + 1 + (body < linear->columns);
    for (int32_t i = 0; i <= size->parts; i++)
        size->part[i].first = i == 0       ? 0
                              : i <= n     ? down[n - i]
                              : i == n + 1 ? body
                                           : linear->columns;
    size->d_stride = stride_of(linear->columns, linear->dtype);
    for (int32_t i = 0; i < size->parts; i++) {
        struct colo_linear_part *part = &size->part[i];
        part->stride =
            size->shared ? stride_of(part[1].first - part->first, linear->dtype) : size->d_stride;
        part->ahead = !size->shared || i < n ? part->first : i == n ? 0 : part[-1].stride;
    }
    if (size->shared)
        size->d_stride =
            size->part[n].stride + (size->parts > n + 1 ? size->part[n + 1].stride : 0);
}

colo_linear_logprob_mode_t colo_linear_logprob_mode(const colo_linear_logprob_t *linear,
                                                    int64_t rows)
{
    int64_t bytes;
    if (!linear)
        return COLO_LINEAR_LOGPROB_AUTO;
    if (linear->config.mode != COLO_LINEAR_LOGPROB_AUTO)
        return linear->config.mode;
    return colo_mul_ok(rows, row_bytes(linear), &bytes) && bytes <= budget_of(linear, false)
               ? COLO_LINEAR_LOGPROB_KEEP
               : COLO_LINEAR_LOGPROB_LOGPROB;
}

/* f64 numbers of a row that forward leaves for backward */
static int64_t numbers_of(const colo_linear_logprob_t *linear)
{
    return linear->teacher ? COLO_DISTILL_SAVED
                           : colo_logprob_saved_numbers(&linear->config.logprob);
}

static bool lay_out(const colo_linear_logprob_t *linear, int64_t rows, colo_logprob_block_t *block)
{
    struct colo_distill_args args = {.base.stat_dtype = linear->stat_dtype};
    if (!linear->teacher)
        return colo_logprob_block_layout(&linear->config.logprob, linear->config.logits_dtype, rows,
                                         block);
    const bool fits = colo_distill_lay_out(&args, rows);
    *block = args.base.block;
    return fits;
}

colo_status_t colo_linear_set_size(const colo_linear_logprob_t *linear,
                                   colo_linear_logprob_pass_t pass, int64_t tokens,
                                   int64_t max_valid, struct colo_linear_size *size)
{
    const colo_linear_logprob_config_t *config = &linear->config;
    COLO_FAIL_IF(tokens < 0, COLO_ERR_ARG, "linear: tokens is %" PRId64 ", expected >= 0", tokens);
    COLO_FAIL_IF((unsigned)pass > COLO_LINEAR_LOGPROB_INFERENCE, COLO_ERR_ARG,
                 "linear: pass %d is unknown", (int)pass);
    *size = (struct colo_linear_size){.pass = pass, .tokens = tokens};
    size->rows = max_valid < 0 || max_valid > tokens ? tokens : max_valid;
    const bool back = pass == COLO_LINEAR_LOGPROB_BACKWARD,
               fore = pass == COLO_LINEAR_LOGPROB_FORWARD, loss = pass == COLO_LINEAR_LOGPROB_LOSS,
               trains = !(config->frozen_hidden && config->frozen_weight && config->frozen_lora);
    size->makes_d_hidden = (back || loss) && !config->frozen_hidden;
    size->makes_d_weight = (back || loss) && !config->frozen_weight;
    size->makes_d_lora = (back || loss) && !config->frozen_lora;
    const colo_linear_logprob_mode_t mode = colo_linear_logprob_mode(linear, size->rows);
    size->keeps = (fore || back) && mode == COLO_LINEAR_LOGPROB_KEEP;
    size->early = (fore || back) && mode == COLO_LINEAR_LOGPROB_EARLY;
    /* of what all ranks know alike: chunks depend on it */
    size->shared = size->early && config->share_d_weight && size->rows / 3 > linear->hidden / 2;
    /* a second read of a chunk's logits needs the normalisers of all ranks */
    const bool twice = linear->teacher && linear->teacher->config.divergence >= COLO_DIVERGENCE_JSD,
               alone = colo_comm_size(linear->group) == 1;
    size->piecewise = loss || (fore && size->early) || (!back && twice && !alone);
    size->stats_inside = loss || (fore && size->early) || (linear->teacher && !back && !fore);
    size->segment = config->logprob.segment;
    const bool in_blocks = back && !size->segment && linear->columns > WIDTH;
    size->body = in_blocks ? linear->columns / TILE * TILE : linear->columns;
    size->width = in_blocks && !size->early ? WIDTH
                  : back && size->segment   ? size->segment
                                            : size->body;
    size->blocks = in_blocks ? (size->body - 1) / size->width + 1 + (size->body < linear->columns)
                   : back && size->segment ? linear->columns / size->segment
                                           : 1;
    size->in_place = size->keeps ? config->keep_in_place
                                 : config->logits_dtype == linear->dtype && !size->shared;
    const bool stays = size->keeps || (size->early && size->in_place);
    size->makes_d_logits = trains && (size->early ? fore : back || loss);
    size->writes = size->keeps || size->makes_d_logits;
    size->reduces = !linear->teacher && linear->kernels->gemm->reduces &&
                    linear->kernels->gemm->reduces(linear->gemm) && !back && !size->segment &&
                    !config->logprob.has_class_weight && !config->logprob.has_temperature &&
                    !config->logprob.want_sum_p2 && config->lora == 0;
    size->no_logits = size->reduces && !size->writes && !loss && config->without_logits > 0;
    const int64_t min_rows = stays         ? MIN_ROWS
                             : size->early ? early_min_rows(linear)
                                           : FORWARD_MIN_ROWS;
    colo_logprob_block_t one;
    (void)colo_logprob_block_layout(&config->logprob, config->logits_dtype, 1, &one);
    size->chunk = size->no_logits                 ? tiled_chunk(linear, size->rows, &one)
                  : loss                          ? loss_chunk(linear, size->rows)
                  : !back                         ? chunk_of(linear, size->rows, min_rows, false)
                  : size->early && !size->segment ? size->rows
                                                  : rows_of_blocks(linear, size->rows);
    size->chunks = size->rows > 0 ? size->rows / size->chunk + (size->rows % size->chunk > 0) : 1;
    size->joined = loss ? joined_of(linear, size) : 1;
    size->over = loss && size->in_place && size->chunks > 1 && (size->joined > 1 || is_whole(linear));
    size->once = size->chunks <= size->joined && !config->d_weight_add;
    size->makes_logits = !back || (colo_linear_makes_grads(size) && !size->keeps && !size->early);
    /* AUTO looks at this rank's rows, and replicas that share a head have rows of their own: they
     * gather alike, whichever of them has to make logits again */
    const bool others = back && trains && config->mode == COLO_LINEAR_LOGPROB_AUTO &&
                        colo_lm_head_group(linear->head);
    size->takes_head = size->makes_logits || size->makes_d_hidden || others;
    size->d_hidden_last = loss && !config->frozen_weight && colo_comm_size(linear->group) == 1;
    size->buffers = stays || !size->makes_logits || size->no_logits ? 0
                    : size->chunks == 1 && size->blocks == 1 ? 1
                    : size->over                             ? 1
                                                             : 2;
    /* Statistics and gradients of both sides' logits take what memory moves in their time, and the
     * next product gains nothing beside them. With ranks it hides their gathers. */
    size->single = linear->teacher && alone && !back && !loss && size->buffers == 2;
    if (size->single)
        size->buffers = 1;
    size->z_stride =
        stride_of(size->keeps || size->early ? linear->columns : size->width, config->logits_dtype);
    size->d_stride = stride_of(size->width, linear->dtype);
    size->u_stride = stride_of(config->lora, COLO_BF16);
    if (linear->teacher) {
        size->y_stride = stride_of(size->width, linear->teacher->logits_dtype);
        size->teacher_u_stride = stride_of(linear->teacher->lora, COLO_BF16);
    }
    if (size->early)
        cut(linear, size);
    if (size->early && back && !size->segment)
        size->blocks = size->parts;
    /* one gather for all rows; or one per chunk, also where no rank gathers */
    bool gathers_once = !size->piecewise && colo_comm_size(linear->group) > 1;
    size->block_rows = gathers_once ? size->rows : size->chunk;
    COLO_FAIL_IF(!lay_out(linear, size->block_rows, &size->block), COLO_ERR_ARG,
                 "linear: statistics of %" PRId64 " tokens pass 2^63 bytes", size->rows);
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
static int64_t reduce_bytes(const colo_linear_logprob_t *linear, bool once)
{
    colo_tensor_t like = {.dtype = linear->config.d_weight_dtype};
    colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, .d_weight = &like,
                                  .add = linear->config.d_weight_add};
    return (int64_t)colo_lm_head_sums_size(linear->head, &grads, once);
}

colo_status_t colo_linear_set_memory(const colo_linear_logprob_t *linear,
                                     const struct colo_linear_size *size,
                                     struct colo_linear_memory *memory)
{
    const colo_linear_logprob_config_t *config = &linear->config;
    const bool outputs = size->pass != COLO_LINEAR_LOGPROB_BACKWARD,
               grads = colo_linear_makes_grads(size);
    const bool d_h = size->makes_d_hidden, d_weight = size->makes_d_weight,
               d_z = size->makes_d_logits, d_lora = size->makes_d_lora,
               d_u = config->lora > 0 && (d_h || d_lora);
    const bool second = size->chunks > size->joined && !size->over,
               other = (size->chunks > 1 || size->blocks > 1) && size->joined == 1;
    const int64_t stat = elem_of(linear->stat_dtype), elem = elem_of(linear->dtype);
    const int64_t tokens = size->tokens, rows = size->rows,
                  joined = rows / size->joined > size->chunk ? size->joined * size->chunk
                                                             : rows; /* rows of a product */
    int64_t bytes = 0;
    bool ok = true;
    memory->row_of = put(&bytes, &ok, true, tokens, 8, 1);
    memory->token_of = put(&bytes, &ok, true, rows, 8, 1);
    memory->row_targets = put(&bytes, &ok, true, rows, 8, 1);
    memory->counts = put(&bytes, &ok, true, COLO_LINEAR_COUNTS, 8, 1);
    memory->logp = put(&bytes, &ok, outputs, rows, stat, 1);
    memory->entropy = put(&bytes, &ok, outputs && config->logprob.want_entropy, rows, stat, 1);
    memory->loss = put(&bytes, &ok, outputs && config->logprob.want_loss, rows, stat, 1);
    memory->correct = put(&bytes, &ok, outputs && config->logprob.want_correct, rows, 1, 1);
    memory->weight = put(&bytes, &ok, outputs && config->logprob.has_class_weight, rows, stat, 1);
    memory->argmax = put(&bytes, &ok, outputs && config->logprob.want_argmax, rows, 8, 1);
    memory->lse = put(&bytes, &ok, outputs && config->logprob.want_lse, rows, stat, 1);
    memory->sum_p2 = put(&bytes, &ok, outputs && config->logprob.want_sum_p2, rows, stat, 1);
    memory->mean_logits =
        put(&bytes, &ok, outputs && config->logprob.want_mean_logits, rows, stat, 1);
    memory->up[0] = put(&bytes, &ok, d_z, rows, stat, 1);
    memory->up[1] = put(&bytes, &ok, d_z && config->logprob.want_entropy, rows, stat, 1);
    memory->up[2] = put(&bytes, &ok, d_z && config->logprob.want_loss, rows, stat, 1);
    memory->up[3] = put(&bytes, &ok, d_z && config->logprob.want_lse, rows, stat, 1);
    memory->scale = put(&bytes, &ok, size->early ? grads : d_z && elem == 2, COLO_LINEAR_SCALE,
                        sizeof(float), 1);
    memory->stats = put(&bytes, &ok, size->stats_inside, rows, numbers_of(linear), sizeof(double));
    memory->blocks = put(&bytes, &ok, outputs, size->block.bytes, colo_comm_size(linear->group),
                         colo_logprob_segments(&config->logprob, colo_comm_size(linear->group)));
    for (int i = 0; i < 2; i++) {
        memory->z[i] = put(&bytes, &ok, i < size->buffers, size->in_place ? joined : size->chunk,
                           size->z_stride, elem_of(config->logits_dtype));
        memory->tiles[i] =
            put(&bytes, &ok, size->reduces && (i == 0 || size->chunks > 1), size->chunk,
                colo_logprob_tiles_stride(&size->block, linear->columns), sizeof(float));
        memory->dz[i] =
            put(&bytes, &ok, d_z && !size->in_place && !size->early && (i == 0 || other), joined,
                size->d_stride, elem);
        /* d_W's product of a chunk comes after the next chunk's rows were taken */
        memory->h[i] =
            put(&bytes, &ok,
                i == 0 ? size->makes_logits || d_weight || d_lora : (d_weight || d_lora) && second,
                joined, linear->hidden, elem);
        memory->u[i] =
            put(&bytes, &ok,
                i == 0 ? d_lora || (size->makes_logits && config->lora > 0) : d_lora && second,
                joined, size->u_stride, elem);
    }
    memory->d_u = put(&bytes, &ok, d_u && elem == 2, joined, size->u_stride, elem);
    memory->d_h = put(&bytes, &ok, d_h && !size->d_hidden_last, joined, linear->hidden, elem);
    const int64_t sum = elem == 8 ? 8 : sizeof(float), ranks = colo_comm_size(linear->group);
    int64_t levels = 1;
    for (int64_t i = size->segment ? linear->columns / size->segment : 1; i > 1; i /= 2)
        levels++;
    memory->d_u_sum = put(&bytes, &ok, d_u, joined, size->u_stride, levels * sum);
    memory->d_u_all =
        put(&bytes, &ok, d_u && size->segment && ranks > 1, joined, config->lora, ranks * sum);
    memory->d_h_sum = put(&bytes, &ok, d_h && (size->segment || (size->blocks > 1 && elem == 2)),
                          size->chunk, linear->hidden, levels * sum);
    memory->d_h_all = put(&bytes, &ok, d_h && size->segment && ranks > 1, size->chunk,
                          linear->hidden, ranks * sum);
    memory->d_hidden = put(&bytes, &ok, d_h && config->d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER,
                           tokens, linear->hidden, elem);
    int64_t summed = 0;
    if (d_h && !size->segment && config->d_hidden != COLO_D_HIDDEN_PARTIAL &&
        colo_mul_ok(tokens, linear->hidden * elem, &summed))
        summed = (int64_t)colo_comm_reduction_stage(linear->group, summed);
    memory->d_h_stage = put(&bytes, &ok, summed > 0, summed, 1, 1);
    memory->d_h_stage_bytes = summed;
    summed = 0;
    if (d_lora && !size->segment && colo_mul_ok(config->lora, linear->hidden * 8, &summed))
        summed = (int64_t)colo_comm_reduction_stage(
            linear->group, elem == 8 ? summed : summed / 8 * (int64_t)sizeof(float));
    memory->d_a_stage = put(&bytes, &ok, summed > 0, summed, 1, 1);
    memory->d_a_stage_bytes = summed;
    memory->stage = put(&bytes, &ok, d_weight && size->early && size->inside > 0,
                        size->part[1].first, linear->hidden, elem);
    memory->bias =
        put(&bytes, &ok, size->makes_logits && linear->has_bias && colo_lm_head_group(linear->head),
            linear->columns, elem, 1);
    memory->reduce = put(&bytes, &ok, d_weight && reduce_bytes(linear, size->once) > 0,
                         reduce_bytes(linear, size->once), 1, 1);
    const struct colo_linear_teacher *teacher = linear->teacher;
    const bool taught = teacher && size->makes_logits;
    memory->y = put(&bytes, &ok, taught, size->chunk, size->y_stride,
                    taught ? elem_of(teacher->logits_dtype) : 0);
    memory->teacher_h = put(&bytes, &ok, taught, size->chunk, taught ? teacher->hidden : 0,
                            taught ? elem_of(teacher->dtype) : 0);
    memory->teacher_u = put(&bytes, &ok, taught && teacher->lora > 0, size->chunk,
                            size->teacher_u_stride, taught ? elem_of(teacher->dtype) : 0);
    memory->teacher_bias =
        put(&bytes, &ok, taught && teacher->has_bias && colo_lm_head_group(teacher->head),
            taught ? teacher->columns : 0, taught ? elem_of(teacher->dtype) : 0, 1);
    int64_t products = linear->kernels->gemm->workspace(linear->gemm);
    if (taught && linear->kernels->gemm->workspace(teacher->gemm) > products)
        products = linear->kernels->gemm->workspace(teacher->gemm); /* one after another */
    memory->gemm = put(&bytes, &ok, !size->no_logits, products, 1, 1);
    memory->bytes = bytes;
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_ARG,
                          "linear: the workspace of %" PRId64 " tokens passes 2^63 bytes", tokens);
}

colo_status_t colo_linear_set_saved(const colo_linear_logprob_t *linear,
                                    const struct colo_linear_size *size,
                                    struct colo_linear_saved *saved)
{
    int64_t bytes = 0;
    bool ok = true;
    saved->stats = put(&bytes, &ok, !size->early, size->rows, numbers_of(linear), sizeof(double));
    saved->logits = put(&bytes, &ok, size->keeps, size->rows, size->z_stride,
                        elem_of(linear->config.logits_dtype));
    saved->d_logits =
        put(&bytes, &ok, size->early, size->rows, size->d_stride, elem_of(linear->dtype));
    saved->scale = put(&bytes, &ok, size->early && elem_of(linear->dtype) == 2, COLO_LINEAR_SCALE,
                       sizeof(float), 1);
    saved->bytes = bytes;
    return ok ? COLO_OK
              : colo_fail(COLO_ERR_ARG,
                          "linear: the saved state of %" PRId64 " tokens passes 2^63 bytes",
                          size->tokens);
}

/* ---- the queries ---- */

colo_status_t colo_linear_logprob_saved_size(const colo_linear_logprob_t *linear, int64_t tokens,
                                             int64_t max_valid, size_t *bytes)
{
    struct colo_linear_size size;
    struct colo_linear_saved saved;
    COLO_FAIL_IF(!linear || !bytes, COLO_ERR_ARG, "linear: %s is NULL",
                 linear ? "bytes" : "linear");
    COLO_TRY(colo_linear_set_size(linear, COLO_LINEAR_LOGPROB_FORWARD, tokens, max_valid, &size));
    COLO_TRY(colo_linear_set_saved(linear, &size, &saved));
    *bytes = (size_t)saved.bytes;
    return COLO_OK;
}

colo_status_t colo_linear_logprob_workspace_size(const colo_linear_logprob_t *linear,
                                                 colo_linear_logprob_pass_t pass, int64_t tokens,
                                                 int64_t max_valid, size_t *bytes)
{
    struct colo_linear_size size;
    struct colo_linear_memory memory;
    COLO_FAIL_IF(!linear || !bytes, COLO_ERR_ARG, "linear: %s is NULL",
                 linear ? "bytes" : "linear");
    COLO_TRY(colo_linear_set_size(linear, pass, tokens, max_valid, &size));
    COLO_TRY(colo_linear_set_memory(linear, &size, &memory));
    *bytes = (size_t)memory.bytes;
    return COLO_OK;
}
