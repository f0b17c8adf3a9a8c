# SPDX-License-Identifier: Apache-2.0
"""A small lm_head, hidden states and targets, and what PyTorch's product and log_softmax make of them."""
import torch

V, H = 23, 8
CUTS = [0, 7, 7, 20, V]  # uneven, one is empty


def case(shape=(3, 5), dtype=torch.float64, seed=0):
    """hidden, weight, bias, targets (some ignored), upstream gradients of logp and entropy"""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *n: torch.randn(*n, generator=rng, dtype=torch.float64)  # noqa: E731
    h, w, b = (t.to(dtype) for t in (draw(*shape, H), draw(V, H), draw(V)))
    t = torch.randint(0, V, shape, generator=rng)
    t.reshape(-1)[1::4] = -100
    return h, w, b, t, draw(2, *shape)


def plain(h, w, b, t, softcap=None, temperature=1.0, scale=1.0):
    """logp and entropy by PyTorch, f64"""
    x = scale * (h.double() @ w.double().t() + (0 if b is None else b.double()))
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    lp = torch.log_softmax(x / temperature, -1)
    nothing = torch.zeros((), dtype=torch.float64)
    logp = torch.where(t != -100, lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1), nothing)
    return logp, torch.where(t != -100, -(lp.exp() * lp).sum(-1), nothing)


def expected(h, w, b, t, g, **options):
    """(logp, entropy, d_h, d_w, d_b) of sum(g * outputs)"""
    leaves = [None if x is None else x.double().clone().requires_grad_() for x in (h, w, b)]
    out = plain(*leaves, t, **options)
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    return (*(o.detach() for o in out), *(None if x is None else x.grad for x in leaves))


def near(got, want, dtype, what):
    # f32: sums of at most 23 * 15 products of values below 10, some 400 * 10 * 2^-24 ~ 2.4e-4 of
    # the largest; bf16 rounds each gradient once, and inputs are rounded before both sides see them.
    bound = {torch.float64: 1e-12, torch.float32: 3e-4, torch.bfloat16: 2e-2}[dtype]
    size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    assert got.shape == want.shape, what
    assert not want.numel() or float((got.double() - want).abs().max()) <= bound * size, what


def leaf(t):
    return None if t is None else t.clone().requires_grad_()
