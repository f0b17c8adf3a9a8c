# SPDX-License-Identifier: Apache-2.0
"""Memory that peers write into, and tensors in it. Here it is host memory that is said to be reached: blocks,
workspace, lifetimes and order are all as on GPUs, which python/tests/gpu/cases_bridge.py looks at."""
import contextlib
import gc
import itertools
import os
import sys
import weakref

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import bridge as core  # noqa: E402
from colobridge import memory  # noqa: E402
from colobridge.errors import STATUS  # noqa: E402
from host_pool import pooled, reached  # noqa: E402
import ragged_case  # noqa: E402
from ragged_case import Case  # noqa: E402
from test_core import Owner  # noqa: E402
from test_torch_bridge import PAIRS, carries  # noqa: E402
from world import meet  # noqa: E402

arenas = sys.modules['colobridge.torch.arena']
uniform = sys.modules['colobridge.torch.uniform']
FAN_IN, FAN_OUT = ('dp=4', 'cp=2,dp=2'), ('cp=2,dp=2', 'dp=4')
MOVES = {'output': 'sharded', 'grad': 'disjoint'}


def carries_reached(rank, src, dst, axes, output, grad, buffers):
    with reached(buffers=buffers):
        carries(rank, src, dst, axes, output, grad, 'exact')
        carry = ct.Bridge(src, dst, group=dist.group.WORLD, output=output, grad=grad)
        x = torch.ones(carry._engine._core(carry.comm(torch.device('cpu')), (4, 8, 3), torch.float32,
                                   torch.device('cpu')).shapes[0], requires_grad=True)
        plan = cb.Plan(carry.src, carry.dst, (4, 8, 3), rank, output=output, grad=grad)
        y = carry(x, shape=(4, 8, 3))
        y.backward(torch.ones_like(y))
        # What others do not reach needs no workspace; sums are read from a copy of d_y.
        ways = [plan.reached(way) for way in ('forward', 'backward')]
        saved = [ways[0] and buffers > 0, ways[1] and buffers > 0 and plan.addends == 1]
        assert carry.is_p2p and carry.copied == sum(ways) - sum(saved), (ways, saved, carry.copied)


@pytest.mark.parametrize('src, dst', PAIRS)
def test_values_and_gradients_are_those_of_the_definition(world, src, dst):
    for (output, grad), buffers in itertools.product(
            (('full', 'partial'), ('full', 'disjoint'), ('sharded', 'disjoint')), (0, 2)):
        world.run(carries_reached, src, dst, 'bsh', output, grad, buffers)
    world.run(carries_reached, src, dst, 'sbh', 'full', 'partial', 1)


def takes_from_torch(rank):
    owner, was = Owner(), arenas.allocator
    arenas.allocator = lambda device: owner.functions
    try:
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
        x = torch.ones(1, 8, 3, requires_grad=True)
        y = carry(x)
        y.backward(torch.ones_like(y))
        assert owner.asked == carry._engine._last[1].bridge.workspace_size > 0
        carry.destroy()
        assert not owner.live
    finally:
        arenas.allocator = was


def test_allocator_that_an_exception_leaves_has_no_memory(monkeypatch):
    def interrupted(device):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.cuda, 'current_stream', interrupted)
    functions = arenas.allocator.__wrapped__(torch.device('cuda', 0))
    assert [functions.allocate(None, nbytes) for nbytes in (1, 512, 1 << 20)] == [None] * 3


def test_bridges_own_memory_of_pytorch_s(world):
    world.run(takes_from_torch)


def pool_serves(rank, options, addends):
    """Steps of a uniform bridge: y and d_x are in the pool again and again, and where they do not fit they are copied."""
    with pooled():
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, **options)
        found, sums = set(), addends > 1
        for step in range(4):
            x = torch.full((1, 4, 2), float(rank + step), requires_grad=True)
            y = carry(x)
            pool = carry._engine._last[1].core.region.pool
            assert pool.holds(y) and not y._is_view() and carry.copied == step * sums
            want = torch.stack([torch.full((4, 2), float(rank // 2 * 2 + r + step)) for r in range(2)])
            if options:
                want = want.chunk(4, 1)[rank % 2], want.chunk(4, 1)[3 - rank % 2]
                want = torch.cat(want, 1)
            assert torch.equal(y, want)
            y.backward(torch.ones_like(y))
            assert pool.holds(x.grad) is not sums and torch.equal(x.grad, torch.full_like(x, float(addends)))
            found.add((y.data_ptr(), sums or x.grad.data_ptr()))
            del y
        assert len(found) == 1
        kept = [carry(x) for _ in range(3)]  # of which one fits
        before = [y.clone() for y in kept]
        assert [pool.holds(y) for y in kept] == [True, False, False] and carry.copied == 4 * sums + 2
        part = kept[0][:, :1]
        del kept[0]
        assert not pool.holds(carry(x + 1))  # not while any view is alive
        assert torch.equal(part, before[0][:, :1]) and all(map(torch.equal, kept, before[1:]))
        del part
        pool._new = lambda like, shape: like.new_empty(shape)  # freed, but a stream that it was recorded on uses it
        copied, y = carry.copied, carry(x)
        assert not pool.holds(y) and carry.copied == copied + 1 and torch.equal(y, before[0])
        del pool._new, y
        y = carry(x)
        assert pool.holds(y) and torch.equal(y, before[0])
        carry.destroy()
        del carry, pool
        gc.collect()
        assert torch.equal(y.clone(), before[0])


def test_outputs_are_in_the_pool_while_they_fit(world):
    world.run(pool_serves, {}, 2)
    world.run(pool_serves, MOVES, 1)


def unregistered(rank):
    """PyTorch's memory has no handle for other processes on a rank: outputs are copied, and no memory is kept for them."""
    with pooled():
        was, seen = memory.Memory.register, []

        def refuse(comm, tensor):
            seen.append(weakref.ref(tensor))
            raise cb.ArgumentError('register: not made by cudaMalloc()', STATUS['ERR_ARG']) if rank == 1 else cb.FailedError(
                'peer memory: rank 1 failed: register: not made by cudaMalloc()', STATUS['ERR_PEER'])
        memory.Memory.register = refuse
        try:
            carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, **MOVES)
            x = torch.full((1, 4, 2), float(rank), requires_grad=True)
            y = carry(x)
            y.backward(torch.ones_like(y))
            assert carry.copied == 2 and torch.equal(x.grad, torch.ones_like(x)) and len(seen) == 1
            gc.collect()
            assert seen[0]() is None
        finally:
            memory.Memory.register = was


def test_outputs_are_copied_if_their_memory_cannot_be_registered(world):
    world.run(unregistered)


def ragged_pool(rank, output, copies):
    """@copies: of a step that merges"""
    with pooled():
        carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD, output=output, grad='disjoint')
        tables = cb.Segments([2] * 4, src=range(4), seq=[0] * 4, pos=[0, 2, 4, 6], seq_len=[8], seq_dp=[0])
        found, copied = set(), 0
        for step in range(3):
            x = torch.full((2, 3), float(rank + step), requires_grad=True)
            y = carry(x, tables)
            mine = [p for p in range(8) if output == 'full' or p in (rank, 7 - rank)]
            assert y[:, 0].tolist() == [float(p // 2 + step) for p in mine]
            y.backward(torch.ones_like(y))  # not zero elsewhere, so from any rank
            workspace = carry._engine._ragged[x.device].workspace
            assert workspace.copied == copied and torch.equal(x.grad, torch.ones_like(x))
            assert workspace._pool.holds(y) and workspace._pool.holds(x.grad)
            found.add((y.data_ptr(), x.grad.data_ptr()))
            assert carry.is_p2p and carry.copied == copied
            merged = carry(x.detach(), tables, into=torch.zeros(8 if output == 'full' else 2, 3))  # x is not in the pool
            assert torch.equal(merged, y)
            held, copied = (y, carry(x.detach(), tables)), copied + copies  # the second one does not fit
            assert not workspace._pool.holds(held[1]) and torch.equal(*held)
            del y, held
        assert len(found) == 1
        carry.destroy()
        carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD, output=output, grad='disjoint',
                          buffers=None if rank == 1 else 0)
        y = carry(torch.ones(2, 3, requires_grad=True), tables)
        y.sum().backward()
        assert carry.copied == (0 if rank == 1 else 2)


def test_outputs_of_ragged_batches_are_in_the_pool_while_they_fit(world):
    world.run(ragged_pool, 'sharded', 2)


def pool_carries(rank, seeds):
    with pooled():
        for seed in seeds:
            case = Case(seed, 4)
            carry = ct.RaggedBridge(*case.layouts(), group=dist.group.WORLD, output=case.output, grad=case.grad)
            segments = cb.Segments(**case.tables())
            for merged in (False, True, False):
                ragged_case.carried(rank, case, carry, segments, merged)
            carry.destroy()


def test_ragged_batches_with_a_pool_are_those_of_the_definition(world):
    world.run(pool_carries, range(20, 32))


def carries_ragged(rank, size, seeds):
    with reached():
        for seed in seeds:
            case = Case(seed, size)
            carry = ct.RaggedBridge(*case.layouts(), group=dist.group.WORLD, output=case.output, grad=case.grad)
            segments = cb.Segments(**case.tables())
            for merged in (False, True):
                ragged_case.carried(rank, case, carry, segments, merged)
            workspace = carry._engine._ragged[torch.device('cpu')].workspace
            # of both calls with gradients and of one without, those in which this rank has what peers reach
            rows, own = len(case.source(rank)), case.output == 'full' and case.grad == 'partial' and case.cp > 1
            there = [n > 0 for n in (len(case.arrivals(rank)), rows)]
            back = [n > 0 for n in (len(case.arrivals(rank)), case.axis(rank))] if own else [rows > 0] * 2
            assert workspace.copied == 2 * sum(there) + sum(back), (seed, workspace.copied)
            assert segments._sums(carry._engine._options, carry.dst) == own
            carry.destroy()


def test_ragged_batches_go_through_memory_that_peers_reach(world):
    world.run(carries_ragged, 4, range(20))


def grows(rank):
    """Steps of other sizes: memory is made anew when one does not fit, on all ranks."""
    with reached():
        carry, sizes = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD), []
        for n in (3, 200, 100, 230, 2000):
            rows = [n, 0, 1, 2]
            segments = cb.Segments(rows, src=range(4), seq=[0] * 4, pos=[0, n, n, n + 1], seq_len=[8 * n], seq_dp=[0])
            x = torch.full((rows[rank], 64), float(rank), requires_grad=True)
            y = carry(x, segments)
            y.backward(y.detach())
            assert y[:, 0].tolist() == [float(r) for r in range(4) for _ in range(rows[r])]
            assert torch.equal(x.grad, 4 * x.detach())
            sizes.append(carry._engine._ragged[x.device].workspace._memory.nbytes)
        assert sizes[1] == sizes[2] < sizes[3] < sizes[4] and sizes[1] >= (200 + 3) * 64 * 4


def test_memory_of_ragged_batches_grows_on_all_ranks_together(world):
    world.run(grows)


def other_features(rank, width):
    """Rank 2, which has no rows, says that x has other features: all ranks hear of it in the first call on the
    tables, whether memory has to grow or not."""
    with reached():
        carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD)
        for rows in (8, 1):
            segments = cb.Segments([rows, rows, 0, rows], src=range(4), seq=[0] * 4, pos=[0, 8, 16, 16], seq_len=[64],
                                   seq_dp=[0])
            x = torch.ones(rows, 64)
            meet()
            with pytest.raises(cb.MismatchError) as caught:
                carry(None, segments, like=torch.ones(1, width)) if rank == 2 else carry(x, segments)
            assert 'rank 2 of' in str(caught.value), caught.value
            meet()
            y = carry(None, segments, like=x) if rank == 2 else carry(x, segments)  # the communicator lives on
            assert len(y) == 3 * rows


@pytest.mark.parametrize('width', (3, 65, 4096))
def test_features_that_differ_on_a_rank_without_rows_are_named_on_all(world, width):
    world.run(other_features, width)


def blocks(rank):
    with reached(buffers=2):
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
        x = [torch.full((1, 4, 2), float(10 * k + rank)) for k in range(4)]
        want = [torch.stack([torch.full((4, 2), float(10 * k + rank // 2 * 2 + r)) for r in range(2)])
                for k in range(4)]
        ys = [carry(a) for a in x]
        assert carry.copied == 2  # blocks for two of four
        assert all(torch.equal(a, b) for a, b in zip(ys, want))
        at = [y.data_ptr() for y in ys]
        inside = [carry._engine._last[1].arena.holds(y) for y in ys]
        assert inside == [True, True, False, False] and len(set(at)) == 4
        part = ys[0][:, 1:3, :1]  # as long as somebody has any of it
        ys[0] = None
        assert not carry._engine._last[1].arena.holds(carry(x[0]))
        assert torch.equal(part, want[0][:, 1:3, :1])
        del part
        again = carry(x[3])
        assert again.data_ptr() == at[0] and torch.equal(again, want[3])
        assert torch.equal(ys[1], want[1])
        if rank % 2:  # one rank has no block left, the other has: no rank waits
            ys[1] = None
        y = carry(x[2])
        assert carry._engine._last[1].arena.holds(y) == bool(rank % 2) and torch.equal(y, want[2])


def test_blocks_come_back_when_no_tensor_has_them_and_a_rank_without_one_copies(world):
    world.run(blocks)


def shapes(rank):
    """One bridge and one memory for all shapes, whose outputs live together and whose backwards come in any order."""
    made, was = [], core.Bridge

    def counted(*args, **options):
        made.append(was(*args, **options))
        return made[-1]
    with reached(buffers=3):
        core.Bridge = counted
        uniform._FITTING = 3
        try:
            carry, has = ct.Bridge(*FAN_IN, group=dist.group.WORLD), []
            for features, rows in ((8, (16, 4, 12, 8, 16)), (9, (20, 4))):
                held = []
                for k, n in enumerate(rows):
                    x = torch.full((1, n, features), float(10 * k + rank), requires_grad=True)
                    held.append((x, carry(x)))
                    has.append(carry._engine._last[1].arena.memory)
                    assert 0 < len(carry._engine._last[1].core._fits) <= 3
                for k, (x, y) in enumerate(held):
                    want = torch.tensor([10.0 * k + rank // 2 * 2 + r for r in range(2)])
                    assert torch.equal(y, want[:, None, None].expand(2, rows[k], features))
                for x, y in held[::2] + held[1::2]:
                    y.backward(y.detach())
                    assert torch.equal(x.grad, 2 * x.detach())  # of two context ranks
            assert len(made) == 1 and len(set(has)) == 2 and has[0] is has[4] and has[4].nbytes < has[5].nbytes
        finally:
            core.Bridge, uniform._FITTING = was, 1024


def test_shapes_share_a_bridge_and_its_memory(world):
    world.run(shapes)


def outgrown(rank):
    with reached():
        carry, held = ct.Bridge(*FAN_IN, group=dist.group.WORLD), []
        for n in (4, 400, 40000):
            carry(torch.ones(1, n, 2))
            held.append(weakref.ref(carry._engine._last[1].arena.memory))
        assert [one() is not None for one in held] == [False, False, True] and len(carry._engine._kept) == 3


def test_shapes_that_have_been_keep_no_memory_that_was_too_small(world):
    world.run(outgrown)


def saved(rank):
    """A block that autograd holds for backward stays."""
    with reached(buffers=1):
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, **MOVES)
        x = [torch.full((1, 4, 2), float(k + 1), requires_grad=True) for k in range(2)]
        held = (carry(x[0]) ** 2).sum()  # y is saved, and has no other owner
        carry(x[1]).sum().backward()
        held.backward()
        assert torch.equal(x[0].grad, torch.full_like(x[0], 2.0)), x[0].grad
        assert torch.equal(x[1].grad, torch.ones_like(x[1]))


def test_what_autograd_saved_stays(world):
    world.run(saved)


def in_place(rank):
    """An output is no view."""
    with reached(buffers=1):
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, **MOVES)
        x = torch.ones(1, 4, 2, requires_grad=True)
        y = carry(x)
        assert carry._engine._last[1].arena.holds(y) and not y._is_view()
        y.mul_(3)
        y[:, 0] += 1
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_outputs_may_be_written_in_place(world):
    world.run(in_place)


def outlives(rank):
    with reached(buffers=2):
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
        y = carry(torch.full((1, 4, 2), 5.0))
        held = weakref.ref(carry._engine._last[1].arena.memory)
        carry.destroy()
        del carry
        dist.barrier()
        ct.shutdown()
        gc.collect()
        assert held() is not None and torch.equal(y, torch.full((2, 4, 2), 5.0))
        y += 1
        del y
        gc.collect()
        assert held() is None
    dist.barrier()


def test_memory_outlives_its_bridge_and_communicator_as_long_as_a_tensor_does(world):
    world.run(outlives)


def checkpointed(rank):
    grads = []
    for buffers in (0, 1):
        with reached(buffers=buffers):
            carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
            for run in (lambda x: carry(x.tanh()).sin(),
                        lambda x: checkpoint(lambda x: carry(x.tanh()).sin(), x, use_reentrant=False)):
                x = torch.linspace(0, 1, 8).view(1, 4, 2).requires_grad_()
                run(x).square().sum().backward()
                grads.append(x.grad)
    assert all(torch.equal(grads[0], g) for g in grads)


def test_checkpointing(world):
    world.run(checkpointed)


def staged(rank):
    """Ranks that hold nothing of a side."""
    for buffers in (0, 1):
        with reached(buffers=buffers):
            carry = ct.Bridge('dp=2,pp=2', 'dp=2,pp=2', group=dist.group.WORLD)
            mine = torch.full((2, 2, 3), float(rank), requires_grad=True) if rank >= 2 else None
            y = carry(mine, shape=(4, 2, 3), like=torch.empty(0))
            assert y.numel() == (12 if rank < 2 else 0)
            if rank < 2:
                assert torch.equal(y, torch.full((2, 2, 3), rank + 2.0))
            y.backward(2 * y.detach())
            if mine is not None:
                assert torch.equal(mine.grad, 2 * mine.detach())


def test_ranks_without_a_part_take_part(world):
    world.run(staged)


def refused(rank):
    x = torch.ones(1, 4, 2)
    for buffers in (-1, 1.5, True, 'two'):
        with pytest.raises(ValueError, match='bridge: buffers is'):
            ct.Bridge(*FAN_IN, group=dist.group.WORLD, buffers=buffers)
    with pytest.raises(ValueError, match="transport is 'tcp'"):
        ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='tcp')
    with pytest.raises(ValueError, match="transport is 'peer' and algo 'collective'"):
        ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='peer', algo='collective')
    for one in (1, 4):  # rank 2 alone, which the one that it talks to hears; all
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='peer' if one == 4 or rank == 2 else 'auto')
        with pytest.raises((ValueError, RuntimeError)[one == 1 and rank != 2:],  # or another's was first
                           match="transport is 'peer' and x is on cpu") \
                if rank > 1 or one == 4 else contextlib.nullcontext():
            carry(x)
    plain = ct.Bridge(*FAN_IN, group=dist.group.WORLD, buffers=3)  # does nothing on the host
    plain(x)
    assert plain.is_p2p is False and plain.copied == 0
    meet()
    with reached():
        # a layout that does not fit, on one rank: its error message, not a timeout
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD, **MOVES)
        with pytest.raises(ValueError if rank == 2 else RuntimeError) if rank > 1 \
                else contextlib.nullcontext():
            carry(x, shape=(4, 3 if rank == 2 else 4, 2))
        assert torch.equal(carry(x), ct.bridge(x, *FAN_IN, group=dist.group.WORLD, **MOVES))
        # one rank that wants no memory: all hear that they differ
        odd = ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='nccl' if rank == 2 else 'auto')
        with pytest.raises(cb.MismatchError) if rank > 1 else contextlib.nullcontext():
            odd(x)
        # as many blocks as a rank likes
        odd = ct.Bridge(*FAN_IN, group=dist.group.WORLD, buffers=rank or None)
        assert torch.equal(odd(x), torch.ones(2, 4, 2))


def test_what_cannot_be_is_refused_on_all_ranks(world):
    world.run(refused)


def no_memory(rank):
    x, tried = torch.ones(1, 4, 2), []
    where = ['peer memory']

    def none(comm, nbytes):
        tried.append(nbytes)
        if comm.rank:
            raise cb.FailedError('%s: rank 0 failed: no memory for you' % where[0], STATUS['ERR_PEER'])
        raise cb.FailedError('no memory for you', STATUS['ERR_NOMEM'])
    with reached():
        was, memory.Memory.alloc = memory.Memory.alloc, none
        try:
            carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
            with pytest.warns(UserWarning, match='it goes through NCCL: .*no memory for you'):
                y = carry(x)
            assert carry.is_p2p is False and torch.equal(y, torch.ones(2, 4, 2)) and len(tried) == 2
            with pytest.raises(RuntimeError, match='no memory for you'):
                ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='peer')(x)
            # somewhere else than at making memory: this one does not go on either
            for where[0] in ('bridge create', 'memory (registered'):
                if rank % 2:
                    with pytest.raises(RuntimeError, match='rank 0 failed'):
                        ct.Bridge(*FAN_IN, group=dist.group.WORLD)(x)
        finally:
            memory.Memory.alloc = was


def test_without_memory_it_is_staged_or_an_error(world):
    world.run(no_memory)


def out_of_reach(rank):
    """Some ranks reach each other, so there is memory, and ranks that exchange do not."""
    x, made, was = torch.ones(1, 4, 2), [], core.Bridge

    def far(*args, transport, **options):
        made.append(transport)
        if transport == 'peer':
            raise cb.FailedError("ranks 2 and 3, which exchange, do not reach each other", STATUS['ERR_UNBUILT'])
        return was(*args, transport=transport, **options)
    with reached():
        core.Bridge = far
        try:
            carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
            assert torch.equal(carry(x), torch.ones(2, 4, 2))
            assert carry.is_p2p is False and made == ['peer', 'nccl']
            with pytest.raises(RuntimeError, match='ranks 2 and 3'):
                ct.Bridge(*FAN_IN, group=dist.group.WORLD, transport='peer')(x)
            ragged = ct.RaggedBridge(*FAN_IN, group=dist.group.WORLD)
            tables = cb.Segments([1] * 4, src=[0, 1, 2, 3], seq=[0, 0, 1, 1], pos=[0, 1, 0, 1],
                                 seq_len=[4, 4], seq_dp=[0, 1])
            assert torch.equal(ragged(x[0, :1], tables), torch.ones(2, 2))
            assert made[3:] == ['peer', 'nccl']
        finally:
            core.Bridge = was


def test_out_of_reach_it_is_staged_or_an_error(world):
    world.run(out_of_reach)


def before(rank):
    """Refused before the ranks had met: each hears of it once, in the words of the one that was refused."""
    x = torch.ones(1, 4, 2)
    was = os.environ.get('COLO_TRANSPORT')
    with reached():
        carry = ct.Bridge(*FAN_IN, group=dist.group.WORLD)
        carry.comm(x.device)  # making a communicator checks the environment, too
        if rank == 0:
            os.environ['COLO_TRANSPORT'] = 'tcp'
        try:
            with pytest.raises(ValueError if rank == 0 else RuntimeError) if rank < 2 \
                    else contextlib.nullcontext() as said:
                carry(x)
        finally:
            if rank == 0:
                del os.environ['COLO_TRANSPORT']
                if was is not None:
                    os.environ['COLO_TRANSPORT'] = was
        words = "COLO_TRANSPORT is 'tcp', expected auto, nccl, peer or ucx"
        assert rank > 1 or str(said.value) == ('' if rank == 0 else 'memory create: rank 0 failed: ') + words
        assert torch.equal(carry(x), torch.ones(2, 4, 2))


def test_an_error_before_the_ranks_met_is_told_as_it_was(world):
    world.run(before)


def masks(rank):
    with reached(buffers=2):
        carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD, **MOVES)
        for _ in range(3):
            x = torch.arange(2 * 8 * 3).reshape(2, 8, 3) % 3 == rank % 3
            y = carry(x)
            assert y.dtype == torch.bool and carry.is_p2p


def test_masks_stay_masks(world):
    world.run(masks)
