#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A layer of a hybrid model under context parallelism: attention over zigzag rows, then a short convolution and a scan over
contiguous ones.

usage: torchrun --nproc-per-node 4 examples/torch_hybrid/hybrid.py [--lengths 16,8,32] [--width 8] [--heads 4]

Packed sequences come cut zigzag, so that causal attention is as much work on each rank. The scan is a recurrence along the
sequence, for which each rank wants one interval of all rows. colobridge.torch.halo() changes the cut and brings the rows that the
convolution needs in front, and relayout() changes it back.
Outputs and all gradients are compared with those of the same layer on one rank, in plain PyTorch. Exit status 1: they differ.
"""
import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == '__main__':
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402


WIDTH = 4  # of the convolution: a row and the three before it


class Weights(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Parameter(torch.randn(width, 3 * width) / width ** 0.5)
        self.filter = torch.nn.Parameter(torch.randn(WIDTH, width) / WIDTH)  # of the convolution, by feature
        self.decay = torch.nn.Parameter(torch.rand(width))  # of the scan, by feature
        self.out = torch.nn.Parameter(torch.randn(width, width) / width ** 0.5)


def attend(q, k, v, q_at, k_at):
    """Causal attention of rows of the same sequence. q, k, v: [rows, heads, d]; q_at, k_at: (sequence, position) of rows."""
    allowed = (q_at[0][:, None] == k_at[0]) & (q_at[1][:, None] >= k_at[1])
    scores = torch.einsum('qhd,khd->hqk', q, k) / q.shape[-1] ** 0.5
    return torch.einsum('hqk,khd->qhd', scores.masked_fill(~allowed, float('-inf')).softmax(-1), v)


def convolve(pieces, filter):
    """Of pieces with WIDTH - 1 rows in front of their own: y[t] = sum of filter[k] x[t - WIDTH + 1 + k]."""
    return torch.cat([sum(filter[k] * p[k:len(p) - WIDTH + 1 + k] for k in range(WIDTH)) for p in pieces])


def scan(x, decay, cu):
    """h[t] = decay h[t - 1] + x[t] along each sequence of x [rows, width]."""
    parts = []
    for a, b in zip(cu, cu[1:]):
        h, rows = torch.zeros_like(decay), []
        for t in range(a, b):
            h = decay * h + x[t]
            rows.append(h)
        parts += rows
    return torch.stack(parts) if parts else x


def one_rank(w, x, cu):
    """The layer without context parallelism."""
    at = [torch.tensor([(q, p) for q, (a, b) in enumerate(zip(cu, cu[1:])) for p in range(b - a)]).T] * 2
    q, k, v = (t.view(len(x), w.heads, -1) for t in (x @ w.qkv).chunk(3, -1))
    x = x + attend(q, k, v, *at).flatten(1)
    rows = convolve([torch.cat([x.new_zeros(WIDTH - 1, x.shape[1]), x[a:b]]) for a, b in zip(cu, cu[1:])], w.filter)
    return x + scan(rows, w.decay, cu) @ w.out


def layer(w, x, cu, group):
    """The same of this rank's rows, which are cut zigzag over @group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    packing, spec = cb.Packing(cu), 'cp=%d' % size
    at, whole = (torch.tensor([p.sequence_ids(rank, spec), p.positions(rank, spec)]) for p in (packing, packing.with_split('whole')))
    q, k, v = (t.reshape(len(x), w.heads, -1) for t in (x @ w.qkv).chunk(3, -1))
    # Keys and values of all ranks; their gradients are summed over the ranks.
    k, v = (ct.relayout(t, cu, 'zigzag', 'whole', group=group) for t in (k, v))
    x = x + attend(q, k, v, at, whole).flatten(1)
    rows, edges = ct.halo(x, cu, WIDTH - 1, src='zigzag', split='contiguous', group=group)
    rows = convolve([rows[a:b] for a, b in zip(edges, edges[1:])], w.filter)
    rows = scan_of_ranks(rows, w.decay, packing.with_split('contiguous'), group)
    return x + ct.relayout(rows, cu, 'contiguous', 'zigzag', group=group) @ w.out


def scan_of_ranks(rows, decay, packing, group):
    """scan() of rows that lie on the ranks in one interval each."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    spec, share = 'cp=%d' % size, len(rows)
    cu = packing.cu_seqlens(rank, spec)
    alone = scan(rows, decay, cu)
    # One row per rank: where its last sequence is at its end. So these are one sequence of @size positions.
    ends = ct.relayout(alone[-1:], [0, size], 'block', 'whole', group=group)
    # What each rank's end has decayed to here, if the first sequence of this rank comes from there. Elsewhere it counts 0, so
    # that all ranks go back through ends.
    begun = rank - -(-packing.positions(rank, spec)[0] // share)  # the rank on which that sequence begins
    reach = torch.stack([decay ** (share * (rank - 1 - r)) if begun <= r < rank else decay * 0 for r in range(size)])
    before = (reach * ends).sum(0)
    steps = torch.arange(1, cu[1] + 1, dtype=rows.dtype).view(-1, 1)
    return torch.cat([alone[:cu[1]] + decay ** steps * before, alone[cu[1]:]])


def compared(group, lengths, width, heads):
    """The largest difference between the layer on all ranks and on one, of outputs and gradients."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(1)  # on each rank the same
    w, cu = Weights(width, heads).double(), [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    whole = torch.randn(cu[-1], width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(cu[-1], width, dtype=torch.float64)  # of each output in the loss
    y = one_rank(w, whole, cu)
    (y * weight).sum().backward()
    want = [y.detach(), whole.grad] + [p.grad for p in w.parameters()]
    w.zero_grad(set_to_none=True)
    packing, spec = cb.Packing(cu), 'cp=%d' % size
    mine = [cu[q] + p for q, p in zip(packing.sequence_ids(rank, spec), packing.positions(rank, spec))]
    x = whole.detach()[mine].requires_grad_()
    y = layer(w, x, cu, group)
    (y * weight[mine]).sum().backward()
    for p in w.parameters():  # replicated: each rank has the part of its own rows
        dist.all_reduce(p.grad, group=group)
    got = [y.detach(), x.grad] + [p.grad for p in w.parameters()]
    return max(((a - (b[mine] if i < 2 else b)).abs().max() / b.abs().max()).item() for i, (a, b) in enumerate(zip(got, want)))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('--lengths', default='16,8,32', help='positions of each sequence, multiples of twice the ranks')
    options.add_argument('--width', type=int, default=8)
    options.add_argument('--heads', type=int, default=4)
    o = options.parse_args()
    dist.init_process_group('gloo')
    worst = compared(dist.group.WORLD, [int(n) for n in o.lengths.split(',')], o.width, o.heads)
    if dist.get_rank() == 0:
        print('%d ranks against one, relative: outputs and gradients differ by %.1e at most' % (dist.get_world_size(), worst))
    ct.shutdown()
    dist.destroy_process_group()
    sys.exit(worst > 1e-12)  # fp64, sums of a few hundred terms in another order


if __name__ == '__main__':
    main()
