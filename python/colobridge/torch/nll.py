# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of vocabulary-parallel logits, summed or averaged once over all ranks: docs/logprob.md."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..comm import Comm
from ..errors import ArgumentError
from . import ranks as groups
from .logprob import LogprobPlan, function, planned
from .ready import scalars
from .tensors import eager, once, stream_of


class Loss(NamedTuple):
    """loss = num / den (reduction "mean") or num ("sum"). Over all ranks of reduce_group."""
    loss: Any
    num: Any
    den: Any


def across(reduce_group: Any, device: Any, what: str) -> Comm | None:
    """The communicator of a reduce_group; None for a group of one."""
    if reduce_group is None:
        return None
    comm = groups.comm_of(reduce_group, device, what + ': reduce_group')
    return comm if comm.size > 1 else None


def totals(loss: Any, valid: Any, mean: bool, comm: Comm | None) -> tuple[Any, Any, Any, Any]:
    """(value, num, den, what num is divided by, or None) of a per-token loss and the number of tokens
    that count, added over the group in rank order, in one operation."""
    import torch
    num, den = loss.sum(dtype=torch.float64), valid.double()
    if comm is not None:
        both = torch.stack((num, den))
        with groups.telling(comm):
            comm.all_reduce(both, stream=stream_of(both.device))
        num, den = (part.clone() for part in both)  # no views: autograd marks them apart
    wide = loss.dtype == torch.float64
    if not mean:
        return num.clone() if wide else num.float(), num, den, None
    over = den.clamp_min(1)
    value = num / over
    return value if wide else value.float(), num, den, over


def of_each(d_value: Any, d_num: Any, over: Any, like: tuple[Any, Any]) -> Any:
    """The gradient of each token's loss, (shape, dtype) @like: one number for all. It is that of the
    whole as it is, for each rank's part appears once in it."""
    if d_num is None and d_value is not None and like[0]:  # expanded, it is divided as what it is
        d = d_value.expand(like[0])
        return d if over is None else d / over
    d = d_num
    if d_value is not None:
        d = d_value if over is None else d_value / over
        d = d if d_num is None else d + d_num
    return None if d is None else d.to(like[1]).expand(like[0])


@functools.lru_cache(maxsize=None)
def _functions() -> tuple[Any, Any]:
    import torch

    class Nll(torch.autograd.Function):
        """(logits, targets, (LogprobPlan of "loss" and "n_valid", Comm, is a backward to be prepared),
        mean or sum, reduce group, a list) -> value, num; den, which has no gradient, is put into the
        list: an output costs more."""

        @staticmethod
        def forward(ctx: Any, logits: Any, target: Any, o: tuple[LogprobPlan, Comm, bool], mean: bool,
                    comm: Comm | None, side: list[Any]) -> Any:
            plan, tp, grad = o
            keeps = grad and ctx.needs_input_grad[0]
            (loss, valid), stats = plan.forward(logits, target, tp, keeps)
            value, num, den, over = totals(loss, valid, mean, comm)
            if keeps:
                ctx.over = over
                plan.keep(ctx, logits, target, stats)
            side.append(den)
            return value, num

        @staticmethod
        @once
        def backward(ctx: Any, d_value: Any, d_num: Any) -> Any:
            plan = ctx.plan
            d = of_each(d_value, d_num, ctx.over, (plan.rows.shape, plan.real))
            return plan.backward(ctx, 'nll', (d,)), None, None, None, None, None

    class Reduced(torch.autograd.Function):
        """(loss of each token, number of valid ones, mean or sum, reduce group, a list) -> value, num"""

        @staticmethod
        def forward(ctx: Any, loss: Any, valid: Any, mean: bool, comm: Comm | None,
                    side: list[Any]) -> Any:
            value, num, den, ctx.over = totals(loss, valid, mean, comm)
            ctx.like = loss.shape, loss.dtype
            ctx.set_materialize_grads(False)
            side.append(den)
            return value, num

        @staticmethod
        def backward(ctx: Any, d_value: Any, d_num: Any) -> Any:
            return of_each(d_value, d_num, ctx.over, ctx.like), None, None, None, None

    return Nll, Reduced


def reduced(loss: Any, valid: Any, reduction: str, reduce_group: Any, what: str) -> Loss:
    """Mean or sum of a per-token loss, over the group once; valid: how many tokens count here."""
    comm = across(reduce_group, loss.device, what)
    side: list[Any] = []
    return Loss(*_functions()[1].apply(loss, valid, reduction == 'mean', comm, side), side[0])


@eager
def nll(vocab_parallel_logits: Any, target: Any, *, reduction: str = 'mean', mask: Any = None,
        tp_group: Any = None, reduce_group: Any = None, vocab_start: int | None = None,
        vocab_end: int | None = None, vocab_size: int | None = None, temperature: float = 1.0,
        softcap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
        ignore_index: int = -100, chunk_size: int | None = None,
        inplace_backward: bool = False) -> Any:
    """Cross entropy of target [...] under logits [..., Vl], the loss of docs/logprob.md.

    reduction "none": per token, 0 where ignored. "mean" and "sum": Loss(loss, num, den), where num
    is the sum over tokens and den their number (those with a legal target and, with mask [...], a mask
    that is not 0), added over reduce_group once: the dp x cp ranks, never tp. mean = num / den, 0
    when den is 0. Each rank's gradients are those of its own tokens in the whole mean: add them over
    the group, do not average. Other arguments and errors: logprob(). Nothing waits for the GPU.
    """
    if reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("nll: reduction is %r, expected 'mean', 'sum' or 'none'" % (reduction,))
    if mask is not None:
        target = masked('nll', mask, target, ignore_index, tp_group, reduce_group)
    o = planned(
        'nll', vocab_parallel_logits, target, ('loss',) if reduction == 'none' else ('loss', 'n_valid'),
        tp_group, (vocab_start, vocab_end, vocab_size), inplace_backward,
        scalars(temperature, softcap, label_smoothing, z_loss, ignore_index, chunk_size))
    if reduction == 'none':
        return function().apply(*o)[0]
    comm = across(reduce_group, o[0].device, 'nll')
    side: list[Any] = []
    return Loss(*_functions()[0].apply(*o, reduction == 'mean', comm, side), side[0])


def masked(what: str, mask: Any, target: Any, ignore_index: int, *of: Any) -> Any:
    """The target where the mask is not 0, and ignored elsewhere. ValueError, on all ranks of the groups:
    a mask that is no tensor or not of the target's shape."""
    import torch
    if not isinstance(target, torch.Tensor) or target.dtype.is_floating_point or \
            target.dtype.is_complex or target.dtype == torch.bool:
        return target  # refused by who reads it
    if not isinstance(mask, torch.Tensor) or mask.shape != target.shape:
        found = list(mask.shape) if hasattr(mask, 'shape') else 'a ' + type(mask).__name__
        raise groups.told(ArgumentError("%s: mask is %s, expected %s, the target's shape"
                                        % (what, found, list(target.shape))), target.device, *of)
    return target.to(torch.int64).masked_fill(mask == 0, ignore_index)
