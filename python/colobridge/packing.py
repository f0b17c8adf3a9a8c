# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which positions of packed sequences; docs/concepts/ragged.md."""
import array
import ctypes as c
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast

from . import _structs as s
from ._lib import call, result
from .errors import ArgumentError
from .layout import Layout, context_of
from .plan import choice
from .tables import Comparable, lengths, require_entries, table

SPLITS = {'block': 0, 'zigzag': 1, 'whole': 2, 'table': 3, 'contiguous': 4}


def _multiples(held: Any, dp: Any, unit: int, contiguous: bool) -> list[int]:
    """What so many positions are padded to."""
    if unit < 1:
        raise ArgumentError("packing: pad_to is %d, expected at least 1" % unit)
    if not contiguous:
        return [n + -n % unit for n in held]
    rooms = list(held)
    last: dict[int, int] = {}
    rows: dict[int, int] = {}
    for q, n in enumerate(held):
        of = 0 if dp is None else int(dp[q])
        last[of], rows[of] = q, rows.get(of, 0) + n
    for of, q in last.items():
        rooms[q] += -rows[of] % unit
    return rooms


class Packing(Comparable):
    """Q packed sequences, and how each of them is cut over context ranks; the same on every rank; immutable.

    A rank holds its replica's sequences in the order of the tables, and of each its own pieces in ascending position. Tables
    are lists, arrays or integer tensors, of which the values are copied; for a tensor in GPU memory the host waits.

    Args:
        cu_seqlens: [Q + 1], [0, L0, L0 + L1, ..]; or seq_len.
        seq_len: [Q], positions of each sequence, padding included.
        split: "block" and "zigzag" cut each sequence, "contiguous" cuts all sequences of a replica at once, so that each
            context rank holds one interval of their rows; "whole": every context rank holds all.
        cp: context ranks of each sequence, an integer for all or [Q]; None: all.
        first: the first context rank of each sequence, as cp; None: 0.
        dp: [Q], the replica that holds each sequence; None: 0.
        pieces: instead of split, cp and first: for each sequence a list of (positions, context rank), which cut it into pieces
            one behind the other.
        pad_to: [Q], how many positions this side has for each sequence, padding included, of which the split cuts all; or an
            integer, of which these are the next multiples ("contiguous": the sum of a replica is one, by positions behind its
            last sequence); None: none but its own. Padding never travels, is 0 at a destination, and gets the gradient 0 at a
            source; the two sides may differ in it.
        halo: as with_halo()'s before.

    Raises:
        ValueError: tables of other kinds or lengths. A bridge, and rows(), check their values.

    Example:
        >>> import colobridge
        >>> packing = colobridge.Packing([0, 4, 12], cp=2)
        >>> packing.positions(0), packing.sequence_ids(0)
        ([0, 3, 0, 1, 6, 7], [0, 0, 1, 1, 1, 1])
    """

    def __init__(self, cu_seqlens: Any = None, *, seq_len: Any = None, split: str = 'zigzag', cp: Any = None,
                 first: Any = None, dp: Any = None, pieces: Any = None, pad_to: Any = None, halo: int = 0):
        held = table('packing', 'seq_len', lengths('packing', 'seq_len', seq_len, 'cu_seqlens', cu_seqlens))
        n = len(held)
        self.split = 'table' if pieces is not None else split
        if pieces is not None and (cp is not None or first is not None or split not in ('zigzag', 'table')):
            raise ArgumentError("packing: pieces are given, and split %r, cp %s and first %s; expected one way to cut sequences"
                                % (split, cp, first))
        if self.split == 'table' and pieces is None:
            raise ArgumentError("packing: split is 'table' without pieces; expected [(positions, rank), ..] of each sequence")
        choice('split', self.split, SPLITS)
        if isinstance(pad_to, int):
            pad_to = _multiples(held, dp, pad_to, self.split == 'contiguous')
        given = {'seq_len': held, 'seq_room': pad_to, 'seq_dp': dp, 'seq_cp': [cp] * n if isinstance(cp, int) else cp,
                 'seq_first': [first] * n if isinstance(first, int) else first}
        if pieces is not None:
            pieces = [list(of) for of in cast(Sequence[Any], pieces)]
            require_entries('packing', 'pieces', pieces, n, 'sequence')
            start = [0, *itertools.accumulate(map(len, pieces))]
            flat = [piece for of in pieces for piece in of]
            for q, piece in ((q, piece) for q, of in enumerate(pieces) for piece in of):
                if len(piece) != 2:
                    raise ArgumentError("packing: sequence %d has the piece %r, expected (positions, context rank)" % (q, piece))
            given.update(piece_start=start, piece_len=[piece[0] for piece in flat], piece_owner=[piece[1] for piece in flat])
        self._tables = {name: None if t is None else table('packing', name, t) for name, t in given.items()}
        for name, said in (('seq_dp', 'dp'), ('seq_cp', 'cp'), ('seq_first', 'first'), ('seq_room', 'pad_to')):
            require_entries('packing', said, self._tables[name], n, 'sequence')
        try:
            self.halo = operator.index(halo)
        except TypeError:
            self.halo = -1
        if not 0 <= self.halo < 1 << 63:
            raise ArgumentError("packing: halo is %r, expected an integer >= 0, of rows" % (halo,))
        self._fill(s.Packing(struct_size=c.sizeof(s.Packing), nseqs=n, split=SPLITS[self.split], halo_before=self.halo),
                   self._tables)
        self._key = b'%s %d ' % (self.split.encode(), self.halo) + self._key
        self._again: dict[str, Any] = {'seq_len': held, 'pad_to': self._tables['seq_room'], 'split': self.split, 'pieces': pieces and [
            [(int(count), int(owner)) for count, owner in of] for of in pieces], 'halo': self.halo}  # the arguments that make it again
        self._again.update((name[4:], self._tables[name]) for name in ('seq_dp', 'seq_cp', 'seq_first'))

    @property
    def seq_len(self) -> list[int]:
        """Positions of each sequence."""
        return list(self._tables['seq_len'] or ())

    def with_split(self, split: str, *, cp: Any = None, first: Any = None, pad_to: Any = None) -> 'Packing':
        """The same sequences on the same replicas, cut in another way. Their padding and halos do not come along.

        Args:
            split: as Packing's, and so are the others.
            cp: context ranks.
            first: the first of them.
            pad_to: positions with padding.

        Returns:
            Another packing.

        Raises:
            ValueError: as Packing().
        """
        return Packing(seq_len=self._tables['seq_len'], dp=self._tables['seq_dp'], split=split, cp=cp, first=first,
                       pad_to=pad_to)

    def with_halo(self, before: int) -> 'Packing':
        """The same packing with rows in front of each piece, for a short convolution or a token shift; of a destination.

        A piece is a maximal run of positions of one sequence that follow each other on one rank; cu_pieces() says where they
        begin. Rows before a sequence's first are 0, and so are those in front of padding alone. A row that a rank lacks travels
        to it once. Its gradient is the sum over all pieces that have it, its own piece first, then by position, in fp32 for
        16-bit dtypes, rounded once.

        Args:
            before: rows in front of each piece, >= 0; W - 1 for a causal convolution of width W. They may lie on several ranks.

        Returns:
            Another packing.

        Raises:
            ValueError: before < 0. A bridge, and rows(), refuse it with the split "whole".
        """
        return Packing(**dict(self._again, halo=before))

    def _layout(self, layout: Any) -> Layout:
        if layout is not None:
            return layout if isinstance(layout, Layout) else Layout.dst(layout)
        cp, owners = self._tables['seq_cp'], self._tables.get('piece_owner')
        if owners is None and cp is None and self.split != 'whole':
            raise ArgumentError("packing: each sequence lies on all context ranks; pass layout= to say how many these are")
        first = self._tables['seq_first']
        n = 1 + max(owners) if owners else max((a + b for a, b in zip(cp, first or [0] * len(cp))), default=1) if cp else 1
        return Layout.dst('cp=%d' % n)

    def rows(self, rank: int, layout: Any = None) -> int:
        """How many rows a rank holds, halos and padding included.

        Args:
            rank: the world rank.
            layout: a Layout, or a grid for Layout.dst(); None: the context ranks that cp, or pieces, tell.

        Returns:
            The rows.

        Raises:
            ValueError: the tables do not fit the layout.
        """
        return result(s.i64, 'colo_packing_rows', self._raw, self._layout(layout)._raw, rank).value

    def _index(self, rank: int, layout: Any) -> 'tuple[array.array[int], array.array[int]]':
        layout = self._layout(layout)
        n = self.rows(rank, layout)
        out = array.array('q', bytes(16 * n))
        call('colo_packing_index', self._raw, layout._raw, rank, out.buffer_info()[0])
        return out[:n], out[n:]

    def positions(self, rank: int, layout: Any = None) -> list[int]:
        """Of each row of a rank, its position in its sequence: position ids. Those of padding go on behind its end, those of a
        halo in front of the sequence are below 0.

        Args:
            rank: the world rank.
            layout: as rows()'s.

        Returns:
            [rows] positions.

        Raises:
            ValueError: as rows().
        """
        return self._index(rank, layout)[0].tolist()

    def sequence_ids(self, rank: int, layout: Any = None) -> list[int]:
        """Of each row of a rank, the number of its sequence.

        Args:
            rank: the world rank.
            layout: as rows()'s.

        Returns:
            [rows] numbers in [0, Q).

        Raises:
            ValueError: as rows().
        """
        return self._index(rank, layout)[1].tolist()

    def cu_seqlens(self, rank: int, layout: Any = None) -> list[int]:
        """Where the sequences begin in the tensor of a rank; those without a row there are left out.

        Args:
            rank: the world rank.
            layout: as rows()'s.

        Returns:
            [0, n0, n0 + n1, ..], in rows.

        Raises:
            ValueError: as rows().
        """
        ids = self._index(rank, layout)[1]
        return [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]] + [len(ids)]

    def cu_pieces(self, rank: int, layout: Any = None) -> list[int]:
        """Where the pieces of a rank, as with_halo() has them, begin in its tensor, each with its halo.

        Args:
            rank: the world rank.
            layout: as rows()'s.

        Returns:
            [0, n0, n0 + n1, ..], in rows.

        Raises:
            ValueError: as rows().

        Example:
            >>> import colobridge
            >>> colobridge.Packing([0, 8, 12], cp=2).with_halo(3).cu_pieces(0)     # positions 0 1, 6 7; 0, 3
            [0, 5, 10, 14, 18]
        """
        layout = self._layout(layout)
        n = result(s.i64, 'colo_packing_pieces', self._raw, layout._raw, rank, None).value
        out = array.array('q', bytes(8 * (n + 1)))
        result(s.i64, 'colo_packing_pieces', self._raw, layout._raw, rank, out.buffer_info()[0])
        return out.tolist()

    def continues(self, rank: int, layout: Any = None) -> bool:
        """Does the first sequence of a rank begin on another rank, so that the state of a scan comes from there?

        Args:
            rank: the world rank.
            layout: as rows()'s.

        Returns:
            Whether it does.

        Raises:
            ValueError: as rows().
        """
        positions = self._index(rank, layout)[0]
        return len(positions) > 0 and positions[0] + self.halo > 0

    def _of(self, replica: int, n: int) -> 'Packing':
        """The sequences of one of @n replicas; all of them, if there is no dp."""
        dp = self._tables['seq_dp']
        if dp is None:
            return self
        for q, of in enumerate(dp):
            if not 0 <= of < n:
                raise ArgumentError("packing: sequence %d is on replica %d, expected one of the %d replicas" % (q, of, n))
        mine = [q for q, of in enumerate(dp) if of == replica]
        given: dict[str, Any] = {name: [t[q] for q in mine] if name not in ('split', 'halo') and t is not None else t
                                 for name, t in dict(self._again, dp=None).items()}
        return Packing(**given)

    def __len__(self) -> int:
        """Sequences."""
        return self._raw.nseqs

    def __reduce__(self) -> Any:
        return functools.partial(Packing, **self._again), ()

    def __repr__(self) -> str:
        tables = ((name, self._tables.get(name)) for name in ('seq_dp', 'seq_cp', 'seq_first', 'piece_len', 'piece_owner'))
        more = ''.join(', %s=%s' % (name.partition('_')[2], list(t[:8])) for name, t in tables if t)
        more += ', halo=%d' % self.halo if self.halo else ''
        return 'Packing(%d sequences of %d positions, %s%s)' % (len(self), sum(self.seq_len), self.split, more)


def joined(parts: dict[int, Packing], cp: int) -> Packing:
    """One packing of the sequences of all replicas, which are cut by one split. cp: context ranks of those that lie on all."""
    def of(name: str, missing: int) -> list[int]:
        return [n for p in parts.values() for n in p._tables[name] or [missing] * len(p)]
    rooms = [n for p in parts.values() for n in p._tables['seq_room'] or p.seq_len]
    halo = max(p.halo for p in parts.values())
    split, replicas = next(p.split for p in parts.values()), [replica for replica, p in parts.items() for _ in range(len(p))]
    if split == 'table':
        return Packing(seq_len=of('seq_len', 0), dp=replicas, split=split, pad_to=rooms,
                       pieces=[pieces for p in parts.values() for pieces in p._again['pieces']], halo=halo)
    cut = split not in ('whole', 'contiguous')
    return Packing(seq_len=of('seq_len', 0), dp=replicas, split=split, pad_to=rooms, cp=of('seq_cp', cp) if cut else None,
                   first=of('seq_first', 0) if cut else None, halo=halo)


class Repacking(Comparable):
    """The tables of a batch from one packing to another; what Segments are to a ragged batch."""

    def __init__(self, src: Packing, dst: Packing):
        for name, packing in (('src', src), ('dst', dst)):
            if not isinstance(packing, Packing):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentError("bridge: %s is a %s, expected colobridge.Packing" % (name, type(packing).__name__))
        self.src, self.dst = self._key = src, dst

    def check(self, src: Layout, dst: Layout) -> None:
        """ValueError when they do not fit a bridge from @src to @dst."""
        self.src.rows(0, src)
        self.dst.rows(0, dst)

    def _sums(self, options: Any, dst: Layout) -> bool:
        """Are gradients added up, over context ranks or pieces."""
        return self.dst.split == 'whole' and context_of(dst) > 1 or self.dst.halo > 0

    def most_rows(self, src: Layout, dst: Layout) -> tuple[int, int]:
        """Rows of the fullest x, and of the fullest y."""
        return cast(tuple[int, int], tuple(result(s.i64, 'colo_packing_most_rows', packing._raw, layout._raw).value
                                           for packing, layout in ((self.src, src), (self.dst, dst))))

    def _batch(self, bridge: Any) -> Any:
        return bridge.set_packing(self.src, self.dst)

    def __repr__(self) -> str:
        return 'src=%r, dst=%r' % (self.src, self.dst)
