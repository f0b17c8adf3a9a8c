# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group that are in neither grid need not call, whatever the kind of the bridge: they do nothing until the others are
done. Values say where they come from; the oracle is the position of each row."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.megatron import ColocatedBridgeCommunicator  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402
from world import meet  # noqa: E402

KINDS = ('uniform', 'split', 'ragged', 'packed')
ROWS = 8


def make(kind, group, offset):
    """Of two ranks from @offset on; samples along dp, then rows over cp."""
    at = '@%d' % offset if offset else ''
    if kind == 'packed':
        return ct.PackedBridge('cp=2' + at, 'cp=2' + at, group=group)
    src, dst = 'dp=2' + at, 'cp=2' + at
    if kind == 'split':  # not by dp, so that components tell nothing
        src = cb.Layout(cb.Grid(src)).split('samples', 'dp', 'ceil')
    return (ct.RaggedBridge if kind == 'ragged' else ct.Bridge)(src, dst, group=group, output='sharded')


def carried(kind, bridge, me, factor):
    """Are y and the gradient of x what they should be, on rank @me of the two? @factor: of all values."""
    zigzag = [[0, 1, 6, 7], [2, 3, 4, 5]]
    if kind == 'packed':
        packing = cb.Packing(seq_len=[ROWS], split='zigzag')
        x = (torch.tensor(zigzag[me], dtype=torch.float64).view(4, 1) * factor).requires_grad_()
        y = bridge(x, src=packing, dst=packing.with_split('block'))
        want = torch.arange(4., dtype=torch.float64) + 4 * me
    elif kind == 'ragged':  # an image of each rank, in halves of one sequence
        x = ((torch.arange(4., dtype=torch.float64) + 4 * me).view(4, 1) * factor).requires_grad_()
        y = bridge(x, cb.Segments([4, 4], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[ROWS], seq_dp=[0]))
        want = torch.tensor(zigzag[me], dtype=torch.float64)
    else:
        x = ((torch.arange(float(ROWS), dtype=torch.float64) + 100 * me).view(1, ROWS, 1) * factor).requires_grad_()
        y = bridge(x, shape=(2, ROWS, 1))
        want = torch.tensor([[100 * sample + row for row in zigzag[me]] for sample in (0, 1)], dtype=torch.float64)
    (y * (y.detach() + 1)).sum().backward()  # the gradient of a row is its value and 1
    return bool((y.view(-1) == want.view(-1) * factor).all() and (x.grad == x.detach() + 1).all())


def inside(rank, offset):
    return offset <= rank < offset + 2


def of_two(rank, kind, offset):
    good = True
    if inside(rank, offset):
        bridge = make(kind, dist.group.WORLD, offset)
        good = all([carried(kind, bridge, rank - offset, factor) for factor in (1, 2)])
    meet()
    return good


@pytest.mark.parametrize('offset', (0, 1, 2))
@pytest.mark.parametrize('kind', KINDS)
def test_ranks_outside_need_not_call(world, kind, offset):
    assert world.run(of_two, kind, offset) == [True] * 4


def pairs(rank, kind):
    bridge = make(kind, dist.group.WORLD, rank // 2 * 2)
    good = [carried(kind, bridge, rank % 2, factor) for factor in range(1, 2 + rank // 2)]
    y = ct.bridge(torch.full((1, 4, 1), float(rank)), 'dp=4', 'tp=4', group=dist.group.WORLD)
    return all(good) and y[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize('kind', KINDS)
def test_two_pairs_work_side_by_side(world, kind):
    assert world.run(pairs, kind) == [True] * 4


def one_pair_errs(rank, kind):
    bridge = make(kind, dist.group.WORLD, rank // 2 * 2)
    meet()
    if rank == 1:
        with pytest.raises(ValueError):
            bridge('no tensor')
    elif rank == 0:
        with pytest.raises(RuntimeError, match='rank 1'):
            carried(kind, bridge, rank % 2, 1)
    return carried(kind, bridge, rank % 2, 3)


@pytest.mark.parametrize('kind', KINDS)
def test_an_error_of_one_pair_is_not_the_other_s(world, kind):
    assert world.run(one_pair_errs, kind) == [True] * 4


def calls_anyway(rank, kind):
    bridge = make(kind, dist.group.WORLD, 1)
    if inside(rank, 1):
        return carried(kind, bridge, rank - 1, 1)
    if kind == 'packed':
        packing = cb.Packing(seq_len=[ROWS], split='zigzag')
        return bridge(torch.ones(0, 1), src=packing, dst=packing.with_split('block')).shape == (0, 1)
    if kind == 'ragged':
        tables = cb.Segments([4, 4], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[ROWS], seq_dp=[0])
        return bridge(torch.ones(0, 1), tables).shape == (0, 1)
    return bridge(None, shape=(2, ROWS, 1), like=torch.ones(1)).numel() == 0


@pytest.mark.parametrize('kind', KINDS)
def test_ranks_outside_may_call(world, kind):
    assert world.run(calls_anyway, kind) == [True] * 4


# ---- ranks that are threads ----

@pytest.mark.parametrize('own', ('shared', 'own'))
@pytest.mark.parametrize('kind', KINDS)
def test_threads_outside_need_not_call(kind, own):
    def rank(w):
        w.set_timeout(20)
        good = True
        if inside(w.rank, 1):
            at = cb.Layout.dst('cp=2@1')
            bridge = make(kind, w, 1) if own == 'shared' else ct.Bridge('dp=2@1', at, group=w, comm=own, output='sharded')
            good = carried(kind if own == 'shared' else 'uniform', bridge, w.rank - 1, 1)
        z = ct.bridge(torch.full((1, 4, 1), float(w.rank)), 'dp=4', 'tp=4', group=w)  # of all
        return good and z[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert cb.run_threads(4, rank) == [True] * 4


def test_threads_outside_hear_nothing_of_a_mismatch():
    """The error ends the part, not its world; ranks of the part make another one without the others."""
    def rank(w):
        w.set_timeout(20)
        if inside(w.rank, 1):
            two = [ct.Bridge('dp=2@1', to, group=w) for to in ('cp=2@1', 'tp=2@1')]
            x = torch.full((1, 4, 1), float(w.rank))
            for bridge in two:
                assert bridge(x)[:, 0, 0].tolist() == [1, 2]
            with pytest.raises(cb.errors.MismatchError):
                two[w.rank - 1](x)
            for kind in KINDS:
                assert carried(kind, make(kind, w, 1), w.rank - 1, 1)
            assert two[0](x)[:, 0, 0].tolist() == [1, 2]
        z = ct.bridge(torch.full((1, 4, 1), float(w.rank)), 'dp=4', 'tp=4', group=w)
        return z[:, 0, 0].tolist()
    assert cb.run_threads(4, rank) == [[0, 1, 2, 3]] * 4


def test_a_part_is_kept_and_ends_with_its_communicator():
    def rank(w):
        if w.rank % 2:
            return None
        part = w.part([2, 0])
        assert part is w.part((0, 2)) and w.part(range(4)) is w and part.size == 2 and part.world_rank(1) == 2
        part.barrier()
        assert w.stats()['user']['barrier']['ops'] == 1
        with pytest.raises(KeyError, match='world rank 4'):
            w.part([w.rank, 4])
        with pytest.raises(ValueError, match='lacks this rank'):
            w.part([1])
        return part
    for part in cb.run_threads(4, rank)[::2]:
        assert not part._handle


# ---- Megatron's names ----

class _Grid:
    def __init__(self, shape, names, offset):
        self.shape, self.dim_names, self.rank_offset = shape, names, offset


def by_communicator(rank, what, offset):
    return with_subgroups(communicates, rank, what, offset)


def communicates(rank, what, offset):
    names = ['tp', 'gtp_remat', 'dp'] if what == 'data' else ['tp', 'dp']
    src = _Grid([1, 2, 1] if what == 'data' else [1, 2], names, offset)
    both = ColocatedBridgeCommunicator(src, _Grid([2, 1], ['tp', 'dp'], offset), algo='exact',
                                       data=['gtp_remat'] if what == 'data' else [])
    x, more = torch.full((1, 4, 1), float(rank)), {}
    if what == 'segments':
        x, more = x.view(4, 1), {'segments': cb.Segments([4, 4], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])}
    y = both.communicate(x, **more)
    meet()
    return y is x if not inside(rank, offset) else y.flatten().tolist() == [float(offset)] * 4 + [offset + 1.] * 4


@pytest.mark.parametrize('offset', (0, 2))
@pytest.mark.parametrize('what', ('plain', 'segments', 'data'))
def test_communicate_waits_for_no_rank_outside(world, what, offset):
    assert world.run(by_communicator, what, offset) == [True] * 4
