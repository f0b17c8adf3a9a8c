# SPDX-License-Identifier: Apache-2.0
"""What moves between ranks when a bridge carries a shape, from layouts alone; no communication."""
import itertools
import math
from typing import Any

from .. import _structs as s
from ..comm import Comm
from ..errors import Error
from ..grid import Grid
from ..layout import Layout, parts_of, splits_of
from ..plan import Plan


def component(src: Grid, dst: Grid, rank: int) -> tuple[int, ...]:
    """The ranks that @rank exchanges with, directly or through others: those whose samples overlap.
    Both grids split samples over dp; pure arithmetic, O(ranks)."""
    sides = [(grid, grid.extent('dp')) for grid in (src, dst)]
    count = math.gcd(*(dp for _, dp in sides))  # blocks of samples that both sides keep apart
    ranks: dict[int, list[int]] = {block: [] for block in range(count)}
    blocks: dict[int, list[int]] = {rank: []}
    for grid, dp in sides:
        step = math.prod(extent for _, extent in itertools.takewhile(lambda dim: dim[0] != 'dp', grid.dims))
        for r in grid.ranks():
            block = (r - grid.offset) // step % dp * count // dp
            ranks[block].append(r), blocks.setdefault(r, []).append(block)
    found, more = {rank}, list(blocks[rank])
    while more:
        for r in ranks.pop(more.pop(), ()):
            found.add(r), more.extend(blocks[r])
    return tuple(sorted(found))


def plain(layout: Layout) -> bool:
    """Are samples split over dp alone, in blocks, so that component() holds?"""
    names = layout.grid.names
    splits = [(names[split.dim], split.kind) for split, _ in splits_of(layout, s.AXIS_SAMPLES)]
    return splits == [('dp', s.SPLIT_BLOCK)] * ('dp' in names)


def reach(src: Layout, dst: Layout, options: dict[str, Any], comm: Comm, shape: tuple[int, ...], dtype: int,
          no_grad: bool, rank: int) -> Any:
    """(which tensors of @rank peers reach, forward and backward; are gradients summed; elements of its x and
    y). What cannot be is left to the bridge to say, on all ranks."""
    ranks = max(layout.grid.offset + layout.grid.size for layout in (src, dst))
    nodes = None if options['ranks_per_node'] else comm.node_of_world_ranks(ranks)
    try:
        plan = Plan(src, dst, shape, rank, dtype=s.DTYPES[dtype], output=options['output'],
                    grad='none' if no_grad else options['grad'], one_level=True, ranks_per_node=options['ranks_per_node'], nodes=nodes)
        counts = (src.count(rank, *shape[:3]), dst.count(rank, *shape[:3], full_rows=options['output'] == 'full'))
    except Error:
        return (False, False), False, (0, 0)
    return (plan.reached('forward'), plan.reached('backward')), plan.addends > 1, counts


def stays(src: Layout, dst: Layout, options: dict[str, Any], comm: Comm, shape: tuple[int, ...],
          no_grad: bool, direction: str) -> tuple[int, int, int] | None:
    """(axis, first, number): the part of its input that is a rank's output, if nothing moves between any ranks of @comm
    in this direction and all rows and features stay. None: it is not so; the same on all ranks."""
    back, found = direction == 'backward', None
    split = [parts_of(src, s.AXIS_ROWS), parts_of(src, s.AXIS_FEATURES), parts_of(dst, s.AXIS_FEATURES)]
    if back or options['output'] != 'full':  # gradients of rows add up, or come from the ranks that own them
        split.append(parts_of(dst, s.AXIS_ROWS))
    if max(split) > 1 or src._table or dst._table or comm.check_level > 1 or back and no_grad:
        return None
    for rank in range(comm.size):
        given, made = (layout._owned(comm.world_rank(rank), shape[:3], True) for layout in ((dst, src) if back else (src, dst)))
        first, end = made.b0 - given.b0, made.b1 - given.b0
        if not 0 <= first < end <= given.b1 - given.b0:
            return None
        if rank == comm.rank:
            unit = 1 if 'b' in options['axes'] else shape[1]
            found = max(options['axes'].find('b'), 0), first * unit, (end - first) * unit
    return found
