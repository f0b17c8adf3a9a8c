# SPDX-License-Identifier: Apache-2.0
"""Names of colobridge.compat that NeMo-RL, verl and SkyRL have besides those of test_compat.py: sampling parameters,
targets that are rolled already, gradients over cp, hidden states, entropy of packed actions; against PyTorch."""
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
from colobridge import compat  # noqa: E402

V, H, S = 12, 5, 16
BOUND = dict(rtol=1e-5, atol=1e-5)


def drawn(seed=0):
    """logits [2, S, V], hidden, weight, target"""
    rng = torch.Generator().manual_seed(seed)
    z, h, w = (torch.randn(*n, generator=rng) for n in ((2, S, V), (2, S, H), (V, H)))
    return 3 * z, h, w, torch.randint(0, V, (2, S), generator=rng)


def half(rank, size):
    return rank * V // size, (rank + 1) * V // size


def sampled(world):
    z, _, _, target = drawn()
    lo, hi = half(world.rank, world.size)
    params = types.SimpleNamespace(top_k=4, top_p=1.0, temperature=0.5)
    for rolled in (False, True):
        whole, mine = z.clone().requires_grad_(), z[..., lo:hi].clone().requires_grad_()
        got = compat.from_parallel_logits_to_logprobs(
            mine, target.roll(-1, 1) if rolled else target, lo, hi, world, sampling_params=params,
            target_is_pre_rolled=rolled)
        kth = whole.detach().topk(4, -1)[0][..., -1:]
        lp = torch.log_softmax(whole.masked_fill(whole.detach() < kth, -float('inf')), -1)
        want = lp[:, :-1].gather(-1, target[:, 1:, None])[..., 0]
        torch.testing.assert_close(got, want, **BOUND)
        assert want.isinf().any() and want.isfinite().any()
        for value in (got, want):
            value.masked_fill(want.isinf(), 0).square().sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[..., lo:hi], **BOUND)
    for none in (None, types.SimpleNamespace(top_k=None, top_p=None), types.SimpleNamespace(top_k=-1, top_p=1.0)):
        got = compat.from_parallel_logits_to_logprobs(z[..., lo:hi], target, lo, hi, world, sampling_params=none)
        torch.testing.assert_close(got, torch.log_softmax(z, -1)[:, :-1].gather(-1, target[:, 1:, None])[..., 0],
                                   **BOUND)


def test_sampling_parameters_keep_the_largest_ids():
    for size in (1, 3):
        cb.run_threads(size, sampled)


@pytest.mark.parametrize('top_k, top_p', ((None, 1.0), (4, 1.0), (4, 0.5), (None, 0.5)))
def test_log_probabilities_of_logits_in_fp64_are_in_fp32(top_k, top_p):
    z, _, _, target = drawn()
    got = compat.from_parallel_logits_to_logprobs(
        z.double(), target, 0, V, None, sampling_params=types.SimpleNamespace(top_k=top_k, top_p=top_p))
    assert got.dtype == torch.float32


def test_arguments_that_have_no_meaning_here_are_refused():
    _, h, w, target = drawn()
    with pytest.raises(ValueError, match="reduction is 'most'"):
        compat.linear_cross_entropy(h, w, target, reduction='most')


def from_hidden(world):
    _, h, w, target = drawn(1)
    lo, hi = half(world.rank, world.size)
    for reduction in ('none', 'sum', 'mean'):
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        mine = [x.clone().requires_grad_() for x in (h, w[lo:hi])]
        lp = torch.log_softmax(leaves[0] @ leaves[1].t() / 0.7, -1)
        want = [lp.gather(-1, target[..., None]).reshape(-1), -(lp.exp() * lp).sum(-1).reshape(-1)]
        got = compat.linear_cross_entropy(*mine, target, 0.7, reduction, world)
        want[0] = getattr(want[0], reduction)() if reduction != 'none' else want[0]
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, **BOUND)
            assert a.dtype == torch.float32
        (got[0].sum() - 2 * got[1].sum()).backward()
        (want[0].sum() - 2 * want[1].sum()).backward()
        torch.testing.assert_close(mine[1].grad, leaves[1].grad[lo:hi], rtol=1e-5, atol=1e-4)
        parts = torch.empty(world.size, *h.shape)
        world.all_gather(mine[0].grad, parts)  # each rank's part
        torch.testing.assert_close(parts.sum(0), leaves[0].grad, rtol=1e-5, atol=1e-4)
    labels = compat.vocab_parallel_log_probs_from_logits((h @ w.t())[..., lo:hi].contiguous(), target, world)
    torch.testing.assert_close(labels, torch.log_softmax(h @ w.t(), -1).gather(-1, target[..., None])[..., 0], **BOUND)


def test_verls_functions():
    for size in (1, 2):
        cb.run_threads(size, from_hidden)


# ---- packed sequences over four context ranks ----

CU, LENGTHS = torch.tensor([0, 8, 24]), (5, 15)  # padded to 8 and 16


def own(rank, x):
    """Zigzag over 4 of each segment of [1, 24, ..]"""
    index = [start + i for start, n in ((0, 8), (8, 16)) for piece in (rank, 7 - rank)
             for i in range(piece * n // 8, (piece + 1) * n // 8)]
    return x[:, index]


def packed(rank):
    rng = torch.Generator().manual_seed(2)
    z, h, w = (torch.randn(*n, generator=rng) for n in ((1, 24, V), (1, 24, H), (V, H)))
    target, cp = torch.randint(0, V, (1, 24), generator=rng), dist.group.WORLD
    rolled = torch.cat([target[:, 1:8], target[:, :1], target[:, 9:], target[:, 8:9]], 1)
    args = (CU, S, 0, V, None)
    grads = []
    for fn, t, o in ((compat.from_parallel_logits_to_logprobs_packed_sequences, target, {}),
                     (compat.from_parallel_logits_to_logprobs_packed_sequences_nemo_rl, target, {}),
                     (compat.from_parallel_logits_to_logprobs_packed_sequences_nemo_rl, rolled,
                      {'target_is_pre_rolled': True})):
        leaf = own(rank, z).clone().requires_grad_()
        out = fn(leaf, t, *args, cp_group=cp, **o)
        lp = torch.log_softmax(z, -1)[0]
        for row, (start, n) in enumerate(((0, 8), (8, 16))):
            want = lp[start:start + n - 1].gather(-1, target[0, start + 1:start + n, None])[:, 0]
            torch.testing.assert_close(out[row, :n - 1], want, **BOUND)
        out.square().sum().backward()
        grads.append(leaf.grad)
    # Every rank made the whole loss: added over cp, its gradient is four times as large.
    torch.testing.assert_close(grads[1], 4 * grads[0], **BOUND)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=0)

    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    kept = torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]])
    for logits, loss_mask, fn in (
            (z, kept, lambda x: compat.vocab_parallel_entropy_packed_sequences(
                x, CU, S, 12, mask, kept, cp, tp_group=cb.Comm.self())),
            (z, None, lambda x: compat.vocab_parallel_entropy_packed_sequences(
                x, CU, S, 12, mask, None, cp, tp_group=cb.Comm.self())),
            (h, kept, lambda x: compat.from_parallel_hidden_to_entropy_packed_sequences(
                x, w, CU, S, 12, mask, kept, cp, None, temperature=0.5))):
        whole, leaf = logits.clone().requires_grad_(), own(rank, logits).clone().requires_grad_()
        lp = torch.log_softmax(whole if logits is z else whole @ w.t() / 0.5, -1)[0]
        entropy, weights = -(lp.exp() * lp).sum(-1), torch.zeros(24)
        for row, (start, n) in enumerate(((0, LENGTHS[0]), (8, LENGTHS[1]))):
            for col in range(max(S - 1 - 12, 0), n - 1):
                weights[start + col] = 1 if loss_mask is None else loss_mask[row, col - (S - 1 - 12)]
        want = (entropy * weights).sum() / weights.sum()
        got, part = fn(leaf)
        assert not got.requires_grad
        torch.testing.assert_close(got, want.detach(), **BOUND)
        want.backward()
        part.backward()
        torch.testing.assert_close(leaf.grad, own(rank, whole.grad), **BOUND)
    return float(part)


def test_packed_sequences_over_context_ranks(world):
    parts = world.run(packed)
    assert sum(abs(p) > 0 for p in parts) > 1  # no rank had it all


def test_a_weighted_sum_of_entropies():
    z, _, _, _ = drawn()
    leaf, weights = z.clone().requires_grad_(), torch.arange(2.0 * S).reshape(2, S)
    lp = torch.log_softmax(leaf, -1)
    want, = torch.autograd.grad((-(lp.exp() * lp).sum(-1) * weights).sum(), leaf)
    got = compat.vocab_parallel_entropy_weighted_sum(leaf, weights, 3, tp_group=cb.Comm.self())
    torch.testing.assert_close(torch.autograd.grad(got, leaf)[0], want, rtol=1e-4, atol=1e-4)
