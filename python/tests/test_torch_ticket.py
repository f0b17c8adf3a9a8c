# SPDX-License-Identifier: Apache-2.0
"""Calls that are started and finished: the oracle's values, what runs in between in both passes, tickets that are not
finished, and one encoder batch for several micro-batches."""
import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.torch import ticket  # noqa: E402
from ragged_case import Case, carried  # noqa: E402

LAYOUTS = 'tp=2,dp=2', 'cp=2,dp=2'


class Halves:
    """A bridge whose calls are started and finished."""

    def __init__(self, carry):
        self.carry = carry

    def __call__(self, *args, **kwargs):
        return self.carry.start(*args, **kwargs).finish()

    def __getattr__(self, name):
        return getattr(self.carry, name)


def ragged(rank, seeds, size, group=None):
    for seed in seeds:
        case = Case(seed, size)
        carry = ct.RaggedBridge(*case.layouts(), group=group or dist.group.WORLD, output=case.output, grad=case.grad)
        segments = cb.Segments(**case.tables())
        for merged in (False, True):
            carried(rank, case, Halves(carry), segments, merged)
        carry.destroy()


def test_ragged_batches_in_halves_are_those_of_the_oracle(world):
    world.run(ragged, range(7000, 7015), 4)
    cb.run_threads(2, lambda world: ragged(world.rank, range(7100, 7110), 2, world))


def x_of(rank, seed):
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(10 * seed + rank // 2), dtype=torch.float64)
    return x.requires_grad_()


def weights(y, seed):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=y.dtype)


def uniform(rank, group=None):
    """Four under way, finished in another order, against calls without tickets; backward twice."""
    carry = ct.Bridge(*LAYOUTS, group=group or dist.group.WORLD)
    sides = []
    for run in (lambda xs: [carry(x) for x in xs], None):
        xs = [x_of(rank, i) for i in range(4)]
        if run:
            ys = run(xs)
        else:
            tickets = [carry.start(x) for x in xs]
            finished = {i: tickets[i].finish() for i in (2, 0, 3, 1)}
            ys = [finished[i] for i in range(4)]
        loss = sum((y.mul_(2) * weights(y, i)).sum() for i, y in enumerate(ys))
        loss.backward(retain_graph=True)
        loss.backward()
        sides.append(([y.detach() for y in ys], [x.grad for x in xs]))
    for side in zip(*sides):
        assert all(torch.equal(a, b) for a, b in zip(*side))
    assert carry.start(xs[0].detach()).finish().grad_fn is None


def test_uniform_batches_in_halves_have_the_same_bits(world):
    world.run(uniform)
    cb.run_threads(4, lambda world: uniform(world.rank, world))


def test_gradcheck(world):
    world.run(gradients)


def gradients(rank):
    carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD, grad='disjoint', output='sharded')

    def call(x):
        return Halves(carry)(x)
    x = torch.randn(1, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = call(x)
    y.backward(weights(y, rank))
    for preserve in (True, False):  # both kinds of checkpoint run forward again in backward
        again = x.detach().clone().requires_grad_()
        y = checkpoint(call, again, use_reentrant=preserve)
        y.backward(weights(y, rank))
        assert torch.equal(again.grad, x.grad)
    with pytest.raises(RuntimeError, match='differentiate twice'):
        z = x.detach().clone().requires_grad_()
        d, = torch.autograd.grad(call(z).square().sum(), z, create_graph=True)
        d.sum().backward()


class Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append('between')
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        ctx.events.append('between')
        return d, None


def order(rank, is_ragged):
    events = []
    begin, end = ticket.Flight.begin, ticket.Flight.end
    ticket.Flight.begin = lambda self, *args, **kwargs: (events.append('start'), begin(self, *args, **kwargs))[1]
    ticket.Flight.end = lambda self: (events.append('finish') if self._ticket else None, end(self))[1]
    try:
        if is_ragged:
            carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD)
            segments = cb.Segments([2, 1, 0, 3], src=[0, 1, 2, 3], seq=[0] * 4, pos=[0, 2, 3, 4], seq_len=[8], seq_dp=[0])
            x, rest = torch.ones(segments.rows[rank], 3, requires_grad=True), (segments,)
        else:
            carry, x, rest = ct.Bridge(*LAYOUTS, group=dist.group.WORLD), x_of(rank, 1), ()
        text = torch.ones(3, requires_grad=True)
        begun = carry.start(x, *rest)
        other = Between.apply(text, events)
        (begun.finish().sum() + other.sum()).backward()
        assert events == ['start', 'between', 'finish'] * 2, events
    finally:
        ticket.Flight.begin, ticket.Flight.end = begin, end


@pytest.mark.parametrize('is_ragged', (False, True))
def test_what_lies_between_runs_between_in_both_passes(world, is_ragged):
    world.run(order, is_ragged)


def written_over(rank):
    """The caller goes on with its buffer in place of what finish() returned."""
    carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD)
    segments = cb.Segments([2, 1, 0, 3], src=[0, 1, 2, 3], seq=[0] * 4, pos=[0, 2, 3, 4], seq_len=[8], seq_dp=[0])
    results = []
    for finish in (True, False):
        x = torch.full((segments.rows[rank], 3), rank + 1., requires_grad=True)
        text = torch.zeros(8, 3, requires_grad=True)
        into = text.clone()
        begun = carry.start(x, segments, into=into)
        y = begun.finish()
        (y if finish else into).mul(2).sum().backward()
        results += [x.grad, text.grad]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert (results[0] == 8).all() and results[1].eq(2).all(1).sum() == 2  # four context ranks; two rows of text


def test_a_buffer_has_the_gradient_of_what_finish_returns(world):
    world.run(written_over)


def unfinished(rank):
    carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)  # whose forward moves rows
    begun = carry.start(x_of(rank, 1))
    begun.finish()
    with pytest.raises(RuntimeError, match='finish.. of a ticket that was finished'):
        begun.finish()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        carry.start(x_of(rank, 2))
        gc.collect()
    assert any('started and not finished' in str(w.message) for w in said)
    kept = [carry.start(x_of(rank, 0)) for _ in range(64)]  # the dropped one has freed its place
    with pytest.raises(RuntimeError, match='64 tickets are not finished, the first is'):
        carry.start(x_of(rank, 0))
    for begun in kept:
        begun.finish()
    assert carry(x_of(rank, 0)).shape == (4, 8, 3)  # the communicator lives


def test_tickets_that_are_not_finished_are_named(world):
    world.run(unfinished)


class Fails(torch.autograd.Function):
    """Backward raises, but for the second time."""
    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        ctx.times.append(1)
        if len(ctx.times) == 1:
            raise MemoryError("the step's own error")
        return d, None


def started(kind, rank, group):
    """(a bridge of two ranks, what starts a call of it on a leaf, the leaf, sum of its gradient times the weights 1, 2, ..)"""
    if kind == 'uniform':
        carry, x = ct.Bridge('dp=2', 'cp=2', group=group), torch.ones(1, 8, 1, requires_grad=True)
        return carry, lambda: carry.start(x * 1), x
    if kind == 'packed':
        carry, x = ct.PackedBridge('cp=2', 'cp=2', group=group), torch.ones(4, 3, requires_grad=True)
        cuts = [cb.Packing([0, 8], split=split) for split in ('zigzag', 'block')]
        return carry, lambda: carry.start(x * 1, src=cuts[0], dst=cuts[1]), x
    carry, x = ct.RaggedBridge('dp=2', 'cp=2', group=group), torch.ones(2 + rank, 3, requires_grad=True)
    segments = cb.Segments([2, 3], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])
    into = (lambda: {'into': torch.zeros(8, 3)}) if kind == 'merged' else dict
    return carry, lambda: carry.start(x * 1, segments, **into()), x


def dropped(rank, kind, group=None):
    """Whatever ends a step between start and finish, in forward or backward, the next one is right."""
    carry, start, x = started(kind, rank, group or dist.group.WORLD)
    gc.disable()  # a ticket that is dropped is finished at once
    for grad in (True, False):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            begun = start()
            assert begun._flight._ticket and begun._flight._held
            flight = weakref.ref(begun._flight)
            del begun
            assert flight() is None
            with pytest.raises(KeyError):
                begun = start()
                raise KeyError("the step's own error")
            del begun
    want = None
    for fails in (False, True):
        x.grad, text, times = None, torch.ones(3, requires_grad=True), [1] * (not fails)
        begun = start()
        flight, t = begun._flight, Fails.apply(text, times)
        y = begun.finish()
        if fails:  # its gradients are not those of the next one
            with pytest.raises(MemoryError, match="the step's own"):
                (5 * y.sum() + t.sum()).backward(retain_graph=True)
            assert flight.back is not None and x.grad is None  # under way
        ((y * torch.arange(1., y.numel() + 1).view(y.shape)).sum() + t.sum()).backward()
        assert flight.back is None and (want is None or torch.equal(want, x.grad))
        want = x.grad
    begun = start()
    carry.destroy()
    with pytest.raises(RuntimeError, match='was destroyed'):
        begun.finish()
    with pytest.raises(RuntimeError, match='was finished'):
        begun.finish()
    stays = ct.Bridge('dp=2', 'dp=2', group=group or dist.group.WORLD)  # where nothing moves
    for _ in range(2):
        begun = stays.start(torch.ones(1, 4, 1))
    assert not begun._flight._ticket
    stays.destroy()
    with pytest.raises(RuntimeError, match='was destroyed'):
        begun.finish()
    del begun, y, t, flight
    gc.enable()


@pytest.mark.parametrize('kind', ('uniform', 'ragged', 'merged', 'packed'))
def test_an_exception_between_start_and_finish_leaves_the_next_step_right(pair, kind):
    pair.run(dropped, kind)
    cb.run_threads(2, lambda world: dropped(world.rank, kind, world))


ENDS = """
import sys, torch, torch.distributed as dist, colobridge as cb, colobridge.torch as ct
sys.path.insert(0, %r)
import test_torch_ticket as this
def step(rank, group, backward):
    text = torch.ones(3, requires_grad=True)
    carry, start, x = this.started('uniform' if backward else 'ragged', rank, group)
    begun = start()
    t = this.Fails.apply(text, [])
    if not backward:
        raise MemoryError("the step's own error")
    (begun.finish().sum() + t.sum()).backward()
if sys.argv[1] == 'gloo':
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    begun = ct.Bridge('dp=1', 'cp=1', group=dist.group.WORLD).start(torch.ones(1, 4, 1))
    raise MemoryError("the step's own error")
cb.run_threads(2, lambda world: step(world.rank, world, sys.argv[1] == 'backward'))
"""


@pytest.mark.parametrize('where', ('forward', 'backward', 'gloo'))
def test_a_program_that_an_exception_ends_between_start_and_finish_ends_with_it(where):
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', ENDS % str(Path(__file__).parent), where],
                          stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "MemoryError: the step's own error" in done.stderr, (done.returncode, done.stderr)
    assert 'Exception ignored' not in done.stderr


def page(which):
    """The first lines of Python behind a heading of docs/concepts/bridge.md, or behind a mark of docs/guides/vision.md."""
    text = ''.join((Path(__file__).resolve().parents[2] / 'docs' / p).read_text() for p in ('concepts/bridge.md', 'guides/vision.md'))
    code = text[text.index(which):].split('```python\n', 1)[1].split('```', 1)[0]
    return compile(code, which, 'exec')


def micro_batches(rank):
    """One encoder batch feeds four micro-batches of the LLM: carried once, its gradient carried back once."""
    carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    pixels = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    grads = []
    for whole in (False, True):
        weight = torch.eye(3, dtype=torch.float64).requires_grad_()

        def encoder(x, weight=weight):
            return x @ weight

        def llm(x):
            return (x.square() * (1 + rank)).sum()
        if whole:
            llm(carry(encoder(pixels))).backward()
        else:
            exec(page('<!-- micro-batches -->'), {'carry': carry, 'encoder': encoder, 'llm': llm, 'pixels': pixels})
        grads.append(weight.grad)
    assert torch.equal(*grads) and grads[0].any()


def test_one_encoder_batch_feeds_several_micro_batches(world):
    world.run(micro_batches)


def first_lines(rank):
    carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    images = torch.full((1, 2, 3), rank + 1.)
    names = {'carry': carry, 'images': images, 'encoder': lambda x: 2 * x, 'embed': lambda t: t + 1, 'tokens': torch.ones(2)}
    exec(page('## Start and finish: overlap'), names)
    assert names['y'][:, 0, 0].tolist() == [2. * (rank // 2 * 2 + i) for i in (1, 2)] and names['text'].eq(2).all()


def test_the_first_lines_of_the_page_run(world):
    world.run(first_lines)
