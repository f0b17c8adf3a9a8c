# SPDX-License-Identifier: Apache-2.0
"""Tensors that exist for one backward only: what checkpointing and the hooks of saved tensors bring back."""
import ctypes
import itertools
import math

import pytest

torch = pytest.importorskip('torch')
np = pytest.importorskip('numpy')

from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402
from colobridge.torch.calls import eager  # noqa: E402
from linear_case import leaf  # noqa: E402

V, H = 11, 5
kept = []  # memory of Owners, which is never freed: a late read sees what __del__ wrote


class Owner:
    """Memory that turns into NaN, and into -1 as integers, when its last tensor goes. It begins 64 bytes after a
    multiple of 256, and never where the library takes saved memory in place."""

    def __init__(self, nbytes):
        self.memory = (ctypes.c_uint8 * (nbytes + 320))()
        kept.append(self.memory)
        begin = (ctypes.addressof(self.memory) + 255) // 256 * 256 + 64
        self.__array_interface__ = {'version': 3, 'shape': (nbytes,), 'typestr': '|u1', 'data': (begin, False)}

    def __del__(self):
        ctypes.memset(self.memory, 0xFF, len(self.memory))


class Keeper(Owner):
    """The same memory, which stays: a product may have other bits for memory that begins elsewhere."""

    def __del__(self):
        pass


def lent(t, owner=Owner):
    """A contiguous copy of @t, in memory of its own Owner."""
    if not t.numel():
        return t.clone()
    copy = torch.from_numpy(np.asarray(owner(t.numel() * t.element_size()))).view(t.dtype)
    return copy.view(t.shape).copy_(t)


def brought_back(owner=Owner):
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: lent(t, owner))


def test_memory_of_an_owner_turns_into_nan():
    memory = lent(torch.ones(3))
    at = memory.data_ptr()
    assert at % 256 == 64
    assert memory.tolist() == [1] * 3
    del memory
    assert all(np.isnan((ctypes.c_float * 3).from_address(at)))


# name: loss of hidden [T, H], weight [V, H], targets [T], a communicator
CALLS = {
    'logprob': lambda h, w, t, comm: ct.logprob(h @ w.t(), t, entropy=True)[1].sum(),
    'linear_logprob': lambda h, w, t, comm: ct.linear_logprob(h, w, target=t).square().sum(),
    'DistributedLogprob': lambda h, w, t, comm: compat.DistributedLogprob.apply(
        h @ w.t(), t, 0, V, None).square().sum(),
    'vocab_parallel_entropy': lambda h, w, t, comm: compat.vocab_parallel_entropy(
        h @ w.t(), 7, tp_group=comm).square().sum(),
    'vocab_parallel_cross_entropy': lambda h, w, t, comm: compat.vocab_parallel_cross_entropy(
        (h @ w.t())[:, None], t[:, None], 0.1, tp_group=comm).square().sum(),
    'chunked_cross_entropy_loss': lambda h, w, t, comm: compat.chunked_cross_entropy_loss(
        h[None], w, 7, shift_labels=t[None])[0],
    'entropy_sum': lambda h, w, t, comm: sum(compat.chunked_cross_entropy_loss(
        h[None], w, 7, shift_labels=t[None])[0:3:2]),
    'bridge': lambda h, w, t, comm: (ct.bridge((h * h)[None], 'dp=1', 'dp=1', group=comm) @ w.t()).square().sum(),
    'shard': lambda h, w, t, comm: (ct.shard(h * h, cb.Partition(len(h)), dim=0) @ w.t()).square().sum(),
    'unshard': lambda h, w, t, comm: (ct.unshard(h * h, cb.Partition(len(h)), dim=0) @ w.t()).square().sum(),
}
for reduction, mode in itertools.product(('mean', 'sum', 'none'), ('nll', 'loss', 'auto', 'logprob', 'keep')):
    def call(h, w, t, comm, reduction=reduction, mode=mode):
        out = ct.nll(h @ w.t(), t, reduction=reduction) if mode == 'nll' else \
            ct.linear_nll(h, w, target=t, reduction=reduction, mode=mode)
        return (out.loss if reduction != 'none' else out.square().sum()) * 1.5
    if (reduction, mode) != ('none', 'loss'):
        CALLS['%s of %s' % (reduction, mode)] = call


def case(tokens):
    rng = torch.Generator().manual_seed(tokens)
    target = torch.randint(0, V, (tokens,), generator=rng)
    target[::5] = -100
    return torch.randn(tokens, H, generator=rng), torch.randn(V, H, generator=rng), target


# What backward needs of few tokens is no tensor, of many it is.
@pytest.mark.parametrize('tokens', [12, 6000])
@pytest.mark.parametrize('name', list(CALLS))
def test_gradients_of_saved_tensors_that_hooks_bring_back_are_the_same(name, tokens):
    hidden, weight, target = case(tokens)
    comm, got = cb.Comm.self(), []
    for owner in (Keeper, Owner):
        h, w = leaf(hidden), leaf(weight)
        with brought_back(owner):
            loss = CALLS[name](h, w, target, comm)
        loss.backward()
        assert h.grad.any() and w.grad.any()
        got.append((h.grad, w.grad))
    assert all(map(torch.equal, *got))


@pytest.mark.parametrize('tokens', [12, 6000])
@pytest.mark.parametrize('name', list(CALLS))
def test_gradients_under_checkpointing_are_the_same(name, tokens):
    hidden, weight, target = case(tokens)
    comm, got = cb.Comm.self(), []

    def run(h, w):
        return CALLS[name](h.tanh(), w, target, comm)
    for way in (run, lambda h, w: checkpoint(run, h, w, use_reentrant=False),
                lambda h, w: checkpoint(run, h, w, use_reentrant=True)):
        h, w = leaf(hidden), leaf(weight)
        way(h, w).backward()
        assert h.grad.any() and w.grad.any()
        got.append((h.grad, w.grad))
    assert all(map(torch.equal, got[0], got[1])) and all(map(torch.equal, got[0], got[2]))


def over_context_ranks(comm):
    """Dense and packed batches of the two ranks of a context-parallel group, with and without hooks."""
    rng = torch.Generator().manual_seed(comm.rank)
    tokens = torch.arange(8)[None] % V
    z, got = torch.randn(1, 4, V, generator=rng), []
    for hooked in (False, True):
        logits, cu = leaf(z), torch.tensor([0, 4, 8])
        with brought_back() if hooked else torch.enable_grad():
            loss = compat.from_parallel_logits_to_logprobs(
                logits, tokens, 0, V, None, cp_group=comm).square().sum()
            loss = loss + compat.from_parallel_logits_to_logprobs_packed_sequences(
                logits, tokens, cu, 4, 0, V, None, cp_group=comm).square().sum()
        loss.backward()
        assert logits.grad.any()
        got.append(logits.grad)
    return torch.equal(*got)


def test_gradients_over_context_ranks_with_hooks_are_the_same():
    assert cb.run_threads(2, over_context_ranks) == [True, True]


def test_what_is_kept_has_one_size_wherever_its_memory_begins(monkeypatch):
    hidden, weight, target = case(6000)
    comm, sizes, empty = cb.Comm.self(), set(), torch.empty
    z = leaf(hidden @ weight.t())
    ct.logprob(z, target, tp_group=comm)
    for shift in range(32):
        monkeypatch.setattr(torch, 'empty', lambda n, **o: empty(n + shift, **o)[shift:])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.add((t.dtype, t.numel())) or t, lambda t: t):
            ct.logprob(z, target, tp_group=comm)
    assert len(sizes) == 3, 'checkpoint() compares sizes: %s' % sizes  # logits, targets, what the library keeps


class Enough(Exception):
    """As checkpoint() of PyTorch 2 ends a recomputation, from a hook of saved tensors."""


def ends_early(world):
    @eager
    def saved(tp_group):
        raise Enough()

    with pytest.raises(Enough):
        saved(world)
    world.barrier()  # a rank that is told of an error finds its communicator dead
    lo, hi = (0, 6) if world.rank == 0 else (6, V)
    logp = ct.logprob(torch.zeros(4, hi - lo), torch.arange(4), tp_group=world, vocab=(lo, V))
    torch.testing.assert_close(logp, torch.full((4,), -math.log(V)))


def test_an_exception_that_ends_a_recomputation_is_told_to_no_rank():
    cb.run_threads(2, ends_early)
