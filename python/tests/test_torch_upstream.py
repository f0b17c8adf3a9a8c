# SPDX-License-Identifier: Apache-2.0
"""The upstream gradient of a loss, one number, and 1 / N multiply in fp32 whatever the dtype of the gradients:
GradScaler's 65,536 does not overflow, a small mean does not underflow, and no factor is rounded to 16 bits. Where it
is known before forward, gradients are made with it."""
import functools
import itertools
import math

import pytest

torch = pytest.importorskip('torch')
import torch.distributed as dist  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402
from heads import linear_nll  # noqa: E402
from linear_case import V as WORDS, case, leaf, near  # noqa: E402

# Half the distance of two neighbours, relative: what one rounding may change.
FP32 = 2.0 ** -21  # what logits of size 8 and statistics lose in fp32
UNIT = {torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8, torch.float32: 2.0 ** -24}
T, H, V = 256, 32, 256


def linear(mode, **options):
    return lambda h, w, t, reduction: linear_nll(h, w, target=t, mode=mode, reduction=reduction,
                                                    **options).loss


def chunked(h, w, t, reduction):
    return compat.chunked_cross_entropy_loss(h[None], w, 64, shift_labels=t[None],
                                             num_items_in_batch=None if reduction == 'mean' else 1)[0]


HEADS = {'auto': linear('auto'), 'logprob': linear('logprob'), 'loss': linear('loss'), 'main_grad': linear('loss', main_grad=True), 'compat': chunked}
# fp32 numbers, as a loss scale is; most are none of bf16's.
SCALES = [(reduction, torch.tensor(scale).item()) for reduction, scale in
          (('mean', 65536.0), ('mean', 1 / 3), ('mean', 1000.37), ('sum', 1 / 3), ('sum', 0.00137))]


def drawn(dtype, tokens, columns, seed=0):
    """hidden, weight, targets: logits of which some are near 1 and most are small"""
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, H, generator=rng).to(dtype)
    w = (torch.randn(columns, H, generator=rng) * 0.5).to(dtype)
    return h, w, torch.randint(0, columns, (tokens,), generator=rng)


def gradients(head, h, w, t, scale, reduction):
    """those of hidden and weight, as fp64"""
    h, w = (x.clone().requires_grad_() for x in (h, w))
    w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    (HEADS[head](h, w, t, reduction) * scale).backward()
    return [x.double() for x in (h.grad, w.main_grad if w.grad is None else w.grad)]


def true_gradients(h, w, t, scale, reduction):
    leaves = h.double().requires_grad_(), w.double().requires_grad_()
    (F.cross_entropy(leaves[0] @ leaves[1].t(), t, reduction=reduction) * scale).backward()
    return [x.grad for x in leaves]


@functools.cache
def many(dtype):
    """hidden, weight, targets of many tokens, and the true gradients of their mean, which all heads share"""
    h, w, t = drawn(dtype, 4096, 2048, seed=2)
    h, w = h * 0.3, w * 0.6
    return h, w, t, true_gradients(h, w, t, 1.0, 'mean')


@pytest.mark.parametrize('dtype', UNIT, ids=str)
@pytest.mark.parametrize('head', HEADS)
def test_an_upstream_gradient_multiplies_in_fp32(head, dtype):
    h, w, t = drawn(dtype, T, V)
    for reduction, scale in SCALES:
        want = true_gradients(h, w, t, scale, reduction)
        for name, got, true in zip(('d_hidden', 'd_weight'), gradients(head, h, w, t, scale, reduction), want):
            what = head, dtype, reduction, scale, name
            assert float(true.abs().max()) < 65504 and got.isfinite().all(), what
            # d_logits are rounded once, sums once, and the product once
            assert float((got - true).norm() / true.norm()) <= 3 * UNIT[dtype] + FP32, what
            # A factor that is rounded moves all elements alike. Roundings of single elements do not: their
            # mean over n of them is smaller by sqrt(n). d_logits of T tokens are the fewest.
            off = float((got * true).sum() / (true * true).sum()) - 1
            assert abs(off) <= (3 * UNIT[dtype] + FP32) / math.sqrt(T), (what, off)


@pytest.mark.parametrize('dtype', UNIT, ids=str)
def test_an_upstream_gradient_of_a_loss_of_logits_multiplies_in_fp32(dtype):
    h, w, t = drawn(dtype, T, V, seed=1)
    z = (h.double() @ w.double().t()).to(dtype)
    for reduction, scale in SCALES:
        x = z.double().requires_grad_()
        (F.cross_entropy(x, t, reduction=reduction) * scale).backward()
        leaf = z.clone().requires_grad_()
        (ct.nll(leaf, t, reduction=reduction).loss * scale).backward()
        # Below 2^-14 fp16 has steps of 2^-24. fp32 arithmetic: 2^-20 of each element.
        bound = x.grad.abs() * (UNIT[dtype] + 2.0 ** -20) + 2.0 ** -25
        assert ((leaf.grad.double() - x.grad).abs() <= bound).all(), (dtype, reduction, scale)


@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize('head', HEADS)
def test_a_mean_over_many_tokens_does_not_underflow(head, dtype):
    h, w, t, unscaled = many(dtype)
    for scale in (1024.0, 1.0):
        want = [x * scale for x in unscaled]  # exact: a power of two
        got = gradients(head, h, w, t, scale, 'mean')
        for name, found, true in zip(('d_hidden', 'd_weight'), got, want):
            # What fp16 cannot hold of the gradient itself, 2^-25 an element, is not the library's doing.
            coarse = 2.0 ** -25 * math.sqrt(true.numel()) if dtype == torch.float16 else 0
            assert float((found - true).norm()) <= 3 * UNIT[dtype] * float(true.norm()) + coarse, \
                (head, dtype, scale, name)
        # Over the vocabulary d_logits add up to 0, and so do the rows of d_weight: what is left is roundings,
        # of d_logits and of d_weight.
        left = float(got[1].sum(0).norm())
        assert left <= 3 * UNIT[dtype] * float(want[1].norm()) + coarse, (head, dtype, scale, left)


@pytest.mark.parametrize('head', ('loss', 'compat'))
def test_a_mean_that_fp16_holds_may_have_a_sum_that_it_does_not(head):
    h, w, _ = drawn(torch.float16, 4096, 8, seed=3)
    h, t = h.abs() + 30, torch.zeros(4096, dtype=torch.int64)
    want = true_gradients(h, w * 0.01, t, 1.0, 'mean')
    assert float(want[1].abs().max()) * 4096 > 65504
    for found, true in zip(gradients(head, h, w * 0.01, t, 1.0, 'mean'), want):
        assert float((found - true).norm()) <= 3 * UNIT[torch.float16] * float(true.norm()) + \
            2.0 ** -25 * math.sqrt(true.numel())


# ---- an upstream gradient that is known before forward ----

UP = 0.37 / 3


def batches(dtype, count=2):
    """hidden, targets and weights of tokens of so many microbatches; weight, bias of the first"""
    made = [case((3, 5), dtype, seed) for seed in range(count)]
    weights = (torch.arange(15.0).view(3, 5) / 7 % 1).to(dtype if dtype == torch.float64 else torch.float32)
    return [(h, t, weights) for h, _, _, t, _ in made], *made[0][1:3]


def oracle(parts, w, b, upstream):
    """(sums of the losses, gradients of hidden, weight, bias) in fp64, times @upstream"""
    hidden, w, b = [leaf(h.double()) for h, _, _ in parts], leaf(w.double()), leaf(b.double())
    sums = [(F.cross_entropy((x @ w.t() + b).view(-1, WORDS), t.view(-1), reduction='none') *
             (1 if m is None else m.double().view(-1))).sum() for x, (_, t, m) in zip(hidden, parts)]
    (sum(sums) * upstream).backward()
    return [s.detach() for s in sums], [x.grad for x in hidden], w.grad, b.grad


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_known_upstream_gradient_is_in_main_grad_after_forward(dtype):
    for weighs, chunk, tensor in itertools.product((False, True), (None, 4), (False, True)):
        parts, w, b = batches(dtype)
        parts = [(h, t, m if weighs else None) for h, t, m in parts]
        sums, d_hidden, d_w, d_b = oracle(parts, w, b, UP)
        y, z = leaf(w), leaf(b)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y.main_grad, z.main_grad = torch.ones(w.shape, dtype=wide), torch.full(b.shape, 2.0, dtype=wide)
        for (h, t, m), total, true in zip(parts, sums, d_hidden):
            x, u = leaf(h), leaf(h)
            got = linear_nll(x, y, z, target=t, mask=m, reduction='sum', chunk_size=chunk, main_grad=True,
                                upstream=torch.tensor(UP, dtype=torch.float64) if tensor else UP)
            held = y.main_grad.clone()
            (got.loss * 0.37 / 3).backward()  # two roundings, of upstream one
            near(x.grad, true, dtype, 'd_hidden')
            assert x.grad.dtype == dtype and torch.equal(y.main_grad, held)  # backward added nothing
            near(got.num, total, dtype, 'num')
            same = linear_nll(u, w, b, target=t, mask=m, reduction='sum', chunk_size=chunk)
            assert torch.equal(same.loss, got.loss) and torch.equal(same.den, got.den)
            (same.loss * UP).backward()
            near(x.grad, u.grad.double(), dtype, 'of mode loss')
        near(y.main_grad.double() - 1, d_w, dtype, 'main_grad')
        near(z.main_grad.double() - 2, d_b, dtype, 'main_grad of the bias')
        assert y.grad is None and z.grad is None


def test_a_known_upstream_gradient_without_main_grad_is_in_grad():
    parts, w, b = batches(torch.bfloat16, 1)
    _, d_hidden, d_w, d_b = oracle(parts, w, b, UP)
    leaves, (h, t, m) = [leaf(x) for x in (parts[0][0], w, b)], parts[0]
    (linear_nll(*leaves, target=t, mask=m, reduction='sum', upstream=UP).loss * UP).backward()
    for got, want in zip(leaves, (d_hidden[0], d_w, d_b)):
        assert got.grad.dtype == torch.bfloat16
        near(got.grad, want, torch.bfloat16, 'gradient')
    with torch.autocast('cpu', dtype=torch.bfloat16):
        x, y, z = (leaf(v.float()) for v in (h, w, b))
        y.main_grad, z.main_grad = torch.zeros(w.shape), torch.zeros(b.shape)
        loss = linear_nll(x, y, z, target=t, mask=m, reduction='sum', upstream=UP, main_grad=True).loss
    (loss * UP).backward()
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, leaves[0].grad.float())
    near(y.main_grad, d_w, torch.bfloat16, 'main_grad of a weight that autocast casts')


def trained(x, y, z, t, upstream=UP, comes=UP, **options):
    """after a forward and backward: gradients of x, y.main_grad, z.main_grad"""
    for p in (y, z):
        p.main_grad = torch.zeros(p.shape, dtype=torch.float64)
    loss = linear_nll(x, y, z, target=t, reduction='sum', main_grad=True, upstream=upstream, **options).loss
    (loss * comes).backward()
    return x.grad, y.main_grad, z.main_grad


def test_what_is_frozen_has_no_gradient_where_it_is_known():
    parts, w, b = batches(torch.float64, 1)
    (h, t, _), = parts
    _, d_hidden, d_w, d_b = oracle([(h, t, None)], w, b, UP)
    for on in itertools.product((False, True), repeat=2):
        x, y, z = (p.clone().requires_grad_(trains) for p, trains in zip((h, w, b), (*on, on[1])))
        if not any(on):
            linear_nll(x, y, z, target=t, reduction='sum', upstream=UP)
            continue
        got = trained(x, y, z, t)
        assert (got[0] is None) != on[0]
        for have, want, trains in zip(got, (d_hidden[0], d_w, d_b), (*on, on[1])):
            if have is not None:
                near(have, want * trains, torch.float64, on)
    with torch.no_grad():
        y = leaf(w)
        y.main_grad = torch.zeros_like(w)
        quiet = linear_nll(leaf(h), y, target=t, reduction='sum', upstream=UP, main_grad=True)
    assert not quiet.loss.requires_grad and not y.main_grad.any()


def test_another_upstream_gradient_than_the_known_one_is_refused():
    parts, w, b = batches(torch.float64, 1)
    h, t, _ = parts[0]
    with pytest.raises(ValueError, match='backward found 0.5 as the gradient of the loss, expected 0.25, with'):
        trained(leaf(h), leaf(w), leaf(b), t, upstream=0.25, comes=0.5)
    for wrong in (0.0, -0.25, float('nan'), 0.25 * (1 + 2.0 ** -19)):
        with pytest.raises(ValueError, match='expected 0.25, with'):
            trained(leaf(h), leaf(w), leaf(b), t, upstream=0.25, comes=wrong)
    trained(leaf(h), leaf(w), leaf(b), t, upstream=0.25, comes=0.25 * (1 + 2.0 ** -21))
    trained(leaf(h), leaf(w), leaf(b), t, upstream=0.0, comes=0.0)
    x = leaf(h)
    loss = linear_nll(x, w, target=t, reduction='sum', upstream=1.0).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='a second backward'):
        loss.backward()


@pytest.mark.parametrize('change, words', [
    ({'reduction': 'mean'}, "reduction 'mean', expected 'loss' and 'sum'; what a mean divides by is known after"),
    ({'mode': 'logprob'}, "mode is 'logprob' and reduction 'sum', expected 'loss' and 'sum'; other modes take any"),
    ({'mode': 'auto', 'reduction': 'none'}, "mode is 'auto' and reduction 'none'"),
    ({'upstream': float('inf')}, 'upstream is inf, expected a finite number'),
    ({'upstream': torch.ones(2)}, r'upstream is \[2\] on cpu, expected one element on cpu'),
])
def test_upstream_gradients_that_nothing_knows_are_refused(change, words):
    h, w, _, t, _ = case()
    with pytest.raises(ValueError, match=words):
        linear_nll(leaf(h), leaf(w), **dict({'target': t, 'reduction': 'sum', 'upstream': UP}, **change))


@pytest.mark.parametrize('reentrant', [True, False])
def test_a_checkpoint_that_would_add_twice_is_refused(reentrant):
    (h, t, _), = batches(torch.float64, 1)[0]
    _, w, b, _, _ = case()
    _, d_hidden, d_w, _ = oracle([(h, t, None)], w, b, UP)
    x, y, z, factor = leaf(h), leaf(w), leaf(b), torch.tensor(UP, requires_grad=True)
    y.main_grad, z.main_grad = torch.zeros_like(w), torch.zeros_like(b)

    def run(x):  # what comes after it saves tensors, too
        return factor * linear_nll(x * 1, y, z, target=t, reduction='sum', main_grad=True, upstream=UP).loss
    out = checkpoint(run, x, use_reentrant=reentrant)
    if not reentrant:
        with pytest.raises(RuntimeError, match='a checkpoint ran forward twice, and main_grad has the gradient twice'):
            out.backward()
        return
    out.backward()
    near(x.grad, d_hidden[0], torch.float64, 'd_hidden')
    near(y.main_grad, d_w, torch.float64, 'main_grad')


def on_ranks(rank):
    """dp 2 x tp 2, then a head that is sharded over all four; microbatches differ over dp"""
    pairs = [dist.new_group(r) for r in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]
    tp_group, dp_group = pairs[0][rank // 2], pairs[1][rank % 2]
    parts, w, b = batches(torch.float64)
    sums, d_hidden, d_w, d_b = oracle(parts, w, b, UP)
    h, t, m = parts[rank // 2]
    lo, hi = ((0, 9), (9, WORDS))[rank % 2]
    for how, chunk in itertools.product(('all_reduce', 'partial', 'reduce_scatter'), (None, 4)):
        mine, scatters = slice(None), how == 'reduce_scatter'
        if scatters:  # of two ranks' slices of the first axis
            h, t, m = (torch.cat((v, v[:1])) for v in parts[rank // 2])
            t[3:] = -100
            mine = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        x, y, z = leaf(h[mine]), leaf(w[lo:hi]), leaf(b[lo:hi])
        got = trained(x, y, z, t, mask=m, tp_group=tp_group, vocab=(lo, WORDS), d_hidden=how,
                      chunk_size=chunk, reduce_group=dp_group)
        d_x = got[0].clone()
        if how == 'partial':
            dist.all_reduce(d_x, group=tp_group)
        want = torch.cat((d_hidden[rank // 2], torch.zeros(1, *h.shape[1:], dtype=torch.float64)))
        near(d_x, want[mine] if scatters else want[:3], torch.float64, how)
        for grad, true in zip(got[1:], (d_w, d_b)):
            dist.all_reduce(grad, group=dp_group)
            near(grad, true[lo:hi], torch.float64, how)
        h, t, m = parts[rank // 2]
    each = -(-WORDS // 4)
    x, y = leaf(h), leaf(w[rank * each:(rank + 1) * each])
    z = leaf(b[rank * each:(rank + 1) * each])
    got = trained(x, y, z, t, mask=m, shard_group=dist.group.WORLD, rows=WORDS)
    near(got[0], d_hidden[rank // 2], torch.float64, 'sharded')
    for grad, true in zip(got[1:], (d_w, d_b)):  # every part of two ranks
        near(grad, 2 * true[rank * each:(rank + 1) * each], torch.float64, 'sharded')


def test_known_upstream_gradients_over_ranks_and_sharded_heads(world):
    world.run(on_ranks)


def refused(rank, options, comes):
    h, w, b, t, _ = case()
    if rank != 2:
        options, comes = {}, UP
    try:
        for _ in range(2):  # what one rank finds in backward, the others hear in their next call
            trained(leaf(h), leaf(w + rank), leaf(b), t, comes=comes, tp_group=dist.group.WORLD, vocab=(rank * WORDS, 4 * WORDS), **options)
    except Exception as why:
        return type(why).__name__, str(why)


@pytest.mark.parametrize('options, comes, words', [
    ({'mode': 'logprob'}, UP, "mode is 'logprob'"), ({'upstream': float('nan')}, UP, 'upstream is nan'),
    ({}, 0.5, 'backward found 0.5 as the gradient')])
def test_what_one_rank_knows_wrong_reaches_all(world, options, comes, words):
    said = world.run(refused, options, comes)
    assert said[2][0] == 'ArgumentError' and all(words in told for _, told in said), said
    assert all(kind == 'FailedError' for rank, (kind, _) in enumerate(said) if rank != 2)
    assert world.run(refused, {}, UP) == [None] * 4  # and the next call works
