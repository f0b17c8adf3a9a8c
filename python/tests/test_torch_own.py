# SPDX-License-Identifier: Apache-2.0
"""Bridges with communicators of their own: two at work at once, on two threads, in other orders on other ranks."""
import threading

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from test_torch_ragged import column, worked  # noqa: E402
from world import meet  # noqa: E402


ROWS = [[1., 2., 3.], [21., 22., 23., 24., 25.]]


def bridges(group, comm='own'):
    return (ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=group, output='sharded', comm=comm),
            ct.Bridge('dp=2', 'tp=2', group=group, comm=comm))


def crossed(rank, group=None):
    """Rank 0 begins with the ragged one and rank 1 with the other; neither ends before the other rank has begun it."""
    ragged, uniform = bridges(group or dist.group.WORLD)
    begun, seen = threading.Event(), {}

    def carry(which):
        begun.set()
        seen[which] = ragged(column(ROWS[rank]), worked()).flatten().tolist() if which == 'ragged' else \
            uniform(torch.full((1, 2, 2), rank + 1.)).flatten().tolist()
    for _ in range(3):
        order = ['ragged', 'uniform'][::1 - 2 * rank]
        threads = [threading.Thread(target=carry, args=(which,)) for which in order]
        threads[0].start(), begun.wait(), threads[1].start()
        for thread in threads:
            thread.join()
        assert seen == {'ragged': [[1, 21], [2, 3, 22, 23, 24, 25]][rank], 'uniform': [1.] * 4 + [2.] * 4}
        seen.clear(), begun.clear()
    alone = [carry.comm(torch.device('cpu')) for carry in (ragged, uniform)]
    shared = ct.comm_of(group or dist.group.WORLD, torch.device('cpu'))
    assert len({id(comm) for comm in (*alone, shared)}) == 3
    ragged.destroy(), uniform.destroy()
    assert not any(comm._handle for comm in alone) and shared._handle


def test_two_bridges_are_at_work_at_once(pair):
    pair.run(crossed)


def test_two_bridges_of_threads_have_communicators_of_their_own():
    def one_rank(world):
        ragged, uniform = bridges(world)
        assert ragged.group is not world and ragged.group is not uniform.group
        assert ragged(column(ROWS[world.rank]), worked()).sum() == [22, 119 - 20][world.rank]
        ragged.destroy()
        assert uniform(torch.full((1, 2, 2), world.rank + 1.)).sum() == 12
        uniform.destroy()
    cb.run_threads(2, one_rank)


def failing(rank):
    """An error of one rank reaches those of its bridge, and no other bridge; the next call makes the communicator anew."""
    ragged, uniform = bridges(dist.group.WORLD)
    uniform(torch.ones(1, 2, 2)), ragged(column(ROWS[rank]), worked())
    meet()
    with pytest.raises((ValueError, RuntimeError), match='segments is a dict'):
        ragged(column(ROWS[rank]), worked() if rank else {})
    assert uniform(torch.ones(1, 2, 2)).sum() == 8
    assert ragged(column(ROWS[rank]), worked()).sum() == [22, 99][rank]
    with pytest.raises(ValueError, match="comm is 'mine', expected 'shared' or 'own'"):
        bridges(dist.group.WORLD, 'mine')


def test_an_error_stays_in_its_bridge(pair):
    pair.run(failing)
