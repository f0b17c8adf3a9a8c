# SPDX-License-Identifier: Apache-2.0
"""support= of logprob(), nll(), linear_logprob() and linear_nll(): lists of ids in place of the vocabulary, against
PyTorch in f64 on logits that are -inf outside of the lists."""
import itertools

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll  # noqa: E402
from linear_case import H, leaf, near  # noqa: E402
from test_torch_logprob import TOLERANCE, V, case, shards  # noqa: E402
from test_torch_saved import brought_back  # noqa: E402
from world import meet  # noqa: E402

K = 6
NONE = torch.zeros((), dtype=torch.float64)


def drawn(shape, seed=0, vocab=V):
    """ids [.., K] with negative numbers among them, and repeated ones"""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-vocab // 4, vocab, (*shape, K), generator=rng)


def csr(ids):
    lists = [row[row >= 0] for row in ids.reshape(-1, K)]
    offsets = torch.tensor([0] + [len(row) for row in lists]).cumsum(0)
    return torch.cat([*lists, torch.empty(0, dtype=torch.int64)]), offsets


def plain(z, t, ids, temperature=1.0, softcap=None):
    """logp and entropy over ids and targets, f64"""
    x = (softcap * torch.tanh(z.double() / softcap) if softcap else z.double()) / temperature
    inside = torch.zeros(*t.shape, x.shape[-1] + 1, dtype=torch.bool)
    inside.scatter_(-1, torch.where(ids < 0, x.shape[-1], ids), True)
    inside = inside[..., :-1].scatter(-1, t.clamp(min=0).unsqueeze(-1), True)
    lp = torch.log_softmax(x.masked_fill(~inside, -float('inf')), -1)
    h = -(lp.exp() * lp.masked_fill(~inside, 0)).sum(-1)
    logp = lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(t >= 0, logp, NONE), torch.where(t >= 0, h, NONE)


def agrees(rank, size, group, dtype, how, shape):
    z, t, g = case(shape, dtype)
    ids = drawn(shape)
    lo, hi = shards(rank, size, how)
    said = []
    for (temperature, softcap), lists in itertools.product(((1.0, None), (0.7, 5.0)),
                                                           (ct.Support(ids), ct.Support(*csr(ids)))):
        whole, mine = z.double().clone().requires_grad_(), z[..., lo:hi].clone().requires_grad_()
        want = plain(whole, t, ids, temperature, softcap)
        got = ct.logprob(mine, t, tp_group=group, vocab=(lo, None), entropy=True, support=lists,
                         temperature=temperature, softcap=softcap)
        loss = ct.nll(mine, t, tp_group=group, vocab=(lo, None), support=lists,
                      temperature=temperature, softcap=softcap)
        bound, bound_grad = TOLERANCE[dtype]
        for a, b in zip(got, want):
            torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
        torch.testing.assert_close(loss.loss.double(), -want[0].sum() / max(int((t >= 0).sum()), 1),
                                   rtol=bound, atol=bound)
        (got[0].double() * g[0] + got[1].double() * g[1]).sum().backward()
        (want[0] * g[0] + want[1] * g[1]).sum().backward()
        torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=bound_grad, atol=bound_grad)
        said.append([x.tolist() for x in (*got, loss.loss)])
    return said


def in_process(rank, dtype, how, shape):
    return agrees(rank, 4, dist.group.WORLD, dtype, how, shape)


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
def test_lists_on_processes(world, dtype):
    for how, shape in (('even', (2, 5)), ('odd', (7,))):
        said = world.run(in_process, dtype, how, shape)
        assert all(s == said[0] for s in said)  # the same bits everywhere


def test_lists_on_threads_and_alone():
    for dtype, how in itertools.product(TOLERANCE, ('even', 'odd')):
        cb.run_threads(4, lambda world: agrees(world.rank, 4, world, dtype, how, (3, 4)))
        agrees(0, 1, None, dtype, how, (3, 4))


@pytest.mark.parametrize('cut', (lambda z: z[:, :-1], lambda z: z.transpose(0, 1), lambda z: z[:, ::2],
                                 lambda z: z[..., 3:20], lambda z: z[1]))
def test_lists_of_logits_of_any_strides(cut):
    z, _, _ = case((4, 6))
    columns, shape = cut(z).shape[-1], cut(z).shape[:-1]
    t = torch.randint(0, columns, shape, generator=torch.Generator().manual_seed(4))
    ids = drawn(shape, 5, columns)
    for lists in (ct.Support(ids), ct.Support(*csr(ids))):
        whole, mine = z.clone().requires_grad_(), z.clone().requires_grad_()
        want, got = plain(cut(whole), t, ids), ct.logprob(cut(mine), t, entropy=True, support=lists)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        (got[0] - 2 * got[1]).sum().backward()
        (want[0] - 2 * want[1]).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-11, atol=1e-11)


def linear(rank, size, group, dtype, mode):
    rng = torch.Generator().manual_seed(7)
    h, w, b = (torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
               for shape in ((3, 5, H), (V, H), (V,)))
    t = torch.randint(0, V, (3, 5), generator=rng)
    t.reshape(-1)[::4] = -100
    ids = drawn((3, 5), 3)
    lo, hi = shards(rank, size, 'odd')
    leaves, mine = [leaf(x.double()) for x in (h, w, b)], [leaf(x) for x in (h, w[lo:hi], b[lo:hi])]
    want = -plain(leaves[0] @ leaves[1].t() + leaves[2], t, ids)[0].sum() / int((t >= 0).sum())
    got = linear_nll(mine[0], mine[1], mine[2], target=t, tp_group=group, vocab=(lo, None),
                        mode=mode, chunk_size=4, support=ct.Support(ids)).loss
    near(got.detach().reshape(1), want.detach().reshape(1), dtype, mode)
    got.backward()
    want.backward()
    near(mine[0].grad, leaves[0].grad, dtype, mode)
    for x, y in zip(mine[1:], leaves[1:]):
        near(x.grad, y.grad[lo:hi], dtype, mode)


@pytest.mark.parametrize('mode', ('loss', 'logprob', 'keep'))
def test_lists_straight_from_hidden_states(mode):
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), (1, 3)):
        cb.run_threads(size, lambda world: linear(world.rank, size, world, dtype, mode))


def test_linear_logprob_and_entropy_of_lists():
    rng = torch.Generator().manual_seed(8)
    h, w = (torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in ((4, H), (V, H)))
    t, ids = torch.tensor([3, -100, 0, V - 1]), drawn((4,), 9)
    got = linear_logprob(h, w, target=t, entropy=True, support=ct.Support(ids))
    want = plain(h @ w.t(), t, ids)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got[0].sum() - 2 * got[1].sum(), (h, w)),
                    torch.autograd.grad(want[0].sum() - 2 * want[1].sum(), (h, w))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_tensors_that_checkpoints_and_hooks_bring_back():
    z, t, _ = case((3, 4))
    ids = drawn((3, 4))
    w = torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for fn in (lambda x: ct.logprob(x * 1.0, t, support=ct.Support(ids)),
               lambda x: ct.nll(x * 1.0, t, support=ct.Support(ids)).loss,
               lambda x: linear_logprob(x * 1.0, w, target=t, mode='logprob', support=ct.Support(ids))):
        grads = []
        for kind in ('plain', 'checkpoint', 'hooks'):
            x = z.clone().requires_grad_()
            if kind == 'hooks':
                with brought_back():
                    out = fn(x)
            else:
                out = checkpoint(fn, x, use_reentrant=False) if kind == 'checkpoint' else fn(x)
            out.square().sum().backward()
            grads.append(x.grad)
        assert float(grads[0].abs().max()) > 0 and all(torch.equal(g, grads[0]) for g in grads)


def test_lists_of_no_tokens_have_a_loss_of_0():
    none, w = torch.zeros(0, 2, dtype=torch.int64), torch.ones(V, H)
    for lists in (ct.Support(none), ct.Support(none[:, 0], torch.tensor([0]))):
        z, h = torch.zeros(0, V, requires_grad=True), torch.zeros(0, H, requires_grad=True)
        loss = ct.nll(z, none[:, 0], support=lists).loss + linear_nll(h, w, target=none[:, 0], support=lists).loss
        loss.backward()
        assert loss == 0 and z.grad.shape == z.shape and h.grad.shape == h.shape


def test_calls_whose_lists_differ_in_length_share_a_plan():
    z, t, _ = case((3, 4))
    for width in (0, 1, K, 3):
        ids = drawn((3, 4), width)[..., :width]
        ids = torch.nn.functional.pad(ids, (0, K - width), value=-1)
        torch.testing.assert_close(ct.logprob(z, t, support=ct.Support(*csr(ids))), plain(z, t, ids)[0],
                                   rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ct.logprob(z, t), torch.where(
        t >= 0, torch.log_softmax(z, -1).gather(-1, t.clamp(min=0)[..., None])[..., 0], NONE), rtol=1e-12, atol=1e-12)


def test_lists_that_are_sorted_are_not_sorted_again_and_others_are_refused():
    z, t = case((1, 2))[0], torch.tensor([[3, 4]])
    ids = torch.tensor([[[2, 5, 5, 9], [0, 1, 3, 22]]])
    torch.testing.assert_close(ct.logprob(z, t, support=ct.Support(ids, ascending=True)), plain(z, t, ids)[0],
                               rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match='token 0 has id 5 behind id 9, expected ascending ids'):
        ct.logprob(z, t, support=ct.Support(ids.flip(-1), ascending=True))
    with pytest.raises(ValueError, match=r'has id 23, expected one of \[0, 23\)'):
        ct.logprob(z, t, support=ct.Support(ids + 1))
    with pytest.raises(ValueError, match='support: label_smoothing is 0.1'):
        ct.nll(z, t, support=ct.Support(ids), label_smoothing=0.1)
    for wrong in (lambda: ct.Support([1]), lambda: ct.Support(torch.ones(3)), lambda: ct.Support(torch.tensor(1)),
                  lambda: ct.Support(ids, torch.tensor([0, 1]))):
        with pytest.raises(ValueError, match='Support: '):
            wrong()


def refuses(rank, kind):
    z, t, _ = case((4,))
    lo, hi = shards(rank, 4, 'even')
    ids = drawn((4,))
    good = lambda ids: ct.logprob(z[:, lo:hi], t, tp_group=dist.group.WORLD, vocab=(lo, None),  # noqa: E731
                                  support=ct.Support(ids))
    good(ids)
    meet()
    other = {'lists of fewer tokens': ids[:3], 'other lists': torch.where(ids == ids.max(), 0, ids)}[kind]
    with pytest.raises((ValueError, RuntimeError)) as why:
        good(other if rank == 2 else ids)
    said = str(why.value)
    meet()
    good(ids)
    return said


def test_lists_that_differ_between_ranks_are_refused(world):
    for kind, words in (('lists of fewer tokens', 'logprob: support has lists of 3 tokens on cpu, target has 4'),
                        ('other lists', 'has other targets')):
        said = world.run(refuses, kind)
        assert all(words in s for s in said), said
