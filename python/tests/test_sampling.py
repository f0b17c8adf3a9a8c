# SPDX-License-Identifier: Apache-2.0
"""sampling_params of colobridge.compat: top-k and top-p over sharded vocabularies, against lists that are sorted
row by row, in exact arithmetic where a sum decides."""
import itertools
import math
import types
from fractions import Fraction
from itertools import accumulate

import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
from colobridge import compat  # noqa: E402
from colobridge.torch import sampling  # noqa: E402
from test_torch_logprob import TOLERANCE  # noqa: E402

S = 7
INF = float('inf')


def oracle(row, target, top_k, top_p):
    """(logp, {id: its probability}) over the kept ids of a list of numbers"""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k]
    mass = [Fraction(math.exp(row[i] - row[order[0]])) for i in order]
    reached, wanted = list(accumulate(mass)), Fraction(top_p) * sum(mass)
    assert all(abs(r - wanted) > 1e-6 or top_p == 1 for r in reached), 'a case whose rounding decides proves nothing'
    count = next(n for n, r in enumerate(reached, 1) if r >= wanted)
    prob = {i: float(m / reached[count - 1]) for i, m in zip(order[:count], mass)}
    return (math.log(prob[target]) if prob.get(target) else -INF), prob


def drawn(vocab, dtype, seed):
    """logits [2, S, vocab] with many equal ones among them, -0 and 0, and -inf; and targets: the largest,
    the second, and the smallest in turn"""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(2, S, vocab, generator=rng, dtype=torch.float64) * 3
    z[0] = (z[0] * 2).round() / 2
    z[0, 1:3] = torch.where(z[0, 1:3].abs() < 2, z[0, 1:3] * 0, z[0, 1:3])  # of both signs
    z[1, 3, ::2] = -INF
    z[1, 4] = 1  # no id is before another but by its number
    place = torch.tensor([0, 1, -1]).repeat(2 * S)[:2 * S].reshape(2, S, 1) % vocab
    z = z.to(dtype)
    return z, z.double().sort(dim=-1, descending=True, stable=True)[1].gather(-1, place)[..., 0]


def agrees(rank, size, group, vocab, dtype, cuts, top_k, top_p, chunk=None):
    z, t = drawn(vocab, dtype, 1)
    largest = None if top_k == -1 else top_k
    lo, hi = cuts[rank], cuts[rank + 1]
    mine = z[..., lo:hi].clone().requires_grad_()
    got = compat.from_parallel_logits_to_logprobs(
        mine, t, lo, hi, group, chunk_size=chunk, target_is_pre_rolled=True,
        sampling_params=types.SimpleNamespace(top_k=top_k, top_p=top_p))
    up = torch.arange(1.0, S).expand(2, S - 1)
    got.backward(up.to(got.dtype))
    want, d = torch.zeros(2, S - 1, dtype=torch.float64), torch.zeros(z.shape, dtype=torch.float64)
    for b in range(2):
        for s in range(S - 1):
            want[b, s], prob = oracle(z[b, s].tolist(), int(t[b, s]), largest, top_p)
            for i, p in prob.items():  # of these alone, also if the target is none of them
                d[b, s, i] = float(up[b, s]) * ((i == int(t[b, s])) - p)
    assert want.isinf().any() and want.isfinite().sum() >= 4, want
    bound, bound_grad = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=max(bound, 1e-6), atol=max(bound, 1e-6))  # compat's are f32
    torch.testing.assert_close(mine.grad.double(), d[..., lo:hi], rtol=10 * max(bound_grad, 1e-7),
                               atol=10 * max(bound_grad, 1e-7))
    assert torch.equal(mine.grad == 0, d[..., lo:hi] == 0) or dtype == torch.float16  # of no other id
    return got.tolist()


CUTS = {1: [0, 23], 2: [0, 16, 23], 4: [0, 1, 1, 20, 23]}


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
def test_the_fewest_ids_that_have_the_mass_are_kept(dtype):
    for top_k, top_p in ((None, 0.9), (None, 0.3), (-1, 1e-9), (6, 0.8), (6, 1.0), (40, 0.7)):
        for size, cuts in CUTS.items():
            said = cb.run_threads(size, lambda world: agrees(world.rank, size, world, 23, dtype, cuts, top_k, top_p, 5))
            assert all(s == said[0] for s in said)  # the same bits everywhere
    agrees(0, 1, None, 23, dtype, CUTS[1], None, 0.6)


def test_more_than_256_ids_and_shards_in_another_order():
    cuts = [0, 307, 400, 1031]
    for top_k, top_p in ((301, 1.0), (301, 0.9), (None, 0.97)):
        said = cb.run_threads(3, lambda world: agrees(2 - world.rank, 3, world, 1031, torch.bfloat16, cuts, top_k, top_p))
        assert said[0] == said[1] == said[2]


def sampled(z, t, lo, hi, group, top_k, top_p):
    return compat.from_parallel_logits_to_logprobs(
        z, t, lo, hi, group, target_is_pre_rolled=True, sampling_params=types.SimpleNamespace(top_k=top_k, top_p=top_p))


def kept_ids(row, top_k, top_p, size):
    """Of one row, one target after another, on ranks whose shards are cut at thirds"""
    n = len(row)

    def on_rank(world):
        lo, hi = (n * r // size for r in (world.rank, world.rank + 1))
        z = row.expand(1, n + 1, n)[..., lo:hi]
        return sampled(z, torch.cat([torch.arange(n), torch.zeros(1, dtype=torch.int64)])[None], lo, hi, world, top_k,
                       top_p)[0]
    first, *others = cb.run_threads(size, on_rank)
    assert all(torch.equal(first, o) for o in others)
    return (first > -INF).nonzero()[:, 0].tolist()


def test_equal_logits_are_kept_by_id_and_a_sum_that_is_met_ends_the_list():
    for size in (1, 3):
        for top_k in (None, 300, 64):  # 300 is beyond the vocabulary: all
            assert kept_ids(torch.zeros(64), top_k, 0.5, size) == list(range(32))
            assert kept_ids(torch.zeros(64), top_k, 0.5 + 2**-20, size) == list(range(33))
        assert kept_ids(torch.zeros(64), 8, 0.5, size) == list(range(4))  # of what top_k left
        assert kept_ids(torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0]), None, 0.25, size) == [0, 1]
        assert kept_ids(torch.tensor([-9.0, 1.0, -INF, 1.0]), None, 0.2, size) == [1]


def test_a_top_p_of_1_keeps_ids_however_small_their_mass_is():
    row = torch.tensor([0.0, -50.0, -1.0, -90.0])
    for size, top_k in itertools.product((1, 3), (3, 4, 300)):  # 300: a copy, else a list
        assert kept_ids(row, top_k, 1.0, size) == [0, 1, 2, 3][:top_k]


def test_many_tokens_are_searched_in_little_memory(monkeypatch):
    limit, sizes, size_of = 1 << 16, [], sampling.size_of
    z = torch.randn(1, 257, 512, generator=torch.Generator().manual_seed(3))
    t = z.argmax(-1)

    def noted(name, *args):
        sizes.append((args[2], size_of(name, *args)))
        return sizes[-1][1]
    monkeypatch.setattr(sampling, '_WORKSPACE', limit)
    monkeypatch.setattr(sampling, 'size_of', noted)

    def on_rank(world):
        lo, hi = 128 * world.rank, 128 * world.rank + 128
        return sampled(z[..., lo:hi], t, lo, hi, world, None, 0.9)
    cb.run_threads(4, on_rank)
    steps = [size for tokens, size in sizes if tokens < 257]
    assert len(steps) == 4 and all(limit / 2 < size <= limit for size in steps), sizes


def test_a_target_that_is_not_kept_has_the_gradient_of_the_softmax():
    for top_k in (257, 200):  # of a copy, of a list
        z = torch.arange(300.0).div(9).expand(1, 3, 300).clone().requires_grad_()
        sampled(z, torch.tensor([[7, 299, 0]]), 0, 300, None, top_k, 1.0).sum().backward()
        p = z.detach()[0, 0, 300 - top_k:].double().softmax(0)
        for row, target in enumerate((None, -1)):
            want = torch.cat([torch.zeros(300 - top_k, dtype=torch.float64), -p])
            if target is not None:
                want[target] += 1
            torch.testing.assert_close(z.grad[0, row].double(), want, rtol=1e-5, atol=1e-6)
            assert not z.grad[0, row, :300 - top_k].any()


def test_rows_without_a_largest_logit_and_targets_outside_of_the_vocabulary():
    z = torch.randn(1, 6, 300, generator=torch.Generator().manual_seed(2))
    z[0, 0, 7], z[0, 1, 8], z[0, 2] = -float('nan'), INF, -INF
    t = torch.tensor([[7, 0, 2, -100, 300, 0]])
    for top_k, top_p in ((None, 0.9), (4, 0.9), (280, 0.9), (280, 1.0)):
        def on_rank(world):
            lo, hi = 300 * world.rank // world.size, 300 * (world.rank + 1) // world.size
            mine = z[..., lo:hi].clone().requires_grad_()
            got = sampled(mine, t, lo, hi, world, top_k, top_p)
            got[:, 3:].sum().backward()
            return got.tolist(), mine.grad[0, 3:5].double().sum()
        for size in (1, 2):
            said = cb.run_threads(size, on_rank)
            assert all(math.isnan(x) for x in said[0][0][0][:3]) and said[0][0][0][3:] == [0, 0]
            assert abs(sum(d for _, d in said) + 2) < 1e-5  # -p of each


def test_sampling_parameters_outside_of_their_range_are_refused():
    z, t = torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.int64)
    for top_k, top_p in ((-2, 1.0), (None, 0.0), (3, 1.5), (None, float('nan'))):
        with pytest.raises(ValueError, match='sampling_params has top_k .* and top_p .*, expected'):
            sampled(z, t, 0, 5, None, top_k, top_p)
