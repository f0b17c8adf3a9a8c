/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.c - the kernels' launchers on the fake's streams: what the tables of host memory do, when
 * the stream's turn comes. See fake.h.
 *
 * Left out, and never launched here: the lm_head's rows, whose products need cuBLASLt. Kernels that
 * wait for peers are in peer.c.
 */
#include "fake.h"

#include "combine.h"
#include "kernels.h"
#include "load.h"
#include "progress.h"

#include "comm/reduce.h"
#include "core/box.h"
#include "core/device.h"
#include "loss/call.h"
#include "loss/sequence-args.h"
#include "loss/mean.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- boxes ---- */

struct boxes {
    void (*fn)(const struct boxes *b);
    int64_t n, last;
    size_t elem;
    colo_dtype_t dtype;
    const colo_dtype_t *from; /* of a mixed sum, [n] */
    colo_box_t box[]; /* [n] destinations, [n] sources; of a sum the destination and n sources */
};

static void boxes_run(void *arg)
{
    const struct boxes *b = arg;
    b->fn(b);
}

static cudaError_t boxes(const struct boxes *like, const colo_box_t *dst, int64_t ndst,
                         const colo_box_t *src, cudaStream_t stream)
{
    const size_t head = sizeof *like + (size_t)(ndst + like->n) * sizeof *dst;
    const size_t types = like->from ? (size_t)like->n * sizeof *like->from : 0,
                 bytes = head + types;
    struct boxes *b = malloc(bytes);
    *b = *like;
    memcpy(b->box, dst, (size_t)ndst * sizeof *dst);
    memcpy(b->box + ndst, src, (size_t)like->n * sizeof *src);
    if (types)
        memcpy((char *)b + head, like->from, types);
    const cudaError_t e = fake_enqueue(stream, boxes_run, NULL, b, bytes);
    free(b);
    return e;
}

static void copy_boxes(const struct boxes *b)
{
    (void)colo_device_host.box_list(b->box, b->box + b->n, b->n, b->elem, NULL);
}

static void shift_boxes(const struct boxes *b)
{
    (void)colo_device_host.box_shift(b->box, b->box + b->n, b->n, b->last, NULL);
}

static void sum_boxes(const struct boxes *b)
{
    (void)colo_device_host.box_sum(b->box, b->box + 1, (int32_t)b->n, b->dtype, NULL);
}

static void sum_mixed(const struct boxes *b)
{
    const colo_mixed_sum_t s = {.to = b->box[0],
                                .from = b->box + 1,
                                .from_dtype = (const colo_dtype_t *)(b->box + 1 + b->n),
                                .dtype = b->dtype,
                                .n = (int32_t)b->n};
    (void)colo_device_host.box_sums(&s, 1, NULL);
}

cudaError_t colo_k_boxes_copy(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, int32_t blocks, cudaStream_t stream)
{
    if (n == 0)
        return cudaSuccess;
    FAKE_ENTER();
    return boxes(&(struct boxes){.fn = copy_boxes, .n = n, .elem = elem_size}, dst, n, src, stream);
}

cudaError_t colo_k_boxes_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, cudaStream_t stream)
{
    if (n == 0)
        return cudaSuccess;
    FAKE_ENTER();
    return boxes(&(struct boxes){.fn = shift_boxes, .n = n, .last = last}, dst, n, src, stream);
}

cudaError_t colo_k_box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                           colo_dtype_t dtype, cudaStream_t stream)
{
    FAKE_ENTER();
    return boxes(&(struct boxes){.fn = sum_boxes, .n = n, .dtype = dtype}, dst, 1, src, stream);
}

cudaError_t colo_k_box_sums(const colo_mixed_sum_t *sums, int32_t n, cudaStream_t stream)
{
    cudaError_t e = cudaSuccess;
    for (int32_t i = 0; i < n && e == cudaSuccess; i++) {
        FAKE_ENTER();
        e = boxes(&(struct boxes){.fn = sum_mixed,
                                  .n = sums[i].n,
                                  .dtype = sums[i].dtype,
                                  .from = sums[i].from_dtype},
                  &sums[i].to, 1, sums[i].from, stream);
    }
    return e;
}

struct half {
    void *to;
    const float *wide;
    const void *half;
    int64_t n;
    colo_dtype_t to_dtype, dtype;
};

static void half_run(void *arg)
{
    const struct half *h = arg;
    (void)colo_device_host.half_sum(h->to, h->to_dtype, h->wide, h->half, h->dtype, h->n, NULL);
}

cudaError_t colo_k_half_sum(void *to, bool to_f32, const float *wide, const void *half,
                            colo_dtype_t dtype, int64_t n, cudaStream_t stream)
{
    const struct half h = {to, wide, half, n, to_f32 ? COLO_F32 : dtype, dtype};
    FAKE_ENTER();
    return fake_enqueue(stream, half_run, NULL, &h, sizeof h);
}

/* ---- looking at memory ---- */

struct look {
    colo_box_t box;
    size_t elem;
    colo_dtype_t dtype;
    unsigned long long *answer;
};

static void hash_run(void *arg)
{
    const struct look *l = arg;
    uint64_t hash = 0;
    (void)colo_device_host.box_hash(&l->box, l->elem, &hash, NULL);
    *l->answer += hash;
}

cudaError_t colo_k_box_hash(const colo_box_t *box, size_t elem_size, unsigned long long *sum,
                            cudaStream_t stream)
{
    const struct look l = {*box, elem_size, COLO_U8, sum};
    FAKE_ENTER();
    return fake_enqueue(stream, hash_run, NULL, &l, sizeof l);
}

static void nonzero_run(void *arg)
{
    const struct look *l = arg;
    int64_t first = -1;
    (void)colo_device_host.box_nonzero(&l->box, l->dtype, &first, NULL);
    if ((unsigned long long)first < *l->answer)
        *l->answer = (unsigned long long)first;
}

cudaError_t colo_k_box_nonzero(const colo_box_t *box, size_t elem_size, bool is_float,
                               unsigned long long *first, cudaStream_t stream)
{
    static const colo_dtype_t floats[] = {[2] = COLO_F16, [4] = COLO_F32, [8] = COLO_F64};
    static const colo_dtype_t others[] = {
        [1] = COLO_U8, [2] = COLO_I16, [4] = COLO_I32, [8] = COLO_I64};
    const struct look l = {*box, elem_size, (is_float ? floats : others)[elem_size], first};
    FAKE_ENTER();
    return fake_enqueue(stream, nonzero_run, NULL, &l, sizeof l);
}

struct masked {
    const void *values;
    const uint8_t *mask;
    int64_t count, *den;
    double *num;
    colo_dtype_t dtype;
};

static void masked_run(void *arg)
{
    const struct masked *m = arg;
    (void)colo_device_host.masked_sum(m->values, m->dtype, m->mask, m->count, m->num, m->den, NULL);
}

cudaError_t colo_k_masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                              int64_t count, double *num, int64_t *den, cudaStream_t stream)
{
    const struct masked m = {values, mask, count, den, num, dtype};
    FAKE_ENTER();
    return fake_enqueue(stream, masked_run, NULL, &m, sizeof m);
}

/* ---- losses: the arguments are copied, what they point to is device memory ---- */

#define RUN(launcher, type, entry)                                                \
    static void colo_k_##launcher##_run(void *arg)                                \
    {                                                                             \
        (void)colo_loss_host.entry(arg, NULL);                                    \
    }                                                                             \
    cudaError_t colo_k_##launcher(const struct type *p, cudaStream_t stream)      \
    {                                                                             \
        FAKE_ENTER();                                                             \
        return fake_enqueue(stream, colo_k_##launcher##_run, NULL, p, sizeof *p); \
    }
#define KERNEL(name, type) RUN(name, type, name)
COLO_LOSS_KERNELS(KERNEL)
RUN(topk_given, colo_topk_args, topk_local)
RUN(topk_largest, colo_topk_args, topk_local)

/* ---- between ranks ---- */

struct combine {
    void *dst;
    const char *parts;
    const void *mine;
    int64_t stride, count;
    int32_t own, ranks;
    colo_dtype_t dtype;
    colo_redop_t op;
};

static void combine_run(void *arg)
{
    const struct combine *c = arg;
    const void **src = malloc((size_t)c->ranks * sizeof *src);
    for (int32_t r = 0; r < c->ranks; r++)
        src[r] = r == c->own ? c->mine : c->parts + r * c->stride;
    colo_reduce_host(c->dst, src, c->ranks, 0, c->count, c->dtype, c->op);
    free(src);
}

cudaError_t colo_k_combine(void *dst, const void *parts, int64_t stride, const void *mine,
                           int32_t own, int32_t ranks, int64_t count, colo_dtype_t dtype,
                           colo_redop_t op, cudaStream_t stream)
{
    const struct combine c = {dst, parts, mine, stride, count, own, ranks, dtype, op};
    FAKE_ENTER();
    return fake_enqueue(stream, combine_run, NULL, &c, sizeof c);
}

struct progress {
    int64_t *words, *count, *about, what[4];
    int32_t nwords;
    int device;
};

/* Counts of this device until one is held, if > 0; is one held; is it to be written now? */
static _Atomic int held_device, until_held;
static _Atomic bool is_held, is_released;

void fake_hold_count(int device, int k)
{
    is_held = is_released = false;
    held_device = device;
    until_held = k;
}

bool fake_holds_count(void)
{
    return is_held;
}

void fake_release_count(void)
{
    is_released = true;
}

static void progress_run(void *arg)
{
    const struct progress *p = arg;
    for (int i = 0; p->about && i < 4; i++)
        __atomic_store_n(&p->about[i], p->what[i], __ATOMIC_RELAXED);
    const int64_t n = __atomic_add_fetch(p->count, 1, __ATOMIC_RELAXED);
    if (until_held > 0 && p->device == held_device && atomic_fetch_sub(&until_held, 1) == 1)
        for (is_held = true; !is_released;)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    __atomic_store_n(&p->words[n % p->nwords], n, __ATOMIC_RELEASE);
}

cudaError_t colo_k_progress(int64_t *words, int32_t nwords, int64_t *count, int64_t *about,
                            const int64_t *what, cudaStream_t stream)
{
    struct progress p = {
        .words = words, .nwords = nwords, .count = count, .about = about, .device = fake_device()};
    if (about)
        memcpy(p.what, what, sizeof p.what);
    FAKE_ENTER();
    return fake_enqueue(stream, progress_run, NULL, &p, sizeof p);
}

cudaError_t colo_k_load(void)
{
    FAKE_ENTER();
    return cudaSuccess;
}

/* ---- left out ---- */

#define NONE(name, type)                                                 \
    cudaError_t colo_k_##name(const struct type *p, cudaStream_t stream) \
    {                                                                    \
        fake_misused(__func__);                                          \
        return cudaErrorNotSupported;                                    \
    }
COLO_LOSS_ROWS(NONE)
