# SPDX-License-Identifier: Apache-2.0
"""A DeviceMesh of torch as the ranks and the dims that it says. Its last dim is the fastest; a grid's first one is."""
import functools
import itertools
import math
import sys
import weakref
from typing import Any

from .errors import ArgumentError

_ranks: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()


def is_mesh(value: Any) -> bool:
    """Is it a DeviceMesh? Imports nothing: who has one has loaded its module."""
    of: Any = getattr(sys.modules.get('torch.distributed.device_mesh'), 'DeviceMesh', None)
    return isinstance(of, type) and isinstance(value, of)


def ranks_of(mesh: Any) -> tuple[int, ...]:
    """World ranks, those of the last dim first."""
    found = _ranks.get(mesh)
    if found is None:
        found = _ranks[mesh] = tuple(mesh.mesh.flatten().tolist())
    return found


def shown(mesh: Any) -> str:
    """What errors call it."""
    shape = mesh.mesh.shape
    names = mesh.mesh_dim_names or ['dim %d' % i for i in range(len(shape))]
    ranks = ranks_of(mesh)
    return 'DeviceMesh (%s) of ranks %s%s' % (', '.join('%s=%d' % dim for dim in zip(names, shape)), list(ranks[:8]),
                                              ' and %d more' % (len(ranks) - 8) if len(ranks) > 8 else '')


def dims_of(mesh: Any, count: tuple[int, ...] | None = None) -> tuple[list[tuple[str, int]], int]:
    """(dims, the fastest first, and offset) of the grid that has the same ranks at the same coordinates. count: ranks that
    the grid counts from 0. ArgumentError: there is none."""
    if not mesh.mesh_dim_names:
        raise ArgumentError("grid: %s has no mesh_dim_names, expected the names of its dims" % shown(mesh))
    shape, ranks = list(mesh.mesh.shape), ranks_of(mesh)
    if count is not None:
        if not set(ranks) <= set(count):
            raise ArgumentError("grid: %s, expected ranks of the group, which has %s" % (shown(mesh), list(count[:8])))
        ranks = tuple(count.index(rank) for rank in ranks)
    steps: list[int] = []
    at: dict[int, int] = {}
    key = 0
    for i in reversed(range(len(shape))):
        steps.insert(0, math.prod(shape[i + 1:]))  # in ranks_of()
        if shape[i] > 1:
            key = ranks[steps[0]] - ranks[0]
        at[i] = key  # a dim of one rank stays with the next one
    order = sorted(at, key=at.__getitem__)
    expected = [min(ranks)]
    for i in order:
        expected = [rank + k * len(expected) for k in range(shape[i]) for rank in expected]
    found = [min(ranks)] * len(ranks)
    for n, rank in enumerate(ranks):  # by coordinates, in the order of expected
        place, size = 0, 1
        for i in order:
            place, size = place + n // steps[i] % shape[i] * size, size * shape[i]
        found[place] = rank
    if found != expected:
        raise ArgumentError("grid: %s; a grid has consecutive ranks, and each of its dims one step, so that these are %s; make "
                            "a mesh of such ranks, or carry among the ranks of a smaller one" % (shown(mesh), expected[:8]))
    return [(mesh.mesh_dim_names[i], shape[i]) for i in order], expected[0]


@functools.lru_cache(maxsize=256)
def lines(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """World ranks next to this one along each dim of a mesh, this one among them"""
    at = mesh.get_coordinate()
    if at is None:
        raise ArgumentError("this rank is not in the %s of a DTensor" % mesh)
    return tuple(tuple(mesh.mesh[(*at[:i], slice(None), *at[i + 1:])].tolist()) for i in range(len(at)))


def among(mesh: Any, dims: Any) -> tuple[int, ...]:
    """World ranks of the part of a mesh over @dims that has this rank; the first of dims is the slowest."""
    at = mesh.get_coordinate()
    part = mesh.mesh[tuple(slice(None) if i in dims else n for i, n in enumerate(at))]
    left = sorted(dims)
    return tuple(part.permute([left.index(i) for i in dims]).reshape(-1).tolist())


def groups_of(t: Any) -> list[tuple[int, ...]]:
    """Sets of world ranks that a head may talk to, whatever tp_group is: those of each dim, of all that cut it, and of these
    without the first."""
    mesh, found = t.device_mesh, [line for line in lines(t.device_mesh)]
    cut = [i for i, p in enumerate(t.placements) if not p.is_replicate() and len(found[i]) > 1]
    for dims in itertools.chain.from_iterable(itertools.permutations(cut, n) for n in range(2, len(cut) + 1)):
        found.append(among(mesh, dims))
    same = [i for i, p in enumerate(t.placements) if p.is_replicate()]
    return found + ([among(mesh, same)] if len(same) > 1 else [])
