# SPDX-License-Identifier: Apache-2.0
"""Layouts as other runtimes make them: shards of any length, as DTensor has them."""
import gc
import itertools
import weakref

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402


def maps(world):
    """(Bridges that calls with a position map each have made, how many of them are left at the end)"""
    made, n = [], 8
    for i in (*range(40), 0):  # the first one is made again, on all ranks
        table = torch.randperm(n, generator=torch.Generator().manual_seed(i)).tolist()
        src = cb.Layout('cp=2').split('rows', 'cp', context=True).map_table(table, n)
        dst = cb.Layout('cp=2').split('rows', 'cp', context=True)
        for _ in range(2):
            ct.bridge(torch.zeros(1, n // 2, 1), src, dst, group=world, output='sharded', shape=(1, n, 1))
        known = {id(one()) for one in made}
        made += [weakref.ref(of) for of in gc.get_objects() if isinstance(of, ct.Bridge) and of.group is world
                 and id(of) not in known]
    gc.collect()
    return len(made), sum(one() is not None for one in made)


def test_bridges_of_many_position_maps_go_by_last_use():
    assert cb.run_threads(2, maps) == [(41, 32)] * 2


def chunk(t, axis, parts, i):
    """As DTensor shards: fewer chunks than ranks leave the last ranks with nothing."""
    return dict(enumerate(t.chunk(parts, axis))).get(i, t.narrow(axis, 0, 0)).contiguous()


def shards(world, group=None):
    rank = world if group is None else group.rank
    names = ('samples', 'rows', 'features')
    for a, b, size in itertools.product(range(3), range(3), (5, 6, 9)):
        shape = [2, 2, 2]
        shape[a] = shape[b] = size
        g = torch.arange(float(shape[0] * shape[1] * shape[2])).view(shape)
        src = cb.Layout('x=4').split(names[a], 'x', kind='ceil')
        dst = cb.Layout('x=2,y=2').split(names[b], 'y', kind='ceil').split(names[b], 'x', kind='ceil')
        carry = ct.Bridge(src, dst, group=group or dist.group.WORLD, output='sharded')
        x = chunk(g, a, 4, rank).requires_grad_()
        for _ in range(2):
            y = carry(x, shape=tuple(shape))
            want = chunk(chunk(g, b, 2, rank // 2), b, 2, rank % 2)
            assert torch.equal(y, want), (a, b, size, y, want)
            x.grad = None
            y.backward(want * 2)
            assert torch.equal(x.grad, x * 2)
        carry.destroy()


def test_shards_of_any_length_are_those_of_dtensor(world):
    world.run(shards)
    cb.run_threads(4, lambda comm: shards(comm, comm))


def matrices(rank):
    """A DTensor over two mesh dims, to one over the other two; features in strides."""
    g = torch.arange(35.0).view(7, 5)
    src = cb.Layout('x=2,y=2').split('samples', 'y', kind='ceil').split('features', 'x', kind='ceil')
    dst = cb.Layout('z=4').split('features', 'z', kind='ceil')
    carry = ct.Bridge(src, dst, group=dist.group.WORLD, axes='bh')
    x = chunk(chunk(g, 0, 2, rank // 2), 1, 2, rank % 2).t().contiguous().t().requires_grad_()
    for shape in (tuple(g.shape), (7, 1, 5)):
        y = carry(x, shape=shape)
        assert torch.equal(y, chunk(g, 1, 4, rank))
        x.grad = None
        y.backward(y.detach() * 2)
        assert torch.equal(x.grad, x * 2)
    whole = ct.bridge(g[rank:rank + 1], 'dp=4', 'tp=4', group=dist.group.WORLD, axes='bh')  # the shape is plain
    assert torch.equal(whole, g[:4])
    with pytest.raises((ValueError, RuntimeError), match="2 rows with axes 'bh', expected 1"):
        carry(x, shape=(7, 2, 5))


def test_matrices_have_no_rows(world):
    world.run(matrices)


def uneven_samples(rank):
    g = torch.arange(9.0).view(9, 1, 1)
    carry = ct.Bridge(cb.Layout('dp=4').split('samples', 'dp', kind='ceil'), 'tp=2,dp=2', group=dist.group.WORLD)
    y = carry(chunk(g, 0, 4, rank), shape=(9, 1, 1))
    assert torch.equal(y, g[:4] if rank < 2 else g[4:])


def test_samples_by_ceil_are_exchanged_by_all_that_share_them(world):
    world.run(uneven_samples)
