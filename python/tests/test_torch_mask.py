# SPDX-License-Identifier: Apache-2.0
"""Masks of nll() and linear_nll(): bools and integers count tokens, floats weigh them. Expected: sums of
PyTorch's cross entropy in fp64."""
import pytest

torch = pytest.importorskip('torch')
import torch.distributed as dist  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from heads import linear_nll  # noqa: E402

SHAPE, H, V = (3, 5), 6, 14


def drawn(dtype=torch.float64, seed=0):
    """hidden, weight of the head, targets of which some are ignored, weights of which some are 0 and most
    are neither 0 nor 1"""
    rng = torch.Generator().manual_seed(seed)
    h, w = torch.randn(*SHAPE, H, generator=rng), torch.randn(V, H, generator=rng)
    t = torch.randint(0, V, SHAPE, generator=rng)
    t[0, 1] = t[2, 4] = -100
    mask = torch.tensor([0.5, 0.0, 1.0, 2.0, 0.25, 0.75]).repeat(3)[:15].reshape(SHAPE).roll(seed, 1)
    return h.to(dtype), w.to(dtype), t, mask


def sums(h, w, t, mask):
    """sum of weight * loss, sum of weights; fp64"""
    each = F.cross_entropy((h.double() @ w.double().t()).reshape(-1, V), t.reshape(-1), reduction='none',
                           label_smoothing=0.1).reshape(SHAPE)
    weight = torch.where(t != -100, mask.double(), torch.zeros((), dtype=torch.float64))
    return (each * weight).sum(), weight.sum(), each * weight


def losses(h, w, t, mask, reduction, **more):
    """of the ways to the same loss"""
    args = {'target': t, 'mask': mask, 'reduction': reduction, 'label_smoothing': 0.1, **more}
    yield 'nll', lambda x, y: ct.nll(x @ y.t(), **args)
    yield 'nll of a slice', lambda x, y: ct.nll(torch.cat([x @ y.t()] * 2, 1)[:, :SHAPE[1]], **args)
    for mode in ('loss', 'logprob', 'keep'):
        if (mode, reduction) != ('loss', 'none'):
            yield mode, lambda x, y, mode=mode: linear_nll(x, y, mode=mode, chunk_size=4, **args)


@pytest.mark.parametrize('dtype', (torch.float64, torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_a_float_mask_weighs_tokens_in_num_and_den(dtype):
    h, w, t, mask = drawn()
    for reduction in ('mean', 'sum', 'none'):
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        num, den, each = sums(*leaves, t, mask)
        want = {'mean': num / den, 'sum': num, 'none': each}[reduction]
        (want * 3).sum().backward()
        for name, fn in losses(h, w, t, mask.to(dtype), reduction):
            mine = h.clone().requires_grad_(), w.clone().requires_grad_()
            got = fn(*mine)
            value = got if reduction == 'none' else got.loss
            torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-12)
            if reduction != 'none':
                torch.testing.assert_close(torch.stack([got.num, got.den]).detach(),
                                           torch.stack([num, den]).detach(), rtol=1e-12, atol=1e-12)
            (value * 3).sum().backward()
            for a, b in zip(mine, leaves):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12, msg=lambda m: name + m)


def test_weights_that_add_up_to_less_than_one_divide_as_they_are():
    h, w, t, _ = drawn(torch.float32)
    mask = torch.zeros(SHAPE)
    mask[1, 1] = 0.5
    want = sums(h, w, t, mask)
    for name, fn in losses(h, w, t, mask, 'mean'):
        got = fn(h, w.clone().requires_grad_())
        assert float(got.den) == 0.5, name
        assert abs(float(got.loss) - float(want[0] / want[1])) < 1e-5, name


def test_weights_of_zero_keep_what_is_behind_them():
    h, w, t, mask = drawn(torch.float32)
    h[mask == 0] = float('nan')
    for name, fn in losses(h, w, t, mask, 'mean'):
        assert fn(h, w.clone().requires_grad_()).loss.isfinite(), name
    for name, fn in losses(h, w, t, torch.zeros(SHAPE), 'mean'):
        leaf = w.clone().requires_grad_()
        got = fn(h, leaf)
        got.loss.backward()
        assert float(got.loss) == 0 and float(got.den) == 0, name
        if name not in ('nll', 'nll of a slice'):  # whose product with NaN is not the library's
            assert not leaf.grad.any(), name


@pytest.mark.parametrize('dtype', (torch.bool, torch.int64, torch.uint8), ids=str)
def test_other_masks_count_tokens(dtype):
    h, w, t, mask = drawn(torch.float32)
    mask = (mask * 4).to(dtype)  # 0, 1, 2, 3, 4 and 8
    want = sums(h, w, t, mask != 0)
    for name, fn in losses(h, w, t, mask, 'mean'):
        got = fn(h, w.clone().requires_grad_())
        assert float(got.den) == float(want[1]) and abs(float(got.num) - float(want[0])) < 1e-4, name


@pytest.mark.parametrize('ignored', (-100, 3, V))
def test_weights_of_illegal_targets_do_not_count(ignored):
    h, w, t, mask = drawn(torch.float32)
    t[1], t[2, 0], t[0, 0] = 3, V, -1
    counts = (t >= 0) & (t < V) & (t != ignored)
    for name, fn in losses(h, w, t, mask, 'sum', ignore_index=ignored):
        assert float(fn(h, w.clone().requires_grad_()).den) == float(mask[counts].sum()), name


@pytest.mark.parametrize('wrong', (float('nan'), float('inf'), -0.5))
def test_a_weight_that_is_none_is_refused(wrong):
    h, w, t, mask = drawn(torch.float32)
    mask[1, 3] = wrong
    for reduction in ('mean', 'sum', 'none'):
        for name, fn in losses(h, w, t, mask, reduction):
            with pytest.raises(ValueError, match=r'mask: found %s at \[1, 3\], expected' % wrong):
                fn(h, w.clone().requires_grad_())


# ---- over ranks: tp pairs (0, 1), (2, 3); dp pairs (0, 2), (1, 3) ----

def over_ranks(rank):
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp, half = groups[rank // 2], groups[2 + rank % 2], slice(0, 9) if rank % 2 == 0 else slice(9, V)
    cases = [drawn(seed=seed) for seed in (0, 1)]
    w = cases[0][1]
    whole = [cases[0][0].clone().requires_grad_(), cases[1][0].clone().requires_grad_(),
             w.clone().requires_grad_()]
    parts = [sums(whole[i], whole[2], *cases[i][2:]) for i in range(2)]
    want = (parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1])
    want.backward()
    h, _, t, mask = cases[rank // 2]
    args = {'target': t, 'tp_group': tp, 'reduce_group': dp, 'vocab': (half.start, V),
            'label_smoothing': 0.1}
    ways = [lambda x, y, m: linear_nll(x, y, mask=m, mode=mode, **args) for mode in ('loss', 'logprob')]
    ways.append(lambda x, y, m: ct.nll(x @ y.t(), mask=m, **args))
    for i, fn in enumerate(ways):
        x, y = h.clone().requires_grad_(), w[half].clone().requires_grad_()
        got = fn(x, y, mask)
        torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=1e-12)
        got.loss.backward()
        summed = y.grad.clone()
        dist.all_reduce(summed, group=dp)
        torch.testing.assert_close(summed, whole[2].grad[half], rtol=1e-11, atol=1e-12)
        if i < 2:  # of a product of PyTorch it is this rank's part
            torch.testing.assert_close(x.grad, whole[rank // 2].grad, rtol=1e-11, atol=1e-12)
        bad = mask.clone()
        bad[2, 0] = float('nan') if rank == 1 else 1
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r'mask: found nan at \[2, 0\]'):
            fn(x, y, bad)  # rank 2 shares no group with rank 1, and hears of it through those that do
        dist.barrier()


def test_weighted_means_and_refusals_are_every_ranks(world):
    world.run(over_ranks)
