# SPDX-License-Identifier: Apache-2.0
"""over_chunks(): losses straight from hidden states, against PyTorch on whole logits in f64."""
import itertools

import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from linear_case import CUTS, H, V, case, leaf, near, plain  # noqa: E402


def distilled(z, q):
    lq = torch.log_softmax(q.double(), -1)
    return (lq.exp() * (lq - torch.log_softmax(z, -1))).sum(-1)


def agrees(world, dtype, chunk, shape):
    h, w, b, t, g = case(shape, dtype)
    rng = torch.Generator().manual_seed(9)
    q = torch.randn(*shape, V, generator=rng, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, V, (*shape, 3), generator=rng)
    lo, hi = (CUTS[world.rank], CUTS[world.rank + 1]) if world.size == 4 else (0, V)
    teacher, flat = q.reshape(-1, V)[:, lo:hi], ids.reshape(-1, 3)
    o = dict(tp_group=world, vocab_start=lo, vocab_end=hi)
    leaves, mine = [leaf(x.double()) for x in (h, w, b)], [leaf(x) for x in (h, w[lo:hi], b[lo:hi])]
    z = leaves[0] @ leaves[1].t() + leaves[2]
    want = distilled(z, q), torch.log_softmax(z, -1).gather(-1, ids)
    kl, logp, count = ct.over_chunks(
        lambda z, rows: (ct.distill(z, teacher[rows], **o).kl, ct.logprob_at(z, flat[rows], **o),
                         torch.arange(len(z))), *mine, chunk_size=chunk, tp_group=world)
    assert logp.shape == (*shape, 3) and count.shape == shape and not count.requires_grad
    near(kl.detach(), want[0].detach(), dtype, 'kl')
    near(logp.detach(), want[1].detach(), dtype, 'logp')
    (kl.double() * g[0] - logp.double().sum(-1) * g[1]).sum().backward()
    (want[0] * g[0] - want[1].sum(-1) * g[1]).sum().backward()
    for name, x, y in zip(('hidden', 'weight', 'bias'), mine, leaves):
        near(x.grad, y.grad if name == 'hidden' else y.grad[lo:hi], dtype, name)


def test_losses_of_chunks_are_those_of_the_whole():
    for dtype, size, chunk, shape in itertools.product(
            (torch.float64, torch.float32, torch.bfloat16), (1, 4), (4, 100), ((3, 5), (0, 5))):
        cb.run_threads(size, lambda world: agrees(world, dtype, chunk, shape))


def partial(world):
    h, w, b, t, _ = case()
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    grads = []
    for d_hidden in ('all_reduce', 'partial'):
        x = leaf(h)
        ct.over_chunks(lambda z, rows: ct.entropy(z, tp_group=world, vocab_start=lo, vocab_end=hi), x, w[lo:hi],
                       b[lo:hi], chunk_size=4, tp_group=world, d_hidden=d_hidden).sum().backward()
        grads.append(x.grad)
    parts = torch.empty(world.size, *h.shape, dtype=h.dtype)
    world.all_gather(grads[1], parts)
    torch.testing.assert_close(parts.sum(0), grads[0], rtol=1e-12, atol=1e-12)


def test_a_partial_gradient_is_left_to_the_caller():
    cb.run_threads(4, partial)


def transposed(world):
    h, w, b, _, _ = case((15,))
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    grads = []
    for x in (leaf(h), leaf(h.t().contiguous())):
        ct.over_chunks(lambda z, rows: ct.entropy(z, tp_group=world, vocab_start=lo, vocab_end=hi),
                       x if x.shape == h.shape else x.t(), w[lo:hi], b[lo:hi], chunk_size=4, tp_group=world).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1].t(), rtol=1e-12, atol=1e-12)


def test_hidden_states_may_be_transposed():
    cb.run_threads(4, transposed)


def test_one_output_of_many_and_what_is_frozen():
    h, w, b, t, g = case()
    x = leaf(h)
    want = plain(x, w, b, t)[1]
    y = leaf(h)
    got = ct.over_chunks(lambda z, rows: (z.sum(-1), ct.logprob(z, t.reshape(-1)[rows], entropy=True)[1]), y, w, b,
                         chunk_size=7)[1]
    (want * g[0]).sum().backward()
    (got * g[0]).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-11, atol=1e-11)
    assert w.grad is None


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16), ids=str)
def test_backward_multiplies_as_autocast_had_it_in_forward(dtype):
    h, w, b, t, g = case(dtype=torch.float32)
    leaves, mine, seen = [leaf(x) for x in (h, w, b)], [leaf(x) for x in (h, w, b)], []

    def fn(z, rows):
        seen.append((z.dtype, torch.is_autocast_cpu_enabled()))
        return ct.logprob(z, t.reshape(-1)[rows])
    with torch.autocast('cpu', dtype=torch.bfloat16):
        want = ct.logprob(torch.nn.functional.linear(leaves[0].to(dtype), *leaves[1:]), t)
        got = ct.over_chunks(fn, mine[0].to(dtype), *mine[1:], chunk_size=4)
    (got * g[0]).sum().backward()
    (want * g[0]).sum().backward()
    assert torch.equal(got, want) and len(seen) == 8 and set(seen) == {(torch.bfloat16, True)}
    for x, y in zip(mine, leaves):
        near(x.grad, y.grad.double(), torch.bfloat16, 'gradient')
    with torch.autocast('cpu', dtype=torch.bfloat16):  # on: forward ran without
        ct.over_chunks(fn, *mine).sum().backward()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = ct.over_chunks(fn, *(x.double() for x in mine))
    assert out.dtype == torch.float64


def raises(world, chunk):
    h, w, b, t, _ = case()
    lo, hi, calls = CUTS[world.rank], CUTS[world.rank + 1], []

    def fn(z, rows):
        calls.append(rows)
        if world.rank == 1 and len(calls) == chunk:
            raise KeyError('no such row')
        return ct.entropy(z, tp_group=world, vocab_start=lo, vocab_end=hi)
    with pytest.raises(KeyError if world.rank == 1 else RuntimeError, match='no such row'):
        ct.over_chunks(fn, leaf(h), w[lo:hi], b[lo:hi], chunk_size=4, tp_group=world).sum().backward()


@pytest.mark.parametrize('chunk', (2, 6), ids=('in forward', 'in backward'))
def test_an_exception_of_one_ranks_loss_is_told_to_the_others(chunk):
    cb.run_threads(4, lambda world: raises(world, chunk))


def test_arguments_that_do_not_fit_are_refused():
    h, w, _, _, _ = case()
    with pytest.raises(ValueError, match=r'hidden is \[3, 5, %d\] and weight \[2, 3\]' % H):
        ct.over_chunks(lambda z, rows: z, h, torch.ones(2, 3))
    for o in ({'chunk_size': 0}, {'d_hidden': 'some'}):
        with pytest.raises(ValueError, match='expected .all_reduce. or .partial. and a number above 0'):
            ct.over_chunks(lambda z, rows: z, h, w, **o)
