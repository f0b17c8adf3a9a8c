/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_case.h - one logits-path case on W in-process ranks: logits over the whole vocabulary go in,
 * every rank's outputs and the gradient put together from the shards come out.
 */
#ifndef TESTS_LOSS_LOSS_CASE_H
#define TESTS_LOSS_LOSS_CASE_H

#include <math.h>

#include "core/error.h"

#include "harness/harness.h"
#include "ref/ref_logprob.h"

enum { LOSS_RANKS = 8, LOSS_OUTS = 6, LOSS_UPS = 4 /* the first ones have gradients */ };
static const colo_dtype_t loss_dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};

typedef enum { SHARD_EVEN, SHARD_UNEVEN, SHARD_EMPTY, SHARD_PADDED, SHARD_KINDS } shard_kind_t;

struct gather_rank;
typedef struct loss_case {
    int32_t ranks;
    int64_t tokens, vocab;
    colo_dtype_t dtype;
    colo_logprob_config_t config;                   /* vocab and vocab_start are filled in */
    int64_t start[LOSS_RANKS], columns[LOSS_RANKS]; /* columns: padding too */
    int64_t row_gap;                                /* elements between rows, not to be touched */
    int64_t shift[2]; /* elements by which logits, gradient start past a multiple of 256 bytes */
    bool in_place, forward_only;
    bool second_gather;   /* of gather_case.h: is it expected? */
    bool no_up[LOSS_UPS]; /* leave d_logp, d_entropy, d_loss, d_lse NULL */
    double pad;           /* what padding columns and gaps hold */
    char label[96];
    colo_status_t (*run)(void *, struct gather_rank *); /* this and what follows: gather_case.h */
    void (*check)(struct loss_case *);

    void *memory; /* what is not of the lists points into these @bytes */
    size_t bytes;
    double *z;            /* [T, V], values that the dtype holds exactly */
    int64_t *targets;     /* [T] */
    double *class_weight; /* [V] in f32, some 0; if config.has_class_weight */
    double *temperature;  /* [T], exact in f32; if config.has_temperature */
    double *up[LOSS_UPS]; /* [T] each, exact in f32: d_logp, d_entropy, d_loss, d_lse */
    uint8_t *in;          /* [T, V]: is an id in its token's list? NULL: there are no lists */
    int64_t *ids, *begin, *end, count; /* the lists; malloc()'s */
    bool odd_rank; /* the last rank has one id less in that of token 0, or another temperature */

    /* results */
    double
        *out[LOSS_RANKS][LOSS_OUTS]; /* [T] each: logp, entropy, loss, lse, sum_p2, mean_logits */
    int64_t *argmax[LOSS_RANKS];
    double *weight[LOSS_RANKS]; /* [T] */
    uint8_t *correct[LOSS_RANKS];
    int64_t n_valid[LOSS_RANKS], n_invalid[LOSS_RANKS];
    double *dz;       /* [T, V] */
    double pad_worst; /* largest |gradient| or NaN of a padding column; written gaps count as inf */
    colo_comm_stats_t after_forward[LOSS_RANKS], after_backward[LOSS_RANKS];
} loss_case_t;

/* Allocates; draws logits of standard deviation @spread, legal targets and upstream gradients. */
void loss_case_init(loss_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab,
                    colo_dtype_t dtype, double spread, uint64_t *rng);
void loss_case_free(loss_case_t *c);
/* Tokens [lo, hi) of @from, with its config and shards. */
void loss_case_take(loss_case_t *c, const loss_case_t *from, int64_t lo, int64_t hi);
/* The tokens of @c, which are those from @lo on of @whole, have its bits on every rank; fails the
 * running test. */
void loss_case_same(const loss_case_t *c, const loss_case_t *whole, int64_t lo, const char *label);
void loss_case_shard(loss_case_t *c, shard_kind_t kind);
/* Forward and backward on all ranks; 0 <= W = ranks. */
colo_status_t loss_case_run(loss_case_t *c);
/* The same in t_run_later(), then @check; takes over what @c holds. */
void loss_case_later(const loss_case_t *c, void (*check)(loss_case_t *));

/* Of token @t; @t < 0: what is the same for all */
ref_logprob_opts_t loss_case_opts(const loss_case_t *c, int64_t t);

/* Against the oracle, within the tolerance stated in loss_case.c, where.slack times; fails the
 * running test. */
void loss_case_compare(const loss_case_t *c, const char *label);

/* Of a sum or a gradient: as a special value, or within @tol. */
static inline bool near(double got, double want, double tol)
{
    return isnan(want) ? isnan(got) : isinf(want) ? got == want : fabs(got - want) <= tol;
}

/* Are all of @n numbers that? */
typedef enum { IS_NAN, IS_FINITE, IS_ZERO } numbers_t;
static inline bool all_of(numbers_t what, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(what == IS_NAN ? isnan(x[i]) : what == IS_FINITE ? isfinite(x[i]) : x[i] == 0))
            return false;
    return true;
}

enum { CANARY = 0x5a };

/* Nothing was written: all @n bytes are CANARY. */
static inline bool painted(const void *p, size_t n)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        if (b[i] != CANARY)
            return false;
    return true;
}

static inline uint64_t total_ops(const colo_comm_stats_t *l)
{
    uint64_t n = 0;
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int o = 0; o < COLO_CATEGORY_COUNT; o++)
            n += l->ops[k][o];
    return n;
}

/* What @bits ask for. */
enum {
    WITH_TAU = 1,
    WITH_CAP = 2,
    WITH_SMOOTH = 4,
    WITH_MEGATRON = 8,
    WITH_ZLOSS = 16,
    WITH_ENTROPY = 32,
    WITH_LOSS = 64,
    WITH_CORRECT = 128,
    WITH_WEIGHTS = 4096, /* those between are LINEAR_* */
    WITH_LSE = 16384,
    WITH_MORE = 32768, /* argmax, sum_p2, mean_logits */
    WITH_HEAT = 65536  /* a temperature of each token */
};
void loss_options(colo_logprob_config_t *config, unsigned bits);
/* Which of the LOSS_OUTS */
void loss_wanted(const colo_logprob_config_t *config, bool wanted[LOSS_OUTS]);
extern const char *const loss_out_names[LOSS_OUTS];
/* Weights of the classes [0, @n), f32, some of them 0; the largest one, 1 without any */
void loss_draw_weights(double *weights, int64_t n);
/* Temperatures of tokens, f32, from 0.5 to 2 */
void loss_draw_temperature(double *temperature, int64_t n);
double loss_heaviest(const double *weights, int64_t n);

/* Of variance 1. */
double loss_normal(uint64_t *rng);
/* What storing gradient @g in @dtype may add to its error, @u being the roundoff of f32 there. */
double loss_grad_rounding(colo_dtype_t dtype, double g, double u);

/* The value that remains when @v is stored in @dtype; and of the stored bits. */
double loss_round(colo_dtype_t dtype, double v);
void loss_store(colo_dtype_t dtype, void *base, int64_t i, double v);
double loss_load(colo_dtype_t dtype, const void *base, int64_t i);

#endif
