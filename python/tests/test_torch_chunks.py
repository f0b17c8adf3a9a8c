# SPDX-License-Identifier: Apache-2.0
"""over_chunks(): losses straight from hidden states, against PyTorch on whole logits in f64."""
import itertools

import pytest

torch = pytest.importorskip('torch')

import torch.utils.checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import over_chunks  # noqa: E402
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
    o = dict(tp_group=world, vocab=(lo, None))
    leaves, mine = [leaf(x.double()) for x in (h, w, b)], [leaf(x) for x in (h, w[lo:hi], b[lo:hi])]
    z = leaves[0] @ leaves[1].t() + leaves[2]
    want = distilled(z, q), torch.log_softmax(z, -1).gather(-1, ids)
    kl, logp, count = over_chunks(
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
        over_chunks(lambda z, rows: ct.entropy(z, tp_group=world, vocab=(lo, None)), x, w[lo:hi],
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
        over_chunks(lambda z, rows: ct.entropy(z, tp_group=world, vocab=(lo, None)),
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
    got = over_chunks(lambda z, rows: (z.sum(-1), ct.logprob(z, t.reshape(-1)[rows], entropy=True)[1]), y, w, b,
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
        got = over_chunks(fn, mine[0].to(dtype), *mine[1:], chunk_size=4)
    (got * g[0]).sum().backward()
    (want * g[0]).sum().backward()
    assert torch.equal(got, want) and len(seen) == 8 and set(seen) == {(torch.bfloat16, True)}
    for x, y in zip(mine, leaves):
        near(x.grad, y.grad.double(), torch.bfloat16, 'gradient')
    with torch.autocast('cpu', dtype=torch.bfloat16):  # on: forward ran without
        over_chunks(fn, *mine).sum().backward()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = over_chunks(fn, *(x.double() for x in mine))
    assert out.dtype == torch.float64


def raises(world, chunk):
    h, w, b, t, _ = case()
    lo, hi, calls = CUTS[world.rank], CUTS[world.rank + 1], []

    def fn(z, rows):
        calls.append(rows)
        if world.rank == 1 and len(calls) == chunk:
            raise KeyError('no such row')
        return ct.entropy(z, tp_group=world, vocab=(lo, None))
    with pytest.raises(KeyError if world.rank == 1 else RuntimeError, match='no such row'):
        over_chunks(fn, leaf(h), w[lo:hi], b[lo:hi], chunk_size=4, tp_group=world).sum().backward()


@pytest.mark.parametrize('chunk', (2, 6), ids=('in forward', 'in backward'))
def test_an_exception_of_one_ranks_loss_is_told_to_the_others(chunk):
    cb.run_threads(4, lambda world: raises(world, chunk))


def test_arguments_that_do_not_fit_are_refused():
    h, w, _, _, _ = case()
    with pytest.raises(ValueError, match=r'hidden is \[3, 5, %d\] and weight \[2, 3\]' % H):
        over_chunks(lambda z, rows: z, h, torch.ones(2, 3))
    for o in ({'chunk_size': 0}, {'d_hidden': 'some'}):
        with pytest.raises(ValueError, match='expected .all_reduce. or .partial. and a number above 0'):
            over_chunks(lambda z, rows: z, h, w, **o)


# ---- what fn captures ----

def lora(z, low, a, b, scale):
    """Logits of hidden states that a LoRA of the head and a scale change"""
    return (z + (low @ a.t()) @ b.t()) * scale


def factors(dtype=torch.float64):
    rng = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in ((2, H), (V, 2), ())]


def trains_params(world, dtype, chunk):
    h, w, b, t, g = case((15,), dtype)
    lo, hi = (CUTS[world.rank], CUTS[world.rank + 1]) if world.size == 4 else (0, V)
    given = [h, w, b, *factors(dtype)]
    x, weight, bias, a, up, scale = leaves = [leaf(y.double()) for y in given]
    logp = torch.log_softmax(lora(x @ weight.t() + bias, x, a, up, scale.exp()), -1)
    want = -(logp.exp() * logp).sum(-1)
    (want * g[0]).sum().backward()
    mine = [leaf(y if y.shape[:1] != (V,) else y[lo:hi]) for y in given]
    x, weight, bias, a, up, scale = mine
    factor = scale.exp()  # no leaf
    got = over_chunks(
        lambda z, rows: ct.entropy(lora(z, x[rows], a, up, factor), tp_group=world, vocab=(lo, None)),
        x, weight, bias, chunk_size=chunk, tp_group=world, d_hidden='partial', params=(y for y in (x, a, up, factor, a)))
    near(got.detach(), want.detach(), dtype, 'entropy')
    (got * g[0]).sum().backward()
    for k, (y, of) in enumerate(zip(mine, leaves)):
        if y.shape[:1] == (hi - lo,) and k != 0:
            near(y.grad, of.grad[lo:hi], dtype, 'sharded %d' % k)
        else:  # each rank has its part
            parts = torch.empty(world.size, *y.grad.shape, dtype=y.grad.dtype)
            world.all_gather(y.grad.contiguous(), parts)
            near(parts.double().sum(0), of.grad, dtype, 'whole %d' % k)


@pytest.mark.parametrize('dtype', (torch.float64, torch.float32), ids=str)
def test_params_get_their_gradients(dtype):
    for size, chunk in itertools.product((1, 4), (4, 100)):
        cb.run_threads(size, lambda world: trains_params(world, dtype, chunk))


def captures(h, w, b, t):
    """name: (a function that captures, the shape that the error says)"""
    a, up, scale = map(leaf, factors())
    other = leaf(w)
    module = torch.nn.Linear(V, 3).double()
    leaves = {n: leaf(torch.ones(n)) for n in (8, 7)}
    return {
        'a leaf': (lambda z, rows: (z * scale).sum(-1), r'\[\]'),
        'what no leaf is': (lambda z, rows: (z + (h[rows] @ (a * 2).t()) @ up.detach().t()).sum(-1), r'\[2, %d\]' % H),
        'a module': (lambda z, rows: module(z).sum(-1), r'\[3(, %d)?\]' % V),
        'a function of ours': (lambda z, rows: ct.logprob(z + other[:1, :1], t[rows]), r'\[%d, %d\]' % (V, H)),
        'the second output': (lambda z, rows: (z.sum(-1), z.detach().sum(-1) * scale), r'output 1 .*\[\]'),
        'the last chunk': (lambda z, rows: z.sum(-1) * (scale if rows.start else 1), r'\[\]'),
        'a leaf_as_output': (lambda z, rows: leaves[len(z)], r'\[8\]'),
        'the output itself': (lambda z, rows: up[:len(z)], r'\[%d, 2\]' % V),
        'a head of chunks in chunks': (lambda z, rows: over_chunks(
            lambda y, _: ct.entropy(y), z[:, :H], other, chunk_size=2), r'\[%d, %d\]' % (V, H)),
        'the head': (lambda z, rows: (z @ w).sum(-1), r'\[%d, %d\]' % (V, H))}


@pytest.mark.parametrize('name', list(captures(*[torch.ones(1, 1)] * 4)))
def test_what_is_captured_and_not_in_params_is_refused(name):
    h, w, b, t, _ = case((15,))
    w = leaf(w)
    fn, said = captures(h, w, b, t)[name]
    for of in (h, leaf(h)):
        with pytest.raises(ValueError, match='requires a gradient and is not fn.s argument.*params=') as why:
            over_chunks(fn, of, w.detach(), b, chunk_size=8)
        assert why.match(said)
    with torch.no_grad():
        assert not isinstance(over_chunks(fn, h, w, b, chunk_size=8), type(None))


def one_captures(world):
    h, w, b, _, _ = case((15,))
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    scale = torch.ones((), dtype=h.dtype, requires_grad=world.rank == 1)
    with pytest.raises(ValueError if world.rank == 1 else RuntimeError, match='params='):
        over_chunks(lambda z, rows: ct.entropy(z * scale, tp_group=world, vocab=(lo, None)), leaf(h), w[lo:hi],
                       b[lo:hi], chunk_size=4, tp_group=world)


def test_what_one_rank_captures_is_every_ranks_error():
    cb.run_threads(4, one_captures)


def test_params_that_an_output_needs_not_get_none():
    h, w, _, _, _ = case((15,))
    a, up, scale = map(leaf, factors())
    over_chunks(lambda z, rows: (z * scale).sum(-1), h, w, chunk_size=4, params=[a, up.detach(), scale, w]).sum().backward()
    assert a.grad is None and w.grad is None
    torch.testing.assert_close(scale.grad, (h @ w.t()).sum(), rtol=1e-12, atol=1e-12)


def test_gradients_of_params_are_added_up_in_fp32():
    h, w, _, _, _ = case((600,), torch.bfloat16)
    scale = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    over_chunks(lambda z, rows: 0 * z.sum(-1).detach() + scale, h, w, chunk_size=1, params=scale).sum().backward()
    assert float(scale.grad) == 600  # in bf16, 256 + 1 is 256


def test_an_upstream_gradient_is_not_written():
    h, w, _, _, _ = case((16,))
    p = torch.zeros(4, dtype=h.dtype, requires_grad=True)
    y = over_chunks(lambda z, rows: z.sum(-1) + p, h, w, chunk_size=4, params=[p])
    g = torch.arange(16, dtype=h.dtype)
    y.backward(g)
    assert torch.equal(g, torch.arange(16, dtype=h.dtype)) and torch.equal(p.grad, g.reshape(4, 4).sum(0))


def test_params_that_were_written_since_are_refused():
    h, w, _, _, _ = case((15,))
    scale = factors()[2].requires_grad_()
    y = over_chunks(lambda z, rows: (z * scale).sum(-1), h, w, params=[scale])
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match='params was written in place'):
        y.sum().backward()


# ---- what fn draws, writes, returns ----

@pytest.mark.parametrize('checkpointed', (False, True), ids=('', 'in a checkpoint'))
def test_backward_draws_the_numbers_of_forward(checkpointed):
    h, w, _, _, _ = case((15,))
    x, kept = leaf(h), []

    def fn(z, rows):
        kept.append((torch.rand_like(z) > 0.5).to(z.dtype))
        noise = torch.randn(len(z), dtype=z.dtype)
        return (torch.nn.functional.dropout(z, 0.3) * kept[-1]).sum(-1) * noise, kept[-1]

    def run(x):
        return over_chunks(fn, x, w, chunk_size=4)
    torch.manual_seed(3)
    start = torch.get_rng_state()
    y, masks = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    torch.rand(5)  # another state, from which backward must not go, and to which it returns
    after = torch.get_rng_state()
    y.sum().backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), after) and len({m.sum().item() for m in kept}) > 1
    first, x.grad = x.grad, None
    y.sum().backward()
    times = len(kept) // 4
    for k in range(1, times):
        assert all(torch.equal(a, b) for a, b in zip(kept[:4], kept[4 * k:]))
    assert torch.equal(first, x.grad) and torch.equal(masks, torch.cat(kept[:4]))
    torch.set_rng_state(start)
    twin = leaf(h)
    want = []
    for i in range(0, 15, 4):
        want.append(fn(twin[i:i + 4] @ w.t(), None)[0])
    want = torch.cat(want)
    want.sum().backward()
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-12, atol=1e-12)


def test_chunks_in_chunks_draw_the_same_numbers():
    h, w, _, _, _ = case((15,))
    x, kept = leaf(h), []

    def inner(z, rows):
        kept.append(torch.rand_like(z))
        return (z * kept[-1]).sum(-1)

    def outer(z, rows):
        noise = torch.rand_like(z)
        return over_chunks(inner, (z * noise)[:, :H], w, chunk_size=2)
    y = over_chunks(outer, x, w, chunk_size=8)
    forward = kept[:]
    y.sum().backward()
    assert len(kept) == 3 * len(forward) == 24
    for chunk in (forward[:4], forward[4:]):  # again in the backward of the outer one, and of the inner one in it
        for k in range(2):
            assert all(torch.equal(a, b) for a, b in zip(chunk, kept[8 + 8 * (chunk[0] is not forward[0]) + 4 * k:]))


def test_fn_may_write_its_logits_in_place():
    h, w, b, t, g = case((15,))
    x, y, t = leaf(h), leaf(h), t.clamp(0, V - 1)

    def fn(z, rows):
        z.div_(0.7)[:, 3] = -50.0
        return ct.logprob(z, t[rows])
    got = over_chunks(fn, x, w, b, chunk_size=4)
    want = torch.log_softmax(((y @ w.t() + b) / 0.7).index_fill(1, torch.tensor([3]), -50.0), -1).gather(
        1, t[:, None])[:, 0]
    (got * g[0]).sum().backward()
    (want * g[0]).sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-11)


def test_fn_may_return_its_logits_or_one_buffer():
    h, w, b, _, _ = case((16,))
    x, y, buffer = leaf(h), leaf(h), torch.empty(4, dtype=h.dtype)

    def fn(z, rows):
        torch.sum(z.detach(), -1, out=buffer)
        return z, z[:, :2], buffer
    got = over_chunks(fn, x, w, b, chunk_size=4)
    z = y @ w.t() + b
    torch.testing.assert_close(got, (z, z[:, :2], z.sum(-1)), rtol=1e-12, atol=1e-12)
    ((got[0] ** 2).sum() + got[1].sum()).backward()
    ((z ** 2).sum() + z[:, :2].sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-11)


def test_outputs_require_gradients_as_without_chunks():
    h, w, _, _, _ = case((15,))

    def fn(z, rows):
        return z.sum(-1), z.argmax(-1), z.detach().sum(-1), z.sum(-1) * (2.0 if rows.start else 1.0) + 1
    for of, on in ((leaf(h), True), (h, True), (leaf(h), False)):
        with torch.set_grad_enabled(on):
            flags = [t.requires_grad for t in over_chunks(fn, of, w, chunk_size=4)]
            assert flags == [t.requires_grad for t in fn(of @ w.t(), slice(0, 15))]
    with torch.inference_mode():
        assert all(t.is_inference() for t in over_chunks(fn, h, w, chunk_size=4))


@pytest.mark.parametrize('fn, said', (
    (lambda z, rows: None, 'output 0 of fn is a NoneType for 4 tokens, expected a tensor'),
    (lambda z, rows: (z.sum(-1), 3), 'output 1 of fn is a int'),
    (lambda z, rows: z.sum(), r'output 0 of fn is \[\] for 4 tokens, expected a tensor \[4, ..\]'),
    (lambda z, rows: z.sum(0), r'output 0 of fn is \[%d\] for 4 tokens' % V),
    (lambda z, rows: (), 'fn returned no output'),
    (lambda z, rows: (z.sum(-1),) * (1 + (rows.start > 0)), 'for tokens 4 to 8, expected those of the first chunk'),
    (lambda z, rows: z[:, :1 + rows.start], r'\[n, 5\] of torch.float64 for tokens 4 to 8'),
    (lambda z, rows: z.sum(-1).to((torch.float64, torch.float32)[rows.start > 0]), r'\[n\] of torch.float32')),
    ids=('None', 'int', 'scalar', 'columns', 'nothing', 'count', 'shape', 'dtype'))
def test_outputs_that_are_no_tokens_are_refused(fn, said):
    h, w, _, _, _ = case((15,))
    with pytest.raises(ValueError, match=said):
        over_chunks(fn, leaf(h), w, chunk_size=4)


def test_an_fn_that_returns_something_else_in_backward_is_refused():
    h, w, _, _, _ = case((15,))
    calls = []

    def fn(z, rows):
        calls.append(rows)
        return z.sum(-1) if len(calls) <= 4 else z.detach().sum(-1)
    y = over_chunks(fn, leaf(h), w, chunk_size=4)
    with pytest.raises(RuntimeError, match=r'\[False\] in backward, \[True\] in forward'):
        y.sum().backward()


def test_autocast_keeps_no_copy_of_the_head_without_its_gradient():
    """PyTorch 1.13 keeps casts that were made without gradients, and serves later calls with them."""
    h, w, _, _, _ = case((15,), torch.float32)
    w = leaf(w)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        over_chunks(lambda z, rows: z.sum(-1), h, w)
        assert torch.nn.functional.linear(h, w).requires_grad
