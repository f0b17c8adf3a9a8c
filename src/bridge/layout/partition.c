/* SPDX-License-Identifier: Apache-2.0 */
/*
 * partition.c - the shard of embeddings, labels and masks that a rank's part of the model reads.
 *
 * The cut is the same as a layout's, from the same functions (index.h): zigzag over cp, in packed
 * batches within each padded segment, or one interval of all positions; then a block over tp of
 * what is left. A rank's shard is a few runs of neighbours (two, or two a segment), so elements
 * move as boxes, never one by one; the boxes themselves are moved by core/device.h, in lists: on a
 * GPU, a launch for some 128 segments. Unshard is the adjoint of shard: the same boxes in the other
 * direction, zeros in between.
 *
 * No communication: every rank holds the global tensor, which is what data loaders give. Nothing is
 * allocated and nothing waits, so calls on a GPU can be captured in a graph.
 */
#include <colobridge/partition.h>

#include "bridge/layout/index.h"
#include "core/device.h"
#include "core/overlap.h"
#include "core/error.h"
#include "core/list.h"
#include "core/sized.h"

/* ---- checks ---- */

static colo_status_t check_segments(const colo_partition_t *partition)
{
    const int64_t *cu = partition->cu_padded;
    COLO_FAIL_IF(!cu, COLO_ERR_ARG, "partition: cu_padded is NULL for %lld segments",
                 (long long)partition->segments);
    COLO_FAIL_IF(cu[0] != 0, COLO_ERR_LAYOUT, "partition: cu_padded[0] is %lld, expected 0",
                 (long long)cu[0]);
    for (int64_t j = 0; j < partition->segments; j++) {
        COLO_FAIL_IF(cu[j + 1] < cu[j], COLO_ERR_LAYOUT,
                     "partition: cu_padded is not ascending at segment %lld: from %lld to "
                     "%lld",
                     (long long)j, (long long)cu[j], (long long)cu[j + 1]);
        /* unsigned: 2 * cp always fits */
        COLO_FAIL_IF(partition->cp > 1 && !partition->contiguous &&
                         (uint64_t)(cu[j + 1] - cu[j]) % (2 * (uint64_t)partition->cp) != 0,
                     COLO_ERR_LAYOUT,
                     "partition: segment %lld has padded length %lld, which does not "
                     "divide by 2 * cp = %llu",
                     (long long)j, (long long)(cu[j + 1] - cu[j]),
                     2 * (unsigned long long)partition->cp);
    }
    COLO_FAIL_IF(cu[partition->segments] != partition->positions, COLO_ERR_LAYOUT,
                 "partition: cu_padded ends at %lld, expected %lld positions",
                 (long long)cu[partition->segments], (long long)partition->positions);
    return COLO_OK;
}

static colo_status_t check_part(const char *what, int64_t size, int64_t rank)
{
    COLO_FAIL_IF(size < 1, COLO_ERR_ARG, "partition: %s is %lld, expected at least 1", what,
                 (long long)size);
    COLO_FAIL_IF(rank < 0 || rank >= size, COLO_ERR_ARG,
                 "partition: %s rank %lld is outside [0, %lld)", what, (long long)rank,
                 (long long)size);
    return COLO_OK;
}

/* *@part with all members that this library knows: itself, or @own; NULL: COLO_ERR_ARG. */
static const colo_partition_t *read_partition(const colo_partition_t *part, colo_partition_t *own)
{
    if (part && part->struct_size == sizeof *part)
        return part;
    *own = (colo_partition_t){COLO_PARTITION_INIT};
    return COLO_SIZED_READ(own, part, segments, "partition: part", "COLO_PARTITION_INIT") == COLO_OK
               ? own
               : NULL;
}

static colo_status_t check(const colo_partition_t *part)
{
    COLO_TRY(check_part("cp", part->cp, part->cp_rank));
    COLO_TRY(check_part("tp", part->tp, part->tp_rank));
    COLO_FAIL_IF(part->positions < 0 || part->segments < 0, COLO_ERR_ARG,
                 "partition: %lld positions in %lld segments, expected 0 or more",
                 (long long)part->positions, (long long)part->segments);
    COLO_FAIL_IF(part->contiguous && part->positions % part->cp, COLO_ERR_LAYOUT,
                 "partition: %lld positions do not divide by cp = %lld, of which each rank has one "
                 "interval; pad the last sequence",
                 (long long)part->positions, (long long)part->cp);
    if (part->segments > 0)
        COLO_TRY(check_segments(part));
    else if (part->cp > 1 && !part->contiguous &&
             (uint64_t)part->positions % (2 * (uint64_t)part->cp) != 0)
        return colo_fail(COLO_ERR_LAYOUT,
                         "partition: %lld positions do not divide by 2 * cp = %llu; pad them to "
                         "what colo_partition_padded() returns",
                         (long long)part->positions, 2 * (unsigned long long)part->cp);
    COLO_FAIL_IF(part->positions / part->cp % part->tp != 0, COLO_ERR_LAYOUT,
                 "partition: %lld positions of a cp rank do not divide by tp = %lld",
                 (long long)(part->positions / part->cp), (long long)part->tp);
    return COLO_OK;
}

colo_status_t colo_partition_check(const colo_partition_t *part)
{
    colo_partition_t own;
    part = read_partition(part, &own);
    return part ? check(part) : COLO_ERR_ARG;
}

/* ---- the closed form ---- */

static int64_t count_of(const colo_partition_t *part)
{
    return part->cp > 0 && part->tp > 0 ? part->positions / part->cp / part->tp : 0;
}

int64_t colo_partition_count(const colo_partition_t *part)
{
    colo_partition_t own;
    part = part ? read_partition(part, &own) : NULL;
    return part ? count_of(part) : 0;
}

/* Global position of index @i of the cp rank's shard; *run: how many follow it as neighbours. */
static int64_t locate(const colo_partition_t *partition, int64_t i, int64_t *run)
{
    int64_t begin = 0, length = partition->positions;
    if (partition->cp == 1) {
        *run = length - i;
        return i;
    }
    if (partition->contiguous) {
        *run = length / partition->cp - i;
        return partition->cp_rank * (length / partition->cp) + i;
    }
    if (partition->segments > 0) {
        /* the last that begins, at cu[j] / cp, at or before @i: empty ones do not count */
        const int64_t cp = partition->cp;
        const int64_t j =
            colo_last_begun(partition->cu_padded, 1, partition->segments, i * cp + cp - 1);
        begin = partition->cu_padded[j];
        length = partition->cu_padded[j + 1] - begin;
        i -= begin / partition->cp;
    }
    int64_t chunk = length / partition->cp / 2;
    *run = i < chunk ? chunk - i : 2 * chunk - i;
    return begin + colo_zigzag_index(chunk, partition->cp, partition->cp_rank, i);
}

int64_t colo_partition_index(const colo_partition_t *part, int64_t i)
{
    int64_t run;
    colo_partition_t own;
    part = part ? read_partition(part, &own) : NULL;
    if (!part || i < 0 || i >= count_of(part))
        return -1;
    return locate(part, count_of(part) * part->tp_rank + i, &run);
}

/* ---- what may be moved ---- */

/* Two elements in one place would leave the result to the order of writes. */
static colo_status_t check_written(const colo_tensor_t *tensor, const char *what)
{
    for (int32_t axis = 0; axis < tensor->ndim; axis++)
        COLO_FAIL_IF(tensor->shape[axis] > 1 && tensor->stride[axis] == 0, COLO_ERR_SHAPE,
                     "partition: %s is written, but axis %d has stride 0", what, (int)axis);
    COLO_FAIL_IF(colo_tensor_overlaps(tensor), COLO_ERR_SHAPE,
                 "partition: %s is written, but by its strides elements share an address, "
                 "expected a view without overlap",
                 what);
    return COLO_OK;
}

/* Both in one memory, which this build, the current device and the stream can reach. */
static colo_status_t check_places(const colo_tensor_t *tensor, const char *a_name,
                                  const colo_tensor_t *other, const char *b_name,
                                  colo_stream_t stream, const colo_device_t **device)
{
    colo_queries_t queries = {0};
    bool capturing;
    COLO_FAIL_IF(
        tensor->mem != other->mem ||
            (tensor->mem == COLO_MEM_CUDA && tensor->device != other->device),
        COLO_ERR_ARG, "partition: %s: memory kind %d on device %d, %s is kind %d on device %d",
        b_name, (int)other->mem, (int)other->device, a_name, (int)tensor->mem, (int)tensor->device);
    colo_status_t st = colo_device_for(tensor->mem, device);
    COLO_THEN(st, (*device)->stream_check(&queries, stream, &capturing));
    if (st == COLO_OK && colo_tensor_count(tensor) > 0)
        st = (*device)->pointer_check(&queries, tensor->data, tensor->device, a_name);
    if (st == COLO_OK && colo_tensor_count(other) > 0)
        st = (*device)->pointer_check(&queries, other->data, other->device, b_name);
    return st < 0 ? colo_fail_prefix(st, "partition") : COLO_OK;
}

/* Two views of one memory. */
static colo_status_t check_apart(const colo_tensor_t *tensor, const char *a_name,
                                 const colo_tensor_t *other, const char *b_name)
{
    if (colo_tensors_apart(tensor, other))
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG, "partition: %s and %s overlap in memory", a_name, b_name);
}

static bool is_same_view(const colo_tensor_t *tensor, const colo_tensor_t *other)
{
    bool same = tensor->data == other->data;
    for (int32_t i = 0; i < tensor->ndim; i++)
        same = same && (tensor->shape[i] == 1 || tensor->stride[i] == other->stride[i]);
    return same;
}

static colo_status_t check_pair(const colo_partition_t *partition, const colo_tensor_t *global,
                                const colo_tensor_t *local, int32_t axis)
{
    COLO_TRY(check(partition));
    COLO_TRY(colo_tensor_check(global, "global"));
    COLO_TRY(colo_tensor_check(local, "local"));
    COLO_FAIL_IF(global->dtype != local->dtype, COLO_ERR_SHAPE,
                 "partition: global is %s, local is %s", colo_dtype_name(global->dtype),
                 colo_dtype_name(local->dtype));
    COLO_FAIL_IF(global->ndim != local->ndim, COLO_ERR_SHAPE,
                 "partition: global has %d axes, local has %d", (int)global->ndim,
                 (int)local->ndim);
    COLO_FAIL_IF(axis < 0 || axis >= global->ndim, COLO_ERR_ARG,
                 "partition: axis %d is outside [0, %d)", (int)axis, (int)global->ndim);
    COLO_FAIL_IF(global->shape[axis] != partition->positions, COLO_ERR_SHAPE,
                 "partition: global axis %d has %lld positions, expected %lld", (int)axis,
                 (long long)global->shape[axis], (long long)partition->positions);
    for (int32_t i = 0; i < global->ndim; i++) {
        int64_t want = i == axis ? count_of(partition) : global->shape[i];
        COLO_FAIL_IF(local->shape[i] != want, COLO_ERR_SHAPE,
                     "partition: local axis %d has extent %lld, expected %lld", (int)i,
                     (long long)local->shape[i], (long long)want);
    }
    return COLO_OK;
}

/* ---- moving ---- */

/* Boxes on their way to the device's table, which gets them in lists as long as one launch takes.
 */
typedef struct list {
    const colo_device_t *device;
    colo_stream_t stream;
    size_t elem;
    bool shifts; /* box_shift with @last; else box_list */
    int64_t last;
    int64_t n;
    colo_box_t dst[256], src[256];
} list_t;

/* @list has its table; it is large, so the rest is not set to zero. */
static void begin(list_t *list, size_t elem, colo_stream_t stream)
{
    list->stream = stream;
    list->elem = elem;
    list->shifts = false;
    list->n = 0;
}

static colo_status_t flush(list_t *list)
{
    int64_t n = list->n;
    list->n = 0;
    if (n == 0)
        return COLO_OK;
    return list->shifts ? list->device->box_shift(list->dst, list->src, n, list->last, list->stream)
                        : list->device->box_list(list->dst, list->src, n, list->elem, list->stream);
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
static colo_status_t add(list_t *list, const colo_tensor_t *dst, const colo_tensor_t *src)
{
    int64_t extent[COLO_NDIM_MAX], to[COLO_NDIM_MAX], from[COLO_NDIM_MAX];
    int64_t index[COLO_NDIM_MAX] = {0};
    int32_t n = 0;
    for (int32_t axis = 0; axis < dst->ndim; axis++) {
        int64_t length = dst->shape[axis], step_to = dst->stride[axis],
                step_from = src ? src->stride[axis] : step_to;
        bool row = list->shifts && axis == dst->ndim - 1;
        if (length == 0)
            return COLO_OK;
        if (length == 1 && !row)
            continue;
        if (n > 0 && !row && coalesces(to[n - 1], length, step_to) &&
            coalesces(from[n - 1], length, step_from)) {
            extent[n - 1] *= length;
        } else {
            extent[n++] = length;
        }
        to[n - 1] = step_to;
        from[n - 1] = step_from;
    }
    int32_t outer = n > 3 ? n - 3 : 0;
    for (;;) {
        int64_t step_to = 0, step_from = 0;
        int32_t axis;
        for (axis = 0; axis < outer; axis++) {
            step_to += index[axis] * to[axis];
            step_from += index[axis] * from[axis];
        }
        if (list->n == (int64_t)(sizeof list->dst / sizeof *list->dst))
            COLO_TRY(flush(list));
        colo_box_t *into = &list->dst[list->n], *out_of = &list->src[list->n];
        *into = (colo_box_t){(char *)dst->data + step_to * (int64_t)list->elem, {1, 1, 1}, {0}};
        *out_of = (colo_box_t){
            src ? (char *)src->data + step_from * (int64_t)list->elem : NULL, {1, 1, 1}, {0}};
        for (int32_t k = outer; k < n; k++) { /* the last axis is the box's last */
            into->extent[3 - n + k] = out_of->extent[3 - n + k] = extent[k];
            into->stride[3 - n + k] = to[k];
            out_of->stride[3 - n + k] = from[k];
        }
        list->n++;
        for (axis = outer - 1; axis >= 0 && ++index[axis] == extent[axis]; axis--)
            index[axis] = 0;
        if (axis < 0)
            return COLO_OK;
    }
}

/* Run by run; @gather: local = global, else global = local with zeros in between: a rank's
 * positions ascend, so no other code writes what lies between two runs. */
static colo_status_t move_runs(const colo_partition_t *partition, const colo_tensor_t *global,
                               const colo_tensor_t *local, int32_t axis, bool gather, list_t *list)
{
    int64_t count = count_of(partition), first = count * partition->tp_rank, run, done = 0;
    for (int64_t i = 0; i < count; i += run) {
        int64_t from = locate(partition, first + i, &run);
        if (run > count - i)
            run = count - i;
        colo_tensor_t here = colo_tensor_narrow(*global, axis, from, run);
        colo_tensor_t mine = colo_tensor_narrow(*local, axis, i, run);
        if (gather) {
            COLO_TRY(add(list, &mine, &here));
            continue;
        }
        colo_tensor_t between = colo_tensor_narrow(*global, axis, done, from - done);
        COLO_TRY(add(list, &between, NULL));
        COLO_TRY(add(list, &here, &mine));
        done = from + run;
    }
    if (!gather) {
        colo_tensor_t rest = colo_tensor_narrow(*global, axis, done, partition->positions - done);
        COLO_TRY(add(list, &rest, NULL));
    }
    return flush(list);
}

static colo_status_t move(const colo_partition_t *part, const colo_tensor_t *global,
                          const colo_tensor_t *local, int32_t axis, bool shard,
                          colo_stream_t stream)
{
    list_t list;
    colo_partition_t own;
    part = read_partition(part, &own);
    if (!part)
        return COLO_ERR_ARG;
    COLO_TRY(check_pair(part, global, local, axis));
    COLO_TRY(shard ? check_written(local, "local") : check_written(global, "global"));
    COLO_TRY(check_apart(global, "global", local, "local"));
    COLO_TRY(check_places(global, "global", local, "local", stream, &list.device));
    begin(&list, colo_dtype_size(global->dtype), stream);
    return move_runs(part, global, local, axis, shard, &list);
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

static colo_status_t check_tokens(const colo_partition_t *partition, const colo_tensor_t *tensor,
                                  const char *what)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    COLO_FAIL_IF(tensor->dtype != COLO_I64, COLO_ERR_SHAPE, "partition: %s is %s, expected i64",
                 what, colo_dtype_name(tensor->dtype));
    COLO_FAIL_IF(tensor->ndim < 1, COLO_ERR_SHAPE,
                 "partition: %s has no axis, expected [..., %lld]", what,
                 (long long)partition->positions);
    COLO_FAIL_IF(tensor->shape[tensor->ndim - 1] != partition->positions, COLO_ERR_SHAPE,
                 "partition: %s has %lld positions, expected %lld", what,
                 (long long)tensor->shape[tensor->ndim - 1], (long long)partition->positions);
    return COLO_OK;
}

colo_status_t colo_partition_next_token(const colo_partition_t *part, const colo_tensor_t *tokens,
                                        int64_t last, const colo_tensor_t *targets,
                                        colo_stream_t stream)
{
    list_t list;
    colo_partition_t own;
    part = read_partition(part, &own);
    if (!part)
        return COLO_ERR_ARG;
    COLO_TRY(check(part));
    COLO_TRY(check_tokens(part, tokens, "tokens"));
    COLO_TRY(check_tokens(part, targets, "targets"));
    COLO_TRY(check_written(targets, "targets"));
    COLO_FAIL_IF(tokens->ndim != targets->ndim, COLO_ERR_SHAPE,
                 "partition: tokens has %d axes, targets has %d", (int)tokens->ndim,
                 (int)targets->ndim);
    int32_t axis = tokens->ndim - 1;
    for (int32_t i = 0; i < axis; i++)
        COLO_FAIL_IF(tokens->shape[i] != targets->shape[i], COLO_ERR_SHAPE,
                     "partition: targets axis %d has extent %lld, expected %lld", (int)i,
                     (long long)targets->shape[i], (long long)tokens->shape[i]);
    if (!is_same_view(tokens, targets)) /* in place each position is read before it is written */
        COLO_TRY(check_apart(tokens, "tokens", targets, "targets"));
    COLO_TRY(check_places(tokens, "tokens", targets, "targets", stream, &list.device));
    begin(&list, sizeof(int64_t), stream);
    list.shifts = true;
    list.last = last;
    int64_t segments = part->segments ? part->segments : 1;
    for (int64_t j = 0; j < segments; j++) {
        int64_t lo = part->segments ? part->cu_padded[j] : 0;
        int64_t hi = part->segments ? part->cu_padded[j + 1] : part->positions;
        colo_tensor_t from = colo_tensor_narrow(*tokens, axis, lo, hi - lo);
        colo_tensor_t to = colo_tensor_narrow(*targets, axis, lo, hi - lo);
        COLO_TRY(add(&list, &to, &from));
    }
    return flush(&list);
}

/* ---- padding ---- */

colo_status_t colo_partition_padded(int64_t length, int64_t tp, int64_t cp, bool fp8,
                                    int64_t *padded)
{
    int64_t unit, other = 1, result;
    COLO_FAIL_IF(!padded, COLO_ERR_ARG, "padded: the output is NULL");
    COLO_FAIL_IF(length < 0, COLO_ERR_ARG, "padded: length %lld is negative, expected >= 0",
                 (long long)length);
    COLO_FAIL_IF(tp < 1 || cp < 1, COLO_ERR_ARG, "padded: tp %lld and cp %lld, expected at least 1",
                 (long long)tp, (long long)cp);
    bool fits = cp == 1 || (colo_mul_ok(2, cp, &unit) && colo_mul_ok(tp, unit, &unit));
    if (cp == 1)
        unit = tp;
    fits = fits && (!fp8 || colo_mul_ok(16, cp, &other));
    fits = fits && colo_mul_ok(unit / colo_gcd(unit, other), other, &unit);
    fits = fits && colo_mul_ok(length / unit + (length % unit != 0), unit, &result);
    COLO_FAIL_IF(!fits, COLO_ERR_ARG,
                 "padded: length %lld for tp %lld, cp %lld%s overflows 63 bits", (long long)length,
                 (long long)tp, (long long)cp, fp8 ? ", fp8" : "");
    *padded = result;
    return COLO_OK;
}
