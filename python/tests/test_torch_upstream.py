# SPDX-License-Identifier: Apache-2.0
"""The upstream gradient of a loss, one number, and 1 / N multiply in fp32 whatever the dtype of the gradients:
GradScaler's 65,536 does not overflow, a small mean does not underflow, and no factor is rounded to 16 bits."""
import math

import pytest

torch = pytest.importorskip('torch')
from torch.nn import functional as F  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402

# Half the distance of two neighbours, relative: what one rounding may change.
FP32 = 2.0 ** -21  # what logits of size 8 and statistics lose in fp32
UNIT = {torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8, torch.float32: 2.0 ** -24}
T, H, V = 256, 32, 256


def linear(mode, **options):
    return lambda h, w, t, reduction: ct.linear_nll(h, w, target=t, mode=mode, reduction=reduction,
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
    h, w, t = drawn(dtype, 4096, 2048, seed=2)
    h, w = h * 0.3, w * 0.6
    for scale in (1024.0, 1.0):
        want = true_gradients(h, w, t, scale, 'mean')
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
