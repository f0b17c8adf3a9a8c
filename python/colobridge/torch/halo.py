# SPDX-License-Identifier: Apache-2.0
"""Rows in front of each piece of packed sequences, for convolutions and token shifts: docs/guides/hybrid.md."""
import bisect
import functools
import itertools
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


def _wants(pieces: list[list[_Run]], before: int) -> tuple[list[_Want], list[tuple[int, int, int]]]:
    """Pieces ascending, and of each its rows. And the runs by their first rows: (row, rank, first row of its tensor)"""
    owned = []
    for w, of in enumerate(pieces):
        local = 0
        for run in of:
            owned.append((run.row, w, local))
            local += run.count
    owned.sort()
    begins = [row for row, *_ in owned]
    order = {row: i for i, row in enumerate(begins)}
    ends = [*begins[1:], owned[-1][0] + pieces[owned[-1][1]][-1].count] if owned else []
    wants = []
    for w, of in enumerate(pieces):
        out = 0
        for run in of:
            row, end = run.row - min(before, run.start), run.row
            while row < end:
                i = bisect.bisect_right(begins, row) - 1
                n = min(ends[i], end) - row
                wants.append(_Want(row, n, order[run.row], w, out + before - (end - row), owned[i][1], owned[i][2] + row - begins[i]))
                row += n
            out += before + run.count
    return sorted(wants, key=lambda want: (want.piece, want.row)), owned


def _host(of: Any) -> Any:
    return torch.tensor(of, dtype=torch.int64, device='cpu')


def _rows(begin: Any, count: Any) -> Any:
    """Of intervals: each number in them."""
    skipped = torch.repeat_interleave(begin - (count.cumsum(0) - count), count)
    return torch.arange(len(skipped), device='cpu') + skipped


class _Tables:
    """What one rank does for these lengths, and the packings of what crosses: each row once in forward, an addend for each
    piece in backward. Rows are indices on the host."""

    def __init__(self, pieces: list[list[_Run]], before: int, me: int):
        wants, owned = _wants(pieces, before)
        self.before, self.counts = before, [run.count for run in pieces[me]]
        self.cu = [0, *itertools.accumulate(before + n for n in self.counts)]
        self.rows, counts = self.cu[-1], _host(self.counts)
        self.own = _rows(_host(self.cu[:-1]) + before, counts)  # of each row of x, where it goes
        fields = _host([tuple(want) for want in wants]).reshape(-1, len(_Want._fields)).T
        count = fields[1]
        row, out, local = (_rows(fields[i], count) for i in (0, 4, 6))
        piece, dst, src = (torch.repeat_interleave(fields[i], count) for i in (2, 3, 5))
        here, foreign = (dst == me) & (src == me), dst != src
        self.here = local[here], out[here]
        self.moves = bool(foreign.any())
        # forward: of each rank the rows that it lacks, ascending, as one sequence
        total = 1 + max((run.row + run.count for of in pieces for run in of), default=0)
        crossing = dst[foreign] * total + row[foreign]
        lacks, at = torch.unique(crossing, return_inverse=True)
        begins, ranks, locals_ = _host(owned).reshape(-1, 3).T.contiguous() if owned else _host([[], [], []])
        run = torch.searchsorted(begins, lacks % total, right=True) - 1
        owner = ranks[run]
        self.sent = (locals_[run] + lacks % total - begins[run])[owner == me]
        mine, first = dst[foreign] == me, int((lacks < me * total).sum())
        self.came = at[mine] - first, out[foreign][mine]
        # backward: of each rank all that it has of others' rows, by pieces, as one sequence
        back = torch.sort(dst[foreign], stable=True)[1]
        from_me = src[foreign][back] == me
        addends = torch.cat([local[here], local[foreign][back][from_me]])
        self.layers = self._layers(addends, torch.cat([piece[here], piece[foreign][back][from_me]]))
        if self.moves:
            self.forward = self._packings(lacks // total, owner, len(pieces), True)
            self.backward = self._packings(dst[foreign][back], src[foreign][back], len(pieces), False)

    @staticmethod
    def _layers(rows: Any, pieces: Any) -> list[tuple[Any, Any]]:
        """Which addends come first to each row, which second: (addend, row)"""
        order = torch.sort(pieces, stable=True)[1]
        order = order[torch.sort(rows[order], stable=True)[1]]
        rows = rows[order]
        new = torch.ones(len(rows), dtype=torch.bool, device='cpu')
        new[1:] = rows[1:] != rows[:-1]
        first = new.nonzero().flatten()
        number = torch.arange(len(rows), device='cpu') - first[new.cumsum(0) - 1]
        return [(order[number == k], rows[number == k]) for k in range(int(number.max()) + 1 if len(rows) else 0)]

    @staticmethod
    def _packings(at: Any, owners: Any, size: int, gathers: bool) -> tuple[Packing, Packing]:
        """Of sequences that lie on their rank on one side, @at ascending, on their @owners on the other."""
        lengths = torch.bincount(at, minlength=size).tolist()
        spread: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        runs, counts = torch.unique_consecutive(at * size + owners, return_counts=True)
        for of, n in zip(runs.tolist(), counts.tolist()):
            spread[of // size].append((n, of % size))
        far = Packing(seq_len=lengths, pieces=spread)
        near = Packing(seq_len=lengths, pieces=[[(n, w)] for w, n in enumerate(lengths)])
        return (far, near) if gathers else (near, far)


_FEW = 4  # pieces that are copied as intervals; the rows of more are cheaper by an index of each


class _Index:
    """The tables as tensors of one device; None: without a row. Rows in front of @few pieces are put together first."""

    def __init__(self, tables: _Tables, device: Any):
        pieces = len(tables.counts)
        self.tables, self.few = tables, 0 < pieces <= _FEW
        self.fronts = [tables.before] * pieces
        self.parts = [n for count in tables.counts for n in (tables.before, count)]
        self.cu = torch.tensor(tables.cu, dtype=torch.int32, device=device)
        self.own, self.sent = tables.own.to(device), tables.sent.to(device)

        def pair(rows: Any, out: Any) -> Any:
            """Rows, where they go in forward, and in the result"""
            at = out
            if self.few:
                skipped = torch.searchsorted(_host(tables.cu), out, right=True)
                at = out - _host([0, *itertools.accumulate(tables.counts)])[skipped - 1]
            return tuple(t.to(device) for t in (rows, at, out)) if len(out) else None
        self.here, self.came = pair(*tables.here), pair(*tables.came)
        self.layers = []  # of which the first has all rows that have addends
        for addends, rows in tables.layers:
            self.layers.append((addends.to(device), (torch.searchsorted(tables.layers[0][1], rows) if self.layers else rows).to(device)))


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
    ctx.index, ctx.carry, tables = index, carry, index.tables
    out = x.new_zeros(sum(index.fronts) if index.few else tables.rows, x.shape[1])
    if not index.few:
        out.index_copy_(0, index.own, x)
    if index.here is not None:
        rows, at, _ = index.here
        out.index_copy_(0, at, x.index_select(0, rows))
    if carry is not None:
        y = carry.forward(x.index_select(0, index.sent), *tables.forward)
        if index.came is not None:
            rows, at, _ = index.came
            out.index_copy_(0, at, y.index_select(0, rows))
    if not index.few:
        return out
    return torch.cat([part for both in zip(out.split(index.fronts), x.split(tables.counts)) for part in both])


@Halo.adjoint
def _(ctx: Any, d_out: torch.Tensor) -> Any:
    index, addends = ctx.index, []
    if index.here is not None:
        addends.append(d_out.index_select(0, index.here[2]))
    if ctx.carry is not None:
        sent = d_out.index_select(0, index.came[2]) if index.came is not None else d_out[:0]
        addends.append(ctx.carry.forward(sent, *index.tables.backward))
    d_x = torch.cat(d_out.split(index.parts)[1::2]) if index.few else d_out.index_select(0, index.own)
    if index.layers:
        wide = torch.float32 if d_out.dtype in (torch.float16, torch.bfloat16) else d_out.dtype
        (which, rows), *more = index.layers
        added = torch.cat(addends) if len(addends) > 1 else addends[0]
        total = d_x.index_select(0, rows).to(wide) + added.index_select(0, which).to(wide)
        for which, at in more:  # one addend of a row at a time: a fixed order, and one rounding
            total.index_add_(0, at, added.index_select(0, which).to(wide))
        d_x.index_copy_(0, rows, total.to(d_out.dtype))
    return d_x, None, None


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
    rows = len(index.own)
    if x.shape[0] != rows:
        raise ArgumentError("halo: x has %d rows, expected the %d that this rank has by %s" % (x.shape[0], rows, split))
    carry = None
    if index.tables.moves:
        group = at.group if ranks is None else groups.comm_of_ranks(groups.counted_of(ranks), x.device)
        carry = kept(_bridge, group, cp * tp)
    flat = x.reshape(rows, math.prod(x.shape[1:]))
    return Halo.apply(flat, index, carry).view(-1 if flat.shape[1] else index.tables.rows, *x.shape[1:]), index.cu
