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
    ids, logp = t.clamp(min=0)[:, None], torch.zeros(3, 1) - 1
    for heat, words in ((torch.ones(2), r'temperature is \[2\] of torch.float32 on cpu, expected a number, or \[3\]'),
                        (torch.ones(3, requires_grad=True), 'temperature requires grad'),
                        (torch.tensor([1.0, 0.0, 1.0]), 'temperature: token 1 has 0')):
        for call in (lambda heat: ct.distill(z, z, temperature=heat), lambda heat: ct.logprob_at(z, ids, temperature=heat),
                     lambda heat: ct.topk_distill(z, ids, logp, temperature=heat)):
            with pytest.raises(ValueError, match=words):
                call(heat)
        with pytest.raises(ValueError, match='target_' + words):
            ct.distill(z, z, target_temperature=heat)
    with pytest.raises(ValueError, match='has_target_temperature is true, but targets are probabilities'):
        ct.distill(z, z.softmax(-1), soft_labels=True, target_temperature=torch.ones(3))
    with pytest.raises(ValueError, match=r'topk_logprob: temperature is \[3\] on cpu, expected a number'):
        ct.topk_logprob(z, 2, temperature=torch.ones(3))


# ---- other losses ----

def divergences(x, y, keep):
    """By kind, and the cross entropy, of capped and divided logits in f64"""
    p, q = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    m = torch.logaddexp(p + math.log(0.7), q + math.log(0.3))
    d = {'ce': -(q.exp() * p).sum(-1), 'forward_kl': (q.exp() * (q - p)).sum(-1), 'reverse_kl': (p.exp() * (p - q)).sum(-1),
         'jsd': 0.3 * (q.exp() * (q - m)).sum(-1) + 0.7 * (p.exp() * (p - m)).sum(-1), 'tv': (p.exp() - q.exp()).abs().sum(-1) / 2}
    d['acceptance'] = -torch.log1p(-d['tv'])
    return {name: torch.where(keep, of, torch.zeros(()).double()) for name, of in d.items()}


@pytest.mark.parametrize('dtype', list(NEAR))
@pytest.mark.parametrize('kind', ('ce', 'forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance'))
def test_divergences_of_tokens_with_temperatures_of_their_own(kind, dtype):
    near, near_grad = NEAR[dtype]
    h, w, _, t, heat = case(6)
    z, y = (h @ w.T).to(dtype), (case(7)[0] @ case(8)[1].T).to(dtype)
    keep, up = t != -100, torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).double()
    for student, teacher, softcap in ((heat, heat.flip(0), None), (heat, 1.5, 4.0), (0.8, heat, None)):
        number = [x.nan_to_num(1.0) if isinstance(x, torch.Tensor) else torch.full(SHAPE, x, dtype=torch.float64) for x in (student, teacher)]
        whole = z.double().clone().requires_grad_()
        want = divergences(capped(whole, number[0], softcap), capped(y.double(), number[1], None), keep)[kind]
        (want * up).sum().backward()
        masked = [x.nan_to_num(1.0).masked_fill(~keep, math.nan) if isinstance(x, torch.Tensor) else x for x in (student, teacher)]

        def of(world):
            lo, hi = CUTS[world.size][world.rank:world.rank + 2]
            mine = z[..., lo:hi].clone().requires_grad_()
            options = dict(mask=keep, tp_group=world, vocab=(lo, V), temperature=masked[0], target_temperature=masked[1], softcap=softcap)
            got = ct.distill(mine, y[..., lo:hi], **options).ce if kind == 'ce' else ct.distill(
                mine, y[..., lo:hi], kind=kind, beta=0.3, reduction='none', **options)
            torch.testing.assert_close(got.double(), want.detach(), rtol=near, atol=near)
            (got * up).sum().backward()
            torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=near_grad, atol=near_grad)
            return got.detach()
        for size in CUTS:
            made = cb.run_threads(size, of)
            assert all(torch.equal(a, made[0]) for a in made)


@pytest.mark.parametrize('dtype', list(NEAR))
def test_the_top_k_of_a_teacher_with_temperatures_of_tokens(dtype):
    near, near_grad = NEAR[dtype]
    h, w, _, t, heat = case(9)
    z, keep = (h @ w.T).to(dtype), t != -100
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i))[:4] for i in range(t.numel())]).view(*SHAPE, 4)
    ids[1, 1, 2] = -100
    there = ids != -100
    lq = torch.log_softmax(torch.randn(*SHAPE, 7, generator=torch.Generator().manual_seed(1)).double(), -1)[..., :4]
    up = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).double()
    for softcap, kind, tail in ((None, 'forward_kl', True), (4.0, 'reverse_kl', True), (4.0, 'forward_kl', False)):
        whole = z.double().clone().requires_grad_()
        lp = torch.log_softmax(capped(whole, heat, softcap), -1)
        p = torch.where(there, lp.gather(-1, ids.clamp(min=0)), torch.tensor(-math.inf).double())
        q = lq.masked_fill(~there, -math.inf)
        if tail:
            others = torch.ones(*SHAPE, V, dtype=torch.bool).scatter(-1, ids.clamp(min=0), ~there)
            p = torch.cat([p, lp.masked_fill(~others, -math.inf).logsumexp(-1, keepdim=True)], -1)
            q = torch.cat([q, (1 - q.exp().sum(-1, keepdim=True)).log()], -1)
        a, b = (q, p) if kind == 'forward_kl' else (p, q)
        some = a > -math.inf
        want = torch.where(some, a.masked_fill(~some, 0).exp() * (a.masked_fill(~some, 0) - b.masked_fill(~some, 0)), torch.zeros(()).double()).sum(-1)
        want = torch.where(keep, want, torch.zeros(()).double())
        (want * up).sum().backward()

        def of(world):
            lo, hi = CUTS[world.size][world.rank:world.rank + 2]
            mine = z[..., lo:hi].clone().requires_grad_()
            got = ct.topk_distill(mine, ids, lq, kind=kind, tail=tail, mask=keep, reduction='none', tp_group=world, vocab=(lo, V),
                                  temperature=heat, softcap=softcap)
            torch.testing.assert_close(got.double(), want.detach(), rtol=near, atol=near)
            (got * up).sum().backward()
            torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=near_grad, atol=near_grad)
        for size in CUTS:
            cb.run_threads(size, of)


@pytest.mark.parametrize('cut', (lambda z: z.transpose(0, 1), lambda z: z[:, ::2], lambda z: z[:, 1:3]))
def test_other_losses_of_logits_of_any_strides(cut):
    h, w, _, t, heat = case(3)
    z, heat, ids = cut(h @ w.T), cut(heat.nan_to_num(2.0).unsqueeze(-1)).squeeze(-1), cut(t.clamp(min=0).unsqueeze(-1))
    leaf, x = z.detach().requires_grad_(), z.detach().clone().requires_grad_()
    got = ct.logprob_at(leaf, ids, temperature=heat)[..., 0], ct.distill(leaf, leaf, kind='reverse_kl', reduction='none', temperature=heat)
    want = (torch.log_softmax(capped(x, heat, None), -1).gather(-1, ids)[..., 0],
            divergences(capped(x, heat, None), x.detach(), heat > 0)['reverse_kl'])
    for outs in (got, want):
        sum(out.sum() for out in outs).backward()
    for a, b in zip((*got, leaf.grad), (*want, x.grad)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('level', (1, 2))
def test_ranks_with_other_temperatures_are_told_of_other_losses(level):
    def mixed(world):
        world.set_check(level)
        z, y, heat, mask = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3), torch.tensor([True, True, False])
        heat[2] = world.rank  # of a masked token
        calls = (lambda: ct.distill(z, y, mask=mask, tp_group=world, temperature=heat),
                 lambda: ct.distill(z, y, mask=mask, tp_group=world, kind='jsd', target_temperature=heat),
                 lambda: ct.logprob_at(z, torch.tensor([[1], [2], [3]]), mask=mask, tp_group=world, temperature=heat))
        for call in calls:
            call()
            heat[1] += world.rank
            with pytest.raises(cb.MismatchError):
                call()
            heat[1] = 1
            call()
    cb.run_threads(2, mixed)


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
