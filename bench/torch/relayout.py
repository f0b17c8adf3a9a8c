#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Another cut of packed sequences: the library against all_to_all_single with index_select, and against an all-gather.

usage: torchrun --nproc-per-node N bench/torch/relayout.py [--device cuda] [options]
       (COLOBRIDGE_LIBRARY=build/src)

[rows, features] of packed sequences, zigzag to block and back by gradients. In each repetition all ways run, one after the other, so
that ratios are of one run:

  library     ct.relayout(), with the tables of the call before
  all-to-all  rows sorted by rank (index_select), all_to_all_single, rows put in order (index_select); the indices were made
              before, on the device. All rows go through it, also those that stay
  all-gather  all rows on each rank, of which index_select takes its own; backward by reduce_scatter_tensor (gloo has none:
              all_reduce)
  copy        y.copy_(x), which is what a rank that keeps all its rows would need at least

Times are medians over repetitions of the slowest rank, in microseconds per call, forward and backward apart. Values of all ways
are compared, gradients, too: the program ends with 1 if they differ.
"""
import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402


def rows_of(packing, cu, size):
    """By rank: the indices, among all rows, of what it has."""
    spec = 'cp=%d' % size
    return [torch.tensor([cu[q] + p for q, p in zip(packing.sequence_ids(r, spec), packing.positions(r, spec))]) for r in range(size)]


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return plan.move(x, *plan.there)

    @staticmethod
    def backward(ctx, d_y):
        return ctx.plan.move(d_y, *ctx.plan.back), None


class Plan:
    """What a runtime writes by hand: which rows go to which rank, and where those that come belong."""

    def __init__(self, src, dst, device):
        me, size = dist.get_rank(), dist.get_world_size()
        at = [torch.full((sum(map(len, src)),), -1) for _ in range(2)]  # the rank that has each row
        for k, side in enumerate((src, dst)):
            for r in range(size):
                at[k][side[r]] = r
        self.there, self.back = (self.of(a, b, at[1 - k], me, size, device) for k, (a, b) in enumerate(((src, dst), (dst, src))))
        self.at_src, self.at_dst = src[me].to(device), dst[me].to(device)

    @staticmethod
    def of(src, dst, to, me, size, device):
        order = torch.argsort(to[src[me]], stable=True)
        sends = torch.bincount(to[src[me]], minlength=size).tolist()
        comes = [src[r][to[src[r]] == me] for r in range(size)]
        got = torch.cat(comes)
        where = torch.empty(len(to), dtype=torch.int64)
        where[got] = torch.arange(len(got))
        return order.to(device), sends, [len(c) for c in comes], where[dst[me]].to(device)

    @staticmethod
    def move(x, order, sends, comes, where):
        got = x.new_empty(sum(comes), x.shape[1])
        dist.all_to_all_single(got, x.index_select(0, order), comes, sends)
        return got.index_select(0, where)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, index):
        ctx.plan, ctx.rows = plan, len(x)
        whole = x.new_empty(len(x) * dist.get_world_size(), x.shape[1])
        dist.all_gather_into_tensor(whole, x)
        return whole.index_select(0, index[1])

    @staticmethod
    def backward(ctx, d_y):
        whole = d_y.new_zeros(len(d_y) * dist.get_world_size(), d_y.shape[1]).index_copy_(0, ctx.plan, d_y)
        if dist.get_backend() == 'nccl':
            mine = d_y.new_empty(ctx.rows, d_y.shape[1])
            dist.reduce_scatter_tensor(mine, whole)
            return mine, None, None
        dist.all_reduce(whole)
        return whole[ctx.rows * dist.get_rank():ctx.rows * (dist.get_rank() + 1)], None, None


def clock(o, fn):
    dist.barrier()
    if o.device.type == 'cuda':
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(o.calls):
        fn()
    if o.device.type == 'cuda':
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / o.calls * 1e6


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('--device', default='cpu')
    options.add_argument('--rows', type=int, default=16384, help='of all sequences together')
    options.add_argument('--sequences', type=int, default=8)
    options.add_argument('--features', type=int, default=1024)
    options.add_argument('--dtype', default='bfloat16')
    options.add_argument('--repetitions', type=int, default=15)
    options.add_argument('--calls', type=int, default=3, help='between two looks at the clock')
    o = options.parse_args()
    if o.device == 'cuda':
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
        o.device = 'cuda:%d' % torch.cuda.current_device()
    o.device = torch.device(o.device)
    dist.init_process_group('nccl' if o.device.type == 'cuda' else 'gloo')
    me, size = dist.get_rank(), dist.get_world_size()
    unit = 2 * size
    lengths = [max(o.rows // o.sequences // unit * unit * (1 + i % 3) // 2 // unit, 1) * unit for i in range(o.sequences)]
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    packing = cb.Packing(cu)
    src, dst = rows_of(packing, cu, size), rows_of(packing.with_split('block'), cu, size)
    plan = Plan(src, dst, o.device)
    # Rows of the gathered tensor, in which each rank's lie as it has them.
    at = torch.empty(cu[-1], dtype=torch.int64)
    at[torch.cat(src)] = torch.arange(cu[-1])
    taken = at[dst[me]].to(o.device)
    dtype = getattr(torch, o.dtype)
    g = torch.Generator().manual_seed(3)
    whole = torch.randn(cu[-1], o.features, generator=g).to(dtype)
    x, d_y = whole[src[me]].to(o.device).requires_grad_(), whole.flip(0)[dst[me]].to(o.device)
    table = torch.tensor(cu, device=o.device)  # as a model has it
    ways = {'library': lambda: ct.relayout(x, table, 'zigzag', 'block', group=dist.group.WORLD),
            'all-to-all': lambda: AllToAll.apply(x, plan), 'all-gather': lambda: AllGather.apply(x, taken, (None, taken))}
    differ, times = False, {name: ([], []) for name in (*ways, 'copy')}
    for name, way in ways.items():
        x.grad = None
        y = way()
        y.backward(d_y)
        differ |= not (torch.equal(y.cpu(), whole[dst[me]]) and torch.equal(x.grad.cpu(), whole.flip(0)[src[me]]))
    y = torch.empty_like(x.detach())
    for _ in range(o.repetitions):
        for name, way in ways.items():
            times[name][0].append(clock(o, way))
            made = way()
            times[name][1].append(clock(o, lambda: torch.autograd.grad(made, x, d_y, retain_graph=True)))
        for side in times['copy']:
            side.append(clock(o, lambda: y.copy_(x.detach())))
    said = torch.tensor([[times[name][k] for k in range(2)] for name in times], dtype=torch.float64, device=o.device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    wrong = torch.tensor([float(differ)], device=o.device)
    dist.all_reduce(wrong)
    if me == 0:
        print('%d ranks, %d rows in %d sequences, %d features of %s, %s: us per call, forward / backward' % (
            size, cu[-1], o.sequences, o.features, o.dtype, o.device.type))
        medians = [[statistics.median(t.tolist()) for t in row] for row in said]
        for name, (forward, backward) in zip(times, medians):
            print('%-11s %9.0f / %9.0f   %.2f times the library' % (
                name, forward, backward, (forward + backward) / sum(medians[0])))
        print('values %s' % ('DIFFER' if wrong.item() else 'are the same, gradients, too'))
    ct.shutdown()
    dist.destroy_process_group()
    sys.exit(bool(wrong.item()))


if __name__ == '__main__':
    main()
