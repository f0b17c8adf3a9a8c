/* SPDX-License-Identifier: Apache-2.0 */
/* tape.h (private) - what recording and backward share of a tape. */
#ifndef COLO_CORE_TAPE_H
#define COLO_CORE_TAPE_H

#include <colobridge/tape.h>

enum { COLO_TAPE_NAME = 48 };

struct colo_tape_buffer {
    void *data;
    size_t bytes;
    colo_mem_t mem;
    bool taken;
};

struct colo_tape_value {
    colo_tensor_t tensor;
    colo_tensor_t caller; /* data NULL where the tape owns the gradient */
    void *grad;           /* from the pool; contiguous */
    float *sum;           /* from the pool: of several gradients, if the dtype is bf16 or fp16 */
    int32_t node;         /* that made it; -1 for a leaf */
    int32_t uses, seen;   /* gradients that will reach it, and that have */
    bool wanted;          /* lies on a way from the value that backward starts at */
    bool retained;        /* its gradient is not released when its node has run */
};

struct colo_tape_saved {
    const uint64_t *version;
    uint64_t expected;
};

struct colo_tape_node {
    char name[COLO_TAPE_NAME];
    int32_t nin, nout, nsaved, first_out; /* outputs are values first_out .. first_out + nout - 1 */
    colo_value_t *in;
    struct colo_tape_saved *saved;
    void **spare; /* [nin], only during backward */
    colo_backward_fn backward;
    void *state;
    void (*free_state)(void *);
};

struct colo_tape {
    struct colo_tape_value *values;
    struct colo_tape_node *nodes;
    struct colo_tape_buffer *pool;
    int64_t nvalues, nnodes, npool, cap_values, cap_nodes, cap_pool;
    colo_stream_t stream; /* of gradients on a device */
    bool ran;
};

/* The smallest free buffer of the pool that is large enough and not more than twice as large, else
 * a new one. */
colo_status_t colo_tape_take(colo_tape_t *tape, colo_mem_t mem, size_t bytes, void **data);
void colo_tape_give(colo_tape_t *tape, const void *data);

/* COLO_ERR_STATE: backward has run. */
colo_status_t colo_tape_check_open(const colo_tape_t *tape, const char *what);
colo_status_t colo_tape_check_value(const colo_tape_t *tape, colo_value_t value, const char *what);
/* A gradient: like @tensor in shape and dtype, and contiguous. or_f32: fp32 for bf16 and fp16, too. */
colo_status_t colo_tape_check_like(const colo_tensor_t *gradient, const colo_tensor_t *tensor,
                                   const char *what, bool or_f32);

/* bf16 and fp16: what adds up in fp32. */
static inline bool colo_tape_is_half(const colo_tensor_t *tensor)
{
    return tensor->dtype == COLO_BF16 || tensor->dtype == COLO_F16;
}

#endif
