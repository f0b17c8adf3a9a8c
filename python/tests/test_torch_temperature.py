# SPDX-License-Identifier: Apache-2.0
"""A temperature of each token: the losses are those of logits that PyTorch has divided token by token."""
import math

import pytest

torch = pytest.importorskip('torch')

from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

V, H, SHAPE = 23, 5, (2, 4)
CUTS = {1: [0, V], 2: [0, 7, V], 4: [0, 1, 1, 20, V]}


def case(seed=0):
    """hidden, weight, bias, targets with one ignored, temperatures of which the ignored one's is none"""
    rng = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*n, generator=rng, dtype=torch.float64) for n in ((*SHAPE, H), (V, H), (V,)))
    t = torch.randint(0, V, SHAPE, generator=rng)
    heat = 0.3 + 2 * torch.rand(SHAPE, generator=rng)
    t[0, 1], heat[0, 1] = -100, math.nan
    return h, w, b, t, heat


def capped(z, heat, softcap):
    """x in f64"""
    return (softcap * torch.tanh(z / softcap) if softcap else z) / heat.double().nan_to_num(1.0).unsqueeze(-1)


def wanted(x, t):
    """logp, entropy, lse, loss with smoothing and z-loss, 0 where ignored"""
    lp, keep, lse = torch.log_softmax(x, -1), t != -100, x.logsumexp(-1)
    logp = lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = -0.9 * logp - 0.1 * lp.mean(-1) + 1e-3 * lse.square()
    return [torch.where(keep, o, torch.zeros(()).double()) for o in (logp, -(lp.exp() * lp).sum(-1), lse, loss)]


# f32: 50 roundings of numbers below 60, times 1 / 0.3 where gradients are; 16 bits: gradients of logits are rounded once
NEAR = {torch.float64: (1e-11, 1e-11), torch.float32: (4e-4, 2e-3), torch.bfloat16: (4e-4, 0.2), torch.float16: (4e-4, 0.03)}


@pytest.mark.parametrize('softcap', (None, 4.0))
@pytest.mark.parametrize('dtype', list(NEAR))
def test_losses_are_those_of_logits_divided_token_by_token(dtype, softcap):
    *parameters, t, heat = case()
    parameters = [p.to(dtype) for p in parameters]
    real, (near, near_grad) = torch.float64 if dtype == torch.float64 else torch.float32, NEAR[dtype]
    whole = [p.double().clone().requires_grad_() for p in parameters]
    z = whole[0] @ whole[1].T + whole[2]
    z.retain_grad()
    want = wanted(capped(z, heat, softcap), t)
    g = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(5)).double()
    sum((a * b).sum() for a, b in zip(want, g)).backward()
    options = dict(entropy=True, loss=True, outputs=('lse',), temperature=heat, label_smoothing=0.1, z_loss=1e-3)

    def check(out, leaves, of):
        out = [out[i] for i in (0, 1, 3, 2)]
        for a, b in zip(out, want):
            torch.testing.assert_close(a.double(), b.detach(), rtol=near, atol=near)
        sum((a * b).sum() for a, b in zip(out, g)).backward()
        for mine, d in zip(leaves, of):
            torch.testing.assert_close(mine.grad.double(), d, rtol=near_grad, atol=near_grad)
        return [o.detach() for o in out]

    def of_logits(world):
        lo, hi = CUTS[world.size][world.rank:world.rank + 2]
        mine = z.detach().to(real)[..., lo:hi].requires_grad_()
        return check(ct.logprob(mine, t, tp_group=world, vocab=(lo, V), softcap=softcap, **options), [mine], [z.grad[..., lo:hi]])

    def of_hidden(world, mode):
        lo, hi = CUTS[world.size][world.rank:world.rank + 2]
        h, w, b = leaves = [p.clone().requires_grad_() for p in (parameters[0], parameters[1][lo:hi], parameters[2][lo:hi])]
        return check(ct.linear_logprob(h, ct.Head(w, b, softcap=softcap, tp_group=world, vocab=(lo, V)), t, mode=mode, chunk_size=3, **options),
                     leaves, [whole[0].grad, whole[1].grad[lo:hi], whole[2].grad[lo:hi]])
    for size in CUTS:
        for run in (of_logits, lambda world: of_hidden(world, 'logprob'), lambda world: of_hidden(world, 'keep')):
            made = cb.run_threads(size, run)
            assert all(torch.equal(a, b) for rank in made for a, b in zip(rank, made[0]))


CALLS = {
    'nll': lambda z, h, w, t, heat: ct.nll(z, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1).loss,
    'nll sum': lambda z, h, w, t, heat: ct.nll(z, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1, reduction='sum').loss,
    'nll none': lambda z, h, w, t, heat: ct.nll(z, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1, reduction='none').sum() / 7,
    'nll of class weights': lambda z, h, w, t, heat: ct.nll(z, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1,
                                                            class_weight=torch.ones(V, dtype=torch.float64)).loss,
    'cross_entropy': lambda z, h, w, t, heat: ct.cross_entropy(z.reshape(-1, V), t.reshape(-1), temperature=heat.reshape(-1), z_loss=1e-3,
                                                               label_smoothing=0.1),
    **{'linear_nll %s' % mode: lambda z, h, w, t, heat, mode=mode: ct.linear_nll(
        h, w, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1, mode=mode).loss for mode in ('loss', 'auto', 'logprob', 'keep')},
    'linear_nll of an upstream': lambda z, h, w, t, heat: ct.linear_nll(
        h, w, t, temperature=heat, z_loss=1e-3, label_smoothing=0.1, reduction='sum', upstream=1 / 7).loss / 7,
}


@pytest.mark.parametrize('name', CALLS)
def test_means_and_sums(name):
    h, w, _, t, heat = case(1)
    leaves = [x.clone().requires_grad_() for x in (h, w)]
    z = (leaves[0] @ leaves[1].T)
    want = wanted(capped(z, heat, None), t)[3].sum() / 7
    want.backward()
    mine = [x.clone().requires_grad_() for x in (h, w)]
    got = CALLS[name](mine[0] @ mine[1].T, *mine, t, heat) / (7 if name == 'nll sum' else 1)
    got.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(mine, leaves):
        torch.testing.assert_close(a.grad, b.grad)


def test_entropy_without_targets():
    h, w, _, t, heat = case(2)
    z = (h @ w.T).requires_grad_()
    want = wanted(capped(z, heat, None), t)[1]
    got = ct.entropy(z, mask=t != -100, temperature=heat)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize('cut', (lambda z: z.transpose(0, 1), lambda z: z[:, ::2], lambda z: z[1:], lambda z: z[:, 1:3]))
def test_logits_of_any_strides(cut):
    h, w, _, t, heat = case(3)
    z = cut(h @ w.T)
    t, heat = (cut(x.unsqueeze(-1)).squeeze(-1) for x in (t, heat))
    leaf = z.detach().requires_grad_()
    logp = ct.logprob(leaf, t, temperature=heat)
    logp.sum().backward()
    x = z.detach().clone().requires_grad_()
    want = wanted(capped(x, heat, None), t)[0]
    want.sum().backward()
    torch.testing.assert_close(logp, want)
    torch.testing.assert_close(leaf.grad, x.grad)


def test_a_support_and_checkpoints_and_hooks():
    h, w, _, t, heat = case(4)
    ids = torch.arange(0, V, 2).expand(*SHAPE, -1)

    def run(z):
        return ct.logprob(z, t, temperature=heat, support=ct.Support(ids)).sum() + ct.nll(z, t, temperature=heat).loss
    grads = []
    for context in (lambda z: run(z), lambda z: checkpoint(run, z, use_reentrant=False)):
        z = (h @ w.T).requires_grad_()
        context(z).backward()
        grads.append(z.grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        z = (h @ w.T).requires_grad_()
        out = run(z)
    heat.fill_(99.0)  # forward has read them
    out.backward()
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], z.grad)


def test_calls_with_other_temperatures_share_a_plan_and_a_number_is_another_call():
    z, t = torch.randn(3, V), torch.tensor([1, 2, 3])
    for heat in (torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 0.25, 1.0]), torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)):
        want = wanted(capped(z.double(), heat, None), t)[0]
        torch.testing.assert_close(ct.logprob(z, t, temperature=heat).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ct.logprob(z, t, temperature=torch.tensor(2.0)), ct.logprob(z, t, temperature=2.0))  # a number
    assert torch.equal(ct.logprob(z, t, temperature=torch.ones(3)), ct.logprob(z, t))


def test_what_is_no_temperature_is_refused():
    z, t, h, w = torch.randn(3, V), torch.tensor([1, 2, -100]), torch.zeros(3, H), torch.zeros(V, H)
    calls = (lambda heat: ct.logprob(z, t, temperature=heat), lambda heat: ct.nll(z, t, temperature=heat),
             lambda heat: ct.linear_logprob(h, w, t, temperature=heat), lambda heat: ct.linear_nll(h, w, t, temperature=heat))
    for heat, words in ((torch.ones(2), r'temperature is \[2\] of torch.float32 on cpu, expected a number, or \[3\]'),
                        (torch.ones(3, dtype=torch.int64), 'of a floating-point dtype'),
                        (torch.ones(3, requires_grad=True), 'temperature requires grad'),
                        (torch.tensor([1.0, 0.0, 1.0]), 'temperature: token 1 has 0, expected finite and > 0'),
                        (torch.tensor([1.0, -1.0, 1.0]), 'temperature: token 1 has -1'),
                        (torch.tensor([math.inf, 1.0, 1.0]), 'temperature: token 0 has inf')):
        for call in calls:
            with pytest.raises(ValueError, match=words):
                call(heat)
    for name, call in (('topk_logprob', lambda: ct.topk_logprob(z, 2, temperature=torch.ones(3))),
                       ('logprob_at', lambda: ct.logprob_at(z, t.clamp(min=0)[:, None], temperature=torch.ones(3))),
                       ('distill', lambda: ct.distill(z, z, temperature=torch.ones(3)))):
        with pytest.raises(ValueError, match=name + r': temperature is \[3\] on cpu, expected a number'):
            call()


@pytest.mark.parametrize('level', (1, 2))
@pytest.mark.parametrize('linear', (False, True))
def test_ranks_with_other_temperatures_are_told(level, linear):
    def mixed(world):
        world.set_check(level)
        z, t, heat = torch.randn(3, 4), torch.tensor([1, 2, -100]), torch.ones(3)
        heat[2] = world.rank  # of an ignored token

        def call():
            return ct.linear_nll(torch.ones(3, H), torch.randn(4, H), t, tp_group=world, temperature=heat, mode='logprob') if linear else \
                ct.nll(z, t, tp_group=world, temperature=heat)
        call()
        heat[1] += world.rank
        with pytest.raises(cb.MismatchError, match='bring other temperatures' if level == 2 else 'temperatures of tokens'):
            call()
        heat[1] = 1
        call()
    cb.run_threads(2, mixed)
