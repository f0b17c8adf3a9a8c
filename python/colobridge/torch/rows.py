# SPDX-License-Identifier: Apache-2.0
"""A tensor [..., N] of any strides as the [T, N] rows that the losses read, and per-token values next to
them."""
import functools
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rows:
    """Logits [..., Vl] as the [T, Vl] rows that the library reads, without a copy.

    Row number of index (i, j, ..) is i * step[0] + j * step[1] + ..; with gaps (a slice of a longer
    sequence) T counts the rows between, too, whose targets are ignored, so that they are not read."""
    shape: tuple[int, ...]  # of the logits without their last axis
    step: tuple[int, ...]
    count: int
    gap: bool  # are there rows between
    stride: int  # elements from row to row
    columns: int

    @functools.cached_property
    def plain(self) -> bool:
        """Are contiguous values [shape] the [T] that the library reads?"""
        return not self.gap and self.step == _row_major(self.shape)

    @functools.cached_property
    def order(self) -> int:
        """A number for the order of rows in memory, which ranks compare: 0 if they lie as their indices count"""
        axes = [(n, step) for n, step in zip(self.shape, self.step) if n > 1]
        usual = _row_major(tuple(n for n, _ in axes))
        return 0 if tuple(step for _, step in axes) == usual else hash(tuple(axes))

    def spread(self, values: Any, fill: Any) -> Any:
        """[T, ..], contiguous, of per-token values [shape, ..]."""
        tail = tuple(values.shape[len(self.shape):])
        if self.gap:
            out = values.new_full((self.count,) + tail, fill)
        elif len(self.shape) == 1 and self.step == (1,) and values.is_contiguous():
            return values
        elif self.step == _row_major(self.shape):
            return values.reshape((self.count,) + tail).contiguous()  # a sum's gradient is expanded
        else:
            out = values.new_empty((self.count,) + tail)
        each = math.prod(tail)
        out.as_strided(self.shape + tail, tuple(n * each for n in self.step) + _row_major(tail)).copy_(values)
        return out

    def gather(self, rows: Any) -> Any:
        """[shape, ..] of [T, ..], contiguous: a view."""
        if len(self.shape) == 1 and not self.gap and self.step == (1,):
            return rows
        tail = tuple(rows.shape[1:])
        each = math.prod(tail)
        return rows.as_strided(self.shape + tail, tuple(n * each for n in self.step) + _row_major(tail),
                               rows.storage_offset())

    def columns_of(self, rows: Any) -> Any:
        """[shape, Vl] of [T, Vl] with rows Vl apart: a view."""
        if len(self.shape) == 1 and not self.gap and self.step == (1,):
            return rows
        return rows.as_strided(self.shape + (self.columns,),
                               tuple(n * self.columns for n in self.step) + (1,))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    step, n = [], 1
    for extent in reversed(shape):
        step.append(n)
        n *= extent
    return tuple(reversed(step))


@functools.lru_cache(maxsize=64)
def whole(shape: tuple[int, ...], columns: int) -> Rows:
    return Rows(shape, _row_major(shape), math.prod(shape), False, max(columns, 1), columns)


def rows_of(logits: Any) -> tuple[Any, Rows]:
    """(logits, how to read them). Copies only where columns are not contiguous, rows overlap (expanded
    tensors), or more rows lie between than are meant."""
    shape, columns = tuple(logits.shape[:-1]), logits.shape[-1]
    if logits.is_contiguous():
        return logits, whole(shape, columns)
    strides = logits.stride()
    count = math.prod(shape)
    if count == 0 or columns == 0:
        return logits.contiguous(), whole(shape, columns)
    lead = [stride if n > 1 else 0 for n, stride in zip(shape, strides[:-1])]
    unit = math.gcd(*lead) if any(lead) else columns
    if columns == 1:
        unit = unit or 1
    rows = 1 + sum((n - 1) * (stride // unit) for n, stride in zip(shape, lead))
    order = sorted((stride, n) for n, stride in zip(shape, lead) if n > 1)
    reach, apart = columns, unit >= columns
    for stride, n in order:
        apart = apart and stride >= reach
        reach = stride * (n - 1) + reach
    if (columns > 1 and strides[-1] != 1) or not apart or rows > 2 * count:
        return rows_of(logits.contiguous())
    return logits, Rows(shape, tuple(stride // unit for stride in lead), rows, rows != count, unit,
                        columns)
