# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""NeMo-RL's functions of context ranks, and of single columns of the vocabulary."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.logprob import outputs
from ..torch.losses import topk_logprob
from ..torch.ranks import size_and_rank, telling
from ..torch.relayout import relayout
from ..torch.sampling import vocabulary
from ..torch.tensors import of_integers, said, stream_of
from ..torch.types import Group
from .collectives import Columns, LogSoftmax, Sum, comm_or_none, summed
from .packed import with_context
from .shared import NONE_IGNORED, f32, local


# ---- context ranks ----

@eager
def cp_shift_next(x: torch.Tensor, cp_group: Group | None = None, *, fill: float) -> torch.Tensor:
    """x of the next position, where context ranks have contiguous windows of the sequence. One gather of a row per rank.

    Args:
        x: [B, S / cp, ...], of any dtype, without a gradient: tokens, masks.
        cp_group: the context ranks; None: no others.
        fill: what the last position of the sequence gets.

    Returns:
        [B, S / cp, ...]: out[:, t] is x[:, t + 1] of the whole sequence.

    Raises:
        ValueError: x has no axis 1, an empty one, or requires grad.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    if x.dim() < 2 or x.shape[1] < 1 or x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("cp_shift_next: x is %s%s, expected [B, S / cp, ...] of a position or more, without a gradient; pass it "
                            "detached" % (list(x.shape), ', which requires grad' if x.requires_grad else ''))
    x = x.detach()
    last = torch.full_like(x[:, :1], fill)
    comm = comm_or_none(cp_group, x.device, 'cp_shift_next: cp_group')
    if comm is not None:
        first = x[:, :1].contiguous()
        firsts = torch.empty(comm.size, *first.shape, dtype=x.dtype, device=x.device)
        with telling(comm):
            comm.all_gather(first, firsts, stream=stream_of(x.device))
        if comm.rank + 1 < comm.size:
            last = firsts[comm.rank + 1]
    return torch.cat([x[:, 1:], last], 1)


@eager
def allgather_cp_sharded_tensor(tensor: torch.Tensor, cp_group: Group | None, seq_dim: int = 1) -> torch.Tensor:
    """The whole sequence of zigzag parts.

    In backward gradients are added over cp: every cp rank is expected to have computed the loss of its own part only.

    Args:
        tensor: [.., S / cp, ..], this rank's two chunks along seq_dim.
        cp_group: the context ranks; None: no others.
        seq_dim: the axis of positions.

    Returns:
        [.., S, ..], the same on all cp ranks.

    Raises:
        ValueError: S / cp is odd.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    comm = comm_or_none(cp_group, tensor.device, 'allgather_cp_sharded_tensor: cp_group')
    if comm is None:
        return tensor
    rows = tensor.movedim(seq_dim, 0)
    count = len(rows) * comm.size
    if len(rows) % 2:
        raise ArgumentError("allgather_cp_sharded_tensor: tensor is %s and seq_dim %d, expected an even number of positions: two chunks" % (
            list(tensor.shape), seq_dim))
    return with_context(rows, torch.tensor([0, count], device=tensor.device), count, comm, True).movedim(0, seq_dim)


def cp_load_balanced_to_contiguous(x: torch.Tensor, *, cp_group: Group | None = None, seq_dim: int = 1) -> torch.Tensor:
    """This rank's contiguous window of the sequence, of zigzag parts. One exchange, in which only what a rank lacks moves; with
    a gradient.

    Args:
        x: [.., S / cp, ..], this rank's two chunks along seq_dim; of a DTensor its local part.
        cp_group: the context ranks; None: no others.
        seq_dim: the axis of positions; all before it count samples.

    Returns:
        [.., S / cp, ..], positions [r S / cp, (r + 1) S / cp) of rank r.

    Raises:
        ValueError: S / cp is odd.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _contiguous(local(x), cp_group, seq_dim)


@eager
def _contiguous(x: Any, cp_group: Any, dim: int) -> Any:
    if comm_or_none(cp_group, x.device, 'cp_load_balanced_to_contiguous: cp_group') is None:
        return x
    return relayout(x, None, 'zigzag', 'block', group=cp_group, dim=dim % x.dim())


@eager
def group_all_reduce_sum(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """x added up over the ranks of a group, without a gradient.

    Args:
        x: of one shape and dtype on all ranks.
        group: the ranks; None, or one: x itself.

    Returns:
        The sum, a new tensor.

    Raises:
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    comm = comm_or_none(group, x.device, 'group_all_reduce_sum: group')
    return x if comm is None else summed(x, comm)


@eager
def group_all_reduce_sum_with_grad(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """x added up over the ranks of a group, all of which go on with the sum alike: the gradient of x is that of the sum, as
    this rank has it.

    Args:
        x: of one shape and dtype on all ranks.
        group: the ranks; None, or one: x itself.

    Returns:
        The sum, a new tensor.

    Raises:
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    comm = comm_or_none(group, x.device, 'group_all_reduce_sum_with_grad: group')
    return x if comm is None else Sum.apply(x, comm)


# ---- columns of the vocabulary ----

def vocab_parallel_log_softmax(logits: torch.Tensor, temperature: float, *, tp_group: Group | None = None) -> torch.Tensor:
    """Log-probabilities of all ids, this rank's columns of them, with the digits that the logits have.

    Args:
        logits: [..., Vl], this rank's columns, as many on each rank, in rank order; f64, f32, bf16 or f16. Of a DTensor its local
            part.
        temperature: > 0.
        tp_group: the ranks that share the vocabulary; None: no others.

    Returns:
        [..., Vl], f32; differentiable, whatever each rank does with its columns.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _log_softmax(local(logits), temperature, tp_group)


@eager
def _log_softmax(logits: Any, temperature: float, tp_group: Any) -> Any:
    what = 'vocab_parallel_log_softmax'
    if not logits.is_floating_point() or logits.dim() < 1 or logits.shape[-1] < 1 or not 0 < float(temperature) < float('inf'):
        raise ArgumentError("%s: logits are %s and temperature %s, expected [..., Vl] of a floating-point dtype and a finite number above 0" % (
            what, said(logits, '%(shape)s of %(dtype)s'), temperature))
    return LogSoftmax.apply(logits, float(temperature), comm_or_none(tp_group, logits.device, what + ': tp_group'))


def vocab_parallel_full_log_softmax(logits: torch.Tensor, temperature: float, *, tp_group: Group | None = None) -> torch.Tensor:
    """Log-probabilities of all ids, gathered.

    Args:
        logits: [B, T, Vl], as vocab_parallel_log_softmax() has them.
        temperature: > 0.
        tp_group: the ranks that share the vocabulary; None: no others.

    Returns:
        [B, T, V], f32, the same on all ranks, which go on with it alike: each takes its columns of the gradient.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _gathered(_log_softmax(local(logits), temperature, tp_group), tp_group)


@eager
def _gathered(mine: Any, tp_group: Any) -> Any:
    comm = comm_or_none(tp_group, mine.device, 'vocab_parallel_full_log_softmax: tp_group')
    return mine if comm is None else Columns.apply(mine, comm)


def logits_at(what: str, logits: Any, ids: Any, group: Any) -> Any:
    """Logits [.., k], f32, of ids [.., k] of the vocabulary, whose shards are equal; the ranks go on with them alike."""
    comm = comm_or_none(group, logits.device, what)
    start, width = (0 if comm is None else comm.rank) * logits.shape[-1], logits.shape[-1]
    mine = (ids >= start) & (ids < start + width)
    found = f32(logits.gather(-1, (ids - start).clamp(0, max(width - 1, 0)))).masked_fill(~mine, 0.0)
    return found if comm is None else Sum.apply(found, comm)


def vocab_parallel_gather_columns(logits: torch.Tensor, column_indices: torch.Tensor, *, tp_group: Group | None = None) -> torch.Tensor:
    """Logits of some ids, the same ones for each token.

    Args:
        logits: [B, T, Vl], this rank's columns, as many on each rank, in rank order. Of a DTensor its local part.
        column_indices: [K], ids in [0, V), the same on all ranks.
        tp_group: the ranks that share the vocabulary; None: no others.

    Returns:
        [B, T, K], f32, the same on all ranks, which go on with it alike; differentiable.

    Raises:
        ValueError: an id outside of the vocabulary, in host memory; shapes.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _columns(local(logits), column_indices, tp_group)


@eager
def _columns(logits: Any, column_indices: Any, tp_group: Any) -> Any:
    what = 'vocab_parallel_gather_columns'
    vocab = logits.shape[-1] * (1 if tp_group is None else size_and_rank(tp_group, what)[0])
    if column_indices.dim() != 1 or not of_integers(column_indices) or \
            not column_indices.is_cuda and bool(((column_indices < 0) | (column_indices >= vocab)).any()):
        raise ArgumentError("%s: column_indices are %s of %s, expected [K], ids of an integer dtype in [0, %d)" % (
            what, list(column_indices.shape), column_indices.dtype, vocab))
    return logits_at(what + ': tp_group', logits, column_indices.long().expand(*logits.shape[:-1], -1), tp_group)


def vocab_parallel_argmax(logits: torch.Tensor, *, tp_group: Group | None = None) -> torch.Tensor:
    """The id of the largest logit.

    Args:
        logits: [B, T, Vl], this rank's columns, as many on each rank, in rank order. Of a DTensor its local part.
        tp_group: the ranks that share the vocabulary; None: no others.

    Returns:
        [B, T], int64, the same on all ranks; the lowest id on ties; -1 of a row with NaN or +inf, or of nothing but -inf.

    Raises:
        ValueError: shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _argmax(local(logits).detach(), tp_group)


@eager
def _argmax(logits: Any, tp_group: Any) -> Any:
    return outputs('vocab_parallel_argmax', logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device), ('argmax',),
                   tp_group=tp_group, ignore_index=NONE_IGNORED)[0]


@eager
def distributed_vocab_topk(vocab_parallel_logits: torch.Tensor, k: int, tp_group: Group | None, *, vocab_start_index: int,
                           vocab_end_index: int, chunk_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of each token, without a gradient.

    Args:
        vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        k: 1 to 256.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        chunk_size: has no effect, because nothing is of the size of the logits.

    Returns:
        (values [..., k] in the logits' dtype, ids [..., k]), the largest first, the same on all ranks. Of equal logits the lower ids.

    Raises:
        ValueError: k; shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what, start, end = 'distributed_vocab_topk', int(vocab_start_index), int(vocab_end_index)
    logits = vocab_parallel_logits.detach()
    vocab = vocabulary(what, logits.shape[-1], logits.device, start, end, tp_group)
    ids = topk_logprob(logits, k, tp_group=tp_group, vocab=(start, vocab)).ids
    mine = (ids >= start) & (ids < end)
    values = logits.gather(-1, (ids - start).clamp(0, max(logits.shape[-1] - 1, 0))).masked_fill(~mine, 0.0) \
        if logits.shape[-1] else torch.zeros_like(ids, dtype=logits.dtype)
    comm = comm_or_none(tp_group, logits.device, what + ': tp_group')
    return (values if comm is None else summed(values, comm)), ids
