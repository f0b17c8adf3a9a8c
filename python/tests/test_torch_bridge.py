# SPDX-License-Identifier: Apache-2.0
"""The bridge as an autograd function: processes over gloo, ranks that are threads, errors."""
import contextlib
import gc
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.torch import moves  # noqa: E402
from world import meet  # noqa: E402

PAIRS = [('tp=2,dp=2', 'tp=2,cp=2,dp=1'), ('tp=4,dp=1', 'tp=1,cp=2,dp=2'), ('dp=4', 'cp=2,dp=2'),
         ('dp=4', 'tp=4'), ('tp=2,dp=2', 'tp=2,dp=2'), ('dp=2,tp=2', 'tp=2,dp=2'),
         ('cp=2,dp=2', 'cp=4'), ('tp=4', 'cp=4')]


def whole(shape, seed, dtype=torch.float32):
    """[B, N, H] of small integers times position codes: sums of a few are exact."""
    rng = torch.Generator().manual_seed(seed)  # ranks may be threads
    return torch.randint(-512, 512, shape, generator=rng).to(dtype)


def part(layout, rank, tensor, full_rows):
    own = layout.owned(rank, *tensor.shape, full_rows=full_rows)
    return tensor[own.samples[0]:own.samples[1], own.rows].clone()


ORDER = {'bsh': (0, 1, 2), 'sbh': (1, 0, 2), 'hsb': (2, 1, 0)}


def in_order(t, axes):
    return t.reshape(-1, t.shape[-1]) if axes == 'th' else t.permute(ORDER[axes]).contiguous()


def partial_gradients(dst, shape, seed):
    """What every destination rank's gradient is: its own values, alike on tp replicas only."""
    grads = {}
    for rank in dst.grid.ranks():
        at = dst.grid.coords(rank)
        key = (at.get('dp', 0), at.get('cp', 0))
        grads[rank] = whole(shape, seed + 1 + 10 * key[0] + key[1])
    return grads


def expected_dx(src, dst, rank, shape, grads, output, grad):
    """The adjoint, by the definitions: the gradient of a sample is that of the dp replica that has it,
    summed over cp (partial) or of the cp rank that owns the row."""
    own = src.owned(rank, *shape)
    out = torch.zeros(shape)
    for b in range(shape[0]):
        for r in range(shape[1]):
            sources = {}
            for q in dst.grid.ranks():
                o = dst.owned(q, *shape, full_rows=output == 'full' and grad == 'partial')
                if o.samples[0] <= b < o.samples[1] and r in o.rows:
                    at = dst.grid.coords(q)
                    sources[at.get('cp', 0)] = grads[q][b, r]  # tp replicas are alike
            out[b, r] = sum(sources.values())
    return out[own.samples[0]:own.samples[1], own.rows]


def carries(rank, src, dst, axes, output, grad, algo, group=None):
    src, dst, shape = cb.Layout.src(src), cb.Layout.dst(dst), (4, 8, 3)
    bridge = ct.Bridge(src, dst, group=group or dist.group.WORLD, axes=axes, output=output,
                       grad=grad, algo=algo)
    everything = whole(shape, 7)
    x = in_order(part(src, rank, everything, False), axes)
    x.requires_grad_()
    y = bridge(x, shape=shape)
    full = output == 'full'
    assert torch.equal(y, in_order(part(dst, rank, everything, full), axes))
    grads = partial_gradients(dst, shape, 7)
    own = dst.owned(rank, *shape, full_rows=full)
    mine = grads[rank][own.samples[0]:own.samples[1], own.rows].clone()
    if full and grad == 'disjoint':
        rows = set(dst.owned(rank, *shape).rows)
        for r in range(shape[1]):
            if r not in rows:
                mine[:, r] = 0
    d_y = in_order(mine, axes)
    kept = d_y.clone()
    y.backward(d_y)
    want = expected_dx(src, dst, rank, shape, grads, output, grad)
    assert torch.equal(x.grad, in_order(want, axes)), (x.grad, want)
    assert torch.equal(d_y, kept)
    bridge.destroy()


@pytest.mark.parametrize('src, dst', PAIRS)
def test_values_and_gradients_are_those_of_the_definition(world, src, dst):
    for axes, (output, grad) in itertools.product(
            ('bsh', 'sbh', 'th', 'hsb'), (('full', 'partial'), ('full', 'disjoint'),
                                          ('sharded', 'disjoint'))):
        world.run(carries, src, dst, axes, output, grad, 'exact')


def extra_dims(rank):
    with pytest.raises(ValueError, match="dim 'xp' of extent 2 has no role"):
        ct.Bridge('xp=2,dp=2', 'tp=2,dp=2', group=dist.group.WORLD)
    x = torch.full((1, 1, 1), float(rank // 2))
    with pytest.raises(ValueError, match="dim 'xp' of extent 2 has no role"):
        ct.bridge(x, 'xp=2,dp=2', 'dp=4', group=dist.group.WORLD)
    bridge = ct.Bridge('xp=2,dp=2', 'dp=1,yp=4', group=dist.group.WORLD, extra=['xp', 'yp'])
    assert bridge(x).flatten().tolist() == [0.0, 1.0]
    bridge.destroy()
    y = ct.bridge(x, 'xp=2,dp=2', 'dp=1,yp=4', group=dist.group.WORLD, extra='xp-yp')
    assert y.flatten().tolist() == [0.0, 1.0]


def test_bridge_with_an_undeclared_extra_dim_is_refused(world):
    world.run(extra_dims)


@pytest.mark.parametrize('src, dst', PAIRS[:2] + PAIRS[4:5])
def test_the_collective_way_gives_the_same(world, src, dst):
    for axes in ('bsh', 'sbh'):
        world.run(carries, src, dst, axes, 'full', 'partial', 'collective')


def test_ranks_that_are_threads_do_the_same():
    for src, dst in PAIRS:
        cb.run_threads(4, lambda world: carries(world.rank, src, dst, 'bsh', 'full', 'partial', 'exact',
                                                group=world))
    with pytest.raises(ValueError, match='group is None'):
        ct.Bridge('dp=4', 'dp=4', group=None)


def negative(world):
    x = torch.arange(12.0).view(2, 2, 3) + 20 * world.rank
    carry = ct.Bridge('dp=2', 'tp=2', group=world)
    gradients = []
    for bit in (False, True):  # after a call of the same shapes
        a = x.clone().requires_grad_()
        y = carry(a)
        d_y = torch.arange(24.0).view(4, 2, 3)
        gradients += torch.autograd.grad(y, a, torch._neg_view(-d_y) if bit else d_y)
    assert torch.equal(*gradients)
    carry(torch._neg_view(x))


def test_memory_of_other_signs_is_never_carried():
    with pytest.raises(ValueError, match='x: its memory holds other signs'):
        cb.run_threads(2, negative)


def strided(rank):
    src, dst = cb.Layout.src('dp=4'), cb.Layout.dst('cp=2,dp=2')
    everything = whole((8, 4, 6), 3)
    mine = part(src, rank, everything, False)
    wide = torch.full((2, 4, 14), float('nan'))
    x = wide[:, :, 1:13:2]
    x.copy_(mine)
    x = x.detach().requires_grad_()
    assert not x.is_contiguous()
    y = ct.bridge(x, src, dst, group=dist.group.WORLD)
    assert torch.equal(y, part(dst, rank, everything, True))
    y.sum().backward()  # a gradient with strides of 0
    assert torch.equal(x.grad, torch.full((2, 4, 6), 2.0))  # one from each of two cp ranks
    # transposed in and out
    t = mine.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(ct.bridge(t, src, dst, group=dist.group.WORLD), y)
    half = mine.to(torch.bfloat16)
    assert ct.bridge(half, src, dst, group=dist.group.WORLD).dtype == torch.bfloat16
    tokens = (mine * 3).to(torch.int64)
    moved = ct.bridge(tokens, src, dst, group=dist.group.WORLD)
    assert torch.equal(moved, (part(dst, rank, everything, True) * 3).to(torch.int64))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert ct.bridge(mine, src, dst, group=dist.group.WORLD).dtype == torch.float32


def test_strided_inputs_and_expanded_gradients_are_taken_as_they_are(world):
    world.run(strided)


def ragged(rank):
    src, dst, shape = cb.Layout.src('dp=4'), cb.Layout.dst('cp=2,dp=2'), (6, 4, 2)
    everything = whole(shape, 5)
    x = part(src, rank, everything, False).requires_grad_()
    assert len(x) == (1 if rank % 2 == 0 else 2)
    bridge = ct.Bridge(src, dst, group=dist.group.WORLD)
    y = bridge(x, samples=6)
    assert torch.equal(y, part(dst, rank, everything, True))
    y.backward(y.detach())
    assert torch.equal(x.grad, 2 * x.detach())


def test_samples_that_dp_does_not_divide(world):
    world.run(ragged)


def one_rank_wrong(rank):
    bridge = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    good = torch.ones(1, 4, 2)
    bridge(good)
    if rank < 2:  # exchange with each other alone, and notice nothing
        bridge(good)
    else:
        x = good if rank == 3 else good[:, :, :1]
        with pytest.raises(RuntimeError if rank == 3 else ValueError) as caught:
            bridge(x, shape=(4, 4, 2))
        assert 'rank 2: x is [1, 4, 1], expected [1, 4, 2]' in str(caught.value), caught.value
    assert torch.equal(bridge(good), torch.ones(2, 4, 2))  # made anew by all


def test_one_ranks_mistake_is_every_ranks_error_and_the_next_call_works(world):
    world.run(one_rank_wrong)


def stays(rank):
    g = torch.arange(4.0 * 3 * 2).view(4, 3, 2)
    for axes, to in (('bsh', (0, 1, 2)), ('sbh', (1, 0, 2)), ('th', None)):
        def turned(t):
            return t.reshape(-1, 2) if to is None else t.permute(to).contiguous()
        into = ct.Bridge('dp=4', 'tp=4', group=dist.group.WORLD, axes=axes)
        out = ct.Bridge('tp=4', 'dp=4', group=dist.group.WORLD, axes=axes)
        for _ in range(3):
            x, d = turned(g[rank:rank + 1]).clone().requires_grad_(), turned(g)
            y = into(x, samples=4)
            assert torch.equal(y, turned(g))
            y.backward(d)
            assert torch.equal(x.grad, x) and x.grad.is_contiguous()
            whole = turned(g).clone().requires_grad_()
            y = out(whole, samples=4)
            assert torch.equal(y, x) and y.is_contiguous() and not y._is_view()
            y.add_(1)
            y.backward(turned(g[rank:rank + 1]))
            assert torch.equal(whole.grad, turned(g)) and torch.equal(whole, turned(g))
        assert (d.data_ptr() <= x.grad.data_ptr() < d.data_ptr() + 96) == (axes != 'sbh')  # no copy
    summed = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    for _ in range(3):
        x = torch.ones(1, 4, 2, requires_grad=True)
        y = summed(x)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
    x, d = g[rank:rank + 1].clone().requires_grad_(), g
    into = ct.Bridge('dp=4', 'tp=4', group=dist.group.WORLD)
    for _ in range(2):
        into(x).backward(d)
    y = into(x)
    into.destroy()
    with pytest.raises(RuntimeError, match='this bridge was destroyed'):
        y.backward(d)


def test_a_gradient_that_stays_on_its_rank_is_part_of_that_of_y(world):
    world.run(stays)


def scaled(rank):
    """Of all kinds, in halves, and where the gradient is a part of that of y. Powers of 2 are exact."""
    segments = cb.Segments([2, 3], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])
    cuts = [cb.Packing([0, 8], split=split) for split in ('zigzag', 'block')]
    kinds = ((ct.Bridge, ('dp=2', 'cp=2'), torch.ones(1, 8, 3), {}), (ct.Bridge, ('dp=2', 'dp=2'), torch.ones(1, 8, 3), {}),
             (ct.RaggedBridge, ('dp=2', 'cp=2'), torch.ones(2 + rank, 3), {'segments': segments}),
             (ct.PackedBridge, ('cp=2', 'cp=2'), torch.ones(4, 3, dtype=torch.bfloat16), dict(zip(('src', 'dst'), cuts))))
    for make, specs, x, given in kinds:
        grads = {}
        for scale in (1, 4, .5):
            carry = make(*specs, group=dist.group.WORLD, grad_scale=scale)
            for half in (False, True, False):
                leaf = x.clone().requires_grad_()
                y = carry.start(leaf, **given).finish() if half else carry(leaf, **given)
                d = torch.arange(1., y.numel() + 1).view(y.shape).to(y.dtype)
                y.backward(d)
                assert torch.equal(d, torch.arange(1., y.numel() + 1).view(y.shape).to(y.dtype))  # not written
                assert torch.equal(leaf.grad, grads.setdefault(1, leaf.grad) * scale), (make, specs, scale)
                assert leaf.grad.dtype is x.dtype
    with pytest.raises(ValueError, match=r"bridge: grad_scale is 'W', expected a number"):
        ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD, grad_scale='W')


def test_grad_scale_is_a_factor_of_x_s_gradient(pair):
    pair.run(scaled)


def other_rows(rank, group=None, meet=meet):
    good, odd = torch.ones(1, 8, 2), torch.ones(1, 12, 2)
    # All make a bridge; or one does, and rank 1, which is late, repeats its last call, or comes with another type.
    for late in None, good, torch.nn.Parameter(good, requires_grad=False):
        bridge = ct.Bridge('dp=4', 'tp=4,dp=1', group=group or dist.group.WORLD)
        if late is not None:
            bridge(good)
        meet()
        if rank == 1 and late is not None:
            time.sleep(.2)  # the communicator is dead when it comes
        with pytest.raises(cb.MismatchError) as caught:
            bridge(odd if rank == 2 else late if rank == 1 and late is not None else good)
        words = ("bridge create: rows: rank 2 of 'world' has 12, rank 0 8" if late is None else
                 r"rows: ranks 0, 1, 3 have 8, rank 2 has 12 \(((bridge forward|exchange): comm 'world' is dead: )?on")
        assert re.search(words, str(caught.value)), caught.value
        assert torch.equal(bridge(good), torch.ones(4, 8, 2))


def test_rows_that_differ_are_named_with_their_ranks(world):
    world.run(other_rows)
    meet_here = threading.Barrier(4).wait
    cb.run_threads(4, lambda comm: other_rows(comm.rank, comm, meet_here))


def one_rank_flat(rank):
    """A mistake that is found before the library is called."""
    bridge = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    good = torch.ones(1, 4, 2)
    for x, words in ((good[0], 'expected 3 axes'), (good.to(torch.complex64), 'complex64')):
        with pytest.raises(ValueError if rank == 2 else RuntimeError, match=words) if rank > 1 \
                else contextlib.nullcontext():
            bridge(x if rank == 2 else good)
        assert torch.equal(bridge(good), torch.ones(2, 4, 2))


def test_one_ranks_bad_argument_is_every_ranks_error(world):
    world.run(one_rank_flat)


def one_rank_typo(rank):
    x, was = torch.ones(1, 4, 2), os.environ['COLO_TIMEOUT_MS']
    ct.shutdown()  # or there would be a communicator
    if rank == 1:
        os.environ['COLO_TIMEOUT_MS'] = '5m'
    try:
        with pytest.raises(ValueError if rank == 1 else RuntimeError,
                           match="COLO_TIMEOUT_MS is '5m', expected a number from 1 to 1000000000000") \
                if rank < 2 else contextlib.nullcontext():  # 2 and 3 exchange with each other alone
            ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)(x)
    finally:
        os.environ['COLO_TIMEOUT_MS'] = was
    assert torch.equal(ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)(x),
                       torch.ones(2, 4, 2))


def test_environment_of_one_rank_that_is_refused_is_every_ranks_error(world):
    world.run(one_rank_typo)


def outlives(rank):
    bridge = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    x = torch.ones(1, 4, 2, requires_grad=True)
    y = bridge(x)
    dist.barrier()
    ct.shutdown()
    with pytest.raises(RuntimeError, match='this bridge was destroyed, or its communicator'):
        y.sum().backward()
    bridge(x).sum().backward()  # made anew
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_graph_that_outlives_its_communicator_is_told(world):
    world.run(outlives)


def again(rank):
    x = torch.ones(1, 4, 2)
    for _ in range(2):
        assert torch.equal(ct.bridge(x, 'dp=4', 'cp=2,dp=2', group=dist.group.WORLD),
                           torch.ones(2, 4, 2))
        store = weakref.ref(dist.distributed_c10d._get_default_store())
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = torch.tensor([s.getsockname()[1]])
        dist.broadcast(port, 0)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert store() is None  # or the old server would go on
        os.environ['MASTER_PORT'] = str(port.item())
        dist.init_process_group('gloo', rank=rank, world_size=4)


def test_torch_distributed_may_be_initialised_again(world):
    world.run(again)


def refusals(rank):
    WORLD = dist.group.WORLD
    for make, words in (
            (lambda: ct.Bridge('dp=8', 'dp=8', group=WORLD), r'ranks \[4, 5, 6, 7\] of the src grid'),
            (lambda: ct.Bridge('dp=4', 'dp=4', group=3), 'bridge: group is a int'),
            (lambda: ct.Bridge('dp=4', 'dp=4', group=WORLD, axes='bhx'), "axes 'bhx'"),
            (lambda: ct.Bridge('dp=4', 'dp=4', group=WORLD, output='half'), "output is 'half'"),
            (lambda: ct.bridge([1], 'dp=4', 'dp=4', group=WORLD), 'x is a list'),
            (lambda: ct.bridge(None, 'dp=4', 'dp=4', group=WORLD), 'like= one'),
            (lambda: ct.bridge(None, 'dp=4', 'dp=4', group=WORLD, like=torch.ones(1)), 'shape='),
            (lambda: ct.bridge(torch.ones(2, 2), 'dp=4', 'dp=4', group=WORLD), 'expected 3 axes'),
            (lambda: ct.bridge(torch.ones(2, 2), 'dp=4', 'dp=4', group=WORLD, axes='th'), 'flattened'),
            (lambda: ct.bridge(torch.ones(2, 4, 2, device='meta'), 'dp=4', 'dp=4', group=WORLD),
             "on device 'meta'|meta"),
            (lambda: ct.bridge(torch.ones(2, 4, 2, dtype=torch.complex64), 'dp=4', 'dp=4',
                               group=WORLD), 'complex64')):
        with pytest.raises(ValueError, match=words):
            make()
    pair = dist.new_group([0, 1])
    other = dist.new_group([2, 3])
    with pytest.raises(ValueError, match='without this rank|expected a torch'):
        ct.group_ranks(other if rank < 2 else pair)
    mine = pair if rank < 2 else other
    assert ct.group_ranks(mine) == ((0, 1) if rank < 2 else (2, 3))
    bridge = ct.Bridge('dp=2@%d' % (rank // 2 * 2), 'cp=2@%d' % (rank // 2 * 2), group=mine)
    assert bridge(torch.ones(1, 4, 2)).shape == (2, 4, 2)
    dist.destroy_process_group(mine)
    with pytest.raises(RuntimeError, match='process group was destroyed'):
        bridge(torch.ones(1, 4, 2))


def test_what_cannot_be_is_refused_in_words(world):
    world.run(refusals)


class Block(torch.nn.Module):
    """An encoder, the bridge, a decoder: enough to checkpoint."""

    def __init__(self, bridge):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3).double()
        self.bridge = bridge

    def forward(self, x):
        return self.decoder(self.bridge(torch.tanh(self.encoder(x))).tanh())


def checkpointed(rank, compiled):
    block = Block(ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD))
    torch.manual_seed(rank)
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    grads = []
    run = torch.compile(block, backend='eager') if compiled else block
    for fn in (lambda: run(x), lambda: checkpoint(run, x, use_reentrant=False)):
        block.zero_grad()
        fn().square().sum().backward()
        grads.append([p.grad.clone() for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    return [g.sum().item() for g in grads[0]]


def test_checkpointing_runs_forward_again(world):
    world.run(checkpointed, False)


def test_compiled_code_calls_it(world):
    if not hasattr(torch, 'compile') or not hasattr(torch, 'compiler'):
        pytest.skip('this torch has no torch.compile')
    assert world.run(checkpointed, True) == world.run(checkpointed, False)


def outstanding(rank):
    bridge = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    xs = [torch.full((1, 4 * (k + 1), 2), float(k + 1), requires_grad=True) for k in range(12)]
    ys = [bridge(x) for x in xs]  # more shapes than are kept
    for y in reversed(ys):
        y.backward(y.detach())
    for k, x in enumerate(xs):
        assert torch.equal(x.grad, torch.full_like(x, 2.0 * (k + 1)))


def test_many_forwards_of_many_shapes_may_be_outstanding(world):
    world.run(outstanding)


def late(rank):
    bridge = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    x = torch.ones(1, 4, 2)
    bridge(x)
    bridge.comm(x.device).set_timeout(0.5)
    if rank == 3:
        return
    try:
        bridge(x)
        assert rank != 2
    except TimeoutError as why:
        assert rank == 2 and "(world ranks 2 3): rank 0 waited for rank 1 (world rank 3)" in str(why), why


def test_a_rank_that_does_not_call_is_a_timeout_that_names_it(world):
    world.run(late)


def without_gradient(world):
    for src, dst in (('dp=2', 'cp=2'), ('dp=2', 'dp=2')):  # of which one moves, and one stays
        carry = ct.Bridge(src, dst, group=world, frozen=True)
        x = torch.ones(1, 4, 3, requires_grad=True)
        for _ in range(3):
            assert not carry(x).requires_grad and not carry.start(x).finish().requires_grad


def test_no_gradient_flows_back_through_a_frozen_bridge():
    cb.run_threads(2, without_gradient)


def staged(rank):
    """The encoder's last pp stage has the activation, the LLM's first takes it."""
    src, dst = cb.Layout.src('dp=2,pp=2'), cb.Layout.dst('dp=2,pp=2')
    shape = (4, 2, 3)
    everything = whole(shape, 9)
    own = src.owned(rank, *shape)
    mine = everything[own.samples[0]:own.samples[1]].clone().requires_grad_() if rank >= 2 else None
    like = torch.empty(0)
    y = ct.bridge(mine, src, dst, group=dist.group.WORLD, shape=shape, like=like)
    want = dst.owned(rank, *shape)
    if rank < 2:
        assert torch.equal(y, everything[want.samples[0]:want.samples[1]][:, want.rows])
    else:
        assert y.numel() == 0 and y.requires_grad
    y.backward(2 * y.detach())
    if mine is not None:
        assert torch.equal(mine.grad, 2 * mine.detach())


def test_ranks_without_a_part_take_part(world):
    world.run(staged)


def test_component_is_whom_the_plan_names():
    rng = random.Random(3)
    for _ in range(60):
        size = rng.choice([2, 4, 6, 8, 12])

        def grid():
            dims, left = [], size
            for name in rng.sample(['tp', 'cp', 'dp', 'pp'], 4):
                n = left if name == 'dp' else rng.choice([d for d in range(1, left + 1)
                                                          if left % d == 0])
                dims.append((name, n))
                left //= n
            if left != 1:
                dims[0] = (dims[0][0], dims[0][1] * left)
            return cb.Grid(dims)
        src, dst = grid(), grid()
        layouts = cb.Layout.src(src), cb.Layout.dst(dst)
        shape = (24, 4 * src.extent('cp') * dst.extent('cp'), 2)
        for rank in range(size):
            inside = moves.component(src, dst, rank)
            assert rank in inside
            plan = cb.Plan(*layouts, shape, rank)
            peers = {m.peer for way in ('forward', 'backward')
                     for m in plan.sends(way) + plan.recvs(way)}
            assert peers <= set(inside), (src, dst, rank, peers, inside)
            assert all(moves.component(src, dst, r) == inside for r in inside)


def marked(what, page='docs/guides/vision.md'):
    text = (Path(__file__).resolve().parents[2] / page).read_text()
    return re.search(r'<!-- %s -->\n```\w*\n(.*?)```\n<!-- end -->' % what, text, re.S).group(1)


def test_the_program_of_the_guide_prints_what_it_says(capsys):
    assert len(re.findall(r'^.*\S', marked('python'), re.M)) <= 12
    exec(compile(marked('python'), 'vision.md', 'exec'), {'__name__': 'page'})
    assert capsys.readouterr().out == marked('python prints')


def test_sharded_rows_of_the_page_go_into_the_local_sequence(capsys):
    exec(compile(marked('sharded rows', 'docs/concepts/bridge.md'), 'bridge.md', 'exec'), {'__name__': 'page'})
    assert capsys.readouterr().out == marked('sharded rows prints', 'docs/concepts/bridge.md')


class SumOverTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = torch.empty_like(grad)
        ctx.tp.all_reduce(grad.contiguous(), total)
        return total, None


@pytest.mark.parametrize('summed', [True, False])
def test_an_all_reduce_that_was_forgotten_before_nll_is_found_in_the_first_step(summed):
    def one_rank(world):
        world.set_check(2)
        carry = ct.Bridge('dp=4', 'tp=2,dp=2', group=world)
        tp, dp = world.split('tp=2,dp=2', 'tp'), world.split('tp=2,dp=2', 'dp')
        head = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))[5 * tp.rank:5 * tp.rank + 5]
        hidden = carry(torch.randn(1, 3, 4, requires_grad=True))
        hidden = SumOverTp.apply(hidden, tp) if summed else hidden
        ct.nll(hidden @ head.T, torch.arange(6).reshape(2, 3), tp_group=tp, reduce_group=dp).loss.backward()

    if summed:
        cb.run_threads(4, one_rank)
    else:
        with pytest.raises(ValueError, match='hold the same block of d_y, but their values differ'):
            cb.run_threads(4, one_rank)


@pytest.mark.parametrize('way', ['uniform', 'ragged', 'in place'])
def test_replicas_of_a_source_that_bring_other_x_are_named(way):
    def one_rank(world):
        world.set_check(2)
        carry = (ct.Bridge if way == 'uniform' else ct.RaggedBridge)('tp=2,dp=2', 'dp=4', group=world)
        tables = None if way == 'uniform' else cb.Segments([3] * 4, src=[0, 0, 1, 1], seq=range(4), pos=[1] * 4, seq_len=[5] * 4,
                                                           seq_dp=range(4))
        for bad in False, True:
            x = torch.full((2, 3, 4), float(world.rank // 2 + (bad and world.rank == 3)))
            into = torch.zeros(5, 4) if way == 'in place' else None
            carry(x) if tables is None else carry(x.view(6, 4), tables, into=into)
    with pytest.raises(ValueError, match='ranks 2 and 3 hold the same block of x, but their values differ'):
        cb.run_threads(4, one_rank)


DESTROYED = '''
import sys, torch, torch.distributed as dist, colobridge.torch as ct
rank, fails = int(sys.argv[1]), sys.argv[2] == 'fails'
sys.excepthook = lambda kind, why, trace: print('shown:', why)
dist.init_process_group('gloo', init_method='file://' + sys.argv[3], rank=rank, world_size=2)
carry, x = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD), torch.ones(1, 4, 2)
carry(x)
if rank == 1 or not fails:
    carry.comm(x.device).destroy()
    if fails:
        raise ValueError('the data ran out')
else:
    for _ in range(2):
        try:
            carry(x)
        except Exception as why:
            print(type(why).__name__, why)
'''


LATE = '''
import sys, time, torch, torch.distributed as dist, colobridge.torch as ct
rank = int(sys.argv[1])
dist.init_process_group('gloo', init_method='tcp://127.0.0.1:' + sys.argv[2], rank=rank, world_size=2)
time.sleep(1.5 * rank)
print(ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD)(torch.ones(1, 4, 2)).sum().item())
dist.barrier()
'''


@pytest.mark.skipif(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 6), reason='this PyTorch says nothing of waits that end')
def test_a_rank_that_waits_for_a_late_one_says_nothing():
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, '-c', LATE, str(rank), port], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    said = [rank.communicate(timeout=250) for rank in ranks]
    assert [out for out, _ in said] == ['16.0\n'] * 2 and 'timed out' not in said[0][1] + said[1][1], said


@pytest.mark.parametrize('how', ('well', 'fails'))
def test_a_rank_that_destroyed_its_communicator_ends_as_others_do(how, tmp_path):
    ranks = [subprocess.Popen([sys.executable, '-c', DESTROYED, str(rank), how, str(tmp_path / 'meet')], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env={'COLO_TIMEOUT_MS': '60000', **os.environ}) for rank in range(2)]
    said = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, int(how == 'fails')] and 'Traceback' not in said[0][1] + said[1][1], said
    assert said[1][0] == ('shown: the data ran out\n' if how == 'fails' else ''), said
    assert ('rank 1: ValueError: the data ran out' in said[0][0]) is (how == 'fails'), said
