#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A product of matrices between start and finish of a bridge, against both one after the other.

usage: torchrun --nproc-per-node N bench/torch/overlap.py [options]
       (COLOBRIDGE_LIBRARY=build/src)

dp=N -> cp=2, .., sharded output, B 16, S 8192, H 4096, bf16. For each transport the size of the product is set so that it
takes about as long as the bridge. In each repetition all ways run, one after the other, so that ratios are of one run:

  bridge    carry(x), and its gradient
  product   the product alone
  in order  both, one after the other
  halves    start, the product, finish; backward likewise
  spared    the same, and the product leaves --spare multiprocessors free

cuBLAS gives each multiprocessor of a Hopper GPU a fixed part of a product. If the bridge holds some of them, their parts come
after the others, and the product takes twice as long. So *spared* tells cuBLASLt how many it may use, by PyTorch's
experimental setting; it should be as many as the bridge's kernel holds (COLO_PEER_BLOCKS, NCCL_MAX_CTAS).

Times are medians over repetitions of the slowest rank, of calls back to back. halves / longest and spared / longest are what
the step takes by the longer of bridge and product: 1 is full overlap. Values are compared with those of the calls without
tickets. On CPU (gloo) it is a smoke test in f32: start does the work there. Give it small sizes by options.
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
import colobridge.torch as ct  # noqa: E402


def clock(o, fn):
    """Microseconds of one of o.calls calls that are enqueued back to back."""
    dist.barrier()
    if o.device.type == 'cuda':
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(o.calls):
            fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / o.calls
    begin = time.perf_counter()
    for _ in range(o.calls):
        fn()
    return (time.perf_counter() - begin) * 1e6 / o.calls


def medians(o, ways):
    """By name: the median over repetitions of the slowest rank's time."""
    times = {name: [] for name in ways}
    for repetition in range(o.repetitions + 1):
        for name, fn in ways.items():
            mine = torch.tensor([clock(o, fn)], device=o.device)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if repetition:  # the first one warms up
                times[name].append(mine.item())
    return {name: statistics.median(values) for name, values in times.items()}


def ways_of(carry, x, a, b, c, backward, spare):
    """What each way does, forward or backward. Backward of y alone: a graph that is kept."""
    state = {}

    def product():
        torch.mm(a, b, out=c)

    def spared(fn):
        def call():
            torch._C._set_sm_carveout_experimental(spare)
            fn()
            torch._C._set_sm_carveout_experimental(None)
        return call
    if not backward:
        def bridge():
            with torch.no_grad():
                state['y'] = carry(x)

        def halves():
            with torch.no_grad():
                begun = carry.start(x)
                product()
                state['y'] = begun.finish()
    else:
        leaf = x.detach().requires_grad_()
        y = carry(leaf)
        d_y = torch.randn_like(y)

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, one):
                return one.clone()

            @staticmethod
            def backward(ctx, d):
                product()
                return d
        one = torch.zeros((), device=x.device, requires_grad=True)
        begun = carry.start(leaf)
        between = Product.apply(one)
        z = begun.finish()

        for made in (y, z):  # of which backward needs the shape: their memory is what d_x goes to
            made.data = made.new_empty(1).expand(made.shape)

        def bridge():
            state.clear()
            state['y'], = torch.autograd.grad(y, leaf, d_y, retain_graph=True)

        def halves():
            state.clear()
            state['y'], _ = torch.autograd.grad((z, between), (leaf, one), (d_y, torch.ones_like(between)),
                                                retain_graph=True)

    def in_order():
        bridge()
        product()
    ways = {'bridge': bridge, 'product': product, 'in order': in_order, 'halves': halves}
    return state, dict(ways, spared=spared(halves)) if spare else ways


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--shape', type=int, nargs=3, default=(16, 8192, 4096), metavar=('B', 'S', 'H'))
    p.add_argument('--transports', nargs='+', default=['nccl', 'auto'])
    p.add_argument('--product', type=int, default=8192, help='rows and columns of the product, before its length is set')
    p.add_argument('--spare', type=int, default=32 if torch.cuda.is_available() else 0)
    p.add_argument('--repetitions', type=int, default=7)
    p.add_argument('--calls', type=int, default=10)
    o = p.parse_args()
    gpu = torch.cuda.is_available()
    o.device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if gpu else torch.device('cpu')
    if gpu:
        torch.cuda.set_device(o.device)
        torch.backends.cuda.preferred_blas_library('cublaslt')
    dist.init_process_group('nccl' if gpu else 'gloo')
    n, rank, dtype = dist.get_world_size(), dist.get_rank(), torch.bfloat16 if gpu else torch.float32
    dst = 'cp=2,dp=%d' % (n // 2) if n > 1 else 'dp=1'
    if rank == 0:
        print('%s, %d ranks, dp=%d -> %s, B %d S %d H %d, %s; us' % (
            torch.cuda.get_device_name() if gpu else 'CPU', n, n, dst, *o.shape, dtype))
        names = ['bridge', 'product', 'in order', 'halves'] + ['spared'] * bool(o.spare)
        print('| transport | pass | %s | %s | same bits |' % (' | '.join(names), ' | '.join(n + ' / longest' for n in names[3:])))
        print('|---|---|' + '---:|' * (2 * len(names) - 3) + '---|')
    torch.manual_seed(rank)
    x = torch.randn(o.shape[0] // n, *o.shape[1:], device=o.device).to(dtype)
    for transport in o.transports if gpu else ['nccl']:
        carry = ct.Bridge('dp=%d' % n, dst, group=dist.group.WORLD, output='sharded', transport=transport)
        for backward in (False, True):
            # As long as the bridge: the product's inner length is in proportion.
            length = 1024 if gpu else 64
            for _ in range(2):
                a, b = (torch.randn(*s, device=o.device).to(dtype) for s in ((o.product, length), (length, o.product)))
                state, ways = ways_of(carry, x, a, b, torch.empty(o.product, o.product, device=o.device, dtype=dtype), backward,
                                      o.spare)
                t = medians(o, {name: ways[name] for name in ('bridge', 'product')})
                length = max(64, int(length * t['bridge'] / t['product']) // 64 * 64)
            ways['bridge']()
            want = state['y'].clone()
            ways['halves']()
            same = torch.tensor([int(torch.equal(want, state['y']))], device=o.device)
            dist.all_reduce(same, op=dist.ReduceOp.MIN)
            t = medians(o, ways)
            if rank == 0:
                shares = [t[name] / max(t['bridge'], t['product']) for name in list(ways)[3:]]
                print('| %s | %s | %s | %s | %s |' % (
                    transport, ('forward', 'backward')[backward], ' | '.join('%.0f' % t[name] for name in ways),
                    ' | '.join('%.2f' % share for share in shares), ('no', 'yes')[same.item()]), flush=True)
        carry.destroy()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
