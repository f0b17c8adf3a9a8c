# SPDX-License-Identifier: Apache-2.0
"""One call for the tokens of several losses: groups= of nll() and linear_nll(). Each token weighs what its group's loss weighs,
divided by the tokens of the group, which are counted before any product."""
from __future__ import annotations

from typing import Any

import torch

from ..comm import Comm
from ..errors import ArgumentError
from . import ranks as groups_of
from .functions import Function
from .tensors import checked, of_integers, said, stream_of

_MOST = 64  # groups
_BLOCK = 1 << 16  # tokens whose sums by group are made at a time: of f64, 32 MiB


def _by_group(values: Any, index: Any, count: int) -> Any:
    """[G] sums of values [T], f64, of which each group's has one order."""
    which = torch.arange(count, device=index.device).unsqueeze(1)
    sums = values.new_zeros(count)
    for v, i in zip(values.split(_BLOCK), index.split(_BLOCK)):
        sums = sums + torch.where(which == i, v, 0.0).sum(1)
    return sums


@Function
def OverRanks(ctx: Any, sums: Any, comm: Comm) -> Any:
    """(sums of this rank, f64, the ranks that have others) -> those of all. The gradient is that of the whole as it is, for each
    rank's part appears once in it."""
    if comm.size == 1:
        return sums.clone()
    made = sums.contiguous().clone()
    with groups_of.telling(comm):
        comm.all_reduce(checked(made, 'sums of groups'), stream=stream_of(made.device))
    return made


@OverRanks.adjoint
def _(ctx: Any, d: Any) -> Any:
    return d, None


class Grouping:
    """The groups of a call's tokens, checked. Afterwards, counts() says what their losses are divided by."""

    def __init__(self, what: str, groups: Any, group_weight: Any, target: Any, ignored: int, reduction: str):
        if groups is None or group_weight is None:
            raise ArgumentError("%s: %s is given and %s is not, expected both: the group of each token, and the weight of each "
                                "group's loss" % (what, *(('group_weight', 'groups') if groups is None else ('groups', 'group_weight'))))
        if reduction == 'none':
            raise ArgumentError("%s: groups with reduction 'none', expected 'mean' or 'sum': a group's loss is one number" % what)
        if not isinstance(groups, torch.Tensor) or not of_integers(groups) or not isinstance(target, torch.Tensor) or \
                groups.shape != target.shape or groups.device != target.device:
            raise ArgumentError("%s: groups are %s, expected integers %s, as the target is" % (
                what, said(groups, '%(shape)s of %(dtype)s on %(device)s'), said(target, '%(shape)s on %(device)s')))
        numbers: Any = group_weight
        if isinstance(numbers, torch.Tensor):
            if numbers.requires_grad and torch.is_grad_enabled():
                raise ArgumentError("%s: group_weight requires grad, expected constants; mode=\"logprob\" gives each group's loss, "
                                    "which you can weigh" % what)
            made = numbers.detach().to(groups.device, torch.float64) if numbers.dim() == 1 else None
        else:
            try:  # without a copy from the host, which would wait for a GPU
                made = torch.cat([torch.full((1,), float(n), dtype=torch.float64, device=groups.device) for n in numbers])
            except (TypeError, ValueError, RuntimeError):
                made = None
        if made is None or not 0 < len(made) <= _MOST:
            raise ArgumentError("%s: group_weight is %s, expected [G] numbers, 1 to %d" % (
                what, said(numbers, '%(shape)s') if isinstance(numbers, torch.Tensor) else repr(numbers)[:60], _MOST))
        self.weight, self.count = made, len(made)
        outside = (groups < 0) | (groups >= self.count)
        outside &= target != ignored
        captures = groups.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captures and outside.any():
            at = outside.nonzero()[0].tolist()
            raise ArgumentError("%s: groups: found %d at %s, expected [0, %d), as group_weight has %d numbers" % (
                what, int(groups[tuple(at)]), at, self.count, self.count))
        self.index = groups.clamp(0, self.count - 1).reshape(-1)
        self.outside = outside if captures else None  # of a graph: they are NaN

    def counts(self, of_token: Any, of_class: Any, mean: bool, comm: Comm) -> None:
        """of_token: what each token's loss counts, in the dtype of losses; of_class: the weight of its target's class, which the
        loss has already, or None: 1. One reduction."""
        self.of_token, self.comm = of_token, comm
        if self.outside is not None:
            self.of_token = self.of_token.masked_fill(self.outside, float('nan'))
        den = self.of_token.double() if of_class is None else self.of_token.double() * of_class
        self.den = OverRanks.apply(_by_group(den.reshape(-1), self.index, self.count), comm)
        self.factor = torch.where(self.den == 0, 0.0, self.den.reciprocal()) if mean else torch.ones_like(self.den)

    def alpha(self) -> Any:
        """What the total multiplies each token's loss by."""
        return ((self.weight * self.factor)[self.index].reshape(self.of_token.shape) * self.of_token).to(self.of_token.dtype)

    def losses(self, loss: Any, total: Any = None) -> tuple[Any, Any, Any, Any]:
        """GroupedLoss's, of the loss of each token. total: if it is made already"""
        num = OverRanks.apply(_by_group((loss * self.of_token).reshape(-1).double(), self.index, self.count), self.comm)
        each = torch.where(num.isinf() & (self.factor == 0), 0.0, num * self.factor)  # NaN stays
        real = self.of_token.dtype
        return (each * self.weight).sum().to(real) if total is None else total, each.to(real), num, self.den
