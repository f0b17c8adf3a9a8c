# SPDX-License-Identifier: Apache-2.0
"""Divergence of a student from a teacher straight from the hidden states of both, a chunk of tokens at a time: neither side's
logits ever exist as a whole. linear_distill_plan.py has the C objects that make it; docs/guides/distillation.md.

Two modes, as of linear_nll(). "loss": forward makes the gradients of the student's logits with 1 as each token's upstream
gradient, times its weight, and backward multiplies by one number: three products with the student's head, one with the
teacher's. "logprob" takes any upstream gradient and makes all logits again in backward, but not their statistics: four and two,
and no collective for a chunk.
"""
from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch

from ..comm import Comm
from ..errors import ArgumentError, FailedError
from . import placed
from . import ranks as groups
from .autocast import autocasts, cast
from .calls import eager
from .functions import Function, saved_tensors
from .head import FIELDS, PLAIN, Head, Named, columns_of, read
from .linear_distill_plan import Side, Tensors, Work, check_gemm, run_of
from .losses import DIVERGENCES
from .nll import Loss, across, reduced, weights_of
from .ready import integer, number
from .tensors import refuse_complex, said, stream_of
from .types import Divergence, Group, LinearDistillOptions, Reduction

_WHAT, _TEACHER = Named('linear_distill'), Named('linear_distill', hidden='teacher_hidden', weight='teacher_head')
# Of a Head: what is read of it, in addition to weight and bias, and what only a DTensor's has
_READ = 'softcap', 'scale', 'tp_group', 'vocab', 'd_hidden', 'lora', 'budget', 'logits_dtype', 'gemm', 'shard_group', 'rows'
_PLACED = 'grad_reduction',
_INSTEAD = {'main_grad': 'leave it out, and add weight.grad to main_grad after backward', 'grad_reduction':
            'no ranks share its weight: leave it out'}


def _sides(hidden: Any, params: Any, teacher: Any, casts: Any) -> tuple[Tensors, Tensors]:
    """What is multiplied: of one dtype on a side, columns contiguous. A teacher in f64 is f32 for a student that is not."""
    student, hers = _side(casts, hidden, *params), _side(casts, teacher[0], *teacher[1])
    if hers.hidden.dtype == torch.float64 != student.hidden.dtype:
        hers = Tensors(*(None if t is None else t.float() for t in hers))
    return student, hers


def _side(casts: Any, hidden: Any, weight: Any, bias: Any, a: Any, b: Any) -> Tensors:
    hidden = cast(hidden, casts)
    return Tensors(*map(_columns, (hidden, cast(weight, casts), cast(bias, casts), *(
        None if t is None else t.to(hidden.dtype) for t in (a, b)))))


def _columns(t: Any) -> Any:
    """t, whose rows may lie anywhere, but not over each other"""
    if t is None or not t.numel():  # which is contiguous for PyTorch, whatever its strides
        return t if t is None else t.new_empty(t.shape)
    return t if t.is_contiguous() or t.dim() == 2 and t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def _to(made: list[Any], of: Any, need: Any) -> tuple[Any, ...]:
    return tuple(None if d is None or not wanted else d.to(t.dtype) for d, t, wanted in zip(made, of, need))


def _sums(params: Any, casts: Any) -> bool:
    """Are gradients of weight and bias wanted in another dtype than that of products?"""
    return any(t is not None and t.dtype != cast(t, casts).dtype for t in params[:2])


@Function
def _Known(ctx: Any, work: Work, teacher: Any, mask: Any, weights: Any, of: Any, hidden: Any, *params: Any) -> Any:
    """(.., (mean?, reduce group, a list), hidden, weight, bias, A, B) -> the value, whose gradients begin here; num and den, which
    have none, go to the list. Where the head is trained, gradients of the logits are kept, and products of them are made in
    backward, which multiplies by one number in f32; else, and in f64, gradients are made here."""
    mean, group, side = of
    casts, need = autocasts(hidden.device), ctx.needs_input_grad[5:]
    sides = _sides(hidden, params, teacher, casts)
    early = sides[0].weight.dtype != torch.float64 and (need[1] or need[2])
    run = run_of(work, sides, need, early, _sums(params, casts) or not early)
    up = None if weights is None else weights.to(run.real).contiguous()
    with groups.telling(work.comm):
        if early:
            losses, kept, shared = run.forward(sides, mask, True, up)
            ctx.save_for_backward(hidden, *params, mask, kept, shared)
            ctx.made = []
        else:
            losses, ctx.made = run.loss(sides, mask, up)
    value, num, den = reduced(losses, _count(losses, mask), up, mean, group)
    side += num, den
    ctx.of = run, casts, [t if t is None else t.new_empty(0) for t in (hidden, *params)], need
    ctx.factor = torch.where(den > 0, den.reciprocal(), 1.0) if mean else torch.ones_like(den)
    return value


@_Known.backward
def _(ctx: Any, d_value: Any) -> Any:
    (run, casts, of, need), made = ctx.of, ctx.made
    by = (d_value.double() * ctx.factor).to(run.real).reshape(1)
    if made is None:
        raise FailedError("linear_distill: a second backward of mode \"loss\", which makes the gradients in forward and keeps them "
                          "until the first one; use mode=\"logprob\"")
    if run.early:
        *tensors, mask, kept, shared = saved_tensors(ctx, 'linear_distill: hidden or head')
        student = _side(casts, *tensors)
        with groups.telling(run.work.comm):
            made = run.backward(student, None, mask, by, kept, shared)
    else:
        made = [None if d is None else d.mul_(by.to(d.dtype)) for d in made]
    ctx.made = None
    return None, None, None, None, None, *_to(made, of, need)


@Function
def _Any(ctx: Any, work: Work, teacher: Any, mask: Any, hidden: Any, *params: Any) -> Any:
    """(.., hidden, weight, bias, A, B) -> D of each token"""
    casts, need = autocasts(hidden.device), ctx.needs_input_grad[3:]
    sides = _sides(hidden, params, teacher, casts)
    run = run_of(work, sides, need, False, _sums(params, casts))
    with groups.telling(work.comm):
        losses, kept, _ = run.forward(sides, mask, any(need))
    ctx.of = run, casts, need
    ctx.save_for_backward(hidden, *params, teacher[0], *teacher[1], mask, kept)
    return losses


@_Any.backward
def _(ctx: Any, up: Any) -> Any:
    saved = saved_tensors(ctx, 'linear_distill: hidden, head, teacher_hidden or teacher_head')
    run, casts, need = ctx.of
    student, teacher = _sides(saved[0], saved[1:5], (saved[5], saved[6:10]), casts)
    with groups.telling(run.work.comm):
        made = run.backward(student, teacher, saved[10], up.contiguous(), saved[11], None)
    return None, None, None, *_to(made, saved[:5], need)


def _count(losses: Any, mask: Any) -> Any:
    return torch.full((), losses.numel(), dtype=torch.int64, device=losses.device) if mask is None else mask.sum()


def _open(what: Named, hidden: Any, given: Any, tp_group: Any, temperature: float, argument: str) -> tuple[Any, Any, Any, Any, Head]:
    """(hidden [T, H], this rank's rows of the head, its Side, tp_group, Head)"""
    head, weight, bias, tp_group = read(what, given, tp_group)
    is_placed = placed.is_placed(weight) or placed.is_placed(bias)
    shared = head.shard_group is not None or any(map(placed.is_partitioned, (weight, bias)))
    for name in FIELDS if head is not PLAIN else ():
        if name in ('weight', 'bias', *_READ) or name in _PLACED and (is_placed or shared) or getattr(head, name) == getattr(PLAIN, name):
            continue
        raise ArgumentError("linear_distill: the Head of %s has %s=%r, which is not done here; %s" % (argument, name, getattr(
            head, name), _INSTEAD.get(name, 'leave it out')))
    if not isinstance(hidden, torch.Tensor) or not isinstance(weight, torch.Tensor) or hidden.dim() < 1:
        raise ArgumentError("linear_distill: %s is %s and the weight of %s %s, expected [..., H] and [Vl, H]" % (
            what.hidden, said(hidden), argument, said(weight)))
    comm = groups.comm_of(tp_group, hidden.device, 'linear_distill: tp_group')
    lora: Any = (None, None, 0.0)
    if head.lora is not None:
        lora = placed.factors(what, head, hidden, comm, False)
    if is_placed:
        weight, bias = placed.gathered(what, head, hidden, weight, bias, comm)
    elif shared:
        if head.rows is None and not placed.is_partitioned(weight):
            raise ArgumentError("linear_distill: the Head of %s has shard_group, so rows= (the rows of all its ranks together) is needed" % argument)
        weight = placed.whole(what, 'linear_distill: the weight of ' + argument, head, weight, head.shard_group,
                              (integer('linear_distill: rows', head.rows or 0), hidden.shape[-1]), hidden.device, comm)
        if bias is not None:
            bias = placed.whole(what, 'linear_distill: the bias of ' + argument, head, bias, head.shard_group, (len(weight),), hidden.device, comm)
    elif head.rows is not None:
        raise ArgumentError("linear_distill: the Head of %s has rows=%s, and no ranks share its weight; pass shard_group=, or leave it out" % (
            argument, head.rows))
    for t, shape, name in ((weight, (None, hidden.shape[-1]), 'weight'), (bias, (len(weight),), 'bias'),
                           (lora[0], (None, hidden.shape[-1]), 'A'), (lora[1], (len(weight), None), 'B')):
        if t is not None and (t.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, t.shape))
                              or t.device != hidden.device or not t.is_floating_point()):
            raise ArgumentError("linear_distill: %s is %s, and %s of %s is %s, expected floats %s on its device" % (
                what.hidden, said(hidden), name, argument, said(t), ['*' if n is None else n for n in shape]))
        if t is not None and name in ('weight', 'bias') and autocasts(hidden.device)[0][1] is None and t.dtype != hidden.dtype:
            raise ArgumentError("linear_distill: %s is of %s and %s of %s of %s, expected one dtype" % (
                what.hidden, hidden.dtype, name, argument, t.dtype))
    check_gemm('linear_distill', head.gemm, argument)
    side = Side(number('linear_distill: softcap', head.softcap or 0.0), number('linear_distill: scale', head.scale), temperature, lora[2],
                head.logits_dtype in (None, torch.float32), head.gemm)
    return hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1]), (weight, bias, *lora[:2]), side, tp_group, head


def _tables(comm: Comm, group: Any, rows: tuple[int, int], vocab: tuple[Any, Any]) -> tuple[int, int]:
    """(first column of this rank, V): the vocabulary that both heads have. Ranks are asked once for each pair of
    heads' rows."""
    begins = [(comm.rank * n if at[0] is None else at[0]) for n, at in zip(rows, vocab)]
    asked = (*begins, *(begin + n for begin, n in zip(begins, rows)), *(at[2] or 0 for at in vocab))
    most = min((at[2] for at in vocab if at[2]), default=None)
    # without padding: of another one the other ranks know nothing, and would not ask again
    key = asked if most is None else (*(min(n, most) for n in asked[:4]), *asked[4:])
    kept = comm.__dict__.setdefault('_distilled', {})
    if key not in kept:
        every = [asked]
        if comm.size > 1:
            host = comm if comm.backend != 'nccl' else groups.comm_of(group, torch.device('cpu'))
            with groups.telling(comm):
                every = [tuple(map(int, told.decode().split())) for told in host.gather_bytes(b' '.join(b'%020d' % n for n in asked))]
        kept[key] = _common(comm.rank, every)
    found = kept[key]
    if isinstance(found, str):
        raise ArgumentError(found)
    return found


def _common(rank: int, every: list[Any]) -> tuple[int, int] | str:
    """_tables() of what all ranks have asked; what is wrong, if something is"""
    sizes = {n for row in every for n in row[4:] if n}
    ends = max(row[2] for row in every), max(row[3] for row in every)
    if len(sizes) > 1:
        return "linear_distill: vocab of the heads is %s, expected one V for both, and on all ranks" % sorted(sizes)
    if not sizes and ends[0] != ends[1]:
        return "linear_distill: head has %d columns and teacher_head %d, expected vocab=V, the columns that both have and which are " \
            "no padding, in a Head" % ends
    size = sizes.pop() if sizes else ends[0]
    if size > min(ends):
        return "linear_distill: vocab is %d, head has %d columns and teacher_head %d, expected at least that many" % (size, *ends)
    tables = [[(min(row[i], size), min(row[i + 2], size)) for row in every] for i in (0, 1)]
    if [b for b in tables[0] if b[0] < b[1]] != [b for b in tables[1] if b[0] < b[1]] or \
            [b[0] < b[1] for b in tables[0]] != [b[0] < b[1] for b in tables[1]]:
        return "linear_distill: ranks hold columns %s of head and %s of teacher_head, expected the same; move the rows of a frozen " \
            "teacher with colobridge.torch.reshard_head(weight, columns, group=)" % tuple(
                ' '.join('[%d, %d)' % b for b in table) for table in tables)
    return tables[0][rank][0], size


@overload
def linear_distill(hidden: torch.Tensor, head: torch.Tensor | Head, teacher_hidden: torch.Tensor, teacher_head: torch.Tensor | Head, *,
                   reduction: Literal['mean', 'sum'] = 'mean', mode: Literal['loss', 'logprob'] = 'loss',
                   **options: Unpack[LinearDistillOptions]) -> Loss: ...
@overload
def linear_distill(hidden: torch.Tensor, head: torch.Tensor | Head, teacher_hidden: torch.Tensor, teacher_head: torch.Tensor | Head, *,
                   reduction: Literal['none'], mode: Literal['logprob'], **options: Unpack[LinearDistillOptions]) -> torch.Tensor: ...
@overload
def linear_distill(hidden: torch.Tensor, head: torch.Tensor | Head, teacher_hidden: torch.Tensor, teacher_head: torch.Tensor | Head, *,
                   reduction: Reduction, mode: Literal['loss', 'logprob'] = 'loss',
                   **options: Unpack[LinearDistillOptions]) -> Loss | torch.Tensor: ...


@eager
def linear_distill(hidden: torch.Tensor, head: torch.Tensor | Head, teacher_hidden: torch.Tensor, teacher_head: torch.Tensor | Head, *,
                   kind: Divergence = 'forward_kl', beta: float = 0.5, temperature: float = 1.0, teacher_temperature: float | None = None,
                   mask: torch.Tensor | None = None, reduction: Reduction = 'mean', reduce_group: Group | None = None,
                   tp_group: Group | None = None, mode: Literal['loss', 'logprob'] = 'loss', chunk_size: int | None = None) -> Any:
    """distill() of the logits of two models, hidden x weight^T (+ a bias) of each, of which one chunk of tokens exists at a time.

    The two differ freely in width, dtype and padding of the vocabulary. The teacher gets no gradient. Both heads may be DTensors,
    parts that ranks share (shard_group, rows) or parameters of DeepSpeed's ZeRO-3, and are gathered once in forward. 16-bit hidden
    states make f32 logits, unless a Head's logits_dtype is theirs. Tokens whose mask is 0 are not read. Inside of autocast, hidden
    states and heads are cast as torch.nn.functional.linear() would.

    Args:
        hidden: [..., H], the student's, on all ranks of tp_group the same.
        head: [Vl, H], this rank's rows; or a Head with a bias, softcap, scale, vocab, tp_group, lora, d_hidden "all_reduce" or
            "partial", budget (bytes of a chunk's logits of both, on several ranks two of the student's; 0: 640 MiB, of mode "logprob"
            1 GiB), logits_dtype, gemm, shard_group, rows, and if ranks share its weight grad_reduction.
        teacher_hidden: [..., H of the teacher], of the same tokens.
        teacher_head: as head.
        kind: as in distill().
        beta: as in distill().
        temperature: of the student, > 0.
        teacher_temperature: > 0; None: the student's.
        mask: [...], as in distill() with a kind.
        reduction: as in distill(); "none" wants mode "logprob".
        reduce_group: as in nll().
        tp_group: the ranks that share the vocabulary, if the Heads do not say it. Both heads have the same columns on a rank.
        mode: "loss": forward makes the gradients, which backward multiplies by one number and can do once; three products with the
            student's head and one with the teacher's. "logprob" makes logits again in backward, for any upstream gradient: four and
            two. Without gradients they are the same.
        chunk_size: tokens a chunk, the same on all ranks of tp_group; None: what fits into the budget, and at least 512 (1,024 of 16-bit
            logits), in mode "logprob" 1,024.

    Returns:
        Loss(loss, num, den) as nll(), or of reduction "none" D [...]. Differentiable in hidden, weight, bias and lora of the
        student; in mode "loss" num has no gradient.

    Raises:
        ValueError: as distill(); heads without a common vocabulary, or that ranks hold different columns of: see reshard_head().
        MismatchError: as logprob().
        RuntimeError: as logprob(); a second backward of mode "loss".
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> student, teacher = torch.nn.Linear(8, 50), torch.nn.Linear(16, 50, bias=False)
        >>> loss = ct.linear_distill(torch.randn(6, 8), ct.Head.of(student), torch.randn(6, 16), teacher.weight, kind="jsd")
        >>> loss.backward()
        >>> student.weight.grad.shape
        torch.Size([50, 8])
    """
    if kind not in DIVERGENCES or reduction not in ('none', 'mean', 'sum') or mode not in ('loss', 'logprob'):
        raise ArgumentError("linear_distill: kind is %r, reduction %r and mode %r, expected one of %s, 'mean', 'sum' or 'none', and "
                            "'loss' or 'logprob'" % (kind, reduction, mode, ', '.join(map(repr, DIVERGENCES))))
    if mode == 'loss' and reduction == 'none':
        raise ArgumentError("linear_distill: mode=\"loss\" makes gradients of a mean or a sum, and reduction is 'none'; use "
                            "mode=\"logprob\"")
    temperature = number('linear_distill: temperature', temperature)
    h, params, student, tp, of = _open(_WHAT, hidden, head, tp_group, temperature, 'head')
    asked = temperature if teacher_temperature is None else number('linear_distill: teacher_temperature', teacher_temperature)
    given: Any = tp if not isinstance(teacher_head, Head) or teacher_head.tp_group is None else None
    with torch.no_grad():
        th, t_params, teacher, t_tp, t_of = _open(_TEACHER, teacher_hidden, teacher_head, given, asked, 'teacher_head')
    comm = groups.comm_of(tp, h.device, 'linear_distill: tp_group')
    if groups.comm_of(t_tp, h.device, 'linear_distill: tp_group') is not comm and \
            groups.group_ranks(t_tp) != groups.group_ranks(tp):
        raise ArgumentError("linear_distill: tp_group of head has ranks %s and that of teacher_head %s, expected the same" % (
            list(groups.group_ranks(tp)), list(groups.group_ranks(t_tp))))
    if hidden.shape[:-1] != teacher_hidden.shape[:-1] or h.device != th.device:
        raise ArgumentError("linear_distill: hidden is %s and teacher_hidden %s, expected the same tokens on one device" % (
            said(hidden), said(teacher_hidden)))
    if of.d_hidden not in ('all_reduce', 'partial') or mask is not None and (
            not isinstance(mask, torch.Tensor) or mask.shape != hidden.shape[:-1] or mask.device != h.device):
        raise ArgumentError("linear_distill: d_hidden is %r and mask is %s, expected 'all_reduce' or 'partial', whose gradient you can "
                            "reduce_scatter(), and %s or None" % (of.d_hidden, said(mask), list(hidden.shape[:-1])))
    refuse_complex('linear_distill', mask)
    begin, vocab = _tables(comm, tp, (len(params[0]), len(t_params[0])),
                           (columns_of(_WHAT, of.vocab), columns_of(_TEACHER, t_of.vocab)))
    work = Work(_WHAT, DIVERGENCES.index(kind), number('linear_distill: beta', beta), (student, teacher), _chunk(chunk_size), of.budget, comm,
                begin, vocab, of.d_hidden if comm.size > 1 else 'partial')
    weights = None if mask is None else weights_of('linear_distill', mask)
    flat = None if mask is None else (mask != 0).reshape(-1).to(torch.uint8)
    flat_weights = None if weights is None else weights.reshape(-1)
    group = across(reduce_group, h.device, 'linear_distill')
    groups.require_apart('linear_distill', comm, 'reduce_group', group)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (h, *params))
    frozen = th.detach(), tuple(None if t is None else t.detach() for t in t_params)
    if mode == 'loss' and trains:
        side: list[Any] = []
        value = _Known.apply(work, frozen, flat, flat_weights, (reduction == 'mean', group, side), h, *params)
        return Loss(value, *side)
    losses = _Any.apply(work, frozen, flat, h, *params)
    if reduction == 'none':
        losses = losses if flat_weights is None else losses * flat_weights.to(losses.dtype)
        return losses.reshape(hidden.shape[:-1])
    return reduced(losses, _count(losses, flat), None if flat_weights is None else flat_weights.to(losses.dtype), reduction == 'mean', group)


def _chunk(chunk_size: Any) -> int:
    """Tokens of a chunk; 0: the library's choice, from what all ranks of the vocabulary have alike"""
    step = integer('linear_distill: chunk_size', chunk_size or 0)
    if step < 0:
        raise ArgumentError("linear_distill: chunk_size is %d, expected a number above 0, or None" % step)
    return step


@torch.no_grad()
def reshard_head(weight: torch.Tensor, columns: tuple[int, int], *, group: Group | None) -> torch.Tensor:
    """Rows of a head, as ranks hold them, moved to other boundaries: once, for a frozen teacher whose vocabulary is cut otherwise
    than the student's. In rounds, so that a rank has no more than some of the others' rows besides its own.

    Args:
        weight: [rows, ...], this rank's rows, which follow those of the ranks before it: a weight, or a bias. Any number, also 0.
        columns: (first, end) of the rows that this rank will have, of those of all ranks together; others may have the same.
        group: the ranks that share the vocabulary; None: no others.

    Returns:
        [end - first, ...], a new tensor without a gradient.

    Raises:
        ValueError: rows that no rank has; ranks whose rows differ in dtype or shape.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> def one_rank(world):
        ...     mine = torch.arange(5.)[[slice(0, 2), slice(2, 5)][world.rank], None]
        ...     return ct.reshard_head(mine, [(0, 3), (3, 5)][world.rank], group=world).flatten().tolist()
        >>> cb.run_threads(2, one_rank)
        [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    return _reshard(weight, columns, group)


@eager
def _reshard(weight: Any, columns: Any, group: Any) -> Any:
    if not isinstance(weight, torch.Tensor) or weight.dim() < 1 or placed.is_placed(weight) or weight.layout is not torch.strided:
        raise ArgumentError("reshard_head: weight is %s, expected a tensor [rows, ...], this rank's part" % said(weight))
    if not isinstance(columns, tuple) or len(columns) != 2:
        raise ArgumentError("reshard_head: columns is %r, expected (first, end)" % (columns,))
    first, end = (integer('reshard_head: columns', n) for n in columns)
    comm = groups.comm_of(group, weight.device, 'reshard_head: group')
    host = comm if comm.backend != 'nccl' else groups.comm_of(group, torch.device('cpu'))
    tail = tuple(weight.shape[1:])
    with groups.telling(comm):
        told = [t.decode().split(' ', 1) for t in host.gather_bytes(b'%020d %s' % (len(weight), repr((tail, weight.dtype)).encode()), True)]
    sizes = [int(rows) for rows, _ in told]
    if len({of for _, of in told}) > 1:
        raise ArgumentError("reshard_head: weight is %s, expected rows of one shape and dtype on all ranks, found %s" % (
            said(weight), ', '.join(of for _, of in told)))
    if not 0 <= first <= end <= sum(sizes):
        raise ArgumentError("reshard_head: columns is (%d, %d), expected rows of the %d that all ranks have" % (first, end, sum(sizes)))
    begins = [sum(sizes[:r]) for r in range(comm.size)]
    out = weight.new_empty((end - first, *tail))
    width = max(1, weight[:1].numel() * weight.element_size() if len(weight) else 1)
    with groups.telling(comm):
        widest = max(int(n) for n in host.gather_bytes(b'%020d' % width))
        each = max(1, min(max(sizes, default=1), _ROUND // widest))
        mine, whole = weight.new_zeros((each, *tail)), weight.new_empty((comm.size * each, *tail))
        for at in range(0, max(sizes, default=0), each):
            part = weight[at:at + each]
            mine[:len(part)] = part
            comm.all_gather(mine, whole, stream=stream_of(weight.device))
            for r, begin in enumerate(begins):
                lo, hi = max(first, begin + at), min(end, begin + min(at + each, sizes[r]))
                if lo < hi:
                    out[lo - first:hi - first] = whole[r * each + lo - begin - at:r * each + hi - begin - at]
    return out


_ROUND = 64 << 20  # bytes of a rank's rows in a round of reshard_head()
