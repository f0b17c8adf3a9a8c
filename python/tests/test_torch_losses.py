# SPDX-License-Identifier: Apache-2.0
"""topk_logprob(), logprob_at(), distill(), entropy(), weighted_sum() and Sequence against PyTorch in f64 on whole
vocabularies and batches: processes, threads, dtypes, strides, masks, special values, refusals."""
import copy
import itertools
import math
import pickle
import re
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll, over_chunks  # noqa: E402
from colobridge import compat  # noqa: E402
from colobridge.torch import sequence  # noqa: E402
from test_torch_logprob import TOLERANCE, V, shards  # noqa: E402
from test_torch_saved import brought_back  # noqa: E402
from world import meet  # noqa: E402

K = 5
INF, NAN = float('inf'), float('nan')


def drawn(shape, dtype, vocab=V, seed=0):
    """Logits, a teacher's, ids of which one is ignored, a mask, and upstream gradients"""
    rng = torch.Generator().manual_seed(seed)
    z, q = (3 * torch.randn(2, *shape, vocab, generator=rng, dtype=torch.float64)).to(dtype)
    ids = torch.randint(0, vocab, (*shape, K), generator=rng)
    ids.view(-1)[1:2] = -100
    mask = torch.rand(shape, generator=rng) < 0.7
    return z, q, ids, mask, torch.randn(2, *shape, K, generator=rng, dtype=torch.float64)


def log_softmax(z, temperature, softcap=None, scale=1.0):
    x = scale * z.double()
    return torch.log_softmax((softcap * torch.tanh(x / softcap) if softcap else x) / temperature, -1)


def largest(z, k):
    """Ids of the k largest, of equal ones the lowest"""
    return torch.sort(z.double(), dim=-1, descending=True, stable=True)[1][..., :k]


def at(lp, ids):
    found = lp.gather(-1, ids.clamp(min=0))
    return torch.where(ids >= 0, found, torch.zeros((), dtype=lp.dtype))


def masked(value, mask):
    shape = mask.shape + (1,) * (value.dim() - mask.dim())
    return torch.where(mask.view(shape), value, torch.zeros((), dtype=value.dtype))


def ours(name, z, q, ids, mask, lo, hi, **o):
    vocab = o['vocab']
    o.update(mask=mask, vocab=(lo, vocab))
    if name == 'topk':
        out = ct.topk_logprob(z, min(K, vocab), **o)
        return out.logp, out.ids
    if name == 'at':
        return ct.logprob_at(z, ids, **o), None
    if name == 'entropy':
        return ct.entropy(z, **o)[..., None], None
    if name in KINDS:
        return ct.distill(z, q, kind=name, beta=BETA, reduction='none', target_temperature=2.0, **o)[..., None], None
    soft = name == 'soft labels'
    out = ct.distill(z, q, soft_labels=soft, **(o if soft else dict(o, target_temperature=2.0)))
    return torch.stack(out, -1), None


BETA = 0.3


def jsd(lp, lq):
    m = BETA * lq.exp() + (1 - BETA) * lp.exp()
    return (BETA * lq.exp() * (lq - m.log()) + (1 - BETA) * lp.exp() * (lp - m.log())).sum(-1)


KINDS = {  # of the logarithms of a student's probabilities and of its teacher's
    'forward_kl': lambda lp, lq: (lq.exp() * (lq - lp)).sum(-1), 'reverse_kl': lambda lp, lq: (lp.exp() * (lp - lq)).sum(-1),
    'jsd': jsd, 'tv': lambda lp, lq: (lp.exp() - lq.exp()).abs().sum(-1) / 2,
    'acceptance': lambda lp, lq: -torch.minimum(lp.exp(), lq.exp()).sum(-1).log()}


def theirs(name, z, q, ids, mask, temperature, softcap, scale=1.0):
    lp = log_softmax(z, temperature, softcap, scale)
    if name == 'topk':
        return masked(at(lp, largest(z.detach(), min(K, z.shape[-1]))), mask)
    if name == 'at':
        return masked(at(lp, ids), mask)
    if name == 'entropy':
        return masked(-(lp.exp() * lp).sum(-1, keepdim=True), mask)
    lq = q.double().log() if name == 'soft labels' else log_softmax(q, 2.0)
    p = lq.exp()
    if name in KINDS:
        return masked(KINDS[name](lp, lq)[..., None], mask)
    return masked(torch.stack([-(p * lp).sum(-1), (p * (lq - lp)).sum(-1)], -1), mask)


OVER = ('topk', 'at', 'entropy', 'logits', 'soft labels', *KINDS)


def agrees(rank, size, group, dtype, how, shape, vocab=V):
    z, q, ids, mask, g = drawn(shape, dtype, vocab)
    lo, hi = shards(rank, size, how) if vocab == V else (min(rank, vocab), min(rank + 1, vocab))
    said = []
    for name, (temperature, softcap, scale) in itertools.product(OVER, ((1.0, None, 1.0), (0.7, 5.0, 1.3))):
        targets = q.double().softmax(-1).to(dtype) if name == 'soft labels' else q
        whole, mine = z.double().clone().requires_grad_(), z[..., lo:hi].clone().requires_grad_()
        want = theirs(name, whole, targets, ids, mask, temperature, softcap, scale)
        got, found = ours(name, mine, targets[..., lo:hi], ids, mask, lo, hi, tp_group=group, vocab=vocab,
                          temperature=temperature / scale, softcap=softcap and softcap / scale)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        near, near_grad = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), want, rtol=near, atol=near, msg=name)
        if found is not None:
            assert torch.equal(found, torch.where(mask[..., None], largest(z, min(K, vocab)), torch.tensor(-1)))
        up = g[0][..., :got.shape[-1]]
        (got.double() * up).sum().backward()
        (want * up).sum().backward()
        assert mine.grad.dtype == dtype
        # A row's gradient has K upstream ones in it where a logprob()'s has one.
        torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=K * near_grad,
                                   atol=K * near_grad, msg=name)
        said.append(got.tolist())
    return said


def in_process(rank, dtype, how, shape, vocab):
    return agrees(rank, 4, dist.group.WORLD, dtype, how, shape, vocab)


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
def test_outputs_and_gradients_on_processes(world, dtype):
    for how, shape, vocab in (('even', (2, 5), V), ('odd', (7,), V), ('one column', (3,), 3), ('odd', (0, 4), V)):
        said = world.run(in_process, dtype, how, shape, vocab)
        assert all(s == said[0] for s in said)  # the same bits everywhere


def test_outputs_and_gradients_on_threads_and_alone():
    for dtype, how in itertools.product(TOLERANCE, ('even', 'odd')):
        cb.run_threads(4, lambda world: agrees(world.rank, 4, world, dtype, how, (3, 4)))
        agrees(0, 1, None, dtype, how, (3, 4))


VIEWS = {'a slice of a longer sequence': lambda z: z[:, :-1], 'sbh': lambda z: z.transpose(0, 1),
         'every second column': lambda z: z[..., ::2], 'one sample': lambda z: z[1],
         'repeated rows': lambda z: z[:, :1].expand(-1, 4, -1), 'one token': lambda z: z[1, 2]}


@pytest.mark.parametrize('view', list(VIEWS))
def test_logits_of_any_strides(view):
    z, q, _, _, _ = drawn((4, 6), torch.float64)
    cut = VIEWS[view]
    shape, columns = cut(z).shape[:-1], cut(z).shape[-1]
    rng = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(0, columns, (*shape, K), generator=rng), torch.rand(shape, generator=rng) < 0.8
    up = torch.randn(*shape, K, generator=rng, dtype=torch.float64)
    for name in OVER:
        targets = q.softmax(-1) if name == 'soft labels' else q
        whole, mine = z.clone().requires_grad_(), z.clone().requires_grad_()
        want = theirs(name, cut(whole), cut(targets), ids, mask, 1.0, None)
        got, _ = ours(name, cut(mine), cut(targets), ids, mask, 0, columns, vocab=columns)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)
        (got * up[..., :got.shape[-1]]).sum().backward()
        (want * up[..., :got.shape[-1]]).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_tensors_that_checkpoints_and_hooks_bring_back():
    z, q, ids, mask, g = drawn((3, 4), torch.float64)
    seq = ct.Sequence(3, 4)
    calls = {name: lambda z, name=name: ours(name, z, q.softmax(-1), ids, mask, 0, V, vocab=V)[0] for name in OVER}
    calls['weighted_sum'] = lambda z: ct.weighted_sum(z.sum(-1), g[0][..., 0], mask).value
    calls['gather'] = lambda z: seq.gather(z.sum(-1))
    for name, fn in calls.items():
        grads = []
        for kind in ('plain', 'checkpoint', 'hooks'):
            x = z.clone().requires_grad_()
            if kind == 'hooks':
                with brought_back():
                    out = fn(x * 1.0)
            else:
                out = checkpoint(lambda x: fn(x * 1.0), x, use_reentrant=False) if kind == 'checkpoint' else fn(x)
            out.square().sum().backward()
            grads.append(x.grad)
        assert float(grads[0].abs().max()) > 0 and all(torch.equal(x, grads[0]) for x in grads), name


def test_backward_twice_and_in_place():
    z, q, ids, mask, _ = drawn((3, 4), torch.float64)
    for name in OVER:
        x = z.clone().requires_grad_()
        out, _ = ours(name, x, q.softmax(-1), ids, mask, 0, V, vocab=V)
        first, = torch.autograd.grad(out.sum(), x, retain_graph=True)
        second, = torch.autograd.grad(out.sum(), x)
        assert torch.equal(first, second), name
        inner = x * 1.0
        out, _ = ours(name, inner, q.softmax(-1), ids, mask, 0, V, vocab=V, inplace_backward=True)
        third, = torch.autograd.grad(out.sum(), x)
        assert torch.equal(first, third) and torch.equal(inner.detach(), first), name


def test_logits_written_since_forward_are_refused():
    z, q, ids, mask, _ = drawn((3,), torch.float64)
    for name in OVER:
        x = z.clone().requires_grad_() * 1.0
        out, _ = ours(name, x, q, ids, mask, 0, V, vocab=V)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match='modified|written in place'):
            out.sum().backward()


def test_special_values():
    z = torch.zeros(6, 4, dtype=torch.float64)
    z[1, 2], z[2, 2], z[3], z[4, 1] = NAN, INF, -INF, -INF
    ids = torch.tensor([[1, 2]]).repeat(6, 1)
    ids[5] = torch.tensor([9, 1])
    x = z.clone().requires_grad_()
    logp = ct.logprob_at(x, ids)
    assert logp[1:4].isnan().all() and logp[4, 0] == -INF and logp[5, 0].isnan()
    torch.testing.assert_close(logp[4, 1], -torch.tensor(3.0).double().log())
    torch.testing.assert_close(logp[5, 1], -torch.tensor(4.0).double().log())
    logp[:5].sum().backward()
    assert x.grad[1:4].isnan().all() and x.grad[[0, 4]].isfinite().all()
    out = ct.topk_logprob(z, 4)
    assert (out.ids[1:4] == -1).all() and out.ids[4].tolist() == [0, 2, 3, 1] and out.logp[4, 3] == -INF
    ce, kl = ct.distill(z, torch.zeros_like(z))
    assert ce[1:4].isnan().all() and ce[4] == INF and kl[4] == INF and kl[0] == 0
    assert ct.entropy(z)[1:4].isnan().all() and ct.entropy(z)[[0, 4, 5]].isfinite().all()


def test_gradcheck():
    z, q, ids, mask, g = drawn((2, 3), torch.float64)
    z.requires_grad_()
    for name in OVER:
        assert torch.autograd.gradcheck(lambda z: ours(
            name, z, q.softmax(-1), ids, mask, 0, V, vocab=V, softcap=4.0, temperature=0.8)[0], (z,)), name
    assert torch.autograd.gradcheck(lambda z: ct.weighted_sum(z[..., 0], g[0][..., 0], mask)[:2], (z,))


def in_dp(rank):
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    z, q, _, mask, _ = drawn((4, 3), torch.float64)
    mask[2:, 1] = False
    lo, hi = shards(rank % 2, 2, 'odd')
    mine = slice(0, 2) if rank < 2 else slice(2, 4)
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)) * mask
    said = []
    for kind, of in KINDS.items():
        for counts in (None, mask, weights):
            for reduction in ('mean', 'sum'):
                whole, x = z.clone().requires_grad_(), z[mine, :, lo:hi].clone().requires_grad_()
                d = of(log_softmax(whole, 1.0), log_softmax(q, 1.0))
                by = torch.ones(4, 3) if counts is None else counts.double()
                want = (d * by).sum() / (by.sum() if reduction == 'mean' else 1)
                got = ct.distill(x, q[mine, :, lo:hi], kind=kind, beta=BETA, reduction=reduction, reduce_group=dp, tp_group=tp,
                                 mask=None if counts is None else counts[mine], vocab=(lo, V))
                torch.testing.assert_close(got.loss, want, rtol=1e-7, atol=1e-9)  # weights are f32
                torch.testing.assert_close(got.den, by.sum().double(), rtol=1e-7, atol=0)
                got.backward()
                want.backward()
                torch.testing.assert_close(x.grad, whole.grad[mine, :, lo:hi], rtol=1e-6, atol=1e-9)
                said.append(got.item())
    return said


def test_a_divergence_is_reduced_over_ranks_once(world):
    said = world.run(in_dp)
    assert all(s == said[0] for s in said)


def test_a_divergence_near_0_keeps_its_digits():
    rng = torch.Generator().manual_seed(7)
    for bits in (8, 12, 16):
        z = (torch.randn(4, 1000, generator=rng) * 2 ** 14).floor() / 2 ** 14
        q = z + torch.randint(-8, 9, z.shape, generator=rng) / 2.0 ** (bits + 3)
        lp, lq = (torch.log_softmax(x.double(), -1) for x in (z, q))
        t = lp - lq - (lq.exp() * (lp - lq)).sum(-1, keepdim=True)
        near = {'forward_kl': (lq.exp() * t ** 2).sum(-1) / 2, 'reverse_kl': (lq.exp() * t ** 2).sum(-1) / 2,
                'jsd': BETA * (1 - BETA) * (lq.exp() * t ** 2).sum(-1) / 2,
                'tv': (lq.exp() * t.abs()).sum(-1) / 2, 'acceptance': (lq.exp() * t.abs()).sum(-1) / 2}
        for kind, want in near.items():  # but for terms of the next order in t, which is within 2^-bits
            got = ct.distill(z, q, kind=kind, beta=BETA, reduction='none').double()
            assert ((got / want - 1).abs() < 2 * 2.0 ** -bits + 1e-5).all(), (kind, bits, got, want)


def k_outcomes(z, ids, logp, kind, tail, temperature=1.0):
    """The D of topk_distill() from its definition: outcomes are tensors [.., k] or [.., k + 1] of probabilities."""
    probs = log_softmax(z, temperature).exp()
    asked = ids >= 0
    p, q = probs.gather(-1, ids.clamp(min=0)) * asked, logp.double().exp() * asked
    if tail:
        rest = 1 - (torch.nn.functional.one_hot(ids.clamp(min=0), z.shape[-1]) * asked[..., None]).sum(-2)
        p, q = torch.cat([p, (probs * rest).sum(-1, keepdim=True)], -1), torch.cat([q, (1 - q.sum(-1, keepdim=True)).clamp(min=0)], -1)
    a, b = (p, q) if kind == 'reverse_kl' else (q, p)
    return torch.where(a > 0, a * (a.clamp(min=1e-300) / b.clamp(min=1e-300)).log(), torch.zeros_like(a)).sum(-1)


def topk_agrees(rank, size, group, dtype, how):
    z, q, _, mask, g = drawn((3, 4), dtype)
    lo, hi = shards(rank, size, how)
    logp, ids = log_softmax(q, 1.0).topk(K, -1)
    logp, ids = logp.float(), ids.clone()
    ids[0, :2, 1] = -100
    logp[0, :2, 1] = NAN  # not read
    said = []
    for kind, tail, temperature in itertools.product(('forward_kl', 'reverse_kl'), (True, False), (1.0, 0.7)):
        whole, mine = z.double().clone().requires_grad_(), z[..., lo:hi].clone().requires_grad_()
        clean = logp.nan_to_num(0.0)
        want = masked(k_outcomes(whole, ids.where(ids >= 0, ids.new_tensor(-1)), clean, kind, tail, temperature), mask)
        got = ct.topk_distill(mine, ids, logp, kind=kind, tail=tail, mask=mask, reduction='none', tp_group=group, vocab=(lo, V),
                              temperature=temperature)
        near, near_grad = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), want, rtol=near, atol=4 * near, msg='%s %s' % (kind, tail))
        up = g[0][..., 0]
        (got.double() * up).sum().backward()
        (want * up).sum().backward()
        torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=K * near_grad, atol=K * near_grad,
                                   msg='%s %s' % (kind, tail))
        said.append(got.tolist())
    return said


def topk_in_process(rank, dtype, how):
    return topk_agrees(rank, 4, dist.group.WORLD, dtype, how)


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
def test_top_k_of_a_teacher_on_processes(world, dtype):
    for how in ('even', 'odd'):
        said = world.run(topk_in_process, dtype, how)
        assert all(s == said[0] for s in said)


def test_top_k_of_a_teacher_on_threads_and_alone():
    for dtype, how in itertools.product(TOLERANCE, ('even', 'odd')):
        cb.run_threads(4, lambda world: topk_agrees(world.rank, 4, world, dtype, how))
        topk_agrees(0, 1, None, dtype, how)


def test_gradients_from_the_top_k():
    z, q, _, mask, _ = drawn((2, 3), torch.float64)
    logp, ids = log_softmax(q, 1.0).topk(K, -1)
    for kind, tail in itertools.product(('forward_kl', 'reverse_kl'), (True, False)):
        assert torch.autograd.gradcheck(lambda z: ct.topk_distill(z, ids, logp, kind=kind, tail=tail, mask=mask, reduction='sum')[:2],
                                        (z.clone().requires_grad_(),))


def test_the_tail_of_a_peaked_token_is_no_difference():
    z = torch.zeros(1, 10)
    z[0, 3] = 60.0  # in f32 its p is 1
    ids, logp = torch.tensor([[3, 4]]), torch.tensor([[0.5, 0.25]]).log()
    x = z.clone().requires_grad_()
    got = ct.topk_distill(x, ids, logp)
    lp = z.double().log_softmax(-1)[0]
    rest = lp[[0, 1, 2, 5, 6, 7, 8, 9]].logsumexp(-1)
    want = float(0.5 * (math.log(0.5) - lp[3]) + 0.25 * (math.log(0.25) - lp[4]) + 0.25 * (math.log(0.25) - rest))
    assert abs(got.item() - want) < 1e-5 * want
    got.backward()
    expected = torch.full((10,), -0.25 / 8)
    expected[3], expected[4] = 0.5, -0.25
    torch.testing.assert_close(x.grad[0], expected, rtol=1e-5, atol=1e-7)


def test_top_k_special_values():
    z, ids = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)), torch.tensor([[0, 1], [2, 2], [-100, -100]])
    logp = torch.tensor([[0.6, 0.4], [0.1, 0.2], [0.3, 0.3]]).log()
    x = z.clone().requires_grad_()
    d = ct.topk_distill(x, ids, logp, reduction='none')
    assert d[0].isfinite() and d[1].isnan() and d[2] == 0  # an id that is there twice; nothing but the tail
    d[[0, 2]].sum().backward()
    assert x.grad[0].isfinite().all() and (x.grad[2] == 0).all()
    x = z[:1].clone().requires_grad_()
    logp = torch.tensor([[1.0, 0.0]]).log()  # nothing is left
    d = ct.topk_distill(x, ids[:1], logp, kind='reverse_kl', reduction='none')
    d.sum().backward()
    assert d[0] == INF and x.grad.isnan().all()
    x.grad = None
    d = ct.topk_distill(x, ids[:1], logp, reduction='none')
    d.sum().backward()
    torch.testing.assert_close(d, -z[:1].log_softmax(-1)[:, 0])
    assert x.grad.isfinite().all()
    for dtype, rounds in itertools.product((torch.float32, torch.bfloat16, torch.float64), (1.0, 0.9)):
        x = z.to(torch.float64 if dtype == torch.float64 else torch.float32)  # no column is outside of the ids
        every, teacher = torch.arange(6).expand(3, 6), (2 * z.flip(-1)).double().log_softmax(-1).to(dtype)
        d = ct.topk_distill(x, every, teacher + math.log(rounds), reduction='none')
        want = KINDS['forward_kl'](x.double().log_softmax(-1), teacher.double())
        assert (d == INF).all() if rounds < 1 else torch.allclose(d.double(), want, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    for kind, tail, given in itertools.product(('forward_kl', 'reverse_kl'), (True, False), ([0, 1], [0, 6])):
        x = z[:1].clone()
        x[0, 2] = math.nan if given[1] == 1 else 0  # a row of NaN; an id that is none, of which the teacher says q = 0
        assert ct.topk_distill(x, torch.tensor([given]), logp, kind=kind, tail=tail, reduction='none').isnan().all(), (kind, tail)
    for kind, tail, bad in itertools.product(('forward_kl', 'reverse_kl'), (True, False), (math.nan, INF)):
        x = torch.zeros(2, 6)
        x[:, 0] = -INF  # the student says p = 0 where the teacher's is no number
        x.requires_grad_()
        d = ct.topk_distill(x, ids[:1].expand(2, 2), torch.tensor([[bad, 0.5]]).expand(2, 2), kind=kind, tail=tail, reduction='none',
                            mask=torch.tensor([1, 0]))
        d.sum().backward()
        assert d[0].isnan() and x.grad[0].isnan().all() and d[1] == 0 and (x.grad[1] == 0).all(), (kind, tail, bad, d, x.grad)
    for bad in (dict(kind='jsd'), dict(reduction='average'), dict(ids=ids[:, :1])):
        with pytest.raises(ValueError, match='topk_distill: '):
            ct.topk_distill(**{**dict(vocab_parallel_logits=z[:1], ids=ids[:1], logp=logp), **bad})


def test_kinds_that_are_none_are_refused():
    z = torch.zeros(2, 3)
    for options, said in ((dict(kind='kl'), "kind is 'kl'"), (dict(kind='tv', reduction='average'), "reduction is 'average'"),
                          (dict(reduction='mean'), "expected kind="), (dict(kind='tv', soft_labels=True), 'soft_labels is True'),
                          (dict(kind='jsd', beta=1.0), 'beta is 1, expected between 0 and 1'),
                          (dict(kind='jsd', beta='half'), "beta is 'half'"),
                          (dict(kind='tv', mask=torch.tensor([-1.0, 1.0])), 'found -1.0 at')):
        with pytest.raises(ValueError, match='distill: .*' + re.escape(said)):
            ct.distill(z, z, **options)


PENALTIES = {
    'logprob': lambda z, h, w, t: ct.logprob(z, t), 'nll': lambda z, h, w, t: ct.nll(z, t).loss,
    'weighted nll': lambda z, h, w, t: ct.nll(z, t, mask=torch.ones(3)).loss,
    'entropy': lambda z, h, w, t: ct.entropy(z), 'at': lambda z, h, w, t: ct.logprob_at(z, t[:, None]),
    'topk': lambda z, h, w, t: ct.topk_logprob(z, 2).logp, 'distill': lambda z, h, w, t: ct.distill(z, z.detach() + 1).kl,
    'linear': lambda z, h, w, t: linear_logprob(h, w, target=t), 'head': lambda z, h, w, t: linear_nll(h, w, target=t).loss,
    'head of doubles': lambda z, h, w, t: linear_nll(h.double(), w.double(), target=t).loss,
    'upstream': lambda z, h, w, t: linear_nll(h, w, target=t, reduction='sum', upstream=1).loss,
    'chunks': lambda z, h, w, t: over_chunks(lambda z, rows: ct.entropy(z), h, w),
    'weighted sum': lambda z, h, w, t: ct.weighted_sum(z).value.square(),
    'gather': lambda z, h, w, t: ct.Sequence(3, 5).gather(z).square(),
}


@pytest.mark.parametrize('name', list(PENALTIES))
def test_a_gradient_penalty_is_refused(name):
    h, w, t = torch.ones(3, 4, requires_grad=True), torch.eye(5, 4, requires_grad=True), torch.tensor([0, 1, 4])
    loss = PENALTIES[name](h @ w.t(), h, w, t).sum()
    gradient, = torch.autograd.grad(loss, h, create_graph=True)
    with pytest.raises(RuntimeError, match='differentiate twice'):
        (gradient.square().sum() + loss).backward()


@pytest.mark.parametrize('name', list(PENALTIES))
def test_a_gradient_penalty_through_a_layer_is_refused(name):
    x, a, w = torch.ones(3, 2, requires_grad=True), torch.ones(2, 4, requires_grad=True), torch.eye(5, 4)
    t = torch.tensor([0, 1, 4])

    def gradient():
        h = x @ a
        return torch.autograd.grad(PENALTIES[name](h @ w.t(), h, w, t).sum(), x, create_graph=True)[0]
    assert gradient().isfinite().all()  # no error before somebody asks for its gradient
    with pytest.raises(RuntimeError, match='differentiate twice'):
        torch.autograd.grad(gradient().square().sum(), a)
    if name not in ('weighted sum', 'gather'):  # whose gradients are linear
        with pytest.raises(RuntimeError, match='differentiate twice'):
            torch.autograd.grad(gradient().sum(), a)


@pytest.mark.parametrize('name', list(PENALTIES))
def test_memory_of_other_signs_is_never_read(name):
    rng = torch.Generator().manual_seed(5)
    h, w, t = torch.randn(3, 4, generator=rng), torch.randn(5, 4, generator=rng), torch.tensor([0, 1, 4])
    gradients = []
    for negative in (False, True):  # an upstream gradient, after a call of the same shapes
        x = h.clone().requires_grad_()
        out = PENALTIES[name](x @ w.t(), x, w, t)
        ones = torch.ones_like(out)
        gradients += torch.autograd.grad(out, x, torch._neg_view(-ones) if negative else ones)
    assert torch.equal(*gradients)
    if name not in ('head of doubles', 'chunks'):  # whose other operations make tensors without the bit
        with pytest.raises(ValueError, match='the negative bit'):
            PENALTIES[name](torch._neg_view(h @ w.t()), torch._neg_view(h), w, t)


def test_ids_of_other_signs_are_never_read():
    z, t = torch.arange(20.0).view(4, 5), torch.tensor([0, 1, 4, 2])
    ct.nll(z, t)  # so that the next one is not the first of its shapes
    with pytest.raises(ValueError, match='target: its memory holds other signs'):
        ct.nll(z, torch._neg_view(t))
    lists = torch.tensor([0, 3, 1, 4]), torch.tensor([0, 1, 2, 3, 4])
    other = ct.Support(torch._neg_view(-lists[0]), torch._neg_view(-lists[1]), ascending=True)
    assert torch.equal(ct.logprob(z, t, support=other), ct.logprob(z, t, support=ct.Support(*lists)))


def test_what_is_linear_has_second_derivatives():
    for fn in (lambda x: ct.weighted_sum(x).value, ct.Sequence(1, 4).gather, lambda x: ct.shard(x, cb.Partition(4))):
        x = torch.ones(1, 4, requires_grad=True)
        gradient, = torch.autograd.grad(fn(x * x).sum(), x, create_graph=True)
        assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], gradient / x)


# ---- weighted sums ----

def weighs(rank, dtype):
    rng = torch.Generator().manual_seed(rank)
    count = (0, 3, 5, 4)[rank]
    v, w = torch.randn(2, count, generator=rng, dtype=torch.float64).to(dtype)
    mask = torch.rand(count, generator=rng) < 0.6
    both = []
    for weights in (None, w):
        x = v.clone().requires_grad_()
        out = ct.weighted_sum(x, weights, mask, reduce_group=dist.group.WORLD)
        (out.value * 3 + out.num * 0.5).sum().backward()
        nothing = ct.weighted_sum(v, weights, torch.zeros_like(mask), reduce_group=dist.group.WORLD)
        assert float(nothing.value) == 0 and int(nothing.den) == 0
        both.append(([t.tolist() for t in out], x.grad.tolist()))
    return v.double().tolist(), w.double().tolist(), mask.tolist(), both


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
def test_weighted_sums_are_divided_once_over_all_ranks(world, dtype):
    said = world.run(weighs, dtype)
    assert all(s[3][i][0] == said[0][3][i][0] for s in said for i in (0, 1))
    near = 1e-14 if dtype == torch.float64 else 1e-6
    for i in (0, 1):
        num = weight = den = 0.0
        for v, w, mask, _ in said:
            for a, b, m in zip(v, w, mask):
                b = b if i else 1.0
                num, weight, den = num + m * a * b, weight + m * b, den + m
        assert said[0][3][i][0][1:] == pytest.approx([num, weight, den], abs=1e-12)
        assert said[0][3][i][0][0] == pytest.approx(num / den, abs=near)
        for v, w, mask, both in said:
            want = [m * (b if i else 1.0) * (3 / den + 0.5) for b, m in zip(w, mask)]
            bound = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, near * 10)
            assert both[i][1] == pytest.approx(want, abs=bound)


# ---- sequences ----

LENGTHS = [5, 8, 0, 3]


def batch(packed, left, split='zigzag'):
    """(tokens [4, 8], where sequence tokens are, the sequence on this rank)"""
    tokens = torch.arange(100, 132).reshape(4, 8)
    cu = None if not packed else ct.Sequence.pack(LENGTHS, cp=4) if split == 'zigzag' else [0, 5, 13, 13, 16]
    seq = ct.Sequence(4, 8, lengths=LENGTHS, cu_padded=cu, padded=0 if packed else 8,
                      left_padded=left, cp_group=dist.group.WORLD, split=split)
    if packed:
        stream = torch.zeros(cu[-1], dtype=torch.int64)
        for b, n in enumerate(LENGTHS):
            stream[cu[b]:cu[b] + n] = tokens[b, 8 - n:] if left else tokens[b, :n]
        return tokens, stream, seq
    return tokens, tokens, seq


def gathers(rank, packed, left, split):
    tokens, given, seq = batch(packed, left, split)
    again = pickle.loads(pickle.dumps(cb.Partition(8, cp=2, split=split)))
    assert again.index() == cb.Partition(8, cp=2, split=split).index() == ([0, 1, 6, 7] if split == 'zigzag' else [0, 1, 2, 3])
    targets = seq.targets(given, ignore=-7)
    assert targets.shape == seq.shape and torch.equal(targets != -7, seq.mask('targets'))
    ends = torch.tensor([100 + 8 * b + (8 if left else n) for b, n in enumerate(LENGTHS)])
    for depth in (1, 3, 8):  # of the token's own row, on whatever rank it is
        later, row = targets + depth, (targets - 100).clamp(min=0) // 8
        assert torch.equal(seq.targets(given, ignore=-7, depth=depth), torch.where((targets != -7) & (later < ends[row]), later, -7))
    with pytest.raises(ValueError, match='sequence: depth is -1, expected 0 or more'):
        seq.targets(given, depth=-1)
    table = torch.randn(32, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = int(seq.mask().sum())
    grads = []
    for adjoint in ('slice', 'sum'):
        local = table[(targets - 100).clamp(min=0)].clone().requires_grad_()  # as if made of its target
        h = ct.entropy(local, mask=seq.mask('targets'))
        out = seq.gather(h, adjoint)
        assert out.shape == (4, 7)
        want = torch.zeros(4, 7, dtype=torch.float64)
        for b, n in enumerate(LENGTHS):
            first = 8 - n if left else 0
            for col in range(first, first + n - 1):
                lp = torch.log_softmax(table[tokens[b, col + 1] - 100], -1)
                want[b, col] = -(lp.exp() * lp).sum()
        torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
        up = torch.randn(4, 7, generator=torch.Generator().manual_seed(2 + (adjoint == 'sum') * rank), dtype=torch.float64)
        d_h, = torch.autograd.grad((out * up).sum(), h)
        grads.append((adjoint, up.tolist(), d_h.reshape(-1).tolist(), targets.reshape(-1).tolist()))
    return counts, grads


@pytest.mark.parametrize('split', ('zigzag', 'contiguous'))
@pytest.mark.parametrize('left', (False, True))
@pytest.mark.parametrize('packed', (False, True))
def test_sequences_over_context_ranks(world, packed, left, split):
    said = world.run(gathers, packed, left, split)
    assert sum(counts for counts, _ in said) == sum(LENGTHS)
    seen = []
    for rank, (_, grads) in enumerate(said):
        for i, (adjoint, up, d_h, targets) in enumerate(grads):
            whole = torch.tensor(up, dtype=torch.float64) if adjoint == 'slice' else \
                sum(torch.tensor(grads[i][1], dtype=torch.float64) for _, grads in said)
            for g, target in zip(d_h, targets):
                b, col = divmod(target - 100, 8)
                assert g == pytest.approx(0 if target == -7 else float(whole[b, col - 1]), abs=1e-13)
            seen += [t for t in targets if t != -7 and adjoint == 'slice']
    assert len(seen) == len(set(seen)) == sum(max(n - 1, 0) for n in LENGTHS)


def test_tokens_of_any_strides_have_their_next_ones(monkeypatch):
    call, taken = sequence.call, []

    def late(*arguments):  # what the caller let go of has another owner by now
        taken.extend(torch.zeros(3, 50, dtype=torch.int64) for _ in range(9))
        return call(*arguments)
    tokens, seq = torch.arange(150).view(50, 3).t(), ct.Sequence(3, 50)
    monkeypatch.setattr(sequence, 'call', late)
    assert torch.equal(seq.targets(tokens), torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100))


def test_a_batch_without_rows_has_columns():
    seq = ct.Sequence(0, 3, padded=4)
    targets = seq.targets(torch.zeros(0, 3, dtype=torch.int64))
    assert targets.shape == seq.mask().shape == (0, 4)
    assert seq.gather(ct.logprob(torch.zeros(0, 4, 5), targets)).shape == (0, 2)


def test_values_of_transposed_tokens_are_refused():
    for made, shape, others in ((ct.Sequence(2, 3), (2, 3), ((3, 2), (6,), (2, 4))),
                                (ct.Sequence(2, 3, cu_padded=[0, 2, 6]), (6,), ((2, 3), (3, 2)))):
        assert made.gather(torch.ones(1, *shape)).shape == made.gather(torch.ones(*shape, 1)).shape == (2, 2)
        for other in others:
            with pytest.raises(ValueError, match=r'values are \[%s\] of .* tensor \[%s\]' % (
                    ', '.join(map(str, other)), ', '.join(map(str, shape)))):
                made.gather(torch.ones(other))


def test_copies_of_sequences_have_memory_of_their_own():
    tokens = torch.arange(8).view(2, 4)
    for made in (ct.Sequence(2, 4, lengths=[2, 3], left_padded=True), ct.Sequence(2, 4, padded=6),
                 ct.Sequence(2, 4, lengths=[2, 3], cu_padded=[0, 2, 6]), ct.Sequence(0, 4, cu_padded=[0], lengths=[])):
        want = made.targets(tokens[:made.batch])
        for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(other.targets(tokens[:made.batch]), want)


def test_a_sequence_whose_rows_do_not_fit_names_the_row():
    with pytest.raises(ValueError, match='row 1'):
        ct.Sequence(2, 4, lengths=[4, 5])
    with pytest.raises(ValueError, match='lengths has 1 numbers, expected 2'):
        ct.Sequence(2, 4, lengths=[4])


# ---- refusals ----

WRONG = {
    'mask': lambda z, q, ids, o: ct.topk_logprob(z, K, mask=torch.ones(9), **o),
    'k': lambda z, q, ids, o: ct.topk_logprob(z, 0, **o),
    'ids of floats': lambda z, q, ids, o: ct.logprob_at(z, ids.double(), **o),
    'ids of another shape': lambda z, q, ids, o: ct.logprob_at(z, ids[:2], **o),
    'targets of fewer columns': lambda z, q, ids, o: ct.distill(z, q[..., :-1], **o),
    'entropy of a mask on another device': lambda z, q, ids, o: ct.entropy(z, mask=torch.ones(4, device='meta'), **o),
    'chunks below 0 of a head': lambda z, q, ids, o: linear_logprob(z, torch.ones(z.shape[1], z.shape[1]).double(
        ), target=ids[:, 0], chunk_size=-1, **o),
    'logits of no tensor': lambda z, q, ids, o: ct.logprob([1.0], ids[:, 0], **o),
    'a mask of no tensor': lambda z, q, ids, o: ct.topk_logprob(z, K, mask=[1], **o),
    'a temperature that no float holds': lambda z, q, ids, o: ct.logprob(z, ids[:, 0], temperature=10 ** 400, **o),
    'a temperature of no number': lambda z, q, ids, o: ct.logprob(z, ids[:, 0], temperature='hot', **o),
    'entropy of a mask of another shape': lambda z, q, ids, o: ct.entropy(z, mask=torch.ones(2), **o),
}


def refuses(rank, name):
    z, q, ids, _, _ = drawn((4,), torch.float64)
    lo, hi = shards(rank, 4, 'even')
    o = dict(tp_group=dist.group.WORLD, vocab=(lo, V))
    good = lambda: ct.topk_logprob(z[:, lo:hi], K, **o)  # noqa: E731
    good()
    meet()
    with pytest.raises((ValueError, OverflowError) if rank == 2 else RuntimeError) as why:
        WRONG[name](z[:, lo:hi], q[:, lo:hi], ids, o) if rank == 2 else good()
    said = str(why.value)
    meet()
    good()
    return said


@pytest.mark.parametrize('name', list(WRONG))
def test_one_ranks_wrong_argument_reaches_the_others(world, name):
    said = world.run(refuses, name)
    for rank in (0, 1, 3):
        assert said[2].split('\n')[0][:40] in said[rank]


def hears_before_its_call(rank):
    z, _, ids, _, _ = drawn((4,), torch.float64)
    lo, hi = shards(rank, 4, 'even')
    run = lambda group: ct.nll(z[:, lo:hi], ids[:, 0], tp_group=dist.group.WORLD, reduce_group=group,  # noqa: E731
                               vocab=(lo, V))
    run(None)
    meet()
    if rank == 2:
        with pytest.raises(ValueError, match='reduce_group is a int'):
            run(3)
    meet()
    if rank != 2:
        with pytest.raises(RuntimeError, match='reduce_group is a int'):
            run(None)
    meet()
    assert run(None).loss.isfinite()


def test_an_error_that_came_before_the_call_is_every_ranks_once(world):
    world.run(hears_before_its_call)


def orders(world):
    z, _, ids, _, _ = drawn((2, 3), torch.float64, 8)
    lo, hi = 4 * world.rank, 4 * world.rank + 4
    mine = z[..., lo:hi].transpose(0, 1).contiguous().transpose(0, 1)
    o = dict(tp_group=world, vocab=(lo, 8))
    for fn in (lambda z: ct.entropy(z, **o), lambda z: ct.logprob(z, ids[..., 0], **o),
               lambda z: ct.nll(z, ids[..., 0], reduction='none', **o),
               lambda z: ct.topk_logprob(z, 2, **o).logp, lambda z: ct.logprob_at(z, ids, **o),
               lambda z: ct.distill(z, z, **o).ce, lambda z: compat.vocab_parallel_entropy(z, tp_group=world)):
        want = fn(mine.contiguous())
        torch.testing.assert_close(fn(mine), want)
        with pytest.raises(cb.MismatchError, match='rank 1 has another config, dtype or order of rows'):
            fn(mine.contiguous() if world.rank else mine)
        torch.testing.assert_close(fn(mine), want)


WHOLE = {
    'nll': lambda z, t, g: ct.nll(z, t, tp_group=g),
    'logprob': lambda z, t, g: ct.logprob(z, t, tp_group=g, softcap=3.0, temperature=0.5),
    'entropy': lambda z, t, g: ct.entropy(z, tp_group=g),
    'topk_logprob': lambda z, t, g: ct.topk_logprob(z, 3, tp_group=g),
    'logprob_at': lambda z, t, g: ct.logprob_at(z, t[:, None], tp_group=g),
    'distill': lambda z, t, g: ct.distill(z, 2 * z, tp_group=g),
    'linear_nll': lambda z, t, g: linear_nll(z, z, target=t, tp_group=g),
    'linear_logprob': lambda z, t, g: linear_logprob(z, z, target=t, tp_group=g, chunk_size=2),
    'Megatron': lambda z, t, g: compat.vocab_parallel_cross_entropy(z, t, tp_group=g),
    'verl': lambda z, t, g: compat.linear_cross_entropy(z, z, t, 1.0, 'none', g),
    'sampling': lambda z, t, g: compat.from_parallel_logits_to_logprobs(
        z[None], t[None], 9 * g.rank, 9 * g.rank + 9, g, sampling_params=types.SimpleNamespace(top_k=4, top_p=None)),
}


@pytest.mark.parametrize('name', WHOLE)
def test_logits_that_every_rank_has_as_a_whole_are_refused(name, monkeypatch):
    """Each rank has all columns, and by default they are taken for shards: a loss that is off by the log of the ranks."""
    z = torch.randn(9, 9, generator=torch.Generator().manual_seed(4))
    t = torch.tensor([0, 3, 8, -100, 5, 3, 0, 1, 8] if name not in ('verl', 'logprob_at') else [0, 3, 8, 2, 5, 3, 0, 1, 8])

    def refused(world):
        with pytest.raises(cb.MismatchError, match='these are the same logits on 2 ranks; pass tp_group=None'):
            WHOLE[name](z, t, world)
    cb.run_threads(2, refused)
    if name not in ('entropy', 'topk_logprob', 'distill', 'sampling'):
        cb.run_threads(2, lambda world: WHOLE[name](z, t + 9 * (t == 8), world))  # made with one seed
    monkeypatch.setenv('COLO_CHECK', '0')
    cb.run_threads(2, lambda world: WHOLE[name](z, t, world))


LIKE_ITS_FIRST = {
    'backward': lambda x: (x, 1.0), 'divided': lambda x: (x / 4, 0.25), 'times': lambda x: (2 * x, 2.0), 'added': lambda x: (1 + x + x, 2.0),
    'a sum': lambda x: (sum([x, x]), 2.0), 'minus': lambda x: (1 - x, -1.0), 'negative': lambda x: (-x, -1.0),
    'added to a tensor': lambda x: (torch.ones(()) + x, 1.0), 'squared': lambda x: (x ** 2, 2 * float(x.detach())),
    'stacked': lambda x: (torch.stack([x, x]).mean(), 1.0), 'exp': lambda x: (torch.exp(x), float(x.detach().exp())),
    'a method': lambda x: (x.mean(), 1.0)}


@pytest.mark.parametrize('name', LIKE_ITS_FIRST)
@pytest.mark.parametrize('fn', (lambda z: ct.nll(z, torch.tensor([1, 2, 3, 4])),
                                lambda z: linear_nll(z, torch.eye(6, 8), target=torch.tensor([1, 2, 3, 4])),
                                lambda z: ct.weighted_sum((z * z).sum(-1))), ids=('nll', 'linear_nll', 'weighted_sum'))
def test_a_loss_is_its_scalar_where_tensors_are(fn, name):
    z = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    seen, want = z.clone().requires_grad_(), z.clone().requires_grad_()
    first = fn(want)[0]
    first.backward()
    value, times = LIKE_ITS_FIRST[name](fn(seen))
    value.backward()
    torch.testing.assert_close(seen.grad, times * want.grad, rtol=1e-6, atol=1e-7)


def test_a_loss_is_a_tuple_all_the_same():
    z = torch.randn(4, 8)
    loss = ct.nll(z, torch.tensor([1, 2, 3, 4]))
    assert isinstance(loss, tuple) and len(loss) == 3 and list(loss) == [loss.loss, loss.num, loss.den]
    assert loss.dtype == torch.float32 and loss.exp() == loss.loss.exp()  # den is no float
    assert int(loss) == int(loss.loss) and (loss // 1, loss % 1) == (loss.loss // 1, loss.loss % 1)
    assert loss.item() == float(loss) == float(loss[0]) and '%s %.2f' % (loss.shape, loss.item()) == f'torch.Size([]) {loss:.2f}'
    assert bool(loss > 0) and bool(loss <= 99) and not bool(loss < 0) and bool(loss >= 0) and bool(torch.isfinite(loss))
    assert abs(-loss) == loss.loss and not loss.requires_grad
    for again in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert type(again) is ct.Loss and list(again) == list(loss)
    with pytest.raises(AttributeError, match='foo'):
        loss.foo
    with pytest.raises(TypeError):
        loss + 'x'


def test_each_ranks_whole_vocabulary_is_said():
    z, t = torch.randn(4, 8), torch.tensor([1, 2, 3, 7])

    def rank(world):
        with pytest.raises(cb.MismatchError, match='each of 2 ranks holds all 8 columns; pass tp_group=None'):
            ct.nll(z + world.rank, t, tp_group=world, vocab=(0, None))
    cb.run_threads(2, rank)


def test_ranks_whose_rows_lie_in_other_orders_are_refused():
    cb.run_threads(2, orders)


def test_weighted_sum_and_gather_refuse_what_is_no_tensor():
    with pytest.raises(ValueError, match='weights is'):
        ct.weighted_sum(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match='floats'):
        ct.weighted_sum(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match='adjoint'):
        ct.Sequence(1, 3).gather(torch.ones(1, 3), 'mean')


@pytest.mark.parametrize('call, words', [
    (lambda z: ct.distill(z, z[:, :3]), 'targets are [2, 3] of torch.float32, expected floats of the logits\' shape [2, 8]'),
    (lambda z: ct.weighted_sum(z, mask=z[0]), 'mask is [8] on cpu, expected a tensor like values, [2, 8] on cpu'),
    (lambda z: ct.weighted_sum([1.]), 'values is a list, expected a torch.Tensor')])
def test_a_message_names_what_an_argument_is_compared_with(call, words):
    with pytest.raises(ValueError) as why:
        call(torch.zeros(2, 8))
    assert words in str(why.value)
