# SPDX-License-Identifier: Apache-2.0
"""What src=, dst= and llm= may be, and whether a spec puts ranks where a DeviceMesh in the same call has them. A spec's first
dim is the fastest and a mesh's last one, so one that is written in the mesh's order swaps dims, and no size tells."""
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError
from ..grid import Grid
from ..layout import Layout
from ..mesh import dims_of, is_mesh, ranks_of, shown
from . import ranks as groups


def layout_of(what: str, value: Any, usual: Callable[..., Layout], extra: str | Sequence[str], count: Any = None) -> Layout:
    """A Layout, or the usual one of a grid. count: ranks that the grid counts from 0."""
    if isinstance(value, Layout):
        return value
    if is_mesh(value):
        dims, offset = dims_of(value, count)
        return usual(Grid(dims, offset=offset), extra=extra)
    if isinstance(value, (str, Grid, Mapping)):
        return usual(value, extra=extra)
    raise ArgumentError("%s is %r, expected a Layout, the spec of a grid, a Grid, or a DeviceMesh" % (what, value))


def compare(what: str, spec: Any, grid: Grid, group: Any, others: Iterable[Any] = (), count: Any = None) -> None:
    """ValueError: @spec, of @grid, has dims of a mesh among @group and @others with other ranks, or of the mesh whose process
    groups this rank is in. What is no string is no spec, and may differ."""
    dims = {name: n for name, n in grid.dims if n > 1}
    if not isinstance(spec, str) or len(dims) < 2:
        return
    number = {rank: i for i, rank in enumerate(count)} if count else None
    for mesh in filter(is_mesh, (group, *others)):
        names, shape, ranks = mesh.mesh_dim_names or (), tuple(mesh.mesh.shape), ranks_of(mesh)
        if not dims.items() <= dict(zip(names, shape)).items():
            continue
        for n, rank in enumerate(ranks):
            theirs: dict[str, int] = {}
            for name, extent in reversed(list(zip(names, shape))):
                theirs[name], n = n % extent, n // extent
            at = number.get(rank, -1) if number else rank
            if grid.has_rank(at) and any(theirs[name] != grid.coords(at)[name] for name in dims):
                _differs(what, spec, 'rank %d is at %s' % (rank, _coords(grid.coords(at), dims)), 'In the %s' % shown(mesh),
                         _coords(theirs, dims), [name for name in reversed(names) if name in dims], dims)
    if is_mesh(group) or not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    me = dist.get_rank()
    at, steps = number.get(me, -1) if number else me, {}
    if not grid.has_rank(at):
        return
    made = {name: [ranks for ranks in groups.of_mesh(name) if len(ranks) == n] for name, n in dims.items()}
    if not all(made.values()):
        return
    mine = {name: tuple(sorted(count[i] if count else i for i in grid.group(name, at).ranks())) for name in dims}
    for name in dims:
        steps[name] = made[name][-1][1] - made[name][-1][0]
    for name in dims:
        if mine[name] not in made[name]:
            _differs(what, spec, 'rank %d shares %s with ranks %s' % (me, name, list(mine[name])), 'In the process groups of a '
                     'DeviceMesh', 'with %s' % list(made[name][-1]), sorted(dims, key=lambda n: steps[n]), dims)


def _coords(at: Mapping[str, int], dims: Iterable[str]) -> str:
    return ', '.join('%s %d' % (name, at[name]) for name in dims)


def _differs(what: str, spec: str, here: str, where: str, there: str, order: Iterable[str], dims: Mapping[str, int]) -> None:
    raise ArgumentError(
        "%s is '%s', whose first dim is the fastest: %s. %s, whose last dim is the fastest, %s. Pass the mesh itself, or the spec "
        "'%s'; a colobridge.Grid that is not the mesh's is taken as it is"
        % (what, spec, here, where, there, ','.join('%s=%d' % (name, dims[name]) for name in order)))
