/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.h - the model's own arithmetic on one rank, for one kind of memory.
 *
 * ops-host.c: plain C and CBLAS. cuda/: a GPU, cuBLAS and one small kernel an operation; ops-none.c
 * where the build has no CUDA. The model knows this table and the library, never a device: whatever
 * it computes with lies in memory of take(), whatever it looks at itself is fetched by get().
 *
 * Operations are enqueued in order; put(), get() and check() wait. None returns a status: on a
 * device the first failure is kept, and check() says it once a step. Gradients of weights are
 * added, those of inputs written. Sums over many terms are fp64, products fp32: a rank with the
 * same inputs computes the same bits.
 *
 * Letters as in rank.h; h heads here, e features a head.
 */
#ifndef EXAMPLES_CAPTIONER_OPS_H
#define EXAMPLES_CAPTIONER_OPS_H

#include <colobridge.h>

/** The part of a batch that a rank has; tables in the memory of take(). Ragged samples lie one
 * behind the other on one axis of positions: b = 1. */
typedef struct cap_sequence {
    int64_t b, n, S, h, e;
    int64_t block;      /* rows of a cp rank in kv: the most that any has, n or more */
    int64_t window;     /* no position attends to more */
    const int64_t *pos; /* [n] global position of a local one */
    const int64_t *row; /* [n] row of y that goes there, -1: a byte of the text */
    const int64_t *part_of, *local_of; /* [S] cp rank and local index of a position */
    const int64_t *first;              /* [S] first position that a position attends to */
    const int64_t *table_row;          /* [S] its row of the position table */
    const int64_t *tokens;             /* [b, S] */
} cap_sequence_t;

typedef struct cap_ops cap_ops_t;
struct cap_ops {
    colo_mem_t mem;
    int32_t device;
    colo_stream_t stream;
    void *state;

    /* memory: zeroed, owned by the ops until destroy; NULL when there is none left */
    void *(*take)(cap_ops_t *o, int64_t bytes);
    void (*zero)(const cap_ops_t *o, void *p, int64_t bytes);
    void (*copy)(const cap_ops_t *o, void *to, const void *from, int64_t bytes);
    void (*put)(const cap_ops_t *o, void *to, const void *from_host, int64_t bytes);
    void (*get)(const cap_ops_t *o, void *to_host, const void *from, int64_t bytes);
    /* COLO_OK, or the first failure, with a line on stderr */
    colo_status_t (*check)(const cap_ops_t *o);
    void (*destroy)(cap_ops_t *o);

    /* y [t, out] = x [t, in] w' + b; b may be NULL */
    void (*linear)(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                   const float *w, const float *b, float *y);
    void (*linear_d_weight)(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                            const float *d_y, float *d_w);
    void (*linear_d_bias)(const cap_ops_t *o, int64_t t, int64_t out, const float *d_y, float *d_b);
    /* d_x = beta d_x + d_y w */
    void (*linear_d_input)(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *d_y,
                           const float *w, float beta, float *d_x);
    /* act = gelu(z), slope = gelu'(z); z may be act */
    void (*gelu)(const cap_ops_t *o, int64_t count, const float *z, float *act, float *slope);
    /* y *= by */
    void (*scale)(const cap_ops_t *o, int64_t count, const float *by, float *y);
    /* y [t, d] += skip + bias; skip may be NULL */
    void (*add_rows)(const cap_ops_t *o, int64_t t, int64_t d, const float *skip, const float *bias,
                     float *y);
    void (*norm)(const cap_ops_t *o, int64_t t, int64_t d, const float *x, const float *gain,
                 const float *bias, float *x_hat, float *r, float *y);
    /* d_x = d_skip + the norm's part; d_skip may be NULL */
    void (*norm_backward)(const cap_ops_t *o, int64_t t, int64_t d, const float *d_y,
                          const float *gain, const float *x_hat, const float *r,
                          const float *d_skip, float *d_x, float *d_gain, float *d_bias);

    /* causal attention of own queries over positions first[pos] .. pos: q, out [T, h e];
     * kv [cp, 2, b block, h e]; prob [b, h, n, window]; work: floats of attend_work() */
    int64_t (*attend_work)(const cap_sequence_t *s);
    void (*attend)(const cap_ops_t *o, const cap_sequence_t *s, const float *q, const float *kv,
                   float *prob, float *out, float *work);
    void (*attend_backward)(const cap_ops_t *o, const cap_sequence_t *s, const float *q,
                            const float *kv, const float *prob, const float *d_out, float *d_q,
                            float *d_kv, float *work);

    /* x [T, D] = row of y [b, yn, D], or row of embed, each + table[table_row] */
    void (*merge)(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                  const float *y, const float *embed, const float *table, float *x);
    /* d_y [b, yn, D] may be NULL; rows that no position here holds become 0 */
    void (*merge_backward)(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                           const float *d_x, float *d_y, float *d_embed, float *d_table);

    /* m, v, w after one more gradient; @fix1, @fix2: the corrections of the moments' start */
    void (*adam)(const cap_ops_t *o, int64_t count, float rate, float fix1, float fix2,
                 const float *g, float *m, float *v, float *w);
};

/* What Adam and weight decay are everywhere. */
#define CAP_ADAM_KEEP1 0.9f
#define CAP_ADAM_KEEP2 0.99f
#define CAP_ADAM_EPS 1e-8f
#define CAP_ADAM_DECAY 0.4f

void cap_ops_host(cap_ops_t *o);
/* The two parts of the host's table that live in files of their own */
void cap_ops_host_attention(cap_ops_t *o);
void cap_ops_host_merge(cap_ops_t *o);

/** cap_ops_cuda() - on GPU @device, which becomes the thread's; false with one line in @why */
bool cap_ops_cuda(cap_ops_t *o, int32_t device, char *why, size_t why_size);
/** cap_gpus() - GPUs of this host; -1 with one line in @why when this build cannot use any */
int cap_gpus(char *why, size_t why_size);

#endif
