/* SPDX-License-Identifier: Apache-2.0 */
/*
 * partition.c - the shard of embeddings, labels and masks that a rank's part of the model reads.
 *
 * The cut is the same as a layout's, from the same functions (index.h): zigzag over cp, in packed
 * batches within each padded segment, then a block over tp of what is left. A rank's shard is a few
 * runs of neighbours (two, or two a segment), so elements move as boxes, never one by one; the
 * boxes themselves are moved by core/ops.h. Unshard is the adjoint of shard: zeros, then the same
 * boxes the other way.
 *
 * No communication: every rank holds the global tensor, which is what data loaders give. Host
 * memory only; a device tensor is refused with COLO_ERR_UNBUILT.
 */
#include <colobridge/partition.h>

#include "bridge/index.h"
#include "core/ops.h"
#include "core/try.h"

#include <string.h>

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
        return colo_fail(COLO_ERR_ARG, "partition: NULL");
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
                         "partition: %lld positions do not divide by 2 * cp = %llu",
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

/* ---- moving ---- */

static colo_status_t check_host(const colo_tensor_t *t, const char *what)
{
    COLO_TRY(colo_tensor_check(t, what));
    if (t->mem != COLO_HOST)
        return colo_fail(COLO_ERR_UNBUILT, "partition: %s is on device %d, expected host memory",
                         what, (int)t->device);
    return COLO_OK;
}

/* Two elements in one place would leave the result to the order of writes. */
static colo_status_t check_written(const colo_tensor_t *t, const char *what)
{
    for (int32_t a = 0; a < t->ndim; a++)
        if (t->shape[a] > 1 && t->stride[a] == 0)
            return colo_fail(COLO_ERR_SHAPE, "partition: %s is written, but axis %d has stride 0",
                             what, (int)a);
    return COLO_OK;
}

static colo_status_t check_pair(const colo_partition_t *p, const colo_tensor_t *global,
                                const colo_tensor_t *local, int32_t axis)
{
    COLO_TRY(colo_partition_check(p));
    COLO_TRY(check_host(global, "global"));
    COLO_TRY(check_host(local, "local"));
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

/* dst = src for views of equal shape: a box of the last three axes for each index of the others. */
static colo_status_t copy_view(const colo_tensor_t *dst, const colo_tensor_t *src)
{
    int32_t inner = dst->ndim < 3 ? dst->ndim : 3, outer = dst->ndim - inner;
    int64_t at[COLO_MAX_NDIM] = {0};
    size_t elem = colo_dtype_size(dst->dtype);
    colo_box_t d = {.extent = {1, 1, 1}}, s;
    for (int32_t a = 0; a < dst->ndim; a++)
        if (dst->shape[a] == 0)
            return COLO_OK;
    s = d;
    for (int32_t k = 0; k < inner; k++) {
        d.extent[3 - inner + k] = s.extent[3 - inner + k] = dst->shape[outer + k];
        d.stride[3 - inner + k] = dst->stride[outer + k];
        s.stride[3 - inner + k] = src->stride[outer + k];
    }
    for (;;) {
        int64_t to = 0, from = 0;
        int32_t a;
        for (a = 0; a < outer; a++) {
            to += at[a] * dst->stride[a];
            from += at[a] * src->stride[a];
        }
        d.data = (char *)dst->data + to * (int64_t)elem;
        s.data = (char *)src->data + from * (int64_t)elem;
        COLO_TRY(colo_ops_host.box_copy(&d, &s, elem, NULL));
        for (a = outer - 1; a >= 0 && ++at[a] == dst->shape[a]; a--)
            at[a] = 0;
        if (a < 0)
            return COLO_OK;
    }
}

/* Run by run; @gather: local = global, else global = local. */
static colo_status_t move_runs(const colo_partition_t *p, const colo_tensor_t *global,
                               const colo_tensor_t *local, int32_t axis, bool gather)
{
    int64_t count = colo_partition_count(p), first = count * p->tp_rank, run;
    for (int64_t i = 0; i < count; i += run) {
        int64_t from = locate(p, first + i, &run);
        if (run > count - i)
            run = count - i;
        colo_tensor_t g = colo_tensor_narrow(*global, axis, from, run);
        colo_tensor_t l = colo_tensor_narrow(*local, axis, i, run);
        COLO_TRY(gather ? copy_view(&l, &g) : copy_view(&g, &l));
    }
    return COLO_OK;
}

colo_status_t colo_partition_shard(const colo_partition_t *part, const colo_tensor_t *global,
                                   int32_t axis, const colo_tensor_t *local)
{
    COLO_TRY(check_pair(part, global, local, axis));
    COLO_TRY(check_written(local, "local"));
    return move_runs(part, global, local, axis, true);
}

colo_status_t colo_partition_unshard(const colo_partition_t *part, const colo_tensor_t *local,
                                     int32_t axis, const colo_tensor_t *global)
{
    COLO_TRY(check_pair(part, global, local, axis));
    COLO_TRY(check_written(global, "global"));
    int64_t zero = 0; /* the zero of every dtype is all bits zero; strides 0 repeat it */
    colo_tensor_t zeros = *global;
    zeros.data = &zero;
    memset(zeros.stride, 0, sizeof zeros.stride);
    COLO_TRY(copy_view(global, &zeros));
    return move_runs(part, global, local, axis, false);
}

/* ---- targets ---- */

static colo_status_t check_tokens(const colo_partition_t *p, const colo_tensor_t *t,
                                  const char *what)
{
    COLO_TRY(check_host(t, what));
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

/* One sequence; ascending, so that @to may be @from. */
static void roll(const colo_partition_t *p, const int64_t *from, int64_t from_step, int64_t *to,
                 int64_t to_step, int64_t last)
{
    int64_t segments = p->segments ? p->segments : 1;
    for (int64_t j = 0; j < segments; j++) {
        int64_t lo = p->segments ? p->cu_padded[j] : 0;
        int64_t hi = p->segments ? p->cu_padded[j + 1] : p->positions;
        for (int64_t i = lo; i + 1 < hi; i++)
            to[i * to_step] = from[(i + 1) * from_step];
        if (lo < hi)
            to[(hi - 1) * to_step] = last;
    }
}

colo_status_t colo_partition_next_token(const colo_partition_t *part, const colo_tensor_t *tokens,
                                        int64_t last, const colo_tensor_t *targets)
{
    COLO_TRY(colo_partition_check(part));
    COLO_TRY(check_tokens(part, tokens, "tokens"));
    COLO_TRY(check_tokens(part, targets, "targets"));
    COLO_TRY(check_written(targets, "targets"));
    if (tokens->ndim != targets->ndim)
        return colo_fail(COLO_ERR_SHAPE, "partition: tokens has %d axes, targets has %d",
                         (int)tokens->ndim, (int)targets->ndim);
    int32_t outer = tokens->ndim - 1;
    for (int32_t a = 0; a < outer; a++)
        if (tokens->shape[a] != targets->shape[a])
            return colo_fail(COLO_ERR_SHAPE,
                             "partition: targets axis %d has extent %lld, expected %lld", (int)a,
                             (long long)targets->shape[a], (long long)tokens->shape[a]);
    if (colo_tensor_count(tokens) == 0)
        return COLO_OK;
    int64_t at[COLO_MAX_NDIM] = {0};
    for (;;) {
        const int64_t *from = tokens->data;
        int64_t *to = targets->data;
        int32_t a;
        for (a = 0; a < outer; a++) {
            from += at[a] * tokens->stride[a];
            to += at[a] * targets->stride[a];
        }
        roll(part, from, tokens->stride[outer], to, targets->stride[outer], last);
        for (a = outer - 1; a >= 0 && ++at[a] == tokens->shape[a]; a--)
            at[a] = 0;
        if (a < 0)
            return COLO_OK;
    }
}

/* ---- padding ---- */

colo_status_t colo_partition_padded(int64_t length, int64_t tp, int64_t cp, bool fp8,
                                    int64_t *padded)
{
    int64_t unit, other = 1, result;
    if (!padded)
        return colo_fail(COLO_ERR_ARG, "padded: the output is NULL");
    if (length < 0)
        return colo_fail(COLO_ERR_ARG, "padded: length %lld is negative", (long long)length);
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
