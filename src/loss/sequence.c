/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - what a batch on context ranks must be, and the one collective of gathering it.
 *
 * Decides nothing about positions: that is partition.h's, through the kernels (sequence-args.h).
 * What is decided here: every rank has as many elements as any other, so one all-gather of plain
 * values moves them, and the adjoint of that gather is a choice that the caller must make, because
 * it depends on what was done with the result (sequence.h says which is which).
 *
 * Lengths and segments are checked in host memory before anything is enqueued; a GPU reads copies
 * that the caller made, and the host does not look at those.
 */
#include "loss/sequence-args.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/loss.h"
#include "loss/validate.h"

#include <colobridge/partition.h>

#include <inttypes.h>

/* ---- checks ---- */

static colo_status_t check_segment(const colo_sequence_t *seq, int64_t segment)
{
    int64_t padded;
    COLO_FAIL_IF(
        __builtin_sub_overflow(seq->cu_padded[segment + 1], seq->cu_padded[segment], &padded) ||
            padded < 0,
        COLO_ERR_LAYOUT,
        "sequence: cu_padded is not ascending at segment %" PRId64 ": from %" PRId64 " to %" PRId64,
        segment, seq->cu_padded[segment], seq->cu_padded[segment + 1]);
    COLO_FAIL_IF(
        seq->cp > 1 && !seq->contiguous && padded > 0 && padded / 2 < seq->cp, COLO_ERR_LAYOUT,
        "sequence: segment %" PRId64 " has %" PRId64 " positions, shorter than 2 * cp = %" PRIu64
        "; pad it, colo_sequence_pack() says to what",
        segment, padded, 2 * (uint64_t)seq->cp);
    COLO_FAIL_IF(seq->lengths && seq->lengths[segment] > padded, COLO_ERR_LAYOUT,
                 "sequence: row %" PRId64 " has %" PRId64 " tokens, its segment has %" PRId64
                 " positions",
                 segment, seq->lengths[segment], padded);
    return COLO_OK;
}

static colo_partition_t partition_of(const colo_sequence_t *seq)
{
    const bool packed = seq->cu_padded && seq->batch > 0;
    return (colo_partition_t){
        COLO_PARTITION_INIT,
        .cp = seq->cp,
        .cp_rank = seq->cp_rank,
        .tp = 1,
        .positions = packed           ? seq->cu_padded[seq->batch]
                     : seq->cu_padded ? 0
                     : seq->padded    ? seq->padded
                                      : seq->positions,
        .segments = packed ? seq->batch : 0,
        .cu_padded = packed ? seq->cu_padded : NULL,
        .contiguous = seq->contiguous,
    };
}

static colo_status_t read_sequence(const colo_sequence_t *given, colo_sequence_t *own)
{
    *own = (colo_sequence_t){COLO_SEQUENCE_INIT};
    COLO_TRY(COLO_SIZED_READ(own, given, padded, "sequence: seq", "COLO_SEQUENCE_INIT"));
    own->cp = own->cp ? own->cp : 1;
    return COLO_OK;
}

/* Copies *@seq to @own, fills in missing members and checks them all; *@seq is @own then. */
static colo_status_t open_sequence(const colo_sequence_t **seq, colo_sequence_t *own)
{
    int64_t n;
    const colo_sequence_t *given = *seq;
    *seq = own;
    COLO_TRY(read_sequence(given, own));
    COLO_FAIL_IF(own->batch < 0 || own->positions < 1, COLO_ERR_ARG,
                 "sequence: %" PRId64 " rows of %" PRId64
                 " columns, expected 0 or more of at least 1",
                 own->batch, own->positions);
    COLO_FAIL_IF(!own->cu_padded && own->padded && own->padded < own->positions, COLO_ERR_ARG,
                 "sequence: padded is %" PRId64 ", expected 0 or at least the %" PRId64 " columns",
                 own->padded, own->positions);
    COLO_FAIL_IF(own->cp < 1 || own->cp_rank < 0 || own->cp_rank >= own->cp, COLO_ERR_ARG,
                 "sequence: cp_rank %" PRId64 " is outside [0, %" PRId64 ")", own->cp_rank,
                 own->cp);
    COLO_FAIL_IF(own->depth < 0, COLO_ERR_ARG, "sequence: depth is %" PRId64 ", expected 0 or more",
                 own->depth);
    for (int64_t b = 0; b < own->batch && (own->lengths || own->cu_padded); b++) {
        COLO_FAIL_IF(own->lengths && (own->lengths[b] < 0 || own->lengths[b] > own->positions),
                     COLO_ERR_LAYOUT,
                     "sequence: row %" PRId64 " has %" PRId64 " tokens, expected 0..%" PRId64, b,
                     own->lengths[b], own->positions);
        if (own->cu_padded)
            COLO_TRY(check_segment(own, b));
    }
    const colo_partition_t part = partition_of(own);
    colo_status_t st = colo_partition_check(&part);
    if (st < 0)
        return colo_fail_prefix(st, "sequence");
    COLO_FAIL_IF(!colo_mul_ok(own->batch, part.positions, &n) || !colo_mul_ok(n, 8, &n) ||
                     !colo_mul_ok(own->batch, own->positions, &n) || !colo_mul_ok(n, 8, &n),
                 COLO_ERR_ARG,
                 "sequence: %" PRId64 " rows of %" PRId64 " columns exceed 2^63 bytes", own->batch,
                 own->positions);
    return COLO_OK;
}

colo_status_t colo_sequence_check(const colo_sequence_t *seq)
{
    colo_sequence_t own;
    return open_sequence(&seq, &own);
}

static int64_t count_of(const colo_sequence_t *seq)
{
    int64_t n;
    return colo_mul_ok(seq->cu_padded ? 1 : seq->batch, partition_of(seq).positions / seq->cp, &n)
               ? n
               : 0;
}

int64_t colo_sequence_count(const colo_sequence_t *seq)
{
    colo_sequence_t own;
    return seq && read_sequence(seq, &own) == COLO_OK && own.cp >= 1 ? count_of(&own) : 0;
}

static colo_status_t check_elements(const colo_sequence_t *seq, const colo_tensor_t *tensor,
                                    const char *what)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    COLO_FAIL_IF(colo_tensor_count(tensor) != count_of(seq) || !colo_tensor_is_contiguous(tensor),
                 COLO_ERR_SHAPE, "%s: %" PRId64 " elements%s, expected %" PRId64 " contiguous ones",
                 what, colo_tensor_count(tensor),
                 colo_tensor_is_contiguous(tensor) ? "" : " that are not contiguous",
                 count_of(seq));
    return COLO_OK;
}

static colo_status_t check_values(const colo_sequence_t *seq, const colo_tensor_t *tensor,
                                  const char *what)
{
    COLO_TRY(check_elements(seq, tensor, what));
    COLO_FAIL_IF(tensor->dtype != COLO_F32 && tensor->dtype != COLO_F64, COLO_ERR_ARG,
                 "%s: dtype %s, expected f32 or f64", what, colo_dtype_name(tensor->dtype));
    return COLO_OK;
}

static colo_status_t check_table(const colo_sequence_t *seq, const colo_tensor_t *tensor,
                                 const colo_tensor_t *local, const char *what)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    COLO_TRY(colo_loss_check_is(tensor, local->dtype, what));
    const int64_t cols = seq->positions - 1;
    COLO_FAIL_IF(tensor->ndim != 2 || tensor->shape[0] != seq->batch || tensor->shape[1] != cols ||
                     (cols > 1 && tensor->stride[1] != 1) ||
                     (seq->batch > 1 && tensor->stride[0] < cols),
                 COLO_ERR_SHAPE,
                 "%s: %d axes, %" PRId64 " elements, expected [%" PRId64 ", %" PRId64
                 "] with contiguous columns",
                 what, (int)tensor->ndim, colo_tensor_count(tensor), seq->batch, cols);
    return colo_loss_check_memory(tensor, local, what);
}

/* Checks @seq for tensors in @mem, finds the kernels there, and fills in the arguments that all
 * have. */
static colo_status_t open_args(const colo_sequence_t *seq, colo_mem_t mem,
                               const colo_loss_kernels_t **kernels, struct colo_sequence_args *args)
{
    const bool gpu = mem == COLO_MEM_CUDA;
    COLO_FAIL_IF(
        gpu && (!seq->device_lengths != !seq->lengths || !seq->device_cu_padded != !seq->cu_padded),
        COLO_ERR_ARG,
        "sequence: tensors on a GPU need device_lengths and "
        "device_cu_padded, copies of lengths and cu_padded");
    *args = (struct colo_sequence_args){
        .batch = seq->batch,
        .positions = seq->positions,
        .cp = seq->cp,
        .cp_rank = seq->cp_rank,
        .row = partition_of(seq).positions,
        .count = count_of(seq),
        .lengths = gpu ? seq->device_lengths : seq->lengths,
        .cu_padded = gpu ? seq->device_cu_padded : seq->cu_padded,
        .left_padded = seq->left_padded,
        .contiguous = seq->contiguous,
        .depth = seq->depth,
    };
    return colo_loss_kernels_for(mem, kernels);
}

/* ---- targets and masks ---- */

colo_status_t colo_sequence_targets(const colo_sequence_t *seq, const colo_tensor_t *tokens,
                                    int64_t ignore, const colo_tensor_t *targets,
                                    colo_stream_t stream)
{
    const colo_loss_kernels_t *kernels;
    struct colo_sequence_args args;
    colo_sequence_t own;
    COLO_TRY(open_sequence(&seq, &own));
    COLO_TRY(colo_tensor_check(tokens, "tokens"));
    COLO_TRY(colo_loss_check_is(tokens, COLO_I64, "tokens"));
    const bool stream_of = tokens->ndim == 1 && seq->cu_padded;
    const int64_t columns = stream_of ? partition_of(seq).positions : seq->positions;
    COLO_FAIL_IF(!stream_of && (tokens->ndim != 2 || tokens->shape[0] != seq->batch),
                 COLO_ERR_SHAPE, "tokens: %d axes, expected [%" PRId64 ", %" PRId64 "]%s",
                 (int)tokens->ndim, seq->batch, columns,
                 seq->cu_padded ? " or the packed stream" : "");
    COLO_FAIL_IF(tokens->shape[tokens->ndim - 1] != columns ||
                     (columns > 1 && tokens->stride[tokens->ndim - 1] != 1),
                 COLO_ERR_SHAPE,
                 "tokens: %" PRId64 " columns, %" PRId64 " apart, expected %" PRId64
                 " contiguous ones",
                 tokens->shape[tokens->ndim - 1], tokens->stride[tokens->ndim - 1], columns);
    COLO_TRY(check_elements(seq, targets, "targets"));
    COLO_TRY(colo_loss_check_is(targets, COLO_I64, "targets"));
    COLO_TRY(colo_loss_check_memory(targets, tokens, "targets"));
    COLO_TRY(open_args(seq, tokens->mem, &kernels, &args));
    args.tokens = tokens->data;
    args.token_stride = stream_of ? -1 : tokens->stride[0];
    args.ignore = ignore;
    args.targets = targets->data;
    return args.count > 0 ? kernels->sequence_targets(&args, stream) : COLO_OK;
}

colo_status_t colo_sequence_mask(const colo_sequence_t *seq, colo_sequence_mask_t what,
                                 const colo_tensor_t *mask, colo_stream_t stream)
{
    const colo_loss_kernels_t *kernels;
    struct colo_sequence_args args;
    colo_sequence_t own;
    COLO_TRY(open_sequence(&seq, &own));
    COLO_FAIL_IF(what != COLO_SEQUENCE_TOKENS && what != COLO_SEQUENCE_TARGETS, COLO_ERR_ARG,
                 "sequence: mask %d, expected tokens (0) or targets (1)", (int)what);
    COLO_TRY(check_elements(seq, mask, "mask"));
    COLO_TRY(colo_loss_check_is(mask, COLO_U8, "mask"));
    COLO_TRY(open_args(seq, mask->mem, &kernels, &args));
    args.mask = mask->data;
    args.what = what;
    return args.count > 0 ? kernels->sequence_mask(&args, stream) : COLO_OK;
}

/* ---- gathering ---- */

colo_status_t colo_sequence_workspace_size(const colo_sequence_t *seq, colo_dtype_t dtype,
                                           size_t *bytes)
{
    colo_sequence_t own;
    int64_t n;
    COLO_TRY(open_sequence(&seq, &own));
    COLO_FAIL_IF(dtype != COLO_F32 && dtype != COLO_F64, COLO_ERR_ARG,
                 "sequence: values of dtype %s, expected f32 or f64", colo_dtype_name(dtype));
    COLO_FAIL_IF(!bytes, COLO_ERR_ARG, "sequence: bytes is NULL");
    COLO_FAIL_IF(!colo_mul_ok(count_of(seq), seq->cp, &n) ||
                     !colo_mul_ok(n, (int64_t)colo_dtype_size(dtype), &n) ||
                     !colo_mem_round_ok(n, &n),
                 COLO_ERR_ARG, "sequence: workspace exceeds 2^63 bytes");
    *bytes = (size_t)n;
    return COLO_OK;
}

static colo_status_t check_group(const colo_sequence_t *seq, const colo_tensor_t *local,
                                 const colo_comm_t *group, const void *workspace)
{
    COLO_FAIL_IF(
        colo_comm_size(group) != seq->cp || colo_comm_rank(group) != seq->cp_rank, COLO_ERR_ARG,
        "sequence: rank %d of a group of %d, expected the cp group: rank %" PRId64 " of %" PRId64,
        (int)colo_comm_rank(group), (int)colo_comm_size(group), seq->cp_rank, seq->cp);
    COLO_FAIL_IF(seq->cp > 1 && !workspace && count_of(seq) > 0, COLO_ERR_ARG,
                 "sequence: workspace is NULL; colo_sequence_workspace_size() "
                 "tells how many bytes it needs");
    COLO_TRY(colo_mem_check_aligned(workspace, "sequence", "workspace"));
    return colo_loss_check_place(local, group, "sequence");
}

/* @group: NULL if the call has no collective; @d: "d_" of gradients, or "" */
static colo_status_t open_gather(const colo_sequence_t *seq, const colo_tensor_t *local,
                                 const colo_tensor_t *out, const colo_comm_t *group,
                                 const void *workspace, const char *d,
                                 const colo_loss_kernels_t **kernels,
                                 struct colo_sequence_args *args)
{
    COLO_TRY(check_values(seq, local, *d ? "d_local" : "local"));
    COLO_TRY(check_table(seq, out, local, *d ? "d_out" : "out"));
    if (group)
        COLO_TRY(check_group(seq, local, group, workspace));
    return open_args(seq, local->mem, kernels, args);
}

colo_status_t colo_sequence_gather(const colo_sequence_t *seq, const colo_tensor_t *local,
                                   const colo_tensor_t *out, colo_comm_t *group, void *workspace,
                                   colo_stream_t stream)
{
    COLO_RANGE();
    const colo_loss_kernels_t *kernels;
    struct colo_sequence_args args;
    COLO_FAIL_IF(!group, COLO_ERR_ARG,
                 "sequence: group is NULL, expected the cp group; "
                 "colo_comm_create_self() makes one of one rank");
    colo_sequence_t own;
    colo_status_t st = open_sequence(&seq, &own);
    COLO_THEN(st, open_gather(seq, local, out, group, workspace, "", &kernels, &args));
    COLO_TRY(colo_loss_ready(group, "sequence gather", st));
    args.dtype = local->dtype;
    args.elements = local->data;
    args.table = out->data;
    args.table_stride = out->stride[0];
    if (seq->cp > 1) {
        args.elements = workspace;
        COLO_TRY(colo_comm_all_gather_for(group, COLO_CATEGORY_LOSS, local->data, workspace,
                                          args.count, local->dtype, stream));
    }
    return seq->batch > 0 && seq->positions > 1 ? kernels->sequence_scatter(&args, stream)
                                                : COLO_OK;
}

colo_status_t colo_sequence_gather_backward(const colo_sequence_t *seq,
                                            colo_sequence_adjoint_t adjoint,
                                            const colo_tensor_t *d_out,
                                            const colo_tensor_t *d_local, colo_comm_t *group,
                                            void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_loss_kernels_t *kernels;
    struct colo_sequence_args args;
    const bool sum = adjoint == COLO_SEQUENCE_SUM;
    COLO_FAIL_IF(!sum && adjoint != COLO_SEQUENCE_SLICE, COLO_ERR_ARG,
                 "sequence: adjoint %d, expected slice (0) or sum (1)", (int)adjoint);
    COLO_FAIL_IF(sum && !group, COLO_ERR_ARG, "sequence: group is NULL, expected the cp group");
    colo_sequence_t own;
    colo_status_t st = open_sequence(&seq, &own);
    COLO_THEN(
        st, open_gather(seq, d_local, d_out, sum ? group : NULL, workspace, "d_", &kernels, &args));
    if (sum)
        st = colo_loss_ready(group, "sequence gather backward", st);
    COLO_TRY(st);
    args.dtype = d_local->dtype;
    args.table = d_out->data;
    args.table_stride = d_out->stride[0];
    args.elements = d_local->data;
    args.from = seq->cp_rank;
    args.to = args.from + 1;
    if (!sum || seq->cp == 1)
        return args.count > 0 ? kernels->sequence_gather(&args, stream) : COLO_OK;
    args.elements = workspace;
    args.from = 0;
    args.to = seq->cp;
    if (args.count > 0)
        COLO_TRY(colo_loss_fail_on(group, kernels->sequence_gather(&args, stream)));
    return colo_comm_reduce_scatter_for(group, COLO_CATEGORY_LOSS, workspace, d_local->data,
                                        args.count, args.dtype, COLO_REDOP_SUM, stream);
}

/* ---- padding ---- */

/* The last sum first: nothing is written unless all rows fit. */
static colo_status_t pack(const int64_t *lengths, int64_t batch, int64_t tp, int64_t cp, bool fp8,
                          int64_t *cu_padded)
{
    int64_t offset = 0, padded;
    for (int64_t b = 0; b < batch; b++) {
        colo_status_t st = colo_partition_padded(lengths[b], tp, cp, fp8, &padded);
        if (st < 0)
            return colo_fail_prefix(st, "sequence: row %" PRId64, b);
        if (cu_padded)
            cu_padded[b] = offset;
        COLO_FAIL_IF(!colo_add_ok(offset, padded, &offset), COLO_ERR_ARG,
                     "sequence: the rows up to %" PRId64 " exceed 2^63", b);
    }
    if (cu_padded)
        cu_padded[batch] = offset;
    return COLO_OK;
}

colo_status_t colo_sequence_pack(const int64_t *lengths, int64_t batch, int64_t tp, int64_t cp,
                                 bool fp8, int64_t *cu_padded)
{
    COLO_FAIL_IF(batch < 0, COLO_ERR_ARG, "sequence: %" PRId64 " rows, expected 0 or more", batch);
    COLO_FAIL_IF((!lengths && batch > 0) || !cu_padded, COLO_ERR_ARG, "sequence: %s is NULL",
                 cu_padded ? "lengths" : "cu_padded");
    COLO_TRY(pack(lengths, batch, tp, cp, fp8, NULL));
    return pack(lengths, batch, tp, cp, fp8, cu_padded);
}
