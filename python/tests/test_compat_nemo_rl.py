# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's names of colobridge.compat, against serial fp64 on the whole batch: dense and packed over tp x cp = 1 and 2
ranks each, top-k and top-p, gathered ids. A target that the filter removed has the gradient of its softmax."""
import itertools
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge import compat  # noqa: E402

V, B, S = 12, 2, 16
INF = float('inf')
BOUND = dict(rtol=2e-5, atol=2e-5)  # f32, sums of at most V terms below 20
FILTERS = ((None, 1.0), (4, 1.0), (None, 0.6), (5, 0.7))
LAYOUTS = list(itertools.product((1, 2), (1, 2)))
CU = [0, 4, 12, 16]
_made = {}


def groups(rank, tp, cp):
    """(tp group, rank in it, cp group or None, rank in it); other ranks do the same work"""
    if (tp, cp) not in _made:
        ranks = torch.arange(4).reshape(-1, cp, tp)
        for name, sets in (('tp', ranks.reshape(-1, tp)), ('cp', ranks.transpose(1, 2).reshape(-1, cp))):
            for members in sets.tolist():
                group = dist.new_group(members)
                if rank in members:
                    _made.setdefault((tp, cp), {})[name] = group
    made = _made[tp, cp]
    return made['tp'], rank % tp, made['cp'] if cp > 1 else None, rank // tp % cp


def columns(rank, tp):
    return rank * V // tp, (rank + 1) * V // tp


def kept(z, top_k, top_p):
    """Which ids of [.., V] a sampler draws from, row by row"""
    mask = torch.zeros(z.shape, dtype=torch.bool)
    for row, chosen in zip(z.reshape(-1, V).double().tolist(), mask.view(-1, V)):
        order = sorted(range(V), key=lambda i: -row[i])[:top_k]
        mass = torch.tensor([row[i] for i in order], dtype=torch.float64).softmax(0)
        before = (mass.cumsum(0) - mass).tolist()
        assert top_p == 1 or min(abs(b - top_p) for b in before) > 1e-6, 'a case whose rounding decides proves nothing'
        chosen[[i for i, b in zip(order, before) if b < top_p]] = True
    return mask


def serial(z, target, top_k, top_p):
    """logp [..] in fp64, with the gradient that PyTorch gives it"""
    filtered = z.masked_fill(~kept(z.detach(), top_k, top_p), -INF)
    return filtered.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def zigzag(x, cp, rank, cu):
    """A context rank's part of [B, T, ..], cut in each segment"""
    parts = []
    for a, b in zip(cu, cu[1:]):
        chunks = x[:, a:b].chunk(2 * cp, dim=1)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else [x[:, a:b]]
    return torch.cat(parts, 1)


def drawn(batch, seed=4):
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(batch, S, V, generator=rng), torch.randint(0, V, (batch, S), generator=rng),
            torch.randn(batch, S, generator=rng))


def agrees(rank, tp, cp, packed, top_k, top_p):
    group, me, context, part = groups(rank, tp, cp)
    lo, hi = columns(me, tp)
    cu = CU if packed else [0, S]
    z, tokens, g = drawn(1 if packed else B)
    rolled = torch.cat([tokens[:, a:b].roll(-1, 1) for a, b in zip(cu, cu[1:])], 1)
    whole = z.double().requires_grad_()
    true = serial(whole, rolled, top_k, top_p)
    if packed:  # a row for each segment
        width = 7  # less than the longest has
        rows = lambda x: torch.stack([torch.nn.functional.pad(x[0, a:b - 1], (0, width))[:width - 1]  # noqa: E731
                                      for a, b in zip(cu, cu[1:])])
        want, up = rows(true), rows(g)
    else:
        want, up = true[:, :-1], g[:, :-1]
    want.backward(up.double())
    assert (top_k, top_p) == (None, 1.0) or bool(want.isinf().any() and want.isfinite().any())
    more = {'cp_group': context, 'sampling_params': types.SimpleNamespace(top_k=top_k, top_p=top_p)}
    targets = [(tokens, {}), (rolled, {'target_is_pre_rolled': True})]
    if packed:
        targets.append((zigzag(rolled, cp, part, cu), {'target_is_pre_rolled': True}))
    share = (1.0,) if cp == 1 else (1 / 3, 2 / 3)  # gradients are added over cp
    for (target, how), chunk in itertools.product(targets, (None, 3)):
        mine = zigzag(z, cp, part, cu)[..., lo:hi].clone().requires_grad_()
        if packed:
            got = compat.from_parallel_logits_to_logprobs_packed_sequences_nemo_rl(
                mine, target, torch.tensor(cu), width, lo, hi, group, chunk_size=chunk, **how, **more)
        else:
            got = compat.from_parallel_logits_to_logprobs(mine, target, lo, hi, group, chunk_size=chunk, **how, **more)
        torch.testing.assert_close(got.detach().double(), want.detach(), **BOUND)
        got.backward(up * share[part])
        torch.testing.assert_close(mine.grad.double(), zigzag(whole.grad, cp, part, cu)[..., lo:hi], **BOUND)


@pytest.mark.parametrize('top_k, top_p', FILTERS)
@pytest.mark.parametrize('packed', (False, True), ids=('dense', 'packed'))
@pytest.mark.parametrize('tp, cp', LAYOUTS)
def test_log_probabilities_of_next_tokens(world, tp, cp, packed, top_k, top_p):
    world.run(agrees, tp, cp, packed, top_k, top_p)


def classes(rank, tp):
    group, me, _, _ = groups(rank, tp, 1)
    lo, hi = columns(me, tp)
    z, target, g = drawn(B, 5)
    for top_k, top_p in ((-1, 1.0), *FILTERS):
        whole = z.double().requires_grad_()
        want = serial(whole, target, None if top_k == -1 else top_k, top_p)
        want.backward(g.double())
        for fn, chunk in ((compat.DistributedLogprobWithSampling, ()),
                          (compat.ChunkedDistributedLogprobWithSampling, (3,))):
            mine = z[..., lo:hi].clone().requires_grad_()
            got = fn.apply(mine, target, group, top_k, top_p, *chunk)
            torch.testing.assert_close(got.detach().double(), want.detach(), **BOUND)
            got.backward(g)
            torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], **BOUND)
            quiet = fn.apply(mine, target, group, top_k, top_p, *chunk, True)
            assert torch.equal(quiet, got.detach()) and not quiet.requires_grad


@pytest.mark.parametrize('tp', (1, 2))
def test_classes_with_sampling(world, tp):
    world.run(classes, tp)


def gathered(rank, tp):
    group, me, _, _ = groups(rank, tp, 1)
    lo, hi = columns(me, tp)
    z, _, g = drawn(B, 6)
    whole = z.double().requires_grad_()
    lp = whole.log_softmax(-1)
    entropy = (lp.exp() * lp).sum(-1)  # the sign of the original
    d_entropy, = torch.autograd.grad(entropy, whole, g.double(), retain_graph=True)
    mine = z[..., lo:hi].clone().requires_grad_()
    got = compat.ChunkedDistributedEntropy.apply(mine, 3, group)
    torch.testing.assert_close(got.detach().double(), entropy.detach(), **BOUND)
    torch.testing.assert_close(torch.autograd.grad(got, mine, g)[0].double(), d_entropy[..., lo:hi], **BOUND)
    half = z[..., lo:hi].bfloat16()
    assert compat.ChunkedDistributedEntropy.apply(half, 3, group).dtype == torch.float32
    assert not compat.ChunkedDistributedEntropy.apply(mine, 3, group, True).requires_grad
    rng = torch.Generator().manual_seed(7)
    for k in (5, 300):  # 256 are one call
        ids, up = torch.randint(0, V, (B, S, k), generator=rng), torch.randn(B, S, k, generator=rng)
        outside = torch.zeros(ids.shape, dtype=torch.bool)
        outside[0, 0, :3] = True
        want = lp.gather(-1, ids).masked_fill(outside, 0)
        d, = torch.autograd.grad(want, whole, up.double(), retain_graph=True)
        for chunk in (1, 64):
            ids[0, 0, :3] = torch.tensor([-100, V, -1])
            mine = z[..., lo:hi].clone().requires_grad_()
            got = compat.ChunkedDistributedGatherLogprob.apply(mine, ids, lo, hi, chunk, group)
            torch.testing.assert_close(got.detach().double(), want.detach(), **BOUND)
            got.backward(up)
            torch.testing.assert_close(mine.grad.double(), d[..., lo:hi], rtol=2e-5, atol=1e-4)  # k upstream gradients
            quiet = compat.ChunkedDistributedGatherLogprob.apply(mine, ids, lo, hi, chunk, group, True)
            assert torch.equal(quiet, got.detach()) and not quiet.requires_grad


@pytest.mark.parametrize('tp', (1, 2))
def test_gathered_ids_and_entropy(world, tp):
    world.run(gathered, tp)
