# SPDX-License-Identifier: Apache-2.0
"""Objectives of docs/guides/rl.md, GRPO, GSPO, CISPO and DFT, against loops over tokens that follow the papers' formulas."""
import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import colobridge.torch as ct  # noqa: E402
from linear_case import H, V, case, leaf, near  # noqa: E402

B, S = 3, 6
LENGTHS = [6, 2, 4]


def codes():
    """The snippets under the heading, by the name that each assigns last"""
    text = (Path(__file__).resolve().parents[2] / 'docs/guides/rl.md').read_text()
    part = text[text.index('\n## Objectives in a few lines\n'):]
    part = part[:part.index('\n## ', 5)]
    return {re.findall(r'^(\w+).*?=', code, re.M)[-1]: code for code in re.findall(r'```python\n(.*?)```', part, re.S)}


def grpo(new, old, ref, a, lengths):
    of_sequence = []
    for b, n in enumerate(lengths):
        losses = []
        for i in range(n):
            r = torch.exp(new[b][i] - old[b][i])
            clipped = r
            if a[b] > 0 and r > 1.2 or a[b] < 0 and r < 0.8:  # min(r A, clip(r) A) is that of the clipped one
                clipped = torch.full_like(r, 1.2 if a[b] > 0 else 0.8)
            q = torch.exp(ref[b][i] - new[b][i])
            losses.append(-clipped * a[b] + 0.04 * (q - torch.log(q) - 1))
        of_sequence.append(sum(losses) / n)
    return sum(of_sequence) / len(lengths)


def gspo(new, old, ref, a, lengths):
    losses = []
    for b, n in enumerate(lengths):
        s = torch.exp(sum(new[b][i] - old[b][i] for i in range(n)) / n)
        if a[b] > 0 and s > 1 + 4e-4 or a[b] < 0 and s < 1 - 3e-4:
            s = torch.full_like(s, 1 + 4e-4 if a[b] > 0 else 1 - 3e-4)
        losses.append(-s * a[b])
    return sum(losses) / len(lengths)


def cispo(new, old, ref, a, lengths):
    return -sum(min(math.exp(new[b][i].item() - old[b][i].item()), 1.28) * a[b] * new[b][i] for b, n in enumerate(lengths)
                for i in range(n)) / sum(lengths)


def dft(new, old, ref, a, lengths):
    return -sum(math.exp(new[b][i].item()) * new[b][i] for b, n in enumerate(lengths) for i in range(n)) / sum(lengths)


@pytest.mark.parametrize('formula', [grpo, gspo, cispo, dft], ids=lambda formula: formula.__name__)
def test_a_recipe_is_the_formula_of_its_paper(formula):
    h, w = case((B, S), seed=2)[0] * 0.3, case(seed=9)[1]
    rng = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, V, (B, S), generator=rng)
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).double()
    advantages = torch.tensor([[1.5], [-0.7], [0.4]], dtype=torch.float64)
    plain = leaf(h), leaf(w)
    lp = torch.log_softmax(plain[0] @ plain[1].t(), -1)
    new = [[lp[b, i, tokens[b, i]] for i in range(S)] for b in range(B)]
    drift = torch.randn(2, B, S, generator=rng, dtype=torch.float64) * 0.4  # some ratios are clipped, on both sides
    old, ref = (torch.stack([torch.stack(row) for row in new]).detach() + d for d in drift)
    want = formula(new, old, ref, advantages[:, 0].tolist(), LENGTHS)
    want.backward()
    ours = leaf(h), leaf(w)
    names = dict(torch=torch, ct=ct, hidden=ours[0], weight=ours[1], tokens=tokens, mask=mask, tp=None, advantages=advantages,
                 old_logp=old, ref_logp=ref)
    for code in codes()['ratio'], codes()[formula.__name__]:
        exec(compile(code, 'rl.md', 'exec'), names)
    got = names[formula.__name__]
    near(got.detach(), want.detach(), torch.float64, 'objective')
    got.backward()
    near(ours[0].grad, plain[0].grad, torch.float64, 'hidden')
    near(ours[1].grad, plain[1].grad, torch.float64, 'weight')
    assert formula is not grpo or H < V and (names['ratio'] > 1.2).any() and (names['ratio'] < 0.8).any()
