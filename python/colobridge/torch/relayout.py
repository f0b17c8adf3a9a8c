# SPDX-License-Identifier: Apache-2.0
"""Another cut of packed or dense sequences inside a model, in one line; docs/concepts/ragged.md."""
import functools
import math
import weakref
from typing import Any

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
def _cut(packing: Packing, split: str) -> Packing:
    return packing.with_split('whole' if split == 'heads' else split)


@functools.lru_cache(maxsize=32)
def _layout(size: int, heads: bool) -> Layout:
    layout = Layout.dst('cp=%d' % size)
    return layout.clear('rows').split('features', 'cp') if heads else layout


def _bridge(group: Any, size: int, src: bool, dst: bool) -> PackedBridge:
    return PackedBridge(_layout(size, src), _layout(size, dst), group=group)


def _shape(x: Any, size: int, src: str, dst: str, dim: int) -> list[Any]:
    shape = list(x.shape)
    if -x.dim() <= dim < x.dim():  # else the call says what is wrong
        shape[dim] = shape[dim] * (size if src in _PARTS else 1) // (size if dst in _PARTS else 1)
        if (src == 'heads') != (dst == 'heads') and dim % x.dim() + 1 < x.dim():
            at = dim % x.dim() + 1
            shape[at] = shape[at] // size if dst == 'heads' else shape[at] * size
    return shape


@operator(lambda given: [(_shape(given['x'], groups.size_and_rank(given['group'], 'relayout: group')[0], given['src'],
                                 given['dst'], given.get('dim', 0)), given['x'].dtype)], run=called)
def relayout(x: Any, cu_seqlens: Any, src: str, dst: str, *, group: Any, dim: int = 0) -> Any:
    """x of sequences that the ranks of @group hold by the cut @src, as they hold them by @dst. With gradients.

    x: [.., rows, ..], its rows along axis @dim. cu_seqlens: [0, L0, L0 + L1, ..], the whole lengths of packed sequences, the
    same on all ranks, in the order in which rows lie; axes before @dim have size 1. A list, or an integer tensor; one
    on a GPU is read once. None: x is dense, and axes before @dim count samples of one length. The eight last tables are
    kept.
    src, dst: "zigzag" and "block" cut each sequence; "contiguous" cuts the whole axis of packed sequences, so that each rank
    has one interval of it, as scans want it; "whole" (each rank has all rows; the gradients of a "whole" dst are summed over the
    ranks), or "heads": each rank has all rows, of its part of the axis behind @dim, which the ranks divide.
    group: a torch process group, a DeviceMesh of one dim, or a colobridge.Comm. All its ranks call.

    Raises ValueError (a length that the ranks do not divide, by number of the sequence; shapes), RuntimeError (another
    rank failed), TimeoutError, MismatchError (ranks brought other tables).
    """
    return _relayout(x, cu_seqlens, src, dst, _At(group), dim)


class _At:
    """A group, as groups.tell() finds it."""

    def __init__(self, group: Any):
        self.group = group

    @property
    def _talks_to(self) -> Any:
        return self.group if isinstance(self.group, Comm) else groups.counted_of(groups.group_ranks(self.group))


@eager
def _relayout(x: Any, cu_seqlens: Any, src: str, dst: str, at: _At, dim: int) -> Any:
    group = at.group
    size, _ = groups.size_and_rank(group, 'relayout: group')
    for name, cut in (('src', src), ('dst', dst)):
        if cut not in _CUTS:
            raise ArgumentError("relayout: %s is %r, expected one of %s" % (name, cut, ', '.join(_CUTS)))
    if not isinstance(x, torch.Tensor) or not -x.dim() <= integer('dim', dim) < x.dim():
        raise ArgumentError("relayout: x is %s, expected a torch.Tensor with an axis %d" % (said(x, '%(shape)s'), dim))
    dim %= x.dim()
    heads = src == 'heads', dst == 'heads'
    if any(heads) and x.dim() < dim + 2:
        raise ArgumentError("relayout: x is %s, expected an axis of heads behind axis %d" % (list(x.shape), dim))
    if heads[1] and not heads[0] and x.shape[dim + 1] % size:
        raise ArgumentError("relayout: %d heads, expected a multiple of the %d ranks" % (x.shape[dim + 1], size))
    samples = math.prod(x.shape[:dim])
    rows = x.shape[dim] * (size if src in _PARTS else 1)  # of the whole, if it is dense
    if cu_seqlens is not None and samples != 1:
        raise ArgumentError("relayout: x is %s with cu_seqlens, expected axes of size 1 before axis %d"
                            % (list(x.shape), dim))
    if samples > 1 and 'contiguous' in (src, dst):
        raise ArgumentError("relayout: x has %d samples and the cut 'contiguous', which cuts one axis of packed sequences; "
                            "pass 'block', which cuts each sample" % samples)
    packing = _dense(samples, rows) if cu_seqlens is None else _packing(cu_seqlens)
    tables = _cut(packing, src), _cut(packing, dst)
    carry = kept(_bridge, group, size, *heads)
    y = carry.forward(x.reshape(samples * x.shape[dim], math.prod(x.shape[dim + 1:])), *tables)
    return y.view(_shape(x, size, src, dst, dim))
