#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over a recorded support compared with those over the vocabulary, on one GPU.

    bench/torch/support.py [--tokens 4096] [--vocabulary 151936] [--ids 64,512,4096]

Medians of 20 runs, between events of the stream. The lists are random and in ascending order already, as a sampler
keeps them. "read" is what the full forward must read, in the same run.
"""
import argparse
import statistics

import torch

import colobridge.torch as ct


def median_us(call, runs=20):
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--vocabulary', type=int, default=151936)
    parser.add_argument('--ids', default='64,512,4096')
    args = parser.parse_args()
    z = torch.randn(args.tokens, args.vocabulary, device='cuda', dtype=torch.bfloat16)
    t = torch.randint(0, args.vocabulary, (args.tokens,), device='cuda')
    print('%s, PyTorch %s, %d tokens, vocabulary %d, bf16' % (
        torch.cuda.get_device_name(), torch.__version__, args.tokens, args.vocabulary))
    print('| ids per token | forward, us | of the full forward | forward and backward, us | of the full |')
    print('|---:|---:|---:|---:|---:|')
    leaf = z.detach().requires_grad_()

    def both(**more):
        leaf.grad = None
        ct.logprob(leaf, t, **more).sum().backward()
    with torch.no_grad():
        full = median_us(lambda: ct.logprob(z, t))
    full_both = median_us(both)
    print('| all | %.0f | 1 | %.0f | 1 |' % (full, full_both))
    for width in map(int, args.ids.split(',')):
        ids = torch.randint(0, args.vocabulary, (args.tokens, width), device='cuda').sort(1)[0]
        support = ct.Support(ids, ascending=True)
        with torch.no_grad():
            some = median_us(lambda: ct.logprob(z, t, support=support))
        some_both = median_us(lambda: both(support=support))
        print('| %d | %.0f | %.3f | %.0f | %.3f |' % (width, some, some / full, some_both, some_both / full_both))


if __name__ == '__main__':
    main()
