# SPDX-License-Identifier: Apache-2.0
"""Tables of integers, as callers have them: lists, arrays, tensors, cumulative or nested lengths."""
import array
import ctypes as c
from typing import Any, cast

from . import _structs as s
from .errors import ArgumentError
from .view import view


class Comparable:
    """Equal to another one of its kind if their keys are. raw: a C struct that borrows tables of the names of its members."""
    _key: Any

    def _fill(self, raw: Any, tables: 'dict[str, array.array[int] | None]') -> None:
        self._raw = raw
        self._key = b'|'.join(b'-' if t is None else t.tobytes() for t in tables.values())
        for member, t in tables.items():
            if t:
                setattr(raw, member, t.buffer_info()[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def one_of(what: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    """ValueError, unless one of two tables is given."""
    if (first[1] is None) == (second[1] is None):
        raise ArgumentError("%s: %s %s and %s are given; expected one of them"
                            % (what, 'neither of' if first[1] is None else 'both', first[0], second[0]))


def require_entries(what: str, name: str, found: Any, expected: int, each: str) -> None:
    """ValueError, if a table that is given has not so many."""
    if found is not None and len(found) != expected:
        raise ArgumentError("%s: %s has %d entries, expected %d, one for each %s" % (what, name, len(found), expected, each))


def lengths(what: str, name: str, given: Any, cu_name: str, cu: Any) -> Any:
    """One of the two, as lengths."""
    one_of(what, (name, given), (cu_name, cu))
    if cu is None:
        return part_lengths(given) if getattr(given, 'is_nested', False) else given
    edges = table(what, cu_name, cu)
    if not edges or edges[0] != 0:
        raise ArgumentError("%s: %s begins with %s, expected 0: cumulative lengths"
                            % (what, cu_name, edges[0] if edges else 'nothing'))
    out = array.array('q', (b - a for a, b in zip(edges, edges[1:])))
    for i, n in enumerate(out):
        if n < 0:
            raise ArgumentError("%s: %s[%d] is %d after %d; cumulative lengths do not descend"
                                % (what, cu_name, i + 1, edges[i + 1], edges[i]))
    return out


def part_lengths(t: Any) -> list[int]:
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


def table(what: str, name: str, values: Any) -> 'array.array[int]':
    """A copy of integers as i64."""
    if hasattr(values, 'is_cuda'):
        values = values.detach().cpu()
    if hasattr(values, 'data_ptr') or hasattr(values, '__array_interface__'):
        raw = view(values, '%s: %s' % (what, name))
        kind = s.DTYPES[cast(int, raw.dtype)]
        if raw.ndim != 1 or kind[0] not in 'iu' or str(values.dtype).endswith('bool'):
            raise ArgumentError("%s: %s is a tensor of %d axes of %s, expected 1 axis of integers"
                                % (what, name, raw.ndim, values.dtype))
        n = raw.shape[0]
        if kind in ('i64', 'i32') and (n < 2 or raw.stride[0] == 1):
            out = array.array('q' if kind == 'i64' else 'i')
            out.frombytes(c.string_at(raw.data, n * out.itemsize) if n else b'')
            return out if kind == 'i64' else array.array('q', out)
        values = values.tolist()
    try:
        return array.array('q', values)
    except (TypeError, OverflowError) as why:
        raise ArgumentError("%s: %s is a %s, expected integers of at most 64 bits (%s)"
                            % (what, name, type(values).__name__, why)) from None
