# SPDX-License-Identifier: Apache-2.0
"""Which elements of a [samples, rows, features] tensor each rank of a grid owns; docs/concepts/layouts.md."""
import ctypes as c
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _structs as s
from ._lib import call, lib, text
from .grid import Grid, _joined

_AXES = {'samples': s.AXIS_SAMPLES, 'rows': s.AXIS_ROWS, 'features': s.AXIS_FEATURES}
_KINDS = {'replicate': s.SPLIT_REPLICATE, 'block': s.SPLIT_BLOCK, 'zigzag': s.SPLIT_ZIGZAG, 'ceil': s.SPLIT_CEIL}


@dataclass(frozen=True)
class Owned:
    """What a rank owns.

    Attributes:
        samples: [b0, b1), global.
        features: [h0, h1), global.
        rows: global rows in local order.
    """
    samples: tuple[int, int]
    features: tuple[int, int]
    rows: list[int]


class Layout:
    """How a grid splits samples, rows and features. Make one with src() or dst() (an encoder's and an LLM's usual layout) or
    from nothing and split(). Methods return self.

    Args:
        grid: a Grid, or what Grid() takes.

    Raises:
        ValueError: as Grid().

    Example:
        >>> import colobridge
        >>> layout = colobridge.Layout('tp=2,dp=2').split('samples', 'dp').split('features', 'tp')
        >>> layout.owned(1, samples=4, rows=2, features=6)
        Owned(samples=(0, 2), features=(3, 6), rows=[0, 1])
    """

    def __init__(self, grid: Any):
        self.grid = grid if isinstance(grid, Grid) else Grid(grid)
        self._raw = s.Layout()
        self._table: c.Array[c.c_int64] | None = None  # what _raw borrows
        call('colo_layout_init', self._raw, self.grid._raw)

    @classmethod
    def src(cls, grid: Any, *, extra: str | Sequence[str] = ()) -> 'Layout':
        """The encoder's: samples BLOCK over dp, rows ZIGZAG over cp, on the last pp stage. Ranks along tp and ep hold copies.

        Args:
            grid: a Grid, or what Grid() takes.
            extra: names of other dims along which ranks hold copies, joined by "-" or a list; a name that the grid lacks has no
                effect.

        Returns:
            A layout.

        Raises:
            ValueError: a dim above 1 with another name that is not in extra.
        """
        return cls(grid)._usual('colo_layout_init_src_extra', extra)

    @classmethod
    def dst(cls, grid: Any, *, extra: str | Sequence[str] = ()) -> 'Layout':
        """The LLM's: as src(), on pp stage 0.

        Args:
            grid: as src()'s.
            extra: as src()'s.

        Returns:
            A layout.

        Raises:
            ValueError: as src().
        """
        return cls(grid)._usual('colo_layout_init_dst_extra', extra)

    def _usual(self, init: str, extra: str | Sequence[str]) -> 'Layout':
        call(init, self._raw, self.grid._raw, text(_joined(extra)))
        return self

    def split(self, axis: str, dim: str, kind: str = 'block', *, context: bool = False) -> 'Layout':
        """Append a split of an axis over a dim.

        Args:
            axis: "samples", "rows" or "features".
            dim: of the grid.
            kind: "block", "zigzag", "replicate", or "ceil", which cuts as torch.chunk() and DTensor do, into parts of which the
                last are shorter or empty.
            context: a block or ceil split of rows is context parallelism, too: partial gradients are summed over it.

        Returns:
            This layout.

        Raises:
            ValueError: an unknown name, or a dim that is used already.
        """
        if axis not in _AXES or kind not in _KINDS:
            raise ValueError("split: axis '%s', kind '%s'; expected one of %s and one of %s"
                             % (axis, kind, ', '.join(_AXES), ', '.join(_KINDS)))
        if context:
            if axis != 'rows':
                raise ValueError("split: only rows are context-parallel, not %s" % axis)
            call('colo_layout_split_context', self._raw, text(dim), _KINDS[kind])
        else:
            call('colo_layout_split', self._raw, _AXES[axis], text(dim), _KINDS[kind])
        return self

    def clear(self, axis: str) -> 'Layout':
        """Forget the splits of one axis.

        Args:
            axis: "samples", "rows" or "features".

        Returns:
            This layout.

        Raises:
            ValueError: an unknown name.
        """
        if axis not in _AXES:
            raise ValueError("clear: axis '%s', expected one of %s" % (axis, ', '.join(_AXES)))
        lib().colo_layout_clear(self._raw, _AXES[axis])
        return self

    def map_offset(self, offset: int, positions: int) -> 'Layout':
        """Row i sits at position offset + i of the LLM's sequence.

        Args:
            offset: the position of row 0, in [0, positions).
            positions: of the LLM's sequence.

        Returns:
            This layout.

        Raises:
            ValueError: offset is not in its range.
        """
        call('colo_layout_map_offset', self._raw, offset, positions)
        return self

    def map_table(self, table: Sequence[int], positions: int) -> 'Layout':
        """Row i sits at position table[i] of the LLM's sequence.

        Args:
            table: [rows] integers, distinct, in [0, positions).
            positions: of the LLM's sequence.

        Returns:
            This layout.

        Raises:
            ValueError: sizes. check() and what is made from the layout check the entries.
        """
        raw = (s.i64 * max(len(table), 1))(*(int(p) for p in table))
        call('colo_layout_map_table', self._raw, raw, len(table), positions)
        self._table = raw
        return self

    def stage(self, dim: str | None, stage: int | str) -> 'Layout':
        """Only ranks at one coordinate of a dim hold the tensor.

        Args:
            dim: of the grid; None with "any".
            stage: the coordinate, "last", or "any", with which all ranks hold it.

        Returns:
            This layout.

        Raises:
            ValueError: an unknown dim, one that splits an axis, a coordinate outside of it.
        """
        words = {'last': s.STAGE_LAST, 'any': s.STAGE_ANY}
        if isinstance(stage, str) and stage not in words:
            raise ValueError("stage: '%s', expected a coordinate, 'last' or 'any'" % stage)
        index = words[stage] if isinstance(stage, str) else stage
        call('colo_layout_stage', self._raw, None if dim is None else text(dim), index)
        return self

    def check(self, samples: int, rows: int, features: int) -> None:
        """Does the layout fit a tensor of that size?

        Args:
            samples: global.
            rows: global.
            features: global.

        Raises:
            ValueError: it does not.
        """
        call('colo_layout_check', self._raw, samples, rows, features)

    def holds(self, rank: int) -> bool:
        """Is a rank in the grid and on the stage?

        Args:
            rank: the world rank.

        Returns:
            Whether it is.
        """
        return bool(lib().colo_layout_holds(self._raw, rank))

    def owned(self, rank: int, samples: int, rows: int, features: int, *,
              full_rows: bool = False) -> Owned:
        """What a rank owns of a tensor of that size.

        Args:
            rank: the world rank.
            samples: global.
            rows: global.
            features: global.
            full_rows: ignore the row splits.

        Returns:
            Its samples, features and rows.

        Raises:
            ValueError: as check().
        """
        n, runs = s.i64(0), (s.Run * max(rows, 1))()
        owned = self._owned(rank, (samples, rows, features), full_rows, runs, len(runs), c.byref(n))
        return Owned((owned.b0, owned.b1), (owned.h0, owned.h1),
                     [r.row + i for r in runs[:n.value] for i in range(r.count)])

    def count(self, rank: int, samples: int, rows: int, features: int, *,
              full_rows: bool = False) -> int:
        """How many elements owned() names.

        Args:
            rank: the world rank.
            samples: global.
            rows: global.
            features: global.
            full_rows: ignore the row splits.

        Returns:
            The elements.

        Raises:
            ValueError: as check().
        """
        owned = self._owned(rank, (samples, rows, features), full_rows)
        return (owned.b1 - owned.b0) * owned.rows * (owned.h1 - owned.h0)

    def _owned(self, rank: int, shape: tuple[int, ...], full_rows: bool, runs: Any = None, most: int = 0, n: Any = None) -> s.Owned:
        owned = s.Owned()
        call('colo_layout_owned', self._raw, rank, s.Shape(*shape), full_rows, owned, runs, most, n)
        return owned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return lib().colo_layout_hash(self._raw)

    def __reduce__(self) -> Any:
        return _again, (self.grid, bytes(self._raw), None if self._table is None else list(self._table))

    def __repr__(self) -> str:
        return "Layout('%s')" % self.grid


def _again(grid: Grid, raw: bytes, table: list[int] | None) -> Layout:
    if len(raw) != c.sizeof(s.Layout):
        raise ValueError('layout: found one of %d bytes to unpickle, expected %d: another version of the library made it; '
                         'make it again' % (len(raw), c.sizeof(s.Layout)))
    layout = Layout(grid)
    layout._raw = s.Layout.from_buffer_copy(raw)
    if table is not None:
        layout._table = (s.i64 * max(len(table), 1))(*table)
        layout._raw.table = c.addressof(layout._table) if layout._raw.table else None
    return layout


def splits_of(layout: Layout, axis: int) -> list[tuple[s.Split, int]]:
    """Splits of an axis, s.AXIS_SAMPLES, ROWS or FEATURES, and the extent of the dim of each."""
    raw, shape = layout._raw, layout.grid.shape
    return [(split, shape[split.dim]) for split in raw.split[axis][:raw.nsplits[axis]]]


def parts_of(layout: Layout, axis: int) -> int:
    """Into how many parts a layout cuts an axis."""
    return math.prod(extent for _, extent in splits_of(layout, axis))


def context_of(layout: Layout) -> int:
    """Over how many context ranks a layout cuts rows."""
    return math.prod(extent for split, extent in splits_of(layout, s.AXIS_ROWS) if split.context)


def replica_of(layout: Layout, rank: int) -> int:
    """Which part of the samples a world rank has."""
    return part_of(layout, s.AXIS_SAMPLES, rank)


def part_of(layout: Layout, axis: int, rank: int) -> int:
    """Which part of an axis a world rank has; the dim of the last split varies fastest."""
    coords, at = list(layout.grid.coords(rank).values()), 0
    for split, extent in splits_of(layout, axis):
        at = at * extent + coords[int(split.dim)]
    return at
