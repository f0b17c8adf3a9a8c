# SPDX-License-Identifier: Apache-2.0
"""colobridge.compat's LigerCrossEntropyLoss and LigerFusedLinearCrossEntropyLoss against PyTorch in fp64."""
import pytest

torch = pytest.importorskip('torch')

from torch.nn import functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
from colobridge import compat  # noqa: E402

T, V, H = 9, 12, 5
# sums of 12 terms below 30 in f32
NEAR = dict(rtol=1e-5, atol=1e-5)


def case(seed=0):
    rng = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*n, generator=rng) for n in ((T, H), (V, H), (V,)))
    t = torch.randint(0, V, (T,), generator=rng)
    t[2] = -100
    return h, w, b, t


def wanted(z, t, weight, z_scale, smoothing, reduction, softcap):
    """loss with the z-loss, z-loss, accuracy, predictions"""
    x = softcap * torch.tanh(z / softcap) if softcap else z
    keep = t != -100
    loss = F.cross_entropy(x, t, weight, label_smoothing=smoothing, reduction=reduction)
    z_loss = torch.where(keep, z_scale * x.logsumexp(-1).square(), torch.zeros(()).double())
    right = (x.argmax(-1) == t).double()
    if reduction != 'none':
        z_loss, right = z_loss.sum(), right.sum() / keep.sum()
        z_loss = z_loss / keep.sum() if reduction == 'mean' else z_loss
    return loss + z_loss, z_loss, right, torch.where(keep, x.argmax(-1), torch.tensor(-1))


@pytest.mark.parametrize('size', (1, 3))
@pytest.mark.parametrize('weighs', (False, True))
@pytest.mark.parametrize('reduction', ('mean', 'sum', 'none'))
@pytest.mark.parametrize('z_scale, smoothing, softcap', ((0.0, 0.0, None), (1e-2, 0.1, None), (1e-2, 0.0, 4.0)))
def test_losses_and_what_they_return_besides(size, weighs, reduction, z_scale, smoothing, softcap):
    h, w, b, t = case()
    weight = torch.linspace(0.5, 2, V) if weighs else None
    whole = [x.double().clone().requires_grad_() for x in (h, w, b)]
    z = whole[0] @ whole[1].T + whole[2]
    z.retain_grad()
    want = wanted(z, t, None if weight is None else weight.double(), z_scale, smoothing, reduction, softcap)
    want[0].sum().backward()
    options = dict(lse_square_scale=z_scale, label_smoothing=smoothing, reduction=reduction, softcap=softcap)

    def compared(out):
        torch.testing.assert_close(out.loss.double(), want[0].detach(), **NEAR)
        assert out.loss.dtype == torch.float32 and not out.z_loss.requires_grad
        for got, of in zip((out.z_loss, out.token_accuracy), want[1:3]):
            torch.testing.assert_close(got.double(), of.detach(), **NEAR)
        assert torch.equal(out.predicted_tokens, want[3])
        return out.loss.sum()

    def of(world):
        each = V // world.size
        rows = slice(world.rank * each, (world.rank + 1) * each)
        mine = z.detach()[:, rows].float().requires_grad_()
        plain = compat.LigerCrossEntropyLoss(weight, **options, tp_group=world)
        torch.testing.assert_close(plain(mine, t).double(), want[0].detach(), **NEAR)
        all_of = compat.LigerCrossEntropyLoss(weight, **options, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
                                              tp_group=world)
        compared(all_of(mine, t)).backward()
        torch.testing.assert_close(mine.grad.double(), z.grad[:, rows], **NEAR)
        leaves = [x.clone().requires_grad_() for x in (w[rows], h, b[rows])]
        torch.testing.assert_close(compat.LigerFusedLinearCrossEntropyLoss(weight, **options, tp_group=world)(
            leaves[0], leaves[1], t, leaves[2]).double(), want[0].detach(), **NEAR)
        all_of = compat.LigerFusedLinearCrossEntropyLoss(
            weight, **options, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, tp_group=world)
        compared(all_of(leaves[0], leaves[1], t, leaves[2])).backward()
        for got, d in zip(leaves, (whole[1].grad[rows], whole[0].grad, whole[2].grad[rows])):
            torch.testing.assert_close(got.grad.double(), d, rtol=1e-4, atol=1e-4)
    cb.run_threads(size, of)


@pytest.mark.parametrize('size', (1, 2))
@pytest.mark.parametrize('reduction', ('mean', 'sum', 'none'))
def test_tokens_are_scaled_by_the_probability_of_their_targets(size, reduction):
    """Its factor has no gradient, and a mean divides by the tokens, or by the weights of their classes"""
    h, w, b, t = case(3)
    for weight, z_scale, smoothing, softcap in ((None, 0.0, 0.0, None), (torch.linspace(0.5, 2, V), 1e-2, 0.1, 4.0)):
        whole = [x.double().clone().requires_grad_() for x in (h, w, b)]
        z = whole[0] @ whole[1].T + whole[2]
        x = softcap * torch.tanh(z / softcap) if softcap else z
        keep = t != -100
        p = torch.where(keep, torch.softmax(x.detach(), -1).gather(-1, t.clamp(min=0)[:, None])[:, 0], torch.zeros(()).double())
        of = None if weight is None else weight.double()
        loss = p * F.cross_entropy(x, t, of, label_smoothing=smoothing, reduction='none')
        z_loss = p * z_scale * x.logsumexp(-1).square()
        if reduction != 'none':
            loss, z_loss = loss.sum(), z_loss.sum()
        if reduction == 'mean':
            loss, z_loss = loss / (keep.sum() if of is None else of[t[keep]].sum()), z_loss / keep.sum()
        (loss + z_loss).sum().backward()

        def scaled(world):
            rows = slice(world.rank * V // world.size, (world.rank + 1) * V // world.size)
            leaves = [y.clone().requires_grad_() for y in (w[rows], h, b[rows])]
            out = compat.LigerFusedLinearCrossEntropyLoss(weight, lse_square_scale=z_scale, label_smoothing=smoothing, reduction=reduction, softcap=softcap,
                                                          return_z_loss=True, return_token_accuracy=True, use_token_scaling=True, tp_group=world)(
                leaves[0], leaves[1], t, leaves[2])
            out.loss.sum().backward()
            torch.testing.assert_close(out.loss.double(), (loss + z_loss).detach(), **NEAR)
            torch.testing.assert_close(out.z_loss.double(), z_loss.detach(), **NEAR)
            right = (x.argmax(-1) == t).double()
            torch.testing.assert_close(out.token_accuracy.double(), right if reduction == 'none' else right.sum() / keep.sum(), **NEAR)
            for got, d in zip(leaves, (whole[1].grad[rows], whole[0].grad, whole[2].grad[rows])):
                torch.testing.assert_close(got.grad.double(), d, rtol=1e-4, atol=1e-4)
        cb.run_threads(size, scaled)


def test_what_was_not_asked_for_is_none():
    h, w, _, t = case(1)
    out = compat.LigerFusedLinearCrossEntropyLoss(return_predicted_tokens=True)(w, h, t)
    assert out.z_loss is None and out.token_accuracy is None and out.predicted_tokens[2] == -1
    out = compat.LigerCrossEntropyLoss(return_z_loss=True)(h @ w.T, t)
    assert out.z_loss == 0 and out.predicted_tokens is None


def test_no_token_and_no_weight_are_a_loss_of_0():
    h, w, _, t = case(2)
    z = (h @ w.T).requires_grad_()
    for weight, target in ((None, torch.full_like(t, -100)), (torch.zeros(V), t)):
        loss = compat.LigerCrossEntropyLoss(weight, lse_square_scale=0.0)(z, target)
        loss.backward()
        assert loss == 0 and not z.grad.any()


def test_options_that_are_none_are_refused():
    for options in (dict(reduction='most'), dict(label_smoothing=2.0), dict(softcap=0.0)):
        for kind in (compat.LigerCrossEntropyLoss, compat.LigerFusedLinearCrossEntropyLoss):
            with pytest.raises(ValueError, match='%s: reduction is .* expected' % kind.__name__):
                kind(**options)
    with pytest.raises(ValueError, match='LigerFusedLinearCrossEntropyLoss: accum_dtype is torch.bfloat16, expected None or torch.float32'):
        compat.LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16)
