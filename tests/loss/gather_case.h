/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather_case.h - what the runners of losses and sequences share: the memory of a rank, shards of
 * [T, V] in it, and central differences. The first member of such a case is its shape, a
 * loss_case_t without memory of its own. Fixed sizes: a case is one piece of memory.
 */
#ifndef TESTS_LOSS_GATHER_CASE_H
#define TESTS_LOSS_GATHER_CASE_H

#include "loss/loss_case.h"
#include "loss/where.h"

enum { GATHER_TOKENS = 9, GATHER_VOCAB = 70 };

/* Draws a scale, a softcap, what is in place and the gaps; returns whether @mask [T] counts. */
bool gather_draw(loss_case_t *s, colo_logits_options_t *logits, uint8_t *mask, uint64_t *rng);

typedef struct gather_rank {
    loss_case_t *shape;
    int32_t rank;
    colo_comm_t *group;
    colo_dtype_t stat; /* of outputs and upstream gradients */
    void *host;        /* a shard, or T lines of GATHER_VOCAB numbers */
    void *all[32];     /* what gather_put() made */
    int count;
} gather_rank_t;

/* Of a case that @run runs on each rank. */
void gather_shape(loss_case_t *s, int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype,
                  colo_status_t (*run)(void *c, gather_rank_t *m));
/* The shape's run() of @c, which begins with its shape, on all ranks; or of a copy in
 * t_run_later(), then @check, which finds a label in the shape. */
colo_status_t gather_run(void *c, size_t bytes);
void gather_later(const void *c, size_t bytes, void (*check)(loss_case_t *c));

/* Memory of `where`: @bytes of @from; or of @n numbers in the dtype of outputs, or in f32; or this
 * rank's columns of @from [T, V] in @dtype, in which padding, gaps and, if @from is NULL, all hold
 * s->pad.
 */
void *gather_put(gather_rank_t *m, const void *from, size_t bytes);
void *gather_put_stats(gather_rank_t *m, const double *from, int64_t n);
void *gather_put_f32(gather_rank_t *m, const double *from, int64_t n);
colo_tensor_t gather_put_shard(gather_rank_t *m, colo_dtype_t dtype, const double *from);
void gather_drop(gather_rank_t *m, void *p); /* before the end */
void gather_get_stats(gather_rank_t *m, double *to, const void *from, int64_t n);
/* The columns of @grad to @dz [T, V]; shape.pad_worst is infinite if padding or a gap was written.
 */
void gather_get_shard(gather_rank_t *m, double *dz, const void *grad);

/* Padding is as it was; one gather forward, no operation backward. */
void gather_check(const loss_case_t *s, const char *label);
/* @run fills @dz [T, V] from @z [T, V], fp64; then its own forward alone, around @z, must agree:
 * h^2 / 6 times a third derivative of order 10, h = 1e-4. @f: of a token, after a run. */
void gather_central(loss_case_t *s, double *z, const double *dz, colo_status_t (*run)(void),
                    double (*f)(int64_t t));

#endif
