# SPDX-License-Identifier: Apache-2.0
"""Rows in front of each piece of packed sequences, for convolutions and token shifts: docs/guides/hybrid.md."""
import functools
import math
from typing import Any

import torch

from ..errors import ArgumentError
from ..packing import Packing
from . import ranks as groups
from .bridge import kept
from .calls import eager
from .ready import integer
from .relayout import _PARTS, _At, _bridge, _cuts, _layout, _packing, _ranks
from .tensors import said

@functools.lru_cache(maxsize=8)
def _with_halo(cut: Packing, before: int) -> Packing:
    return cut.with_halo(before)


@functools.lru_cache(maxsize=8)
def _rows(cut: Packing, cp: int, tp: int, rank: int) -> int:
    return cut.rows(rank, _layout(cp, tp, False))


@functools.lru_cache(maxsize=8)
def _begins(cut: Packing, cp: int, tp: int, rank: int, device: Any) -> Any:
    with torch.inference_mode(False):  # a later call's backward may need it
        return torch.tensor(cut.cu_pieces(rank, _layout(cp, tp, False)), dtype=torch.int32, device=device)


def _pieces(*key: Any) -> Any:
    """The same tensor in each call, until its reader writes to it."""
    made = _begins(*key)
    if made._version:
        _begins.cache_clear()
        made = _begins(*key)
    return made


def halo(x: torch.Tensor, cu_seqlens: Any, before: int, *, split: str = 'contiguous', group: Any,
         tp_group: Any = None, src: str | None = None, pad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank, and in front of each piece the rows before it, as a short convolution or a token shift wants them.

    A piece is a maximal run of rows of one sequence that follow each other on one rank; a zigzag rank has up to two of a
    sequence. Rows before a sequence's first are 0. Backward adds up what pieces return of a row: its owner's first, then
    pieces in the order of their first rows, in fp32 for 16-bit dtypes, rounded once. A compiled graph breaks here: it does not
    know how many rows come.

    Args:
        x: [rows, ...], this rank's rows by src, of a float dtype.
        cu_seqlens: [0, L0, L0 + L1, ..], the whole lengths of packed sequences, the same on all ranks; a list, or an integer
            tensor.
        before: rows in front of each piece, >= 0; W - 1 for a causal convolution of width W. They may lie on several ranks.
        split: the cut of the result: "contiguous", "zigzag" or "block", as relayout() has them.
        group: the context ranks: a torch process group, a DeviceMesh of one dim, or a colobridge.Comm. All its ranks call.
        tp_group: the ranks of sequence parallelism, which cut the rows of a context rank into equal parts.
        src: the cut of x, if it is another one than split: then rows change their cut in the same exchange. None: split.
        pad: cu_seqlens are the lengths without padding, which each cut has of its own, as in relayout(). Positions of padding
            are in pieces, too, and 0.

    Returns:
        (rows [rows + before * pieces, ...], cu_pieces [pieces + 1] int32 on x's device): piece i has before rows and then its
        own in rows[cu_pieces[i]:cu_pieces[i + 1]]. Calls with the last eight tables return the same cu_pieces.

    Raises:
        ValueError: a length that the ranks do not divide, by number of the sequence; shapes; another split.
        RuntimeError: another rank failed. TimeoutError. MismatchError: ranks brought other tables.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> def one_rank(world):
        ...     x = torch.arange(4.).view(4, 1) + 4 * world.rank      # of sequences of 5 and 3 positions
        ...     rows, cu = ct.halo(x, [0, 5, 8], before=2, group=world)
        ...     return rows.flatten().tolist(), cu.tolist()
        >>> cb.run_threads(2, one_rank)[1]
        ([2.0, 3.0, 4.0, 0.0, 0.0, 5.0, 6.0, 7.0], [0, 3, 8])
    """
    return _halo(x, cu_seqlens, before, split, _At(group, tp_group), split if src is None else src, bool(pad))


@eager
def _halo(x: Any, cu_seqlens: Any, before: int, split: str, at: _At, src: str, pad: bool) -> Any:
    (cp, c), (tp, t) = (groups.size_and_rank(of, 'halo: ' + name) for name, of in (('group', at.group), ('tp_group', at.tp_group)))
    ranks = None if at.tp_group is None else _ranks(at.group, at.tp_group, 'halo')
    for name, cut in (('split', split), ('src', src)):
        if cut not in _PARTS:
            raise ArgumentError("halo: %s is %r, expected one of %s" % (name, cut, ', '.join(_PARTS)))
    if integer('before', before) < 0:
        raise ArgumentError("halo: before is %d, expected >= 0" % before)
    if not isinstance(x, torch.Tensor) or x.dim() < 1 or not x.is_floating_point():
        raise ArgumentError("halo: x is %s, expected a float tensor of rows" % said(x, '%(dtype)s %(shape)s'))
    of, dst = _cuts(_packing(cu_seqlens), src, split, (cp, tp) if pad else None)
    dst, me = _with_halo(dst, int(before)), c * tp + t
    rows = _rows(of, cp, tp, me)
    if x.shape[0] != rows:
        raise ArgumentError("halo: x has %d rows, expected the %d that this rank has by %s" % (x.shape[0], rows, src))
    group = at.group if ranks is None else groups.comm_of_ranks(groups.counted_of(ranks), x.device)
    carry = kept(_bridge, group, cp, tp, False, False)
    y = carry.forward(x.reshape(rows, math.prod(x.shape[1:])), of, dst)
    return y.view(y.shape[0], *x.shape[1:]), _pieces(dst, cp, tp, me, x.device)
