/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.h - the parallel half of the captioner: what one rank holds, the calls between its files.
 *
 * A rank talks to others through colo_comm_t only; nothing here is shared between ranks except the
 * constant cap_config_t, which every process of another backend would make from the same command
 * line. All memory is taken before the first step: what the model computes with by r->ops, on the
 * host or on the rank's GPU, and what a rank looks at or says about itself in its arena, on the
 * host.
 *
 * Two comms have the same ranks. r->world and the groups made of it carry tensors where r->ops
 * computes; r->host carries words between programs: losses, counters, chosen bytes. Without GPUs
 * they are one.
 *
 * Letters: B global batch, b samples on this rank, S padded sequence, n = S / cp positions on this
 * rank, T = b n tokens on this rank, D width, W tp size.
 */
#ifndef EXAMPLES_CAPTIONER_RANK_H
#define EXAMPLES_CAPTIONER_RANK_H

#include <colobridge.h>

#include "captioner.h"
#include "ops.h"
#include "report.h"

#define CAP_TRY(expr)              \
    do {                           \
        colo_status_t s_ = (expr); \
        if (s_ < 0)                \
            return s_;             \
    } while (0)

/* Places in the table of cap_params(); layer l's are P_LAYER + l * P_PER_LAYER + one of the second
 * list, the back's come after the last layer. */
enum { P_W1, P_B1, P_W2, P_B2, P_EMBED, P_POS, P_LAYER };
/* clang-format off */
enum { L_LN1G, L_LN1B, L_WQ, L_BQ, L_WK, L_BK, L_WV, L_BV, L_WO, L_BO, L_LN2G, L_LN2B, L_WU, L_BU,
       L_WD, L_BD, P_PER_LAYER };
/* clang-format on */
enum { B_LNFG, B_LNFB, B_HEAD };

enum { CAP_SAMPLES = 12 };

/** What the command line asks for; the same on all ranks, never written after start. */
typedef struct cap_config {
    colo_grid_t src,
        dst; /* tp, cp, pp and dp all present; absent ones were appended with extent 1 */
    char src_text[64], dst_text[64]; /* as given */
    int32_t world;
    int64_t steps, batch, eval_every;
    uint64_t seed;
    double lr;
    colo_output_t output;
    colo_grad_t grad;
    colo_algo_t algo;
    const char *report, *command;
    bool check_gradients, json;
    bool head_sharded, loss_linear;
    bool dynamic_cp; /* each ragged sequence lies on context ranks of its own */
    cap_model_t model;
    cap_task_t task;
    const cap_data_t *data;
    int exit_code; /* written by rank 0: 0, or 1 when something was found */
} cap_config_t;

/** One grid as seen from one rank. */
typedef struct cap_side {
    bool in;                                              /* the grid has this rank */
    int64_t tp, cp, pp, dp;                               /* extents */
    int64_t t, c, p, d;                                   /* coordinates */
    colo_comm_t *tp_comm, *cp_comm, *pp_comm, *mean_comm; /* mean: dp x cp. Owned; NULL outside */
    colo_comm_t *tp_host, *cp_host, *pp_host, *mean_host; /* the same ranks on the host */
    bool split_host;                                      /* and not the very same comms */
    int64_t b0, b; /* own samples [b0, b0 + b) of the global batch */
} cap_side_t;

/** Memory taken before the first step, freed at the end. */
typedef struct cap_arena {
    void *last; /* list of blocks */
    bool failed;
} cap_arena_t;

/** What a transformer layer keeps from forward to backward; [T, ...] each. */
typedef struct cap_layer {
    struct cap_rank *rank;
    int64_t offset;         /* place of its first parameter */
    float *x1_hat, *r1, *a; /* LN1: normalised input, 1 / deviation, output */
    float *q, *kv, *kv_all; /* [T, Dl], [2, kv rows, Dl], [cp, 2, kv rows, Dl] */
    float *prob, *o;        /* [b, heads, n, S], [T, Dl] */
    float *mid;             /* x after attention */
    float *x2_hat, *r2, *m;
    float *act, *dact; /* gelu and its slope [T, Fl] */
    float *out;
} cap_layer_t;

typedef struct cap_ragged cap_ragged_t;

typedef struct cap_rank {
    cap_config_t *cfg;
    colo_comm_t *world, *host; /* borrowed */
    cap_ops_t ops;
    cap_side_t src, dst;
    cap_arena_t arena;

    /* parameters held here: NULL where another rank holds them. Each side's are one block. */
    cap_param_t table[CAP_MAX_PARAMS];
    int nparams;
    float *w[CAP_MAX_PARAMS], *g[CAP_MAX_PARAMS];
    int64_t count[CAP_MAX_PARAMS];                        /* elements of the local shard */
    float *side_w[2], *side_g[2], *adam_m[2], *adam_v[2]; /* [0] encoder, [1] LLM */
    int64_t side_count[2];
    int64_t adam_step;
    float *whole, *shard; /* host: room for any parameter */

    /* encoder; sb samples x sn patches, or 1 x the ragged rows that are here */
    bool encodes;
    int64_t sb, sn, *patch_at; /* [sn] patch of local row; NULL when ragged */
    float *patches_host, *patches, *act, *dact, *enc, *d_act;

    /* bridge */
    colo_layout_t src_layout, dst_layout;
    colo_bridge_t *bridge;
    int32_t ndim;                   /* of the next two: 3, or 2 when ragged */
    int64_t x_shape[3], y_shape[3]; /* of this rank, as the bridge says; 0 samples: no part */
    float *y;                       /* [b, yn, D] */
    int64_t yn;
    cap_ragged_t *ragged; /* NULL when uniform */
    float *no_seed;       /* a gradient for ranks on which no node consumed y */

    /* LLM. Ragged samples lie on one axis: b is 1 for S, and S, n and T change with the batch */
    int64_t S, n, T, *pos;           /* [n] global position of a local one */
    int64_t *row;                    /* [n] row of y that goes there, or -1 */
    int64_t *part_of, *local_of;     /* [S] cp rank and local index of a position */
    int64_t *held;                   /* [S] positions of one cp rank */
    int64_t *image_row;              /* [S] row of the images at a position, or -1 */
    int64_t *first, *table_row;      /* [S] see cap_sequence_t */
    int64_t *text_at;                /* [dst.b] index in tokens of a caption's first byte */
    colo_partition_t part;           /* of the S positions */
    int64_t *tokens, *tokens_seen;   /* [b, S]; seen: by the ops, the same where that is so */
    int64_t *targets_all;            /* [b, S] */
    int64_t *targets_host, *targets; /* [b, n]; the latter by the ops */
    cap_sequence_t seq;
    uint8_t *mask; /* [b, n] */
    int64_t first_layer, end_layer;
    bool front, back;   /* has embedding; has norm, head and loss */
    float *h_in;        /* [T, D] merged input, or what the stage before sent */
    cap_layer_t *layer; /* [end_layer - first_layer] */
    float *xf_hat, *rf, *hf, *logits, *logp, *d_logp;
    float *logits_host, *d_logp_host, *nll, *loss; /* host */
    colo_logprob_config_t logprob;
    colo_logprob_saved_t saved;
    void *stats, *workspace;
    colo_lm_head_t *head;
    colo_memory_t *head_memory;    /* what it is gathered into; NULL when resident */
    int64_t head_first, head_rows; /* rows here, of those of this tp rank */
    float *head_w;                 /* all of these, while the head is open */
    colo_linear_logprob_t *linear;
    colo_linear_logprob_saved_t linear_saved;
    void *head_sums, *linear_work, *linear_kept;
    bool loss_linear; /* as cfg's; the check turns it */
    colo_loss_reduced_t reduced;

    /* backward's workspace, shared by the layers */
    float *d_f, *d_t1, *d_t2, *d_top, *d_q, *d_kv, *d_kv_all, *work;

    colo_tape_t *encoder_tape, *llm_tape;
    colo_value_t y_value, in_value, out_value;
    int64_t *rows;  /* [B][most] images of the global batch */
    int64_t filled; /* positions of the global batch that are no padding */

    /* greedy decoding: best value and byte of own samples, of all tp ranks; the chosen byte */
    float *best, *best_all;
    int32_t *chosen;
} cap_rank_t;

/* ---- side.c: grids, groups, memory ---- */

/* @host may be @world */
colo_status_t cap_side_create(cap_side_t *side, colo_comm_t *world, colo_comm_t *host,
                              const colo_grid_t *grid, const char *name, int64_t batch);
void cap_side_destroy(cap_side_t *side);
/* in place sum over @comm; nothing when it has one rank */
colo_status_t cap_sum(colo_comm_t *comm, float *buffer, int64_t count, colo_stream_t stream);
void *cap_take(cap_arena_t *arena, int64_t count, size_t size); /* zeroed, 64-byte aligned */
void cap_arena_free(cap_arena_t *arena);

/* ---- attention.c ---- */

/* Rows of keys, and of values, that each cp rank brings */
static inline int64_t cap_kv_rows(const cap_rank_t *r)
{
    return r->seq.b * r->seq.block;
}
/* o and prob from q and kv; gathers kv over cp */
colo_status_t cap_attention(cap_layer_t *l);
/* d_q and d_kv of the rank from d_o; scatters over cp */
colo_status_t cap_attention_backward(cap_layer_t *l, const float *d_o);

/* ---- layer.c ---- */

colo_status_t cap_layer_forward(cap_layer_t *l, const float *x);
colo_status_t cap_layer_backward(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *layer);

/* ---- blocks.c: encoder, bridge, merge; the backward functions have the tape's shape ---- */

colo_status_t cap_encoder_forward(cap_rank_t *r);
colo_status_t cap_encoder_backward(const colo_tensor_t *d_out, int32_t nout,
                                   const colo_tensor_t *d_in, int32_t nin, void *rank);
colo_status_t cap_bridge_forward(cap_rank_t *r);
colo_status_t cap_bridge_backward(const colo_tensor_t *d_out, int32_t nout,
                                  const colo_tensor_t *d_in, int32_t nin, void *rank);
void cap_merge_forward(cap_rank_t *r);
colo_status_t cap_merge_backward(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *rank);
/* A contiguous view of memory that the ops took */
colo_tensor_t cap_view(const cap_rank_t *r, void *data, colo_dtype_t dtype, int32_t ndim,
                       const int64_t *shape);
colo_tensor_t cap_x_view(const cap_rank_t *r, float *data); /* [sb, sn, D] */
colo_tensor_t cap_y_view(const cap_rank_t *r, float *data); /* [b, yn, D] */

/* ---- head.c: final norm, head, loss ---- */

/* Which rows are here must be known before parameters are taken, memory after it. */
colo_status_t cap_head_create(cap_rank_t *r);
colo_status_t cap_head_take(cap_rank_t *r);
/* Workspace or saved memory of a loss, where the ops see it */
void *cap_take_aligned(cap_rank_t *r, size_t bytes);
void cap_head_destroy(cap_rank_t *r);
/* Is parameter @i the head, and only head_rows of it from head_first on are here? */
bool cap_head_sharded(const cap_rank_t *r, int64_t i);
colo_status_t cap_head_forward(cap_rank_t *r, const float *x);
colo_status_t cap_head_backward(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                                int32_t nin, void *rank);
/* Between these two the head is whole; all ranks of dp x cp on the last stage call them */
colo_status_t cap_head_open(cap_rank_t *r);
colo_status_t cap_head_close(cap_rank_t *r);
/* The final norm and this rank's logits of @t rows @x, into r->hf and r->logits; head open */
void cap_head_logits(cap_rank_t *r, int64_t t, const float *x);

/* ---- model.c ---- */

/* @ops: taken, also on error; @host: the same ranks as @world, or @world itself */
colo_status_t cap_rank_create(cap_rank_t *r, cap_config_t *cfg, const cap_ops_t *ops,
                              colo_comm_t *world, colo_comm_t *host);
void cap_rank_destroy(cap_rank_t *r);

/* Where the S positions are: n, T, pos, row, part_of, local_of; all tables to where the ops see
 * them
 */
colo_status_t cap_place(cap_rank_t *r);
/* r->ops.take(); a failure shows in r->arena */
void *cap_take_there(cap_rank_t *r, int64_t count, int64_t size);

/* ---- ragged.c: tables of a batch, balance, and the two bridges ---- */

/* Layouts, bridges and the most that a batch can need: S, n, T, sn, yn */
colo_status_t cap_ragged_create(cap_rank_t *r);
void cap_ragged_destroy(cap_rank_t *r);
/* The tables of a batch; pixels go to the replicas that encode them. Without captions there is
 * space for any */
colo_status_t cap_ragged_load(cap_rank_t *r, const int64_t *rows, bool captions);
/* --dynamic-cp: @pos [S]: the positions of cp rank @c, of which there are *@n */
colo_status_t cap_ragged_positions(const cap_rank_t *r, int64_t c, int64_t *pos, int64_t *n);
colo_status_t cap_ragged_forward(cap_rank_t *r, const colo_tensor_t *x, const colo_tensor_t *y);
colo_status_t cap_ragged_backward(cap_rank_t *r, const colo_tensor_t *d_y,
                                  const colo_tensor_t *d_x);
/* Bytes that this rank received so far by the plans of its batches; see cap_stats_t */
const int64_t *cap_ragged_planned(const cap_rank_t *r);
const cap_balance_t *cap_ragged_balance(const cap_rank_t *r);

/* ---- step.c ---- */

/* images of the global batch -> patches of this rank, tokens of this rank (@captions: else NULs) */
colo_status_t cap_load(cap_rank_t *r, const int64_t *rows, bool captions);
/* r->tokens to where the ops see them */
void cap_put_tokens(cap_rank_t *r);
/* encoder and bridge; recorded when @tape is given */
colo_status_t cap_encode(cap_rank_t *r, colo_tape_t *tape);
/* merge and this stage's layers, for ranks in the destination grid; *top: the last one's output */
colo_status_t cap_stack(cap_rank_t *r, colo_tape_t *tape, const float **top);
/* Of the loaded batch: loss in r->reduced (on the last stage), and gradients of this rank's shards,
 * summed over dp and cp: those of the mean over the global batch */
colo_status_t cap_forward_backward(cap_rank_t *r);

/* ---- decode.c ---- */

/* Bytes that a caption has space for, its NUL included */
static inline int64_t cap_text(const cap_config_t *cfg)
{
    return cfg->task.ragged ? CAP_SAID : CAP_TEXT;
}
/* Greedy captions of the held-out samples: @text [nheld][cap_text()] bytes, the same on every rank
 */
colo_status_t cap_decode(cap_rank_t *r, int32_t *text, int64_t *exact);

/* ---- gather.c: whole parameters and counters of all ranks, by sums over the world ---- */

/* @shards: r->w or r->g; @whole [nparams], on every rank */
colo_status_t cap_gather(cap_rank_t *r, float *const *shards, float *const *whole);
/* Do all ranks that hold the same shard hold the same bits; the same answer on every rank */
colo_status_t cap_replicas(cap_rank_t *r, bool *same);

enum { CAP_COMMS = 9 };
enum { CAP_PIXELS_MOVED, CAP_EMBEDDINGS_MOVED, CAP_GRADIENTS_MOVED, CAP_MOVES };
/** What a rank's comms did between two moments, or all ranks' together. */
typedef struct cap_stats {
    colo_comm_stats_t of[CAP_COMMS];
    int64_t planned[CAP_MOVES]; /* ragged: bytes received, by the plans */
} cap_stats_t;
extern const char *const cap_comm_names[CAP_COMMS];
void cap_stats_now(const cap_rank_t *r, cap_stats_t *now);
/* total += after - before */
void cap_stats_add(cap_stats_t *total, const cap_stats_t *before, const cap_stats_t *after);
/* Sums over the world, in place */
colo_status_t cap_stats_sum(cap_rank_t *r, cap_stats_t *total);
/* Bytes that the bridges receive in @steps, all ranks', by their plans; -1: no plan can be made */
int64_t cap_planned_bytes(const cap_rank_t *r, const cap_stats_t *total, int64_t steps);
/* Received bytes of operations that the bridge did, by the statistics */
uint64_t cap_bridge_bytes(const cap_stats_t *total);

/* ---- train.c ---- */

/* One step of Adam on the batch of @step; *loss on every rank */
colo_status_t cap_step(cap_rank_t *r, int64_t step, double rate, double *loss);
double cap_rate(const cap_config_t *cfg, int64_t step);
colo_status_t cap_train(cap_rank_t *r);

/* ---- show.c: what a person sees; rank 0 only ---- */

double cap_seconds(void); /* monotonic */
typedef struct cap_progress {
    double start, last; /* seconds */
    int64_t steps;
    double accuracy; /* < 0: not evaluated yet */
    bool terminal, shown;
    void *out; /* FILE * */
} cap_progress_t;
void cap_progress_begin(cap_progress_t *p, const cap_config_t *cfg);
/* @tokens, @training: positions and seconds of the steps so far, decoding left out; @force: even
 * when a line was just shown */
void cap_progress_step(cap_progress_t *p, int64_t done, double loss, int64_t tokens,
                       double training, bool force);
void cap_show_samples(const cap_config_t *cfg, const cap_sample_t *samples, int64_t n);

/* ---- gradcheck.c ---- */

colo_status_t cap_check_gradients(cap_rank_t *r);

#endif
