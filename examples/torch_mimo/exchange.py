# SPDX-License-Identifier: Apache-2.0
"""Bridge and loss, twice: by the library, and as they are written on torch.distributed.

bridge(x): [B / dp of the encoder, 16, H] -> [B / dp of the language model, 16, H]; backward adds what
the ranks of a cp group say about a sample's rows, and hands every encoder rank its samples' gradient.
loss(hidden, head, targets): the mean over all bytes of all captions, on every rank.
"""
import torch
import torch.distributed as dist

import colobridge.torch as ct
from ranks import copy_to, reduce_from


class Library:
    """colobridge.torch: bridge() and, of logits, nll()."""

    def __init__(self, src, dst):
        self.carry = ct.Bridge(src.spec, dst.spec, group=dist.group.WORLD)
        self.tp, self.tokens = dst.group('tp'), dst.group('cp', 'dp')

    def bridge(self, x):
        return self.carry(x)

    def loss(self, hidden, head, targets):
        logits = torch.nn.functional.linear(copy_to(hidden, self.tp), head)
        return ct.nll(logits, targets, tp_group=self.tp, reduce_group=self.tokens).loss


class Hidden(Library):
    """The same, with the loss straight from hidden states: linear_nll()."""

    def loss(self, hidden, head, targets):
        return ct.linear_nll(hidden, head, targets, tp_group=self.tp,
                             reduce_group=self.tokens).loss


class Plain:
    """All-gather and narrow; scatter into zeros and all-reduce. Three all-reduces for the loss."""

    def __init__(self, src, dst):
        self.src, self.dst = src, dst
        self.tp, self.tokens = dst.group('tp'), dst.group('cp', 'dp')
        # a rank of each dp replica of the encoder
        self.sources = [next(r for r in range(dist.get_world_size())
                             if src.grid.coords(r).get('dp', 0) == d)
                        for d in range(src.extent('dp'))]

    def bridge(self, x):
        return _Everything.apply(x, self)

    def loss(self, hidden, head, targets):
        x = torch.nn.functional.linear(copy_to(hidden, self.tp), head)
        top = x.detach().max(-1).values
        if self.tp is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.tp)
        x = x - top.unsqueeze(-1)
        total = reduce_from(x.exp().sum(-1), self.tp)
        column = targets - self.dst.coord('tp') * head.shape[0]
        here = (column >= 0) & (column < head.shape[0])
        at = x.gather(-1, column.clamp(0, head.shape[0] - 1).unsqueeze(-1)).squeeze(-1)
        nothing = torch.zeros_like(at)
        at = reduce_from(torch.where(here, at, nothing), self.tp)
        counts = targets != -100
        num = torch.where(counts, total.log() - at, nothing).sum()
        den = counts.sum().to(num.dtype)
        if self.tokens is not None:
            dist.all_reduce(den, group=self.tokens)
        return reduce_from(num, self.tokens) / den


class _Everything(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plain):
        ctx.plain, ctx.each = plain, x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        whole = torch.cat([parts[r] for r in plain.sources])
        ctx.samples = whole.shape[0]
        mine = ctx.samples // plain.dst.extent('dp')
        return whole.narrow(0, plain.dst.coord('dp') * mine, mine).clone()

    @staticmethod
    def backward(ctx, g):
        plain, mine = ctx.plain, g.shape[0]
        whole = g.new_zeros((ctx.samples,) + g.shape[1:])
        if plain.dst.coord('tp') == 0:  # all ranks of a tp group say the same
            whole.narrow(0, plain.dst.coord('dp') * mine, mine).copy_(g)
        dist.all_reduce(whole)
        return whole.narrow(0, plain.src.coord('dp') * ctx.each, ctx.each).clone(), None


KINDS = {'library': Library, 'hidden': Hidden, 'plain': Plain}
