/* SPDX-License-Identifier: Apache-2.0 */
/*
 * args.h (private) - the three kernels that the logits path is made of, and their arguments.
 *
 *   stats   logits [T, Vl] -> this rank's block of per-token statistics
 *   (one all-gather of the blocks, by logprob.c)
 *   merge   blocks [W] -> logp, entropy, loss, correct, counts, saved statistics
 *   grad    logits, saved statistics, upstream -> d_logits
 *
 * A table of loss.h has them for one kind of memory: host/logprob.c in plain C, kernels/ in CUDA.
 * Each gets checked arguments, allocates nothing, enqueues on the stream and
 * does not wait. Everything about a token depends on that token's row only and is combined in a
 * fixed order, so results cannot depend on how the tokens are cut into calls of a kernel.
 *
 * Logits may lie in a buffer of fewer rows than tokens, whose first row is token row_lo: the
 * lm_head path makes them chunk by chunk.
 *
 * A block is what one rank tells the others, and goes through the gather as bytes:
 *
 *   header                             64 bytes
 *   m   [n]  max x of the shard        stat dtype; NaN when the shard has a NaN or +inf
 *   s   [n]  sum e^(x-m)
 *   xt  [n]  x_t - m                   only the owner's is read; -inf when x_t is
 *   u   [n]  sum e^(x-m) (x-m)         with want_entropy
 *   d   [n]  sum w (x-m)               with smoothing, want_mean_logits; -inf when some x is -inf
 *   arg [n]  i64, global index of m    with want_correct, want_argmax; -1 when there is none
 *   w   [n]  sum of the shard's w      with class weights and smoothing
 *   wt  [n]  w of the target           with class weights; only the owner's is read
 *   q   [n]  sum e^2(x-m)              with want_sum_p2
 *
 * each array starting at a multiple of 8 bytes. n is the tokens of the block: T, or those of the
 * call where a single rank needs no gather. An empty or all -inf shard, and an ignored token, has
 * m = -inf and s = u = q = 0 and is skipped in the merge. Differences to m, never x itself, are
 * stored where a sum of x would do: they keep their digits when logits are large. w is a column's
 * class weight, or 1; where it is 0, x does not matter to d.
 *
 * The stat dtype is f32 for f32, bf16 and f16 logits and f64 for f64 logits. x counts as infinite
 * when it is after rounding to the stat dtype; the argmax compares x after that rounding.
 */
#ifndef COLO_LOSS_ARGS_H
#define COLO_LOSS_ARGS_H

#include <colobridge/logprob.h>

#include <assert.h>

#define COLO_LOGPROB_MAGIC INT64_C(0x31736f6c6f6c6f63)

/* First in each block; written by the stats kernel whose lo is block_lo. */
typedef struct colo_logprob_header {
    int64_t magic;
    int64_t start;   /* first global column of the shard */
    int64_t columns; /* columns that are in the vocabulary; padding is not counted */
    int64_t tokens;
    uint64_t config;  /* hash of what must be equal on all ranks */
    uint64_t targets; /* hash of the targets */
    int64_t sums;     /* bits: which gradients backward adds up over these ranks; a LoRA's rank */
    int64_t unused;
} colo_logprob_header_t;
enum { COLO_SUMS_HIDDEN = 1, COLO_SUMS_LORA = 2, COLO_SUMS_RANK = 4 }; /* the last times the rank */
static_assert(sizeof(colo_logprob_header_t) == 64, "blocks of different builds must agree");
/* Do the ranks of both headers want the same? In host memory others are an error; on a device the
 * host does not look, and the merge gives NaN. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline bool
    colo_logprob_alike(const colo_logprob_header_t *a, const colo_logprob_header_t *header)
{
    return a->config == header->config && a->targets == header->targets;
}

/* Byte offsets of the arrays in a block of some number of tokens; -1: the array is not there. */
typedef struct colo_logprob_block {
    int64_t m, s, xt, u, d, arg, w, wt, q;
    int64_t bytes; /* of the whole block */
} colo_logprob_block_t;

/* The columns of a token: those in ids[begin[t]] .. ids[end[t] - 1] and its target. */
struct colo_support_lists {
    const int64_t *ids;
    int64_t count;              /* of ids */
    const int64_t *begin, *end; /* [T]; NULL: all columns */
    int64_t begin_stride, end_stride;
    const int64_t *token_of; /* token of a row; NULL: its number */
};

/* Addresses of arrays of outputs and of upstream gradients, in the stat dtype; NULL: not there. */
struct colo_logprob_out {
    void *logp, *entropy, *loss;
    uint8_t *correct;
    int64_t *n_valid, *n_invalid;
    void *weight;
    int64_t *argmax;
    void *lse, *sum_p2, *mean_logits;
};
struct colo_logprob_upstream {
    const void *d_logp, *d_entropy, *d_loss, *d_lse;
};

struct colo_logprob_args {
    colo_logprob_config_t config;
    colo_dtype_t dtype;      /* of logits */
    colo_dtype_t d_dtype;    /* of d_logits: dtype, or a narrower one in a buffer of its own */
    colo_dtype_t stat_dtype; /* of the block, the outputs and the upstream gradients: f32 or f64 */
    double factor;           /* scale / temperature: x = factor z, or cap tanh(factor z / cap); */
    double cap;              /* softcap / temperature; 0: off. Each token's own divides both */
    double smoothing;        /* e, or Megatron's e'; 0 when no loss is wanted */
    int64_t own;             /* this rank's columns with local_smoothing, else 0 */
    int64_t lo, hi;          /* tokens of this call, [lo, hi) of [0, T); may be empty */
    int64_t tokens;          /* T */

    /* shard */
    const void *logits; /* [T, columns], row_stride elements apart */
    int64_t row_stride;
    int64_t row_lo; /* token of the first row of logits, and of d_logits; 0 in the logits path */
    const int64_t *targets; /* [T], target_stride elements apart */
    int64_t target_stride;
    int64_t columns;      /* Vl, padding too */
    int64_t true_columns; /* those < V; the first ones */
    struct colo_support_lists support;
    const float *temperature; /* [T], of tokens; NULL: 1. Of forward; grad has it from saved */
    const void *class_weight; /* of this rank's columns, in stat_dtype; with has_class_weight */
    int64_t class_start;      /* the first one's column of the vocabulary */

    /* What the product of the lm_head path leaves of each row from lo on, on GPUs that can, as
     * colo_logprob_tile_numbers() says: stats then reads this instead of logits. NULL otherwise */
    float *tiles;

    /* stats, merge */
    /* Blocks, not ranks of the group, if config.segment is not 0: each segment has its own. This
     * rank's are those from rank on, segments of them; segments is 1 without segments. */
    int32_t rank, ranks, segments;
    unsigned char *blocks; /* [ranks] blocks; the stats kernel writes this rank's */
    int64_t
        block_lo; /* first token of the blocks: 0, or lo when blocks hold those of one call only */
    colo_logprob_block_t block;
    colo_logprob_header_t header; /* for this rank's block */

    /* merge: where NULL, not written. The call whose lo is 0 starts the counts at 0, others add. */
    struct colo_logprob_out out;

    /* merge writes, grad reads: f64 [3, T]: M, log Sum, h; with class weights [5, T]: w of the
     * target, 0 if it is no token, and sum w / V; with has_temperature one more at the end. NULL
     * when there is no backward. M is NaN for a row that is NaN (a NaN, +inf, or nothing but -inf);
     * the row of an ignored token holds zeros; h is 0 without want_entropy. */
    double *saved;

    /* grad */
    struct colo_logprob_upstream upstream;
    void *d_logits; /* [T, columns]; logits itself with the same stride, or disjoint from it */
    int64_t d_row_stride;
};

/* A row of args.tiles is z of its target, then of each tile of columns, in fp32:
 *   m, s      as in a block, over the tile's columns
 *   u         with want_entropy
 * or with smoothing or want_correct all of
 *   m, s, u, d, arg     arg from the tile's first column on
 * x of the target, and not z, where x is not just a positive factor times z, and with smoothing or
 * want_correct. The target's is there where it is one of the rank's columns. */
enum { COLO_LOGPROB_TILE = 256, COLO_LOGPROB_TILE_NUMBERS = 5 };
#ifdef __CUDACC__
__host__ __device__
#endif
static inline int32_t colo_logprob_tile_numbers(const colo_logprob_block_t *block)
{
    return block->d >= 0 || block->arg >= 0 ? COLO_LOGPROB_TILE_NUMBERS : block->u >= 0 ? 3 : 2;
}
#ifdef __CUDACC__
__host__ __device__
#endif
static inline int64_t colo_logprob_tiles_stride(const colo_logprob_block_t *block, int64_t columns)
{
    const int64_t tiles = columns > 0 ? (columns - 1) / COLO_LOGPROB_TILE + 1 : 0;
    return 1 + tiles * colo_logprob_tile_numbers(block);
}

static inline colo_dtype_t colo_logprob_stat_dtype(colo_dtype_t logits)
{
    return logits == COLO_F64 ? COLO_F64 : COLO_F32;
}

/* Row @t of a block is this token. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    colo_logprob_token_of(const struct colo_logprob_args *args, int64_t t)
{
    return args->support.token_of ? args->support.token_of[t] : t;
}

/* f64 numbers of a token that args.saved has */
static inline int64_t colo_logprob_saved_numbers(const colo_logprob_config_t *config)
{
    return (config->has_class_weight ? 5 : 3) + config->has_temperature;
}

/* An array of a block. */
typedef struct colo_block_array {
    size_t offset; /* in args: where the int64_t is that becomes the array's byte offset */
    size_t count;  /* in args: of the int64_t elements per token; 0: one */
    int64_t elem;  /* bytes of an element; 0: of the stat dtype */
} colo_block_array_t;
#define COLO_LOGPROB_ARRAY(member) offsetof(struct colo_logprob_args, block.member), 0
#define COLO_LOGPROB_ARRAYS                                                                   \
    {COLO_LOGPROB_ARRAY(m), 0}, {COLO_LOGPROB_ARRAY(s), 0}, {COLO_LOGPROB_ARRAY(xt), 0},      \
        {COLO_LOGPROB_ARRAY(u), 0}, {COLO_LOGPROB_ARRAY(d), 0}, {COLO_LOGPROB_ARRAY(arg), 8}, \
        {COLO_LOGPROB_ARRAY(w), 0}, {COLO_LOGPROB_ARRAY(wt), 0},                              \
    {                                                                                         \
        COLO_LOGPROB_ARRAY(q), 0                                                              \
    }
enum { COLO_LOGPROB_NARRAYS = 9 };

/* Lays out the block of @tokens in the args that begin with @args: a header, and the arrays whose
 * bit is set in @wanted; the others get -1. False when it passes 2^63 bytes. */
bool colo_loss_lay_out(struct colo_logprob_args *args, const colo_block_array_t *arrays, int32_t n,
                       uint32_t wanted, int64_t tokens);
/* of COLO_LOGPROB_ARRAYS */
uint32_t colo_logprob_wanted(const struct colo_logprob_args *args);
bool colo_logprob_block_layout(const colo_logprob_config_t *config, colo_dtype_t dtype, int64_t n,
                               colo_logprob_block_t *block);
/* All that must be equal on all ranks; vocab_start and chunk_size need not. */
uint64_t colo_logprob_hash_config(const colo_logprob_config_t *config, colo_dtype_t dtype);

/* What one chunk-less forward over these tensors needs; ranks, blocks, outputs are the caller's,
 * and so are targets where @targets is NULL. */
struct colo_logprob_args colo_logprob_make_args(const colo_logprob_config_t *config,
                                                const colo_tensor_t *logits,
                                                const colo_tensor_t *targets);
/* Segments of a rank in a group of @ranks, a power of 2, so that sums over a rank's segments are
 * whole subtrees; 1 without segments */
int32_t colo_logprob_segments(const colo_logprob_config_t *config, int32_t ranks);
/* Sets rank, ranks and segments. */
void colo_logprob_set_ranks(struct colo_logprob_args *args, const colo_comm_t *group);
static inline unsigned char *colo_logprob_block_of(const struct colo_logprob_args *args,
                                                   int32_t rank)
{
    return args->blocks + rank * args->block.bytes;
}
/* Is there nothing to gather? */
static inline bool colo_logprob_alone(const struct colo_logprob_args *args)
{
    return args->ranks == args->segments;
}
/* The @i-th segment of a rank as a shard of its own, for the stats kernel. */
static inline struct colo_logprob_args colo_logprob_segment(const struct colo_logprob_args *args,
                                                            int64_t elem, int32_t i)
{
    struct colo_logprob_args segment = *args;
    const int64_t n = args->true_columns, each = args->config.segment;
    const int64_t lo = i * each < n ? i * each : n, hi = lo + each < n ? lo + each : n;
    segment.config.segment = 0;
    segment.rank += i;
    segment.logits = (const char *)args->logits + lo * elem;
    segment.columns = segment.true_columns = hi - lo;
    segment.config.logits.vocab_start += lo;
    segment.header.start = segment.config.logits.vocab_start;
    segment.header.columns = segment.columns;
    return segment;
}
/* This rank's header, by hashes of the config and of what else must be equal on all ranks. */
void colo_logprob_set_header(struct colo_logprob_args *args, uint64_t config, uint64_t targets);
/* With temperatures of the tokens that @mask lets count, or NULL, in host memory */
uint64_t colo_loss_hash_heat(const float *heat, const uint8_t *mask, int64_t mask_stride,
                             int64_t tokens, uint64_t hash);
/* of the targets of @args, in host memory */
uint64_t colo_logprob_hash_targets(const struct colo_logprob_args *args);

/* ---- all kernels, by name and arguments: the table of loss.h has them, and kernels/ ---- */

struct colo_topk_args;     /* topk-args.h */
struct colo_distill_args;  /* distill-args.h */
struct colo_sampling_args; /* sampling-args.h */
struct colo_sequence_args; /* sequence-args.h */
struct colo_mean_args;     /* mean.h */
struct colo_mean_grad_args;

/* linear/rows.h */
#define COLO_LOSS_ROWS(X)                       \
    X(rows_compact, colo_linear_rows)           \
    X(rows_upstream, colo_linear_upstream_rows) \
    X(rows_factor, colo_linear_factor)          \
    X(rows_scatter, colo_linear_scatter)        \
    X(rows_gather, colo_linear_move)            \
    X(rows_restore, colo_linear_move)           \
    X(rows_clear, colo_linear_move)             \
    X(rows_sum, colo_linear_sum)                \
    X(rows_convert, colo_linear_convert)
/* A kernel each, of its name */
#define COLO_LOSS_KERNELS(X)                                                 \
    X(logprob_stats, colo_logprob_args) /* each segment that the rank has */ \
    X(logprob_merge, colo_logprob_args)                                      \
    X(logprob_grad, colo_logprob_args)                                       \
    X(topk_rows, colo_topk_args)                                             \
    X(topk_rest, colo_topk_args)                                             \
    X(topk_merge, colo_topk_args)                                            \
    X(topk_tail, colo_topk_args)                                             \
    X(topk_sum, colo_topk_args)                                              \
    X(topk_fix, colo_topk_args)                                              \
    X(sampling_largest, colo_sampling_args)                                  \
    X(sampling_sums, colo_sampling_args)                                     \
    X(sampling_find, colo_sampling_args)                                     \
    X(sampling_keep, colo_sampling_args)                                     \
    X(distill_stats, colo_distill_args)                                      \
    X(distill_merge, colo_distill_args)                                      \
    X(distill_pairs, colo_distill_args)                                      \
    X(distill_finish, colo_distill_args)                                     \
    X(distill_grad, colo_distill_args)                                       \
    X(sequence_targets, colo_sequence_args)                                  \
    X(sequence_mask, colo_sequence_args)                                     \
    X(sequence_scatter, colo_sequence_args)                                  \
    X(sequence_gather, colo_sequence_args)                                   \
    X(mean_local, colo_mean_args)                                            \
    X(mean_finish, colo_mean_args)                                           \
    X(mean_grad, colo_mean_grad_args)
#define COLO_LOSS_FUNCTIONS(X) COLO_LOSS_KERNELS(X) COLO_LOSS_ROWS(X) X(topk_local, colo_topk_args)

#endif
