# SPDX-License-Identifier: Apache-2.0
"""Another cut of packed or dense sequences inside a model, in one line; docs/concepts/ragged.md."""
from __future__ import annotations

import functools
import math
import weakref
from typing import Any, Literal, TypeAlias

import torch

from ..comm import Comm
from ..errors import ArgumentError
from ..layout import Layout
from ..packing import Packing
from . import ranks as groups
from .bridge import PackedBridge, kept
from .calls import called, eager, operator
from .ready import integer
from .tensors import said
from .types import Group, Integers

Cut: TypeAlias = Literal['zigzag', 'block', 'contiguous', 'whole', 'heads']

_KEPT = 8
_PARTS = ('zigzag', 'block', 'contiguous')  # of which each rank has one in so many as there are ranks
_CUTS = (*_PARTS, 'whole', 'heads')
_tables: list[tuple[Any, int, Packing]] = []  # the last tensors of lengths, by identity and version


def _packing(cu: Any) -> Packing:
    """Of cumulative lengths; those of a tensor are read once, as long as it is the same."""
    if not hasattr(cu, '_version'):
        return _of_lengths(tuple(cu)) if hasattr(cu, '__iter__') else Packing(cu, split='block')  # which is an error
    for i, (of, version, packing) in enumerate(_tables):
        if of() is cu and version == cu._version:
            _tables.append(_tables.pop(i))
            return packing
    made = Packing(cu, split='block')
    _tables.append((weakref.ref(cu), cu._version, made))
    del _tables[:-_KEPT]
    return made


@functools.lru_cache(maxsize=_KEPT)
def _of_lengths(cu: tuple[int, ...]) -> Packing:
    return Packing(cu, split='block')


@functools.lru_cache(maxsize=_KEPT)
def _dense(samples: int, length: int) -> Packing:
    return Packing(seq_len=[length] * samples, split='block')


@functools.lru_cache(maxsize=2 * _KEPT)
def _cut(packing: Packing, split: str, padded: tuple[int, int] | None) -> Packing:
    """@padded: to what so many ranks along cp and tp take."""
    return packing.with_split('whole' if split == 'heads' else split, pad_to=padded and _rooms(packing.seq_len, split, *padded))


@functools.lru_cache(maxsize=2 * _KEPT)
def _cuts(packing: Packing, src: str, dst: str, padded: tuple[int, int] | None) -> tuple[Packing, Packing]:
    return _cut(packing, src, padded), _cut(packing, dst, padded)


def _rooms(lengths: list[int], split: str, cp: int, tp: int) -> Any:
    """The least that a cut takes: cp cuts each sequence, or all at once, and tp what a rank of cp has."""
    if split == 'contiguous':
        return cp * tp
    unit = 2 * cp if split == 'zigzag' and cp > 1 else cp if split in _PARTS else 1
    rooms = [n + -n % unit for n in lengths]
    while rooms and sum(rooms) // (cp if split in _PARTS else 1) % tp:
        rooms[-1] += unit
    return rooms


@functools.lru_cache(maxsize=32)
def _layout(cp: int, tp: int, heads: bool) -> Layout:
    layout = Layout.dst('tp=%d,cp=%d' % (tp, cp))
    layout = layout.clear('rows').split('features', 'cp') if heads else layout
    return layout.split('rows', 'tp') if tp > 1 else layout


def _counted(group: Comm) -> Comm:
    """The same ranks in the same order, which are 0, 1, .. to it, as _layout() has them: those of a split have other numbers.
    Collective the first time."""
    made = group.__dict__.get('_counted')
    if made is None:
        made = group
        if [*map(group.world_rank, range(group.size))] != [*range(group.size)]:
            made = group.split_color(0, group.rank)
            assert made is not None
            made.set_world_ranks(range(group.size))
        group.__dict__['_counted'] = made
    return made


def _bridge(group: Any, cp: int, tp: int, src: bool, dst: bool) -> PackedBridge:
    return PackedBridge(_layout(cp, tp, src), _layout(cp, tp, dst), group=_counted(group) if isinstance(group, Comm) else group)


def _ranks(group: Any, tp_group: Any, what: str = 'relayout') -> tuple[int, ...]:
    """Of all ranks along tp and along cp of them: tp is the faster dim."""
    for given in (group, tp_group):
        if isinstance(given, Comm):
            raise ArgumentError(what + ": tp_group with a colobridge.Comm, expected two torch process groups")
    cp, tp = groups.group_ranks(group, what + ': group'), groups.group_ranks(tp_group, what + ': tp_group')
    me = torch.distributed.get_rank()
    ranks = tuple(a + b - me for a in cp for b in tp)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < torch.distributed.get_world_size() for rank in ranks):
        raise ArgumentError("%s: group has ranks %s and tp_group %s; expected two dims of one grid, which share this rank alone"
                            % (what, list(cp), list(tp)))
    return ranks


def _shape(x: Any, size: int, src: str, dst: str, dim: int, rows: Any = None) -> list[Any]:
    """@rows: of the result, if they do not follow from those of x."""
    shape = list(x.shape)
    if -x.dim() <= dim < x.dim():  # else the call says what is wrong
        shape[dim] = rows if rows is not None else shape[dim] * (size if src in _PARTS else 1) // (size if dst in _PARTS else 1)
        if (src == 'heads') != (dst == 'heads') and dim % x.dim() + 1 < x.dim():
            at = dim % x.dim() + 1
            shape[at] = shape[at] // size if dst == 'heads' else shape[at] * size
    return shape


@operator(lambda given: [(_shape(given['x'], groups.size_and_rank(given['group'], 'relayout: group')[0], given['src'],
                                 given['dst'], given.get('dim', 0)), given['x'].dtype)], run=called)
def relayout(x: torch.Tensor, cu_seqlens: Integers | None, src: Cut, dst: Cut, *, group: Group | None, tp_group: Group | None = None,
             pad: bool = False, dim: int = 0) -> torch.Tensor:
    """x of sequences that the ranks of a group hold by one cut, as they hold them by another. With gradients.

    "zigzag" and "block" cut each sequence; "contiguous" cuts the whole axis of packed sequences, so that each rank has one
    interval of it, as scans want it; "whole": each rank has all rows (the gradients of a "whole" dst are summed over the
    ranks); "heads": each rank has all rows, of its part of the axis behind dim, which the ranks divide.

    Args:
        x: [.., rows, ..], this rank's rows along axis dim.
        cu_seqlens: [0, L0, L0 + L1, ..], the whole lengths of packed sequences, the same on all ranks, in the order in which rows
            lie; axes before dim have size 1. A list, or an integer tensor; one on a GPU is read once. None: x is dense, and
            axes before dim count samples of one length. The eight last tables are kept.
        src: the cut of x.
        dst: the cut of the result.
        group: a torch process group, a DeviceMesh of one dim, or a colobridge.Comm, also a split one. Parts are in the order of its
            ranks. All of them call.
        tp_group: the ranks of sequence parallelism, which cut what a rank of group has into equal parts, on both sides; one
            exchange over both groups. Then both are torch's.
        pad: cu_seqlens are the lengths without padding. Each cut pads them to the least that it takes: "zigzag" to a multiple of
            twice the ranks, "block" of the ranks, "contiguous" the sum, behind the last sequence; one rank pads nothing. x has the
            padding of src, the result that of dst, which is 0; padding does not travel, and its gradient is 0. A compiled graph
            breaks here: it does not know how many rows come.
        dim: the axis of the rows.

    Returns:
        The rows that this rank holds by dst.

    Raises:
        ValueError: a length that the ranks do not divide, by number of the sequence; shapes.
        MismatchError: ranks brought other tables.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> def one_rank(world):
        ...     x = torch.tensor([[0., 3.], [1., 2.]][world.rank])      # a sequence of 4 positions, zigzag
        ...     return ct.relayout(x, [0, 4], 'zigzag', 'block', group=world).tolist()
        >>> cb.run_threads(2, one_rank)
        [[0.0, 1.0], [2.0, 3.0]]
    """
    return _relayout(x, cu_seqlens, src, dst, _At(group, tp_group), pad, dim)


class _At:
    """Groups, as groups.tell() finds them."""

    def __init__(self, group: Any, tp_group: Any):
        self.group, self.tp_group = group, tp_group

    @property
    def _talks_to(self) -> Any:
        if self.tp_group is not None:
            return groups.counted_of(_ranks(self.group, self.tp_group))
        return self.group if isinstance(self.group, Comm) else groups.counted_of(groups.group_ranks(self.group))


@eager
def _relayout(x: Any, cu_seqlens: Any, src: str, dst: str, at: _At, pad: bool, dim: int) -> Any:
    group = at.group
    size, _ = groups.size_and_rank(group, 'relayout: group')
    tp, _ = groups.size_and_rank(at.tp_group, 'relayout: tp_group')
    for name, cut in (('src', src), ('dst', dst)):
        if cut not in _CUTS:
            raise ArgumentError("relayout: %s is %r, expected one of %s" % (name, cut, ', '.join(_CUTS)))
    if not isinstance(x, torch.Tensor) or not -x.dim() <= integer('dim', dim) < x.dim():
        raise ArgumentError("relayout: x is %s, expected a torch.Tensor with an axis %d" % (said(x, '%(shape)s'), dim))
    samples = _samples(x.shape, cu_seqlens is not None, src, dst, size, bool(pad), int(dim))
    if at.tp_group is not None:
        group = groups.comm_of_ranks(groups.counted_of(_ranks(group, at.tp_group)), x.device)
    rows = x.shape[dim] * tp * (size if src in _PARTS else 1)  # of the whole, if it is dense
    packing = _dense(samples, rows) if cu_seqlens is None else _packing(cu_seqlens)
    tables = _cuts(packing, src, dst, (size, tp) if pad else None)
    carry = kept(_bridge, group, size, tp, src == 'heads', dst == 'heads')
    if x.dim() == 2 and dim in (0, -2):
        return carry.forward(x, *tables)
    dim %= x.dim()
    y = carry.forward(x.reshape(samples * x.shape[dim], math.prod(x.shape[dim + 1:])), *tables)
    return y.view(_shape(x, size, src, dst, dim, y.shape[0] if samples == 1 else None))


@functools.lru_cache(maxsize=4 * _KEPT)
def _samples(shape: tuple[int, ...], packed: bool, src: str, dst: str, size: int, pad: bool, dim: int) -> int:
    """How many there are, after checks of what does not change from call to call."""
    dim %= len(shape)
    heads = src == 'heads', dst == 'heads'
    if any(heads) and len(shape) < dim + 2:
        raise ArgumentError("relayout: x is %s, expected an axis of heads behind axis %d" % (list(shape), dim))
    if heads[1] and not heads[0] and shape[dim + 1] % size:
        raise ArgumentError("relayout: %d heads, expected a multiple of the %d ranks" % (shape[dim + 1], size))
    samples = math.prod(shape[:dim])
    if packed and samples != 1:
        raise ArgumentError("relayout: x is %s with cu_seqlens, expected axes of size 1 before axis %d" % (list(shape), dim))
    if samples > 1 and 'contiguous' in (src, dst):
        raise ArgumentError("relayout: x has %d samples and the cut 'contiguous', which cuts one axis of packed sequences; "
                            "pass 'block', which cuts each sample" % samples)
    if pad and not packed:
        raise ArgumentError("relayout: pad=True without cu_seqlens, which are the lengths without padding")
    return samples
