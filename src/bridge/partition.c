/* SPDX-License-Identifier: Apache-2.0 */
/*
 * partition.c - the shard of embeddings, labels and masks that a rank's part of the model reads.
 *
 * The cut is the same as a layout's, from the same functions (index.h): zigzag over cp, in packed
 * batches within each padded segment, then a block over tp of what is left. A rank's shard is a few
 * runs of neighbours (two, or two a segment), so elements move as boxes, never one by one; the
 * boxes themselves are moved by core/device.h, in lists: on a GPU, a launch for some 128 segments.
 * Unshard is the adjoint of shard: the same boxes in the other direction, zeros in between.
 *
 * No communication: every rank holds the global tensor, which is what data loaders give. Nothing is
 * allocated and nothing waits, so calls on a GPU can be captured in a graph.
 */
#include <colobridge/partition.h>

#include "bridge/layout/index.h"
#include "core/device.h"
#include "core/overlap.h"
#include "core/error.h"

/* ---- checks ---- */

static colo_status_t check_segments(const colo_partition_t *p)
{
    const int64_t *cu = p->cu_padded;
    if (!cu)
        return colo_fail(COLO_ERR_ARG, "partition: cu_padded is NULL for %lld segments",
                         (long long)p->segments);
    if (cu[0] != 0)
        return colo_fail(COLO_ERR_LAYOUT, "partition: cu_padded[0] is %lld, expected 0",
                         (long long)cu[0]);
    for (int64_t j = 0; j < p->segments; j++) {
        if (cu[j + 1] < cu[j])
            return colo_fail(COLO_ERR_LAYOUT,
                             "partition: cu_padded is not ascending at segment %lld: from %lld to "
                             "%lld",
                             (long long)j, (long long)cu[j], (long long)cu[j + 1]);
        /* unsigned: 2 * cp always fits */
        if (p->cp > 1 && (uint64_t)(cu[j + 1] - cu[j]) % (2 * (uint64_t)p->cp) != 0)
            return colo_fail(COLO_ERR_LAYOUT,
                             "partition: segment %lld has padded length %lld, which does not "
                             "divide by 2 * cp = %llu",
                             (long long)j, (long long)(cu[j + 1] - cu[j]),
                             2 * (unsigned long long)p->cp);
    }
    if (cu[p->segments] != p->positions)
        return colo_fail(COLO_ERR_LAYOUT,
                         "partition: cu_padded ends at %lld, expected %lld positions",
                         (long long)cu[p->segments], (long long)p->positions);
    return COLO_OK;
}

static colo_status_t check_part(const char *what, int64_t size, int64_t rank)
{
    if (size < 1)
        return colo_fail(COLO_ERR_ARG, "partition: %s is %lld, expected at least 1", what,
                         (long long)size);
    if (rank < 0 || rank >= size)
        return colo_fail(COLO_ERR_ARG, "partition: %s rank %lld is outside [0, %lld)", what,
                         (long long)rank, (long long)size);
    return COLO_OK;
}

colo_status_t colo_partition_check(const colo_partition_t *part)
{
    if (!part)
        return colo_fail(COLO_ERR_ARG, "partition: part is NULL");
    COLO_TRY(check_part("cp", part->cp, part->cp_rank));
    COLO_TRY(check_part("tp", part->tp, part->tp_rank));
    if (part->positions < 0 || part->segments < 0)
        return colo_fail(COLO_ERR_ARG,
                         "partition: %lld positions in %lld segments, expected 0 or more",
                         (long long)part->positions, (long long)part->segments);
    if (part->segments > 0)
        COLO_TRY(check_segments(part));
    else if (part->cp > 1 && (uint64_t)part->positions % (2 * (uint64_t)part->cp) != 0)
        return colo_fail(COLO_ERR_LAYOUT,
                         "partition: %lld positions do not divide by 2 * cp = %llu; pad them to "
                         "what colo_partition_padded() returns",
                         (long long)part->positions, 2 * (unsigned long long)part->cp);
    if (part->positions / part->cp % part->tp != 0)
        return colo_fail(COLO_ERR_LAYOUT,
                         "partition: %lld positions of a cp rank do not divide by tp = %lld",
                         (long long)(part->positions / part->cp), (long long)part->tp);
    return COLO_OK;
}

/* ---- the closed form ---- */

int64_t colo_partition_count(const colo_partition_t *part)
{
    return part && part->cp > 0 && part->tp > 0 ? part->positions / part->cp / part->tp : 0;
}

/* The segment that holds index @i of a cp rank's shard: the last that begins at or before it, which
 * passes over empty ones. Segment j begins at cu[j] / cp there. */
static int64_t segment_of(const colo_partition_t *p, int64_t i)
{
    int64_t lo = 0, hi = p->segments - 1;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo + 1) / 2;
        if (p->cu_padded[mid] / p->cp <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* Global position of index @i of the cp rank's shard; *run: how many follow it as neighbours. */
static int64_t locate(const colo_partition_t *p, int64_t i, int64_t *run)
{
    int64_t begin = 0, length = p->positions;
    if (p->cp == 1) {
        *run = length - i;
        return i;
    }
    if (p->segments > 0) {
        int64_t j = segment_of(p, i);
        begin = p->cu_padded[j];
        length = p->cu_padded[j + 1] - begin;
        i -= begin / p->cp;
    }
    int64_t q = length / p->cp / 2;
    *run = i < q ? q - i : 2 * q - i;
    return begin + colo_zigzag_index(q, p->cp, p->cp_rank, i);
}

int64_t colo_partition_index(const colo_partition_t *part, int64_t i)
{
    int64_t run;
    if (i < 0 || i >= colo_partition_count(part))
        return -1;
    return locate(part, colo_partition_count(part) * part->tp_rank + i, &run);
}

/* ---- what may be moved ---- */

/* Two elements in one place would leave the result to the order of writes. */
static colo_status_t check_written(const colo_tensor_t *t, const char *what)
{
    for (int32_t a = 0; a < t->ndim; a++)
        if (t->shape[a] > 1 && t->stride[a] == 0)
            return colo_fail(COLO_ERR_SHAPE, "partition: %s is written, but axis %d has stride 0",
                             what, (int)a);
    if (colo_tensor_overlaps(t))
        return colo_fail(COLO_ERR_SHAPE,
                         "partition: %s is written, but by its strides elements share an address, "
                         "expected a view without overlap",
                         what);
    return COLO_OK;
}

/* Both in one memory, which this build, the current device and the stream can reach. */
static colo_status_t check_places(const colo_tensor_t *a, const char *a_name,
                                  const colo_tensor_t *b, const char *b_name, colo_stream_t stream,
                                  const colo_ops_t **ops)
{
    colo_queries_t q = {0};
    bool capturing;
    if (a->mem != b->mem || (a->mem == COLO_CUDA && a->device != b->device))
        return colo_fail(COLO_ERR_ARG,
                         "partition: %s: memory kind %d on device %d, %s is kind %d on device %d",
                         b_name, (int)b->mem, (int)b->device, a_name, (int)a->mem, (int)a->device);
    colo_status_t st = colo_ops_for(a->mem, ops);
    if (st == COLO_OK)
        st = (*ops)->stream_check(&q, stream, &capturing);
    if (st == COLO_OK && colo_tensor_count(a) > 0)
        st = (*ops)->pointer_check(&q, a->data, a->device, a_name);
    if (st == COLO_OK && colo_tensor_count(b) > 0)
        st = (*ops)->pointer_check(&q, b->data, b->device, b_name);
    return st < 0 ? colo_fail_prefix(st, "partition") : COLO_OK;
}

/* Two views of one memory. */
static colo_status_t check_apart(const colo_tensor_t *a, const char *a_name, const colo_tensor_t *b,
                                 const char *b_name)
{
    if (colo_tensors_apart(a, b))
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG, "partition: %s and %s overlap in memory", a_name, b_name);
}

static bool is_same_view(const colo_tensor_t *a, const colo_tensor_t *b)
{
    bool same = a->data == b->data;
    for (int32_t i = 0; i < a->ndim; i++)
        same = same && (a->shape[i] == 1 || a->stride[i] == b->stride[i]);
    return same;
}

static colo_status_t check_pair(const colo_partition_t *p, const colo_tensor_t *global,
                                const colo_tensor_t *local, int32_t axis)
{
    COLO_TRY(colo_partition_check(p));
    COLO_TRY(colo_tensor_check(global, "global"));
    COLO_TRY(colo_tensor_check(local, "local"));
    if (global->dtype != local->dtype)
        return colo_fail(COLO_ERR_SHAPE, "partition: global is %s, local is %s",
                         colo_dtype_name(global->dtype), colo_dtype_name(local->dtype));
    if (global->ndim != local->ndim)
        return colo_fail(COLO_ERR_SHAPE, "partition: global has %d axes, local has %d",
                         (int)global->ndim, (int)local->ndim);
    if (axis < 0 || axis >= global->ndim)
        return colo_fail(COLO_ERR_ARG, "partition: axis %d is outside [0, %d)", (int)axis,
                         (int)global->ndim);
    if (global->shape[axis] != p->positions)
        return colo_fail(COLO_ERR_SHAPE,
                         "partition: global axis %d has %lld positions, expected %lld", (int)axis,
                         (long long)global->shape[axis], (long long)p->positions);
    for (int32_t a = 0; a < global->ndim; a++) {
        int64_t want = a == axis ? colo_partition_count(p) : global->shape[a];
        if (local->shape[a] != want)
            return colo_fail(COLO_ERR_SHAPE,
                             "partition: local axis %d has extent %lld, expected %lld", (int)a,
                             (long long)local->shape[a], (long long)want);
    }
    return COLO_OK;
}

/* ---- moving ---- */

/* Boxes on their way to the table of passes, which gets them in lists as long as one launch takes.
 */
typedef struct list {
    const colo_ops_t *ops;
    colo_stream_t stream;
    size_t elem;
    bool shifts; /* box_shift with @last; else box_list */
    int64_t last;
    int64_t n;
    colo_box_t dst[256], src[256];
} list_t;

/* @l has its table; it is large, so the rest is not set to zero. */
static void begin(list_t *l, size_t elem, colo_stream_t stream)
{
    l->stream = stream;
    l->elem = elem;
    l->shifts = false;
    l->n = 0;
}

static colo_status_t flush(list_t *l)
{
    int64_t n = l->n;
    l->n = 0;
    if (n == 0)
        return COLO_OK;
    return l->shifts ? l->ops->box_shift(l->dst, l->src, n, l->last, l->stream)
                     : l->ops->box_list(l->dst, l->src, n, l->elem, l->stream);
}

/* Does an axis of that stride lie right around one of @extent and @stride? Unsigned: the product of
 * a tensor's is below 2^64. */
static bool coalesces(int64_t around, int64_t extent, int64_t stride)
{
    return (uint64_t)around == (uint64_t)extent * (uint64_t)stride;
}

/* dst = src for views of equal shape; src NULL: zeros. Axes that lie back to back on both sides are
 * one, but for the last of a shift. What remains is a box of the last three axes for each index of
 * the others. */
static colo_status_t add(list_t *l, const colo_tensor_t *dst, const colo_tensor_t *src)
{
    int64_t extent[COLO_MAX_NDIM], to[COLO_MAX_NDIM], from[COLO_MAX_NDIM];
    int64_t index[COLO_MAX_NDIM] = {0};
    int32_t n = 0;
    for (int32_t a = 0; a < dst->ndim; a++) {
        int64_t e = dst->shape[a], t = dst->stride[a], f = src ? src->stride[a] : t;
        bool row = l->shifts && a == dst->ndim - 1;
        if (e == 0)
            return COLO_OK;
        if (e == 1 && !row)
            continue;
        if (n > 0 && !row && coalesces(to[n - 1], e, t) && coalesces(from[n - 1], e, f)) {
            extent[n - 1] *= e;
        } else {
            extent[n++] = e;
        }
        to[n - 1] = t;
        from[n - 1] = f;
    }
    int32_t outer = n > 3 ? n - 3 : 0;
    for (;;) {
        int64_t t = 0, f = 0;
        int32_t a;
        for (a = 0; a < outer; a++) {
            t += index[a] * to[a];
            f += index[a] * from[a];
        }
        if (l->n == (int64_t)(sizeof l->dst / sizeof *l->dst))
            COLO_TRY(flush(l));
        colo_box_t *d = &l->dst[l->n], *s = &l->src[l->n];
        *d = (colo_box_t){(char *)dst->data + t * (int64_t)l->elem, {1, 1, 1}, {0}};
        *s = (colo_box_t){src ? (char *)src->data + f * (int64_t)l->elem : NULL, {1, 1, 1}, {0}};
        for (int32_t k = outer; k < n; k++) { /* the last axis is the box's last */
            d->extent[3 - n + k] = s->extent[3 - n + k] = extent[k];
            d->stride[3 - n + k] = to[k];
            s->stride[3 - n + k] = from[k];
        }
        l->n++;
        for (a = outer - 1; a >= 0 && ++index[a] == extent[a]; a--)
            index[a] = 0;
        if (a < 0)
            return COLO_OK;
    }
}

/* Run by run; @gather: local = global, else global = local with zeros in between: a rank's
 * positions ascend, so no other code writes what lies between two runs. */
static colo_status_t move_runs(const colo_partition_t *p, const colo_tensor_t *global,
                               const colo_tensor_t *local, int32_t axis, bool gather, list_t *l)
{
    int64_t count = colo_partition_count(p), first = count * p->tp_rank, run, done = 0;
    for (int64_t i = 0; i < count; i += run) {
        int64_t from = locate(p, first + i, &run);
        if (run > count - i)
            run = count - i;
        colo_tensor_t here = colo_tensor_narrow(*global, axis, from, run);
        colo_tensor_t mine = colo_tensor_narrow(*local, axis, i, run);
        if (gather) {
            COLO_TRY(add(l, &mine, &here));
            continue;
        }
        colo_tensor_t between = colo_tensor_narrow(*global, axis, done, from - done);
        COLO_TRY(add(l, &between, NULL));
        COLO_TRY(add(l, &here, &mine));
        done = from + run;
    }
    if (!gather) {
        colo_tensor_t rest = colo_tensor_narrow(*global, axis, done, p->positions - done);
        COLO_TRY(add(l, &rest, NULL));
    }
    return flush(l);
}

static colo_status_t move(const colo_partition_t *part, const colo_tensor_t *global,
                          const colo_tensor_t *local, int32_t axis, bool shard,
                          colo_stream_t stream)
{
    list_t l;
    COLO_TRY(check_pair(part, global, local, axis));
    COLO_TRY(shard ? check_written(local, "local") : check_written(global, "global"));
    COLO_TRY(check_apart(global, "global", local, "local"));
    COLO_TRY(check_places(global, "global", local, "local", stream, &l.ops));
    begin(&l, colo_dtype_size(global->dtype), stream);
    return move_runs(part, global, local, axis, shard, &l);
}

colo_status_t colo_partition_shard(const colo_partition_t *part, const colo_tensor_t *global,
                                   int32_t axis, const colo_tensor_t *local, colo_stream_t stream)
{
    return move(part, global, local, axis, true, stream);
}

colo_status_t colo_partition_unshard(const colo_partition_t *part, const colo_tensor_t *local,
                                     int32_t axis, const colo_tensor_t *global,
                                     colo_stream_t stream)
{
    return move(part, global, local, axis, false, stream);
}

/* ---- targets ---- */

static colo_status_t check_tokens(const colo_partition_t *p, const colo_tensor_t *t,
                                  const char *what)
{
    COLO_TRY(colo_tensor_check(t, what));
    if (t->dtype != COLO_I64)
        return colo_fail(COLO_ERR_SHAPE, "partition: %s is %s, expected i64", what,
                         colo_dtype_name(t->dtype));
    if (t->ndim < 1)
        return colo_fail(COLO_ERR_SHAPE, "partition: %s has no axis, expected [..., %lld]", what,
                         (long long)p->positions);
    if (t->shape[t->ndim - 1] != p->positions)
        return colo_fail(COLO_ERR_SHAPE, "partition: %s has %lld positions, expected %lld", what,
                         (long long)t->shape[t->ndim - 1], (long long)p->positions);
    return COLO_OK;
}

colo_status_t colo_partition_next_token(const colo_partition_t *part, const colo_tensor_t *tokens,
                                        int64_t last, const colo_tensor_t *targets,
                                        colo_stream_t stream)
{
    list_t l;
    COLO_TRY(colo_partition_check(part));
    COLO_TRY(check_tokens(part, tokens, "tokens"));
    COLO_TRY(check_tokens(part, targets, "targets"));
    COLO_TRY(check_written(targets, "targets"));
    if (tokens->ndim != targets->ndim)
        return colo_fail(COLO_ERR_SHAPE, "partition: tokens has %d axes, targets has %d",
                         (int)tokens->ndim, (int)targets->ndim);
    int32_t axis = tokens->ndim - 1;
    for (int32_t a = 0; a < axis; a++)
        if (tokens->shape[a] != targets->shape[a])
            return colo_fail(COLO_ERR_SHAPE,
                             "partition: targets axis %d has extent %lld, expected %lld", (int)a,
                             (long long)targets->shape[a], (long long)tokens->shape[a]);
    if (!is_same_view(tokens, targets)) /* in place each position is read before it is written */
        COLO_TRY(check_apart(tokens, "tokens", targets, "targets"));
    COLO_TRY(check_places(tokens, "tokens", targets, "targets", stream, &l.ops));
    begin(&l, sizeof(int64_t), stream);
    l.shifts = true;
    l.last = last;
    int64_t segments = part->segments ? part->segments : 1;
    for (int64_t j = 0; j < segments; j++) {
        int64_t lo = part->segments ? part->cu_padded[j] : 0;
        int64_t hi = part->segments ? part->cu_padded[j + 1] : part->positions;
        colo_tensor_t from = colo_tensor_narrow(*tokens, axis, lo, hi - lo);
        colo_tensor_t to = colo_tensor_narrow(*targets, axis, lo, hi - lo);
        COLO_TRY(add(&l, &to, &from));
    }
    return flush(&l);
}

/* ---- padding ---- */

colo_status_t colo_partition_padded(int64_t length, int64_t tp, int64_t cp, bool fp8,
                                    int64_t *padded)
{
    int64_t unit, other = 1, result;
    if (!padded)
        return colo_fail(COLO_ERR_ARG, "padded: the output is NULL");
    if (length < 0)
        return colo_fail(COLO_ERR_ARG, "padded: length %lld is negative, expected >= 0",
                         (long long)length);
    if (tp < 1 || cp < 1)
        return colo_fail(COLO_ERR_ARG, "padded: tp %lld and cp %lld, expected at least 1",
                         (long long)tp, (long long)cp);
    bool fits = cp == 1 || (colo_mul_ok(2, cp, &unit) && colo_mul_ok(tp, unit, &unit));
    if (cp == 1)
        unit = tp;
    fits = fits && (!fp8 || colo_mul_ok(16, cp, &other));
    fits = fits && colo_mul_ok(unit / colo_gcd(unit, other), other, &unit);
    fits = fits && colo_mul_ok(length / unit + (length % unit != 0), unit, &result);
    if (!fits)
        return colo_fail(COLO_ERR_ARG,
                         "padded: length %lld for tp %lld, cp %lld%s overflows 63 bits",
                         (long long)length, (long long)tp, (long long)cp, fp8 ? ", fp8" : "");
    *padded = result;
    return COLO_OK;
}
