# SPDX-License-Identifier: Apache-2.0
"""What comes with targets: lists of ids that take the place of the vocabulary
(docs/concepts/loss.md#a-support-instead-of-the-vocabulary), and class weights."""
from __future__ import annotations

import ctypes as c
import math
from typing import Any, NamedTuple

import torch

from .. import _structs as s
from ..errors import ArgumentError
from ..tensor import make
from .head import Named
from .ready import OfTokens, View, storage_of
from .rows import Rows
from .tensors import checked, said


class Support:
    """Per token a list of global ids, for example those that a sampler with top-k or top-p drew from.

    The softmax of a loss with support= runs over a token's list and its target; no other id is read, or gets a gradient. Lists
    may have any length and order, and an id may occur twice. All ranks of tp_group have the same lists. Nothing waits for the
    GPU.

    Args:
        ids: [..., K] of targets [...], int64, where a negative number is no id; or with offsets [N], a CSR.
        offsets: [T + 1], int64: token t, in the order of the targets, has ids[offsets[t]] .. ids[offsets[t + 1] - 1].
        ascending: each list is in ascending order already (of [..., K] without negative numbers), so that it is not sorted.

    Raises:
        ValueError: no int64 tensors of these shapes on one device.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> kept = ct.Support(torch.tensor([[0, 2, -1]]))
        >>> round(ct.logprob(torch.zeros(1, 8), torch.tensor([2]), support=kept).item(), 3)
        -0.693
    """
    __slots__ = ('ids', 'begin', 'end')

    def __init__(self, ids: torch.Tensor, offsets: torch.Tensor | None = None, *, ascending: bool = False):
        for name, t in (('ids', ids), ('offsets', offsets)):
            if (t is not None or name == 'ids') and (
                    not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64)):
                raise ArgumentError("Support: %s are %s, expected an int64 tensor" % (name, said(t, '%(dtype)s')))
            if hasattr(t, 'placements'):
                raise ArgumentError("Support: %s are a DTensor with %s, expected a plain tensor" % (name, t.placements))
        ids = ids.detach().to(torch.int64).resolve_neg()
        if offsets is None:
            if ids.dim() < 1:
                raise ArgumentError("Support: ids have no axis, expected [..., K]")
            width = ids.shape[-1]
            lists = ids.reshape(-1, width)
            count = torch.full((len(lists),), width, device=ids.device)
            if not ascending:
                none = lists < 0
                count = width - none.sum(1)
                lists = lists.masked_fill(none, 2**63 - 1).sort(1)[0]
            self.ids, self.begin = lists.reshape(-1), torch.arange(len(lists), device=ids.device) * width
            self.end = self.begin + count
            return
        if ids.dim() != 1 or offsets.dim() != 1 or len(offsets) < 1 or offsets.device != ids.device:
            raise ArgumentError("Support: ids are %s on %s and offsets %s on %s, expected [N] and [T + 1] on one "
                                "device" % (list(ids.shape), ids.device, list(offsets.shape), offsets.device))
        offsets = offsets.detach().to(torch.int64).contiguous()
        if not ascending:
            token = torch.searchsorted(offsets[1:], torch.arange(len(ids), device=ids.device), right=True)
            order = ids.sort(stable=True)[1]
            ids = ids[order[token[order].sort(stable=True)[1]]]
        self.ids, self.begin, self.end = ids.contiguous(), offsets[:-1], offsets[1:]

    def behind(self, what: str, target: Any, rows: Rows) -> tuple[Any, Any]:
        """(targets [T] as the library has them, begin and end in one tensor; ids)"""
        if not isinstance(self, Support):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("%s: support is a %s, expected a colobridge.torch.Support" % (what, type(self).__name__))
        tokens = math.prod(rows.shape)
        if len(self.begin) != tokens or self.ids.device != target.device:
            raise ArgumentError("%s: support has lists of %d tokens on %s, target has %d on %s"
                                % (what, len(self.begin), self.ids.device, tokens, target.device))
        begin, end = self.begin, self.end
        if not rows.plain:
            begin, end = (rows.spread(t.reshape(rows.shape), 0) for t in (begin, end))
        return torch.cat([target if target.dim() == 1 else target.reshape(-1), begin, end]), self.ids


class ClassWeight(NamedTuple):
    """What errors call the class weights of a call: their function and argument; and what was given"""
    what: str
    given: Any

    @classmethod
    def of(cls, what: Named, given: Any) -> 'ClassWeight | None':
        return None if given is None else cls('%s: %s' % (what, what.class_weight), given)


class Classes(View):
    """The weights of this rank's classes: a part of a tensor of one shape, dtype and device, on that of logits of @like's."""
    __slots__ = ('part',)

    def __init__(self, of: ClassWeight, like: Any, real: Any, start: int, vocab: int, columns: int):
        """@of: a weight of each of V classes, or of this rank's @columns from @start on. ValueError: it is neither"""
        what, given = of
        here = max(min(vocab - start, columns), 0)
        if given.dim() != 1 or not given.dtype.is_floating_point or given.device != like.device or len(given) not in (
                vocab, columns, here):
            raise ArgumentError("%s is %s, expected [%d], a number for each class, or [%d], for the columns "
                                "here, of a floating-point dtype on %s" % (
                                    what, said(given, '%(shape)s of %(dtype)s on %(device)s'), vocab, here, like.device))
        self.part = (min(start, vocab) if len(given) == vocab else 0), here
        super().__init__(torch.empty(here, dtype=real, device=like.device), what)

    def of(self, given: Any) -> Any:
        """This rank's, as the library has them."""
        return given.detach().narrow(0, *self.part).to(self.dtype).contiguous()


class Accompanied(View):
    """Of targets with a support, class weights or temperatures: (targets, and begin and end of lists behind them; ids or None;
    the class weights or None; in forward also the temperatures or None)"""
    __slots__ = ('listed', 'classes', 'heat')

    def attach(self, raw: s.Tensor, saved: Any, batch: Any) -> Any:
        """Lets point() and again() of @raw say where the lists and weights are, too: in @saved, where @batch finds them.
        What it returns has to live as long as @batch."""
        support = None
        if self.listed:
            for name in ('ids', 'begin', 'end'):
                setattr(saved.support, name, make(0, s.DTYPE['i64'], (self.count if name != 'ids' else 0,), (1,),
                                                  self.raw.mem, self.raw.device))
            lists = raw.lists = saved.support.ids, saved.support.begin, saved.support.end  # views into it
            support = s.Support(*(c.pointer(t) for t in lists))
            batch.support = c.pointer(support)
        if self.classes is not None:
            saved.class_weight = self.classes.raw
            raw.classes = saved.class_weight
            batch.class_weight = c.pointer(raw.classes)
        if self.heat is not None:
            raw.heat = self.heat.copy()
            batch.temperature = c.pointer(raw.heat)
        return support

    def point(self, raw: s.Tensor, t: Any) -> Any:
        first, listed, classes, *heat = t
        if self.heat is not None and heat:
            self.heat.point(raw.heat, heat[0])
        if listed is not None:
            ids, begin, end = raw.lists
            step, address = 8 * self.count, first.data_ptr()  # 0 without a token
            raw.data, begin.data, end.data = address, address + step, address + 2 * step
            ids.data, ids.shape[0] = listed.data_ptr(), listed.numel()
        else:
            super().point(raw, first)
        if classes is not None:
            self.classes.point(raw.classes, classes)
        return t

    def again(self, raw: s.Tensor, t: Any) -> Any:
        first, listed, classes = t
        if listed is not None:
            first, listed = self._listed(first, 3 * self.count), self._listed(listed)
            self.point(raw, (first, listed, None))
        else:
            first = super().again(raw, first)
        if classes is not None:
            classes = self.classes.again(raw.classes, classes)
        return first, listed, classes

    def _listed(self, t: Any, least: int = 0) -> Any:
        if t.dim() != 1 or t.numel() < least or t.dtype is not self.dtype or t.device != self.device:
            raise ArgumentError("%s came back from forward as %s of %s on %s, expected [%d] or more of %s on %s" % (
                self.what, list(t.shape), t.dtype, t.device, least, self.dtype, self.device))
        if not t.is_contiguous():
            t = t.contiguous()
        if storage_of(t).nbytes() < 8 * (t.storage_offset() + t.numel()):
            checked(t, self.what, saved=True)
        return t


def accompanied(what: str, target: Any, plan: Any, support: Support | None, class_weight: ClassWeight | None,
                heat: OfTokens | None) -> tuple[Any, Any, Any, Any]:
    """Targets of a plan and what comes with them, as Accompanied has them."""
    first, ids = (target, None) if support is None else Support.behind(support, what, target, plan.rows)
    return first, ids, None if class_weight is None else plan.targets.classes.of(class_weight.given), \
        None if heat is None else plan.rows.spread(heat.given.detach().to(torch.float32), 1.0)


def of_tokens(what: Named, values: tuple[Any, ...], members: tuple[str, ...], shape: Any, device: Any) -> tuple[
        OfTokens | None, tuple[Any, ...], tuple[str, ...]]:
    """(temperatures of tokens, the first of @values of @members, or None; the others). ValueError: they are not of @shape on
    @device, or no constants"""
    if not values or type(values[0]) is not OfTokens:
        return None, values, members
    _check_heat(what, 'temperature', values[0].given, shape, device)
    return values[0], (1.0, *values[1:], True), (*members, 'has_temperature')


def of_rows(what: Named, values: tuple[Any, ...], members: tuple[str, ...], shape: Any, device: Any) -> tuple[
        list[OfTokens], tuple[Any, ...], tuple[str, ...]]:
    """The same, wherever among @values they are: all of them, in the order of a plan's heats"""
    found = {name: value for name, value in zip(members, values) if type(value) is OfTokens}
    for name, value in found.items():
        _check_heat(what, name, value.given, shape, device)
    order = [name for name in ('temperature', 'target_temperature') if name in found]
    return [found[name] for name in order], (*(1.0 if type(value) is OfTokens else value for value in values), *(True for _ in order)), \
        (*members, *('has_' + name for name in order))


def _check_heat(what: Named, name: str, given: Any, shape: Any, device: Any) -> None:
    if given.shape != shape or not given.dtype.is_floating_point or given.device != device:
        raise ArgumentError("%s: %s is %s, expected a number, or %s of a floating-point dtype on %s, a number for each token" % (
            what, name, said(given, '%(shape)s of %(dtype)s on %(device)s'), list(shape), device))
    if given.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("%s: %s requires grad, expected a constant: it gets no gradient; pass it detached" % (what, name))


def meta(class_weight: ClassWeight | None) -> Any:
    """What plans depend on. ValueError: no tensor, or one that requires a gradient"""
    if class_weight is None:
        return None
    what, given = class_weight
    if not isinstance(given, torch.Tensor):
        raise ArgumentError("%s is %s, expected a tensor" % (what, said(given)))
    if given.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("%s requires grad, expected a constant: it gets no gradient; pass it detached" % what)
    return what, given.shape, given.dtype, given.device
