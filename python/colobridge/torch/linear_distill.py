# SPDX-License-Identifier: Apache-2.0
"""Divergence of a student from a teacher straight from the hidden states of both, a chunk of tokens at a time: neither side's
logits ever exist as a whole. Each chunk is a call of distill()'s; docs/guides/distillation.md.

Two modes, as of linear_nll(). "loss": forward makes the gradients of hidden and of the student's head with 1 as each token's
upstream gradient, times its weight, and backward multiplies them by one number: three products with the student's head, one with
the teacher's. "logprob" takes any upstream gradient and makes all logits again in backward, but not their statistics: four and
two, and no collective for a chunk.
"""
from __future__ import annotations

import functools
import types
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch

from ..comm import Comm
from ..errors import ArgumentError, FailedError
from . import placed
from . import ranks as groups
from .autocast import autocasts, cast, under
from .calls import eager
from .chunks import _rows_of, _sums
from .functions import Function, saved_tensors
from .head import FIELDS, PLAIN, Head, Named, columns_of, read
from .logprob import planned, real_of
from .losses import DIVERGENCES, _Distill
from .nll import Loss, across, reduced, weights_of
from .ready import integer, number
from .tensors import refuse_complex, said, stream_of
from .types import Divergence, Group, LinearDistillOptions, Reduction

_WHAT, _TEACHER = Named('linear_distill'), Named('linear_distill', hidden='teacher_hidden', weight='teacher_head')
# Of a Head: what is read of it, in addition to weight and bias, and what only a DTensor's has
_READ = 'softcap', 'scale', 'tp_group', 'vocab', 'd_hidden', 'lora', 'budget', 'logits_dtype'
_PLACED = 'grad_reduction',
_BUDGET = 1 << 30  # bytes of a chunk's logits of both sides
_FEW, _LEAST, _UNIT = 2048, 256, 128  # tokens of a chunk: below the first, adding to an f32 [V, H] costs more than the product


class _Side(NamedTuple):
    """A head of one call, whole rows of this rank's columns."""
    softcap: float
    scale: float
    temperature: float
    lora_scale: float
    wide: bool  # logits in f32 whatever the dtype of hidden, where PyTorch can


class _Work(NamedTuple):
    """What a call is, but for its tensors."""
    kind: int
    beta: float
    sides: tuple[_Side, _Side]
    step: int
    comm: Comm
    tp_group: Any
    start: int  # this rank's columns of the vocabulary
    columns: int
    vocab: int
    adds: bool  # is d_hidden summed over tp?


# weight, bias, A and B of a LoRA; the last three may be None
Params = tuple[Any, Any, Any, Any]


@functools.lru_cache(maxsize=None)
def _wide(dtype: Any, device: Any) -> bool:
    """Does this PyTorch multiply 16-bit matrices on this GPU into f32, and add such a product to f32?"""
    if not (hasattr(torch.ops.aten.mm, 'dtype') and hasattr(torch.ops.aten.addmm, 'dtype_out')):
        return False
    a, into = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a.t(), out_dtype=torch.float32)
        _add_product(into, a.t(), a)
    except (RuntimeError, TypeError):
        return False
    return True


def _add_product(into: Any, a: Any, b: Any) -> None:
    torch.ops.aten.addmm.dtype_out(into, a, b, torch.float32, out=into)


def _makes_f32(t: Any) -> bool:
    return t.is_cuda and t.dtype in (torch.float16, torch.bfloat16) and _wide(t.dtype, t.device)


def _product(h: Any, weight: Any, wide: bool) -> Any:
    if wide and _makes_f32(h):
        return torch.mm(h, weight.t(), out_dtype=torch.float32)
    return h @ weight.t()


def _logits(h: Any, params: Params, side: _Side, columns: int) -> Any:
    """[n, columns] of hidden states [n, H]"""
    weight, bias, a, b = params
    z = _product(h, weight[:columns], side.wide)
    if a is not None:
        z += side.lora_scale * _product(h @ a.t(), b[:columns], side.wide)
    if bias is not None:
        z += bias[:columns]
    return z


def _planned(work: _Work, z: Any, y: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """(logits of both as a plan of distill() reads them, the plan, the mask); it writes the gradient over those of the student."""
    student, teacher = work.sides
    if y.dtype not in (z.dtype, torch.float32):
        y = y.to(real_of(z.dtype))
    z, y, (plan, _, _, mask) = planned(
        _WHAT, z, y, ('kl',), work.tp_group, (work.start, None, work.vocab), True,
        (0, teacher.temperature, teacher.scale, teacher.softcap, work.kind, work.beta, student.temperature, student.softcap,
         student.scale), _MEMBERS, _Distill, more=mask)
    return z, y, plan, mask


def _gradient(plan: Any, z: Any, y: Any, stats: Any, up: Any) -> Any:
    """Of z, from what a forward of logits with these values kept, and the upstream gradient of each token"""
    kept = (z, y, stats) if isinstance(stats, torch.Tensor) else (z, y)
    return plan.backward(types.SimpleNamespace(ended=False, stats=stats, saved_tensors=kept), [up])


_MEMBERS = ('targets', 'target_temperature', 'target_scale', 'target_softcap', 'divergence', 'beta', 'temperature', 'softcap', 'scale')


class _Grads:
    """Of hidden and of the student's head, added up over chunks."""

    def __init__(self, work: _Work, hidden: Any, params: Params, need: tuple[bool, ...]):
        """need: of hidden, weight, bias, A, B"""
        self.work = work
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need[0] else None
        self.params = [torch.zeros_like(t, dtype=_sums(t), memory_format=torch.contiguous_format) if wanted and t is not None else None
                       for t, wanted in zip(params, need[1:])]

    def add(self, rows: slice, h: Any, d: Any, params: Params, side: _Side) -> None:
        """d: gradient of the chunk's logits"""
        weight, _, a, b = params
        d_weight, d_bias, d_a, d_b = self.params
        n = self.work.columns
        d, wide = d.to(h.dtype), d
        if d_bias is not None:
            d_bias[:n] += wide.sum(0, dtype=d_bias.dtype)
        if d_weight is not None:
            into = d_weight[:n]
            if _makes_f32(d):  # no second [V, H]
                _add_product(into, d.t(), h)
            elif into.dtype == d.dtype:
                into.addmm_(d.t(), h)
            else:
                into += d.t() @ h
        through = None if a is None else side.lora_scale * (d @ b[:n])
        if d_a is not None:
            d_a += through.t() @ h
        if d_b is not None:
            d_b[:n] += side.lora_scale * (d.t() @ (h @ a.t()))
        if self.hidden is not None:
            made = d @ weight[:n]
            self.hidden[rows] = made if through is None else made + through @ a


def _pass(work: _Work, hidden: Any, params: Params, teacher_hidden: Any, teacher: Params, mask: Any, product: Any, up: Any,
          grads: _Grads | None, kept: list[Any] | None = None) -> Any:
    """D of all tokens [T], and if @up [T] is not None its gradients into @grads, under the autocast @product. kept: gets what
    another pass needs, or has it if there is an @up, which then makes gradients alone."""
    again = kept is not None and up is not None
    losses = torch.empty(0 if again else len(hidden), dtype=real_of(cast(hidden, product).dtype), device=hidden.device)
    own: Any = tuple(cast(t, product) for t in params)
    other: Any = tuple(cast(t, product) for t in teacher)
    for i, rows in enumerate(_rows_of(hidden, work.step)):
        h = cast(hidden[rows], product)
        if grads is not None and mask is not None:
            h = h.masked_fill((mask[rows] == 0)[:, None], 0)  # what is not read may be NaN, and 0 times that is NaN
        z, y, plan, part = _planned(work, _logits(h, own, work.sides[0], work.columns),
                                    _logits(cast(teacher_hidden[rows], product), other, work.sides[1], work.columns),
                                    None if mask is None else mask[rows])
        if again:
            stats = kept[i]  # type: ignore[index]
        else:
            (losses[rows],), stats = plan.forward(z, y, work.comm, up is not None or kept is not None, part)
            if kept is not None:
                kept.append(stats)
        if grads is not None:
            grads.add(rows, h, _gradient(plan, z, y, stats, up[rows]), own, work.sides[0])
        del z, y
    return losses


@Function
def _Known(ctx: Any, work: _Work, teacher: Any, mask: Any, weights: Any, of: Any, hidden: Any, *params: Any) -> Any:
    """(.., (mean?, reduce group, a list), hidden, weight, bias, A, B) -> the value, whose gradients are made here; num and den,
    which have none, go to the list"""
    mean, group, side = of
    product, need = autocasts(hidden.device), ctx.needs_input_grad[5:]
    grads = _Grads(work, hidden, params, need)  # type: ignore[arg-type]
    up = torch.ones(len(hidden), dtype=real_of(cast(hidden, product).dtype), device=hidden.device) if weights is None else \
        weights.to(real_of(cast(hidden, product).dtype))
    losses = _pass(work, hidden, params, *teacher, mask, product, up, grads)  # type: ignore[arg-type]
    value, num, den = reduced(losses, _count(losses, mask), weights if weights is None else up, mean, group)
    side += num, den
    ctx.made, ctx.work, ctx.params = grads, work, (hidden, *params)
    ctx.factor = torch.where(den > 0, den.reciprocal(), 1.0) if mean else torch.ones_like(den)
    return value


@_Known.backward
def _(ctx: Any, d_value: Any) -> Any:
    made, by = ctx.made, d_value.double() * ctx.factor
    if made is None:
        raise FailedError("linear_distill: a second backward of mode \"loss\", which makes the gradients in forward and keeps them "
                          "until the first one; use mode=\"logprob\"")
    ctx.made = None
    out = [None if d is None else d.mul_(by.to(d.dtype)) for d in (made.hidden, *made.params)]
    return None, None, None, None, None, *_finished(ctx.work, out, ctx.params)


@Function
def _Any(ctx: Any, work: _Work, teacher: Any, mask: Any, hidden: Any, *params: Any) -> Any:
    """(.., hidden, weight, bias, A, B) -> D of each token"""
    product, kept = autocasts(hidden.device), [] if any(ctx.needs_input_grad[3:]) else None
    losses = _pass(work, hidden, params, *teacher, mask, product, None, None, kept)  # type: ignore[arg-type]
    ctx.of = work, mask, product, kept
    ctx.save_for_backward(hidden, *params, teacher[0], *teacher[1])
    return losses


@_Any.backward
def _(ctx: Any, up: Any) -> Any:
    hidden, *rest = saved_tensors(ctx, 'linear_distill: hidden, head, teacher_hidden or teacher_head')
    work, mask, product, kept = ctx.of
    params, teacher_hidden, teacher = tuple(rest[:4]), rest[4], tuple(rest[5:])
    grads = _Grads(work, hidden, params, ctx.needs_input_grad[3:])
    with groups.telling(work.comm), under(product):
        _pass(work, hidden, params, teacher_hidden, teacher, mask, product, up.contiguous(), grads, kept)
    return None, None, None, *_finished(work, [grads.hidden, *grads.params], (hidden, *params))


def _finished(work: _Work, made: list[Any], of: Any) -> list[Any]:
    """Gradients in the dtypes of what they are of; those of hidden and A are sums over the vocabulary's ranks."""
    hidden, a = made[0], made[3]
    for d in (hidden if work.adds else None, a if work.comm.size > 1 else None):
        if d is not None:
            with groups.telling(work.comm):
                work.comm.all_reduce(d, stream=stream_of(d.device))
    return [None if d is None else d.to(t.dtype) for d, t in zip(made, of)]


def _count(losses: Any, mask: Any) -> Any:
    return torch.full((), losses.numel(), dtype=torch.int64, device=losses.device) if mask is None else (mask != 0).sum()


def _open(what: Named, hidden: Any, given: Any, tp_group: Any, temperature: float, argument: str) -> tuple[Any, Any, Any, Any, Head]:
    """(hidden [T, H], this rank's rows of the head, its _Side, tp_group, Head)"""
    head, weight, bias, tp_group = read(what, given, tp_group)
    is_placed = placed.is_placed(weight) or placed.is_placed(bias)
    for name in FIELDS:
        if name in ('weight', 'bias', *_READ) or name in _PLACED and is_placed or getattr(head, name) == getattr(PLAIN, name):
            continue
        raise ArgumentError("linear_distill: the Head of %s has %s=%r, which is not done here; leave it out%s" % (
            argument, name, getattr(head, name), ', and pass a DTensor' if name in ('shard_group', 'rows', *_PLACED) else ''))
    if hasattr(weight, 'ds_tensor'):
        raise ArgumentError("linear_distill: %s is a parameter of DeepSpeed's ZeRO-3, expected one that is here; gather it "
                            "(deepspeed.zero.GatheredParameters)" % argument)
    if not isinstance(hidden, torch.Tensor) or not isinstance(weight, torch.Tensor) or hidden.dim() < 1:
        raise ArgumentError("linear_distill: %s is %s and the weight of %s %s, expected [..., H] and [Vl, H]" % (
            what.hidden, said(hidden), argument, said(weight)))
    comm = groups.comm_of(tp_group, hidden.device, 'linear_distill: tp_group')
    lora: Any = (None, None, 0.0)
    if head.lora is not None:
        *pair, by = placed.factors(what, head, hidden, comm, False)
        lora = (*(t.to(hidden.dtype) for t in pair), by)
    if is_placed:
        weight, bias = placed.gathered(what, head, hidden, weight, bias, comm)
    for t, shape, name in ((weight, (None, hidden.shape[-1]), 'weight'), (bias, (len(weight),), 'bias'),
                           (lora[0], (None, hidden.shape[-1]), 'A'), (lora[1], (len(weight), None), 'B')):
        if t is not None and (t.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, t.shape))
                              or t.device != hidden.device or not t.is_floating_point()):
            raise ArgumentError("linear_distill: %s is %s, and %s of %s is %s, expected floats %s on its device" % (
                what.hidden, said(hidden), name, argument, said(t), ['*' if n is None else n for n in shape]))
        if t is not None and autocasts(hidden.device)[0][1] is None and t.dtype != hidden.dtype:
            raise ArgumentError("linear_distill: %s is of %s and %s of %s of %s, expected one dtype" % (
                what.hidden, hidden.dtype, name, argument, t.dtype))
    side = _Side(number('linear_distill: softcap', head.softcap or 0.0), number('linear_distill: scale', head.scale), temperature, lora[2],
                 head.logits_dtype in (None, torch.float32))
    return hidden.reshape(-1, hidden.shape[-1]), (weight, bias, *lora[:2]), side, tp_group, head


def _tables(comm: Comm, group: Any, rows: tuple[int, int], vocab: tuple[Any, Any]) -> tuple[int, int, int]:
    """(first column of this rank, its columns, V): the vocabulary that both heads have. Ranks are asked once for each pair of
    heads' rows."""
    begins = [(comm.rank * n if at[0] is None else at[0]) for n, at in zip(rows, vocab)]
    asked = (*begins, *(begin + n for begin, n in zip(begins, rows)), *(at[2] or 0 for at in vocab))
    kept = comm.__dict__.setdefault('_distilled', {})
    if asked not in kept:
        every = [asked]
        if comm.size > 1:
            host = comm if comm.backend != 'nccl' else groups.comm_of(group, torch.device('cpu'))
            with groups.telling(comm):
                every = [tuple(map(int, told.decode().split())) for told in host.gather_bytes(b' '.join(b'%020d' % n for n in asked))]
        kept[asked] = every
    every = kept[asked]
    sizes = {n for row in every for n in row[4:] if n}
    ends = max(row[2] for row in every), max(row[3] for row in every)
    if len(sizes) > 1:
        raise ArgumentError("linear_distill: vocab of the heads is %s, expected one V for both, and on all ranks" % sorted(sizes))
    if not sizes and ends[0] != ends[1]:
        raise ArgumentError("linear_distill: head has %d columns and teacher_head %d, expected vocab=V, the columns that both have "
                            "and which are no padding, in a Head" % ends)
    size = sizes.pop() if sizes else ends[0]
    if size > min(ends):
        raise ArgumentError("linear_distill: vocab is %d, head has %d columns and teacher_head %d, expected at least that many" % (
            size, *ends))
    tables = [[(min(row[i], size), min(row[i + 2], size)) for row in every] for i in (0, 1)]
    if [b for b in tables[0] if b[0] < b[1]] != [b for b in tables[1] if b[0] < b[1]] or \
            [b[0] < b[1] for b in tables[0]] != [b[0] < b[1] for b in tables[1]]:
        raise ArgumentError("linear_distill: ranks hold columns %s of head and %s of teacher_head, expected the same; move the rows of a "
                            "frozen teacher with colobridge.torch.reshard_head(weight, columns, group=)" % tuple(
                                ' '.join('[%d, %d)' % b for b in table) for table in tables))
    begin, end = tables[0][comm.rank]
    return begin, end - begin, size


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

    The two differ freely in width, dtype and padding of the vocabulary. The teacher gets no gradient. Both heads may be DTensors, and
    are gathered once in forward. On a GPU, with a PyTorch whose mm() can, 16-bit hidden states make f32 logits; else logits are
    of their dtype. Inside of autocast, hidden states and heads are cast as torch.nn.functional.linear() would.

    Args:
        hidden: [..., H], the student's, on all ranks of tp_group the same.
        head: [Vl, H], this rank's rows; or a Head with a bias, softcap, scale, vocab, tp_group, lora, d_hidden "all_reduce" or
            "partial", budget (bytes of a chunk's logits of both sides; 0: 1 GiB), logits_dtype, and if its weight is a DTensor grad_reduction.
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
        chunk_size: tokens a chunk, the same on all ranks of tp_group; None: what fits into the budget, and if the Head has none at
            least 2,048.

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
        raise ArgumentError("linear_distill: d_hidden is %r and mask is %s, expected 'all_reduce' or 'partial', and %s or None" % (
            of.d_hidden, said(mask), list(hidden.shape[:-1])))
    refuse_complex('linear_distill', mask)
    begin, columns, vocab = _tables(comm, tp, (len(params[0]), len(t_params[0])),
                                    (columns_of(_WHAT, of.vocab), columns_of(_TEACHER, t_of.vocab)))
    step = _step(chunk_size, of.budget, vocab, comm.size, h)
    work = _Work(DIVERGENCES.index(kind), number('linear_distill: beta', beta), (student, teacher), step, comm, tp, begin, columns, vocab,
                 of.d_hidden == 'all_reduce' and comm.size > 1)
    weights = None if mask is None else weights_of('linear_distill', mask)
    flat, flat_weights = (None if t is None else t.reshape(-1) for t in (mask, weights))
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


def _step(chunk_size: Any, budget: int, vocab: int, ranks: int, hidden: Any) -> int:
    """Tokens of a chunk, from what all ranks of the vocabulary have alike"""
    if chunk_size:
        step = integer('linear_distill: chunk_size', chunk_size)
        if step < 0:
            raise ArgumentError("linear_distill: chunk_size is %d, expected a number above 0, or None" % step)
        return step
    wide = 8 if hidden.dtype == torch.float64 else 4
    fits = (budget or _BUDGET) // (2 * wide * max(-(-vocab // ranks), 1))
    return max(_LEAST if budget else _FEW, fits // _UNIT * _UNIT)


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
