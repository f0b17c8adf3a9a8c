# SPDX-License-Identifier: Apache-2.0
"""What the cases share: which rank this is, small inputs, and what plain PyTorch makes of them.

Expected values come from the same whole tensors on every rank, by plain PyTorch in float64."""
import os

import torch
import torch.distributed as dist

from colobridge import Grid

V, H = 515, 64


class Skip(Exception):
    pass


def size():
    return dist.get_world_size()


def me():
    return dist.get_rank()


def cut(n):
    """[lo, hi) of this rank; uneven"""
    each = -(-n // size())
    return min(me() * each, n), min((me() + 1) * each, n)


def leaf(t):
    return t.detach().clone().requires_grad_()


def near(got, want, bound, what):
    got, want = got.detach(), want.detach()
    top = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    off = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert got.shape == want.shape and off <= bound * top, '%s: off by %g of %g' % (what, off, top)


def logits_case(tokens=96, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z = (torch.randn(tokens, V, generator=rng, dtype=torch.float64) * 3).to(dtype).cuda()
    t = torch.randint(0, V, (tokens,), generator=rng)
    t[1::7] = -100
    g = torch.randn(2, tokens, generator=rng, dtype=torch.float64)
    return z, t.cuda(), g.cuda()


def linear_case(tokens=96, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, H, generator=rng, dtype=torch.float64).to(dtype).cuda()
    w = torch.randn(V, H, generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    return h, (w * 0.3).to(dtype).cuda(), logits_case(tokens)[1]


CAPPED = {'softcap': 5.0, 'scale': 1.3, 'temperature': 0.7}


def plain(x, t, softcap=None, scale=1.0, temperature=1.0):
    x = scale * x
    x = (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature
    lp = torch.log_softmax(x, -1)
    keep = t != -100
    nothing = torch.zeros((), dtype=x.dtype, device=x.device)
    logp = torch.where(keep, lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1), nothing)
    return logp, torch.where(keep, -(lp.exp() * lp).sum(-1), nothing)


# ---- layouts and values of a bridge ----

def layouts():
    n = size()
    if n == 1:
        return [('tp=1,dp=1', 'tp=1,dp=1')]
    return [('tp=1,dp=%d' % n, 'tp=%d,dp=1' % n), ('tp=%d,dp=1' % n, 'tp=1,dp=%d' % n),
            ('tp=1,dp=%d' % n, 'tp=1,cp=2,dp=%d' % (n // 2)), ('tp=2,dp=%d' % (n // 2),) * 2]


def samples_of(spec, whole):
    grid = Grid(spec)
    dp, at = grid.extent('dp'), grid.coords(me()).get('dp', 0)
    each = whole.shape[0] // dp
    return whole[at * each:(at + 1) * each]


def coded(dtype, n=8, rows=16, width=32):
    """Values that say where they come from, exact in every dtype of 8 bits: each 1 of 251 codes"""
    i = torch.arange(n * rows * width, device='cuda').view(n, rows, width)
    return ((i * 7 + i // 251) % 251).to(dtype)


def pools():
    """Do outputs lie in a pool of PyTorch's, by default?"""
    return transports()[1][1] and hasattr(torch.cuda, 'use_mem_pool') and \
        'expandable_segments:True' not in os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')


def transports():
    """Options of a bridge, and whether peers write into its memory then."""
    peers = size() > 1 and os.environ.get('COLO_TRANSPORT', 'auto') != 'nccl'
    return [({'transport': 'nccl'}, False), ({}, peers), ({'buffers': 2}, peers)]
