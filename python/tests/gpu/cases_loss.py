# SPDX-License-Identifier: Apache-2.0
"""Losses, from logits and from hidden states, and shards of sequences."""
import itertools
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import colobridge.torch as ct
from colobridge import Partition, compat

sys.path.append(str(Path(__file__).resolve().parents[1]))
from heads import linear_logprob, linear_nll  # noqa: E402
from common import CAPPED, H, V, Skip, cut, leaf, linear_case, logits_case, me, near, plain, size


def case_logprob_is_that_of_the_whole_vocabulary():
    lo, hi = cut(V)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        for options in ({}, {'softcap': 5.0, 'temperature': 0.7}):
            z, t, g = logits_case(dtype=dtype)
            whole = leaf(z.double())
            want = plain(whole, t, **options)
            (want[0] * g[0] + want[1] * g[1]).sum().backward()
            seen = []
            for _ in range(2):
                mine = leaf(z[:, lo:hi])
                logp, h = ct.logprob(mine, t, tp_group=dist.group.WORLD, vocab=(lo, V), entropy=True, **options)
                (logp.double() * g[0] + h.double() * g[1]).sum().backward()
                near(logp, want[0].detach(), min(bound, 1e-4), 'logp')
                near(h, want[1].detach(), min(bound, 1e-4), 'entropy')
                near(mine.grad, whole.grad[:, lo:hi], bound, 'd_logits')
                seen.append((logp.detach(), mine.grad))
            assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(seen, seen[1:]))


def case_outputs_and_temperatures_of_tokens():
    """logprob() and linear_logprob() return what a pass has seen anyway, of logits that each token's temperature divided."""
    lo, hi = cut(V)
    names = 'correct', 'argmax', 'lse', 'sum_p2', 'mean_logits'
    for (dtype, bound), softcap in itertools.product(((torch.float64, 1e-11), (torch.float32, 2e-4), (torch.bfloat16, 1e-2)), (None, 5.0)):
        z, t, g = logits_case(dtype=dtype)
        h, w, _ = linear_case(dtype=dtype)
        heat = torch.arange(len(t), device=z.device) % 5 / 2 + 0.5
        heat[t == -100] = float('nan')  # nobody reads it
        for of_hidden in (False, True):
            whole = [leaf(x.double()) for x in ((h, w) if of_hidden else (z,))]
            x = whole[0] @ whole[1].t() if of_hidden else whole[0]
            x = (x if softcap is None else softcap * torch.tanh(x / softcap)) / heat.double().nan_to_num(1.0).unsqueeze(-1)
            keep, lp = t != -100, torch.log_softmax(x, -1)
            want = dict(lse=x.logsumexp(-1), sum_p2=lp.exp().square().sum(-1), mean_logits=x.mean(-1))
            logp = lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            ((logp * g[0] + want['lse'] * g[1]) * keep).sum().backward()
            options = dict(outputs=names, temperature=heat)
            if of_hidden:
                mine = [leaf(h), leaf(w[lo:hi])]
                out = ct.linear_logprob(mine[0], ct.Head(mine[1], softcap=softcap, tp_group=dist.group.WORLD, vocab=(lo, V)), t, **options)
            else:
                mine = [leaf(z[:, lo:hi])]
                out = ct.logprob(mine[0], t, tp_group=dist.group.WORLD, vocab=(lo, V), softcap=softcap, **options)
            got = dict(zip(names, out[1:]))
            (out[0].double() * g[0] + got['lse'].double() * g[1]).sum().backward()
            near(out[0], torch.where(keep, logp, 0), min(bound, 2e-4), 'logp')
            for name, a in want.items():
                near(got[name], torch.where(keep, a, 0), min(bound, 2e-4), name)
            top = x.gather(-1, got['argmax'].clamp(min=0).unsqueeze(-1)).squeeze(-1)
            near(top[keep], x.max(-1).values[keep], 1e-5, 'logit of argmax')
            assert bool((got['argmax'][~keep] == -1).all()) and torch.equal(got['correct'], keep & (got['argmax'] == t))
            cuts = (slice(None), slice(lo, hi)) if of_hidden else ((slice(None), slice(lo, hi)),)
            for a, b, part in zip(mine, whole, cuts):
                near(a.grad, b.grad[part], bound, 'gradient')


def case_a_mean_is_divided_once_over_all_ranks():
    """Each rank has tokens of its own, and another number of them that count."""
    sides = [logits_case(seed=r) for r in range(size())]
    for r, (_, t, _) in enumerate(sides):
        t[:5 * r] = -100
    whole = [leaf(z.double()) for z, _, _ in sides]
    total = sum(torch.nn.functional.cross_entropy(x, t, reduction='sum') for x, (_, t, _) in zip(whole, sides))
    den = sum(int((t != -100).sum()) for _, t, _ in sides)
    d_total = torch.autograd.grad(total, whole[me()])[0]
    logits, t, _ = sides[me()]
    for reduction, over in (('mean', den), ('sum', 1)):
        z = leaf(logits)
        got = ct.nll(z, t, reduction=reduction, reduce_group=dist.group.WORLD)
        (got.loss * 3 + got.num.float() / 4).backward()
        near(got.loss, total.detach() / over, 1e-5, reduction)
        near(got.num, total.detach(), 1e-5, 'num of ' + reduction)
        assert got.den.dtype == torch.float64 and int(got.den) == den
        near(z.grad, d_total * (3 / over + 0.25), 1e-4, 'd_logits of ' + reduction)
    none = ct.nll(z, torch.full_like(t, -100), reduce_group=dist.group.WORLD)
    assert float(none.loss.detach()) == 0 and int(none.den) == 0


def case_class_weights_are_pytorch_s():
    """With smoothing and without; a rank gives the weights of all classes, or of its own."""
    lo, hi = cut(V)
    for (dtype, bound), smoothing, reduction in itertools.product(
            ((torch.float64, 1e-11), (torch.float32, 2e-4), (torch.bfloat16, 1e-2)), (0.0, 0.1), ('sum', 'mean', 'none')):
        z, t, g = logits_case(dtype=dtype)
        h, w, _ = linear_case(dtype=dtype)
        weights = torch.arange(V, device=z.device) % 7 / 4  # 0 to 1.5, exact
        options = {'reduction': reduction, 'label_smoothing': smoothing}
        g = g[0] if reduction == 'none' else 1
        whole = [leaf(x.double()) for x in (z, h, w)]
        want = torch.nn.functional.cross_entropy(whole[0], t, weights.double(), **options)
        want_linear = torch.nn.functional.cross_entropy(whole[1] @ whole[2].t(), t, weights.double(), **options)
        ((want + want_linear) * g).sum().backward()
        for given in (weights, weights[lo:hi]):
            mine = [leaf(x) for x in (z[:, lo:hi], h, w[lo:hi])]
            head = ct.Head(mine[2], tp_group=dist.group.WORLD, vocab=(lo, V))
            got = ct.cross_entropy(mine[0], t, given, tp_group=dist.group.WORLD, vocab=(lo, V), **options)
            got_linear = ct.linear_cross_entropy(mine[1], head, t, weight=given, **options)
            ((got.double() + got_linear.double()) * g).sum().backward()
            near(got, want, min(bound, 2e-4), 'loss')
            near(got_linear, want_linear, min(bound, 2e-4), 'loss of hidden')
            for one, other, name in zip(mine, (whole[0].grad[:, lo:hi], whole[1].grad, whole[2].grad[lo:hi]),
                                        ('d_logits', 'd_hidden', 'd_weight')):
                near(one.grad, other, 5 * bound, '%s of %s' % (name, dtype))


def case_sampling_parameters_keep_the_same_ids_on_all_ranks():
    lo, hi = cut(V)
    for dtype, (top_k, top_p) in ((d, k) for d in (torch.float64, torch.float32, torch.bfloat16)
                                  for k in ((None, 0.9), (20, 0.8), (300, 0.95))):
        z, t, g = logits_case(dtype=dtype)
        whole, mine = leaf(z.double()), leaf(z[None, :, lo:hi])
        order = whole.detach().sort(dim=-1, descending=True, stable=True)[1]
        p = whole.detach().gather(1, order[:, :top_k]).softmax(-1)
        last = (p.cumsum(-1) - p < top_p).sum(1, keepdim=True)
        lost = order.argsort(-1) >= last  # of the place of each id
        want = torch.log_softmax(whole.masked_fill(lost, -float('inf')), -1)
        want = want.gather(1, t.clamp(min=0)[:, None])[:, 0].masked_fill(t < 0, 0)[:-1]
        got = compat.from_parallel_logits_to_logprobs(
            mine, t[None], lo, hi, dist.group.WORLD, target_is_pre_rolled=True,
            sampling_params=types.SimpleNamespace(top_k=top_k, top_p=top_p))[0]
        assert torch.equal(got.isinf(), want.isinf()) and bool(want.isinf().any())
        kept = ~want.isinf() & (t[:-1] >= 0)
        near(got[kept], want[kept].detach(), 1e-4, ('logp', dtype, top_k, top_p))
        for value in (got, want):  # of all targets in the vocabulary, also of those that are not kept
            value.backward(g[0][:-1].masked_fill(t[:-1] < 0, 0).to(value.dtype))
        near(mine.grad[0], whole.grad[:, lo:hi], 1e-2 if dtype == torch.bfloat16 else 1e-4, (dtype, top_k, top_p))


def case_linear_is_the_product_and_its_loss():
    lo, hi = cut(V)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 5e-4), (torch.bfloat16, 3e-2)):
        h, w, t = linear_case(dtype=dtype)
        _, _, g = logits_case()
        for (mode, chunk), options in itertools.product(
                (('logprob', None), ('keep', None), ('auto', 32)), ({}, CAPPED)):
            x, y = leaf(h.double()), leaf(w.double())
            want = plain(x @ y.t(), t, **options)
            (want[0] * g[0] + want[1] * g[1]).sum().backward()
            a, b = leaf(h), leaf(w[lo:hi])
            out = linear_logprob(a, b, target=t, entropy=True, mode=mode, chunk_size=chunk, tp_group=dist.group.WORLD,
                                 vocab=(lo, V), **options)
            (out[0].double() * g[0] + out[1].double() * g[1]).sum().backward()
            for got, right, name in ((out[0], want[0].detach(), 'logp'), (a.grad, x.grad, 'd_hidden'),
                                     (b.grad, y.grad[lo:hi], 'd_weight')):
                near(got, right, bound, (name, mode, dtype))
        x, y = leaf(h.double()), leaf(w.double())
        mean = torch.nn.functional.cross_entropy(x @ y.t(), t)
        (mean * 3).backward()
        a, b = leaf(h), leaf(w[lo:hi])
        b.main_grad = torch.ones(b.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                                 device='cuda')
        loss = linear_nll(a, b, target=t, tp_group=dist.group.WORLD, vocab=(lo, V), main_grad=True)
        (loss.loss * 3).backward()
        near(loss.loss.detach(), mean.detach(), bound, 'loss')
        near(a.grad, x.grad, bound, 'd_hidden of the loss')
        near(b.main_grad - 1, y.grad[lo:hi], bound, 'main_grad')


def case_a_lora_is_that_of_the_weight_with_it():
    """Of ranks that do not divide 8, in every mode; with bf16 also factors in f32, as peft has them."""
    lo, hi = cut(V)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 5e-4), (torch.bfloat16, 3e-2)):
        for rank, mode, frozen in itertools.product((3, 16), ('loss', 'logprob', 'keep'), (False, True)):
            h, w, t = linear_case(dtype=dtype)
            of = torch.float32 if dtype == torch.bfloat16 and mode == 'logprob' else dtype
            rng = torch.Generator().manual_seed(3)
            f, g = ((torch.randn(*n, generator=rng, dtype=torch.float64) * 0.3).to(dtype).to(of).cuda() for n in ((rank, H), (V, rank)))
            x = [leaf(v.double()) for v in (h, w, f, g)]
            mean = torch.nn.functional.cross_entropy(x[0] @ (x[1] + 0.7 * x[3] @ x[2]).t(), t)
            (mean * 3).backward()
            a, b, c, d = leaf(h), w[lo:hi] if frozen else leaf(w[lo:hi]), leaf(f), leaf(g[lo:hi])
            head = ct.Head(b, tp_group=dist.group.WORLD, vocab=(lo, V), lora=(c, d, 0.7))
            loss = ct.linear_nll(a, head, t, mode=mode, chunk_size=40)
            (loss.loss * 3).backward()
            near(loss.loss.detach(), mean.detach(), bound, 'loss')
            for got, right, name in ((a, x[0].grad, 'd_hidden'), (b, x[1].grad[lo:hi], 'd_weight'), (c, x[2].grad, 'd_a'),
                                     (d, x[3].grad[lo:hi], 'd_b')):
                assert (got.grad is None) == (name == 'd_weight' and frozen)
                if got.grad is not None:
                    near(got.grad, right, bound, (name, mode, dtype, rank))


def divergence(kind, z, y, beta):
    """D of each token of logits in f64, from its definition"""
    lp, lq = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    p, q = lp.exp(), lq.exp()
    m = (beta * q + (1 - beta) * p).log()
    return {'forward_kl': lambda: (q * (lq - lp)).sum(-1), 'reverse_kl': lambda: (p * (lp - lq)).sum(-1),
            'jsd': lambda: (beta * q * (lq - m) + (1 - beta) * p * (lp - m)).sum(-1), 'tv': lambda: (p - q).abs().sum(-1) / 2,
            'acceptance': lambda: -torch.minimum(p, q).sum(-1).log()}[kind]()


def case_divergences_are_those_of_whole_vocabularies():
    lo, hi = cut(V)
    for (dtype, bound), kind in itertools.product(((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)),
                                                  ('forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance')):
        z, t, g = logits_case(dtype=dtype)
        y = logits_case(seed=3, dtype=dtype)[0]
        for temperature, mask in ((1.0, None), (0.7, t != -100)):
            x = leaf(z.double())
            want = divergence(kind, x / temperature, y.double() / 2, 0.3)
            want = want if mask is None else want.masked_fill(~mask, 0)
            (want * g[0]).sum().backward()
            mine = leaf(z[:, lo:hi])
            got = ct.distill(mine, y[:, lo:hi], kind=kind, beta=0.3, temperature=temperature, target_temperature=2.0, mask=mask,
                             reduction='none', tp_group=dist.group.WORLD, vocab=(lo, V))
            (got.double() * g[0]).sum().backward()
            near(got, want, min(bound, 1e-4), (kind, dtype))
            near(mine.grad, x.grad[:, lo:hi], bound, ('d_logits', kind, dtype))


def case_a_divergence_near_0_keeps_its_digits():
    lo, hi = cut(V)
    z = (logits_case()[0] * 2 ** 14).floor() / 2 ** 14
    for bits in (8, 12, 14):
        y = z + torch.randint(-8, 9, z.shape, generator=torch.Generator().manual_seed(bits)).cuda() / 2.0 ** (bits + 3)
        for kind in ('forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance'):
            want = divergence(kind, z.double(), y.double(), 0.3)
            got = ct.distill(z[:, lo:hi], y[:, lo:hi], kind=kind, beta=0.3, reduction='none', tp_group=dist.group.WORLD, vocab=(lo, V))
            off = float((got.double() / want - 1).abs().max())
            assert off < 2e-2, (kind, bits, off)  # log(p/q), some 2^-15 at least, is off by 1e-6 at most


def case_the_top_k_of_a_teacher():
    lo, hi = cut(V)
    for (dtype, bound), kind, tail in itertools.product(((torch.float64, 1e-11), (torch.float32, 2e-4), (torch.bfloat16, 1e-2)),
                                                        ('forward_kl', 'reverse_kl'), (True, False)):
        z, t, g = logits_case(dtype=dtype)
        y = logits_case(seed=3, dtype=dtype)[0]
        logp, ids = ct.topk_logprob(y[:, lo:hi], 20, tp_group=dist.group.WORLD, vocab=(lo, V))
        x = leaf(z.double())
        p = torch.softmax(x, -1)
        outcomes, q = p.gather(-1, ids), logp.double().exp()
        if tail:
            rest = torch.ones_like(p).scatter(-1, ids, 0.0)
            outcomes = torch.cat([outcomes, (p * rest).sum(-1, keepdim=True)], -1)
            q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
        a, b = (outcomes, q) if kind == 'reverse_kl' else (q, outcomes)
        want = (a * (a / b).log()).sum(-1)
        (want * g[0]).sum().backward()
        mine = leaf(z[:, lo:hi])
        got = ct.topk_distill(mine, ids, logp, kind=kind, tail=tail, reduction='none', tp_group=dist.group.WORLD, vocab=(lo, V))
        (got.double() * g[0]).sum().backward()
        near(got, want, min(bound, 2e-4), (kind, tail, dtype))
        near(mine.grad, x.grad[:, lo:hi], bound, ('d_logits', kind, tail, dtype))


def case_distillation_from_hidden_states():
    """Of a teacher of another width and softcap, and of a student with a LoRA; both modes, in chunks and at once"""
    lo, hi = cut(V)
    for (dtype, bound), mode, kind in itertools.product(((torch.float64, 1e-11), (torch.float32, 5e-4), (torch.bfloat16, 3e-2)),
                                                        ('loss', 'logprob'), ('forward_kl', 'reverse_kl', 'jsd', 'acceptance')):
        h, w, t = linear_case(dtype=dtype)
        rng = torch.Generator().manual_seed(8)
        th, tw, b, f, g = ((torch.randn(*n, generator=rng, dtype=torch.float64) * 0.2).to(dtype).cuda() for n in (
            (len(h), 24), (V, 24), (V,), (4, H), (V, 4)))
        x = [leaf(v.double()) for v in (h, w, b, f, g)]
        z, y = x[0] @ x[1].t() + x[2] + 0.5 * (x[0] @ x[3].t()) @ x[4].t(), th.double() @ tw.double().t()
        mask = t != -100
        want = divergence(kind, 6 * torch.tanh(z / 6), 3 * torch.tanh(y / 3), 0.3)[mask].mean()
        (want * 3).backward()
        for chunk in (None, 40):
            mine = [leaf(v) for v in (h, w[lo:hi], b[lo:hi], f, g[lo:hi])]
            head = ct.Head(mine[1], mine[2], softcap=6.0, lora=(mine[3], mine[4], 0.5), tp_group=dist.group.WORLD, vocab=(lo, V))
            loss = ct.linear_distill(mine[0], head, th, ct.Head(tw[lo:hi], softcap=3.0, vocab=(lo, V)), kind=kind, beta=0.3, mask=mask,
                                     mode=mode, chunk_size=chunk)
            (loss.loss * 3).backward()
            near(loss.loss, want, bound, (kind, mode, dtype))
            for got, whole, name in zip(mine, x, ('d_hidden', 'd_weight', 'd_bias', 'd_a', 'd_b')):
                near(got.grad, whole.grad if name in ('d_hidden', 'd_a') else whole.grad[lo:hi], bound, (name, kind, mode, dtype))


def case_groups_have_means_of_their_own():
    lo, hi = cut(V)
    h, w, t = linear_case()
    group, weights = torch.arange(len(t), device=h.device) % 3, [1.0, 0.3, -2.0, 5.0]  # the last has no token
    x, y = leaf(h.double()), leaf(w.double())
    each = torch.nn.functional.cross_entropy(x @ y.t(), t, reduction='none')
    means = torch.stack([each[(group == i) & (t != -100)].mean() for i in range(3)])
    (means * torch.tensor(weights[:3], device=h.device).double()).sum().backward()
    for mode in ('loss', 'logprob', 'logits'):
        a, b = leaf(h), leaf(w[lo:hi])
        options = dict(groups=group, group_weight=weights, tp_group=dist.group.WORLD)
        got = ct.nll(a @ b.t(), t, vocab=(lo, V), **options) if mode == 'logits' else ct.linear_nll(
            a, ct.Head(b, vocab=(lo, V)), t, mode=mode, **options)
        got.total.backward()
        near(got.loss.detach()[:3], means.detach(), 5e-4, ('loss', mode))
        assert got.loss[3] == 0 and got.den.tolist()[3] == 0
        near(b.grad, y.grad[lo:hi], 5e-4, ('d_weight', mode))
        if mode != 'logits':  # whose d_hidden is this rank's part
            near(a.grad, x.grad, 5e-4, ('d_hidden', mode))


def case_a_loss_scale_multiplies_in_fp32():
    """As test_torch_upstream.py, which derives the bounds; d_hidden has a rounding more for each rank."""
    lo, hi = cut(V)
    for dtype, unit in ((torch.float16, 2.0 ** -11), (torch.bfloat16, 2.0 ** -8)):
        h, w, t = linear_case(tokens=384, dtype=dtype)
        x, y = leaf(h.double()), leaf(w.double())
        for scale, mode in ((s, m) for s in (65536.0, torch.tensor(1 / 3).item()) for m in ('loss', 'auto')):
            x.grad = y.grad = None
            (torch.nn.functional.cross_entropy(x @ y.t(), t) * scale).backward()
            a, b = leaf(h), leaf(w[lo:hi])
            (linear_nll(a, b, target=t, mode=mode, tp_group=dist.group.WORLD, vocab=(lo, V)).loss * scale).backward()
            for got, right, name in ((a.grad, x.grad, 'd_hidden'), (b.grad, y.grad[lo:hi], 'd_weight')):
                got, most, what = got.double(), (3 + size()) * unit, (name, mode, scale, dtype)
                assert got.isfinite().all() and float((got - right).norm()) <= most * float(right.norm()), what
                bias = float((got * right).sum() / (right * right).sum()) - 1
                assert abs(bias) <= most / len(t) ** 0.5, (what, bias)


def case_gradients_of_an_upstream_gradient_that_does_not_come_are_nan():
    lo, hi = cut(V)
    h, w, t = linear_case()
    x, y = leaf(h.double()), leaf(w.double())
    (torch.nn.functional.cross_entropy(x @ y.t(), t, reduction='sum') / 4).backward()
    for known in (0.25, torch.tensor([0.25], device='cuda')):
        for comes, frozen in ((0.25, False), (0.5, False), (0.25, True), (-0.25, True)):
            a, b = (h if frozen else leaf(h)), leaf(w[lo:hi])
            b.main_grad = torch.zeros(b.shape, device='cuda')
            loss = linear_nll(a, b, target=t, tp_group=dist.group.WORLD, vocab=(lo, V),
                              reduction='sum', main_grad=True, upstream=known).loss
            near(b.main_grad, y.grad[lo:hi], 5e-4, 'main_grad after forward')
            (loss * comes).backward()
            if comes == 0.25:
                near(b.main_grad, y.grad[lo:hi], 5e-4, 'main_grad after backward')
                assert frozen or near(a.grad, x.grad, 5e-4, 'd_hidden') is None
            else:
                assert (b.main_grad[:1] if frozen else a.grad).isnan().all(), (known, comes, frozen)


def case_a_float_mask_weighs_tokens():
    lo, hi = cut(V)
    h, w, t = linear_case()
    mask = torch.arange(len(t), device=h.device) % 5 / 4  # 0 to 1
    x, y = leaf(h.double()), leaf(w.double())
    each = torch.nn.functional.cross_entropy(x @ y.t(), t, reduction='none')
    den = torch.where(t != -100, mask.double(), 0.0).sum()
    ((each * mask).sum() / den).backward()
    args = {'target': t, 'mask': mask, 'tp_group': dist.group.WORLD, 'vocab': (lo, V)}
    for mode in ('loss', 'auto'):
        a, b = leaf(h), leaf(w[lo:hi])
        got = linear_nll(a, b, mode=mode, **args)
        got.loss.backward()
        near(got.den.detach(), den, 1e-12, 'den')
        near(got.num.detach(), (each * mask).sum().detach(), 5e-4, 'num')
        near(a.grad, x.grad, 5e-4, 'd_hidden')
        near(b.grad, y.grad[lo:hi], 5e-4, 'd_weight')
    try:
        ct.linear_nll(h, w, target=t, mask=mask.masked_fill(mask == 1, float('nan')))
    except ValueError as why:
        assert 'mask: found nan at [4]' in str(why), why
    else:
        raise AssertionError('a weight that is NaN was taken')


def case_checkpointed_runs_give_the_same_bits():
    lo, hi = cut(V)
    h, w, t = linear_case()

    def run(x, y):
        z = torch.nn.functional.linear(x.tanh(), y)
        a = ct.logprob(z, t, tp_group=dist.group.WORLD, vocab=(lo, V))
        return a + linear_logprob(x.tanh(), y, target=t, tp_group=dist.group.WORLD, vocab=(lo, V))

    seen = []
    for way in (run, lambda x, y: checkpoint(run, x, y, use_reentrant=False)):
        x, y = leaf(h), leaf(w[lo:hi])
        way(x, y).sum().backward()
        seen.append((x.grad, y.grad))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


def case_compiled_code_goes_around_it():
    lo, hi = cut(V)
    h, w, t = linear_case()

    def step(x, y):
        z = torch.nn.functional.linear(torch.tanh(x) * 2, y)
        loss = ct.nll(z, t, tp_group=dist.group.WORLD, vocab=(lo, V)).loss
        return loss * 2 + linear_nll(torch.tanh(x), y, target=t, tp_group=dist.group.WORLD, vocab=(lo, V)).loss

    seen = []
    for run in (step, torch.compile(step)):
        x, y = leaf(h), leaf(w[lo:hi])
        run(x, y).backward()
        seen.append((x.grad, y.grad))
    for a, b in zip(*seen):
        near(b, a, 1e-4, 'compiled')


def case_autocast_casts_linear_and_leaves_the_rest():
    h, w, t = linear_case()
    with torch.autocast('cuda', dtype=torch.bfloat16):
        out = ct.linear_logprob(leaf(h), leaf(w), target=t)
        z = torch.nn.functional.linear(h, w)
        assert z.dtype == torch.bfloat16 and ct.logprob(z, t).dtype == torch.float32
    assert torch.equal(out, ct.linear_logprob(h.bfloat16(), w.bfloat16(), target=t))


def case_fsdp2_trunk_and_sharded_head():
    if size() == 1:
        raise Skip('needs two GPUs')
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh('cuda', (size(),))
    torch.manual_seed(3)
    trunk = torch.nn.Linear(H, H).cuda()
    first = [p.detach().clone() for p in trunk.parameters()]
    sides = [linear_case(seed=r) for r in range(size())]
    w = sides[0][1]
    # the whole: every rank's tokens, the loss of rank r counted once
    whole_w, whole_h = leaf(w), [leaf(p) for p in first]
    mean = sum(torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(s[0], whole_h[0], whole_h[1]) @ whole_w.t(), s[2], reduction='sum')
        for s in sides) / (size() * int((sides[0][2] != -100).sum()))
    mean.backward()
    fully_shard(trunk, mesh=mesh)
    trunk.set_gradient_divide_factor(1.0) if hasattr(trunk, 'set_gradient_divide_factor') else None
    head = torch.nn.Parameter(distribute_tensor(w.clone(), mesh, [Shard(0)]))
    h, _, t = sides[me()]
    for mode in ('loss', 'logprob'):
        trunk.zero_grad()
        head.grad = None
        loss = ct.linear_nll(trunk(h), head, target=t, reduce_group=dist.group.WORLD, mode=mode).loss
        loss.backward()
        near(loss.detach(), mean.detach(), 1e-4, 'loss')
        near(head.grad.full_tensor(), whole_w.grad, 1e-4, 'd_head')
        if hasattr(trunk, 'set_gradient_divide_factor'):
            near(trunk.weight.grad.full_tensor(), whole_h[0].grad, 1e-4, 'd_trunk')
    assert head.grad.to_local().shape[0] == max(0, cut(V)[1] - cut(V)[0])


# ---- shards ----

def case_shards_are_the_host_s():
    segments = [0, 8, 8, 24, 64]
    for cu in (None, segments):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            part = Partition(64, cp=4, cp_rank=1, cu_padded=cu)
            whole = torch.randint(0, 100, (3, 64, 5), dtype=dtype)
            for axes in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
                x = whole.permute(axes)
                axis = axes.index(1)
                local = ct.shard(x.cuda(), part, axis)
                assert torch.equal(local.cpu(), ct.shard(x, part, axis))
                assert torch.equal(ct.unshard(local, part, axis).cpu(),
                                   ct.unshard(local.cpu(), part, axis))
        tokens = torch.arange(3 * 64).reshape(3, 64)
        there = tokens.cuda()
        want = ct.next_token(tokens, part)
        assert torch.equal(ct.next_token(there, part).cpu(), want)
        part.next_token(there, there)
        assert torch.equal(there.cpu(), want)
    for bad in (lambda: part.shard(whole.cuda(), 1, whole[:, :16]),
                lambda: part.next_token(tokens, there)):
        try:
            bad()
        except ValueError as why:
            assert 'memory kind' in str(why), why
        else:
            raise AssertionError('two memories were taken')
