# SPDX-License-Identifier: Apache-2.0
"""What logprob() and linear_logprob() return beside log-probabilities, against PyTorch on the whole vocabulary."""
import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

V, H, ALL = 23, 5, ('correct', 'argmax', 'lse', 'sum_p2', 'mean_logits')
# Of outputs as in test_torch_logprob.py, for logits from hidden states are f32. Of gradients from hidden states, in 16 bits: d_logits
# and what 23 of them, times numbers below 4, add up to are rounded to 2^-8 or 2^-11 of 4.
NEAR = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-4, 1e-3), torch.bfloat16: (1e-4, 0.1), torch.float16: (1e-4, 0.02)}
CUTS = {1: [0, V], 2: [0, 7, V], 4: [0, 1, 1, 20, V]}


def case(dtype, seed=0):
    """hidden, weight, bias, targets with one ignored, upstream gradients; row 4 has a tie of the two largest logits"""
    rng = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*n, generator=rng, dtype=torch.float64) for n in ((2, 4, H), (V, H), (V,)))
    w[20], b[20] = w[3], b[3]
    h[1, 0], b[3], b[20] = 0, 8, 8
    t = torch.randint(0, V, (2, 4), generator=rng)
    t[0, 1], t[1, 0] = -100, 20
    return [x.to(dtype) for x in (h, w, b)], t, torch.randn(2, 2, 4, generator=rng, dtype=torch.float64)


def wanted(z, t, temperature, softcap):
    """logp, entropy, and ALL by PyTorch, in f64"""
    x = softcap * torch.tanh(z / softcap) if softcap else z
    x = x / temperature
    lp, keep = torch.log_softmax(x, -1), t != -100
    logp = lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    out = logp, -(lp.exp() * lp).sum(-1), x.argmax(-1) == t, x.argmax(-1), x.logsumexp(-1), lp.exp().square().sum(-1), x.mean(-1)
    return [torch.where(keep, o, torch.tensor(-1 if i == 3 else 0).to(o.dtype)) for i, o in enumerate(out)]


def check(got, want, near, real):
    for name, a, b in zip(('logp', 'entropy', *ALL), got, want):
        assert a.dtype == {'correct': torch.bool, 'argmax': torch.int64}.get(name, real) and a.shape == (2, 4), name
        if a.dtype == real:
            torch.testing.assert_close(a.double(), b.double(), rtol=near, atol=near, msg=name)
        else:
            assert torch.equal(a, b), name
        assert a.requires_grad == (name in ('logp', 'entropy', 'lse')), name


@pytest.mark.parametrize('dtype', list(NEAR))
@pytest.mark.parametrize('temperature, softcap', [(1.0, None), (0.7, 9.0)])
def test_outputs_of_shards_are_those_of_the_whole_vocabulary(dtype, temperature, softcap):
    parameters, t, g = case(dtype)
    real, (near, near_grad) = torch.float64 if dtype == torch.float64 else torch.float32, NEAR[dtype]
    whole = [x.double().clone().requires_grad_() for x in parameters]
    z = whole[0] @ whole[1].T + whole[2]
    z.retain_grad()
    want = wanted(z, t, temperature, softcap)
    (want[0] * g[0] + want[4] * g[1]).sum().backward()

    def of_logits(world):
        lo, hi = CUTS[world.size][world.rank:world.rank + 2]
        mine = z.detach().to(real)[..., lo:hi].requires_grad_()
        out = ct.logprob(mine, t, tp_group=world, vocab=(lo, V), entropy=True, outputs=ALL, temperature=temperature, softcap=softcap)
        check(out, want, near, real)
        (out[0] * g[0] + out[4] * g[1]).sum().backward()
        torch.testing.assert_close(mine.grad.double(), z.grad[..., lo:hi], rtol=near, atol=near)
        return [o.detach() for o in out]

    def of_hidden(world, mode):
        lo, hi = CUTS[world.size][world.rank:world.rank + 2]
        h, w, b = (x.clone().requires_grad_() for x in (parameters[0], parameters[1][lo:hi], parameters[2][lo:hi]))
        out = ct.linear_logprob(h, ct.Head(w, b, softcap=softcap, tp_group=world, vocab=(lo, V)), t, entropy=True, outputs=ALL,
                                temperature=temperature, mode=mode, chunk_size=3)
        check(out, want, near, real)
        (out[0] * g[0] + out[4] * g[1]).sum().backward()
        for mine, of, rows in ((h, whole[0], slice(0, 2)), (w, whole[1], slice(lo, hi)), (b, whole[2], slice(lo, hi))):
            torch.testing.assert_close(mine.grad.double(), of.grad[rows], rtol=near_grad, atol=near_grad)
        return [o.detach() for o in out]
    for size in CUTS:
        for run in (of_logits, lambda world: of_hidden(world, 'logprob'), lambda world: of_hidden(world, 'keep')):
            made = cb.run_threads(size, run)
            assert all(torch.equal(a, b) for rank in made for a, b in zip(rank, made[0]))  # the same bits on every rank


def test_outputs_come_in_their_order_behind_those_of_flags():
    z, t = torch.randn(3, V), torch.tensor([1, 2, -100])
    of = dict(zip(ALL, ct.logprob(z, t, outputs=ALL)[1:]))
    for asked in (('lse',), ['argmax', 'correct'], ('mean_logits', 'sum_p2', 'lse'), ()):
        for entropy in (False, True):
            for loss in (False, True):
                out = ct.logprob(z, t, entropy=entropy, loss=loss, outputs=asked)
                assert isinstance(out, tuple) and len(out) == 1 + entropy + loss + len(asked)
                assert all(torch.equal(a, of[name]) for a, name in zip(out[1 + entropy + loss:], asked))
    assert isinstance(ct.logprob(z, t), torch.Tensor)


def test_lse_alone_is_a_z_loss():
    z = torch.randn(4, V, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([1, 2, -100, 4])
    _, lse = ct.logprob(z, t, outputs=('lse',))
    (1e-2 * lse.square()).sum().backward()
    made, z.grad = z.grad, None
    ct.nll(z, t, z_loss=1e-2, reduction='sum').loss.backward()
    both, z.grad = z.grad, None
    ct.nll(z, t, reduction='sum').loss.backward()
    torch.testing.assert_close(made, both - z.grad)


def test_rows_of_infinities_and_of_nan():
    z = torch.zeros(4, 6)
    z[0, 1], z[1, 2], z[2], z[3, 4] = float('nan'), float('inf'), -float('inf'), -float('inf')
    correct, argmax, lse, p2, mean = ct.logprob(z, torch.tensor([0, 2, 0, 1]), outputs=ALL)[1:]
    assert not correct.any() and argmax.tolist() == [-1, -1, -1, 0]
    assert all(x[:3].isnan().all() for x in (lse, p2, mean))
    assert mean[3] == -float('inf')  # of the whole vocabulary, a masked id too
    torch.testing.assert_close(torch.stack([lse[3], p2[3]]), torch.tensor([5.0, 0.2]).log().where(torch.tensor([True, False]), torch.tensor(0.2)))


def test_a_support_is_what_they_are_of():
    z = torch.randn(3, V, dtype=torch.float64)
    ids = torch.tensor([[0, 5, 9], [1, 2, -1], [3, 4, 5]])
    t = torch.tensor([5, 2, 4])
    correct, argmax, lse, p2 = ct.logprob(z, t, support=ct.Support(ids), outputs=ALL[:4])[1:]
    for i in range(3):
        kept = ids[i][ids[i] >= 0]
        x = z[i, kept]
        assert argmax[i] == kept[x.argmax()] and correct[i] == (argmax[i] == t[i])
        torch.testing.assert_close(lse[i], x.logsumexp(0))
        torch.testing.assert_close(p2[i], x.softmax(0).square().sum())
    for run in (lambda: ct.logprob(z, t, support=ct.Support(ids), outputs=('mean_logits',)),
                lambda: ct.linear_logprob(torch.zeros(3, H), torch.zeros(V, H), t, support=ct.Support(ids), outputs=('mean_logits',))):
        with pytest.raises(ValueError, match="outputs has 'mean_logits', which is over the vocabulary, and support is given"):
            run()


def test_what_is_no_output_is_refused():
    z, t = torch.zeros(3, V), torch.tensor([1, 2, -100])
    for asked in ('lse', ('entropy',), ('lse', 'lse'), (1,), {'lse', 'argmax'}, 3):  # results of a set would have an order of their own
        for run in (lambda: ct.logprob(z, t, outputs=asked), lambda: ct.linear_logprob(torch.zeros(3, H), torch.zeros(V, H), t, outputs=asked)):
            with pytest.raises(ValueError, match="outputs is .* expected a tuple of some of 'correct', 'argmax', 'lse'"):
                run()


def test_ranks_that_ask_for_other_outputs_are_told():
    def mixed(world):
        world.set_check(2)
        z = torch.randn(3, 4)
        return ct.logprob(z, torch.tensor([1, 2, 5]), tp_group=world, outputs=('argmax',) if world.rank else ('correct',))
    with pytest.raises(cb.MismatchError, match='want_correct|want_argmax'):
        cb.run_threads(2, mixed)
