/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.h (private) - what the lm_head path is made of, apart from the kernels of args.h: three
 * matrix products, the packing of tokens that count, and a stream in addition to the caller's.
 *
 * pipeline.c decides the order; the tables of loss.h and of products do the work for one kind of
 * memory (linear.c and host/gemm.c in plain C; cuda/loss.c and cuda/gemm.c). The
 * same rules as args.h: arguments come checked, nothing is allocated after create, nothing waits,
 * the host reads no device memory, everything may be captured in a graph.
 *
 * Tokens and rows. T tokens come in; R = max_valid is what the host knows of how many count. The
 * pack kernel writes, on the device, which token each of the R rows is (-1: none) and which row
 * each token is. From there on everything runs over rows, with ordinary colo_logprob_args of R
 * tokens whose targets are the packed ones: a row without a token has the target ignore_index, so
 * that no kernel needs to know a count. Only rows_scatter() goes back to tokens.
 *
 * Chunks. Rows [lo, hi) are made as one chunk in one of two logits buffers; a kernel of args.h then
 * gets logits (and d_logits) whose row 0 is row `row_lo` of the R. In loss mode with several
 * ranks a chunk has its own blocks and its own gather, so block_lo is lo there, and the stats
 * kernel writes the header whenever lo == block_lo. The logits buffer's rows are a multiple of 128
 * bytes apart, and start at such a multiple.
 *
 * Blocks. Backward makes a chunk's logits in blocks of columns, for the statistics are known: a
 * chunk then has as many logits at a time as one of forward, but more rows, mostly all of them. Its
 * part of d_W is made by one product and needs no sums of chunks; d_hidden is summed over blocks,
 * in the sum dtype. The width of a block is a constant, so no bit of d_hidden depends on the rows.
 *
 * Order. Products run on the caller's stream, one after another (they share one GEMM workspace);
 * statistics, gathers and gradients run on the auxiliary stream, so that they overlap the next
 * chunk's product. Events carry the order between the two. The auxiliary stream is only ever used
 * after it has waited for an event that was recorded on the caller's stream in the same call, and
 * the caller's stream waits for its last event: that is what makes a call capturable.
 */
#ifndef COLO_LOSS_LINEAR_LINEAR_H
#define COLO_LOSS_LINEAR_LINEAR_H

#include "core/device.h"
#include "loss/linear/rows.h"
#include "loss/args.h"

#include <colobridge/lm_head.h>

/* ---- products ---- */

/* NULL of nothing */
static inline void *colo_linear_element(void *data, colo_dtype_t dtype, int64_t i)
{
    return data ? (char *)data + i * (int64_t)colo_dtype_size(dtype) : NULL;
}

/* h [rows, hidden], w [columns, hidden], z [rows, columns]; the one on the left is written:
 *   LOGITS    z = beta z + factor h wT + bias    beta 0: what is in z, h or w is not read
 *   D_HIDDEN  h = beta h + factor z w
 *   D_WEIGHT  w = beta w + factor zT h
 * Any extent may be 0; a sum of nothing is 0 (and bias alone, and beta w). fp32 accumulation for
 * f32, bf16 and f16 operands, fp64 for f64, one rounding to the dtype of what is written, on GPUs
 * perhaps two into 16 bits with beta 1: of the product, and of the sum. A row of LOGITS and of
 * D_HIDDEN has the same bits whatever rows it comes with, of those that `all` counts.
 */
enum colo_linear_product {
    COLO_LINEAR_LOGITS = 0,
    COLO_LINEAR_D_HIDDEN = 1,
    COLO_LINEAR_D_WEIGHT = 2
};
struct colo_linear_gemm {
    enum colo_linear_product product;
    int64_t rows, columns, hidden;
    int64_t first; /* row 0 is this one of the R rows */
    int64_t all;   /* R: the sums of D_HIDDEN may be cut into parts if rows are few; 0: not */
    struct colo_linear_matrix h, w, z;
    const void *bias; /* of LOGITS with beta 0: [columns], contiguous, h's dtype; NULL: none */
    double beta;      /* 0 or 1 */
    double factor;    /* 1 with a bias or a scale */
    const float
        *scale; /* [COLO_LINEAR_SCALE], which multiplies as factor does; NULL: 1; LOGITS: NULL */
    /* of LOGITS alone, where reduces(): z's tiles become stats->tiles, and z.data may be NULL;
     * colo_linear_tiled says more. NULL: no */
    const struct colo_logprob_args *stats;
    void *workspace; /* of workspace() bytes, 256-aligned */
};

/* The three as one: C [m, n] = sum over k of A(i, k) B(k, j). Lines are rows of A and columns of B;
 * a matrix has a line in each row, or by_k, the k-th elements of all lines. */
struct colo_linear_form {
    const struct colo_linear_matrix *a, *b, *c;
    bool a_by_k, b_by_k;
    int64_t m, n, k;
};
static inline struct colo_linear_form colo_linear_form_of(const struct colo_linear_gemm *g)
{
    if (g->product == COLO_LINEAR_LOGITS)
        return (struct colo_linear_form){&g->h, &g->w,   &g->z,      false,
                                         false, g->rows, g->columns, g->hidden};
    if (g->product == COLO_LINEAR_D_HIDDEN)
        return (struct colo_linear_form){&g->z, &g->w,   &g->h,     false,
                                         true,  g->rows, g->hidden, g->columns};
    return (struct colo_linear_form){&g->z, &g->h,      &g->w,     true,
                                     true,  g->columns, g->hidden, g->rows};
}

/* What products an object will run: dtypes and largest extents, for what create may prepare.
 *   LOGITS    h, w: dtype;  z: logits_dtype
 *   D_HIDDEN  z, w: dtype;  h: dtype, or sum_dtype (f32, f64 of f64 heads)
 *   D_WEIGHT  z, h: dtype;  w: dtype, or sum_dtype
 * Of a LoRA one extent is its rank, which may be larger than these. */
struct colo_linear_shape {
    int32_t device;
    colo_dtype_t dtype, logits_dtype, sum_dtype;
    int64_t columns, hidden;
    bool pinned;      /* a row has the same bits in any place: rows do not choose the kernel */
    colo_gemm_t gemm; /* in host memory */
};

/* ---- the table of products ---- */

typedef struct colo_gemm_backend {
    /* An object for the others; @made NULL if there is none */
    colo_status_t (*create)(const struct colo_linear_shape *shape, void **made);
    void (*destroy)(void *made);
    int64_t (*workspace)(const void *made); /* bytes, a multiple of 256 */
    /* Can LOGITS make statistics? NULL: no */
    bool (*reduces)(const void *made);
    colo_status_t (*run)(void *made, const struct colo_linear_gemm *g, colo_stream_t stream);
} colo_gemm_backend_t;

extern const colo_gemm_backend_t colo_gemm_host; /* host/gemm.c */

/* ---- lm_head.c's, for pipeline.c ---- */

/* As colo_lm_head_gradient(), without the zeros: *fresh says that nothing is in the views yet.
 * @once: d_weight is written once, so that its view may have the gradient's own dtype. Workspace:
 * colo_lm_head_sums_size(). */
colo_status_t colo_lm_head_open_sums(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                     bool once, void *workspace, colo_tensor_t *d_weight,
                                     colo_tensor_t *d_bias, bool *fresh);
size_t colo_lm_head_sums_size(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                              bool once);
colo_status_t colo_lm_head_reduce_sums(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                       bool once, void *workspace, colo_stream_t stream);
/* COLO_ERR_STATE unless bound; the version counters of what is bound, summed */
colo_status_t colo_lm_head_bound(const colo_lm_head_t *head, uint64_t *version);
/* The weight that is bound, where it is not gathered; else NULL */
const colo_tensor_t *colo_lm_head_resident(const colo_lm_head_t *head);

#endif
