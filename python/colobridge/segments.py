# SPDX-License-Identifier: Apache-2.0
"""The tables of a ragged batch, and the balance of segments over replicas; docs/concepts/ragged.md."""
import array
import ctypes as c
import functools
from collections.abc import Iterable
from typing import Any, Literal, overload

from . import _structs as s
from ._lib import call, lib
from .comm import Comm
from .errors import ArgumentError
from .layout import Layout, context_of
from .packing import Packing
from .tables import Comparable, lengths, one_of, require_entries, table

_TABLES = ('rows', 'src', 'seq', 'pos', 'row_pos', 'seq_len', 'seq_dp')  # as arguments
_MEMBERS = ('rows', 'src_dp', 'seq', 'pos', 'row_pos', 'seq_len', 'seq_dp')  # of colo_segments_t


class Segments(Comparable):
    """The tables of a ragged batch, the same on every rank; immutable.

    A segment is an image or a clip: rows that stay together. What a table may be: docs/concepts/ragged.md#from-python.

    Args:
        rows: [segments], how many rows each has; or cu_rows.
        src: [segments], the encoder replica that makes it.
        seq: [segments], the sequence that it is part of.
        pos: [segments], the position of its first row there; or row_pos.
        seq_len: [sequences], positions of each sequence, padding included; or cu_seqlens.
        seq_dp: [sequences], the LLM replica that holds it.
        row_pos: [rows], the position of every row.
        cu_rows: [segments + 1], [0, n0, n0 + n1, ..].
        cu_seqlens: [sequences + 1], as cu_rows.
        packing: in place of seq_len and seq_dp, a Packing, whose sequences may lie on context ranks of their own.

    Raises:
        ValueError: tables of other kinds or lengths. The bridge checks their values.

    Example:
        >>> import colobridge
        >>> colobridge.Segments([2, 3], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])
        Segments(2 segments of 5 rows in 1 sequences of 8 positions)
    """

    def __init__(self, rows: Any = None, *, src: Any, seq: Any, pos: Any = None, seq_len: Any = None,
                 seq_dp: Any = None, row_pos: Any = None, cu_rows: Any = None, cu_seqlens: Any = None,
                 packing: Packing | None = None):
        rows = lengths('segments', 'rows', rows, 'cu_rows', cu_rows)
        if packing is None:
            seq_len = lengths('segments', 'seq_len', seq_len, 'cu_seqlens', cu_seqlens)
        elif seq_len is not None or cu_seqlens is not None or seq_dp is not None:
            raise ArgumentError("segments: packing is given, and %s, which it has" % next(
                name for name, t in (('seq_len', seq_len), ('cu_seqlens', cu_seqlens), ('seq_dp', seq_dp)) if t is not None))
        one_of('segments', ('pos', pos), ('row_pos', row_pos))
        given = {'rows': rows, 'src': src, 'seq': seq, 'pos': pos, 'row_pos': row_pos,
                 'seq_len': seq_len, 'seq_dp': seq_dp}
        tables = {name: None if t is None else table('segments', name, t) for name, t in given.items()}
        held = tables['rows'] or ()
        count, total = len(held), 0 if row_pos is None else sum(n for n in held if n > 0)
        for name, t in tables.items():
            require_entries('segments', name, t, *(
                (len(tables['seq_len'] or ()), 'sequence') if name.startswith('seq_') else
                (total, 'row') if name == 'row_pos' else (count, 'segment')))
        self._tables, self.packing = tables, packing
        self._fill(s.Segments(struct_size=c.sizeof(s.Segments), count=len(tables['rows'] or ()),
                              nseqs=len(tables['seq_len'] or ())), {m: tables[n] for n, m in zip(_TABLES, _MEMBERS)})
        if packing is not None:
            self._key += packing._key
            self._raw.packing = c.pointer(packing._raw)

    @classmethod
    def gather(cls, local: 'Segments | None', group: Any) -> 'Segments':
        """The tables of all ranks of a group, in rank order, from those that each rank has; collective. One exchange on the
        host, two if the tables of a rank take more than 4,056 bytes; nothing waits for a GPU.

        Args:
            local: segments and sequences of this rank only; seq counts its own sequences from 0, src and seq_dp are global.
                None: this rank adds nothing. If several ranks know the same samples, along tp or cp, only one of them brings
                them.
            group: a colobridge.Comm, a torch process group, or a DeviceMesh.

        Returns:
            The tables, the same on all ranks.

        Raises:
            ValueError: tables of this rank.
            RuntimeError: on the other ranks.
            TimeoutError: a rank did not come.
        """
        if not isinstance(group, Comm):
            import torch
            from .torch.ranks import comm_of
            group = comm_of(group, torch.device('cpu'), 'segments: group', whole=True)
        if local is not None and not isinstance(local, Segments):  # pyright: ignore[reportUnnecessaryIsInstance]
            with group._telling():
                raise ArgumentError("segments: local is a %s, expected Segments or None" % type(local).__name__)
        made = c.POINTER(s.Segments)()
        call('colo_segments_gather', c.byref(made), None if local is None else local._raw, group.handle)
        try:
            raw = made.contents
            total = sum((s.i64 * raw.count).from_address(raw.rows)) if raw.count else 0
            sizes = (raw.count,) * 4 + (total,) + (raw.nseqs,) * 2
            scattered = bool(raw.row_pos)
            tables: dict[str, Any] = {}
            for name, member, n in zip(_TABLES, _MEMBERS, sizes):
                t = array.array('q')
                if n:
                    t.frombytes(c.string_at(getattr(raw, member), 8 * n)
                                    if getattr(raw, member) else b'')
                tables[name] = None if name == ('pos' if scattered else 'row_pos') else t
        finally:
            lib().colo_segments_free(c.byref(made))
        return cls(**tables)

    def check(self, src: Layout, dst: Layout) -> None:
        """Do the tables fit a bridge?

        Args:
            src: the bridge's source layout.
            dst: its destination layout.

        Raises:
            ValueError: they do not; it names the segment or the sequence.
        """
        call('colo_segments_check', self._raw, src._raw, dst._raw)

    def __len__(self) -> int:
        """Segments."""
        return self._raw.count

    def __reduce__(self) -> Any:
        return functools.partial(Segments, **self._tables, packing=self.packing), ()

    def _sums(self, options: Any, dst: Layout) -> bool:
        """Are gradients added up over context ranks."""
        return (options['output'], options['grad']) == ('full', 'partial') and context_of(dst) > 1

    def _batch(self, bridge: Any) -> Any:
        return bridge.set_segments(self)

    def __repr__(self) -> str:
        return 'Segments(%d segments of %d rows in %d sequences of %d positions)' % (
            len(self), sum(self._tables['rows'] or ()), *(
                (self._raw.nseqs, sum(self._tables['seq_len'] or ())) if self.packing is None else
                (len(self.packing), sum(self.packing.seq_len))))


def _property(name: str) -> property:
    def get(self: Segments) -> list[int] | None:
        held = self._tables[name]
        return None if held is None else held.tolist()
    return property(get)


for _name in _TABLES:
    setattr(Segments, _name, _property(_name))


@overload
def balance(cost: Iterable[int], n: int, *, current: Iterable[int] | None = None, stick: float = 0.0,
            lists: Literal[False] = False) -> list[int]: ...
@overload
def balance(cost: Iterable[int], n: int, *, current: Iterable[int] | None = None, stick: float = 0.0,
            lists: Literal[True]) -> list[list[int]]: ...


def balance(cost: Any, n: int, *, current: Any = None, stick: float = 0.0, lists: bool = False) -> Any:
    """A replica in [0, n) for each segment, so that the sums of their costs are alike; deterministic.

    Segments go by descending cost to the least loaded replica.

    Args:
        cost: of each segment, integers of at least 0 in any unit.
        n: how many replicas.
        current: where each one is; it stays if the load there is at most (1 + stick) times the mean.
        stick: see current.
        lists: return the segments of each replica, ascending.

    Returns:
        The replica of each segment, or of lists the segments of each replica.

    Raises:
        ValueError: names the segment.

    Example:
        >>> import colobridge
        >>> colobridge.balance([3, 1, 2], 2)
        [0, 1, 1]
    """
    costs = table('segments', 'cost', cost)
    now = None if current is None else table('segments', 'current', current)
    require_entries('balance', 'current', now, len(costs), 'cost')
    out = array.array('q', bytes(8 * len(costs)))
    call('colo_segments_balance', out.buffer_info()[0], costs.buffer_info()[0], len(costs), n,
         None if now is None else now.buffer_info()[0], stick)
    if not lists:
        return out.tolist()
    of: list[list[int]] = [[] for _ in range(n)]
    for segment, replica in enumerate(out):
        of[replica].append(segment)
    return of
