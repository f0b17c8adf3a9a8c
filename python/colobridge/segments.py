# SPDX-License-Identifier: Apache-2.0
"""The tables of a ragged batch, and the balance of segments over replicas; docs/ragged.md."""
from __future__ import annotations

import array
import ctypes as c
from typing import Any, cast

from . import _structs as s
from ._lib import call, lib
from .comm import Comm
from .errors import ArgumentError
from .layout import Layout
from .tensor import view

_TABLES = ('rows', 'src', 'seq', 'pos', 'row_pos', 'seq_len', 'seq_dp')  # as arguments
_MEMBERS = ('rows', 'src_dp', 'seq', 'pos', 'row_pos', 'seq_len', 'seq_dp')  # of colo_segments_t


class Segments:
    """The tables of a ragged batch, the same on every rank; immutable.

    A segment is an image or a clip: rows that stay together. rows: how many each has. src: the encoder
    replica that makes it. seq: the sequence that it is part of, and pos: the position of its first row
    there; row_pos instead of pos: the position of every row. seq_len: positions of each sequence, padding
    included. seq_dp: the LLM replica that holds it.

    A table is a list, an array, or an integer tensor, of which the values are copied: a later change of it
    has no effect. If a tensor is in GPU memory, the host waits for it. cu_rows and cu_seqlens are
    cumulative lengths, [0, n0, n0 + n1, ..], and replace rows and seq_len. A nested tensor of torch as rows or
    seq_len stands for the lengths of its parts.

    Raises ValueError: tables of other kinds or lengths. The bridge checks their values.
    """

    def __init__(self, rows: Any = None, *, src: Any, seq: Any, pos: Any = None, seq_len: Any = None,
                 seq_dp: Any, row_pos: Any = None, cu_rows: Any = None, cu_seqlens: Any = None):
        rows = _lengths('rows', rows, 'cu_rows', cu_rows)
        seq_len = _lengths('seq_len', seq_len, 'cu_seqlens', cu_seqlens)
        if (pos is None) == (row_pos is None):
            raise ArgumentError("segments: %s pos and row_pos are given; expected one of them"
                                % ('neither of' if pos is None else 'both'))
        given = {'rows': rows, 'src': src, 'seq': seq, 'pos': pos, 'row_pos': row_pos,
                 'seq_len': seq_len, 'seq_dp': seq_dp}
        tables = {name: None if table is None else _table(name, table) for name, table in given.items()}
        held = tables['rows'] or ()
        count, total = len(held), 0 if row_pos is None else sum(n for n in held if n > 0)
        for name, table in tables.items():
            need = len(tables['seq_len'] or ()) if name.startswith('seq_') else total if name == 'row_pos' else count
            if table is not None and len(table) != need:
                raise ArgumentError("segments: %s has %d entries, expected %d, one for each %s" % (
                    name, len(table), need, 'sequence' if name.startswith('seq_') else
                    'row' if name == 'row_pos' else 'segment'))
        self._set(tables)

    def _set(self, tables: dict[str, array.array[int] | None]) -> None:
        self._tables = tables
        self._key = b'|'.join(b'-' if t is None else t.tobytes() for t in tables.values())
        self._raw = s.Segments(struct_size=c.sizeof(s.Segments), count=len(tables['rows'] or ()),
                               nseqs=len(tables['seq_len'] or ()))
        for name, member in zip(_TABLES, _MEMBERS):
            table = tables[name]
            if table:
                setattr(self._raw, member, c.cast(table.buffer_info()[0], c.POINTER(s.i64)))

    @classmethod
    def gather(cls, local: 'Segments | None', group: Any) -> 'Segments':
        """The tables of all ranks of @group, in rank order, from those that each rank has; collective. One
        exchange on the host, two if the tables of a rank take more than 4,056 bytes; nothing waits for a GPU.

        local: segments and sequences of this rank only; seq counts its own sequences from 0, src and
        seq_dp are global. None: this rank adds nothing. If several ranks know the same samples, along tp or
        cp, only one of them brings them. group: a colobridge.Comm or a torch process group.
        Raises ValueError, on the other ranks RuntimeError; TimeoutError.
        """
        if not isinstance(group, Comm):
            import torch
            from .torch.ranks import comm_of
            group = comm_of(group, torch.device('cpu'), 'segments: group')
        if local is not None and not isinstance(local, Segments):  # pyright: ignore[reportUnnecessaryIsInstance]
            with group._telling():
                raise ArgumentError("segments: local is a %s, expected Segments or None" % type(local).__name__)
        made = c.POINTER(s.Segments)()
        call('colo_segments_gather', c.byref(made), None if local is None else local._raw, group.handle)
        try:
            raw, out = made.contents, cls.__new__(cls)
            total = sum(raw.rows[:raw.count])
            sizes = (raw.count,) * 4 + (total,) + (raw.nseqs,) * 2
            scattered = bool(raw.row_pos)
            tables: dict[str, array.array[int] | None] = {}
            for name, member, n in zip(_TABLES, _MEMBERS, sizes):
                table = array.array('q')
                if n:
                    table.frombytes(c.string_at(getattr(raw, member), 8 * n)
                                    if getattr(raw, member) else b'')
                tables[name] = None if name == ('pos' if scattered else 'row_pos') else table
            out._set(tables)
        finally:
            lib().colo_segments_free(c.byref(made))
        return out

    def check(self, src: Layout, dst: Layout) -> None:
        """ValueError when the tables do not fit a bridge from @src to @dst; it names the segment or the
        sequence."""
        call('colo_segments_check', self._raw, src._raw, dst._raw)

    def __len__(self) -> int:
        """Segments."""
        return self._raw.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> Any:
        return _again, tuple(self._tables.values())

    def __repr__(self) -> str:
        return 'Segments(%d segments of %d rows in %d sequences of %d positions)' % (
            len(self), sum(self._tables['rows'] or ()), self._raw.nseqs, sum(self._tables['seq_len'] or ()))


def _property(name: str) -> property:
    def table(self: Segments) -> list[int] | None:
        held = self._tables[name]
        return None if held is None else held.tolist()
    return property(table)


for _name in _TABLES:
    setattr(Segments, _name, _property(_name))


def _again(rows: Any, src: Any, seq: Any, pos: Any, row_pos: Any, seq_len: Any, seq_dp: Any) -> Segments:
    return Segments(rows, src=src, seq=seq, pos=pos, row_pos=row_pos, seq_len=seq_len, seq_dp=seq_dp)


def _lengths(name: str, lengths: Any, cu_name: str, cu: Any) -> Any:
    """One of the two, as lengths."""
    if (lengths is None) == (cu is None):
        raise ArgumentError("segments: %s %s and %s are given; expected one of them"
                            % ('neither of' if cu is None else 'both', name, cu_name))
    if cu is None:
        return part_lengths(lengths, name) if getattr(lengths, 'is_nested', False) else lengths
    edges = _table(cu_name, cu)
    if not edges or edges[0] != 0:
        raise ArgumentError("segments: %s begins with %s, expected 0: cumulative lengths"
                            % (cu_name, edges[0] if edges else 'nothing'))
    out = array.array('q', (b - a for a, b in zip(edges, edges[1:])))
    for i, n in enumerate(out):
        if n < 0:
            raise ArgumentError("segments: %s[%d] is %d after %d; cumulative lengths do not descend"
                                % (cu_name, i + 1, edges[i + 1], edges[i]))
    return out


def part_lengths(t: Any, name: str) -> list[int]:
    """Lengths of the parts of a nested tensor of torch, jagged or strided."""
    lengths: Any = getattr(t, 'lengths', None)  # of a jagged one with holes
    held: Any = lengths() if callable(lengths) else None
    if held is not None:
        return held.tolist()
    offsets: Any = getattr(t, 'offsets', None)
    if callable(offsets):
        edges: list[int] = cast(Any, offsets()).tolist()
        return [b - a for a, b in zip(edges, edges[1:])]
    return [len(part) for part in t.unbind()]


def _table(name: str, values: Any) -> array.array[int]:
    """A copy of integers as i64."""
    if hasattr(values, 'is_cuda'):
        values = values.detach().cpu()
    if hasattr(values, 'data_ptr') or hasattr(values, '__array_interface__'):
        raw = view(values, 'segments: ' + name)
        kind = s.DTYPES[cast(int, raw.dtype)]
        if raw.ndim != 1 or kind[0] not in 'iu' or str(values.dtype).endswith('bool'):
            raise ArgumentError("segments: %s is a tensor of %d axes of %s, expected 1 axis of integers"
                                % (name, raw.ndim, values.dtype))
        n = raw.shape[0]
        if kind in ('i64', 'i32') and (n < 2 or raw.stride[0] == 1):
            out = array.array('q' if kind == 'i64' else 'i')
            out.frombytes(c.string_at(raw.data, n * out.itemsize) if n else b'')
            return out if kind == 'i64' else array.array('q', out)
        values = values.tolist()
    try:
        return array.array('q', values)
    except (TypeError, OverflowError) as why:
        raise ArgumentError("segments: %s is a %s, expected integers of at most 64 bits (%s)"
                            % (name, type(values).__name__, why)) from None


def balance(cost: Any, n: int, *, current: Any = None, stick: float = 0.0, lists: bool = False) -> Any:
    """A replica in [0, n) for each segment, so that the sums of their costs are alike; deterministic.
    Segments go by descending cost to the least loaded replica. current: where each one is; it stays if the
    load there is at most (1 + stick) times the mean. lists: the segments of each replica, ascending, instead of
    the replica of each segment. ValueError: names the segment."""
    costs = _table('cost', cost)
    now = None if current is None else _table('current', current)
    if now is not None and len(now) != len(costs):
        raise ArgumentError("balance: current has %d entries, expected %d, one for each cost"
                            % (len(now), len(costs)))
    out = array.array('q', bytes(8 * len(costs)))
    call('colo_balance', out.buffer_info()[0], costs.buffer_info()[0], len(costs), n,
         None if now is None else now.buffer_info()[0], stick)
    if not lists:
        return out.tolist()
    of: list[list[int]] = [[] for _ in range(n)]
    for segment, replica in enumerate(out):
        of[replica].append(segment)
    return of
