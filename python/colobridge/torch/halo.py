# SPDX-License-Identifier: Apache-2.0
"""Rows in front of each piece of packed sequences, for convolutions and token shifts: docs/guides/hybrid.md."""
import bisect
import functools
import math
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..layout import Layout
from ..packing import Packing
from . import ranks as groups
from .bridge import PackedBridge, kept
from .calls import eager
from .functions import Function
from .ready import integer
from .relayout import _At, _cut, _layout, _packing, _ranks
from .tensors import said

_CUTS = ('contiguous', 'zigzag', 'block')


class _Run(NamedTuple):
    """Rows of one sequence that follow each other on one rank: row is its first of all rows, start its position."""
    row: int
    start: int
    count: int  # type: ignore[assignment]


def _pieces(lengths: list[int], split: str, cp: int, tp: int) -> list[list[_Run]]:
    """Of each rank, tp the faster dim, in the order of its tensor."""
    out: list[list[_Run]] = []
    share = sum(lengths) // cp
    for c in range(cp):
        runs, row = [], 0
        for n in lengths:
            if split == 'contiguous':
                ends = [(max(c * share, row) - row, min((c + 1) * share, row + n) - row)]
            elif split == 'block' or cp == 1:
                ends = [(c * (n // cp), (c + 1) * (n // cp))]
            else:
                each = n // (2 * cp)
                ends = [(k * each, (k + 1) * each) for k in (c, 2 * cp - 1 - c)]
            for a, b in ends:
                if a >= b:
                    continue
                if runs and runs[-1].row + runs[-1].count == row + a and a > 0:  # the middle of a zigzag
                    runs[-1] = runs[-1]._replace(count=runs[-1].count + b - a)
                else:
                    runs.append(_Run(row + a, a, b - a))
            row += n
        each = sum(run.count for run in runs) // tp
        parts: list[list[_Run]] = [[] for _ in range(tp)]
        at = 0
        for run in runs:
            done = 0
            while done < run.count:
                part = (at + done) // each
                count = min(run.count - done, (part + 1) * each - at - done)
                parts[part].append(_Run(run.row + done, run.start + done, count))
                done += count
            at += run.count
        out += parts
    return out


class _Want(NamedTuple):
    """Rows in front of a piece: which rank wants them from which, and where they lie there and here."""
    row: int
    count: int  # type: ignore[assignment]
    piece: int  # by its first row, over all ranks
    dst: int
    out: int
    src: int
    local: int


def _wants(pieces: list[list[_Run]], before: int) -> list[_Want]:
    """Pieces ascending, and of each its rows."""
    owned = sorted((run.row, run.count, w, sum(r.count for r in of[:i])) for w, of in enumerate(pieces) for i, run in enumerate(of))
    begins = [row for row, *_ in owned]
    order = {row: i for i, row in enumerate(begins)}
    wants = []
    for w, of in enumerate(pieces):
        out = 0
        for run in of:
            row, end = run.row - min(before, run.start), run.row
            while row < end:
                first, count, src, local = owned[bisect.bisect_right(begins, row) - 1]
                n = min(first + count, end) - row
                wants.append(_Want(row, n, order[run.row], w, out + before - (end - row), src, local + row - first))
                row += n
            out += before + run.count
    return sorted(wants, key=lambda want: (want.piece, want.row))


class _Tables:
    """What one rank does for these lengths, and the packings of what crosses: each row once in forward, an addend for each
    piece in backward."""

    def __init__(self, pieces: list[list[_Run]], before: int, me: int):
        wants, ranks = _wants(pieces, before), range(len(pieces))
        foreign = [want for want in wants if want.src != want.dst]
        self.rows = sum(before + run.count for run in pieces[me])
        self.cu = [0]
        self.own: list[int] = []  # of each row of x, where it goes
        for run in pieces[me]:
            self.own += range(self.cu[-1] + before, self.cu[-1] + before + run.count)
            self.cu.append(self.cu[-1] + before + run.count)

        def rows(of: list[_Want], begin: str) -> list[int]:
            return [getattr(want, begin) + i for want in of for i in range(want.count)]
        here = [want for want in wants if want.dst == me and want.src == me]
        self.here = rows(here, 'local'), rows(here, 'out')
        # forward: of each rank the rows that it lacks, ascending, as one sequence
        owner = {row: (want.src, local) for want in foreign for row, local in zip(rows([want], 'row'), rows([want], 'local'))}
        lacks = [sorted(set(rows([want for want in foreign if want.dst == w], 'row'))) for w in ranks]
        self.sent = [owner[row][1] for of in lacks for row in of if owner[row][0] == me]
        mine = [want for want in foreign if want.dst == me]
        at = {row: i for i, row in enumerate(lacks[me])}
        self.came = [at[row] for row in rows(mine, 'row')], rows(mine, 'out')
        # backward: of each rank all that it has of others' rows, by pieces, as one sequence
        back = [[want for want in foreign if want.dst == w] for w in ranks]
        addends = [(want.piece, local) for want in here for local in rows([want], 'local')]
        addends += [(want.piece, local) for of in back for want in of if want.src == me for local in rows([want], 'local')]
        self.layers = self._layers(addends)
        self.moves = bool(foreign)
        if foreign:
            self.forward = self._packings([[owner[row][0] for row in of] for of in lacks], True)
            self.backward = self._packings([[want.src for want in of for _ in range(want.count)] for of in back], False)

    @staticmethod
    def _layers(addends: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
        """Which addends come first to each row, which second: (addend, row)"""
        count: dict[int, int] = {}
        layers: list[tuple[list[int], list[int]]] = []
        for i, (_, row) in sorted(enumerate(addends), key=lambda of: of[1][0]):
            k = count[row] = count.get(row, -1) + 1
            if k == len(layers):
                layers.append(([], []))
            layers[k][0].append(i)
            layers[k][1].append(row)
        return layers

    @staticmethod
    def _packings(owners: list[list[int]], gathers: bool) -> tuple[Packing, Packing]:
        """Of sequences that lie on their rank on one side, on their @owners on the other."""
        lengths = [len(of) for of in owners]
        spread = []
        for of in owners:
            pieces: list[tuple[int, int]] = []
            for w in of:
                if pieces and pieces[-1][1] == w:
                    pieces[-1] = pieces[-1][0] + 1, w
                else:
                    pieces.append((1, w))
            spread.append(pieces)
        far = Packing(seq_len=lengths, pieces=spread)
        near = Packing(seq_len=lengths, pieces=[[(n, w)] for w, n in enumerate(lengths)])
        return (far, near) if gathers else (near, far)


class _Index:
    """The tables as tensors of one device."""

    def __init__(self, tables: _Tables, device: Any):
        def made(of: Any) -> Any:
            return torch.tensor(of, dtype=torch.long, device=device)
        self.tables, self.own, self.sent = tables, made(tables.own), made(tables.sent)
        self.here, self.came = ([made(of) for of in pair] for pair in (tables.here, tables.came))
        self.layers = [(made(addends), made(rows)) for addends, rows in tables.layers]
        self.cu = torch.tensor(tables.cu, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=8)
def _index(packing: Packing, split: str, cp: int, tp: int, before: int, me: int, device: Any) -> _Index:
    cut, layout = _cut(packing, split, None), _layout(cp, tp, False)
    cut.rows(me, layout)  # refuses what does not divide, by number of the sequence
    return _Index(_Tables(_pieces(cut.seq_len, split, cp, tp), before, me), device)


@functools.lru_cache(maxsize=8)
def _line(size: int) -> Layout:
    return Layout.dst('cp=%d' % size)


def _bridge(group: Any, size: int) -> PackedBridge:
    return PackedBridge(_line(size), _line(size), group=group, frozen=True)


@Function
def Halo(ctx: Any, x: torch.Tensor, index: _Index, carry: PackedBridge | None) -> torch.Tensor:
    """x: [rows, features]"""
    ctx.index, ctx.carry = index, carry
    out = x.new_zeros(index.tables.rows, x.shape[1])
    out[index.own] = x
    out[index.here[1]] = x[index.here[0]]
    if carry is not None:
        y = carry.forward(x[index.sent], *index.tables.forward)
        out[index.came[1]] = y[index.came[0]]
    return out


@Halo.adjoint
def _(ctx: Any, d_out: torch.Tensor) -> Any:
    index, addends = ctx.index, [d_out[ctx.index.here[1]]]
    if ctx.carry is not None:
        addends.append(ctx.carry.forward(d_out[index.came[1]], *index.tables.backward))
    wide = torch.float32 if d_out.dtype in (torch.float16, torch.bfloat16) else d_out.dtype
    d_x, more = d_out[index.own].to(wide), torch.cat(addends).to(wide)
    for which, rows in index.layers:  # one addend of a row at a time: a fixed order, and one rounding
        d_x[rows] += more[which]
    return d_x.to(d_out.dtype), None, None


def halo(x: torch.Tensor, cu_seqlens: Any, before: int, *, split: str = 'contiguous', group: Any,
         tp_group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank, and in front of each piece the rows before it, as a short convolution or a token shift wants them.

    A piece is a maximal run of rows of one sequence that follow each other on one rank; a zigzag rank has up to two of a
    sequence. Rows before a sequence's first are 0. Backward adds up what pieces return of a row: its owner's first, then
    pieces in the order of their first rows, in fp32 for 16-bit dtypes, rounded once.

    Args:
        x: [rows, ...], this rank's rows by @split, of a float dtype.
        cu_seqlens: [0, L0, L0 + L1, ..], the whole lengths of packed sequences, the same on all ranks; a list, or an integer
            tensor.
        before: rows in front of each piece, >= 0; W - 1 for a causal convolution of width W. They may lie on several ranks.
        split: "contiguous", "zigzag" or "block", as relayout() has them.
        group: the context ranks: a torch process group, a DeviceMesh of one dim, or a colobridge.Comm. All its ranks call.
        tp_group: the ranks of sequence parallelism, which cut the rows of a context rank into equal parts.

    Returns:
        (rows [rows + before * pieces, ...], cu_pieces [pieces + 1] int32 on x's device): piece i has before rows and then its
        own in rows[cu_pieces[i]:cu_pieces[i + 1]].

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
    return _halo(x, cu_seqlens, before, split, _At(group, tp_group))


@eager
def _halo(x: Any, cu_seqlens: Any, before: int, split: str, at: _At) -> Any:
    (cp, c), (tp, t) = (groups.size_and_rank(of, 'halo: ' + name) for name, of in (('group', at.group), ('tp_group', at.tp_group)))
    ranks = None if at.tp_group is None else _ranks(at.group, at.tp_group, 'halo')
    if split not in _CUTS:
        raise ArgumentError("halo: split is %r, expected one of %s" % (split, ', '.join(_CUTS)))
    if integer('before', before) < 0:
        raise ArgumentError("halo: before is %d, expected >= 0" % before)
    if not isinstance(x, torch.Tensor) or x.dim() < 1 or not x.is_floating_point():
        raise ArgumentError("halo: x is %s, expected a float tensor of rows" % said(x, '%(dtype)s %(shape)s'))
    index = _index(_packing(cu_seqlens), split, cp, tp, before, c * tp + t, x.device)
    rows = len(index.tables.own)
    if x.shape[0] != rows:
        raise ArgumentError("halo: x has %d rows, expected the %d that this rank has by %s" % (x.shape[0], rows, split))
    carry = None
    if index.tables.moves:
        group = at.group if ranks is None else groups.comm_of_ranks(groups.counted_of(ranks), x.device)
        carry = kept(_bridge, group, cp * tp)
    flat = x.reshape(rows, math.prod(x.shape[1:]))
    return Halo.apply(flat, index, carry).view(-1 if flat.shape[1] else index.tables.rows, *x.shape[1:]), index.cu
