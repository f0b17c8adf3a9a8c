# SPDX-License-Identifier: Apache-2.0
"""Which rank is where, and which ranks form which group. Pure integers; see docs/concepts/layouts.md."""
import ctypes as c
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _structs as s
from ._lib import call, lib, result, text
from .errors import ArgumentError
from .mesh import dims_of, is_mesh


class Group:
    """The ranks of one group, in order: a sequence of world ranks. It stores no list."""

    def __init__(self, raw: s.Group):
        self._raw = raw

    @property
    def size(self) -> int:
        """Members."""
        return self._raw.size

    @property
    def index(self) -> int:
        """Position of the rank it was asked for."""
        return self._raw.index

    @property
    def ordinal(self) -> int:
        """Which of the groups of its dims it is."""
        return self._raw.ordinal

    @property
    def count(self) -> int:
        """How many groups its dims make."""
        return self._raw.count

    def __len__(self) -> int:
        return self._raw.size

    def __getitem__(self, i: int) -> int:
        if not -self._raw.size <= i < self._raw.size:
            raise IndexError('member %d of a group of %d' % (i, self._raw.size))
        return lib().colo_group_member(self._raw, i % self._raw.size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def ranks(self) -> list[int]:
        """World ranks of all members, in group order."""
        ranks = [self._raw.base]
        for i in range(self._raw.nd):
            stride = self._raw.stride[i]
            ranks = [rank + k * stride for k in range(self._raw.extent[i]) for rank in ranks]
        return ranks

    def __repr__(self) -> str:
        return 'Group(%s)' % (self.ranks() if len(self) <= 16 else '%d ranks' % len(self))


class Grid:
    """Up to 16 named dims over consecutive world ranks. Immutable.

    Args:
        dims: a spec ("tp=2,cp=2,dp=2"), or pairs of a name and an extent ([("tp", 2), ("dp", 4)]), or a dict of them ({"tp": 2,
            "dp": 4}): the first dim varies fastest. Or a torch DeviceMesh with named dims, whose last dim is the fastest; each
            rank is where the mesh has it.
        offset: world rank of grid rank 0. A spec ("tp=2@8") and a mesh say it themselves.
        world: ranks of the world, 0 if unknown.

    Raises:
        ValueError: no dims, names, extents, overflow, a grid over the world, a mesh whose ranks are not consecutive.

    Example:
        >>> import colobridge
        >>> grid = colobridge.Grid('tp=2,cp=2,dp=2')
        >>> grid.coords(5)
        {'tp': 1, 'cp': 0, 'dp': 1}
        >>> grid.group('cp-dp', 5).ranks()
        [1, 3, 5, 7]
    """

    def __init__(self, dims: 'str | Sequence[tuple[str, int]] | Mapping[str, int] | Any', offset: int = 0, world: int = 0):
        self._raw = s.Grid()
        if offset and (isinstance(dims, str) or is_mesh(dims)):
            raise ArgumentError("Grid: offset is %d with %s, expected 0" % (offset, 'a DeviceMesh, which says its ranks itself' if
                                is_mesh(dims) else 'a spec, which says it itself ("%s@%d")' % (dims, offset)))
        if isinstance(dims, str):
            spec = dims.encode()
            call('colo_grid_parse_n', self._raw, spec, len(spec), world)
        else:
            given: Any = dims
            if is_mesh(given):
                given, offset = dims_of(given)
            items: Any = getattr(given, 'items', None)
            given = given if items is None else items()
            pairs: list[Any] = list(given) if hasattr(given, '__iter__') else [given]
            if not all(issubclass(type(dim), (list, tuple)) and len(dim) == 2 and isinstance(dim[0], str) for dim in pairs):
                raise ArgumentError("Grid: dims is %r, expected a spec (\"tp=2,dp=4\"), pairs of a name and an extent, a dict of "
                                    "them, or a DeviceMesh" % (dims,))
            raw = (s.Dim * max(len(pairs), 1))(*(s.Dim(text(name), _extent(name, n)) for name, n in pairs))
            call('colo_grid_init', self._raw, raw, len(pairs), offset, world)

    @property
    def dims(self) -> list[tuple[str, int]]:
        """(name, extent), the fastest first."""
        raw = self._raw
        return [(raw.name[i].value.decode(), raw.extent[i]) for i in range(raw.ndims)]

    @property
    def names(self) -> list[str]:
        """Names of its dims."""
        return [name for name, _ in self.dims]

    @property
    def shape(self) -> list[int]:
        """Extents of its dims."""
        return [n for _, n in self.dims]

    @property
    def size(self) -> int:
        """Product of the extents."""
        return self._raw.size

    @property
    def offset(self) -> int:
        """World rank of grid rank 0."""
        return self._raw.offset

    def extent(self, name: str) -> int:
        """Extent of a dim.

        Args:
            name: of the dim.

        Returns:
            The extent, 1 if the grid lacks the dim.
        """
        return dict(self.dims).get(name, 1)

    def has_rank(self, rank: int) -> bool:
        """Is a world rank in the grid?

        Args:
            rank: the world rank.

        Returns:
            Whether it is.
        """
        return self.offset <= rank < self.offset + self.size

    def ranks(self) -> range:
        """World ranks."""
        return range(self.offset, self.offset + self.size)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a world rank.

        Args:
            rank: the world rank.

        Returns:
            The coordinates by dim name.

        Raises:
            ValueError: the rank is outside the grid.
        """
        values = (s.i64 * s.DIMS_MAX)()
        call('colo_grid_coords', self._raw, rank, values)
        return {name: values[i] for i, name in enumerate(self.names)}

    def rank(self, coords: dict[str, int]) -> int:
        """World rank at coordinates.

        Args:
            coords: by dim name; a dim that is left out is 0.

        Returns:
            The world rank.

        Raises:
            ValueError: out of range, unknown dim.
        """
        names = self.names
        for name in coords:
            if name not in names:
                raise ValueError("'%s' is no dim of %s" % (name, self))
        values = (s.i64 * s.DIMS_MAX)(*(coords.get(name, 0) for name in names))
        return result(s.i64, 'colo_grid_rank', self._raw, values).value

    def group(self, dims: str | Sequence[str], rank: int, *, as_given: bool = False) -> Group:
        """The group of a dim set that contains a rank.

        Args:
            dims: names joined by "-", or a list of them.
            rank: the world rank.
            as_given: the last given dim varies fastest inside the group; else members ascend.

        Returns:
            The group.

        Raises:
            ValueError: the rank is outside the grid, unknown dim.
        """
        name = 'colo_grid_group_as_given' if as_given else 'colo_grid_group'
        return Group(result(s.Group, name, self._raw, text(_joined(dims)), rank))

    def groups(self, dims: str | Sequence[str]) -> list[Group]:
        """All groups of a dim set.

        Args:
            dims: as group()'s.

        Returns:
            The groups, in order.

        Raises:
            ValueError: unknown dim.
        """
        def at(i: int) -> Group:
            return Group(result(s.Group, 'colo_grid_group_at', self._raw, text(_joined(dims)), i))
        first = at(0)
        return [first, *map(at, range(1, first.count))]

    def key(self, dims: str | Sequence[str]) -> str:
        """Canonical name of a dim set.

        Args:
            dims: as group()'s.

        Returns:
            Its names in the reverse order of the grid, joined by "-".

        Raises:
            ValueError: unknown dim.
        """
        key = c.create_string_buffer(s.KEY_MAX)
        call('colo_grid_key', self._raw, text(_joined(dims)), key)
        return key.value.decode()

    def __str__(self) -> str:
        spec = c.create_string_buffer(s.KEY_MAX * 4)
        lib().colo_grid_print(self._raw, spec, len(spec))
        return spec.value.decode()

    def __repr__(self) -> str:
        return "Grid('%s')" % self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and bool(lib().colo_grid_equal(self._raw, other._raw))

    def __hash__(self) -> int:
        return lib().colo_grid_hash(self._raw)


def _extent(name: str, n: Any) -> int:
    try:
        return operator.index(n)
    except TypeError:
        raise ArgumentError("Grid: the extent of '%s' is %r, expected an integer" % (name, n)) from None


def _joined(dims: str | Sequence[str]) -> str:
    return dims if isinstance(dims, str) else '-'.join(dims)
